"""The verifier's law, by enumeration: every drafted block, both ends of every interval in which a uniform number decides the
same, and the weights of what comes after. What is emitted must have the target's law to 1e-12; wrong variants must not."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes

from specgrad.quant import cpu, twin
from specgrad.spec import verify
from specgrad.spec.step import ACCEPT, DRAFT, TARGET, penalise

EXACT = 1e-12
MARK = 77                                                  # stands for the token after the accepted ones
Array = np.ndarray
Prefix = tuple[int, ...]
Law = dict[Prefix, Array]                                  # what was drawn so far -> law of the next token, float64 (V,)
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

def memory(t: Tensor) -> Array:
  """The tensor's own memory, to write inputs into and to read results from."""
  dtype = {dtypes.float64: np.float64, dtypes.int32: np.int32}[t.dtype]
  return np.frombuffer(t._buffer().as_memoryview(allow_zero_copy=True), dtype).reshape(t.shape)

def empty(*shape: int, dtype: Any = dtypes.float64) -> Tensor: return Tensor.zeros(*shape, dtype=dtype).clone().realize()

class Captured:
  """A function of a batch captured once, called with the arrays of one sequence: -> its outputs as one float64 vector. The
  batch has two sequences, and the second is that of the call before: its outputs must be what they were."""
  def __init__(self, fxn: Callable[..., tuple[Tensor, ...]], *inputs: Tensor):
    """Inputs without the batch's axis."""
    both = [t.expand(2, *t.shape).clone().realize() for t in inputs]
    self.inputs, self.last = [memory(t) for t in both], None
    join = lambda *outs: Tensor.cat(*[t.cast(dtypes.float64).reshape(2, -1) for t in outs], dim=1).contiguous().realize()
    self.jit = TinyJit(lambda: join(*fxn(*both)))
    self.jit.cnt = 1

  def __call__(self, *values: Any) -> Array:
    for held, value in zip(self.inputs, values, strict=True): held[1], held[0] = held[0].copy(), value
    out, before = memory(self.jit()).copy()
    assert self.last is None or np.array_equal(before, self.last, equal_nan=True)
    self.last = out
    return out

class Judged(NamedTuple):
  n: int
  tokens: list[int]
  weights: Array

class Judge:
  """verify.rejection (or a wrong variant of it) and verify.emitted for K tokens out of V, in float64."""
  def __init__(self, V: int, K: int, rule: Rule = verify.rejection):
    self.V, self.K = V, K
    mark = Tensor([MARK, MARK], dtype=dtypes.int32).realize()

    def run(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, ...]:
      n, weights = rule(p, x, q, u)
      n = n.contiguous().realize()
      return n, verify.emitted(n, x, mark), weights
    self.run = Captured(run, empty(K + 1, V), empty(K, dtype=dtypes.int32), empty(K, V), empty(K))

  def __call__(self, p: Any, x: Any, q: Any, u: Any) -> Judged:
    out = self.run(p, x, q, u)
    return Judged(int(out[0]), out[1:self.K + 2].astype(int).tolist(), out[self.K + 2:])

@pytest.fixture(scope="module")
def judges() -> dict[tuple[int, int], Judge]: return {}

def judge_of(judges: dict[tuple[int, int], Judge], V: int, K: int) -> Judge:
  if (V, K) not in judges: judges[V, K] = Judge(V, K)
  return judges[V, K]

# ------------------------------------------------------------------------------------------------ laws
def softmax(logits: Array) -> Array:
  e = np.exp(logits - logits.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)

def prefixes(V: int, longest: int) -> list[Prefix]:
  return [x for k in range(longest + 1) for x in itertools.product(range(V), repeat=k)]

def random_law(rng: np.random.Generator, V: int, longest: int, zeros: float = 0.0) -> Law:
  """A law of its own after every prefix; with zeros, tokens that can't come."""
  law = {}
  for x in prefixes(V, longest):
    row = rng.dirichlet(np.full(V, 0.7))
    row[(rng.random(V) < zeros) & (np.arange(V) != rng.integers(V))] = 0
    law[x] = row / row.sum()
  return law

def one_hot_law(rng: np.random.Generator, V: int, longest: int) -> Law:
  return {x: np.eye(V)[rng.integers(V)] for x in prefixes(V, longest)}

def joint(p: Law, V: int, K: int, start: Prefix = ()) -> Array:
  """Plain decoding: the law of tokens len(start)..K, shape (V,) * (K + 1 - len(start))."""
  if len(start) == K: return p[start]
  return np.stack([p[start][t] * joint(p, V, K, (*start, t)) for t in range(V)])

