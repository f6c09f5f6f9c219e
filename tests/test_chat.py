"""The chat as a user meets it: in a real terminal, and turn by turn with a model that has a script."""
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specgrad
from specgrad import chat as chat_module
from specgrad import session, terminal
from specgrad.chat import Chat, Settings
from specgrad.checkpoint import Checkpoint
from specgrad.prompt import ASSISTANT, BOS, EOS, THINK, THINK_END, USER
from specgrad.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "specgrad.run"]
HELLO = "Hello, I am Olga."

class Terminal:
  """The command with a terminal of its own, so that Ctrl-C and readline are the real ones. stdout may go elsewhere."""
  def __init__(self, *flags: str, columns: int = 80, stdout: int | None = None, **env: str):
    self.pid, self.fd = pty.fork()
    if self.pid == 0:
      os.chdir(ROOT)
      if stdout is not None: os.dup2(stdout, 1)
      os.execve(COMMAND[0], [*COMMAND, *flags], os.environ | {"TERM": "xterm", "NO_COLOR": "1"} | env)
    fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    self.raw, self.at = b"", 0

  def read(self, seconds: float) -> bool:
    if not select.select([self.fd], [], [], seconds)[0]: return True
    try: data = os.read(self.fd, 65536)
    except OSError: data = b""  # how Linux says that the other side is closed
    self.raw = re.sub(rb"\x1b\[\?2004[hl]\r?", b"", self.raw + data)  # readline switches pasting on and off
    return bool(data)

  def expect(self, pattern: str, seconds: float = 60) -> str:
    """What the terminal got since the last call, up to and with the pattern; without bars, which only a busy machine shows."""
    end = time.monotonic() + seconds
    while not (found := re.search(pattern.encode(), self.raw[self.at:])):
      alive = self.read(0.1)
      assert alive and time.monotonic() < end, f"{pattern!r} did not come, but {self.raw[self.at:]!r}"
    text = self.raw[self.at:self.at + found.end()].decode("utf-8", "replace")
    self.at += found.end()
    return re.sub(r"(\r(compiling|load|prefill| +)[^\r\n]*)+\r(?!\n)", "", text)

  def send(self, text: str) -> None:
    """All of it, reading meanwhile: a terminal holds only so much in either direction."""
    data = text.encode()
    while data:
      readable, writable, _ = select.select([self.fd], [self.fd], [], 60)
      assert readable or writable, f"{len(data)} bytes do not go in"
      if readable: assert self.read(0)
      elif writable: data = data[os.write(self.fd, data[:512]):]

  def say(self, text: str) -> str:
    """A message and all up to the prompt after its reply."""
    self.send(text + "\r")
    return self.expect("tok/s.*\r\n") + self.expect("> ")

  def do(self, command: str, pattern: str = "") -> str:
    """A command and all up to the next prompt, which has the pattern in it."""
    self.send(command + "\r")
    shown = self.expect("\r\n") + self.expect("(?:^|[\r\n])> ")
    assert re.search(pattern, shown), f"{command}: {shown!r}"
    return shown

  def kill(self) -> None:
    os.kill(self.pid, signal.SIGKILL)
    os.waitpid(self.pid, 0)
    os.close(self.fd)

  def end(self) -> int:
    end = time.monotonic() + 60
    while self.read(1): assert time.monotonic() < end, f"it does not end, after {self.raw[-500:]!r}"
    os.close(self.fd)
    code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
    assert b"Traceback" not in self.raw
    return code

# ---------------------------------------------------------------------------------------------- in a terminal
@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path: return tmp_path_factory.mktemp("data")

@pytest.fixture(scope="module")
def shared_chat(data: Path) -> Iterator[Terminal]:
  """Loading takes seconds, so several tests use one process."""
  chat = Terminal(XDG_DATA_HOME=str(data))
  assert "Ctrl-C stops a reply, Ctrl-D or /quit leaves, /help lists the commands\r\n" in chat.expect("> ")
  yield chat
  chat.send("\x04")
  assert chat.end() == 0

@pytest.fixture
def chat(shared_chat: Terminal) -> Terminal:
  for setting in ("temperature 0", "max_tokens 512"): shared_chat.do(f"/set {setting}")
  shared_chat.do("/new", r"\(new chat\)")
  return shared_chat

def saved(chat: Terminal, data: Path, name: str = "look") -> session.Saved:
  """The chat as it was understood, and the state of the caches."""
  chat.do(f"/save {name}", rf"\(saved {name}: \d+ exchange")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_DATA_HOME", str(data))
    return session.load(name)

