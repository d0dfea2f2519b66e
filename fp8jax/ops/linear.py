"""The dot: every GEMM of every model, in the precision its site prescribes.

A linear layer is three products. With x [tokens, in], w [in, out] and the incoming gradient g:

  forward           y  = x . w      contracts `in`
  data gradient     dx = g . w'     contracts `out`
  weight gradient   dw = x' . g     contracts `tokens`

Each product quantises both of its operands along *its own* contraction, because a scale can only be
pulled out of a sum over elements that share it. A weight tile of 128x128 reads the same both ways;
an activation tile of 1x128 does not, so x and g are quantised a second time, along tokens, for the
weight gradient.

The residuals are x and w, unquantized: weights are always quantized from the master
copy. Three things change the residual of x. Where the recipe saves FP8, it is the operand of the
weight gradient. A prologue (fused/prologue.py) is saved as its own inputs and computed again. A
compressed residual (residuals.py) is a quantized copy. Gradients of w have w's dtype: float32
masters get float32 weight gradients.

Letters carry the sharding (axes.py). A product runs inside `shard_map`: the weight shard is made
narrow first and gathered narrow where its tiles allow, partial sums over split letters are reduced,
and the weight gradient leaves scattered like the weight:

  forward   x[B_data, D] . gather(w[D_fsdp, F_tensor]) -> y[B_data, F_tensor]
  wgrad     x[B_data, D]' . g[B_data, F_tensor] -> dw[D_fsdp, F_tensor]

This module holds the GEMM's `custom_vjp`. fused/swiglu_mlp.py and cross_entropy.py compose the same
parts in `custom_vjp`s of their own.
"""

import functools
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.ops import collectives, operands, quantized_inputs, site_checks, stats, stored_params
from fp8jax.ops import residuals as residuals_lib
from fp8jax.ops.fused import prologue
from fp8jax.ops.fused.prologue import Prologue
from fp8jax.ops.gemm_spec import GemmSpec, ScalingInputs, make_spec
from fp8jax.ops.operands import Operand
from fp8jax.ops.site import Site
from fp8jax.quantization import scaled_matrix, tensor_stats
from fp8jax.recipe.gemm import Gemm, SaveForBackward

# What a remat policy may keep of a dot (see jax.ad_checkpoint.checkpoint_name).
SAVED_NAME = "quantized"


def dot(eqn: str, x, w, site: Site, *, out_dtype=None):
  """einsum of an activation and a weight in the precision `site` prescribes.

  Args:
    eqn: e.g. "BLD,DF->BLF" or "BLHK,HKD->BLD". Letters in both x and w but not in y are contracted.
    x: activation, maybe one of `later`; gradients with respect to it have its dtype.
    w: weight, usually the float32 master; gradients with respect to it have its dtype. Or a node
      that holds one (stored_params.py).
    site: precision, implementation and layout.
    out_dtype: dtype of the result; default x's.

  Returns:
    y, with the letters after "->".

  Raises:
    ValueError: letters and shapes disagree, nothing is contracted, or the site is in use already.
    TypeError: an operand that is no array of floating-point numbers.

  FP8 saturates: an infinity in x becomes the largest number of its tile. The site's observation
  says that there was one, and training stops at it (step.py).
  """
  return dots((eqn,), x, (w,), (site,), out_dtype=out_dtype)[0]


def dots(eqns: Sequence[str], x, ws, sites: Sequence[Site], *, out_dtype=None):
  """`dot` of one activation with several weights: what is kept of x is kept once.

  Args:
    eqns: one per weight.
    x: activation; one of `later` is computed in the quantizer, if it is that of all products.
    ws: weights.
    sites: one per weight.

  Returns:
    One y per weight.
  """
  site_checks.refuse_dtypes(x, ws)
  plans = make_specs(eqns, x, ws, sites, out_dtype)
  return _dots(plans, *mark_used(plans, materialize_unless_fused(plans, x), ws, sites))


