"""The three GEMMs of a linear layer (linear.py), one each, also inside another `shard_map`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.ops import collectives, operands, quantizer, straight
from fp8jax.ops.gemm_spec import GemmSpec, Role
from fp8jax.ops.operands import Operand
from fp8jax.ops.site import ScalingInputs
from fp8jax.ops.stored_params import WeightOperands
from fp8jax.quantization import hadamard, tensor_stats
from fp8jax.quantization.scaled_matrix import Entry, ScaledMatrix
from fp8jax.recipe.gemm import Recipe

_P = jax.sharding.PartitionSpec


def forward(spec: GemmSpec, x, w, inputs: ScalingInputs, wants_amax: bool = False):
  """(x[acts] . w[at rest] -> y[acts] {sum over the axes of the contracted letters}, amax).

  The float32 [1] amax of w is None unless it is wanted and the quantizer finds it. Here and below,
  x and g may be their ScaledMatrix in the GEMM's role.
  """
  s, layout, w = spec.letters, spec.layout, _ahead(spec, w, Role.W_FWD)

  def local(x, w, inputs):
    a = operands.operand(spec, Role.X_FWD, x, inputs)
    b = operands.operand(spec, Role.W_FWD, w, inputs, wants_amax)
    y = product(spec, "fwd", a, b, spec.out_dtype, inputs)
    if spec.recipe.fwd.compensates:
      rest = _compensation(spec, x, w, inputs) * np.float32(spec.gain("fwd") or 1.0)
      y = y + rest.astype(y.dtype)
    y = collectives.sum_over(operands.unflatten(y, a, b, s.y), layout, s.contracted)
    return y, _amax_of_weight(spec, b)

  of_x = spec.partition_spec(Role.X_FWD, x)
  specs = (of_x, operands.weight_specs(spec, w), _P())
  return collectives.on_mesh(local, layout, specs, (layout.act_spec(s.y), _P()))(x, w, inputs)


def data_gradient(
  spec: GemmSpec, g, w, inputs: ScalingInputs, x=None, dx=None, wants_amax: bool = False
):  # fmt: skip
  """(g[acts] . w[at rest]' -> dx[acts] {sum over the axes of w's free letters}, amax).

  The amax is `forward`'s.

  Args:
    x: the forward pass's, an array or a Prologue, for recipes that `straight.is_needed` names.
    dx: that of other products of x, to which this one is added; a kernel that can adds it before
      it rounds.
  """
  s, layout, w = spec.letters, spec.layout, _ahead(spec, w, Role.W_DGRAD)
  adds_here = dx is not None and _adds(spec, "dgrad", spec.x_dtype, s.x)

  def local(g, w, inputs, *others):
    a = operands.operand(spec, Role.G_DGRAD, g, inputs)
    b = operands.operand(spec, Role.W_DGRAD, w, inputs, wants_amax)
    if others:
      made = _product(spec, "dgrad", a, b, spec.x_dtype, add_to=_matrix(others[0], a, b))
    else:
      is_final = not straight.is_needed(spec, Role.X_FWD)
      made = product(spec, "dgrad", a, b, spec.x_dtype if is_final else jnp.float32, inputs)
    made = collectives.sum_over(operands.unflatten(made, a, b, s.x), layout, s.produced)
    return made, _amax_of_weight(spec, b)

  of_x, of_g = layout.act_spec(s.x), spec.partition_spec(Role.G_DGRAD, g)
  specs = (of_g, operands.weight_specs(spec, w, Role.W_DGRAD), _P(), *((of_x,) * adds_here))
  others = (dx,) * adds_here
  made, amax = collectives.on_mesh(local, layout, specs, (of_x, _P()))(g, w, inputs, *others)
  made = straight.cotangent(spec, Role.X_FWD, x, made, inputs, spec.x_dtype)
  return made if dx is None or adds_here else dx + made, amax


def _amax_of_weight(spec: GemmSpec, b: Operand):
  """float32 [1] of the weight on all devices, or None."""
  if b.amax is None:
    return None
  over = tuple(a for c in spec.letters.w for a in spec.layout.weight_axes(c))
  return tensor_stats.over_mesh(b.amax[None], () if spec.layout.is_manual else over)


def weight_gradient(
  spec: GemmSpec, x, g, dtype, inputs: ScalingInputs, w=None, parts=None, sums: Entry | None = None
):  # fmt: skip
  """x[acts]' . g[acts] -> dw[at rest] {scattered over the axes only the weight is split on}.

  Args:
    w: the weight, for recipes that `straight.is_needed` names.
    parts: Parts of which dw is wished, see straight.axes_of_terms.
    sums: float32, on one device, an entry of a stack that a kernel which can adds dw to, where it
      lies. The result is the stack then, an axis more.
  """
  if sums is not None and _adds(spec, "wgrad", jnp.float32, spec.letters.w):
    a = operands.operand(spec, Role.X_WGRAD, x, inputs)
    b = operands.operand(spec, Role.G_WGRAD, g, inputs)
    into = Entry(jax.vmap(lambda layer: _matrix(layer, a, b))(sums.stack), sums.index)
    return _product(spec, "wgrad", a, b, jnp.float32, add_to=into).reshape(sums.stack.shape)
  s, layout, later = spec.letters, spec.layout, straight.axes_of_terms(spec, parts)

  def local(x, g, inputs):
    a = operands.operand(spec, Role.X_WGRAD, x, inputs)
    b = operands.operand(spec, Role.G_WGRAD, g, inputs)
    is_final = not straight.is_needed(spec, Role.W_FWD)
    dw = product(spec, "wgrad", a, b, dtype if is_final else jnp.float32, inputs)
    dw = operands.unflatten(dw, a, b, s.w)
    return collectives.scatter_gradient(dw, s.w, s.tokens, layout, later)

  in_specs = ((Role.X_WGRAD, x), (Role.G_WGRAD, g))
  specs = (*(spec.partition_spec(role, t) for role, t in in_specs), _P())
  place = _P(later, *layout.weight_spec(s.w)) if later else layout.weight_spec(s.w)
  dw = collectives.on_mesh(local, layout, specs, place)(x, g, inputs)
  return straight.cotangent(spec, Role.W_FWD, w, dw, inputs, dtype, later)


def _adds(spec: GemmSpec, gemm: str, dtype, letters: str) -> bool:
  """Whether the kernel of a product adds it to a result with these letters, where that lies: it
  is the matrix that the kernel writes, and nothing is done to it afterwards."""
  of, sizes, s = spec.gemm(gemm), spec.local_sizes(), spec.letters
  if gemm == "dgrad":
    roles, tensor, contracted = (Role.G_DGRAD, Role.W_DGRAD), Role.X_FWD, s.produced
  else:
    roles, tensor, contracted = (Role.X_WGRAD, Role.G_WGRAD), Role.W_FWD, s.tokens
  rows, columns = (spec.letters_of(role)[1] for role in roles)
  is_plain = of.multiplies_codes and spec.gain(gemm) is None and not any(of.rotate_rows)
  is_plain &= rows + columns == letters and not straight.is_needed(spec, tensor)
  if not is_plain or s.batch or spec.layout.act_axes_of(contracted):
    return False
  shape = tuple(math.prod(sizes[c] for c in group) for group in (rows, columns))
  return gemm_api.adds(spec.backend(gemm), shape, dtype)


def _matrix(x, a: Operand, b: Operand):
  """A result as the matrix [M, N] of its operands."""
  return x.reshape([math.prod(of.sizes[c] for c in of.free) for of in (a, b)])


def _ahead(spec: GemmSpec, w, role: Role):
  """A weight's operand in a role, if it was made ahead of its products; else the weight."""
  if not isinstance(w, WeightOperands):
    return w
  made = w.fwd if role is Role.W_FWD else w.dgrad
  reads_layers = spec.backend(role.gemm) in gemm_api.WITH_LAYERS and not spec.letters.batch
  if isinstance(made, Entry) and not (reads_layers and spec.gemm(role.gemm).multiplies_codes):
    return made.take()
  return made


