"""Measures acceptance by class of prompt: tokens a step with intervals, by place and position, beside plain decoding.

One JSON line a reply (`--out`, can be resumed and sharded), a table for people, and a summary as the last line of
stdout, which `--check` validates. A drafted token is worth only what the text makes of it, so no figure here comes
without its class, the label of its verifier and the mix it stands for.
"""
from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import evidence
from evidence import Parser, command, commit, device, rounded

import specgrad
from specgrad.toolchain import tinygrad_version

if TYPE_CHECKING:
  from specgrad.api import Model
  from specgrad.engine import Stats

SCHEMA = "specgrad.accept/1"
BINS = {"0-31": (0, 32), "32-127": (32, 128), "128+": (128, 1 << 60)}
SETTINGS = ("schema", "fingerprint", "numerics", "draft", "depth", "tokens", "temperature", "seed", "prompts_sha256",
            "classes", "limit", "probe", "device")         # what records of one file must share
KEY = ("class", "source", "turn", "T")                     # what names a record
SHORT = 200                                                # replies' tokens; fewer in a cell say little about it
LOSSLESS = ("exact", "coupled")

def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Raises ValueError for flags it does not know and values out of range."""
  parser = Parser("accept", "Measure acceptance by class of prompt.")
  add = parser.add_argument
  evidence.add_model(parser)
  add("--numerics", choices=("w4a8", "reference"), default="w4a8", help="default: %(default)s")
  add("--draft", default="auto", metavar="D", help="auto, ngram, or the folder of a smaller checkpoint (default: auto)")
  add("--depth", type=int, metavar="K", help="tokens drafted a step (default: the draft's)")
  add("--prompts", type=Path, metavar="FILE", help="your own JSONL: kind, and prompt (text or messages) or ids; "
      "id is optional (default: the checkpoint's prompts.jsonl, or the demonstration's)")
  add("--classes", metavar="A,B", help="of those in the prompts, synthetic_random, synthetic_repeat (default: all)")
  add("--limit", type=int, default=40, metavar="N", help="prompts of each class (default: %(default)s)")
  add("--tokens", type=int, default=128, metavar="N", help="at most this many a reply (default: %(default)s)")
  add("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="0 is greedy (default: 0 1)")
  add("--probe", type=int, default=8, metavar="N", help="steps of a reply in which the draft's law and confidence are "
      "looked at as well, 0: none (default: %(default)s)")
  add("--seed", type=int, default=0, metavar="N", help="of made prompts and sampling (default: %(default)s)")
  add("--mix", metavar="A=W,B=W", help="share of each class in your tokens, for the headline (default: all real "
      "classes alike). chat is split over its turns, chat:1 and chat:2+ name one")
  add("--out", type=Path, metavar="FILE", help="JSONL of the replies; a run that was interrupted goes on there")
  add("--shard", default="1/1", metavar="i/n", help="this machine's share of the replies")
  add("--merge", type=Path, nargs="+", metavar="FILE", help="sum up the files of several shards instead of running")
  add("--check", type=Path, metavar="FILE", help="validate a summary instead of running")
  add("--plot", type=Path, metavar="FILE", help="draw it, as PNG and SVG (needs the extra `plot`)")
  args = parser.parse_args(argv)
  for flag, value, least in (("--tokens", args.tokens, 2), ("--limit", args.limit, 1), ("--probe", args.probe, 0),
                             ("--seed", args.seed, 0), ("--depth", 1 if args.depth is None else args.depth, 1)):
    if value < least: raise ValueError(f"{flag}={value}, want at least {least}")
  for t in args.temperature:
    if not 0 <= t <= 100: raise ValueError(f"--temperature={t}, want 0 to 100")
  args.shard = evidence.shard(args.shard)
  args.classes = args.classes.split(",") if args.classes else None
  args.mix = parse_mix(args.mix) if args.mix else None
  return args

def parse_mix(text: str) -> dict[str, float]:
  """"a=.5,b=1" -> weights that add up to 1. Raises ValueError."""
  try: mix = {name.strip(): float(w) for name, w in (part.split("=") for part in text.split(","))}
  except ValueError: raise ValueError(f"--mix={text}, want such as code=0.5,chat=0.5") from None
  if not all(0 <= w < float("inf") for w in mix.values()) or not sum(mix.values()):
    raise ValueError(f"--mix={text}, want weights of at least 0, one above it")
  return {name: w / sum(mix.values()) for name, w in mix.items()}

# ------------------------------------------------------------------------------------------------ one reply
def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
  z = logits.astype(np.float64) / temperature
  e = np.exp(z - z.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)

def looped(ids: Sequence[int]) -> bool:
  """Whether the reply ends in one piece of at most 32 tokens, at least four times over and 24 tokens long."""
  def again(period: int) -> bool:
    n = max(4 * period, 24)
    return len(ids) >= n and all(ids[-i] == ids[-i - period] for i in range(1, n - period + 1))
  return any(again(period) for period in range(1, 33))

class Measure:
  """The model with its draft, and one without for plain decoding, since a draft is fed even where it isn't asked."""
  def __init__(self, args: argparse.Namespace, bar: Any):
    self.args, self.bar, self.compiled = args, bar, False
    self.model = specgrad.load(args.model, numerics=args.numerics, devices=args.devices, draft=args.draft,
                               progress=self.progress)
    if not self.model.depth:
      raise ValueError("there is no draft, want a checkpoint with DSpark stages or --draft ngram")
    self.depth = self.model.depth if args.depth is None else args.depth
    self.model.verifier(temperature=0, depth=self.depth)   # refuses a depth that the draft doesn't have
    self.plain = evidence.sibling(self.model)

  def progress(self, stage: str, done: int, total: int) -> None:
    if stage == "compile":
      self.compiled = True
      self.bar.set_postfix_str("compiling" if done < total else "")

  def head(self, said: str, jobs: int) -> dict[str, Any]:
    args, checkpoint = self.args, self.model.engine.checkpoint
    return {"schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": said, "commit": commit(), "tinygrad": tinygrad_version(),
            "device": device(self.model.engine.device), "model": checkpoint.folder.resolve().name,
            "fingerprint": checkpoint.fingerprint, "numerics": args.numerics,
            "draft": "dspark" if args.draft == "auto" else Path(args.draft).name, "depth": self.depth,
            "tokens": args.tokens, "temperature": args.temperature, "seed": args.seed,
            "prompts_sha256": evidence.sha(evidence.prompt_file(self.model, args.prompts)), "classes": args.classes,
            "limit": args.limit, "probe": args.probe, "jobs": jobs}

  def once(self, model: Model, p: evidence.Prompt, **settings: Any) -> tuple[Any, list[int], list[int]]:
    """A reply from an empty cache in which nothing was compiled, with tokens drafted and accepted of each step."""
    room = model.max_context - len(p.ids) - self.depth - 1
    if room < 2:
      raise ValueError(f"prompt {p.source!r} of {len(p.ids)} tokens does not fit a context of {model.max_context}")
    while True:
      self.compiled = False
      model.reset()
      stream = model.stream(p.ids, max_tokens=min(self.args.tokens, room), ignore_eos=p.synthetic, **settings)
      drafted, accepted, before = list[int](), list[int](), (0, 0)
      for _ in stream:
        s: Stats = stream.stats                            # counts of decided tokens, whatever was emitted of them
        now = sum(s.drafted), sum(s.accepted)
        drafted.append(now[0] - before[0])
        accepted.append(now[1] - before[1])
        before = now
      if not self.compiled: return stream.reply, drafted, accepted

  def probe(self, p: evidence.Prompt, ids: list[int], accepted: list[int], temperature: float,
            rule: str) -> dict[str, Any]:
    """What the draft's law says of the first place of the first steps, beside what came of it. The chance that the
    place is accepted is sum(min(p, q)) under rejection; later places hang on drafted tokens that nobody can see."""
    n = min(self.args.probe, len(accepted))
    out: dict[str, Any] = {"expected": None, "confidence": None}
    if not n: return out
    starts = [sum(1 + a for a in accepted[:i]) for i in range(n)]
    starts = [s for s in starts if s <= len(ids)]
    laws = self.model.logits([*p.ids, *ids[:starts[-1]]]) if rule == "rejection" else None
    expected, bins = list[float](), [[0, 0.0, 0] for _ in range(5)]
    for s, a in zip(starts, accepted):
      block = self.model.draft_block([*p.ids, *ids[:s]])
      if laws is not None and block.logits is not None:
        p_law, q_law = softmax(laws[len(p.ids) + s - 1], temperature), softmax(block.logits[0], temperature)
        expected.append(float(np.minimum(p_law, q_law).sum()))
      if block.confidence is not None:
        c = 1 / (1 + float(np.exp(-np.clip(block.confidence[0], -60, 60))))
        b = bins[min(int(5 * c), 4)]
        b[0], b[1], b[2] = b[0] + 1, b[1] + c, b[2] + (a > 0)
    if expected:
      e = np.minimum(expected, 1)
      out["expected"] = [len(e), float(e.sum()), float((e * (1 - e)).sum()), sum(a > 0 for a in accepted[:len(e)])]
    if any(b[0] for b in bins): out["confidence"] = bins
    return out

  def reply(self, p: evidence.Prompt, temperature: float, number: int) -> dict[str, Any]:
    """The record of one prompt at one temperature: speculative and plain decoding, which of them first by turns."""
    settings = {"temperature": temperature, "seed": self.args.seed + number}
    for speculative in (True, False) if number % 2 else (False, True):
      if speculative: fast, drafted, accepted = self.once(self.model, p, depth=self.depth, **settings)
      else: slow, _, _ = self.once(self.plain, p, depth=0, **settings)
    timed = lambda stats: [stats.tokens - stats.first_step, stats.seconds]
    s, rule = fast.stats, evidence.verifier(fast.stats.verifier)["rule"]
    starts = np.cumsum([0, *(1 + a for a in accepted[:-1])])
    by_position = {name: [sum(1 + a for a, at in zip(accepted, starts) if lo <= at < hi),
                          sum(1 for at in starts if lo <= at < hi)] for name, (lo, hi) in BINS.items()}
    return {"class": p.kind, "source": p.source, "turn": p.turn, "T": temperature, "verifier": s.verifier,
            "ctx_tokens": len(p.ids), "out_tokens": s.tokens, "steps": s.steps,
            "per_pos": [list(s.drafted), list(s.accepted)],
            "hist_accepted": [accepted.count(n) for n in range(self.depth + 1)],
            "hist_proposed": [drafted.count(n) for n in range(self.depth + 1)], "by_position": by_position,
            "truncated": fast.finish_reason != "stop", "loop": looped(fast.ids),
            "timed": timed(s), "timed_plain": timed(slow.stats),
            "same_as_width_1": fast.ids == slow.ids if temperature == 0 else None,
            "warnings": list(s.warnings), **self.probe(p, fast.ids, accepted, temperature, rule)}

