"""The CUDA products on a CPU, thread by thread (cuda_on_cpu.h), against their readable twins; and what nvcc makes of them."""
from __future__ import annotations

import ctypes
import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor
from tinygrad.uop.ops import Ops

from specgrad import toolchain
from specgrad.quant import cuda as cuda_ops
from specgrad.quant import cuda_products as cp
from specgrad.quant import twin
from specgrad.quant.twin import Weight

Array = np.ndarray
HERE = Path(__file__).resolve().parent
BUDGET = HERE.parent / "scripts" / "records" / "product_budget.json"
ROWS, FEW = (1, 2, 3, 4, 5, 6, 7, 8, 16), (1, 6)             # every number of rows is a kernel of its own, a second each
SLOW = pytest.mark.slow                                     # what has no mark is a shape or two of each kernel, 20 s in all
def slow(*values: Any) -> Any: return pytest.param(*values, marks=SLOW)
NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")

# ------------------------------------------------------------------------------------------------ kernels without a GPU
@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Array]]:
  """run(launch, outs, ins): the arrays of `outs`, poisoned before, after the kernel wrote them."""
  if not (HERE / "cuda_on_cpu.h").is_file(): pytest.skip("no cuda_on_cpu.h")
  clang, folder = str(toolchain.prepare().compiler), tmp_path_factory.mktemp("kernels")

  @functools.cache
  def library(launch: cp.Launch) -> Any:
    at = folder / f"k{len(list(folder.iterdir()))}"
    at.with_suffix(".cu").write_text(launch.text())
    subprocess.run([clang, "-x", "c", "-std=gnu11", "-O1", "-w", "-fPIC", "-shared", "-fsanitize=alignment,bounds", "-fsanitize-trap=all",
                    "-include", str(HERE / "cuda_on_cpu.h"), f"{at}.cu", "-o", f"{at}.so", "-lm"], check=True)
    return ctypes.CDLL(f"{at}.so")

  def run(launch: cp.Launch, outs: list[Array], ins: list[Array]) -> list[Array]:
    lib = library(launch)
    for a in outs: a.view(np.uint8).reshape(-1)[:] = 0xff
    args = [a.ctypes.data for a in (*outs, *ins)]
    error = lib.cuda_on_cpu_launch(ctypes.cast(getattr(lib, launch.symbol), ctypes.c_void_p), (ctypes.c_uint * 3)(*launch.blocks, 1),
                                   (ctypes.c_uint * 3)(launch.threads, 1, 1), (ctypes.c_void_p * (len(args) + 1))(*args, None), 7)
    assert error == 0, (launch, error)
    return outs
  return run

def aligned(a: Array) -> Array:
  """A copy that begins where a GPU's buffers may."""
  raw = np.empty(a.nbytes + 256, np.uint8)
  at = -raw.ctypes.data % 256
  out = raw[at:at + a.nbytes].view(a.dtype).reshape(a.shape)
  out[...] = a
  return out

def empty(*shape: int, dtype: Any = np.float32) -> Array: return aligned(np.empty(shape, dtype))

class Stored:
  """A weight in numpy: kind, data and scale as specgrad.quant.twin.Weight has them."""
  def __init__(self, kind: str, data: Array, scale: Array | None = None):
    self.kind, self.data, self.scale = kind, aligned(data), None if scale is None else aligned(scale)
  def parts(self) -> list[Array]: return [self.data, self.data if self.scale is None else self.scale]
  def weight(self) -> Weight: return Weight(self.kind, Tensor(self.data), None if self.scale is None else Tensor(self.scale))

def linear(cuda: Any, x: Array, w: Stored, groups: int = 1, quantise: bool = True, rounded: bool = False) -> Array:
  T, N, K = len(x), w.data.shape[0] // groups, x.shape[1] // groups
  quantise = quantise and w.kind in ("FP8", "FP4")
  laid = empty(cp.laid_size(w.kind, T * groups, K, quantise), dtype=np.uint16)
  cuda(cp.prepare_launch(T * groups, K, w.kind, quantise), [laid], [aligned(x)])
  return cuda(cp.linear_launch(T, groups, N, K, w.kind, quantise, rounded), [empty(T, groups * N)], [laid, *w.parts()])[0]

