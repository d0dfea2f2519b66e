"""Kernels tried on the device at hand before a run trusts them: numbers whose products are exact.

A kernel is proven where it was written; drivers, compilers and chips differ. A second of work at
the start of a run tells a kernel that computes something else from one that trains.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.errors import UserError
from fp8jax.kernels import adam, scaled_matmul
from fp8jax.kernels.quantize import mosaic_sm90
from fp8jax.quant import packed, split
from fp8jax.recipe import Gemm, Quant

# Partial tiles along M and N, several tiles of both, more steps than the pipeline has stages.
_SIZES = (400, 272, 1024)


def hopper(gemm: Gemm, sizes: tuple[int, int, int] = _SIZES) -> None:
  """Multiplies with the Hopper quantizer and GEMM, and in float64 on the host.

  Args:
    gemm: a product that kernels.scaled_matmul.mosaic_sm90 supports.
    sizes: M, N, K.

  Raises:
    UserError: they differ; says where.
  """
  m, n, k = sizes
  a, b = _lattice(m, k), _lattice(n, k)

  lhs, rhs = cast(Quant, gemm.lhs), cast(Quant, gemm.rhs)

  @jax.jit
  def multiply(a, b):
    narrow_a = mosaic_sm90.quantize_matrix(a, {1: lhs})[1]
    # As the weight gradient has it: contraction first.
    narrow_b = mosaic_sm90.quantize_matrix(b.T, {0: rhs})[0]
    return scaled_matmul.scaled_matmul(
      narrow_a, narrow_b, accumulate=gemm.accumulate, backend="mosaic_sm90"
    )

  got = np.asarray(multiply(jnp.asarray(a, jnp.bfloat16), jnp.asarray(b)))
  want = np.inner(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
  what = f"mosaic_sm90 multiplies {gemm.lhs} by {gemm.rhs}"
  _refuse_if_wrong(got, want, what, "'reference', which is slow and correct")


def quantizer(gemm: Gemm, sizes: tuple[int, int] = _SIZES[:2]) -> None:
  """Makes a matrix narrow with the Hopper quantizer, one scale for all of it, in both orientations.

  Args:
    gemm: a product that kernels.scaled_matmul.xla_sm90 supports.
    sizes: rows, columns.

  Raises:
    UserError: what it stands for is another matrix; says where.
  """
  x = _lattice(*sizes)
  amax = jnp.float32(np.abs(x).max())
  for quant in (cast(Quant, gemm.lhs), cast(Quant, gemm.rhs)):
    make = jax.jit(lambda x, q=quant: mosaic_sm90.quantize_matrix(x, {1: q, 0: q}, amax))
    for along, made in make(jnp.asarray(x, jnp.bfloat16)).items():
      got, want = np.asarray(made.dequantize()), x if along == 1 else x.T
      _refuse_if_wrong(got, want, f"xla_sm90 makes {quant}", "'xla'")


def optimizer(
  mu: Quant | None, nu: Quant | None, *, is_pair: bool, dtype, sizes=(4999, 1024)
) -> None:
  """Updates a parameter with the Hopper kernel and by the definition.

  Args:
    mu, nu: how moments are kept; what kernels.adam.mosaic_sm90 supports.
    is_pair: whether the master is in two.
    dtype: of the gradient.
    sizes: of the parameter; the default has some tiles for each warpgroup of the device.

  Raises:
    UserError: they differ by more than the hardware's functions explain; says where.
  """
  rng = np.random.default_rng(0)
  size = 2.0 ** rng.integers(-20, 0, (sizes[0], 1))
  g, m, v, p = (jnp.asarray(size * rng.standard_normal(sizes), jnp.float32) for _ in range(4))
  kept = (packed.pack(x, q) if q else x for x, q in ((m, mu), (jnp.square(v), nu)))
  arrays = (g.astype(dtype), split.split(p) if is_pair else p, *kept)

  @functools.partial(jax.jit, static_argnums=1)
  def step(arrays, backend):
    by = dict(count=jnp.int32(3), rate=jnp.float32(0.25), b1=0.9, b2=0.95, eps=1e-8)
    master, *kept, squares = adam.update(*arrays, **by, weight_decay=0.1, backend=backend)
    kept = (x.unpack() if isinstance(x, packed.Packed) else x for x in kept)
    return split.wide(master) - split.wide(arrays[1]), *kept, squares

  got, want = (step(arrays, backend) for backend in ("mosaic_sm90", "reference"))
  for name, x, y in zip(("master", "mu", "nu", "squares"), got, want):
    # A code of E4M3 may be the next one: a hundredth of its group. A lost element is a tenth.
    x, y = (np.asarray(z, np.float64).reshape(-1, min(z.size, 128)) for z in (x, y))
    distance = np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)
    if not distance.max() < 0.05:
      raise UserError(
        f"kernels.optimizer: on this device {name} with mu={mu}, nu={nu} comes out wrong: group "
        f"{distance.argmax()} of 128 by {distance.max():.2g} of itself. Set "
        "kernels.optimizer='xla', and report this with `nvidia-smi` and `pip freeze`"
      )


def _refuse_if_wrong(got: np.ndarray, want: np.ndarray, what: str, instead: str) -> None:
  """Raises UserError unless all elements are equal: `what` was done wrongly, choose `instead`."""
  wrong = np.argwhere(got != want)
  if len(wrong):
    i, j = wrong[0]
    raise UserError(
      f"kernels.matmul: on this device {what} wrongly: {len(wrong)} of {got.size} elements, the "
      f"first [{i}, {j}] {got[i, j]} instead of {want[i, j]}. Set kernels.matmul={instead}, and "
      "report this with `nvidia-smi` and `pip freeze`"
    )


def _lattice(rows: int, columns: int) -> np.ndarray:
  """float32 integers of which FP8 tiles in either direction are exact, whatever kind of scale.

  Every run of 15 holds every integer from -7 to 7; tiles of 128x128 differ by powers of two.
  """
  i, j = np.indices((rows, columns))
  power = (i // 128 + 2 * (j // 128)) % 5 - 2
  return (((7 * i + 13 * j) % 15 - 7) * 2.0**power).astype(np.float32)