def _compensation(spec: GemmSpec, x, w, inputs: ScalingInputs):
  """float32 [batch?, M, N]: what the Clamp of x took away, times w, both unquantized."""
  wide = dataclasses.replace(spec, recipe=Recipe("compensation"), x_dtype=jnp.dtype(jnp.float32))
  a = operands.operand(wide, Role.X_FWD, operands.outliers(spec, x), inputs)
  b = operands.operand(wide, Role.W_FWD, w, inputs)
  with jax.named_scope("compensation"):  # no product of the recipe, and none is in its place
    return _unquantized(a, b, jnp.float32)


def product(spec: GemmSpec, gemm: str, a: Operand, b: Operand, out_dtype, inputs: ScalingInputs):
  """[batch?, M, N] in out_dtype: rows rotated back, the gain applied."""
  dtype, gain, rows = out_dtype, spec.gain(gemm), spec.gemm(gemm).rotate_rows
  if gain is None and not any(rows):
    return _product(spec, gemm, a, b, dtype)
  y, key = _product(spec, gemm, a, b, jnp.float32), quantizer.signs_key(spec, gemm, inputs)
  for axis, rotation in zip((y.ndim - 2, y.ndim - 1), rows, strict=True):
    if rotation:
      y = hadamard.rotate(y, rotation, axis, key, inverse=True)
  return (y if gain is None else y * np.float32(gain)).astype(dtype)


def _product(spec: GemmSpec, gemm: str, a: Operand, b: Operand, out_dtype, **how):
  # The compiled program carries this name: the check of FP8 GEMMs finds the product by it.
  with jax.named_scope(f"{spec.name}:{gemm}"):
    if not spec.gemm(gemm).multiplies_codes:
      return _unquantized(a, _dequantized(b, spec.x_dtype), out_dtype)
    multiply = functools.partial(
      gemm_api.scaled_matmul,
      accumulate=spec.gemm(gemm).accumulate,
      backend=spec.backend(gemm),
      out_dtype=out_dtype,
      spare=spec.layout.spare,
      **how,
    )
    return (jax.vmap(multiply) if a.batch else multiply)(a.value, b.value)


def _dequantized(b: Operand, dtype) -> Operand:
  """Of a weight that alone is quantized the numbers of its codes."""
  if not isinstance(b.value, ScaledMatrix):
    return b

  def one(value):
    # The barrier keeps the cast there and back, which a GPU's compiler may drop.
    codes = dataclasses.replace(value, data=jax.lax.optimization_barrier(value.data))
    return codes.dequantize(dtype)

  return dataclasses.replace(b, value=(jax.vmap(one) if b.batch else one)(b.value))


def _unquantized(a: Operand, b: Operand, out_dtype):
  lead, last = tuple(range(a.value.ndim - 2)), a.value.ndim - 1
  return jax.lax.dot_general(
    a.value, b.value, (((last,), (last,)), (lead, lead)), preferred_element_type=out_dtype
  )
