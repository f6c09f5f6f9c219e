"""Settles tinygrad's compiler, caches and device before any test imports tinygrad, and knows where large data lies."""
from pathlib import Path

import pytest

from specgrad import toolchain

toolchain.prepare()  # here a missing compiler is an error: no test could say anything

from specgrad import lowering_cache  # noqa: E402  imports tinygrad

lowering_cache.install()  # tests then exercise what users run, and a second run of the suite takes half the time

@pytest.fixture(scope="session")
def shared() -> Path:
  """The folder with reference data beside the checkout; tests that need it are skipped where it is missing."""
  folder = Path(__file__).resolve().parents[2] / "shared"
  if not folder.is_dir(): pytest.skip(f"no reference data at {folder}")
  return folder
