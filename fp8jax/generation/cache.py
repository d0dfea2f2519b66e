"""The KV cache: keys and values of past tokens, so that a new token computes only its own.

A cache has B rows (slots) of M positions each: an entry's place is its token's position in its
sequence. Entries beyond a row's newest token are never read and are overwritten in time, so that
rows of any length share one program. R is prompts that are written together.

Formats: the compute dtype, or E4M3 with a float32 scale for every head of every token, taken from
its K channels as they are written (value = data * scale, as everywhere). In "e4m3_rotated" keys are
rotated before that, and queries with them, so that no score changes: the rounding of channels that
are large in both is spread over the head (FlashAttention-3, arXiv:2407.08608 §3.3). It does not pay
against one such channel, which is exact as the largest of its head.

Source: the cache of FP8 inference engines has one scale per tensor or head, from a calibration;
a scale per token and head needs none and costs 4 / K bytes per element.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fp8jax.formats import E4M3
from fp8jax.generation.settings import COMPUTE, ROTATED
from fp8jax.models.config import ModelConfig
from fp8jax.ops.attention import attention, cached_attention
from fp8jax.quantization import hadamard, quantize
from fp8jax.recipe.attention import whole_head
from fp8jax.recipe.quant import WHOLE, Quant

_QUANT = Quant(E4M3, tile=(1, WHOLE))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
  """Keys or values as they are stored: [..., heads, K].

  Attributes:
    data: the compute dtype, or E4M3.
    scale: float32 without K, or None for the compute dtype.
  """

  data: jax.Array
  scale: jax.Array | None

  @classmethod
  def of(cls, x, format_: str) -> "Entries":
    """Entries of an array [..., heads, K]."""
    if format_ == COMPUTE:
      return cls(x, None)
    made = quantize.quantize(x.reshape(-1, x.shape[-1]), _QUANT)
    return cls(made.data.reshape(x.shape), made.scale.reshape(x.shape[:-1]))

  def value(self, dtype):
    """The array, in `dtype`."""
    if self.scale is None:
      return self.data.astype(dtype)
    return (self.data.astype(jnp.float32) * self.scale[..., None]).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """A cache of all layers [N, B, M, G, K], of one layer [B, M, G, K], or entries for either.

  Attributes:
    k: keys, turned by their positions, and by Hadamard's rotation in "e4m3_rotated".
    v: values.
    format: of settings.CACHE_FORMATS.
  """

  k: Entries
  v: Entries
  format: str = dataclasses.field(metadata=dict(static=True))

  @classmethod
  def zeros(cls, cfg: ModelConfig, rows: int, length: int, format_: str, dtype) -> "KVCache":
    """An empty cache of so many rows and positions."""
    shape = (cfg.num_layers, rows, length, cfg.num_kv_heads, cfg.head_dim)

    def one():
      if format_ == COMPUTE:
        return Entries(jnp.zeros(shape, dtype), None)
      return Entries(jnp.zeros(shape, E4M3.dtype), jnp.ones(shape[:-1], jnp.float32))

    return cls(one(), one(), format_)

  def attend(self, q_BLHK, k_BLGK, v_BLGK, positions_BL, implementation):
    """(attention of new tokens to the cache of a layer and themselves, their entries)."""
    del implementation  # no fused kernel reads these formats
    added = _entries(k_BLGK, v_BLGK, self.format)
    rows = jnp.arange(q_BLHK.shape[0])[:, None]
    full = jax.tree.map(lambda past, new: past.at[rows, positions_BL].set(new), self, added)
    dtype = q_BLHK.dtype
    q_BLHK = _rotated(q_BLHK, self.format).astype(dtype)
    mixed = cached_attention(q_BLHK, full.k.value(dtype), full.v.value(dtype), positions_BL)
    return mixed, added

  def write(self, added: "KVCache", rows_R, positions_RL) -> "KVCache":
    """The cache of all layers with entries [N, R, L, G, K] of some rows at their positions.

    A row or position that the cache does not have is dropped.
    """

    def one(past, new):
      return past.at[:, rows_R[:, None], positions_RL].set(new, mode="drop")

    return jax.tree.map(one, self, added)

  @property
  def length(self) -> int:
    """Positions per row."""
    return self.k.data.shape[-3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoPast:
  """The cache of a prompt, before which there is nothing: its tokens attend among themselves.

  They read their own keys and values unquantized; entries are in the format.
  """

  format: str = dataclasses.field(metadata=dict(static=True))

  def attend(self, q_BLHK, k_BLGK, v_BLGK, positions_BL, implementation):
    """(causal attention, entries of the tokens)."""
    del positions_BL
    mixed = attention(q_BLHK, k_BLGK, v_BLGK, None, implementation)
    return mixed, _entries(k_BLGK, v_BLGK, self.format)


def _entries(k_BLGK, v_BLGK, format_: str) -> KVCache:
  return KVCache(
    Entries.of(_rotated(k_BLGK, format_), format_), Entries.of(v_BLGK, format_), format_
  )


def _rotated(x, format_: str):
  """Queries or keys [..., K] as the cache has them: in "e4m3_rotated" float32, rotated."""
  if format_ != ROTATED:
    return x
  head_dim = x.shape[-1]
  return hadamard.hadamard(x.reshape(-1, head_dim), whole_head(head_dim), 1).reshape(x.shape)


def bytes_per_token(cfg: ModelConfig, format_: str, itemsize: int) -> int:
  """Bytes that one token takes in the cache, keys and values of all layers."""
  per_head = cfg.head_dim * itemsize if format_ == COMPUTE else cfg.head_dim + 4
  return 2 * cfg.num_layers * cfg.num_kv_heads * per_head
