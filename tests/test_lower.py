"""scripts/lower.py: a small model's step on devices that are not there, counted by hand; and what is read of ptxas."""
from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tinygrad.device import Buffer
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, ProgramInfo, UOp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import lower
import make_checkpoint

from specgrad import plan as planning
from specgrad import quant
from specgrad.checkpoint import Checkpoint

CONTEXT = 1024                                             # long enough for the indexer to choose
DRAFT, MODEL = 3, 3                                        # stages and layers

@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
  """Random weights of three layers, one of each kind, and three draft stages."""
  layers = {"num_hidden_layers": MODEL, "compress_ratios": [0, 4, 16] + [0] * DRAFT, "num_hash_layers": 1,
            "dspark_target_layer_ids": [0, 1, 2]}
  out = tmp_path_factory.mktemp("lower") / "few"
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(make_checkpoint.SIZES, "few", make_checkpoint.SIZES["tiny"] | layers)
    make_checkpoint.make(out, "few", 0)
  return out

@pytest.fixture(scope="module")
def run(small) -> Any:
  """run(gpus, kv) -> what is found, without a compiler."""
  known: dict[tuple[int, str], dict[str, Any]] = {}

  def call(gpus: int, kv: str) -> dict[str, Any]:
    if (gpus, kv) not in known:
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        known[gpus, kv] = lower.lower(lower.Headers.open(small), gpus, kv, 1, CONTEXT, "sm_120", lambda text: None)
    return known[gpus, kv]
  return call

def limits(found: dict[str, Any]) -> dict[str, bool]: return {x["what"]: x["holds"] for x in found["limits"]}

# ------------------------------------------------------------------------------------------------ a whole step
def nodes(alone: bool, sharded: bool = False) -> int:
  """Of one device. A product is two kernels, the laying out of what it is made with and the product, and what is laid out once
  serves all products of a kind; shares are copied, and added up where streams are updated."""
  copy, exchange = (0, 0) if alone else (1, 2)             # what needs the sum, or parts side by side, as a tensor: a kernel more
  experts = 2 + 1 + 5 + copy                               # router's product, choice; plan, up, middle, down, sum
  own = 2 + 1 + 2 + 1 + 1 + 1                              # wq_a, norm, wq_b, rotation; wkv, row
  layer = 6 + own + 2 + 2 + 2 + copy + experts             # streams; attention: shares and their sum, wo_a, wo_b
  stage = layer - copy                                     # on each device as a whole
  compressor = 2 + 1
  indexer = 1 + 1 + 1 + 1 + 1 + 2                          # compressor, queries, their rotation, weights; scores, choice
  shares = 2 * (2 + 1) + (1 + 1) if sharded else 0         # queries and shares copied, shares put together; of the indexer best ones, too
  embed = 1 + (0 if alone else exchange + 1)               # a sum of shares of one stream, then of four streams
  head = 2 + 2 + exchange
  propose = 1 + embed + DRAFT * stage + head + 5 * (1 + 2) + 1           # ids; each place: bias, and argmax of shares; side by side
  settle = 1 + embed + MODEL * layer + 2 * compressor + indexer + shares + head + 2 + 1   # ids; argmax; what stands, and what is emitted
  commit = 1 + 2 + 1 + 1 + 2 * DRAFT                       # taps, their product and norm; wkv and row of each stage
  return 6 + propose + settle + commit + 4                 # rotary tables; position and newest token, computed, then stored

def test_replicated_step_is_one_graph_with_the_nodes_and_exchanges_counted_by_hand(run):
  found = run(2, "replicated")
  assert (found["graphs"], found["updates"]) == (1, 0)
  assert found["nodes"] == dict.fromkeys(("NULL", "NULL:1"), nodes(alone=False))
  # embedding and head, attention and experts of a layer; of the draft the same, but no attention
  assert found["exchanges"] == found["exchanges_planned"] == (2 + 2 * MODEL) + (2 + DRAFT)
  assert found["copies"] == dict.fromkeys(("NULL", "NULL:1"), found["exchanges"])
  assert found["exchange_bytes"] == found["exchange_bytes_planned"]
  assert {x["what"]: x["most"] for x in found["limits"]}["exchanges"] == 2 * (MODEL + DRAFT) + 3
  assert {k: v for k, v in limits(found).items() if not v} == {"bytes read over the floor": False}   # so small a model has few weights

