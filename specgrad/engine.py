"""Runs a model on a device: loading, chunked prefill, one captured graph per decode step, what a later turn can reuse.

Speaks token ids only. This is the one module that reads from the device, once a step. Positions, tokens and settings live
in device buffers that the captured graphs close over, so that a step needs no argument and no recapture."""
import secrets, time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from specgrad import lowering_cache
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.device import Buffer
from specgrad.checkpoint import Checkpoint
from specgrad.models.deepseek_v4 import MAX_ROWS, Cache, Target
from specgrad.weights import stream

ROWS = (1, 8, 32, MAX_ROWS)                                # rows of the captured chunks; a shorter rest is padded
BUCKETS = tuple(512 * 4 ** i for i in range(7))            # context lengths that a graph is captured for
Progress = Callable[[str, int, int], None]                 # stage, done, total


@dataclass(frozen=True)
class Sampling:
  """How a token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave everything in. Raises ValueError."""
  temperature: float = 0.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  seed: int | None = None                                  # none: a fresh one for every reply

  def __post_init__(self) -> None:
    for name, ok, want in (("temperature", 0 <= self.temperature <= 100, "0 to 100"), ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
                           ("top_k", self.top_k >= 0 and self.top_k == int(self.top_k), "0 or a positive whole number"),
                           ("min_p", 0 <= self.min_p <= 1, "0 to 1"), ("seed", self.seed is None or 0 <= self.seed < 2 ** 64, "0 to 2^64-1")):
      if not ok: raise ValueError(f"sampling: {name}={getattr(self, name)}, want {want}")


@dataclass
class Stats:
  """Of one reply. Seconds are wall time on the host; a first run's compilation is inside ttft."""
  prompt_tokens: int = 0
  reused_tokens: int = 0                                   # rows of the prompt that were still in the cache
  tokens: int = 0
  steps: int = 0
  ttft: float = 0.0                                        # request to first token
  seconds: float = 0.0                                     # first token to last
  finish_reason: str = ""                                  # "stop", "length" (max_tokens), "context", "interrupted"

  @property
  def tok_s(self) -> float: return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else 0.0

  def line(self) -> str:
    reused = f", {self.reused_tokens} of {self.prompt_tokens} prompt tokens reused" if self.reused_tokens else ""
    return f"{self.tokens} tokens, {self.tok_s:.1f} tok/s, TTFT {self.ttft:.2f} s{reused}"


def put(tensor: Tensor, values: np.ndarray) -> None:
  """Overwrites a device buffer from the host. values: the tensor's dtype and size."""
  data = memoryview(bytearray(np.ascontiguousarray(values).tobytes()))
  tensor._buffer().copy_from(Buffer("PYTHON", tensor.numel(), tensor.dtype, opaque=data))


