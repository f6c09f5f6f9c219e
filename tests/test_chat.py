"""The command as a user meets it: in a subprocess, in a real terminal, and turn by turn with a model that has a script."""
import argparse
import fcntl
import io
import multiprocessing
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from multiprocessing import popen_spawn_posix
from pathlib import Path
from typing import Any

import pytest

import specgrad
from specgrad import run
from specgrad.prompt import ASSISTANT, BOS, EOS, THINK, THINK_END, USER, encode_chat
from specgrad.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "specgrad.run"]
LONG = ["--temperature", "100", "--seed", "5", "--max-tokens", "3000"]  # near uniform: EOS comes after 2000 tokens
HELLO = "Hello, I am Olga."

def command(*flags: str, stdin: bytes = b"", **env: str) -> tuple[int, str, str]:
  done = subprocess.run([*COMMAND, *flags], input=stdin, capture_output=True, cwd=ROOT, env=os.environ | env)
  return done.returncode, done.stdout.decode(), done.stderr.decode()

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
    """What the terminal got since the last call, up to and with the pattern."""
    end = time.monotonic() + seconds
    while not (found := re.search(pattern.encode(), self.raw[self.at:])):
      alive = self.read(0.1)
      assert alive and time.monotonic() < end, f"{pattern!r} did not come, but {self.raw[self.at:]!r}"
    text = self.raw[self.at:self.at + found.end()].decode("utf-8", "replace")
    self.at += found.end()
    return text

  def send(self, text: str) -> None: os.write(self.fd, text.encode())

  def say(self, text: str) -> str:
    """A message and all up to the prompt after its reply."""
    self.send(text + "\r")
    return self.expect("tok/s.*\r\n") + self.expect("> ")

  def end(self) -> int:
    while self.read(120): pass
    os.close(self.fd)
    code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
    assert b"Traceback" not in self.raw
    return code

# ---------------------------------------------------------------------------------------------- one shot
def test_one_prompt() -> None:
  model = specgrad.load()
  assert model.tokenizer is not None
  want = model.generate(encode_chat(model.tokenizer, [{"role": "user", "content": HELLO}]), max_tokens=512).text
  code, out, err = command("-p", HELLO)
  assert (code, out) == (0, f"{want}\n")
  assert err.startswith("demo: 6 layers, 16 experts, vocabulary 2048; CPU, w4a8 numerics, context 4096\n"
                        "greedy (temperature 0); at most 512 tokens a reply; thinking off\n"
                        "draft auto; verifier: exact, rule greedy, q one-hot, depth 2 fixed, numerics w4a8 fixed-width\n")
  assert re.search(r"\n\d+ tokens, [\d.]+ tok/s, TTFT .*\n$", err) and "\x1b" not in err
  code, piped, err = command("--max-tokens", "2", stdin=f"{HELLO}\n".encode())
  assert code == 0 and out.startswith(piped[:-1]) and len(piped) < len(out) and "(cut at --max-tokens 2)" in err

def test_a_drawn_seed_is_shown_and_repeats_the_run() -> None:
  flags = ("-p", HELLO, "--temperature", "100", "--max-tokens", "12")
  code, out, err = command(*flags)
  seed = re.search(r"temperature 100, top-p 1, top-k 0, min-p 0, seed (\d+);", err)
  assert code == 0 and seed
  assert command(*flags, "--seed", seed[1])[1] == out

def test_neither_torch_nor_transformers_is_imported() -> None:
  script = ("import sys; from specgrad.run import main; code = main(['-p', 'Hello', '--max-tokens', '2']); "
            "print([m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules], file=sys.stderr); exit(code)")
  done = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT)
  assert (done.returncode, done.stderr.decode().splitlines()[-1]) == (0, "[]")

@pytest.mark.parametrize("both", [False, True])
def test_a_reader_that_leaves_ends_it_quietly(both: bool) -> None:
  process = subprocess.Popen([*COMMAND, "-p", HELLO, *LONG], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT if both else subprocess.PIPE)
  assert process.stdout is not None and process.stdout.read(1)
  process.stdout.close()
  error = b"" if process.stderr is None else process.stderr.read()
  assert process.wait(60) in (0, 141) and b"Error" not in error and b"Exception" not in error

