"""A captured graph on tinygrad's CPU device as one call: a table of functions and addresses that a small C loop walks.

tinygrad 0.14 has graphs for GPUs only; on the CPU it dispatches every kernel of a captured step from Python, some 30 us
each, which is more than a small model's kernels take. Same kernels, same order, same buffers."""
import ctypes

from tinygrad.device import Device, TinyELF
from tinygrad.engine.jit import MultiGraphRunner
from tinygrad.engine.realize import get_call_arg_uops
from tinygrad.uop.ops import Ops, UOp

ARGS = 16                                                  # arguments a row of the table holds
SOURCE = f"""
typedef unsigned long long u64;
typedef void (*kernel)({", ".join(["u64"] * ARGS)});
void walk(const u64* row, u64 n) {{
  for (u64 i = 0; i < n; i++, row += {ARGS + 1}) ((kernel)row[0])({", ".join(f"row[{i + 1}]" for i in range(ARGS))});
}}
"""

class CPUGraph(MultiGraphRunner):
  """One table for all calls of a graph. Kernels take their arguments as 64-bit words, unused ones are ignored."""
  def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()):
    super().__init__(linear, input_uops)
    device, words = Device[self.calls[0][2][0].device], []
    for (_, ast, bufs, device_vars), runtime in zip(self.calls, self.runtimes):
      if ast.op is Ops.COPY: rows = [(MEMMOVE, bufs[0]._buf.va_addr, bufs[1]._buf.va_addr, bufs[0].nbytes)]
      else:
        args = [bufs[i]._buf.va_addr for i in ast.arg.globals] + [device_vars.get(v.expr, 0) for v in ast.arg.vars]
        core = runtime.runtimevars.get("core_id")
        rows = [(runtime.addr, *(tid if i == core else a for i, a in enumerate(args))) for tid in range(ast.arg.global_size[0])]
      words += [w for row in rows for w in (*row, *[0] * (ARGS + 1 - len(row)))]
    self.table, self.length = (ctypes.c_uint64 * len(words))(*words), len(words) // (ARGS + 1)
    elf = TinyELF(device.compiler.compile_cached(SOURCE), "walk", device.renderer.target, ())
    self.program = device.runtime(elf)

  def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
    self.program.fxn(ctypes.c_uint64(ctypes.addressof(self.table)), ctypes.c_uint64(self.length))
    return None

  @staticmethod
  def supports_uop(batch_devs: list, new_call: UOp) -> bool:
    """Nothing that changes from call to call: no inputs, no variables but the device's own number."""
    args = get_call_arg_uops(new_call)
    if not MultiGraphRunner.supports_uop(batch_devs, new_call) or any(Ops.PARAM in [u.op for u in a.toposort()] for a in args): return False
    if new_call.src[0].op is Ops.COPY: return True
    info = new_call.src[0].arg
    fixed = all(v.expr in ("core_id", "_device_num") for v in info.vars)
    return fixed and isinstance(info.global_size[0], int) and len(info.globals) + len(info.vars) <= ARGS

MEMMOVE = ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value

def install(device: str) -> None:
  """Graphs captured on `device` from now on run this way, if it is a CPU device."""
  if device.split(":")[0] == "CPU": Device[device].graph = CPUGraph
