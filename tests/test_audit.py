"""The audit must pass the right verifier, find wrong ones, and call itself void where it can't tell them apart."""
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor

from specgrad.spec import verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import audit

SMALL = {"cases": 40, "steps": 300, "law_tokens": 24, "prompts": 1, "tokens": 8}

def lenient(target_probs: Any, drafted: Any, draft_probs: Any, uniform: Any, lenience: float = 0.95) -> Any:
  """As verify.rejection, but a token may be drafted a little too often."""
  at = drafted.unsqueeze(-1)
  p, q = target_probs[:, :-1].gather(2, at).squeeze(-1), draft_probs.gather(2, at).squeeze(-1)
  n, lane = verify.accepted(uniform * q * lenience < p), Tensor.arange(drafted.shape[0])
  left = (target_probs[lane, n] - draft_probs.pad(((0, 0), (0, 1), (0, 0)))[lane, n]).maximum(0)
  return n, (left.sum(1, keepdim=True) > 0).where(left, target_probs[lane, n])

# ------------------------------------------------------------------------------------------------ L0, L1
@pytest.fixture(scope="module")
def cases() -> list[audit.Laws]: return audit.level0_laws(0)

def test_the_right_rule_by_enumeration(cases: list[audit.Laws]) -> None:
  assert max(audit.deviation(audit.exact, case) for case in cases) < 1e-12

@pytest.mark.parametrize("name", audit.WRONG_RULES)
def test_wrong_rules_by_enumeration(cases: list[audit.Laws], name: str) -> None:
  rule, blind = audit.WRONG_RULES[name]
  assert max(audit.deviation(rule, case, case.without_markov if blind else None) for case in cases) > 0.01

def test_a_deviation_by_hand() -> None:
  """p = (1/4, 3/4), q = (3/4, 1/4) with every token accepted: what comes out is q, half of the mass away from p."""
  p = np.array([.25, .75])
  laws = audit.Laws(2, 1, 8, {(): p, (0,): p, (1,): p}, {(): p[::-1]})
  assert audit.deviation(lambda p, x, q, u: (1, p[1]), laws) == pytest.approx(.5)
  assert audit.deviation(lambda p, x, q, u: (0, p[0]), laws) == pytest.approx(0)

def test_the_shipped_rule_and_an_injected_one(cases: list[audit.Laws], monkeypatch: pytest.MonkeyPatch) -> None:
  few = [cases[0], cases[3]]
  assert max(audit.deviation(audit.Shipped("CPU"), case) for case in few) < 1e-12
  wrong, error = audit.compiled_cases(audit.Shipped("CPU"), 200, 0)
  assert wrong == 0 and error < 1e-6
  monkeypatch.setattr(verify, "rejection", lenient)
  assert max(audit.deviation(audit.Shipped("CPU"), case) for case in few) > 0.01
  assert audit.compiled_cases(audit.Shipped("CPU"), 200, 0)[0] > 0

def test_filters_by_hand() -> None:
  logits = np.log([.5, .3, .2])
  for more, want in (((1, 1.0, 0, 0), [.5, .3, .2]), ((1, .5, 0, 0), [1, 0, 0]), ((1, .6, 0, 0), [.625, .375, 0]),
                     ((1, 1.0, 2, 0), [.625, .375, 0]), ((1, 1.0, 0, .5), [.625, .375, 0]),
                     ((.5, 1.0, 0, 0), [25 / 38, 9 / 38, 4 / 38])):
    assert audit.filtered(logits, *more) == pytest.approx(want), more
  assert audit.filters_error("CPU", True, 0) < 1e-5

