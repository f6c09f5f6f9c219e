"""Messages -> prompt: DeepSeek-V4's encoding, with thinking, tools and response formats.

Only this module writes control tokens, and it writes them as ids: what a user types can look like one and stays text.
Rules: encode_messages of the official checkpoints. What needs none of the checkpoint's own texts works without them.
In order: the prompt, the messages as clients send them."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specgrad.encoding import (
  ASSISTANT,
  BOS,
  DSML,
  EOS,
  REMINDER,
  TASKS,
  THINK,
  THINK_END,
  USER,
  Encoding,
  Piece,
  PromptError,
  short,
  with_control,
)
from specgrad.reply import Parsed as Parsed
from specgrad.reply import ReplyParser as ReplyParser
from specgrad.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")

def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, effort: str = "off",
                tools: Sequence[Mapping[str, Any]] | None = None, response_format: Mapping[str, Any] | None = None,
                encoding: Encoding | None = None, drop_thinking: bool = True) -> list[int]:
  """The prompt's ids, of arguments as in `render`. They are the ids of the official single string, because a control
  token cuts the text there too; but where a message contains the text of a control token, it gets ordinary ids here.
  Raises PromptError for messages it cannot render and for a tokenizer without the control tokens; ｜DSML｜ alone may be
  lacking, and then is text, as in the official string."""
  pieces = render(messages, effort=effort, tools=tools, response_format=response_format, encoding=encoding, drop_thinking=drop_thinking)
  if DSML not in tokenizer.special_ids: pieces = _join([(text, is_control and text != DSML) for text, is_control in pieces])
  _check_tokens(tokenizer, {text for text, is_control in pieces if is_control}, effort != "off")
  ids: list[int] = []
  for text, is_control in pieces: ids += [tokenizer.special_ids[text]] if is_control else tokenizer.encode(text)
  return ids

def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
  """BOS and text, for the model to go on with: no roles, no control tokens. Raises PromptError without a BOS."""
  return [_check_tokens(tokenizer, {BOS}, False)[BOS], *tokenizer.encode(text)]

def check_tokens(tokenizer: Tokenizer, thinking: bool = False) -> dict[str, int]:
  """Control token -> id, of those every chat needs. Raises PromptError that names the ones the tokenizer lacks."""
  return _check_tokens(tokenizer, {BOS, EOS, USER, ASSISTANT, THINK_END} | ({THINK} if thinking else set()), thinking)

def _check_tokens(tokenizer: Tokenizer, needed: set[str], thinking: bool) -> dict[str, int]:
  if missing := [token for token in (BOS, EOS, USER, ASSISTANT, REMINDER, THINK, THINK_END, DSML, *TASKS.values())
                 if token in needed and token not in tokenizer.special_ids]:
    raise PromptError(f"tokenizer: added_tokens=no {', '.join(missing)}, want the DeepSeek-V4 chat tokens. "
                      f"{'Thinking' if missing == [THINK] else 'Chat'} does not work with this checkpoint.")
  return {token: tokenizer.special_ids[token] for token in needed}

def render(messages: Sequence[Mapping[str, Any]], *, effort: str = "off", tools: Sequence[Mapping[str, Any]] | None = None,
           response_format: Mapping[str, Any] | None = None, encoding: Encoding | None = None,
           drop_thinking: bool = True) -> list[Piece]:
  """The prompt as (text, whether it is one control token), in order; texts are never empty and never two in a row, as
  BPE must see neighbours together. Joined they are the official string.

  messages: in OpenAI's form, role system, developer, user, assistant or tool, content a string or text parts (a blank
  line comes between parts). An assistant message may have reasoning_content, tool_calls, and wo_eos=True where the
  model is to go on with that very message. Beyond OpenAI: role latest_reminder, and a task, one of TASKS, in place of
  a reply. Other keys, such as name, have no place in the prompt and are ignored.
  tools, response_format: end the first message if that is a system message, else an empty one put before. The schema
  text is response_format as JSON, as it came. Messages may also have their own, system and developer ones.
  effort: off, or how long to think; drop_thinking leaves out the reasoning of turns before the last user message, and
  developer messages there, as the model was trained, unless there are tools. Raises PromptError."""
  encoding = Encoding() if encoding is None else encoding
  prefix, thinking = encoding.prefix(effort), effort != "off"
  turns = _order_results(_merge(_with_options(_read_messages(messages), tools, response_format)))
  drop = thinking and drop_thinking and not any(turn.tools for turn in turns)
  if drop: turns = [turn for i, turn in enumerate(turns) if turn.role != "developer" or i >= _last_user(turns)]
  last_user = _last_user(turns)
  pieces: list[Piece] = [(BOS, True), *with_control(prefix)]
  for i, turn in enumerate(turns):
    task_before = turns[i - 1].task if i else None
    if turn.role == "assistant":
      # a turn whose reasoning is dropped looks like one without thinking: <｜Assistant｜></think>answer
      if thinking and task_before is None and (not drop or i > last_user): pieces += [(turn.reasoning, False), (THINK_END, True)]
      pieces += [(turn.text, False), *_call_pieces(turn.calls)]
      if not turn.wo_eos: pieces.append((EOS, True))
    else:
      if turn.role in ("user", "developer"): pieces.append((USER, True))
      if turn.role == "latest_reminder": pieces.append((REMINDER, True))
      pieces.append(("\n\n".join(block.text for block in turn.blocks) if turn.role == "user" else turn.text, False))
      if turn.tools: pieces += [("\n\n", False), *encoding.pieces("TOOLS_TEMPLATE", "\n".join(turn.tools))]
      if turn.response_format is not None:
        pieces += [("\n\n", False), *encoding.pieces("response_format_template", turn.response_format)]
    # a system message in between takes the place of the reply: nothing to open
    if i + 1 < len(turns) and turns[i + 1].role not in ("assistant", "latest_reminder"): continue
    if turn.task == "action": pieces += [(ASSISTANT, True), (THINK if thinking else THINK_END, True)]
    if turn.task is not None: pieces.append((TASKS[turn.task], True))
    elif turn.role in ("user", "developer"):
      pieces += [(ASSISTANT, True), (THINK if thinking and (not drop or i >= last_user) else THINK_END, True)]
  return _join(pieces)

def _call_pieces(calls: Sequence[Call]) -> list[Piece]:
  if not calls: return []
  pieces: list[Piece] = [("\n\n<", False), (DSML, True), ("tool_calls>\n", False)]
  for call in calls:
    pieces += [("<", False), (DSML, True), (f'invoke name="{call.name}">\n', False)]
    for i, (key, value) in enumerate(call.parameters()):
      text, is_string = (value, "true") if isinstance(value, str) else (_json(value, "tool_calls"), "false")
      pieces += [("\n" * (i > 0) + "<", False), (DSML, True), (f'parameter name="{key}" string="{is_string}">{text}</', False),
                 (DSML, True), ("parameter>", False)]
    pieces += [("\n</", False), (DSML, True), ("invoke>\n", False)]
  return [*pieces, ("</", False), (DSML, True), ("tool_calls>", False)]

def _join(pieces: Sequence[Piece]) -> list[Piece]:
  joined: list[Piece] = []
  for text, is_control in pieces:
    if not is_control and joined and not joined[-1][1]: joined[-1] = (joined[-1][0] + text, False)
    elif text: joined.append((text, is_control))
  return joined

# ------------------------------------------------------------------------------------- messages as clients send them
@dataclass(frozen=True)
class Call:
  name: str
  arguments: str  # JSON, if all is well
  id: str = ""

  def parameters(self) -> list[tuple[str, Any]]:
    """What is no JSON object is one parameter, arguments."""
    try: parsed = json.loads(self.arguments)
    except (ValueError, RecursionError): parsed = None
    return list(parsed.items()) if isinstance(parsed, dict) else [("arguments", self.arguments)]

@dataclass(frozen=True)
class Block:
  text: str
  result_of: str | None = None  # id of the tool call that it is the result of; None for what a user says

@dataclass(frozen=True)
class Turn:
  """A message, checked. A user's text is in blocks, as results of tools stand between; tools are JSON, one each."""
  role: str
  text: str = ""
  blocks: tuple[Block, ...] = ()
  reasoning: str = ""
  calls: tuple[Call, ...] = ()
  tools: tuple[str, ...] = ()
  response_format: str | None = None
  task: str | None = None
  wo_eos: bool = False

