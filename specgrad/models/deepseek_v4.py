"""The DeepSeek-V4 target: embedding, blocks of attention and experts on S residual streams, head.

`Target` holds weights by their checkpoint names and no state; `Cache` holds the buffers of one sequence. `forward` takes
any number of rows at a position that kernels read on the device. Rows beyond the ones a caller wants (padding, rejected
drafts) write only to slots that are written again before any later query can see them, so they are undone by moving the
position back."""
import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from specgrad.config import Config
from specgrad.models.rope import frequencies
from specgrad.quant import operations
from specgrad.quant.twin import Weight, key_bytes, rnd, row_bytes

MAX_ROWS = 128                                             # rows of the longest chunk: the rings leave room for one
# official names whose rows are stacked into one tensor, first part first; experts also along a new first axis
FUSED = {"wkv_wgate": ("wkv", "wgate"), "w13": ("w1", "w3")}
Observe = Callable[[str, Tensor], None]

def round_up(n: int, m: int) -> int: return -(-n // m) * m

def buffer(device: str, *shape: int, dtype: DType = dtypes.float32) -> Tensor:
  """Uninitialised on purpose: what no position has written is never looked at."""
  return Tensor.empty(*shape, dtype=dtype, device=device).realize()

def rows(device: str, n: int, config: Config, w4a8: bool) -> Tensor:
  """n cached rows of the attention: float32, or the bytes of encode_rows."""
  if w4a8: return buffer(device, n, row_bytes(config.head_dim, config.qk_rope_head_dim), dtype=dtypes.uint8)
  return buffer(device, n, config.head_dim)

class CompressorState:
  """Rolling projections (ring, 2 x width) and finished entries (capacity, head width) of one compressor.

  The ring keeps the rows that unfinished entries may still need (two blocks for ratio 4, whose blocks overlap) and a whole
  chunk on top, so that a chunk may be written before it is read. Entry j is visible from position (j+1)*ratio-1 on."""
  def __init__(self, config: Config, ratio: int, index: bool, max_context: int, device: str, w4a8: bool):
    blocks, dim, n = 2 if ratio == 4 else 1, config.index_head_dim if index else config.head_dim, (max_context + MAX_ROWS) // ratio + 2
    self.ring = buffer(device, round_up(blocks * ratio + MAX_ROWS, ratio), 2 * blocks * dim)
    if not index: self.entries = rows(device, n, config, w4a8)
    else: self.entries = buffer(device, n, key_bytes(dim), dtype=dtypes.uint8) if w4a8 else buffer(device, n, dim)

class LayerCache:
  """Window ring (position p in slot p mod its length) and, for compressed layers, the compressor's and indexer's state."""
  def __init__(self, config: Config, ratio: int, max_context: int, device: str, w4a8: bool):
    self.window = rows(device, round_up(config.sliding_window + MAX_ROWS, 32), config, w4a8)
    self.compressor = CompressorState(config, ratio, False, max_context, device, w4a8) if ratio else None
    self.indexer = CompressorState(config, ratio, True, max_context, device, w4a8) if ratio == 4 else None

class Cache:
  """All state of one sequence but its position. The buffers live as long as the model and are never cleared: what a query
  may see follows from its position alone."""
  def __init__(self, config: Config, max_context: int, device: str, w4a8: bool = False):
    self.layers = [LayerCache(config, r, max_context, device, w4a8) for r in config.compress_ratios]

  def buffers(self) -> list[Tensor]:
    """Every buffer, layer by layer: the window ring, then ring and entries of the compressor and of the indexer."""
    states = [(c, c.compressor, c.indexer) for c in self.layers]
    return [b for c, *s in states for b in (c.window, *(x for y in s if y for x in (y.ring, y.entries)))]

def tree(weights: Mapping[str, Weight | Tensor]) -> Any:
  """{"layers.0.attn.wq_a.weight": t, ...} -> the same tensors as attributes: tree.layers[0].attn.wq_a.weight."""
  root: dict[str, Any] = {}
  for name, tensor in weights.items():
    *path, leaf = name.split(".")
    node = root
    for part in path: node = node.setdefault(part, {})
    node[leaf] = tensor

  def build(node: Any) -> Any:
    if not isinstance(node, dict): return node
    if all(k.isdigit() for k in node): return [build(node[str(i)]) for i in range(len(node))]
    return SimpleNamespace(**{k: build(v) for k, v in node.items()})
  return build(root)

class Target:
  """The model without its state. `weights` maps official names to matrices as they are stored and to float32 tensors of
  everything else (tid2eid: int32); what is always used together is stacked: see FUSED. The formats of the matrices and
  w4a8, which says whether values are rounded on the way as the official code does, decide the numerics."""
  def __init__(self, config: Config, weights: Mapping[str, Weight | Tensor], w4a8: bool = False):
    self.config, self.w, self.w4a8 = config, tree(weights), w4a8
    self.device = self.w.norm.weight.device
    self.ops = operations(self.device, w4a8)
    yarn = (config.rope_factor, config.rope_original, config.rope_beta_fast, config.rope_beta_slow)
    self.freqs = {compressed: Tensor(frequencies(config.qk_rope_head_dim, theta, y), dtype=dtypes.float32, device=self.device).realize()
                  for compressed, theta, y in ((False, config.rope_theta, None), (True, config.compress_rope_theta, yarn))}

  def forward(self, ids: Tensor, pos: Tensor, cache: Cache, context: int, observe: Observe | None = None) -> Tensor:
    """int32 (T,), int32 (1,) -> streams float32 (T, S, D) after the last layer. Writes rows pos..pos+T-1 of `cache`.

    T is at most MAX_ROWS. No entry beyond `context` positions is looked at: pos+T must not exceed it for rows that count."""
    return self.forward_taps(ids, pos, cache, context, (), observe)[0]

  def forward_taps(self, ids: Tensor, pos: Tensor, cache: Cache, context: int, tap_layers: tuple[int, ...],
                   observe: Observe | None = None) -> tuple[Tensor, Tensor | None]:
    """As forward, with the means over the streams after each of tap_layers, side by side (T, n*D), or none.

    Realizes layer by layer: scheduling one graph of all layers takes time that grows faster than the graph."""
    where, means = Where(self, ids, pos, context), []
    h = self.ops.embed(self.w.embed.weight, ids, self.config.hc_mult)
    for i, (layer, state) in enumerate(zip(self.w.layers, cache.layers)):
      see = (lambda name, t, i=i: observe(f"layer{i}.{name}", t.contiguous().realize())) if observe else None
      attend = functools.partial(attention, self, layer.attn, where=where, ratio=self.config.compress_ratios[i], state=state, observe=see)
      h, written = block(self, layer, h, ids, attend, see)
      Tensor.realize(h, *written)
      if see: see("out", h)
      if i in tap_layers: means.append(rnd(h.mean(1), self.w4a8))
    return h, Tensor.cat(*means, dim=1).contiguous().realize() if means else None

  def head(self, h: Tensor, observe: Observe | None = None) -> Tensor:
    """Streams (T, S, D) -> logits float32 (T, V)."""
    c, w = self.config, self.w
    y, x = self.ops.hc_head(h, w.hc_head_fn, w.hc_head_scale, w.hc_head_base, w.norm.weight, c.hc_eps, c.rms_norm_eps)
    if observe: observe("hc_head", y.realize()), observe("final_norm", x.realize())
    return self.ops.linear(x, w.head.weight, rounded=False)

class Where:
  """What every layer of one forward needs to know of its rows: tokens, position, and the rotary tables for it."""
  def __init__(self, model: Target, ids: Tensor, pos: Tensor, context: int):
    T, table = ids.shape[0], model.ops.rope_table
    self.ids, self.pos, self.context = ids, pos, context
    self.rope = {compressed: table(f, pos, T) for compressed, f in model.freqs.items()}
    self.block_rope = {r: table(model.freqs[True], pos, -(-T // r), r) for r in set(model.config.compress_ratios) if r}

def block(model: Any, w: Any, h: Tensor, ids: Tensor, attend: Callable[[Tensor], tuple[Tensor, list[Tensor]]],
          observe: Observe | None = None) -> tuple[Tensor, list[Tensor]]:
  """One layer around its attention: streams (T, S, D) -> streams, and the buffers that the attention wrote (to be realized
  with them)."""
  c, ops = model.config, model.ops
  settings = c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps
  x, post, comb = ops.hc_pre(h, w.hc_attn_fn, w.hc_attn_scale, w.hc_attn_base, w.attn_norm.weight, *settings)
  z, written = attend(x)
  if observe: observe("attn_in", x), observe("attn_out", z)
  h = ops.hc_post(z, h, post, comb)
  x, post, comb = ops.hc_pre(h, w.hc_ffn_fn, w.hc_ffn_scale, w.hc_ffn_base, w.ffn_norm.weight, *settings)
  z = moe(model, w.ffn, x, ids, observe)
  if observe: observe("ffn_in", x), observe("ffn_out", z)
  return ops.hc_post(z, h, post, comb), written

def attention(model: Any, w: Any, x: Tensor, where: Where, ratio: int, state: LayerCache,
              observe: Observe | None) -> tuple[Tensor, list[Tensor]]:
  """(T, D) -> (T, D): attention over the window and over the compressed entries each row may see; and the buffers written."""
  c, ops, rope, eps, pos = model.config, model.ops, where.rope[ratio != 0], model.config.rms_norm_eps, where.pos
  a = ops.rms_norm(ops.linear(x, w.wq_a.weight), w.q_norm.weight, eps)
  q = ops.head_rope(ops.linear(a, w.wq_b.weight), rope, c.num_attention_heads, eps)
  window = ops.kv_write(state.window, ops.linear(x, w.wkv.weight), w.kv_norm.weight, rope, pos, eps)
  written, entries, chosen, n = [window], None, None, where.context // ratio if ratio else 0
  if state.compressor:
    n = min(n, state.compressor.entries.shape[0])          # a context may end before its bucket does
    ring, entries = compressor(model, w.compressor, x, where.block_rope[ratio], state.compressor, pos, False)
    written += [ring, entries]
    if observe: observe("compressed_kv", entries)
  if state.indexer:
    ring, keys = compressor(model, w.indexer.compressor, x, where.block_rope[ratio], state.indexer, pos, True)
    written += [ring, keys]
    if n > c.index_topk:                                   # with no more entries than that, every visible one is chosen
      iq = ops.head_rope(ops.linear(a, w.indexer.wq_b.weight), rope, c.index_n_heads, None, index=True)
      chosen = ops.index_topk(iq, keys, ops.linear(x, w.indexer.weights_proj.weight), pos, n, c.index_topk, ratio)
      if observe: observe("chosen", chosen)
  o = ops.attend(q, window, entries, chosen, w.attn_sink, rope, pos, c.sliding_window, n, ratio)
  u = ops.linear(o.reshape(o.shape[0], -1), w.wo_a.weight, c.o_groups, quantise=False)
  return ops.linear(u, w.wo_b.weight), written

def compressor(model: Any, w: Any, x: Tensor, rope: Tensor, state: CompressorState, pos: Tensor, index: bool) -> tuple[Tensor, Tensor]:
  """(T, D) -> ring and entries after these rows."""
  proj = model.ops.linear(x, w.wkv_wgate.weight, quantise=False, rounded=False)
  return model.ops.compress(state.ring, state.entries, proj, w.ape, w.norm.weight, rope, pos, model.config.rms_norm_eps, index=index)

def moe(model: Any, w: Any, x: Tensor, ids: Tensor, observe: Observe | None) -> Tensor:
  """(T, D), int32 (T,) -> (T, D): the chosen experts and the shared one."""
  c, ops, gate = model.config, model.ops, w.gate
  scores = ops.linear(x, gate.weight, quantise=False, rounded=False)
  chosen, weights = ops.route(scores, getattr(gate, "bias", None), getattr(gate, "tid2eid", None), ids,
                              c.num_experts_per_tok, c.routed_scaling_factor)
  if observe: observe("experts", chosen)
  return ops.experts(x, w.experts.w13.weight, w.experts.w2.weight, w.shared_experts.w13.weight, w.shared_experts.w2.weight,
                     chosen, weights, c.swiglu_limit)
