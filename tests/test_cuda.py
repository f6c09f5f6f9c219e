"""The CUDA kernels without a GPU: run on the CPU one thread after another (cuda_on_cpu.h) against the readable twins, and
compiled at the sizes of the real model against a budget of registers and shared memory.

After a change that is worth what it costs: `python tests/test_cuda.py` writes scripts/records/kernel_budget.json anew."""
from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import json
import math
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_quant import KINDS, Sequences, indexed, sequences_share, shared_out
from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import Ops

from specgrad import toolchain
from specgrad.quant import cuda, formats, twin
from specgrad.quant.twin import Weight

Array = np.ndarray
HERE = Path(__file__).parent
BUDGET = HERE.parent / "scripts" / "records" / "kernel_budget.json"
ROWS = (33, 6, 1)
BOTH = pytest.mark.parametrize("w4a8", [False, True], ids=["f32", "w4a8"])
NUMPY = {dtypes.float32: np.float32, dtypes.int32: np.int32, dtypes.uint32: np.uint32, dtypes.uint16: np.uint16, dtypes.uint8: np.uint8,
         dtypes.bool: np.bool_}
PRODUCTS = {"linear", "experts", "markov"}
DIFFERENCES: dict[str, float] = {}                         # largest, for whoever asks

# ------------------------------------------------------------------------------------------------ kernels on the CPU
@functools.cache
def clang() -> str | None:
  """A clang that finds the headers of a C library; the one in the ziglang wheel has none of Linux's."""
  try: found = str(toolchain.find_compiler(os.environ)[0])
  except toolchain.ToolchainError: return None
  probe = subprocess.run([found, "-x", "c", "-fsyntax-only", "-include", HERE / "cuda_on_cpu.h", "-"], input=b"", capture_output=True)
  return None if probe.returncode else found

pytestmark = pytest.mark.slow
needs_clang = pytest.mark.skipif(clang() is None, reason="no clang with the headers of a C library")
FLAGS = ("-std=gnu11", "-O1", "-w", "-fPIC", "-shared", "-fsanitize=alignment,bounds", "-fsanitize-trap=all")
FOLDER = tempfile.TemporaryDirectory(prefix="specgrad-cuda-")

@functools.cache
def library(text: str) -> ctypes.CDLL:
  stem = Path(FOLDER.name) / hashlib.sha256(text.encode()).hexdigest()[:16]
  stem.with_suffix(".cu").write_text(text)
  subprocess.run([clang() or "clang", "-x", "c", *FLAGS, "-include", HERE / "cuda_on_cpu.h", stem.with_suffix(".cu"), "-o",
                  stem.with_suffix(".so"), "-lm"], check=True)
  return ctypes.CDLL(str(stem.with_suffix(".so")))

