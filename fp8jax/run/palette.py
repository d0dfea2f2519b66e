"""Colours, the same in every picture: of recipes, of tensors, of statistics."""

import hashlib
from collections.abc import Iterable

# Okabe and Ito's colours, which people with any colour vision tell apart ("Color Universal Design",
# 2008), then further hues. A recipe keeps its colour in all pictures.
RECIPES = {
  "bf16": "#000000", "block_128": "#0072B2", "block_128_pow2": "#009E73",
  "block_128_hybrid": "#56B4E9", "tensor_current": "#D55E00", "tensor_delayed": "#E69F00",
  "tensor_delayed_latest": "#B8860B", "e4m3_static": "#8C564B", "fp8lm": "#CC79A7",
  "rowwise": "#7F3C8D", "rowwise_gw_hp": "#B497E7", "mxfp8": "#11A579", "nvfp4": "#E73F74",
  "nvfp4_sr_rht": "#A5214E", "tensor_current_e5m2": "#F6A171",
}  # fmt: skip
# For arms that are no recipe of the table.
_FURTHER = (
  "#3969AC", "#80BA5A", "#F2B701", "#008695", "#CF1C90", "#f97b72", "#4b4b8f", "#A5AA99",
  "#6b3e26", "#00c2d1", "#b5179e", "#7a9e00", "#ff9da7", "#1b4332", "#9467bd", "#c49c94",
)  # fmt: skip
TENSORS = {"x": "#0072B2", "w": "#009E73", "g": "#D55E00"}
MISSING = "#d9d9d9"

# From harmless to alarming: viridis (van der Walt and Smith 2015) at nine places. In every heat map
# bright is what to look at.
RAMP = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30",
        "#fde725")  # fmt: skip

# Of signed numbers: from negative over nothing, dark, to positive; both ends are bright.
SIGNED = ("#9ad7ff", "#1f1233", "#ffb347")


def of_arms(names: Iterable[str]) -> dict[str, str]:
  """{arm: colour}: a recipe's own, and for other arms one by the arm's name.

  An arm keeps its colour in all pictures, unless another arm of a picture has the same one: then
  it takes the next that is free.
  """
  names = sorted(set(names))
  colors = {name: RECIPES[name] for name in names if name in RECIPES}
  for name in names:
    if name not in colors:
      first = hashlib.sha256(name.encode()).digest()[0] % len(_FURTHER)
      turns = (*_FURTHER[first:], *_FURTHER[:first])
      colors[name] = next((c for c in turns if c not in colors.values()), turns[0])
  return colors