@dataclass
class Engine:
  """One sequence on one device. `held` are the ids whose rows are in the cache, in order; rows up to `written` were
  touched (padding included), which bounds how far the position may move back."""
  checkpoint: Checkpoint
  device: str = "CPU"
  max_context: int | None = None
  progress: Progress = lambda stage, done, total: None
  held: list[int] = field(default_factory=list)
  written: int = 0

  def __post_init__(self) -> None:
    lowering_cache.install()                               # before the first kernel
    config = self.config = self.checkpoint.config
    limit = config.max_position_embeddings
    if self.max_context is None: self.max_context = min(limit, 131072)
    if not 2 <= self.max_context <= limit:
      raise ValueError(f"engine: max_context={self.max_context}, want 2 to {limit} (max_position_embeddings of this checkpoint)")
    total, done = self.checkpoint.total_bytes, 0

    def read(n: int) -> None:
      nonlocal done
      done += n
      self.progress("load", done, total)
    self.target = Target(config, dict(stream(self.checkpoint, self.device, read)))
    self.cache = Cache(config, self.max_context, self.device)
    ints = lambda n: Tensor(np.zeros(n, np.int32), device=self.device).clone().realize()
    self.pos, self.anchor, self.last = ints(1), ints(1), ints(1)
    self.rows = {n: ints(n) for n in ROWS}
    self.seed = ints(2)
    self.settings = Tensor(np.zeros(4, np.float32), device=self.device).clone().realize()
    self.graphs: dict[tuple[Any, ...], TinyJit] = {}

  # ---------------------------------------------------------------------------------------------- captured graphs
  def graph(self, name: str, build: Callable[[], Any], *key: Any) -> Any:
    """The captured graph of this name and key, called. It is captured on its first call: nothing in it needs a warm-up."""
    if (jit := self.graphs.get((name, *key))) is None:
      jit = self.graphs[name, *key] = TinyJit(build)
      jit.cnt = 1
      self.progress("compile", 0, 1)
      try: out = jit()
      except BaseException:
        del self.graphs[name, *key]
        raise
      self.progress("compile", 1, 1)
      return out
    return jit()

  def bucket(self, end: int) -> int: return next((b for b in BUCKETS if end <= b), BUCKETS[-1])

  def chunk(self, rows: int, context: int) -> Tensor:
    return self.graph("chunk", lambda: self.target.forward(self.rows[rows], self.pos, self.cache, context), rows, context)

  def step(self, context: int, greedy: bool) -> Tensor:
    """One token: target on the anchor, choice, commit of position and anchor. -> int32 (1,)."""
    def build() -> Tensor:
      logits = self.target.head(self.target.forward(self.anchor, self.pos, self.cache, context))
      ops = self.target.ops
      token = (ops.argmax(logits) if greedy else ops.sample(logits, self.settings, self.seed, self.pos)).realize()
      Tensor.realize(self.anchor.assign(token), self.pos.assign(self.pos + 1))
      return token
    return self.graph("step", build, context, greedy)

  # ---------------------------------------------------------------------------------------------- prefill
  def reusable(self, ids: Sequence[int]) -> int:
    """How many leading ids need no new rows. At most len(ids)-1: the last one is the anchor of the first step.

    A position can move back as long as nothing that its window or its unfinished blocks need was overwritten: the rings
    hold MAX_ROWS more than those need."""
    n = next((i for i, (a, b) in enumerate(zip(self.held, ids)) if a != b), min(len(self.held), len(ids)))
    n = min(n, len(ids) - 1)
    return n if self.written - n <= MAX_ROWS else 0

  def feed(self, ids: Sequence[int], start: int, chunk: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """Rows for ids[start:], in chunks of at most `chunk`: (rows that count, streams of the padded chunk) after each one."""
    at, size = start, min(chunk or MAX_ROWS, MAX_ROWS)
    self.held = self.held[:start]
    while at < len(ids):
      n = min(size, len(ids) - at)
      rows = next(r for r in ROWS if r >= n)
      put(self.pos, np.array([at], np.int32))
      put(self.rows[rows], np.array([*ids[at:at + n], *[0] * (rows - n)], np.int32))
      self.written = max(self.written, at + rows) if at else at + rows
      h = self.chunk(rows, self.bucket(at + rows))
      self.held += ids[at:at + n]
      at += n
      yield n, h
      self.progress("prefill", at - start, len(ids) - start)

  def check(self, ids: Sequence[int], room: int) -> list[int]:
    """ids as a list. Raises ValueError for none, ids outside the vocabulary, and more than the context holds."""
    ids, V = [int(i) for i in ids], self.config.vocab_size
    if not ids: raise ValueError("engine: no ids, want at least one")
    if wrong := [i for i in ids if not 0 <= i < V]: raise ValueError(f"engine: id={wrong[0]}, want 0 to {V - 1}")
    if len(ids) + room > (self.max_context or 0):
      raise ValueError(f"engine: prompt of {len(ids)} tokens does not fit a context of {self.max_context}"
                       + (" with room for a reply" if room else "") + ". Shorten it or raise max_context")
    return ids

  def logits(self, ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
    """ids (n,) -> float32 (n, V): logits after every id, from position 0 and an empty context. Raises ValueError."""
    ids = self.check(ids, 0)
    if chunk is not None and chunk < 1: raise ValueError(f"engine: chunk={chunk}, want at least 1")
    out = []
    for n, h in self.feed(ids, 0, chunk):
      rows = h.shape[0]
      out.append(self.graph("head", lambda h=h: self.target.head(h).realize(), rows, h.uop.base).numpy()[:n])
    return np.concatenate(out)

  # ---------------------------------------------------------------------------------------------- decode
  def generate(self, ids: Sequence[int], max_tokens: int, sampling: Sampling, stats: Stats) -> Iterator[list[int]]:
    """Yields the ids of each step until EOS, max_tokens or the end of the context; fills `stats` as it goes.

    Closing the iterator early is fine: the next call finds out by itself which rows it can reuse.
    Raises ValueError for a prompt that does not fit, ArithmeticError where the logits are not finite."""
    began = time.perf_counter()
    ids = self.check(ids, 1)
    if max_tokens < 1: raise ValueError(f"engine: max_tokens={max_tokens}, want at least 1")
    start = self.reusable(ids)
    stats.prompt_tokens, stats.reused_tokens = len(ids), start
    for _ in self.feed(ids[:-1], start): pass
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    put(self.settings, np.array([sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p], np.float32))
    put(self.seed, np.array([seed & 0xffffffff, seed >> 32], np.uint32).view(np.int32))
    put(self.anchor, np.array(ids[-1:], np.int32))
    pos, anchor = len(ids) - 1, ids[-1]
    put(self.pos, np.array([pos], np.int32))
    self.held = self.held[:pos]
    while not stats.finish_reason:
      self.written = max(self.written, pos + 1) if pos else 1
      token = int(self.step(self.bucket(pos + 1), sampling.temperature <= 0).numpy()[0])
      if token < 0: raise ArithmeticError(f"engine: the logits at position {pos} are not finite")
      self.held.append(anchor)
      pos, anchor = pos + 1, token
      stats.tokens, stats.steps = stats.tokens + 1, stats.steps + 1
      now = time.perf_counter()
      if stats.tokens == 1: stats.ttft, first = now - began, now
      stats.seconds = now - first
      if token == self.config.eos_token_id: stats.finish_reason = "stop"
      elif stats.tokens >= max_tokens: stats.finish_reason = "length"
      elif pos >= (self.max_context or 0): stats.finish_reason = "context"
      yield [token]
