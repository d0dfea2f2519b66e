"""The tree of sites of a model: made of its declaration and rules, asked by name and layer."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import axes, params
from fp8jax.kernels import choose
from fp8jax.ops import site as site_lib
from fp8jax.ops.residuals import GemmInput
from fp8jax.ops.site import Activation, ActivationSite
from fp8jax.quantization import tensor_stats
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.gemm import Recipe


@dataclasses.dataclass(frozen=True)
class Backends:
  """The request that backends are chosen by.

  Attributes:
    matmul: "auto" or a backend of kernels.choose.
    device: hardware to choose for; None takes the one JAX runs on.
    tokens: per device and GEMM call, for the backends' size checks.
  """

  matmul: str = "auto"
  device: choose.Device | None = None
  tokens: int = 0


def local_size(param, dims, layout: axes.Layout, tokens: int) -> choose.GemmSize:
  """Sizes of a site's GEMM on one device, after weights are gathered for compute."""
  contracted, produced = param.gemm_letters

  def extent(letters):
    return math.prod(dims[x] // layout.size(layout.act_axes(x)) for x in letters)

  return choose.GemmSize(tokens, extent(produced), extent(contracted))


def find_sites(declaration) -> dict[str, params.Param]:
  """{site name: its weight's Param} for every GEMM weight of a declaration tree."""
  flat = params.flatten(declaration)
  return {name: p for name, p in flat.items() if p.inputs is not None}


def build_sites(
  declaration, dims: Mapping[str, int], rules, layout: axes.Layout = axes.LOCAL, *,
  backends: Backends = Backends(), statistics: int = tensor_stats.QUIET,
  save: GemmInput = GemmInput.UNQUANTIZED, activations: Mapping[str, Activation] | None = None,
):  # fmt: skip
  """The tree of Sites for a declaration tree.

  Sites under "layers" come as a tuple of trees, one for every run of layers that share their
  recipes, each stacked over its layers.

  Args:
    declaration: tree of Param; entries with `inputs` become sites.
    dims: letter -> size.
    rules: ordered (regular expression, recipe name); see rules.match.
    layout: mesh and sharding tables.
    backends: requested.
    statistics: tensor_stats.QUIET or tensor_stats.LOUD.
    save: form in which inputs of linear layers are residuals.
    activations: {path: declaration} of those that get a site too if statistics are LOUD.
  """
  device = backends.device or choose.current_device()
  weights = find_sites(declaration)

  def placed(path, is_stacked: bool, start, stop):
    """(name, layers) of a site of this run of layers."""
    name = rules_lib.range_name(path, start, stop, dims["N"]) if is_stacked else path
    return name, (start, stop) if is_stacked else ()

  def one(path, recipe_name, start, stop):
    recipe = rules_lib.recipe_by_name(recipe_name)
    size = local_size(weights[path], dims, layout, backends.tokens)
    chosen = choose.backends(recipe, size, device, backends.matmul)
    where = placed(path, weights[path].letters.startswith("N"), start, stop)
    return site_lib.fresh(recipe, *where, statistics, backends=chosen, layout=layout, save=save)

  def observing(path, activation: Activation, start, stop):
    name, layers = placed(path, path.startswith("layers/"), start, stop)
    stacked = (stop - start,) if layers else ()
    tap = jnp.zeros((*stacked, 1 + activation.has_gradient, tensor_stats.LOUD), jnp.float32)
    return ActivationSite(tap, name=name, layout=layout, layers=layers, letters=activation.letters)

  declared = activations if activations and statistics == tensor_stats.LOUD else {}
  layers, rest = [], {}
  for start, stop, chosen in rules_lib.segments(list(weights), dims.get("N", 1), rules):
    flat = {p: one(p, name, start, stop) for p, name in chosen.items()}
    flat |= {p: observing(p, a, start, stop) for p, a in declared.items()}
    layers.append(params.unflatten({p: s for p, s in flat.items() if p.startswith("layers/")}))
    rest = {p: s for p, s in flat.items() if not p.startswith("layers/")}
  tree = params.unflatten(rest)
  if any(layers):
    tree["layers"] = tuple(tree["layers"] for tree in layers)
  return tree


def taps(sites):
  """The taps alone: what a loss is differentiated with respect to."""
  return site_lib.tree_map(lambda s: s.tap, sites)


def with_taps(sites, taps):
  """The sites with other taps: differentiate a loss of this with respect to `taps`."""
  return site_lib.tree_map(lambda s, tap: dataclasses.replace(s, tap=tap), sites, taps)


def by_name(sites, stats) -> dict[str, jax.Array]:
  """A tree of observations, cotangents of `taps(sites)`, as {site name: [..., 3, S]}."""
  values = jax.tree.leaves(site_lib.tree_map(lambda s, x: [x], sites, stats))
  return dict(zip(site_lib.flatten(sites), values, strict=True))


def per_layer(sites, stats: Mapping[str, Any]) -> dict[str, Any]:
  """{site name: [N?, 3, S]} as {layer name: [3, S]}."""
  flat = {}
  for name, site in site_lib.flatten(sites).items():
    values = stats[name] if site.layers else [stats[name]]
    flat |= dict(zip(site.layer_names, values, strict=True))
  return flat


def recipes_of(sites) -> dict[str, Recipe]:
  """{layer's site: recipe}."""
  return {name: s.recipe for s in site_lib.flatten(sites).values() for name in s.layer_names}
