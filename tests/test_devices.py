"""Two devices that share one model: what one says, they say, with the cache whole on both or a part on each; what each holds; and
how often they wait for each other."""
from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_spec
from safetensors.numpy import load_file
from test_batch import Ask, ask, worked
from test_batch import Models as Batched
from test_spec import Models, fill, found_views, same, visible
from tinygrad import Tensor
from tinygrad.helpers import GlobalCounters

from specgrad import quant
from specgrad.api import Model, demo_path, load
from specgrad.batch import Batch
from specgrad.checkpoint import Checkpoint
from specgrad.engine import Engine, Sampling, Stats, put
from specgrad.models import deepseek_v4
from specgrad.models.deepseek_v4 import Cache
from specgrad.plan import exchanges, plan
from specgrad.quant import Each, flat, on
from specgrad.weights import DRAFT, TARGET, stream

assert found_views                                         # a fixture of this module, too
PAIR = ("CPU", "CPU:1")
CASES = ("v4_r16", "dspark_w16")
BOUND = 5e-5                                               # what float32 sums in another order may move a logit
Array = np.ndarray
Ids = list[int]

def near(got: Array, want: Array) -> None:
  assert got.shape == want.shape and np.abs(got - want).max() <= BOUND

class Both:
  """A golden case on one device and on two."""
  def __init__(self, folder: Path, kv: str):
    self.values = load_file(folder / "golden_f32.safetensors")
    settings: dict[str, Any] = {"numerics": "reference", "draft": "none", "max_context": 512}
    self.one, self.two = load(folder / "ckpt", **settings), load(folder / "ckpt", devices=PAIR, kv=kv, **settings)
    self.lengths = sorted(int(k[3:].split(".")[0]) for k in self.values if k.startswith("len") and k.endswith(".logits"))

@pytest.fixture(scope="module", params=[(case, kv) for case in CASES for kv in ("replicated", "sharded")], ids="-".join)
def both(request: pytest.FixtureRequest, shared: Path) -> Both:
  case, kv = request.param
  return Both(shared / "golden" / case, kv)

# ------------------------------------------------------------------------------------------------ one model
def watched(model: Model, ids: Sequence[int]) -> tuple[Array, list[Any]]:
  """Logits of one eager chunk, and what was chosen on the way: experts, and sets of entries a row."""
  target, found, ops, log = model.engine.target, [], model.engine.target.ops, list[tuple[str, Any]]()
  real = {name: getattr(ops, name) for name in ("route", "index_topk", "index_choose")}
  for name, f in real.items():
    setattr(ops, name, lambda *args, f=f, name=name: (log.append((name, out := f(*args))), out)[1])
  try:
    rows = next(n for n in (8, 32, 128) if n >= len(ids))
    cache = Cache(model.config, 300, target.devices, target.w4a8, 2, model.engine.kv == "sharded")
    given, at = (model.engine.make(np.int32, *shape) for shape in ((rows,), (2, 1)))
    put(given, np.array([*ids, *[0] * (rows - len(ids))], np.int32))
    put(at, np.array([[0], [1]], np.int32))
    h = target.forward(given, at, cache, 512)
    logits = on(0, target.head(h)).numpy()[:len(ids)]
  finally:
    for name, f in real.items(): setattr(ops, name, f)
  n = len(target.devices)
  for name, out in log:
    if name == "route":
      chosen = [on(r, out[0]).numpy()[:len(ids)] for r in range(n)]
      assert all((c == chosen[0]).all() for c in chosen)   # every device routes by itself
      found.append(np.sort(chosen[0], 1).tolist())
    else:
      parts = [np.ascontiguousarray(on(r, out).numpy()[:len(ids)]) for r in range(n)]
      if name == "index_topk": assert all((p == parts[0]).all() for p in parts)
      stride = n if name == "index_choose" else 1
      found.append([sorted({int(j) * stride + r for r in range(stride) for j in np.flatnonzero(parts[r][t])}) for t in range(len(ids))])
  return logits, found

