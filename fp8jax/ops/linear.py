"""The linear layer: every GEMM of every model, in the precision that its site prescribes.

A linear layer is three GEMMs of six operands. With x [tokens, in], w [in, out] and g, the gradient
of y:

  fwd    y  = X_FWD . W_FWD        contracts `in`
  dgrad  dx = G_DGRAD . W_DGRAD'   contracts `out`
  wgrad  dw = X_WGRAD' . G_WGRAD   contracts `tokens`

Forward: quantize x and w, multiply, save residuals. Backward: quantize g, multiply twice. An
operand is quantized along its own GEMM's contraction, because only elements that are summed can
share a scale. A weight tile of 128x128 is the same for both of its GEMMs. An activation tile of
1x128 is not: x and g are quantized a second time, along tokens, for the weight gradient.

The residuals are x and w, unquantized: W_DGRAD and X_WGRAD are made again from them. The memory
section of a configuration changes the form of x alone (residuals.py):

  GemmInput.WGRAD_OPERAND   the residual is X_WGRAD, quantized in the forward pass
  Prologue.save             the sources of a prologue (a norm's input, gate and up) are compressed

Letters carry the sharding (axes.py). A GEMM runs inside `shard_map`. The weight shard is quantized
before it is gathered if its tiles allow, partial sums over split letters are reduced, and the
weight gradient is scattered like the weight:

  fwd    x[B_data, D] . gather(w[D_fsdp, F_tensor]) -> y[B_data, F_tensor]
  wgrad  x[B_data, D]' . g[B_data, F_tensor] -> dw[D_fsdp, F_tensor]

Two more operations are made of linear layers and have a `custom_vjp` of their own. After
`gemm_spec.make_specs` and `site_checks.mark_used` they use this protocol:

  forward_only                             ys, without residuals
  forward_with_residuals                   ys and Residuals
  gradients                                cotangents of x, ws and taps from Residuals and gs
  Residuals.input, vjp_of_input            x again, and the cotangent of its sources
  forward, data_gradient, weight_gradient  one GEMM each, also inside another `shard_map`

fused/swiglu_mlp.py joins the backward passes of three layers. cross_entropy.py multiplies the
three GEMMs of the head for one chunk of positions at a time.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.ops import (
  adapters,
  collectives,
  gemm_spec,
  operands,
  quantized_inputs,
  site_checks,
  stats,
  switch,
)
from fp8jax.ops import residuals as residuals_lib
from fp8jax.ops.fused import prologue
from fp8jax.ops.fused.prologue import Prologue
from fp8jax.ops.gemm_spec import BOTH_OF_G, GemmSpec, Role, ScalingInputs
from fp8jax.ops.operands import Operand
from fp8jax.ops.quantized_inputs import OperandProvider
from fp8jax.ops.site import Site
from fp8jax.ops.stored_params import cotangent, gemm_operand, residual_view
from fp8jax.quantization import block_codes, tensor_stats
from fp8jax.quantization.block_codes import BlockCodes

# Name of residuals that are operands, for remat policies (see jax.ad_checkpoint.checkpoint_name).
SAVED_NAME = "operands"


def dot(eqn: str, x, w, site: Site, *, out_dtype=None):
  """einsum of an activation and a weight in the precision that `site` prescribes.

  Args:
    eqn: e.g. "BLD,DF->BLF" or "BLHK,HKD->BLD". Letters in both x and w but not in y are contracted.
    x: activation or Prologue; gradients with respect to it have its dtype.
    w: weight, usually the float32 master, whose gradient is then float32; or a stored parameter
      (stored_params.py).
    site: precision, implementation and layout.
    out_dtype: dtype of the result; default x's.

  Returns:
    y, with the letters after "->".

  Raises:
    ValueError: letters and shapes disagree, nothing is contracted, or the site is in use already.
    TypeError: an operand is no array of floating-point numbers.

  FP8 saturates: an infinity in x becomes the largest number of its tile. The site observes that
  there was one, and training stops at it (step/train_step.py).
  """
  return dots((eqn,), x, (w,), (site,), out_dtype=out_dtype)[0]


def dots(eqns: Sequence[str], x, ws, sites: Sequence[Site], *, out_dtype=None):
  """`dot` of one activation with several weights: the residual of x is saved once.

  Args:
    x: activation or Prologue.
    eqns, ws, sites: one per weight.

  Returns:
    One y per weight.
  """
  if any(isinstance(w, adapters.Adapted) for w in ws):
    return _adapted_dots(eqns, x, ws, sites, out_dtype)
  if any(site.switch is not None for site in sites):
    return _switched_dots(eqns, x, ws, sites, out_dtype)
  site_checks.refuse_dtypes(x, ws, out_dtype)
  specs = gemm_spec.make_specs(eqns, x, ws, sites, out_dtype)
  x = quantized_inputs.fused_or_array(specs, x)
  return _dots(specs, *site_checks.mark_used(specs, x, ws, sites))


def _adapted_dots(eqns, x, ws, sites, out_dtype):
  """`dots` of weights of which some have adapters: x a is multiplied for each, x computed once."""
  x = prologue.value(x)
  ys = list(dots(eqns, x, [adapters.base_of(w) for w in ws], sites, out_dtype=out_dtype))
  places = [n for n, w in enumerate(ws) if isinstance(w, adapters.Adapted)]
  adapted = [ws[n] for n in places]
  both = [adapters.equations(eqns[n]) for n in places]
  of_a = [w.sites[0] for w in adapted]
  inner = dots([eqn for eqn, _ in both], x, [w.a for w in adapted], of_a)
  for n, w, (_, eqn), h in zip(places, adapted, both, inner, strict=True):
    delta = dot(eqn, h, w.b, w.sites[1], out_dtype=ys[n].dtype)
    ys[n] = adapters.add(ys[n], delta, w.scale)
  return tuple(ys)


def _switched_dots(eqns, x, ws, sites, out_dtype):
  """`dots` of sites of which some have switches (switch.py), differentiated as it is written."""
  x, ys = prologue.value(x), []
  for eqn, w, site in zip(eqns, ws, sites, strict=True):
    if site.switch is None:
      ys.append(dot(eqn, x, w, site, out_dtype=out_dtype))
      continue
    spec = gemm_spec.make_spec(eqn, x, w, site, out_dtype=out_dtype)
    of = switch.operands_of(spec, x, gemm_operand(w), ScalingInputs.of(site), site.switch)
    y = _multiply(of.spec, "fwd", of.x, of.w, of.spec.out_dtype)
    if (
      of.error_of_w is not None and of.on_w is not None
    ):  # x is a constant of this part, which is 0 at switches of 0
      constant = dataclasses.replace(of.x, value=jax.lax.stop_gradient(of.x.value))
      by_error = _multiply(of.spec, "fwd", constant, of.error_of_w, of.spec.out_dtype)
      y = y + of.on_w.astype(y.dtype) * by_error
    ys.append(operands.unflatten(y, of.x, of.w, of.spec.letters.y))
  return tuple(ys)


def fp8_dot_general(
  lhs, rhs, dimension_numbers, site: Site, precision=None, preferred_element_type=None,
  *, out_sharding=None,
):  # fmt: skip
  """`jax.lax.dot_general` of an activation and a weight in the precision that `site` prescribes.

  Its first three parameters, and by keyword preferred_element_type, are those of JAX. `site` stands
  where JAX has precision; precision and out_sharding are refused unless None.

  Args:
    lhs, rhs: any rank.
    dimension_numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), as in JAX.
    site: see `site.single` for use outside a model.
    preferred_element_type: dtype of the result; default lhs's.

  Returns:
    Batch dimensions, then the free dimensions of lhs, then those of rhs, as in JAX.
  """
  if not isinstance(site, Site):
    raise TypeError(f"the fourth argument is {site!r}, not a Site; give site.single('block_128')")
  if precision is not None:
    raise ValueError(f"precision={precision!r}: leave it out; the site's recipe is the precision")
  if out_sharding is not None:
    raise ValueError(f"{out_sharding=}: leave it out; dot(eqn, ...) places y as its site says")
  site_checks.refuse_dtypes(lhs, (rhs,))
  if site.layout.mesh is not None:
    raise ValueError("fp8_dot_general has no letters to shard by; use dot(eqn, ...) on a mesh")
  eqn = gemm_spec.equation(dimension_numbers, lhs.ndim, rhs.ndim)
  return dot(eqn, lhs, rhs, site, out_dtype=preferred_element_type)


# --- forward and backward ------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
  """The residuals of several dots of one x.

  Attributes:
    x: as it came in, a Prologue with compressed sources, or None if every X_WGRAD is saved.
    x_wgrad: quantized_inputs.operand_key -> X_WGRAD, of dots that save it.
    ws: weights, unquantized, as they are stored.
    stats: per dot, float32 [S] of (x, w); of x None if the backward pass observes it.
    inputs: ScalingInputs per dot.
  """

  x: Any
  x_wgrad: dict[str, Any]
  ws: tuple
  stats: tuple
  inputs: tuple[ScalingInputs, ...]

  def input(self, dtype):
    """x, a Prologue's sources decompressed to `dtype`."""
    return self.x.decompressed(dtype) if isinstance(self.x, Prologue) else self.x


