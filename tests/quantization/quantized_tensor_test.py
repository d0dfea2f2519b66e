"""What is kept narrow between steps, against float64 NumPy and the published rules."""

import dataclasses
import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

from fp8jax.formats import BF16, E4M3, E5M2, F16
from fp8jax.optim import storage
from fp8jax.quantization import quantize, quantized_tensor
from fp8jax.recipe.quant import (
  WHOLE,
  Delayed,
  DynamicRangeExpansion,
  Hadamard,
  Quant,
  Rounding,
  Scale,
  SquareRoot,
)

GROUPS = Quant(E4M3, (1, 128))
EXPANDED = Quant(E4M3, (1, 128), transform=DynamicRangeExpansion())
TENSOR = Quant(E5M2)


# In one program each: op by op they are the same to the bit (below), but compile longer.
pack = jax.jit(quantized_tensor.pack, static_argnames=("quant", "lead"))


@jax.jit
def unpack(kept: quantized_tensor.QuantizedTensor):
  return kept.unpack()


def _scale(kept: quantized_tensor.QuantizedTensor) -> np.ndarray:
  return np.asarray(kept.scale)


def _groups(x: np.ndarray, size: int):
  """Runs of `size` along the last axis, the last possibly shorter."""
  rows = x.reshape(-1, x.shape[-1])
  return [row[i : i + size] for row in rows for i in range(0, x.shape[-1], size)]


@pytest.mark.parametrize("shape", [(3, 256), (2, 5, 300), (130,), (4, 64)], ids=str)
@pytest.mark.parametrize("quant", [GROUPS, TENSOR], ids=str)
def test_numbers_on_the_grid_come_back(rng, shape, quant):
  """Multiples of a step of a tile's grid are kept exactly, a partial last group's too."""
  steps = rng.integers(-16, 17, shape).astype(np.float32)
  # One full-scale number per tile, wherever tiles begin, makes amax / max a power of two.
  steps[...] = np.where(rng.random(shape) < 0.02, 0.0, steps)
  flat = steps.reshape(-1, shape[-1])
  flat[:, ::64] = quant.format.max / 2**4
  steps = flat.reshape(shape) * 2.0**-9
  got = pack(steps, quant)
  assert got.data.shape == shape and got.data.dtype == quant.format.dtype
  # E5M2 has two bits of mantissa: of the integers to 16 it holds 1 to 8, 10, 12, 14 and 16.
  want = steps
  if quant is TENSOR:
    scale = np.float32(np.abs(steps).max() / quant.format.max)
    want = (steps / scale).astype(quant.format.dtype).astype(np.float32) * scale
  np.testing.assert_array_equal(unpack(got), want)


def test_groups_of_a_short_last_axis_run_on(rng):
  """Heads of 64 share groups of 128 in pairs, within a row of the first axis."""
  x = rng.standard_normal((3, 4, 64)).astype(np.float32)
  got = pack(x, GROUPS)
  assert _scale(got).shape == (3, 2)
  amax = np.abs(x.reshape(3, 2, 128)).max(-1)
  np.testing.assert_array_equal(got.scale, amax * np.float32(1 / 448))


def test_a_scale_of_the_tensor_is_each_layers_own(rng):
  x = rng.standard_normal((3, 4, 64)).astype(np.float32) * np.asarray(
    [[[1]], [[8]], [[0.5]]], np.float32
  )
  stacked = pack(x, TENSOR, lead=1)
  assert _scale(stacked).shape == (3,) and _scale(pack(x, TENSOR)).shape == ()
  for layer in range(3):
    one = pack(x[layer], TENSOR)
    np.testing.assert_array_equal(unpack(stacked)[layer], unpack(one))
  again = jax.jit(lambda kept, x: kept.repack(x))(stacked, 2 * x)
  np.testing.assert_array_equal(_scale(again), 2 * _scale(stacked))


