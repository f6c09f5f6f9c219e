"""Perplexity of a text by numerics and cache type, and the KL of each to a reference run of the same weights.

The text is cut into chunks of --context tokens, each behind a BOS and computed from an empty cache; every token but the
BOS is scored. Cells are those of scripts/compose.py: what computes (reference, w4a16, w4a8) / what the cache holds
(float32, fp8). The first cell is the reference of the others' KL. A perplexity is a number about a text and a tokenizer:
it compares cells of one run, not models. One JSON line a chunk (`--out`, can be resumed and sharded), a table, and a
summary as the last line of stdout.
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
import compose
import evidence
from evidence import Parser, command, commit, device, rounded

import specgrad
from specgrad.prompt import encode_chat
from specgrad.toolchain import tinygrad_version

if TYPE_CHECKING:
  from specgrad.api import Model

SCHEMA = "specgrad.perplexity/1"
SETTINGS = ("schema", "fingerprint", "cells", "context", "chunks", "text", "text_sha256", "device")
KEY = ("chunk",)

def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Raises ValueError for flags it does not know and values out of range."""
  parser = Parser("perplexity", "Perplexity of a text, and KL to a reference, by numerics and cache type.")
  add = parser.add_argument
  evidence.add_model(parser)
  add("--text", type=Path, metavar="FILE", help="UTF-8 text; or prompts.jsonl, whose texts and chats are scored each "
      "from its beginning (default: the checkpoint's prompts.jsonl)")
  add("--cells", default=",".join(compose.CELLS), metavar="A,B", help="of reference, w4a16, w4a8, each with /float32 or "
      "/fp8; the first is the reference (default: all six)")
  add("--context", type=int, default=512, metavar="N", help="tokens of a chunk, BOS included (default: %(default)s)")
  add("--chunks", type=int, metavar="N", help="only the first so many (default: all)")
  add("--out", type=Path, metavar="FILE", help="JSONL of the chunks; a run that was interrupted goes on there")
  add("--shard", default="1/1", metavar="i/n", help="this machine's share of the chunks")
  add("--merge", type=Path, nargs="+", metavar="FILE", help="sum up the files of several shards instead of running")
  add("--plot", type=Path, metavar="FILE", help="draw it, as PNG and SVG (needs the extra `plot`)")
  args = parser.parse_args(argv)
  args.cells = args.cells.split(",")
  if wrong := [c for c in args.cells if c not in compose.CELLS]:
    raise ValueError(f"--cells: {wrong[0]!r}, want some of {', '.join(compose.CELLS)}")
  if len(set(args.cells)) < len(args.cells): raise ValueError("--cells: one is there twice")
  for flag, value, least in (("--context", args.context, 2), ("--chunks", 1 if args.chunks is None else args.chunks, 1)):
    if value < least: raise ValueError(f"{flag}={value}, want at least {least}")
  args.shard = evidence.shard(args.shard)
  return args

# ------------------------------------------------------------------------------------------------ the text
def documents(model: Model, file: Path) -> list[tuple[str, list[int]]]:
  """(kind, ids without a BOS) of a text file, or of each line of a prompts file with `text` or `messages`. Raises
  ValueError for a checkpoint without a tokenizer and files that hold nothing."""
  if (tokenizer := model.tokenizer) is None: raise ValueError("this checkpoint has no tokenizer, so there is no text")
  try: text = file.read_text(encoding="utf-8")
  except UnicodeDecodeError as error: raise ValueError(f"{file.name}: byte {error.start} is not UTF-8") from None
  found = list[tuple[str, list[int]]]()
  if file.suffix != ".jsonl": found.append(("text", tokenizer.encode(text)))
  for number, line in enumerate(text.splitlines() if file.suffix == ".jsonl" else (), 1):
    try:
      row = json.loads(line)
      said = row.get("text") or row["messages"]
      ids = tokenizer.encode(said) if isinstance(said, str) else encode_chat(tokenizer, said)
      found.append((row.get("kind", "text"), ids[ids[:1] == [model.config.bos_token_id]:]))
    except (ValueError, KeyError, TypeError, AttributeError):
      raise ValueError(f"{file.name}: line {number} has no text, want an object with text or messages") from None
  if not any(ids for _, ids in found): raise ValueError(f"{file.name}: empty, want text")
  return found

