"""Scales, casts and tiles against NumPy and ml_dtypes."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from lattice import lattice

from fp8jax.formats import E2M1, E3M4, E4M3, E5M2
from fp8jax.quantization import quantize as q
from fp8jax.recipe.quant import WHOLE, Delayed, Hadamard, Quant, Rounding, Scale, Static

NARROW = [E4M3, E5M2, E3M4, E2M1]
TILES = [(1, 128), (128, 128), (128, 1), (WHOLE, WHOLE), (1, WHOLE), (16, 32)]
SMALL_TILES = [(1, 16), (16, 16), (WHOLE, WHOLE)]
SHAPES = [(256, 256), (72, 576), (130, 200), (1, 3)]
# Those of FP8 recipes; papers_test has the papers'.
KINDS = [Scale.F32, Scale.POW2, Scale.FLOOR, Scale.EVEN, Scale.E4M3_OVER_F32]
ONE_LEVEL = [k for k in KINDS if k is not Scale.E4M3_OVER_F32]


def kind_id(kind):
  return kind.value


@functools.partial(jax.jit, static_argnames=("quants", "contraction"))
def _narrow_all(x, quants, contraction=1, key=None):
  return [q.quantize(x, quant, contraction=contraction, key=key) for quant in quants]


def narrow_all(x, quants, **options):
  """quantize under jit, in one program: op by op it is the same to the bit, but compiles longer."""
  return _narrow_all(x, tuple(quants), **options)


def narrow(x, quant, **options):
  return narrow_all(x, [quant], **options)[0]


@jax.jit
def dequantized(made):
  return [one.dequantize() for one in made]


def check_equals_numpy(rng, shape, quants):
  x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
  made = narrow_all(x, quants)
  for quant, got, wide in zip(quants, made, dequantized(made), strict=True):
    data, scale = oracle.quantize(x, quant.format.name, quant.tile, quant.scale.value)
    same = np.array_equal(np.asarray(got.data).view(np.uint8), data.view(np.uint8))
    assert same, f"{quant}: {got.data} != {data}"
    want = (data.astype(np.float32) * scale).astype(np.float32)
    np.testing.assert_array_equal(wide, want, str(quant))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_equals_numpy_bit_for_bit(rng, shape):
  kinds = (Scale.F32, Scale.POW2)
  check_equals_numpy(rng, shape, [Quant(E4M3, tile, kind) for tile in TILES for kind in kinds])


@pytest.mark.parametrize("tile", SMALL_TILES, ids=str)
def test_quantize_equals_numpy_bit_for_bit_in_every_format(rng, tile):
  check_equals_numpy(rng, (40, 72), [Quant(fmt, tile, kind) for fmt in NARROW for kind in KINDS])


@pytest.mark.parametrize("fmt", [E3M4, E2M1], ids=str)
def test_elements_are_multiplied_by_the_reciprocal(fmt):
  """Integers next to the format's ties under integer amaxes: some, a division decides otherwise."""
  grid = np.arange(2 ** (fmt.bits - 1), dtype=np.uint8).view(fmt.dtype).astype(np.float64)
  grid = grid[np.isfinite(grid)]
  amax = np.arange(1, 4001, 7)[:, None]
  ties = np.round(amax * (grid[1:] + grid[:-1]) / 2 / fmt.max)
  x = np.concatenate([ties, amax], axis=1).astype(np.float32)
  want, scale = oracle.quantize(x, fmt.name, (1, WHOLE), "f32")
  assert np.any(want != oracle.cast(x / scale, fmt.name))
  for make in (narrow, q.quantize):
    np.testing.assert_array_equal(make(x, Quant(fmt, (1, WHOLE))).data, want)


def test_quantize_is_the_same_outside_jit(rng):
  """XLA sees more at once under jit, and rewrites divisions if it is given any."""
  check_same_outside_jit(rng, [Quant(fmt, (1, 16), kind) for fmt in NARROW for kind in KINDS])


