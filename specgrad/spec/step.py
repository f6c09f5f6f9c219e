"""One speculative step as a single traceable function: draft, verify, commit, all on the device.

A step takes B sequences at once, each by itself. Everything that changes from step to step is a buffer of `State`; nothing
is an argument. The caller reads one packed int32 tensor. A step without a draft is plain decoding; `width` rows wide it does
the very arithmetic of a speculative step, so that the two can be compared bit for bit."""
import math
from dataclasses import dataclass
from typing import Any, Protocol

from tinygrad import Tensor, dtypes

from specgrad.models.deepseek_v4 import Cache, Target
from specgrad.models.dspark import Choose, Draft
from specgrad.quant import lift, realize
from specgrad.spec import verify

TARGET, DRAFT, ACCEPT = 0, 1, 2                            # uses of the noise at a position

class Drafter(Protocol):
  """A draft keeps only what `commit` hands it, addressed by slot and position; `propose` may scribble from there on.

  propose: anchors int32 (B,) and positions and slots int32 (2, B) -> `depth` tokens a sequence, each taken by choose(logits (B, V),
  place). commit: T/B processed tokens a sequence (T,) and the target's taps (T, n*D), or none -> the buffers written."""
  tap_layers: tuple[int, ...]
  depth_limit: int
  def propose(self, anchor: Any, at: Any, depth: int, choose: Choose, context: int) -> Draft: ...
  def commit(self, tokens: Any, taps: Any, at: Any, context: int) -> list[Any]: ...

@dataclass(frozen=True)
class State:
  """The buffers that a step of B sequences reads and writes, and the settings of their replies. They live with the engine."""
  at: Any                                                  # int32 (2, B): position of each anchor, slot of the cache
  anchor: Any                                              # int32 (B,): the newest tokens, not yet processed; -1: nobody's lane
  seed: Any                                                # int32 (B, 2)
  settings: Any                                            # float32 (B, 4): temperature, top_p, top_k, min_p
  penalties: Any                                           # float32 (B, 3): repetition, presence, frequency
  bias: Any                                                # float32 (B, V): added to every row of logits
  counts: Any                                              # int32 (B, 2, V): in the prompt, in the reply (anchor included)
  number: int = 0                                          # of states of one size that are stepped at the same time

@dataclass(frozen=True)
class Plan:
  """What is fixed in a captured step."""
  rule: str                                                # "greedy", "rejection", "coupled"
  depth: int                                               # drafted tokens, 0: plain decoding
  width: int                                               # rows of the target a sequence, at least depth+1
  context: int                                             # no position beyond it is looked at
  penalised: bool                                          # penalties or bias are in use
  masked: bool = False                                     # some replies may only go on with certain tokens
  logprobs: bool = False                                   # the target's logits are returned, too

def penalise(logits: Tensor, counts: Tensor, penalties: Tensor, bias: Tensor, before: Tensor | None) -> Tensor:
  """float32 (B, R, V), State's buffers, int32 (B, R-1) or none -> (B, R, V): every row by its own history, which is what the
  reply held and the tokens before that row. Repetition counts the prompt as well, presence and frequency the reply alone."""
  B, R, V = logits.shape
  out = counts[:, 1:2].expand(-1, R, -1)
  if before is not None:
    hot = before.reshape(B, 1, -1, 1) == Tensor.arange(V, dtype=dtypes.int32).reshape(1, 1, 1, -1)
    rows, at = Tensor.arange(R).reshape(1, -1, 1, 1), Tensor.arange(before.shape[1]).reshape(1, 1, -1, 1)
    out = out + (hot & (at < rows)).cast(dtypes.int32).sum(2)
  seen, (repetition, presence, frequency) = (out + counts[:, 0:1]) > 0, (penalties[:, i].reshape(-1, 1, 1) for i in range(3))
  x = seen.where((logits > 0).where(logits / repetition, logits * repetition), logits) + bias.unsqueeze(1)
  return (x - (out > 0).where(presence, 0) - out * frequency).contiguous()

def counted(counts: Tensor, packed: Tensor) -> Tensor:
  """int32 (B, 2, V), (B, K+2) -> the counts with the emitted tokens in the reply's."""
  V, tokens = counts.shape[2], packed[:, 1:]
  stands = Tensor.arange(tokens.shape[1], dtype=dtypes.int32).reshape(1, -1) <= packed[:, :1]
  hot = (tokens.unsqueeze(-1) == Tensor.arange(V, dtype=dtypes.int32).reshape(1, 1, -1)) & stands.unsqueeze(-1)
  new = hot.cast(dtypes.int32).sum(1)
  return (counts + Tensor.stack(new * 0, new, dim=1)).contiguous()

def target_rows(anchor: Tensor, drafted: Tensor | None, width: int, vocabulary: int) -> Tensor:
  """int32 (B,), (B*K,) or none -> int32 (B*width,): what the target processes, padded with id 0; ids that are none become one."""
  rows = anchor.reshape(-1, 1)
  if drafted is not None: rows = rows.cat(drafted.reshape(rows.shape[0], -1), dim=1)
  rows = rows.pad(((0, 0), (0, width - rows.shape[1]))).clip(0, vocabulary - 1)
  return rows.cast(dtypes.int32).flatten().contiguous()

