"""The terminal: what is shown on it, progress, and lines that people type or paste. Knows text, no model.

stdout carries the model's text and nothing else; prompts, notes, statistics and progress go to stderr."""
from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Collection
from typing import Any, TextIO

from tqdm import tqdm

BIDI = (*range(0x202a, 0x202f), *range(0x2066, 0x206a))    # they would let text show in another order than it has
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
CONTROL |= {code: f"\\u{code:04x}" for code in BIDI}
BLOCK = '"""'                                              # opens and closes a message of several lines
TYPED_AHEAD = 16                                           # lines at most that were typed while nothing was reading
LINE = 4095                                                # bytes of a line that a terminal keeps while nothing is reading
LARGEST = 4 << 20                                          # bytes of a message or a file

def error_line(error: BaseException) -> str:
  text = str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)
  return f"specgrad: error: {' '.join(text.split())}".translate(CONTROL)

class Screen:
  """Both outputs as the one terminal that they mostly are: knows which of them has a line that is not finished."""
  def __init__(self) -> None:
    self.open: TextIO | None = None
    self.color = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"

  def write(self, text: str, stream: TextIO, dim: bool = False) -> None:
    """Control characters would let a model steer the terminal; a file gets them as they are."""
    if not text: return
    if self.open not in (None, stream): self.end_line()
    self.open = None if text.endswith("\n") else stream
    if stream.isatty(): text = text.translate(CONTROL)
    stream.write(f"\x1b[2m{text}\x1b[0m" if dim and self.color else text)
    stream.flush()

  def end_line(self) -> None:
    if self.open: self.write("\n", self.open)

  def note(self, text: str, dim: bool = False) -> None:
    self.end_line()
    self.write(text, sys.stderr, dim)
    self.end_line()

class Bars:
  """Progress of what lasts longer than a second, on a terminal only. A compilation reports its start and its end, so a
  thread keeps its clock going; a server's engine reports from several. `stopping` breaks off what reports, between two
  chunks or before a compilation: nothing is half done then."""
  def __init__(self, screen: Screen) -> None:
    self.screen, self.stage, self.over, self.stopping = screen, "", threading.Event(), False
    self.bar: Any = None
    self.clock: threading.Thread | None = None
    self.lock = threading.RLock()

  def __call__(self, stage: str, done: int, total: int) -> None:
    with self.lock:
      if stage != self.stage: self.start(stage, done, total)
      elif stage != "compile": self.bar.update(done - self.bar.n)
      if done >= total: self.close()
    if self.stopping: raise KeyboardInterrupt

  def start(self, stage: str, done: int, total: int) -> None:
    self.close()
    clock = "compiling, kept for later starts {elapsed}" if stage == "compile" else None
    self.stage, self.bar = stage, tqdm(
      desc=stage, total=total, initial=done, unit="B" if stage == "load" else " tokens", unit_scale=stage == "load",
      bar_format=clock, file=sys.stderr, delay=1, disable=None, leave=False, dynamic_ncols=True)
    if stage == "compile" and not self.bar.disable:
      self.over = threading.Event()
      self.clock = threading.Thread(target=self.tick, args=(self.bar, self.over), daemon=True)
      self.clock.start()

  def tick(self, bar: Any, over: threading.Event) -> None:
    if over.wait(1): return
    if self.screen.open and self.screen.open.isatty(): sys.stderr.write("\n")  # mid-reply: the bar gets its own line
    while not over.wait(0.25): bar.update(0)

  def close(self) -> None:
    with self.lock:
      self.over.set()
      if self.clock: self.clock.join()
      if self.bar is not None: self.bar.close()
      self.stage, self.bar, self.clock = "", None, None

