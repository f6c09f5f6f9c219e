"""The OpenAI API over HTTP: chat, completions, models, health, metrics, and the command that serves it. Knows requests and
ids, no tensors. A request is read and encoded in a worker thread, so that it does not hold up other replies."""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest

import specgrad
from specgrad.api import ReplyText
from specgrad.batch import Batch, Closed, Full
from specgrad.completion import Choice, Completion, Metrics, Piece
from specgrad.connection import HEADER_BYTES, TOO_LONG, Exchange, Gone, Server, bind
from specgrad.encoding import THINK_END, Encoding, PromptError
from specgrad.engine import LANES
from specgrad.grammar import Mask, Vocabulary, call_grammar, json_grammar
from specgrad.prompt import check_tokens, encode_chat, encode_text
from specgrad.reply import ReplyParser
from specgrad.request import Request, RequestError, parse, printable, read_json

if TYPE_CHECKING:
  from specgrad.api import Model

QUEUE = 64                                                 # sequences that may wait for a slot

# ----------------------------------------------------------------------------------------------------- the application
class App:
  """What answers requests, as an ASGI application."""
  def __init__(self, model: Model, batch: Batch, slots: int, folder: Path, key: str | None = None, local: bool = True,
               log: Callable[[str], None] = lambda line: None):
    """slots: sequences at once; key: what clients have to show, if anything; local: only this machine is to reach it."""
    assert model.tokenizer is not None
    self.model, self.tokenizer, self.batch, self.slots, self.local, self.log = model, model.tokenizer, batch, slots, local, log
    self.name, self.encoding, self.created = folder.resolve().name, Encoding.read(folder), int(time.time())
    self.fingerprint = f"specgrad-{specgrad.__version__}-{model.numerics}"
    self.key = None if key is None else digest(key)
    self.vocabulary = Vocabulary(model.tokenizer, model.config.vocab_size, model.config.eos_token_id)
    self.think_end = model.tokenizer.special_ids.get(THINK_END, -1)
    self.body_bytes = (1 << 20) + 16 * model.max_context   # JSON may take 6 bytes for a character, and a token several characters
    self.metrics, self.running = Metrics(self.name, batch), set[Completion]()
    self.pool = ThreadPoolExecutor(slots + QUEUE + 4, "reply")
    self.closed = ""                                       # why nothing new is taken

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    exchange = Exchange(scope, receive, send)
    try: await self.route(exchange)
    except Gone: pass
    except RequestError as error: await self.refuse(exchange, error)
    except Exception:                                      # a fault of ours must not take other replies with it
      traceback.print_exc()
      await self.refuse(exchange, RequestError("internal error", status=500))

  async def refuse(self, exchange: Exchange, error: RequestError) -> None:
    self.log(f"{exchange.client} {exchange.method} {exchange.path} {error.status}: {error}")
    await exchange.fail(error)

  async def route(self, x: Exchange) -> None:
    if x.header_bytes > HEADER_BYTES: raise TOO_LONG       # h11 only stops those that it has to wait for
    self.check_access(x)
    model = x.path.removeprefix("/v1/models/") if x.path.startswith("/v1/models/") else None
    routes: dict[str, tuple[str, Callable[[], Any]]] = {
      "/health": ("GET", lambda: self.health(x)),
      "/metrics": ("GET", lambda: x.answer(200, generate_latest(self.metrics.registry), "text/plain; version=0.0.4; charset=utf-8")),
      "/v1/models": ("GET", lambda: x.answer(200, {"object": "list", "data": [self.card]})),
      "/v1/chat/completions": ("POST", lambda: self.complete(x, chat=True)),
      "/v1/completions": ("POST", lambda: self.complete(x, chat=False))}
    if model is not None: routes[x.path] = ("GET", lambda: self.show_model(x, model))
    if x.path not in routes:
      raise RequestError(f"no such path: {x.path!r}, want one of {', '.join(sorted(routes))}", code="unknown_url", status=404)
    method, answer = routes[x.path]
    if x.method != method and not (method == "GET" and x.method == "HEAD"):
      x.extra["allow"] = method
      raise RequestError(f"{x.path}: method {x.method!r}, want {method}", code="method_not_allowed", status=405)
    await answer()

  def check_access(self, x: Exchange) -> None:
    """The key, for all but /health. Without one, a page in a browser must not get in by way of a name that leads here."""
    if self.key is not None and x.path != "/health":
      scheme, _, given = x.headers.get("authorization", "").partition(" ")
      if not hmac.compare_digest(digest(given.strip() if scheme.lower() == "bearer" else ""), self.key):
        x.extra["www-authenticate"] = "Bearer"
        raise RequestError("no valid API key in the header Authorization: Bearer KEY", code="invalid_api_key", status=401)
    host = re.sub(r":\d+$", "", x.headers.get("host", ""))
    if self.key is None and self.local and host.lower() != "localhost" and not is_address(host):
      raise RequestError(f"host {host!r}: want localhost or an address where no API key is set", code="unknown_host", status=403)

  async def health(self, x: Exchange) -> None:
    if self.closed: raise RequestError(self.closed, code="unavailable", status=503)
    await x.answer(200, {"status": "ok", "running": self.batch.active, "waiting": len(self.batch.waiting)})

  @property
  def card(self) -> dict[str, Any]:
    return {"id": self.name, "object": "model", "created": self.created, "owned_by": "specgrad", "max_model_len": self.model.max_context}

  async def show_model(self, x: Exchange, name: str) -> None:
    self.check_model(name)
    await x.answer(200, self.card)

  def check_model(self, name: str | None) -> None:
    if name not in (None, self.name):
      raise RequestError(f"model={name!r}: there is only {self.name!r}", "model", "model_not_found", 404)

  async def complete(self, x: Exchange, chat: bool) -> None:
    began = time.perf_counter()
    if self.closed: raise RequestError(self.closed, code="unavailable", status=503)
    kind = x.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json": raise RequestError(f"content-type={kind!r}, want application/json", status=415)
    if (packed := x.headers.get("content-encoding", "identity")) != "identity":
      raise RequestError(f"content-encoding={packed!r}, want none", status=415)
    data = await x.body(self.body_bytes)
    request, prompts, mask = await asyncio.get_running_loop().run_in_executor(self.pool, self.prepare, data, chat)
    if self.closed: raise RequestError(self.closed, code="unavailable", status=503)
    await Completion(self, request, self.submit(request, prompts, mask), began).run(x)

  def prepare(self, data: bytes, chat: bool) -> tuple[Request, list[list[int]], Mask | None]:
    """A body as a request, the ids of its prompts, and what its replies are held to. Raises RequestError."""
    try:
      request = parse(read_json(data), chat, self.slots)
      self.check_model(request.model)
      if chat: prompts = [self.encode(request)]
      else: prompts = [encode_text(self.tokenizer, p) if isinstance(p, str) else p for p in request.prompts]
    except RequestError: raise
    except RecursionError: raise RequestError("body: nested too deeply, want less") from None
    except ValueError as error: raise RequestError(str(error), "messages" if isinstance(error, PromptError) else None) from None
    for ids in prompts:
      if len(ids) >= self.model.max_context:
        raise RequestError(f"this model's maximum context length is {self.model.max_context} tokens, the prompt has {len(ids)}: no room "
                           "for a reply. Shorten it", "messages" if chat else "prompt", "context_length_exceeded")
    try: return request, prompts, self.mask(request)
    except ValueError as error:
      field = "tools" if request.tools else "response_format"
      raise RequestError(f"{field}: {error}", field, "invalid_schema") from None

  def mask(self, request: Request) -> Mask | None:
    """What the reply is held to, if anything. Raises ValueError."""
    functions = [tool["function"] for tool in request.tools]
    if functions and (request.must_call or request.schema is not None or any(f.get("strict") for f in functions)):
      grammar = call_grammar(self.tokenizer, functions, request.must_call, request.schema)
    elif request.schema is not None: grammar = json_grammar(request.schema)
    else: return None
    return self.vocabulary.start(grammar, request.effort != "off")

  def encode(self, request: Request) -> list[int]:
    """The prompt shows the schema where the checkpoint has the text for it; the mask holds the reply to it in any case."""
    shown = request.schema if request.tell_schema and self.encoding.response_format is not None else None
    return encode_chat(self.tokenizer, request.messages, effort=request.effort, tools=request.tools or None, encoding=self.encoding,
                       response_format=shown if isinstance(shown, dict) else None)

  def submit(self, request: Request, prompts: list[list[int]], mask: Mask | None) -> list[Choice]:
    """Raises RequestError, and then none of the request runs."""
    choices: list[Choice] = []
    try:
      for i in range(len(prompts) * request.n):
        ids, own, seed = prompts[i // request.n], mask.copy() if mask else None, request.sampling.seed
        sampling = request.sampling if seed is None else replace(request.sampling, seed=(seed + i % request.n) % 2 ** 64)
        job = self.batch.submit(ids, request.max_tokens or self.model.max_context - len(ids), sampling, ignore_eos=request.ignore_eos,
                                logprobs=request.logprobs, mask=own)
        text = ReplyText(self.tokenizer, request.stop, None if request.ignore_eos else self.model.config.eos_token_id)
        choices.append(Choice(i, job, text, own, ReplyParser(request.effort != "off") if request.chat else None, len(ids)))
    except (Full, Closed, ValueError) as error:
      for choice in choices: choice.job.cancel()
      if isinstance(error, Full): raise RequestError("the queue is full, try again soon", code="queue_full", status=429) from None
      if isinstance(error, Closed): raise RequestError("no requests are taken", code="unavailable", status=503) from None
      raise RequestError(str(error)) from None
    return choices

  # ---------------------------------------------------------------------------------------------- the end
  def drain(self) -> None:
    self.closed = self.closed or "the server is shutting down"
    self.log(f"shutting down: {len(self.running)} requests run to their end, a second signal cancels them")

  def cancel(self) -> None:
    for completion in self.running: completion.cancel()

  def die(self, reason: str) -> None:
    """The engine is gone: whoever waits for it is told."""
    self.closed = f"the engine stopped: {reason}"
    for completion in self.running:
      for choice in completion.choices: completion.pieces.put_nowait(Piece(choice, reason="error", error=self.closed))

def digest(key: str) -> bytes:
  """Of equal length for all keys, so that comparing tells nothing about theirs."""
  return hashlib.sha256(key.encode()).digest()

def is_address(host: str) -> bool:
  try: ipaddress.ip_address(host.strip("[]"))
  except ValueError: return False
  return True

# ----------------------------------------------------------------------------------------------------- the command
def command(args: argparse.Namespace, load: Callable[[], Model]) -> None:
  """Serves what `load` brings until a signal comes. Raises ValueError, one line, for settings that cannot work, before it loads."""
  key = None if args.api_key is None else read_key(Path(args.api_key))
  if not 1 <= args.slots <= LANES[-1]: raise ValueError(f"--slots={args.slots}, want 1 to {LANES[-1]}")
  with bind(args.host, args.serve) as socket:
    model = load()
    assert model.tokenizer is not None
    check_tokens(model.tokenizer)
    label = model.verifier(temperature=1.0, depth=args.depth, coupled=args.coupled)  # refuses a depth that cannot be
    host, port = socket.getsockname()[:2]
    local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    folder = Path(args.model) if args.model else specgrad.demo_path()
    batch = Batch(model.engine, QUEUE, args.depth, args.coupled)
    model.self_test()
    batch.warm()
    app = App(model, batch, args.slots, folder, key, local, log)
    if key is None and not local: log(f"no --api-key: whoever reaches {host} can use it")
    serve(app, socket, f"http://{f'[{host}]' if ':' in host else host}:{port}/v1 serves {app.name!r}: context {model.max_context}, "
          f"{args.slots} at once, {QUEUE} may wait, {'with' if key else 'without'} an API key; verifier: {label}. "
          "Temperature 1 and no thinking unless a request asks for it. Ctrl-C ends it after the last reply")

def serve(app: App, socket: Any, hello: str) -> None:
  """Until a signal, or until the engine fails. Raises ArithmeticError then. hello: the line that says it listens."""
  failed: list[str] = []

  def engine() -> None:
    try: app.batch.run()
    except BaseException as error:
      traceback.print_exc()
      failed.append(f"{type(error).__name__}: {error}")
    if not server.should_exit:
      server.loop.call_soon_threadsafe(app.die, failed[0] if failed else "without a reason")
      server.loop.call_soon_threadsafe(server.end, 2)
  def begin() -> None:
    thread.start()
    app.log(hello)
  thread = threading.Thread(target=engine, name="engine")
  server = Server(app, begin, app.drain, app.cancel)
  server.run([socket])
  app.batch.close(cancel=True)
  thread.join()
  app.pool.shutdown(cancel_futures=True)
  if failed: raise ArithmeticError(f"engine: {failed[0]}")

def read_key(path: Path) -> str:
  """The first line of a file. A key on the command line could be read by everybody on the machine."""
  try: key = (path.read_text("utf-8").splitlines() or [""])[0].strip()
  except OSError as error: raise ValueError(f"--api-key={str(path)!r}: {error.strerror}, want a file that holds the key") from None
  except UnicodeDecodeError: raise ValueError(f"--api-key={str(path)!r}: not UTF-8, want a file that holds the key") from None
  if len(key) < 8 or not (key.isascii() and key.isprintable()):
    raise ValueError(f"--api-key={str(path)!r}: first line of {len(key)} characters, want a key of at least 8 ASCII ones")
  return key

def log(line: str) -> None:
  """To stderr, with whatever a client put into it made harmless. That nobody reads it is no reason to stop."""
  with contextlib.suppress(OSError): print(printable(line), file=sys.stderr, flush=True)
