"""What config.json says about the model, checked once so that everything behind it may assume.

Owns the three spellings of a DeepSeek-V4 configuration: DeepSeek's published config.json, the one transformers writes
back, and the ModelArgs of DeepSeek's inference code. Knows nothing of tensors, devices or the model's maths.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

class ConfigError(ValueError):
  """A configuration that can't be run; the text is one line: file: name=found, want expected. hint"""

CONFIG_FILES = ("config.json", "inference/config.json", "inference_config.json")  # the first that exists is read
STAGES = 3         # draft blocks of an integrated DSpark draft; no other number was ever published
JSON_MAX = 1 << 28  # bytes; the largest real one, the index of 72,317 tensors, takes 7 MB

# DeepSeek's inference code has its own names for the same things (ModelArgs in its model.py).
MODEL_ARGS = {
  "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
  "qk_rope_head_dim": "rope_head_dim", "moe_intermediate_size": "moe_inter_dim",
  "num_experts_per_tok": "n_activated_experts", "num_hash_layers": "n_hash_layers",
  "routed_scaling_factor": "route_scale", "sliding_window": "window_size", "rms_norm_eps": "norm_eps",
  "factor": "rope_factor", "original_max_position_embeddings": "original_seq_len", "scoring_func": "score_func"}

# Settings that have one legal value here: anything else is another computation. All may be absent.
FIXED: dict[str, tuple[Any, ...]] = {
  "num_key_value_heads": (1,), "n_shared_experts": (1,), "scoring_func": ("sqrtsoftplus",),
  "topk_method": ("noaux_tc", None), "norm_topk_prob": (True,), "hidden_act": ("silu",),
  "tie_word_embeddings": (False,), "attention_bias": (False,), "mlp_bias": (False,),
  "n_group": (1, None), "topk_group": (1, None), "first_k_dense_replace": (0, None), "moe_layer_freq": (1, None),
  "kv_lora_rank": (None,), "gate_temp": (1.0,), "vision_n_layers": (0, None),
  "dspark_n_routed_experts": (0, None), "dspark_n_activated_experts": (0, None)}
V41_KEYS = ("engram", "kv_source_layers", "index_source_layers", "candidate_source_layer")
V41 = "This is DeepSeek-V4.1-Flash, which has another architecture (engram, shared KV layers); it is not supported"

@dataclass(frozen=True)
class DSpark:
  """The block draft that comes inside the checkpoint as mtp.0 .. mtp.(stages-1)."""
  dspark_block_size: int                     # K, drafted tokens per step
  dspark_noise_token_id: int                 # fills the K-1 unknown positions of the block
  dspark_target_layer_ids: tuple[int, ...]   # taps: target layers after which the draft looks at the streams, ascending
  dspark_markov_rank: int
  stages: int                                # draft blocks

@dataclass(frozen=True)
class Config:
  """Fields keep the names of DeepSeek's config.json, so that grep finds a value here, there and in the paper.
  A Config that exists has passed every check: counts are positive, groups divide, ids are inside their range."""
  vocab_size: int
  hidden_size: int                # D
  num_hidden_layers: int
  num_attention_heads: int        # H
  head_dim: int                   # rotary part included, it is the tail
  qk_rope_head_dim: int
  q_lora_rank: int
  o_lora_rank: int                # per group
  o_groups: int
  moe_intermediate_size: int
  n_routed_experts: int           # E
  n_shared_experts: int           # always 1
  num_experts_per_tok: int
  num_hash_layers: int            # the first layers, routed by a table of token ids
  routed_scaling_factor: float
  swiglu_limit: float
  sliding_window: int
  index_n_heads: int
  index_head_dim: int
  index_topk: int
  hc_mult: int                    # residual streams
  hc_sinkhorn_iters: int
  hc_eps: float
  rms_norm_eps: float
  rope_theta: float               # layers of ratio 0 and the draft
  compress_rope_theta: float      # all other layers, with the YaRN values below
  rope_factor: float
  rope_original: int              # original_max_position_embeddings
  rope_beta_fast: float
  rope_beta_slow: float
  max_position_embeddings: int
  bos_token_id: int
  eos_token_id: int
  compress_ratios: tuple[int, ...]  # per target layer: 0 window only; 4 overlapping blocks and indexer; else blocks
  dspark: DSpark | None = None
  preview_mtp: int = 0            # classic MTP blocks of the preview; they are never loaded

  @classmethod
  def from_dir(cls, path: str | Path) -> Config:
    """Reads the first of CONFIG_FILES in the checkpoint's folder. Raises ConfigError."""
    folder = Path(path)
    if why := no_checkpoint(folder): raise ConfigError(why)
    name = next(name for name in CONFIG_FILES if (folder / name).exists())
    return cls.from_dict(read_json(folder / name, name, ConfigError), name)

  @classmethod
  def from_dict(cls, raw: dict[str, Any], file: str = "config.json") -> Config:
    """raw as it stands in the file, in any of the three spellings. Raises ConfigError, naming file and key."""
    return _Reader(raw, file).config()

