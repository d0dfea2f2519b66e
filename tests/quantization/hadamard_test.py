"""The Hadamard rotation against Kronecker products in float64."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.linalg

from fp8jax.formats import E2M1, E4M3
from fp8jax.quantization import hadamard, quantize
from fp8jax.recipe.quant import Hadamard, Quant, Scale

SIZES = [2, 16, 32, 128]
rotated = jax.jit(hadamard.hadamard, static_argnums=(1, 2))
RECORDED = {2: "+-", 4: "---+", 8: "+++-----", 32: "-----+--+-+--++++-++-++-++-+-+-+"}


def matrix(size: int) -> np.ndarray:
  """float64 diag(signs) . H / sqrt(size): rows of it are what the unit vectors become."""
  h = np.ones((1, 1))
  while len(h) < size:
    h = np.kron([[1, 1], [1, -1]], h)
  return hadamard.signs(size)[:, None].astype(np.float64) * h / np.sqrt(size)


@pytest.mark.parametrize("size", SIZES)
def test_hadamard_is_its_matrix_in_every_block_of_either_axis(rng, size):
  x = rng.standard_normal((6, 3 * size)).astype(np.float32)
  want = (x.reshape(6, 3, size).astype(np.float64) @ matrix(size)).reshape(6, -1)
  got = rotated(x, size, 1)
  np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-20)
  flipped = rotated(x.T, size, 0)
  np.testing.assert_array_equal(flipped, np.asarray(got).T)


@pytest.mark.parametrize("size", [12, 20, 28, 24, 56, pytest.param(160, marks=pytest.mark.slow)])
def test_hadamards_of_other_orders_are_orthogonal_and_undone(rng, size):
  """n H is a matrix of ±1 with orthogonal rows, exactly: a Hadamard matrix by definition."""
  h = np.rint(np.sqrt(size) * np.asarray(rotated(np.eye(size, dtype=np.float32), size, 1)))
  assert set(np.unique(h)) == {-1, 1}
  np.testing.assert_array_equal(h @ h.T, size * np.eye(size))
  x = rng.standard_normal((3, 2 * size)).astype(np.float32)
  for how in (Hadamard(size), Hadamard(size, "none")):
    back = hadamard.rotate(hadamard.rotate(x, how, 1), how, 1, inverse=True)
    np.testing.assert_allclose(back, x, atol=2.0**-20)


_LAYERS = [(192, 576), (64, 576), (1792, 8960), (256, 8960), (256, 18944)]


@pytest.mark.parametrize(
  "size, width",
  [(512, 18944), (3584, 3584), *(pytest.param(*of, marks=pytest.mark.slow) for of in _LAYERS)],
)
def test_hadamards_of_layers_sizes_are_integer_matrices_over_a_root(rng, size, width):
  """Whole numbers, whose products with a matrix of ±1 are exact: then one rounding of the factor,
  or none. Sylvester's part is SciPy's; Paley's is checked above to be a Hadamard matrix."""
  order = 28 if size % 7 == 0 else 12 if size % 3 == 0 else 1
  h = np.kron(scipy.linalg.hadamard(size // order), hadamard.paley(order) if order > 1 else [[1]])
  h = h.astype(np.int64)
  signs = hadamard.signs(size).astype(np.int64)
  x = rng.integers(-9, 10, (2, width))
  blocks = x.reshape(2, -1, size) * signs @ h
  want = (blocks.astype(np.float32) * np.float32(1 / np.sqrt(size))).reshape(2, width)
  np.testing.assert_array_equal(rotated(x.astype(np.float32), size, 1), want)
  if width > size:
    with pytest.raises(ValueError, match=f"K={width} must be a multiple of Hadamard.size={2**11}"):
      rotated(x.astype(np.float32), 2**11, 1)


def test_the_rotation_that_fits_a_layers_size():
  """The largest block by definition: the width over its least odd factor that is no order."""
  for width, largest in ((576, 192), (1536, 1536), (3584, 3584), (8960, 1792), (18944, 512)):
    fits = []
    for size in (n for n in range(2, width + 1) if width % n == 0):
      try:
        Hadamard(size)
      except ValueError:
        continue
      fits.append(size)
    assert max(fits) == largest


@pytest.mark.parametrize("size", [4, 16])
def test_hadamard_is_orthogonal_exactly(size):
  """Powers of four: no rounding at all."""
  h = np.asarray(rotated(np.eye(size, dtype=np.float32), size, 1))
  np.testing.assert_array_equal(h @ h.T, np.eye(size))
  np.testing.assert_array_equal(h, matrix(size))


def test_hadamard_16_has_the_published_signs():
  want = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
  np.testing.assert_array_equal(hadamard.signs(16), want)


def test_hadamard_signs_are_recorded():
  """Another vector would be another recipe."""
  bits = {s: "".join("+" if v > 0 else "-" for v in hadamard.signs(s)) for s in (2, 4, 8, 32)}
  assert bits == RECORDED
  for size in SIZES[1:]:
    assert 0 < np.count_nonzero(hadamard.signs(size) > 0) < size


def test_hadamard_applies_signs_before_the_rotation():
  """Afterwards they would leave every magnitude as plain H gives it, and randomise nothing."""
  x = np.ones((1, 16), np.float32)
  plain = np.asarray([[4.0] + [0.0] * 15])  # ones . H / 4
  got = np.abs(np.asarray(rotated(x, 16, 1)))
  assert not np.array_equal(got, plain) and np.count_nonzero(got) > 8


def test_hadamard_refuses_a_contraction_it_does_not_divide():
  quant = Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32, transform=Hadamard(16))
  for axis, shape in ((0, (40, 32)), (1, (32, 40))):
    with pytest.raises(ValueError, match="K=40 .*Hadamard.size=16"):
      quantize.quantize(np.ones(shape, np.float32), quant, contraction=axis)


@pytest.mark.parametrize("contraction", [0, 1])
def test_quantize_rotates_along_the_contraction_before_the_amax(rng, contraction):
  x = rng.standard_normal((48, 64)).astype(np.float32)
  plain = Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32)
  rotated = dataclasses.replace(plain, transform=Hadamard(16))
  got = jax.jit(lambda x: quantize.quantize(x, rotated, contraction=contraction))(x)
  want = jax.jit(lambda x: quantize.quantize(hadamard.hadamard(x, 16, 1), plain))(
    x if contraction else x.T
  )
  np.testing.assert_array_equal(got.data, want.data)
  np.testing.assert_array_equal(got.scale, want.scale)


def test_products_do_not_change_under_the_rotation(rng):
  """Integers, so that the products are exact; the quantised ones are as close as without it."""
  a, b = rng.integers(-8, 9, (2, 32, 64)).astype(np.float32)
  ra, rb = (np.asarray(rotated(t, 16, 1)) for t in (a, b))
  np.testing.assert_array_equal(ra @ rb.T, a @ b.T)
  a[:, 7] *= 100  # a lone outlier per row is spread, so that its block keeps its precision
  quant = Quant(E4M3, (1, 16), Scale.POW2)
  errors = []
  for transform in (None, Hadamard(16)):
    make = dataclasses.replace(quant, transform=transform)
    quantized = jax.jit(lambda t, make=make: quantize.quantize(t, make).dequantize())
    qa, qb = (np.asarray(quantized(t), np.float64) for t in (a, b))
    errors.append(np.abs(qa @ qb.T - a.astype(np.float64) @ b.T).max())
  assert errors[1] < 2 * errors[0]
