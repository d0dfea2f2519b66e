"""The arithmetic of papers' recipes in float64, written from the papers."""

import dataclasses
import functools

import ml_dtypes
import numpy as np
import oracle

from fp8jax.formats import E4M3, E5M2, by_name
from fp8jax.quantization import hadamard
from fp8jax.recipe.estimators import SlopeAlone, TrustMask
from fp8jax.recipe.gemm import Accumulation, Backward, Gemm, Recipe
from fp8jax.recipe.quant import (
  WHOLE,
  Clamp,
  Hadamard,
  Largest,
  LeastError,
  Quant,
  Quantile,
  Rms,
  Rounding,
  Scale,
)

F32 = np.float32


# Of LogFMT, whose spacings are cut to 2^-20 octave: relative, a number of its grid.
LOG_SLACK = 2.0**-17
# The tests' own draws: what every random bit is, as a share of 2^32, and signs by size.
BITS = np.uint32(0.37 * 2**32)


def fresh_signs(size: int) -> np.ndarray:
  return np.random.default_rng(size).choice(F32([-1, 1]), size)


@functools.cache
def hadamard_matrix(size: int) -> np.ndarray:
  """Sylvester's, times Paley's of order 12, 20 or 28, which hadamard_test proves to be one."""
  order = next((n for n in (28, 20, 12) if size % n == 0), 1)
  h = hadamard.paley(order).astype(np.float64) if order > 1 else np.ones((1, 1))
  while len(h) < size:
    h = np.block([[h, h], [h, -h]])
  return h


def rotated(t, how: Hadamard | None, axis: int = 1, inverse: bool = False):
  """The product with the plain matrix in blocks: of whole numbers exact, then one rounding."""
  if how is None:
    return t
  # hadamard_test records the fixed vector.
  signs = {"none": np.ones, "fixed": hadamard.signs, "fresh": fresh_signs}[how.signs](how.size)
  matrix = signs[:, None] * hadamard_matrix(how.size)
  t = np.moveaxis(np.asarray(t, np.float64), axis, -1)
  blocks = t.reshape(*t.shape[:-1], -1, how.size) @ (matrix.T if inverse else matrix)
  factor = F32(1 / np.sqrt(how.size))
  return np.moveaxis((blocks * np.float64(factor)).reshape(t.shape), -1, axis)


def clamp(t, q: Quant):
  if not isinstance(q.clip, Clamp):
    return t
  assert q.tile == (1, WHOLE)
  n, order = t.shape[1], np.sort(t, axis=1)
  low, high = (int(np.floor(s * n)) for s in (1 - q.clip.share, q.clip.share))
  return np.clip(t, order[:, [low]], order[:, [min(high, n - 1)]])


def largest(q: Quant) -> float:
  return {"lns8": F32(2.0 ** (127 / 8)), "logfmt8": 1.0}.get(q.format.name) or oracle.MAX[
    q.format.name
  ]


def one_scale(tile, q: Quant, tensor_amax, given=None):
  """The candidates of a tile's scale, in float32: (all of it, what is above its E4M3 number)."""
  amax = F32(np.abs(tile).max())
  times = (1.0,)
  if isinstance(q.clip, LeastError):
    times = q.clip.times
  elif isinstance(q.clip, Largest):
    times = (q.clip.times,)
  elif isinstance(q.clip, Rms):
    centre = tile.astype(np.float64).mean() if q.clip.is_centred else 0
    amax = F32(q.clip.times * np.sqrt(np.mean((tile.astype(np.float64) - centre) ** 2)))
  elif isinstance(q.clip, Quantile):
    order = np.sort(np.abs(tile).ravel())
    amax = order[int(q.clip.share * (order.size - 1))]
  if given is not None and q.scale is Scale.E4M3_OVER_F32:
    tensor_amax = given
  elif given is not None:
    amax = F32(given)
  return [_scale_of(F32(amax * F32(t)), q, tensor_amax) for t in times]


