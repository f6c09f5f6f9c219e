"""Looks at the machine before a model does: what is there, what works, and for each fault what mends it.

Peer access between GPUs is tried, not asked for: data is copied both ways by a child process with a time limit and
compared, since some systems report success and move nothing, and others wait for ever. Nothing is changed anywhere.
Exit code 0: nothing is wrong (also without any GPU, for the CPU path); 1: something is, and its line says what to do.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from specgrad.toolchain import GOOD, ToolchainError, cache_dirs, find_compiler, usable

ROOT, GIB = Path(__file__).resolve().parents[1], 1 << 30

@dataclass(frozen=True)
class Finding:
  """level: "ok", "note" (works and could be better, or could not be looked at) or "wrong", which makes exit code 1."""
  level: str
  what: str
  found: str
  remedy: str = ""

@dataclass(frozen=True)
class Machine:
  """Where its state is read from; tests put made-up trees in place of these."""
  sys: Path = Path("/sys")
  proc: Path = Path("/proc")
  smi: str = "nvidia-smi"
  env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

def read(path: Path) -> str:
  """A small file's text without blanks at its ends, '' if it can't be read."""
  try: return path.read_text(errors="replace").strip()
  except OSError: return ""

# -- child processes -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Ran:
  """state: "done", "failed" (text is the last line it wrote) or "hung" (it was stopped at the time limit)."""
  state: str
  text: str

def run(command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> Ran:
  """A child that is given up after `timeout` seconds, even if the system can't end it: a process that waits inside a
  driver may outlive its kill."""
  try:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True, errors="replace", start_new_session=True, cwd=ROOT,
                             env=None if env is None else dict(env))
  except OSError as e: return Ran("failed", f"{command[0]}: {e.strerror}")
  try: out, error = child.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    with contextlib.suppress(OSError): os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired): child.wait(5)
    return Ran("hung", f"no end after {timeout:g} s")
  if child.returncode == 0: return Ran("done", out.strip())
  lines = [line.strip() for line in (error.strip() or out.strip() or f"exit code {child.returncode}").splitlines()]
  return Ran("failed", next(line for line in reversed(lines) if line)[:300])

def python(code: str, arguments: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> Ran:
  return run([sys.executable, "-c", code, *arguments], timeout, env)

OPEN = """
import sys
from specgrad import toolchain
toolchain.prepare()
from specgrad.engine import open_device
open_device(sys.argv[1])
from tinygrad import Tensor
assert (Tensor([1, 2], device=sys.argv[1]) + 1).tolist() == [2, 3], "1 + 1 is not 2 here"
"""
# one line of JSON: whether the driver offers peer access; wrong bytes of each direction; GB/s of the slower one
PEER = """
import json, sys, time
from specgrad import toolchain
toolchain.prepare()
import numpy as np
from tinygrad import Device, Tensor
names, size, rng = sys.argv[1:3], int(sys.argv[3]), np.random.default_rng()
devices = [Device[name] for name in names]
wrong, speed = [], []
for source, target in (names, names[::-1]):
  bad = 0
  for _ in range(3):
    data = rng.integers(0, 256, size, np.uint8)
    there = Tensor(data, device=source).realize()
    for d in devices: d.synchronize()
    began = time.perf_counter()
    here = there.to(target).realize()
    for d in devices: d.synchronize()
    took = time.perf_counter() - began
    bad += int((here.numpy() != data).sum())
  wrong.append(bad)
  speed.append(size / took / 1e9)
