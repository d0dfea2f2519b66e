"""Loss and gradients of a batch, one layer's gradient at a time.

Differentiating a loop over layers gives their gradients as one stack. Here the backward pass is
written out: a loop over the layers from the last to the first differentiates a layer, and hands its
gradient to somebody who uses it in place: layerwise.py moves the layer, gradients.py adds it to the
sums of microbatches. With memory.remat_policy="full" the forward loop saves the input of each
layer, which is computed again; else it saves what the derivative reads (halves.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fp8jax.kernels import choose
from fp8jax.models import transformer, unit_scaling
from fp8jax.models.mixer import Aux
from fp8jax.ops import residuals, site_tree
from fp8jax.step import halves, quantized_once


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
  context = transformer.layer_context(batch, cfg, run)
  loops = _loops(spec, sites, made, context, consumer)
  # Nothing reads sums of a forward pass; their shapes are a carry's.
  unread = jax.eval_shape(begin, jax.ShapeDtypeStruct((), jnp.float32))
  x_BLD, saved, aux = _forward(loops, x_BLD, unread)
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
  g_BLD, carry, stats = _backward(loops, g_BLD, g_loss, carry, saved)
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


class _Known(NamedTuple):
  """A layer, as the loops of both passes read it.

  Attributes:
    params: as the consumer has them.
    operands: of weights that are quantized once per step.
    sites: of the layer.
    i: its number among all layers.
  """

  params: Any
  operands: dict[str, Any]
  sites: Any
  i: jax.Array


@dataclasses.dataclass(frozen=True)
class _Loop:
  """A run of layers that multiply alike.

  Attributes:
    layers: among all.
    sites, stacks: of the run, stacked; stacks of quantized_once.of_layers.
  """

  spec: Any
  consumer: Consumer
  layers: slice
  sites: Any
  stacks: Mapping[str, Any]
  context: transformer.LayerContext

  @property
  def xs(self):
    """Of every layer its numbers, among all and in the run (slices of stacks would be copies), and
    its sites."""
    i = jnp.arange(self.layers.start, self.layers.stop)
    return i, i - self.layers.start, self.sites

  def known(self, of_layer, carry=None) -> _Known:
    """Of a layer of `xs`."""
    i, n, sites = of_layer
    operands = quantized_once.layer(self.stacks, n)
    return _Known(self.consumer.layer_params(i, carry), operands, sites, i)

  def others(self, known: _Known, carry):
    """(sinks, taps): what a layer is differentiated by beside its input."""
    return self.consumer.sinks(known.params, of_layers, carry), site_tree.taps(known.sites)

  def apply(self, context: transformer.LayerContext, known: _Known, x_BLD, sinks, taps):
    """((the residual stream after a layer, its losses), Aux), to be differentiated."""
    cfg, run = self.spec.model, self.spec.run
    weights = self.consumer.paired(known.params, sinks, of_layers, known.i)
    of_layer = (quantized_once.attached(weights, known.operands),
                site_tree.with_taps(known.sites, taps))  # fmt: skip
    layer = functools.partial(transformer.layer, cfg=cfg, run=run)
    if run.remat != "full":  # which the loops are themselves
      layer = transformer.remat(layer, run)
    x_BLD, aux = layer(x_BLD, of_layer, context)
    return (x_BLD, aux.losses), aux

  def halves(self, x_BLD, unread) -> halves.Halves | None:
    """Of a layer; None where its backward pass computes it again from its input.

    Args:
      unread: the shapes of a carry.
    """
    if self.spec.run.remat == "full":
      return None
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.xs)
    known = jax.eval_shape(self.known, first)
    name = residuals.PRODUCT if writes_what_it_saves(self.spec) else ""
    return halves.halves(self.apply, self.others, self.context, known, unread, x_BLD, name)


def writes_what_it_saves(spec) -> bool:
  """Whether products write residuals into stacks of all layers, in the loops of `differentiate`.

  Not on a mesh, where each device would make room for all of a stack. Nor where
  names are inside jax.checkpoint, as other policies have them.
  """
  is_plain = spec.run.layout.mesh is None and spec.run.remat == "none"
  return is_plain and choose.write_in_loops(spec.device)


def _loops(spec, sites, made, context, consumer: Consumer) -> list[_Loop]:
  runs, empty = list(transformer.runs(sites)), {}
  return [
    _Loop(spec, consumer, layers, of_run, stacks, context)
    for (layers, of_run), stacks in zip(runs, made or [empty] * len(runs), strict=True)
  ]


def _forward(loops: list[_Loop], x_BLD, unread):
  """(the residual stream after all layers, of every run (its halves, what its layers save), Aux).

  Args:
    unread: the shapes of a carry.
  """
  saved, total = [], Aux()

  def again(loop: _Loop, x_BLD, of_layer):
    """Saves the input."""
    cfg, run = loop.spec.model, loop.spec.run
    known = loop.known(of_layer)
    read = quantized_once.read(known.params, known.operands)
    layer_inputs = residuals.compress(x_BLD, run.residuals.layer_inputs)
    x_BLD, aux = transformer.layer(x_BLD, (read, known.sites), loop.context, cfg, run)
    return x_BLD, (layer_inputs, aux)

  def once(loop: _Loop, of_loop: halves.Halves, x_BLD, of_layer):
    """Saves what the derivative reads."""
    (x_BLD, _), aux, kept = of_loop.forward(loop.context, loop.known(of_layer), x_BLD)
    return x_BLD, (kept, aux)

  for loop in loops:
    of_loop = loop.halves(x_BLD, unread)
    if of_loop is not None and of_loop.placed:
      x_BLD, (kept, aux) = _in_place(loop, of_loop, x_BLD)
    elif of_loop is not None:
      x_BLD, (kept, aux) = jax.lax.scan(functools.partial(once, loop, of_loop), x_BLD, loop.xs)
    else:
      x_BLD, (kept, aux) = jax.lax.scan(functools.partial(again, loop), x_BLD, loop.xs)
    saved.append((of_loop, kept))
    total += aux.sum()
  return x_BLD, saved, total


def _in_place(loop: _Loop, of_loop: halves.Halves, x_BLD):
  """`_forward` of a run of layers, whose products write what is saved into its stack.

  XLA has them do so if a loop's own counter says which entry it is; that of jax.lax.scan is hidden.
  """
  count, num = loop.layers.stop - loop.layers.start, len(of_loop.placed)

  def layer(i, x_BLD, stacks):
    of_layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), loop.xs)
    (x_BLD, _), aux, kept = of_loop.forward(loop.context, loop.known(of_layer), x_BLD, stacks, i)
    return x_BLD, kept[:num], (kept[num:], aux)

  def step(carry):
    i, x_BLD, stacks, others = carry
    x_BLD, stacks, made = layer(i, x_BLD, stacks)
    put = lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, x, i, 0)  # noqa: E731
    return i + 1, x_BLD, stacks, jax.tree.map(put, others, made)

  zeros = lambda x: jax.lax.full((count, *x.shape), 0, x.dtype)  # noqa: E731
  # Zeros would be written. Of the others equal ones are one stack, as long as all begin as zeros.
  shapes: list[Any] = [r.aval for r in of_loop.placed]
  stacks = [jax.lax.empty((count, *x.shape), x.dtype) for x in shapes]
  *_, made = jax.eval_shape(layer, jnp.int32(0), x_BLD, stacks)
  first = jnp.int32(0), x_BLD, stacks, jax.tree.map(zeros, made)
  _, x_BLD, stacks, (kept, aux) = jax.lax.while_loop(lambda carry: carry[0] < count, step, first)
  return x_BLD, ([*stacks, *kept], aux)


def _backward(loops: list[_Loop], g_BLD, g_aux, carry, saved):
  """(gradient of the first layer's input, carry, tensor statistics: one tree per run of layers).

  Args:
    g_aux: the gradient of every aux loss.
    saved: of `_forward`.
  """
  stats = []

  def backward(loop: _Loop, of_loop: halves.Halves | None, carry, xs):
    g_BLD, carry = carry
    of_layer, kept = xs
    known = loop.known(of_layer, carry)
    if of_loop is not None:
      pull = of_loop.derivative(loop.context, known, carry, kept)
      _, losses = jax.tree.unflatten(of_loop.value, [g_aux] * of_loop.value.num_leaves)
    else:
      x_BLD = residuals.decompress(kept, loop.spec.run.dtype)
      # jax.checkpoint's name for what is computed again: the proof of the step looks for it.
      with jax.named_scope("rematted_computation"):
        layer = functools.partial(loop.apply, loop.context, known)
        others = loop.others(known, carry)
        (_, losses), pull, _ = jax.vjp(layer, x_BLD, *others, has_aux=True)
    g_BLD, gradient, stats = pull((g_BLD, {name: g_aux for name in losses}))
    # As one array: each of many would be written to a stack of its own.
    carry = loop.consumer.layer(known.i, gradient, stats, carry)
    return (g_BLD, carry), ravel_pytree(stats)[0]

  for loop, (of_loop, kept) in zip(reversed(loops), reversed(saved), strict=True):
    step = functools.partial(backward, loop, of_loop)
    (g_BLD, carry), layer_stats = jax.lax.scan(step, (g_BLD, carry), (loop.xs, kept), reverse=True)
    one = jax.tree.map(lambda tap: tap[0], site_tree.taps(loop.sites))
    stats.append(jax.vmap(ravel_pytree(one)[1])(layer_stats))
  return g_BLD, carry, tuple(reversed(stats))
