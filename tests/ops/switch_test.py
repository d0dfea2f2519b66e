"""Switched quantization: exact at both ends, and its gradient per token against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.ops import cross_entropy, dots, site, switch

TOKENS, IN, OUT = 24, 256, 32


def _operands(seed=0):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((2, TOKENS // 2, IN)) * np.exp(rng.standard_normal(IN))
  return x.astype(np.float32), rng.standard_normal((IN, OUT)).astype(np.float32)


def _switched(recipe, numbers):
  return switch.with_switches(site.single(recipe), jnp.asarray(numbers, jnp.float32))


@jax.jit
def _y(x, w, one):
  return dots.dot("BLD,DF->BLF", x, w, one)


@pytest.mark.parametrize("recipe", ["block_128", "tensor_current", "rowwise", "mxfp8", "nvfp4"])
def test_switch_off_is_the_compute_dtype_and_on_the_recipe(recipe):
  x, w = _operands()
  plain, quantized = _y(x, w, site.single("bf16")), _y(x, w, site.single(recipe))
  # The same operands, their products summed in another order.
  budget = 2e-6 * np.abs(x).max() * np.abs(w).sum(0).max()
  np.testing.assert_allclose(_y(x, w, _switched(recipe, (0, 0))), plain, rtol=0, atol=budget)
  np.testing.assert_allclose(_y(x, w, _switched(recipe, (1, 1))), quantized, rtol=0, atol=budget)
  for numbers in ((1, 0), (0, 1)):  # each tensor has its own
    y = _y(x, w, _switched(recipe, numbers))
    assert np.abs(y - plain).max() > 10 * budget and np.abs(y - quantized).max() > 10 * budget


@pytest.mark.parametrize("recipe", ["block_128", "tensor_current"])
def test_switch_is_exact_at_both_ends_where_sums_are_exact(recipe):
  rng = np.random.default_rng(1)
  x, w = (rng.integers(-20, 21, shape).astype(np.float32) for shape in ((2, 4, IN), (IN, OUT)))
  x[..., ::128], w[::128] = 448, 448  # scales of 1; 17 and 19 are no codes, the others are
  off, on = (_y(x, w, _switched(recipe, numbers)) for numbers in ((0, 0), (1, 1)))
  np.testing.assert_array_equal(off, _y(x, w, site.single("bf16")))
  np.testing.assert_array_equal(off, np.einsum("bld,df->blf", x, w))
  np.testing.assert_array_equal(on, _y(x, w, site.single(recipe)))
  assert not np.array_equal(on, off)


def _block_error(t, rows, columns):
  """Rounding error of E4M3 with a float32 scale per block, in float64."""
  n, k = t.shape
  blocks = t.reshape(n // rows, rows, k // columns, columns).astype(np.float64)
  scale = np.abs(blocks).max((1, 3), keepdims=True) / 448
  codes = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
  return (codes * scale - blocks).reshape(n, k)


def test_gradient_of_switches_is_the_effect_of_every_tokens_error():
  x, w = _operands(2)
  w = np.tile(w, (1, 4))  # [256, 128]: whole tiles
  c = np.random.default_rng(3).standard_normal((2, TOKENS // 2, w.shape[1])).astype(np.float32)
  base = site.single("block_128")

  @jax.grad
  def gradient(numbers):
    y = dots.dot("BLD,DF->BLF", x, w, switch.with_switches(base, numbers))
    return jnp.sum(c * y)

  found = gradient(jnp.zeros((2, TOKENS)))
  flat, of_y = x.reshape(TOKENS, IN), c.reshape(TOKENS, -1).astype(np.float64)
  error_x, error_w = _block_error(flat, 1, 128), _block_error(w, 128, 128)
  wanted = ((error_x @ w) * of_y).sum(1), ((flat @ error_w) * of_y).sum(1)
  for ours, exact in zip(found, wanted, strict=True):
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-3 * np.abs(exact).max())


def test_operation_that_reads_no_switch_refuses_one():
  x, w = _operands()
  one = _switched("block_128", (0, 0))
  weights, targets = jnp.ones(x.shape[:2]), jnp.zeros(x.shape[:2], jnp.int32)
  with pytest.raises(ValueError, match="multiplies it reads none"):
    cross_entropy.cross_entropy(x, w, "BLD,DV->BLV", targets, weights, one, 4)
  with pytest.raises(ValueError, match="products without batch letters"):
    dots.dot("EBD,EDF->EBF", x, jnp.ones((2, IN, OUT)), one)
