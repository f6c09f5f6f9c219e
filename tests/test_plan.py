"""The plan against what the engine really allocates, against the published figures, and what it says to those who ask
too much."""
from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_make_checkpoint import full_folder, load_script

from specgrad import plan as module
from specgrad.checkpoint import Checkpoint, CheckpointError, expected_tensors
from specgrad.config import ConfigError
from specgrad.plan import (
  EXPERTS,
  GIB,
  INNER,
  INNER_IN,
  PLACEMENT,
  WHOLE,
  Place,
  PlanError,
  Split,
  as_dict,
  busiest,
  card,
  check,
  distinct,
  find_gpu,
  plan,
  report,
  role_of,
  splits,
  text,
)

ROOT = Path(__file__).parents[1]
PRO = find_gpu("RTX PRO 6000")

planned = functools.cache(plan)

@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Checkpoint: return Checkpoint.open(full_folder(tmp_path_factory))

@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Checkpoint:
  out = tmp_path_factory.mktemp("plan") / "tiny"
  load_script()["make"](out, "tiny", 0)
  return Checkpoint.open(out)

# -- against what is allocated ---------------------------------------------------------------------------------------

def bytes_of(value: Any, device: int = 0) -> int:
  """What a device holds of a tensor or matrix."""
  from specgrad.quant import on
  from specgrad.quant.twin import Weight
  mine = on(device, value)
  return sum(t.numel() * t.dtype.itemsize for t in (mine[1:] if isinstance(mine, Weight) else (mine,)) if t is not None)

@pytest.mark.parametrize("devices", [("CPU",), ("CPU", "CPU:1")], ids=["one", "two"])
@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_weights_are_what_loading_makes(which, devices, tiny):
  from specgrad.weights import DRAFT, TARGET, stream
  c = tiny if which == "tiny" else Checkpoint.open(ROOT / "specgrad" / "demo")
  values = [value for _, value in stream(c, devices, prefix=TARGET + DRAFT, packed=True)]
  made = planned(c, len(devices))
  for r in range(len(devices)):
    held = sum(bytes_of(v, r) for v in values)
    # a cut through columns that share a scale turns a small matrix into float32
    assert made.weights == held if len(devices) == 1 else made.weights == pytest.approx(held, rel=0.02), r
  assert made.tensors == len(c.tensors) and made.unloaded.tensors == 0
  stored = sum(p.stored for p in (*made.target.values(), *made.draft.values()))
  assert stored == c.total_bytes

@pytest.mark.parametrize("devices, kv", [(1, "sharded"), (2, "sharded"), (2, "replicated")])
@pytest.mark.parametrize("context, slots", [(64, 1), (1000, 3), (4096, 2)])
def test_caches_are_what_the_model_allocates(context, slots, devices, kv, tiny):
  from specgrad.models.deepseek_v4 import MAX_ROWS as LONGEST
  from specgrad.models.deepseek_v4 import Cache, round_up, rows
  made, names = planned(tiny, devices, context=context, kv=kv), ("CPU", "CPU:1")[:devices]
  assert LONGEST == module.CHUNK_ROWS
  cache = Cache(tiny.config, context, names, True, slots, kv == "sharded")
  ring = rows(names, slots, round_up(tiny.config.sliding_window + LONGEST, 32), tiny.config, True)
  for r in range(devices):
    got = dict.fromkeys(made.sequence(), 0)
    for layer in cache.layers:
      got["window rings"] += bytes_of(layer.window, r)
      for state, kind in ((layer.compressor, "compressed entries"), (layer.indexer, "indexer keys")):
        if state is None: continue
        got[kind] += bytes_of(state.entries, r)
        got["compressor rings"] += bytes_of(state.ring, r)
    got["draft rings"] = bytes_of(ring, r) * 3  # as DSpark makes them, one for each stage
    got["sampling"] = 3 * 4 * tiny.config.vocab_size * slots
    assert got == {kind: size * slots for kind, size in made.sequence().items()}

