"""Do the errors of 4-bit weights, 8-bit activations, an 8-bit cache and a quantised draft add up? A factorial of them all.

Every cell is the target with one setting of each factor, on the same token streams (replies that the reference drew), so
that cells are compared position by position:

  weights  reference  dequantised weights, float32 throughout, but for what the cache factor switches
           w4a16      the same values; what operations hand on is rounded to bfloat16: products, norms, rotary queries,
                      residual streams, the draft's taps. No input of a product is quantised
           w4a8       packed weights; inputs of FP8 and FP4 products are rounded to e4m3 in groups of 128 besides
  kv       float32    window rows, compressed entries and indexer keys as computed, attention over them in float32
           fp8        rows of e4m3 with a bfloat16 tail, indexer keys of e2m1 with the Hadamard rotation of both sides,
                      and the bfloat16 steps of computing rows and attending to them: kv_write, compress, index_topk, index_best,
                      attend and its parts, and head_rope where it makes an indexer's query
  draft    full, quantised: all that the draft computes and holds, its ring included

reference/float32 and w4a8/fp8 are the numerics that ship, and must have their bits. A checkpoint in 4 bits has no other
weights to compare with: the weights factor then measures what computing with them rounds, and not what rounding them
lost, unless --reference names the checkpoint before it was quantised.

With d_W and d_KV the shifts of the logits and F the Fisher matrix, KL is about d'Fd/2, so that uncorrelated errors add up:
  I = KL(both) - KL(W) - KL(KV),  rho = I / (2 sqrt(KL(W) KL(KV))), in [-1, 1]
is their correlation: 0 where they add up, 1 where they are aligned, -1 where they cancel. Few positions carry most of the
KL, such as those at which a rounding moves an expert. KL is no square there, and rho may leave [-1, 1], so it is told again
over the quiet positions, at which KL is below 1e-3 in every cell. An exact verifier keeps the
draft out of the output law, so the draft is the control that must come out zero: at every probe, the target's logits
before a drafted block must have the same bits whichever draft wrote the block. A second reference cell, of its own
buffers, must differ from the first by 0 bits. Where a control fails, all is void, and the exit status is 1.
"""
from __future__ import annotations

import argparse
import copy
import datetime
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import audit
import evidence
from evidence import Parser, command, commit, device, rounded

import specgrad
from specgrad.toolchain import tinygrad_version

if TYPE_CHECKING:
  from specgrad.api import Model
  from specgrad.engine import Progress

SCHEMA = "specgrad.compose/1"
WEIGHTS, CACHES, DRAFTS = ("reference", "w4a16", "w4a8"), ("float32", "fp8"), ("full", "quantised")
CELLS = tuple(f"{w}/{kv}" for w in WEIGHTS for kv in CACHES)
REFERENCE, SHIPPED = CELLS[0], {"reference/float32": "reference", "w4a8/fp8": "w4a8"}
OF_THE_CACHE = ("kv_write", "compress", "index_topk", "index_best", "attend", "attend_part", "attend_merge")
SETTINGS = ("schema", "fingerprint", "reference", "tokens", "temperature", "probes", "seed", "prompts_sha256", "classes",
            "limit", "device")
KEY = ("class", "source", "turn")
ENTROPY = (0.1, 1.0)                                       # nats: ends of the strata sure, between, open
QUIET = 1e-3                                               # nats of KL
SUMS = ("kl", "hellinger2", "tv", "agree", "nll")
RESAMPLES, LEVEL = 10000, 0.05

