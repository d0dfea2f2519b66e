"""Operands as matrices: from letters to [rows, contraction], quantized, gathered.

Called inside `shard_map` or on a single device: every size here is a device's own.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.quantize import mosaic_sm90
from fp8jax.ops import collectives
from fp8jax.ops.stored_params import QuantizedWeight
from fp8jax.quantization import block_codes, quantize, scaled_matrix
from fp8jax.quantization.block_codes import BlockCodes
from fp8jax.recipe.quant import CURRENT, WHOLE, Quant


@dataclasses.dataclass(frozen=True)
class EinsumLetters:
  """The three operands of an einsum, by letter."""

  x: str
  w: str
  y: str

  @property
  def contracted(self) -> str:
    return "".join(c for c in self.x if c in self.w and c not in self.y)

  @property
  def batch(self) -> str:
    return "".join(c for c in self.x if c in self.w and c in self.y)

  @property
  def produced(self) -> str:
    """Letters of w that the product keeps."""
    return "".join(c for c in self.y if c in self.w and c not in self.x)

  @property
  def tokens(self) -> str:
    """Letters that w does not have."""
    return "".join(c for c in self.x if c in self.y and c not in self.w)


@dataclasses.dataclass(frozen=True)
class Operand:
  """One operand as [batch..., rows, contraction] ready to multiply.

  Attributes:
    value: a ScaledMatrix or an array [rows, contraction], with a leading batch axis if `batch`.
    free: letters of the rows, in order.
    sizes: letter -> local size.
    amax: float32 scalar of the tensor, if it was wanted and the quantizer found it.
  """

  value: Any
  free: str
  batch: str
  sizes: dict[str, int]
  amax: Any = None


@dataclasses.dataclass(frozen=True)
class Quantizer:
  """Quantizes one operand: its Quant, and what that needs beside the tensor.

  Attributes:
    quant: None for the compute dtype.
    amax: float32 scalar for scales that are not current.
    key: random key of stochastic rounding.
    backend: of the GEMM; a GEMM kernel has a quantizer kernel for its operands.
    wants_amax: whether to find the tensor's amax too, if that costs no second reading.
  """

  quant: Quant | None
  amax: Any = None
  key: Any = None
  backend: str = "xla"
  wants_amax: bool = False

  @jax.named_scope("quantize")
  def __call__(self, matrix, contraction: int, dtype, amax_axes):
    """([batch?, rows, contraction], quantized or else in `dtype`; amax or None)."""
    quant = self.quant
    if quant is None:
      matrix = matrix.astype(dtype)
      return jnp.swapaxes(matrix, -1, -2) if contraction == 0 else matrix, None
    if self.has_kernel(matrix, contraction):
      over = tuple(dict.fromkeys(a for axes in amax_axes for a in axes))
      quants = {contraction: quant}
      made, amax = mosaic_sm90.quantize_matrix(matrix, quants, self.amax, over, self.wants_amax)
      return made[contraction], amax
    make = functools.partial(
      quantize.quantize,
      quant=quant,
      contraction=contraction,
      amax_axes=amax_axes,
      amax=None if quant.source == CURRENT else self.amax,
    )
    if matrix.ndim == 2:
      return make(matrix, key=self.key), None
    if self.key is None:
      return jax.vmap(make)(matrix), None
    keys = jax.random.split(self.key, matrix.shape[0])
    return jax.vmap(lambda x, key: make(x, key=key))(matrix, keys), None

  def has_kernel(self, matrix, contraction: int) -> bool:
    """Whether the backend's quantizer makes this operand."""
    if self.quant is None:
      return False
    return choose.quantizer(matrix, self.quant, contraction, self.backend).backend == "mosaic_sm90"


def flatten(x, letters: str, contracted: str, batch: str):
  """(matrix [batch?, ...], axis of its contraction 0 or 1, free letters); copies if it must."""
  free = "".join(c for c in letters if c not in contracted and c not in batch)
  contraction_first = batch + contracted + free
  contraction = 0 if letters == contraction_first else 1
  wanted = contraction_first if contraction == 0 else batch + free + contracted
  if letters != wanted:
    x = jnp.transpose(x, [letters.index(c) for c in wanted])
  sizes = dict(zip(wanted, x.shape))
  rows = math.prod(sizes[c] for c in free)
  depth = math.prod(sizes[c] for c in contracted)
  groups = (math.prod(sizes[c] for c in batch),) if batch else ()
  return (
    x.reshape(*groups, *((depth, rows) if contraction == 0 else (rows, depth))),
    contraction,
    free,
  )


def unflatten(product, a: Operand, b: Operand, out: str):
  """[batch?, M, N] -> the letters of `out`."""
  have = a.batch + a.free + b.free
  sizes = {**a.sizes, **b.sizes}
  product = product.reshape([sizes[c] for c in have])
  return jnp.transpose(product, [have.index(c) for c in out]) if have != out else product


