"""The engine on the checkpoint that ships: the same ids however a prompt is fed, turns that reuse what is there, every way a
reply can end, and what a step costs. Nothing here knows what the checkpoint says."""
from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinygrad.device import Buffer
from tinygrad.helpers import GlobalCounters

from specgrad.api import Model, Stream, load
from specgrad.engine import MAX_ROWS, Block, Sampling, Stats, put
from specgrad.tokenizer import Tokenizer

SEEN = 6                                                   # ids of a reply that are compared
Array = np.ndarray

def endless(max_context: int) -> Model:
  """The demonstration model without a draft and without an end: no id is EOS, so that every reply has the length asked for."""
  model = load(draft="none", max_context=max_context)
  ends_with(model, -1)
  return model

def ends_with(model: Model, eos: int) -> None: model.engine.config = dataclasses.replace(model.config, eos_token_id=eos)

@pytest.fixture(scope="module")
def model() -> Model: return endless(1024)

@pytest.fixture(scope="module")
def short() -> Model: return endless(301)                  # a multiple of nothing

@pytest.fixture(scope="module")
def text() -> list[int]: return np.random.default_rng(3).integers(3, 1000, 900).tolist()

def forget(model: Model) -> None:
  """As after loading: nothing is held, and no byte of a cache is worth anything."""
  model.engine.reset()
  for b in model.engine.cache.buffers(): put(b, np.full(b.numpy().nbytes, 255, np.uint8))  # NaN as float32, bfloat16 and e4m3

def cold(model: Model, ids: Sequence[int], n: int = SEEN, **settings: Any) -> list[int]:
  forget(model)
  reply = model.generate(ids, max_tokens=n, **settings)
  assert reply.stats.reused_tokens == 0
  return reply.ids

# ------------------------------------------------------------------------------------------------ prompts of every length
def same_however_fed(model: Model, ids: list[int]) -> None:
  n = len(ids)
  want = cold(model, ids)
  forget(model)
  assert model.logits(ids + want[:-1])[n - 1:].argmax(1).tolist() == want
  for chunk in (1, 7 if n < 64 else 64):
    if n == 1: continue                                    # its one id is the anchor: nothing is prefilled
    forget(model)
    model.logits(ids[:-1], chunk)
    reply = model.generate(ids, max_tokens=SEEN)
    assert (reply.ids, reply.stats.reused_tokens) == (want, n - 1), chunk

@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 300, 385])
def test_prompts_of_every_length(model: Model, text: list[int], n: int) -> None:
  same_however_fed(model, text[:n])

def test_a_reply_across_the_end_of_a_bucket(model: Model, text: list[int]) -> None:
  """Graphs look at 512 positions, then at 2048."""
  ids = text[:500]
  want = cold(model, ids, 30)
  forget(model)
  assert model.logits(ids + want[:-1])[499:].argmax(1).tolist() == want

def test_logits_begin_anew(model: Model, text: list[int]) -> None:
  forget(model)
  want = model.logits(text[:40])
  model.generate(text[:200], max_tokens=3)
  assert model.logits(text[:40]).tobytes() == want.tobytes()
  assert want.shape == (40, model.config.vocab_size) and want.dtype == np.float32

# ------------------------------------------------------------------------------------------------ turns
@pytest.mark.parametrize("sizes", [(50, 20, 9), (3, 1, 1), (130, 5, 140), (1, 2, 30)])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5, "seed": 7}], ids=["greedy", "sampled"])
def test_a_turn_prefills_only_what_is_new(model: Model, text: list[int], sizes: tuple[int, int, int], settings: dict[str, Any]) -> None:
  forget(model)
  first, said, new = sizes
  ids, at = text[:first], first
  warm: list[tuple[list[int], list[int]]] = []
  for turn in range(3):
    reply = model.generate(ids, max_tokens=said, **settings)
    warm.append((ids, reply.ids))
    assert reply.stats.prompt_tokens == len(ids)
    # the newest token of the turn before was never fed
    assert reply.stats.reused_tokens == (len(ids) - new - 1 if turn else 0)
    ids, at = ids + reply.ids + text[at:at + new], at + new
  for ids, reply_ids in warm: assert cold(model, ids, said, **settings) == reply_ids

