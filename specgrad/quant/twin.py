"""The operations of a DeepSeek-V4 layer as plain tinygrad expressions: the readable statement of each one.

Tensors between operations are float32. With w4a8 they hold what the official code would: values rounded to bfloat16 after
each operation, inputs of quantised products rounded to e4m3 in groups of 128, caches that store fp8 and fp4 bytes. Without
it nothing is rounded. Fast kernels repeat these names and signatures (cpu.py). Positions are read on the device from `pos` int32 (1,), the
absolute position of a call's first row; nothing here keeps a length. Rows that a query may not see can hold NaN: they are
left out by selection, never by multiplying with zero."""
import functools
import math
from typing import NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from specgrad.quant import formats

class Weight(NamedTuple):
  """A matrix as it is stored. kind F32 and BF16 (bits, as uint16) have no scale. FP8: e4m3 codes (..., N, K) and an e8m0
  code for each 128 of K, (..., N, ceil(K/128)), the official tiles with their rows written out. FP4: e2m1 pairs
  (..., N, K/2), low nibble first, and an e8m0 code for each 32 of K, (..., N, K/32)."""
  kind: str
  data: Tensor
  scale: Tensor | None = None

def as_weight(w: Weight | Tensor) -> Weight: return w if isinstance(w, Weight) else Weight("F32", w)

def floats(w: Weight | Tensor) -> Tensor:
  """The matrix as float32 (..., N, K), exact."""
  kind, data, scale = as_weight(w)
  if kind == "F32": return data
  if kind == "BF16": return (data.cast(dtypes.uint32) << 16).bitcast(dtypes.float32)
  assert scale is not None
  if kind == "FP4": return formats.dequantise_e2m1(data, scale)
  K = data.shape[-1]
  return formats.decode_e4m3(data) * formats.decode_e8m0(scale).repeat_interleave(128, -1)[..., :K]

def rnd(x: Tensor, w4a8: bool) -> Tensor: return formats.bf16(x) if w4a8 else x

def count(n: int) -> Tensor: return Tensor.arange(n, dtype=dtypes.int32)

def embed(table: Weight | Tensor, ids: Tensor, streams: int) -> Tensor:
  """(V, D), int32 (T,) -> float32 (T, S, D): the token's row, once for every residual stream."""
  kind, data, _ = as_weight(table)
  return floats(Weight(kind, data[ids])).unsqueeze(1).expand(-1, streams, -1).contiguous()