@pytest.mark.slow  # op by op; without either: the test above
def test_rotated_and_random_is_the_same_outside_jit(rng):
  """Blocks of 32, whose factor 1 / sqrt(32) is a constant that XLA could move."""
  quant = Quant(E2M1, (1, 16), rounding=Rounding.STOCHASTIC, transform=Hadamard(32))
  two_levels = dataclasses.replace(quant, scale=Scale.E4M3_OVER_F32)
  check_same_outside_jit(rng, [quant, two_levels])


def check_same_outside_jit(rng, quants):
  x = rng.standard_normal((256, 64)) * np.exp(8 * rng.standard_normal((256, 1)))
  x, key = x.astype(np.float32), jax.random.key(0)
  for quant, jitted in zip(quants, narrow_all(x, quants, key=key), strict=True):
    eager = q.quantize(jnp.asarray(x), quant, key=key)
    np.testing.assert_array_equal(eager.scale, jitted.scale, str(quant))
    data = (np.asarray(s.data).view(np.uint8) for s in (eager, jitted))
    np.testing.assert_array_equal(*data, str(quant))


def test_quantize_of_transpose_is_transpose_of_quantize(rng):
  x = rng.standard_normal((130, 200)).astype(np.float32)
  rules = ((E4M3, Scale.F32), (E2M1, Scale.E4M3_OVER_F32))
  quants = [Quant(fmt, tile, kind) for tile in (*TILES, (1, 16)) for fmt, kind in rules]
  made = narrow_all(x, quants, contraction=0), narrow_all(x.T, quants)
  for quant, a, b in zip(quants, *made, strict=True):
    assert a.shape == b.shape == (200, 130) and a.tile == b.tile == quant.tile
    np.testing.assert_array_equal(a.data, b.data, str(quant))
    np.testing.assert_array_equal(a.scale, b.scale, str(quant))


@functools.partial(jax.jit, static_argnums=1)
def _scales(amax, fmt):
  """Of every kind of one level, in one program."""
  return [q.amax_to_scale(amax, fmt, kind) for kind in ONE_LEVEL]


@pytest.mark.parametrize("kind", ONE_LEVEL, ids=kind_id)
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_scale_around_every_power_of_two_stays_within_its_bound(fmt, kind):
  """Neighbours of fmt.max * 2^e for every e: rounding down by one ulp would double the data."""
  exponents = np.arange(-126 - 20, 128)
  centre = np.ldexp(np.float64(fmt.max), exponents)
  centre = centre[(centre < 3e38) & (centre > 2.0**-126)].astype(np.float32)
  amax = np.concatenate(
    [centre, np.nextafter(centre, np.float32(np.inf)), np.nextafter(centre, np.float32(0))]
  )
  scale = np.asarray(_scales(amax, fmt)[ONE_LEVEL.index(kind)], np.float64)
  assert np.all(np.isfinite(scale)) and np.all(scale >= 2.0**-126)
  ratio, is_above_floor = amax / scale, scale > 2.0**-126
  if kind is Scale.F32:
    assert np.all(ratio <= fmt.max * (1 + 2.0**-22))
    return
  assert np.all(np.frexp(scale)[0] == 0.5)
  binade = 2.0 ** (fmt.max_exponent + 1)
  largest = {
    Scale.POW2: fmt.max,
    Scale.FLOOR: np.nextafter(np.float32(binade), np.float32(0)),
    Scale.EVEN: np.nextafter(
      np.float32(binade * (1 - 2.0 ** -(fmt.mantissa_bits + 2))), np.float32(0)
    ),
  }[kind]
  assert np.all(ratio <= largest)
  assert np.all(ratio[is_above_floor] > largest / 2 * (1 - 2.0**-22))


SPECIAL = np.asarray(
  [
    [0, 0, 0, 0],
    [-0.0, 0, 0, 0],
    [1e-44, -1e-44, 0, 0],  # subnormal
    [2.0**-130, 2.0**-120, 0, 1e-38],
    [np.inf, 1, -2, 0],
    [-np.inf, 1e30, 0, 0],
    [np.nan, 1, 2, 3],
    [3e38, 1e-30, 0, -3e38],  # a lone huge element
  ],
  np.float32,
)


@functools.cache
def _special_blocks():
  """{Quant: SPECIAL in it}, of every format and kind, in one program."""
  quants = [Quant(fmt, (1, WHOLE), kind) for fmt in NARROW for kind in ONE_LEVEL]
  return dict(zip(quants, narrow_all(SPECIAL, quants), strict=True))