def test_the_same_prompt_again_is_all_there(model: Model, text: list[int]) -> None:
  want = cold(model, text[:77])
  for _ in range(2):
    reply = model.generate(text[:77], max_tokens=SEEN)
    assert (reply.ids, reply.stats.reused_tokens) == (want, 76)

def test_a_turn_after_eos(model: Model, text: list[int]) -> None:
  """EOS is an id like any other to the next prompt: fed once, at its own place."""
  said = cold(model, text[:30], 40)
  eos = next(t for i, t in enumerate(said) if i >= 3 and t not in said[:i])
  try:
    ends_with(model, eos)
    forget(model)
    reply = model.generate(text[:30], max_tokens=40)
    assert reply.ids == said[:said.index(eos) + 1] and reply.finish_reason == reply.stats.finish_reason == "stop"
    assert eos not in model.engine.slot[0].held
    ids = text[:30] + reply.ids + text[50:55]
    warm = model.generate(ids, max_tokens=SEEN)
    assert warm.stats.reused_tokens == 30 + len(reply.ids) - 1
    assert warm.ids == cold(model, ids)
  finally: ends_with(model, -1)

def test_a_prompt_that_shares_only_its_beginning(model: Model, text: list[int]) -> None:
  """40 of 400: the rings have moved on, so nothing is reused."""
  a, b = text[:400], text[:40] + text[500:560]
  want = cold(model, b)
  forget(model)
  model.generate(a, max_tokens=2)
  reply = model.generate(b, max_tokens=SEEN)
  assert (reply.ids, reply.stats.reused_tokens) == (want, 0)

def test_a_short_rewind_after_a_long_reply(model: Model, text: list[int]) -> None:
  said = cold(model, text[:150], 200)
  held = text[:150] + said
  for kept in (340, 223):
    ids = held[:kept] + [5, 6, 7]
    reply = model.generate(ids, max_tokens=SEEN)
    assert reply.stats.reused_tokens == next(i for i, (x, y) in enumerate(zip([*held, -1], [*ids, -2])) if x != y)
    assert reply.ids == cold(model, ids)
    assert cold(model, text[:150], 200) == said

@pytest.mark.parametrize("back, reused", [(MAX_ROWS, True), (MAX_ROWS + 1, False)])
def test_the_longest_rewind(model: Model, text: list[int], back: int, reused: bool) -> None:
  said = cold(model, text[:230], 60)
  n = model.engine.slot[0].written - back
  assert model.engine.slot[0].written == 230 + 59
  ids = (text[:230] + said)[:n] + [next(t for t in (5, 6) if t != (text[:230] + said)[n])]
  reply = model.generate(ids, max_tokens=SEEN)
  assert reply.stats.reused_tokens == (n if reused else 0)
  assert reply.ids == cold(model, ids)

def test_many_short_rewinds_add_up(model: Model, text: list[int]) -> None:
  """What bounds a rewind is the furthest row ever written, not the last one."""
  forget(model)
  model.generate(text[:300], max_tokens=2)
  for n in (280, 230, 190, 174, 173, 172, 100, 90):
    ids = [*text[:n], 9]
    warm = model.generate(ids, max_tokens=2).ids
    state, slot = [b.numpy().copy() for b in model.engine.cache.buffers()], copy.deepcopy(model.engine.slot[0])
    assert warm == cold(model, ids, 2), n
    for b, old in zip(model.engine.cache.buffers(), state): put(b, old)
    model.engine.slot[0] = slot