@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
  with open("/dev/full", "w") as full:
    done = subprocess.run([*COMMAND, "-p", "Hi"], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, cwd=ROOT)
  assert done.returncode == 2 and done.stderr.endswith(b"\nspecgrad: error: [Errno 28] No space left on device\n")
  assert b"Exception" not in done.stderr

# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("flags, stdin, error", [
  ((), b"", "stdin: empty, want a prompt"),
  ((), b"caf\xe9", "stdin: byte 3 is not UTF-8, want text"),
  (("-p", "-"), b"", "stdin: empty, want a prompt"),
  (("-p", ""), b"", "-p: empty, want a prompt"),
  (("-p", "a\udcff"), b"", "-p: not UTF-8, want UTF-8 text"),
  (("-p", "a", "--system", "a\udcff"), b"", "--system: not UTF-8, want UTF-8 text"),
  (("-p", "--x"), b"", "argument -p/--prompt: expected one argument (a value that starts with a dash: -p='-x'). --help "
                       "lists the flags"),
  (("--foo",), b"", "unrecognized arguments: --foo. --help lists the flags"),
  (("--temp", "1"), b"", "unrecognized arguments: --temp 1. --help lists the flags"),
  (("--temperature", "hot"), b"", "argument --temperature: invalid float value: 'hot'. --help lists the flags"),
  (("-p", "a", "--temperature", "nan"), b"", "sampling: temperature=nan, want 0 to 100"),
  (("-p", "a", "--top-p", "0"), b"", "sampling: top_p=0.0, want above 0, at most 1"),
  (("-p", "a", "--seed", "-1"), b"", "sampling: seed=-1, want 0 to 2^64-1"),
  (("-p", "a", "--max-tokens", "0"), b"", "--max-tokens=0, want at least 1"),
  (("-p", "a", "--gpus", "2"), b"", "CUDA,CUDA:1: several devices are not supported yet, want one"),
  (("-p", "a", "--gpus", "0"), b"", "--gpus=0, want at least 1. Without the flag the CPU is used"),
  (("-p", "a", "--devices", "CPU,CPU:1"), b"", "CPU,CPU:1: several devices are not supported yet, want one"),
  (("-p", "a", "--devices", "CPU,"), b"", "--devices='CPU,', want a name such as CPU or CUDA"),
  (("--gpus", "1", "--devices", "CPU"), b"", "argument --devices: not allowed with argument --gpus. --help lists the "
                                              "flags"),
  (("-p", "a", "--devices", "FOO"), b"", "device FOO: No module named 'tinygrad.runtime.ops_foo', want one that tinygrad can "
                                                  "open here"),
  (("-p", "a", "--model", "/no\x1b[2J\nwhere"), b"", r"/no\x1b[2J where: no such directory, want the folder of a "
                                                    "checkpoint"),
  (("-p", "a", "--max-context", "1"), b"", "engine: max_context=1, want 2 to 4096 (max_position_embeddings of this "
                                           "checkpoint)")])
def test_mistakes_are_one_line(flags: tuple[str, ...], stdin: bytes, error: str) -> None:
  assert command(*flags, stdin=stdin) == (2, "", f"specgrad: error: {error}\n")

def test_a_prompt_that_does_not_fit() -> None:
  code, out, err = command("-p", HELLO, "--max-context", "8")
  assert (code, out) == (2, "")
  assert re.search(r"\nspecgrad: error: prompt of \d+ tokens, context of 8: no room for a reply, shorten it or raise "
                   r"--max-context\n$", err)

def test_no_tokenizer(tmp_path: Path) -> None:
  for file in specgrad.demo_path().iterdir():
    if file.name != "tokenizer.json": (tmp_path / file.name).symlink_to(file)
  code, out, err = command("-p", "a", "--model", str(tmp_path))
  assert (code, out) == (2, "")
  assert err == (f"specgrad: error: {tmp_path}: no tokenizer.json, so there is no text to work with. Fetch that file "
                 "from where the checkpoint comes from, or use the Python API, which takes token ids\n")

