"""A checkpoint's folder: which tensors it holds, in which bytes of which file, and that all of them are right.

Reads headers only until a tensor is asked for; gives bytes as they are stored. Owns the official names, shapes and
formats of DeepSeek-V4 and the one table that translates transformers' names. Knows nothing of the model's maths.
Formats: DeepSeek's inference/convert.py and kernel.py, OCP Microscaling Formats v1.0, the safetensors README.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specgrad.config import Config, no_checkpoint, not_the_file, read_json, shorten, unique_keys

class CheckpointError(ValueError):
  """Files that can't be used; the text is one line with the file, the tensor, what was found and what was wanted."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEADER_MAX = 100_000_000  # bytes, the safetensors library's own limit
TILE, GROUP = 128, 32     # e4m3 weights have one scale for a 128x128 tile, packed e2m1 one for 32 columns of a row

BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
        "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
        "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
RAW: dict[str, Any] = {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.uint8, "U8": np.uint8, "BF16": np.uint16,
                       "F16": np.float16, "F32": np.float32, "I64": np.int64, "I32": np.int32}
PACKED = ("I8", "U8")                  # two e2m1 codes a byte, low nibble first
PLAIN = ("BF16", "F32")                # kept in full by every known checkpoint
SCALES = ("F8_E8M0", "U8", "F32")      # F32 only if every value is a power of two

@dataclass(frozen=True, slots=True)
class TensorInfo:
  """Where one tensor's bytes are. dtype is the header's word; shape is as stored (packed e2m1: two values a column)."""
  name: str
  dtype: str
  shape: tuple[int, ...]
  path: Path
  offset: int   # bytes from the start of the file
  nbytes: int

@dataclass(frozen=True, slots=True)
class Expect:
  """What a tensor may be. shape is as stored under dtypes[0], the official format. role is the name without the numbers
  of layer and expert ("attn.wq_b.weight"), the key for placement tables."""
  dtypes: tuple[str, ...]
  shape: tuple[int, ...]
  role: str
  kind: str     # "plain", "linear" (official: e4m3 tiles), "expert" (official: packed e2m1), "scale" (of one of these)

@dataclass(frozen=True, eq=False)
class Checkpoint:
  """An opened folder in which every tensor has been found, measured and checked; nothing is read or held yet.
  Other processes may share it and the folder may be read-only: each read opens its file anew."""
  folder: Path
  config: Config
  tensors: dict[str, TensorInfo] = field(repr=False)  # by official name, whatever the files call them
  notes: list[str]
  fingerprint: str                                    # of names, formats, shapes and config; not of the values
  total_bytes: int                                    # of the tensors above, headers and skipped tensors not counted

  @classmethod
  def open(cls, path: str | Path, config: Config | None = None) -> Checkpoint:
    """Reads config (unless given), index and headers and checks all of it. Raises CheckpointError or ConfigError."""
    folder = Path(path)
    if why := no_checkpoint(folder, config is None): raise CheckpointError(why)
    if config is None: config = Config.from_dir(folder)
    weight_map, notes = _weight_map(folder)
    stored = _stored(folder, weight_map)
    tensors = _official(stored, config)
    if config.preview_mtp:
      prefixes = tuple(f"mtp.{i}." for i in range(config.preview_mtp))
      skipped = [name for name in tensors if name.startswith(prefixes)]
      if skipped:
        size = sum(tensors.pop(name).nbytes for name in skipped)
        notes.append(f"{', '.join(p[:-1] for p in prefixes)} of the preview is skipped: "
                     f"{len(skipped)} tensors, {size} bytes")
    _check(tensors, config)
    ordered = {name: tensors[name] for name in sorted(tensors)}
    lines = "\n".join(f"{t.name} {t.dtype} {t.shape} {t.nbytes}" for t in ordered.values())
    fingerprint = hashlib.blake2b(f"{config!r}\n{lines}".encode(), digest_size=16).hexdigest()
    return cls(folder, config, ordered, notes, fingerprint, sum(t.nbytes for t in ordered.values()))

  def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Rows [start, stop) of axis 0 in a fresh, writable array of the storage type (RAW): 8-bit and packed formats as
    uint8, BF16 as uint16. Raises KeyError for an unknown name, IndexError for rows outside, CheckpointError if the
    file has changed since it was opened."""
    info = self.tensors[name]
    rows = info.shape[0]
    stop = rows if stop is None else stop
    if not 0 <= start <= stop <= rows: raise IndexError(f"{name}: rows {start}..{stop}, want rows inside 0..{rows}")
    out = np.empty((stop - start, *info.shape[1:]), RAW[info.dtype])
    left = out.reshape(-1).view(np.uint8).data
    try:
      with open(info.path, "rb", buffering=0) as f:
        f.seek(info.offset + start * (info.nbytes // rows))
        while left:  # one call returns at most 2 GB
          if not (got := f.readinto(left)):
            raise CheckpointError(f"{info.path.name}: {name}: {len(left)} bytes are missing, the file was cut "
                                  "since it was opened")
          left = left[got:]
    except OSError as e: raise CheckpointError(f"{info.path.name}: {name}: can't be read ({e.strerror})") from e
    return out

  def scale_name(self, name: str) -> str | None:
    """The name of a weight's scale tensor, None if the weight is stored without one."""
    scale = name.removesuffix("weight") + "scale"
    return scale if name.endswith(".weight") and scale in self.tensors else None