def users(chat: Terminal, data: Path) -> list[str]: return [turn["user"] for turn in saved(chat, data).chat["turns"]]

def test_chat(chat: Terminal) -> None:
  first = chat.say(HELLO)
  assert first.startswith(HELLO + "\r\n") and "reused" not in first.replace("reused, context", "")
  for line in ("", "   "): assert "tok/s" not in chat.do(line)
  assert "tok/s" not in chat.do("/nope 1", r"\(no command /nope: /help lists them")
  chat.do("/help", "makes the line a message.")
  second = re.search(r"(\d+) of (\d+) prompt tokens reused", chat.say("h"))
  assert second and int(second[1]) > 20 and int(second[2]) - int(second[1]) < 8  # only what is new was computed
  assert "tok/s" in chat.say(" /nope")  # a message, because of the space
  chat.do("/new", r"\(new chat\)")
  text = lambda screen: re.sub(r"\d+ tokens.*", "", screen, flags=re.DOTALL)
  assert text(chat.say(HELLO)) == text(first)

def test_letters_of_all_kinds(chat: Terminal, data: Path) -> None:
  chat.say("né 漢字 👩\u200d🚀 e\u0301 עברית")
  chat.say("漢字x\x7f\x7fé👍\x7f!\x1b[D\x1b[D\x1b[Dab\x05c")  # backspace and arrows go by characters
  assert users(chat, data) == ["né 漢字 👩\u200d🚀 e\u0301 עברית", "ab漢é!c"]
  chat.send("\x1b[A\x1b[A\x1b[A")        # history: two lines up, beyond /save
  chat.expect("עברית")
  chat.say("")
  assert users(chat, data)[-1] == "né 漢字 👩\u200d🚀 e\u0301 עברית"

def test_several_lines(chat: Terminal, data: Path) -> None:
  chat.say("one\x1b\rtwo")                 # Alt-Enter
  chat.send('"""\r')
  for line in ("/quit", "  x"):
    chat.expect(r"\.\.\. ")
    chat.send(line + "\r")
  chat.expect(r"\.\.\. ")
  chat.say('"""')
  chat.say("\x1b[200~/quit\rb\r\x1b[201~")  # a paste in a terminal that says so
  assert users(chat, data) == ["one\ntwo", "/quit\n  x", "/quit\nb"]

@pytest.mark.parametrize("before, after", [("\x1b[200~", "\x1b[201~\r"), ("", "")])
def test_a_paste_of_10k_lines_is_one_message(before: str, after: str, chat: Terminal) -> None:
  chat.send(before + "".join(f"line {i}\r" for i in range(10000)) + after)
  refused = chat.expect(r"specgrad: error: prompt of \d{5} tokens, context of 4096: no room for a reply, shorten it or raise "
                        r"--max-context. The message was not sent\r\n> ")
  assert ("(10000 lines came at once: taken as one message)" in refused) == (not before)
  chat.do("/stats", "\n0 exchanges")
  assert chat.raw[chat.at:] == b""

def start(chat: Terminal, max_tokens: int) -> None:
  """A reply that goes on and on: near uniform, so that EOS comes after 2000 tokens."""
  for setting in ("temperature 100", "seed 5", "max_tokens 1"): chat.do(f"/set {setting}")
  chat.say("go")                           # compiles what is needed
  chat.do("/undo")
  chat.do(f"/set max_tokens {max_tokens}")
  chat.send("go\r")
  chat.expect("(?s)go\r\n.{40}")               # mid-reply

def test_typed_during_a_reply(chat: Terminal) -> None:
  start(chat, 600)
  chat.send("/undo\r/stats\r")
  assert re.search(r"\(cut after 600 tokens.*> /undo\r\n\(taken back: go; 0 exchanges.*> /stats\r\n0 exchanges",
                   chat.expect("last reply.*\r\n> "), re.DOTALL)

def test_interrupt_at_the_prompt(chat: Terminal) -> None:
  chat.send("abc")
  chat.expect("abc")
  end = time.monotonic() + 60              # Python's readline misses a signal between showing something and waiting for a key
  while b"leaves" not in chat.raw[chat.at:] and time.monotonic() < end:
    chat.send("\x03")
    chat.read(0.5)
  chat.expect(r"\(Ctrl-D or /quit leaves\)\r\n> ")

