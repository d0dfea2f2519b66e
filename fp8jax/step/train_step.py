"""One optimizer step, and the state it carries."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax import params as params_lib
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.ops import site as site_lib
from fp8jax.ops import stored_params
from fp8jax.optim import factory as optim_build
from fp8jax.optim import gradients as gradients_lib
from fp8jax.optim import storage, update
from fp8jax.quantization import tensor_stats
from fp8jax.step import layerwise, loss_scale, metrics, run_spec
from fp8jax.step.state import State


def _abstract_leaves(plan: run_spec.RunSpec):
  """(params, opt) of State."""
  wide = params_lib.abstract(plan.declaration, plan.model.dims, plan.run.layout)

  both = jax.tree.map(update.abstract, plan.leaves, wide)
  return update.select(both, wide, 1), update.select(both, wide, 0)


def abstract_params(plan: run_spec.RunSpec):
  """Shapes, dtypes and shardings of parameters as the optimizer keeps them."""
  return _abstract_leaves(plan)[0]


def abstract_state(plan: run_spec.RunSpec, step: int = 0) -> State:
  """Shapes, dtypes and shardings of the state after `step` steps; allocates nothing."""
  layout = plan.run.layout
  params, opt = _abstract_leaves(plan)
  scalar = None if layout.mesh is None else NamedSharding(layout.mesh, PartitionSpec())

  def everywhere(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=scalar)

  # What the last step wrote; a fresh state is calibrated before its first.
  memories = {} if step == 0 else site_lib.scaling_states(plan.sites(phase=plan.phase(step - 1)))

  def one(dtype):
    return everywhere(jnp.zeros((), dtype))

  return State(
    step=cast(Any, one(jnp.int32)),
    params=params,
    opt=opt,
    memories=jax.tree.map(everywhere, memories),
    loss_scale=jax.tree.map(everywhere, loss_scale.fresh(plan.loss_scale)),
    room=jax.tree.map(everywhere, _initial_grad_autoscale(plan)),
    skipped=cast(Any, one(jnp.int32)),
    halted=cast(Any, one(jnp.bool_)),
  )


def make_state(plan: run_spec.RunSpec, params=None) -> State:
  """A fresh state, sharded at birth; random parameters unless some are given, which it uses up."""
  abstract = abstract_state(plan)

  def init(key, both):
    if both is None:
      params = params_lib.init(key, plan.declaration, plan.model.dims)
      both = jax.tree.map(update.init, plan.leaves, params)
    return State(
      step=jnp.zeros((), jnp.int32),
      params=update.select(both, plan.declaration, 1),
      opt=update.select(both, plan.declaration, 0),
      memories={},
      loss_scale=loss_scale.fresh(plan.loss_scale),
      room=_initial_grad_autoscale(plan),
      skipped=jnp.zeros((), jnp.int32),
      halted=jnp.zeros((), jnp.bool_),
    )

  shardings = None
  if plan.run.layout.mesh is not None:
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
  both = None
  if params is not None:
    # One after the other: all of them in float32 beside all of the state is more than a step takes.
    both = jax.tree.map(_kept_of, plan.leaves, params, abstract.opt, abstract.params)
  make = jax.jit(init, out_shardings=shardings, donate_argnums=1)
  return make(jax.random.key(plan.seed), both)


def _kept_of(leaf, param, *abstract):
  """`walk.init` of a parameter, which is gone afterwards."""
  init = jax.jit(
    functools.partial(update.init, leaf),
    out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    donate_argnums=0 if leaf.master is None else (),
  )
  made = init(param)
  if leaf.master is not None:  # of other bytes, so that nothing takes its place
    param.delete()
  return made


def _initial_grad_autoscale(plan: run_spec.RunSpec):
  quant = storage.GRADIENTS[plan.optim.grad_format]
  return gradients_lib.init_grad_autoscale(quant, plan.grad_accum_steps)


def gradients(plan: run_spec.RunSpec, params, sites, batch, scale=None, step: Any = 0, room=None):
  """(mean loss, gradients, {site: what it saw}, Aux) of a batch [B, L], or [A, B, L].

  The loss is one mean over all tokens of the step, however they are split into A microbatches, and
  has the aux losses of mixers in it; Aux are sums over tokens. Microbatches add as their gradients
  are kept (optim.grad_format); of what sites see, amaxes combine by maximum and counts by sum.

  Args:
    params: as the state has them.
    sites: their memories are amaxes of the unscaled loss's gradients.
    scale: of the loss while it is differentiated, a power of two; taken out again of all results.
    step: number of steps taken, for gradients that are rounded by chance.
    room: State.room.
  """
  total = jnp.maximum(batch["weights_BL"].sum(), 1)
  leaves = plan.leaves
  if scale is not None:
    sites = site_lib.with_scaled_gradients(sites, scale)
  sinks = jax.tree.map(_sink, leaves, params)

  def of_one(batch, micro, sites):
    def loss(sinks, taps):
      seen_by = site_lib.with_taps(sites, taps)
      pair = functools.partial(_weight, step=step, micro=micro, room=room)
      weights = jax.tree.map(pair, leaves, params, sinks)
      value, aux = transformer.loss_and_aux(weights, seen_by, batch, plan.model, plan.run)
      value = sum(aux.losses.values(), start=value) / total
      return value if scale is None else value * scale, aux

    (value, aux), (gradient, seen) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
      sinks, site_lib.taps(sites)
    )
    if plan.run.layout.mesh is not None:
      places = jax.tree.map(lambda x: x.sharding, abstract_gradients(plan))
      gradient = jax.lax.with_sharding_constraint(gradient, places)
    if scale is not None:
      value, gradient = value / scale, gradients_lib.scaled(gradient, 1 / scale)
      seen = site_lib.with_unscaled_gradients(sites, seen, scale)
    return value, gradient, seen, aux

  if plan.grad_accum_steps == 1:
    value, gradient, seen, aux = of_one(batch, 0, sites)
    return value, gradient, site_lib.by_name(sites, seen), aux

  def add(carry, xs):
    micro, batch = xs
    # Chances of its own: the same ones would make the same errors, which then add up.
    value, gradient, seen, aux = of_one(batch, micro, site_lib.with_folded_keys(sites, micro))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(plan.seed), step), micro)
    sums = gradients_lib.add(carry[1], gradient, key)
    return (carry[0] + value, sums, jax.tree.map(tensor_stats.combine, carry[2], seen)), aux

  nothing = jax.tree.map(lambda tap: tensor_stats.nothing(tap.shape), site_lib.taps(sites))
  zeros = jax.tree.map(jnp.zeros_like, sinks)
  start = (jnp.zeros(()), zeros, nothing)
  (value, gradient, seen), aux = jax.lax.scan(
    add, start, (jnp.arange(plan.grad_accum_steps), batch)
  )
  return value, gradient, site_lib.by_name(sites, seen), aux.sum()


def _sink(leaf, param):
  """What is differentiated: a parameter that is an array itself, where its gradient is one too."""
  if leaf.gradient is None and not stored_params.is_stored(param):
    return param
  return stored_params.grad_placeholder(param, leaf.gradient, leaf.lead)


def _weight(leaf, param, sink, *, step, micro, room):
  if leaf.gradient is None and not stored_params.is_stored(param):
    return sink
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(leaf.seed + 2), step), micro)
  mu = room.get("mu") if room else None
  if leaf.lead:
    key = jax.random.split(key, param.shape[0])
    mu = None if mu is None else jnp.broadcast_to(mu, param.shape[:1])
  return stored_params.Weight(param, sink, key, mu, leaf.gradient)


def abstract_gradients(plan: run_spec.RunSpec):
  """Shapes, dtypes and shardings of gradients: they lie as their parameters do."""
  params = params_lib.abstract(plan.declaration, plan.model.dims, plan.run.layout)

  def one(leaf, p):
    return update.placed(
      jax.eval_shape(lambda: stored_params.grad_placeholder(p, leaf.gradient, leaf.lead)), p
    )

  return jax.tree.map(one, plan.leaves, params)


def stops_on_nonfinite(plan: run_spec.RunSpec) -> bool:
  """Whether a step that is not finite ends the run."""
  # A dynamic loss scale meets overflows on purpose, to find the largest that does not.
  return plan.optim.on_nonfinite == "stop" and plan.loss_scale.kind == "none"


def after_failure(plan: run_spec.RunSpec, loss: float) -> tuple[str, str]:
  """(which parameters a state has that a batch halted, what keeps a run going), in words."""
  if not plan.optim.in_backward:
    return "the parameters that met it", "optim.on_nonfinite='skip'"
  saved, skip = (
    "the parameters that met it",
    "optim.on_nonfinite='skip' with optim.in_backward=False",
  )
  if np.isfinite(loss):
    saved += (
      ", but for what is behind the first bad gradient and has moved (optim.in_backward=True),"
    )
  return saved, skip


def make_step(plan: run_spec.RunSpec):
  """(state, batch, sites) -> (state, metrics), jitted, state donated.

  batch is [B, L], or [A, B, L] for A microbatches whose gradients are added up. With loud sites
  (RunSpec.sites) the same function, traced a second time, also returns what every site saw in
  metrics["seen"], and transformer.alignment.
  """
  shardings = jax.tree.map(lambda x: x.sharding, _abstract_leaves(plan))
  take = layerwise.take if plan.optim.in_backward else after_backward
  schedule = optim_build.schedule(plan.optim)
  stop = stops_on_nonfinite(plan)
  key = jax.random.key(plan.seed)

  def step(state: State, batch, sites):
    sites = site_lib.with_scaling_states(sites, state.memories)
    sites = site_lib.with_keys(sites, jax.random.fold_in(key, state.step))
    watched = {}
    if _is_loud(sites):
      # Before anything moves: parameters are moved in place.
      both = (state.params, transformer.alignment(state.params, plan.model))
      params, watched["alignment"] = jax.lax.optimization_barrier(both)
      state = dataclasses.replace(state, params=params)
    rate = schedule(state.step)
    taken = take(plan, state, sites, batch, rate)
    params, opt = taken.params, taken.opt
    if plan.run.layout.mesh is not None:  # scales too come to rest where they were
      params, opt = jax.lax.with_sharding_constraint((params, opt), shardings)
    memories = site_lib.next_scaling_states(sites, state.memories, taken.seen)
    if watched:
      watched["seen"] = taken.seen
    is_finite = taken.is_finite
    is_applied = is_finite & ~state.halted

    def keep(new, old):
      return jax.tree.map(lambda n, o: jnp.where(is_applied, n, o), new, old)

    moved, before = jnp.sqrt(taken.squares)
    values = metrics.of_step(taken.loss, taken.norm, moved, before, rate, is_finite)
    return State(
      step=state.step + ~state.halted,
      params=params,
      opt=opt,
      memories=keep(memories, state.memories),
      loss_scale=loss_scale.update(state.loss_scale, is_finite, plan.loss_scale),
      room=keep(taken.room, state.room),
      skipped=state.skipped + (~is_finite & ~state.halted),
      halted=state.halted | (~is_finite & stop),
    ), {**values, **taken.values, **watched}

  options = choose.compiler_options(plan.device)
  return jax.jit(step, donate_argnums=0, compiler_options=options)


def after_backward(plan: run_spec.RunSpec, state: State, sites, batch, rate) -> update.StepResult:
  """A step that moves every parameter when all gradients are there.

  Args:
    sites, batch: as the model takes them.
    rate: learning rate.
  """
  scale = state.loss_scale.get("scale")
  loss, gradient, seen, aux = gradients(
    plan, state.params, sites, batch, scale, state.step, state.room
  )
  norm = gradients_lib.norm(gradient)
  # Narrow formats saturate: an infinity can pass through a product unnoticed, so sites are asked.
  is_finite = jnp.isfinite(loss) & jnp.isfinite(norm) & _all_finite(seen)
  factor = update.clip_factor(norm, plan.optim.grad_clip_norm)
  now = update.UpdateArgs(state.step, rate, factor, is_finite & ~state.halted)
  with jax.named_scope("optimizer"):
    opt, params, squares = update.update_params(
      plan.leaves, plan.declaration, plan.run.layout, gradient, state.opt, state.params, now
    )
  total = jnp.maximum(batch["weights_BL"].sum(), 1)
  room, values = state.room, metrics.of_aux(aux, total, plan.model.num_layers)
  if room:
    share = gradients_lib.saturated(gradient)
    room = gradients_lib.next_grad_autoscale(room, share)
    values |= {"gradient_room": state.room["mu"], "gradient_saturation": share}
  if scale is not None:
    values["loss_scale"] = scale
  return update.StepResult(loss, norm, is_finite, params, opt, squares, seen, room, values)


def _is_loud(sites) -> bool:
  return any(s.tap.shape[-1] == tensor_stats.LOUD for s in site_lib.flatten(sites).values())


def _all_finite(seen):
  """Whether every amax of every site is a number."""
  each = [jnp.isfinite(tap[..., 0]).all() for tap in seen.values()]
  return functools.reduce(jnp.logical_and, each, jnp.asarray(True))


def calibrate(plan: run_spec.RunSpec, state: State, batch, phase: int) -> State:
  """The state, scales of its next step chosen from this batch where they are not current.

  Gradients are those under the loss scale, which is halved until they are finite.
  """
  sites = plan.sites(phase=phase)
  if not site_lib.scaling_states(sites):
    return dataclasses.replace(state, memories={})

  @functools.partial(jax.jit, compiler_options=choose.compiler_options(plan.device))
  def look(params, batch, scale):
    seen = gradients(plan, params, site_lib.with_current_scales(sites), batch, scale)[2]
    return site_lib.calibrated(sites, seen), _all_finite(seen)

  scaling = state.loss_scale
  memories, is_finite = look(state.params, batch, scaling.get("scale"))
  while scaling and not is_finite and scaling["scale"] > loss_scale.SMALLEST:
    scaling = loss_scale.update(scaling, is_finite, plan.loss_scale)
    memories, is_finite = look(state.params, batch, scaling["scale"])
  return dataclasses.replace(state, memories=memories, loss_scale=scaling)
