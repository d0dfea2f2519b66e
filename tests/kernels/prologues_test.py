"""Norm and SwiGLU on the way into the quantizer: what is narrow is what would have been written."""

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest

from fp8jax.kernels.quantize import mosaic_sm90, prologues
from fp8jax.ops import elementwise
from fp8jax.quantization import quantize, tensor_stats
from fp8jax.recipe import library

pytestmark = pytest.mark.usefixtures("interpreted")
BLOCK, TENSOR = library.RECIPES["block_128_pow2"], library.RECIPES["tensor_current"]
ACTIVATION = {1: BLOCK.fwd.lhs, 0: BLOCK.wgrad.lhs}
ROWS, COLUMNS = kernel_cases.PROLOGUE


def _normal(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[0]))[:, None],
                     jnp.bfloat16)  # fmt: skip


def _check(made, wide, exact: bool):
  """ScaledMatrix operands against the quantized bfloat16 matrix `wide`.

  Not exact: where the last bit of an exponential differs, bfloat16 may round to its neighbour, and
  FP8 then, rarely, to its own.
  """
  for along, quant in ACTIVATION.items():
    want = jax.jit(lambda x, q=quant, c=along: quantize.quantize(x, q, contraction=c))(wide)
    got_data, want_data = (np.asarray(m.data, np.float32) for m in (made[along], want))
    differs = (got_data != want_data) | np.repeat(made[along].scale != want.scale, 128, 1)[
      :, : want_data.shape[1]
    ]
    assert np.mean(differs) <= (0 if exact else 2e-3)
    got, want = made[along].dequantize(), want.dequantize()
    step = np.abs(want) / 8 + np.asarray(want).max() * 2.0**-9
    assert np.all(np.abs(got - want) <= (0 if exact else step))


def test_norm_is_quantized_as_it_would_have_been_written(rng):
  x, weight = _normal(rng, ROWS, COLUMNS), jnp.asarray(rng.standard_normal(COLUMNS), jnp.float32)
  scale = jax.jit(lambda x: prologues.rms_scale(x, 1e-6))(x)
  (made,), (amax,) = mosaic_sm90.quantize_produced(
    prologues.RMS_NORM, (x,), (scale, weight), (ACTIVATION,), watched=True
  )
  wide = jax.jit(lambda x, w: elementwise.rms_norm(x, w, 1e-6))(x, weight)
  _check(made, wide, exact=True)
  np.testing.assert_array_equal(amax, tensor_stats.amax(wide))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_is_seen(rng, bad):
  """In the last, partial tile of the second of two results."""
  g, gate, up = (_normal(rng, ROWS, COLUMNS) for _ in range(3))
  gate = jnp.clip(gate, -4, 4).at[-1, -1].set(1)
  g = g.at[-1, -1].set(bad)
  made, amaxes = mosaic_sm90.quantize_produced(
    prologues.SWIGLU_BACKWARD, (g, gate, jnp.zeros_like(up)), (), ({0: ACTIVATION[0]},) * 2,
    watched=True,
  )  # fmt: skip
  np.testing.assert_array_equal(amaxes[1], np.float32(bad))
  assert np.all(np.isfinite(made[1][0].scale))


def test_swiglu_is_quantized_as_it_would_have_been_written(rng):
  gate, up = _normal(rng, ROWS, COLUMNS), _normal(rng, ROWS, COLUMNS)
  (made,), amaxes = mosaic_sm90.quantize_produced(prologues.SWIGLU, (gate, up), (), (ACTIVATION,))
  assert not amaxes
  _check(made, jax.jit(elementwise.silu_mul)(gate, up), exact=False)


def test_gradients_of_swiglu_are_quantized_as_they_would_have_been_written(rng):
  g, gate, up = (_normal(rng, ROWS, COLUMNS) for _ in range(3))
  made, _ = mosaic_sm90.quantize_produced(
    prologues.SWIGLU_BACKWARD, (g, gate, up), (), (ACTIVATION, ACTIVATION)
  )
  wanted = jax.jit(lambda g, *x: jax.vjp(elementwise.silu_mul, *x)[1](g))(g, gate, up)
  for one, want in zip(made, wanted, strict=True):
    _check(one, want, exact=False)


def test_prologues_refuse_operands_of_wrong_number_or_shape(rng):
  x = _normal(rng, ROWS, COLUMNS)
  run = mosaic_sm90.quantize_produced
  with pytest.raises(ValueError, match=r"swiglu got .* expected \(2, 0, 1\)"):
    run(prologues.SWIGLU, (x,), (), (ACTIVATION,))
  with pytest.raises(ValueError, match="all matrices alike"):
    run(prologues.SWIGLU, (x, x[:128]), (), (ACTIVATION,))
  with pytest.raises(ValueError, match="not one of the tensor"):
    run(prologues.SWIGLU, (x, x), (), ({1: TENSOR.fwd.lhs},))
  with pytest.raises(ValueError, match="not float16"):
    run(prologues.SWIGLU, (x.astype(jnp.float16),) * 2, (), (ACTIVATION,))
