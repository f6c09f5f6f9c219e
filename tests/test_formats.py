"""Number formats: every code both ways, rounding against ml_dtypes, scales right at every power of two, DeepSeek's own
outputs bit for bit; alone, inside larger kernels and in a captured graph."""
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tinygrad import Tensor, TinyJit

from specgrad.quant import formats

Array = np.ndarray
CODES = np.arange(256, dtype=np.uint8)
E4M3: tuple[Any, ...] = (formats.encode_e4m3, formats.decode_e4m3, ml_dtypes.float8_e4m3fn, 448, 0x7f)
E2M1: tuple[Any, ...] = (formats.encode_e2m1, formats.decode_e2m1, ml_dtypes.float4_e2m1fn, 6, 7)
KINDS = pytest.mark.parametrize("kind", [E4M3, E2M1], ids=["e4m3", "e2m1"])
DEVICES = pytest.mark.parametrize("device", ["CPU", "PYTHON"])  # PYTHON: tinygrad's own interpreter, no compiler at all

def bits(x: Array) -> Array: return x.view(np.uint32)

def same(got: Array, want: Array) -> None:
  """Equal bits, except that any NaN equals any other."""
  assert got.shape == want.shape and got.dtype == want.dtype == np.float32
  assert ((bits(got) == bits(want)) | (np.isnan(got) & np.isnan(want))).all()

def encoded(x: Array, kind: tuple[Any, ...]) -> Array:
  _, _, dtype, largest, nan = kind
  with np.errstate(all="ignore"): codes = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
  return np.where(np.isnan(x), np.uint8(nan), codes)

def edges(kind: tuple[Any, ...]) -> Array:
  """Every value, every middle between two, and the float32 on both sides of each; beyond the largest; not numbers."""
  codes = CODES if kind is E4M3 else CODES[:16]
  values = codes.view(kind[2]).astype(np.float32)
  values = np.unique(values[np.isfinite(values)])
  extra = np.float32([0.0, -0.0, 2**-149, 2**-126, kind[3] * 1.5])
  points = np.concatenate([values, (values[1:] + values[:-1]) / 2, extra])
  points = np.concatenate([points, *(np.nextafter(points, np.float32(s)) for s in (-math.inf, math.inf))])
  return np.concatenate([points, np.float32([math.inf, -math.inf, math.nan, -math.nan, 3.4e38, -3.4e38])])

# ------------------------------------------------------------------------------------------------ codes
@DEVICES
def test_every_code_decodes(device: str) -> None:
  for decode, codes, dtype in ((formats.decode_e4m3, CODES, ml_dtypes.float8_e4m3fn),
                               (formats.decode_e8m0, CODES, ml_dtypes.float8_e8m0fnu),
                               (formats.decode_e2m1, CODES[:16], ml_dtypes.float4_e2m1fn)):
    same(decode(Tensor(codes, device=device)).numpy(), codes.view(dtype).astype(np.float32))

def test_every_e8m0_code_is_its_power_of_two() -> None:
  got = formats.decode_e8m0(Tensor(CODES)).numpy()
  assert [Fraction(float(v)) for v in got[:255]] == [Fraction(2) ** (c - 127) for c in range(255)]
  assert np.isnan(got[255])

@DEVICES
@KINDS
def test_every_code_comes_back(kind: tuple[Any, ...], device: str) -> None:
  codes = CODES if kind is E4M3 else CODES[:16]
  got = kind[0](kind[1](Tensor(codes, device=device))).numpy()
  assert (got == np.where((codes & 127) == 127, 0x7f, codes)).all()

@DEVICES
@KINDS
def test_edges_round_as_they_should(kind: tuple[Any, ...], device: str) -> None:
  x = edges(kind)
  assert (kind[0](Tensor(x, device=device)).numpy() == encoded(x, kind)).all()

@KINDS
def test_every_float16_and_a_million_float32(kind: tuple[Any, ...]) -> None:
  halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
  floats = np.random.default_rng(1).integers(0, 2**32, 10**6, np.uint32).view(np.float32)
  near = np.random.default_rng(2).standard_normal(10**6, np.float32) * kind[3] / 3
  for x in (halves, floats, near): assert (kind[0](Tensor(x)).numpy() == encoded(x, kind)).all()

