"""Writes a checkpoint in DeepSeek's layout: something to load, measure and break without a download.

Weights are random, but in `--size full`: that has every name, shape and format of DeepSeek-V4-Flash-0731 (155 GiB) as
files of zeros of which the disk stores only the headers, for whatever looks at sizes alone.

Values are scaled so that activations keep their size from layer to layer (matrices about 1/sqrt(columns), norms about
1), so speed, memory and parity can be tried on it; it has learned nothing and has no tokenizer, prompts are token ids.
Every tensor comes from a generator seeded by (seed, name): the same bytes whatever the order or the number of shards.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from specgrad.checkpoint import BITS, E2M1, E4M3, GROUP, TILE, Checkpoint, CheckpointError, Expect, expected_tensors
from specgrad.config import Config, ConfigError

COMMON: dict[str, Any] = {
  "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "attention_bias": False,
  "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4,
  "hc_sinkhorn_iters": 20, "hidden_act": "silu", "n_shared_experts": 1, "norm_topk_prob": True,
  "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
  "rope_theta": 10000, "compress_rope_theta": 160000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
  "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
  "index_head_dim": 128,
  "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                          "weight_block_size": [128, 128]}}
SIZES: dict[str, dict[str, Any]] = {
  "tiny": {  # about 6 MB, every kind of layer, window and blocks small enough to wrap within a short prompt
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 128,
    "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 2, "moe_intermediate_size": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "num_hash_layers": 2, "sliding_window": 16, "index_n_heads": 8, "index_topk": 4,
    "max_position_embeddings": 4096, "compress_ratios": [0, 0, 4, 16, 4, 0, 0, 0],
    "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 512, "beta_fast": 32,
                     "beta_slow": 1},
    "dspark_block_size": 5, "dspark_noise_token_id": 250, "dspark_target_layer_ids": [2, 3, 4],
    "dspark_markov_rank": 32},
  "mid": {   # about 330 MB, the real model's proportions in small
    "vocab_size": 4096, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "head_dim": 256,
    "q_lora_rank": 384, "o_lora_rank": 256, "o_groups": 4, "moe_intermediate_size": 256, "n_routed_experts": 32,
    "num_experts_per_tok": 4, "num_hash_layers": 3, "sliding_window": 128, "index_n_heads": 16, "index_topk": 64,
    "max_position_embeddings": 65536, "compress_ratios": [0, 0] + [4, 128] * 5 + [0, 0, 0],
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1},
    "dspark_block_size": 5, "dspark_noise_token_id": 4000, "dspark_target_layer_ids": [9, 10, 11],
    "dspark_markov_rank": 64},
  "full": {  # DeepSeek-V4-Flash-0731 itself: 48 files, 72,317 tensors, 166,878,536,440 bytes
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
    "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 6, "num_hash_layers": 3, "sliding_window": 128, "index_n_heads": 64, "index_topk": 512,
    "max_position_embeddings": 1048576, "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0, 0, 0],
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
                     "beta_slow": 1},
    "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256, "initializer_range": 0.02, "transformers_version": "4.57.1", "use_cache": True}}
DEMO = Path(__file__).resolve().parents[1] / "specgrad" / "demo" / "config.json"
SPARSE = ("full",)  # sizes of zeros
CHUNK = 1 << 22  # values made at a time; bounds the memory whatever the tensor

def _e4m3_normal() -> np.ndarray:
  """4096 e4m3 codes, the quantiles of a normal law of deviation 64: indexing it with random numbers draws from that."""
  codes = np.array([c for c in range(256) if c & 127 != 127 and c != 128])
  value, normal = E4M3[codes], NormalDist(0, 64)
  return codes[[int(np.abs(value - normal.inv_cdf((i + 0.5) / 4096)).argmin()) for i in range(4096)]].astype(np.uint8)

E4M3_NORMAL = _e4m3_normal()
E4M3_STD, E2M1_STD = float(E4M3[E4M3_NORMAL].std()), float(E2M1.std())

def random_scales(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> np.ndarray:
  """e8m0 codes, two neighbouring powers of two mixed so that the mean of their squares is std squared."""
  low = int(np.floor(np.log2(std)))
  share = (std**2 - 4.0**low) / (4.0**(low + 1) - 4.0**low)
  return (127 + low + (rng.random(shape, np.float32) < share)).astype(np.uint8)

def deviation(role: str, columns: int) -> tuple[float, float]:
  """-> mean and standard deviation of a tensor's values by its role."""
  name = role.removesuffix(".weight").split(".")[-1]
  if name.endswith("norm"): return 1.0, 0.1
  if role.endswith(".bias"): return 0.0, 0.05        # router: changes some choices, empties no expert
  if name == "attn_sink" or name.endswith("base"): return 0.0, 0.5
  if name.endswith("scale"): return 0.5, 0.1         # gains of the hyper-connections
  if name in ("embed", "markov_w1"): return 0.0, 1.0
  if name == "ape": return 0.0, 0.5
  if name == "head": return 0.0, 3 / columns**0.5    # logits of deviation 3, so that choices are seldom ties
  return 0.0, 1 / columns**0.5

