"""Weights of layers that a step quantizes once (memory.weight_operands="per_step"), by the model.

Their operands are made before the microbatches and read by all of them (ops/weight_operands.py).
The head and the embedding keep their products' own: a loss multiplies the head in chunks, of one
reading.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from fp8jax import params as params_lib
from fp8jax.models import transformer
from fp8jax.models.mixer import GemmSite, Mixer
from fp8jax.ops import stored_params, weight_operands
from fp8jax.ops.gemm_spec import GemmSpec
from fp8jax.ops.stored_params import WeightOperands
from fp8jax.quantization import scaled_matrix
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.recipe.quant import Quant

PER_STEP = "per_step"


def is_on(spec) -> bool:
  return spec.run.weight_operands == PER_STEP


def of_layers(spec, params, sites, batch) -> tuple[dict[str, Any], ...]:
  """Of every run of layers {key of a mixer: {name: WeightOperands, stacked}}; () by product.

  Args:
    params, sites: as the state has them.
    batch: of a microbatch, or of several, [A, B, L].
  """
  if not is_on(spec):
    return ()
  tokens, made = dict(zip("BL", batch["tokens_BL"].shape[-2:], strict=True)), []
  for _, of_run, stack in transformer.runs(sites, params["layers"]):
    made.append({
      mixer.key: weight_operands.of_block(
        declared(spec, mixer), stack[mixer.key], of_run[mixer.key], tokens, spec.run.dtype
      )
      for mixer in transformer.mixers(spec.model)
    })  # fmt: skip
  return tuple(made)


def layer(made: Mapping[str, Any], i) -> dict[str, Any]:
  """Layer i of a run of of_layers: entries of its stacks, for products that read them there."""

  def one(stacks: WeightOperands) -> WeightOperands:
    fwd, dgrad = (Entry(stack, i) for stack in (stacks.fwd, stacks.dgrad))
    return dataclasses.replace(stacks, fwd=fwd, dgrad=dgrad, stats=stacks.stats[i])

  return {key: {name: one(x) for name, x in of.items()} for key, of in made.items()}


def read(params, made):
  """The parameters of a layer, or of a stack of layers, with the operands of those that have any;
  nothing is differentiated."""
  return _with(params, made, lambda _, operands: stored_params.Weight(operands, None, None))


def attached(weights, made):
  """Weights, of a layer or of a stack, whose products multiply the operands made of them."""
  return _with(weights, made, lambda w, operands: dataclasses.replace(w, stored=operands))


def attached_to_runs(weights, sites, made):
  """The Weights of a model, `attached` for every run of layers."""
  if not made:
    return weights
  runs = zip(transformer.runs(sites, weights["layers"]), made, strict=True)
  return {**weights, "layers": tuple(attached(stack, of_run) for (_, _, stack), of_run in runs)}


def _with(tree, made, replace):
  return {
    key: own | {name: replace(own[name], x) for name, x in made.get(key, {}).items()}
    for key, own in tree.items()
  }


def declared(spec, mixer: Mixer) -> list[GemmSite]:
  """The sites of a mixer whose weights nothing else reads."""
  scaled = spec.run.smooth_swiglu == "channel"
  return [site for site in mixer.sites if not (scaled and site.has_channel_scales)]


@dataclasses.dataclass(frozen=True)
class Account:
  """Which weights a step quantizes once, and what that takes.

  Attributes:
    names: of the sites of layers that it does.
    by_product: {name of another site: the reason}.
    arrays: shapes of stacks of operands, codes and scales, on one device.
  """

  names: tuple[str, ...]
  by_product: dict[str, str]
  arrays: tuple[jax.ShapeDtypeStruct, ...]

  @property
  def nbytes(self) -> int:
    """Of all operands, on one device; two of four bits fill a byte, which is so on GPUs."""
    bits = (math.prod(x.shape) * jax.dtypes.itemsize_bits(x.dtype) for x in self.arrays)
    return sum(bits) // 8


def account(spec, phase: int = 0) -> Account:
  """That of a phase of precision of a TrainSpec."""
  names, against, arrays = [], {}, []
  tokens = {"B": spec.microbatch, "L": spec.data.seq_len}
  params = params_lib.abstract(spec.declaration, spec.model.dims, spec.run.layout)
  mixers = transformer.mixers(spec.model)
  for of_run, mixer in (
    (run, mixer) for run in spec.sites(phase=phase)["layers"] for mixer in mixers
  ):
    ws, sites, once = params["layers"][mixer.key], of_run[mixer.key], declared(spec, mixer)
    why = {site.name: "multiplied by channel scales first" for site in mixer.sites}
    why |= weight_operands.reasons(once, ws, sites, tokens, spec.run.dtype)
    for own in mixer.sites:
      name = own.name
      site, reason = sites[name], why[name]
      if reason is not None:
        against[site.name] = reason
        continue
      names.append(site.name)
      product = weight_operands.of_layer(ws[name], site, own.eqn, tokens, spec.run.dtype)
      arrays += _arrays(product, len(site.layer_names))
  return Account(tuple(names), against, tuple(arrays))


def _arrays(product: GemmSpec, count: int) -> Iterator[jax.ShapeDtypeStruct]:
  """Both operands of the weights of `count` layers, on one device: codes and float32 scales."""
  for role in weight_operands.ROLES:
    sizes, (_, *groups) = product.local_sizes(), product.letters_of(role)
    extents = [math.prod(sizes[c] for c in group) for group in groups]
    quant = cast(Quant, product.quant(role))
    tiles = map(scaled_matrix.num_tiles, extents, quant.tile)
    yield jax.ShapeDtypeStruct((count, *extents), quant.format.dtype)
    yield jax.ShapeDtypeStruct((count, *tiles), jnp.float32)
