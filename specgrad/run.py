"""The command `python -m specgrad.run`: flags, the chat in a terminal, errors in one line. Knows text, ids, no tensors.

stdout carries the model's text and nothing else; prompts, notes, statistics and progress go to stderr.
"""
from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import popen_spawn_posix
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from tqdm import tqdm

import specgrad
from specgrad.plan import report
from specgrad.prompt import THINK, THINK_END, check_tokens, encode_chat, split_reply

if TYPE_CHECKING:
  from specgrad.api import Model, Stream
  from specgrad.engine import Progress

HELP = """/new    starts over, with nothing of the chat kept
/quit   leaves, as Ctrl-D does
/help   shows this
Ctrl-C stops a reply; what was shown of it stays in the chat. A space before a slash makes the line a message."""
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

class Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    hint = " (a value that starts with a dash: -p='-x')" if "expected one argument" in message else ""
    raise ValueError(f"{message}{hint}. --help lists the flags")

def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  """Raises ValueError for flags it does not know and values that are none."""
  parser = Parser(prog="python -m specgrad.run", allow_abbrev=False, add_help=False,
                  description="Chat with a DeepSeek-V4-Flash checkpoint in the terminal.",
                  epilog="The reply goes to stdout, all else to stderr. DEBUG=1 shows where an error comes from.")
  what = parser.add_argument_group("what to run")
  what.add_argument("--model", metavar="DIR", help="folder of the checkpoint (default: the demonstration checkpoint)")
  what.add_argument("-p", "--prompt", metavar="TEXT", help="answer TEXT and leave; - reads it from stdin, as happens "
                    "without -p where something is piped in (default: a chat)")
  what.add_argument("--system", metavar="TEXT", help="system prompt (default: none)")
  what.add_argument("--think", action="store_true", help="let the model reason first, shown on stderr (default: off)")
  how = parser.add_argument_group("how tokens are chosen")
  how.add_argument("--temperature", type=float, default=0.0, metavar="F", help="0 is greedy (default: %(default)s)")
  how.add_argument("--top-p", type=float, default=1.0, metavar="F", help="smallest set of tokens with this probability "
                   "(default: %(default)s, all)")
  how.add_argument("--top-k", type=int, default=0, metavar="N", help="the N likeliest (default: %(default)s, all)")
  how.add_argument("--min-p", type=float, default=0.0, metavar="F", help="at least this part of the likeliest token's "
                   "probability (default: %(default)s, all)")
  how.add_argument("--seed", type=int, metavar="N", help="repeats a run with a temperature (default: drawn and shown)")
  fast = parser.add_argument_group("drafting: several tokens a step, the text stays the same")
  fast.add_argument("--draft", default="auto", metavar="KIND", help="auto: the checkpoint's own DSpark stages, if any; "
                    "none; ngram: what followed before; or the folder of a smaller checkpoint (default: %(default)s)")
  fast.add_argument("--depth", type=int, metavar="K", help="drafted tokens a step (default: the draft's block size, at "
                    "most 5; 2 on a CPU)")
  fast.add_argument("--coupled", action="store_true", help="with a temperature: keep the very tokens that the seed gives "
                    "without a draft (default: rejection sampling, which keeps their law)")
  fast.add_argument("--self-test", action="store_true", help="only compare 32 tokens with and without the draft, and leave")
  size = parser.add_argument_group("sizes and devices")
  size.add_argument("--numerics", choices=("w4a8", "reference"), default="w4a8", help="stored 4- and 8-bit formats, or "
                    "float32 throughout (default: %(default)s)")
  size.add_argument("--max-tokens", type=int, default=512, metavar="N", help="per reply (default: %(default)s)")
  size.add_argument("--max-context", type=int, metavar="N", help="tokens of prompt and reply (default: what the "
                    "checkpoint allows, at most 131072)")
  where = size.add_mutually_exclusive_group()
  where.add_argument("--gpus", type=int, metavar="N", help="run on N CUDA devices; only 1 for now")
  where.add_argument("--devices", metavar="A,B", help="tinygrad's names; only one for now (default: CPU)")
  plan = parser.add_argument_group("what would fit, from the files' headers alone")
  plan.add_argument("--plan", action="store_true", help="print memory and speed limits and leave; reads no weights, needs no device")
  plan.add_argument("--users", type=int, default=1, metavar="N", help="with --plan: sequences at once (default: %(default)s)")
  plan.add_argument("--gpu", default="RTX PRO 6000", metavar="NAME", help="with --plan: a known card, or a memory size such "
                    "as '96 GiB' (default: %(default)s)")
  plan.add_argument("--kv", choices=("sharded", "replicated"), default="sharded", help="with --plan: how two GPUs would hold "
                    "the cache (default: %(default)s)")
  http = parser.add_argument_group("serving the OpenAI API over HTTP (pip install -e '.[serve]')")
  http.add_argument("--serve", type=int, nargs="?", const=8000, metavar="PORT", help="answer requests until Ctrl-C (port: 8000; 0 for any "
                    "free one). Flags that choose tokens are not for it: each request has its own")
  http.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address to listen on (default: %(default)s, this machine only)")
  http.add_argument("--api-key", metavar="FILE", help="file with the key that clients must send (default: none needed)")
  http.add_argument("--slots", type=int, default=16, metavar="N", help="sequences at once (default: %(default)s)")
  parser.add_argument_group("other").add_argument("-h", "--help", action="help", help="show this and leave")
  return parser.parse_args(argv)

