"""The public profiles: figures of made requests, a batch, and a stand-in server that speaks the OpenAI protocol."""
import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import bench
import scenarios
from scenarios import Call, Round, Scenario

S = Scenario("toy", 2, 8, 5)

# ------------------------------------------------------------------------------------------------ made requests
def test_figures_of_made_requests() -> None:
  """Two rounds of two users: 5 tokens each, the first after 1 s, one more every half second (or every second)."""
  stats = lambda: SimpleNamespace(steps=3, accepted=[1, 1], drafted=[3, 3], verifier="v")
  calls = [Call(1, 3, 5, 3, 8, stats=stats()), Call(1, 5, 5, 3, 8, stats=stats())]
  x = scenarios.figures(S, [Round(calls, 5.0), Round(calls[:1] * 2, 4.0)])
  assert (x["requests"], x["users"], x["prompt_tokens"], x["output_tokens"]) == (4, 2, 8, 5)
  assert (x["tok_s"], x["tok_s_min"], x["tok_s_max"]) == (2.25, 2.0, 2.5)
  assert (x["tok_s_decode_min"], x["tok_s_decode_max"]) == (2 * 8 / 6, 2 * 8 / 4)
  assert (x["ttft_ms_p50"], x["tpot_ms_p50"]) == (1000, 500) and 500 < x["tpot_ms_p95"] < 1000
  assert x["tokens_per_step"] == pytest.approx(1 + 2 / 3) and x["acceptance_rate"] == pytest.approx(1 / 3)
  assert x["steps_s"] == pytest.approx(8 / 10) and x["verifier"] == "v"
  alone = scenarios.figures(S, [Round([Call(1, 1, 1, 1, 8)] * 2, 1.0)])
  assert alone["tokens_per_step"] is None and alone["tpot_ms_p50"] == 0
  said = " ".join(scenarios.warnings(alone))
  assert "replies of 1 tokens where 5 were asked for" in said and "shorter than 200" in said and "does not tell" in said

def test_no_two_prompts_begin_alike() -> None:
  rows = [{"kind": k, "text": f"{k}{i}" * 3} for k in ("a", "b") for i in range(3)] + [{"kind": "c", "text": "never"}]
  tokenizer: Any = SimpleNamespace(encode=lambda text: [ord(c) for c in text])
  texts = scenarios.real_text(rows, tokenizer, ["a", "b"])
  assert ["".join(map(chr, ids)) for ids in texts[:3]] == ["a0a0a0", "b0b0b0", "a1a1a1"] and len(texts) == 6
  cut = [scenarios.cut_to(texts, i, 9) for i in range(6)]
  assert all(len(x) == 9 for x in cut) and len({tuple(x[:4]) for x in cut}) == 6
  assert cut[0] == texts[0] + texts[1][:3] and cut[5] == texts[5] + texts[0][:3]

def test_rounds_are_warmed_up_and_repeated_where_something_compiled() -> None:
  asked, compiled = list[tuple[str, int]](), [True, False, True, False, False]

  class Toy:
    def ask(self, prompt: str, tokens: int, temperature: float, seed: int) -> Call:
      asked.append((prompt, seed))
      return Call(.1, .2, tokens, 1, 3)
  (rounds,) = scenarios.measure([scenarios.Cell(S, 0.0, Toy(), lambda i: [f"{i}a", f"{i}b"])], 2, 100, lambda: compiled.pop(0))
  assert len(rounds) == 2 and not compiled
  assert sorted(asked) == sorted([("0a", 100), ("0b", 101)] * 2 + [("1a", 102), ("1b", 103)] * 2 + [("2a", 104), ("2b", 105)])
  with pytest.raises(ValueError, match="no usage in the stream"):
    scenarios.measure([scenarios.Cell(S, 0.0, SimpleNamespace(ask=lambda *a: Call(.1, .2, 0, 4, 3)), lambda i: ["a"])], 1, 0)

def test_scenarios_take_turns_and_are_compared_round_by_round() -> None:
  asked = list[str]()

  class Toy:
    def ask(self, prompt: str, tokens: int, temperature: float, seed: int) -> Call:
      asked.append(prompt)
      return Call(.1, .2, tokens, 1, 3)
  one, two = (scenarios.Cell(scenarios.Scenario("", 1, 3, 8), 0.0, Toy(), lambda i, name=name: [f"{name}{i}"]) for name in "ab")
  rounds = scenarios.measure([one, two], 2, 0)
  assert asked == ["a0", "b0", "a1", "b1", "a2", "b2"] and [len(r) for r in rounds] == [2, 2]
  call = lambda tokens: Call(.1, .2, tokens, 1, 3)
  ones = [scenarios.Round([call(8)], wall) for wall in (1.0, 2.0, 4.0)]
  many = [scenarios.Round([call(8), call(16)], wall) for wall in (1.0, 1.5, 2.0)]
  assert scenarios.over(many, ones) == {"over_one_user": 4.0, "over_one_user_min": 3.0, "over_one_user_max": 6.0}

