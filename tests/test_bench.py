"""The measuring script, run as its user runs it: does it measure what it says? Never how fast anything is."""
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import bench as script  # noqa: E402

HEAD = {"schema", "date", "command", "commit", "python", "tinygrad", "device", "model", "fingerprint", "parameters",
  "draft_parameters", "numerics", "draft", "depth", "verifier", "repeat", "max_tokens", "seed", "prefill", "decode",
  "speculative", "roofline", "sweep", "best_depth", "contexts", "warnings"}
CELL = {"prompt_kind", "temperature", "depth", "verifier", "prompts", "repeat", "tokens", "steps", "tok_s",
  "tok_s_min", "tok_s_max", "steps_s", "steps_s_min", "steps_s_max", "ttft_ms", "tpot_ms", "drafted", "accepted",
  "dropped", "tokens_per_step", "acceptance_rate", "acceptance_by_place", "accepted_by_place", "drafted_by_place",
  "plain", "speedup", "identical", "roofline_share"}
GREEDY = {"fixed_width", "differ_fixed_width", "differ_width_1"}

def bench(*flags: str) -> tuple[int, str, str]:
  done = subprocess.run([sys.executable, "scripts/bench.py", *flags], capture_output=True, text=True, cwd=ROOT)
  return done.returncode, done.stdout, done.stderr

@pytest.fixture(scope="module")
def checkpoint(shared: Path) -> Path: return shared / "golden" / "dspark_w16" / "ckpt"

def check_speeds(x: dict[str, Any], replies: int) -> None:
  """The identities that hold whatever the clock says."""
  for name in ("tok_s", "steps_s"): assert 0 < x[f"{name}_min"] <= x[name] <= x[f"{name}_max"]
  assert x["tokens"] >= x["steps"] >= replies and x["ttft_ms"] > 0
  assert x["tpot_ms"] == pytest.approx(1e3 / x["tok_s"], rel=1e-3)

def test_a_checkpoint_with_a_draft(checkpoint: Path) -> None:
  flags = ["--model", str(checkpoint), "--prefill", "20", "150", "--tokens", "24", "--prompts", "2", "--repeat", "2"]
  code, out, err = bench(*flags)
  assert code == 0, err
  *table, last = out.splitlines()
  result = json.loads(last)
  assert set(result) == HEAD
  assert result["schema"] == "specgrad.bench/1" and result["command"].startswith("python scripts/bench.py --model")
  assert re.fullmatch(r"unknown|[0-9a-f]{40}(-modified)?", result["commit"])
  assert (result["draft"], result["depth"], result["numerics"], result["max_tokens"]) == ("dspark", 2, "w4a8", 24)
  assert result["parameters"] > result["draft_parameters"] > 0

  assert [x["prompt_tokens"] for x in result["prefill"]] == [20, 150]
  for x in result["prefill"]: assert 0 < x["tok_s_min"] <= x["tok_s"] <= x["tok_s_max"] and x["ttft_ms"] > 0
  check_speeds(result["decode"], 4)
  assert result["decode"]["tokens"] == result["decode"]["steps"]  # plain: one token a step

  cells = result["speculative"]
  assert [(x["prompt_kind"], x["temperature"]) for x in cells] == [("random", 0), ("random", 1)]  # no tokenizer
  for x in cells:
    assert set(x) == CELL | (GREEDY if x["temperature"] == 0 else set())
    check_speeds(x, 4)
    check_speeds(x["plain"], 4)
    assert x["plain"]["tokens"] == x["plain"]["steps"]
    assert x["tokens"] + x["dropped"] == x["steps"] + x["accepted"] and 0 <= x["dropped"] <= 4 * 2
    assert x["tokens_per_step"] == pytest.approx(1 + x["accepted"] / x["steps"], abs=1e-5)
    assert x["accepted"] == sum(x["accepted_by_place"]) and x["drafted"] == sum(x["drafted_by_place"]) == 2 * x["steps"]
    assert x["acceptance_rate"] == pytest.approx(x["accepted"] / x["drafted"], abs=1e-5)
    for rate, a, d in zip(x["acceptance_by_place"], x["accepted_by_place"], x["drafted_by_place"]):
      assert rate == pytest.approx(a / d, abs=1e-5)
    assert x["accepted_by_place"] == sorted(x["accepted_by_place"], reverse=True)  # none without those before it
    assert x["speedup"] == pytest.approx(x["tok_s"] / x["plain"]["tok_s"], rel=1e-3)
  greedy, sampled = cells
  assert greedy["identical"] is True and greedy["fixed_width"] == 3
  assert greedy["differ_fixed_width"] == greedy["differ_width_1"] == 0 and sampled["identical"] is None
  assert "rule greedy" in greedy["verifier"] and "rule rejection" in sampled["verifier"]
  assert "depth 0" in greedy["plain"]["verifier"]
  assert [(c["users"], c["depth"]) for c in result["roofline"]] == [(1, 0), (1, 2)]
  none, two = result["roofline"]
  assert two["target_bytes"] > none["target_bytes"] > 0 == none["draft_bytes"] < two["draft_bytes"]
  assert two["steps_s_ceiling"] == pytest.approx(1e9 * two["read_gb_s"] / two["bytes_a_device"], rel=1e-6)
  for x in cells: assert x["roofline_share"] == pytest.approx(x["steps_s"] / two["steps_s_ceiling"], rel=1e-6)
  assert out.index("roofline, before the stopwatch") < out.index("plain decoding after") < out.index("of the ceiling at depth 2")
  assert (result["sweep"], result["best_depth"], result["contexts"]) == ([], None, [])
  rows = [line for line in table if line.startswith("random ")]
  assert len(rows) == 2 and rows[0].endswith(" yes") and rows[1].endswith(" -")
  assert any("shorter than 200" in text for text in result["warnings"])
  assert [f"warning: {text}" for text in result["warnings"]] == [line for line in table if line.startswith("warning")]

