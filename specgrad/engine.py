"""Runs a model on its devices: loading, chunked prefill, one captured graph per decode step, what a later turn can reuse.

Speaks token ids only. This is the one module that reads from a device, once a step, and once more where a mask has to know
what was drafted. Positions, tokens and settings live in device buffers that the captured graphs close over, so that a step
needs no argument and no recapture. The cache has a slot for each sequence; a step takes some of them, each in a lane of its
own. On a CPU several threads may run steps and prompts at the same time: they share weights and caches, but no slot, no lane
and no graph."""
import contextlib
import functools
import hashlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tinygrad import Tensor, TinyJit
from tinygrad.device import Buffer, Device
from tinygrad.helpers import Context

from specgrad import cpu_graph, lowering_cache
from specgrad.checkpoint import Checkpoint
from specgrad.config import Config
from specgrad.models.deepseek_v4 import MAX_ROWS, Cache, Target, on_all
from specgrad.models.dspark import Draft, DSpark
from specgrad.models.small import SmallDraft
from specgrad.plan import plan as placed
from specgrad.quant import Each, flat, lift, on, realize
from specgrad.spec.ngram import NgramDraft
from specgrad.spec.step import Drafter, Plan, State, propose, settle
from specgrad.spec.step import run as whole_step
from specgrad.spec.verify import Label
from specgrad.weights import DRAFT, TARGET, stream

ROWS = (1, 8, 32, MAX_ROWS)                                # rows of the captured chunks; a shorter rest is padded
LANES = (1, 4, 8, 16)                                      # sequences of the captured steps
BUCKETS = tuple(512 * 4 ** i for i in range(7))            # context lengths that a graph is captured for
Progress = Callable[[str, int, int], None]                 # stage, done, total; from any thread that calls the engine

@dataclass(frozen=True)
class Sampling:
  """How a token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave everything in. Raises ValueError."""
  temperature: float = 0.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  seed: int | None = None                                  # none: a fresh one for every reply
  repetition_penalty: float = 1.0                          # divides (or multiplies) the logit of what prompt or reply held
  presence_penalty: float = 0.0                            # subtracted once for what the reply held,
  frequency_penalty: float = 0.0                           # and once for each time
  logit_bias: tuple[tuple[int, float], ...] = ()           # (id, added to its logit)

  @property
  def penalised(self) -> bool:
    return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)

  def __post_init__(self) -> None:
    finite = lambda x: -math.inf < x < math.inf
    for name, ok, want in (
        ("temperature", 0 <= self.temperature <= 100, "0 to 100"),
        ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
        ("top_k", self.top_k >= 0 and self.top_k == int(self.top_k), "0 or a positive whole number"),
        ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
        ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
        ("presence_penalty", finite(self.presence_penalty), "a number"),
        ("frequency_penalty", finite(self.frequency_penalty), "a number"),
        ("seed", self.seed is None or 0 <= self.seed < 2 ** 64, "0 to 2^64-1")):
      if not ok: raise ValueError(f"sampling: {name}={getattr(self, name)}, want {want}")
    for token, value in self.logit_bias:
      if not finite(value): raise ValueError(f"sampling: logit_bias of id {token} is {value}, want a number")

@dataclass
class Stats:
  """Of one reply. Seconds are wall time on the host; a first run's compilation is inside ttft."""
  verifier: str = ""                                       # label of the rule that was in force
  prompt_tokens: int = 0
  reused_tokens: int = 0                                   # rows of the prompt that were still in the cache
  tokens: int = 0
  steps: int = 0
  drafted: list[int] = field(default_factory=list)         # by place in the block: steps in which the place was drafted,
  accepted: list[int] = field(default_factory=list)        # and in which its token stood, whatever was emitted of it
  ttft: float = 0.0                                        # request to first token
  seconds: float = 0.0                                     # first step's end to last step's end
  first_step: int = 0                                      # tokens of the first step, which `seconds` does not cover
  finish_reason: str = ""                                  # "stop", "length" (max_tokens), "context", "interrupted", "error"
  warnings: list[str] = field(default_factory=list)

  @property
  def tok_s(self) -> float: return (self.tokens - self.first_step) / self.seconds if self.seconds > 0 else 0.0
  @property
  def steps_s(self) -> float: return (self.steps - 1) / self.seconds if self.seconds > 0 else 0.0
  @property
  def tpot(self) -> float: return 1 / self.tok_s if self.tok_s else 0.0                # seconds per token after the first step
  @property
  def tokens_per_step(self) -> float: return (sum(self.accepted) + self.steps) / self.steps if self.steps else 0.0
  @property
  def acceptance_rate(self) -> float: return sum(self.accepted) / sum(self.drafted) if any(self.drafted) else 0.0

  def line(self) -> str:
    parts = [f"{self.tokens} tokens", f"{self.tok_s:.1f} tok/s", f"TTFT {self.ttft:.2f} s", f"TPOT {self.tpot * 1e3:.1f} ms"]
    if self.drafted:
      by_place = " ".join(f"{a / d:.0%}" for a, d in zip(self.accepted, self.drafted) if d)
      parts += [f"{self.tokens_per_step:.2f} tokens/step", f"{self.steps_s:.1f} steps/s",
                f"accepted {self.acceptance_rate:.0%} ({by_place})"]
    if self.reused_tokens: parts.append(f"{self.reused_tokens} of {self.prompt_tokens} prompt tokens reused")
    return ", ".join(parts)

