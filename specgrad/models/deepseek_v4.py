"""The DeepSeek-V4 target: embedding, blocks of attention and experts on S residual streams, head.

`Target` holds weights by their checkpoint names and no state; `Cache` holds the buffers of some sequences, a slot for
each. `forward` takes as many rows of each of B sequences, at positions and slots that kernels read on the device from
`at` int32 (2, B). Rows beyond the ones a caller wants (padding, rejected drafts) write only to places that are written
again before any later query can see them, so they are undone by moving the position back.

On several devices every value here is an `Each` (see quant). What is split: heads, output groups, experts and the
vocabulary, by the table in plan.py; the residual streams are the same everywhere. Where devices meet: everyone, deliver,
total, gather."""
import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from specgrad.config import Config
from specgrad.models.rope import frequencies
from specgrad.quant import Each, deliver, everyone, flat, lift, on, operations, realize
from specgrad.quant.twin import key_bytes, rnd, row_bytes

MAX_ROWS = 128                                             # rows of the longest chunk: the rings leave room for one
# official names whose rows are stacked into one tensor, first part first; experts also along a new first axis
FUSED = {"wkv_wgate": ("wkv", "wgate"), "w13": ("w1", "w3")}
Observe = Callable[[str, Tensor], None]
Devices = str | tuple[str, ...]

