"""Every named format's numbers against gfloat, float64 search and exact integers.

The table below states each format from its source, and shares nothing with fp8jax/formats.py. Its
numbers are enumerated code by code in float64, and the nearest is searched among them.
"""

import functools
import itertools
import re

import gfloat
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from golden import conformance

from fp8jax import formats
from fp8jax.formats import FORMATS
from fp8jax.grids import Float
from fp8jax.kernels.gemm import xla
from fp8jax.quantization import quantize, quantized_tensor, rounding
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.quant import Quant, Rounding, Scale

# Exponent bits, mantissa bits, bias, largest, specials, what stores it.
FLOATS = {
  "e4m3": (4, 3, 7, 448.0, "nan", "float8_e4m3fn"),
  "e5m2": (5, 2, 15, 57344.0, "inf nan", "float8_e5m2"),
  "e3m4": (3, 4, 3, 15.5, "inf nan", "float8_e3m4"),
  "e2m1": (2, 1, 1, 6.0, "", "float4_e2m1fn"),
  "e4m3_240": (4, 3, 7, 240.0, "inf nan", "float8_e4m3fn"),
  "e3m4_30": (3, 4, 3, 30.0, "nan", "bfloat16"),
  "e2m3": (2, 3, 1, 7.5, "", "float8_e4m3fn"),
  "e3m2": (3, 2, 3, 28.0, "", "float8_e4m3fn"),
  "e5m6": (5, 6, 15, 65024.0, "inf nan", "bfloat16"),
  "e8m3": (8, 3, 127, 15 * 2.0**124, "inf nan", "bfloat16"),
  "e8m4": (8, 4, 127, 31 * 2.0**123, "inf nan", "bfloat16"),
  "e8m5": (8, 5, 127, 63 * 2.0**122, "inf nan", "bfloat16"),
  "e8m6": (8, 6, 127, 127 * 2.0**121, "inf nan", "bfloat16"),
  "e7m7": (7, 7, 63, 255 * 2.0**56, "inf nan", "bfloat16"),
  # Of families: a bias, an end and specials of their own, a float16 and a float32 that store them.
  "e4m4": (4, 4, 7, 248.0, "inf nan", "bfloat16"),
  "e4m3(max=240)": (4, 3, 7, 240.0, "nan", "float8_e4m3fn"),
  "e4m3(bias=8)": (4, 3, 8, 224.0, "nan", "bfloat16"),
  "e3m3(inf=False, nan=False)": (3, 3, 3, 30.0, "", "float8_e4m3fn"),
  "e2m2(inf=False)": (2, 2, 1, 6.0, "nan", "float8_e4m3fn"),
  "e5m8": (5, 8, 15, 511 * 2.0**7, "inf nan", "float16"),
  "e6m9(bias=20, max=3.5)": (6, 9, 20, 3.5, "inf nan", "float32"),
}
INTEGERS = {f"int{n}": n for n in range(2, 9)}
LOGS = {
  "lns8": (8, 8), "lns6(gamma=1)": (6, 1), "lns10(gamma=32)": (10, 32),
  "lns12(gamma=128)": (12, 128), "lns14(gamma=512)": (14, 512), "lns16(gamma=2048)": (16, 2048),
}  # fmt: skip
TILES = {"logfmt8": 8, "logfmt10": 10}
NAMED = {*FLOATS, *INTEGERS, *LOGS, *TILES}
TINY = 2.0**-126
# EDEN is of two-level scales.
ROUNDINGS = [r for r in Rounding if r is not Rounding.EDEN]


# Those of more than 12 bits differ in the length of a table.
_LOGS = [
  pytest.param(name, marks=[pytest.mark.slow] * (bits > 12)) for name, (bits, _) in LOGS.items()
]


def test_no_named_format_lacks_a_row():
  assert set(FORMATS) - NAMED == {"e8m0", "bf16", "f16", "f32"}


