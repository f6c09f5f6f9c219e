"""What a checkpoint takes on its devices, what fits beside it, and what a step can't do without reading.

From config and headers alone, before anything is allocated. Owns the placement table, the memory plan and the roofline
card. Knows no device: the sizes of caches and weights repeat what models and weights.py allocate, and a test compares.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, pi, sqrt
from pathlib import Path
from typing import Any

from specgrad.checkpoint import Checkpoint, Expect, TensorInfo, expected_tensors
from specgrad.config import Config

class PlanError(ValueError):
  """What can't be placed or does not fit; the text is one line with the sizes and the nearest setting that does."""

# -- placement -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Split:
  """How a tensor is cut. axis: of a matrix as it is multiplied, 0 output rows, 1 input columns (partial sums are added
  across devices); EXPERT: whole matrices by expert number, a block of neighbours to each device, as even as can be; None: a copy on each.
  count: the number of the configuration that the devices must divide."""
  axis: int | None
  count: str = ""

EXPERT = -1
WHOLE = Split(None)
VOCABULARY, EXPERTS = Split(0, "vocab_size"), Split(EXPERT)
HEADS = Split(0, "num_attention_heads")
GROUPS, GROUPS_IN = Split(0, "o_groups"), Split(1, "o_groups")
INNER, INNER_IN = Split(0, "moe_intermediate_size"), Split(1, "moe_intermediate_size")

@dataclass(frozen=True)
class Place:
  part: str     # line of the printed plan
  split: Split

def _places(part: str, split: Split, *roles: str) -> dict[str, Place]: return {r: Place(part, split) for r in roles}

# Role (expected_tensors', without .weight and .scale) -> place. A scale goes with its weight. The draft's stages are
# blocks like any other. What is small, or feeds the one key-value head that all heads share, is on every device.
PLACEMENT: dict[str, Place] = {
  **_places("routed experts", EXPERTS, "ffn.experts.w1", "ffn.experts.w2", "ffn.experts.w3"),
  **_places("shared experts", INNER, "ffn.shared_experts.w1", "ffn.shared_experts.w3"),
  **_places("shared experts", INNER_IN, "ffn.shared_experts.w2"),
  **_places("attention", HEADS, "attn.wq_b", "attn.attn_sink"),
  **_places("attention", GROUPS, "attn.wo_a"),
  **_places("attention", GROUPS_IN, "attn.wo_b"),
  **_places("attention", WHOLE, "attn.wq_a", "attn.wkv", "attn.q_norm", "attn.kv_norm"),
  **_places("compressors", WHOLE, *(f"attn.compressor.{x}" for x in ("wkv", "wgate", "ape", "norm"))),
  # split by heads, the indexer would save 0.09 GiB a device and cost an exchange in every layer of ratio 4
  **_places("indexers", WHOLE, "attn.indexer.wq_b", "attn.indexer.weights_proj"),
  **_places("indexers", WHOLE, *(f"attn.indexer.compressor.{x}" for x in ("wkv", "wgate", "ape", "norm"))),
  **_places("embedding", VOCABULARY, "embed"),
  **_places("head", VOCABULARY, "head"),
  **_places("hyper-connections", WHOLE,
            *(f"hc_{x}_{y}" for x in ("attn", "ffn", "head") for y in ("fn", "base", "scale"))),
  **_places("router", WHOLE, "ffn.gate", "ffn.gate.bias"),
  **_places("hash routes", WHOLE, "ffn.gate.tid2eid"),
  **_places("norms", WHOLE, "attn_norm", "ffn_norm", "norm"),
  **_places("draft input", WHOLE, "main_proj", "main_norm"),
  # needed token by token: split, each drafted token would wait for two exchanges
  **_places("draft bias table", WHOLE, "markov_head.markov_w1", "markov_head.markov_w2"),
  **_places("draft confidence", WHOLE, "confidence_head.proj")}

# Only in the draft's stages: three layers of it on every device cost 0.14 GiB and save three exchanges a step.
DRAFT_PLACEMENT = _places("attention", WHOLE, "attn.wq_b", "attn.attn_sink", "attn.wo_a", "attn.wo_b")

