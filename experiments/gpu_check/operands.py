"""Operands that oracles can judge: lattices, of which FP8 is exact, and normal numbers."""

import numpy as np


def lattice(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
  """float32 integers up to 7, times powers of two that differ between tiles of 128x128.

  Every run of 16 along either axis, the last row and the last column hold a 7: every tile's amax is
  7 times a power of two, its scale 2^-6 times that power, and FP8 represents every element.
  """
  x = rng.integers(-7, 8, (rows, columns)).astype(np.float32)
  i, j = np.indices(x.shape)
  largest = (i + j) % 16 == 0
  largest[-1] = largest[:, -1] = True
  x[largest] = np.where(rng.random(largest.sum()) < 0.5, 7, -7)
  powers = 2.0 ** rng.integers(-2, 3, (-(-rows // 128), -(-columns // 128)))
  return (x * np.kron(powers, np.ones((128, 128)))[:rows, :columns]).astype(np.float32)


def normal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
  """float32 normal numbers that BF16 represents, with magnitudes that differ between rows and
  between groups of 128 columns: the scale of another tile gives another result."""
  x = rng.standard_normal((rows, columns), np.float32)
  x *= np.exp(rng.standard_normal((rows, 1), np.float32))
  x *= np.exp(np.sin(np.arange(columns) // 128, dtype=np.float32))
  return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


MAKERS = {"lattice": lattice, "normal": normal}


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """float64 A . B'."""
  return a.astype(np.float64) @ b.astype(np.float64).T


def concrete(tree, seed: int = 0):
  """Random arrays of abstract shapes, made on the device, for timing.

  FP8 matrices are as quantized normal numbers are: data up to E4M3's largest number, positive
  scales. Integers are 0.
  """
  import jax
  import jax.numpy as jnp

  from fp8jax.quantization import scaled_matrix

  def make(key, x):
    if isinstance(x, scaled_matrix.ScaledMatrix):
      data = jax.random.normal(key, x.data.shape, jnp.bfloat16).astype(jnp.float32)
      scale = jax.random.uniform(key, x.scale.shape, minval=2.0**-7, maxval=2.0**-6)
      data = jnp.clip(150 * data, -448, 448).astype(x.data.dtype)
      return scaled_matrix.ScaledMatrix(data, scale, x.tile)
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return jnp.zeros(x.shape, x.dtype)
    return jax.random.normal(key, x.shape, jnp.bfloat16).astype(x.dtype)

  leaves, structure = jax.tree.flatten(
    tree, is_leaf=lambda x: isinstance(x, scaled_matrix.ScaledMatrix)
  )
  keys = jax.random.split(jax.random.key(seed), max(1, len(leaves)))
  made = [jax.jit(lambda k, x=x: make(k, x))(k) for k, x in zip(keys, leaves)]
  return jax.tree.unflatten(structure, made)