def test_sharding_halves_what_grows_with_the_context(full):
  one, two = (planned(full, 2, context=131072, kv=kv) for kv in ("replicated", "sharded"))
  assert one.token() == 2 * two.token() == pytest.approx(3514, abs=1)
  for kind in ("compressed entries", "indexer keys"):
    assert two.sequence()[kind] == pytest.approx(one.sequence()[kind] / 2, rel=1e-3)
  for kind in ("window rings", "compressor rings", "draft rings"): assert two.sequence()[kind] == one.sequence()[kind]
  assert one.weights == two.weights
  for context in (131, 130, 129, 4097):  # an odd number of entries still has a slot for each
    assert all(2 * b >= a for a, b in zip(replace(one, context=context).sequence().values(),
                                         replace(two, context=context).sequence().values()))

# -- against the published figures -----------------------------------------------------------------------------------

def test_real_weights_on_two_devices(full):
  made = planned(full, 2, users=16, context=131072)
  assert made.tensors == 72_317
  assert made.weights / GIB == pytest.approx(78.3, abs=0.6)
  mine = {name: p.stored for name, p in made.target.items()}
  assert mine["routed experts"] == 138_512_695_296 + 8_657_043_456
  assert mine["attention"] == 4_599_478_144 and mine["shared experts"] == 1_082_196_480
  assert mine["embedding"] == mine["head"] == 1_059_061_760
  assert mine["compressors"] == 525_722_624 and mine["indexers"] == 275_353_344
  assert mine["hyper-connections"] == 135_537_756 and mine["hash routes"] == 18_616_320
  assert mine["router"] == 90_218_496 and mine["norms"] == 712_704
  assert sum(mine.values()) == 156_015_698_140
  assert sum(p.stored for p in made.draft.values()) == 10_862_838_300

def test_real_target_use_fits_two_cards(full):
  made = planned(full, 2, users=16, context=131072)
  check(made, PRO, full)
  assert made.total() == made.weights + 16 * sum(made.sequence().values()) + made.workspace()
  lines = text(made, PRO).splitlines()
  assert any(line.split()[:2] == ["all", "72,317"] for line in lines)
  assert "  all" + f"{made.total() / GIB:.2f} GiB".rjust(65) in lines
  assert made.sequence()["compressed entries"] * 2 == pytest.approx(401.9e6 + 12.0e6, rel=2e-3)
  assert made.sequence()["indexer keys"] * 2 == pytest.approx(46.8e6, rel=2e-3)

def test_step_reads_what_the_roofline_says(full):
  assert [round(distinct(256, 6, t), 1) for t in (1, 2, 3, 4, 5, 6, 8)] == [6, 11.9, 17.6, 23.2, 28.6, 34.0, 44.2]
  plain = card(planned(full, 2, context=131072, depth=0), PRO)
  assert plain.target == pytest.approx(11.22e9, rel=2e-3) and plain.draft == 0
  with pytest.MonkeyPatch.context() as patch:                  # the published sum halves all that can be split
    patch.setattr(module, "DRAFT_PLACEMENT", {})
    made = card(made_of := plan(full, 2, context=8192, kv="replicated", placement=PLACEMENT | index_heads()), PRO)
  assert made.target == pytest.approx(27.3e9, rel=2e-3) and made.draft == pytest.approx(3.05e9, rel=0.02)
  twice = 5 * made_of.draft["draft bias table"].device / 4  # read whole by both; the published sum halves it, too
  assert made.device - twice == pytest.approx(15.8e9, rel=0.003) and made.steps_s == pytest.approx(114, abs=2)
  assert made.tok_s(6)[0] == pytest.approx(683, rel=0.02)
  ours = card(planned(full, 2, context=8192, kv="replicated"), PRO)    # whole: the indexers, the draft's attention
  assert ours.target == made.target and ours.draft == made.draft
  assert ours.device - made.device == pytest.approx(0.0943e9 + 0.1417 * GIB, rel=0.01)
  for it in (made, ours):
    assert it.device < it.device_busiest < 1.15 * it.device and it.steps_s_practical < 0.8 * it.steps_s

