"""What methods do to a model, to a layer, to matrices and to biases, in the order of the work."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from fp8jax.models.config import ModelConfig
from fp8jax.ptq import gptq
from fp8jax.ptq.layers import MomentsOf
from fp8jax.ptq.moments import Moments
from fp8jax.quantization import quantize
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.gemm import Gemm
from fp8jax.recipe.quant import WHOLE, Quant

Methods = Sequence[Any]


def to_model(model: ModelConfig, params, methods: Methods) -> tuple[ModelConfig, Any]:
  return model, params


def to_layer(
  own, moments: MomentsOf, products: Mapping[str, Gemm], methods: Methods, model: ModelConfig
) -> tuple[dict[str, dict[str, Any]], MomentsOf]:
  return own, moments


def to_matrices(
  ws: Sequence[Any], moments: Moments, quant: Quant, methods: Methods, where: str
) -> list[ScaledMatrix]:
  """The codes of matrices [N, K] that read one input, each of its own rows.

  A scale of a whole tensor is that of all of them; so is the first level of two.
  """
  if quant.tile[0] not in (1, WHOLE):  # a tile of rows would be of two matrices
    return [_codes(w_NK, moments, quant, methods, where) for w_NK in ws]
  return split(_codes(jnp.concatenate(ws), moments, quant, methods, where), [w.shape[0] for w in ws])


def split(codes: ScaledMatrix, rows: Sequence[int]) -> list[ScaledMatrix]:
  """Matrices of so many rows each; the tile has one row, or all."""
  parts, start = [], 0
  for number in rows:
    part = slice(start, start + number)
    scale = codes.scale if codes.tile[0] == WHOLE else codes.scale[part]
    parts.append(ScaledMatrix(codes.data[part], scale, codes.tile))
    start += number
  return parts


def _codes(w_NK, moments: Moments, quant: Quant, methods: Methods, where: str) -> ScaledMatrix:
  for method in methods:
    if method == "gptq":
      return gptq.quantize(w_NK, moments, quant)
  return quantize.quantize(w_NK, quant)


def to_biases(own, site: str, w_NK, codes: ScaledMatrix, moments: Moments, methods: Methods):
  return {}
