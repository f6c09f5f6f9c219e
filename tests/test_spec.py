"""Speculative decoding end to end: whatever a draft says, the reply is the one of plain decoding. Drafts that are good, useless,
wrong on purpose and broken; every place in a block where a reply can end; what the next turn finds; and what a step costs,
counted and not timed."""
from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinygrad.engine.jit
from test_verify import chi2, served
from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.helpers import GlobalCounters
from tinygrad.uop.ops import Ops

from specgrad.api import Model, Reply, demo_path, load
from specgrad.engine import Run, Sampling, Stats, put
from specgrad.models.deepseek_v4 import Cache, on_all
from specgrad.models.dspark import Choose, Draft, DSpark, side_by_side
from specgrad.models.small import SmallDraft
from specgrad.quant import Each, flat, lift, on
from specgrad.quant.twin import count, write_rows
from specgrad.spec import step, verify

LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 18, 31, 33, 64, 100, 127, 128, 129, 130)  # around window, blocks, top-k, chunk
DEPTHS = (1, 3, 5)
CAPACITY = 600
EPSILON = 1e-3                                             # a top-2 margin that other sums may turn round
V = 256
Array = np.ndarray
Ids = list[int]

def prompt(n: int, seed: int = 0) -> Ids: return np.random.default_rng([n, seed]).integers(2, V, n).tolist()

PROMPTS = [prompt(n, seed) for n in LENGTHS for seed in range(4)]

class Scripted:
  """A draft that says what a test wants: for position p of a slot the id script[slot, p], each as certain as can be."""
  tap_layers: tuple[int, ...] = ()
  depth_limit = 7

  def __init__(self, vocab: int, devices: tuple[str, ...], slots: int = 1):
    self.vocab, self.devices, self.told = vocab, devices, np.zeros((slots, 2 * CAPACITY), np.int32)
    self.script, self.committed = self.zeros(*self.told.shape, dtype=dtypes.int32), self.zeros(*self.told.shape, 1, dtype=dtypes.int32)

  def zeros(self, *shape: int, dtype: Any = dtypes.float32) -> Any:
    return on_all(self.devices, lambda device: Tensor.zeros(*shape, dtype=dtype, device=device).clone().realize())

  def say(self, start: int, ids: Sequence[int], slot: int = 0) -> None:
    self.told[slot] = 0
    self.told[slot, start:start + len(ids)] = ids
    put(self.script, self.told)

  def propose(self, anchor: Any, at: Any, depth: int, choose: Choose, context: int) -> Draft:
    def look(script: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
      tokens = script[at[1].reshape(-1, 1), at[0].reshape(-1, 1) + 1 + count(depth).reshape(1, -1)].flatten().contiguous()
      return tokens, (tokens.reshape(-1, 1) == count(self.vocab)).cast(dtypes.float32).contiguous()
    return Draft(*lift(look)(self.script, at))

  def commit(self, tokens: Any, taps: Any, at: Any, context: int) -> list[Any]:
    return [lift(lambda held, tokens, at: write_rows(held, tokens.reshape(-1, 1), at))(self.committed, tokens, at)]

class Drawn(Scripted):
  """A draft that draws from the same logits (depth_limit, V) of a slot at every step."""
  def __init__(self, vocab: int, devices: tuple[str, ...], slots: int = 1):
    super().__init__(vocab, devices, slots)
    self.logits = [self.zeros(slots, vocab) for _ in range(self.depth_limit)]

  def propose(self, anchor: Any, at: Any, depth: int, choose: Choose, context: int) -> Draft:
    rows = [lift(lambda t, at: t[at[1]].contiguous())(t, at) for t in self.logits[:depth]]
    tokens, laws = zip(*[choose(row, i) for i, row in enumerate(rows)])
    return Draft(lift(side_by_side)(*tokens), None if laws[0] is None else lift(side_by_side)(*laws))

def views(linear: Any) -> list[str]:
  """Arguments of captured kernels that are not whole buffers: tinygrad's memory planner takes what lies behind them for free."""
  return [f"{call.src[0].op} argument {i}: {a.op}" for call in linear.src for i, a in enumerate(call.src[1:])
          if not a.is_bound_var and a.op not in (Ops.BUFFER, Ops.PARAM)]

@pytest.fixture(scope="module", autouse=True)
def found_views() -> Iterator[list[str]]:
  """Of everything that is captured in this module."""
  found: list[str] = []
  plan = tinygrad.engine.jit.memory_plan_rewrite

  def look(linear: Any, *rest: Any) -> Any:
    found.extend(views(linear))
    return plan(linear, *rest)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tinygrad.engine.jit, "memory_plan_rewrite", look)
    yield found

class Models:
  """One checkpoint with several drafts, each loaded when first asked for. No id ends a reply unless a test says so."""
  def __init__(self, folder: Path, numerics: str, **more: Any):
    self.folder, self.numerics, self.more = folder, numerics, more
    self.loaded: dict[str, Model] = {}
    self.replies: dict[Any, Ids] = {}

  def __getitem__(self, name: str) -> Model:
    if name not in self.loaded:
      special = {"scripted": Scripted, "drawn": Drawn}.get(name)
      choice: Any = "none" if special else self.folder if name == "small" else name
      model = self.loaded[name] = load(self.folder, draft=choice, numerics=self.numerics, max_context=CAPACITY, **self.more)
      if special: model.engine.draft = special(V, model.engine.devices)
      model.engine.config = dataclasses.replace(model.engine.config, eos_token_id=-1)
    return self.loaded[name]

  def plain(self, ids: Ids, n: int, width: int = 1, **sampling: Any) -> Ids:
    """The n ids of plain decoding, `width` rows a step."""
    key = (tuple(ids), n, width, str(sampling))
    if key not in self.replies: self.replies[key] = self["none"].generate(ids, max_tokens=n, fixed_width=width, **sampling).ids
    return self.replies[key]

@pytest.fixture(scope="module")
def models(shared: Path) -> Models: return Models(shared / "golden" / "dspark_w16" / "ckpt", "w4a8")

@pytest.fixture(scope="module")
def precise(shared: Path) -> Models: return Models(shared / "golden" / "dspark_w16" / "ckpt", "reference")

def script(model: Model) -> Scripted:
  assert isinstance(model.engine.draft, Scripted)
  return model.engine.draft

def forget(model: Model) -> None: model.engine.reset()

