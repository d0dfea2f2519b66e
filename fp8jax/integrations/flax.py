"""Our dot in Flax layers: one argument of `flax.linen` or `flax.nnx` layers picks the recipe.

  nn.Dense(64, dot_general_cls=linen_dot_general("block_128"))                  # DenseGeneral too
  Einsum((8, 16), "...d,df->...f", recipe="block_128")                          # for nn.Einsum
  nnx.Linear(8, 64, dot_general=nnx_dot_general("block_128"), rngs=rngs)        # LinearGeneral too
  nnx.Einsum("bd,df->bf", (8, 64), einsum_op=nnx_einsum("block_128"), rngs=rngs)
  nn.Conv(64, (3, 3), conv_general_dilated_cls=linen_conv("block_128"))         # as patches
  nnx.Conv(8, 64, (3, 3), conv_general_dilated=nnx_conv("block_128"), rngs=rngs)

With current scales nothing else changes. A recipe with delayed or static scales has its Site in
linen's collection "fp8" or in nnx Variables of type Fp8. Differentiate the loss with respect to
them too. The cotangent of a Site holds its tensor statistics, of which `fp8jax.site.update`
(`nnx_update`) makes the sites of the next step; `fp8jax.site.calibrate` (`nnx_calibrate`) makes the
first. Statistics of microbatches are joined by `fp8jax.site.combine`. Every product needs a layer
of its own, under `nn.scan` and `nn.vmap` too (variable_axes={"fp8": 0}). Recipes that round
stochastically draw from the random stream "fp8". `pip install 'fp8jax[flax]'` installs Flax.

Assumes: lhs is an activation and rhs a kernel, as in every Flax layer. Flax casts kernels to the
layer's dtype before any hook; `promote_dtype=keep_master` hands us the master instead.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx, serialization
from flax.linen import dtypes

from fp8jax.ops import convolution, dots, gemm_spec
from fp8jax.ops import site as site_lib
from fp8jax.quantization import amax_history, quantized_tensor
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import Recipe

# Of linen's variables; also the name of the random stream.
COLLECTION = "fp8"


# --- layers --------------------------------------------------------------------------------------


@functools.cache
def linen_dot_general(
  recipe: Recipe | str, matmul: str = "auto"
) -> Callable[[], "LinenDotGeneral"]:
  """For `dot_general_cls` of nn.Dense, nn.DenseGeneral and what is made of them.

  Args:
    recipe: a Recipe or the name of one.
    matmul: "auto" or a backend of kernels.gemm.
  """
  return _maker(LinenDotGeneral, "linen_dot_general", "dot_general", _as_recipe(recipe), matmul)


@functools.cache
def linen_conv(recipe: Recipe | str, matmul: str = "auto") -> Callable[[], "LinenConv"]:
  """For `conv_general_dilated_cls` of nn.Conv: patches times a matrix (ops/convolution.py).

  Args:
    recipe, matmul: see `linen_dot_general`.
  """
  return _maker(LinenConv, "linen_conv", "conv_general_dilated", _as_recipe(recipe), matmul)


def _maker(module, name: str, argument: str, recipe: Recipe, matmul: str):
  def make(*args, **options):
    if args or options:
      raise TypeError(
        f"{name}({recipe.name!r}) multiplies nothing itself: give it as {argument}_cls=, not as "
        f"{argument}="
      )
    return module(recipe, matmul)

  return make


class LinenDotGeneral(nn.Module):
  """`jax.lax.dot_general` with a site: what `linen_dot_general` makes."""

  recipe: Recipe
  matmul: str = "auto"

  def setup(self):
    self.stored_site = None
    if not isinstance(self.recipe, Recipe):
      raise TypeError(
        f"LinenDotGeneral's recipe is {self.recipe!r}, expected a Recipe; "
        f"linen_dot_general({self.recipe!r}) makes one from a name"
      )
    if not self.recipe.is_stateful:
      return
    if not (self.has_variable(COLLECTION, "site") or self.is_mutable_collection(COLLECTION)):
      raise ValueError(
        f"{self._name()}: recipe {self.recipe.name!r} remembers amaxes in collection "
        f"{COLLECTION!r}, which `apply` was not given. Pass all that `init` returned: "
        f"model.apply({{'params': params, {COLLECTION!r}: variables[{COLLECTION!r}]}}, ...)"
      )
    # Unboxing would copy the site, and a copy forgets that it is in use (Site.claim).
    self.stored_site = self.variable(
      COLLECTION, "site", _fresh, self.recipe, self.matmul, self._name(), unbox=False
    )

  def __call__(self, lhs, rhs, dimension_numbers, **options):
    return dots.dot_general(lhs, rhs, dimension_numbers, self._site(), **options)

  def einsum(self, eqn: str, x, w, **options):
    return dots.dot(eqn, x, w, self._site(), out_dtype=_out_dtype(**options))

  def _site(self) -> site_lib.Site:
    key = self.make_rng(COLLECTION) if self.recipe.is_random else None
    if self.stored_site is None:
      return site_lib.unobserved(self.recipe, self.matmul, self._name(), key)
    return _with_key(cast(site_lib.Site, self.stored_site.value), key)

  def _name(self) -> str:
    """The layer's."""
    return "/".join(self.path[:-1] or self.path)


