"""Where scale tiles would straddle devices: found before anything is compiled."""

import math

from fp8jax import axes
from fp8jax.ops import site_tree
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import WHOLE, Hadamard


def find_misaligned_tiles(declaration, dims, rules, layout: axes.Layout, tokens: int) -> list[str]:
  """Scale tiles of GEMM operands that would straddle devices, in words.

  Such a tile's scale would depend on the mesh. (Weights split for storage only are not meant: those
  are gathered first where their tiles straddle, see `gathers_narrow`.)

  Args:
    tokens: tokens of a GEMM on one device.
  """
  problems = []
  sites = site_tree.find_sites(declaration)
  batch_shards = layout.size(layout.act_axes("B"))

  def check(what, extent, shards, tile, fix):
    if shards > 1 and tile != WHOLE and extent // shards % tile:
      problems.append(
        f"{what}: {extent} over {shards} devices is {extent // shards} per device, no multiple of "
        f"the scale tile {tile}; {fix}"
      )

  for path, name in _distinct(sites, dims, rules):
    param, recipe = sites[path], rules_lib.recipe_by_name(name)
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
      fix = "make global_batch / grad_accum_steps x seq_len per device a multiple of it"
      check(
        f"{path}, tokens of its weight gradient", tokens * batch_shards, batch_shards, tile, fix
      )
  return problems


def find_broken_rotations(declaration, dims, rules, tokens: int) -> list[str]:
  """Hadamard blocks that do not divide what they rotate, in words.

  Args:
    tokens: tokens of a GEMM on one device.
  """
  problems = []
  sites = site_tree.find_sites(declaration)
  for path, name in _distinct(sites, dims, rules):
    recipe = rules_lib.recipe_by_name(name)
    contracted, produced = (math.prod(dims[c] for c in part) for part in sites[path].gemm_letters)
    for which, extent in (("fwd", contracted), ("dgrad", produced), ("wgrad", tokens)):
      rotation = getattr(recipe, which).lhs and getattr(recipe, which).lhs.transform
      if isinstance(rotation, Hadamard) and extent % rotation.size:
        problems.append(
          f"{path}, {which}: recipe {name!r} rotates blocks of {rotation.size} and the "
          f"product contracts {extent} on a device, no multiple of it; change global_batch or "
          f"seq_len, or "
          f"give {path} another recipe"
        )
  return problems


def _distinct(sites, dims, rules):
  """(path, recipe name), each once however many layers have it."""
  runs = rules_lib.segments(list(sites), dims["N"], rules)
  return dict.fromkeys((path, name) for _, _, chosen in runs for path, name in chosen.items())


def _tiles(recipe: Recipe, contracted: bool) -> set[int]:
  """Tile extents along the letters that the forward GEMM contracts, or along those it produces."""
  f, d, w = recipe.fwd, recipe.dgrad, recipe.wgrad
  if contracted:
    operands = ((f.lhs, 1), (f.rhs, 1), (d.rhs, 0), (w.lhs, 0))
  else:
    operands = ((f.rhs, 0), (d.lhs, 1), (d.rhs, 1), (w.rhs, 0))
  return {quant.tile[axis] for quant, axis in operands if quant is not None}
