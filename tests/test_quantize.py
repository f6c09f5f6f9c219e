"""scripts/quantize.py: DeepSeek's own bytes come back from a bf16 copy, errors stay small, nothing is half-written, and
an interrupted run goes on to the same bytes."""
from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_checkpoint import INDEX, Files, Tensor, hf_name, stacked, unpack, write

from specgrad.checkpoint import Checkpoint, dequantise, expected_tensors, load_f32

SCRIPT = Path(__file__).parents[1] / "scripts" / "quantize.py"
LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("quantize", sys.argv[1])
quantize = importlib.util.module_from_spec(spec)
sys.modules["quantize"] = quantize
spec.loader.exec_module(quantize)
"""
DIE = LOAD + """
import os, signal
convert, left = quantize.convert, int(sys.argv[2])
def dying(*args):
  global left
  for piece in convert(*args):
    yield piece
    left -= 1
    if not left: os.kill(os.getpid(), signal.SIGKILL)  # between two writes of one file
quantize.convert = dying
sys.exit(quantize.main(sys.argv[3:]))
"""

@pytest.fixture(scope="session")
def script() -> ModuleType:
  spec = importlib.util.spec_from_file_location("quantize", SCRIPT)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules["quantize"] = module
  spec.loader.exec_module(module)
  return module

@pytest.fixture(scope="session")
def golden(shared: Path) -> Path: return shared / "golden" / "v4_r16" / "ckpt"

def bf16(x: np.ndarray) -> Tensor: return "BF16", list(x.shape), x.astype(ml_dtypes.bfloat16).tobytes()

def f32(x: np.ndarray) -> Tensor: return "F32", list(x.shape), x.astype(np.float32).tobytes()

def unquantised(folder: Path, to: Callable[[np.ndarray], Tensor] = bf16) -> Files:
  """The same checkpoint with its matrices in a plain format and without scales."""
  c, out = Checkpoint.open(folder), {}
  for path in sorted(folder.glob("*.safetensors")):
    kept = {n: t for n, t in unpack(path).items() if not n.endswith(".scale")}
    out[path.name] = {n: to(load_f32(c, n)) if t[0] in ("I8", "F8_E4M3") else t for n, t in kept.items()}
  return out

def plain_config(folder: Path, **changes: Any) -> dict[str, Any]:
  raw = json.loads((folder / "config.json").read_text()) | changes
  return {k: v for k, v in raw.items() if k not in ("quantization_config", "expert_dtype")}

@pytest.fixture(scope="session")
def source(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A bf16 copy of the golden checkpoint, with what else lies in such folders."""
  folder = write(tmp_path_factory.mktemp("bf16") / "src", unquantised(golden), plain_config(golden))
  for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    (folder / name).write_text(f'{{"of": "{name}"}}')
  (folder / "encoding").mkdir()
  (folder / "encoding" / "encoding.py").write_text("x = 1\n")
  (folder / "README.md").write_text("not needed")
  return folder

def run(script: ModuleType, *args: Any) -> int: return script.main([str(a) for a in args])

def tree(folder: Path) -> dict[str, bytes]:
  return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

def refused(script: ModuleType, capsys: Any, src: Path, dst: Path, *want: str, args: tuple[Any, ...] = ()) -> None:
  assert run(script, src, dst, *args) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("quantize: error: ") and err.count("\n") == 1
  for part in want: assert part in err, err

# -- values ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", ["v4_r16", "dspark_w16"])
def test_the_official_bytes_come_back_from_bf16(case, shared, script, tmp_path, capsys):
  """Values always; bytes but for groups that fit two scales where the smaller was DeepSeek's (1 of 101,376 here)."""
  folder = shared / "golden" / case / "ckpt"
  src = write(tmp_path / "src", unquantised(folder), plain_config(folder))
  assert run(script, src, tmp_path / "dst") == 0
  want, got = Checkpoint.open(folder), Checkpoint.open(tmp_path / "dst")
  other = [n for n in want.tensors if want.read(n).tobytes() != got.read(n).tobytes()]
  assert got.fingerprint == want.fingerprint and got.total_bytes == want.total_bytes and len(other) <= 2
  for name in other:
    if name.endswith(".scale"): assert np.count_nonzero(want.read(name) != got.read(name)) == 1
    weight = name.replace("scale", "weight")
    assert (load_f32(want, weight).view(np.int32) == load_f32(got, weight).view(np.int32)).all()
  said = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert said["tensors"] == len(want.tensors) and said["fingerprint"] == want.fingerprint
  assert {e["rms"] for e in said["errors"].values()} == {0.0}

