"""Replies apart: well formed and malformed, whole and in pieces, and that nothing of them is lost."""
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specgrad.encoding import DSML, EOS, THINK, THINK_END, Encoding
from specgrad.prompt import render
from specgrad.reply import Parsed, ReplyParser

D, T, C = DSML, THINK, THINK_END
OPEN, CLOSE = f"\n\n<{D}tool_calls>", f"\n</{D}tool_calls>"

def invoke(name: str, *parameters: str) -> str: return "\n".join((f'\n<{D}invoke name="{name}">', *parameters, f"</{D}invoke>"))
def param(key: str, value: str, string: str = "true") -> str: return f'<{D}parameter name="{key}" string="{string}">{value}</{D}parameter>'

def parse(text: str, thinking: bool, size: int = 0) -> Parsed:
  """In pushes of size characters, or in one; what the events say is checked against the result."""
  parser, events = ReplyParser(thinking), []
  for at in range(0, len(text), size or len(text) or 1): events += parser.push(text[at:at + (size or len(text))])
  parsed = parser.finish()
  events += parsed.events
  assert all(events[i][1] for i in range(len(events)))
  for part, whole in (("reasoning", parsed.reasoning), ("content", parsed.content)):
    assert "".join(text for kind, text in events if kind == part) == whole
  assert [made for kind, made in events if kind == "tool_call"] == parsed.tool_calls
  return parsed

def said(parsed: Parsed) -> tuple:
  for i, made in enumerate(parsed.tool_calls):
    assert (made["id"], made["type"], set(made["function"])) == (f"call_{i}", "function", {"name", "arguments"})
  calls = [f"{made['function']['name']} {made['function']['arguments']}" for made in parsed.tool_calls]
  return parsed.reasoning, parsed.content, calls, parsed.problems

F = invoke("f", param("x", "a b"), param("n", " 1.50", "false"), param("l", '[1, {"ö": null}]', "false"))
F_CALL = 'f {"x": "a b", "n":  1.50, "l": [1, {"ö": null}]}'
G = invoke("g")
OUT = "a call outside of tool_calls"
BEFORE = "tool calls before </think>"