def forward_only(specs, x, ws, inputs):
  """One y per weight."""
  provider = OperandProvider(quantized_inputs.materialize_unless_fused(specs, x))
  ys = []
  for n, (spec, w, i) in enumerate(zip(specs, ws, inputs)):
    (x_fwd,) = provider.operands(spec, n, i, (Role.X_FWD,))
    ys.append(forward(spec, x_fwd, gemm_operand(w), i))
  return tuple(ys)


def forward_with_residuals(specs, x, ws, taps, inputs):
  """(one y per weight, Residuals)."""
  source = quantized_inputs.materialize_unless_fused(specs, x)
  is_compressed = isinstance(x, Prologue) and x.save is not None
  is_recomputed = isinstance(source, Prologue) and not is_compressed
  # The backward pass cannot observe x where the residual is quantized: an infinity is lost there.
  wants_amax = is_compressed or any(spec.saves_operand for spec in specs)
  wants_amax |= not isinstance(source, Prologue) and any(s.observes_amax_only for s in specs)
  provider = OperandProvider(source, wants_amax=wants_amax)
  ys, observed, x_wgrads, saves_x = [], [], {}, isinstance(x, Prologue)
  for n, (spec, w, tap, i) in enumerate(zip(specs, ws, taps, inputs)):
    if spec.is_observable:
      site_checks.refuse_sums(spec.name, x, tap)
    w = gemm_operand(w)
    if spec.saves_operand:
      x_fwd, x_wgrad = provider.operands(spec, n, i, (Role.X_FWD, Role.X_WGRAD))
      key = quantized_inputs.operand_key(spec, n, (Role.X_WGRAD,))
      if key not in x_wgrads:
        x_wgrad = quantized_inputs.quantize_now(spec, Role.X_WGRAD, x_wgrad, i)
        x_wgrads[key] = residuals_lib.named(
          x_wgrad, residuals_lib.NAME if is_compressed else SAVED_NAME
        )
    else:
      (x_fwd,) = provider.operands(spec, n, i, (Role.X_FWD,))
      saves_x |= not spec.is_frozen
    wants_amax_w = spec.observes_amax_only
    y, amax_w = forward_and_amax(spec, x_fwd, w, i, wants_amax=wants_amax_w)
    ys.append(y)
    # The backward pass observes an x that it computes again: a remat then computes it once less.
    is_later = is_recomputed and not spec.saves_operand and not spec.is_frozen
    is_later &= spec.statistics == tensor_stats.QUIET
    value = None if is_later else prologue.value(source)
    stats_x = None if is_later else stats.operand_stats(spec, Role.X_FWD, value, i, provider.amax)
    observed.append((stats_x, stats.operand_stats(spec, Role.W_FWD, w, i, amax_w)))
  return tuple(ys), Residuals(
    (x.compressed() if isinstance(x, Prologue) else x) if saves_x else None,
    x_wgrads,
    tuple(map(residual_view, ws)),
    residuals_lib.named(tuple(observed), residuals_lib.NAME),
    inputs,
  )


