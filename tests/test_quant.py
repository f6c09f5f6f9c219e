"""Every operation three times: the C kernel, its readable twin, and a numpy oracle, on random and on spiteful inputs."""
from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from tinygrad import Tensor, TinyJit

import specgrad
from specgrad.engine import put
from specgrad.models.rope import frequencies
from specgrad.quant import cpu, cuda, formats, operations, twin

Array = np.ndarray
Call = Callable[..., tuple[Array, ...]]                     # an operation's name and arguments -> its results
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 33)                    # the fast kernels tile rows: every rest occurs
SOME = (1, 33)                                             # where another shape of the same operation has seen all of ROWS
PLAIN = (1, 2, 7, 33)                                      # of operations that go row by row
OPS = ("embed", "rope_table", "rms_norm", "hc_pre", "hc_post", "hc_head", "linear", "experts", "head_rope", "kv_write",
       "compress", "index_topk", "index_best", "index_choose", "attend", "attend_part", "attend_merge", "route", "argmax", "probs",
       "uniforms", "pick", "markov", "kv_rows", "attend_block")
BOTH = pytest.mark.parametrize("ops", [cpu, twin], ids=["cpu", "twin"])

class Captured:
  """Operations on fixed buffers, captured once for each shape and replayed: what users run, and far faster than eager."""
  def __init__(self) -> None: self.graphs: dict[Any, tuple[list[Any], TinyJit]] = {}

  def __call__(self, key: Any, held: Callable[[], list[Any]], build: Callable[..., Any], values: Sequence[Any]) -> tuple[Tensor, ...]:
    if key not in self.graphs:
      made = held()
      self.graphs[key] = made, TinyJit(lambda: listed(build(*made)))
      self.graphs[key][1].cnt = 1                          # nothing in it needs a warm-up
    made, jit = self.graphs[key]
    for t, v in zip(made, values):
      if isinstance(v, np.ndarray): put(t, v)
    return jit()

def listed(out: Any) -> tuple[Tensor, ...]:
  out = out if isinstance(out, tuple) else (out,)
  Tensor.realize(*out)
  return out

CAPTURED = Captured()

def tensor(a: Any) -> Any: return Tensor(a).clone().realize() if isinstance(a, np.ndarray) else a

def flat(args: Sequence[Any]) -> list[Any]: return [x for a in args for x in (a if isinstance(a, tuple) else (a,))]

def run(ops: Any, name: str, *args: Any, **named: Any) -> tuple[Array, ...]:
  """Arrays, and those in tuples, become device buffers; what an operation writes in place is among its results."""
  values, sizes = flat(args), [len(a) if isinstance(a, tuple) else 0 for a in args]
  assert not any(isinstance(a, np.ndarray) and a.dtype.itemsize == 8 for a in values)
  def build(*held: Any) -> Any:
    left = iter(held)
    return getattr(ops, name)(*[tuple(next(left) for _ in range(n)) if n else next(left) for n in sizes], **named)
  key = (ops.__name__, name, *sizes, *named.items(), *((a.shape, a.dtype.str) if isinstance(a, np.ndarray) else a for a in values))
  return tuple(t.numpy().copy() for t in CAPTURED(key, lambda: list(map(tensor, values)), build, values))

def normal(seed: int, *shape: int, scale: float = 1.0) -> Array:
  return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)

def ints(*values: int) -> Array: return np.array(values, np.int32)

def start(pos: int, slot: int = 0) -> Array:
  """`at` of one sequence."""
  return np.array([[pos], [slot]], np.int32)

def close(got: Array, want: Array, bound: float) -> None:
  """Within `bound` of the largest wanted value of the row; equal where `want` holds ids or flags."""
  assert got.shape == want.shape
  if want.dtype.kind in "ib": assert (got == want).all()
  else:
    size = np.maximum(np.abs(want).reshape(len(want), -1).max(1), 1e-30)
    assert (np.abs(got - want).reshape(len(want), -1) <= bound * size[:, None]).all()  # NaN fails too

def check(name: str, args: Callable[[int], tuple[Any, ...]], want: Sequence[Array], bound: float = 2e-6,
          rows: Sequence[int] = ROWS, twin_rows: Sequence[int] = (33,)) -> None:
  """args(T): the same data cut to its first T rows. Both equal the oracle's rows, and the fast kernel gives the same bits
  for a row whatever the number of rows."""
  most = max(rows)
  full = run(cpu, name, *args(most))
  for got, w in zip(full, want, strict=True): close(got, w, bound)
  for T in rows:
    for got, all_rows in zip(run(cpu, name, *args(T)), full, strict=True): assert got.tobytes() == all_rows[:T].tobytes(), T
  for T in twin_rows:
    for got, all_rows in zip(run(twin, name, *args(T)), full, strict=True): close(got, all_rows[:T], bound)

# ------------------------------------------------------------------------------------------------ one interface
def functions(module: Any) -> set[str]:
  return {n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__ and not n.startswith("_")}

def test_same_names_and_signatures() -> None:
  assert functions(cpu) & functions(twin) == set(OPS) - {"uniforms"}
  assert cpu.uniforms is twin.uniforms
  for name in OPS:
    assert inspect.signature(getattr(cpu, name)) == inspect.signature(getattr(twin, name)), name

def test_every_operation_of_the_model_is_here() -> None:
  code = [p.read_text() for p in Path(specgrad.__file__).parent.rglob("*.py")]
  assert {name for text in code for name in re.findall(r"\bops\.(\w+)", text)} & functions(twin) == set(OPS)

def test_who_computes_where() -> None:
  for device, module in (("CPU", cpu), ("CPU:1", cpu), ("CUDA", cuda), ("NV:1", cuda), ("CL", twin)):
    for w4a8 in (False, True):
      ops = operations(device, w4a8)
      for name in OPS:
        chosen = getattr(ops, name)
        if "w4a8" in inspect.signature(getattr(twin, name)).parameters:
          assert chosen.keywords == {"w4a8": w4a8}
          chosen = chosen.func
        assert chosen is getattr(module, name)

# ------------------------------------------------------------------------------------------------ products and norms
@pytest.mark.parametrize("K, N, G", [(33, 9, 1), (256, 66, 1), (40, 12, 2), (13, 3, 4)])
def test_linear(K: int, N: int, G: int) -> None:
  x, w = normal(1, 33, G * K), normal(2, G * N, K)
  want = np.einsum("tgk,gnk->tgn", x.reshape(33, G, K).astype(float), w.reshape(G, N, K)).reshape(33, -1)
  check("linear", lambda T: (x[:T], w, G), [want], rows=ROWS if N == 9 or G == 4 else SOME)

def test_linear_takes_huge_and_tiny_rows() -> None:
  x = normal(1, 8, 20) * np.float32([[1e-30], [1e-10], [1], [1e4], [1e10], [1e18], [0], [1]])
  w = normal(2, 6, 20)
  check("linear", lambda T: (x[:T], w, 1), [x.astype(float) @ w.T], rows=(8, 5, 1), twin_rows=(8,))

def test_linear_keeps_a_sick_row_to_itself() -> None:
  x, w = normal(1, 8, 20), normal(2, 6, 20)
  well = run(cpu, "linear", x, w, 1)[0]
  x[3], x[5, 2] = np.nan, np.inf
  for ops in (cpu, twin):
    got = run(ops, "linear", x, w, 1)[0]
    assert not np.isfinite(got[[3, 5]]).any()
    close(got[[0, 1, 2, 4, 6, 7]], well[[0, 1, 2, 4, 6, 7]], 1e-6)

@pytest.mark.parametrize("D", [1, 7, 40])
def test_rms_norm(D: int) -> None:
  x, norm = normal(1, 33, D) * (10.0 ** np.arange(-6, 27).clip(-6, 6)).astype(np.float32)[:, None], normal(2, D)
  check("rms_norm", lambda T: (x[:T], norm, 1e-6), [oracle.rms(x.astype(float), 1e-6) * norm], rows=PLAIN if D == 7 else SOME)

@BOTH
def test_rms_norm_of_nothing_is_nothing(ops: Any) -> None:
  assert (run(ops, "rms_norm", np.zeros((2, 9), np.float32), normal(2, 9), 1e-6)[0] == 0).all()

def test_embed() -> None:
  table, ids = normal(1, 11, 5), np.random.default_rng(2).integers(0, 11, 33).astype(np.int32)
  ids[:2] = 10, 0
  check("embed", lambda T: (table, ids[:T], 3), [np.repeat(table[ids][:, None], 3, 1)], bound=0, rows=PLAIN)

