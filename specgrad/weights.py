"""From a checked checkpoint to tensors on their devices: stacked as the model wants them, cut as plan.PLACEMENT says.

Every device is sent its own rows from the file, part by part into a buffer that is there already: the host never holds
more than the parts that are being read."""
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from specgrad.checkpoint import Checkpoint, e8m0_codes, expected_tensors, load_f32
from specgrad.models.deepseek_v4 import FUSED
from specgrad.plan import EXPERT, place_of
from specgrad.quant import Each
from specgrad.quant.twin import Weight

TARGET = ("embed.", "head.", "norm.", "hc_head_", "layers.")
DRAFT = ("mtp.",)
MATRICES = ("linear", "expert")                            # kinds of expected_tensors that products are made with
HALF = ("embed.weight", "head.weight", "gate.weight", "wkv_wgate.weight", "weights_proj.weight", "markov_w1.weight",
        "markov_w2.weight", "proj.weight")                 # matrices that are never quantised
TOGETHER = ("experts.", "markov_head.")                    # matrices that one operation takes in one format
READERS = 4                                                # threads that read ahead of the copies to the devices
DTYPES: dict[Any, DType] = {np.dtype(np.uint8): dtypes.uint8, np.dtype(np.uint16): dtypes.uint16, np.dtype(np.float32): dtypes.float32,
                            np.dtype(np.int32): dtypes.int32}

class Part(NamedTuple):
  """What a device holds of a tensor: all of it, or the share-th of `shares` equal pieces along an axis."""
  axis: int | None = None
  share: int = 0
  shares: int = 1

  def of(self, n: int) -> tuple[int, int]: return n * self.share // self.shares, n * (self.share + 1) // self.shares

def groups(checkpoint: Checkpoint, prefix: tuple[str, ...]) -> dict[str, list[str]]:
  """Name of each tensor that the model holds -> the official names whose rows are stacked in it, in order.

  The routed experts of a layer become layers.i.ffn.experts.w13.weight (E, 2I, D) and .w2.weight (E, D, I)."""
  part_of = {part: (fused, parts.index(part)) for fused, parts in FUSED.items() for part in parts}
  found: dict[str, list[tuple[tuple[int, int], str]]] = {}
  for name in checkpoint.tensors:
    if not name.startswith(prefix) or name.endswith(".scale"): continue
    path, expert = name.split("."), 0
    if "experts" in path: expert = int(path.pop(path.index("experts") + 1))
    fused, order = part_of.get(path[-2], (path[-2], 0)) if len(path) > 1 and stacked(path) else ("", 0)
    if fused: path[-2] = fused
    found.setdefault(".".join(path), []).append(((expert, order), name))
  return {held: [n for _, n in sorted(parts)] for held, parts in found.items()}

def stacked(path: list[str]) -> bool:
  """Only a compressor's wkv and an expert's w1, w3 are stacked; an attention's wkv stands alone."""
  return path[-3:-2] in (["compressor"], ["experts"], ["shared_experts"])

def kind(checkpoint: Checkpoint, name: str, part: Part) -> str:
  """How quant.twin.Weight holds this part of a matrix; by the file's header. A cut through a group of columns that share a
  scale, and that another part needs too, can't be held in the stored format."""
  info = checkpoint.tensors[name]
  if info.dtype == "BF16": return "BF16"
  if checkpoint.scale_name(name) is None: return "F32"
  found, group, columns = ("FP8", 128, info.shape[1]) if info.dtype == "F8_E4M3" else ("FP4", 32, 2 * info.shape[1])
  start, stop = part.of(columns) if part.axis == 1 else (0, columns)
  return found if start % group == 0 or (stop - 1) // group == start // group and found == "FP8" else "F32"