def test_no_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
  def none() -> None: raise specgrad.ToolchainError("no clang")
  monkeypatch.setattr(specgrad, "prepare", none)
  assert run.main(["-p", "a"]) == 2
  assert capsys.readouterr() == ("", "specgrad: error: no clang\n")

def test_debug_shows_where() -> None:
  code, _, err = command("-p", "a", "--model", "/nowhere", DEBUG="1")
  assert code == 2 and err.startswith("Traceback")
  assert err.endswith("\nspecgrad: error: /nowhere: no such directory, want the folder of a checkpoint\n")

def test_help() -> None:
  code, out, err = command("--help", COLUMNS="100")
  assert (code, err) == (0, "")
  for text in ("what to run:", "how tokens are chosen:", "sizes and devices:", "per reply (default: 512)",
               "0 is greedy (default: 0.0)"): assert text in out

# ---------------------------------------------------------------------------------------------- the chat, in a terminal
def test_chat() -> None:
  chat = Terminal()
  assert "Ctrl-C stops a reply, Ctrl-D or /quit leaves, /help lists the commands\r\n" in chat.expect("> ")
  first = chat.say(HELLO)
  assert "reused" not in first
  chat.send("\r   \r/nope 1\r")
  assert "tok/s" not in chat.expect("lists them") + chat.expect("> ")
  chat.send("/help\r")
  assert "(no command" not in chat.expect("makes the line a message.") + chat.expect("> ")
  second = re.search(r"(\d+) of (\d+) prompt tokens reused", chat.say("h"))
  assert second and int(second[1]) > 20 and int(second[2]) - int(second[1]) < 8  # only what is new was computed
  assert "tok/s" in chat.say(" /nope")  # a message, because of the space
  chat.send("/new\r")
  chat.expect(r"\(new chat\)\r\n> ")
  text = lambda screen: re.sub(r"\d+ tokens.*", "", screen, flags=re.DOTALL)
  assert text(chat.say(HELLO)) == text(first)
  chat.send("/quit\r")
  assert chat.end() == 0

def test_interrupts() -> None:
  chat = Terminal(*LONG)
  chat.expect("> ")
  chat.send("abc")
  chat.expect("abc")
  time.sleep(0.3)  # Python's readline misses a signal between showing something and waiting for a key
  chat.send("\x03")
  chat.expect(r"\(Ctrl-D or /quit leaves\)\r\n> ")
  seen = []
  for times in (1, 3):
    chat.send(HELLO + "\r")
    chat.expect("\r\n.{40}")  # mid-reply
    for _ in range(times):
      chat.send("\x03")
      time.sleep(0.02)
    stopped = chat.expect(r"\(stopped\)\r\n(\d+) tokens.*\r\n")
    chat.expect("> ")
    seen.append(int(re.findall(r"(\d+) tokens, ", stopped)[-1]))
    assert 3 < seen[-1] < 3000
  reused = re.findall(r"(\d+) of (\d+) prompt tokens reused", stopped)
  assert reused and seen[0] + 5 < int(reused[0][0]) < int(reused[0][1])  # what was shown is in the chat
  chat.send("\x04")
  assert chat.end() == 0

def test_interrupt_while_loading_leaves() -> None:
  chat = Terminal()
  time.sleep(0.6)
  chat.send("\x03")
  assert chat.end() == 130
  assert chat.raw.endswith(b"specgrad: interrupted\r\n")

def test_interrupt_while_compiling(tmp_path: Path) -> None:
  chat = Terminal(CACHEDB=str(tmp_path / "kernels.db"))  # empty: everything is to be compiled
  chat.expect("> ")
  chat.send(HELLO + "\r")
  time.sleep(0.5)
  chat.send("\x03")
  chat.expect(r"\(stopped before the first token: the message is not part of the chat\)\r\n> ")
  chat.send("/quit\r")
  assert chat.end() == 0