# -- what the files say --------------------------------------------------------------------------------------------

def _weight_map(folder: Path) -> tuple[dict[str, str] | None, list[str]]:
  """-> raw tensor name -> shard, None for a single file without index; and notes."""
  notes: list[str] = []
  files = sorted(p.name for p in folder.glob("*.safetensors"))
  if not (folder / INDEX).exists():
    if (folder / SINGLE).exists(): return None, notes
    raise CheckpointError(f"{folder}: no {INDEX} and no {SINGLE}, want one of them" + (
      f". {len(files)} shards are there without their index" if files else ""))
  raw = read_json(folder / INDEX, INDEX, CheckpointError)
  weight_map = raw.get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise CheckpointError(f"{INDEX}: weight_map={shorten(weight_map)}, want an object of tensor names and files")
  for name, shard in weight_map.items():
    if not name.isprintable(): raise CheckpointError(f"{INDEX}: {shorten(name)}: control characters in a name")
    if (not isinstance(shard, str) or not shard.isprintable() or shard != os.path.basename(shard)
        or not shard.endswith(".safetensors")):
      raise CheckpointError(f"{INDEX}: {name}: file {shorten(shard)}, want a .safetensors file of this folder")
  shards = sorted(set(weight_map.values()))
  if missing := [s for s in shards if not (folder / s).exists()]:
    raise CheckpointError(f"{missing[0]}: missing, want all {len(shards)} files that {INDEX} names"
                          + (f"; also missing: {', '.join(missing[1:6])}" if missing[1:] else "")
                          + (f" and {len(missing) - 6} more" if missing[6:] else "") + ". Is the download complete?")
  if unused := [f for f in files if f not in set(shards)]:
    notes.append(f"{', '.join(unused[:3])}{', ...' if unused[3:] else ''}: not named in the index, not read")
  return weight_map, notes

def _stored(folder: Path, weight_map: dict[str, str] | None) -> dict[str, TensorInfo]:
  """Every tensor under the name its file uses. Index and headers must tell the same."""
  stored: dict[str, TensorInfo] = {}
  for shard in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]:
    for name, info in read_header(folder / shard).items():
      if weight_map is not None and weight_map.get(name) != shard:
        if (other := weight_map.get(name)) is None:
          raise CheckpointError(f"{shard}: {name}: not in {INDEX}, want the files and the index of one checkpoint")
        twice = name in read_header(folder / other)
        raise CheckpointError(f"{shard}: {name}: " + (f"also in {other}, want it once" if twice else
                              f"found here, but {INDEX} says {other}"))
      stored[name] = info
  if weight_map is not None and (lost := [name for name in weight_map if name not in stored]):
    raise CheckpointError(f"{weight_map[lost[0]]}: {lost[0]}: not in the file, though {INDEX} says so"
                          + (f" ({len(lost) - 1} more like it)" if lost[1:] else ""))
  return stored

def read_header(path: Path) -> dict[str, TensorInfo]:
  """The tensors of one safetensors file, under the file's own names. Raises CheckpointError unless the tensors fill the
  file exactly: a byte too few and a byte too many are both signs of a damaged copy."""
  try:
    with open(path, "rb") as f: return _parse_header(f, path, os.fstat(f.fileno()).st_size)
  except OSError as e: raise CheckpointError(f"{path.name}: can't be read ({e.strerror})") from e

