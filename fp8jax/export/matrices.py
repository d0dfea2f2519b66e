"""The FP8 matrices of an export beside the weights that they stand for, a row each.

Rows are made while the files are written, so that one matrix is there at a time.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fp8jax.export.fp8 import Matrix
from fp8jax.formats import E4M3
from fp8jax.models.hf.fp8_formats import Fp8Format
from fp8jax.quantization import tensor_stats
from fp8jax.quantization.scaled_matrix import ScaledMatrix

Rows = dict[str, dict[str, Any]]
FILE = "fp8_matrices.json"
COLUMNS = ("matrix", "SNR, dB", "saturated", "flushed", "scale", "input scale")
# The rows that the command and the model card show.
SHOWN = 5


def row(w, made: Sequence[np.ndarray], matrix: Matrix, fp8: Fp8Format) -> dict[str, Any]:
  """The numbers of a matrix.

  Args:
    w: float32 [in, out], the weight as the checkpoint has it.
    made: codes [out, in], scales, see fp8.quantized.

  Returns:
    snr_db of the dequantized codes (infinite without error), the share of elements that saturated
    and of nonzero elements that became zero, the extreme scales, whether the codes were kept, and
    the ratios of the largest scale and of the input scale to those of the amaxes that training or
    a calibration saw (amax / 448), None where there is none: a scale of a power of two has up to 2,
    one with a margin m at least 2^m, one that shares an amax at least 1.
  """
  x, (codes, scales) = np.asarray(w, np.float32).T, made[:2]
  # Squares of float32 leave its range; a power of two changes no share and no ratio.
  _, exponent = np.frexp(np.max(np.abs(x), initial=0.0))
  factor = np.float32(2.0 ** -np.clip(exponent, -100, 100))
  grid = scales.reshape(-1, 1) if fp8.strategy != "block" else scales
  quantized = ScaledMatrix(codes, grid * factor, fp8.tile)  # pyright: ignore  (NumPy's arrays)
  s = tensor_stats.summary(jax.device_get(_statistics(x * factor, quantized, fp8)))
  largest = float(scales.max())
  return {
    "snr_db": s["snr_db"], "saturated": s["saturation"], "flushed": s["underflow"],
    "smallest_scale": float(scales.min()), "largest_scale": largest, "kept": matrix.is_trained,
    "scale_ratio": _ratio(largest, matrix.known.get("w")),
    "input_scale": matrix.input_scale,
    "input_scale_ratio": _ratio(matrix.input_scale, matrix.known.get("x")),
  }  # fmt: skip


@functools.partial(jax.jit, static_argnums=2)
def _statistics(x, quantized: ScaledMatrix, fp8: Fp8Format):
  return tensor_stats.statistics(x, quantized, fp8.quant)


def _ratio(scale: float | None, amax: float | None) -> float | None:
  """Of a scale to that of an amax; None without one of them."""
  return scale * E4M3.max / amax if scale and amax else None


def worst(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
  """Cells of COLUMNS of the matrices with the lowest SNR."""
  order = sorted(rows, key=lambda name: rows[name]["snr_db"])[:SHOWN]
  return [_cells(name, rows[name]) for name in order]


def _cells(name: str, r: Mapping[str, Any]) -> tuple[str, ...]:
  ratios = (r["scale_ratio"], r["input_scale_ratio"])
  scale, input_scale = ("" if x is None else f"{x:.3g} of its amax's" for x in ratios)
  shares = (f"{100 * r[k]:.3g} %" for k in ("saturated", "flushed"))
  return name, f"{r['snr_db']:.1f}", *shares, scale or f"{r['largest_scale']:.3g}", input_scale