def test_narrow_window_and_long_line() -> None:
  chat = Terminal("--max-context", "64", columns=10)
  chat.expect("> ")
  chat.send("\x1b[200~" + "one\ntwo " * 200 + "\x1b[201~\r")  # a paste is one message, whatever is in it
  refused = chat.expect("The message was not sent").replace("\r", "").replace("\n", "")
  assert re.search(r"prompt of \d{3,4} tokens, context of 64: no room for a reply, shorten it or raise --max-", refused)
  assert refused.count("specgrad: error") == 1
  chat.say(HELLO)
  for _ in range(4):  # four short turns fill it
    chat.send(HELLO + "\r")
    if "not sent" in (end := chat.expect("tok/s|/new starts over. The message was not sent") + chat.expect("> ")): break
  assert re.search("prompt of [678]. tokens, context of 64: no room for a reply, /new starts over", end)
  chat.send("/new\r")
  chat.expect(r"\(new chat\)\r\n> ")
  chat.say(HELLO)
  chat.send("/quit\r")
  assert chat.end() == 0

def test_stdout_has_only_text(tmp_path: Path) -> None:
  with open(tmp_path / "out", "wb") as file:
    chat = Terminal(stdout=file.fileno())
    chat.expect("> ")
    chat.say(HELLO)
    chat.send("\x04")
    assert chat.end() == 0
  assert (tmp_path / "out").read_text() == command("-p", HELLO)[1]

# ---------------------------------------------------------------------------------------------- turn by turn
class Scripted:
  """A model whose replies are given: lists of text, each encoded and shown as one step; or an exception to raise."""
  def __init__(self, *replies: list[Any], max_context: int = 4096, finish: str = "stop"):
    self.tokenizer, self.max_context, self.finish = Tokenizer.from_file(specgrad.demo_path()), max_context, finish
    self.config = argparse.Namespace(eos_token_id=1)
    self.replies, self.prompts = list(replies), list[list[int]]()

  def stream(self, ids: list[int], **settings: Any) -> Any:
    from specgrad.engine import Stats
    self.prompts.append(ids)
    stream, pieces, stats = ScriptedStream(), self.replies.pop(0), Stats(prompt_tokens=len(ids))
    stream.stats = stats

    def steps() -> Iterator[tuple[list[int], str]]:
      for piece in pieces:
        if not isinstance(piece, str): raise piece
        yield self.tokenizer.encode(piece, allowed_special=True), piece
      stats.finish_reason = self.finish
      if self.finish == "stop": yield [1], ""
    stream.steps = steps()
    return stream

class ScriptedStream:
  stats: Any
  steps: Iterator[tuple[list[int], str]]
  def __iter__(self) -> Iterator[tuple[list[int], str]]: return self.steps
  def interrupt(self) -> None: pass

def chat_with(model: Scripted, monkeypatch: pytest.MonkeyPatch, *flags: str, interactive: bool = True) -> run.Chat:
  monkeypatch.setattr(run, "load", lambda *_: model)
  return run.Chat(run.parse(flags), "CPU", interactive)

def test_ids_grow_as_the_whole_chat_would_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
  model = Scripted(["Hi", " there."], ["Two", "."], ["Bye."])
  chat = chat_with(model, monkeypatch, "--system", "Be kind.")
  for text in ("Hello", "1 + 1?", "Bye"): chat.turn(text)
  messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"},
              {"role": "assistant", "content": "Hi there."}, {"role": "user", "content": "1 + 1?"},
              {"role": "assistant", "content": "Two."}, {"role": "user", "content": "Bye"}]
  for prompt, n in zip(model.prompts, (2, 4, 6)):
    assert model.tokenizer.decode(prompt) == model.tokenizer.decode(encode_chat(model.tokenizer, messages[:n]))
  assert model.prompts[1][:len(model.prompts[0])] == model.prompts[0] and model.prompts[2].count(0) == 1