@functools.cache
def numbers(name: str) -> np.ndarray:
  """float64 magnitudes, ascending: the place of each is its code."""
  if name in INTEGERS:
    return np.arange(2.0 ** (INTEGERS[name] - 1))
  if name in LOGS:
    bits, gamma = LOGS[name]
    exact = 2.0 ** (np.arange(2 ** (bits - 1)) / gamma)
    return np.concatenate([[0.0], exact.astype(np.float32)])
  exponents, mantissa, bias, largest, *_ = FLOATS[name]
  field, fraction = np.divmod(np.arange(2 ** (exponents + mantissa)), 2**mantissa)
  normal = np.ldexp(1 + fraction / 2**mantissa, np.minimum(field - bias, 900))
  made = np.where(field > 0, normal, np.ldexp(fraction / 2**mantissa, 1 - bias))
  return made[made <= largest]


@functools.cache
def inputs(name: str) -> np.ndarray:
  """All BF16 numbers, every number and tie with its float32 neighbours, the ends, specials.

  Float32 subnormals are left out, which count as 0.
  """
  grid = numbers(name)
  ties = np.sqrt(grid[1:-1] * grid[2:]) if name in LOGS else (grid[1:] + grid[:-1]) / 2
  over = grid[-1] + (grid[-1] - grid[-2]) / 2
  with np.errstate(over="ignore"):
    near = conformance.around(np.concatenate([grid, ties, [over, 2 * grid[-1]]]))
  x = np.concatenate([conformance.all_bfloat16(name), near, np.float32([3.4e38, -3.4e38, 0, -0.0])])
  return x[~(np.abs(x) < TINY) | (x == 0)]


@np.errstate(invalid="ignore", divide="ignore")
def searched(name: str, x, down: bool = False) -> np.ndarray:
  """float64 rounded to the nearest, ties to an even code, or toward zero; saturating."""
  grid, magnitude = numbers(name), np.abs(x.astype(np.float64))
  place = np.searchsorted(grid, np.where(np.isnan(x), 0, magnitude), side="right") - 1
  above = np.minimum(place + 1, len(grid) - 1)
  if not down:
    over, under = grid[above] - magnitude, magnitude - grid[place]
    is_up = (over < under) | ((over == under) & (place % 2 == 1))
    place = np.where(is_up, above, place)
    if name in LOGS:  # nearest in log, of a code; what is below the smallest is the smallest
      code = np.clip(np.floor(LOGS[name][1] * np.log2(magnitude) + 0.5), 0, len(grid) - 2)
      place = np.where(magnitude > 0, code + 1, 0).astype(int)
  has_nan = name in FLOATS and "nan" in FLOATS[name][4]
  rounded = np.copysign(grid[place], x) + (0.0 if name in INTEGERS else -0.0)  # one zero, or two
  return np.where(np.isnan(x), np.nan if has_nan else 0.0, rounded)


@functools.cache
def rounded(name: str):
  """(to the nearest, toward zero) of `inputs`, under jit."""
  fmt = formats.by_name(name)

  @jax.jit
  def run(x):
    return quantize.cast(x, fmt), quantize.cast(x, fmt, Rounding.TOWARD_ZERO)

  return [np.asarray(made) for made in run(inputs(name))]


def differences(got, want, x) -> int:
  """-0 and +0 told apart, but where x is NaN."""
  with np.errstate(invalid="ignore"):
    got = got.astype(np.float64)
  return conformance.differences(np.where(np.isnan(x), np.abs(got), got), want)


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS, *_LOGS])
def test_rounding_is_what_a_search_among_all_numbers_finds(name):
  x = inputs(name)
  for got, down in zip(rounded(name), (False, True)):
    assert differences(got, searched(name, x, down), x) == 0, down


def test_float32_subnormals_count_as_0():
  """In formats that have such numbers, and in LNS, where the smallest stands for all others."""
  x = conformance.all_bfloat16("")
  x = x[(np.abs(x) < TINY) & (x != 0)]
  fmts = [formats.by_name(name) for name in FLOATS if numbers(name)[1] < TINY]
  assert len(fmts) >= 4
  fmts.append(formats.LNS8)
  for got in jax.jit(lambda x: [quantize.cast(x, fmt).astype(jnp.float32) for fmt in fmts])(x):
    assert not np.asarray(got).any() and len(got) == 254


