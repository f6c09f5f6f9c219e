"""What the measuring scripts share: their frame, prompts by class, intervals, records that can be resumed, plots."""
from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import specgrad
from specgrad.prompt import encode_chat

if TYPE_CHECKING:
  from specgrad.api import Model

ROOT = Path(__file__).resolve().parents[1]

# ------------------------------------------------------------------------------------------------ the frame
class Parser(argparse.ArgumentParser):
  def __init__(self, script: str, description: str, epilog: str = "The last line of stdout is a JSON object with all of it."):
    super().__init__(prog=f"scripts/{script}.py", allow_abbrev=False, description=description, epilog=epilog)

  def error(self, message: str) -> NoReturn: raise ValueError(f"{message}. --help lists the flags")

def add_model(parser: Parser) -> None:
  parser.add_argument("--model", type=Path, metavar="DIR", help="folder of the checkpoint (default: the demonstration checkpoint)")
  parser.add_argument("--devices", type=lambda text: tuple(text.split(",")), default=("CPU",), metavar="A,B",
                      help="tinygrad's names, such as CUDA,CUDA:1 (default: CPU)")

def command(script: str, argv: Sequence[str]) -> str: return shlex.join(["python", f"scripts/{script}.py", *argv])

def tell(summary: dict[str, Any], text: str, draw: Callable[[dict[str, Any], Path], list[str]], plot: Path | None) -> None:
  """A measurement to stdout: for people, its plots if there is a place for them, and on the last line all of it."""
  print(text)
  if plot: print("plots: " + ", ".join(draw(summary, plot)))
  print(json.dumps(summary, allow_nan=False))

