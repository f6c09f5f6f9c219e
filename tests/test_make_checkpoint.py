"""scripts/make_checkpoint.py at the real size: all names, shapes and bytes of 0731 on almost no disk; and the shape of
the demonstration checkpoint."""
from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_checkpoint import real_names  # noqa: F401  a fixture
from test_config import REAL

from specgrad.checkpoint import Checkpoint
from specgrad.config import Config

def load_script() -> dict[str, Any]:
  return runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "make_checkpoint.py"))

def full_folder(factory: pytest.TempPathFactory) -> Path:
  """The real size, made once a test run for all modules that want it."""
  out = factory.getbasetemp() / "specgrad-full"
  if not out.exists(): load_script()["make"](out, "full", 0)
  return out

@pytest.fixture(scope="module")
def script() -> dict[str, Any]: return load_script()

@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Checkpoint: return Checkpoint.open(full_folder(tmp_path_factory))

def test_full_is_the_published_checkpoint(full, real_names):  # noqa: F811
  assert (full.total_bytes, len(full.tensors)) == (166_878_536_440, 72_317)
  assert {name: (t.dtype, t.shape) for name, t in full.tensors.items()} == real_names
  assert full.config == Config.from_dict(REAL)
  shard = {name: t.path.name for name, t in full.tensors.items()}
  place = {"embed.weight": 1, "layers.0.attn_norm.weight": 2, "layers.42.ffn.gate.bias": 44, "head.weight": 45,
           "norm.weight": 45, "hc_head_fn": 45, "mtp.0.main_proj.weight": 46, "mtp.2.norm.weight": 48}
  assert {n: shard[n] for n in place} == {n: f"model-{i:05}-of-00048.safetensors" for n, i in place.items()}
  index = json.loads((full.folder / "model.safetensors.index.json").read_text())
  assert index["metadata"]["total_size"] == full.total_bytes and index["weight_map"] == shard

def test_full_takes_almost_no_disk(full):
  assert sum(p.stat().st_blocks * 512 for p in full.folder.iterdir()) < 32e6
  assert not full.read("layers.42.ffn.experts.255.w2.weight").any() and not full.read("norm.weight").any()

def test_full_is_refused_where_files_have_no_holes(script, tmp_path, capsys, monkeypatch):
  class Filled:
    def __init__(self, handle: int): self.st_blocks = -(-os.fstat(handle).st_size // 512)
  monkeypatch.setitem(script["need_holes"].__globals__, "os", SimpleNamespace(fstat=Filled))
  assert script["main"]([str(tmp_path / "x"), "--size", "full"]) == 2
  error = capsys.readouterr().err.strip()
  assert error.count("\n") == 0 and "a hole of 16777216 bytes takes 16777216 bytes of disk, want a file system" in error
  assert not list(tmp_path.iterdir())

def test_demo_has_the_shape_of_the_demonstration(script, tmp_path, capsys):
  assert script["main"]([str(tmp_path / "x"), "--size", "demo"]) == 0
  made, theirs = Checkpoint.open(tmp_path / "x"), Checkpoint.open(Path(__file__).parents[1] / "specgrad" / "demo")
  assert made.config == theirs.config and list(made.tensors) == list(theirs.tensors)
  mine = made.read("embed.weight")
  assert mine.any() and mine.tobytes() != theirs.read("embed.weight").tobytes()
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["size"] == "demo"
