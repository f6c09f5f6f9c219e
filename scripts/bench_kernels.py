"""Measures the kernels that read weights and caches, against how fast this device reads memory at all.

Every figure is the best of 25 calls of a captured graph, after warm-up, beside the best of a read-bandwidth loop that takes
turns with it: other programs only ever make both slower. And beside each figure stands the greatest difference from the
readable twin, relative to the greatest result. On a CPU the clock is the processor time of this process, since other programs
would count in any other (--clock wall: elapsed time).
A table for people, then one JSON object as the last line of stdout.
"""
from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import evidence

import specgrad

SCHEMA, RUNS, WARM = "specgrad.bench_kernels/2", 25, 3

class Shapes(NamedTuple):
  """N x K of the single products; D, E, I, J, k of the experts; heads and their width; contexts; bytes that no cache holds."""
  N: int
  K: int
  D: int
  E: int
  I: int
  J: int
  k: int
  heads: int
  width: int
  contexts: tuple[int, ...]
  spill: int

SHAPES = {"demo": Shapes(1024, 256, 256, 16, 128, 128, 2, 4, 128, (512, 4096), 1 << 25),
          "mid": Shapes(8192, 4096, 2048, 40, 512, 512, 6, 16, 512, (512, 8192), 3 << 25),
          "real": Shapes(32768, 4096, 4096, 256, 2048, 2048, 6, 64, 512, (512, 8192, 131072), 1 << 30)}

def parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = evidence.Parser("bench_kernels", "Measure the kernels against memory bandwidth.")
  parser.add_argument("--device", default="CPU", metavar="D", help="CPU, CUDA or NV (default: CPU)")
  parser.add_argument("--shapes", default="mid", choices=list(SHAPES), help="demo, mid or real, the last those of V4-Flash (default: mid)")
  parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 128], metavar="M", help="of the products (default: 1 6 128)")
  parser.add_argument("--only", default="", metavar="NAME", help="kernels whose name contains this")
  parser.add_argument("--clock", choices=["processor", "wall"], help="(default: processor on a CPU, wall elsewhere)")
  args = parser.parse_args(argv)
  if args.device.split(":")[0] not in ("CPU", "CUDA", "NV"): raise ValueError(f"--device={args.device}, want CPU, CUDA or NV")
  for m in args.rows:
    if not 1 <= m <= 128: raise ValueError(f"--rows={m}, want 1 to 128")
  args.clock = args.clock or ("processor" if args.device.startswith("CPU") else "wall")
  return args

@dataclass
class Row:
  kernel: str
  detail: str
  megabytes: float
  milliseconds: float
  gb_s: float
  share: float                                             # of the read-bandwidth loop
  difference: float                                        # from the twin, relative to its greatest result

# ------------------------------------------------------------------------------------------------ reading as fast as possible
READ_C = """
typedef unsigned long v8 __attribute__((vector_size(64), aligned(8)));
void NAME(float* restrict out, const unsigned char* restrict in) {   // four streams far apart: processors read ahead in each
  v8 s[8] = {0}; const v8* v = (const v8*)in; const long m = BYTES / 64 / 4;
  for (long i = 0; i < m; i += 2) for (int j = 0; j < 4; j++) { s[j] += v[j * m + i]; s[j + 4] += v[j * m + i + 1]; }
  v8 t = s[0]; for (int j = 1; j < 8; j++) t += s[j];
  unsigned long r = 0; for (int j = 0; j < 8; j++) r += t[j];
  out[0] = (float)r;
}
"""
READ_CUDA = """
extern "C" __global__ void __launch_bounds__(256) NAME(uint4* __restrict__ out, const uint4* __restrict__ in) {
  long long i = (long long)blockIdx.x * 1024 + threadIdx.x; uint4 v[4];
  for (int j = 0; j < 4; j++) v[j] = in[i + 256 * j];
  for (int j = 0; j < 4; j++) out[i + 256 * j] = v[j];
}
"""

def reader(device: str, size: int) -> tuple[Callable[[], Any], int]:
  """A captured call that reads `size` bytes (on a GPU: copies them), and how many bytes it moves."""
  from tinygrad import Tensor, TinyJit, UOp, dtypes
  from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo
  cpu = device.startswith("CPU")

  def program(out: UOp, buf: UOp) -> UOp:
    bufs, name = (out.base, buf.base), f"read_{size}"
    text = f"#define NAME {name}\n#define BYTES {size}L\n" + (READ_C if cpu else READ_CUDA)
    sink = UOp.sink(*bufs, arg=KernelInfo(name=name))
    info = ProgramInfo(name=name, global_size=(1 if cpu else size // 16384, 1, 1), local_size=None if cpu else (256, 1, 1),
                       globals=(0, 1), outs=(0,), ins=(1,))
    return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=(*bufs, sink)), UOp(Ops.SOURCE, arg=text)), arg=info)
  data = Tensor.full((size,), 3, dtype=dtypes.uint8, device=device).clone().realize()

  def call() -> Any:
    out = Tensor.invalids(4 if cpu else size, dtype=dtypes.float32 if cpu else dtypes.uint8, device=device)
    return Tensor.custom_kernel(out, data, fxn=program)[0].realize()
  return TinyJit(call), size if cpu else 2 * size