def _parse_header(f: BinaryIO, path: Path, size: int) -> dict[str, TensorInfo]:
  shown = path.name
  start = f.read(512)
  if why := not_the_file(start): raise CheckpointError(f"{shown}: {why}")
  length = int.from_bytes(start[:8], "little")
  if size < 8: raise CheckpointError(f"{shown}: {size} bytes, want a safetensors file. Is the download complete?")
  if length > HEADER_MAX:
    raise CheckpointError(f"{shown}: header of {length} bytes, want at most {HEADER_MAX}. This is no safetensors file")
  if size < 8 + length:
    raise CheckpointError(f"{shown}: cut short inside the header: {size} bytes, want more than {8 + length}. "
                          "Download it again")
  f.seek(8)
  try: header = json.loads(f.read(length), object_pairs_hook=unique_keys(shown, CheckpointError))
  except CheckpointError: raise
  except (ValueError, RecursionError):
    raise CheckpointError(f"{shown}: the header is not JSON, want a safetensors file. Download it again") from None
  if not isinstance(header, dict): raise CheckpointError(f"{shown}: header {shorten(header)}, want a JSON object")
  header.pop("__metadata__", None)
  base, tensors = 8 + length, {}
  for name, entry in header.items():
    if not name.isprintable(): raise CheckpointError(f"{shown}: {shorten(name)}: control characters in a name")
    try: dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
      raise CheckpointError(f"{shown}: {name}: header entry {shorten(entry)}, want dtype, shape and data_offsets"
                            ) from None
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None: raise CheckpointError(f"{shown}: {name}: dtype={shorten(dtype)}, want one of {', '.join(BITS)}")
    for v in (*shape, begin, end):
      if type(v) is not int or v < 0:
        raise CheckpointError(f"{shown}: {name}: {shorten(v)} in shape {shorten(list(shape))} or offsets "
                              f"{shorten([begin, end])}, want integers >= 0")
    count = 1
    for v in shape: count *= v
    if end - begin != -(-count * bits // 8):
      raise CheckpointError(f"{shown}: {name}: data_offsets {[begin, end]} hold {end - begin} bytes, "
                            f"want {-(-count * bits // 8)} for {dtype} {list(shape)}")
    tensors[name] = TensorInfo(name, dtype, shape, path, base + begin, end - begin)
  reach = base
  for info in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
    if info.offset != reach:
      why = "overlap" if info.offset < reach else "leave a gap"
      raise CheckpointError(f"{shown}: {info.name}: starts at byte {info.offset - base} of the data, want "
                            f"{reach - base}: the header's offsets {why}")
    reach += info.nbytes
  if size < reach:
    raise CheckpointError(f"{shown}: cut short: {size} bytes, want {reach} ({reach - size} missing). Download it again")
  if size > reach:
    raise CheckpointError(f"{shown}: {size - reach} bytes too many: {size}, want {reach}. Download it again")
  return tensors

# -- names ---------------------------------------------------------------------------------------------------------

# transformers' name for a module or parameter -> DeepSeek's; weight/scale endings and numbers are not part of the key.
# From transformers' conversion_mapping.py. The draft's own names (main_proj, markov_head, ...) exist in one spelling.
RENAMES = {
  "embed_tokens": "embed", "lm_head": "head", "hc_head.hc_fn": "hc_head_fn", "hc_head.hc_base": "hc_head_base",
  "hc_head.hc_scale": "hc_head_scale",
  "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
  "attn_hc.fn": "hc_attn_fn", "attn_hc.base": "hc_attn_base", "attn_hc.scale": "hc_attn_scale",
  "ffn_hc.fn": "hc_ffn_fn", "ffn_hc.base": "hc_ffn_base", "ffn_hc.scale": "hc_ffn_scale",
  "self_attn.sinks": "attn.attn_sink", "self_attn.q_a_proj": "attn.wq_a", "self_attn.q_b_proj": "attn.wq_b",
  "self_attn.kv_proj": "attn.wkv", "self_attn.o_a_proj": "attn.wo_a", "self_attn.o_b_proj": "attn.wo_b",
  "self_attn.q_a_norm": "attn.q_norm", "self_attn.kv_norm": "attn.kv_norm",
  "self_attn.compressor.kv_proj": "attn.compressor.wkv", "self_attn.compressor.gate_proj": "attn.compressor.wgate",
  "self_attn.compressor.kv_norm": "attn.compressor.norm", "self_attn.compressor.position_bias": "attn.compressor.ape",
  "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
  "self_attn.compressor.indexer.weights_proj": "attn.indexer.weights_proj",
  "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
  "self_attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
  "self_attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
  "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
  "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
  "mlp.gate": "ffn.gate", "mlp.gate.e_score_correction_bias": "ffn.gate.bias", "mlp.gate.tid2eid": "ffn.gate.tid2eid",
  "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1", "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
  "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
  "mlp.experts.gate_proj": "ffn.experts.{}.w1", "mlp.experts.down_proj": "ffn.experts.{}.w2",
  "mlp.experts.up_proj": "ffn.experts.{}.w3"}
HF_SCALES = ("weight_scale_inv", "weight_scale")
ENDINGS = dict.fromkeys(HF_SCALES, "scale") | {"scale": "scale", "weight": "weight"}
STACKED = {f"{name}{ending}": (parts, kind) for name, parts in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",)))
           for ending, kind in (("", "weight"), (".weight", "weight"), ("_scale_inv", "scale"), (".scale", "scale"),
                                (".weight_scale_inv", "scale"), ("_weight_scale_inv", "scale"))}

def official_name(name: str) -> str:
  """A tensor's official name; a name that the table does not know comes back as it is (without a leading "model.")."""
  parts = name.removeprefix("model.").split(".")
  layer = parts[:2] if parts[0] in ("layers", "mtp") and len(parts) > 2 else []
  rest = parts[len(layer):]
  if rest[0] in ("attn", "ffn") and rest[-1] not in HF_SCALES: return ".".join(parts)  # nearly all official names
  expert = rest.pop(2) if rest[:2] == ["mlp", "experts"] and len(rest) > 3 else None
  if found := RENAMES.get(".".join(rest)): return ".".join([*layer, found])
  if (ending := ENDINGS.get(rest[-1])) and (found := RENAMES.get(".".join(rest[:-1]))):
    return ".".join([*layer, found.format(expert), ending])
  if rest[-1] in HF_SCALES: parts[-1] = "scale"
  return ".".join(parts)

def _official(stored: dict[str, TensorInfo], config: Config) -> dict[str, TensorInfo]:
  """The same tensors under official names; transformers' stacked experts fall into one entry for each expert."""
  tensors: dict[str, TensorInfo] = {}
  for raw, info in stored.items():
    head, mark, tail = raw.partition(".mlp.experts.")
    stacked = STACKED.get(tail) if mark else None
    made: Iterable[TensorInfo] = [replace(info, name=name) if (name := official_name(raw)) != raw else info] \
      if stacked is None else _unstack(info, head.removeprefix("model."), *stacked, config)
    for new in made:
      if (old := tensors.get(new.name)) is not None:
        raise CheckpointError(f"{info.path.name}: {raw}: is {new.name}, which {old.path.name} holds too, want it once")
      tensors[new.name] = new
  return tensors

def _unstack(info: TensorInfo, layer: str, parts: tuple[str, ...], kind: str, config: Config) -> Iterable[TensorInfo]:
  """[E, len(parts)*N, K] -> E*len(parts) entries of [N, K]: a row range of the file each, nothing is copied."""
  experts, count = config.n_routed_experts, len(parts)
  if len(info.shape) != 3 or info.shape[0] != experts or info.shape[1] % count:
    raise CheckpointError(f"{info.path.name}: {info.name}: shape={list(info.shape)}, want {experts} experts"
                          f" x rows{' divisible by 2' if count == 2 else ''} x columns")
  shape, size = (info.shape[1] // count, info.shape[2]), info.nbytes // (experts * count)
  for i in range(experts * count):
    yield TensorInfo(f"{layer}.ffn.experts.{i // count}.{parts[i % count]}.{kind}", info.dtype, shape, info.path,
                     info.offset + i * size, size)

# -- what is wanted ------------------------------------------------------------------------------------------------

def expected_tensors(config: Config) -> dict[str, Expect]:
  """Every tensor that config implies, by official name, as DeepSeek stores it: experts packed e2m1, matrices e4m3,
  both with e8m0 scales. Draft stages are mtp.0, mtp.1, ...; the preview's MTP block is not part of it."""
  hidden, streams = config.hidden_size, config.hc_mult
  def plain(role: str, *shape: int, dtype: str = "BF16") -> dict[str, Expect]:
    return {role: Expect((dtype, *(d for d in PLAIN if d != dtype)), shape, role, "plain")}
  def linear(role: str, rows: int, columns: int) -> dict[str, Expect]:
    scale = (-(-rows // TILE), -(-columns // TILE))
    return {f"{role}.weight": Expect(("F8_E4M3", "BF16", "F16", "F32"), (rows, columns), f"{role}.weight", "linear"),
            f"{role}.scale": Expect(SCALES, scale, f"{role}.scale", "scale")}
  def expert(part: str, rows: int, columns: int) -> dict[str, Expect]:
    role = f"ffn.experts.{part}"
    return {f"{part}.weight": Expect((*PACKED, "F8_E4M3", "BF16", "F16", "F32"), (rows, columns // 2),
                                     f"{role}.weight", "expert"),
            f"{part}.scale": Expect(SCALES, (rows, columns // GROUP), f"{role}.scale", "scale")}
  def hc(prefix: str, outputs: int, gains: int) -> dict[str, Expect]:
    return {**plain(f"{prefix}_fn", outputs, streams * hidden, dtype="F32"),
            **plain(f"{prefix}_base", outputs, dtype="F32"), **plain(f"{prefix}_scale", gains, dtype="F32")}
  def compressor(role: str, ratio: int, width: int) -> dict[str, Expect]:
    wide = width * (2 if ratio == 4 else 1)  # blocks of 4 overlap: one half of the columns for each of the two blocks
    return {**plain(f"{role}.ape", ratio, wide, dtype="F32"), **plain(f"{role}.wkv.weight", wide, hidden),
            **plain(f"{role}.wgate.weight", wide, hidden), **plain(f"{role}.norm.weight", width)}
  def block(ratio: int, hashed: bool) -> dict[str, Expect]:
    heads, width, inner = config.num_attention_heads, config.head_dim, config.moe_intermediate_size
    low, mixes = config.o_lora_rank * config.o_groups, (2 + streams) * streams
    found = {
      **plain("attn_norm.weight", hidden), **plain("ffn_norm.weight", hidden), **hc("hc_attn", mixes, 3),
      **hc("hc_ffn", mixes, 3), **plain("attn.attn_sink", heads, dtype="F32"),
      **linear("attn.wq_a", config.q_lora_rank, hidden), **plain("attn.q_norm.weight", config.q_lora_rank),
      **linear("attn.wq_b", heads * width, config.q_lora_rank), **linear("attn.wkv", width, hidden),
      **plain("attn.kv_norm.weight", width), **linear("attn.wo_a", low, heads * width // config.o_groups),
      **linear("attn.wo_b", hidden, low), **plain("ffn.gate.weight", config.n_routed_experts, hidden),
      **linear("ffn.shared_experts.w1", inner, hidden), **linear("ffn.shared_experts.w2", hidden, inner),
      **linear("ffn.shared_experts.w3", inner, hidden)}
    if hashed:
      found["ffn.gate.tid2eid"] = Expect(("I64", "I32"), (config.vocab_size, config.num_experts_per_tok),
                                         "ffn.gate.tid2eid", "plain")
    else: found |= plain("ffn.gate.bias", config.n_routed_experts, dtype="F32")
    if ratio: found |= compressor("attn.compressor", ratio, width)
    if ratio == 4:
      found |= {**linear("attn.indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank),
                **plain("attn.indexer.weights_proj.weight", config.index_n_heads, hidden),
                **compressor("attn.indexer.compressor", ratio, config.index_head_dim)}
    one = {**expert("w1", inner, hidden), **expert("w2", hidden, inner), **expert("w3", inner, hidden)}
    for i in range(config.n_routed_experts): found.update((f"ffn.experts.{i}.{part}", e) for part, e in one.items())
    return found
  all_tensors = {**plain("embed.weight", config.vocab_size, hidden), **plain("head.weight", config.vocab_size, hidden),
                 **plain("norm.weight", hidden), **hc("hc_head", streams, 1)}
  kinds: dict[tuple[int, bool], dict[str, Expect]] = {}
  def add(prefix: str, ratio: int, hashed: bool) -> None:
    if (ratio, hashed) not in kinds: kinds[ratio, hashed] = block(ratio, hashed)
    all_tensors.update((prefix + name, e) for name, e in kinds[ratio, hashed].items())
  for i, ratio in enumerate(config.compress_ratios): add(f"layers.{i}.", ratio, i < config.num_hash_layers)
  if (draft := config.dspark) is not None:
    for i in range(draft.stages): add(f"mtp.{i}.", 0, False)
    first = {**linear("main_proj", hidden, len(draft.dspark_target_layer_ids) * hidden),
             **plain("main_norm.weight", hidden)}
    rank = draft.dspark_markov_rank
    last = {**plain("norm.weight", hidden), **hc("hc_head", streams, 1),
            **plain("markov_head.markov_w1.weight", config.vocab_size, rank),
            **plain("markov_head.markov_w2.weight", config.vocab_size, rank),
            **plain("confidence_head.proj.weight", 1, hidden + rank)}
    all_tensors.update((f"mtp.0.{name}", e) for name, e in first.items())
    all_tensors.update((f"mtp.{draft.stages - 1}.{name}", e) for name, e in last.items())
  return all_tensors

def _check(tensors: dict[str, TensorInfo], config: Config) -> None:
  """Exactly the expected tensors, each in a format that is understood, each scale of the shape its weight asks for."""
  expected = expected_tensors(config)
  if extra := [name for name in tensors if name not in expected]:
    hint = ". config.json describes no draft" if extra[0].startswith("mtp.") and not config.dspark else ""
    raise CheckpointError(f"{tensors[extra[0]].path.name}: {extra[0]}: unknown tensor, want only those of config.json"
                          + (f" ({len(extra) - 1} more like it)" if extra[1:] else "") + hint)
  if missing := [name for name, e in expected.items() if e.kind != "scale" and name not in tensors]:
    e = expected[missing[0]]
    raise CheckpointError(f"{missing[0]}: missing in all files, want {e.dtypes[0]} {list(e.shape)}"
                          + (f" ({len(missing) - 1} more are missing)" if missing[1:] else "")
                          + (". config.json promises a DSpark draft" if missing[0].startswith("mtp.") else ""))
  for name, e in expected.items():
    if e.kind == "scale": continue  # goes with its weight
    info = tensors[name]
    if info.dtype not in e.dtypes: _wrong(info, "dtype", info.dtype, " or ".join(e.dtypes))
    shape, scale = e.shape, None
    if e.kind == "expert" and info.dtype not in PACKED: shape = (e.shape[0], e.shape[1] * 2)
    if info.shape != shape: _wrong(info, "shape", list(info.shape), f"{list(shape)} for {info.dtype}")
    if e.kind == "plain": continue
    if info.dtype in PACKED: scale = (shape[0], shape[1] * 2 // GROUP)
    elif info.dtype == "F8_E4M3": scale = (-(-shape[0] // TILE), -(-shape[1] // TILE))
    found = tensors.get(scale_name := name[:-6] + "scale")
    if scale is None:
      if found is not None:
        raise CheckpointError(f"{found.path.name}: {scale_name}: found {found.dtype} {list(found.shape)}, want no "
                              f"scale for the {info.dtype} weight {name}")
    elif found is None:
      raise CheckpointError(f"{info.path.name}: {scale_name}: missing, want F8_E8M0 {list(scale)} for the "
                            f"{info.dtype} weight {name}")
    elif found.dtype not in SCALES: _wrong(found, "dtype", found.dtype, " or ".join(SCALES))
    elif found.shape != scale:
      _wrong(found, "shape", list(found.shape), f"{list(scale)} for {info.dtype} {list(shape)}")

def _wrong(info: TensorInfo, what: str, found: object, want: str) -> None:
  raise CheckpointError(f"{info.path.name}: {info.name}: {what}={found}, want {want}")

# -- values --------------------------------------------------------------------------------------------------------

def _e4m3_table() -> np.ndarray:
  code = np.arange(256)
  exponent, mantissa = (code >> 3) & 15, code & 7
  value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
  value[code & 127 == 127] = np.nan
  return np.where(code > 127, -value, value).astype(np.float32)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = _e4m3_table()
# both values of a packed byte, kept as one 8-byte word so that a lookup is one gather
E2M1_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], 1).view(np.uint64).reshape(256)

def e8m0_codes(raw: np.ndarray, dtype: str, name: str = "scale") -> np.ndarray:
  """A scale tensor as uint8 e8m0 codes b, meaning 2^(b-127), whatever of SCALES it is stored as. Raises CheckpointError
  for NaN (code 255) and for a float that is no power of two in range."""
  if dtype == "F32":
    mantissa, exponent = np.frexp(raw)
    exponent = exponent + 126
    if bad := int(np.count_nonzero((mantissa != 0.5) | (exponent < 0) | (exponent > 254))):
      raise CheckpointError(f"{name}: {bad} values that are no power of two, want e8m0 scales")
    return exponent.astype(np.uint8)
  if dtype not in SCALES: raise CheckpointError(f"{name}: dtype={dtype}, want {' or '.join(SCALES)}")
  if bad := int(np.count_nonzero(raw == 255)):
    raise CheckpointError(f"{name}: {bad} of {raw.size} scales are NaN (byte 255), want 0..254. The file is damaged")
  return raw.view(np.uint8)

def dequantise(raw: np.ndarray, dtype: str, scale_raw: np.ndarray | None = None, scale_dtype: str = "F8_E8M0",
               name: str = "tensor") -> np.ndarray:
  """Stored bytes as `Checkpoint.read` gives them -> fresh float32 of the logical shape, exact: BF16, F16 and F32 of any
  shape; with scales F8_E4M3 [N, K] (scales [ceil(N/128), ceil(K/128)]) and packed e2m1, I8 or U8 [N, K/2]
  (scales [N, K/32]). Raises CheckpointError for another format and for scales of another shape or NaN."""
  if dtype in ("BF16", "F16", "F32"):
    if scale_raw is not None: raise CheckpointError(f"{name}: {dtype} with a scale, want none")
    if dtype != "BF16": return raw.astype(np.float32)
    out = raw.astype(np.uint32)
    out <<= 16
    return out.view(np.float32)
  if dtype != "F8_E4M3" and dtype not in PACKED:
    raise CheckpointError(f"{name}: dtype={dtype}, want one of {', '.join((*PACKED, 'F8_E4M3', *PLAIN, 'F16'))}")
  if raw.ndim != 2: raise CheckpointError(f"{name}: shape={list(raw.shape)}, want a matrix")
  rows, columns = raw.shape
  columns *= 2 if dtype in PACKED else 1
  want = (rows, columns // GROUP) if dtype in PACKED else (-(-rows // TILE), -(-columns // TILE))
  if scale_raw is None: raise CheckpointError(f"{name}: {dtype} without a scale, want one of {list(want)}")
  if scale_raw.shape != want or (dtype in PACKED and columns % GROUP):
    raise CheckpointError(f"{name}: scale of {list(scale_raw.shape)}, want {list(want)} for {dtype} {list(raw.shape)}")
  scale = np.ldexp(np.float32(1), e8m0_codes(scale_raw, scale_dtype, name).astype(np.int32) - 127)
  raw, out = raw.view(np.uint8), np.empty((rows, columns), np.float32)
  with np.errstate(over="ignore"):  # 448 * 2^127 is no float32; no sane checkpoint comes near
    # a tile's rows at a time: they stay in cache between lookup and scaling. mode="clip" writes to out without a copy
    for i in range(0, rows, TILE):
      part = out[i:i + TILE]
      if dtype in PACKED:
        np.take(E2M1_PAIRS, raw[i:i + TILE], out=part.view(np.uint64), mode="clip")
        grouped = part.reshape(-1, columns // GROUP, GROUP)
        grouped *= scale[i:i + TILE, :, None]
      else:
        np.take(E4M3, raw[i:i + TILE], out=part, mode="clip")
        part *= np.repeat(scale[i // TILE], TILE)[:columns]
  return out

def load_f32(checkpoint: Checkpoint, name: str) -> np.ndarray:
  """The weight `name` as float32 of its logical shape, scales applied. Raises CheckpointError, KeyError."""
  info, scale = checkpoint.tensors[name], checkpoint.scale_name(name)
  if scale is None: return dequantise(checkpoint.read(name), info.dtype, name=name)
  return dequantise(checkpoint.read(name), info.dtype, checkpoint.read(scale), checkpoint.tensors[scale].dtype, name)