def stored(checkpoint: Checkpoint, name: str, kind: str, part: Part) -> tuple[np.ndarray, np.ndarray | None]:
  """A part of a tensor as quant.twin.Weight holds it in this format: data, scales. Anything can be held as F32."""
  info, scale = checkpoint.tensors[name], checkpoint.scale_name(name)
  first, last = part.of(info.shape[0]) if part.axis == 0 and info.shape else (0, info.shape[0] if info.shape else 1)
  left, right = part.of(info.shape[1]) if part.axis == 1 else (0, info.shape[1] if len(info.shape) > 1 else 1)
  if kind == "BF16": return checkpoint.read(name, first, last)[:, left:right], None
  if kind == "F32":
    value = load_f32(checkpoint, name)                     # of its logical shape, which packed columns are not
    cut = slice(*part.of(value.shape[part.axis])) if part.axis is not None else slice(None)
    return value[:, cut] if part.axis == 1 else value[cut], None
  assert scale is not None
  data = checkpoint.read(name, first, last)[:, left:right]
  codes = e8m0_codes(checkpoint.read(scale), checkpoint.tensors[scale].dtype, scale)
  if kind == "FP4": return data, codes[first:last, left * 2 // 32:right * 2 // 32]
  tiles = codes[first // 128:-(-last // 128), left // 128:-(-right // 128)]
  return data, np.repeat(tiles, 128, axis=0)[first % 128:][:last - first]

def room(columns: tuple[np.ndarray, ...], count: int, experts: int, device: str) -> list[Tensor]:
  """An empty tensor for `count` parts like each of these, one under the other. experts: length of a new first axis, 0: none."""
  shapes = [(count * c.shape[0], *c.shape[1:]) for c in columns]
  shapes = [(experts, s[0] // experts, *s[1:]) if experts else s for s in shapes]
  return [Tensor.empty(*s, dtype=DTYPES[c.dtype], device=device).realize() for s, c in zip(shapes, columns)]

def send(parts: Iterator[tuple[np.ndarray, ...]], count: int, experts: int, device: str) -> list[Tensor]:
  """Parts of `count` equal shapes, one under the other in a new tensor of the device: for each column of theirs."""
  out: list[Tensor] = []
  for i, columns in enumerate(parts):
    if not i: out = room(columns, count, experts, device)
    for tensor, value in zip(out, columns):
      host = Buffer("PYTHON", value.size, tensor.dtype, opaque=np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
      tensor._buffer().view(value.size, tensor.dtype, i * value.nbytes).ensure_allocated().copy_from(host)
  return out

def leave(parts: Iterator[tuple[np.ndarray, ...]], count: int, experts: int, device: str) -> list[Tensor]:
  """As `send`, but nothing is sent: the tensors stay empty, and no part but the first is looked at."""
  return room(next(parts), count, experts, device)

def stream(checkpoint: Checkpoint, devices: str | Sequence[str], done: Callable[[int], None] = lambda n: None,
           prefix: tuple[str, ...] = TARGET, packed: bool = False, fill: Callable[..., list[Tensor]] = send) -> Iterator[tuple[str, Any]]:
  """(name, tensor or matrix on the device, or Each of several) for every tensor whose official name begins with one of
  `prefix`. `done` is told the bytes read since its last call. packed: matrices keep the checkpoint's bytes; else float32.
  fill: `send`, or `leave` where shapes are enough."""
  devices = (devices,) if isinstance(devices, str) else tuple(devices)
  expected, n = expected_tensors(checkpoint.config), len(devices)
  held_by = groups(checkpoint, prefix)
  kinds: dict[str, set[str]] = {}
  split = {held: place_of(names[0], expected[names[0]].role).split.axis if n > 1 else None for held, names in held_by.items()}
  parts = {held: [Part(axis, r, n) if axis in (0, 1) else Part() for r in range(n)] for held, axis in split.items()}
  matrices = {held for held, names in held_by.items() if packed and (expected[names[0]].kind in MATRICES or held.endswith(HALF))}
  family = lambda held: next((held.partition(x)[0] for x in TOGETHER if x in held), held)
  for held in matrices:
    kinds.setdefault(family(held), set()).update(kind(checkpoint, name, p) for name in held_by[held] for p in parts[held])
  with ThreadPoolExecutor(READERS) as pool:
    for held, names in held_by.items():
      mixed = kinds.get(family(held), set()) if held in matrices else set()
      one = next(iter(mixed)) if len(mixed) == 1 else "F32"                                # which holds any mix
      values = []
      for r, (device, part) in enumerate(zip(devices, parts[held])):
        E = checkpoint.config.n_routed_experts if ".experts." in held else 0
        first, last = Part(0, r, n).of(E) if split[held] == EXPERT else (0, E)
        mine = names[first * len(names) // E:last * len(names) // E] if E else names

        def read(name: str, part: Part = part, one: str = one) -> tuple[np.ndarray, ...]:
          if name.endswith("tid2eid"): return (checkpoint.read(name).astype(np.int32),)
          return tuple(c for c in stored(checkpoint, name, one, part) if c is not None)
        tensors = fill(ahead(pool, read, mine), len(mine), last - first, device)
        values.append(Weight(one, *tensors) if held in matrices else tensors[0])
      done(sum(checkpoint.tensors[t].nbytes for name in names for t in (name, checkpoint.scale_name(name)) if t))
      yield held, values[0] if n == 1 else Each(values)

def ahead(pool: ThreadPoolExecutor, read: Callable[[str], Any], names: Sequence[str]) -> Iterator[Any]:
  """read(name) of each in order, READERS of them under way."""
  running = [pool.submit(read, name) for name in names[:READERS]]
  for i in range(len(names)):
    yield running[i].result()
    running[i] = None                                      # type: ignore[call-overload]
    if i + READERS < len(names): running.append(pool.submit(read, names[i + READERS]))
