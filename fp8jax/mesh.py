"""The device mesh. The only place that counts devices."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType

AXES = ("data", "fsdp", "tensor")


def resolve(sizes: Mapping[str, int], num_devices: int) -> tuple[int, ...]:
  """(data, fsdp, tensor) with a -1 filled in.

  A mesh of one device, written out, may leave the others of a larger machine idle.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  wanted = [sizes[a] for a in AXES]
  text = " x ".join(f"{a}={n}" for a, n in zip(AXES, wanted))
  if any(n < 1 and n != -1 for n in wanted) or wanted.count(-1) > 1:
    raise ValueError(f"mesh {text}: sizes must be positive, and at most one may be -1")
  if -1 in wanted:
    rest = math.prod(n for n in wanted if n != -1)
    wanted[wanted.index(-1)] = num_devices // rest if num_devices % rest == 0 else 0
  is_one = math.prod(wanted) == 1 and jax.process_count() == 1
  if math.prod(wanted) != num_devices and not is_one:
    raise ValueError(
      f"mesh {text} does not cover the {num_devices} device(s) there are; set mesh.data, mesh.fsdp "
      f"and mesh.tensor so that their product is {num_devices}, for example mesh.data=1 "
      f"mesh.fsdp={num_devices} mesh.tensor=1 (-1: whatever is left)"
    )
  return tuple(wanted)


def make(shape: tuple[int, ...], devices=None) -> jax.sharding.Mesh:
  """A mesh of `shape` over all devices, neighbours along the last axis."""
  return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
