"""Is nothing lost? Holds the shipped verifier and a loaded pair against exactness, by enumeration and on real text.

  L0 verify.rejection and verify.equal by enumeration      L3 real text: does each token have the target's law?
  L1 the compiled rule and the filters against float64     L4 ids of greedy and coupled decoding against plain decoding
  L2 whole captured steps over a known law                 L5 wrong verifiers: every one must be found, or all is void

Exit status 0 only where losslessness is shown, 1 where it is not or the audit is void, 2 for a mistake in the call.
Seeds and sizes are fixed beforehand and no test is repeated until it passes: one red L2 is confirmed once, with four
times as many steps, and both stay in the record.
"""
from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import evidence
from evidence import Parser, command, commit, device, rounded

import specgrad
from specgrad.toolchain import tinygrad_version

SCHEMA, ALPHA = "specgrad.audit/1", 5e-4                   # for each of L2 and L3; no chance is in the others
SIZES = {  # L1 cases, L2 steps, L3 tokens a class, L4 prompts a class and tokens of each
  "quick": {"cases": 4000, "steps": 40000, "law_tokens": 800, "prompts": 3, "tokens": 96},
  "full": {"cases": 100000, "steps": 175000, "law_tokens": 100000, "prompts": 16, "tokens": 2048}}
Array = np.ndarray
Rule = Callable[[Array, Array, Array, Array], tuple[int, Array]]  # p (K+1, V), x (K,), q (K, V), u (K,) -> n, weights