@pytest.mark.parametrize("name", [n for n in FLOATS if FLOATS[n][0] > 2 or FLOATS[n][4]])
def test_rounding_is_gfloats(name):
  exponents, mantissa, bias, largest, specials, _ = FLOATS[name]
  x = inputs(name)
  is_ieee = specials == "inf nan"
  info = gfloat.FormatInfo(
    name, k=1 + exponents + mantissa, precision=mantissa + 1, bias=bias, is_signed=True,
    domain=gfloat.Domain.Extended if is_ieee else gfloat.Domain.Finite, has_nz=True,
    num_high_nans=2**mantissa - 1 if is_ieee else len(specials) // 3, has_subnormals=True,
    is_twos_complement=False,
  )  # fmt: skip
  x, low = x[~np.isnan(x)], -largest
  with np.errstate(invalid="ignore"):
    theirs = gfloat.round_ndarray(
      info, np.clip(x.astype(np.float64), low, largest), gfloat.RoundMode.TiesToEven, sat=True
    )
    down = gfloat.round_ndarray(
      info, np.clip(x.astype(np.float64), low, largest), gfloat.RoundMode.TowardZero, sat=True
    )
  is_number = ~np.isnan(inputs(name))
  got = [made[is_number] for made in rounded(name)]
  assert conformance.differences(got[0], theirs) == 0
  assert conformance.differences(got[1], down) == 0


@pytest.mark.parametrize("name", _LOGS)
def test_halfway_in_log_space_is_decided_as_by_whole_numbers(name):
  """n / 2^e lies beyond 2^((2k + 1) / (2 gamma)) where n^(2 gamma) > 2^(2k + 1 + 2 gamma e)."""
  gamma, grid = LOGS[name][1], numbers(name)[1:]
  ties = conformance.around(np.sqrt(grid[:-1] * grid[1:]))
  ties = np.unique(np.abs(ties))[: 40 * 3]
  fmt = formats.by_name(name)
  got = np.asarray(jax.jit(lambda x: rounding.nearest(x, fmt))(ties), np.float64)
  for x, value in zip(ties.tolist(), got.tolist()):
    numerator, denominator = x.as_integer_ratio()
    e = denominator.bit_length() - 1
    power = numerator ** (2 * gamma)
    halves = [k for k in range(len(grid) - 1) if power > 1 << (2 * k + 1 + 2 * gamma * e)]
    assert value == grid[len(halves)], x


@pytest.mark.parametrize("name", FLOATS)
def test_a_format_is_stored_in_the_narrowest_dtype_that_has_its_numbers(name):
  fmt, (exponents, mantissa, bias, largest, specials, dtype) = formats.by_name(name), FLOATS[name]
  assert (fmt.dtype.name, fmt.bits) == (dtype, 1 + exponents + mantissa)
  assert (fmt.grid.bias, fmt.mantissa_bits, fmt.max) == (bias, mantissa, largest)
  assert (fmt.has_inf, fmt.has_nan) == ("inf" in specials, "nan" in specials)
  grid = numbers(name)
  assert (fmt.smallest, fmt.max) == (grid[1], grid[-1])
  kept = grid[(grid >= TINY) | (grid == 0)].astype(np.float32).astype(fmt.dtype)
  assert np.array_equal(kept.astype(np.float64), grid[(grid >= TINY) | (grid == 0)])


def test_eager_is_jitted(rng):
  """Of every kind of format and every rounding; op by op XLA sees no product beside its sum."""
  x = (rng.standard_normal((8, 128)) * np.exp(4 * rng.standard_normal((8, 128)))).astype(np.float32)
  x[0, :3] = 0, np.nan, np.inf
  key = jax.random.key(1)
  names = ["e5m6", "e8m3", "int4", "lns8", "logfmt8"]
  by_turns = zip(names, itertools.cycle(ROUNDINGS))
  quants = [Quant(FORMATS[n], (1, 128), rounding=r) for n, r in by_turns]

  def run(x):
    return [quantize.quantize(x, quant, key=key).data for quant in quants]

  for quant, jitted, eager in zip(quants, jax.jit(run)(x), run(jnp.asarray(x))):
    np.testing.assert_array_equal(np.float32(jitted), np.float32(eager), str(quant))


