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
  products.py                              one GEMM each, also inside another `shard_map`

swiglu_mlp.py joins the backward passes of three layers. cross_entropy.py multiplies the three GEMMs
of the head for one chunk of positions at a time. dots.py calls `multiply` for all others.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.ops import (
  derivative,
  observe,
  operands,
  products,
  prologue,
  quantizer,
  site_checks,
  straight,
)
from fp8jax.ops import residuals as residuals_lib
from fp8jax.ops.gemm_spec import BOTH_OF_G, GemmSpec, Role
from fp8jax.ops.prologue import Prologue
from fp8jax.ops.site import ScalingInputs
from fp8jax.ops.stored_params import (
  backward_view,
  cotangent,
  gemm_operand,
  is_stored,
  parts_of,
  sums_of,
)  # fmt: skip
from fp8jax.quantization import tensor_stats
from fp8jax.quantization.scaled_matrix import Entry

# Name of residuals that are operands, for remat policies (see jax.ad_checkpoint.checkpoint_name).
SAVED_NAME = "operands"


# --- forward and backward ------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
  """The residuals of several dots of one x.

  Attributes:
    x: as it came in, a Prologue with compressed sources, or None if every X_WGRAD is saved.
    x_wgrad: operand_key -> X_WGRAD, of dots that save it.
    ws: weights, unquantized, as they are stored.
    stats: per dot, float32 [S] of (x, w); None of what the backward pass observes.
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


class OperandProvider:
  """Makes the operands of several GEMMs from one activation, equal ones once.

  Attributes:
    amax: float32 [1] of the activation once a quantizer has found it, else None.
  """

  def __init__(self, source, *, wants_amax: bool = False):
    """
    Args:
      source: an array or a Prologue.
      wants_amax: whether a quantizer that reads the activation finds its amax too.
    """
    self.amax: Any = None
    self._source, self._wants_amax = source, wants_amax
    self._made: dict[str, tuple] = {}

  def make(self, spec: GemmSpec, n: int, inputs: ScalingInputs, roles: operands.Roles) -> tuple:
    """Dot n's operand of x in each role: a ScaledMatrix if a kernel makes them all, else x."""
    key = operand_key(spec, n, roles)
    if key not in self._made:
      wants_amax = self._wants_amax and self.amax is None
      if isinstance(self._source, Prologue):
        (made,), amaxes = operands.run_prologue((spec,), self._source, roles, wants_amax)
        amax = amaxes[0] if amaxes else None
      else:
        made, amax = operands.quantize_both_orientations(
          spec, self._source, inputs, roles, wants_amax
        )
      self._made[key] = made
      self.amax = amax if self.amax is None else self.amax
    return self._made[key]


def operand_key(spec: GemmSpec, n: int, roles: operands.Roles) -> str:
  """Names dot n's operands in these roles. Operands with the same name are equal."""
  # Scales that are not current differ from site to site, and so do random bits.
  own = f" of {n}" if spec.recipe.is_stateful or spec.recipe.is_random else ""
  made = [f"{role.name} {spec.quant(role)} by {spec.backend(role.gemm)}" for role in roles]
  made += [f"rows {spec.rows_rotation(role)}" for role in roles if spec.rows_rotation(role)]
  if any(map(spec.remakes, roles)):  # of what the forward product multiplied
    fwd = spec.recipe.fwd
    made += [f"of {fwd.lhs} {fwd.rotate_rows} {fwd.compensates} by {spec.backend('fwd')}"]
  return f"{spec.letters.batch} {spec.letters.contracted} {made}{own}"


def read_weight(spec: GemmSpec, w):
  """A weight as its products take it; the gradient of a stored one is float32 all the same."""
  return gemm_operand(w, reads_in_place(spec))


def reads_in_place(spec: GemmSpec) -> bool:
  """Whether kernels alone read the weight of a product, forward and backward."""
  return quantizer.kernels_read(spec) and not straight.is_needed(spec, Role.W_FWD)


def _observes_weight_later(spec: GemmSpec, w) -> bool:
  """Whether the quantizer of the data gradient finds the amax of a weight. The forward pass, where
  it is computed again, may need no product of this weight."""
  return spec.observes_amax_only and reads_in_place(spec) and isinstance(w, jax.Array | Entry)


def forward_only(specs, x, ws, inputs):
  """One y per weight."""
  provider = OperandProvider(operands.materialize_unless_fused(specs, x))
  ys = []
  for n, (spec, w, i) in enumerate(zip(specs, ws, inputs)):
    (x_fwd,) = provider.make(spec, n, i, (Role.X_FWD,))
    ys.append(products.forward(spec, x_fwd, read_weight(spec, w), i)[0])
  return tuple(ys)


