"""The operations of `twin` as CUDA kernels: same names, same signatures, cuda.cu holds the code; products are elsewhere.

As in `cpu`, a kernel is a tinygrad PROGRAM of source text, sizes as macros and explicit lists of the buffers it writes and
reads: without them a captured graph would have no edges between kernels that depend on each other. Blocks are cut so that
a few rows fill a large GPU, always by sizes of the model and never by the number of rows, on which no row's bits may
depend. Where one sum is spread over blocks, a second kernel adds the pieces up in a fixed order."""
import functools
import importlib
import importlib.resources
from typing import Any

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

from specgrad.quant import twin
from specgrad.quant.cpu import as_buffer
from specgrad.quant.twin import Weight, as_weight, kept
from specgrad.quant.twin import uniforms as uniforms  # small enough for tinygrad's own code

Sizes = tuple[tuple[str, int | float | str], ...]
Grid = tuple[int, int, int]

def __getattr__(name: str) -> Any:
  """The products, whose module takes the means of making a kernel from here and therefore can't be imported above."""
  if name not in ("linear", "experts", "markov"): raise AttributeError(name)
  try: products = importlib.import_module("specgrad.quant.cuda_products")
  except ModuleNotFoundError: products = twin
  return getattr(products, name)

@functools.cache
def _source() -> str: return importlib.resources.files("specgrad.quant").joinpath("cuda.cu").read_text()

def _text(name: str, sizes: Sizes) -> tuple[str, str]:
  """A kernel's symbol and its source."""
  symbol = f"{name}_" + "_".join(str(v).replace("-", "m").replace(".", "d").replace("+", "") for _, v in sizes)
  macros = [("NAME", symbol), (f"KERNEL_{name}", 1), *sizes]
  return symbol, "".join(f"#define {k} {v}{'f' if isinstance(v, float) else ''}\n" for k, v in macros) + _source()

def _program(*bufs: UOp, name: str, writes: int, inplace: bool, grid: Grid, sizes: Sizes) -> UOp:
  bufs = tuple(b.base for b in bufs)
  symbol, text = _text(name, sizes)
  sink = UOp.sink(*bufs, arg=KernelInfo(name=symbol))
  info = ProgramInfo(name=symbol, global_size=grid, local_size=(int(dict(sizes)["THREADS"]), 1, 1), globals=tuple(range(len(bufs))),
                     outs=tuple(range(writes)), ins=tuple(range(0 if inplace else writes, len(bufs))))
  return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=(*bufs, sink)), UOp(Ops.SOURCE, arg=text)), arg=info)

def _run(name: str, outs: list[Tensor], ins: list[Tensor], grid: tuple[int, ...], threads: int, inplace: bool = False,
         **sizes: int | float | str) -> list[Tensor]:
  """The tensors of `outs` after kernel `name` wrote them. `inplace`: they are read as well (cache buffers)."""
  x, y, z = (*grid, 1, 1)[:3]
  fxn = functools.partial(_program, name=name, writes=len(outs), inplace=inplace, grid=(x, y, z),
                          sizes=(("THREADS", threads), *sizes.items()))
  return Tensor.custom_kernel(*outs, *[as_buffer(t) for t in ins], fxn=fxn)[:len(outs)]

def _new(like: Tensor, *shape: int, dtype: DType = dtypes.float32) -> Tensor:
  return Tensor.invalids(*shape, dtype=dtype, device=like.device)

