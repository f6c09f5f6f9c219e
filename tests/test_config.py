"""Config: the three spellings read the same, and every value that can't be run is refused by file, key and value."""
from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgrad.config import CONFIG_FILES, MODEL_ARGS, Config, ConfigError, DSpark

# config.json of DeepSeek-V4-Flash-0731, as published
REAL: dict[str, Any] = {
  "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43,
  "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
  "o_lora_rank": 1024, "o_groups": 8, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
  "num_experts_per_tok": 6, "num_hash_layers": 3, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
  "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu",
  "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4,
  "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "rope_theta": 10000,
  "compress_rope_theta": 160000, "max_position_embeddings": 1048576, "vocab_size": 129280, "bos_token_id": 0,
  "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
                   "beta_slow": 1},
  "eos_token_id": 1, "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
  "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16", "use_cache": True, "transformers_version": "4.57.1",
  "expert_dtype": "fp4",
  "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                          "weight_block_size": [128, 128]},
  "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0, 0, 0],
  "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42],
  "dspark_markov_rank": 256}
HF_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}

def changed(**keys: Any) -> dict[str, Any]:
  """REAL with keys set; None removes one; a__b means b inside a."""
  raw = deepcopy(REAL)
  for key, value in keys.items():
    *outer, last = key.split("__")
    place = raw
    for name in outer: place = place[name]
    if value is None: place.pop(last, None)
    else: place[last] = value
  return raw

def preview() -> dict[str, Any]:
  """The April release: one MTP block, no expert_dtype, no draft."""
  raw = changed(expert_dtype=None, compress_ratios=REAL["compress_ratios"][:44])
  return {k: v for k, v in raw.items() if not k.startswith("dspark")}

def model_args(raw: dict[str, Any]) -> dict[str, Any]:
  """The same model as DeepSeek's inference code spells it."""
  keep = {"vocab_size", "n_routed_experts", "n_shared_experts", "swiglu_limit", "q_lora_rank", "head_dim", "o_groups",
          "o_lora_rank", "rope_theta", "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters",
          "compress_rope_theta", "compress_ratios", *(k for k in raw if k.startswith("dspark"))}
  flat = raw | raw["rope_scaling"]
  renamed = {new: flat[old] for old, new in MODEL_ARGS.items() if old in flat}
  return {k: flat[k] for k in keep if k in flat} | renamed | {
    "beta_fast": 32, "beta_slow": 1, "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    "n_mtp_layers": len(raw["compress_ratios"]) - raw["num_hidden_layers"]}

def rewritten(raw: dict[str, Any]) -> dict[str, Any]:
  """The same model as transformers writes it back."""
  drop = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling")
  layers, hashed = raw["num_hidden_layers"], raw["num_hash_layers"]
  yarn = {k: v for k, v in raw["rope_scaling"].items() if k != "type"}
  return {k: v for k, v in raw.items() if k not in drop} | {
    "layer_types": [HF_KINDS[r] for r in raw["compress_ratios"][:layers]],
    "compress_rates": {HF_KINDS[4]: 4, HF_KINDS[128]: 128}, "partial_rotary_factor": 64 / 512,
    "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
    "rope_parameters": {"main": {"rope_type": "default", "rope_theta": 10000},
                        "compress": {**yarn, "rope_type": "yarn", "rope_theta": 160000, "attention_factor": 1.0}}}

# -- what is read ----------------------------------------------------------------------------------------------------

def test_real_config():
  c = Config.from_dict(deepcopy(REAL))
  assert (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.head_dim, c.qk_rope_head_dim) == (
    4096, 43, 64, 512, 64)
  assert (c.rope_factor, c.rope_original, c.rope_beta_fast, c.rope_beta_slow) == (16.0, 65536, 32.0, 1.0)
  assert c.compress_ratios == (0, 0) + (4, 128) * 20 + (4,) and c.num_hash_layers == 3
  assert (c.compress_ratios.count(4), c.compress_ratios.count(128)) == (21, 20)
  assert c.dspark == DSpark(5, 128799, (40, 41, 42), 256, 3) and c.preview_mtp == 0
  assert isinstance(c.rope_theta, float) and hash(c) == hash(Config.from_dict(deepcopy(REAL)))

def test_preview_has_one_mtp_block_and_no_draft():
  c = Config.from_dict(preview())
  assert (c.dspark, c.preview_mtp, len(c.compress_ratios)) == (None, 1, 43)

@pytest.mark.parametrize("spell", [model_args, rewritten])
@pytest.mark.parametrize("raw", [REAL, preview() | {"compress_ratios": preview()["compress_ratios"][:43]}],
                         ids=["0731", "no mtp"])
def test_other_spellings_read_the_same(spell, raw):
  assert Config.from_dict(spell(deepcopy(raw))) == Config.from_dict(deepcopy(raw))

def test_v4_pro_is_the_same_computation():
  c = Config.from_dict(changed(hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1536,
    o_groups=16, n_routed_experts=384, moe_intermediate_size=3072, index_topk=1024, routed_scaling_factor=2.5,
    compress_ratios=[128, 128] + [4, 128] * 29 + [4, 0, 0, 0], dspark_markov_rank=512,
    dspark_target_layer_ids=[58, 59, 60]))
  assert c.compress_ratios[:3] == (128, 128, 4) and c.dspark is not None and c.dspark.dspark_markov_rank == 512

def test_documented_defaults():
  c = Config.from_dict(changed(rms_norm_eps=None, hc_eps=None, n_shared_experts=None, bos_token_id=None,
    eos_token_id=None, quantization_config=None, scoring_func=None, rope_scaling__beta_fast=None,
    max_position_embeddings=None))
  assert c == Config.from_dict(deepcopy(REAL))

@pytest.mark.parametrize("keys", [
  {"num_nextn_predict_layers": 7}, {"some_new_key": {"a": 1}}, {"expert_dtype": "bf16"}, {"eos_token_id": [1]},
  {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}},
  {"engram_layer_ids": []}, {"architectures": None}, {"model_type": None}], ids=str)
