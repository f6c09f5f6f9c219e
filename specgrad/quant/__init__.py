"""Number formats and the operations on them: one set of names, a readable twin and fast kernels behind it."""
from types import ModuleType

def operations(device: str) -> ModuleType:
  """The fastest implementation of this package's operations for a device such as "CPU:1": every module has the same names
  and signatures, and `twin`, plain tinygrad expressions, runs anywhere."""
  if device.split(":")[0] == "CPU":
    from specgrad.quant import cpu
    return cpu
  from specgrad.quant import twin
  return twin
