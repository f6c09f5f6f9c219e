"""The checkpoint's own texts: every form they may be written in, and every file that must not be believed."""
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgrad.encoding import BOS, DSML, TASKS, THINK, Encoding, PromptError, with_control

SECOND = f'''"""How messages become prompts."""
import json, re
from typing import Any, Dict

bos_token: str = "{BOS}"
dsml_token: str = "{DSML}"
DS_TASK_SP_TOKENS = {{ {", ".join(f'"{name}": "{token}"' for name, token in TASKS.items())} }}
PATTERN = re.compile(r"<image>(.*?)</image>")  # computed, and nobody asks for it
assistant_msg_template: str = "{{reasoning}}{{content}}" + bos_token
tool_output_template: str = (
    "<tool_result>{{content}}</tool_result>"
)
response_format_template: str = (
    "Format:\\n"
    "{{schema}}"
)
REASONING_EFFORT_PROMPTS: Dict[str, str] = {{
    "low": "",
    "high": ("Think.\\n"
             "Hard\\u2026\\n\\n"),
    "max": "Think more.\\n\\n",
}}
TOOLS_TEMPLATE = """Tools: <{{dsml_token}}i> {THINK} {{{{braces}}}} é

{{tool_schemas}}
Obey.
"""

def encode_messages(messages: Any) -> str:
    TEXT = TOOLS_TEMPLATE.format(tool_schemas=json.dumps(messages), dsml_token=dsml_token)
    return TEXT

if __name__ == "__main__":
    raise SystemExit("ran")
'''
FIRST = '''TOOLS_TEMPLATE = "{tool_schemas}"
REASONING_EFFORT_MAX = ("Think "
  "most.")
response_format_template = '{schema}'
'''

def write(folder: Path, source: str | bytes, name: str = "encoding_dsv4.py") -> Path:
  path = folder / "encoding" / name
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(source if isinstance(source, bytes) else source.encode())
  return path

def refusal(folder: Path) -> str:
  with pytest.raises(PromptError) as error: Encoding.read(folder)
  assert "\n" not in str(error.value) and len(str(error.value)) < 400
  return str(error.value).replace(str(folder), "DIR")

def test_a_revision_is_read(tmp_path):
  path = write(tmp_path, SECOND)
  encoding = Encoding.read(tmp_path)
  assert encoding.where == str(path)
  assert encoding.tools == f"Tools: <{{dsml_token}}i> {THINK} {{{{braces}}}} é\n\n{{tool_schemas}}\nObey.\n"
  assert encoding.response_format == "Format:\n{schema}"
  assert encoding.efforts == {"low": "", "high": "Think.\nHard…\n\n", "max": "Think more.\n\n"}
  assert [encoding.prefix(effort) for effort in ("off", "low", "high", "max")] == ["", "", "Think.\nHard…\n\n", "Think more.\n\n"]

def test_the_first_revision_thinks_high_unasked(tmp_path):
  write(tmp_path, FIRST)
  assert Encoding.read(tmp_path).efforts == {"low": "", "high": "", "max": "Think most."}

def test_a_template_is_filled_by_its_fields_alone(tmp_path):
  write(tmp_path, SECOND)
  schema = f"{{x}} {{dsml_token}} {THINK}{DSML}"
  assert [piece for piece in Encoding.read(tmp_path).pieces("TOOLS_TEMPLATE", schema) if piece[0]] == [
    ("Tools: <", False), (DSML, True), ("i> ", False), (THINK, True), (" {", False), ("braces}", False), (" é\n\n", False),
    (schema, False), ("\nObey.\n", False)]

def test_texts_of_the_checkpoint_may_have_control_tokens():
  assert with_control(f"a{THINK}b{DSML}") == [("a", False), (THINK, True), ("b", False), (DSML, True), ("", False)]

def test_without_the_folder_there_are_no_texts(tmp_path):
  for folder in (tmp_path, tmp_path / "none"):
    encoding = Encoding.read(folder)
    assert (encoding.tools, encoding.response_format, encoding.efforts) == (None, None, {"low": ""})
  (tmp_path / "encoding").mkdir()
  assert Encoding.read(tmp_path).efforts == {"low": ""}