def test_sharded_step_waits_twice_more_in_each_compressed_layer(run):
  found = run(2, "sharded")
  assert (found["graphs"], found["updates"]) == (1, 0)
  assert found["nodes"] == dict.fromkeys(("NULL", "NULL:1"), nodes(alone=False, sharded=True))
  assert found["exchanges"] == found["exchanges_planned"] == (2 + 2 * MODEL + 2 * 2) + (2 + DRAFT)
  assert found["copies"]["NULL"] == found["exchanges"] + 1   # the indexer's candidates travel beside the queries
  assert {x["what"]: x["most"] for x in found["limits"]}["exchanges"] == 4 * (MODEL + DRAFT) + 3

def test_alone_there_is_nothing_to_exchange(run):
  found = run(1, "sharded")
  assert found["nodes"] == {"NULL": nodes(alone=True)}
  assert (found["exchanges"], found["exchange_bytes"], found["copies"]) == (0, 0, {"NULL": 0})

@pytest.mark.parametrize("gpus", [1, 2])
def test_each_weight_is_read_as_often_as_the_plan_says(run, small, gpus):
  made = planning.plan(Checkpoint.open(small), gpus, 1, CONTEXT, "replicated")
  card = planning.card(made, planning.GPU("", 0), 1, CONTEXT)
  read = run(gpus, "replicated" if gpus == 2 else "sharded")["read"]
  again = DRAFT * 128 * (256 + 2)                          # the draft's wkv, for what it proposes and for what is committed
  of_ids = (6 + 5) * 256 * 2 + 5 * 32 * 2 + 6 * 2 * 4      # rows of embedding, bias table, hash routes
  assert read["routed experts"] + read["other weights"] == pytest.approx(card.device - card.device_kv + again + of_ids, rel=5e-4)

def test_kernels_carry_no_figures_where_there_is_no_compiler(run):
  found = run(2, "replicated")
  assert all(k["usage"] is None for k in found["kernels"]) and sum(k["name"].startswith("experts_up") for k in found["kernels"]) == 4
  names = [k["name"] for k in found["kernels"]]
  assert any(name.startswith("hc_mix_") for name in names) and json.loads(json.dumps(found)) == found

def test_the_table_of_kernels_is_as_before(run):
  run(2, "replicated")
  assert "NULL" not in quant.KERNELS

def test_mistakes_end_in_one_line(small, capsys):
  for flags, text in ((["--gpus", "3"], "can't be split evenly over 3 devices"), (["--context", "1"], "context=1, want 2 to"),
                      (["--arch", "sm_120a"], "--arch=sm_120a, want sm_ and a number"), (["--users", "0"], "users=0, want 1 to")):
    assert lower.main(["--model", str(small), "--context", "1024", *flags]) == 2
    out = capsys.readouterr()
    assert out.err.startswith("lower: error: ") and text in out.err and out.err.count("\n") == 1

def test_the_exit_status_says_whether_all_limits_hold(small, monkeypatch, capsys):
  for holds, status in ((True, 0), (False, 1)):
    monkeypatch.setattr(lower, "lower", lambda *args, holds=holds: {"holds": holds})
    assert lower.main(["--model", str(small), "--gpus", "1"]) == status
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["schema"], said["arch"], said["holds"]) == ("specgrad.lower/1", "sm_120", holds) and "--gpus 1" in said["command"]
  assert lower.Limit("x", 900, 900).holds and not lower.Limit("x", 900.5, 900).holds

# ------------------------------------------------------------------------------------------------ chains of copies
def kernel(name: str, outs: tuple[int, ...], ins: tuple[int, ...], grid: tuple[int, int, int] = (1, 1, 1)) -> UOp:
  return UOp(Ops.PROGRAM, arg=ProgramInfo(name=name, global_size=grid, local_size=(32, 1, 1), globals=(), outs=outs, ins=ins))

def values(device: str, n: int = 64) -> Buffer: return Buffer(device, n, dtypes.uint8)

