"""The server through a real socket: with the official client, curl, and bytes by hand; with scripted replies and with the
demonstration checkpoint."""
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pydantic  # comes with openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import specgrad
from specgrad import connection
from specgrad.batch import Batch, Full
from specgrad.connection import Server, bind
from specgrad.encoding import EOS, THINK_END
from specgrad.engine import Block, Sampling, Stats, TokenLogprobs
from specgrad.prompt import encode_chat
from specgrad.serve import App, log, read_key, serve
from specgrad.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_file(specgrad.demo_path())
BOS, EOS_ID = 0, 1
HELLO = [{"role": "user", "content": "Hello, I am Olga."}]
SENTENCE = "The answer is 42, and the answer to the next one is 43. Abracadabra!"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# ---------------------------------------------------------------------------------------------- a batch with a script
class Job:
  """Blocks as they are told; with a gate, one for each permit."""
  def __init__(self, blocks: Iterable[Any], reason: str, gate: threading.Semaphore | None):
    self.stats, self.blocks, self.reason, self.gate = Stats(verifier="scripted"), blocks, reason, gate
    self.cancelled, self.over = threading.Event(), threading.Event()

  def cancel(self) -> None: self.cancelled.set()

  def __iter__(self) -> Iterator[Block]:
    try:
      for block in self.blocks:
        while self.gate and not self.gate.acquire(timeout=0.01) and not self.cancelled.is_set(): pass
        if self.cancelled.is_set():
          self.stats.finish_reason = "interrupted"
          return
        if isinstance(block, Exception): raise block
        ids, k = list(block), 2
        self.stats.steps += 1
        self.stats.drafted = [n + 1 for n in self.stats.drafted or [0] * k]
        self.stats.accepted = [n + (len(ids) > i + 1) for i, n in enumerate(self.stats.accepted or [0] * k)]
        yield Block(ids, [TokenLogprobs(-float(i), [(i, -float(i)), (i + 1, -float("inf"))]) for i in ids])
      self.stats.finish_reason = self.reason
    finally: self.over.set()

class Paced:
  """Blocks that do not come all at once."""
  def __init__(self, blocks: Iterable[list[int]]): self.blocks = blocks
  def __iter__(self) -> Iterator[list[int]]:
    for block in self.blocks:
      yield block
      time.sleep(0.005)

class Script:
  """A batch that says what it is told to, and keeps what it was asked."""
  def __init__(self) -> None:
    self.blocks: Iterable[Any] = []
    self.later: Iterable[Any] | None = None                  # of all sequences but the first
    self.reason, self.gate, self.room = "stop", None, 1000
    self.jobs: list[Job] = []
    self.asked: list[SimpleNamespace] = []
    self.closed = threading.Event()
    self.death: Exception | None = None

  def say(self, blocks: Iterable[Any], reason: str = "stop", gate: threading.Semaphore | None = None) -> None:
    self.later = None
    self.blocks, self.reason, self.gate, self.jobs, self.asked, self.room = blocks, reason, gate, [], [], 1000

  @property
  def active(self) -> int: return sum(not job.over.is_set() for job in self.jobs)
  waiting = (None,) * 3

  def submit(self, ids: Sequence[int], max_tokens: int, sampling: Sampling, **more: Any) -> Job:
    if len(self.jobs) >= self.room: raise Full
    if any(token >= 2048 for token, _ in sampling.logit_bias): raise ValueError("sampling: logit_bias of id 4000, want 0 to 2047")
    self.asked.append(SimpleNamespace(ids=list(ids), max_tokens=max_tokens, sampling=sampling, **more))
    self.jobs.append(Job(self.blocks if not self.jobs or self.later is None else self.later, self.reason, self.gate))
    self.jobs[-1].stats.prompt_tokens, self.jobs[-1].stats.reused_tokens = len(ids), len(ids) // 2
    return self.jobs[-1]

  def run(self) -> None:
    self.closed.wait()
    if self.death: raise self.death

  def close(self, cancel: bool = False) -> None: self.closed.set()

class Running:
  """An application that listens, in a thread."""
  def __init__(self, model: Any, jobs: Any, folder: Path, **more: Any):
    self.lines: list[str] = []
    self.app, self.batch, socket = App(model, jobs, 16, folder, log=self.lines.append, **more), jobs, bind("127.0.0.1", 0)
    self.port: int = socket.getsockname()[1]
    self.engine = threading.Thread(target=jobs.run)
    self.server = Server(self.app, self.engine.start, self.app.drain, self.app.cancel)
    self.thread = threading.Thread(target=self.server.run, args=([socket],))
    self.thread.start()
    until(lambda: self.server.started)
    self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0, timeout=60)

  def stop(self) -> None:
    self.client.close()
    self.server.loop.call_soon_threadsafe(self.server.end, 2)
    self.thread.join(20)
    assert not self.thread.is_alive()
    self.batch.close(cancel=True)
    self.engine.join(20)
    assert not self.engine.is_alive()
    self.app.pool.shutdown()

  def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """One request on a connection of its own -> status, body, headers."""
    link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    link.request(method, path, data, ({"content-type": "application/json"} if data is not None else {}) | more)
    reply = link.getresponse()
    text = reply.read()
    link.close()
    found = {name.lower(): value for name, value in reply.headers.items()}
    return reply.status, json.loads(text) if found["content-type"] == "application/json" and text else text.decode(), found

  def events(self, path: str, **body: Any) -> list[Any]:
    """A stream, taken apart by hand."""
    status, text, headers = self.ask("POST", path, body | {"stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream") and text.endswith("\n\n")
    parts = text[:-2].split("\n\n")
    assert all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]

  def raw(self, data: bytes, wait: float = 10) -> bytes:
    """Bytes to the port, and all that comes back until the server closes, or for so long."""
    with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as link:
      link.sendall(data)
      got = b""
      try:
        while more := link.recv(65536): got += more
      except (TimeoutError, ConnectionResetError): pass
      return got

def until(fact: Callable[[], Any], seconds: float = 20) -> None:
  end = time.monotonic() + seconds
  while not fact():
    assert time.monotonic() < end, "it did not come"
    time.sleep(0.01)

@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A checkpoint's folder with an encoding of its own."""
  path = tmp_path_factory.mktemp("checkpoint") / "scripted"
  (path / "encoding").mkdir(parents=True)
  (path / "encoding" / "encoding.py").write_text(
    'TOOLS_TEMPLATE = "Tools of {dsml_token}:\\n{tool_schemas}\\nEnd.\\n"\nresponse_format_template = "Answer as {schema}"\n'
    'REASONING_EFFORT_MAX = "Think hard."\n')
  return path

MODEL = SimpleNamespace(tokenizer=TOKENIZER, config=SimpleNamespace(vocab_size=2048, eos_token_id=EOS_ID), max_context=4096,
                        numerics="w4a8")

@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
  server = Running(MODEL, Script(), folder)
  yield server
  server.stop()

@pytest.fixture
def scripted(running: Running) -> Running:
  running.batch.say(blocks(SENTENCE, 3))
  running.lines.clear()
  return running

def blocks(text: str, size: int, eos: bool = True) -> list[list[int]]:
  ids = TOKENIZER.encode(text, allowed_special=True) + [EOS_ID] * eos
  return [ids[i:i + size] for i in range(0, len(ids), size)]

def texts(chunks: Sequence[Any], name: str = "content", index: int = 0) -> str:
  choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
  return "".join(choice["delta"].get(name) or "" for choice in choices if choice["index"] == index)

def post(path: str, length: int | None = None, **body: Any) -> bytes:
  """A request as bytes; with a length, its headers alone."""
  data = json.dumps(body).encode() if length is None else b""
  return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    path.encode(), len(data) if length is None else length, data)

