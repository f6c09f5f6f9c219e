"""Turns a checkpoint of this architecture (bf16, f32 or fp8; DeepSeek's or transformers' names) into DeepSeek's layout:
experts in MXFP4, dense matrices in e4m3 tiles of 128x128, the rest as DeepSeek keeps it.

Goes through the source a few megabytes at a time. Finished shards lie in DST.partial with quantize.json, which says of
which source they are and with which error; the same command goes on from there. DST appears whole, by one rename.
What is in its final format already is copied byte for byte. The rounding is that of specgrad/quant/formats.py, here in
numpy; the scale of a group is the least power of two under which its largest value still fits (see HALF_E2M1).
"""
from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from specgrad.checkpoint import (
  BITS,
  E2M1,
  E4M3,
  GROUP,
  INDEX,
  PACKED,
  RAW,
  TILE,
  Checkpoint,
  CheckpointError,
  Expect,
  dequantise,
  e8m0_codes,
  expected_tensors,
  read_header,
)
from specgrad.config import CONFIG_FILES, ConfigError, read_json

CHUNK = 1 << 20          # values converted at a time: they stay in the processor's cache
MANIFEST = "quantize.json"
VERSION = 1              # of the rules below; a part made by other rules is not continued
SPARE = 1 << 26          # bytes that stay free on the disk
QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                "weight_block_size": [TILE, TILE]}
COPIED = ("tokenizer*.json", "generation_config.json", "encoding")

class QuantizeError(ValueError):
  """Something that can't be done; the text is one line with what was found and what was wanted."""

# -- rounding ------------------------------------------------------------------------------------------------------

def _nearest(values: np.ndarray, sign: int) -> np.ndarray:
  """Increasing float32 values of codes 0, 1, ... -> uint8 (65536,): the upper half of a float32's bits to its code.

  Nearest, ties to even, saturating. Two rounding steps make one exact one because _codes turns the lower half into a
  sticky last bit, which no middle between two values has."""
  middle = (values[:-1].astype(np.float64) + values[1:]) / 2
  x = np.minimum(np.arange(0x8000, dtype=np.uint32) << 16, 0x7f800000).view(np.float32).astype(np.float64)
  code = np.searchsorted(middle, x)
  tie = (code < len(middle)) & (x == middle[np.minimum(code, len(middle) - 1)])
  code += tie & (code % 2 == 1)
  return np.concatenate([code, code | sign]).astype(np.uint8)

TO_E2M1, TO_E4M3 = _nearest(E2M1[:8], 8), _nearest(E4M3[:127], 128)
E2M1_MAX, E4M3_MAX = np.float32(6), np.float32(448)

def _codes(x: np.ndarray, table: np.ndarray) -> np.ndarray:
  """float32 -> uint8 codes of the same shape; x without NaN."""
  bits = x.view(np.uint32)
  upper = (bits >> 16).astype(np.uint16)
  upper |= (bits & 0xffff) != 0
  return np.take(table, upper, mode="clip")  # every index is inside; unlike the default this doesn't look

def scale_codes(amax: np.ndarray, largest: np.float32, name: str) -> np.ndarray:
  """amax, int32 bits of float32 >= 0 -> uint8 e8m0 codes of 2^ceil(log2(amax / largest)), at least 1: a group of zeros
  must not need a subnormal scale. Raises QuantizeError for infinity and NaN."""
  top = int(largest.view(np.int32))
  if bad := int(np.count_nonzero(amax >= 0x7f800000)):
    raise QuantizeError(f"{name}: infinity or NaN in {bad} groups, want numbers. The file is damaged")
  code = (amax >> 23) - (top >> 23) + 127 + ((amax & 0x7fffff) > (top & 0x7fffff))
  return np.maximum(code, 1).astype(np.uint8)

def _power(exponent: np.ndarray) -> np.ndarray: return np.ldexp(np.float32(1), exponent)

