"""The dot: every GEMM of every model, in the precision its site prescribes.

A linear layer is three products. With x [tokens, in], w [in, out] and the incoming gradient g:

  forward           y  = x . w      contracts `in`
  data gradient     dx = g . w'     contracts `out`
  weight gradient   dw = x' . g     contracts `tokens`

Each product quantises both of its operands along *its own* contraction, because a scale can only be
pulled out of a sum over elements that share it. A weight tile of 128x128 reads the same both ways;
an activation tile of 1x128 does not, so x and g are quantised a second time, along tokens, for the
weight gradient. Residuals are x and w as they came in; weights are always quantised from the master
copy. Gradients of w come back in w's dtype (float32 masters give float32 weight gradients).

Letters carry the sharding (axes.py). A product runs inside `shard_map`: the weight shard is made
narrow first and gathered narrow where its tiles allow, partial sums over split letters are reduced,
and the weight gradient leaves scattered like the weight:

  forward   x[B_data, D] . gather(w[D_fsdp, F_tensor]) -> y[B_data, F_tensor]
  wgrad     x[B_data, D]' . g[B_data, F_tensor] -> dw[D_fsdp, F_tensor]

This module holds the project's only GEMM `custom_vjp`.
"""

import dataclasses
import functools
import math
import string
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.kernels import scaled_matmul
from fp8jax.ops import collectives
from fp8jax.ops.site import Site
from fp8jax.quant import quantize
from fp8jax.recipe import Gemm, Quant, Recipe


def dot(eqn: str, x, w, site: Site, *, out_dtype=None):
  """einsum of an activation and a weight in the precision `site` prescribes.

  Args:
    eqn: e.g. "BLD,DF->BLF" or "BLHK,HKD->BLD". Letters in both x and w but not in y are contracted.
    x: activation; gradients with respect to it have its dtype.
    w: weight, usually the float32 master; gradients with respect to it have its dtype.
    site: precision, implementation and layout.
    out_dtype: dtype of the result; default x's.

  Returns:
    y, with the letters after "->".

  Raises:
    ValueError: letters and shapes disagree, or nothing is contracted.
  """
  return _dot(make_plan(eqn, x, w, site, out_dtype=out_dtype), x, w, site.tap)


def fp8_dot_general(lhs, rhs, dimension_numbers, site: Site, *, out_dtype=None):
  """`jax.lax.dot_general` in the precision `site` prescribes: of an activation and a weight.

  Args:
    lhs: any rank.
    rhs: any rank.
    dimension_numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), as in JAX.
    site: see `site.single` for use outside a model.
    out_dtype: dtype of the result; default lhs's.

  Returns:
    Batch dimensions, then the free dimensions of lhs, then those of rhs, as in JAX.
  """
  (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
  if site.layout.mesh is not None:
    raise ValueError("fp8_dot_general has no letters to shard by; use dot(eqn, ...) on a mesh")
  names = iter(string.ascii_letters)
  lhs_letters = [next(names) for _ in lhs.shape]
  rhs_letters = [next(names) for _ in rhs.shape]
  for ours, theirs in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True):
    rhs_letters[theirs] = lhs_letters[ours]
  batch = [lhs_letters[i] for i in lhs_batch]
  free = [c for c in lhs_letters if c not in rhs_letters]
  free += [c for c in rhs_letters if c not in lhs_letters]
  eqn = f"{''.join(lhs_letters)},{''.join(rhs_letters)}->{''.join(batch + free)}"
  return dot(eqn, lhs, rhs, site, out_dtype=out_dtype)


@dataclasses.dataclass(frozen=True)
class _Letters:
  """The three operands of an einsum, by letter."""

  x: str
  w: str
  y: str

  @property
  def contracted(self) -> str:
    return "".join(c for c in self.x if c in self.w and c not in self.y)

  @property
  def batch(self) -> str:
    return "".join(c for c in self.x if c in self.w and c in self.y)


@dataclasses.dataclass(frozen=True)
class Plan:
  """Everything about a dot that is known when it is traced."""

  letters: _Letters
  recipe: Recipe
  backends: tuple[str, str, str]
  layout: axes.Layout
  out_dtype: jnp.dtype


def make_plan(eqn: str, x, w, site: Site, *, out_dtype=None) -> Plan:
  """The static part of `dot`: see there for the arguments."""
  letters = _parse(eqn, x.shape, w.shape)
  return Plan(letters, site.recipe, site.backends, site.layout, jnp.dtype(out_dtype or x.dtype))


