"""The target against float32 golden files of two tiny checkpoints and a whole-sequence oracle, and what a cache must survive:
any chunk size, NaN where nothing was written, drafts that were rejected, neighbours that change."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
from safetensors.numpy import load_file
from tinygrad import Tensor, dtypes

from specgrad.api import Model, demo_path, load
from specgrad.checkpoint import Checkpoint, load_f32
from specgrad.engine import ROWS, put
from specgrad.models.deepseek_v4 import Cache, Target
from specgrad.quant import twin

CASES = ("v4_r16", "dspark_w16")
BOUND = 5e-5                                               # what float32 sums in another order may move a logit
LENGTHS = {"v4_r16": (1, 2, 3, 4, 5, 15, 16, 17, 18, 31, 33, 64, 100), "dspark_w16": (2, 5, 40)}
PROMPTS = [(case, n) for case in CASES for n in LENGTHS[case]]
Array = np.ndarray

class Golden:
  """One case: its reference values, and its model loaded once."""
  def __init__(self, folder: Path):
    self.values = load_file(folder / "golden_f32.safetensors")
    self.model = load(folder / "ckpt", numerics="reference", draft="none", max_context=512)
    self.target, self.config = self.model.engine.target, self.model.config

  def __getitem__(self, name: str) -> Array: return self.values[name]

@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, Golden]: return {case: Golden(shared / "golden" / case) for case in CASES}

@pytest.fixture(scope="module")
def demo() -> Model: return load(numerics="reference", draft="none", max_context=1024)

def near(got: Array, want: Array) -> None:
  assert got.shape == want.shape
  assert np.abs(got - want).max() <= BOUND                 # NaN fails too

def same(got: Array, want: Array) -> None: assert got.tobytes() == want.tobytes()

# ------------------------------------------------------------------------------------------------ golden logits
@pytest.mark.parametrize("case, n", PROMPTS)
def test_logits(golden: dict[str, Golden], case: str, n: int) -> None:
  g = golden[case]
  logits, want = g.model.logits(g[f"len{n}.input_ids"]), g[f"len{n}.logits"]
  near(logits, want)
  assert (logits.argmax(1) == want.argmax(1)).all()

def test_every_golden_prompt_is_used(golden: dict[str, Golden]) -> None:
  for case, g in golden.items():
    assert {f"len{n}.logits" for n in LENGTHS[case]} == {k for k in g.values if k.startswith("len") and k.endswith(".logits")}

@pytest.mark.parametrize("n", [1, 14, 33])
def test_greedy_decode(golden: dict[str, Golden], n: int) -> None:
  """The golden run goes on after EOS, where a reply ends: the next call then goes on with what there is."""
  g = golden["v4_r16"]
  prompt, want = g[f"decode{n}.input_ids"].tolist(), g[f"decode{n}.tokens"].tolist()
  tokens: list[int] = []
  while len(tokens) < len(want):
    reply = g.model.generate(prompt + tokens, max_tokens=len(want) - len(tokens))
    assert reply.finish_reason == ("stop" if reply.ids[-1] == g.config.eos_token_id else "length")
    tokens += reply.ids
  assert tokens == want
  near(g.model.logits(prompt + tokens[:-1], chunk=1)[n - 1:], g[f"decode{n}.logits"])

@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 64, 1000])
@pytest.mark.parametrize("case", CASES)
def test_chunks_do_not_matter(golden: dict[str, Golden], case: str, chunk: int) -> None:
  g = golden[case]
  ids = g[f"len{max(LENGTHS[case])}.input_ids"]
  same(g.model.logits(ids, chunk), g.model.logits(ids))

@pytest.mark.parametrize("case", CASES)
def test_oracle_equals_golden(golden: dict[str, Golden], shared: Path, case: str) -> None:
  """Else it could not speak for checkpoints that have no golden file."""
  weights, config = raw(shared / "golden" / case / "ckpt")
  n = max(LENGTHS[case])
  near(oracle.forward(weights, config, golden[case][f"len{n}.input_ids"]), golden[case][f"len{n}.logits"])

def test_demo_equals_oracle(demo: Model) -> None:
  """Window 128, ratio 128, more entries than top-k: borders that the golden checkpoints do not have."""
  ids = np.random.default_rng(7).integers(0, demo.config.vocab_size, 600)
  near(demo.logits(ids), oracle.forward(*raw(demo_path()), ids))

def raw(folder: Path) -> tuple[dict[str, Array], dict[str, Any]]:
  """The target's weights in float32 by official name, and config.json."""
  c = Checkpoint.open(folder)
  names = [n for n in c.tensors if not n.endswith(".scale") and not n.startswith("mtp.")]
  weights = {n: c.read(n) if n.endswith("tid2eid") else load_f32(c, n) for n in names}
  return weights, json.loads((folder / "config.json").read_text())