# ------------------------------------------------------------------------------------------------ with made replies
def reply(ids: list[int], **stats: float) -> SimpleNamespace:
  return SimpleNamespace(ids=ids, stats=SimpleNamespace(**stats))

def test_rates_of_a_run_are_pooled_by_time() -> None:
  one = reply([], tokens=11, first_step=3, steps=5, seconds=2.0, ttft=0.1)
  two = reply([], tokens=9, first_step=2, steps=2, seconds=0.5, ttft=0.3)
  run = script.Run([one, two])
  assert (run.tok_s, run.steps_s, run.ttft_ms) == (pytest.approx(6), pytest.approx(2), pytest.approx(200))
  assert script.spread("x", [3.0, 1.0, 7.0]) == {"x": 3.0, "x_min": 1.0, "x_max": 7.0}

@pytest.mark.parametrize("speculative, plain, wide, differ_fixed_width, differ_width_1", [
  ([[1, 2], [3, 4]], [[1, 2], [3, 4]], [[1, 2], [3, 4]], 0, 0),
  ([[1, 9], [3, 4]], [[1, 2], [3, 4]], [[1, 2], [3, 4]], 1, 1),
  ([[1, 2], [3, 4]], [[1, 2], [3, 9]], [[1, 2], [3, 4]], 0, 1),  # a near-tie
  ([[1, 2], [3]], [[1, 2], [3, 4]], [[1, 2], [3, 4]], 1, 1),     # it ended early
])
def test_a_difference_is_counted(speculative: Any, plain: Any, wide: Any, differ_fixed_width: int,
                                 differ_width_1: int) -> None:
  """Prompt i is [i]; the second run shows it, the first is right."""
  asked = []

  def once(model: str, ids: list[int], tokens: int, **settings: int) -> SimpleNamespace:
    asked.append((model, tokens, settings))
    return reply(wide[ids[0]])
  runs = lambda *many: [script.Run([reply(ids) for ids in one]) for one in many]
  bench = SimpleNamespace(depth=5, plain="plain", args=SimpleNamespace(tokens=2), once=once)
  found = script.Bench.identical(bench, [[0], [1]], runs(wide, speculative), runs(plain, plain))
  assert found == {"identical": differ_fixed_width + differ_width_1 == 0, "fixed_width": 6,
                   "differ_fixed_width": differ_fixed_width, "differ_width_1": differ_width_1}
  assert asked == [("plain", 2, {"depth": 0, "fixed_width": 6})] * 2

def test_a_reply_that_compiled_is_made_again() -> None:
  made = []

  def generate(ids: list[int], max_tokens: int) -> str:
    made.append(list(held))
    held.append(ids)
    if len(made) < 3: bench.progress("compile", 0, 1)
    return f"reply {len(made)}"
  bar = SimpleNamespace(update=lambda: None, set_postfix_str=lambda text: None)
  bench = SimpleNamespace(bar=bar, compiled=False)
  bench.progress = lambda *stage: script.Bench.progress(bench, *stage)
  held = [1]
  model = SimpleNamespace(generate=generate, reset=held.clear)
  assert script.Bench.once(bench, model, [7], 3) == "reply 3"
  assert made == [[]] * 3  # cold each time