def one_device(args: argparse.Namespace) -> str:
  if args.gpus is None: names = ("CPU" if args.devices is None else args.devices).split(",")
  elif args.gpus >= 1: names = ["CUDA", *(f"CUDA:{i}" for i in range(1, args.gpus))]
  else: raise ValueError(f"--gpus={args.gpus}, want at least 1. Without the flag the CPU is used")
  if not all(names): raise ValueError(f"--devices={args.devices!r}, want a name such as CPU or CUDA")
  if len(names) > 1: raise ValueError(f"{','.join(names)}: several devices are not supported yet, want one")
  return names[0]

def one_prompt(args: argparse.Namespace) -> str | None:
  """The text to answer where there is just one; none means a chat. Raises ValueError where it is no text."""
  for flag, value in (("-p", args.prompt), ("--system", args.system)):
    if value is not None and any("\ud800" <= char <= "\udfff" for char in value):  # how Python keeps foreign bytes
      raise ValueError(f"{flag}: not UTF-8, want UTF-8 text")
  text, source = args.prompt, "-p"
  if args.prompt == "-" or (args.prompt is None and (sys.stdin is None or not sys.stdin.isatty())):
    source = "stdin"
    try: text = "" if sys.stdin is None else sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error: raise ValueError(f"stdin: byte {error.start} is not UTF-8, want text") from None
  if text == "": raise ValueError(f"{source}: empty, want a prompt")
  return text

def load(args: argparse.Namespace, device: str, progress: Progress) -> Model:
  folder = specgrad.demo_path() if args.model is None else Path(args.model)
  if any(folder.glob("*.safetensors")) and not (folder / "tokenizer.json").exists():
    raise ValueError(f"{folder}: no tokenizer.json, so there is no text to work with. Fetch that file from where the "
                     "checkpoint comes from, or use the Python API, which takes token ids")
  model = specgrad.load(folder, numerics=args.numerics, devices=(device,), draft=args.draft, max_context=args.max_context,
                        progress=progress)
  assert model.tokenizer is not None
  check_tokens(model.tokenizer, args.think)
  return model

class Screen:
  """Both outputs as the one terminal that they mostly are: knows which of them has a line that is not finished."""
  def __init__(self) -> None:
    self.open: TextIO | None = None
    self.color = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

  def write(self, text: str, stream: TextIO, dim: bool = False) -> None:
    """Control characters would let a model steer the terminal; a file gets them as they are."""
    if not text: return
    if self.open not in (None, stream): self.end_line()
    self.open = None if text.endswith("\n") else stream
    if stream.isatty(): text = text.translate(CONTROL)
    stream.write(f"\x1b[2m{text}\x1b[0m" if dim and self.color else text)
    stream.flush()

  def end_line(self) -> None:
    if self.open: self.write("\n", self.open)

  def note(self, text: str, dim: bool = False) -> None:
    self.end_line()
    self.write(text, sys.stderr, dim)
    self.end_line()

