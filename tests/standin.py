"""Stands in for specgrad/batch.py until that is there: its interface over the engine's single sequence, one after the other.

Import it before specgrad.serve. To be deleted with the line that imports it once the batch is there."""
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from specgrad.engine import Engine, Sampling, Stats

class Full(Exception): pass

@dataclass
class TokenLogprobs:
  logprob: float
  top: list[tuple[int, float]]

@dataclass
class Block:
  ids: list[int]
  logprobs: list[TokenLogprobs] | None = None

class Mask(Protocol):
  def rows(self, drafted: list[int]) -> np.ndarray: ...
  def advance(self, ids: list[int]) -> None: ...

class Job:
  def __init__(self, run: Any) -> None:
    self.stats, self.run, self.cancelled = Stats(), run, threading.Event()
    self.blocks: queue.Queue[Block | BaseException | None] = queue.Queue()

  def __iter__(self) -> Iterator[Block]:
    while (block := self.blocks.get()) is not None:
      if isinstance(block, BaseException): raise block
      yield block

  def cancel(self) -> None: self.cancelled.set()

class Batch:
  def __init__(self, engine: Engine, slots: int, queue: int = 64) -> None:
    self.engine, self.slots, self.limit = engine, slots, queue
    self.jobs: list[Job] = []
    self.some, self.closing, self.active = threading.Condition(), False, 0

  @property
  def waiting(self) -> int: return len(self.jobs)

  def submit(self, ids: Sequence[int], max_tokens: int, sampling: Sampling, *, ignore_eos: bool = False, logprobs: int | None = None,
             mask: Mask | None = None) -> Job:
    ids = self.engine.check(ids, 1)
    job = Job(None)
    job.run = lambda: self.generate(job, ids, max_tokens, sampling, ignore_eos, logprobs, mask)
    with self.some:
      if self.closing or len(self.jobs) >= self.limit + (self.active == 0): raise Full
      self.jobs.append(job)
      self.some.notify()
    return job

  def run(self) -> None:
    while True:
      with self.some:
        self.some.wait_for(lambda: self.jobs or self.closing)
        if not self.jobs: return
        job = self.jobs.pop(0)
        self.active = 1
      try:
        if job.cancelled.is_set(): job.stats.finish_reason = "interrupted"
        else: job.run()
      except ArithmeticError as error: job.blocks.put(error)
      finally: self.active = 0
      job.blocks.put(None)

  def close(self, cancel: bool = False) -> None:
    with self.some:
      self.closing = True
      for job in self.jobs if cancel else []: job.cancel()
      self.some.notify()

  def generate(self, job: Job, ids: list[int], max_tokens: int, sampling: Sampling, ignore_eos: bool, logprobs: int | None,
               mask: Mask | None) -> None:
    if mask is None and logprobs is None:
      for block in self.engine.generate(ids, max_tokens, sampling, job.stats, ignore_eos=ignore_eos):
        job.blocks.put(Block(block))
        if job.cancelled.is_set() and not job.stats.finish_reason: job.stats.finish_reason = "interrupted"
      return
    said: list[int] = []                                   # slow, and greedy: one token a pass over everything
    stats = job.stats
    stats.prompt_tokens = len(ids)
    while not stats.finish_reason:
      row = self.engine.logits([*ids, *said])[-1].astype(np.float64)
      if mask: row[~mask.rows([])[0]] = -np.inf
      top = row - row.max() - np.log(np.exp(row - row.max()).sum())
      said.append(int(row.argmax()))
      if mask: mask.advance(said[-1:])
      best = [(int(i), float(top[i])) for i in np.argsort(-top)[:logprobs or 0]]
      if said[-1] == self.engine.config.eos_token_id and not ignore_eos: stats.finish_reason = "stop"
      elif len(said) == max_tokens: stats.finish_reason = "length"
      elif len(said) + len(ids) == self.engine.max_context: stats.finish_reason = "context"
      elif job.cancelled.is_set(): stats.finish_reason = "interrupted"
      stats.tokens = len(said)
      job.blocks.put(Block(said[-1:], None if logprobs is None else [TokenLogprobs(float(top[said[-1]]), best)]))

module: Any = ModuleType("specgrad.batch")
for thing in (Full, TokenLogprobs, Block, Mask, Job, Batch): setattr(module, thing.__name__, thing)
sys.modules.setdefault("specgrad.batch", module)