def test_interrupts(chat: Terminal) -> None:
  start(chat, 3000)
  chat.send("\x03")
  first = re.search(r"\(stopped\)\r\n(\d+) tokens, ", chat.expect("tok/s.*\r\n> "))
  chat.send("go\r")
  chat.expect("(?s)go\r\n.{40}")
  for _ in range(3):
    chat.send("\x03")
    chat.read(0.02)
  second = re.search(r"\(stopped\)\r\n(\d+) tokens, .* (\d+) of (\d+) prompt tokens reused", chat.expect("tok/s.*\r\n> "))
  assert first and second and 3 < int(first[1]) < 3000 and 3 < int(second[1]) < 3000
  assert int(first[1]) + 3 < int(second[2]) < int(second[3])  # what was shown is in the chat

def test_interrupt_in_prefill(chat: Terminal) -> None:
  chat.send("".join(f"{i}\r" for i in range(1000)))
  chat.expect(r"\(1000 lines came at once: taken as one message\)\r\n")
  chat.send("\x03")
  chat.expect(r"\(stopped before the first token: the message is not part of the chat\)\r\n> ")
  assert "15." in chat.say("What is 7 plus 8?")

def test_settings(chat: Terminal, tmp_path: Path) -> None:
  chat.do("/set temperature 0.5", r"\(temperature 0.5, top-p 1, top-k 0, min-p 0, seed \d+; at most 512")
  chat.do("/draft", "draft auto, 2 tokens a step; verifier: exact, rule rejection, q realised, depth 2 fixed, num")
  chat.do("/draft off", "draft auto, 0 tokens a step; verifier: exact, rule plain, q none, depth 0 fixed, numer")
  chat.do("/draft 9", r"specgrad: error: engine: depth=9, want 0 to 5 \(the draft's block size\)")
  assert "tokens/step" not in chat.say(HELLO)
  chat.do("/draft on", "2 tokens a step")
  chat.do("/set temperature 0")
  chat.do("/think low", r"\(thinking low\)")
  assert "(thinking)" in chat.say(HELLO)
  chat.do("/think off", r"\(thinking off\)")
  (tmp_path / "a.txt").write_text("My name is Ida.\n")
  chat.do(f"/read {tmp_path}/a.txt", ": 16 bytes, 5 tokens, goes with the next message")
  assert "tok/s" in chat.say("Who am I?")
  chat.do("/st\t", "\n3 exchanges, ")      # the tab key completes

def test_a_saved_chat_goes_on_after_a_kill(tmp_path: Path, data: Path) -> None:
  flags, env = ("--max-context", "128"), {"XDG_DATA_HOME": str(data)}
  words = lambda screen: "".join(screen.split("> ")[0].split())  # a narrow terminal breaks lines anywhere
  chat = Terminal(*flags, "--temperature", "9", "--seed", "3", "--max-tokens", "20", columns=12, **env)
  chat.expect("(?:^|[\r\n])> ")
  for text in (HELLO, "What is 7 plus 8?"): chat.say(text)
  chat.do("/save kept")
  file = data / "specgrad/kept.chat"
  kept, stats = file.read_bytes(), words(chat.say("Who am I?"))
  want = saved(chat, data, "want")
  for _ in range(9):                       # until no turn fits
    chat.send(HELLO + "\r")
    if "notsent" in (end := words(chat.expect("tok/s|not *\r*\n*sent") + chat.expect("> "))): break
  n = re.search(r"promptof\d+tokens,contextof128:noroomforareply,/drop(\d+)leavesouttheoldest,/undothelastexchange,/newallofthem\.", end)
  assert n
  chat.do(f"/drop {n[1]}")
  chat.say("h")
  chat.kill()
  file.write_bytes(kept[:-1])              # as where the disk lost the end
  with open(tmp_path / "out", "wb") as out: chat = Terminal(*flags, stdout=out.fileno(), **env)
  chat.expect("(?:^|[\r\n])> ")
  chat.do("/load kept", "specgrad: error: .*kept.chat: damaged")
  file.write_bytes(kept)
  assert "anew" not in chat.do("/load kept", r"\(loaded kept: 2 exchanges, \d+ of 128 tokens\)\r\n\(temperature 9, .*seed 3;")
  again, found = words(chat.say("Who am I?")), saved(chat, data, "found")
  assert found.chat == want.chat and all((array == want.state[name]).all() for name, array in found.state.items())
  figures = lambda text: re.findall(r"(\d+)of(\d+)prompttokensreused,context(\d+)", text)
  assert figures(again) == figures(stats) and int(figures(again)[0][0]) > 40
  chat.do("/load look", "saved with context 4096, here 128: the next turn computes all of it anew")
  chat.send("\x04")
  assert chat.end() == 0
  assert (tmp_path / "out").read_text() == found.chat["turns"][-1]["content"].removesuffix("\n") + "\n"  # and nothing else