def test_a_lacking_name_is_refused_once_it_is_needed(tmp_path):
  path = write(tmp_path, "REASONING_EFFORT_PROMPTS = {'low': 'L'}")
  encoding = Encoding.read(tmp_path)
  assert encoding.prefix("low") == "L"
  for use, what in ((lambda: encoding.prefix("max"), "REASONING_EFFORT_PROMPTS=missing, want its text for effort max"),
                    (lambda: encoding.pieces("TOOLS_TEMPLATE", ""), "TOOLS_TEMPLATE=missing, want the text for tools"),
                    (lambda: encoding.pieces("response_format_template", ""), "response_format_template=missing, want the text for a")):
    with pytest.raises(PromptError) as error: use()
    assert str(error.value).startswith(f"{path}: {what}")

def test_names_may_be_spread_over_files_but_each_in_one(tmp_path):
  write(tmp_path, FIRST.splitlines()[0], "a.py")
  write(tmp_path, "from a import TOOLS_TEMPLATE\nresponse_format_template = '{schema}'", "b.py")
  write(tmp_path, "TOOLS_TEMPLATE = 3", "notes.txt")
  encoding = Encoding.read(tmp_path)
  assert (encoding.tools, encoding.response_format) == ("{tool_schemas}", "{schema}")
  assert encoding.where == str(tmp_path / "encoding" / "*.py")
  write(tmp_path, "TOOLS_TEMPLATE = '{tool_schemas}'", "c.py")
  assert refusal(tmp_path) == "DIR/encoding/c.py: TOOLS_TEMPLATE=in two files, want it once."

@pytest.mark.parametrize("expression", [
  "'Do {tool_schemas}'", "'''Do {tool_schemas}'''", "'Do ' '{tool_schemas}'", "('Do '\n '{tool_schemas}')", "'Do ' + '{tool_schemas}'",
  r"'D\x6f \u007btool_schemas}'", "f'Do ' '{tool_schemas}'", "f'Do ' + '{tool_schemas}'", "f'Do {{tool_schemas}}'", "r'Do {tool_schemas}'"])
def test_ways_to_write_a_text(tmp_path, expression):
  for line in (f"TOOLS_TEMPLATE = {expression}", f"TOOLS_TEMPLATE: str = {expression}", f"\ufeffTOOLS_TEMPLATE = {expression}"):
    write(tmp_path, line)
    assert Encoding.read(tmp_path).tools == "Do {tool_schemas}"

