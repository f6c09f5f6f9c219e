"""Which drafted tokens stand, as pure functions of arrays: no device read, no branch on data, no state.

Both rules keep the target's law: `equal` emits exactly what plain decoding would have (greedy, or drawn with noise that
depends on seed and position alone); `rejection` draws each token from the target's law, using the draft's where it can."""
from dataclasses import dataclass

from tinygrad import Tensor, dtypes

def accepted(ok: Tensor) -> Tensor:
  """bool (B, K) -> int32 (B,): how many stand before the first that does not."""
  stands = ok.cast(dtypes.int32)
  alive = Tensor.stack(*[stands[:, :i + 1].min(1) for i in range(stands.shape[1])])
  return alive.sum(0).cast(dtypes.int32)

def equal(target: Tensor, drafted: Tensor | None) -> tuple[Tensor, Tensor]:
  """int32 (B, K+1) the target's token after each row, int32 (B, K) -> n_accepted int32 (B,), tokens int32 (B, K+1).

  A drafted token stands if it is the target's own. tokens[b, :n+1] are to be emitted, the last of them is the bonus."""
  if drafted is None: return target[:, 0] * 0, target[:, :1]
  return accepted(target[:, :-1] == drafted), target

def rejection(target_probs: Tensor, drafted: Tensor, draft_probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
  """(B, K+1, V), int32 (B, K), (B, K, V), (B, K) in [0, 1) -> n_accepted int32 (B,), weights (B, V) of the token after them.

  Token k stands if u_k * q_k < p_k, strictly and without a division (arXiv 2211.17192, 2302.01318). After the first that
  does not, the next one is drawn from max(p - q, 0), after none from the last row of p. draft_probs must be what the
  tokens were drawn from. Where rounding leaves nothing of the difference, p itself: that branch has no probability.
  A row of draft_probs that is NaN counts as zero with its token refused."""
  at = drafted.maximum(0).unsqueeze(-1)
  p, q = target_probs[:, :-1].gather(2, at).squeeze(-1), draft_probs.gather(2, at).squeeze(-1)
  n = accepted((uniform * q < p) & (drafted >= 0))
  sequence = Tensor.arange(n.shape[0], dtype=dtypes.int32)
  row_p = target_probs[sequence, n]                                                          # (B, V)
  clean = draft_probs.isnan().where(0, draft_probs).pad(((0, 0), (0, 1), (0, 0)))            # after the last row: zeros
  left = (row_p - clean[sequence, n]).maximum(0)
  return n, (left.sum(1, keepdim=True) > 0).where(left, row_p)

def emitted(n: Tensor, drafted: Tensor, bonus: Tensor) -> Tensor:
  """int32 (B,), (B, K), (B,) -> int32 (B, K+1): the drafted tokens with the bonus in place n."""
  at = Tensor.arange(drafted.shape[1] + 1, dtype=dtypes.int32).reshape(1, -1)
  return (at == n.reshape(-1, 1)).where(bonus.reshape(-1, 1), drafted.pad(((0, 0), (0, 1))))

@dataclass(frozen=True)
class Label:
  """What the verifier guarantees, printed with every figure it stands behind."""
  family: str                                              # exact: the target's law; coupled: also the ids of plain decoding
  rule: str                                                # greedy, rejection, equal
  q_source: str                                            # realised (what was drawn from), one-hot, none
  depth: int
  numerics: str
  stop_rule: str = "fixed"                                 # the depth never depends on a drafted token

  def __str__(self) -> str:
    return f"{self.family}, rule {self.rule}, q {self.q_source}, depth {self.depth} {self.stop_rule}, numerics {self.numerics} fixed-width"