def test_golden_logits(both: Both) -> None:
  """Same argmax, same experts, same entries, logits within what the order of sums may change."""
  for n in both.lengths:
    ids, want = both.values[f"len{n}.input_ids"].tolist(), both.values[f"len{n}.logits"]
    got = both.two.logits(ids)
    near(got, want)
    near(got, both.one.logits(ids))
    assert (got.argmax(1) == want.argmax(1)).all()
  (one, chosen), (two, chosen_too) = (watched(model, both.values[f"len{n}.input_ids"].tolist()) for model in (both.one, both.two))
  near(two, one)
  assert chosen == chosen_too and len(chosen) >= len(both.one.config.compress_ratios) and two.tobytes() == got.tobytes()

@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_do_not_matter(both: Both, chunk: int) -> None:
  ids = both.values[f"len{both.lengths[-1]}.input_ids"].tolist()
  same([both.two.logits(ids, chunk)], [both.two.logits(ids)])

@pytest.mark.parametrize("rows, accepted", [(6, "one"), (6, "any"), (32, "any")])
def test_rejected_rows_leave_no_trace(both: Both, rows: int, accepted: str) -> None:
  """Rows of which some count, then junk that the next ones write over: logits and every byte that counts, on both devices."""
  e, rng, capacity = both.two.engine, np.random.default_rng(rows), 512
  ids = both.values[f"len{both.lengths[-1]}.input_ids"].tolist()
  cache = Cache(e.config, capacity, PAIR, False, 3, e.kv == "sharded")
  held, at = e.make(np.int32, rows), e.make(np.int32, 2, 1)

  def run(chunk: Ids, pos: int) -> Array:
    put(held, np.array([*chunk, *[0] * (rows - len(chunk))], np.int32))
    put(at, np.array([[pos], [2]], np.int32))
    build = lambda: quant.realize(e.target.head(e.target.forward(held, at, cache, capacity)))
    return on(0, e.graph("test", build, rows, id(cache))).numpy().copy()

  def empty() -> None:
    for b in cache.buffers(): put(b, np.full(on(0, b).shape, np.nan, np.float32))
  empty()
  want, states, p = both.two.logits(ids), [visible(e.config, cache, 0, 2)], 0
  for p, token in enumerate(ids):                          # one true row at a time, the rest padding
    assert run([token], p)[0].tobytes() == want[p].tobytes()
    states.append([b.copy() for b in visible(e.config, cache, p + 1, 2)])
  empty()
  p = 0
  while p + rows <= len(ids):
    n = 1 if accepted == "one" else int(rng.integers(1, rows + 1))
    got = run(ids[p:p + n] + rng.integers(0, 256, rows - n).tolist(), p)
    assert got[:n].tobytes() == want[p:p + n].tobytes()
    p += n
    same(visible(e.config, cache, p, 2), states[p])
  for b in flat(cache.buffers()): assert np.isnan(b.numpy()[:2]).all()
  del e.graphs["test", rows, id(cache)]

@pytest.mark.parametrize("kv", ["sharded", "replicated"])
def test_the_shipped_checkpoint_with_its_draft(kv: str) -> None:
  """Greedy ids of 300 tokens, five drafted a step: the same as on one device."""
  settings: dict[str, Any] = {"numerics": "reference", "max_context": 400}
  one, two = load(**settings), load(devices=PAIR, kv=kv, **settings)
  assert one.tokenizer is not None
  ids = one.tokenizer.encode("The old lighthouse")
  want, got = (m.generate(ids, max_tokens=300, depth=5, ignore_eos=True) for m in (one, two))
  assert got.ids == want.ids and len(got.ids) == 300 and sum(got.stats.accepted) > 100
  blocks = [m.draft_block(ids) for m in (one, two)]
  assert (blocks[0].tokens == blocks[1].tokens).all() and blocks[0].logits is not None and blocks[1].logits is not None
  near(blocks[1].logits, blocks[0].logits)

# ------------------------------------------------------------------------------------------------ speculation
@pytest.fixture(scope="module", params=["sharded", "replicated"])
def models(request: pytest.FixtureRequest, shared: Path) -> Models:
  return Models(shared / "golden" / "dspark_w16" / "ckpt", "w4a8", devices=PAIR, kv=request.param)

def test_greedy_ids_equal_plain_decoding(models: Models) -> None:
  """As on one device, at the borders of window, blocks and chunk: bit for bit."""
  for draft in ("auto", "small", "mixed"):
    for n in (1, 5, 17, 33, 128, 130):
      ids = test_spec.prompt(n)
      want = models.plain(ids, 8, 6)
      assert test_spec.drafting(models, draft, ids, want, n).generate(ids, max_tokens=8, depth=5).ids == want

