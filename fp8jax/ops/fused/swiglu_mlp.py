"""The feed-forward layer as one operation: down(silu(gate(x)) * up(x)), three linears in one
backward pass.

Gradients go from one operation to another as arrays, so that those of gate and up, wide and of no
use but to be made narrow, would be written by the one and read by the other. Here the gradient of
silu(gate) * up goes into the quantizer, which makes both out of it, narrow, for the two products
that each of them is in.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.ops import linear, quantized_inputs
from fp8jax.ops.fused import prologue
from fp8jax.recipe.quant import Quant


def swiglu_mlp(eqns, x, ws, sites, name: str, keep: Quant | None = None):
  """down(silu(gate(x)) * up(x)) in the precisions that the sites prescribe.

  Args:
    eqns: of gate, up and down: ("BLD,DF->BLF", "BLD,DF->BLF", "BLF,FD->BLD").
    x: activation, maybe one of `later`.
    ws: weights of the three.
    sites: of the three.
    name: by which a policy of rematerialization may keep the outputs of gate and up.
    keep: how these wait for the backward pass; None: as they are.

  Returns:
    What down gives, in x's dtype.
  """
  plans = linear.make_specs(eqns[:2], x, ws[:2], sites[:2])
  x = linear.materialize_unless_fused(plans, x)
  h = prologue.silu_mul(*(jax.ShapeDtypeStruct(plan.y_shape, plan.out_dtype) for plan in plans))
  plans += linear.make_specs(eqns[2:], h, ws[2:], sites[2:])
  gradients = prologue.silu_mul_gradients(h, *h.sources)
  if quantized_inputs.can_fuse_prologue(plans[:2], 2, gradients, (1, 2)) and (
    linear.can_make_input(plans[2], h)
  ):
    return _gated((plans, name, keep), *linear.mark_used(plans, x, ws, sites))
  gate_up = linear.dots(eqns[:2], x, ws[:2], sites[:2])
  gate, up = (checkpoint_name(y, name) for y in gate_up)
  return linear.dot(eqns[2], prologue.silu_mul(gate, up, keep=keep), ws[2], sites[2])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(static, x, ws, taps, inputs):
  plans = static[0]
  del taps
  gate, up = linear.forward_only(plans[:2], x, ws[:2], inputs[:2])
  return linear.forward_only(plans[2:], prologue.silu_mul(gate, up), ws[2:], inputs[2:])[0]


def _fwd(static, x, ws, taps, inputs):
  plans, name, keep = static
  y, first = linear.forward_with_residuals(plans[:2], x, ws[:2], taps[:2], inputs[:2])
  h = prologue.silu_mul(*(checkpoint_name(t, name) for t in y), keep=keep)
  (y,), second = linear.forward_with_residuals(plans[2:], h, ws[2:], taps[2:], inputs[2:])
  return y, (first, second)


def _bwd(static, residuals, g):
  plans = static[0]
  first, second = residuals
  dh, of_down, taps_of_down = linear.gradients(plans[2:], second, (g,))
  sources = linear.input_of(plans[2:], second).sources
  dx, dws, taps = linear.gradients(plans[:2], first, prologue.silu_mul_gradients(dh, *sources))
  return linear.vjp_of_input(plans[:2], first, dx), (*dws, *of_down), (*taps, *taps_of_down), None


_gated.defvjp(_fwd, _bwd)
