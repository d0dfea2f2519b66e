"""Number formats and block scales against what others made of the same inputs, as a table.

python tests/golden/conformance.py
Prints one line per format and check: how many inputs, how many mismatches. tests/quantization runs
the
same checks. Oracles: ml_dtypes, gfloat (with E3M4 described to it by hand), integers and float64 in
tests/oracle.py, and torchao through mx_blocks.npz.
"""

import functools
import json
import operator
import pathlib
import sys

import gfloat
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from gfloat import formats as gfloat_formats

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

import oracle  # noqa: E402

from fp8jax import formats  # noqa: E402
from fp8jax.quantization import quantize, quantized_tensor, scaled_matrix  # noqa: E402
from fp8jax.recipe.quant import (  # noqa: E402
  Quant,
  Scale,  # noqa: E402
)

WIDE = ("bf16", "f16")
ONE_LEVEL = (Scale.F32, Scale.POW2, Scale.FLOOR, Scale.EVEN)
GFLOAT = {
  "e4m3": gfloat_formats.format_info_ocp_e4m3,
  "e5m2": gfloat_formats.format_info_ocp_e5m2,
  "e3m4": gfloat.FormatInfo(
    "e3m4",
    k=8,
    precision=5,
    bias=3,
    is_signed=True,
    domain=gfloat.Domain.Extended,
    has_nz=True,
    num_high_nans=15,
    has_subnormals=True,
    is_twos_complement=False,
  ),
  "e2m1": gfloat_formats.format_info_ocp_e2m1,
  "bf16": gfloat_formats.format_info_bfloat16,
  "f16": gfloat_formats.format_info_binary16,
}
# Integers have no dtype to compare codes with: tests/quantization/grids_test.py.
NARROW = tuple(name for name in GFLOAT if formats.FORMATS[name].is_low_bit)
GFLOAT_BLOCKS = {
  "e4m3": gfloat_formats.format_info_mxfp8_e4m3,
  "e5m2": gfloat_formats.format_info_mxfp8_e5m2,
  "e2m1": gfloat_formats.format_info_mxfp4_e2m1,
}
# What torchao calls our kinds.
TORCHAO = {"floor": Scale.FLOOR, "rceil": Scale.POW2, "even": Scale.EVEN}


def differences(got, want) -> int:
  """How many floats differ, -0 from +0 too; any two NaNs are equal."""
  got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
  is_same = (got == want) & (np.signbit(got) == np.signbit(want))
  return int(np.sum(~(is_same | (np.isnan(got) & np.isnan(want)))))


def codes_of(data) -> np.ndarray:
  data = np.asarray(data)
  return data.view(f"u{data.dtype.itemsize}")


# --- elements ------------------------------------------------------------------------------------


def decode(name: str):
  """Every code, as ScaledMatrix reads it, against ml_dtypes and gfloat."""
  fmt = formats.FORMATS[name]
  codes = np.arange(2**fmt.bits, dtype=np.uint8)
  data = codes.view(fmt.dtype)[None]
  read = jax.jit(lambda d: scaled_matrix.ScaledMatrix(d, jnp.ones((1, 1)), (0, 0)).dequantize())
  got = np.asarray(read(data))[0]
  theirs = gfloat.decode_ndarray(GFLOAT[name], codes)
  return codes.size, differences(got, data[0]) + differences(got, theirs)


def grid(name: str) -> np.ndarray:
  """float64, every finite value that is not negative, ascending."""
  fmt = formats.FORMATS[name]
  codes = np.arange(2 ** (fmt.bits - 1), dtype=f"u{fmt.dtype.itemsize}")
  with np.errstate(invalid="ignore"):  # some NaNs signal
    values = codes.view(fmt.dtype).astype(np.float64)
  return values[np.isfinite(values)]


def around(x) -> np.ndarray:
  """float32 x with its neighbours on both sides, and all of them negated."""
  with np.errstate(over="ignore"):
    x = np.asarray(x, np.float32)
  x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
  return np.concatenate([x, -x])