@pytest.mark.parametrize("text, thinking, want", [
  # well formed
  ("because</think>so", True, ("because", "so", [], [])), ("</think>so", True, ("", "so", [], [])),
  ("answer", False, ("", "answer", [], [])), ("", False, ("", "", [], [])),
  ("\nr\n</think>\n\na\n", True, ("\nr\n", "\n\na\n", [], [])),
  (f"r</think>a{OPEN}{F}{CLOSE}", True, ("r", "a", [F_CALL], [])),
  (f"a\n{OPEN}{F}{G}{CLOSE}", False, ("", "a\n", [F_CALL, "g {}"], [])),
  (f"r</think>{OPEN}{G}{CLOSE}", True, ("r", "", ["g {}"], [])), (f"{OPEN}{G}{CLOSE}", False, ("", "", ["g {}"], [])),
  (f'{OPEN}\n<{D}invoke name="g">\n\n</{D}invoke>{CLOSE}', False, ("", "", ["g {}"], [])),  # as the prompt writes no arguments
  (f"{OPEN}{invoke('f', param('x', ''), param('y', '“' + chr(34) + chr(92) + chr(10) + '<b>'))}{CLOSE}", False,
   ("", "", ['f {"x": "", "y": "“\\"\\\\\\n<b>"}'], [])),
  (f"{OPEN}{invoke('f', param('x', f'</{D}invoke>{CLOSE}'))}{CLOSE}", False,
   ("", "", [f'f {{"x": "</{D}invoke>\\n</{D}tool_calls>"}}'], [])),
  # </think> and <think> where they are not expected
  ("still thinking", True, ("still thinking", "", [], ["no </think>: all of the text is reasoning"])),
  ("", True, ("", "", [], ["no </think>: all of the text is reasoning"])),
  ("a</think>b</think>c", True, ("a", "b</think>c", [], [])), ("<think>r</think>a", True, ("r", "a", [], [])),
  ("<think>r</think>a", False, ("r", "a", [], [])), ("</think>answer", False, ("", "answer", [], [])),
  ("a </think> b", False, ("", "a </think> b", [], [])), ("r<think>s</think>a", True, ("r<think>s", "a", [], [])),
  ("<thi", False, ("", "<thi", [], [])), ("a</thin", False, ("", "a</thin", [], [])),
  ("r</thin", True, ("r</thin", "", [], ["no </think>: all of the text is reasoning"])),
  # calls before the end of the reasoning
  (f"r{OPEN}{G}{CLOSE}\n</think>a", True, ("r", "a", ["g {}"], [BEFORE])),
  (f"r{OPEN}{G}{CLOSE}", True, ("r", "", ["g {}"], [BEFORE, "no </think>: all of the text is reasoning"])),
  (f"{OPEN.lstrip()}{G}{CLOSE}</think>a", True, ("", "a", ["g {}"], [BEFORE])),
  (f"r{OPEN}{G}{CLOSE}s</think>{OPEN}{F}{CLOSE}", True, ("rs", "", ["g {}", F_CALL], [BEFORE])),
  (f"write <{D}tool_calls> and <{D}invoke name=…</think>a", True, (f"write <{D}tool_calls> and <{D}invoke name=…", "a", [], [])),
  (f"r{OPEN} it says</think>a", True, (f"r{OPEN} it says", "a", [], [BEFORE, "tool_calls without a call"])),
  # blocks that are not quite right
  (f"a<{D}tool_calls>{G}{CLOSE}", False, ("", "a", ["g {}"], [])), (f"a\n<{D}tool_calls>{G}{CLOSE}", False, ("", "a\n", ["g {}"], [])),
  (f"a{OPEN}{G}", False, ("", "a", ["g {}"], ["tool_calls not closed"])),
  (f"a{OPEN}{G} b", False, ("", "a b", ["g {}"], ["tool_calls not closed"])),
  (f"a{OPEN}{G}{CLOSE}\n\nb", False, ("", "a\n\nb", ["g {}"], [])), (f"a{OPEN}{G}{CLOSE} \n", False, ("", "a", ["g {}"], [])),
  (f"a{OPEN}{G}{CLOSE}\n{OPEN}{F}{CLOSE}b", False, ("", "ab", ["g {}", F_CALL], [])),
  (f"a{G}b", False, ("", "a\nb", ["g {}"], [OUT, "tool_calls not closed"])),
  (f"a{OPEN}{CLOSE}b", False, ("", f"a{OPEN}{CLOSE}b", [], ["tool_calls without a call"])),
  (f"a{OPEN}b{G}{CLOSE}", False, ("", f"a{OPEN}b\n", ["g {}"], ["tool_calls without a call", OUT])),
  (f"a{OPEN}", False, ("", f"a{OPEN}", [], ["tool_calls without a call"])),
  (f"a{OPEN}{G[:-3]}", False, ("", f"a{OPEN}{G[:-3]}", [], ["call of g: other text, or cut off"])),
  # calls that are not quite right
  (f'{OPEN}\n<{D}invoke name="f">\n{param("x", "1")}{G}{CLOSE}', False, ("", "", ['f {"x": "1"}', "g {}"], ["call of f: not closed"])),
  (f'{OPEN}\n<{D}invoke name="f">\n{param("x", "1")}{CLOSE}', False, ("", "", ['f {"x": "1"}'], ["call of f: not closed"])),
  (f'{OPEN}\n<{D}invoke name="f">\n{param("x", "1")}', False,
   ("", f'{OPEN}\n<{D}invoke name="f">\n{param("x", "1")}', [], ["call of f: other text, or cut off"])),
  (f"{OPEN}{G}{invoke('f', param('x', 'cut'))[:-30]}", False,
   ("", invoke("f", param("x", "cut"))[:-30], ["g {}"], ["call of f: cut off in parameter x"])),
  (f"{OPEN}\n<{D}invoke>{G}{CLOSE}", False, ("", f"{OPEN}\n<{D}invoke>\n", ["g {}"], ["a call without a name", OUT])),
  (f'{OPEN}\n<{D}invoke name="">{CLOSE}', False, ("", f'{OPEN}\n<{D}invoke name="">{CLOSE}', [], ["a call without a name"])),
  (f"{OPEN}{invoke('f', 'x = 1')}{CLOSE}", False, ("", f"{OPEN}{invoke('f', 'x = 1')}{CLOSE}", [], ["call of f: other text, or cut off"])),
  (f"{OPEN}{invoke('f', param('x', '1', 'maybe'))}{CLOSE}", False,
   ("", f"{OPEN}{invoke('f', param('x', '1', 'maybe'))}{CLOSE}", [], ["call of f: a parameter without name and string"])),
  (f"{OPEN}{invoke('f', param('x', '1'), param('x', '2'))}{CLOSE}", False,
   ("", f"{OPEN}{invoke('f', param('x', '1'), param('x', '2'))}{CLOSE}", [], ["call of f: parameter x twice"])),
  (f"{OPEN}{invoke('f', param('x', '[1, ', 'false'), param('y', 'NaN', 'false'), param('z', ' ', 'false'))}{CLOSE}", False,
   ("", "", ['f {"x": "[1, ", "y": "NaN", "z": " "}'],
    ["call of f: parameter x is not JSON", "call of f: parameter y is not JSON", "call of f: parameter z is not JSON"])),
  # a parameter that swallows the next one is nobody's wish
  (f"{OPEN}{invoke('f', param('x', '1')[:-14], param('y', '2'))}{CLOSE}", False,
   ("", f"{OPEN}{invoke('f', param('x', '1')[:-14], param('y', '2'))}{CLOSE}", [], ["call of f: parameter x not closed"])),
  (f"{OPEN}{invoke('f', param('x', G))}{CLOSE}", False,
   ("", f"{OPEN}{invoke('f', param('x', G))}{CLOSE}", [], ["call of f: parameter x not closed"])),
  # the block within the block, and text that only looks alike
  (f"{OPEN}{OPEN}{G}{CLOSE}{CLOSE}", False, ("", f"{OPEN}{CLOSE}", ["g {}"], ["tool_calls without a call"])),
  (f"a{D}b <{D}tool_call> <tool_calls>", False, ("", f"a{D}b <{D}tool_call> <tool_calls>", [], [])),
  (f"<{D}invoke", False, ("", f"<{D}invoke", [], [OUT, "a call without a name"])),
  (f"the tag <{D}invoke is\nodd", False, ("", f"the tag <{D}invoke is\nodd", [], [OUT, "a call without a name"])),
])
def test_replies(text, thinking, want):
  assert said(parse(text, thinking)) == want
  for size in (1, 2, 7): assert said(parse(text, thinking, size)) == want

