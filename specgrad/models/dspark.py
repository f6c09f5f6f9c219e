"""The DSpark draft inside a DeepSeek-V4 checkpoint: three blocks that see the target only through context rows.

A context row is a normed projection of the target's streams after a few tap layers; every stage keeps its own ring of
them. A block is [anchor, noise x (K-1)], all rows see each other, and one pass gives base logits for K tokens; then a
rank-r table adds to each row a bias that depends on the token just before it, left to right. Tensors: mtp.0, mtp.1, mtp.2
of the checkpoint. Reference: the official inference/model.py, class DSparkBlock and forward_spec."""
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, dtypes

from specgrad.models.deepseek_v4 import MAX_ROWS, Observe, Target, block, round_up, rows, tree
from specgrad.quant.twin import Weight, as_weight, floats

Choose = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]  # logits (1, V), row -> token (1,), its law (1, V) or none

@dataclass
class Draft:
  """What a draft proposes. probs are what the tokens were really drawn from, none: each is certain (argmax, lookup)."""
  tokens: Tensor                                           # int32 (K,)
  probs: Tensor | None                                     # float32 (K, V)
  logits: Tensor | None = None                             # float32 (K, V)
  confidence: Tensor | None = None                         # float32 (K,), raw; sigmoid: chance that the token is accepted

class DSpark:
  """Stages, their rings, and the target whose embedding and head they share. The rings hold only what `commit` wrote."""
  def __init__(self, target: Target, weights: Mapping[str, Weight | Tensor]):
    assert target.config.dspark is not None
    self.config, self.target, self.ops, self.device = target.config, target, target.ops, target.device
    self.settings, self.stages = target.config.dspark, tree(weights).mtp
    self.depth_limit, self.tap_layers = self.settings.dspark_block_size, self.settings.dspark_target_layer_ids
    ring = round_up(self.config.sliding_window + MAX_ROWS, 32)
    self.rings = [rows(self.device, ring, self.config, target.w4a8) for _ in self.stages]

  def context(self, taps: Tensor) -> Tensor:
    """float32 (T, n*D) -> the context rows (T, D), the same for every stage."""
    first = self.stages[0]
    return self.ops.rms_norm(self.ops.linear(taps, first.main_proj.weight), first.main_norm.weight, self.config.rms_norm_eps)

  def commit(self, tokens: Tensor, taps: Tensor | None, pos: Tensor, context: int) -> list[Tensor]:
    """Context rows of positions pos..pos+T-1 into every stage's ring, from the target's taps (T, n*D). Rows of rejected
    tokens may be among them: their positions are written again before a block can see them. -> the buffers written."""
    assert taps is not None
    c, rope, x = self.config, self.ops.rope_table(self.target.freqs[False], pos, taps.shape[0]), self.context(taps)
    return [self.ops.kv_write(ring, self.ops.linear(x, s.attn.wkv.weight), s.attn.kv_norm.weight, rope, pos, c.rms_norm_eps)
            for ring, s in zip(self.rings, self.stages)]

  def attention(self, w: Any, ring: Tensor, rope: Tensor, pos: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(K, D) -> (K, D), and no buffers: a block's own rows are not kept."""
    c, ops, eps = self.config, self.ops, self.config.rms_norm_eps
    a = ops.rms_norm(ops.linear(x, w.wq_a.weight), w.q_norm.weight, eps)
    q = ops.head_rope(ops.linear(a, w.wq_b.weight), rope, c.num_attention_heads, eps)
    kv = ops.kv_rows(ops.linear(x, w.wkv.weight), w.kv_norm.weight, rope, eps)
    o = ops.attend_block(q, ring, kv, w.attn_sink, rope, pos, c.sliding_window)
    return ops.linear(ops.linear(o.reshape(o.shape[0], -1), w.wo_a.weight, c.o_groups, quantise=False), w.wo_b.weight), []

  def propose(self, anchor: Tensor, pos: Tensor, depth: int, choose: Choose, context: int = 0,
              observe: Observe | None = None) -> Draft:
    """int32 (1,) the newest token, not yet processed, and its position int32 (1,) -> `depth` drafted tokens after it.

    Reads the rings below pos and writes nothing. depth is at most depth_limit; a shorter block is a block of that many
    rows. choose(logits (1, V), row) takes each token."""
    c, ops, last = self.config, self.ops, self.stages[-1]
    noise = Tensor.full((depth - 1,), self.settings.dspark_noise_token_id, dtype=dtypes.int32, device=self.device)
    ids = (anchor.cat(noise) if depth > 1 else anchor).contiguous().realize()
    rope = ops.rope_table(self.target.freqs[False], pos, depth)
    h = ops.embed(self.target.w.embed.weight, ids, c.hc_mult)
    for i, (stage, ring) in enumerate(zip(self.stages, self.rings)):
      h = block(self, stage, h, ids, functools.partial(self.attention, stage.attn, ring, rope, pos))[0].realize()
      if observe: observe(f"mtp{i}.out", h)
    y, x = ops.hc_head(h, last.hc_head_fn, last.hc_head_scale, last.hc_head_base, last.norm.weight, c.hc_eps, c.rms_norm_eps)
    base = ops.linear(x, self.target.w.head.weight, rounded=False)
    if observe: observe("hc_head", y.realize()), observe("final_norm", x.realize()), observe("base_logits", base.realize())
    w1, w2 = last.markov_head.markov_w1.weight, last.markov_head.markov_w2.weight
    before, logits, laws = [anchor], [], []
    for i in range(depth):
      logits.append(ops.markov(base, i, w1, w2, before[-1]))
      token, law = choose(logits[-1], i)
      before.append(token)
      laws += [law] if law is not None else []
    e = floats(as_weight(w1)._replace(data=as_weight(w1).data[Tensor.cat(*before[:-1]).maximum(0)]))
    confidence = (y.cat(e, dim=1) @ floats(last.confidence_head.proj.weight).T).reshape(-1)
    return Draft(Tensor.cat(*before[1:]).contiguous(), Tensor.cat(*laws).contiguous() if laws else None, Tensor.cat(*logits), confidence)
