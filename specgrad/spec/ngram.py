"""Prompt lookup as a draft: what followed the last place where the newest tokens stood before. Deterministic, no model."""
from tinygrad import Tensor, dtypes

from specgrad.models.dspark import Choose, Draft
from specgrad.quant.twin import count, write_rows

class NgramDraft:
  """`history` int32 (n, 1) holds the processed ids by position; ids at or after the position are stale and not looked at."""
  tap_layers: tuple[int, ...] = ()
  depth_limit = 15

  def __init__(self, capacity: int, device: str):
    self.history = Tensor.empty(capacity, 1, dtype=dtypes.int32, device=device).realize()

  def propose(self, anchor: Tensor, pos: Tensor, depth: int, choose: Choose, context: int) -> Draft:
    """int32 (1,), int32 (1,) -> the `depth` tokens after the newest earlier place that ends in the longest of the last
    three, two or one tokens. Where nothing matches, or the place is too near the end, the token is 0."""
    n = min(context, self.history.shape[0])
    h = self.history[:n, 0]
    at = count(n)
    before = [h[(pos - i).maximum(0)] for i in (1, 2)]                                       # (1,) each
    one = (h == anchor) & (at < pos)
    two = one & (at >= 1) & (h.pad((1, 0))[:n] == before[0])
    three = two & (at >= 2) & (h.pad((2, 0))[:n] == before[1])
    score = (one.cast(dtypes.int32) + two.cast(dtypes.int32) + three.cast(dtypes.int32)) * n + at
    place = one.where(score, -1).contiguous().max(keepdim=True)
    follow = place % n + 1 + count(depth)
    tokens = ((place >= 0) & (follow < pos)).where(h[follow.minimum(n - 1)], 0)
    return Draft(((place >= 0) & (follow == pos)).where(anchor, tokens).cast(dtypes.int32).contiguous(), None)

  def commit(self, tokens: Tensor, taps: Tensor | None, pos: Tensor, context: int) -> list[Tensor]:
    """The ids (T,) of positions pos..pos+T-1."""
    return [write_rows(self.history, tokens.reshape(-1, 1), pos)]