def test_without_going_up_again_bytes_would_differ(golden, script):
  """15 % of groups end at half of the largest value; a dequantised copy alone would give them another scale."""
  c, moved = Checkpoint.open(golden), 0
  for name, want in expected_tensors(c.config).items():
    if want.kind != "expert": continue
    moved += np.count_nonzero(script.to_e2m1(load_f32(c, name))[1] != c.read(name[:-6] + "scale"))
  assert moved > 5000

@pytest.mark.parametrize("form", ["official", "U8", "F32 scales", "transformers", "stacked"])
def test_what_is_final_already_is_copied(form, golden, script, tmp_path, capsys):
  files = {p.name: unpack(p) for p in sorted(golden.glob("*.safetensors"))}
  for name, (dtype, shape, data) in [(n, t) for f in files.values() for n, t in f.items()]:
    file = next(f for f in files.values() if name in f)
    if form == "U8" and dtype in ("I8", "F8_E8M0"): file[name] = "U8", shape, data
    if form == "F32 scales" and dtype == "F8_E8M0":
      file[name] = f32(np.frombuffer(data, ml_dtypes.float8_e8m0fnu).astype(np.float32).reshape(shape))
  if form == "transformers": files = {f: {hf_name(n): t for n, t in ts.items()} for f, ts in files.items()}
  if form == "stacked": files = stacked(files, "_scale_inv")
  src = write(tmp_path / "src", files, json.loads((golden / "config.json").read_text()))
  assert run(script, src, tmp_path / "dst") == 0
  want, got = Checkpoint.open(golden), Checkpoint.open(tmp_path / "dst")
  assert got.fingerprint == want.fingerprint
  for name in want.tensors: assert got.read(name).tobytes() == want.read(name).tobytes(), name
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["errors"] == {}

def test_transformers_names_and_stacked_experts(golden, source, script, tmp_path):
  src = write(tmp_path / "src", stacked(unquantised(golden), ""), plain_config(golden))
  assert run(script, src, tmp_path / "a") == 0 == run(script, source, tmp_path / "b")
  a, b = (Checkpoint.open(tmp_path / name) for name in "ab")
  assert a.fingerprint == b.fingerprint
  for name in a.tensors: assert a.read(name).tobytes() == b.read(name).tobytes(), name

def test_random_float32_has_small_errors_and_truthful_figures(golden, script, tmp_path, capsys):
  rng, c, ids = np.random.default_rng(1), Checkpoint.open(golden), "layers.0.ffn.gate.tid2eid"
  expected = expected_tensors(c.config)
  values = {n: rng.standard_normal(load_f32(c, n).shape, np.float32) * 0.02
            for n, e in expected.items() if e.kind != "scale" and e.dtypes[0] not in ("I64", "F32")}
  files = unquantised(golden)
  for file in files.values():
    file.update((n, f32(values[n])) for n in file if n in values)
    if ids in file: file[ids] = "I32", file[ids][1], c.read(ids).astype(np.int32).tobytes()
  assert run(script, write(tmp_path / "src", files, plain_config(golden)), tmp_path / "dst") == 0
  lines = capsys.readouterr().out.splitlines()
  got, said = Checkpoint.open(tmp_path / "dst"), json.loads(lines[-1])["errors"]
  assert got.fingerprint == c.fingerprint and got.read(ids).tobytes() == c.read(ids).tobytes()
  sums: dict[str, list[tuple[str, float, float, float]]] = {}
  for name, x in values.items():
    wide = x.astype(np.float64)
    off = load_f32(got, name) - wide
    found = name, (off**2).sum(), (wide**2).sum(), np.abs(off).max() / np.abs(x).max()
    sums.setdefault(expected[name].role, []).append(found)
  assert set(said) == set(sums)
  for role, all_found in sums.items():
    rms = (sum(f[1] for f in all_found) / sum(f[2] for f in all_found)) ** 0.5
    worst = max(all_found, key=lambda f: f[1] / f[2])[0]
    assert np.allclose([said[role]["rms"], said[role]["max"]], [rms, max(f[3] for f in all_found)], rtol=1e-6)
    assert said[role]["worst"] == worst and any(line.startswith(role) and worst in line for line in lines)
    assert rms < (0.125 if ".experts." in role else 0.03 if got.tensors[worst].dtype == "F8_E4M3" else 0.002), role

