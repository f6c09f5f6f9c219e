"""DeepSeek-V4-Flash with its DSpark draft, run natively in tinygrad.

Importing the package settles tinygrad's compiler and caches, which must happen before tinygrad itself is imported. A
missing compiler is no error yet: the config, the plan and `--help` work without one, and prepare() names it later.
`load`, `Model`, `Reply` and `demo_path` are the Python interface (api.py); they bring tinygrad in when first used.
"""
import os
import signal
import sys

if sys.argv[:1] == ["-m"]:  # `python -m specgrad.run` begins here. Until it takes over, Ctrl-C leaves where no import can swallow it
  signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"specgrad: interrupted\n"), os._exit(130)))

import contextlib
from typing import TYPE_CHECKING, Any

from specgrad.toolchain import ToolchainError, prepare

if TYPE_CHECKING:
  from specgrad.api import Model, Reply, demo_path, load

__version__ = "0.1.0"
__all__ = ["Model", "Reply", "ToolchainError", "demo_path", "load", "prepare"]

with contextlib.suppress(ToolchainError): prepare()

def __getattr__(name: str) -> Any:
  if name in ("Model", "Reply", "demo_path", "load"):
    from specgrad import api
    return getattr(api, name)
  raise AttributeError(f"module 'specgrad' has no attribute {name!r}")