peer = getattr(type(devices[0]), "peer_access", None)
print(json.dumps({"peer": peer, "wrong": wrong, "gbs": min(speed)}))
"""

def last_json(text: str) -> dict[str, object]:
  try: value = json.loads(text.splitlines()[-1])
  except (ValueError, IndexError): return {}
  return value if isinstance(value, dict) else {}

# -- the CPU's side --------------------------------------------------------------------------------------------------

def check_compiler(machine: Machine) -> Finding:
  """tinygrad compiles with it even where a GPU does the work."""
  try: path, version = find_compiler(machine.env)
  except ToolchainError as e:
    return Finding("wrong", "compiler", str(e), "pip install 'specgrad[cpu]', or a package of clang")
  major = re.search(r"clang version (\d+)", version)
  if major and int(major[1]) < GOOD:
    return Finding("note", "compiler", f"{version} ({path}): slow at half precision", "pip install 'specgrad[cpu]'")
  return Finding("ok", "compiler", f"{version} ({path})")

def check_cache(machine: Machine) -> Finding:
  """The first of the toolchain's folders should do; the last one is made anew each time, so it is no place to keep."""
  folders = cache_dirs(machine.env)
  best = next(folders)
  if usable(best):
    free = shutil.disk_usage(best).free
    if free < GIB:
      return Finding("note", "cache", f"{best}: {free >> 20} MiB free", "make room: kernels take up to 1 GiB")
    return Finding("ok", "cache", f"{best}, {free / GIB:.0f} GiB free")
  remedy = f"chown $USER {best} && chmod 700 {best}, or set XDG_CACHE_HOME to a folder of yours"
  if usable(second := next(folders)):
    return Finding("note", "cache", f"{best} can't be used (no write access, or others may write there); {second} is, "
                   "and may be emptied at a restart", remedy)
  return Finding("wrong", "cache", f"neither {best} nor {second} can be used: every start compiles all kernels", remedy)

def check_memory(machine: Machine) -> Finding:
  """Free host memory, and less if a container is allowed less."""
  match = re.search(r"MemAvailable:\s+(\d+) kB", read(machine.proc / "meminfo"))
  if match is None:
    return Finding("note", "memory", f"{machine.proc / 'meminfo'} can't be read", "look at the free memory yourself")
  free, limit = int(match[1]) << 10, read(machine.sys / "fs/cgroup/memory.max")
  used = read(machine.sys / "fs/cgroup/memory.current")
  if limit.isdigit() and used.isdigit(): free = min(free, int(limit) - int(used))
  said = f"{free / GIB:.1f} GiB of host memory free"
  if free >= 3 * GIB: return Finding("ok", "memory", said)
  return Finding("note", "memory", said, "close programs or raise the container's limit: loading takes up to 2 GiB "
                 "beside what the devices hold, and on the CPU the whole model")

def check_cpu_device(timeout: float, code: str = OPEN) -> Finding:
  ran = python(code, ["CPU"], timeout)
  if ran.state == "done": return Finding("ok", "CPU", "tinygrad opens it and computes")
  return Finding("wrong", "CPU", f"tinygrad can't use it: {ran.text}", "mend what the other lines say, then "
                 "pip install --force-reinstall 'tinygrad>=0.14,<0.15'")

# -- GPUs as the system sees them ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Card:
  """An NVIDIA GPU on the PCI bus. speeds are in GT/s a lane, 0 if not known; path is resolved, so its parents are the
  bridges above it."""
  address: str
  device: int
  path: Path
  driver: str     # of the kernel, '' if none has taken it
  speed: float
  max_speed: float
  width: int
  max_width: int

GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s
BLACKWELL = 0x2900                     # PCI device ids from here on
OLDEST_DRIVER, OLDEST_BLACKWELL = 525, 570  # CUDA 12; and the first that knows Blackwell
ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

def number(text: str) -> float:
  match = re.match(r"\d+(\.\d+)?", text)
  return float(match[0]) if match else 0.0

def cards(machine: Machine) -> list[Card]:
  found = []
  for entry in sorted((machine.sys / "bus/pci/devices").glob("*")):
    if read(entry / "vendor") != "0x10de" or not read(entry / "class").startswith(("0x0300", "0x0302")): continue
    value = lambda name, entry=entry: number(read(entry / name))
    driver = entry / "driver"
    try: device = int(read(entry / "device"), 16)
    except ValueError: device = 0
    found.append(Card(entry.name, device, entry.resolve(), driver.resolve().name if driver.exists() else "",
                      value("current_link_speed"), value("max_link_speed"), int(value("current_link_width")),
                      int(value("max_link_width"))))
  return found