# ------------------------------------------------------------------------------------------------ ends
@pytest.mark.parametrize("n", [1, 2, 17])
def test_max_tokens_is_exact(model: Model, text: list[int], n: int) -> None:
  reply = model.generate(text[:20], max_tokens=n)
  assert len(reply.ids) == reply.stats.tokens == reply.stats.steps == n
  assert reply.finish_reason == "length"
  assert reply.stats.ttft > 0 and (reply.stats.seconds > 0) == (n > 1)

def test_eos_at_the_last_token_is_a_stop(model: Model, text: list[int]) -> None:
  said = cold(model, text[:30], 40)
  eos = next(t for i, t in enumerate(said) if i >= 3 and t not in said[:i])
  n = said.index(eos) + 1
  try:
    ends_with(model, eos)
    for most, reason in ((n - 1, "length"), (n, "stop"), (n + 1, "stop")):
      reply = model.generate(text[:30], max_tokens=most)
      assert (reply.ids, reply.finish_reason) == (said[:min(most, n)], reason)
  finally: ends_with(model, -1)

@pytest.mark.parametrize("n", [300, 299, 290, 1])
def test_the_end_of_the_context(model: Model, short: Model, text: list[int], n: int) -> None:
  """301 slots: the last one holds the last id that is fed; the id after it is shown and needs no slot."""
  forget(short)
  reply = short.generate(text[:n], max_tokens=1000)
  assert (len(reply.ids), reply.finish_reason) == (301 - n + 1, "context")
  assert len(short.engine.slot[0].held) == 301
  assert reply.ids == cold(model, text[:n], 301 - n + 1)
  exact = short.generate(text[:n], max_tokens=301 - n + 1)
  assert (exact.ids, exact.finish_reason) == (reply.ids, "length")

def test_no_write_past_the_last_slot(short: Model, text: list[int]) -> None:
  forget(short)
  short.logits(text[:289])
  before = [b.numpy().copy() for b in short.engine.cache.buffers()]
  assert short.generate(text[:290], max_tokens=1000).stats.reused_tokens == 289
  after = iter(b.numpy()[0] for b in short.engine.cache.buffers())
  old = iter(b[0] for b in before)
  fed = np.arange(289, 301)
  for ratio, layer in zip(short.config.compress_ratios, short.engine.cache.layers):
    assert changed(next(old), next(after)) <= set(fed % layer.window.shape[1])  # padding may have held the same id
    for state in filter(None, (layer.compressor, layer.indexer)):
      assert changed(next(old), next(after)) <= set(fed % state.ring.shape[1])
      assert changed(next(old), next(after)) == set(range(289 // ratio, 301 // ratio))

def changed(a: Array, b: Array) -> set[int]: return set(np.flatnonzero((a.view(np.uint8) != b.view(np.uint8)).any(1)).tolist())

def test_a_context_of_two(text: list[int]) -> None:
  tiny = endless(2)
  reply = tiny.generate(text[:1], max_tokens=10)
  assert (len(reply.ids), reply.finish_reason) == (2, "context")
  with pytest.raises(ValueError, match="prompt of 2 tokens does not fit a context of 2 with room"):
    tiny.generate(text[:2], max_tokens=1)

# ------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize("ids, most, message", [
  ([5] * 301, 1, "engine: prompt of 301 tokens does not fit a context of 301 with room for a reply. Shorten it or raise max_context"),
  ([5] * 4000, 1, "engine: prompt of 4000 tokens does not fit a context of 301 with room"), ([], 1, "engine: no ids, want at least one"),
  ([5, 10 ** 6], 1, "engine: id=1000000, want 0 to "), ([-1], 1, "engine: id=-1, want 0 to "),
  ([5], 0, "engine: max_tokens=0, want at least 1"), ([5], -3, "engine: max_tokens=-3, want at least 1")])