def wrong(ids: Ids, seed: int = 0) -> Ids:
  """Another id at every place."""
  return ((np.array(ids) + np.random.default_rng(seed).integers(1, V, len(ids))) % V).tolist()

def mixed(ids: Ids, seed: int = 0, right: float = 0.65) -> Ids:
  stays = np.random.default_rng([7, seed]).random(len(ids)) < right
  return np.where(stays, ids, wrong(ids, seed)).tolist()

def garbage(ids: Ids, seed: int = 0) -> Ids:
  """Ids that no vocabulary has, and some that are right."""
  return [*np.random.default_rng(seed).choice([-1, V, V + 1, 2 ** 31 - 1, -2 ** 31, -V, ids[0]], len(ids)).tolist()]

SCRIPTS: dict[str, Callable[[Ids, int], Ids]] = {"wrong": wrong, "mixed": mixed, "garbage": garbage, "right": lambda ids, seed: ids}
DRAFTS = ("auto", "ngram", "small", *SCRIPTS)

def drafting(models: Models, draft: str, ids: Ids, want: Ids, seed: int = 0) -> Model:
  """The model with this draft; a scripted one knows what plain decoding says."""
  model = models["scripted" if draft in SCRIPTS else draft]
  if draft in SCRIPTS: script(model).say(len(ids), SCRIPTS[draft](want, seed))
  return model

def accepted_of(told: Ids, want: Ids, depth: int) -> list[int]:
  """How many drafted tokens stand in each step, by comparison alone."""
  counts, at = [], 0
  while at < len(want):
    block = list(zip(told[at:at + depth], want[at:at + depth]))
    counts.append(next((i for i, (a, b) in enumerate(block) if a != b), len(block)))
    at += counts[-1] + 1
  return counts

