"""Measures a checkpoint: prefill, plain decoding, and speculative beside plain decoding by kind and temperature.

A table for people, then one JSON object as the last line of stdout; progress goes to stderr. Plain and speculative runs
take turns, so that whatever else the machine does hits both. Plain decoding is that of a model loaded without a draft:
one that has a draft feeds it even where it isn't asked. A run that compiles anything is thrown away and made again.
"""
from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import evidence
from evidence import Parser, command, commit, device, rounded

import specgrad
from specgrad.checkpoint import PACKED, Checkpoint, expected_tensors
from specgrad.prompt import encode_chat
from specgrad.toolchain import tinygrad_version

if TYPE_CHECKING:
  from specgrad.api import Model, Reply

SCHEMA, NUMERICS = "specgrad.bench/1", "w4a8"
TEXTS, RANDOM = ("code", "prose", "chat"), "random"
RANDOM_LENGTH = 64                                         # ids of a random prompt
SHORT = 200                                                # tokens; a shorter run says little about speed or acceptance

def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Raises ValueError for flags it does not know and values out of range."""
  parser = Parser("bench", "Measure prefill, plain decoding, and speculative beside plain decoding.")
  add = parser.add_argument
  add("--model", type=Path, metavar="DIR", help="folder of the checkpoint (default: the demonstration checkpoint)")
  add("--draft", default="auto", metavar="D", help="auto, none, ngram, or the folder of a smaller checkpoint "
      "(default: auto, the checkpoint's own if it has one)")
  add("--depth", type=int, metavar="K", help="tokens drafted a step; 0: plain decoding alone (default: the draft's)")
  add("--prefill", type=int, nargs="*", metavar="N", help="prompt lengths (default: 128 512, as the context allows)")
  add("--tokens", type=int, default=SHORT, metavar="N", help="at most this many a reply (default: %(default)s)")
  add("--prompts", type=int, default=8, metavar="N", help="of each kind (default: %(default)s)")
  add("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="0 is greedy (default: 0 1)")
  add("--repeat", type=int, default=5, metavar="N", help="runs, of which the median counts (default: %(default)s)")
  add("--kinds", metavar="A,B", help="of code, prose, chat, random (default: all there are prompts for)")
  add("--seed", type=int, default=0, metavar="N", help="of random prompts and sampling (default: %(default)s)")
  args = parser.parse_args(argv)
  for flag, values, least in (("--tokens", [args.tokens], 2), ("--prompts", [args.prompts], 1),
                              ("--repeat", [args.repeat], 1), ("--seed", [args.seed], 0),
                              ("--prefill", args.prefill or [], 1), ("--depth", [args.depth or 0], 0)):
    for value in values:
      if value < least: raise ValueError(f"{flag}={value}, want at least {least}")
  for t in args.temperature:
    if not 0 <= t <= 100: raise ValueError(f"--temperature={t}, want 0 to 100")
  if args.kinds is not None:
    args.kinds = args.kinds.split(",")
    if wrong := [k for k in args.kinds if k not in (*TEXTS, RANDOM)]:
      raise ValueError(f"--kinds: {wrong[0]!r}, want some of {', '.join((*TEXTS, RANDOM))}")
  return args

# ------------------------------------------------------------------------------------------------ what, and on what
def parameters(checkpoint: Checkpoint) -> tuple[int, int]:
  """(of the target, of the checkpoint's own draft). Scales and routing tables are not counted."""
  expected, sums = expected_tensors(checkpoint.config), [0, 0]
  for name, info in checkpoint.tensors.items():
    if expected[name].kind == "scale" or info.dtype in ("I64", "I32"): continue
    packed = expected[name].kind == "expert" and info.dtype in PACKED
    sums[name.startswith("mtp.")] += int(np.prod(info.shape)) * (2 if packed else 1)
  return sums[0], sums[1]

def prompts(model: Model, args: argparse.Namespace, rng: np.random.Generator) -> dict[str, list[list[int]]]:
  """Kind -> ids of its first prompts: those of the checkpoint's folder, or else of the demonstration checkpoint.
  Without a tokenizer there are random ones only. Raises ValueError for a kind that was asked for and is not there."""
  found: dict[str, list[list[int]]] = {kind: [] for kind in TEXTS}
  own = model.engine.checkpoint.folder / "prompts.jsonl"
  file = own if own.is_file() else specgrad.demo_path() / "prompts.jsonl"
  wanted = args.kinds or (*TEXTS, RANDOM)
  if (tokenizer := model.tokenizer) and file.is_file():
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
      try: kind, text = (row := json.loads(line))["kind"], row["prompt"]
      except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file.name}: line {number} is no prompt, want an object with kind and prompt") from None
      if kind not in TEXTS or kind not in wanted or len(found[kind]) == args.prompts: continue
      chat = kind == "chat"
      found[kind].append(encode_chat(tokenizer, text) if chat else [model.config.bos_token_id, *tokenizer.encode(text)])
  found[RANDOM] = [random_ids(model, min(RANDOM_LENGTH, model.max_context // 2), rng) for _ in range(args.prompts)]
  if args.kinds and (missing := [kind for kind in args.kinds if not found[kind]]):
    why = "this checkpoint has no tokenizer" if tokenizer is None else f"{file.name} has no such prompts"
    raise ValueError(f"--kinds: {missing[0]} is not there, {why}")
  return {kind: found[kind] for kind in wanted if found[kind]}

def random_ids(model: Model, n: int, rng: np.random.Generator) -> list[int]:
  config = model.config
  ordinary = [i for i in range(config.vocab_size) if i not in (config.bos_token_id, config.eos_token_id)]
  return [config.bos_token_id, *rng.choice(ordinary, n - 1).tolist()]

# ------------------------------------------------------------------------------------------------ runs
@dataclass
class Run:
  """One pass over the prompts of a cell."""
  replies: list[Reply]

  def total(self, name: str) -> float: return sum(getattr(r.stats, name) for r in self.replies)
  @property
  def tok_s(self) -> float: return ratio(self.total("tokens") - self.total("first_step"), self.total("seconds"))
  @property
  def steps_s(self) -> float: return ratio(self.total("steps") - len(self.replies), self.total("seconds"))
  @property
  def ttft_ms(self) -> float: return 1e3 * statistics.median(r.stats.ttft for r in self.replies)

def ratio(a: float, b: float) -> float: return a / b if b else 0.0

def spread(name: str, values: Sequence[float]) -> dict[str, float]:
  return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}

def between(x: dict[str, Any], name: str) -> str:
  return f"{x[name]:.1f} ({x[name + '_min']:.1f}..{x[name + '_max']:.1f})"

def speeds(runs: Sequence[Run]) -> dict[str, Any]:
  """Medians of the runs with their ends. The first step is in ttft_ms and in none of the others."""
  tok_s = spread("tok_s", [r.tok_s for r in runs])
  return {"tokens": int(sum(r.total("tokens") for r in runs)), "steps": int(sum(r.total("steps") for r in runs)),
          **tok_s, **spread("steps_s", [r.steps_s for r in runs]),
          "ttft_ms": statistics.median(r.ttft_ms for r in runs), "tpot_ms": ratio(1e3, tok_s["tok_s"])}

@dataclass
class Bench:
  """The models and what goes on between them and the screen. `plain` has no draft: `model` itself if that has none."""
  args: argparse.Namespace
  bar: Any
  compiled: bool = False                                   # since it was last looked at
  warnings: list[str] = field(default_factory=list)

  def __post_init__(self) -> None:
    args = self.args
    draft = "none" if args.depth == 0 else args.draft
    self.model = self.plain = specgrad.load(args.model, numerics=NUMERICS, draft=draft, progress=self.progress)
    self.depth = self.model.engine.depth if args.depth is None else args.depth
    if args.depth and not self.model.engine.depth:
      raise ValueError(f"--depth={args.depth}: there is no draft, want 0 or a --draft")
    if self.depth: self.plain = specgrad.load(args.model, numerics=NUMERICS, draft="none", progress=self.progress)
    self.draft = "none" if not self.depth else "dspark" if draft == "auto" else draft

  def progress(self, stage: str, done: int, total: int) -> None:
    if stage == "compile":
      self.compiled = True
      self.bar.set_postfix_str("compiling" if done < total else "")

  def say(self, text: str = "") -> None: self.bar.write(text, file=sys.stdout)

  def once(self, model: Model, ids: list[int], tokens: int, **settings: Any) -> Reply:
    """A reply from an empty cache in which nothing was compiled: otherwise it is made again."""
    while True:
      self.compiled = False
      model.reset()
      reply = model.generate(ids, max_tokens=tokens, **settings)
      if not self.compiled: break
    self.bar.update()
    return reply

  def warn(self, what: str, runs: Sequence[Run]) -> None:
    """Keeps what a reader of these runs' figures must know."""
    said = (text for run in runs for reply in run.replies for text in reply.stats.warnings)
    self.warnings += [f"{what}: {text}" for text in dict.fromkeys(said)]
    if (n := int(min(r.total("tokens") for r in runs))) < SHORT:
      self.warnings.append(f"{what}: a run of {n} tokens, and one shorter than {SHORT} says little")

  # ---------------------------------------------------------------------------------------------- the three parts
  def prefill(self, n: int, rng: np.random.Generator) -> dict[str, Any]:
    """Prompt tokens over time to first token, which has one decode step in it."""
    seconds = [self.once(self.model, random_ids(self.model, n, rng), 1).stats.ttft for _ in range(self.args.repeat)]
    return {"prompt_kind": RANDOM, "prompt_tokens": n, **spread("tok_s", [n / s for s in seconds]),
            "ttft_ms": 1e3 * statistics.median(seconds)}

  def decode(self, ids: list[list[int]]) -> dict[str, Any]:
    n = self.args.tokens
    runs = [Run([self.once(self.plain, prompt, n, depth=0) for prompt in ids]) for _ in range(self.args.repeat)]
    self.warn("plain decoding", runs)
    return {"prompt_kind": RANDOM, "temperature": 0.0, "depth": 0, "prompts": len(ids), "prompt_tokens": len(ids[0]),
            "verifier": runs[0].replies[0].stats.verifier, **speeds(runs)}

  def cell(self, kind: str, temperature: float, ids: list[list[int]]) -> dict[str, Any]:
    """Speculative and plain decoding of the same prompts in turn; figures of the first, of the second in "plain"."""
    n, depth, spec, plain = self.args.tokens, self.depth, list[Run](), list[Run]()
    for repeat in range(self.args.repeat):
      drafted, alone = list[Any](), list[Any]()
      for i, prompt in enumerate(ids):
        settings: dict[str, Any] = {"temperature": temperature, "seed": self.args.seed + repeat * len(ids) + i}
        for speculative in (True, False) if (repeat + i) % 2 else (False, True):
          if speculative: drafted.append(self.once(self.model, prompt, n, depth=depth, **settings))
          else: alone.append(self.once(self.plain, prompt, n, depth=0, **settings))
      spec.append(Run(drafted))
      plain.append(Run(alone))
    every = [r.stats for run in spec for r in run.replies]
    by_place = [(sum(s.accepted[k] for s in every), sum(s.drafted[k] for s in every)) for k in range(depth)]
    accepted, proposed = (sum(x) for x in zip(*by_place))
    fast, slow = speeds(spec), speeds(plain)
    out = {"prompt_kind": kind, "temperature": temperature, "depth": depth, "verifier": every[0].verifier,
           "prompts": len(ids), "repeat": self.args.repeat, **fast, "drafted": proposed, "accepted": accepted,
           "dropped": fast["steps"] + accepted - fast["tokens"],  # decided, but past the end of the reply
           "tokens_per_step": 1 + accepted / fast["steps"], "acceptance_rate": ratio(accepted, proposed),
           "acceptance_by_place": [ratio(a, d) for a, d in by_place], "accepted_by_place": [a for a, _ in by_place],
           "drafted_by_place": [d for _, d in by_place],
           "plain": {"verifier": plain[0].replies[0].stats.verifier, **slow},
           "speedup": ratio(fast["tok_s"], slow["tok_s"]),
           **(self.identical(ids, spec, plain) if temperature == 0 else {"identical": None})}
    self.row(out)
    self.warn(f"{kind} at temperature {temperature:g}", [*spec, *plain])
    return out

  def identical(self, ids: list[list[int]], spec: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Prompts whose ids differ, in any run, from plain decoding with as many rows a step, and with one row."""
    width, wide, one = self.depth + 1, 0, 0
    for i, prompt in enumerate(ids):
      same = self.once(self.plain, prompt, self.args.tokens, depth=0, fixed_width=width).ids
      wide += any(run.replies[i].ids != same for run in spec)
      one += any(run.replies[i].ids != plain[0].replies[i].ids for run in [*spec, *plain])
    return {"identical": not wide and not one, "fixed_width": width, "differ_fixed_width": wide, "differ_width_1": one}

  def row(self, cell: dict[str, Any]) -> None:
    same = {True: "yes", False: "no", None: "-"}[cell["identical"]]
    if cell["identical"] is False:
      same += (f": {cell['differ_fixed_width']} of {cell['prompts']} prompts differ at width {cell['fixed_width']}, "
               f"{cell['differ_width_1']} at width 1")
    places = " ".join(f"{100 * a:.0f}" for a in cell["acceptance_by_place"])
    self.line(cell["prompt_kind"], f"{cell['temperature']:g}", f"{cell['tokens_per_step']:.2f}",
              f"{cell['acceptance_rate']:.0%}", places, f"{cell['steps_s']:.1f}", between(cell, "tok_s"),
              between(cell["plain"], "tok_s"), f"{cell['speedup']:.2f}", same)

  def line(self, kind: str, t: str, per_step: str, rate: str, places: str, steps: str, fast: str, slow: str, up: str,
           same: str) -> None:
    self.say(f"{kind:6} {t:>4} {per_step:>11} {rate:>8}  {places:<{max(11, 4 * self.depth)}} {steps:>7}  {fast:<22} "
             f"{slow:<22} {up:>8}  {same}")

  # ---------------------------------------------------------------------------------------------- all of it
  def warm(self, ids: list[int]) -> list[str]:
    """Compiles what will be timed; shapes that only longer texts need are up to `once`. -> the verifier's labels."""
    labels = list[str]()
    for t in self.args.temperature if self.depth else (0.0,):
      for model, depth in ((self.model, self.depth), (self.plain, 0))[:2 if self.depth else 1]:
        labels.append(self.once(model, ids, 2, temperature=t, seed=0, depth=depth).stats.verifier)
    return list(dict.fromkeys(labels))

  def head(self, said: str, labels: list[str]) -> dict[str, Any]:
    """Under what circumstances the figures came about: shown, and returned for the JSON."""
    args, checkpoint = self.args, self.model.engine.checkpoint
    of_target, of_draft = parameters(checkpoint)
    own = self.draft == "dspark"
    head = {"schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": said, "commit": commit(), "python": platform.python_version(),
            "tinygrad": tinygrad_version(), "device": device(self.model.engine.device),
            "model": checkpoint.folder.resolve().name, "fingerprint": checkpoint.fingerprint, "parameters": of_target,
            "draft_parameters": of_draft if own else None, "numerics": NUMERICS, "draft": self.draft,
            "depth": self.depth, "verifier": labels, "repeat": args.repeat, "max_tokens": args.tokens,
            "seed": args.seed}
    size = f"{of_target / 1e6:.1f} M parameters" + (f" + {of_draft / 1e6:.1f} M of its draft" if own else "")
    for name, text in (("command", said), ("commit", head["commit"]),
                       ("versions", f"Python {head['python']}, tinygrad {head['tinygrad']}"),
                       ("device", head["device"]), ("model", f"{head['model']}, {size}"), ("numerics", NUMERICS),
                       ("draft", f"{self.draft}, depth {self.depth}"), *(("verifier", label) for label in labels)):
      self.say(f"{name:9} {text}")
    return head

  def run(self, said: str) -> dict[str, Any]:
    args, rng = self.args, np.random.default_rng(self.args.seed)
    kinds = prompts(self.model, args, rng)
    lengths = [n for n in (128, 512) if n < self.model.max_context] if args.prefill is None else args.prefill
    if too_long := [n for n in lengths if n >= self.model.max_context]:
      raise ValueError(f"--prefill={too_long[0]}, want less than the context of {self.model.max_context}")
    start = [random_ids(self.model, min(RANDOM_LENGTH, self.model.max_context // 2), rng) for _ in range(args.prompts)]
    texts, temperatures = sum(map(len, kinds.values())), args.temperature
    replies = (len(lengths) + len(start)) * args.repeat + 1  # prefill, plain decoding, and its warm-up
    if self.depth: replies += 2 * len(temperatures) * (args.repeat * texts + 1) - 1 + temperatures.count(0) * texts
    self.bar.reset(replies)
    head = self.head(said, self.warm(start[0]))
    self.say("Warmed up: a reply during which anything compiled is not counted. Decoding is timed from the end of a "
             f"reply's first step.\nMedians of {args.repeat} runs (lowest..highest).")

    if lengths: self.say("\nprefill, cold, random ids: prompt tokens / time to first token")
    prefill = list[dict[str, Any]]()
    for n in lengths:
      prefill.append(x := self.prefill(n, rng))
      self.say(f"  {n:6} tokens  {between(x, 'tok_s')} tok/s, TTFT {x['ttft_ms']:.0f} ms")
    decode = self.decode(start)
    self.say(f"\nplain decoding after {len(start[0])} random ids\n  {decode['tokens'] // args.repeat:6} tokens  "
             f"{between(decode, 'tok_s')} tok/s, TPOT {decode['tpot_ms']:.2f} ms")

    cells = list[dict[str, Any]]()
    if self.depth:
      self.say()
      self.line("kind", "T", "tokens/step", "accepted", "by place, %", "steps/s", "tok/s", "plain tok/s", "speed-up",
                "identical")
      for temperature in args.temperature:
        cells += [self.cell(kind, temperature, ids) for kind, ids in kinds.items()]
    self.say("\n".join(["", *(f"warning: {text}" for text in self.warnings)]))
    return {**head, "prefill": prefill, "decode": decode, "speculative": cells, "warnings": self.warnings}

def run(argv: Sequence[str]) -> int:
  args = parse(argv)
  specgrad.prepare()
  with tqdm(desc="bench", unit=" runs", file=sys.stderr, disable=None, dynamic_ncols=True) as bar:
    result = Bench(args, bar).run(command("bench", argv))
  print(json.dumps(rounded(result), allow_nan=False))
  return 0

def main(argv: Sequence[str] | None = None) -> int: return evidence.guarded("bench", run, argv)

if __name__ == "__main__": sys.exit(main())