def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Raises ValueError for flags it does not know and values out of range."""
  parser = Parser("compose", "How the errors of weights, activations, cache and draft add up.",
                  "The last line of stdout is a JSON object with all of it. Exit status 0: all controls hold.")
  add = parser.add_argument
  evidence.add_model(parser)
  add("--reference", type=Path, metavar="DIR", help="the same model before it was quantised, for the reference weights "
      "(default: those of --model, dequantised)")
  add("--prompts", type=Path, metavar="FILE", help="JSONL as for scripts/accept.py (default: the checkpoint's)")
  add("--classes", metavar="A,B", help="of those in the prompts, synthetic_random, synthetic_repeat (default: all)")
  add("--limit", type=int, default=20, metavar="N", help="prompts of each class (default: %(default)s)")
  add("--tokens", type=int, default=128, metavar="N", help="at most this many a stream (default: %(default)s)")
  add("--temperature", type=float, default=1.0, metavar="T", help="of the streams; cells are compared at 1 "
      "(default: %(default)s)")
  add("--probes", type=int, default=4, metavar="N", help="places of a stream at which each draft writes a block, 0: no "
      "draft (default: %(default)s)")
  add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
  add("--out", type=Path, metavar="FILE", help="JSONL of the streams; a run that was interrupted goes on there")
  add("--shard", default="1/1", metavar="i/n", help="this machine's share of the streams")
  add("--merge", type=Path, nargs="+", metavar="FILE", help="sum up the files of several shards instead of running")
  add("--plot", type=Path, metavar="FILE", help="draw it, as PNG and SVG (needs the extra `plot`)")
  args = parser.parse_args(argv)
  for flag, value, least in (("--limit", args.limit, 1), ("--tokens", args.tokens, 1), ("--probes", args.probes, 0),
                             ("--seed", args.seed, 0)):
    if value < least: raise ValueError(f"{flag}={value}, want at least {least}")
  if not 0 <= args.temperature <= 100: raise ValueError(f"--temperature={args.temperature}, want 0 to 100")
  args.shard = evidence.shard(args.shard)
  args.classes = args.classes.split(",") if args.classes else None
  return args

# ------------------------------------------------------------------------------------------------ the cells
def operations_of(devices: Sequence[str], weights: str, kv: str) -> SimpleNamespace:
  """A target's operations, each from the factor that it belongs to."""
  from specgrad.quant import operations
  values, cache = operations(devices, weights != "reference"), operations(devices, kv == "fp8")

  def head_rope(*args: Any, index: bool = False, **more: Any) -> Any:
    return (cache if index else values).head_rope(*args, index=index, **more)
  return SimpleNamespace(**{**vars(values), **{n: getattr(cache, n) for n in OF_THE_CACHE}, "head_rope": head_rope})

class Cells:
  """Models that share the weights of the two numerics that ship; buffers and graphs are each one's own."""
  def __init__(self, folder: Path | None, devices: Sequence[str], draft: str, progress: Progress,
               wanted: Iterable[str] = CELLS, reference: Path | None = None):
    packed = {cell.startswith("w4a8") for cell in wanted} | ({True, False} if draft != "none" else set())
    self.shipped = {"w4a8" if p else "reference":
                    specgrad.load(folder if p else reference or folder, numerics="w4a8" if p else "reference",
                                  devices=devices, draft=draft, progress=progress) for p in sorted(packed)}
    configs = [m.config for m in self.shipped.values()]
    if configs[0] != configs[-1]:
      raise ValueError("--reference: its config.json differs from that of --model, want the same model")

  @property
  def any(self) -> Model: return next(reversed(self.shipped.values()))

  def make(self, cell: str, draft: str | None = None) -> Model:
    """A model of one cell, with its own draft of that kind, or without any."""
    from tinygrad import Tensor

    from specgrad.quant import lift
    weights, kv = cell.split("/")
    model = evidence.sibling(self.shipped["w4a8" if weights == "w4a8" else "reference"], kv == "fp8")
    engine, target = model.engine, copy.copy(model.engine.target)
    target.ops, target.w4a8 = operations_of(engine.devices, weights, kv), weights != "reference"  # w4a8: of the taps
    engine.target = target
    if draft:
      own: Any = copy.copy(self.shipped["w4a8" if draft == "quantised" else "reference"].engine.draft)
      like = lift(lambda t: Tensor.empty(*t.shape, dtype=t.dtype, device=t.device).realize())
      own.rings = [like(ring) for ring in own.rings]
      engine.draft = own
    return model

# ------------------------------------------------------------------------------------------------ one stream
def log_law(logits: np.ndarray) -> np.ndarray:
  z = logits.astype(np.float64)
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))

