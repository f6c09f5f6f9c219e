"""The public Python interface: load a checkpoint, generate, look at logits. Joins the engine (ids) and the tokenizer (text)."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specgrad.checkpoint import Checkpoint
from specgrad.encoding import Encoding
from specgrad.engine import Engine, Progress, Sampling, Stats, TokenLogprobs
from specgrad.tokenizer import StreamDecoder, Tokenizer

@dataclass(frozen=True)
class Reply:
  """What was generated. ids end where text ends: with the EOS token, with the token that completed a stop string, or cut
  by max_tokens ("length") or the context ("context"). text leaves out EOS and the stop string; None without a tokenizer."""
  ids: list[int]
  text: str | None
  finish_reason: str
  stats: Stats

@dataclass(frozen=True)
class DraftBlock:
  """A greedy draft. logits (K, V) float32, each with the bias of the token before it; confidence (K,) float32, raw: its
  sigmoid estimates the chance of acceptance given the tokens before. Both None for drafts that have none."""
  tokens: np.ndarray                                       # int32 (K,)
  logits: np.ndarray | None
  confidence: np.ndarray | None

class ReplyText:
  """The text of a reply as its ids arrive, in blocks from anywhere. Text that may be the beginning of a stop string is held
  back, half a character is never shown, and nothing counts after EOS or the token that completed a stop string: `ended`."""
  def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...] = (), eos: int | None = None):
    """eos: the id that ends a reply, none to go on past it. Without a tokenizer there are ids alone."""
    self.decoder = StreamDecoder(tokenizer) if tokenizer else None
    self.stop, self.eos, self.held, self.ended = stop, eos, "", False

  def push(self, block: Sequence[int]) -> tuple[list[int], str]:
    """-> the ids of the block that belong to the reply, and what can now be shown."""
    if self.ended: return [], ""
    if not self.stop and self.eos not in block: return list(block), self.decoder.push(block) if self.decoder else ""
    new, shown = list[int](), ""
    for token in block:                                    # token by token: a block may run past the end of the text
      new.append(token)
      if token == self.eos: shown, self.ended = shown + self.finish(), True
      elif self.decoder:
        self.held += self.decoder.push([token])
        found = first_stop(self.held, self.stop)
        safe = len(self.held) - overlap(self.held, self.stop) if found is None else found
        shown, self.held = shown + self.held[:safe], self.held[safe:]
        self.ended = found is not None
      if self.ended: break
    return new, shown

  def finish(self) -> str:
    """What is still held back, where the reply ends by itself."""
    if self.ended or self.decoder is None: return ""
    rest, self.held = self.held + self.decoder.finish(), ""
    return rest

@dataclass
class Stream:
  """Iterates over (new ids, new text) as a reply grows; `reply` holds all of it so far, `logprobs` an entry for each of its ids
  if `top` alternatives were asked for. interrupt() ends it after the step that is running."""
  engine: Engine
  tokenizer: Tokenizer | None
  prompt: list[int]
  max_tokens: int
  sampling: Sampling
  stop: tuple[str, ...]
  depth: int | None = None
  coupled: bool = False
  fixed_width: int | None = None
  ignore_eos: bool = False
  top: int | None = None
  ids: list[int] = field(default_factory=list)
  logprobs: list[TokenLogprobs] = field(default_factory=list)
  text: str = ""
  stats: Stats = field(default_factory=Stats)
  interrupted: bool = False

  @property
  def reply(self) -> Reply:
    return Reply(list(self.ids), self.text if self.tokenizer else None, self.stats.finish_reason or "interrupted", self.stats)

  def interrupt(self) -> None: self.interrupted = True

  def __iter__(self) -> Iterator[tuple[list[int], str]]:
    text = ReplyText(self.tokenizer, self.stop, None if self.ignore_eos else self.engine.config.eos_token_id)
    for block in self.engine.generate(self.prompt, self.max_tokens, self.sampling, self.stats, self.depth, self.coupled, self.fixed_width,
                                      self.ignore_eos, self.top):
      new, shown = text.push(block.ids)
      self.ids += new
      self.logprobs += (block.logprobs or [])[:len(new)]
      self.stats.tokens = len(self.ids)
      if text.ended: self.stats.finish_reason = "stop"
      elif self.interrupted: self.stats.finish_reason = self.stats.finish_reason or "interrupted"
      if self.stats.finish_reason: shown += text.finish()
      self.text += shown
      yield new, shown
      if self.stats.finish_reason: return
    raise AssertionError("a reply ends with a reason")

def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
  """Index of the earliest stop string in text, or none."""
  return min((at for s in stops if (at := text.find(s)) >= 0), default=None)

def overlap(text: str, stops: tuple[str, ...]) -> int:
  """Length of the longest end of text that begins a stop string."""
  return max((n for s in stops for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0)

class Model:
  """A loaded checkpoint with the state of one conversation: a call whose ids begin with those of the call before computes
  only what is new. Not safe to use from several threads at once."""
  def __init__(self, engine: Engine, tokenizer: Tokenizer | None, encoding: Encoding | None = None):
    """encoding: the long literal texts of prompts, from the checkpoint's own folder."""
    self.engine, self.tokenizer, self.config, self.encoding = engine, tokenizer, engine.config, encoding

  @property
  def max_context(self) -> int: return self.engine.max_context or 0
  @property
  def depth(self) -> int:
    """Tokens drafted a step by default; 0 without a draft."""
    return self.engine.depth
  @property
  def numerics(self) -> str: return self.engine.numerics

  def reset(self) -> None:
    """Forgets the conversation: the next call computes all of its prompt."""
    self.engine.reset()

  def verifier(self, *, temperature: float = 0.0, depth: int | None = None, coupled: bool = False) -> str:
    """The label of the rule that these settings of `generate` put in force. Raises ValueError for a depth out of range."""
    return str(self.engine.plan(Sampling(temperature), depth, coupled, None)[1])

  def logits(self, ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
    """ids (n,) -> float32 (n, V): the logits after every id. `chunk` limits the rows of a prefill chunk; it changes
    nothing but speed. Raises ValueError for ids that are none, foreign, or too many."""
    return self.engine.logits(ids, chunk)

  def stream(self, ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = (), depth: int | None = None, coupled: bool = False,
             fixed_width: int | None = None, ignore_eos: bool = False, logit_bias: Mapping[int, float] | None = None,
             logprobs: int | None = None, **sampling: Any) -> Stream:
    """The iterator form of `generate`, with its arguments: yields (new ids, new text), keeps `reply`. logprobs: how many likely
    alternatives to name beside the log probability of each id, which `Stream.logprobs` then has. Raises as `generate`."""
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if stop and self.tokenizer is None: raise ValueError("generate: stop strings need a tokenizer, and this checkpoint has none")
    if "" in stop: raise ValueError("generate: stop='', want strings of at least one character")
    settings = Sampling(**sampling, logit_bias=tuple((logit_bias or {}).items()))
    return Stream(self.engine, self.tokenizer, list(ids), max_tokens, settings, stop, depth, coupled, fixed_width, ignore_eos, logprobs)

  def generate(self, ids: Sequence[int], *, max_tokens: int, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
               min_p: float = 0.0, seed: int | None = None, repetition_penalty: float = 1.0, presence_penalty: float = 0.0,
               frequency_penalty: float = 0.0, logit_bias: Mapping[int, float] | None = None, depth: int | None = None,
               coupled: bool = False, fixed_width: int | None = None, ignore_eos: bool = False, stop: Sequence[str] = ()) -> Reply:
    """ids (n,) -> the reply, at most max_tokens long. Greedy at temperature 0; otherwise a run repeats exactly from its
    seed. finish_reason is "stop" (EOS or a stop string), "length" or "context".

    depth: drafted tokens a step, none: the draft's own block size (2 on a CPU), 0: plain decoding. At temperature above 0 drafts are
    verified by rejection sampling, which keeps the target's law; `coupled` keeps the very ids that plain decoding gives
    for the seed. ignore_eos goes on past EOS, to measure. fixed_width: rows of every step; plain decoding at
    fixed_width=K+1 does the arithmetic of depth K.
    Raises ValueError for settings or ids out of range and a prompt that does not fit, ArithmeticError if the logits are
    not finite."""
    reply = self.stream(ids, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
                        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
                        logit_bias=logit_bias, depth=depth, coupled=coupled, fixed_width=fixed_width, ignore_eos=ignore_eos, stop=stop)
    for _ in reply: pass
    return reply.reply

  def draft_block(self, ids: Sequence[int]) -> DraftBlock:
    """ids (n,) -> the greedy block that the draft proposes after them: its anchor is ids[-1], its context ids[:-1].
    Raises ValueError without a draft, and for ids as `logits`."""
    return DraftBlock(*self.engine.draft_block(ids))

  def self_test(self) -> int:
    """Greedy tokens compared with and without the draft, at most 32; 0 without a draft. Raises ArithmeticError where they
    differ. Forgets the conversation."""
    return self.engine.self_test()

def canonical(device: str) -> str:
  """tinygrad's own spelling: cuda:0 is CUDA."""
  kind, _, number = device.partition(":")
  return kind.upper() + (f":{number}" if number not in ("", "0") else "")

def demo_path() -> Path:
  """The folder of the checkpoint that ships with the package."""
  return Path(__file__).parent / "demo"

def load(path: str | Path | None = None, *, numerics: str = "w4a8", devices: Sequence[str] = ("CPU",), draft: str | Path = "auto",
         max_context: int | None = None, kv: str = "sharded", slots: int = 1, progress: Progress | None = None) -> Model:
  """Loads the checkpoint in folder `path` (none: the demonstration checkpoint), original or Hugging Face names.

  draft: "auto" takes the checkpoint's own DSpark stages if there are any, "none" decodes plainly, "ngram" looks up what
  followed before, and a folder is a smaller checkpoint with the same vocabulary that drafts token by token.
  numerics "w4a8" keeps weights and caches in their 4 and 8 bits and rounds activations as the official code does;
  "reference" computes in float32 with dequantised weights. Everything is checked before anything is allocated.
  devices: several of one kind share the work. Of the long part of the cache each then keeps its share, or with kv
  "replicated" all of it: faster at short contexts. slots: sequences that the cache has room for (Batch).
  `progress` is called with (stage, done, total) for the stages load, compile, prefill.
  Raises ConfigError, CheckpointError, TokenizerError, ValueError, each with one line that says what was wanted."""
  if numerics not in ("w4a8", "reference"): raise ValueError(f"load: numerics={numerics!r}, want 'w4a8' or 'reference'")
  if kv not in ("sharded", "replicated"): raise ValueError(f"load: kv={kv!r}, want 'sharded' or 'replicated'")
  devices = tuple(map(canonical, (devices,) if isinstance(devices, str) else devices))
  if not devices or len({d.split(":")[0] for d in devices}) > 1 or len(set(devices)) < len(devices):
    raise ValueError(f"load: devices={','.join(devices) or 'none'}, want different ones of one kind")
  folder = Path(path) if path is not None else demo_path()
  checkpoint = Checkpoint.open(folder)
  tokenizer = Tokenizer.from_file(folder) if (folder / "tokenizer.json").exists() else None
  if tokenizer and tokenizer.n_vocab > checkpoint.config.vocab_size:
    raise ValueError(f"{folder.name}: tokenizer.json has {tokenizer.n_vocab} ids, want at most vocab_size={checkpoint.config.vocab_size}. "
                     "It belongs to another checkpoint")
  encoding = Encoding.read(folder)
  silent: Progress = lambda stage, done, total: None
  return Model(Engine(checkpoint, devices, max_context, numerics == "w4a8", str(draft), progress or silent, kv, slots), tokenizer,
               encoding)
