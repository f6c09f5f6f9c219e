"""Measures a checkpoint: prefill, plain decoding, and speculative beside plain decoding by kind and temperature.

A table for people, then one JSON object as the last line of stdout; progress goes to stderr. Plain and speculative runs
take turns, so that whatever else the machine does hits both. Plain decoding is that of a model without a draft on the same
weights: one that has a draft feeds it even where it isn't asked. A run that compiles anything is thrown away and made again.

A roofline card comes before the stopwatch: what a step must read, how fast that can be read here, and so how many steps a
second there can be. Several depths (--depth 0,1,3,5) end in the best one for a mix, --contexts in speed by length, and
--scenario in the rows of the public profiles, from this process or (--url) from any server that speaks the OpenAI protocol.
"""
from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import accept
import evidence
import scenarios
from evidence import Parser, command, commit, device, rounded
from scenarios import SCHEMA, SHORT

import specgrad
from specgrad import plan
from specgrad.checkpoint import PACKED, Checkpoint, expected_tensors
from specgrad.prompt import encode_chat
from specgrad.toolchain import tinygrad_version

if TYPE_CHECKING:
  from specgrad.api import Model, Reply

NUMERICS, TEXTS, RANDOM = "w4a8", evidence.REAL, "random"
RANDOM_LENGTH = 64                                         # ids of a random prompt