# --- LogFMT --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TILES)
def test_logfmt_spaces_a_tile_evenly_in_log_and_rounds_in_linear_space(name, rng):
  """Against the definition in float64. Spacings of 2^-20 octave move a number by 2^-18 of it."""
  spaces, slack = 2 ** (TILES[name] - 1) - 2, 2.0**-18
  spread = np.array([0.0, 0.01, 1, 3, 8, 12])[:, None]
  x = np.exp(spread * rng.standard_normal((6, 128))) * rng.choice([-1.0, 1.0], (6, 128))
  x[3, 5], x[4, :64] = 0.0, 0.0
  x = (x / np.abs(x).max(1, keepdims=True)).astype(np.float32)
  fmt = formats.by_name(name)

  @jax.jit
  def run(x):
    return [r(x[:, None], fmt, (1, 2)) for r in (rounding.nearest, rounding.toward_zero)]

  got, down = (np.asarray(made, np.float64)[:, 0] for made in run(x))
  for row, one, below in zip(x.astype(np.float64), np.abs(got), np.abs(down)):
    magnitude = np.abs(row)
    least = max(magnitude[magnitude > 0].min(), 2.0**-32)
    levels = np.concatenate([[0.0], least ** (1 - np.arange(spaces + 1) / spaces)])
    nearest = np.abs(magnitude[:, None] - levels).min(1)
    assert np.all(np.abs(one - magnitude) <= nearest + slack * magnitude)
    assert np.all(np.abs(one[:, None] - levels).min(1) <= slack * one)
    assert np.all((one == 0) == (magnitude < least / 2)) and one.max() == 1.0
    beneath = [levels[levels <= m * (1 - slack)].max(initial=0) for m in magnitude]
    assert np.all((below <= magnitude) & (below >= np.multiply(beneath, 1 - slack)))
  assert np.all(np.signbit(got) == np.signbit(x))