def _parts(n: int, size: int) -> int: return -(-n // size)

def _threads(n: int, most: int = 1024) -> int: return min(most, _parts(n, 32) * 32)

def _vec(n: int) -> int: return 4 if n % 4 == 0 else 1

def embed(table: Weight | Tensor, ids: Tensor, streams: int, first: int = 0) -> Tensor:
  table = as_weight(table)
  T, (V, D) = ids.shape[0], table.data.shape
  per = _vec(D) * 128
  return _run("embed", [_new(ids, T, streams, D)], [table.data, ids], (_parts(D, per), T), 128, V=V, FIRST=first, S=streams, D=D,
              HALF=int(table.kind == "BF16"))[0]

def rope_table(freqs: Tensor, at: Tensor, n: int, stride: int = 1) -> Tensor:
  r = freqs.shape[0] * 2
  return _run("rope_table", [_new(freqs, n, r // 2, 2)], [freqs, at], (n,), 32, B=at.shape[1], R=r, STRIDE=stride)[0]

# ------------------------------------------------------------------------------------------------ hyper-connections
def _hc_mix(h: Tensor, fn: Tensor) -> Tensor:
  T, S, D = h.shape
  M, pieces, rows = fn.shape[0], _parts(S * D, 128), min(T, 8)
  return _run("hc_mix", [_new(h, T, M + 1, pieces)], [h, fn], (pieces, _parts(T, rows)), 128, T=T, S=S, D=D, M=M, ROWS=rows)[0]

def hc_pre(h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, iters: int, hc_eps: float, eps: float,
           w4a8: bool = False) -> tuple[Tensor, Tensor, Tensor]:
  T, S, D = h.shape
  assert S * S <= 32, "Sinkhorn runs in one warp"
  x, post, comb = _run("hc_pre", [_new(h, T, D), _new(h, T, S), _new(h, T, S, S)], [_hc_mix(h, fn), h, scale, base, norm], (2, T),
                       _threads(D // _vec(D)), S=S, D=D, M=fn.shape[0], ITERS=iters, HC_EPS=float(hc_eps), EPS=float(eps), W4A8=int(w4a8))
  return x, post, comb

def hc_post(z: Tensor | tuple[Tensor, ...], h: Tensor, post: Tensor, comb: Tensor, w4a8: bool = False) -> Tensor:
  (T, S, D), shares = h.shape, z if isinstance(z, tuple) else (z,)
  per, ranks = _vec(D) * 64, dict[str, Any](RANK=0, RANKS=len(shares)) if len(shares) > 1 else {}
  return _run("hc_post", [_new(h, T, S, D)], [*shares, h, post, comb], (_parts(D, per), T), 64, S=S, D=D, W4A8=int(w4a8), **ranks)[0]

def hc_head(h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, hc_eps: float, eps: float,
            w4a8: bool = False) -> tuple[Tensor, Tensor]:
  T, S, D = h.shape
  y, x = _run("hc_head", [_new(h, T, D), _new(h, T, D)], [_hc_mix(h, fn), h, scale, base, norm], (T,), _threads(D // _vec(D)),
              S=S, D=D, M=fn.shape[0], HC_EPS=float(hc_eps), EPS=float(eps), W4A8=int(w4a8))
  return y, x

def rms_norm(x: Tensor, norm: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  T, D = x.shape
  return _run("rms_norm", [_new(x, T, D)], [x, norm], (T,), _threads(D // _vec(D)), D=D, EPS=float(eps), W4A8=int(w4a8))[0]

# ------------------------------------------------------------------------------------------------ caches and attention
def head_rope(q: Tensor, rope: Tensor, heads: int, eps: float | None, index: bool = False, w4a8: bool = False) -> Tensor:
  T, D, r = q.shape[0], q.shape[1] // heads, rope.shape[1] * 2
  return _run("head_rope", [_new(q, T, heads, D)], [q, rope], (heads, T), _threads(D, 128), H=heads, D=D, R=r, NORM=int(eps is not None),
              EPS=float(eps or 0), INDEX=int(index), HADAMARD=D ** -0.5, W4A8=int(w4a8))[0]

def kv_write(ring: Tensor, kv: Tensor, norm: Tensor, rope: Tensor, at: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  T, D = kv.shape
  return _run("kv_write", [ring], [kv, norm, rope, at], (T,), _threads(D, 256), True, B=at.shape[1], D=D, R=rope.shape[1] * 2,
              RING=ring.shape[1], EPS=float(eps), INDEX=0, W4A8=int(w4a8))[0]

def kv_rows(kv: Tensor, norm: Tensor, rope: Tensor, eps: float, w4a8: bool = False) -> Tensor:
  T, D = kv.shape
  return _run("kv_rows", [_new(kv, T, D)], [kv, norm, rope], (T,), _threads(D, 256), D=D, R=rope.shape[1] * 2, EPS=float(eps), INDEX=0,
              W4A8=int(w4a8))[0]

def compress(ring: Tensor, entries: Tensor, proj: Tensor, ape: Tensor, norm: Tensor, rope: Tensor, at: Tensor, eps: float,
             index: bool = False, rank: int = 0, ranks: int = 1, w4a8: bool = False) -> tuple[Tensor, Tensor]:
  T, D, B, blocks = proj.shape[0], norm.shape[0], at.shape[1], rope.shape[0]
  ring, entries = _run("compress", [ring, entries], [proj, ape, norm, rope, at], (blocks + T,), _threads(D), True, B=B, D=D,
                       R=rope.shape[1] * 2, NB=blocks // B, RING=ring.shape[1], C=entries.shape[1], RATIO=ape.shape[0],
                       OVERLAP=int(ape.shape[1] == 2 * D), EPS=float(eps), INDEX=int(index), HADAMARD=D ** -0.5, RANK=rank, RANKS=ranks,
                       W4A8=int(w4a8))
  return ring, entries

def _index_scores(q: Tensor, keys: Tensor, weight: Tensor, at: Tensor, n: int, unscored: int, ratio: int, rank: int, ranks: int,
                  w4a8: bool) -> Tensor:
  (T, H, D), m = q.shape, kept(n, rank, ranks)
  per = 32 if not w4a8 or D % 32 else 128 if m <= 4096 else 512  # keys of a block; more of them, and fewer blocks read the query
  return _run("index_scores", [_new(q, T, m, dtype=dtypes.uint16 if w4a8 else dtypes.uint32)], [q, keys, weight, at],
              (_parts(m, per), T), 128, B=at.shape[1], H=H, D=D, N=n, KEPT=m, C=keys.shape[1], KEYS=per, UNSCORED=unscored, RATIO=ratio,
              SCALE=(H * D) ** -0.5, RANK=rank, RANKS=ranks, W4A8=int(w4a8))[0]

def index_topk(q: Tensor, keys: Tensor, weight: Tensor, at: Tensor, n: int, k: int, ratio: int, w4a8: bool = False) -> Tensor:
  score = _index_scores(q, keys, weight, at, n, k, ratio, 0, 1, w4a8)
  threads = _threads(_parts(n, 8), 1024 if n <= 16384 else 512)   # each keeps its scores in registers
  return _run("index_topk", [_new(q, q.shape[0], n, dtype=dtypes.bool)], [score, at], (q.shape[0],), threads, B=at.shape[1], N=n, KEPT=n,
              TOPK=k, RATIO=ratio, W4A8=int(w4a8))[0]

def index_best(q: Tensor, keys: Tensor, weight: Tensor, at: Tensor, n: int, k: int, ratio: int, rank: int, ranks: int,
               w4a8: bool = False) -> Tensor:
  score, m = _index_scores(q, keys, weight, at, n, 0, ratio, rank, ranks, w4a8), kept(n, rank, ranks)
  return _run("index_best", [_new(q, q.shape[0], 2, k)], [score, at], (q.shape[0],), _threads(_parts(m, 8), 512), B=at.shape[1], N=n,
              KEPT=m, TOPK=k, RATIO=ratio, RANK=rank, RANKS=ranks, W4A8=int(w4a8))[0]

def index_choose(best: tuple[Tensor, ...], n: int, k: int, rank: int, ranks: int) -> Tensor:
  T, m = best[0].shape[0], kept(n, rank, ranks)
  return _run("index_choose", [_new(best[0], T, m, dtype=dtypes.bool)], list(best), (T,), _threads(max(m // 16, k)), KEPT=m, TOPK=k,
              RANK=rank, RANKS=ranks)[0]

SPLITS = 16                                                # shares of the visible rows: enough blocks to fill a GPU at six rows

def _ended(part: Tensor, ends: Tensor, q: Tensor, sink: Tensor, rope: Tensor, w4a8: bool) -> Tensor:
  T, H, D = q.shape
  return _run("attend_end", [_new(q, T, H, D)], [part, ends, sink, rope], (H, T), _threads(D // _vec(D), 128), H=H, D=D,
              R=rope.shape[1] * 2, SPLITS=SPLITS, INDEX=0, EPS=0.0, W4A8=int(w4a8))[0]

def attend(q: Tensor, ring: Tensor, entries: Tensor | None, chosen: Tensor | None, sink: Tensor, rope: Tensor, at: Tensor,
           window: int, n: int, ratio: int, w4a8: bool = False) -> Tensor:
  T, H, D = q.shape
  if entries is None: n, ratio, entries = 0, 1, ring
  part, ends = _run("attend", [_new(q, SPLITS, T, H, D), _new(q, SPLITS, T, H, 2)],
                    [q, ring, entries, sink if chosen is None else chosen, at], (SPLITS, _parts(H, 16), T), 128, B=at.shape[1], H=H, D=D,
                    R=rope.shape[1] * 2, RING=ring.shape[1], C=entries.shape[1], WINDOW=window, N=n, KEPT=n, RATIO=ratio,
                    CHOSEN=int(chosen is not None), SCALE=D ** -0.5, SPLITS=SPLITS, W4A8=int(w4a8))
  return _ended(part, ends, q, sink, rope, w4a8)

def attend_part(q: tuple[Tensor, ...], ring: Tensor, entries: Tensor | None, chosen: Tensor | None, at: Tensor, window: int, n: int,
                ratio: int, rank: int, r: int, w4a8: bool = False) -> tuple[Tensor, ...]:
  (T, H, D), ranks = q[0].shape, len(q)
  if entries is None: n, ratio, entries = 0, 1, ring
  part, ends = _run("attend_part", [_new(q[0], SPLITS, T, ranks * H, D), _new(q[0], SPLITS, T, ranks * H, 2)],
                    [*q, ring, entries, at if chosen is None else chosen, at], (SPLITS, ranks * _parts(H, 16), T), 128, B=at.shape[1], H=H,
                    D=D, R=r, RING=ring.shape[1], C=entries.shape[1], WINDOW=window, N=n, KEPT=kept(n, rank, ranks), RATIO=ratio,
                    CHOSEN=int(chosen is not None), SCALE=D ** -0.5, SPLITS=SPLITS, RANK=rank, RANKS=ranks, W4A8=int(w4a8))
  return tuple(_run("attend_share", [_new(x, T, H, D + 2) for x in q], [part, ends], (ranks * H, T), _threads(D // _vec(D), 128), H=H, D=D,
                    SPLITS=SPLITS, RANK=0, RANKS=ranks))

def attend_merge(parts: tuple[Tensor, ...], sink: Tensor, rope: Tensor, w4a8: bool = False) -> Tensor:
  (T, H, D), like = parts[0].shape, parts[0]
  return _run("attend_merge", [_new(like, T, H, D - 2)], [*parts, sink, rope], (H, T), _threads(D - 2, 128), H=H, D=D - 2,
              R=rope.shape[1] * 2, INDEX=0, EPS=0.0, RANK=0, RANKS=len(parts), W4A8=int(w4a8))[0]

def attend_block(q: Tensor, ring: Tensor, block: Tensor, sink: Tensor, rope: Tensor, at: Tensor, window: int,
                 w4a8: bool = False) -> Tensor:
  T, H, D = q.shape
  part, ends = _run("attend_block", [_new(q, SPLITS, T, H, D), _new(q, SPLITS, T, H, 2)], [q, ring, block, at],
                    (SPLITS, _parts(H, 16), T), 128, B=at.shape[1], H=H, D=D, R=rope.shape[1] * 2, RING=ring.shape[1], WINDOW=window,
                    SCALE=D ** -0.5, SPLITS=SPLITS, W4A8=int(w4a8))
  return _ended(part, ends, q, sink, rope, w4a8)

# ------------------------------------------------------------------------------------------------ router and choice of a token
def route(z: Tensor, bias: Tensor | None, tid2eid: Tensor | None, tokens: Tensor, k: int, factor: float) -> tuple[Tensor, Tensor]:
  T, E = z.shape
  choice = tid2eid if tid2eid is not None else bias
  assert choice is not None
  ids, weights = _run("route", [_new(z, T, k, dtype=dtypes.int32), _new(z, T, k)], [z, choice, tokens], (T,), _threads(E),
                      V=choice.shape[0], E=E, TOPK=k, HASH=int(tid2eid is not None), FACTOR=float(factor))
  return ids, weights

BLOCKS = 32                                                # that share a row of logits

def _best(value: Tensor, index: Tensor) -> Tensor:
  T = value.shape[0]
  return _run("argmax_merge", [_new(value, T, dtype=dtypes.int32)], [value, index], (T,), 32, BLOCKS=BLOCKS)[0]

def argmax(logits: Tensor) -> Tensor:
  T, V = logits.shape
  value, index = _run("argmax", [_new(logits, T, BLOCKS), _new(logits, T, BLOCKS, dtype=dtypes.int32)], [logits], (BLOCKS, T), 256, V=V,
                      BLOCKS=BLOCKS)
  return _best(value, index)

def probs(logits: Tensor, settings: Tensor) -> Tensor:
  T, V = logits.shape
  return _run("probs", [_new(logits, T, V)], [logits, settings], (T,), 1024, B=settings.shape[0], V=V)[0]

def pick(weights: Tensor, seed: Tensor, at: Tensor, use: int = 0, offset: int = 0) -> Tensor:
  T, V = weights.shape
  value, index = _run("pick", [_new(weights, T, BLOCKS), _new(weights, T, BLOCKS, dtype=dtypes.int32)], [weights, seed, at],
                      (BLOCKS, T), 256, B=at.shape[1], V=V, USE=use, OFFSET=offset, BLOCKS=BLOCKS)
  return _best(value, index)