# ---------------------------------------------------------------------------------------------- replies
def test_a_chat(scripted: Running) -> None:
  reply = scripted.client.chat.completions.create(model="scripted", messages=HELLO)
  asked, n = scripted.batch.asked[0], len(TOKENIZER.encode(SENTENCE)) + 1
  assert asked.ids == encode_chat(TOKENIZER, HELLO) and asked.max_tokens == 4096 - len(asked.ids)
  assert asked.sampling == Sampling(temperature=1.0) and not asked.ignore_eos and asked.logprobs is None and asked.mask is None
  choice = reply.choices[0]
  assert (choice.message.content, choice.message.role, choice.finish_reason, choice.index) == (SENTENCE, "assistant", "stop", 0)
  assert choice.message.tool_calls is None and choice.logprobs is None
  assert reply.object == "chat.completion" and reply.model == "scripted" and abs(reply.created - time.time()) < 60
  usage = reply.usage
  assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(asked.ids), n, len(asked.ids) + n)
  assert usage.prompt_tokens_details.cached_tokens == len(asked.ids) // 2 and usage.completion_tokens_details.reasoning_tokens == 0
  steps = -(-n // 3)
  assert reply.speculation["verifier"] == "scripted" and reply.speculation["steps"] == steps
  assert reply.speculation["drafted"] == [steps] * 2 and reply.speculation["accepted"][0] >= steps - 1

def test_a_streamed_chat(scripted: Running) -> None:
  stream = scripted.client.chat.completions.create(model="scripted", messages=HELLO, stream=True, stream_options={"include_usage": True})
  chunks = list(stream)
  assert chunks[0].choices[0].delta.role == "assistant" and {chunk.id for chunk in chunks} == {chunks[0].id}
  assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == SENTENCE
  assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
  assert chunks[-2].choices[0].finish_reason and chunks[-1].choices == [] and chunks[-2].usage is None
  assert chunks[-1].usage.completion_tokens == len(TOKENIZER.encode(SENTENCE)) + 1
  events = scripted.events(CHAT, messages=HELLO)             # by hand, without usage and model
  assert events[-1] == "[DONE]" and all(chunk["choices"] and "usage" not in chunk for chunk in events[:-1])

def test_pieces_come_as_steps_end(scripted: Running) -> None:
  gate = threading.Semaphore(0)
  scripted.batch.say(blocks(SENTENCE, 4), gate=gate)
  stream = iter(scripted.client.chat.completions.create(model="scripted", messages=HELLO, stream=True))
  assert next(stream).choices[0].delta.role == "assistant"   # before there is any token
  for block in blocks(SENTENCE, 4)[:3]:
    gate.release()
    assert next(stream).choices[0].delta.content == TOKENIZER.decode(block)
  gate.release(100)
  assert list(stream)[-1].choices[0].finish_reason == "stop"

@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_at_every_place_of_a_block(scripted: Running, path: str, stream: bool) -> None:
  ids = TOKENIZER.encode(SENTENCE)
  ends = [len(TOKENIZER.decode(ids[:i + 1])) for i in range(len(ids))]
  for place in range(8):
    stop = SENTENCE[max(ends[place] - 2, 0):ends[place]]
    cut = SENTENCE.index(stop)
    last = next(i for i, end in enumerate(ends) if end >= cut + len(stop))
    scripted.batch.say(itertools.chain(blocks(SENTENCE, 6), itertools.repeat([33])))  # it ends as it is cancelled, or never
    body = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    body |= {"stop": [stop, "nowhere"], "stream": stream, "logprobs": True if path == CHAT else 0, "max_tokens": last + 1}
    if stream:
      chunks = scripted.events(path, stream_options={"include_usage": True}, **body)[:-1]
      usage, parts = chunks[-1]["usage"], [chunk["choices"][0] for chunk in chunks[:-1]]
      text = "".join((part["delta"].get("content") or "") if path == CHAT else part["text"] for part in parts)
      logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
      reason = parts[-1]["finish_reason"]
    else:
      reply = scripted.ask("POST", path, body)[1]
      usage, choice = reply["usage"], reply["choices"][0]
      text = choice["message"]["content"] if path == CHAT else choice["text"]
      logprobs, reason = [choice["logprobs"]], choice["finish_reason"]
    counted = [t for part in logprobs for t in part["content" if path == CHAT else "tokens"]]
    assert (text, reason, usage["completion_tokens"], len(counted)) == (SENTENCE[:cut], "stop", last + 1, last + 1), stop
    until(scripted.batch.jobs[0].over.is_set)

def test_a_sequence_that_stops_does_not_run_on(scripted: Running) -> None:
  """While another one of the request does."""
  gate = threading.Semaphore(0)
  def other() -> Iterator[list[int]]:
    gate.acquire()
    yield [EOS_ID]
  scripted.batch.say(itertools.chain(blocks(SENTENCE, 6), itertools.repeat([33])))
  scripted.batch.later = other()
  asking = threading.Thread(target=scripted.ask, args=("POST", CHAT, {"messages": HELLO, "n": 2, "stop": "42"}))
  asking.start()
  until(lambda: scripted.batch.jobs and scripted.batch.jobs[0].over.is_set())
  assert not scripted.batch.jobs[1].over.is_set()
  gate.release()
  asking.join(20)

def test_a_stop_string_is_one_that_begins_earlier(scripted: Running) -> None:
  """"43" starts like "42" did not: what was held back is shown."""
  scripted.batch.say(blocks(SENTENCE, 1))
  assert texts(scripted.events(CHAT, messages=HELLO, stop="is 43")) == SENTENCE[:SENTENCE.index("is 43")]
  assert texts(scripted.events(CHAT, messages=HELLO, stop="Abracadabra!!")) == SENTENCE

def test_half_characters_and_ends(scripted: Running) -> None:
  text = "naïve 日本語 🙂 e\u0301"
  scripted.batch.say(Paced(blocks(text, 1)))
  chunks = scripted.events(CHAT, messages=HELLO)
  assert texts(chunks) == text and len(chunks) > 8 and not any("\ufffd" in texts([chunk]) for chunk in chunks[:-1])
  cut = TOKENIZER.encode("🙂")[:-1]
  scripted.batch.say([cut], reason="length")
  reply = scripted.client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=len(cut))
  assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("\ufffd", "length")
  scripted.batch.say([[33, EOS_ID, 34, 35]])                 # what a step brings past the end is no part of the reply
  reply = scripted.client.chat.completions.create(model="scripted", messages=HELLO)
  assert (reply.choices[0].message.content, reply.usage.completion_tokens) == (TOKENIZER.decode([33]), 2)
  scripted.batch.say([[33]], reason="context")
  assert scripted.client.chat.completions.create(model="scripted", messages=HELLO).choices[0].finish_reason == "length"

def test_reasoning(scripted: Running) -> None:
  said = f"Let me see.{THINK_END}Yes."
  for effort, more in ({}, "off"), ({"reasoning_effort": "low"}, "low"), ({"chat_template_kwargs": {"thinking": True}}, "low"), (
      {"reasoning_effort": "high"}, "high"), ({"reasoning_effort": "xhigh"}, "max"), ({"thinking": {"type": "disabled"}}, "off"):
    scripted.batch.say(blocks(said if more != "off" else "Yes.", 2))
    reply = scripted.client.chat.completions.create(model="scripted", messages=HELLO, extra_body=effort)
    message = reply.choices[0].message
    assert scripted.batch.asked[0].ids == encode_chat(TOKENIZER, HELLO, effort=more, encoding=scripted.app.encoding)
    assert (message.content, getattr(message, "reasoning_content", None)) == ("Yes.", None if more == "off" else "Let me see.")
    want = 0 if more == "off" else len(TOKENIZER.encode("Let me see.")) + 1
    assert reply.usage.completion_tokens_details.reasoning_tokens == want
  scripted.batch.say(blocks(said, 1))
  chunks = scripted.events(CHAT, messages=HELLO, reasoning_effort="low")
  assert (texts(chunks, "reasoning_content"), texts(chunks)) == ("Let me see.", "Yes.")

TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {
  "city": {"type": "string"}, "days": {"type": "integer"}}}}} for name in ("weather", "tides")]
CALLS = ('Let me look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
         '<｜DSML｜parameter name="city" string="true">Łódź "x"</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="tides">\n'
         '<｜DSML｜parameter name="city" string="true">Hel</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')

def test_tools(scripted: Running) -> None:
  scripted.batch.say(blocks(CALLS, 3))
  reply = scripted.client.chat.completions.create(model="scripted", messages=HELLO, tools=TOOLS)
  assert scripted.batch.asked[0].ids == encode_chat(TOKENIZER, HELLO, tools=TOOLS, encoding=scripted.app.encoding)
  message, calls = reply.choices[0].message, reply.choices[0].message.tool_calls
  assert (message.content, reply.choices[0].finish_reason) == ("Let me look.", "tool_calls")
  assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
    ("weather", {"city": 'Łódź "x"', "days": 3}), ("tides", {"city": "Hel"})]
  assert len({call.id for call in calls}) == 2
  later = [*HELLO, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": calls[1].id, "content": "high"},
           {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}]
  scripted.batch.say(blocks("Rain.", 3))
  assert scripted.client.chat.completions.create(model="scripted", messages=later, tools=TOOLS).choices[0].message.content == "Rain."
  asked = TOKENIZER.decode(scripted.batch.asked[0].ids)
  assert asked.index("<tool_result>rain</tool_result>") < asked.index("<tool_result>high</tool_result>")

@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut(scripted: Running, stream: bool) -> None:
  """Nothing that was said is lost: the whole calls are calls, the rest is text."""
  for end, calls in ((CALLS.index("3</"), 0), (CALLS.index('"tides"'), 1)):
    scripted.batch.say(blocks(CALLS[:end], 3, eos=False), reason="length")
    if stream:
      chunks = scripted.events(CHAT, messages=HELLO, tools=TOOLS)[:-1]
      text, reason = texts(chunks), chunks[-1]["choices"][0]["finish_reason"]
      found = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    else:
      choice = scripted.ask("POST", CHAT, {"messages": HELLO, "tools": TOOLS})[1]["choices"][0]
      text, reason, found = choice["message"]["content"], choice["finish_reason"], choice["message"].get("tool_calls", [])
    assert (len(found), reason) == (calls, "length") and text.startswith("Let me look.") and text.endswith(CALLS[end - 9:end])
  assert any("(" in line for line in scripted.lines)         # the log has the problem

def test_streamed_tools(scripted: Running) -> None:
  scripted.batch.say(blocks(CALLS, 1))
  with scripted.client.chat.completions.stream(model="scripted", messages=HELLO, tools=TOOLS) as stream:
    final = stream.get_final_completion()                    # the client puts the deltas together
  calls = final.choices[0].message.tool_calls
  assert final.choices[0].message.content == "Let me look." and final.choices[0].finish_reason == "tool_calls"
  assert [(call.function.name, call.function.arguments) for call in calls] == [
    ("weather", '{"city": "Łódź \\"x\\"", "days": 3}'), ("tides", '{"city": "Hel"}')]

def test_tool_choice(scripted: Running) -> None:
  plain = encode_chat(TOKENIZER, HELLO)
  ask = lambda choice: scripted.client.chat.completions.create(model="scripted", messages=HELLO, tools=TOOLS, tool_choice=choice)
  ask("none")
  assert scripted.batch.asked[0].ids == plain and scripted.batch.asked[0].mask is None
  for choice, names in (("required", ("weather", "tides")), ({"type": "function", "function": {"name": "tides"}}, ("tides",))):
    scripted.batch.say(blocks(CALLS, 3))
    ask(choice)
    mask, lead = scripted.batch.asked[0].mask, TOKENIZER.encode('\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="')
    assert mask.rows(lead).any(1).all() and all(row[token] for row, token in zip(mask.rows(lead), lead))
    after = mask.rows(lead)[-1]
    assert {name for name in ("weather", "tides", "x") if after[TOKENIZER.encode(name)[0]]} == set(names)

class Weather(pydantic.BaseModel):
  city: str
  days: int

def test_models_of_pydantic(scripted: Running) -> None:
  """As the client's own helper sends and reads them: strict, with the whole reply held to them."""
  said = CALLS.replace("tides", "weather").replace('<｜DSML｜parameter name="city" string="true">Hel</｜DSML｜parameter>\n', "")
  said = said[:said.rindex('\n<｜DSML｜invoke')] + "\n</｜DSML｜tool_calls>"
  scripted.batch.say(blocks(said, 3))
  tool = openai.pydantic_function_tool(Weather, name="weather")
  reply = scripted.client.chat.completions.parse(model="scripted", messages=HELLO, tools=[tool])
  calls = reply.choices[0].message.tool_calls
  assert [call.function.parsed_arguments for call in calls] == [Weather(city='Łódź "x"', days=3)]
  ids = TOKENIZER.encode(said)
  assert all(row[token] for row, token in zip(scripted.batch.asked[0].mask.rows(ids), ids))
  scripted.batch.say(blocks('{"city": "Hel", "days": 2}', 3))
  parsed = scripted.client.chat.completions.parse(model="scripted", messages=HELLO, response_format=Weather).choices[0].message.parsed
  assert parsed == Weather(city="Hel", days=2) and not scripted.batch.asked[0].mask.rows([])[0][EOS_ID]
  assert "Answer as" in TOKENIZER.decode(scripted.batch.asked[0].ids)

def test_several_choices(scripted: Running) -> None:
  reply = scripted.client.chat.completions.create(model="scripted", messages=HELLO, n=3, seed=2 ** 63 - 1)
  assert [choice.message.content for choice in reply.choices] == [SENTENCE] * 3 and [choice.index for choice in reply.choices] == [0, 1, 2]
  assert [asked.sampling.seed for asked in scripted.batch.asked] == [2 ** 63 - 1, 2 ** 63, 2 ** 63 + 1]
  n, prompt = len(TOKENIZER.encode(SENTENCE)) + 1, len(scripted.batch.asked[0].ids)
  assert (reply.usage.completion_tokens, reply.usage.prompt_tokens) == (3 * n, prompt)
  chunks = scripted.events(CHAT, messages=HELLO, n=2, seed=-1)
  assert [texts(chunks, index=i) for i in (0, 1)] == [SENTENCE] * 2 and scripted.batch.asked[-2].sampling.seed == 2 ** 64 - 1
  assert scripted.batch.asked[-1].sampling.seed == 0