# ------------------------------------------------------------------------------------------------ rotary embedding
POSITIONS = (0, 1, 4095, 65535, 100003, 999_967)

@pytest.mark.parametrize("stride", [1, 4, 128])
def test_rope_table(stride: int) -> None:
  """Angles reach a million radians: the float32 product is the angle, its sine and cosine are exact."""
  freqs = oracle.frequencies(64, 160000, {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1})
  for pos in POSITIONS:
    for n in (1, 33):
      want = oracle.rope_table((pos // stride + np.arange(n)) * stride, freqs)
      for ops, bound in ((cpu, 1e-7), (twin, 2e-6)):
        got = run(ops, "rope_table", freqs, start(pos), n, stride)[0]
        assert got.shape == want.shape and np.abs(got - want).max() <= bound, (pos, ops)

@pytest.mark.parametrize("kind, theta, yarn", [("sliding", 10000, None), ("compress", 160000, (16, 65536, 32, 1))])
def test_rope_angles_of_the_real_model(shared: Path, kind: str, theta: float, yarn: Any) -> None:
  units = unit_vectors(shared)
  freqs = np.array(frequencies(64, theta, yarn), np.float32)
  for i, pos in enumerate(units["rope.positions"].tolist()):
    for ops, bound in ((cpu, 1e-6), (twin, 3e-6)):
      got = run(ops, "rope_table", freqs, start(pos), 1)[0][0]
      assert np.abs(got[:, 0] - units[f"rope.{kind}.cos"][i]).max() <= bound, pos
      assert np.abs(got[:, 1] - units[f"rope.{kind}.sin"][i]).max() <= bound, pos

def unit_vectors(shared: Path) -> dict[str, Array]:
  """The unit vectors that numpy can hold: safetensors' own loader stops at float8."""
  blob = (shared / "golden" / "units" / "units.safetensors").read_bytes()
  base = 8 + int.from_bytes(blob[:8], "little")
  kinds = {"F32": np.float32, "I32": np.int32}
  return {n: np.frombuffer(blob[base + e["data_offsets"][0]:base + e["data_offsets"][1]], kinds[e["dtype"]]).reshape(e["shape"])
          for n, e in json.loads(blob[8:base]).items() if n != "__metadata__" and e["dtype"] in kinds}

@pytest.mark.parametrize("theta, yarn", [(10000, None), (160000, (16, 65536, 32, 1)), (160000, (16, 64, 32, 1)), (160000, (8, 512, 32, 1))])
def test_frequencies(theta: float, yarn: Any) -> None:
  keys = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
  want = oracle.frequencies(64, theta, dict(zip(keys, yarn)) if yarn else None)
  assert (np.array(frequencies(64, theta, yarn), np.float32) == want).all()
  if yarn == (16, 65536, 32, 1):                           # values from the description of the real model
    known = {0: 1, 1: 0.68765604, 15: 3.6355385e-3, 16: 2.2656249e-3, 20: 2.9697779e-4, 25: 5.3723124e-6, 31: 5.6805294e-7}
    for i, f in known.items(): assert math.isclose(frequencies(64, theta, yarn)[i], f, rel_tol=1e-7)

@pytest.mark.parametrize("H, D, r, eps", [(3, 12, 4, 1e-6), (4, 40, 40, 1e-6), (2, 33, 8, None), (8, 128, 64, None)])
def test_head_rope(H: int, D: int, r: int, eps: float | None) -> None:
  q, freqs, p = normal(1, 33, H * D), normal(3, r // 2), 1000 + np.arange(33)
  rope = oracle.rope_table(p, freqs)
  heads = q.reshape(33, H, D).astype(float)
  want = oracle.rotate(heads if eps is None else oracle.rms(heads, eps), oracle.turns(p, freqs))
  check("head_rope", lambda T: (q[:T], rope[:T], H, eps), [want], rows=PLAIN if H == 3 else SOME)

# ------------------------------------------------------------------------------------------------ hyper-connections
def hyper(S: int, D: int) -> tuple[Array, ...]:
  M = 2 * S + S * S
  return normal(1, 33, S, D), normal(2, M, S * D, scale=2 / math.sqrt(S * D)), normal(3, 3), normal(4, M), normal(5, D)

@pytest.mark.parametrize("S, D, iters", [(4, 7, 20), (4, 64, 20), (4, 24, 1), (3, 33, 2)])
def test_hc_pre(S: int, D: int, iters: int) -> None:
  h, fn, scale, base, norm = hyper(S, D)
  want = oracle.hc_pre(*(a.astype(float) for a in (h, fn, scale, base, norm)), iters, 1e-6, 1e-6)
  check("hc_pre", lambda T: (h[:T], fn, scale, base, norm, iters, 1e-6, 1e-6), want, 3e-6, rows=PLAIN if D == 7 else SOME)

def test_hc_pre_with_extreme_mixes() -> None:
  """A row of comb near a permutation, one far from any, and gates at both ends."""
  S, D = 4, 8
  h, fn, _, _, norm = hyper(S, D)
  base = np.array([-80, 80, 0, 1, -80, 80, 0, 1, *(60 * np.eye(4) - 30).ravel()], np.float32)
  scale = np.array([5, 5, 9], np.float32)
  want = oracle.hc_pre(*(a.astype(float) for a in (h, fn, scale, base, norm)), 20, 1e-6, 1e-6)
  check("hc_pre", lambda T: (h[:T], fn, scale, base, norm, 20, 1e-6, 1e-6), want, 2e-5, rows=(33,))

def test_hc_eps_shows() -> None:
  """With 1e-3 a missing or a doubled eps is no rounding error."""
  h, fn, scale, base, norm = hyper(4, 8)
  for iters in (1, 2):
    want = oracle.hc_pre(*(a.astype(float) for a in (h, fn, scale, base, norm)), iters, 1e-3, 1e-2)
    check("hc_pre", lambda T, n=iters: (h[:T], fn, scale, base, norm, n, 1e-3, 1e-2), want, 3e-6, rows=(33,))

@BOTH
def test_sinkhorn_units(shared: Path, ops: Any) -> None:
  """The official split of 24 mixes. The mixes are handed in as fn times a one-hot row of mean square 1; eps=3 halves
  every mix and lets `pre` be read off the norm behind it, one stream at a time."""
  u, S, D, eps = unit_vectors(shared), 4, 16, 3.0
  mixes = u["sinkhorn.mixes"]
  n = len(mixes)
  for s in range(S):
    h = np.zeros((n, S, D), np.float32)
    h[np.arange(n), s, np.arange(n)] = 8                     # sqrt(S * D)
    fn = np.zeros((24, S, D), np.float32)
    fn[:, s, :n] = mixes.T * 2 / 8
    plain = np.ones(D, np.float32)
    x, post, comb = run(ops, "hc_pre", h, fn.reshape(24, -1), u["sinkhorn.scale"], u["sinkhorn.base"], plain, 20, 1e-6, eps)
    got = x[np.arange(n), np.arange(n)].astype(float)
    y = got * np.sqrt(eps / (1 - got * got / D))
    assert np.abs(y / 8 - u["sinkhorn.pre"][:, s]).max() <= 2e-6
    assert np.abs(post - u["sinkhorn.post"]).max() <= 2e-6
    assert np.abs(comb - u["sinkhorn.comb"]).max() <= 5e-6

def test_sinkhorn_check_vector() -> None:
  """The worked example of the description, against the oracle that all others are compared with."""
  i = np.arange(24)
  pre, post, comb = oracle.split(2 * np.sin(i)[None], np.array([0.5, 1, 2]), np.cos(i), 4, 20, 1e-6)
  assert np.abs(pre - [[0.731060, 0.799277, 0.620849, 0.299670]]).max() <= 1e-6
  assert np.abs(post - [[0.205461, 0.326515, 1.198019, 1.775483]]).max() <= 1e-6
  assert np.abs(comb - [[[0.707301, 0.263278, 0.016849, 0.002407], [0.000184, 0.072438, 0.894616, 0.035577],
                         [0.002854, 0.003077, 0.049570, 0.961183], [0.289660, 0.661206, 0.038964, 0.000833]]]).max() <= 1e-6

@pytest.mark.parametrize("S, D", [(4, 7), (3, 33)])
def test_hc_post(S: int, D: int) -> None:
  z, h, post, comb = normal(1, 33, D), normal(2, 33, S, D), normal(3, 33, S), normal(4, 33, S, S)
  want = oracle.hc_post(*(a.astype(float) for a in (z, h, post, comb)))
  check("hc_post", lambda T: (z[:T], h[:T], post[:T], comb[:T]), [want], rows=PLAIN if D == 7 else SOME)

@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_hc_post_adds_up_shares(ranks: int) -> None:
  z, h, post, comb = [normal(5 + r, 33, 12) for r in range(ranks)], normal(2, 33, 4, 12), normal(3, 33, 4), normal(4, 33, 4, 4)
  want = oracle.hc_post(*(a.astype(float) for a in (sum(z), h, post, comb)))
  check("hc_post", lambda T: (tuple(a[:T] for a in z), h[:T], post[:T], comb[:T]), [want], rows=SOME)

@pytest.mark.parametrize("S, D", [(4, 7), (3, 40)])
def test_hc_head(S: int, D: int) -> None:
  h, fn, scale, base, norm = normal(1, 33, S, D), normal(2, S, S * D), normal(3, 1), normal(4, S), normal(5, D)
  want = oracle.hc_head(*(a.astype(float) for a in (h, fn, scale, base, norm)), 1e-3, 1e-6)
  check("hc_head", lambda T: (h[:T], fn, scale, base, norm, 1e-3, 1e-6), want, 1e-5, rows=PLAIN if D == 7 else SOME)

# ------------------------------------------------------------------------------------------------ window ring
@BOTH
def test_kv_write(ops: Any) -> None:
  """Rows go to slot p mod n, the others keep their bits."""
  n, D, r = 11, 10, 4
  for T, pos in ((1, 0), (1, 10), (1, 11), (5, 8), (5, 6), (11, 3), (5, 1_000_003)):
    kv, norm, freqs, ring = normal(T, T, D), normal(2, D), normal(3, r // 2), normal(4, n, D)
    ring[2] = np.nan
    p = pos + np.arange(T)
    want = ring.copy()
    want[p % n] = oracle.rotate(oracle.rms(kv.astype(float), 1e-6) * norm, oracle.turns(p, freqs))
    got = run(ops, "kv_write", ring[None], kv, norm, oracle.rope_table(p, freqs), start(pos), 1e-6)[0][0]
    kept = np.setdiff1d(np.arange(n), p % n)
    assert got[kept].tobytes() == ring[kept].tobytes()
    close(got[p % n], want[p % n], 2e-6)

# ------------------------------------------------------------------------------------------------ compressor
class Stream:
  """A compressor fed in chunks, as the model feeds it: ring and entries start as NaN and are written in place."""
  def __init__(self, ops: Any, ratio: int, overlap: bool, d: int, n: int, most: int):
    self.ops, self.ratio, self.d = ops, ratio, d
    w = d * (1 + overlap)
    self.proj, self.ape, self.norm, self.freqs = normal(1, n, 2 * w, scale=2), normal(2, ratio, w), normal(3, d), normal(4, 2)
    blocks = -(-((1 + overlap) * ratio + most) // ratio)
    self.ring, self.entries = (tensor(np.zeros(s, np.float32)) for s in ((1, blocks * ratio, 2 * w), (1, (n + most) // ratio + 2, d)))
    self.weights = [tensor(a) for a in (self.ape, self.norm)]
    self.graphs = Captured()
    self.reset()

  def reset(self) -> None:
    for t in (self.ring, self.entries): put(t, np.full(t.shape, np.nan, np.float32))
    w = self.ape.shape[1]
    self.want = oracle.compress(*(a.astype(float) for a in (self.proj[:, :w], self.proj[:, w:], self.ape, self.norm)), self.freqs, 1e-6)

  def feed(self, rows: Array, pos: int) -> None:
    at = (pos // self.ratio + np.arange(-(-len(rows) // self.ratio))) * self.ratio
    values = rows, oracle.rope_table(at, self.freqs), start(pos)
    build = lambda rows, rope, pos: self.ops.compress(self.ring, self.entries, rows, *self.weights, rope, pos, 1e-6)
    self.graphs(len(rows), lambda: list(map(tensor, values)), build, values)

  def all(self, sizes: Sequence[int], seed: int = 0) -> None:
    """Everything, in random chunks of these sizes and single rows for the rest, checked after each one."""
    rng, p, n = np.random.default_rng(seed), 0, len(self.proj)
    self.reset()
    while p < n:
      T = int(rng.choice(sizes))
      if p + T > n: T = 1
      self.feed(self.proj[p:p + T], p)
      p += T
      self.check(p)

  def check(self, n: int) -> None:
    if done := n // self.ratio: close(self.entries.numpy()[0, :done], self.want[:done], 3e-6)

@BOTH
@pytest.mark.parametrize("ratio, overlap, d, n", [(4, True, 6, 70), (2, False, 33, 40), (16, False, 8, 100), (128, False, 5, 300)])
def test_compress(ops: Any, ratio: int, overlap: bool, d: int, n: int) -> None:
  """In any chunks, then with one row that counts and five of junk at every position."""
  sizes = [1, 6, *([9] if ratio == 4 else [])] if ops is twin else [1, 2, 3, 6, ratio, ratio + 1, 2 * ratio + 3]
  s = Stream(ops, ratio, overlap, d, n, max(sizes))
  for some in ([1], [6], sizes[-1:], [1, 6], sizes, sizes): s.all(some, seed=len(some))
  s.reset()
  for p in range(n):
    junk = normal(p, 5, s.proj.shape[1], scale=9)
    if p % 3 == 0: junk[1:] = np.nan
    s.feed(np.concatenate([s.proj[p:p + 1], junk]), p)
    s.check(p + 1)

@pytest.mark.parametrize("ratio, overlap", [(4, True), (16, False)])
def test_compress_gives_the_same_bits_in_any_chunks(ratio: int, overlap: bool) -> None:
  s, made = Stream(cpu, ratio, overlap, 8, 66, 33), []
  for size in (1, 5, 33):
    s.all([size])
    made.append(s.entries.numpy()[0, :66 // ratio].tobytes())
  assert made[0] == made[1] == made[2]

@BOTH
def test_compress_with_extreme_gates(ops: Any) -> None:
  """One gate towers above the rest: its row is the entry. Where all are far below zero, nothing underflows."""
  s = Stream(ops, 4, True, 6, 12, 6)
  s.ape = np.round(s.ape * 64) / 64                        # so that float32 holds gate + ape exactly
  s.weights[0] = tensor(s.ape)
  s.proj[:, 12:] = -4096
  s.proj[[1, 5, 6], 12:] = 4096
  s.reset()
  for p in (0, 6): s.feed(s.proj[p:p + 6], p)
  s.check(12)

# ------------------------------------------------------------------------------------------------ indexer
@pytest.mark.parametrize("H, D, ratio, k, n", [
  (8, 16, 4, 4, 40), (3, 13, 4, 7, 40), (2, 8, 16, 1, 12), (8, 16, 4, 64, 40), (1, 33, 2, 16, 90)])
def test_index_topk(H: int, D: int, ratio: int, k: int, n: int) -> None:
  q, weight = normal(1, 33, H, D), normal(3, 33, H)
  for pos in (0, ratio - 1, ratio * k - 1, ratio * n - 33):
    if pos < 0 or (pos + 33) // ratio > n: continue
    p = pos + np.arange(33)
    known = max((pos + 33) // ratio, 1)
    keys = np.full((n + 3, D), np.nan, np.float32)           # what no row may see yet is NaN
    keys[:known] = normal(2, known, D)
    want = np.zeros((33, n), bool)
    want[:, :known] = oracle.index_topk(q.astype(float), keys[:known].astype(float), weight, p, k, ratio)[:, :n]
    assert (want.sum(1) == np.minimum(k, (p + 1) // ratio)).all()
    args = lambda T, pos=pos, keys=keys: (q[:T], keys[None], weight[:T], start(pos), n, k, ratio)
    check("index_topk", args, [want], rows=ROWS if H == 8 and k == 4 else SOME)

def test_index_topk_takes_the_lower_index_of_equals() -> None:
  """Small integers: every score is exact, most of them are equal, many are zero; weights make some negative."""
  rng = np.random.default_rng(1)
  H, D, ratio, n, pos = 4, 16, 4, 50, 150
  q, keys, weight = (rng.integers(-1, 2, s).astype(np.float32) for s in ((33, H, D), (n, D), (33, H)))
  keys[10:20] = keys[0]
  weight[5], q[6] = 0, 0                                     # all equal, and minus zero among them
  p = pos + np.arange(33)
  for k in (1, 4, 16, 37):
    want = oracle.index_topk(q, keys, weight, p, k, ratio)
    assert (np.flatnonzero(want[5]) == np.arange(min(k, (p[5] + 1) // ratio))).all()
    check("index_topk", lambda T, k=k: (q[:T], keys[None], weight[:T], start(pos), n, k, ratio), [want], rows=(5, 33))

@BOTH
def test_index_topk_with_huge_scores(ops: Any) -> None:
  q, keys, weight = normal(1, 5, 2, 8, scale=1e9), normal(2, 30, 8, scale=1e9), normal(3, 5, 2, scale=1e9)
  p = 100 + np.arange(5)
  want = oracle.index_topk(q.astype(float), keys.astype(float), weight.astype(float), p, 6, 4)
  close(run(ops, "index_topk", q, keys[None], weight, start(100), 30, 6, 4)[0], want, 0)

# ------------------------------------------------------------------------------------------------ attention
def attention(pos: int, T: int, H: int, d: int, ring: int, window: int, ratio: int, n: int, choose: bool, scale: float = 1.0
              ) -> tuple[tuple[Any, ...], Array]:
  """Arguments and what the oracle gives. Ring slots outside every row's window and entries that are unfinished are NaN."""
  p = pos + np.arange(T)
  q, kv, sink, freqs = normal(1, 40, H, d, scale=scale)[:T], normal(2, pos + T, d), normal(3, H, scale=3), normal(4, 2)
  known = min((pos + T) // ratio, n) if n else 0
  entries = np.full((n + 2, d), np.nan, np.float32)
  entries[:known] = normal(5, 5000, d)[:known]
  seen = oracle.finished(p, ratio, n)
  if choose: seen &= np.random.default_rng(6).random((40, n))[:T] < 0.5
  held = np.full((ring, d), np.nan, np.float32)
  first = max(pos - window + 1, 0)
  held[np.arange(first, pos + T) % ring] = kv[first:]
  q64, kv64, entries64, sink64 = (a.astype(float) for a in (q, kv, np.nan_to_num(entries[:n]), sink))
  want = oracle.attend(q64, kv64, entries64, seen, sink64, freqs, p, window)
  args = (q, held[None], entries[None] if n else None, seen if choose else None, sink, oracle.rope_table(p, freqs), start(pos), window, n,
          ratio)
  return args, want

BORDERS = (0, 1, 2, 6, 7, 8, 9, 39, 40, 41, 46, 47, 48, 95, 996)

@pytest.mark.parametrize("H, d, n, ratio, choose", [
  (3, 12, 0, 1, False), (2, 40, 60, 4, True), (2, 33, 60, 16, False), (1, 4, 2, 16, False)])
def test_attend_at_every_border(H: int, d: int, n: int, ratio: int, choose: bool) -> None:
  """Around the window of 8, blocks and the end of the ring of 48, for one row and for as many as the ring has room for."""
  for T, ops in ((1, cpu), (33, cpu), (5, twin)):
    for pos in BORDERS:
      if n and (pos + T) // ratio > n and choose: continue
      args, want = attention(pos, T, H, d, 48, 8, ratio, n, choose)
      close(run(ops, "attend", *args)[0], want, 3e-6)

@pytest.mark.parametrize("n, choose", [(0, False), (20, False), (20, True)])
def test_attend_rows_are_independent(n: int, choose: bool) -> None:
  for pos in (0, 30, 43):
    args, want = attention(pos, 33, 3, 12, 48, 8, 4, n, choose)
    cut = lambda T, args=args: tuple(a[:T] if i in (0, 5) or (i == 3 and a is not None) else a for i, a in enumerate(args))
    check("attend", cut, [want], 3e-6, rows=ROWS if n == 0 or choose else SOME)

@BOTH
def test_attend_over_many_rows(ops: Any) -> None:
  """One to 300 rows, which kernels take in blocks: a later block may hold the maximum, or nothing that counts."""
  for pos in (0, 59, 60, 61, 63, 64, 127, 200, 795):
    args, want = attention(pos, 5, 2, 12, 140, 100, 4, 200, False, 4.0)
    close(run(ops, "attend", *args)[0], want, 5e-6)

@BOTH
@pytest.mark.parametrize("scale", [0.0, 1e-4, 300.0])
def test_attend_with_flat_and_sharp_scores(ops: Any, scale: float) -> None:
  args, want = attention(70, 5, 3, 12, 48, 8, 4, 20, False, scale)
  close(run(ops, "attend", *args)[0], want, 3e-5 if scale > 1 else 3e-6)

@BOTH
@pytest.mark.parametrize("sink", [-math.inf, -200.0, 80.0, 1e4])
def test_attend_sink(ops: Any, sink: float) -> None:
  """-inf: no sink at all. A huge one takes everything, and nothing overflows into NaN."""
  args, _ = attention(20, 3, 2, 8, 48, 8, 4, 5, False)
  args = (*args[:4], np.full(2, sink, np.float32), *args[5:])
  q, held, entries, _, s, rope, pos, window, n, ratio = args
  got = run(ops, "attend", *args)[0]
  kv = normal(2, 23, 8).astype(float)
  p = 20 + np.arange(3)
  q64, entries64, s64 = (a.astype(float) for a in (q, entries[0, :5], s))
  want = oracle.attend(q64, kv, entries64, oracle.finished(p, 4, 5), s64, normal(4, 2), p, window)
  if sink < 1000: close(got, want, 3e-6)
  else: assert np.abs(got).max() <= 1e-30

def uniform(ops: Any, T: int, pos: int, window: int, n: int, ratio: int) -> list[tuple[set[int], set[int]]]:
  """Which window positions and which entries each row sees: with equal scores and one-hot rows the output says so."""
  ring, width = 64, 128
  held, entries = np.zeros((ring, width), np.float32), np.zeros((n + 1, width), np.float32)
  for p in range(pos + T): held[p % ring, p] = 1
  for j in range(n): entries[j, 64 + j] = 1
  rope = oracle.rope_table(np.zeros(T), np.zeros(1, np.float32))
  out = run(ops, "attend", np.zeros((T, 1, width), np.float32), held[None], entries[None] if n else None, None,
            np.full(1, -np.inf, np.float32), rope, start(pos), window, n, ratio)[0][:, 0]
  return [(set(np.flatnonzero(o[:64]).tolist()), set(np.flatnonzero(o[64:]).tolist())) for o in out]

@BOTH
def test_visible_rows_are_the_official_ones(shared: Path, ops: Any) -> None:
  """units hold DeepSeek's own index lists: positions of the window, entries behind an offset, -1 for none."""
  u, rows = unit_vectors(shared), lambda a, o=0: [set((r[r >= 0] - o).tolist()) for r in a]
  for n in (5, 13): assert [w for w, _ in uniform(ops, 13, 0, 8, 0, 1)][:n] == rows(u[f"window_idx.w8.s{n}.p0"])
  for p in (3, 7, 21):                                      # one row of a ring of 8, where slot p mod 8 holds p
    assert [{q % 8 for q in w} for w, _ in uniform(ops, 1, p, 8, 0, 1)] == rows(u[f"window_idx.w8.s1.p{p}"])
  assert [e for _, e in uniform(ops, 13, 0, 8, 3, 4)] == rows(u["compress_idx.r4.s13.p0.o13"], 13)
  assert [e for _, e in uniform(ops, 40, 0, 8, 2, 16)] == rows(u["compress_idx.r16.s40.p0.o40"], 40)
  assert [e for _, e in uniform(ops, 1, 13, 8, 3, 4)] == rows(u["compress_idx.r4.s1.p13.o8"], 8)

# ------------------------------------------------------------------------------------------------ router and experts
@pytest.mark.parametrize("E, k", [(3, 2), (37, 6), (5, 5), (4, 1)])
def test_route(E: int, k: int) -> None:
  z, bias = normal(1, 33, E, scale=4), normal(2, E)
  want = oracle.route(z, bias.astype(float), None, ints(0), k, 1.5)
  check("route", lambda T: (z[:T], bias, None, np.zeros(T, np.int32), k, 1.5), want, rows=PLAIN if E == 37 else SOME)

def test_route_by_token() -> None:
  rng = np.random.default_rng(1)
  z, table = normal(1, 33, 9, scale=4), np.stack([rng.permutation(9)[:3] for _ in range(20)]).astype(np.int32)
  tokens = rng.integers(0, 20, 33).astype(np.int32)
  check("route", lambda T: (z[:T], None, table, tokens[:T], 3, 2.5), oracle.route(z, None, table, tokens, 3, 2.5), rows=SOME)

@BOTH
def test_route_takes_the_lower_id_of_equals(ops: Any) -> None:
  z = np.array([[0, 0, 0, 0, 0, 0], [1, 2, 2, 1, 2, 1], [3, 1, 1, 1, 1, 0], [0, 1, 0, 1, 0, 1]], np.float32)
  ids, weights = run(ops, "route", z, np.zeros(6, np.float32), None, np.zeros(4, np.int32), 4, 1.0)
  assert ids.tolist() == [[0, 1, 2, 3], [1, 2, 4, 0], [0, 1, 2, 3], [1, 3, 5, 0]]
  assert np.abs(weights.sum(1) - 1).max() <= 1e-6
  shifted = run(ops, "route", z, np.array([0, 0, 9, 0, 0, 9], np.float32), None, np.zeros(4, np.int32), 2, 1.0)
  assert set(map(frozenset, shifted[0].tolist())) == {frozenset({2, 5})}

@BOTH
def test_route_scores_over_the_whole_range(ops: Any) -> None:
  """sqrt(softplus(z)) from -50 to 50: relative precision also where e^z is tiny. Read off weights against one expert at 0."""
  z = np.stack([np.linspace(-50, 50, 401), np.zeros(401)], 1).astype(np.float32)
  ids, weights = run(ops, "route", z, np.array([1e3, 0], np.float32), None, np.zeros(401, np.int32), 2, 1.0)
  assert (ids == [0, 1]).all()
  got, score = weights[:, 0].astype(float) / weights[:, 1], np.sqrt(np.logaddexp(0, z.astype(float)))
  assert np.abs(got / (score[:, 0] / score[:, 1]) - 1).max() <= (3e-6 if ops is twin else 3e-7)

@BOTH
def test_route_with_very_large_logits(ops: Any) -> None:
  z = np.array([[1e4, 1e6, -1e4, 3e38], [-80, -81, -82, -83]], np.float32)
  ids, weights = run(ops, "route", z, np.zeros(4, np.float32), None, np.zeros(2, np.int32), 2, 1.5)
  want = oracle.route(z, np.zeros(4), None, ints(0), 2, 1.5)
  assert (ids == want[0]).all()
  close(weights, want[1], 1e-5)

def expert_weights(D: int, inner: int, J: int, E: int) -> dict[str, Array]:
  shapes = {"w1": (E, inner, D), "w3": (E, inner, D), "w2": (E, D, inner), "s1": (J, D), "s3": (J, D), "s2": (D, J)}
  return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}

@pytest.mark.parametrize("D, inner, J, E, k, limit", [(16, 8, 8, 3, 2, 10.0), (13, 7, 5, 4, 3, 0.7), (40, 33, 12, 5, 1, 0.7)])
def test_experts(D: int, inner: int, J: int, E: int, k: int, limit: float) -> None:
  w, x, rng = expert_weights(D, inner, J, E), normal(9, 33, D), np.random.default_rng(8)
  ids = np.stack([rng.permutation(E)[:k] for _ in range(33)]).astype(np.int32)
  ids[20:] = ids[20]                                         # a crowd at one expert: no capacity, nothing dropped
  weights = np.abs(normal(10, 33, k)) + 0.1
  w64 = [w[n].astype(float) for n in ("w1", "w3", "w2", "s1", "s3", "s2")]
  want = oracle.experts(x.astype(float), *w64, ids, weights.astype(float), limit)
  w13, s13 = np.concatenate([w["w1"], w["w3"]], 1), np.concatenate([w["s1"], w["s3"]])
  check("experts", lambda T: (x[:T], w13, w["w2"], s13, w["s2"], ids[:T], weights[:T], limit), [want], 5e-6,
        rows=ROWS if D == 13 else SOME)

@BOTH
def test_expert_clamps(ops: Any) -> None:
  """Gates of -50..50 against a limit of 2: only above for the gate, on both sides for the other half."""
  D, limit = 4, 2.0
  eye, zero = np.eye(D, dtype=np.float32), np.zeros((D, D), np.float32)
  x = np.array([[-50, -3, 3, 50]], np.float32)
  act = lambda g: g / (1 + np.exp(-g))
  gate, up = np.minimum(x.astype(float), limit), x.clip(-limit, limit).astype(float)
  both = lambda a: np.concatenate([a, a])
  def ffn(a: Array, b: Array, weight: float) -> tuple[Array, ...]:
    """Routed expert made of a, shared one of b."""
    return run(ops, "experts", x, both(a)[None], a[None], both(b), b, ints(0)[None], np.full((1, 1), weight, np.float32), limit)
  shared, routed = ffn(zero, eye, 1), ffn(eye, zero, 3)
  close(shared[0], act(gate) * up, 1e-6)
  close(routed[0], 3 * act(gate) * up, 1e-6)

# ------------------------------------------------------------------------------------------------ choice of a token
@BOTH
def test_argmax(ops: Any) -> None:
  x = normal(1, 12, 37)
  x[0, [3, 9]] = x[1, [0, 36]] = 50                          # of equals the lowest
  x[2] = -7
  x[3, 36] = 99
  x[4, :] = -np.inf
  x[5, 4] = np.nan
  x[6, 4] = np.inf
  x[7, :36] = -np.inf
  x[8] = -3e38
  x[9, 0], x[9, 1] = np.nan, np.inf
  x[10] = np.nan
  got = run(ops, "argmax", x)[0]
  assert got.tolist() == [3, 0, 0, 36, -1, -1, -1, 36, 0, -1, -1, int(x[11].argmax())]

FILTERS = [(1.0, 1.0, 0, 0.0), (0.7, 1.0, 0, 0.0), (1.5, 0.9, 0, 0.0), (1.0, 0.5, 0, 0.0), (1.0, 1e-6, 0, 0.0), (1.0, 1.0, 1, 0.0),
           (1.0, 1.0, 3, 0.0), (1.0, 1.0, 9, 0.0), (1.0, 1.0, 1000, 0.0), (1.0, 1.0, 0, 0.2), (1.0, 1.0, 0, 1.0), (2.0, 0.8, 5, 0.1),
           (100.0, 1.0, 0, 0.0), (1e-3, 1.0, 0, 0.0), (0.5, 0.95, 4, 0.05)]
LOGITS = np.array([2.0, -1.0, 0.5, 2.0, 1.0, -np.inf, 1.0, 0.0, -30.0], np.float32) # equals at the top and at most cuts

def settings(temperature: float, top_p: float, top_k: int, min_p: float) -> Array:
  return np.array([[temperature, top_p, top_k, min_p]], np.float32)

@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_probs_is_the_filtered_softmax(filters: tuple[float, float, int, float]) -> None:
  rows = np.concatenate([LOGITS[None], normal(1, 32, len(LOGITS), scale=3)])
  rows[5] = 1.5
  rows[6, 3:] = -np.inf
  rows[7] *= 1e4
  want = np.stack([oracle.filtered_softmax(r, *filters) for r in rows])
  for ops in (cpu, twin):
    got = run(ops, "probs", rows, settings(*filters))[0]
    assert ((got > 0) == (want > 0))[want > 1e-30].all() and (got[want == 0] == 0).all()
    close(got, want, 3e-6 if filters[0] > 0.01 else 3e-4)

def test_probs_of_many() -> None:
  x = normal(1, 33, 203, scale=3)
  want = np.stack([oracle.filtered_softmax(r, 0.8, 0.9, 20, 0.01) for r in x])
  check("probs", lambda T: (x[:T], settings(0.8, 0.9, 20, 0.01)), [want], rows=(1, 5, 33))

@BOTH
def test_probs_cuts(ops: Any) -> None:
  """The edge values: which tokens are left in."""
  flat, steps = np.zeros(4, np.float32), np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
  def left(x: Array, *filters: Any) -> set[int]:
    rows = np.full((33, 9), -np.inf, np.float32)
    rows[:, :4] = x
    return set(np.flatnonzero(run(ops, "probs", rows, settings(*filters))[0][7]).tolist())
  for f in ((1, 1, 0, 0), (1, 0.5, 0, 0), (1, 1, 1, 0), (1, 1, 0, 1)): assert left(flat, *f) == {0, 1, 2, 3}  # equals stay
  assert left(steps, 1, 1, 1, 0) == left(steps, 1, 0.4, 0, 0) == left(steps, 1, 1, 0, 0.6) == left(steps, 1, 1, 0, 1) == {0}
  assert left(steps, 1, 0.6, 0, 0) == left(steps, 1, 1, 2, 0) == left(steps, 1, 1, 0, 0.4) == {0, 1}
  assert left(steps, 1, 0.8, 0, 0) == left(steps, 1, 1, 3, 0) == left(steps, 1, 1, 4, 0) == left(steps, 1, 1, 5, 0) == {0, 1, 2, 3}
  assert left(steps, 1, 0.7, 2, 0) == {0, 1} and left(steps, 1, 0.6, 2, 0) == {0}  # 0.5 is two thirds of what top_k leaves
  assert left(steps, 4, 0.6, 0, 0) == {0, 1, 2, 3} and left(steps, 0.25, 0.6, 0, 0) == {0}  # temperature comes first

@BOTH
def test_sick_rows_give_no_token(ops: Any) -> None:
  x = normal(1, 33, 9)
  x[0, 3], x[1, 8], x[2], x[3, 1:] = np.nan, np.inf, -np.inf, -np.inf
  x[4] = -3e38
  law = run(ops, "probs", x, settings(1, 0.9, 5, 0.01))[0]
  assert np.isnan(law[:3]).all() and np.isfinite(law[3:]).all()
  got = run(ops, "pick", law, ints(1, 2)[None], start(0))[0]
  assert got[:4].tolist() == [-1, -1, -1, 0] and (got[4:] >= 0).all()
  assert (run(ops, "pick", np.zeros((33, 9), np.float32), ints(1, 2)[None], start(0))[0] == -1).all()

def drawn(ops: Any, rows: Array, filters: Any, seed: Array, pos: int) -> Array:
  return run(ops, "pick", run(ops, "probs", rows, settings(*filters))[0], seed[None], start(pos))[0]

@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_filtered_softmax(filters: tuple[float, float, int, float]) -> None:
  """20,480 draws with fixed seeds: nothing outside the filters, and a chi-square that chance exceeds once in 10^5."""
  law = oracle.filtered_softmax(LOGITS, *filters)
  rows, counts = np.repeat(LOGITS[None], 512, 0), np.zeros(len(LOGITS))
  for i in range(40): counts += np.bincount(drawn(cpu, rows, filters, ints(i, -i), 1000 * i), minlength=len(LOGITS))
  expected = law * counts.sum()
  assert counts.sum() == 20480 and (counts[law == 0] == 0).all()
  often = expected > 5
  chi = ((counts - expected)[often] ** 2 / expected[often]).sum()
  assert chi <= [1e-9, 19.5, 23.0, 25.9, 28.5, 30.9, 33.1, 35.3][int(often.sum()) - 1]
  assert counts[~often].sum() <= expected[~often].sum() + 10

@pytest.mark.parametrize("use, offset", [(0, 0), (1, 3), (2, 0)])
def test_pick_gives_the_same_token_in_both(use: int, offset: int) -> None:
  law = run(cpu, "probs", normal(1, 64, 203, scale=2), settings(1, 0.99, 0, 0))[0]
  for seed, pos in (((0, 0), 0), ((-1, 2 ** 31 - 1), 5), ((12345, -7), 1_000_000)):
    got = [run(ops, "pick", law, ints(*seed)[None], start(pos), use, offset)[0] for ops in (cpu, twin)]
    assert (got[0] == got[1]).all() and len(set(got[0].tolist())) > 20

@BOTH
def test_pick_depends_on_seed_position_and_use_only(ops: Any) -> None:
  """Row t at position p draws what row 0 draws at p+t; another seed or use draws otherwise."""
  rows = np.repeat(np.exp(normal(1, 1, 50)), 8, 0)
  draw = lambda x, seed, pos, *use: run(ops, "pick", x, ints(*seed)[None], start(pos), *use)[0].tolist()
  eight = draw(rows, (3, 4), 100)
  assert draw(rows, (3, 4), 100) == draw(rows * 7, (3, 4), 100) == eight and len(set(eight)) > 2
  assert [draw(rows, (3, 4), 100 + t)[0] for t in range(8)] == draw(rows, (3, 4), 97, 0, 3) == eight
  for seed in ((4, 4), (3, 5), (4, 3)): assert draw(rows, seed, 100) != eight
  assert draw(rows, (3, 4), 100, 1) != eight
  rows[1:] = np.exp(normal(2, 7, 50))
  assert draw(rows, (3, 4), 100)[0] == eight[0]

def test_uniforms() -> None:
  """Inside (0, 1), even, uncorrelated between uses and neighbouring seeds, and a function of the absolute position."""
  u = [run(twin, "uniforms", ints(s, 9)[None], start(0), 4096, use)[0][0].astype(float) for s, use in ((1, 0), (1, 1), (2, 0))]
  for x in u:
    assert x.min() > 0 and x.max() < 1
    assert np.abs(np.sort(x) - (np.arange(4096) + 0.5) / 4096).max() <= 0.035  # Kolmogorov-Smirnov, once in 10^4
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) <= 0.07
  for a, b in ((0, 1), (0, 2), (1, 2)): assert abs(np.corrcoef(u[a], u[b])[0, 1]) <= 0.07
  assert (run(twin, "uniforms", ints(1, 9)[None], start(100), 5, 0)[0] == u[0][100:105]).all()

# ------------------------------------------------------------------------------------------------ block draft
def test_markov() -> None:
  base, w1, w2 = normal(1, 3, 21), normal(2, 21, 9), normal(3, 21, 9)
  for ops in (cpu, twin):
    for row, token in ((0, 0), (2, 20), (1, 7)):
      close(run(ops, "markov", base, row, w1, w2, ints(token))[0], (base[row] + w2.astype(float) @ w1[token])[None], 2e-6)

def test_kv_rows() -> None:
  kv, norm, freqs, p = normal(1, 33, 10), normal(2, 10), normal(3, 2), 50 + np.arange(33)
  rope = oracle.rope_table(p, freqs)
  want = oracle.rotate(oracle.rms(kv.astype(float), 1e-6) * norm, oracle.turns(p, freqs))
  check("kv_rows", lambda T: (kv[:T], norm, rope[:T], 1e-6), [want], rows=(1, 5, 33))

@BOTH
@pytest.mark.parametrize("pos", [0, 1, 3, 8, 20, 21, 1000])
def test_attend_block(ops: Any, pos: int) -> None:
  """Window of 8 in a ring of 21; slots that are no position of the window are NaN."""
  q, before, block, sink, freqs = normal(1, 5, 2, 12), normal(2, 8, 12), normal(3, 5, 12), normal(4, 2), normal(5, 2)
  p, ring = np.arange(max(pos - 8, 0), pos), np.full((21, 12), np.nan, np.float32)
  ring[p % 21] = before[:len(p)]
  at = pos + np.arange(5)
  want = oracle.attend_block(q.astype(float), before[:len(p)].astype(float), block.astype(float), sink.astype(float), freqs, at)
  close(run(ops, "attend_block", q, ring[None], block, sink, oracle.rope_table(at, freqs), start(pos), 8)[0], want, 3e-6)

@BOTH
def test_attend_block_sees_what_the_official_draft_sees(shared: Path, ops: Any) -> None:
  """units hold DeepSeek's own index lists for a window of 8: slots of the ring, then the five of the block, -1 for none.
  Every position's row is the one-hot vector of its slot in a ring of 8, or of 8 + its place in the block."""
  u, eye = unit_vectors(shared), np.eye(16, dtype=np.float32)
  for p in (2, 7, 20):                                     # the last position that the target has processed
    ring = np.zeros((16, 16), np.float32)
    for i in range(p + 1): ring[i % 16] = eye[i % 8]
    out = run(ops, "attend_block", np.zeros((5, 1, 16), np.float32), ring[None], eye[8:13], np.full(1, -np.inf, np.float32),
              oracle.rope_table(np.zeros(5), np.zeros(1, np.float32)), start(p + 1), 8)[0][:, 0]
    want = u[f"dspark_idx.w8.p{p}"]
    first = want.max() - 4                                 # where the block begins in the official list
    assert [set(np.flatnonzero(o).tolist()) for o in out] == [{int(i if i < first else i - first + 8) for i in r if i >= 0} for r in want]

# ------------------------------------------------------------------------------------------------ several sequences at once
NAN_BYTE = 255                                             # NaN as e4m3, as half of a bfloat16 and as a scale
SLOTS = {1: (2,), 3: (3, 0, 1), 4: (1, 4, 0, 2)}           # of five
PLACES = (0, 37, 261, 6)                                   # where the sequences are
# what the arguments are: r rows, c a cache, a the places, n a number of rows, s the same for all
KINDS = {"rope_table": "sans", "kv_write": "crsras", "compress": "ccrssras", "index_topk": "rcrasss", "index_best": "rcrasssss",
         "attend": "rccrsrasss", "attend_block": "rcrsras", "probs": "rr", "uniforms": "rass", "pick": "rrass", "markov": "rsssr"}

def unwritten(*shape: int, dtype: Any) -> Array: return np.full(shape, NAN_BYTE if dtype == np.uint8 else np.nan, dtype)

def rows_of(a: Array, w4a8: bool, r: int) -> Array:
  """As a cache holds them; rows of NaN are NaN bytes."""
  if not w4a8: return a
  made = twin.encode_rows(Tensor(np.nan_to_num(a)), r).numpy().copy()
  made[np.isnan(a).any(1)] = NAN_BYTE
  return made

def keys_of(a: Array, w4a8: bool) -> Array:
  if not w4a8: return a
  codes, scale = formats.quantise_e2m1(Tensor(np.nan_to_num(a)))
  made = np.concatenate([codes.numpy(), scale.numpy()], 1)
  made[np.isnan(a).any(1)] = NAN_BYTE
  return made

class Sequences:
  """Four sequences that share nothing: each operation's arguments for one of them, in a cache of its own."""
  ring, window, ratio, n, wide = 48, 8, 4, 70, 33
  def __init__(self, rows: int, w4a8: bool, heads: int = 3, d: int = 72, r: int = 8):
    self.rows, self.w4a8, self.H, self.d, self.r = rows, w4a8, heads, d, r

  def args(self, name: str, b: int) -> tuple[Any, ...]:
    T, d, pos = self.rows, self.d, PLACES[b]
    p, seed = pos + np.arange(T), 100 * b
    half = lambda *shape: rounded(normal(seed + len(shape), *shape))
    freqs, turn = normal(4, self.r // 2), oracle.rope_table(p, normal(4, self.r // 2))
    held = np.full((self.ring, d), np.nan, np.float32)
    seen = np.arange(max(pos - self.window, 0), pos + T * (name == "attend"))
    held[seen % self.ring] = normal(seed + 7, 800, d)[seen]
    known = (pos + T) // self.ratio
    entries, keys = (np.full((self.n + 3, width), np.nan, np.float32) for width in (d, 32))
    entries[:known], keys[:known] = normal(seed + 8, known, d), normal(seed + 9, known, 32)
    ring, entries = (rows_of(a, self.w4a8, self.r)[None] for a in (held, entries))
    keys = keys_of(keys, self.w4a8)[None]
    chosen = oracle.finished(p, self.ratio, self.n) & (np.random.default_rng(seed).random((T, self.n)) < 0.5)
    sink, at = normal(3, self.H), start(pos)
    if name == "rope_table": return freqs, at, T, 3
    if name == "kv_write": return np.full_like(ring, NAN_BYTE if self.w4a8 else np.nan), half(T, d), normal(2, d), turn, at, 1e-6
    if name == "compress":
      before = np.full((1, 40, 4 * d), np.nan, np.float32)
      before[0, np.arange(max(pos - 8, 0), pos) % 40] = normal(seed, 8, 4 * d)[max(8 - pos, 0):]
      turns = oracle.rope_table((pos // 4 + np.arange(-(-T // 4))) * 4, freqs)
      weights = normal(2, 4, 2 * d), normal(3, d)
      return before, unwritten(*entries.shape, dtype=entries.dtype), normal(seed + 5, T, 4 * d), *weights, turns, at, 1e-6
    if name in ("index_topk", "index_best"):
      ranks = (1, 3) if name == "index_best" else ()
      return half(T, 4, 32), keys[:, ranks[0]::3] if ranks else keys, half(T, 4), at, self.n, 12, self.ratio, *ranks
    if name == "attend": return half(T, self.H, d), ring, entries, chosen, sink, turn, at, self.window, self.n, self.ratio
    if name == "attend_block": return half(T, self.H, d), ring, half(T, d), sink, turn, at, self.window
    logits, dice = normal(seed, T, self.wide, scale=2), ints(seed, -7 * b)[None]
    if name == "probs": return logits, settings(*[(0.7, 0.9, 0, 0), (0, 1, 0, 0), (2, 1, 5, 0), (1, 0.4, 0, 0.1)][b])
    if name == "uniforms": return dice, at, T, 1
    if name == "pick": return np.exp(logits), dice, at, 1, 2
    return normal(seed, 4, self.wide), 2, normal(1, self.wide, 9), normal(2, self.wide, 9), ints(b)  # markov

  def together(self, name: str, who: Sequence[int]) -> tuple[Any, ...]:
    alone, slots, made = [self.args(name, b) for b in who], SLOTS[len(who)], []
    for kind, *given in zip(KINDS[name], *alone):
      if kind == "r": made.append(np.concatenate(given))
      elif kind == "c":
        whole = unwritten(5, *given[0].shape[1:], dtype=given[0].dtype)
        for slot, a in zip(slots, given): whole[slot] = a[0]
        made.append(whole)
      elif kind == "a": made.append(np.stack([np.array([PLACES[b] for b in who], np.int32), np.array(slots, np.int32)]))
      else: made.append(given[0] * len(who) if kind == "n" else given[0])
    return tuple(made)

  def alone_or_together(self, call: Call, name: str, who: Sequence[int]) -> tuple[tuple[Any, ...], tuple[Array, ...]]:
    """-> arguments and results of a batch, whose rows have the bits that each sequence's have alone; slots of nobody keep theirs."""
    args, alone = self.together(name, who), [call(name, *self.args(name, b)) for b in who]
    got = call(name, *args)
    for i, mine in enumerate(got):
      if name in ("kv_write", "compress"):
        want = args[i].copy()
        for slot, made in zip(SLOTS[len(who)], alone): want[slot] = made[i][0]
      else: want = np.concatenate([made[i] for made in alone])
      assert mine.tobytes() == want.tobytes(), (who, i)
    return args, got

  def agree(self, name: str, who: Sequence[int], got: tuple[Array, ...], other: tuple[Array, ...]) -> None:
    """But for entries that are begun and not finished."""
    for i, (mine, theirs) in enumerate(zip(got, other, strict=True)):
      if name == "compress" and i:
        for b, slot in zip(who, SLOTS[len(who)]):
          n = (PLACES[b] + self.rows) // self.ratio
          theirs[slot, n:] = mine[slot, n:]
      near(mine, theirs, self.w4a8)

def rounded(a: Array) -> Array:
  """To bfloat16 and back."""
  return formats.bf16(Tensor(a)).numpy()

@pytest.mark.parametrize("name", KINDS)
def test_sequences_do_not_touch_each_other(name: str) -> None:
  for w4a8, T in ((False, 6), (False, 1), (True, 6)):
    if w4a8 and "w4a8" not in inspect.signature(getattr(twin, name)).parameters: continue
    s, more = Sequences(T, w4a8), {"w4a8": True} if w4a8 else {}
    for who in ((1,), (2, 0, 3), (0, 1, 2, 3)):
      args, got = s.alone_or_together(functools.partial(run, cpu, **more), name, who)
      if len(who) == 3 and T > 1: s.agree(name, who, got, run(twin, name, *args, **more))

def near(got: Array, want: Array, w4a8: bool) -> None:
  """A place or a row mistaken for another shows; which maximum a value was rounded against does not."""
  assert got.shape == want.shape and got.dtype == want.dtype
  if not got.size: return
  if got.dtype != np.float32: assert (got != want).mean() <= 0.06 * w4a8  # rows end in padding
  else:
    assert (np.isnan(got) == np.isnan(want)).all() and (np.isinf(got) == np.isinf(want)).all()
    got, want = (np.nan_to_num(a, posinf=0, neginf=0) for a in (got, want))
    assert np.abs(got - want).max() <= (0.03 if w4a8 else 1e-5) * max(np.abs(want).max(), 1)

def test_probs_at_temperature_zero() -> None:
  """The first of the largest, with certainty, whatever the filters; a row that can't be drawn from stays NaN."""
  x = normal(1, 8, 9)
  x[1, [4, 7]], x[2], x[3, 2], x[6, 0], x[7, 1:] = 9, -np.inf, np.nan, np.inf, -np.inf
  want = np.zeros((8, 9), np.float32)
  want[np.arange(8), x.argmax(1)] = 1
  want[[2, 3, 6]] = np.nan
  for ops in (cpu, twin):
    both = run(ops, "probs", np.concatenate([x, x]), np.array([[0, 0.3, 2, 0.5], [1, 1, 0, 0]], np.float32))[0]
    assert both[:8].tobytes() == want.tobytes() or (np.nan_to_num(both[:8], nan=7) == np.nan_to_num(want, nan=7)).all()
    assert ((both[8:] > 0).sum(1) == [9, 9, 0, 0, 9, 9, 0, 1]).all()

# ------------------------------------------------------------------------------------------------ entries spread over devices
def shared_out(entries: Array, ranks: int) -> list[Array]:
  """(S, C, row) -> of each rank (S, C / ranks, row)."""
  return [entries[:, r::ranks].copy() for r in range(ranks)]

@pytest.mark.parametrize("w4a8", [False, True], ids=["f32", "w4a8"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_compress_keeps_its_own_entries(ranks: int, w4a8: bool) -> None:
  """Each rank's rows are every ranks-th of what one device would write, and nothing else is written."""
  for T in (1, 13):
    s = Sequences(T, w4a8)
    args = s.together("compress", (2, 0, 3))
    ring, whole = run(cpu, "compress", *args, w4a8=w4a8)
    for rank in range(ranks):
      mine = (args[0], args[1][:, :-(-(s.n + 3) // ranks)], *args[2:])
      for ops in (cpu, twin):
        held, got = run(ops, "compress", *mine, rank=rank, ranks=ranks, w4a8=w4a8)
        near(held, ring, False)
        for b, slot in zip((2, 0, 3), SLOTS[3]):
          done = list(range(rank, (PLACES[b] + T) // 4, ranks))
          near(got[slot, :len(done)], whole[slot, done], w4a8)
          if ops is cpu: assert got[slot, len(done):].tobytes() == mine[1][slot, len(done):].tobytes()
          else: assert (got[slot, len(done) + 5:] == got[slot, -1]).all() or np.isnan(got[slot, len(done) + 5:]).all()
        assert got[2].tobytes() == mine[1][2].tobytes()

def indexed(T: int, w4a8: bool, seed: int) -> tuple[Any, ...]:
  """Two sequences whose scores are small exact numbers, most of them equal and many zero or negative."""
  rng, n = np.random.default_rng(seed), 90
  q, weight = rng.integers(-1, 2, (2 * T, 2, 32)).astype(np.float32), rng.integers(-1, 3, (2 * T, 2)).astype(np.float32)
  at = np.array([[4 * n - T, 70], [2, 0]], np.int32)
  keys = np.full((3, n + 5, 32), np.nan, np.float32)
  for b in (0, 1): keys[at[1, b], :(at[0, b] + T) // 4] = rng.integers(-1, 2, ((at[0, b] + T) // 4, 32))
  keys[2, 10:20] = keys[2, 0]
  weight[1], q[2 % T] = 0, 0                                 # all equal
  return q, np.stack([keys_of(k, w4a8) for k in keys]), weight, at, n

@pytest.mark.parametrize("w4a8", [False, True], ids=["f32", "w4a8"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_best_of_all_ranks_are_those_of_one(ranks: int, w4a8: bool) -> None:
  for k in (1, 7, 30, 64, 100):                            # 17 and 90 are visible
    q, keys, weight, at, n = indexed(6, w4a8, k)
    whole = run(cpu, "index_topk", q, keys, weight, at, n, k, 4, w4a8=w4a8)[0]
    if not w4a8:
      for b, rows in ((0, slice(0, 6)), (1, slice(6, 12))):
        p, known = at[0, b] + np.arange(6), int((at[0, b] + 6) // 4)
        want = oracle.index_topk(q[rows], keys[at[1, b], :known], weight[rows], p, k, 4)
        assert (whole[rows, :known] == want).all() and not whole[rows, known:].any()
    for ops in (cpu, twin) if k in (7, 64) and ranks in (1, 3) else (cpu,):
      kept = shared_out(keys, ranks)
      best = tuple(run(ops, "index_best", q, mine, weight, at, n, k, 4, r, ranks, w4a8=w4a8)[0] for r, mine in enumerate(kept))
      for r, mine in enumerate(best):
        s, j = mine[:, 0], mine[:, 1]
        there = s > -np.inf
        assert (there.sum(1) == np.minimum(k, [len(range(r, v, ranks)) for v in [(p + i + 1) // 4 for p in at[0] for i in range(6)]])).all()
        assert (s[:, :-1] >= s[:, 1:]).all() and ((s[:, :-1] > s[:, 1:]) | (j[:, :-1] < j[:, 1:]))[there[:, 1:]].all()
        assert (j[there] % ranks == r).all()
        got = run(ops, "index_choose", best, n, k, r, ranks)[0]
        assert got.dtype == np.bool_ and (got == whole[:, r::ranks]).all(), (ops, k, r)

def test_more_ranks_than_entries() -> None:
  """A rank that keeps none of them has one flag, which is never set."""
  q, keys, weight, at, _ = indexed(6, False, 1)
  for ops in (cpu, twin):
    best = tuple(run(ops, "index_best", q, mine, weight, at, 2, 1, 4, r, 3)[0] for r, mine in enumerate(shared_out(keys, 3)))
    chosen = [run(ops, "index_choose", best, 2, 1, r, 3)[0] for r in range(3)]
    assert (np.concatenate(chosen[:2], 1) == run(cpu, "index_topk", q, keys, weight, at, 2, 1, 4)[0]).all()
    assert chosen[2].shape == (12, 1) and not chosen[2].any()

def shares(call: Call, args: tuple[Any, ...], ranks: int, r: int) -> tuple[Array, list[tuple[Array, ...]]]:
  """attend's arguments -> what the ranks make of them together, and the parts of each rank."""
  q, ring, entries, chosen, sink, rope, at, window, n, ratio = args
  heads = lambda a, axis: np.split(a, ranks, axis)
  sent = [call("attend_part", tuple(heads(q, 1)), ring, None if entries is None else shared_out(entries, ranks)[rank],
               None if chosen is None else chosen[:, rank::ranks].copy(), at, window, n, ratio, rank, r) for rank in range(ranks)]
  out = [call("attend_merge", tuple(p[i] for p in sent), s, rope)[0] for i, s in enumerate(heads(sink, 0))]
  return np.concatenate(out, 1), sent

@BOTH
@pytest.mark.parametrize("ranks, n, choose", [(2, 20, True), (2, 20, False), (3, 20, True), (2, 0, False), (1, 20, True)])
def test_shares_make_up_the_whole(ops: Any, ranks: int, n: int, choose: bool) -> None:
  """Against the oracle: at the first position, around the window and behind it."""
  for T in (1, 5):
    for pos in (0, 2, 7, 8, 40, 70):
      args, want = attention(pos, T, 6, 12, 48, 8, 4, n, choose)
      close(shares(functools.partial(run, ops), args, ranks, 4)[0], want, 3e-6)

@pytest.mark.parametrize("ranks, choose, w4a8", [(2, True, True), (2, False, True), (3, False, False)])
def test_shares_of_several_sequences(ranks: int, choose: bool, w4a8: bool) -> None:
  cpu_run, twin_run = (functools.partial(run, ops, w4a8=w4a8) for ops in (cpu, twin))
  sequences_share(Sequences(6, w4a8, heads=6), cpu_run, twin_run, ranks, choose)

def sequences_share(s: Sequences, call: Call, twins: Call, ranks: int, choose: bool) -> None:
  """Alone or together the same bits, equal to attend up to roundings; entries of other heads, but not the window, count."""
  args = s.together("attend", (2, 0, 3))
  if not choose: args = (*args[:3], None, *args[4:])
  (mine, sent), (theirs, other) = (shares(f, args, ranks, s.r) for f in (call, twins))
  near(mine, theirs, s.w4a8)
  near(mine, call("attend", *args)[0], s.w4a8)
  for a, b in zip(sent, other):
    for x, y in zip(a, b): near(x, y, s.w4a8)
  for rank in range(1, ranks):                             # the second sequence is at 0: entry 1 is not there yet
    for i, part in enumerate(sent[rank]):
      nothing = part[6:12]
      if i != rank: assert (nothing[..., :-2] == 0).all() and (nothing[..., -2] == -np.inf).all() and (nothing[..., -1] == 0).all()
      else: assert (nothing[..., -1] >= 0.99).all()
  alone = [shares(call, (*a[:3], a[3] if choose else None, *a[4:]), ranks, s.r)[0] for a in (s.args("attend", b) for b in (2, 0, 3))]
  assert mine.tobytes() == np.concatenate(alone).tobytes()

@BOTH
def test_shares_with_sharp_scores(ops: Any) -> None:
  """The largest score of all may lie in any share; those of others then vanish, and nothing overflows."""
  args, want = attention(70, 5, 4, 12, 48, 8, 4, 20, False, 300.0)
  close(shares(functools.partial(run, ops), args, 2, 4)[0], want, 3e-5)
