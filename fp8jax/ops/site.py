"""A site: one linear layer's place in the model, its precision, and what was observed there.

`Site` rides beside the parameters (same keys, stacked over layers for scan). Its static part says
how to multiply; its one array, `tap`, is zeros whose cotangent carries observations out of the
backward pass: differentiating the loss with respect to the sites returns what every site saw. When
nobody differentiates it, XLA drops the observation.

Rule: one site per GEMM call. A site used twice would add its observations.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fp8jax import axes, params, recipes
from fp8jax.kernels import backend as backend_lib
from fp8jax.ops import collectives
from fp8jax.recipe import WHOLE, Recipe

PASSES = ("fwd", "dgrad", "wgrad")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Site:
  """How one linear layer multiplies.

  Attributes:
    tap: float32 [3] ([N, 3] when stacked), zeros. Its cotangent is the largest magnitude of
      (x, w, g), NaN if any element is NaN.
    name: path of the weight, e.g. "layers/mlp/up".
    recipe: precision of the three GEMMs.
    backends: implementation of (fwd, dgrad, wgrad).
    layout: where the letters of x, w and y live.
  """

  tap: jax.Array
  name: str = dataclasses.field(default="", metadata=dict(static=True))
  recipe: Recipe = dataclasses.field(default=recipes.BF16, metadata=dict(static=True))
  backends: tuple[str, str, str] = dataclasses.field(
    default=("xla", "xla", "xla"), metadata=dict(static=True)
  )
  layout: axes.Layout = dataclasses.field(default=axes.LOCAL, metadata=dict(static=True))

  def with_layout(self, layout: axes.Layout) -> "Site":
    return dataclasses.replace(self, layout=layout)


def single(recipe: Recipe | str = "block_128", matmul: str = "auto", name: str = "dot") -> Site:
  """A site for use outside a model: one device, no sharding table.

  Args:
    recipe: a Recipe or the name of one.
    matmul: "auto" or a backend of kernels.scaled_matmul.
  """
  recipe = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
  device = backend_lib.current_device()
  # Sizes are unknown here and no current backend depends on them.
  chosen = _choose(recipe, GemmSize(0, 0, 0), device, matmul)
  return Site(jnp.zeros(3, jnp.float32), name, recipe, chosen)


def _choose(
  recipe: Recipe, size: "GemmSize", device: backend_lib.Device, matmul: str
) -> tuple[str, str, str]:
  """Backends of (fwd, dgrad, wgrad)."""

  def one(which):
    problem = backend_lib.Problem(*size.of(which), getattr(recipe, which), device)
    return backend_lib.choose(problem, matmul).backend

  return one("fwd"), one("dgrad"), one("wgrad")


def recipe_by_name(name: str) -> Recipe:
  if name not in recipes.RECIPES:
    near = difflib.get_close_matches(name, recipes.RECIPES, 1, 0.0)
    raise ValueError(
      f"unknown recipe {name!r}; did you mean {near[0]!r}? Known: {', '.join(recipes.RECIPES)}"
    )
  return recipes.RECIPES[name]


def match_rules(names, rules) -> dict[str, str]:
  """First matching rule wins, on the whole name.

  Args:
    names: site names.
    rules: ordered (regular expression, value) pairs.

  Raises:
    ValueError: a name that no rule covers, or a rule that decides nothing.
  """
  chosen, used = {}, set()
  for name in names:
    for i, (pattern, value) in enumerate(rules):
      if re.fullmatch(pattern, name):
        chosen[name] = value
        used.add(i)
        break
  problems = []
  missing = [name for name in names if name not in chosen]
  if missing:
    problems.append(
      f"no rule in precision.rules covers {', '.join(missing)}; add one, for example ('.*', 'bf16')"
    )
  for i, (pattern, value) in enumerate(rules):
    if i not in used:
      problems.append(
        f"rule ({pattern!r}, {value!r}) in precision.rules decides nothing: it matches no site of "
        f"{', '.join(names)}, or earlier rules already did"
      )
  if problems:
    raise ValueError("; ".join(problems))
  return chosen


@dataclasses.dataclass(frozen=True)
class GemmSize:
  """Global sizes of a site's forward GEMM: tokens x produced x contracted."""

  tokens: int
  produced: int
  contracted: int

  def of(self, which: str) -> tuple[int, int, int]:
    """(M, N, K) of one of the three GEMMs."""
    t, p, c = self.tokens, self.produced, self.contracted
    return {"fwd": (t, p, c), "dgrad": (t, c, p), "wgrad": (c, p, t)}[which]


def find_sites(declaration) -> dict[str, params.Param]:
  """{site name: its weight's Param} for every GEMM weight of a declaration tree."""
  flat = params.flatten(declaration)
  return {name: p for name, p in flat.items() if p.inputs is not None}