def role_of(role: str) -> str: return role.removesuffix(".weight").removesuffix(".scale")

def place_of(name: str, role: str, placement: Mapping[str, Place] = PLACEMENT) -> Place:
  """Where a tensor goes, by its official name and its role."""
  role = role_of(role)
  return DRAFT_PLACEMENT[role] if name.startswith("mtp.") and role in DRAFT_PLACEMENT else placement[role]

def held_bytes(info: TensorInfo, want: Expect, split: Split, devices: int) -> int:
  """Bytes on each device of one weight with its scales, as weights.stream holds it for w4a8: e4m3 with a scale for each
  row and 128 columns, packed e2m1 with one for each 32, other matrices as stored if that is BF16, hash routes as int32,
  the rest float32. Split by number, an expert is whole: the caller divides."""
  rows = info.shape[0]
  columns = 1
  for n in info.shape[1:]: columns *= n
  packed = want.kind == "expert" and info.dtype in ("I8", "U8")
  if packed: columns *= 2
  if split.axis == 0: rows = ceil(rows / devices)
  if split.axis == 1: columns = ceil(columns / devices)
  matrix = want.kind in ("linear", "expert") or (len(info.shape) == 2 and want.role.endswith(".weight"))
  if packed: size = rows * (columns // 2 + columns // 32)
  elif matrix and info.dtype == "F8_E4M3": size = rows * (columns + ceil(columns / 128))
  else: size = rows * columns * (2 if matrix and info.dtype == "BF16" else 4)
  return size

def row_bytes(c: Config) -> int:
  """Of one cached row of keys, which are the values too: e4m3, the rotary part as bfloat16, a scale for each 64."""
  plain = c.head_dim - c.qk_rope_head_dim
  return ceil((plain + 2 * c.qk_rope_head_dim + ceil(plain / 64)) / 4) * 4

def key_bytes(c: Config) -> int:
  """Of one key of the indexer: e2m1, a scale for each 32."""
  return c.index_head_dim // 2 + c.index_head_dim // 32

# -- memory --------------------------------------------------------------------------------------------------------

@dataclass
class Part:
  """One line of the plan."""
  tensors: int = 0
  stored: int = 0   # bytes in the checkpoint's files
  device: int = 0   # bytes on each device

GIB = 1 << 30
CHUNK_ROWS = 128    # rows of the longest chunk of a prompt (deepseek_v4.MAX_ROWS)
DRIVER = GIB        # of each device: the driver's context, code, captured graphs. An estimate, as is `workspace`
KV = ("sharded", "replicated")

@dataclass(frozen=True)
class Plan:
  """Sizes are bytes on each device unless said otherwise; all devices hold equally much."""
  config: Config
  devices: int
  users: int                    # sequences that are held and stepped at once
  context: int                  # tokens of each
  kv: str
  depth: int                    # drafted tokens a step; 0: no draft is loaded
  target: dict[str, Part]
  draft: dict[str, Part]
  unloaded: Part                # what is in the files and left there
  placement: Mapping[str, Place]

  def axis(self, role: str) -> int | None: return self.placement[role].split.axis

  @property
  def kv_split(self) -> int: return self.devices if self.kv == "sharded" else 1

  @property
  def weights(self) -> int: return sum(p.device for p in (*self.target.values(), *self.draft.values()))

  @property
  def tensors(self) -> int:
    """Of the checkpoint, loaded or not."""
    return sum(p.tensors for p in (*self.target.values(), *self.draft.values(), self.unloaded))

  def sequence(self, context: int | None = None) -> dict[str, int]:
    """Bytes of one sequence on each device, by kind. Entries are capacity: they are there before the context is."""
    c, context = self.config, self.context if context is None else context
    row, key = row_bytes(c), key_bytes(c)
    window = ceil((c.sliding_window + CHUNK_ROWS) / 32) * 32 * row
    found = {"window rings": window * c.num_hidden_layers, "compressed entries": 0, "indexer keys": 0,
             "compressor rings": 0, "draft rings": window * c.dspark.stages if c.dspark and self.depth else 0}
    for ratio in filter(None, c.compress_ratios):
      blocks = 2 if ratio == 4 else 1
      entries = ceil(((context + CHUNK_ROWS) // ratio + 2) / self.kv_split)
      ring = ceil((blocks * ratio + CHUNK_ROWS) / ratio) * ratio * 2 * blocks * 4  # float32, projections and gates
      found["compressed entries"] += entries * row
      found["compressor rings"] += ring * c.head_dim
      if ratio == 4:
        found["indexer keys"] += entries * key
        found["compressor rings"] += ring * c.index_head_dim
    return found | {"sampling": 3 * 4 * c.vocab_size}                # bias and two counts of the vocabulary

  def token(self) -> float:
    """KV bytes that one more token of context takes on each device."""
    c = self.config
    return sum((row_bytes(c) + (key_bytes(c) if r == 4 else 0)) / r for r in c.compress_ratios if r) / self.kv_split

  def workspace(self, users: int | None = None, context: int | None = None) -> int:
    """An estimate of what a chunk or a step computes in, each large value twice, and DRIVER."""
    c = self.config
    users, context = self.users if users is None else users, self.context if context is None else context
    step = users * (self.depth + 1)
    rows = max(CHUNK_ROWS, step)
    values = (rows * c.hc_mult * c.hidden_size * 2                                       # streams before and after
              + rows * c.num_attention_heads * c.head_dim                                # queries, then outputs
              + rows * c.num_experts_per_tok * (3 * c.moe_intermediate_size + c.hidden_size)
              + rows * (context // 4 // self.kv_split if 4 in c.compress_ratios else 0)          # index scores
              + (step + users * self.depth) * c.vocab_size * 2)                          # logits and their laws
    return 2 * 4 * values + DRIVER

  def kv_bytes(self, users: int | None = None, context: int | None = None) -> int:
    return (self.users if users is None else users) * sum(self.sequence(context).values())

  def total(self, users: int | None = None, context: int | None = None) -> int:
    return self.weights + self.kv_bytes(users, context) + self.workspace(users, context)

  def largest_context(self, memory: int, users: int) -> int:
    """Tokens that each of `users` sequences can hold in `memory` bytes a device: a multiple of 128, or the most that
    the checkpoint allows; 0 if not even 128."""
    limit = self.config.max_position_embeddings
    if self.total(users, limit) <= memory: return limit
    low, high = 0, ceil(limit / 128)                                 # low fits (or is nothing), high does not
    while high - low > 1:
      middle = (low + high) // 2
      if self.total(users, middle * 128) <= memory: low = middle
      else: high = middle
    return low * 128

  def most_users(self, memory: int, context: int) -> int:
    """Sequences of `context` tokens that fit at once, at most 1024."""
    return max((n for n in range(1, 1025) if self.total(n, context) <= memory), default=0)

def plan(checkpoint: Checkpoint, devices: int, users: int = 1, context: int | None = None, kv: str = "sharded",
         depth: int | None = None, placement: Mapping[str, Place] = PLACEMENT) -> Plan:
  """depth: tokens drafted a step by the checkpoint's own draft, none: its block size; 0 leaves the draft in the files.
  context: none is what a run takes, the checkpoint's limit or 131072.

  Raises PlanError for settings that no memory helps: numbers out of range, a count that the devices don't divide."""
  config = checkpoint.config
  limit, block = config.max_position_embeddings, config.dspark.dspark_block_size if config.dspark else 0
  context, depth = min(limit, 131072) if context is None else context, block if depth is None else depth
  for name, value, low, high in (("gpus", devices, 1, 64), ("users", users, 1, 1024), ("context", context, 2, limit),
                                 ("depth", depth, 0, block)):
    if type(value) is not int or not low <= value <= high:
      raise PlanError(f"plan: {name}={value}, want {low} to {high}")
  if kv not in KV: raise PlanError(f"plan: kv={kv}, want {' or '.join(KV)}")
  if devices not in (fitting := splits(config, placement)):
    count = next(c for c in _counts(placement) if getattr(config, c) % devices)
    raise PlanError(f"plan: {count}={getattr(config, count)} can't be split evenly over {devices} devices, want "
                    f"{', '.join(map(str, fitting[:-1]))}{' or ' if fitting[1:] else ''}{fitting[-1]}")
  target: dict[str, Part] = {}
  draft: dict[str, Part] = {}
  unloaded, sizes = Part(), {}
  for name, want in expected_tensors(config).items():
    if (info := checkpoint.tensors.get(name)) is None: continue      # the scale of a weight that needs none
    place, mine = place_of(name, want.role, placement), draft if name.startswith("mtp.") else target
    part = unloaded if mine is draft and not depth else mine.setdefault(place.part, Part())
    part.tensors, part.stored = part.tensors + 1, part.stored + info.nbytes
    if want.kind == "scale" or part is unloaded: continue
    key = want.role, info.dtype, info.shape, mine is draft
    if key not in sizes: sizes[key] = held_bytes(info, want, place.split, devices)  # the same for thousands of experts
    part.device += sizes[key]
  for part in (parts["routed experts"] for parts in (target, draft) if parts):
    if placement["ffn.experts.w1"].split.axis == EXPERT:               # the device that has most
      part.device = part.device // config.n_routed_experts * ceil(config.n_routed_experts / devices)
  return Plan(config, devices, users, context, kv, depth, target, draft, unloaded, placement)

def _counts(placement: Mapping[str, Place]) -> list[str]:
  return sorted({p.split.count for p in placement.values()} - {""})

def splits(config: Config, placement: Mapping[str, Place] = PLACEMENT) -> list[int]:
  """Numbers of devices, 1 to 64, that divide all that is split."""
  return [n for n in range(1, 65) if not any(getattr(config, c) % n for c in _counts(placement))]

# -- what fits -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class GPU:
  """memory: bytes as nvidia-smi reports the total; bandwidth: bytes a second of the data sheet, 0 if not known."""
  name: str
  memory: int
  bandwidth: float = 0.0

# November 2026. Memory: nvidia-smi's total in MiB. GB/s: NVIDIA's data sheets and product pages of each card.
GPUS = [GPU(name, mib << 20, gbs * 1e9) for name, mib, gbs in (
  ("RTX PRO 6000 Blackwell", 97887, 1792),
  ("RTX 5090", 32607, 1792),
  ("RTX 4090", 24564, 1008),
  ("RTX 6000 Ada", 49140, 960),
  ("L40S", 46068, 864),
  ("A100 80GB", 81920, 2039),
  ("H100 SXM", 81559, 3352),
  ("H200", 143771, 4800),
  ("B200", 183359, 8000))]

def find_gpu(name: str) -> GPU:
  """By any part of a name of GPUS, or a size such as "96 GiB" (then there is no bandwidth to speak of).
  Raises PlanError."""
  if match := re.fullmatch(r"\s*(\d{1,5}(?:\.\d+)?)\s*(GiB|GB)\s*", name, re.IGNORECASE):
    return GPU(name.strip(), int(float(match[1]) * (GIB if match[2].lower() == "gib" else 10**9)))
  plain = lambda text: re.sub(r"[^a-z0-9]", "", text.lower())
  found = [gpu for gpu in GPUS if len(plain(name)) > 3 and plain(name) in plain(gpu.name)]
  if len(found) == 1: return found[0]
  raise PlanError(f"plan: GPU {name!r} is {'not one but several' if found else 'not known'}, want one of "
                  f"{', '.join(g.name for g in found or GPUS)} or a size such as 96GiB")

def gib(size: float) -> str: return f"{size / GIB:.2f} GiB"

def check(plan: Plan, gpu: GPU, checkpoint: Checkpoint) -> None:
  """Raises PlanError if the plan does not fit devices of this kind."""
  if (over := plan.total() - gpu.memory) <= 0: return
  if plan.weights + plan.workspace(1, 2) > gpu.memory: near = _larger(plan, gpu, checkpoint)
  else: near = _smaller(plan, gpu.memory, checkpoint) or _larger(plan, gpu, checkpoint)
  raise PlanError(
    f"plan: {gib(plan.total())} for each of {plan.devices} x {gpu.name} ({gib(gpu.memory)}), {gib(over)} too much: "
    f"weights {gib(plan.weights)}, KV of {plan.users} x {plan.context} tokens {gib(plan.kv_bytes())}, workspace "
    f"{gib(plan.workspace())}. Nearest that fits: {near}")

def _smaller(plan: Plan, memory: int, checkpoint: Checkpoint) -> str:
  """Settings that fit as many devices of as much memory, '' if there are none."""
  found = []
  if plan.kv == "replicated" and plan.devices > 1:
    other = _again(plan, checkpoint, plan.devices, "sharded")
    if other.total() <= memory: found.append("kv=sharded")
  if context := plan.largest_context(memory, plan.users): found.append(f"context={context} for {plan.users} users")
  if plan.users > 1 and (users := plan.most_users(memory, plan.context)):
    found.append(f"users={users} of {plan.context} tokens")
  return " or ".join(found)

def _larger(plan: Plan, gpu: GPU, checkpoint: Checkpoint) -> str:
  """More devices of the kind, or another kind, that would hold it as it is."""
  found = []
  for n in splits(plan.config, plan.placement):
    if n > plan.devices and _again(plan, checkpoint, n).total() <= gpu.memory:
      found.append(f"{n} x {gpu.name}")
      break
  if kinds := sorted((g for g in GPUS if g.memory >= plan.total()), key=lambda g: g.memory):
    found.append(f"{plan.devices} x {kinds[0].name}")
  return " or ".join(found) or "no number of these devices, nor any in the table"

def _again(old: Plan, checkpoint: Checkpoint, devices: int, kv: str | None = None) -> Plan:
  return plan(checkpoint, devices, old.users, old.context, kv or old.kv, old.depth, old.placement)

# -- what a step reads ---------------------------------------------------------------------------------------------

def distinct(experts: int, chosen: int, rows: float) -> float:
  """Expected number of different experts that `rows` rows choose, `chosen` of `experts` each, if rows choose
  independently and all experts are as likely: E (1 - (1 - k/E)^T). Real text repeats itself, so this is an upper
  estimate."""
  return experts * (1 - (1 - chosen / experts)**rows)

# expected largest of n standard normal values, n = 1 ..: what an uneven spread costs the busiest device
LARGEST = (0.0, 1 / sqrt(pi), 0.846, 1.029, 1.163, 1.267, 1.352, 1.424)

def busiest(experts: int, chosen: int, rows: float, devices: int) -> float:
  """Expected distinct experts on the device that has most of them, where each holds experts/devices by number: the mean
  plus the expected excess of the largest of `devices` binomial counts, taken as normal."""
  p, mine = distinct(experts, chosen, rows) / experts, experts / devices
  return min(mine, mine * p + LARGEST[min(devices, len(LARGEST)) - 1] * sqrt(mine * p * (1 - p)))

@dataclass(frozen=True)
class Exchange:
  """Something that all devices wait for. size: bytes that each sends, once."""
  what: str
  count: int
  size: int

@dataclass(frozen=True)
class Card:
  """One step of `users` sequences that are `context` tokens long, depth+1 rows each. Bytes are read once."""
  gpu: str
  users: int
  context: int
  depth: int
  experts_layer: float             # expected distinct experts of a target layer
  target: int                      # bytes over all devices, what is on each counted once
  draft: int
  device: int                      # bytes each device reads, KV included
  device_kv: int
  device_busiest: int              # the same on the device that has most of the chosen experts
  exchanges: list[Exchange]
  steps_s: float                   # at the data sheet's bandwidth, chosen experts spread evenly, exchanges for nothing
  steps_s_practical: float         # at EFFICIENCY of it, the busiest device, WAIT and LINK for each exchange

  @property
  def exchange_count(self) -> int: return sum(e.count for e in self.exchanges)
  @property
  def exchange_bytes(self) -> int: return sum(e.count * e.size for e in self.exchanges)

  def tok_s(self, tokens_per_step: float) -> tuple[float, float]:
    """All users together -> the ceiling, and the practical line."""
    return self.steps_s * self.users * tokens_per_step, self.steps_s_practical * self.users * tokens_per_step

  def as_dict(self) -> dict[str, Any]:
    speeds = {str(n): [round(v, 1) for v in self.tok_s(n)] for n in TOKENS_PER_STEP if n <= self.depth + 1}
    return asdict(self) | {"exchange_count": self.exchange_count, "exchange_bytes": self.exchange_bytes,
                           "tok_s_by_tokens_per_step": speeds}

TOKENS_PER_STEP = (1, 2, 3, 4, 6)
EFFICIENCY = 0.8                   # of the data sheet's bandwidth: what copies and good kernels reach on such cards
WAIT, LINK = 8e-6, 50e9            # seconds and bytes a second of an exchange between cards on PCIe 5 x16
VALUE = 4                          # bytes of an exchanged value: float32

def card(plan: Plan, gpu: GPU, users: int = 1, context: int | None = None) -> Card:
  """The roofline of a step on `plan.devices` of this kind. Compute is left out: for few rows it is never the limit."""
  c, n, depth = plan.config, plan.devices, plan.depth
  context = plan.context if context is None else context
  rows, drafted = users * (depth + 1), users * depth
  E, k = c.n_routed_experts, c.num_experts_per_tok
  idle = ("routed experts", "embedding", "hash routes", "draft bias table")  # of these only chosen rows are read
  dense = lambda parts, field: sum(getattr(p, field) for name, p in parts.items() if name not in idle)
  held = lambda parts, field: getattr(parts["routed experts"], field) if "routed experts" in parts else 0
  # the draft: its blocks and the head once, the bias table's second half for each token it drafts
  bias = plan.draft["draft bias table"] if plan.draft else Part()
  head = plan.target["head"] if depth else Part()
  by_number = plan.axis("ffn.experts.w1") == EXPERT and n > 1
  even = lambda r: distinct(E, k, r) / E                             # of all experts, the part that is read
  most = lambda r: busiest(E, k, r, n) * n / E if by_number else even(r)
  target, draft = (round(dense(parts, "stored") + held(parts, "stored") * even(r))
                   for parts, r in ((plan.target, rows), (plan.draft, drafted)))
  draft += head.stored + bias.stored // 2 * depth
  kv = users * _kv_read(plan, context)
  def on_device(spread: Any) -> int:
    experts = held(plan.target, "device") * spread(rows) + held(plan.draft, "device") * spread(drafted)
    always = dense(plan.target, "device") + dense(plan.draft, "device") + head.device + bias.device // 2 * depth
    return round(always + experts + kv)
  found = exchanges(plan, users, context)
  device, worst = on_device(even), on_device(most)
  waits = sum(e.count * (WAIT + e.size / LINK) for e in found)
  steps = practical = 0.0
  if gpu.bandwidth: steps, practical = gpu.bandwidth / device, 1 / (worst / (gpu.bandwidth * EFFICIENCY) + waits)
  return Card(gpu.name, users, context, depth, distinct(E, k, rows), target, draft, device, kv, worst, found, steps,
              practical)

def _kv_read(plan: Plan, context: int) -> int:
  """Bytes of its caches that one sequence's step reads on each device: windows, the indexer's keys, and the entries
  that its rows attend to, as many different ones as can be; each once for all rows of the step."""
  c, row = plan.config, row_bytes(plan.config)
  rings = c.num_hidden_layers + (c.dspark.stages if c.dspark and plan.depth else 0)
  size = 0
  for ratio in filter(None, c.compress_ratios):
    entries = context // ratio
    if ratio == 4 and entries > c.index_topk:
      size += entries * key_bytes(c)
      entries = min(entries, c.index_topk * (plan.depth + 1))
    size += entries * row
  return size // plan.kv_split + rings * min(context, c.sliding_window) * row

def exchanges(plan: Plan, users: int, context: int) -> list[Exchange]:
  """Per step: places where all devices wait for each other. A layer's queries and its candidates for the top-k wait for the
  same products and travel together."""
  c, n, depth = plan.config, plan.devices, plan.depth
  if n == 1: return []
  rows, drafted = users * (depth + 1), users * depth
  compressed = sum(1 for r in c.compress_ratios if r)
  indexed = c.compress_ratios.count(4) if context // 4 > c.index_topk else 0
  queries = rows * c.num_attention_heads // n * c.head_dim * VALUE
  found = [Exchange("embedding", 1, rows * c.hidden_size * VALUE),
           Exchange("attention output", c.num_hidden_layers, rows * c.hidden_size * VALUE),
           Exchange("experts", c.num_hidden_layers, rows * c.hidden_size * VALUE),
           Exchange("logits", 1, rows * c.vocab_size // n * VALUE)]
  if plan.kv == "sharded":
    candidates = rows * c.index_topk * 2 * VALUE                     # a score and a number of each
    found += [Exchange("queries", compressed - indexed, queries),
              Exchange("queries and index candidates", indexed, queries + candidates),
              Exchange("partial attention", compressed, queries + rows * c.num_attention_heads // n * 2 * VALUE)]
  if depth:
    assert c.dspark is not None
    found += [Exchange("draft embedding", 1, drafted * c.hidden_size * VALUE),
              Exchange("draft experts", c.dspark.stages, drafted * c.hidden_size * VALUE),
              Exchange("draft logits", 1, drafted * c.vocab_size // n * VALUE)]
  return [e for e in found if e.count]

# -- for people ----------------------------------------------------------------------------------------------------

def as_dict(plan: Plan, gpu: GPU) -> dict[str, Any]:
  """Everything that `text` shows, as plain numbers (bytes, tokens)."""
  return {
    "gpu": gpu.name, "memory": gpu.memory, "devices": plan.devices, "users": plan.users, "context": plan.context,
    "kv": plan.kv, "depth": plan.depth, "tensors": plan.tensors, "weights": plan.weights,
    "target": {name: asdict(p) for name, p in plan.target.items()},
    "draft": {name: asdict(p) for name, p in plan.draft.items()}, "unloaded": asdict(plan.unloaded),
    "kv_per_token": plan.token(), "sequence": plan.sequence(), "kv_total": plan.kv_bytes(),
    "workspace": plan.workspace(), "total": plan.total(), "fits": plan.total() <= gpu.memory,
    "largest_context": {str(n): plan.largest_context(gpu.memory, n) for n in (1, 16)},
    "card": card(plan, gpu).as_dict()}

def text(plan: Plan, gpu: GPU) -> str:
  """For a terminal of 100 columns."""
  c, n = plan.config, plan.devices
  place = f"{n} x {gpu.name}, {gib(gpu.memory)} each" if n > 1 else f"{gpu.name}, {gib(gpu.memory)}"
  each = " on each" if n > 1 else ""
  lines = [f"{place}: {plan.users} x {plan.context} tokens, " + (f"KV {plan.kv}, " if n > 1 else "")
           + (f"draft of {plan.depth}" if plan.depth else "no draft"), "",
           f"{'weights':<28}{'tensors':>9}{'in the files':>16}{'on each device':>17}"]
  for label, parts in (("", plan.target), ("draft: ", plan.draft)):
    for name, p in sorted(parts.items(), key=lambda x: -x[1].stored):
      lines.append(f"  {label + name.removeprefix('draft '):<26}{p.tensors:>9,}{gib(p.stored):>16}{gib(p.device):>17}")
  if (left_out := plan.unloaded).tensors:
    lines.append(f"  {'draft, not loaded':<26}{left_out.tensors:>9,}{gib(left_out.stored):>16}{'-':>17}")
  stored = sum(p.stored for p in (*plan.target.values(), *plan.draft.values(), plan.unloaded))
  lines += [f"  {'all':<26}{plan.tensors:>9,}{gib(stored):>16}{gib(plan.weights):>17}", "",
            f"{f'KV of one sequence{each}':<44}{plan.token():>19,.0f} bytes/token"
            + (f", {plan.token() * plan.kv_split:,.0f} in all" if plan.kv_split > 1 else "")]
  for name, size in plan.sequence().items():
    if size: lines.append(f"  {name:<51}{size / 2**20:>13,.1f} MiB")
  lines += ["", f"sum{each}",
            f"  {'weights':<51}{gib(plan.weights):>17}",
            f"  {f'KV, {plan.users} x {sum(plan.sequence().values()) / 2**20:,.1f} MiB':<51}{gib(plan.kv_bytes()):>17}",
            f"  {'workspace, driver (estimate)':<51}{gib(plan.workspace()):>17}",
            f"  {'all':<51}{gib(plan.total()):>17}"]
  left = gpu.memory - plan.total()
  lines.append(f"  {'free' if left >= 0 else 'TOO MUCH':<51}{gib(abs(left)):>17}")
  for users in (1, 16):
    most = plan.largest_context(gpu.memory, users)
    note = " (the checkpoint's limit)" if most == c.max_position_embeddings else ""
    said = f"{most:,} tokens{' each' if users > 1 else ''}{note}" if most else "none fits"
    lines.append(f"largest context, {users} user{'s' if users > 1 else ''}: {said}")
  lines += ["", *_card_text(card(plan, gpu), n)]
  if plan.users > 1:
    many = card(plan, gpu, plan.users)
    speed = f"; {many.steps_s:.0f} steps/s at most, {many.steps_s_practical:.0f} practical" if gpu.bandwidth else ""
    lines += [f"{plan.users} users at once: {many.experts_layer:.0f} experts a layer, {many.device / 1e9:.1f} GB{each}"
              + speed]
  return "\n".join(lines)

def _card_text(card: Card, devices: int) -> list[str]:
  each = f" = {card.device / 1e9:.2f} GB on each device" if devices > 1 else f" = {card.device / 1e9:.2f} GB with KV"
  lines = [f"A step of one user at {card.context} tokens: {card.depth + 1} row{'s' if card.depth else ''}, "
           f"{card.experts_layer:.1f} experts a layer if rows route independently",
           f"  reads {card.target / 1e9:.2f} GB of target, {card.draft / 1e9:.2f} GB of draft weights{each} (KV "
           f"{card.device_kv / 1e6:.1f} MB)"]
  if card.device_busiest > card.device:
    lines += [f"  the device with most of the chosen experts reads {card.device_busiest / 1e9:.2f} GB"]
  if devices > 1:
    lines += [f"  {card.exchange_count} exchanges between devices, {card.exchange_bytes / 1e6:.1f} MB sent by each:"]
    line = "   "
    for e in card.exchanges:
      item = f" {e.count} {e.what} ({e.size / 1e3:.0f} kB),"
      if len(line) + len(item) > 100: lines, line = [*lines, line], "   "
      line += item
    lines.append(line.rstrip(","))
  if not card.steps_s: return [*lines, "  no bandwidth is known for this size, so there is no ceiling"]
  counts = [n for n in TOKENS_PER_STEP if n <= card.depth + 1]
  lines += [f"  {'tok/s by tokens/step':<46}{'steps/s':>8}" + "".join(f"{n:>8}" for n in counts)]
  practical = f"{EFFICIENCY:.0%} of it" + (f", busiest device, {WAIT * 1e6:.0f} us an exchange" if devices > 1 else "")
  speeds = ("ceiling: data sheet's bandwidth", card.steps_s), (practical, card.steps_s_practical)
  for i, (label, steps) in enumerate(speeds):
    lines.append(f"  {label:<46}{steps:>8.1f}" + "".join(f"{card.tok_s(n)[i]:>8.0f}" for n in counts))
  return lines

def report(folder: str | Path, gpus: int = 1, users: int = 1, context: int | None = None, kv: str = "sharded",
           gpu_name: str = "RTX PRO 6000", depth: int | None = None) -> str:
  """The whole plan of a checkpoint as text. Raises PlanError if it can't be run so, CheckpointError, ConfigError."""
  gpu, checkpoint = find_gpu(gpu_name), Checkpoint.open(folder)
  made = plan(checkpoint, gpus, users, context, kv, depth)
  check(made, gpu, checkpoint)
  return text(made, gpu)
