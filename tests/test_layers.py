"""Imports go one way, and each dependency stays in its place: read from the source, nothing is imported."""
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ["quant", "models", "spec", "engine", ("api", "batch"), ("chat", "serve"), "run"]  # each may import those before it
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in ([names] if isinstance(names, str) else names)}
LEAVES = {"config", "checkpoint", "tokenizer", "prompt", "encoding", "reply", "plan", "toolchain", "lowering_cache",
          "cpu_graph", "session", "terminal"}              # import no layer
FORBIDDEN = {  # part of specgrad -> what it must not know
  "quant": {"numpy", "specgrad.checkpoint", "specgrad.tokenizer", "specgrad.prompt"},
  "models": {"numpy", "specgrad.checkpoint", "specgrad.tokenizer", "specgrad.prompt"},
  "spec": {"numpy", "specgrad.checkpoint", "specgrad.tokenizer", "specgrad.prompt"},
  "engine": {"specgrad.tokenizer", "specgrad.prompt", "http", "socketserver"},
  "batch": {"tinygrad", "numpy", "specgrad.tokenizer", "specgrad.prompt", "http", "socketserver"},
  "run": {"tinygrad"},
  **dict.fromkeys(("serve", "completion", "request", "grammar", "connection"), {"tinygrad"}),
  "chat": {"tinygrad", "numpy"},
  "session": {"tinygrad", "specgrad.tokenizer", "specgrad.prompt"},
  "terminal": {"tinygrad", "numpy", "specgrad"},
  "config": {"tinygrad"},
  "tokenizer": {"tinygrad"},
  "prompt": {"tinygrad"},
  "encoding": {"tinygrad"},
  "reply": {"tinygrad"},
  "plan": {"tinygrad"},
}
ONLY_IN = {"tiktoken": {"tokenizer"}, "tqdm": {"terminal"}, "uvicorn": {"connection"}, "h11": {"connection"},
           "llguidance": {"grammar"}, "prometheus_client": {"serve", "completion"}}  # and tqdm in scripts
NOWHERE = {"torch", "transformers", "accelerate"}

def imports(source: str, package: tuple[str, ...]) -> set[str]:
  """Every module a file names in an import, wherever the import stands; relative ones made absolute."""
  found: set[str] = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import): found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = [*package[:len(package) - node.level + 1]] if node.level else []
      base += [node.module] if node.module else []
      found |= {".".join(base)} | {".".join([*base, alias.name]) for alias in node.names}
  return found

def names(found: set[str], module: str) -> bool:
  return any(name == module or name.startswith(module + ".") for name in found)

def faults(path: Path, source: str) -> list[str]:
  """path is relative to the root."""
  found = imports(source, path.parent.parts)
  wrong = [f"{path} imports {module}" for module in NOWHERE if names(found, module)]
  if path.parts[0] == "tests" and "oracle" in path.name and names(found, "specgrad"):
    wrong.append(f"{path} imports specgrad")  # a second opinion shares no code with the first
  if path.parts[0] != "specgrad":
    if path.parts[0] == "scripts" and names(found, "tiktoken"): wrong.append(f"{path} imports tiktoken")
    return wrong
  part = path.parts[1].removesuffix(".py")
  for module, places in ONLY_IN.items():
    if names(found, module) and part not in places: wrong.append(f"{path} imports {module}")
  wrong += [f"{path} imports {module}" for module in FORBIDDEN.get(part, ()) if names(found, module)]
  mine = RANK.get(part, -1 if part in LEAVES else len(LAYERS))
  wrong += [f"{path} imports specgrad.{other}" for other, rank in RANK.items()
            if other != part and rank >= max(mine, 0) and names(found, f"specgrad.{other}")]
  return sorted(wrong)

FILES = sorted(path.relative_to(ROOT) for folder in ("specgrad", "scripts", "tests")
               for path in (ROOT / folder).rglob("*.py"))

@pytest.mark.parametrize("path", FILES, ids=str)
def test_layers(path: Path) -> None:
  assert not faults(path, (ROOT / path).read_text())

@pytest.mark.parametrize("path, source, fault", [
  ("specgrad/models/x.py", "from specgrad.spec import verify", "specgrad.spec"),
  ("specgrad/models/x.py", "from ..spec.verify import accept", "specgrad.spec"),
  ("specgrad/models/x.py", "from .. import engine", "specgrad.engine"),
  ("specgrad/quant/x.py", "def f():\n  import numpy as np", "numpy"),
  ("specgrad/quant/x.py", "from specgrad import models", "specgrad.models"),
  ("specgrad/spec/x.py", "import specgrad.engine", "specgrad.engine"),
  ("specgrad/engine.py", "from specgrad.serve import app", "specgrad.serve"),
  ("specgrad/engine.py", "from specgrad.batch import Batch", "specgrad.batch"),
  ("specgrad/batch.py", "from specgrad import serve", "specgrad.serve"),
  ("specgrad/batch.py", "from specgrad.api import Model", "specgrad.api"),
  ("specgrad/config.py", "from specgrad.quant import formats", "specgrad.quant"),
  ("specgrad/prompt.py", "from tinygrad import Tensor", "tinygrad"),
  ("specgrad/serve.py", "import tiktoken", "tiktoken"),
  ("specgrad/models/x.py", "from tqdm import tqdm", "tqdm"),
  ("tests/x.py", "import torch.nn", "torch"),
  ("tests/oracle.py", "from specgrad.config import Config", "specgrad"),
])
def test_the_rules_bite(path: str, source: str, fault: str) -> None:
  assert faults(Path(path), source) == [f"{path} imports {fault}"]

@pytest.mark.parametrize("path, source", [
  ("specgrad/run.py", "from specgrad.engine import Engine\nfrom specgrad.chat import Chat"),
  ("specgrad/terminal.py", "from tqdm import tqdm"),
  ("specgrad/spec/x.py", "from specgrad.models import target\nfrom . import y"),
  ("specgrad/models/x.py", "from ..quant.linear import linear\nfrom .cache import Ring\nimport specgrad.config"),
  ("scripts/x.py", "import numpy\nfrom tqdm import tqdm\nfrom specgrad.engine import Engine"),
])
def test_the_rules_allow(path: str, source: str) -> None:
  assert not faults(Path(path), source)