def all_bfloat16(name: str) -> np.ndarray:
  """Infinities, NaNs and subnormals among them."""
  return np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def all_float16(name: str) -> np.ndarray:
  return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def random_float32(name: str) -> np.ndarray:
  """A million bit patterns, and a million with exponents at which `name` has numbers."""
  rng = np.random.default_rng(0)
  fmt = formats.FORMATS[name]
  anything = rng.integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
  low, high = int(np.log2(fmt.smallest)) - 3, fmt.max_exponent + 3
  exponents = rng.integers(low, high, 2**20)
  with np.errstate(over="ignore"):
    near = np.ldexp(rng.uniform(1, 2, 2**20).astype(np.float32), exponents)
  return np.concatenate([anything, near * rng.choice(np.float32([-1, 1]), near.shape)])


def midpoints(name: str) -> np.ndarray:
  """Every number and every tie, each with its float32 neighbours; overflow; what is not finite."""
  values = grid(name)
  ties = (values[1:] + values[:-1]) / 2
  top = values[-1] + (values[-1] - values[-2]) / 2  # 464, 61440, 15.75, 7
  special = np.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38], np.float32)
  return np.concatenate([around(values), around(ties), around([top, 2 * values[-1]]), special])


def cast(name: str, inputs):
  """The saturating cast against ml_dtypes (NumPy for F16) and, for what is a number, gfloat.

  To BF16 without float32 subnormals, of which some backends make 0.
  """
  fmt = formats.FORMATS[name]
  x = inputs(name)
  if name == "bf16":
    x = x[(x == 0) | ~(np.abs(x) < 2.0**-126)]
  got = np.asarray(jax.jit(lambda x: quantize.cast(x, fmt))(x))
  want = oracle.cast(x, name)
  wrong = int(np.sum((codes_of(got) != codes_of(want)) & ~np.isnan(x))) + differences(got, want)
  is_number = ~np.isnan(x)
  theirs = gfloat.round_ndarray(
    GFLOAT[name], x[is_number].astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True
  )
  return x.size, wrong + differences(got[is_number], theirs)


# --- scales --------------------------------------------------------------------------------------


def hard_amaxes(name: str) -> np.ndarray:
  """float32 around every number at which some rule changes its mind, at every exponent."""
  fmt = formats.FORMATS[name]
  top = fmt.max / 2.0**fmt.max_exponent
  bump = 2 - 2.0 ** -(fmt.mantissa_bits + 1)  # EVEN carries from here on
  significands = np.asarray([1, top, bump, 1.25, 1.5, 1.75])
  centre = np.ldexp(significands[:, None], np.arange(-126, 128)).ravel().astype(np.float32)
  positive = around(centre)
  extra = np.asarray([0, 1e-45, 2.0**-127, np.inf, np.nan], np.float32)
  return np.concatenate([positive[positive > 0], extra])


def scale(name: str, kind: Scale):
  """A tile's scale around every power of two, against float64 and frexp."""
  amax = hard_amaxes(name)
  rule = jax.jit(lambda a: quantize.amax_to_scale(a, formats.FORMATS[name], kind))
  want = [oracle.scale_of(a, name, kind.value) for a in amax]
  return amax.size, differences(rule(amax), want)


def e8m0(name: str, kind: Scale):
  """The byte that keeps a power-of-two scale around every power of two, and what it is read as.

  Against ml_dtypes and gfloat. What is stored saturates: the scale of an infinity is that of the
  largest number.
  """
  amax, e8m0 = hard_amaxes(name), formats.E8M0.dtype
  quant = Quant(formats.FORMATS[name], (1, 1), kind)
  kept = jax.jit(lambda a: quantized_tensor.pack(a, quant))(amax[:, None])
  finite = np.where(np.isinf(amax), np.finfo(np.float32).max, amax)
  want = np.asarray([oracle.scale_of(a, name, kind.value) for a in finite])
  wrong = np.sum(np.asarray(kept.scale)[:, 0] != want.astype(e8m0).view(np.uint8))
  codes = np.arange(1, 255, dtype=np.uint8)  # 2^-126 to 2^127
  ones = quantized_tensor.QuantizedTensor(
    np.ones((codes.size, 1), quant.format.dtype), codes[:, None], None, quant
  )
  read = np.asarray(ones.unpack())[:, 0]
  theirs = gfloat.decode_ndarray(gfloat_formats.format_info_ocp_e8m0, codes)
  wrong += differences(read, codes.view(e8m0)) + differences(read, theirs)
  return amax.size + codes.size, int(wrong)


