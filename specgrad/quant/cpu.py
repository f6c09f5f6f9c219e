"""The operations of `twin` as C kernels for tinygrad's CPU device: same names, same signatures, cpu.c holds the code.

A kernel is a tinygrad PROGRAM made of source text and explicit lists of the buffers it writes and reads; the device's own
compiler builds it and its disk cache keeps it. Sizes are macros, so each shape is a program of its own."""
import functools
import importlib.resources

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

from specgrad.quant.twin import Weight, as_weight, kept
from specgrad.quant.twin import uniforms as uniforms  # small enough for tinygrad's own code

@functools.cache
def source() -> str: return importlib.resources.files("specgrad.quant").joinpath("cpu.c").read_text()

def _program(*bufs: UOp, name: str, writes: int, inplace: bool, sizes: tuple[tuple[str, int | float | str], ...]) -> UOp:
  bufs = tuple(b.base for b in bufs)
  symbol = f"{name}_" + "_".join(str(v).replace("-", "m").replace(".", "d").replace("+", "") for _, v in sizes)
  macros = [("NAME", symbol), (f"KERNEL_{name}", 1), *sizes]
  text = "".join(f"#define {k} {v}{'f' if isinstance(v, float) else ''}\n" for k, v in macros)
  sink = UOp.sink(*bufs, arg=KernelInfo(name=symbol))
  info = ProgramInfo(name=symbol, global_size=(1, 1, 1), local_size=None, globals=tuple(range(len(bufs))), outs=tuple(range(writes)),
                     ins=tuple(range(0 if inplace else writes, len(bufs))))
  return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=(*bufs, sink)), UOp(Ops.SOURCE, arg=text + source())), arg=info)

def run(name: str, outs: list[Tensor], ins: list[Tensor], inplace: bool = False, **sizes: int | float | str) -> list[Tensor]:
  """The tensors of `outs` after kernel `name` wrote them. `inplace`: they are read as well (cache buffers)."""
  fxn = functools.partial(_program, name=name, writes=len(outs), inplace=inplace, sizes=tuple(sizes.items()))
  return Tensor.custom_kernel(*outs, *[as_buffer(t) for t in ins], fxn=fxn)[:len(outs)]

_WHOLE = (Ops.BUFFER, Ops.AFTER, Ops.RESHAPE)

def as_buffer(t: Tensor) -> Tensor:
  """t itself if it is a whole buffer in whatever shape, else a copy of its own. Two traps of tinygrad 0.14 lie here:
  contiguous() copies what a kernel has just written, and makes a mere view of a slice, whose buffer the memory planner of
  a captured graph then believes to be free."""
  base = t.uop.base
  whole = t.uop.op in _WHOLE and base.op in (Ops.BUFFER, Ops.AFTER) and base.max_numel() == t.uop.max_numel()
  return t if whole else t.clone()

def new(like: Tensor, *shape: int, dtype: DType = dtypes.float32) -> Tensor:
  return Tensor.invalids(*shape, dtype=dtype, device=like.device)

def parts(weight: Weight) -> list[Tensor]:
  return [weight.data, weight.data if weight.scale is None else weight.scale]

def embed(table: Weight | Tensor, ids: Tensor, streams: int, first: int = 0) -> Tensor:
  table = as_weight(table)
  T, (V, D) = ids.shape[0], table.data.shape
  return run("embed", [new(ids, T, streams, D)], [table.data, ids], T=T, S=streams, D=D, V=V, FIRST=first,
             HALF=int(table.kind == "BF16"))[0]

