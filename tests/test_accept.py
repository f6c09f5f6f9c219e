"""Acceptance by class, from made replies with a known answer: sums, intervals, the validator's refusals, resuming."""
import copy
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import accept
import evidence

GREEDY = "exact, rule greedy, q one-hot, depth 2 fixed, numerics w4a8 fixed-width"
REJECT = "exact, rule rejection, q realised, depth 2 fixed, numerics w4a8 fixed-width"
HEAD = {"schema": accept.SCHEMA, "date": "", "command": "", "commit": "", "tinygrad": "", "device": "", "model": "toy",
        "fingerprint": "", "numerics": "w4a8", "draft": "dspark", "depth": 2, "tokens": 9, "temperature": [0.0],
        "seed": 0, "prompts_sha256": "", "classes": None, "limit": 2, "probe": 1, "jobs": 4}

def record(kind: str, source: str, accepted: list[int], seconds: float = 1.0, **more: Any) -> dict[str, Any]:
  """A reply of one step for each of `accepted`, all of it emitted and in the first 32 tokens; plain takes a second a
  token."""
  steps, tokens = len(accepted), len(accepted) + sum(accepted)
  places = [[steps] * 2, [sum(n > k for n in accepted) for k in (0, 1)]]
  return {"class": kind, "source": source, "turn": "1", "T": 0.0, "verifier": GREEDY, "ctx_tokens": 4,
          "out_tokens": tokens, "steps": steps, "per_pos": places,
          "hist_accepted": [accepted.count(n) for n in range(3)], "hist_proposed": [0, 0, steps],
          "by_position": {"0-31": [tokens, steps], "32-127": [0, 0], "128+": [0, 0]}, "truncated": False, "loop": False,
          "timed": [tokens, seconds], "timed_plain": [tokens, float(tokens)], "same_as_width_1": True, "warnings": [],
          "expected": None, "confidence": None, **more}

ROWS = [record("code", "a", [2, 2, 1, 0], 3.0), record("code", "b", [1, 1], 1.0, same_as_width_1=False, loop=True),
        record("prose", "c", [0, 1], 1.5), record("synthetic_random", "d", [0, 0], 2.0)]

def made() -> dict[str, Any]: return accept.summarise(HEAD, copy.deepcopy(ROWS), None)

# ------------------------------------------------------------------------------------------------ sums
def test_sums_of_made_replies() -> None:
  s = made()
  accept.validate(s)
  code, prose, random = s["classes"]
  assert (code["steps"], code["accepted"], code["emitted"], code["proposed"]) == (6, 7, 13, 12)
  assert code["al"] == pytest.approx(13 / 6) and code["hist_accepted"] == {"0": 1, "1": 3, "2": 2}
  assert code["per_pos"]["rate"] == pytest.approx([5 / 6, 2 / 6])
  assert code["per_pos"]["conditional"] == pytest.approx([5 / 6, 2 / 5])
  assert (code["tok_s"], code["tok_s_plain"], code["speedup"]) == (13 / 4, 1, 13 / 4)
  assert (code["prompts"], code["differ_from_width_1"], code["repeat_loop_rate"]) == (2, 1, .5)
  assert code["al_by_out_position"] == {"0-31": pytest.approx(13 / 6), "32-127": None, "128+": None}
  assert code["al_by_out_position_ci95"] == {"0-31": code["al_ci95"], "32-127": None, "128+": None}
  assert 2 <= code["al_ci95"][0] <= 13 / 6 <= code["al_ci95"][1] <= 9 / 4
  assert prose["al_ci95"] is None  # one prompt says nothing about their spread
  assert random["synthetic"] and s["headlines"][0]["classes"] == ["code", "prose"]
  assert s["headlines"][0]["tokens_per_step"] == pytest.approx(1 / (.5 * 6 / 13 + .5 * 2 / 3))
  assert s["mix"] == {"name": "every class alike", "weights_by_tokens": {"code": .5, "prose": .5}}