def test_drawn_ids_equal_plain_decoding(models: Models) -> None:
  for n in (4, 33):
    want = models.plain(test_spec.prompt(n), 12, temperature=0.9, seed=n)
    for draft in ("auto", "ngram", "mixed"):
      model = test_spec.drafting(models, draft, test_spec.prompt(n), want)
      assert model.generate(test_spec.prompt(n), max_tokens=12, temperature=0.9, seed=n, coupled=draft != "ngram", depth=5).ids == want

def test_rewind_at_every_phase(models: Models) -> None: test_spec.test_rewind_at_every_phase(models, 5)

def test_what_a_draft_remembers(models: Models) -> None: test_spec.test_what_a_draft_remembers(models, 17)

def test_turns(models: Models) -> None: test_spec.test_turns(models, "auto")

def test_both_devices_hold_the_same_state(models: Models) -> None:
  """Position, token, histories: each device computes them by itself, and only one of them is read."""
  model = models["auto"]
  fill(model, np.nan)
  run, state = test_spec.begun(model, test_spec.prompt(20), Sampling(1.0, seed=4, presence_penalty=0.5))
  for _ in range(5): model.engine.step(run.plan, state)
  for value in (state.at, state.anchor, state.counts, *(layer.window for layer in model.engine.cache.layers)):
    assert isinstance(value, Each)
    assert value[0].numpy().tobytes() == value[1].numpy().tobytes()
  assert int(on(0, state.at).numpy()[0, 0]) >= 19 + 5

def test_a_batch_equals_solo_runs(shared: Path) -> None:
  """Four in four slots, one more waits; greedy, drawn, penalised, masked, with log probabilities."""
  class Pairs(Batched):
    def __call__(self, draft: str, slots: int = 1) -> Model:
      if (draft, slots) not in self.loaded:
        self.loaded[draft, slots] = load(self.folder, draft=draft, max_context=580, slots=slots, devices=PAIR)
      return self.loaded[draft, slots]
  pairs = Pairs(shared / "golden" / "dspark_w16" / "ckpt")
  asks: list[Ask] = [ask(130, 20), ask(17, 24, temperature=0.9, seed=3), ask(5, 16, presence_penalty=0.5), ask(33, 12, masked=True),
                     ask(40, 9, logprobs=2)]
  batch = Batch(pairs("auto", 4).engine)
  jobs = [a.submit(batch) for a in asks]
  assert worked(batch, jobs) == [pairs.alone("auto", a)[0] for a in asks]

# ------------------------------------------------------------------------------------------------ memory
def used() -> list[int]:
  gc.collect()
  return [GlobalCounters.mem_used_per_device[d] for d in PAIR]

def taken(before: list[int]) -> list[int]: return [b - a for a, b in zip(before, used())]

@pytest.mark.parametrize("which", ["demo", "dspark_w16"])
def test_weights_are_what_was_planned(which: str, shared: Path) -> None:
  """From tinygrad's own counters, on each device. Three experts can't be halved: the plan speaks of who has more."""
  c = Checkpoint.open(demo_path() if which == "demo" else shared / "golden" / which / "ckpt")
  before = used()
  weights = dict(stream(c, PAIR, prefix=TARGET + DRAFT, packed=True))
  mine = taken(before)
  assert max(mine) == pytest.approx(plan(c, 2).weights, rel=0.02) and sum(mine) < 1.6 * plan(c, 1).weights
  assert (abs(mine[0] - mine[1]) < 64) == (c.config.n_routed_experts % 2 == 0)
  del weights
  assert max(taken(before)) < 1024

@pytest.mark.parametrize("slots", [1, 4])
def test_a_cache_is_what_was_planned(slots: int) -> None:
  """Split, entries and keys take half on each device; the rings are whole on both."""
  c = Checkpoint.open(demo_path())
  sizes = {}
  for kv in ("replicated", "sharded"):
    before = used()
    cache = Cache(c.config, 4096, PAIR, True, slots, kv == "sharded")
    sizes[kv] = taken(before)
    planned = {k: v * slots for k, v in plan(c, 2, context=4096, kv=kv).sequence().items() if k not in ("sampling", "draft rings")}
    assert sizes[kv] == [sum(planned.values())] * 2
    parts = [sum(on(r, s.entries).nbytes() for layer in cache.layers for s in (layer.compressor, layer.indexer) if s) for r in (0, 1)]
    assert parts == [planned["compressed entries"] + planned["indexer keys"]] * 2
    sizes[kv, "entries"] = parts
    del cache
    assert max(taken(before)) < 1024
  half, whole = sizes["sharded", "entries"][0], sizes["replicated", "entries"][0]
  assert half == pytest.approx(whole / 2, rel=0.02) and sizes["replicated"][0] - sizes["sharded"][0] == whole - half