@pytest.mark.parametrize("name", TILES)
def test_logfmt_rounds_all_bfloat16_numbers_and_every_tie_in_a_tile_of_all_32_octaves(name):
  """Specials and what is beyond the tile's ends among them; slack as above."""
  spaces, slack = 2 ** (TILES[name] - 1) - 2, 2.0**-18
  levels = np.concatenate([[0.0], 2.0 ** np.linspace(-32, 0, spaces + 1)])
  near = conformance.around(np.concatenate([levels, (levels[1:] + levels[:-1]) / 2]))
  x = np.concatenate([conformance.all_bfloat16(name), near, np.float32([3.4e38])])
  x = np.resize(x, (-(-x.size // 126), 126))
  ends = np.broadcast_to(np.float32([1, 2.0**-32]), (len(x), 2))
  fmt = formats.by_name(name)
  run = jax.jit(lambda x: [r(x, fmt, (1,)) for r in (rounding.nearest, rounding.toward_zero)])
  got, down = (np.float64(made)[:, :126] for made in run(np.concatenate([x, ends], axis=1)))
  is_nothing = np.isnan(x) | (np.abs(x) < TINY)
  magnitude = np.float64(np.where(is_nothing, 0, np.minimum(np.abs(x), 1)))
  above = np.clip(np.searchsorted(levels, magnitude), 1, len(levels) - 1)
  nearest = np.minimum(levels[above] - magnitude, magnitude - levels[above - 1])
  assert np.all(np.abs(np.abs(got) - magnitude) <= nearest + slack * magnitude)
  beneath = levels[np.searchsorted(levels, magnitude * (1 - slack), side="right") - 1]
  assert np.all((np.abs(down) <= magnitude) & (np.abs(down) >= beneath * (1 - slack)))
  for made in (got, down):
    assert not made[is_nothing].any() and np.all(np.abs(made[np.abs(x) >= 1]) == 1)
    at = np.clip(np.searchsorted(levels, np.abs(made)), 1, len(levels) - 1)
    off = np.minimum(np.abs(levels[at] - np.abs(made)), np.abs(levels[at - 1] - np.abs(made)))
    assert np.all(off <= slack * np.abs(made))
    is_kept = ~np.isnan(x) & (made != 0)
    assert np.all(np.signbit(made)[is_kept] == np.signbit(x)[is_kept])


def test_a_grid_per_tile_needs_a_tile():
  with pytest.raises(ValueError, match=r"tile=\(0, 0\) with format=logfmt8"):
    Quant(formats.LOGFMT8)
  with pytest.raises(ValueError, match="give the axes"):
    rounding.nearest(jnp.ones(3), formats.LOGFMT8)
  with pytest.raises(ValueError, match="a grid per tile is for GEMM operands"):
    quantized_tensor.check(Quant(formats.LOGFMT8, (1, 128)))


def test_logfmt_of_a_partial_tile_and_of_zeros():
  x = np.zeros((2, 130), np.float32)
  x[1, 127:] = 3.0, 5.0, 7.0
  made = jax.jit(lambda x: quantize.quantize(x, Quant(formats.LOGFMT8, (1, 128))))(x)
  assert np.all(np.abs(np.asarray(made.dequantize()) - x) <= 2.0**-18 * x)
  assert made.scale.tolist() == [[1.0, 1.0], [3.0, 7.0]]


# --- stochastic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name", ["e3m4_30", "e2m3", "e5m6", "e8m4", "int4", "int8", "lns8", "logfmt8"]
)
def test_stochastic_rounding_takes_neighbours_and_is_right_in_the_mean(name):
  """5 sigma of 2^10 draws, at two places of 16 cells; of LogFMT the numbers are read off it."""
  fmt, draws = formats.by_name(name), 2**10
  if name in TILES:
    tile = np.geomspace(2.0**-4, 1, 127, dtype=np.float32)[None]
    nearest = jax.jit(lambda x: rounding.nearest(x, fmt, (1,)))
    grid = np.unique(np.asarray(nearest(tile), np.float64))
  else:
    grid = numbers(name)
    grid = grid[(grid >= max(fmt.smallest, 2.0**-30)) & (grid <= 2.0**30)]
  cells = np.unique(np.linspace(0, len(grid) - 2, 16).astype(int))
  below, step = np.tile(grid[cells], 2), np.tile(np.diff(grid)[cells], 2)
  share = np.repeat([0.375, 0.9375], len(cells))
  x = np.float32(below + share * step) * np.where(np.arange(2 * len(cells)) % 2, -1, 1)
  rows = np.broadcast_to(x.astype(np.float32), (draws, len(x)))
  if name in TILES:
    ends = np.broadcast_to(np.float32([grid[0], grid[-1]]), (draws, 2))
    rows = np.concatenate([rows, ends], axis=1)
  run = jax.jit(lambda x, key: rounding.stochastic(x, fmt, key, (1,)))
  got = np.asarray(run(rows, jax.random.key(7)))[:, : len(x)].astype(np.float64)
  is_up = np.abs(got) > below + step / 2
  slack = 2.0**-18 if name in TILES else 0.0
  assert np.all(np.abs(np.abs(got) - np.where(is_up, below + step, below)) <= slack * below)
  assert np.all((np.sign(got) == np.sign(x)) | (got == 0))
  sigma = step * np.sqrt(share * (1 - share) / draws)
  assert np.abs((got.mean(0) - x) / sigma).max() < 5


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NAMED | set(FORMATS)))
def test_a_name_gives_its_format_back_and_a_recipe_keeps_it(name):
  fmt = formats.by_name(name)
  assert fmt.name == name and formats.by_name(fmt.name) == fmt and str(fmt) == name
  if fmt.is_operand:
    is_wide = fmt.max > 2.0**58  # has no scale
    quant = Quant(fmt, scale=Scale.ONE) if is_wide else Quant(fmt, (1, 128))
    gemm = Gemm(quant, quant, 128)
    recipe = Recipe("new", gemm, gemm, gemm)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
  else:
    with pytest.raises(ValueError, match="give None|holds scales"):
      Gemm(*(Quant(fmt, scale=Scale.POW2),) * 2)


@pytest.mark.parametrize("text, name", [
  ("e8m7", "bf16"), ("e5m10", "f16"), ("e8m23", "f32"), ("e3m4(inf=False)", "e3m4_30"),
  ("e4m3(inf=True)", "e4m3_240"), ("e4m3(max=448)", "e4m3"), ("int8()", "int8"),
  (" e4m3( max = 240.0 )", "e4m3(max=240)"), ("lns8(gamma=8)", "lns8"), ("e5m6(bias=15)", "e5m6"),
])  # fmt: skip
def test_other_words_for_a_format_give_the_same(text, name):
  assert formats.by_name(text).name == name


