"""One optimizer step, and the state it carries."""

import dataclasses
import functools
import zlib
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax.errors import UserError
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree, stored_params
from fp8jax.optim import gradients as gradients_lib
from fp8jax.optim import groups, param_stats, storage, update
from fp8jax.optim import schedule as schedule_lib
from fp8jax.quantization import tensor_stats
from fp8jax.step import distillation, layerwise, loss_scale, metrics, train_spec
from fp8jax.step.gradients import gradients
from fp8jax.step.state import State, StepFn


def _abstract_leaves(spec: train_spec.TrainSpec):
  """(params, opt) of State."""
  abstract = params_lib.abstract(spec.declaration, spec.model.dims, spec.run.layout)

  both = jax.tree.map(update.abstract, spec.leaves, abstract)
  return update.select(both, abstract, 1), update.select(both, abstract, 0)


def abstract_params(spec: train_spec.TrainSpec):
  """Shapes, dtypes and shardings of parameters as the optimizer keeps them."""
  return _abstract_leaves(spec)[0]


def abstract_state(spec: train_spec.TrainSpec, step: int = 0) -> State:
  """Shapes, dtypes and shardings of the state after `step` steps; allocates nothing."""
  params, opt = _abstract_leaves(spec)

  def everywhere(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec.run.layout.everywhere)

  # The states that the last step wrote; a new state is calibrated before its first step.
  scaling_states = {} if step == 0 else scaling_lib.states(spec.sites(phase=spec.phase(step - 1)))

  scales = (scaling_states, loss_scale.init(spec.loss_scale), _initial_grad_autoscale(spec))
  of_int, of_bool = (cast(Any, everywhere(jnp.zeros((), t))) for t in (jnp.int32, jnp.bool_))
  scaling, loss, auto = jax.tree.map(everywhere, scales)
  return State(of_int, params, opt, scaling, loss, auto, of_int, of_bool)


def make_state(spec: train_spec.TrainSpec, params=None) -> State:
  """A fresh state, sharded at birth; random parameters unless some are given, which it uses up."""
  abstract = abstract_state(spec)

  def init(key, both):
    if both is None:
      params = _begun(spec, params_lib.init(key, spec.declaration, spec.model.dims))
      both = jax.tree.map(update.init, spec.leaves, params)
    opt, params = (update.select(both, spec.declaration, i) for i in range(2))
    # Zeros of their own for each: a state that holds one array twice cannot be donated.
    step, skipped, halted = (jnp.zeros((), t) for t in (jnp.int32, jnp.int32, jnp.bool_))
    scales = loss_scale.init(spec.loss_scale), _initial_grad_autoscale(spec)
    return State(step, params, opt, {}, *scales, skipped, halted)

  # Committed to its device, like a restored state: both then run the same compiled programs.
  shardings = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if spec.run.layout.mesh is not None:
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
  both = None
  if params is not None:
    params = _untied(spec, params) if spec.init.untie else params
    params = _begun(spec, _with_adapters(spec, params))
    # One after the other: all of them in float32 beside all of the state is more than a step takes.
    both = jax.tree.map(_init_param, spec.leaves, params, abstract.opt, abstract.params)
  make = jax.jit(init, out_shardings=shardings, donate_argnums=1)
  return make(jax.random.key(spec.seed), both)


def _begun(spec: train_spec.TrainSpec, params):
  """The parameters that training starts from: of a twin (init.nudge) one ulp larger."""
  if not spec.init.nudge:
    return params
  up = lambda x: x if stored_params.is_stored(x) else params_lib.next_up(x)  # noqa: E731
  return jax.tree.map(up, params, is_leaf=stored_params.is_stored)


def _untied(spec: train_spec.TrainSpec, params):
  """The parameters of a checkpoint, weights of layers' products each `params_lib.between`.

  Raises:
    UserError: they are finer than bfloat16, so that few would move.
  """
  flat = params_lib.flatten(params)
  of_all = jax.random.fold_in(jax.random.key(spec.seed), zlib.crc32(b"init.untie"))
  paths = [p for p in site_tree.find_sites(spec.declaration) if p.startswith("layers/")]

  @functools.partial(jax.jit, donate_argnums=0)
  def one(x, key):
    # Layer by layer: random bits take as much memory as what they are for.
    keys = jax.random.split(key, len(x))
    moved = jax.lax.map(lambda of: params_lib.between(*of), (x, keys))
    return moved, jnp.mean(moved != x)

  shares = []
  for path in paths:
    if not stored_params.is_stored(flat[path]):
      flat[path], share = one(flat[path], jax.random.fold_in(of_all, zlib.crc32(path.encode())))
      shares.append(float(share))
  if not shares or min(shares) < 0.5:
    raise UserError(
      f"init.untie=True moves {min(shares, default=0):.0%} of a weight's numbers: the others are "
      "none of bfloat16, or codes; set init.untie=False"
    )
  return params_lib.unflatten(flat)