# ------------------------------------------------------------------------------------------------ L2
def test_statistics_of_known_data() -> None:
  x, p = audit.chi_square(np.array([30, 20]), np.array([25.0, 25.0]))
  assert x == pytest.approx(2) and p == pytest.approx(math.erfc(1), abs=.01)  # 0.157 for one degree of freedom
  assert audit.chi_square(np.array([49, 1]), np.array([50.0, 0.0])) == (math.inf, 0)
  z, p, shift, bound = audit.witness(np.repeat([1.0, 0.0], [60, 40]), np.full(100, .5))
  assert z == pytest.approx(2) and p == pytest.approx(.0455, abs=1e-4) and shift == pytest.approx(.1) and bound > .1
  assert audit.holm({"a": .01, "b": .02, "c": .5}, .05) == ["a", "b"]
  assert audit.holm({"a": .03, "b": .02, "c": .5}, .05) == []

def test_steps_of_a_right_and_of_wrong_rules() -> None:
  """Of the size that --quick has: each wrong rule is found, the right one is not."""
  c, n = audit.chain(), audit.SIZES["quick"]["steps"]
  assert not audit.holm(audit.step_tests(c, *audit.made_steps(c, n, 3)), audit.ALPHA)
  for name in audit.WRONG_RULES:
    assert audit.holm(audit.step_tests(c, *audit.made_steps(c, n, 4, name)), audit.ALPHA), name

@pytest.mark.parametrize("lanes", [1, 16])
def test_captured_steps_have_the_tables_they_are_held_to(lanes: int) -> None:
  """At many steps the tests are sharp; here only that captured and made steps are laid out alike."""
  c, ticks = audit.chain(), []
  accepted, tokens = audit.real_steps(c, 400 * lanes, 1, "CPU", True, ticks.append, lanes)
  assert accepted.shape == (400 * lanes,) and tokens.shape == (400 * lanes, 6) and sum(ticks) == 400 * lanes
  assert accepted.min() >= 0 and 2 < 1 + accepted.mean() * 2 < 5 and tokens.min() >= 0 and tokens.max() < 32
  assert min(audit.step_tests(c, accepted, tokens).values()) > 1e-4
  blocks = {tuple(row) for row in np.column_stack([accepted, tokens])}
  assert len(blocks) > 300 * lanes                         # no lane and no step has another's noise

def test_a_scale_for_all_rows_couples_them() -> None:
  assert audit.scale_couples(True) and not audit.scale_couples(False)

# ------------------------------------------------------------------------------------------------ shards
def test_shards_are_judged_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  """10,000 tokens in a set of chance 1/2, 52 % of them inside: neither half shows it, both together do."""
  half = lambda n, inside: {"sums": {"code: draft above target": [n, inside - n / 2, n / 4]}, "tokens": {"code": n},
                            "first": {"code": [inside, n / 2, n / 4]}}
  four = lambda differ: {"width": 3, "prompts": 1, "tokens": 5, "penalised": 0, "differ": differ, "one_row": 1, "margins": [.1],
                         "coupled": 0}
  one, two = audit.judge3([half(5000, 2600)]), audit.judge3([half(5000, 2600)])
  both = audit.judge3([one["raw"], two["raw"]])
  assert one["passed"] and two["passed"] and not both["passed"] and both["raw"]["tokens"] == {"code": 10000}
  assert both["shifts"]["code: draft above target"]["z"] == pytest.approx(4)
  assert both["shifts"]["code: draft above target"]["shift"] == pytest.approx(.02)
  four1, four2 = audit.judge4([four([])]), audit.judge4([four(["code 1"])])
  assert four1["passed"] and not audit.judge4([four1["raw"], four2["raw"]])["passed"]
  head = {"schema": audit.SCHEMA, "model": "toy", "draft": "d", "depth": 2, "numerics": "n", "device": "CPU", "verifiers": [],
          "alpha": 1e-3, "date": "", "command": ""}
  fine = {"passed": True, "size": "", "found": "", "bound_tv": .1}
  line = lambda name, i, found: {"level": name, "shard": f"{i}/2", "seconds": float(i), **found}
  rows = [[line(n, 1, fine) for n in ("L0", "L1", "L2", "L5")], []]
  for i in (1, 2): rows[i - 1] += [line("L3", i, audit.judge3([half(5000, 2500)])), line("L4", i, four1)]
  files = [tmp_path / f"{i}.jsonl" for i in (1, 2)]
  for i, file in enumerate(files):
    file.write_text("".join(json.dumps(x) + "\n" for x in [{**head, "shard": f"{i + 1}/2"}, *rows[i]]))
  assert audit.main(["--merge", *map(str, files)]) == 0
  levels = json.loads(capsys.readouterr().out.splitlines()[-1])["levels"]
  assert levels["L4"]["raw"]["tokens"] == 10 and levels["L3"]["seconds"] == 3
  assert audit.main(["--merge", str(files[0])]) == 2
  assert "L3: shard 2/2 is missing" in capsys.readouterr().err