def guarded(name: str, body: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
  """The exit status: that of body, or 2 with one line for a user's mistake."""
  try:
    with contextlib.suppress(BrokenPipeError): return body(sys.argv[1:] if argv is None else argv)
    return 1
  except KeyboardInterrupt:
    print(f"{name}: interrupted", file=sys.stderr)
    return 130
  except (ValueError, ArithmeticError, MemoryError, OSError) as error:
    if os.environ.get("DEBUG", "0") not in ("", "0"): raise
    print(f"{name}: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return 2

def commit() -> str:
  """The checkout's commit, marked where tracked files differ from it; "unknown" where this is no checkout."""
  def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
  try:
    if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT: return "unknown"  # a folder of another project
    return git("rev-parse", "HEAD") + ("-modified" if git("status", "--porcelain", "--untracked-files=no") else "")
  except (OSError, subprocess.CalledProcessError): return "unknown"

def device(name: str) -> str:
  """tinygrad's name; for the CPU also its own name and the cores that this process may use."""
  if name != "CPU": return name
  cpu = platform.processor() or platform.machine()
  with contextlib.suppress(OSError, StopIteration):
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  return f"CPU: {cpu}, {cores} cores"

def rounded(x: Any) -> Any:
  """Floats to nine digits, which is more than anything here is measured to."""
  if isinstance(x, dict): return {k: rounded(v) for k, v in x.items()}
  if isinstance(x, list): return [rounded(v) for v in x]
  return float(f"{x:.9g}") if isinstance(x, float) else x

REAL, SYNTHETIC = ("code", "prose", "chat"), ("synthetic_random", "synthetic_repeat")
SYNTHETIC_LENGTH = 64                                      # ids of a made prompt
LABEL = re.compile(r"(?P<family>\w+), rule (?P<rule>[\w-]+), q (?P<q_source>[\w-]+), depth (?P<depth>\d+) "
                   r"(?P<stop_rule>\w+), numerics (?P<numerics>[\w -]+)")

def verifier(label: str) -> dict[str, Any]:
  """The parts of a verifier's label. Raises ValueError where it is none."""
  if (m := LABEL.fullmatch(label)) is None:
    raise ValueError(f"verifier={label!r}, want a label such as the engine prints")
  return {**m.groupdict(), "depth": int(m["depth"]), "label": label}

@dataclass(frozen=True)
class Prompt:
  """Where a reply starts. Replies of one `source` (a prompt, a conversation) hang together: they are one cluster."""
  kind: str
  source: str
  turn: str                                                # "1" or "2+"
  ids: tuple[int, ...]

  @property
  def synthetic(self) -> bool: return self.kind in SYNTHETIC

def read_rows(file: Path) -> list[tuple[str, str, Any]]:
  """(kind, id, prompt: text, messages or ids) of each line. Raises ValueError that names a line that is none."""
  rows, ids = list[tuple[str, str, Any]](), set[str]()
  for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
    if not line.strip(): continue
    try:
      row = json.loads(line)
      kind, prompt = row.get("kind", row.get("class")), row.get("ids", row.get("prompt"))
      if not isinstance(kind, str) or not kind or not isinstance(prompt, str | list) or not prompt: raise TypeError
      numbers = isinstance(prompt, list) and all(isinstance(x, int) for x in prompt)
      said = isinstance(prompt, str) or numbers or [m["content"] for m in prompt if m["role"] == "user"]
      if not said: raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
      raise ValueError(f"{file.name}: line {number} is no prompt, want an object with kind, and prompt or ids"
                       ) from None
    name = str(row.get("id", number))
    if name in ids: raise ValueError(f"{file.name}: line {number}: id {name!r} was there before, want one id a prompt")
    ids.add(name)
    rows.append((kind, name, prompt))
  return rows

def turns(messages: Sequence[dict[str, str]]) -> list[tuple[str, list[dict[str, str]]]]:
  """The conversation up to its first and up to its last question, which is all there is where it has but one."""
  asked = [i for i, m in enumerate(messages) if m["role"] == "user"]
  return [("1" if i == asked[0] else "2+", list(messages[:i + 1])) for i in dict.fromkeys([*asked[:1], *asked[-1:]])]

def prompt_file(model: Model, file: Path | None) -> Path:
  own = model.engine.checkpoint.folder / "prompts.jsonl"
  return file or (own if own.is_file() else specgrad.demo_path() / "prompts.jsonl")

def prompts(model: Model, file: Path | None, kinds: Sequence[str] | None, limit: int, seed: int) -> list[Prompt]:
  """At most `limit` sources of each kind, in the file's order, then as many made ones. Text needs a tokenizer.
  Raises ValueError for a kind that was asked for and is not there."""
  found, tokenizer, bos = list[Prompt](), model.tokenizer, model.config.bos_token_id
  taken = dict[str, int]()
  for kind, source, prompt in read_rows(prompt_file(model, file)):
    given = isinstance(prompt, list) and isinstance(prompt[0], int)
    if (kinds and kind not in kinds) or taken.get(kind, 0) == limit or (tokenizer is None and not given): continue
    taken[kind] = taken.get(kind, 0) + 1
    if given: found.append(Prompt(kind, source, "1", tuple(prompt)))
    elif isinstance(prompt, str): found.append(Prompt(kind, source, "1", (bos, *tokenizer.encode(prompt))))
    else: found += [Prompt(kind, source, turn, tuple(encode_chat(tokenizer, m))) for turn, m in turns(prompt)]
  rng, config = np.random.default_rng(seed), model.config
  ordinary = [i for i in range(config.vocab_size) if i not in (config.bos_token_id, config.eos_token_id)]
  n = min(SYNTHETIC_LENGTH, model.max_context // 2)
  for i in range(limit):                                   # drawn whatever is asked for: the same ids in every run
    random, phrase = rng.choice(ordinary, n - 1).tolist(), rng.choice(ordinary, 8).tolist()
    for kind, ids in zip(SYNTHETIC, (random, (phrase * n)[:n - 1])):
      if not kinds or kind in kinds: found.append(Prompt(kind, f"{kind}-{i}", "1", (bos, *ids)))
  if kinds and (missing := [k for k in kinds if not any(p.kind == k for p in found)]):
    why = "this checkpoint has no tokenizer" if tokenizer is None else "the prompts have no such kind"
    raise ValueError(f"class {missing[0]!r} is not there: {why}")
  return found

def sibling(model: Model, w4a8: bool | None = None) -> Model:
  """A model on the same weights without a draft; cache, slots and graphs are its own. w4a8: what its cache holds."""
  from specgrad.api import Model
  from specgrad.engine import Slot
  from specgrad.models.deepseek_v4 import Cache
  engine = copy.copy(model.engine)
  engine.draft, engine.graphs, engine.lanes = None, {}, {}
  engine.slot = [Slot() for _ in engine.slot]
  engine.cache = Cache(engine.config, model.max_context, engine.devices, engine.w4a8 if w4a8 is None else w4a8,
                       engine.slots, engine.kv == "sharded")
  return Model(engine, model.tokenizer)

# ------------------------------------------------------------------------------------------------ intervals
def interval(rows: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int = 0, resamples: int = 2000,
             bca: bool = False) -> list[float] | None:
  """rows (clusters, m) of sums; statistic: (B, m) sums over a resample -> (B,). The middle 95 % of it when clusters are
  drawn with replacement; bca: corrected for bias and skew (Efron 1987), for statistics that are no mean. None from fewer
  than two clusters, which say nothing about their spread."""
  if len(rows) < 2: return None
  rng = np.random.default_rng(seed)
  times = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), resamples)
  with np.errstate(divide="ignore", invalid="ignore"):
    values, ends = statistic(times @ rows), [0.025, 0.975]
    values = values[np.isfinite(values)]
    if not len(values): return None
    if bca:
      law, one = NormalDist(), float(statistic(rows.sum(0, keepdims=True))[0])
      jack = statistic(rows.sum(0) - rows)
      jack = jack[np.isfinite(jack)]
      d = jack.mean() - jack if len(jack) else np.zeros(1)
      skew = float((d ** 3).sum() / (6 * (d ** 2).sum() ** 1.5)) if (d ** 2).sum() else 0.0
      below = float((values < one).mean() + (values == one).mean() / 2)
      if 0 < below < 1:
        z0 = law.inv_cdf(below)
        ends = [law.cdf(z0 + (z0 + z) / (1 - skew * (z0 + z))) for z in map(law.inv_cdf, ends)]
  return [float(x) for x in np.quantile(values, ends)]

# ------------------------------------------------------------------------------------------------ records
def shard(text: str) -> tuple[int, int]:
  """"i/n", counted from 1 -> (i-1, n). Raises ValueError."""
  m = re.fullmatch(r"(\d+)/(\d+)", text)
  if m is None or not 1 <= int(m[1]) <= int(m[2]): raise ValueError(f"--shard={text}, want i/n such as 2/4")
  return int(m[1]) - 1, int(m[2])

def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Head and records of a JSONL file; a last line that was cut short is left out. Raises ValueError."""
  lines = path.read_text(encoding="utf-8").splitlines()
  rows = list[dict[str, Any]]()
  for number, line in enumerate(lines, 1):
    try: rows.append(json.loads(line))
    except ValueError:
      if number < len(lines): raise ValueError(f"{path.name}: line {number} is no JSON") from None
  if not rows or "schema" not in rows[0]:
    raise ValueError(f"{path.name}: no head in line 1, want a file made with --out")
  return rows[0], rows[1:]

class Records:
  """A JSONL file that grows by a line a result, behind a head that says under what settings. An interrupted run goes on
  where it stopped; with other settings it is refused. Without a path records are kept in memory alone."""
  def __init__(self, path: Path | None, head: dict[str, Any], settings: Sequence[str]):
    self.path, self.head, self.rows = path, head, list[dict[str, Any]]()
    if path is None: return
    if path.exists() and path.stat().st_size:
      self.head, self.rows = read_records(path)
      for name in settings:
        if self.head.get(name) != head[name]:
          raise ValueError(f"{path.name}: made with {name}={self.head.get(name)}, want {head[name]}. "
                           "Name another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")             # without the line that an interruption cut
    part.write_text("".join(json.dumps(row) + "\n" for row in (self.head, *self.rows)), encoding="utf-8")
    part.replace(path)

  def add(self, row: dict[str, Any]) -> None:
    self.rows.append(row)
    if self.path:
      with self.path.open("a", encoding="utf-8") as f: f.write(json.dumps(row, allow_nan=False) + "\n")

def merged(paths: Sequence[Path], settings: Sequence[str], key: Sequence[str]
           ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Head and records of several shards as of one. Raises ValueError where they differ in a setting, or a record, which
  the fields of `key` name, is in two of them."""
  heads, every, seen = list[dict[str, Any]](), list[dict[str, Any]](), set[tuple[Any, ...]]()
  for path in paths:
    head, rows = read_records(path)
    heads.append(head)
    for name in (n for n in settings if n != "device"):
      if head.get(name) != heads[0].get(name):
        raise ValueError(f"{path.name}: {name}={head.get(name)}, want {heads[0].get(name)} as in {paths[0].name}")
    for r in rows:
      if (one := tuple(r.get(k) for k in key)) in seen:
        raise ValueError(f"{path.name}: {' '.join(map(str, one))} is in two files")
      seen.add(one)
    every += rows
  return heads[0], every

def sha(path: Path) -> str: return hashlib.sha256(path.read_bytes()).hexdigest()[:16]

# ------------------------------------------------------------------------------------------------ people
def plotting() -> Any:
  """matplotlib's pyplot without a screen. Raises ValueError where it is not installed."""
  try:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
  except ImportError:
    raise ValueError("--plot: matplotlib is not installed, want pip install 'specgrad[plot]'") from None
  return pyplot

def save(figure: Any, path: Path) -> list[str]:
  """As PNG and SVG, whatever ending `path` has."""
  path.parent.mkdir(parents=True, exist_ok=True)
  files = [str(path.with_suffix(ending)) for ending in (".png", ".svg")]
  for file in files: figure.savefig(file, dpi=150, bbox_inches="tight")
  return files

def table(rows: Iterable[Sequence[str]]) -> str:
  """Columns as wide as they need; all but the first two to the right."""
  rows = [list(map(str, r)) for r in rows]
  width = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
  return "\n".join("  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(r, width))).rstrip()
                   for r in rows)
