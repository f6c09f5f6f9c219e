"""Runs a model on a device: loading, chunked prefill, one captured graph per decode step, what a later turn can reuse.

Speaks token ids only. This is the one module that reads from the device, once a step. Positions, tokens and settings live
in device buffers that the captured graphs close over, so that a step needs no argument and no recapture."""
import functools
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit
from tinygrad.device import Buffer, Device
from tinygrad.helpers import Context

from specgrad import cpu_graph, lowering_cache
from specgrad.checkpoint import Checkpoint
from specgrad.config import Config
from specgrad.models.deepseek_v4 import MAX_ROWS, Cache, Target
from specgrad.models.dspark import DSpark
from specgrad.models.small import SmallDraft
from specgrad.spec.ngram import NgramDraft
from specgrad.spec.step import Drafter, Plan, State, run
from specgrad.spec.verify import Label
from specgrad.weights import DRAFT, TARGET, stream

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
  finish_reason: str = ""                                  # "stop", "length" (max_tokens), "context", "interrupted"
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
  w4a8: bool = True                                        # weights in their stored formats, values rounded as officially
  draft_choice: str = "auto"                               # "auto", "none", "ngram", or the folder of a smaller checkpoint
  progress: Progress = lambda stage, done, total: None
  held: list[int] = field(default_factory=list)
  written: int = 0

  def __post_init__(self) -> None:
    lowering_cache.install()                               # before the first kernel
    open_device(self.device)
    cpu_graph.install(self.device)
    config = self.config = self.checkpoint.config
    limit = config.max_position_embeddings
    if self.max_context is None: self.max_context = min(limit, 131072)
    if not 2 <= self.max_context <= limit:
      raise ValueError(f"engine: max_context={self.max_context}, want 2 to {limit} (max_position_embeddings of this checkpoint)")
    choice = self.draft_choice
    own = choice == "auto" and config.dspark is not None
    small = None if choice in ("auto", "none", "ngram") else paired(self.checkpoint, choice)
    wanted = [(self.checkpoint, TARGET)] + ([(self.checkpoint, DRAFT)] if own else []) + ([(small, TARGET)] if small else [])
    total = sum(ck.tensors[n].nbytes for ck, prefix in wanted for n in ck.tensors if n.startswith(prefix))
    done = 0

    def read(n: int) -> None:
      nonlocal done
      done += n
      self.progress("load", done, total)
    weights = [dict(stream(ck, self.device, read, prefix, packed=self.w4a8)) for ck, prefix in wanted]
    self.target = Target(config, weights[0], self.w4a8)
    self.cache = Cache(config, self.max_context, self.device, self.w4a8)
    self.draft: Drafter | None = None
    if own: self.draft = DSpark(self.target, weights[1])
    if choice == "ngram": self.draft = NgramDraft(self.max_context + MAX_ROWS, self.device)
    if small:
      cache = Cache(small.config, self.max_context, self.device, self.w4a8)
      self.draft = SmallDraft(Target(small.config, weights[1], self.w4a8), cache)
    V, make = config.vocab_size, lambda dtype, *shape: Tensor(np.zeros(shape, dtype), device=self.device).clone().realize()
    self.rows = {n: make(np.int32, n) for n in ROWS}
    self.state = State(make(np.int32, 1), make(np.int32, 1), make(np.int32, 2), make(np.float32, 4), make(np.float32, 3),
                       make(np.float32, V), make(np.int32, 2, V))
    self.graphs: dict[tuple[Any, ...], TinyJit] = {}

  @property
  def numerics(self) -> str: return "w4a8" if self.w4a8 else "reference"

  def reset(self) -> None:
    """Forgets what the cache holds; its bytes stay, since nothing looks at them."""
    self.held, self.written = [], 0

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
  def buffers(self) -> dict[str, tuple[Tensor, int]]:
    """Every buffer that earlier tokens left something in: name -> (buffer, positions to a row; 0: a ring, needed whole)."""
    found: dict[str, tuple[Tensor, int]] = {}

    def add(prefix: str, cache: Cache, config: Config) -> None:
      for i, (layer, ratio) in enumerate(zip(cache.layers, config.compress_ratios)):
        found[f"{prefix}.{i}.window"] = layer.window, 0
        for kind, part in (("compressor", layer.compressor), ("indexer", layer.indexer)):
          if part: found[f"{prefix}.{i}.{kind}.ring"], found[f"{prefix}.{i}.{kind}.entries"] = (part.ring, 0), (part.entries, ratio)
    add("target", self.cache, self.config)
    if isinstance(self.draft, SmallDraft): add("draft", self.draft.cache, self.draft.model.config)
    if isinstance(self.draft, NgramDraft): found["draft.history"] = self.draft.history, 1
    if isinstance(self.draft, DSpark): found |= {f"draft.{i}.window": (ring, 0) for i, ring in enumerate(self.draft.rings)}
    return found

  @property
  def kv_bytes(self) -> int:
    """Bytes of the caches, target and draft, as allocated."""
    return sum(int(tensor.nbytes()) for tensor, _ in self.buffers().values())

  def snapshot(self) -> dict[str, np.ndarray]:
    """All that the processed tokens left: "ids" int64 (n,), "written" int64 (1,), and the buffers' rows by name as bytes,
    uint8 (rows, bytes of a row). Empty where nothing was processed."""
    if not (n := len(self.held)): return {}
    out: dict[str, np.ndarray] = {"ids": np.array(self.held, np.int64), "written": np.array([self.written], np.int64)}
    for name, (tensor, ratio) in self.buffers().items():
      rows = np.frombuffer(tensor._buffer().as_memoryview(), np.uint8).reshape(tensor.shape[0], -1)
      out[name] = rows[:n // ratio] if ratio else rows
    return out

  def restore(self, state: Mapping[str, np.ndarray]) -> None:
    """Puts a snapshot back: what follows is bit for bit what would have followed there. Raises ValueError, with nothing
    touched, for one of another shape."""
    mine = self.buffers()
    ids = self.check(state.get("ids", np.zeros(0, np.int64)).tolist(), 0)
    want: dict[str, tuple[int, ...]] = {name: (len(ids) // r if r else t.shape[0], int(t.nbytes()) // t.shape[0])
                                        for name, (t, r) in mine.items()} | {"written": (1,)}
    for name, shape in want.items():
      found = state[name].shape if name in state else None
      if found != shape: raise ValueError(f"engine: state of {name}={found}, want {shape}. It is of other settings")
    self.reset()
    for name, (tensor, _) in mine.items():
      whole = np.zeros((tensor.shape[0], want[name][1]), np.uint8)
      whole[:len(state[name])] = state[name]
      put(tensor, whole)
    self.held, self.written = ids, max(len(ids), int(state["written"][0]))

  # ---------------------------------------------------------------------------------------------- captured graphs
  def graph(self, name: str, build: Callable[[], Any], *key: Any) -> Any:
    """The captured graph of this name and key, called. It is captured on its first call: nothing in it needs a warm-up."""
    if (jit := self.graphs.get((name, *key))) is None:
      jit = self.graphs[name, *key] = TinyJit(build)
      jit.cnt = 1
      try:
        self.progress("compile", 0, 1)
        with Context(JIT_BATCH_SIZE=0): out = jit()        # all of it as one graph
      except BaseException:
        del self.graphs[name, *key]
        raise
      self.progress("compile", 1, 1)
      return out
    return jit()

  def bucket(self, end: int) -> int: return next((b for b in BUCKETS if end <= b), BUCKETS[-1])

  def chunk(self, rows: int, context: int) -> Tensor:
    """Prefill of one padded chunk -> streams float32 (rows, S, D). The draft is given its rows of the same tokens."""
    def build() -> Tensor:
      ids, pos, draft = self.rows[rows], self.state.pos, self.draft
      h, taps = self.target.forward_taps(ids, pos, self.cache, context, draft.tap_layers if draft else ())
      if draft: Tensor.realize(*draft.commit(ids, taps, pos, context))
      return h
    return self.graph("chunk", build, rows, context)

  def step(self, plan: Plan) -> np.ndarray:
    """One captured step, and the one read from the device. -> int32 (depth+2,): n_accepted, tokens."""
    return self.graph("step", lambda: run(self.target, self.cache, self.draft, self.state, plan), plan).numpy()

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
      put(self.state.pos, np.array([at], np.int32))
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
      out.append(self.graph("head", functools.partial(self.target.head, h), rows, h.uop.base).numpy()[:n])
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

  def arm(self, ids: Sequence[int], sampling: Sampling) -> None:
    """Settings, history and noise of a new reply into the device buffers."""
    s, V, seed = self.state, self.config.vocab_size, secrets.randbits(63) if sampling.seed is None else sampling.seed
    put(s.settings, np.array([sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p], np.float32))
    put(s.seed, np.array([seed & 0xffffffff, seed >> 32], np.uint32).view(np.int32))
    if sampling.penalised:
      put(s.penalties, np.array([sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty], np.float32))
      bias = np.zeros(V, np.float32)
      for token, value in sampling.logit_bias:
        if not 0 <= token < V: raise ValueError(f"sampling: logit_bias of id {token}, want 0 to {V - 1}")
        bias[token] = value
      put(s.bias, bias)
      self.count(ids, [])

  def count(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
    """The history that penalties look at."""
    rows = [np.bincount(np.asarray(ids, np.int64), minlength=self.config.vocab_size) for ids in (prompt, reply)]
    put(self.state.counts, np.stack(rows).astype(np.int32))

  def place(self, pos: int, anchor: int) -> None:
    """Moves the sequence: the next step processes `anchor` at `pos`."""
    put(self.state.pos, np.array([pos], np.int32))
    put(self.state.anchor, np.array([anchor], np.int32))

  def generate(self, ids: Sequence[int], max_tokens: int, sampling: Sampling, stats: Stats, depth: int | None = None,
               coupled: bool = False, fixed_width: int | None = None, ignore_eos: bool = False) -> Iterator[list[int]]:
    """Yields the ids of each step until EOS, max_tokens or the end of the context; fills `stats` as it goes. A block may
    hold ids past the end of the text: the caller drops what comes after a stop of its own.

    Closing the iterator early is fine: the next call finds out by itself which rows it can reuse.
    Raises ValueError for a prompt that does not fit, ArithmeticError where the logits are not finite."""
    began = time.perf_counter()
    ids = self.check(ids, 1)
    if max_tokens < 1: raise ValueError(f"engine: max_tokens={max_tokens}, want at least 1")
    plan, label = self.plan(sampling, depth, coupled, fixed_width)
    self.arm(ids, sampling)
    start = self.reusable(ids)
    stats.verifier, stats.prompt_tokens, stats.reused_tokens = str(label), len(ids), start
    stats.drafted, stats.accepted = [0] * plan.depth, [0] * plan.depth
    for _ in self.feed(ids[:-1], start): pass
    pos, anchor, idle, limit = len(ids) - 1, ids[-1], 0, self.max_context or 0
    self.place(pos, anchor)
    self.held = self.held[:pos]
    while not stats.finish_reason:
      self.written = max(self.written, pos + plan.width) if pos else plan.width
      n, *block = self.step(replace(plan, context=self.bucket(pos + plan.width))).tolist()
      block = block[:n + 1]
      if not 0 <= n <= plan.depth or not all(0 <= t < self.config.vocab_size for t in block):
        if not plan.depth: raise ArithmeticError(f"engine: the logits at position {pos} are not finite")
        plan, idle = replace(plan, depth=0), 0             # the same step again, without a draft
        stats.warnings.append(f"drafting stopped: step {stats.steps} at position {pos} gave no usable token")
        self.place(pos, anchor)
        if plan.penalised: self.count(ids, [*self.held, anchor][len(ids):])
        continue
      self.held += [anchor, *block[:-1]]
      pos, anchor = pos + len(block), block[-1]
      stats.steps += 1
      for i in range(plan.depth): stats.drafted[i], stats.accepted[i] = stats.drafted[i] + 1, stats.accepted[i] + (i < n)
      idle = idle + 1 if plan.depth and not n else 0
      if idle == 64:
        plan, idle = replace(plan, depth=0), 0
        stats.warnings.append("drafting stopped: no drafted token was accepted in 64 steps")
      room = max_tokens - stats.tokens
      ends = self.config.eos_token_id in block and not ignore_eos
      eos = block.index(self.config.eos_token_id) + 1 if ends else len(block) + 1
      left = limit - (pos - len(block)) if limit else room # tokens until the last slot is used
      end = min(eos, room, left)
      if end <= len(block): stats.finish_reason = "stop" if end == eos else "length" if end == room else "context"
      block = block[:end]
      stats.tokens += len(block)
      now = time.perf_counter()
      if stats.steps == 1: stats.ttft, first, stats.first_step = now - began, now, len(block)
      stats.seconds = now - first
      yield block

  def draft_block(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The greedy block with anchor ids[-1] after ids[:-1] -> tokens int32 (K,), logits (K, V), confidence (K,), or none
    for what this draft does not have. Raises ValueError without a draft."""
    if (draft := self.draft) is None: raise ValueError("engine: there is no draft, want a checkpoint with DSpark stages or draft=...")
    ids = self.check(ids, 1)
    for _ in self.feed(ids[:-1], self.reusable(ids)): pass
    self.place(len(ids) - 1, ids[-1])
    self.held, self.written = self.held[:len(ids) - 1], max(self.written, len(ids) + self.block)
    context = self.bucket(len(ids) + self.block)

    def build() -> tuple[Tensor, ...]:
      greedy = lambda logits, row: (self.target.ops.argmax(logits), None)
      block = draft.propose(self.state.anchor, self.state.pos, self.block, greedy, context)
      out = tuple(t.contiguous() for t in (block.tokens, block.logits, block.confidence) if t is not None)
      Tensor.realize(*out)
      return out
    out = [t.numpy() for t in self.graph("draft", build, context)]
    return out[0], out[1] if len(out) > 1 else None, out[2] if len(out) > 2 else None

  def self_test(self, tokens: int = 32) -> int:
    """Greedy ids with the draft equal those without it at the same number of rows. -> ids compared, 0 without a draft.
    Forgets what the cache held. Raises ArithmeticError where they differ."""
    if not self.depth: return 0
    prompt, room, runs = [self.config.bos_token_id], min(tokens, (self.max_context or 0) - 2), []
    for depth in (self.depth, 0):
      self.reset()
      blocks = self.generate(prompt, room, Sampling(), Stats(), depth, fixed_width=self.depth + 1, ignore_eos=True)
      runs.append([t for block in blocks for t in block])
    self.reset()
    if (at := next((i for i, (a, b) in enumerate(zip(*runs)) if a != b), None)) is not None:
      raise ArithmeticError(f"self-test: token {at} is {runs[0][at]} with the draft, {runs[1][at]} without. Run with --draft none")
    return len(runs[0])

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
