"""Block quantisation in NumPy, written from the definition and sharing no code with fp8jax."""

import ml_dtypes
import numpy as np

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def quantize(x, fmt: str, tile, pow2: bool):
  """(data in the narrow dtype, float32 scale per element) of a matrix, tile by tile.

  tile: (rows, columns), 0 for the full axis.
  """
  x = np.asarray(x, np.float32)
  data, scale = np.zeros(x.shape, DTYPES[fmt]), np.zeros(x.shape, np.float32)
  rows, cols = (n if t == 0 else t for n, t in zip(x.shape, tile))
  for r in range(0, x.shape[0], rows):
    for c in range(0, x.shape[1], cols):
      part = x[r : r + rows, c : c + cols]
      amax = np.max(np.abs(part))
      s = np.float32(1.0)
      if np.isfinite(amax) and amax > 0:
        s = np.float32(amax) * np.float32(1 / MAX[fmt])
        if pow2:
          mantissa, exponent = np.frexp(np.float64(amax) / MAX[fmt])
          s = np.ldexp(np.float32(1.0), exponent - (mantissa == 0.5))
        s = max(s, np.float32(2.0**-126))
      with np.errstate(invalid="ignore", over="ignore"):
        inverse = np.float32(1) / np.float32(s)
        narrow = np.clip(part * inverse, -MAX[fmt], MAX[fmt]).astype(DTYPES[fmt])
      data[r : r + rows, c : c + cols] = narrow
      scale[r : r + rows, c : c + cols] = s
  return data, scale


def fake_quantize(x, fmt: str, tile, pow2: bool) -> np.ndarray:
  """float64 values that the narrow matrix stands for."""
  data, scale = quantize(x, fmt, tile, pow2)
  return data.astype(np.float64) * scale.astype(np.float64)