def test_refused_prompts(short: Model, text: list[int], ids: list[int], most: int, message: str) -> None:
  """And what is in the cache stays there."""
  want = cold(short, text[:60])
  with pytest.raises(ValueError, match=re.escape(message)): short.generate(ids, max_tokens=most)
  again = short.generate(text[:60], max_tokens=SEEN)
  assert (again.ids, again.stats.reused_tokens) == (want, 59)

def test_refused_logits(short: Model, text: list[int]) -> None:
  assert short.logits(text[:301]).shape[0] == 301
  with pytest.raises(ValueError, match=re.escape("prompt of 302 tokens does not fit a context of 301. Shorten it")):
    short.logits(text[:302])
  with pytest.raises(ValueError, match="chunk=0, want at least 1"): short.logits(text[:3], chunk=0)
  top = short.config.vocab_size - 1
  assert short.logits([0, top]).shape == (2, top + 1)
  with pytest.raises(ValueError, match=f"id={top + 1}, want 0 to {top}"): short.logits([0, top + 1])

@pytest.mark.parametrize("settings, message", [
  ({"temperature": -0.1}, "temperature=-0.1, want 0 to 100"), ({"temperature": float("nan")}, "temperature=nan, want 0 to 100"),
  ({"top_p": 0}, "top_p=0, want above 0, at most 1"), ({"top_p": 1.01}, "top_p=1.01"), ({"top_k": 1.5}, "top_k=1.5"),
  ({"top_k": -1}, "top_k=-1, want 0 or a positive whole number"), ({"min_p": 1.1}, "min_p=1.1, want 0 to 1"),
  ({"seed": -1}, "seed=-1, want 0 to"), ({"seed": 2 ** 64}, "seed=")])
def test_refused_settings(short: Model, settings: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=re.escape(message)): short.generate([5], max_tokens=1, **settings)

def test_refused_contexts() -> None:
  limit = load(draft="none", max_context=2).config.max_position_embeddings
  for wrong in (1, 0, limit + 1):
    with pytest.raises(ValueError, match=f"max_context={wrong}, want 2 to {limit}"): load(draft="none", max_context=wrong)

def test_logits_that_are_not_finite(model: Model, text: list[int]) -> None:
  norm = model.engine.target.w.norm.weight
  sound = norm.numpy().copy()
  want = cold(model, text[:5])
  for temperature in (0.0, 1.0):
    for poison in (np.nan, np.inf):
      sick = sound.copy()
      sick[7] = poison
      put(norm, sick)
      try:
        with pytest.raises(ArithmeticError, match="the logits at position 4 are not finite"):
          model.generate(text[:5], max_tokens=3, temperature=temperature)
      finally: put(norm, sound)
      assert model.generate(text[:5], max_tokens=SEEN).ids == want

# ------------------------------------------------------------------------------------------------ sampling
def test_a_seed_repeats_and_ten_differ(model: Model, text: list[int]) -> None:
  draw = lambda seed: tuple(model.generate(text[:9], max_tokens=20, temperature=3.0, seed=seed).ids)
  seeds = [0, 1, 2, 3, 4, 2 ** 31, 2 ** 32, 2 ** 32 + 1, 2 ** 63, 2 ** 64 - 1]
  replies = [draw(s) for s in seeds]
  assert len(set(replies)) == 10
  assert [draw(s) for s in seeds] == replies
  assert tuple(cold(model, text[:9], 20, temperature=3.0, seed=4)) == replies[4]
  assert draw(None) != draw(None)