def test_a_stream_shows_text_at_once_and_tags_never():
  parser = ReplyParser(True)
  shown = [parser.push(piece) for piece in (
    "Let", " me</", "th", "ink", ">So", "\n", "\n<", f"{D}tool", "s>", f"\n\n<{D}tool_calls>\n<{D}invoke", f' name="g">\n</{D}invoke',
    ">", "\n")]
  call = {"id": "call_0", "type": "function", "function": {"name": "g", "arguments": "{}"}}
  assert shown == [[("reasoning", "Let")], [("reasoning", " me")], [], [], [("content", "So")], [], [], [],
                   [("content", f"\n\n<{D}tools>")], [], [], [("tool_call", call)], []]
  end = parser.finish()
  assert (end.events, end.content, end.problems) == ([], f"So\n\n<{D}tools>", ["tool_calls not closed"])
  held = ReplyParser(False)
  assert held.push("a\n") == [("content", "a")]
  assert held.finish().events == [("content", "\n")]

def test_stray_tags_do_not_hold_the_stream_for_long():
  parser = ReplyParser(False)
  parser.push(f"<{D}invoke of\n")
  assert parser.push("more") == [("content", "\nmore")]
  parser.push(f"{OPEN} ")
  assert parser.push("text") == [("content", OPEN), ("content", " text")]

PIECES = st.lists(st.sampled_from([
  T, C, OPEN, OPEN.strip(), CLOSE, CLOSE.strip(), f"<{D}invoke", f"</{D}invoke>", ' name="f">', f'<{D}invoke name="g">',
  f"<{D}parameter", ' name="k" string="true">', ' name="j" string="false">', f"</{D}parameter>", "\n", " ", "<", "</", D, '">', F, G,
  param("x", "v"), "1", "[", "é"])
  | st.integers(0, 99).map("w{};".format), max_size=14)