def _with_adapters(spec: train_spec.TrainSpec, params):
  """The parameters of a model's files, with the adapters and reward head that these lack, fresh."""
  flat, declared = params_lib.flatten(params), params_lib.flatten(spec.declaration)
  missing = {path: p for path, p in declared.items() if path not in flat and p.trainable}
  shardings = {path: spec.run.layout.weight_sharding(p.letters) for path, p in missing.items()}
  if missing:
    init = jax.jit(
      lambda key: params_lib.flatten(
        params_lib.init(key, params_lib.unflatten(missing), spec.model.dims)
      ),
      out_shardings=None if spec.run.layout.mesh is None else shardings,
    )
    flat |= init(jax.random.key(spec.seed))
  return params_lib.unflatten({path: flat[path] for path in declared})


def _init_param(leaf, param, *abstract):
  """`update.init` of a parameter, which is gone afterwards."""
  if leaf.is_frozen and stored_params.is_stored(param):
    return update.init(leaf, param)
  init = jax.jit(
    functools.partial(update.init, leaf),
    out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    donate_argnums=0 if leaf.master is None else (),
  )
  made = init(param)
  if leaf.master is not None:  # of other bytes, so that nothing takes its place
    param.delete()
  return made


def _initial_grad_autoscale(spec: train_spec.TrainSpec):
  quant = storage.GRADIENTS[spec.optim.grad_format]
  return gradients_lib.init_grad_autoscale(quant, spec.grad_accum_steps)


def stops_on_nonfinite(spec: train_spec.TrainSpec, scale=None):
  """Whether a step that is not finite ends the run.

  A dynamic loss scale meets overflows on purpose, to find the largest scale without one. At the
  smallest scale the loss scale is not the reason.

  Args:
    scale: the step's loss scale, where it is dynamic.
  """
  stops = spec.optim.on_nonfinite == "stop"
  return stops if scale is None else stops & (scale <= loss_scale.SMALLEST)


def make_step(spec: train_spec.TrainSpec, teacher=None):
  """(state, batch, sites, *, rate_scale=None) -> (state, metrics), jitted, state donated.

  batch is [B, L], or [A, B, L] for A microbatches whose gradients are added up. With loud sites
  (TrainSpec.sites) the same function, traced a second time, also returns what every site saw in
  metrics["tensor_stats"], and transformer.alignment. rate_scale is a factor on the learning rate.
  `teacher` is distillation.py's; without one the step can be lowered.
  """

  def step(state: State, batch, sites, *, rate, key, teacher=None):
    return take_step(spec, state, batch, sites, rate, jax.random.wrap_key_data(key), teacher)

  options = choose.compiler_options(spec.device, spec.run.layout.in_flight)
  key = np.asarray(jax.random.key_data(jax.random.key(spec.seed)))
  teacher = distillation.abstract(spec) if teacher is None else teacher
  jitted = jax.jit(step, donate_argnums=0, compiler_options=options)
  return StepFn(jitted, schedule_lib.rate_of(spec.optim), key, teacher)


def take_step(spec: train_spec.TrainSpec, state: State, batch, sites, rate, key, teacher=None):
  """(state, metrics) after one step, see make_step.

  Args:
    key: random key of the run, of which every step and site has one of its own.
    teacher: of distillation.py.
  """
  shardings = jax.tree.map(lambda x: x.sharding, _abstract_leaves(spec))
  take = layerwise.take if spec.optim.in_backward else after_backward
  sites = scaling_lib.with_states(sites, state.scaling_states)
  sites = site_lib.with_keys(sites, jax.random.fold_in(key, state.step))
  watched = {}
  is_loud = any(s.tap.shape[-1] == tensor_stats.LOUD for s in site_lib.flatten(sites).values())
  if is_loud:
    # Before anything moves: parameters are moved in place.
    both = (state.params, transformer.alignment(state.params, spec.model))
    params, watched["alignment"] = jax.lax.optimization_barrier(both)
    state = dataclasses.replace(state, params=params)
  by_param = is_loud and spec.log.param_stats != "off"
  result = take(spec, state, sites, batch, rate, by_param, teacher)
  params, opt = result.params, result.opt
  if spec.run.layout.mesh is not None:  # scales too come to rest where they were
    params, opt = jax.lax.with_sharding_constraint((params, opt), shardings)
  scaling_states = scaling_lib.next_states(sites, result.tensor_stats)
  if watched:
    watched["tensor_stats"] = result.tensor_stats
  is_finite = result.is_finite
  is_applied = is_finite & ~state.halted

  def keep(new, old):
    return jax.tree.map(lambda n, o: jnp.where(is_applied, n, o), new, old)

  moved, before = jnp.sqrt(result.squares)
  values = {
    "loss": result.loss, "grad_norm": result.norm, "update_norm": moved, "param_norm": before,
    "learning_rate": jnp.asarray(rate, jnp.float32), "is_finite": is_finite,
  }  # fmt: skip
  return State(
    step=state.step + ~state.halted,
    params=params,
    opt=opt,
    scaling_states=keep(scaling_states, state.scaling_states),
    loss_scale=loss_scale.update(state.loss_scale, is_finite, spec.loss_scale),
    grad_autoscale=keep(result.grad_autoscale, state.grad_autoscale),
    skipped=state.skipped + (~is_finite & ~state.halted),
    halted=state.halted | (~is_finite & stops_on_nonfinite(spec, state.loss_scale.get("scale"))),
  ), {**values, **result.values, **watched}