def gradients(specs, residuals: Residuals, gs):
  """(dx, dws, cotangents of taps): dx is that of x as an array, also if x is a Prologue.

  Args:
    gs: one per dot; or a Prologue, whose results are those of all dots.
  """
  x = None
  if not all(spec.is_frozen for spec in specs):
    x = quantized_inputs.materialize_unless_fused(specs, residuals.input(specs[0].x_dtype))
  provider = OperandProvider(x, wants_amax=any(stats_x is None for stats_x, _ in residuals.stats))
  both_of_g: Sequence[Any] = [None] * len(specs)
  amaxes: Sequence[Any] = [None] * len(specs)
  if isinstance(gs, Prologue):
    roles = BOTH_OF_G if x is not None else specs[0].roles_of_g
    both_of_g, amaxes = quantized_inputs.run_prologue(specs, gs, roles, wants_amax=True)
    gs = gs.value()
  dx, dws, taps = None, [], []
  for n, (spec, stored_w, i, g) in enumerate(zip(specs, residuals.ws, residuals.inputs, gs)):
    w = gemm_operand(stored_w)
    g = g.astype(spec.x_dtype)  # of a float32 head it is float32
    operands_of_g, amax_g = both_of_g[n], amaxes[n]
    if operands_of_g is None:
      operands_of_g, amax_g = quantized_inputs.quantize_both_orientations(
        spec, g, i, spec.roles_of_g, spec.observes_amax_only
      )
    g_dgrad, g_wgrad = operands_of_g[0], operands_of_g[-1]
    dx_n = data_gradient(spec, g_dgrad, w, i)
    dx = dx_n if dx is None else dx + dx_n
    if spec.is_frozen:
      dws.append(None)
    else:
      if spec.saves_operand:
        x_wgrad = residuals.x_wgrad[quantized_inputs.operand_key(spec, n, (Role.X_WGRAD,))]
      else:
        (x_wgrad,) = provider.operands(spec, n, i, (Role.X_WGRAD,))
      dw = weight_gradient(spec, x_wgrad, g_wgrad, w.dtype, i)
      dws.append(cotangent(stored_w, dw))
    stats_x, stats_w = residuals.stats[n]
    stats_x = provider.amax if stats_x is None else stats_x
    stats_g = stats.operand_stats(spec, Role.G_DGRAD, gs[n], i, amax_g)
    taps.append(jnp.stack([stats_x, stats_w, stats_g]))
  return dx, tuple(dws), tuple(taps)


