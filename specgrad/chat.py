"""A conversation with a model: turns and what they cost, the commands of the chat, what is shown of a reply. Knows text
and ids, no tensors; run.py loads the model and says what it is called."""
from __future__ import annotations

import bisect
import contextlib
import os
import secrets
import signal
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specgrad import session
from specgrad.prompt import encode_chat
from specgrad.reply import Event, ReplyParser
from specgrad.terminal import LARGEST, Bars, Keyboard, Screen, error_line

if TYPE_CHECKING:
  from specgrad.api import Model, Stream
  from specgrad.engine import Stats, TokenLogprobs

COMMANDS = {  # usage: what it does
  "/new": "starts over, with nothing of the chat kept",
  "/undo": "takes back the last exchange, or a file that waits to be sent",
  "/regen": "answers the last message once more, with another seed",
  "/drop [N]": "leaves out the N oldest exchanges (1), to make room",
  "/system [TEXT]": "shows or sets the system prompt; - for none",
  "/think [EFFORT]": "shows or sets how much the model reasons first: off, low, high, max",
  "/set [NAME VALUE]": "shows or sets temperature, top_p, top_k, min_p, seed, max_tokens, penalties",
  "/draft [on|off|N]": "shows or sets how many tokens are drafted a step",
  "/read FILE": "sends a text file along with the next message",
  "/save NAME": "keeps the chat and what the model has computed of it",
  "/load NAME": "goes on with a chat that was kept",
  "/stats": "shows what the chat holds and took",
  "/help": "shows this",
  "/quit": "leaves, as Ctrl-D does"}
USAGE = {usage.split()[0]: usage for usage in COMMANDS} | {"/exit": "/quit"}
NOTES = '''Ctrl-C stops a reply; what was shown of it stays in the chat. Alt-Enter, or """ before and after, makes a message of several
lines; a paste is one message. A space before a slash makes the line a message.'''
EFFORTS = ("off", "low", "high", "max")

def encode(model: Model, messages: Sequence[Mapping[str, Any]], effort: str) -> list[int]:
  """The prompt's ids. Raises ValueError for an effort that this checkpoint can't be asked for."""
  assert model.tokenizer is not None
  return encode_chat(model.tokenizer, messages, effort=effort, encoding=model.encoding)

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)
NUMBERS: dict[str, type] = {name: int if name in ("top_k", "seed", "max_tokens") else float for name in (*SAMPLING, "seed", "max_tokens")}

@dataclass(frozen=True)
class Settings:
  """What a user can change between two replies. seed: none, one is drawn. depth: none, the draft's own. Raises ValueError."""
  temperature: float = 0.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  seed: int | None = None
  max_tokens: int = 512
  effort: str = "off"
  system: str | None = None
  depth: int | None = None
  coupled: bool = False

  def __post_init__(self) -> None:
    from specgrad.engine import Sampling  # brings tinygrad in, which takes a second
    if self.max_tokens < 1: raise ValueError(f"sampling: max_tokens={self.max_tokens}, want at least 1")
    if self.effort not in EFFORTS: raise ValueError(f"effort={self.effort}, want one of {', '.join(EFFORTS)}")
    Sampling(**self.sampling, seed=self.seed)

  @property
  def sampling(self) -> dict[str, Any]: return {name: getattr(self, name) for name in SAMPLING}

  def line(self, seed: int) -> str:
    chosen = "greedy (temperature 0)" if self.temperature == 0 else (
      f"temperature {self.temperature:g}, top-p {self.top_p:g}, top-k {self.top_k}, min-p {self.min_p:g}, seed {seed}")
    penalties = "".join(f", {name.replace('_', ' ')} {getattr(self, name):g}" for name, none in PENALTIES.items()
                        if getattr(self, name) != none)
    return f"{chosen}{penalties}; at most {self.max_tokens} tokens a reply; thinking {self.effort}"

@dataclass
class Turn:
  """A message and its reply. ids: what both added to a prompt without thinking; none: to be encoded when needed."""
  user: str
  content: str
  reasoning: str = ""
  ids: list[int] = field(default_factory=list)