class Bars:
  """Progress of what lasts longer than a second, on a terminal only. A compilation reports its start and its end, so a
  thread keeps its clock going."""
  def __init__(self, screen: Screen) -> None:
    self.screen, self.stage, self.over = screen, "", threading.Event()
    self.bar: Any = None
    self.clock: threading.Thread | None = None

  def __call__(self, stage: str, done: int, total: int) -> None:
    if stage != self.stage: self.start(stage, done, total)
    elif stage != "compile": self.bar.update(done - self.bar.n)
    if done >= total: self.close()

  def start(self, stage: str, done: int, total: int) -> None:
    self.close()
    clock = "compiling, kept for later starts {elapsed}" if stage == "compile" else None
    self.stage, self.bar = stage, tqdm(
      desc=stage, total=total, initial=done, unit="B" if stage == "load" else " tokens", unit_scale=stage == "load",
      bar_format=clock, file=sys.stderr, delay=1, disable=None, leave=False, dynamic_ncols=True)
    if stage == "compile" and not self.bar.disable:
      self.over = threading.Event()
      self.clock = threading.Thread(target=self.tick, args=(self.bar, self.over), daemon=True)
      self.clock.start()

  def tick(self, bar: Any, over: threading.Event) -> None:
    if over.wait(1): return
    if self.screen.open and self.screen.open.isatty(): sys.stderr.write("\n")  # mid-reply: the bar gets its own line
    while not over.wait(0.25): bar.update(0)

  def close(self) -> None:
    self.over.set()
    if self.clock: self.clock.join()
    if self.bar is not None: self.bar.close()
    self.stage, self.bar, self.clock = "", None, None

