"""Messages <-> prompt: the plain part of DeepSeek-V4's message encoding (system, user, assistant, thinking on and off).

Only this module writes control tokens, and it writes them as ids: what a user types can look like one and stays text.
Rules: encoding_dsv4.encode_messages of the official checkpoints, here without tools, tasks, schemas and efforts."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specgrad.tokenizer import Tokenizer

class PromptError(ValueError): pass

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, THINK_END = "<think>", "</think>"
ROLES = ("system", "user", "assistant")
_UNSUPPORTED = ("tools", "tool_calls", "tool_call_id", "function_call", "task", "response_format", "content_blocks",
                "reasoning_effort")

Piece = tuple[str, bool]  # text, whether it is one control token

def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], thinking: bool = False, *,
                drop_thinking: bool = True) -> list[int]:
  """The prompt's ids, of messages as in `render`. They are the ids of the official single string, because a control
  token cuts the text there too; but where a message contains the text of a control token, it gets ordinary ids here.
  Raises PromptError for messages it cannot render and for a tokenizer without the control tokens."""
  control = check_tokens(tokenizer, thinking)
  ids: list[int] = []
  for text, is_control in _pieces(messages, thinking, drop_thinking):
    if is_control: ids.append(control[text])
    else: ids += tokenizer.encode(text)
  return ids

def render(messages: Sequence[Mapping[str, Any]], *, thinking: bool = False, drop_thinking: bool = True) -> str:
  """The prompt as text, to read or to compare; to feed a model use encode_chat, which keeps typed control tokens inert.

  A message has role (system, user, assistant) and content, str. An assistant message may have reasoning_content, and
  wo_eos=True where the model is to go on with that very message. Ends in <｜Assistant｜> and <think> or </think> after
  a last user message. drop_thinking leaves out the reasoning of turns before the last user message, as the model was
  trained. Other keys, such as name, have no place in the prompt and are ignored. Raises PromptError."""
  return "".join(text for text, _ in _pieces(messages, thinking, drop_thinking))

def split_reply(text: str, thinking: bool) -> tuple[str, str]:
  """A reply, complete or cut short -> (reasoning, content). Never raises. In thinking mode all is reasoning up to the
  first </think>; without one the content is empty and the caller can say so. A reply that opens its own <think> is
  split in either mode, a stray </think> at the start is dropped, everything from EOS on is cut off."""
  text = text.partition(EOS)[0]
  if text.startswith(THINK): text, thinking = text.removeprefix(THINK), True
  if not thinking: return "", text.removeprefix(THINK_END)
  reasoning, _, content = text.partition(THINK_END)
  return reasoning, content

def check_tokens(tokenizer: Tokenizer, thinking: bool = False) -> dict[str, int]:
  """Control token -> id, of those a chat needs. Raises PromptError that names the ones the tokenizer lacks."""
  needed = (BOS, EOS, USER, ASSISTANT, THINK_END) + ((THINK,) if thinking else ())
  if missing := [token for token in needed if token not in tokenizer.special_ids]:
    raise PromptError(f"tokenizer: added_tokens=no {', '.join(missing)}, want the DeepSeek-V4 chat tokens. "
                      f"{'Thinking' if missing == [THINK] else 'Chat'} does not work with this checkpoint.")
  return {token: tokenizer.special_ids[token] for token in needed}

def _pieces(messages: Sequence[Mapping[str, Any]], thinking: bool, drop_thinking: bool) -> list[Piece]:
  """The prompt in order; neighbouring texts are one piece, as BPE must see them together."""
  turns = _merge_users(_check(messages))
  last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
  pieces: list[Piece] = [(BOS, True)]
  for i, turn in enumerate(turns):
    thinks = thinking and (not drop_thinking or i >= last_user)  # this turn's reasoning is in the prompt, or to come
    if turn["role"] == "system": pieces.append((turn["content"], False))
    elif turn["role"] == "user":
      pieces += [(USER, True), (turn["content"], False)]
      # a system message in between takes the place of the reply: nothing to open
      if i + 1 == len(turns) or turns[i + 1]["role"] == "assistant":
        pieces += [(ASSISTANT, True), (THINK if thinks else THINK_END, True)]
    else:
      if thinks: pieces += [(turn.get("reasoning_content") or "", False), (THINK_END, True)]
      pieces.append((turn["content"], False))
      if not turn.get("wo_eos"): pieces.append((EOS, True))
  joined: list[Piece] = []
  for text, is_control in pieces:
    if not is_control and joined and not joined[-1][1]: joined[-1] = (joined[-1][0] + text, False)
    elif text: joined.append((text, is_control))
  return joined

def _merge_users(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  turns: list[Mapping[str, Any]] = []
  for message in messages:
    if turns and message["role"] == turns[-1]["role"] == "user":
      turns[-1] = {**turns[-1], "content": turns[-1]["content"] + "\n\n" + message["content"]}
    else: turns.append(message)
  return turns

def _check(messages: Any) -> Sequence[Mapping[str, Any]]:
  """The messages as they came, whatever a client sent in their place. Raises PromptError."""
  if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
    raise PromptError(f"messages={type(messages).__name__}, want a list of messages")
  if not messages: raise PromptError("messages=[], want at least one message")
  for i, message in enumerate(messages):
    where = f"messages[{i}]"
    if not isinstance(message, Mapping):
      raise PromptError(f"{where}={type(message).__name__}, want an object with role and content")
    role = message.get("role")
    if role not in ROLES:
      raise PromptError(f"{where}.role={_short(role)}, want system, user or assistant")
    for key in _UNSUPPORTED:  # clients send null and [] for what they do not use
      if message.get(key) not in (None, []):
        raise PromptError(f"{where}.{key}={_short(message[key])}, want it absent. It is not implemented.")
    if not isinstance(message.get("content"), str):
      raise PromptError(f"{where}.content={_short(message.get('content'))}, want a string")
    reasoning, wo_eos = message.get("reasoning_content"), message.get("wo_eos")
    if reasoning is not None and not (isinstance(reasoning, str) and role == "assistant"):
      raise PromptError(f"{where}.reasoning_content={_short(reasoning)}, want a string, in an assistant message only")
    if wo_eos is not None and not (isinstance(wo_eos, bool) and role == "assistant"):
      raise PromptError(f"{where}.wo_eos={_short(wo_eos)}, want true or false, in an assistant message only")
  return messages

def _short(value: object) -> str:
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + "..."
