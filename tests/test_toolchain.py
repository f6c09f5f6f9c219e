"""The compiler that is chosen, the files that are used, and that a kernel really comes out at the other end."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specgrad import toolchain
from specgrad.toolchain import ToolchainError, find_compiler, ziglang

def fake(folder: Path, name: str, says: str) -> Path:
  folder.mkdir(exist_ok=True)
  path = folder / name
  path.write_text(f"#!/bin/sh\necho '{says}'\n")
  path.chmod(0o755)
  return path

def clang(folder: Path, name: str, major: int) -> Path:
  return fake(folder, name, f"Debian clang version {major}.1.0")

@pytest.fixture
def no_zig(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setattr(toolchain, "ziglang", lambda: None)

@pytest.mark.usefixtures("no_zig")
@pytest.mark.parametrize("programs, cc, want", [
  ({"clang": 19, "clang-21": 21}, "", "clang"),                    # the plain name is the user's own choice
  ({"clang": 14, "clang-16": 16, "clang-19": 19}, "", "clang-19"), # unless it is a slow one
  ({"clang-14": 14}, "", "clang-14"),
  ({"clang": 13, "clang-15": 15}, "", "clang-15"),
  ({"clang": 19, "mine": 15}, "mine", "mine"),                     # what the user names wins, even if old
  ({"clang": 19, "mine": 12}, "mine", "clang"),
  ({"clang": 19}, "nowhere", "clang"),
])
def test_choice(tmp_path: Path, programs: dict[str, int], cc: str, want: str) -> None:
  for name, major in programs.items(): clang(tmp_path, name, major)
  path, version = find_compiler({"PATH": str(tmp_path), "CC": cc})
  assert path == tmp_path / want and version == f"Debian clang version {programs[want]}.1.0"

@pytest.mark.usefixtures("no_zig")
def test_gcc_is_refused_under_any_name(tmp_path: Path) -> None:
  for name in ("clang", "cc"): fake(tmp_path, name, "gcc (Debian 12.2.0-14) 12.2.0")
  clang(tmp_path, "clang-18", 18)
  for cc in ("cc", "clang", str(tmp_path / "cc")):
    assert find_compiler({"PATH": str(tmp_path), "CC": cc})[0] == tmp_path / "clang-18"

@pytest.mark.usefixtures("no_zig")
def test_nothing_found_says_what_to_install(tmp_path: Path) -> None:
  with pytest.raises(ToolchainError) as error: find_compiler({"PATH": str(tmp_path)})
  assert str(error.value) == ("tinygrad's CPU device needs clang 14 or later (16 or later to be fast), found none. "
                              "Run: pip install 'specgrad[cpu]' (or apt-get install clang-19)")
  fake(tmp_path, "cc", "gcc 12")
  clang(tmp_path, "clang", 11)
  with pytest.raises(ToolchainError, match=r"found none: cc is not clang, clang is clang 11\. Run: pip install"):
    find_compiler({"PATH": str(tmp_path), "CC": "cc"})
  broken = tmp_path / "clang"
  broken.write_text("#!/nowhere/sh\n")
  with pytest.raises(ToolchainError, match="clang is not clang"): find_compiler({"PATH": str(tmp_path)})

def test_wheel_comes_before_an_old_clang_and_after_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  zig = fake(tmp_path / "wheel with 'quote", "zig", "clang version 22.1.8")
  monkeypatch.setattr(toolchain, "ziglang", lambda: zig)
  folder = tmp_path / "bin"
  clang(folder, "clang-15", 15)
  env = {"PATH": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")}
  wrapper, version = find_compiler(env)
  assert wrapper.parent == tmp_path / "cache" / "specgrad" and version == "clang version 22.1.8"
  assert find_compiler(env)[0] == wrapper and len(list(wrapper.parent.iterdir())) == 1
  clang(folder, "clang-16", 16)
  assert find_compiler(env)[0] == folder / "clang-16"

def test_wrapper_passes_arguments_unchanged(tmp_path: Path) -> None:
  zig = tmp_path / "zig"
  zig.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
  zig.chmod(0o755)
  wrapper = toolchain.wrap(zig, tmp_path)
  said = subprocess.run([wrapper, "-c", "a b", "-"], capture_output=True, text=True, check=True).stdout.splitlines()
  assert said == ["clang", "-resource-dir", str(tmp_path / "lib"), "-c", "a b", "-"]

def test_cache_folder_falls_back_when_it_cannot_be_written(tmp_path: Path) -> None:
  (tmp_path / "file").write_text("")
  env = {"XDG_CACHE_HOME": str(tmp_path / "file")}  # even root can't make a folder below a file
  chosen = next(filter(toolchain.usable, toolchain.cache_dirs(env)))
  assert tmp_path not in chosen.parents and chosen.stat().st_uid == os.getuid()
  open_to_all = tmp_path / "specgrad"
  open_to_all.mkdir()
  open_to_all.chmod(0o777)
  assert not toolchain.usable(open_to_all)

PROGRAM = """
import os, sys
{before}
from specgrad.toolchain import prepare
tools = prepare()
assert prepare() is tools
from tinygrad import Tensor, Device
import tinygrad.helpers as helpers
x = Tensor([[1.0, 2.0], [3.0, 4.0]])
print((x @ x).tolist(), x.half().exp2().tolist(), Device.DEFAULT)
print(tools.compiler, tools.cache, helpers.CACHEDB, os.environ["CC"])
"""
RESULT = "[[7.0, 10.0], [15.0, 22.0]] [[2.0, 4.0], [8.0, 16.0]] CPU"

def run(env: dict[str, str], before: str = "") -> list[str]:
  base = {k: v for k, v in os.environ.items() if k not in ("CC", "CACHEDB", "DEV")}
  done = subprocess.run([sys.executable, "-c", PROGRAM.format(before=before)], env={**base, **env}, text=True,
                        capture_output=True, timeout=120)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()

@pytest.mark.parametrize("before", ["", "import tinygrad", "import tinygrad; os.environ.pop('CACHEDB', None)"])
def test_a_kernel_runs_and_the_cache_is_private(tmp_path: Path, before: str) -> None:
  result, paths = run({"XDG_CACHE_HOME": str(tmp_path)}, before)
  compiler, cache, used, cc = paths.split(" ")
  assert result == RESULT and compiler == cc
  assert Path(cache) == Path(used) and Path(cache).parent == tmp_path / "specgrad" and Path(cache).is_file()
  assert not (tmp_path / "tinygrad").exists()

def test_what_the_user_set_stays(tmp_path: Path) -> None:
  result, paths = run({"CACHEDB": str(tmp_path / "mine.db"), "DEV": "CPU:CLANG"})
  assert result == RESULT and paths.split(" ")[1:3] == [str(tmp_path / "mine.db")] * 2

@pytest.mark.skipif(ziglang() is None, reason="the ziglang wheel (extra: cpu) is not installed")
def test_the_wheel_alone_is_enough(tmp_path: Path) -> None:
  result, paths = run({"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)})
  assert result == RESULT and Path(paths.split(" ")[0]).parent == tmp_path / "specgrad"

@pytest.mark.skipif(ziglang() is None, reason="the ziglang wheel (extra: cpu) is not installed")
def test_the_wheel_has_the_compilers_own_headers(tmp_path: Path) -> None:
  zig = ziglang()
  assert zig is not None
  source = "#include <stdint.h>\n#include <float.h>\nint64_t f(void) { return INT64_C(3) + FLT_DIG; }\n"
  done = subprocess.run([toolchain.wrap(zig, tmp_path), "-c", "-x", "c", "-O2", "-ffreestanding", "-", "-o", "-"],
                        input=source.encode(), capture_output=True)
  assert done.returncode == 0 and done.stdout[:4] == b"\x7fELF", done.stderr

def test_the_package_imports_without_a_compiler(tmp_path: Path) -> None:
  program = ("import sys; sys.modules['ziglang'] = None\nimport specgrad\n"
             "try: specgrad.prepare()\nexcept ValueError as error: print(error)\n")
  env = {**os.environ, "PATH": str(tmp_path), "CC": ""}
  done = subprocess.run([sys.executable, "-c", program], env=env, text=True, capture_output=True, timeout=60)
  assert done.returncode == 0 and "pip install 'specgrad[cpu]'" in done.stdout, done.stderr