class Chat:
  """One conversation. Its ids only grow, so that a turn computes what is new and nothing else; the texts are kept for
  thinking mode, where old reasoning leaves the prompt."""
  def __init__(self, args: argparse.Namespace, device: str, interactive: bool) -> None:
    self.args, self.device, self.interactive, self.screen = args, device, interactive, Screen()
    self.bars = Bars(self.screen)
    self.stream: Stream | None = None     # the reply that is growing
    self.stopping = self.reading = False
    try: self.model = load(args, device, self.progress)
    finally: self.bars.close()
    self.new()

  def new(self) -> None:
    self.ids: list[int] = []
    self.messages: list[dict[str, str]] = []
    if self.args.system is not None: self.messages.append({"role": "system", "content": self.args.system})
    self.seed = secrets.randbits(32) if self.args.seed is None else self.args.seed

  def banner(self) -> None:
    args, config = self.args, self.model.config
    name = Path(args.model).resolve().name if args.model is not None else "demo"
    self.screen.note(f"{name}: {config.num_hidden_layers} layers, {config.n_routed_experts} experts, vocabulary "
                     f"{config.vocab_size}; {self.device}, {args.numerics} numerics, context {self.model.max_context}")
    chosen = "greedy (temperature 0)" if args.temperature == 0 else (
      f"temperature {args.temperature:g}, top-p {args.top_p:g}, top-k {args.top_k}, min-p {args.min_p:g}, "
      f"seed {self.seed}")
    self.screen.note(f"{chosen}; at most {args.max_tokens} tokens a reply; thinking {'on' if args.think else 'off'}")
    self.screen.note(f"draft {args.draft if self.model.depth else 'none'}; verifier: "
                     + self.model.verifier(temperature=args.temperature, depth=args.depth, coupled=args.coupled))
    if self.interactive: self.screen.note("Ctrl-C stops a reply, Ctrl-D or /quit leaves, /help lists the commands")

  def self_test(self) -> int:
    """Before the first turn; its graphs are the ones that replies need. Raises ArithmeticError where the draft shows."""
    try: return self.model.self_test()
    finally: self.bars.close()

  # ------------------------------------------------------------------------------------------------ one turn
  def prompt(self, text: str) -> list[int]:
    tokenizer, user = self.model.tokenizer, {"role": "user", "content": text}
    assert tokenizer is not None
    if self.args.think or not self.ids: return encode_chat(tokenizer, [*self.messages, user], self.args.think)
    return self.ids + encode_chat(tokenizer, [user])[1:]  # without BOS

  def turn(self, text: str) -> None:
    """Answers text, and keeps both. Raises ValueError or ArithmeticError and keeps neither."""
    args, screen, ids = self.args, self.screen, self.prompt(text)
    later = self.messages[-1:] != [] and self.messages[-1]["role"] == "assistant"
    if len(ids) >= self.model.max_context:
      way_out = "/new starts over" if self.interactive and later else "shorten it or raise --max-context"
      raise ValueError(f"prompt of {len(ids)} tokens, context of {self.model.max_context}: no room for a reply, "
                       + way_out + (". The message was not sent" if self.interactive else ""))
    self.stream = stream = self.model.stream(
      ids, max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k,
      min_p=args.min_p, seed=self.seed, depth=args.depth, coupled=args.coupled)
    reply: list[int] = []
    seen, shown = "", ("", "")
    try:
      for new, piece in stream:
        reply, seen = reply + new, seen + piece
        shown = self.show(seen, shown, final=False)
    except KeyboardInterrupt:
      if not self.interactive: raise
      stream.stats.finish_reason = "interrupted"
    finally:
      self.stream, self.stopping = None, False
      self.bars.close()
      reasoning, content = self.show(seen, shown, final=True)
      screen.end_line()
    if not reply: return screen.note("(stopped before the first token: the message is not part of the chat)")
    eos = self.model.config.eos_token_id
    self.ids = ids + reply + ([] if reply[-1] == eos else [eos])
    self.messages += [{"role": "user", "content": text},
                      {"role": "assistant", "content": content, "reasoning_content": reasoning}]
    self.report(stream, later, content)

  def show(self, text: str, shown: tuple[str, str], final: bool) -> tuple[str, str]:
    """Writes what is new in (reasoning, content) of the reply so far, and returns what is then shown of both. What may
    be the beginning of a tag waits."""
    if not final and any(tag.startswith(text) for tag in (THINK, THINK_END)): return shown
    reasoning, content = split_reply(text, self.args.think)
    if not final and not content:
      held = next((n for n in range(len(THINK_END) - 1, 0, -1) if reasoning.endswith(THINK_END[:n])), 0)
      reasoning = reasoning[:len(reasoning) - held]
    self.screen.write(reasoning[len(shown[0]):], sys.stderr, dim=True)
    self.screen.write(content[len(shown[1]):], sys.stdout)
    return reasoning, content

  def report(self, stream: Stream, later: bool, content: str) -> None:
    stats, n = stream.stats, self.model.max_context
    end = "/new starts over" if self.interactive else "--max-context sets it"
    for reason, text in (("length", f"(cut at --max-tokens {self.args.max_tokens})"), ("interrupted", "(stopped)"),
                         ("context", f"(context of {n} full: {end})")):
      if stats.finish_reason == reason: self.screen.note(text)
    if not content: self.screen.note("(reasoning without an answer)" if self.args.think else "(a reply without text)")
    for warning in stats.warnings: self.screen.note(f"({warning})")
    reused = f", 0 of {stats.prompt_tokens} prompt tokens reused" if later and not stats.reused_tokens else ""
    self.screen.note(stats.line() + reused, dim=True)

  # ------------------------------------------------------------------------------------------------ the loop
  def progress(self, stage: str, done: int, total: int) -> None:
    self.bars(stage, done, total)
    if self.stopping: raise KeyboardInterrupt  # between two chunks, or before a compilation: nothing is half done

  def on_interrupt(self, *_: object) -> None:
    """The first Ctrl-C lets the running step end. A compilation may take minutes, so it is broken off, as is anything
    by a second Ctrl-C; the next turn only trusts rows of the cache that were finished."""
    if self.reading: raise KeyboardInterrupt
    if self.stream is None: return        # nothing to stop, and a turn that is over is to be kept
    if self.stopping or self.bars.stage == "compile":
      self.stream = None
      raise KeyboardInterrupt
    self.stopping = True
    self.stream.interrupt()

  def read(self) -> str:
    """One line from the terminal. input() edits it, but writes its prompt to stdout, so not where that is a file."""
    self.reading = True
    try:
      if sys.stdout.isatty(): return input("> ")
      self.screen.write("> ", sys.stderr)
      self.screen.open = None
      if line := sys.stdin.readline(): return line
      raise EOFError
    finally: self.reading = False

  def loop(self) -> None:
    with contextlib.suppress(ImportError):
      import readline  # only here: in other places it would write to the terminal
      if "libedit" not in (readline.__doc__ or ""): readline.parse_and_bind("set enable-bracketed-paste on")
    signal.signal(signal.SIGINT, self.on_interrupt)
    while True:
      try:
        line = self.read()
        command = line.rstrip() if line.startswith("/") else ""
        if command in ("/quit", "/exit"): return
        if command == "/help": self.screen.note(HELP)
        elif command == "/new":
          self.new()
          self.screen.note("(new chat" + (f", seed {self.seed})" if self.args.temperature > 0 else ")"))
        elif command: self.screen.note(f"(no command {command}: /help lists them)")
        elif line.strip(): self.turn(line.strip())
      except EOFError: return self.screen.note("\n")
      except KeyboardInterrupt: self.screen.note("\n(Ctrl-D or /quit leaves)")
      except UnicodeDecodeError: self.screen.note("(that line is not UTF-8: nothing was sent)")
      except (ValueError, ArithmeticError) as error: self.screen.note(error_line(error))