@dataclass
class Reply:
  """What a turn gave: its ids, EOS included, the text in both parts, and logprobs of each id if they were asked for."""
  ids: list[int]
  reasoning: str
  content: str
  stats: Stats
  logprobs: list[TokenLogprobs] | None

  def as_dict(self, model: str, seed: int, settings: Settings) -> dict[str, Any]:
    """For --json; nothing in it is made fit for a terminal."""
    stats = self.stats
    entry = lambda token, logprob: {"id": token, "logprob": logprob}
    logprobs = [entry(token, x.logprob) | {"top": [entry(*pair) for pair in x.top]} for token, x in zip(self.ids, self.logprobs or [])]
    rates = {name: getattr(stats, name) for name in ("tok_s", "steps_s", "tpot", "tokens_per_step", "acceptance_rate")}
    return {"model": model, "text": self.content, "reasoning": self.reasoning, "ids": self.ids,
            **({} if self.logprobs is None else {"logprobs": logprobs}), "finish_reason": stats.finish_reason,
            "settings": asdict(settings) | {"seed": seed}, "statistics": asdict(stats) | rates}

class Chat:
  """One conversation. A turn's ids are those of the turns before it and its own, so that it computes what is new and nothing
  else; only in thinking mode, where old reasoning leaves the prompt, the texts are encoded each time."""
  def __init__(self, model: Model, settings: Settings, screen: Screen, bars: Bars, *, name: str = "", device: str = "CPU",
               draft: str = "auto", interactive: bool = True, silent: bool = False, logprobs: int | None = None) -> None:
    """silent: nothing of a reply is shown as it comes. logprobs: how many alternatives replies have for each id, none: not even its own
    log probability."""
    self.model, self.settings, self.screen, self.bars, self.interactive, self.silent = model, settings, screen, bars, interactive, silent
    self.logprobs = logprobs
    self.name, self.device, self.draft = name, device, draft if model.depth else "none"
    self.keyboard: Keyboard | None = None
    self.stream: Stream | None = None     # the reply that is growing
    self.over = False
    self.replies: list[Stats] = []
    self.new()

  def new(self) -> None:
    self.turns: list[Turn] = []
    self.files: list[tuple[str, str]] = []                 # (path, text) that the next message brings
    self.seed = secrets.randbits(32) if self.settings.seed is None else self.settings.seed

  # ------------------------------------------------------------------------------------------------ what it is
  def verifier(self, settings: Settings | None = None) -> str:
    s = settings or self.settings
    return self.model.verifier(temperature=s.temperature, depth=s.depth, coupled=s.coupled)

  def check(self, settings: Settings) -> None:
    """Raises ValueError for what this model can't do."""
    encode(self.model, [{"role": "user", "content": ""}], settings.effort)
    self.verifier(settings)

  def banner(self) -> None:
    config = self.model.config
    self.screen.note(f"{self.name}: {config.num_hidden_layers} layers, {config.n_routed_experts} experts, vocabulary "
                     f"{config.vocab_size}; {self.device}, {self.model.numerics} numerics, context {self.model.max_context}, "
                     f"KV {size(self.model.engine.kv_bytes)}")
    self.screen.note(self.settings.line(self.seed))
    self.screen.note(f"draft {self.draft}; verifier: {self.verifier()}")
    if self.interactive: self.screen.note("Ctrl-C stops a reply, Ctrl-D or /quit leaves, /help lists the commands")

  # ------------------------------------------------------------------------------------------------ prompts
  def prompt(self, turns: Sequence[Turn], text: str | None = None) -> list[int]:
    """The ids of the turns, and of a message after them that opens a reply."""
    system, effort = self.settings.system, self.settings.effort
    start = [] if system is None else [{"role": "system", "content": system}]
    user = [] if text is None else [{"role": "user", "content": text}]
    if effort != "off": return encode(self.model, start + [m for turn in turns for m in messages(turn)] + user, effort)
    ids = encode(self.model, start or [{"role": "user", "content": ""}], "off")
    if not start: ids = ids[:1]                            # BOS, which stands before all
    for turn in turns:
      if not turn.ids: turn.ids = encode(self.model, messages(turn), "off")[1:]
      ids += turn.ids
    return ids + (encode(self.model, user, "off")[1:] if user else [])

  def room(self, text: str, ids: Sequence[int]) -> None:
    """Raises ValueError, with both sizes and the choices, where no reply fits behind ids."""
    limit = self.model.max_context
    if len(ids) < limit: return
    choice = "shorten it or raise --max-context"
    if self.interactive and self.turns:
      n = bisect.bisect_left(range(len(self.turns) + 1), True, key=lambda n: len(self.prompt(self.turns[n:], text)) < limit)
      if n <= len(self.turns): choice = f"/drop {n} leaves out the oldest, /undo the last exchange, /new all of them"
    sent = ". The message was not sent" if self.interactive else ""
    raise ValueError(f"prompt of {len(ids)} tokens, context of {limit}: no room for a reply, {choice}{sent}")

  # ------------------------------------------------------------------------------------------------ one turn
  def turn(self, text: str) -> Reply | None:
    """Answers text and what was read before it, and keeps all; none where it was stopped before the first token. Raises
    ValueError or ArithmeticError and keeps nothing."""
    s, screen = self.settings, self.screen
    text = "\n\n".join([*(content for _, content in self.files), *([text] if text else [])])
    ids = self.prompt(self.turns, text)
    self.room(text, ids)
    before = len(self.prompt(self.turns)) if s.effort == "off" else 0
    self.stream = stream = self.model.stream(ids, max_tokens=s.max_tokens, seed=self.seed, depth=s.depth, coupled=s.coupled,
                                             logprobs=self.logprobs, **s.sampling)
    reply: list[int] = []
    parser, shown = ReplyParser(s.effort != "off", tools=False), set[str]()
    try:
      if self.bars.stopping: raise KeyboardInterrupt
      for new, piece in stream:
        reply += new
        self.show(parser.push(piece), shown)
    except KeyboardInterrupt:
      if not self.interactive: raise
      stream.stats.finish_reason = "interrupted"
    finally:
      self.stream = None
      self.bars.close()
      said = parser.finish()
      self.show(said.events, shown)
      screen.end_line()
    if not reply:
      screen.note("(stopped before the first token: the message is not part of the chat)")
      return None
    eos, later = self.model.config.eos_token_id, bool(self.turns)
    own = [] if s.effort != "off" else ids[before:] + reply + ([] if reply[-1] == eos else [eos])
    self.turns.append(Turn(text, said.content, said.reasoning, own))
    self.files = []
    self.replies.append(stream.stats)
    self.report(stream.stats, later, said.content)
    return Reply(reply, said.reasoning, said.content, stream.stats, None if self.logprobs is None else stream.logprobs)

  def show(self, events: Sequence[Event], shown: set[str]) -> None:
    """Writes what is new of a reply. shown: the parts of it that have begun."""
    for part, text in () if self.silent else events:
      if part not in shown and (shown or part == "reasoning"):
        self.screen.note("(thinking)" if part == "reasoning" else "(answer)", dim=True)
      shown.add(part)
      self.screen.write(text, sys.stderr if part == "reasoning" else sys.stdout, dim=part == "reasoning")

  def report(self, stats: Stats, later: bool, content: str) -> None:
    n = self.model.max_context
    end = "/drop leaves out the oldest exchange, /undo the last, /new all of them" if self.interactive else "--max-context sets it"
    cut = "/set max_tokens N" if self.interactive else "--max-tokens N"
    for reason, text in (("length", f"(cut after {self.settings.max_tokens} tokens: {cut} allows more)"), ("interrupted", "(stopped)"),
                         ("context", f"(context of {n} full after {stats.prompt_tokens} + {stats.tokens} tokens: {end})")):
      if stats.finish_reason == reason: self.screen.note(text)
    if not content: self.screen.note("(reasoning without an answer)" if self.settings.effort != "off" else "(a reply without text)")
    for warning in stats.warnings: self.screen.note(f"({warning})")
    reused = f", 0 of {stats.prompt_tokens} prompt tokens reused" if later and not stats.reused_tokens else ""
    self.screen.note(f"{stats.line()}{reused}, context {stats.prompt_tokens + stats.tokens} of {n}", dim=True)

  # ------------------------------------------------------------------------------------------------ commands
  def command(self, line: str) -> None:
    """Raises ValueError where it can't be done; then nothing is changed."""
    name, _, rest = line.strip().partition(" ")
    rest, usage = rest.strip(), USAGE.get(name)
    if usage is None: return self.screen.note(f"(no command {name}: /help lists them; with a space before it, it is a message)")
    name = usage.split()[0]
    if (rest and " " not in usage) or (not rest and " " in usage and "[" not in usage):
      raise ValueError(f"{line.strip()[:40]}: want {usage}, which {COMMANDS[usage]}")
    getattr(self, "do_" + name[1:])(rest)

  def complete(self, before: str) -> list[str]:
    """What the next word of a line can be, given the words before it."""
    follow = {"": list(USAGE), "/set": [*NUMBERS], "/think": [*EFFORTS], "/draft": ["on", "off"], "/load": session.names(),
              "/save": session.names()}
    return [f"{word} " for word in follow.get(before.strip(), [])]

  def do_quit(self, _: str) -> None: self.over = True

  def do_help(self, _: str) -> None:
    width = max(map(len, COMMANDS))
    self.screen.note("\n".join(f"{usage:{width}}  {what}" for usage, what in COMMANDS.items()) + "\n" + NOTES)

  def do_new(self, _: str) -> None:
    self.new()
    self.screen.note("(new chat" + (f", seed {self.seed})" if self.settings.temperature > 0 else ")"))

  def do_undo(self, _: str) -> None:
    if self.files: what = f"{self.files.pop()[0]} is not sent"
    elif self.turns: what = f"taken back: {short(self.turns.pop().user)}"
    else: raise ValueError("/undo: the chat is empty, nothing to take back")
    self.screen.note(f"({what}; {self.holds()})")

  def do_drop(self, rest: str) -> None:
    n, most = whole("/drop", rest or "1", "a number"), len(self.turns)
    if not most: raise ValueError("/drop: the chat is empty, nothing to leave out")
    if not 1 <= n <= most: raise ValueError(f"/drop {n}: the chat has {most} exchanges, want 1 to {most}")
    del self.turns[:n]
    self.screen.note(f"({n} oldest left out: {self.holds()}, which the next turn computes anew)")

  def do_regen(self, _: str) -> None:
    if not self.turns: raise ValueError("/regen: the chat is empty, nothing to answer again")
    last, files, kept = self.turns.pop(), self.files, None
    if self.settings.temperature > 0:
      self.seed = secrets.randbits(32)
      self.screen.note(f"(seed {self.seed})")
    else: self.screen.note("(at temperature 0 the reply is the same: /set temperature 1 varies it)")
    self.files = []
    try: kept = self.turn(last.user)
    finally:
      if not kept: self.turns.append(last)                 # the old reply stays
      self.files = files

  def do_system(self, rest: str) -> None:
    if rest: self.settings = replace(self.settings, system=None if rest == "-" else rest)
    system = self.settings.system
    self.screen.note("(no system prompt)" if system is None else f"(system prompt: {system})")

  def do_think(self, rest: str) -> None:
    if rest:
      settings = replace(self.settings, effort=rest)
      self.check(settings)
      self.settings = settings
    self.screen.note(f"(thinking {self.settings.effort})")

  def do_set(self, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if name:
      if name not in NUMBERS or not value.strip():
        raise ValueError(f"/set {short(rest)}: want a name and a value. Names: {', '.join(NUMBERS)}")
      try: number = NUMBERS[name](value)
      except ValueError: raise ValueError(f"/set {name}: {short(value)} is no {'whole ' * (NUMBERS[name] is int)}number") from None
      self.settings = replace(self.settings, **{name: number})
      if name == "seed": self.seed = number
    self.screen.note(f"({self.settings.line(self.seed)})")

  def do_draft(self, rest: str) -> None:
    if rest:
      if not self.model.depth and rest != "off": raise ValueError(f"/draft {rest}: there is no draft. --draft names one at the start")
      depth = None if rest == "on" else 0 if rest == "off" else whole("/draft", rest, "on, off or a number")
      settings = replace(self.settings, depth=depth)
      self.check(settings)
      self.settings = settings
    depth = self.model.depth if self.settings.depth is None else self.settings.depth
    self.screen.note(f"(draft {self.draft}, {depth} tokens a step; verifier: {self.verifier()})")

  def do_read(self, rest: str) -> None:
    text = read_text(rest)
    assert self.model.tokenizer is not None
    tokens = len(self.model.tokenizer.encode(text))
    if tokens >= self.model.max_context:
      raise ValueError(f"{rest}: {tokens} tokens, context of {self.model.max_context}: it does not fit, not even alone")
    self.files.append((rest, text))
    self.screen.note(f"({rest}: {len(text.encode())} bytes, {tokens} tokens, goes with the next message; /undo takes it back)")

  def do_stats(self, _: str) -> None:
    done = self.replies
    tokens, seconds, steps = (sum(getattr(stats, name) for stats in done) for name in ("tokens", "seconds", "steps"))
    drafted, accepted = (sum(sum(getattr(stats, name)) for stats in done) for name in ("drafted", "accepted"))
    later = tokens - sum(stats.first_step for stats in done)
    self.screen.note(f"{self.holds()}, {len(self.files)} files waiting; KV {size(self.model.engine.kv_bytes)}")
    self.screen.note(f"{self.settings.line(self.seed)}\ndraft {self.draft}; verifier: {self.verifier()}")
    self.screen.note(f"since the start: {len(done)} replies, {tokens} tokens, {later / seconds if seconds else 0:.1f} tok/s, "
                     f"{(accepted + steps) / steps if steps else 0:.2f} tokens/step, {accepted} of {drafted} drafted tokens accepted")
    if done: self.screen.note(f"last reply: {done[-1].line()}")

  def holds(self) -> str:
    tokens = len(self.prompt(self.turns)) if self.turns else 0
    return f"{len(self.turns)} exchange{'s' * (len(self.turns) != 1)}, {tokens} of {self.model.max_context} tokens"

  # ------------------------------------------------------------------------------------------------ saved chats
  def kind(self) -> dict[str, Any]:
    """What the bytes of the caches depend on, apart from the checkpoint."""
    return {"numerics": self.model.numerics, "context": self.model.max_context, "draft": self.draft, "device": self.device}

  def do_save(self, rest: str) -> None:
    state = self.model.engine.snapshot(self.prompt(self.turns)) if self.turns else {}
    chat = {"turns": [asdict(turn) for turn in self.turns], "settings": asdict(self.settings), "seed": self.seed, "kind": self.kind()}
    with one_line(rest): written = session.save(rest, session.Saved(session.identity(self.model.engine.checkpoint), chat, state))
    self.screen.note(f"(saved {rest}: {self.holds()}, {size(written)} in {session.folder()})")

  def do_load(self, rest: str) -> None:
    with one_line(rest): saved = session.load(rest)
    mine = session.identity(self.model.engine.checkpoint)
    if saved.model != mine: raise ValueError(f"{rest}: checkpoint={saved.model[:12]}, want {mine[:12]}. It is the chat of another model")
    try:
      turns, settings = [self.turn_of(**turn) for turn in saved.chat["turns"]], settings_of(saved.chat["settings"])
      seed, kind, notes = saved.chat["seed"], dict(saved.chat["kind"]), list[str]()
      settings_of(asdict(settings) | {"seed": seed + 0})
    except (KeyError, TypeError, AttributeError) as error: raise ValueError(f"{rest}: no chat of this version ({error!r})") from None
    try: self.verifier(settings)
    except ValueError: settings, notes = replace(settings, depth=None), [f"a draft depth of {settings.depth} is not possible here"]
    self.check(settings)
    try:
      if other := [f"{name} {kind.get(name)}, here {value}" for name, value in self.kind().items() if kind.get(name) != value]:
        raise ValueError("saved with " + ", ".join(other))
      if turns and not saved.state: raise ValueError("saved as text alone")
      if turns: self.model.engine.restore(saved.state)
      else: self.model.reset()
    except ValueError as error:
      self.model.reset()
      notes.append(f"{error}: the next turn computes all of it anew")
    self.settings, self.turns, self.files, self.seed = settings, turns, [], seed
    self.screen.note(f"({'; '.join([f'loaded {rest}: {self.holds()}', *notes])})\n({settings.line(seed)})"
                     + (f"\n(the last message was: {short(turns[-1].user)})" if turns else ""))

  def turn_of(self, user: Any, content: Any, reasoning: Any, ids: Any) -> Turn:
    """Raises TypeError for values that no turn has."""
    V = self.model.config.vocab_size
    if not all(isinstance(text, str) for text in (user, content, reasoning)): raise TypeError("a text is none")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < V for i in ids): raise TypeError("ids are none")
    return Turn(user, content, reasoning, ids)

  # ------------------------------------------------------------------------------------------------ the loop
  def on_interrupt(self, *_: object) -> None:
    """The first Ctrl-C lets the running step end. A compilation may take minutes, so it is broken off, as is anything
    by a second Ctrl-C; the next turn only trusts rows of the cache that were finished."""
    if self.keyboard and self.keyboard.reading: raise KeyboardInterrupt
    if self.stream and (self.bars.stopping or self.bars.stage == "compile"):
      self.stream = None                  # a turn that is over is to be kept: a third one has nothing to stop
      raise KeyboardInterrupt
    self.bars.stopping = True
    if self.stream: self.stream.interrupt()

  def loop(self) -> None:
    """Until /quit or Ctrl-D. What goes wrong is one line, and the chat goes on."""
    self.keyboard = Keyboard(self.screen, USAGE, self.complete)
    signal.signal(signal.SIGINT, self.on_interrupt)
    while not self.over:
      try:
        self.bars.stopping = False
        text, short_line = self.keyboard.read()
        if short_line and text.startswith("/"): self.command(text)
        elif text.strip(): self.turn(text.strip() if short_line else text.strip("\n"))
      except EOFError: return self.screen.note("\n")
      except KeyboardInterrupt: self.screen.note("\n(Ctrl-D or /quit leaves)")
      except UnicodeDecodeError: self.screen.note("(that line is not UTF-8: nothing was sent)")
      except (ValueError, ArithmeticError, MemoryError) as error: self.screen.note(error_line(error))

