"""A second opinion on the model's maths: numpy in float64, whole sequences at once, no caches, nothing of the package.

Written from the model's description alone. Frequencies and angles are float32, as in the official code; everything else is as
exact as float64 makes it."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray
Weights = dict[str, Array]

def rms(x: Array, eps: float) -> Array: return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)

def sigmoid(x: Array) -> Array: return 0.5 * (1 + np.tanh(x / 2))

# ------------------------------------------------------------------------------------------------ rotary embedding
def frequencies(dim: int, theta: float, yarn: dict[str, float] | None = None) -> Array:
  """float32 (dim/2,), rounded after each operation as the official code does: one unit in the last place is 6e-4 of a turn at
  position 65,535. yarn: the keys of config.json's rope_scaling."""
  one = np.float32(1)
  f = one / np.power(float(theta), np.arange(0, dim, 2) / dim).astype(np.float32)
  if yarn:
    edge = [dim * math.log(yarn["original_max_position_embeddings"] / (2 * math.pi * yarn[b])) / (2 * math.log(theta))
            for b in ("beta_fast", "beta_slow")]
    low, high = max(math.floor(edge[0]), 0), min(math.ceil(edge[1]), dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / np.float32(max(high - low, 1e-3)), 0, 1)
    smooth = one - ramp
    f = f / np.float32(yarn["factor"]) * (one - smooth) + f * smooth
  assert f.dtype == np.float32
  return f

def turns(positions: Array, freqs: Array) -> Array:
  """-> complex (n, r/2): e^(i * position * frequency)."""
  return np.exp(1j * (np.asarray(positions, np.float32)[:, None] * freqs.astype(np.float32)).astype(np.float64))

def rope_table(positions: Array, freqs: Array) -> Array:
  z = turns(positions, freqs)
  return np.stack([z.real, z.imag], -1).astype(np.float32)

def rotate(x: Array, z: Array) -> Array:
  """(n, ..., d), complex (n, r/2): the last r channels, read as adjacent (real, imaginary) pairs, times z."""
  r = z.shape[1] * 2
  pairs = x[..., -r::2] + 1j * x[..., 1 - r::2]
  pairs = pairs * z.reshape(len(z), *[1] * (x.ndim - 2), r // 2)
  return np.concatenate([x[..., :-r], np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], r)], -1)

# ------------------------------------------------------------------------------------------------ hyper-connections
def split(mixes: Array, scale: Array, base: Array, streams: int, iters: int, eps: float) -> tuple[Array, Array, Array]:
  """(T, 2S+SS) -> pre (T, S), post (T, S), comb (T, S, S), from source (rows) to destination (columns)."""
  S = streams
  m = mixes.astype(np.float64) * np.repeat(scale, [S, S, S * S]) + base
  logits = m[:, 2 * S:].reshape(-1, S, S)
  e = np.exp(logits - logits.max(2, keepdims=True))
  comb = e / e.sum(2, keepdims=True) + eps
  for i in range(iters):
    if i: comb = comb / (comb.sum(2, keepdims=True) + eps)
    comb = comb / (comb.sum(1, keepdims=True) + eps)
  return sigmoid(m[:, :S]) + eps, 2 * sigmoid(m[:, S:2 * S]), comb

def joint_mix(h: Array, fn: Array, eps: float) -> Array: return rms(h.reshape(len(h), -1), eps) @ fn.T

def hc_pre(h: Array, fn: Array, scale: Array, base: Array, norm: Array, iters: int, hc_eps: float,
           eps: float) -> tuple[Array, Array, Array]:
  pre, post, comb = split(joint_mix(h, fn, eps), scale, base, h.shape[1], iters, hc_eps)
  return rms(np.einsum("ts,tsd->td", pre, h), eps) * norm, post, comb

def hc_post(z: Array, h: Array, post: Array, comb: Array) -> Array:
  return np.einsum("tk,td->tkd", post, z) + np.einsum("tjk,tjd->tkd", comb, h)

def hc_head(h: Array, fn: Array, scale: Array, base: Array, norm: Array, hc_eps: float, eps: float) -> tuple[Array, Array]:
  y = np.einsum("ts,tsd->td", sigmoid(joint_mix(h, fn, eps) * scale + base) + hc_eps, h)
  return y, rms(y, eps) * norm

