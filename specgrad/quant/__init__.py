"""Number formats and the operations on them: one set of names, a readable twin and fast kernels behind it."""
import functools
import inspect
from types import SimpleNamespace

def operations(device: str, w4a8: bool) -> SimpleNamespace:
  """The fastest implementation of this package's operations for a device such as "CPU:1", with their numerics settled.

  Every implementing module has the same names and signatures; `twin`, plain tinygrad expressions, runs anywhere."""
  from specgrad.quant import cpu, cuda, twin
  module = {"CPU": cpu, "CUDA": cuda, "NV": cuda}.get(device.split(":")[0], twin)
  names = [n for n, f in vars(twin).items() if inspect.isfunction(f) and hasattr(cpu, n)]
  takes = {n: "w4a8" in inspect.signature(getattr(twin, n)).parameters for n in names}
  return SimpleNamespace(**{n: functools.partial(getattr(module, n), w4a8=w4a8) if takes[n] else getattr(module, n) for n in names})