def vjp_of_input(specs, residuals: Residuals, dx):
  """The cotangent of x: dx, or that of a Prologue's sources."""
  x = residuals.input(specs[0].x_dtype)
  return x.vjp(dx) if isinstance(x, Prologue) else dx


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dots(specs, x, ws, taps, inputs):
  del taps
  return forward_only(specs, x, ws, inputs)


def _dots_bwd(specs, residuals, gs):
  dx, dws, taps = gradients(specs, residuals, gs)
  return vjp_of_input(specs, residuals, dx), dws, taps, None


_dots.defvjp(forward_with_residuals, _dots_bwd)


# --- the three GEMMs -----------------------------------------------------------------------------

_P = jax.sharding.PartitionSpec


def forward(spec: GemmSpec, x, w, inputs: ScalingInputs):
  """x[acts] . w[at rest] -> y[acts] {sum over the axes of the contracted letters}.

  Here and below, x and g may be their ScaledMatrix in the GEMM's role.
  """
  return forward_and_amax(spec, x, w, inputs, wants_amax=False)[0]


def forward_and_amax(spec: GemmSpec, x, w, inputs: ScalingInputs, *, wants_amax: bool):
  """(`forward`, float32 [1] amax of w if it is wanted and the quantizer finds it, else None)."""
  s, layout = spec.letters, spec.layout
  over = tuple(a for c in s.w for a in layout.weight_axes(c))

  def local(x, w, inputs):
    a = quantized_inputs.as_matrix(spec, Role.X_FWD, x, inputs)
    quantizer = spec.quantizer(Role.W_FWD, inputs, wants_amax)
    b = operands.weight(w, s.w, s.contracted, s.batch, quantizer, spec.x_dtype, layout)
    amax = b.amax
    if amax is not None:
      amax = tensor_stats.over_mesh(amax[None], () if layout.is_manual else over)
    y = _multiply(spec, "fwd", a, b, spec.out_dtype)
    return collectives.sum_over(operands.unflatten(y, a, b, s.y), layout, s.contracted), amax

  of_x = quantized_inputs.partition_spec(spec, Role.X_FWD, x)
  specs = (of_x, _weight_specs(w, s.w, layout), _P())
  return collectives.on_mesh(local, layout, specs, (layout.act_spec(s.y), _P()))(x, w, inputs)


