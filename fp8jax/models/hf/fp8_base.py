"""FP8 of a Hugging Face folder to the bit: the frozen base of adapters, and exports of it.

Theirs are [out, in] with scales [ceil(out / 128), ceil(in / 128)], float32 or E8M0; ours are
transposed. A folder that quantizes only some of its layers is refused: quantize it as a whole.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import axes, params
from fp8jax.errors import UserError
from fp8jax.models.hf import fp8_formats
from fp8jax.models.hf.fp8_export import Stored
from fp8jax.models.hf.names import Entry
from fp8jax.quantization import scaled_matrix, stored_matrix
from fp8jax.quantization.stored_matrix import StoredMatrix


def has_blocks(fp8: fp8_formats.Fp8Format | None) -> bool:
  """Whether scales are of 128x128."""
  return fp8 is not None and fp8.strategy == "block" and fp8.block == stored_matrix.QUANT.tile


def read(folder, entry: Entry, dims, layout: axes.Layout) -> StoredMatrix:
  """One layer's weight, on the devices that hold it.

  Args:
    folder: weights.Folder.
    entry: of the matrix.

  Raises:
    UserError: the scales do not cover the matrix, or see fp8_formats.check_scales.
  """
  name = folder.fp8.scale_name(entry.name)
  scale = folder.read(name).astype(np.float32).T
  data = folder.read(entry.name).T
  shape = tuple(scaled_matrix.num_tiles(n, stored_matrix.TILE) for n in data.shape)
  wrong = ""
  if scale.shape != shape:
    wrong = f"{name} has shape {scale.shape[::-1]}, expected {shape[::-1]}"
  elif np.isnan(data.astype(np.float32)).any():
    wrong = f"{entry.name} has codes that are NaN"
  if wrong:
    raise UserError(f"{folder.folder!r}: {wrong}; fetch the file again")
  fp8_formats.check_scales(scale, f"{folder.folder!r}: {name}")
  data = np.ascontiguousarray(data).reshape([dims[letter] for letter in entry.letters])
  on_host: tuple[Any, Any] = (data, np.ascontiguousarray(scale))  # yet to be placed
  codes = StoredMatrix(on_host[0], on_host[1], entry.inputs or 0)
  return _placed(codes, layout.weight_sharding(entry.letters))


def stored(folder, entries: Iterable[Entry]) -> dict[str, Stored | None]:
  """The codes of a folder's linear layers, None for one in 16 bits; {} of a folder without FP8.

  Args:
    folder: weights.Folder.
    entries: of the model.
  """
  found: dict[str, Stored | None] = {}
  for name in [e.name for e in entries if e.layer is not None and e.inputs is not None]:
    if folder.fp8 is None or not folder.is_fp8(name):
      found[name] = None
      continue
    of_inputs = name.removesuffix("weight") + "input_scale"
    has_inputs = folder.fp8.static_inputs and of_inputs in folder.files
    input_scale = float(folder.read(of_inputs).reshape(())) if has_inputs else None
    found[name] = Stored(folder.fp8.quant, functools.partial(_pair, folder, name), input_scale)
  return found if any(found.values()) else {}


def _pair(folder, name: str) -> tuple[np.ndarray, np.ndarray]:
  return folder.read(name), folder.read(folder.fp8.scale_name(name))


def of_stacks(flat: Mapping[str, Any], entries: Iterable[Entry], on_host) -> dict[str, Stored]:
  """The codes of the matrices that a tree holds as StoredMatrix, by the weight's name.

  Args:
    flat: {path: parameter, stacked}.
    on_host: weights.on_host.
  """

  def pair(codes: StoredMatrix, layer: int):
    one = StoredMatrix(on_host(codes.data[layer]), on_host(codes.scale[layer]), codes.inputs)
    return np.asarray(one.matrix().data), np.asarray(one.scale.T)

  return {
    e.name: Stored(stored_matrix.QUANT, functools.partial(pair, flat[e.path], e.layer))
    for e in entries
    if isinstance(flat.get(e.path), StoredMatrix) and e.layer is not None
  }


def put(
  stack: StoredMatrix | None, codes: StoredMatrix, entry: Entry, param: params.Param, dims,
  layout: axes.Layout,
) -> StoredMatrix:  # fmt: skip
  """The stack of all layers, one layer's codes in their place; without a stack in a new one."""
  if stack is None:
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((dims["N"], *x.shape), x.dtype), codes
    )  # fmt: skip
    places = stored_matrix.shardings(like, layout.weight_sharding(param.letters))
    stack = jax.tree.map(lambda x, at: jnp.zeros(x.shape, x.dtype, device=at), like, places)
  return _set(stack, codes, entry.layer)


@jax.jit(donate_argnums=0)
def _set(stack, codes, layer):
  return jax.tree.map(
    lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, layer, 0), stack, codes
  )


def _placed(codes: StoredMatrix, sharding) -> StoredMatrix:
  if sharding is None:
    return jax.device_put(codes)
  return jax.tree.map(
    lambda x, at: jax.make_array_from_callback(x.shape, at, lambda index, x=x: x[index]),
    codes, stored_matrix.shardings(codes, sharding),
  )  # fmt: skip