def test_interrupt_while_loading_leaves() -> None:
  chat = Terminal()
  proc, end = Path(f"/proc/{chat.pid}"), time.monotonic() + 60
  while "specgrad.run" not in (proc / "cmdline").read_text(): chat.read(0.01)
  while not any(os.path.realpath(file).endswith(".db") for file in (proc / "fd").iterdir()):  # the cache of kernels is open
    assert chat.read(0.01) and time.monotonic() < end
  chat.send("\x03")
  assert chat.end() == 130
  assert chat.raw.endswith(b"specgrad: interrupted\r\n")

def test_interrupt_while_compiling(tmp_path: Path) -> None:
  chat = Terminal("--draft", "none", CACHEDB=str(tmp_path / "kernels.db"))  # empty: everything is to be compiled
  chat.expect("> ")
  chat.send(HELLO + "\r")
  chat.expect("compiling")
  chat.send("\x03")
  chat.expect(r"\(stopped before the first token: the message is not part of the chat\)\r\n> ")
  chat.send("/quit\r")
  assert chat.end() == 0

# ---------------------------------------------------------------------------------------------- turn by turn
class Scripted:
  """A model whose replies are given: lists of text, each encoded and shown as one step; or an exception to raise."""
  def __init__(self, *replies: list[Any], max_context: int = 4096, finish: str = "stop"):
    self.tokenizer, self.max_context, self.finish = Tokenizer.from_file(specgrad.demo_path()), max_context, finish
    self.config, self.depth, self.numerics = SimpleNamespace(eos_token_id=1, vocab_size=2048), 2, "w4a8"
    self.replies, self.prompts, self.calls = list(replies), list[list[int]](), list[dict[str, Any]]()
    self.engine = SimpleNamespace(kv_bytes=3_500_000, checkpoint=Checkpoint.open(specgrad.demo_path()), snapshot=self.snapshot,
                                  restore=self.restore)
    self.restored: Any = None

  def snapshot(self) -> dict[str, np.ndarray]: return {"ids": np.array(self.prompts[-1])}
  def restore(self, state: dict[str, np.ndarray]) -> None: self.restored = state["ids"].tolist()
  def reset(self) -> None: self.restored = None
  def verifier(self, *, temperature: float, depth: int | None, coupled: bool) -> str:
    if depth is not None and not 0 <= depth <= 5: raise ValueError(f"engine: depth={depth}, want 0 to 5")
    return f"rule {depth}"

  def stream(self, ids: list[int], **settings: Any) -> Any:
    from specgrad.engine import Stats
    self.prompts.append(ids)
    self.calls.append(settings)
    stream, pieces, stats = ScriptedStream(), self.replies.pop(0), Stats(prompt_tokens=len(ids))
    stream.stats = stats

    def steps() -> Iterator[tuple[list[int], str]]:
      for piece in pieces:
        if not isinstance(piece, str): raise piece
        stats.tokens += 1
        yield self.tokenizer.encode(piece, allowed_special=True), piece
      stats.finish_reason = self.finish
      if self.finish == "stop": yield [1], ""
    stream.steps = steps()
    return stream

class ScriptedStream:
  stats: Any
  steps: Iterator[tuple[list[int], str]]
  interrupted = False
  def __iter__(self) -> Iterator[tuple[list[int], str]]: return self.steps
  def interrupt(self) -> None: self.interrupted = True

def chat_with(model: Scripted, interactive: bool = True, **settings: Any) -> Chat:
  screen = terminal.Screen()
  return Chat(model, Settings(**settings), screen, terminal.Bars(screen), name="demo", interactive=interactive)  # type: ignore[arg-type]

def told(chat: Chat, *messages: str, effort: str = "off") -> str:
  """What the prompt should be: user, assistant, user, ... as the template has it."""
  roles = [{"role": "system", "content": chat.settings.system}] if chat.settings.system else []
  model = chat.model
  assert model.tokenizer is not None
  return model.tokenizer.decode(chat_module.encode(model, roles + [{"role": "assistant" if i % 2 else "user", "content": text}
                                                                   for i, text in enumerate(messages)], effort))