def open_device(name: str) -> None:
  """Raises ValueError if tinygrad can't compute on it; what it raises itself depends on the kind of device."""
  if name.split(":")[0] in ("DISK", "NULL", "NPY", "TINYFS"): raise ValueError(f"device {name}: it computes nothing")
  try: Device[name]
  except (AttributeError, ImportError, OSError, RuntimeError, AssertionError, ExceptionGroup) as e:
    raise ValueError(f"device {name}: {' '.join(str(e).split()) or type(e).__name__}, want one that tinygrad can open here") from e

def put(tensor: Any, values: np.ndarray) -> None:
  """Overwrites a buffer, on each device that has it, from the host. values: the tensor's dtype and size."""
  data = memoryview(bytearray(np.ascontiguousarray(values).tobytes()))
  with TURNS.beside():
    for t in flat((tensor,)):
      to = t._buffer()
      if to.device.split(":")[0] == "CPU": to.as_memoryview(force_zero_copy=True)[:] = data        # without a copy as tinygrad runs one
      else: to.copy_from(Buffer("PYTHON", t.numel(), t.dtype, opaque=data))

class Mask(Protocol):
  """Which tokens a reply may go on with, for example by a grammar."""
  def rows(self, drafted: Sequence[int]) -> np.ndarray:
    """bool (len(drafted)+1, V): what may follow after 0, 1, .. of the drafted tokens. All of it after one that may not."""
  def advance(self, ids: Sequence[int]) -> None:
    """These were emitted."""

@dataclass
class Slot:
  """A sequence's place in the cache. `held` are the ids whose rows are in it, in order; rows up to `written` were touched
  (padding included), which bounds how far the position may move back."""
  held: list[int] = field(default_factory=list)
  written: int = 0

  def touch(self, start: int, rows: int) -> None: self.written = max(self.written, start + rows) if start else rows

  def reusable(self, ids: Sequence[int]) -> int:
    """How many leading ids need no new rows. At most len(ids)-1: the last one is the anchor of the first step.

    A position can move back as long as nothing that its window or its unfinished blocks need was overwritten: the rings
    hold MAX_ROWS more than those need."""
    n = next((i for i, (a, b) in enumerate(zip(self.held, ids)) if a != b), min(len(self.held), len(ids)))
    n = min(n, len(ids) - 1)
    return n if self.written - n <= MAX_ROWS else 0

class TokenLogprobs(NamedTuple):
  """Of the model's own law: no temperature, no filter, no penalty, no mask."""
  logprob: float
  top: list[tuple[int, float]]                             # (id, log probability), best first

class Block(NamedTuple):
  """What a step gave one reply. A block may run past the end of its text."""
  ids: list[int]
  logprobs: list[TokenLogprobs] | None                     # for each id

@dataclass(eq=False)
class Run:
  """A reply under way."""
  ids: list[int]                                           # the prompt
  max_tokens: int
  sampling: Sampling
  stats: Stats
  plan: Plan                                               # its context is filled in for every step
  ignore_eos: bool = False
  mask: Mask | None = None
  logprobs: int | None = None                              # how many alternatives to name
  slot: int = 0
  out: list[int] = field(default_factory=list)             # what the device emitted, past the end of the text, too
  idle: int = 0                                            # steps since a drafted token was accepted
  error: str = ""
  began: float = field(default_factory=time.perf_counter)
  seed: int = 0

  def __post_init__(self) -> None: self.seed = secrets.randbits(63) if self.sampling.seed is None else self.sampling.seed

  @property
  def pos(self) -> int: return len(self.ids) + len(self.out) - 1
  @property
  def anchor(self) -> int: return (self.out or self.ids)[-1]

  def undraft(self, why: str) -> None:
    self.plan, self.idle = replace(self.plan, depth=0), 0
    self.stats.warnings.append(f"drafting stopped: {why}")

  def take(self, n: int, block: list[int], eos: int, limit: int) -> list[int]:
    """A step's n accepted tokens and its bonus -> those of them that belong to the reply."""
    stats, depth = self.stats, self.plan.depth
    self.out += block
    stats.steps += 1
    for i in range(depth): stats.drafted[i], stats.accepted[i] = stats.drafted[i] + 1, stats.accepted[i] + (i < n)
    self.idle = self.idle + 1 if depth and not n else 0
    if self.idle == 64: self.undraft("no drafted token was accepted in 64 steps")
    room = self.max_tokens - stats.tokens
    stop = block.index(eos) + 1 if eos in block and not self.ignore_eos else len(block) + 1
    end = min(stop, room, limit - (self.pos - len(block)))                # tokens until the last slot is used
    if end <= len(block): stats.finish_reason = "stop" if end == stop else "length" if end == room else "context"
    block = block[:end]
    stats.tokens += len(block)
    now = time.perf_counter()
    if stats.steps == 1: stats.ttft, stats.first_step, self.began = now - self.began, len(block), now
    stats.seconds = now - self.began
    if self.mask: self.mask.advance(block)
    return block

