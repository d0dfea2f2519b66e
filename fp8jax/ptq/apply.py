"""Methods applied: to a model, to a layer, to matrices and to biases, in the order of the work."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.errors import UserError
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.models.mixer import Mixer
from fp8jax.ptq import awq, bias, fold, gptq, learned_rounding, methods, rotate, smooth
from fp8jax.ptq.layers import MomentsOf, matrix
from fp8jax.ptq.moments import Moments
from fp8jax.quantization import quantize
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.gemm import Gemm
from fp8jax.recipe.quant import CURRENT, WHOLE, Quant, Scale

Methods = Sequence[methods.Method]
# {mixer: {name: float32}} of one layer.
OfLayer = dict[str, dict[str, Any]]


_READERS = (*methods.CHANNELS, methods.Gptq, methods.LearnedRounding, methods.BiasCorrection)


def reads_text(chosen: Methods, products: Iterable[Gemm]) -> bool:
  """Whether a calibration decides on anything: codes, or static scales of inputs."""
  is_static = any(gemm.lhs is not None and is_static_input(gemm.lhs) for gemm in products)
  return is_static or any(isinstance(method, _READERS) for method in chosen)


def is_static_input(quant: Quant) -> bool:
  """Whether a folder has a scale of the activations: a static one, or that of two levels."""
  return quant.source != CURRENT or quant.scale is Scale.E4M3_OVER_F32


def to_model(model: ModelConfig, params, chosen: Methods) -> tuple[ModelConfig, Any]:
  """The model after its folds, and its parameters, float32."""
  for method in chosen:
    if isinstance(method, methods.Rotate):
      params, model = rotate.rotated(params, model, method.r1, method.r2, method.seed)
    elif isinstance(method, methods.Equalize):
      layers = {m.key: fold.equalized(params["layers"][m.key], m, model)
                for m in transformer.mixers(model)}  # fmt: skip
      params = {**params, "layers": {**params["layers"], **layers}}
  return model, params


def to_layer(
  own: OfLayer, moments: MomentsOf, products: Mapping[str, Gemm], chosen: Methods,
  model: ModelConfig,
) -> tuple[OfLayer, MomentsOf]:  # fmt: skip
  """A layer with scales of channels folded, and the moments of its inputs then, by the forward
  products {"mlp/up": its Gemm}."""
  own, moments = {key: dict(of) for key, of in own.items()}, dict(moments)
  for method in chosen:
    if not isinstance(method, methods.CHANNELS):
      continue
    for mixer in transformer.mixers(model):
      key, of_inputs = mixer.key, dict(moments[mixer.key])
      for name in mixer.makers:
        scale_K = _scales(method, own[key], mixer, name, of_inputs[name], products, model)
        if scale_K is not None:
          own[key] = fold.scaled(own[key], mixer, name, scale_K, model)
          factor_K = 1 / fold.pooled(scale_K, mixer, name, model)
          of_inputs[name] = of_inputs[name].scaled(jnp.asarray(factor_K, jnp.float32))
      moments[key] = of_inputs
  return own, moments


def _scales(
  method: methods.SmoothQuant | methods.Awq, p, mixer: Mixer, name: str, moments: Moments,
  products: Mapping[str, Gemm], model: ModelConfig,
):  # fmt: skip
  """[K] that a method divides an input by; None where it leaves it."""
  sites = [s.name for s in fold.readers(mixer, name) if products[f"{mixer.key}/{s.name}"].rhs]
  if isinstance(method, methods.SmoothQuant):
    # The paper smooths what norms give, whose scales cost nothing (§4).
    is_quantized = any(products[f"{mixer.key}/{site}"].lhs for site in sites)
    if not is_quantized or not mixer.makers[name].is_gain:
      return None
    amax_K = fold.pooled(moments.amax_K, mixer, name, model)
    return smooth.scales(amax_K, fold.reader_amax(p, mixer, name, model), method.alpha)
  if not sites:
    return None
  declared, mean_K = mixer.params(model), moments.abs_sum_K / moments.count
  ws = tuple(matrix(jnp.asarray(p[site]), declared[site].inputs or 0) for site in sites)
  quants = tuple(current(products[f"{mixer.key}/{site}"].rhs) for site in sites)
  mean_K = jnp.asarray(fold.pooled(mean_K, mixer, name, model), jnp.float32)
  return awq.search(ws, moments, quants, method.grid, mean_K).scale_K


def current(quant: Quant | None) -> Quant:
  """How a weight is quantized whose scale may come from training: from itself."""
  return dataclasses.replace(cast(Quant, quant), source=CURRENT)


def to_matrices(
  ws: Sequence[Any], moments: Moments, quant: Quant, chosen: Methods, where: str
) -> list[tuple[ScaledMatrix, float | None]]:
  """Of matrices [N, K] that read one input: the codes of each, and the factor that all its scales
  have, None of scales of one level.

  A scale of a whole tensor is that of all of them; so is the first level of two.

  Raises:
    UserError: the moments have no Cholesky factor; names the sites.
  """
  rows, tile = [w.shape[0] for w in ws], quant.tile[0]
  try:
    if tile != WHOLE and any(number % tile for number in rows):  # one would be of two matrices
      return [_codes(w_NK, moments, quant, chosen) for w_NK in ws]
    codes, factor = _codes(jnp.concatenate(ws), moments, quant, chosen)
  except UserError as e:
    raise UserError(f"{where}: {e}") from e
  ends = np.cumsum(rows)[:-1]
  datas = jnp.split(codes.data, ends)
  scales = [codes.scale] * len(ws) if tile == WHOLE else jnp.split(codes.scale, ends // tile)
  return [(ScaledMatrix(*of, codes.tile), factor) for of in zip(datas, scales, strict=True)]


def _codes(
  w_NK, moments: Moments, quant: Quant, chosen: Methods
) -> tuple[ScaledMatrix, float | None]:
  for method in chosen:
    if isinstance(method, methods.Awq) and method.clip:
      w_NK = awq.clipped(w_NK, moments, quant, method.grid)
  factor = None
  if quant.scale is Scale.E4M3_OVER_F32:  # of what is rounded, not of what was clipped
    factor = float(quantize.tensor_scale(jnp.max(jnp.abs(w_NK)), quant))
  return _rounded(w_NK, moments, quant, chosen), factor


def _rounded(w_NK, moments: Moments, quant: Quant, chosen: Methods) -> ScaledMatrix:
  for method in chosen:
    if isinstance(method, methods.Gptq):
      return gptq.quantize(w_NK, moments, quant, method.damp, method.block, method.order)
    if isinstance(method, methods.LearnedRounding):
      return learned_rounding.learn(w_NK, moments, quant, method.steps)[0]
  return _nearest(w_NK, quant)


@functools.partial(jax.jit, static_argnames="quant")
def _nearest(w_NK, quant: Quant) -> ScaledMatrix:
  return quantize.quantize(w_NK, quant)


def to_biases(
  own: Mapping[str, Any], site: str, w_NK, codes: ScaledMatrix, moments: Moments, chosen: Methods
) -> dict[str, Any]:
  """{name: the corrected bias} of a site; {} without one."""
  name, is_wanted = f"{site}_bias", any(isinstance(m, methods.BiasCorrection) for m in chosen)
  if not is_wanted or name not in own:
    return {}
  before = jnp.asarray(own[name])
  after_N = bias.corrected(before.reshape(-1), w_NK, codes.dequantize(), moments, name)
  return {name: after_N.reshape(before.shape)}
