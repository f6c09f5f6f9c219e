"""The command in a subprocess: one prompt, mistakes, help. The chat itself is in test_chat.py."""
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from multiprocessing import popen_spawn_posix
from pathlib import Path

import numpy as np
import pytest

import specgrad
from specgrad import run
from specgrad.prompt import encode_chat

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "specgrad.run"]
LONG = ["--temperature", "100", "--seed", "5", "--max-tokens", "3000"]  # near uniform: EOS comes after 2000 tokens
HELLO = "Hello, I am Olga."

def command(*flags: str, stdin: bytes = b"", **env: str) -> tuple[int, str, str]:
  done = subprocess.run([*COMMAND, *flags], input=stdin, capture_output=True, cwd=ROOT, env=os.environ | env)
  return done.returncode, done.stdout.decode(), done.stderr.decode()

# ---------------------------------------------------------------------------------------------- one shot
def test_one_prompt() -> None:
  model = specgrad.load()
  assert model.tokenizer is not None
  prompt = encode_chat(model.tokenizer, [{"role": "user", "content": HELLO}])
  want = model.generate(prompt, max_tokens=512)
  code, out, err = command("-p", HELLO)
  assert (code, out) == (0, f"{want.text}\n")
  assert err.startswith("demo: 6 layers, 16 experts, vocabulary 2048; CPU, w4a8 numerics, context 4096, KV 3.5 MB\n"
                        "greedy (temperature 0); at most 512 tokens a reply; thinking off\n"
                        "draft auto; verifier: exact, rule greedy, q one-hot, depth 2 fixed, numerics w4a8 fixed-width\n")
  assert re.search(r"\n\d+ tokens, [\d.]+ tok/s, TTFT .*, context 25 of 4096\n$", err) and "\x1b" not in err
  code, out, err = command("--json", "--logprobs", "3", "--max-tokens", "2", stdin=f"{HELLO}\n".encode())
  found = json.loads(out)
  assert code == 0 and out.count("\n") == 1 and "(cut after 2 tokens: --max-tokens N allows more)" in err
  assert (found["ids"], found["finish_reason"], found["reasoning"]) == (want.ids[:2], "length", "")
  assert want.text is not None and found["text"] and want.text.startswith(found["text"]) and found["text"] not in err
  assert found["settings"]["max_tokens"] == 2 and found["statistics"]["tokens"] == 2
  for i, said in enumerate(found["logprobs"]):
    logits = model.logits([*prompt, *want.ids[:i]])[-1].astype(np.float64)
    law = logits - np.logaddexp.reduce(logits)
    assert said["id"] == found["ids"][i] == said["top"][0]["id"] and said["logprob"] == said["top"][0]["logprob"]
    assert [x["id"] for x in said["top"]] == np.argsort(-law)[:3].tolist()
    assert np.abs(law[[x["id"] for x in said["top"]]] - [x["logprob"] for x in said["top"]]).max() < 1e-3
  assert len(found["logprobs"]) == 2

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
  (("-p", "a", "--max-tokens", "0"), b"", "sampling: max_tokens=0, want at least 1"),
  (("-p", "a", "--think", "hot"), b"", "argument --think: invalid choice: 'hot' (choose from 'off', 'low', 'high', 'max'). --help "
                                       "lists the flags"),
  (("-p", "a", "--think", "max", "--devices", "FOO"), b"",  # before the load
   f"{specgrad.demo_path()}/encoding/*.py: REASONING_EFFORT_PROMPTS=missing, want its text for effort max. It comes with the "
   "checkpoint, in the folder encoding."),
  (("-p", "a", "--think", "max", "--model", "/nowhere"), b"", "/nowhere: no such directory, want the folder of a checkpoint"),
  (("--serve", "--temperature", "0", "--system", "x", "--top-k=0", "-p", "a"), b"",
   "--serve: -p, --system, --temperature, --top-k beside it, want none of them. Each request has its own prompt and settings"),
  (("--serve", "0", "--json", "--think", "--seed", "1", "--logprobs", "--self-test", "--max-tokens", "512"), b"",
   "--serve: --self-test, --think, --json, --logprobs, --seed, --max-tokens beside it, want none of them. Each request has its own "
   "prompt and settings"),
  (("-p", "a", "--logprobs", "2"), b"", "--logprobs=2, want --json beside it, which shows them"),
  (("-p", "a", "--json", "--logprobs", "21"), b"", "--logprobs=21, want 0 to 20"),
  (("-p", "a", "--gpus", "0"), b"", "--gpus=0, want at least 1. Without the flag the CPU is used"),
  (("-p", "a", "--devices", "CPU,CPU"), b"", "load: devices=CPU,CPU, want different ones of one kind"),
  (("-p", "a", "--devices", "CPU,"), b"", "--devices='CPU,', want names such as CPU or CUDA,CUDA:1"),
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

def test_devices() -> None:
  for flags, want in (([], ("CPU",)), (["--gpus", "2"], ("CUDA", "CUDA:1")), (["--devices", "NV,NV:2"], ("NV", "NV:2"))):
    assert run.devices(run.parse(flags)) == want

@pytest.mark.parametrize("where", ["CC", "PYTHONPATH"])
def test_an_interrupt_while_it_starts(where: str, tmp_path: Path) -> None:
  """While the package looks for a compiler, and in the imports of the command."""
  (tmp_path / "clang").write_text("#!/bin/sh\nkill -INT $PPID\nsleep 5\n")
  (tmp_path / "clang").chmod(0o700)
  (tmp_path / "tqdm.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n")
  env = {"CC": str(tmp_path / "clang")} if where == "CC" else {"PYTHONPATH": str(tmp_path)}
  assert command("-p", "a", **env) == (130, "", "specgrad: interrupted\n")

def test_an_interrupt_that_was_dealt_with_is_not_how_it_ends(tmp_path: Path) -> None:
  """CPython remembers one that came during an exec of source, as tinygrad's compilations are."""
  (tmp_path / "compiles.py").write_text("""
import sys
from specgrad import run
def compiles(argv):
  try: exec("raise KeyboardInterrupt")
  except KeyboardInterrupt: pass
run.run = compiles
sys.exit(run.main())
""")
  done = subprocess.run([sys.executable, "-m", "compiles"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)})
  assert done.returncode == 0

def test_a_prompt_that_does_not_fit() -> None:
  code, out, err = command("-p", HELLO, "--max-context", "8")
  assert (code, out) == (2, "")
  assert re.search(r"\nspecgrad: error: prompt of \d+ tokens, context of 8: no room for a reply, shorten it or raise "
                   r"--max-context\n$", err)

def test_json_needs_a_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(run, "one_prompt", lambda _: None)  # as with a terminal
  assert run.main(["--json"]) == 2
  assert capsys.readouterr() == ("", "specgrad: error: --json: no prompt, want -p TEXT or text on stdin\n")

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

def test_compiling_processes_do_not_get_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(popen_spawn_posix.Popen, "_launch", popen_spawn_posix.Popen._launch)  # to have it back afterwards
  run.keep_interrupts()
  with multiprocessing.get_context("spawn").Pool(1) as pool:
    assert signal.SIGINT in pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ()))
  assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