def fp8_dot_general(
  lhs, rhs, dimension_numbers, site: Site, precision=None, preferred_element_type=None,
  *, out_sharding=None,
):  # fmt: skip
  """`jax.lax.dot_general` in the precision `site` prescribes: of an activation and a weight.

  Its first three parameters, and by keyword preferred_element_type, are those of JAX. `site` stands
  where JAX has precision; precision and out_sharding are refused unless None.

  Args:
    lhs: any rank.
    rhs: any rank.
    dimension_numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), as in JAX.
    site: see `site.single` for use outside a model.
    preferred_element_type: dtype of the result; default lhs's.

  Returns:
    Batch dimensions, then the free dimensions of lhs, then those of rhs, as in JAX.
  """
  (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
  if not isinstance(site, Site):
    raise TypeError(f"the fourth argument is {site!r}, not a Site; give site.single('block_128')")
  if precision is not None:
    raise ValueError(f"precision={precision!r}: leave it out; the site's recipe is the precision")
  if out_sharding is not None:
    raise ValueError(f"{out_sharding=}: leave it out; dot(eqn, ...) places y as its site says")
  site_checks.refuse_dtypes(lhs, (rhs,))
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
  return dot(eqn, lhs, rhs, site, out_dtype=preferred_element_type)


def make_specs(eqns, x, ws, sites, out_dtype=None) -> tuple[GemmSpec, ...]:
  """One per weight; x needs no more than shape and dtype."""
  return tuple(
    make_spec(e, x, w, s, out_dtype=out_dtype) for e, w, s in zip(eqns, ws, sites, strict=True)
  )


def can_make_input(plan: GemmSpec, x: Prologue) -> bool:
  """Whether every operand that a dot makes of x, forward and backward, is made from its sources."""
  at_once = ((0, 2),) if plan.recipe.save is SaveForBackward.QUANTIZED else ((0,), (2,))
  return all(quantized_inputs.can_fuse_prologue((plan,), 0, x, products) for products in at_once)


def materialize_unless_fused(plans: Sequence[GemmSpec], x):
  """x, computed now unless these dots compute it as they read it, or keep what it is made of."""
  return x if isinstance(x, Prologue) and x.keep is not None else materialize_if_needed(plans, x)


def materialize_if_needed(plans: Sequence[GemmSpec], x):
  """x as these products take it: computed, unless all of them compute it as they read it."""
  if isinstance(x, Prologue) and not all(can_make_input(plan, x) for plan in plans):
    return x.value()
  return x


def mark_used(plans: Sequence[GemmSpec], x, ws, sites: Sequence[Site]):
  """(x, ws, taps, inputs), ready to be differentiated; the sites are in use from now on."""
  for site in sites:
    site.claim()
  x, ws, inputs = site_checks.vary_alike(x, tuple(ws), tuple(ScalingInputs.of(s) for s in sites))
  taps = (
    s.tap if p.is_observable else site_checks.vary_alike(s.tap, x)[0] for p, s in zip(plans, sites)
  )
  return x, ws, tuple(taps), inputs


# --- differentiation -----------------------------------------------------------------------------


def forward_only(plans, x, ws, inputs):
  """The forward products alone."""
  shared = quantized_inputs.InputCache(0, materialize_if_needed(plans, x))
  return tuple(
    forward(plan, shared.operands(plan, n, i, (0,))[0], stored_params.compute_copy(w), i)
    for n, (plan, w, i) in enumerate(zip(plans, ws, inputs))
  )


def forward_with_residuals(plans, x, ws, taps, inputs):
  """(the forward products, what `gradients` needs)."""
  taken = materialize_if_needed(plans, x)
  # A narrow copy has no infinity, so x is watched where it is whole; nor can an operand that was
  # made of x be made of the copy again.
  is_copied = isinstance(x, Prologue) and x.keep is not None
  name = residuals_lib.NAME if is_copied else SAVED_NAME
  # Later, an array is not read again for its amax.
  is_watched = is_copied or any(plan.recipe.save is SaveForBackward.QUANTIZED for plan in plans)
  is_watched |= not isinstance(taken, Prologue) and any(plan.is_quiet for plan in plans)
  shared, kept = (
    quantized_inputs.InputCache(0, taken, is_watched),
    quantized_inputs.InputCache(0, taken),
  )
  ys, seen = [], []
  saved = {}
  for n, (plan, w, tap, i) in enumerate(zip(plans, ws, taps, inputs)):
    if plan.is_observable:
      site_checks.refuse_vmap(plan.name, x, tap)
      site_checks.refuse_shared(plan.name, x, tap)
    w = stored_params.compute_copy(w)
    how = kept.name(plan, n, (2,)) if plan.recipe.save is SaveForBackward.QUANTIZED else "input"
    if how == "input":
      (mine,), saved[how] = shared.operands(plan, n, i, (0,)), x
    else:
      mine, narrow = shared.operands(plan, n, i, (0, 2))
      if how not in saved:
        narrow = save_input(plan, narrow, i)
        saved[how] = jax.tree.map(lambda t: checkpoint_name(t, name), narrow)
    # What is computed again in the backward pass is seen there: then it need not be made once more
    # where the forward pass is repeated for other reasons.
    of_x = None
    is_seen_again = isinstance(taken, Prologue) and not is_copied and how == "input"
    if not is_seen_again or plan.statistics > tensor_stats.QUIET:
      of_x = stats.operand_stats(plan, "x", prologue.value(taken), i, shared.amax)
    y, of_w = forward_and_amax(plan, mine, w, i)
    seen.append((of_x, stats.operand_stats(plan, "w", w, i, of_w)))
    ys.append(y)
  if isinstance(x, Prologue):
    saved["input"] = x.kept()  # its gradient goes on to its sources
  seen = jax.tree.map(lambda t: checkpoint_name(t, residuals_lib.NAME), tuple(seen))
  return tuple(ys), (saved, tuple(map(stored_params.residual_view, ws)), seen, inputs)


def gradients(plans, residuals, gs):
  """(dx, dws, cotangents of taps): dx is that of the array x, computed or not.

  Args:
    gs: one per product, or all of them as one of `later`.
  """
  saved, ws, seen, inputs = residuals
  is_watched = any(of_x is None for of_x, _ in seen)
  shared = quantized_inputs.InputCache(
    0, materialize_if_needed(plans, input_of(plans, residuals)), is_watched
  )
  made: list[Any] = [None] * len(plans)
  amaxes: list[Any] = [None] * len(plans)
  if isinstance(gs, Prologue):
    made, amaxes = quantized_inputs.run_prologue(plans, 2, gs, (1, 2), is_watched=True)
    gs = gs.value()
  dx, dws, taps = None, [], []
  for n, (plan, kept_w, i, g) in enumerate(zip(plans, ws, inputs, gs)):
    w = stored_params.compute_copy(kept_w)
    # A float32 cotangent (of a float32 head) still meets x in x's dtype.
    g = g.astype(plan.x_dtype)
    of_g = amaxes[n]
    if made[n] is None:
      made[n], of_g = quantized_inputs.quantize_both_orientations(
        plan, 2, g, i, (1, 2), plan.is_quiet
      )
    g_in, g_out = made[n]
    part = data_gradient(plan, g_in, w, i)
    dx = part if dx is None else dx + part
    if plan.recipe.save is SaveForBackward.QUANTIZED:
      kept = saved[shared.name(plan, n, (2,))]
    else:
      (kept,) = shared.operands(plan, n, i, (2,))
    dw = weight_gradient(plan, kept, g_out, w.dtype, i)
    dws.append(stored_params.cotangent(kept_w, dw))
    of_x, of_w = seen[n]
    of_x = shared.amax if of_x is None else of_x
    taps.append(jnp.stack([of_x, of_w, stats.operand_stats(plan, "y", gs[n], i, of_g)]))
  return dx, tuple(dws), tuple(taps)


def input_of(plans, residuals):
  """x of `multiply_and_keep`, or a copy: always there if it is one of `later`."""
  x = residuals[0].get("input")
  return x.restored(plans[0].x_dtype) if isinstance(x, Prologue) else x


def vjp_of_input(plans, residuals, dx):
  """The cotangent of x from `gradients`' dx."""
  x = input_of(plans, residuals)
  return x.pull(dx) if isinstance(x, Prologue) else dx


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dots(plans, x, ws, taps, inputs):
  del taps
  return forward_only(plans, x, ws, inputs)


def _dots_bwd(plans, residuals, gs):
  dx, dws, taps = gradients(plans, residuals, gs)
  return vjp_of_input(plans, residuals, dx), dws, taps, None


_dots.defvjp(forward_with_residuals, _dots_bwd)


# --- the three products --------------------------------------------------------------------------


def forward(plan: GemmSpec, x, w, inputs: ScalingInputs):
  """x[acts] . w[at rest] -> y[acts] {sum over the axes of the contracted letters}.

  Args:
    x: or what `activations.one_reading` made of it; the same for g and x below.
  """
  return _forward(plan, x, w, inputs, False)[0]


def forward_and_amax(plan: GemmSpec, x, w, inputs: ScalingInputs):
  """(`forward`, float32 [1] amax of w, where its quantizer finds it and nothing else is asked)."""
  return _forward(plan, x, w, inputs, plan.is_quiet)


def _forward(plan: GemmSpec, x, w, inputs: ScalingInputs, is_watched: bool):
  s, layout, gemm = plan.letters, plan.layout, plan.recipe.fwd
  over = tuple(a for c in s.w for a in layout.weight_axes(c))

  def local(x, w, inputs):
    a = quantized_inputs.as_matrix(plan, 0, x, 0, inputs)
    narrow = plan.narrow(inputs, 1, 0, is_watched)
    b = operands.weight(w, s.w, s.contracted, s.batch, narrow, plan.x_dtype, layout)
    amax = b.amax
    if amax is not None:
      amax = tensor_stats.over_mesh(amax[None], () if layout.is_manual else over)
    y = _product(a, b, gemm, plan, 0, plan.out_dtype)
    return collectives.sum_over(operands.unflatten(y, a, b, s.y), layout, s.contracted), amax

  specs = (quantized_inputs.spec(plan, 0, x, 0), layout.weight_spec(s.w), _P())
  made = (layout.act_spec(s.y), _P())
  return collectives.on_mesh(local, layout, specs, made)(x, w, inputs)


def data_gradient(plan: GemmSpec, g, w, inputs: ScalingInputs):
  """g[acts] . w[at rest]' -> dx[acts] {sum over the axes of w's free letters}."""
  s, layout, gemm = plan.letters, plan.layout, plan.recipe.dgrad

  def local(g, w, inputs):
    a = quantized_inputs.as_matrix(plan, 2, g, 1, inputs)
    narrow = plan.narrow(inputs, 1, 1)
    b = operands.weight(w, s.w, s.produced, s.batch, narrow, plan.x_dtype, layout)
    dx = _product(a, b, gemm, plan, 1, plan.x_dtype)
    return collectives.sum_over(operands.unflatten(dx, a, b, s.x), layout, s.produced)  # fmt: skip

  specs = (quantized_inputs.spec(plan, 2, g, 1), layout.weight_spec(s.w), _P())
  return collectives.on_mesh(local, layout, specs, layout.act_spec(s.x))(g, w, inputs)


def weight_gradient(plan: GemmSpec, x, g, dtype, inputs: ScalingInputs):
  """x[acts]' . g[acts] -> dw[at rest] {scattered over the axes only the weight is split on}.

  Args:
    x: or what `save_input` or `activations.one_reading` made of it.
  """
  s, layout, gemm = plan.letters, plan.layout, plan.recipe.wgrad

  def local(x, g, inputs):
    a = quantized_inputs.as_matrix(plan, 0, x, 2, inputs)
    b = quantized_inputs.as_matrix(plan, 2, g, 2, inputs)
    dw = _product(a, b, gemm, plan, 2, dtype)
    return collectives.scatter_gradient(operands.unflatten(dw, a, b, s.w), s.w, s.tokens, layout)

  specs = (quantized_inputs.spec(plan, 0, x, 2), quantized_inputs.spec(plan, 2, g, 2), _P())
  return collectives.on_mesh(local, layout, specs, layout.weight_spec(s.w))(x, g, inputs)


def save_input(plan: GemmSpec, x, inputs: ScalingInputs):
  """What the weight gradient will need of x: x, or a ScaledMatrix [batch?, in, tokens]."""
  if plan.recipe.save is SaveForBackward.INPUTS or isinstance(x, scaled_matrix.ScaledMatrix):
    return x

  def local(x, inputs):
    return quantized_inputs.as_matrix(plan, 0, x, 2, inputs).value

  specs, made = (
    (quantized_inputs.spec(plan, 0, x, 2), _P()),
    quantized_inputs.spec_of_narrow(plan, 0, 2),
  )
  return collectives.on_mesh(local, plan.layout, specs, made)(x, inputs)


# --- pieces --------------------------------------------------------------------------------------

_P = jax.sharding.PartitionSpec


def _product(a: Operand, b: Operand, gemm: Gemm, plan: GemmSpec, which: int, out_dtype):
  """[batch?, M, N] in out_dtype."""
  # The compiled program carries this name, so that what became of each product can be told.
  with jax.named_scope(f"{plan.name}:{('fwd', 'dgrad', 'wgrad')[which]}"):
    if not gemm.is_narrow:
      lead = tuple(range(a.value.ndim - 2))
      last = a.value.ndim - 1
      return jax.lax.dot_general(
        a.value, b.value, (((last,), (last,)), (lead, lead)), preferred_element_type=out_dtype
      )
    multiply = functools.partial(
      gemm_api.scaled_matmul,
      accumulate=gemm.accumulate,
      backend=plan.backends[which],
      out_dtype=out_dtype,
    )
    return (jax.vmap(multiply) if a.batch else multiply)(a.value, b.value)
