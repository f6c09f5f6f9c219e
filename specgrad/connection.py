"""HTTP as uvicorn speaks it, with what a server in the open needs: limits, deadlines, errors as JSON, a way to end in order.

Knows nothing of models or of what is asked."""
from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specgrad.request import RequestError

HEADER_BYTES = 32 << 10                                    # request line and headers
HEADER_SECONDS, BODY_SECONDS = 15.0, 60.0                  # to send them, and then the body
STALL_SECONDS = 60.0                                       # a reader may take nothing of what waits for it
CONNECTIONS = 512                                          # at once, most of them idle
LAST_SECONDS = 5.0                                         # after a signal: for the rest of a request, and for cancelled streams to say so

TOO_LONG = RequestError(f"headers: more than {HEADER_BYTES} bytes, want less", status=431)

class Gone(Exception):
  """The client left."""

class Guard(H11Protocol):
  """A connection that is given up if a request does not come to its end, or nobody reads the reply."""
  deadline: asyncio.TimerHandle | None = None
  stall: asyncio.TimerHandle | None = None

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
    super().connection_made(transport)
    if len(self.connections) > CONNECTIONS: self.refuse(RequestError("too many connections", code="overloaded", status=503))
    else: self.deadline = self.loop.call_later(HEADER_SECONDS, self.late)

  def connection_lost(self, exc: Exception | None) -> None:
    self.stop("deadline")
    self.stop("stall")
    super().connection_lost(exc)

  @property
  def busy(self) -> bool: return self.cycle is not None and not self.cycle.response_complete

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
    if self.busy or not begun: self.stop("deadline")
    elif not self.deadline: self.deadline = self.loop.call_later(HEADER_SECONDS, self.late)

  def late(self) -> None:
    self.deadline = None
    self.refuse(RequestError(f"no whole request within {HEADER_SECONDS:g} seconds", status=408))

  def send_400_response(self, msg: str) -> None:           # what uvicorn calls for what is no HTTP; here it says which fault it was
    error = sys.exception()
    status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
    self.refuse(TOO_LONG if status == 431 else RequestError(f"not HTTP/1.1 ({error})", status=status))

  def refuse(self, error: RequestError) -> None:
    if self.transport.is_closing(): return
    if self.busy or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE): return self.transport.abort()
    body = encode(error.body)
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
      self.transport.write(self.conn.send(event) or b"")
    return self.transport.close()

  def pause_writing(self) -> None:
    super().pause_writing()
    self.stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

  def resume_writing(self) -> None:
    super().resume_writing()
    self.stop("stall")

  def stop(self, name: str) -> None:
    if timer := getattr(self, name): timer.cancel()
    setattr(self, name, None)

