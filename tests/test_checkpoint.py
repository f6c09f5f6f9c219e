"""Checkpoint: a sound folder opens under any spelling of its names, every kind of damage is refused in one line, and
the numpy dequantiser is exact on every code."""
from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_config import LFS, REAL, preview, rewritten

from specgrad.checkpoint import (
  Checkpoint,
  CheckpointError,
  dequantise,
  e8m0_codes,
  expected_tensors,
  load_f32,
  official_name,
)
from specgrad.config import Config, ConfigError
from specgrad.quant.twin import Weight
from specgrad.weights import stream

SIZE = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "F64": 8}
Tensor = tuple[str, list[int], bytes]  # dtype, shape, bytes
Files = dict[str, dict[str, Tensor]]   # file -> name -> tensor
INDEX = "model.safetensors.index.json"

# A reader and a writer of their own: what is under test must not check itself.
def pack(tensors: dict[str, Tensor]) -> bytes:
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  reach = 0
  for name, (dtype, shape, data) in tensors.items():
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [reach, reach := reach + len(data)]}
  return with_header(header, b"".join(data for _, _, data in tensors.values()))

def with_header(header: Any, data: bytes) -> bytes:
  text = json.dumps(header).encode()
  return len(text).to_bytes(8, "little") + text + data

def unpack(path: Path) -> dict[str, Tensor]:
  blob = path.read_bytes()
  base = 8 + int.from_bytes(blob[:8], "little")
  header = json.loads(blob[8:base])
  return {name: (e["dtype"], e["shape"], blob[base + e["data_offsets"][0]:base + e["data_offsets"][1]])
          for name, e in header.items() if name != "__metadata__"}

def write(folder: Path, files: Files, config: dict[str, Any] | None = None) -> Path:
  folder.mkdir(exist_ok=True)
  for file, tensors in files.items(): (folder / file).write_bytes(pack(tensors))
  weight_map = {name: file for file, tensors in files.items() for name in tensors}
  (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
  if config is not None: (folder / "config.json").write_text(json.dumps(config))
  return folder

@pytest.fixture(scope="session")
def ckpt(shared: Path) -> Path: return shared / "golden" / "dspark_w16" / "ckpt"

@pytest.fixture(scope="session")
def config(ckpt: Path) -> dict[str, Any]: return json.loads((ckpt / "config.json").read_text())

@pytest.fixture()
def files(ckpt: Path) -> Files: return {p.name: unpack(p) for p in sorted(ckpt.glob("*.safetensors"))}

@pytest.fixture()
def copy(ckpt: Path, tmp_path: Path) -> Path:
  shutil.copytree(ckpt, folder := tmp_path / "ckpt", copy_function=shutil.copyfile)
  folder.chmod(0o755)
  return folder

def refused(folder: Path | str, *want: str) -> str:
  with pytest.raises(CheckpointError) as error: Checkpoint.open(folder)
  text = str(error.value)
  assert "\n" not in text and len(text) < 500
  for part in want: assert part in text, text
  return text

ONE, TWO, THREE = (f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3))

# -- sound folders ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case, count, total", [("v4_r16", 267, 5_024_798), ("dspark_w16", 313, 5_280_212)])
def test_golden_opens_and_gives_its_bytes(case, count, total, shared):
  folder = shared / "golden" / case / "ckpt"
  c = Checkpoint.open(str(folder))
  assert (len(c.tensors), c.total_bytes, c.notes) == (count, total, [])
  assert set(c.tensors) == set(expected_tensors(c.config))
  for path in folder.glob("*.safetensors"):
    for name, (dtype, shape, data) in unpack(path).items():
      info, got = c.tensors[name], c.read(name)
      assert (info.name, info.dtype, list(info.shape), info.path, info.nbytes) == (name, dtype, shape, path, len(data))
      assert got.tobytes() == data and got.shape == info.shape and got.flags.writeable and got.flags.owndata
      assert path.read_bytes()[info.offset:info.offset + info.nbytes] == data

def test_read_takes_rows_and_storage_types(ckpt):
  c = Checkpoint.open(ckpt)
  types = {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.uint8, "BF16": np.uint16, "F32": np.float32,
           "I64": np.int64}
  for name, info in c.tensors.items(): assert c.read(name, 0, 1).dtype == types[info.dtype]
  name = "layers.0.attn.wq_b.weight"
  whole = c.read(name)
  assert (c.read(name, 3, 77) == whole[3:77]).all() and c.read(name, 500).shape == (12, 128)
  assert c.read(name, 5, 5).shape == (0, 128)
  for wide in ("embed.weight", "mtp.2.hc_head_fn", "layers.0.ffn.gate.tid2eid"):  # 2, 4, 8 bytes an element
    assert (c.read(wide, 1, 3) == c.read(wide)[1:3]).all()
  for rows in ((-1, 2), (3, 2), (0, 513)):
    with pytest.raises(IndexError, match=re.escape(f"{name}: rows {rows[0]}..{rows[1]}, want rows inside 0..512")):
      c.read(name, *rows)
  with pytest.raises(KeyError): c.read("layers.0.attn.wq_z.weight")

def test_weights_load_as_they_were_dequantised_by_others(ckpt):
  """Against ml_dtypes' own conversions of codes and scales."""
  c = Checkpoint.open(ckpt)
  for name, info in c.tensors.items():
    if name.endswith(".scale") or info.dtype == "I64": continue
    raw, got = c.read(name), load_f32(c, name)
    if info.dtype == "BF16": want = raw.view(ml_dtypes.bfloat16).astype(np.float32)
    elif info.dtype == "F32": want = raw
    else:
      scale = c.read(name[:-6] + "scale").view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
      if info.dtype == "I8":
        codes = np.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], -1)
        want = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale.repeat(32, 1)
      else:
        wide = scale.repeat(128, 0).repeat(128, 1)[:raw.shape[0], :raw.shape[1]]
        want = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * wide
    assert got.dtype == np.float32 and (got.view(np.uint32) == want.view(np.uint32)).all(), name