def build_sites(
  declaration,
  dims: Mapping[str, int],
  rules,
  layout: axes.Layout = axes.LOCAL,
  *,
  matmul: str = "auto",
  device: backend_lib.Device | None = None,
  tokens: int = 0,
):
  """The tree of Sites for a declaration tree.

  Args:
    declaration: tree of Param; entries with `inputs` become sites.
    dims: letter -> size.
    rules: ordered (regular expression, recipe name); see match_rules.
    layout: mesh and sharding tables.
    matmul: requested backend.
    device: hardware to choose backends for; default: the one JAX runs on.
    tokens: tokens per device and GEMM call, for the backends' size checks.
  """
  device = device or backend_lib.current_device()
  found = find_sites(declaration)
  names = match_rules(list(found), rules)
  flat = {}
  for path, param in found.items():
    recipe = recipe_by_name(names[path])
    size = local_size(param, dims, layout, tokens)
    chosen = _choose(recipe, size, device, matmul)
    stacked = (dims["N"],) if param.letters.startswith("N") else ()
    flat[path] = Site(jnp.zeros((*stacked, 3), jnp.float32), path, recipe, chosen, layout)
  return params.unflatten(flat)


def local_size(param, dims, layout: axes.Layout, tokens: int) -> GemmSize:
  """Sizes of a site's GEMM on one device, after weights are gathered for compute."""
  contracted, produced = param.gemm_letters

  def extent(letters):
    return math.prod(dims[x] // layout.size(layout.act_axes(x)) for x in letters)

  return GemmSize(tokens, extent(produced), extent(contracted))


def find_misaligned_tiles(declaration, dims, rules, layout: axes.Layout, tokens: int) -> list[str]:
  """Scale tiles of GEMM operands that would straddle devices, in words.

  Such a tile's scale would depend on the mesh. (Weights split for storage only are not meant: those
  are gathered first where their tiles straddle, see `gathers_narrow`.)

  Args:
    tokens: tokens of a GEMM on one device.
  """
  problems = []
  found = find_sites(declaration)
  names = match_rules(list(found), rules)
  batch_shards = layout.size(layout.act_axes("B"))

  def check(what, extent, shards, tile, fix):
    if shards > 1 and tile != WHOLE and extent // shards % tile:
      problems.append(
        f"{what}: {extent} over {shards} devices is {extent // shards} per device, no multiple of "
        f"the scale tile {tile}; {fix}"
      )

  for path, param in found.items():
    recipe = recipe_by_name(names[path])
    if not recipe.fwd.is_narrow:
      continue
    contracted, produced = param.gemm_letters
    fix = f"lower mesh.tensor, or give {path} recipe 'bf16' or 'tensor_current'"
    for role, letters, tiles in (
      ("input", contracted, _tiles(recipe, contracted=True)),
      ("output", produced, _tiles(recipe, contracted=False)),
    ):
      shards = layout.size(layout.act_axes_of(letters))
      extent = math.prod(dims[x] for x in letters)
      for tile in sorted(tiles):
        check(f"{path}, {role} {letters}", extent, shards, tile, fix)
    for tile in sorted({q.tile[1] for q in (recipe.wgrad.lhs, recipe.wgrad.rhs) if q}):
      fix = "make batch / accumulation x length per device a multiple of it"
      check(
        f"{path}, tokens of its weight gradient", tokens * batch_shards, batch_shards, tile, fix
      )
  return problems


def _tiles(recipe: Recipe, contracted: bool) -> set[int]:
  """Tile extents along the letters that the forward GEMM contracts, or along those it produces."""
  f, d, w = recipe.fwd, recipe.dgrad, recipe.wgrad
  if contracted:
    operands = ((f.lhs, 1), (f.rhs, 1), (d.rhs, 0), (w.lhs, 0))
  else:
    operands = ((f.rhs, 0), (d.lhs, 1), (d.rhs, 1), (w.rhs, 0))
  return {quant.tile[axis] for quant, axis in operands if quant is not None}


def gathers_narrow(param: params.Param, recipe: Recipe, dims, layout: axes.Layout) -> bool | None:
  """Whether a weight split for storage is gathered in its narrow format; None: nothing is.

  False costs two to four times the bytes: the shard holds no whole number of scale tiles.
  """
  contracted, produced = param.gemm_letters
  letters = contracted + produced
  if not any(collectives.extra_axes(layout, c) for c in letters):
    return None
  shard = {c: dims[c] // layout.size(layout.weight_axes(c)) for c in letters}
  rhs = recipe.fwd.rhs
  return rhs is not None and collectives.tiles_fit(shard, produced, contracted, rhs, layout)