def by_position(ref: np.ndarray, logits: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """float32 (n, V) of the reference and of a cell, int (n,) what follows in the stream -> (len(SUMS), n): KL, squared
  Hellinger distance, total variation, same largest, loss in nats; and the reference's entropy (n,)."""
  values, entropy = np.zeros((len(SUMS), len(ref))), np.zeros(len(ref))
  for at in range(0, len(ref), 16):                        # a few rows at a time: the laws are float64
    lp, lq = (log_law(x[at:at + 16]) for x in (ref, logits))
    p, q, rows = np.exp(lp), np.exp(lq), slice(at, at + len(lp))
    half = np.sqrt(p) - np.sqrt(q)
    values[:, rows] = (np.maximum((p * (lp - lq)).sum(1), 0), (half * half).sum(1) / 2, np.abs(p - q).sum(1) / 2,
                       lp.argmax(1) == lq.argmax(1), -lq[np.arange(len(lq)), after[rows]])
    entropy[rows] = -(p * lp).sum(1)
  return values, entropy

def compare(ref: np.ndarray, logits: np.ndarray, after: np.ndarray) -> dict[str, Any]:
  """As by_position -> its sums by name; `hist`, positions by floor(10 log10 KL), which holds quantiles; and positions and
  KL of each stratum of the reference's entropy."""
  return summed(*by_position(ref, logits, after))

def summed(values: np.ndarray, entropy: np.ndarray) -> dict[str, Any]:
  bins, counts = np.unique(np.floor(10 * np.log10(np.maximum(values[0], 1e-20))).astype(int), return_counts=True)
  stratum = np.digitize(entropy, ENTROPY)
  return {"n": len(entropy), **{name: float(v.sum()) for name, v in zip(SUMS, values)},
          "hist": {str(b): int(c) for b, c in zip(bins, counts)},
          "strata": [[int((stratum == i).sum()), float(values[0][stratum == i].sum())] for i in range(3)]}

def quiet(kl: dict[str, np.ndarray]) -> dict[str, Any]:
  """KL by position of each cell -> the positions at which it is small in all of them, and its sums over these. There a
  shift of the logits is all there is; elsewhere a rounding may have moved an expert or a chosen entry, and KL is no square."""
  small = np.all([x < QUIET for x in kl.values()], axis=0)
  return {"n": int(small.sum()), **{cell: float(x[small].sum()) for cell, x in kl.items()}}

def bits(a: np.ndarray, b: np.ndarray) -> int:
  """Values of two float32 arrays that differ in any bit."""
  return int((a.view(np.uint32) != b.view(np.uint32)).sum())

class Measure:
  def __init__(self, args: argparse.Namespace, bar: Any):
    self.args = args

    def progress(stage: str, done: int, total: int) -> None:
      if stage == "compile": bar.set_postfix_str("compiling" if done < total else "")
    cells = Cells(args.model, args.devices, "auto", progress, reference=args.reference)
    self.shipped, self.model = cells.shipped, cells.any
    self.drafts = DRAFTS if args.probes and self.model.depth else ()
    self.cells = {c: {d: cells.make(c, d) for d in self.drafts} or {"": cells.make(c)} for c in CELLS}
    self.again = cells.make(REFERENCE)

  def head(self, said: str, jobs: int) -> dict[str, Any]:
    args, checkpoint = self.args, self.model.engine.checkpoint
    return {"schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": said, "commit": commit(), "tinygrad": tinygrad_version(),
            "device": device(self.model.engine.device), "model": checkpoint.folder.resolve().name,
            "fingerprint": checkpoint.fingerprint,
            "reference": self.shipped["reference"].engine.checkpoint.fingerprint if args.reference else None,
            "tokens": args.tokens, "temperature": args.temperature, "probes": args.probes if self.drafts else 0,
            "seed": args.seed, "prompts_sha256": evidence.sha(evidence.prompt_file(self.model, args.prompts)),
            "classes": args.classes, "limit": args.limit, "jobs": jobs}

  def stream(self, p: evidence.Prompt, number: int) -> dict[str, Any]:
    """The record of one stream. Only positions of the reply are compared."""
    args, room = self.args, self.model.max_context - len(p.ids) - 8
    if room < 1:
      raise ValueError(f"prompt {p.source!r} of {len(p.ids)} tokens does not fit a context of {self.model.max_context}")
    origin = self.shipped["reference"]
    origin.reset()
    reply = origin.generate(p.ids, max_tokens=min(args.tokens, room), temperature=args.temperature,
                            seed=args.seed + number, depth=0, ignore_eos=p.synthetic).ids
    ids, start = [*p.ids, *reply], len(p.ids) - 1
    law = lambda model: model.logits(ids[:-1])[start:]
    ref, after = law(self.cells[REFERENCE][self.drafts[0] if self.drafts else ""]), np.array(reply)
    shipped = {cell: law(self.shipped[name]) for cell, name in SHIPPED.items()}
    controls: dict[str, Any] = {"again": bits(ref, law(self.again)), "null": 0, "null_kl": 0.0}
    cells, blocks, kl = dict[str, Any](), dict[str, Any](), dict[str, np.ndarray]()
    places = sorted({int(x) for x in np.linspace(0, len(reply) - 1, args.probes)}) if self.drafts else []
    for cell, models in self.cells.items():
      first = next(iter(models.values()))
      logits = ref if cell == REFERENCE else law(first)
      if cell in shipped: controls[f"shipped {cell}"] = bits(logits, shipped[cell])
      if cell != REFERENCE:
        values, entropy = by_position(ref, logits, after)
        cells[cell], kl[cell] = summed(values, entropy), values[0]
      rows = dict[str, np.ndarray]()
      for draft in self.drafts:
        rows[draft], blocks[f"{cell}/{draft}"] = self.probe(models[draft], ids, [start + x for x in places])
      if rows:                                             # the anchor's law, before the one block and the other
        controls["null"] += bits(*rows.values())
        both = [compare(ref[places], r, after[places])["kl"] for r in rows.values()]
        controls["null_kl"] = max(controls["null_kl"], abs(both[1] - both[0]))
    return {"class": p.kind, "source": p.source, "turn": p.turn, "prompt_tokens": len(p.ids), "positions": len(reply),
            "reference_nll": compare(ref, ref, after)["nll"], "cells": cells, "quiet": quiet(kl),
            "blocks": blocks, "controls": controls}

  def probe(self, model: Model, ids: list[int], places: list[int]) -> tuple[np.ndarray, list[float]]:
    """Blocks drafted after ids[:place+1], each checked by the cell's own target -> its logits (n, V) at the anchors,
    and [blocks, sum of the overlap of both laws at the first place, drafted tokens that stand greedily]."""
    anchors, overlap, stand = list[np.ndarray](), 0.0, 0
    for at in places:
      block = model.draft_block(ids[:at + 1])
      rows = model.logits([*ids[:at + 1], *block.tokens.tolist()])[at:]
      assert block.logits is not None
      overlap += float(np.minimum(np.exp(log_law(rows[0])), np.exp(log_law(block.logits[0]))).sum())
      right = rows[:-1].argmax(1) == block.tokens
      stand += int(right.cumprod().sum())
      anchors.append(rows[0])
    return np.stack(anchors), [len(places), overlap, stand]

# ------------------------------------------------------------------------------------------------ sums
def quantile(hist: dict[str, int], share: float) -> float:
  """Of KL, from positions by floor(10 log10 KL): the middle of its bin."""
  bins = sorted((int(b), c) for b, c in hist.items())
  least, seen = share * sum(c for _, c in bins), 0
  for b, c in bins:
    seen += c
    if seen >= least: return 10 ** ((b + 0.5) / 10)
  return math.nan

def by_source(rows: Sequence[dict[str, Any]], values: Callable[[dict[str, Any]], list[float]]) -> np.ndarray:
  """(sources, m): the replies of one source hang together and are added up."""
  out = dict[str, np.ndarray]()
  for r in rows: out[r["source"]] = out.get(r["source"], 0) + np.array(values(r), float)
  return np.stack(list(out.values()))

def estimate(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int, bca: bool = False
             ) -> dict[str, Any]:
  with np.errstate(divide="ignore", invalid="ignore"): value = float(statistic(sums.sum(0, keepdims=True))[0])
  if not math.isfinite(value): return {"value": None, "ci95": None}
  return {"value": value, "ci95": evidence.interval(sums, statistic, seed, RESAMPLES, bca)}

def interaction(rows: Sequence[dict[str, Any]], weights: str, seed: int) -> dict[str, Any]:
  """Of the weights factor at one level with the cache, over sources: I and rho of KL, rho of the squared Hellinger
  distance (which saturates later) and over quiet positions alone, a test by random signs of I, and the least I that this
  many sources would show."""
  names = (f"{weights}/float32", "reference/fp8", f"{weights}/fp8")
  sums = by_source(rows, lambda r: [r["positions"], *(r["cells"][n][k] for k in ("kl", "hellinger2") for n in names)])
  calm = by_source(rows, lambda r: [r["quiet"]["n"], *(r["quiet"][n] for n in names), r["positions"]])
  index = lambda s, at: (s[:, at + 2] - s[:, at] - s[:, at + 1])
  rho = lambda s, at: index(s, at) / (2 * np.sqrt(s[:, at] * s[:, at + 1]))
  own, n = index(sums, 1), len(sums)
  signs = np.random.default_rng(seed).choice([-1.0, 1.0], (RESAMPLES, n))
  per_source = own / sums[:, 0]
  return {"I": estimate(sums, lambda s: index(s, 1) / s[:, 0], seed, True),
          "rho": estimate(sums, lambda s: rho(s, 1), seed, True),
          "rho_hellinger2": estimate(sums, lambda s: rho(s, 4), seed, True),
          "rho_quiet": estimate(calm, lambda s: rho(s, 1), seed, True), "quiet_share": float(calm[:, 0].sum() / calm[:, 4].sum()),
          "p_sign": float((1 + (np.abs(signs @ own) >= abs(own.sum()) - 1e-15).sum()) / (1 + RESAMPLES)),
          "least_I_shown": float((1.96 + 0.84) * per_source.std(ddof=1) / math.sqrt(n)) if n > 1 else None,
          "sources": n}

def group(rows: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
  """Everything of one class, or of all real ones."""
  cells = dict[str, Any]()
  for cell in (c for c in CELLS if c != REFERENCE):
    own = [r["cells"][cell] for r in rows]
    sums = by_source(rows, lambda r, c=cell: [r["positions"], *(r["cells"][c][k] for k in SUMS), r["reference_nll"]])
    hist, strata = dict[str, int](), np.sum([c["strata"] for c in own], axis=0)
    for c in own:
      for b, count in c["hist"].items(): hist[b] = hist.get(b, 0) + count
    mean = lambda i: (lambda s: s[:, i] / s[:, 0])
    cells[cell] = {"kl": estimate(sums, mean(1), seed), "kl_median": quantile(hist, .5), "kl_p99": quantile(hist, .99),
                   "kl_by_entropy": [float(k / n) if n else None for n, k in strata],
                   "hellinger2": float(mean(2)(sums.sum(0)[None])[0]), "tv": float(mean(3)(sums.sum(0)[None])[0]),
                   "top1": float(mean(4)(sums.sum(0)[None])[0]),
                   "nll_change": estimate(sums, lambda s: (s[:, 5] - s[:, 6]) / s[:, 0], seed)}
  blocks, contrasts = dict[str, Any](), dict[str, Any]()
  for name in rows[0]["blocks"]:
    sums = by_source(rows, lambda r, n=name: r["blocks"][n])
    blocks[name] = {"blocks": int(sums[:, 0].sum()), "overlap": estimate(sums, lambda s: s[:, 1] / s[:, 0], seed),
                    "tokens_per_step": estimate(sums, lambda s: 1 + s[:, 2] / s[:, 0], seed)}
  for cell in CELLS if rows[0]["blocks"] else ():          # what a quantised draft costs in acceptance, on this target
    sums = by_source(rows, lambda r, c=cell: [*r["blocks"][f"{c}/full"], *r["blocks"][f"{c}/quantised"]])
    contrasts[cell] = {"overlap": estimate(sums, lambda s: (s[:, 4] - s[:, 1]) / s[:, 0], seed),
                       "tokens_per_step": estimate(sums, lambda s: (s[:, 5] - s[:, 2]) / s[:, 0], seed)}
  strata = [sum(r["cells"][CELLS[-1]]["strata"][i][0] for r in rows) for i in range(3)]
  return {"streams": len(rows), "positions": sum(r["positions"] for r in rows), "positions_by_entropy": strata,
          "reference_nll": sum(r["reference_nll"] for r in rows) / sum(r["positions"] for r in rows), "cells": cells,
          "interaction": {w: interaction(rows, w, seed) for w in WEIGHTS[1:]}, "blocks": blocks,
          "draft_quantised_minus_full": contrasts}

def class_name(r: dict[str, Any]) -> str: return f"chat:{r['turn']}" if r["class"] == "chat" else r["class"]

def summarise(head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  names = list(dict.fromkeys(map(class_name, rows)))
  classes = {n: group([r for r in rows if class_name(r) == n], head["seed"]) for n in names}
  real = [r for r in rows if r["class"] not in evidence.SYNTHETIC]
  controls = {name: max(r["controls"][name] for r in rows) for name in rows[0]["controls"]}
  warnings = [f"{n}: {c['streams']} streams, and an interval of so few says little" for n, c in classes.items()
              if c["streams"] < 10]
  if len(rows) < head["jobs"]: warnings.append(f"{len(rows)} of {head['jobs']} streams: a shard, or interrupted")
  if not head["probes"]: warnings.append("no draft: the null control was not run")
  signs = {f"{n}, {w} x fp8": x["p_sign"] for n, c in classes.items() for w, x in c["interaction"].items()}
  return {**head, "streams": len(rows), "controls": controls, "valid": not any(controls.values()),
          "interactions_shown": audit.holm(signs, LEVEL),
          "all": group(real, head["seed"]) if real else None, "classes": classes, "warnings": warnings}

# ------------------------------------------------------------------------------------------------ for people
def show(s: dict[str, Any]) -> str:
  def pair(e: dict[str, Any], form: str) -> str:
    if e["value"] is None: return "-"
    ci = f" ({e['ci95'][0]:{form}}..{e['ci95'][1]:{form}})" if e["ci95"] else ""
    return f"{e['value']:{form}}{ci}"
  groups = {**({"all real": s["all"]} if s["all"] else {}), **s["classes"]}
  rows = [["class", "cell", "KL", "median", "99 %", "TV", "same top", "NLL change"]]
  for name, g in groups.items():
    rows += [[name, cell, pair(c["kl"], ".2e"), f"{c['kl_median']:.1e}", f"{c['kl_p99']:.1e}", f"{c['tv']:.4f}",
              f"{c['top1']:.2%}", pair(c["nll_change"], "+.4f")] for cell, c in g["cells"].items()]
  both = [["class", "weights x kv", "I", "rho", "rho (Hellinger)", "rho (quiet)", "quiet", "p by signs", "least I shown"]]
  for name, g in groups.items():
    both += [[name, f"{w} x fp8", pair(x["I"], "+.1e"), pair(x["rho"], "+.2f"), pair(x["rho_hellinger2"], "+.2f"),
              pair(x["rho_quiet"], "+.2f"), f"{x['quiet_share']:.1%}", f"{x['p_sign']:.3f}",
              "-" if x["least_I_shown"] is None else f"{x['least_I_shown']:.1e}"]
             for w, x in g["interaction"].items()]
  lines = [f"{s['model']}, {s['streams']} streams at temperature {s['temperature']:g}, {s['device']}",
           f"reference: {'another checkpoint' if s['reference'] else 'its own weights, dequantised'}, float32", "",
           evidence.table(rows), "", evidence.table(both)]
  if s["probes"]:
    drafts = [["class", "target", "draft", "overlap of the laws, first place", "tokens/step, greedy",
               "quantised - full: overlap", "tokens/step"]]
    for name, g in groups.items():
      for cell, x in g["draft_quantised_minus_full"].items():
        if g is not s["all"] and cell != CELLS[-1]: continue  # of each class the target that ships; all is in the JSON
        for d in DRAFTS:
          b, last = g["blocks"][f"{cell}/{d}"], d == DRAFTS[-1]
          drafts.append([name, cell, d, pair(b["overlap"], ".3f"), pair(b["tokens_per_step"], ".2f"),
                         pair(x["overlap"], "+.4f") if last else "", pair(x["tokens_per_step"], "+.3f") if last else ""])
    lines += ["", evidence.table(drafts)]
  c = s["controls"]
  lines += ["", f"interactions that the signs of I show, all classes together (Holm, {LEVEL:g}): "
            + ("; ".join(s["interactions_shown"]) or "none"), f"control, reference cell twice: {c['again']} values differ",
            *(f"control, {n.removeprefix('shipped ')} and the shipped numerics: {v} values differ"
              for n, v in c.items() if n.startswith("shipped")),
            f"control, draft on the output law: {c['null']} logits differ, KL by {c['null_kl']:g}",
            "all controls hold" if s["valid"] else "VOID: a control does not hold"]
  return "\n".join([*lines, *(f"warning: {text}" for text in s["warnings"])])

def draw(s: dict[str, Any], path: Path) -> list[str]:
  """KL of each cell, the interaction index over all and over quiet positions, and what a quantised draft changes."""
  plt = evidence.plotting()
  groups = {**({"all real": s["all"]} if s["all"] else {}), **s["classes"]}
  figure, axes = plt.subplots(1, 3, figsize=(14, 1.4 + 0.6 * max(4, len(groups))))

  def whisker(ax: Any, e: dict[str, Any], y: float, color: str, within: float = math.inf, **more: Any) -> None:
    """What lies beyond `within` ends in an arrow at it."""
    if e["value"] is None: return
    if e["ci95"]: ax.plot(np.clip(e["ci95"], -within, within), [y, y], color=color, linewidth=1.5)
    marker = "o" if abs(e["value"]) <= within else ">" if e["value"] > 0 else "<"
    ax.plot([np.clip(e["value"], -within, within)], [y], marker, color=color, markersize=5, **more)
  for i, g in enumerate(groups.values()):
    for j, (cell, c) in enumerate(g["cells"].items()):
      whisker(axes[0], c["kl"], i + 0.15 * (j - 2), f"C{j}", label=None if i else cell)
    for j, (weights, x) in enumerate(g["interaction"].items()):
      for k, (name, fill, said) in enumerate((("rho", f"C{j}", ""), ("rho_quiet", "white", ", quiet positions"))):
        whisker(axes[1], x[name], i + 0.18 * (2 * j + k - 1.5), f"C{j}", 2, markerfacecolor=fill,
                label=None if i else f"{weights} x fp8{said}")
    for j, (cell, x) in enumerate(g["draft_quantised_minus_full"].items()):
      whisker(axes[2], x["overlap"], i + 0.13 * (j - 2.5), f"C{j}", label=None if i else cell)
  axes[0].set(xscale="log", xlabel="KL to the reference, nats a position")
  axes[1].set(xlim=(-2.1, 2.1), xlabel="rho: 0 errors add up, 1 aligned, -1 they cancel")
  axes[1].axvspan(-1, 1, color="grey", alpha=0.1, linewidth=0)
  axes[2].set(xlabel="chance of a first drafted token to stand:\nquantised draft - full one, on each target")
  axes[2].locator_params(axis="x", nbins=5)
  for ax in axes:
    if ax is not axes[0]: ax.axvline(0, color="grey", linewidth=0.8, linestyle=":")
    ax.set_yticks(range(len(groups)), [n.replace("_", " ") for n in groups] if ax is axes[0] else [""] * len(groups))
    ax.set_ylim(len(groups) - 0.5, -0.5)
    if ax.get_legend_handles_labels()[0]:
      ax.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False)
  figure.tight_layout()
  return evidence.save(figure, path)

# ------------------------------------------------------------------------------------------------ all of it
def measure(args: argparse.Namespace, said: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Head and records, those of an earlier run of the same file included."""
  specgrad.prepare()
  with tqdm(desc="compose", unit=" streams", file=sys.stderr, disable=None, dynamic_ncols=True) as bar:
    m = Measure(args, bar)
    jobs = list(enumerate(evidence.prompts(m.model, args.prompts, args.classes, args.limit, args.seed)))
    records = evidence.Records(args.out, m.head(said, len(jobs)), SETTINGS)
    done, mine = {tuple(r[k] for k in KEY) for r in records.rows}, jobs[args.shard[0]::args.shard[1]]
    bar.reset(len(mine))
    for i, p in mine:
      if (p.kind, p.source, p.turn) not in done: records.add(rounded(m.stream(p, i)))
      bar.update()
  return records.head, records.rows

def run(argv: Sequence[str]) -> int:
  args = parse(argv)
  if args.plot: evidence.plotting()
  head, rows = evidence.merged(args.merge, SETTINGS, KEY) if args.merge else measure(args, command("compose", argv))
  if not rows: raise ValueError("no streams: nothing of this shard was there to measure")
  summary = rounded(summarise(head, rows))
  evidence.tell(summary, show(summary), draw, args.plot)
  return 0 if summary["valid"] else 1

def main(argv: Sequence[str] | None = None) -> int: return evidence.guarded("compose", run, argv)

if __name__ == "__main__": sys.exit(main())