@pytest.mark.parametrize("settings", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_one_choice_is_greedy(model: Model, text: list[int], settings: dict[str, Any]) -> None:
  want = model.generate(text[:40], max_tokens=30).ids
  assert model.generate(text[:40], max_tokens=30, **{"temperature": 1.0, **settings}).ids == want

# ------------------------------------------------------------------------------------------------ leaving early
def test_interrupt(model: Model, text: list[int]) -> None:
  want = cold(model, text[:25], 12)
  stream = model.stream(text[:25], max_tokens=12)
  for i, _ in enumerate(stream):
    if i == 2: stream.interrupt()
  reply = stream.reply
  assert (reply.ids, reply.finish_reason, reply.stats.tokens) == (want[:4], "interrupted", 4)  # the step that ran was shown
  again = model.generate(text[:25], max_tokens=12)
  assert (again.ids, again.finish_reason) == (want, "length")

def test_closing_the_iterator(model: Model, text: list[int]) -> None:
  want = cold(model, text[:25], 12)
  other = cold(model, text[100:140])
  for after in (1, 2, 5):
    forget(model)
    stream = model.stream(text[:25], max_tokens=12)
    steps = iter(stream)
    for _ in range(after): next(steps)
    steps.close()
    assert stream.reply.ids == want[:after] and stream.reply.finish_reason == "interrupted"
    again = model.generate(text[:25], max_tokens=12)
    assert (again.ids, again.stats.reused_tokens) == (want, 24)
    assert model.generate(text[100:140], max_tokens=SEEN).ids == other

def test_an_exception_during_prefill(model: Model, text: list[int]) -> None:
  """Ctrl-C between two chunks: what was fed counts, the rest is fed next time."""
  want = cold(model, text[:300])
  forget(model)
  progress = model.engine.progress
  def stop(stage: str, done: int, total: int) -> None:
    if stage == "prefill" and done >= 256: raise KeyboardInterrupt
  model.engine.progress = stop
  try:
    with pytest.raises(KeyboardInterrupt): model.generate(text[:300], max_tokens=1)
  finally: model.engine.progress = progress
  reply = model.generate(text[:300], max_tokens=SEEN)
  assert (reply.ids, reply.stats.reused_tokens) == (want, 256)

# ------------------------------------------------------------------------------------------------ what a step costs
def counted(model: Model, ids: list[int], n: int, **settings: Any) -> tuple[list[int], list[list[str]]]:
  """Kernels and transfers of each step; the first one is left out, which comes after the prefill."""
  kernels, moves, log = [], [], []
  copy_from = Buffer.copy_from
  def logged(self: Buffer, source: Buffer) -> Any:
    log.append(f"{source.device} to {self.device}")
    return copy_from(self, source)
  Buffer.copy_from = logged
  try:
    for _ in model.stream(ids, max_tokens=n, **settings):
      kernels.append(GlobalCounters.kernel_count)
      moves.append(list(log))
      log.clear()
  finally: Buffer.copy_from = copy_from
  return np.diff(kernels).tolist(), moves[1:]

@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "sampled"])
def test_every_step_costs_the_same(model: Model, text: list[int], settings: dict[str, Any]) -> None:
  """A constant number of kernels at every position, one read from the device, nothing written to it, no graph made."""
  model.generate(text[:100], max_tokens=2, **settings)
  captured = {k: g.captured for k, g in model.engine.graphs.items()}
  kernels, moves = counted(model, text[:100], 60, **settings)
  assert len(kernels) == 59 and len(set(kernels)) == 1 and kernels[0] > 0
  assert moves == [["CPU to PYTHON"]] * 59
  assert {k: g.captured for k, g in model.engine.graphs.items()} == captured
  assert counted(model, text[:301], 3, **settings)[0] == kernels[:2]  # no more of them in a longer context

def test_graphs_are_captured_once(model: Model, text: list[int]) -> None:
  events: list[str] = []
  progress, model.engine.progress = model.engine.progress, lambda stage, done, total: events.append(stage)
  try:
    for _ in range(2):
      for n in (1, 5, 30, 100, 130):
        forget(model)
        model.generate(text[:n], max_tokens=3)
        if _ == 0: events.clear()
  finally: model.engine.progress = progress
  assert "compile" not in events and "prefill" in events

