"""The bytes of a served model on so many GPUs and a bound of its speed, by arithmetic.

Weights are split over N GPUs by heads, features and vocabulary (mesh.tensor); embedding, head and
norms are in the compute dtype, norms in float32. Of a decoding step with b sequences of L tokens

  bytes  the weights that products read, and b L tokens of the cache
  FLOPs  2 per weight and sequence at the peak of its product's operands, 4 H K L per layer for
         attention at that of the compute dtype

and the step takes no less than bytes / bandwidth nor than FLOPs / peak: the roofline (Williams et
al. 2009, doi:10.1145/1498765.1498785). Launches, communication and activations come on top, so that
no server is faster than the bound; how far it stays below is measured elsewhere.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp

from fp8jax import axes, mesh
from fp8jax import params as params_lib
from fp8jax.compiled import aot
from fp8jax.config import layout as layout_checks
from fp8jax.config import registry
from fp8jax.generation import cache
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.ops import site_tree
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.gemm import Gemm
from fp8jax.recipe.quant import WHOLE, Quant, Scale
from fp8jax.run import metrics

# Bytes of one scale as a folder holds it: E8M0 and E4M3 take one.
_SCALE_BYTES = {
  **dict.fromkeys((Scale.F32, Scale.GAUDI2), 4),
  **dict.fromkeys((Scale.POW2, Scale.FLOOR, Scale.EVEN, Scale.POW2_DOWN, Scale.FLOOR_4_3), 1),
  Scale.E4M3_OVER_F32: 1, Scale.ONE: 0, Scale.NONE: 0,
}  # fmt: skip
# Compute capability x 10 of the first GPUs that multiply FP8, and four bits.
_ADA, _BLACKWELL = 89, 100
# GPUs that one server spans.
_POWERS = tuple(2**n for n in range(10))


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A GPU as its data sheet has it.

  Attributes:
    name: of aot.CAPABILITY.
    memory: bytes.
    bandwidth: of the memory, bytes per second.
    peak: dense BF16 FLOP/s.
  """

  name: str
  memory: int
  bandwidth: float
  peak: float

  @classmethod
  def named(cls, name: str) -> "Gpu":
    """One of aot.CAPABILITY, from XLA's description of it."""
    text = (aot.FOLDER / f"{name}.txtpb").read_text()
    facts = dict(re.findall(r"(device_memory_size|memory_bandwidth): (\d+)", text))
    memory, bandwidth = int(facts["device_memory_size"]), float(facts["memory_bandwidth"])
    kind = re.findall(r'device_description_str: "(.*)"', text)[0]
    return cls(name, memory, bandwidth, metrics.peak_flops(kind) or 0.0)

  @property
  def capability(self) -> int:
    """Compute capability x 10."""
    return aot.CAPABILITY[self.name]

  def flops(self, gemm: Gemm) -> float:
    """Peak of a product's operands: of 8 bits twice that of BF16, of 4 twice again, where there are
    units for them; an activation that is not quantized meets a weight in BF16."""
    if not gemm.multiplies_codes or gemm.lhs is None or gemm.rhs is None:
      return self.peak
    formats = gemm.lhs.format, gemm.rhs.format
    bits = max(f.bits for f in formats)
    # With float32 sums a GeForce has half of its units' rate in 16 bits and in FP8.
    times = 2 if self.name.startswith("rtx") else 1
    if bits <= 4 and self.capability >= _BLACKWELL:
      return self.peak * 4 * times
    if bits <= 8 and all(f.dtype == jnp.int8 for f in formats):
      return self.peak * 2 * times
    return self.peak * (2 if bits <= 8 and self.capability >= _ADA else 1)


@dataclasses.dataclass(frozen=True)
class Row:
  """A served format on N GPUs; bytes are those of one GPU.

  Attributes:
    format: name of the recipe, or of the configuration's rules.
    bytes_per_parameter: of the linear layers of all layers, scales included.
    weights: all parameters, scales included.
    scales: of these the scales.
    cache_per_token, cache_per_sequence: keys and values.
    batch: sequences of that length that fit beside the weights; 0: the weights do not fit.
    alone, together: bounds of tokens per second, all sequences: of one, and of `batch`.
    limit: "bytes" or "FLOPs", whichever bounds `together`.
    fewest: GPUs, a power of two, on which weights and a sequence fit; None: none up to 512.
    problem: why these GPUs cannot share the model, or "".
  """

  format: str
  bytes_per_parameter: float
  weights: int
  scales: int
  cache_per_token: int
  cache_per_sequence: int
  batch: int
  alone: float
  together: float
  limit: str
  fewest: int | None
  problem: str = ""


