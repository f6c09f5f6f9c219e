"""The factorial, from made errors of a known relation: sums, the index rho, the controls; and cells that are what they say."""
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import compose
import evidence

HEAD = {"schema": compose.SCHEMA, "date": "", "command": "", "commit": "", "tinygrad": "", "device": "", "model": "toy",
        "fingerprint": "", "reference": None, "tokens": 9, "temperature": 1.0, "probes": 1, "seed": 0,
        "prompts_sha256": "", "classes": None, "limit": 2, "jobs": 12}
GOOD = {"again": 0, "null": 0, "null_kl": 0.0, "shipped reference/float32": 0, "shipped w4a8/fp8": 0}

# ------------------------------------------------------------------------------------------------ one position
def test_two_laws_by_hand() -> None:
  """p = (1/2, 1/2) and q = (3/4, 1/4), then the same law twice."""
  ref, got = np.log([[.5, .5], [.9, .1]]).astype(np.float32), np.log([[.75, .25], [.9, .1]]).astype(np.float32)
  x = compose.compare(ref, got + 3, np.array([1, 0]))      # logits may be off by a constant
  kl = .5 * np.log(.5 / .75) + .5 * np.log(.5 / .25)
  assert x["n"] == 2 and x["kl"] == pytest.approx(kl, abs=1e-6) and x["tv"] == pytest.approx(.25, abs=1e-6)
  assert x["hellinger2"] == pytest.approx(1 - (.375 ** .5 + .125 ** .5), abs=1e-6)
  assert x["agree"] == 2 and x["nll"] == pytest.approx(-np.log(.25) - np.log(.9), abs=1e-5)
  assert sum(x["hist"].values()) == 2 and x["hist"]["-9"] == 1  # 0.1438 is in 10^-0.9 .. 10^-0.8
  assert [n for n, _ in x["strata"]] == [0, 2, 0] and x["strata"][1][1] == pytest.approx(kl, abs=1e-6)
  same = compose.compare(ref, ref, np.array([0, 0]))
  assert (same["kl"], same["tv"], same["hellinger2"]) == (0, 0, 0)

def test_many_positions_are_as_one_and_one() -> None:
  rng = np.random.default_rng(0)
  ref, got, after = *rng.standard_normal((2, 40, 8)).astype(np.float32), rng.integers(0, 8, 40)
  whole, parts = compose.compare(ref, got, after), [compose.compare(ref[i:i + 1], got[i:i + 1], after[i:i + 1])
                                                    for i in range(40)]
  for name in compose.SUMS: assert whole[name] == pytest.approx(sum(p[name] for p in parts))

def test_quantiles_of_a_histogram() -> None:
  hist = {"-30": 98, "-10": 1, "0": 1}
  assert compose.quantile(hist, .5) == pytest.approx(10 ** -2.95)
  assert compose.quantile(hist, .99) == pytest.approx(10 ** -.95) and compose.quantile(hist, 1) == pytest.approx(10 ** .05)

def test_bits_are_compared_and_not_values() -> None:
  a = np.array([0.0, 1.0, np.nan], np.float32)
  assert compose.bits(a, a.copy()) == 0                    # a NaN is as it was
  assert compose.bits(a, np.array([-0.0, np.nextafter(np.float32(1), np.float32(2)), np.nan], np.float32)) == 2

# ------------------------------------------------------------------------------------------------ the index
def made(share: float, n: int = 12, size: float = .02, cost: float = 0.0, flips: int = 0) -> list[dict[str, Any]]:
  """Streams in which the cache's error of the logits is `share` of the weights' own and independent for the rest."""
  rows = list[dict[str, Any]]()
  for i in range(n):
    rng = np.random.default_rng(i)
    ref, own, other = rng.standard_normal((3, 200, 32))
    d = {"w4a16": size * own, "w4a8": size * own, "fp8": size * (share * own + (1 - share * share) ** .5 * other)}
    cells, kl = dict[str, Any](), dict[str, np.ndarray]()
    for cell in compose.CELLS[1:]:
      shift = sum((d[part] for part in cell.split("/") if part in d), np.zeros_like(ref))
      if cell == "w4a8/fp8": shift[:flips, 0] += 5         # few positions, at which both together do something of their own
      x = compose.by_position(ref.astype(np.float32), (ref + shift).astype(np.float32), np.zeros(200, int))
      cells[cell], kl[cell] = compose.summed(*x), x[0][0]
    blocks = {f"{c}/{draft}": [10, 6.0 - cost * (draft == "quantised"), 20 - 10 * cost * (draft == "quantised")]
              for c in compose.CELLS for draft in compose.DRAFTS}
    rows.append({"class": "code", "source": str(i), "turn": "1", "prompt_tokens": 3, "positions": 200,
                 "reference_nll": 200.0, "cells": cells, "quiet": compose.quiet(kl), "blocks": blocks, "controls": dict(GOOD)})
  return rows

