"""The cost of formats in bit operations (BOPs): multiplications times the bits of both factors.

Source: FLIQS (arXiv:2308.03290): a multiplication in BF16 costs 16 * 16 = 256, one of 8 bits 64 and
one of 4 bits 16. The products of attention have no weight and no option here, and are not counted;
scales are not counted either.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.ops import site_tree
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.gemm import Recipe

# Of an operand in the compute dtype, float32 included: a server multiplies it in BF16.
WIDE = 16


def bits(recipe: Recipe) -> tuple[int, int]:
  """Bits of a weight and of an activation in the forward product."""
  weight, activation = (
    WIDE if quant is None else quant.format.bits for quant in (recipe.fwd.rhs, recipe.fwd.lhs)
  )
  return weight, activation


def per_mac(recipe: Recipe) -> int:
  """BOPs of one multiplication of the forward product."""
  return math.prod(bits(recipe))


def bops(macs: Mapping[str, float], recipe_of: Mapping[str, Recipe]) -> float:
  """BOPs of sites, each with its number of multiplications and its recipe."""
  return sum(number * per_mac(recipe_of[name]) for name, number in macs.items())


def macs_per_token(model: ModelConfig) -> dict[str, int]:
  """{site of a layer: multiplications of its forward product per token} of all linear layers."""
  declared = site_tree.find_sites(transformer.site_params(model))
  return {
    name: math.prod(model.dims[c] for c in "".join(declared[_path(name)].gemm_letters))
    for name in rules_lib.all_names([*declared], model.num_layers)
  }


def _path(name: str) -> str:
  first, *rest = name.split("/")
  return "/".join([first, *rest[1:]]) if first == "layers" and rest else name


def table(macs: Sequence[float], options: Sequence[Recipe]) -> np.ndarray:
  """float64 [sites, options]: BOPs, as shares of those of all sites in BF16."""
  total = WIDE * WIDE * sum(macs)
  return np.outer(macs, [per_mac(option) for option in options]) / total
