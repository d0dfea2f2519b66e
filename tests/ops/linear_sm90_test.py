"""The dot by its Hopper kernels, interpreted: what it computes, and how often it reads x and g."""

import collections
import dataclasses

import harness
import jax
import numpy as np
import pytest
import variants
from lattice import lattice

from fp8jax.models import mixer
from fp8jax.ops import site as site_lib
from fp8jax.ops import stored_params, weight_operands
from fp8jax.ops.dots import dots
from fp8jax.quantization import bf16_remainder, tensor_stats
from fp8jax.recipe import library

pytestmark = pytest.mark.usefixtures("interpreted")
EQUATIONS = [
  ("BLD,DF->BLF", dict(B=2, L=64, D=256, F=384)),
  ("BLD,DHK->BLHK", dict(B=1, L=128, D=128, H=4, K=32)),
  ("BLHK,HKD->BLD", dict(B=2, L=128, H=4, K=32, D=384)),
]
RECIPES = ["block_128", "block_128_hybrid", "block_128_pow2 saved"]
TENSOR = ["tensor_current", "tensor_delayed saved"]


def _gemms(eqn, operands, recipe, backend, products=1):
  """Results of all three GEMMs of `products` dots of one x."""
  x, w, g = operands
  site = variants.single(recipe)
  site = dataclasses.replace(site, backends=(backend,) * 3)

  def run(x, w, g):
    # A site of its own for each.
    sites = [dataclasses.replace(site, name=str(n)) for n in range(products)]
    ws = [w] * products
    ys, pull = jax.vjp(lambda x, ws: dots((eqn,) * products, x, ws, sites), x, ws)
    return ys, *pull((g,) * products)

  return run, (x, w, g)


@pytest.mark.parametrize(
  "recipe, eqn, sizes",
  [(TENSOR[0], *EQUATIONS[0])]
  + [
    pytest.param(r, *EQUATIONS[0], marks=pytest.mark.slow)
    for r in (RECIPES[0], RECIPES[2], TENSOR[1])
  ]
  + [("block_128_hybrid", *EQUATIONS[2])]
  + [pytest.param("block_128_hybrid", *EQUATIONS[1], marks=pytest.mark.slow)],
)
def test_dot_by_kernels_is_the_references(rng, recipe, eqn, sizes):
  operands = [lattice(rng, *(sizes[c] for c in t)) for t in eqn.replace("->", ",").split(",")]
  found = []
  for backend in ("xla_sm90" if recipe in TENSOR else "mosaic_sm90", "reference"):
    run, args = _gemms(eqn, operands, recipe, backend)
    found.append(jax.tree.leaves(jax.jit(run)(*args)))
  for got, want in zip(*found, strict=True):
    np.testing.assert_array_equal(got, want)


def _copies(jaxpr, shape) -> list[str]:
  """dtypes to which arrays of a shape are converted outside of kernels."""
  dtypes = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.shape == shape:
      dtypes.append(str(eqn.params["new_dtype"]))
    if "mpmd_map" not in eqn.primitive.name:
      for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
        if hasattr(inner, "eqns"):
          dtypes += _copies(getattr(inner, "jaxpr", inner), shape)
  return dtypes


@pytest.mark.parametrize(
  "recipe", ["block_128", pytest.param("tensor_current", marks=pytest.mark.slow)]
)
def test_a_16_bit_weight_is_read_as_it_lies(rng, recipe):
  """XLA would write a float32 copy for the quantizer's kernel. The gradient is float32."""
  eqn, sizes = EQUATIONS[0]
  x, w, g = (lattice(rng, *(sizes[c] for c in t)) for t in eqn.replace("->", ",").split(","))
  stored = bf16_remainder.split(jax.numpy.asarray(w))  # the lattice is of BF16's numbers
  weight = stored_params.Weight(stored, stored_params.grad_placeholder(stored, None, 0), None)
  backend = "xla_sm90" if recipe == "tensor_current" else "mosaic_sm90"
  run, args = _gemms(eqn, (x, weight, g), recipe, backend)
  assert _copies(jax.make_jaxpr(run)(*args).jaxpr, w.shape) == []
  (y,), dx, (dw,) = jax.jit(run)(*args)
  run, args = _gemms(eqn, (x, w, g), recipe, "reference")
  (y_want,), dx_want, (dw_want,) = jax.jit(run)(*args)
  assert dw.placeholder.dtype == np.float32
  for got, want in ((y, y_want), (dx, dx_want), (dw.placeholder, dw_want)):
    np.testing.assert_array_equal(got, want)


def _kernels(jaxpr) -> collections.Counter:
  """How often a program calls each kernel."""
  found = collections.Counter()
  for eqn in jaxpr.eqns:
    if "mpmd_map" in eqn.primitive.name:
      found[str(eqn.params["name"])] += 1
      continue
    for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
      if hasattr(inner, "eqns"):
        found += _kernels(getattr(inner, "jaxpr", inner))
  return found


@pytest.mark.parametrize("recipe", ["block_128", "block_128 saved"])
def test_x_and_g_are_read_once(rng, recipe):
  """Three weights on one input, like q, k and v."""
  eqn, sizes = EQUATIONS[0]
  operands = [lattice(rng, *(sizes[c] for c in t)) for t in eqn.replace("->", ",").split(",")]
  run, args = _gemms(eqn, operands, recipe, "mosaic_sm90", products=3)
  # Every g once for two products, every w once in each direction; x once for three products, and
  # once more in the backward pass unless its operand there was made in the forward pass.
  times = 3 + 6 + (1 if recipe == "block_128 saved" else 2)
  found = _kernels(jax.make_jaxpr(run)(*args).jaxpr)
  assert found == {"quantize_fp8": times, "scaled_matmul": 9}