# ------------------------------------------------------------------------------------------------ layer by layer
def observed(target: Target, ids: Array) -> dict[str, Array]:
  """Everything that `observe` sees of one chunk from position 0 on a new cache, and the logits. Rows behind the last id are
  padding, so that few shapes need kernels; the cache holds less than the 512 positions that a graph may look at."""
  cache = Cache(target.config, 300, target.devices, slots=2)
  seen: dict[str, Array] = {}
  see = lambda name, t: seen.__setitem__(name, t.numpy())
  rows = next(r for r in ROWS if r >= len(ids))
  h = target.forward(ints([*ids, *[0] * (rows - len(ids))]), ints([[0], [1]]), cache, 512, see)
  return seen | {"logits": target.head(h, see).numpy()}

def ints(values: Any) -> Tensor: return Tensor(np.asarray(values, np.int32)).clone().realize()

def topk_of(chosen: Array) -> list[set[int]]: return [set(np.flatnonzero(row).tolist()) for row in chosen]

def wanted_topk(rows: Array) -> list[set[int]]: return [set(row.tolist()) - {-1} for row in rows]

@pytest.mark.parametrize("case", CASES)
def test_hidden_states(golden: dict[str, Golden], case: str) -> None:
  g = golden[case]
  at = g["hidden.positions"]
  n = next(n for n in LENGTHS[case] if n == at[-1] + 1)     # states of the prompt that ends there
  seen = observed(g.target, g[f"len{n}.input_ids"])
  names = [k.removeprefix("hidden.") for k in g.values if k.startswith("hidden.") and k != "hidden.positions"]
  assert len(names) >= 6 * len(g.config.compress_ratios) + 2
  for name in names:
    want = g[f"hidden.{name}"]
    if name.endswith("compressed_kv"): near(seen[name][1, :len(want)], want)
    elif name.endswith("experts"): assert (np.sort(seen[name][at], 1) == want).all(), name
    else: near(seen[name][at], want)

@pytest.mark.parametrize("case, n", PROMPTS)
def test_indexer_choices(golden: dict[str, Golden], case: str, n: int) -> None:
  g = golden[case]
  seen = observed(g.target, g[f"len{n}.input_ids"])
  names = [k for k in g.values if k.startswith(f"len{n}.") and k.endswith(".topk_last8")]
  assert len(names) == (g.config.compress_ratios.count(4) if n >= 4 else 0)
  for name in names: assert topk_of(seen[name.split(".")[1] + ".chosen"][max(n - 8, 0):n]) == wanted_topk(g[name])

def test_twins_reproduce_golden_logits(golden: dict[str, Golden], monkeypatch: pytest.MonkeyPatch) -> None:
  """Every operation of the readable path at once; test_quant has each by itself."""
  g = golden["v4_r16"]
  ops = vars(g.target.ops)
  monkeypatch.setattr(g.target, "ops", SimpleNamespace(**ops | {name: getattr(twin, name) for name in ops if hasattr(twin, name)}))
  near(observed(g.target, g["len31.input_ids"])["logits"][:31], g["len31.logits"])

