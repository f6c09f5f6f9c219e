"""Saved chats: nothing but a whole file that was written here is ever taken, and what comes back is what was there."""
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

import specgrad
from specgrad import session
from specgrad.checkpoint import Checkpoint
from specgrad.prompt import encode_chat
from specgrad.session import Saved, SessionError

ROOT = Path(__file__).resolve().parents[1]

@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
  return tmp_path / "specgrad"

def example(n: int = 0) -> Saved:
  return Saved("model", {"turns": [n, "漢\x1b\u202e", None]}, {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "ids": np.array([n, -1])})

def same(a: Saved, b: Saved) -> bool:
  return (a.model, a.chat, list(a.state)) == (b.model, b.chat, list(b.state)) and all(
    x.dtype == y.dtype and x.shape == y.shape and (x == y).all() for x, y in zip(a.state.values(), b.state.values()))

# ---------------------------------------------------------------------------------------------- the file
def test_what_was_saved_comes_back(home: Path) -> None:
  assert session.names() == []
  for n in (1, 2):
    assert session.save("my chat", example(n)) == (home / "my chat.chat").stat().st_size
    assert same(session.load("my chat"), example(n))
  session.save("übung-2", Saved("m", {}))
  assert same(session.load("übung-2"), Saved("m", {})) and session.names() == ["my chat", "übung-2"]
  assert stat.S_IMODE((home / "my chat.chat").stat().st_mode) == 0o600 and stat.S_IMODE(home.stat().st_mode) == 0o700
  assert len(list(home.iterdir())) == 2

@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "a\x1bb", " a", "a ", "a.", ".a",
                                  "-a", "~", "*", "x" * 101, "漢" * 34, "/dev/null", "\ud800"])
def test_names_that_are_none(name: str, home: Path) -> None:
  for use in (lambda: session.save(name, example()), lambda: session.load(name)):
    with pytest.raises(SessionError, match=r"^name=.*, want letters, digits and \. _ \+ - inside, at most 100 bytes\. Chats are ") as error:
      use()
    assert "\n" not in str(error.value) and len(str(error.value)) < 250
  assert not home.exists()

