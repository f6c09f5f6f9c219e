"""What a token costs on a box of your own, from a measured run and your mix, and when it undercuts an API by the token.

  dollars an hour of work = capex (1 - residual) / (hours of its life x utilisation) + opex / utilisation + kW x $/kWh
  time of a request       = prompt tokens not cached / prefill rate + output tokens x sum(share of class / its tok/s)

Only measured figures of real text go in: made prompts are accepted far more often, and their price is nobody's. A draft
makes output cheaper and leaves prompts as they are. The run is one stream at a time, and so is the price.
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import accept
import evidence
from evidence import Parser, rounded

SCHEMA, PRICES = "specgrad.cost/1", Path(__file__).resolve().parent / "data" / "prices.json"
HOURS_A_YEAR, MILLION, STALE_DAYS = 8760, 1e6, 180
MADE = ("random", "repeat", *evidence.SYNTHETIC)           # kinds of prompts that nobody pays for

def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Raises ValueError for flags it does not know and values out of range."""
  parser = Parser("cost", "Dollars per million tokens, from a measured run.")
  add = parser.add_argument
  add("--measured", type=Path, required=True, metavar="FILE", help="what scripts/accept.py or scripts/bench.py printed")
  add("--prefill", metavar="N|FILE", help="prompt tokens a second, or what scripts/bench.py printed (default: that of "
      "--measured, if it has one)")
  add("--mix", metavar="A=W,B=W", help="share of each class in your output tokens (default: that of the run)")
  add("--temperature", type=float, metavar="T", help="of the run's temperatures (default: its highest)")
  add("--input", type=int, default=1000, metavar="N", help="prompt tokens of a request (default: %(default)s)")
  add("--output", type=int, default=500, metavar="N", help="output tokens of a request (default: %(default)s)")
  add("--cached", type=float, default=0.0, metavar="S", help="share of the prompt that an earlier turn left behind "
      "(default: 0)")
  add("--box", default="two-rtx-pro-6000", metavar="NAME", help="of the price file, for capex and watts "
      "(default: %(default)s)")
  add("--capex", type=float, metavar="$", help="instead of the box's")
  add("--watts", type=float, metavar="W", help="at the wall while it works, instead of the box's; measure it")
  add("--years", type=float, default=4.0, metavar="Y", help="of use (default: %(default)s)")
  add("--residual", type=float, default=0.0, metavar="S", help="share of capex that it still fetches then (default: 0)")
  add("--util", type=float, default=0.25, metavar="S", help="share of its life at work (default: %(default)s)")
  add("--opex", type=float, default=0.0, metavar="$", help="other cost of an hour, at work or not (default: 0)")
  add("--kwh", type=float, metavar="$", help="price of a kWh (default: the price file's)")
  add("--api", default="deepseek-v4-flash", metavar="NAME", help="of the price file, to break even against, or IN/OUT "
      "in dollars per million tokens (default: %(default)s)")
  add("--prices", type=Path, default=PRICES, metavar="FILE", help="dated prices (default: scripts/data/prices.json)")
  args = parser.parse_args(argv)
  for flag, value, ok, want in (
      ("--input", args.input, args.input >= 0, "at least 0"), ("--output", args.output, args.output >= 1, "at least 1"),
      ("--cached", args.cached, 0 <= args.cached <= 1, "0 to 1"),
      ("--years", args.years, 0 < args.years < 100, "above 0"), ("--opex", args.opex, args.opex >= 0, "at least 0"),
      ("--residual", args.residual, 0 <= args.residual < 1, "0 to below 1"),
      ("--util", args.util, 0 < args.util <= 1, "above 0, at most 1")):
    if not ok: raise ValueError(f"{flag}={value}, want {want}")
  for flag, value in (("--capex", args.capex), ("--watts", args.watts), ("--kwh", args.kwh)):
    if value is not None and not 0 <= value < float("inf"): raise ValueError(f"{flag}={value}, want at least 0")
  args.mix = accept.parse_mix(args.mix) if args.mix else None
  return args

# ------------------------------------------------------------------------------------------------ what was measured
def last_json(path: Path) -> dict[str, Any]:
  lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
  try:
    if isinstance(out := json.loads(lines[-1]), dict): return out
  except (IndexError, ValueError): pass
  raise ValueError(f"{path.name}: the last line is no JSON object, want what a script here printed")

