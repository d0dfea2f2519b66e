"""GPTQ's codes against a float64 optimal brain surgeon, one column at a time."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden import write_qwix

from fp8jax import formats
from fp8jax.errors import UserError
from fp8jax.ptq import gptq, moments
from fp8jax.quantization import quantize
from fp8jax.recipe.quant import (
  Hadamard,
  LeastError,
  Quant,
  Quantile,
  Rounding,
  Scale,
  Static,
)

INT4, INT2, INT8, E2M1, E4M3 = (
  formats.by_name(n) for n in ("int4", "int2", "int8", "e2m1", "e4m3")
)
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
N, K, BLOCK, DAMP = 20, 76, 32, 0.01
_quantized = jax.jit(quantize.quantize, static_argnames="quant")
_moments = jax.jit(moments.of)
# How far float32's sums may move a weight, of its row's largest, and a scale, of itself.
REACH = 5e-6
# Of all codes, those that may lie within REACH of a boundary: its width over the grid's spacing.
NEAR_TIES = 0.005


def _case(seed=0, n=N, k=K):
  """(weight, inputs): correlated channels, a loud one, and a dead one."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((3 * k, k)) @ (np.eye(k) + rng.standard_normal((k, k)) / k**0.5)
  x[:, 3] *= 30
  x[:, 7] = 0
  return rng.standard_normal((n, k)).astype(np.float32), x.astype(np.float32)


def _scales(part, tensor_amax, quant):
  """All scales of a tile whose elements are known to REACH; the first is that of these elements."""
  fmt, tensor_amax = quant.format.name, np.float32(tensor_amax)

  def one(amax):
    if quant.scale is not Scale.E4M3_OVER_F32:
      return oracle.scale_of(amax, fmt, quant.scale.value)
    if not isinstance(quant.clip, LeastError):
      return np.prod(oracle.two_level(amax, tensor_amax, fmt))
    encode = np.float32(256 * 6) / tensor_amax  # 1.5 times it is below 448
    s8 = oracle.cast(np.float32(amax) * (encode * np.float32(1 / 6)), "e4m3").astype(np.float32)
    return max(s8, np.float32(2.0**-9)) * (1 / encode)

  amax, bounds = np.abs(part).max(), (1, 1 - REACH, 1 + REACH)
  if not isinstance(quant.clip, LeastError):
    return [one(amax * b) for b in bounds]
  tried = [[one(amax * t * b) for b in bounds] for t in quant.clip.times]

  def error(scale):
    return np.sum((oracle.cast(part / scale, fmt).astype(float) * scale - part) ** 2)

  errors = [error(s[0]) for s in tried]
  return [s for ss, e in zip(tried, errors) if e <= min(errors) * 1.002 for s in ss]


def _surgeon(w, x, quant, made, scale, order):
  """Follows the codes `made`, and says of each whether it is the surgeon's.

  Every decision is the float64 surgeon's on the weights that earlier decisions of `made` left, so
  that one tie does not make all that follows another matrix.

  Returns:
    (codes that are no nearest one, codes within REACH of a tie, scales that are none of the rule's)
  """
  fmt, w = quant.format.name, w.astype(np.float64)
  gram = x.astype(np.float64).T @ x.astype(np.float64)
  dead = np.diag(gram) == 0
  h = gram + np.diag(DAMP * np.mean(np.diag(gram)) + np.where(dead, 1.0, 0.0))
  inverse, now, amax = np.linalg.inv(h), w.copy(), np.abs(w).max()
  rows, columns = (s or e for s, e in zip(quant.tile, w.shape))
  columns = columns if order == "as_is" else w.shape[1]
  turns = range(w.shape[1]) if order == "as_is" else np.argsort(-np.diag(gram), kind="stable")
  wrong = near = off = 0
  for j in turns:
    if (quant.tile[1] and order == "as_is") and j % columns == 0:
      for r in range(0, w.shape[0], rows):
        allowed = _scales(now[r : r + rows, j : j + columns], amax, quant)
        own = scale[r, j]
        off += not min(allowed) * (1 - 1e-6) <= own <= max(allowed) * (1 + 1e-6)
    wide = np.float64(scale[:, j])
    reach = REACH * np.abs(now).max(1) / wide
    low, high, code = (
      oracle.cast(v, fmt).astype(float)
      for v in (now[:, j] / wide - reach, now[:, j] / wide + reach, made[:, j])
    )
    wrong += np.sum((code < low) | (code > high))
    near += np.sum(low != high)
    error = (now[:, j] - made[:, j].astype(float) * wide) / inverse[j, j]
    now = now - error[:, None] * inverse[j]
    now[:, j] = 0
    inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    inverse[j, j] = 1  # gone
  return wrong, near, off


