"""AdamW of a parameter by one kernel (kernels/adamw): the parameters it supports, and its step.

On a mesh each device updates its own part of a parameter: an update needs nothing of other devices
but the sums of squares.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from fp8jax.kernels import choose as choose_lib
from fp8jax.kernels.adamw import api as adamw_api
from fp8jax.kernels.device import Device
from fp8jax.optim import gradients
from fp8jax.optim.optimizers import OptimizerConfig, ParamOptimizer
from fp8jax.quantization import quantized_tensor
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.recipe.quant import WHOLE

# Of kernels.optimizer. "auto": the kernel where it can.
CHOICES = ("auto", "xla", "mosaic_sm90")


def excluded(optim: OptimizerConfig, level: str) -> str:
  """The settings of a run that the kernel does not know, in words; "" for none.

  Args:
    level: of log.param_stats.
  """
  keys = [key for key in ("clip_groups", "lr_multipliers", "base_width") if getattr(optim, key)]
  if keys:
    used = " and ".join(f"optim.{key}" for key in keys)
    return f"{used}: the kernel has one rate and one norm for all"
  if level != "off":
    return f"log.param_stats={level!r}: the kernel sums over all layers of a matrix"
  return ""


def choose(
  leaf: ParamOptimizer, master, state, device: Device, wanted: str, why_not: str = ""
) -> ParamOptimizer:
  """The leaf, its backend chosen, and a note where that is Optax's operations.

  Args:
    leaf: of one parameter.
    master, state: its master and the state of its transformation: shapes, dtypes and shardings.
    wanted: one of CHOICES.
    why_not: of `excluded`.
  """
  if wanted == "xla" or not leaf.is_large:
    return leaf
  if why_not:
    return dataclasses.replace(leaf, note=why_not)
  if leaf.rule is None:
    return dataclasses.replace(
      leaf, note="the kernel computes AdamW alone, without masks, its decay times the rate"
    )
  local, mu, nu = jax.tree.map(_local, (master, state[0].mu, state[0].nu))
  for moment in (mu, nu):
    if _straddles(moment):
      note = f"a group of {moment.quant.tile[1]} would lie on two devices"
      return dataclasses.replace(leaf, note=note)
  gradient = jax.ShapeDtypeStruct(local.shape, leaf.gradient_dtype)
  choice = choose_lib.adamw(gradient, local, mu, nu, device, wanted)
  if isinstance(choice, choose_lib.Refusal):
    return dataclasses.replace(leaf, note=choice.reason)
  if choice.backend == "reference":  # Optax's operations are the same, and move a piece at a time
    return dataclasses.replace(leaf, note="; ".join(choice.notes))
  sharding = jax.tree.leaves(master)[0].sharding
  return dataclasses.replace(leaf, backend=choice.backend, sharding=sharding)


def check(leaves: list[ParamOptimizer], wanted: str) -> None:
  """Raises ValueError if a kernel that was asked for by name cannot take all large parameters."""
  if wanted in ("auto", "xla"):
    return
  refused = collections.defaultdict(list)
  for leaf in leaves:
    if leaf.is_large and leaf.backend != wanted:
      refused[leaf.note].append(leaf.path)
  if refused:
    reasons = (f"{', '.join(paths)}: {note}" for note, paths in refused.items())
    raise ValueError(
      f"kernels.optimizer={wanted!r} cannot move {'; '.join(reasons)}. Set 'auto', which leaves "
      "those to XLA, or 'xla'"
    )


def apply(leaf: ParamOptimizer, g, state, master, now):
  """See `update.update_param`; a step that is not applied has an update of 0."""
  if leaf.rule is None:
    raise ValueError(f"{leaf.path}: backend={leaf.backend!r} needs a rule; see `choose`")
  rule, (before, *rest) = dataclasses.asdict(leaf.rule), state
  is_applied = jnp.asarray(now.is_applied)
  count = optax.safe_increment(before.count)
  # Without scales: `choose` lets no others pass.
  gradient = g.data if isinstance(g, QuantizedTensor) else g
  arrays = (gradient, master, before.mu, before.nu)
  scalars = {"count": count, "rate": now.rate, "factor": now.factor, "is_applied": is_applied}
  split = leaf.sharding.spec if leaf.sharding is not None else ()
  mesh_axes = tuple(name for names in split if names for name in np.atleast_1d(names))

  def update(arrays, scalars):
    *new, squares = adamw_api.update(*arrays, **scalars, **rule, backend=leaf.backend)
    return new, jax.lax.psum(squares, mesh_axes) if mesh_axes else squares

  if leaf.sharding is not None:
    specs = jax.tree.map(lambda x: _spec(x, leaf.sharding), arrays, is_leaf=gradients.is_leaf)
    nowhere = PartitionSpec()
    # The checker cannot see that copies of a parameter are moved alike.
    update = jax.shard_map(
      update, mesh=leaf.sharding.mesh, in_specs=(specs, nowhere),
      out_specs=(list(specs[1:]), nowhere), check_vma=False,
    )  # fmt: skip
  (master, mu, nu), squares = update(arrays, jax.tree.map(jnp.asarray, scalars))
  count = jnp.where(is_applied, count, before.count)
  return (optax.ScaleByAdamState(count, mu, nu), *rest), master, squares


def _local(x):
  """The part that one device has."""
  shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
  return jax.ShapeDtypeStruct(shape, x.dtype)


def _straddles(moment) -> bool:
  """Whether the groups of one device's part are not those that its scales are of."""
  if not gradients.is_leaf(moment) or moment.scale is None or moment.quant.tile[1] == WHOLE:
    return False
  part = jax.ShapeDtypeStruct(moment.shape, jnp.float32)
  alone = jax.eval_shape(
    lambda x: quantized_tensor.pack(x, moment.quant, key=jax.random.key(0)), part
  )
  return alone.scale.shape != moment.scale.shape


def _spec(x, sharding):
  """PartitionSpecs of what has a parameter's shape, its scales included."""
  if gradients.is_leaf(x):
    return jax.tree.map(lambda s: s.spec, quantized_tensor.shardings(x, sharding))
  return jax.tree.map(lambda _: sharding.spec, x)