def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Raises ValueError for flags it does not know and values out of range."""
  parser = Parser("audit", "Show that speculation loses nothing, or find where it does.",
                  "The last line of stdout is a JSON object. Exit status 0: lossless is shown.")
  add = parser.add_argument
  evidence.add_model(parser)
  add("--numerics", choices=("w4a8", "reference"), default="w4a8", help="default: %(default)s")
  add("--draft", default="auto", metavar="D", help="auto, ngram, or the folder of a smaller checkpoint (default: auto)")
  add("--depth", type=int, metavar="K", help="tokens drafted a step (default: the draft's)")
  add("--prompts", type=Path, metavar="FILE", help="JSONL as for scripts/accept.py (default: the checkpoint's)")
  add("--quick", action="store_true", help="minutes instead of hours; bounds less")
  add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
  add("--out", type=Path, metavar="FILE", help="JSONL of the levels; an interrupted audit goes on there")
  add("--shard", default="1/1", metavar="i/n", help="this machine's share of the replies of L3 and L4; the first does the "
      "other levels, too. Exit status 0: none of it failed")
  add("--merge", type=Path, nargs="+", metavar="FILE", help="the verdict over the files of all shards instead of running")
  add("--plot", type=Path, metavar="FILE", help="draw the tests, as PNG and SVG (needs the extra `plot`)")
  args = parser.parse_args(argv)
  for flag, value, least in (("--seed", args.seed, 0), ("--depth", 1 if args.depth is None else args.depth, 1)):
    if value < least: raise ValueError(f"{flag}={value}, want at least {least}")
  args.shard = evidence.shard(args.shard)
  return args

# ------------------------------------------------------------------------------------------------ rules in numpy
def exact(p: Array, x: Array, q: Array, u: Array, lenience: float = 1.0) -> tuple[int, Array]:
  """The rule as the papers have it, in float64 (arXiv 2211.17192): the opinion that the shipped one is held against."""
  for k, token in enumerate(x):
    if u[k] * q[k, token] * lenience < p[k, token]: continue
    left = np.maximum(p[k] - q[k], 0)
    return k, left if left.sum() else p[k]
  return len(x), p[-1]

def lenient(p: Array, x: Array, q: Array, u: Array) -> tuple[int, Array]: return exact(p, x, q, u, 0.95)

def bonus_from_draft(p: Array, x: Array, q: Array, u: Array) -> tuple[int, Array]:
  n, weights = exact(p, x, q, u)
  return n, q[-1] if n == len(x) else weights

def peeking(p: Array, x: Array, q: Array, u: Array, least: float = 0.3) -> tuple[int, Array]:
  """Ends the block before the first token that the draft was not sure of: the depth then hangs on the token drawn."""
  ends = next((k for k, token in enumerate(x) if q[k, token] < least), len(x))
  return exact(p[:ends + 1], x[:ends], q[:ends], u)

# ------------------------------------------------------------------------------------------------ L0
@dataclass(frozen=True)
class Laws:
  """Laws over prefixes, in fractions that a grid of `grid` uniform numbers resolves exactly."""
  V: int
  K: int
  grid: int
  p: dict[tuple[int, ...], Array]
  q: dict[tuple[int, ...], Array]

  @property
  def without_markov(self) -> dict[tuple[int, ...], Array]:
    """q as it would be recorded without the bias of the token before: the same whatever the prefix."""
    return {x: np.mean([self.q[y] for y in self.q if len(y) == len(x)], axis=0) for x in self.q}

def laws(rng: np.random.Generator, V: int, K: int, grid: int, kind: str) -> Laws:
  """q in powers of two and p in parts of `grid`, so that p/q is a whole number of steps of the grid."""
  def drafted() -> Array:
    parts = [1.0] + [0.0] * (V - 1) if kind == "one-hot" else [0.5] * 2 if V == 2 else [0.5, 0.25, 0.25]
    return rng.permutation(parts)

  def target(q: Array | None) -> Array:
    if kind == "equal" and q is not None: return q
    open_to = rng.permutation(V)[:V - 1] if kind == "zeros" else np.arange(V)
    return np.bincount(rng.choice(open_to, grid), minlength=V) / grid
  prefixes = [x for k in range(K + 1) for x in itertools.product(range(V), repeat=k)]
  q = {x: drafted() for x in prefixes if len(x) < K}
  return Laws(V, K, grid, {x: target(q.get(x)) for x in prefixes}, q)

def deviation(rule: Rule, laws: Laws, recorded: dict[tuple[int, ...], Array] | None = None) -> float:
  """Total variation between the target's law of K+1 tokens and what `rule` emits, continued by the target. Enumerates
  every block and every uniform number of the grid, so there is no chance in it."""
  V, K, recorded = laws.V, laws.K, recorded or laws.q
  out, want = np.zeros((V,) * (K + 1)), np.zeros((V,) * (K + 1))
  tail = dict[tuple[int, ...], Array]()                    # prefix -> the target's law of all that follows
  for length in range(K, -1, -1):
    for x in itertools.product(range(V), repeat=length):
      rest = [tail[*x, y] for y in range(V)] if length < K else [np.ones(())] * V
      tail[x] = np.stack([laws.p[x][y] * rest[y] for y in range(V)])
  want = tail[()]
  uniform = (np.arange(laws.grid) + 0.5) / laws.grid
  for x in itertools.product(range(V), repeat=K):
    chance = math.prod(laws.q[x[:k]][x[k]] for k in range(K)) / laws.grid ** K
    if not chance: continue
    p, q = np.stack([laws.p[x[:k]] for k in range(K + 1)]), np.stack([recorded[x[:k]] for k in range(K)])
    for u in itertools.product(uniform, repeat=K):
      n, weights = rule(p, np.array(x), q, np.array(u))
      law = weights / weights.sum()
      for y in np.flatnonzero(law):
        out[*x[:n], y] += chance * law[y] * (tail[*x[:n], int(y)] if n < K else 1)
  return float(np.abs(out - want).sum() / 2)

def level0_laws(seed: int) -> list[Laws]:
  rng = np.random.default_rng(seed)
  kinds = "random", "random", "random", "zeros", "zeros", "one-hot", "equal"
  return [laws(rng, 3, 1, 64, kind) for kind in kinds] + \
    [laws(rng, 3, 2, 16, kind) for kind in ("random", "zeros", "one-hot")] + [laws(rng, 2, 3, 8, "random")]

# ------------------------------------------------------------------------------------------------ what is shipped
class Held:
  """A device buffer that the host writes and reads; without a copy where the host can reach it."""
  def __init__(self, values: Array, name: str):
    from tinygrad import Tensor
    self.tensor = Tensor(values, device=name).clone().realize()
    near = hasattr(self.tensor._buffer().allocator, "_as_buffer")
    self.view = read(self.tensor, values.dtype).reshape(values.shape) if near else None

  def write(self, values: Array) -> None:
    from specgrad.engine import put
    if self.view is not None: self.view[...] = values
    else: put(self.tensor, np.asarray(values))

def read(tensor: Any, dtype: Any) -> Array:
  """What the device wrote, waited for; good until the next call."""
  return np.frombuffer(tensor._buffer().as_memoryview(allow_zero_copy=True), dtype)

def captured(build: Callable[[], Any]) -> Any:
  """build as one graph, captured on its first call as the engine does."""
  from tinygrad import TinyJit
  from tinygrad.helpers import Context
  jit = TinyJit(build)
  jit.cnt = 1
  with Context(JIT_BATCH_SIZE=0): jit()
  return jit

class Shipped:
  """verify.rejection as a captured graph on the model's device, for arrays."""
  def __init__(self, name: str):
    self.name, self.graphs = name, dict[tuple[int, int], Any]()

  def __call__(self, p: Array, x: Array, q: Array, u: Array) -> tuple[int, Array]:
    from specgrad.spec import verify
    (K, V) = q.shape
    if (K, V) not in self.graphs:
      held = [Held(a.astype(d), self.name)
              for a, d in ((p, np.float32), (x, np.int32), (q, np.float32), (u, np.float32))]

      def judge() -> Any:
        n, weights = verify.rejection(*(h.tensor.unsqueeze(0) for h in held))  # looked up when captured: what is in force
        return n.cast("float").reshape(-1).cat(weights.reshape(-1)).contiguous().realize()
      self.graphs[K, V] = held, captured(judge)
    held, jit = self.graphs[K, V]
    for h, a, d in zip(held, (p, x, q, u), (np.float32, np.int32, np.float32, np.float32)): h.write(a.astype(d))
    out = read(jit(), np.float32)
    return int(out[0]), out[1:].astype(np.float64)

def equal_is_right(name: str) -> int:
  """Cases in which verify.equal is not "as many as agree before the first that does not, then the target's own"."""
  from tinygrad import Tensor

  from specgrad.spec import verify
  bits, wrong = lambda n: itertools.product(range(2), repeat=n), 0
  for t, d in list(itertools.product(bits(4), bits(3)))[::3]:
    n, tokens = verify.equal(*(Tensor(np.array([a], np.int32), device=name) for a in (t, d)))
    want = next((k for k in range(3) if t[k] != d[k]), 3)
    wrong += n.numpy()[0] != want or tokens.numpy()[0, :want + 1].tolist() != list(t[:want + 1])
  return wrong

