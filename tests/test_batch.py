"""Replies that share an engine: each says what it says alone, whatever runs beside it, joins or leaves; and what a batch does with
requests that are cancelled, sick, too many, or under a mask."""
from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_spec import Drawn, Scripted, found_views, mixed, same, visible
from test_verify import chi2, served
from tinygrad.helpers import GlobalCounters

from specgrad.api import Model, demo_path, load
from specgrad.batch import Batch, Closed, Full, Job
from specgrad.engine import MAX_ROWS, Engine, Mask, Sampling, Stats, Turns, put
from specgrad.models.dspark import DSpark
from specgrad.models.small import SmallDraft

assert found_views                                         # a fixture of this module, too
V, CAPACITY = 256, 580
Array = np.ndarray
Ids = list[int]

def prompt(n: int, seed: int = 0) -> Ids: return np.random.default_rng([n, seed, 5]).integers(2, V, n).tolist()

class Thirds:
  """A token and the one before it never add up to a multiple of three: a third of the vocabulary is forbidden, and which one
  hangs on what was said."""
  def __init__(self, last: int, vocab: int = V): self.last, self.vocab = last, vocab

  def after(self, token: int) -> Array: return (np.arange(self.vocab) + token) % 3 != 0

  def rows(self, drafted: Sequence[int]) -> Array:
    out, last = np.ones((len(drafted) + 1, self.vocab), np.bool_), self.last
    for i, token in enumerate([*drafted, 0]):
      out[i] = self.after(last)
      if not 0 <= token < self.vocab or not out[i, token]: break
      last = token
    return out

  def advance(self, ids: Sequence[int]) -> None: self.last = ids[-1]

@dataclasses.dataclass(frozen=True)
class Ask:
  """A request that can be made again and again."""
  ids: tuple[int, ...]
  n: int
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  masked: bool = False
  logprobs: int | None = None
  ignore_eos: bool = True

  def mask(self) -> Mask | None: return Thirds(self.ids[-1]) if self.masked else None

  def submit(self, batch: Batch) -> Job:
    return batch.submit(self.ids, self.n, self.sampling, ignore_eos=self.ignore_eos, logprobs=self.logprobs, mask=self.mask())

def ask(n: int, most: int, which: int = 0, masked: bool = False, logprobs: int | None = None, **sampling: Any) -> Ask:
  return Ask(tuple(prompt(n, which)), most, Sampling(**{"seed": which, **sampling}), masked, logprobs)

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2,
                             "logit_bias": ((4, 2.0), (9, -1e9))}

class Models:
  """A checkpoint with several drafts and numbers of slots, each loaded when first asked for."""
  def __init__(self, folder: Path):
    self.folder, self.loaded, self.replies = folder, dict[Any, Model](), dict[Any, Any]()

  def __call__(self, draft: str, slots: int = 1) -> Model:
    if (draft, slots) not in self.loaded:                  # those of less than no slots were made by a fixture
      special = {"scripted": Scripted, "drawn": Drawn}.get(draft)
      choice: Any = "none" if special else self.folder if draft == "small" else draft
      model = self.loaded[draft, slots] = load(self.folder, draft=choice, max_context=CAPACITY, slots=slots)
      if special: model.engine.draft = special(V, model.engine.devices, slots)
    return self.loaded[draft, slots]

  def alone(self, draft: str, ask: Ask, depth: int | None = None, coupled: bool = False) -> tuple[Ids, Any]:
    """The reply of an engine that does nothing else, from the engine itself, and its blocks' log probabilities."""
    key = draft, ask, depth, coupled
    if key not in self.replies:
      e = self(draft).engine
      e.reset()
      run = e.begin(ask.ids, ask.n, ask.sampling, Stats(), depth, coupled, None, ask.ignore_eos, ask.mask(), ask.logprobs)
      for _ in e.prefill(run): pass
      blocks = []
      while not run.stats.finish_reason: blocks += e.advance([run])
      assert not run.error
      self.replies[key] = [t for b in blocks for t in b.ids], [p for b in blocks for p in b.logprobs or ()]
    return self.replies[key]

@pytest.fixture(scope="module")
def models(shared: Path) -> Models: return Models(shared / "golden" / "dspark_w16" / "ckpt")

def worked(batch: Batch, jobs: Sequence[Job]) -> list[Ids]:
  """What the jobs say, when all is done."""
  batch.close()
  batch.run()
  return [[t for block in job for t in block.ids] for job in jobs]

def emptied(batch: Batch) -> None:
  """No slot and no request is left."""
  assert not batch.waiting and not batch.slots and sorted(batch.idle) == list(range(batch.engine.slots)) and batch.active == 0

def until(batch: Batch, done: Callable[[], bool], most: int = 300) -> None:
  for _ in range(most):
    if done(): return
    batch.work()
  raise AssertionError("it never came")

def memory(engine: Engine) -> list[Any]:
  """All that remembers sequences, target's and draft's."""
  draft = engine.draft
  more = draft.rings if isinstance(draft, DSpark) else draft.cache.buffers() if isinstance(draft, SmallDraft) else []
  return [*engine.cache.buffers(), *more]

def spoil(engine: Engine, slot: int | None = None) -> None:
  """NaN in every byte of a slot, or of all."""
  for b in memory(engine):
    held = b.numpy().copy()
    held.view(np.uint8)[slice(None) if slot is None else slot] = 255
    put(b, held)

def seen(engine: Engine, n: int, slot: int) -> list[Array]:
  """What later queries of a slot that holds n positions may use, target's and draft's."""
  draft, at = engine.draft, np.arange(max(n - engine.config.sliding_window, 0), n)
  more = [r.numpy()[slot, at % r.shape[1]] for r in draft.rings] if isinstance(draft, DSpark) else []
  if isinstance(draft, SmallDraft): more = visible(draft.model.config, draft.cache, n, slot)
  return [b.copy() for b in [*visible(engine.config, engine.cache, n, slot), *more]]

# ------------------------------------------------------------------------------------------------ equal to a solo run
MIXED = [
  ask(1, 20), ask(17, 9, temperature=0.9, seed=3), ask(40, 30, temperature=1.0, seed=11, top_p=0.9, top_k=40, min_p=0.01),
  ask(130, 5), ask(4, 33, temperature=0.7, seed=2 ** 63 + 1), ask(33, 1), ask(16, 24, seed=1), ask(3, 12, temperature=1.5, seed=4)]