# ------------------------------------------------------------------------------------------------ in this process
def test_a_batch_in_this_process(shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  """Three users at once; the ids of each are those of plain decoding."""
  monkeypatch.setitem(scenarios.SMALL, "cc16", Scenario("cc16", 3, 12, 8))
  assert bench.main(["--model", str(shared / "golden" / "dspark_w16" / "ckpt"), "--scenario", "cc16", "--repeat", "1",
                     "--temperature", "0"]) == 0, capsys.readouterr().err
  out = capsys.readouterr().out
  result = json.loads(out.splitlines()[-1])
  plain, fast = result["scenarios"]
  assert result["scaled_down"] and "not the lengths of the public profile" in out and "roofline, before the stopwatch" in out
  assert [(x["depth"], x["identical"]) for x in (plain, fast)] == [(0, None), (2, True)]
  for x in (plain, fast):
    assert (x["users"], x["prompt_tokens"], x["output_tokens"], x["requests"], x["prompt_kind"]) == (3, 12, 8, 3, "random")
    assert x["tok_s"] > 0 and 0 < x["ttft_ms_p50"] <= x["ttft_ms_p95"] and x["roofline_share"] > 0
  assert plain["tokens_per_step"] == 1 and plain["speedup"] == 1 and plain["acceptance_rate"] is None
  assert 1 <= fast["tokens_per_step"] <= 3 and "depth 2" in fast["verifier"]
  assert fast["speedup"] == pytest.approx(fast["tok_s"] / plain["tok_s"], rel=1e-6)

# ------------------------------------------------------------------------------------------------ a server
class Stand(http.server.BaseHTTPRequestHandler):
  """Says five tokens in three pieces; counts two steps with three of four drafted tokens accepted a reply."""
  said, usage, status, done = list[dict[str, Any]](), True, 200, 0

  def do_POST(self) -> None:
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    type(self).said.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
    type(self).done += 1
    self.send_response(self.status)
    self.end_headers()
    if self.status != 200: self.wfile.write(b"model not\nfound")
    chat = "messages" in body
    piece = lambda text: {"choices": [{"delta": {"content": text}} if chat else {"text": text}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
    for x in [] if self.status != 200 else [piece(""), piece("a"), piece("bc"), piece("de"), usage]:
      if "usage" in x and not self.usage: continue
      self.wfile.write(b": comment\n\ndata: " + json.dumps(x).encode() + b"\n\n")
      self.wfile.flush()
      time.sleep(.002)
    self.wfile.write(b"data: [DONE]\n\n")

  def do_GET(self) -> None:
    self.send_response(200 if self.path == "/v9/metrics" else 404)
    self.end_headers()
    for name, n in (("drafts", 2), ("draft_tokens", 4), ("accepted_tokens", 3)):
      text = f'# HELP x\nvllm:spec_decode_num_{name}_total{{engine="0"}} {n * self.done}.0\n'
      self.wfile.write(text.encode() + b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0\n')

  def log_message(self, *args: Any) -> None: pass

@pytest.fixture
def server() -> Iterator[str]:
  Stand.said, Stand.usage, Stand.status, Stand.done = [], True, 200, 0
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stand) as s:
    threading.Thread(target=s.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{s.server_address[1]}/v9"
    s.shutdown()

@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server(server: str, endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
  """One round of warm-up and one that counts, for one user and for 16; the key is sent and not written down."""
  flags = ["--url", server + "/v1/", "--api-key", "secret", "--model-name", "toy", "--endpoint", endpoint, "--scenario", "cc1,cc16",
           "--repeat", "1", "--temperature", "0", "--small"]
  assert bench.main(flags) == 0, capsys.readouterr().err
  out = capsys.readouterr().out
  assert "secret" not in out
  result = json.loads(out.splitlines()[-1])
  one, many = result["scenarios"]
  assert [(x["users"], x["requests"], x["prompt_tokens"], x["output_tokens"]) for x in (one, many)] == [(1, 1, 7, 5), (16, 16, 7, 5)]
  for x in (one, many):
    assert x["tokens_per_step"] == pytest.approx(2.5) and x["acceptance_rate"] == pytest.approx(.75) and x["depth"] is None
    assert x["ttft_ms_p50"] > 0 and x["tpot_ms_p50"] > 0
  assert len(Stand.said) == 2 * 17 + 2                     # and one request before each scenario that only tries
  a = Stand.said[-1]
  assert a["path"] == ("/v9/v1/completions" if endpoint == "completions" else "/v9/v1/chat/completions")
  assert (a["key"], a["model"], a["max_tokens"], a["stream"], a["ignore_eos"]) == ("Bearer secret", "toy", 200, True, True)
  texts = [x.get("prompt") or x["messages"][0]["content"] for x in Stand.said[-16:]]
  assert len(set(texts)) == 16 and all(len(t) > 100 for t in texts)
  assert any("replies of 5 tokens where 200 were asked for" in w for w in result["warnings"])

def test_a_server_that_tells_nothing_or_refuses(server: str, capsys: pytest.CaptureFixture[str]) -> None:
  flags = ["--url", server, "--model-name", "toy", "--scenario", "cc1", "--repeat", "1", "--temperature", "0"]
  for change, text in (({"usage": False}, "no usage in the stream"), ({"status": 404}, "status 404: model not found"), ({}, "")):
    Stand.usage, Stand.status = change.get("usage", True), change.get("status", 200)
    assert bench.main(flags) == (2 if text else 0)
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == bool(text)
  assert scenarios.Server(server.replace("/v9", "/v8"), None, "toy", False).counters() == {}
  for url, text in (("ftp://x", "want such as http://127.0.0.1:8000"), ("http://127.0.0.1:1", "refused")):
    assert bench.main(["--url", url, *flags[2:]]) == 2
    assert text in capsys.readouterr().err
