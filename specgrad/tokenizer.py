"""Text <-> token ids, from the tokenizer.json of a DeepSeek-V4 checkpoint, on top of tiktoken.

One structure is implemented: the byte-level BPE with DeepSeek's three-pass split. Everything in the file that would
change ids is compared with that structure and refused by name when it differs. Knows nothing of models or tensors."""
from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import tiktoken

class TokenizerError(ValueError): pass

# The split of the file: three passes, each inside the pieces that the pass before left.
CJK = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
SPLITS = (r"\p{N}{1,3}", f"[{CJK}]+",
          r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|""" "[^\r\n" r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
          r" ?[\p{P}\p{S}]+" "[\r\n]*" r"|\s*" "[\r\n]+" r"|\s+(?!\S)|\s+")
WANT_PRE_TOKENIZER = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
                      for regex in SPLITS] + [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]

# The same split as the single pattern tiktoken takes. Digits and CJK come first and are kept out of every run of the
# third pass, for which they are an edge of text: the earlier passes have cut there. _LOOSE is what no class of the file
# names (controls, unassigned, private use): the file leaves such a run whole, tiktoken would drop it.
_WORD, _LOOSE = rf"[\p{{L}}\p{{M}}&&[^{CJK}]]", rf"[^\s\p{{L}}\p{{M}}\p{{P}}\p{{S}}\p{{N}}{CJK}]"

def _run_before(char: str, block: int, stop: str) -> str:
  """A run of `char` that gives its last character back when `stop` follows: what char+(?!stop) says, without the
  stack of one state per character that makes the regex engine panic on a run of a million. Blocks are eaten first."""
  return f"(?>(?:{char}{{{block}}}(?={char}{{{block}}}))*)(?:{char}(?!{stop}))+"

PATTERN = "|".join((
  r"\p{N}{1,3}", f"[{CJK}]+", r"[!-/:-@\[-`{-~][A-Za-z]+", rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}]?{_WORD}+",
  rf" ?[\p{{P}}\p{{S}}&&[^{CJK}]]+[\r\n]*", r"\s*[\r\n]+", _run_before(r"\s", 256, rf"[^\s\p{{N}}{CJK}]"), r"\s+",
  _run_before(_LOOSE, 16, _WORD)))

# name, accepted values. A key the file lacks reads as None.
_WANT: tuple[tuple[str, tuple[Any, ...]], ...] = (
  ("truncation", (None,)), ("padding", (None,)), ("normalizer", (None, {"type": "Sequence", "normalizers": []})),
  ("decoder.type", ("ByteLevel",)), ("post_processor.type", (None, "ByteLevel")),
  ("model.type", ("BPE",)), ("model.dropout", (None, 0)), ("model.unk_token", (None,)),
  ("model.continuing_subword_prefix", (None, "")), ("model.end_of_word_suffix", (None, "")),
  ("model.fuse_unk", (None, False)), ("model.byte_fallback", (None, False)), ("model.ignore_merges", (None, False)))

class Tokenizer:
  """`special_ids`: content -> id of every added token, whether the file calls it special or not: in this model family
  <｜User｜> and <think> are not "special" to the file but are just as much control tokens. `n_vocab`: last id + 1."""
  n_vocab: int
  special_ids: dict[str, int]

  def __init__(self, spec: dict[str, Any], where: str = "tokenizer.json"):
    """spec is the parsed tokenizer.json. Raises TokenizerError, naming `where` and the field, on another structure."""
    _check_structure(spec, where)
    added = _read_added(spec, where)
    ranks = _read_ranks(spec, {token["content"]: token["id"] for token in added}, where)
    self.special_ids = {token["content"]: token["id"] for token in added}
    self._bytes = {rank: token for token, rank in ranks.items()}
    self._bytes.update((token["id"], token["content"].encode()) for token in added)
    if len(self._bytes) != len(ranks) + len(added):
      _refuse(where, "ids", "an id given to two tokens", "one token an id")
    self.n_vocab = max(self._bytes) + 1
    # longest first, so that leftmost-longest wins; the reference library looks for the not-normalised kind first
    self._added_patterns = [re.compile("(" + "|".join(map(re.escape, sorted(kind, key=len, reverse=True))) + ")")
                            for normalized in (False, True)
                            if (kind := [t["content"] for t in added if bool(t.get("normalized")) == normalized])]
    self._ordinary = tiktoken.Encoding("deepseek", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

  @classmethod
  def from_file(cls, path: str | Path) -> Tokenizer:
    """A tokenizer.json, or a directory that holds one. Raises TokenizerError, one line."""
    path = Path(path)
    if path.is_dir(): path /= "tokenizer.json"
    return cls(_read_json(path), str(path))

  def encode(self, text: str, *, allowed_special: bool = False) -> list[int]:
    """Ids of text, nothing added. Added tokens are matched only with allowed_special: without it, text that looks like
    one is ordinary text. With it the ids are those of the `tokenizers` library with add_special_tokens=False.
    Lone surrogates, which have no UTF-8, are read as U+FFFD."""
    try: text.encode()
    except UnicodeEncodeError: text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not allowed_special: return self._ordinary.encode_ordinary(text)
    ids: list[int] = []
    for part in self._split_added(text):
      if isinstance(part, int): ids.append(part)
      else: ids += self._ordinary.encode_ordinary(part)
    return ids

  def _split_added(self, text: str) -> list[str | int]:
    parts: list[str | int] = [text]
    for pattern in self._added_patterns:
      cut: list[str | int] = []
      for part in parts:
        if isinstance(part, int): cut.append(part)
        else: cut += [self.special_ids[piece] if i % 2 else piece for i, piece in enumerate(pattern.split(part))]
      parts = cut
    return parts

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """The bytes of the ids, added tokens by their content, an id without text as <|id 12345|>. Never raises: a model
    may have more output rows than the tokenizer has tokens, and an untrained one picks them."""
    return b"".join(self._bytes.get(i) or f"<|id {i}|>".encode() for i in ids)

  def decode(self, ids: Iterable[int]) -> str:
    """Like decode_bytes, as text; each maximal invalid stretch of bytes becomes one U+FFFD."""
    return self.decode_bytes(ids).decode("utf-8", "replace")

class StreamDecoder:
  """Text of ids that arrive in blocks. What push and finish return adds up to `decode` of all ids, however they are cut
  into blocks; a character whose bytes are not all there yet is held back."""
  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer, self._utf8 = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")
  def push(self, ids: Iterable[int]) -> str: return self._utf8.decode(self._tokenizer.decode_bytes(ids))
  def finish(self) -> str:
    """What is still held back, as U+FFFD. The decoder is then as new."""
    rest = self._utf8.decode(b"", final=True)
    self._utf8.reset()
    return rest

def _refuse(where: str, name: str, found: str, want: str, hint: str = "") -> NoReturn:
  if len(found) > 120: found = found[:117] + "..."
  raise TokenizerError(f"{where}: {name}={found}, want {want}." + (f" {hint}" if hint else ""))

def _read_json(path: Path) -> dict[str, Any]:
  where = str(path)
  try: data = path.read_bytes()
  except FileNotFoundError: _refuse(where, "file", "missing", "a tokenizer.json", "Is this the checkpoint's folder?")
  except OSError as error: _refuse(where, "file", error.strerror or "unreadable", "a readable tokenizer.json")
  if data.startswith(b"version https://git-lfs"):
    _refuse(where, "content", "a Git LFS pointer", "the file itself", "Fetch it with `git lfs pull`.")
  if data.lstrip().startswith(b"<"):
    _refuse(where, "content", "an HTML or XML page", "JSON", "The download saved a web page; fetch the raw file.")
  try: spec = json.loads(data)
  except (ValueError, RecursionError) as error:
    _refuse(where, "content", f"not JSON ({error})", "a tokenizer.json", "Is the download complete?")
  if not isinstance(spec, dict): _refuse(where, "content", type(spec).__name__, "a JSON object")
  return spec

def _check_structure(spec: dict[str, Any], where: str) -> None:
  hint = "Only the DeepSeek-V4 tokenizer is implemented."
  for name in ("model", "pre_tokenizer", "decoder"):
    if not isinstance(spec.get(name), dict): _refuse(where, name, repr(spec.get(name)), "an object", hint)
  for name, accepted in _WANT:
    head, _, tail = name.partition(".")
    value = spec.get(head)
    if tail: value = value.get(tail) if isinstance(value, dict) else value
    if value not in accepted: _refuse(where, name, repr(value), " or ".join(map(repr, accepted)), hint)
  pre = spec["pre_tokenizer"]
  if pre.get("type") != "Sequence": _refuse(where, "pre_tokenizer.type", repr(pre.get("type")), "'Sequence'", hint)
  steps = pre.get("pretokenizers")
  if not isinstance(steps, list) or len(steps) != len(WANT_PRE_TOKENIZER):
    _refuse(where, "pre_tokenizer.pretokenizers", repr(steps), f"a list of {len(WANT_PRE_TOKENIZER)}", hint)
  for i, (step, want) in enumerate(zip(steps, WANT_PRE_TOKENIZER, strict=True)):
    # trim_offsets moves character offsets, never ids
    found = {k: v for k, v in step.items() if k != "trim_offsets"} if isinstance(step, dict) else step
    if found != want: _refuse(where, f"pre_tokenizer.pretokenizers[{i}]", repr(found), repr(want), hint)

def _read_added(spec: dict[str, Any], where: str) -> list[dict[str, Any]]:
  added, seen = spec.get("added_tokens") or [], set()
  if not isinstance(added, list): _refuse(where, "added_tokens", type(added).__name__, "a list")
  for i, token in enumerate(added):
    name = f"added_tokens[{i}]"
    if not isinstance(token, dict): _refuse(where, name, repr(token), "an object")
    content = token.get("content")
    if not isinstance(content, str) or not content: _refuse(where, f"{name}.content", repr(content), "text")
    if not _is_id(token.get("id")): _refuse(where, f"{name}.id", repr(token.get("id")), "an id from 0")
    for flag in ("single_word", "lstrip", "rstrip"):
      if token.get(flag): _refuse(where, f"{name}.{flag}", repr(token[flag]), "False", "Matches are exact.")
    if content in seen: _refuse(where, f"{name}.content", repr(content), "each added token once")
    seen.add(content)
  return added

def _read_ranks(spec: dict[str, Any], added: dict[str, int], where: str) -> dict[bytes, int]:
  """token bytes -> id. tiktoken has no list of merges: it joins the neighbours whose joined bytes have the lowest id.
  That is the same BPE if ids rise with the merges and every token comes from exactly one, which is checked here, and if
  every token's own bytes encode to it, which a test checks (too slow for each start)."""
  vocab, merges = spec["model"].get("vocab"), spec["model"].get("merges")
  if not isinstance(vocab, dict): _refuse(where, "model.vocab", type(vocab).__name__, "an object of token: id")
  if not isinstance(merges, list): _refuse(where, "model.merges", type(merges).__name__, "a list")
  to_byte, ranks = _byte_alphabet(), {}
  age: dict[str, int] = {}  # ordinary tokens; a byte is older than any merge, whatever its id
  for token, rank in vocab.items():
    if not _is_id(rank): _refuse(where, f"model.vocab[{token!r}]", repr(rank), "an id from 0")
    if token in added:  # listed twice in the file; no merge leads there, so only the added token can produce it
      if rank != added[token]:
        _refuse(where, f"model.vocab[{token!r}]", repr(rank), f"{added[token]} as in added_tokens")
      continue
    try: ranks[token.translate(to_byte).encode("latin-1")] = rank
    except UnicodeEncodeError: _refuse(where, "model.vocab", repr(token), "the byte-level alphabet or an added token")
    age[token] = rank if len(token) > 1 else -1
  if lacking := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
    _refuse(where, "model.vocab", f"no token for byte {lacking[0]}", "all 256 bytes")
  before = -1
  for i, merge in enumerate(merges):
    try:
      left, right = merge.split(" ") if isinstance(merge, str) else merge
      rank = age.get(left + right, -1)
      rises = before < rank and age.get(left, rank) < rank and age.get(right, rank) < rank
    except (TypeError, ValueError): _refuse(where, f"model.merges[{i}]", repr(merge), "two tokens")
    if not rises:
      _refuse(where, f"model.merges[{i}]", f"{merge!r} with id {rank}", "older parts and a higher id than before")
    before = rank
  if len(ranks) != 256 + len(merges):
    _refuse(where, "model.vocab", f"{len(ranks)} tokens", f"{256 + len(merges)} (256 bytes and one a merge)")
  return ranks

def _is_id(value: object) -> bool: return type(value) is int and 0 <= value < 2**31

def _byte_alphabet() -> dict[int, int]:
  """GPT-2's alphabet, as a str.translate table: each printable Latin-1 character stands for its own byte, the other 68
  bytes are U+0100, U+0101, ... in order. Latin-1 characters that stand for nothing are sent out of Latin-1."""
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  rest = [byte for byte in range(256) if byte not in printable]
  return dict.fromkeys(rest, 65535) | {256 + i: byte for i, byte in enumerate(rest)}