RICH = [
  ask(18, 14, masked=True), ask(5, 20, **PENALTIES), ask(31, 11, temperature=1.0, seed=8, logprobs=3),
  ask(9, 16, masked=True, temperature=0.8, seed=6, **PENALTIES), ask(64, 8, logprobs=0), ask(2, 18, temperature=0.9, seed=5)]

def both(models: Models, draft: str, slots: int, asks: Sequence[Ask], coupled: bool = False) -> list[Job]:
  """Runs them together and compares with each alone."""
  e = models(draft, slots).engine
  e.reset()
  spoil(e)
  batch = Batch(e, coupled=coupled)
  jobs = [a.submit(batch) for a in asks]
  for a, job, ids in zip(asks, jobs, worked(batch, jobs), strict=True):
    assert ids == models.alone(draft, a, coupled=coupled)[0], a
    assert (job.stats.finish_reason, job.stats.tokens, job.stats.warnings) == ("length", a.n, [])
  emptied(batch)
  return jobs

@pytest.mark.parametrize("draft, slots", [("auto", 1), ("auto", 2), ("auto", 4), ("auto", 16), ("none", 4), ("ngram", 4), ("small", 4)])
def test_a_reply_is_what_it_is_alone(models: Models, draft: str, slots: int) -> None:
  """Greedy and drawn, long and short, more of them than slots: they join and leave at every step."""
  asks = MIXED if slots < 16 else [*MIXED, *(dataclasses.replace(a, ids=(*a.ids[1:], 7), n=a.n + 3) for a in MIXED), *RICH[-1:]]
  both(models, draft, slots, asks)

@pytest.mark.parametrize("draft, slots", [("auto", 4), ("ngram", 2)])
def test_masks_penalties_and_logprobs_are_each_replys_own(models: Models, draft: str, slots: int) -> None:
  jobs = both(models, draft, slots, [*RICH, MIXED[1]])
  assert len({str(job.run.plan) for job in jobs}) > 4

@pytest.mark.parametrize("draft", ["auto", "ngram"])
def test_coupled_replies(models: Models, draft: str) -> None:
  """Beside greedy ones; and they say what plain decoding says."""
  asks = [*MIXED[:5], RICH[3]]
  both(models, draft, 4, asks, coupled=True)
  for a in asks: assert models.alone(draft, a, coupled=True)[0] == models.alone("none", a)[0]