class Exchange:
  """One request and its reply."""
  def __init__(self, scope: Mapping[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]):
    self.receive, self.send, self.streaming = receive, send, False
    self.method, self.path = scope["method"], scope["path"]
    self.client = ":".join(map(str, scope.get("client") or ("?",)))
    self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    self.header_bytes = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(n) + len(v) for n, v in scope["headers"])
    self.extra: dict[str, str] = {}                        # headers of whatever reply it gets

  async def body(self, limit: int) -> bytes:
    """Raises RequestError for one that is too long or too slow, and Gone."""
    too_long = RequestError(f"body: more than {limit} bytes, want less", status=413)
    if int(self.headers.get("content-length", "0")) > limit: raise too_long  # h11 lets only digits pass
    data = bytearray()
    try:
      async with asyncio.timeout(BODY_SECONDS):
        while True:
          message = await self.receive()
          if message["type"] != "http.request": raise Gone
          data += message.get("body", b"")
          if len(data) > limit: raise too_long
          if not message.get("more_body"): return bytes(data)
    except TimeoutError:
      self.extra["connection"] = "close"
      raise RequestError(f"body: not whole within {BODY_SECONDS:g} seconds", status=408) from None

  async def gone(self) -> None:
    """Returns when the client leaves, or the reply is complete."""
    while (await self.receive())["type"] != "http.disconnect": pass

  async def begin(self, status: int, kind: str, **headers: str) -> None:
    pairs = {"content-type": kind, **self.extra, **{name.replace("_", "-"): value for name, value in headers.items()}}
    await self.send({"type": "http.response.start", "status": status,
                     "headers": [(name.encode(), value.encode()) for name, value in pairs.items()]})

  async def answer(self, status: int, body: Any, kind: str = "application/json", **headers: str) -> None:
    data = body if isinstance(body, bytes) else encode(body)
    await self.begin(status, kind, content_length=str(len(data)), **headers)
    await self.send({"type": "http.response.body", "body": data})

  async def events(self) -> None:
    """Begins a stream of events. Proxies are told to pass each on at once."""
    self.streaming = True
    await self.begin(200, "text/event-stream; charset=utf-8", cache_control="no-cache", x_accel_buffering="no")

  async def write(self, data: bytes, last: bool = False) -> None:
    await self.send({"type": "http.response.body", "body": data, "more_body": not last})

  async def fail(self, error: RequestError) -> None:
    """The error as the reply, or as its last event."""
    if self.streaming: return await self.write(event(error.body), last=True)
    retry = {"retry_after": "1"} if error.status in (429, 503) else {}
    return await self.answer(error.status, error.body, **retry)

def encode(value: Any) -> bytes: return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

def event(value: Any) -> bytes: return b"data: " + encode(value) + b"\n\n"

class Server(uvicorn.Server):
  """Ends in order: the first SIGINT or SIGTERM lets replies run to their end, and who comes meanwhile is told; a second one
  cancels them, a third waits for nothing."""
  def __init__(self, app: Any, begin: Callable[[], None], drain: Callable[[], None], cancel: Callable[[], None]):
    """begin: called once it listens."""
    super().__init__(uvicorn.Config(
      app, http=Guard, ws="none", lifespan="off", loop="asyncio", log_config=None, access_log=False, server_header=False,
      proxy_headers=False, h11_max_incomplete_event_size=HEADER_BYTES, timeout_keep_alive=60))
    self.begin, self.steps, self.signals, self.draining = begin, (drain, cancel), 0, False

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    self.loop = asyncio.get_running_loop()
    await super().startup(sockets)
    self.begin()

  async def on_tick(self, counter: int) -> bool:
    """Ten times a second, whether to close: not while requests run."""
    self.should_exit = self.should_exit or (self.draining and not self.server_state.tasks)
    return await super().on_tick(counter)

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """A signal handler: takes no locks, and leaves the rest to the loop."""
    self.signals += 1
    self.loop.call_soon_threadsafe(self.end, self.signals)

  def end(self, times: int) -> None:
    self.draining, self.should_exit = True, self.should_exit or times > 1
    if times <= len(self.steps): self.steps[times - 1]()
    if times == 1: self.loop.call_later(LAST_SECONDS, self.hang_up)
    if times == 2:
      self.hang_up()
      self.loop.call_later(LAST_SECONDS, self.end, 3)
    if times > 2: self.force_exit = True

  def hang_up(self) -> None:
    """On who has sent half a request: it would be refused anyway."""
    for connection in self.server_state.connections:
      if isinstance(connection, Guard) and connection.busy and connection.cycle.more_body: connection.transport.abort()

def bind(host: str, port: int) -> socket.socket:
  """A socket that does not listen yet, so that nobody connects before the model is there. Raises ValueError, one line."""
  if not 0 <= port < 65536: raise ValueError(f"--serve={port}, want a port from 0 (any free one) to 65535")
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
  except (OSError, UnicodeError) as error:
    reason = getattr(error, "strerror", None) or error
    raise ValueError(f"--host={host!r} --serve={port}: {reason}, want an address that is free here") from None
  return bound
