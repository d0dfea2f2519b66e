"""The KV cache: keys and values of past tokens, so that a new token computes only its own.

A cache has B rows (slots) of M positions each: an entry's place is its token's position in its
sequence. Entries beyond a row's newest token are never read and are overwritten in time, so that
rows of any length share one program. R is prompts that are written together.

Heads come before positions, so that a product of one head reads it as it lies.

On a mesh rows lie where the batch B is split and heads where G is: a device attends to its own
rows and heads, and nothing of the cache travels.

Formats: the compute dtype, or E4M3 with a float32 scale for every head of every token, taken from
its K channels as they are written (value = data * scale, as everywhere). In "e4m3_rotated" keys are
rotated before that, and queries with them, so that no score changes: the rounding of channels that
are large in both is spread over the head (FlashAttention-3, arXiv:2407.08608 §3.3). It does not pay
against one such channel, which is exact as the largest of its head. "e4m3_folder" has a folder's
calibrated scales instead, one for a layer's keys and one for its values (kv_cache_scheme of
compressed-tensors), as servers cache; the first tokens of a prompt read their own keys unrounded.

Source: the cache of FP8 inference engines has one scale per tensor or head, from a calibration;
a scale per token and head needs none and costs 4 / K bytes per element.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout as layout_lib
from jax.sharding import PartitionSpec

from fp8jax import axes
from fp8jax.formats import E4M3
from fp8jax.generation.settings import COMPUTE, FOLDER, ROTATED
from fp8jax.models.config import ModelConfig
from fp8jax.ops import collectives
from fp8jax.ops.attention import attention, cached_attention, keys_of_queries, lies_apart
from fp8jax.quantization import hadamard, quantize
from fp8jax.recipe.attention import whole_head
from fp8jax.recipe.quant import WHOLE, Quant

LETTERS = "NBGMK"  # of a cache; of its scales without K
_QUANT = Quant(E4M3, tile=(1, WHOLE))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
  """Keys or values as they are stored: [..., K].

  Attributes:
    data: the compute dtype, or E4M3.
    scale: float32 without K, or None for the compute dtype and for scales of a folder.
  """

  data: jax.Array
  scale: jax.Array | None

  @classmethod
  def of(cls, x, format_: str, scale: Any = None) -> "Entries":
    """Entries of an array [..., K]; `scale` is the folder's, of FOLDER."""
    if format_ == COMPUTE:
      return cls(x, None)
    if format_ == FOLDER:
      return cls(quantize.cast(x.astype(jnp.float32) * (1 / scale), E4M3), None)
    made = quantize.quantize(x.reshape(-1, x.shape[-1]), _QUANT)
    return cls(made.data.reshape(x.shape), made.scale.reshape(x.shape[:-1]))

  def value(self, dtype, scale=None):
    """The array, in `dtype`; `scale` is the folder's, of FOLDER."""
    if scale is not None:
      return (self.data.astype(jnp.float32) * scale).astype(dtype)
    if self.scale is None:
      return self.data.astype(dtype)
    return (self.data.astype(jnp.float32) * self.scale[..., None]).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """A cache of all layers [N, B, G, M, K], of one layer [B, G, M, K], or entries of tokens that are
  added to either, [..., B, L, G, K].

  Attributes:
    k: keys, turned by their positions, and by Hadamard's rotation in "e4m3_rotated".
    format: of settings.CACHE_FORMATS.
    scales: float32 [N, 2] of a folder's keys and values, or [2] of a layer; None of entries, and
      of the other formats.
  """

  k: Entries
  v: Entries
  format: str = dataclasses.field(metadata=dict(static=True))
  layout: axes.Layout = dataclasses.field(default=axes.LOCAL, metadata=dict(static=True))
  scales: jax.Array | None = None

  @classmethod
  def zeros(
    cls, cfg: ModelConfig, rows: int, length: int, format_: str, dtype,
    layout: axes.Layout = axes.LOCAL, scales=None,
  ) -> "KVCache":  # fmt: skip
    """An empty cache of so many rows and positions; `scales` are those of FOLDER, else 1."""
    shape = (cfg.num_layers, rows, cfg.num_kv_heads, length, cfg.head_dim)

    def one():
      if format_ in (COMPUTE, FOLDER):
        return Entries(jnp.zeros(shape, E4M3.dtype if format_ == FOLDER else dtype), None)
      return Entries(jnp.zeros(shape, E4M3.dtype), jnp.ones(shape[:-1], jnp.float32))

    if format_ == FOLDER:
      scales = jnp.ones((shape[0], 2)) if scales is None else jnp.asarray(scales, jnp.float32)
    return cls(one(), one(), format_, layout, scales)

  def specs(self) -> tuple["KVCache", "KVCache"]:
    """PartitionSpecs (of a layer, of the entries that `attend` gives)."""
    return self._specs("BGMK", self.scales is not None), self._specs("BLGK")

  def attend(self, q_BLHK, k_BLGK, v_BLGK, positions_BL, implementation):
    """(attention of new tokens to the cache of a layer and themselves, their entries)."""
    q, kv, positions = map(self.layout.act_spec, ("BLHK", "BLGK", "BL"))
    attend = functools.partial(_attend, implementation=implementation)
    of_layer, added = self.specs()
    in_specs = (of_layer, q, kv, kv, positions)
    run = collectives.on_mesh(attend, self.layout, in_specs, (q, added))
    return run(self, q_BLHK, k_BLGK, v_BLGK, positions_BL)

  def write(self, added: "KVCache", rows_R, positions_RL) -> "KVCache":
    """The cache of all layers with entries [N, R, L, G, K] of some rows at their positions.

    A row or position that the cache does not have is dropped; on a mesh also a row that lies on
    another device than its entries.
    """
    over = self.layout.act_axes("B")

    def local(cache, added, rows_R, positions_RL):
      if over:
        count = cache.k.data.shape[1]
        rows_R = rows_R - jax.lax.axis_index(over) * count
        rows_R = jnp.where(rows_R < 0, count, rows_R)  # would count from the end

      def one(past, new):  # what is indexed comes first: [R, L, N, G, K]
        new = jnp.moveaxis(new, 0, 2)
        return past.at[:, rows_R[:, None], :, positions_RL].set(new, mode="drop")

      return jax.tree.map(one, cache, added)

    scales, added = self.scales, dataclasses.replace(added, scales=None)
    rows, positions = map(self.layout.act_spec, ("B", "BL"))
    whole = self._specs(LETTERS)
    in_specs = (whole, self._specs("NBLGK"), rows, positions)
    run = collectives.on_mesh(local, self.layout, in_specs, whole)
    written = run(dataclasses.replace(self, scales=None), added, rows_R, positions_RL)
    return dataclasses.replace(written, scales=scales)

  def _specs(self, letters: str, has_scales: bool = False) -> "KVCache":
    return _specs(letters, self.format, self.layout, has_scales)

  def of_entries(self, change) -> "KVCache":
    """The cache with another array for each of k's and v's: change(array)."""
    k, v = jax.tree.map(change, (self.k, self.v))
    return dataclasses.replace(self, k=k, v=v)

  def placed(self) -> "KVCache":
    """The cache of all layers where it belongs, inside a program."""
    return self.of_entries(lambda x: axes.constrain(x, LETTERS[: x.ndim], self.layout))

  @property
  def length(self) -> int:
    """Positions per row."""
    return self.k.data.shape[-2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoPast:
  """The cache of a prompt, before which there is nothing: its tokens attend among themselves.

  They read their own keys and values unquantized; entries are in the format.
  """

  format: str = dataclasses.field(metadata=dict(static=True))
  layout: axes.Layout = dataclasses.field(default=axes.LOCAL, metadata=dict(static=True))
  scales: jax.Array | None = None

  def specs(self) -> tuple["NoPast", KVCache]:
    """As KVCache.specs."""
    whole: Any = None if self.scales is None else PartitionSpec()
    added = _specs("BLGK", self.format, self.layout)
    return dataclasses.replace(self, scales=whole), added

  def attend(self, q_BLHK, k_BLGK, v_BLGK, positions_BL, implementation):
    """(causal attention, entries of the tokens)."""
    del positions_BL
    mixed = attention(q_BLHK, k_BLGK, v_BLGK, None, implementation, self.layout)
    local = functools.partial(_entries, format_=self.format, layout=self.layout)
    (own, out), kv = self.specs(), self.layout.act_spec("BLGK")
    run = collectives.on_mesh(local, self.layout, (kv, kv, own.scales), out)
    return mixed, run(k_BLGK, v_BLGK, self.scales)


def _specs(letters: str, format_: str, layout: axes.Layout, has_scales: bool = False) -> KVCache:
  """PartitionSpecs of entries with these letters; scales of a folder are on every device."""
  of_data, of_scale = map(layout.act_spec, (letters, letters[:-1]))
  one: Any = Entries(of_data, None if format_ in (COMPUTE, FOLDER) else of_scale)  # type: ignore
  return KVCache(one, one, format_, layout, PartitionSpec() if has_scales else None)  # type: ignore


def _attend(cache: KVCache, q_BLHK, k_BLGK, v_BLGK, positions_BL, implementation):
  """KVCache.attend of one device's rows and heads."""
  added = _entries(k_BLGK, v_BLGK, cache.scales, cache.format, cache.layout)
  past, own = dataclasses.replace(cache, scales=None).of_entries(_as_it_lies), added
  if lies_apart(cache.layout):  # all keys are here
    of_queries = functools.partial(keys_of_queries, own=q_BLHK.shape[2], layout=cache.layout)
    past, own = (
      past.of_entries(lambda x: of_queries(x, 1)),
      own.of_entries(lambda x: of_queries(x, 2)),
    )
  scales = _of_both(cache.scales)
  full = jax.tree.map(functools.partial(_inserted, positions_BL=positions_BL), past, own)
  dtype = q_BLHK.dtype
  q_BLHK = _rotated(q_BLHK, cache.format).astype(dtype)
  k, v = (of.value(dtype, scale) for of, scale in zip((full.k, full.v), scales))
  return cached_attention(q_BLHK, k, v, positions_BL, implementation), added


def _as_it_lies(x):
  """x, its last dimension contiguous: for products XLA may want another, and would transpose the
  cache of all layers for every token."""
  return layout_lib.with_layout_constraint(x, layout_lib.Layout(tuple(range(x.ndim))))


def _inserted(past, new, positions_BL):
  """Entries [B, G, M, ...] of one layer with new ones [B, L, G, ...] at neighbouring positions.

  A choice, since XLA fuses it with the product that reads it; a scatter copies the layer.
  """
  new, over = jnp.swapaxes(new, 1, 2), (..., *(None,) * (past.ndim - 3))
  number_BM = jnp.arange(past.shape[2]) - positions_BL[:, :1]
  is_new_BM = (number_BM >= 0) & (number_BM < new.shape[2])
  if new.shape[2] > 1:
    number_BM = jnp.clip(number_BM, 0, new.shape[2] - 1)
    new = jnp.take_along_axis(new, number_BM[:, None][over], 2)
  return jnp.where(is_new_BM[:, None][over], new, past)


def _of_both(scales):
  return (None, None) if scales is None else (scales[0], scales[1])


def _entries(k_BLGK, v_BLGK, scales, format_: str, layout: axes.Layout) -> KVCache:
  of_k, of_v = _of_both(scales)
  k = Entries.of(_rotated(k_BLGK, format_), format_, of_k)
  return KVCache(k, Entries.of(v_BLGK, format_, of_v), format_, layout)


def _rotated(x, format_: str):
  """Queries or keys [..., K] as the cache has them: in "e4m3_rotated" float32, rotated."""
  if format_ != ROTATED:
    return x
  head_dim = x.shape[-1]
  return hadamard.hadamard(x.reshape(-1, head_dim), whole_head(head_dim), 1).reshape(x.shape)


def bytes_per_token(cfg: ModelConfig, format_: str, itemsize: int) -> int:
  """Bytes that one token takes in the cache, keys and values of all layers."""
  each = {COMPUTE: itemsize * cfg.head_dim, FOLDER: cfg.head_dim}
  per_head = each.get(format_, cfg.head_dim + 4)
  return 2 * cfg.num_layers * cfg.num_kv_heads * per_head