def two_level_scale(name: str):
  """A tile's scale under the tensor's, in bfloat16 amaxes: a thousandth of them meets E4M3's ties.

  The order of the operations decides those, so that another order has mismatches here.
  """
  rng = np.random.default_rng(0)
  tensors = np.exp(rng.uniform(-60, 80, 64)).astype(ml_dtypes.bfloat16).astype(np.float32)
  tensors = np.concatenate([tensors, np.asarray([0, 1e-37, 1e-33, 3e38, np.inf], np.float32)])
  fractions = np.exp(rng.uniform(-12, 0, (len(tensors), 512)))
  tiles = np.where(np.isfinite(tensors), tensors, 1)[:, None] * fractions
  tiles = tiles.astype(ml_dtypes.bfloat16).astype(np.float32)
  tiles[:, 0], tiles[:, 1] = tensors, 0
  rule = jax.vmap(lambda a, t: operator.mul(*quantize.two_levels(a, t, formats.FORMATS[name])))
  want = [[np.prod(oracle.two_level(a, t, name)) for a in row] for row, t in zip(tiles, tensors)]
  return tiles.size, differences(jax.jit(rule)(tiles, tensors), want)


# --- blocks --------------------------------------------------------------------------------------


@functools.cache
def golden() -> dict[str, np.ndarray]:
  with np.load(HERE / "mx_blocks.npz") as arrays:
    return {name: arrays[name] for name in arrays.files}


def narrow(x, name: str, kind: Scale, tile) -> scaled_matrix.ScaledMatrix:
  quant = Quant(formats.FORMATS[name], tile, kind)
  return jax.jit(lambda x: quantize.quantize(x, quant))(x)


def mx_torchao(name: str, mode: str):
  """(per block: whether scale and codes are torchao's, whether torchao's scale is wrong).

  torchao's smallest E8M0 scale is 2^-127 and also marks blocks of zeros; ours is a normal float32,
  and 1 for zeros. Where it gives 2^-127, the expectation here is ours, of the scale alone.
  torchao's RCEIL rounds log2 in float32: one ulp above a power of two times the format's maximum,
  its scale is half of what keeps the block within range, against its own definition.
  """
  arrays = golden()
  got = narrow(arrays["x"], name, TORCHAO[mode], (1, 32))
  biased = arrays[f"{name}_{mode}_scale"].astype(int)
  amax = np.abs(arrays["x"]).max(1)
  want = np.where(amax < 2.0**-126, 1.0, np.ldexp(1.0, np.maximum(biased, 1) - 127))
  is_same = np.asarray(got.scale, np.float64)[:, 0] == want
  has_same_codes = (codes_of(got.data) == arrays[f"{name}_{mode}_codes"]).all(1)
  has_small_scale = (biased == 0) & (mode == "rceil")  # it then multiplies by 1, not by 2^126
  theirs = np.ldexp(formats.FORMATS[name].max, biased - 127)
  is_wrong = (amax > theirs) & (mode == "rceil")
  return is_same & (has_same_codes | has_small_scale | (amax < 2.0**-126)), is_wrong


def mx(name: str, mode: str):
  """Blocks without those for which torchao's scale is wrong; see mx_torchao."""
  is_same, is_wrong = mx_torchao(name, mode)
  return int((~is_wrong).sum()), int((~is_same & ~is_wrong).sum())