def check_driver(machine: Machine, gpus: list[Card]) -> list[Finding]:
  """That NVIDIA's kernel module has the cards and is new enough for them."""
  text = read(machine.proc / "driver/nvidia/version")
  match = re.search(r"NVRM version:.*?\s(\d+)\.(\d+)", text)
  for card in gpus:
    if card.driver == "nouveau":
      return [Finding("wrong", "driver", f"nouveau has {card.address}",
                      "install NVIDIA's driver, which shuts nouveau out, and restart")]
    if card.driver.startswith("vfio"):
      return [Finding("wrong", "driver", f"{card.driver} has {card.address}: it is set aside for a virtual machine",
                      "remove the card from the vfio-pci ids (modprobe.d or the kernel's command line), then restart")]
  if match is None:
    return [Finding("wrong", "driver", "NVIDIA's kernel module is not loaded", "install the driver (nvidia-driver-"
                    f"{OLDEST_BLACKWELL}-open or later) and restart; if it is installed, `sudo modprobe nvidia` and "
                    "`dmesg | grep -i nvrm` say why it does not load (Secure Boot or a new kernel, usually)")]
  major, name, open_module = int(match[1]), f"{match[1]}.{match[2]}", "Open Kernel Module" in text
  new = [card.address for card in gpus if card.device >= BLACKWELL]
  oldest = OLDEST_BLACKWELL if new else OLDEST_DRIVER
  kind = "open kernel module" if open_module else "closed kernel module"
  if major < oldest:
    card_ = f" for the Blackwell card {new[0]}" if new else ""
    return [Finding("wrong", "driver", f"{name}, want {oldest} or later{card_}",
                    f"install nvidia-driver-{oldest}-open or later, and restart")]
  if not open_module and new:
    return [Finding("wrong", "driver", f"{name}, {kind}: Blackwell cards need the open one",
                    "install the -open variant of the same driver, and restart")]
  if not open_module:
    return [Finding("note", "driver", f"{name}, {kind}: enough for CUDA, but tinygrad's NV devices time out on it",
                    "use CUDA devices, or install the -open variant")]
  return [Finding("ok", "driver", f"{name}, {kind}")]

def check_smi(machine: Machine, timeout: float) -> list[Finding]:
  """What nvidia-smi can tell: the card's names and how much of their memory is free."""
  if shutil.which(machine.smi, path=machine.env.get("PATH", os.defpath)) is None:
    return [Finding("note", "nvidia-smi", "not found: free memory of the GPUs is not known",
                    "install the driver's tools (nvidia-utils), or let the container have them")]
  ran = run([machine.smi, "--query-gpu=pci.bus_id,name,memory.total,memory.free,power.limit",
             "--format=csv,noheader,nounits"], timeout, machine.env)
  if ran.state == "hung":
    return [Finding("wrong", "nvidia-smi", f"{ran.text}: the driver does not answer",
                    "restart the machine; look for Xid in `dmesg`, and reseat the card if it comes back")]
  if ran.state == "failed":
    remedy = ("restart: the driver was updated under the running one" if "mismatch" in ran.text.lower() else
              "`sudo modprobe nvidia`, then look at `dmesg | grep -i nvrm`")
    return [Finding("wrong", "nvidia-smi", ran.text, remedy)]
  found = []
  for line in ran.text.splitlines():
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 5: continue
    bus, name, total, free = parts[0].lower(), parts[1], number(parts[2]), number(parts[3])
    said = f"{name}, {free / 1024:.1f} of {total / 1024:.1f} GiB free, limit {parts[4]} W"
    taken = total - free > 1024 + 0.02 * total  # driver and screen take some
    remedy = "`nvidia-smi` names the programs that hold the rest; end them before a large model is loaded"
    found.append(Finding("note" if taken else "ok", f"GPU {bus}", said, remedy if taken else ""))
  return found or [Finding("wrong", "nvidia-smi", "lists no GPU",
                           "look at `dmesg | grep -i nvrm`; in a container, start it with --gpus all")]

