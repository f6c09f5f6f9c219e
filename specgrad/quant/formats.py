"""Number formats of weights, activations and caches as uint8 codes: e4m3, e2m1 (two a byte), e8m0; rounding to bf16.

All of it is tinygrad arithmetic on the bits of float32. tinygrad's own fp8 casts flush subnormals on the CPU and vanish
where two of them meet in one kernel; integers do neither. The rules are those of DeepSeek's inference/kernel.py and of
OCP Microscaling Formats v1.0. Knows no model."""
import struct

from tinygrad import Tensor, dtypes

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_FLOOR, E2M1_FLOOR = 1e-4, 6 * 2.0 ** -126             # least amax of a group: its scale then stays a normal number
_ABS, _NAN, _INF = 0x7fffffff, 0x7fc00000, 0x7f800000      # of a float32's bits

def _bits(x: float) -> int: return struct.unpack("<i", struct.pack("<f", x))[0]

def _ints(x: Tensor) -> Tensor: return x.cast(dtypes.float32).bitcast(dtypes.int32)

def _floats(bits: Tensor) -> Tensor: return bits.cast(dtypes.int32).bitcast(dtypes.float32)

# ------------------------------------------------------------------------------------------------ codes and values
def _encode(x: Tensor, bias: int, mantissa: int, largest: float) -> Tensor:
  """float32 -> int32 codes without sign: nearest, ties to the even code, never above `largest`.

  The significand, a 24-bit integer, loses 23 - mantissa bits, and one more for each power of two below the least normal
  value; a carry out of it moves on to the next exponent by itself. From 25 bits on nothing is left."""
  a, most, least = _ints(x) & _ABS, _bits(largest), 128 - bias
  a = (a < most).where(a, most)
  exponent = a >> 23
  drop = 23 - mantissa + least - exponent.clip(least - 2 - mantissa, least)
  whole = (a & 0x7fffff) | 0x800000
  rounded = (whole + (Tensor(1, dtype=dtypes.int32, device=x.device) << (drop - 1)) - 1 + ((whole >> drop) & 1)) >> drop
  return rounded + ((exponent.maximum(least) - least) << mantissa)

def _decode(codes: Tensor, bias: int, mantissa: int) -> Tensor:
  """int32 codes without sign -> float32, exact."""
  normal = _floats((codes << (23 - mantissa)) + ((127 - bias) << 23))
  return (codes < 1 << mantissa).where(codes.cast(dtypes.float32) * 2.0 ** (1 - bias - mantissa), normal)

def encode_e4m3(x: Tensor) -> Tensor:
  """float32 -> uint8: nearest, ties to even, saturating at +-448 (infinity too); zero keeps its sign, NaN is 0x7f."""
  u = _ints(x)
  code = _encode(x, 7, 3, E4M3_MAX) + (u < 0).where(0x80, 0)
  return ((u & _ABS) > _INF).where(0x7f, code).cast(dtypes.uint8)

def decode_e4m3(codes: Tensor) -> Tensor:
  """uint8 -> float32, exact; 0x7f and 0xff are NaN."""
  c = codes.cast(dtypes.int32)
  bits = _decode(c & 0x7f, 7, 3).bitcast(dtypes.int32) | (c >> 7) << 31
  return _floats(((c & 0x7f) == 0x7f).where(_NAN, bits))

def encode_e2m1(x: Tensor) -> Tensor:
  """float32 -> uint8 0..15: nearest, ties to even codes, saturating at +-6; zero keeps its sign, NaN is 6 (code 7)."""
  u = _ints(x)
  code = _encode(x, 1, 1, E2M1_MAX) + (u < 0).where(8, 0)
  return ((u & _ABS) > _INF).where(7, code).cast(dtypes.uint8)

def decode_e2m1(codes: Tensor) -> Tensor:
  """uint8 0..15 -> float32, exact."""
  c = codes.cast(dtypes.int32)
  return _floats(_decode(c & 7, 1, 1).bitcast(dtypes.int32) | (c >> 3) << 31)

def pack_e2m1(codes: Tensor) -> Tensor:
  """uint8 0..15 (..., K) -> uint8 (..., K/2): the low nibble holds the even column."""
  pair = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
  return pair[..., 0] | (pair[..., 1] << 4)

def unpack_e2m1(packed: Tensor) -> Tensor:
  """uint8 (..., K/2) -> float32 (..., K), exact."""
  return decode_e2m1(Tensor.stack(packed & 15, packed >> 4, dim=-1).flatten(-2))

def decode_e8m0(codes: Tensor) -> Tensor:
  """uint8 -> float32 2^(code - 127), exact; 0 is a subnormal number of float32, 255 is NaN."""
  c = codes.cast(dtypes.int32)
  return _floats((c == 0).where(0x400000, (c == 255).where(_NAN, c << 23)))

def bf16(x: Tensor) -> Tensor:
  """float32 -> float32 rounded to what bfloat16 holds, ties to even; infinity and NaN stay."""
  u = _ints(x)
  nan = (u & _ABS) > _INF
  return _floats(nan.where(u | 0x400000, u + 0x7fff + ((u >> 16) & 1)) & -0x10000)