def test_logprobs(scripted: Running) -> None:
  text = "né🙂"
  scripted.batch.say(blocks(text, 2))
  reply: Any = scripted.client.chat.completions.create(model="scripted", messages=HELLO, logprobs=True, top_logprobs=2)
  entries = reply.choices[0].logprobs.content
  ids = [*TOKENIZER.encode(text), EOS_ID]
  assert scripted.batch.asked[0].logprobs == 2 and [entry.logprob for entry in entries] == [-float(i) for i in ids]
  assert b"".join(bytes(entry.bytes) for entry in entries) == (text + EOS).encode()
  assert [[(top.bytes, top.logprob) for top in entry.top_logprobs] for entry in entries] == [
    [(list(TOKENIZER.decode_bytes([i])), -float(i)), (list(TOKENIZER.decode_bytes([i + 1])), -9999.0)] for i in ids]
  chunks = scripted.events(CHAT, messages=HELLO, logprobs=True)
  parts = [c["choices"][0]["logprobs"]["content"] for c in chunks[:-1] if c["choices"][0]["logprobs"]]
  assert [e["logprob"] for part in parts for e in part] == [-float(i) for i in ids] and scripted.batch.asked[-1].logprobs == 0
  reply = scripted.client.completions.create(model="scripted", prompt="x", logprobs=1)
  found = reply.choices[0].logprobs
  assert found.token_logprobs == [-float(i) for i in ids] and found.text_offset[:2] == [0, 1] and len(found.tokens) == len(ids)
  assert found.top_logprobs[0] == {TOKENIZER.decode([ids[0]]): -float(ids[0])}
  parts = [c["choices"][0]["logprobs"] for c in scripted.events(TEXT, prompt="x", logprobs=0)[:-1]]
  assert [offset for part in parts if part for offset in part["text_offset"]] == found.text_offset

def test_completions(scripted: Running) -> None:
  reply = scripted.client.completions.create(model="scripted", prompt="Once <think> upon", max_tokens=50, temperature=0)
  assert scripted.batch.asked[0].ids == [BOS, *TOKENIZER.encode("Once <think> upon")] and 2046 not in scripted.batch.asked[0].ids
  assert (scripted.batch.asked[0].max_tokens, scripted.batch.asked[0].sampling.temperature) == (50, 0.0)
  assert (reply.choices[0].text, reply.choices[0].finish_reason, reply.object) == (SENTENCE, "stop", "text_completion")
  scripted.batch.say(blocks(f"a{THINK_END}b", 3))            # a text is not taken apart
  reply = scripted.client.completions.create(model="scripted", prompt=[[0, 5, 6], [7]], n=2, seed=5)
  assert [choice.text for choice in reply.choices] == [f"a{THINK_END}b"] * 4 and [choice.index for choice in reply.choices] == [0, 1, 2, 3]
  assert [asked.sampling.seed for asked in scripted.batch.asked] == [5, 6, 5, 6]
  assert [asked.ids for asked in scripted.batch.asked] == [[0, 5, 6]] * 2 + [[7]] * 2 and reply.usage.prompt_tokens == 4
  text = "".join(chunk.choices[0].text for chunk in scripted.client.completions.create(model="scripted", prompt=[9], stream=True))
  assert text == f"a{THINK_END}b" and scripted.batch.asked[-1].ids == [9]

def test_settings_reach_the_engine(scripted: Running) -> None:
  scripted.client.chat.completions.create(
    model="scripted", messages=HELLO, temperature=0.5, top_p=0.9, presence_penalty=-1, frequency_penalty=2, seed=7, max_completion_tokens=9,
    logit_bias={"17": -100}, user="u", metadata={"a": "b"}, store=False, parallel_tool_calls=True, service_tier="auto",
    extra_body={"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True})
  asked = scripted.batch.asked[0]
  assert asked.sampling == Sampling(0.5, 0.9, 40, 0.1, 7, 1.2, -1.0, 2.0, ((17, -100.0),))
  assert (asked.max_tokens, asked.ignore_eos) == (9, True)

# ---------------------------------------------------------------------------------------------- what is refused
def schema(of: Any) -> dict[str, Any]:
  return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}}

def deep(n: int) -> bytes: return b'{"messages":' + b"[" * n + b"]" * n + b"}"

@pytest.mark.parametrize("body, message", [
  (b"", "body: not JSON (Expecting value: line 1 column 1 (char 0)), want one JSON object"),
  (b"{", "body: not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)), want one JSON object"),
  (b"[1]", "body: [1], want a JSON object"),
  (b'{"a": "\xff"}', "body: byte 7 is not UTF-8, want JSON in UTF-8"),
  (b'{"n": 1, "n": 2}', "body: the key 'n' stands twice in one object, want it once"),
  (b'{"temperature": NaN}', "body: NaN is not JSON, want a number"),
  (b'{"temperature": -Infinity}', "body: -Infinity is not JSON, want a number"),
  (b'{"temperature": 1e999}', "body: '1e999' is no number that a float can hold"),
  (deep(100_000), "body: nested too deeply, want JSON of at most a few hundred levels"),
  (b'{"n": ' + b"9" * 5000 + b"}", r"body: not JSON \(Exceeds the limit .*\), want one JSON object"),
  ({}, "messages: missing, want a list of messages"),
  ({"messages": []}, "messages=[], want at least one message"),
  ({"messages": "hi"}, "messages='hi', want a list of messages"),
  ({"messages": [{"role": "robot", "content": "x"}]},
   "messages[0].role='robot', want system, developer, user, assistant, tool or latest_reminder"),
  ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
   r"messages\[0\].content\[0\]=.*, want \{'type': 'text', 'text': a string\}"),
  ({"n": 17}, "n=17, want a whole number from 1 to 16"),
  ({"n": True}, "n=True, want a whole number from 1 to 16"),
  ({"n": 1.0}, "n=1.0, want a whole number from 1 to 16"),
  ({"max_tokens": 0}, "max_tokens=0, want a whole number from 1 to 2147483647"),
  ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens=3, want the same as max_completion_tokens"),
  ({"temperature": 2.5}, "temperature=2.5, want a number from 0 to 2"),
  ({"temperature": "1"}, "temperature='1', want a number from 0 to 2"),
  ({"top_p": 0}, "top_p=0.0, want a number of at least 1e-6"),
  ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300, want a number of at least 1e-6"),
  ({"seed": 2 ** 64}, "seed=18446744073709551616, want a whole number from -9223372036854775808 to 18446744073709551615"),
  ({"stop": ["a"] * 5}, "stop=['a', 'a', 'a', 'a', 'a'], want a string, or up to 4 of them, of 1 to 1000 characters"),
  ({"stop": ""}, "stop='', want a string, or up to 4 of them, of 1 to 1000 characters"),
  ({"logit_bias": {"x": 1}}, "logit_bias={'x': 1}, want an object of token id: number"),
  ({"logit_bias": {"1": 101}}, "logit_bias={'1': 101}, want numbers from -100 to 100"),
  ({"logit_bias": {"4000": 1}}, "sampling: logit_bias of id 4000, want 0 to 2047"),
  ({"top_logprobs": 3}, "top_logprobs=3, want it only with logprobs=true"),
  ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21, want a whole number from 0 to 20"),
  ({"stream_options": {"include_usage": True}}, "stream_options={'include_usage': True}, want it only with stream=true"),
  ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x: unknown or not supported, want the request without it"),
  ({"reasoning_effort": "huge"}, "reasoning_effort='huge', want none, off, minimal, low, medium, high, xhigh, max"),
  ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}},
   "reasoning_effort='high', want it to agree with the switches for thinking"),
  ({"frequency": 1}, "frequency: unknown or not supported, want the request without it"),
  ({"bad\n\x1b[2Jname": 1}, r"bad\\n\\x1b\[2Jname: unknown or not supported, want the request without it"),
  ({"audio": {"voice": "x"}}, "audio: unknown or not supported, want the request without it"),
  ({"echo": True}, "echo=True, want false or nothing: other values are not supported"),
  ({"parallel_tool_calls": False}, "parallel_tool_calls=False, want true or nothing: other values are not supported"),
  ({"tools": [{"type": "function"}]}, "tools[0]={'type': 'function'}, want {'type': 'function', 'function': {'name': ...}}"),
  ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name='weather', want each name once"),
  ({"tools": [{"type": "function", "function": {"name": 'a">\n'}}]},
   r"tools\[0\].function.name='a\">\\n', want 1 to 64 letters, digits, underscores, dots and dashes"),
  ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1.5}}]}, "tools[0].function.strict=1.5, want true or false"),
  ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {}}}}}]},
   "tools: strict function f: parameters have to be an object that requires each of its properties"),
  ({"tool_choice": "required"}, "tool_choice='required', want it only with tools"),
  ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sun"}}},
   "tool_choice.function.name='sun', want the name of one of the tools"),
  ({"response_format": {"type": "xml"}}, "response_format.type='xml', want text, json_object or json_schema"),
  ({"response_format": {"type": "json_schema"}}, "response_format.json_schema=None, want an object with name and schema"),
  (schema(3), "response_format.json_schema.schema=3, want a JSON schema"),
  (schema({"type": "array", "uniqueItems": True}), r"response_format: .*uniqueItems.*"),
  (schema({"type": "strin"}), r"response_format: .*strin.*"),
  (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), r"response_format: .*"),
])
def test_mistakes_in_the_body(scripted: Running, body: Any, message: str) -> None:
  """One line each, with the field. Messages with a backslash are patterns."""
  if isinstance(body, dict) and body and "messages" not in body: body |= {"messages": HELLO}
  status, reply, _ = scripted.ask("POST", CHAT, body)
  error = reply["error"]
  assert status == 400 and error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
  assert re.fullmatch(message, error["message"]) if "\\" in message or ".*" in message else error["message"] == message
  assert "\n" not in error["message"] and not scripted.batch.asked
  field = re.match(r"[\w.\[\]]+(?==)", message)
  if field and field[0] != "messages" and not field[0].startswith("messages["): assert error["param"] == field[0]

