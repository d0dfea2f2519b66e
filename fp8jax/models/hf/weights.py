"""The weights of Hugging Face folders.

One table maps our tree to theirs. Tensors stream: reading holds the destination and one tensor,
whatever the size of the files.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import axes, params
from fp8jax.errors import UserError
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names, schemes
from fp8jax.models.hf.names import Entry
from fp8jax.models.hf.schemes import Scheme
from fp8jax.models.hf.tensors import CODES, Folder, Values
from fp8jax.quantization import stored_matrix
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.quant import Quant


def check(folder: Folder, cfg: ModelConfig) -> str:
  """Refuses missing or surplus tensors and wrong shapes or dtypes, all by name.

  Returns:
    The dtype of the weights: "bfloat16", "float16" or "float32", the narrowest that holds all.
  """
  have = folder.described
  want = {e.name: e for e in names.entries(cfg)}
  of = {n: scheme for n, e in want.items() if _is_linear(e) and (scheme := folder.scheme(n))}
  stored = {
    t for n, scheme in of.items() for t, *_ in scheme.tensors(n, want[n].hf_shape(cfg.dims), True)
  }
  surplus = [n for n in have if n not in {*want, *stored} and not _is_ignorable(n, cfg)]
  # A tensor that the index does not list is not read.
  plain = [n for n in want if n not in of]
  problems = [f"missing tensor {n}" for n in plain if n not in have or n not in folder.files]
  problems += [f"surplus tensor {n}" for n in surplus]
  problems += mismatches(folder, [want[n] for n in plain], cfg.dims)
  problems += [p for n, scheme in of.items()
               for p in scheme.problems(n, have, want[n].hf_shape(cfg.dims))]  # fmt: skip
  if problems:
    shown = "\n".join(f"  - {p}" for p in problems[:20])
    more = f"\n  (+{len(problems) - 20} more)" if len(problems) > 20 else ""
    raise UserError(
      f"{folder.folder!r} does not hold the {cfg.architecture} model its config "
      f"describes:\n{shown}{more}"
    )
  dtypes = {dtype for dtype, code in CODES.items() if any(have[n][1] == code for n in plain)}
  return dtypes.pop() if len(dtypes) == 1 else "float32"  # no 16-bit format holds the other's


def _is_linear(entry: Entry) -> bool:
  return entry.layer is not None and entry.inputs is not None


def mismatches(folder: Folder, entries: Iterable[Entry], dims):
  """Tensors of another shape or dtype than these entries, in words."""
  have, known = folder.described, [*CODES.values()]
  there = [e for e in entries if e.name in have]
  texts = [
    f"{e.name} has shape {have[e.name][0]}, expected {e.hf_shape(dims)}"
    for e in there
    if have[e.name][0] != e.hf_shape(dims)
  ]
  return texts + [
    f"{e.name} has dtype {have[e.name][1]}, expected one of {', '.join(known)}"
    + (", and config.json has no quantization_config of it: fetch it again"
       if have[e.name][1] in schemes.CODES and e.inputs is not None else "")
    for e in there
    if have[e.name][1] not in known
  ]  # fmt: skip


def codes_of(source: str, cfg: ModelConfig) -> str:
  """How a folder holds its quantized matrices, "int4 1x128 f32"; "" of one without any."""
  of = map(Folder(source).scheme, (e.name for e in names.entries(cfg) if _is_linear(e)))
  return ", ".join(dict.fromkeys(str(scheme.weight) for scheme in of if scheme))


def _is_ignorable(name: str, cfg: ModelConfig) -> bool:
  """Buffers that old files carry, and a tied head written out: both derive from what is read. And
  scales of keys and values, which caches here choose for every token."""
  ends = ("rotary_emb.inv_freq", "_proj.output_scale", ".k_scale", ".v_scale")
  return name.endswith(ends) or (cfg.tie_embeddings and name == names.TOP["head"])


def load_params(
  source: str, cfg: ModelConfig, layout: axes.Layout = axes.LOCAL,
  codes_of: Collection[str] | Mapping[str, Collection[Quant | None]] = (),
  values: Values | None = None,
):  # fmt: skip
  """float32 parameters of a Hugging Face folder, sharded at birth.

  A vocabulary that cfg makes larger than the folder's is filled up with zero rows. Host memory: the
  destination plus one tensor. Adapters of cfg.lora are not in the tree, nor a reward head that the
  folder lacks. Where lora.base is "block_fp8" and it has FP8 blocks, linears are StoredMatrix.

  Args:
    codes_of: paths of weights, "layers/mlp/up", that are StoredMatrix too where the folder has
      codes of every layer's in one scheme; of a mapping, where they are compatible with all of the
      Quants that its layers are multiplied in.
    values: see Folder.

  Returns:
    (parameter tree, dtype name of the file's weights)
  """
  folder = Folder(source, values=values)
  stored = hf_config.with_stored(cfg, hf_config.read_config(source))
  dtype = check(folder, stored)
  entries = [e for e in names.entries(cfg) if e.path != "head" or e.name in folder.files]
  flat = read_entries(folder, entries, cfg, layout, _in_codes(folder, entries, cfg, codes_of))
  if cfg.tie_embeddings and names.TOP["head"] in folder.files:
    _check_tied(folder)
  return unflatten(flat, cfg), dtype


def unflatten(flat: Mapping[str, Any], cfg: ModelConfig):
  """The parameter tree of {path: parameter}, in the order of the declaration."""
  declared = params.flatten(transformer.params(cfg))
  return params.unflatten({path: flat[path] for path in declared if path in flat})


def read_entries(
  folder: Folder, entries: list[Entry], cfg: ModelConfig, layout: axes.Layout,
  in_codes: Collection[str] = (),
) -> dict[str, Any]:  # fmt: skip
  """{path: float32 parameter} of tensors that `check` has passed.

  Args:
    in_codes: names of those that are read as StoredMatrix.
  """
  declared, flat = params.flatten(transformer.params(cfg)), {}
  for entry in entries:
    read = _read_codes if entry.name in in_codes else _read
    made = _place(read(folder, entry, cfg.dims), layout.weight_sharding(entry.letters))
    if entry.layer is None:
      flat[entry.path] = _widened(made)
      continue
    sharding = layout.weight_sharding(declared[entry.path].letters)
    stack = flat.get(entry.path)
    if stack is None:
      stack = _zeros(cfg.dims["N"], made, sharding)
    flat[entry.path] = _put(stack, made, entry.layer)  # donated: a layer at a time is set in place
  return flat


def _in_codes(folder: Folder, entries, cfg: ModelConfig, paths) -> set[str]:
  """Names of the matrices that are read as they are stored, see load_params."""
  quants: dict[str, dict[str, Quant | None]] = {}
  for e in filter(_is_linear, entries):
    scheme = folder.scheme(e.name)
    own = scheme and dataclasses.replace(scheme.weight, tile=scheme.tile)
    quants.setdefault(e.path, {})[e.name] = own
  if cfg.lora and cfg.lora.base == "block_fp8":
    return {n for of in quants.values() for n, q in of.items() if q and _is_base(q)}
  wanted = {path: paths[path] if isinstance(paths, Mapping) else () for path in paths}
  return {
    n for path, of in quants.items() if path in wanted and len({*of.values()}) == 1
    for n, q in of.items() if q and all(stored_matrix.is_compatible(w, q) for w in wanted[path])
  }  # fmt: skip


def _is_base(quant: Quant) -> bool:
  return (quant.format, quant.tile) == (stored_matrix.QUANT.format, stored_matrix.QUANT.tile)


@jax.jit(donate_argnums=0)
def _put(stack, value, layer):
  at = lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, layer, 0)  # noqa: E731
  return jax.tree.map(at, stack, _widened(value))


@jax.jit
def _widened(value):
  """Numbers in float32, codes as they are."""
  return value if isinstance(value, StoredMatrix) else value.astype(jnp.float32)


def _shardings(value, sharding):
  """Of an array, or of the arrays of codes."""
  return stored_matrix.shardings(value, sharding) if isinstance(value, StoredMatrix) else sharding


def _zeros(layers: int, value, sharding):
  """A stack of so many layers like this value."""
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((layers, *x.shape), x.dtype), jax.eval_shape(_widened, value)
  )
  return jax.tree.map(
    lambda x, at: jnp.zeros(x.shape, x.dtype, device=at), like, _shardings(like, sharding)
  )


def _place(value, sharding):
  """From the host to the devices that hold a parameter."""
  if sharding is None:
    return jax.device_put(value)
  return jax.tree.map(
    lambda x, at: jax.make_array_from_callback(x.shape, at, lambda index: x[index]),
    value, _shardings(value, sharding),
  )  # fmt: skip


def _read(folder: Folder, entry: Entry, dims) -> np.ndarray:
  """One tensor in our order: a view of theirs in their dtype, which devices copy and widen."""
  value = folder.read_float(entry.name)
  _check_finite(value, f"{folder.folder!r}: {entry.name}")
  return _to_ours(value, entry, dims)


def _read_codes(folder: Folder, entry: Entry, dims) -> StoredMatrix:
  """One matrix to the bit: theirs is [out, in]; ours transposed.

  Raises:
    UserError: codes that are NaN, or see Folder.read_codes.
  """
  scheme, codes = cast(Scheme, folder.scheme(entry.name)), folder.read_codes(entry.name)
  if np.isnan(codes.data.astype(np.float32)).any():
    raise UserError(f"{folder.folder!r}: {entry.name} has codes that are NaN; fetch the file again")
  data = np.ascontiguousarray(codes.data.T).reshape([dims[letter] for letter in entry.letters])
  arrays: tuple[Any, Any] = (data, np.ascontiguousarray(codes.scale.T))  # yet to be placed
  quant = dataclasses.replace(scheme.weight, tile=scheme.tile)
  quant = stored_matrix.QUANT if _is_base(quant) else quant
  return StoredMatrix(*arrays, entry.inputs or 0, quant)


# Of NaN and infinities every bit of the exponent is 1.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


def _check_finite(value: np.ndarray, what: str):
  """Refuses NaN and infinities; the bits tell them, several times as fast as isfinite."""
  exponent = np.dtype(f"u{value.itemsize}").type(_EXPONENTS[value.dtype.name])
  if (value.view(exponent.dtype) & exponent).max(initial=0) < exponent:
    return
  bad = value.size - np.count_nonzero(np.isfinite(value))
  raise UserError(
    f"{what} has {bad} of {value.size} values that are NaN or infinite; fetch the file again, or "
    "start from weights of an earlier checkpoint"
  )


def _to_ours(tensor: np.ndarray, entry: Entry, dims) -> np.ndarray:
  """Their order -> ours, with zero rows for a padded vocabulary."""
  tensor = tensor.T if entry.inputs is not None else tensor
  if "V" in entry.letters:
    axis = entry.letters.index("V")
    padding = [(0, 0)] * tensor.ndim
    padding[axis] = (0, dims["V"] - tensor.shape[axis])
    tensor = np.pad(tensor, padding)
  shape = tuple(dims[x] for x in entry.letters)
  return tensor.reshape(shape)


def _check_tied(folder: Folder):
  with folder.open(names.TOP["head"]) as head, folder.open(names.TOP["embed"]) as embed:
    if not np.array_equal(head.get_tensor(names.TOP["head"]), embed.get_tensor(names.TOP["embed"])):
      raise UserError(
        f"{folder.folder!r}: tie_word_embeddings is true but {names.TOP['head']} differs from "
        f"{names.TOP['embed']}"
      )
