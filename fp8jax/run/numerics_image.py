"""A snapshot of the numerics as one picture, for TensorBoard: instead of a curve per number."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from fp8jax import patterns
from fp8jax.run import palette

# Statistic, and the values of the darkest and of the brightest colour: the same in all pictures, so
# that snapshots and runs compare. Between them the logarithm decides, decibels being one already.
PANELS = (
  ("snr_db", 40.0, 0.0),
  ("underflow", 1e-5, 1.0),
  ("saturation", 1e-5, 1.0),
  ("amax", 1e-8, 1e3),
  ("kurtosis", 1.0, 1e6),
)
_CELL_W, _ROW_H, _LABEL_W, _GAP = 9, 12, 90, 12
_RAMP = np.array([ImageColor.getrgb(c) for c in palette.RAMP], np.float64)
_MISSING = np.array(ImageColor.getrgb(palette.MISSING), np.uint8)


def draw(numerics: Mapping[str, Any]) -> np.ndarray:
  """uint8 [height, width, 3]: a panel per statistic, a row per site and tensor, a column per layer.

  Args:
    numerics: {layer's site: {tensor: {statistic: value}}}, see alarms.summarise.
  """
  cells = {}
  for name, tensors in numerics.items():
    layer, site = patterns.of_layer(name)
    for tensor, summary in tensors.items():
      cells.setdefault((layer is None, site, tensor), {})[layer or 0] = summary
  labels = sorted(cells, key=lambda key: (key[0], key[1], "xwg".find(key[2])))
  layers = 1 + max(layer for by_layer in cells.values() for layer in by_layer)
  panel = max(layers * _CELL_W, 130) + _GAP  # room for the titles
  size = (_LABEL_W + len(PANELS) * panel, (len(labels) + 1) * _ROW_H)
  image = Image.new("RGB", size, "white")
  pen = ImageDraw.Draw(image)
  for k, (statistic, dark, bright) in enumerate(PANELS):
    left = _LABEL_W + k * panel
    pen.text((left, 0), f"{statistic} {dark:g} to {bright:g}", fill="black")
    for i, key in enumerate(labels, 1):
      for layer, summary in cells[key].items():
        x, y = left + layer * _CELL_W, i * _ROW_H
        fill = color(summary.get(statistic, math.nan), dark, bright)
        pen.rectangle((x, y, x + _CELL_W - 2, y + _ROW_H - 2), tuple(fill))
  for i, (_, site, tensor) in enumerate(labels, 1):
    pen.text((2, i * _ROW_H), f"{site} {tensor}", fill="black")
  return np.asarray(image)


def color(value: float, dark: float, bright: float) -> np.ndarray:
  """uint8 [3]: a place on the ramp from `dark` to `bright`; grey where there is no number."""
  if not math.isfinite(value):
    return _MISSING
  if dark > 0 and bright > 0:
    value, dark, bright = (math.log(max(v, 1e-45)) for v in (value, dark, bright))
  place = min(max((value - dark) / (bright - dark), 0.0), 1.0) * (len(_RAMP) - 1)
  return (
    np.array([np.interp(place, range(len(_RAMP)), c) for c in _RAMP.T]).round().astype(np.uint8)
  )
