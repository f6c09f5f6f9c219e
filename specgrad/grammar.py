"""Which tokens a reply may go on with: JSON, JSON of a schema, or a call of a tool, compiled by llguidance.

Knows bytes and ids. Masks are host arrays; how the verified step applies them is not known here."""
from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from specgrad.encoding import DSML, THINK_END
from specgrad.tokenizer import Tokenizer

LAYOUT = {"whitespace_pattern": r"( |\n[ \t]{0,40})?",     # as JSON is laid out; without a bound, a model may say blanks for ever
          "json_allow_general_unicode_escapes": True}
TAG = THINK_END.encode()

class Vocabulary:
  """The tokenizer as bytes by id, which is what grammars look at. size: the model's vocabulary, at least the tokenizer's."""
  def __init__(self, tokenizer: Tokenizer, size: int, eos: int):
    self.tokenizer, self.size, self.eos_token_id, self.bos_token_id = tokenizer, size, eos, None
    self.special_token_ids = sorted(tokenizer.special_ids.values())
    nameless = lambda i: f"<|id {i}|>".encode()            # an id without a token: no grammar allows it
    self.tokens = [b"" if (text := tokenizer.decode_bytes([i])) == nameless(i) else text for i in range(tokenizer.n_vocab)]
    self.think_end = tokenizer.special_ids.get(THINK_END)
    self.lock, self.spelled = threading.Lock(), dict[int, np.ndarray]()
    self.built: LLTokenizer | None = None

  def __call__(self, text: bytes) -> list[int]: return self.tokenizer.encode(text.decode("utf-8", "replace"))

  @property
  def compiled(self) -> LLTokenizer:
    """llguidance's form of it, made once: a third of a second at 129,280 tokens."""
    with self.lock:
      if self.built is None: self.built = LLTokenizer(TokenizerWrapper(self), slices=LLTokenizer.json_slices())
      return self.built

  def start(self, grammar: str, thinking: bool = False) -> Mask:
    """A mask for a reply of this grammar, after its reasoning if it has one. Raises ValueError, one line, for grammars and
    schemas that are invalid, not supported or too large."""
    matcher = LLMatcher(self.compiled, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error(): matcher.compute_bitmask()   # what is wrong with a grammar may show only there
    if matcher.is_error(): raise ValueError(fault(matcher))
    return Mask(self, matcher, thinking)

  def spelling(self, place: int) -> np.ndarray:
    """bool (V,): ordinary tokens that complete </think> after its first `place` bytes. It ends reasoning as a token only, so
    that text and grammar agree where that is."""
    if place not in self.spelled:
      row = np.zeros(self.size, bool)
      row[[i for i, token in enumerate(self.tokens) if TAG in TAG[:place] + token and i != self.think_end]] = True
      self.spelled[place] = row
    return self.spelled[place]

def json_grammar(schema: dict[str, Any] | bool) -> str:
  """JSON of this schema."""
  return LLMatcher.grammar_from_json_schema(own(schema))

def own(schema: dict[str, Any] | bool) -> dict[str, Any]:
  return {**({} if schema is True else {"not": {}} if schema is False else schema), "x-guidance": LAYOUT}

def call_grammar(tokenizer: Tokenizer, functions: Sequence[Mapping[str, Any]], must: Sequence[str] = (),
                 schema: dict[str, Any] | bool | None = None) -> str:
  """Replies that may call these functions (OpenAI's objects), in llguidance's form of Lark. The arguments of strict ones are
  held to their schema; how a call of another one goes on is free, and so is all that follows it. must: the reply has to
  begin with a call of one of these; schema: if it doesn't call, it is JSON of that schema. Raises ValueError, one line,
  for strict functions that it can't hold."""
  dsml = f"<[{tokenizer.special_ids[DSML]}]>" if DSML in tokenizer.special_ids else quote(DSML)
  rules: list[str] = []
  calls = [(f["name"], tight(f, i, dsml, rules) + " tail" if f.get("strict") else f'{dsml} {quote(invoke(f["name"]))} rest')
           for i, f in enumerate(functions)]
  either = lambda names: " | ".join(rule for name, rule in calls if name in names)
  free = dsml[0] == "<"                                      # a control token ends a text by itself, a spelled one has to be looked for
  lead = '"\\n\\n<" calls' if must or schema is not None else f"CONTENT | OPEN {dsml} list" if free else "CONTENT | open list"
  return LLMatcher.grammar_from_lark("\n".join([
    f"start: {lead}" + (" | answer" if schema is not None and not must else ""), f"calls: {dsml} list",
    f'list: "tool_calls>\\n<" ({either(must or [name for name, _ in calls])})', f"next: {either([name for name, _ in calls])}",
    f'tail: "\\n</" {dsml} "tool_calls>" | "\\n<" next', f"rest: (/(?s:.+)/ | {dsml})*", "CONTENT: /(?s:.*)/",
    f"answer: %json {json.dumps(own(True if schema is None else schema))}",
    *(("OPEN: /(?s:.*)\\n\\n</", f'text: TEXT {dsml} "parameter>"', "TEXT: /(?s:.*)<\\//") if free else
      (f'open[suffix={quote(chr(10) * 2 + "<" + DSML)}]: /(?s:.*)/', f'text[suffix={quote(f"</{DSML}parameter>")}]: /(?s:.*)/')), *rules]))

def tight(function: Mapping[str, Any], i: int, dsml: str, rules: list[str]) -> str:
  """A call of a strict function; rules gets those that it needs. Texts stand as they are, everything else as JSON."""
  name, schema = function["name"], function.get("parameters") or {}
  properties = schema.get("properties", {})
  required = schema.get("required", [])
  if not isinstance(properties, dict) or schema.get("type", "object") != "object" or not isinstance(required, list) or (
      {*map(str, required)} != properties.keys()):
    raise ValueError(f"strict function {name}: parameters have to be an object that requires each of its properties")
  parts = []
  for j, (key, value) in enumerate(properties.items()):
    if not key.isprintable() or set(key) & set('"<>'): raise ValueError(f"strict function {name}: {key!r} is no name for a parameter")
    if not isinstance(value, dict): raise ValueError(f"strict function {name}: the schema of {key} is no object")
    head, tail = f'parameter name="{key}" string=', f'"</" {dsml} "parameter>"'
    options = value.get("enum", [value.get("const")])
    if value.get("type") == "string" and not value.keys() - {"type", "title", "description", "default", "examples"}:
      rule, is_text = "text", True
    elif isinstance(options, list) and options and all(isinstance(o, str) and o and DSML not in o for o in options):
      rule, is_text = f"({' | '.join(map(quote, options))}) {tail}", True
    else:
      definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
      rules.append(f"value_{i}_{j}: %json {json.dumps(own({**definitions, **value}))}")
      rule, is_text = f"value_{i}_{j} {tail}", False
    kind = "true" if is_text else "false"
    parts.append(f"""{dsml} {quote(f'{head}"{kind}">')} {rule}""")
  inner = ' "\\n<" '.join(parts)
  return f'{dsml} {quote(invoke(name) + "<")} {inner} "\\n</" {dsml} "invoke>"' if parts else (
    f'{dsml} {quote(invoke(name) + chr(10) + "</")} {dsml} "invoke>"')

def invoke(name: str) -> str: return f'invoke name="{name}">\n'

def quote(text: str) -> str: return json.dumps(text, ensure_ascii=False)

def fault(matcher: LLMatcher) -> str:
  """What is wrong, in one line, without the source that llguidance shows with it."""
  text = re.split(r"\n\d+ \| ", matcher.get_error())[0]
  return " ".join(re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", text).split())[:300]

class Mask:
  """What a reply may go on with after what it has said (the interface engine.Mask). Not safe to use from several threads at once.
  A grammar that turns out too costly on the way sets `error` and lets the reply end."""
  def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, thinking: bool):
    self.vocabulary, self.matcher, self.thinking, self.said, self.error = vocabulary, matcher, thinking, b"", ""

  def copy(self) -> Mask:
    return Mask(self.vocabulary, self.matcher.deep_copy(), self.thinking)

  def rows(self, drafted: Sequence[int]) -> np.ndarray:
    """-> bool (len(drafted) + 1, V): what may follow after 0, 1, .. drafted tokens. After one that is not allowed itself, all."""
    out = np.ones((len(drafted) + 1, self.vocabulary.size), bool)
    thinking, said, taken = self.thinking, self.said, 0
    for i in range(len(out)):
      out[i] = self.reasoning(said) if thinking else self.answer()
      if i == len(drafted) or not out[i, (token := drafted[i])] or token == self.vocabulary.eos_token_id: break
      if thinking: thinking, said = token != self.vocabulary.think_end, self.grow(said, token)
      else: taken += self.matcher.consume_token(token)
    if taken: self.matcher.rollback(taken)
    return out

  def advance(self, ids: Sequence[int]) -> None:
    """These were emitted."""
    for token in ids:
      if token == self.vocabulary.eos_token_id: return
      if self.thinking: self.thinking, self.said = token != self.vocabulary.think_end, self.grow(self.said, token)
      elif not self.error and not self.matcher.consume_token(token): self.error = fault(self.matcher)

  def grow(self, said: bytes, token: int) -> bytes:
    """The end of the reasoning, as long as matters."""
    return (said + self.vocabulary.tokens[token] if token < len(self.vocabulary.tokens) else b"")[1 - len(TAG):]

  def reasoning(self, said: bytes) -> np.ndarray:
    """Anything but an end without an answer."""
    place = next((n for n in range(len(TAG) - 1, 0, -1) if said.endswith(TAG[:n])), 0)
    row = ~self.vocabulary.spelling(place)
    row[self.vocabulary.eos_token_id] = False
    return row

  def answer(self) -> np.ndarray:
    row = np.zeros(self.vocabulary.size, bool)
    if not self.error and self.matcher.is_error(): self.error = fault(self.matcher)
    if not self.error:
      bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
      if self.matcher.is_error(): self.error = fault(self.matcher)
      known = np.unpackbits(bits, bitorder="little")[:len(self.vocabulary.tokens)].astype(bool)
      row[:len(known)] = known
    if self.error or not row.any():
      row[:] = False
      row[self.vocabulary.eos_token_id] = True
    return row
