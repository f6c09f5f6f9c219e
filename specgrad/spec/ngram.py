"""Prompt lookup as a draft: what followed the last place where the newest tokens stood before. Deterministic, no model."""
from typing import Any

from tinygrad import Tensor, dtypes

from specgrad.models.deepseek_v4 import Devices, buffer
from specgrad.models.dspark import Choose, Draft
from specgrad.quant import lift
from specgrad.quant.twin import count, write_rows

class NgramDraft:
  """`history` int32 (slots, n, 1) holds the processed ids by position; ids at or after the position are stale and not looked
  at."""
  tap_layers: tuple[int, ...] = ()
  depth_limit = 15

  def __init__(self, capacity: int, devices: Devices, slots: int = 1):
    self.history = buffer(devices, slots, capacity, 1, dtype=dtypes.int32)

  def propose(self, anchor: Any, at: Any, depth: int, choose: Choose, context: int) -> Draft:
    """int32 (B,), int32 (2, B) -> the `depth` tokens after the newest earlier place that ends in the longest of the last
    three, two or one tokens. Where nothing matches, or the place is too near the end, the token is 0."""
    return Draft(lift(lookup)(self.history, anchor, at, depth, context), None)

  def commit(self, tokens: Any, taps: Any, at: Any, context: int) -> list[Any]:
    """The ids (T,) of T/B positions of each sequence."""
    return [lift(lambda history, tokens, at: write_rows(history, tokens.reshape(-1, 1), at))(self.history, tokens, at)]

def lookup(history: Tensor, anchor: Tensor, at: Tensor, depth: int, context: int) -> Tensor:
  """int32 (slots, n, 1), (B,), (2, B) -> int32 (B*depth,)."""
  n = min(context, history.shape[1])
  h, pos, anchor, i = history[at[1], :n, 0], at[0].reshape(-1, 1), anchor.reshape(-1, 1), count(n).reshape(1, -1)     # (B, n), (B, 1)
  before = [h.gather(1, (pos - k).maximum(0)) for k in (1, 2)]
  one = (h == anchor) & (i < pos)
  two = one & (i >= 1) & (h.pad(((0, 0), (1, 0)))[:, :n] == before[0])
  three = two & (i >= 2) & (h.pad(((0, 0), (2, 0)))[:, :n] == before[1])
  score = (one.cast(dtypes.int32) + two.cast(dtypes.int32) + three.cast(dtypes.int32)) * n + i
  place = one.where(score, -1).contiguous().max(1, keepdim=True)
  follow = place % n + 1 + count(depth).reshape(1, -1)                                                              # (B, depth)
  tokens = ((place >= 0) & (follow < pos)).where(h.gather(1, follow.minimum(n - 1)), 0)
  return ((place >= 0) & (follow == pos)).where(anchor, tokens).cast(dtypes.int32).flatten().contiguous()
