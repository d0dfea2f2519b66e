"""Parameters as one declaration each: `Param("DF", inputs=1)`.

Shape, initial value, sharding, weight decay, parameter count, FP8 site and Hugging Face check all
derive from the declaration tree, which has the same structure as the parameter tree.
"""

import dataclasses
import hashlib
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from fp8jax import axes


@dataclasses.dataclass(frozen=True)
class Param:
  """One parameter tensor.

  Attributes:
    letters: one letter per dimension (see axes.py).
    init: "normal", "ones" or "zeros".
    std: standard deviation for "normal".
    inputs: number of leading letters (after N) that a GEMM contracts; None: not a GEMM weight.
    decay: whether weight decay applies.
    trainable: False for a frozen parameter, without gradient, optimizer state and master.
  """

  letters: str
  init: str = "normal"
  std: float = 0.02
  inputs: int | None = None
  decay: bool = True
  trainable: bool = True

  def stacked(self) -> "Param":
    """The same parameter for every layer, stacked in front along N."""
    return dataclasses.replace(self, letters="N" + self.letters)

  @property
  def gemm_letters(self) -> tuple[str, str]:
    """(contracted, produced) letters of the forward GEMM, layer axis removed."""
    letters = self.letters.removeprefix("N")
    return letters[: self.inputs], letters[self.inputs :]


def tree_map(fn: Callable, tree, *rest):
  """jax.tree.map over declaration trees."""
  return jax.tree.map(fn, tree, *rest, is_leaf=lambda x: isinstance(x, Param))


def flatten(tree) -> dict[str, Any]:
  """{"layers/attn/q": leaf, ...} of nested dictionaries, in tree order; empty ones are left out."""
  flat = {}
  for key, value in tree.items():
    is_folder = isinstance(value, Mapping)
    flat |= {f"{key}/{k}": v for k, v in flatten(value).items()} if is_folder else {key: value}
  return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `flatten`."""
  tree = {}
  for path, leaf in flat.items():
    *folders, name = path.split("/")
    inner = tree
    for folder in folders:
      inner = inner.setdefault(folder, {})
    inner[name] = leaf
  return tree


def shape(param: Param, dims: Mapping[str, int]) -> tuple[int, ...]:
  return tuple(dims[letter] for letter in param.letters)


def count(tree, dims: Mapping[str, int]) -> int:
  """Number of scalars."""
  return sum(math.prod(shape(p, dims)) for p in flatten(tree).values())


def shardings(tree, layout: axes.Layout):
  """NamedSharding of every parameter at rest, or None everywhere on a single device."""
  return tree_map(lambda p: layout.weight_sharding(p.letters), tree)


def abstract(tree, dims: Mapping[str, int], layout: axes.Layout = axes.LOCAL):
  """ShapeDtypeStructs: float32 masters, with shardings."""

  def one(p: Param):
    sharding = layout.weight_sharding(p.letters)
    return jax.ShapeDtypeStruct(shape(p, dims), jnp.float32, sharding=sharding)

  return tree_map(one, tree)


def init(key, tree, dims: Mapping[str, int]):
  """Random float32 parameters. Each tensor's key depends on its path alone, not on the tree."""

  def one(path: str, param: Param):
    dims_shape = shape(param, dims)
    if param.init == "ones":
      return jnp.ones(dims_shape, jnp.float32)
    if param.init == "zeros":
      return jnp.zeros(dims_shape, jnp.float32)
    own = jax.random.fold_in(key, zlib.crc32(path.encode()))
    return param.std * jax.random.normal(own, dims_shape, jnp.float32)

  return unflatten({path: one(path, p) for path, p in flatten(tree).items()})


def next_up(x):
  """The next larger floats: one ulp."""
  return jnp.nextafter(x, jnp.asarray(jnp.inf, x.dtype))


def between(x, key):
  """Floats that bfloat16 rounds to x: anywhere within half of its step of those x that are its
  numbers; other x, 0 and what is not finite as they are.

  A weight of a bfloat16 checkpoint may lie half way between two codes of a narrow format, where the
  smallest update decides. Between two numbers of bfloat16 next to none does.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  moved = bits + jax.random.randint(key, x.shape, -0x7FFF, 0x8000)
  is_bf16 = (bits & 0xFFFF == 0) & (x != 0) & jnp.isfinite(x)
  return jax.lax.bitcast_convert_type(jnp.where(is_bf16, moved, bits), jnp.float32)


def on_host(x) -> np.ndarray:
  """A whole array, also where processes share its shards (then all of them call this)."""
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(jax.device_get(x))


def digest(tree) -> str:
  """Of the names, shapes and bits of a tree of arrays, whatever the mesh."""
  sums = jax.device_get(jax.tree.map(_checksum, tree))
  shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(tree)]
  named = jax.tree_util.tree_leaves_with_path(sums)
  text = repr([(jax.tree_util.keystr(path), int(n)) for path, n in named] + shapes)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


@jax.jit
def _checksum(x):
  """uint32: a sum, which wraps, of the bits mixed with their place: in any order of adding.

  MurmurHash3's finalizer mixes. A sum of the bits themselves would not see two signs that change.
  """
  by_bits = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
  info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
  bits = jax.lax.bitcast_convert_type(x, by_bits[info(x.dtype).bits]).astype(jnp.uint32)
  place = jnp.zeros(x.shape, jnp.uint32)
  for axis in range(x.ndim):
    place = place * jnp.uint32(2654435761) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
  mixed = bits ^ (place * jnp.uint32(0x9E3779B9))
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
  return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