# ------------------------------------------------------------------------------------------------ sums
def ratio(a: float, b: float) -> float | None: return float(a / b) if b else None

def cell_name(cell: dict[str, Any]) -> str:
  return f"{cell['name']}:{cell['turn']}" if cell["name"] == "chat" else cell["name"]

def cell(rows: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
  """Sums over the replies of one class, turn and temperature. Intervals draw sources, not replies or tokens."""
  places = np.sum([r["per_pos"] for r in rows], axis=0).tolist()
  hist, hist_proposed = (np.sum([r[key] for r in rows], axis=0).tolist() for key in ("hist_accepted", "hist_proposed"))
  total = lambda key: sum(r[key] for r in rows)
  steps, out_tokens, accepted = total("steps"), total("out_tokens"), sum(places[1])
  sources = dict[str, np.ndarray]()
  for r in rows:
    row = np.array([r["steps"] + sum(r["per_pos"][1]), r["steps"], *r["timed"], *r["timed_plain"],
                    *(x for name in BINS for x in r["by_position"][name])])
    sources[r["source"]] = sources.get(r["source"], np.zeros(6 + 2 * len(BINS))) + row
  sums = np.stack(list(sources.values()))
  al = lambda s: s[..., 0] / s[..., 1]
  speedup = lambda s: (s[..., 2] / s[..., 3]) / (s[..., 4] / s[..., 5])
  tok_s, tok_s_plain = ratio(*sums.sum(0)[2:4]), ratio(*sums.sum(0)[4:6])
  ctx, before = [r["ctx_tokens"] for r in rows], [places[0][0] if places[0] else 0, *places[1]]
  position = {name: np.sum([r["by_position"][name] for r in rows], axis=0).tolist() for name in BINS}
  probed = [r["expected"] for r in rows if r["expected"]]
  expected = np.sum(probed, axis=0) if probed else None
  sure = [r["confidence"] for r in rows if r["confidence"]]
  seen = [(n, c, a) for n, c, a in np.sum(sure, axis=0).tolist() if n] if sure else []
  return {
    "name": rows[0]["class"], "turn": rows[0]["turn"], "T": rows[0]["T"], "verifier": rows[0]["verifier"],
    "synthetic": rows[0]["class"] in evidence.SYNTHETIC, "prompts": len(sources), "replies": len(rows),
    "ctx_tokens": {"p50": float(np.quantile(ctx, .5)), "p95": float(np.quantile(ctx, .95))}, "out_tokens": out_tokens,
    "truncated": total("truncated"), "concurrency": 1, "steps": steps, "proposed": sum(places[0]),
    "accepted": accepted, "emitted": steps + accepted, "dropped": steps + accepted - out_tokens,
    "hist_accepted": {str(n): c for n, c in enumerate(hist)},
    "hist_proposed": {str(n): c for n, c in enumerate(hist_proposed) if c},
    "per_pos": {"proposed": places[0], "accepted": places[1], "rate": [ratio(a, d) for d, a in zip(*places)],
                "conditional": [ratio(a, b) for a, b in zip(places[1], before)]},
    "al": float(al(sums.sum(0))), "al_ci95": evidence.interval(sums, al, seed), "ci": "cluster-bootstrap-prompt",
    "acceptance_rate": ratio(accepted, sum(places[0])),
    "al_by_out_position": {name: ratio(n, s) for name, (n, s) in position.items()},
    "al_by_out_position_ci95": {
      name: evidence.interval(sums, lambda s, i=i: s[..., i] / s[..., i + 1], seed) for name, i in zip(BINS, range(6, 99, 2))},
    "steps_by_out_position": {name: s for name, (_, s) in position.items()},
    "expected_first": None if expected is None else {
      "steps": int(expected[0]), "expected": float(expected[1] / expected[0]),
      "realised": float(expected[3] / expected[0]), "z": ratio(expected[3] - expected[1], expected[2] ** .5)},
    "confidence_first": [{"steps": n, "said": c / n, "realised": a / n} for n, c, a in seen] or None,
    "tok_s": tok_s, "tok_s_plain": tok_s_plain, "speedup": ratio(tok_s, tok_s_plain) if tok_s and tok_s_plain else None,
    "speedup_ci95": evidence.interval(sums, speedup, seed), "repeat_loop_rate": total("loop") / len(rows),
    "differ_from_width_1": sum(r["same_as_width_1"] is False for r in rows) if rows[0]["T"] == 0 else None}

def spread_mix(mix: dict[str, float] | None, names: Sequence[str]) -> dict[str, float]:
  """Weights by cell: a class of several cells is split over them. None: every class alike. Raises ValueError."""
  if mix is None: mix = dict.fromkeys((n.split(":")[0] for n in names), 1.0)
  out = dict[str, float]()
  for name, weight in mix.items():
    cells = [n for n in names if name in (n, n.split(":")[0])]
    if not cells:
      raise ValueError(f"--mix: {name!r} was not measured as a real class, want some of {', '.join(names) or 'none'}")
    for n in cells: out[n] = out.get(n, 0) + weight / len(cells)
  return {n: w / sum(out.values()) for n, w in out.items()}

def headline(cells: Sequence[dict[str, Any]], weights: dict[str, float]) -> dict[str, float | None]:
  """Over the mix, by tokens: the time that each class takes adds up, so both are harmonic means."""
  by_name = {cell_name(c): c for c in cells}
  mean = lambda key: (None if any(not by_name[n][key] for n, w in weights.items() if w)
                      else 1 / sum(w / by_name[n][key] for n, w in weights.items() if w))
  return {"tokens_per_step": mean("al"), "speedup": mean("speedup")}

def summarise(head: dict[str, Any], rows: Sequence[dict[str, Any]], mix: dict[str, float] | None) -> dict[str, Any]:
  """The summary of one or several files. Raises ValueError for records that can't be of one run."""
  groups = dict[tuple[Any, ...], list[dict[str, Any]]]()
  for r in rows: groups.setdefault((r["T"], r["class"], r["turn"]), []).append(r)
  for key, group in groups.items():
    if len({r["verifier"] for r in group}) > 1: raise ValueError(f"{key[1]}: records of several verifiers")
  cells = [cell(groups[key], head["seed"]) for key in groups]
  warnings = [f"{cell_name(c)} at temperature {c['T']:g}: {c['out_tokens']} tokens, and fewer than {SHORT} say little"
              for c in cells if c["out_tokens"] < SHORT]
  warnings += [f"{r['class']} {r['source']}: {text}" for r in rows for text in r["warnings"]]
  if len(rows) < head["jobs"]: warnings.append(f"{len(rows)} of {head['jobs']} replies: a shard, or interrupted")
  lines, weights = [], {}
  for t in dict.fromkeys(c["T"] for c in cells):
    real = [c for c in cells if c["T"] == t and not c["synthetic"]]
    if not real: continue
    weights = spread_mix(mix, [cell_name(c) for c in real])
    lines.append({"T": t, "verifier": real[0]["verifier"], "classes": list(weights), **headline(real, weights)})
  if not lines: warnings.append("no headline: only synthetic classes were measured")
  labels = dict.fromkeys((c["T"], c["verifier"]) for c in cells)
  agree = all(abs(c["al"] - 1 - c["accepted"] / c["steps"]) < 1e-9 for c in cells)
  keep = ("date", "command", "commit", "tinygrad", "device", "seed", "tokens", "limit", "prompts_sha256")
  z = [c["expected_first"]["z"] for c in cells if c["expected_first"] and c["expected_first"]["z"] is not None]
  return {"schema": SCHEMA, "run": {**{k: head[k] for k in keep}, "replies": len(rows), "jobs": head["jobs"]},
          "target": {"id": head["model"], "sha256": head["fingerprint"], "numerics": head["numerics"]},
          "draft": {"kind": head["draft"], "block": head["depth"]},
          "verifiers": [{"T": t, **evidence.verifier(v)} for t, v in labels],
          "classes": cells, "headlines": lines,
          "mix": {"name": "given" if mix else "every class alike", "weights_by_tokens": weights} if weights else None,
          "checks": {"al_eq_1_plus_accepted_over_steps": agree,
                     "realised_vs_expected_z": float(np.sum(z) / len(z) ** .5) if z else None,
                     "repeat_loop_rate": sum(r["loop"] for r in rows) / len(rows)},
          "warnings": list(dict.fromkeys(warnings))}

# ------------------------------------------------------------------------------------------------ the validator
def validate(s: Any) -> None:
  """Raises ValueError that names the first thing in a summary that does not add up, or lacks what it stands on."""
  def need(ok: bool, where: str, what: str) -> None:
    if not ok: raise ValueError(f"accept summary: {where}: {what}")
  close = lambda a, b: a is not None and b is not None and abs(a - b) <= 1e-4 * max(1, abs(b))
  try:
    need(s["schema"] == SCHEMA, "schema", f"{s['schema']!r}, want {SCHEMA!r}")
    need(bool(s["classes"]), "classes", "none measured")
    for i, c in enumerate(s["classes"]):
      need(bool(c.get("name")), f"classes[{i}]", "no class name")
      where = f"{cell_name(c)} at temperature {c['T']:g}"
      need(bool(c.get("verifier")), where, "no verifier label")
      v, pp = evidence.verifier(c["verifier"]), c["per_pos"]
      need(v["family"] in LOSSLESS or not c["speedup"], where, f"a verifier of family {v['family']!r} with a speed-up")
      need(v["family"] != "exact" or v["stop_rule"] != "noncausal" or v["q_source"] == "one-hot", where,
           "exact with a noncausal stop rule")
      need(c["steps"] > 0 and c["prompts"] > 0, where, "no steps")
      for name, got, want in (
          ("accepted", c["accepted"], sum(pp["accepted"])), ("proposed", c["proposed"], sum(pp["proposed"])),
          ("emitted", c["emitted"], c["steps"] + c["accepted"]),
          ("out_tokens", c["out_tokens"], c["emitted"] - c["dropped"]),
          ("steps of hist_accepted", sum(c["hist_accepted"].values()), c["steps"]),
          ("tokens of hist_accepted", sum(int(n) * k for n, k in c["hist_accepted"].items()), c["accepted"]),
          ("proposed of hist_proposed", sum(int(n) * k for n, k in c["hist_proposed"].items()), c["proposed"]),
          ("steps_by_out_position", sum(c["steps_by_out_position"].values()), c["steps"])):
        need(got == want, where, f"{name}={got}, want {want}")
      al, falling = c["emitted"] / c["steps"], sorted(pp["accepted"], reverse=True)
      need(close(c["al"], al), where, f"al={c['al']}, want emitted/steps={al:.4f}")
      need(pp["accepted"] == falling, where, "a place was accepted without the one before it")
      need(all(a <= d for a, d in zip(pp["accepted"], pp["proposed"])), where, "more accepted than proposed")
      for name in ("al", "speedup"):
        ci = c[f"{name}_ci95"]
        need(ci is None or len(ci) == 2 and ci[0] <= ci[1], where, f"{name}_ci95={ci}")
      need(c["speedup"] is None or close(c["speedup"], c["tok_s"] / c["tok_s_plain"]), where,
           "speedup is not tok_s/tok_s_plain")
      need(c["synthetic"] is (c["name"] in evidence.SYNTHETIC), where, f"synthetic={c['synthetic']}")
    for h in s["headlines"]:
      where = f"headline at temperature {h.get('T')}"
      need(bool(h.get("verifier")), where, "no verifier label")
      need(bool(h.get("classes")), where, "no class")
      need(bool(s.get("mix") and s["mix"].get("name") and s["mix"].get("weights_by_tokens")), where, "no mix")
      weights = s["mix"]["weights_by_tokens"]
      need(close(sum(weights.values()), 1), where, f"the mix adds up to {sum(weights.values())}")
      cells = {cell_name(c): c for c in s["classes"] if c["T"] == h["T"]}
      need(sorted(h["classes"]) == sorted(weights), where, "classes are not those of the mix")
      for n in weights:
        need(n in cells, where, f"class {n!r} was not measured")
        need(not cells[n]["synthetic"], where, f"class {n!r} is synthetic")
        need(cells[n]["verifier"] == h["verifier"], where, f"class {n!r} has another verifier")
      for name, want in headline(list(cells.values()), weights).items():
        need(h[name] == want if want is None else close(h[name], want), where, f"{name}={h[name]}, want {want}")
  except (KeyError, TypeError, AttributeError, IndexError) as error:
    raise ValueError(f"accept summary: {type(error).__name__} {error}, want what scripts/accept.py writes") from None

def load(path: Path) -> dict[str, Any]:
  """A validated summary: the last line of a file. Raises ValueError."""
  lines = path.read_text(encoding="utf-8").split("\n")
  try: summary = json.loads(next(line for line in reversed(lines) if line.strip()))
  except (StopIteration, ValueError):
    raise ValueError(f"{path.name}: the last line is no JSON, want a summary") from None
  validate(summary)
  return summary

# ------------------------------------------------------------------------------------------------ for people
def show(s: dict[str, Any]) -> str:
  pair = lambda ci, digits=2: f"{ci[0]:.{digits}f}..{ci[1]:.{digits}f}" if ci else "-"
  number = lambda x, digits=2: "-" if x is None else f"{x:.{digits}f}"
  percent = lambda xs: " ".join("-" if x is None else f"{100 * x:.0f}" for x in xs)
  rows = [["class", "T", "prompts", "tokens", "tokens/step", "95 %", "by place, %", "conditional, %",
           *(x for name in BINS for x in (name, "95 %")), "first: said/was", "speed-up", "95 %", "loops"]]
  for c in s["classes"]:
    e = c["expected_first"]
    rows.append([cell_name(c), f"{c['T']:g}", c["prompts"], c["out_tokens"], number(c["al"]), pair(c["al_ci95"]),
                 percent(c["per_pos"]["rate"]), percent(c["per_pos"]["conditional"]),
                 *(x for n in BINS for x in (number(c["al_by_out_position"][n]), pair(c["al_by_out_position_ci95"][n]))),
                 f"{e['expected']:.2f}/{e['realised']:.2f}" if e else "-", number(c["speedup"]),
                 pair(c["speedup_ci95"]), f"{c['repeat_loop_rate']:.0%}"])
  lines = [evidence.table(rows), *(f"verifier at temperature {v['T']:g}: {v['label']}" for v in s["verifiers"])]
  for h in s["headlines"]:
    mix = ", ".join(f"{n} {w:.0%}" for n, w in s["mix"]["weights_by_tokens"].items())
    lines.append(f"headline at temperature {h['T']:g}: {number(h['tokens_per_step'])} tokens/step, speed-up "
                 f"{number(h['speedup'])}, for the mix {mix}; {h['verifier']}")
  if (z := s["checks"]["realised_vs_expected_z"]) is not None:
    lines.append("accepted at the first place, beside the chance that both laws give it: "
                 f"z = {z:+.2f} (beyond 3.3 is a fault)")
  return "\n".join([*lines, *(f"warning: {text}" for text in s["warnings"])])

def draw(s: dict[str, Any], path: Path) -> list[str]:
  """Tokens a step and speed-up by class with intervals, and the chance of each place given those before it."""
  plt = evidence.plotting()
  names = list(dict.fromkeys(cell_name(c) for c in s["classes"]))
  temperatures = list(dict.fromkeys(c["T"] for c in s["classes"]))
  figure, axes = plt.subplots(1, 3, figsize=(14, 0.7 + 0.55 * max(5, len(names))))
  for ax, key, label in ((axes[0], "al", "tokens per step (1 is plain decoding)"),
                         (axes[1], "speedup", "speed-up over plain decoding")):
    for j, t in enumerate(temperatures):
      for c in (c for c in s["classes"] if c["T"] == t and c[key]):
        y = names.index(cell_name(c)) + 0.24 * (j - (len(temperatures) - 1) / 2)
        if ci := c[f"{key}_ci95"]: ax.plot(ci, [y, y], color=f"C{j}", linewidth=2)
        ax.plot([c[key]], [y], "o", color=f"C{j}", markerfacecolor="white" if c["synthetic"] else f"C{j}")
    ax.axvline(1, color="grey", linewidth=0.8, linestyle=":")
    ax.set_yticks(range(len(names)), [n.replace("_", " ") for n in names] if key == "al" else [""] * len(names))
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel(label)
  for j, t in enumerate(temperatures): axes[0].plot([], [], "o", color=f"C{j}", label=f"temperature {t:g}")
  axes[0].plot([], [], "o", color="grey", markerfacecolor="white", label="synthetic")
  figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=4, frameon=False, fontsize=9)
  hottest = temperatures[-1]
  for c in (c for c in s["classes"] if c["T"] == hottest):
    pp = c["per_pos"]
    rates = [(k, r) for k, (r, n) in enumerate(zip(pp["conditional"], [c["steps"], *pp["accepted"]]), 1) if n >= 10]
    if rates: axes[2].plot(*zip(*rates), marker=".", linestyle="--" if c["synthetic"] else "-",
                           label=cell_name(c).replace("_", " "))
  axes[2].set(xlabel=f"place in the block, temperature {hottest:g} (with 10 cases or more)",
              ylabel="accepted, if those before it were", ylim=(0, 1.02))
  axes[2].xaxis.get_major_locator().set_params(integer=True)
  axes[2].legend(fontsize=8)
  figure.tight_layout(rect=(0, 0, 1, 0.94))
  return evidence.save(figure, path)