@pytest.mark.parametrize("kind", ONE_LEVEL, ids=kind_id)
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_special_blocks_give_finite_scales(fmt, kind):
  got = _special_blocks()[Quant(fmt, (1, WHOLE), kind)]
  scale, data = np.asarray(got.scale), np.asarray(got.data).astype(np.float32)
  assert np.all(np.isfinite(scale)) and np.all(scale >= 2.0**-126)
  np.testing.assert_array_equal(scale[[0, 1, 2, 4, 5], 0], 1.0)
  np.testing.assert_array_equal(data[:3], SPECIAL[:3] * 0)
  # NaN does not hide the rest of its tile; where the format has none, it is +0.
  assert data[6, 3] > fmt.max / 2
  # 3 is on the grid of every format, of E2M1 even where FLOOR and EVEN leave the scale at 1/2 or 1.
  assert data[6, 3] * scale[6, 0] == pytest.approx(3, rel=2**-22)
  want = np.isnan(SPECIAL) if fmt.has_nan else np.zeros_like(SPECIAL, bool)
  np.testing.assert_array_equal(np.isnan(data), want)
  assert fmt.has_nan or (data[6, 0] == 0 and not np.signbit(data[6, 0]))
  # Infinity saturates, and so does what is too large next to it.
  np.testing.assert_array_equal(data[4], np.asarray([fmt.max, 1, -2, 0], np.float32))
  np.testing.assert_array_equal(data[5], np.asarray([-fmt.max, fmt.max, 0, 0], np.float32))
  # Rounding up to a power of two may leave up to half of the range unused.
  assert data[7, 0] >= fmt.max / 2 and data[7, 3] <= -fmt.max / 2


@pytest.mark.parametrize("fmt", NARROW, ids=str)
@pytest.mark.parametrize("row", range(len(SPECIAL)))
def test_special_tensors_give_finite_scales_in_two_levels(fmt, row):
  """Each alone in its tensor with a plain tile, since an infinite amax reaches every tile."""
  x = np.concatenate([SPECIAL[row : row + 1], [[1, 2, 3, 6]]]).astype(np.float32)
  for rows in (x, x[:1]):
    every = [Quant(f, (1, WHOLE), Scale.E4M3_OVER_F32) for f in NARROW]
    got = narrow_all(rows, every)[NARROW.index(fmt)]
    scale, data = np.asarray(got.scale), np.asarray(got.data).astype(np.float32)
    want, want_scale = oracle.quantize(rows, fmt.name, (1, 0), "e4m3_over_f32")
    np.testing.assert_array_equal(scale[:, 0], want_scale[:, 0])
    is_normal = np.abs(rows[-1]) >= 2.0**-126  # others may be flushed
    np.testing.assert_array_equal(data[-1][is_normal], want[-1].astype(np.float32)[is_normal])
    assert np.all(np.isfinite(scale)) and np.all(scale >= 2.0**-126)
    assert not np.isinf(data).any()
    if np.isinf(rows).any():
      assert scale[0, 0] == 1 and np.abs(data[0, 0]) == fmt.max
  if np.abs(np.nan_to_num(SPECIAL[row])).max() < 2.0**-126:
    assert scale[0, 0] == 1  # the tensor alone


def test_two_level_scale_of_the_largest_tile_is_448():
  """NVFP4's code 0x7E, for tensors of any magnitude whose factor is not clamped."""
  amax = np.exp(np.linspace(-70, 88, 2000)).astype(np.float32)
  scale = jax.jit(jax.vmap(lambda a: operator.mul(*q.two_levels(a, a, E2M1))))(amax)
  decode = 1 / (np.float32(2688) / amax)
  np.testing.assert_array_equal(scale, np.float32(448) * decode)


def test_two_level_scale_counts_the_whole_tensor():
  """A tile a millionth of the largest keeps E4M3's smallest number, not 0."""
  x = np.full((2, 32), 1e-6, np.float32)
  x[0, 0] = 2688
  got = narrow(x, Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32))
  np.testing.assert_array_equal(got.scale, [[448, 2.0**-9], [2.0**-9, 2.0**-9]])
  assert np.asarray(got.data).astype(np.float32)[0, 0] == 6