def _scale_of(amax, q: Quant, tensor_amax):
  if q.scale is Scale.E4M3_OVER_F32:
    most = max(q.clip.times) if isinstance(q.clip, LeastError) else 1.0
    # The paper's 448, or room for what may be larger than the tensor's largest.
    top = 256 if most > 1 or q.rounding is Rounding.EDEN else 448
    room = q.clip.times if isinstance(q.clip, Largest) else 1.0
    encode = F32(top * largest(q)) / F32(F32(tensor_amax) * F32(room))
    s8 = oracle.cast(amax * F32(encode * F32(1 / largest(q))), "e4m3").astype(F32)
    s8, decode = max(s8, F32(2.0**-9)), F32(1) / encode
    return s8 * decode, decode
  margin = getattr(q.source, "margin", 0)
  if q.scale is Scale.GAUDI2:
    amax = np.float64(amax) * 2.0**margin
    fits = [s for s in (2.0**-8, 2.0**-4, 1.0, 16.0) if amax <= s * largest(q)]
    return F32(min(fits, default=16.0)), None
  return F32(_of_one_level(amax, q) * F32(2.0**margin)), None


def _of_one_level(amax, q: Quant):
  if q.scale is Scale.ONE:
    return F32(1)
  if q.scale is Scale.POW2_DOWN:
    return F32(2.0 ** (np.frexp(np.float64(amax) / largest(q))[1] - 1))
  if q.scale is Scale.FLOOR_4_3:
    return oracle.scale_of(amax, q.format.name, "floor") * F32(4 / 3)
  if q.scale is Scale.F32:  # whose factor is a normal number
    return F32(amax * max(F32(1 / largest(q)), oracle.TINY))
  if q.format.name not in oracle.MAX:  # of what is logarithmic
    e, emax = np.frexp(np.float64(amax)), np.frexp(np.float64(largest(q)))
    up = {Scale.FLOOR: 0, Scale.EVEN: e[0] >= 1 - 2.0**-(2 + {"lns8": 3, "logfmt8": 2}[
      q.format.name]), Scale.POW2: e[0] > emax[0]}[q.scale]  # fmt: skip
    return F32(2.0 ** (e[1] - emax[1] + int(up)))
  return oracle.scale_of(amax, q.format.name, q.scale.value)


