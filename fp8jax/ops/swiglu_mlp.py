"""The feed-forward layer as one operation: down(silu(gate(x)) * up(x)), three linear layers.

Separate operations pass gradients as arrays: one would write the gradients of gate and up in BF16,
and the next would read them only to quantize them. Here the gradient of silu(gate) * up is a
prologue of the quantizer, which makes all four operands of the gradients of gate and up from it.
"""

import functools

import jax

from fp8jax.ops import (
  derivative,
  dots,
  gemm_spec,
  joint,
  linear,
  operands,
  prologue,
  residuals,
  site_checks,
)
from fp8jax.ops.gemm_spec import BOTH_OF_G
from fp8jax.recipe.quant import Quant


def swiglu_mlp(eqns, x, ws, sites, name: str, save: Quant | None = None):
  """down(silu(gate(x)) * up(x)) in the precisions that the sites prescribe.

  Args:
    eqns: of gate, up and down: ("BLD,DF->BLF", "BLD,DF->BLF", "BLF,FD->BLD").
    x: activation or Prologue.
    name: checkpoint_name of the outputs of gate and up, for remat policies.
    save: compresses gate and up as residuals; None saves them as they are.

  Returns:
    The output of down, in x's dtype.
  """
  if not dots.are_plain(ws, sites):
    return _separate(eqns, x, ws, sites, name, save)
  specs = gemm_spec.make_specs(eqns[:2], x, ws[:2], sites[:2])
  x = operands.fused_or_array(specs, x)
  h = prologue.silu_mul(*(jax.ShapeDtypeStruct(spec.y_shape, spec.out_dtype) for spec in specs))
  specs += gemm_spec.make_specs(eqns[2:], h, ws[2:], sites[2:])
  gradients = prologue.silu_mul_gradients(h, *h.sources)
  can_fuse = operands.can_fuse_prologue(specs[:2], gradients, BOTH_OF_G)
  if can_fuse and operands.can_fuse_input(specs[2:], h):
    lent = (*joint.lent(ws[:2], sites[:2]), sites[2])
    return _swiglu_mlp((specs, name, save), *site_checks.mark_used(specs, x, ws, lent))
  return _separate(eqns, x, ws, sites, name, save)


def _separate(eqns, x, ws, sites, name: str, save: Quant | None):
  gate, up = (residuals.product(y, name) for y in dots.dots(eqns[:2], x, ws[:2], sites[:2]))
  return dots.dot(eqns[2], prologue.silu_mul(gate, up, save=save), ws[2], sites[2])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu_mlp(static, x, ws, taps, inputs):
  del taps
  specs, _, _ = static
  gate, up = linear.forward_only(specs[:2], x, ws[:2], inputs[:2])
  return linear.forward_only(specs[2:], prologue.silu_mul(gate, up), ws[2:], inputs[2:])[0]


def _fwd(static, x, ws, taps, inputs):
  specs, name, save = static
  gate_up, first = linear.forward_with_residuals(specs[:2], x, ws[:2], taps[:2], inputs[:2])
  h = prologue.silu_mul(*(residuals.product(y, name) for y in gate_up), save=save)
  (y,), second = linear.forward_with_residuals(specs[2:], h, ws[2:], taps[2:], inputs[2:])
  return y, (first, second)


def _bwd(static, saved, g):
  specs, _, _ = static
  first, second = saved
  dh, dw_down, taps_down = linear.gradients(specs[2:], second, (g,))
  gate, up = second.input(specs[2].x_dtype).sources
  g_gate_up = prologue.silu_mul_gradients(dh, gate, up)
  dx, dws, taps = linear.gradients(specs[:2], first, g_gate_up)
  taps = *taps, *taps_down
  roots = site_checks.of_roots((*first.inputs, *second.inputs), taps)
  made = linear.vjp_of_input(specs[:2], first, dx), (*dws, *dw_down), taps
  return *derivative.once(made, linear.quantized(specs)), roots


_swiglu_mlp.defvjp(_fwd, _bwd)
