"""Lowers a whole speculative step for GPUs that need not be there, and counts what it would do.

The captured function of a step, target and draft, is the engine's own; its weights and caches are buffers without memory, of the
shapes that a checkpoint's headers give, on tinygrad's device NULL with its CUDA renderer. Counted are nodes of the graph,
exchanges between the devices, and bytes read, beside the floor that plan.py finds in the same headers. Each kernel is then
compiled by nvcc, where there is one, for what ptxas says of it.

  scripts/lower.py                                         # DeepSeek-V4-Flash-0731 on two GPUs of sm_120
  scripts/lower.py --model DIR --gpus 1 --context 8192

Bytes: each buffer that a kernel reads counts once for that kernel: whole, or as much of it as is reached. Reached are, of routed
experts, as many as independent rows are expected to choose, each device its share; of tables by id the rows of the step; of
caches what rows at the end of the context see. What blocks of one kernel share is taken to come from the L2 cache; what
one kernel writes and another reads is counted as read.

Exchanges: the longest chain of copies between devices, each of which waits for the one before. Copies side by side in it, such as
those of both devices, are one exchange.

Exit status: 0 if all limits hold, 1 if one does not, 2 for a mistake. The last line of stdout is all of it as JSON."""
from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.device import Compiler, DepsTracker
from tinygrad.engine.realize import get_graph_runtime
from tinygrad.helpers import Context, ansistrip
from tinygrad.uop.ops import Ops, UOp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from evidence import Parser, command, commit, guarded
from make_checkpoint import make

from specgrad import plan as planning
from specgrad import quant, weights
from specgrad.checkpoint import RAW, Checkpoint
from specgrad.models.deepseek_v4 import Cache, Target, buffer
from specgrad.models.dspark import DSpark
from specgrad.plan import GPU
from specgrad.quant import flat
from specgrad.spec.step import Plan, State, run
from specgrad.toolchain import tinygrad_version

SCHEMA = "specgrad.lower/1"
NODES, EXCESS, SECONDS = 900, 1.15, 600                    # at most: nodes a device; bytes read over the floor; seconds of all

# ------------------------------------------------------------------------------------------------ the step
class Headers(Checkpoint):
  """A checkpoint of which nothing is read: every value is one, and takes no memory."""
  def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
    info = self.tensors[name]
    return np.broadcast_to(RAW[info.dtype](1), ((info.shape[0] if stop is None else stop) - start, *info.shape[1:]))