def test_a_cast_rounds_once_in_a_loop_too():
  """XLA:CPU may go to E2M1 by float16, in which numbers next to a tie become the tie."""
  ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
  near = np.concatenate([ties * np.float32(1 + s * 2.0**-13) for s in (-1, 1)])
  x = np.tile(near, (2, 32, 2))
  made = jax.jit(lambda x: jax.lax.map(lambda v: q.cast(v, E2M1), x))(x)
  np.testing.assert_array_equal(made, x.astype(ml_dtypes.float4_e2m1fn))


def test_cast_saturates_where_a_bare_cast_gives_nan():
  x = jnp.asarray([449.0, 464.0, 465.0, 1e9, -1e9, np.inf, -np.inf], jnp.float32)
  want = [448, 448, 448, 448, -448, 448, -448]
  np.testing.assert_array_equal(np.asarray(q.cast(x, E4M3), np.float32), want)
  assert np.isnan(np.float32(465).astype(ml_dtypes.float8_e4m3fn))


@functools.cache
def _along_both():
  """(x, amax) -> {Quant: x in it, along either axis}, of the next test's, in one program."""
  sources, kinds = (Static(), Delayed(8, margin=2)), (Scale.F32, Scale.POW2)
  quants = [Quant(f, (WHOLE, WHOLE), k, s) for f in NARROW for k in kinds for s in sources]
  along = lambda x, a, quant: [q.quantize(x, quant, contraction=i, amax=a) for i in (0, 1)]  # noqa: E731
  program = jax.jit(lambda x, a: [along(x, a, quant) for quant in quants])
  return lambda x, a: dict(zip(quants, program(x, a), strict=True))


@pytest.mark.parametrize("fmt", NARROW, ids=str)
@pytest.mark.parametrize("kind", [Scale.F32, Scale.POW2], ids=kind_id)
def test_scale_of_a_given_amax_ignores_x(rng, kind, fmt):
  x = rng.standard_normal((16, 32)).astype(np.float32)
  for source, margin in ((Static(), 0), (Delayed(8, margin=2), 2)):
    quant = Quant(fmt, (WHOLE, WHOLE), kind, source)
    make_both = lambda x, a, quant=quant: _along_both()(x, a)[quant]  # noqa: E731
    make = lambda a, make_both=make_both: make_both(x, np.float32(a))[1]  # noqa: E731
    scale = oracle.scale_of(0.1, fmt.name, kind.value) * np.float32(2.0**margin)
    for axis, got in enumerate(make_both(x, np.float32(0.1))):
      np.testing.assert_array_equal(got.scale, [[scale]])
      want = oracle.cast((x if axis else x.T) * (np.float32(1) / scale), fmt.name)
      np.testing.assert_array_equal(got.data, want)
    is_saturated = np.abs(np.asarray(got.data).astype(np.float32)) == fmt.max
    assert is_saturated.any() and np.all(is_saturated[np.abs(x) > scale * fmt.max])
    for amax in (0.0, -1.0, np.inf, 1e-44):
      assert make(amax).scale == 1
    (wide,) = dequantized([make(np.nan)])
    assert np.isnan(wide).all()  # never calibrated
    for amax in (2.0**-126, 3e38):
      scale = float(np.asarray(make(amax).scale)[0, 0])
      assert 2.0**-126 <= scale <= 2.0**126


def test_a_given_amax_of_two_levels_has_its_margin_and_is_missed_where_nobody_saw_one(rng):
  x = rng.standard_normal((8, 48)).astype(np.float32)
  quant = Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32, Static(margin=3))
  make = jax.jit(lambda amax: [q.quantize(x, quant, amax=amax), q.given_scale(amax, quant)])
  made, of_tensor = make(np.float32(0.25))
  data, scale = oracle.quantize(x, "e2m1", (1, 16), "e4m3_over_f32", np.float32(2.0))
  np.testing.assert_array_equal(made.scale, scale[:, ::16])
  np.testing.assert_array_equal(np.float32(made.data), np.float32(data))
  assert of_tensor == np.float32(1) / (np.float32(448 * 6) / np.float32(2))
  unseen, of_tensor = make(np.float32(np.nan))
  assert np.isnan(unseen.scale).all() and np.isnan(of_tensor)