def experts(cuda: Any, x: Array, w13: Stored, w2: Stored, s13: Stored, s2: Stored, ids: Array, weights: Array, limit: float,
            w4a8: bool, arch: str = "", first: int = 0, rounded: bool = True) -> Array:
  (T, D), (E, I2), J, k = x.shape, w13.data.shape[:2], s13.data.shape[0] // 2, ids.shape[1]
  I, kind, shared = I2 // 2, w13.kind, s13.kind
  plan_, up, middle, down, total = cp.expert_launches(T, D, E, I, J, k, limit, kind, shared, w4a8, arch, first, rounded)

  def laid(kind: str, rows: int, K: int) -> Array: return empty(cp.laid_size(kind, rows, K, w4a8, bool(arch)), dtype=np.uint16)
  plan = empty(1 + 10 * int(dict(plan_.sizes)["MOST_TILES"]) + T * k, dtype=np.int32)
  plan, xr, xs = cuda(plan_, [plan, laid(kind, T, D), laid(shared, T, D)], [aligned(x), aligned(ids)])
  t, ts = cuda(up, [empty(T * k, I), empty(T, J)], [plan, xr, xs, *w13.parts(), *s13.parts(), aligned(weights)])
  y, ys = cuda(middle, [laid(kind, T * k, I), laid(shared, T, J)], [t, ts])
  v = cuda(down, [empty(T * k + T, D)], [plan, y, ys, *w2.parts(), *s2.parts()])[0]
  return cuda(total, [empty(T, D)], [v, plan])[0]

# ------------------------------------------------------------------------------------------------ data
def normal(seed: int, *shape: int, scale: float = 1.0) -> Array:
  return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)