def test_progress_ends_where_it_said() -> None:
  events: list[tuple[str, int, int]] = []
  small = load(draft="none", max_context=64, progress=lambda *e: events.append(e))
  loads = [(done, total) for stage, done, total in events if stage == "load"]
  assert loads[-1][0] == loads[-1][1] == loads[0][1] > 0 and loads == sorted(loads)
  events.clear()
  list(small.engine.feed([5] * 40, 0, 8))
  assert [e for e in events if e[0] == "prefill"] == [("prefill", n, 40) for n in (8, 16, 24, 32, 40)]

# ------------------------------------------------------------------------------------------------ text and stop strings
class Script:
  """An engine that says what it is told to, in blocks, as a step with a draft would."""
  def __init__(self, blocks: Sequence[Sequence[int]], eos: int = -1, reason: str = "length"):
    self.blocks, self.config, self.reason = blocks, SimpleNamespace(eos_token_id=eos), reason

  def generate(self, ids: Any, max_tokens: int, sampling: Sampling, stats: Stats, *_: Any) -> Iterator[Block]:
    for i, block in enumerate(self.blocks):
      if i == len(self.blocks) - 1: stats.finish_reason = self.reason
      stats.tokens += len(block)
      yield Block(list(block), None)

def said(tokenizer: Tokenizer, ids: list[int], size: int, stop: Sequence[str], eos: int = -1,
         reason: str = "length") -> tuple[Any, list[str]]:
  blocks = [ids[i:i + size] for i in range(0, len(ids), size)]
  engine: Any = Script(blocks, eos, reason)
  stream = Stream(engine, tokenizer, [0], 1000, Sampling(), tuple(stop))
  shown = [piece for _, piece in stream]
  assert "".join(shown) == stream.reply.text
  assert stream.reply.stats.tokens == len(stream.reply.ids)
  return stream.reply, shown

@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Tokenizer:
  assert model.tokenizer is not None
  return model.tokenizer

SENTENCE = "The answer is 42, and the answer to the next one is 43. Abracadabra!"

@pytest.mark.parametrize("size", [1, 3, 6, 1000])
def test_stop_strings(tokenizer: Tokenizer, size: int) -> None:
  """Every piece of the text as a stop string: it ends before the first occurrence, whatever tokens and blocks it spans,
  and the ids end with the token that completed it."""
  ids = tokenizer.encode(SENTENCE)
  text = [tokenizer.decode(ids[:i]) for i in range(len(ids) + 1)]
  assert text[-1] == SENTENCE
  for length in (1, 2, 3, 5, 11):
    for i in range(len(SENTENCE) - length + 1):
      stop = SENTENCE[i:i + length]
      reply, shown = said(tokenizer, ids, size, [stop])
      want = SENTENCE[:SENTENCE.find(stop)]
      n = next(k for k, t in enumerate(text) if stop in t)
      assert (reply.text, reply.ids, reply.finish_reason) == (want, ids[:n], "stop"), stop

@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_first_of_several_stop_strings(tokenizer: Tokenizer, size: int) -> None:
  ids = tokenizer.encode(SENTENCE)
  for stops, at in ((("43", "42"), "42"), (("Abra", "next", "nowhere"), "next"), (("cadabra", "Abracad"), "Abra"), (("nowhere",), "")):
    for order in (stops, stops[::-1]):
      reply, _ = said(tokenizer, ids, size, order)
      assert reply.text == (SENTENCE[:SENTENCE.find(at)] if at else SENTENCE)
      assert reply.finish_reason == ("stop" if at else "length")

def test_of_two_stop_strings_that_end_together_the_longer_one_counts(tokenizer: Tokenizer) -> None:
  """Both are complete with the same token: the text ends where the first of them begins."""
  ids, tried = tokenizer.encode(SENTENCE), 0
  for end in range(5, len(SENTENCE) + 1):
    stops = SENTENCE[end - 5:end], SENTENCE[end - 2:end]
    if SENTENCE.find(stops[1]) < end - 5: continue         # it ends the text earlier, by itself
    tried += 1
    for order in (stops, stops[::-1]):
      for size in (1, 1000): assert said(tokenizer, ids, size, order)[0].text == SENTENCE[:end - 5]
  assert tried > 20