def test_ties_go_to_the_even_code() -> None:
  """Named by DeepSeek's kernel: 2.5 -> 2, 5 -> 4, 0.25 -> 0, 0.75 -> 1, -3.5 -> -4; a negative trifle is -0."""
  x = np.float32([2.5, 5, 0.25, 0.75, -3.5, 1.25, 1.75, -0.25, -1e-30, 7, -1e9])
  got = formats.decode_e2m1(formats.encode_e2m1(Tensor(x))).numpy()
  same(got, np.float32([2, 4, 0, 1, -4, 1, 2, -0.0, -0.0, 6, -6]))

@KINDS
def test_nothing_is_lost_inside_a_larger_kernel(kind: tuple[Any, ...]) -> None:
  """Product, rounding and a use of the result in one kernel, captured: as exact as alone. Casts would cancel there."""
  encode, decode, dtype, *_ = kind
  def f(x: Tensor, y: Tensor) -> Tensor: return (decode(encode(x * y)) * 2 + 1).contiguous()
  captured = TinyJit(lambda x, y: f(x, y).realize())
  for seed in range(4):
    x, y = (np.random.default_rng([seed, i]).standard_normal((64, 256), np.float32) * kind[3]**0.5 / 2 for i in (0, 1))
    want = encoded(x * y, kind).view(dtype).astype(np.float32) * 2 + 1
    same(f(Tensor(x), Tensor(y)).numpy(), want)
    same(captured(Tensor(x).realize(), Tensor(y).realize()).numpy(), want)

def test_packed_pairs_have_the_even_column_low() -> None:
  codes = np.random.default_rng(1).integers(0, 16, (3, 5, 64), np.uint8)
  packed = formats.pack_e2m1(Tensor(codes)).numpy()
  assert (packed == codes[..., ::2] | codes[..., 1::2] << 4).all()
  same(formats.unpack_e2m1(Tensor(packed)).numpy(), codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
  assert formats.unpack_e2m1(Tensor([[0x72]]).cast("uint8")).tolist() == [[1.0, 6.0]]

@DEVICES
def test_bf16_rounds_and_never_folds_away(device: str) -> None:
  rng = np.random.default_rng(1)
  x = rng.integers(0, 2**32, 10**6 if device == "CPU" else 5000, np.uint32)
  x[:4096] = x[:4096] & 0xffff0000 | 0x8000                                           # ties
  x[-8:] = 0x7f800000, 0xff800000, 0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0x7f800001, 0xffffffff, 0x80000001
  values = x.view(np.float32)
  with np.errstate(all="ignore"): want = values.astype(ml_dtypes.bfloat16).astype(np.float32)
  same(formats.bf16(Tensor(values, device=device)).numpy(), want)
  y = rng.standard_normal(4096, np.float32)
  rounded = (y * 3).astype(ml_dtypes.bfloat16).astype(np.float32)
  same((formats.bf16(Tensor(y, device=device) * 3) * 4).numpy(), rounded * 4)

# ------------------------------------------------------------------------------------------------ scales
@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_scale_exponent_at_every_power_of_two(largest: float) -> None:
  """largest * 2^k gives exactly 2^k, the next float32 the next power; and the same around 2^k itself."""
  top = np.float32(largest)
  with np.errstate(over="ignore"): points = [np.ldexp(b, np.arange(-152, 128)) for b in (top, np.float32(1))]
  x = np.concatenate([*points, *(np.nextafter(p, np.float32(to)) for p in points for to in (0, math.inf))])
  x = x[np.isfinite(x)]
  def least(v: float) -> int:
    ratio, code = Fraction(v) / Fraction(largest), 0
    while Fraction(2) ** (code - 127) < ratio: code += 1
    return code
  assert (formats.scale_exponent(Tensor(x), largest).numpy() == [least(float(v)) for v in x]).all()
  exact = formats.scale_exponent(Tensor(np.ldexp(top, np.arange(-100, 100))), largest).numpy()
  assert (exact == np.arange(-100, 100) + 127).all()

@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_scale_exponent_is_the_official_product(largest: float) -> None:
  """All mantissas: exponent and mantissa bits of amax * float32(1 / largest), which DeepSeek's fast_log2_ceil takes."""
  x = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(130 << 23)).view(np.float32)
  product = bits(x * (np.float32(1) / np.float32(largest)))
  assert (formats.scale_exponent(Tensor(x), largest).numpy() == (product >> 23) + ((product & 0x7fffff) != 0)).all()