def test_amax_belongs_to_sources_other_than_current():
  x = np.ones((4, 4), np.float32)
  with pytest.raises(ValueError, match="Static.* needs an amax"):
    q.quantize(x, Quant(E4M3, source=Static()))
  with pytest.raises(ValueError, match="Current.* give no amax"):
    q.quantize(x, Quant(E4M3), amax=jnp.float32(1))


def check_exact_on_lattice(rng, quants, axes=(0, 1), **options):
  x = lattice(rng, 130, 200, fmt=quants[0].format.name)
  for axis in axes:
    made = dequantized(narrow_all(x, quants, contraction=axis, **options))
    for quant, wide in zip(quants, made, strict=True):
      np.testing.assert_array_equal(wide, x if axis else x.T, f"{quant} along {axis}")


@pytest.mark.parametrize("fmt, kinds, tiles", [
  (E4M3, ONE_LEVEL, TILES), (E5M2, ONE_LEVEL, SMALL_TILES), (E2M1, KINDS, SMALL_TILES),
  (E3M4, (Scale.POW2, Scale.FLOOR, Scale.EVEN), SMALL_TILES),
], ids=str)  # fmt: skip
def test_lattice_is_exact(rng, fmt, kinds, tiles):
  """Along rows; along columns the codes are the same ones (of the transpose, above)."""
  check_exact_on_lattice(rng, [Quant(fmt, tile, kind) for tile in tiles for kind in kinds], (1,))


def test_lattice_is_exact_under_stochastic_rounding(rng):
  quant = Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32, rounding=Rounding.STOCHASTIC)
  check_exact_on_lattice(rng, [quant], key=jax.random.key(0))


@pytest.mark.parametrize("axis", [0, 1])
def test_whole_scale_is_global_inside_shard_map(rng, axis):
  """Rows split over eight devices, seen as a matrix of rows x contraction or as its transpose."""
  x = rng.standard_normal((16, 8)).astype(np.float32)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("data")
  amax_axes = (("data",), ()) if axis else ((), ("data",))

  def local(x):
    made = q.quantize(x, Quant(E4M3), contraction=axis, amax_axes=amax_axes)
    return made.scale

  scales = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(
    x
  )
  np.testing.assert_array_equal(scales, np.full((8, 1), np.abs(x).max() * np.float32(1 / 448)))


@pytest.mark.parametrize("contraction", [0, 1])
@pytest.mark.parametrize("split", [0, 1])
def test_row_scale_is_global_where_the_contraction_is_split(rng, split, contraction):
  """One scale per row: of the whole row, and of no other, whichever axis of x is on the mesh."""
  x = rng.standard_normal((16, 24)).astype(np.float32)  # rows x contraction
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  amax_axes = ((), ("data",)) if split else (("data",), ())

  def local(x):
    return q.quantize(
      x, Quant(E4M3, (1, WHOLE)), contraction=contraction, amax_axes=amax_axes
    ).scale

  spec = jax.sharding.PartitionSpec(*((None, "data") if split == contraction else ("data", None)))
  out = jax.sharding.PartitionSpec("data")
  f = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
  scales = np.asarray(jax.jit(f)(x if contraction else x.T))
  want = np.abs(x).max(1)[:, None] * np.float32(1 / 448)
  np.testing.assert_array_equal(scales, np.tile(want, (8, 1)) if split else want)


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=str)
def test_two_levels_inside_shard_map_are_those_of_the_whole(rng, tile):
  """Rows and contraction split; the tensor's amax comes from every shard."""
  x = (rng.standard_normal((64, 64)) * np.exp(3 * rng.standard_normal((64, 64)))).astype(np.float32)
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  spec = jax.sharding.PartitionSpec("data", "model")
  quant = Quant(E2M1, tile, Scale.E4M3_OVER_F32)

  def local(x):
    return q.quantize(x, quant, amax_axes=(("data",), ("model",))).dequantize()

  got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)
  (want,) = dequantized([narrow(x, quant)])
  np.testing.assert_array_equal(got, want)
