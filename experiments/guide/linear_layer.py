"""Draws linear_layer.svg: the tensors of one linear layer under block_128, with their formats.

command: python experiments/guide/linear_layer.py [--png FILE]

Formats, tiles, scales and accumulation are read from the recipe.
"""

import argparse
import pathlib

import altair as alt
import vl_convert

from fp8jax.recipe.gemm import Accumulation, Gemm
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.quant import WHOLE, Quant
from fp8jax.report import charts, page

PATH = pathlib.Path(__file__).resolve().parent / "linear_layer.svg"
RECIPE = RECIPES["block_128"]
# Width and height in units, pixels of a unit, units from one line of text to the next.
SIZE, UNIT, LEADING, INK = (110, 66), 9.5, 2.0, "#444444"
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


def draw() -> alt.LayerChart:
  """The picture: boxes, arrows and lines of text in units of UNIT pixels, from the lower left."""
  boxes, arrows, texts = [], [], []

  def write(x, y, text, align="center", size=13, weight="normal"):
    lines = text.split("\n")
    for i, line in enumerate(lines):
      at = y + LEADING * ((len(lines) - 1) / 2 - i)
      texts.append(dict(x=x, y=at, text=line, align=align, size=size, weight=weight))

  def box(x, y, width, height, text, color):
    boxes.append(dict(x=x, y=y, x2=x + width, y2=y + height, color=color))
    write(x + width / 2, y + height / 2, text)

  def arrow(x, x2, y, text=""):
    arrows.append(dict(x=x, x2=x2, y=y))
    write((x + x2) / 2, y + 1.6, text, size=12)

  gemms = (RECIPE.fwd, RECIPE.dgrad, RECIPE.wgrad)
  for i, ((name, formula, first, second, result), gemm) in enumerate(zip(PRODUCTS, gemms)):
    base = 45 - 22 * i
    write(0, base + 8.5, f"{name}\n{formula}", align="left", weight="bold")
    for (letter, dtype), quant, y in ((first, gemm.lhs, base + 10), (second, gemm.rhs, base)):
      box(14, y, 14, 6, f"{letter}\n{dtype}", "#ffffff")
      arrow(28.3, 34.7, y + 3)
      box(35, y, 9, 6, "quantize", "#fdebc8")
      arrow(44.3, 74.7, y + 3, operand(quant))
    box(75, base, 16, 16, f"FP8 GEMM\n\n{accumulation(gemm)}", "#cfe3f5")
    arrow(91.3, 98.7, base + 8)
    box(99, base + 5, 10, 6, result, "#ffffff")
  return layers(boxes, arrows, texts)


def layers(boxes: list[dict], arrows: list[dict], texts: list[dict]) -> alt.LayerChart:
  """A chart of rectangles, of lines with a head at x2, and of lines of text."""

  def chart(rows):
    width, height = SIZE
    return alt.Chart(alt.Data(values=rows)).encode(
      x=alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, width], nice=False)),
      y=alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[0, height], nice=False)),
    )

  of_row = {"align": "align", "fontSize": "size", "fontWeight": "weight"}
  text = {name: alt.ExprRef(f"datum.{field}") for name, field in of_row.items()}
  head = dict(shape="triangle-right", filled=True, opacity=1, size=60, xOffset=-4)
  return (
    alt.layer(
      chart(boxes)
      .mark_rect(stroke=INK, strokeWidth=1.3, cornerRadius=3)
      .encode(x2="x2:Q", y2="y2:Q", fill=alt.Fill("color:N", scale=None)),
      chart(arrows).mark_rule(color=INK, strokeWidth=1.3).encode(x2="x2:Q"),
      chart(arrows).mark_point(color=INK, **head).encode(x=alt.X("x2:Q", axis=None)),
      chart(texts).mark_text(baseline="middle", **text).encode(text="text:N"),
    )
    .properties(width=UNIT * SIZE[0], height=UNIT * SIZE[1])
    .configure_view(stroke=None)
  )


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--png", help="write this picture instead, to look at")
  path = parser.parse_args().png
  spec = charts.spec(draw())
  if path:
    page.write(path, vl_convert.vegalite_to_png(spec))
  else:
    page.write(str(PATH), vl_convert.vegalite_to_svg(spec))


if __name__ == "__main__":
  main()
