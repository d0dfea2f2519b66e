"""A step that moves every layer as soon as its gradient is there (optim.in_backward=True).

The usual order computes all gradients, then moves all parameters, so that 2 or 4 bytes per
parameter wait in between. Here a gradient exists of one layer at a time. The backward pass is
therefore written out: a loop over the layers from the last to the first that carries parameters and
optimizer states, computes a layer again from its input, differentiates it and moves it in place.

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
from fp8jax.models import transformer, unit_scaling
from fp8jax.models.mixer import Aux
from fp8jax.ops import residuals, site_tree, stored_params
from fp8jax.optim import gradients, param_stats, update
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.step import distillation, metrics


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
  cfg, run, params = spec.model, spec.run, dict(state.params)
  total = jnp.maximum(batch["weights_BL"].sum(), 1)
  emb = {"embed": params["embed"]}
  # Parameters with a gradient from the loss; a tied embedding gets another one below.
  behind = {
    k: p for k, p in params.items() if k != "layers" and (k != "embed" or cfg.tie_embeddings)
  }

  ends = {k: s for k, s in sites.items() if k != "layers"}
  below = {k: ends.pop(k) for k in ("embed",) if k in ends}

  def embed(sinks, taps):
    return transformer.embed(_paired(emb, sinks), site_tree.with_taps(below, taps), batch, cfg, run)

  def finish(x_BLD, sinks, taps):
    above = site_tree.with_taps(ends, taps)
    loss, sums = transformer.head_loss(x_BLD, _paired(behind, sinks), above, batch, cfg, run)
    return unit_scaling.mean(loss, total, cfg), sums

  x_BLD, pull_embed = jax.vjp(embed, _sinks(emb), site_tree.taps(below))
  x_BLD, inputs, aux = _forward(spec, x_BLD, params, sites, batch)
  loss, pull_finish, sums = jax.vjp(
    finish, x_BLD, _sinks(behind), site_tree.taps(ends), has_aux=True
  )

  move = _LayerUpdater(spec, state, rate, by_param)
  g_BLD, g_behind, head_stats = pull_finish(jnp.ones_like(loss))
  loss = sum((value / total for value in aux.losses.values()), start=loss)
  progress = _Progress(params, dict(state.opt), jnp.isfinite(loss))
  if by_param:  # the layers' are filled one by one
    stacked = params_lib.flatten({"layers": spec.declaration["layers"]})
    empty = {path: jnp.zeros((cfg.num_layers, 4), jnp.float32) for path in stacked}
    progress = dataclasses.replace(progress, by_param=empty)
  g_head = g_behind.pop("embed", None)
  progress = move.named(g_behind, [head_stats], progress)
  # Before any layer's turn: else the head's gradient would be alive during all of them.
  g_BLD, progress = jax.lax.optimization_barrier((g_BLD, progress))
  g_BLD, progress, stats = _backward(spec, g_BLD, 1 / total, progress, move, sites, inputs, batch)
  g_rows, embed_stats = pull_embed(g_BLD)
  if g_head is not None:
    g_rows = {"embed": g_rows["embed"] + g_head}
  progress = move.named(g_rows, [], progress)
  stats = site_tree.by_name(sites, {**embed_stats, "layers": stats, **head_stats})
  norm, squares = jnp.sqrt(progress.squares[0]), progress.squares[1:]
  return update.StepResult(
    loss, norm, progress.is_finite, progress.params, progress.opt, squares, stats,
    state.grad_autoscale,
    metrics.of_aux(dataclasses.replace(aux, sums=sums), total, cfg.num_layers)
    | ({"param_stats": progress.by_param} if by_param else {}),
  )  # fmt: skip


def _forward(spec, x_BLD, params, sites, batch):
  """(the residual stream after all layers, their saved inputs: stacks, one per run, Aux)."""
  cfg, run, inputs, total = spec.model, spec.run, [], Aux()
  context = transformer.layer_context(batch, cfg, run)

  def forward(x_BLD, xs):
    i, s = xs
    of_layer = (jax.tree.map(lambda x: x[i], params["layers"]), s)
    layer_inputs = residuals.compress(x_BLD, run.residuals.layer_inputs)
    x_BLD, aux = transformer.layer(x_BLD, of_layer, context, cfg, run)
    return x_BLD, (layer_inputs, aux)

  for run_, of_run in transformer.runs(sites):
    # By number: slices of the stacks would be copies of them.
    numbers = jnp.arange(run_.start, run_.stop)
    x_BLD, (layer_inputs, aux) = jax.lax.scan(forward, x_BLD, (numbers, of_run))
    inputs.append(layer_inputs)
    total += aux.sum()
  return x_BLD, inputs, total


def _backward(
  spec, g_BLD, g_aux, progress: "_Progress", move: "_LayerUpdater", sites, inputs, batch
):
  """(gradient of the first layer's input, progress, tensor statistics: one tree per run of layers).

  Args:
    g_aux: the gradient of every aux loss.
  """
  cfg, run, stats = spec.model, spec.run, []
  context = transformer.layer_context(batch, cfg, run)

  def backward(carry, xs):
    g_BLD, progress = carry
    i, layer_inputs, s = xs
    p = jax.tree.map(lambda x: x[i], progress.params["layers"])

    def again(x_BLD, sinks, taps):
      of_layer = (_paired(p, sinks), site_tree.with_taps(s, taps))
      x_BLD, aux = transformer.layer(x_BLD, of_layer, context, cfg, run)
      return x_BLD, aux.losses

    # jax.checkpoint's name for what is computed again: the proof of the step looks for it.
    with jax.named_scope("rematted_computation"):
      (_, losses), pull = jax.vjp(
        again, residuals.decompress(layer_inputs, run.dtype), _sinks(p), site_tree.taps(s)
      )
    g_BLD, gradient, stats = pull((g_BLD, {name: g_aux for name in losses}))
    return (g_BLD, move.layer(i, gradient, stats, progress)), stats

  for (run_, of_run), saved in reversed(list(zip(transformer.runs(sites), inputs, strict=True))):
    xs = (jnp.arange(run_.start, run_.stop), saved, of_run)
    (g_BLD, progress), layer_stats = jax.lax.scan(backward, (g_BLD, progress), xs, reverse=True)
    stats.append(layer_stats)
  return g_BLD, progress, tuple(reversed(stats))


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

  def named(self, gradient, stats, progress: _Progress) -> _Progress:
    """Those parameters that `gradient` has."""
    opt, params, is_finite, squares, stats = self._move(
      {k: progress.opt[k] for k in gradient}, {k: progress.params[k] for k in gradient},
      gradient, stats, progress, lambda tree: {k: tree[k] for k in gradient},
    )  # fmt: skip
    return _Progress(
      {**progress.params, **params}, {**progress.opt, **opt}, is_finite, squares,
      progress.by_param | stats,
    )  # fmt: skip

  def layer(self, i, gradient, stats, progress: _Progress) -> _Progress:
    """Layer i."""
    whole = (progress.opt["layers"], progress.params["layers"])
    # Every layer starts from the counters before the step.
    counted = update.with_scalars_of(whole[0], self.state.opt["layers"])
    opt, params = update.slice_layer((counted, whole[1]), i, 1)
    gradient = jax.tree.map(lambda g: g[None], gradient)
    *new, is_finite, squares, stats = self._move(
      opt, params, gradient, stats, progress, lambda tree: tree["layers"], piece=i
    )
    opt, params = update.update_layer(whole, tuple(new), i)
    stats = progress.by_param | {
      f"layers/{path}": update.update_layer(progress.by_param[f"layers/{path}"], own, i)
      for path, own in stats.items()
    }
    return _Progress(
      {**progress.params, "layers": params}, {**progress.opt, "layers": opt}, is_finite, squares,
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


def _sinks(params):
  """Gradient placeholders (zeros) of parameters in low-bit formats; arrays as they are."""
  return jax.tree.map(
    lambda p: stored_params.grad_placeholder(p, None, 0) if stored_params.is_stored(p) else p,
    params,
    is_leaf=stored_params.is_stored,
  )


def _paired(params, sinks):
  """Parameters as the model takes them, to be differentiated by their sinks."""
  return jax.tree.map(
    lambda p, sink: stored_params.Weight(p, sink, None) if stored_params.is_stored(p) else sink,
    params, sinks, is_leaf=stored_params.is_stored,
  )  # fmt: skip