def _last_user(turns: Sequence[Turn]) -> int:
  return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)

def _with_options(turns: list[Turn], tools: Any, response_format: Any) -> list[Turn]:
  schemas = _read_tools("tools", tools)
  if isinstance(response_format, Mapping) and response_format.get("type") == "text": response_format = None  # no wish at all
  schema = _read_format("response_format", response_format)
  if not schemas and schema is None: return turns
  # a developer message may be dropped, but not where there are tools
  if turns[0].role != "system" and not (schemas and turns[0].role == "developer"): turns = [Turn("system"), *turns]
  for name, mine, own in (("tools", schemas, turns[0].tools), ("response_format", schema, turns[0].response_format)):
    if mine and own: raise PromptError(f"messages[0].{name}=present, want it absent. {name} is already given beside the messages.")
  first = replace(turns[0], tools=schemas or turns[0].tools, response_format=schema or turns[0].response_format)
  return [first, *turns[1:]]

def _merge(turns: Sequence[Turn]) -> list[Turn]:
  """Results of tools become the user's words, and a user's messages in a row one. One that ends in a task takes no more
  words after it; of a message that joins another one, only the words are kept. Official, both."""
  merged: list[Turn] = []
  for turn in turns:
    last = merged[-1] if merged else None
    if turn.role in ("user", "tool") and last and last.role == "user" and (turn.role == "tool" or last.task is None):
      merged[-1] = replace(last, blocks=last.blocks + turn.blocks)
    else: merged.append(replace(turn, role="user") if turn.role == "tool" else turn)
  return merged