def test_fingerprint_is_of_formats_and_config(ckpt, copy, config):
  print_of = Checkpoint.open(ckpt).fingerprint
  assert Checkpoint.open(copy).fingerprint == print_of
  (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 20000}))
  assert Checkpoint.open(copy).fingerprint != print_of

def test_a_given_config_needs_no_config_file(copy, ckpt):
  (copy / "config.json").unlink()
  (copy / "inference_config.json").unlink()
  refused(copy, "no config.json, want one of", "3 .safetensors files are there: fetch config.json from the same place")
  assert len(Checkpoint.open(copy, Config.from_dir(ckpt)).tensors) == 313

def test_single_file(files, config, tmp_path):
  whole = {name: t for tensors in files.values() for name, t in tensors.items()}
  (tmp_path / "config.json").write_text(json.dumps(config))
  (tmp_path / "model.safetensors").write_bytes(pack(whole))
  c = Checkpoint.open(tmp_path)
  assert len(c.tensors) == 313 and c.read("mtp.2.norm.weight").tobytes() == whole["mtp.2.norm.weight"][2]

def test_read_only_folder_as_another_user(ckpt):
  folder = Path(tempfile.mkdtemp())
  try:
    for p in ckpt.iterdir(): shutil.copyfile(p, folder / p.name)
    for p in folder.iterdir(): p.chmod(0o444)
    folder.chmod(0o555)
    me = os.geteuid()
    if me == 0: os.seteuid(65534)  # root may write anywhere; nobody may not
    try:
      with pytest.raises(PermissionError): os.open(folder / ONE, os.O_RDWR)
      assert load_f32(Checkpoint.open(folder), "embed.weight").shape == (256, 256)
    finally:
      if me == 0: os.seteuid(0)
  finally:
    folder.chmod(0o755)
    shutil.rmtree(folder)

def test_files_the_index_does_not_name_are_left_alone(copy):
  (copy / "extra.safetensors").write_bytes(b"no such format")
  assert Checkpoint.open(copy).notes == ["extra.safetensors: not named in the index, not read"]

# -- the real model --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def real_names(shared: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
  """name -> dtype, shape of 0731, from the published headers; N stands for a run of layers there."""
  kinds: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
  text = (shared / "golden" / "tensor_names.txt").read_text().split("## DeepSeek-V4-Flash (preview")[0]
  for line in text.splitlines():
    if line.startswith("#") or not line: continue
    name, dtype, shape = line.split("\t")
    layer, rest = (m[1], m[2]) if (m := re.match(r"((?:layers|mtp)\.\d+)\.(.*)", name)) else ("", name)
    kinds.setdefault(layer, {})[rest] = dtype, tuple(json.loads(shape))
  same = {1: 0} | dict.fromkeys(range(3, 43, 2), 3) | dict.fromkeys(range(4, 43, 2), 4)
  found = dict(kinds[""])
  for layer in [f"layers.{i}" for i in range(43)] + [f"mtp.{i}" for i in range(3)]:
    group, number = layer.split(".")
    source = f"layers.{same.get(int(number), int(number))}" if group == "layers" else layer
    for rest, entry in kinds[source].items():
      for i in range(256) if "{0..255}" in rest else [0]: found[f"{layer}.{rest.replace('{0..255}', str(i))}"] = entry
  return found

def test_expected_tensors_of_the_real_model(real_names):
  expected = expected_tensors(Config.from_dict(REAL))
  assert len(expected) == len(real_names) == 72_317
  assert {name: (e.dtypes[0], e.shape) for name, e in expected.items()} == real_names
  assert sum(prod(e.shape) * SIZE[e.dtypes[0]] for e in expected.values()) == 166_878_536_440
  target = {n: e for n, e in expected.items() if not n.startswith("mtp.")}
  assert sum(prod(e.shape) * SIZE[e.dtypes[0]] for e in target.values()) == 156_015_698_140
  assert len(expected) - len(target) == 4705
  assert expected["layers.7.ffn.experts.3.w2.scale"].role == "ffn.experts.w2.scale"
  assert {e.role for n, e in expected.items() if "experts." in n and ".ffn.e" in n} == {
    f"ffn.experts.{w}.{kind}" for w in ("w1", "w2", "w3") for kind in ("weight", "scale")}

def test_opening_the_real_layout_takes_seconds_and_no_memory(real_names, tmp_path):
  """48 files of the real sizes, all holes: nothing but headers may be touched."""
  groups: dict[str, list[str]] = {}
  for name in real_names:
    parts = name.split(".")
    group = ".".join(parts[:2]) if parts[0] in ("layers", "mtp") else "embed" if parts[0] == "embed" else "head"
    groups.setdefault(group, []).append(name)
  weight_map = {}
  for i, names in enumerate(groups.values(), 1):
    header, reach, file = {}, 0, f"model-{i:05}-of-{len(groups):05}.safetensors"
    for name in names:
      dtype, shape = real_names[name]
      size = prod(shape) * SIZE[dtype]
      header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [reach, reach := reach + size]}
    with open(tmp_path / file, "wb") as f:
      f.write(with_header(header, b""))
      f.truncate(f.tell() + reach)
    weight_map |= dict.fromkeys(names, file)
  (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 166_878_536_440}, "weight_map": weight_map}))
  (tmp_path / "config.json").write_text(json.dumps(REAL))
  began = time.process_time()
  c = Checkpoint.open(tmp_path)
  assert time.process_time() - began < 5  # about 1 s
  assert (len(groups), len(c.tensors), c.total_bytes) == (48, 72_317, 166_878_536_440)

# -- names -----------------------------------------------------------------------------------------------------------

