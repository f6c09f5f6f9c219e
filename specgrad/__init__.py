"""DeepSeek-V4-Flash with its DSpark draft, run natively in tinygrad.

Importing the package settles tinygrad's compiler and caches, which must happen before tinygrad itself is imported. A
missing compiler is no error yet: the config, the plan and `--help` work without one, and prepare() names it later.
`load`, `Model`, `Reply` and `demo_path` are the Python interface (api.py); they bring tinygrad in when first used.
"""
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from specgrad.toolchain import ToolchainError, prepare

if TYPE_CHECKING:
  from specgrad.api import Model, Reply, demo_path, load

__version__ = "0.1.0"
__all__ = ["Model", "Reply", "ToolchainError", "demo_path", "load", "prepare"]

def leave(*_: object) -> None:
  """Ctrl-C while nothing is open yet: no import can swallow this, and none ends in a trace."""
  with contextlib.suppress(OSError): os.write(2, b"specgrad: interrupted\n")
  os._exit(130)

if sys.argv[:1] == ["-m"]: signal.signal(signal.SIGINT, leave)  # `python -m specgrad.run` is being started; it takes over when it is ready
with contextlib.suppress(ToolchainError): prepare()

def __getattr__(name: str) -> Any:
  if name in ("Model", "Reply", "demo_path", "load"):
    from specgrad import api
    return getattr(api, name)
  raise AttributeError(f"module 'specgrad' has no attribute {name!r}")
