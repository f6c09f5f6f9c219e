"""What reaches a terminal, and what comes from one: through real pseudo-terminals, without a model."""
import io
import os
import pty
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

from specgrad import terminal

class FakeTerminal(io.StringIO):
  def isatty(self) -> bool: return True

# ---------------------------------------------------------------------------------------------- what is shown
@pytest.mark.parametrize("text, shown", [
  ("a\x1b[2J\x07\r\x7f\x9b1m\tb\n", "a\\x1b[2J\\x07\\x0d\\x7f\\x9b1m\tb\n"),
  ("\u202ed\u2066x\u2069\u202c", "\\u202ed\\u2066x\\u2069\\u202c"),
  ("né 漢字 👩\u200d🚀 e\u0301 \u200fע\n", "né 漢字 👩\u200d🚀 e\u0301 \u200fע\n")])
def test_a_model_can_not_steer_the_terminal(text: str, shown: str) -> None:
  screen, file = FakeTerminal(), io.StringIO()
  terminal.Screen().write(text, screen)
  terminal.Screen().write(text, file)
  assert screen.getvalue() == shown and file.getvalue() == text

@pytest.mark.parametrize("env, dim", [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False),
                                      ({}, False)])
def test_colour_only_where_it_is_wanted(env: dict[str, str], dim: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  for name in ("TERM", "NO_COLOR"): monkeypatch.delenv(name, raising=False)
  for name, value in env.items(): monkeypatch.setenv(name, value)
  monkeypatch.setattr(sys, "stderr", screen := FakeTerminal())
  terminal.Screen().note("a", dim=True)
  assert screen.getvalue() == ("\x1b[2ma\x1b[0m\n" if dim else "a\n")
  monkeypatch.setattr(sys, "stderr", file := io.StringIO())
  terminal.Screen().note("a", dim=True)
  assert file.getvalue() == "a\n"

def test_two_streams_share_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
  both: list[str] = []
  monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(write=both.append, flush=lambda: None, isatty=lambda: True))
  monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(write=both.append, flush=lambda: None, isatty=lambda: True))
  screen = terminal.Screen()
  screen.write("thought", sys.stderr)
  screen.write("word", sys.stdout)
  screen.note("note")
  assert "".join(both) == "thought\nword\nnote\n"

@pytest.mark.parametrize("stage, seconds, shown", [("compile", 1.6, "compiling, kept for later starts 00:01"),
                                                   ("compile", 0.1, ""), ("load", 0.1, "")])
def test_progress_only_where_it_lasts(stage: str, seconds: float, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sys, "stderr", screen := FakeTerminal())
  bars = terminal.Bars(terminal.Screen())
  bars(stage, 0, 1)
  time.sleep(seconds)
  bars(stage, 1, 1)
  text = screen.getvalue()
  assert shown in text and text.endswith("\r") if shown else text == ""

def test_what_reports_can_be_broken_off() -> None:
  bars = terminal.Bars(terminal.Screen())
  bars("prefill", 1, 3)
  bars.stopping = True
  with pytest.raises(KeyboardInterrupt): bars("prefill", 2, 3)
  bars.close()

# ---------------------------------------------------------------------------------------------- what is typed
@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
  """A keyboard on a terminal of its own. `line` stands for the line editor: it reads as far as the first newline."""
  master, slave = pty.openpty()
  monkeypatch.setattr(sys, "stdin", os.fdopen(slave, "r"))
  made = terminal.Keyboard(terminal.Screen(), {"/new", "/quit"}, lambda before: [])

  def line(prompt: str) -> str:
    found = ""
    while not found.endswith("\n"):
      if not (char := os.read(slave, 1).decode()): raise EOFError
      found += char
    return found[:-1]
  monkeypatch.setattr(made, "line", line)
  yield types.SimpleNamespace(read=made.read, slave=slave, master=master, send=lambda text: os.write(master, text.encode()))
  os.close(master)
  sys.stdin.close()

def test_lines_typed_ahead_stay_apart(board: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
  board.send("one\n/new\n\nthr")
  assert [board.read() for _ in range(3)] == [("one", True), ("/new", True), ("", True)]
  editor = board.read.__self__.line
  monkeypatch.setattr(board.read.__self__, "line", lambda prompt: board.send("ee\n") and editor(prompt))
  assert board.read() == ("three", True)  # a line that was not finished stays for the editor
  assert capsys.readouterr().err == "> one\n> /new\n> \n"
  board.send("last\n\x04")
  assert board.read() == ("last", True)
  with pytest.raises(EOFError): board.read()

def test_many_lines_are_a_paste(board: Any, capsys: pytest.CaptureFixture[str]) -> None:
  board.send("".join(f"{i}\n" for i in range(17)))
  assert board.read() == ("\n".join(map(str, range(17))), False)
  assert "(17 lines came at once: taken as one message)" in capsys.readouterr().err

@pytest.mark.parametrize("end", ["\n", "\r"])
def test_what_comes_behind_a_line_belongs_to_it(end: str, board: Any, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
  keyboard = board.read.__self__

  def line(prompt: str) -> str:
    board.send(f"/quit{end}three 漢{end}unfinished")
    return "one"
  monkeypatch.setattr(keyboard, "line", line)
  assert board.read() == ("one\n/quit\nthree 漢\nunfinished", False)
  monkeypatch.setattr(keyboard, "line", lambda prompt: board.send(f"a{end}/quit{end}") and "/new")
  assert board.read() == ("/new", True)     # a command is done before what follows is looked at
  assert board.read() == ("a\n/quit", False)
  capsys.readouterr()

def test_a_paste_is_not_shown_while_it_is_read(board: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  read = os.read

  def late(fd: int, most: int) -> bytes:
    data = read(fd, most)
    if b"two" in data: board.send("three\n")
    return data
  monkeypatch.setattr(board.read.__self__, "line", lambda prompt: board.send("two\n") and "one")
  monkeypatch.setattr(terminal.os, "read", late)
  assert board.read() == ("one\ntwo\nthree", False)
  board.send("four")
  assert b"".join(read(board.master, 1) for _ in "two\r\nfour") == b"two\r\nfour"  # a terminal shows what comes by itself, before and after

def test_lines() -> None: assert terminal.lines("a\r\nb\rc\n\n") == ["a", "b", "c", ""] and terminal.lines("") == []

def test_a_message_of_several_lines(board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
  typed = iter(['"""', "/quit", "  x", '"""', '"""a"""', '"""a', 'b"""', '"""x\ny', '"', "b"])
  monkeypatch.setattr(board.read.__self__, "line", lambda prompt: next(typed))
  assert board.read() == ("/quit\n  x", False)
  assert board.read() == ("a", False)
  assert board.read() == ("a\nb", False)
  assert board.read() == ('"""x\ny', False)  # pasted with the terminal's help: as it is
  assert board.read() == ('"', True)

def test_what_can_not_be_taken(board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(terminal, "LINE", 20)
  board.send("x" * 30 + "\n")
  with pytest.raises(ValueError, match="a line of 20 bytes or more came while nothing was reading, .* it was not sent"): board.read()
  monkeypatch.setattr(terminal, "LARGEST", 1 << 20)
  monkeypatch.setattr(board.read.__self__, "line", lambda prompt: "x" * ((1 << 20) + 1))
  with pytest.raises(ValueError, match="message: over 1 MiB, nothing was sent"): board.read()