@pytest.mark.parametrize("source, why", [
  ("TOOLS_TEMPLATE = open('x').read()", "TOOLS_TEMPLATE=no constant on line 1, want text"),
  ("x = '{tool_schemas}'\nTOOLS_TEMPLATE = x", "TOOLS_TEMPLATE=no constant on line 2, want text"),
  ("TOOLS_TEMPLATE = f'{x}{{tool_schemas}}'", "TOOLS_TEMPLATE=no constant on line 1, want text"),
  ("TOOLS_TEMPLATE = '%s {tool_schemas}' % 3", "TOOLS_TEMPLATE=no constant"),
  ("TOOLS_TEMPLATE = '{tool_schemas}' * 2", "TOOLS_TEMPLATE=no constant"),
  ("TOOLS_TEMPLATE = '{tool_schemas}'.strip()", "TOOLS_TEMPLATE=no constant"),
  ("TOOLS_TEMPLATE = b'{tool_schemas}'", "TOOLS_TEMPLATE=no constant"),
  ("TOOLS_TEMPLATE = None", "TOOLS_TEMPLATE=no constant"), ("TOOLS_TEMPLATE: str", "TOOLS_TEMPLATE=no constant"),
  ("TOOLS_TEMPLATE = {'a': '{tool_schemas}'}", "TOOLS_TEMPLATE=no constant on line 1, want text"),
  ("if True:\n  TOOLS_TEMPLATE = '{tool_schemas}'", "TOOLS_TEMPLATE=no constant on line 2"),
  ("A = TOOLS_TEMPLATE = '{tool_schemas}'", "TOOLS_TEMPLATE=no constant"),
  ("TOOLS_TEMPLATE, B = '{tool_schemas}', 1", "TOOLS_TEMPLATE=no constant"),
  ("(TOOLS_TEMPLATE := '{tool_schemas}')", "TOOLS_TEMPLATE=no constant"),
  ("REASONING_EFFORT_PROMPTS = 'x'", "REASONING_EFFORT_PROMPTS=no constant on line 1, want a dict of texts"),
  ("REASONING_EFFORT_PROMPTS = {'low': 3}", "REASONING_EFFORT_PROMPTS=no constant"),
  ("REASONING_EFFORT_PROMPTS = {**x}", "REASONING_EFFORT_PROMPTS=no constant"),
  ("REASONING_EFFORT_PROMPTS = {'low': '', 'low': 'x'}", "REASONING_EFFORT_PROMPTS=no constant"),
  ("REASONING_EFFORT_PROMPTS = dict(low='')", "REASONING_EFFORT_PROMPTS=no constant"),
  ("REASONING_EFFORT_MAX = 1", "REASONING_EFFORT_MAX=no constant"),
  (FIRST + "TOOLS_TEMPLATE = 'x'", "TOOLS_TEMPLATE=assigned on lines 1 and 5, want it once"),
  (FIRST + "TOOLS_TEMPLATE += 'x'", "TOOLS_TEMPLATE=assigned on lines 1 and 5, want it once"),
  (FIRST + "for TOOLS_TEMPLATE in 'x': pass", "TOOLS_TEMPLATE=assigned on lines 1 and 5"),
  (FIRST + "del TOOLS_TEMPLATE", "TOOLS_TEMPLATE=assigned on lines 1 and 5"),
  (FIRST + "def f():\n  global TOOLS_TEMPLATE\n  TOOLS_TEMPLATE = 'x'", "TOOLS_TEMPLATE=assigned on lines 1 and 7"),
  # templates with other fields would be filled with what nobody knows
  ("TOOLS_TEMPLATE = 'no field'", "TOOLS_TEMPLATE=a template with 0 fields tool_schemas, want the fields tool_schemas, dsml_token, "),
  ("TOOLS_TEMPLATE = '{tool_schemas} {tool_schemas}'", "TOOLS_TEMPLATE=a template with 2 fields tool_schemas"),
  ("TOOLS_TEMPLATE = '{tool_schemas} {name}'", "TOOLS_TEMPLATE=a template with a field 'name'"),
  ("TOOLS_TEMPLATE = '{tool_schemas} {}'", "TOOLS_TEMPLATE=a template with a field ''"),
  ("TOOLS_TEMPLATE = '{tool_schemas.__class__}'", "TOOLS_TEMPLATE=a template with a field 'tool_schemas.__class__'"),
  ("TOOLS_TEMPLATE = '{tool_schemas:999999999}'", "TOOLS_TEMPLATE=a template with a field 'tool_schemas'"),
  ("TOOLS_TEMPLATE = '{tool_schemas!r}'", "TOOLS_TEMPLATE=a template with a field 'tool_schemas'"),
  ("TOOLS_TEMPLATE = '{tool_schemas} }'", "TOOLS_TEMPLATE=a template with Single '}' encountered"),
  ("TOOLS_TEMPLATE = '{a\\nb}'", "TOOLS_TEMPLATE=a template with a field 'a\\nb'"),
  ("response_format_template = '{tool_schemas}'",
   "response_format_template=a template with a field 'tool_schemas', want the fields schema"),
  # another encoding
  ("bos_token = '<s>'", f"bos_token='<s>', want {BOS!r}. This encoding is not implemented."),
  ("USER_SP_TOKEN = '<|user|>'", "USER_SP_TOKEN='<|user|>', want '<｜User｜>'"),
  ("tool_calls_block_name = 'function_calls'", "tool_calls_block_name='function_calls', want 'tool_calls'"),
  ("tool_output_template = '<result>{content}</result>'", "tool_output_template='<result>{content}</result>', want '<tool_result>"),
  ("DS_TASK_SP_TOKENS = {'action': '<a>'}", "DS_TASK_SP_TOKENS={'action': '<a>'}, want {'action': '<｜action｜>'"),
  ("bos_token = chr(60)", "bos_token=no constant on line 1, want text"),
  # no Python
  ("def f(:\n", "content=not Python (invalid syntax, line 1), want Python source. Is the download complete?"),
  ("TOOLS_TEMPLATE = '''cut", "content=not Python (unterminated triple-quoted string literal"),
  ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "content=not Python ("), ("<html></html>", "content=not Python ("),
  ("x = '\0'", "content=not "), (b"TOOLS_TEMPLATE = '\xff'", "content=no UTF-8 at byte 18, want UTF-8."),
  ("x = " + "(" * 5000 + ")" * 5000, "content=not "), ("x = " + "-" * 100_000 + "1", "content=not "),
  ("TOOLS_TEMPLATE = " + " + ".join(["'a'"] * 50_000), "content=not "), ("x" * 2**20 + "y", "size=1048577 bytes, want at most 1048576."),
])
def test_files_that_are_not_believed(tmp_path, source, why):
  write(tmp_path, source)
  assert refusal(tmp_path).startswith(f"DIR/encoding/encoding_dsv4.py: {why}")