def test_the_client_knows_the_errors(scripted: Running) -> None:
  with pytest.raises(openai.BadRequestError, match="temperature=3.0") as caught:
    scripted.client.chat.completions.create(model="scripted", messages=HELLO, temperature=3.0)
  assert caught.value.param == "temperature"
  with pytest.raises(openai.NotFoundError, match="there is only 'scripted'") as missing:
    scripted.client.chat.completions.create(model="gpt-4o", messages=HELLO)
  assert missing.value.code == "model_not_found"

@pytest.mark.parametrize("path, body", [(CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}),
                                        (TEXT, {"prompt": [5] * 4096})])
def test_a_prompt_that_does_not_fit(scripted: Running, path: str, body: dict[str, Any]) -> None:
  n = len(encode_chat(TOKENIZER, body["messages"])) if "messages" in body else 4096
  status, reply, _ = scripted.ask("POST", path, body)
  assert (status, reply["error"]["code"], reply["error"]["param"]) == (400, "context_length_exceeded", next(iter(body)))
  assert reply["error"]["message"] == (f"this model's maximum context length is 4096 tokens, the prompt has {n}: no room for a reply. "
                                       "Shorten it")
  scripted.ask("POST", TEXT, {"prompt": [5] * 4095})
  assert scripted.batch.asked[0].max_tokens == 1

@pytest.mark.parametrize("body, message", [
  ({}, "prompt: missing, want a string or token ids"),
  ({"prompt": []}, "prompt=[], want a string, a list of token ids, or a list of either"),
  ({"prompt": [[]]}, "prompt=[[]], want a string, a list of token ids, or a list of either"),
  ({"prompt": [1, "x"]}, "prompt=[1, 'x'], want a string, a list of token ids, or a list of either"),
  ({"prompt": ["x"] * 9, "n": 2}, "n=2, want at most 16 choices over all prompts"),
  ({"prompt": "x", "logprobs": 6}, "logprobs=6, want a whole number from 0 to 5"),
  ({"prompt": "x", "messages": HELLO}, "messages: unknown or not supported, want the request without it"),
  ({"prompt": "x", "suffix": "y"}, "suffix='y', want \"\" or nothing: other values are not supported")])
def test_mistakes_in_a_completion(scripted: Running, body: Any, message: str) -> None:
  status, reply, _ = scripted.ask("POST", TEXT, body)
  assert (status, reply["error"]["message"]) == (400, message)

def test_paths_and_methods(scripted: Running) -> None:
  for method, path, status, code in (
      ("GET", "/", 404, "unknown_url"), ("POST", "/v1/embeddings", 404, "unknown_url"), ("GET", "/v1", 404, "unknown_url"),
      ("GET", CHAT, 405, "method_not_allowed"), ("DELETE", CHAT, 405, "method_not_allowed"),
      ("POST", "/v1/models", 405, "method_not_allowed"),
      ("GET", "/v1/models/x/../scripted", 404, "model_not_found"), ("GET", "/%0a%1b%5b2J%ff", 404, "unknown_url")):
    found, reply, headers = scripted.ask(method, path, b"{}" if method == "POST" else None)
    assert (found, reply["error"]["code"]) == (status, code)
    if status == 405: assert headers["allow"] == ("GET" if "models" in path else "POST")
  assert scripted.ask("HEAD", "/health")[:2] == (200, "") and scripted.ask("OPTIONS", CHAT)[0] == 405

def test_models_and_health(scripted: Running) -> None:
  assert [(model.id, model.max_model_len) for model in scripted.client.models.list()] == [("scripted", 4096)]
  assert scripted.client.models.retrieve("scripted").object == "model"
  with pytest.raises(openai.NotFoundError): scripted.client.models.retrieve("demo")
  assert scripted.ask("GET", "/health")[:2] == (200, {"status": "ok", "running": 0, "waiting": 3})

def test_content_types(scripted: Running) -> None:
  """Those that a page may send from a browser without asking are not taken."""
  body = json.dumps({"messages": HELLO}).encode()
  for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
    assert scripted.ask("POST", CHAT, body, content_type=kind)[0] == 415
  assert scripted.ask("POST", CHAT, body, content_type="Application/JSON; charset=utf-8")[0] == 200
  assert scripted.ask("POST", CHAT, body, content_encoding="gzip")[0] == 415

def test_names_that_lead_here(scripted: Running) -> None:
  for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403), ("evil.example:8000", 403)):
    assert scripted.ask("GET", "/v1/models", host=host)[0] == status

# ---------------------------------------------------------------------------------------------- keys
@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Running]:
  server = Running(MODEL, Script(), folder, key="sesame-open")
  server.batch.say(blocks("Yes.", 1))
  yield server
  server.stop()

