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

from specgrad.models.deepseek_v4 import MAX_ROWS, Observe, Target, block, output, round_up, rows, tree
from specgrad.quant import lift, on, realize
from specgrad.quant.twin import as_weight, floats

Choose = Callable[[Any, int], tuple[Any, Any]]             # logits (B, V), row -> tokens (B,), their law (B, V) or none

@dataclass
class Draft:
  """What a draft proposes to B sequences, sequence after sequence. probs are what the tokens were really drawn from, none:
  each is certain (argmax, lookup)."""
  tokens: Any                                              # int32 (B*K,)
  probs: Any                                               # float32 (B*K, V), or none
  logits: Any = None                                       # float32 (B*K, V)
  confidence: Any = None                                   # float32 (B*K,), raw; sigmoid: chance that the token is accepted

def block_ids(anchor: Tensor, depth: int, noise: int) -> Tensor:
  """int32 (B,) -> int32 (B*depth,): each anchor with noise after it."""
  return anchor.maximum(0).reshape(-1, 1).pad(((0, 0), (0, depth - 1)), value=noise).flatten().cast(dtypes.int32).contiguous()

def side_by_side(*columns: Tensor) -> Tensor:
  """K x (B, ...) -> (B*K, ...): what was made place by place, sequence after sequence."""
  return Tensor.stack(*columns, dim=1).flatten(0, 1).contiguous()

class DSpark:
  """Stages, their rings, and the target whose embedding and head they share. The rings hold only what `commit` wrote.

  Of several devices each computes the stages' attention as a whole: three layers of it cost less than an exchange each."""
  def __init__(self, target: Target, weights: Mapping[str, Any], slots: int = 1):
    assert target.config.dspark is not None
    self.config, self.target, self.ops, self.shares = target.config, target, target.ops, target.shares
    self.settings, self.stages = target.config.dspark, tree(weights).mtp
    self.depth_limit, self.tap_layers = self.settings.dspark_block_size, self.settings.dspark_target_layer_ids
    ring = round_up(self.config.sliding_window + MAX_ROWS, 32)
    self.rings = [rows(target.devices, slots, ring, self.config, target.w4a8) for _ in self.stages]

  def context(self, taps: Any) -> Any:
    """float32 (T, n*D) -> the context rows (T, D), the same for every stage."""
    first = self.stages[0]
    return self.ops.rms_norm(self.ops.linear(taps, first.main_proj.weight), first.main_norm.weight, self.config.rms_norm_eps)

  def commit(self, tokens: Any, taps: Any, at: Any, context: int) -> list[Any]:
    """Context rows of T/B positions of each sequence into every stage's ring, from the target's taps (T, n*D). Rows of
    rejected tokens may be among them: their positions are written again before a block can see them. -> the buffers written."""
    assert taps is not None
    c, rope, x = self.config, self.ops.rope_table(self.target.freqs[False], at, on(0, taps).shape[0]), self.context(taps)
    return [self.ops.kv_write(ring, self.ops.linear(x, s.attn.wkv.weight), s.attn.kv_norm.weight, rope, at, c.rms_norm_eps)
            for ring, s in zip(self.rings, self.stages)]

  def attention(self, w: Any, ring: Any, rope: Any, at: Any, x: Any) -> tuple[Any, list[Any]]:
    """(B*K, D) -> (B*K, D), and no buffers: a block's own rows are not kept."""
    c, ops, eps = self.config, self.ops, self.config.rms_norm_eps
    a = ops.rms_norm(ops.linear(x, w.wq_a.weight), w.q_norm.weight, eps)
    q = ops.head_rope(ops.linear(a, w.wq_b.weight), rope, c.num_attention_heads, eps)
    kv = ops.kv_rows(ops.linear(x, w.wkv.weight), w.kv_norm.weight, rope, eps)
    return output(self, w, ops.attend_block(q, ring, kv, w.attn_sink, rope, at, c.sliding_window), 1, True), []

  def propose(self, anchor: Any, at: Any, depth: int, choose: Choose, context: int = 0, observe: Observe | None = None) -> Draft:
    """int32 (B,) the newest tokens, not yet processed, and their positions and slots int32 (2, B) -> `depth` drafted tokens
    after each.

    Reads the rings below each position and writes nothing. depth is at most depth_limit; a shorter block is a block of that
    many rows. choose(logits (B, V), row) takes each token."""
    c, ops, last, B = self.config, self.ops, self.stages[-1], on(0, anchor).shape[0]
    ids = realize(lift(block_ids)(anchor, depth, self.settings.dspark_noise_token_id))
    rope, h = ops.rope_table(self.target.freqs[False], at, B * depth), self.target.embed(ids)
    for i, (stage, ring) in enumerate(zip(self.stages, self.rings)):
      h = realize(block(self, stage, h, ids, functools.partial(self.attention, stage.attn, ring, rope, at))[0])
      if observe: observe(f"mtp{i}.out", on(0, h))
    y, x = ops.hc_head(h, last.hc_head_fn, last.hc_head_scale, last.hc_head_base, last.norm.weight, c.hc_eps, c.rms_norm_eps)
    base = self.target.logits(x)
    if observe: [observe(name, on(0, t).realize()) for name, t in (("hc_head", y), ("final_norm", x), ("base_logits", base))]
    w1, w2 = last.markov_head.markov_w1.weight, last.markov_head.markov_w2.weight
    before, logits, laws = [anchor], [], []
    for i in range(depth):
      logits.append(ops.markov(base, i, w1, w2, before[-1]))
      token, law = choose(logits[-1], i)
      before.append(token)
      laws += [law] if law is not None else []

    def confidence(y: Tensor, w1: Any, proj: Any, *tokens: Tensor) -> Tensor:
      e = floats(as_weight(w1)._replace(data=as_weight(w1).data[side_by_side(*tokens).maximum(0)]))
      return (y.cat(e, dim=1) @ floats(proj).T).reshape(-1)
    join = lift(side_by_side)
    return Draft(join(*before[1:]), join(*laws) if laws else None, join(*logits),
                 lift(confidence)(y, w1, last.confidence_head.proj.weight, *before[:-1]))
