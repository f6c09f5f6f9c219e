"""A second process must get the same results, from disk, without scheduling or lowering anything."""
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Tensor
from tinygrad.helpers import Context
from tinygrad.uop.ops import UOp

from specgrad import lowering_cache

PROGRAM = """
import sys
import specgrad, numpy as np
from specgrad import lowering_cache
schedules, programs = lowering_cache.install()
assert lowering_cache.install() == (schedules, programs)
from tinygrad import Tensor, TinyJit, UOp, function
from tinygrad.helpers import Context
offset = Tensor([float(sys.argv[1])]).realize()   # a real buffer that functions below use without being given it
pair = Tensor(np.arange(32, dtype=np.float32).reshape(4, 8)).shard(("CPU", "CPU:1"), axis=1).realize()
cache = Tensor.zeros(16, 4).contiguous().realize()
@function(precompile=True, allow_implicit=True)
def block(x): return (x * 0.1 + offset).sigmoid()
@TinyJit
def step(x, pos):
  cache[pos:pos+1].assign(x).realize()
  return (block(cache[:8] @ x.T + offset) + 1).realize()
for i in range(4):
  out = step(Tensor([[1.0, 2.0, 3.0, i]]).realize(), UOp.variable("pos", 0, 15).bind(i))
print(out.numpy().tolist(), (pair @ pair.T).numpy().tolist(), Tensor.arange(40).reshape(5, 8).float().max(0).tolist())
with Context(NOOPT=1): print(Tensor.arange(40).reshape(5, 8).float().max(0).tolist())
print(schedules.n_read, schedules.n_written, programs.n_read, programs.n_written)
"""

def run(tmp_path: Path, offset: float = 3.0, **env: str) -> tuple[list[str], list[int]]:
  base = {k: v for k, v in os.environ.items() if k != "CACHEDB"}
  done = subprocess.run([sys.executable, "-c", PROGRAM, str(offset)], text=True, capture_output=True, timeout=200,
                        env={**base, "CACHEDB": str(tmp_path / "cache.db"), "PARALLEL": "0", **env})
  assert done.returncode == 0, done.stderr
  *results, counts = done.stdout.splitlines()
  return results, [int(n) for n in counts.split()]

def test_second_process_reads_everything(tmp_path: Path) -> None:
  first, (s_read, s_written, p_read, p_written) = run(tmp_path)
  assert s_read == p_read == 0 and s_written > 5 and p_written > 5
  second, counts = run(tmp_path)
  assert second == first and counts == [s_written, 0, p_written, 0]
  # what a program was called with is no part of what is kept
  other, counts = run(tmp_path, offset=-5.0)
  assert other[0] != first[0] and other[1] == first[1] and counts == [s_written, 0, p_written, 0]
  assert other[0] == run(tmp_path, offset=-5.0, CCACHE="0")[0][0]

def test_any_thread_may_compile() -> None:
  with ThreadPoolExecutor(1) as pool:
    for number in range(2, 4):  # the first kernel in this thread, the second in another
      job = lambda: (Tensor([1.0, 2.0, 5.0, 7.0, 11.0]) * (number / 8)).sqrt().square().tolist()  # noqa: B023
      got = job() if number == 2 else pool.submit(job).result()
      assert np.allclose(got, np.array([1, 2, 5, 7, 11]) * number / 8, rtol=1e-6)

def test_damaged_entries_count_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
  for bad in ("text", (), (1, 2), None):
    monkeypatch.setattr(lowering_cache, "diskcache_get", lambda table, key, bad=bad: bad)
    assert "key" not in lowering_cache.DiskDict("t", {})

def test_nothing_is_kept_that_holds_a_real_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
  kept: list[str] = []
  buffer = Tensor([1.0, 2.0]).clone().realize().uop
  monkeypatch.setattr(lowering_cache, "diskcache_put", lambda table, key, value, prepickled: kept.append(key))
  table = lowering_cache.DiskDict("t", {})
  table["a"] = buffer
  assert not kept and table.n_written == 0 and table["a"] is buffer
  table["b"] = UOp.const(2.0)
  assert len(kept) == 1
  with Context(CCACHE=0): table["c"] = UOp.const(3.0)
  assert len(kept) == 1 and "c" in table
  digest = table.digest("x")
  with Context(RING=2): assert table.digest("x") != digest
  with Context(DEBUG=1): assert table.digest("x") == digest