# ------------------------------------------------------------------------------------------------ the bench
class Bench:
  def __init__(self, args: argparse.Namespace):
    import numpy as np
    from tinygrad import Device

    from specgrad import cpu_graph
    from specgrad.quant import operations
    cpu_graph.install(args.device)
    self.args, self.s, self.device = args, SHAPES[args.shapes], args.device
    self.rng, self.rows, self.reads = np.random.default_rng(0), list[Row](), list[float]()
    self.ops = operations(self.device, True)
    self.synchronize = Device[self.device].synchronize
    self.read, self.read_bytes = reader(self.device, 1 << 27 if self.device.startswith("CPU") else 1 << 29)
    for _ in range(WARM): self.read()

  def tensor(self, a: Any) -> Any:
    from tinygrad import Tensor
    return Tensor(a, device=self.device).clone().realize()

  def stored(self, kind: str, *shape: int) -> Any:
    """Random codes, none NaN, and scales near 2^-9."""
    import numpy as np

    from specgrad.quant.twin import Weight
    *lead, K = shape
    codes = self.rng.integers(0, 256, (*lead, K if kind == "FP8" else K // 2), dtype=np.uint8)
    if kind == "FP8": codes &= 0xfe
    scale = self.rng.integers(116, 120, (*lead, K // (128 if kind == "FP8" else 32)), dtype=np.uint8)
    return Weight(kind, self.tensor(codes), self.tensor(scale))

  def normal(self, *shape: int) -> Any:
    import numpy as np
    return self.tensor((self.rng.normal(size=shape).astype(np.float32).view(np.uint32) & np.uint32(0xffff0000)).view(np.float32))

  def seconds(self, call: Callable[[], Any]) -> float:
    self.synchronize()
    clock = time.process_time if self.args.clock == "processor" else time.perf_counter
    start = clock()
    call()
    self.synchronize()
    return clock() - start

  def measure(self, kernel: str, detail: str, calls: list[Callable[[], Any]], size: int, check: Callable[[], tuple[Any, Any]]) -> None:
    """calls: the same on other data, one after another in one captured graph, so that no cache holds what they read; `size`
    bytes each. check() -> (what the kernel gives, what the twin gives) as arrays."""
    import numpy as np
    from tinygrad import Tensor, TinyJit

    def all_of_them() -> tuple[Any, ...]:
      out = tuple(call() for call in calls)
      Tensor.realize(*out)
      return out
    jit, times, reads = TinyJit(all_of_them), list[float](), list[float]()
    for _ in range(WARM): jit()
    for _ in range(RUNS):
      reads.append(self.seconds(self.read))
      times.append(self.seconds(jit) / len(calls))
    got, want = check()
    off = float(np.abs(got - want).max() / np.abs(want).max())
    took, bandwidth = min(times), self.read_bytes / min(reads)
    self.reads.append(bandwidth / 1e9)
    row = Row(kernel, detail, size / 1e6, took * 1e3, size / took / 1e9, size / took / bandwidth, off)
    self.rows.append(row)
    print(f"{row.kernel:<14} {row.detail:<34} {row.megabytes:>9.2f} {row.milliseconds:>10.3f} {row.gb_s:>8.2f} {bandwidth / 1e9:>8.1f} "
          f"{row.share:>6.0%} {row.difference:>10.1e}", flush=True)

  def wanted(self, kernel: str) -> bool: return self.args.only in kernel

  def linear(self, kind: str, name: str) -> None:
    from specgrad.quant import twin
    from specgrad.quant.twin import Weight
    if not self.wanted(name): return
    N, K = self.s.N, self.s.K
    size = N * K * 17 // 32 if kind == "FP4" else N * K + N * K // 128
    weights = [self.stored(kind, N, K) for _ in range(max(1, min(32, -(-self.s.spill // size))))]
    part = Weight(kind, weights[0].data[:64].contiguous().realize(), weights[0].scale[:64].contiguous().realize())
    for M in self.args.rows:
      x = self.normal(M, K)
      def check(x: Any = x, few: int = min(M, 16)) -> tuple[Any, Any]:
        return self.ops.linear(x, weights[0]).numpy()[:few, :64], twin.linear(x[:few].contiguous(), part, w4a8=True).numpy()
      self.measure(name, f"M={M} N={N} K={K}", [functools.partial(self.ops.linear, x, w) for w in weights], size, check)

  def experts(self) -> None:
    import numpy as np

    from specgrad.quant import twin
    if not self.wanted("experts"): return
    s = self.s
    w13, w2 = self.stored("FP4", s.E, 2 * s.I, s.D), self.stored("FP4", s.E, s.D, s.I)
    s13, s2 = self.stored("FP8", 2 * s.J, s.D), self.stored("FP8", s.D, s.J)
    one, shared = 3 * s.I * s.D * 17 // 32, 3 * s.J * s.D + 3 * s.J * s.D // 128
    for T, how in ((1, "random"), (6, "random"), (6, "all distinct"), (48, "random")):
      if how == "all distinct" and s.k * T > s.E: how = "as distinct as can be"
      sets, distinct = list[Any](), list[int]()
      for _ in range(4):
        if how == "random": ids = np.stack([self.rng.permutation(s.E)[:s.k] for _ in range(T)])
        else: ids = np.resize(self.rng.permutation(s.E), T * s.k).reshape(T, s.k)
        sets.append(self.tensor(ids.astype(np.int32)))
        distinct.append(len(np.unique(ids)))
      x, weights = self.normal(T, s.D), self.tensor(np.full((T, s.k), 1 / s.k, np.float32))
      def check(x: Any = x, ids: Any = sets[0], weights: Any = weights) -> tuple[Any, Any]:
        got = self.ops.experts(x, w13, w2, s13, s2, ids, weights, 10.0).numpy()[:1]
        first = [t[:1].contiguous().realize() for t in (x, ids, weights)]
        return got, twin.experts(first[0], w13, w2, s13, s2, first[1], first[2], 10.0, w4a8=True).numpy()
      mean = sum(distinct) / len(distinct)
      self.measure("experts", f"T={T} {how}, {mean:.1f} of {s.E}",
                   [functools.partial(self.ops.experts, x, w13, w2, s13, s2, ids, weights, 10.0) for ids in sets],
                   int(mean * one + shared), check)

  def attend(self) -> None:
    import numpy as np

    from specgrad.quant import twin
    if not self.wanted("attend"): return
    H, d, r, window, ratio, most = self.s.heads, self.s.width, 64, 128, 4, 4
    rope = self.tensor(np.tile(np.array([1, 0], np.float32), (6, r // 2, 1)))
    sink = self.normal(H)
    ring = self.tensor(twin.encode_rows(self.normal(256, d), r).numpy()[None])
    for context in self.s.contexts:
      n = context // ratio
      entries = self.tensor(np.resize(twin.encode_rows(self.normal(min(n, 2048), d), r).numpy(), (1, n, twin.row_bytes(d, r))))
      for T in (1, 6):
        q, at, turn = self.normal(T, H, d), self.tensor(np.array([[context - T], [0]], np.int32)), rope[:T].contiguous().realize()
        def call(q: Any = q, entries: Any = entries, at: Any = at, turn: Any = turn, n: int = n) -> Any:
          return self.ops.attend(q, ring, entries, None, sink, turn, at, window, n, ratio)
        def check(q: Any = q, entries: Any = entries, at: Any = at, turn: Any = turn, n: int = n, call: Any = call) -> tuple[Any, Any]:
          got = call().numpy()[:, :most]
          if n > 4096: return got, got                     # the twin would need gigabytes
          return got, twin.attend(q[:, :most].contiguous(), ring, entries, None, sink[:most].contiguous(), turn, at, window, n, ratio,
                                  w4a8=True).numpy()
        self.measure("attend", f"T={T} {H} heads of {d}, context {context}", [call], (n + window) * twin.row_bytes(d, r), check)

  def run(self, command: str) -> dict[str, Any]:
    print(f"{'kernel':<14} {'what':<34} {'MB':>9} {'ms':>10} {'GB/s':>8} {'read':>8} {'share':>6} {'off':>10}")
    self.linear("FP4", "linear MXFP4")
    self.linear("FP8", "linear FP8")
    self.experts()
    self.attend()
    if not self.rows: raise ValueError(f"--only={self.args.only}, want part of: linear MXFP4, linear FP8, experts, attend")
    return {"schema": SCHEMA, "command": command, "commit": evidence.commit(), "device": device_name(self.device),
            "shapes": self.args.shapes, "clock": self.args.clock, "date": time.strftime("%Y-%m-%d"),
            "read_gb_s": statistics.median(self.reads), "rows": [asdict(r) for r in self.rows]}

def device_name(name: str) -> str:
  if name.startswith("CPU"):
    try: lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError: lines = []
    return f"CPU: {next((x.split(':', 1)[1].strip() for x in lines if x.startswith('model name')), platform.machine())}"
  from tinygrad import Device
  return f"{name}: {Device[name].renderer.target}"

def run(argv: Sequence[str]) -> int:
  args = parse(argv)
  os.environ["DEV"] = args.device.split(":")[0]            # before tinygrad is imported
  specgrad.prepare()
  from tinygrad import Device
  try: Device[args.device]
  except Exception as error:
    raise ValueError(f"--device={args.device} can't be opened: {' '.join(str(error).split())[:200]}") from None
  print(json.dumps(Bench(args).run(evidence.command("bench_kernels", argv))))
  return 0

def main(argv: Sequence[str] | None = None) -> int: return evidence.guarded("bench_kernels", run, argv)

if __name__ == "__main__": sys.exit(main())