def test_nothing_is_run(tmp_path, monkeypatch, recwarn):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path / "encoding"))
  before = set(sys.modules)
  marks = "".join(f"open('ran', 'w').write('{i}')\n{line}" for i, line in enumerate((
    "__import__('os').abort()\n", "import encoding_dsv4\n", "class A: open('ran', 'w')\n",
    "@open('ran', 'w')\ndef f(x=open('ran', 'w')): pass\n",
    "assert open('ran', 'w')\n", "x = '\\d'\n", "def g() -> open('ran', 'w'): pass\n",
    "y: open('ran', 'w') = f'{open(chr(97), chr(119))}'\n")))
  path = write(tmp_path, SECOND + marks)
  assert Encoding.read(tmp_path).tools is not None
  assert sorted(os.listdir(tmp_path)) == ["encoding"] and os.listdir(tmp_path / "encoding") == [path.name]
  assert set(sys.modules) == before and not recwarn.list

def test_what_is_no_file_is_refused(tmp_path):
  (tmp_path / "encoding" / "x.py").mkdir(parents=True)
  assert refusal(tmp_path) == "DIR/encoding/x.py: type=no file, want a file."
  (tmp_path / "encoding" / "x.py").rmdir()
  if hasattr(os, "mkfifo"):  # would wait for ever
    os.mkfifo(tmp_path / "encoding" / "x.py")
    assert refusal(tmp_path) == "DIR/encoding/x.py: type=no file, want a file."
    (tmp_path / "encoding" / "x.py").unlink()
  (tmp_path / "encoding" / "x.py").symlink_to(tmp_path / "gone")
  assert refusal(tmp_path) == "DIR/encoding/x.py: type=no file, want a file."
  (tmp_path / "blob").write_text(FIRST)  # caches keep blobs and links to them
  (tmp_path / "encoding" / "x.py").unlink()
  (tmp_path / "encoding" / "x.py").symlink_to(tmp_path / "blob")
  assert Encoding.read(tmp_path).tools == "{tool_schemas}"

@settings(deadline=None, max_examples=100)
@given(st.text() | st.text("TOLS_EMPA= '{}\n\"():+,[", max_size=60).map("TOOLS_TEMPLATE = ".__add__))
def test_any_text_is_read_or_refused_in_one_line(tmp_path_factory, source):
  folder = tmp_path_factory.mktemp("any")
  write(folder, source.encode("utf-8", "surrogatepass"))
  try: Encoding.read(folder)
  except PromptError as error: assert "\n" not in str(error)
