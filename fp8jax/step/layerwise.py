"""A step that moves every layer as soon as its gradient is there (optim.in_backward=True).

The usual order computes all gradients, then moves all parameters, so that 2 or 4 bytes per
parameter wait in between. Here a gradient exists of one layer at a time: the loop of
layer_loop.py carries parameters and optimizer states, and moves a layer in place.

Features that need every gradient before the first update are refused (config/checks.py): clipping
by the global norm, sums over microbatches, skipping a step that is not finite. Where a gradient
stops being a number, its layer and those before it stay as they are; those behind it have moved.

Source: LOMO (arXiv:2306.09782 §3.1), there for SGD, here for any transformation of one parameter.
Assumes: a layer's update needs nothing of other layers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import params as params_lib
from fp8jax.ops import site_tree, stored_params
from fp8jax.optim import gradients, param_stats, update
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.step import distillation, layer_loop, metrics


def check(leaves, params):
  """Raises ValueError unless every layer's part of a parameter, and of its stored state, is its
  own."""

  def one(leaf, param):
    made = jax.tree.leaves(
      update.abstract(leaf, param), is_leaf=lambda x: isinstance(x, QuantizedTensor)
    )
    if any(isinstance(x, QuantizedTensor) and not x.is_stack for x in made):
      raise ValueError(
        f"optim.in_backward=True: {leaf.path} is so small that layers share scales of its moments "
        "or master; set optim.in_backward=False, or take moments with smaller groups"
      )
    if param.sharding is not None and param.sharding.spec[0]:
      raise ValueError(
        "optim.in_backward=True with sharding.weights.N: a layer must lie on all devices that move "
        "it; split another letter, or set optim.in_backward=False"
      )

  jax.tree.map(one, leaves["layers"], params["layers"])


def take(spec, state, sites, batch, rate, by_param=False, teacher=None) -> update.StepResult:
  """A step; the other order's is `step.after_backward`.

  Args:
    spec, state, teacher: TrainSpec, State, and of distillation.py.
    sites, batch: as the model takes them.
    by_param: whether `values` have "param_stats", of param_stats.observed.
  """
  batch = distillation.taught(spec, state.params, batch, teacher)
  params, total = dict(state.params), jnp.maximum(batch["weights_BL"].sum(), 1)
  move = _LayerUpdater(spec, state, rate, by_param)

  def begin(loss):
    progress = _Progress(params, dict(state.opt), jnp.isfinite(loss))
    if by_param:  # the layers' are filled one by one
      stacked = params_lib.flatten({"layers": spec.declaration["layers"]})
      empty = {path: jnp.zeros((spec.model.num_layers, 4), jnp.float32) for path in stacked}
      progress = dataclasses.replace(progress, by_param=empty)
    return progress

  loss, aux, progress, stats = layer_loop.differentiate(
    spec, params, sites, batch, total, move, begin
  )
  norm, squares = jnp.sqrt(progress.squares[0]), progress.squares[1:]
  return update.StepResult(
    loss, norm, progress.is_finite, progress.params, progress.opt, squares,
    site_tree.by_name(sites, stats), state.grad_autoscale,
    metrics.of_aux(aux, total, spec.model.num_layers)
    | ({"param_stats": progress.by_param} if by_param else {}),
  )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Progress:
  """State of a partly applied step.

  Attributes:
    params, opt: of State, some moved.
    is_finite: bool scalar, whether everything so far was.
    squares: float32 [3], sums so far: of gradients, of updates, applied or not, and of parameters
      before them.
    by_param: of param_stats.observed, of what has moved so far; {} where nobody asks.
  """

  params: Any
  opt: Any
  is_finite: Any
  squares: Any = dataclasses.field(default_factory=lambda: jnp.zeros(3, jnp.float32))
  by_param: dict[str, Any] = dataclasses.field(default_factory=dict)


class _LayerUpdater:
  """Moves parts of the parameters at a learning rate."""

  def __init__(self, spec, state, rate, by_param: bool):
    self.spec, self.state, self.rate, self.by_param = spec, state, rate, by_param
    self.places = params_lib.shardings(spec.declaration, spec.run.layout)

  def sinks(self, params, part, carry=None):
    """Gradient placeholders (zeros) of parameters in low-bit formats; arrays as they are."""
    return jax.tree.map(
      lambda p: stored_params.grad_placeholder(p, None, 0) if stored_params.is_stored(p) else p,
      params,
      is_leaf=stored_params.is_stored,
    )

  def paired(self, params, sinks, part, i=None):
    return jax.tree.map(
      lambda p, sink: stored_params.Weight(p, sink, None) if stored_params.is_stored(p) else sink,
      params, sinks, is_leaf=stored_params.is_stored,
    )  # fmt: skip

  def layer_params(self, i, carry: "_Progress | None" = None):
    params = self.state.params if carry is None else carry.params
    return jax.tree.map(lambda x: x[i], params["layers"])

  def named(self, gradient, stats, carry: _Progress) -> _Progress:
    """Those parameters that `gradient` has."""
    opt, params, is_finite, squares, stats = self._move(
      {k: carry.opt[k] for k in gradient}, {k: carry.params[k] for k in gradient},
      gradient, stats, carry, lambda tree: {k: tree[k] for k in gradient},
    )  # fmt: skip
    return _Progress(
      {**carry.params, **params}, {**carry.opt, **opt}, is_finite, squares,
      carry.by_param | stats,
    )  # fmt: skip

  def layer(self, i, gradient, stats, carry: _Progress) -> _Progress:
    """Layer i."""
    whole = (carry.opt["layers"], carry.params["layers"])
    # Every layer starts from the counters before the step.
    counted = update.with_scalars_of(whole[0], self.state.opt["layers"])
    opt, params = update.slice_layer((counted, whole[1]), i, 1)
    gradient = jax.tree.map(lambda g: g[None], gradient)
    *new, is_finite, squares, stats = self._move(
      opt, params, gradient, stats, carry, lambda tree: tree["layers"], piece=i
    )
    opt, params = update.update_layer(whole, tuple(new), i)
    stats = carry.by_param | {
      f"layers/{path}": update.update_layer(carry.by_param[f"layers/{path}"], own, i)
      for path, own in stats.items()
    }
    return _Progress(
      {**carry.params, "layers": params}, {**carry.opt, "layers": opt}, is_finite, squares,
      stats,
    )  # fmt: skip

  def _move(self, opt, params, gradient, stats, progress: _Progress, part, piece=0):
    """(opt, params, is_finite, squares, param_stats.observed or {})."""
    if self.spec.run.layout.mesh is not None:
      gradient = jax.lax.with_sharding_constraint(gradient, part(self.places))
    norm = gradients.norm(gradient)
    amaxes = [jnp.isfinite(tap[..., 0]).all() for tap in jax.tree.leaves(stats)]
    is_finite = functools.reduce(jnp.logical_and, amaxes, progress.is_finite & jnp.isfinite(norm))
    now = update.UpdateArgs(self.state.step, self.rate, is_applied=is_finite & ~self.state.halted)
    with jax.named_scope("optimizer"):
      opt, params, squares = update.update_params(
        part(self.spec.leaves), part(self.spec.declaration), self.spec.run.layout,
        gradient, opt, params, now, piece=piece, by_layer=self.by_param,
      )  # fmt: skip
    by_param = {}
    if self.by_param:
      by_param = param_stats.observed(part(self.spec.declaration), gradient, squares)
      squares = update.total(squares)
    more = jnp.concatenate([jnp.square(norm)[None], squares])
    return opt, params, is_finite, progress.squares + more, by_param
