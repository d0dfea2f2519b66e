"""Gradients of a step: of one batch, or added up over microbatches.

Devices that hold the same weight see other tokens. With microbatches each keeps its own terms of a
weight's gradient (stored_params.Parts) while they add up, and one sum over these devices per step
follows. Summed in each microbatch are norms and biases, gradients in fewer bits, weights that a
model changes before their product (down of Smooth-SwiGLU), a reward head, and the embedding where
the batch is split first along an axis that splits the embedding too.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax import params as params_lib
from fp8jax.models import transformer, unit_scaling
from fp8jax.ops import collectives, linear, site_tree, stored_params, weight_operands
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.optim import gradients as gradients_lib
from fp8jax.optim import update
from fp8jax.quantization import tensor_stats
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.step import distillation, layer_loop, quantized_once, train_spec


def gradients(
  spec: train_spec.TrainSpec, params, sites, batch, scale=None, step: Any = 0, grad_autoscale=None,
  teacher=None,
):  # fmt: skip
  """(mean loss, gradients, {site: tensor statistics}, Aux) of a batch [B, L], or [A, B, L].

  The loss is one mean over all tokens of the step, however they are split into A microbatches, and
  has the aux losses of mixers in it; Aux are sums over tokens. Gradients of microbatches add in
  optim.grad_format; amaxes of sites combine by maximum, counts by sum.

  Args:
    params: as the state has them.
    sites: their scaling states are amaxes of the unscaled loss's gradients.
    scale: of the loss while it is differentiated, a power of two; taken out again of all results.
    step: number of steps taken, for gradients that are rounded stochastically.
    grad_autoscale, teacher: of State; of distillation.py.
  """
  total, leaves = jnp.maximum(batch["weights_BL"].sum(), 1), spec.leaves
  if scale is not None:
    sites = scaling_lib.with_scaled_gradients(sites, scale)
  parts, ahead = _parts(spec), _ahead(spec)
  sinks = jax.tree.map(_sink, leaves, params, parts, ahead)
  made = quantized_once.of_layers(spec, params, sites, batch)

  def of_one(batch, micro, sites):
    batch = distillation.taught(spec, params, batch, teacher)

    def loss(sinks, taps):
      pair = functools.partial(_weight, step=step, micro=micro, grad_autoscale=grad_autoscale)
      weights = jax.tree.map(pair, leaves, params, sinks, parts, ahead)
      weights = quantized_once.attached_to_runs(weights, sites, made)
      own = (weights, site_tree.with_taps(sites, taps), batch, spec.model, spec.run)
      value, aux = transformer.loss_and_aux(*own)
      value = unit_scaling.mean(sum(aux.losses.values(), start=value), total, spec.model)
      return value if scale is None else value * scale, aux

    differentiate = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, aux), (gradient, stats) = differentiate(sinks, site_tree.taps(sites))
    if spec.run.layout.mesh is not None:
      gradient = jax.lax.with_sharding_constraint(gradient, _places(spec, parts))
    if scale is not None:
      value, gradient = value / scale, gradients_lib.scaled(gradient, 1 / scale)
      stats = scaling_lib.with_unscaled_gradients(sites, stats, scale)
    return value, gradient, stats, aux

  if spec.grad_accum_steps == 1:
    value, gradient, stats, aux = of_one(batch, 0, sites)
    return value, gradient, site_tree.by_name(sites, stats), aux

  def apart(batch, micro, sites, sums):
    value, gradient, stats, aux = of_one(batch, micro, sites)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(spec.seed), step), micro)
    return value, gradients_lib.add(sums, gradient, key), stats, aux

  nothing = jax.tree.map(jnp.zeros_like, sinks)
  trees = parts, ahead, _joined(spec, sites), _read_in_place(spec, params, sites, batch)
  in_place = _Sums(spec, params, trees, made, total, teacher)
  added = in_place if adds_in_place(spec) else apart
  value, gradient, stats, aux = _of_microbatches(spec, added, batch, sites, nothing)
  return value, _summed(spec, gradient, parts), site_tree.by_name(sites, stats), aux


def _of_microbatches(spec: train_spec.TrainSpec, added, batch, sites, nothing):
  """(loss, sums of gradients, observations, Aux) of a batch [A, B, L].

  Args:
    added: (batch [B, L], its number, sites, sums) -> (loss, sums, observations, Aux).
    nothing: sums of no gradients.
  """

  def add(carry, xs):
    micro, batch = xs
    # Random keys of its own: with the same ones rounding errors would be the same and add up.
    value, sums, stats, aux = added(batch, micro, site_lib.with_folded_keys(sites, micro), carry[1])
    return (carry[0] + value, sums, jax.tree.map(tensor_stats.combine, carry[2], stats)), aux

  stats = jax.tree.map(lambda tap: tensor_stats.nothing(tap.shape), site_tree.taps(sites))
  of_all = (jnp.arange(spec.grad_accum_steps), batch)
  sums, aux = jax.lax.scan(add, (jnp.zeros(()), nothing, stats), of_all)
  return *sums, aux.sum()


def adds_in_place(spec: train_spec.TrainSpec) -> bool:
  """Whether the backward pass of a microbatch adds each layer's gradient to the sums as soon as it
  is there, so that the gradients of all layers exist once and not twice.

  Of other formats than float32 a sum is rounded.
  """
  is_wide = all(leaf.gradient is None for leaf in jax.tree.leaves(spec.leaves))
  is_plain = spec.loss_scale.kind == "none" and not spec.run.is_invariant
  return spec.grad_accum_steps > 1 and is_wide and is_plain


class _Sums:
  """Adds gradients to sums like the differentiated values, in place (layer_loop.Consumer).

  On one device the products of layers add the gradients of their weights themselves (`_joined`),
  each as soon as it is made, and a kernel that can adds it before it is stored. On a mesh the
  gradients of a layer are summed over devices first.

  Args:
    trees: like the declaration, of `_parts`, `_ahead`, `_joined` and `_read_in_place`.
  """

  def __init__(self, spec: train_spec.TrainSpec, params, trees, made, total, teacher):
    *trees, self._in_place = trees
    self._spec, self._params, self._trees = spec, params, (spec.leaves, *trees)
    self._made, self._total, self._teacher = made, total, teacher
    self._places = None if spec.run.layout.mesh is None else _places(spec, trees[0])

  def __call__(self, batch, micro, sites, sums):
    """(loss, sums, observations, Aux) of a microbatch [B, L]."""
    del micro
    spec, params = self._spec, self._params
    batch = distillation.taught(spec, params, batch, self._teacher)
    value, aux, sums, stats = layer_loop.differentiate(
      spec, params, sites, batch, self._total, self, lambda _: sums, self._made
    )
    return value, sums, stats, aux

  def sinks(self, params, part, carry=None):
    leaves, parts, ahead, joined = map(part, self._trees)

    def one(leaf, param, parts, ahead, joined, sums=None):
      return sums if joined else _sink(dataclasses.replace(leaf, lead=0), param, parts, ahead)

    sums = () if carry is None else (part(carry),)
    return jax.tree.map(one, leaves, params, parts, ahead, joined, *sums)

  def paired(self, params, sinks, part, i=None):
    leaves, parts, ahead, joined = map(part, self._trees)

    def one(leaf, param, sink, parts, ahead, joined):
      if joined:
        return stored_params.Weight(param, sink, None, layer=i)
      if leaf.is_frozen or _is_own_sink(leaf, param, parts, ahead):
        return _weight(leaf, param, sink, parts, ahead, step=0, micro=0, grad_autoscale=None)
      return stored_params.Weight(param, sink, None, parts=parts)

    return jax.tree.map(one, leaves, params, sinks, parts, ahead, joined)

  def layer_params(self, i, carry=None):
    del carry
    one = lambda is_entry, x: Entry(x, i) if is_entry else jax.tree.map(lambda x: x[i], x)  # noqa: E731
    return jax.tree.map(one, self._in_place["layers"], self._params["layers"])

  def named(self, gradient, stats, carry):
    del stats
    if self._places is not None:
      places = {k: self._places[k] for k in gradient}
      gradient = jax.lax.with_sharding_constraint(gradient, places)
    sums = {k: jax.tree.map(jnp.add, carry[k], g) for k, g in gradient.items()}
    return {**carry, **sums}

  def layer(self, i, gradient, stats, carry):
    del stats

    def one(joined, total, g, place=None):
      if joined:  # the sums with it
        return g
      if place is not None:
        of_layer = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
        g = jax.lax.with_sharding_constraint(g, of_layer)
      # Not Entry.plus, whose barrier takes a fifth of the reduce-scatters from beside products.
      return jax.lax.dynamic_update_index_in_dim(total, total[i] + g, i, 0)

    places = () if self._places is None else (self._places["layers"],)
    joined = layer_loop.of_layers(self._trees[-1])
    return {**carry, "layers": jax.tree.map(one, joined, carry["layers"], gradient, *places)}


def _parts(spec: train_spec.TrainSpec):
  """Tree of the Parts of weights whose terms devices keep, else None."""
  layout = spec.run.layout

  def one(leaf, p):
    held = {a for letter in p.letters for a in layout.weight_axes(letter)}
    over = tuple(a for a in layout.act_axes("B") if layout.size((a,)) > 1 and a not in held)
    # The embedding is read by parts of the batch, whose rows are one piece.
    split = tuple(a for a in layout.act_axes("B") if layout.size((a,)) > 1)
    is_embedding = p.letters == "VD" and split[: len(over)] == over
    is_weight = p.trainable and (p.inputs is not None or is_embedding)
    apart = over and is_weight and leaf.gradient is None
    return stored_params.Parts(over, layout.size(over)) if apart else None

  if layout.mesh is None or spec.grad_accum_steps == 1:
    return jax.tree.map(lambda leaf: None, spec.leaves)
  return jax.tree.map(one, spec.leaves, spec.declaration)


def _joined(spec: train_spec.TrainSpec, sites):
  """Tree: whether the gradient of a layer's weight is added to the sums by whoever makes it.

  A site of one product that is the only reader of its weight: the sums would count twice else.
  """
  joined = jax.tree.map(lambda leaf: () if leaf.is_frozen else False, spec.leaves)
  if spec.run.layout.mesh is None:
    for key, declared, of_runs in _trained(spec, sites):
      if all(type(site) is site_lib.Site for site in of_runs):
        joined["layers"][key][declared.name] = True
  return joined


def _read_in_place(spec: train_spec.TrainSpec, params, sites, batch):
  """Tree: whether kernels read a layer's weight where it lies in its stack, in some layers at
  least; the products of others take their layers out.

  Args:
    params, sites: as the state has them.
    batch: [A, B, L].
  """
  in_place, run = jax.tree.map(lambda _: False, spec.leaves), spec.run
  if run.layout.weight_axes("N"):  # a device has no whole stack
    return in_place
  tokens = dict(zip("BL", batch["tokens_BL"].shape[-2:], strict=True))
  for key, declared, of_runs in _trained(spec, sites):
    weights = params["layers"][key][declared.name]
    is_read = (
      linear.reads_in_place(weight_operands.of_layer(weights, x, declared.eqn, tokens, run.dtype))
      for x in of_runs
      if type(x) is site_lib.Site
    )
    in_place["layers"][key][declared.name] = any(is_read)
  return in_place


def _trained(spec: train_spec.TrainSpec, sites):
  """(key of a mixer, GemmSite, its sites by run of layers) of the weights of layers with a float32
  gradient that nothing but their products reads."""
  for mixer in transformer.mixers(spec.model):
    for declared in quantized_once.declared(spec, mixer):
      leaf = spec.leaves["layers"][mixer.key][declared.name]
      if not leaf.is_frozen and leaf.gradient is None:
        yield mixer.key, declared, [x[mixer.key][declared.name] for x in sites["layers"]]


def _ahead(spec: train_spec.TrainSpec):
  """Tree: whether a weight may be quantized ahead of its products, and is then no array."""
  is_on = quantized_once.is_on(spec)
  return jax.tree.map(lambda p: is_on and p.inputs is not None, spec.declaration)


def _sink(leaf, param, parts, ahead):
  """The differentiated value: the parameter itself where it and its gradient are plain arrays."""
  if leaf.is_frozen:
    return ()
  if _is_own_sink(leaf, param, parts, ahead):
    return param
  return stored_params.grad_placeholder(param, leaf.gradient, leaf.lead, parts)


def _is_own_sink(leaf, param, parts, ahead) -> bool:
  is_plain = parts is None and not ahead and not stored_params.is_stored(param)
  return leaf.gradient is None and is_plain


def _weight(leaf, param, sink, parts, ahead, *, step, micro, grad_autoscale):
  if leaf.is_frozen:  # float32 is an array as it is, but for a weight with operands beside it
    is_array = leaf.master is None and not ahead
    return param if is_array else stored_params.frozen(param)
  if _is_own_sink(leaf, param, parts, ahead):
    return sink
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(leaf.seed + 2), step), micro)
  mu = grad_autoscale.get("mu") if grad_autoscale else None
  if leaf.lead:
    key = jax.random.split(key, param.shape[0])
    mu = None if mu is None else jnp.broadcast_to(mu, param.shape[:1])
  return stored_params.Weight(param, sink, key, mu, leaf.gradient, parts=parts)


def _summed(spec: train_spec.TrainSpec, gradient, parts):
  """The gradients, of those that have parts the sums of their terms."""
  layout = spec.run.layout
  if layout.mesh is None:
    return gradient

  def one(leaf, g, place, parts):
    if parts is None:
      return g
    if layout.wire is None:
      return jnp.sum(g, axis=leaf.lead)
    local = functools.partial(collectives.sum_of_terms, names=parts.axes, layout=layout)
    for _ in range(leaf.lead):  # layers are tensors of their own
      local = jax.vmap(local)
    local = functools.partial(lambda sums, g: sums(g.squeeze(leaf.lead)), local)
    terms = _terms(leaf, place, parts).spec
    return collectives.on_mesh(local, layout, (terms,), place.spec)(g)

  places = _places(spec)
  gradient = jax.tree.map(one, spec.leaves, gradient, places, parts)
  return jax.lax.with_sharding_constraint(gradient, places)


def _terms(leaf, place, parts):
  """Where the terms of a gradient lie."""
  lead, rest = place.spec[: leaf.lead], place.spec[leaf.lead :]
  return NamedSharding(place.mesh, PartitionSpec(*lead, parts.axes, *rest))


def _places(spec: train_spec.TrainSpec, parts=None):
  """Shardings of gradients, or of the terms of those that have parts."""
  whole = jax.tree.map(lambda x: x.sharding, abstract(spec))
  if parts is None:
    return whole

  at = lambda leaf, place, parts: place if parts is None else _terms(leaf, place, parts)  # noqa: E731
  return jax.tree.map(at, spec.leaves, whole, parts)


def abstract(spec: train_spec.TrainSpec):
  """Shapes, dtypes and shardings of gradients: they lie as their parameters do."""
  params = params_lib.abstract(spec.declaration, spec.model.dims, spec.run.layout)

  def one(leaf, p):
    if leaf.is_frozen:
      return ()
    return update.placed(
      jax.eval_shape(lambda: stored_params.grad_placeholder(p, leaf.gradient, leaf.lead)), p
    )

  return jax.tree.map(one, spec.leaves, params)
