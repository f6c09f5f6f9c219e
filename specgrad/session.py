"""Saved chats: names, the file, its checksum. Knows text and arrays, neither models nor terminals.

A file is a safetensors file: the arrays are what the caches held, the chat itself is JSON in the metadata beside a sha256
of everything. Only a whole file ever has the name: it is written beside it and renamed."""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specgrad.checkpoint import Checkpoint

FORMAT = "specgrad chat 1"
SUFFIX = ".chat"

class SessionError(ValueError): pass

@dataclass
class Saved:
  """chat: what JSON can hold. state: arrays, none where only the text was kept. model: the `identity` of its checkpoint."""
  model: str
  chat: dict[str, Any]
  state: dict[str, np.ndarray] = field(default_factory=dict)

def folder() -> Path:
  """Where chats are kept; it need not exist."""
  base = os.environ.get("XDG_DATA_HOME", "")  # relative ones are to be ignored, says the standard
  return (Path(base) if os.path.isabs(base) else Path.home() / ".local/share") / "specgrad"

def path_of(name: str) -> Path:
  """The file of a chat. Raises SessionError for what is no plain name, so that no name leads out of the folder."""
  shown = repr(name) if len(name) <= 40 else repr(name[:40]) + "..."
  if not re.fullmatch(r"\w([\w .+-]*[\w+-])?", name) or len(os.fsencode(name)) > 100:
    raise SessionError(f"name={shown}, want letters, digits and . _ + - inside, at most 100 bytes. Chats are kept in {folder()}")
  return folder() / (name + SUFFIX)

def names() -> list[str]: return sorted(path.name.removesuffix(SUFFIX) for path in folder().glob("[!.]*" + SUFFIX))

def identity(checkpoint: Checkpoint) -> str:
  """Names a checkpoint by its layout and, since training changes no layout, by rows of 256 of its tensors."""
  digest, tensors = hashlib.sha256(checkpoint.fingerprint.encode()), sorted(checkpoint.tensors)
  for name in tensors[::-(-len(tensors) // 256)]:
    rows = checkpoint.tensors[name].shape[0]
    digest.update(checkpoint.read(name, rows // 2, min(rows // 2 + 8, rows)).tobytes())
  return digest.hexdigest()[:32]

def checksum(chat: str, state: Mapping[str, np.ndarray]) -> str:
  """sha256 of text, and of each array's name, type, shape and bytes."""
  digest = hashlib.sha256(chat.encode())
  for name, array in sorted(state.items()):
    digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
    digest.update(np.ascontiguousarray(array).data)
  return digest.hexdigest()

def save(name: str, saved: Saved) -> int:
  """-> bytes written. The name has the old file or the new one at any time, whatever happens. Raises SessionError for
  the name, OSError."""
  path = path_of(name)
  path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
  remove_leftovers(path)
  text = json.dumps({"model": saved.model, "chat": saved.chat})
  state = {key: np.ascontiguousarray(array) for key, array in saved.state.items()} or {"none": np.zeros(1, np.uint8)}
  part = path.with_name(f".{path.name}.{os.getpid()}.part")
  try:
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # a chat is nobody else's business
    try: save_file(state, part, {"format": FORMAT, "chat": text, "sha256": checksum(text, state)})
    except SafetensorError as error: raise OSError(f"{path}: {error}") from None
    with open(part, "rb+") as file:
      size = file.seek(0, os.SEEK_END)
      os.fsync(file.fileno())
    os.replace(part, path)
  finally:
    with contextlib.suppress(FileNotFoundError): part.unlink()
  descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
  try: os.fsync(descriptor)            # the new name is on the disk, too
  finally: os.close(descriptor)
  return size

def remove_leftovers(path: Path) -> None:
  """Of processes that were killed while they saved."""
  for part in path.parent.glob(f".{path.name}.*.part"):
    with contextlib.suppress(ValueError, PermissionError, FileNotFoundError):
      pid = int(part.name.split(".")[-2])
      try: os.kill(pid, 0)
      except ProcessLookupError: part.unlink()
      if pid == os.getpid(): part.unlink()  # of an earlier process with our number

def load(name: str) -> Saved:
  """Raises SessionError for a name or a file that is none, and for one that is not as it was written; OSError."""
  path = path_of(name)
  try: mode = path.stat().st_mode
  except FileNotFoundError:
    raise SessionError(f"{name}: no such chat in {folder()}" + (f", want one of {', '.join(names())}" if names() else "")) from None
  if not stat.S_ISREG(mode): raise SessionError(f"{path}: not a file, want a saved chat")
  try:
    with safe_open(path, framework="numpy") as file:
      head, state = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a dict
  except (SafetensorError, TypeError, ValueError, AttributeError) as error:
    raise SessionError(f"{path}: damaged or no saved chat ({error})") from None
  if head.get("format") != FORMAT: raise SessionError(f"{path}: format={head.get('format')!r}, want {FORMAT!r}")
  if checksum(head.get("chat", ""), state) != head.get("sha256"): raise SessionError(f"{path}: damaged, its sha256 is another")
  try:
    found = json.loads(head["chat"])
    return Saved(str(found["model"]), dict(found["chat"]), {} if "none" in state else state)
  except (KeyError, TypeError, ValueError, RecursionError) as error: raise SessionError(f"{path}: no saved chat ({error!r})") from None