TO_HF = [(r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."), (r"^norm\.", "model.norm."),
  (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"), (r"^(layers|mtp)\.", r"model.\1."),
  (r"(\d)\.attn_norm\.", r"\1.input_layernorm."), (r"(\d)\.ffn_norm\.", r"\1.post_attention_layernorm."),
  (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
  (r"(\d)\.attn\.", r"\1.self_attn."), (r"(\d)\.ffn\.", r"\1.mlp."),
  (r"\.attn_sink$", ".sinks"), (r"\.indexer\.compressor\.", ".indexer."),
  (r"self_attn\.indexer\.", "self_attn.compressor.indexer."), (r"(compressor|indexer)\.norm\.", r"\1.kv_norm."),
  (r"\.ape$", ".position_bias"), (r"\.wq_a\.", ".q_a_proj."), (r"\.wq_b\.", ".q_b_proj."), (r"\.wkv\.", ".kv_proj."),
  (r"\.wgate\.", ".gate_proj."), (r"\.wo_a\.", ".o_a_proj."), (r"\.wo_b\.", ".o_b_proj."),
  (r"\.q_norm\.", ".q_a_norm."), (r"gate\.bias$", "gate.e_score_correction_bias"), (r"\.w1\.", ".gate_proj."),
  (r"\.w2\.", ".down_proj."), (r"\.w3\.", ".up_proj."), (r"(_proj|main_proj)\.scale$", r"\1.weight_scale_inv")]

def hf_name(name: str) -> str:
  """The official name as transformers' conversion mapping turns it around, rule after rule."""
  for pattern, to in TO_HF: name = re.sub(pattern, to, name)
  return name

def test_hf_names_of_one_layer():
  assert hf_name("layers.3.attn.indexer.compressor.wkv.weight") == (
    "model.layers.3.self_attn.compressor.indexer.kv_proj.weight")
  assert hf_name("layers.3.attn.wq_a.scale") == "model.layers.3.self_attn.q_a_proj.weight_scale_inv"
  assert hf_name("layers.3.hc_attn_scale") == "model.layers.3.attn_hc.scale"

def test_every_name_comes_back(real_names):
  for name in real_names:
    if ".experts." in name and ".experts.17." not in name: continue  # one stands for 256
    assert official_name(name) == name == official_name(hf_name(name)), name
  assert official_name("model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight") == (
    "layers.2.attn.indexer.weights_proj.weight")

def same_bytes(a: Checkpoint, b: Checkpoint) -> None:
  assert set(a.tensors) == set(b.tensors) and a.total_bytes == b.total_bytes and a.fingerprint == b.fingerprint
  for name in a.tensors: assert a.read(name).tobytes() == b.read(name).tobytes(), name

def stacked(files: Files, scale: str) -> Files:
  """Experts as transformers keeps them: gate_up_proj [E, 2I, K] and down_proj [E, D, I]."""
  out: Files = {}
  for file, tensors in files.items():
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    out[file] = {}
    for name, t in tensors.items():
      if m := re.match(r"(.*)\.ffn\.experts\.(\d+)\.(w\d)\.(weight|scale)", name):
        experts.setdefault(f"model.{m[1]}.mlp.experts.@{m[4]}", {}).setdefault(int(m[2]), {})[m[3]] = t
      else: out[file][hf_name(name)] = t
    for key, rows in experts.items():
      where, kind = key.split("@")
      for new, parts in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        dtype, (n, k), _ = rows[0][parts[0]]
        data = b"".join(rows[e][part][2] for e in sorted(rows) for part in parts)
        out[file][where + new + (scale if kind == "scale" else "")] = dtype, [len(rows), n * len(parts), k], data
  return out

@pytest.mark.parametrize("form", ["one by one", "_scale_inv", ".weight_scale_inv"])
def test_transformers_names_load_the_same_bytes(form, ckpt, files, config, tmp_path):
  renamed = {f: {hf_name(n): t for n, t in tensors.items()} for f, tensors in files.items()}
  c = Checkpoint.open(write(tmp_path / "hf", renamed if form == "one by one" else stacked(files, form), config))
  same_bytes(Checkpoint.open(ckpt), c)
  assert len({t.path for t in c.tensors.values()}) == 3

def test_transformers_names_with_transformers_config(shared, tmp_path):
  folder = shared / "golden" / "v4_r16" / "ckpt"
  raw = json.loads((folder / "config.json").read_text())
  kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 16: "heavily_compressed_attention"}
  new = {k: v for k, v in raw.items() if k not in ("compress_ratios", "num_hash_layers")} | {
    "layer_types": [kinds[r] for r in raw["compress_ratios"]], "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 2,
    "compress_rates": {kinds[4]: 4, kinds[16]: 16}}
  files = {p.name: unpack(p) for p in sorted(folder.glob("*.safetensors"))}
  same_bytes(Checkpoint.open(folder), Checkpoint.open(write(tmp_path / "hf", stacked(files, "_scale_inv"), new)))
  assert rewritten(REAL)["layer_types"][2] == kinds[4]

def test_stacked_experts_must_match_the_count(files, config, tmp_path):
  odd = stacked(files, "_scale_inv")
  name = "model.layers.0.mlp.experts.gate_up_proj"
  dtype, (e, n, k), data = odd[ONE][name]
  odd[ONE][name] = dtype, [e * n, 1, k], data
  refused(write(tmp_path / "hf", odd, config), f"{ONE}: {name}: shape=[{e * n}, 1, {k}], want 3 experts x rows")

def test_two_spellings_of_one_tensor(files, config, tmp_path):
  files[TWO]["model.embed_tokens.weight"] = files[ONE]["embed.weight"]
  refused(write(tmp_path / "x", files, config),
          f"{TWO}: model.embed_tokens.weight: is embed.weight, which {ONE} holds too")

# -- the preview -----------------------------------------------------------------------------------------------------

def as_preview(files: Files, config: dict[str, Any]) -> tuple[Files, dict[str, Any]]:
  """mtp.0 becomes a classic MTP block, the other stages go."""
  square, vector = ("F8_E4M3", [256, 256], bytes(65536)), ("BF16", [256], bytes(512))
  kept = {n: t for n, t in files[THREE].items() if not n.startswith(("mtp.1.", "mtp.2.", "mtp.0.main"))}
  extra: dict[str, Tensor] = {f"mtp.0.{p}.weight": square for p in ("e_proj", "h_proj")}
  extra |= {f"mtp.0.{p}.scale": ("F8_E8M0", [2, 2], bytes(4)) for p in ("e_proj", "h_proj")}
  extra |= {f"mtp.0.{p}.weight": vector for p in ("enorm", "hnorm", "norm")}
  extra |= {f"mtp.0.{p}": files[THREE][p] for p in ("hc_head_fn", "hc_head_base", "hc_head_scale")}
  raw = {k: v for k, v in config.items() if not k.startswith("dspark")}
  return {**files, THREE: kept | extra}, raw | {"compress_ratios": config["compress_ratios"][:4]}

def test_preview_skips_its_mtp_block_with_a_note(files, config, tmp_path, ckpt):
  c = Checkpoint.open(write(tmp_path / "preview", *as_preview(files, config)))
  assert c.config.preview_mtp == 1 and not any(n.startswith("mtp.") for n in c.tensors)
  assert len(c.notes) == 1 and re.fullmatch(r"mtp\.0 of the preview is skipped: \d+ tensors, \d+ bytes", c.notes[0])
  full = Checkpoint.open(ckpt)
  assert set(c.tensors) == {n for n in full.tensors if not n.startswith("mtp.")}
  assert len(expected_tensors(Config.from_dict(preview()))) == 72_317 - 4_705

def test_draft_files_without_draft_config(files, config, tmp_path):
  raw = {k: v for k, v in config.items() if not k.startswith("dspark")} | {"compress_ratios": [0, 4, 16]}
  refused(write(tmp_path / "x", files, raw), THREE, "mtp.0.", "unknown tensor", "config.json describes no draft")

def test_draft_config_without_draft_files(files, config, tmp_path):
  files[THREE] = {n: t for n, t in files[THREE].items() if not n.startswith("mtp.")}
  refused(write(tmp_path / "x", files, config), "mtp.0.", "missing in all files", "config.json promises a DSpark draft")

# -- formats come from the headers -----------------------------------------------------------------------------------

EXPERT, DENSE = "layers.1.ffn.experts.2.w1", "layers.1.attn.wo_b"

def stored_as(c: Checkpoint, name: str, dtype: str) -> dict[str, Tensor]:
  """The weight in another format, with the scale that format needs. Values change where the format is coarser."""
  value = load_f32(c, f"{name}.weight")
  rows, columns = value.shape
  if dtype == "F8_E4M3":
    scale = np.full((-(-rows // 128), -(-columns // 128)), 120, np.uint8)
    raw = (value * 2.0**7).astype(ml_dtypes.float8_e4m3fn)
    return {f"{name}.weight": (dtype, [rows, columns], raw.tobytes()),
            f"{name}.scale": ("F8_E8M0", list(scale.shape), scale.tobytes())}
  raw = value.astype({"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype])
  return {f"{name}.weight": (dtype, [rows, columns], raw.tobytes())}

@pytest.mark.parametrize("name", [EXPERT, DENSE])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F16", "F32"])
def test_each_weight_may_have_its_own_format(name, dtype, ckpt, files, config, tmp_path):
  """config.json still says fp8 and fp4."""
  c = Checkpoint.open(ckpt)
  before = load_f32(c, f"{name}.weight")
  for part in ("weight", "scale"): del files[ONE][f"{name}.{part}"]
  files[ONE] |= stored_as(c, name, dtype)
  changed = Checkpoint.open(write(tmp_path / "x", files, config))
  assert changed.tensors[f"{name}.weight"].dtype == dtype and changed.fingerprint != c.fingerprint or dtype == "F8_E4M3"
  assert (changed.scale_name(f"{name}.weight") is None) == (dtype != "F8_E4M3")
  after = load_f32(changed, f"{name}.weight")
  if dtype != "F8_E4M3": assert (after == before).all()  # every e4m3 and e2m1 value with its scale is exact in these
  else: np.testing.assert_allclose(after, before, rtol=1 / 16, atol=2.0**-16)

@pytest.mark.parametrize("name, dtype, alike", [
  ("layers.1.ffn.experts.2.w2", "BF16", "layers.1.ffn.experts."),
  ("layers.1.ffn.shared_experts.w2", "BF16", "layers.1.ffn.shared_experts."),
  ("mtp.2.markov_head.markov_w2", "F32", "mtp.2.markov_head.")], ids=["routed", "shared", "markov"])
def test_what_one_operation_takes_is_held_alike(name, dtype, alike, ckpt, files, config, tmp_path):
  """Of a mixture of formats all becomes float32, and nothing else does."""
  c = Checkpoint.open(ckpt)
  want, file = load_f32(c, f"{name}.weight"), ONE if name.startswith("layers") else THREE
  for part in ("weight", "scale"): files[file].pop(f"{name}.{part}", None)
  files[file] |= stored_as(c, name, dtype)
  changed = Checkpoint.open(write(tmp_path / "x", files, config))
  was, now = (dict(stream(x, "CPU", prefix=(name[:8],), packed=True)) for x in (c, changed))
  kinds = {held: ("F32" if held.startswith(alike) else w.kind, now[held].kind) for held, w in was.items() if isinstance(w, Weight)}
  assert all(wanted == found for wanted, found in kinds.values()), kinds
  found = now[alike + name.rpartition(".")[2] + ".weight"].data.numpy()
  assert ((found[2] if found.ndim == 3 else found) == want).all()

@pytest.mark.parametrize("dtype", ["U8", "F32"])
def test_scales_may_be_bytes_or_powers_of_two(dtype, ckpt, files, config, tmp_path):
  for tensors in files.values():
    for name, (was, shape, data) in tensors.items():
      if was != "F8_E8M0": continue
      wide = np.frombuffer(data, ml_dtypes.float8_e8m0fnu).astype(np.float32).tobytes()
      tensors[name] = dtype, shape, data if dtype == "U8" else wide
      if dtype == "U8" and ".experts." in name: tensors[weight] = "U8", *tensors[weight := name[:-5] + "weight"][1:]
  c, other = Checkpoint.open(ckpt), Checkpoint.open(write(tmp_path / "x", files, config))
  for name in (f"{EXPERT}.weight", f"{DENSE}.weight"): assert (load_f32(c, name) == load_f32(other, name)).all()

# -- damage: tensors -------------------------------------------------------------------------------------------------

def drop(file: str, *names: str) -> Callable[[Files], None]:
  def change(files: Files) -> None:
    for name in names: del files[file][name]
  return change

def put(file: str, name: str, dtype: str, shape: list[int]) -> Callable[[Files], None]:
  def change(files: Files) -> None: files[file][name] = dtype, shape, bytes(prod(shape) * SIZE[dtype])
  return change

@pytest.mark.parametrize("change, want", [
  (drop(ONE, "layers.0.attn.q_norm.weight"), ["layers.0.attn.q_norm.weight: missing in all files, want BF16 [128]"]),
  (drop(ONE, "layers.0.attn.q_norm.weight", "embed.weight"),
   ["embed.weight: missing in all files", "(1 more are missing)"]),
  (drop(ONE, f"{DENSE}.scale"),
   [f"{ONE}: {DENSE}.scale: missing, want F8_E8M0 [2, 1] for the F8_E4M3 weight {DENSE}.weight"]),
  (drop(ONE, f"{EXPERT}.scale"), [f"{EXPERT}.scale: missing, want F8_E8M0 [128, 8] for the I8 weight {EXPERT}.weight"]),
  (put(ONE, "layers.0.attn.bias", "F32", [4]), [f"{ONE}: layers.0.attn.bias: unknown tensor"]),
  (put(ONE, "layers.3.attn_norm.weight", "BF16", [256]), ["layers.3.attn_norm.weight: unknown tensor"]),
  (put(ONE, "layers.1.ffn.experts.3.w1.weight", "I8", [128, 128]), ["ffn.experts.3.w1.weight: unknown tensor"]),
  (put(ONE, "embed.weight", "F16", [256, 256]), [f"{ONE}: embed.weight: dtype=F16, want BF16 or F32"]),
  (put(ONE, "embed.weight", "F64", [256, 256]), ["embed.weight: dtype=F64, want BF16 or F32"]),
  (put(ONE, "embed.weight", "BF16", [256, 255]), ["embed.weight: shape=[256, 255], want [256, 256] for BF16"]),
  (put(ONE, "layers.0.attn.attn_sink", "F32", [2, 2]), ["attn_sink: shape=[2, 2], want [4] for F32"]),
  (put(ONE, "layers.0.ffn.gate.tid2eid", "F32", [256, 2]), ["tid2eid: dtype=F32, want I64 or I32"]),
  (put(ONE, "layers.0.ffn.gate.tid2eid", "I64", [2, 256]), ["tid2eid: shape=[2, 256], want [256, 2] for I64"]),
  (put(ONE, f"{DENSE}.weight", "I8", [256, 64]), [f"{DENSE}.weight: dtype=I8, want F8_E4M3 or BF16 or F16 or F32"]),
  (put(ONE, f"{DENSE}.weight", "BF16", [256, 128]),
   [f"{ONE}: {DENSE}.scale: found F8_E8M0 [2, 1], want no scale for the BF16 weight {DENSE}.weight"]),
  (put(ONE, f"{DENSE}.scale", "F8_E8M0", [1, 2]), [f"{DENSE}.scale: shape=[1, 2], want [2, 1] for F8_E4M3 [256, 128]"]),
  (put(ONE, f"{DENSE}.scale", "BF16", [2, 1]), [f"{DENSE}.scale: dtype=BF16, want F8_E8M0 or U8 or F32"]),
  (put(ONE, f"{EXPERT}.weight", "I8", [128, 256]), [f"{EXPERT}.weight: shape=[128, 256], want [128, 128] for I8"]),
  (put(ONE, f"{EXPERT}.weight", "BF16", [128, 128]), [f"{EXPERT}.weight: shape=[128, 128], want [128, 256] for BF16"]),
  (put(ONE, f"{EXPERT}.weight", "F8_E4M3", [128, 256]), [f"{EXPERT}.scale: shape=[128, 8], want [1, 2] for F8_E4M3"]),
  (put(ONE, f"{EXPERT}.scale", "F8_E8M0", [128, 16]), [f"{EXPERT}.scale: shape=[128, 16], want [128, 8] for I8"]),
], ids=lambda v: v[0][:60] if isinstance(v, list) else "")
def test_wrong_tensors(change, want, files, config, tmp_path):
  change(files)
  refused(write(tmp_path / "x", files, config), *want)

# -- damage: files ---------------------------------------------------------------------------------------------------

def header_size(path: Path) -> int: return 8 + int.from_bytes(path.read_bytes()[:8], "little")

@pytest.mark.parametrize("keep", ["-1", "-1000000", "header", "header-1", "9", "8", "7", "0"])
def test_cut_shard(keep, copy):
  size, head = (copy / TWO).stat().st_size, header_size(copy / TWO)
  full = {"-1": size - 1, "-1000000": max(head, size - 1_000_000), "header": head, "header-1": head - 1}
  left = full.get(keep, -1) if keep in full else int(keep)
  os.truncate(copy / TWO, left)
  if left >= head: refused(copy, f"{TWO}: cut short: {left} bytes, want {size} ({size - left} missing). Download")
  elif left >= 8: refused(copy, f"{TWO}: cut short inside the header: {left} bytes, want more than {head}")
  else: refused(copy, f"{TWO}: {left} bytes, want a safetensors file")

def test_a_cut_of_a_megabyte(copy):
  size = (copy / ONE).stat().st_size
  os.truncate(copy / ONE, size - 1_000_000)
  refused(copy, f"{ONE}: cut short: {size - 1_000_000} bytes, want {size} (1000000 missing)")

@pytest.mark.parametrize("extra", [1, 8, 4096])
def test_trailing_bytes(extra, copy):
  size = (copy / ONE).stat().st_size
  with open(copy / ONE, "ab") as f: f.write(bytes(extra))
  refused(copy, f"{ONE}: {extra} bytes too many: {size + extra}, want {size}")

@pytest.mark.parametrize("data, want", [
  (LFS, "a Git LFS pointer, want the file itself. Run `git lfs pull`"),
  (b"<!DOCTYPE html>\n<html><head><title>Sign in</title>", "a web page, want the file itself"),
  (b"  \n<html>", "a web page"), (b"Entry not found", "want at most 100000000. This is no safetensors file"),
  (bytes(4096), "the header is not JSON"), (with_header([1], b""), "header [1], want a JSON object"),
  ((5).to_bytes(8, "little") + b"{{{{{", "the header is not JSON"),
  ((1 << 40).to_bytes(8, "little") + b"{}", f"header of {1 << 40} bytes, want at most 100000000")],
  ids=lambda v: repr(v)[:20])
def test_not_safetensors_at_all(data, want, copy):
  (copy / TWO).write_bytes(data)
  refused(copy, f"{TWO}: ", want)

def entry(**keys: Any) -> dict[str, Any]: return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | keys

@pytest.mark.parametrize("header, want", [
  ({"a": entry(dtype="Q4")}, "a: dtype='Q4', want one of BOOL, U8"),
  ({"a": entry(dtype=[])}, "a: dtype=[], want one of"),
  ({"a": entry(shape=[3])}, "a: data_offsets [0, 8] hold 8 bytes, want 12 for F32 [3]"),
  ({"a": entry(shape=[1])}, "a: data_offsets [0, 8] hold 8 bytes, want 4 for F32 [1]"),
  ({"a": entry(data_offsets=[8, 0])}, "a: data_offsets [8, 0] hold -8 bytes, want 8"),
  ({"a": entry(shape=[-2])}, "a: -2 in shape [-2]"), ({"a": entry(shape=[True, 2])}, "a: True in shape"),
  ({"a": entry(shape="ab")}, "a: 'a' in shape"),
  ({"a": entry(data_offsets=[0.0, 8])}, "a: 0.0 in shape [2] or offsets"),
  ({"a": entry(data_offsets=[0])}, "a: header entry"), ({"a": {"dtype": "F32"}}, "a: header entry"),
  ({"a": 5}, "a: header entry 5, want dtype, shape and data_offsets"),
  ({"a": entry(), "b": entry(data_offsets=[4, 12])}, "b: starts at byte 4 of the data, want 8: the header's offsets o"),
  ({"a": entry(), "b": entry()}, "b: starts at byte 0 of the data, want 8: the header's offsets overlap"),
  ({"a": entry(), "b": entry(data_offsets=[12, 20])}, "b: starts at byte 12 of the data, want 8: the header's offsets"),
  ({"a": entry(data_offsets=[4, 12])}, "a: starts at byte 4 of the data, want 0"),
  ({"a\nb": entry()}, "'a\\nb': control characters in a name"),
  ({"a": entry(data_offsets=[0, 2**62], shape=[2**60])}, "cut short")], ids=lambda v: str(v)[:50])
def test_lying_headers(header, want, copy):
  (copy / TWO).write_bytes(with_header(header, bytes(16)))
  refused(copy, f"{TWO}: {want}")

@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255) | st.sampled_from(b'0123456789[]{},":-')),
                     min_size=1, max_size=3), index=st.booleans())
def test_no_flipped_byte_escapes_as_another_exception(hits, index, copy, ckpt):
  file = INDEX if index else THREE
  data = bytearray((ckpt / file).read_bytes())
  for place, byte in hits: data[place % (len(data) if index else header_size(ckpt / file))] = byte
  (copy / file).write_bytes(data)
  try: Checkpoint.open(copy)
  except CheckpointError as error: assert "\n" not in str(error)
  finally: shutil.copyfile(ckpt / file, copy / file)

def test_a_name_twice_in_one_header(copy):
  text = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": {"dtype": "F32"}}'
  (copy / TWO).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
  refused(copy, f"{TWO}: 'a' is given twice")

def test_missing_shards(copy):
  (copy / TWO).unlink()
  refused(copy, f"{TWO}: missing, want all 3 files that {INDEX} names. Is the download complete?")
  (copy / ONE).unlink()
  refused(copy, f"{ONE}: missing", f"also missing: {TWO}")

def test_shard_that_is_a_folder(copy):
  (copy / TWO).unlink()
  (copy / TWO).mkdir()
  refused(copy, f"{TWO}: can't be read")

# -- damage: the folder and its index --------------------------------------------------------------------------------

def test_no_folder(tmp_path):
  refused(tmp_path / "no", "no such directory, want the folder of a checkpoint")
  refused(__file__, "not a directory")
  refused(tmp_path, "no config.json, want one of config.json", "Is this the folder of a checkpoint?")

def test_folder_with_config_only(copy):
  for path in copy.glob("*.safetensors"): path.unlink()
  (copy / INDEX).unlink()
  assert refused(copy).endswith(f"no {INDEX} and no model.safetensors, want one of them")

def test_folder_without_index(copy):
  (copy / INDEX).unlink()
  refused(copy, f"no {INDEX} and no model.safetensors", "3 shards are there without their index")

def test_bad_config_stays_a_config_error(copy, config):
  (copy / "config.json").write_text(json.dumps(config | {"o_groups": 3}))
  with pytest.raises(ConfigError, match="o_groups=3, want a divisor of 4 heads"): Checkpoint.open(copy)

@pytest.mark.parametrize("text, want", [
  ("{", "not JSON"), ("[]", "[], want a JSON object"),
  ("{}", "weight_map=None, want an object of tensor names and files"),
  ('{"weight_map": {}}', "weight_map={}, want an object"), ('{"weight_map": ["a"]}', "weight_map=['a'], want an obj"),
  ('{"weight_map": {"a\\nb": "x.safetensors"}}', "'a\\nb': control characters in a name"),
  ('{"weight_map": {"a": 5}}', "a: file 5, want a .safetensors file of this folder"),
  ('{"weight_map": {"a": "../x.safetensors"}}', "a: file '../x.safetensors', want a .safetensors file of"),
  ('{"weight_map": {"a": "x.bin"}}', "a: file 'x.bin', want a .safetensors file"),
  ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' is given twice"),
  (LFS.decode(), "a Git LFS pointer"), ("<!doctype html>", "a web page")], ids=lambda v: v[:40])
def test_bad_index(text, want, copy):
  (copy / INDEX).write_text(text)
  refused(copy, f"{INDEX}: {want}")

def edit_index(folder: Path, **changes: str | None) -> None:
  raw = json.loads((folder / INDEX).read_text())
  for name, file in changes.items():
    if file is None: del raw["weight_map"][name]
    else: raw["weight_map"][name] = file
  (folder / INDEX).write_text(json.dumps(raw))

def test_index_and_shards_must_agree(copy, files):
  edit_index(copy, **{"embed.weight": TWO})
  refused(copy, f"{ONE}: embed.weight: found here, but {INDEX} says {TWO}")
  edit_index(copy, **{"embed.weight": ONE, "layers.9.ghost": TWO, "layers.9.other": TWO})
  refused(copy, f"{TWO}: layers.9.ghost: not in the file, though {INDEX} says so (1 more like it)")
  edit_index(copy, **{"layers.9.ghost": None, "layers.9.other": None, "embed.weight": None})
  refused(copy, f"{ONE}: embed.weight: not in {INDEX}")

@pytest.mark.parametrize("listed", [ONE, TWO])
def test_tensor_in_two_shards(listed, copy, files):
  files[TWO]["embed.weight"] = files[ONE]["embed.weight"]
  (copy / TWO).write_bytes(pack(files[TWO]))
  edit_index(copy, **{"embed.weight": listed})
  refused(copy, "embed.weight: also in ", ", want it once")

def test_file_cut_after_opening(copy):
  c = Checkpoint.open(copy)
  os.truncate(copy / THREE, header_size(copy / THREE))
  with pytest.raises(CheckpointError, match=r"norm\.weight: 512 bytes are missing, the file was cut since"):
    c.read("norm.weight")
  (copy / THREE).unlink()
  with pytest.raises(CheckpointError, match=r"norm\.weight: can't be read \(No such file"): c.read("norm.weight")

def test_opening_a_damaged_copy_reads_no_weights(copy, monkeypatch):
  monkeypatch.setattr(np, "empty", None)
  monkeypatch.setattr(np, "fromfile", None)
  assert Checkpoint.open(copy).total_bytes == 5_280_212

# -- values ----------------------------------------------------------------------------------------------------------

def bits(a: np.ndarray) -> np.ndarray: return np.asarray(a, np.float32).view(np.uint32)

@pytest.mark.parametrize("scale", [0, 1, 64, 126, 127, 128, 200, 245])
def test_every_e4m3_code(scale):
  raw = np.arange(256, dtype=np.uint8).reshape(2, 128)
  got = dequantise(raw, "F8_E4M3", np.array([[scale]], np.uint8))
  want = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0**(scale - 127)
  real = ~np.isnan(want)
  assert real.sum() == 254 and (bits(got)[real] == bits(want)[real]).all() and np.isnan(got[~real]).all()

@pytest.mark.parametrize("scale", [0, 1, 64, 126, 127, 128, 200, 252])
@pytest.mark.parametrize("dtype", ["I8", "U8"])
def test_every_packed_byte(scale, dtype):
  raw = np.arange(256, dtype=np.uint8).reshape(1, 256)
  got = dequantise(raw, dtype, np.full((1, 16), scale, np.uint8))
  value = [0, .5, 1, 1.5, 2, 3, 4, 6]
  for byte in range(256):  # by hand: low nibble is the even column, bit 3 the sign
    for column, code in ((2 * byte, byte & 15), (2 * byte + 1, byte >> 4)):
      want = np.float32((-1.0 if code > 7 else 1.0) * value[code & 7] * 2.0**(scale - 127))
      assert bits(got[0, column]) == bits(want)

def test_every_scale_byte_and_where_it_applies():
  codes = np.arange(255, dtype=np.uint8)
  got = dequantise(np.full((255, 16), 0x22, np.uint8), "I8", codes[:, None])  # nibble 2 is 1.0
  want = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
  assert (bits(got) == bits(want)[:, None]).all()
  got = dequantise(np.full((255 * 128, 1), 0x38, np.uint8), "F8_E4M3", codes[:, None])  # 0x38 is 1.0
  assert (bits(got.reshape(255, 128)) == bits(want)[:, None]).all()

@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_ragged_tiles(rows, columns, seed):
  rng = np.random.default_rng(seed)
  raw = rng.integers(0, 127, (rows, columns), np.uint8)
  scale = rng.integers(110, 140, (-(-rows // 128), -(-columns // 128)), np.uint8)
  got = dequantise(raw, "F8_E4M3", scale)
  r, c = np.arange(rows)[:, None] // 128, np.arange(columns)[None] // 128
  want = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0**(scale[r, c].astype(float) - 127)
  assert got.shape == (rows, columns) and (got == want).all()

@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), groups=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_packed_groups(rows, groups, seed):
  rng = np.random.default_rng(seed)
  raw, scale = rng.integers(0, 256, (rows, groups * 16), np.uint8), rng.integers(100, 140, (rows, groups), np.uint8)
  got = dequantise(raw, "I8", scale)
  codes = np.empty((rows, groups * 32), np.uint8)
  codes[:, 0::2], codes[:, 1::2] = raw & 15, raw >> 4
  want = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * 2.0**(scale.repeat(32, 1).astype(float) - 127)
  assert (got == want).all()

def test_bf16_f16_f32():
  raw = np.arange(65536, dtype=np.uint16).reshape(256, 256)
  got, want = dequantise(raw, "BF16"), raw.view(ml_dtypes.bfloat16).astype(np.float32)
  assert (bits(got) == bits(want))[~np.isnan(want)].all() and np.isnan(got[np.isnan(want)]).all()
  half = raw.view(np.float16)
  assert np.array_equal(dequantise(half, "F16"), half.astype(np.float32), equal_nan=True)
  whole = np.array([1.5, -0.0], np.float32)
  copy = dequantise(whole, "F32")
  assert copy is not whole and not np.shares_memory(copy, whole) and (bits(copy) == bits(whole)).all()

def test_power_of_two_scales_as_floats():
  codes = np.arange(255, dtype=np.uint8)
  assert (e8m0_codes(codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), "F32") == codes).all()
  for bad in (0.0, -1.0, 3.0, np.nan, np.inf, 2.0**-128):
    with pytest.raises(CheckpointError, match="w.scale: 1 values that are no power of two, want e8m0 scales"):
      e8m0_codes(np.array([1.0, bad], np.float32), "F32", "w.scale")

@pytest.mark.parametrize("args, want", [
  ((np.zeros((2, 16), np.uint8), "I8", np.array([[1], [255]], np.uint8)), "w: 1 of 2 scales are NaN (byte 255)"),
  ((np.zeros((2, 16), np.uint8), "F8_E4M3", np.array([[255]], np.uint8)), "w: 1 of 1 scales are NaN (byte 255)"),
  ((np.zeros((2, 16), np.uint8), "I8"), "w: I8 without a scale, want one of [2, 1]"),
  ((np.zeros((2, 16), np.uint8), "F8_E4M3"), "w: F8_E4M3 without a scale, want one of [1, 1]"),
  ((np.zeros((2, 16), np.uint8), "I8", np.zeros((1, 2), np.uint8)), "w: scale of [1, 2], want [2, 1] for I8 [2, 16]"),
  ((np.zeros((2, 20), np.uint8), "I8", np.zeros((2, 1), np.uint8)), "w: scale of [2, 1], want [2, 1] for I8 [2, 20]"),
  ((np.zeros((2, 16), np.uint16), "BF16", np.zeros((1, 1), np.uint8)), "w: BF16 with a scale, want none"),
  ((np.zeros((2, 16), np.int64), "I64"), "w: dtype=I64, want one of I8, U8, F8_E4M3"),
  ((np.zeros(16, np.uint8), "I8", np.zeros(1, np.uint8)), "w: shape=[16], want a matrix")], ids=lambda v: str(v)[-40:])
def test_dequantise_refuses(args, want):
  with pytest.raises(CheckpointError, match=re.escape(want)): dequantise(*args, name="w")

def test_a_nan_scale_is_named_when_it_is_read(files, config, tmp_path):
  dtype, shape, data = files[ONE][f"{DENSE}.scale"]
  files[ONE][f"{DENSE}.scale"] = dtype, shape, b"\xff" + data[1:]
  c = Checkpoint.open(write(tmp_path / "x", files, config))
  with pytest.raises(CheckpointError, match=re.escape(f"{DENSE}.weight: 1 of 2 scales are NaN")):
    load_f32(c, f"{DENSE}.weight")

# -- scripts/make_checkpoint.py --------------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def script() -> dict[str, Any]:
  return runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "make_checkpoint.py"))

def test_made_checkpoint_opens_and_repeats(script, tmp_path, capsys):
  for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
    assert script["main"]([str(tmp_path / name), "--size", "tiny", "--seed", seed]) == 0
  said = json.loads(capsys.readouterr().out.splitlines()[-1])
  a, b, c = (Checkpoint.open(tmp_path / name) for name in "abc")
  assert said["bytes"] == a.total_bytes and said["tensors"] == len(a.tensors) and said["fingerprint"] == a.fingerprint
  same_bytes(a, b)
  assert all(a.read(n).tobytes() != c.read(n).tobytes() for n in a.tensors if a.tensors[n].nbytes > 8)
  assert {p.name for p in tmp_path.iterdir()} == set("abc")  # no temporary folder stays behind
  assert a.config.dspark is not None and {0, 4, 16} == set(a.config.compress_ratios)

def test_made_weights_keep_activations_in_size(script, tmp_path):
  script["make"](tmp_path / "x", "tiny", 0)
  c = Checkpoint.open(tmp_path / "x")
  for name, info in c.tensors.items():
    if len(info.shape) == 2 and name.endswith(".weight") and not name.startswith(("embed", "head", "mtp.2.markov")):
      value = load_f32(c, name)
      assert np.isfinite(value).all()
      if value.size > 4096: assert 0.7 < value.std() * value.shape[1]**0.5 < 1.45, name  # one tile has one scale
    if name.endswith("norm.weight"): assert abs(load_f32(c, name).mean() - 1) < 0.05
  table = c.read("layers.0.ffn.gate.tid2eid")
  assert all(len(set(row)) == len(row) for row in table.tolist()) and 0 <= table.min() <= table.max() < 4

def test_making_is_all_or_nothing(script, tmp_path, capsys, monkeypatch):
  (tmp_path / "there").mkdir()
  assert script["main"]([str(tmp_path / "there"), "--size", "tiny"]) == 2
  assert "there: is there already, want a new name" in capsys.readouterr().err
  def broken(*_: Any) -> None: raise OSError("disk full")
  monkeypatch.setitem(script["make"].__globals__, "write_shard", broken)
  assert script["main"]([str(tmp_path / "new"), "--size", "tiny"]) == 2
  assert [p.name for p in tmp_path.iterdir()] == ["there"]

def test_mid_has_every_kind_of_layer(script):
  config = Config.from_dict(script["COMMON"] | script["SIZES"]["mid"])
  assert set(config.compress_ratios) == {0, 4, 128} and config.num_hash_layers == 3 and config.dspark is not None
  size = sum(prod(e.shape) * SIZE[e.dtypes[0]] for e in expected_tensors(config).values())
  assert 250e6 < size < 400e6