@dataclasses.dataclass(frozen=True)
class Serving:
  """A model on a kind of GPU, beside the format of its weights.

  Attributes:
    length: tokens of a sequence, all of them in the cache.
    reserve: share of the memory that is left to activations, workspaces and the driver.
    itemsize: bytes of the compute dtype.
  """

  model: ModelConfig
  gpu: Gpu
  length: int
  reserve: float
  cache_format: str
  itemsize: int = 2

  def row(self, name: str, rules, num: int) -> Row:
    """The row of a format on so many GPUs; rules are (regular expression, recipe)."""
    held, problem = self._held(rules, num), uneven(self.model, rules, num)
    of_sequence = held.cache * self.length
    room = self.gpu.memory * (1 - self.reserve) - held.weights
    batch = 0 if problem else max(int(room // of_sequence), 0)

    def seconds(rows: int) -> tuple[float, float]:
      return (held.read + rows * of_sequence) / self.gpu.bandwidth, rows * held.seconds

    of_bytes, of_flops = seconds(batch)
    alone, together = (rows / max(seconds(rows)) if batch else 0.0 for rows in (1, batch))
    fewest = next((n for n in _POWERS if self._fits(rules, n)), None)
    return Row(
      name, held.linear[0] / held.linear[1], held.weights, held.scales, held.cache, of_sequence,
      batch, alone, together, "bytes" if of_bytes >= of_flops else "FLOPs", fewest, problem,
    )  # fmt: skip

  def _fits(self, rules, num: int) -> bool:
    """Whether so many GPUs hold the weights and a sequence."""
    if uneven(self.model, rules, num):
      return False
    held = self._held(rules, num)
    return held.weights + held.cache * self.length <= self.gpu.memory * (1 - self.reserve)

  def _held(self, rules, num: int) -> "_Held":
    model, layout = shared(self.model, num), _layout(num)
    sites = site_tree.find_sites(transformer.site_params(model))
    dims = {c: -(-n // layout.size(layout.act_axes(c))) for c, n in model.dims.items()}
    held = _Held(-(-cache.bytes_per_token(model, self.cache_format, self.itemsize) // num))
    for path, param in params_lib.flatten(transformer.params(model)).items():
      if path not in sites:
        count = math.prod(params_lib.shape(param, dims))
        held.weights += count * (self.itemsize if path == "embed" else 4)
        held.read += count * 4 * (path != "embed")  # of the embedding, a row per sequence
    for start, stop, chosen in rules_lib.segments(list(sites), model.num_layers, rules):
      for path, name in chosen.items():
        gemm, is_stacked = rules_lib.recipe_by_name(name).fwd, path.startswith("layers/")
        times = stop - start if is_stacked else int(start == 0)
        contracted, produced = (
          math.prod(dims[c] for c in letters) for letters in sites[path].gemm_letters
        )
        codes, scales = matrix_bytes(produced, contracted, gemm.rhs, self.itemsize)
        is_embedding = path == "head" and model.tie_embeddings and gemm.rhs is None
        held.weights += times * (codes + scales) * (not is_embedding)
        held.scales += times * scales
        held.read += times * (codes + scales)
        held.seconds += times * 2 * produced * contracted / self.gpu.flops(gemm)
        held.linear[0] += times * (codes + scales) * is_stacked
        held.linear[1] += times * produced * contracted * is_stacked
    attention = 4 * dims["H"] * model.head_dim * self.length * model.num_layers
    held.seconds += attention / self.gpu.peak
    return held


@dataclasses.dataclass
class _Held:
  """The sums of one GPU.

  Attributes:
    cache: bytes per token.
    weights, scales: bytes, the second of the first.
    read: bytes of weights that a step reads.
    seconds: of the FLOPs of one sequence in a step.
    linear: (bytes, parameters) of the linear layers of layers.
  """

  cache: int
  weights: int = 0
  scales: int = 0
  read: int = 0
  seconds: float = 0.0
  linear: list[int] = dataclasses.field(default_factory=lambda: [0, 0])


def matrix_bytes(rows: int, columns: int, quant: Quant | None, itemsize: int) -> tuple[int, int]:
  """(bytes of the codes, of the scales) of a matrix [produced, contracted] as a folder holds it.

  Codes have the format's bits, packed; a last tile may be partial.

  Args:
    quant: None for the compute dtype.
    itemsize: bytes of the compute dtype.
  """
  if quant is None:
    return rows * columns * itemsize, 0
  tiles = [1 if t == WHOLE else -(-n // t) for n, t in zip((rows, columns), quant.tile)]
  of_tensor = 4 * (quant.scale is Scale.E4M3_OVER_F32)
  codes = -(-rows * columns * quant.format.bits // 8)
  return codes, math.prod(tiles) * _SCALE_BYTES[quant.scale] + of_tensor


def shared(model: ModelConfig, num: int) -> ModelConfig:
  """The model with key heads for every GPU: where there are more GPUs, each head is copied."""
  copied = num > model.num_kv_heads and num % model.num_kv_heads == 0
  return dataclasses.replace(model, num_kv_heads=num) if copied else model


def uneven(model: ModelConfig, rules, num: int) -> str:
  """Why so many GPUs cannot share the model, heads and scale tiles being whole; "" if they can."""
  model = shared(model, num)
  texts = layout_checks.uneven(
    transformer.params(model), transformer.site_params(model), model, [rules], _layout(num), None
  )
  if model.num_heads % model.num_kv_heads:
    texts.append(f"{model.num_heads} heads do not share {model.num_kv_heads} of keys evenly")
  return texts[0] if texts else ""


def _layout(num: int) -> axes.Layout:
  if num == 1:
    return axes.LOCAL
  place = jax.sharding.AbstractMesh((1, 1, num), mesh.AXES)
  return axes.Layout(
    place, acts=axes.as_rules(registry.at(registry.base(), "sharding.acts"))
  ).served()
