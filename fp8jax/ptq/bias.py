"""Bias correction: the mean error that quantized weights make goes into the bias.

Source: Nagel et al. 2019 (arXiv:1906.04721) §4.2, with the measured mean of the inputs.
N is produced, K is contracted.
"""

import jax.numpy as jnp

from fp8jax.errors import UserError
from fp8jax.ptq.moments import Moments


def corrected(bias_N, w_NK, made_NK, moments: Moments, site: str):
  """float32 [N]: the bias with which the quantized layer's mean output is the layer's own.

  Args:
    bias_N: float32, the layer's, or None.
    w_NK, made_NK: float32, its weight and what the codes stand for.

  Raises:
    UserError: the layer has no bias.
  """
  if bias_N is None:
    raise UserError(
      f"bias correction of {site}: it has no bias to hold the correction, and a server would read "
      "none; leave bias_correction() out (of this model's family, Qwen2 has biases in q, k and v)"
    )
  mean_K = moments.sum_K / moments.count
  return bias_N + jnp.sum((w_NK - made_NK) * mean_K, axis=1)