# ------------------------------------------------------------------------------------------------ groups with a scale
def scale_exponent(amax: Tensor, largest: float) -> Tensor:
  """float32 >= 0 -> uint8: the e8m0 code of 2^ceil(log2(amax / largest)), the least scale under which amax still fits.

  Exponents subtracted, mantissas compared: right for every float32, and the same as the official product with
  float32(1 / largest) for 448 and 6. Infinity and NaN give 255, so that nothing of such a group passes for a number."""
  assert largest >= 2                                      # else subnormal amax would need more than a comparison
  a, top = _ints(amax) & _ABS, _bits(largest)
  code = (a >> 23) - (top >> 23) + 127 + ((a & 0x7fffff) > (top & 0x7fffff)).cast(dtypes.int32)
  return (a < _INF).where(code.maximum(0), 255).cast(dtypes.uint8)

def _grouped(x: Tensor, group: int, floor: float, largest: float) -> tuple[Tensor, Tensor]:
  """float32 (..., K) -> the same divided by its group's scale (..., K/group, group), scales uint8 (..., K/group).

  amax is an integer maximum of the bits without sign: the same order as of the values, and NaN is the largest."""
  if x.shape[-1] % group: raise ValueError(f"columns={x.shape[-1]}, want a multiple of the group of {group}")
  x = x.cast(dtypes.float32).contiguous().reshape(*x.shape[:-1], x.shape[-1] // group, group)
  amax = (_ints(x) & _ABS).max(-1).maximum(_bits(floor))
  scale = scale_exponent(_floats(amax), largest).contiguous()
  inverse = decode_e8m0((scale == 255).where(255, 254 - scale))  # a power of two: the product is the quotient
  return x * inverse.unsqueeze(-1), scale

def quantise_e4m3(x: Tensor, group: int = 128, floor: float = E4M3_FLOOR) -> tuple[Tensor, Tensor]:
  """float32 (..., K) -> codes uint8 (..., K), scales uint8 e8m0 (..., K/group), one for each row and group of columns.

  A NaN or infinity makes its whole group NaN. Source: act_quant_kernel with scale_fmt ue8m0."""
  y, scale = _grouped(x, group, floor, E4M3_MAX)
  return encode_e4m3(y).reshape(x.shape).contiguous(), scale

def _scaled(values: Tensor, scale: Tensor) -> Tensor:
  groups = values.reshape(*scale.shape, values.shape[-1] // scale.shape[-1])
  return (groups * decode_e8m0(scale).unsqueeze(-1)).reshape(values.shape)

def dequantise_e4m3(codes: Tensor, scale: Tensor) -> Tensor:
  """uint8 (..., K), uint8 e8m0 (..., K/group) -> float32 (..., K), exact, and exact in bfloat16."""
  return _scaled(decode_e4m3(codes), scale)

def roundtrip_e4m3(x: Tensor, group: int = 128, floor: float = E4M3_FLOOR) -> Tensor:
  """float32 (..., K) -> float32 (..., K): quantised and back."""
  return dequantise_e4m3(*quantise_e4m3(x, group, floor)).contiguous()

def quantise_e2m1(x: Tensor, group: int = 32, floor: float = E2M1_FLOOR) -> tuple[Tensor, Tensor]:
  """float32 (..., K) -> packed uint8 (..., K/2), scales uint8 e8m0 (..., K/group). Source: fp4_act_quant_kernel.

  e2m1 has no NaN: the scale 255 of a group with NaN or infinity carries it."""
  y, scale = _grouped(x, group, floor, E2M1_MAX)
  return pack_e2m1(encode_e2m1(y).reshape(x.shape)).contiguous(), scale

def dequantise_e2m1(packed: Tensor, scale: Tensor) -> Tensor:
  """packed uint8 (..., K/2), uint8 e8m0 (..., K/group) -> float32 (..., K), exact, and exact in bfloat16."""
  return _scaled(unpack_e2m1(packed), scale)

def roundtrip_e2m1(x: Tensor, group: int = 32, floor: float = E2M1_FLOOR) -> Tensor:
  """float32 (..., K) -> float32 (..., K): quantised and back."""
  return dequantise_e2m1(*quantise_e2m1(x, group, floor)).contiguous()

# ------------------------------------------------------------------------------------------------ rotation
def hadamard(x: Tensor) -> Tensor:
  """float32 (..., n) -> (..., n), n a power of two: times Sylvester's H[i, j] = (-1)^popcount(i & j), over sqrt(n).

  Butterflies over neighbours 1, 2, 4, ... apart; every second stage is kept, as unkept ones double the work."""
  n, y = x.shape[-1], x.cast(dtypes.float32)
  if n & (n - 1): raise ValueError(f"columns={n}, want a power of two")
  for i in range(n.bit_length() - 1):
    pair = y.reshape(*x.shape[:-1], n >> (i + 1), 2, 1 << i)
    y = Tensor.stack(pair[..., 0, :] + pair[..., 1, :], pair[..., 0, :] - pair[..., 1, :], dim=-2).reshape(x.shape)
    if i % 2: y = y.contiguous()
  return (y * n ** -0.5).contiguous()