def to_e2m1(x: np.ndarray, name: str = "tensor") -> tuple[np.ndarray, np.ndarray]:
  """float32 (N, K) -> codes uint8 (N, K); e8m0 uint8 (N, K/32)."""
  bits, groups = x.view(np.int32) & 0x7fffffff, x.reshape(x.shape[0], -1, GROUP)
  scale = scale_codes(np.maximum.reduceat(bits, np.arange(0, x.shape[1], GROUP), axis=1), E2M1_MAX, name)
  return _codes(groups * _power(127 - scale.astype(np.int32))[..., None], TO_E2M1).reshape(x.shape), scale

def to_e4m3(x: np.ndarray, name: str = "tensor") -> tuple[np.ndarray, np.ndarray]:
  """float32 (N, K) -> codes uint8 (N, K); e8m0 uint8 (ceil(N/128), ceil(K/128)), one for each tile."""
  rows, columns = x.shape
  bits = x.view(np.int32) & 0x7fffffff
  high = np.stack([bits[i:i + TILE].max(0) for i in range(0, rows, TILE)])
  scale = scale_codes(np.maximum.reduceat(high, np.arange(0, columns, TILE), axis=1), E4M3_MAX, name)
  inverse = _power(127 - scale.astype(np.int32)).repeat(TILE, 1)[:, :columns]
  scaled = np.concatenate([x[i:i + TILE] * inverse[i // TILE] for i in range(0, rows, TILE)])
  return _codes(scaled, TO_E4M3), scale

# The same values under a doubled scale: code -> code, 255 where a bit would be lost. A group whose largest value was
# rounded down to half the format's largest (3.4 to 3, 230 to 224) comes out of dequantising as one that fits a scale of
# half the size. Going up again wherever nothing is lost gives DeepSeek's own bytes back from a bf16 copy of them, but
# for one group in tens of thousands, whose values are the same.
_MAGNITUDE = np.arange(128)
HALF_E2M1 = np.array([0, 255, 1, 255, 2, 3, 4, 5, 8, 255, 9, 255, 10, 11, 12, 13], np.uint8)
HALF_E4M3 = np.where(_MAGNITUDE >= 16, _MAGNITUDE - 8, np.where(_MAGNITUDE % 2, 255, _MAGNITUDE // 2))
HALF_E4M3 = np.concatenate([HALF_E4M3, HALF_E4M3 | 128]).astype(np.uint8)

def widest_e2m1(codes: np.ndarray, scale: np.ndarray) -> None:
  """uint8 (N, K), (N, K/32), in place: groups that reach 6 go to the doubled scale if all their values exist there."""
  groups, flat = codes.reshape(-1, GROUP), scale.reshape(-1)
  full = np.flatnonzero(np.maximum.reduceat(codes & 7, np.arange(0, codes.shape[1], GROUP), axis=1) == 7)
  half = np.take(HALF_E2M1, groups[full], mode="clip")
  fits = half.max(1, initial=0) < 255
  groups[full[fits]] = half[fits]
  flat[full[fits]] += 1

def widest_e4m3(codes: np.ndarray, scale: np.ndarray) -> None:
  """uint8 (N, K), (ceil(N/128), ceil(K/128)), in place: the same for tiles that reach 448."""
  for i, j in np.ndindex(scale.shape):
    tile = codes[i * TILE:(i + 1) * TILE, j * TILE:(j + 1) * TILE]
    if (tile & 127).max() < 126 or (half := HALF_E4M3[tile]).max() == 255: continue
    tile[:] = half
    scale[i, j] += 1

def pack(codes: np.ndarray) -> np.ndarray:
  """uint8 0..15 (N, K) -> uint8 (N, K/2), the even column in the low nibble."""
  pair = codes.view("<u2")
  return (pair | pair >> 4).astype(np.uint8)

def to_bf16(x: np.ndarray, name: str = "tensor") -> np.ndarray:
  """float32 -> uint16, ties to even. Raises QuantizeError for what bfloat16 can't hold."""
  bits = x.view(np.uint32)
  out = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)
  if bad := int(np.count_nonzero((bits & 0x7fffffff) > 0x7f7f7fff)):
    raise QuantizeError(f"{name}: {bad} values that are NaN or too large for BF16, want numbers")
  return out

# -- one tensor ----------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Error:
  """What rounding did to the tensors of one role. rms: of the errors over that of the values; most: the largest error
  over its tensor's largest value; copied: tensors of which no value was rounded."""
  tensors: int = 0
  copied: int = 0
  wrong: float = 0.0    # sum of squares of the errors
  total: float = 0.0    # and of the values
  most: float = 0.0
  worst_rms: float = 0.0
  worst: str = ""

  @property
  def rms(self) -> float: return (self.wrong / self.total) ** 0.5 if self.total else 0.0

  def add(self, other: Error) -> None:
    for name in ("tensors", "copied", "wrong", "total"): setattr(self, name, getattr(self, name) + getattr(other, name))
    self.most = max(self.most, other.most)
    if other.worst_rms > self.worst_rms: self.worst_rms, self.worst = other.worst_rms, other.worst

class Meter:
  """Sums the error of one tensor, chunk by chunk."""
  def __init__(self) -> None: self.wrong = self.total = self.error = self.value = 0.0

  def add(self, want: np.ndarray, got: np.ndarray) -> None:
    off = got - want
    self.error = max(self.error, float(off.max()), -float(off.min()))
    self.value = max(self.value, float(want.max()), -float(want.min()))
    self.wrong += float(np.square(off, dtype=np.float64).sum())
    self.total += float(np.square(want, dtype=np.float64).sum())

  def result(self, name: str) -> Error:
    rms = (self.wrong / self.total) ** 0.5 if self.total else 0.0
    return Error(1, 0, self.wrong, self.total, self.error / self.value if self.value else 0.0, rms, name if rms else "")

Part = tuple[str, int, np.ndarray]  # name, first row, rows as they are to be stored

def _rows(source: Checkpoint, name: str, start: int, stop: int) -> np.ndarray:
  """float32 rows of a weight, start at a tile's first row. Unlike checkpoint.dequantise takes scales of any float32."""
  info, scale = source.tensors[name], source.scale_name(name)
  raw = source.read(name, start, stop)
  if scale is None: return dequantise(raw, info.dtype, name=name)
  packed, kind = info.dtype in PACKED, source.tensors[scale].dtype
  s = source.read(scale, start, stop) if packed else source.read(scale, start // TILE, ceil(stop / TILE))
  if kind != "F32": return dequantise(raw, info.dtype, s, kind, name)
  out = dequantise(raw, info.dtype, np.full(s.shape, 127, np.uint8), name=name)
  out *= s.repeat(GROUP, 1) if packed else s.repeat(TILE, 0)[:len(out)].repeat(TILE, 1)[:, :out.shape[1]]
  return out

def _keeps(source: Checkpoint, name: str, want: Expect) -> np.ndarray | None:
  """The scale's e8m0 codes if a matrix has its final format already, and only the scale may be spelled otherwise."""
  dtype, scale = source.tensors[name].dtype, source.scale_name(name)
  if scale is None or (dtype not in PACKED if want.kind == "expert" else dtype != "F8_E4M3"): return None
  raw, kind = source.read(scale), source.tensors[scale].dtype
  if kind == "F32" and (np.frexp(raw)[0] != 0.5).any(): return None
  return e8m0_codes(raw, kind, scale)

def convert(source: Checkpoint, name: str, want: Expect) -> Iterator[Part | Error]:
  """The rows of a weight and of its scale in their final form, at last the error. Raises QuantizeError and
  CheckpointError."""
  info = source.tensors[name]
  rows, columns = info.shape[0], prod(info.shape[1:]) * (2 if info.dtype in PACKED else 1)
  step = max(1, CHUNK // columns // TILE) * TILE
  cuts = [(i, min(i + step, rows)) for i in range(0, rows, step)]
  if want.kind == "plain":
    kind, final = info.dtype, want.dtypes[0]
    meter = Meter() if (kind, final) == ("F32", "BF16") else None
    for start, stop in cuts:
      raw = source.read(name, start, stop)
      if kind == final: out = raw
      elif meter is not None:
        out = to_bf16(raw, name)
        meter.add(raw, dequantise(out, "BF16"))
      else: out = dequantise(raw, kind) if kind == "BF16" else raw.astype(RAW[final])  # wider: nothing changes
      yield name, start, out
    yield Error(1, 1) if meter is None else meter.result(name)
    return
  scale = name.removesuffix("weight") + "scale"
  if (codes := _keeps(source, name, want)) is not None:
    yield scale, 0, codes
    for start, stop in cuts: yield name, start, source.read(name, start, stop)
    yield Error(1, 1)
    return
  meter = Meter()
  for start, stop in cuts:
    x = _rows(source, name, start, stop)
    if want.kind == "expert":
      (codes, s), first = to_e2m1(x, name), start
      widest_e2m1(codes, s)
      out = pack(codes)
      meter.add(x, dequantise(out, "I8", s, name=name))
    else:
      (out, s), first = to_e4m3(x, name), start // TILE
      widest_e4m3(out, s)
      meter.add(x, dequantise(out, "F8_E4M3", s, name=name))
    yield name, start, out
    yield scale, first, s
  yield meter.result(name)

# -- files ---------------------------------------------------------------------------------------------------------

def _size(want: Expect) -> int: return prod(want.shape) * BITS[want.dtypes[0]] // 8

def shards(expected: dict[str, Expect], limit: int) -> dict[str, dict[str, Expect]]:
  """File name -> its tensors: as DeepSeek cuts it (embedding, each layer, head and norm, each draft stage), and a new
  file where one would pass `limit` bytes. A weight and its scale stay together."""
  groups: dict[tuple[int, int], list[str]] = {}
  for name, want in expected.items():
    if want.kind == "scale": continue
    parts = name.split(".")
    key = {"embed": (0, 0), "layers": (1, 0), "mtp": (3, 0)}.get(parts[0], (2, 0))
    groups.setdefault((key[0], int(parts[1])) if key[0] % 2 else key, []).append(name)
  cut: list[dict[str, Expect]] = []
  for key in sorted(groups):
    left = 0
    for name in groups[key]:
      both = {name: expected[name]}
      if expected[name].kind != "plain": both |= {(s := name.removesuffix("weight") + "scale"): expected[s]}
      size = sum(map(_size, both.values()))
      if size > left: cut, left = [*cut, {}], max(limit, size)
      cut[-1].update(both)
      left -= size
  return {f"model-{i:05}-of-{len(cut):05}.safetensors": part for i, part in enumerate(cut, 1)}

def header(part: dict[str, Expect]) -> tuple[bytes, dict[str, int], int]:
  """-> the file's start, where each tensor begins, the file's size. Wide elements first, so that all are aligned."""
  order, reach = sorted(part, key=lambda n: (-BITS[part[n].dtypes[0]], n)), 0
  entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  for name in order:
    span = [reach, reach := reach + _size(part[name])]
    entries[name] = {"dtype": part[name].dtypes[0], "shape": list(part[name].shape), "data_offsets": span}
  text = json.dumps(entries, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  base = 8 + len(text)
  begins = {name: base + entries[name]["data_offsets"][0] for name in order}
  return len(text).to_bytes(8, "little") + text, begins, base + reach

def write_shard(path: Path, source: Checkpoint, part: dict[str, Expect], bar: tqdm) -> dict[str, Error]:
  """Writes one file, on the disk when this returns. -> role -> error"""
  start, begins, size = header(part)
  errors: dict[str, Error] = {}
  with open(path, "wb") as f:
    f.write(start)
    f.truncate(size)
    for name, want in part.items():
      if want.kind == "scale": continue
      for piece in convert(source, name, want):
        if isinstance(piece, Error): errors.setdefault(want.role, Error()).add(piece)
        else:
          which, row, rows = piece
          f.seek(begins[which] + row * (_size(part[which]) // part[which].shape[0]))
          f.write(np.ascontiguousarray(rows).data)
          bar.update(rows.nbytes)
    f.flush()
    os.fsync(f.fileno())
  return errors

def put_json(path: Path, value: Any) -> None:
  """Whole or not at all."""
  part = path.with_name(path.name + ".tmp")
  with open(part, "w") as f:
    f.write(json.dumps(value, indent=2) + "\n")
    f.flush()
    os.fsync(f.fileno())
  part.replace(path)

def _intact(path: Path, part: dict[str, Expect]) -> bool:
  try: found = read_header(path)
  except CheckpointError: return False
  return {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (e.dtypes[0], e.shape) for n, e in part.items()}

def identity(source: Checkpoint, limit: int) -> dict[str, Any]:
  """What a part must have been made of to be continued: formats and shapes, and every file's size and time."""
  files = sorted({t.path for t in source.tensors.values()})
  stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
  digest = hashlib.blake2b(f"{source.fingerprint} {stats}".encode(), digest_size=16).hexdigest()
  return {"version": VERSION, "source": digest, "shard_bytes": limit}

def resume(partial: Path, begun: dict[str, Any], plan: dict[str, dict[str, Expect]]) -> dict[str, Any]:
  """What is in DST.partial, a folder -> the manifest, with only those shards that are whole. Raises QuantizeError for a
  folder that is something else."""
  for p in partial.glob("*.tmp"): p.unlink()  # before free space is counted
  there = {p.name for p in partial.iterdir()}
  if not there: return {**begun, "shards": {}}
  over = f"or delete {partial} to start over"
  if MANIFEST not in there:
    raise QuantizeError(f"{partial}: no {MANIFEST} in it, want what an earlier run left, {over}")
  manifest = read_json(partial / MANIFEST, f"{partial / MANIFEST}", QuantizeError)
  for key, want in begun.items():
    if manifest.get(key) != want:
      raise QuantizeError(f"{partial / MANIFEST}: {key}={manifest.get(key)}, want {want}: it was begun with another "
                          f"{ {'source': 'SRC', 'shard_bytes': '--shard-bytes'}.get(key, 'version of this script')}. "
                          f"Use the same, {over}")
  if foreign := sorted(n for n in there if n.endswith(".safetensors") and n not in plan):
    raise QuantizeError(f"{partial}: {foreign[0]} is none of this run's {len(plan)} files, {over}")
  done = manifest.get("shards")
  if not isinstance(done, dict): raise QuantizeError(f"{partial / MANIFEST}: shards={done}, want an object, {over}")
  return {**begun, "shards": {n: done[n] for n in plan if n in done and _intact(partial / n, plan[n])}}

def settle(source: Checkpoint, partial: Path, plan: dict[str, dict[str, Expect]]) -> None:
  """Everything of a checkpoint that is no tensor: configs, index, tokenizer."""
  for name in CONFIG_FILES:
    if not (source.folder / name).exists(): continue
    raw = read_json(source.folder / name, name, ConfigError) | {"expert_dtype": "fp4"}
    if name == "config.json": raw["quantization_config"] = QUANTIZATION
    else: raw |= {"dtype": "fp8", "scale_fmt": "ue8m0"}
    (partial / name).parent.mkdir(exist_ok=True)
    put_json(partial / name, raw)
  for pattern in COPIED:
    for p in sorted(source.folder.glob(pattern)):
      if p.is_dir(): shutil.copytree(p, partial / p.name, dirs_exist_ok=True, copy_function=shutil.copyfile)
      else: shutil.copyfile(p, partial / p.name)
  weight_map = {name: shard for shard, part in plan.items() for name in part}
  total = sum(_size(e) for part in plan.values() for e in part.values())
  put_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})

# -- the whole -----------------------------------------------------------------------------------------------------

def quantize(src: Path, dst: Path, limit: int) -> tuple[dict[str, Any], dict[str, Error]]:
  """-> what was made, and the error by role. Raises QuantizeError, CheckpointError, ConfigError, OSError; whatever
  happens, DST.partial can be continued and DST is either whole or not there."""
  if dst.exists() or dst.is_symlink(): raise QuantizeError(f"{dst}: is there already, want a new name")
  began, source = time.perf_counter(), Checkpoint.open(src)
  for note in source.notes: print(f"quantize: {note}", file=sys.stderr)
  expected = expected_tensors(source.config)
  plan, begun = shards(expected, limit), identity(source, limit)
  partial = dst.with_name(dst.name + ".partial")
  partial.mkdir(parents=True, exist_ok=True)
  lock = os.open(partial, os.O_RDONLY)
  try:
    try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: raise QuantizeError(f"{partial}: another run is writing there, want one at a time") from None
    manifest = resume(partial, begun, plan)
    sizes = {shard: header(part)[2] for shard, part in plan.items()}
    kept, done = len(manifest["shards"]), sum(sizes[s] for s in manifest["shards"])
    for shard in plan:
      if shard not in manifest["shards"]: (partial / shard).unlink(missing_ok=True)
    need, free = sum(sizes.values()) - done + SPARE, shutil.disk_usage(partial).free
    if need > free: raise QuantizeError(f"{partial}: {free} bytes free on the disk, want {need}")
    put_json(partial / MANIFEST, manifest)
    with tqdm(total=sum(sizes.values()), initial=done, unit="B", unit_scale=True, desc=dst.name, disable=None) as bar:
      for shard, part in plan.items():
        if shard in manifest["shards"]: continue
        errors = write_shard(tmp := partial / f"{shard}.tmp", source, part, bar)
        tmp.replace(partial / shard)
        manifest["shards"][shard] = {role: asdict(e) for role, e in errors.items()}
        put_json(partial / MANIFEST, manifest | {"shards": {s: v for s in plan if (v := manifest["shards"].get(s))}})
    settle(source, partial, plan)
    made = Checkpoint.open(partial)
    partial.rename(dst)
  finally:
    os.close(lock)
    with suppress(OSError): partial.rmdir()  # only if nothing is in it
  roles: dict[str, Error] = {}
  for by_role in manifest["shards"].values():
    for role, e in by_role.items(): roles.setdefault(role, Error()).add(Error(**e))
  return {"out": str(dst), "source_bytes": source.total_bytes, "bytes": made.total_bytes, "tensors": len(made.tensors),
          "shards": len(plan), "resumed_shards": kept, "fingerprint": made.fingerprint,
          "seconds": round(time.perf_counter() - began, 2)}, roles

def table(roles: dict[str, Error]) -> str:
  width = max(map(len, roles))
  lines = [f"{'role':{width}}  tensors  copied  rel rms    max        worst tensor"]
  lines += [f"{role:{width}}  {e.tensors:7}  {e.copied:6}  {e.rms:.3e}  {e.most:.3e}  "
            + (f"{e.worst_rms:.3e} {e.worst}" if e.worst else "-") for role, e in sorted(roles.items())]
  return "\n".join(lines)

def main(argv: list[str] | None = None) -> int:
  about = "Turn a bf16, f32 or fp8 checkpoint into DeepSeek's layout: MXFP4 experts, fp8 dense matrices. Interrupted, "
  parser = argparse.ArgumentParser(description=about + "the same command goes on where it stopped.",
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.add_argument("src", type=Path, metavar="SRC", help="folder of the checkpoint to read")
  parser.add_argument("dst", type=Path, metavar="DST", help="folder to make")
  parser.add_argument("--shard-bytes", type=int, default=4 * 10**9, metavar="N", help="largest file to make")
  args = parser.parse_args(argv)
  if args.shard_bytes < 1: parser.error(f"--shard-bytes={args.shard_bytes}, want an integer >= 1")
  try: said, roles = quantize(args.src, args.dst, args.shard_bytes)
  except (OSError, QuantizeError, CheckpointError, ConfigError) as e:
    print(f"quantize: error: {e}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("quantize: stopped; the same command goes on from here", file=sys.stderr)
    return 130
  print(table(roles))
  changed = {role: {"rms": e.rms, "max": e.most, "worst_rms": e.worst_rms, "worst": e.worst}
             for role, e in sorted(roles.items()) if e.copied < e.tensors}
  print(json.dumps(said | {"errors": changed}))
  return 0

if __name__ == "__main__": sys.exit(main())