def test_an_engine_is_what_was_planned() -> None:
  """Weights and cache of a loaded engine, and little besides."""
  before = used()
  engine = Engine(Checkpoint.open(demo_path()), PAIR, 2048, slots=2)
  mine = taken(before)
  made = plan(engine.checkpoint, 2, users=2, context=2048)
  want = made.weights + 2 * (sum(made.sequence().values()) - made.sequence()["sampling"])
  for size in mine: assert size == pytest.approx(want, rel=0.02)

# ------------------------------------------------------------------------------------------------ exchanges
@pytest.mark.parametrize("kv", ["sharded", "replicated"])
@pytest.mark.parametrize("context", [16, 512])
def test_exchanges_are_those_of_the_plan(kv: str, context: int, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """A step as it is traced: everyone and deliver are where devices meet. A layer's queries and its candidates don't wait for each
  other: the plan counts them once."""
  model = load(shared / "golden" / "dspark_w16" / "ckpt", devices=PAIR, kv=kv, max_context=512)
  e, counts = model.engine, Counter[str]()
  for module, name in ((quant, "everyone"), (deepseek_v4, "everyone"), (deepseek_v4, "deliver")):
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda x, real=real, name=name: (counts.update([name]), real(x))[1])
  run, state = test_spec.begun(model, test_spec.prompt(9), Sampling())
  counts.clear()
  e.graphs.clear()
  e.step(test_spec.dataclasses.replace(run.plan, context=context), state)
  made = {x.what: x.count for x in exchanges(plan(e.checkpoint, 2, context=512, kv=kv), 1, context)}
  indexed = made.get("queries and index candidates", 0)
  assert (indexed > 0) == (kv == "sharded" and context // 4 > model.config.index_topk)
  assert sum(counts.values()) == sum(made.values()) + indexed
  layers, draft = len(model.config.compress_ratios), 3
  assert sum(made.values()) <= (4 if kv == "sharded" else 2) * (layers + draft) + 3

# ------------------------------------------------------------------------------------------------ refusals
def test_what_cannot_be_split_is_refused_before_anything_is_read(shared: Path) -> None:
  events: list[Any] = []
  before = used()
  with pytest.raises(ValueError, match="can't be split evenly over 3 devices, want 1 or 2|can't be split evenly over 3 devices, want 1, 2"):
    load(devices=("CPU", "CPU:1", "CPU:2"), progress=lambda *x: events.append(x), max_context=64)
  assert events == [] and taken(before) == [0, 0]
  for devices in ((), ("CPU", "CPU"), ("CPU", "CUDA"), ("CPU", "CPU:0"), ("cpu:1", "CPU:1")):
    with pytest.raises(ValueError, match="want different ones of one kind"): load(devices=devices)
  with pytest.raises(ValueError, match="^load: kv='half', want 'sharded' or 'replicated'$"): load(devices=PAIR, kv="half")

def test_statistics_and_labels_do_not_change(models: Models) -> None:
  stats, e = Stats(), models["auto"].engine
  run = e.begin(test_spec.prompt(5), 3, Sampling(), stats, 5)
  for _ in e.prefill(run): pass
  while not stats.finish_reason: e.advance([run])
  assert stats.verifier == "exact, rule greedy, q one-hot, depth 5 fixed, numerics w4a8 fixed-width" and stats.tokens == 3

def test_no_captured_kernel_is_given_a_view(found_views: list[str]) -> None: assert found_views == []

def test_tensors_stay_where_they_belong(models: Models) -> None:
  for t in (*models["auto"].engine.cache.buffers(), *models["auto"].engine.fill):
    assert isinstance(t, Each) and tuple(x.device for x in t) == PAIR and all(isinstance(x, Tensor) for x in t)
