"""Quantizes one operand of a GEMM: its Quant, and what that takes from the site."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.quantize import mosaic_sm90
from fp8jax.ops.gemm_spec import GemmSpec, Role
from fp8jax.ops.site import ScalingInputs
from fp8jax.quantization import hadamard, quantize, scaled_matrix
from fp8jax.quantization.amax_history import TENSORS
from fp8jax.recipe.gemm import PASSES
from fp8jax.recipe.quant import CURRENT, Hadamard, Quant


@dataclasses.dataclass(frozen=True)
class Quantizer:
  """Quantizes one operand: its Quant, and what that needs beside the tensor.

  Attributes:
    quant: None for the compute dtype.
    amax: float32 scalar for scales that are not current.
    key: random key of stochastic rounding.
    backend: of the GEMM; a GEMM kernel has a quantizer kernel for its operands.
    wants_amax: whether to find the tensor's amax too, if that costs no second reading.
    signs_key: random key of fresh signs, one for both operands of a GEMM.
    rows_rotation: rotates the rows first.
    joint_amax: float32 scalar for the first of two levels that is joint.
  """

  quant: Quant | None
  amax: Any = None
  key: Any = None
  backend: str = "xla"
  wants_amax: bool = False
  signs_key: Any = None
  rows_rotation: Hadamard | None = None
  joint_amax: Any = None

  @classmethod
  def of(cls, spec: GemmSpec, role: Role, inputs: ScalingInputs, wants_amax: bool = False):
    """That of a role, with the amax and the random key that the site lends."""
    quant = spec.quant(role)
    return cls(
      quant,
      None if inputs.amax_3 is None else inputs.amax_3[TENSORS.index(role.tensor)],
      None if inputs.key is None else jax.random.fold_in(inputs.key, role.number),
      spec.backend(role.gemm),
      wants_amax,
      signs_key(spec, role.gemm, inputs),
      spec.rows_rotation(role),
      inputs.joint_amax if quant and quant.is_joint else None,
    )

  @jax.named_scope("quantize")
  def __call__(self, matrix: Any, contraction: int, dtype, amax_axes):
    """([batch?, rows, contraction], quantized or else in `dtype`; amax or None).

    A matrix may be an Entry of a stack, which a kernel reads there.
    """
    quant = self.quant
    matrix = matrix if self.has_kernel(matrix, contraction) else scaled_matrix.taken(matrix)
    if quant is None:
      matrix = matrix.astype(dtype)
      return jnp.swapaxes(matrix, -1, -2) if contraction == 0 else matrix, None
    if self.rows_rotation:
      rows = matrix.ndim - 1 - contraction
      matrix = hadamard.rotate(matrix, self.rows_rotation, rows, self.signs_key)
    if self.has_kernel(matrix, contraction):
      over = tuple(dict.fromkeys(a for axes in amax_axes for a in axes))
      quants = {contraction: quant}
      made, amax = mosaic_sm90.quantize_matrix(matrix, quants, self.amax, over, self.wants_amax)
      return made[contraction], amax
    make = functools.partial(
      quantize.quantize,
      quant=quant,
      contraction=contraction,
      amax_axes=amax_axes,
      amax=None if quant.source == CURRENT else self.amax,
      tensor_amax=self.joint_amax,
      signs_key=self.signs_key,
      with_values=self.backend in gemm_api.WITH_VALUES,
    )
    if matrix.ndim == 2:
      return make(matrix, key=self.key), None
    if self.key is None:
      return jax.vmap(make)(matrix), None
    keys = jax.random.split(self.key, matrix.shape[0])
    return jax.vmap(lambda x, key: make(x, key=key))(matrix, keys), None

  def rotated(self, matrix):
    """[batch?, rows, contraction] as it is when it meets the grid."""
    last, of_contraction = matrix.ndim - 1, self.quant and self.quant.rotation
    for axis, rotation in ((last - 1, self.rows_rotation), (last, of_contraction)):
      if rotation:
        matrix = hadamard.rotate(matrix, rotation, axis, self.signs_key)
    return matrix

  def has_kernel(self, matrix, contraction: int) -> bool:
    """Whether the backend's quantizer makes this operand."""
    if self.quant is None or self.rows_rotation:
      return False
    return choose.quantizer(matrix, self.quant, contraction, self.backend).backend == "mosaic_sm90"


def kernels_read(spec: GemmSpec) -> bool:
  """Whether kernels alone read the weight: BF16 as well as float32, and a layer in its stack.

  XLA cannot convert in a kernel, or read there what it slices: a float32 copy of a BF16 weight, or
  a copy of a layer, would be written for it, and read.
  """
  matrix = jax.ShapeDtypeStruct((1, 1), jnp.bfloat16)

  def of_kernel(role: Role) -> bool:
    quant = spec.quant(role)
    is_plain = not (spec.letters.batch or spec.rows_rotation(role) or spec.remakes(role))
    if quant is None or not is_plain:
      return False
    return choose.quantizer(matrix, quant, 1, spec.backend(role.gemm)).backend == "mosaic_sm90"

  return all(map(of_kernel, (Role.W_FWD, Role.W_DGRAD))) and not spec.recipe.fwd.compensates


def signs_key(spec: GemmSpec, gemm: str, inputs: ScalingInputs):
  """The key of a GEMM's fresh signs, another one than its operands'; None if it draws none.

  A GEMM that multiplies what the forward one did rotates it back by the forward one's signs.
  """
  this = spec.gemm(gemm)
  rotations = [*this.rotate_rows, *(q.rotation for q in (this.lhs, this.rhs) if q)]
  if inputs.key is None or not any(r and r.signs == "fresh" for r in rotations):
    return None
  return jax.random.fold_in(inputs.key, 3 * len(TENSORS) + PASSES.index(gemm))