def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Raises ValueError for flags it does not know and values out of range."""
  parser = Parser("bench", "Measure prefill, plain decoding, and speculative beside plain decoding.")
  add = parser.add_argument
  evidence.add_model(parser)
  add("--draft", default="auto", metavar="D", help="auto, none, ngram, or the folder of a smaller checkpoint "
      "(default: auto, the checkpoint's own if it has one)")
  add("--depth", metavar="K,K", help="tokens drafted a step; 0: plain decoding alone; several: which is best (default: "
      "the draft's)")
  add("--prefill", type=int, nargs="*", metavar="N", help="prompt lengths (default: 128 512, as the context allows)")
  add("--tokens", type=int, default=SHORT, metavar="N", help="at most this many a reply (default: %(default)s)")
  add("--prompts", type=int, default=8, metavar="N", help="of each kind (default: %(default)s)")
  add("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="0 is greedy (default: 0 1)")
  add("--repeat", type=int, default=5, metavar="N", help="runs, of which the median counts (default: %(default)s)")
  add("--kinds", metavar="A,B", help="of code, prose, chat, random (default: all there are prompts for)")
  add("--seed", type=int, default=0, metavar="N", help="of random prompts and sampling (default: %(default)s)")
  add("--mix", metavar="A=W,B=W", help="share of each kind in your tokens, for the best depth (default: all real kinds "
      "alike)")
  add("--contexts", metavar="N,N", help="decoding after prompts of so many tokens as well (default: none)")
  add("--scenario", metavar="A,B", help="of cc1 (128 -> 512 tokens), cc16 (the same for 16 users at once), cc16-long "
      "(8192 -> 512), instead of the kinds, over a batch; each without a draft and at --depth")
  add("--small", action="store_true", help="the scenarios at lengths for a CPU, which are the default there: 128 -> 200, "
      "long 1024 -> 200")
  add("--url", metavar="URL", help="drive a server with the scenarios, no model is loaded; --model is then the folder whose "
      "tokenizer measures the prompts")
  add("--api-key", metavar="KEY", help="for --url")
  add("--model-name", metavar="NAME", help="for --url: what the server calls the model")
  add("--endpoint", choices=("completions", "chat"), default="completions", help="for --url (default: %(default)s)")
  args = parser.parse_args(argv)
  args.depths, args.contexts = (numbers(flag, value) for flag, value in (("--depth", args.depth), ("--contexts", args.contexts)))
  args.mix = accept.parse_mix(args.mix) if args.mix else None
  args.scenario = args.scenario.split(",") if args.scenario else []
  if wrong := [s for s in args.scenario if s not in scenarios.PUBLIC]:
    raise ValueError(f"--scenario: {wrong[0]!r}, want some of {', '.join(scenarios.PUBLIC)}")
  if args.url and not (args.scenario and args.model_name):
    raise ValueError("--url: want --model-name, and --scenario to say with what load")
  for flag, values, least in (("--tokens", [args.tokens], 2), ("--prompts", [args.prompts], 1),
                              ("--repeat", [args.repeat], 1), ("--seed", [args.seed], 0),
                              ("--prefill", args.prefill or [], 1), ("--contexts", args.contexts or [], 2)):
    for value in values:
      if value < least: raise ValueError(f"{flag}={value}, want at least {least}")
  for t in args.temperature:
    if not 0 <= t <= 100: raise ValueError(f"--temperature={t}, want 0 to 100")
  if args.kinds is not None:
    args.kinds = args.kinds.split(",")
    if wrong := [k for k in args.kinds if k not in (*TEXTS, RANDOM)]:
      raise ValueError(f"--kinds: {wrong[0]!r}, want some of {', '.join((*TEXTS, RANDOM))}")
  return args

def numbers(flag: str, text: str | None) -> list[int] | None:
  """"0,3" -> [0, 3]. Raises ValueError."""
  if text is None: return None
  try: found = [int(x) for x in text.split(",")]
  except ValueError: found = [-1]
  if min(found) < 0 or len(set(found)) < len(found): raise ValueError(f"{flag}={text}, want numbers such as 1,3")
  return found

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

# ------------------------------------------------------------------------------------------------ the roofline
def card_of(name: str) -> plan.GPU | None:
  """What plan.py knows of the card that the driver names first; none without a driver, or of another card."""
  try: said = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20).stdout
  except (OSError, subprocess.SubprocessError): return None
  return next((g for g in plan.GPUS if name.split(":")[0] != "CPU" and g.name.lower().removesuffix(" blackwell") in said.lower()), None)

def read_rate(name: str, size: int) -> float:
  """Bytes a second of a loop that does nothing but read `size` bytes over and over, in whatever memory or cache holds
  them: the fastest of 20 on a device that may be busy."""
  from bench_kernels import reader
  call, moved = reader(name, max(size // 4096 * 4096, 1 << 20))

  def once() -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
  return moved / min(once() for _ in range(23))

@dataclass
class Roofline:
  """Steps a second that reading alone would allow. The work of computing is left out: on a CPU that is the limit."""
  model: Model

  @functools.cached_property
  def gpu(self) -> plan.GPU:
    engine = self.model.engine
    known = card_of(engine.device)
    size = plan.card(self.planned(0), plan.GPUS[0], 1, self.model.max_context).device
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return known or plan.GPU(f"read loop on {engine.device}", memory, read_rate(engine.device, size))

  def planned(self, depth: int) -> plan.Plan:
    """A draft that is not the checkpoint's own has rows, and no bytes of its own here."""
    engine = self.model.engine
    return plan.plan(engine.checkpoint, len(engine.devices), 1, self.model.max_context, depth=depth)

  def card(self, users: int, context: int, depth: int) -> dict[str, Any] | None:
    """None for a depth that the checkpoint's own draft does not have."""
    try: c = plan.card(self.planned(depth), self.gpu, users, context)
    except plan.PlanError: return None
    return {"device": c.gpu, "read_gb_s": self.gpu.bandwidth / 1e9, "users": users, "context": context, "depth": depth,
            "experts_a_layer": c.experts_layer, "target_bytes": c.target, "draft_bytes": c.draft, "kv_bytes": c.device_kv,
            "bytes_a_device": c.device, "steps_s_ceiling": c.steps_s}

  @staticmethod
  def say(c: dict[str, Any]) -> str:
    mb = lambda n: f"{n / 1e6:.4g} MB"
    return (f"{c['users']} user{'s' if c['users'] > 1 else ''}, {c['context']} tokens, depth {c['depth']}: reads "
            f"{mb(c['target_bytes'])} of target ({c['experts_a_layer']:.1f} experts a layer), {mb(c['draft_bytes'])} of draft, "
            f"{mb(c['kv_bytes'])} of KV at {c['read_gb_s']:.1f} GB/s ({c['device']}): at most {c['steps_s_ceiling']:.0f} steps/s")

def real_texts(model: Model, kinds: Sequence[str]) -> list[list[int]]:
  """Empty without a tokenizer: prompts are random ids then."""
  if model.tokenizer is None: return []
  return scenarios.texts_of(evidence.prompt_file(model, None), model.tokenizer, kinds)

