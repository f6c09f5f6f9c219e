"""What DeepSeek-V4's encoding is made of: its control tokens, and the long texts that it puts into prompts.

The texts differ from revision to revision, so they are read from the checkpoint's encoding/*.py: parsed, never run."""
from __future__ import annotations

import ast
import re
import string
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

class PromptError(ValueError): pass

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, THINK_END = "<think>", "</think>"
DSML = "｜DSML｜"
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
EFFORTS = ("off", "low", "high", "max")  # off: no thinking. low: thinking as it comes, without a text that asks for more

Piece = tuple[str, bool]  # text, whether it is one control token
_CONTROL = re.compile("(" + "|".join(map(re.escape, (BOS, EOS, USER, ASSISTANT, REMINDER, THINK, THINK_END, DSML, *TASKS.values()))) + ")")

_FIELDS = {"TOOLS_TEMPLATE": {"tool_schemas": True, "dsml_token": False, "thinking_start_token": False, "thinking_end_token": False},
           "response_format_template": {"schema": True}}  # name -> its fields, and whether it must have them
_TEXTS = (*_FIELDS, "REASONING_EFFORT_MAX", "REASONING_EFFORT_PROMPTS")
# what is written here in code; a file that has it otherwise is of another encoding
_WANT = {"bos_token": BOS, "eos_token": EOS, "thinking_start_token": THINK, "thinking_end_token": THINK_END, "dsml_token": DSML,
         "USER_SP_TOKEN": USER, "ASSISTANT_SP_TOKEN": ASSISTANT, "LATEST_REMINDER_SP_TOKEN": REMINDER, "DS_TASK_SP_TOKENS": TASKS,
         "tool_output_template": "<tool_result>{content}</tool_result>", "tool_calls_block_name": "tool_calls",
         "tool_call_template": '<{dsml_token}invoke name="{name}">\n{arguments}\n</{dsml_token}invoke>',
         "tool_calls_template": "<{dsml_token}{tc_block_name}>\n{tool_calls}\n</{dsml_token}{tc_block_name}>"}
_LARGEST = 1 << 20  # bytes of a file; the official one has 35,000

@dataclass(frozen=True)
class Encoding:
  """The texts that only the checkpoint has. `where`: the files they come from, for errors; `efforts`: the efforts beside
  off that this revision knows, with the text that each puts first."""
  where: str = "encoding/*.py"
  tools: str | None = None
  response_format: str | None = None
  efforts: Mapping[str, str] = field(default_factory=lambda: {"low": ""})

  @classmethod
  def read(cls, folder: str | Path) -> Encoding:
    """From the constants in folder/encoding/*.py, which are parsed and never run; without that folder, an Encoding
    without texts. Raises PromptError, one line: for a file that cannot be read, for a name that is assigned twice or is
    no constant, and for marks and tags that are not those of this module. A name that is not there is refused once it
    is needed."""
    paths = sorted((Path(folder) / "encoding").glob("*.py"))
    found: dict[str, Any] = {}
    for path in paths:
      constants = _read_constants(path)
      if twice := sorted(found.keys() & constants.keys()): _refuse(str(path), twice[0], "in two files", "it once")
      found |= constants
    efforts = {"low": ""}
    if "REASONING_EFFORT_PROMPTS" in found: efforts = found["REASONING_EFFORT_PROMPTS"]
    # the first revision: high is what it does unasked
    elif "REASONING_EFFORT_MAX" in found: efforts = {"low": "", "high": "", "max": found["REASONING_EFFORT_MAX"]}
    where = str(paths[0] if len(paths) == 1 else Path(folder) / "encoding" / "*.py")
    return cls(where, found.get("TOOLS_TEMPLATE"), found.get("response_format_template"), efforts)

  def prefix(self, effort: str) -> str:
    """What this effort puts first in a prompt. Raises PromptError where the revision has no such effort."""
    if effort not in EFFORTS: raise PromptError(f"effort={short(effort)}, want {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}")
    if effort == "off": return ""
    if effort not in self.efforts: self._missing("REASONING_EFFORT_PROMPTS", f"its text for effort {effort}")
    return self.efforts[effort]

  def pieces(self, name: str, schema: str) -> list[Piece]:
    """The template of that name, filled. Tags that the template itself has are control tokens, those of schema are not."""
    text = self.tools if name == "TOOLS_TEMPLATE" else self.response_format
    if text is None: self._missing(name, "the text for " + ("tools" if name == "TOOLS_TEMPLATE" else "a response format"))
    fields = {"dsml_token": (DSML, True), "thinking_start_token": (THINK, True), "thinking_end_token": (THINK_END, True)}
    pieces: list[Piece] = []
    for literal, key, _, _ in string.Formatter().parse(text):
      pieces += with_control(literal)
      if key is not None: pieces.append(fields.get(key, (schema, False)))
    return pieces

  def _missing(self, name: str, want: str) -> NoReturn:
    _refuse(self.where, name, "missing", want, "It comes with the checkpoint, in the folder encoding.")