@dataclass
class Lanes:
  """Buffers of a step of `size` sequences, and whose state they hold."""
  size: int
  state: State
  held: list[tuple[Run, int]] | None = None                # (reply, its position) of each lane in use
  penalised: bool = False                                  # whether histories and rates are those of the replies
  spare: list[tuple[int, int]] = field(default_factory=list)  # (slot, position) of the lanes that are not in use: see arm
  masks: dict[int, Any] = field(default_factory=dict)      # width -> bool (size * width, V)

  def hold(self, runs: Sequence[Run], penalised: bool) -> bool:
    if self.held is None or len(self.held) != len(runs) or penalised > self.penalised: return False
    return all(run is r and run.pos == pos for run, (r, pos) in zip(runs, self.held))

class Turns:
  """Calls that may run beside each other, and calls that want to be alone: what tinygrad runs in this process while it captures a
  graph becomes part of it, whoever runs it."""
  def __init__(self) -> None: self.changed, self.calls, self.taken = threading.Condition(), 0, False

  @contextlib.contextmanager
  def beside(self) -> Iterator[None]:
    with self.changed:
      self.changed.wait_for(lambda: not self.taken)
      self.calls += 1
    try: yield
    finally:
      with self.changed:
        self.calls -= 1
        if self.taken: self.changed.notify_all()

  @contextlib.contextmanager
  def alone(self) -> Iterator[None]:
    with self.changed:
      self.changed.wait_for(lambda: not self.taken)
      self.taken = True
    try:
      with self.changed: self.changed.wait_for(lambda: not self.calls)
      yield
    finally:
      with self.changed:
        self.taken = False
        self.changed.notify_all()

TURNS = Turns()
READING = threading.Lock()                                 # to tinygrad a copy is a graph, whose nodes are not for two threads at once