def test_scale_of_what_is_no_number() -> None:
  x = np.float32([math.inf, math.nan, 3.4e38, 0, 2**-149])
  assert formats.scale_exponent(Tensor(x), 448.0).tolist() == [255, 255, 247, 0, 0]

# ------------------------------------------------------------------------------------------------ groups
@pytest.fixture(scope="module")
def units(shared: Path) -> dict[str, Array]:
  blob = (shared / "golden" / "units" / "units.safetensors").read_bytes()
  base = 8 + int.from_bytes(blob[:8], "little")
  kinds = {"F32": np.float32, "I32": np.int32, "BF16": ml_dtypes.bfloat16}  # the rest is bytes
  found = {}
  for n, e in json.loads(blob[8:base]).items():
    if n == "__metadata__": continue
    start, stop = e["data_offsets"]
    found[n] = np.frombuffer(blob[base + start:base + stop], kinds.get(e["dtype"], np.uint8)).reshape(e["shape"])
  return {n: t.astype(np.float32) if t.dtype == ml_dtypes.bfloat16 else t for n, t in found.items()}

def test_official_tables(units: dict[str, Array]) -> None:
  same(formats.decode_e2m1(Tensor(CODES[:16])).numpy(), units["e2m1.table"])
  same(formats.decode_e4m3(Tensor(CODES)).numpy(), units["e4m3.table"])
  same(formats.decode_e8m0(Tensor(CODES[:255])).numpy(), units["e8m0.table"])

@DEVICES
@pytest.mark.parametrize("group", [128, 64])
def test_official_activation_quantiser(group: int, device: str, units: dict[str, Array]) -> None:
  rows = 24 if device == "CPU" else 6
  x, want, want_scale, back = (units[f"act_quant{group}.{part}"][:rows] for part in ("in", "q", "scale", "inplace"))
  codes, scale = formats.quantise_e4m3(Tensor(x, device=device), group)
  assert (codes.numpy() == want).all() and (scale.numpy() == want_scale).all()
  same(formats.dequantise_e4m3(codes, scale).numpy(), back)
  if device == "CPU": same(formats.roundtrip_e4m3(Tensor(x), group).numpy(), back)

@DEVICES
def test_official_indexer_round_trip(device: str, units: dict[str, Array]) -> None:
  assert np.signbit(units["fp4_act_quant.out"][units["fp4_act_quant.out"] == 0]).any()  # -0 is among what is compared
  same(formats.roundtrip_e2m1(Tensor(units["fp4_act_quant.in"], device=device)).numpy(), units["fp4_act_quant.out"])

def test_official_weights_dequantise(units: dict[str, Array]) -> None:
  """Packed weights through the same decoder as activations; ml_dtypes has the other opinion."""
  packed, scale = units["linear_fp4.weight"], units["linear_fp4.scale"]
  codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1).view(ml_dtypes.float4_e2m1fn)
  want = codes.astype(np.float32) * scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(32, 1)
  same(formats.dequantise_e2m1(Tensor(packed), Tensor(scale)).numpy(), want)

def reference(x: Array, group: int, floor: float, kind: tuple[Any, ...]) -> tuple[Array, Array]:
  """-> codes, scales, by frexp, division and ml_dtypes."""
  groups = x.reshape(-1, group)
  mantissa, exponent = np.frexp(np.maximum(np.abs(groups).max(1), np.float32(floor)).astype(np.float64) / kind[3])
  scale = exponent - (mantissa == 0.5)
  codes = encoded((groups / np.ldexp(1.0, scale)[:, None]).astype(np.float32), kind).reshape(x.shape)
  return codes, (scale + 127).astype(np.uint8).reshape(*x.shape[:-1], -1)