def compiled_cases(rule: Rule, n: int, seed: int, V: int = 32, K: int = 5) -> tuple[int, float]:
  """Random laws in float32: (decisions unlike float64's where |u q - p| is more than 4 ulp, largest error of the next
  token's law where they agree)."""
  rng, wrong, worst = np.random.default_rng(seed), 0, 0.0
  for _ in range(n):
    scale = rng.choice([0.5, 1.5, 4.0])
    p, q = (np.exp(scale * rng.standard_normal((k, V))) for k in (K + 1, K))
    p, q = ((a / a.sum(1, keepdims=True)).astype(np.float32).astype(np.float64) for a in (p, q))
    q = np.where(rng.random() < 0.5, (0.9 * p[:K] + 0.1 * q).astype(np.float32).astype(np.float64), q)  # a good draft
    x = np.array([rng.choice(V, p=row / row.sum()) for row in q])
    u = rng.random(K).astype(np.float32).astype(np.float64)
    want, got = exact(p, x, q, u), rule(p, x, q, u)
    if want[0] != got[0]:
      k = min(want[0], got[0])
      wrong += abs(u[k] * q[k, x[k]] - p[k, x[k]]) > 4 * float(np.spacing(np.float32(p[k, x[k]])))
    else: worst = max(worst, float(np.abs(want[1] / want[1].sum() - got[1] / got[1].sum()).max()))
  return int(wrong), worst

def filtered(logits: Array, t: float, top_p: float, top_k: int, min_p: float) -> Array:
  """float64 (V,): temperature, then top-k, top-p, min-p, each in its plainest form; no two logits may be equal."""
  order = np.argsort(-logits)
  w = np.exp((logits[order] - logits.max()) / t)
  if top_k: w[top_k:] = 0
  if top_p < 1: w[np.cumsum(w) - w >= top_p * w.sum()] = 0
  w[w < min_p] = 0
  out = np.zeros_like(w)
  out[order] = w / w.sum()
  return out

def filters_error(name: str, w4a8: bool, seed: int) -> float:
  from tinygrad import Tensor

  from specgrad.quant import operations
  rng, worst, ops = np.random.default_rng(seed), 0.0, operations(name, w4a8)
  for t, top_p, top_k, min_p in ((1, 1, 0, 0), (.6, 1, 0, 0), (1, .9, 0, 0), (1, 1, 5, 0), (1, 1, 0, .1),
                                 (.8, .95, 20, .05)):
    logits = (3 * rng.standard_normal((4, 64))).astype(np.float32)
    got = ops.probs(Tensor(logits, device=name), Tensor([[t, top_p, top_k, min_p]], dtype="float", device=name)).numpy()
    worst = max(worst, *(float(np.abs(g - filtered(x.astype(np.float64), t, top_p, top_k, min_p)).max())
                         for g, x in zip(got, logits)))
  return worst

# ------------------------------------------------------------------------------------------------ L2
@dataclass(frozen=True)
class Chain:
  """A target that looks at the last token alone, and a block draft with a bias of the token before it."""
  table: Array                                             # (V, V) logits of the target after each token
  base: Array                                              # (K, V) logits of the draft
  bias: Array                                              # (V, V) added after each token

  @property
  def p(self) -> Array: return softmax(self.table)         # (V, V)
  @property
  def q(self) -> Array: return softmax(self.base[:, None] + self.bias[None])  # (K, V, V): place, token before, token
  @property
  def q_without_bias(self) -> Array: return np.repeat(softmax(self.base)[:, None], self.table.shape[0], 1)

def softmax(x: Array) -> Array:
  e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)

def chain(V: int = 32, K: int = 5) -> Chain:
  rng = np.random.default_rng(11)
  base, bias = 0.7 * rng.standard_normal((K, V)), 0.9 * rng.standard_normal((V, V))
  return Chain(*(a.astype(np.float32) for a in (bias + 0.9 * rng.standard_normal((V, V)), base, bias)))