def cut(model: Model, texts: list[list[int]], number: int, n: int) -> list[int]:
  return scenarios.cut_to(texts, number, n) if texts else random_ids(model, n + 1, np.random.default_rng(number))[1:]

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
    draft = "none" if args.depths == [0] else args.draft
    slots = max([scenarios.PUBLIC[s].users for s in args.scenario], default=1)
    self.model = self.plain = specgrad.load(args.model, numerics=NUMERICS, devices=args.devices, draft=draft, slots=slots,
                                            progress=self.progress)
    self.own = bool(self.model.config.dspark) and draft == "auto"
    most = self.model.engine.draft.depth_limit if self.model.engine.draft else 0
    self.depths = [self.model.depth] if args.depths is None else args.depths
    if max(self.depths) and not most: raise ValueError(f"--depth={max(self.depths)}: there is no draft, want 0 or a --draft")
    for depth in [d for d in self.depths if d > most] if len(self.depths) > 1 else ():
      self.depths.remove(depth)
      self.warnings.append(f"depth {depth} left out: the draft's block has {most} places")
    if not self.depths: raise ValueError(f"--depth={args.depth}, want 0 to {most}")
    self.depth = max(self.depths)
    self.model.verifier(temperature=0, depth=self.depth)   # refuses a depth that the draft doesn't have
    if self.depth: self.plain = evidence.sibling(self.model)
    self.draft = "none" if not self.depth else "dspark" if draft == "auto" else draft
    self.roofline = Roofline(self.model)

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

  def cell(self, kind: str, temperature: float, ids: list[list[int]], **more: Any) -> dict[str, Any]:
    """Speculative and plain decoding of the same prompts in turn; figures of the first, of the second in "plain"."""
    n, depth, spec, plain = self.args.tokens, self.depth, list[Run](), list[Run]()
    for repeat in range(self.args.repeat):
      drafted, alone = list[Any](), list[Any]()
      for i, prompt in enumerate(ids):
        settings: dict[str, Any] = {"temperature": temperature, "seed": self.args.seed + repeat * len(ids) + i, **more}
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
           **(self.identical(ids, spec, plain, **more) if temperature == 0 else {"identical": None})}
    self.row(out)
    self.warn(f"{kind} at temperature {temperature:g}, depth {depth}", [*spec, *plain])
    return out

  def identical(self, ids: list[list[int]], spec: Sequence[Run], plain: Sequence[Run], **more: Any) -> dict[str, Any]:
    """Prompts whose ids differ, in any run, from plain decoding with as many rows a step, and with one row."""
    width, wide, one = self.depth + 1, 0, 0
    for i, prompt in enumerate(ids):
      same = self.once(self.plain, prompt, self.args.tokens, depth=0, fixed_width=width, **more).ids
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
    self.say(f"{kind:12} {t:>4} {per_step:>11} {rate:>8}  {places:<{max(11, 4 * self.depth)}} {steps:>7}  {fast:<22} "
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

  def reached(self, c: dict[str, Any] | None, steps_s: float) -> None:
    if c:
      share = steps_s / c["steps_s_ceiling"]
      self.say(f"  {steps_s:.1f} steps/s are {share:.0%} of the ceiling at depth {c['depth']}, {c['context']} tokens")

  def share(self, card: dict[str, Any] | None, steps_s: float) -> float | None:
    return steps_s / card["steps_s_ceiling"] if card else None

  def cards(self, of: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Shown for each (users, context, depth)."""
    found = [c for x in dict.fromkeys(of) if (c := self.roofline.card(*x))] if self.own or not self.depth else []
    self.say("\nroofline, before the stopwatch (weights and caches read once a step, no computing):")
    for c in found: self.say("  " + Roofline.say(c))
    if not found: self.say("  none: the plan does not know this draft's bytes")
    return found

  def sweep(self, kinds: dict[str, list[list[int]]]) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Cells of every depth above 0, and what they say for the mix at the highest temperature."""
    every = list[dict[str, Any]]()
    for depth in [d for d in self.depths if d]:
      self.depth = depth
      self.say(f"\ndepth {depth}")
      self.line("kind", "T", "tokens/step", "accepted", "by place, %", "steps/s", "tok/s", "plain tok/s", "speed-up",
                "identical")
      for temperature in self.args.temperature:
        every += [self.cell(kind, temperature, ids) for kind, ids in kinds.items()]
    self.depth = max(self.depths)
    if len(self.depths) == 1: return every, None
    found = {f"{t:g}": best_depth([c for c in every if c["temperature"] == t], self.args.mix, 0 in self.depths)
             for t in self.args.temperature}
    for t, x in found.items():
      by = ", ".join(f"{d}: {s:.2f}" for d, s in x["speedup_by_depth"].items())
      mix = ", ".join(f"{n} {w:.0%}" for n, w in x["mix"].items())
      self.say(f"best depth at temperature {t}: {x['depth']} (speed-up by depth {by}; for the mix {mix})")
    return every, found

  def scenarios(self, said: str) -> dict[str, Any]:
    args, cpu = self.args, self.model.engine.device.split(":")[0] == "CPU"
    wanted = [(scenarios.SMALL if cpu or args.small else scenarios.PUBLIC)[s] for s in args.scenario]
    kinds = args.kinds or list(TEXTS)
    texts = real_texts(self.model, kinds)
    limit = self.model.max_context - max(self.depths) - 1
    for s in wanted:
      if s.prompt + s.output > limit:
        raise ValueError(f"--scenario={s.name}: {s.prompt} + {s.output} tokens, want at most {limit} in this context")
    depths = list(dict.fromkeys([0, *self.depths]))
    self.bar.reset(len(wanted) * len(depths) * len(args.temperature) * (args.repeat + 1))
    head = self.head(said, [])
    self.cards([(s.users, s.prompt + s.output // 2, d) for s in wanted for d in depths])
    if wanted != [scenarios.PUBLIC[s.name] for s in wanted]:
      self.say("scaled down for a CPU: these are not the lengths of the public profile")
    self.say(f"prompts: {' and '.join(kinds) if texts else RANDOM}, cut to length, no two alike; medians of {args.repeat} "
             "rounds, all rows by turns\n")
    self.say(scenarios.table([]))
    rows, bos = list[dict[str, Any]](), self.model.config.bos_token_id
    answers = {depth: scenarios.InProcess(self.model if depth else self.plain, depth) for depth in depths}
    prompts = lambda s, i: [[bos, *cut(self.model, texts, i * s.users + j, s.prompt - 1)] for j in range(s.users)]
    cells = [scenarios.Cell(s, t, answers[depth], functools.partial(prompts, s))
             for s in wanted for t in args.temperature for depth in depths]
    try: measured = scenarios.measure(cells, args.repeat, args.seed, self.again, self.bar.update)
    finally:
      for x in answers.values(): x.close()
    ones, plain = dict[Any, list[scenarios.Round]](), 0.0
    for cell, depth, rounds in zip(cells, depths * len(cells), measured):
      s, t = cell.scenario, cell.temperature
      row = {**scenarios.figures(s, rounds), "temperature": t, "depth": depth, "prompt_kind": "+".join(kinds) if texts else RANDOM,
             "identical": None}
      if t == 0 and depth:                                 # rounds[0] is that of prompts(1)
        row["fixed_width"], row["identical"] = depth + 1, all(
          self.plain.generate(ids, max_tokens=s.output, fixed_width=depth + 1, ignore_eos=True).ids == call.ids
          for ids, call in zip(cell.prompts(1), rounds[0].calls))
        self.plain.reset()
      card = self.roofline.card(s.users, s.prompt + s.output // 2, depth) if self.own or not depth else None
      row["roofline"], row["roofline_share"] = card, self.share(card, row["steps_s"])
      plain = row["tok_s"] if not depth else plain         # depth 0 comes first
      row["speedup"] = ratio(row["tok_s"], plain)
      if s.users == 1: ones[t, depth, s.prompt, s.output] = rounds
      elif one := ones.get((t, depth, s.prompt, s.output)): row |= scenarios.over(rounds, one)
      rows.append(row)
      self.say(scenarios.table([row]))
      self.warnings += scenarios.warnings(row)
    self.warnings = list(dict.fromkeys(self.warnings))
    self.say("\n".join(["", *(f"warning: {text}" for text in self.warnings)]))
    return {**head, "scaled_down": cpu or args.small, "scenarios": rows, "warnings": self.warnings}

  def again(self) -> bool:
    """Whether anything was compiled since this was last asked."""
    compiled, self.compiled = self.compiled, False
    return compiled

  def run(self, said: str) -> dict[str, Any]:
    args, rng = self.args, np.random.default_rng(self.args.seed)
    if args.scenario: return self.scenarios(said)
    kinds = prompts(self.model, args, rng)
    lengths = [n for n in (128, 512) if n < self.model.max_context] if args.prefill is None else args.prefill
    room = self.model.max_context - self.depth - 2
    if too_long := [n for n in lengths if n >= self.model.max_context]:
      raise ValueError(f"--prefill={too_long[0]}, want less than the context of {self.model.max_context}")
    if too_long := [n for n in args.contexts or () if n + args.tokens > room]:
      raise ValueError(f"--contexts={too_long[0]}, want at most {room - args.tokens} with --tokens={args.tokens}")
    start = [random_ids(self.model, min(RANDOM_LENGTH, self.model.max_context // 2), rng) for _ in range(args.prompts)]
    texts, temperatures = sum(map(len, kinds.values())), args.temperature
    replies = (len(lengths) + len(start)) * args.repeat + 1  # prefill, plain decoding, and its warm-up
    if self.depth:
      cells = len([d for d in self.depths if d]) * texts + 2 * len(args.contexts or ())
      replies += 2 * len(temperatures) * (args.repeat * cells + 1) - 1 + temperatures.count(0) * cells
    self.bar.reset(replies)
    head = self.head(said, self.warm(start[0]))
    middle = min(RANDOM_LENGTH + args.tokens // 2, self.model.max_context)
    cards = {(c["context"], c["depth"]): c for c in self.cards(
      [(1, middle, d) for d in dict.fromkeys([0, *self.depths])] + [(1, n, self.depth) for n in args.contexts or ()])}
    self.say("\nWarmed up: a reply during which anything compiled is not counted. Decoding is timed from the end of a "
             f"reply's first step.\nMedians of {args.repeat} runs (lowest..highest).")

    if lengths: self.say("\nprefill, cold, random ids: prompt tokens / time to first token")
    prefill = list[dict[str, Any]]()
    for n in lengths:
      prefill.append(x := self.prefill(n, rng))
      self.say(f"  {n:6} tokens  {between(x, 'tok_s')} tok/s, TTFT {x['ttft_ms']:.0f} ms")
    decode = self.decode(start)
    self.say(f"\nplain decoding after {len(start[0])} random ids\n  {decode['tokens'] // args.repeat:6} tokens  "
             f"{between(decode, 'tok_s')} tok/s, TPOT {decode['tpot_ms']:.2f} ms")
    self.reached(cards.get((middle, 0)), decode["steps_s"])

    cells, best = self.sweep(kinds) if self.depth else ([], None)
    for c in cells: c["roofline_share"] = self.share(cards.get((middle, c["depth"])), c["steps_s"])
    shown = [c for c in cells if best is None or c["depth"] == best[f"{c['temperature']:g}"]["depth"]]
    for depth in dict.fromkeys(c["depth"] for c in cells):
      self.reached(cards.get((middle, depth)), statistics.median(c["steps_s"] for c in cells if c["depth"] == depth))
    by_length = list[dict[str, Any]]()
    if self.depth and args.contexts:
      self.say(f"\ndepth {self.depth}, by context; replies go on past their end")
      whole = real_texts(self.model, args.kinds or TEXTS)
      for n in args.contexts:
        ids = [[self.model.config.bos_token_id, *cut(self.model, whole, j, n - 1)] for j in range(2)]
        by_length += [{**self.cell(f"{n} tokens", t, ids, ignore_eos=True), "context": n} for t in temperatures]
        self.reached(cards.get((n, self.depth)), by_length[-1]["steps_s"])
    self.warnings = list(dict.fromkeys(self.warnings))
    self.say("\n".join(["", *(f"warning: {text}" for text in self.warnings)]))
    return {**head, "roofline": list(cards.values()), "prefill": prefill, "decode": decode, "speculative": shown,
            "sweep": cells if best else [], "best_depth": best, "contexts": by_length, "warnings": self.warnings}

def best_depth(cells: Sequence[dict[str, Any]], mix: dict[str, float] | None, plain: bool) -> dict[str, Any]:
  """By the speed-up for a mix, each depth beside plain decoding of the same minutes; `plain`: depth 0, at 1, is one of
  them. Without a mix real kinds count alike, or all where there are no real ones."""
  names = list(dict.fromkeys(c["prompt_kind"] for c in cells))
  weights = accept.spread_mix(mix, [n for n in names if n != RANDOM] or names)
  by_depth = {0: 1.0} if plain else {}
  for depth in dict.fromkeys(c["depth"] for c in cells):
    speed = {c["prompt_kind"]: c["speedup"] for c in cells if c["depth"] == depth}
    by_depth[depth] = 1 / sum(w / speed[n] for n, w in weights.items() if w)
  return {"depth": max(by_depth, key=lambda d: by_depth[d]), "speedup_by_depth": by_depth, "mix": weights}

def run(argv: Sequence[str]) -> int:
  args = parse(argv)
  if not args.url: specgrad.prepare()
  with tqdm(desc="bench", unit=" runs", file=sys.stderr, disable=None, dynamic_ncols=True) as bar:
    result = scenarios.remote(args, argv, bar) if args.url else Bench(args, bar).run(command("bench", argv))
  print(json.dumps(rounded(result), allow_nan=False))
  return 0

def main(argv: Sequence[str] | None = None) -> int: return evidence.guarded("bench", run, argv)

if __name__ == "__main__": sys.exit(main())