# ------------------------------------------------------------------------------------------------ attention
def compress(keys: Array, gates: Array, ape: Array, norm: Array, freqs: Array, eps: float) -> Array:
  """(n, w) twice, (R, w), (d,) -> finished entries (n // R, d); w = 2d where blocks overlap."""
  R, d = len(ape), len(norm)
  gates = gates + ape[np.arange(len(gates)) % R]
  entries = np.zeros((len(keys) // R, d))
  for j in range(len(entries)):
    own = slice(j * R, (j + 1) * R)
    k, g = keys[own, -d:], gates[own, -d:]
    if keys.shape[1] == 2 * d and j > 0:
      before = slice((j - 1) * R, j * R)
      k, g = np.concatenate([keys[before, :d], k]), np.concatenate([gates[before, :d], g])
    e = np.exp(g - g.max(0))
    entries[j] = (e * k).sum(0) / e.sum(0)
  return rotate(rms(entries, eps) * norm, turns(np.arange(len(entries)) * R, freqs))

def finished(positions: Array, ratio: int, n: int) -> Array:
  """bool (T, n): which entries exist for a query at each position."""
  return np.arange(n)[None] < (np.asarray(positions)[:, None] + 1) // ratio

def index_topk(q: Array, keys: Array, weight: Array, positions: Array, k: int, ratio: int) -> Array:
  """(T, H, d), (n, d), (T, H), (T,) -> bool (T, n)."""
  visible = finished(positions, ratio, len(keys))
  chosen = np.zeros_like(visible)
  for t in range(len(q)):
    at = np.flatnonzero(visible[t])
    score = (np.maximum(q[t] @ keys[at].T, 0) * weight[t][:, None]).sum(0) / math.sqrt(q.shape[1] * q.shape[2])
    chosen[t, at[np.argsort(-score, kind="stable")[:k]]] = True
  return chosen

def attend(q: Array, kv: Array, entries: Array, seen: Array, sink: Array, freqs: Array, positions: Array, window: int) -> Array:
  """(T, H, d) at `positions`, kv (n, d) of positions 0..n-1, entries (m, d), bool (T, m), (H,) -> (T, H, d)."""
  out = np.zeros(q.shape)
  for t, p in enumerate(positions):
    rows = np.concatenate([kv[max(0, p - window + 1):p + 1], entries[seen[t]]])
    s = q[t] @ rows.T / math.sqrt(q.shape[2])
    top = np.maximum(s.max(1), sink)
    e = np.exp(s - top[:, None])
    out[t] = e @ rows / (e.sum(1) + np.exp(sink - top))[:, None]
  return rotate(out, turns(positions, freqs).conj())

# ------------------------------------------------------------------------------------------------ experts
def route(z: Array, bias: Array | None, tid2eid: Array | None, tokens: Array, k: int, factor: float) -> tuple[Array, Array]:
  score = np.sqrt(np.logaddexp(0, z.astype(np.float64)))
  ids = tid2eid[tokens] if tid2eid is not None else np.argsort(-(score + bias), axis=1, kind="stable")[:, :k]
  chosen = np.take_along_axis(score, ids, 1)
  return ids, chosen / chosen.sum(1, keepdims=True) * factor

def swiglu(gate: Array, up: Array, limit: float) -> Array:
  gate = np.minimum(gate, limit)
  return gate * sigmoid(gate) * np.clip(up, -limit, limit)

def experts(x: Array, w1: Array, w3: Array, w2: Array, s1: Array, s3: Array, s2: Array, ids: Array, weights: Array,
            limit: float) -> Array:
  """(T, D), routed (E, I, D) twice, (E, D, I), shared (J, D) twice, (D, J), (T, k) twice -> (T, D)."""
  y = swiglu(x @ s1.T, x @ s3.T, limit) @ s2.T
  for t in range(len(x)):
    for e, w in zip(ids[t], weights[t]): y[t] += w2[e] @ (w * swiglu(w1[e] @ x[t], w3[e] @ x[t], limit))
  return y

# ------------------------------------------------------------------------------------------------ the whole model
def forward(w: Weights, config: dict[str, Any], ids: Array) -> Array:
  """Weights by official name, config.json, ids (n,) -> logits (n, V) of the target."""
  c, n = config, len(ids)
  eps, hc_eps, iters, S, d = c["rms_norm_eps"], c["hc_eps"], c["hc_sinkhorn_iters"], c["hc_mult"], c["head_dim"]
  p, rope = np.arange(n), c["qk_rope_head_dim"]
  freqs = {False: frequencies(rope, c["rope_theta"]), True: frequencies(rope, c["compress_rope_theta"], c["rope_scaling"])}
  h = np.repeat(w["embed.weight"][ids].astype(np.float64)[:, None], S, 1)
  for i, ratio in enumerate(c["compress_ratios"][:c["num_hidden_layers"]]):
    at = {name.removeprefix(f"layers.{i}."): t for name, t in w.items() if name.startswith(f"layers.{i}.")}
    for part in ("attn", "ffn"):
      x, post, comb = hc_pre(h, *(at[f"hc_{part}_{k}"] for k in ("fn", "scale", "base")), at[f"{part}_norm.weight"], iters, hc_eps, eps)
      if part == "attn":
        z = attention(at, c, x, freqs[ratio != 0], ratio, p, d)
      else:
        table = at.get("ffn.gate.tid2eid")
        chosen, mass = route(x @ at["ffn.gate.weight"].T, at.get("ffn.gate.bias"), table, ids, c["num_experts_per_tok"],
                             c["routed_scaling_factor"])
        routed = [np.stack([at[f"ffn.experts.{e}.w{k}.weight"] for e in range(c["n_routed_experts"])]) for k in (1, 3, 2)]
        z = experts(x, *routed, *(at[f"ffn.shared_experts.w{k}.weight"] for k in (1, 3, 2)), chosen, mass, c["swiglu_limit"])
      h = hc_post(z, h, post, comb)
  y = hc_head(h, *(w[f"hc_head_{k}"] for k in ("fn", "scale", "base")), w["norm.weight"], hc_eps, eps)[1]
  return y @ w["head.weight"].T

def attention(at: Weights, c: dict[str, Any], x: Array, freqs: Array, ratio: int, p: Array, d: int) -> Array:
  n, eps, z = len(x), c["rms_norm_eps"], turns(p, freqs)
  def pool(name: str) -> Array:
    return compress(x @ at[f"{name}.wkv.weight"].T, x @ at[f"{name}.wgate.weight"].T, at[f"{name}.ape"], at[f"{name}.norm.weight"],
                    freqs, eps)
  a = rms(x @ at["attn.wq_a.weight"].T, eps) * at["attn.q_norm.weight"]
  q = rotate(rms((a @ at["attn.wq_b.weight"].T).reshape(n, -1, d), eps), z)
  kv = rotate(rms(x @ at["attn.wkv.weight"].T, eps) * at["attn.kv_norm.weight"], z)
  entries, seen = np.zeros((0, d)), np.zeros((n, 0), bool)
  if ratio:
    entries = pool("attn.compressor")
    seen = finished(p, ratio, len(entries))
  if ratio == 4:
    iq = rotate((a @ at["attn.indexer.wq_b.weight"].T).reshape(n, c["index_n_heads"], -1), z)
    seen = index_topk(iq, pool("attn.indexer.compressor"), x @ at["attn.indexer.weights_proj.weight"].T, p, c["index_topk"], ratio)
  o = attend(q, kv, entries, seen, at["attn.attn_sink"], freqs, p, c["sliding_window"])
  group = o.reshape(n, c["o_groups"], -1)
  u = np.einsum("tgk,gnk->tgn", group, at["attn.wo_a.weight"].reshape(c["o_groups"], -1, group.shape[2]))
  return u.reshape(n, -1) @ at["attn.wo_b.weight"].T

# ------------------------------------------------------------------------------------------------ sampling
def filtered_softmax(logits: Array, temperature: float, top_p: float, top_k: int, min_p: float) -> Array:
  """(V,) -> probabilities (V,): temperature, then the top_k largest, then the nucleus of what remains, then min_p. Equals of
  the last one that is kept are kept too."""
  x = logits.astype(np.float64)
  w = np.where(np.isfinite(x), np.exp((x - x[np.isfinite(x)].max()) / temperature), 0)
  if top_k > 0: w = np.where(x >= np.sort(x)[::-1][min(top_k, len(x)) - 1], w, 0)
  if top_p < 1:
    above = np.array([w[x > v].sum() for v in x])
    w = np.where(above < top_p * w.sum(), w, 0)
  w = np.where(w >= min_p, w, 0)
  return w / w.sum()

def attend_block(q: Array, before: Array, block: Array, sink: Array, freqs: Array, positions: Array) -> Array:
  """(T, H, d): every row sees `before` and the whole block."""
  rows, out = np.concatenate([before, block]), np.zeros(q.shape)
  for t in range(len(q)):
    e = np.exp(q[t] @ rows.T / math.sqrt(q.shape[2]))
    out[t] = e @ rows / (e.sum(1) + np.exp(sink))[:, None]
  return rotate(out, turns(positions, freqs).conj())