def round_up(n: int, m: int) -> int: return -(-n // m) * m

def on_all(devices: Devices, make: Callable[[str], Tensor]) -> Any:
  """A tensor of each device, or the one of a single device."""
  if isinstance(devices, str): return make(devices)
  return Each(map(make, devices)) if len(devices) > 1 else make(devices[0])

def table(values: list[float], device: str) -> Tensor: return Tensor(values, dtype=dtypes.float32, device=device).realize()

def buffer(devices: Devices, *shape: int, dtype: DType = dtypes.float32) -> Any:
  """Uninitialised on purpose: what no position has written is never looked at. But allocated, so that what does not fit fails at
  load and not in the middle of a prompt."""
  made = on_all(devices, lambda d: Tensor.empty(*shape, dtype=dtype, device=d).realize())
  for t in flat((made,)): t._buffer().ensure_allocated()
  return made

def rows(devices: Devices, slots: int, n: int, config: Config, w4a8: bool) -> Any:
  """n cached rows of the attention for each slot: float32, or the bytes of encode_rows."""
  if w4a8: return buffer(devices, slots, n, row_bytes(config.head_dim, config.qk_rope_head_dim), dtype=dtypes.uint8)
  return buffer(devices, slots, n, config.head_dim)

class CompressorState:
  """Rolling projections (slots, ring, 2 x width) and finished entries (slots, n, head width) of one compressor.

  The ring keeps the rows that unfinished entries may still need (two blocks for ratio 4, whose blocks overlap) and a whole
  chunk on top, so that a chunk may be written before it is read. Entry j is visible from position (j+1)*ratio-1 on.
  `capacity` is the number of entries of a slot over all devices: split, entry j lies on device j mod their number."""
  def __init__(self, config: Config, ratio: int, index: bool, max_context: int, devices: Devices, w4a8: bool, slots: int, split: bool):
    blocks, dim = 2 if ratio == 4 else 1, config.index_head_dim if index else config.head_dim
    self.capacity = (max_context + MAX_ROWS) // ratio + 2
    n = -(-self.capacity // len(devices)) if split else self.capacity
    self.ring = buffer(devices, slots, round_up(blocks * ratio + MAX_ROWS, ratio), 2 * blocks * dim)
    if not index: self.entries = rows(devices, slots, n, config, w4a8)
    else: self.entries = buffer(devices, slots, n, key_bytes(dim), dtype=dtypes.uint8) if w4a8 else buffer(devices, slots, n, dim)

class LayerCache:
  """Window ring (position p in place p mod its length) and, for compressed layers, the compressor's and indexer's state."""
  def __init__(self, config: Config, ratio: int, max_context: int, devices: Devices, w4a8: bool, slots: int, split: bool):
    settings = max_context, devices, w4a8, slots, split
    self.window = rows(devices, slots, round_up(config.sliding_window + MAX_ROWS, 32), config, w4a8)
    self.compressor = CompressorState(config, ratio, False, *settings) if ratio else None
    self.indexer = CompressorState(config, ratio, True, *settings) if ratio == 4 else None

class Cache:
  """All state of `slots` sequences but their positions. The buffers live as long as the model and are never cleared: what a
  query may see follows from its position alone. split: of several devices each keeps its share of the entries; else all."""
  def __init__(self, config: Config, max_context: int, devices: Devices, w4a8: bool = False, slots: int = 1, split: bool = False):
    self.split = split and not isinstance(devices, str) and len(devices) > 1
    self.layers = [LayerCache(config, r, max_context, devices, w4a8, slots, self.split) for r in config.compress_ratios]

  def buffers(self) -> list[Any]:
    """Every buffer, layer by layer: the window ring, then ring and entries of the compressor and of the indexer."""
    states = [(c, c.compressor, c.indexer) for c in self.layers]
    return [b for c, *s in states for b in (c.window, *(x for y in s if y for x in (y.ring, y.entries)))]

def tree(weights: Mapping[str, Any]) -> Any:
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
  def __init__(self, config: Config, weights: Mapping[str, Any], w4a8: bool = False):
    self.config, self.w, self.w4a8 = config, tree(weights), w4a8
    norm = self.w.norm.weight
    self.devices = tuple(t.device for t in norm) if isinstance(norm, Each) else (norm.device,)
    self.ops, self.shares = operations(self.devices, w4a8), len(self.devices)
    yarn = (config.rope_factor, config.rope_original, config.rope_beta_fast, config.rope_beta_slow)
    tables = ((False, frequencies(config.qk_rope_head_dim, config.rope_theta, None)),
              (True, frequencies(config.qk_rope_head_dim, config.compress_rope_theta, yarn)))
    self.freqs = {compressed: on_all(self.devices, functools.partial(table, f)) for compressed, f in tables}

  def forward(self, ids: Any, at: Any, cache: Cache, context: int, observe: Observe | None = None) -> Any:
    """int32 (T,), int32 (2, B) -> streams float32 (T, S, D) after the last layer. T/B rows of each sequence, from its position
    in at[0] on, are written to its slot at[1] of `cache`.

    T/B is at most MAX_ROWS. No entry beyond `context` positions is looked at: no row that counts may lie beyond."""
    return self.forward_taps(ids, at, cache, context, (), observe)[0]

  def forward_taps(self, ids: Any, at: Any, cache: Cache, context: int, tap_layers: tuple[int, ...],
                   observe: Observe | None = None) -> tuple[Any, Any]:
    """As forward, with the means over the streams after each of tap_layers, side by side (T, n*D), or none.

    Realizes layer by layer: scheduling one graph of all layers takes time that grows faster than the graph."""
    where, means = Where(self, ids, at, context, cache.split), []
    h = self.embed(ids)
    for i, (layer, state) in enumerate(zip(self.w.layers, cache.layers)):
      see = (lambda name, t, i=i: observe(f"layer{i}.{name}", on(0, t).contiguous().realize())) if observe else None
      attend = functools.partial(attention, self, layer.attn, where=where, ratio=self.config.compress_ratios[i], state=state, observe=see)
      h, written = block(self, layer, h, ids, attend, see)
      realize(h, *written)
      if see: see("out", h)
      if i in tap_layers: means.append(lift(lambda h: rnd(h.mean(1), self.w4a8))(h))
    return h, realize(lift(lambda *m: Tensor.cat(*m, dim=1).contiguous())(*means)) if means else None

  def embed(self, ids: Any) -> Any:
    """int32 (T,) -> streams float32 (T, S, D). Of several devices each has the rows of its part of the vocabulary."""
    ops, table, S = self.ops, self.w.embed.weight, self.config.hc_mult
    if ops.alone: return ops.embed(table, ids, S)
    first = Each(r * (self.config.vocab_size // self.shares) for r in range(self.shares))
    x = ops.total(ops.embed(table, ids, 1, first=first))
    return realize(lift(lambda x: x.expand(-1, S, -1).contiguous())(x))

  def head(self, h: Any, observe: Observe | None = None) -> Any:
    """Streams (T, S, D) -> logits float32 (T, V)."""
    c, w = self.config, self.w
    y, x = self.ops.hc_head(h, w.hc_head_fn, w.hc_head_scale, w.hc_head_base, w.norm.weight, c.hc_eps, c.rms_norm_eps)
    if observe: observe("hc_head", on(0, y).realize()), observe("final_norm", on(0, x).realize())
    return self.logits(x)

  def logits(self, x: Any) -> Any:
    """float32 (T, D) -> (T, V): the product with the head, which a draft shares."""
    return self.ops.gather(self.ops.linear(x, self.w.head.weight, rounded=False))

class Where:
  """What every layer of one forward needs to know of its rows: tokens, positions and slots, and the rotary tables."""
  def __init__(self, model: Target, ids: Any, at: Any, context: int, split: bool = False):
    T, B, table = on(0, ids).shape[0], on(0, at).shape[1], model.ops.rope_table
    self.ids, self.at, self.context, self.split = ids, at, context, split
    self.rope = {compressed: table(f, at, T) for compressed, f in model.freqs.items()}
    self.block_rope = {r: table(model.freqs[True], at, B * -(-(T // B) // r), r) for r in set(model.config.compress_ratios) if r}

def block(model: Any, w: Any, h: Any, ids: Any, attend: Callable[[Any], tuple[Any, list[Any]]],
          observe: Observe | None = None) -> tuple[Any, list[Any]]:
  """One layer around its attention: streams (T, S, D) -> streams, and the buffers that the attention wrote (to be realized
  with them)."""
  c, ops = model.config, model.ops
  settings = c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps
  x, post, comb = ops.hc_pre(h, w.hc_attn_fn, w.hc_attn_scale, w.hc_attn_base, w.attn_norm.weight, *settings)
  z, written = attend(x)
  if observe: observe("attn_in", x)
  h = ops.hc_post(z, h, post, comb)
  x, post, comb = ops.hc_pre(h, w.hc_ffn_fn, w.hc_ffn_scale, w.hc_ffn_base, w.ffn_norm.weight, *settings)
  z = moe(model, w.ffn, x, ids, observe)
  if observe: observe("ffn_in", x)
  return ops.hc_post(z, h, post, comb), written

def attention(model: Any, w: Any, x: Any, where: Where, ratio: int, state: LayerCache, observe: Observe | None) -> tuple[Any, list[Any]]:
  """(T, D) -> every device's share of (T, D): attention over the window and over the compressed entries each row may see; and the
  buffers written.

  Each device computes its own heads. Where entries are split, a device attends to its own of them for all heads: it is given
  everyone's queries, and gives back everyone's shares of the softmax."""
  c, ops, rope, eps, at, split = model.config, model.ops, where.rope[ratio != 0], model.config.rms_norm_eps, where.at, where.split
  a = ops.rms_norm(ops.linear(x, w.wq_a.weight), w.q_norm.weight, eps)
  q = ops.head_rope(ops.linear(a, w.wq_b.weight), rope, c.num_attention_heads // model.shares, eps)
  window = ops.kv_write(state.window, ops.linear(x, w.wkv.weight), w.kv_norm.weight, rope, at, eps)
  written, entries, chosen, n = [window], None, None, where.context // ratio if ratio else 0
  if state.compressor:
    n = min(n, state.compressor.capacity)                  # a context may end before its bucket does
    ring, entries = compressor(model, w.compressor, x, where, ratio, state.compressor, False)
    written += [ring, entries]
    if observe: observe("compressed_kv", entries)
  if state.indexer:
    ring, keys = compressor(model, w.indexer.compressor, x, where, ratio, state.indexer, True)
    written += [ring, keys]
    if n > c.index_topk:                                   # with no more entries than that, every visible one is chosen
      iq = ops.head_rope(ops.linear(a, w.indexer.wq_b.weight), rope, c.index_n_heads, None, index=True)
      weight, k = ops.linear(x, w.indexer.weights_proj.weight), c.index_topk
      if not split: chosen = ops.index_topk(iq, keys, weight, at, n, k, ratio)
      else:
        best = everyone(ops.index_best(iq, keys, weight, at, n, k, ratio, ops.rank, model.shares))
        chosen = ops.index_choose(best, n, k, ops.rank, model.shares)
      if observe: observe("chosen", chosen)
  if split and entries is not None:
    parts = ops.attend_part(everyone(q), window, entries, chosen, at, c.sliding_window, n, ratio, ops.rank, c.qk_rope_head_dim)
    o = ops.attend_merge(deliver(parts), w.attn_sink, rope)
  else: o = ops.attend(q, window, entries, chosen, w.attn_sink, rope, at, c.sliding_window, n, ratio)
  z = output(model, w, o, model.shares, rounded=ops.alone)
  if observe: observe("attn_out", ops.total(z))
  return everyone(z), written

def output(model: Any, w: Any, o: Any, shares: int, rounded: bool) -> Any:
  """(T, H, d) of a device's heads -> (T, D): its groups' products, then their share of the sum over all groups."""
  u = model.ops.linear(lift(lambda o: o.reshape(o.shape[0], -1))(o), w.wo_a.weight, model.config.o_groups // shares, quantise=False)
  return model.ops.linear(u, w.wo_b.weight, rounded=rounded)

def compressor(model: Any, w: Any, x: Any, where: Where, ratio: int, state: CompressorState, index: bool) -> tuple[Any, Any]:
  """(T, D) -> ring and entries after these rows."""
  ops, split = model.ops, {"rank": model.ops.rank, "ranks": model.shares} if where.split else {}
  proj = ops.linear(x, w.wkv_wgate.weight, quantise=False, rounded=False)
  return ops.compress(state.ring, state.entries, proj, w.ape, w.norm.weight, where.block_rope[ratio], where.at, model.config.rms_norm_eps,
                      index=index, **split)

def moe(model: Any, w: Any, x: Any, ids: Any, observe: Observe | None) -> Any:
  """(T, D), int32 (T,) -> every device's share of (T, D): the chosen experts and the shared one. Of several devices each has its
  experts by number."""
  c, ops, gate, n = model.config, model.ops, w.gate, model.shares
  scores = ops.linear(x, gate.weight, quantise=False, rounded=False)
  chosen, weights = ops.route(scores, getattr(gate, "bias", None), getattr(gate, "tid2eid", None), ids,
                              c.num_experts_per_tok, c.routed_scaling_factor)
  if observe: observe("experts", chosen)
  first = {} if ops.alone else {"first": Each(c.n_routed_experts * r // n for r in range(n)), "rounded": False}
  z = ops.experts(x, w.experts.w13.weight, w.experts.w2.weight, w.shared_experts.w13.weight, w.shared_experts.w2.weight, chosen, weights,
                  c.swiglu_limit, **first)
  if observe: observe("ffn_out", ops.total(z))
  return everyone(z)