def continued(mass: dict[Prefix, float], p: Law, V: int, K: int) -> Array:
  """The law of K+1 tokens where steps emitted `mass` and plain decoding went on from there."""
  out = np.zeros((V,) * (K + 1))
  for y, weight in mass.items(): out[y] += weight * (joint(p, V, K, y) if len(y) <= K else 1)
  return out

def distance(a: Array, b: Array) -> float: return float(np.abs(a - b).sum() / 2)

def nodes(p: float, q: float, few: bool) -> list[tuple[float, float]]:
  """(uniform, its share): both ends of the interval where `u * q < p` holds and of the one where it does not."""
  edge = min(p / q, 1.0)
  yes, no = [0.0, edge * (1 - 1e-9)], [edge * (1 + 1e-9), 1 - 2.0 ** -25]
  if few: yes, no = [edge * 0.5], [(1 + edge) / 2]
  return [(u, edge / len(yes)) for u in yes if edge > 0] + [(u, (1 - edge) / len(no)) for u in no if edge < 1]

def emitted_law(judge: Judge, p: Law, q: Law, recorded: Law | None = None, shown: Law | None = None, few: bool = False) -> Array:
  """The law of K+1 tokens after one step of speculation: drafts drawn from q, judged by what was recorded of q and by what
  was shown of p (both: the truth), continued by plain decoding."""
  V, K, recorded, shown = judge.V, judge.K, recorded or q, shown or p
  mass: dict[Prefix, float] = {}
  for x in itertools.product(range(V), repeat=K):
    chance = math.prod(q[x[:k]][x[k]] for k in range(K))
    if not chance: continue
    ps, qs = [shown[x[:k]] for k in range(K + 1)], [recorded[x[:k]] for k in range(K)]
    for choice in itertools.product(*[nodes(ps[k][x[k]], qs[k][x[k]], few) for k in range(K)]):
      share = chance * math.prod(s for _, s in choice)
      n, tokens, weights = judge(ps, x, qs, [u for u, _ in choice])
      assert tokens[:n] == list(x[:n]) and tokens[n] == MARK and (weights >= 0).all()
      for t in np.flatnonzero(weights): mass[*x[:n], int(t)] = mass.get((*x[:n], int(t)), 0) + share * weights[t] / weights.sum()
  return continued(mass, p, V, K)

# ------------------------------------------------------------------------------------------------ rejection
SIZES = [(2, 1, False), (6, 1, False), (3, 2, False), (6, 2, False), (2, 3, False), (3, 3, False)]

KINDS = ("dense", "zeros", "one-hot draft", "one-hot target")

@pytest.mark.parametrize("V, K, few, kind", [*((*size, kind) for size in SIZES for kind in KINDS),
                                             *((6, 3, True, kind) for kind in ("dense", "one-hot draft"))])
def test_rejection_keeps_the_law(judges: dict[Any, Judge], V: int, K: int, few: bool, kind: str) -> None:
  rng = np.random.default_rng([V, K])
  zeros = 0.4 if kind == "zeros" else 0
  p = one_hot_law(rng, V, K) if kind == "one-hot target" else random_law(rng, V, K, zeros)
  q = one_hot_law(rng, V, K - 1) if kind == "one-hot draft" else random_law(rng, V, K - 1, zeros)
  assert distance(emitted_law(judge_of(judges, V, K), p, q, few=few), joint(p, V, K)) < EXACT

def test_a_perfect_draft_is_always_accepted(judges: dict[Any, Judge]) -> None:
  p = random_law(np.random.default_rng(4), 3, 2, 0.3)
  judge = judge_of(judges, 3, 2)
  assert distance(emitted_law(judge, p, p), joint(p, 3, 2)) < EXACT
  for x in itertools.product(range(3), repeat=2):
    if p[()][x[0]] * p[x[:1]][x[1]]:
      ps = [p[x[:k]] for k in range(3)]
      n, _, weights = judge(ps, x, ps[:2], [1 - 2.0 ** -25] * 2)
      assert n == 2 and (weights == ps[2]).all()

# temperature, top_p, top_k, min_p
FILTERS = [(1.0, 1.0, 0, 0.0), (0.6, 1.0, 0, 0.0), (1.7, 1.0, 3, 0.0), (1.0, 0.7, 0, 0.0), (1.0, 1.0, 0, 0.3), (0.8, 0.9, 3, 0.1),
           (1.0, 1.0, 1, 0.0)]

