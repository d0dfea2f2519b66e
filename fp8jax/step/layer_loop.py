"""Loss and gradients of a batch, one layer's gradient at a time.

Differentiating a loop over layers gives their gradients as one stack. Here the backward pass is
written out: a loop over the layers from the last to the first computes a layer again from its
input, differentiates it, and hands its gradient to somebody who uses it in place: layerwise.py
moves the layer, gradients.py adds it to the sums of microbatches.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fp8jax.models import transformer, unit_scaling
from fp8jax.models.mixer import Aux
from fp8jax.ops import residuals, site_tree
from fp8jax.step import quantized_once


class Consumer(Protocol):
  """Reads parameters, and takes their gradients into a carry of its own.

  `part` of a method takes a tree like the declaration to the part that `params` is of.
  """

  def sinks(self, params, part: Callable, carry=None) -> Any:
    """The differentiated values of parameters, which are not stacked.

    Args:
      carry: of a layer, whose gradient may be added to something in it where it is made.
    """

  def paired(self, params, sinks, part: Callable, i=None) -> Any:
    """The parameters as the model takes them, to be differentiated by their sinks; of layer i."""

  def layer_params(self, i, carry=None) -> Any:
    """Those of layer i, as they are stored; of the forward pass without a carry."""

  def named(self, gradient: dict[str, Any], stats, carry) -> Any:
    """The carry after the gradients of parameters without layers, by name."""

  def layer(self, i, gradient, stats, carry) -> Any:
    """The carry after the gradient of layer i."""


def differentiate(
  spec, params, sites, batch, total, consumer: Consumer, begin: Callable, made=()
) -> tuple[Any, Aux, Any, dict[str, Any]]:
  """(loss, Aux, the consumer's carry, observations like site_tree.taps(sites)).

  Args:
    spec: TrainSpec.
    params: as the state has them.
    batch: as the model takes it.
    total: weights of the tokens that the loss is a mean over.
    begin: loss -> carry, before the first gradient.
    made: of quantized_once.of_layers.
  """
  cfg, run = spec.model, spec.run
  emb = {"embed": params["embed"]}
  # Parameters with a gradient from the loss; a tied embedding gets another one below.
  behind = {
    k: p for k, p in params.items() if k != "layers" and (k != "embed" or cfg.tie_embeddings)
  }
  ends = {k: s for k, s in sites.items() if k != "layers"}
  below = {k: ends.pop(k) for k in ("embed",) if k in ends}

  def embed(sinks, taps):
    weights = consumer.paired(emb, sinks, _of_names(emb))
    return transformer.embed(weights, site_tree.with_taps(below, taps), batch, cfg, run)

  def finish(x_BLD, sinks, taps):
    weights = consumer.paired(behind, sinks, _of_names(behind))
    return transformer.head_loss(x_BLD, weights, site_tree.with_taps(ends, taps), batch, cfg, run)

  sinks_of = lambda p: consumer.sinks(p, _of_names(p))  # noqa: E731
  x_BLD, pull_embed = jax.vjp(embed, sinks_of(emb), site_tree.taps(below))
  x_BLD, inputs, aux = _forward(spec, x_BLD, consumer, sites, batch, made)
  loss, pull_finish, sums = jax.vjp(
    finish, x_BLD, sinks_of(behind), site_tree.taps(ends), has_aux=True
  )
  loss = sum(aux.losses.values(), start=loss)
  loss, pull_mean = jax.vjp(lambda loss: unit_scaling.mean(loss, total, cfg), loss)
  (g_loss,) = pull_mean(jnp.ones_like(loss))
  g_BLD, g_behind, head_stats = pull_finish(g_loss)
  g_head, carry = g_behind.pop("embed", None), begin(loss)
  carry = consumer.named(g_behind, [head_stats], carry)
  # Before any layer's turn: else the head's gradient would be alive during all of them.
  g_BLD, carry = jax.lax.optimization_barrier((g_BLD, carry))
  saved = inputs, made or [{}] * len(inputs)
  g_BLD, carry, stats = _backward(spec, g_BLD, g_loss, consumer, carry, sites, saved, batch)
  g_rows, embed_stats = pull_embed(g_BLD)
  if g_head is not None:
    g_rows = {"embed": g_rows["embed"] + g_head}
  carry = consumer.named(g_rows, [], carry)
  stats = {**embed_stats, "layers": stats, **head_stats}
  return loss, dataclasses.replace(aux, sums=sums), carry, stats


def _of_names(names: Mapping[str, Any]) -> Callable:
  return lambda tree: {k: tree[k] for k in names}


def of_layers(tree):
  """The part of a tree like the declaration that layers have."""
  return tree["layers"]


def _forward(spec, x_BLD, consumer: Consumer, sites, batch, made):
  """(the residual stream after all layers, their saved inputs: stacks, one per run, Aux)."""
  cfg, run, inputs, total = spec.model, spec.run, [], Aux()
  context = transformer.layer_context(batch, cfg, run)

  def forward(stacks, x_BLD, xs):
    i, n, s = xs
    weights = consumer.layer_params(i)
    of_layer = (quantized_once.read(weights, quantized_once.layer(stacks, n)), s)
    layer_inputs = residuals.compress(x_BLD, run.residuals.layer_inputs)
    x_BLD, aux = transformer.layer(x_BLD, of_layer, context, cfg, run)
    return x_BLD, (layer_inputs, aux)

  for number, (run_, of_run) in enumerate(transformer.runs(sites)):
    stacks = made[number] if made else {}
    x_BLD, (layer_inputs, aux) = jax.lax.scan(
      functools.partial(forward, stacks), x_BLD, (*_numbers(run_), of_run)
    )
    inputs.append(layer_inputs)
    total += aux.sum()
  return x_BLD, inputs, total


def _numbers(run_: slice):
  """Those of the layers of a run, among all and in the run. Slices of stacks would be copies."""
  return jnp.arange(run_.start, run_.stop), jnp.arange(run_.stop - run_.start)


def _backward(spec, g_BLD, g_aux, consumer: Consumer, carry, sites, saved, batch):
  """(gradient of the first layer's input, carry, tensor statistics: one tree per run of layers).

  Args:
    g_aux: the gradient of every aux loss.
    saved: by run of layers their inputs, and their weights that are quantized once.
  """
  cfg, run, stats = spec.model, spec.run, []
  context = transformer.layer_context(batch, cfg, run)

  def backward(stacks, carry, xs):
    g_BLD, carry = carry
    i, n, layer_inputs, s = xs
    p, operands = consumer.layer_params(i, carry), quantized_once.layer(stacks, n)

    def again(x_BLD, sinks, taps):
      weights = quantized_once.attached(consumer.paired(p, sinks, of_layers, i), operands)
      x_BLD, aux = transformer.layer(
        x_BLD, (weights, site_tree.with_taps(s, taps)), context, cfg, run
      )
      return x_BLD, aux.losses

    # jax.checkpoint's name for what is computed again: the proof of the step looks for it.
    with jax.named_scope("rematted_computation"):
      (_, losses), pull = jax.vjp(
        again, residuals.decompress(layer_inputs, run.dtype), consumer.sinks(p, of_layers, carry),
        site_tree.taps(s),
      )  # fmt: skip
    g_BLD, gradient, stats = pull((g_BLD, {name: g_aux for name in losses}))
    # As one array: each of many would be written to a stack of its own.
    return (g_BLD, consumer.layer(i, gradient, stats, carry)), ravel_pytree(stats)[0]

  runs = list(zip(transformer.runs(sites), *saved, strict=True))
  for (run_, of_run), inputs, stacks in reversed(runs):
    step, xs = functools.partial(backward, stacks), (*_numbers(run_), inputs, of_run)
    (g_BLD, carry), layer_stats = jax.lax.scan(step, (g_BLD, carry), xs, reverse=True)
    one = jax.tree.map(lambda tap: tap[0], site_tree.taps(of_run))
    stats.append(jax.vmap(ravel_pytree(one)[1])(layer_stats))
  return g_BLD, carry, tuple(reversed(stats))
