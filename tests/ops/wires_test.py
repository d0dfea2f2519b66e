"""Sums of gradients' terms over devices in 16 and 8 bits, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fp8jax import axes
from fp8jax import mesh as mesh_lib
from fp8jax.ops import collectives
from fp8jax.optim import storage
from fp8jax.quantization import quantized_tensor

MESH = mesh_lib.make((2, 4, 1))


def summed(terms, names, wire, axis=None):
  """Of terms [8, ...], one per device: every device's result, stacked."""
  layout = axes.Layout(MESH, wire=storage.WIRES[wire])
  everyone = P(MESH.axis_names)

  def local(x):
    if axis is None:
      return collectives.sum_of_terms(x[0], names, layout)[None]
    return collectives.scatter_sum(x[0], names[0], axis, layout)[None]

  run = functools.partial(jax.shard_map, mesh=MESH, check_vma=False)
  made = jax.jit(run(local, in_specs=everyone, out_specs=everyone))(jnp.asarray(terms))
  return np.asarray(made, np.float64)


def bound(terms, wire, axis):
  """What rounding every term may change of a sum over an axis: half a step of each."""
  terms = np.abs(np.float64(terms))
  if wire == "bf16":
    return (terms * 2.0**-8).sum(axis)
  # E4M3: 2^-4 of a number, and below 2^-6 scales half of 2^-9; a scale is at most amax / 448.
  return (terms * 2.0**-4).sum(axis) + terms.max() / 448 * 2.0**-10 * terms.shape[axis]


@pytest.mark.parametrize("wire", ["bf16", "e4m3", "e4m3_shared"])
@pytest.mark.parametrize("names", [("data",), ("fsdp",), ("data", "fsdp")], ids="+".join)
def test_a_sum_errs_by_half_a_step_of_each_term_and_of_itself(wire, names, rng):
  """13 x 7 elements: no number of devices divides them, and 128 is more."""
  terms = (rng.normal(size=(8, 13, 7)) * np.exp(3 * rng.normal(size=(8, 13, 7)))).astype(np.float32)
  grid = np.float64(terms).reshape(2, 4, 13, 7)
  over = tuple({"data": 0, "fsdp": 1}[name] for name in names)
  exact = np.broadcast_to(grid.sum(over, keepdims=True), grid.shape).reshape(terms.shape)
  found = summed(terms, names, wire)
  of_terms = grid.reshape(8, 1, 13, 7) if len(over) == 2 else grid.swapaxes(0, over[0])
  once = bound(of_terms, wire, 0)
  once = np.broadcast_to(once, of_terms.shape[1:])
  place = {("data",): once[None], ("fsdp",): once[:, None]}.get(names, once[None])
  allowed = np.broadcast_to(place, grid.shape).reshape(terms.shape)
  again = bound(np.abs(exact)[None] + allowed, wire, 0)
  assert (np.abs(found - exact) <= allowed + again).all()
  assert np.abs(found - exact).max() > 0  # it does round
  # The same bits wherever the sum is the same.
  same = found.reshape(grid.shape)
  for axis in over:
    assert (same == np.take(same, [0], axis)).all()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("wire", ["bf16", "e4m3", "e4m3_shared"])
def test_a_device_gets_its_part_of_the_sum(wire, axis, rng):
  terms = rng.normal(size=(8, 12, 20)).astype(np.float32)
  groups = np.float64(terms).reshape(2, 4, 12, 20)
  found = summed(terms, ("fsdp",), wire, axis).reshape(2, 4, *np.split(terms[0], 4, axis)[0].shape)
  for data, of_group in enumerate(groups):
    whole, allowed = of_group.sum(0), bound(of_group, wire, 0)
    parts = zip(*(np.split(x, 4, axis) for x in (whole, allowed)), strict=True)
    for fsdp, (want, error) in enumerate(parts):
      assert (np.abs(found[data, fsdp] - want) <= error).all()


def test_what_the_format_holds_is_summed_exactly(rng):
  """Integers of eight bits in BF16; of four significant bits below a largest of 448 in E4M3."""
  whole = rng.integers(-255, 256, (8, 300)).astype(np.float32)
  plain = summed(whole, ("data",), "float32")
  few = np.clip(whole, -32, 32)  # a sum of two is at most 64: seven bits
  np.testing.assert_array_equal(summed(few, ("data",), "bf16"), summed(few, ("data",), "float32"))
  np.testing.assert_array_equal(
    summed(whole, ("data",), "bf16"), plain.astype(ml_dtypes.bfloat16).astype(np.float64)
  )
  codes = rng.integers(-8, 9, (8, 256)).astype(np.float32)
  codes[:, ::128] = 448
  parts = summed(codes[:, :, None] * np.ones(4, np.float32), ("fsdp",), "e4m3", 1)
  np.testing.assert_array_equal(parts[..., 0], np.repeat(codes.reshape(2, 4, 256).sum(1), 4, 0))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("wire", ["bf16", "e4m3", "e4m3_shared"])
def test_a_term_that_is_not_finite_is_seen(wire, bad):
  terms = np.ones((8, 512), np.float32)
  terms[3, 5] = bad
  assert not np.isfinite(summed(terms, ("data", "fsdp"), wire)).all()
  assert not np.isfinite(summed(terms, ("fsdp",), wire, 0)[:4]).all()


def test_every_128_elements_have_a_scale_of_their_own(rng):
  """Groups 2^20 apart: under a common scale all but the first would be 0."""
  terms = rng.normal(size=(8, 4, 512)) * 2.0 ** (-20 * (np.arange(512) // 128))
  terms = terms.astype(np.float32)
  terms[5, 2, 130] = np.nan
  found = summed(terms, ("fsdp",), "e4m3", 0).reshape(2, 4, 512)
  grid = np.float64(terms).reshape(2, 4, 4, 4, 128)  # data, fsdp, row, group, element
  amax = np.nanmax(np.abs(grid), -1, keepdims=True)
  allowed = (np.abs(grid) / 16 + amax / 448 * 2.0**-10).sum(1)
  wrong = np.abs(found.reshape(2, 4, 4, 128) - grid.sum(1)) > allowed
  assert not wrong.any()
  assert np.argwhere(np.isnan(found)).tolist() == [[1, 2, 130]]  # alone, and others are finite


def test_devices_share_one_scale_of_a_tensor(rng):
  """FP8-LM's: the largest magnitude of all devices lies at 448, and 2^-18 of it rounds to 0."""
  terms = rng.integers(1, 8, (8, 4, 200)).astype(np.float32)
  terms[2, 1, 7] = 448 * 2.0**9  # of one device of the first four: their scale is 2^9
  found = summed(terms, ("fsdp",), "e4m3_shared", 0).reshape(2, 4, 200)
  groups = terms.reshape(2, 4, 4, 200)
  scaled = groups[0] / 2.0**9
  codes = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
  np.testing.assert_array_equal(found[0], (codes * 2.0**9).sum(0))
  # The others' scale is their own, 7 / 448, under which these integers are exact.
  np.testing.assert_array_equal(found[1], np.float64(groups[1]).sum(0))
  with pytest.raises(ValueError, match="an amax of the whole for tiles"):
    quantized_tensor.pack(jnp.ones((2, 128)), storage.WIRES["e4m3"], amax=jnp.float32(1))