def _parse(eqn: str, x_shape, w_shape) -> _Letters:
  operands, _, y = eqn.partition("->")
  x, _, w = operands.partition(",")
  letters = _Letters(x, w, y)
  wrong = None
  if not all(s and s.isalpha() and len(set(s)) == len(s) for s in (x, w, y)):
    wrong = "needs the form 'BLD,DF->BLF', every letter at most once per operand"
  elif len(x) != len(x_shape) or len(w) != len(w_shape):
    wrong = f"names {len(x)} and {len(w)} dimensions, the operands have {x_shape} and {w_shape}"
  elif set(y) != (set(x) ^ set(w)) | set(letters.batch):
    wrong = "must keep every letter that only one operand has, and no other"
  elif not letters.contracted:
    wrong = "contracts nothing"
  else:
    sizes = dict(zip(x, x_shape))
    bad = [c for c, n in zip(w, w_shape) if sizes.get(c, n) != n]
    if bad:
      wrong = f"gives {', '.join(bad)} two sizes: the operands have {x_shape} and {w_shape}"
  if wrong:
    raise ValueError(f"einsum {eqn!r} {wrong}")
  return letters


# --- the three products --------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(plan: Plan, x, w, tap):
  del tap
  return forward(plan, x, w)


def _dot_fwd(plan: Plan, x, w, tap):
  del tap
  return forward(plan, x, w), (x, w)


def _dot_bwd(plan: Plan, residuals, g):
  x, w = residuals
  seen = observe(x, w, g)
  # A float32 cotangent (of a float32 head) still meets x in x's dtype.
  g = g.astype(x.dtype)
  return data_gradient(plan, g, w, x.dtype), weight_gradient(plan, x, g, w.dtype), seen


_dot.defvjp(_dot_fwd, _dot_bwd)


def observe(x, w, g):
  """float32 [3]: the largest magnitude of each, NaN if any element is NaN."""

  def one(t):
    # A maximum alone may drop NaN: XLA:CPU's does.
    return jnp.where(jnp.isnan(t).any(), jnp.nan, jnp.max(jnp.abs(t)).astype(jnp.float32))

  return jnp.stack([one(t) for t in (x, w, g)])


def forward(plan: Plan, x, w):
  """x[acts] . w[at rest] -> y[acts] {sum over the axes of the contracted letters}."""
  s, layout = plan.letters, plan.layout

  def local(x, w):
    a = _operand(x, s.x, s.contracted, s.batch, plan.recipe.fwd.lhs, x.dtype, layout)
    b = _weight(w, s.w, s.contracted, s.batch, plan.recipe.fwd.rhs, x.dtype, layout)
    y = _product(a, b, plan.recipe.fwd, plan.backends[0], plan.out_dtype)
    y = _unflatten(y, a, b, s.y)
    return collectives.sum_over(y, layout, s.contracted)

  return on_mesh(
    local, layout, (layout.act_spec(s.x), layout.weight_spec(s.w)), layout.act_spec(s.y)
  )(x, w)


def data_gradient(plan: Plan, g, w, dtype):
  """g[acts] . w[at rest]' -> dx[acts] {sum over the axes of w's free letters}."""
  s, layout = plan.letters, plan.layout
  contracted = "".join(c for c in s.y if c in s.w and c not in s.x)

  def local(g, w):
    a = _operand(g, s.y, contracted, s.batch, plan.recipe.dgrad.lhs, g.dtype, layout)
    b = _weight(w, s.w, contracted, s.batch, plan.recipe.dgrad.rhs, g.dtype, layout)
    dx = _product(a, b, plan.recipe.dgrad, plan.backends[1], dtype)
    dx = _unflatten(dx, a, b, s.x)
    return collectives.sum_over(dx, layout, contracted)

  return on_mesh(
    local, layout, (layout.act_spec(s.y), layout.weight_spec(s.w)), layout.act_spec(s.x)
  )(g, w)


def weight_gradient(plan: Plan, x, g, dtype):
  """x[acts]' . g[acts] -> dw[at rest] {scattered over the axes only the weight is split on}."""
  s, layout = plan.letters, plan.layout
  contracted = "".join(c for c in s.x if c in s.y and c not in s.w)

  def local(x, g):
    a = _operand(x, s.x, contracted, s.batch, plan.recipe.wgrad.lhs, x.dtype, layout)
    b = _operand(g, s.y, contracted, s.batch, plan.recipe.wgrad.rhs, x.dtype, layout)
    dw = _product(a, b, plan.recipe.wgrad, plan.backends[2], dtype)
    return collectives.scatter_gradient(_unflatten(dw, a, b, s.w), s.w, contracted, layout)

  return on_mesh(
    local, layout, (layout.act_spec(s.x), layout.act_spec(s.y)), layout.weight_spec(s.w)
  )(x, g)


# --- operands as matrices ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Matrix:
  """One operand as [batch..., rows, contraction] ready to multiply.

  Attributes:
    value: a Scaled or an array [rows, contraction], with a leading batch axis if `batch`.
    free: letters of the rows, in order.
    sizes: letter -> local size.
  """

  value: Any
  free: str
  batch: str
  sizes: dict[str, int]