SLOW = pytest.mark.slow
CASES = [
  (Quant(INT4, (1, 16)), "as_is"),
  (Quant(INT4, (1, 16)), "by_activation"),
  (Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32, clip=LeastError((1.0, 1.5))), "as_is"),
  (Quant(E4M3, (8, 48), Scale.POW2), "as_is"),
  pytest.param(Quant(E4M3), "as_is", marks=SLOW),
  pytest.param(Quant(INT8, (1, 0)), "by_activation", marks=SLOW),
  pytest.param(Quant(INT2, (1, 8)), "as_is", marks=SLOW),
  pytest.param(Quant(formats.E3M2, (1, 32), Scale.FLOOR), "as_is", marks=SLOW),
  pytest.param(Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32), "as_is", marks=SLOW),
  pytest.param(Quant(E2M1, (1, 32), Scale.EVEN), "as_is", marks=SLOW),
  pytest.param(Quant(E4M3, (0, 16)), "as_is", marks=SLOW),
]


@pytest.mark.parametrize(("quant", "order"), CASES, ids=str)
def test_codes_are_those_of_the_surgeon_but_at_ties(quant, order):
  w, x = _case()
  made = gptq.quantize(w, _moments(x), quant, DAMP, BLOCK, order)
  data = np.asarray(made.data, np.float32)
  rows, columns = (s or e for s, e in zip(quant.tile, w.shape))
  scale = np.asarray(made.scale).repeat(rows, 0)[:N].repeat(columns, 1)[:, :K]
  wrong, near, off = _surgeon(w, x, quant, data, scale, order)
  assert (wrong, off) == (0, 0)
  assert near <= NEAR_TIES * data.size
  # Scales that do not wait for their turn are those of the weight.
  plain = _quantized(w, quant)
  if quant.tile[1] == 0 or order != "as_is":
    np.testing.assert_array_equal(made.scale, plain.scale)
  assert made.data.dtype == quant.format.dtype
  assert made.tile == quant.tile
  # The surgeon follows any codes: those of plain rounding are not his.
  nearest = np.asarray(plain.data, np.float32)
  wide = np.asarray(plain.scale).repeat(rows, 0)[:N].repeat(columns, 1)[:, :K]
  assert _surgeon(w, x, quant, nearest, wide, order)[0] > 0.02 * data.size


def test_uncorrelated_inputs_leave_nothing_to_make_up_for():
  """A diagonal gram: the nearest codes, of a dead column and of no live one too."""
  w, x = _case(n=4, k=16)
  quant = Quant(INT4, (1, 16))
  plain = _quantized(w, quant)
  for diagonal in (np.arange(16.0), np.zeros(16)):
    of_x = dataclasses.replace(_moments(x), gram_KK=jnp.diag(jnp.float32(diagonal)))
    made = gptq.quantize(w, of_x, quant)
    np.testing.assert_array_equal(made.data, plain.data)
    np.testing.assert_array_equal(made.scale, plain.scale)


def test_refusals_say_what_to_do():
  w, x = _case(n=4, k=16)
  of_x = _moments(x)
  for quant, word in (
    (Quant(E4M3, source=Static()), "source=CURRENT"),
    (Quant(E4M3, rounding=Rounding.STOCHASTIC), "rounding='nearest'"),
    (Quant(E4M3, (1, 16), transform=Hadamard(16)), "rotate weights"),
    (Quant(formats.LOGFMT8, (1, 8)), "fixed grid"),
    (Quant(E4M3, (1, 12), clip=Quantile(0.9)), "partial tile"),
  ):
    with pytest.raises(UserError, match=word):
      gptq.quantize(w, of_x, quant)
  with pytest.raises(UserError, match="order one of"):
    gptq.quantize(w, of_x, Quant(E4M3), order="random")
  broken = dataclasses.replace(of_x, gram_KK=-of_x.gram_KK)
  with pytest.raises(UserError, match="more calibration tokens"):
    gptq.quantize(w, broken, Quant(INT4, (1, 16)))


@pytest.mark.parametrize(
  "name", ["int4", *(pytest.param(n, marks=SLOW) for n in ("int8", "float8_e4m3fn"))]
)
def test_loss_is_that_of_qwix(name):
  """Within 1 % of another implementation of the paper, and its margin over the nearest codes."""
  golden = json.loads((GOLDEN / "qwix.json").read_text())["loss"][name]
  format = formats.by_name(name.removeprefix("float8_").removesuffix("fn"))
  group, _ = write_qwix.CASES[name]
  w, x = write_qwix.case()
  quant = Quant(format, (1, group))
  loss = {}
  made = gptq.quantize(w, _moments(x), quant, write_qwix.DAMP)
  for method, one in (("gptq", made), ("nearest", _quantized(w, quant))):
    scale = np.float64(one.scale).repeat(group, 1)
    error = np.float64(w) - np.float64(np.asarray(one.data, np.float32)) * scale
    loss[method] = np.sum((np.float64(x) @ error.T) ** 2)
  assert loss["gptq"] == pytest.approx(golden["gptq"], rel=0.01)
  assert loss["nearest"] == pytest.approx(golden["nearest"], rel=0.01)
