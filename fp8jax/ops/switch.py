"""Quantization that data switch on and off: one program for the diagnosis of many sites.

A site's switch has a number for x and one for w: 0 multiplies the operand as the compute dtype has
it, 1 as the forward GEMM of the site's recipe quantizes it, and numbers between lie on the line
from one to the other. An operand whose switch is 0 is not quantized at all. The product is one of
the compute dtype, of dequantized operands: a recipe that scales its partial sums differs from it by
the rounding of sums alone (float32; a narrower compute dtype also rounds dequantized operands).

Numbers per token are for differentiation, in which rounding errors are constants. The gradient at 0
is the effect of a token's own rounding error on the losses of all tokens, to first order.

Instead of a switch a site may have options: recipes, of which the number that is data chooses one.
Its product is the chosen recipe's, up to the rounding of sums as above, and its gradients pass
straight through the rounding, as those of fp8jax/recipe/served.py. The program has a quantizer per
option, and a step runs the chosen ones alone (not under vmap, which runs all and selects). The
dequantized operands are residuals in the compute dtype.

Letters: T is a token, a row of the GEMM.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.ops import gemm_spec, operands, products, stored_params
from fp8jax.ops import site as site_lib
from fp8jax.ops.gemm_spec import Role
from fp8jax.ops.site import ScalingInputs
from fp8jax.recipe.gemm import Backward, Recipe

# Order of the numbers of a switch.
TENSORS = ("x", "w")

_PLAIN, _XLA = Recipe("switched off"), ("xla", "xla", "xla")


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptionSite(SwitchedSite):
  """A site whose recipe is data, in the place of one without.

  Attributes:
    switch: int32 scalar, the number of an option; [N] when stacked.
    options: see `with_options`.
  """

  options: tuple[Recipe, ...] = dataclasses.field(default=(), metadata=dict(static=True))


def with_switches(sites, switches):
  """The sites with switches.

  Args:
    switches: a tree like the sites, of SwitchedSite.switch, or None for a site that multiplies as
      its recipe says.
  """

  return site_lib.tree_map(
    lambda own, numbers: own if numbers is None else SwitchedSite(**_fields(own), switch=numbers),
    sites, switches,
  )  # fmt: skip


def with_options(sites, options: Sequence[Recipe], choices):
  """The sites with options.

  Args:
    options: recipes that quantize nothing, or have current scales, round to the nearest and pass
      gradients straight through, unquantized: those of served.py without static scales.
    choices: a tree like the sites, of OptionSite.switch, or None for a site that multiplies as its
      recipe says.

  Raises:
    ValueError: another recipe.
  """
  for option in options:
    if problem := option_problem(option):
      raise ValueError(problem)

  def one(own, choice):
    if choice is None:
      return own
    return OptionSite(**_fields(own), switch=choice, options=tuple(options))

  return site_lib.tree_map(one, sites, choices)


def option_problem(recipe: Recipe) -> str:
  """Why a recipe is no option of `with_options`, or ""."""
  is_straight = recipe.backward is Backward.DEQUANTIZED
  is_straight &= not (recipe.dgrad.is_quantized or recipe.wgrad.is_quantized)
  is_straight &= not (recipe.estimate_w or recipe.estimate_x)
  if (recipe.is_quantized or recipe.estimate_w) and not is_straight:
    why = "has a backward pass of its own, and options pass gradients straight through"
  elif recipe.is_stateful or recipe.is_random:
    why = "has scales from past steps or rounds stochastically"
  else:
    why = _beside_rounding(recipe)
  known = "fp8_dynamic, int8, int4_dynamic, e2m1_dynamic, mxfp4_ste or bf16"
  return why and f"recipe {recipe.name!r} {why}; an option is, for example, {known}"


def _fields(own: site_lib.Site) -> dict[str, Any]:
  return {field.name: getattr(own, field.name) for field in dataclasses.fields(site_lib.Site)}


def _beside_rounding(recipe: Recipe) -> str:
  fwd = recipe.fwd
  changes = fwd.compensates or fwd.gain or any(fwd.rotate_rows)
  if changes or getattr(fwd.rhs, "transform", None):
    return "rotates, compensates or multiplies by a gain, and a switch is about rounding alone"
  return ""


def dot(eqn: str, x, w, site: SwitchedSite, out_dtype):
  """`dots.dot` of an array and a weight at a site with a switch, differentiated as it is written.

  y = (x + on_x dx)(w + on_w dw), where dx and dw are the rounding errors of both operands of the
  forward GEMM, which the site's recipe quantizes. A switch per token, and it alone, has a gradient;
  its part by dw is a product of its own, of which x is a constant. At a site with options both
  errors are those of the chosen one, and constants.

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
  plain = dataclasses.replace(spec, recipe=_PLAIN, backends=_XLA)
  plain_x = operands.operand(plain, Role.X_FWD, x, inputs)
  plain_w = operands.operand(plain, Role.W_FWD, w, inputs)

  def product(x, w):
    a, b = (dataclasses.replace(of, value=t) for of, t in ((plain_x, x), (plain_w, w)))
    return products.product(plain, "fwd", a, b, spec.out_dtype, inputs)

  if isinstance(site, OptionSite):
    specs = [dataclasses.replace(plain, recipe=option) for option in site.options]
    of_site = (site.switch, ScalingInputs(None, None, site.joint_amax))
    value_x = _chosen(specs, Role.X_FWD, x, plain_x.value, *of_site)
    value_w = _chosen(specs, Role.W_FWD, w, plain_w.value, *of_site)
    y = product(value_x, value_w)
  else:
    if problem := _beside_rounding(spec.recipe):
      raise ValueError(
        f"site {spec.name}: recipe {spec.recipe.name!r} {problem}; leave it out of the measured"
      )
    value_x = _Rounded(plain_x.value, lambda: _dequantized(spec, Role.X_FWD, x, inputs))
    value_w = _Rounded(plain_w.value, lambda: _dequantized(spec, Role.W_FWD, w, inputs))
    y = _switched(value_x, value_w, site.switch, product)
  return operands.unflatten(y, plain_x, plain_w, spec.letters.y)