def rope_table(freqs: Tensor, at: Tensor, n: int, stride: int = 1) -> Tensor:
  r = freqs.shape[0] * 2
  return run("rope_table", [new(freqs, n, r // 2, 2)], [freqs, at], T=n, B=at.shape[1], R=r, STRIDE=stride)[0]

def hc_pre(h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, iters: int, hc_eps: float, eps: float,
           w4a8: bool = False) -> tuple[Tensor, Tensor, Tensor]:
  T, S, D = h.shape
  x, post, comb = run("hc_pre", [new(h, T, D), new(h, T, S), new(h, T, S, S)], [h, fn, scale, base, norm],
                      T=T, S=S, D=D, ITERS=iters, HC_EPS=float(hc_eps), EPS=float(eps), W4A8=int(w4a8))
  return x, post, comb

def hc_post(z: Tensor | tuple[Tensor, ...], h: Tensor, post: Tensor, comb: Tensor, w4a8: bool = False) -> Tensor:
  (T, S, D), shares = h.shape, z if isinstance(z, tuple) else (z,)
  return run("hc_post", [new(h, T, S, D)], [*shares, h, post, comb], T=T, S=S, D=D, RANK=0, RANKS=len(shares), W4A8=int(w4a8))[0]

def hc_head(h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, hc_eps: float, eps: float,
            w4a8: bool = False) -> tuple[Tensor, Tensor]:
  T, S, D = h.shape
  y, x = run("hc_head", [new(h, T, D), new(h, T, D)], [h, fn, scale, base, norm], T=T, S=S, D=D, HC_EPS=float(hc_eps), EPS=float(eps),
             W4A8=int(w4a8))
  return y, x

def rms_norm(x: Tensor, norm: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  T, D = x.shape
  return run("rms_norm", [new(x, T, D)], [x, norm], T=T, D=D, EPS=float(eps), W4A8=int(w4a8))[0]

def linear(x: Tensor, weight: Weight | Tensor, groups: int = 1, quantise: bool = True, rounded: bool = True,
           w4a8: bool = False) -> Tensor:
  weight = as_weight(weight)
  devices = weight.data.device
  split = len(devices) if isinstance(devices, tuple) and weight.data.uop.axis == 0 else 1  # each has rows, and columns of the result
  assert split == 1 or groups == 1, "groups of one device's rows and of another's would share a result"
  T, N, K = x.shape[0], weight.data.shape[0] // groups // split, x.shape[1] // groups
  quantise, out = quantise and w4a8 and weight.kind in ("FP8", "FP4"), new(x, T, groups * N)
  if split > 1: out = Tensor(out.uop.unshard(1), device=devices)
  return run("linear", [out], [x, *parts(weight)], T=T, G=groups, N=N, K=K, K_MOST=K, KIND=weight.kind,
             QUANTISE=int(quantise), ROUND=int(rounded and w4a8), W4A8=int(w4a8))[0]

def experts(x: Tensor, w13: Weight | Tensor, w2: Weight | Tensor, s13: Weight | Tensor, s2: Weight | Tensor, ids: Tensor,
            weights: Tensor, limit: float, first: int = 0, rounded: bool = True, w4a8: bool = False) -> Tensor:
  T, D = x.shape
  w13, w2, s13, s2 = (as_weight(w) for w in (w13, w2, s13, s2))
  E, I, J = w13.data.shape[0], w13.data.shape[1] // 2, s13.data.shape[0] // 2
  assert (w13.kind, s13.kind) == (w2.kind, s2.kind), "one format for all of an expert"
  ins = [x, *parts(w13), *parts(w2), *parts(s13), *parts(s2), ids, weights]
  return run("experts", [new(x, T, D)], ins, T=T, D=D, E=E, I=I, J=J, K_MOST=max(D, I, J), TOPK=ids.shape[1], LIMIT=float(limit),
             KIND=w13.kind, SHARED=s13.kind, FIRST=first, ROUND=int(rounded and w4a8), W4A8=int(w4a8))[0]

def head_rope(q: Tensor, rope: Tensor, heads: int, eps: float | None, index: bool = False, w4a8: bool = False) -> Tensor:
  T, D, r = q.shape[0], q.shape[1] // heads, rope.shape[1] * 2
  return run("head_rope", [new(q, T, heads, D)], [q, rope], T=T, H=heads, D=D, R=r, NORM=int(eps is not None), EPS=float(eps or 0),
             INDEX=int(index), HADAMARD=D ** -0.5, W4A8=int(w4a8))[0]

def kv_write(ring: Tensor, kv: Tensor, norm: Tensor, rope: Tensor, at: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  T, D = kv.shape
  return run("kv_write", [ring], [kv, norm, rope, at], True, T=T, B=at.shape[1], D=D, R=rope.shape[1] * 2, RING=ring.shape[1],
             EPS=float(eps), W4A8=int(w4a8))[0]

def kv_rows(kv: Tensor, norm: Tensor, rope: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  T, D = kv.shape
  return run("kv_rows", [new(kv, T, D)], [kv, norm, rope], T=T, D=D, R=rope.shape[1] * 2, EPS=float(eps), W4A8=int(w4a8))[0]

def compress(ring: Tensor, entries: Tensor, proj: Tensor, ape: Tensor, norm: Tensor, rope: Tensor, at: Tensor, eps: float,
             index: bool = False, rank: int = 0, ranks: int = 1, w4a8: bool = False) -> tuple[Tensor, Tensor]:
  T, D, B = proj.shape[0], norm.shape[0], at.shape[1]
  ring, entries = run("compress", [ring, entries], [proj, ape, norm, rope, at], True, T=T, B=B, BLOCKS=rope.shape[0] // B, D=D,
                      R=rope.shape[1] * 2, RING=ring.shape[1], C=entries.shape[1], RATIO=ape.shape[0], OVERLAP=int(ape.shape[1] == 2 * D),
                      EPS=float(eps), INDEX=int(index), HADAMARD=D ** -0.5, RANK=rank, RANKS=ranks, W4A8=int(w4a8))
  return ring, entries

def index_topk(q: Tensor, keys: Tensor, weight: Tensor, at: Tensor, n: int, k: int, ratio: int, w4a8: bool = False) -> Tensor:
  T, H, D = q.shape
  return run("index_topk", [new(q, T, n, dtype=dtypes.bool)], [q, keys, weight, at], T=T, B=at.shape[1], H=H, D=D, N=n, C=keys.shape[1],
             TOPK=k, RATIO=ratio, SCALE=(H * D) ** -0.5, W4A8=int(w4a8))[0]

def index_best(q: Tensor, keys: Tensor, weight: Tensor, at: Tensor, n: int, k: int, ratio: int, rank: int, ranks: int,
               w4a8: bool = False) -> Tensor:
  T, H, D = q.shape
  return run("index_best", [new(q, T, 2, k)], [q, keys, weight, at], T=T, B=at.shape[1], H=H, D=D, N=n, C=keys.shape[1], TOPK=k,
             RATIO=ratio, SCALE=(H * D) ** -0.5, KEPT=kept(n, rank, ranks), RANK=rank, RANKS=ranks, W4A8=int(w4a8))[0]

def index_choose(best: tuple[Tensor, ...], n: int, k: int, rank: int, ranks: int) -> Tensor:
  T, m = best[0].shape[0], kept(n, rank, ranks)
  return run("index_choose", [new(best[0], T, m, dtype=dtypes.bool)], list(best), T=T, KEPT=m, TOPK=k, RANK=rank, RANKS=ranks)[0]

def attend(q: Tensor, ring: Tensor, entries: Tensor | None, chosen: Tensor | None, sink: Tensor, rope: Tensor, at: Tensor,
           window: int, n: int, ratio: int, w4a8: bool = False) -> Tensor:
  T, H, D = q.shape
  if entries is None: n, ratio, entries = 0, 1, ring
  return run("attend", [new(q, T, H, D)], [q, ring, entries, sink if chosen is None else chosen, sink, rope, at], T=T, B=at.shape[1], H=H,
             D=D, R=rope.shape[1] * 2, RING=ring.shape[1], WINDOW=window, N=n, KEPT=n, C=entries.shape[1], RATIO=ratio,
             CHOSEN=int(chosen is not None), SCALE=D ** -0.5, W4A8=int(w4a8))[0]

def attend_part(q: tuple[Tensor, ...], ring: Tensor, entries: Tensor | None, chosen: Tensor | None, at: Tensor, window: int, n: int,
                ratio: int, rank: int, r: int, w4a8: bool = False) -> tuple[Tensor, ...]:
  T, H, D = q[0].shape
  if entries is None: n, ratio, entries = 0, 1, ring
  return tuple(run("attend_part", [new(x, T, H, D + 2) for x in q], [*q, ring, entries, at if chosen is None else chosen, at], T=T,
                   B=at.shape[1], H=H, D=D, R=r, RING=ring.shape[1], WINDOW=window, N=n, KEPT=kept(n, rank, len(q)), C=entries.shape[1],
                   RATIO=ratio, CHOSEN=int(chosen is not None), SCALE=D ** -0.5, RANK=rank, RANKS=len(q), W4A8=int(w4a8)))

def attend_merge(parts: tuple[Tensor, ...], sink: Tensor, rope: Tensor, w4a8: bool = False) -> Tensor:
  (T, H, D), like = parts[0].shape, parts[0]
  return run("attend_merge", [new(like, T, H, D - 2)], [*parts, sink, rope], T=T, H=H, D=D - 2, R=rope.shape[1] * 2, SCALE=1.0, RANK=0,
             RANKS=len(parts), W4A8=int(w4a8))[0]

def attend_block(q: Tensor, ring: Tensor, block: Tensor, sink: Tensor, rope: Tensor, at: Tensor, window: int,
                 w4a8: bool = False) -> Tensor:
  T, H, D = q.shape
  return run("attend_block", [new(q, T, H, D)], [q, ring, block, sink, rope, at], T=T, B=at.shape[1], H=H, D=D, R=rope.shape[1] * 2,
             RING=ring.shape[1], WINDOW=window, SCALE=D ** -0.5, W4A8=int(w4a8))[0]

def route(z: Tensor, bias: Tensor | None, tid2eid: Tensor | None, tokens: Tensor, k: int, factor: float) -> tuple[Tensor, Tensor]:
  T, E = z.shape
  choice = tid2eid if tid2eid is not None else bias
  assert choice is not None
  ids, weights = run("route", [new(z, T, k, dtype=dtypes.int32), new(z, T, k)], [z, choice, tokens],
                     T=T, E=E, TOPK=k, HASH=int(tid2eid is not None), FACTOR=float(factor))
  return ids, weights

def argmax(logits: Tensor) -> Tensor:
  return run("argmax", [new(logits, logits.shape[0], dtype=dtypes.int32)], [logits], T=logits.shape[0], V=logits.shape[1])[0]

def probs(logits: Tensor, settings: Tensor) -> Tensor:
  T, V = logits.shape
  return run("probs", [new(logits, T, V)], [logits, settings], T=T, B=settings.shape[0], V=V)[0]

def pick(weights: Tensor, seed: Tensor, at: Tensor, use: int = 0, offset: int = 0) -> Tensor:
  T, V = weights.shape
  return run("pick", [new(weights, T, dtype=dtypes.int32)], [weights, seed, at], T=T, B=at.shape[1], V=V, USE=use, OFFSET=offset)[0]

def markov(base: Tensor, row: int, w1: Weight | Tensor, w2: Weight | Tensor, token: Tensor) -> Tensor:
  w1, w2, B = as_weight(w1), as_weight(w2), token.shape[0]
  assert w1.kind == w2.kind
  V, R = w2.data.shape
  return run("markov", [new(base, B, V)], [base, w1.data, w2.data, token], B=B, K=base.shape[0] // B, V=V, R=R, ROW=row,
             HALF=int(w1.kind == "BF16"))[0]