def check_link(card: Card) -> list[Finding]:
  """PCIe width and generation against what card and slot can do, and errors that the link had to correct."""
  if not card.width or not card.max_width:
    return [Finding("note", f"link {card.address}", "PCIe speed and width are not shown here (virtual machine?)",
                    "look on the host, or trust the measured speed below")]
  slot = int(number(read(card.path.parent / "max_link_width")))
  said = (f"PCIe {GENERATION.get(card.speed, '?')} x{card.width} of "
          f"{GENERATION.get(card.max_speed, '?')} x{card.max_width}")
  found = []
  if card.width < card.max_width:
    why = (f"the slot has only x{slot}: use another slot, or the board shares its lanes (manual, firmware setup: "
           "bifurcation)" if 0 < slot < card.max_width else "reseat the card, try without riser or extension cable")
    found.append(Finding("wrong", f"link {card.address}", said + ": narrower than the card", why))
  elif card.speed < card.max_speed:
    found.append(Finding("note", f"link {card.address}", said + ": idle cards lower their speed",
                         "look again while a model runs; if it stays, set the slot's generation in the firmware setup "
                         "or do without the riser"))
  else: found.append(Finding("ok", f"link {card.address}", said))
  errors = re.search(r"TOTAL_ERR_COR (\d+)", read(card.path / "aer_dev_correctable"))
  if errors and int(errors[1]):
    found.append(Finding("note", f"link {card.address}", f"{errors[1]} corrected errors since the start (AER)",
                         "if it grows while a model runs: another riser or slot, or one PCIe generation less"))
  return found

REDIRECT = 0b1100  # ACS control: peer-to-peer requests, and completions, go up to the root instead of across

def acs_control(config: bytes) -> int | None:
  """The ACS control word of a device's configuration space, 0 if it has none; None if the bytes end before its extended
  part (they do for everyone but root). PCI Express base specification, 7.7.11."""
  if len(config) < 0x104: return None
  at, seen = 0x100, set[int]()
  while at >= 0x100 and at + 8 <= len(config) and at not in seen:
    seen.add(at)
    header = int.from_bytes(config[at:at + 4], "little")
    if header & 0xffff == 0x000d: return int.from_bytes(config[at + 6:at + 8], "little")
    at = header >> 20
  return 0

def bridges(card: Card) -> Iterator[Path]:
  """Those between a card and the root, the nearest first."""
  for folder in card.path.parents:
    if not ADDRESS.fullmatch(folder.name): return
    yield folder

def check_paths(machine: Machine, gpus: list[Card]) -> list[Finding]:
  """What stands between several GPUs: redirection by bridges, and the IOMMU."""
  if len(gpus) < 2: return []
  redirecting, hidden = set[str](), False
  for bridge in {b for card in gpus for b in bridges(card)}:
    try: control = acs_control((bridge / "config").read_bytes())
    except OSError: control = None
    if control is None: hidden = True
    elif control & REDIRECT: redirecting.add(bridge.name)
  found = []
  if redirecting:
    commands = "; ".join(f"sudo setpci -s {name} ECAP_ACS+6.w=0000:000c" for name in sorted(redirecting))
    found.append(Finding("wrong", "ACS", f"{', '.join(sorted(redirecting))}: traffic between the GPUs is redirected to "
                         "the root: it gets half the speed, or never arrives",
                         f"switch ACS off in the firmware setup, or after each start: {commands}"))
  elif hidden: found.append(Finding("note", "ACS", "its setting can't be read without root", "run this once with sudo"))
  else: found.append(Finding("ok", "ACS", "no bridge redirects traffic between the GPUs"))
  groups = list((machine.sys / "kernel/iommu_groups").glob("*"))
  kinds = {read(group / "type") for group in groups} - {""}
  if not groups: found.append(Finding("ok", "IOMMU", "off"))
  elif kinds == {"identity"}: found.append(Finding("ok", "IOMMU", "on, addresses pass through unchanged"))
  else:
    found.append(Finding("note", "IOMMU", "on, and translates: the first copy between GPUs hangs on some boards",
                         "if peer access fails below: iommu=pt on the kernel's command line, or off in the firmware"))
  return found

