"""Whether FP8 is worth it for a linear layer of some shape: what was measured on such a device.

Quantizing costs a reading of every operand, multiplying in FP8 saves half of the arithmetic: small
layers lose. Where, only a measurement says; experiments/bench_kernels writes advice/<device>.json,
{"provenance": {...}, "layers": [{"recipe", "backend", "tokens", "inner", "outer", "bf16_ms",
"fp8_ms"}, ...]}.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from fp8jax.recipe.gemm import PASSES
from fp8jax.recipe.library import RECIPES

_FOLDER = pathlib.Path(__file__).parent / "advice"
# A measurement speaks for shapes no further away than this, in doublings over all three sizes.
_REACH = 1.5


@dataclasses.dataclass(frozen=True)
class LayerTiming:
  """A measured linear layer: quantization and all three products, forward and backward.

  Attributes:
    recipe, backend: what it was measured in, and by.
    tokens, inner, outer: sizes on one device.
    bf16_ms, fp8_ms: what it takes.
  """

  recipe: str
  backend: str
  tokens: int
  inner: int
  outer: int
  bf16_ms: float
  fp8_ms: float

  @property
  def speedup(self) -> float:
    return self.bf16_ms / self.fp8_ms

  def distance(self, tokens: int, inner: int, outer: int) -> float:
    """In doublings."""
    pairs = ((self.tokens, tokens), (self.inner, inner), (self.outer, outer))
    return math.hypot(*(math.log2(mine / theirs) for mine, theirs in pairs))


def device_name() -> str:
  """Of the device that JAX computes on, as the names of files have it."""
  return jax.devices()[0].device_kind.lower().replace(" ", "_")


def load(folder: pathlib.Path = _FOLDER) -> tuple[LayerTiming, ...]:
  """Measurements on this kind of device; empty without any."""
  path = folder / f"{device_name()}.json"
  if not path.exists():
    return ()
  return tuple(LayerTiming(**layer) for layer in json.loads(path.read_text())["layers"])


def store(
  layers: Iterable[LayerTiming], provenance: dict[str, Any], folder: pathlib.Path = _FOLDER
):
  """Replaces what is known of this kind of device."""
  folder.mkdir(exist_ok=True)
  table = {"provenance": provenance, "layers": [dataclasses.asdict(layer) for layer in layers]}
  (folder / f"{device_name()}.json").write_text(json.dumps(table, indent=1) + "\n")


def lines(sites: Sequence[dict[str, Any]], measured: Sequence[LayerTiming]) -> list[str]:
  """Advice for a run: sites that are slower by their recipe, or that nobody measured.

  Args:
    sites: report.site_rows.
    measured: `load`.
  """
  quantized = [row for row in sites if row["definition"]["fwd"]["lhs"] is not None]
  if not quantized:
    return []
  if not measured:
    return [
      f"FP8 on {device_name()}: not measured, whether it is faster than BF16 is unknown; "
      "experiments/bench_kernels/bench.py measures it"
    ]
  return [line for row in quantized if (line := _line(row, measured))]


def _line(row: dict[str, Any], measured: Sequence[LayerTiming]) -> str:
  """The line about one site; empty if its recipe makes it faster."""
  m, n, k = row["m_n_k"]
  kind, backends = _kind(row["definition"]), set(row["backends"].values())
  of_kind = [
    layer
    for layer in measured
    if {layer.backend} == backends and _kind(RECIPES[layer.recipe].to_dict()) == kind
  ]
  layer = min(of_kind, key=lambda layer: layer.distance(m, k, n), default=None)
  site, recipe = row["site"], row["recipe"]
  if layer is None or layer.distance(m, k, n) > _REACH:
    by = ", ".join(sorted(backends))
    what = "at a size like this" if layer else f"with its tiles and sources of scales by {by}"
    return (
      f"{site}: whether {recipe} is faster than BF16 is unknown: {m} tokens, {k} to {n}, not "
      f"measured {what} on {device_name()}; experiments/bench_kernels/bench.py measures"
    )
  if layer.speedup >= 1:
    return ""
  return (
    f"{site}: {recipe} is slower than BF16 at this size: {layer.speedup:.2f} x in {layer.recipe} "
    f"with {layer.tokens} tokens, {layer.inner} to {layer.outer}, on {device_name()}; more tokens "
    f"per device, or a rule ('{site}', 'bf16')"
  )


def _kind(definition: dict[str, Any]) -> list[Any]:
  """Properties besides the backend that time depends on: tiles, sources of scales, accumulation.

  Not which eight bits an element has, how scales are rounded, nor what the backward pass keeps.
  """
  gemms = [definition[p] for p in PASSES]
  return [gemm["accumulate"] for gemm in gemms] + [
    quant and (quant["tile"], quant["source"]["kind"])
    for gemm in gemms
    for quant in (gemm["lhs"], gemm["rhs"])
  ]
