"""A smaller checkpoint of the same architecture and vocabulary as a draft: it drafts token by token with its own cache."""
from tinygrad import Tensor

from specgrad.models.deepseek_v4 import Cache, Target
from specgrad.models.dspark import Choose, Draft

class SmallDraft:
  """Rows that `propose` writes lie at pos and after it; `commit` writes them again from the tokens that were verified."""
  tap_layers: tuple[int, ...] = ()
  depth_limit = 15

  def __init__(self, model: Target, cache: Cache): self.model, self.cache = model, cache

  def propose(self, anchor: Tensor, pos: Tensor, depth: int, choose: Choose, context: int) -> Draft:
    """int32 (1,), int32 (1,) -> `depth` tokens after the anchor, each from the model's law given those before."""
    tokens, laws, rows = [anchor], [], []
    for i in range(depth):
      at = (pos + i).contiguous().realize()
      rows.append(self.model.head(self.model.forward(tokens[-1].maximum(0).contiguous().realize(), at, self.cache, context)))
      token, law = choose(rows[-1], i)
      tokens.append(token.realize())
      laws += [law] if law is not None else []
    return Draft(Tensor.cat(*tokens[1:]).contiguous(), Tensor.cat(*laws).contiguous() if laws else None, Tensor.cat(*rows))

  def commit(self, tokens: Tensor, taps: Tensor | None, pos: Tensor, context: int) -> list[Tensor]:
    """Rows pos..pos+T-1 of its cache from the tokens (T,) the target has just processed."""
    return [self.model.forward(tokens, pos, self.cache, context)]