def activation(
  x, letters: str, contracted: str, batch: str, quantizer: Quantizer, dtype, layout
) -> Operand:
  """An activation or gradient, or a weight as its GEMM needs it."""
  sizes = dict(zip(letters, x.shape))
  matrix, contraction, free = flatten(x, letters, contracted, batch)
  amax_axes = (layout.act_axes_of(free), layout.act_axes_of(contracted))
  value, amax = quantizer(matrix, contraction, dtype, amax_axes)
  return Operand(value, free, batch, sizes, amax)


def weight(
  w, letters: str, contracted: str, batch: str, quantizer: Quantizer, dtype, layout: axes.Layout
) -> Operand:
  """A weight as its GEMM takes it: quantized, then gathered; if tiles straddle, gathered first."""
  if isinstance(w, QuantizedWeight):
    free = "".join(c for c in letters if c not in contracted and c not in batch)
    return Operand(w.matrix, free, batch, dict(zip(letters, w.shape)))
  if isinstance(w, BlockCodes):
    if quantizer.quant is not None:
      return _codes(w, letters, contracted, quantizer, layout)
    w = w.unpack()
  extra = {c: collectives.extra_axes(layout, c) for c in letters}
  if not any(extra.values()):
    return activation(w, letters, contracted, batch, quantizer, dtype, layout)

  matrix, contraction, free = flatten(w, letters, contracted, batch)
  sizes = dict(zip(letters, w.shape))
  quant = quantizer.quant
  if quant is None or batch or not collectives.tiles_fit(sizes, free, contracted, quant, layout):
    # Without a Quant the compute dtype travels, else the master: straddling tiles need all of it.
    w = collectives.gather_weight(w.astype(dtype) if quant is None else w, letters, layout)
    return activation(w, letters, contracted, batch, quantizer, dtype, layout)

  groups = (free, contracted)
  amax_axes = tuple(tuple(a for c in group for a in layout.weight_axes(c)) for group in groups)
  made: tuple[Any, Any] = quantizer(matrix, contraction, dtype, amax_axes)
  value, amax = made
  full = {c: n * layout.size(extra[c]) for c, n in sizes.items()}
  return Operand(_gathered(value, groups, extra, quantizer.backend), free, batch, full, amax)


def _gathered(value: scaled_matrix.ScaledMatrix, groups, extra, backend: str):
  """A quantized shard of a weight as the whole.

  Args:
    groups: letters of its rows and of its contraction.
    extra: letter -> mesh axes to gather over.
  """
  for axis, group in enumerate(groups):
    if extra[group[0]]:
      in_shards = axis == 1 and backend in gemm_api.WITH_SHARDS
      value = collectives.gather_scaled(value, extra[group[0]], axis, in_shards)
  return value


def _codes(w: BlockCodes, letters: str, contracted: str, quantizer: Quantizer, layout) -> Operand:
  """A weight that is quantized already, its shards gathered.

  Raises:
    ValueError: the recipe quantizes weights otherwise, or devices share a tile.
  """
  if not block_codes.is_compatible(quantizer.quant):
    raise ValueError(
      f"a weight in codes of {block_codes.QUANT} cannot be multiplied as {quantizer.quant}; give "
      "its site a block recipe or 'bf16', or keep the base in BF16: model.lora.base='bf16'"
    )
  free = "".join(c for c in letters if c not in contracted)
  sizes, extra = (
    dict(zip(letters, w.shape)),
    {c: collectives.extra_axes(layout, c) for c in letters},
  )
  if not collectives.tiles_fit(sizes, free, contracted, block_codes.QUANT, layout):
    raise ValueError(
      f"a shard {w.shape} of a weight in codes holds no whole tiles of {block_codes.TILE}; take a "
      "smaller mesh.fsdp, or model.lora.base='bf16'"
    )
  value = w.matrix().T if letters.startswith(contracted) else w.matrix()
  value = _gathered(value, (free, contracted), extra, quantizer.backend)
  return Operand(value, free, "", {c: n * layout.size(extra[c]) for c, n in sizes.items()})


def specs(free: str, contracted: str, batch: str, quant: Quant, layout: axes.Layout):
  """PartitionSpecs of a ScaledMatrix [batch?, rows, contraction] at `shard_map`'s border."""
  lead = (layout.act_axes_of(batch) or None,) if batch else ()
  axes_ = [layout.act_axes_of(free) or None, layout.act_axes_of(contracted) or None]
  spec = jax.sharding.PartitionSpec
  scales = [None if tile == WHOLE else a for a, tile in zip(axes_, quant.tile)]
  return scaled_matrix.ScaledMatrix(spec(*lead, *axes_), spec(*lead, *scales), quant.tile)  # pyright: ignore