@pytest.mark.parametrize("share, rho", [(0.0, 0.0), (1.0, 1.0), (-1.0, -1.0), (0.5, 0.5)])
def test_rho_of_errors_with_a_known_relation(share: float, rho: float) -> None:
  """Independent errors add up, aligned ones are more than their sum, opposite ones vanish."""
  s = compose.summarise(HEAD, made(share))
  for weights in ("w4a16", "w4a8"):
    x = s["all"]["interaction"][weights]
    assert x["rho"]["value"] == pytest.approx(rho, abs=.03) and x["rho_hellinger2"]["value"] == pytest.approx(rho, abs=.03)
    assert x["rho"]["ci95"][0] - .02 <= rho <= x["rho"]["ci95"][1] + .02 and x["rho"]["ci95"][1] - x["rho"]["ci95"][0] < .2
    assert (x["p_sign"] > .01) is (rho == 0) and x["sources"] == 12
    assert (f"code, {weights} x fp8" in s["interactions_shown"]) is (rho != 0)
    if rho: assert abs(x["I"]["value"]) > x["least_I_shown"]
  kl = {c: s["all"]["cells"][c]["kl"]["value"] for c in s["all"]["cells"]}
  assert kl["w4a8/fp8"] == pytest.approx((2 + 2 * share) * kl["reference/fp8"], rel=.05, abs=1e-9)
  assert s["all"]["cells"]["reference/fp8"]["kl"]["ci95"][0] <= kl["reference/fp8"]

def test_a_few_positions_that_are_no_square_are_told_apart() -> None:
  x = compose.summarise(HEAD, made(0.5, size=.008, flips=2))["all"]["interaction"]["w4a8"]
  assert x["rho"]["value"] > 5 and x["rho_quiet"]["value"] == pytest.approx(.5, abs=.03)
  assert x["quiet_share"] == pytest.approx(.99)
  calm = compose.summarise(HEAD, made(0.5, size=.008))["all"]["interaction"]["w4a8"]
  assert calm["rho_quiet"] == calm["rho"] and calm["quiet_share"] == 1

def test_what_a_draft_costs() -> None:
  x = compose.summarise(HEAD, made(0, cost=.1))["all"]
  assert x["blocks"]["w4a8/fp8/full"]["overlap"]["value"] == pytest.approx(.6)
  assert x["blocks"]["w4a8/fp8/quantised"]["tokens_per_step"]["value"] == pytest.approx(1 + 1.9)
  cost = x["draft_quantised_minus_full"]["w4a8/fp8"]
  assert cost["overlap"]["value"] == pytest.approx(-.01) and cost["tokens_per_step"]["value"] == pytest.approx(-.1)

