"""The operations of a DeepSeek-V4 layer as plain tinygrad expressions: the readable statement of each one.

Tensors between operations are float32. With w4a8 they hold what the official code would: values rounded to bfloat16 after
each operation, inputs of quantised products rounded to e4m3 in groups of 128, caches that store fp8 and fp4 bytes. Without
it nothing is rounded. Fast kernels repeat these names and signatures (cpu.py).

A call's T rows are B sequences of T/B rows each, one sequence after the other. `at` int32 (2, B) is read on the device: row 0
has the absolute position of each sequence's first row, row 1 the slot of the caches (their first axis) in which the
sequence lives; the slots of a call are distinct, and nothing here keeps a length. No row depends on B, on other sequences
or on the slot. Rows that a query may not see can hold NaN: they are left out by selection, never by multiplying with zero.

Where entries are spread over `ranks` devices, entry j is kept by device j % ranks alone, in row j // ranks."""
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

def positions(at: Tensor, T: int) -> Tensor:
  """int32 (2, B) -> int32 (B, T/B): the position of each row."""
  return at[0].reshape(-1, 1) + count(T // at.shape[1]).reshape(1, -1)

def embed(table: Weight | Tensor, ids: Tensor, streams: int, first: int = 0) -> Tensor:
  """(V, D), int32 (T,) -> float32 (T, S, D): the token's row, once for every residual stream. The table begins with the row
  of id `first`; ids that it does not hold give zeros."""
  kind, data, _ = as_weight(table)
  at = ids - first
  held = ((at >= 0) & (at < data.shape[0])).reshape(-1, 1, 1)
  row = floats(Weight(kind, data[at.clip(0, data.shape[0] - 1)])).unsqueeze(1)
  return held.where(row, 0).expand(-1, streams, -1).contiguous()

def rope_table(freqs: Tensor, at: Tensor, n: int, stride: int = 1) -> Tensor:
  """float32 (r/2,), int32 (2, B) -> float32 (n, r/2, 2): cos and sin at the positions (position // stride + i) * stride, n/B
  of them for each sequence.

  The angle is a float32 product, as in the official code. cos x is formed as 1 - 2 sin^2(x/2): tinygrad's own cos adds
  pi/2 first, which rounds away at large angles."""
  where = positions(at // stride, n) * stride
  angle = where.cast(dtypes.float32).reshape(-1, 1) * freqs.reshape(1, -1)
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

def hc_post(z: Tensor | tuple[Tensor, ...], h: Tensor, post: Tensor, comb: Tensor, w4a8: bool = False) -> Tensor:
  """float32 (T, D), (T, S, D), (T, S), (T, S, S) -> the new streams (T, S, D). z may be shares of a product, to be added up in
  their order and rounded as it is."""
  if isinstance(z, tuple): z = rnd(functools.reduce(Tensor.add, z), w4a8) if len(z) > 1 else z[0]
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
def _write_rows(buf: UOp, new: UOp, at: UOp, *, ring: int, rank: int, ranks: int) -> UOp:
  per, t, c = new.shape[0] // at.shape[1], UOp.range(new.shape[0], 0), UOp.range(new.shape[1], 1)
  row = at[0, t // per] + (t % per).cast(dtypes.int)
  place = row % ring if ring else row if ranks == 1 else (row // ranks).valid((row % ranks).eq(rank))
  return buf[at[1, t // per], place, c].store(new[t, c]).end(t, c).sink(arg=KernelInfo(name=f"write_rows_{ring}_{rank}_{ranks}"))

def write_rows(buf: Tensor, new: Tensor, at: Tensor, ring: int = 0, rank: int = 0, ranks: int = 1) -> Tensor:
  """(S, n, c), (T, c), int32 (2, B) -> buf after row i of sequence b went, in place, to slot at[1, b], row at[0, b] + i, which is
  taken modulo `ring` if given. With several ranks only the rows that this one keeps are written.

  A kernel that reads the place from memory: assigning through a mask would rewrite the whole buffer each step."""
  fxn = functools.partial(_write_rows, ring=ring, rank=rank, ranks=ranks)
  return Tensor.custom_kernel(buf, new.contiguous(), at.contiguous(), fxn=fxn)[0]

def kept(n: int, rank: int, ranks: int) -> int:
  """How many of n entries a device keeps; 1 where it is none, and then that one is never visible."""
  return max(1, (n - rank + ranks - 1) // ranks)

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
  """A cache's rows -> float32 (..., d): as they are, or decoded from uint8 (..., row_bytes)."""
  if rows.dtype != dtypes.uint8: return rows
  scale = rows[..., d + r:d + r + -(-(d - r) // 64)]
  head = formats.decode_e4m3(rows[..., :d - r]) * formats.decode_e8m0(scale).repeat_interleave(64, -1)[..., :d - r]
  tail = rows[..., d - r:d + r].reshape(*rows.shape[:-1], r, 2).cast(dtypes.uint32)
  return head.cat(((tail[..., 0] << 16) | (tail[..., 1] << 24)).bitcast(dtypes.float32), dim=-1).contiguous()

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

def kv_write(ring: Tensor, kv: Tensor, norm: Tensor, rope: Tensor, at: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  """ring (S, n, d) float32, or uint8 (S, n, row_bytes) with w4a8, in place; float32 (T, d), (d,), (T, r/2, 2), int32 (2, B) -> ring
  after position p's row went to place p mod n of its sequence's slot."""
  row = rotate(rnd(rms(kv, eps) * norm, w4a8), rope, w4a8=w4a8).contiguous()
  return write_rows(ring, encode_rows(row, rope.shape[1] * 2) if w4a8 else row, at, ring.shape[1])

def kv_rows(kv: Tensor, norm: Tensor, rope: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  """float32 (T, d), (d,), (T, r/2, 2) -> (T, d): what a reader would find after kv_write."""
  row, r = rotate(rnd(rms(kv, eps) * norm, w4a8), rope, w4a8=w4a8).contiguous(), rope.shape[1] * 2
  return (formats.roundtrip_e4m3(row[:, :-r].contiguous(), group=64).cat(row[:, -r:], dim=1) if w4a8 else row).contiguous()

def compress(ring: Tensor, entries: Tensor, proj: Tensor, ape: Tensor, norm: Tensor, rope: Tensor, at: Tensor, eps: float,
             index: bool = False, rank: int = 0, ranks: int = 1, w4a8: bool = False) -> tuple[Tensor, Tensor]:
  """float32 (S, n, 2w), (S, C, d) in place, (T, 2w), (R, w), (d,), (B*blocks, r/2, 2), int32 (2, B) -> ring, entries.

  Each row of `proj` is a key and a gate of width w; w = 2d means that blocks overlap: entry j pools block j-1 through the
  first d channels and block j through the last, with a softmax of its own in every channel. Blocks that the rows only
  begin are written here too, from stale rows: no query sees them before they are finished, and then they are rewritten.
  With w4a8 entries hold bytes: encoded rows or, for an indexer (`index`), its keys after the Hadamard matrix. The ring is
  whole on every rank."""
  R, d, n, B = ape.shape[0], norm.shape[0], ring.shape[1], at.shape[1]
  w = ape.shape[1]
  gates = proj[:, w:] + ape[positions(at, proj.shape[0]).reshape(-1) % R]
  ring = write_rows(ring, proj[:, :w].cat(gates, dim=-1), at, n)
  block = positions(at // R, rope.shape[0]).reshape(-1, 1)                                    # (B*blocks, 1)
  place = block * R + count(R).reshape(1, -1)
  slot = at[1].reshape(B, 1, 1).expand(B, rope.shape[0] // B, R).reshape(-1, R)
  own = ring[slot, place % n]                                                                 # (B*blocks, R, 2w)
  if w == 2 * d:
    before = ring[slot, (place + n - R) % n]
    first = (block == 0).unsqueeze(-1)                     # block 0 has no predecessor
    k = first.where(0, before[..., :d]).cat(own[..., d:w], dim=1)
    g = first.where(-math.inf, before[..., w:w + d]).cat(own[..., w + d:], dim=1)
  else: k, g = own[..., :w], own[..., w:]
  pooled = rnd((g.contiguous().softmax(1) * k).sum(1), w4a8).contiguous()
  new = rotate(rnd(rms(pooled, eps) * norm, w4a8), rope, w4a8=w4a8).contiguous()
  if w4a8 and index:
    codes, scale = formats.quantise_e2m1(rnd(formats.hadamard(new), w4a8).contiguous())
    new = codes.cat(scale, dim=1)
  elif w4a8: new = encode_rows(new, rope.shape[1] * 2)
  return ring, write_rows(entries, new, (at[0] // R).stack(at[1]), rank=rank, ranks=ranks)

def _visible(at: Tensor, T: int, n: int, ratio: int, rank: int = 0, ranks: int = 1) -> Tensor:
  """bool (T, kept): which of a rank's entries among the first n are finished at or before each row's position."""
  j = (count(kept(n, rank, ranks)) * ranks + rank).reshape(1, -1)
  return (j < (positions(at, T).reshape(-1, 1) + 1) // ratio) & (j < n)

def _scores(q: Tensor, keys: Tensor, weight: Tensor, at: Tensor, visible: Tensor, w4a8: bool) -> tuple[Tensor, Tensor]:
  """float32 (T, m), -inf where not visible, and int32 (T, m): how many of the row's scores are better; of equals the earlier."""
  T, H, d = q.shape
  m, B = visible.shape[1], at.shape[1]
  rows = keys[at[1], :m]
  if w4a8: rows = formats.dequantise_e2m1(rows[..., :d // 2], rows[..., d // 2:]).contiguous()
  share = rnd(weight * (H * d) ** -0.5, w4a8).reshape(B, T // B, H, 1)
  products = rnd(q.reshape(B, T // B, H, d) @ rows.unsqueeze(1).transpose(-1, -2), w4a8)
  s = visible.where(rnd(rnd(products.relu() * share, w4a8).sum(2), w4a8).reshape(T, m), -math.inf).contiguous()
  mine, other, i, j = s.unsqueeze(2), s.unsqueeze(1), count(m).reshape(1, m, 1), count(m).reshape(1, 1, m)
  return s, ((other > mine) | ((other == mine) & (j < i))).cast(dtypes.int32).sum(-1)

def index_topk(q: Tensor, keys: Tensor, weight: Tensor, at: Tensor, n: int, k: int, ratio: int, w4a8: bool = False) -> Tensor:
  """float32 (T, H, d), (S, C, d) or keys, (T, H), int32 (2, B) -> bool (T, n): which of the first n entries each row attends to.

  The k best of the visible ones (finished at or before the row's position) by sum over heads of relu(q . key) * weight,
  weight times (d*H)^-1/2; of equals the lower index wins. The official Hadamard rotation of both sides cancels where
  nothing is rounded."""
  visible = _visible(at, q.shape[0], n, ratio)
  return ((_scores(q, keys, weight, at, visible, w4a8)[1] < k) & visible).contiguous()

def index_best(q: Tensor, keys: Tensor, weight: Tensor, at: Tensor, n: int, k: int, ratio: int, rank: int, ranks: int,
               w4a8: bool = False) -> Tensor:
  """As index_topk of the entries that this rank keeps -> float32 (T, 2, k): scores of the k best, best first, -inf where there
  are fewer, and behind them their numbers j (float32 is exact below 2^24), which mean nothing where there is none."""
  visible = _visible(at, q.shape[0], n, ratio, rank, ranks)
  s, better = _scores(q, keys, weight, at, visible, w4a8)
  hot = ((better.unsqueeze(1) == count(k).reshape(1, k, 1)) & visible.unsqueeze(1)).contiguous()  # (T, k, m)
  ids = (count(s.shape[1]) * ranks + rank).cast(dtypes.float32).reshape(1, 1, -1)
  return Tensor.stack(hot.where(s.unsqueeze(1), -math.inf).max(-1), hot.where(ids, 0).sum(-1), dim=1).contiguous()

def index_choose(best: tuple[Tensor, ...], n: int, k: int, rank: int, ranks: int) -> Tensor:
  """The lists (T, 2, k) that index_best gave on each rank -> bool (T, kept): which of this rank's entries are among the k best of
  all, which are those of index_topk."""
  every = best[0].cat(*best[1:], dim=2) if ranks > 1 else best[0]
  s, j, own, i = *(every[:, c].unsqueeze(1) for c in (0, 1)), *(best[rank][:, c].unsqueeze(2) for c in (0, 1))
  chosen = (((s > own) | ((s == own) & (j < i))).cast(dtypes.int32).sum(-1) < k) & (own.squeeze(2) > -math.inf)  # (T, k)
  ids = (count(kept(n, rank, ranks)) * ranks + rank).cast(dtypes.float32).reshape(1, 1, -1)
  return ((i == ids) & chosen.unsqueeze(2)).max(1).contiguous()

def _window(ring: Tensor, at: Tensor, T: int, window: int) -> Tensor:
  """bool (T, n): which places of a sequence's ring hold one of the `window` positions up to each row's, when all T are written."""
  row, n = positions(at, T).unsqueeze(-1), ring.shape[1]
  last = row[:, -1:]
  held = last - (last - count(n).reshape(1, 1, -1) + n) % n                                   # newest position in a place
  return ((held >= 0) & (held <= row) & (held > row - window)).reshape(T, n)

def _share(q: Tensor, parts: list[tuple[Tensor, Tensor]], w4a8: bool) -> tuple[Tensor, Tensor, Tensor]:
  """(T, H, d), pairs of rows (B, m, d) and who sees them (T, m) -> a share of a softmax: sum of exp(s - top) * row, top, sum of
  exp(s - top), (T, H, d) and (T, H, 1) twice."""
  T, H, d = q.shape
  B = parts[0][0].shape[0]
  groups, sees = q.reshape(B, T // B, H, d), [see.reshape(B, T // B, 1, -1) for _, see in parts]
  scores = [see.where((groups @ rows.unsqueeze(1).transpose(-1, -2)) * d ** -0.5, -math.inf) for (rows, _), see in zip(parts, sees)]
  top = functools.reduce(Tensor.maximum, [s.max(-1, keepdim=True) for s in scores]).contiguous()
  exps = [see.where((s - top).exp(), 0).contiguous() for s, see in zip(scores, sees)]
  total = functools.reduce(Tensor.add, [e.sum(-1, keepdim=True) for e in exps])
  mixed = functools.reduce(Tensor.add, [see.unsqueeze(-1).where(rnd(e, w4a8).unsqueeze(-1) * rows.reshape(B, 1, 1, -1, d), 0).sum(3)
                                        for e, (rows, _), see in zip(exps, parts, sees)])
  return mixed.reshape(T, H, d), top.reshape(T, H, 1), total.reshape(T, H, 1)

def _finish(mixed: Tensor, top: Tensor, total: Tensor, sink: Tensor, rope: Tensor, w4a8: bool) -> Tensor:
  total = total + (sink.reshape(1, -1, 1) - top).exp()
  return rotate(rnd(mixed / total, w4a8), rope, inverse=True, w4a8=w4a8).contiguous()

def attend(q: Tensor, ring: Tensor, entries: Tensor | None, chosen: Tensor | None, sink: Tensor, rope: Tensor, at: Tensor,
           window: int, n: int, ratio: int, w4a8: bool = False) -> Tensor:
  """float32 (T, H, d), (S, ring, d), (S, C, d) or none, bool (T, n) or none, (H,), (T, r/2, 2), int32 (2, B) -> (T, H, d).

  One softmax over the last `window` positions and the first n entries that are chosen (none: every finished one); each
  row is key and value. The sink only enlarges the denominator. The result is rotated back by the row's position."""
  T, _, d = q.shape
  r = rope.shape[1] * 2
  parts = [(decode_rows(ring[at[1]], d, r), _window(ring, at, T, window))]
  if entries is not None and n:
    parts.append((decode_rows(entries[at[1], :n], d, r), _visible(at, T, n, ratio) if chosen is None else chosen))
  return _finish(*_share(q, parts, w4a8), sink, rope, w4a8)

def attend_part(q: tuple[Tensor, ...], ring: Tensor, entries: Tensor | None, chosen: Tensor | None, at: Tensor, window: int, n: int,
                ratio: int, rank: int, r: int, w4a8: bool = False) -> tuple[Tensor, ...]:
  """The heads of every rank (T, h, d), the ring, this rank's entries (S, C, d) or none, bool (T, kept) or none, int32 (2, B) -> for
  each of them (T, h, d+2): this rank's share of attend, which is the sum of exp(s - top) * row, top, and the sum of
  exp(s - top). Entries count for all heads, the window for this rank's own; zeros, -inf and 0 where nothing is visible.
  n and ratio as in attend, r: rotated channels of a cached row."""
  T, _, d = q[0].shape
  made = []
  far = [] if entries is None or not n else [(decode_rows(entries[at[1], :kept(n, rank, len(q))], d, r),
                                              _visible(at, T, n, ratio, rank, len(q)) if chosen is None else chosen)]
  for i, heads in enumerate(q):
    near = [(decode_rows(ring[at[1]], d, r), _window(ring, at, T, window) & (i == rank))] if i == rank or not far else []
    made.append(Tensor.cat(*_share(heads, near + far, w4a8), dim=2).contiguous())
  return tuple(made)

def attend_merge(parts: tuple[Tensor, ...], sink: Tensor, rope: Tensor, w4a8: bool = False) -> Tensor:
  """What attend_part gave on each rank for the same heads (T, h, d+2), in the order of ranks, (h,), (T, r/2, 2) -> (T, h, d)."""
  tops = [p[..., -2:-1] for p in parts]
  top = functools.reduce(Tensor.maximum, tops).contiguous()
  shares = [(t - top).exp() for t in tops]
  mixed = functools.reduce(Tensor.add, [w * p[..., :-2] for w, p in zip(shares, parts)])
  total = functools.reduce(Tensor.add, [w * p[..., -1:] for w, p in zip(shares, parts)])
  return _finish(mixed, top, total, sink, rope, w4a8)

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
  """float32 (T, V), (B, 4) = temperature, top_p, top_k, min_p of each sequence -> float32 (T, V): the law a token is drawn from.

  Temperature first; then the top_k largest (0: all; equals of the last one stay), the smallest set of largest ones with
  top_p of the remaining mass (equals stay), and those with min_p of the largest's probability. A row that can't be drawn
  from (NaN, infinite, nothing finite) is NaN throughout. Temperature 0 leaves the first of the largest alone."""
  (T, V), B = logits.shape, settings.shape[0]
  temperature, top_p, top_k, min_p = (settings[:, i].reshape(B, 1).expand(B, T // B).reshape(T, 1) for i in range(4))
  top = logits.max(1, keepdim=True)
  least = (top_k > 0).where(_threshold(logits, Tensor.ones_like(logits), top_k.maximum(1)), -math.inf)
  weight = (logits >= least).where(((logits - top) / temperature).exp(), 0).contiguous()
  nucleus = _threshold(logits, weight, top_p * weight.sum(1, keepdim=True))
  least = (top_p < 1).where(least.maximum(nucleus), least)
  weight = ((logits >= least) & (weight >= min_p)).where(weight, 0).contiguous()
  best = argmax(logits).reshape(-1, 1)
  law = (temperature > 0).where(weight / weight.sum(1, keepdim=True), (count(V).reshape(1, -1) == best).cast(dtypes.float32))
  return (best < 0).where(math.nan, law).contiguous()

def _hash(seed: Tensor, at: Tensor, n: int, use: int, offset: int = 0) -> Tensor:
  """int32 (B, 2), (2, B) -> uint32 (B, n)."""
  u32 = dtypes.uint32
  where = (positions(at, n * at.shape[1]) + (1 + offset)).cast(u32)
  return mix(mix(mix(mix(seed[:, :1].cast(u32)) ^ seed[:, 1:].cast(u32)) + where) + use)

def _unit(h: Tensor) -> Tensor: return (h >> 8).cast(dtypes.float32) * 2.0 ** -24 + 2.0 ** -25

def uniforms(seed: Tensor, at: Tensor, n: int, use: int) -> Tensor:
  """int32 (B, 2), (2, B) -> float32 (B, n) inside (0, 1): one number for each of a sequence's positions p+1 .. p+n and use."""
  return _unit(_hash(seed, at, n, use)).contiguous()

def pick(weights: Tensor, seed: Tensor, at: Tensor, use: int = 0, offset: int = 0) -> Tensor:
  """float32 (T, V), int32 (B, 2), (2, B) -> int32 (T,): a sequence's row i has the token for position p+1+offset+i, by its weights.

  Gumbel-max, so that weights need no sum of one; the noise is a hash of (seed, absolute position, use, token): a run
  repeats exactly, and rows don't influence each other. -1 where a weight is NaN or none is above zero."""
  (T, V), B = weights.shape, at.shape[1]
  h = _hash(seed, at, T // B, use, offset).reshape(T, 1)
  u = _unit(mix(h + count(V).cast(dtypes.uint32).reshape(1, V) * 0x9e3779b9))
  noisy = (weights > 1e-37).where(weights.maximum(1e-37).log() - (-u.log()).log(), -math.inf).contiguous()
  dead = weights.isnan().max(1) | (noisy.max(1) == -math.inf)
  return dead.where(-1, noisy.argmax(1).cast(dtypes.int32)).cast(dtypes.int32).contiguous()

# ------------------------------------------------------------------------------------------------ block draft
def markov(base: Tensor, row: int, w1: Weight | Tensor, w2: Weight | Tensor, token: Tensor) -> Tensor:
  """float32 (B*K, V), (V, r), (V, r), int32 (B,) -> float32 (B, V): row `row` of each sequence's base, biased by the token before it."""
  e = floats(Weight(as_weight(w1).kind, as_weight(w1).data[token.maximum(0)]))
  return (base.reshape(token.shape[0], -1, base.shape[1])[:, row] + e @ floats(w2).T).contiguous()

def attend_block(q: Tensor, ring: Tensor, block: Tensor, sink: Tensor, rope: Tensor, at: Tensor, window: int,
                 w4a8: bool = False) -> Tensor:
  """float32 (T, H, d), (S, ring, d), (T, d), (H,), (T, r/2, 2), int32 (2, B) -> (T, H, d).

  As attend, but every row sees the `window` positions before its sequence's first (of `ring`) and all rows of its own
  sequence's block, later ones too."""
  (T, _, d), B, n = q.shape, at.shape[1], ring.shape[1]
  first = at[0].reshape(B, 1, 1)
  held = first - 1 - (first - 1 - count(n).reshape(1, 1, -1) + n) % n
  seen = ((held >= 0) & (held >= first - window)).expand(B, T // B, n).reshape(T, n)
  whole = (count(T // B) >= 0).reshape(1, -1).expand(T, -1)
  parts = [(decode_rows(ring[at[1]], d, rope.shape[1] * 2), seen), (block.reshape(B, -1, d), whole)]
  return _finish(*_share(q, parts, w4a8), sink, rope, w4a8)