def messages(turn: Turn) -> list[dict[str, str]]:
  return [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.content, "reasoning_content": turn.reasoning}]

def settings_of(found: Mapping[str, Any]) -> Settings:
  """Raises TypeError or ValueError for values that no setting has."""
  settings = Settings(**found)
  kinds: dict[str, tuple[type, ...]] = {name: (int, kind) for name, kind in NUMBERS.items()}
  kinds |= {"seed": (int, type(None)), "depth": (int, type(None)), "system": (str, type(None)), "coupled": (bool,)}
  for name, kind in kinds.items():
    if type(value := getattr(settings, name)) not in kind: raise TypeError(f"{name}={value!r}")
  return settings

def read_text(path: str) -> str:
  """What a text file says. Raises ValueError, one line, for anything else; a device is not even opened."""
  full = os.path.expanduser(path)
  with one_line(path):
    info = os.stat(full)
    if not stat.S_ISREG(info.st_mode): raise ValueError(f"{path}: not a file, want a text file")
    if info.st_size > LARGEST: raise ValueError(f"{path}: {info.st_size} bytes, want at most {LARGEST}")
    with open(full, "rb") as file: data = file.read(LARGEST + 1)
  if not data: raise ValueError(f"{path}: empty, want a text file")
  if len(data) > LARGEST: raise ValueError(f"{path}: more than {LARGEST} bytes")
  if (at := data.find(0)) >= 0: raise ValueError(f"{path}: byte {at} is 0, want a text file")
  try: return data.decode()
  except UnicodeDecodeError as error: raise ValueError(f"{path}: byte {error.start} is not UTF-8, want a text file") from None

@contextlib.contextmanager
def one_line(name: str) -> Iterator[None]:
  """Errors of the system about a file as ValueError, without its long name."""
  try: yield
  except OSError as error: raise ValueError(f"{name}: {error.strerror or error}") from None

def whole(where: str, text: str, want: str) -> int:
  try: return int(text)
  except ValueError: raise ValueError(f"{where} {short(text)}: want {want}") from None

def short(text: str) -> str:
  line = " ".join(text.split())
  return line if len(line) <= 60 else line[:57] + "..."

def size(n: int) -> str: return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
