"""What the body of an OpenAI request asks for: its fields, checked, and the errors they earn. Knows no HTTP and no model.

A field that would change the reply and is not supported is refused by its name; one that cannot is ignored."""
from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from specgrad.engine import Sampling

STOPS, STOP_LENGTH, TOP_LOGPROBS = 4, 1000, {"chat": 20, "text": 5}  # as many as OpenAI takes; a length that costs nothing to look for
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction")
ONLY: dict[str, Any] = {"parallel_tool_calls": True, "modalities": ["text"], "verbosity": "medium", "echo": False, "best_of": 1,
                        "suffix": "", "functions": [], "use_beam_search": False, "min_tokens": 0, "skip_special_tokens": True}
EFFORTS = {"none": "off", "off": "off", "minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}

class RequestError(ValueError):
  """An error as OpenAI's clients expect it: an HTTP status, one line, and the field it is about."""
  def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
    super().__init__(printable(" ".join(message.split())))
    self.param, self.code, self.status = param, code, status

  @property
  def body(self) -> dict[str, Any]:
    kind = {429: "rate_limit_error", 401: "authentication_error", 403: "permission_error"}.get(
      self.status, "server_error" if self.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

def read_json(data: bytes) -> dict[str, Any]:
  """A body as an object. Raises RequestError for what is not strict JSON: also doubled keys, NaN, and numbers beyond a float."""
  def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(items)
    if len(out) < len(items):
      twice = next(key for i, (key, _) in enumerate(items) if key in dict(items[:i]))
      raise RequestError(f"body: the key {short(twice)} stands twice in one object, want it once")
    return out
  def number(text: str) -> float:
    if math.isinf(value := float(text)): raise RequestError(f"body: {short(text)} is no number that a float can hold")
    return value
  def constant(name: str) -> NoReturn: raise RequestError(f"body: {name} is not JSON, want a number")
  try: body = json.loads(data.decode(), object_pairs_hook=pairs, parse_float=number, parse_constant=constant)
  except UnicodeDecodeError as error: raise RequestError(f"body: byte {error.start} is not UTF-8, want JSON in UTF-8") from None
  except RecursionError: raise RequestError("body: nested too deeply, want JSON of at most a few hundred levels") from None
  except RequestError: raise
  except ValueError as error: raise RequestError(f"body: not JSON ({error}), want one JSON object") from None
  if not isinstance(body, dict): raise RequestError(f"body: {short(body)}, want a JSON object")
  return body

@dataclass(frozen=True)
class Request:
  """prompts: text or ids of /v1/completions, none for a chat; schema: what JSON the reply must be, none for free text."""
  model: str | None
  messages: Any
  prompts: tuple[str | list[int], ...]
  n: int
  stream: bool
  include_usage: bool
  max_tokens: int | None
  sampling: Sampling
  stop: tuple[str, ...]
  logprobs: int | None                                     # none, or how many alternatives beside the token itself
  ignore_eos: bool
  effort: str = "off"
  tools: Sequence[Mapping[str, Any]] = ()
  must_call: tuple[str, ...] = ()                          # the reply has to be a call of one of these tools
  schema: dict[str, Any] | bool | None = None
  tell_schema: bool = False                                # whether the prompt shows the schema, as OpenAI does for json_schema

  @property
  def chat(self) -> bool: return not self.prompts

@dataclass
class Fields:
  """The fields of an object, each read once. null is as good as absent, as clients send it for what they do not use."""
  body: Mapping[str, Any]
  where: str = ""
  read: set[str] = field(default_factory=set)

  def take(self, name: str, kind: type | tuple[type, ...], want: str, default: Any = None) -> Any:
    self.read.add(name)
    value = self.body.get(name)
    if value is None: return default
    right = isinstance(value, kind) and (not isinstance(value, bool) or kind is bool)
    if not right: self.refuse(name, value, want)
    return value

  def whole(self, name: str, low: int, high: int, default: Any = None) -> Any:
    value = self.take(name, int, (want := f"a whole number from {low} to {high}"), default)
    if value is not None and value is not default and not low <= value <= high: self.refuse(name, value, want)
    return value

  def number(self, name: str, low: float, high: float, default: float) -> float:
    value = self.take(name, (int, float), (want := f"a number from {low:g} to {high:g}"), default)
    if not low <= value <= high: self.refuse(name, value, want)
    return float(value)

  def flag(self, name: str) -> bool: return bool(self.take(name, bool, "true or false", False))

  def object(self, name: str) -> Fields | None:
    value = self.take(name, dict, "an object")
    return None if value is None else Fields(value, f"{self.where}{name}.")

  def refuse(self, name: str, value: Any, want: str) -> NoReturn:
    raise RequestError(f"{self.where}{name}={short(value)}, want {want}", self.where + name)

  def done(self, ignored: Sequence[str] = ()) -> None:
    """Raises RequestError for a field that nobody read and that is not known to change nothing."""
    for name, value in self.body.items():
      if value is None or name in self.read or name in ignored: continue
      if not self.where and name in ONLY:
        if value != ONLY[name] or isinstance(value, bool) != isinstance(ONLY[name], bool):
          self.refuse(name, value, f"{json.dumps(ONLY[name])} or nothing: other values are not supported")
        continue
      raise RequestError(f"{self.where}{short(name, bare=True)}: unknown or not supported, want the request without it",
                         self.where + short(name, bare=True), "unknown_parameter")

def parse(body: Mapping[str, Any], chat: bool, most: int) -> Request:
  """body: of /v1/chat/completions, or of /v1/completions. most: choices that may run at once. Raises RequestError."""
  f = Fields(body)
  model = f.take("model", str, "a string")
  n = f.whole("n", 1, most, 1)
  limits = [f.whole(name, 1, 2 ** 31 - 1) for name in (("max_completion_tokens", "max_tokens") if chat else ("max_tokens",))]
  if len({limit for limit in limits if limit is not None}) > 1: f.refuse("max_tokens", limits[1], "the same as max_completion_tokens")
  stream, options = f.flag("stream"), f.object("stream_options")
  include_usage = False
  if options:
    include_usage = options.flag("include_usage")
    options.done(("include_obfuscation", "continuous_usage_stats"))
    if not stream: f.refuse("stream_options", options.body, "it only with stream=true")
  logprobs = read_logprobs(f, chat)
  common: dict[str, Any] = {"model": model, "n": n, "stream": stream, "include_usage": include_usage, "stop": read_stop(f),
                            "max_tokens": next((limit for limit in limits if limit is not None), None), "sampling": read_sampling(f),
                            "logprobs": logprobs, "ignore_eos": f.flag("ignore_eos")}
  if not chat:
    request = Request(messages=None, prompts=read_prompts(f), **common)
    if len(request.prompts) * n > most: f.refuse("n", n, f"at most {most} choices over all prompts")
  else:
    messages = f.take("messages", list, "a list of messages")
    if messages is None: raise RequestError("messages: missing, want a list of messages", "messages", "missing_required_parameter")
    tools, must_call = read_tools(f)
    schema, tell = read_format(f)
    if must_call and schema is not None: f.refuse("tool_choice", body["tool_choice"], "auto or none together with response_format")
    request = Request(messages=messages, prompts=(), effort=read_effort(f), tools=tools, must_call=must_call, schema=schema,
                      tell_schema=tell, **common)
  f.done(IGNORED)
  return request

def read_sampling(f: Fields) -> Sampling:
  """OpenAI's ranges and defaults, and the common names of what it lacks."""
  seed = f.whole("seed", -2 ** 63, 2 ** 64 - 1)
  bias = f.take("logit_bias", dict, "an object of token id: number", {})
  try: pairs = tuple((int(token), float(value)) for token, value in bias.items())
  except (ValueError, TypeError, OverflowError): f.refuse("logit_bias", bias, "an object of token id: number")
  if any(not -100 <= value <= 100 for _, value in pairs): f.refuse("logit_bias", bias, "numbers from -100 to 100")
  if any(token < 0 for token, _ in pairs): f.refuse("logit_bias", bias, "token ids from 0")
  return Sampling(
    temperature=f.number("temperature", 0, 2, 1.0), top_p=checked(f, "top_p", f.number("top_p", 0, 1, 1.0)),
    top_k=max(f.whole("top_k", -1, 2 ** 31 - 1, 0), 0), min_p=f.number("min_p", 0, 1, 0.0), seed=None if seed is None else seed % 2 ** 64,
    repetition_penalty=checked(f, "repetition_penalty", f.number("repetition_penalty", 0, 10, 1.0)),
    presence_penalty=f.number("presence_penalty", -2, 2, 0.0), frequency_penalty=f.number("frequency_penalty", -2, 2, 0.0),
    logit_bias=pairs)

def checked(f: Fields, name: str, value: float) -> float:
  if value < 1e-6: f.refuse(name, value, "a number of at least 1e-6")  # as a float32 it might be 0, which leaves no token
  return value

def read_stop(f: Fields) -> tuple[str, ...]:
  stop = f.take("stop", (str, list), (want := f"a string, or up to {STOPS} of them, of 1 to {STOP_LENGTH} characters"), [])
  stops = [stop] if isinstance(stop, str) else stop
  if len(stops) > STOPS or not all(isinstance(s, str) and 0 < len(s) <= STOP_LENGTH for s in stops): f.refuse("stop", stop, want)
  return tuple(stops)

def read_logprobs(f: Fields, chat: bool) -> int | None:
  if not chat: return f.whole("logprobs", 0, TOP_LOGPROBS["text"])  # type: ignore[no-any-return]
  wanted, top = f.flag("logprobs"), f.whole("top_logprobs", 0, TOP_LOGPROBS["chat"])
  if top and not wanted: f.refuse("top_logprobs", top, "it only with logprobs=true")
  return (top or 0) if wanted else None

def read_prompts(f: Fields) -> tuple[str | list[int], ...]:
  """A text, ids, or a list of either."""
  want = "a string, a list of token ids, or a list of either"
  prompt = f.take("prompt", (str, list), want)
  if prompt is None: raise RequestError("prompt: missing, want a string or token ids", "prompt", "missing_required_parameter")
  ids = lambda x: isinstance(x, list) and bool(x) and all(type(i) is int for i in x)
  prompts = [prompt] if isinstance(prompt, str) or ids(prompt) else prompt
  if not prompts or not all(isinstance(p, str) or ids(p) for p in prompts): f.refuse("prompt", prompt, want)
  return tuple(prompts)

def read_effort(f: Fields) -> str:
  """off, low, high or max: OpenAI's reasoning_effort, vLLM's chat_template_kwargs, DeepSeek's thinking. None given: off."""
  effort = f.take("reasoning_effort", str, (want := ", ".join(EFFORTS)))
  if effort is not None and effort not in EFFORTS: f.refuse("reasoning_effort", effort, want)
  switches: list[bool] = []
  if kwargs := f.object("chat_template_kwargs"):
    switches += [kwargs.flag(name) for name in ("thinking", "enable_thinking") if kwargs.body.get(name) is not None]
    own = kwargs.take("reasoning_effort", str, want)
    if own is not None and (own not in EFFORTS or effort not in (None, own)): kwargs.refuse("reasoning_effort", own, want + ", once")
    effort = effort or own
    kwargs.done()
  if thinking := f.object("thinking"):
    kind = thinking.take("type", str, (want := "enabled or disabled"))
    if kind not in ("enabled", "disabled"): thinking.refuse("type", kind, want)
    switches.append(kind == "enabled")
    thinking.done()
  wish = None if effort is None else EFFORTS[effort]
  if len({*switches, *([] if wish is None else [wish != "off"])}) > 1:
    f.refuse("reasoning_effort", effort, "it to agree with the switches for thinking")
  return wish or ("low" if any(switches) else "off")

def read_tools(f: Fields) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
  """-> the tools that the prompt names, and those of which one has to be called."""
  tools = f.take("tools", list, "a list of tools", [])
  names: list[str] = []
  for i, tool in enumerate(tools):
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict): f.refuse(f"tools[{i}]", tool, "{'type': 'function', 'function': {'name': ...}}")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 64 or not all(c.isascii() and (c.isalnum() or c in "_-.") for c in name):
      f.refuse(f"tools[{i}].function.name", name, "1 to 64 letters, digits, underscores, dots and dashes")
    if name in names: f.refuse(f"tools[{i}].function.name", name, "each name once")
    if function.get("strict") not in (None, True, False): f.refuse(f"tools[{i}].function.strict", function["strict"], "true or false")
    schema = function.get("parameters", {})
    if not isinstance(schema, dict): f.refuse(f"tools[{i}].function.parameters", schema, "a JSON schema")
    names.append(name)
  choice = f.take("tool_choice", (str, dict), (want := "none, auto, required, or {'type': 'function', 'function': {'name': ...}}"), "auto")
  if isinstance(choice, str):
    if choice not in ("none", "auto", "required"): f.refuse("tool_choice", choice, want)
    must = tuple(names) if choice == "required" else ()
    if choice == "required" and not names: f.refuse("tool_choice", choice, "it only with tools")
  else:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) and choice.get("type") == "function" else None
    if not isinstance(name, str): f.refuse("tool_choice", choice, want)
    if name not in names: f.refuse("tool_choice.function.name", name, "the name of one of the tools")
    must = (name,)
  return ([] if choice == "none" else tools), must

