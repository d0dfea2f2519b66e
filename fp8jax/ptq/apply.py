"""What methods do to a model, to a layer, to matrices and to biases, in the order of the work."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fp8jax.models.config import ModelConfig
from fp8jax.ptq import gptq
from fp8jax.ptq.layers import MomentsOf
from fp8jax.ptq.moments import Moments
from fp8jax.quantization import quantize
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.gemm import Gemm
from fp8jax.recipe.quant import WHOLE, Quant, Scale

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
  rows, tile = [w.shape[0] for w in ws], quant.tile[0]
  if tile != WHOLE and any(number % tile for number in rows):  # one would be of two matrices
    return [_codes(w_NK, moments, quant, methods, where) for w_NK in ws]
  codes, ends = _codes(jnp.concatenate(ws), moments, quant, methods, where), np.cumsum(rows)[:-1]
  datas = jnp.split(codes.data, ends)
  scales = [codes.scale] * len(ws) if tile == WHOLE else jnp.split(codes.scale, ends // tile)
  return [ScaledMatrix(*of, codes.tile) for of in zip(datas, scales, strict=True)]


def tensor_scale(ws: Sequence[Any], quant: Quant) -> float | None:
  """The factor that all scales of two levels of these matrices have; None of one level."""
  if quant.scale is not Scale.E4M3_OVER_F32:
    return None
  amax = jnp.max(jnp.stack([jnp.max(jnp.abs(w)) for w in ws]))
  return float(quantize.tensor_scale(amax, quant))


def _codes(w_NK, moments: Moments, quant: Quant, methods: Methods, where: str) -> ScaledMatrix:
  for method in methods:
    if method == "gptq":
      return gptq.quantize(w_NK, moments, quant)
  return quantize.quantize(w_NK, quant)


def to_biases(own, site: str, w_NK, codes: ScaledMatrix, moments: Moments, methods: Methods):
  return {}