def passes(experts: int, chosen: int, rows: int) -> float:
  """Expected reads of whole experts by `rows` rows that choose independently: once for each eight of an expert's rows."""
  p = chosen / experts
  law = [math.comb(rows, i) * p ** i * (1 - p) ** (rows - i) for i in range(rows + 1)]
  return experts * sum(w * -(-i // 8) for i, w in enumerate(law))

class Held(NamedTuple):
  """A buffer that outlives a step: what it is, and how many of its bytes a kernel needs that reads it."""
  what: str
  reach: int

@dataclass
class Step:
  build: Callable[[], Any]                                 # the function to capture
  held: dict[int, Held]                                    # by the identity of the Buffer
  alive: tuple[Any, ...]

@contextmanager
def without_memory(arch: str) -> Iterator[None]:
  """Device NULL renders CUDA for `arch`, runs our CUDA kernels, and compiles nothing."""
  with Context(DEV=f"NULL:NVCC:{arch}", PARALLEL=0, JIT_BATCH_SIZE=0):       # as in Engine.graph: one graph
    before = quant.KERNELS.get("NULL")
    quant.KERNELS["NULL"] = "cuda"
    try: yield
    finally: quant.KERNELS = {k: v for k, v in (quant.KERNELS | {"NULL": before}).items() if v}

def prepare(checkpoint: Checkpoint, devices: tuple[str, ...], kv: str, users: int, context: int) -> Step:
  """The greedy step of an Engine with these settings and the checkpoint's own draft, its buffers empty."""
  c, held = checkpoint.config, dict[int, Held]()
  depth = c.dspark.dspark_block_size if c.dspark else 0
  ranks = len(devices) if kv == "sharded" else 1

  def note(what: str, value: Any, part: float = 1) -> None:
    for weight in flat((value,)):
      for t in weight if isinstance(weight, tuple) else (weight,):
        if isinstance(t, Tensor): held[id(t._buffer().base)] = Held(what, round(t.nbytes() * part))

  def reach(name: str) -> float:
    rows = users * (depth if name.startswith("mtp.") else depth + 1)
    if ".ffn.experts." in name: return passes(c.n_routed_experts, c.num_experts_per_tok, rows) / c.n_routed_experts
    if name.startswith("embed.") or name.endswith("tid2eid"): return rows / c.vocab_size
    return users / c.vocab_size if "markov_w1" in name else 1
  found = [dict(weights.stream(checkpoint, devices, prefix=prefix, packed=True, fill=weights.leave))
           for prefix in (weights.TARGET, *((weights.DRAFT,) if depth else ()))]
  for name, value in (item for part in found for item in part.items()):
    note("routed experts" if ".ffn.experts." in name else "other weights", value, reach(name))
  target = Target(c, found[0], w4a8=True)
  cache = Cache(c, context, devices, True, users, kv == "sharded")
  draft = DSpark(target, found[1], users) if depth else None
  seen = min(context, c.sliding_window + depth)
  for layer, ratio in zip(cache.layers, c.compress_ratios):
    rows = lambda buf, n: (n if n > 0 else 0) / quant.on(0, buf).shape[1]
    note("caches", layer.window, rows(layer.window, seen))
    n = context // ratio if ratio else 0
    if (state := layer.compressor) is not None:
      few = min(n, c.index_topk * (depth + 1)) if ratio == 4 and n > c.index_topk else n
      note("caches", state.entries, rows(state.entries, min(few, state.capacity) / ranks))
      note("unfinished blocks", state.ring, rows(state.ring, (2 if ratio == 4 else 1) * ratio))
    if (state := layer.indexer) is not None:
      note("caches", state.entries, rows(state.entries, min(n, state.capacity) / ranks))
      note("unfinished blocks", state.ring, rows(state.ring, 2 * ratio))
  for ring in draft.rings if draft else (): note("caches", ring, seen / quant.on(0, ring).shape[1])
  V, i32 = c.vocab_size, dtypes.int32
  empty = lambda *shape, dtype=dtypes.float32: buffer(devices, *shape, dtype=dtype)
  state_ = State(empty(2, users, dtype=i32), empty(users, dtype=i32), empty(users, 2, dtype=i32), empty(users, 4), empty(users, 3),
                 empty(users, V), empty(users, 2, V, dtype=i32))
  step = Plan("greedy", depth, depth + 1, context, False)
  return Step(lambda: run(target, cache, draft, state_, step), held, (found, target, cache, draft, state_))

# ------------------------------------------------------------------------------------------------ the graph
class Node(NamedTuple):
  """One node of the captured graph."""
  device: str
  kernel: UOp | None                                       # its program; none: a copy from another device
  reads: dict[str, float]                                  # bytes, by kind of buffer
  exchange: int                                            # copies in the longest chain that ends here
  chain: int                                               # nodes in it

@dataclass
class Graph:
  nodes: list[Node]
  graphs: int                                              # pieces that the capture fell into
  updates: int                                             # parameters to be set anew for every call
  chain: int                                               # nodes of the longest chain, as tinygrad's CUDA graph links them

def capture(step: Step) -> Graph:
  """Schedules and renders the whole step, as the engine's first one would."""
  jit = TinyJit(step.build)
  jit.cnt = 1                                              # as in Engine.graph: nothing needs a warm-up
  jit()
  pieces = [c.src[0] for c in jit.captured.linear.src]
  runners = [get_graph_runtime(p) for p in pieces if p.op is Ops.CUSTOM_FUNCTION]
  calls = [c for r in runners for c in r.calls]
  updates = sum(len(r.vars) + len(r.launch_dims_replace) + sum(map(len, r.uop_replace)) for r in runners)
  return Graph(nodes(calls, step.held), len(pieces), updates, max(n.chain for n in nodes(calls, step.held, whole=True)))

def nodes(calls: Sequence[tuple[Any, ...]], held: dict[int, Held], whole: bool = False) -> list[Node]:
  """calls: as tinygrad's GraphRunner holds them, (device index, what, buffers, ...). A node waits for those whose buffers it needs
  or overwrites; whole: for those that share an allocation with it, in which the values of all kernels lie side by side."""
  tracker, made = DepsTracker(), list[Node]()
  for _, what, bufs, *_ in calls:
    kernel = what if what.op is Ops.PROGRAM else None
    outs, ins = ((0,), (1,)) if kernel is None else (kernel.arg.outs, kernel.arg.ins)
    before = [made[i] for i in tracker.access_resources([b.base for b in bufs] if whole else bufs, list(outs), len(made))]
    reads: Counter[str] = Counter()
    for b in {(id(bufs[i].base), bufs[i].offset): bufs[i] for i in ins}.values():
      known = held.get(id(b.base))
      again = kernel.arg.global_size[1] if kernel is not None and kernel.arg.name.startswith("linear_") else 1   # blocks of other rows
      if known is None or kernel is None: reads["copies" if kernel is None else "values"] += b.nbytes
      elif known.what != "caches" or not any(bufs[i] is b for i in outs): reads[known.what] += known.reach * again
    made.append(Node(bufs[0].device, kernel, dict(reads), max((n.exchange for n in before), default=0) + (kernel is None),
                     max((n.chain for n in before), default=0) + 1))
  return made

# ------------------------------------------------------------------------------------------------ the kernels
class Usage(NamedTuple):
  """Of one kernel, by ptxas: registers a thread, bytes of static shared memory, of stack, and of registers spilled to it."""
  registers: int
  shared: int
  stack: int
  spilled: int

def parse(text: str) -> Usage:
  """What `nvcc -Xptxas -v` says of one kernel. Raises ValueError if it says nothing."""
  number = lambda pattern: sum(map(int, re.findall(pattern, text)))
  if not (registers := number(r"Used (\d+) registers")): raise ValueError(f"ptxas: no registers in {text[:200]!r}")
  return Usage(registers, number(r"(\d+)(?:\+\d+)? bytes smem"), number(r"(\d+) bytes stack frame"),
               number(r"(\d+) bytes spill (?:stores|loads)"))

def compiled(source: str, arch: str) -> Usage:
  """Raises ValueError with what nvcc says."""
  with tempfile.TemporaryDirectory() as folder:
    at = Path(folder) / "kernel.cu"
    at.write_text(source)
    done = subprocess.run(["nvcc", f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-o", at.with_suffix(".cubin"), at],
                          capture_output=True, text=True)
  if done.returncode: raise ValueError(f"nvcc -arch={arch}: {done.stderr.strip()[-2000:]}")
  return parse(done.stderr)

def nvcc() -> str | None:
  """Its version line, none without one."""
  if not shutil.which("nvcc"): return None
  return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]

@dataclass
class Kernel:
  """One program of the graph, which may run in many places."""
  name: str
  grid: list[int]
  block: list[int]
  nodes: int                                               # of them on one device
  usage: Usage | None = None

def source(program: UOp) -> str: return next(u.arg for u in program.src if u.op is Ops.SOURCE)

def kernels(graph: Graph, arch: str) -> list[Kernel]:
  """Each different source once, with as many nodes as the device has that runs it most; compiled where there is an nvcc."""
  programs = {source(n.kernel): n.kernel for n in graph.nodes if n.kernel is not None}
  count = Counter((n.device, source(n.kernel)) for n in graph.nodes if n.kernel is not None)
  most: dict[str, int] = {}
  for (_, text), n in count.items(): most[text] = max(n, most.get(text, 0))

  def made(text: str) -> Kernel:
    p, usage = programs[text], None
    # a binary that is not just the source again was compiled by ourselves, for what only this very processor has
    if shutil.which("nvcc"): usage = compiled(text, arch if p.src[-1].arg == text.encode() else f"{arch}a")
    return Kernel(ansistrip(p.arg.name), list(p.arg.global_size), list(p.arg.local_size or ()), most[text], usage)
  with ThreadPoolExecutor(os.cpu_count()) as pool: return sorted(pool.map(made, programs), key=lambda k: (-k.nodes, k.name))

# ------------------------------------------------------------------------------------------------ the report
@dataclass
class Limit:
  what: str
  found: float
  most: float

  @property
  def holds(self) -> bool: return self.found <= self.most

def family(node: Node) -> str:
  """A kernel's name without its sizes; "tinygrad" for those that it made itself."""
  if node.kernel is None: return "copy"
  name = re.match(r"[a-z_]+", ansistrip(node.kernel.arg.name))
  return name[0].strip("_") if name and name[0].strip("_") != "r" else "tinygrad"

def summary(checkpoint: Checkpoint, graph: Graph, made: list[Kernel], devices: tuple[str, ...], kv: str, users: int, context: int,
            seconds: dict[str, float]) -> tuple[dict[str, Any], list[Limit]]:
  """All figures, and which of them must stay below what."""
  c, n = checkpoint.config, len(devices)
  card = planning.card(planning.plan(checkpoint, n, users, context, kv), GPU("", 0), users, context)
  layers = c.num_hidden_layers + (c.dspark.stages if c.dspark else 0)
  mine = {d: [x for x in graph.nodes if x.device == d] for d in devices}
  read: dict[str, Counter[str]] = {d: Counter() for d in devices}
  for x in graph.nodes: read[x.device].update(x.reads)
  copies = [x for x in graph.nodes if x.kernel is None]
  worst = max(devices, key=lambda d: sum(read[d].values()))
  found = {
    "devices": n, "kv": kv, "users": users, "context": context, "depth": card.depth, "layers": layers,
    "nodes": {d: len(v) for d, v in mine.items()}, "copies": {d: sum(x.kernel is None for x in v) for d, v in mine.items()},
    "graphs": graph.graphs, "updates": graph.updates,
    "chain": max(x.chain for x in graph.nodes), "chain_linked": graph.chain,
    "families": {d: dict(Counter(map(family, v)).most_common()) for d, v in mine.items()},
    "exchanges": max(x.exchange for x in graph.nodes), "exchanges_planned": card.exchange_count,
    "exchange_bytes": round(sum(x.reads["copies"] for x in copies) / n), "exchange_bytes_planned": card.exchange_bytes,
    "read": {k: round(v) for k, v in read[worst].most_common()}, "read_bytes": round(sum(read[worst].values())), "floor_bytes": card.device,
    "kernels": [asdict(k) | {"usage": k.usage and k.usage._asdict()} for k in made],
    "seconds": {k: round(v, 1) for k, v in seconds.items()},
    "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
  limits = [Limit("graphs", graph.graphs, 1), Limit("parameter updates", graph.updates, 0),
            Limit("nodes a device", max(found["nodes"].values()), NODES),
            Limit("bytes read over the floor", round(found["read_bytes"] / card.device, 4), EXCESS),
            Limit("bytes spilled by any kernel", sum(k.usage.spilled for k in made if k.usage), 0),
            Limit("seconds", round(sum(seconds.values()), 1), SECONDS)]
  if n > 1: limits.append(Limit("exchanges", found["exchanges"], (4 if kv == "sharded" else 2) * layers + 3))
  return found, limits

def text(found: dict[str, Any], limits: list[Limit]) -> str:
  d = next(iter(found["nodes"]))
  lines = [f"{found['layers']} layers on {found['devices']} devices, KV {found['kv']}, {found['users']} x {found['context']} tokens, "
           f"depth {found['depth']}", "", "nodes of a device, by kernel"]
  lines += [f"  {name:<20}{count:>6}" for name, count in found["families"][d].items()]
  lines += [f"  {'all':<20}{found['nodes'][d]:>6}; the longest chain of them over both devices, as they need each other, is "
            f"{found['chain']}, as tinygrad's CUDA graph links them {found['chain_linked']}", ""]
  lines += [f"exchanges {found['exchanges']} (plan: {found['exchanges_planned']}), {found['exchange_bytes'] / 1e6:.2f} MB sent by each "
            f"device (plan: {found['exchange_bytes_planned'] / 1e6:.2f})", "", "bytes that the busiest device reads"]
  lines += [f"  {name:<20}{size / 1e6:>10.1f} MB" for name, size in found["read"].items()]
  lines += [f"  {'all':<20}{found['read_bytes'] / 1e6:>10.1f} MB, floor {found['floor_bytes'] / 1e6:.1f} MB", ""]
  lines += [f"  {'kernel':<76}{'nodes':>5} {'grid':>14} {'block':>5} registers shared stack spilled"]
  for k in found["kernels"]:
    u = k["usage"]
    tail = f"{u['registers']:>9} {u['shared']:>6} {u['stack']:>5} {u['spilled']:>7}" if u else "  not compiled: no nvcc"
    lines.append(f"  {k['name']:<76}{k['nodes']:>5} {'x'.join(map(str, k['grid'])):>14} {math.prod(k['block']):>5} {tail}")
  lines += ["", "seconds: " + ", ".join(f"{k} {v}" for k, v in found["seconds"].items()) + f"; peak memory {found['peak_rss_mib']} MiB", ""]
  lines += [f"  {'holds' if x.holds else 'FAILS'}  {x.what}: {x.found:g}, at most {x.most:g}" for x in limits]
  return "\n".join(lines)

def lower(checkpoint: Checkpoint, gpus: int, kv: str, users: int, context: int, arch: str, say: Callable[[str], None]) -> dict[str, Any]:
  """Everything that is printed, as one object. Raises PlanError, ValueError."""
  planning.plan(checkpoint, gpus, users, context, kv)      # raises what can't be
  devices, seconds = ("NULL", *(f"NULL:{i}" for i in range(1, gpus))), dict[str, float]()

  def timed(name: str, f: Callable[..., Any], *args: Any) -> Any:
    say(name)
    began = time.perf_counter()
    out = f(*args)
    seconds[name] = time.perf_counter() - began
    return out
  with without_memory(arch):
    for device in devices: Device[device].renderer.compiler = Compiler()       # its binary of a kernel is the source
    step = timed("shapes", prepare, checkpoint, devices, kv, users, context)
    graph = timed("schedule and render", capture, step)
  made = timed("compile", kernels, graph, arch)
  found, limits = summary(checkpoint, graph, made, devices, kv, users, context, seconds)
  say(text(found, limits))
  return {**found, "limits": [asdict(x) | {"holds": x.holds} for x in limits],
          "holds": all(x.holds for x in limits)}

def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = Parser("lower", "Lower a step for GPUs that need not be there.")
  parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint, of which only headers are read (default: a sparse one of the "
                      "size of DeepSeek-V4-Flash-0731, made for the run)")
  parser.add_argument("--gpus", type=int, default=2, metavar="N", help="devices (default: 2)")
  parser.add_argument("--kv", choices=planning.KV, default="sharded", help="(default: sharded)")
  parser.add_argument("--context", type=int, default=131072, metavar="N", help="positions of each sequence (default: 131072)")
  parser.add_argument("--users", type=int, default=1, metavar="N", help="sequences of a step (default: 1)")
  parser.add_argument("--arch", default="sm_120", metavar="sm_NN", help="(default: sm_120)")
  args = parser.parse_args(argv)
  if not re.fullmatch(r"sm_\d{2,3}", args.arch): raise ValueError(f"--arch={args.arch}, want sm_ and a number, such as sm_120")
  return args

def body(argv: Sequence[str]) -> int:
  args = parse_flags(argv)
  with tempfile.TemporaryDirectory() as folder:
    at = args.model or Path(folder) / "full"
    if not args.model: make(at, "full", 0)
    found = lower(Headers.open(at), args.gpus, args.kv, args.users, args.context, args.arch, lambda text: print(text, flush=True))
  date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  print(json.dumps({"schema": SCHEMA, "date": date, "command": command("lower", argv), "commit": commit(), "tinygrad": tinygrad_version(),
                    "nvcc": nvcc(), "arch": args.arch, **found}))
  return 0 if found["holds"] else 1

def main(argv: Sequence[str] | None = None) -> int: return guarded("lower", body, argv)

if __name__ == "__main__": sys.exit(main())