class Fenced:
  """A copy of an array that ends where readable memory does."""
  def __init__(self, a: Array):
    page, size = mmap.PAGESIZE, -(-max(a.nbytes, 1) // 16) * 16
    pages = -(-size // page)
    self.memory = mmap.mmap(-1, (pages + 1) * page)
    whole = np.frombuffer(self.memory, np.uint8)
    self.end = ctypes.c_void_p(whole.ctypes.data + pages * page)
    self.bytes = whole[pages * page - size:pages * page - size + a.nbytes]
    self.bytes[:] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    self.protect(0)

  def protect(self, how: int) -> None: assert ctypes.CDLL(None).mprotect(self.end, ctypes.c_size_t(mmap.PAGESIZE), how) == 0

def launch(name: str, outs: list[Array], ins: list[Array], grid: Sequence[int], threads: int, inplace: bool = False,
           **sizes: Any) -> list[Array]:
  """What cuda._run does, on arrays, here and now."""
  symbol, text = cuda._text(name, (("THREADS", threads), *sizes.items()))
  lib, held = library(text), [Fenced(a) for a in (*outs, *ins)]
  args = (ctypes.c_void_p * (len(held) + 1))(*[h.bytes.ctypes.data for h in held], None)
  error = lib.cuda_on_cpu_launch(ctypes.cast(getattr(lib, symbol), ctypes.c_void_p), (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3]),
                                 (ctypes.c_uint * 3)(threads, 1, 1), args, 1 + len(text) % 7)
  assert error == 0, (symbol, error)
  for a, h in zip(outs, held): a.reshape(-1).view(np.uint8)[:] = h.bytes
  for h in held: h.protect(3)
  return outs

def empty(like: Any, *shape: int, dtype: Any = dtypes.float32) -> Array:
  return np.full(math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize, 255, np.uint8).view(NUMPY[dtype]).reshape(shape)

@contextlib.contextmanager
def replaced(**functions: Any) -> Iterator[None]:
  was = {n: getattr(cuda, n) for n in functions}
  for n, f in functions.items(): setattr(cuda, n, f)
  try: yield
  finally:
    for n, f in was.items(): setattr(cuda, n, f)

def fresh(a: Any) -> Any: return a.copy() if isinstance(a, np.ndarray) else a

def run(name: str, *args: Any, **more: Any) -> tuple[Array, ...]:
  """An operation of cuda.py on arrays; what it writes in place is among its results."""
  with replaced(_run=launch, _new=empty): out = getattr(cuda, name)(*map(fresh, args), **more)
  return out if isinstance(out, tuple) else (out,)

def tensor(a: Any) -> Any:
  if isinstance(a, Weight): return Weight(a.kind, tensor(a.data), None if a.scale is None else tensor(a.scale))
  if type(a) is tuple: return tuple(map(tensor, a))
  return Tensor(a).clone().realize() if isinstance(a, np.ndarray) else a

def want(name: str, *args: Any, **more: Any) -> tuple[Array, ...]:
  out = getattr(twin, name)(*map(tensor, args), **more)
  out = out if isinstance(out, tuple) else (out,)
  Tensor.realize(*out)
  return tuple(t.numpy() for t in out)

def close(name: str, got: Array, expected: Array, bound: float, ulps: float = 0) -> None:
  """Within `bound` of the row's largest value; `ulps`: as many roundings to bfloat16 of it, but not in many places."""
  assert got.shape == expected.shape
  if expected.dtype.kind in "ib":
    assert (got == expected).all(), name
    return
  assert (np.isnan(got) == np.isnan(expected)).all(), name
  got, expected = np.nan_to_num(got), np.nan_to_num(expected)
  size = np.maximum(np.abs(expected).reshape(len(expected), -1).max(1), 1e-30)[:, None]
  off = np.abs(got.astype(float) - expected).reshape(len(expected), -1) / size
  DIFFERENCES[name] = max(DIFFERENCES.get(name, 0), float(off.max()))
  assert (off <= bound + ulps * 2 ** -7).all(), (name, off.max())
  assert (off > bound).mean() <= (0.3 if "attend" in name else 0.05), (name, (off > bound).mean())

def check(name: str, args: Callable[[int], tuple[Any, ...]], bound: float = 2e-6, ulps: float = 0, rows: Sequence[int] = ROWS,
          **more: Any) -> None:
  """args(T): the same data cut to its first T rows. All rows equal the twin's, and fewer rows have the same bits."""
  full = run(name, *args(rows[0]), **more)
  for got, expected in zip(full, want(name, *args(rows[0]), **more), strict=True):
    close(f"{name}{'.w4a8' if more.get('w4a8') else ''}", got, expected, bound, ulps if more.get("w4a8") else 0)
  for T in rows[1:]:
    for got, whole in zip(run(name, *args(T), **more), full, strict=True): assert got.tobytes() == whole[:T].tobytes(), T

def normal(seed: int, *shape: int, scale: float = 1.0, bf16: bool = False) -> Array:
  a = (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)
  return rounded(a) if bf16 else a

def rounded(a: Array) -> Array:
  u = a.view(np.uint32)
  return ((u + 0x7fff + (u >> 16 & 1)) & np.uint32(0xffff0000)).view(np.float32)

def ints(*values: int) -> Array: return np.array(values, np.int32)

def start(pos: int, slot: int = 0) -> Array: return np.array([[pos], [slot]], np.int32)  # `at` of one sequence

def ropes(n: int, r: int, pos: int = 0, stride: int = 1) -> Array:
  angle = (pos // stride + np.arange(n))[:, None] * stride * (10.0 ** -np.arange(r // 2))
  return np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)

def cached(x: Array, r: int, w4a8: bool) -> Array:
  """Rows as a cache holds them; rows of NaN become bytes of 0xff."""
  if not w4a8: return x
  codes = twin.encode_rows(Tensor(np.nan_to_num(x)), r).numpy().copy()
  codes[np.isnan(x).any(1)] = 255
  return codes

def decoded(a: Array, d: int, r: int, index: bool = False) -> Array:
  if index: return formats.dequantise_e2m1(Tensor(a[:, :d // 2]), Tensor(a[:, d // 2:])).numpy()
  return twin.decode_rows(Tensor(a), d, r).numpy()

# ------------------------------------------------------------------------------------------------ the machine itself
MACHINE = """
__global__ void fine(float* out, const float* x) {
  __shared__ float all[64];
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float a = all[63 - threadIdx.x];
  for (int d = 16; d; d >>= 1) a += __shfl_xor_sync(0xffffffffu, a, d);
  out[threadIdx.x] = a + __popc(__ballot_sync(0xffffffffu, threadIdx.x % 3 == 0));
}
__global__ void no_barrier(float* out, const float* x) {
  __shared__ float all[64];
  all[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = all[63 - threadIdx.x];
}
__global__ void half_a_warp(float* out) { if (threadIdx.x < 16) __syncwarp(); else __syncthreads(); }
__global__ void two_places(float* out) {
  if (threadIdx.x < 32) __syncthreads();
  else __syncthreads();
}
__global__ void misaligned(float4* out, const float* x) { out[0] = *(const float4*)(x + 1); }
__global__ void outside(float* out) { __shared__ float all[8]; all[threadIdx.x] = 1; out[0] = all[0]; }
__global__ void beyond(float* out) { out[1 << 20] = 1; }
"""

@needs_clang
def test_mistakes_show() -> None:
  lib, x, out = library(MACHINE), Fenced(normal(1, 64)), Fenced(np.zeros(64, np.float32))
  one, block = (ctypes.c_uint * 3)(1, 1, 1), (ctypes.c_uint * 3)(64, 1, 1)
  args = (ctypes.c_void_p * 3)(out.bytes.ctypes.data, x.bytes.ctypes.data, None)
  launched = lambda name: lib.cuda_on_cpu_launch(ctypes.cast(getattr(lib, name), ctypes.c_void_p), one, block, args, 5)
  assert launched("fine") == 0
  sums = x.bytes.view(np.float32).reshape(2, 32).sum(1)[::-1]
  assert np.abs(out.bytes.view(np.float32).reshape(2, 32) - sums[:, None] - 11).max() < 1e-4  # as many multiples of 3 in each warp
  assert launched("no_barrier") == 0 and np.isnan(out.bytes.view(np.float32)).any()
  assert [launched(n) for n in ("half_a_warp", "two_places", "misaligned", "outside", "beyond", "fine")] == [1, 2, 3, 3, 3, 0]
  for held in (x, out): held.protect(3)

# ------------------------------------------------------------------------------------------------ one interface
def test_same_names_and_signatures() -> None:
  own = {n for n, f in vars(cuda).items() if inspect.isfunction(f) and f.__module__ == cuda.__name__ and not n.startswith("_")}
  theirs = {n for n, f in vars(twin).items() if inspect.isfunction(f) and f.__module__ == twin.__name__ and not n.startswith("_")}
  from specgrad.quant import cpu
  assert own <= theirs
  assert own | PRODUCTS | {"uniforms"} == {n for n in theirs if hasattr(cpu, n) and n not in ("as_weight", "kept")}
  for name in own | PRODUCTS: assert inspect.signature(getattr(cuda, name)) == inspect.signature(getattr(twin, name)), name
  assert not hasattr(cuda, "nothing_of_that_name")

# ------------------------------------------------------------------------------------------------ numerics
@needs_clang
@pytest.mark.parametrize("D, half", [(8, False), (8, True), (7, False), (7, True), (600, True)])
def test_embed(D: int, half: bool) -> None:
  table, ids = normal(1, 11, D, bf16=True), np.random.default_rng(2).integers(0, 11, 33).astype(np.int32)
  ids[:2] = 10, 0
  stored: Any = Weight("BF16", (table.view(np.uint32) >> 16).astype(np.uint16)) if half else table
  for T in ROWS:
    assert (run("embed", stored, ids[:T], 3)[0] == table[ids[:T]][:, None]).all()
  assert (want("embed", stored, ids[:3], 3)[0] == table[ids[:3]][:, None]).all()

@needs_clang
@pytest.mark.parametrize("stride", [1, 4, 128])
def test_rope_table(stride: int) -> None:
  freqs = np.array([1, 0.7, 0.01, 1e-4, 1e-6], np.float32)
  for pos in (0, 3, 65535, 999_967):
    close("rope_table", run("rope_table", freqs, start(pos), 6, stride)[0], want("rope_table", freqs, start(pos), 6, stride)[0], 2e-6)

@needs_clang
@BOTH
@pytest.mark.parametrize("D", [7, 40, 1024])
def test_rms_norm(D: int, w4a8: bool) -> None:
  x, norm = normal(1, 33, D) * (10.0 ** np.arange(-6, 27).clip(-6, 6)).astype(np.float32)[:, None], normal(2, D)
  x[5] = 0
  check("rms_norm", lambda T: (x[:T], norm, 1e-6), 2e-6, 1, w4a8=w4a8)

@needs_clang
@BOTH
@pytest.mark.parametrize("S, D, iters", [(4, 520, 20), (3, 9, 2)])
def test_hyper_connections(S: int, D: int, iters: int, w4a8: bool) -> None:
  M = 2 * S + S * S
  h, fn, scale, base, norm = normal(1, 33, S, D), normal(2, M, S * D, scale=2 / math.sqrt(S * D)), normal(3, 3), normal(4, M), normal(5, D)
  check("hc_pre", lambda T: (h[:T], fn, scale, base, norm, iters, 1e-6, 1e-6), 1e-5, 1, w4a8=w4a8)
  check("hc_head", lambda T: (h[:T], fn[:S], scale[:1], base[:S], norm, 1e-3, 1e-6), 1e-5, 1, w4a8=w4a8)
  z, post, comb = normal(6, 33, D), normal(7, 33, S), normal(8, 33, S, S)
  check("hc_post", lambda T: (z[:T], h[:T], post[:T], comb[:T]), 2e-6, 1, w4a8=w4a8)
  check("hc_post", lambda T: ((z[:T], h[:T, 0], h[:T, 1]), h[:T], post[:T], comb[:T]), 2e-6, 1, w4a8=w4a8)

@needs_clang
def test_hc_pre_with_extreme_mixes() -> None:
  base = np.array([-80, 80, 0, 1, -80, 80, 0, 1, *(60 * np.eye(4) - 30).ravel()], np.float32)
  h, fn = normal(1, 6, 4, 8), normal(2, 24, 32, scale=0.4)
  check("hc_pre", lambda T: (h[:T], fn, np.array([5, 5, 9], np.float32), base, normal(5, 8), 20, 1e-6, 1e-6), 2e-5, rows=(6, 1))

@needs_clang
@BOTH
@pytest.mark.parametrize("H, D, r, eps, index", [(3, 80, 16, 1e-6, False), (2, 512, 64, 1e-6, False), (2, 33, 8, None, False),
                                                 (2, 128, 64, None, True), (3, 32, 8, None, True)])
def test_head_rope(H: int, D: int, r: int, eps: float | None, index: bool, w4a8: bool) -> None:
  q, rope = normal(1, 33, H * D, bf16=w4a8), ropes(33, r, 1000)
  q[4] *= 1e-20
  q[5] = 0
  check("head_rope", lambda T: (q[:T], rope[:T], H, eps, index), 2e-6, 40 if index else 2, w4a8=w4a8)

@needs_clang
@BOTH
@pytest.mark.parametrize("d, r", [(80, 16), (256, 64)])
def test_kv_rows_and_write(d: int, r: int, w4a8: bool) -> None:
  n = 44
  for T, pos in ((33, 20), (6, 1_000_003)):
    kv, norm, rope = normal(T, T, d, bf16=True), normal(2, d), ropes(T, r, pos)
    kv[0] *= 1e-3
    ring = cached(np.full((n, d), np.nan, np.float32), r, w4a8)
    args = ring[None], kv, norm, rope, start(pos), 1e-6
    got, expected = run("kv_write", *args, w4a8=w4a8)[0][0], want("kv_write", *args, w4a8=w4a8)[0][0]
    slots = (pos + np.arange(T)) % n
    kept = np.setdiff1d(np.arange(n), slots)
    assert got[kept].tobytes() == ring[kept].tobytes()
    got, expected = (decoded(a[slots], d, r) if w4a8 else a[slots] for a in (got, expected))
    close("kv_write", got, expected, 2e-6, 16 * w4a8)
    rows = run("kv_rows", kv, norm, rope, 1e-6, w4a8=w4a8)[0]
    assert rows.tobytes() == got.tobytes()
    close("kv_rows", rows, want("kv_rows", kv, norm, rope, 1e-6, w4a8=w4a8)[0], 2e-6, 16 * w4a8)
    assert run("kv_rows", kv[:1], norm, rope[:1], 1e-6, w4a8=w4a8)[0].tobytes() == rows[:1].tobytes()

@needs_clang
@BOTH
def test_a_sick_row_is_cached_as_sick(w4a8: bool) -> None:
  kv = normal(1, 3, 80)
  kv[0, 3], kv[1, 70] = np.nan, np.inf
  args = kv, np.ones(80, np.float32), ropes(3, 16), 1e-6
  got, expected = run("kv_rows", *args, w4a8=w4a8)[0], want("kv_rows", *args, w4a8=w4a8)[0]
  assert (np.isnan(got[0]) == np.isnan(expected[0])).all() and np.isfinite(got[2]).all()

@needs_clang
@BOTH
@pytest.mark.parametrize("ratio, overlap, d, r, index", [
  (4, True, 80, 16, False), (4, True, 32, 16, True), (128, False, 72, 8, False), (2, False, 33, 2, False)])
def test_compress(ratio: int, overlap: bool, d: int, r: int, index: bool, w4a8: bool) -> None:
  """Fed in chunks; what is finished equals the twin's, whatever the chunks."""
  if w4a8 and ((d - r) % 64 and not index): return
  n, w, most = (300 if ratio == 128 else 66), d * (1 + overlap), 33
  proj, ape, norm = normal(1, n + most, 2 * w, scale=2), normal(2, ratio, w), normal(3, d)
  slots = -(-((1 + overlap) * ratio + most) // ratio) * ratio
  width = (twin.key_bytes(d) if index else twin.row_bytes(d, r)) if w4a8 else d
  made: list[Array] = []
  for sizes in ((33,), (6, 1, 33), (1,) if ratio < 9 else (6,)):
    ring = np.full((1, slots, 2 * w), np.nan, np.float32)
    entries = np.full((1, (n + most) // ratio + 2, width), *((255, np.uint8) if w4a8 else (np.nan, np.float32)))
    reference, p, i = (ring.copy(), entries.copy()), 0, 0
    while p < n:
      T = sizes[i % len(sizes)]
      rest = proj[p:p + T], ape, norm, ropes(-(-T // ratio), r, p, ratio), start(p), 1e-6, index
      ring, entries = run("compress", ring, entries, *rest, w4a8=w4a8)
      if len(sizes) == 3: reference = want("compress", *reference, *rest, w4a8=w4a8)  # type: ignore[assignment]
      p, i = p + T, i + 1
    made.append(entries[0, :n // ratio].copy())
    if len(sizes) != 3: continue
    got, expected = made[-1], reference[1][0, :n // ratio]
    if w4a8: got, expected = (decoded(a, d, r, index) for a in (got, expected))
    close("compress", got, expected, 3e-6, (60 if index else 16) * w4a8)
  assert made[0].tobytes() == made[1].tobytes() == made[2].tobytes()

@needs_clang
@pytest.mark.parametrize("H, D, ratio, k, n", [
  (8, 64, 4, 4, 40), (3, 13, 4, 7, 40), (2, 8, 16, 1, 12), (66, 72, 2, 16, 90), (1, 8, 2, 64, 1000)])
def test_index_topk(H: int, D: int, ratio: int, k: int, n: int) -> None:
  q, weight = normal(1, 33, H, D), normal(3, 33, H)
  for pos in (0, ratio * k - 1, ratio * n - 33):
    known = max((pos + 33) // ratio, 1)
    keys = np.full((n + 3, D), np.nan, np.float32)
    keys[:known] = normal(2, known, D)
    check("index_topk", lambda T, pos=pos, keys=keys: (q[:T], keys[None], weight[:T], start(pos), n, k, ratio))

@needs_clang
def test_index_topk_takes_the_lower_index_of_equals() -> None:
  rng = np.random.default_rng(1)
  q, keys, weight = (rng.integers(-1, 2, s).astype(np.float32) for s in ((33, 4, 16), (50, 16), (33, 4)))
  keys[10:20] = keys[0]
  weight[5], q[6] = 0, 0                                   # all equal, and minus zero among them
  for k in (1, 16, 37): check("index_topk", lambda T, k=k: (q[:T], keys[None], weight[:T], start(150), 50, k, 4))

@needs_clang
@pytest.mark.parametrize("H, D, k, n", [(8, 64, 5, 48), (64, 128, 20, 72), (80, 32, 3, 33), (1, 32, 64, 1000)])
def test_index_topk_of_codes(H: int, D: int, k: int, n: int) -> None:
  """Sums of products are exact in any order here; the sum over heads isn't, so that a score may be one bfloat16 away."""
  q = formats.roundtrip_e2m1(Tensor(normal(1, 33, H, D))).numpy()
  weight, pos = normal(3, 33, H, bf16=True), 4 * n - 40
  known = (pos + 33) // 4
  packed, scale = formats.quantise_e2m1(Tensor(normal(2, n + 2, D)))
  keys = np.concatenate([packed.numpy(), scale.numpy()], 1)
  keys[known:] = 255
  args = lambda T: (q[:T], keys[None], weight[:T], start(pos), n, k, 4)
  got, expected = run("index_topk", *args(33), w4a8=True)[0], want("index_topk", *args(33), w4a8=True)[0]
  assert (got.sum(1) == k).all() and not got[:, known:].any()
  assert (got != expected).sum() <= 2 * 33 * k * 0.02
  for T in (6, 1): assert run("index_topk", *args(T), w4a8=True)[0].tobytes() == got[:T].tobytes()

def attention(pos: int, T: int, H: int, d: int, r: int, ring: int, window: int, ratio: int, n: int, choose: bool, w4a8: bool,
              scale: float = 1.0) -> tuple[Any, ...]:
  """Ring slots outside every row's window and entries that are unfinished are NaN."""
  held = np.full((ring, d), np.nan, np.float32)
  first = max(pos - window + 1, 0)
  held[np.arange(first, pos + T) % ring] = normal(2, pos + T, d, bf16=True)[first:]
  known = min((pos + T) // ratio, n) if n else 0
  entries = np.full((n + 2, d), np.nan, np.float32)
  entries[:known] = normal(5, known, d, bf16=True)
  seen = np.arange(n) < ((pos + np.arange(T) + 1) // ratio)[:, None] if n else None
  if choose: seen = seen & (np.random.default_rng(6).random((T, n)) < 0.5)
  q = normal(1, T, H, d, scale=scale, bf16=True)
  return (q, cached(held, r, w4a8)[None], cached(entries, r, w4a8)[None] if n else None, seen if choose else None, normal(3, H, scale=3),
          ropes(T, r, pos), start(pos), window, n, ratio)

def cut(args: tuple[Any, ...], T: int) -> tuple[Any, ...]:
  return tuple(a[:T] if i in (0, 5) or (i == 3 and a is not None) else a for i, a in enumerate(args))

@needs_clang
@BOTH
@pytest.mark.parametrize("H, d, r, n, ratio, choose", [
  (3, 80, 16, 0, 1, False), (17, 80, 16, 96, 2, True), (2, 128, 64, 300, 2, True), (20, 72, 8, 60, 16, False), (1, 33, 2, 40, 4, True)])
def test_attend(H: int, d: int, r: int, n: int, ratio: int, choose: bool, w4a8: bool) -> None:
  if w4a8 and (d - r) % 64: return
  for pos in (0, 47, 600):
    if n and (pos + 33) // ratio > n: continue
    args = attention(pos, 33, H, d, r, 48, 8, ratio, n, choose, w4a8)
    check("attend", lambda T, args=args: cut(args, T), 3e-6, 2, w4a8=w4a8)

@needs_clang
@BOTH
def test_attend_over_many_chunks(w4a8: bool) -> None:
  """More rows than one round of the splits takes, and scores that are far apart."""
  args = attention(2500, 6, 4, 128, 64, 160, 128, 2, 1252, False, w4a8, scale=4)
  check("attend", lambda T: cut(args, T), 1e-5, 2, rows=(6, 1), w4a8=w4a8)

@needs_clang
@BOTH
@pytest.mark.parametrize("H, d, r", [(3, 80, 16), (17, 128, 64), (1, 33, 2)])
def test_attend_block(H: int, d: int, r: int, w4a8: bool) -> None:
  if w4a8 and (d - r) % 64: return
  for pos in (0, 5, 50, 100):
    held = np.full((48, d), np.nan, np.float32)
    first = max(pos - 8, 0)
    held[np.arange(first, pos) % 48] = normal(2, pos, d, bf16=True)[first:]
    args = (normal(1, 6, H, d, bf16=True), cached(held, r, w4a8)[None], normal(4, 6, d, bf16=True), normal(3, H, scale=3),
            ropes(6, r, pos), start(pos), 8)
    check("attend_block", lambda _, args=args: args, 3e-6, 2, rows=(6,), w4a8=w4a8)

@needs_clang
@pytest.mark.parametrize("E, k", [(8, 3), (256, 6), (50, 6)])
def test_route(E: int, k: int) -> None:
  z, bias, tokens = normal(1, 33, E, scale=3), normal(2, E), np.arange(33, dtype=np.int32) % 7
  z[3], z[4] = 0, -100                                     # all equal
  z[5, ::2] = 90
  check("route", lambda T: (z[:T], bias * (np.arange(E) % 3 > 0), None, tokens[:T], k, 1.5), 2e-6)
  table = np.random.default_rng(3).permuted(np.tile(np.arange(E, dtype=np.int32), (7, 1)), axis=1)[:, :k].copy()
  check("route", lambda T: (z[:T], None, table, tokens[:T], k, 1.5), 2e-6)

@needs_clang
def test_route_of_nan_gives_experts_that_exist() -> None:
  z = np.full((2, 8), np.nan, np.float32)
  assert sorted(run("route", z, np.zeros(8, np.float32), None, ints(0, 0), 3, 1.5)[0][0]) == [0, 1, 2]

def logits(V: int) -> Array:
  x = normal(1, 33, V, scale=3)
  x[1] = 2
  x[2, ::3] = x[2].max()
  x[3, 5:] = -np.inf
  x[4], x[5, V // 2], x[6, V - 1] = -np.inf, np.nan, np.inf
  x[7], x[8] = x[7] * 1e30, x[8] * 1e-30
  x[9, :V // 2] = -0.0
  x[9, V // 2:] = 0.0
  return x

@needs_clang
@pytest.mark.parametrize("V, rows", [(40, ROWS), (41, ROWS), (1999, ROWS), (30000, (8, 1))])
def test_argmax(V: int, rows: tuple[int, ...]) -> None: check("argmax", lambda T: (logits(V)[:T],), rows=rows)

@needs_clang
@pytest.mark.parametrize("settings", [
  (1, 1, 0, 0), (0.7, 0.9, 0, 0), (1, 1, 5, 0), (1.3, 0.8, 7, 0.02), (1, 1, 0, 0.1), (1, 0.5, 60, 0), (2, 1, 1, 0)])
def test_probs(settings: tuple[float, ...]) -> None:
  x, s = logits(60), np.array([settings], np.float32)
  x[8:] += 0                                               # keeps rows 0..7 as they are and the rest random
  check("probs", lambda T: (x[:T], s), 3e-6)

@needs_clang
def test_probs_where_all_are_close_together() -> None:
  """More values in a bin than it has room for: the row is searched bit by bit, with the same result."""
  V, s = 3000, np.array([[1, 0.6, 0, 0]], np.float32)
  x = (5 + np.random.default_rng(1).permutation(V) * 2.0 ** -20).astype(np.float32)[None]
  got = run("probs", x, s)[0][0]
  e = np.exp(x[0].astype(float) - x.max())
  order = np.argsort(-x[0])
  kept = order[:np.searchsorted(np.cumsum(e[order]), 0.6 * e.sum()) + 1]
  assert abs(int((got > 0).sum()) - len(kept)) <= 1 and np.abs(got[kept[:-1]] - e[kept[:-1]] / e[kept].sum()).max() < 1e-6
  got = run("probs", x, np.array([[1, 1, 2900, 0]], np.float32))[0][0]
  assert set(np.flatnonzero(got)) == set(order[:2900])

@needs_clang
@pytest.mark.parametrize("V, use, offset", [(40, 0, 0), (41, 2, 3), (1500, 1, 0)])
def test_pick(V: int, use: int, offset: int) -> None:
  w = np.maximum(normal(1, 33, V), 0)
  w[1], w[2, 3], w[3] = 0, np.nan, 1
  w[4] *= 1e-30
  for pos in (0, 12345): check("pick", lambda T, pos=pos: (w[:T], ints(7, 9)[None], start(pos), use, offset))

# ------------------------------------------------------------------------------------------------ several sequences, several devices
@needs_clang
@BOTH
@pytest.mark.parametrize("name", [n for n in KINDS if n not in PRODUCTS | {"uniforms"}])
def test_sequences_do_not_touch_each_other(name: str, w4a8: bool) -> None:
  takes = "w4a8" in inspect.signature(getattr(twin, name)).parameters
  if w4a8 and not takes: return
  more: dict[str, Any] = {"w4a8": w4a8} if takes else {}
  for s in (Sequences(6, w4a8), *([Sequences(2, w4a8, 3, 128, 64)] if "attend" in name else [])):
    args, got = s.alone_or_together(functools.partial(run, **more), name, (2, 0, 3))
    s.agree(name, (2, 0, 3), got, want(name, *args, **more))

@needs_clang
def test_probs_at_temperature_zero() -> None:
  x = logits(1500)
  x[4:6] = x[0]
  got = run("probs", np.concatenate([x, x]), np.array([[0, 0.3, 2, 0.5], [1, 1, 0, 0]], np.float32))[0]
  expected = want("probs", x, np.array([[0, 1, 0, 0]], np.float32))[0]
  assert (np.nan_to_num(got[:33], nan=7) == np.nan_to_num(expected, nan=7)).all() and set(np.nansum(expected, 1)) == {0, 1}
  assert ((got[33:] > 0).sum(1) > 1).any()

@needs_clang
@BOTH
@pytest.mark.parametrize("ranks", [2, 3])
def test_compress_keeps_its_own_entries(ranks: int, w4a8: bool) -> None:
  s = Sequences(13, w4a8)
  args = s.together("compress", (2, 0, 3))
  ring, whole = run("compress", *args, w4a8=w4a8)
  for rank in range(ranks):
    mine = (args[0], args[1][:, :40], *args[2:])
    held, got = run("compress", *mine, rank=rank, ranks=ranks, w4a8=w4a8)
    spread = np.full_like(args[1], args[1][2, 0, 0])       # what the others keep is untouched
    spread[:, rank::ranks] = whole[:, rank::ranks]
    assert held.tobytes() == ring.tobytes()
    for i in range(40):
      j = rank + i * ranks
      assert got[:, i].tobytes() == (spread[:, j] if j < s.n + 3 else mine[1][:, i]).tobytes()

@needs_clang
@BOTH
@pytest.mark.parametrize("ranks, ks", [(1, (7,)), (2, (7, 64, 100)), (3, (1, 30))])
def test_the_best_of_all_ranks_are_those_of_one(ranks: int, ks: Sequence[int], w4a8: bool) -> None:
  """Scores are exact, and most of them are equal."""
  for k in ks:
    q, keys, weight, at, n = indexed(6, w4a8, k)
    whole, best = run("index_topk", q, keys, weight, at, n, k, 4, w4a8=w4a8)[0], []
    for r, mine in enumerate(shared_out(keys, ranks)):
      args = q, mine, weight, at, n, k, 4, r, ranks
      got, expected = run("index_best", *args, w4a8=w4a8)[0], want("index_best", *args, w4a8=w4a8)[0]
      assert (got[:, 0] == expected[:, 0]).all() and (got[:, 1] == expected[:, 1])[got[:, 0] > -np.inf].all()
      best.append(got)
    for r in range(ranks):
      assert (run("index_choose", tuple(best), n, k, r, ranks)[0] == whole[:, r::ranks]).all()
      for T in (6, 1): assert (run("index_choose", tuple(b[:T] for b in best), n, k, r, ranks)[0] == whole[:T, r::ranks]).all()

@needs_clang
@BOTH
@pytest.mark.parametrize("ranks, choose, heads, d, r", [(2, True, 6, 128, 64), (3, False, 6, 72, 8), (2, False, 40, 128, 64)])
def test_shares_of_several_sequences(ranks: int, choose: bool, heads: int, d: int, r: int, w4a8: bool) -> None:
  sequences_share(Sequences(6, w4a8, heads, d, r), functools.partial(run, w4a8=w4a8), functools.partial(want, w4a8=w4a8), ranks, choose)

# ------------------------------------------------------------------------------------------------ declared buffers
def programs(out: Any) -> list[Any]:
  found: dict[Any, Any] = {}
  for t in out if isinstance(out, tuple) else (out,):
    for u in t.uop.toposort():
      if u.op is Ops.PROGRAM: found[u.key] = u
  return list(found.values())

def test_every_buffer_is_declared() -> None:
  """Whatever a kernel writes is in outs, whatever it reads in ins: the edges of a captured graph come from these."""
  kinds = {np.dtype(n): t for t, n in NUMPY.items()}
  for name, args, more in examples(6, 512, None):
    hollow = lambda a: Tensor.empty(*a.shape, dtype=kinds[a.dtype]) if isinstance(a, np.ndarray) else a
    made = programs(getattr(cuda, name)(*[tuple(map(hollow, a)) if type(a) is tuple else hollow(a) for a in args], **more))
    assert made, name
    for program in made:
      info, kernel = program.arg, re.search(r"#define KERNEL_(\w+)", program.src[2].arg)
      assert kernel is not None
      inplace = kernel[1] in ("kv_write", "compress")
      assert len(info.globals) == len(program.src[0].src) and info.outs and info.local_size[0] % 32 == 0, name
      assert info.ins == tuple(range(0 if inplace else len(info.outs), len(info.globals))), name
      header = re.search(rf"#ifdef KERNEL_{kernel[1]}\b.*?KERNEL NAME\((.*?)\) \{{", cuda._source(), re.DOTALL)
      assert header is not None
      ranks = int((re.search(r"#define RANKS (\d+)", program.src[2].arg) or ["", "1"])[1])
      parameters = re.sub(r"EACH\((IN|OUT)S\)", lambda m, n=ranks: ", ".join([f"{m[1]} one"] * n), header[1])
      writes = [" const " not in f" {p}" and not p.strip().startswith("IN ") for p in parameters.split(",")]
      assert len(writes) == len(info.globals) and writes == [i in info.outs for i in range(len(writes))], (name, header[1])

# ------------------------------------------------------------------------------------------------ the real model's sizes
def shape(*sizes: int, dtype: Any = np.float32) -> Array: return np.broadcast_to(np.zeros((), dtype), sizes)  # takes no memory

def examples(T: int, context: int, w4a8: bool | None) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
  """Every operation with the arguments of DeepSeek-V4-Flash. w4a8 none: float32, with few tokens in the vocabulary."""
  D, H, d, r, S, V = 4096, 64, 512, 64, 4, 129280 if w4a8 is not None else 512
  i32, more = np.int32, {"w4a8": bool(w4a8)}
  row = lambda n, width=d: shape(1, n, twin.row_bytes(width, r), dtype=np.uint8) if w4a8 else shape(1, n, width)
  key = lambda n: shape(1, n, twin.key_bytes(128), dtype=np.uint8) if w4a8 else shape(1, n, 128)
  at, rope, n = shape(2, 1, dtype=i32), shape(T, r // 2, 2), context // 4
  table: Any = Weight("BF16", shape(V, D, dtype=np.uint16)) if w4a8 else shape(V, D)
  yield "embed", (table, shape(T, dtype=i32), S), {}
  yield "rope_table", (shape(r // 2), at, T), {}
  yield "rope_table", (shape(r // 2), at, -(-T // 4), 4), {}
  yield "hc_pre", (shape(T, S, D), shape(24, S * D), shape(3), shape(24), shape(D), 20, 1e-6, 1e-6), more
  yield "hc_post", (shape(T, D), shape(T, S, D), shape(T, S), shape(T, S, S)), more
  yield "hc_head", (shape(T, S, D), shape(S, S * D), shape(1), shape(S), shape(D), 1e-6, 1e-6), more
  for width in (1024, D): yield "rms_norm", (shape(T, width), shape(width), 1e-6), more
  yield "head_rope", (shape(T, H * d), rope, H, 1e-6), more
  yield "head_rope", (shape(T, 64 * 128), rope, 64, None, True), more
  yield "kv_write", (row(256), shape(T, d), shape(d), rope, at, 1e-6), more
  yield "kv_rows", (shape(T, d), shape(d), rope, 1e-6), more
  for ratio, width, index in ((4, d, False), (4, 128, True), (128, d, False)):
    both = 2 if ratio == 4 else 1
    state = shape(1, 136 if ratio == 4 else 256, 2 * both * width), key(n + 34) if index else row(context // ratio + 34)
    turns = shape(-(-T // ratio), r // 2, 2)
    yield "compress", (*state, shape(T, 2 * both * width), shape(ratio, both * width), shape(width), turns, at, 1e-6, index), more
  yield "index_topk", (shape(T, 64, 128), key(n + 34), shape(T, 64), at, n, 512, 4), more
  ring, q, sink = row(256), shape(T, H, d), shape(H)
  yield "attend", (q, ring, None, None, sink, rope, at, 128, 0, 1), more
  yield "attend", (q, ring, row(n + 34), shape(T, n, dtype=np.bool_), sink, rope, at, 128, n, 4), more
  yield "attend", (q, ring, row(context // 128 + 3), None, sink, rope, at, 128, context // 128, 128), more
  half, mine = shape(T, H // 2, d), twin.kept(n, 1, 2)     # on two devices
  best, parts = shape(T, 2, 512), shape(T, H // 2, d + 2)
  yield "index_best", (shape(T, 64, 128), key(mine + 17), shape(T, 64), at, n, 512, 4, 1, 2), more
  yield "index_choose", ((best, best), n, 512, 1, 2), {}
  yield "attend_part", ((half, half), ring, row(mine + 17), shape(T, mine, dtype=np.bool_), at, 128, n, 4, 1, r), more
  yield "attend_part", ((half, half), ring, row(context // 256 + 3), None, at, 128, context // 128, 128, 1, r), more
  yield "attend_merge", ((parts, parts), shape(H // 2), rope), more
  yield "attend_block", (q, ring, shape(T, d), sink, rope, at, 128), more
  yield "route", (shape(T, 256), shape(256), None, shape(T, dtype=i32), 6, 1.5), {}
  yield "route", (shape(T, 256), None, shape(V, 6, dtype=i32), shape(T, dtype=i32), 6, 1.5), {}
  yield "argmax", (shape(T, V),), {}
  yield "probs", (shape(T, V), shape(1, 4)), {}
  yield "pick", (shape(T, V), shape(1, 2, dtype=i32), at), {}

def sources() -> dict[str, str]:
  """Symbol -> source of every kernel that the real model runs."""
  made: dict[str, str] = {}

  def record(name: str, outs: list[Array], ins: list[Array], grid: Sequence[int], threads: int, inplace: bool = False,
             **sizes: Any) -> list[Array]:
    symbol, text = cuda._text(name, (("THREADS", threads), *sizes.items()))
    made[symbol] = text
    return outs
  with replaced(_run=record, _new=lambda like, *sizes, dtype=dtypes.float32: shape(*sizes, dtype=NUMPY[dtype])):
    for T, context, w4a8 in ((6, 8192, True), (1, 131072, True), (128, 131072, True), (6, 8192, False)):
      for name, args, more in examples(T, context, w4a8): getattr(cuda, name)(*args, **more)
  return made

def compiled(arch: str) -> dict[str, dict[str, int]]:
  """Symbol -> registers, shared bytes and spilled bytes, by one run of nvcc: each kernel in a namespace of its own."""
  text = ""
  for i, source in enumerate(sources().values()):
    names = set(re.findall(r"^#define (\w+)", source, re.MULTILINE))
    head, body = source.split("// The kernels of", 1)
    text += head + f"namespace n{i} {{\n//" + body + "}\n" + "".join(f"#undef {n}\n" for n in sorted(names))
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "all.cu"
    path.write_text(text)
    out = subprocess.run(["nvcc", f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-o", path.with_suffix(".cubin"), path],
                         capture_output=True, text=True)
  assert out.returncode == 0, out.stderr[-3000:]
  table: dict[str, dict[str, int]] = {}
  for entry in out.stderr.split("Compiling entry function ")[1:]:
    number = lambda pattern, entry=entry: sum(map(int, re.findall(pattern, entry)))
    table[entry.split("'")[1]] = {"registers": number(r"Used (\d+) registers"), "shared": number(r"(\d+) bytes smem"),
                                  "spilled": number(r"(\d+) bytes spill stores"), "stack": number(r"(\d+) bytes stack frame")}
  return table

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")

@needs_nvcc
def test_registers_and_shared_memory_are_within_the_budget() -> None:
  table, budget = compiled("sm_120"), json.loads(BUDGET.read_text())
  assert table.keys() == budget.keys()
  for name, used in table.items():
    assert used["spilled"] == 0, name
    assert used["shared"] <= 48 * 1024, name
    for what, most in budget[name].items(): assert used[what] <= most, (name, what)

@needs_nvcc
def test_older_gpus_can_be_compiled_for() -> None:
  for name, used in compiled("sm_80").items(): assert used["spilled"] == 0, name

if __name__ == "__main__":
  figures = compiled("sm_120")
  lines = (f"  {json.dumps(n)}: {json.dumps({k: v for k, v in figures[n].items() if k != 'spilled'})}" for n in sorted(figures))
  BUDGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")