def forward_with_residuals(specs, x, ws, taps, inputs):
  """(one y per weight, Residuals)."""
  derivative.refuse_twice((x, ws), quantized(specs))
  source = operands.materialize_unless_fused(specs, x)
  is_compressed = isinstance(x, Prologue) and x.save is not None
  is_recomputed = isinstance(source, Prologue) and not is_compressed
  # The backward pass cannot observe x where the residual is quantized: an infinity is lost there.
  wants_amax = is_compressed or any(spec.saves_operand for spec in specs)
  wants_amax |= not isinstance(source, Prologue) and any(s.observes_amax_only for s in specs)
  provider = OperandProvider(source, wants_amax=wants_amax)
  ys, observed, x_wgrads, saves_x = [], [], {}, isinstance(x, Prologue)
  for n, (spec, w, tap, i) in enumerate(zip(specs, ws, taps, inputs)):
    if spec.is_observable:
      site_checks.refuse_sums(spec.name, x, tap, i.roots)
    w = read_weight(spec, w)
    if spec.saves_operand:
      x_fwd, x_wgrad = provider.make(spec, n, i, (Role.X_FWD, Role.X_WGRAD))
      key = operand_key(spec, n, (Role.X_WGRAD,))
      if key not in x_wgrads:
        x_wgrad = operands.quantize_now(spec, Role.X_WGRAD, x_wgrad, i)
        x_wgrads[key] = residuals_lib.named(
          x_wgrad, residuals_lib.NAME if is_compressed else SAVED_NAME
        )
    else:
      (x_fwd,) = provider.make(spec, n, i, (Role.X_FWD,))
      saves_x |= not spec.is_frozen
    saves_x |= straight.is_needed(spec, Role.X_FWD)
    is_later_w = _observes_weight_later(spec, w)
    wants_amax_w = spec.observes_amax_only and not is_later_w
    y, amax_w = products.forward(spec, x_fwd, w, i, wants_amax_w)
    ys.append(y)
    # The backward pass observes an x that it computes again: a remat then computes it once less.
    is_later = is_recomputed and not spec.saves_operand and not spec.is_frozen
    is_later &= spec.statistics == tensor_stats.QUIET
    value = None if is_later else prologue.value(source)
    stats_x = None if is_later else observe.operand_stats(spec, Role.X_FWD, value, i, provider.amax)
    stats_w = None if is_later_w else observe.operand_stats(spec, Role.W_FWD, w, i, amax_w)
    observed.append((stats_x, stats_w))
  return tuple(ys), Residuals(
    (x.compressed() if isinstance(x, Prologue) else x) if saves_x else None,
    x_wgrads,
    tuple(map(backward_view, ws)),
    residuals_lib.named(tuple(observed), residuals_lib.NAME),
    inputs,
  )


def gradients(specs, residuals: Residuals, gs):
  """(dx, dws, cotangents of taps): dx is that of x as an array, also if x is a Prologue.

  Args:
    gs: one per dot; or a Prologue, whose results are those of all dots.
  """
  x = None
  if not all(spec.is_frozen and not straight.is_needed(spec, Role.X_FWD) for spec in specs):
    x = operands.materialize_unless_fused(specs, residuals.input(specs[0].x_dtype))
  provider = OperandProvider(x, wants_amax=any(stats_x is None for stats_x, _ in residuals.stats))
  both_of_g: Sequence[Any] = [None] * len(specs)
  amaxes: Sequence[Any] = [None] * len(specs)
  if isinstance(gs, Prologue):
    roles = BOTH_OF_G if x is not None else specs[0].roles_of_g
    both_of_g, amaxes = operands.run_prologue(specs, gs, roles, wants_amax=True)
    gs = gs.value()
  dx, dws, taps = None, [], []
  for n, (spec, stored_w, i, g) in enumerate(zip(specs, residuals.ws, residuals.inputs, gs)):
    w = read_weight(spec, stored_w)
    g = _narrowed(g, spec.x_dtype)
    operands_of_g, amax_g = both_of_g[n], amaxes[n]
    if operands_of_g is None:
      operands_of_g, amax_g = operands.quantize_both_orientations(
        spec, g, i, spec.roles_of_g, spec.observes_amax_only
      )
    g_dgrad, g_wgrad = operands_of_g[0], operands_of_g[-1]
    stats_x, stats_w = residuals.stats[n]
    dx, amax_w = products.data_gradient(spec, g_dgrad, w, i, x, dx, wants_amax=stats_w is None)
    if spec.is_frozen:
      dws.append(None)
    else:
      if spec.saves_operand:
        x_wgrad = residuals.x_wgrad[operand_key(spec, n, (Role.X_WGRAD,))]
      else:
        (x_wgrad,) = provider.make(spec, n, i, (Role.X_WGRAD,))
      dtype = jnp.float32 if is_stored(stored_w) else w.dtype
      kept = parts_of(stored_w), sums_of(stored_w)
      dw = products.weight_gradient(spec, x_wgrad, g_wgrad, dtype, i, w, *kept)
      dws.append(cotangent(stored_w, dw))
    stats_x = provider.amax if stats_x is None else stats_x
    if stats_w is None:
      stats_w = observe.operand_stats(spec, Role.W_FWD, w, i, amax_w)
    stats_g = observe.operand_stats(spec, Role.G_DGRAD, gs[n], i, amax_g)
    taps.append(jnp.stack([stats_x, stats_w, stats_g]))
  return dx, tuple(dws), tuple(taps)


def _narrowed(g, dtype):
  """g of a wider result in the dtype of x, but for float16, whose range a scaled loss leaves."""
  return g if dtype == jnp.float16 else g.astype(dtype)


def quantized(specs):
  """(name, whether it is quantized) of each product: what is not differentiated twice."""
  return [(spec.name, spec.recipe.is_quantized) for spec in specs]


def vjp_of_input(specs, residuals: Residuals, dx):
  """The cotangent of x: dx, or that of a Prologue's sources."""
  x = residuals.input(specs[0].x_dtype)
  return x.vjp(dx) if isinstance(x, Prologue) else dx


def multiply(specs, x, ws, sites):
  """One y per weight, of an x as an array or a Prologue; claims the sites."""
  x = operands.fused_or_array(specs, x)
  return _multiply(specs, *site_checks.mark_used(specs, x, ws, sites))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(specs, x, ws, taps, inputs):
  del taps
  return forward_only(specs, x, ws, inputs)


def _backward(specs, residuals, gs):
  dx, dws, taps = gradients(specs, residuals, gs)
  made = vjp_of_input(specs, residuals, dx), dws, taps
  return *derivative.once(made, quantized(specs)), site_checks.of_roots(residuals.inputs, taps)


_multiply.defvjp(forward_with_residuals, _backward)
