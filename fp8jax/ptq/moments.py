"""Moments of the inputs of a linear layer, from which every method here computes.

The squared error of a layer's outputs, summed over the tokens, is a quadratic in the error dW of
its weight: sum_T |dW x|^2 = tr(dW G dW^T), G = sum_T x x^T. Methods therefore read no tokens.

N is a channel that a layer produces, K is one that it contracts, T is a token.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fp8jax.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
  """Sums over the tokens of a calibration.

  The Gram matrix has 4 K^2 bytes: 1.3 MB for 576 channels, 64 MB for 4,096, 1.4 GB for the 18,944
  of a wide feed-forward layer, of which GPTQ needs four copies at a time. Layers that share an
  input share their moments; layers one after the other need one set at a time.

  Attributes:
    count: int32, tokens.
    gram_KK: float32, sum of x x^T.
    sum_K: float32, sum of x.
    abs_sum_K: float32, sum of |x|.
    amax_K: float32, largest |x|.
  """

  count: jax.Array
  gram_KK: jax.Array
  sum_K: jax.Array
  abs_sum_K: jax.Array
  amax_K: jax.Array

  def scaled(self, factor_K) -> "Moments":
    """The moments of x * factor: of inputs into whose maker 1 / scales were folded."""
    size_K = jnp.abs(factor_K)
    return Moments(
      self.count, self.gram_KK * factor_K[:, None] * factor_K, self.sum_K * factor_K,
      self.abs_sum_K * size_K, self.amax_K * size_K,
    )  # fmt: skip

  def errors(self, dw_NK):
    """float32 [N]: the squared error of every output, dw G dw^T, summed over the tokens."""
    return jnp.sum(product(dw_NK, self.gram_KK) * dw_NK, axis=1)

  def check(self, site: str):
    """Refuses moments of no token, or of activations that are not finite.

    Raises:
      UserError: with the reason.
    """
    if not int(self.count):
      raise UserError(f"{site}: the calibration has no token; give it text")
    if not bool(jnp.isfinite(jnp.sum(self.gram_KK))):
      raise UserError(
        f"{site}: its inputs, or their squares, are NaN or infinite on the calibration text; "
        "evaluate the unquantized model first (--job=evaluate)"
      )


def product(a, b, axes: tuple[int, int] = (1, 0)):
  """float32 a . b over these axes of a and b, added in float32 on every device."""
  dims = ((axes[:1], axes[1:]), ((), ()))
  precision = jax.lax.Precision.HIGHEST
  return jax.lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)


@jax.jit
def of(x_TK, mask_T=None) -> Moments:
  """The moments of one batch.

  Args:
    x_TK: inputs, any float dtype.
    mask_T: bool, the tokens that count; None: all. Others, padding, may hold anything.
  """
  x_TK = x_TK.astype(jnp.float32)
  count = jnp.int32(x_TK.shape[0])
  if mask_T is not None:
    x_TK = jnp.where(mask_T[:, None], x_TK, 0.0)
    count = jnp.sum(mask_T, dtype=jnp.int32)
  size_TK = jnp.abs(x_TK)
  return Moments(
    count, product(x_TK, x_TK, (0, 0)), jnp.sum(x_TK, 0), jnp.sum(size_TK, 0),
    jnp.max(size_TK, 0, initial=0.0),
  )  # fmt: skip


@jax.jit
def combine(a: Moments, b: Moments) -> Moments:
  """The moments of both batches' tokens."""
  total = jax.tree.map(jnp.add, a, b)
  return dataclasses.replace(total, amax_K=jnp.maximum(a.amax_K, b.amax_K))
