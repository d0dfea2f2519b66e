"""The table of the quantized matrices of an export, against float64 NumPy of codes and scales."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from fp8jax.export import fp8 as fp8_export
from fp8jax.export import matrices, served
from fp8jax.models.hf import schemes
from fp8jax.models.hf.schemes import COMPRESSED, FINE_GRAINED
from fp8jax.recipe.quant import Static
from fp8jax.recipe.served import SERVED

FORMATS = {
  "block": schemes.fp8(FINE_GRAINED), "ue8m0": schemes.fp8(FINE_GRAINED, scale_fmt="ue8m0"),
  "compressed_block": schemes.fp8(COMPRESSED, "block"),
  "channel": schemes.fp8(COMPRESSED, "channel"),
  "tensor": schemes.fp8(COMPRESSED, "tensor"),
  "static": schemes.fp8(COMPRESSED, "tensor", static_inputs=True),
  **{name: served.scheme(SERVED[name].fwd.rhs, SERVED[name].fwd.lhs) for name in (
    "int8", "w4a16", "w4a16_g64", "mxfp8_ste", "mxfp4a16", "nvfp4a16", "nvfp4_ste_4or6",
  )},
}  # fmt: skip
# Half a step above the largest number of each format's grid.
BEYOND = {"e4m3": 464, "int8": 127.5, "int4": 7.5, "e2m1": 7}


def _weight(rng, kind):
  """float32 [in, out]; uneven, one output of zeros in a tile of zeros, magnitudes 2^-40 to 1."""
  w = rng.normal(size=(300, 201)) * np.exp(rng.normal(size=(300, 201)) * 2)
  w[:, 128:] = 0
  w[128:256, :3] = 0
  if kind == "outlier":
    w[17, 5] = 3e4
  if kind == "tiny":
    w *= 1e-30
  if kind == "subnormal":
    w *= 1e-40 / np.abs(w).max()
  return w.astype(np.float32) * (kind != "zeros")


KINDS = ("plain", "outlier", "tiny", "subnormal", "zeros")
# Tiles have scales of their own; one of the tensor may come from elsewhere.
SMALL = [("tensor", "small amax"), ("static", "small amax")]


@pytest.mark.parametrize("name, kind", [*itertools.product(FORMATS, KINDS), *SMALL])
def test_row_is_that_of_float64(name, kind, rng):
  fp8, w = FORMATS[name], _weight(rng, kind)
  amax = None
  quant = fp8.weight
  if kind == "small amax":  # of a scale from elsewhere: larger values saturate
    amax, quant = float(np.abs(w).max()) / 7, dataclasses.replace(quant, source=Static())
  known = {"w": 0.25, "x": 3.0}
  scheme = dataclasses.replace(fp8, weight=quant)
  matrix = fp8_export.Matrix(
    scheme, False, amax, input_scale=0.5 if fp8.static_inputs else None, known=known
  )
  made = fp8_export.codes(w, matrix, amax)
  codes, scales = made.data.astype(np.float64), made.scale.astype(np.float64)
  tile = [extent or n for extent, n in zip(quant.tile, codes.shape, strict=True)]
  scales = np.kron(scales, np.ones(tile))[: codes.shape[0], : codes.shape[1]]
  exact = w.T.astype(np.float64)
  back = codes * scales
  error, signal = ((back - exact) ** 2).sum(), (exact**2).sum()
  saturated = (np.abs(exact) > BEYOND[quant.format.name] * scales).mean()
  flushed = ((exact != 0) & (back == 0)).sum() / max((exact != 0).sum(), 1)
  row = matrices.row(w, made, matrix)
  snr = 10 * math.log10(signal / error) if error and signal else math.inf
  assert row["snr_db"] == pytest.approx(snr, abs=1e-3), (snr, row)
  assert row["saturated"] == pytest.approx(saturated, rel=1e-6)
  assert row["flushed"] == pytest.approx(flushed, rel=1e-6)
  assert (row["smallest_scale"], row["largest_scale"]) == (made.scale.min(), made.scale.max())
  assert row["scale_ratio"] == pytest.approx(made.scale.max() * quant.format.max / 0.25, rel=1e-6)
  largest = 448 * 6 if name.startswith("nvfp4") else 448  # under a scale of 1; of two levels
  assert row["input_scale_ratio"] == (0.5 * largest / 3.0 if fp8.static_inputs else None)
  # Or the numbers above say nothing.
  assert (saturated > 0) == (kind == "small amax")
  assert (flushed == 1) == (kind == "subnormal") and (snr == math.inf) == (kind == "zeros")


def test_a_row_without_an_amax_has_no_ratio_and_the_worst_come_first(rng):
  fp8, rows = FORMATS["channel"], {}
  for i in range(7):
    w = _weight(rng, "plain")
    made = fp8_export.codes(w, fp8_export.Matrix(fp8, False), None)
    wrong = np.float32(1 + 0.1 * ((3 * i) % 7))
    made = dataclasses.replace(made, scale=made.scale * wrong)
    known = {"w": 0.0} if i else {}
    rows[f"m{i}"] = matrices.row(w, made, fp8_export.Matrix(fp8, False, known=known))
  assert {r["scale_ratio"] for r in rows.values()} == {None}
  assert [cells[0] for cells in matrices.worst(rows)] == ["m2", "m4", "m6", "m1", "m3"]


def test_an_input_s_scale_is_compared_with_that_of_the_format_that_made_it(rng):
  """Gaudi 2's E4M3 ends at 240; a reader of the folder has codes to 448."""
  fwd = SERVED["fp8_gaudi2"].fwd
  matrix = fp8_export.Matrix(
    served.scheme(fwd.rhs, fwd.lhs), False, input_scale=0.0625, inputs=fwd.lhs, known={"x": 3.0}
  )
  w = _weight(rng, "plain")
  row = matrices.row(w, fp8_export.codes(w, matrix, None), matrix)
  assert row["input_scale_ratio"] == 0.0625 * 240 / 3