class Keyboard:
  """Commands and messages from the terminal. What comes faster than anybody types is a paste and stays one message, with
  or without the terminal's help: thousands of lines must not become thousands of messages."""
  def __init__(self, screen: Screen, commands: Collection[str], complete: Callable[[str], list[str]]) -> None:
    """complete: the line before the word at the cursor -> what that word can be."""
    self.screen, self.commands, self.fd = screen, commands, sys.stdin.fileno()
    self.reading = False               # whether Ctrl-C is meant for the line
    self.ahead: list[str] = []         # lines that came before they were asked for
    self.pasted = self.ended = False   # whether those are one paste; whether Ctrl-D came after them
    self.came = 0                      # lines of pastes in what is being read
    with contextlib.suppress(ImportError):
      import readline  # only here: in other places it would write to the terminal
      if "libedit" in (readline.__doc__ or ""): return

      def completer(word: str, n: int) -> str | None:
        found = [x for x in complete(readline.get_line_buffer()[:readline.get_begidx()]) if x.startswith(word)]
        return found[n] if n < len(found) else None
      readline.set_completer(completer)
      readline.set_completer_delims(" ")
      for binding in ("set enable-bracketed-paste on", "tab: complete", *(rf'"\e\C-{key}": "\C-v\C-j"' for key in "mj")):
        readline.parse_and_bind(binding)

  def read(self) -> tuple[str, bool]:
    """-> text, whether it may be a command; a message may have several lines. Raises EOFError at the end,
    KeyboardInterrupt, and ValueError for what can't be taken."""
    self.reading, self.came = True, 0
    try:
      text = self.entry("> ")
      first, several, _ = text.partition("\n")
      block = first.rstrip() == BLOCK or (first.startswith(BLOCK) and not several)
      while block and not (len(text.rstrip()) >= 2 * len(BLOCK) and text.rstrip().endswith(BLOCK)): text += "\n" + self.entry("... ")
    finally: self.reading = False
    if self.came: self.screen.note(f"({self.came} lines came at once: taken as one message)")
    if len(text.encode(errors="replace")) > LARGEST: raise ValueError(f"message: over {LARGEST >> 20} MiB, nothing was sent")
    if block: text = text.rstrip().removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    return text, not block and not several

  def entry(self, prompt: str) -> str:
    """The next line, or all lines of a paste."""
    if not self.ahead: self.typed_ahead()
    if self.ahead: self.screen.note(prompt + self.ahead[0] if not self.pasted else "")
    elif self.ended: raise EOFError
    else:
      line = self.line(prompt)
      if not (rest := self.burst()): return line
      self.ahead, self.pasted = [line, *lines(rest)], True
    if not self.pasted or self.ahead[0].partition(" ")[0] in self.commands: return self.ahead.pop(0)
    text, self.came, self.ahead = "\n".join(self.ahead), self.came + len(self.ahead), []
    return text

  def line(self, prompt: str) -> str:
    """input() edits the line, but writes its prompt to stdout, so not where that is a file."""
    if sys.stdout.isatty(): return input(prompt)
    self.screen.write(prompt, sys.stderr)
    self.screen.open = None
    if line := sys.stdin.readline(): return line.removesuffix("\n")
    raise EOFError

  def typed_ahead(self) -> None:
    """Finished lines that wait already; one that is not finished stays for the line editor."""
    found, wait = "", 0.0
    while not self.ended and select.select([self.fd], [], [], wait)[0]:
      data = os.read(self.fd, 65536)
      if len(data) >= LINE: raise ValueError(f"a line of {LINE} bytes or more came while nothing was reading, and terminals cut those: "
                                             "it was not sent")
      found, wait, self.ended = found + data.decode(errors="replace"), 0.02, not data
    self.ahead = lines(found)
    self.pasted = len(self.ahead) > TYPED_AHEAD

  def burst(self) -> str:
    """What comes right behind a line."""
    if not select.select([self.fd], [], [], 0.02)[0]: return ""
    before, data = termios.tcgetattr(self.fd), bytearray()
    now = termios.tcgetattr(self.fd)
    now[3] &= ~(termios.ICANON | termios.ECHO)  # whatever its length, and the line that is not finished, too
    now[6][termios.VMIN], now[6][termios.VTIME] = 1, 0
    try:
      termios.tcsetattr(self.fd, termios.TCSANOW, now)
      while select.select([self.fd], [], [], 0.3)[0] and (part := os.read(self.fd, 65536)):
        if len(data) <= LARGEST: data += part
    finally: termios.tcsetattr(self.fd, termios.TCSANOW, before)
    return data.decode(errors="replace")

def lines(text: str) -> list[str]: return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n") if text else []