def test_a_stop_and_a_limit_in_one_block(tokenizer: Tokenizer) -> None:
  """The text ends at the stop string: the reason is the stop, and nothing after it leaks."""
  ids = tokenizer.encode(SENTENCE)
  for reason in ("length", "context", "stop"):
    reply, shown = said(tokenizer, ids, 1000, ["42"], reason=reason)
    assert (reply.text, reply.finish_reason, len(shown)) == ("The answer is ", "stop", 1)

def test_the_beginning_of_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
  ids = tokenizer.encode(SENTENCE)
  stop = SENTENCE[10:] + " never"                          # from there on everything could be its beginning
  reply, shown = said(tokenizer, ids, 1, [stop])
  assert (reply.text, reply.finish_reason) == (SENTENCE, "length")
  assert len("".join(shown[:-1])) <= 10 < len(shown[-1])
  reply, shown = said(tokenizer, [*ids, 1], 1, [stop], eos=1, reason="stop")
  assert (reply.text, reply.ids, reply.finish_reason) == (SENTENCE, [*ids, 1], "stop")

def test_text_never_shows_half_a_character(tokenizer: Tokenizer) -> None:
  words = "naïve 🙂 – 漢字"
  ids = tokenizer.encode(words)
  assert len(ids) > len(words)                             # so that some character has several tokens
  for size in (1, 2, 1000):
    reply, shown = said(tokenizer, ids, size, [])
    assert reply.text == words and not any("\ufffd" in piece for piece in shown)
  cut = next(n for n in range(1, len(ids)) if "\ufffd" in tokenizer.decode(ids[:n]))
  reply, shown = said(tokenizer, ids[:cut], 1, [])
  assert "\ufffd" in (reply.text or "") and not any("\ufffd" in piece for piece in shown[:-1])  # a cut reply says that it is cut

def test_eos_is_not_text(tokenizer: Tokenizer) -> None:
  ids = tokenizer.encode(SENTENCE)
  reply, _ = said(tokenizer, [*ids, 1], 4, [], eos=1, reason="stop")
  assert (reply.text, reply.ids, reply.finish_reason) == (SENTENCE, [*ids, 1], "stop")

def test_stop_strings_on_the_model(model: Model, text: list[int]) -> None:
  """And a turn after it: ids end inside a reply, the cache holds no more than they say."""
  reply = model.generate(text[:30], max_tokens=30)
  assert reply.text and model.tokenizer
  stop = reply.text[len(reply.text) // 2:][:4]
  stopped = model.generate(text[:30], max_tokens=30, stop=[stop])
  assert (stopped.text, stopped.finish_reason) == (reply.text[:reply.text.find(stop)], "stop")
  assert stopped.ids == reply.ids[:len(stopped.ids)] and stop in model.tokenizer.decode(stopped.ids)
  assert stop not in model.tokenizer.decode(stopped.ids[:-1])
  ids = text[:30] + stopped.ids + text[40:45]
  warm = model.generate(ids, max_tokens=SEEN)
  assert warm.stats.reused_tokens == 30 + len(stopped.ids) - 1
  assert warm.ids == cold(model, ids)

def test_refused_stop_strings(model: Model, text: list[int]) -> None:
  with pytest.raises(ValueError, match=re.escape("stop='', want strings of at least one character")):
    model.generate(text[:3], max_tokens=1, stop=["a", ""])
  nameless = Model(model.engine, None)
  with pytest.raises(ValueError, match="stop strings need a tokenizer"): nameless.generate(text[:3], max_tokens=1, stop="a")
  assert nameless.generate(text[:3], max_tokens=1).text is None