@dataclasses.dataclass(frozen=True)
class _Rounded:
  """An operand of the compute dtype, and what makes the quantized one."""

  plain: Any
  quantized: Callable[[], Any]


def _switched(x: _Rounded, w: _Rounded, switch, product):
  on_x, on_w = switch
  if on_x.ndim == 0:
    return product(*(_measured(t.plain, t.quantized, on) for t, on in ((x, on_x), (w, on_w))))
  error_x = x.quantized() - jax.lax.stop_gradient(x.plain)
  error_w = w.quantized() - jax.lax.stop_gradient(w.plain)
  value_x = x.plain + on_x[:, None].astype(error_x.dtype) * error_x
  y = product(value_x, w.plain)
  # This part is 0 at switches of 0.
  return y + on_w[:, None].astype(y.dtype) * product(jax.lax.stop_gradient(value_x), error_w)


def _dequantized(spec: gemm_spec.GemmSpec, role: Role, t, inputs: ScalingInputs):
  value = operands.operand(spec, role, t, inputs).value
  is_code = spec.quant(role) is not None
  return jax.lax.stop_gradient(value.dequantize(spec.x_dtype) if is_code else value)


def _chosen(specs: Sequence[gemm_spec.GemmSpec], role: Role, t, plain, choice, inputs):
  """The operand as the chosen one of these quantizes it, with the gradient of `plain`."""
  quants = [spec.quant(role) for spec in specs]
  first = [quants.index(quant) for quant in quants]  # options may share a quantizer
  kept = sorted(set(first))
  branches = [functools.partial(_dequantized, specs[i], role, inputs=inputs) for i in kept]
  branch = jnp.asarray([kept.index(i) for i in first])[choice]
  quantized = jax.lax.switch(branch, branches, jax.lax.stop_gradient(t))
  # To the bit `quantized`, but for signs of zeros; NaN where x is no number, as amaxes would say.
  return quantized + (plain - jax.lax.stop_gradient(plain))


def _measured(x, quantized, on):
  """x at a switch of `on`: to the bit x at 0 and `quantized()` at 1, which 0 does not compute."""
  on = jax.lax.stop_gradient(on).astype(x.dtype)
  # x + on * (quantized - x) would miss `quantized` by a rounding.
  return jax.lax.cond(on == 0, lambda: x, lambda: (1 - on) * x + on * quantized())
