"""The train step compiled: for the devices at hand, or for GPUs that are not here.

XLA compiles for a GPU from a description of it, without one: the CUDA wheels are all it takes. What
comes out says what fits and which kernels run, never how fast.
"""

import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fp8jax import mesh
from fp8jax.config import resolve as resolve_lib
from fp8jax.config.needs import TRAINING, Needs
from fp8jax.errors import UserError
from fp8jax.kernels import choose
from fp8jax.ops.policy_gradient import Policy
from fp8jax.rl.settings import REWARD, RL
from fp8jax.step import train_spec, train_step

# What XLA knows of a GPU: device descriptions, and compute capability x 10.
FOLDER = pathlib.Path(__file__).resolve().parent / "topologies"
CAPABILITY = {
  "a100": 80, "l4": 89, "rtx4090": 89, "h100": 90, "h200": 90, "b200": 100, "rtx5090": 120,
}  # fmt: skip


def resolve(c: Any, target: str, needs: Needs = TRAINING) -> tuple[train_spec.TrainSpec, list]:
  """(spec, devices) of a configuration on a target.

  Args:
    c: the ConfigDict, handed on unread.
    target: "h200:8" for so many of CAPABILITY's GPUs in one host, or "" for the devices at hand.

  Raises:
    UserError: no such target, or the CUDA wheels are missing.
    config.ConfigError: the configuration does not suit it.
  """
  if not target:
    spec = resolve_lib.resolve(c, jax.device_count(), choose.current_device(), needs=needs)
    return spec, jax.devices()
  name, count = parse(target)
  devices, device = devices_of(name, count), choose.Device("gpu", CAPABILITY[name])
  make = functools.partial(mesh.make, devices=devices)
  return resolve_lib.resolve(c, len(devices), device, make, needs), devices


def parse(target: str) -> tuple[str, int]:
  """("h200", 8) of "h200:8".

  Raises:
    UserError: no such target.
  """
  name, _, count = target.partition(":")
  if name not in CAPABILITY or not (count or "1").isdigit() or int(count or 1) < 1:
    known = ", ".join(f"{n}:N" for n in CAPABILITY)
    raise UserError(f"--topology={target!r}: expected one of {known}, N being how many")
  return name, int(count or 1)


def devices_of(name: str, count: int):
  """So many of CAPABILITY's GPUs in one host, as XLA describes them.

  Raises:
    UserError: the CUDA wheels are missing.
  """
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver to ask
  try:
    topology = topologies.get_topology_desc(
      platform="cuda", topology=f"1x1x{count}", target_config=(FOLDER / f"{name}.txtpb").read_text()
    )
  except (RuntimeError, NotImplementedError, KeyError) as e:
    reason = str(e).splitlines()[0]
    raise UserError(
      f"--topology={name}:{count} needs XLA for CUDA, though no GPU ({reason}); "
      'pip install "jax[cuda13]", and JAX_PLATFORMS=cpu where there is none'
    ) from e
  return topology.devices


def places(spec: train_spec.TrainSpec, devices, letters: str):
  """(the sharding of a batch with these dimensions, that of what every device has whole)."""
  layout = spec.run.layout
  if layout.mesh is None:
    return (SingleDeviceSharding(devices[0]),) * 2
  specs = layout.act_spec(letters), PartitionSpec()
  return tuple(NamedSharding(layout.mesh, place) for place in specs)


def put(tree, everywhere):
  """Abstract arrays where they lie, and `everywhere` the ones that say nothing of it."""

  def one(x):
    sharding = getattr(x, "sharding", None) if isinstance(x, jax.ShapeDtypeStruct) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or everywhere)

  return jax.tree.map(one, tree)


def lower(spec: train_spec.TrainSpec, devices, change=lambda sites: sites):
  """The train step, of --job=rl with rl.tasks, lowered for them.

  Args:
    change: of the sites that it is called with.
  """
  times = spec.grad_accum_steps
  lead = () if times == 1 else (times,)
  rows, everywhere = places(spec, devices, "ABL" if lead else "BL")
  names = ["tokens_BL", "targets_BL", "positions_BL"]
  names += [] if spec.data.cross_document else ["segments_BL"]
  names += ["sources_BL"] if spec.data.tells_sources else []
  shape = (*lead, spec.microbatch, spec.data.seq_len)
  batch: dict[str, Any] = {
    name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows) for name in names
  }
  real = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
  batch["weights_BL"] = real
  if (own := spec.sections.get(RL)) and (own.tasks or own.pairs) and own.loss != REWARD:
    rule = own.objective
    drawn, reference = (real if wanted else None for wanted in (not rule.beta, rule.has_reference))
    batch["policy"] = Policy(drawn, drawn, drawn, reference, rule, own.temperature)
  # The second step's: what scales are made from has been seen.
  state = put(train_step.abstract_state(spec, 1), everywhere)
  sites = put(change(spec.sites()), everywhere)
  return train_step.make_step(spec).lower(state, batch, sites)
