"""Moments of inputs against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.errors import UserError
from fp8jax.ptq import moments

EXACT = 1e-6  # of float32 sums of 48 products


def test_moments_are_sums_over_the_tokens_that_count(rng):
  """Two batches, padding of anything in one of them, scaled inputs, and a layer's squared error."""
  x = rng.standard_normal((48, 12)).astype(np.float32)
  padded = np.concatenate([x[20:], np.full((4, 12), np.nan, np.float32)])
  mask = np.arange(32) < 28
  a, b = moments.of(jnp.asarray(x[:20], jnp.float32)), moments.of(padded, mask)
  both = moments.combine(a, b)
  factor = np.float32(rng.uniform(-2, 2, 12))
  for made, wide in ((both, x), (both.scaled(factor), x * factor)):
    wide = wide.astype(np.float64)
    assert int(made.count) == 48
    expected = (wide.T @ wide, wide.sum(0), np.abs(wide).sum(0), np.abs(wide).max(0))
    for one, of in zip(jax.tree.leaves(made)[1:], expected, strict=True):
      np.testing.assert_allclose(one, of, rtol=EXACT, atol=EXACT * np.abs(of).max())
  dw = rng.standard_normal((5, 12)).astype(np.float32)
  outputs = np.float64(x) @ np.float64(dw).T
  np.testing.assert_allclose(both.errors(dw), (outputs**2).sum(0), rtol=1e-5)
  both.check("layers/0/mlp/up")
  with pytest.raises(UserError, match="layers/0/mlp/up: the calibration has no token"):
    moments.of(x, np.zeros(48, bool)).check("layers/0/mlp/up")
  with pytest.raises(UserError, match="NaN or infinite"):
    moments.of(padded).check("layers/0/mlp/up")