def no_checkpoint(folder: Path, need_config: bool = True) -> str:
  """Why a folder can't be a checkpoint, before anything in it is read; '' if it may be one."""
  if not folder.is_dir():
    return f"{folder}: {'not a directory' if folder.exists() else 'no such directory'}, want the folder of a checkpoint"
  if not need_config or any((folder / name).exists() for name in CONFIG_FILES): return ""
  weights = sum(1 for _ in folder.glob("*.safetensors"))
  return f"{folder}: no config.json, want one of {', '.join(CONFIG_FILES)}. " + (
    f"{weights} .safetensors files are there: fetch config.json from the same place" if weights else
    "Is this the folder of a checkpoint?")

def read_json(path: Path, shown: str, error: type[ValueError]) -> dict[str, Any]:
  """The JSON object in a file. Raises `error` with one line that starts with `shown` if it can't be one: missing,
  unreadable, a Git LFS pointer, a web page, not JSON, a key given twice, not an object."""
  try:
    if (size := path.stat().st_size) > JSON_MAX: raise error(f"{shown}: {size} bytes, want at most {JSON_MAX}")
    data = path.read_bytes()
  except OSError as e: raise error(f"{shown}: can't be read ({e.strerror})") from e
  if why := not_the_file(data): raise error(f"{shown}: {why}")
  try: value = json.loads(data, object_pairs_hook=unique_keys(shown, error))
  except error: raise
  except RecursionError: raise error(f"{shown}: not JSON (nested too deep), want a JSON object") from None
  except ValueError as e:
    raise error(f"{shown}: not JSON ({' '.join(str(e).split())[:120]}), want a JSON object. Is the download complete?"
                ) from e
  if not isinstance(value, dict): raise error(f"{shown}: {shorten(value)}, want a JSON object")
  return value

