"""What must be settled before tinygrad is imported: which C compiler its CPU device runs, and where its results stay.

tinygrad pipes every CPU kernel through `$CC`, and a few helper programs whatever DEV says, so a clang is needed even
where a GPU does the work. Its compile cache knows neither the compiler nor the processor; the file chosen here does.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

class ToolchainError(ValueError):
  """No compiler that tinygrad's CPU device can use; the text is one line and says what to install."""

OLDEST, GOOD, NEWEST = 14, 16, 30  # before 16, half precision kernels run at a fifth of the speed
HINT = "Run: pip install 'specgrad[cpu]' (or apt-get install clang-19)"

@dataclass(frozen=True)
class Toolchain:
  compiler: Path  # what tinygrad runs as CC: one program, no arguments
  version: str    # first line of `compiler --version`
  cache: Path     # the sqlite file that holds compiled kernels

def machine() -> str:
  """The processor and its features as one line: code for `-march=native` is good for exactly this."""
  facts = [platform.system(), platform.machine()]
  with contextlib.suppress(OSError):  # no such file outside Linux
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    facts += [line for line in first.splitlines()
              if line.startswith(("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU "))]
  return " ".join(" ".join(facts).split())

def tinygrad_version() -> str:
  try: return importlib.metadata.version("tinygrad")
  except importlib.metadata.PackageNotFoundError: return "source"  # a checkout on PYTHONPATH

def version_of(compiler: Path) -> tuple[int, str] | None:
  """Major version and first line of `--version`, or None where that isn't clang: gcc may well be called cc or clang."""
  try:
    text = subprocess.run([compiler, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
                          check=True).stdout
  except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
    return None
  match = re.search(r"clang version (\d+)", text)
  return (int(match[1]), text.splitlines()[0].strip()) if match else None

def ziglang() -> Path | None:
  """The zig binary of the ziglang wheel. It carries a whole clang, and comes for every platform pip serves."""
  try: spec = importlib.util.find_spec("ziglang")
  except ValueError: return None
  for place in (spec.submodule_search_locations or ()) if spec else ():
    if (zig := Path(place) / "zig").is_file(): return zig
  return None

def wrap(zig: Path, cache_dir: Path) -> Path:
  """A program for CC, which takes no arguments of its own: `zig clang` is plain clang, with none of what `zig cc` adds
  (its own cache, other defaults, 60 ms a kernel). Written beside the kernels, since the package may be read-only."""
  text = f'#!/bin/sh\nexec {shlex.quote(str(zig))} clang -resource-dir {shlex.quote(str(zig.parent / "lib"))} "$@"\n'
  path = cache_dir / f"clang-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
  if path.is_file() and path.read_text() == text and os.access(path, os.X_OK): return path
  handle, name = tempfile.mkstemp(dir=cache_dir)
  with os.fdopen(handle, "w") as file: file.write(text)
  Path(name).chmod(0o700)
  Path(name).replace(path)  # whole or not at all, for a process that starts at the same moment
  return path

def cache_dirs(env: Mapping[str, str]) -> Iterator[Path]:
  """Folders that are ours to write, best first. Programs are run from there, so nobody else may own them."""
  with contextlib.suppress(RuntimeError):  # no home folder known
    yield Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or Path.home()) / ".cache") / "specgrad"
  yield Path(tempfile.gettempdir()) / f"specgrad-{os.getuid()}"
  yield Path(tempfile.mkdtemp(prefix="specgrad-"))

def usable(folder: Path) -> bool:
  try:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o022: return False
    with tempfile.TemporaryFile(dir=folder): return True
  except OSError:
    return False

def find_compiler(env: Mapping[str, str], folders: Iterator[Path] | None = None) -> tuple[Path, str]:
  """(program, version line): CC if it is a clang; else the first clang of 16 or later on PATH, by plain name and then
  newest first; else the one in the ziglang wheel; else an older clang.  Raises ToolchainError."""
  old: tuple[Path, str] | None = None
  refused: list[str] = []
  wanted = env.get("CC", "")
  for name in [wanted, "clang", *(f"clang-{n}" for n in range(NEWEST, OLDEST - 1, -1))]:
    if not name or (found := shutil.which(name, path=env.get("PATH", os.defpath))) is None: continue
    known = version_of(Path(found))
    if known is None or known[0] < OLDEST:
      refused.append(f"{name} is " + ("not clang" if known is None else f"clang {known[0]}"))
    elif known[0] >= GOOD or name == wanted: return Path(found), known[1]
    else: old = old or (Path(found), known[1])
  if (zig := ziglang()) is not None:
    for folder in filter(usable, cache_dirs(env) if folders is None else folders):  # one may forbid running programs
      wrapper = wrap(zig, folder)
      if (known := version_of(wrapper)) is not None: return wrapper, known[1]
    refused.append(f"{zig} has no working clang")
  if old is not None: return old
  raise ToolchainError(f"tinygrad's CPU device needs clang {OLDEST} or later ({GOOD} or later to be fast), found none"
                       + (f": {', '.join(refused)}" if refused else "") + f". {HINT}")

@functools.cache
def prepare() -> Toolchain:
  """Sets CC, CACHEDB and DEV (only where the user has not) for tinygrad and for the processes it starts. Call it before
  the first kernel; it also reaches a tinygrad that is imported but has compiled nothing.  Raises ToolchainError."""
  compiler, version = find_compiler(os.environ)
  folder = next(filter(usable, cache_dirs(os.environ)))
  identity = "\n".join((version, machine(), tinygrad_version()))
  cache = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.db"
  os.environ["CC"] = str(compiler)
  if not os.environ.get("DEV"): os.environ["DEV"] = "CPU"
  helpers: Any = sys.modules.get("tinygrad.helpers")
  if helpers is not None:  # imported before us: these three are looked at again later, everything else is settled
    helpers.getenv.cache_clear()                                # CC, read at each compile but remembered
    if not helpers.DEV.device: helpers.DEV.value = os.environ["DEV"]
    if helpers._db_connection is not None or os.environ.get("CACHEDB"): cache = Path(helpers.CACHEDB)
    else: helpers.CACHEDB = str(cache)                          # read when the file is opened
  elif os.environ.get("CACHEDB"): cache = Path(os.environ["CACHEDB"])
  os.environ["CACHEDB"] = str(cache)
  return Toolchain(compiler, version, cache)