def mx_gfloat(name: str, kind: Scale):
  """Blocks of 32 against gfloat's quantize_block, in float64.

  gfloat has a rule for FLOOR alone; for the others it is given tests/oracle.py's, and what is its
  own are the E8M0 scale, the quotients, their rounding and the values read back.
  """

  def given(_, vals):
    return float(oracle.scale_of(np.abs(vals).max(), name, kind.value))

  x = golden()["x"]
  x = x[np.abs(x).max(1) >= 2.0**-100]  # below, gfloat's scale may be smaller than a float32's
  made = narrow(x, name, kind, (1, 32))
  # In float64: a value just below 2^128 may have been rounded to it.
  got = np.asarray(made.data).astype(np.float64) * np.asarray(made.scale, np.float64)
  info, rule = GFLOAT_BLOCKS[name], gfloat.compute_scale_amax if kind is Scale.FLOOR else given
  rows = [gfloat.quantize_block(info, r, rule) for r in x.astype(np.float64)]
  return x.shape[0], int((np.asarray(rows) != got).any(1).sum())


def nvfp4(which: str):
  """1x16 blocks of a tensor in two levels against torchao's nvfp4_quantize: E4M3 numbers and codes.

  torchao divides where we multiply by reciprocals (amax / 6 / (tensor_amax / 2688), and 1 /
  (tensor_amax / 2688) / s8), so that a number within an ulp of a tie may round otherwise. In these
  inputs none does. Of four tensors of 2^20 float32, one code did; of four of bfloat16, where ties
  are frequent, up to 0.3 % of the codes and 1.4 % of the E4M3 numbers. torchao keeps its E4M3
  numbers at 2^-6 or above, we at 2^-9: blocks whose number is below 2^-6 are left out, as are
  zeros, whose number is arbitrary.
  """
  arrays = golden()
  x = arrays[f"nvfp4_{which}_x"]
  got = narrow(x, "e2m1", Scale.E4M3_OVER_F32, (1, 16))
  tensor = np.float64(arrays[f"nvfp4_{which}_tensor"])
  is_above = np.abs(x).reshape(len(x), -1, 16).max(2) / 6 / tensor >= 2.0**-6
  s8 = arrays[f"nvfp4_{which}_scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
  ours = np.asarray(got.scale, np.float64) / tensor  # off by float32's rounding, far below E4M3's
  is_same = np.abs(ours / s8 - 1) < 2.0**-20
  codes = codes_of(got.data) == arrays[f"nvfp4_{which}_codes"]
  is_same &= codes.reshape(*is_same.shape, 16).all(2)
  return int(is_above.sum()), int((~is_same & is_above).sum())


def checks():
  """{(format, check): function that gives (inputs, mismatches)}"""
  inputs = {"bfloat16": all_bfloat16, "float32": random_float32, "ties": midpoints}
  for name in NARROW:
    yield (name, "decode"), functools.partial(decode, name)
    for label, make in inputs.items():
      yield (name, f"cast {label}"), functools.partial(cast, name, make)
    for kind in ONE_LEVEL:
      yield (name, f"scale {kind.value}"), functools.partial(scale, name, kind)
    yield (name, "scale e4m3_over_f32"), functools.partial(two_level_scale, name)
    for kind in TORCHAO.values():
      yield (name, f"e8m0 of {kind.value}"), functools.partial(e8m0, name, kind)
  for name in WIDE:
    for label, make in {**inputs, "float16": all_float16}.items():
      yield (name, f"cast {label}"), functools.partial(cast, name, make)
  for name in GFLOAT_BLOCKS:
    for mode in TORCHAO:
      kind = TORCHAO[mode]
      yield (name, f"1x32 {kind.value}, gfloat"), functools.partial(mx_gfloat, name, kind)
      yield (name, f"1x32 {mode}, torchao"), functools.partial(mx, name, mode)
  for which in ("exact", "random", "large", "small"):
    yield ("e2m1", f"nvfp4 {which}, torchao"), functools.partial(nvfp4, which)


def main():
  print(json.loads(str(golden()["provenance"])))
  print(f"{'format':8}{'check':24}{'inputs':>10}{'mismatches':>12}")
  for (name, check), run in checks():
    inputs, mismatches = run()
    print(f"{name:8}{check:24}{inputs:10}{mismatches:12}")


if __name__ == "__main__":
  main()
