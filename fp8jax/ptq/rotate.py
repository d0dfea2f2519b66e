"""Rotations folded into weights: R1 of the residual stream, R2 of the values of every head.

Source: SpinQuant (arXiv:2405.16406 §3.1) and QuaRot (arXiv:2404.00456 §4), here with random
Hadamard matrices, not learned ones. An orthogonal R of the stream passes RMSNorm once the gain is
1: gains go into the weights that read the norm, and all that writes into the stream writes it
rotated. Attention mixes tokens and no channels of a head, so that v R2 meets R2^T o. Biases of v
rotate with it; those of q and k, and norms of queries and keys, stand where nothing is rotated.
R3 and R4 rotate activations while the model runs, which needs a server that does so: not here.

On the host, in float64. A tied embedding becomes two matrices, whose gains differ.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from fp8jax.errors import UserError
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.ptq import fold
from fp8jax.quantization import hadamard
from fp8jax.recipe.quant import HADAMARD_ORDERS


def problems(cfg: ModelConfig) -> list[str]:
  """Reasons why this model cannot be rotated, in words; empty without any."""
  texts = []
  if cfg.residual_tau or cfg.unit_scaling != "none":
    texts.append(
      f"rotate() with model.residual_tau={cfg.residual_tau}, "
      f"model.unit_scaling={cfg.unit_scaling!r}: a rotation passes norms before blocks alone, and "
      "weights without factors of their own; leave rotate() out"
    )
  if cfg.lora is not None:
    texts.append("rotate() with adapters: merge them first (--job=export)")
  return texts


@functools.cache
def orthogonal(size: int) -> np.ndarray:
  """float64 [size, size], rows orthonormal, with entries as equal as the size allows.

  A Kronecker product of Hadamard matrices, as large as they come; where their sizes do not make up
  the whole, of one with the Hartley matrix cos + sin of the odd rest: 72 = 24 x 3.
  """
  powers = {2**p for p in range(31)}
  known = {order * power for order in HADAMARD_ORDERS for power in powers}
  fits = [n for n in range(2, size + 1) if size % n == 0 and n in known]
  if not fits:
    angles = 2 * np.pi * np.outer(np.arange(size), np.arange(size)) / size
    return (np.cos(angles) + np.sin(angles)) / np.sqrt(size)

  def rest(n):
    """The smallest that this matrix and another one leave, then the larger matrix."""
    return min(size // n // m for m in {1, *fits} if size // n % m == 0), -n

  first = min(fits, key=rest)
  order = max(n for n in HADAMARD_ORDERS if first % n == 0 and first // n in powers)
  signs = hadamard.paley(order) if order > 1 else np.ones((1, 1))
  for _ in range((first // order).bit_length() - 1):
    signs = np.kron(np.asarray([[1.0, 1.0], [1.0, -1.0]]), signs)
  return np.kron(signs / np.sqrt(first), orthogonal(size // first))


def without_gains(params, cfg: ModelConfig) -> tuple[dict[str, Any], ModelConfig]:
  """The same model with the gains of norms of the stream in the weights that read them, and 1.

  Args:
    params: float arrays, see transformer.params.

  Returns:
    (parameters, their config, whose embedding is not tied).
  """
  made, layers = dict(params), dict(params["layers"])
  for mixer in transformer.mixers(cfg):
    own = layers[mixer.key]
    for input, maker in mixer.makers.items():
      if maker.is_gain:
        gain = np.asarray(own[maker.params[0]], np.float32)
        own = fold.read_times(own, mixer, input, gain, cfg) | {maker.params[0]: np.ones_like(gain)}
    layers[mixer.key] = own
  gain = np.asarray(params["norm"], np.float64)
  head = np.asarray(params["embed"].T if cfg.tie_embeddings else params["head"], np.float64)
  made |= {
    "layers": layers, "norm": np.ones(gain.shape, np.float32),
    "head": (head * gain[:, None]).astype(np.float32),
  }  # fmt: skip
  return made, dataclasses.replace(cfg, tie_embeddings=False)


def rotated(
  params, cfg: ModelConfig, r1: bool = True, r2: bool = True, seed: int = 0
) -> tuple[dict[str, Any], ModelConfig]:
  """The same model with rotated weights.

  Args:
    params: float arrays, see transformer.params; layers are stacked in front.
    r2: rotates the values of every head, by signs of its own.

  Returns:
    (parameters, float32 on the host where they changed, and their config).

  Raises:
    UserError: the model cannot be rotated.
  """
  if texts := problems(cfg):
    raise UserError("; ".join(texts))
  rng = np.random.default_rng(seed)
  if r1:
    params, cfg = without_gains(params, cfg)
    signs = rng.choice([-1.0, 1.0], cfg.hidden_size)
    params = _stream_rotated(params, cfg, signs[:, None] * orthogonal(cfg.hidden_size))
  if r2:
    layers = dict(params["layers"])
    for mixer in transformer.mixers(cfg):
      for input, maker in mixer.makers.items():
        if maker.rotation and not maker.is_gain:
          layers[mixer.key] = _heads_rotated(layers[mixer.key], mixer, input, cfg, rng)
    params = {**params, "layers": layers}
  return params, cfg


def _stream_rotated(params, cfg: ModelConfig, matrix_DD):
  """x R for the stream x: every matrix that reads it or writes into it, along D."""
  layers = dict(params["layers"])
  for mixer in transformer.mixers(cfg):
    own = dict(layers[mixer.key])
    reading = {i for i, maker in mixer.makers.items() if maker.is_gain}
    for site in mixer.sites:
      if site.input in reading or site.is_residual:
        letters = mixer.params(cfg)[site.name].letters
        own[site.name] = _along(own[site.name], matrix_DD, letters, "D")
    layers[mixer.key] = own
  of_ends = {
    name: _along(params[name], matrix_DD, letters, "D")
    for name, letters in (("embed", "VD"), ("head", "DV"))
  }
  return {**params, **of_ends, "layers": layers}


def _heads_rotated(p, mixer, input: str, cfg: ModelConfig, rng):
  """Of one input: its maker's parameters and the weights that read it, rotated in every head."""
  maker, made, declared = mixer.makers[input], dict(p), mixer.params(cfg)
  place = maker.letters.index(maker.rotation)
  matrix = orthogonal(cfg.dims[maker.rotation])
  first = maker.params[0]
  lead = np.shape(p[first])[: np.ndim(p[first]) - len(declared[first].letters)]
  signs = rng.choice([-1.0, 1.0], (*lead, *(cfg.dims[letter] for letter in maker.letters)))
  for name, letters in fold.present(p, mixer, maker, cfg):
    turned = np.asarray(p[name], np.float64) * fold.place(signs, maker.letters, letters)
    made[name] = _along(turned, matrix, letters, maker.rotation)
  for site in fold.readers(mixer, input):
    letters, (own, _) = declared[site.name].letters, declared[site.name].gemm_letters
    wide = fold.to_readers(signs, maker.letters, own, cfg)
    turned = np.asarray(p[site.name], np.float64) * fold.place(wide, own, letters)
    made[site.name] = _along(turned, matrix, letters, own[place])
  return made


def _along(w, matrix, letters: str, letter: str) -> np.ndarray:
  """float32 w . matrix over one letter of w, whatever is stacked in front; a part at a time."""
  lead, axis = np.ndim(w) - len(letters), letters.index(letter)
  made = np.empty(np.shape(w), np.float32)
  for part in np.ndindex(*made.shape[:lead]):
    product = np.tensordot(np.asarray(w[part], np.float64), matrix, axes=(axis, 0))
    made[part] = np.moveaxis(product, -1, axis)
  return made