def test_classes_mix_by_time() -> None:
  """Half the tokens at 5 a step and half at 2.5 take as many steps as all of them at 3.33."""
  cells = [{"name": "a", "turn": "1", "al": 5.0, "speedup": 4.0},
           {"name": "b", "turn": "1", "al": 2.5, "speedup": None}]
  assert accept.headline(cells, {"a": .5, "b": .5}) == {"tokens_per_step": pytest.approx(10 / 3), "speedup": None}
  assert accept.headline(cells, {"a": 1.0})["speedup"] == 4

def test_a_mix_names_what_was_measured() -> None:
  assert accept.parse_mix("code=1,chat=3") == {"code": .25, "chat": .75}
  assert accept.spread_mix({"chat": .5, "code": .5}, ["chat:1", "chat:2+", "code"]) == \
    {"chat:1": .25, "chat:2+": .25, "code": .5}
  with pytest.raises(ValueError, match="'synthetic_random' was not measured as a real class, want some of code"):
    accept.spread_mix({"synthetic_random": 1.0}, ["code"])
  for text in ("code", "code=x", "code=-1", "code=0"):
    with pytest.raises(ValueError, match="--mix"): accept.parse_mix(text)

def test_the_first_place_is_held_against_what_both_laws_say() -> None:
  rows = [record("code", s, [1, 0], T=1.0, verifier=REJECT, expected=[4, 2.0, 1.0, 3]) for s in "ab"]
  s = accept.summarise(HEAD, rows, None)
  assert s["classes"][0]["expected_first"] == \
    {"steps": 8, "expected": .5, "realised": .75, "z": pytest.approx(2 / 2 ** .5)}
  assert s["checks"]["realised_vs_expected_z"] == pytest.approx(2 / 2 ** .5)

def test_a_probe_finds_the_overlap_of_two_laws() -> None:
  """p = (.5, .5), q = (.75, .25): they share .75. Confidence 0 says one half."""
  p, q = np.log([[.5, .5]] * 3), np.log([[.75, .25]])
  block = SimpleNamespace(logits=q, confidence=np.zeros(1))
  model = SimpleNamespace(logits=lambda ids: p, draft_block=lambda ids: block)
  m = SimpleNamespace(args=SimpleNamespace(probe=2), model=model)
  out = accept.Measure.probe(m, evidence.Prompt("x", "x", "1", (0,)), [1, 1, 1], [1, 0], 1.0, "rejection")
  assert out["expected"] == pytest.approx([2, 1.5, 2 * .75 * .25, 1])
  assert out["confidence"][2] == [2, 1.0, 1]
  assert accept.Measure.probe(m, evidence.Prompt("x", "x", "1", (0,)), [1], [0], 0.0, "greedy")["expected"] is None

@pytest.mark.parametrize("ids, loops", [([1, 2, 3] * 8, True), ([1, 2, 3] * 7, False), ([7] * 24, True),
  ([9, 9, *[1, 2] * 12], True), ([*[1, 2] * 12, 3], False), (list(range(200)), False), ([*range(32)] * 4, True)])
def test_a_loop_is_seen(ids: list[int], loops: bool) -> None: assert accept.looped(ids) is loops

# ------------------------------------------------------------------------------------------------ intervals
def test_the_interval_of_known_data() -> None:
  """Ones in half of 400 clusters: a mean of .5 with a standard error of .025."""
  rows = np.stack([np.repeat([0.0, 1.0], 200), np.ones(400)], axis=1)
  low, high = evidence.interval(rows, lambda s: s[:, 0] / s[:, 1])
  assert low == pytest.approx(.5 - 1.96 * .025, abs=.005) and high == pytest.approx(.5 + 1.96 * .025, abs=.005)
  alike = evidence.interval(np.ones((7, 2)), lambda s: s[:, 0] / s[:, 1])
  assert alike == [1, 1] and evidence.interval(rows[:1], lambda s: s[:, 0]) is None

def test_the_corrected_interval_follows_a_skewed_statistic() -> None:
  """The corrected ends of a monotone function of a mean are that function of the mean's ends; for a biased one (the
  square of a mean near zero is too large on average) they lie lower than the plain ones."""
  rows = np.stack([np.random.default_rng(0).exponential(size=60), np.ones(60)], axis=1)
  mean, cube = (lambda s: s[:, 0] / s[:, 1]), (lambda s: (s[:, 0] / s[:, 1]) ** 3)
  low, high = evidence.interval(rows, mean, bca=True)
  assert evidence.interval(rows, cube, bca=True) == pytest.approx([low ** 3, high ** 3], rel=.02)
  assert low > evidence.interval(rows, mean)[0] and high > evidence.interval(rows, mean)[1]  # skewed to the right
  centred = rows - [rows[:, 0].mean() - .05, 0]
  square = lambda s: (s[:, 0] / s[:, 1]) ** 2
  assert evidence.interval(centred, square, bca=True)[1] < evidence.interval(centred, square)[1]