@pytest.mark.parametrize("method, path", [("POST", CHAT), ("POST", TEXT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere"),
                                          ("PUT", CHAT)])
def test_nobody_gets_in_without_the_key(locked: Running, method: str, path: str) -> None:
  body = {"messages": HELLO, "model": "scripted"} if method == "POST" else None
  for shown in (None, "", "Bearer", "Bearer ", "Bearer sesame", "Bearer sesame-openx", "Bearer SESAME-OPEN", "Basic sesame-open",
                "sesame-open", "Bearer sesame\xfcopen"):
    status, reply, headers = locked.ask(method, path, body, **({} if shown is None else {"authorization": shown}))
    assert (status, reply["error"]["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
  assert not locked.batch.asked and locked.ask("GET", "/health")[0] == 200

def test_with_the_key(locked: Running) -> None:
  client = locked.client.with_options(api_key="sesame-open")
  assert client.chat.completions.create(model="scripted", messages=HELLO).choices[0].message.content == "Yes."
  assert locked.ask("GET", "/v1/models", authorization="bearer  sesame-open ", host="any.example")[0] == 200

# ---------------------------------------------------------------------------------------------- load, and clients that leave
def test_the_queue_is_full(scripted: Running) -> None:
  scripted.batch.room = 1
  for n, stream in ((2, False), (2, True)):
    scripted.batch.jobs.clear()
    status, reply, headers = scripted.ask("POST", CHAT, {"messages": HELLO, "n": n, "stream": stream})
    assert (status, reply["error"]["code"], reply["error"]["type"], headers["retry-after"]) == (429, "queue_full", "rate_limit_error", "1")
    assert scripted.batch.jobs[0].cancelled.is_set()         # the choice that got in does not run alone
  with pytest.raises(openai.RateLimitError): scripted.client.chat.completions.create(model="scripted", messages=HELLO, n=2)

@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_sequences(scripted: Running, stream: bool) -> None:
  gate = threading.Semaphore(1)
  scripted.batch.say(blocks(SENTENCE, 1), gate=gate)
  link = socket.create_connection(("127.0.0.1", scripted.port))
  link.sendall(post(CHAT, messages=HELLO, stream=stream, n=2))
  until(lambda: len(scripted.batch.jobs) == 2)
  got = b""
  while stream and b"assistant" not in got: got += link.recv(65536)     # headers and first event may come one after the other
  assert not any(job.cancelled.is_set() for job in scripted.batch.jobs)
  link.close()
  until(lambda: all(job.over.is_set() for job in scripted.batch.jobs))
  until(lambda: len(scripted.lines) == 2)
  assert all("cancelled" in line for line in scripted.lines) and not scripted.app.running
  scripted.batch.say(blocks("Next.", 1))
  assert scripted.client.chat.completions.create(model="scripted", messages=HELLO).choices[0].message.content == "Next."

def test_clients_that_leave_at_any_time(scripted: Running) -> None:
  """In the middle of headers, of the body, and of replies: nothing is left of them."""
  scripted.batch.say([[token] for token in TOKENIZER.encode(SENTENCE * 5)])
  data = post(CHAT, messages=HELLO, stream=True)
  before = set(scripted.server.server_state.connections)     # of the client, which keeps one
  for i in range(200):
    link = socket.create_connection(("127.0.0.1", scripted.port))
    link.sendall(data[:1 + i * len(data) // 100])
    if i % 3 == 0: link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, and no goodbye
    link.close()
  until(lambda: not scripted.app.running and all(job.over.is_set() for job in scripted.batch.jobs))
  until(lambda: scripted.server.server_state.connections <= before)
  until(scripted.app.pool._work_queue.empty)

def test_signs_of_life(scripted: Running, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr("specgrad.completion.PING_SECONDS", 0.05)
  gate = threading.Semaphore(0)
  scripted.batch.say(blocks("Yes.", 3), gate=gate)
  with socket.create_connection(("127.0.0.1", scripted.port), timeout=20) as link:
    link.sendall(post(CHAT, messages=HELLO, stream=True))
    got = b""
    while got.count(b": waiting\n\n") < 2: got += link.recv(65536)
    gate.release(100)
    while b"[DONE]" not in got: got += link.recv(65536)
  assert b"Yes" in got

@pytest.mark.parametrize("error, message", [(ArithmeticError("engine: the logits at position 7 are not finite"),) * 2,
                                            (KeyError("x"), "internal error (KeyError)")])
def test_a_sequence_that_fails(scripted: Running, error: Exception, message: Any, capfd: pytest.CaptureFixture[str]) -> None:
  scripted.batch.say([[33], error])
  status, reply, _ = scripted.ask("POST", CHAT, {"messages": HELLO})
  message = str(message)
  assert (status, reply["error"]) == (500, {"message": message, "type": "server_error", "param": None, "code": "engine_error"})
  with pytest.raises(openai.APIError, match=re.escape(message)):
    for _ in scripted.client.chat.completions.create(model="scripted", messages=HELLO, stream=True): pass
  assert ("Traceback" in capfd.readouterr().err) == isinstance(error, KeyError)
  scripted.batch.say(blocks("Next.", 1))
  assert scripted.client.chat.completions.create(model="scripted", messages=HELLO).choices[0].message.content == "Next."

def test_a_grammar_that_fails(scripted: Running) -> None:
  """It lets the reply end, which must not look like a good end."""
  def fail() -> Iterator[list[int]]:
    yield TOKENIZER.encode('{"a": ')
    scripted.batch.asked[0].mask.error = "too many states"
    yield [EOS_ID]
  scripted.batch.say(fail())
  status, reply, _ = scripted.ask("POST", CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}})
  assert (status, reply["error"]["message"]) == (500, "response_format: the grammar failed: too many states")

def test_the_engine_dies(folder: Path) -> None:
  """Whoever waits is told, and the server ends."""
  server = Running(MODEL, Script(), folder)
  server.batch.say(blocks(SENTENCE, 1), gate=threading.Semaphore(1))
  found: list[Any] = []
  asking = threading.Thread(target=lambda: found.append(server.ask("POST", CHAT, {"messages": HELLO})))
  asking.start()
  until(lambda: server.app.running)
  server.server.loop.call_soon_threadsafe(server.app.die, "RuntimeError: lost the device")
  asking.join(10)
  assert found[0][0] == 500 and found[0][1]["error"]["message"] == "the engine stopped: RuntimeError: lost the device"
  assert server.ask("GET", "/health")[0] == 503
  status, reply, headers = server.ask("POST", CHAT, {"messages": HELLO})
  assert (status, reply["error"]["code"], headers["retry-after"]) == (503, "unavailable", "1")
  server.stop()

def test_the_server_ends_with_its_engine(folder: Path) -> None:
  script, errors = Script(), list[str]()
  app = App(MODEL, script, 16, folder)  # type: ignore[arg-type]

  def run() -> None:
    try: serve(app, bind("127.0.0.1", 0), "hello")
    except ArithmeticError as error: errors.append(str(error))
  thread = threading.Thread(target=run)
  thread.start()
  script.death = RuntimeError("lost the device")
  script.closed.set()
  thread.join(20)
  assert errors == ["engine: RuntimeError: lost the device"] and app.closed == "the engine stopped: RuntimeError: lost the device"

def test_too_many_connections(scripted: Running, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(connection, "CONNECTIONS", len(scripted.server.server_state.connections))
  reply = scripted.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
  assert reply.startswith(b"HTTP/1.1 503 ") and b'"code":"overloaded"' in reply

def test_metrics(scripted: Running) -> None:
  def read() -> dict[tuple[str, ...], float]:
    status, text, headers = scripted.ask("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(text):
      for sample in family.samples:
        assert sample.labels["model_name"] == "scripted" and sample.labels["engine"] == "0"
        found[(sample.name, *(v for k, v in sample.labels.items() if k not in ("model_name", "engine")))] = sample.value
    return found
  before = read()
  scripted.client.chat.completions.create(model="scripted", messages=HELLO)
  until(lambda: not scripted.batch.active)
  n, steps, stats = len(TOKENIZER.encode(SENTENCE)) + 1, len(blocks(SENTENCE, 3)), scripted.batch.jobs[0].stats
  until(lambda: read()[("vllm:request_success_total", "stop")] > before.get(("vllm:request_success_total", "stop"), 0))
  grown = {name: value - before.get(name, 0) for name, value in read().items()}
  prompt = len(encode_chat(TOKENIZER, HELLO))
  for name, value in {
      ("vllm:prompt_tokens_total",): prompt, ("vllm:generation_tokens_total",): n, ("vllm:prefix_cache_queries_total",): prompt,
      ("vllm:prefix_cache_hits_total",): prompt // 2, ("vllm:spec_decode_num_drafts_total",): steps,
      ("vllm:spec_decode_num_draft_tokens_total",): 2 * steps, ("vllm:spec_decode_num_accepted_tokens_total",): sum(stats.accepted),
      ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): stats.accepted[0],
      ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): stats.accepted[1], ("vllm:time_to_first_token_seconds_count",): 1,
      ("vllm:inter_token_latency_seconds_count",): steps - 1, ("vllm:request_time_per_output_token_seconds_count",): 1,
      ("vllm:e2e_request_latency_seconds_count",): 1, ("vllm:request_prompt_tokens_sum",): prompt,
      ("vllm:request_generation_tokens_sum",): n, ("vllm:num_requests_running",): 0}.items(): assert grown[name] == value, name
  assert read()[("vllm:num_requests_waiting",)] == 3

# ---------------------------------------------------------------------------------------------- hostile bytes
def test_limits_of_headers(scripted: Running) -> None:
  """Whether they come whole, in many packets, or never end."""
  for data in (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (40 << 10) + b"\r\n\r\n",
               b"GET /" + b"a" * (40 << 10) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
               b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 100_000, b"G" * (1 << 20)):
    reply = scripted.raw(data, wait=0.5)
    assert reply.startswith(b"HTTP/1.1 431 ") and b'"message":"headers: more than 32768 bytes, want less"' in reply

@pytest.mark.parametrize("data", [
  b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
  b"GET / HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n", b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
  b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"])
def test_what_is_no_request(scripted: Running, data: bytes) -> None:
  reply = scripted.raw(data)
  head, _, body = reply.partition(b"\r\n\r\n")
  assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["message"].startswith("not HTTP/1.1 (")

def test_limits_of_bodies(scripted: Running) -> None:
  limit = scripted.app.body_bytes
  reply = scripted.raw(post(CHAT, limit + 1), wait=0.3)      # told before anything is sent
  assert reply.startswith(b"HTTP/1.1 413 ") and b"body: more than %d bytes, want less" % limit in reply
  status, reply, _ = scripted.ask("POST", CHAT, b" " * (limit + 1))
  assert (status, reply["error"]["message"]) == (413, f"body: more than {limit} bytes, want less")
  chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
  head = post(CHAT, 0).replace(b"content-length: 0", b"transfer-encoding: chunked")
  assert scripted.raw(head + chunk * (limit // 65536 + 2), wait=0.5).startswith(b"HTTP/1.1 413 ")
  assert scripted.ask("POST", CHAT, json.dumps({"messages": HELLO}).encode().ljust(limit))[0] == 200

def test_slow_clients(scripted: Running, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
  monkeypatch.setattr(connection, "BODY_SECONDS", 0.3)
  head = post(CHAT, 9)
  for data in (b"", head[:30], head, head + b"{"):
    reply = scripted.raw(data, wait=5)
    assert reply.startswith(b"HTTP/1.1 408 ") and b"within 0.3 seconds" in reply
  with socket.create_connection(("127.0.0.1", scripted.port), timeout=5) as link:  # byte by byte, and as the second request of a connection
    link.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert link.recv(65536).startswith(b"HTTP/1.1 200 ")
    time.sleep(0.5)                                          # idle is allowed
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
      for byte in head * 2:
        link.sendall(bytes([byte]))
        time.sleep(0.02)

def test_a_reader_that_does_not_read(scripted: Running, monkeypatch: pytest.MonkeyPatch) -> None:
  """Its connection is given up, and its sequence with it."""
  monkeypatch.setattr(connection, "STALL_SECONDS", 0.3)
  scripted.batch.say(Paced(itertools.repeat(TOKENIZER.encode("word " * 400))), reason="length")
  before = set(scripted.server.server_state.connections)
  with socket.socket() as link:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.connect(("127.0.0.1", scripted.port))
    link.sendall(post(CHAT, messages=HELLO, stream=True, logprobs=True))
    until(lambda: scripted.batch.jobs and scripted.batch.jobs[0].over.is_set())
  until(lambda: not scripted.app.running and scripted.server.server_state.connections <= before)
  assert scripted.batch.jobs[0].cancelled.is_set()

def test_pipelined_requests(scripted: Running) -> None:
  get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
  reply = scripted.raw((get + b"\r\n") * 3 + get + b"connection: close\r\n\r\n")
  assert reply.count(b"HTTP/1.1 200 ") == 4

def test_the_log_keeps_control_characters_out(scripted: Running, capfd: pytest.CaptureFixture[str]) -> None:
  log("a\x1b[2Jb\r\nc\x9b\u202e é")
  assert capfd.readouterr().err == "a\\x1b[2Jb\\r\\nc\\x9b\\u202e é\n"

values = st.recursive(
  st.none() | st.booleans() | st.integers(-2 ** 70, 2 ** 70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
  lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)), max_leaves=8)
some = lambda required, *names: st.fixed_dictionaries(required, optional=dict.fromkeys(names, values))
FIELDS = re.findall(r"\w+", """model n stream stream_options max_tokens max_completion_tokens temperature top_p top_k min_p seed
  stop logprobs top_logprobs logit_bias presence_penalty tool_choice reasoning_effort chat_template_kwargs thinking ignore_eos user echo
  messages prompt""")
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
MESSAGES = st.lists(some({"role": ROLE | values, "content": st.text() | values}, "tool_calls", "reasoning_content", "name", "tool_call_id",
                         "tools", "wo_eos", "task"), max_size=3)
SCHEMAS = st.fixed_dictionaries({"type": st.sampled_from(["object", "string", "array"]) | values},
                                optional=dict.fromkeys(("properties", "pattern", "enum", "items", "anyOf", "$ref"), values))
FORMATS = st.just({"type": "json_object"}) | st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries(
  {"name": st.text(max_size=3), "schema": SCHEMAS})})
FUNCTIONS = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": some({"name": st.sampled_from("ab")}, "parameters",
                                                                                          "description")}), max_size=2)
BODIES = st.fixed_dictionaries({"messages": MESSAGES | values | st.just(HELLO)}, optional={"response_format": FORMATS, "tools": FUNCTIONS})

@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from([CHAT, CHAT, TEXT]), body=BODIES, more=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3))
def test_any_body_gets_an_answer(scripted: Running, path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
  body = (body if path == CHAT else {"prompt": body["messages"]}) | more
  status, reply, _ = scripted.ask("POST", path, body)
  assert status in (200, 400, 404), reply
  if status != 200:
    message = reply["error"]["message"]
    assert message and message.isprintable() and len(message) < 600

@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=60))
def test_any_bytes_get_an_answer(scripted: Running, data: bytes) -> None:
  assert scripted.ask("POST", CHAT, data)[0] == 400
  reply = scripted.raw(data + b"\r\n\r\n", wait=0.05)
  assert reply == b"" or re.match(rb"HTTP/1.1 (400|431|404|405)", reply)

