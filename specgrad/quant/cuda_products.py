"""Products with stored weights as CUDA kernels: `linear`, `experts` and `markov` of twin.py, cuda_products.cu holds the code.

A kernel is a tinygrad PROGRAM of source text for the device's own compiler, with explicit lists of the buffers it writes and
reads: without them a captured CUDA graph has no edges. A product is a small kernel that lays x out and rounds it, and one that
streams the weights. Products of many rows with FP4 experts have a variant for processors with block-scaled tensor cores, which
tinygrad's names of architectures can't ask for: it is compiled here and handed over as a binary."""
import functools
import importlib.resources
import shutil
import weakref
from typing import NamedTuple

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.runtime.support.compiler_cuda import NVCCCompiler, NVRTCCompiler
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

from specgrad.quant.cpu import as_buffer, new, parts
from specgrad.quant.twin import Weight, as_weight

@functools.cache
def source() -> str: return importlib.resources.files("specgrad.quant").joinpath("cuda_products.cu").read_text()

Sizes = tuple[tuple[str, int | float | str], ...]

class Launch(NamedTuple):
  """A kernel of cuda_products.cu, its sizes as macros, and how many blocks of how many threads."""
  kernel: str
  blocks: tuple[int, int]
  threads: int
  sizes: Sizes
  arch: str = ""                                           # what it must be compiled for, if not by tinygrad for the device

  @property
  def symbol(self) -> str:
    return f"{self.kernel}_" + "_".join(str(v).replace("-", "m").replace(".", "d").replace("+", "") for _, v in self.sizes)

  def text(self) -> str:
    macros = [("NAME", self.symbol), (f"KERNEL_{self.kernel}", 1), *self.sizes]
    return "".join(f"#define {k} {v}{'f' if isinstance(v, float) else ''}\n" for k, v in macros) + source()

def compiler(arch: str) -> NVCCCompiler | NVRTCCompiler: return (NVCCCompiler if shutil.which("nvcc") else NVRTCCompiler)(arch, ptx=False)

@functools.cache
def available(arch: str) -> bool:
  """Whether there is a compiler that knows this architecture."""
  try: return bool(compiler(arch).compile_cached('extern "C" __global__ void nothing() {}'))
  except (RuntimeError, OSError, AttributeError): return False

@functools.cache
def block_scaled(device: str) -> str:
  """sm_120a or its like if the device has mma with a scale for each 32 of k and it can be compiled for, else nothing."""
  arch = getattr(getattr(Device[device].renderer, "target", None), "arch", "")
  return f"{arch}a" if arch in ("sm_120", "sm_121") and available(f"{arch}a") else ""

def _program(*bufs: UOp, launch: Launch, writes: int) -> UOp:
  bufs = tuple(b.base for b in bufs)
  sink = UOp.sink(*bufs, arg=KernelInfo(name=launch.symbol))
  info = ProgramInfo(name=launch.symbol, global_size=(*launch.blocks, 1), local_size=(launch.threads, 1, 1),
                     globals=tuple(range(len(bufs))), outs=tuple(range(writes)), ins=tuple(range(writes, len(bufs))))
  text = launch.text()
  binary = (UOp(Ops.BINARY, arg=compiler(launch.arch).compile_cached(text)),) if launch.arch else ()
  return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=(*bufs, sink)), UOp(Ops.SOURCE, arg=text), *binary), arg=info)

def run(launch: Launch, outs: list[Tensor], ins: list[Tensor]) -> list[Tensor]:
  """The tensors of `outs` after the kernel wrote them."""
  fxn = functools.partial(_program, launch=launch, writes=len(outs))
  return Tensor.custom_kernel(*outs, *[t if is_shards(t) else as_buffer(t) for t in ins], fxn=fxn)[:len(outs)]

def is_shards(t: Tensor) -> bool:
  """Whether each device holds its part of t as a whole buffer: as_buffer would copy it, weights too, in every step."""
  part = t.uop.src[0] if t.uop.op is Ops.UNSHARD else None
  return part is not None and part.op in (Ops.BUFFER, Ops.RESHAPE) and part.base.op is Ops.BUFFER and \
    part.base.max_numel() == part.max_numel()

# ------------------------------------------------------------------------------------------------ how a product is cut up
SPAN = {"FP4": 32, "FP8": 16, "BF16": 8, "F32": 8}         # as in cuda_products.cu
PIECE = 4