class LinenConv(LinenDotGeneral):
  """`jax.lax.conv_general_dilated` with a site: what `linen_conv` makes."""

  def __call__(self, *operands, **options):
    return _conv(self._site, *operands, **options)


class Einsum(nn.Einsum):
  """nn.Einsum, which has no hook for its product, in a recipe; the same parameters."""

  recipe: Recipe | str = "block_128"
  matmul: str = "auto"

  @nn.compact
  def __call__(self, inputs, einsum_str: str | None = None):
    given = nn.merge_param("einsum_str", self.einsum_str, einsum_str)
    eqn = gemm_spec.explicit(given, jnp.ndim(inputs), len(self.shape))
    operands, _, y = eqn.partition("->")
    w = operands.partition(",")[2]
    kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
    sizes, bias = dict(zip(w, self.shape)), None
    if self.use_bias:
      shape = [sizes[c] for c in y if c in sizes]
      bias = self.param("bias", self.bias_init, shape, self.param_dtype)
    inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
    product = linen_dot_general(self.recipe, self.matmul)().einsum(
      given,
      inputs,
      kernel,
      precision=self.precision,
      preferred_element_type=self.preferred_element_type,
    )
    return product if bias is None else product + bias.reshape([sizes.get(c, 1) for c in y])


class Fp8(nnx.Variable):
  """The Site of a layer whose recipe remembers."""


class nnx_dot_general(nnx.Module):  # noqa: N801  called like the function that it replaces
  """`jax.lax.dot_general` with a site, for `dot_general` of nnx.Linear and nnx.LinearGeneral.

  Make one per layer, when the layer is made: what `dot_general_cls` makes in every call forgets.
  """

  def __init__(
    self, recipe: Recipe | str, matmul: str = "auto", *, rngs: nnx.Rngs | None = None,
    name: str = "",
  ):  # fmt: skip
    """
    Args:
      recipe: a Recipe or the name of one.
      matmul: "auto" or a backend of kernels.gemm.
      rngs: where the recipe rounds stochastically.
      name: of the layer, in error messages; "" is "dot" or "einsum".
    """
    recipe, name = _as_recipe(recipe), name or type(self).__name__.split("_")[1]
    if recipe.is_random and rngs is None:
      raise ValueError(
        f"recipe {recipe.name!r} rounds stochastically: give rngs=nnx.Rngs(...), of which it takes "
        f"the stream {COLLECTION!r}"
      )
    self.recipe, self.matmul, self.name = recipe, matmul, name
    self.stored_site = Fp8(_fresh(recipe, matmul, name)) if recipe.is_stateful else None
    self.rngs = rngs[COLLECTION].fork() if recipe.is_random and rngs is not None else None

  def __call__(self, lhs, rhs, dimension_numbers, **options):
    return dots.dot_general(lhs, rhs, dimension_numbers, self._site(), **options)

  def _site(self) -> site_lib.Site:
    key = None if self.rngs is None else self.rngs()
    if self.stored_site is None:
      return site_lib.unobserved(self.recipe, self.matmul, self.name, key)
    # get_value would copy the site, and a copy forgets that it is in use (Site.claim).
    return _with_key(self.stored_site.get_raw_value(), key)


class nnx_einsum(nnx_dot_general):  # noqa: N801
  """An einsum with a site, for `einsum_op` of nnx.Einsum; see `nnx_dot_general`."""

  def __call__(self, eqn: str, x, w, **options):
    return dots.dot(eqn, x, w, self._site(), out_dtype=_out_dtype(**options))


class nnx_conv(nnx_dot_general):  # noqa: N801
  """A convolution with a site, for `conv_general_dilated` of nnx.Conv; see `nnx_dot_general`."""

  def __call__(self, *operands, **options):
    return _conv(self._site, *operands, **options)


def keep_master(*arrays, dtype=None, inexact: bool = True):
  """For `promote_dtype` of a layer: input and bias in its dtype, the kernel as it is stored.

  The kernel is then rounded once, from the master, and its gradient has the master's dtype. Flax's
  own promotion casts it to the layer's dtype first.
  """
  if len(arrays) == 1:  # nnx passes one tuple
    (arrays,) = arrays
  x, kernel, bias = arrays
  dtype = dtypes.canonicalize_dtype(x, kernel, bias, dtype=dtype, inexact=inexact)
  return jnp.asarray(x, dtype), kernel, None if bias is None else jnp.asarray(bias, dtype)


