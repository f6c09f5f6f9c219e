"""A request that runs: its sequences turned into text by a thread each, its reply in OpenAI's form, whole or as a stream,
and what is counted of it. The event loop only passes pieces on, as many at a time as are there."""
from __future__ import annotations

import asyncio
import itertools
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from specgrad.api import ReplyText
from specgrad.connection import Exchange, Gone, event
from specgrad.grammar import Mask
from specgrad.reply import ReplyParser
from specgrad.request import Request, RequestError

if TYPE_CHECKING:
  from specgrad.batch import Batch, Job
  from specgrad.engine import Stats, TokenLogprobs
  from specgrad.serve import App

PING_SECONDS = 15.0                                        # between signs of life to a client that waits for its first token
FINISH = {"stop": "stop", "length": "length", "context": "length"}  # what a client is told; all else is an error
GAPS = (.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 10, 20, 40, 80)
TIMES = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
SIZES = tuple(m * 10 ** e for e in range(6) for m in (1, 2, 5))

# ---------------------------------------------------------------------------------------------------------- metrics
class Metrics:
  """Prometheus metrics under vLLM's names, so that its dashboards work. A counter's name gets _total when it is shown."""
  def __init__(self, model: str, batch: Batch):
    disable_created_metrics()
    self.registry = CollectorRegistry()
    def make(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
      metric = kind(f"vllm:{name}", text, ("model_name", "engine", *labels), registry=self.registry, **more)
      return (lambda *values: metric.labels(model, "0", *values)) if labels else metric.labels(model, "0")
    make(Gauge, "num_requests_running", "Sequences in the batch.").set_function(lambda: batch.active)
    make(Gauge, "num_requests_waiting", "Sequences that wait for a slot.").set_function(lambda: len(batch.waiting))
    self.prompt = make(Counter, "prompt_tokens", "Prompt tokens, reused ones included.")
    self.generation = make(Counter, "generation_tokens", "Tokens of replies.")
    self.queries = make(Counter, "prefix_cache_queries", "Prompt tokens that were looked for in the cache.")
    self.hits = make(Counter, "prefix_cache_hits", "Prompt tokens that were found there.")
    self.success = make(Counter, "request_success", "Sequences that ended, by reason.", "finished_reason")
    self.drafts = make(Counter, "spec_decode_num_drafts", "Steps with a draft.")
    self.drafted = make(Counter, "spec_decode_num_draft_tokens", "Tokens drafted.")
    self.accepted = make(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that stood.")
    self.places = make(Counter, "spec_decode_num_accepted_tokens_per_pos", "The same by place in the block.", "position")
    self.ttft = make(Histogram, "time_to_first_token_seconds", "Request to first token.", buckets=TIMES)
    self.gap = make(Histogram, "inter_token_latency_seconds", "Step to step; a step may bring several tokens.", buckets=GAPS)
    self.tpot = make(Histogram, "request_time_per_output_token_seconds", "Mean time per token after the first, by sequence.", buckets=GAPS)
    self.whole = make(Histogram, "e2e_request_latency_seconds", "Request to last token.", buckets=TIMES)
    self.prompts = make(Histogram, "request_prompt_tokens", "Prompt tokens by sequence.", buckets=SIZES)
    self.replies = make(Histogram, "request_generation_tokens", "Reply tokens by sequence.", buckets=SIZES)

  def draft(self, stats: Stats, before: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """What was drafted since `before`, which is what this returned the last time."""
    now = list(stats.drafted), list(stats.accepted)
    more = [[b - a for a, b in zip(old + [0] * len(new), new)] for old, new in zip(before, now)]
    self.drafts.inc(more[0][0] if more[0] else 0)
    self.drafted.inc(sum(more[0]))
    self.accepted.inc(sum(more[1]))
    for place, count in enumerate(more[1]): self.places(str(place)).inc(count)
    return now

# ------------------------------------------------------------------------------------------------------ one sequence
@dataclass
class Piece:
  """What a sequence brought since the last one. reason: how it ended, empty as long as it goes on; "error" and
  "interrupted" are no ends that a client asked for."""
  choice: Choice
  ids: list[int] = field(default_factory=list)
  text: str = ""
  logprobs: list[TokenLogprobs] = field(default_factory=list)
  reason: str = ""
  error: str = ""

@dataclass
class Choice:
  """One sequence of a request. `follow` runs in a thread of its own, all else in the event loop."""
  index: int
  job: Job
  text: ReplyText
  mask: Mask | None
  parser: ReplyParser | None                               # of a chat
  prompt_tokens: int
  ids: list[int] = field(default_factory=list)
  said: dict[str, str] = field(default_factory=dict)       # content and reasoning_content, or text
  calls: list[dict[str, Any]] = field(default_factory=list)
  entries: list[dict[str, Any]] = field(default_factory=list)  # of logprobs
  reason: str = ""

  def follow(self, put: Callable[[Piece], None], metrics: Metrics, began: float) -> None:
    """Turns blocks into pieces until the sequence or its text ends, and counts them."""
    counted: tuple[list[int], list[int]] = ([], [])
    first = last = 0.0
    tokens, reason, problem, told = 0, "", "", False
    metrics.prompt.inc(self.prompt_tokens)
    try:
      for block in self.job:
        now = time.perf_counter()
        if self.job.stats.steps % 32 == 0: counted = metrics.draft(self.job.stats, counted)  # 20 us, so not each time
        (metrics.gap if first else metrics.ttft).observe(now - (last or began))
        first, last = first or now, now
        if told: continue                                  # a stop string ended it: what the steps brought beyond is dropped
        new, shown = self.text.push(block.ids)
        tokens += len(new)
        metrics.generation.inc(len(new))
        if self.mask and self.mask.error: raise ArithmeticError(f"response_format: the grammar failed: {self.mask.error}")
        if self.text.ended:
          reason, told = "stop", True
          self.job.cancel()                                # after EOS that does nothing
        put(Piece(self, new, shown, (block.logprobs or [])[:len(new)], reason))
      reason = reason or self.job.stats.finish_reason or "error"
    except ArithmeticError as error: reason, problem = "error", str(error)
    except Exception as error:                             # of the engine: the sequence is lost, the server is not
      traceback.print_exc()
      reason, problem = "error", f"internal error ({type(error).__name__})"
    if not told: put(Piece(self, text=self.text.finish(), reason=reason, error=problem))
    self.job.cancel()                                      # where it was given up here
    metrics.draft(self.job.stats, counted)
    metrics.success(reason).inc()
    metrics.queries.inc(self.prompt_tokens)
    metrics.hits.inc(self.job.stats.reused_tokens)
    metrics.whole.observe(time.perf_counter() - began)
    metrics.prompts.observe(self.prompt_tokens)
    metrics.replies.observe(tokens)
    if tokens > 1: metrics.tpot.observe((last - first) / (tokens - 1))

  def take(self, piece: Piece, call_id: Callable[[], str]) -> list[dict[str, Any]]:
    """What the piece adds, as deltas of a chat or of a text."""
    self.ids += piece.ids
    self.reason = piece.reason
    events: list[tuple[str, Any]] = [("text", piece.text)] if piece.text else []
    if self.parser:
      events = [*self.parser.push(piece.text)]
      if self.reason: events += self.parser.finish().events
    deltas: list[dict[str, Any]] = []
    for kind, value in events:
      if kind == "tool_call":
        self.calls.append({**value, "id": call_id()})
        deltas.append({"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]})
      else:
        name = "reasoning_content" if kind == "reasoning" else kind
        self.said[name] = self.said.get(name, "") + value
        deltas.append({name: value})
    return deltas

  @property
  def finish_reason(self) -> str | None:
    reason = FINISH.get(self.reason)
    return "tool_calls" if self.calls and reason == "stop" else reason

# ------------------------------------------------------------------------------------------------------ one request
class Completion:
  """A request whose sequences run, and its reply in either of the two forms, whole or as a stream."""
  def __init__(self, app: App, request: Request, choices: list[Choice], began: float):
    self.app, self.request, self.choices, self.began = app, request, choices, began
    self.id = ("chatcmpl-" if request.chat else "cmpl-") + uuid.uuid4().hex
    self.created, self.pieces = int(time.time()), asyncio.Queue[Piece | None]()
    self.loop = asyncio.get_running_loop()

  def put(self, piece: Piece | None) -> None:
    """From any thread. None: the client left."""
    self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

  async def run(self, exchange: Exchange) -> None:
    """Raises RequestError for a sequence that failed, and Gone."""
    for choice in self.choices: self.app.pool.submit(choice.follow, self.put, self.app.metrics, self.began)
    watch = asyncio.create_task(exchange.gone())
    watch.add_done_callback(lambda _: self.put(None))
    self.app.running.add(self)
    try:
      if self.request.stream: await self.stream(exchange)
      else:
        async for piece in self.progress(None):
          if piece: self.read(piece)
        await exchange.answer(200, self.whole())
    finally:
      watch.cancel()
      self.app.running.discard(self)
      self.cancel()
      for choice in self.choices: self.app.log(f"{exchange.client} {self.id} {self.ending(choice)}")

  def cancel(self) -> None:
    """Does nothing to sequences that have ended."""
    for choice in self.choices: choice.job.cancel()

  def ending(self, choice: Choice) -> str:
    problems = [*(choice.parser.finish().problems if choice.parser else []), *choice.job.stats.warnings]
    return f"{choice.reason or 'cancelled'}: {choice.job.stats.line()}" + "".join(f" ({problem})" for problem in problems)

  async def progress(self, patience: float | None) -> AsyncIterator[Piece | None]:
    """Pieces until all sequences have ended, those of one sequence that are there together as one; none after `patience`
    seconds without any. Raises RequestError for a sequence that failed, and Gone."""
    open_choices = len(self.choices)
    while open_choices:
      try:
        async with asyncio.timeout(patience): first = await self.pieces.get()
      except TimeoutError:
        yield None
        continue
      merged: dict[int, Piece] = {}
      while True:
        if first is None: raise Gone
        if first.reason in ("error", "interrupted"): self.fail(first)
        if before := merged.get(first.choice.index):
          first = Piece(first.choice, before.ids + first.ids, before.text + first.text, before.logprobs + first.logprobs, first.reason)
        merged[first.choice.index] = first
        if self.pieces.empty(): break
        first = self.pieces.get_nowait()
      for piece in merged.values():
        open_choices -= bool(piece.reason)
        yield piece

  def fail(self, piece: Piece) -> None:
    piece.choice.reason = piece.reason
    if piece.reason == "error": raise RequestError(piece.error or "the sequence ended with an error", code="engine_error", status=500)
    raise RequestError("the server is shutting down, the reply was cancelled", code="unavailable", status=503)

  def read(self, piece: Piece) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """-> what the piece adds, and its logprobs."""
    choice, entries = piece.choice, [self.entry(token, logprobs) for token, logprobs in zip(piece.ids, piece.logprobs)]
    choice.entries += entries
    return choice.take(piece, lambda: "call_" + uuid.uuid4().hex[:24]), entries

  # ---------------------------------------------------------------------------------------------- OpenAI's objects
  async def stream(self, exchange: Exchange) -> None:
    await exchange.events()
    if self.request.chat:
      for choice in self.choices: await exchange.write(event(self.chunk(choice, {"role": "assistant", "content": ""})))
    async for piece in self.progress(PING_SECONDS):
      if piece is None:
        await exchange.write(b": waiting\n\n")
        continue
      deltas, entries = self.read(piece)
      last = [{}] if self.request.chat else [{"text": ""}]
      if (entries or piece.reason) and not deltas: deltas = last
      elif piece.reason and self.request.chat: deltas += last
      chunks = [self.chunk(piece.choice, delta, entries if i == 0 else [], i == len(deltas) - 1) for i, delta in enumerate(deltas)]
      if chunks: await exchange.write(b"".join(map(event, chunks)))
    end = event(self.frame([], chunk=True) | self.counts()) if self.request.include_usage else b""
    await exchange.write(end + b"data: [DONE]\n\n", last=True)

  def frame(self, choices: list[dict[str, Any]], chunk: bool = False) -> dict[str, Any]:
    kind = "chat.completion" + ".chunk" * chunk if self.request.chat else "text_completion"
    return {"id": self.id, "object": kind, "created": self.created, "model": self.app.name, "system_fingerprint": self.app.fingerprint,
            "choices": choices}

  def chunk(self, choice: Choice, delta: dict[str, Any], entries: Sequence[dict[str, Any]] = (), last: bool = False) -> dict[str, Any]:
    logprobs = self.logprobs(choice, entries) if entries else None
    said = {"delta": delta} if self.request.chat else delta
    body = {"index": choice.index, **said, "logprobs": logprobs, "finish_reason": choice.finish_reason if last and choice.reason else None}
    return self.frame([body], chunk=True) | ({"usage": None} if self.request.include_usage else {})

  def whole(self) -> dict[str, Any]:
    bodies = []
    for choice in self.choices:
      said: dict[str, Any] = {"text": choice.said.get("text", "")}
      if self.request.chat:
        content = choice.said.get("content", None if choice.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if "reasoning_content" in choice.said: message["reasoning_content"] = choice.said["reasoning_content"]
        if choice.calls: message["tool_calls"] = choice.calls
        said = {"message": message}
      logprobs = None if self.request.logprobs is None else self.logprobs(choice, choice.entries)
      bodies.append({"index": choice.index, **said, "logprobs": logprobs, "finish_reason": choice.finish_reason})
    return self.frame(bodies) | self.counts()

  def counts(self) -> dict[str, Any]:
    """OpenAI's usage, and beside it what the draft did."""
    n, stats = self.request.n, [choice.job.stats for choice in self.choices]
    prompt, tokens = sum(c.prompt_tokens for c in self.choices[::n]), sum(len(c.ids) for c in self.choices)
    thought = sum(self.reasoning_tokens(c) for c in self.choices)
    total = lambda lists: [sum(column) for column in zip(*lists)]
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
                      "prompt_tokens_details": {"cached_tokens": sum(s.reused_tokens for s in stats[::n])},
                      "completion_tokens_details": {"reasoning_tokens": thought}},
            "speculation": {"verifier": stats[0].verifier, "steps": sum(s.steps for s in stats),
                            "drafted": total([s.drafted for s in stats]), "accepted": total([s.accepted for s in stats])}}

  def reasoning_tokens(self, choice: Choice) -> int:
    """</think> included."""
    end = self.app.think_end
    if "reasoning_content" not in choice.said: return 0
    return choice.ids.index(end) + 1 if end in choice.ids else len(choice.ids)

  def entry(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    """A token in the form of chats; `logprobs` turns it into that of texts."""
    def named(token: int, logprob: float) -> dict[str, Any]:
      data = self.app.tokenizer.decode_bytes([token])
      try: name = data.decode()
      except UnicodeDecodeError: name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)  # a part of a character
      return {"token": name, "logprob": max(logprob, -9999.0), "bytes": list(data)}  # JSON has no infinity
    top = [named(*pair) for pair in logprobs.top[:self.request.logprobs]]
    return {**named(token, logprobs.logprob), "top_logprobs": top}

  def logprobs(self, choice: Choice, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if self.request.chat: return {"content": list(entries), "refusal": None}
    offsets = [0, *itertools.accumulate(sum(byte & 0xC0 != 0x80 for byte in e["bytes"]) for e in choice.entries)]  # in characters
    return {"tokens": [e["token"] for e in entries], "token_logprobs": [e["logprob"] for e in entries],
            "top_logprobs": [{t["token"]: t["logprob"] for t in [*e["top_logprobs"], e]} for e in entries],
            "text_offset": offsets[len(choice.entries) - len(entries):-1]}