# ------------------------------------------------------------------------------------------------ all of it
def measure(args: argparse.Namespace, said: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Head and records, those of an earlier run of the same file included."""
  specgrad.prepare()
  with tqdm(desc="accept", unit=" replies", file=sys.stderr, disable=None, dynamic_ncols=True) as bar:
    m = Measure(args, bar)
    found = evidence.prompts(m.model, args.prompts, args.classes, args.limit, args.seed)
    jobs = [(i, p, t) for i, (t, p) in enumerate((t, p) for t in args.temperature for p in found)]
    records = evidence.Records(args.out, m.head(said, len(jobs)), SETTINGS)
    done = {tuple(r[k] for k in KEY) for r in records.rows}
    mine = [j for j in jobs if j[0] % args.shard[1] == args.shard[0]]
    bar.reset(len(mine))
    for i, p, t in mine:
      if (p.kind, p.source, p.turn, t) not in done: records.add(rounded(m.reply(p, t, i)))
      bar.update()
  return records.head, records.rows

def run(argv: Sequence[str]) -> int:
  args = parse(argv)
  if args.check:
    load(args.check)
    print(f"{args.check.name}: adds up")
    return 0
  if args.plot: evidence.plotting()                        # before hours are spent
  head, rows = evidence.merged(args.merge, SETTINGS, KEY) if args.merge else measure(args, command("accept", argv))
  if not rows: raise ValueError("no replies: nothing of this shard was there to measure")
  summary = rounded(summarise(head, rows, args.mix))
  validate(summary)
  evidence.tell(summary, show(summary), draw, args.plot)
  return 0

def main(argv: Sequence[str] | None = None) -> int: return evidence.guarded("accept", run, argv)

if __name__ == "__main__": sys.exit(main())
