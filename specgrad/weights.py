"""From a checked checkpoint to tensors on a device, stacked as the model wants them, one buffer at a time."""
from collections.abc import Callable, Iterator

import numpy as np
from tinygrad import Tensor

from specgrad.checkpoint import Checkpoint, e8m0_codes, expected_tensors, load_f32
from specgrad.models.deepseek_v4 import FUSED
from specgrad.quant.twin import Weight

TARGET = ("embed.", "head.", "norm.", "hc_head_", "layers.")
DRAFT = ("mtp.",)
MATRICES = ("linear", "expert")                            # kinds of expected_tensors that products are made with
HALF = ("embed.weight", "head.weight", "gate.weight", "wkv_wgate.weight", "weights_proj.weight", "markov_w1.weight",
        "markov_w2.weight", "proj.weight")                 # matrices that are never quantised

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

def stored(checkpoint: Checkpoint, name: str) -> tuple[str, np.ndarray, np.ndarray | None]:
  """A matrix as quant.twin.Weight holds it: kind, data, scales. The format is read from the file's header."""
  dtype, scale = checkpoint.tensors[name].dtype, checkpoint.scale_name(name)
  if dtype == "BF16": return "BF16", checkpoint.read(name), None
  if scale is None: return "F32", load_f32(checkpoint, name), None
  data, codes = checkpoint.read(name), e8m0_codes(checkpoint.read(scale), checkpoint.tensors[scale].dtype, scale)
  if dtype == "F8_E4M3": return "FP8", data, np.repeat(codes, 128, axis=0)[:data.shape[0]]
  return "FP4", data, codes

def stream(checkpoint: Checkpoint, device: str, done: Callable[[int], None] = lambda n: None, prefix: tuple[str, ...] = TARGET,
           packed: bool = False) -> Iterator[tuple[str, Weight | Tensor]]:
  """(name, tensor or matrix on `device`) for every tensor whose official name begins with one of `prefix`. `done` is told
  the bytes read since its last call. packed: matrices keep the checkpoint's bytes; else all is float32.

  The host holds one stack at a time: a layer's experts, at worst."""
  kinds = {name: e.kind for name, e in expected_tensors(checkpoint.config).items()}
  held_by = groups(checkpoint, prefix)
  formats: dict[str, set[str]] = {}                        # of all matrices of one kind of expert in a layer: they go together
  for held, names in held_by.items(): formats.setdefault(held.rpartition(".w")[0], set()).update(checkpoint.tensors[n].dtype for n in names)
  for held, names in held_by.items():
    if held.endswith("tid2eid"):
      done(checkpoint.tensors[held].nbytes)
      yield held, Tensor(checkpoint.read(held).astype(np.int32), device=device).clone().realize()
      continue
    matrix = packed and (kinds[names[0]] in MATRICES or held.endswith(HALF))
    parts = [stored(checkpoint, n) if matrix else ("F32", load_f32(checkpoint, n), None) for n in names]
    together = formats[held.rpartition(".w")[0]] if "experts." in held else {kind for kind, *_ in parts}
    if matrix and len(together) > 1: parts = [("F32", load_f32(checkpoint, n), None) for n in names]  # holds any mix
    experts = checkpoint.config.n_routed_experts if ".experts." in held else 0
    tensors = []
    for column in ([data for _, data, _ in parts], [scale for *_, scale in parts if scale is not None]):
      if not column: continue
      value = np.concatenate(column) if len(column) > 1 else column[0]
      if experts: value = value.reshape(experts, value.shape[0] // experts, *value.shape[1:])
      tensors.append(Tensor(value, device=device).clone().realize())
    done(sum(checkpoint.tensors[n].nbytes for name in names for n in (name, checkpoint.scale_name(name)) if n))
    yield held, Weight(parts[0][0], *tensors) if matrix else tensors[0]
