"""Weights in the form that forward GEMMs read: quantized once, not at every step.

A weight whose recipe quantizes it becomes codes and scales (a StoredMatrix), the very ones that the
training forward pass makes; every other matrix is cast to the compute dtype once. Norms and biases
stay float32.
"""

import functools
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.ops import collectives, joint, operands, stored_params
from fp8jax.ops.gemm_spec import Role, make_spec
from fp8jax.ops.site import ScalingInputs, Site
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import Quant


def multiplied_as_codes(recipes: Mapping[str, Recipe]) -> dict[str, set[Quant | None]]:
  """{path of a weight, "layers/mlp/up": how its layers are multiplied}, for load_params.

  Args:
    recipes: of every layer's site, "layers/3/mlp/up".
  """
  quants: dict[str, set[Quant | None]] = {}
  for name, recipe in recipes.items():
    top, _, rest = name.partition("/")
    if top == "layers":
      quants.setdefault(f"layers/{rest.partition('/')[2]}", set()).add(recipe.fwd.rhs)
  return quants


def for_inference(params, sites, cfg: ModelConfig, dtype):
  """The parameters as `transformer.hidden_and_aux` reads them.

  Args:
    params: parameters as they are stored, where the sites' layout has them; the result lies as
      Layout.served has it.
    sites: of all GEMMs; their delayed and static scales are read here and never change again.
    dtype: compute dtype.

  Returns:
    A tree like `params`; its layers are a tuple with a stack for every run of layers of `sites`.
    A tied head that is quantized stands beside the embedding, under "head".
  """
  layers = []
  for _, run_of_layers, stack in transformer.runs(sites, params["layers"]):
    of_run = {key: dict(of_mixer) for key, of_mixer in stack.items()}
    for mixer in transformer.mixers(cfg):
      own, of_sites = of_run[mixer.key], run_of_layers[mixer.key]
      for _, read in itertools.groupby(mixer.sites, lambda site: site.input):  # one input's
        eqns = {site.name: site.eqn for site in read}
        lent = joint.lent([own[n] for n in eqns], [of_sites[n] for n in eqns], stacked=1)
        for (name, eqn), site in zip(eqns.items(), lent, strict=True):
          own[name] = _stacked(own[name], site, eqn=eqn, dtype=dtype)
    layers.append(of_run)
  made = {**params, "layers": tuple(layers)}
  source = params["embed" if cfg.tie_embeddings else "head"]
  head = quantized(source, sites["head"], eqn=transformer.head_eqn(cfg), dtype=dtype)
  made["embed"] = _cast(params["embed"], dtype=dtype, layout=sites["head"].layout)
  if isinstance(head, StoredMatrix) or not cfg.tie_embeddings:
    made["head"] = head
  return made


@functools.partial(jax.jit, static_argnames=("eqn", "dtype"))
def _stacked(w, site: Site, eqn: str, dtype):
  """`quantized` of every layer, one at a time."""
  return jax.lax.map(lambda both: quantized(both[0], both[1], eqn, dtype), (w, site))


@functools.partial(jax.jit, static_argnames=("dtype", "layout"))
def _cast(w, dtype, layout):
  return axes.constrain(stored_params.compute_copy(w).astype(dtype), "VD", layout)


@functools.partial(jax.jit, static_argnames=("eqn", "dtype"))
def quantized(w, site: Site, eqn: str, dtype):
  """A weight as the forward GEMM of its site reads it: a StoredMatrix, or an array in `dtype`.

  Args:
    w: as it is stored.
    site: not stacked.
    eqn: of the GEMM, "BLD,DF->BLF".
    dtype: compute dtype.
  """
  w = stored_params.gemm_operand(w)
  letters, _, of_w = eqn.partition("->")[0].partition(",")
  sizes = dict(zip(of_w, w.shape))
  x = jax.ShapeDtypeStruct(tuple(sizes.get(c, 1) for c in letters), jnp.dtype(dtype))
  spec = make_spec(eqn, x, w, site)
  quant = spec.quant(Role.W_FWD)
  if quant is None:
    return axes.constrain(stored_params.compute_copy(w).astype(dtype), of_w, site.layout)
  if spec.recipe.fwd.compensates:  # what was clamped is multiplied by the weight itself
    return axes.constrain(stored_params.compute_copy(w), of_w, site.layout)

  def local(w, inputs):
    made = operands.operand(spec, Role.W_FWD, w, inputs).value
    return made.data, made.scale

  out, place = spec.quantized_spec(Role.W_FWD), jax.sharding.PartitionSpec()
  in_specs = (operands.weight_specs(spec, w), place)
  run = collectives.on_mesh(local, site.layout, in_specs, (out.data, out.scale))
  data, scale = run(w, ScalingInputs.of(site))
  return StoredMatrix(data, scale, len(spec.letters.contracted), quant, w.shape)