def _order_results(turns: Sequence[Turn]) -> list[Turn]:
  """Results of tools in the order of the calls. Those of unknown calls go with the first call's; words stay in place."""
  order: dict[str, int] = {}
  ordered: list[Turn] = []
  for turn in turns:
    if turn.calls: order = {call.id: i for i, call in enumerate(turn.calls) if call.id}
    results = sorted((block for block in turn.blocks if block.result_of is not None), key=lambda block: order.get(block.result_of or "", 0))
    blocks = tuple(block if block.result_of is None else results.pop(0) for block in turn.blocks)
    ordered.append(replace(turn, blocks=blocks))
  return ordered

def _read_messages(messages: Any) -> list[Turn]:
  """Whatever a client sent in place of messages -> turns, none dropped or merged. Raises PromptError."""
  if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
    raise PromptError(f"messages={type(messages).__name__}, want a list of messages")
  if not messages: raise PromptError("messages=[], want at least one message")
  return [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]

# key -> roles that may have it. Clients send null and [] for what they do not use
_ONLY_IN = {"tools": ("system", "developer"), "response_format": ("system", "developer"), "tool_calls": ("assistant",),
            "tool_call_id": ("tool",), "reasoning_content": ("assistant",), "wo_eos": ("assistant",),
            "task": tuple(role for role in ROLES if role != "tool"), "function_call": (), "content_blocks": (), "reasoning_effort": ()}

