"""The command `python -m specgrad.run`: flags, one question or a chat (chat.py), errors in one line. Knows no tensors."""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import popen_spawn_posix
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import specgrad
from specgrad.chat import EFFORTS, NUMBERS, Chat, Settings
from specgrad.encoding import Encoding
from specgrad.plan import report
from specgrad.prompt import check_tokens
from specgrad.terminal import Bars, Screen, error_line

if TYPE_CHECKING:
  from specgrad.api import Model
  from specgrad.engine import Progress

NOT_SERVED = {"-p": "prompt", "--self-test": "self_test", "--system": "system", "--think": "think", "--json": "json",
              "--logprobs": "logprobs"} | {f"--{name.replace('_', '-')}": name for name in NUMBERS}

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
  what.add_argument("--think", nargs="?", const="low", default="off", choices=EFFORTS, metavar="EFFORT", help="let the model reason "
                    "first, shown on stderr: low, high or max (default: off; without a value: %(const)s)")
  what.add_argument("--json", action="store_true", help="with one prompt: ids, text, reasoning, finish reason, settings and statistics "
                    "of the reply as one JSON object on stdout")
  what.add_argument("--logprobs", type=int, nargs="?", const=0, metavar="N", help="with --json: the log probability of each id, and the N "
                    "likeliest (default: none; without a value: %(const)s)")
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
  where.add_argument("--gpus", type=int, metavar="N", help="share the work among N CUDA devices")
  where.add_argument("--devices", metavar="A,B", help="the same by tinygrad's names, such as NV,NV:1 (default: CPU)")
  size.add_argument("--kv", choices=("sharded", "replicated"), default="sharded", help="whether each of several devices keeps its share of "
                    "the cache, or all of it (default: %(default)s)")
  plan = parser.add_argument_group("what would fit, from the files' headers alone")
  plan.add_argument("--plan", action="store_true", help="print memory and speed limits and leave; reads no weights, needs no device")
  plan.add_argument("--users", type=int, default=1, metavar="N", help="with --plan: sequences at once (default: %(default)s)")
  plan.add_argument("--gpu", default="RTX PRO 6000", metavar="NAME", help="with --plan: a known card, or a memory size such "
                    "as '96 GiB' (default: %(default)s)")
  http = parser.add_argument_group("serving the OpenAI API over HTTP (pip install -e '.[serve]')")
  http.add_argument("--serve", type=int, nargs="?", const=8000, metavar="PORT", help="answer requests until Ctrl-C (port: 8000; 0 for any "
                    "free one). Flags that choose tokens are not for it: each request has its own")
  http.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address to listen on (default: %(default)s, this machine only)")
  http.add_argument("--api-key", metavar="FILE", help="file with the key that clients must send (default: none needed)")
  http.add_argument("--slots", type=int, default=16, metavar="N", help="sequences at once (default: %(default)s)")
  parser.add_argument_group("other").add_argument("-h", "--help", action="help", help="show this and leave")
  args = parser.parse_args(argv)
  if args.serve is not None:
    given = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args), ...)))  # a default does not replace what is there
    if ignored := [flag for flag, name in NOT_SERVED.items() if getattr(given, name, ...) is not ...]:
      raise ValueError(f"--serve: {', '.join(ignored)} beside it, want none of them. Each request has its own prompt and settings")
  return args

def devices(args: argparse.Namespace) -> tuple[str, ...]:
  if args.gpus is None: names = ("CPU" if args.devices is None else args.devices).split(",")
  elif args.gpus >= 1: names = ["CUDA", *(f"CUDA:{i}" for i in range(1, args.gpus))]
  else: raise ValueError(f"--gpus={args.gpus}, want at least 1. Without the flag the CPU is used")
  if not all(names): raise ValueError(f"--devices={args.devices!r}, want names such as CPU or CUDA,CUDA:1")
  return tuple(names)

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

def load(args: argparse.Namespace, names: tuple[str, ...], progress: Progress, slots: int = 1) -> Model:
  folder = specgrad.demo_path() if args.model is None else Path(args.model)
  if any(folder.glob("*.safetensors")) and not (folder / "tokenizer.json").exists():
    raise ValueError(f"{folder}: no tokenizer.json, so there is no text to work with. Fetch that file from where the "
                     "checkpoint comes from, or use the Python API, which takes token ids")
  if folder.is_dir(): Encoding.read(folder).prefix(args.think)  # refuses an effort that it has no text for
  model = specgrad.load(folder, numerics=args.numerics, devices=names, draft=args.draft, max_context=args.max_context,
                        kv=args.kv, slots=slots, progress=progress)
  assert model.tokenizer is not None
  check_tokens(model.tokenizer, args.think != "off")
  return model

def run(argv: Sequence[str] | None) -> None:
  args = parse(argv)
  if args.plan:
    folder = specgrad.demo_path() if args.model is None else Path(args.model)
    return print(report(folder, len(devices(args)), args.users, args.max_context, args.kv, args.gpu, args.depth))
  names = devices(args)
  text = None if args.self_test or args.serve is not None else one_prompt(args)
  if args.json and text is None: raise ValueError("--json: no prompt, want -p TEXT or text on stdin")
  if args.logprobs is not None and not (args.json and 0 <= args.logprobs <= 20):
    raise ValueError(f"--logprobs={args.logprobs}, want " + ("0 to 20" if args.json else "--json beside it, which shows them"))
  bars = Bars(screen := Screen())

  def leave(*_: object) -> NoReturn:
    bars.stopping = True                 # what swallows the exception, as some imports do, comes to its end at the next report
    raise KeyboardInterrupt
  signal.signal(signal.SIGINT, leave)
  specgrad.prepare()
  keep_interrupts()
  settings = Settings(effort=args.think, system=args.system, depth=args.depth, coupled=args.coupled,  # refuses before a long load
                      **{name: getattr(args, name) for name in NUMBERS if hasattr(args, name)})
  if args.serve is not None: return serve(args, names)
  try: model = load(args, names, bars)
  finally: bars.close()
  name = Path(args.model).resolve().name if args.model is not None else "demo"
  chat = Chat(model, settings, screen, bars, name=name, device=",".join(names), draft=args.draft, interactive=text is None,
              silent=args.json, logprobs=args.logprobs)
  chat.check(settings)
  chat.banner()
  try: tested = model.self_test()        # before the first turn; its graphs are the ones that replies need
  finally: bars.close()
  if bars.stopping: raise KeyboardInterrupt
  if args.self_test: screen.note(f"self-test: {tested} tokens with and without the draft are equal" if tested else
                                 "self-test: nothing to compare, there is no draft")
  elif text is None: chat.loop()
  elif (reply := chat.turn(text)) and args.json: print(json.dumps(reply.as_dict(name, chat.seed, settings)).replace("\x7f", "\\u007f"))

def serve(args: argparse.Namespace, names: tuple[str, ...]) -> None:
  try:
    from specgrad.serve import command
  except ImportError as error: raise ValueError(f"--serve: {error.name} is not installed, want pip install -e '.[serve]'") from None
  bars = Bars(Screen())
  try: command(args, lambda: load(args, names, bars, args.slots))
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
    exec("")  # where Ctrl-C met an exec of source, such as tinygrad's, CPython would at its end die of it, unless another one ended well
  return code

if __name__ == "__main__": sys.exit(main())