def served(logits: Array, settings: tuple[float, ...]) -> Array:
  """float64 (n, V): the law that a request with these settings asks for. Equals of the last one kept stay."""
  temperature, top_p, top_k, min_p = settings
  out = []
  for row in logits:
    keep = np.ones(len(row), bool)
    if top_k: keep &= row >= np.sort(row)[-int(top_k)]
    w = np.where(keep, np.exp((row - row.max()) / temperature), 0)
    if top_p < 1:
      order = np.argsort(-w, kind="stable")
      needed = order[:int((np.cumsum(w[order]) < top_p * w.sum()).sum()) + 1]
      keep &= w >= w[needed].min()
    w = np.where(keep & (w >= min_p), w, 0)
    out.append(w / w.sum())
  return np.stack(out)

def served_law(logits: dict[Prefix, Array], settings: tuple[float, ...]) -> Law:
  """Computed by the package, compared with its definition, and taken as the truth from there on."""
  rows = np.zeros((64, len(logits[()])))                   # one shape for all
  rows[:len(logits)] = list(logits.values())
  law = twin.probs(Tensor(rows), Tensor(np.array([settings]))).numpy()[:len(logits)]
  assert np.abs(law - served(rows[:len(logits)], settings)).max() < 1e-13
  return dict(zip(logits, law, strict=True))

