"""The DSpark draft against float32 golden values of the official code, and what its rings must survive: any chunk size, NaN
where nothing was written, rows of rejected tokens."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tinygrad import Tensor

from specgrad.api import Model, load
from specgrad.engine import Sampling, put
from specgrad.models.deepseek_v4 import Cache
from specgrad.models.dspark import DSpark

BOUND = 5e-5                                               # what float32 sums in another order may move a logit
LENGTHS = (2, 13, 40)
CAPACITY = 512
SLOT = 1                                                   # of three: where the sequence lives that a test feeds by itself
Array = np.ndarray

class Golden:
  """Every step of the reference: the ids before the block, the token it begins with, and the values by name."""
  def __init__(self, folder: Path):
    self.values = load_file(folder / "dspark_f32.safetensors")
    self.model = load(folder / "ckpt", numerics="reference", max_context=CAPACITY, slots=3)
    draft = self.model.engine.draft
    assert isinstance(draft, DSpark)
    self.draft, self.engine, self.target = draft, self.model.engine, self.model.engine.target
    self.at, self.anchor = ints([[0], [SLOT]]), ints([0])

  def ids(self, n: int) -> list[int]: return [*self.values[f"len{n}.input_ids"].tolist(), *self.values[f"len{n}.greedy_tokens"].tolist()]

  def steps(self, n: int) -> list[tuple[list[int], dict[str, Array]]]:
    """(ids up to and with the anchor, values) in order."""
    found, i = [], 0
    while f"len{n}.step{i}.pos" in self.values:
      prefix = f"len{n}.step{i}."
      at = {k.removeprefix(prefix): v for k, v in self.values.items() if k.startswith(prefix)}
      anchor = int(at["pos"][0]) + 1
      assert self.ids(n)[anchor] == at["anchor"][0]
      found.append((self.ids(n)[:anchor + 1], at))
      i += 1
    return found

@pytest.fixture(scope="module")
def golden(shared: Path) -> Golden: return Golden(shared / "golden" / "dspark_w16")

def near(got: Array, want: Array) -> None:
  assert got.shape == want.shape
  assert np.abs(got - want).max() <= BOUND                 # NaN fails too

def same(got: Array, want: Array) -> None: assert got.tobytes() == want.tobytes()

def ints(values: Any) -> Tensor: return Tensor(np.asarray(values, np.int32)).clone().realize()

def buffers(golden: Golden) -> list[Tensor]: return [*golden.engine.cache.buffers(), *golden.draft.rings]

def fill(golden: Golden, value: float) -> None:
  for b in buffers(golden): put(b, np.full(b.shape, value, np.float32))

def commit(golden: Golden, ids: Sequence[int], start: int = 0, chunk: int = 32) -> None:
  """Target and draft take in ids[start:], in chunks padded to a captured size."""
  for _ in golden.engine.feed(ids, start, chunk, SLOT): pass

def rows(golden: Golden, ids: Sequence[int], pos: int) -> None:
  """The same for rows that are all given."""
  put(golden.engine.fill[0], np.array([[pos], [SLOT]], np.int32))
  put(golden.engine.rows[0][len(ids)], np.array(ids, np.int32))
  golden.engine.chunk(len(ids), CAPACITY)

def propose(golden: Golden, anchor: int, pos: int, depth: int = 5) -> dict[str, Array]:
  """The greedy block, and everything that `observe` sees of it."""
  def build() -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    greedy = lambda logits, row: (golden.target.ops.argmax(logits), None)
    block = golden.draft.propose(golden.anchor, golden.at, depth, greedy, observe=seen.__setitem__)
    assert block.logits is not None and block.confidence is not None and block.probs is None
    seen |= {"tokens": block.tokens, "logits": block.logits.contiguous(), "confidence": block.confidence.contiguous()}
    Tensor.realize(*seen.values())
    return seen
  put(golden.at, np.array([[pos], [SLOT]], np.int32))
  put(golden.anchor, np.array([anchor], np.int32))
  return {name: t.numpy().copy() for name, t in golden.engine.graph("test", build, depth).items()}

def check(seen: dict[str, Array], want: dict[str, Array]) -> None:
  names = ["logits", "confidence", "mtp0.out", "mtp1.out", "mtp2.out", "hc_head", "final_norm", "base_logits"]
  for name in names: near(seen[name], want[name])
  assert [want["anchor"][0], *seen["tokens"]] == want["output_ids"].tolist()

# ------------------------------------------------------------------------------------------------ golden values
def test_every_golden_step_is_used(golden: Golden) -> None:
  assert {k.split(".")[0] for k in golden.values} == {f"len{n}" for n in LENGTHS}
  assert sum(len(golden.steps(n)) for n in LENGTHS) == sum(k.endswith(".output_ids") for k in golden.values) >= 10

@pytest.mark.parametrize("n", LENGTHS)
def test_blocks_through_the_model(golden: Golden, n: int) -> None:
  for ids, want in golden.steps(n):
    block = golden.model.draft_block(ids)
    assert block.logits is not None and block.confidence is not None
    near(block.logits, want["logits"])
    near(block.confidence, want["confidence"])
    assert [ids[-1], *block.tokens.tolist()] == want["output_ids"].tolist()

@pytest.mark.parametrize("n, value", [(2, 0.0), (13, np.nan), (40, np.nan)])
def test_blocks_layer_by_layer(golden: Golden, n: int, value: float) -> None:
  """NaN wherever nothing was written."""
  done = 0
  fill(golden, value)
  for ids, want in golden.steps(n):
    commit(golden, ids[:-1], done)
    done = len(ids) - 1
    check(propose(golden, ids[-1], done), want)
    near(golden.model.logits(ids[:-1])[-1], want["target_logits"])

@pytest.mark.parametrize("n", LENGTHS)
def test_taps_and_context_rows(golden: Golden, n: int) -> None:
  ids, want = golden.steps(n)[0]
  cache = Cache(golden.target.config, CAPACITY, golden.target.devices)
  padded = ints([*ids[:-1], *[0] * (42 - len(ids))])
  _, taps = golden.target.forward_taps(padded, ints([[0], [0]]), cache, CAPACITY, golden.draft.tap_layers)
  assert taps is not None
  held = golden.values[f"len{n}.prefill_main_hidden"]
  near(taps.numpy()[n - len(held):n], held)
  near(taps.numpy()[len(ids) - 2:len(ids) - 1], want["main_hidden"])
  near(golden.draft.context(taps).numpy()[len(ids) - 2:len(ids) - 1], want["main_x"])

# ------------------------------------------------------------------------------------------------ rings
@pytest.mark.parametrize("chunk", [1, 3, 8, 31, 32, 128])
def test_chunks_do_not_matter(golden: Golden, chunk: int) -> None:
  """Committed one token at a time, in any chunks, or all at once: the block is the same, bit for bit."""
  ids, _ = golden.steps(40)[-1]
  blocks = []
  for size in (chunk, 32):
    fill(golden, np.nan)
    commit(golden, ids[:-1], 0, size)
    blocks.append(propose(golden, ids[-1], len(ids) - 1))
  for name, values in blocks[0].items(): same(values, blocks[1][name])

@pytest.mark.parametrize("value", [0.0, np.inf, 3e38])
def test_old_bytes_do_not_matter(golden: Golden, value: float) -> None:
  for ids, want in (golden.steps(2)[0], golden.steps(13)[-1]):
    fill(golden, value)
    commit(golden, ids[:-1])
    check(propose(golden, ids[-1], len(ids) - 1), want)

@pytest.mark.parametrize("count", [8, 32, 128])
def test_rejected_rows_leave_no_trace(golden: Golden, count: int) -> None:
  """Each commit holds rows of which one counts, as after a draft of which nothing stood."""
  (ids, want), rng = golden.steps(40)[-1], np.random.default_rng(count)
  fill(golden, np.nan)
  commit(golden, ids[:25])
  for p in range(25, len(ids) - 1): rows(golden, [ids[p], *rng.integers(0, 256, count - 1).tolist()], p)
  check(propose(golden, ids[-1], len(ids) - 1), want)

def test_a_block_writes_nothing(golden: Golden) -> None:
  ids, _ = golden.steps(13)[0]
  fill(golden, np.nan)
  commit(golden, ids[:-1])
  before = [b.numpy().copy() for b in buffers(golden)]
  propose(golden, ids[-1], len(ids) - 1)
  for b, want in zip(buffers(golden), before, strict=True): same(b.numpy(), want)

def test_the_window_is_anchored_before_the_block(golden: Golden) -> None:
  """Rows of the last `window` positions count and no others, for all rows of a block."""
  window, (ids, _) = golden.draft.config.sliding_window, golden.steps(40)[-1]
  pos = len(ids) - 1
  commit(golden, ids[:-1])
  want, rings = propose(golden, ids[-1], pos)["base_logits"], [r.numpy().copy() for r in golden.draft.rings]

  def without(p: int) -> Array:
    for ring, held in zip(golden.draft.rings, rings):
      changed = held.copy()
      changed[SLOT, p % held.shape[1]] *= -1
      changed[[i for i in range(len(held)) if i != SLOT]] = np.nan
      put(ring, changed)
    return propose(golden, ids[-1], pos)["base_logits"]
  for p in (pos - window - 1, pos, pos + 1, pos + 4): same(without(p), want)
  for p in (pos - window, pos - window + 1, pos - window + 2, pos - 1): assert (without(p) != want).any(1).all(), p

# ------------------------------------------------------------------------------------------------ blocks
@pytest.mark.parametrize("depth", [1, 3])
def test_shorter_blocks(golden: Golden, depth: int) -> None:
  """A block of that many rows: every row still depends on the anchor, and the rows before bias the ones after."""
  ids, _ = golden.steps(13)[-1]
  commit(golden, ids[:-1])
  seen = propose(golden, ids[-1], len(ids) - 1, depth)
  assert seen["tokens"].shape == (depth,) and seen["logits"].shape == (depth, 256) and seen["confidence"].shape == (depth,)
  w1, w2 = (getattr(golden.draft.stages[-1].markov_head, f"markov_{n}").weight.numpy() for n in ("w1", "w2"))
  before = [ids[-1], *seen["tokens"].tolist()][:depth]
  near(seen["logits"], seen["base_logits"] + w1[before] @ w2.T)
  proj = golden.draft.stages[-1].confidence_head.proj.weight.numpy()
  near(seen["confidence"], (np.concatenate([seen["hc_head"], w1[before]], 1) @ proj.T).ravel())
  other = propose(golden, (ids[-1] + 1) % 256, len(ids) - 1, depth)
  assert (other["base_logits"] != seen["base_logits"]).any(1).all()
  assert seen["tokens"].tolist() == seen["logits"].argmax(1).tolist()

def test_the_bias_follows_the_chosen_token(golden: Golden) -> None:
  """Not the likeliest one: what `choose` says is what the next row is told."""
  ids, want = golden.steps(13)[0]
  commit(golden, ids[:-1])
  chosen = [9, 200, 9, 31, 77]
  laws = [np.full((1, 256), i, np.float32) for i in range(5)]
  at, choose = ints([[len(ids) - 1], [SLOT]]), lambda logits, row: (ints([chosen[row]]), Tensor(laws[row]))
  block = golden.draft.propose(ints([ids[-1]]), at, 5, choose)
  w1, w2 = (getattr(golden.draft.stages[-1].markov_head, f"markov_{n}").weight.numpy() for n in ("w1", "w2"))
  assert block.tokens.numpy().tolist() == chosen and block.logits is not None and block.probs is not None and block.confidence is not None
  before = [ids[-1], *chosen[:-1]]
  near(block.logits.numpy(), want["base_logits"] + w1[before] @ w2.T)
  same(block.probs.numpy(), np.concatenate(laws))
  proj = golden.draft.stages[-1].confidence_head.proj.weight.numpy()
  near(block.confidence.numpy(), (np.concatenate([want["hc_head"], w1[before]], 1) @ proj.T).ravel())

def test_depth(golden: Golden) -> None:
  model: Model = golden.model
  ids = golden.ids(13)[:13]
  plain = model.generate(ids, max_tokens=4, depth=0).ids
  for depth in (1, 2, 3, 4, 5): assert model.engine.plan(Sampling(), depth, False, None)[0].depth == depth
  for depth in (1, 5):
    reply = model.generate(ids, max_tokens=4, depth=depth)
    assert reply.ids == plain and len(reply.stats.drafted) == depth and f"depth {depth} " in reply.stats.verifier
  for depth in (-1, 6):
    with pytest.raises(ValueError, match=rf"^engine: depth={depth}, want 0 to 5 \(the draft's block size\)$"):
      model.generate(ids, max_tokens=4, depth=depth)
  assert len(model.generate(ids, max_tokens=4).stats.drafted) == 2  # unless told otherwise, on a CPU

def test_no_draft(shared: Path) -> None:
  model = load(shared / "golden" / "v4_r16" / "ckpt", max_context=64)
  with pytest.raises(ValueError, match=r"^engine: there is no draft, want a checkpoint with DSpark stages or draft=\.\.\.$"):
    model.draft_block([2, 3])
  with pytest.raises(ValueError, match="^engine: depth=1, want 0 to 0: there is no draft$"): model.generate([2, 3], max_tokens=2, depth=1)