def ceil(a: int, b: int) -> int: return -(-a // b)

def long(kind: str, k: int) -> int: return ceil(k, 4 * SPAN[kind]) * 4 * SPAN[kind]

def terms(kind: str, quantised: bool) -> int: return 1 if quantised and kind in ("FP8", "FP4") else 3

def warps(kind: str, n: int, k: int) -> int:
  """Warps that share a tile of 16 rows: each then has a piece of k or more, and even a matrix of few rows has many loads in
  flight. It settles the order of the sums, so it looks at nothing but the weight."""
  return min(ceil(k, 4 * SPAN[kind] * PIECE), 16 if n <= 2048 and kind != "F32" else 8)

def tile(T: int, warps: int, terms: int) -> tuple[int, int]:
  """Tiles of 16 weight rows and of 8 rows of x in a block: with many rows of x, each weight and each x is used more often, as
  far as there are registers."""
  return (2 if T > 8 and warps <= 8 and terms == 1 else 1), min(ceil(T, 8), 4)

def laid_size(kind: str, rows: int, k: int, quantised: bool, mx: bool = False) -> int:
  """uint16 of `rows` rows of k as a product with weights of this kind wants them."""
  return rows * ceil(k + k // 128, 16) * 8 if mx and kind == "FP4" else terms(kind, quantised) * rows * long(kind, k)

def takes_block_scaled(T: int, D: int, I: int, kind: str, w4a8: bool) -> bool:
  return T >= MANY and w4a8 and kind == "FP4" and D % 128 == 0 and I % 128 == 0

def prepare_launch(T: int, K: int, kind: str, quantise: bool) -> Launch:
  return Launch("prepare", (ceil(T * ceil(K, 128), 8), 1), 256, (("T", T), ("K", K), ("KIND", kind), ("QUANTISE", int(quantise))))

def linear_launch(T: int, G: int, N: int, K: int, kind: str, quantise: bool, rounded: bool) -> Launch:
  W = warps(kind, G * N, K)
  R, NT = tile(T, W, terms(kind, quantise))
  sizes = (("T", T), ("G", G), ("N", N), ("K", K), ("KIND", kind), ("QUANTISE", int(quantise)), ("ROUND", int(rounded)), ("R", R),
           ("NT", NT), ("WARPS", W))
  return Launch("linear", (G * ceil(N, 16 * R), ceil(T, 8 * NT)), 32 * W, sizes)

MANY = 16                                                  # rows from which block-scaled products take over

def expert_launches(T: int, D: int, E: int, I: int, J: int, topk: int, limit: float, kind: str, shared: str, w4a8: bool,
                    arch: str = "", first: int = 0, rounded: bool = True) -> list[Launch]:
  """Of plan, up, middle, down and sum. arch: with block-scaled products, compiled for this."""
  pairs = T * topk
  most = min(pairs, (pairs + 7 * min(E, pairs)) // 8)      # tiles of eight pairs of one expert, at worst
  tiles = most + ceil(T, 8)
  sizes: Sizes = (("T", T), ("D", D), ("E", E), ("I", I), ("J", J), ("TOPK", topk), ("LIMIT", float(limit)), ("KIND", kind),
                  ("SHARED", shared), ("W4A8", int(w4a8)), ("MOST_TILES", most), ("FIRST", first), ("ROUND", int(rounded and w4a8)))
  if arch: sizes = (*sizes, ("MX", 1))
  up, down = max(warps(kind, 2 * I, D), warps(shared, 2 * J, D)), max(warps(kind, D, I), warps(shared, D, J))
  return [Launch("experts_plan", (ceil(T * ceil(D, 128), 8) + 1, 1), 256, sizes),
          Launch("experts_up", (ceil(max(I, J), 16), tiles), 32 * up, (*sizes, ("WARPS", up)), arch),
          Launch("experts_middle", (ceil(pairs * ceil(I, 128) + T * ceil(J, 128), 8), 1), 256, sizes),
          Launch("experts_down", (ceil(D, 16), tiles), 32 * down, (*sizes, ("WARPS", down)), arch),
          Launch("experts_sum", (ceil(T * D, 256), 1), 256, sizes)]

def markov_launch(V: int, rank: int, row: int, half: bool, batch: int = 1, rows: int = 1) -> Launch:
  sizes = ("V", V), ("RANK", rank), ("ROWS", rows), ("ROW", row), ("HALF", int(half))
  return Launch("markov", (ceil(V, 64), batch), 256, sizes)

# ------------------------------------------------------------------------------------------------ the operations
LAID: dict[int, tuple[UOp, dict[Launch, Tensor]]] = {}     # by the identity of a living tensor: what it was then, and that laid out

def laid_out(x: Tensor, launch: Launch, size: int) -> Tensor:
  """What the kernel makes of x, once for all products with this very tensor that want the same. Not of a tensor that is a buffer
  by now: its contents may change."""
  make = lambda: run(launch, [new(x, size, dtype=dtypes.uint16)], [x])[0]
  if x.uop.base.op is not Ops.AFTER: return make()
  if id(x) not in LAID: weakref.finalize(x, LAID.pop, id(x), None)
  if id(x) not in LAID or LAID[id(x)][0] is not x.uop: LAID[id(x)] = x.uop, {}
  made = LAID[id(x)][1]
  if launch not in made: made[launch] = make()
  return made[launch]

def linear(x: Tensor, weight: Weight | Tensor, groups: int = 1, quantise: bool = True, rounded: bool = True,
           w4a8: bool = False) -> Tensor:
  weight = as_weight(weight)
  devices = len(weight.data.device) if isinstance(weight.data.device, tuple) and weight.data.uop.axis == 0 else 1
  assert devices == 1 or groups == 1, "groups of one device's rows and of another's would share a result"
  T, N, K = x.shape[0], weight.data.shape[0] // groups // devices, x.shape[1] // groups
  quantise = quantise and w4a8 and weight.kind in ("FP8", "FP4")
  laid = laid_out(x, prepare_launch(T * groups, K, weight.kind, quantise), laid_size(weight.kind, T * groups, K, quantise))
  launch = linear_launch(T, groups, N, K, weight.kind, quantise, rounded and w4a8)
  out = new(x, T, groups * N)
  if devices > 1: out = Tensor(out.uop.unshard(1), device=weight.data.device)  # each device has columns: those of its rows of w
  return run(launch, [out], [laid, *parts(weight)])[0]

def experts(x: Tensor, w13: Weight | Tensor, w2: Weight | Tensor, s13: Weight | Tensor, s2: Weight | Tensor, ids: Tensor,
            weights: Tensor, limit: float, first: int = 0, rounded: bool = True, w4a8: bool = False) -> Tensor:
  T, D = x.shape
  w13, w2, s13, s2 = (as_weight(w) for w in (w13, w2, s13, s2))
  E, I, J, pairs = w13.data.shape[0], w13.data.shape[1] // 2, s13.data.shape[0] // 2, T * ids.shape[1]
  kind, shared = w13.kind, s13.kind
  assert (kind, shared) == (w2.kind, s2.kind), "one format for all of an expert"
  device = x.device if isinstance(x.device, str) else x.device[0]
  arch = block_scaled(device) if takes_block_scaled(T, D, I, kind, w4a8) else ""
  plan_, up, middle, down, total = expert_launches(T, D, E, I, J, ids.shape[1], limit, kind, shared, w4a8, arch, first, rounded)

  def laid(kind: str, rows: int, k: int) -> Tensor: return new(x, laid_size(kind, rows, k, w4a8, bool(arch)), dtype=dtypes.uint16)
  most = dict(plan_.sizes)["MOST_TILES"]
  plan, xr, xs = run(plan_, [new(x, 1 + 10 * int(most) + pairs, dtype=dtypes.int32), laid(kind, T, D), laid(shared, T, D)], [x, ids])
  t, ts = run(up, [new(x, pairs, I), new(x, T, J)], [plan, xr, xs, *parts(w13), *parts(s13), weights])
  y, ys = run(middle, [laid(kind, pairs, I), laid(shared, T, J)], [t, ts])
  v = run(down, [new(x, pairs + T, D)], [plan, y, ys, *parts(w2), *parts(s2)])[0]
  return run(total, [new(x, T, D)], [v, plan])[0]

def markov(base: Tensor, row: int, w1: Weight | Tensor, w2: Weight | Tensor, token: Tensor) -> Tensor:
  w1, w2 = as_weight(w1), as_weight(w2)
  assert w1.kind == w2.kind
  V, rank = w2.data.shape
  batch = token.shape[0]
  launch = markov_launch(V, rank, row, w1.kind == "BF16", batch, base.shape[0] // batch)
  return run(launch, [new(base, batch, V)], [base, w1.data, w2.data, token])[0]
