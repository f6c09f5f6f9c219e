"""Number formats and the operations on them: one set of names, a readable twin and fast kernels behind it.

On one device all values are plain tensors. On several, each value is an `Each`: what every device holds of it, and an
operation runs on every device with what that device holds. Nothing is shared out behind the scenes: devices meet only in
`everyone`, `deliver` and what is made of them."""
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tinygrad import Tensor

KERNELS = {"CPU": "cpu", "CUDA": "cuda", "NV": "cuda"}        # kind of device -> module; the others run the twin

class Each(tuple[Any, ...]):
  """One thing on several devices, in their order: copies, parts, or shares of a sum, as whoever made it says."""
  __slots__ = ()

def on(device: int, value: Any) -> Any:
  """What a device holds of a value; what is no Each is the same for all."""
  return value[device] if isinstance(value, Each) else value

def lift(f: Callable[..., Any]) -> Callable[..., Any]:
  """f on every device by itself. Without an Each among the arguments it is just f. A tuple of results becomes a tuple of
  Each."""
  @functools.wraps(f)
  def call(*args: Any, **named: Any) -> Any:
    given = [a for a in (*args, *named.values()) if isinstance(a, Each)]
    if not given: return f(*args, **named)
    results = [f(*(on(i, a) for a in args), **{k: on(i, a) for k, a in named.items()}) for i in range(len(given[0]))]
    if type(results[0]) is tuple: return tuple(Each(r) for r in zip(*results))
    return Each(results)
  return call

def flat(values: Sequence[Any]) -> list[Tensor]: return [t for v in values for t in (v if isinstance(v, Each) else (v,))]

def realize(*values: Any) -> Any:
  """All of them together -> the first."""
  Tensor.realize(*flat(values))
  return values[0]

def everyone(x: Any) -> Any:
  """A device's tensor -> on each device the tuple of all devices' tensors, in device order: one exchange."""
  if not isinstance(x, Each): return (x,)
  return Each(tuple(t if s == r else t.to(x[r].device) for s, t in enumerate(x)) for r in range(len(x)))

def deliver(parts: tuple[Any, ...]) -> Any:
  """parts[s] on device r is what r has made for device s -> on each device the tuple of what was made for it, in device
  order: one exchange."""
  if not isinstance(parts[0], Each): return parts
  n = len(parts)
  return Each(tuple(parts[r][s] if s == r else parts[r][s].to(parts[r][r].device) for s in range(n)) for r in range(n))

def operations(devices: str | Sequence[str], w4a8: bool) -> SimpleNamespace:
  """The fastest implementation of this package's operations for devices of one kind such as "CPU", with their numerics
  settled. On several devices they are lifted.

  Every implementing module has the same names and signatures; `twin`, plain tinygrad expressions, runs anywhere. With
  them: `devices`; `rank`, each device's number; `total(x)`, the sum of the devices' shares in their order, rounded as a
  product is; `gather(x)`, the parts side by side."""
  from specgrad.quant import cpu, twin
  devices = (devices,) if isinstance(devices, str) else tuple(devices)
  module = importlib.import_module(f"specgrad.quant.{KERNELS.get(devices[0].split(':')[0], 'twin')}")
  names = [n for n, f in vars(twin).items() if inspect.isfunction(f) and hasattr(cpu, n)]
  takes = {n: "w4a8" in inspect.signature(getattr(twin, n)).parameters for n in names}
  ops = {n: functools.partial(getattr(module, n), w4a8=w4a8) if takes[n] else getattr(module, n) for n in names}
  alone = len(devices) == 1

  def total(x: Any) -> Any:
    if alone: return x
    add = lambda parts: twin.rnd(functools.reduce(Tensor.add, parts), w4a8).clone()
    return lift(add)(everyone(x))

  def gather(x: Any) -> Any: return x if alone else lift(lambda parts: Tensor.cat(*parts, dim=1).clone())(everyone(x))

  if not alone: ops = {n: lift(f) for n, f in ops.items()}
  return SimpleNamespace(**ops, devices=devices, alone=alone, rank=0 if alone else Each(range(len(devices))), total=total, gather=gather)
