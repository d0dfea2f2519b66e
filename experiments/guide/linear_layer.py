"""Draws linear_layer.svg: the tensors of one linear layer under block_128, with their formats.

command: python experiments/guide/linear_layer.py [--png FILE]

Formats, tiles, scales and accumulation are read from the recipe.
"""

import argparse
import pathlib

from fp8jax.recipe.gemm import Accumulation, Gemm
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.quant import WHOLE, Quant

PATH = pathlib.Path(__file__).resolve().parent / "linear_layer.svg"
RECIPE = RECIPES["block_128"]
# Product, formula, operands with the dtype that they are quantized from, result.
PRODUCTS = (
  ("forward", "y = x w\nK: inputs", ("x", "BF16"), ("w", "FP32 master"), "y\nBF16"),
  ("dgrad", "dx = g w'\nK: outputs", ("g", "BF16"), ("w", "FP32 master"), "dx\nBF16"),
  ("wgrad", "dw = x' g\nK: tokens", ("x", "BF16, saved"), ("g", "BF16"), "dw\nFP32"),
)


def operand(quant: Quant) -> str:
  """What the picture says of a quantized operand."""
  rows, contraction = ("all" if t == WHOLE else t for t in quant.tile)
  return f"{quant.format.name.upper()}, one {quant.scale.name} scale per {rows}×{contraction}"


def accumulation(gemm: Gemm) -> str:
  """What the picture says of a product's sums."""
  if isinstance(gemm.accumulate, Accumulation):
    return f"{gemm.accumulate.value} accumulation"
  return f"sums to FP32\nevery {gemm.accumulate} of K"


def labels() -> list[str]:
  """Everything that the picture takes from the recipe."""
  found = []
  for gemm in (RECIPE.fwd, RECIPE.dgrad, RECIPE.wgrad):
    found += [operand(gemm.lhs), operand(gemm.rhs), *accumulation(gemm).splitlines()]
  return found


def draw():
  """The figure."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot
  from matplotlib.patches import FancyBboxPatch

  matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "linear_layer", "font.size": 10}
  )
  figure, axes = pyplot.subplots(figsize=(11, 6.6))
  axes.set(xlim=(0, 110), ylim=(0, 66))
  axes.axis("off")

  def box(x, y, width, height, text, color):
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.3", fc=color, ec="#444444")
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", linespacing=1.4)

  def arrow(start, end, text=""):
    axes.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color="#444444"))
    if text:
      middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.9)
      axes.text(*middle, text, ha="center", va="bottom", fontsize=9)

  gemms = (RECIPE.fwd, RECIPE.dgrad, RECIPE.wgrad)
  for i, ((name, formula, first, second, result), gemm) in enumerate(zip(PRODUCTS, gemms)):
    base = 45 - 22 * i
    axes.text(0, base + 8.5, f"{name}\n{formula}", va="center", weight="bold", linespacing=1.5)
    for (letter, dtype), quant, y in ((first, gemm.lhs, base + 10), (second, gemm.rhs, base)):
      box(14, y, 14, 6, f"{letter}\n{dtype}", "#ffffff")
      arrow((28.6, y + 3), (34.4, y + 3))
      box(35, y, 9, 6, "quantize", "#fdebc8")
      arrow((44.6, y + 3), (74.6, y + 3), operand(quant))
    box(75, base, 16, 16, f"FP8 GEMM\n\n{accumulation(gemm)}", "#cfe3f5")
    arrow((91.6, base + 8), (98.4, base + 8))
    box(99, base + 5, 10, 6, result, "#ffffff")
  figure.tight_layout(pad=0.3)
  return figure


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--png", help="write this picture instead, to look at")
  path = parser.parse_args().png
  figure = draw()
  if path:
    figure.savefig(path, dpi=90)
  else:
    figure.savefig(PATH, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
  main()