def test_fp8_experts_and_scales_of_any_float(golden, script, tmp_path):
  """e4m3 tiles with float32 scales that are no powers of two are rounded anew; the values are code times scale."""
  c, rng = Checkpoint.open(golden), np.random.default_rng(1)
  name, dense = "layers.3.ffn.experts.1.w2", "layers.1.attn.wq_b"
  files, want = unquantised(golden), {}
  for file in files.values():
    for weight in (f"{name}.weight", f"{dense}.weight"):
      if weight not in file: continue
      rows, columns = load_f32(c, weight).shape
      codes = rng.integers(0, 127, (rows, columns), np.uint8) | rng.integers(0, 2, (rows, columns), np.uint8) << 7
      scale = rng.uniform(1e-3, 2e-3, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
      tiles = scale.repeat(128, 0).repeat(128, 1)[:rows, :columns]
      want[weight] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * tiles
      file[weight] = "F8_E4M3", [rows, columns], codes.tobytes()
      file[weight.replace("weight", "scale")] = f32(scale)
  assert run(script, write(tmp_path / "src", files, plain_config(golden)), tmp_path / "dst") == 0
  got = Checkpoint.open(tmp_path / "dst")
  for weight, x in want.items():
    rms = np.sqrt(np.square(load_f32(got, weight) - x).mean() / np.square(x).mean())
    assert 0 < rms < (0.25 if "experts" in weight else 0.04), (weight, rms)
    assert got.tensors[weight].dtype == ("I8" if "experts" in weight else "F8_E4M3")

def test_the_numpy_quantisers_are_those_of_formats(script):
  from tinygrad import Tensor as T

  from specgrad.quant import formats
  rng = np.random.default_rng(1)
  halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
  floats = rng.integers(0, 2**32, 10**6, np.uint32).view(np.float32)
  for x in (halves[~np.isnan(halves)], floats[~np.isnan(floats)]):
    assert (script._codes(x, script.TO_E4M3) == formats.encode_e4m3(T(x)).numpy()).all()
    assert (script._codes(x, script.TO_E2M1) == formats.encode_e2m1(T(x)).numpy()).all()
    small = x[np.abs(x) < 3e38]
    assert (script.to_bf16(small) == formats.bf16(T(small)).numpy().view(np.uint32) >> 16).all()
  amax = np.abs(floats[np.isfinite(floats)])
  for largest in (script.E4M3_MAX, script.E2M1_MAX):
    want = formats.scale_exponent(T(amax), float(largest)).maximum(1).numpy()
    assert (script.scale_codes(amax.view(np.int32), largest, "x") == want).all()
  x = (rng.standard_normal((256, 384)) * 10.0 ** rng.integers(-30, 30, (256, 1))).astype(np.float32)
  codes, scale = script.to_e2m1(x)
  want_codes, want_scale = formats.quantise_e2m1(T(x))
  assert (script.pack(codes) == want_codes.numpy()).all() and (scale == want_scale.numpy()).all()
  codes, scale = script.to_e4m3(x)
  tiles = x.reshape(2, 128, 3, 128).swapaxes(1, 2).reshape(6, -1)
  want_codes, want_scale = formats.quantise_e4m3(T(np.ascontiguousarray(tiles)), 128 * 128, 448 * 2.0**-126)
  assert (codes.reshape(2, 128, 3, 128).swapaxes(1, 2).reshape(6, -1) == want_codes.numpy()).all()
  assert (scale.ravel() == want_scale.numpy().ravel()).all()

@pytest.mark.parametrize("shape", [(1, 32), (129, 160), (300, 416), (128, 128)])
def test_ragged_tiles_and_zeros(shape, script):
  rng = np.random.default_rng(1)
  x = rng.standard_normal(shape, np.float32)
  x[:, :32] = 0
  for to, widest, kind in ((script.to_e2m1, script.widest_e2m1, "I8"), (script.to_e4m3, script.widest_e4m3, "F8_E4M3")):
    codes, scale = to(x)
    before = dequantise(script.pack(codes) if kind == "I8" else codes, kind, scale)
    widest(codes, scale)
    after = dequantise(script.pack(codes) if kind == "I8" else codes, kind, scale)
    assert (before.view(np.int32) == after.view(np.int32)).all() and (after[:, :32] == 0).all() and scale.min() >= 1
    assert np.abs(after - x).max() <= np.abs(x).max() / (5 if kind == "I8" else 17)  # 5 -> 4, 272 -> 256

def test_going_up_again_keeps_every_value(script):
  """All codes through the table of halves: a code or none, the value exactly half."""
  from specgrad.checkpoint import E2M1, E4M3
  for table, values in ((script.HALF_E2M1, E2M1), (script.HALF_E4M3, E4M3)):
    known = {float(v) for v in values}
    for code, half in enumerate(table):
      if np.isnan(values[code]): continue
      if half == 255: assert float(values[code]) / 2 not in known
      else: assert values[half] == values[code] / 2 and np.signbit(values[half]) == np.signbit(values[code])

def test_memory_is_bounded_by_the_chunk_not_the_tensor(script):
  """134 MB in BF16, 268 as float32: what is held at a time stays under 60."""
  class Source:
    tensors = {n: SimpleNamespace(dtype="BF16", shape=(16384, 4096)) for n in ("a.weight", "b.weight")}
    def scale_name(self, name: str) -> None: return None
    def read(self, name: str, start: int, stop: int) -> np.ndarray:
      return np.full((stop - start, 4096), 0x3f80 + start % 7, np.uint16)
  for name, kind, shape in (("a.weight", "expert", (16384, 2048)), ("b.weight", "linear", (16384, 4096))):
    tracemalloc.start()
    for piece in script.convert(Source(), name, SimpleNamespace(kind=kind, shape=shape, dtypes=("I8",))): last = piece
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6 and last.rms < 0.2

# -- files -----------------------------------------------------------------------------------------------------------

def test_everything_a_checkpoint_needs_is_there(source, golden, script, tmp_path):
  assert run(script, source, tmp_path / "new" / "dst", "--shard-bytes", 300_000) == 0
  dst = tmp_path / "new" / "dst"
  raw, want = json.loads((dst / "config.json").read_text()), json.loads((golden / "config.json").read_text())
  assert raw == want and [p.name for p in dst.parent.iterdir()] == ["dst"]
  files = set(tree(dst))
  shards = {f for f in files if f.endswith(".safetensors")}
  assert files - shards == {"config.json", INDEX, "quantize.json", "tokenizer.json", "tokenizer_config.json",
                            "generation_config.json", "encoding/encoding.py"}
  for name in ("tokenizer.json", "encoding/encoding.py"):
    assert (dst / name).read_bytes() == (source / name).read_bytes()
  c = Checkpoint.open(dst)
  index = json.loads((dst / INDEX).read_text())
  assert index["metadata"]["total_size"] == c.total_bytes and set(index["weight_map"].values()) == shards
  for shard in shards:
    inside = unpack(dst / shard)
    assert sum(len(t[2]) for t in inside.values()) <= 300_000
    assert all(n[:-6] + "scale" in inside for n in inside if c.scale_name(n))
  assert all(t.offset % {"F32": 4, "I64": 8, "BF16": 2}.get(t.dtype, 1) == 0 for t in c.tensors.values())

def test_inference_config_is_kept_too(source, golden, script, tmp_path):
  shutil.copytree(source, src := tmp_path / "src")
  (src / "config.json").unlink()
  raw = json.loads((golden / "inference_config.json").read_text())
  (src / "inference").mkdir()
  (src / "inference" / "config.json").write_text(json.dumps(raw | {"dtype": "bf16", "expert_dtype": None}))
  assert run(script, src, tmp_path / "dst") == 0
  assert json.loads((tmp_path / "dst" / "inference" / "config.json").read_text()) == raw
  assert Checkpoint.open(tmp_path / "dst").config == Checkpoint.open(src).config

# -- interruptions ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def whole(source: Path, script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
  dst = tmp_path_factory.mktemp("whole") / "dst"
  assert run(script, source, dst, "--shard-bytes", 600_000) == 0
  return tree(dst)

def killed(source: Path, dst: Path, after: int) -> Path:
  command = [sys.executable, "-c", DIE, SCRIPT, str(after), source, dst, "--shard-bytes", "600000"]
  done = subprocess.run(command, capture_output=True)
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert not dst.exists()
  return dst.with_name("dst.partial")

def test_killed_again_and_again_it_ends_in_the_same_bytes(source, whole, script, tmp_path, capsys):
  dst, seen = tmp_path / "dst", -1
  for after in (40, 130, 200):
    partial = killed(source, dst, after)
    finished = len(list(partial.glob("*.safetensors")))
    assert seen < finished and len(list(partial.glob("*.safetensors.tmp"))) == 1
    seen = finished
  (partial / "model-00099-of-00099.safetensors.tmp").write_bytes(b"x")
  times = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.safetensors")}
  assert run(script, source, dst, "--shard-bytes", 600_000) == 0
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["resumed_shards"] == seen > 2
  assert tree(dst) == whole and not partial.exists()
  assert all((dst / name).stat().st_mtime_ns == t for name, t in times.items())  # kept, not written again

@pytest.mark.parametrize("where", ["convert", "put_json", "settle"])
def test_an_exception_anywhere_leaves_a_part_that_goes_on(where, source, whole, script, tmp_path, monkeypatch, capsys):
  for after in (1, 3):
    dst, calls, real = tmp_path / f"dst{after}", 0, getattr(script, where)
    def failing(*args, after=after, real=real):
      nonlocal calls
      calls += 1
      if calls == after: raise OSError(28, "No space left on device")
      return real(*args)
    with monkeypatch.context() as patch:
      patch.setattr(script, where, failing)
      if (where, after) == ("settle", 3): continue
      assert run(script, source, dst, "--shard-bytes", 600_000) == 2
    assert "No space left" in capsys.readouterr().err and not dst.exists()
    assert run(script, source, dst, "--shard-bytes", 600_000) == 0
    assert tree(dst) == whole

def test_ctrl_c_is_no_error(source, whole, script, tmp_path, monkeypatch, capsys):
  with monkeypatch.context() as patch:
    def stop(*_: Any) -> None: raise KeyboardInterrupt
    patch.setattr(script, "settle", stop)
    assert run(script, source, tmp_path / "dst", "--shard-bytes", 600_000) == 130
  assert capsys.readouterr().err == "quantize: stopped; the same command goes on from here\n"
  assert run(script, source, tmp_path / "dst", "--shard-bytes", 600_000) == 0 and tree(tmp_path / "dst") == whole

@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "header"])
def test_a_damaged_shard_is_made_again(damage, source, whole, script, tmp_path, capsys):
  partial = killed(source, tmp_path / "dst", 200)
  shard = sorted(partial.glob("*.safetensors"))[1]
  if damage == "gone": shard.unlink()
  else:
    blob = shard.read_bytes()
    shard.write_bytes({"cut": blob[:-1], "empty": b"", "header": blob.replace(b"F8_E4M3", b"F8_E5M2", 1)}[damage])
  kept = len(list(partial.glob("*.safetensors"))) - (damage != "gone")
  assert run(script, source, tmp_path / "dst", "--shard-bytes", 600_000) == 0
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["resumed_shards"] == kept
  assert tree(tmp_path / "dst") == whole