def test_where_chats_are(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("HOME", "/home/x")
  for value in ("", "relative"):
    monkeypatch.setenv("XDG_DATA_HOME", value)
    assert session.folder() == Path("/home/x/.local/share/specgrad")

def test_no_such_chat(home: Path) -> None:
  with pytest.raises(SessionError, match="^b: no such chat in [^,]*$"): session.load("b")
  session.save("a", example())
  with pytest.raises(SessionError, match="^b: no such chat in .*, want one of a$"): session.load("b")

def test_a_damaged_file_is_refused(home: Path) -> None:
  session.save("a", example())
  file, wrong = home / "a.chat", []
  good = file.read_bytes()
  for i in range(len(good)):
    for bad in (good[:i], good[:i] + bytes((good[i] ^ 1 << i % 8,)) + good[i + 1:], good + good[:i + 1]):
      file.write_bytes(bad)
      try: wrong += [bad] if not same(session.load("a"), example()) else []
      except SessionError as error: assert "\n" not in str(error)
  assert not wrong  # here and there blanks that pad may change, but no content
  file.write_bytes(good[:-1] + bytes((good[-1] ^ 1,)))
  with pytest.raises(SessionError, match="damaged, its sha256 is another"): session.load("a")

def test_a_foreign_file_is_refused(home: Path) -> None:
  home.mkdir()
  file = home / "a.chat"
  for text in (b"", b"version https://git-lfs.github.com/spec/v1\n", b"<html>", b"\xff" * 64, b"{" * 5000):
    file.write_bytes(text)
    with pytest.raises(SessionError, match="damaged or no saved chat"): session.load("a")
  for metadata in (None, {"format": "x"}, {"format": session.FORMAT}, {"format": session.FORMAT, "chat": "[]", "sha256": "0"}):
    save_file({"w": np.zeros(3)}, file, metadata)
    with pytest.raises(SessionError): session.load("a")
  for chat in ("[]", "{}", "nonsense", '{"model": 1}', '{"model": 1, "chat": 5}', "[" * 100000):
    state = {"w": np.zeros(3)}
    save_file(state, file, {"format": session.FORMAT, "chat": chat, "sha256": session.checksum(chat, state)})
    with pytest.raises(SessionError, match="no saved chat"): session.load("a")
  file.unlink()
  for make in (lambda: os.mkfifo(file), lambda: file.mkdir(), lambda: file.symlink_to("/dev/zero")):
    make()
    with pytest.raises(SessionError, match="not a file, want a saved chat"): session.load("a")
    file.rmdir() if file.is_dir() else file.unlink()

def test_the_checksum_covers_names_types_and_shapes() -> None:
  base = {"a": np.arange(4, dtype=np.uint8)}
  others: list[dict[str, Any]] = [{"b": base["a"]}, {"a": base["a"].view(np.int8)}, {"a": base["a"].reshape(2, 2)}, {"a": base["a"][::-1]}]
  sums = [session.checksum("x", state) for state in (base, *others)] + [session.checksum("y", base)]
  assert len(set(sums)) == len(sums) and session.checksum("x", {"a": np.arange(8, dtype=np.uint8)[:4]}) == sums[0]

# ---------------------------------------------------------------------------------------------- what may go wrong
KILL = '''
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from specgrad import session
from test_session import example
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
def half(state, path, metadata):
  real(state, path, metadata)
  os.truncate(path, os.path.getsize(path) // 2)
  die()
real = session.save_file
if sys.argv[1] == "write": session.save_file = half
else: setattr(os, sys.argv[1], die)
session.save("a", example(2))
'''

@pytest.mark.parametrize("where", ["write", "fsync", "replace", "unlink"])
def test_killed_while_saving(where: str, home: Path) -> None:
  session.save("a", example(1))
  if where != "unlink":
    done = subprocess.run([sys.executable, "-c", KILL, where], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL and len(list(home.glob(".*.part"))) == 1
    assert same(session.load("a"), example(1)) and session.names() == ["a"]
  (home / f".a.chat.{os.getppid()}.part").touch()  # of a process that lives: it is still saving
  session.save("a", example(3))
  assert same(session.load("a"), example(3))
  assert [file.name for file in home.glob(".*.part")] == [f".a.chat.{os.getppid()}.part"]

def test_a_full_disk_leaves_the_old_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  session.save("a", example(1))

  def full(*_: Any) -> None: raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
  monkeypatch.setattr(session, "save_file", full)
  with pytest.raises(OSError, match="No space left"): session.save("a", example(2))
  monkeypatch.undo()
  monkeypatch.setenv("XDG_DATA_HOME", str(home.parent))
  assert same(session.load("a"), example(1)) and len(list(home.iterdir())) == 1

# ---------------------------------------------------------------------------------------------- the checkpoint and the engine
def test_training_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
  checkpoint = Checkpoint.open(specgrad.demo_path())
  mine, read = session.identity(checkpoint), checkpoint.read
  assert mine == session.identity(Checkpoint.open(specgrad.demo_path()))
  monkeypatch.setattr(Checkpoint, "read", lambda self, *args: read(*args) + 1)
  assert session.identity(checkpoint) != mine

@pytest.mark.parametrize("draft, numerics", [("auto", "w4a8"), ("ngram", "w4a8"), ("none", "reference")])
def test_a_restored_engine_goes_on_bit_for_bit(draft: str, numerics: str, home: Path) -> None:
  model = specgrad.load(draft=draft, numerics=numerics)
  engine, tokenizer = model.engine, model.tokenizer
  assert tokenizer is not None and engine.snapshot() == {}
  says = lambda text: encode_chat(tokenizer, [{"role": "user", "content": text}])
  ids = says("Hello, I am Olga. What is 7 plus 8? " * 12)   # past the window of 128
  ids += model.generate(ids, max_tokens=30).ids + says("Who am I?")[1:]
  session.save("a", Saved("", {}, engine.snapshot()))
  stood = engine.held, engine.written      # from the latter follows how far the position may move back

  def go_on() -> tuple[Any, dict[str, np.ndarray]]:
    reply = model.generate(ids, max_tokens=60, temperature=2.0, seed=3, ignore_eos=True)
    return (reply.ids, reply.stats.reused_tokens, reply.stats.accepted), engine.snapshot()
  want, left = go_on()
  model.generate(says("Tell me a story. " * 40), max_tokens=100, ignore_eos=True)
  state = session.load("a").state
  with pytest.raises(ValueError, match="^engine: state of target.0.window=None, want .* It is of other settings$"):
    engine.restore({name: array for name, array in state.items() if name != "target.0.window"})
  with pytest.raises(ValueError, match=r"target.1.compressor.entries=\(\d+, \d+\), want "):
    engine.restore(state | {"ids": state["ids"][:8]})
  engine.restore(state)
  assert (engine.held, engine.written) == stood and engine.written > len(engine.held)
  assert want[1] > 150 and go_on()[0] == want
  engine.restore(state)
  assert all((array == left[name]).all() for name, array in go_on()[1].items())