def visible(config: Any, cache: Cache, n: int, slot: int = 0) -> list[Array]:
  """What a query at position n or later may use of positions 0..n-1 of a slot: window rows, rows of unfinished blocks (and of
  the block before, where blocks overlap), finished entries. Of several devices what each keeps, one after the other."""
  found: list[Array] = []
  devices = len(window) if isinstance(window := cache.layers[0].window, Each) else 1
  for r in range(devices):
    at = lambda ring, first, r=r: on(r, ring).numpy()[slot, np.arange(max(first, 0), n) % on(r, ring).shape[1]]
    for ratio, layer in zip(config.compress_ratios, cache.layers):
      found.append(at(layer.window, n - config.sliding_window + 1))
      for state in filter(None, (layer.compressor, layer.indexer)):
        own = (n // ratio - r + devices - 1) // devices if cache.split else n // ratio
        found += [at(state.ring, (n // ratio - (ratio == 4)) * ratio), on(r, state.entries).numpy()[slot, :own]]
  return found

def filled(b: Any, value: float) -> Array:
  """The value, or for formats of bytes zeros or ones, which are NaN in bfloat16, e4m3 and e8m0."""
  b = on(0, b)
  return np.full(b.shape, value, np.float32) if b.dtype == dtypes.float32 else np.full(b.shape, 255 if value else 0, np.uint8)

def fill(model: Model, value: float) -> None:
  draft = model.engine.draft
  more = draft.rings if isinstance(draft, DSpark) else draft.cache.buffers() if isinstance(draft, SmallDraft) else []
  for b in [*model.engine.cache.buffers(), *more]: put(b, filled(b, value))
  forget(model)

def same(got: Sequence[Array], want: Sequence[Array]) -> None:
  assert len(got) == len(want) > 0
  for a, b in zip(got, want): assert a.shape == b.shape and a.tobytes() == b.tobytes()

# ------------------------------------------------------------------------------------------------ greedy
@pytest.mark.parametrize("numerics, draft", [*(("w4a8", d) for d in DRAFTS),
                                             *(("reference", d) for d in ("auto", "wrong", "mixed", "right"))])
def test_greedy_ids_equal_plain_decoding(request: pytest.FixtureRequest, numerics: str, draft: str) -> None:
  """Plain decoding with as many rows as the speculative step, every length, three depths: no difference at all."""
  models = request.getfixturevalue("models" if numerics == "w4a8" else "precise")
  assert len(PROMPTS) >= 64 and {len(p) for p in PROMPTS} == set(LENGTHS)
  stood = drafted = 0
  for i, ids in enumerate(PROMPTS):
    for depth in DEPTHS:
      want = models.plain(ids, 6, depth + 1)
      model = drafting(models, draft, ids, want, i)
      reply = model.generate(ids, max_tokens=6, depth=depth)
      assert (reply.ids, reply.finish_reason, reply.stats.warnings) == (want, "length", []), (len(ids), depth)
      stood, drafted = stood + sum(reply.stats.accepted), drafted + sum(reply.stats.drafted)
  assert drafted > 0 and {"wrong": stood == 0, "mixed": 0.2 < stood / drafted < 0.8, "small": stood / drafted > 0.6,
                          "right": stood / drafted > 0.6}.get(draft, stood < drafted)

@pytest.mark.parametrize("draft", ["auto", "ngram", "small", "mixed"])
def test_long_replies_equal_plain_decoding(models: Models, draft: str) -> None:
  for n in (1, 30):
    want = models.plain(prompt(n, 9), 100, 6)
    model = drafting(models, draft, prompt(n, 9), want)
    assert model.generate(prompt(n, 9), max_tokens=100).ids == want

@pytest.mark.parametrize("numerics", ["w4a8", "reference"])
def test_one_row_at_a_time(request: pytest.FixtureRequest, numerics: str) -> None:
  """Width 1 may differ from width K+1 where two logits nearly tie, and only there."""
  models = request.getfixturevalue("models" if numerics == "w4a8" else "precise")
  different, unexplained = 0, []
  for ids in PROMPTS:
    one = models.plain(ids, 6)
    for depth in DEPTHS:
      many = models.plain(ids, 6, depth + 1)
      if one == many: continue
      different += 1
      at = next(i for i, (a, b) in enumerate(zip(one, many)) if a != b)
      top = np.sort(models["none"].logits([*ids, *one[:at]])[-1])[-2:]
      if top[1] - top[0] >= EPSILON: unexplained.append((len(ids), depth, at, float(top[1] - top[0])))
  print(f"width 1, {numerics}: {len(PROMPTS) * len(DEPTHS)} replies, {different} differ, {len(unexplained)} unexplained")
  assert unexplained == []

@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 7])
def test_rewind_at_every_phase(models: Models, depth: int) -> None:
  """Blocks of 2 to 8 rows (3, 5 and 7 with idle ones behind) that begin at every phase of the ratios 4 and 16, of which any
  number stands: ids, cache and what the draft was told equal those of decoding one token at a time."""
  width = depth + 1 if depth % 2 else 8                    # few row counts need kernels
  starts: set[int] = set()
  stood: set[int] = set()
  for n in (1, 6, 19, 28, 41, 52):
    ids, total = prompt(n, 3), 60
    want = models.plain(ids, total)
    fill(models["none"], np.nan)
    models["none"].generate(ids, max_tokens=total)
    model, told = models["scripted"], mixed(want, 10 * depth + n)
    fill(model, np.inf)
    script(model).say(n, told)
    at = n - 1
    for new, _ in (stream := model.stream(ids, max_tokens=total, depth=depth, fixed_width=width)):
      starts.add(at % 16)
      at += len(new)
    assert stream.ids == want
    counts = accepted_of(told, want, depth)
    assert [sum(c > i for c in counts) for i in range(depth)] == stream.stats.accepted or counts[-1] < depth
    stood |= set(counts)
    end = n - 1 + total
    same(visible(model.config, model.engine.cache, end), visible(model.config, models["none"].engine.cache, end))
    assert on(0, script(model).committed).numpy()[0, :end, 0].tolist() == [*ids, *want][:end]
  assert starts == set(range(16)) and stood >= set(range(min(depth, 4) + 1))

@pytest.mark.parametrize("numerics", ["w4a8", "reference"])
@pytest.mark.parametrize("n", [1, 3, 15, 18, 33, 64, 130])
def test_wrong_drafts_leave_no_trace(request: pytest.FixtureRequest, numerics: str, n: int) -> None:
  """Cache bytes after nothing but refused tokens equal those of plain decoding."""
  models = request.getfixturevalue("models" if numerics == "w4a8" else "precise")
  ids, total = prompt(n, 4), 20
  want = models.plain(ids, total)
  fill(models["none"], np.nan)
  models["none"].generate(ids, max_tokens=total)
  held = visible(models["none"].config, models["none"].engine.cache, n - 1 + total)
  for depth, kind in itertools.product(DEPTHS, ("wrong", "garbage")):
    model = drafting(models, kind, ids, want)
    fill(model, np.nan)
    assert model.generate(ids, max_tokens=total, depth=depth).ids == want
    same(visible(model.config, model.engine.cache, n - 1 + total), held)

@pytest.mark.parametrize("n", [1, 17, 40])
def test_what_a_draft_remembers(models: Models, n: int) -> None:
  """Rings of the block draft and cache of the small one after a reply: what a prefill of the same ids writes."""
  ids = prompt(n, 5)
  want = models.plain(ids, 30)
  end = n - 1 + 30
  remembered = []
  for depth in (5, 0, None):                               # drafting, not drafting, prefill
    auto, small = models["auto"], models["small"]
    for model in (auto, small):
      fill(model, np.nan)
      if depth is None: model.generate([*ids, *want], max_tokens=1, depth=0)
      else: assert model.generate(ids, max_tokens=30, depth=depth).ids == want
    assert isinstance(auto.engine.draft, DSpark) and isinstance(small.engine.draft, SmallDraft)
    at = np.arange(max(end - auto.config.sliding_window, 0), end)
    rings = [r.numpy()[0, at % r.shape[1]] for r in flat(auto.engine.draft.rings)]
    remembered.append(rings + visible(small.config, small.engine.draft.cache, end))
    same(remembered[-1][len(rings):], visible(small.config, small.engine.cache, end))  # the same checkpoint twice
  for other in remembered[1:]: same(other, remembered[0])

def test_a_draft_that_was_off_is_not_behind(models: Models) -> None:
  ids, model = prompt(20, 6), models["auto"]
  forget(model)
  reply = model.generate(ids, max_tokens=25, depth=0)
  warm = model.draft_block([*ids, *reply.ids])
  assert model.engine.slot[0].held == [*ids, *reply.ids][:-1]
  fill(model, np.nan)
  cold = model.draft_block([*ids, *reply.ids])
  assert warm.logits is not None and cold.logits is not None and warm.confidence is not None and cold.confidence is not None
  same([warm.tokens, warm.logits, warm.confidence], [cold.tokens, cold.logits, cold.confidence])

@pytest.mark.parametrize("draft", ["auto", "ngram", "small", "mixed"])
def test_from_one_captured_context_to_the_next(models: Models, draft: str) -> None:
  """Position 512, where steps of another context length take over, and nearly the last slot."""
  ids = prompt(40, 8) * 12 + prompt(22, 8)
  assert len(ids) == 502
  want = models.plain(ids, 30)
  model = drafting(models, draft, ids, want)
  assert model.generate(ids, max_tokens=30).ids == want
  assert len({key[1].context for key in model.engine.graphs if key[0] == "step" and key[1].depth == model.depth}) > 1

# ------------------------------------------------------------------------------------------------ drawn
PENALISED: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {4: 1.0}}
COUPLED = [({"temperature": 0.7, "top_p": 0.95}, 11), ({"temperature": 1.0, "top_p": 0.95}, 2 ** 63 + 5)]

@pytest.mark.parametrize("draft", ["auto", "ngram", "small", "wrong", "mixed", "right"])
def test_coupled_ids_equal_plain_decoding(models: Models, draft: str) -> None:
  """Drawn, with the same seed: any draft, any depth. (The prompt lookup has no law to be judged by and is always coupled.)"""
  stood = 0
  for (sampling, seed), n in itertools.product(COUPLED, (1, 4, 17, 33, 128)):
    want = models.plain(prompt(n), 14, **sampling, seed=seed)
    assert want != models.plain(prompt(n), 14)
    model = drafting(models, draft, prompt(n), want)
    for depth in DEPTHS:
      reply = model.generate(prompt(n), max_tokens=14, depth=depth, coupled=draft != "ngram", seed=seed, **sampling)
      assert reply.ids == want, (n, depth, sampling)
      assert reply.stats.verifier == f"coupled, rule equal, q one-hot, depth {depth} fixed, numerics w4a8 fixed-width"
      stood += sum(reply.stats.accepted)
  assert stood > 0 or draft in ("ngram", "wrong", "auto")

@pytest.mark.parametrize("draft", ["auto", "mixed", "drawn", "none"])
def test_seeds(models: Models, draft: str) -> None:
  """Same seed, same reply; ten seeds, ten replies; none given, another one each time."""
  ids = prompt(17, 1)
  model = drafting(models, draft, ids, models.plain(ids, 16))
  draw = lambda **more: tuple(model.generate(ids, max_tokens=16, temperature=1.0, **more).ids)
  seeds = [0, 1, 2, 3, 4, 5, 2 ** 32, 2 ** 32 + 1, 2 ** 63, 2 ** 64 - 1]
  first = [draw(seed=s) for s in seeds]
  forget(model)
  assert [draw(seed=s) for s in seeds] == first and len(set(first)) == 10
  assert draw() != draw()

@pytest.mark.parametrize("draft", ["auto", "small", "ngram", "mixed", "drawn"])
def test_one_candidate_is_greedy(models: Models, draft: str) -> None:
  for n in (2, 18):
    want = models.plain(prompt(n), 20)
    model = drafting(models, draft, prompt(n), want)
    for more in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
      assert model.generate(prompt(n), max_tokens=20, temperature=1.0, seed=3, **more).ids == want

def test_a_perfect_draft_is_accepted_whatever_the_law(models: Models) -> None:
  """The same checkpoint as its own draft: p and q are equal, so nothing may be refused, filters and penalties included."""
  for sampling in ({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40, **PENALISED}):
    for coupled in (False, True):
      reply = models["small"].generate(prompt(9), max_tokens=24, depth=5, seed=4, coupled=coupled, **sampling)
      assert reply.stats.accepted == reply.stats.drafted == [4] * 5
      if coupled: assert reply.ids == models.plain(prompt(9), 24, seed=4, **sampling)

def test_rejection_has_the_law_of_plain_decoding(models: Models) -> None:
  """Three tokens of three candidates each, 250 seeds, a draft that is sometimes right: frequencies of all 27 replies."""
  ids, model, settings = prompt(12, 2), models["drawn"], (1.3, 1.0, 3, 0.0)
  draft, want, seen = model.engine.draft, {}, Counter()
  assert isinstance(draft, Drawn)
  law = lambda more: served(models["none"].logits([*ids, *more])[-1:].astype(np.float64), settings)[0]
  said = [np.zeros(V) for _ in range(2)]
  for a in np.flatnonzero(law([])):
    for b in np.flatnonzero(law([a])):
      said[0][a] = law([])[a]
      said[1][b] += law([])[a] * law([a])[b]
      for c in np.flatnonzero(law([a, b])): want[int(a), int(b), int(c)] = law([])[a] * law([a])[b] * law([a, b])[c]
  for t, mass in zip(draft.logits, said): put(t, np.where(mass > 0, 0.6 * np.log(np.maximum(mass, 1e-9)), -40).astype(np.float32)[None])
  accepted = steps = 0
  for seed in range(250):
    reply = model.generate(ids, max_tokens=3, temperature=1.3, top_k=3, seed=seed, depth=2)
    assert "rule rejection, q realised" in reply.stats.verifier
    seen[tuple(reply.ids)] += 1
    accepted, steps = accepted + sum(reply.stats.accepted), steps + reply.stats.steps
  assert 0.2 < accepted / steps < 1.6 and len(want) == 27 and set(seen) <= set(want)
  assert chi2(np.array([seen[y] for y in want]), np.array(list(want.values()))) < 4

def test_noise_is_keyed_by_use_and_position(models: Models) -> None:
  """A rejection step put together on the host: token i of the draft by the noise of its own position, its uniform number by
  that position's other use, what comes after n tokens by the noise of the position it stands at."""
  ids, depth, model = prompt(12, 2), 3, models["drawn"]
  draft, ops, pos = model.engine.draft, model.engine.target.ops, len(ids) - 1
  assert isinstance(draft, Drawn)
  at = lambda p: Tensor([[p], [0]], dtype=dtypes.int32).realize()
  settings = Tensor(np.array([[1.0, 1.0, 0, 0]], np.float32)).realize()
  law = lambda logits: ops.probs(Tensor(logits.astype(np.float32)).realize(), settings).numpy()
  for i, t in enumerate(draft.logits): put(t, 0.5 * models["none"].logits([*ids, *models.plain(ids, 6)[:i]])[-1:])
  q, stood = np.concatenate([law(t.numpy()) for t in draft.logits[:depth]]), Counter()
  for seed in range(25):
    key = Tensor([[seed, 0]], dtype=dtypes.int32).realize()
    drafted = [int(ops.pick(Tensor(q[i:i + 1]).realize(), key, at(pos), step.DRAFT, i).numpy()[0]) for i in range(depth)]
    p = law(models["none"].logits([*ids, *drafted])[-depth - 1:])
    u = ops.uniforms(key, at(pos), depth, step.ACCEPT).numpy()[0]
    n = next((i for i, t in enumerate(drafted) if not u[i] * q[i][t] < p[i][t]), depth)
    weights = np.maximum(p[n] - q[n], 0) if n < depth else p[n]
    last = int(ops.pick(Tensor(weights[None]).realize(), key, at(pos + n), step.TARGET).numpy()[0])
    block, _ = next(iter(model.stream(ids, max_tokens=20, temperature=1.0, seed=seed, depth=depth)))
    assert block == [*drafted[:n], last], seed
    stood[n] += 1
  assert len(stood) >= 3

# ------------------------------------------------------------------------------------------------ penalties
@pytest.mark.parametrize("draft, coupled", [("auto", False), ("ngram", False), ("small", False), ("mixed", False), ("mixed", True)])
def test_nothing_is_said_twice(models: Models, draft: str, coupled: bool) -> None:
  """Also not inside one accepted block."""
  ids, sampling = prompt(10, 1), {"temperature": 1.0, "seed": 6} if coupled else {}
  for penalty in ({"presence_penalty": 1e9}, {"frequency_penalty": 1e9}):
    plain = models.plain(ids, 60, **penalty, **sampling)
    model = drafting(models, draft, ids, plain)
    reply = model.generate(ids, max_tokens=60, depth=5, coupled=coupled, **penalty, **sampling)
    assert reply.ids == plain and len(set(reply.ids)) == 60
    assert sum(reply.stats.accepted) >= {"small": 50, "mixed": 20}.get(draft, 0)

def test_the_repetition_penalty_counts_the_prompt_too(models: Models) -> None:
  ids = prompt(10, 1)
  plain = models.plain(ids, 40, repetition_penalty=1e9)
  assert len({*plain, *ids}) == 50
  for draft in ("small", "mixed", "auto"):
    assert drafting(models, draft, ids, plain).generate(ids, max_tokens=40, repetition_penalty=1e9).ids == plain

@pytest.mark.parametrize("place", range(6))
def test_a_banned_token_is_not_said_at_any_place(models: Models, place: int) -> None:
  """Place 5 is the bonus after a whole accepted block. One draft knows of the ban, the other drafts the token itself."""
  ids = prompt(11, 3)
  free = models.plain(ids, 12)
  banned = {free[place]: -1e9}
  plain = models.plain(ids, 12, logit_bias=banned)
  assert plain[:place] == free[:place] and free[place] not in plain
  for draft, told in (("small", plain), ("right", plain), ("right", free)):
    reply = drafting(models, draft, ids, told).generate(ids, max_tokens=12, logit_bias=banned, depth=5)
    assert reply.ids == plain
    if told is plain: assert reply.stats.steps == 2
  reply = models["small"].generate(ids, max_tokens=12, logit_bias=banned, depth=5, temperature=1.0, seed=place)
  assert free[place] not in reply.ids and "rejection" in reply.stats.verifier

# ------------------------------------------------------------------------------------------------ where a reply ends
@functools.cache
def distinct(models: Models, n: int = 14) -> tuple[Ids, Ids]:
  """A prompt whose reply begins with n different ids, none of them in it."""
  for seed in range(1000):
    ids = prompt(21, 100 + seed)
    reply = models.plain(ids, n)
    if len({*reply, *ids[-1:]}) == n + 1: return ids, models.plain(ids, n + 6)
  raise AssertionError("no such prompt")

def next_turn(models: Models, model: Model, ids: Ids, reply: Reply, draft: str) -> None:
  """What follows equals a cold run, and only what is new is computed."""
  more = [*ids, *reply.ids, 7, 9, 11]
  want = models.plain(more, 10)
  drafting(models, draft, more, want)
  warm = model.generate(more, max_tokens=10, depth=5)
  assert warm.ids == want and warm.stats.reused_tokens >= len(more) - 4
  forget(model)
  assert model.generate(more, max_tokens=10, depth=5).ids == want

@pytest.mark.parametrize("draft", ["right", "mixed", "wrong", "small", "auto"])
def test_eos_at_every_place(models: Models, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
  ids, want = distinct(models)
  model = drafting(models, draft, ids, want)
  for place in range(8 if draft == "right" else 4):
    drafting(models, draft, ids, want)
    with monkeypatch.context() as patch:
      patch.setattr(model.engine, "config", dataclasses.replace(model.engine.config, eos_token_id=want[place]))
      for most in (place + 1, place + 2, 40):              # the end of the text wins over the limit
        reply = model.generate(ids, max_tokens=most, depth=5)
        assert (reply.ids, reply.finish_reason, reply.stats.tokens) == (want[:place + 1], "stop", place + 1)
      if place: assert model.generate(ids, max_tokens=place, depth=5).finish_reason == "length"
      reply = model.generate(ids, max_tokens=40, depth=5)
    next_turn(models, model, ids, reply, draft)

@pytest.mark.parametrize("draft", ["right", "mixed"])
def test_max_tokens_is_exact(models: Models, draft: str) -> None:
  ids, want = distinct(models)
  for most in range(1, 14):
    model = drafting(models, draft, ids, want)
    stream = model.stream(ids, max_tokens=most, depth=5)
    blocks = [new for new, _ in stream]
    assert (stream.ids, sum(blocks, []), stream.reply.finish_reason, stream.stats.tokens) == (want[:most], want[:most], "length", most)
    assert all(blocks) and len(blocks) == stream.stats.steps
    if most < 8: next_turn(models, model, ids, stream.reply, draft)

@pytest.mark.parametrize("room", range(1, 9))
def test_the_context_ends_inside_a_block(models: Models, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
  ids, want = distinct(models)
  replies = []
  for name in ("none", "right", "wrong"):
    model = models["none"] if name == "none" else drafting(models, name, ids, want)
    monkeypatch.setattr(model.engine, "max_context", len(ids) + room)
    replies.append(model.generate(ids, max_tokens=40, depth=5 if name != "none" else 0))
    assert replies[-1].finish_reason == "context" and replies[-1].ids == want[:len(replies[-1].ids)]
    assert replies[-1].stats.tokens == len(replies[-1].ids) == len(replies[0].ids)
    assert len(model.engine.slot[0].held) == len(ids) + room
    with pytest.raises(ValueError, match="does not fit a context of"): model.generate([*ids, *want[:room]], max_tokens=1)
  assert room <= len(replies[0].ids) <= room + 1

def test_a_reader_may_leave_in_the_middle(models: Models) -> None:
  """After any number of steps: the next call goes on from what the reader saw."""
  ids, want = distinct(models)
  for steps in (1, 2, 3):
    model = drafting(models, "mixed", ids, want)
    stream = model.stream(ids, max_tokens=40, depth=5)
    for _ in itertools.islice(iter(stream), steps): pass
    assert stream.reply.finish_reason == "interrupted" and stream.ids == want[:len(stream.ids)] != []
    next_turn(models, model, ids, stream.reply, "mixed")

class Demo:
  """The shipped checkpoint, which has a tokenizer, with a scripted draft; and a prompt whose reply a stop can cut anywhere."""
  def __init__(self) -> None:
    self.model = load(max_context=CAPACITY, draft="none")
    config, tokenizer = self.model.config, self.model.tokenizer
    assert tokenizer is not None
    self.model.engine.draft = self.draft = Scripted(config.vocab_size, self.model.engine.device)
    self.ids = tokenizer.encode("Tell me a long story about a lighthouse, a letter and the woman who waited.")
    self.want = self.model.generate(self.ids, max_tokens=24, depth=0, logit_bias={config.eos_token_id: -1e9}).ids
    self.text = tokenizer.decode(self.want)
    self.ends = [len(tokenizer.decode(self.want[:i + 1])) for i in range(len(self.want))]  # characters after each token

@pytest.fixture(scope="module")
def demo() -> Demo: return Demo()

@pytest.mark.parametrize("place", range(8))
def test_stop_strings_at_every_place(demo: Demo, place: int) -> None:
  """A stop that ends inside or at the end of the token at this place: ids, text and counts end there, drafting or not."""
  model, start = demo.model, demo.ends[place - 1] if place else 0
  assert start < demo.ends[place]
  stops = [demo.text[max(end - n, 0):end] for end in {start + 1, demo.ends[place]} for n in (1, 2, 5)]
  settings: dict[str, Any] = {"max_tokens": 24, "logit_bias": {model.config.eos_token_id: -1e9}}
  for stop in stops:
    found = demo.text.index(stop)
    last = next(i for i, end in enumerate(demo.ends) if end >= found + len(stop))
    for depth in (0, 5):
      demo.draft.say(len(demo.ids), demo.want)
      stream = model.stream(demo.ids, stop=stop, depth=depth, **settings)
      shown = "".join(text for _, text in stream)
      assert (stream.ids, stream.text, shown) == (demo.want[:last + 1], demo.text[:found], demo.text[:found]), (stop, depth)
      assert (stream.reply.finish_reason, stream.stats.tokens) == ("stop", last + 1)
    more = [*demo.ids, *stream.ids, 7, 9]
    warm = model.generate(more, depth=5, max_tokens=4)
    assert warm.stats.reused_tokens >= len(more) - 3
    forget(model)
    assert model.generate(more, depth=0, max_tokens=4).ids == warm.ids

def test_a_stop_wins_over_the_limit(demo: Demo) -> None:
  demo.draft.say(len(demo.ids), demo.want)
  stop = demo.text[demo.ends[1]:demo.ends[2]]
  reply = demo.model.generate(demo.ids, stop=stop, max_tokens=3, depth=5, logit_bias={demo.model.config.eos_token_id: -1e9})
  assert reply.finish_reason == "stop" and reply.text == demo.text[:demo.text.index(stop)] and len(reply.ids) <= 3

def test_the_shipped_draft() -> None:
  model = load(max_context=CAPACITY)
  if not isinstance(model.engine.draft, DSpark): pytest.skip("this demonstration checkpoint has no draft")
  assert model.tokenizer is not None
  model.self_test()
  accepted = 0
  for text in ("def add(a, b):", "The old lighthouse", "Hello, I am Olga."):
    ids = model.tokenizer.encode(text)
    plain = model.generate(ids, max_tokens=40, depth=0, fixed_width=6).ids
    reply = model.generate(ids, max_tokens=40)
    assert reply.ids == plain
    accepted += sum(reply.stats.accepted)
    sampled: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "top_p": 0.95, "seed": 8}
    assert model.generate(ids, coupled=True, **sampled).ids == model.generate(ids, depth=0, **sampled).ids
  assert accepted > 0

# ------------------------------------------------------------------------------------------------ turns
@pytest.mark.parametrize("draft", ["auto", "small", "ngram", "mixed"])
def test_turns(models: Models, draft: str) -> None:
  """Each turn computes its new ids alone, and says what a cold run says."""
  ids: Ids = []
  model = models["scripted" if draft in SCRIPTS else draft]
  forget(model)
  for turn, (new, most) in enumerate([(prompt(20, 1), 13), (prompt(3, 2), 30), (prompt(1, 3), 1), (prompt(140, 4), 20), (prompt(2, 5), 9)]):
    before, ids = len(ids), [*ids, *new]
    want = models.plain(ids, most)
    reply = drafting(models, draft, ids, want).generate(ids, max_tokens=most)
    assert reply.ids == want and reply.stats.prompt_tokens == len(ids)
    assert before - 1 <= reply.stats.reused_tokens <= before if turn else reply.stats.reused_tokens == 0
    ids += reply.ids
  again = model.generate(ids, max_tokens=3)
  assert again.stats.reused_tokens == len(ids) - 1

def test_a_turn_that_goes_back(models: Models) -> None:
  """Another continuation of the same beginning: what can still be undone is, what can't is computed again."""
  ids, model = prompt(60, 2), models["auto"]
  forget(model)
  model.generate(ids, max_tokens=60, depth=5)
  for keep, reuse in ((59, True), (30, True), (3, False)):
    turn = [*ids[:keep], *prompt(4, 6)]
    reply = model.generate(turn, max_tokens=8, depth=5)
    assert reply.ids == models.plain(turn, 8) and bool(reply.stats.reused_tokens) == reuse, keep
    model.generate(ids, max_tokens=60 if keep > 30 else 90, depth=5)

# ------------------------------------------------------------------------------------------------ what a step is
VARIANTS = [(draft, dict(more)) for draft, more in itertools.product(
  ("auto", "ngram", "small", "mixed"), ((), (("temperature", 1.0),), (("temperature", 1.0), ("coupled", True))))]

@pytest.mark.parametrize("draft, more", VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "greedy")
def test_a_step_is_one_graph_and_one_read(models: Models, draft: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
  """From the third step on: as many kernels as before, nothing captured anew, one transfer, which is the read."""
  ids = prompt(17, 1)
  model = drafting(models, draft, ids, models.plain(ids, 40))
  counts: Counter[str] = Counter()
  for kind, name in ((Buffer, "copy_from"), (Tensor, "numpy")):
    real = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, *a, real=real, name=name: (counts.update([name]), real(self, *a))[1])
  steps = []
  for _ in model.stream(ids, max_tokens=40, seed=2, depth=5, **more):
    graphs = model.engine.graphs
    held = len(model.engine.slot[0].held)
    steps.append((GlobalCounters.kernel_count, dict(counts), [(k, id(g.captured)) for k, g in graphs.items()], held))
  later = [(b[0] - a[0], {k: b[1][k] - a[1][k] for k in b[1]}, a[2] == b[2]) for a, b in itertools.pairwise(steps)][1:]
  assert len(later) >= 5 and all(s == later[0] for s in later)
  assert later[0][0] > 0 and later[0][1:] == ({"copy_from": 1, "numpy": 1}, True)

EAGER = [("auto", {}), ("auto", {"temperature": 1.0, **PENALISED}), ("ngram", {}),
         ("mixed", {"temperature": 1.0, "coupled": True, **PENALISED})]

@pytest.mark.parametrize("draft, more", EAGER, ids=[f"{d}-{'-'.join(m) or 'greedy'}" for d, m in EAGER])
def test_captured_steps_equal_eager_ones(models: Models, draft: str, more: dict[str, Any]) -> None:
  """Three steps, the last two of which replay a graph: tokens, state and cache, bit for bit."""
  ids = prompt(15, 1)
  model = drafting(models, draft, ids, models.plain(ids, 40))
  e, sampling = model.engine, {k: v for k, v in more.items() if k != "coupled"}
  settings = Sampling(**(sampling | {"logit_bias": tuple(sampling.get("logit_bias", {}).items()), "seed": 5}))
  runs = []
  for captured in (True, False):
    fill(model, np.nan)
    run, s = begun(model, ids, settings, coupled="coupled" in more)
    packed = [e.step(run.plan, s)[0][0].copy() if captured else step.run(e.target, e.cache, e.draft, s, run.plan).numpy()[0]
              for _ in range(3)]
    n = len(ids) - 1 + sum(int(p[0]) + 1 for p in packed)
    said = [p[:p[0] + 2] for p in packed]
    state = [t.numpy().copy() for t in (s.at, s.anchor, *([s.counts] if settings.penalised else []))]
    assert state[0].tolist() == [[n], [0]] and state[1].tolist() == [said[-1][-1]]
    runs.append([*said, *state, *visible(model.config, e.cache, n)])
  same(*runs)
  if settings.penalised: assert state[2][0, 1].sum() == sum(len(p) - 1 for p in said)

def begun(model: Model, ids: Ids, sampling: Sampling, depth: int = 5, coupled: bool = False) -> tuple[Run, step.State]:
  """A reply whose prompt is in the cache, and the state of its next step."""
  e = model.engine
  run = e.begin(ids, CAPACITY, sampling, Stats(), depth, coupled)
  for _ in e.prefill(run): pass
  run.plan = dataclasses.replace(run.plan, context=512)
  return run, e.lanes_for([run], run.plan).state

def test_no_captured_kernel_is_given_a_view(models: Models, found_views: list[str]) -> None:
  """Every kind of step, prefill, logits and the draft by itself."""
  laws = ({}, {"temperature": 1.0}, {"temperature": 1.0, **PENALISED})
  for draft, more in itertools.product(("auto", "ngram", "small", "scripted", "none"), laws):
    model = models[draft]
    model.generate(prompt(3), max_tokens=2, **more)
    if more and draft != "none": model.generate(prompt(3), max_tokens=2, coupled=True, **more)
    model.generate(prompt(3), max_tokens=2, depth=0, fixed_width=6)
  for name in ("auto", "small"): models[name].draft_block(prompt(5))
  models["auto"].logits(prompt(40))
  plans = [key[1] for m in models.loaded.values() for key in m.engine.graphs if key[0] == "step"]
  assert {(p.rule, p.penalised, p.depth > 0) for p in plans} >= {
    ("greedy", False, True), ("rejection", False, True), ("rejection", True, True), ("coupled", False, True), ("coupled", True, True),
    ("greedy", False, False), ("coupled", True, False)}
  assert found_views == []

def test_the_search_for_views_finds_one(models: Models, found_views: list[str]) -> None:
  e, before = models["none"].engine, len(found_views)
  wide = Tensor.zeros(1, 8, 4).clone().realize()

  def build() -> Tensor:
    made = (wide[0] + e.fill[0][:1]).contiguous().realize()
    return write_rows(wide, made[4:6].contiguous(), e.fill[0]).realize()
  out = e.graph("test", build)
  assert out is not None and len(found_views) > before
  del found_views[before:], e.graphs["test",]

def test_drafted_rows_do_not_touch_the_first(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
  """Logits of a step's first row with four drafts, one of them of ids that don't exist: the same bits."""
  ids, model = prompt(30, 1), models["scripted"]
  e, logits = model.engine, []
  head = e.target.head
  monkeypatch.setattr(e.target, "head", lambda h, *rest: (logits.append(t := head(h, *rest).realize()), t)[1])
  for told in ([0] * 5, prompt(5, 2), prompt(5, 3), garbage([1] * 5)):
    script(model).say(len(ids), told)
    forget(model)
    run, state = begun(model, ids, Sampling())
    assert run.plan == step.Plan("greedy", 5, 6, 512, False)
    step.run(e.target, e.cache, e.draft, state, run.plan)
  rows = [t.numpy() for t in logits]
  assert len(rows) == 4 and rows[0].shape == (6, V)
  for other in rows[1:]:
    assert other[0].tobytes() == rows[0][0].tobytes() and (other[1:] != rows[0][1:]).any()

# ------------------------------------------------------------------------------------------------ safety
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3, "coupled": True}, {"temperature": 1.0, "seed": 3}],
                         ids=["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("rows", [(0,), (1,), (0, 1, 2, 3, 4)])
def test_nan_logits_of_a_draft(models: Models, sampling: dict[str, Any], rows: tuple[int, ...]) -> None:
  """From the draft's own logits, in the first row, behind an accepted one, in all."""
  ids, model = prompt(14, 1), models["drawn"]
  draft = model.engine.draft
  assert isinstance(draft, Drawn)
  plain = models.plain(ids, 30, **{k: v for k, v in sampling.items() if k != "coupled"})
  for i, t in enumerate(draft.logits): put(t, np.where(i in rows, np.nan, np.eye(V)[[plain[i + 1 - 1]]] * 50).astype(np.float32))
  reply = model.generate(ids, max_tokens=30, depth=5, **sampling)
  assert len(reply.ids) == 30 and all(0 <= t < V for t in reply.ids) and reply.stats.warnings == []
  assert all(reply.stats.accepted[i] == 0 for i in rows)
  if sampling.get("coupled") or not sampling: assert reply.ids == plain
  if rows == (1,) and not sampling: assert reply.stats.accepted[0] > 0

@pytest.mark.parametrize("numerics, value", [("reference", np.nan), ("reference", 3e38), ("w4a8", 255), ("w4a8", 126)])
def test_sick_rings(request: pytest.FixtureRequest, numerics: str, value: float) -> None:
  """Every context row of the block draft spoiled after the prompt, with NaN or with huge numbers: nothing of it reaches the
  reply."""
  models = request.getfixturevalue("models" if numerics == "w4a8" else "precise")
  ids, model = prompt(40, 1), models["auto"]
  want = models.plain(ids, 40)
  for sampling in ({}, {"temperature": 1.0, "seed": 9, "coupled": True}):
    plain = models.plain(ids, 40, **{k: v for k, v in sampling.items() if k != "coupled"})
    model.generate(ids, max_tokens=1)
    assert isinstance(model.engine.draft, DSpark)
    for ring in model.engine.draft.rings: put(ring, np.full(ring.shape, value, np.uint8 if numerics == "w4a8" else np.float32))
    assert (model.draft_block(ids).tokens == -1).all() or value == value
    reply = model.generate(ids, max_tokens=40, **sampling)
    assert reply.stats.reused_tokens == len(ids) - 1 and reply.ids == plain
  fill(model, 0.0)
  assert model.generate(ids, max_tokens=40).ids == want

@pytest.mark.parametrize("kind", ["wrong", "garbage"])
def test_a_useless_draft_is_dropped(models: Models, kind: str) -> None:
  ids = prompt(8, 2)
  want = models.plain(ids, 90)
  told = wrong(want) if kind == "wrong" else [-1, V] * 45
  for most in (64, 90):
    script(models["scripted"]).say(len(ids), told)
    reply = models["scripted"].generate(ids, max_tokens=most, depth=5)
    assert reply.ids == want[:most] and reply.stats.accepted == [0] * 5 and reply.stats.drafted == [64] * 5
    assert reply.stats.warnings == ["drafting stopped: no drafted token was accepted in 64 steps"] and reply.stats.steps == most
  script(models["scripted"]).say(len(ids), [*told[:40], want[40], *told[41:]])
  assert models["scripted"].generate(ids, max_tokens=90, depth=5).stats.warnings == []  # 64 in a row

@pytest.mark.parametrize("answer", [[0, -1, 0, 0], [3, 5, 6, -1], [9, 5, 6, 7], [-4, 5, 6, 7], [1, V, 5, 5], [2, 5, 6, 2 ** 31 - 1]])
@pytest.mark.parametrize("penalty", [{}, {"presence_penalty": 2.0}], ids=["free", "penalised"])
def test_a_step_without_a_usable_answer(models: Models, answer: Ids, penalty: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
  """The fourth step of a drafting engine says nonsense: it is done again without the draft, and the reply goes on."""
  ids = prompt(14, 2)
  want = models.plain(ids, 30, **penalty)
  model = drafting(models, "mixed", ids, want, 3)
  real, calls = model.engine.step, [0]

  def fake(plan: Any, state: Any) -> tuple[Array, Any]:
    (packed, logits), calls[0] = real(plan, state), calls[0] + 1
    return np.array([[*answer, *[0] * (plan.depth - 2)]], np.int32) if calls[0] == 4 else packed, logits
  monkeypatch.setattr(model.engine, "step", fake)
  reply = model.generate(ids, max_tokens=30, depth=5, **penalty)
  assert reply.ids == want and len(reply.stats.warnings) == 1
  at = len(ids) - 1 + sum(a + 1 for a in accepted_of(mixed(want, 3), want, 5)[:3])
  assert reply.stats.warnings == [f"drafting stopped: step 3 at position {at} gave no usable token"]
  assert reply.stats.drafted == [3] * 5

def test_a_target_without_logits_is_an_error(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
  model = models["none"]
  monkeypatch.setattr(model.engine, "step", lambda plan, state: (np.array([[0, -1]], np.int32), None))
  with pytest.raises(ArithmeticError, match="^engine: the logits at position 4 are not finite$"): model.generate(prompt(5), max_tokens=3)

@pytest.mark.parametrize("draft", ["auto", "ngram", "small", "wrong", "none"])
def test_self_test(models: Models, draft: str) -> None:
  assert drafting(models, draft, prompt(1), [9] * 20).engine.self_test() == (0 if draft == "none" else 32)

def test_self_test_finds_a_broken_verifier(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
  """One that lets every drafted token stand."""
  monkeypatch.setattr(verify, "equal", lambda target, drafted: (
    (target[:, 0] * 0, target[:, :1]) if drafted is None
    else (target[:, 0] * 0 + drafted.shape[1], drafted.cat(target[:, -1:], dim=1))))
  with pytest.raises(ArithmeticError, match=r"^self-test: token 0 is \d+ with the draft, \d+ without\. Run with --draft none$"):
    load(models.folder, max_context=CAPACITY).self_test()

# ------------------------------------------------------------------------------------------------ settings
def test_statistics_of_a_known_draft(models: Models) -> None:
  ids = prompt(13, 2)
  want = models.plain(ids, 50)
  model = drafting(models, "mixed", ids, want, 1)
  for depth in DEPTHS:
    stats = model.generate(ids, max_tokens=50, depth=depth).stats
    counts = accepted_of(mixed(want, 1), want, depth)
    counts[-1] = stats.steps + sum(stats.accepted) - sum(c + 1 for c in counts[:-1]) - 1  # beyond what `want` tells
    assert (stats.tokens, stats.steps, stats.drafted) == (50, len(counts), [len(counts)] * depth)
    assert stats.accepted == [sum(c > i for c in counts) for i in range(depth)]
    assert stats.tokens_per_step == (sum(counts) + len(counts)) / len(counts)
    assert stats.acceptance_rate == sum(counts) / (depth * len(counts))
    assert stats.verifier == f"exact, rule greedy, q one-hot, depth {depth} fixed, numerics w4a8 fixed-width"

def test_a_small_draft_must_share_the_vocabulary(models: Models, tmp_path: Path) -> None:
  with pytest.raises(ValueError, match="^demo: vocab_size=2048, want 256. The draft must share the target's vocabulary$"):
    load(models.folder, draft=demo_path(), max_context=64)
  other = tmp_path / "other"
  other.mkdir()
  for f in models.folder.iterdir(): (other / f.name).symlink_to(f)
  (other / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match="^other: tokenizer.json=44136fa355b3, want None. The draft must share the target's vocabulary$"):
    load(models.folder, draft=other, max_context=64)

def test_a_small_draft_of_another_checkpoint(models: Models, shared: Path) -> None:
  """Same vocabulary, unrelated weights, other layers."""
  model = load(models.folder, draft=shared / "golden" / "v4_r16" / "ckpt", max_context=CAPACITY)
  model.engine.config = dataclasses.replace(model.engine.config, eos_token_id=-1)
  for n in (1, 17): assert model.generate(prompt(n), max_tokens=20, depth=1).ids == models.plain(prompt(n), 20)
