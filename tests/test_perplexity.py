"""Perplexity from made laws with a known answer, the cutting of texts, and a run held against the model's own logits."""
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specgrad

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import compose
import evidence
import perplexity

CELLS = ["reference/float32", "w4a8/fp8"]
HEAD = {"schema": perplexity.SCHEMA, "date": "", "command": "", "commit": "", "tinygrad": "", "device": "",
        "model": "toy", "fingerprint": "", "cells": CELLS, "context": 9, "chunks": None, "text": "a.txt",
        "text_sha256": "", "jobs": 3}

def record(chunk: int, n: int, kind: str = "text") -> dict[str, Any]:
  """The reference is sure of one of 8 tokens with 3/4, which always follows; the cell knows nothing."""
  ref = np.log(np.tile([.75, *[.25 / 7] * 7], (n, 1))).astype(np.float32)
  return {"chunk": chunk, "kind": kind, "cells": {CELLS[0]: compose.compare(ref, ref, np.zeros(n, int)),
          CELLS[1]: compose.compare(ref, np.zeros_like(ref), np.zeros(n, int))}}

def test_a_law_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
  s = perplexity.summarise(HEAD, [record(0, 4, "a"), record(1, 8, "b"), record(2, 2, "b")])
  assert list(s["kinds"]) == ["all", "a", "b"] and not s["warnings"]
  for kind, n in (("all", 14), ("a", 4), ("b", 10)):
    ref, cell = (s["kinds"][kind][c] for c in CELLS)
    assert cell["tokens"] == n and cell["perplexity"]["value"] == pytest.approx(8)
    assert ref["perplexity"]["value"] == pytest.approx(4 / 3) and ref["kl"]["value"] == 0 and ref["top1"] == 1
    assert cell["nll_change"]["value"] == pytest.approx(np.log(6))
    assert cell["kl"]["value"] == pytest.approx(.75 * np.log(6) + .25 * np.log(8 / 28), abs=1e-6)
  assert perplexity.summarise(HEAD, [record(0, 4)])["warnings"] == ["1 of 3 chunks: a shard, or interrupted"]

def test_every_token_is_in_one_chunk() -> None:
  found = [("a", list(range(100, 120))), ("b", [7]), ("c", [])]
  chunks = perplexity.cut(found, 8, 0)
  assert all(ids[0] == 0 and 2 <= len(ids) <= 8 for _, ids in chunks)
  for kind, ids in found: assert [i for k, c in chunks if k == kind for i in c[1:]] == ids

def test_documents(tmp_path: Path) -> None:
  tokenizer = SimpleNamespace(encode=lambda text: [ord(c) for c in text])
  model: Any = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(bos_token_id=0))
  for name, text, want in (("a.txt", "abc", [("text", [97, 98, 99])]),
                           ("a.jsonl", '{"kind": "x", "text": "ab"}\n{"text": "c"}', [("x", [97, 98]), ("text", [99])])):
    (tmp_path / name).write_text(text)
    assert perplexity.documents(model, tmp_path / name) == want
  for name, data, message in (("b.txt", b"\xff", "byte 0 is not UTF-8"), ("c.txt", b"", "empty, want text"),
                              ("d.jsonl", b'{"text": "a"}\n[]', "line 2 has no text"), ("e.jsonl", b"x", "line 1 has no")):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message): perplexity.documents(model, tmp_path / name)
  with pytest.raises(ValueError, match="no tokenizer"):
    perplexity.documents(SimpleNamespace(tokenizer=None), tmp_path / "a.txt")

def test_a_run_beside_the_models_own_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  """The perplexity of both numerics that ship, from shards, one of them interrupted."""
  text = "def double(x):\n    return 2 * x\n"
  (tmp_path / "t.txt").write_text(text)
  files = [str(tmp_path / f"{i}.jsonl") for i in (1, 2)]
  flags = ["--text", str(tmp_path / "t.txt"), "--context", "6", "--chunks", "3", "--cells", ",".join(CELLS)]
  for i, file in enumerate(files, 1):
    assert perplexity.main([*flags, "--shard", f"{i}/2", "--out", file]) == 0, capsys.readouterr().err
  whole = Path(files[0]).read_text()
  Path(files[0]).write_text(whole[:-40])                   # cut in its last line
  assert perplexity.main([*flags, "--shard", "1/2", "--out", files[0]]) == 0
  assert Path(files[0]).read_text() == whole
  capsys.readouterr()
  assert perplexity.main(["--merge", *files]) == 0
  s = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert s["done"] == s["jobs"] == 3
  for cell, numerics in zip(CELLS, ("reference", "w4a8")):
    model, nll = specgrad.load(numerics=numerics, draft="none"), list[float]()
    for _, ids in perplexity.cut([("text", model.tokenizer.encode(text))], 6, model.config.bos_token_id)[:3]:
      z = model.logits(ids[:-1]).astype(np.float64)
      nll += (np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), ids[1:]]).tolist()
    assert s["kinds"]["all"][cell]["perplexity"]["value"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-6)

@pytest.mark.parametrize("flags, message", [
  (["--cells", "bf16/fp8"], "--cells: 'bf16/fp8', want some of reference/float32"), (["--context", "1"], "--context=1"),
  (["--cells", "w4a8/fp8,w4a8/fp8"], "one is there twice"), (["--merge", "nowhere.jsonl"], "nowhere.jsonl"),
  (["--context", "5000", "--cells", "w4a8/fp8"], "--context=5000, want at most 4097"),
])
def test_mistakes_end_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert perplexity.main(flags) == 2
  err = capsys.readouterr().err
  assert err.startswith("perplexity: error:") and message in err and err.count("\n") == 1

def test_a_chunk_in_two_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  for name in "ab": evidence.Records(tmp_path / name, HEAD, perplexity.SETTINGS).add(record(1, 2))
  assert perplexity.main(["--merge", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
  assert "1 is in two files" in capsys.readouterr().err