def test_sources_are_drawn_and_classes_kept_apart() -> None:
  """Two turns of one conversation are one cluster; made prompts are not in the sum of all real ones."""
  rows = made(0, 4)
  for i, r in enumerate(rows): r.update({"class": "chat", "source": str(i // 2), "turn": ("1", "2+")[i % 2]})
  rows += [{**made(0, 1)[0], "class": "synthetic_random"}]
  s = compose.summarise(HEAD, rows)
  assert list(s["classes"]) == ["chat:1", "chat:2+", "synthetic_random"]
  assert s["all"]["streams"] == 4 and s["all"]["interaction"]["w4a8"]["sources"] == 2
  assert s["classes"]["synthetic_random"]["cells"]["w4a8/fp8"]["kl"]["ci95"] is None

# ------------------------------------------------------------------------------------------------ controls, files
@pytest.mark.parametrize("control", GOOD)
def test_a_control_that_fails_voids_all(control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  for bad in (0, 1):
    file = tmp_path / f"{bad}.jsonl"
    records = evidence.Records(file, HEAD, compose.SETTINGS)
    rows = made(0, 3)
    rows[1]["controls"][control] += bad
    for r in rows: records.add(r)
    assert compose.main(["--merge", str(file)]) == bad
    out = capsys.readouterr().out
    assert ("VOID" in out) is bool(bad) and json.loads(out.splitlines()[-1])["valid"] is (not bad)

def test_shards_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  files = [tmp_path / f"{i}.jsonl" for i in range(2)]
  for i, file in enumerate(files):
    records = evidence.Records(file, HEAD, compose.SETTINGS)
    for r in made(0)[i::2]: records.add(r)
  assert compose.main(["--merge", *map(str, files)]) == 0
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["streams"] == 12
  for flags, text in ((["--merge", str(files[0]), str(files[0])], "code 0 1 is in two files"),
                      (["--tokens", "0"], "--tokens=0, want at least 1"), (["--shard", "0/2"], "want i/n"),
                      (["--temperature", "-1"], "--temperature=-1.0, want 0 to 100")):
    assert compose.main(flags) == 2
    assert text in capsys.readouterr().err

class Toy:
  """Logits by the token before; `coupled`: and by all rows of the call. Writes blocks of one token over and over."""
  max_context, config, table = 99, None, np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)

  def __init__(self, token: int = 0, coupled: float = 0.0): self.token, self.coupled = token, coupled
  def reset(self) -> None: pass
  def generate(self, ids: Any, max_tokens: int, **settings: Any) -> Any: return SimpleNamespace(ids=[3, 2, 1])
  def logits(self, ids: list[int]) -> np.ndarray: return self.table[ids] + np.float32(self.coupled * sum(ids))
  def draft_block(self, ids: list[int]) -> Any:
    return SimpleNamespace(tokens=np.full(2, self.token), logits=self.table[[0, 0]])

@pytest.mark.parametrize("coupled", [0.0, 0.01])
def test_the_draft_is_seen_where_it_reaches_the_law(coupled: float) -> None:
  """The logits before a block may not depend on it: here the drafts write different ones."""
  m = compose.Measure.__new__(compose.Measure)
  m.args = SimpleNamespace(tokens=9, temperature=1.0, seed=0, probes=2)
  m.model, m.drafts, m.again = Toy(), compose.DRAFTS, Toy()
  m.shipped = {"reference": Toy(), "w4a8": Toy()}
  m.cells = {c: {d: Toy(i + 1, coupled) for i, d in enumerate(compose.DRAFTS)} for c in compose.CELLS}
  r = m.stream(evidence.Prompt("code", "a", "1", (1, 2)), 0)
  assert r["positions"] == 3 and (r["controls"]["null"] > 0) is bool(coupled)
  right = [int((Toy.table[[at, k]].argmax(1) == k).cumprod().sum()) for at in (2, 2) for k in (1,)]
  if not coupled:
    assert r["controls"] == GOOD and r["blocks"]["w4a8/fp8/full"][0] == 2 and r["blocks"]["w4a8/fp8/full"][2] == sum(right)

# ------------------------------------------------------------------------------------------------ the cells themselves
@pytest.mark.parametrize("cell", compose.CELLS)
def test_each_operation_takes_its_numerics_from_one_factor(cell: str) -> None:
  from specgrad.quant import operations
  weights, kv = cell.split("/")
  made, values, cache = (compose.operations_of(("CPU",), weights, kv), weights != "reference", kv == "fp8")
  assert tuple(n for n in vars(operations("CPU", True)) if n in compose.OF_THE_CACHE) == compose.OF_THE_CACHE  # all exist
  for name, op in vars(operations("CPU", True)).items():
    if not hasattr(op, "keywords") or name == "head_rope": continue
    want = cache if name in compose.OF_THE_CACHE else values
    assert getattr(made, name).keywords["w4a8"] is want, name

@pytest.mark.parametrize("cell", compose.CELLS)
def test_an_indexers_query_goes_with_its_keys(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Both are rotated and rounded, or neither; all other queries go with the values."""
  from specgrad import quant
  said = lambda w4a8: lambda *args, index=False: (w4a8, index)
  fake = lambda devices, w4a8: SimpleNamespace(**{n: said(w4a8) for n in (*compose.OF_THE_CACHE, "head_rope")})
  monkeypatch.setattr(quant, "operations", fake)
  weights, kv = cell.split("/")
  ops = compose.operations_of(("CPU",), weights, kv)
  assert ops.head_rope(1, 2, index=True) == (kv == "fp8", True) == (ops.index_topk()[0], True)
  assert ops.head_rope(1, 2) == (weights != "reference", False)

def test_a_run_from_beginning_to_end(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  """All controls hold; both factors change the law, activations more than what they are rounded to beforehand."""
  flags = ["--model", str(shared / "golden" / "dspark_w16" / "ckpt"), "--limit", "1", "--tokens", "5", "--probes", "1",
           "--classes", "synthetic_random", "--out", str(tmp_path / "c.jsonl")]
  assert compose.main(flags) == 0, capsys.readouterr()
  s = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert s["valid"] and s["controls"] == GOOD and s["all"] is None
  x = s["classes"]["synthetic_random"]
  kl = {c: v["kl"]["value"] for c, v in x["cells"].items()}
  assert all(0 < v < 1 for v in kl.values()) and len(set(kl.values())) == 5
  assert kl["w4a16/float32"] < kl["w4a8/float32"]
  assert len(x["blocks"]) == 12 and all(0 <= b["overlap"]["value"] <= 1 for b in x["blocks"].values())
  assert compose.main(flags) == 0                          # from the file
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["classes"] == s["classes"]