# ------------------------------------------------------------------------------------------------ caches
class Sequences:
  """Eager runs of one target on a cache of its own, each number of rows captured once. Of the three slots of the cache only
  the middle one is used."""
  SLOT = 1

  def __init__(self, model: Model, fill: float = np.nan):
    self.engine, self.target = model.engine, model.engine.target
    self.capacity = 512
    self.cache = Cache(model.config, self.capacity, self.target.devices, self.target.w4a8, slots=3)
    self.graphs: dict[int, tuple[Tensor, Any]] = {}
    self.at = ints([[0], [self.SLOT]])
    self.fill(fill)

  def fill(self, value: float) -> None:
    """Bytes of formats other than float32: zeros for 0, else ones, which are NaN in bfloat16, e4m3 and e8m0."""
    for b in self.cache.buffers():
      put(b, np.full(b.shape, value, np.float32) if b.dtype == dtypes.float32 else np.full(b.shape, 255 if value else 0, np.uint8))

  def __call__(self, ids: Sequence[int], pos: int) -> Array:
    """Logits (T, V) of rows pos..pos+T-1."""
    rows = len(ids)
    if rows not in self.graphs:
      held = ints([0] * rows)
      self.graphs[rows] = held, lambda: self.target.head(self.target.forward(held, self.at, self.cache, self.capacity)).realize()
    held, build = self.graphs[rows]
    put(held, np.array(ids, np.int32))
    put(self.at, np.array([[pos], [self.SLOT]], np.int32))
    return self.engine.graph("test", build, rows, id(self)).numpy().copy()

  def visible(self, n: int) -> list[Array]:
    """What a query at position n or later may use of positions 0..n-1: window rows, rows of unfinished blocks (and of the
    block before, where blocks overlap), finished entries."""
    found, window = [], self.target.config.sliding_window
    at = lambda ring, first: ring.numpy()[self.SLOT, np.arange(max(first, 0), n) % ring.shape[1]]
    for ratio, layer in zip(self.target.config.compress_ratios, self.cache.layers):
      found.append(at(layer.window, n - window + 1))
      for state in filter(None, (layer.compressor, layer.indexer)):
        found += [at(state.ring, (n // ratio - (ratio == 4)) * ratio), state.entries.numpy()[self.SLOT, :n // ratio]]
    return found

  def others(self) -> list[Array]: return [np.delete(b.numpy(), self.SLOT, 0) for b in self.cache.buffers()]

Clean = tuple[list[int], Array, list[list[Array]]]

@pytest.fixture(scope="module", params=["reference", "w4a8"])
def runs(request: pytest.FixtureRequest, golden: dict[str, Golden], shared: Path) -> Sequences:
  if request.param == "reference": return Sequences(golden["v4_r16"].model)
  return Sequences(load(shared / "golden" / "v4_r16" / "ckpt", draft="none", max_context=512))

@pytest.fixture(scope="module")
def clean(golden: dict[str, Golden], runs: Sequences) -> Clean:
  """ids, their logits one row at a time, and the visible bytes after each row."""
  ids = golden["v4_r16"]["len100.input_ids"].tolist()
  runs.fill(np.nan)
  logits, states = [], [runs.visible(0)]
  for p, token in enumerate(ids):
    logits.append(runs([token], p)[0])
    states.append(runs.visible(p + 1))
  return ids, np.stack(logits), states

def test_unwritten_slots_hold_nan_and_nobody_sees_them(golden: dict[str, Golden], runs: Sequences, clean: Clean) -> None:
  ids, logits, states = clean
  assert np.isfinite(logits).all()
  assert all(np.isfinite(part).all() for state in states for part in state)
  if not runs.target.w4a8: near(logits, golden["v4_r16"]["len100.logits"])

@pytest.mark.parametrize("fill", [0.0, np.inf, 3e38])
def test_old_bytes_do_not_matter(runs: Sequences, clean: Clean, fill: float) -> None:
  ids, logits, _ = clean
  runs.fill(fill)
  same(np.stack([runs(ids[p:p + 1], p)[0] for p in range(40)]), logits[:40])

@pytest.mark.parametrize("rows", [6, 32])
@pytest.mark.parametrize("accepted", ["one", "all but one", "any"])
def test_rejected_rows_leave_no_trace(runs: Sequences, clean: Clean, rows: int, accepted: str) -> None:
  """Each step writes `rows` rows: some true ones, then junk that the next step writes over. "one" starts a step at every
  position, hence at every phase mod 4 and mod 16."""
  ids, logits, states = clean
  rng = np.random.default_rng(rows)
  runs.fill(np.nan)
  p, starts = 0, set()
  while p + rows <= len(ids):
    n = {"one": 1, "all but one": rows - 1, "any": int(rng.integers(1, rows + 1))}[accepted]
    junk = rng.integers(0, 256, rows - n).tolist()
    starts.add(p)
    same(runs(ids[p:p + n] + junk, p)[:n], logits[p:p + n])
    p += n
    for got, want in zip(runs.visible(p), states[p], strict=True): same(got, want)
  for b, other in zip(runs.cache.buffers(), runs.others()):  # and nothing went to another slot
    assert np.isnan(other).all() if b.dtype == dtypes.float32 else (other == 255).all()
  assert accepted != "one" or starts == set(range(len(ids) - rows + 1))

@pytest.mark.parametrize("runs", ["reference"], indirect=True)
def test_long_chunks_of_junk_leave_no_trace(runs: Sequences, clean: Clean) -> None:
  """The most rows a chunk may have, of which one counts: the rings hold exactly that much more than queries need."""
  ids, logits, states = clean
  rng = np.random.default_rng(3)
  for p in (0, 15, 30, 99):
    runs.fill(np.nan)
    for i in range(p): runs(ids[i:i + 1], i)
    runs([ids[p], *rng.integers(0, 256, 127).tolist()], p)
    for got, want in zip(runs.visible(p + 1), states[p + 1], strict=True): same(got, want)
    for i in range(p + 1, min(p + 20, len(ids))): same(runs(ids[i:i + 1], i)[0], logits[i])

# ------------------------------------------------------------------------------------------------ rows
@pytest.mark.parametrize("first", [0, 1, 14, 30, 67])
def test_logits_do_not_depend_on_the_number_of_rows(runs: Sequences, clean: Clean, first: int) -> None:
  ids, logits, _ = clean
  for rows in (6, 32):
    runs.fill(np.nan)
    for i in range(first): runs(ids[i:i + 1], i)
    same(runs(ids[first:first + rows], first), logits[first:first + rows])

@pytest.mark.parametrize("rows, kept", [(6, 1), (6, 4), (6, 5), (32, 3), (32, 16), (32, 31)])
def test_later_rows_do_not_touch_earlier_ones(runs: Sequences, clean: Clean, rows: int, kept: int) -> None:
  ids, logits, _ = clean
  rng = np.random.default_rng(kept)
  runs.fill(np.nan)
  for first in range(50):                                  # every chunk of others is written over by the true row
    if first % 7 == 0:
      other = rng.integers(0, 256, rows - kept).tolist()
      got = runs(ids[first:first + kept] + other, first)
      same(got[:kept], logits[first:first + kept])
      assert (got[kept] != logits[first + kept]).any() or other[0] == ids[first + kept]
    runs(ids[first:first + 1], first)

# ------------------------------------------------------------------------------------------------ the demo's borders
def test_demo_rejected_rows_at_window_and_block_borders(demo: Model) -> None:
  """Window and ratio 128: steps of 8 rows of which some count, from before the first border to after the second."""
  runs, rng = Sequences(demo), np.random.default_rng(11)
  ids = rng.integers(0, demo.config.vocab_size, 300).tolist()
  want = demo.logits(ids)
  same(runs(ids[:128], 0)[:120], want[:120])
  p = 120
  while p + 8 <= len(ids):
    n = int(rng.integers(1, 9))
    junk = rng.integers(0, demo.config.vocab_size, 8 - n).tolist()
    same(runs(ids[p:p + n] + junk, p)[:n], want[p:p + n])
    p += n

def test_observe_changes_nothing(golden: dict[str, Golden]) -> None:
  g = golden["v4_r16"]
  ids = g["len17.input_ids"]
  same(observed(g.target, ids)["logits"][:17], g.model.logits(ids))