@dataclass
class Engine:
  """A model on its devices, with `slots` sequences."""
  checkpoint: Checkpoint
  devices: tuple[str, ...] = ("CPU",)
  max_context: int | None = None                           # of each sequence
  w4a8: bool = True                                        # weights in their stored formats, values rounded as officially
  draft_choice: str = "auto"                               # "auto", "none", "ngram", or the folder of a smaller checkpoint
  progress: Progress = lambda stage, done, total: None
  kv: str = "sharded"                                      # of several devices each keeps its entries of the cache; "replicated": all
  slots: int = 1

  def __post_init__(self) -> None:
    lowering_cache.install()                               # before the first kernel
    for device in self.devices:
      open_device(device)
      cpu_graph.install(device)
    config = self.config = self.checkpoint.config
    limit = config.max_position_embeddings
    if self.max_context is None: self.max_context = min(limit, 131072)
    if not 2 <= self.max_context <= limit:
      raise ValueError(f"engine: max_context={self.max_context}, want 2 to {limit} (max_position_embeddings of this checkpoint)")
    if not 1 <= self.slots <= LANES[-1]: raise ValueError(f"engine: slots={self.slots}, want 1 to {LANES[-1]}")
    choice = self.draft_choice
    own = choice == "auto" and config.dspark is not None
    small = None if choice in ("auto", "none", "ngram") else paired(self.checkpoint, choice)
    if len(self.devices) > 1:                              # raises what can't be split
      for ck in (self.checkpoint, *((small,) if small else ())): placed(ck, len(self.devices), kv=self.kv)
    wanted = [(self.checkpoint, TARGET)] + ([(self.checkpoint, DRAFT)] if own else []) + ([(small, TARGET)] if small else [])
    total = sum(ck.tensors[n].nbytes for ck, prefix in wanted for n in ck.tensors if n.startswith(prefix))
    done = 0

    def read(n: int) -> None:
      nonlocal done
      done += n
      self.progress("load", done, total)
    weights = [dict(stream(ck, self.devices, read, prefix, packed=self.w4a8)) for ck, prefix in wanted]
    settings = self.max_context, self.devices, self.w4a8, self.slots, self.kv == "sharded"
    self.target = Target(config, weights[0], self.w4a8)
    self.cache = Cache(config, *settings)
    self.draft: Drafter | None = None
    if own: self.draft = DSpark(self.target, weights[1], self.slots)
    if choice == "ngram": self.draft = NgramDraft(self.max_context + MAX_ROWS, self.devices, self.slots)
    if small: self.draft = SmallDraft(Target(small.config, weights[1], self.w4a8), Cache(small.config, *settings))
    self.slot = [Slot() for _ in range(self.slots)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = cores if self.device.split(":")[0] == "CPU" and len(self.devices) == 1 else 1
    self.parts = max(1, min(threads, self.slots // 4))     # threads that may call at the same time: see advance
    self.fill = [self.make(np.int32, 2, 1) for _ in range(self.parts)]                   # where a prompt's next chunk goes: position, slot
    self.rows = [{n: self.make(np.int32, n) for n in ROWS} for _ in range(self.parts)]   # and its ids
    self.lanes: dict[tuple[int, int], Lanes] = {}
    self.graphs: dict[tuple[Any, ...], TinyJit] = {}

  def make(self, dtype: type, *shape: int) -> Any:
    """A buffer of zeros on every device."""
    with TURNS.beside(), READING:
      return on_all(self.devices, lambda device: Tensor(np.zeros(shape, dtype), device=device).clone().realize())

  @property
  def device(self) -> str: return self.devices[0]
  @property
  def numerics(self) -> str: return "w4a8" if self.w4a8 else "reference"

  def reset(self) -> None:
    """Forgets what the cache holds; its bytes stay, since nothing looks at them."""
    for i in range(self.slots): self.slot[i] = Slot()

  @property
  def block(self) -> int:
    """Tokens of a whole draft block: what the draft was made for, at most 5."""
    return min(5, self.draft.depth_limit) if self.draft else 0

  @property
  def depth(self) -> int:
    """Tokens drafted a step unless the caller says otherwise: the block, but on a CPU, which pays for every row, no more
    than 2. A GPU waits for weights, whatever the rows."""
    return min(2, self.block) if self.device.split(":")[0] == "CPU" else self.block

  # ---------------------------------------------------------------------------------------------- saved state
  def buffers(self) -> dict[str, tuple[Tensor, Callable[[int], int]]]:
    """Every buffer that earlier tokens left something in, by name: the buffer (slots, rows, bytes or channels), and how many of
    a slot's rows n tokens need: of entries the finished ones, of which a device may have its share; a ring is needed whole."""
    found: dict[str, tuple[Tensor, Callable[[int], int]]] = {}

    def add(name: str, value: Any, ratio: int = 0, split: bool = False) -> None:
      for i, tensor in enumerate(parts := flat((value,))):
        first, step = (i, len(parts)) if split else (0, 1)
        needed = functools.partial(lambda ratio, first, step, n: len(range(first, n // ratio, step)), ratio, first, step)
        found[f"{name}.{i}" if len(parts) > 1 else name] = tensor, needed if ratio else functools.partial(lambda n, _: n, tensor.shape[1])

    def add_cache(prefix: str, cache: Cache, config: Config) -> None:
      for i, (layer, ratio) in enumerate(zip(cache.layers, config.compress_ratios)):
        add(f"{prefix}.{i}.window", layer.window)
        for kind, part in (("compressor", layer.compressor), ("indexer", layer.indexer)):
          if not part: continue
          add(f"{prefix}.{i}.{kind}.ring", part.ring)
          add(f"{prefix}.{i}.{kind}.entries", part.entries, ratio, cache.split)
    add_cache("target", self.cache, self.config)
    if isinstance(self.draft, SmallDraft): add_cache("draft", self.draft.cache, self.draft.model.config)
    if isinstance(self.draft, NgramDraft): add("draft.history", self.draft.history, 1)
    if isinstance(self.draft, DSpark):
      for i, ring in enumerate(self.draft.rings): add(f"draft.{i}.window", ring)
    return found

  @property
  def kv_bytes(self) -> int:
    """Bytes of the caches, target and draft, as allocated on all devices."""
    return sum(int(tensor.nbytes()) for tensor, *_ in self.buffers().values())

  def snapshot(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """All that a sequence which goes on from these ids can use of slot 0, and nothing of other ids: "ids" int64 (n,), "written"
    int64 (1,), and the buffers' rows by name as bytes, uint8 (rows, bytes of a row). Empty where it can use nothing."""
    slot = self.slot[0]
    if not (n := slot.reusable([*ids, -1])): return {}     # -1: whatever comes next
    out: dict[str, np.ndarray] = {"ids": np.array(slot.held[:n], np.int64), "written": np.array([max(slot.written, n)], np.int64)}
    for name, (tensor, needed) in self.buffers().items():
      rows = np.frombuffer(tensor._buffer().as_memoryview(), np.uint8).reshape(*tensor.shape[:2], -1)[0][:needed(n)].copy()
      if needed(0):                                        # a ring: what later positions or earlier sequences left in it
        kept = [p % len(rows) for p in range(max(0, int(out["written"][0]) - len(rows)), n)]
        rows[np.setdiff1d(np.arange(len(rows)), kept)] = 0
      out[name] = rows
    return out

  def restore(self, state: Mapping[str, np.ndarray]) -> None:
    """Puts a snapshot back, and forgets all other slots: what follows is bit for bit what would have followed there. Raises
    ValueError, with nothing touched, for one of another shape."""
    mine = self.buffers()
    ids = self.check(state.get("ids", np.zeros(0, np.int64)).tolist(), 0)
    size = lambda t: int(t.nbytes()) // t.shape[0] // t.shape[1]
    want: dict[str, tuple[int, ...]] = {name: (needed(len(ids)), size(t)) for name, (t, needed) in mine.items()} | {"written": (1,)}
    for name, shape in want.items():
      found = state[name].shape if name in state else None
      if found != shape: raise ValueError(f"engine: state of {name}={found}, want {shape}. It is of other settings")
    self.reset()
    for name, (tensor, *_) in mine.items():
      whole = np.zeros((*tensor.shape[:2], want[name][1]), np.uint8)
      whole[0, :len(state[name])] = state[name]
      put(tensor, whole)
    self.slot[0] = Slot(ids, max(len(ids), int(state["written"][0])))

  # ---------------------------------------------------------------------------------------------- captured graphs
  def graph(self, name: str, build: Callable[[], Any], *key: Any) -> Any:
    """The captured graph of this name and key, called. It is captured on its first call: nothing in it needs a warm-up."""
    if (jit := self.graphs.get((name, *key))) is None:
      jit = TinyJit(build)
      jit.cnt = 1
      with TURNS.alone(), Context(JIT_BATCH_SIZE=0):       # all of it as one graph
        self.progress("compile", 0, 1)
        out = jit()
        self.progress("compile", 1, 1)
      self.graphs[name, *key] = jit
      return out
    with TURNS.beside(): return jit()

  def bucket(self, end: int) -> int: return next((b for b in BUCKETS if end <= b), BUCKETS[-1])

  def chunk(self, rows: int, context: int, part: int = 0) -> Any:
    """Prefill of one padded chunk -> streams float32 (rows, S, D). The draft is given its rows of the same tokens."""
    def build() -> Any:
      ids, at, draft = self.rows[part][rows], self.fill[part], self.draft
      h, taps = self.target.forward_taps(ids, at, self.cache, context, draft.tap_layers if draft else ())
      if draft: realize(*draft.commit(ids, taps, at, context))
      return h
    return self.graph("chunk", build, rows, context, part)

  def step(self, plan: Plan, state: State) -> tuple[np.ndarray, np.ndarray | None]:
    """One captured step, and the one read from the device. -> int32 (B, depth+2): n_accepted, tokens; float32 (B, width, V)
    logits if the plan asks for logprobs."""
    B, build = on(0, state.anchor).shape[0], functools.partial(whole_step, self.target, self.cache, self.draft, state, plan)
    return self.read(self.graph("step", build, plan, B, state.number), B)

  def read(self, results: Any, B: int) -> tuple[np.ndarray, np.ndarray | None]:
    with TURNS.beside(), READING:
      if not isinstance(results, tuple) or isinstance(results, Each): return on(0, results).numpy(), None
      packed, logits = (on(0, x).numpy() for x in results)
    return packed, logits.reshape(B, -1, logits.shape[-1])

  def masked_step(self, plan: Plan, lanes: Lanes, runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray | None]:
    """A step in two captured halves: what may stand in a row hangs on the tokens that were drafted before it, so these are
    read in between."""
    B, K, V, state, proposal = lanes.size, plan.depth, self.config.vocab_size, lanes.state, None
    drafted = np.zeros((B, 0), np.int32)
    if (draft := self.draft) and K:
      def build() -> tuple[Any, ...]:
        made = propose(self.target, draft, state, plan)
        out = tuple(lift(Tensor.contiguous)(t) for t in (made.tokens, made.probs) if t is not None)
        realize(*out)
        return out
      proposal = self.graph("propose", build, plan, B, state.number)
      with TURNS.beside(), READING: drafted = on(0, proposal[0]).numpy().reshape(B, K)
      drafted = np.maximum(drafted, 0)                     # -1 is none: see target_rows
    if (mask := lanes.masks.get(plan.width)) is None:
      mask = lanes.masks[plan.width] = self.make(np.bool_, B * plan.width, V)
    allowed = np.ones((B, plan.width, V), np.bool_)
    for i, r in enumerate(runs):
      if r.mask: allowed[i, :K + 1] = r.mask.rows(drafted[i].tolist())
    put(mask, allowed)
    made = Draft(proposal[0], proposal[1] if len(proposal) > 1 else None) if proposal else None
    rest = functools.partial(settle, self.target, self.cache, self.draft, state, plan, made, mask)
    return self.read(self.graph("settle", rest, plan, B, state.number), B)

  # ---------------------------------------------------------------------------------------------- prefill
  def feed(self, ids: Sequence[int], start: int, chunk: int | None = None, slot: int = 0) -> Iterator[tuple[int, Any]]:
    """Rows for ids[start:] into a slot, in chunks of at most `chunk`: (rows that count, streams of the padded chunk) after
    each one."""
    at, size, place, part = start, min(chunk or MAX_ROWS, MAX_ROWS), self.slot[slot], slot % self.parts
    place.held = place.held[:start]
    while at < len(ids):
      n = min(size, len(ids) - at)
      rows = next(r for r in ROWS if r >= n)
      put(self.fill[part], np.array([[at], [slot]], np.int32))
      put(self.rows[part][rows], np.array([*ids[at:at + n], *[0] * (rows - n)], np.int32))
      place.touch(at, rows)
      h = self.chunk(rows, self.bucket(at + rows), part)
      place.held += ids[at:at + n]
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
      rows = on(0, h).shape[0]
      out.append(on(0, self.graph("head", functools.partial(self.target.head, h), rows, on(0, h).uop.base)).numpy()[:n])
    return np.concatenate(out)

  # ---------------------------------------------------------------------------------------------- decode
  def plan(self, sampling: Sampling, depth: int | None, coupled: bool, fixed_width: int | None) -> tuple[Plan, Label]:
    """The step that these settings call for (its context is filled in later) and its label. Raises ValueError."""
    limit = self.draft.depth_limit if self.draft else 0
    depth = self.depth if depth is None else depth
    if not 0 <= depth <= limit:
      raise ValueError(f"engine: depth={depth}, want 0 to {limit}" + (" (the draft's block size)" if self.draft else ": there is no draft"))
    width = max(depth + 1, fixed_width or 1)
    if width > 16 or (fixed_width is not None and fixed_width < 1): raise ValueError(f"engine: fixed_width={fixed_width}, want 1 to 16")
    one_hot = isinstance(self.draft, NgramDraft)
    rule = "greedy" if sampling.temperature <= 0 else "coupled" if coupled or one_hot or not depth else "rejection"
    label = Label("coupled" if rule == "coupled" and depth else "exact", {"coupled": "equal"}.get(rule, rule) if depth else "plain",
                  "none" if not depth else "realised" if rule == "rejection" else "one-hot", depth, self.numerics)
    return Plan(rule, depth, width, 0, sampling.penalised), label

  def begin(self, ids: Sequence[int], max_tokens: int, sampling: Sampling, stats: Stats, depth: int | None = None, coupled: bool = False,
            fixed_width: int | None = None, ignore_eos: bool = False, mask: Mask | None = None, logprobs: int | None = None) -> Run:
    """A reply that nothing was done for yet. Raises ValueError for settings out of range and a prompt that does not fit."""
    ids, V = self.check(ids, 1), self.config.vocab_size
    if max_tokens < 1: raise ValueError(f"engine: max_tokens={max_tokens}, want at least 1")
    if wrong := [t for t, _ in sampling.logit_bias if not 0 <= t < V]:
      raise ValueError(f"sampling: logit_bias of id {wrong[0]}, want 0 to {V - 1}")
    plan, label = self.plan(sampling, depth, coupled, fixed_width)
    stats.verifier, stats.prompt_tokens = str(label), len(ids)
    stats.drafted, stats.accepted = [0] * plan.depth, [0] * plan.depth
    plan = replace(plan, masked=mask is not None, logprobs=logprobs is not None)
    return Run(ids, max_tokens, sampling, stats, plan, ignore_eos, mask, logprobs)

  def prefill(self, run: Run, slot: int = 0) -> Iterator[None]:
    """The rows of a reply's prompt, a chunk each time, with a pause between two; what the slot holds already is kept. `advance` may
    follow the end."""
    start = self.slot[slot].reusable(run.ids)
    run.slot, run.stats.reused_tokens = slot, start
    for _ in self.feed(run.ids[:-1], start, slot=slot):
      if len(self.slot[slot].held) < len(run.ids) - 1: yield
    self.slot[slot].held = self.slot[slot].held[:len(run.ids) - 1]

  def arm(self, runs: Sequence[Run], lanes: Lanes, penalised: bool, spare: list[int]) -> None:
    """Positions, newest tokens, settings and histories of these replies into the lanes, one each. Lanes that are left get no
    token, so that they stand still, and slots that nobody steps: what is written there lies beyond what the slot holds."""
    ends = [self.end(i) for i in spare]
    seeds = [(r.seed & 0xffffffff, r.seed >> 32) for r in runs] + [(0, 0)] * len(spare)
    law = [(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k, r.sampling.min_p) for r in runs] + [(0., 1., 0., 0.)] * len(spare)
    put(lanes.state.at, np.array([[r.pos for r in runs] + ends, [r.slot for r in runs] + spare], np.int32))
    put(lanes.state.anchor, np.array([r.anchor for r in runs] + [-1] * len(spare), np.int32))
    put(lanes.state.seed, np.array(seeds, np.uint32).view(np.int32))
    put(lanes.state.settings, np.array(law, np.float32))
    if penalised:
      V = self.config.vocab_size
      bias, counts = np.zeros((lanes.size, V), np.float32), np.zeros((lanes.size, 2, V), np.int32)
      for i, r in enumerate(runs):
        for token, value in r.sampling.logit_bias: bias[i, token] = value
        for j, ids in enumerate((r.ids, r.out)): counts[i, j] = np.bincount(np.asarray(ids, np.int64), minlength=V)
      rates = [(r.sampling.repetition_penalty, r.sampling.presence_penalty, r.sampling.frequency_penalty) for r in runs]
      put(lanes.state.penalties, np.array(rates + [(1., 0., 0.)] * len(spare), np.float32))
      put(lanes.state.bias, bias)
      put(lanes.state.counts, counts)
    lanes.spare = list(zip(spare, ends))

  def end(self, slot: int) -> int:
    """The position from which a lane that is not in use may write."""
    return min(len(self.slot[slot].held), (self.max_context or 0) - 1)

  def lanes_for(self, runs: Sequence[Run], plan: Plan, size: int = 1, number: int = 0, spare: Sequence[int] = ()) -> Lanes:
    """The `number`-th lanes of this size, as the last step of these replies left them or armed anew."""
    if (lanes := self.lanes.get((size, number))) is None:
      V = self.config.vocab_size
      state = State(self.make(np.int32, 2, size), self.make(np.int32, size), self.make(np.int32, size, 2), self.make(np.float32, size, 4),
                    self.make(np.float32, size, 3), self.make(np.float32, size, V), self.make(np.int32, size, 2, V), number)
      lanes = self.lanes[size, number] = Lanes(size, state)
    if not lanes.hold(runs, plan.penalised) or lanes.spare != [(slot, self.end(slot)) for slot in spare]:
      self.arm(runs, lanes, plan.penalised, list(spare))
    lanes.held = None                                      # until the step has been read
    for slot, start in [(r.slot, r.pos) for r in runs] + lanes.spare: self.slot[slot].touch(start, plan.width)
    return lanes

  def advance(self, runs: Sequence[Run], part: int | None = None) -> list[Block]:
    """One step of replies whose rows are in their slots -> what each goes on with; no ids for one whose step must be
    repeated without a draft. run.stats.finish_reason says which have ended, "error" one whose logits are not finite.

    `part`: all of them are in slots part, part + parts, part + 2 parts ..., and so are the lanes that are not in use: a thread for each
    part may prefill and advance while others do. Without it nobody else may. Plans may differ in what is in use of masks, penalties and
    logprobs, of which a step does all that any of them needs, and greedy ones go with those of any one other rule."""
    plan = joined([r.plan for r in runs])
    plan = replace(plan, context=self.bucket(max(r.pos for r in runs) + plan.width))
    slots = range(self.slots) if part is None else range(part, self.slots, self.parts)
    size, used = min(next(k for k in LANES if k >= len(runs)), len(slots)), {r.slot for r in runs}
    lanes = self.lanes_for(runs, plan, size, part or 0, [i for i in slots if i not in used][:size - len(runs)])
    found = self.masked_step(plan, lanes, runs) if plan.masked else self.step(plan, lanes.state)
    return self.settled(runs, lanes, plan, *found)

  def settled(self, runs: Sequence[Run], lanes: Lanes, plan: Plan, packed: np.ndarray, logits: np.ndarray | None) -> list[Block]:
    """A step's results, given to the replies that it was made for."""
    blocks, limit = [], self.max_context or 0
    for i, r in enumerate(runs):
      n, *block = packed[i].tolist()
      block = block[:n + 1]
      if not 0 <= n <= plan.depth or not all(0 <= t < self.config.vocab_size for t in block):
        if plan.depth: r.undraft(f"step {r.stats.steps} at position {r.pos} gave no usable token")
        else:
          r.error, r.stats.finish_reason = f"engine: the logits at position {r.pos} are not finite", "error"
          self.slot[r.slot] = Slot()                       # whatever is wrong may lie in the rows: nobody is to go on from them
        blocks.append(Block([], None))
        continue
      held = self.slot[r.slot].held
      held += [r.anchor, *block[:-1]]
      del held[limit:]                                     # nobody goes on from rows past the end of the context
      ids = r.take(n, block, self.config.eos_token_id, limit)
      rows = None if r.logprobs is None or logits is None else [ranked(logits[i, j], t, r.logprobs) for j, t in enumerate(ids)]
      blocks.append(Block(ids, rows))
    lanes.held = [(r, r.pos) for r in runs] if all(b.ids for b in blocks) else None
    lanes.penalised = plan.penalised
    return blocks

  def generate(self, ids: Sequence[int], max_tokens: int, sampling: Sampling, stats: Stats, depth: int | None = None,
               coupled: bool = False, fixed_width: int | None = None, ignore_eos: bool = False,
               logprobs: int | None = None) -> Iterator[Block]:
    """Yields what each step gave until EOS, max_tokens or the end of the context; fills `stats` as it goes. A block may
    hold ids past the end of the text: the caller drops what comes after a stop of its own.

    Closing the iterator early is fine: the next call finds out by itself which rows it can reuse.
    Raises ValueError for a prompt that does not fit, ArithmeticError where the logits are not finite."""
    run = self.begin(ids, max_tokens, sampling, stats, depth, coupled, fixed_width, ignore_eos, None, logprobs)
    for _ in self.prefill(run): pass
    while not stats.finish_reason:
      if (block := self.advance([run])[0]).ids: yield block
    if run.error: raise ArithmeticError(run.error)

  def draft_block(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The greedy block with anchor ids[-1] after ids[:-1] -> tokens int32 (K,), logits (K, V), confidence (K,), or none
    for what this draft does not have. Raises ValueError without a draft."""
    if (draft := self.draft) is None: raise ValueError("engine: there is no draft, want a checkpoint with DSpark stages or draft=...")
    run = self.begin(self.check(ids, 1), 1, Sampling(), Stats())
    for _ in self.prefill(run): pass
    context = self.bucket(len(run.ids) + self.block)
    state = self.lanes_for([run], replace(run.plan, width=self.block + 1)).state

    def build() -> tuple[Any, ...]:
      greedy = lambda logits, row: (self.target.ops.argmax(logits), None)
      block = draft.propose(state.anchor, state.at, self.block, greedy, context)
      out = tuple(lift(Tensor.contiguous)(t) for t in (block.tokens, block.logits, block.confidence) if t is not None)
      realize(*out)
      return out
    out = [on(0, t).numpy() for t in self.graph("draft", build, context)]
    return out[0], out[1] if len(out) > 1 else None, out[2] if len(out) > 2 else None

  def self_test(self, tokens: int = 32) -> int:
    """Greedy ids with the draft equal those without it at the same number of rows. -> ids compared, 0 without a draft.
    Forgets what the cache held. Raises ArithmeticError where they differ."""
    if not self.depth: return 0
    prompt, room, runs = [self.config.bos_token_id], min(tokens, (self.max_context or 0) - 2), []
    for depth in (self.depth, 0):
      self.reset()
      blocks = self.generate(prompt, room, Sampling(), Stats(), depth, fixed_width=self.depth + 1, ignore_eos=True)
      runs.append([t for block in blocks for t in block.ids])
    self.reset()
    if (at := next((i for i, (a, b) in enumerate(zip(*runs)) if a != b), None)) is not None:
      raise ArithmeticError(f"self-test: token {at} is {runs[0][at]} with the draft, {runs[1][at]} without. Run with --draft none")
    return len(runs[0])

def joined(plans: Sequence[Plan]) -> Plan:
  """One step for all of them: where rules differ, sampling's, which at temperature 0 takes the same ids as greedy."""
  rule = next((p.rule for p in plans if p.rule != "greedy"), "greedy")
  flags = {name: any(getattr(p, name) for p in plans) for name in ("penalised", "masked", "logprobs")}
  return replace(plans[0], rule=rule, **flags)

def ranked(logits: np.ndarray, token: int, top: int) -> TokenLogprobs:
  """float32 (V,) -> the token's log probability, and the `top` most probable ones, best first."""
  best = float(logits.max())
  total = best + math.log(float(np.exp(logits.astype(np.float64) - best).sum()))
  most = sorted(np.argpartition(-logits, min(top, len(logits)) - 1)[:top].tolist(), key=lambda t: (-logits[t], t)) if top else []
  return TokenLogprobs(float(logits[token]) - total, [(t, float(logits[t]) - total) for t in most])

def paired(checkpoint: Checkpoint, path: str) -> Checkpoint:
  """The checkpoint in folder `path`, if it can draft for the first one. Raises ValueError that names what differs."""
  small = Checkpoint.open(path)
  for name in ("vocab_size", "bos_token_id", "eos_token_id"):
    mine, theirs = getattr(checkpoint.config, name), getattr(small.config, name)
    if mine != theirs: raise ValueError(f"{Path(path).name}: {name}={theirs}, want {mine}. The draft must share the target's vocabulary")
  hashes = [hashlib.sha256(f.read_bytes()).hexdigest()[:12] if (f := Path(p) / "tokenizer.json").exists() else None
            for p in (checkpoint.folder, path)]
  if hashes[0] != hashes[1]:
    raise ValueError(f"{Path(path).name}: tokenizer.json={hashes[1]}, want {hashes[0]}. The draft must share the target's vocabulary")
  return small