def rope_table(freqs: Tensor, pos: Tensor, n: int, stride: int = 1) -> Tensor:
  """float32 (r/2,), int32 (1,) -> float32 (n, r/2, 2): cos and sin at the positions (pos // stride + i) * stride.

  The angle is a float32 product, as in the official code. cos x is formed as 1 - 2 sin^2(x/2): tinygrad's own cos adds
  pi/2 first, which rounds away at large angles."""
  positions = (pos // stride + count(n)) * stride
  angle = positions.cast(dtypes.float32).reshape(-1, 1) * freqs.reshape(1, -1)
  half = (angle * 0.5).sin()
  return Tensor.stack(1 - 2 * half * half, angle.sin(), dim=-1).contiguous()

def rotate(x: Tensor, rope: Tensor, inverse: bool = False, w4a8: bool = False) -> Tensor:
  """float32 (n, ..., d), (n, r/2, 2) -> same shape: adjacent pairs (2i, 2i+1) of the last r channels rotated."""
  r = rope.shape[1] * 2
  cos, sin = (rope[..., i].reshape(rope.shape[0], *[1] * (x.ndim - 2), r // 2) for i in (0, 1))
  if inverse: sin = -sin
  pair = x[..., -r:].reshape(*x.shape[:-1], r // 2, 2)
  a, b = pair[..., 0], pair[..., 1]
  turned = Tensor.stack(a * cos - b * sin, a * sin + b * cos, dim=-1).reshape(*x.shape[:-1], r)
  return x[..., :-r].cat(rnd(turned, w4a8), dim=-1)

def rms(x: Tensor, eps: float) -> Tensor: return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

def rms_norm(x: Tensor, norm: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  """float32 (T, D), (D,) -> (T, D). Normalise first, then the weight."""
  return rnd(rms(x, eps) * norm, w4a8).contiguous()

# ------------------------------------------------------------------------------------------------ hyper-connections
def _mix(h: Tensor, fn: Tensor, eps: float) -> Tensor:
  v = h.flatten(1)                                         # stream-major; scaled by the joint rms after the product
  return ((v @ fn.T) * (v.square().mean(-1, keepdim=True) + eps).rsqrt()).contiguous()

def hc_pre(h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, iters: int, hc_eps: float, eps: float,
           w4a8: bool = False) -> tuple[Tensor, Tensor, Tensor]:
  """float32 (T, S, D), (2S+SS, SD), (3,), (2S+SS,), (D,) -> sub-layer input (T, D), post (T, S), comb (T, S, S).

  comb[j, k] takes source stream j to destination k; Sinkhorn normalises rows, then columns, and ends on columns.
  The input is the streams' weighted sum after its RMSNorm."""
  S = h.shape[1]
  mix = _mix(h, fn, eps)
  pre = (mix[:, :S] * scale[0] + base[:S]).sigmoid() + hc_eps
  post = 2 * (mix[:, S:2 * S] * scale[1] + base[S:2 * S]).sigmoid()
  comb = (mix[:, 2 * S:] * scale[2] + base[2 * S:]).reshape(-1, S, S).softmax(-1) + hc_eps
  comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
  for _ in range(iters - 1):
    comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
  x = rnd((pre.unsqueeze(-1) * h).sum(1), w4a8).contiguous()
  return rms_norm(x, norm, eps, w4a8), post.contiguous(), comb.contiguous()

def hc_post(z: Tensor, h: Tensor, post: Tensor, comb: Tensor, w4a8: bool = False) -> Tensor:
  """float32 (T, D), (T, S, D), (T, S), (T, S, S) -> the new streams (T, S, D)."""
  return rnd(post.unsqueeze(-1) * z.unsqueeze(1) + (comb.unsqueeze(-1) * h.unsqueeze(2)).sum(1), w4a8).contiguous()

def hc_head(h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, hc_eps: float, eps: float,
            w4a8: bool = False) -> tuple[Tensor, Tensor]:
  """float32 (T, S, D), (S, SD), (1,), (S,), (D,) -> the streams' weighted sum (T, D), and the same after its RMSNorm."""
  pre = (_mix(h, fn, eps) * scale + base).sigmoid() + hc_eps
  y = rnd((pre.unsqueeze(-1) * h).sum(1), w4a8).contiguous()
  return y, rms_norm(y, norm, eps, w4a8)

# ------------------------------------------------------------------------------------------------ products
def linear(x: Tensor, weight: Weight | Tensor, groups: int = 1, quantise: bool = True, rounded: bool = True,
           w4a8: bool = False) -> Tensor:
  """float32 (T, G*K), (G*N, K) -> float32 (T, G*N): G independent products side by side.

  With w4a8 the input of an FP8 or FP4 weight is rounded to e4m3 in groups of 128 unless `quantise` is off, and the result
  to bfloat16 unless `rounded` is off."""
  w, T = as_weight(weight), x.shape[0]
  x = x.reshape(T, groups, -1)
  if quantise and w4a8 and w.kind in ("FP8", "FP4"): x = formats.roundtrip_e4m3(x).contiguous()
  full = floats(w)
  full = full if w.kind == "F32" else full.contiguous()
  out = x.reshape(T, -1) @ full.T if groups == 1 else (x.unsqueeze(2) * full.reshape(1, groups, -1, full.shape[1])).sum(-1)
  return rnd(out.reshape(T, -1), rounded and w4a8).contiguous()

def experts(x: Tensor, w13: Weight | Tensor, w2: Weight | Tensor, s13: Weight | Tensor, s2: Weight | Tensor, ids: Tensor,
            weights: Tensor, limit: float, first: int = 0, rounded: bool = True, w4a8: bool = False) -> Tensor:
  """float32 (T, D), routed (E, 2I, D), (E, D, I), shared (2J, D), (D, J), int32 (T, k), float32 (T, k) -> (T, D).

  SwiGLU with the gate clamped above at `limit` and the other half on both sides, for the shared expert too; the route
  weight goes in before w2 (official model.py, class Expert). Routed results are added in float32, then the shared one.
  The experts are those numbered first .. first+E-1; others count for nothing here. Without `rounded` the result is a share
  of a sum over devices, each with its own experts and its own channels of the shared one, whose product stays float32."""
  T, E = x.shape[0], as_weight(w13).data.shape[0]
  here = (ids >= first) & (ids < first + E)
  ids = here.where(ids - first, 0)

  def swiglu(u: Tensor) -> Tensor:
    n = u.shape[-1] // 2
    return u[..., :n].minimum(limit).silu() * u[..., n:].clip(-limit, limit)

  def quantised(x: Tensor, w: Weight) -> Tensor:
    return formats.roundtrip_e4m3(x).contiguous() if w4a8 and w.kind in ("FP8", "FP4") else x

  def chosen(w: Weight) -> Tensor:
    return floats(Weight(w.kind, w.data[ids], None if w.scale is None else w.scale[ids])).contiguous()
  up, down, shared_up, shared_down = (as_weight(w) for w in (w13, w2, s13, s2))
  u = rnd((chosen(up) * quantised(x, up).reshape(T, 1, 1, -1)).sum(-1), w4a8).contiguous()    # (T, k, 2I)
  t = quantised(rnd(swiglu(u) * weights.unsqueeze(-1), w4a8).contiguous(), down)
  routed = here.unsqueeze(-1).where(rnd((chosen(down) * t.unsqueeze(2)).sum(-1), w4a8), 0).sum(1)
  u = linear(x, shared_up, w4a8=w4a8)
  total = routed + linear(rnd(swiglu(u), w4a8).contiguous(), shared_down, rounded=rounded, w4a8=w4a8)
  return rnd(total, rounded and w4a8).contiguous()

# ------------------------------------------------------------------------------------------------ caches and attention
def _write_rows(buf: UOp, new: UOp, slot: UOp, *, ring: int) -> UOp:
  t, c = UOp.range(new.shape[0], 0), UOp.range(new.shape[1], 1)
  at = slot[0] + t.cast(dtypes.int)
  return buf[(at % ring) if ring else at, c].store(new[t, c]).end(t, c).sink(arg=KernelInfo(name=f"write_rows_{ring}"))

def write_rows(buf: Tensor, new: Tensor, slot: Tensor, ring: int = 0) -> Tensor:
  """(n, c), (T, c), int32 (1,) -> buf after rows slot..slot+T-1 (modulo `ring` if given) were overwritten in place.

  A kernel that reads the slot from memory: assigning through a mask would rewrite the whole buffer each step."""
  return Tensor.custom_kernel(buf, new.contiguous(), slot.contiguous(), fxn=functools.partial(_write_rows, ring=ring))[0]

def row_bytes(d: int, r: int) -> int:
  """Bytes of a cached row with w4a8: d-r channels as e4m3, r as bfloat16, an e8m0 code for 64 of the former; padded to 4."""
  return -(-(d - r + 2 * r + -(-(d - r) // 64)) // 4) * 4

def key_bytes(d: int) -> int:
  """Bytes of an indexer's key with w4a8: d channels as e2m1, an e8m0 code for each 32."""
  return d // 2 + d // 32

def encode_rows(x: Tensor, r: int) -> Tensor:
  """float32 (n, d) -> uint8 (n, row_bytes)."""
  n, d = x.shape
  codes, scale = formats.quantise_e4m3(x[:, :d - r], group=64)
  tail = (formats.bf16(x[:, d - r:]).bitcast(dtypes.uint32) >> 16)
  tail = Tensor.stack(tail & 255, tail >> 8, dim=-1).reshape(n, 2 * r).cast(dtypes.uint8)
  return codes.cat(tail, scale, dim=1).pad(((0, 0), (0, row_bytes(d, r) - (d + r + scale.shape[1]))))

def decode_rows(rows: Tensor, d: int, r: int) -> Tensor:
  """A cache's rows -> float32 (n, d): as they are, or decoded from uint8 (n, row_bytes)."""
  if rows.dtype != dtypes.uint8: return rows
  scale = rows[:, d + r:d + r + -(-(d - r) // 64)]
  head = formats.decode_e4m3(rows[:, :d - r]) * formats.decode_e8m0(scale).repeat_interleave(64, -1)[:, :d - r]
  tail = rows[:, d - r:d + r].reshape(-1, r, 2).cast(dtypes.uint32)
  return head.cat(((tail[..., 0] << 16) | (tail[..., 1] << 24)).bitcast(dtypes.float32), dim=1).contiguous()

def head_rope(q: Tensor, rope: Tensor, heads: int, eps: float | None, index: bool = False, w4a8: bool = False) -> Tensor:
  """float32 (T, H*d), (T, r/2, 2) -> (T, H, d): rotary embedding, after each head's rms without a weight unless eps is none.

  With w4a8 the rms is taken in bfloat16 step by step, as the official code does, and an indexer's query (`index`) is
  turned by the Hadamard matrix and rounded to e2m1 in groups of 32."""
  q = q.reshape(q.shape[0], heads, -1)
  if eps is not None and w4a8:
    mean = rnd(rnd(q * q, w4a8).mean(-1, keepdim=True), w4a8)
    q = rnd(q * rnd(rnd(mean + eps, w4a8).rsqrt(), w4a8), w4a8)
  elif eps is not None: q = rms(q, eps)
  q = rotate(q, rope, w4a8=w4a8).contiguous()
  return formats.roundtrip_e2m1(rnd(formats.hadamard(q), w4a8).contiguous()).contiguous() if index and w4a8 else q

def kv_write(ring: Tensor, kv: Tensor, norm: Tensor, rope: Tensor, pos: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  """ring (n, d) float32, or uint8 (n, row_bytes) with w4a8, in place; float32 (T, d), (d,), (T, r/2, 2), int32 (1,) -> ring
  after position p's row went to slot p mod n."""
  row = rotate(rnd(rms(kv, eps) * norm, w4a8), rope, w4a8=w4a8).contiguous()
  return write_rows(ring, encode_rows(row, rope.shape[1] * 2) if w4a8 else row, pos, ring.shape[0])

def kv_rows(kv: Tensor, norm: Tensor, rope: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  """float32 (T, d), (d,), (T, r/2, 2) -> (T, d): what a reader would find after kv_write."""
  row, r = rotate(rnd(rms(kv, eps) * norm, w4a8), rope, w4a8=w4a8).contiguous(), rope.shape[1] * 2
  return (formats.roundtrip_e4m3(row[:, :-r].contiguous(), group=64).cat(row[:, -r:], dim=1) if w4a8 else row).contiguous()

def compress(ring: Tensor, entries: Tensor, proj: Tensor, ape: Tensor, norm: Tensor, rope: Tensor, pos: Tensor, eps: float,
             index: bool = False, w4a8: bool = False) -> tuple[Tensor, Tensor]:
  """float32 (n, 2w), (C, d) in place, (T, 2w), (R, w), (d,), (blocks, r/2, 2), int32 (1,) -> ring, entries.

  Each row of `proj` is a key and a gate of width w; w = 2d means that blocks overlap: entry j pools block j-1 through the
  first d channels and block j through the last, with a softmax of its own in every channel. Blocks that the rows only
  begin are written here too, from stale rows: no query sees them before they are finished, and then they are rewritten.
  With w4a8 entries hold bytes: encoded rows or, for an indexer (`index`), its keys after the Hadamard matrix."""
  R, d, n = ape.shape[0], norm.shape[0], ring.shape[0]
  w = ape.shape[1]
  gates = proj[:, w:] + ape[(pos + count(proj.shape[0])) % R]
  ring = write_rows(ring, proj[:, :w].cat(gates, dim=-1), pos, n)
  block = pos // R + count(rope.shape[0])
  slot = (block * R).reshape(-1, 1) + count(R).reshape(1, -1)
  own = ring[slot % n]                                                                        # (blocks, R, 2w)
  if w == 2 * d:
    before = ring[(slot + n - R) % n]
    first = (block == 0).reshape(-1, 1, 1)                 # block 0 has no predecessor
    k = first.where(0, before[..., :d]).cat(own[..., d:w], dim=1)
    g = first.where(-math.inf, before[..., w:w + d]).cat(own[..., w + d:], dim=1)
  else: k, g = own[..., :w], own[..., w:]
  pooled = rnd((g.contiguous().softmax(1) * k).sum(1), w4a8).contiguous()
  new = rotate(rnd(rms(pooled, eps) * norm, w4a8), rope, w4a8=w4a8).contiguous()
  if w4a8 and index:
    codes, scale = formats.quantise_e2m1(rnd(formats.hadamard(new), w4a8).contiguous())
    new = codes.cat(scale, dim=1)
  elif w4a8: new = encode_rows(new, rope.shape[1] * 2)
  return ring, write_rows(entries, new, pos // R)

def index_topk(q: Tensor, keys: Tensor, weight: Tensor, pos: Tensor, n: int, k: int, ratio: int,
               w4a8: bool = False) -> Tensor:
  """float32 (T, H, d), (C, d) or keys, (T, H), int32 (1,) -> bool (T, n): which of the first n entries each row attends to.

  The k best of the visible ones (finished at or before the row's position) by sum over heads of relu(q . key) * weight,
  weight times (d*H)^-1/2; of equals the lower index wins. The official Hadamard rotation of both sides cancels where
  nothing is rounded."""
  visible = count(n).reshape(1, -1) < (pos + count(q.shape[0]) + 1).reshape(-1, 1) // ratio
  d = q.shape[2]
  k_rows = formats.dequantise_e2m1(keys[:n, :d // 2], keys[:n, d // 2:]).contiguous() if w4a8 else keys[:n]
  share = rnd(weight * (q.shape[1] * d) ** -0.5, w4a8).unsqueeze(-1)
  s = rnd(rnd(rnd(q @ k_rows.T, w4a8).relu() * share, w4a8).sum(1), w4a8)
  s = visible.where(s, -math.inf).contiguous()
  mine, other, i, j = s.unsqueeze(2), s.unsqueeze(1), count(n).reshape(1, n, 1), count(n).reshape(1, 1, n)
  rank = ((other > mine) | ((other == mine) & (j < i))).cast(dtypes.int32).sum(-1)
  return ((rank < k) & visible).contiguous()

def attend(q: Tensor, ring: Tensor, entries: Tensor | None, chosen: Tensor | None, sink: Tensor, rope: Tensor, pos: Tensor,
           window: int, n: int, ratio: int, w4a8: bool = False) -> Tensor:
  """float32 (T, H, d), (ring, d), (C, d) or none, bool (T, n) or none, (H,), (T, r/2, 2), int32 (1,) -> (T, H, d).

  One softmax over the last `window` positions and the first n entries that are chosen (none: every finished one); each
  row is key and value. The sink only enlarges the denominator. The result is rotated back by the row's position."""
  T, _, d = q.shape
  r = rope.shape[1] * 2
  row, last = (pos + count(T)).reshape(-1, 1), pos + (T - 1)
  held = (last - (last - count(ring.shape[0]) + ring.shape[0]) % ring.shape[0]).reshape(1, -1)  # newest position in a slot
  parts = [(decode_rows(ring, d, r), (held >= 0) & (held <= row) & (held > row - window))]
  if entries is not None and n:
    parts.append((decode_rows(entries[:n], d, r), count(n).reshape(1, -1) < (row + 1) // ratio if chosen is None else chosen))
  return _softmax_rows(q, parts, sink, rope, w4a8)

def _softmax_rows(q: Tensor, parts: list[tuple[Tensor, Tensor]], sink: Tensor, rope: Tensor,
                  w4a8: bool) -> Tensor:
  T, _, d = q.shape
  scores = [see.unsqueeze(1).where((q @ rows.T) * d ** -0.5, -math.inf) for rows, see in parts]
  top = functools.reduce(Tensor.maximum, [s.max(-1, keepdim=True) for s in scores]).contiguous()
  exps = [(s - top).exp().contiguous() for s in scores]
  total = functools.reduce(Tensor.add, [e.sum(-1, keepdim=True) for e in exps]) + (sink.reshape(1, -1, 1) - top).exp()
  mixed = [see.reshape(T, 1, -1, 1).where(rnd(e, w4a8).unsqueeze(-1) * rows.reshape(1, 1, -1, d), 0).sum(2)
           for e, (rows, see) in zip(exps, parts)]
  return rotate(rnd(functools.reduce(Tensor.add, mixed) / total, w4a8), rope, inverse=True, w4a8=w4a8).contiguous()

# ------------------------------------------------------------------------------------------------ router
def softplus(z: Tensor) -> Tensor:
  """log(1 + e^z) with full relative precision where e^z is small: log1p(y) = 2 atanh(y / (2 + y)), as a series."""
  y = (-z.abs()).exp()
  w = y / (2 + y)
  series = functools.reduce(lambda acc, n: acc * (w * w) + 1 / n, (13, 11, 9, 7, 5, 3, 1), Tensor.full((), 1 / 15))
  return z.relu() + 2 * w * series

def route(z: Tensor, bias: Tensor | None, tid2eid: Tensor | None, tokens: Tensor, k: int, factor: float) -> tuple[Tensor, Tensor]:
  """float32 (T, E), (E,) or none, int32 (V, k) or none, int32 (T,) -> expert ids int32 (T, k), weights float32 (T, k).

  Scores are sqrt(softplus(z)). The bias only chooses; hash layers take the ids of the row's own input token. Ranks are
  counted, which takes two kernels: tinygrad's topk is a sorting network of dozens. Of equals the lower id comes first."""
  E = z.shape[1]
  score = softplus(z).sqrt().contiguous()
  if tid2eid is not None: ids = tid2eid[tokens]
  else:
    assert bias is not None
    s = (score + bias).contiguous()
    mine, other, i, j = s.unsqueeze(2), s.unsqueeze(1), count(E).reshape(1, E, 1), count(E).reshape(1, 1, E)
    rank = ((other > mine) | ((other == mine) & (j < i))).cast(dtypes.int32).sum(-1).contiguous()
    ids = ((rank.unsqueeze(1) == count(k).reshape(1, k, 1)) * count(E).reshape(1, 1, E)).sum(-1).cast(dtypes.int32)
  weights = score.gather(1, ids)
  return ids.contiguous(), (weights / weights.sum(-1, keepdim=True) * factor).contiguous()

# ------------------------------------------------------------------------------------------------ choice of a token
def argmax(logits: Tensor) -> Tensor:
  """float32 (T, V) -> int32 (T,): the lowest index of the largest logit; -1 where one is NaN or infinite, or none is finite."""
  sick = (logits.isnan() | (logits == math.inf)).max(1) | (logits.max(1) == -math.inf)
  return sick.where(-1, logits.argmax(1).cast(dtypes.int32)).cast(dtypes.int32).contiguous()

def _threshold(x: Tensor, weight: Tensor, want: Tensor) -> Tensor:
  """The largest value whose strictly larger ones weigh less than `want`: float32 (T, V) twice, (T, 1) -> (T, 1)."""
  heavier = (x.unsqueeze(1) > x.unsqueeze(2)).where(weight.unsqueeze(1), 0).sum(2)              # weight above each one
  return (heavier < want).where(x, math.inf).min(1, keepdim=True)

def mix(h: Tensor) -> Tensor:
  """uint32 -> uint32: a bijection whose output bits each depend on every input bit."""
  h = (h ^ (h >> 16)) * 0x7feb352d
  h = (h ^ (h >> 15)) * 0x846ca68b
  return h ^ (h >> 16)

def probs(logits: Tensor, settings: Tensor) -> Tensor:
  """float32 (T, V), (4,) = temperature (above 0), top_p, top_k, min_p -> float32 (T, V): the law a token is drawn from.

  Temperature first; then the top_k largest (0: all; equals of the last one stay), the smallest set of largest ones with
  top_p of the remaining mass (equals stay), and those with min_p of the largest's probability. A row that can't be drawn
  from (NaN, infinite, nothing finite) is NaN throughout."""
  top = logits.max(1, keepdim=True)
  least = (settings[2] > 0).where(_threshold(logits, Tensor.ones_like(logits), settings[2].maximum(1)), -math.inf)
  weight = (logits >= least).where(((logits - top) / settings[0]).exp(), 0).contiguous()
  nucleus = _threshold(logits, weight, settings[1] * weight.sum(1, keepdim=True))
  least = (settings[1] < 1).where(least.maximum(nucleus), least)
  weight = ((logits >= least) & (weight >= settings[3])).where(weight, 0).contiguous()
  return (argmax(logits).reshape(-1, 1) < 0).where(math.nan, weight / weight.sum(1, keepdim=True)).contiguous()

def _hash(seed: Tensor, pos: Tensor, n: int, use: int) -> Tensor:
  u32 = dtypes.uint32
  return mix(mix(mix(mix(seed[0].cast(u32)) ^ seed[1].cast(u32)) + (pos + count(n) + 1).cast(u32)) + use)

def _unit(h: Tensor) -> Tensor: return (h >> 8).cast(dtypes.float32) * 2.0 ** -24 + 2.0 ** -25

def uniforms(seed: Tensor, pos: Tensor, n: int, use: int) -> Tensor:
  """int32 (2,), int32 (1,) -> float32 (n,) inside (0, 1): one number for each of the positions pos+1 .. pos+n and use."""
  return _unit(_hash(seed, pos, n, use)).contiguous()

def pick(weights: Tensor, seed: Tensor, pos: Tensor, use: int = 0, offset: int = 0) -> Tensor:
  """float32 (T, V), int32 (2,), int32 (1,) -> int32 (T,): row t's token for position pos+1+offset+t, by its weights.

  Gumbel-max, so that weights need no sum of one; the noise is a hash of (seed, absolute position, use, token): a run
  repeats exactly, and rows don't influence each other. -1 where a weight is NaN or none is above zero."""
  T, V = weights.shape
  u = _unit(mix(_hash(seed, pos + offset, T, use).reshape(T, 1) + count(V).cast(dtypes.uint32).reshape(1, V) * 0x9e3779b9))
  noisy = (weights > 1e-37).where(weights.maximum(1e-37).log() - (-u.log()).log(), -math.inf).contiguous()
  dead = weights.isnan().max(1) | (noisy.max(1) == -math.inf)
  return dead.where(-1, noisy.argmax(1).cast(dtypes.int32)).cast(dtypes.int32).contiguous()

# ------------------------------------------------------------------------------------------------ block draft
def markov(base: Tensor, row: int, w1: Weight | Tensor, w2: Weight | Tensor, token: Tensor) -> Tensor:
  """float32 (K, V), (V, r), (V, r), int32 (1,) -> float32 (1, V): row `row` of base, biased by the token before it."""
  e = floats(Weight(as_weight(w1).kind, as_weight(w1).data[token.maximum(0)]))
  return (base[row:row + 1] + e @ floats(w2).T).contiguous()

def attend_block(q: Tensor, ring: Tensor, block: Tensor, sink: Tensor, rope: Tensor, pos: Tensor, window: int,
                 w4a8: bool = False) -> Tensor:
  """float32 (T, H, d), (ring, d), (T, d), (H,), (T, r/2, 2), int32 (1,) -> (T, H, d).

  As attend, but every row sees the `window` positions before pos (of `ring`) and all T rows of the block, later ones too."""
  last = pos - 1
  held = (last - (last - count(ring.shape[0]) + ring.shape[0]) % ring.shape[0]).reshape(1, -1)
  seen = ((held >= 0) & (held >= pos - window)).expand(q.shape[0], -1)
  whole = (count(q.shape[0]) >= 0).reshape(1, -1).expand(q.shape[0], -1)
  return _softmax_rows(q, [(decode_rows(ring, q.shape[2], rope.shape[1] * 2), seen), (block, whole)], sink, rope, w4a8)