@pytest.mark.parametrize("pieces, reasoning, content", [
  (["Let me", " see", "</think>", "Yes", "."], "Let me see", "Yes."),
  (["a </th", "in", "k> b</thi", "nk>c"], "a ", " b</think>c"),  # the tag may come in parts
  (["never ends </th"], "never ends </th", ""),
  (["</think>", "at once"], "", "at once")])
def test_reasoning_goes_to_stderr(pieces: list[str], reasoning: str, content: str, capsys: pytest.CaptureFixture[str],
                                  monkeypatch: pytest.MonkeyPatch) -> None:
  model = Scripted([*pieces], ["x"])
  chat = chat_with(model, monkeypatch, "--think")
  chat.turn("q")
  out, err = capsys.readouterr()
  assert out == (f"{content}\n" if content else "") and err.startswith(reasoning)
  assert ("(reasoning without an answer)" in err) == (not content)
  chat.turn("r")
  assert model.tokenizer.decode(model.prompts[1]) == (  # as the template has it: without the old reasoning
    f"{BOS}{USER}q{ASSISTANT}{THINK_END}{content}{EOS}{USER}r{ASSISTANT}{THINK}")

def test_a_turn_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  model = Scripted(["One."], ["tw", ArithmeticError("not finite")], [KeyboardInterrupt()], ["three"])
  chat = chat_with(model, monkeypatch)
  chat.turn("a")
  with pytest.raises(ArithmeticError): chat.turn("b")
  chat.turn("c")
  assert "(stopped before the first token: the message is not part of the chat)" in capsys.readouterr().err
  chat.turn("d")
  assert model.tokenizer.decode(model.prompts[3]).count(USER) == 2

def test_a_reply_that_is_cut_stays_as_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  model = Scripted(["One", KeyboardInterrupt()], ["two"])
  chat = chat_with(model, monkeypatch)
  chat.turn("a")
  out, err = capsys.readouterr()
  assert out == "One\n" and err.startswith("(stopped)\n")
  chat.turn("b")
  assert f"{THINK_END}One{EOS}{USER}b" in model.tokenizer.decode(model.prompts[1])
  assert "0 of 9 prompt tokens reused" in re.sub("of [0-9]+", "of 9", capsys.readouterr().err)
  for finish, note in (("length", "(cut at --max-tokens 512)"), ("context", "(context of 4096 full: /new starts over)")):
    chat_with(Scripted(["x"], finish=finish), monkeypatch).turn("a")
    assert capsys.readouterr().err.startswith(note)

def test_one_prompt_is_broken_off_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
  chat = chat_with(Scripted([KeyboardInterrupt()]), monkeypatch, interactive=False)
  with pytest.raises(KeyboardInterrupt): chat.turn("a")

# ---------------------------------------------------------------------------------------------- terminal manners
class FakeTerminal(io.StringIO):
  def isatty(self) -> bool: return True

def test_a_model_can_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
  terminal, file = FakeTerminal(), io.StringIO()
  text = "a\x1b[2J\x07\r\x7f\x9b1m\tb\n"
  run.Screen().write(text, terminal)
  run.Screen().write(text, file)
  assert terminal.getvalue() == "a\\x1b[2J\\x07\\x0d\\x7f\\x9b1m\tb\n" and file.getvalue() == text

@pytest.mark.parametrize("stage, seconds, shown", [("compile", 1.6, "compiling, kept for later starts 00:01"),
                                                   ("compile", 0.1, ""), ("load", 0.1, "")])
def test_progress_only_where_it_lasts(stage: str, seconds: float, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sys, "stderr", terminal := FakeTerminal())
  bars = run.Bars(run.Screen())
  bars(stage, 0, 1)
  time.sleep(seconds)
  bars(stage, 1, 1)
  text = terminal.getvalue()
  assert shown in text and text.endswith("\r") if shown else text == ""

def test_compiling_processes_do_not_get_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(popen_spawn_posix.Popen, "_launch", popen_spawn_posix.Popen._launch)  # to have it back afterwards
  run.keep_interrupts()
  with multiprocessing.get_context("spawn").Pool(1) as pool:
    assert signal.SIGINT in pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ()))
  assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