@pytest.mark.parametrize("kind", [Scale.POW2, Scale.FLOOR, Scale.EVEN], ids=lambda k: k.value)
def test_scales_that_are_powers_of_two_take_a_byte(rng, kind):
  """Those of quant/quantize, held by E8M0 of ml_dtypes; codes and values to match."""
  quant = Quant(E4M3, (1, 16), kind)
  x = (rng.standard_normal((4, 64)) * np.exp(10 * rng.standard_normal((4, 1)))).astype(np.float32)
  x[3] = np.asarray([0.0, 2.0**-130, 2.0**127, 1.0])[:, None].repeat(16, 1).reshape(-1)
  got = pack(x, quant)
  assert got.scale is not None and got.scale.dtype == np.uint8
  assert got.nbytes == x.size * quantized_tensor.nbytes(quant) == x.size * (1 + 1 / 16)
  groups = x.reshape(4, 4, 16)
  scale = jax.jit(lambda a: quantize.amax_to_scale(a, E4M3, kind))(np.abs(groups).max(-1))
  stored = np.asarray(got.scale).view(ml_dtypes.float8_e8m0fnu)
  np.testing.assert_array_equal(stored.astype(np.float32), scale)
  codes = np.clip(np.float64(groups) / np.float64(scale)[..., None], -448, 448)
  codes = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
  codes[3, 1] = 0.0  # subnormal numbers count as none
  want = (codes * np.float64(scale)[..., None]).reshape(x.shape)
  np.testing.assert_array_equal(unpack(got), want)


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 6.0])
def test_expansion_keeps_what_coat_keeps(rng, spread):
  """Codes and values of COAT's own rule in float64, which also stores g and S per group."""
  x = rng.standard_normal((16, 512)) * np.exp(spread * rng.standard_normal((16, 512)))
  x = x.astype(np.float32)
  got = pack(x, EXPANDED)
  power = np.asarray(got.power).reshape(-1)
  codes = np.asarray(got.data).astype(np.float32).reshape(-1, 128)
  values = np.asarray(unpack(got)).reshape(-1, 128)
  different = 0
  for i, group in enumerate(_groups(x.astype(np.float64), 128)):
    amax, amin = np.abs(group).max(), np.abs(group).min()
    k = np.floor(16 * np.log2(448**2 / 2) / np.log2(amax / amin)) / 16
    assert power[i] == 16 * k
    g = np.sqrt(amax) * np.sqrt(amin)
    s = (amax / g) ** k / 448
    want = np.sign(group) * (np.abs(group) / g) ** k / s
    want = want.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    different += np.sum(want != codes[i])
    decoded = np.sign(want) * (np.abs(want) * s) ** (1 / k) * g
    same = want == codes[i]
    np.testing.assert_allclose(values[i][same], decoded[same], rtol=2e-5)
    assert np.all(codes[i] != 0)
  assert different <= 2  # of 8192: within float32's error of a tie


def test_expansion_of_what_has_no_range():
  """Equal magnitudes, zeros beside them, and zeros alone."""
  x = np.zeros((3, 128), np.float32)
  x[0] = -3.0
  x[1, ::2] = 5.0
  got = pack(x, EXPANDED)
  np.testing.assert_array_equal(unpack(got), x)
  np.testing.assert_array_equal(got.power, [[255], [255], [255]])


@pytest.mark.parametrize("quant", [GROUPS, TENSOR, EXPANDED, Quant(F16, scale=Scale.POW2)], ids=str)
@pytest.mark.parametrize("first", [0.0, 1e-44, 1e-38, 3e38, np.inf, np.nan])
def test_extremes_have_finite_scales(quant, first):
  x = np.full((2, 128), 1.5, np.float32) if first != 1e-44 else np.zeros((2, 128), np.float32)
  x[0, 0] = first
  got = pack(x, quant)
  assert np.all(np.isfinite(_scale(got)) & (_scale(got) >= 0))
  back = np.asarray(unpack(got))
  assert np.isnan(back[0, 0]) == np.isnan(first)
  assert first != np.inf or back[0, 0] >= 2.0**126  # it saturates
  assert np.all(np.isfinite(np.delete(back.reshape(-1), 0)))


def test_a_tensor_without_elements_has_a_scale():
  assert pack(np.zeros((0, 4), np.float32), TENSOR).shape == (0, 4)


@pytest.mark.parametrize("transform", [None, SquareRoot()], ids=str)
def test_what_is_not_zero_stays_so_on_demand(transform):
  x = np.full((1, 128), 1e-12, np.float32)
  x[0, 0], x[0, 1] = 1.0, 0.0
  lost = pack(x, dataclasses.replace(GROUPS, transform=transform))
  kept = pack(x, dataclasses.replace(GROUPS, transform=transform, keeps_nonzero=True))
  assert np.all(np.asarray(unpack(lost))[0, 1:] == 0)
  least = np.float32(2.0**-9) * _scale(kept)[0, 0]
  least = least**2 if transform else least
  np.testing.assert_array_equal(unpack(kept), [[1.0, 0.0, *[least] * 126]])


def test_what_is_kept_nonzero_keeps_its_sign():
  kept = pack(np.float32([[1e-6, -1e-6, 448.0]]), Quant(E4M3, keeps_nonzero=True))
  np.testing.assert_array_equal(unpack(kept), [[2.0**-9, -(2.0**-9), 448.0]])