def asked(chat: Chat) -> str: return chat.model.tokenizer.decode(chat.model.prompts[-1])  # type: ignore

def test_ids_grow_as_the_whole_chat_would_be_encoded() -> None:
  chat = chat_with(model := Scripted(["Hi", " there."], ["Two", "."], ["Bye."]), system="Be kind.")
  said = []
  for text, reply in (("Hello", "Hi there."), ("1 + 1?", "Two."), ("Bye", "Bye.")):
    chat.turn(text)
    said += [text]
    assert asked(chat) == told(chat, *said)
    said += [reply]
  assert model.prompts[1][:len(model.prompts[0])] == model.prompts[0] and model.prompts[2].count(0) == 1

@pytest.mark.parametrize("pieces, reasoning, content", [
  (["Let me", " see", "</think>", "Yes", "."], "Let me see", "Yes."),
  (["a </th", "in", "k> b</thi", "nk>c"], "a ", " b</think>c"),  # the tag may come in parts
  (["never ends </th"], "never ends </th", ""),
  (["</think>", "at once"], "", "at once")])
def test_reasoning_goes_to_stderr(pieces: list[str], reasoning: str, content: str, capsys: pytest.CaptureFixture[str]) -> None:
  chat = chat_with(model := Scripted([*pieces], ["x"]), effort="low")
  chat.turn("q")
  out, err = capsys.readouterr()
  assert out == (f"{content}\n" if content else "")
  assert err.startswith((f"(thinking)\n{reasoning}\n" if reasoning else "") + ("(answer)\n" if reasoning and content else ""))
  assert ("(reasoning without an answer)" in err) == (not content)
  chat.turn("r")
  assert model.tokenizer.decode(model.prompts[1]) == (  # as the template has it: without the old reasoning
    f"{BOS}{USER}q{ASSISTANT}{THINK_END}{content}{EOS}{USER}r{ASSISTANT}{THINK}")

def test_thinking_and_system_prompt_change_between_turns() -> None:
  chat = chat_with(Scripted(["One."], ["hm</think>Two."], ["Three."], ["Four."]))
  chat.turn("a")
  chat.command("/think low")
  chat.turn("b")
  assert asked(chat) == told(chat, "a", "One.", "b", effort="low")
  chat.command("/think off")
  chat.turn("c")
  assert asked(chat) == told(chat, "a", "One.", "b", "Two.", "c")
  chat.command("/system Be kind.")
  chat.turn("d")
  assert asked(chat) == told(chat, "a", "One.", "b", "Two.", "c", "Three.", "d") and "Be kind." in asked(chat)

def test_a_turn_that_fails_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
  chat = chat_with(Scripted(["One."], ["tw", ArithmeticError("not finite")], [KeyboardInterrupt()], ["three"]))
  chat.turn("a")
  with pytest.raises(ArithmeticError): chat.turn("b")
  assert chat.turn("c") is None
  assert "(stopped before the first token: the message is not part of the chat)" in capsys.readouterr().err
  chat.turn("d")
  assert asked(chat) == told(chat, "a", "One.", "d")

def test_a_reply_that_is_cut_stays_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
  chat = chat_with(Scripted(["One", KeyboardInterrupt()], ["two"]))
  chat.turn("a")
  out, err = capsys.readouterr()
  assert out == "One\n" and err.startswith("(stopped)\n")
  chat.turn("b")
  assert f"{THINK_END}One{EOS}{USER}b" in asked(chat)
  assert "0 of 9 prompt tokens reused" in re.sub("of [0-9]+ p", "of 9 p", capsys.readouterr().err)
  for finish, note in (("length", "(cut after 512 tokens: /set max_tokens N allows more)"),
                       ("context", "(context of 4096 full after 5 + 1 tokens: /drop leaves out the oldest exchange, /undo the last,")):
    chat_with(Scripted(["x"], finish=finish)).turn("a")
    assert capsys.readouterr().err.startswith(note)

def test_one_prompt_is_broken_off_by_an_interrupt() -> None:
  with pytest.raises(KeyboardInterrupt): chat_with(Scripted([KeyboardInterrupt()]), interactive=False).turn("a")

def test_json_keeps_what_a_terminal_must_not_get() -> None:
  text = "a\x1b[2J\u202e\n"
  reply = chat_with(Scripted([text])).turn("q")
  assert reply is not None
  found = json.loads(json.dumps(reply.as_dict("demo", 7, Settings(temperature=1.0))))
  assert (found["text"], found["finish_reason"], found["settings"]["seed"], found["model"]) == (text, "stop", 7, "demo")
  assert found["ids"][-1] == 1 and found["statistics"]["prompt_tokens"] == 5