# ------------------------------------------------------------------------------------------------ verdicts
def test_verdicts() -> None:
  levels = {name: {"passed": True} for name in audit.LEVELS}
  assert audit.verdict(levels) == "lossless"
  assert audit.verdict({**levels, "L3": {"passed": False}}) == "not lossless"
  assert audit.verdict({**levels, "L5": {"passed": False}}) == "void"
  assert audit.verdict({**levels, "L0": {"passed": False}, "L5": {"passed": False}}) == "void"

def test_an_audit_of_a_pair(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                            capsys: pytest.CaptureFixture[str]) -> None:
  """Too small, it is void. Were its wrong rules found, it would show losslessness; with a lenient rule not."""
  monkeypatch.setitem(audit.SIZES, "quick", SMALL)
  monkeypatch.setattr(audit.specgrad, "load", functools.cache(audit.specgrad.load))
  out = tmp_path / "a.jsonl"
  flags = ["--model", str(shared / "golden" / "dspark_w16" / "ckpt"), "--quick", "--out", str(out)]

  def run() -> tuple[int, dict[str, Any], str]:
    code, text = audit.main(flags), capsys.readouterr()
    assert text.out, text.err
    return code, json.loads(text.out.splitlines()[-1]), text.out
  code, result, said = run()
  assert code == 1 and result["verdict"] == "void" and "NOT found: lenience 0.95 by L2" in said
  assert {n: x["passed"] for n, x in result["levels"].items()} == {n: n != "L5" for n in audit.LEVELS}
  assert all(found["L0"] for n, found in result["levels"]["L5"]["caught"].items() if n in audit.WRONG_RULES)
  assert result["levels"]["L3"]["bound_shift"] > .1 and "not shown" in said

  assert result["levels"]["L4"]["raw"]["penalised"] == 16 and "16 of them with penalties" in said

  part = tmp_path / "2.jsonl"
  assert audit.main([*flags[:-1], str(part), "--shard", "2/2"]) == 0  # nothing failed, and nothing is shown
  shard = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert shard["verdict"] is None and [x["level"] for x in shard["levels"]] == ["L3", "L4"]
  assert audit.main(["--merge", str(part)]) == 2
  assert "L0: shard 1/2 is missing" in capsys.readouterr().err

  head, *rows = [json.loads(line) for line in out.read_text().splitlines()]
  rows[5]["passed"] = True
  write = lambda some: out.write_text("".join(json.dumps(row) + "\n" for row in (head, *some)))
  write(rows)
  code, result, said = run()                               # nothing is left to do
  assert code == 0 and result["verdict"] == "lossless" and "LOSSLESS" in said

  monkeypatch.setattr(verify, "rejection", lenient)
  write(rows[3:])
  code, result, said = run()
  assert code == 1 and result["verdict"] == "not lossless" and "NOT SHOWN" in said
  assert not result["levels"]["L0"]["passed"]

@pytest.mark.parametrize("flags, message", [
  (["--what"], "unrecognized arguments: --what"), (["--depth", "0"], "--depth=0, want at least 1"),
  (["--draft", "none"], "there is no draft, so nothing to audit"), (["--model", "nowhere"], "nowhere"),
])
def test_mistakes_end_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert audit.main(flags) == 2
  err = capsys.readouterr().err
  assert err.startswith("audit: error:") and message in err and err.count("\n") == 1