def after_backward(
  spec: train_spec.TrainSpec, state: State, sites, batch, rate, by_param: bool = False, teacher=None
) -> update.StepResult:
  """A step that moves every parameter when all gradients are there.

  Args:
    sites, batch: as the model takes them.
    by_param: whether `values` have "param_stats", of param_stats.observed.
    teacher: of distillation.py.
  """
  scale = state.loss_scale.get("scale")
  loss, gradient, stats, aux = gradients(
    spec, state.params, sites, batch, scale, state.step, state.grad_autoscale, teacher
  )
  norm = gradients_lib.norm(gradient)
  # Narrow formats saturate: an infinity can pass through a product unnoticed, so sites are asked.
  is_finite = jnp.isfinite(loss) & jnp.isfinite(norm) & _all_finite(stats)
  factor = update.clip_factor(norm, spec.optim.grad_clip_norm)
  now = update.UpdateArgs(state.step, rate, factor, is_finite & ~state.halted)
  with jax.named_scope("optimizer"):
    opt, params, squares = update.update_params(
      spec.leaves, spec.declaration, spec.run.layout, gradient, state.opt, state.params, now,
      own=groups.own_args(spec.optim, spec.declaration, spec.model.num_layers, gradient),
      by_layer=by_param,
    )  # fmt: skip
  total = jnp.maximum(batch["weights_BL"].sum(), 1)
  grad_autoscale, values = state.grad_autoscale, metrics.of_aux(aux, total, spec.model.num_layers)
  if by_param:
    values["param_stats"] = param_stats.observed(spec.declaration, gradient, squares)
    squares = update.total(squares)
  if grad_autoscale:
    share = gradients_lib.saturated(gradient)
    grad_autoscale = gradients_lib.next_grad_autoscale(grad_autoscale, share)
    values |= {"grad_autoscale": state.grad_autoscale["mu"], "grad_saturation": share}
  if scale is not None:
    values["loss_scale"] = scale
  return update.StepResult(
    loss, norm, is_finite, params, opt, squares, stats, grad_autoscale, values
  )


def _all_finite(stats):
  """Whether every amax of every site is a number."""
  each = [jnp.isfinite(tap[..., 0]).all() for tap in stats.values()]
  return functools.reduce(jnp.logical_and, each, jnp.asarray(True))


def make_calibration(spec: train_spec.TrainSpec, phase: int):
  """(state, batch, teacher=None) -> the state, scales of its next step chosen from this batch where
  they are not current; jitted.

  Gradients are those under the loss scale, which is halved until they are finite. A batch that no
  scale makes finite leaves the loss scale as it is.
  """
  spec, sites = spec.plain, spec.sites(phase=phase)
  if not scaling_lib.states(sites):
    return lambda state, batch, teacher=None: dataclasses.replace(state, scaling_states={})

  @functools.partial(jax.jit, compiler_options=choose.compiler_options(spec.device))
  def first_stats(params, batch, scale, teacher):
    now = site_lib.with_current_scales(sites)
    loss, _, stats, _ = gradients(spec, params, now, batch, scale, teacher=teacher)
    is_finite, inputs = _all_finite(stats), {name: tap[..., :1, :] for name, tap in stats.items()}
    # The loss scale is no part of the forward pass.
    overflows = ~is_finite & jnp.isfinite(loss) & _all_finite(inputs)
    return scaling_lib.calibrated(sites, stats), is_finite, overflows

  def calibrate(state: State, batch, teacher=None) -> State:
    scaling = state.loss_scale
    of_batch = lambda: first_stats(state.params, batch, scaling.get("scale"), teacher)  # noqa: E731
    scaling_states, is_finite, overflows = of_batch()
    while scaling and overflows and scaling["scale"] > loss_scale.SMALLEST:
      scaling = loss_scale.update(scaling, is_finite, spec.loss_scale)
      scaling_states, is_finite, overflows = of_batch()
    if scaling and not is_finite:
      scaling = state.loss_scale
    return dataclasses.replace(state, scaling_states=scaling_states, loss_scale=scaling)

  return calibrate


def calibrate(spec: train_spec.TrainSpec, state: State, batch, phase: int) -> State:
  """`make_calibration`, once."""
  return make_calibration(spec, phase)(state, batch)