def test_kv_that_a_step_reads(full):
  made = card(planned(full, 2, context=131072, kv="replicated", depth=0), PRO)
  assert made.device_kv == pytest.approx((43 * 128 + 21 * 512 + 20 * 1024) * 584 + 21 * 32768 * 68, rel=1e-3)
  assert card(planned(full, 2, context=131072, depth=0), PRO).device_kv == pytest.approx(
    43 * 128 * 584 + (made.device_kv - 43 * 128 * 584) / 2, rel=1e-3)

INDEX = ("attn.indexer.wq_b", "attn.indexer.weights_proj")

def index_heads() -> dict[str, Place]: return {r: Place("indexers", Split(0, "index_n_heads")) for r in INDEX}

def test_exchanges(full):
  """2 a layer and 3 with all of the cache on every device, 4 a layer and 3 with a share on each. The stages of the draft
  attend by themselves."""
  made = lambda kv, **more: card(planned(full, 2, kv=kv, **{"context": 131072, **more}), PRO)
  blocks, ends = 43 * 2 + 3, 4  # embedding and logits, for target and draft
  assert made("replicated").exchange_count == blocks + ends <= 2 * 46 + 3
  assert made("sharded").exchange_count == blocks + ends + 2 * 41 <= 4 * 46 + 3  # 41 layers have entries: queries, their shares
  assert made("replicated", depth=0).exchange_count == 43 * 2 + 2
  assert made("sharded", depth=0).exchange_count == 43 * 2 + 2 + 2 * 41
  counts = {e.what: e.count for e in made("sharded").exchanges}
  assert (counts["queries"], counts["queries and index candidates"], counts["partial attention"]) == (20, 21, 41)
  near = {e.what: e.count for e in made("sharded", context=2048).exchanges}  # all entries are chosen: there is nothing to find
  assert near["queries"] == 41 and "queries and index candidates" not in near and sum(near.values()) == sum(counts.values())
  sizes = {e.what: e.size for e in made("sharded").exchanges}
  assert sizes["queries and index candidates"] - sizes["queries"] == 6 * 512 * 8
  assert sizes["partial attention"] - sizes["queries"] == 6 * 64 // 2 * 8
  assert card(planned(full, 1, context=131072), PRO).exchanges == []

def test_what_is_whole_on_every_device(full, monkeypatch):
  """And what it would save to split it: little."""
  ours = planned(full, 2).weights
  assert ours - plan(full, 2, placement=PLACEMENT | index_heads()).weights == pytest.approx(0.094e9, rel=0.03)
  monkeypatch.setattr(module, "DRAFT_PLACEMENT", {})
  assert ours - plan(full, 2).weights == pytest.approx(0.1417 * GIB, rel=0.01)

def test_experts_split_inside_are_even(full):
  halves = {"ffn.experts.w1": INNER, "ffn.experts.w2": INNER_IN, "ffn.experts.w3": INNER}
  inside = PLACEMENT | {role: Place("routed experts", split) for role, split in halves.items()}
  by_number, split = planned(full, 2), plan(full, 2, placement=inside)
  assert by_number.weights == split.weights
  made = card(split, PRO)
  assert made.device_busiest == made.device == card(by_number, PRO).device

def test_busiest_device():
  """Against drawing: rows choose 6 of 256 each, device 0 has the first half."""
  draw, most = random.Random(1), 0
  for _ in range(4000):
    chosen = {e for _ in range(6) for e in draw.sample(range(256), 6)}
    first = sum(e < 128 for e in chosen)
    most += max(first, len(chosen) - first)
  assert busiest(256, 6, 6, 2) == pytest.approx(most / 4000, rel=0.02)
  assert busiest(256, 6, 6, 1) == distinct(256, 6, 6) and busiest(4, 4, 9, 2) == 2

# -- the table -------------------------------------------------------------------------------------------------------

def test_every_role_has_a_place(full, tiny):
  for c in (full, tiny): assert {role_of(e.role) for e in expected_tensors(c.config).values()} == set(PLACEMENT)
  assert splits(full.config) == [1, 2, 4, 8] and splits(tiny.config) == [1, 2]

