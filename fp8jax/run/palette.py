"""Colours, the same in every picture: of recipes, of tensors, of statistics."""

import colorsys
import hashlib
from collections.abc import Iterable

# Okabe and Ito's colours, which people with any colour vision tell apart ("Color Universal Design",
# 2008), then further hues. A recipe keeps its colour in all pictures.
RECIPES = {
  "bf16": "#000000", "block_128": "#0072B2", "block_128_pow2": "#009E73",
  "block_128_hybrid": "#56B4E9", "tensor_current": "#D55E00", "tensor_delayed": "#E69F00",
  "tensor_delayed_latest": "#B8860B", "e4m3_static": "#8C564B", "fp8lm": "#CC79A7",
  "rowwise": "#7F3C8D", "rowwise_gw_hp": "#B497E7", "mxfp8": "#11A579", "nvfp4": "#E73F74",
  "nvfp4_sr_rht": "#A5214E",
}  # fmt: skip
TENSORS = {"x": "#0072B2", "w": "#009E73", "g": "#D55E00"}
MISSING = "#d9d9d9"

# From harmless to alarming: viridis (van der Walt and Smith 2015) at nine places. In every heat map
# bright is what to look at.
RAMP = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30",
        "#fde725")  # fmt: skip

# Of signed numbers: from negative over nothing, dark, to positive; both ends are bright.
SIGNED = ("#9ad7ff", "#1f1233", "#ffb347")


def of_arms(names: Iterable[str]) -> dict[str, str]:
  """{arm: colour}: a recipe's own, and for other arms one that depends on the arm's name alone."""
  return {name: RECIPES.get(name) or _of_name(name) for name in sorted(set(names))}


def _of_name(name: str) -> str:
  """A hue and a lightness by the name, so that an arm has its colour in every picture."""
  digest = hashlib.sha256(name.encode()).digest()
  parts = colorsys.hls_to_rgb(digest[0] / 256, 0.35 + 0.25 * digest[1] / 256, 0.7)
  return "#" + "".join(f"{round(255 * p):02x}" for p in parts)