def test_square_root_halves_the_binades():
  """Where v is 0.6 of E4M3's smallest step, its root still has three bits."""
  x = np.asarray([[1.0, *[0.6 * 2.0**-9 / 448] * 127]], np.float32)
  root = unpack(pack(x, dataclasses.replace(GROUPS, transform=SquareRoot())))
  np.testing.assert_allclose(root, x, rtol=2 * 2.0**-4)
  alone = np.asarray(unpack(pack(x, GROUPS)))
  assert abs(alone[0, 1] / x[0, 1] - 1) > 0.3


def test_stochastic_rounding_is_unbiased_and_keyed():
  quant = Quant(BF16, scale=Scale.NONE, rounding=Rounding.STOCHASTIC)
  x = np.full((200, 200), 1.0 + 2.0**-10, np.float32)  # an eighth of BF16's step above 1
  one, same, other = (unpack(pack(x, quant, key=jax.random.key(k))) for k in (0, 0, 1))
  np.testing.assert_array_equal(one, same)
  assert np.any(one != other)
  share = np.mean(np.asarray(one) > 1)
  assert abs(share - 1 / 8) < 5 * np.sqrt(1 / 8 * 7 / 8 / x.size)
  with pytest.raises(ValueError, match="key"):
    pack(x, quant)


def test_jit_and_eager_agree_to_the_bit(rng):
  x = rng.standard_normal((6, 200)).astype(np.float32) ** 3
  for quant in (EXPANDED, dataclasses.replace(TENSOR, scale=Scale.POW2)):
    eager = quantized_tensor.pack(x, quant)
    jax.tree.map(np.testing.assert_array_equal, eager, pack(x, quant))


@pytest.mark.parametrize(
  "quant,words",
  [
    (Quant(E4M3, (2, 128)), "tile"),
    (Quant(E4M3, (1, WHOLE)), "tile"),
    (Quant(E4M3, source=Delayed()), "scale from itself"),
    (Quant(E4M3, (1, 128), transform=Hadamard()), "not rotated"),
    (Quant(E4M3, (1, 16), Scale.E4M3_OVER_F32), "two-level"),
  ],
  ids=str,
)
def test_refused(quant, words):
  with pytest.raises(ValueError, match=words):
    quantized_tensor.pack(np.zeros((2, 128), np.float32), quant)


_MESH = ((2, 4), ("fsdp", "tensor"))


@pytest.mark.parametrize(
  "shape,spec,want",
  [
    ((3, 64, 1024), (None, "fsdp", "tensor"), (None, "fsdp", "tensor")),
    ((3, 64, 640), (None, "fsdp", "tensor"), (None, "fsdp", None)),  # 160 = 1.25 groups per device
    ((64, 8, 64), ("fsdp", "tensor", None), ("fsdp", "tensor")),  # two heads, a group, per device
    ((64, 4, 64), ("fsdp", "tensor", None), ("fsdp", None)),
    ((64, 8, 64), ("fsdp", None, "tensor"), ("fsdp", None)),
  ],
  ids=str,
)
def test_scales_lie_beside_their_codes(shape, spec, want):
  """And no number depends on it: the same codes as on one device."""
  mesh = jax.make_mesh(*_MESH, axis_types=(jax.sharding.AxisType.Auto,) * 2)
  of = NamedSharding(mesh, jax.P(*spec))
  x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  placed = quantized_tensor.shardings(
    jax.eval_shape(lambda x: quantized_tensor.pack(x, EXPANDED), x), of
  )
  specs = [place.spec for place in jax.tree.leaves(placed)]  # of data, scale and power
  assert specs == [jax.P(*spec), jax.P(*want), jax.P(*want)]
  split = jax.jit(lambda x: quantized_tensor.pack(x, EXPANDED), out_shardings=placed)(
    jax.device_put(x, of)
  )
  jax.tree.map(np.testing.assert_array_equal, split, pack(x, EXPANDED))


def test_bytes():
  sizes = {GROUPS: 1 + 4 / 128, EXPANDED: 1 + 5 / 128, TENSOR: 1 + 4 / 2**17}
  for (quant, want), n in itertools.product(sizes.items(), (1,)):
    x = np.zeros((n * 2**10, 128), np.float32)
    packed = jax.eval_shape(lambda x, quant=quant: quantized_tensor.pack(x, quant), x)
    assert packed.nbytes / x.size == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("shape", [(2, 40, 130), (3, 7)], ids=str)
@pytest.mark.parametrize("name", [n for n in storage.MOMENTS if n != "float32"])
def test_zeros_are_what_packing_zeros_makes(name, shape):
  for quant in (storage.MOMENTS[name].mu, storage.MOMENTS[name].nu):
    if quant is not None:
      found = jax.jit(lambda quant=quant: quantized_tensor.zeros(shape, quant, lead=1))()
      wanted = pack(np.zeros(shape, np.float32), quant, lead=1, key=jax.random.key(0))
      assert jax.tree.structure(found) == jax.tree.structure(wanted)
      for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