def test_what_does_not_matter_is_ignored(keys):
  assert Config.from_dict(changed(**keys)) == Config.from_dict(deepcopy(REAL))

@pytest.mark.parametrize("ratio", [2, 3, 16, 128, 4096])
def test_any_block_length_from_two_is_legal(ratio):
  ratios = [0, 0] + [4, ratio] * 20 + [4, 0, 0, 0]
  assert Config.from_dict(changed(compress_ratios=ratios)).compress_ratios[3] == ratio

@pytest.mark.parametrize("case", ["v4_r16", "dspark_w16"])
def test_golden_in_both_spellings(case, shared, tmp_path):
  folder = shared / "golden" / case / "ckpt"
  c = Config.from_dir(str(folder))
  assert c.compress_ratios == {"v4_r16": (0, 0, 4, 16, 4), "dspark_w16": (0, 4, 16)}[case]
  (tmp_path / "inference").mkdir()
  (tmp_path / "inference" / "config.json").write_bytes((folder / "inference_config.json").read_bytes())
  args = Config.from_dir(tmp_path)
  differ = {f.name for f in fields(Config) if getattr(c, f.name) != getattr(args, f.name)}
  assert differ <= {"max_position_embeddings"}  # ModelArgs has no such key: factor * original length

# -- what is refused -------------------------------------------------------------------------------------------------

def text_of(error: pytest.ExceptionInfo[ConfigError]) -> str:
  assert "\n" not in str(error.value) and len(str(error.value)) < 400
  return str(error.value)

def refused(raw: dict[str, Any], file: str = "config.json") -> str:
  with pytest.raises(ConfigError) as error: Config.from_dict(raw, file)
  return text_of(error)

INTEGERS = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
            "q_lora_rank", "o_lora_rank", "o_groups", "moe_intermediate_size", "n_routed_experts",
            "num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult",
            "hc_sinkhorn_iters", "max_position_embeddings", "dspark_markov_rank",
            "rope_scaling__original_max_position_embeddings"]
NUMBERS = ["routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta",
           "rope_scaling__factor", "rope_scaling__beta_fast", "rope_scaling__beta_slow"]

@pytest.mark.parametrize("key", INTEGERS + ["num_hash_layers", "dspark_block_size", "dspark_noise_token_id"])
@pytest.mark.parametrize("value", [-1, True, 3.0, "4", [4], {}, 2**70], ids=repr)
def test_integers(key, value):
  text = refused(changed(**{key: value}))
  assert re.match(rf"config\.json: {key.replace('__', '.')}={re.escape(repr(value))}, want an integer", text), text

@pytest.mark.parametrize("key", INTEGERS)
def test_counts_are_positive(key):
  assert f"{key.replace('__', '.')}=0, want an integer" in refused(changed(**{key: 0}))

