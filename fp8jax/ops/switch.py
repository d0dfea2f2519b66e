"""Quantization that data switch on and off: one program for the diagnosis of many sites.

A site's switch has a number for x and one for w: 0 multiplies the operand as the compute dtype has
it, 1 as the forward GEMM of the site's recipe quantizes it, and numbers between lie on the line
from one to the other. An operand whose switch is 0 is not quantized at all. The product is one of
the compute dtype, of dequantized operands: a recipe that scales its partial sums differs from it by
the rounding of sums alone (float32; a narrower compute dtype also rounds dequantized operands).

Numbers per token are for differentiation, in which rounding errors are constants. The gradient at 0
is the effect of a token's own rounding error on the losses of all tokens, to first order.

Letters: T is a token, a row of the GEMM.
"""

import dataclasses
from typing import Any

import jax

from fp8jax.ops import gemm_spec, linear, operands, stored_params
from fp8jax.ops import site as site_lib
from fp8jax.ops.gemm_spec import Role
from fp8jax.ops.site import ScalingInputs
from fp8jax.recipe.gemm import Recipe

# Order of the numbers of a switch.
TENSORS = ("x", "w")

_PLAIN = Recipe("switched off")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SwitchedSite(site_lib.Site):
  """A site with a switch, in the place of one without.

  Attributes:
    switch: float32 [2] or [2, tokens], of TENSORS; [N, ...] when stacked.
  """

  switch: Any = None

  def claim(self):
    """Refuses: `dot` alone reads the switch, and claims nothing."""
    raise ValueError(
      f"site {self.name!r} has a switch, and the operation that multiplies it reads none; leave "
      "the site out, or multiply it by `dot`"
    )


def with_switches(sites, switches):
  """The sites with switches.

  Args:
    switches: a tree like the sites, of SwitchedSite.switch, or None for a site that multiplies as
      its recipe says.
  """

  def one(own, numbers):
    if numbers is None:
      return own
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(site_lib.Site)}
    return SwitchedSite(**fields, switch=numbers)

  return site_lib.tree_map(one, sites, switches)


def dot(eqn: str, x, w, site: SwitchedSite, out_dtype):
  """`dots.dot` of an array and a weight at a site with a switch, differentiated as it is written.

  y = (x + on_x dx)(w + on_w dw), where dx and dw are the rounding errors of both operands of the
  forward GEMM, which the site's recipe quantizes. A switch per token, and it alone, has a gradient;
  its part by dw is a product of its own, of which x is a constant.

  Raises:
    ValueError: an einsum with batch letters, or devices share a tensor.
  """
  spec = gemm_spec.make_spec(eqn, x, w, site, out_dtype=out_dtype)
  w, inputs = stored_params.gemm_operand(w), ScalingInputs.of(site)
  if spec.letters.batch or spec.layout.mesh is not None:
    raise ValueError(
      f"site {spec.name}: switches are for one device and products without batch letters; measure "
      "a dense model with mesh.data=1, mesh.fsdp=1 and mesh.tensor=1"
    )
  fwd = spec.recipe.fwd
  if fwd.compensates or fwd.gain or any(fwd.rotate_rows) or getattr(fwd.lhs, "transform", None):
    raise ValueError(
      f"site {spec.name}: recipe {spec.recipe.name!r} rotates, compensates or multiplies by a "
      "gain, and a switch measures rounding alone; leave it out of the measured recipes"
    )
  plain = dataclasses.replace(spec, recipe=_PLAIN, backends=("xla", "xla", "xla"))

  def dequantized(role: Role, t):
    value = operands.operand(spec, role, t, inputs).value
    is_code = spec.quant(role) is not None
    return jax.lax.stop_gradient(value.dequantize(spec.x_dtype) if is_code else value)

  def product(x, w):
    a, b = (dataclasses.replace(of, value=t) for of, t in ((plain_x, x), (plain_w, w)))
    return linear.product(plain, "fwd", a, b, spec.out_dtype, inputs)

  on_x, on_w = site.switch
  plain_x = operands.operand(plain, Role.X_FWD, x, inputs)
  plain_w = operands.operand(plain, Role.W_FWD, w, inputs)
  if on_x.ndim == 0:
    value_x = _measured(plain_x.value, lambda: dequantized(Role.X_FWD, x), on_x)
    y = product(value_x, _measured(plain_w.value, lambda: dequantized(Role.W_FWD, w), on_w))
  else:
    error_x = dequantized(Role.X_FWD, x) - jax.lax.stop_gradient(plain_x.value)
    error_w = dequantized(Role.W_FWD, w) - jax.lax.stop_gradient(plain_w.value)
    value_x = plain_x.value + on_x[:, None].astype(error_x.dtype) * error_x
    y = product(value_x, plain_w.value)
    # This part is 0 at switches of 0.
    y = y + on_w[:, None].astype(y.dtype) * product(jax.lax.stop_gradient(value_x), error_w)
  return operands.unflatten(y, plain_x, plain_w, spec.letters.y)


def _measured(x, quantized, on):
  """x at a switch of `on`: to the bit x at 0 and `quantized()` at 1, which 0 does not compute."""
  on = jax.lax.stop_gradient(on).astype(x.dtype)
  # x + on * (quantized - x) would miss `quantized` by a rounding.
  return jax.lax.cond(on == 0, lambda: x, lambda: (1 - on) * x + on * quantized())