def test_copies_side_by_side_are_one_exchange_and_those_in_a_row_are_two():
  a, b, a2, b2, s, t, s2 = (values(d) for d in ("NULL", "NULL:1", "NULL:1", "NULL", "NULL", "NULL:1", "NULL:1"))
  copy = UOp(Ops.COPY, src=(UOp.const(0, dtypes.uint8),), arg="NULL")
  add = kernel("add", (0,), (1, 2))
  calls = [(0, copy, [a2, a]), (0, copy, [b2, b]), (0, add, [s, a, b2]), (0, add, [t, b, a2]), (0, copy, [s2, s])]
  found = lower.nodes(calls, {})
  assert [n.exchange for n in found] == [1, 1, 1, 1, 2]
  assert [n.chain for n in found] == [1, 1, 2, 2, 3]
  assert [n.device for n in found] == ["NULL:1", "NULL", "NULL", "NULL:1", "NULL:1"]
  assert [n.reads for n in found] == [{"copies": 64}, {"copies": 64}, {"values": 128}, {"values": 128}, {"copies": 64}]

def test_a_node_waits_for_what_it_overwrites_and_for_neighbours_only_where_allocations_count():
  whole = values("NULL", 256)
  left, right = whole.view(64, dtypes.uint8, 0), whole.view(64, dtypes.uint8, 128)
  calls = [(0, kernel("a", (0,), (1,)), [left, values("NULL")]), (0, kernel("b", (0,), (1,)), [right, values("NULL")]),
           (0, kernel("c", (0,), (1,)), [values("NULL"), left]), (0, kernel("d", (0,), ()), [left])]
  assert [n.chain for n in lower.nodes(calls, {})] == [1, 1, 2, 3]
  assert [n.chain for n in lower.nodes(calls, {}, whole=True)] == [1, 2, 3, 4]

def test_what_a_kernel_reads():
  weight, cache, x, out = (values("NULL", n) for n in (1000, 500, 10, 20))
  held = {id(weight): lower.Held("other weights", 400), id(cache): lower.Held("caches", 50)}
  read = lambda *call: lower.nodes([(0, *call)], held)[0].reads
  assert read(kernel("linear_6", (0,), (1, 2, 2), (8, 3, 1)), [out, x, weight]) == {"values": 10, "other weights": 1200}
  assert read(kernel("experts_up", (0,), (1, 2), (8, 3, 1)), [out, x, weight]) == {"values": 10, "other weights": 400}
  assert read(kernel("kv_write", (0,), (0, 1)), [cache, x]) == {"values": 10}            # what it writes it does not read
  assert read(kernel("attend", (0,), (1, 2)), [out, cache, x]) == {"caches": 50, "values": 10}

def test_experts_are_read_once_for_each_eight_of_their_rows():
  assert lower.passes(256, 6, 6) == pytest.approx(planning.distinct(256, 6, 6))
  assert lower.passes(4, 4, 8) == pytest.approx(4) and lower.passes(4, 4, 9) == pytest.approx(8)
  assert planning.distinct(8, 2, 64) < lower.passes(8, 2, 64) < 8 * 64 * 2 / 8

# ------------------------------------------------------------------------------------------------ what ptxas says
PTXAS = """ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function 'linear_6' for 'sm_120'
ptxas info    : Function properties for linear_6
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers{shared}
ptxas info    : Compile time = 99.823 ms
"""

def test_ptxas_is_understood():
  text = PTXAS.format(stack=0, stores=0, loads=0, registers=44, shared=", 512 bytes smem")
  assert lower.parse(text) == lower.Usage(registers=44, shared=512, stack=0, spilled=0)
  text = PTXAS.format(stack=104, stores=96, loads=128, registers=255, shared="")
  assert lower.parse(text) == lower.Usage(registers=255, shared=0, stack=104, spilled=224)
  with pytest.raises(ValueError, match="no registers"): lower.parse("ptxas info    : 0 bytes gmem")

@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_a_kernel_that_spills_is_seen_and_one_that_is_wrong_is_named():
  many = "".join(f"float x{i} = a[{i} * n + threadIdx.x];" for i in range(64)) + "__syncthreads(); a[0] = " + \
    "+".join(f"x{i} * x{63 - i}" for i in range(64)) + ";"
  spills = f'extern "C" __global__ void __launch_bounds__(1024) k(float* a, int n) {{ __shared__ float s[8]; s[n] = n; {many} ' \
    f'for (int i = 0; i < n; i++) {{ {"".join(f"a[{i} + i] = x{i} + s[i & 7];" for i in range(64))} }} }}'
  found = lower.compiled(spills, "sm_120")
  assert found.registers <= 64 and found.shared >= 32 and found.spilled > 0 and found.stack > 0
  with pytest.raises(ValueError, match=r"(?s)nvcc -arch=sm_120: .*error"): lower.compiled("__global__ void k( {}", "sm_120")