def neighbours(x, q: Quant):
  """float64 (below, above) of magnitudes within the format's range, toward and away from zero."""
  name = q.format.name
  if name == "lns8":

    def number(k):
      return np.where(k < 0, 0, F32(2.0 ** (k % 8 / 8)) * 2.0 ** (k // 8))

    with np.errstate(divide="ignore"):
      k = np.maximum(np.floor(8 * np.log2(np.maximum(x, 2.0**-1))), -1)
    k += number(k + 1) <= x  # a number itself
    return number(k), number(k + 1)
  if name == "logfmt8":
    positive = x[x > 0]
    if not positive.size:
      return x, x
    ends = np.log2(positive.max()), np.log2(max(positive.min(), positive.max() * 2.0**-32))
    grid = np.concatenate([[0], 2.0 ** np.linspace(ends[1], ends[0], 2**7 - 1)])
    grid[-1] = positive.max()
    place = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    return grid[place], grid[place + 1]
  dtype, _, mantissa, *least = oracle.ROWS[name]
  if np.issubdtype(dtype, np.integer):
    step = np.ones(x.shape)
  else:
    least = least[0] if least else int(ml_dtypes.finfo(dtype).minexp)
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - mantissa)
  below = np.floor(x / step) * step
  return below, below + step


def on_grid(x, q: Quant, how: Rounding):
  """float64 (numbers of the format for a tile of float32 x, how far others may be from them)."""
  name, x = q.format.name, np.asarray(x, F32)
  size = np.minimum(np.abs(x.astype(np.float64)), largest(q))
  below, above = neighbours(size, q)
  gap = np.where(above > below, above - below, 1)
  share = (size - below) / gap
  if how is Rounding.TOWARD_ZERO:
    border, is_up = 1.0, np.zeros(x.shape, bool)
  elif how is Rounding.STOCHASTIC:
    border, is_up = BITS * 2.0**-32, np.floor(share * 2.0**32) > BITS
  elif name == "lns8":
    border = 0.5
    with np.errstate(divide="ignore"):
      is_up = np.where(size < 1, size > 0, 8 * np.log2(np.maximum(size, 1)) % 1 > 0.5)
  elif name == "logfmt8":
    border, is_up = 0.5, share >= 0.5
  else:
    return oracle.cast(x, name).astype(np.float64), np.zeros(x.shape)
  codes = np.sign(x) * np.where(is_up, above, below)
  if name != "logfmt8":
    return codes, np.zeros(x.shape)
  off = LOG_SLACK * size
  is_near = np.abs(size - below - border * gap) <= 2 * off
  is_near |= (how is not Rounding.NEAREST) & (np.minimum(share, 1 - share) * gap <= 2 * off)
  return codes, off + is_near * gap


@dataclasses.dataclass
class Made:
  """An operand [rows, K] in float64, rotated: what is multiplied, t / scale in float32, the codes
  and scales, and how far elements may be from these."""

  values: np.ndarray
  scaled: np.ndarray | None = None
  codes: np.ndarray | None = None
  scale: np.ndarray | None = None
  slack: np.ndarray | float = 0.0


def narrow(t, q: Quant | None, rows: Hadamard | None = None, given=None) -> Made:
  if q is None:
    return Made(np.asarray(t, np.float64))
  t = clamp(np.asarray(rotated(np.asarray(t, F32), rows, 0), F32), q)
  t = np.asarray(rotated(t, q.transform), F32)
  extents = [n if e == WHOLE else e for n, e in zip(t.shape, q.tile)]
  codes, scale, decode, slack = (np.zeros(t.shape) for _ in range(4))
  for r in range(0, t.shape[0], extents[0]):
    for c in range(0, t.shape[1], extents[1]):
      part, best = (slice(r, r + extents[0]), slice(c, c + extents[1])), None
      candidates = one_scale(t[part], q, np.abs(t).max(), given)
      for of_tile, above in candidates if len(candidates) > 1 else ():
        x = on_grid(t[part] * (F32(1) / of_tile), q, Rounding.NEAREST)[0] * np.float64(of_tile)
        error = np.sum((x - t[part]) ** 2)
        # "less" by more than a rounding, as LeastError says
        if best is None or error < best[0] * (1 - 2.0**-12):
          best = error, (of_tile, above)
      of_tile, above = best[1] if best else candidates[0]
      x = t[part] * (F32(1) / of_tile)
      how = Rounding.NEAREST if q.rounding is Rounding.EDEN else q.rounding
      codes[part], slack[part] = on_grid(x, q, how)
      scale[part], decode[part] = of_tile, above or 0
  if q.rounding is Rounding.EDEN:
    scale = unbiased(t, codes, scale, decode.astype(F32), q)
  scaled = t * (F32(1) / scale.astype(F32))  # as it is rounded: a slope has a pole
  return Made(codes * scale, scaled.astype(np.float64), codes, scale, slack * scale)


def unbiased(t, codes, scale, decode, q: Quant):
  """MS-EDEN: E4M3 scales of a block times <x, x> / <x, rounded x>, rounded by the draws."""
  blocks = (t.shape[0], -1, q.rotation.size)
  s8 = oracle.cast((scale / decode).astype(F32), "e4m3").astype(np.float64)
  wide = (t * (F32(1) / scale.astype(F32))).astype(np.float64) * s8
  of_x, of_both = ((wide * y).reshape(blocks).sum(2) for y in (wide, codes * s8))
  factor = np.where((of_both > 0) & (of_x > 0), of_x / np.where(of_both > 0, of_both, 1), 1)
  wanted = (s8.reshape(blocks) * factor[..., None]).reshape(t.shape)
  new = np.maximum(on_grid(wanted, Quant(E4M3), Rounding.STOCHASTIC)[0], 2.0**-9)
  return (new.astype(F32) * decode).astype(np.float64)


def slope(made: Made, q: Quant, estimator):
  magnitude = np.abs(made.scaled)
  is_held = magnitude <= largest(q) * (1 + 2.0**-16)
  if isinstance(estimator, TrustMask):
    return is_held.astype(np.float64)
  magnitude = np.minimum(magnitude, largest(q))
  low, high = neighbours(magnitude, q)
  u = np.abs(2 * (magnitude - low) / (high - low) - 1)
  with np.errstate(divide="ignore"):
    found = np.minimum(u ** (1 / estimator.power - 1) / estimator.power, estimator.largest)
  return np.where(is_held, found, 0)


def tensor_core(a: Made, b: Made, step: int, least):
  """Sums of Hopper's model (arXiv:2511.10909): 32 products a time, cut to 13 bits of fraction."""

  def exponent(x, at_least=-1000):
    return np.where(x == 0, -1000, np.maximum(np.frexp(x)[1] - 1, at_least)).astype(int)

  result = np.zeros((len(a.codes), len(b.codes)))
  for start in range(0, a.codes.shape[1], step):
    total = np.zeros(result.shape)
    for k in range(start, min(start + step, a.codes.shape[1]), 32):
      x, y = (m.codes[:, k : min(k + 32, start + step)] for m in (a, b))
      size = exponent(x, least[0])[:, None] + exponent(y, least[1])
      top = np.maximum(size.max(-1), exponent(total))
      unit = np.ldexp(1.0, np.maximum(top, -500) - 13)
      units = np.trunc(x[:, None] * y / unit[..., None]).sum(-1) + np.trunc(total / unit)
      more = np.ldexp(1.0, np.maximum(np.frexp(units)[1] - 14, 0))
      total = np.trunc(units / more) * more * unit
    result += total * a.scale[:, [start]] * b.scale[:, start]
  return result


def product(a: Made, b: Made, gemm: Gemm, backend: str):
  """float64 (product, how far it may be off), its rows rotated back."""
  y, slack = a.values @ b.values.T, 0.0
  if np.any(a.slack) or np.any(b.slack):
    assert not any(gemm.rotate_rows)
    bs = b.slack + np.zeros(b.values.shape)
    slack = np.abs(a.values) @ bs.T + a.slack @ (np.abs(b.values) + bs).T
  if backend == "emulated_sm90" and gemm.multiplies_codes:
    how = {Accumulation.FAST: a.codes.shape[1], Accumulation.PRECISE: 128}
    least = [-14 if q.format == E5M2 else -6 for q in (gemm.lhs, gemm.rhs)]
    y = tensor_core(a, b, how.get(gemm.accumulate, gemm.accumulate), least)
  for axis, rows in enumerate(gemm.rotate_rows):
    y = rotated(y, rows, axis, inverse=True)
  return y, slack


def products_and_slack(r: Recipe, x, w, g, backend="xla", amaxes=(None,) * 3):
  """float64 [(y, slack), (dx, slack), (dw, slack)] of x [T, D], w [D, F], g [T, F].

  Args:
    amaxes: of (x, w, g), where scales are delayed or static.
  """
  f, d, v = r.fwd, r.dgrad, r.wgrad
  of_x, of_w, of_g = amaxes
  xm = narrow(x, f.lhs, f.rotate_rows[0], of_x)
  wm = narrow(w.T, f.rhs, f.rotate_rows[1], of_w)
  y, y_off = product(xm, wm, f, backend)
  again = r.backward is Backward.DEQUANTIZED
  x_again, w_again = (xm.values, wm.values) if again else (x, w.T)
  if f.compensates:
    rest = x.astype(np.float64) - clamp(x, f.lhs)
    y = y + rest @ w
    x_again = x_again + rest if again else x_again
  lhs = narrow(g, d.lhs, d.rotate_rows[0], of_g)
  dx, dx_off = product(lhs, narrow(w_again.T, d.rhs, d.rotate_rows[1], of_w), d, backend)
  lhs = narrow(x_again.T, v.lhs, v.rotate_rows[0], of_x)
  dw, dw_off = product(lhs, narrow(g.T, v.rhs, v.rotate_rows[1], of_g), v, backend)
  dw, dw_off = dw.T, dw_off.T if np.ndim(dw_off) else dw_off
  if r.estimate_x:
    dx = dx * slope(xm, f.lhs, r.estimate_x)
  if isinstance(r.estimate_w, SlopeAlone):
    stairs = Quant(by_name(r.estimate_w.format), (1, WHOLE))
    dw = dw * slope(narrow(w.T, stairs), stairs, r.estimate_w)
  elif r.estimate_w:
    dw = dw * slope(wm, f.rhs, r.estimate_w)
  if again and f.rhs.transform:
    dx, dw = (rotated(t, f.rhs.transform, inverse=True) for t in (dx, dw))
  sizes = (x.shape[1], w.shape[1], x.shape[0])
  gains = [
    np.prod(np.power(sizes, [m.gain.fan_in, m.gain.fan_out, m.gain.tokens])) if m.gain else 1.0
    for m in (f, d, v)
  ]
  made = ((y, y_off), (dx, dx_off), (dw.T, dw_off.T if np.ndim(dw_off) else dw_off))
  return [(t * gain, off * gain) for (t, off), gain in zip(made, gains)]


def three_products(r: Recipe, x, w, g):
  """float64 y, dx, dw of formats whose numbers are known exactly."""
  return [t for t, _ in products_and_slack(r, x, w, g)]
