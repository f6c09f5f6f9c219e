"""What tinygrad would hand to a CUDA driver: graphs built over a driver that does nothing, looked at for the edges between
kernels that share a buffer. Which arguments a kernel writes is read off its source, so what we declare can't hide a mistake."""
from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [ROOT / "specgrad" / "quant" / name for name in ("cuda.cu", "cuda_products.cu")]

class Node(NamedTuple):
  graph: int
  name: str
  after: list[int]                                         # nodes that it waits for
  args: list[int]                                          # addresses
  writes: list[int]                                        # which of them it is said to write

# ------------------------------------------------------------------------------------------------ a driver without a GPU
class Driver:
  """Stands in for tinygrad's binding of libcuda. Memory is addresses only, kernels are names, what is read back is zero."""
  def __init__(self) -> None:
    self.nodes, self.names, self.host = list[Node](), list[str](), list[Any]()
    self.graphs, self.next, self.writes = 0, 1 << 40, list[int]()

  def install(self) -> None:
    from tinygrad.runtime.autogen import cuda
    from tinygrad.runtime.graph.cuda import CUDAGraph
    new_node = CUDAGraph.new_node
    def noted(graph: CUDAGraph, bufs: Any, write: Any) -> Any:
      self.writes = list(write)
      return new_node(graph, bufs, write)
    CUDAGraph.new_node = noted
    for name in [n for n in vars(cuda) if re.match(r"cu[A-Z]", n)]: setattr(cuda, name, getattr(self, name, lambda *args: 0))

  def hand(self, ref: Any, value: int) -> int:
    ctypes.cast(ref, ctypes.POINTER(ctypes.c_uint64))[0] = value
    return 0

  def cuDeviceComputeCapability(self, major: Any, minor: Any, device: Any) -> int:
    major._obj.value, minor._obj.value = 8, 0
    return 0

  def cuDeviceGetCount(self, count: Any) -> int:
    count._obj.value = 1
    return 0

  def cuMemAlloc_v2(self, ref: Any, size: int) -> int:
    self.next += -(-size // 512) * 512 + 512
    return self.hand(ref, self.next)

  def cuMemHostAlloc(self, ref: Any, size: int, flags: int) -> int:
    self.host.append(ctypes.create_string_buffer(size))
    return self.hand(ref, ctypes.addressof(self.host[-1]))

  def cuMemcpyDtoH_v2(self, to: int, source: Any, size: int) -> int:
    ctypes.memset(to, 0, size)
    return 0

  def cuModuleGetFunction(self, ref: Any, module: Any, name: bytes) -> int:
    self.names.append(name.decode())
    return self.hand(ref, len(self.names))

  def cuGraphCreate(self, ref: Any, flags: int) -> int:
    self.graphs += 1
    return self.hand(ref, self.graphs)

  def cuGraphAddKernelNode(self, ref: Any, graph: Any, deps: Any, n: int, params: Any) -> int:
    name = self.names[address(params._obj.func) - 1]
    extra = ctypes.cast(params._obj.extra, ctypes.POINTER(ctypes.c_uint64))
    size = ctypes.cast(extra[3], ctypes.POINTER(ctypes.c_uint64))[0]
    args = ctypes.cast(extra[1], ctypes.POINTER(ctypes.c_uint64))[:size // 8]
    return self.node(ref, Node(address(graph), name, [address(deps[i]) - 1 for i in range(n)], args, self.writes))

  def cuGraphAddMemcpyNode(self, ref: Any, graph: Any, deps: Any, n: int, params: Any, context: Any) -> int:
    args = [address(params._obj.dstDevice), address(params._obj.srcDevice)]
    return self.node(ref, Node(address(graph), "copy", [address(deps[i]) - 1 for i in range(n)], args, self.writes))

  def node(self, ref: Any, made: Node) -> int:
    self.nodes.append(made)
    return self.hand(ref, len(self.nodes))

def address(handle: Any) -> int:
  return handle if isinstance(handle, int) else ctypes.cast(handle, ctypes.c_void_p).value or 0

# ------------------------------------------------------------------------------------------------ what is captured
def capture(what: str) -> None:
  """Run in a process of its own: prints the nodes of the graphs."""
  import numpy as np
  from tinygrad import Tensor, TinyJit, dtypes

  from specgrad.quant import cuda, cuda_products
  from specgrad.quant.twin import Weight
  driver = Driver()
  driver.install()
  new = lambda *shape, dtype=dtypes.float32: Tensor(np.zeros(shape, np.dtype(dtype.fmt)), device="CUDA").clone().realize()
  codes = functools.partial(new, dtype=dtypes.uint8)
  def fp8(*shape: int) -> Weight: return Weight("FP8", codes(*shape), codes(*shape[:-1], shape[-1] // 128))
  def repeat(step: Callable[[], Any]) -> None:
    jit = TinyJit(step)
    for _ in range(3): jit()
  x, lin, norm = new(6, 128), fp8(128, 128), new(128)
  if what == "model":                                      # everything that a reply takes, with its caches written in place
    import specgrad
    specgrad.load(devices=("CUDA",), draft="none", max_context=512).generate([5, 6, 7], max_tokens=4)
  if what == "products":
    w, ids, weights = [fp8(4, 256, 128), fp8(4, 128, 128), fp8(256, 128), fp8(128, 128)], new(6, 2, dtype=dtypes.int32), new(6, 2)
    def products() -> Any:
      y = cuda_products.experts(cuda_products.linear(x, lin, w4a8=True), *w, ids, weights, 10.0, w4a8=True)
      return cuda_products.linear(cuda.rms_norm(y, norm, 1e-6, True), lin, w4a8=True).realize()
    repeat(products)
  if what == "undeclared":                                 # without the lists of what is written and what is read
    with_lists = cuda_products._program
    def without(*bufs: Any, **named: Any) -> Any: return with_lists(*bufs, **named).replace(arg=None)
    cuda_products._program = without
    repeat(lambda: cuda_products.linear(cuda_products.linear(x, lin, w4a8=True), lin, w4a8=True).realize())
  print(json.dumps(driver.nodes))

@functools.cache
def captured(what: str) -> list[Node]:
  env = os.environ | {"DEV": "CUDA:PTX", "PYTHONPATH": str(ROOT)}         # a renderer whose compiler only copies text
  done = subprocess.run([sys.executable, __file__, what], env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  return [Node(*node) for node in json.loads(done.stdout.splitlines()[-1])]

# ------------------------------------------------------------------------------------------------ what must hold
@functools.cache
def signatures() -> dict[str, list[bool]]:
  """Kernel -> for each argument, whether it may be written. What there is of each rank is there once: it is one device."""
  found, name = dict[str, list[bool]](), ""
  for path in SOURCES:
    text = re.sub(r"EACH\((IN|OUT)S\)", r"\1 x", path.read_text())
    for m in re.finditer(r"#ifdef KERNEL_(\w+)|^(?:ENTRY|KERNEL)\b[^{;]*?\bNAME\(([^)]*)\)", text, re.M):
      name = m[1] or name
      if m[2]: found[name] = [re.match(r"\s*IN\b|.*\bconst\b", argument, re.S) is None for argument in m[2].split(",")]
  return found

def kernel(name: str) -> str | None:
  """Which of our kernels has this symbol: sizes follow its name."""
  return max((k for k in signatures() if re.match(rf"{k}_\d", name)), key=len, default=None)

def unordered(nodes: list[Node]) -> list[tuple[str, str]]:
  """Pairs of one graph that share a buffer which one of them writes, and neither of which waits for the other."""
  before, wrong = list[int](), []
  for node in nodes:
    closed = 0
    for i in node.after: closed |= before[i] | 1 << i
    before.append(closed)
  def written(node: Node) -> set[int]:
    own = kernel(node.name)
    return {a for a, w in zip(node.args, signatures()[own], strict=True) if w} if own else set(node.args[:1])
  writes = [written(node) for node in nodes]
  for (i, a), (j, b) in itertools.combinations(enumerate(nodes), 2):
    shared = writes[i] & set(b.args) or writes[j] & set(a.args)
    if shared and a.graph == b.graph and not before[j] >> i & 1: wrong.append((a.name, b.name))
  return wrong

def test_sources_say_what_is_written() -> None:
  assert signatures()["linear"] == [True, False, False, False] and signatures()["hc_post"] == [True, *[False] * 4]
  assert signatures()["compress"][:3] == [True, True, False]
  assert len(signatures()) >= 25 and all(any(w) and not all(w) for w in signatures().values())

def test_products_wait_for_what_they_read() -> None:
  nodes = captured("products")
  assert [kernel(n.name) for n in nodes] == ["prepare", "linear", "experts_plan", "experts_up", "experts_middle", "experts_down",
                                             "experts_sum", "rms_norm", "prepare", "linear"]
  assert unordered(nodes) == []
  for i in range(1, len(nodes)):                           # and each of these edges is needed
    fewer = [n._replace(after=[]) if j == i else n for j, n in enumerate(nodes)]
    assert unordered(fewer), nodes[i].name

def test_every_kernel_of_a_reply_waits_for_what_it_reads() -> None:
  nodes = captured("model")
  seen = {kernel(n.name) for n in nodes}
  assert {"kv_write", "compress", "attend", "linear", "experts_up", "hc_pre", "route", "argmax"} <= {str(k) for k in seen}
  assert len(nodes) > 200 and unordered(nodes) == []
  for node in nodes:
    if own := kernel(node.name): assert node.writes == [i for i, w in enumerate(signatures()[own]) if w], node.name

def test_without_lists_there_are_no_edges() -> None:
  """The trap that the lists are for; if tinygrad finds them by itself one day, this test goes, and so may they."""
  nodes = captured("undeclared")
  assert len(nodes) == 4 and not any(n.after for n in nodes) and len(unordered(nodes)) >= 3

if __name__ == "__main__": capture(sys.argv[1])
