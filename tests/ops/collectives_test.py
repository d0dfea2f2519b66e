"""Gathered and scattered parts of operands, against whole arrays."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fp8jax import axes, mesh
from fp8jax.ops import collectives
from fp8jax.recipe.quant import WHOLE


def test_a_weight_split_over_an_axis_that_splits_no_tokens_gets_its_own_part(rng):
  layout = axes.Layout(mesh.make((2, 4, 1)), (("D", ("fsdp",)),), (("B", ("data",)),))
  dw_DF = rng.standard_normal((8, 6)).astype(np.float32)

  def local(dw_DF):
    half = dw_DF * jnp.where(jax.lax.axis_index("data") == 0, 0.25, 0.75)
    return collectives.scatter_gradient(half, "DF", "B", layout)

  run = collectives.on_mesh(local, layout, PartitionSpec(), PartitionSpec("fsdp"))
  np.testing.assert_allclose(jax.jit(run)(dw_DF), dw_DF, rtol=1e-6)


def test_an_axis_of_one_device_splits_nothing():
  layout = axes.Layout(mesh.make((2, 1, 4)), (("D", ("fsdp", "tensor")),), (("B", ("data",)),))
  assert collectives.extra_axes(layout, "D") == ("tensor",)
  assert collectives.extra_axes(layout.manual(), "D") == ()


@pytest.mark.parametrize(
  "contracted, sizes, tile, fits",
  [
    ("D", {"D": 96}, 32, True),
    ("D", {"D": 96}, 128, False),
    ("D", {"D": 96}, WHOLE, True),
    ("D", {"D": 96}, 1, True),
    ("F", {"F": 96}, 128, True),  # nothing is split
    ("DF", {"D": 4, "F": 32}, 128, True),
    ("FD", {"F": 32, "D": 4}, 128, False),  # shards of the faster letter are not contiguous
    ("FD", {"F": 32, "D": 4}, WHOLE, False),
  ],
)
def test_scales_are_made_before_gathering_where_shards_hold_whole_tiles(
  contracted, sizes, tile, fits
):
  layout = axes.Layout(mesh.make((2, 4, 1)), (("D", ("fsdp",)),), (("B", ("data",)),))
  quant = types.SimpleNamespace(tile=(1, tile), rotation=None)
  assert collectives.tiles_fit({"V": 8, **sizes}, "V", contracted, quant, layout, None) == fits


@pytest.mark.parametrize(
  "size, tile, contracted, rows, fits",
  [(96, WHOLE, 64, None, False), (128, WHOLE, 64, None, True), (96, 16, 64, None, False),
   (96, 16, 32, None, True), (96, 96, 64, None, False), (192, 96, 64, None, True),
   (96, 16, None, 64, True), (96, 1, None, None, True)],
)  # fmt: skip
def test_shards_hold_whole_rotated_blocks_too(size, tile, contracted, rows, fits):
  """Along the contraction, which is split; and along rows, where they are."""
  layout = axes.Layout(mesh.make((2, 4, 1)), (("D", ("fsdp",)),), (("B", ("data",)),))
  of = {n: n and types.SimpleNamespace(size=n) for n in (contracted, rows)}
  quant = types.SimpleNamespace(tile=(1, tile), rotation=of[contracted])
  place = layout, of[rows]
  assert collectives.tiles_fit({"V": 8, "D": size}, "V", "D", quant, *place) == fits
  turned = types.SimpleNamespace(tile=(tile, 1), rotation=of[rows])
  place = layout, of[contracted]
  assert collectives.tiles_fit({"V": 8, "D": size}, "D", "V", turned, *place) == fits