def rates(path: Path, temperature: float | None, mix: dict[str, float] | None) -> dict[str, Any]:
  """Shares, and tok/s with and without the draft, of each real class of a run. Raises ValueError without any."""
  run = last_json(path)
  kind = str(run.get("schema"))
  if kind == accept.SCHEMA:
    accept.validate(run)
    cells = [(accept.cell_name(c), c["T"], c["synthetic"], c["tok_s"], c["tok_s_plain"], c["verifier"])
             for c in run["classes"]]
    default, device = run["mix"] and run["mix"]["weights_by_tokens"], run["run"]["device"]
  elif kind.startswith("specgrad.bench/"):
    try:
      cells = [(c["prompt_kind"], c["temperature"], c["prompt_kind"] in MADE, c["tok_s"], c["plain"]["tok_s"],
                c["verifier"]) for c in run["speculative"]]
    except (KeyError, TypeError): raise ValueError(f"{path.name}: not what scripts/bench.py prints") from None
    default, device = None, run.get("device", "unknown")
  else: raise ValueError(f"{path.name}: schema={kind}, want the output of scripts/accept.py or scripts/bench.py")
  for name, *_, label in cells:
    if evidence.verifier(label)["family"] not in accept.LOSSLESS:
      raise ValueError(f"{path.name}: {name} was measured with {label!r}, which is no lossless rule: no price for that")
  if not (real := [c for c in cells if not c[2] and c[3] and c[4]]):
    raise ValueError(f"{path.name}: synthetic prompts only, and a price needs real text, such as your own --prompts")
  if made := [n for n in mix or () if n in MADE or n in [c[0] for c in cells if c[2]]]:
    raise ValueError(f"--mix: {made[0]!r} is synthetic, and its speed is nobody's. Name real classes")
  temperature = max(c[1] for c in real) if temperature is None else temperature
  if not (at := [c for c in real if c[1] == temperature]):
    raise ValueError(f"--temperature={temperature:g}: not measured, want one of {', '.join(f'{c[1]:g}' for c in real)}")
  return {"temperature": temperature, "mix": accept.spread_mix(mix or default, [c[0] for c in at]), "device": device,
          "tok_s": {c[0]: c[3] for c in at}, "tok_s_plain": {c[0]: c[4] for c in at}, "verifier": at[0][5]}

def prefill_rate(given: str | None, measured: Path) -> float | None:
  """Prompt tokens a second: a number, or the fastest length of a bench run. Prompts of any kind take the same time."""
  if given is not None:
    with contextlib.suppress(ValueError):
      if not 0 < (value := float(given)) < float("inf"): raise OverflowError
      return value
  run = last_json(Path(given) if given is not None else measured)
  found = [x["tok_s"] for x in run.get("prefill") or () if x.get("tok_s")]
  if given is not None and not found:
    raise ValueError(f"--prefill={given}: no rate in it, want a number or a bench run")
  return max(found, default=None)

def prices(args: argparse.Namespace) -> dict[str, Any]:
  """What was given, and the rest from the price file with its date. Raises ValueError for a name that is not there."""
  try:
    table = json.loads(args.prices.read_text(encoding="utf-8"))
    date, boxes, apis = datetime.date.fromisoformat(table["date"]), table["boxes"], table["apis"]
    kwh = table["electricity"]["usd_per_kwh"]
  except (ValueError, KeyError, TypeError):
    raise ValueError(f"{args.prices.name}: no price file, want date, boxes, apis, electricity") from None
  if args.box not in boxes: raise ValueError(f"--box={args.box}, want one of {', '.join(boxes)}")
  box, api = boxes[args.box], apis.get(args.api)
  if api is None:
    try: api = dict(zip(("input", "output"), map(float, args.api.split("/")), strict=True)) | {"source": "given"}
    except ValueError:
      raise ValueError(f"--api={args.api}, want one of {', '.join(apis)}, or IN/OUT such as 0.14/0.28") from None
  own = args.capex is not None and args.watts is not None
  return {"date": str(date), "age_days": (datetime.date.today() - date).days, "box": "given" if own else args.box,
          "capex": box["capex"] if args.capex is None else args.capex,
          "watts": box["watts"] if args.watts is None else args.watts,
          "kwh": kwh if args.kwh is None else args.kwh, "box_source": "given" if own else box["source"],
          "api": args.api, "api_input": api["input"], "api_output": api["output"], "api_source": api["source"]}

# ------------------------------------------------------------------------------------------------ the sum
def hourly(capex: float, years: float, residual: float, opex: float, watts: float, kwh: float) -> tuple[float, float]:
  """Dollars of every hour of its life, and on top of them of an hour of work."""
  return capex * (1 - residual) / (years * HOURS_A_YEAR) + opex, watts / 1000 * kwh

def harmonic(tok_s: dict[str, float], mix: dict[str, float]) -> float:
  """Over shares of the tokens: what each class takes of the time adds up."""
  return 1 / sum(w / tok_s[n] for n, w in mix.items() if w)

def cost(fixed: float, energy: float, util: float, tok_s: float) -> float:
  """Dollars per million tokens."""
  return (fixed / util + energy) / (tok_s * 3600) * MILLION

def break_even(fixed: float, energy: float, worth: float) -> float | None:
  """The utilisation at which an hour of work costs what an API takes for its tokens (`worth`, dollars); above 1 it
  can't be reached. None where the power alone costs as much."""
  return fixed / (worth - energy) if worth > energy else None