# ---------------------------------------------------------------------------------------------- the demonstration checkpoint
@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
  model = specgrad.load(slots=16)
  server = Running(model, Batch(model.engine, 64), specgrad.demo_path())
  yield server
  server.stop()

def test_it_says_what_the_model_says(demo: Running) -> None:
  ids = encode_chat(TOKENIZER, HELLO)
  want = demo.app.model.generate(ids, max_tokens=64)
  for _ in range(2):
    reply = demo.client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=64)
    choice = reply.choices[0]
    assert (choice.message.content, reply.usage.completion_tokens, choice.finish_reason) == (want.text, len(want.ids), want.finish_reason)
  assert reply.usage.prompt_tokens_details.cached_tokens == len(ids) - 1
  assert reply.speculation["verifier"] == want.stats.verifier and reply.speculation["accepted"] == want.stats.accepted
  stream = demo.client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=64, stream=True)
  assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == want.text

def test_seeds(demo: Running) -> None:
  """Two users at once with different seeds say what each says alone, and n=2 what two users say."""
  ask = lambda seed, n=1: [choice.message.content for choice in demo.client.chat.completions.create(
    model="demo", messages=HELLO, temperature=2, max_tokens=24, seed=seed, n=n).choices]
  alone = {seed: ask(seed)[0] for seed in (5, 6, 900)}
  assert len(set(alone.values())) == 3
  assert ask(5, n=2) == [alone[5], alone[6]]
  together: dict[int, str] = {}
  users = [threading.Thread(target=lambda seed=seed: together.update({seed: ask(seed)[0]})) for seed in alone]
  for user in users: user.start()
  for user in users: user.join(60)
  assert together == alone