def unique_keys(shown: str, error: type[ValueError]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
  """A hook for json.loads that refuses what a plain dict would hide: the second of two equal keys winning."""
  def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
      seen: set[str] = set()
      twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
      raise error(f"{shown}: {shorten(twice)} is given twice, want it once")
    return found
  return once

def not_the_file(head: bytes) -> str:
  """Why these first bytes are no data of ours at all, or '': the two things a failed download leaves behind."""
  if head.startswith(b"version https://git-lfs"):
    return "a Git LFS pointer, want the file itself. Run `git lfs pull` in the folder, or download it again"
  if head[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
    return "a web page, want the file itself. The download failed; download it again"
  return ""

def shorten(value: Any) -> str:
  """repr on one line, at most 60 characters."""
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + "..."

class _Reader:
  """One file's keys. Every getter checks type and range, so that a bad value is reported under the file's own key."""
  def __init__(self, raw: dict[str, Any], file: str):
    self.raw, self.file = raw, file
    self.args = "dim" in raw and "hidden_size" not in raw  # DeepSeek's ModelArgs
    if not self.args: self._known_model()
    self._not_v41()
    for key, legal in FIXED.items():
      value = raw.get(self.spelled(key), legal[0])
      if not any(value == ok and type(value) in _kinds(ok) for ok in legal):
        self.bad(key, value, f"{legal[0]!r}", "Any other value is another computation")

  def spelled(self, key: str) -> str: return MODEL_ARGS.get(key, key) if self.args else key

  def bad(self, key: str, value: Any, want: str, hint: str = "") -> NoReturn:
    raise ConfigError(f"{self.file}: {self.spelled(key)}={shorten(value)}, want {want}" + (f". {hint}" if hint else ""))

  def value(self, key: str, want: str, default: Any = None, source: dict[str, Any] | None = None) -> Any:
    found = (self.raw if source is None else source).get(self.spelled(key))
    if found is None and default is None:
      raise ConfigError(f"{self.file}: {self.spelled(self.where(key, source))} is missing, want {want}")
    return default if found is None else found

  def where(self, key: str, source: dict[str, Any] | None) -> str:
    """A key with the name of the object it stands in."""
    names = [name for name in ("rope_scaling", "rope_parameters") if self.raw.get(name) is source is not None]
    return f"{names[0]}.{key}" if names else key

  def integer(self, key: str, low: int = 1, high: int = 2**31 - 1, default: int | None = None,
              source: dict[str, Any] | None = None) -> int:
    want = f"an integer >= {low}" if high == 2**31 - 1 else f"an integer in {low}..{high}"
    found = self.value(key, want, default, source)
    if type(found) is int and found > high: want = f"an integer in {low}..{high}"
    # not isinstance: to that, true is an integer
    if type(found) is not int or not low <= found <= high: self.bad(self.where(key, source), found, want)
    return found

  def number(self, key: str, above: float = 0.0, most: float = 1e9, default: float | None = None,
             source: dict[str, Any] | None = None) -> float:
    want = f"a number > {above:g} and <= {most:g}"
    found = self.value(key, want, default, source)
    if type(found) not in (int, float) or not above < found <= most:  # nan fails the compare
      self.bad(self.where(key, source), found, want)
    return float(found)

  def integers(self, key: str, low: int, want: str) -> tuple[int, ...]:
    found = self.value(key, want)
    if not isinstance(found, list): self.bad(key, found, want)
    for i, v in enumerate(found):
      if type(v) is not int or v < low: self.bad(f"{self.spelled(key)}[{i}]", v, want)
    return tuple(found)

  def _known_model(self) -> None:
    kind, names = self.raw.get("model_type"), self.raw.get("architectures")
    named = " ".join(str(x) for x in [kind, *(names if isinstance(names, list) else [names])] if x is not None)
    if any(mark in named.lower() for mark in ("v4_1", "v4.1", "v41")):
      self.bad("model_type", kind if kind is not None else names, "'deepseek_v4'", V41)
    if kind is None and names is None:
      raise ConfigError(f"{self.file}: model_type is missing, want 'deepseek_v4'. Only DeepSeek-V4 can be run")
    if kind not in (None, "deepseek_v4"): self.bad("model_type", kind, "'deepseek_v4'", "Only DeepSeek-V4 can be run")
    if names not in (None, ["DeepseekV4ForCausalLM"]) and not (kind and names == ["DeepseekV4Model"]):
      self.bad("architectures", names, "['DeepseekV4ForCausalLM']", "Only DeepSeek-V4 can be run")

  def _not_v41(self) -> None:
    for key, value in self.raw.items():
      if key.startswith(V41_KEYS) and value not in (None, [], 0, -1): self.bad(key, value, "no such key", V41)
    eps = self.raw.get(self.spelled("rms_norm_eps"))
    if type(eps) is float and 0 < eps < 1e-12: self.bad("rms_norm_eps", eps, "a number >= 1e-12", V41)

  def config(self) -> Config:
    layers = self.integer("num_hidden_layers", high=256)
    vocab, experts = self.integer("vocab_size"), self.integer("n_routed_experts", high=1024)
    heads, groups = self.integer("num_attention_heads", high=65536), self.integer("o_groups", high=65536)
    hidden, inner = self.integer("hidden_size"), self.integer("moe_intermediate_size")
    head, index_head = self.integer("head_dim"), self.integer("index_head_dim")
    rope, window = self._rope_dim(head), self.integer("sliding_window")
    for key, width in (("hidden_size", hidden), ("moe_intermediate_size", inner)):
      if width % 32: self.bad(key, width, "a multiple of 32", "4-bit weights share a scale among 32 columns")
    if heads % groups: self.bad("o_groups", groups, f"a divisor of {heads} heads")
    if rope % 2: self.bad("qk_rope_head_dim", rope, "an even number", "Rotation works on pairs")
    if head <= rope or (head - rope) % 64:
      self.bad("head_dim", head, f"{rope} rotary dimensions plus a positive multiple of 64",
               "The cache stores the rest in 8-bit groups of 64")
    if index_head & (index_head - 1) or index_head % 32 or index_head <= rope:
      self.bad("index_head_dim", index_head, f"a power of two, at least 32 and more than {rope} rotary dimensions",
               "The indexer needs a Hadamard transform and 4-bit groups of 32")
    ratios, extra = self._ratios(layers)
    dspark = self._dspark(layers, vocab, extra)
    factor, original, fast, slow, most = self._yarn()
    theta, compress_theta = self._theta()
    self._quantisation()
    return Config(
      vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, head_dim=head,
      qk_rope_head_dim=rope, q_lora_rank=self.integer("q_lora_rank"), o_lora_rank=self.integer("o_lora_rank"),
      o_groups=groups, moe_intermediate_size=inner, n_routed_experts=experts, n_shared_experts=1,
      num_experts_per_tok=self.integer("num_experts_per_tok", 1, experts), num_hash_layers=self._hash_layers(layers),
      routed_scaling_factor=self.number("routed_scaling_factor"), swiglu_limit=self.number("swiglu_limit"),
      sliding_window=window, index_n_heads=self.integer("index_n_heads"), index_head_dim=index_head,
      index_topk=self.integer("index_topk"), hc_mult=self.integer("hc_mult", high=64),
      hc_sinkhorn_iters=self.integer("hc_sinkhorn_iters", high=1000),
      hc_eps=self.number("hc_eps", most=0.1, default=1e-6),
      rms_norm_eps=self.number("rms_norm_eps", most=0.1, default=1e-6),
      rope_theta=theta, compress_rope_theta=compress_theta, rope_factor=factor, rope_original=original,
      rope_beta_fast=fast, rope_beta_slow=slow, max_position_embeddings=most,
      bos_token_id=self.integer("bos_token_id", 0, vocab - 1, default=0), eos_token_id=self._eos(vocab),
      compress_ratios=ratios, dspark=dspark, preview_mtp=extra if dspark is None else 0)

  def _rope_dim(self, head: int) -> int:
    share = self.raw.get("partial_rotary_factor")  # transformers writes this instead of, or beside, the width
    if share is not None and (type(share) not in (int, float) or not 0 < share <= 1):
      self.bad("partial_rotary_factor", share, "a number in 0..1")
    default = None if share is None or self.args else round(head * share)
    rope = self.integer("qk_rope_head_dim", 2, default=default)
    if default is not None and rope != default:
      self.bad("partial_rotary_factor", share, f"{rope}/{head}, to agree with qk_rope_head_dim")
    for key, want in (("qk_nope_head_dim", head - rope), ("v_head_dim", head)):
      if (found := self.raw.get(key)) not in (None, want):
        self.bad(key, found, str(want), "Keys and values are one vector")
    return rope

  def _hash_layers(self, layers: int) -> int:
    kinds = self.raw.get("mlp_layer_types")
    if kinds is None or "num_hash_layers" in self.raw: return self.integer("num_hash_layers", 0, layers)
    count = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    if kinds != ["hash_moe"] * count + ["moe"] * (layers - count):
      self.bad("mlp_layer_types", kinds, f"{layers} entries, first 'hash_moe', then 'moe'")
    return count

  def _ratios(self, layers: int) -> tuple[tuple[int, ...], int]:
    """-> the target's ratios, and how many blocks of a draft or MTP follow them."""
    drafted = any(self.raw.get(key) for key in ("dspark_block_size", "dspark_target_layer_ids"))
    if "compress_ratios" not in self.raw and "layer_types" in self.raw:
      return self._layer_types(layers), STAGES if drafted else 0
    ratios = self.integers("compress_ratios", 0, "0, 4 or an integer >= 2 for every layer")
    extra = len(ratios) - layers
    if 1 in ratios: self.bad(f"compress_ratios[{ratios.index(1)}]", 1, "0, 4 or an integer >= 2", V41)
    if big := [r for r in ratios if r > 65536]: self.bad("compress_ratios", big[0], "at most 65536")
    if extra not in ((STAGES,) if drafted else (0, 1, STAGES)):
      want = f"{layers + STAGES} entries ({layers} layers and {STAGES} draft stages)" if drafted else (
        f"{layers} entries, one for each layer, {layers + 1} with the preview's MTP block "
        f"or {layers + STAGES} with a DSpark draft")
      self.bad("compress_ratios", list(ratios), want, f"{len(ratios)} were found")
    if any(ratios[layers:]):
      self.bad(f"compress_ratios[{layers}:]", list(ratios[layers:]), "0 for each block after the target's layers")
    blocks = self.raw.get("n_mtp_layers")  # only ModelArgs has it; config.json's num_nextn_predict_layers means nothing
    if self.args and blocks is not None and (type(blocks) is not int or blocks != extra):
      self.bad("n_mtp_layers", blocks, f"{extra}, as compress_ratios has {len(ratios)} entries for {layers} layers")
    return ratios[:layers], extra

  def _layer_types(self, layers: int) -> tuple[int, ...]:
    """transformers keeps a kind for each layer and a rate for each kind."""
    rates = self.raw.get("compress_rates") or {}
    if not isinstance(rates, dict): self.bad("compress_rates", rates, "an object of two rates")
    kinds = {"sliding_attention": 0,
             "compressed_sparse_attention": rates.get("compressed_sparse_attention", 4),
             "heavily_compressed_attention": rates.get("heavily_compressed_attention", 128)}
    sparse, heavy = kinds["compressed_sparse_attention"], kinds["heavily_compressed_attention"]
    if type(sparse) is not int or sparse != 4: self.bad("compress_rates.compressed_sparse_attention", sparse, "4")
    if type(heavy) is not int or heavy < 2 or heavy == 4 or heavy > 65536:
      self.bad("compress_rates.heavily_compressed_attention", heavy, "an integer in 2..65536 but not 4")
    types = self.raw["layer_types"]
    if not isinstance(types, list) or len(types) != layers or any(t not in list(kinds) for t in types):
      self.bad("layer_types", types, f"{layers} entries of {', '.join(kinds)}")
    return tuple(kinds[t] for t in types)

  def _dspark(self, layers: int, vocab: int, extra: int) -> DSpark | None:
    if extra != STAGES: return None
    block = self.integer("dspark_block_size", 1, 64)
    noise, rank = self.integer("dspark_noise_token_id", 0, vocab - 1), self.integer("dspark_markov_rank")
    want = f"ascending layer ids in 0..{layers - 1}"
    taps = self.integers("dspark_target_layer_ids", 0, want)
    # the taps are gathered while the layers run, so the order of main_proj's columns is the order of the layers
    if not taps or max(taps) >= layers or list(taps) != sorted(set(taps)):
      self.bad("dspark_target_layer_ids", list(taps), want)
    return DSpark(block, noise, taps, rank, STAGES)

  def _yarn(self) -> tuple[float, int, float, float, int]:
    """-> factor, original length, beta_fast, beta_slow, max_position_embeddings."""
    if self.args: scaling = self.raw
    else:
      key = "rope_scaling" if self.raw.get("rope_scaling") is not None else "rope_parameters"
      if key not in self.raw: key = "rope_scaling"
      want = "an object of type yarn with factor and original_max_position_embeddings"
      scaling = self.value(key, want)
      if isinstance(scaling, dict) and isinstance(scaling.get("compress"), dict): scaling = scaling["compress"]
      if not isinstance(scaling, dict): self.bad(key, scaling, want)
      kind = scaling.get("type", scaling.get("rope_type"))
      if kind != "yarn": self.bad(f"{key}.type", kind, "'yarn'")
      # no temperature: DeepSeek-V4 leaves the softmax scale and the rotated vectors alone
      for name, legal in (("attention_factor", (None, 1)), ("mscale", (None, 0)), ("mscale_all_dim", (None, 0)),
                          ("truncate", (None, True))):
        if (found := scaling.get(name)) not in legal: self.bad(f"{key}.{name}", found, f"no such key or {legal[1]!r}")
    factor = self.number("factor", source=scaling)
    if factor < 1: self.bad(self.where("factor", scaling), factor, "a number >= 1")
    original = self.integer("original_max_position_embeddings", source=scaling)
    fast, slow = (self.number(k, default=d, source=scaling) for k, d in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if fast <= slow: self.bad(self.where("beta_fast", scaling), fast, f"more than beta_slow={slow:g}")
    most = self.integer("max_position_embeddings", default=round(original * factor))  # ModelArgs has none
    return factor, original, fast, slow, most

  def _theta(self) -> tuple[float, float]:
    nested = self.raw.get("rope_parameters")
    found = {"rope_theta": self.raw.get("rope_theta"), "compress_rope_theta": self.raw.get("compress_rope_theta")}
    if isinstance(nested, dict) and not self.args:
      for key, label in (("rope_theta", "main"), ("compress_rope_theta", "compress")):
        part = nested.get(label)
        if found[key] is None and isinstance(part, dict): found[key] = part.get("rope_theta")
    main, compress = (self.number(key, above=1.0, source=found) for key in ("rope_theta", "compress_rope_theta"))
    return main, compress

  def _eos(self, vocab: int) -> int:
    eos = self.raw.get("eos_token_id")
    if not isinstance(eos, list): return self.integer("eos_token_id", 0, vocab - 1, default=1)
    if len(eos) != 1 or type(eos[0]) is not int or not 0 <= eos[0] < vocab:
      self.bad("eos_token_id", eos, f"one id in 0..{vocab - 1}")
    return eos[0]

  def _quantisation(self) -> None:
    """Formats are read from the tensors; this only refuses a scheme whose bytes would mean something else."""
    if self.args:
      legal_args = (("dtype", ("fp8", "bf16")), ("scale_fmt", ("ue8m0",)), ("scale_dtype", ("fp8",)))
      for name, legal in legal_args:
        if (found := self.raw.get(name)) is not None and found not in legal: self.bad(name, found, repr(legal[0]))
      return
    quant = self.raw.get("quantization_config")
    if quant is None: return
    if not isinstance(quant, dict): self.bad("quantization_config", quant, "an object or nothing")
    for name, want in (("quant_method", "fp8"), ("fmt", "e4m3"), ("scale_fmt", "ue8m0"),
                       ("activation_scheme", "dynamic"), ("weight_block_size", [128, 128])):
      found = quant.get(name, want)
      if found != want:
        self.bad(f"quantization_config.{name}", found, repr(want), V41 if found == [32, 32] else
                 "Repacked checkpoints (AWQ, GPTQ, NVFP4, ...) are not supported; use DeepSeek's own")

def _kinds(legal: Any) -> tuple[type, ...]:
  """1 must not pass for True, nor True for 1, but 1 may pass for 1.0."""
  return (int, float) if isinstance(legal, float) else (type(legal),)
