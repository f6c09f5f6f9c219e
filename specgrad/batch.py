"""Continuous batching: replies that come and go share the steps of one engine.

One thread runs the engine, or on a CPU a thread for each part of its slots; any other may submit. Between two steps of a
part at most one chunk of one prompt is processed, so that a long prompt delays the others by no more than a chunk a step.
What a reply says does not depend on what else runs: rows of a step do not influence each other, and noise hangs on a
reply's own seed and position."""
import collections
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specgrad.engine import MAX_ROWS, ROWS, Block, Engine, Mask, Run, Sampling, Stats

class Full(Exception):
  """As many requests wait as may."""

class Closed(Exception):
  """No new requests are taken."""

@dataclass(eq=False)
class Job:
  """A request. Iterating yields its blocks as steps end and ends with it; stats.finish_reason then says why, "interrupted" after
  cancel()."""
  run: Run
  blocks: queue.SimpleQueue[Block | None] = field(default_factory=queue.SimpleQueue)
  filling: Iterator[None] | None = None                    # the rest of its prompt,
  left: int = 0                                            # at most so many rows
  cancelled: bool = False

  @property
  def stats(self) -> Stats: return self.run.stats

  def cancel(self) -> None:
    """Ends it before the next step. Can be called from any thread, and after it has ended."""
    self.cancelled = True

  def __iter__(self) -> Iterator[Block]:
    """Raises ArithmeticError where the logits are not finite."""
    while (block := self.blocks.get()) is not None: yield block
    if self.run.error: raise ArithmeticError(self.run.error)

