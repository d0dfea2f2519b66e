"""Convolutions as products: JAX's convolution, our dot of patches by loops, and Flax layers."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from fp8jax.integrations import flax as fp8
from fp8jax.ops import site as site_lib
from fp8jax.ops.convolution import conv_general_dilated
from fp8jax.ops.dots import dot

# (shape, kernel, strides, padding, and what else lax takes), in Flax's order where none is given.
CONVOLUTIONS = {
  "1-D SAME": ((3, 17, 5), (4, 5, 7), (1,), "SAME", {}),
  "1-D VALID, strides": ((3, 17, 5), (4, 5, 7), (3,), "VALID", {}),
  "2-D SAME, strides": ((2, 11, 8, 6), (3, 2, 6, 5), (2, 3), "SAME", {}),
  "2-D pads, dilation": (
    (2, 11, 8, 6), (3, 2, 6, 5), (1, 2), ((2, 0), (-1, 3)), dict(rhs_dilation=(2, 3))
  ),
  "2-D of a dilated input": (
    (2, 5, 4, 6), (3, 3, 6, 5), (1, 1), ((2, 1), (0, 2)), dict(lhs_dilation=(2, 3))
  ),
  "2-D groups": ((2, 7, 8, 6), (3, 2, 2, 9), (2, 1), "SAME", dict(feature_group_count=3)),
  "2-D depthwise": ((2, 7, 8, 6), (3, 2, 1, 12), (1, 1), "SAME", dict(feature_group_count=6)),
  "3-D": ((2, 4, 5, 6, 3), (2, 3, 1, 3, 5), (1, 2, 1), "SAME", {}),
  "NCHW": ((2, 6, 8, 7), (5, 6, 3, 2), (2, 1), "SAME", dict(dimension_numbers=None)),
  "mixed order": (
    (7, 2, 6, 8), (6, 3, 5, 2), (1, 1), "VALID", dict(dimension_numbers=("HNCW", "IHOW", "WHCN"))
  ),
}  # fmt: skip
FLAX_ORDER = {3: ("NWC", "WIO", "NWC"), 4: ("NHWC", "HWIO", "NHWC"), 5: ("NDHWC", "DHWIO", "NDHWC")}


def _case(name, rng):
  shape, kernel, strides, padding, rest = CONVOLUTIONS[name]
  rest = {"dimension_numbers": FLAX_ORDER[len(shape)], **rest}
  x, w = (rng.standard_normal(s).astype(np.float32) for s in (shape, kernel))
  return x, w, (strides, padding), rest


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_without_quantization_it_is_jax_convolution(rng, name):
  """Values and both gradients, in float32."""
  x, w, args, rest = _case(name, rng)
  ours = functools.partial(conv_general_dilated, recipe="bf16", **rest)
  theirs = functools.partial(lax.conv_general_dilated, precision="highest", **rest)

  @functools.partial(jax.jit, static_argnums=0)
  def run(convolve, x, w):
    y, pull = jax.vjp(lambda x, w: convolve(x, w, *args), x, w)
    g = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    return y, *pull(g)

  for got, want in zip(run(ours, x, w), run(theirs, x, w), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["block_128", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_with_a_recipe_it_is_dot_of_patches_in_the_kernels_order(rng, recipe):
  """Patches by loops over NumPy arrays, 20 channels of 9 places: 180 contracted in one order."""
  x = rng.standard_normal((2, 9, 7, 20)).astype(np.float32) * np.float32(2.0) ** np.arange(-9, 11)
  w = rng.standard_normal((3, 3, 20, 24)).astype(np.float32)
  padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  rows = [
    [padded[n, i + a, j + b, c] for a in range(3) for b in range(3) for c in range(20)]
    for n, i, j in itertools.product(range(2), range(0, 9, 2), range(0, 7, 2))
  ]
  g = rng.standard_normal((2, 5, 4, 24)).astype(np.float32)

  @functools.partial(jax.jit, static_argnums=0)
  def run(product, x, w):
    y, pull = jax.vjp(product, x, w)
    return y, *pull(g.reshape(y.shape))

  want = run(lambda x, w: dot("TK,KF->TF", x, w, recipe), np.float32(rows), w.reshape(180, 24))
  y, dx, dw = run(
    lambda x, w: conv_general_dilated(
      x, w, (2, 2), "SAME", dimension_numbers=FLAX_ORDER[4], recipe=recipe
    ),
    x, w,
  )  # fmt: skip
  np.testing.assert_array_equal(np.reshape(y, (-1, 24)), want[0])
  np.testing.assert_array_equal(np.reshape(dw, (180, 24)), want[2])
  sums = np.zeros(padded.shape)
  places = itertools.product(range(2), range(0, 9, 2), range(0, 7, 2))
  for (n, i, j), of in zip(places, np.float64(want[1]).reshape(-1, 3, 3, 20)):
    sums[n, i : i + 3, j : j + 3] += of
  np.testing.assert_allclose(dx, sums[:, 1:-1, 1:-1], rtol=1e-5, atol=1e-5)
  exact = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=FLAX_ORDER[4])
  error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
  assert 1e-3 < error < 0.07  # it did run narrow


def test_gradients_of_bfloat16_sum_in_float32_and_an_infinity_stays_where_it_is():
  """25 times 1.0 and once 256: in bfloat16 the ones would be lost one after the other."""
  x = jnp.ones((1, 9, 9, 1), jnp.bfloat16)
  w = np.ones((5, 5, 1, 1), np.float32)
  w[0, 0] = 512
  run = functools.partial(
    conv_general_dilated, window_strides=(1, 1), padding="SAME", recipe="bf16",
    dimension_numbers=FLAX_ORDER[4],
  )  # fmt: skip
  dx = jax.jit(jax.grad(lambda x: run(x, w).astype(jnp.float32).sum()))(x)
  assert dx.dtype == jnp.bfloat16 and dx[0, 4, 4, 0] == 536
  x = np.ones(x.shape, np.float32)
  x[0, 0, 0, 0] = np.inf
  y = jax.jit(run)(x, w)
  assert np.sum(~np.isfinite(y)) == 9 and not np.any(np.isnan(y))


def _linen(recipe, **how):
  hook = {"conv_general_dilated_cls": fp8.linen_conv(recipe)} if recipe else {}
  return nn.Conv(24, (3, 3), **how, **hook)


@pytest.mark.parametrize(
  "how",
  [dict(strides=2), dict(padding="CIRCULAR"), dict(kernel_dilation=2), dict(padding=(1, (0, 2)))],
  ids=str,
)
def test_layers_of_flax_take_it(rng, how):
  """Linen and NNX, several batch dimensions or none; the same parameters as a plain layer."""
  x = rng.standard_normal((2, 3, 9, 8, 16)).astype(np.float32)
  plain = _linen(None, **how)
  want, variables = jax.jit(plain.init_with_output)(jax.random.key(0), x)
  wide = _linen("bf16", **how).apply
  got, one = jax.jit(lambda variables, x: (wide(variables, x), wide(variables, x[0, 0])))(
    variables, x
  )
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(one, want[0, 0], rtol=1e-5, atol=1e-5)
  narrow = _linen("block_128", **how)
  assert list(jax.eval_shape(narrow.init, jax.random.key(0), x)) == ["params"]
  layer = nnx.Conv(
    16, 24, (3, 3), **how, rngs=nnx.Rngs(0), conv_general_dilated=fp8.nnx_conv("block_128")
  )
  for name, value in variables["params"].items():
    getattr(layer, name)[...] = value
  y = jax.jit(narrow.apply)(variables, x)
  np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(layer, x), y)
  assert 1e-3 < np.linalg.norm(y - want) / np.linalg.norm(want) < 0.07


def test_a_convolution_remembers_the_amaxes_of_its_tensors(rng):
  x = rng.standard_normal((2, 9, 8, 16)).astype(np.float32)
  model = _linen("tensor_delayed", use_bias=False)
  variables = jax.jit(model.init)(jax.random.key(0), x)
  loss = lambda sites: 3 * model.apply(variables | {"fp8": sites}, x).sum()  # noqa: E731
  sites = site_lib.calibrate(variables["fp8"], loss)
  (site,) = jax.tree.leaves(sites, is_leaf=lambda s: isinstance(s, site_lib.Site))
  kernel = np.abs(variables["params"]["kernel"]).max()
  np.testing.assert_array_equal(site.scaling_state.amax_3, [np.abs(x).max(), kernel, 3])


@pytest.mark.parametrize(
  "run,words",
  [
    (lambda x: _linen("block_128", precision="highest").init(jax.random.key(0), x), "precision="),
    (
      lambda x: nn.Conv(8, (3, 3), conv_general_dilated=fp8.linen_conv("block_128")).init(
        jax.random.key(0), x
      ),
      "give it as conv_general_dilated_cls=, not as conv_general_dilated=",
    ),
    (
      lambda x: nn.ConvLocal(8, (3, 3), conv_general_dilated_cls=fp8.linen_conv("bf16")).init(
        jax.random.key(0), x
      ),
      "ConvLocal asks its hook for a shape",
    ),
    (
      lambda x: _linen("bf16", input_dilation=2).init(jax.random.key(0), x),
      "padding='SAME' with lhs_dilation=.2, 2.: give pairs",
    ),
    (
      lambda x: conv_general_dilated(
        x, np.ones((3, 3, 16, 4), np.float32), (1, 1), "SAME", batch_group_count=2, recipe="bf16"
      ),
      "batch_group_count=2",
    ),
    (
      lambda x: conv_general_dilated(
        x, np.ones((3, 3, 7, 4), np.float32), (1, 1), "SAME", recipe="bf16", feature_group_count=2,
        dimension_numbers=FLAX_ORDER[4],
      ),
      "feature_group_count=2: 16 features, a kernel of 7 inputs and 4 outputs",
    ),
    (
      lambda x: nn.Conv(
        8, (12, 3), padding="VALID", conv_general_dilated_cls=fp8.linen_conv("bf16")
      ).init(jax.random.key(0), x),
      "windows of .12, 3. elements do not fit into a padded input of .9, 8.",
    ),
  ],
)  # fmt: skip
def test_what_it_does_not_do_is_refused_by_name(run, words):
  with pytest.raises((TypeError, ValueError), match=words):
    run(np.ones((2, 9, 8, 16), np.float32))
