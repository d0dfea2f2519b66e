"""Recipes as tests name them: "block_128 saved" is block_128 with memory.save_gemm_inputs."""

from fp8jax.ops import site
from fp8jax.ops.residuals import GemmInput
from fp8jax.recipe.gemm import Recipe


def split(variant: str) -> tuple[str, GemmInput]:
  """(recipe, form of its inputs as residuals)."""
  recipe, _, saved = variant.partition(" ")
  return recipe, GemmInput.WGRAD_OPERAND if saved else GemmInput.UNQUANTIZED


def single(variant: str | Recipe, **how) -> site.Site:
  """site.single of such a name, or of a recipe."""
  if isinstance(variant, Recipe):
    return site.single(variant, **how)
  recipe, save = split(variant)
  return site.single(recipe, save=save, **how)


def changes(variant: str) -> dict:
  """Keys of a configuration."""
  recipe, save = split(variant)
  return {"precision.rules": ((".*", recipe),), "memory.save_gemm_inputs": save.value}
