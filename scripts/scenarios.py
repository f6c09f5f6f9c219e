"""The public profiles as scenarios: so many users at once, each with a prompt and a reply of so many tokens.

Whoever answers, a batch in this process or any server that speaks the OpenAI protocol, gets the same prompts and is timed
the same way, from outside: by when ids or text arrive. TPOT is (end - first) / (tokens - 1) of a request; the output rate
is all tokens over the time from the first request to the last end, prompts included; the decode rate leaves them out.
"""
from __future__ import annotations

import argparse
import datetime
import http.client
import json
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import evidence
import numpy as np
from evidence import command, commit

import specgrad
from specgrad.prompt import encode_chat
from specgrad.tokenizer import Tokenizer

if TYPE_CHECKING:
  from specgrad.api import Model
  from specgrad.engine import Stats

SCHEMA, SHORT = "specgrad.bench/1", 200                    # SHORT: tokens; a shorter run says little about speed or acceptance

@dataclass(frozen=True)
class Scenario:
  name: str
  users: int
  prompt: int                                              # tokens
  output: int

PUBLIC = {s.name: s for s in (Scenario("cc1", 1, 128, 512), Scenario("cc16", 16, 128, 512), Scenario("cc16-long", 16, 8192, 512))}
SMALL = {s.name: s for s in (Scenario("cc1", 1, 128, 200), Scenario("cc16", 16, 128, 200), Scenario("cc16-long", 16, 1024, 200))}
WAIT = 600                                                 # seconds without a byte from a server
SPECULATION = ("drafts", "draft_tokens", "accepted_tokens")  # vLLM's counters, by the end of their names

# ------------------------------------------------------------------------------------------------ prompts
def real_text(rows: Sequence[dict[str, Any]], tokenizer: Tokenizer, kinds: Sequence[str]) -> list[list[int]]:
  """Ids of whole texts and chats of these kinds, in turn one of each, as prompts.jsonl has them."""
  found: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
  for row in rows:
    if (kind := row.get("kind")) not in found: continue
    said = row.get("text") or row.get("messages") or row.get("prompt")
    found[kind].append(tokenizer.encode(said) if isinstance(said, str) else encode_chat(tokenizer, said)[1:])
  by_kind = [ids for ids in found.values() if ids]
  return [ids for turn in zip(*(x[:min(map(len, by_kind))] for x in by_kind)) for ids in turn] if by_kind else []

def texts_of(file: Path, tokenizer: Tokenizer, kinds: Sequence[str]) -> list[list[int]]:
  rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
  if not (found := real_text(rows, tokenizer, kinds)):
    raise ValueError(f"{file.name}: no text of kind {', '.join(kinds)}")
  return found

def cut_to(texts: Sequence[list[int]], number: int, n: int) -> list[int]:
  """n ids of texts one after another, another text first for each number, so that no two prompts share a beginning."""
  out, at = list[int](), number
  while len(out) < n:
    out += texts[at % len(texts)]
    at += 1
  return out[:n]