@pytest.mark.parametrize("shape, group", [((1, 128), 128), ((3, 5, 448), 64), ((7, 2048), 128), ((2, 8192), 8192)])
def test_quantisers_on_groups_of_every_size_of_number(shape: tuple[int, ...], group: int) -> None:
  for low, high in ((-3, 4), (-40, 38)):
    rng = np.random.default_rng(len(shape) + high)
    x = rng.standard_normal(shape).reshape(-1, group) * 10.0 ** rng.integers(low, high, (math.prod(shape) // group, 1))
    x = x.clip(-3e38, 3e38).astype(np.float32).reshape(shape)
    x[0, ..., :8] = 0, -0.0, 448, -448, 2**-9, 2**-10, 449, 1e-30
    codes, scale = formats.quantise_e4m3(Tensor(x), group)
    want, want_scale = reference(x, group, 1e-4, E4M3)
    assert (codes.numpy() == want).all() and (scale.numpy() == want_scale).all() and codes.shape == shape
    values = want.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(-1, group)
    back = np.ldexp(values, want_scale.reshape(-1, 1).astype(int) - 127).reshape(shape)
    same(formats.roundtrip_e4m3(Tensor(x), group).numpy(), back)
    packed, scale = formats.quantise_e2m1(Tensor(x))
    want, want_scale = reference(x, 32, 6 * 2.0**-126, E2M1)
    assert (packed.numpy() == want[..., ::2] | want[..., 1::2] << 4).all() and (scale.numpy() == want_scale).all()

def test_floors() -> None:
  zeros = Tensor(np.zeros((2, 128), np.float32))
  codes, scale = formats.quantise_e4m3(zeros)
  assert codes.max().item() == 0 and scale.tolist() == [[127 - 22], [127 - 22]]  # 1e-4 / 448 is just below 2^-22
  assert formats.quantise_e2m1(zeros)[1].max().item() == 1 and (formats.roundtrip_e2m1(zeros).numpy() == 0).all()
  assert formats.quantise_e4m3(zeros, 64, 448.0)[1].tolist() == [[127, 127]] * 2

def test_a_bad_number_spoils_its_group_and_no_other() -> None:
  for bad in (math.nan, math.inf, -math.inf):
    x = np.random.default_rng(1).standard_normal((2, 256), np.float32)
    x[1, 130] = bad
    codes, scale = formats.quantise_e4m3(Tensor(x))
    assert scale.numpy()[1, 1] == 255 and (codes.numpy()[1, 128:] == 0x7f).all()
    for trip, group in ((formats.roundtrip_e4m3, 128), (formats.roundtrip_e2m1, 32)):
      got = trip(Tensor(x), group).numpy()
      lost = np.isnan(got).reshape(2, -1, group)
      assert lost[1, 130 // group].all() and lost.sum() == group

def test_columns_must_fill_groups() -> None:
  for f, columns, group in ((formats.quantise_e4m3, 100, 128), (formats.roundtrip_e2m1, 48, 32)):
    with pytest.raises(ValueError, match=f"columns={columns}, want a multiple of the group of {group}"):
      f(Tensor.ones(2, columns))

def test_quantiser_in_a_captured_graph() -> None:
  """The product before it is computed once, whatever contraction the compiler is fond of."""
  captured = TinyJit(lambda x, y: [t.realize() for t in formats.quantise_e4m3(x * y + 1)])
  for seed in range(4):
    x, y = (np.random.default_rng([seed, i]).integers(-99, 99, (6, 512)).astype(np.float32) / 16 for i in (0, 1))
    codes, scale = captured(Tensor(x).realize(), Tensor(y).realize())
    want, want_scale = reference(x * y + 1, 128, 1e-4, E4M3)
    assert (codes.numpy() == want).all() and (scale.numpy() == want_scale).all()

# ------------------------------------------------------------------------------------------------ rotation
def sylvester(n: int) -> Array:
  h = np.ones((1, 1))
  while len(h) < n: h = np.block([[h, h], [h, -h]])
  return h

def test_official_hadamard(units: dict[str, Array]) -> None:
  got = formats.hadamard(Tensor(units["hadamard128.in"])).numpy()
  same(got.astype(ml_dtypes.bfloat16).astype(np.float32), units["hadamard128.out"])

@pytest.mark.parametrize("n", [1, 2, 4, 64, 128])
def test_hadamard_is_sylvesters_matrix(n: int) -> None:
  eye: Callable[[int], Array] = lambda n: np.eye(n, dtype=np.float32)
  got = formats.hadamard(Tensor(eye(n))).numpy()
  assert (np.sign(got) == sylvester(n)).all() and np.abs(np.abs(got) - n**-0.5).max() < 1e-8
  x = np.random.default_rng(1).standard_normal((3, 2, n), np.float32)
  y = formats.hadamard(Tensor(x)).numpy()
  assert y.shape == x.shape and np.abs(y - x @ sylvester(n) / n**0.5).max() < 1e-5
  assert np.abs(formats.hadamard(Tensor(y)).numpy() - x).max() < 1e-5

def test_hadamard_wants_a_power_of_two() -> None:
  with pytest.raises(ValueError, match="columns=96, want a power of two"): formats.hadamard(Tensor.ones(2, 96))