# ---------------------------------------------------------------------------------------------- commands
def test_undo_regen_drop(capsys: pytest.CaptureFixture[str]) -> None:
  chat = chat_with(model := Scripted(["1."], ["2."], ["two."], [KeyboardInterrupt()], ["3."], ["4."]), temperature=1.0, seed=5)
  chat.turn("a")
  chat.turn("b")
  chat.command("/regen")
  assert asked(chat) == told(chat, "a", "1.", "b") and model.calls[1]["seed"] == 5 != model.calls[2]["seed"] == chat.seed
  chat.command("/regen")                   # stopped: the old reply stays
  chat.command("/undo")
  chat.command("/undo")
  assert "(taken back: b; 1 exchange, 8 of 4096 tokens)" in capsys.readouterr().err
  with pytest.raises(ValueError, match="^/undo: the chat is empty"): chat.command("/undo")
  with pytest.raises(ValueError, match="^/regen: the chat is empty"): chat.command("/regen")
  chat.turn("c")
  assert asked(chat) == told(chat, "c")
  chat.turn("d")
  with pytest.raises(ValueError, match="^/drop 3: the chat has 2 exchanges, want 1 to 2$"): chat.command("/drop 3")
  chat.command("/drop")
  assert [turn.user for turn in chat.turns] == ["d"]
  with pytest.raises(ValueError, match="^/drop x: want a number$"): chat.command("/drop x")

def test_a_context_that_is_full_says_what_would_help() -> None:
  chat = chat_with(Scripted(*[[f"{i}."] for i in range(9)], max_context=40))
  for i in range(4): chat.turn(str(i))
  turns = list(chat.turns)
  with pytest.raises(ValueError, match="^prompt of 47 tokens, context of 40: no room for a reply, /drop 2 leaves out the oldest, "
                                       "/undo the last exchange, /new all of them. The message was not sent$"):
    chat.turn("x " * 14)
  assert chat.turns == turns
  chat.command("/drop 1")
  with pytest.raises(ValueError, match="/drop 1 leaves"): chat.turn("x " * 14)
  chat.command("/drop 1")
  chat.turn("x " * 14)
  assert asked(chat) == told(chat, "2", "2.", "3", "3.", "x " * 14)
  with pytest.raises(ValueError, match="no room for a reply, shorten it or raise --max-context. The"): chat.turn("x " * 40)
  with pytest.raises(ValueError, match="--max-context$"): chat_with(Scripted(max_context=4), interactive=False).turn("x")

@pytest.mark.parametrize("line, error", [
  ("/set temperature hot", "/set temperature: hot is no number"), ("/set top_k 1.5", "/set top_k: 1.5 is no whole number"),
  ("/set heat 1", "/set heat 1: want a name and a value. Names: temperature, "), ("/set temperature", "/set temperature: want a name and"),
  ("/set temperature nan", "sampling: temperature=nan, want 0 to 100"), ("/set seed -1", "sampling: seed=-1, want"),
  ("/set max_tokens 0", "sampling: max_tokens=0, want at least 1"), ("/think max", "effort=max, want off or low"),
  ("/think hot", "effort=hot, want one of off, low, high, max"), ("/draft 6", "engine: depth=6, want 0 to 5"),
  ("/draft x", "/draft x: want on, off or a number"), ("/new x", "/new x: want /new, which starts over"),
  ("/save", "/save: want /save NAME, which keeps"), ("/load  ", "/load: want /load NAME"), ("/read", "/read: want /read FILE"),
  ("/save ../x", "name='../x', want letters"), ("/load /etc/passwd", "name='/etc/passwd', want letters")])
def test_commands_that_can_not_be_done_change_nothing(line: str, error: str) -> None:
  chat = chat_with(Scripted(), temperature=0.5, seed=5, depth=1)
  with pytest.raises(ValueError, match="^" + re.escape(error)): chat.command(line)
  assert chat.settings == Settings(temperature=0.5, seed=5, depth=1) and chat.seed == 5

