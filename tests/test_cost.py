"""The price of a token against one worked by hand, and what no price is given for."""
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import cost

LABEL = "exact, rule rejection, q realised, depth 5 fixed, numerics w4a8 fixed-width"

def bench(tmp_path: Path, cells: list[tuple[str, float, float, float]], **more: Any) -> str:
  """A bench run with (kind, temperature, tok/s, plain tok/s)."""
  run = {"schema": "specgrad.bench/1", "device": "GPU", "speculative": [
    {"prompt_kind": k, "temperature": t, "tok_s": fast, "plain": {"tok_s": slow}, "verifier": LABEL}
    for k, t, fast, slow in cells], **more}
  (tmp_path / "run.json").write_text("a table\n" + json.dumps(run) + "\n")
  return str(tmp_path / "run.json")

def result(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, Any], str]:
  assert cost.main(flags) == 0, capsys.readouterr().err
  out = capsys.readouterr().out
  return json.loads(out.splitlines()[-1]), out

BOX = ("--capex", "45000", "--years", "4", "--watts", "1200", "--kwh", "0.15")

def test_a_price_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  """45000 / 35040 h = 1.2842 $/h, with 1.2 kW at 0.15 $ 1.4642 $/h: over 220 tok/s, 0.792 M an hour, 1.849 $/M. At
  work for a quarter of the time: (5.137 + 0.18) / 0.792 = 6.713."""
  file = bench(tmp_path, [("code", 1.0, 220.0, 110.0), ("random", 1.0, 350.0, 110.0)])
  x, out = result(capsys, "--measured", file, *BOX, "--util", "1", "--input", "0")
  assert x["usd_per_hour_fixed"] == pytest.approx(1.28425, abs=1e-5)
  assert x["usd_per_hour_energy"] == pytest.approx(.18)
  assert x["speculative"]["usd_per_m_out"] == pytest.approx(1.849, abs=1e-3)
  assert x["plain"]["usd_per_m_out"] == pytest.approx(3.698, abs=1e-3)
  assert x["speculative"]["energy_share"] == pytest.approx(.18 / 1.46425, abs=1e-4)
  assert x["run"]["mix"] == {"code": 1} and "prices of 2026-11-30" in out  # not the random prompts
  x, _ = result(capsys, "--measured", file, *BOX, "--util", "0.25", "--input", "0")
  assert x["speculative"]["usd_per_m_out"] == x["speculative"]["usd_per_m_out_by_util"]["0.25"] == \
    pytest.approx(6.713, abs=1e-3)
  assert x["plain"]["usd_per_m_out"] == pytest.approx(13.426, abs=1e-3)

def test_break_even_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  """2089 tok/s at 0.28 $/M earn 2.1057 $/h; less 0.18 of power 1.9257: worth the 1.2842 from 66.7 % on. At 220 tok/s
  0.2218 - 0.18 = 0.0418: 30.7 times too little. At 110 the power costs more."""
  def even(fast: float, slow: float) -> tuple[dict[str, Any], str]:
    return result(capsys, "--measured", bench(tmp_path, [("code", 0.0, fast, slow)]), *BOX, "--input", "0")
  x, out = even(2089.0, 220.0)
  assert x["speculative"]["break_even_util"] == pytest.approx(.6669, abs=1e-3) and "67% at work" in out
  assert x["plain"]["break_even_util"] == pytest.approx(30.76, abs=.05) and "30.8 times round the clock" in out
  x, out = even(220.0, 110.0)
  assert x["plain"]["break_even_util"] is None and "the power alone costs more" in out

