"""Reply -> reasoning, content, tool calls, while it grows and whatever is wrong with it."""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

from specgrad.encoding import DSML, THINK, THINK_END

_CALLS, _CALLS_END = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"
_INVOKE, _INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
_PARAMETER, _PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"
_HEAD_END = '">'
_BLANKS = re.compile(r"\s*")

Part = Literal["reasoning", "content"]
Event = tuple[Literal["reasoning", "content", "tool_call"], Any]  # and its new text, or the call in OpenAI's form
T = TypeVar("T")
Steps = Generator[None, None, T]

@dataclass
class Parsed:
  """A reply. tool_calls are in OpenAI's form, their ids call_0, call_1, ...; problems say in words what was malformed;
  events are those that only the end decided."""
  reasoning: str = ""
  content: str = ""
  tool_calls: list[dict[str, Any]] = field(default_factory=list)
  problems: list[str] = field(default_factory=list)
  events: list[Event] = field(default_factory=list)

class ReplyParser:
  """Takes a reply apart while it grows: reasoning, content, tool calls. `thinking`: the prompt ended in <think>; without
  `tools` calls are text like any other. The text is the model's, without EOS, its control tokens as text.

  Nothing raises and nothing is lost: what does not parse as tool calls is text, of the part it stands in, and becomes a
  problem. Only tags that were understood, and blanks around calls, are left out. However the text is cut into pushes,
  the result is the same, and no event has a part of a tag that is understood later. Calls come whole, as only a whole
  one is known to be one."""
  def __init__(self, thinking: bool, tools: bool = True) -> None:
    self._buffer, self._at, self._final = "", 0, False  # what is before _at is dealt with
    self._texts: dict[Part, list[str]] = {"reasoning": [], "content": []}
    self._calls: list[dict[str, Any]] = []
    self._problems: dict[str, None] = {}  # in order, each once
    self._events: list[Event] = []
    self._gap: str | None = None
    self._tools = tools
    self._steps = self._reply(thinking)
    next(self._steps)

  def push(self, text: str) -> list[Event]:
    """What this text decided, in order."""
    assert not self._final, "the reply is finished"
    self._buffer, self._at = self._buffer[self._at:] + text, 0
    next(self._steps)
    events, self._events = self._events, []
    return events

  def finish(self) -> Parsed:
    """The whole reply; what was held back is text now."""
    self._final = True
    next(self._steps, None)
    return Parsed("".join(self._texts["reasoning"]), "".join(self._texts["content"]), self._calls, list(self._problems), self._events)

  def _say(self, part: Part, text: str) -> None:
    if self._gap is not None:  # behind a call blanks wait: between calls and at the end they are layout
      text = self._gap + text
      self._gap = None if text.strip() else text
      if self._gap is not None: return
    if not text: return
    self._texts[part].append(text)
    self._events.append((part, text))

  def _problem(self, text: str) -> None: self._problems[text] = None

  # Each of these yields where it needs more text, and goes on once there is more, or no more to come.
  def _reply(self, thinking: bool) -> Steps[None]:
    calls = ("\n\n" + _CALLS, _CALLS, _INVOKE) if self._tools else ()
    tag = yield from self._tag((THINK, *(() if thinking else (THINK_END,)), *calls[:2]))
    if tag == THINK: thinking = True  # it opened its reasoning by itself
    part: Part = "reasoning" if thinking else "content"
    if tag.endswith(_CALLS):
      if thinking: self._problem("tool calls before </think>")
      yield from self._block(part, tag)
    while part == "reasoning":
      # here a block is one only as the prompt writes it: reasoning may speak of the tags
      tag = yield from self._until((THINK_END, *calls[:1]), lambda text: self._say("reasoning", text))
      if tag == THINK_END: part, self._gap = "content", None
      elif not tag: return self._problem("no </think>: all of the text is reasoning")
      else:
        self._problem("tool calls before </think>")
        yield from self._block("reasoning", tag)
    while tag := (yield from self._until(calls, lambda text: self._say("content", text))):
      if tag == _INVOKE: self._problem("a call outside of tool_calls")
      yield from self._block("content", tag)

  def _block(self, part: Part, raw: str) -> Steps[None]:
    """Calls up to the end of the block, or to what does not belong there. raw: what is read and not yet understood."""
    read = [raw]
    try:
      while True:
        if not read[-1].endswith(_INVOKE):
          read.append(tag := (yield from self._tag((_INVOKE, _CALLS_END), blanks=True)))
          if not read[0]:  # behind a call
            if not tag: self._problem("tool_calls not closed")
            if not tag.endswith(_INVOKE): return
          elif not tag.endswith(_INVOKE): raise _Malformed("tool_calls without a call")
        call = yield from self._invoke(read)
        self._calls.append(call)
        self._events.append(("tool_call", call))
        read, self._gap = [""], ""
    except _Malformed as error:
      self._problem(str(error))
      self._say(part, "".join(read))

  def _invoke(self, read: list[str]) -> Steps[dict[str, Any]]:
    """One call, from its name on; what it takes goes to read. Understood or not at all: a call with a parameter in doubt
    is nobody's wish."""
    name = (yield from self._head(r'\s*name="([^"]+)', read, "a call without a name"))[1]
    arguments: dict[str, str] = {}
    while True:
      read.append(tag := (yield from self._tag((_PARAMETER, _INVOKE_END, _INVOKE, _CALLS_END), blanks=True)))
      if tag.endswith((_INVOKE, _CALLS_END)):
        self._problem(f"call of {name}: not closed")
        self._at -= len(tag)
        break
      if tag.endswith(_INVOKE_END): break
      if not tag: raise _Malformed(f"call of {name}: other text, or cut off")
      head = yield from self._head(r'\s*name="(.*)"\s*string="(true|false)', read, f"call of {name}: a parameter without name and string")
      value: list[str] = []
      end = yield from self._until((_PARAMETER_END,), value.append)
      key, text = head[1], "".join(value)
      read += [text, end]
      if not end: raise _Malformed(f"call of {name}: cut off in parameter {key}")
      if key in arguments: raise _Malformed(f"call of {name}: parameter {key} twice")
      if _PARAMETER in text or _INVOKE in text: raise _Malformed(f"call of {name}: parameter {key} not closed")
      as_json = head[2] == "false" and _is_json(text)
      if head[2] == "false" and not as_json: self._problem(f"call of {name}: parameter {key} is not JSON")
      arguments[key] = text if as_json else json.dumps(text, ensure_ascii=False)
    members = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return {"id": f"call_{len(self._calls)}", "type": "function", "function": {"name": name, "arguments": f"{{{members}}}"}}

  def _head(self, pattern: str, read: list[str], problem: str) -> Steps[re.Match[str]]:
    """The rest of an opening tag, up to its end. It has one line, so that stray text is not held for long."""
    head: list[str] = []
    end = yield from self._until((_HEAD_END, "\n", f"<{DSML}", f"</{DSML}"), head.append)
    read += head
    match = re.fullmatch(pattern, "".join(head)) if end == _HEAD_END else None
    if match: read.append(end)
    else: self._at -= len(end)
    if match is None: raise _Malformed(problem)
    return match

  def _tag(self, tags: Sequence[str], blanks: bool = False) -> Steps[str]:
    """One of the tags, if the text goes on with it, and the blanks before it; else nothing, and nothing is taken."""
    while True:
      start = _BLANKS.match(self._buffer, self._at).end() if blanks else self._at  # type: ignore[union-attr]
      if tag := next((tag for tag in tags if self._buffer.startswith(tag, start)), ""):
        before, self._at = self._at, start + len(tag)
        return self._buffer[before:self._at]
      rest = self._buffer[start:start + len(max(tags, key=len))]
      if self._final or not any(tag.startswith(rest) for tag in tags): return ""
      yield

  def _until(self, tags: Sequence[str], say: Callable[[str], None]) -> Steps[str]:
    """Says the text up to the first of the tags and takes that; "" where the text ends without. What may become a tag
    waits."""
    first = re.compile("|".join(map(re.escape, tags)) or "(?!)")  # without tags, nothing
    while True:
      match, end = first.search(self._buffer, self._at), len(self._buffer)
      if match: end = match.start()
      elif not self._final:
        end -= max((n for tag in tags for n in range(1, len(tag)) if self._buffer.endswith(tag[:n], self._at)), default=0)
      text, self._at = self._buffer[self._at:end], match.end() if match else end
      if text: say(text)
      if match or self._final: return match[0] if match else ""
      yield

class _Malformed(Exception): pass

def _is_json(text: str) -> bool:
  """Strictly: NaN is none."""
  def refuse(name: str) -> NoReturn: raise ValueError(name)
  try: json.loads(text, parse_constant=refuse)
  except (ValueError, RecursionError): return False
  return True