def _read_constants(path: Path) -> dict[str, Any]:
  """The names of _TEXTS that the file assigns, after a look at those of _WANT."""
  where = str(path)
  try:
    if not path.is_file(): _refuse(where, "type", "no file", "a file")  # open() would wait for ever on a pipe
    if (size := path.stat().st_size) > _LARGEST: _refuse(where, "size", f"{size} bytes", f"at most {_LARGEST}")
    source = path.read_bytes().decode("utf-8-sig")
  except OSError as error: _refuse(where, "file", error.strerror or "unreadable", "a readable file")
  except UnicodeDecodeError as error: _refuse(where, "content", f"no UTF-8 at byte {error.start}", "UTF-8")
  constants: dict[str, Any] = {}
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # of another's backslashes
      tree = ast.parse(source)
    lines: dict[str, list[int]] = {}
    values: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
      if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load): lines.setdefault(node.id, []).append(node.lineno)
    for statement in tree.body:
      target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else (
        statement.target if isinstance(statement, ast.AnnAssign) else None)
      if isinstance(target, ast.Name): values[target.id] = statement.value  # type: ignore[attr-defined]
    for name in (name for name in (*_TEXTS, *_WANT) if name in lines):
      if len(lines[name]) > 1: _refuse(where, name, f"assigned on lines {lines[name][0]} and {lines[name][1]}", "it once")
      constants[name] = _constant(values.get(name))
      kind = dict if name in ("REASONING_EFFORT_PROMPTS", "DS_TASK_SP_TOKENS") else str
      if not isinstance(constants[name], kind):
        _refuse(where, name, f"no constant on line {lines[name][0]}", "text" if kind is str else "a dict of texts")
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    if isinstance(error, PromptError): raise
    _refuse(where, "content", f"not Python ({error.msg}, line {error.lineno})" if isinstance(error, SyntaxError) else
            f"not readable as Python ({type(error).__name__})", "Python source", "Is the download complete?")
  for name in constants.keys() & _WANT:
    if constants[name] != _WANT[name]:
      _refuse(where, name, short(constants.get(name)), short(_WANT[name]), "This encoding is not implemented.")
  for name in constants.keys() & _FIELDS: _check_template(where, name, constants[name])
  return {name: constants[name] for name in _TEXTS if name in constants}

def _constant(node: ast.expr | None) -> str | dict[str, str] | None:
  """The text, or dict of texts, that an expression spells out; None for anything that would have to be computed."""
  if isinstance(node, ast.Constant) and isinstance(node.value, str): return node.value
  if isinstance(node, ast.JoinedStr):  # an f-string without a field
    parts = [_constant(part) for part in node.values]
    return "".join(part for part in parts if isinstance(part, str)) if all(isinstance(part, str) for part in parts) else None
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
    left, right = _constant(node.left), _constant(node.right)
    return left + right if isinstance(left, str) and isinstance(right, str) else None
  if isinstance(node, ast.Dict):
    items = [(_constant(key), _constant(value)) for key, value in zip(node.keys, node.values, strict=True)]
    texts = {key: value for key, value in items if isinstance(key, str) and isinstance(value, str)}
    return texts if len(texts) == len(items) else None
  return None

def _check_template(where: str, name: str, text: str) -> None:
  fields, found = _FIELDS[name], []
  try:
    for _, key, spec, conversion in string.Formatter().parse(text):
      if key is None: continue
      if key not in fields or spec or conversion: raise ValueError(f"a field {short(key)}")
      found.append(key)
    if lacking := [key for key, must in fields.items() if must and found.count(key) != 1]:
      raise ValueError(f"{found.count(lacking[0])} fields {lacking[0]}")
  except ValueError as error: _refuse(where, name, f"a template with {error}", f"the fields {', '.join(fields)}")

def with_control(text: str) -> list[Piece]:
  """The pieces of a text that may write control tokens: the checkpoint's."""
  return [(part, bool(i % 2)) for i, part in enumerate(_CONTROL.split(text))]

def short(value: object) -> str:
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + "..."

def _refuse(where: str, name: str, found: str, want: str, hint: str = "") -> NoReturn:
  raise PromptError(f"{where}: {name}={found}, want {want}." + (f" {hint}" if hint else ""))
