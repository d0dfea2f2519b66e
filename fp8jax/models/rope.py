"""Rotary position embeddings and the ways they are stretched.

Source: Su et al. 2021 (arXiv:2104.09864); linear: Chen et al. 2023 (arXiv:2306.15595); dynamic:
NTK-aware scaling as in Hugging Face transformers; llama3: Llama 3.1's config; yarn: Peng et al.
2023 (arXiv:2309.00071) §3. Checked against transformers by logit parity.
"""

import math

import jax.numpy as jnp
import numpy as np

from fp8jax.models.config import ModelConfig, RopeScaling


def cos_sin(positions_BL, cfg: ModelConfig):
  """(cos_BLK, sin_BLK), float32, for the halves layout of ops.elementwise.rotate."""
  inverse_period, factor = frequencies(cfg, positions_BL.shape[-1])
  angle = positions_BL[..., None].astype(jnp.float32) * jnp.asarray(inverse_period, jnp.float32)
  angle = jnp.concatenate([angle, angle], axis=-1)
  return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def frequencies(cfg: ModelConfig, length: int) -> tuple[np.ndarray, float]:
  """([K/2] radians per position in float64, multiplier of cos and sin).

  Args:
    cfg: rope_theta, rope_scaling and head_dim are read.
    length: sequence length, which only "dynamic" depends on.
  """
  dim, scaling = cfg.head_dim, cfg.rope_scaling
  exponents = np.arange(0, dim, 2) / dim
  plain = cfg.rope_theta**-exponents
  if scaling.kind == "default":
    return plain, 1.0
  if scaling.kind == "linear":
    return plain / scaling.factor, 1.0
  if scaling.kind == "dynamic":
    stretch = max(scaling.factor * length / cfg.max_positions - (scaling.factor - 1), 1.0)
    return (cfg.rope_theta * stretch ** (dim / (dim - 2))) ** -exponents, 1.0
  original = scaling.original_max_positions or cfg.max_positions
  if scaling.kind == "llama3":
    return _llama3(plain, scaling, original), 1.0
  if scaling.kind == "yarn":
    return _yarn(plain, cfg, scaling, original)
  raise ValueError(f"rope_scaling.kind={scaling.kind!r} is not one of {', '.join(KINDS)}")


KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def _llama3(plain, scaling: RopeScaling, original: int):
  """Long wavelengths are divided by `factor`, short ones kept, a band between them interpolated."""
  rotations = original * plain / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
  return plain * keep + plain / scaling.factor * (1 - keep)


def _yarn(plain, cfg: ModelConfig, scaling: RopeScaling, original: int):
  """As llama3, with a ramp over channels between two numbers of rotations."""
  dim = cfg.head_dim

  def channel(rotations):
    """Channel pair that turns this often over the original context."""
    return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

  low = max(math.floor(channel(scaling.beta_fast)), 0)
  high = min(math.ceil(channel(scaling.beta_slow)), dim - 1)
  ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
  attention = scaling.attention_factor
  if attention is None:
    attention = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
  return plain / scaling.factor * ramp + plain * (1 - ramp), attention