def test_another_source_or_plan_is_refused(source, golden, script, tmp_path, capsys):
  dst = tmp_path / "dst"
  partial = killed(source, dst, 130)
  before = tree(partial)
  refused(script, capsys, source, dst, "shard_bytes=600000, want 700000", "another --shard-bytes", "delete",
          args=("--shard-bytes", 700_000))
  shutil.copytree(source, other := tmp_path / "other")
  (other / "model-00001-of-00003.safetensors").touch()
  refused(script, capsys, other, dst, "quantize.json: source=", "another SRC", args=("--shard-bytes", 600_000))
  (partial / "model-00001-of-00099.safetensors").write_bytes(b"x")
  refused(script, capsys, source, dst, "model-00001-of-00099.safetensors is none of", args=("--shard-bytes", 600_000))
  (partial / "model-00001-of-00099.safetensors").unlink()
  assert {n: b for n, b in tree(partial).items() if not n.endswith(".tmp")} == {
    n: b for n, b in before.items() if not n.endswith(".tmp")}
  for text, want in (("{", "not JSON"), ("[]", "want a JSON object"), ("{}", "version=None, want 1")):
    (partial / "quantize.json").write_text(text)
    refused(script, capsys, source, dst, "quantize.json: ", want, args=("--shard-bytes", 600_000))
  (partial / "quantize.json").unlink()
  refused(script, capsys, source, dst, "no quantize.json in it")
  assert not dst.exists()