def stored(seed: int, kind: str, *shape: int, scales: tuple[int, int] = (118, 130)) -> Stored:
  """Random codes, every finite one; scale codes from the range."""
  rng, (*lead, K) = np.random.default_rng(seed), shape
  if kind == "F32": return Stored(kind, rng.normal(size=shape).astype(np.float32))
  if kind == "BF16": return Stored(kind, (rng.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
  codes = rng.integers(0, 256, (*lead, K if kind == "FP8" else K // 2)).astype(np.uint8)
  if kind == "FP8": codes[codes & 0x7f == 0x7f] ^= 1       # no NaN
  return Stored(kind, codes, rng.integers(*scales, (*lead, -(-K // 128) if kind == "FP8" else K // 32)).astype(np.uint8))

def spiteful(seed: int, T: int, K: int) -> Array:
  """Rows of every size, one of zeros, and groups of 128 that hold a zero row, one large value, values on the edge of e4m3."""
  x = normal(seed, T, K) * (10.0 ** (np.arange(T) % 9 - 4)).astype(np.float32)[:, None]
  x[-1] = 0
  x[0, :K // 2] = 0
  if T > 2: x[1, :4], x[2, ::3] = (448, -448, 464, 2.0 ** -9), 1e-3 * 2.0 ** -9
  return x

def twin_linear(x: Array, w: Stored, groups: int = 1, quantise: bool = True) -> tuple[Array, Array]:
  """The twin's result without the last rounding, and how large the sums' members are together. The twin rounds whole groups of
  128 only: zeros fill the last one, which change no group's scale."""
  rest = -x.shape[1] % 128
  if quantise and rest and w.scale is not None:
    packed, scales = (rest // 2, rest // 32) if w.kind == "FP4" else (rest, 0)
    w = Stored(w.kind, np.pad(w.data, ((0, 0), (0, packed))), np.pad(w.scale, ((0, 0), (0, scales)), constant_values=127))
    x = np.pad(x, ((0, 0), (0, rest)))
  got = twin.linear(Tensor(x), w.weight(), groups, quantise, rounded=False, w4a8=True).numpy()
  magnitude = np.abs(twin.floats(w.weight()).numpy()).astype(float).reshape(groups, -1, x.shape[1] // groups)
  return got, np.einsum("tgk,gnk->tgn", np.abs(x.reshape(len(x), groups, -1)).astype(float), magnitude).reshape(len(x), -1)

def twin_experts(x: Array, w: tuple[Stored, ...], ids: Array, weights: Array, limit: float, w4a8: bool, **named: Any) -> Array:
  w13, w2, s13, s2 = (a.weight() for a in w)
  return twin.experts(Tensor(x), w13, w2, s13, s2, Tensor(ids), Tensor(weights), limit, w4a8=w4a8, **named).numpy()

def near(got: Array, want: Array) -> None:
  """Sums in another order: now and then a value is rounded to the other neighbour, and what is made of it differs."""
  off = np.abs(got - want) / np.abs(want).max(1, keepdims=True)
  assert off.max() <= 0.03 and (off == 0).mean() > 0.5, (off.max(), (off == 0).mean())

def bf16(x: Array) -> Array:
  u = x.view(np.uint32)
  return ((u + 0x7fff + (u >> 16 & 1)) & np.uint32(0xffff0000)).view(np.float32)

# ------------------------------------------------------------------------------------------------ products
CASES = [("FP4", 128, 24, 1, True), slow("FP4", 544, 50, 1, True), slow("FP4", 1024, 17, 1, True), slow("FP8", 384, 40, 1, True),
         slow("FP8", 128, 33, 2, False), slow("FP8", 1296, 9, 1, True), ("FP8", 130, 9, 1, False), slow("BF16", 96, 23, 1, True),
         slow("BF16", 264, 16, 2, True), ("BF16", 13, 5, 1, True), slow("F32", 32, 19, 1, True), ("F32", 77, 6, 3, True)]

@pytest.mark.parametrize("kind, K, N, G, quantise", CASES)
def test_linear(cuda: Any, kind: str, K: int, N: int, G: int, quantise: bool) -> None:
  x, w = spiteful(1, 37, G * K), stored(2, kind, G * N, K)
  full = linear(cuda, x, w, G, quantise)
  want, size = twin_linear(x, w, G, quantise)
  assert (np.abs(full - want) <= 1e-6 * size + 1e-37).all()
  for T in ROWS if K in (1024, 384) else FEW: assert linear(cuda, x[:T], w, G, quantise).tobytes() == full[:T].tobytes(), T
  assert linear(cuda, x[:3], w, G, quantise, rounded=True).tobytes() == bf16(full[:3]).tobytes()

@SLOW
@pytest.mark.parametrize("kind, K, scales", [("FP4", 256, (1, 5)), ("FP4", 256, (250, 255)), ("FP8", 256, (1, 5)), ("FP8", 256, (238, 246)),
                                             ("FP4", 160, (1, 255)), ("FP8", 256, (1, 2)), ("FP4", 128, (254, 255))])
def test_scales_at_the_ends(cuda: Any, kind: str, K: int, scales: tuple[int, int]) -> None:
  """Large scales meet small x and small ones large x, so that results are numbers; they are added in float32 as they are."""
  x = normal(1, 9, K) * np.float32(1e4 if scales[1] < 127 else 1e-7)
  w = stored(2, kind, 20, K, scales=scales)
  if kind == "FP4" and scales[1] == 255: w.data &= 0xaa    # 0 and 1: twice 2^127 is infinite
  got, (want, size) = linear(cuda, x, w), twin_linear(x, w)
  finite = np.isfinite(want) & (size < 1e38)
  assert finite.mean() > 0.2 and (np.abs(got - want)[finite] <= (1e-6 * size + 1e-36)[finite]).all()

@pytest.mark.parametrize("kind", ["FP4", "FP8"])
def test_every_code(cuda: Any, kind: str) -> None:
  """x one-hot and 1: a result is one weight times its scale, exactly."""
  K = 256
  codes = np.resize(np.arange(256, dtype=np.uint8), (16, 256 if kind == "FP8" else 128))
  if kind == "FP8": codes[codes & 0x7f == 0x7f] = 0
  w = Stored(kind, codes, np.random.default_rng(1).integers(100, 140, (16, K // (128 if kind == "FP8" else 32))).astype(np.uint8))
  want = twin.floats(w.weight()).numpy()
  got = linear(cuda, np.eye(K, dtype=np.float32), w).T
  assert (got == want).all()

@SLOW
def test_a_sick_row_keeps_to_itself(cuda: Any) -> None:
  for kind, K in (("FP4", 256), ("BF16", 96), ("F32", 32)):
    x, w = normal(1, 8, K), stored(2, kind, 20, K)
    well = linear(cuda, x, w)
    x[3], x[5, 2] = np.nan, np.inf
    got = linear(cuda, x, w)
    assert not np.isfinite(got[3]).any() and not np.isfinite(got[5]).all(), kind
    keep = [0, 1, 2, 4, 6, 7]
    assert got[keep].tobytes() == well[keep].tobytes()

# ------------------------------------------------------------------------------------------------ experts
@functools.cache
def expert_data(kind: str, shared: str, T: int, D: int, E: int, I: int, J: int, k: int) -> tuple[Any, ...]:
  rng = np.random.default_rng(3)
  ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
  ids[T // 2] = ids[0]
  weights = rng.random((T, k)).astype(np.float32)
  scale = (115, 120)
  return (bf16(normal(1, T, D)), stored(2, kind, E, 2 * I, D, scales=scale), stored(3, kind, E, D, I, scales=scale),
          stored(4, shared, 2 * J, D, scales=(112, 116)), stored(5, shared, D, J, scales=(112, 116)), ids, weights)

@pytest.mark.parametrize("kind, shared, D, E, I, J, k, w4a8", [
  slow("FP4", "FP8", 128, 5, 128, 256, 3, True), slow("FP4", "FP8", 256, 3, 128, 128, 2, True), slow("F32", "F32", 40, 4, 24, 16, 2, False),
  ("BF16", "BF16", 32, 9, 17, 24, 3, False)])
def test_experts(cuda: Any, kind: str, shared: str, D: int, E: int, I: int, J: int, k: int, w4a8: bool) -> None:
  x, w13, w2, s13, s2, ids, weights = expert_data(kind, shared, 21, D, E, I, J, k)
  limit = 7.0 if w4a8 else 0.5
  full = experts(cuda, x, w13, w2, s13, s2, ids, weights, limit, w4a8)
  want = twin_experts(x, (w13, w2, s13, s2), ids, weights, limit, w4a8)
  if w4a8: near(full, want)
  else: assert (np.abs(full - want) <= 5e-6 * np.abs(want).max(1, keepdims=True)).all()
  for T in (1, 6, 9) if w4a8 else (6,):
    some = experts(cuda, x[:T], w13, w2, s13, s2, ids[:T], weights[:T], limit, w4a8)
    assert some.tobytes() == full[:T].tobytes(), T

@SLOW
def test_block_scaled_experts(cuda: Any) -> None:
  """The variant for sm_120a, its mma in C."""
  D, E, I, J, k, T = 256, 5, 128, 128, 3, 21
  x, w13, w2, s13, s2, ids, weights = expert_data("FP4", "FP8", T, D, E, I, J, k)
  assert cp.takes_block_scaled(T, D, I, "FP4", True) and not cp.takes_block_scaled(6, D, I, "FP4", True)
  got = experts(cuda, x, w13, w2, s13, s2, ids, weights, 7.0, True, "sm_120a")
  plain = experts(cuda, x, w13, w2, s13, s2, ids, weights, 7.0, True)
  want = twin_experts(x, (w13, w2, s13, s2), ids, weights, 7.0, True)
  near(got, plain)
  near(got, want)

def test_experts_of_one_device(cuda: Any) -> None:
  """Experts 2, 3, 4 of eight; not rounded at the end."""
  for kind, shared, w4a8, D, I, J in (("F32", "F32", False, 40, 24, 16), ("FP4", "FP8", True, 128, 128, 128)):
    x, w13, w2, s13, s2, ids, weights = expert_data(kind, shared, 9, D, 8, I, J, 2)
    w = (Stored(kind, w13.data[2:5], None if w13.scale is None else w13.scale[2:5]),
         Stored(kind, w2.data[2:5], None if w2.scale is None else w2.scale[2:5]), s13, s2)
    assert ((ids < 2) | (ids > 4)).all(1).any() and (ids > 4).any() and (ids < 2).any()
    got = experts(cuda, x, *w, ids, weights, 7.0, w4a8, first=2, rounded=False)
    want = twin_experts(x, w, ids, weights, 7.0, w4a8, first=2, rounded=False)
    if w4a8:
      assert (np.abs(got - want) / np.abs(want).max(1, keepdims=True)).max() < 0.03 and (got != bf16(got)).mean() > 0.9
    else: assert (np.abs(got - want) <= 5e-6 * np.abs(want).max(1, keepdims=True)).all()
    some = experts(cuda, x[:4], *w, ids[:4], weights[:4], 7.0, w4a8, first=2, rounded=False)
    assert some.tobytes() == got[:4].tobytes()

@SLOW
def test_all_rows_choose_one_expert(cuda: Any) -> None:
  x, w13, w2, s13, s2, ids, weights = expert_data("F32", "F32", 21, 40, 4, 24, 16, 2)
  ids = np.full_like(ids, 3)                               # twice the same, too
  ids[:, 1] = np.arange(21) % 2 + 2
  full = experts(cuda, x, w13, w2, s13, s2, ids, weights, 9.0, False)
  want = twin_experts(x, (w13, w2, s13, s2), ids, weights, 9.0, False)
  assert (np.abs(full - want) <= 5e-6 * np.abs(want).max(1, keepdims=True)).all()

@pytest.mark.parametrize("V, rank, half", [(67, 64, True), slow(130, 13, True), slow(70, 32, False), (5, 9, False)])
def test_markov(cuda: Any, V: int, rank: int, half: bool) -> None:
  """One sequence, and three whose rows are the same bits."""
  base, w1, w2 = normal(1, 9, V), stored(2, "BF16" if half else "F32", V, rank), stored(3, "BF16" if half else "F32", V, rank)
  for row, tokens in ((0, (4, 0, V - 1)), (2, (V - 1, 1, 1)), (1, (-1, 3, 2))):
    def made(base: Array, ids: Array, row: int = row) -> Array:
      launch = cp.markov_launch(V, rank, row, half, len(ids), len(base) // len(ids))
      return cuda(launch, [empty(len(ids), V)], [aligned(base), w1.data, w2.data, aligned(ids)])[0]
    ids = np.array(tokens, np.int32)
    got, want = made(base, ids), twin.markov(Tensor(base), row, w1.weight(), w2.weight(), Tensor(ids)).numpy()
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()
    for b in range(3): assert (made(base[3 * b:3 * b + 3], ids[b:b + 1]) == got[b]).all()

# ------------------------------------------------------------------------------------------------ what tinygrad is told
def test_buffers_are_declared() -> None:
  """Without explicit lists a graph of these kernels has no edges."""
  launch = cp.linear_launch(1, 1, 32, 128, "FP4", True, True)
  x, w = Tensor.empty(1, 128).realize(), stored(1, "FP4", 32, 128).weight()
  out = cp.linear(x, w, w4a8=True)
  found = [u for u in out.uop.toposort() if u.op is Ops.PROGRAM]
  assert {p.arg.name for p in found} >= {launch.symbol}
  for p in found:
    n = len(p.arg.globals)
    assert p.arg.outs and p.arg.ins and sorted((*p.arg.outs, *p.arg.ins)) == list(range(n))

def test_a_tensor_is_laid_out_once_for_all_its_products_but_a_buffer_each_time() -> None:
  """What is kept must not outlive its tensor, nor stand for a buffer whose contents may have changed."""
  w = [stored(seed, "FP4", 32, 128).weight() for seed in (1, 2)]
  buffer = Tensor.empty(1, 128).realize()
  laid = lambda x: {u for t in [cp.linear(x, m, w4a8=True) for m in w] for u in t.uop.toposort()
                    if u.op is Ops.CALL and u.src[0].op is Ops.PROGRAM and u.src[0].arg.name.startswith("prepare")}
  made = cuda_ops.rms_norm(buffer, Tensor.empty(128).realize(), 1e-6)
  assert len(laid(made)) == 1 and len(cp.LAID) == 1
  assert len(laid(buffer)) == 2 and len(cp.LAID) == 1
  before = laid(made)
  made.replace(cuda_ops.rms_norm(buffer, Tensor.empty(128).realize(), 1e-6))
  assert not before & laid(made)
  del made
  assert not cp.LAID

def test_rows_on_two_devices_are_columns() -> None:
  devices, w = ("CPU", "CPU:1"), stored(1, "FP4", 64, 128)
  assert w.scale is not None
  halves = Weight("FP4", *(Tensor(a).shard(devices, axis=0).realize() for a in (w.data, w.scale)))
  out = cp.linear(Tensor.empty(3, 128).shard(devices).realize(), halves, w4a8=True)
  assert out.shape == (3, 64) and out.uop.axis == 1
  assert cp.linear_launch(3, 1, 32, 128, "FP4", True, True).symbol in {u.arg.name for u in out.uop.toposort() if u.op is Ops.PROGRAM}

# ------------------------------------------------------------------------------------------------ what nvcc makes of it
def real() -> dict[str, cp.Launch]:
  """The kernels of V4-Flash by what they are for."""
  def lin(N: int, K: int, kind: str, groups: int = 1, quantise: bool = True, rounded: bool = True) -> dict[str, cp.Launch]:
    return {f"T={T}": cp.linear_launch(T, groups, N, K, kind, quantise, rounded) for T in (6, 128)}
  shapes = {"wq_a": lin(1024, 4096, "FP8"), "wq_b": lin(32768, 1024, "FP8"), "wkv": lin(512, 4096, "FP8"),
            "wo_a": lin(1024, 4096, "FP8", 8, False), "wo_b": lin(4096, 8192, "FP8"), "head": lin(129280, 4096, "BF16", rounded=False),
            "compressor": lin(2048, 4096, "BF16", 1, False, False), "gate": lin(256, 4096, "BF16", 1, False, False),
            "mxfp4": lin(4096, 4096, "FP4"), "reference": lin(1024, 4096, "F32", 1, False, False)}
  found = {f"{name} {T}": launch for name, by in shapes.items() for T, launch in by.items()}
  found |= {"prepare FP4": cp.prepare_launch(6, 4096, "FP4", True), "prepare BF16": cp.prepare_launch(6, 4096, "BF16", False),
            "markov": cp.markov_launch(129280, 256, 0, True)}
  flash = (4096, 256, 2048, 2048, 6, 10.0, "FP4", "FP8", True)
  for T in (6, 128): found |= {f"{e.kernel} T={T}": e for e in cp.expert_launches(T, *flash)}
  found |= {f"{e.kernel} T=128 block-scaled": e for e in cp.expert_launches(128, *flash, "sm_120a") if e.arch}
  return found

def compiled(launch: cp.Launch, arch: str, folder: Path) -> dict[str, int]:
  at = folder / "kernel.cu"
  at.write_text(launch.text())
  done = subprocess.run(["nvcc", f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-o", str(folder / "kernel.cubin"), str(at)],
                        capture_output=True, text=True, check=True)
  text = done.stdout + done.stderr
  shared = re.search(r"(\d+) bytes smem", text)
  return {"registers": int(re.search(r"Used (\d+) registers", text)[1]),  # type: ignore[index]
          "shared": int(shared[1]) if shared else 0, "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", text)))}

@SLOW
@NVCC
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_budget(arch: str, tmp_path: Path) -> None:
  """Nothing is spilled, and registers and shared memory stay what the table says that they may be."""
  budget = json.loads(BUDGET.read_text())["kernels"]
  assert set(budget) == set(real())
  for name, launch in real().items():
    if launch.arch and arch != "sm_120": continue
    got = compiled(launch, launch.arch or arch, tmp_path)
    assert got["spilled"] == 0, name
    assert got["registers"] <= budget[name]["registers"] and got["shared"] <= budget[name]["shared"], (name, got)
    assert got["registers"] * launch.threads <= 65536, name