def test_the_interval_draws_clusters() -> None:
  """The same values in 4 clusters instead of 400 are worth far less."""
  few = np.array([[0.0, 100.0], [0, 100], [100, 100], [100, 100]])
  low, high = evidence.interval(few, lambda s: s[:, 0] / s[:, 1])
  assert low == 0 and high == 1

# ------------------------------------------------------------------------------------------------ the validator
def put(path: str, value: Any) -> Any:
  def change(s: dict[str, Any]) -> None:
    *way, last = path.split(".")
    for x in way: s = s[int(x)] if isinstance(s, list) else s[x]
    s[last] = value
  return change

@pytest.mark.parametrize("change, message", [
  (put("classes.0.al", 2.5), "al=2.5, want emitted/steps=2.1667"),
  (put("classes.0.accepted", 8), "accepted=8, want 7"),
  (put("classes.0.emitted", 14), "emitted=14, want 13"),
  (put("classes.0.out_tokens", 14), "out_tokens=14, want 13"),
  (put("classes.0.hist_accepted.0", 3), "steps of hist_accepted=8, want 6"),
  (put("classes.0.steps_by_out_position.0-31", 5), "steps_by_out_position=5, want 6"),
  (put("classes.0.name", ""), "no class name"),
  (put("classes.0.verifier", ""), "no verifier label"),
  (put("classes.0.verifier", "trust me"), "want a label"),
  (put("classes.0.verifier", GREEDY.replace("exact", "synthetic")), "family 'synthetic' with a speed-up"),
  (put("classes.0.verifier", GREEDY.replace("exact", "truncation")), "family 'truncation' with a speed-up"),
  (put("classes.0.verifier", REJECT.replace("fixed,", "noncausal,")), "exact with a noncausal stop rule"),
  (put("classes.0.speedup", 9.0), "speedup is not"),
  (put("classes.2.synthetic", False), "synthetic=False"),
  (put("mix", None), "no mix"),
  (put("headlines.0.verifier", ""), "no verifier label"),
  (put("headlines.0.classes", []), "no class"),
  (put("headlines.0.tokens_per_step", 4.0), "tokens_per_step=4.0"),
  (put("headlines.0.speedup", None), "speedup=None"),
  (put("mix.weights_by_tokens.code", .9), "the mix adds up to 1.4"),
  (put("classes", []), "none measured"),
  (put("schema", "other/1"), "want 'specgrad.accept/1'"),
  (lambda s: s["classes"][0].pop("steps"), "KeyError"),
])
def test_the_validator_refuses(change: Any, message: str) -> None:
  s = made()
  change(s)
  with pytest.raises(ValueError, match=message.replace("(", r"\(")): accept.validate(s)

def test_a_synthetic_class_is_no_headline() -> None:
  s = made()
  s["mix"]["weights_by_tokens"] = {"synthetic_random": 1.0}
  s["headlines"][0]["classes"] = ["synthetic_random"]
  with pytest.raises(ValueError, match="'synthetic_random' is synthetic"): accept.validate(s)
  alone = accept.summarise(HEAD, [ROWS[3]], None)
  accept.validate(alone)
  assert alone["headlines"] == [] and any("no headline" in w for w in alone["warnings"])

# ------------------------------------------------------------------------------------------------ files
def test_a_cut_file_goes_on(tmp_path: Path) -> None:
  path = tmp_path / "a.jsonl"
  first = evidence.Records(path, HEAD, accept.SETTINGS)
  first.add(ROWS[0])
  with path.open("a") as f: f.write('{"class": "co')
  again = evidence.Records(path, {**HEAD, "date": "later"}, accept.SETTINGS)
  again.add(ROWS[1])
  assert evidence.read_records(path) == (HEAD, ROWS[:2])
  with pytest.raises(ValueError, match="a.jsonl: made with tokens=9, want 10. Name another --out"):
    evidence.Records(path, {**HEAD, "tokens": 10}, accept.SETTINGS)