@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_devices_hold_all_and_little_twice(devices, full):
  made = planned(full, devices)
  everything, each = planned(full, 1).weights, made.weights
  assert devices * each - everything == pytest.approx((devices - 1) * 1.834e9, rel=2e-3)  # what is whole on each
  for name in ("routed experts", "head", "embedding"):
    assert made.target[name].device * devices == planned(full, 1).target[name].device

def test_without_a_draft(full):
  made = planned(full, 2, depth=0)
  assert made.tensors == 72_317 and made.unloaded.tensors == 4_705 and not made.draft
  assert made.weights < planned(full, 2).weights - 5e9 and "draft, not loaded" in text(made, PRO)
  assert made.sequence()["draft rings"] == 0

# -- what fits -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("users", [1, 16, 40])
@pytest.mark.parametrize("kv", ["sharded", "replicated"])
def test_largest_context_is_the_largest(users, kv, full):
  made = planned(full, 2, kv=kv)
  most = made.largest_context(PRO.memory, users)
  assert made.total(users, most) <= PRO.memory
  if most < full.config.max_position_embeddings: assert made.total(users, most + 128) > PRO.memory
  assert made.largest_context(GIB, users) == 0
  assert made.largest_context(10**15, users) == full.config.max_position_embeddings

@pytest.mark.parametrize("gpu, devices, users, context, kv, want", [
  ("RTX 5090", 2, 1, 4096, "sharded", ["31.84 GiB", "too much: weights 78.58 GiB", "8 x RTX 5090 or 2 x A100 80GB"]),
  ("RTX PRO 6000", 1, 1, 4096, "sharded", ["95.59 GiB", "2 x RTX PRO 6000 Blackwell or 1 x B200"]),
  ("RTX PRO 6000", 2, 64, 131072, "sharded", ["KV of 64 x 131072 tokens 17.2", "context=", "users="]),
  ("RTX PRO 6000", 2, 40, 131072, "replicated", ["kv=sharded", "context=", "users="]),
  ("RTX PRO 6000", 2, 1024, 131072, "sharded", ["users="])])
def test_too_much_names_what_fits(gpu, devices, users, context, kv, want, full):
  card_ = find_gpu(gpu)
  made = planned(full, devices, users, context, kv)
  with pytest.raises(PlanError) as e: check(made, card_, full)
  said = str(e.value)
  assert "\n" not in said and all(part in said for part in want) and "Nearest that fits: " in said
  tried = 0
  for hint in said.split("Nearest that fits: ")[1].split(" or "):   # every hint is true
    word = hint.split()[0]
    if word.startswith("kv="): check(replace(made, kv=word[3:]), card_, full)
    elif word.startswith("context="): check(replace(made, context=int(word[8:])), card_, full)
    elif word.startswith("users="): check(replace(made, users=int(word[6:])), card_, full)
    else: check(planned(full, int(word), users, context, kv), find_gpu(hint.split(" x ")[1]), full)
    tried += 1
  assert tried

def test_no_hint_where_nothing_fits(full):
  with pytest.raises(PlanError, match="no number of these devices, nor any in the table"):
    check(planned(full, 1, 1024, 1048576), find_gpu("1 GiB"), full)

@pytest.mark.parametrize("change, want", [
  ({"devices": 0}, "gpus=0, want 1 to"),
  ({"devices": 3}, "moe_intermediate_size=2048 can't be split evenly over 3 devices, want 1, 2, 4 or 8"),
  ({"devices": 16}, "o_groups=8 can't be split evenly over 16"),
  ({"users": 0}, "users=0"), ({"context": 1}, "context=1, want 2"),
  ({"context": 1048577}, "context=1048577, want 2 to 1048576"), ({"kv": "half"}, "kv=half, want sharded or replicated"),
  ({"depth": 6}, "depth=6, want 0 to 5"), ({"devices": True}, "gpus=True")])
def test_settings_that_no_memory_helps(change, want, full):
  with pytest.raises(PlanError) as e: plan(full, **{"devices": 2, **change})
  assert want in str(e.value) and "\n" not in str(e.value)