def test_greedy_replies_share_the_step_of_coupled_ones(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
  e, asks, steps = models("ngram", 4).engine, [MIXED[0], MIXED[1]], list[set[str]]()
  e.reset()
  real = e.advance
  monkeypatch.setattr(e, "advance", lambda runs, part: (steps.append({r.plan.rule for r in runs}), real(runs, part))[1])
  batch = Batch(e)
  jobs = [a.submit(batch) for a in asks]
  assert worked(batch, jobs) == [models.alone("ngram", a)[0] for a in asks]
  assert steps.count({"greedy", "coupled"}) >= min(job.stats.steps for job in jobs) - 1

@pytest.mark.parametrize("depth", [0, 5])
def test_depths(models: Models, depth: int) -> None:
  e = models("auto", 4).engine
  batch, asks = Batch(e, depth=depth), MIXED[:5]
  jobs = [a.submit(batch) for a in asks]
  for a, job, ids in zip(asks, jobs, worked(batch, jobs)):
    assert ids == models.alone("auto", a, depth)[0] and len(job.stats.drafted) == depth
    assert f"depth {depth} fixed" in job.stats.verifier

def test_a_draft_that_knows_the_reply(models: Models) -> None:
  """Right and wrong by turns, for each sequence something else: any number of tokens stands in any lane of a step."""
  e = models("scripted", 4).engine
  assert isinstance(e.draft, Scripted)
  asks = [ask(n, 40, seed) for seed, n in enumerate((1, 18, 33, 7))]
  for slot, a in enumerate(asks): e.draft.say(len(a.ids), mixed(models.alone("none", a)[0], slot), slot)
  batch = Batch(e, depth=5)
  batch.idle = [0, 1, 2, 3]
  e.reset()
  jobs = [a.submit(batch) for a in asks]
  assert worked(batch, jobs) == [models.alone("none", a)[0] for a in asks]
  assert [job.run.slot for job in jobs] == [0, 1, 2, 3] and len({tuple(job.stats.accepted) for job in jobs}) == 4
  assert all(sum(job.stats.accepted) > 20 for job in jobs)

@pytest.fixture(scope="module")
def four_cores(models: Models) -> Model:
  """As on a CPU of four cores: sixteen slots in four parts, of which each has a thread."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("os.sched_getaffinity", lambda _: range(4), raising=False)
    model = models.loaded["auto", -16] = load(models.folder, max_context=CAPACITY, slots=16)
  assert model.engine.parts == 4
  return model

@pytest.mark.parametrize("rich", [False, True])
def test_parts_that_run_at_the_same_time(models: Models, four_cores: Model, monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
  """More replies than slots; graphs are captured by one thread while others step."""
  e, used = four_cores.engine, dict[int, Counter[int]]()
  e.graphs.clear()
  for name in ("step", "masked_step", "chunk"):
    real = getattr(e, name)
    monkeypatch.setattr(e, name, lambda *args, real=real: (used.setdefault(threading.get_ident(), Counter()).update([0]), real(*args))[1])
  asks = [dataclasses.replace(a, n=a.n + i) for i in range(3) for a in (MIXED + RICH if rich else MIXED)]
  jobs = both(models, "auto", -16, asks)
  assert len(used) == 4 and all(n[0] > 10 for n in used.values())
  slots = [{job.run.slot for job in jobs if job.run.slot % 4 == part} for part in range(4)]
  assert all(len(s) == 4 for s in slots), slots
  assert {key[1] for key in e.lanes} == {0, 1, 2, 3} and all(size <= 4 for size, _ in e.lanes)

def test_parts_share_the_work(models: Models, four_cores: Model) -> None:
  """A request goes where least is to do, unless a slot holds what it begins with."""
  e = four_cores.engine
  e.reset()
  batch = Batch(e)
  jobs = [ask(5, 9, i).submit(batch) for i in range(6)]
  batch.work(2)                                            # whoever comes first gives slots away
  assert [job.run.slot % 4 for job in jobs] == [0, 1, 2, 3, 0, 1] and [len(batch.mine(part)) for part in range(4)] == [2, 2, 1, 1]
  assert [job.stats.steps for job in jobs] == [0, 0, 1, 0, 0, 0]
  batch.finish()
  said = [t for block in jobs[4] for t in block.ids]
  again = Ask((*jobs[4].run.ids, *said, 9), 3).submit(batch)
  batch.work(3)
  assert again.run.slot == jobs[4].run.slot and again.stats.steps == 0
  batch.finish()
  assert again.stats.reused_tokens == len(jobs[4].run.ids) + 8
  emptied(batch)

def test_parts_are_loaded_alike(models: Models, four_cores: Model) -> None:
  """By what is left to do, and a row or two that a slot happens to hold do not count against that."""
  e = four_cores.engine
  e.reset()
  batch = Batch(e)
  ids = prompt(5)
  jobs = [batch.submit(ids, most, Sampling(), ignore_eos=True) for most in (50, 2, 2, 2, 2, 2, 2)]
  batch.work(3)
  assert [job.run.slot % 4 for job in jobs] == [0, 1, 2, 3, 1, 2, 3]
  batch.finish()
  jobs = [batch.submit([*ids[:2], 9, i], 3, Sampling(), ignore_eos=True) for i in range(8)]
  batch.work(0)
  assert sorted(job.run.slot % 4 for job in jobs) == [0, 0, 1, 1, 2, 2, 3, 3]
  batch.finish()
  emptied(batch)

def test_an_interrupt_ends_all_parts(models: Models, four_cores: Model, monkeypatch: pytest.MonkeyPatch) -> None:
  """Ctrl-C reaches the thread that runs the batch: the others end, too, and everyone is told."""
  e = four_cores.engine
  e.reset()
  real = e.advance

  def advance(runs: Any, part: int) -> Any:
    if part == 0: raise KeyboardInterrupt
    return real(runs, part)
  monkeypatch.setattr(e, "advance", advance)
  batch = Batch(e)
  jobs = [ask(5, 400, i).submit(batch) for i in range(8)]
  with pytest.raises(KeyboardInterrupt): batch.run()
  assert all(job.stats.finish_reason == "error" for job in jobs)
  e.reset()

def test_captures_are_alone() -> None:
  """Whoever calls meanwhile waits, and an exception, also while it waits for its turn, lets the others go on."""
  turns, events = Turns(), list[str]()

  def capture() -> None:
    with turns.alone(): events.append("capture")

  def call() -> None:
    with turns.beside(): events.append("call")
  with turns.beside(), turns.beside():
    threads = [threading.Thread(target=capture)]
    threads[0].start()
    while not turns.taken: time.sleep(0.001)
    threads.append(threading.Thread(target=call))
    threads[1].start()
    time.sleep(0.05)
    assert events == []
  for t in threads: t.join(10)
  assert events == ["capture", "call"]
  with pytest.raises(KeyError), turns.alone(): raise KeyError
  turns.changed.wait_for = lambda ready: ready() or (_ for _ in ()).throw(KeyboardInterrupt)   # type: ignore[method-assign, assignment]
  with turns.beside(), pytest.raises(KeyboardInterrupt), turns.alone(): pass
  assert (turns.taken, turns.calls) == (False, 0)

def test_parts_end_together(models: Models, four_cores: Model, monkeypatch: pytest.MonkeyPatch) -> None:
  """When told to, and when one fails: nobody waits for ever, whatever was going on elsewhere."""
  e = four_cores.engine
  for cancel in (True, False):
    e.reset()
    batch = Batch(e)
    jobs = [ask(5, 30 + i, i).submit(batch) for i in range(20)]
    engine = threading.Thread(target=batch.run)
    engine.start()
    next(iter(jobs[0]))
    batch.close(cancel)
    engine.join(60)
    assert not engine.is_alive()
    emptied(batch)
    assert {job.stats.finish_reason for job in jobs[1:]} <= ({"interrupted", "length"} if cancel else {"length"})
  real, steps = e.advance, itertools.count()

  def advance(runs: Any, part: int) -> Any:
    if part == 2 and next(steps) == 5: raise RuntimeError("out of paper")
    return real(runs, part)
  monkeypatch.setattr(e, "advance", advance)
  batch = Batch(e)
  jobs = [ask(5, 60, i).submit(batch) for i in range(20)]
  with pytest.raises(RuntimeError, match="out of paper"): batch.run()
  for job in jobs:
    with pytest.raises(ArithmeticError, match="^engine: RuntimeError: out of paper$"): list(job)
  assert threading.active_count() < 10

@pytest.mark.parametrize("draft", ["auto", "ngram", "none"])
def test_contexts_across_a_border_of_captured_ones(models: Models, draft: str) -> None:
  """512: one is far beyond it, one steps over it, one stays below and is looked at with the others' context."""
  both(models, draft, 4, [ask(540, 24), ask(500, 26, temperature=1.0, seed=3), ask(6, 40), ask(505, 12, temperature=1.0, seed=2)])

def test_the_shipped_checkpoint() -> None:
  """Window 128, ratio 128, more entries than the indexer takes, and EOS; five replies in four slots."""
  one, many = (load(max_context=700, slots=slots) for slots in (1, 4))
  assert one.tokenizer is not None
  text = (demo_path() / "MODEL_CARD.md").read_text()
  asks = [(one.tokenizer.encode(text)[a:b], n, s) for a, b, n, s in (
    (0, 500, 20, {}), (30, 160, 30, {"temperature": 0.8, "seed": 1}), (0, 9, 60, {}), (200, 329, 12, {"temperature": 1.0, "seed": 2}),
    (64, 126, 40, {}))]
  batch = Batch(many.engine)
  jobs = [batch.submit(ids, n, Sampling(**s)) for ids, n, s in asks]
  for (ids, n, s), job, said in zip(asks, jobs, worked(batch, jobs)):
    want = one.generate(ids, max_tokens=n, **s)
    assert (said, job.stats.finish_reason, job.stats.accepted) == (want.ids, want.finish_reason, want.stats.accepted)
  assert sum(sum(job.stats.accepted) for job in jobs) > 20

# ------------------------------------------------------------------------------------------------ slots
def test_prefixes_stay_in_their_slots(models: Models) -> None:
  """Three conversations in three slots, turn by turn in another order: each finds what it left. A fourth takes the slot that
  has been idle longest."""
  e = models("auto", 4).engine
  e.reset()
  spoil(e)
  talks = [prompt(n, 30 + n) for n in (20, 35, 50)]
  home: dict[int, int] = {}
  for turn, order in enumerate([(0, 1, 2), (2, 0, 1), (1, 2, 0)]):
    batch = Batch(e)
    jobs = {i: batch.submit(talks[i], 9, Sampling(), ignore_eos=True) for i in order}
    for i, ids in zip(order, worked(batch, list(jobs.values()))):
      assert ids == models.alone("auto", Ask(tuple(talks[i]), 9))[0]
      assert jobs[i].stats.reused_tokens == (len(talks[i]) - 4 if turn else 0)
      assert home.setdefault(i, jobs[i].run.slot) == jobs[i].run.slot
      talks[i] += [*ids, *prompt(3, turn)]
  assert sorted(home) == [0, 1, 2] and len(set(home.values())) == 3

def test_the_longest_idle_slot_goes_first(models: Models) -> None:
  e = models("auto", 4).engine
  e.reset()
  batch, taken = Batch(e), []
  for seed in range(9):                                    # one after the other, nothing in common
    job = ask(7 + seed, 2, seed).submit(batch)
    until(batch, lambda job=job: job.stats.finish_reason != "")
    taken.append(job.run.slot)
  assert taken == [0, 1, 2, 3, 0, 1, 2, 3, 0]

@pytest.mark.parametrize("draft", ["auto", "small", "ngram"])
def test_lanes_that_nobody_uses_leave_no_trace(models: Models, draft: str) -> None:
  """Three replies in a step of four lanes: the fourth has a slot that holds 530 positions (more than the step looks at), 77, or
  none. Every byte that counts there stays, and the conversation goes on as if nothing had been."""
  e = models(draft, 4).engine
  for n in (530, 77, 1):
    e.reset()
    spoil(e)
    a = ask(n, 3, 40)
    batch = Batch(e)
    (first,) = worked(batch, [a.submit(batch)])
    held = len(e.slot[0].held)
    assert n + 1 <= held <= n + 7 and first == models.alone(draft, a)[0]
    before, batch = seen(e, held, 0), Batch(e)
    batch.idle = [1, 2, 3, 0]
    jobs = [b.submit(batch) for b in (ask(3, 30), ask(20, 30, temperature=1.0, seed=4), ask(12, 25))]
    assert [len(ids) for ids in worked(batch, jobs)] == [30, 30, 25] and {job.run.slot for job in jobs} == {1, 2, 3}
    same(seen(e, held, 0), before)
    assert len(e.slot[0].held) == held
    lanes = e.lanes[4, 0]                                  # nobody's stood still, behind what their slots hold
    at, ends = lanes.state.at.numpy().T.tolist(), [(end, slot) for slot, end in lanes.spare]
    assert (held, 0) in ends and [tuple(x) for x in at[4 - len(ends):]] == ends
    assert (lanes.state.anchor.numpy() == -1).tolist() == [False] * (4 - len(ends)) + [True] * len(ends)
    more = Ask((*a.ids, *first, 8, 6), 5)
    batch = Batch(e)
    job = more.submit(batch)
    assert worked(batch, [job]) == [models.alone(draft, more)[0]] and job.run.slot == 0
    assert job.stats.reused_tokens == n + 2

@pytest.mark.parametrize("draft", ["auto", "small"])
def test_a_slot_that_is_being_filled(models: Models, draft: str) -> None:
  """Its lane is nobody's while the others step between its chunks: the prompt's bytes are those of a prefill alone. The slot held
  129 positions of something else, where that lane stood before."""
  a = ask(400, 6, 41)
  alone, e = models(draft).engine, models(draft, 4).engine
  alone.reset()
  spoil(alone)                                             # rows end with bytes that nobody writes
  for _ in alone.feed(a.ids[:-1], 0): pass
  want = seen(alone, 399, 0)
  e.reset()
  spoil(e)
  batch = Batch(e)
  batch.idle = [3, 0, 1, 2]
  earlier = ask(129, 1).submit(batch)
  until(batch, lambda: earlier.stats.finish_reason != "")
  others = [b.submit(batch) for b in (ask(3, 60), ask(20, 60, temperature=1.0, seed=4), ask(12, 60))]
  until(batch, lambda: all(job.stats.steps for job in others))
  job, steps = a.submit(batch), [other.stats.steps for other in others]
  until(batch, lambda: job.stats.steps == 1)
  assert job.run.slot == 3 and [other.stats.steps for other in others] == [n + 4 for n in steps]
  same(seen(e, 399, 3), want)                              # its own first step went behind that
  until(batch, lambda: bool(job.stats.finish_reason))
  assert [t for b in job for t in b.ids] == models.alone(draft, a)[0]
  worked(batch, [])

def test_a_short_prompt_speaks_at_once(models: Models) -> None:
  """A chunk, or nothing to compute, and the first step follow in one go; the next prompt waits for that."""
  e = models("auto", 4).engine
  e.reset()
  batch = Batch(e)
  jobs = [a.submit(batch) for a in (ask(20, 9, 1), ask(1, 9, 2), ask(129, 9, 3), ask(130, 9, 4))]
  for steps in ([1, 0, 0, 0], [2, 1, 0, 0], [3, 2, 1, 0], [4, 3, 2, 0], [5, 4, 3, 1]):
    batch.work()
    assert [job.stats.steps for job in jobs] == steps
  worked(batch, [])

def test_prompts_of_any_length_come_forward(models: Models) -> None:
  """A short one waits for two chunks of a long one at most, and a long one is not starved by short ones that keep coming."""
  e = models("auto", 4).engine
  e.reset()
  batch = Batch(e)
  long = ask(570, 2, 5).submit(batch)                      # five chunks
  batch.work()
  short = ask(40, 2, 6).submit(batch)
  batch.work()
  batch.work()
  assert short.stats.steps and not long.stats.steps
  for i in range(6):
    assert not long.stats.steps
    ask(30, 1, 10 + i).submit(batch)
    batch.work()
  assert long.stats.steps
  worked(batch, [])

def test_a_long_prompt_holds_the_others_up_by_a_chunk_a_step(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
  """And several prompts wait for each other, not the replies for them."""
  e = models("auto", 4).engine
  e.reset()
  events: list[Any] = []
  for name in ("chunk", "advance"):
    real = getattr(e, name)
    monkeypatch.setattr(e, name, lambda *args, real=real, name=name: (events.append((name, args)), real(*args))[1])
  batch = Batch(e)
  asks = [ask(2, 80), ask(5, 80), ask(500, 4, 1), ask(450, 4, 2)]
  jobs = [a.submit(batch) for a in asks[:2]]
  until(batch, lambda: all(job.stats.steps > 1 for job in jobs))
  events.clear()
  jobs += [a.submit(batch) for a in asks[2:]]
  until(batch, lambda: all(job.stats.steps for job in jobs))
  chunks = [i for i, (name, _) in enumerate(events) if name == "chunk"]
  assert len(chunks) == 4 + 4 and all(args[0] <= MAX_ROWS for name, args in events if name == "chunk")
  for a, b in itertools.pairwise(chunks):
    assert any(name == "advance" and {jobs[0].run, jobs[1].run} <= set(args[0]) for name, args in events[a:b])
  assert worked(batch, jobs) == [models.alone("auto", a)[0] for a in asks]

# ------------------------------------------------------------------------------------------------ cancel, close, refuse
def test_cancel_at_every_stage(models: Models) -> None:
  """While it waits, before its first chunk, between chunks, in the middle of a reply: it ends before the next step, its slot is
  free, and whoever has it next says what they should."""
  e = models("auto", 2).engine
  for stage in ("waiting", "admitted", "filling", "speaking"):
    e.reset()
    spoil(e)
    batch, a = Batch(e), ask(300, 30, 3)
    other = ask(10, 40, 4).submit(batch)
    until(batch, lambda other=other: other.stats.steps > 0)
    blocker = ask(12, 40, 5).submit(batch) if stage == "waiting" else None
    if blocker: until(batch, lambda blocker=blocker: blocker.stats.steps > 0)
    job = a.submit(batch)
    if stage == "waiting": batch.work()
    if stage == "filling": until(batch, lambda: MAX_ROWS <= len(e.slot[1].held) < 299)
    if stage == "speaking": until(batch, lambda job=job: job.stats.steps == 3)
    assert not job.stats.finish_reason and (job in batch.waiting) == (stage in ("waiting", "admitted"))
    steps, before = job.stats.steps, other.stats.steps
    job.cancel()
    batch.work()
    assert (job.stats.finish_reason, job.stats.steps, job.run.error) == ("interrupted", steps, "") and other.stats.steps == before + 1
    assert [t for b in job for t in b.ids] == models.alone("auto", a)[0][:job.stats.tokens]
    assert job not in batch.waiting and job not in batch.slots.values() and batch.active == 1 + (blocker is not None)
    job.cancel()                                           # again, too late
    again = [a, ask(290, 9, 6)]
    jobs = [b.submit(batch) for b in again]
    assert worked(batch, jobs) == [models.alone("auto", b)[0] for b in again]
    assert [t for b in other for t in b.ids] == models.alone("auto", ask(10, 40, 4))[0]
    assert jobs[0].stats.reused_tokens == {"filling": jobs[0].stats.reused_tokens, "speaking": 299}.get(stage, 0)
    assert stage != "filling" or 128 <= jobs[0].stats.reused_tokens < 299
    emptied(batch)

def test_a_queue_has_an_end(models: Models) -> None:
  e = models("auto", 2).engine
  batch = Batch(e, queue=3)
  jobs = [ask(4, 3, i).submit(batch) for i in range(5)]    # two slots, three places
  with pytest.raises(Full, match=r"^batch: 5 requests wait, want at most 3$"): ask(4, 3).submit(batch)
  batch.work()                                             # two have a slot now
  with pytest.raises(Full, match="^batch: 3 requests wait"): ask(4, 3).submit(batch)
  until(batch, lambda: jobs[0].stats.finish_reason != "" and len(batch.waiting) < 3)
  jobs += [ask(4, 3, 9).submit(batch) for _ in range(3 - len(batch.waiting))]
  assert len(jobs) > 5
  with pytest.raises(Full): [ask(4, 3).submit(batch) for _ in range(3)]
  assert all(len(ids) == 3 for ids in worked(batch, jobs))
  with pytest.raises(Closed, match="^batch: it is closing and takes no requests$"): ask(4, 3).submit(batch)
  emptied(batch)
  none = Batch(e, queue=0)
  assert len([ask(4, 3, i).submit(none) for i in range(2)]) == 2
  with pytest.raises(Full): ask(4, 3).submit(none)

def test_first_come_first_served(models: Models) -> None:
  batch = Batch(models("auto", 2).engine)
  jobs = [ask(9, 3, i).submit(batch) for i in range(7)]
  ended: list[Job] = []
  until(batch, lambda: (ended.extend(j for j in jobs if j.stats.finish_reason and j not in ended), len(ended) == 7)[1])
  assert [jobs.index(j) // 2 for j in ended] == sorted(jobs.index(j) // 2 for j in ended)

def test_refused_requests_leave_nothing(models: Models) -> None:
  batch = Batch(models("auto", 2).engine)
  for ids, n, sampling, message in (([], 1, Sampling(), "no ids"), ([5] * CAPACITY, 1, Sampling(), "does not fit a context of"),
                                    ([V], 1, Sampling(), f"id={V}, want 0 to {V - 1}"), ([5], 0, Sampling(), "max_tokens=0"),
                                    ([5], 1, Sampling(logit_bias=((V, 1.0),)), f"logit_bias of id {V}")):
    with pytest.raises(ValueError, match=message): batch.submit(ids, n, sampling)
  emptied(batch)
  for slots in (0, 17):
    with pytest.raises(ValueError, match=f"^engine: slots={slots}, want 1 to 16$"): load(models.folder, slots=slots, max_context=64)

def test_close_and_cancel(models: Models) -> None:
  """What runs, what is being filled and what waits: all of it ends at once."""
  batch = Batch(models("auto", 2).engine)
  jobs = [a.submit(batch) for a in (ask(3, 50), ask(300, 50), ask(4, 50), ask(5, 50))]
  until(batch, lambda: jobs[0].stats.steps > 1)
  batch.close(cancel=True)
  steps = jobs[0].stats.steps
  batch.run()
  assert [job.stats.finish_reason for job in jobs] == ["interrupted"] * 4 and jobs[0].stats.steps == steps
  assert [len(list(job)) > 0 for job in jobs] == [True, False, False, False]
  emptied(batch)

def test_an_engine_that_fails_takes_all_with_it(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
  """Everyone is told, nobody waits for ever."""
  e = models("auto", 2).engine
  batch, real = Batch(e), e.advance
  jobs = [a.submit(batch) for a in (ask(3, 50), ask(4, 50), ask(5, 50))]
  steps = itertools.count()

  def advance(runs: Any, part: int) -> Any:
    if next(steps) == 3: raise RuntimeError("out of paper")
    return real(runs, part)
  monkeypatch.setattr(e, "advance", advance)
  with pytest.raises(RuntimeError, match="out of paper"): batch.run()
  for job in jobs:
    with pytest.raises(ArithmeticError, match="^engine: RuntimeError: out of paper$"): list(job)
    assert job.stats.finish_reason == "error"
  with pytest.raises(Closed): ask(3, 1).submit(batch)

# ------------------------------------------------------------------------------------------------ sick sequences
@pytest.mark.parametrize("draft", ["auto", "none"])
def test_logits_that_are_not_finite_end_one_reply(models: Models, draft: str) -> None:
  """NaN in the slot of one of four, in the middle of its reply: the others do not notice, nor does the slot's next user, even
  with the same prompt."""
  e = models(draft, 4).engine
  e.reset()
  batch, asks = Batch(e), [ask(8, 40, 1), ask(20, 40, 2), ask(3, 40, 3, temperature=1.0), ask(11, 40, 4, temperature=0.8)]
  jobs = [a.submit(batch) for a in asks]
  until(batch, lambda: all(job.stats.steps > 2 for job in jobs))
  spoil(e, jobs[1].run.slot)
  at, told = jobs[1].run.pos, jobs[1].stats.tokens
  until(batch, lambda: bool(jobs[1].stats.finish_reason))
  blocks: Ids = []
  with pytest.raises(ArithmeticError, match=f"^engine: the logits at position {at} are not finite$"):
    for block in jobs[1]: blocks += block.ids
  assert jobs[1].stats.finish_reason == "error" and blocks == models.alone(draft, asks[1])[0][:told]
  assert [w[:17] for w in jobs[1].stats.warnings] == ["drafting stopped:"] * (draft != "none")
  again = dataclasses.replace(asks[1], n=10)
  jobs.append(again.submit(batch))
  ids = worked(batch, [jobs[0], *jobs[2:]])
  assert ids == [models.alone(draft, a)[0] for a in (asks[0], *asks[2:], again)] and jobs[-1].run.slot == jobs[1].run.slot
  emptied(batch)

def test_a_draft_that_is_sick_in_one_lane(models: Models) -> None:
  """Context rows of NaN in one slot of the block draft: its tokens are refused there, and only there."""
  e, asks = models("auto", 4).engine, [ask(8, 30, 1), ask(20, 30, 2), ask(3, 30, 3, temperature=1.0, seed=4)]
  e.reset()
  batch = Batch(e)
  jobs = [a.submit(batch) for a in asks]
  until(batch, lambda: all(job.stats.steps > 1 for job in jobs))
  assert isinstance(e.draft, DSpark)
  for ring in e.draft.rings:
    held = ring.numpy().copy()
    held[jobs[1].run.slot] = 255
    put(ring, held)
  assert worked(batch, jobs) == [models.alone("auto", a)[0] for a in asks]

def test_a_mask_is_asked_about_tokens_alone(models: Models) -> None:
  """What a sick draft proposes is none: a mask hears of the token that the target gets in its place."""
  heard: list[int] = []
  class Strict(Thirds):
    def rows(self, drafted: Sequence[int]) -> Array: return (heard.extend(drafted), super().rows(drafted))[1]
  e, a = models("auto", 4).engine, ask(20, 12, 2, masked=True)
  e.reset()
  batch = Batch(e)
  job = batch.submit(a.ids, a.n, a.sampling, ignore_eos=True, mask=Strict(a.ids[-1]))
  until(batch, lambda: job.stats.steps > 0)
  assert isinstance(e.draft, DSpark) and len(set(heard)) > 1
  for ring in e.draft.rings: put(ring, np.full(ring.shape, 255, np.uint8))
  heard.clear()
  assert worked(batch, [job]) == [models.alone("auto", a)[0]]
  assert heard and set(heard) == {0}

# ------------------------------------------------------------------------------------------------ many
def test_two_hundred_of_everything(models: Models) -> None:
  """Submitted, cancelled and finished in a random order: no slot is lost, no byte either, and no reply says anything else than
  alone."""
  e, rng = models("auto", 4).engine, np.random.default_rng(12)
  e.reset()
  asks = [ask(n, most, 50 + n, **({"temperature": 1.0, "seed": n} if n % 2 else {})) for n, most in
          ((1, 6), (6, 3), (17, 12), (33, 8), (140, 4), (30, 9), (9, 1), (65, 5))]
  batch, open_, done, used = Batch(e, queue=5), list[tuple[Ask, Job]](), list[tuple[Ask, Job]](), []
  submitted = refused = 0
  for i in range(600):
    what = rng.choice(["submit", "cancel", "work", "work", "work"])
    if what == "submit" and submitted < 200:
      a = asks[rng.integers(len(asks))]
      try:
        open_.append((a, a.submit(batch)))
        submitted += 1
      except Full: refused += 1
    elif what == "cancel" and open_ and rng.random() < 0.5: open_[rng.integers(len(open_))][1].cancel()
    else: batch.work()
    done += [x for x in open_ if x[1].stats.finish_reason]
    open_ = [x for x in open_ if not x[1].stats.finish_reason]
    assert len(batch.idle) + len(batch.slots) == 4 and len(batch.waiting) <= 5 + 4 and not set(batch.idle) & set(batch.slots)
    if i % 100 == 99:
      gc.collect()
      used.append(GlobalCounters.mem_used)
  worked(batch, [])
  emptied(batch)
  assert submitted > 90
  for a, job in done + open_:
    ids, want = [t for b in job for t in b.ids], models.alone("auto", a)[0]
    assert ids == (want if job.stats.finish_reason == "length" else want[:len(ids)])
    assert job.stats.finish_reason in ("length", "interrupted")
  reasons = Counter(job.stats.finish_reason for _, job in done + open_)
  assert min(reasons.values()) > 10 and len(set(used[3:])) == 1, (reasons, used)

def test_threads(models: Models) -> None:
  """One runs the engine, ten others ask, read and cancel when they like."""
  e = models("auto", 4).engine
  e.reset()
  batch, asks = Batch(e, queue=100), MIXED[:4] + MIXED[6:]
  want, wrong = [models.alone("auto", a)[0] for a in asks], list[Any]()
  engine = threading.Thread(target=batch.run)

  def client(i: int) -> None:
    try:
      for a, ids in zip(asks[i % 3:], want[i % 3:]):
        job, got = a.submit(batch), Ids()
        for block in job:
          got += block.ids
          if i % 4 == 3 and len(got) > 4: job.cancel()
        ended = job.stats.finish_reason
        if ended == "interrupted" and i % 4 == 3: assert got == ids[:len(got)]
        else: assert (got, ended) == (ids, "length")
    except BaseException as error: wrong.append(error)
  clients = [threading.Thread(target=client, args=(i,)) for i in range(10)]
  for t in (engine, *clients): t.start()
  for t in clients: t.join(120)
  assert not any(t.is_alive() for t in clients) and wrong == []
  batch.close()
  engine.join(20)
  assert not engine.is_alive()
  emptied(batch)

def test_a_warm_batch_captures_nothing(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
  """As a server begins: afterwards no request of the usual kinds waits for a graph, and nothing of the warming is left."""
  e, events = models("auto", 4).engine, list[str]()
  e.graphs.clear()
  batch = Batch(e)
  batch.warm()
  emptied(batch)
  assert all(not slot.held for slot in e.slot)
  monkeypatch.setattr(e, "progress", lambda stage, done, total: events.append(stage))
  jobs = [a.submit(batch) for a in (ask(3, 9), ask(8, 30), ask(2, 12, temperature=1.0, seed=3), ask(5, 20), ask(6, 2), ask(30, 4),
                                    ask(300, 4))]
  assert worked(batch, jobs)[2] == models.alone("auto", ask(2, 12, temperature=1.0, seed=3))[0]
  assert "prefill" in events and "compile" not in events

def test_a_warm_batch_of_parts_captures_nothing(models: Models, four_cores: Model, monkeypatch: pytest.MonkeyPatch) -> None:
  e, events = four_cores.engine, list[str]()
  e.graphs.clear()
  batch = Batch(e)
  batch.warm()
  emptied(batch)
  monkeypatch.setattr(e, "progress", lambda stage, done, total: events.append(stage))
  asks = [dataclasses.replace(a, n=a.n + i) for i in range(4) for a in (*MIXED, ask(260, 3))]
  jobs = [a.submit(batch) for a in asks]
  for a, ids in zip(asks, worked(batch, jobs), strict=True): assert ids == models.alone("auto", a)[0]
  assert "prefill" in events and "compile" not in events

def test_an_idle_engine_waits_and_wakes(models: Models) -> None:
  """It does not spin where there is nothing to do, and a request or the end wakes it."""
  batch, rounds = Batch(models("auto", 2).engine), []
  work = batch.work
  batch.work = lambda part: (rounds.append(0), work(part))[1]       # type: ignore[method-assign]
  engine = threading.Thread(target=batch.run)
  engine.start()
  for _ in range(2):
    assert [t for b in ask(9, 3).submit(batch) for t in b.ids] == models.alone("auto", ask(9, 3))[0]
    time.sleep(0.05)
    n = len(rounds)
    time.sleep(0.2)
    assert len(rounds) == n
  batch.close()
  engine.join(20)
  assert not engine.is_alive()

# ------------------------------------------------------------------------------------------------ log probabilities
@pytest.mark.parametrize("more", [{}, {"temperature": 1.3, "seed": 3, "top_k": 5, **PENALTIES}, {"masked": True}],
                         ids=["greedy", "drawn", "masked"])
def test_log_probabilities_are_the_models_own(models: Models, more: dict[str, Any]) -> None:
  """Of every token, also of those that a draft proposed: log-softmax of the logits there, whatever chose the token."""
  e, a = models("small", 4).engine, ask(14, 30, 9, logprobs=4, **more)
  e.reset()
  batch = Batch(e)
  jobs = [b.submit(batch) for b in (a, ask(9, 40, 2), ask(3, 20, 3, temperature=1.0, seed=1))]
  until(batch, lambda: bool(jobs[0].stats.finish_reason))
  blocks = list(jobs[0])
  worked(batch, [])
  assert any(len(b.ids) > 1 for b in blocks) and sum(jobs[0].stats.accepted) > 5
  assert all(b.logprobs is not None and len(b.logprobs) == len(b.ids) for b in blocks)
  assert all(b.logprobs is None for job in jobs[1:] for b in job)
  ids, said = [t for b in blocks for t in b.ids], [p for b in blocks for p in b.logprobs or ()]
  logits = models("none").logits([*a.ids, *ids])[len(a.ids) - 1:-1].astype(np.float64)
  law = logits - logits.max(1, keepdims=True)
  law -= np.log(np.exp(law).sum(1, keepdims=True))
  for row, token, p in zip(law, ids, said, strict=True):
    assert abs(p.logprob - row[token]) < 1e-6
    best = sorted(range(V), key=lambda t: (-row[t], t))[:4]
    assert [t for t, _ in p.top] == best and max(abs(value - row[t]) for t, value in p.top) < 1e-6

@pytest.mark.parametrize("top", [0, 1, V])
def test_any_number_of_alternatives(models: Models, top: int) -> None:
  batch = Batch(models("none", 4).engine)
  job = ask(5, 2, logprobs=top).submit(batch)
  worked(batch, [])
  for block in job:
    assert block.logprobs and len(block.logprobs[0].top) == top
    values = [p for _, p in block.logprobs[0].top]
    assert values == sorted(values, reverse=True) and (top < V or math.isclose(sum(map(math.exp, values)), 1, abs_tol=1e-6))
    assert top == 0 or block.logprobs[0].top[0] == (block.ids[0], block.logprobs[0].logprob)

# ------------------------------------------------------------------------------------------------ masks
def allowed(a: Ask, ids: Ids) -> list[Array]:
  """What may stand at each place of a reply."""
  return [Thirds(0).after(t) for t in [a.ids[-1], *ids[:-1]]]

@pytest.mark.parametrize("draft", ["small", "auto", "ngram", "none"])
def test_a_masked_reply_takes_the_best_that_is_allowed(models: Models, draft: str) -> None:
  a = ask(15, 40, 4, masked=True)
  ids = models.alone(draft, a, 0 if draft == "none" else 5)[0]
  rows, logits = allowed(a, ids), models("none").logits([*a.ids, *ids])[len(a.ids) - 1:-1]
  assert [int(np.where(ok, row, -np.inf).argmax()) for ok, row in zip(rows, logits)] == ids
  assert any(row.argmax() != t for row, t in zip(logits, ids))  # it did forbid something

def test_drafts_are_accepted_under_a_mask(models: Models) -> None:
  """The same checkpoint drafts without a mask: what it proposes stands wherever the mask lets it, and what stands is told to the
  mask once."""
  e, told = models("small", 4).engine, list[Ids]()
  e.reset()

  class Told(Thirds):
    def advance(self, ids: Sequence[int]) -> None:
      told.append(list(ids))
      super().advance(ids)
  for sampling in (Sampling(), Sampling(1.0, seed=2)):
    told.clear()
    batch, ids = Batch(e), tuple(prompt(15, 4))
    jobs = [batch.submit(ids, 60, sampling, ignore_eos=True, mask=Told(ids[-1])), *(ask(n, 60, n).submit(batch) for n in (3, 30))]
    out, *others = worked(batch, jobs)
    assert [t for block in told for t in block] == out and all(ok[t] for ok, t in zip(allowed(Ask(ids, 60), out), out))
    stats = jobs[0].stats
    assert 0.2 < stats.acceptance_rate < 0.95 and stats.steps < 45
    assert others == [models.alone("small", ask(n, 60, n))[0] for n in (3, 30)]

class Few:
  """Four tokens may be said, and never the same one twice in a row."""
  IDS = (3, 77, 130, 201)

  def __init__(self) -> None: self.last = -1

  def after(self, token: int) -> Array:
    ok = np.zeros(V, np.bool_)
    ok[[t for t in self.IDS if t != token]] = True
    return ok

  def rows(self, drafted: Sequence[int]) -> Array:
    out, last = np.ones((len(drafted) + 1, V), np.bool_), self.last
    for i, token in enumerate([*drafted, 0]):
      out[i] = self.after(last)
      if not 0 <= token < V or not out[i, token]: break
      last = token
    return out

  def advance(self, ids: Sequence[int]) -> None: self.last = ids[-1]

def test_the_law_under_a_mask(models: Models) -> None:
  """Three tokens of four (then three) candidates, 400 seeds in sixteen slots, a draft that is drawn from something else and knows of
  no mask: frequencies of all 36 replies are those of the target's law over what is allowed."""
  e, ids, settings = models("drawn", 16).engine, prompt(12, 2), (1.2, 1.0, 0, 0.0)
  assert isinstance(e.draft, Drawn)
  few, want, seen = Few(), dict[Any, float](), Counter[Any]()

  def law(before: Sequence[int]) -> Array:
    row = models("none").logits([*ids, *before])[-1:].astype(np.float64)
    return served(np.where(few.after(before[-1] if before else -1), row, -np.inf), settings)[0]
  for a in Few.IDS:
    for b in Few.IDS:
      for c in Few.IDS:
        if a != b != c: want[a, b, c] = law([])[a] * law([a])[b] * law([a, b])[c]
  assert len(want) == 36 and math.isclose(sum(want.values()), 1)
  rng = np.random.default_rng(4)
  for t in e.draft.logits:
    told = np.full((16, V), -30, np.float32)
    told[:, [*Few.IDS, 50]] = rng.normal(0, 1, 5) + [0, 0, 0, 0, -1]
    put(t, told)
  batch = Batch(e, queue=400, depth=2)
  jobs = [batch.submit(ids, 3, Sampling(1.2, seed=seed), ignore_eos=True, mask=Few()) for seed in range(400)]
  for said in worked(batch, jobs): seen[tuple(said)] += 1
  assert set(seen) <= set(want)
  assert 0.2 < sum(sum(job.stats.accepted) for job in jobs) / 400 < 1.8
  assert chi2(np.array([seen[y] for y in want]), np.array(list(want.values()))) < 4

def test_no_mask_is_not_a_mask(models: Models) -> None:
  """A reply beside a masked one takes another way through the same step, and says the same."""
  class All(Thirds):
    def after(self, token: int) -> Array: return np.ones(V, np.bool_)
  for sampling in (Sampling(), Sampling(1.0, seed=3)):
    e, a = models("auto", 2).engine, Ask(tuple(prompt(10, 3)), 20, sampling)
    batch = Batch(e)
    jobs = [batch.submit(a.ids, a.n, sampling, ignore_eos=True, mask=All(0)), a.submit(batch)]
    assert worked(batch, jobs) == [models.alone("auto", a)[0]] * 2

# ------------------------------------------------------------------------------------------------ what a step is
def test_graphs_are_few_and_hold_no_view(models: Models, found_views: list[str]) -> None:
  """Of all that ran in this module. A step is captured for 1, 4, 8 and 16 sequences, or as many as there are slots."""
  names, found = {"step", "propose", "settle"}, set[str]()
  for m in models.loaded.values():
    keys, slots = [key for key in m.engine.graphs if key[0] in names], m.engine.slots
    whole = {slots} | {len(range(part, slots, m.engine.parts)) for part in range(m.engine.parts)}
    assert {key[2] for key in keys} <= {n for n in (1, 4, 8, 16) if n <= slots} | whole
    found |= {key[0] for key in keys}
  assert found == names and found_views == []