# Other statistics are of operands that are made once more; where y has the letters of w in another
# order, the data gradient takes another matrix, quantized by itself.
@pytest.mark.parametrize("eqn, sizes, is_split, width, kernels", [
  (*EQUATIONS[2], True, tensor_stats.QUIET, 1),
  pytest.param(*EQUATIONS[0], False, tensor_stats.LOUD, 2, marks=pytest.mark.slow),
  pytest.param("BLD,DHK->BLKH", EQUATIONS[1][1], False, tensor_stats.QUIET, 2,
               marks=pytest.mark.slow),
])  # fmt: skip
def test_weights_ahead_of_their_products_are_read_once(rng, eqn, sizes, is_split, width, kernels):
  """One kernel makes both operands and the amaxes of all layers."""
  letters = eqn.replace("->", ",").split(",")[1]
  w = rng.standard_normal((2, *(sizes[c] for c in letters)), np.float32)
  w[1].flat[7] = -31
  stack = jax.numpy.asarray(w)
  if is_split:
    w = np.asarray(stack.astype(jax.numpy.bfloat16).astype(np.float32))
    stack = bf16_remainder.split(jax.numpy.asarray(w))
  found = {}
  for backend in ("mosaic_sm90", "reference"):
    recipe = library.RECIPES["block_128_pow2"]
    own = site_lib.fresh(recipe, "w", (0, 2), statistics=width, backends=(backend,) * 3)

    def make(stack, own=own):
      declared = [mixer.GemmSite("w", eqn, "x")]
      tokens = {"B": 4, "L": 64}
      return weight_operands.of_block(declared, {"w": stack}, {"w": own}, tokens, np.float32)["w"]

    found[backend] = jax.device_get(jax.jit(make)(stack))
    called = _kernels(jax.make_jaxpr(make)(stack).jaxpr)
    assert called == ({"quantize_fp8": kernels} if backend == "mosaic_sm90" else {})
  harness.assert_trees_equal(*found.values())
  amaxes = np.abs(w).reshape(2, -1).max(1)
  np.testing.assert_array_equal(found["mosaic_sm90"].stats[:, 0], amaxes)
  assert found["mosaic_sm90"].stats.shape == (2, width)


def _sums_outside(jaxpr, *shapes) -> int:
  """Additions of arrays of these shapes outside of kernels."""
  count = 0
  for eqn in jaxpr.eqns:
    count += eqn.primitive.name in ("add", "add_any") and eqn.outvars[0].aval.shape in shapes
    if "mpmd_map" not in eqn.primitive.name:
      for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
        count += (
          _sums_outside(getattr(inner, "jaxpr", inner), *shapes) if hasattr(inner, "eqns") else 0
        )
  return count


@pytest.mark.parametrize(
  "backend", [pytest.param("mosaic_sm90", marks=pytest.mark.slow), "reference"]
)
def test_gradients_of_one_input_add_up_where_they_are_made(rng, backend):
  """q, k and v: the kernel adds to the last product's, others are added by XLA."""
  eqn, sizes = EQUATIONS[0]
  x, w, g = (lattice(rng, *(sizes[c] for c in t)) for t in eqn.replace("->", ",").split(","))
  run, args = _gemms(eqn, (x, w, g), "block_128", backend, products=3)
  dx = jax.jit(run)(*args)[1]
  np.testing.assert_array_equal(dx, 3 * np.einsum("BLF,DF->BLD", np.float64(g), np.float64(w)))
  sums = _sums_outside(jax.make_jaxpr(run)(*args).jaxpr, x.shape)
  assert sums == (0 if backend == "mosaic_sm90" else 2)


@pytest.mark.parametrize("backend", ["mosaic_sm90", "reference"])
@pytest.mark.parametrize(
  "eqn, sizes", [EQUATIONS[0], pytest.param(*EQUATIONS[2], marks=pytest.mark.slow)]
)
def test_a_weight_s_gradient_is_added_to_its_layer_of_the_sums(rng, eqn, sizes, backend):
  """By the kernel where it lies, by XLA elsewhere; other layers stay as they were."""
  letters = eqn.replace("->", ",").split(",")
  x, w, g = (lattice(rng, *(sizes[c] for c in t)) for t in letters)
  sums = np.stack([lattice(rng, *w.shape) for _ in range(3)])
  weight = stored_params.Weight(w, jax.numpy.asarray(sums), None, layer=jax.numpy.int32(1))
  run, args = _gemms(eqn, (x, weight, g), "block_128", backend)
  got = jax.jit(run)(*args)[2][0].placeholder
  want = sums.astype(np.float64)
  want[1] += np.einsum(f"{letters[0]},{letters[2]}->{letters[1]}", np.float64(x), np.float64(g))
  np.testing.assert_array_equal(got, want)
  as_matrix = w.reshape(-1, w.shape[-1]).shape
  of_layers = _sums_outside(jax.make_jaxpr(run)(*args).jaxpr, w.shape, as_matrix)
  assert (of_layers == 0) == (backend == "mosaic_sm90")
