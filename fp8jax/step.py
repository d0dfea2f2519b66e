"""One optimizer step, and the state it carries."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax import config, loss_scale, metrics
from fp8jax import params as params_lib
from fp8jax.kernels import backend as backend_lib
from fp8jax.models import transformer
from fp8jax.ops import site as site_lib
from fp8jax.optim import build as optim_build
from fp8jax.quant import observe, packed
from fp8jax.state import State


def _transformation(plan: config.Plan):
  layout, seed = plan.run.layout, plan.config.seed
  return optim_build.build(plan.optim, plan.declaration, layout, seed)


def abstract_state(plan: config.Plan, step: int = 0) -> State:
  """Shapes, dtypes and shardings of the state after `step` steps; allocates nothing."""
  layout = plan.run.layout
  params = params_lib.abstract(plan.declaration, plan.model.dims, layout)
  tx = _transformation(plan)
  scalar = None if layout.mesh is None else NamedSharding(layout.mesh, PartitionSpec())

  def everywhere(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=scalar)

  def beside(moment, param):
    if not isinstance(moment, packed.Packed):
      return param
    placed = packed.shardings(moment, param.sharding)
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), moment, placed
    )

  # Moments have the shape of a parameter and live where it lives; the rest are small.
  opt = optax.tree_map_params(
    tx,
    beside,
    jax.eval_shape(tx.init, params),
    params,
    transform_non_params=everywhere,
    is_leaf=lambda x: isinstance(x, packed.Packed),
  )
  # What the last step wrote; a fresh state is calibrated before its first.
  memories = {} if step == 0 else site_lib.memories(plan.sites(phase=plan.phase(step - 1)))

  def one(dtype):
    return everywhere(jnp.zeros((), dtype))

  return State(
    step=cast(Any, one(jnp.int32)),
    params=params,
    opt=opt,
    memories=jax.tree.map(everywhere, memories),
    loss_scale=jax.tree.map(everywhere, loss_scale.fresh(plan.config.loss_scale)),
    skipped=cast(Any, one(jnp.int32)),
    halted=cast(Any, one(jnp.bool_)),
  )


def make_state(plan: config.Plan, params=None) -> State:
  """A fresh state, sharded at birth; random parameters unless some are given."""
  abstract = abstract_state(plan)
  tx = _transformation(plan)

  def init(key, params):
    if params is None:
      params = params_lib.init(key, plan.declaration, plan.model.dims)
    zero = jnp.zeros((), jnp.int32)
    scale = loss_scale.fresh(plan.config.loss_scale)
    return State(zero, params, tx.init(params), {}, scale, zero, jnp.zeros((), jnp.bool_))

  shardings = None
  if plan.run.layout.mesh is not None:
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
  make = jax.jit(init, out_shardings=shardings, donate_argnums=1)
  return make(jax.random.key(plan.config.seed), params)


def gradients(plan: config.Plan, params, sites, batch, scale=None):
  """(mean loss, gradients, {site: what it saw}) of a batch [B, L], or [A, B, L] for A microbatches.

  Microbatches add in float32; of what sites see, amaxes combine by maximum and counts by sum. The
  loss is one mean over all tokens of the step, however they are split.

  Args:
    scale: of the loss while it is differentiated; taken out of what is returned again.
  """
  total = jnp.maximum(batch["weights_BL"].sum(), 1)
  shardings = params_lib.shardings(plan.declaration, plan.run.layout)

  def of_one(batch):
    def loss(params, taps):
      seen_by = site_lib.with_taps(sites, taps)
      value = transformer.loss(params, seen_by, batch, plan.model, plan.run) / total
      return value if scale is None else value * scale

    value, (gradient, seen) = jax.value_and_grad(loss, argnums=(0, 1))(params, site_lib.taps(sites))
    if plan.run.layout.mesh is not None:
      gradient = jax.lax.with_sharding_constraint(gradient, shardings)
    if scale is not None:
      value, gradient = optax.tree.scale(1 / scale, (value, gradient))
    return value, gradient, seen

  if plan.config.accumulation == 1:
    value, gradient, seen = of_one(batch)
    return value, gradient, site_lib.by_name(sites, seen)

  def add(carry, micro):
    value, gradient, seen = of_one(micro)
    sums = jax.tree.map(jnp.add, carry[:2], (value, gradient))
    return (*sums, jax.tree.map(observe.combine, carry[2], seen)), None

  zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
  nothing = jax.tree.map(lambda tap: observe.nothing(tap.shape), site_lib.taps(sites))
  (value, gradient, seen), _ = jax.lax.scan(add, (*zeros, nothing), batch)
  return value, gradient, site_lib.by_name(sites, seen)


def make_step(plan: config.Plan):
  """(state, batch, sites) -> (state, metrics), jitted, state donated.

  batch is [B, L], or [A, B, L] for A microbatches whose gradients are accumulated in float32. With
  loud sites (Plan.sites) the same function, traced a second time, also returns what every site saw
  in metrics["seen"], and transformer.alignment.
  """
  tx = _transformation(plan)
  rest = jax.tree.map(lambda x: x.sharding, abstract_state(plan).opt)
  schedule = optim_build.schedule(plan.optim)
  # A dynamic loss scale meets overflows on purpose, to find the largest that does not.
  stop = plan.config.optim.on_nonfinite == "stop" and plan.config.loss_scale.kind == "none"
  key = jax.random.key(plan.config.seed)

  def step(state: State, batch, sites):
    sites = site_lib.with_memories(sites, state.memories)
    sites = site_lib.with_keys(sites, jax.random.fold_in(key, state.step))
    scale = state.loss_scale.get("scale")
    loss, gradient, seen = gradients(plan, state.params, sites, batch, scale)
    rate = schedule(state.step)
    # Narrow formats saturate: an infinity can pass through a product unnoticed, so sites are asked.
    is_finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(gradient)) & _all_finite(seen)
    is_applied = is_finite & ~state.halted

    def keep(new, old):
      return jax.tree.map(lambda n, o: jnp.where(is_applied, n, o), new, old)

    with jax.named_scope("optimizer"):
      updates, opt = tx.update(gradient, state.opt, state.params, is_applied=is_applied)
      if plan.run.layout.mesh is not None:
        opt = jax.lax.with_sharding_constraint(opt, rest)  # scales too come to rest where they were
      updates = optax.tree.scale(-jnp.asarray(rate), updates)
      params = optax.apply_updates(state.params, updates)
    memories = site_lib.next_memories(sites, state.memories, seen)
    values = metrics.of_step(loss, gradient, updates, state.params, rate, is_finite)
    if scale is not None:
      values["loss_scale"] = scale
    if _is_loud(sites):
      values = {**values, "seen": seen, "alignment": transformer.alignment(state.params)}
    return State(
      step=state.step + ~state.halted,
      params=keep(params, state.params),
      opt=opt,
      memories=keep(memories, state.memories),
      loss_scale=loss_scale.update(state.loss_scale, is_finite, plan.config.loss_scale),
      skipped=state.skipped + (~is_finite & ~state.halted),
      halted=state.halted | (~is_finite & stop),
    ), values

  options = backend_lib.compiler_options(plan.device)
  return jax.jit(step, donate_argnums=0, compiler_options=options)


def _is_loud(sites) -> bool:
  return any(s.tap.shape[-1] == observe.LOUD for s in site_lib.flatten(sites).values())


def _all_finite(seen):
  """Whether every amax of every site is a number."""
  each = [jnp.isfinite(tap[..., 0]).all() for tap in seen.values()]
  return functools.reduce(jnp.logical_and, each, jnp.asarray(True))


def calibrate(plan: config.Plan, state: State, batch, phase: int) -> State:
  """The state, scales of its next step chosen from this batch where they are not current."""
  sites = plan.sites(phase=phase)
  if not site_lib.memories(sites):
    return dataclasses.replace(state, memories={})

  @functools.partial(jax.jit, compiler_options=backend_lib.compiler_options(plan.device))
  def look(params, batch):
    seen = gradients(plan, params, site_lib.with_current_scales(sites), batch)[2]
    return site_lib.calibrated(sites, seen)

  return dataclasses.replace(state, memories=look(state.params, batch))