@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0, False, "1e-6", [1.0]], ids=repr)
def test_numbers(key, value):
  text = refused(changed(**{key: value}))
  assert re.match(rf"config\.json: {key.replace('__', '.')}={re.escape(repr(value))}, want a number", text), text

OPTIONAL = {"max_position_embeddings", "hc_eps", "rms_norm_eps", "rope_scaling__beta_fast", "rope_scaling__beta_slow"}

@pytest.mark.parametrize("key", [k for k in [*INTEGERS, *NUMBERS, "num_hash_layers", "compress_ratios",
  "dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "rope_scaling"] if k not in OPTIONAL])
def test_missing(key):
  text = refused(changed(**{key: None}))
  assert text.startswith(f"config.json: {key.replace('__', '.')} is missing, want "), text

@pytest.mark.parametrize("keys, want", [
  ({"o_groups": 7}, "o_groups=7, want a divisor of 64 heads"),
  ({"hidden_size": 4090}, "hidden_size=4090, want a multiple of 32"),
  ({"moe_intermediate_size": 2000}, "moe_intermediate_size=2000, want a multiple of 32"),
  ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63, want an even number"),
  ({"qk_rope_head_dim": 512}, "head_dim=512, want 512 rotary dimensions plus a positive multiple of 64"),
  ({"head_dim": 500}, "head_dim=500, want 64 rotary dimensions plus"),
  ({"index_head_dim": 64}, "index_head_dim=64, want a power of two, at least 32 and more than 64"),
  ({"index_head_dim": 96}, "index_head_dim=96, want a power of two"),
  ({"index_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 520}, "index_head_dim=16, want a power of two"),
  ({"num_experts_per_tok": 257}, "num_experts_per_tok=257, want an integer in 1..256"),
  ({"num_hash_layers": 44}, "num_hash_layers=44, want an integer in 0..43"),
  ({"bos_token_id": 129280}, "bos_token_id=129280, want an integer in 0..129279"),
  ({"eos_token_id": -1}, "eos_token_id=-1, want an integer in 0..129279"),
  ({"eos_token_id": [1, 2]}, "eos_token_id=[1, 2], want one id in 0..129279"),
  ({"rope_scaling__factor": 0.5}, "rope_scaling.factor=0.5, want a number >= 1"),
  ({"rope_scaling__beta_slow": 32}, "rope_scaling.beta_fast=32.0, want more than beta_slow=32"),
  ({"rope_theta": 1}, "rope_theta=1, want a number > 1"),
  ({"rope_scaling__type": "linear"}, "rope_scaling.type='linear', want 'yarn'"),
  ({"rope_scaling": {"factor": 16}}, "rope_scaling.type=None, want 'yarn'"),
  ({"rope_scaling": "yarn"}, "rope_scaling='yarn', want an object of type yarn"),
  ({"rope_scaling__mscale": 1.0}, "rope_scaling.mscale=1.0, want no such key"),
  ({"rope_scaling__attention_factor": 1.27}, "rope_scaling.attention_factor=1.27, want no such key or 1"),
  ({"compress_ratios": [0] * 45}, "want 46 entries (43 layers and 3 draft stages). 45 were found"),
  ({"compress_ratios": [0] * 47}, "want 46 entries (43 layers and 3 draft stages). 47 were found"),
  ({"compress_ratios": [-4] + [0] * 45}, "compress_ratios[0]=-4, want 0, 4 or an integer >= 2"),
  ({"compress_ratios": [0, True] + [0] * 44}, "compress_ratios[1]=True, want 0, 4 or an integer >= 2"),
  ({"compress_ratios": [0, 4.0] + [0] * 44}, "compress_ratios[1]=4.0, want 0, 4 or an integer >= 2"),
  ({"compress_ratios": [0] * 43 + [4, 0, 0]}, "compress_ratios[43:]=[4, 0, 0], want 0 for each block after"),
  ({"compress_ratios": 4}, "compress_ratios=4, want 0, 4 or an integer >= 2 for every layer"),
  ({"compress_ratios": [10**6] + [0] * 45}, "compress_ratios=1000000, want at most 65536"),
  ({"dspark_block_size": 65}, "dspark_block_size=65, want an integer in 1..64"),
  ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id=129280, want an integer in 0..129279"),
  ({"dspark_target_layer_ids": [41, 42, 43]}, "dspark_target_layer_ids=[41, 42, 43], want ascending layer ids in 0"),
  ({"dspark_target_layer_ids": [42, 41, 40]}, "dspark_target_layer_ids=[42, 41, 40], want ascending layer ids"),
  ({"dspark_target_layer_ids": [40, 40, 41]}, "dspark_target_layer_ids=[40, 40, 41], want ascending layer ids"),
  ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids=[], want ascending layer ids"),
  ({"dspark_target_layer_ids": [-1, 2]}, "dspark_target_layer_ids[0]=-1, want ascending layer ids"),
  ({"scoring_func": "softmax"}, "scoring_func='softmax', want 'sqrtsoftplus'"),
  ({"topk_method": "greedy"}, "topk_method='greedy', want 'noaux_tc'"),
  ({"hidden_act": "gelu"}, "hidden_act='gelu', want 'silu'"),
  ({"norm_topk_prob": False}, "norm_topk_prob=False, want True"),
  ({"tie_word_embeddings": True}, "tie_word_embeddings=True, want False"),
  ({"tie_word_embeddings": 0}, "tie_word_embeddings=0, want False"),
  ({"attention_bias": True}, "attention_bias=True, want False"),
  ({"num_key_value_heads": 8}, "num_key_value_heads=8, want 1"),
  ({"n_shared_experts": 2}, "n_shared_experts=2, want 1"),
  ({"n_group": 8}, "n_group=8, want 1"),
  ({"kv_lora_rank": 512}, "kv_lora_rank=512, want None"),
  ({"qk_nope_head_dim": 128}, "qk_nope_head_dim=128, want 448"),
  ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, want 64/512"),
  ({"quantization_config": "fp8"}, "quantization_config='fp8', want an object"),
  ({"quantization_config__quant_method": "awq"}, "quantization_config.quant_method='awq', want 'fp8'. Repacked"),
  ({"quantization_config__fmt": "e5m2"}, "quantization_config.fmt='e5m2', want 'e4m3'"),
  ({"quantization_config__scale_fmt": "float"}, "quantization_config.scale_fmt='float', want 'ue8m0'"),
  ({"quantization_config__weight_block_size": [64, 64]}, "weight_block_size=[64, 64], want [128, 128]"),
  ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3', want 'deepseek_v4'. Only DeepSeek-V4"),
  ({"architectures": ["LlamaForCausalLM"]}, "architectures=['LlamaForCausalLM'], want ['DeepseekV4ForCausalLM']"),
  ({"architectures": None, "model_type": None}, "model_type is missing, want 'deepseek_v4'"),
  ({"architectures": 5}, "architectures=5, want")], ids=lambda v: "" if isinstance(v, str) else ",".join(v))
def test_refused(keys, want):
  text = refused(changed(**keys))
  assert text.startswith("config.json: ") and want in text, text

@pytest.mark.parametrize("keys", [
  {"model_type": "deepseek_v4_1"}, {"architectures": ["DeepseekV41ForCausalLM"]}, {"engram_layer_ids": [1, 2]},
  {"kv_source_layers": [2, 14]}, {"rms_norm_eps": 1e-20}, {"quantization_config__weight_block_size": [32, 32]},
  {"compress_ratios": [0, 2, 1] + [0] * 43}], ids=str)
def test_v41_flash_is_refused_by_name(keys):
  assert "DeepSeek-V4.1-Flash" in refused(changed(**keys))

def test_v41_model_args_are_refused_by_name():
  assert "norm_eps=1e-20" in (text := refused(model_args(REAL) | {"norm_eps": 1e-20})) and "DeepSeek-V4.1-Flash" in text

def test_draft_keys_are_asked_for_when_only_the_layers_tell_of_a_draft():
  raw = {k: v for k, v in REAL.items() if not k.startswith("dspark")}
  assert refused(raw) == "config.json: dspark_block_size is missing, want an integer in 1..64"

def test_without_draft_the_length_of_ratios_is_layers_or_one_more():
  text = refused(preview() | {"compress_ratios": [0] * 45})
  assert "want 43 entries, one for each layer, 44 with the preview's MTP block or 46 with a DSpark draft" in text

@pytest.mark.parametrize("keys, want", [
  ({"n_layers": 0}, "n_layers=0, want an integer in 1..256"), ({"dim": "x"}, "dim='x', want an integer >= 1"),
  ({"n_mtp_layers": 1}, "n_mtp_layers=1, want 3, as compress_ratios has 46 entries for 43 layers"),
  ({"score_func": "sigmoid"}, "score_func='sigmoid', want 'sqrtsoftplus'"),
  ({"dtype": "int8"}, "dtype='int8', want 'fp8'"), ({"rope_factor": 0}, "rope_factor=0, want a number > 0"),
  ({"original_seq_len": 0}, "original_seq_len=0, want an integer >= 1")], ids=lambda v: str(v)[:20])
def test_model_args_errors_use_the_files_own_keys(keys, want):
  text = refused(model_args(deepcopy(REAL)) | keys, "inference_config.json")
  assert text.startswith("inference_config.json: ") and want in text, text

@pytest.mark.parametrize("keys, want", [
  ({"layer_types": ["sliding_attention"] * 42}, "want 43 entries of sliding_attention"),
  ({"layer_types": ["linear_attention"] * 43}, "want 43 entries of sliding_attention"),
  ({"layer_types": [[]] * 43}, "want 43 entries of sliding_attention"),
  ({"mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 41}, "want 43 entries, first 'hash_moe', then 'moe'"),
  ({"mlp_layer_types": ["dense"] * 43}, "want 43 entries, first 'hash_moe'"),
  ({"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates.compressed_sparse_attention=8, want 4"),
  ({"compress_rates": {"heavily_compressed_attention": 4}}, "heavily_compressed_attention=4, want an integer in 2..")],
  ids=lambda v: "" if isinstance(v, str) else str(v)[:40])
def test_rewritten_form_is_checked_too(keys, want):
  assert want in refused(rewritten(deepcopy(REAL)) | keys)

# -- files -----------------------------------------------------------------------------------------------------------

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1815\n"

@pytest.mark.parametrize("data, want", [
  (LFS, "a Git LFS pointer, want the file itself. Run `git lfs pull`"),
  (b"\n<!DOCTYPE html><html><body>404</body></html>", "a web page, want the file itself"),
  (b"", "not JSON"), (b"{", "not JSON"), (b'{"a": 1,}', "not JSON"), (b"\xff\xfe\x00", "not JSON"),
  (b"[" * 100_000, "not JSON"), (b"9" * 5000, "not JSON"),
  (b"[1, 2]", "[1, 2], want a JSON object"), (b"null", "None, want a JSON object"),
  (b'{"vocab_size": 1, "vocab_size": 2}', "'vocab_size' is given twice, want it once"),
  (json.dumps(changed(hc_eps=float("nan"))).encode(), "hc_eps=nan, want a number > 0")], ids=lambda v: repr(v)[:24])
def test_files_that_are_no_config(data, want, tmp_path):
  (tmp_path / "config.json").write_bytes(data)
  with pytest.raises(ConfigError) as error: Config.from_dir(tmp_path)
  assert text_of(error).startswith("config.json: ") and want in text_of(error)

def test_folders_without_config(tmp_path):
  for path, want in ((tmp_path / "no", "no such directory"), (tmp_path, "no config.json, want one of config.json"),
                     (Path(__file__), "not a directory")):
    with pytest.raises(ConfigError) as error: Config.from_dir(path)
    assert want in text_of(error)
  (tmp_path / "model.safetensors").write_bytes(b"")
  with pytest.raises(ConfigError, match="1 .safetensors files are there: fetch config.json from the same place"):
    Config.from_dir(tmp_path)

def test_config_json_wins_over_the_inference_folder(tmp_path):
  (tmp_path / "inference").mkdir()
  for name, raw in zip(CONFIG_FILES, (REAL, model_args(preview()), model_args(preview())), strict=True):
    (tmp_path / name).write_text(json.dumps(raw))
  assert Config.from_dir(tmp_path).dspark is not None
  (tmp_path / "config.json").unlink()
  assert Config.from_dir(tmp_path).preview_mtp == 1

def test_config_that_is_a_folder(tmp_path):
  (tmp_path / "config.json").mkdir()
  with pytest.raises(ConfigError, match=r"config\.json: can't be read"): Config.from_dir(tmp_path)

JUNK = st.recursive(
  st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.sampled_from(["", "yarn", "\n"]),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2), max_leaves=4)

@settings(max_examples=200, deadline=None)
@given(data=st.data(), spell=st.sampled_from([dict, model_args, rewritten]))
def test_no_value_escapes_as_another_exception(data, spell):
  raw = spell(deepcopy(REAL))
  for key in data.draw(st.lists(st.sampled_from(sorted(raw)), min_size=1, max_size=2)): raw[key] = data.draw(JUNK)
  try: Config.from_dict(raw)
  except ConfigError as error: assert "\n" not in str(error) and len(str(error)) < 450