@settings(deadline=None, max_examples=600)
@given(PIECES, st.booleans(), st.integers(1, 9))
@example([OPEN.strip(), " ", OPEN, f'<{D}invoke name="g">', "\n", f'<{D}invoke name="g">', CLOSE], True, 1)
def test_cuts_do_not_matter_and_no_word_is_lost(pieces, thinking, size):
  text = "".join(pieces)
  parsed = parse(text, thinking)
  assert parse(text, thinking, 1) == parse(text, thinking, size)
  assert said(parse(text, thinking, 1)) == said(parsed)
  whole = parsed.reasoning + parsed.content + json.dumps([made["function"] for made in parsed.tool_calls])
  assert sorted(re.findall(r"w\d+;", whole)) == sorted(re.findall(r"w\d+;", text))
  for made in parsed.tool_calls: assert isinstance(json.loads(made["function"]["arguments"]), dict)

@settings(deadline=None, max_examples=200)
@given(st.text(f"<｜DSML/>think\"= \n{D}", max_size=40), st.booleans())
def test_what_is_no_tag_comes_through(text, thinking):
  text = f"x{text}" if thinking else f"x{text}".replace("<｜DSML｜", "")
  parsed = parse(text, thinking, 1)
  if thinking: assert parsed.reasoning + (C if C in text else "") + parsed.content == text
  else: assert (parsed.reasoning, parsed.content) == ("", text)

PLAIN = st.text().filter(lambda text: not any(tag in text for tag in (D, T, C, EOS)))
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | PLAIN,
                      lambda some: st.lists(some, max_size=3) | st.dictionaries(PLAIN, some, max_size=3), max_leaves=5)
NAMES = st.text("abc_-.é 1", min_size=1, max_size=8)

@settings(deadline=None, max_examples=200)
@given(PLAIN, PLAIN, st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3), st.booleans())
def test_a_reply_is_what_the_prompt_would_hold(reasoning, content, calls, thinking):
  made = [{"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
          for i, (name, arguments) in enumerate(calls)]
  question, effort = {"role": "user", "content": "q"}, "low" if thinking else "off"
  answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made}
  before = "".join(text for text, _ in render([question], effort=effort, encoding=Encoding()))
  text = "".join(text for text, _ in render([question, answer], effort=effort)).removeprefix(before).removesuffix(EOS)
  parsed = parse(text, thinking, 3)
  assert (parsed.reasoning, parsed.content, parsed.problems) == (reasoning if thinking else "", content, [])
  assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parsed.tool_calls] == calls

@pytest.mark.parametrize("text", [f"a{OPEN}{F}{CLOSE}b", f"{OPEN}{G}{CLOSE}", f"{OPEN.strip()}{G}", f"a{G} "])
def test_without_tools_a_call_is_text(text):
  for prefix, thinking, want in (("", False, ("", text)), ("r</think>", True, ("r", text)), ("", True, (text, ""))):
    parser = ReplyParser(thinking, tools=False)
    events = [event for char in prefix + text for event in parser.push(char)]
    parsed = parser.finish()
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == (*want, [])
    assert "".join(said for _, said in events + parsed.events) == "".join(want)

def test_finish_may_be_called_twice_and_then_it_is_over():
  parser = ReplyParser(True)
  parser.push("a")
  assert parser.finish() == parser.finish()

@pytest.mark.parametrize("text", [f"<{D}invoke" * 40_000, OPEN * 40_000, f"{OPEN}{G * 4_000}", "<" * 400_000, f"{OPEN}" + " " * 200_000,
                                  f"{OPEN}{invoke('f', *(param(f'k{i}', 'v') for i in range(4000)))}", f'{OPEN}<{D}invoke name="' * 9000])
def test_long_replies_take_linear_steps(text):
  parser = ReplyParser(False)
  for at in range(0, len(text), 50_000): parser.push(text[at:at + 50_000])
  parsed = parser.finish()
  assert len(parsed.content) + len(parsed.tool_calls) > 0
  assert len(parsed.problems) < 20