def run(argv: Sequence[str] | None) -> None:
  args = parse(argv)
  if args.plan:
    folder = specgrad.demo_path() if args.model is None else Path(args.model)
    return print(report(folder, args.gpus or 1, args.users, args.max_context, args.kv, args.gpu, args.depth))
  device = one_device(args)
  if args.max_tokens < 1: raise ValueError(f"--max-tokens={args.max_tokens}, want at least 1")
  text = None if args.self_test or args.serve is not None else one_prompt(args)
  specgrad.prepare()
  keep_interrupts()
  from specgrad.engine import Sampling  # brings tinygrad in, so not before prepare()
  Sampling(args.temperature, args.top_p, args.top_k, args.min_p, args.seed)  # refuses before a long load
  if args.serve is not None: return serve(args, device)
  chat = Chat(args, device, interactive=text is None)
  chat.banner()
  tested = chat.self_test()
  if args.self_test: chat.screen.note(f"self-test: {tested} tokens with and without the draft are equal" if tested else
                                      "self-test: nothing to compare, there is no draft")
  elif text is None: chat.loop()
  else: chat.turn(text)

def serve(args: argparse.Namespace, device: str) -> None:
  if args.prompt is not None or args.self_test: raise ValueError("--serve: answers requests, want no -p and no --self-test beside it")
  try:
    from specgrad.serve import command
  except ImportError as error: raise ValueError(f"--serve: {error.name} is not installed, want pip install -e '.[serve]'") from None
  bars = Bars(Screen())
  try: command(args, lambda: load(args, device, bars))
  finally: bars.close()

def keep_interrupts() -> None:
  """tinygrad compiles in processes that ignore Ctrl-C, but only once they run: one that is still starting would die of
  it with a trace on the terminal. So they start with the signal blocked, and Ctrl-C stays ours."""
  popen: Any = popen_spawn_posix.Popen
  launch = popen._launch

  def blocked(self: Any, process: Any) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try: launch(self, process)
    finally: signal.pthread_sigmask(signal.SIG_SETMASK, before)
  popen._launch = blocked

def error_line(error: BaseException) -> str:
  text = str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)
  return f"specgrad: error: {' '.join(text.split())}".translate(CONTROL)

def main(argv: Sequence[str] | None = None) -> int:
  for name in ("stdout", "stderr"):  # none where the shell closed it
    if getattr(sys, name) is None: setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open to the end
    getattr(sys, name).reconfigure(errors="replace")
  code, line = 0, ""
  try: run(argv)
  except KeyboardInterrupt: code, line = 130, "specgrad: interrupted"
  except BrokenPipeError: code = 141  # as the shell has it for a program that SIGPIPE ended
  except (ValueError, ArithmeticError, MemoryError, OSError) as error:
    if os.environ.get("DEBUG", "0") not in ("", "0"): traceback.print_exc()
    code, line = 2, error_line(error)
  finally:
    with contextlib.suppress(OSError): print(line, end="\n" if line else "", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):  # Python flushes both at exit, and would show a trace if nobody reads them
      try: stream.flush()
      except OSError: os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
  return code

if __name__ == "__main__": sys.exit(main())