def read_format(f: Fields) -> tuple[dict[str, Any] | bool | None, bool]:
  """-> the schema that the reply has to follow, and whether the prompt shows it."""
  form = f.object("response_format")
  if form is None: return None, False
  kind = form.take("type", str, (want := "text, json_object or json_schema"))
  if kind not in ("text", "json_object", "json_schema"): form.refuse("type", kind, want)
  schema: dict[str, Any] | bool | None = {"type": "object"} if kind == "json_object" else None
  if kind == "json_schema":
    inner = form.object("json_schema")
    if inner is None: form.refuse("json_schema", None, "an object with name and schema")
    schema = inner.body.get("schema")
    inner.read |= {"schema"}
    if not isinstance(schema, (dict, bool)): inner.refuse("schema", schema, "a JSON schema")
    if not isinstance(inner.take("name", str, "a string"), str): inner.refuse("name", None, "a string")
    inner.flag("strict")                                   # the mask always holds the reply to the schema
    inner.done(("description",))
  form.done()
  return schema, kind == "json_schema"

def printable(text: str) -> str:
  """Control characters and the like spelled out: the text ends up in logs and terminals."""
  return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

def short(value: object, bare: bool = False) -> str:
  text = printable(value) if bare and isinstance(value, str) else repr(value)
  return text if len(text) <= 60 else text[:57] + "..."