# -- GPUs as tinygrad sees them --------------------------------------------------------------------------------------

def check_open(name: str, timeout: float, code: str = OPEN, env: Mapping[str, str] | None = None) -> Finding:
  ran = python(code, [name], timeout, env)
  if ran.state == "done": return Finding("ok", name, "tinygrad opens it and computes")
  if ran.state == "hung":
    return Finding("wrong", name, f"tinygrad gets no answer from it: {ran.text}",
                   "restart the machine; then look for Xid in `dmesg`")
  low = ran.text.lower()
  remedy = next((r for words, r in REMEDIES if any(w in low for w in words)),
                f"python -c \"from tinygrad import Device; Device['{name}']\" shows where it fails")
  return Finding("wrong", name, f"tinygrad can't open it: {ran.text}", remedy)

REMEDIES = (  # words in what tinygrad or the driver says -> what helps
  (("nvrtc", "libnvrtc"), "pip install nvidia-cuda-nvrtc-cu12, or the CUDA toolkit's nvrtc package"),
  (("unsupported toolchain", "error 222"), "the driver is older than the CUDA compiler: update the driver"),
  (("out of memory", "error 2,"), "`nvidia-smi` names the programs that hold the card's memory; end them"),
  (("no cuda-capable", "error 100"), "check CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all"),
  (("invalid device ordinal", "error 101"), "fewer cards are visible than are there: check CUDA_VISIBLE_DEVICES"),
  (("mismatch", "error 803"), "restart: the driver was updated under the running one"),
  (("libcuda", "cuda not found", "could not load", "cannot open shared"),
   "install the driver's user part (libcuda.so.1); in a container, start it with --gpus all"),
  (("error 999", "error 46", "unavailable"),
   "another program holds the card or it fell off the bus: `dmesg | grep -i xid`, then restart"))

def check_peer(a: str, b: str, timeout: float, expected: float = 0.0, code: str = PEER, size: int = 1 << 28,
               forced: bool = False, env: Mapping[str, str] | None = None) -> Finding:
  """Copies `size` random bytes each way and compares. expected: bytes a second of the PCIe link; forced: the driver is
  told to offer peer access whatever it finds."""
  what = f"{a} <-> {b}"
  mend = "switch off ACS redirection and the IOMMU's translation (iommu=pt, or off in the firmware setup)"
  if forced: mend = "take ForceP2P out of /etc/modprobe.d (the driver then promises what a board can't do), or " + mend
  ran = python(code, [a, b, str(size)], timeout, env)
  if ran.state == "hung":
    return Finding("wrong", what, f"peer access is dead: a copy of {size >> 20} MiB has {ran.text}", mend)
  said = last_json(ran.text) if ran.state == "done" else {}
  wrong, speed = said.get("wrong"), said.get("gbs")
  if not isinstance(wrong, list) or not isinstance(speed, float):
    return Finding("wrong", what, f"the copy failed: {ran.text}", mend)
  if any(wrong):
    return Finding("wrong", what, f"peer access is reported and moves wrong data: {wrong[0]} and {wrong[1]} bytes of "
                   f"{3 * size} differ", mend)
  rate = f"data arrives both ways, {speed:.1f} GB/s"
  if said.get("peer") is False:
    return Finding("wrong", what, f"no peer access: {rate} over the host's memory", "put both cards below one root or "
                   "switch; consumer cards need a driver that allows it; " + mend)
  if expected and speed * 1e9 < 0.7 * expected:
    return Finding("wrong", what, f"{rate}, want {0.7 * expected / 1e9:.0f} or more of this link", mend + "; on boards "
                   "whose slots hang on the processor, the driver option GrdmaPciTopoCheckOverride=1 may help")
  return Finding("ok", what, rate)

