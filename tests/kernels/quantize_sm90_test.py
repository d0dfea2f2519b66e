"""The Hopper quantizer, interpreted on CPU, against quant/quantize to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.kernels import choose
from fp8jax.kernels.quantize import mosaic_sm90
from fp8jax.quantization import quantize, tensor_stats
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.recipe import library
from fp8jax.recipe.gemm import PASSES

pytestmark = pytest.mark.usefixtures("interpreted")
BLOCK, POW2, HYBRID = (
  library.RECIPES[name] for name in ("block_128", "block_128_pow2", "block_128_hybrid")
)
TENSOR, DELAYED = library.RECIPES["tensor_current"], library.RECIPES["tensor_delayed"]
# An activation: forward and weight gradient; a gradient: data and weight gradient; a weight.
PAIRS = {
  "activation": {1: BLOCK.fwd.lhs, 0: BLOCK.wgrad.lhs},
  "activation pow2": {1: POW2.fwd.lhs, 0: POW2.wgrad.lhs},
  "gradient hybrid": {1: HYBRID.dgrad.lhs, 0: HYBRID.wgrad.rhs},
  "weight": {1: BLOCK.fwd.rhs, 0: BLOCK.dgrad.rhs},
  "weight pow2": {1: POW2.fwd.rhs, 0: POW2.dgrad.rhs},
  "tensor": {1: TENSOR.fwd.lhs, 0: TENSOR.wgrad.rhs},
  "tensor and tiles": {1: TENSOR.fwd.lhs, 0: POW2.wgrad.lhs},
}


def _matrix(rng, dtype, rows=208, columns=272):
  """Magnitudes that vary by tile; zeros, NaN, infinity, subnormal and huge numbers."""
  x = rng.standard_normal((rows, columns))
  x *= np.exp(2 * rng.standard_normal((-(-rows // 16), 1))).repeat(16, 0)[:rows]
  x[:, :128][3:5] = 0
  x[7, 200], x[9, 3], x[130, 140] = np.nan, np.inf, -np.inf
  x[20:24] *= 1e-40
  x[30] *= 1e35
  x[128:, :128] = 0
  return jnp.asarray(x, dtype)


def _wanted(x, quants, amax=None):
  """{axis that is contracted: what quant/quantize makes}."""
  run = lambda x, amax: {  # noqa: E731
    along: quantize.quantize(x, quant, contraction=along, amax=amax)
    for along, quant in quants.items()
  }
  return jax.jit(run)(x, amax)


def _same_bits(got, want):
  """All bits, but for those of NaN, of which E5M2 has several."""
  got, want = np.asarray(got), np.asarray(want)
  width = {1: np.uint8, 4: np.uint32}[want.dtype.itemsize]
  is_nan = np.isnan(want.astype(np.float32))
  np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), is_nan)
  np.testing.assert_array_equal(got.view(width)[~is_nan], want.view(width)[~is_nan])


# One direction alone is part of both. Scales are computed in float32, whichever dtype is read.
@pytest.mark.parametrize(
  "name, which, dtype",
  [
    pytest.param(
      n, w, dtype, id=f"{n}-{w}-{kind}",
      marks=[pytest.mark.slow] * (
        w != (1, 0) or n == "weight pow2" or (kind == "f32" and n != "weight")
      ),
    )
    for n in PAIRS
    for w in ((1,), (0,), (1, 0))
    for kind, dtype in (("bf16", jnp.bfloat16), ("f32", jnp.float32))
  ],
)  # fmt: skip
def test_kernel_is_the_quantizer(rng, name, which, dtype):
  x, quants = _matrix(rng, dtype), {along: PAIRS[name][along] for along in which}
  assert all(mosaic_sm90.supports(x, q, along) is None for along, q in quants.items())
  made, _ = mosaic_sm90.quantize_matrix(x, quants)
  for along, want in _wanted(x, quants).items():
    assert made[along].tile == want.tile
    _same_bits(made[along].scale, want.scale)
    _same_bits(made[along].data, want.data)


@pytest.mark.parametrize("amax", [3.0, 0.0, np.inf])
def test_a_scale_that_is_not_xs_own(rng, amax):
  """Delayed: larger values saturate."""
  x, quants = _matrix(rng, jnp.bfloat16), {1: DELAYED.fwd.lhs, 0: DELAYED.wgrad.rhs}
  amax = jnp.float32(amax)
  made, seen = mosaic_sm90.quantize_matrix(x, quants, amax=amax, watched=True)
  _same_bits(seen, jax.jit(tensor_stats.amax)(x))
  for along, want in _wanted(x, quants, amax).items():
    _same_bits(made[along].scale, want.scale)
    _same_bits(made[along].data, want.data)


@pytest.mark.parametrize("name, rows, columns", [("activation", 131, 201), ("weight", 133, 210)])
def test_sizes_are_anything(rng, name, rows, columns):
  """Padded operands and results: the unpadded matrix, its scales and its amax to the bit."""
  x = _matrix(rng, jnp.bfloat16, rows, columns)
  made, seen = mosaic_sm90.quantize_matrix(x, PAIRS[name], watched=True)
  _same_bits(seen, jax.jit(tensor_stats.amax)(x))
  for along, want in _wanted(x, PAIRS[name]).items():
    _same_bits(made[along].data, want.data)
    _same_bits(made[along].scale, want.scale)


@pytest.mark.parametrize(
  "name, dtype, columns",
  [
    ("weight", jnp.float32, 288),
    pytest.param("weight pow2", jnp.bfloat16, 210, marks=pytest.mark.slow),
  ],
)
def test_a_layer_is_read_in_its_stack(rng, name, dtype, columns):
  """And, where TMA cannot move it as it is, copied out: 210 columns of 16 bits."""
  # Beyond the rows of the first, which end within a tile, comes the second.
  stack = jnp.stack([_matrix(rng, dtype, 208, columns), jnp.full((208, columns), -7, dtype)])
  read = lambda i: mosaic_sm90.quantize_matrix(Entry(stack, i), PAIRS[name], watched=True)  # noqa: E731
  (kernel,) = _kernels(jax.make_jaxpr(read)(1).jaxpr)
  assert kernel.invars[0].aval.shape == (stack.shape if columns == 288 else (208, 256))
  made, seen = read(jnp.int32(0))
  _same_bits(seen, jax.jit(tensor_stats.amax)(stack[0]))
  for along, want in _wanted(stack[0], PAIRS[name]).items():
    _same_bits(made[along].data, want.data)
    _same_bits(made[along].scale, want.scale)
  of_trials = jax.vmap(lambda i: (read(i)[0][1].scale, read(i)[1]))(jnp.arange(2))
  _same_bits(of_trials[0][0], made[1].scale)
  assert (of_trials[0][1] == of_trials[0][1, 0, 0]).all() and of_trials[1][1] == 7


@pytest.mark.parametrize("dtype, columns", [
  (jnp.bfloat16, 210), pytest.param(jnp.float32, 288, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_stack_is_quantized_by_one_kernel(rng, dtype, columns):
  """To the bits of each matrix, beside matrices of other magnitudes; also of padded sizes."""
  stack = jnp.stack([_matrix(rng, dtype, 133, columns) * 8**n for n in range(3)])
  stack = stack.at[0].set(jnp.where(jnp.isfinite(stack[0]), stack[0], 1))  # the others have NaN
  quants = PAIRS["weight pow2"]
  make = lambda x: mosaic_sm90.quantize_stack(x, quants)  # noqa: E731
  assert len(list(_kernels(jax.make_jaxpr(make)(stack).jaxpr))) == 1
  made, seen = make(stack)
  for n, x in enumerate(stack):
    _same_bits(seen[n], jax.jit(tensor_stats.amax)(x))
    for along, want in _wanted(x, quants).items():
      _same_bits(made[along].data[n], want.data)
      _same_bits(made[along].scale[n], want.scale)
  assert np.isnan(seen).tolist() == [False, True, True]
  _, of_trials = jax.vmap(make)(jnp.stack([stack, stack[::-1]]))
  _same_bits(of_trials, jnp.stack([seen, seen[::-1]]))
  for quant, said in ((library.RECIPES["tensor_current"].fwd.rhs, "one scale per matrix"),
                      (library.RECIPES["mxfp8"].fwd.rhs, "in tiles of")):  # fmt: skip
    with pytest.raises(ValueError, match=said):
      mosaic_sm90.quantize_stack(stack, {1: quant})


def test_an_amax_is_one_maximum_of_bits():
  x = np.float32([[0, 3.5, 1e-40], [2, 1e30, 0.1]])
  for largest in (1e30, np.inf, np.nan):
    x[1, 1] = largest
    found = tensor_stats.amax_of_magnitudes(jnp.asarray(x))
    np.testing.assert_array_equal(found, np.float32(largest))
  assert tensor_stats.amax_of_magnitudes(jnp.zeros((2, 2))) == 0


def _kernels(jaxpr):
  """Calls of kernels, however deep."""
  for eqn in jaxpr.eqns:
    if "mpmd_map" in eqn.primitive.name:
      yield eqn
    for inner in eqn.params.values():
      if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
        yield from _kernels(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("rows, columns", [(131, 201), (8200, 1536), (2048, 576)])
def test_a_line_has_room_for_its_last_tile(rows, columns):
  """TMA stores 128 scales of every tile and clips none of them but at the end of all lines."""
  x = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
  make = lambda x: mosaic_sm90.quantize_matrix(x, PAIRS["activation"], watched=True)  # noqa: E731
  (kernel,) = _kernels(jax.make_jaxpr(make)(x).jaxpr)
  lines = [v.aval.shape for v in kernel.outvars if v.aval.dtype == jnp.float32]
  tiles = lambda n: -(-n // 128)  # noqa: E731
  scales = [(tiles(columns), 128 * tiles(rows)), (tiles(rows), 128 * tiles(columns))]
  assert sorted(lines) == sorted([*scales, scales[0]])  # the first direction has amaxes, too


def test_quantizer_names_why_it_refuses_a_matrix():
  x = jnp.zeros((128, 128), jnp.bfloat16)
  reasons = {
    "matrix": (jnp.zeros((2, 128, 128), jnp.bfloat16), BLOCK.fwd.lhs, 1),
    "not float16": (x.astype(jnp.float16), BLOCK.fwd.lhs, 1),
    "tiles of 1x128": (x, library.RECIPES["mxfp8"].fwd.lhs, 1),
    "8-bit": (x, library.RECIPES["nvfp4"].fwd.lhs, 1),
  }
  for part, case in reasons.items():
    assert part in (mosaic_sm90.supports(*case) or ""), part
    choice = choose.quantizer(*case, "mosaic_sm90")
    assert choice.backend == "xla" and part in choice.notes[0]
  known = (x, BLOCK.fwd.lhs, 1)
  assert choose.quantizer(*known, "xla_sm90") == choose.Choice("mosaic_sm90")
  assert choose.quantizer(*known, "reference").backend == "xla"
  with pytest.raises(ValueError, match="not float16"):
    mosaic_sm90.quantize_matrix(x.astype(jnp.float16), {1: BLOCK.fwd.lhs})
  for name in ("block_128", "block_128_pow2", "block_128_hybrid"):
    gemms = (getattr(library.RECIPES[name], p) for p in PASSES)
    assert all(
      mosaic_sm90.supports(x, q, along) is None
      for gemm in gemms for q in (gemm.lhs, gemm.rhs) for along in (0, 1)
    )  # fmt: skip