# --- what layers remember ------------------------------------------------------------------------


def nnx_update(model: nnx.Module, gradient: nnx.State) -> nnx.State:
  """Updates the scaling states of `model` in place and returns the gradient without them.

  Args:
    gradient: with respect to nnx.DiffState(0, nnx.Any(nnx.Param, Fp8)).
  """
  seen, rest = nnx.split_state(gradient, Fp8, ...)
  if not jax.tree.leaves(seen) and jax.tree.leaves(nnx.state(model, Fp8)):
    raise ValueError(
      "the gradient has no observations of the model's Fp8 sites: take it with respect to "
      "nnx.DiffState(0, nnx.Any(nnx.Param, Fp8))"
    )
  nnx.update(model, site_lib.update(nnx.state(model, Fp8), seen))
  return rest


def nnx_calibrate(model: nnx.Module, loss: Callable[[Any], jax.Array]):
  """`site.calibrate`, of a model in place.

  Args:
    loss: of the model, e.g. lambda model: loss(model, batch).
  """
  sites = nnx.state(model, Fp8)

  def of(sites):
    probe = nnx.clone(model)
    nnx.update(probe, sites)
    return loss(probe)

  nnx.update(model, site_lib.calibrate(sites, of))


# --- pieces --------------------------------------------------------------------------------------


def _as_recipe(recipe: Recipe | str) -> Recipe:
  return rules.recipe_by_name(recipe) if isinstance(recipe, str) else recipe


def _fresh(recipe: Recipe, matmul: str, name: str) -> site_lib.Site:
  """A site to keep; keys are new with every use, and cannot be differentiated."""
  return dataclasses.replace(site_lib.single(recipe, matmul, name), key=None)


def _with_key(site: site_lib.Site, key) -> site_lib.Site:
  if key is None:
    return site
  site.claim()  # the copy would not remember
  return dataclasses.replace(site, key=key)


def _conv(
  site, *operands, precision=None, preferred_element_type=None, out_sharding=None, **options
):
  if "lhs" in options:
    raise TypeError(
      "nn.ConvLocal asks its hook for a shape and multiplies by another function: leave "
      "conv_general_dilated_cls out"
    )
  dtype = _out_dtype(
    precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding
  )
  return convolution.conv_general_dilated(*operands, **options, recipe=site(), out_dtype=dtype)


def _out_dtype(*, precision=None, preferred_element_type=None, out_sharding=None):
  """The dtype of a product's result, None for that of lhs."""
  for name, value in (("precision", precision), ("out_sharding", out_sharding)):
    if value is not None:
      raise ValueError(f"{name}={value!r}: the recipe decides how to multiply; leave it None")
  return preferred_element_type


def _to_state_dict(site: site_lib.Site):
  return {} if site.scaling_state is None else dict(vars(site.scaling_state))


def _from_state_dict(site: site_lib.Site, state) -> site_lib.Site:
  own = site.scaling_state
  if own is None:
    return site
  if not state:
    raise ValueError(
      f"site {site.name!r}: recipe {site.recipe.name!r} remembers amaxes, and the state that is "
      "restored has none: restore into sites of the recipe that it was saved with"
    )
  restored = amax_history.ScalingState(**state)
  if restored.amax_3.shape != own.amax_3.shape:
    raise ValueError(
      f"site {site.name!r} has amaxes of shape {own.amax_3.shape}, and the state that is restored "
      f"{restored.amax_3.shape}: layers are stacked in one of the two"
    )
  return dataclasses.replace(
    site, scaling_state=amax_history.resized(restored, own.history_3H.shape[-1])
  )


def _moment_to_state_dict(x: quantized_tensor.QuantizedTensor):
  reading = quantized_tensor.reading(x.quant)
  return {"reading": reading, "data": x.data, "scale": x.scale, "power": x.power}


def _moment_from_state_dict(x: quantized_tensor.QuantizedTensor, state):
  own = quantized_tensor.reading(x.quant)
  if state["reading"] != own:
    raise ValueError(
      f"the state that is restored holds {state['reading']}, and {own} is expected: take the "
      "moment_format that it was saved with"
    )
  arrays = {name: state[name] for name in ("data", "scale", "power")}
  return dataclasses.replace(x, **arrays)


# So that flax.serialization saves scaling states and moments with the parameters. A tap is always
# zeros.
serialization.register_serialization_state(
  site_lib.Site, _to_state_dict, _from_state_dict, override=True
)
serialization.register_serialization_state(
  quantized_tensor.QuantizedTensor, _moment_to_state_dict, _moment_from_state_dict, override=True
)