def test_settings_reach_the_model(capsys: pytest.CaptureFixture[str]) -> None:
  chat = chat_with(model := Scripted(["x"]))
  for name, value in (("temperature", "0.5"), ("top_p", "0.9"), ("top_k", "40"), ("min_p", "0.1"), ("seed", "7"), ("max_tokens", "9"),
                      ("repetition_penalty", "1.1"), ("presence_penalty", "0.2"), ("frequency_penalty", "-0.3")):
    chat.command(f"/set {name} {value}")
  chat.command("/draft off")
  chat.turn("a")
  assert model.calls == [{"max_tokens": 9, "seed": 7, "depth": 0, "coupled": False, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
                          "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3}]
  assert "min-p 0.1, seed 7, repetition penalty 1.1, presence penalty 0.2, frequency penalty -0.3; at m" in capsys.readouterr().err
  chat.command("/new")
  assert chat.seed == 7

def test_a_file_goes_with_the_next_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  chat, file = chat_with(Scripted(["One."], ["Two."], max_context=300)), tmp_path / "my notes.txt"
  file.write_text("Olga\u202e\x1b dances.\n")
  chat.command(f"/read {file}")
  chat.command(f"/read {file}")
  chat.command("/undo")
  assert f"({file} is not sent; 0 exchanges, 0 of 300 tokens)" in capsys.readouterr().err
  chat.turn("Who?")
  assert asked(chat) == told(chat, "Olga\u202e\x1b dances.\n\n\nWho?")
  chat.turn("And?")
  assert asked(chat) == told(chat, "Olga\u202e\x1b dances.\n\n\nWho?", "One.", "And?")
  file.write_text("x " * 500)
  with pytest.raises(ValueError, match=r"my notes.txt: \d+ tokens, context of 300: it does not fit, not even alone"):
    chat.command(f"/read {file}")

def test_what_is_no_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(chat_module, "LARGEST", 100)
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "link").symlink_to("/dev/zero")
  for name, content in (("large", b"x" * 101), ("empty", b""), ("binary", b"ab\0"), ("latin", b"caf\xe9")):
    (tmp_path / name).write_bytes(content)
  for path, error in (("pipe", "not a file"), ("link", "not a file"), ("/dev/tty", "not a file"), (".", "not a file"),
                      ("large", "101 bytes, want at most 100"), ("empty", "empty"), ("binary", "byte 2 is 0"),
                      ("latin", "byte 3 is not UTF-8"), ("none", "No such file"), ("a\0b", "embedded null byte"),
                      ("x" * 5000, "File name too long")):
    with pytest.raises(ValueError, match=error) as found: chat_module.read_text(str(tmp_path / path))
    assert "\n" not in str(found.value)
  (tmp_path / "good").write_text("né\n")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert chat_module.read_text("~/good") == "né\n"

def test_what_can_be_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
  chat = chat_with(Scripted())
  session.save("kept", session.Saved("", {}))
  assert "/stats " in chat.complete("") and chat.complete("/load ") == ["kept "] and "top_p " in chat.complete("/set ")
  assert chat.complete("hello ") == chat.complete("/set top_p ") == []

# ---------------------------------------------------------------------------------------------- saved chats
@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
  return tmp_path / "specgrad"

def test_a_chat_is_saved_and_goes_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
  chat = chat_with(model := Scripted(["One."], ["Two."]), temperature=0.5, system="Be kind.", depth=3)
  chat.turn("a 漢\x1b")
  chat.command("/save x")
  again = chat_with(other := Scripted(["Two."]))
  again.command("/load x")
  assert (again.settings, again.seed, again.turns) == (chat.settings, chat.seed, chat.turns) and other.restored == model.prompts[-1]
  err = capsys.readouterr().err
  assert "(loaded x: 1 exchange, " in err and "anew" not in err
  for c in (chat, again): c.turn("b")
  assert model.prompts[-1] == other.prompts[-1] and model.calls[-1] == other.calls[-1]

def test_a_cache_of_other_settings_is_computed_anew(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
  chat = chat_with(model := Scripted(["One."]), depth=3)
  chat.turn("a")
  chat.command("/save x")
  for change, why in (({"max_context": 64}, "saved with context 4096, here 64"), ({"restore": None}, "engine: other shape"),
                      ({"numerics": "reference"}, "saved with numerics w4a8, here ref")):
    other = Scripted(["Two."])
    for name, value in change.items(): setattr(other, name, value)
    if "restore" in change: other.engine.restore = lambda state: (_ for _ in ()).throw(ValueError("engine: other shape"))
    again = chat_with(other)
    again.command("/load x")
    assert other.restored is None and again.turns == chat.turns
    assert f"{why}" in (err := capsys.readouterr().err) and ": the next turn computes all of it anew)" in err
  saved = session.load("x")
  session.save("x", session.Saved(saved.model, saved.chat))
  chat_with(Scripted()).command("/load x")
  assert "saved as text alone: the next turn computes all of it anew" in capsys.readouterr().err
  assert model.restored is None

def test_a_chat_of_another_model_or_shape_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
  chat = chat_with(Scripted(["One."]))
  chat.turn("a")
  chat.command("/save x")
  good = session.load("x")
  turn = good.chat["turns"][0]
  session.save("other", session.Saved("0" * 32, good.chat, good.state))
  with pytest.raises(ValueError, match="^other: checkpoint=000000000000, want [0-9a-f]{12}. It is the chat of another model$"):
    chat.command("/load other")
  turns = [{}, 5, turn | {"ids": [5000]}, turn | {"ids": ["1"]}, turn | {"user": 5}, turn | {"more": 1}]
  settings = [{"x": 1}, {"temperature": -1}, {"temperature": "hot"}, {"effort": "max"}, {"system": 5}, {"seed": "x"}, {"max_tokens": 1.5},
              {"coupled": 1}, {"depth": "on"}]
  for change in (*({"turns": [x]} for x in turns), {"turns": 5}, *({"settings": x} for x in settings), {"settings": 5}, {"seed": None},
                 {"seed": -1}, {"seed": "1"}, {"kind": 3}):
    session.save("bad", session.Saved(good.model, good.chat | change, good.state))
    before = chat.turns, chat.settings, chat.seed
    with pytest.raises(ValueError): chat.command("/load bad")
    assert (chat.turns, chat.settings, chat.seed) == before
  session.save("deep", session.Saved(good.model, good.chat | {"settings": {"depth": 9}}, good.state))
  chat.command("/load deep")
  assert chat.settings.depth is None and "a draft depth of 9 is not possible here" in capsys.readouterr().err

def test_a_disk_error_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  chat = chat_with(Scripted())
  home.parent.chmod(0o700)
  home.write_text("a file in the folder's place")
  with pytest.raises(ValueError, match="^x: (File exists|Not a directory)$"): chat.command("/save x")

# ---------------------------------------------------------------------------------------------- the loop
class Keys:
  """A keyboard whose lines are given; an exception among them is raised."""
  reading = False
  def __init__(self, *typed: Any): self.typed = list(typed)
  def read(self) -> tuple[str, bool]:
    text = self.typed.pop(0)
    if not isinstance(text, str): raise text
    return text, "\n" not in text

def test_the_loop_survives_mistakes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(signal, "signal", lambda *_: None)
  for end in ("/quit", "/exit", EOFError()):
    keys = Keys("", "/nope", "/set x", KeyboardInterrupt(), UnicodeDecodeError("utf-8", b"", 0, 1, ""), "bad", " /quit ", "/quit\nmore",
                "  if x:\n    y", end)
    monkeypatch.setattr(chat_module, "Keyboard", lambda *_, keys=keys: keys)
    chat = chat_with(Scripted([ArithmeticError("not finite")], ["One."], ["Two."], ["Three."]))
    chat.loop()
    assert [turn.user for turn in chat.turns] == ["/quit", "/quit\nmore", "  if x:\n    y"] and not keys.typed
    err = capsys.readouterr().err
    for text in ("(no command /nope", "error: /set x: want", "(Ctrl-D or /quit leaves)", "error: not finite"): assert text in err

def test_what_an_interrupt_means() -> None:
  chat = chat_with(Scripted())
  chat.keyboard = keys = Keys()  # type: ignore[assignment]
  chat.on_interrupt()                      # between a message and its reply, or during a command
  assert chat.bars.stopping
  chat.bars.stopping, keys.reading = False, True
  with pytest.raises(KeyboardInterrupt): chat.on_interrupt()
  keys.reading = False
  chat.stream = stream = ScriptedStream()  # type: ignore[assignment]
  chat.on_interrupt()                      # the running step ends first
  assert stream.interrupted and chat.bars.stopping
  with pytest.raises(KeyboardInterrupt): chat.on_interrupt()
  chat.on_interrupt()                      # nothing left to stop
  chat.bars.stopping, chat.bars.stage, chat.stream = False, "compile", stream  # type: ignore[assignment]
  with pytest.raises(KeyboardInterrupt): chat.on_interrupt()

def test_an_interrupt_before_the_reply_stops_it() -> None:
  chat = chat_with(model := Scripted(["One."]))
  chat.bars.stopping = True
  assert chat.turn("a") is None and not chat.turns and len(model.prompts) == 1
