"""Learned rounding: every weight goes up or down as the error of the layer's outputs wants it.

Source: SignRound of AutoRound (Cheng et al. 2023, arXiv:2309.05516 §3). It adds an offset in
[-1/2, 1/2] to the place of a weight between its two neighbours and moves it by the sign of the
gradient, straight through the rounding, with a rate that falls to 0 and adds up to 1/2. AdaRound
(arXiv:2004.10568) relaxes the choice and needs a penalty with a schedule of its own to end at whole
codes; here every step has codes, so that the best of them can be kept, row by row.

The loss is dw G dw^T of each row. Rows do not mix, scales stay those of plain rounding.
N is produced, K is contracted.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8jax.errors import UserError
from fp8jax.ptq import gptq
from fp8jax.ptq.moments import Moments, product
from fp8jax.quantization import quantize, rounding
from fp8jax.quantization.scaled_matrix import ScaledMatrix, per_element
from fp8jax.recipe.quant import Quant

# A loss counts as smaller by this share, beyond what float32 sums lose.
_LESS = np.float32(1 - 2.0**-14)


def problem(quant: Quant) -> str:
  """The reason why the codes of a weight cannot be learned; "" without any."""
  if not quant.format.is_stepped:
    return f"{quant.format} is logarithmic, and offsets are of even steps; take gptq()"
  return gptq.problem(quant)


def learn(w_NK, moments: Moments, quant: Quant, steps: int = 200) -> tuple[ScaledMatrix, jax.Array]:
  """The codes with the least loss that some steps came by, the nearest ones among them.

  Args:
    w_NK: float32, the weight.
    quant: any for which `problem` is "".
    steps: of the optimizer, from 1 to 10,000.

  Returns:
    (the matrix, float32 [steps + 1]: the loss of the best codes so far, first of the nearest).

  Raises:
    UserError: quant has a problem, or steps are out of range.
  """
  if reason := problem(quant):
    raise UserError(f"learned rounding to {quant}: {reason}")
  if not 1 <= steps <= 10_000:
    raise UserError(f"learned_rounding(steps={steps}): steps must be from 1 to 10,000")
  data, scale, losses = _learn(w_NK, moments, quant, steps)
  return ScaledMatrix(data, scale, quant.tile), losses


@functools.partial(jax.jit, static_argnames=("quant", "steps"))
def _learn(w_NK, moments: Moments, quant: Quant, steps: int):
  scale = quantize.scales(w_NK, quant)
  wide = per_element(scale, quant.tile, w_NK.shape)
  values = rounding.saturate(w_NK * (1.0 / wide), quant.format)
  unit, inverse = rounding.step(values, quant.format)
  below = jnp.floor(values * inverse)
  share = values * inverse - below
  # Beyond the largest there is no neighbour.
  below, above = below * unit, jnp.minimum((below + 1) * unit, np.float32(quant.format.max))
  gap_NK = (above - below) * wide
  optimizer = optax.sign_sgd(optax.linear_schedule(1.0 / steps, 0.0, steps))

  def loss_and_slope(codes):
    error = codes * wide - w_NK
    through = product(error, moments.gram_KK)
    return jnp.sum(through * error, axis=1), through * gap_NK

  nearest = rounding.nearest(values, quant.format)
  first, slope = loss_and_slope(nearest)
  offset = jnp.zeros_like(w_NK)

  def one(carry, _):
    best, least, slope, offset, state = carry
    moved, state = optimizer.update(slope, state, offset)
    offset = jnp.clip(offset + moved, -0.5, 0.5)
    codes = jnp.where(share + offset >= 0.5, above, below)
    loss, slope = loss_and_slope(codes)
    is_less = loss < least * _LESS
    best = jnp.where(is_less[:, None], codes, best)
    before, least = least, jnp.where(is_less, loss, least)
    # Summed in one place: another would add up in another order.
    return (best, least, slope, offset, state), jnp.sum(before)

  carry = (nearest, first, slope, offset, optimizer.init(offset))
  # Once more for the last sum: the rate is 0 there, and the codes are those of the step before.
  (best, *_), losses = jax.lax.scan(one, carry, length=steps + 1)
  return best.astype(quant.format.dtype), scale, losses
