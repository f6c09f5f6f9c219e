"""Keeps tinygrad's schedules and lowered kernels on disk, so that a second start neither schedules nor lowers again.

tinygrad 0.14 stores compiled objects, but works out their source anew in every process: about 70 ms a kernel in Python,
most of a start that finds all objects compiled. Both results sit in dicts keyed by content; here these get a disk.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import tinygrad.codegen as codegen
import tinygrad.engine.realize as realize
import tinygrad.helpers as helpers
import tinygrad.schedule as schedule
from tinygrad.helpers import CCACHE, DEBUG, VIZ, ContextVar, diskcache_get, diskcache_put
from tinygrad.uop.ops import Ops, UOp

from specgrad.toolchain import machine, prepare, tinygrad_version

# Context variables that can't change a schedule or a program. All others are part of the key: tinygrad's own keys hold
# fewer (RING and SPLIT_REDUCEOP are missing), which is right for one process and wrong for a file that outlives it.
HARMLESS = {
  "ALLOW_DEVICE_USAGE", "CACHELEVEL", "CAPTURE_PROCESS_REPLAY", "CAPTURING", "CCACHE", "DEBUG", "DEBUG_RANGEIFY", "JIT",
  "JIT_BATCH_SIZE", "LRU", "NO_COLOR", "NO_MEMORY_PLANNER", "NULL_ALLOW_COPYOUT", "PARALLEL", "PROFILE", "SCACHE",
  "REWRITE_STACK_LIMIT", "SPEC", "TRACEMETA", "TRACK_MATCH_STATS", "VALIDATE_WITH_CPU", "VIZ"}
# Plain environment variables that its scheduler and code generator read.
SETTINGS = ("ALIGNED", "ALLOW_HALF8", "DMC", "EXPAND_SSA", "HCQ2", "LATE_ALLREDUCE", "MV", "MV_BLOCKSIZE",
            "MV_ROWS_PER_THREAD", "MV_THREADS_PER_ROW", "OCCUPANCY_FLOOR", "REDUCEOP_SPLIT_SIZE",
            "REDUCEOP_SPLIT_THRESHOLD", "RING_ALLREDUCE_THRESHOLD", "SUM_DTYPE", "THREADS", "CUDA_PATH", "LLVM_PATH")

UNREADABLE = (sqlite3.Error, pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError,
              TypeError, ValueError)  # what pickle.loads may raise for bytes it does not like

@functools.cache
def identity() -> str:
  """What the results depend on and no process can change: versions, compiler, processor, environment."""
  versions = [tinygrad_version(), prepare().version, machine()]
  return "\n".join(versions + [f"{name}={os.environ.get(name)}" for name in SETTINGS])

def context() -> str:
  return "\n".join(f"{name}={var.value!r}" for name, var in sorted(ContextVar._cache.items()) if name not in HARMLESS)

class DiskDict(dict[Any, UOp]):
  """A dict of UOps whose misses are looked up in, and whose new entries go to, one table of tinygrad's cache file."""
  def __init__(self, table: str, entries: dict[Any, UOp]):
    super().__init__(entries)
    self.table, self.absent = table, set[str]()
    self.n_read = self.n_written = 0

  def digest(self, key: Any) -> str:
    return hashlib.sha256("\n".join((identity(), context(), repr(key))).encode()).hexdigest()

  def get(self, key: Any, default: Any = None) -> Any:
    if (value := super().get(key)) is not None: return value
    # someone who wants to see sources and rewrites must get the real thing
    if not CCACHE or DEBUG >= 3 or VIZ or (digest := self.digest(key)) in self.absent: return default
    try: value = diskcache_get(self.table, digest)
    except UNREADABLE: value = None  # a file that is locked, damaged or from other code is as good as an empty one
    if not isinstance(value, tuple) or not value or not isinstance(value[-1], UOp):
      self.absent.add(digest)
      return default
    self.n_read += 1
    super().__setitem__(key, value[-1])
    return value[-1]

  def __contains__(self, key: object) -> bool: return self.get(key) is not None

  def __setitem__(self, key: Any, value: UOp) -> None:
    if super().get(key) is value: return  # tinygrad stores what it lowers in this process twice
    super().__setitem__(key, value)
    nodes = tuple(value.toposort())  # sources first, so that pickling never has to recurse; the last one is the value
    # a real buffer would drag its bytes along, and its name means another buffer in the next process
    if not CCACHE or any(node.op is Ops.BUFFER and node.realized is not None for node in nodes): return
    try: diskcache_put(self.table, self.digest(key), pickle.dumps(nodes), prepickled=True)
    except (sqlite3.Error, pickle.PicklingError, AttributeError, TypeError): return  # kept in memory only
    self.n_written += 1

def open_file() -> sqlite3.Connection:
  """As tinygrad opens it, but for every thread: its own connection serves only the thread that compiled first, so that
  a server whose worker meets a new kernel would fail. (The lock for one kernel at a time is the caller's.)"""
  Path(helpers.CACHEDB).parent.mkdir(parents=True, exist_ok=True)
  connection = sqlite3.connect(helpers.CACHEDB, timeout=60, isolation_level="IMMEDIATE", check_same_thread=False)
  with contextlib.suppress(sqlite3.OperationalError): connection.execute("PRAGMA journal_mode=WAL").fetchone()
  connection.execute("PRAGMA synchronous=NORMAL")
  return connection

def install() -> tuple[DiskDict, DiskDict]:
  """Puts the disk behind tinygrad's two dicts, once; returns them (schedules, programs). To undo: delete the file."""
  schedules, programs = schedule.schedule_cache, codegen.to_program_cache
  if not isinstance(schedules, DiskDict): schedules = DiskDict("specgrad_schedule", schedules)
  if not isinstance(programs, DiskDict):
    helpers._db_connection = open_file()
    programs = DiskDict("specgrad_program", programs)
  schedule.schedule_cache = schedules
  codegen.to_program_cache = realize.to_program_cache = programs  # realize imported the dict by name
  return schedules, programs
