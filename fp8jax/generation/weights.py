"""Weights in the form that forward GEMMs read: quantized once, not at every step.

A weight whose recipe quantizes it becomes codes and scales (a StoredMatrix), the very ones that the
training forward pass makes, or their values in float32; every other matrix is cast to the compute
dtype once. Norms and biases stay float32.
"""

import functools
from collections.abc import Mapping

import jax

from fp8jax import axes
from fp8jax.models import heads, transformer
from fp8jax.models.config import ModelConfig
from fp8jax.ops import multiplied, stored_params
from fp8jax.ops.site import Site
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import Quant


def multiplied_as_codes(recipes: Mapping[str, Recipe]) -> dict[str, set[Quant | None]]:
  """{path of a weight, "layers/mlp/up": how its layers are multiplied}, for load_params, by the
  recipes of every layer's site, "layers/3/mlp/up"."""
  quants: dict[str, set[Quant | None]] = {}
  for name, recipe in recipes.items():
    top, _, rest = name.partition("/")
    if top == "layers":
      quants.setdefault(f"layers/{rest.partition('/')[2]}", set()).add(recipe.fwd.rhs)
  return quants


def for_inference(params, sites, cfg: ModelConfig, dtype, keeps_values: bool = False):
  """The parameters as `transformer.hidden_and_aux` reads them.

  Args:
    params: parameters as they are stored, where the sites' layout has them; the result lies as
      Layout.served has it.
    sites: of all GEMMs; their delayed and static scales are read here and never change again.
    keeps_values: see multiplied.as_multiplied.

  Returns:
    A tree like `params`; its layers are a tuple with a stack for every run of layers of `sites`.
    A tied head that is quantized stands beside the embedding, under "head".
  """
  layers = []
  for _, run_of_layers, stack in transformer.runs(sites, params["layers"]):
    of_run = {key: dict(of_mixer) for key, of_mixer in stack.items()}
    for mixer in transformer.mixers(cfg):
      one = functools.partial(_stacked, dtype=dtype, keeps_values=keeps_values)
      of_sites = mixer.sites, of_run[mixer.key], run_of_layers[mixer.key]
      of_run[mixer.key] |= multiplied.of_block(*of_sites, one, stacked=1)
    layers.append(of_run)
  made = {**params, "layers": tuple(layers)}
  source = params["embed" if cfg.tie_embeddings else "head"]
  head = multiplied.as_multiplied(source, sites["head"], heads.equation(cfg), dtype, keeps_values)
  made["embed"] = _cast(params["embed"], dtype=dtype, layout=sites["head"].layout)
  if isinstance(head, StoredMatrix) or not cfg.tie_embeddings:
    made["head"] = head
  return made


@functools.partial(jax.jit, static_argnames=("eqn", "dtype", "keeps_values"))
def _stacked(w, site: Site, eqn: str, dtype, keeps_values: bool):
  """multiplied.as_multiplied of every layer, one at a time."""
  one = lambda both: multiplied.as_multiplied(*both, eqn, dtype, keeps_values)  # noqa: E731
  return jax.lax.map(one, (w, site))


@functools.partial(jax.jit, static_argnames=("dtype", "layout"))
def _cast(w, dtype, layout):
  return axes.constrain(stored_params.compute_copy(w).astype(dtype), "VD", layout)