# ------------------------------------------------------------------------------------------------ one request
@dataclass(frozen=True)
class Call:
  """What one request looked like from outside. Seconds since it was sent."""
  first: float                                             # until something came
  end: float                                               # until the last of it came
  tokens: int
  chunks: int                                              # pieces that it came in
  prompt_tokens: int
  ids: list[int] | None = None
  stats: Stats | None = None

  @property
  def tpot(self) -> float: return (self.end - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

class Answers(Protocol):
  def ask(self, prompt: Any, tokens: int, temperature: float, seed: int) -> Call:
    """Raises ValueError, ArithmeticError or OSError where no answer comes."""

class InProcess:
  """A batch on an engine with its thread. `depth`: drafted tokens a step."""
  def __init__(self, model: Model, depth: int):
    from specgrad.batch import Batch
    self.batch = Batch(model.engine, depth=depth)
    self.thread = threading.Thread(target=self.batch.run, daemon=True)
    self.thread.start()

  def ask(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> Call:
    from specgrad.engine import Sampling
    began, first, ids, chunks = time.perf_counter(), 0.0, list[int](), 0
    job = self.batch.submit(prompt, tokens, Sampling(temperature=temperature, seed=seed), ignore_eos=True)
    for block in job:
      now = time.perf_counter() - began
      first, chunks = first or now, chunks + 1
      ids += block.ids
    if not ids: raise ArithmeticError("batch: a request ended without a token")
    return Call(first, now, len(ids), chunks, len(prompt), ids, job.stats)

  def close(self) -> None:
    self.batch.close()
    self.thread.join()

class Server:
  """One that speaks the OpenAI protocol, by the standard library. chat: /v1/chat/completions with the prompt as a user's
  message, which wraps it in the model's template; else /v1/completions."""
  def __init__(self, url: str, key: str | None, model: str, chat: bool):
    parts = urllib.parse.urlsplit(url if "//" in url else "http://" + url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
      raise ValueError(f"--url={url}, want such as http://127.0.0.1:8000")
    self.url, self.secure, self.place = url, parts.scheme == "https", parts.netloc
    self.root = parts.path.rstrip("/").removesuffix("/v1")
    self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    self.model, self.chat = model, chat

  def send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
    connection = (http.client.HTTPSConnection if self.secure else http.client.HTTPConnection)(self.place, timeout=WAIT)
    connection.request(method, self.root + path, None if body is None else json.dumps(body), self.headers)
    return connection.getresponse()

  def ask(self, prompt: str, tokens: int, temperature: float, seed: int) -> Call:
    """Servers that do not know ignore_eos may end a reply early: the row says how long replies were."""
    what = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
    body = {"model": self.model, **what, "max_tokens": tokens, "temperature": temperature, "seed": seed, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True}
    began, times, usage = time.perf_counter(), list[float](), dict[str, int]()
    try: answer = self.send("POST", "/v1/chat/completions" if self.chat else "/v1/completions", body)
    except http.client.HTTPException as error: raise OSError(f"{self.url}: {type(error).__name__} {error}") from None
    if answer.status != 200:
      raise ValueError(f"{self.url}: status {answer.status}: {answer.read(400).decode(errors='replace').strip()}")
    for event in events(answer):
      if "error" in event: raise ValueError(f"{self.url}: {str(event['error'])[:400]}")
      usage = event.get("usage") or usage
      for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(k) for k in ("content", "reasoning_content", "reasoning")):
          times.append(time.perf_counter() - began)
    answer.close()
    if not times: raise ValueError(f"{self.url}: no text came, want a streamed reply")
    return Call(times[0], times[-1], usage.get("completion_tokens", 0), len(times), usage.get("prompt_tokens", 0))

  def counters(self) -> dict[str, float]:
    """Speculation's, from /metrics, over all that the server has done; empty where it does not tell."""
    try:
      answer = self.send("GET", "/metrics")
      text = answer.read().decode(errors="replace") if answer.status == 200 else ""
    except (OSError, http.client.HTTPException): return {}
    found = dict[str, float]()
    for name, value in re.findall(r"^\w+:spec_decode_num_(\w+?)(?:_total)?(?:\{[^}]*\})? ([\d.e+]+)$", text, re.MULTILINE):
      if name in SPECULATION: found[name] = found.get(name, 0) + float(value)
    return found if len(found) == len(SPECULATION) else {}

def events(lines: Any) -> Iterator[dict[str, Any]]:
  """The JSON objects of a server-sent stream, up to [DONE]. Raises ValueError for what is none."""
  for line in lines:
    if not line.startswith(b"data:"): continue
    data = line[5:].strip()
    if data == b"[DONE]": return
    try:
      if isinstance(event := json.loads(data), dict): yield event
    except ValueError: raise ValueError(f"server: {data[:80]!r} is no JSON") from None

# ------------------------------------------------------------------------------------------------ rounds
@dataclass(frozen=True)
class Round:
  """All users once, together."""
  calls: list[Call]
  wall: float                                              # seconds from the first request to the last end

  @property
  def rate(self) -> float: return sum(c.tokens for c in self.calls) / self.wall

def together(answers: Answers, prompts: Sequence[Any], tokens: int, temperature: float, seed: int) -> Round:
  with ThreadPoolExecutor(len(prompts)) as pool:
    began = time.perf_counter()
    calls = list(pool.map(lambda x: answers.ask(x[1], tokens, temperature, seed + x[0]), enumerate(prompts)))
    return Round(calls, time.perf_counter() - began)

def figures(s: Scenario, rounds: Sequence[Round]) -> dict[str, Any]:
  """Rates are medians of the rounds with lowest and highest; latencies are over all requests."""
  calls, n = [c for r in rounds for c in r.calls], np.array([[c.tokens for c in r.calls] for r in rounds])
  rates = [r.rate for r in rounds]
  decode = [len(r.calls) * sum(c.tokens - 1 for c in r.calls) / max(sum(c.end - c.first for c in r.calls), 1e-9) for r in rounds]
  spread = lambda name, x: {name: float(np.median(x)), f"{name}_min": float(min(x)), f"{name}_max": float(max(x))}
  cut = lambda name, x: {f"{name}_p50": float(np.quantile(x, .5)), f"{name}_p95": float(np.quantile(x, .95))}
  out = {"scenario": s.name, "users": s.users, "prompt_tokens": int(np.median([c.prompt_tokens for c in calls])),
         "max_tokens": s.output, "output_tokens": int(np.median(n)), "requests": len(calls), **spread("tok_s", rates),
         **spread("tok_s_decode", decode), **cut("ttft_ms", [1e3 * c.first for c in calls]),
         **cut("tpot_ms", [1e3 * c.tpot for c in calls])}
  known = [(c.stats, c.end - c.first) for c in calls if c.stats]
  speculation = dict.fromkeys(("tokens_per_step", "acceptance_rate", "steps_s", "verifier"), None)
  if known:                                                # steps a second of one sequence
    steps, accepted = (sum(f(k) for k, _ in known) for f in (lambda k: k.steps, lambda k: sum(k.accepted)))
    speculation = {"tokens_per_step": 1 + accepted / steps, "verifier": known[0][0].verifier,
                   "acceptance_rate": accepted / drafted if (drafted := sum(sum(k.drafted) for k, _ in known)) else None,
                   "steps_s": sum(k.steps - 1 for k, _ in known) / max(sum(t for _, t in known), 1e-9)}
  return {**out, **speculation}

def counted(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
  """What a server's counters say of the rounds between."""
  if not before or not after or (steps := after["drafts"] - before["drafts"]) <= 0: return {}
  accepted, drafted = (after[k] - before[k] for k in ("accepted_tokens", "draft_tokens"))
  return {"tokens_per_step": 1 + accepted / steps, "acceptance_rate": accepted / drafted if drafted else None}

def warnings(row: dict[str, Any]) -> list[str]:
  found = list[str]()
  if row["output_tokens"] < row["max_tokens"]:
    found.append(f"{row['scenario']}: replies of {row['output_tokens']} tokens where {row['max_tokens']} were asked for")
  if row["output_tokens"] < SHORT:
    found.append(f"{row['scenario']}: replies of {row['output_tokens']} tokens, and shorter than {SHORT} says little")
  if row["tokens_per_step"] is None:
    found.append(f"{row['scenario']}: the server does not tell tokens/step, so speed and luck of the text can't be told apart")
  return found

@dataclass(frozen=True)
class Cell:
  """A scenario at one temperature, and who answers. prompts(round) gives a prompt for each user."""
  scenario: Scenario
  temperature: float
  answers: Answers
  prompts: Callable[[int], list[Any]]

def measure(cells: Sequence[Cell], repeat: int, seed: int, again: Callable[[], bool] = lambda: False,
            tick: Callable[[], None] = lambda: None) -> list[list[Round]]:
  """`repeat` rounds of each, by turns, after one that does not count: a machine is not equally fast at all times, and so they can be
  compared round by round. again: says, after a round, whether it must be repeated."""
  rounds: list[list[Round]] = [[] for _ in cells]
  for i in range(repeat + 1):
    for cell, mine in zip(cells, rounds):
      s = cell.scenario
      while True:
        made = together(cell.answers, cell.prompts(i), s.output, cell.temperature, seed + i * s.users)
        if not again(): break
      if not all(c.tokens for c in made.calls):            # then pieces are the only count there is
        raise ValueError("server: no usage in the stream, want stream_options.include_usage to be supported")
      mine.append(made)
      tick()
  return [mine[1:] for mine in rounds]

def over(rounds: Sequence[Round], ones: Sequence[Round]) -> dict[str, float]:
  """How many times the tokens of one user, round by round."""
  x = [a.rate / b.rate for a, b in zip(rounds, ones)]
  return {"over_one_user": float(np.median(x)), "over_one_user_min": min(x), "over_one_user_max": max(x)}

# ------------------------------------------------------------------------------------------------ for people, and a server
def table(rows: Sequence[dict[str, Any]]) -> str:
  """A line each; the heading for none."""
  number = lambda x, form: "-" if x is None else f"{x:{form}}"
  columns = [("scenario", 10), ("T", 4), ("depth", 6), ("in -> out", 13), ("tok/s", 22), ("decode tok/s", 22), ("TTFT ms 50/95 %", 17),
             ("TPOT ms 50/95 %", 17), ("steps/s", 9), ("tok/step", 9), ("accepted", 9), ("speed-up", 9), ("identical", 10),
             ("of ceiling", 11), ("x one user", 18)]
  between = lambda name, r, n=1: f"{r[name]:.{n}f} ({r[name + '_min']:.{n}f}..{r[name + '_max']:.{n}f})"
  cells = [[n for n, _ in columns]] if not rows else [
    [r["scenario"], f"{r['temperature']:g}", number(r["depth"], "d"), f"{r['prompt_tokens']} -> {r['output_tokens']}",
     between("tok_s", r), between("tok_s_decode", r), f"{r['ttft_ms_p50']:.0f} / {r['ttft_ms_p95']:.0f}",
     f"{r['tpot_ms_p50']:.2f} / {r['tpot_ms_p95']:.2f}", number(r["steps_s"], ".1f"), number(r["tokens_per_step"], ".2f"),
     number(r["acceptance_rate"], ".0%"), number(r.get("speedup"), ".2f"),
     {True: "yes", False: "NO", None: "-"}[r["identical"]], number(r.get("roofline_share"), ".0%"),
     between("over_one_user", r, 2) if "over_one_user" in r else "-"] for r in rows]
  return "\n".join(" ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, (_, w)) in enumerate(zip(row, columns))) for row in cells)

def remote(args: argparse.Namespace, argv: Sequence[str], bar: Any) -> dict[str, Any]:
  """The scenarios against a server. Prompts are text, which its own tokenizer counts."""
  folder = args.model or specgrad.demo_path()
  own = folder / "prompts.jsonl"
  kinds, tokenizer = args.kinds or list(evidence.REAL), Tokenizer.from_file(folder)
  texts = texts_of(own if own.is_file() else specgrad.demo_path() / "prompts.jsonl", tokenizer, kinds)
  server = Server(args.url, args.api_key, args.model_name, args.endpoint == "chat")
  wanted = [(SMALL if args.small else PUBLIC)[s] for s in args.scenario]
  bar.reset(len(wanted) * len(args.temperature) * (args.repeat + 1))
  head = {"schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
          "command": command("bench", [x for x in argv if x != args.api_key]), "commit": commit(), "url": args.url,
          "model": args.model_name, "endpoint": args.endpoint, "repeat": args.repeat, "seed": args.seed, "scaled_down": args.small}
  bar.write(f"{args.url}, {args.model_name}, /v1/{args.endpoint}; prompts: {' and '.join(kinds)}, cut to length, no two alike\n",
            file=sys.stdout)
  bar.write(table([]), file=sys.stdout)
  rows, warned = list[dict[str, Any]](), list[str]()
  for s in wanted:
    for t in args.temperature:
      prompts = lambda i, s=s: [tokenizer.decode(cut_to(texts, i * s.users + j, s.prompt)) for j in range(s.users)]
      together(server, prompts(0)[:1], 2, t, args.seed)  # says at once what is wrong
      before = server.counters()
      (rounds,) = measure([Cell(s, t, server, prompts)], args.repeat, args.seed, tick=bar.update)
      row = {**figures(s, rounds), "temperature": t, "depth": None, "prompt_kind": "+".join(kinds), "identical": None,
             **counted(before, server.counters())}
      rows.append(row)
      bar.write(table([row]), file=sys.stdout)
      warned += warnings(row)
  warned.append("ids are not compared with plain decoding: a server does not give them")
  bar.write("\n".join(["", *(f"warning: {text}" for text in dict.fromkeys(warned))]), file=sys.stdout)
  return {**head, "scenarios": rows, "warnings": list(dict.fromkeys(warned))}
