"""Whether FP8 is worth it for a linear layer of some shape: what was measured on such a device.

Quantizing costs a reading of every operand, multiplying in FP8 saves half of the arithmetic: small
layers lose. Where, only a measurement says; experiments/bench_kernels writes advice/<device>.json,
{"provenance": {...}, "layers": [{"recipe", "tokens", "inner", "outer", "bf16_ms", "fp8_ms"}, ...]}.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax

_FOLDER = pathlib.Path(__file__).parent / "advice"
# A measurement speaks for shapes no further away than this, in doublings over all three sizes.
_REACH = 1.5


@dataclasses.dataclass(frozen=True)
class Layer:
  """A measured linear layer: quantization and all three products, forward and backward.

  Attributes:
    recipe: what it was measured in.
    tokens, inner, outer: sizes on one device.
    bf16_ms, fp8_ms: what it takes.
  """

  recipe: str
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


def load(folder: pathlib.Path = _FOLDER) -> tuple[Layer, ...]:
  """What was measured on this kind of device; nothing if nothing was."""
  path = folder / f"{device_name()}.json"
  if not path.exists():
    return ()
  return tuple(Layer(**layer) for layer in json.loads(path.read_text())["layers"])


def store(layers: Iterable[Layer], provenance: dict[str, Any], folder: pathlib.Path = _FOLDER):
  """Replaces what is known of this kind of device."""
  folder.mkdir(exist_ok=True)
  table = {"provenance": provenance, "layers": [dataclasses.asdict(layer) for layer in layers]}
  (folder / f"{device_name()}.json").write_text(json.dumps(table, indent=1) + "\n")


def lines(sites: Sequence[dict[str, Any]], measured: Sequence[Layer]) -> list[str]:
  """What a run should be told: sites that lose by their recipe, or that nobody knows.

  Args:
    sites: report.site_rows.
    measured: `load`.
  """
  narrow = [row for row in sites if row["definition"]["fwd"]["lhs"] is not None]
  if not narrow:
    return []
  if not measured:
    return [
      f"FP8 on {device_name()}: not measured, whether it is faster than BF16 is unknown; "
      "experiments/bench_kernels/bench.py measures it"
    ]
  found = []
  for row in narrow:
    m, n, k = row["m_n_k"]
    layer = min(measured, key=lambda layer: layer.distance(m, k, n))
    if layer.distance(m, k, n) <= _REACH and layer.speedup < 1:
      found.append(
        f"{row['site']}: {row['recipe']} is slower than BF16 at this size: {layer.speedup:.2f} x "
        f"in {layer.recipe} with {layer.tokens} tokens, {layer.inner} to {layer.outer}, on "
        f"{device_name()}; more tokens per device, or a rule ('{row['site']}', 'bf16')"
      )
  return found
