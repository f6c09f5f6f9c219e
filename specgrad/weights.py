"""From a checked checkpoint to tensors on a device: dequantised, stacked as the model wants them, one buffer at a time."""
from collections.abc import Callable, Iterator

import numpy as np
from tinygrad import Tensor

from specgrad.checkpoint import Checkpoint, load_f32
from specgrad.models.deepseek_v4 import FUSED

TARGET = ("embed.", "head.", "norm.", "hc_head_", "layers.")
DRAFT = ("mtp.",)

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

def stream(checkpoint: Checkpoint, device: str, done: Callable[[int], None] = lambda n: None,
           prefix: tuple[str, ...] = TARGET) -> Iterator[tuple[str, Tensor]]:
  """(name, float32 tensor on `device`) for every tensor whose official name begins with one of `prefix`. `done` is told
  the bytes read since its last call.

  The host holds one tensor at a time: an expert stack, at worst."""
  for held, names in groups(checkpoint, prefix).items():
    if held.endswith("tid2eid"):
      table = checkpoint.read(held).astype(np.int32)
      done(checkpoint.tensors[held].nbytes)
      yield held, Tensor(table, device=device).contiguous().realize()
      continue
    first = load_f32(checkpoint, names[0])
    experts = checkpoint.config.n_routed_experts if ".experts." in held else 1
    value = np.empty((experts, len(names) // experts * first.shape[0], *first.shape[1:]), first.dtype)
    rows = value.reshape(-1, *first.shape[1:])
    for i, name in enumerate(names):
      rows[i * first.shape[0]:(i + 1) * first.shape[0]] = first if i == 0 else load_f32(checkpoint, name)
      scale = checkpoint.scale_name(name)
      done(checkpoint.tensors[name].nbytes + (checkpoint.tensors[scale].nbytes if scale else 0))
    value = value if ".experts." in held else value[0]
    yield held, Tensor(value, device=device).contiguous().realize()
