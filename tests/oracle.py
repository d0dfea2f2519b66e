"""Block quantisation in NumPy, written from the definition and sharing no code with fp8jax."""

import ml_dtypes
import numpy as np

# A row a format: dtype with its numbers, largest, stored mantissa bits (of integers two fewer than
# all); the smallest normal exponent where the dtype has more numbers than the format. What fp8jax
# stores a number in may be another dtype.
ROWS = {
  "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 3),
  "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 2),
  "e3m4": (ml_dtypes.float8_e3m4, 15.5, 4),
  "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 1),
  "e4m3_240": (ml_dtypes.float8_e4m3, 240.0, 3),
  "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 3),
  "e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 2),
  **{f"int{n}": (np.int8, 2.0 ** (n - 1) - 1, n - 2) for n in range(2, 9)},
  "e3m4_30": (np.float32, 30.0, 4, -2),
  "e5m6": (np.float32, 65024.0, 6, -14),
  **{f"e8m{m}": (np.float32, (2 - 2.0**-m) * 2.0**127, m, -126) for m in (3, 4, 5, 6)},
  # Minifloats whose codes are all numbers: the largest exponent is 2^(e - 1).
  **{
    f"e{e}m{m}(inf=False, nan=False)": (
      np.float32,
      (2 - 2.0**-m) * 2.0**2 ** (e - 1),
      m,
      2 - 2 ** (e - 1),
    )
    for e, m in ((3, 1), (2, 2), (4, 2), (3, 3), (2, 4))
  },
  "e7m7": (np.float32, 255 * 2.0**56, 7, -62),
  "bf16": (ml_dtypes.bfloat16, 255 * 2.0**120, 7),
  "f16": (np.float16, 65504.0, 10),
}
DTYPES, MAX, MANTISSA = ({name: row[i] for name, row in ROWS.items()} for i in range(3))
TINY = np.float32(2.0**-126)


def cast(x, fmt: str) -> np.ndarray:
  """Saturating, ties to even, by ml_dtypes or rint; NaN becomes +0 where the format has none."""
  x, (dtype, _, mantissa, *least) = np.asarray(x, np.float32), ROWS[fmt]
  is_integer = np.issubdtype(dtype, np.integer)
  if fmt in ("e2m1", "e2m3", "e3m2") or "nan=False" in fmt or is_integer:
    x = np.where(np.isnan(x), np.float32(0), x)
  with np.errstate(invalid="ignore"):
    x = np.clip(x, -MAX[fmt], MAX[fmt])
    if least:
      step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, *least) - mantissa)
      x = np.rint(x / step) * step
    return (np.rint(x) if is_integer else x).astype(dtype)


def scale_of(amax, fmt: str, rule: str) -> np.float32:
  """The scale of one tile, from a float32 amax; `rule` is a Scale's value, for one level."""
  amax = np.float32(amax)
  if not TINY <= amax < np.inf:
    return np.float32(1)
  if rule == "f32":
    return max(amax * np.float32(1 / MAX[fmt]), TINY)
  emax = int(np.floor(np.log2(MAX[fmt])))
  mantissa, exponent = np.frexp(np.float64(amax))  # mantissa in [1/2, 1)
  if rule == "pow2":
    mantissa, exponent = np.frexp(np.float64(amax) / MAX[fmt])
    exponent -= mantissa == 0.5
  elif rule == "floor":
    exponent -= 1 + emax
  elif rule == "even":
    units = 2.0 ** MANTISSA[fmt]
    has_carried = np.floor(2 * mantissa * units + 0.5) / units >= 2
    exponent -= 1 + emax - has_carried
  else:
    raise ValueError(rule)
  return max(np.ldexp(np.float32(1), exponent), TINY)


def two_level(amax, tensor_amax, fmt: str) -> tuple[np.float32, np.float32]:
  """(E4M3 number of one tile, float32 factor of the tensor), in the order that quantize states."""
  amax, tensor_amax, one = np.float32(amax), np.float32(tensor_amax), np.float32(1)
  encode = one
  if TINY <= tensor_amax < np.inf:
    with np.errstate(over="ignore"):
      encode = min(np.float32(448 * MAX[fmt]) / tensor_amax, np.float32(2.0**117))
  s8 = one
  if TINY <= amax < np.inf:
    s8 = cast(amax * (encode * np.float32(1 / MAX[fmt])), "e4m3").astype(np.float32)
  return max(s8, np.float32(2.0**-9)), one / encode


def quantize(x, fmt: str, tile, rule: str | bool, tensor_amax=None):
  """(data in the narrow dtype, float32 scale per element) of a matrix, tile by tile.

  tile: (rows, columns), 0 for the full axis. rule: a Scale's value; False for f32, True for pow2.
  tensor_amax: of two levels, where it is not x's own.
  """
  rule = {False: "f32", True: "pow2"}.get(rule, rule)
  x = np.asarray(x, np.float32)
  data, scale = np.zeros(x.shape, DTYPES[fmt]), np.zeros(x.shape, np.float32)
  magnitude = np.where(np.isnan(x), 0, np.abs(x))
  tensor_amax = magnitude.max() if tensor_amax is None else tensor_amax
  rows, cols = (n if t == 0 else t for n, t in zip(x.shape, tile))
  for r in range(0, x.shape[0], rows):
    for c in range(0, x.shape[1], cols):
      part = (slice(r, r + rows), slice(c, c + cols))
      if rule == "e4m3_over_f32":
        s = np.prod(two_level(magnitude[part].max(), tensor_amax, fmt))
      else:
        s = scale_of(magnitude[part].max(), fmt, rule)
      data[part] = cast(x[part] * (np.float32(1) / np.float32(s)), fmt)
      scale[part] = s
  return data, scale


def fake_quantize(x, fmt: str, tile, rule: str | bool) -> np.ndarray:
  """float64 values that the narrow matrix stands for."""
  data, scale = quantize(x, fmt, tile, rule)
  return data.astype(np.float64) * scale.astype(np.float64)


def sums(product) -> list[float]:
  """The norm of a product, and its sums with random signs: they stand for it in a golden file."""
  product = np.asarray(product, np.float64)
  signs = np.random.default_rng(0).choice([-1.0, 1.0], (4, *product.shape))
  return [float(np.linalg.norm(product)), *(float((s * product).sum()) for s in signs)]