def data_gradient(spec: GemmSpec, g, w, inputs: ScalingInputs):
  """g[acts] . w[at rest]' -> dx[acts] {sum over the axes of w's free letters}."""
  s, layout = spec.letters, spec.layout

  def local(g, w, inputs):
    a = quantized_inputs.as_matrix(spec, Role.G_DGRAD, g, inputs)
    quantizer = spec.quantizer(Role.W_DGRAD, inputs)
    b = operands.weight(w, s.w, s.produced, s.batch, quantizer, spec.x_dtype, layout)
    dx = _multiply(spec, "dgrad", a, b, spec.x_dtype)
    return collectives.sum_over(operands.unflatten(dx, a, b, s.x), layout, s.produced)

  of_g = quantized_inputs.partition_spec(spec, Role.G_DGRAD, g)
  specs = (of_g, _weight_specs(w, s.w, layout), _P())
  return collectives.on_mesh(local, layout, specs, layout.act_spec(s.x))(g, w, inputs)


def _weight_specs(w, letters: str, layout):
  """PartitionSpecs of a weight at rest, an array or codes."""
  whole = layout.weight_spec(letters)
  return block_codes.specs(w, whole) if isinstance(w, BlockCodes) else whole


def weight_gradient(spec: GemmSpec, x, g, dtype, inputs: ScalingInputs):
  """x[acts]' . g[acts] -> dw[at rest] {scattered over the axes only the weight is split on}."""
  s, layout = spec.letters, spec.layout

  def local(x, g, inputs):
    a = quantized_inputs.as_matrix(spec, Role.X_WGRAD, x, inputs)
    b = quantized_inputs.as_matrix(spec, Role.G_WGRAD, g, inputs)
    dw = _multiply(spec, "wgrad", a, b, dtype)
    return collectives.scatter_gradient(operands.unflatten(dw, a, b, s.w), s.w, s.tokens, layout)

  in_specs = ((Role.X_WGRAD, x), (Role.G_WGRAD, g))
  specs = (*(quantized_inputs.partition_spec(spec, role, t) for role, t in in_specs), _P())
  return collectives.on_mesh(local, layout, specs, layout.weight_spec(s.w))(x, g, inputs)


def _multiply(spec: GemmSpec, gemm: str, a: Operand, b: Operand, out_dtype):
  """[batch?, M, N] in out_dtype."""
  # The compiled program carries this name: the check of FP8 GEMMs finds the product by it.
  with jax.named_scope(f"{spec.name}:{gemm}"):
    if not spec.gemm(gemm).is_quantized:
      lead = tuple(range(a.value.ndim - 2))
      last = a.value.ndim - 1
      return jax.lax.dot_general(
        a.value, b.value, (((last,), (last,)), (lead, lead)), preferred_element_type=out_dtype
      )
    multiply = functools.partial(
      gemm_api.scaled_matmul,
      accumulate=spec.gemm(gemm).accumulate,
      backend=spec.backend(gemm),
      out_dtype=out_dtype,
    )
    return (jax.vmap(multiply) if a.batch else multiply)(a.value, b.value)