def calculate(args: argparse.Namespace, run: dict[str, Any], prefill: float | None,
              price: dict[str, Any]) -> dict[str, Any]:
  fixed, energy = hourly(price["capex"], args.years, args.residual, args.opex, price["watts"], price["kwh"])
  fresh = args.input * (1 - args.cached)
  if fresh and prefill is None:
    raise ValueError("--prefill: the run has no prefill rate, want a number, a bench run, or --input 0")
  api = (args.input * price["api_input"] + args.output * price["api_output"]) / MILLION
  rows = dict[str, Any]()
  for name in ("tok_s", "tok_s_plain"):
    rate = harmonic(run[name], run["mix"])
    seconds = (fresh / prefill if prefill else 0.0) + args.output / rate
    hour = fixed / args.util + energy
    rows["speculative" if name == "tok_s" else "plain"] = {
      "tok_s": rate, "usd_per_m_out": cost(fixed, energy, args.util, rate), "seconds_per_request": seconds,
      "usd_per_request": hour * seconds / 3600, "energy_share": energy / hour if hour else 0.0,
      "break_even_util": break_even(fixed, energy, api * 3600 / seconds),
      "usd_per_m_out_by_util": {f"{u:g}": cost(fixed, energy, u, rate) for u in (1.0, 0.5, 0.25, 0.1)}}
  by_class = {n: cost(fixed, energy, args.util, r) for n, r in run["tok_s"].items()}
  return {"schema": SCHEMA, "prices": price, "run": {**run, "file": args.measured.name, "prefill_tok_s": prefill},
          "request": {"input": args.input, "cached": args.cached, "output": args.output, "usd_api": api},
          "years": args.years, "residual": args.residual, "util": args.util, "opex": args.opex,
          "usd_per_hour_fixed": fixed, "usd_per_hour_energy": energy,
          "usd_per_m_in": cost(fixed, energy, args.util, prefill) if prefill else None,
          "usd_per_m_out_by_class": by_class, **rows}

def show(x: dict[str, Any]) -> str:
  dollars = lambda v: "-" if v is None else f"${v:.4f}" if v < 0.1 else f"${v:.2f}"
  price, request = x["prices"], x["request"]

  def when(u: float | None) -> str:
    if u is None: return "never: the power alone costs more"
    return f"{u:.0%} at work" if u <= 1 else f"never: it would have to work {u:.1f} times round the clock"
  mix = ", ".join(f"{n} {w:.0%}" for n, w in x["run"]["mix"].items())
  rows = [["", "", "tok/s", "$/M in", "$/M out", "$/request", "break-even with " + price["api"]]]
  for name in ("speculative", "plain"):
    r = x[name]
    rows.append([name, "", f"{r['tok_s']:.1f}", dollars(x["usd_per_m_in"]), dollars(r["usd_per_m_out"]),
                 dollars(r["usd_per_request"]), when(r["break_even_util"])])
  utils = list(x["plain"]["usd_per_m_out_by_util"])
  table = [["$/M out, if at work", "", *(f"{float(u):.0%}" for u in utils)]]
  table += [[n, "", *(dollars(v) for v in x[n]["usd_per_m_out_by_util"].values())] for n in ("speculative", "plain")]
  lines = [f"{dollars(price['capex'])} over {x['years']:g} years, {x['residual']:.0%} left, {x['util']:.0%} at work, "
           f"{price['watts']:g} W at ${price['kwh']:g} a kWh while at work (box: {price['box']}; "
           f"{price['box_source']})",
           f"measured: {x['run']['file']} on {x['run']['device']}, temperature {x['run']['temperature']:g}, mix {mix}; "
           f"{x['run']['verifier']}",
           f"request: {request['input']} tokens in, {request['cached']:.0%} of them cached, {request['output']} out; "
           f"at {price['api']} {dollars(request['usd_api'])} ({price['api_source']})", "", evidence.table(rows), "",
           evidence.table(table), "",
           f"prices of {price['date']}; one stream at a time: batching is not in these figures"]
  if price["age_days"] > STALE_DAYS: lines.append(f"warning: the prices are {price['age_days']} days old")
  if x["run"]["device"].startswith("CPU"): lines.append("warning: the rates were measured on a CPU, not on such a box")
  return "\n".join(lines)

def run(argv: Sequence[str]) -> int:
  args = parse(argv)
  measured = rates(args.measured, args.temperature, args.mix)
  try: prefill = prefill_rate(args.prefill, args.measured)
  except OverflowError: raise ValueError(f"--prefill={args.prefill}, want a rate above 0") from None
  result = rounded(calculate(args, measured, prefill, prices(args)))
  print(show(result))
  print(json.dumps(result, allow_nan=False))
  return 0

def main(argv: Sequence[str] | None = None) -> int: return evidence.guarded("cost", run, argv)

if __name__ == "__main__": sys.exit(main())