def test_gpus_by_name():
  assert find_gpu("rtx-pro 6000") is find_gpu("RTX PRO 6000 Blackwell") and find_gpu("h200").memory > 140 * GIB
  assert find_gpu("96 GiB").memory == 96 * GIB and find_gpu("24GB").memory == 24 * 10**9
  several = "several, want one of RTX PRO 6000 Blackwell, RTX 6000 Ada"
  for name, want in (("GTX 1080", "not known"), ("", "not known"), ("6000", several)):
    with pytest.raises(PlanError, match=want): find_gpu(name)

# -- what people see -------------------------------------------------------------------------------------------------

def test_report_is_quick_and_small(full):
  """As the command would do it: no device, no tinygrad, under 10 s and 1 GiB."""
  code = ("import re, sys, time; began = time.perf_counter(); from specgrad.plan import report\n"
          "text = report(sys.argv[1], 2, 16, 131072); print(text)\n"
          "memory = re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1]\n"     # ru_maxrss knows the parent's, too
          "print(time.perf_counter() - began, memory, 'tinygrad' in sys.modules)")
  out = subprocess.run([sys.executable, "-c", code, str(full.folder)], capture_output=True, text=True, check=True,
                       cwd=ROOT).stdout
  *lines, last = out.splitlines()
  seconds, kilobytes, imported = last.split()
  assert float(seconds) < 10 and int(kilobytes) < 2**20 and imported == "False"
  assert max(map(len, lines)) <= 100 and any("78.5" in line for line in lines)
  assert "largest context, 1 user: 1,048,576 tokens (the checkpoint's limit)" in lines

@pytest.mark.parametrize("gpu, devices, depth, kv", [
  ("96 GiB", 2, 5, "sharded"), ("H200", 2, 0, "replicated"), ("B200", 1, 3, "sharded")])
def test_text_fits_a_terminal(gpu, devices, depth, kv, full, tiny):
  for c in (full, tiny):
    said = text(planned(c, devices, 3, None, kv, depth), find_gpu(gpu))
    assert max(map(len, said.splitlines())) <= 100 and said.isascii()
    assert ("no bandwidth is known" in said) == (gpu == "96 GiB")

def test_dict_is_json_and_agrees(full):
  made = planned(full, 2, users=16, context=131072)
  read = json.loads(json.dumps(as_dict(made, PRO)))
  assert read["total"] == read["weights"] + read["kv_total"] + read["workspace"] and read["fits"] is True
  assert sum(p["device"] for p in (*read["target"].values(), *read["draft"].values())) == read["weights"]
  assert list(read["card"]["tok_s_by_tokens_per_step"]) == ["1", "2", "3", "4", "6"]

def test_report_passes_on_what_is_wrong(tmp_path, tiny):
  with pytest.raises(CheckpointError): report(tmp_path, 1)
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ConfigError): report(tmp_path, 1)
  with pytest.raises(PlanError, match="is not known"): report(tmp_path, 1, gpu_name="toaster")
  with pytest.raises(PlanError, match="want 1 or 2$"): report(tiny.folder, 4)
  assert "tokens" in report(tiny.folder, 2)

def test_more_never_takes_less(full):
  """Memory grows with users and context; the sum is of what is shown."""
  made = planned(full, 2)
  totals = [made.total(u, c) for u in (1, 2, 16) for c in (128, 4096, 131072)]
  assert all(made.total(u, c) < made.total(u + 1, c) and made.total(u, c) < made.total(u, c + 4096)
             for u in (1, 7) for c in (128, 5000)) and len(set(totals)) == len(totals)

def test_placement_names():
  assert PLACEMENT["attn.wq_b"].split.axis == 0 and PLACEMENT["attn.wo_b"].split.axis == 1
  assert PLACEMENT["ffn.experts.w1"].split == EXPERTS and PLACEMENT[INDEX[0]].split == WHOLE
  for role, axis in (("attn.wq_b.weight", 0), ("attn.wo_b.scale", 1), ("attn.attn_sink", 0), ("ffn.shared_experts.w2.weight", 1)):
    for name in ("layers.3.", "mtp.0."):
      want = None if name == "mtp.0." and role.startswith("attn.") else axis
      assert module.place_of(name + role, role).split.axis == want, (name, role)
