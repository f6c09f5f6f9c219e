"""scripts/doctor.py on made-up machines: each fault is seen and names what mends it; a child that hangs is given up."""
from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

OPEN = ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U16)  "
        "Mon May 12\nGCC version:  gcc version 12.2.0")
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Feb  6 2024\nGCC version: gcc version 12.2.0"
SMI = ("00000000:01:00.0, NVIDIA RTX PRO 6000, 97887, {free}, 600.00\n"
       "00000000:02:00.0, NVIDIA RTX PRO 6000, 97887, 97000, 600.00")

@pytest.fixture(scope="module")
def doctor() -> SimpleNamespace:
  return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "doctor.py"), run_name="doctor"))

def config_space(acs: int | None) -> bytes:
  """4096 bytes whose second extended capability (at 0x140) is ACS with this control word, or none."""
  space = bytearray(4096)
  space[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
  space[0x140:0x144] = ((0x000d if acs is not None else 0x0003) | 1 << 16).to_bytes(4, "little")
  space[0x146:0x148] = (acs or 0).to_bytes(2, "little")
  return bytes(space)

@pytest.fixture
def build(tmp_path: Path, doctor) -> Callable[..., Any]:
  def make(gpus: int = 2, driver: str = OPEN.format("580.65.06"), acs: int | None = 0x1, bound: str = "nvidia",
           root: bool = True, iommu: str = "", smi: str | None = SMI.format(free=97000), params: str = "",
           **link: Any) -> Any:
    """A machine with `gpus` cards, each below a bridge of its own. link: sysfs files of the first card."""
    sys_, proc, bin_ = tmp_path / "sys", tmp_path / "proc", tmp_path / "bin"
    for folder in (sys_ / "bus/pci/devices", sys_ / "bus/pci/drivers" / bound, proc, bin_): folder.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 65000000 kB\nMemAvailable:   60000000 kB\n")
    for i in range(gpus):
      bridge = sys_ / f"devices/pci0000:00/0000:00:0{i + 1}.1"
      card = bridge / f"0000:0{i + 1}:00.0"
      card.mkdir(parents=True)
      space = config_space(acs)
      (bridge / "config").write_bytes(space if root else space[:64])
      (bridge / "max_link_width").write_text("16\n")
      files = {"vendor": "0x10de", "device": "0x2bb1", "class": "0x030000", "current_link_speed": "32.0 GT/s PCIe",
               "max_link_speed": "32.0 GT/s PCIe", "current_link_width": "16", "max_link_width": "16",
               "aer_dev_correctable": "RxErr 0\nTOTAL_ERR_COR 0"} | ({} if i else link)
      for name, text in files.items(): (card / name).write_text(f"{text}\n")
      if bound: (card / "driver").symlink_to(sys_ / "bus/pci/drivers" / bound)
      for device in (bridge, card): (sys_ / "bus/pci/devices" / device.name).symlink_to(device)
      if iommu:
        (group := sys_ / f"kernel/iommu_groups/{i}").mkdir(parents=True)
        (group / "type").write_text(iommu)
    if driver:
      (proc / "driver/nvidia").mkdir(parents=True)
      (proc / "driver/nvidia/version").write_text(driver)
      (proc / "driver/nvidia/params").write_text(params)
    if smi is not None:
      (bin_ / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n" if smi.startswith(("exit", "echo", "sleep", "exec")) else
                                       f"#!/bin/sh\nprintf '%s\\n' '{smi}'\n")
      (bin_ / "nvidia-smi").chmod(0o755)
    return doctor.Machine(sys_, proc, str(bin_ / "nvidia-smi"), {"PATH": "/usr/bin:/bin"})
  return make

def only(found: list[Any], level: str) -> Any:
  mine = [f for f in found if f.level == level]
  assert len(mine) == 1, found
  assert mine[0].remedy and "\n" not in mine[0].found + mine[0].remedy
  return mine[0]

# -- what the system shows -------------------------------------------------------------------------------------------

def test_a_good_machine(build, doctor):
  machine = build()
  gpus = doctor.cards(machine)
  assert [(c.address, c.driver, c.width, c.max_speed) for c in gpus] == [
    ("0000:01:00.0", "nvidia", 16, 32.0), ("0000:02:00.0", "nvidia", 16, 32.0)]
  found = [*doctor.check_driver(machine, gpus), *(f for c in gpus for f in doctor.check_link(c)),
           *doctor.check_paths(machine, gpus), *doctor.check_smi(machine, 20), doctor.check_memory(machine)]
  assert {f.level for f in found} == {"ok"}
  said = "\n".join(doctor.line(f) for f in found)
  for part in ("580.65, open kernel module", "PCIe 5 x16 of 5 x16", "94.7 of 95.6 GiB free", "IOMMU: off"):
    assert part in said
  assert doctor.link_rate(gpus) == pytest.approx(63e9, rel=0.01)

@pytest.mark.parametrize("driver, more, want, remedy", [
  ("", {}, "NVIDIA's kernel module is not loaded", "modprobe nvidia"),
  (OPEN.format("550.54.14"), {}, "550.54, want 570 or later for the Blackwell card 0000:01:00.0", "driver-570-open"),
  (CLOSED.format("470.1"), {"device": "0x2684"}, "570 or later for the Blackwell card 0000:02:00.0", "driver-570-open"),
  (CLOSED.format("580.65.06"), {}, "Blackwell cards need the open one", "-open variant"),
  (OPEN.format("580.1"), {"bound": "nouveau"}, "nouveau has 0000:01:00.0", "shuts nouveau out"),
  (OPEN.format("580.1"), {"bound": "vfio-pci"}, "set aside for a virtual machine", "vfio-pci ids")])
def test_drivers_that_will_not_do(driver, more, want, remedy, build, doctor):
  machine = build(driver=driver, **more)
  wrong = only(doctor.check_driver(machine, doctor.cards(machine)), "wrong")
  assert want in wrong.found and remedy in wrong.remedy

def test_older_cards_take_older_drivers(build, doctor):
  machine = build(gpus=1, driver=CLOSED.format("535.54.03"), device="0x2330")
  assert "535.54, closed kernel module" in only(doctor.check_driver(machine, doctor.cards(machine)), "note").found
  old = doctor.Machine(machine.sys, machine.proc)
  (machine.proc / "driver/nvidia/version").write_text(CLOSED.format("470.1"))
  assert only(doctor.check_driver(old, doctor.cards(old)), "wrong").found == "470.1, want 525 or later"

@pytest.mark.parametrize("link, level, want, remedy", [
  ({"current_link_width": "8"}, "wrong", "PCIe 5 x8 of 5 x16: narrower", "reseat the card"),
  ({"current_link_width": "4", "slot": "4"}, "wrong", "PCIe 5 x4 of 5 x16", "the slot has only x4"),
  ({"current_link_speed": "2.5 GT/s PCIe"}, "note", "PCIe 1 x16 of 5 x16: idle", "while a model runs"),
  ({"aer_dev_correctable": "RxErr 7\nTOTAL_ERR_COR 12"}, "note", "12 corrected errors", "another riser"),
  ({"current_link_speed": "Unknown", "current_link_width": "0"}, "note", "not shown here", "host")])
def test_links(link, level, want, remedy, build, doctor):
  slot = link.get("slot")
  machine = build(**{k: v for k, v in link.items() if k != "slot"})
  card = doctor.cards(machine)[0]
  if slot: (card.path.parent / "max_link_width").write_text(slot)
  one = only(doctor.check_link(card), level)
  assert want in one.found and remedy in one.remedy and "0000:01:00.0" in one.what

def test_acs_redirection(build, doctor):
  machine = build(acs=0x1d)
  wrong = only(doctor.check_paths(machine, doctor.cards(machine)), "wrong")
  assert wrong.what == "ACS" and "0000:00:01.1, 0000:00:02.1" in wrong.found
  assert "sudo setpci -s 0000:00:01.1 ECAP_ACS+6.w=0000:000c; sudo setpci -s 0000:00:02.1" in wrong.remedy

def test_acs_needs_root_and_two_cards(build, doctor):
  machine = build(acs=0x1d, root=False)
  assert "sudo" in only(doctor.check_paths(machine, doctor.cards(machine)), "note").remedy
  assert doctor.check_paths(machine, doctor.cards(machine)[:1]) == []

def test_configuration_space(doctor):
  assert doctor.acs_control(config_space(0x1f)) == 0x1f and doctor.acs_control(config_space(None)) == 0
  assert doctor.acs_control(bytes(64)) is None and doctor.acs_control(bytes(256)) is None
  assert doctor.acs_control(bytes(4096)) == 0
  loop = bytearray(4096)
  loop[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
  assert doctor.acs_control(bytes(loop)) == 0 and doctor.acs_control(b"\xff" * 4096) == 0

@pytest.mark.parametrize("kind, level", [("DMA", "note"), ("DMA-FQ", "note"), ("identity", "ok")])
def test_iommu(kind, level, build, doctor):
  machine = build(iommu=kind)
  found = [f for f in doctor.check_paths(machine, doctor.cards(machine)) if f.what == "IOMMU"]
  assert [f.level for f in found] == [level] and ("iommu=pt" in found[0].remedy) == (level == "note")

@pytest.mark.parametrize("smi, level, want, remedy", [
  (SMI.format(free=60000), "note", "58.6 of 95.6 GiB free", "names the programs"),
  ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "wrong", "mismatch", "restart"),
  ("echo \"NVIDIA-SMI has failed: couldn't communicate\"; exit 9", "wrong", "couldn't communicate", "modprobe"),
  ("exec sleep 60", "wrong", "no end after 2 s: the driver does not answer", "restart the machine"),
  ("echo", "wrong", "lists no GPU", "--gpus all"), (None, "note", "not found", "nvidia-utils")])
def test_nvidia_smi(smi, level, want, remedy, build, doctor):
  one = only(doctor.check_smi(build(smi=smi), 2 if smi and "sleep" in smi else 60), level)
  assert want in one.found and remedy in one.remedy

# -- what is tried ---------------------------------------------------------------------------------------------------

def says(**what: Any) -> str: return f"print({json.dumps(json.dumps(what))})"

@pytest.mark.parametrize("code, want, remedy", [
  ("import time; time.sleep(60)", "peer access is dead: a copy of 256 MiB has no end after 2 s", "iommu=pt"),
  (says(peer=True, wrong=[1 << 28, 0], gbs=40.0), "moves wrong data: 268435456 and 0 bytes of 805306368 differ", "ACS"),
  (says(peer=False, wrong=[0, 0], gbs=12.0), "no peer access: data arrives both ways, 12.0 GB/s", "switch"),
  (says(peer=True, wrong=[0, 0], gbs=20.0), "20.0 GB/s, want 44 or more", "GrdmaPciTopoCheckOverride=1"),
  ("raise RuntimeError('CUDA Error 217, peer access')", "the copy failed: RuntimeError: CUDA Error 217", "ACS"),
  ("print('nothing of the kind')", "the copy failed: nothing of the kind", "ACS")])
def test_peers_that_do_not_work(code, want, remedy, doctor):
  began = time.monotonic()
  limit = 2 if "sleep" in code else 60
  one = only([doctor.check_peer("CUDA", "CUDA:1", limit, 63e9, code)], "wrong")
  assert want in one.found and remedy in one.remedy and time.monotonic() - began < 60

def test_forced_peer_access_is_named(doctor):
  forced = doctor.check_peer("CUDA", "CUDA:1", 60, 0.0, says(peer=True, wrong=[5, 5], gbs=1.0), forced=True)
  assert "take ForceP2P out" in forced.remedy

def test_a_real_copy_between_two_devices(doctor):
  one = doctor.check_peer("CPU", "CPU:1", 120, size=1 << 16)
  assert one.level == "ok" and re.search(r"data arrives both ways, [\d.]+ GB/s", one.found)

def test_a_copy_that_moves_nothing_is_seen(doctor):
  """The real probe, with a copy that keeps what was there."""
  dead = doctor.PEER.replace("there.to(target).realize()", "Tensor(np.zeros(size, np.uint8), device=target).realize()")
  assert dead != doctor.PEER
  one = doctor.check_peer("CPU", "CPU:1", 120, size=1 << 16, code=dead)
  assert one.level == "wrong" and "moves wrong data" in one.found

@pytest.mark.parametrize("error, remedy", [
  ("libcuda.so.1: cannot open shared object file", "driver's user part"),
  ("CUDA Error 100, no CUDA-capable device", "--gpus all"),
  ("CUDA Error 2, out of memory", "hold the card's memory"), ("libnvrtc.so not found", "nvidia-cuda-nvrtc-cu12"),
  ("CUDA Error 803, system has unsupported display driver / cuda driver combination", "restart"),
  ("never heard of it", "shows where it fails")])
def test_devices_that_do_not_open(error, remedy, doctor):
  one = only([doctor.check_open("CUDA", 60, f"raise RuntimeError({error!r})")], "wrong")
  assert error in one.found and remedy in one.remedy

def test_an_absent_device_and_a_present_one(doctor):
  one = only([doctor.check_open("CUDA:7", 120)], "wrong")
  assert one.found.startswith("tinygrad can't open it: ") and "Traceback" not in one.found
  assert doctor.check_open("CPU", 120).level == "ok"
  assert "no answer" in doctor.check_open("CUDA", 1, "import time; time.sleep(60)").found

def test_a_hung_child_takes_its_children_along(doctor, tmp_path):
  mark = tmp_path / "late"
  code = f"import subprocess; subprocess.run(['sh', '-c', 'sleep 2.5; touch {mark}'])"
  assert doctor.run([sys.executable, "-c", code], 1).state == "hung"
  time.sleep(2)
  assert not mark.exists()

# -- all of it -------------------------------------------------------------------------------------------------------

def quick(doctor, monkeypatch, **fakes: Any) -> None:
  """The examination without its slow children."""
  scope = doctor.examine.__globals__
  for name, value in ({"check_cpu_device": lambda timeout: doctor.Finding("ok", "CPU", "works")} | fakes).items():
    monkeypatch.setitem(scope, name, value)

def test_no_gpu_is_nothing_wrong(build, doctor, monkeypatch, capsys, tmp_path):
  quick(doctor, monkeypatch)
  for smi in (None, "exit 9"):
    machine = build(gpus=0, driver="", smi=smi)
    assert doctor.main([], machine) == 0
    said = capsys.readouterr().out
    assert "there is no NVIDIA GPU: the CPU is what can be used here" in said
    assert "nothing is wrong" in said.splitlines()[-1]
    for folder in ("sys", "proc", "bin"): shutil.rmtree(tmp_path / folder)

def test_everything_is_examined(build, doctor, monkeypatch, capsys):
  tried: list[tuple[Any, ...]] = []
  quick(doctor, monkeypatch, check_open=lambda name, timeout, env=None: doctor.Finding("ok", name, "opens"),
        check_peer=lambda *a, **k: tried.append((*a[:2], k["forced"])) or doctor.Finding("ok", "peer", "works"))
  assert doctor.main([], build(params='RegistryDwords: "ForceP2P=0x11"')) == 0
  said = capsys.readouterr().out
  assert tried == [("CUDA", "CUDA:1", True)]
  for part in ("compiler", "cache", "memory", "CPU", "driver", "link 0000:01:00.0", "ACS", "IOMMU", "GPU 00000000:01"):
    assert f"ok    {part}" in said, part

def test_a_broken_driver_ends_the_examination(build, doctor, monkeypatch, capsys):
  quick(doctor, monkeypatch, check_open=None, check_peer=None)
  assert doctor.main([], build(driver="")) == 1
  said = capsys.readouterr().out
  assert "wrong driver: NVIDIA's kernel module is not loaded\n      -> install the driver" in said
  assert said.splitlines()[-1].startswith("1 wrong")

def test_only_cards_that_open_are_paired(build, doctor, monkeypatch):
  level = {"CUDA": "ok", "CUDA:1": "wrong"}
  quick(doctor, monkeypatch, check_peer=None,
        check_open=lambda name, timeout, env=None: doctor.Finding(level[name], name, "so so", "mend it"))
  assert any(f.what == "CUDA:1" and f.level == "wrong" for f in doctor.examine(build(), 60))

# -- the CPU's side --------------------------------------------------------------------------------------------------

def test_cpu_side(build, doctor, monkeypatch, tmp_path):
  machine = build(gpus=0)
  scope = doctor.check_compiler.__globals__
  assert doctor.check_compiler(doctor.Machine()).level in ("ok", "note")
  monkeypatch.setitem(scope, "find_compiler", lambda env: (Path("/usr/bin/clang"), "clang version 14.0.6"))
  assert "slow at half precision" in only([doctor.check_compiler(machine)], "note").found
  def none(env: Any) -> Any: raise doctor.ToolchainError("found none")
  monkeypatch.setitem(scope, "find_compiler", none)
  assert "specgrad[cpu]" in only([doctor.check_compiler(machine)], "wrong").remedy
  (machine.proc / "meminfo").write_text("MemAvailable: 1000000 kB\n")
  assert "1.0 GiB of host memory free" in only([doctor.check_memory(machine)], "note").found
  (machine.proc / "meminfo").write_text("MemAvailable: 60000000 kB\n")
  (machine.sys / "fs/cgroup").mkdir(parents=True)
  (machine.sys / "fs/cgroup/memory.max").write_text(f"{4 << 30}\n")
  (machine.sys / "fs/cgroup/memory.current").write_text(f"{3 << 30}\n")
  assert "1.0 GiB" in only([doctor.check_memory(machine)], "note").found

def test_cache_folder(doctor, tmp_path, monkeypatch):
  mine = doctor.Machine(env={"XDG_CACHE_HOME": str(tmp_path / "x")})
  assert doctor.check_cache(mine).level == "ok"
  (tmp_path / "x/specgrad").chmod(0o777)
  note = only([doctor.check_cache(mine)], "note")
  assert "may be emptied at a restart" in note.found and "XDG_CACHE_HOME" in note.remedy
  monkeypatch.setitem(doctor.check_cache.__globals__, "usable", lambda folder: False)
  assert "every start compiles" in only([doctor.check_cache(mine)], "wrong").found