def moved(at: Tensor, anchor: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
  """The state after a step's tokens: position and anchor past them. Nobody's lane stays where it is."""
  used = anchor >= 0
  step = used.where(packed[:, 0] + 1, 0).reshape(1, -1)
  new = packed.gather(1, packed[:, :1] + 1).flatten()
  return (at + step.pad(((0, 1), (0, 0)))).contiguous(), used.where(new, anchor).contiguous()

def propose(target: Target, draft: Drafter, state: State, plan: Plan) -> Draft:
  """The draft's block for every sequence, each token drawn by the rule in force."""
  ops = target.ops
  drawn: list[Any] = []

  def choose(logits: Any, row: int) -> tuple[Any, Any]:
    if plan.penalised:
      def last(logits: Tensor, counts: Tensor, penalties: Tensor, bias: Tensor, *before: Tensor) -> Tensor:
        history = Tensor.stack(*before, dim=1) if before else None
        return penalise(logits.unsqueeze(1).expand(-1, row + 1, -1), counts, penalties, bias, history)[:, row].contiguous()
      logits = lift(last)(logits, state.counts, state.penalties, state.bias, *drawn)
    if plan.rule == "greedy": token, law = ops.argmax(logits), None
    else:
      law = ops.probs(logits, state.settings)
      token = ops.pick(law, state.seed, state.at, DRAFT if plan.rule == "rejection" else TARGET, row)
    drawn.append(token)
    return token, law
  return draft.propose(state.anchor, state.at, plan.depth, choose, plan.context)

def settle(target: Target, cache: Cache, draft: Drafter | None, state: State, plan: Plan, proposal: Draft | None, mask: Any = None) -> Any:
  """Verifies a proposal and moves on. -> int32 (B, depth+2): n_accepted, then the tokens to emit; tokens past n_accepted+1
  mean nothing. A token of -1 says that the logits behind it can't be used; nothing may run on that sequence after it. With
  plan.logprobs also the logits float32 (B*width, V), as the model gives them.

  mask: bool (B*width, V), the tokens that may follow each row. The rule keeps the law that is left of the target's."""
  ops, K, V = target.ops, plan.depth, target.config.vocab_size
  drafted = proposal.tokens if proposal else None
  rows = realize(lift(target_rows)(state.anchor, drafted, plan.width, V))
  h, taps = target.forward_taps(rows, state.at, cache, plan.context, draft.tap_layers if draft else ())
  plain = logits = realize(target.head(h))                 # all rows: a slice of them would cost a copy
  # one row a sequence beside the others: (B*width, ...) -> (B, K+1, ...), and the draft's (B*K, ...) -> (B, K, ...)
  split = lift(lambda x: x.reshape(-1, plan.width, *x.shape[1:])[:, :K + 1])
  block = lift(lambda x: x.reshape(-1, K, *x.shape[1:]))
  ahead = block(drafted) if proposal else None
  if plan.penalised:
    whole = lift(lambda logits, *history: penalise(logits.reshape(-1, plan.width, V), *history).reshape(-1, V))
    logits = realize(whole(logits, state.counts, state.penalties, state.bias, ahead))
  if mask is not None: logits = realize(lift(lambda logits, mask: mask.where(logits, -math.inf).contiguous())(logits, mask))
  if plan.rule == "greedy": n, tokens = lift(verify.equal)(split(ops.argmax(logits)), ahead)
  else:
    law = ops.probs(logits, state.settings)
    if plan.rule == "coupled" or proposal is None or proposal.probs is None:
      n, tokens = lift(verify.equal)(split(ops.pick(law, state.seed, state.at, TARGET)), ahead)
    else:
      n, weights = lift(verify.rejection)(split(law), ahead, block(proposal.probs), ops.uniforms(state.seed, state.at, K, ACCEPT))
      n = realize(lift(Tensor.contiguous)(n))
      after = lift(lambda at, n: (at + n.reshape(1, -1).pad(((0, 1), (0, 0)))).contiguous())(state.at, n)
      tokens = lift(verify.emitted)(n, ahead, ops.pick(lift(Tensor.contiguous)(weights), state.seed, after, TARGET))
  packed = realize(lift(lambda n, tokens: n.reshape(-1, 1).cat(tokens, dim=1).cast(dtypes.int32).contiguous())(n, tokens))
  if draft: realize(*draft.commit(rows, taps, state.at, plan.context))
  if plan.penalised: realize(lift(lambda counts, packed: counts.assign(counted(counts, packed)))(state.counts, packed))
  at, anchor = lift(moved)(state.at, state.anchor, packed)
  realize(lift(Tensor.assign)(state.at, at), lift(Tensor.assign)(state.anchor, anchor))
  return (packed, plain) if plan.logprobs else packed

def run(target: Target, cache: Cache, draft: Drafter | None, state: State, plan: Plan) -> Any:
  """A whole step: `propose`, then `settle`, which says what is returned."""
  return settle(target, cache, draft, state, plan, propose(target, draft, state, plan) if draft and plan.depth else None)
