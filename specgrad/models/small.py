"""A smaller checkpoint of the same architecture and vocabulary as a draft: it drafts token by token with its own cache."""
from typing import Any

from specgrad.models.deepseek_v4 import Cache, Target
from specgrad.models.dspark import Choose, Draft, side_by_side
from specgrad.quant import lift, realize
from specgrad.quant.twin import count

class SmallDraft:
  """Rows that `propose` writes lie at the position and after it; `commit` writes them again from what was verified."""
  tap_layers: tuple[int, ...] = ()
  depth_limit = 15

  def __init__(self, model: Target, cache: Cache): self.model, self.cache = model, cache

  def propose(self, anchor: Any, at: Any, depth: int, choose: Choose, context: int) -> Draft:
    """int32 (B,), int32 (2, B) -> `depth` tokens after each anchor, each from the model's law given those before."""
    tokens, laws, rows = [anchor], [], []
    valid = lift(lambda token: token.maximum(0).contiguous())
    ahead = lift(lambda at, i: (at + (1 - count(2).reshape(2, 1)) * i).contiguous())          # positions, not slots
    for i in range(depth):
      where = at if not i else realize(ahead(at, i))
      rows.append(self.model.head(self.model.forward(realize(valid(tokens[-1])), where, self.cache, context)))
      token, law = choose(rows[-1], i)
      tokens.append(realize(token))
      laws += [law] if law is not None else []
    join = lift(side_by_side)
    return Draft(join(*tokens[1:]), join(*laws) if laws else None, join(*rows))

  def commit(self, tokens: Any, taps: Any, at: Any, context: int) -> list[Any]:
    """T/B rows of each sequence into its cache from the tokens (T,) the target has just processed."""
    return [self.model.forward(tokens, at, self.cache, context)]