class Batch:
  """Requests and the slots of an engine. `waiting` are in order of arrival; a job in a slot is being prefilled or stepped."""
  def __init__(self, engine: Engine, queue: int = 64, depth: int | None = None, coupled: bool = False):
    """queue: requests that may wait for a slot. depth, coupled: as in Engine.begin, for every reply."""
    self.engine, self.bound, self.depth, self.coupled = engine, queue, depth, coupled
    self.waiting: collections.deque[Job] = collections.deque()
    self.slots: dict[int, Job] = {}
    self.idle: list[int] = list(range(engine.slots))       # slots that are free, the longest idle first
    self.changed, self.closing = threading.Condition(), False
    self.turn = [False] * engine.parts                     # whose chunk was the last one: see fill
    self.failure: BaseException | None = None

  @property
  def active(self) -> int: return len(self.slots)

  def submit(self, ids: Sequence[int], max_tokens: int, sampling: Sampling, *, ignore_eos: bool = False, logprobs: int | None = None,
             mask: Mask | None = None) -> Job:
    """Raises ValueError as Engine.begin, Full, Closed."""
    job = Job(self.engine.begin(ids, max_tokens, sampling, Stats(), self.depth, self.coupled, None, ignore_eos, mask, logprobs))
    with self.changed:
      if self.closing: raise Closed("batch: it is closing and takes no requests")
      n = len(self.waiting)
      if n >= self.bound + len(self.idle): raise Full(f"batch: {n} requests wait, want at most {self.bound}")
      self.waiting.append(job)
      self.changed.notify_all()
    return job

  def close(self, cancel: bool = False) -> None:
    """Takes nothing new; what is there is finished, or cancelled. `run` returns after it. Can be called from any thread."""
    with self.changed:
      self.closing = True
      if cancel:
        for job in (*self.waiting, *self.slots.values()): job.cancel()
      self.changed.notify_all()

  def mine(self, part: int) -> list[Job]:
    """The jobs in slots of a part, the oldest first."""
    return [job for slot, job in list(self.slots.items()) if slot % self.engine.parts == part]

  def load(self, part: int) -> int:
    """Rows that its jobs may still ask for."""
    return sum(max(job.left, 0) + job.run.max_tokens - job.stats.tokens for job in self.mine(part))

  def run(self) -> None:
    """Works until close() and all is done; starts the threads of all parts but one. If the engine fails, every request ends with its
    error."""
    others = [threading.Thread(target=self.follow, args=(part,), name=f"engine {part}") for part in range(1, self.engine.parts)]
    try:
      for thread in others: thread.start()
      self.follow(0)
      for thread in others: thread.join()
    except BaseException as e:                             # Ctrl-C while it waits for them
      self.fail(e)
      raise
    if self.failure: raise self.failure

  def follow(self, part: int) -> None:
    """The thread of a part of the slots."""
    try:
      while True:
        with self.changed:
          self.changed.wait_for(lambda: self.mine(part) or self.waiting or self.closing)
          if self.closing and not self.waiting and not self.mine(part): return
        self.work(part)
    except BaseException as e: self.fail(e)

  def fail(self, error: BaseException) -> None:
    """Ends all requests, and with them all threads."""
    with self.changed:
      self.failure, self.closing = self.failure or error, True
      left = [*self.waiting, *self.slots.values()]
      self.waiting.clear()
      self.slots.clear()
      self.changed.notify_all()
    for job in left:
      job.run.error = job.run.error or f"engine: {type(error).__name__}: {error}"
      self.end(job, "error")

  def warm(self) -> None:
    """Captures the steps of every size, greedy and drawn, and the chunks of prompts, so that no request waits for that as long as
    its context is short. Before `run` and any request; forgets what the slots held."""
    n = self.engine.slots                                  # they come one by one and stay until all are there
    for temperature in (0.0, 1.0):
      jobs = [self.submit([self.engine.config.bos_token_id], (n + 1) * (self.engine.depth + 1), Sampling(temperature), ignore_eos=True)
              for _ in range(n)]
      self.finish()
      for job in jobs:
        for _ in job: pass
    for rows in ROWS:
      self.engine.reset()                                  # or else the rows would be reused
      ids = [self.engine.config.bos_token_id] * (min(rows, (self.engine.max_context or 0) - 2) + 1)
      for _ in range(self.engine.parts): self.submit(ids, 1, Sampling())
      self.finish()
    self.engine.reset()

  def finish(self) -> None:
    """All that is there, in the calling thread."""
    while self.waiting or self.slots:
      for part in range(self.engine.parts): self.work(part)

  def work(self, part: int = 0) -> None:
    """Ends what was cancelled while it waited or in this part of the slots, gives free slots away, then, of this part, a chunk of one
    prompt and a step of everything that has one."""
    with self.changed:
      for job in [j for j in self.waiting if j.cancelled]:
        self.waiting.remove(job)
        self.end(job, "interrupted")
      for job in [j for j in self.mine(part) if j.cancelled]: self.release(job, "interrupted")
      while self.waiting and self.idle: self.admit(self.waiting.popleft())
      jobs = self.mine(part)
    self.fill([j for j in jobs if j.filling], part)
    groups: dict[tuple[int, int], list[Job]] = {}          # steps of different size are apart: who drafts, and who does so no more
    for job in jobs:
      if job.filling or self.slots.get(job.run.slot) is not job: continue
      groups.setdefault((job.run.plan.depth, job.run.plan.width), []).append(job)
    for group in groups.values():
      for job, block in zip(group, self.engine.advance([j.run for j in group], part)):
        if block.ids: job.blocks.put(block)
        if job.stats.finish_reason:
          with self.changed: self.release(job, job.stats.finish_reason)

  def fill(self, jobs: Sequence[Job], part: int) -> None:
    """A chunk of one of these prompts: by turns of the oldest, and of the one with the least left, so that a short prompt does
    not wait for a long one, nor a long one for ever. jobs: the oldest first."""
    if not jobs: return
    self.turn[part] = not self.turn[part]
    job = jobs[0] if self.turn[part] else min(jobs, key=lambda j: j.left)
    job.left -= MAX_ROWS
    if (filling := job.filling) and next(filling, self) is self: job.filling = None

  def admit(self, job: Job) -> None:
    """Into a free slot: where a good deal of its prompt is; then where least is left to do; then where most of the prompt is; then the
    longest idle."""
    held = lambda slot: self.engine.slot[slot].reusable(job.run.ids)
    slot = max(self.idle, key=lambda slot: (held(slot) // 32, -self.load(slot % self.engine.parts), held(slot)))
    self.idle.remove(slot)
    self.slots[slot], job.left = job, len(job.run.ids) - held(slot)
    job.run.slot, job.filling = slot, self.engine.prefill(job.run, slot)
    self.changed.notify_all()

  def release(self, job: Job, reason: str) -> None:
    if self.slots.get(job.run.slot) is not job: return     # another part failed, and with it all
    del self.slots[job.run.slot]
    self.idle.append(job.run.slot)
    job.filling = None
    self.end(job, reason)
    self.changed.notify_all()

  def end(self, job: Job, reason: str) -> None:
    job.stats.finish_reason = reason
    job.blocks.put(None)
