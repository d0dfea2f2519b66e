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

import jax

from fp8jax.ops import operands, site
from fp8jax.ops.gemm_spec import GemmSpec, Role, ScalingInputs
from fp8jax.recipe.gemm import Recipe

# Order of the numbers of a switch.
TENSORS = ("x", "w")

_PLAIN = Recipe("switched off")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SwitchedSite(site.Site):
  """A site with a switch, in the place of one without.

  Attributes:
    switch: float32 [2] or [2, tokens], of TENSORS; [N, ...] when stacked.
  """

  switch: jax.Array | None = None

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
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(site.Site)}
    return SwitchedSite(**fields, switch=numbers)

  return site.tree_map(one, sites, switches)


@dataclasses.dataclass(frozen=True)
class Switched:
  """The operands of y = (x + on_x dx)(w + on_w dw), where dx and dw are rounding errors.

  Attributes:
    spec: of the product, in the compute dtype.
    x: Operand, with its rounding error as far as it is switched on.
    w: Operand; without its rounding error where a switch is per token.
    error_of_w: None, or dw where a switch is per token.
    on_w: None, or [T, 1], the factor of y's part by dw.
  """

  spec: GemmSpec
  x: operands.Operand
  w: operands.Operand
  error_of_w: operands.Operand | None = None
  on_w: jax.Array | None = None


def operands_of(spec: GemmSpec, x, w, inputs: ScalingInputs, switch) -> Switched:
  """Both operands of the forward GEMM of a site with a switch.

  Args:
    spec: of the site, whose recipe quantizes the forward GEMM.
    x, w: as `dot` takes them.
    inputs: of the site.
    switch: float32 [2], without a gradient, or [2, T], with one; of TENSORS.

  Raises:
    ValueError: an einsum with batch letters, or devices share a tensor.
  """
  if spec.letters.batch or spec.layout.mesh is not None:
    raise ValueError(
      f"site {spec.name}: switches are for one device and products without batch letters; measure "
      "a dense model with mesh.data=1, mesh.fsdp=1 and mesh.tensor=1"
    )
  plain = dataclasses.replace(spec, recipe=_PLAIN, backends=("xla", "xla", "xla"))

  def make(spec: GemmSpec, role: Role):
    return operands.operand(spec, role, x if role is Role.X_FWD else w, inputs)

  def dequantized(role: Role):
    return jax.lax.stop_gradient(make(spec, role).value.dequantize(spec.x_dtype))

  on_x, on_w = switch
  plain_x, plain_w = make(plain, Role.X_FWD), make(plain, Role.W_FWD)
  if switch.ndim == 1:
    value_x = _measured(plain_x.value, lambda: dequantized(Role.X_FWD), on_x)
    value_w = _measured(plain_w.value, lambda: dequantized(Role.W_FWD), on_w)
    return Switched(plain, _with_value(plain_x, value_x), _with_value(plain_w, value_w))
  error_x = dequantized(Role.X_FWD) - jax.lax.stop_gradient(plain_x.value)
  error_w = dequantized(Role.W_FWD) - jax.lax.stop_gradient(plain_w.value)
  x_with_error = plain_x.value + on_x[:, None].astype(error_x.dtype) * error_x
  return Switched(
    plain, _with_value(plain_x, x_with_error), plain_w, _with_value(plain_w, error_w), on_w[:, None]
  )


def _with_value(operand: operands.Operand, value) -> operands.Operand:
  return dataclasses.replace(operand, value=value)


def _measured(x, quantized, on):
  """x at a switch of `on`: to the bit x at 0 and `quantized()` at 1, which 0 does not compute."""
  on = jax.lax.stop_gradient(on).astype(x.dtype)
  # x + on * (quantized - x) would miss `quantized` by a rounding.
  return jax.lax.cond(on == 0, lambda: x, lambda: (1 - on) * x + on * quantized())