def real_steps(c: Chain, n: int, seed: int, name: str, w4a8: bool, tick: Callable[[int], None], lanes: int = 1
               ) -> tuple[Array, Array]:
  """n captured steps as the engine runs them, `lanes` of them at once, each after token 0 -> accepted (n,), tokens
  (n, K+1). Positions and noise move on as in a reply."""
  from tinygrad import Tensor

  from specgrad.models.dspark import Draft, side_by_side
  from specgrad.quant import operations
  from specgrad.spec.step import Plan, State, run
  (K, V), place = c.base.shape, lambda a: Tensor(np.ascontiguousarray(a), device=name).clone().realize()
  table, base, bias, anchor = *(place(a) for a in (c.table, c.base, c.bias)), Held(np.zeros(lanes, np.int32), name)
  zeros = lambda d, *shape: place(np.zeros(shape, d))
  seeds = np.stack([seed * lanes + np.arange(lanes), np.zeros(lanes)], axis=1).astype(np.int32)
  state = State(place(np.stack([np.zeros(lanes), np.arange(lanes)]).astype(np.int32)), anchor.tensor, place(seeds),
                place(np.tile(np.array([1, 1, 0, 0], np.float32), (lanes, 1))), zeros(np.float32, lanes, 3),
                zeros(np.float32, lanes, V), zeros(np.int32, lanes, 2, V))
  target = SimpleNamespace(ops=operations(name, w4a8), config=SimpleNamespace(vocab_size=V), head=lambda h: table[h],
                           forward_taps=lambda rows, *rest: (rows, None))

  def propose(anchor: Any, at: Any, depth: int, choose: Any, context: int) -> Any:
    before, laws = [anchor], []
    for k in range(depth):
      token, law = choose((base[k:k + 1] + bias[before[-1]]).contiguous(), k)
      before.append(token)
      laws.append(law)
    return Draft(side_by_side(*before[1:]), side_by_side(*laws))
  draft = SimpleNamespace(tap_layers=(), depth_limit=K, propose=propose, commit=lambda rows, *rest: [rows])
  jit = captured(lambda: run(target, None, draft, state, Plan("rejection", K, K + 1, 0, False)))
  calls, start = -(-n // lanes), np.zeros(lanes, np.int32)
  out = np.zeros((calls, lanes, K + 2), np.int32)
  for i in range(calls):
    anchor.write(start)
    out[i] = read(jit(), np.int32).reshape(lanes, K + 2)
    if i % 100 == 99: tick(100 * lanes)
  packed = out.reshape(-1, K + 2)[:n]
  return packed[:, 0], packed[:, 1:]

def draw(rng: np.random.Generator, weights: Array) -> Array:
  """(n, V) weights -> (n,) one token by each row's."""
  edges = weights.cumsum(1)
  return np.minimum((rng.random((len(weights), 1)) * edges[:, -1:] >= edges).sum(1), weights.shape[1] - 1)

def made_steps(c: Chain, n: int, seed: int, wrong: str = "") -> tuple[Array, Array]:
  """As real_steps, from numpy, by the exact rule or a wrong one."""
  rng, K = np.random.default_rng(seed), len(c.base)
  p, q = c.p, c.q
  held = c.q_without_bias if wrong == "q without the Markov bias" else q  # what drafted tokens are held to
  tokens, accepted = np.zeros((n, K + 1), np.int64), np.full(n, -1)
  before = np.zeros(n, np.int64)
  for k in range(K + 1):
    rows, last, P = np.arange(n), before, p[before]
    if k == K:
      weights = q[K - 1][tokens[:, K - 2]] if wrong == "bonus from the draft" else P
      stands = np.zeros(n, bool)
    else:
      x, Q = draw(rng, q[k][last]), held[k][last]
      lenience = 0.95 if wrong == "lenience 0.95" else 1.0
      stands = rng.random(n) * Q[rows, x] * lenience < P[rows, x]
      left = np.maximum(P - Q, 0)
      weights = np.where(left.sum(1, keepdims=True) > 0, left, P)
      if wrong == "depth by the drawn token":
        unsure = q[k][last][rows, x] < 0.05
        stands &= ~unsure
        weights = np.where(unsure[:, None], P, weights)
    new = np.where(stands, x if k < K else 0, draw(rng, weights))
    alive = accepted < 0
    tokens[alive, k] = new[alive]
    accepted[alive & ~stands] = k
    before = tokens[:, k]
  return accepted, tokens

def tail(z: float) -> float: return math.erfc(abs(z) / math.sqrt(2))

def chi_square(seen: Array, expected: Array) -> tuple[float, float]:
  """(statistic, p-value by Wilson and Hilferty). Cells of which fewer than 5 are expected count as one."""
  seen, expected = seen.ravel().astype(float), expected.ravel()
  if (seen[expected == 0] > 0).any(): return math.inf, 0.0
  few = expected < 5
  seen, expected = (np.append(a[~few], a[few].sum()) for a in (seen, expected))
  if expected[-1] == 0: seen, expected = seen[:-1], expected[:-1]
  x, df = float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1
  z = ((x / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
  return x, 0.5 * math.erfc(z / math.sqrt(2))

def witness(inside: Array, chance: Array, tests: int = 3) -> tuple[float, float, float, float]:
  """(z, p-value, mean shift, largest shift not ruled out): do tokens fall into their sets as often as p says?"""
  return shifted(np.array([len(inside), (inside - chance).sum(), (chance * (1 - chance)).sum()]), tests)

def shifted(sums: Array, tests: int) -> tuple[float, float, float, float]:
  """Of (tokens, sum of inside - chance, sum of variances). The largest shift holds at any length and for all of `tests`
  together (Azuma)."""
  n, shift, variance = sums.tolist()
  z = shift / math.sqrt(variance) if variance else 0.0
  azuma = math.sqrt(math.log(2 * tests / ALPHA) / (2 * n)) if n else math.inf
  return z, tail(z), shift / max(n, 1), abs(shift) / max(n, 1) + azuma

def step_tests(c: Chain, accepted: Array, tokens: Array) -> dict[str, float]:
  """p-values of what exactness says of steps after token 0."""
  p, q, (K, V), n = c.p, c.q, c.base.shape, len(accepted)
  alive, table = np.eye(V)[0], np.zeros((K + 1, V))        # chance that the places before stand and end in a token
  for k in range(K):
    table[k] = alive @ np.maximum(p - q[k], 0)
    alive = alive @ np.minimum(p, q[k])
  table[K] = alive @ p
  bonus = tokens[np.arange(n), accepted]
  seen = np.zeros((K + 1, V))
  np.add.at(seen, (accepted, bonus), 1)
  more = accepted > 0
  pair = np.zeros((V, V))
  np.add.at(pair, (tokens[more, 0], tokens[more, 1]), 1)
  out = {"accepted and next token": chi_square(seen, n * table)[1],
         "first token": chi_square(np.bincount(tokens[:, 0], minlength=V), n * p[0])[1],
         "pairs": chi_square(pair, n * np.minimum(p[0], q[0][0])[:, None] * p)[1]}
  place = np.arange(K + 1)[None].repeat(n, 0)
  before = np.concatenate([np.zeros((n, 1), int), tokens[:, :-1]], 1)
  used = place <= accepted[:, None]
  place, before, after = np.minimum(place[used], K - 1), before[used], tokens[used]
  P, Q = p[before], q[place, before]
  for name, members in sets(P, Q).items():
    inside = members[np.arange(len(after)), after]
    out[f"set: {name}"] = witness(inside, (P * members).sum(1))[1]
  return out

def sets(p: Array, q: Array) -> dict[str, Array]:
  """(n, V) laws -> sets that are settled before the token is known; a family of wrong rules leaves its mark in each."""
  entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(-1, keepdims=True)
  return {"draft above target": q > p, "typical": p >= np.minimum(0.09, 0.3 * np.exp(-entropy)),
          "draft sure": q >= 0.05}

def holm(p_values: dict[str, float], alpha: float) -> list[str]:
  """Names of the tests that are rejected."""
  out = list[str]()
  for i, (name, p) in enumerate(sorted(p_values.items(), key=lambda x: x[1])):
    if p > alpha / (len(p_values) - i): break
    out.append(name)
  return out

# ------------------------------------------------------------------------------------------------ the audit
WRONG_RULES: dict[str, tuple[Rule, bool]] = {  # rule, whether q is recorded without the Markov bias
  "lenience 0.95": (lenient, False), "q without the Markov bias": (exact, True),
  "bonus from the draft": (bonus_from_draft, False), "depth by the drawn token": (peeking, False)}

class Audit:
  def __init__(self, args: argparse.Namespace, bar: Any):
    self.args, self.bar, self.sizes = args, bar, SIZES["quick" if args.quick else "full"]
    self.model = specgrad.load(args.model, numerics=args.numerics, devices=args.devices, draft=args.draft)
    if not self.model.depth:
      raise ValueError("there is no draft, so nothing to audit; want a checkpoint with DSpark stages or --draft ngram")
    self.depth = self.model.depth if args.depth is None else args.depth
    self.labels = list(dict.fromkeys(self.model.verifier(temperature=t, depth=self.depth, coupled=c)
                                     for t, c in ((0, False), (1, False), (1, True))))
    self.device, self.w4a8 = self.model.engine.device, args.numerics == "w4a8"
    self.prompts = evidence.prompts(self.model, args.prompts, None, 64, args.seed)

  def head(self, said: str) -> dict[str, Any]:
    args, checkpoint = self.args, self.model.engine.checkpoint
    return {"schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": said, "commit": commit(), "tinygrad": tinygrad_version(), "device": device(self.device),
            "model": checkpoint.folder.resolve().name, "fingerprint": checkpoint.fingerprint,
            "numerics": args.numerics, "draft": "dspark" if args.draft == "auto" else Path(args.draft).name,
            "depth": self.depth, "verifiers": self.labels, "seed": args.seed, "quick": args.quick, "sizes": self.sizes,
            "prompts_sha256": evidence.sha(evidence.prompt_file(self.model, args.prompts)), "alpha": 2 * ALPHA}

  def tick(self, n: int) -> None: self.bar.update(n)

  # ---------------------------------------------------------------------------------------------- levels
  def level0(self) -> dict[str, Any]:
    rule, cases = Shipped(self.device), level0_laws(self.args.seed)
    worst = max(deviation(rule, case) for case in cases)
    n, _ = rule(np.array([[0.0, 1.0], [0.5, 0.5]]), np.array([0]), np.array([[1.0, 0.0]]), np.zeros(1))
    wrong = equal_is_right(self.device)
    return {"passed": worst < 1e-12 and n == 0 and not wrong, "size": f"{len(cases)} pairs of laws, all blocks",
            "found": f"total variation {worst:.0e}, impossible token {'refused' if n == 0 else 'ACCEPTED'} at u = 0, "
                     f"rule equal wrong in {wrong} cases"}

  def level1(self) -> dict[str, Any]:
    wrong, error = compiled_cases(Shipped(self.device), self.sizes["cases"], self.args.seed)
    filters = filters_error(self.device, self.w4a8, self.args.seed)
    return {"passed": not wrong and error < 1e-5 and filters < 1e-5,
            "size": f"{self.sizes['cases']} random laws, V=32, K=5",
            "found": f"{wrong} decisions unlike float64's beyond 4 ulp, next token's law off by at most {error:.0e}, "
                     f"temperature and filters by {filters:.0e}"}

  def level2(self) -> dict[str, Any]:
    c, n, runs = chain(), self.sizes["steps"], list[dict[str, Any]]()
    for attempt in range(2):                               # the second one only confirms a red one
      steps, seed = n * (1, 4)[attempt], 1 + self.args.seed + 1000 * attempt
      parts = [real_steps(c, steps // 2, seed + lanes, self.device, self.w4a8, self.tick, lanes) for lanes in (1, 16)]
      accepted, tokens = (np.concatenate(x) for x in zip(*parts))
      steps = len(accepted)
      values = step_tests(c, accepted, tokens)
      runs.append({"steps": steps, "seed": seed, "p_values": values, "rejected": holm(values, ALPHA)})
      first = np.bincount(tokens[:, 0], minlength=len(c.table)) / steps
      if not runs[-1]["rejected"]: break
    distance = float(np.abs(first - c.p[0]).sum() / 2)
    by_chance = 0.5 * math.sqrt((len(first) - 1) / steps)
    bound = distance + by_chance + math.sqrt(math.log(1 / ALPHA) / (2 * steps))
    red = len(runs) == 2 and bool(runs[1]["rejected"])
    return {"passed": not red, "size": f"{runs[-1]['steps']} captured steps, alone and 16 at once, V=32, K=5", "runs": runs,
            "bound_tv": bound,
            "found": f"rejected {', '.join(runs[-1]['rejected']) or 'nothing'} of {len(values)} tests; total "
                     f"variation of the first token at most {bound:.3f}"}

  def level3(self) -> dict[str, Any]:
    """Sampled replies, and for each token whether it lies in sets that the laws before it settle. The draft's law is
    that of the greedy block from the step's start: beyond the first place it may differ from what was drawn from,
    which costs power and not validity. The target's law comes from prefill."""
    (shard, shards), raw = self.args.shard, {"sums": {}, "first": {}, "tokens": {}}
    for kind in dict.fromkeys(p.kind for p in self.prompts):
      sums, count, first = dict[str, Array](), 0, np.zeros(3)  # first: realised, expected, variance of the first place
      own = [p for p in self.prompts if p.kind == kind]
      for i in range(shard, 100 * len(own), shards):
        if count * shards >= self.sizes["law_tokens"]: break
        count += self.follow(own[i % len(own)], 1 + self.args.seed + i, sums, first)
      raw["sums"].update({f"{kind}: {name}": x.tolist() for name, x in sums.items()})
      raw["first"][kind], raw["tokens"][kind] = first.tolist(), count
    return judge3([raw])

  def follow(self, p: evidence.Prompt, seed: int, sums: dict[str, Array], first: Array) -> int:
    """One reply at temperature 1, token by token into the sums -> its tokens."""
    model, room = self.model, self.model.max_context - len(p.ids) - self.depth - 2
    if room < 1: return 0
    model.reset()
    stream = model.stream(p.ids, max_tokens=min(128, room), temperature=1.0, seed=seed, depth=self.depth,
                          ignore_eos=p.synthetic)
    starts, accepted, before = list[int](), list[int](), 0
    for new, _ in stream:
      starts.append(len(stream.ids) - len(new))
      accepted.append(sum(stream.stats.accepted) - before)
      before += accepted[-1]
    ids, rule = stream.ids, evidence.verifier(stream.stats.verifier)["rule"]
    laws = softmax(model.logits([*p.ids, *ids])[len(p.ids) - 1:])
    V = laws.shape[1]
    for at, n in zip(starts, accepted):
      block = model.draft_block([*p.ids, *ids[:at]])
      for k in range(min(n + 1, len(ids) - at)):
        if k == self.depth: block = model.draft_block([*p.ids, *ids[:at + k]])  # the bonus gets a block of its own
        row = k % self.depth
        if block.logits is None: q = (np.arange(V) == block.tokens[row]).astype(np.float64)
        else: q = softmax(block.logits[row])
        law = laws[at + k]
        for name, members in sets(law[None], q[None]).items():
          chance = min(float(law[members[0]].sum()), 1.0)
          sums.setdefault(name, np.zeros(3))[:] += (1, members[0, ids[at + k]] - chance, chance * (1 - chance))
        if k == 0 and rule == "rejection":
          share = min(float(np.minimum(law, q).sum()), 1.0)
          first += (n > 0, share, share * (1 - share))
      self.tick(min(n + 1, len(ids) - at))
    return len(ids)

  def level4(self) -> dict[str, Any]:
    """Ids with the draft against those of plain decoding with as many rows a step; and against one row, where a
    near-tie may fall the other way: then its margin is told. Penalties and a bias, which each row applies by its own
    history, with the first prompt of each kind."""
    width, (shard, shards), chosen, per_kind = self.depth + 1, self.args.shard, list[tuple[int, evidence.Prompt, bool]](), dict[str, int]()
    for i, p in enumerate(self.prompts):
      name = f"{p.kind}{p.turn}"
      if per_kind.get(name, 0) == self.sizes["prompts"]: continue
      per_kind[name] = per_kind.get(name, 0) + 1
      chosen.append((i, p, per_kind[name] == 1))
    raw: dict[str, Any] = {"width": width, "prompts": 0, "tokens": 0, "penalised": 0, "differ": [], "one_row": 0, "margins": [],
                           "coupled": 0 if shard else self.rows_are_alone()}
    for i, p, first in chosen[shard::shards]:
      n = min(self.sizes["tokens"], self.model.max_context - len(p.ids) - width - 1)
      if n < 1: continue
      raw["prompts"] += 1
      for t, extra in [(0.0, {}), (1.0, {}), *[(1.0, PENALTIES)] * first]:
        settings: dict[str, Any] = {"max_tokens": n, "temperature": t, "seed": self.args.seed + i,
                                    "ignore_eos": p.synthetic, **extra}
        ids = list[list[int]]()
        one_row = [{"depth": 0}] if t == 0 else []
        for more in ({"depth": self.depth, "coupled": t > 0}, {"depth": 0, "fixed_width": width}, *one_row):
          self.model.reset()
          ids.append(self.model.generate(p.ids, **settings, **more).ids)
        raw["tokens"] += len(ids[0])
        raw["penalised"] += len(ids[0]) * bool(extra)
        said = f"{p.kind} {p.source} at temperature {t:g}" + (" with penalties" if extra else "")
        if ids[0] != ids[1]: raw["differ"].append(said)
        if one_row and ids[0] != ids[2]:
          at = next((j for j, (a, b) in enumerate(zip(ids[0], ids[2])) if a != b), None)
          raw["one_row"] += 1
          if at is not None:
            top = np.sort(self.model.logits([*p.ids, *ids[0][:at]])[-1])
            raw["margins"].append(float(top[-1] - top[-2]))
        self.tick(len(ids[0]))
    return judge4([raw])

  def rows_are_alone(self) -> int:
    """Prompts whose logits change in any bit with what stands in the rows after them."""
    rng, config, wrong = np.random.default_rng(self.args.seed), self.model.config, 0
    for p in self.prompts[:3]:
      ids, other = [*p.ids[:20]], lambda: rng.integers(2, config.vocab_size, 6).tolist()
      one, two = (self.model.logits([*ids, *other()])[:len(ids)] for _ in range(2))
      wrong += not np.array_equal(one, two)
    return wrong

  def level5(self) -> dict[str, Any]:
    """Every wrong verifier against L0, and against L2's tests with as many steps; a coupled scale against L4's; and the
    right rule, which must pass both."""
    cases, c, n = level0_laws(self.args.seed), chain(), self.sizes["steps"]
    caught = dict[str, dict[str, bool]]()
    for i, (name, (rule, blind)) in enumerate(WRONG_RULES.items()):
      worst = max(deviation(rule, case, case.without_markov if blind else None) for case in cases)
      values = step_tests(c, *made_steps(c, n, 100 + self.args.seed + i, name))
      caught[name] = {"L0": worst > 1e-12, "L2": bool(holm(values, ALPHA))}
      self.tick(1)
    caught["one activation scale for all rows"] = {"L4": scale_couples(True)}
    fine = max(deviation(exact, case) for case in cases) < 1e-12 and not scale_couples(False) and \
      not holm(step_tests(c, *made_steps(c, n, 200 + self.args.seed)), ALPHA)
    missed = [f"{name} by {level}" for name, found in caught.items() for level, ok in found.items() if not ok]
    return {"passed": fine and not missed, "size": f"{len(caught)} wrong verifiers and a right one", "caught": caught,
            "right_rule_passes": fine,
            "found": ("all found" if not missed else "NOT found: " + ", ".join(missed)) +
                     ("; the right one passes" if fine else "; the right rule was REJECTED")}

def judge3(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """L3 from the sums of all shards."""
  sums, first, tokens = dict[str, Array](), dict[str, Array](), dict[str, int]()
  for raw in parts:
    for held, new in ((sums, raw["sums"]), (first, raw["first"])):
      for name, x in new.items(): held[name] = held.get(name, np.zeros(3)) + np.array(x)
    for kind, n in raw["tokens"].items(): tokens[kind] = tokens.get(kind, 0) + n
  values, shifts = dict[str, float](), dict[str, Any]()
  for name, x in sums.items():
    z, values[name], shift, bound = shifted(x, len(sums))
    shifts[name] = {"z": z, "shift": shift, "bound": bound, "tokens": int(x[0])}
  for kind, (realised, expected, variance) in first.items():
    if variance <= 0: continue
    z, name = (realised - expected) / math.sqrt(variance), f"{kind}: first place accepted"
    values[name], shifts[name] = tail(z), {"z": z, "realised": realised, "expected": expected}
  rejected = [name for name, value in values.items() if value < ALPHA / len(values)]
  bound = max((s["bound"] for s in shifts.values() if "bound" in s), default=1.0)
  worst = max((abs(s["z"]) for s in shifts.values()), default=0.0)
  total = sum(tokens.values())
  return {"passed": not rejected and total > 0, "size": f"{total} tokens of {len(tokens)} classes, temperature 1",
          "p_values": values, "shifts": shifts, "rejected": rejected, "bound_shift": bound,
          "found": f"rejected {', '.join(rejected) or 'nothing'} of {len(values)} tests, largest |z| {worst:.1f}; "
                   f"mass of the sets shifted by at most {bound:.3f} in any class",
          "raw": {"sums": {n: x.tolist() for n, x in sums.items()}, "first": {n: x.tolist() for n, x in first.items()},
                  "tokens": tokens}}

def judge4(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """L4 from what all shards saw."""
  x = {name: parts[0][name] if name == "width" else sum((raw[name] for raw in parts[1:]), parts[0][name]) for name in parts[0]}
  margin = f" (largest margin {max(x['margins']):.1e})" if x["margins"] else ""
  return {"passed": not x["differ"] and not x["coupled"] and x["tokens"] > 0,
          "size": f"{x['tokens']} tokens of {x['prompts']} prompts, greedy and coupled, {x['penalised']} of them with penalties",
          "found": f"{len(x['differ'])} replies differ from plain decoding at {x['width']} rows; {x['one_row']} greedy ones at one "
                   f"row{margin}; logits changed by later rows in {x['coupled']} of 3 prompts", "raw": x}

def scale_couples(per_tensor: bool) -> bool:
  """Whether the first row of an 8-bit product changes with the rows after it."""
  rng = np.random.default_rng(5)
  w, first = rng.standard_normal((64, 64)), rng.standard_normal((1, 64))

  def product(x: Array) -> Array:
    scale = np.abs(x).max(None if per_tensor else 1, keepdims=True) / 127
    return (np.round(x / scale) * scale) @ w
  one, two = (product(np.concatenate([first, s * rng.standard_normal((5, 64))]))[0] for s in (1, 4))
  return not np.array_equal(one, two)

PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {2: -1.0, 3: 1.0}}
LEVELS = {"L0": "the rule, enumerated", "L1": "the compiled rule", "L2": "captured steps, known law",
          "L3": "law of real text", "L4": "ids against plain decoding", "L5": "wrong verifiers"}
NOT_SHOWN = ("the bound of L3 is on the mass of its named sets, not on the whole law",
             "filters are tested on made logits (L1), not along replies; penalties by ids alone (L4)",
             "plain decoding here is that of this program: that the model itself is computed rightly is not looked at",
             "what was audited is this checkpoint, draft, depth, numerics and device; another one needs its own audit")

def verdict(levels: dict[str, dict[str, Any]]) -> str:
  """"void" where a wrong verifier went unseen: then what passed says nothing."""
  if not levels["L5"]["passed"]: return "void"
  return "lossless" if all(x["passed"] for x in levels.values()) else "not lossless"

def show(head: dict[str, Any], levels: dict[str, dict[str, Any]]) -> str:
  said = {"lossless": "LOSSLESS, as far as the sizes above go", "not lossless": "NOT SHOWN to be lossless",
          "void": "VOID: the audit does not see what it must"}
  rows = [[name, LEVELS[name], "pass" if x["passed"] else "FAIL", x["size"], x["found"]] for name, x in levels.items()]
  lines = [f"{head['model']}, draft {head['draft']}, depth {head['depth']}, {head['numerics']}, {head['device']}",
           *(f"verifier  {label}" for label in head["verifiers"]), "",
           *(f"{a}  {b:28} {c}  {d}\n{'':36} {e}" for a, b, c, d, e in rows)]
  lines += ["", f"verdict: {said[verdict(levels)]}", "bounds: total variation of a first token in captured steps "
            f"{levels['L2']['bound_tv']:.3f}; shift of the sets in real text {levels['L3']['bound_shift']:.3f}; chance "
            f"of a false alarm {head['alpha']:g} in all", *(f"not shown: {text}" for text in NOT_SHOWN)]
  return "\n".join(lines)

def plot(levels: dict[str, dict[str, Any]], path: Path) -> list[str]:
  """How surprising each test of L2 and L3 is, against the line beyond which it rejects."""
  plt = evidence.plotting()
  values = {f"L2 {k}": v for k, v in levels["L2"]["runs"][0]["p_values"].items()}
  values |= {f"L3 {k}": v for k, v in levels["L3"]["p_values"].items()}
  many = {"L2": len(levels["L2"]["runs"][0]["p_values"]), "L3": len(levels["L3"]["p_values"])}
  figure, ax = plt.subplots(figsize=(8, 1 + 0.22 * len(values)))
  for y, (name, value) in enumerate(values.items()):
    line, x = -math.log10(ALPHA / many[name[:2]]), min(-math.log10(max(value, 1e-12)), 12)
    ax.plot([line, line], [y - 0.5, y + 0.5], color="black", linewidth=1)
    ax.plot(x, y, "o", color="C3" if x > line else "C0")
  ax.set_yticks(range(len(values)), list(values), fontsize=8)
  ax.set(ylim=(len(values) - 0.5, -0.5), xlim=(0, 12.5), xlabel="-log10 of the p-value; right of the line it rejects")
  return evidence.save(figure, path)

def measure(args: argparse.Namespace, said: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Head and a record for each level of this shard."""
  specgrad.prepare()
  with tqdm(desc="audit", file=sys.stderr, disable=None, dynamic_ncols=True) as bar:
    audit, shard = Audit(args, bar), f"{args.shard[0] + 1}/{args.shard[1]}"
    head = {**audit.head(said), "shard": shard}
    records = evidence.Records(args.out, head, [k for k in head if k not in ("date", "command")])
    done = {row["level"] for row in records.rows}
    for name in ("L3", "L4") if args.shard[0] else LEVELS:
      if name in done: continue
      bar.set_description(f"audit {name}")
      began = time.perf_counter()
      found = getattr(audit, f"level{name[1]}")()
      records.add(rounded({"level": name, "shard": shard, **found, "seconds": time.perf_counter() - began}))
  return records.head, records.rows

def joined(head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """The levels over all shards. Raises ValueError where one is missing."""
  shards, levels = int(head["shard"].split("/")[1]), dict[str, dict[str, Any]]()
  for name in LEVELS:
    own = [r for r in rows if r["level"] == name]
    want = range(1, shards + 1) if name in ("L3", "L4") else (1,)
    if missing := [i for i in want if f"{i}/{shards}" not in [r["shard"] for r in own]]:
      raise ValueError(f"{name}: shard {missing[0]}/{shards} is missing, want the files of all")
    judge = {"L3": judge3, "L4": judge4}.get(name)
    levels[name] = {**own[0], **(judge([r["raw"] for r in own]) if judge else {}), "seconds": sum(r["seconds"] for r in own)}
  return levels

def run(argv: Sequence[str]) -> int:
  args = parse(argv)
  if args.plot: evidence.plotting()
  if args.merge:
    head, _ = evidence.read_records(args.merge[0])
    same = [k for k in head if k not in ("date", "command", "shard")]
    head, rows = evidence.merged(args.merge, same, ("level", "shard"))
  else: head, rows = measure(args, command("audit", argv))
  if args.shard[1] > 1 and not args.merge:
    for r in rows: print(f"{r['level']}  {LEVELS[r['level']]:28} {'pass' if r['passed'] else 'FAIL'}  {r['size']}\n{'':36} {r['found']}")
    print(f"no verdict: shard {head['shard']}; --merge gives it from the files of all")
    print(json.dumps(rounded({**head, "verdict": None, "levels": rows}), allow_nan=False))
    return int(not all(r["passed"] for r in rows))
  levels = joined(head, rows)
  print(show(head, levels))
  if args.plot: print("plots: " + ", ".join(plot(levels, args.plot)))
  result = {**head, "verdict": verdict(levels), "levels": levels, "not_shown": NOT_SHOWN}
  print(json.dumps(rounded(result), allow_nan=False))
  return 0 if result["verdict"] == "lossless" else 1

def main(argv: Sequence[str] | None = None) -> int: return evidence.guarded("audit", run, argv)

if __name__ == "__main__": sys.exit(main())