def test_logprobs_are_those_of_the_model(demo: Running) -> None:
  import numpy as np
  found = demo.client.completions.create(model="demo", prompt="Hello, I am", temperature=0, max_tokens=6, logprobs=3).choices[0]
  ids = [BOS, *TOKENIZER.encode("Hello, I am")]
  said = demo.app.model.generate(ids, max_tokens=6).ids
  rows = demo.app.model.logits([*ids, *said])[len(ids) - 1:-1].astype(np.float64)
  want = rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1, keepdims=True)
  assert found.text == TOKENIZER.decode(said) and len(found.logprobs.token_logprobs) == len(said)
  np.testing.assert_allclose(found.logprobs.token_logprobs, want[range(len(said)), said], atol=1e-3)
  np.testing.assert_allclose([sorted(top.values())[-1] for top in found.logprobs.top_logprobs], want.max(-1), atol=1e-3)

def test_json(demo: Running) -> None:
  schema = {"type": "object", "properties": {"name": {"enum": ["Olga", "Ivan"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["name", "age"], "additionalProperties": False}
  form: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
  reply = demo.client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=100, response_format=form)
  person = json.loads(reply.choices[0].message.content)
  assert person.keys() == {"name", "age"} and person["name"] in ("Olga", "Ivan") and 1 <= person["age"] <= 99
  assert reply.choices[0].finish_reason == "stop"
  reply = demo.client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=30,
                                              response_format={"type": "json_object"})
  assert reply.choices[0].message.content.startswith("{")
  if reply.choices[0].finish_reason == "stop": assert isinstance(json.loads(reply.choices[0].message.content), dict)

@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_curl(demo: Running) -> None:
  url = f"http://127.0.0.1:{demo.port}/v1/chat/completions"
  body = json.dumps({"messages": HELLO, "temperature": 0, "max_tokens": 8, "stream": True})
  done = subprocess.run(["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", body], capture_output=True, timeout=60)
  lines = done.stdout.decode().split("\n\n")
  assert lines[-2:] == ["data: [DONE]", ""] and texts([json.loads(line[6:]) for line in lines[:-2]])
  done = subprocess.run(["curl", "-s", "-w", "%{http_code}", url, "-d", body], capture_output=True, timeout=60)
  assert done.stdout.endswith(b"415") and b"want application/json" in done.stdout

# ---------------------------------------------------------------------------------------------- the command
class Command:
  """The command in a process of its own."""
  def __init__(self, *flags: str):
    command = [sys.executable, "-m", "specgrad.run", "--serve", "0", *flags]
    self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1], text=True)
    self.err = ""
    while not (found := re.search(r"http://127.0.0.1:(\d+)/v1 serves 'demo'", self.err)): self.line()
    self.port = int(found[1])

  def line(self) -> str:
    assert self.process.stderr is not None
    line = self.process.stderr.readline()
    assert line, self.err
    self.err += line
    return line

  def end(self, seconds: float = 60) -> tuple[int, str, str]:
    out, err = self.process.communicate(timeout=seconds)
    return self.process.returncode, out, self.err + err

  def stream(self, tokens: int) -> http.client.HTTPResponse:
    link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
    body = {"messages": HELLO, "temperature": 2, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    link.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
    reply = link.getresponse()
    while b"content" not in reply.readline(): pass
    return reply

  def status(self, method: str, path: str, body: Any = None) -> int:
    link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
    link.request(method, path, None if body is None else json.dumps(body), {"content-type": "application/json"})
    return link.getresponse().status

def test_signals() -> None:
  """The first lets the reply end and takes nothing new; exit code 0."""
  server = Command("--draft", "none", "--slots", "1")
  reply = server.stream(1000)
  server.process.send_signal(signal.SIGTERM)
  while "shutting down" not in server.line(): pass
  assert server.status("GET", "/health") == server.status("POST", TEXT, {"prompt": "x"}) == 503
  text = reply.read().decode()
  assert '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")
  code, out, err = server.end()
  assert (code, out) == (0, "") and "shutting down: 1 requests run to their end" in err and "Traceback" not in err
  with pytest.raises(ConnectionRefusedError): socket.create_connection(("127.0.0.1", server.port))

def test_half_a_request_does_not_hold_the_end() -> None:
  """One signal, and nothing to finish but a request of which the rest does not come, which may take a minute otherwise."""
  server = Command("--draft", "none", "--slots", "1")
  with socket.create_connection(("127.0.0.1", server.port)) as half:
    half.sendall(post(TEXT, 100, prompt="x"))
    assert server.status("GET", "/health") == 200            # the half came before
    server.process.send_signal(signal.SIGTERM)
    code, out, err = server.end(30)
    assert (code, out) == (0, "") and "shutting down" in err and "Traceback" not in err

def test_a_second_signal_cancels() -> None:
  """Also a request of which the rest does not come."""
  server = Command("--draft", "none", "--slots", "1")
  half = socket.create_connection(("127.0.0.1", server.port))
  half.sendall(post(TEXT, 100, prompt="x"))
  reply = server.stream(4000)
  server.process.send_signal(signal.SIGINT)
  while "shutting down" not in server.line(): pass
  server.process.send_signal(signal.SIGINT)
  text = reply.read().decode()
  assert "the server is shutting down, the reply was cancelled" in text and not text.endswith("[DONE]\n\n")
  code, out, err = server.end()
  assert (code, out) == (0, "") and "interrupted" in err and "Traceback" not in err
  half.close()

def test_a_signal_while_it_compiles(tmp_path: Path) -> None:
  """Ends it and what compiles for it, without a trace."""
  command = [sys.executable, "-m", "specgrad.run", "--serve", "0"]
  process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
                             env=os.environ | {"CACHEDB": str(tmp_path / "kernels.db")})
  try:
    until(lambda: any(path.stat().st_size > 100_000 for path in tmp_path.iterdir()), 60)  # kernels come in
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=60)[1]
  finally: process.kill()
  assert "Traceback" not in err and err.splitlines()[-1:] == ["specgrad: interrupted"] and process.returncode == 130

@pytest.mark.parametrize("flags, error", [
  (("--serve", "70000"), "--serve=70000, want a port from 0 (any free one) to 65535"),
  (("--serve", "0", "--slots", "0"), "--slots=0, want 1 to "),
  (("--serve", "0", "--api-key", "/nowhere"), "--api-key='/nowhere': No such file or directory, want a file that holds the key"),
  (("--serve", "0", "--host", "no.such.host.invalid"), "--host='no.such.host.invalid' --serve=0: "),
  (("--serve", "0", "--depth", "9"), "engine: depth=9, want 0 to 5 (the draft's block size)"),
  (("--serve", "0", "-p", "x"), "--serve: -p beside it, want none of them. Each request has its own prompt")])
def test_mistakes_of_the_command(flags: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
  from specgrad import run
  assert run.main(flags) == 2
  assert capsys.readouterr().err.splitlines()[-1].startswith(f"specgrad: error: {error}")

def test_a_taken_port_and_a_bad_key(tmp_path: Path) -> None:
  with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="Address already in use, want an address"):
    bind("127.0.0.1", taken.getsockname()[1])
  for data, error in ((b"short\n", "first line of 5 characters"), (b"\xff" * 20, "not UTF-8"), (b"", "first line of 0 characters")):
    (tmp_path / "key").write_bytes(data)
    with pytest.raises(ValueError, match=error): read_key(tmp_path / "key")
  (tmp_path / "key").write_bytes(b"a-long-enough-key\r\nmore\n")
  assert read_key(tmp_path / "key") == "a-long-enough-key"