def values(name: str, want: Expect, config: Config, seed: int) -> Iterator[np.ndarray]:
  """The tensor's rows in stored form, CHUNK values at a time at most."""
  rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
  columns = want.shape[-1]
  per_row = int(np.prod(want.shape[1:])) if len(want.shape) > 1 else 1
  step = max(1, CHUNK // max(per_row, config.n_routed_experts))
  for start in range(0, want.shape[0], step):
    shape = (min(step, want.shape[0] - start), *want.shape[1:])
    if want.kind == "expert": yield rng.integers(0, 256, shape, np.uint8)
    elif want.kind == "linear": yield E4M3_NORMAL[rng.integers(0, 4096, shape, np.uint16)]
    elif want.kind == "scale":
      expert = want.role.startswith("ffn.experts.")
      width = columns * (GROUP if expert else TILE)  # a little too much where the last tile is ragged; no harm
      yield random_scales(rng, shape, 1 / width**0.5 / (E2M1_STD if expert else E4M3_STD))
    elif want.dtypes[0] == "I64":  # distinct experts for each token
      yield rng.random((shape[0], config.n_routed_experts)).argsort(1)[:, :shape[1]].astype(np.int64)
    else:
      mean, std = deviation(want.role, columns)
      made = mean + std * rng.standard_normal(shape, np.float32)
      yield made if want.dtypes[0] == "F32" else ((made.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)

def settings(size: str) -> dict[str, Any]:
  """config.json of a size. "demo" is the shape of the demonstration checkpoint that comes with the package."""
  return json.loads(DEMO.read_text()) if size == "demo" else COMMON | SIZES[size]

def need_holes(folder: Path) -> None:
  """Raises OSError unless files in `folder` may have holes that take no space: FAT and some network disks fill them."""
  with tempfile.TemporaryFile(dir=folder) as f:
    f.truncate(1 << 24)
    if (taken := os.fstat(f.fileno()).st_blocks * 512) > 1 << 20:
      raise OSError(f"{folder}: a hole of {1 << 24} bytes takes {taken} bytes of disk, want a file system with sparse "
                    "files (ext4, xfs, btrfs, tmpfs, ...)")

def write_shard(path: Path, wanted: dict[str, Expect], config: Config, seed: int, bar: tqdm,
                zeros: bool = False) -> int:
  """One safetensors file; wide elements first, so that every tensor is aligned. Returns the bytes of its tensors.
  zeros: the tensors are one hole."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  order, reach = sorted(wanted, key=lambda n: (-BITS[wanted[n].dtypes[0]], n)), 0
  for name in order:
    want = wanted[name]
    size = int(np.prod(want.shape)) * BITS[want.dtypes[0]] // 8
    header[name] = {"dtype": want.dtypes[0], "shape": list(want.shape), "data_offsets": [reach, reach := reach + size]}
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  with open(path, "wb") as f:
    f.write(len(text).to_bytes(8, "little") + text)
    if zeros:
      f.truncate(f.tell() + reach)
      bar.update(reach)
    for name in [] if zeros else order:
      for part in values(name, wanted[name], config, seed):
        f.write(part.tobytes())
        bar.update(part.nbytes)
  return reach

def shards(expected: dict[str, Expect]) -> list[dict[str, Expect]]:
  """As DeepSeek cuts it: embedding, each layer, head and final norm, each draft stage."""
  groups: dict[tuple[int, int], dict[str, Expect]] = {}
  for name, want in expected.items():
    parts = name.split(".")
    key = {"embed": (0, 0), "layers": (1, 0), "mtp": (3, 0)}.get(parts[0], (2, 0))
    if key[0] % 2: key = (key[0], int(parts[1]))
    groups.setdefault(key, {})[name] = want
  return [groups[key] for key in sorted(groups)]

def make(out: Path, size: str, seed: int) -> dict[str, Any]:
  """Writes the checkpoint under a temporary name beside `out`, opens it as a check, then renames it. Returns what was
  made. Raises FileExistsError if `out` is there."""
  if out.exists(): raise FileExistsError(f"{out}: is there already, want a new name")
  raw, began = settings(size), time.perf_counter()
  config = Config.from_dict(raw)
  cut = shards(expected_tensors(config))
  total = sum(int(np.prod(e.shape)) * BITS[e.dtypes[0]] // 8 for part in cut for e in part.values())
  out.parent.mkdir(parents=True, exist_ok=True)
  made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
  try:
    if size in SPARSE: need_holes(made)
    weight_map: dict[str, str] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc=out.name, disable=None) as bar:
      for i, part in enumerate(cut, 1):
        shard = f"model-{i:05}-of-{len(cut):05}.safetensors"
        write_shard(made / shard, part, config, seed, bar, size in SPARSE)
        weight_map.update(dict.fromkeys(part, shard))
    generation = {"_from_model_config": True, "bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id,
                  "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    texts = {"config.json": raw, "generation_config.json": generation, "model.safetensors.index.json": index}
    for name, value in texts.items(): (made / name).write_text(json.dumps(value, indent=2) + "\n")
    fingerprint = Checkpoint.open(made).fingerprint
    disk = sum(p.stat().st_blocks * 512 for p in made.iterdir())
    made.chmod(0o755)  # mkdtemp's folder is for its owner alone
    made.rename(out)
  except BaseException:
    shutil.rmtree(made, ignore_errors=True)
    raise
  return {"out": str(out), "size": size, "seed": seed, "bytes": total, "disk_bytes": disk, "tensors": len(weight_map),
          "shards": len(cut), "fingerprint": fingerprint, "seconds": round(time.perf_counter() - began, 2)}

def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description="Write a checkpoint of random weights in DeepSeek's layout.",
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.add_argument("out", type=Path, help="folder to make")
  parser.add_argument("--size", choices=("tiny", "demo", "mid", "full"), default="mid",
                      help="tiny: 6 MB; demo: 13 MB, shaped as the demonstration checkpoint; mid: 330 MB; full: the "
                      "155 GiB of DeepSeek-V4-Flash-0731 as sparse files of zeros, 14 MB of disk")
  parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes")
  args = parser.parse_args(argv)
  if args.seed < 0: parser.error(f"--seed={args.seed}, want an integer >= 0")
  try: print(json.dumps(make(args.out, args.size, args.seed)))
  except (OSError, CheckpointError, ConfigError) as e:
    print(f"make_checkpoint: error: {e}", file=sys.stderr)
    return 2
  return 0

if __name__ == "__main__": sys.exit(main())