@pytest.mark.parametrize("text, reason", [
  ("e4m3fn", "is none of e4m3, "), ("e9m1", "is none of e4m3, "), ("e4m0", "1 to 23 mantissa bits"),
  ("e4m3(max=241)", "max=241.0 is no normal number of e4m3"), ("e4m3(max=480)", "480 is beyond"),
  ("e4m3(max=0.001953125)", "at or above 2^-6"), ("e4m3(max=0)", "max=0 is beyond"),
  ("e8m3(inf=False)", "beyond float32"), ("e4m3(bias=127, max=1e-50)", "max="),
  ("e4m3(bias=1.5)", "bias=1.5; it takes bias, a whole number"), ("e4m3(top=3)", "top=3; it takes"),
  ("e4m3(inf=1)", "inf=1; it takes"), ("e4m3(bias=900)", "from -127 to 127, not 900"),
  ("int9", "from 2 to 8, not 9"), ("int8(gamma=3)", "unexpected keyword argument 'gamma'"),
  ("lns16", "4096 octaves, beyond float32's 127; take gamma=256"), ("lns8(gamma=0)", "1 to 4096"),
  ("logfmt3", "from 4 to 10, not 3"), ("e4m3(", "is not NAME or NAME(key=value"),
])  # fmt: skip
def test_what_is_no_format_is_refused_with_the_reason(text, reason):
  with pytest.raises(ValueError, match=re.escape(reason)):
    formats.by_name(text)


def test_a_grid_that_float32_lacks_is_refused_whoever_makes_it():
  with pytest.raises(ValueError, match="no normal number"):
    Float(4, 3, 7, 449.0)
  with pytest.raises(ValueError, match="beyond float32"):
    Float(8, 3, 128, 1.0)


# --- products ------------------------------------------------------------------------------------


def test_operands_are_multiplied_in_fp8_where_both_are_held_by_it_else_in_float32():
  def of(*pair):
    fmts = [formats.by_name(name) for name in pair]
    made = xla.factors(*(jnp.ones((2, 2)).astype(f.dtype) for f in fmts))
    gemm = Gemm(*(Quant(f, (1, 128)) for f in fmts), 128)
    found = {x.dtype.name for x in made}
    assert xla.is_fp8(gemm) == (found <= {"float8_e4m3fn", "float8_e5m2"})
    return [x.dtype.name for x in made]

  assert of("e4m3", "e5m2") == ["float8_e4m3fn", "float8_e5m2"]
  assert of("e2m3", "e2m1") == ["float8_e4m3fn"] * 2
  for pair in (("int8", "e4m3"), ("e2m1", "e5m6"), ("e3m4", "e3m4"), ("lns8", "logfmt8")):
    assert of(*pair) == ["float32"] * 2
  assert xla.precision(jnp.ones(2), Gemm().accumulate) == jax.lax.Precision.HIGHEST


def test_scales_of_eight_exponent_bits_stay_normal():
  """1 / max is a float32 subnormal there."""
  x = np.float32([[1000.0, 1.0, 2.0**-40]])
  kinds = (Scale.F32, Scale.POW2, Scale.E4M3_OVER_F32)
  run = jax.jit(lambda x: [quantize.quantize(x, Quant(formats.E8M3, scale=k)) for k in kinds])
  for kind, made in zip(kinds, run(x)):
    value = np.asarray(made.data).astype(np.float64) * np.asarray(made.scale)
    assert np.all(np.abs(value - x) <= 2.0**-4 * np.abs(x)), kind


def test_bf16_masked_is_rounding_toward_zero():
  """arXiv:2405.18710 clears mantissa bits of BF16 numbers: an AND of their codes."""
  x = conformance.all_bfloat16("bf16")
  x = x[np.isfinite(x) & ~(np.abs(x) < TINY)]
  codes = x.astype(ml_dtypes.bfloat16).view(np.uint16)
  for m in (3, 4, 5, 6):
    want = (codes & np.uint16(0x10000 - (1 << 7 - m))).view(ml_dtypes.bfloat16)
    got = jax.jit(lambda x, m=m: quantize.cast(x, FORMATS[f"e8m{m}"], Rounding.TOWARD_ZERO))(x)
    assert np.array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("name", sorted(set(oracle.ROWS) & (set(FLOATS) | set(INTEGERS))))
def test_the_oracle_of_products_has_the_same_numbers(name):
  x = inputs(name)
  assert differences(oracle.cast(x, name), rounded(name)[0].astype(np.float64), x) == 0