def test_shards_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  files = [tmp_path / f"{i}.jsonl" for i in range(2)]
  for i, file in enumerate(files):
    records = evidence.Records(file, HEAD, accept.SETTINGS)
    for row in ROWS[i::2]: records.add(row)
  assert accept.main(["--merge", *map(str, files), "--mix", "code=3,prose=1"]) == 0
  *shown, last = capsys.readouterr().out.splitlines()
  s = json.loads(last)
  assert [c["name"] for c in s["classes"]] == ["code", "prose", "synthetic_random"]
  assert s["mix"] == {"name": "given", "weights_by_tokens": {"code": .75, "prose": .25}}
  assert any(line.startswith("headline at temperature 0") and "code 75%" in line for line in shown)
  (tmp_path / "s.json").write_text(last)
  assert accept.main(["--check", str(tmp_path / "s.json")]) == 0
  assert accept.main(["--merge", str(files[0]), str(files[0])]) == 2
  assert "is in two files" in capsys.readouterr().err

def test_prompts_of_a_user(tmp_path: Path) -> None:
  talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
  rows = [{"kind": "chat", "prompt": talk}, {"kind": "law", "id": "x", "ids": [3, 4]}]
  (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
  assert evidence.read_rows(tmp_path / "p.jsonl") == [("chat", "1", talk), ("law", "x", [3, 4])]
  assert evidence.turns(talk) == [("1", talk[:1]), ("2+", talk)] and evidence.turns(talk[:1]) == [("1", talk[:1])]
  for bad in ("x", "[]", '{"kind": "a"}', '{"prompt": "a"}',
              '{"kind": "a", "prompt": [{"role": "system", "content": ""}]}'):
    (tmp_path / "p.jsonl").write_text(bad)
    with pytest.raises(ValueError, match="p.jsonl: line 1 is no prompt"): evidence.read_rows(tmp_path / "p.jsonl")

@pytest.mark.parametrize("flags, message", [
  (["--what"], "unrecognized arguments: --what"), (["--tokens", "1"], "--tokens=1, want at least 2"),
  (["--shard", "3/2"], "--shard=3/2, want i/n"), (["--temperature", "-1"], "--temperature=-1.0, want 0 to 100"),
  (["--check", "README.md"], "the last line is no JSON"), (["--merge", "nowhere.jsonl"], "nowhere.jsonl"),
  (["--draft", "none"], "there is no draft"),
])
def test_mistakes_end_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str],
                                  monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(Path(__file__).resolve().parents[1])
  assert accept.main(flags) == 2
  err = capsys.readouterr().err
  assert err.startswith("accept: error:") and message in err and err.count("\n") == 1

def test_a_run_from_beginning_to_end(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  """The interrupted file goes on, and gives the same counts."""
  flags = ["--model", str(shared / "golden" / "dspark_w16" / "ckpt"), "--limit", "1", "--tokens", "6", "--probe", "2",
           "--out", str(tmp_path / "a.jsonl")]
  assert accept.main(flags) == 0, capsys.readouterr().err
  s = json.loads(capsys.readouterr().out.splitlines()[-1])
  accept.validate(s)
  assert [(c["name"], c["T"], c["out_tokens"]) for c in s["classes"]] == \
    [(name, t, 6) for t in (0.0, 1.0) for name in evidence.SYNTHETIC]
  assert [c["expected_first"] is None for c in s["classes"]] == [True, True, False, False]
  assert all(c["confidence_first"] and c["differ_from_width_1"] in (0, None) for c in s["classes"])
  assert all(v["depth"] == 2 for v in s["verifiers"]) and s["mix"] is None
  lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
  (tmp_path / "a.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
  assert accept.main(flags) == 0
  again = json.loads(capsys.readouterr().out.splitlines()[-1])
  for a, b in zip(s["classes"], again["classes"]): assert (a["al"], a["per_pos"]) == (b["al"], b["per_pos"])
  assert math.isfinite(again["classes"][-1]["speedup"])