def _read_message(where: str, message: Any) -> Turn:
  if not isinstance(message, Mapping):
    raise PromptError(f"{where}={type(message).__name__}, want an object with role and content")
  role = message.get("role")
  if role not in ROLES: raise PromptError(f"{where}.role={short(role)}, want {', '.join(ROLES[:-1])} or {ROLES[-1]}")
  given = {key: value for key in _ONLY_IN if (value := message.get(key)) is not None and value != []}
  for key, value in given.items():
    if role not in (roles := _ONLY_IN[key]):
      raise PromptError(f"{where}.{key}={short(value)}, want it " + (
        f"in messages of role {' or '.join(roles)} only" if roles else "absent. It is not implemented."))
  reasoning, wo_eos, task = given.get("reasoning_content", ""), given.get("wo_eos", False), given.get("task")
  if not isinstance(reasoning, str): raise PromptError(f"{where}.reasoning_content={short(reasoning)}, want a string")
  if not isinstance(wo_eos, bool): raise PromptError(f"{where}.wo_eos={short(wo_eos)}, want true or false")
  if task is not None and (not isinstance(task, str) or task not in TASKS):
    raise PromptError(f"{where}.task={short(task)}, want one of {', '.join(TASKS)}")
  call_id = given.get("tool_call_id", "")
  if not isinstance(call_id, str): raise PromptError(f"{where}.tool_call_id={short(call_id)}, want a string")
  calls = _read_calls(f"{where}.tool_calls", given.get("tool_calls", []))
  parts = [] if message.get("content") is None and (calls or reasoning) else _read_content(
    f"{where}.content", message.get("content"), other_parts=role == "tool")
  if role == "developer" and not any(parts): raise PromptError(f"{where}.content='', want some text in a developer message")
  text = "\n\n".join(parts)
  blocks = {"user": tuple(map(Block, parts)), "tool": (Block(f"<tool_result>{text}</tool_result>", call_id),)}
  return Turn(role, text, blocks.get(role, ()), reasoning, calls, _read_tools(f"{where}.tools", given.get("tools")),
              _read_format(f"{where}.response_format", given.get("response_format")), task, wo_eos)

def _read_content(where: str, content: Any, other_parts: bool) -> list[str]:
  """Its parts. Of a tool's result the model is told which other parts there were, as it was trained."""
  if isinstance(content, str): return [content]
  if not isinstance(content, Sequence) or isinstance(content, bytes):
    raise PromptError(f"{where}={short(content)}, want a string or a list of text parts")
  parts = []
  for i, part in enumerate(content):
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str): parts.append(part["text"])
    elif other_parts and isinstance(kind, str) and kind != "text": parts.append(f"[Unsupported {kind}]")
    else: raise PromptError(f"{where}[{i}]={short(part)}, want {{'type': 'text', 'text': a string}}")
  return parts

def _read_calls(where: str, calls: Any) -> tuple[Call, ...]:
  if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)): raise PromptError(f"{where}={short(calls)}, want a list")
  read = []
  for i, call in enumerate(calls):
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping): raise PromptError(f"{where}[{i}]={short(call)}, want an object with function")
    for key in ("name", "arguments"):
      if not isinstance(function.get(key), str):
        raise PromptError(f"{where}[{i}].function.{key}={short(function.get(key))}, want a string" + " of JSON" * (key == "arguments"))
    call_id = call.get("id")
    if not (call_id is None or isinstance(call_id, str)): raise PromptError(f"{where}[{i}].id={short(call_id)}, want a string")
    read.append(Call(function["name"], function["arguments"], call_id or ""))
  return tuple(read)

def _read_tools(where: str, tools: Any) -> tuple[str, ...]:
  if tools is None: return ()
  if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)): raise PromptError(f"{where}={short(tools)}, want a list")
  for i, tool in enumerate(tools):
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
      raise PromptError(f"{where}[{i}]={short(tool)}, want {{'type': 'function', 'function': {{'name': a string, ...}}}}")
  return tuple(_json(tool["function"], f"{where}[{i}].function") for i, tool in enumerate(tools))

def _read_format(where: str, response_format: Any) -> str | None:
  if response_format is None or response_format == {}: return None
  if not isinstance(response_format, Mapping): raise PromptError(f"{where}={short(response_format)}, want an object")
  return _json(response_format, where)

def _json(value: Any, where: str) -> str:
  """As the official code writes it: ", " and ": ", keys in the order they came, letters of all scripts as they are."""
  try: return json.dumps(value, ensure_ascii=False)
  except (TypeError, ValueError, RecursionError) as error: raise PromptError(f"{where}: {error}, want what JSON can say") from None