# ------------------------------------------------------------------------------------------------ depth, contexts
def test_the_best_depth_is_that_of_the_mix() -> None:
  """Twice as fast and half as fast: depth 1 for code alone, depth 0 for both alike (1 / (.25 + 1) of plain)."""
  cells = [{"prompt_kind": k, "depth": d, "speedup": s}
           for k, d, s in (("code", 1, 2.0), ("chat", 1, .5), ("random", 1, 9.0), ("code", 3, 1.5), ("chat", 3, .9))]
  assert script.best_depth(cells, {"code": 1.0}, True)["depth"] == 1
  both = script.best_depth(cells, None, True)
  assert both["depth"] == 3 and both["mix"] == {"code": .5, "chat": .5}
  assert both["speedup_by_depth"] == {0: 1.0, 1: pytest.approx(.8), 3: pytest.approx(1.125)}
  assert script.best_depth(cells[:3], None, True)["depth"] == 0 and script.best_depth(cells[:3], None, False)["depth"] == 1
  with pytest.raises(ValueError, match="'verse' was not measured"): script.best_depth(cells, {"verse": 1.0}, True)

def test_a_sweep_and_contexts(checkpoint: Path) -> None:
  code, out, err = bench("--model", str(checkpoint), "--prefill", "--tokens", "8", "--prompts", "1", "--repeat", "1",
                         "--temperature", "0", "--depth", "0,1,2,9", "--contexts", "20,70")
  assert code == 0, err
  result = json.loads(out.splitlines()[-1])
  assert [(c["depth"], c["identical"]) for c in result["sweep"]] == [(1, True), (2, True)]
  best = result["best_depth"]["0"]
  assert list(best["speedup_by_depth"]) == ["0", "1", "2"] and f"best depth at temperature 0: {best['depth']} " in out
  assert [c["depth"] for c in result["speculative"]] == ([best["depth"]] if best["depth"] else [])
  assert [(c["context"], c["depth"]) for c in result["contexts"]] == [(20, 2), (70, 2)]
  assert "depth 9 left out: the draft's block has 5 places" in result["warnings"]
  assert sorted({(c["context"], c["depth"]) for c in result["roofline"]}) == [(20, 2), (68, 0), (68, 1), (68, 2), (70, 2)]

# ------------------------------------------------------------------------------------------------ other ways to call it
def test_plain_decoding_alone(checkpoint: Path) -> None:
  code, out, err = bench("--model", str(checkpoint), "--draft", "none", "--prefill", "--tokens", "8", "--prompts", "3",
                         "--repeat", "2")
  assert code == 0, err
  result = json.loads(out.splitlines()[-1])
  assert (result["draft"], result["depth"], result["prefill"], result["speculative"]) == ("none", 0, [], [])
  assert result["decode"]["tokens"] == result["decode"]["steps"] == 48 and "q none" in result["decode"]["verifier"]

@pytest.mark.parametrize("flags, text", [
  (["--depth", "9"], "depth=9, want 0 to 5"), (["--depth", "1,x"], "--depth=1,x, want numbers such as 1,3"),
  (["--contexts", "9000"], "--contexts=9000, want at most"), (["--scenario", "cc2"], "--scenario: 'cc2', want some of cc1, cc16"),
  (["--url", "localhost:1"], "--url: want --model-name, and --scenario"), (["--mix", "code"], "--mix=code, want such as"),
  (["--draft", "none", "--depth", "2"], "--depth=2: there is no draft"),
  (["--kinds", "code"], "code is not there, this checkpoint has no tokenizer"),
  (["--kinds", "verse"], "--kinds: 'verse', want some of code, prose, chat, random"),
  (["--prefill", "9000"], "--prefill=9000, want less than the context of 8192"),
  (["--repeat", "0"], "--repeat=0, want at least 1"),
  (["--temperature", "hot"], "invalid float value: 'hot'"),
  (["--speed"], "unrecognized arguments: --speed"),
])
def test_one_line_for_what_is_wrong(checkpoint: Path, flags: list[str], text: str) -> None:
  code, out, err = bench("--model", str(checkpoint), *flags)
  assert (code, out) == (2, "") and err.count("\n") == 1
  assert err.startswith("bench: error: ") and text in err

def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
  code, out, err = bench("--model", str(tmp_path))
  assert (code, out) == (2, "") and err.count("\n") == 1 and tmp_path.name in err