def link_rate(gpus: list[Card]) -> float:
  """Bytes a second of the slowest card's link at full speed, 0 if not known. From generation 3 on, 128 of 130 bits
  are data."""
  if not gpus or not all(card.max_speed and card.width for card in gpus): return 0.0
  return min(card.max_speed * 1e9 * card.width / 8 * (128 / 130 if card.max_speed >= 8 else 0.8) for card in gpus)

# -- all of it -------------------------------------------------------------------------------------------------------

def examine(machine: Machine, timeout: float, tell: Callable[[Finding], None] = lambda finding: None) -> list[Finding]:
  """Every finding, each told as soon as it is there."""
  found: list[Finding] = []
  def add(*more: Finding) -> None:
    for one in more:
      found.append(one)
      tell(one)
  for check in (check_compiler, check_cache, check_memory): add(check(machine))
  add(check_cpu_device(timeout))
  gpus = cards(machine)
  hosted = not gpus and not (machine.proc / "driver/nvidia").exists()   # under WSL neither is shown
  smi = check_smi(machine, timeout) if hosted else []
  if hosted and not any(f.what.startswith("GPU ") for f in smi):
    add(Finding("ok", "GPU", "there is no NVIDIA GPU: the CPU is what can be used here"))
    return found
  if hidden := machine.env.get("CUDA_VISIBLE_DEVICES"):
    add(Finding("note", "GPU", f"CUDA_VISIBLE_DEVICES={hidden} hides or reorders cards", "unset it to see all"))
  driver = [] if hosted else check_driver(machine, gpus)
  add(*driver)
  for card in gpus: add(*check_link(card))
  add(*check_paths(machine, gpus))
  if any(f.level == "wrong" for f in driver): return found              # nothing below could say more
  smi = smi or check_smi(machine, timeout)
  add(*smi)
  count = len(gpus) or sum(f.what.startswith("GPU ") for f in smi)
  visible = hidden.split(",") if hidden else [str(i) for i in range(count)]
  names = ["CUDA" if i == 0 else f"CUDA:{i}" for i in range(min(count, len(visible)))]
  opened = [check_open(name, timeout, env=machine.env) for name in names]
  add(*opened)
  good = [name for name, f in zip(names, opened) if f.level == "ok"]
  forced = "ForceP2P" in read(machine.proc / "driver/nvidia/params")
  for i, a in enumerate(good):
    for b in good[i + 1:]: add(check_peer(a, b, timeout, link_rate(gpus), forced=forced, env=machine.env))
  return found

def line(finding: Finding) -> str:
  text = f"{finding.level:<6}{finding.what}: {finding.found}"
  return text + (f"\n      -> {finding.remedy}" if finding.remedy else "")

def main(argv: list[str] | None = None, machine: Machine | None = None) -> int:
  parser = argparse.ArgumentParser(description="Check whether this machine can run a model, on its GPUs or its CPU.",
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  parser.add_argument("--timeout", type=float, default=120.0, help="seconds that each test of a device may take")
  args = parser.parse_args(argv)
  if not 0 < args.timeout < 1e5: parser.error(f"--timeout={args.timeout:g}, want seconds above 0")
  found = examine(machine or Machine(), args.timeout, lambda finding: print(line(finding), flush=True))
  wrong, notes = (sum(f.level == level for f in found) for level in ("wrong", "note"))
  print((f"{wrong} wrong" if wrong else "nothing is wrong") + (f", {notes} to note" if notes else ""))
  return 1 if wrong else 0

if __name__ == "__main__": sys.exit(main())
