"""One speculative step as a single traceable function: draft, verify, commit, all on the device.

Everything that changes from step to step is a buffer of `State`; nothing is an argument. The caller reads one packed
int32 vector. A step without a draft is plain decoding; `width` rows wide it does the very arithmetic of a speculative
step, so that the two can be compared bit for bit."""
from dataclasses import dataclass
from typing import Protocol

from tinygrad import Tensor, dtypes

from specgrad.models.deepseek_v4 import Cache, Target
from specgrad.models.dspark import Choose, Draft
from specgrad.spec import verify

TARGET, DRAFT, ACCEPT = 0, 1, 2                            # uses of the noise at a position

class Drafter(Protocol):
  """A draft keeps only what `commit` hands it, addressed by position; `propose` may scribble at pos and after it."""
  tap_layers: tuple[int, ...]
  depth_limit: int
  def propose(self, anchor: Tensor, pos: Tensor, depth: int, choose: Choose, context: int) -> Draft: ...
  def commit(self, tokens: Tensor, taps: Tensor | None, pos: Tensor, context: int) -> list[Tensor]: ...

@dataclass(frozen=True)
class State:
  """The buffers of one sequence that a step reads and writes, and of a reply's settings. They live with the engine."""
  pos: Tensor                                              # int32 (1,): position of the anchor
  anchor: Tensor                                           # int32 (1,): the newest token, not yet processed
  seed: Tensor                                             # int32 (2,)
  settings: Tensor                                         # float32 (4,): temperature, top_p, top_k, min_p
  penalties: Tensor                                        # float32 (3,): repetition, presence, frequency
  bias: Tensor                                             # float32 (V,): added to every row of logits
  counts: Tensor                                           # int32 (2, V): in the prompt, in the reply (anchor included)

@dataclass(frozen=True)
class Plan:
  """What is fixed in a captured step."""
  rule: str                                                # "greedy", "rejection", "coupled"
  depth: int                                               # drafted tokens, 0: plain decoding
  width: int                                               # rows of the target, at least depth+1
  context: int                                             # no position beyond it is looked at
  penalised: bool                                          # penalties or bias are in use

def penalise(logits: Tensor, state: State, before: Tensor | None) -> Tensor:
  """float32 (R, V); before int32 (R-1,) -> (R, V): every row by its own history, which is what the reply held and the
  tokens before that row. Repetition counts the prompt as well, presence and frequency the reply alone."""
  V, out = logits.shape[1], state.counts[1:2].expand(logits.shape[0], -1)
  if before is not None:
    hot = (before.reshape(1, -1, 1) == Tensor.arange(V, dtype=dtypes.int32).reshape(1, 1, -1))
    rows, at = Tensor.arange(logits.shape[0]).reshape(-1, 1, 1), Tensor.arange(before.shape[0]).reshape(1, -1, 1)
    out = out + (hot & (at < rows)).cast(dtypes.int32).sum(1)
  seen, rep = (out + state.counts[0:1]) > 0, state.penalties[0]
  x = seen.where((logits > 0).where(logits / rep, logits * rep), logits) + state.bias
  return (x - (out > 0).where(state.penalties[1], 0) - out * state.penalties[2]).contiguous()

def run(target: Target, cache: Cache, draft: Drafter | None, state: State, plan: Plan) -> Tensor:
  """-> int32 (depth+2,): n_accepted, then the tokens to emit; tokens past n_accepted+1 mean nothing. Moves anchor and
  position past them. A token of -1 says that the logits behind it can't be used; nothing may run after it."""
  ops, K, V = target.ops, plan.depth, target.config.vocab_size
  drawn: list[Tensor] = []

  def choose(logits: Tensor, row: int) -> tuple[Tensor, Tensor | None]:
    if plan.penalised:
      logits = penalise(logits.expand(row + 1, -1), state, Tensor.cat(*drawn) if drawn else None)[row:row + 1].contiguous()
    if plan.rule == "greedy": token, law = ops.argmax(logits), None
    else:
      law = ops.probs(logits, state.settings)
      token = ops.pick(law, state.seed, state.pos, DRAFT if plan.rule == "rejection" else TARGET, row)
    drawn.append(token)
    return token, law

  proposal = draft.propose(state.anchor, state.pos, K, choose, plan.context) if draft and K else None
  rows = state.anchor if proposal is None else state.anchor.cat(proposal.tokens)
  rows = rows.pad((0, plan.width - K - 1)).clip(0, V - 1).cast(dtypes.int32).contiguous().realize()
  h, taps = target.forward_taps(rows, state.pos, cache, plan.context, draft.tap_layers if draft else ())
  logits = target.head(h).realize()                        # all rows: a slice of them would cost a copy
  if plan.penalised: logits = penalise(logits, state, proposal.tokens if proposal else None).realize()
  drafted = proposal.tokens if proposal else None
  if plan.rule == "greedy": n, tokens = verify.equal(ops.argmax(logits)[:K + 1], drafted)
  else:
    law = ops.probs(logits, state.settings)
    if plan.rule == "coupled" or proposal is None or proposal.probs is None:
      n, tokens = verify.equal(ops.pick(law, state.seed, state.pos, TARGET)[:K + 1], drafted)
    else:
      assert drafted is not None
      n, weights = verify.rejection(law[:K + 1], drafted, proposal.probs, ops.uniforms(state.seed, state.pos, K, ACCEPT))
      n = n.contiguous().realize()
      tokens = verify.emitted(n, drafted, ops.pick(weights.contiguous(), state.seed, (state.pos + n).contiguous(), TARGET))
  packed = n.cat(tokens).cast(dtypes.int32).contiguous().realize()
  if draft: Tensor.realize(*draft.commit(rows, taps, state.pos, plan.context))
  if plan.penalised:
    hot = packed[1:].reshape(-1, 1) == Tensor.arange(V, dtype=dtypes.int32).reshape(1, -1)
    new = (hot & (Tensor.arange(K + 1).reshape(-1, 1) <= packed[0])).cast(dtypes.int32).sum(0)
    state.counts.assign((state.counts + Tensor.stack(new * 0, new)).contiguous()).realize()
  Tensor.realize(state.anchor.assign(packed[packed[0:1] + 1].contiguous()), state.pos.assign((state.pos + packed[0:1] + 1).contiguous()))
  return packed