@pytest.mark.parametrize("settings", FILTERS)
@pytest.mark.parametrize("V, K", [(4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("draft", ["filtered alike", "unfiltered"])
def test_rejection_keeps_the_served_law(judges: dict[Any, Judge], settings: tuple[float, ...], V: int, K: int, draft: str) -> None:
  """The law after temperature, top-k, top-p and min-p, whether or not the draft was drawn through the same filters."""
  rng = np.random.default_rng([V, K])
  p = served_law({x: rng.normal(0, 1.5, V) for x in prefixes(V, K)}, settings)
  q = served_law({x: rng.normal(0, 1.5, V) for x in prefixes(V, K - 1)}, settings if draft == "filtered alike" else FILTERS[0])
  assert distance(emitted_law(judge_of(judges, V, K), p, q, few=V ** K > 16), joint(p, V, K)) < EXACT

# ------------------------------------------------------------------------------------------------ wrong variants
def at_row(x: Tensor, n: Tensor) -> Tensor:
  """(B, R, V), int32 (B,) -> (B, V): row n of each sequence."""
  return x[Tensor.arange(x.shape[0], dtype=dtypes.int32), n]

def bonus_from_q(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
  n, weights = verify.rejection(p, x, q, u)
  return n, (n == q.shape[1]).reshape(-1, 1).where(q[:, -1], weights)

def lenient(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]: return verify.rejection(p, x, q, u * 0.95)

def residual_from_p(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
  n, _ = verify.rejection(p, x, q, u)
  return n, at_row(p, n)

def unlikely_drafts_dropped(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
  """The block ends before the first token whose own q is small, as if nothing had been drafted there."""
  n, weights = verify.rejection(p, x, q, u)
  end = verify.accepted(q.gather(2, x.unsqueeze(-1)).squeeze(-1) > 0.3)
  return n.minimum(end), ((n >= end) & (end < q.shape[1])).reshape(-1, 1).where(at_row(p, end), weights)

def not_strict(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]: return verify.rejection(p, x, q, u - 1e-15)

def one_uniform(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
  return verify.rejection(p, x, q, u[:, :1].expand(u.shape))

def row_after(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
  n, weights = verify.rejection(p, x, q, u)
  return n, (n == q.shape[1]).reshape(-1, 1).where(p[:, -2], weights)

WRONG: list[Rule] = [bonus_from_q, lenient, residual_from_p, unlikely_drafts_dropped, not_strict, one_uniform, row_after]

@pytest.mark.parametrize("rule", WRONG, ids=lambda r: r.__name__)
def test_wrong_rules_are_caught(rule: Rule) -> None:
  rng = np.random.default_rng(8)
  p, q = random_law(rng, 3, 2, 0.3), random_law(rng, 3, 1)
  assert distance(emitted_law(Judge(3, 2, rule), p, q), joint(p, 3, 2)) > 1e-3

def neighbours_weights(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
  n, weights = verify.rejection(p, x, q, u)
  return n, weights.flip(0)

def neighbours_row(p: Tensor, x: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
  n, weights = verify.rejection(p, x, q, u)
  return n, (n == q.shape[1]).reshape(-1, 1).where(p[:1, -1], weights)

@pytest.mark.parametrize("rule", [neighbours_weights, neighbours_row], ids=lambda r: r.__name__)
def test_what_a_neighbour_changes_is_caught(rule: Rule) -> None:
  rng = np.random.default_rng(8)
  with pytest.raises(AssertionError): emitted_law(Judge(3, 2, rule), random_law(rng, 3, 2, 0.3), random_law(rng, 3, 1))

@pytest.mark.parametrize("what", ["no bias of the token before", "another temperature", "before top-k", "bonus row unfiltered",
                                  "one row late"])
def test_wrong_records_are_caught(judges: dict[Any, Judge], what: str) -> None:
  """The rule is right and what it is told is not."""
  V, K, rng = 3, 2, np.random.default_rng(9)
  judge = judge_of(judges, V, K)
  logits = {x: rng.normal(0, 1, V) for x in prefixes(V, K)}
  p, base, bias = served_law(logits, FILTERS[0]), rng.normal(0, 0.5, (K, V)), rng.normal(0, 0.7, (V, V))
  shown, drafted = p, {x: base[len(x)] + (bias[x[-1]] if x else bias[0]) for x in prefixes(V, K - 1)}
  q = served_law(drafted, FILTERS[0])
  if what == "no bias of the token before": recorded = {x: softmax(base[len(x)]) for x in q}
  elif what == "another temperature": recorded = served_law(drafted, FILTERS[1])
  elif what == "before top-k": recorded, q = q, served_law(drafted, (1.0, 1.0, 2, 0.0))
  elif what == "one row late": recorded = {x: q[x[:-1]] for x in q}
  else:
    recorded, p = q, served_law(logits, (1.0, 1.0, 2, 0.0))
    shown = {x: shown[x] if len(x) == K else p[x] for x in shown}
  assert distance(emitted_law(judge, p, q), joint(p, V, K)) < EXACT
  assert distance(emitted_law(judge, p, q, recorded, shown), joint(p, V, K)) > 1e-3

# ------------------------------------------------------------------------------------------------ equal
def equal_laws(V: int, K: int, p: Law, run: Captured) -> Iterator[Array]:
  """For every block that could have been drafted, however it was: the law of K+1 tokens."""
  for x in itertools.product(range(V), repeat=K):
    mass: dict[Prefix, float] = {}
    for y in itertools.product(range(V), repeat=K + 1):    # the target's token after each row, were x[:k] the truth
      if share := math.prod(p[x[:k]][y[k]] for k in range(K + 1)):
        n, *tokens = run(y, x).astype(int).tolist()
        mass[tuple(tokens[:n + 1])] = mass.get(tuple(tokens[:n + 1]), 0) + share
    yield continued(mass, p, V, K)

def equal(V: int, K: int, rule: Any = verify.equal) -> Captured:
  return Captured(rule, empty(K + 1, dtype=dtypes.int32), empty(K, dtype=dtypes.int32))

@pytest.mark.parametrize("V, K", [(6, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("kind", ["drawn", "greedy", "filtered"])
def test_equal_keeps_the_law_for_every_block(V: int, K: int, kind: str) -> None:
  rng = np.random.default_rng([V, K])
  if kind == "greedy": p = one_hot_law(rng, V, K)
  elif kind == "drawn": p = random_law(rng, V, K, 0.2)
  else: p = served_law({x: rng.normal(0, 1.5, V) for x in prefixes(V, K)}, (0.8, 0.9, 2, 0.1))
  laws = list(equal_laws(V, K, p, equal(V, K)))
  assert len(laws) == V ** K and max(distance(law, joint(p, V, K)) for law in laws) < EXACT

def accept_any(target: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
  """A drafted token stands wherever it equals some token of the target."""
  n = verify.accepted((target[:, :-1].unsqueeze(2) == drafted.unsqueeze(1)).max(1))
  return n, verify.emitted(n, drafted, at_row(target, n))

def not_in_order(target: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
  return (target[:, :-1] == drafted).cast(dtypes.int32).sum(1).cast(dtypes.int32), target

def last_bonus(target: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
  n, _ = verify.equal(target, drafted)
  return n, verify.emitted(n, drafted, target[:, -1])

@pytest.mark.parametrize("rule", [accept_any, not_in_order, last_bonus], ids=lambda r: r.__name__)
@pytest.mark.parametrize("greedy", [False, True])
def test_wrong_kinds_of_equal_are_caught(rule: Any, greedy: bool) -> None:
  rng = np.random.default_rng(10)
  p = one_hot_law(rng, 3, 2) if greedy else random_law(rng, 3, 2)
  assert max(distance(law, joint(p, 3, 2)) for law in equal_laws(3, 2, p, equal(3, 2, rule))) > 1e-3

def test_plain_decoding_accepts_nothing_and_emits_the_first_row() -> None:
  n, tokens = verify.equal(Tensor([[4, 5, 6], [7, 8, 9]], dtype=dtypes.int32), None)
  assert (n.numpy().tolist(), tokens.numpy().tolist()) == ([0, 0], [[4], [7]])

@pytest.mark.parametrize("K", [1, 2, 3, 5])
def test_accepted_counts_up_to_the_first_that_does_not_stand(K: int) -> None:
  ok = empty(K, dtype=dtypes.int32)
  run = Captured(lambda t: (verify.accepted(t > 0),), ok)
  for pattern in itertools.product((0, 1), repeat=K):
    assert run(pattern).tolist() == [next((i for i, stands in enumerate(pattern) if not stands), K)]

# ------------------------------------------------------------------------------------------------ edges
def test_edges_of_the_comparison(judges: dict[Any, Judge]) -> None:
  judge = judge_of(judges, 2, 1)
  p, q = [[0.25, 0.75], [0.4, 0.6]], [[0.5, 0.5]]
  assert judge(p, [0], q, [0.5]).n == 0                    # u * q == p
  assert judge(p, [0], q, [np.nextafter(0.5, 0)]).n == 1
  assert judge([[0, 1], [0.4, 0.6]], [0], q, [0.0]).n == 0  # what the target never says stays out even at u = 0
  assert judge([[1e-320, 1], [0.4, 0.6]], [0], [[1e-310, 1]], [0.5]).n == 0  # as small as it gets
  n, _, weights = judge(p, [0], q, [0.9])
  assert n == 0 and weights.tolist() == [0, 0.25]

def test_an_empty_difference_falls_back_to_the_target(judges: dict[Any, Judge]) -> None:
  """u = 1 can't be drawn: it stands for whatever rounding may do."""
  p = [[0.25, 0.75], [0.4, 0.6]]
  n, _, weights = judge_of(judges, 2, 1)(p, [0], p[:1], [1.0])
  assert n == 0 and weights.tolist() == p[0]

@pytest.mark.parametrize("sick", [0, 1])
def test_nan_rows_of_the_draft_are_refused(judges: dict[Any, Judge], sick: int) -> None:
  rng = np.random.default_rng(1)
  p, q = rng.dirichlet(np.ones(3), 3), rng.dirichlet(np.ones(3), 2)
  q[sick] = np.nan
  for x in itertools.product(range(3), repeat=2):
    n, tokens, weights = judge_of(judges, 3, 2)(p, x, q, [0.0, 0.0])
    assert n == sick and (weights == p[n]).all() and tokens[:n] == list(x[:n])

@pytest.mark.parametrize("wrong", [-1, -7, 3, 1000])
def test_foreign_ids_are_refused(judges: dict[Any, Judge], wrong: int) -> None:
  rng = np.random.default_rng(1)
  p, q = rng.dirichlet(np.ones(3), 3), rng.dirichlet(np.ones(3), 2)
  n, _, weights = judge_of(judges, 3, 2)(p, [1, wrong], q, [0.0, 0.0])
  assert n == 1 and np.isfinite(weights).all() and weights.sum() > 0
  assert judge_of(judges, 3, 2)(p, [wrong, 1], q, [0.0, 0.0]).n == 0

def test_label() -> None:
  label = verify.Label("exact", "rejection", "realised", 5, "reference")
  assert str(label) == "exact, rule rejection, q realised, depth 5 fixed, numerics reference fixed-width"

# ------------------------------------------------------------------------------------------------ draws
def chi2(counts: Array, law: Array) -> float:
  """In standard deviations above what chance gives; tokens of no probability must not have come."""
  assert not counts[law == 0].any()
  expected = counts.sum() * law[law > 0]
  free = len(expected) - 1
  return float((((counts[law > 0] - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free))

@pytest.mark.parametrize("ops", [twin, cpu], ids=["twin", "cpu"])
def test_draws_follow_the_weights(ops: Any) -> None:
  """Weights without a sum of one, such as a residual; as one row of many and as single rows, for each use."""
  weights = np.array([0.02, 0, 0.11, 0.04, 0.25], np.float32)
  seed, n = Tensor([[12345, 6]], dtype=dtypes.int32).realize(), 20000
  rows = Tensor(np.tile(weights, (n, 1))).realize()
  for use in (TARGET, DRAFT):
    drawn = ops.pick(rows, seed, Tensor([[use * n], [0]], dtype=dtypes.int32).realize(), use).numpy()
    assert chi2(np.bincount(drawn, minlength=5), weights / weights.sum()) < 4
    for pair in (drawn[:-1] * 5 + drawn[1:], drawn[:-7] * 5 + drawn[7:]):  # positions don't know each other
      assert chi2(np.bincount(pair, minlength=25), np.outer(weights, weights).ravel() / weights.sum() ** 2) < 4

def test_the_three_uses_of_a_position_are_independent() -> None:
  """Draft, uniform number and residual draw of the same position, put together as a step does: the target's law comes out,
  jointly with the drafted token."""
  ops, n, V = cpu, 6000, 4
  p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.55, 0.25, 0.0, 0.2])
  seed, at = Tensor([[77, 0]], dtype=dtypes.int32).realize(), Tensor([[0], [0]], dtype=dtypes.int32).realize()
  tile = lambda row: Tensor(np.tile(row.astype(np.float32), (n, 1))).realize()
  drafted, u = ops.pick(tile(q), seed, at, DRAFT).numpy(), ops.uniforms(seed, at, n, ACCEPT).numpy()[0]
  judge, weights = Judge(V, 1), np.zeros((n, V))
  for i in range(n):
    stands, _, left = judge([p, p], [drafted[i]], [q], [u[i]])
    weights[i] = np.eye(V)[drafted[i]] if stands else left
  out = ops.pick(Tensor(weights.astype(np.float32)).realize(), seed, at, TARGET).numpy()
  assert chi2(np.bincount(out, minlength=V), p) < 4
  stay, left = np.minimum(p, q), np.maximum(p - q, 0)
  want = np.diag(stay) + np.outer(q - stay, left / left.sum())  # drafted (rows) and emitted (columns)
  assert chi2(np.bincount(drafted * V + out, minlength=V * V), want.ravel()) < 4

# ------------------------------------------------------------------------------------------------ penalties
def penalised(logits: Array, prompt: Array, reply: list[int], before: list[int], settings: tuple[float, ...], bias: Array) -> Array:
  """Row by row from the lists themselves."""
  (repetition, presence, frequency), out = settings, logits.astype(np.float64)
  for r, row in enumerate(out):
    said = [*reply, *before[:r]]
    for t in range(len(row)):
      if t in said or t in prompt: row[t] = row[t] / repetition if row[t] > 0 else row[t] * repetition
      row[t] += bias[t] - presence * (t in said) - frequency * said.count(t)
  return out

@pytest.mark.parametrize("settings", [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, 0.4), (1.2, -0.3, 0.2),
                                      (1e9, 0.0, 0.0)])
@pytest.mark.parametrize("before", [[], [3], [3, 3, 5], [7, 2, 7, 7, 0], [11, -1, 2, 900]])
def test_every_row_is_penalised_by_its_own_history(settings: tuple[float, float, float], before: list[int]) -> None:
  V, rng = 12, np.random.default_rng(2)
  shape = 2, len(before) + 1, V                            # a second sequence, with a history, rates and a bias of its own
  logits, bias = rng.normal(0, 3, shape).astype(np.float32), np.zeros((2, V), np.float32)
  bias[0, [2, 6]], bias[1, [1, 6]] = (-4, 1e9), (3, -1)
  prompts, replies, rates = [np.array([1, 1, 5, 8]), np.array([6, 11])], [[2, 8, 8], []], [settings, (1.1, 0.2, -0.3)]
  drafted = [before, rng.integers(-1, V + 2, len(before)).tolist()]
  counts = np.stack([[np.bincount(ids, minlength=V) for ids in (prompts[b], np.array(replies[b], int))] for b in (0, 1)]).astype(np.int32)
  got = penalise(Tensor(logits), Tensor(counts), Tensor(np.array(rates, np.float32)), Tensor(bias),
                 Tensor(np.array(drafted, np.int32)) if before else None).numpy()
  assert got.shape == shape
  for b in (0, 1):
    want = penalised(logits[b], prompts[b], replies[b], drafted[b], rates[b], bias[b])
    assert (np.abs(got[b] - want) <= 1e-5 + 1e-6 * np.abs(want)).all()