# -- refusals --------------------------------------------------------------------------------------------------------

def test_refusals_write_nothing(source, golden, script, tmp_path, capsys, monkeypatch):
  (tmp_path / "there").mkdir()
  refused(script, capsys, source, tmp_path / "there", "there: is there already, want a new name")
  refused(script, capsys, tmp_path / "no", tmp_path / "dst", "no such directory, want the folder of a checkpoint")
  os.symlink(tmp_path / "nowhere", tmp_path / "link")
  refused(script, capsys, source, tmp_path / "link", "is there already")
  with monkeypatch.context() as patch:
    patch.setattr(script.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    refused(script, capsys, source, tmp_path / "dst", "1000 bytes free on the disk, want 7")
  assert {p.name for p in tmp_path.iterdir()} == {"there", "link"}
  with pytest.raises(SystemExit): run(script, source, tmp_path / "dst", "--shard-bytes", 0)
  assert "--shard-bytes=0, want an integer >= 1" in capsys.readouterr().err

def test_one_run_at_a_time(source, script, tmp_path, capsys):
  import fcntl
  partial = killed(source, tmp_path / "dst", 10)
  held = os.open(partial, os.O_RDONLY)
  fcntl.flock(held, fcntl.LOCK_EX)
  refused(script, capsys, source, tmp_path / "dst", "another run is writing there", args=("--shard-bytes", 600_000))
  os.close(held)

@pytest.mark.parametrize("name, bad, want", [
  ("layers.2.ffn.experts.1.w3.weight", np.nan, "infinity or NaN in 1 groups, want numbers"),
  ("layers.4.attn.wo_b.weight", np.inf, "infinity or NaN in 1 groups, want numbers"),
  ("layers.4.attn.wkv.weight", -np.inf, "infinity or NaN in 1 groups"),
  ("embed.weight", np.nan, "1 values that are NaN or too large for BF16"),
  ("head.weight", 3.4e38, "1 values that are NaN or too large for BF16")])
def test_values_that_are_no_numbers(name, bad, want, golden, script, tmp_path, capsys):
  files, c = unquantised(golden), Checkpoint.open(golden)
  for file in files.values():
    if name not in file: continue
    x = load_f32(c, name).copy()
    x[3, 5] = bad
    file[name] = f32(x)
  refused(script, capsys, write(tmp_path / "src", files, plain_config(golden)), tmp_path / "dst", f"{name}: {want}")
  assert not (tmp_path / "dst").exists()

def test_nan_scales_are_refused(golden, script, tmp_path, capsys):
  files = {p.name: unpack(p) for p in sorted(golden.glob("*.safetensors"))}
  for file in files.values():
    if "layers.0.attn.wkv.scale" in file:
      dtype, shape, data = file["layers.0.attn.wkv.scale"]
      file["layers.0.attn.wkv.scale"] = dtype, shape, b"\xff" + data[1:]
  src = write(tmp_path / "src", files, json.loads((golden / "config.json").read_text()))
  refused(script, capsys, src, tmp_path / "dst", "layers.0.attn.wkv.scale: 1 of", "scales are NaN (byte 255)")