def test_a_request_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  """1000 tokens in, 40 % cached, at 600 tok/s: 1 s. 100 out, half of the tokens at 50 and half at 25 tok/s: 3 s; plain
  at 20: 5 s. 36 $/h of capex alone are 1 cent a second."""
  file = bench(tmp_path, [("code", 1.0, 50.0, 20.0), ("chat", 1.0, 25.0, 20.0), ("chat", 0.0, 99.0, 20.0)],
               prefill=[{"tok_s": 500.0}, {"tok_s": 600.0}])
  flags = ["--measured", file, "--capex", str(36 * 8760), "--years", "1", "--watts", "0", "--util", "1",
           "--input", "1000", "--cached", "0.4", "--output", "100", "--api", "10/100"]
  x, _ = result(capsys, *flags)
  assert x["speculative"]["seconds_per_request"] == pytest.approx(4) and x["plain"]["seconds_per_request"] == 6
  assert [x[n]["usd_per_request"] for n in ("speculative", "plain")] == pytest.approx([.04, .06])
  assert x["usd_per_m_in"] == pytest.approx(36 / (600 * 3600) * 1e6, abs=1e-4)
  assert x["request"]["usd_api"] == pytest.approx(.02)  # a cached token is not cheaper there
  assert x["speculative"]["break_even_util"] == pytest.approx(2)
  assert x["usd_per_m_out_by_class"] == {"code": pytest.approx(200), "chat": pytest.approx(400)}
  x, _ = result(capsys, *flags, "--mix", "code=1,chat=3", "--residual", "0.5", "--opex", "18")
  assert x["speculative"]["tok_s"] == pytest.approx(1 / (.25 / 50 + .75 / 25), abs=1e-5)
  assert x["usd_per_hour_fixed"] == pytest.approx(36)
  x, _ = result(capsys, *flags, "--temperature", "0", "--prefill", "1200")
  assert x["speculative"]["tok_s"] == 99 and x["run"]["prefill_tok_s"] == 1200

def test_an_accept_summary_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  import accept
  from test_accept import HEAD, ROWS
  summary = accept.summarise(HEAD, ROWS, {"code": .25, "prose": .75})
  file = tmp_path / "s.json"
  file.write_text(json.dumps(summary))
  x, out = result(capsys, "--measured", str(file), "--prefill", "100")
  assert x["run"]["mix"] == {"code": .25, "prose": .75} and "warning: the rates" not in out
  assert x["speculative"]["tok_s"] == pytest.approx(1 / (.25 / 3.25 + .75 / 2), abs=1e-5) and x["plain"]["tok_s"] == 1
  summary["classes"][0]["accepted"] += 1
  file.write_text(json.dumps(summary))
  assert cost.main(["--measured", str(file), "--prefill", "100"]) == 2
  assert "accepted=8, want 7" in capsys.readouterr().err

@pytest.mark.parametrize("cells, flags, message", [
  ([("random", 1.0, 350.0, 110.0)], [], "synthetic prompts only"),
  ([("code", 1.0, 350.0, 110.0), ("random", 1.0, 3.0, 1.0)], ["--mix", "random=1"], "'random' is synthetic"),
  ([("code", 1.0, 350.0, 110.0)], ["--mix", "chat=1"], "'chat' was not measured"),
  ([("code", 1.0, 350.0, 110.0)], ["--temperature", "0"], "not measured, want one of 1"),
  ([("code", 1.0, 350.0, 110.0)], [], "the run has no prefill rate"),
  ([("code", 1.0, 350.0, 110.0)], ["--prefill", "0"], "want a rate above 0"),
  ([("code", 1.0, 350.0, 110.0)], ["--input", "0", "--util", "0"], "--util=0.0, want above 0"),
  ([("code", 1.0, 350.0, 110.0)], ["--input", "0", "--box", "x"], "--box=x, want one of two-rtx-pro-6000"),
  ([("code", 1.0, 350.0, 110.0)], ["--input", "0", "--api", "x"], "--api=x, want one of deepseek-v4-flash"),
  ([("code", 1.0, 350.0, 110.0)], ["--input", "0", "--prices", "README.md"], "README.md: no price file"),
])
def test_what_has_no_price(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                           cells: Any, flags: list[str], message: str) -> None:
  monkeypatch.chdir(Path(__file__).resolve().parents[1])
  assert cost.main(["--measured", bench(tmp_path, cells), *flags]) == 2
  err = capsys.readouterr().err
  assert err.startswith("cost: error:") and message in err and err.count("\n") == 1

def test_a_forced_run_has_no_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  file = bench(tmp_path, [("code", 1.0, 350.0, 110.0)])
  Path(file).write_text(Path(file).read_text().replace("exact, rule", "synthetic, rule"))
  assert cost.main(["--measured", file, "--input", "0"]) == 2
  assert "no lossless rule: no price for that" in capsys.readouterr().err
