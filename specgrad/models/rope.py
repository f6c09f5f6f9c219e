"""Rotary frequencies, plain and with YaRN. Plain Python: they are made once, at load."""
import math
import struct

def f32(x: float) -> float: return struct.unpack("f", struct.pack("f", x))[0]

def frequencies(dim: int, theta: float, yarn: tuple[float, int, float, float] | None = None) -> list[float]:
  """dim/2 angular frequencies theta^(-2i/dim), rounded to float32 after each operation as the official code does: one unit in
  the last place turns position 65,535 by 6e-4. yarn = (factor, original length, beta_fast, beta_slow) blends them with the
  same divided by `factor` between two correction dims; no attention factor comes with it. Source: official model.py."""
  freqs = [f32(1 / f32(theta ** (2 * i / dim))) for i in range(dim // 2)]
  if yarn is None: return freqs
  factor, original, fast, slow = yarn

  def correction(beta: float) -> float: return dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))
  low, high = max(math.floor(correction(fast)), 0), min(math.ceil(correction(slow)), dim - 1)
  smooth = [f32(1 - min(max(f32((i - low) / max(high - low, 0.001)), 0.0), 1.0)) for i in range(dim // 2)]
  return [f32(f32(f32(f / factor) * f32(1 - s)) + f32(f * s)) for f, s in zip(freqs, smooth)]