def cut(found: Sequence[tuple[str, list[int]]], context: int, bos: int) -> list[tuple[str, list[int]]]:
  """(kind, [BOS, at most context-1 ids]) without overlap: all ids are in one chunk each."""
  size = context - 1
  return [(kind, [bos, *ids[at:at + size]]) for kind, ids in found for at in range(0, len(ids), size)]

# ------------------------------------------------------------------------------------------------ sums
def summarise(head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Means over tokens; intervals draw whole chunks."""
  reference, every = head["cells"][0], dict[str, Any]()
  for kind in ["all", *dict.fromkeys(r["kind"] for r in rows)]:
    own = [r for r in rows if kind in ("all", r["kind"])]
    cells = every[kind] = dict[str, Any]()
    for cell in head["cells"]:
      sums = np.array([[r["cells"][cell][k] for k in ("n", "nll", "kl", "tv", "agree")] + [r["cells"][reference]["nll"]]
                       for r in own])
      mean = lambda i: (lambda s: s[:, i] / s[:, 0])
      hist = dict[str, int]()
      for r in own:
        for b, count in r["cells"][cell]["hist"].items(): hist[b] = hist.get(b, 0) + count
      one = lambda i, sums=sums: float(sums[:, i].sum() / sums[:, 0].sum())
      cells[cell] = {"tokens": int(sums[:, 0].sum()), "chunks": len(own), "nll": one(1),
                     "perplexity": compose.estimate(sums, lambda s: np.exp(s[:, 1] / s[:, 0]), 0),
                     "nll_change": compose.estimate(sums, lambda s: (s[:, 1] - s[:, 5]) / s[:, 0], 0),
                     "kl": compose.estimate(sums, mean(2), 0), "kl_median": compose.quantile(hist, .5),
                     "kl_p99": compose.quantile(hist, .99), "tv": one(3), "top1": one(4)}
  warnings = [f"{len(rows)} of {head['jobs']} chunks: a shard, or interrupted"] if len(rows) < head["jobs"] else []
  return {**head, "done": len(rows), "kinds": every, "warnings": warnings}

def show(s: dict[str, Any]) -> str:
  def pair(e: dict[str, Any], form: str) -> str:
    return f"{e['value']:{form}}" + (f" ({e['ci95'][0]:{form}}..{e['ci95'][1]:{form}})" if e["ci95"] else "")
  rows = [["text", "cell", "tokens", "perplexity", "nats/token", "change", "KL", "median", "99 %", "same top"]]
  for kind, cells in s["kinds"].items():
    if len(s["kinds"]) == 2 and kind == "all": continue    # it is the only kind
    for cell, c in cells.items():
      same = cell == s["cells"][0]
      rows.append([kind, cell, c["tokens"], pair(c["perplexity"], ".4g"), f"{c['nll']:.4f}",
                   *(["reference", *[""] * 4] if same else [pair(c["nll_change"], "+.5f"), pair(c["kl"], ".1e"),
                     f"{c['kl_median']:.0e}", f"{c['kl_p99']:.0e}", f"{c['top1']:.2%}"])])
  return "\n".join([f"{s['model']}, {s['text']}, chunks of {s['context']} tokens, {s['device']}", "",
                    evidence.table(rows), *(f"warning: {text}" for text in s["warnings"])])

def draw(s: dict[str, Any], path: Path) -> list[str]:
  """How far the loss and the law of each cell are from the reference's, by kind of text."""
  plt, others = evidence.plotting(), s["cells"][1:]
  kinds = [k for k in s["kinds"] if len(s["kinds"]) > 2 or k != "all"]
  figure, axes = plt.subplots(1, 2, figsize=(10, 1.4 + 0.5 * max(3, len(kinds))))
  for ax, key, label in ((axes[0], "nll_change", "change of the loss, nats a token"),
                         (axes[1], "kl", f"KL to {s['cells'][0]}, nats a token")):
    for i, kind in enumerate(kinds):
      for j, cell in enumerate(others):
        e, y = s["kinds"][kind][cell][key], i + 0.14 * (j - (len(others) - 1) / 2)
        if e["ci95"]: ax.plot(e["ci95"], [y, y], color=f"C{j}", linewidth=1.5)
        ax.plot([e["value"]], [y], "o", markersize=5, color=f"C{j}", label=cell if ax is axes[1] and not i else None)
    ax.set_yticks(range(len(kinds)), kinds if ax is axes[0] else [""] * len(kinds))
    ax.set(ylim=(len(kinds) - 0.5, -0.5), xlabel=label)
  axes[0].axvline(0, color="grey", linewidth=0.8, linestyle=":")
  axes[0].ticklabel_format(axis="x", scilimits=(-3, 3))
  if others:
    axes[1].set_xscale("log")
    figure.legend(loc="upper center", ncols=len(others), frameon=False, fontsize=8)
  figure.tight_layout(rect=(0, 0, 1, 0.92))
  return evidence.save(figure, path)

# ------------------------------------------------------------------------------------------------ all of it
def measure(args: argparse.Namespace, said: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Head and records, those of an earlier run of the same file included."""
  specgrad.prepare()
  with tqdm(desc="perplexity", unit=" chunks", file=sys.stderr, disable=None, dynamic_ncols=True) as bar:
    def progress(stage: str, done: int, total: int) -> None:
      if stage == "compile": bar.set_postfix_str("compiling" if done < total else "")
    cells = compose.Cells(args.model, args.devices, "none", progress, args.cells)
    model, checkpoint = cells.any, cells.any.engine.checkpoint
    if args.context > model.max_context + 1:
      raise ValueError(f"--context={args.context}, want at most {model.max_context + 1}")
    text = evidence.prompt_file(model, args.text)
    jobs = list(enumerate(cut(documents(model, text), args.context, model.config.bos_token_id)))[:args.chunks]
    head = {"schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "command": said,
            "commit": commit(), "tinygrad": tinygrad_version(), "device": device(model.engine.device),
            "model": checkpoint.folder.resolve().name, "fingerprint": checkpoint.fingerprint, "cells": args.cells,
            "context": args.context, "chunks": args.chunks, "text": text.name, "text_sha256": evidence.sha(text),
            "jobs": len(jobs)}
    records = evidence.Records(args.out, head, SETTINGS)
    done, mine = {r["chunk"] for r in records.rows}, jobs[args.shard[0]::args.shard[1]]
    models = {cell: cells.make(cell) for cell in args.cells}
    bar.reset(len(mine))
    for i, (kind, ids) in mine:
      if i not in done:
        laws = {cell: m.logits(ids[:-1]) for cell, m in models.items()}
        ref, after = laws[args.cells[0]], np.array(ids[1:])
        if not all(np.isfinite(x).all() for x in laws.values()): raise ArithmeticError(f"chunk {i}: logits not finite")
        records.add(rounded({"chunk": i, "kind": kind,
                             "cells": {cell: compose.compare(ref, x, after) for cell, x in laws.items()}}))
      bar.update()
  return records.head, records.rows

def run(argv: Sequence[str]) -> int:
  args = parse(argv)
  if args.plot: evidence.plotting()
  head, rows = evidence.merged(args.merge, SETTINGS, KEY) if args.merge else measure(args, command("perplexity", argv))
  if not rows: raise ValueError("no chunks: nothing of this shard was there to measure")
  summary = rounded(summarise(head, rows))
  evidence.tell(summary, show(summary), draw, args.plot)
  return 0

def main(argv: Sequence[str] | None = None) -> int: return evidence.guarded("perplexity", run, argv)

if __name__ == "__main__": sys.exit(main())
