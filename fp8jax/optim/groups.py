"""Groups of parameters: their own clipping norms and learning rates, by rules on names.

Names are parameters of one layer, "layers/3/mlp/up", or "embed"; the first rule that matches wins.
A stack of layers whose layers differ has an array over its first axis, N.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax import patterns
from fp8jax.optim import gradients
from fp8jax.optim.optimizers import OptimizerConfig

# (regular expression, number): a norm, or a factor on the learning rate.
Pairs = tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Own:
  """The arguments of a parameter's update that are its own: scalars, or arrays [N].

  Attributes:
    rate: factor on the learning rate.
    clip: factor on the gradient.
  """

  rate: object
  clip: object


def names(declaration, num_layers: int) -> dict[str, list[str]]:
  """{parameter: names of its layers, or its own}, of those that are trained."""
  by_path = {}
  for path, p in params_lib.flatten(declaration).items():
    first, _, rest = path.partition("/")
    stacked = p.letters.startswith("N")
    if p.trainable:
      by_path[path] = [f"{first}/{i}/{rest}" for i in range(num_layers)] if stacked else [path]
  return by_path


def problems(key: str, pairs, named: Mapping[str, list[str]]) -> list[str]:
  """The problems of optim.clip_groups or optim.lr_multipliers, in words.

  Args:
    key: the configuration's.
    pairs: as stated there.
    named: of `names`; {} where the model is not known.
  """
  flat = [name for of in named.values() for name in of]
  for i, entry in enumerate(pairs):
    good = isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[0], str)
    good = good and isinstance(entry[1], (int, float)) and 0 < entry[1] < float("inf")
    problem = patterns.problem(entry[0], flat) if good else ""
    if problem or not good:
      entry = problem or repr(entry)
      return [f"{key}[{i}]={entry} is no pair such as ('layers/.*/attn/.*', 1.0), positive"]
  return [
    f"{key}: {pattern!r} decides nothing: it matches no parameter of {', '.join(flat[:6])}, …, "
    "or earlier patterns already did"
    for pattern, _ in (patterns.used(pairs, flat, so=False) if flat else ())
  ]


def _chosen(pairs, named: Mapping[str, list[str]]) -> dict[str, np.ndarray]:
  """{parameter: int [N] or [1], the pair of each layer}; one number where all are alike."""
  indices = {
    path: np.array([patterns.first(pairs, name) for name in of]) for path, of in named.items()
  }
  return {path: i[:1] if (i == i[0]).all() else i for path, i in indices.items()}


def own_args(optim: OptimizerConfig, declaration, num_layers: int, gradient) -> dict[str, Own]:
  """{parameter: its own arguments}; {} where all parameters share theirs.

  A group's gradients are brought to its norm at most; parameters of no group are not clipped.
  """
  if not (optim.clip_groups or optim.lr_multipliers or optim.base_width):
    return {}
  named = names(declaration, num_layers)
  rates, clips = _chosen(optim.lr_multipliers, named), _chosen(optim.clip_groups, named)
  multipliers = np.array([*(value for _, value in optim.lr_multipliers), 1.0], np.float32)
  factors = _clip_factors(optim.clip_groups, clips, named, params_lib.flatten(gradient))
  of_width = rates_by_width(optim, declaration)
  return {
    path: Own(
      _take(np.float32(of_width.get(path, 1.0)) * multipliers, rates[path]),
      _take(factors, clips[path]),
    )
    for path in named
  }


def rates_by_width(optim: OptimizerConfig, declaration) -> dict[str, float]:
  """{matrix of the layers: factor on its rate} of optim.base_width; {} without it."""
  if not optim.base_width:
    return {}
  return {
    path: math.sqrt(optim.base_width / optim.width)
    for path, p in params_lib.flatten(declaration).items()
    if p.letters.startswith("N") and p.inputs
  }


def _take(values, chosen: np.ndarray):
  """values[chosen], a scalar where one is chosen; the last value stands for no pair."""
  taken = jnp.asarray(values)[chosen]
  return taken[0] if len(chosen) == 1 else taken


def _clip_factors(pairs, chosen, named, gradient):
  """float32 [groups + 1], the factor of every group; the last is 1."""
  squares = jnp.zeros(len(pairs) + 1, jnp.float32)
  for path in named:
    g = jnp.square(gradients.dequantize(gradient[path]).astype(jnp.float32))
    of_layers = jnp.sum(g, axis=tuple(range(1, g.ndim))) if len(chosen[path]) > 1 else jnp.sum(g)
    squares = squares.at[chosen[path]].add(of_layers)
  norms = jnp.sqrt(squares[:-1])
  most = jnp.asarray([value for _, value in pairs], jnp.float32)
  clipped = jnp.where(norms < most, 1.0, most / norms)
  return jnp.concatenate([clipped, jnp.ones(1)])
