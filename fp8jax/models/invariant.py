"""A forward pass in which a token's bits depend on the tokens before it, and on nothing else.

In what batch, bucket or packing a token stands, whether it is trained on, scored, prefilled or
decoded, on how many devices of a data-parallel mesh and in how many microbatches: its hidden
states, logits and log-probability are the same numbers. Blocks treat tokens in tiles of one size
(ops/row_tiles.py), attention adds in an order of its own (kernels/attention/fixed_order.py), and
weights come to both as the codes, or in the dtype, that their products read (ops/multiplied.py).

Gradients are those of the plain forward pass from the same input of every layer, computed again: a
layer saves its input alone. Promised within one version of jax, one model of CPU and one number of
processes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fp8jax import axes
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.mixer import Aux, Mixer
from fp8jax.ops import collectives, multiplied, row_tiles
from fp8jax.ops import site as site_lib

# Rows that a CPU computes at a time: one decode step pays for all of them, a long prompt per tile.
ROWS = 32
_EVERYWHERE: Any = PartitionSpec()


def problems_of_layout(layout: axes.Layout) -> list[str]:
  """The reason why nothing is promised of activations that lie so, in words; empty without any."""
  split = sorted({a for letter in "LHGKDFV" for a in layout.act_axes(letter)})
  if split := [a for a in split if layout.size((a,)) > 1]:
    return [
      f"a mesh that splits a token's numbers over {', '.join(split)}: partial sums of devices are "
      "added in the order of the mesh; take data and fsdp alone (mesh.tensor=1)"
    ]
  return []


def of_tokens(function: Callable[..., Any], run: ComputeConfig) -> Callable[..., Any]:
  """`row_tiles.token_wise` on a mesh; the function as it is unless the pass is invariant.

  Args:
    function: (held, *arrays [B, L, ...]) -> arrays [B, L, ...]; `held` is parameters and sites.
  """
  if not run.is_invariant:
    return function
  tokens = run.layout.act_spec("BL")

  def local(held, *arrays):
    return row_tiles.token_wise(function, ROWS)(_inside(held, run), *arrays)

  def apply(held, *arrays):
    specs = (_EVERYWHERE, *(tokens for _ in arrays))
    return collectives.on_mesh(local, run.layout, specs, tokens)(held, *arrays)

  return apply


def as_multiplied(w, site, eqn: str, run: ComputeConfig):
  """A weight as its product reads it; as it is unless the pass is invariant."""
  return multiplied.as_multiplied(w, site, eqn, run.dtype) if run.is_invariant else w


def layer(
  plain: Callable, mixers: Sequence[Mixer], cfg: ModelConfig, run: ComputeConfig, *,
  is_differentiable: bool,
) -> Callable[..., Any]:  # fmt: skip
  """transformer.layer, invariant.

  Args:
    plain: transformer.layer.
    is_differentiable: whether gradients are asked for; with states of mixers they are not.
  """
  inside = dataclasses.replace(run, layout=run.layout.manual(), row_tile=ROWS)
  tokens = run.layout.act_spec("BL")

  def local(x_BLD, of_layer, context):
    p, s, *states = of_layer
    states = [_lying_as(of_mixers, inside.layout) for of_mixers in states]
    out_BLD, aux = plain(x_BLD, (p, _inside(s, run), *states), context, cfg, inside)
    return out_BLD, dataclasses.replace(aux, states=_lying_as(aux.states, run.layout))

  def exact(x_BLD, of_layer, context):
    p, s, *states = of_layer
    one, made = functools.partial(as_multiplied, run=run), {}
    for mixer in mixers:
      own, sites = p[mixer.key], jax.tree.map(lambda x: x, s[mixer.key])  # other marks
      made[mixer.key] = {**own, **multiplied.of_block(mixer.sites, own, sites, one)}
    of_states = [{key: state.specs() for key, state in of.items()} for of in states]
    before = [{key: specs[0] for key, specs in of.items()} for of in of_states]
    added = {key: specs[1] for of in of_states for key, specs in of.items()}
    in_specs = tokens, (_EVERYWHERE, _EVERYWHERE, *before), tokens
    out_specs = tokens, Aux(_EVERYWHERE, _EVERYWHERE, _EVERYWHERE, added)
    run_on = collectives.on_mesh(local, run.layout, in_specs, out_specs)
    return run_on(x_BLD, (made, s, *states), context)

  if not is_differentiable:
    return exact
  as_ever = functools.partial(plain, cfg=cfg, run=dataclasses.replace(run, is_invariant=False))
  return row_tiles.with_gradients_of(as_ever, exact)


def _lying_as(states: Mapping[str, Any], layout: axes.Layout) -> dict[str, Any]:
  """States of mixers with another layout."""
  return {key: dataclasses.replace(state, layout=layout) for key, state in states.items()}


def _inside(held, run: ComputeConfig):
  """`held` inside a `shard_map`: sites that move nothing, observe nothing, and have another name
  than those of the plain pass, whose products are counted (compiled/fp8_gemms.py)."""
  if isinstance(held, dict):
    of_activation = lambda x: isinstance(x, site_lib.ActivationSite)  # noqa: E731
    return {k: _inside(x, run) for k, x in held.items() if not of_activation(x)}
  if isinstance(held, tuple):
    return tuple(_inside(x, run) for x in held)
  if not isinstance(held, site_lib.Site):
    return held
  site = site_lib.unwatched(held, product_name(held.name))
  return dataclasses.replace(site, layout=run.layout.manual())


def product_name(site: str) -> str:
  """The name of a site's product here."""
  return "invariant_head" if site == "head" else site.replace("layers/", "layers/invariant/")