def _flatten(x, letters: str, contracted: str, batch: str):
  """(matrix [batch?, ...], axis of its contraction 0 or 1, free letters); copies if it must."""
  free = "".join(c for c in letters if c not in contracted and c not in batch)
  contraction_first = batch + contracted + free
  contraction = 0 if letters == contraction_first else 1
  wanted = contraction_first if contraction == 0 else batch + free + contracted
  if letters != wanted:
    x = jnp.transpose(x, [letters.index(c) for c in wanted])
  sizes = dict(zip(wanted, x.shape))
  rows = math.prod(sizes[c] for c in free)
  depth = math.prod(sizes[c] for c in contracted)
  groups = (math.prod(sizes[c] for c in batch),) if batch else ()
  return (
    x.reshape(*groups, *((depth, rows) if contraction == 0 else (rows, depth))),
    contraction,
    free,
  )


def _operand(x, letters, contracted, batch, quant: Quant | None, dtype, layout) -> _Matrix:
  """An activation or gradient, narrow if `quant` says so."""
  sizes = dict(zip(letters, x.shape))
  matrix, contraction, free = _flatten(x, letters, contracted, batch)
  amax_axes = (layout.act_axes_of(free), layout.act_axes_of(contracted))
  return _Matrix(_narrow(matrix, contraction, quant, dtype, amax_axes), free, batch, sizes)


def _narrow(matrix, contraction: int, quant: Quant | None, dtype, amax_axes):
  """[batch?, rows, contraction] in `quant`, or in the compute dtype if there is none."""
  if quant is None:
    matrix = matrix.astype(dtype)
    return jnp.swapaxes(matrix, -1, -2) if contraction == 0 else matrix
  make = functools.partial(
    quantize.quantize, quant=quant, contraction=contraction, amax_axes=amax_axes
  )
  return jax.vmap(make)(matrix) if matrix.ndim == 3 else make(matrix)


def _product(a: _Matrix, b: _Matrix, gemm: Gemm, backend: str, out_dtype):
  """[batch?, M, N] in out_dtype."""
  if not gemm.is_narrow:
    lead = tuple(range(a.value.ndim - 2))
    last = a.value.ndim - 1
    return jax.lax.dot_general(
      a.value, b.value, (((last,), (last,)), (lead, lead)), preferred_element_type=out_dtype
    )
  multiply = functools.partial(
    scaled_matmul.scaled_matmul, accumulate=gemm.accumulate, backend=backend
  )
  product = jax.vmap(multiply) if a.batch else multiply
  return product(a.value, b.value).astype(out_dtype)


def _unflatten(product, a: _Matrix, b: _Matrix, out: str):
  """[batch?, M, N] -> the letters of `out`."""
  have = a.batch + a.free + b.free
  sizes = {**a.sizes, **b.sizes}
  product = product.reshape([sizes[c] for c in have])
  return jnp.transpose(product, [have.index(c) for c in out]) if have != out else product


# --- meshes --------------------------------------------------------------------------------------


def on_mesh(local, layout: axes.Layout, in_specs, out_specs):
  """`local` per device on a mesh; as it is without one, or inside a manual region."""
  if layout.mesh is None or layout.is_manual:
    return local
  # Outputs are replicated by construction (explicit sums), which the checker cannot see.
  return jax.shard_map(
    local, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def _weight(w, letters, contracted, batch, quant: Quant | None, dtype, layout) -> _Matrix:
  """A weight as its GEMM needs it: narrow then gathered, or gathered first where tiles straddle."""
  extra = {c: collectives.extra_axes(layout, c) for c in letters}
  if not any(extra.values()):
    return _operand(w, letters, contracted, batch, quant, dtype, layout)

  matrix, contraction, free = _flatten(w, letters, contracted, batch)
  sizes = dict(zip(letters, w.shape))
  if quant is None or batch or not collectives.tiles_fit(sizes, free, contracted, quant, layout):
    # Without a Quant the compute dtype travels, else the master: straddling tiles need all of it.
    w = collectives.gather_weight(w.astype(dtype) if quant is None else w, letters, layout)
    return _operand(w, letters, contracted, batch, quant, dtype, layout)

  groups = (free, contracted)
  amax_axes = tuple(tuple(a for c in group for a in layout.weight_axes(c)) for group in groups)
  narrow = quantize.quantize(matrix, quant, contraction=contraction, amax_axes=amax_axes)
  for axis, group in enumerate(groups):
    if extra[group[0]]:
      narrow = collectives.gather_scaled(narrow, extra[group[0]], axis)
  full = {c: n * layout.size(extra[c]) for c, n in sizes.items()}
  return _Matrix(narrow, free, batch, full)
