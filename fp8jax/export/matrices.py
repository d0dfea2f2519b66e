"""The quantized matrices of an export beside the weights that they stand for, a row each.

Rows are made while the files are written, so that one matrix is there at a time.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fp8jax.export.fp8 import Matrix
from fp8jax.formats import E4M3
from fp8jax.models.hf.schemes import Codes
from fp8jax.quantization import tensor_stats
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.quant import Quant, Scale

Rows = dict[str, dict[str, Any]]
FILE = "fp8_matrices.json"
COLUMNS = ("matrix", "SNR, dB", "saturated", "flushed", "scale", "input scale")
# The rows that the command and the model card show.
SHOWN = 5


def row(w, made: Codes, matrix: Matrix) -> dict[str, Any]:
  """The numbers of a matrix.

  Args:
    w: float32 [in, out], the weight as the checkpoint has it.
    made: of it, see fp8.codes.

  Returns:
    snr_db of the dequantized codes (infinite without error), the share of elements that saturated
    and of nonzero elements that became zero, the extreme scales, whether the codes were kept,
    whether they are 2:4 sparse, and the ratios of the largest scale and of the input scale to those
    of the amaxes that training or a calibration saw (amax / the format's maximum), None where there
    is none: a scale of a power of two has up to 2, one with a margin m at least 2^m, one that
    shares an amax at least 1.
  """
  x, quant, inputs = np.asarray(w, np.float32).T, matrix.quant, matrix.scheme.inputs
  # Squares of float32 leave its range; a power of two changes no share and no ratio.
  _, exponent = np.frexp(np.max(np.abs(x), initial=0.0))
  factor = np.float32(2.0 ** -np.clip(exponent, -100, 100))
  grid = made.scale.reshape(-1, 1) if made.scale.ndim < 2 else made.scale
  quantized = ScaledMatrix(made.data, grid * factor, quant.tile)  # pyright: ignore (NumPy's arrays)
  s = tensor_stats.summary(jax.device_get(_statistics(x * factor, quantized, quant)))
  largest, known = float(grid.max()), matrix.known
  return {
    "scheme": matrix.scheme.label,
    "snr_db": s["snr_db"], "saturated": s["saturation"], "flushed": s["underflow"],
    "smallest_scale": float(grid.min()), "largest_scale": largest, "kept": matrix.is_trained,
    "scale_ratio": _ratio(largest, known.get("w"), quant.format.max),
    "two_of_four": _is_two_of_four(made.data), "input_scale": matrix.input_scale,
    "input_scale_ratio": inputs
    and _ratio(matrix.input_scale, known.get("x"), reach(matrix.inputs or inputs)),
  }  # fmt: skip


def _is_two_of_four(data: np.ndarray) -> bool:
  """Whether of every four codes along the inputs at most two are not 0."""
  if data.shape[1] % 4:
    return False
  used = np.asarray(data).astype(np.float32).reshape(-1, 4) != 0
  return bool(used.sum(-1).max(initial=0) <= 2)


def reach(quant: Quant) -> float:
  """The largest number under a scale of the tensor of 1."""
  return quant.format.max * (E4M3.max if quant.scale is Scale.E4M3_OVER_F32 else 1)


@functools.partial(jax.jit, static_argnums=2)
def _statistics(x, quantized: ScaledMatrix, quant: Quant):
  return tensor_stats.statistics(x, quantized, quant)


def _ratio(scale: float | None, amax: float | None, most: float) -> float | None:
  """Of a scale to that of an amax; None without one of them."""
  return scale * most / amax if scale and amax else None


def worst(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
  """Cells of COLUMNS of the matrices with the lowest SNR."""
  order = sorted(rows, key=lambda name: rows[name]["snr_db"])[:SHOWN]
  return [_cells(name, rows[name]) for name in order]


def _cells(name: str, r: Mapping[str, Any]) -> tuple[str, ...]:
  ratios = (r["scale_ratio"], r["input_scale_ratio"])
  scale, input_scale = ("" if x is None else f"{x:.3g} of its amax's" for x in ratios)
  shares = (f"{100 * r[k]:.3g} %" for k in ("saturated", "flushed"))
  return name, f"{r['snr_db']:.1f}", *shares, scale or f"{r['largest_scale']:.3g}", input_scale
