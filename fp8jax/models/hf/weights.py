"""The weights of Hugging Face folders, read from safetensors; pickles never are.

One table maps our tree to theirs. Tensors stream: reading holds the destination and one tensor,
whatever the size of the files.
"""

import dataclasses
import functools
import glob
import json
import math
import os
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp8jax import axes, hub, params
from fp8jax.errors import UserError, inside
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names, scheme_config, schemes
from fp8jax.models.hf.names import Entry
from fp8jax.models.hf.schemes import Scheme
from fp8jax.quantization import stored_matrix
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.quant import Quant

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DTYPE_OF = schemes.DTYPES | {CODES[name]: dtype for name, dtype in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def _open_file(path: str):
  import safetensors  # extra `hf`

  try:
    return safetensors.safe_open(path, "numpy")
  except safetensors.SafetensorError as e:
    raise UserError(f"{path} is no whole safetensors file ({e}); fetch it again") from e


# (name, codes, scheme) of a quantized weight -> float32 [out, in].
Values = Callable[[str, schemes.Codes, Scheme], np.ndarray]


class Folder:
  """The safetensors of a folder, by tensor name. Opens files as needed, one tensor at a time."""

  def __init__(self, folder: str, file: str = "", values: Values | None = None):
    """
    Args:
      folder: or an id of the Hugging Face hub.
      file: name of the one file to read, of adapters; "" for those of a model.
      values: of quantized matrices; None: code * scale.
    """
    self.folder, self.quantization, self._values = hub.local(folder), None, values
    index = os.path.join(self.folder, INDEX)
    if file:
      with _open_file(os.path.join(self.folder, file)) as f:
        self.files = dict.fromkeys(f.keys(), file)
      return
    if os.path.exists(index):
      listed = hf_config.read_json(self.folder, os.path.basename(index)).get("weight_map")
      if not isinstance(listed, dict) or any(not isinstance(f, str) for f in listed.values()):
        raise UserError(f"{index} has no weight_map from tensors to files; fetch it again")
      for file in set(listed.values()):
        inside(self.folder, file, f"{index}: weight_map")
      single = os.path.join(self.folder, SINGLE)
      if os.path.exists(single) and SINGLE not in listed.values():
        raise UserError(
          f"{single} and {index} are two sets of weights, of which transformers reads the first "
          "and vLLM the second; remove one of them"
        )
      self.files = listed
    else:
      self.files = {}
      for path in sorted(glob.glob(os.path.join(self.folder, "*.safetensors"))):
        with _open_file(path) as f:
          names_here = dict.fromkeys(f.keys(), os.path.basename(path))
        if twice := sorted(self.files.keys() & names_here):
          raise UserError(
            f"{path} and {self.files[twice[0]]!r} beside it both have {twice[0]}: two sets of "
            "weights; remove one of them"
          )
        self.files |= names_here
    # None where no config.json is: whoever reads the model then says so.
    path = os.path.join(self.folder, "config.json")
    stated = hf_config.read_json(self.folder, "config.json") if os.path.isfile(path) else {}
    self.quantization = scheme_config.of_config(stated, path)
    if not self.files:
      pickles = [p for end in ("bin", "pt*") for p in glob.glob(f"{self.folder}/*.{end}")]
      hint = (
        f"{os.path.basename(pickles[0])} is a pickle, which is never read: convert it with "
        "transformers' save_pretrained"
        if pickles
        else "expected model.safetensors or model.safetensors.index.json; fetch the model again, "
        "or name another folder"
      )
      raise FileNotFoundError(f"no safetensors in {self.folder!r}; {hint}")
    missing = sorted(
      {f for f in self.files.values() if not os.path.isfile(os.path.join(self.folder, f))}
    )
    if missing:
      raise FileNotFoundError(f"{index} names {missing[0]!r}, which is not in the folder")

  def open(self, name: str):
    return _open_file(os.path.join(self.folder, self.files[name]))

  def read(self, name: str) -> np.ndarray:
    """A tensor as it is stored, of FP8 the codes."""
    (shape, code), start = self.described[name], self._starts[name]
    if start is None:
      with self.open(name) as f:
        return f.get_tensor(name)
    # Safetensors' NumPy reader knows no FP8, and takes a millisecond to open a file.
    dtype, path = np.dtype(_DTYPE_OF[code]), os.path.join(self.folder, self.files[name])
    data = np.fromfile(path, np.uint8, math.prod(shape) * dtype.itemsize, offset=start)
    return data.view(dtype).reshape(shape)

  def scheme(self, weight: str) -> Scheme | None:
    """How a linear layer's weight, "X.weight", is stored; None: as numbers of 16 or 32 bits."""
    scheme = self.quantization and self.quantization.scheme(weight)
    is_wide = weight in self.described and self.described[weight][1] in CODES.values()
    if scheme is None or not is_wide:
      return scheme
    name = scheme.codes_name(weight)
    return scheme if name != weight and name in self.described else None

  def read_codes(self, weight: str) -> schemes.Codes:
    """The codes and scales of a weight that has a scheme.

    Raises:
      UserError: damaged scales, by name.
    """
    scheme = cast(Scheme, self.scheme(weight))
    return scheme.unpacked(self.read, weight, f"{self.folder!r}: ")

  def read_float(self, name: str) -> np.ndarray:
    """A weight as numbers: of a quantized matrix its values in float32, else as it is stored."""
    scheme = self.scheme(name) if name.endswith("_proj.weight") else None
    if scheme is None:
      return self.read(name)
    of, codes = self._values, self.read_codes(name)
    return of(name, codes, scheme) if of else schemes.dequantize(codes, scheme.tile)

  @functools.cached_property
  def _starts(self) -> dict[str, int | None]:
    """{name: offset in its file} of the tensors that NumPy can read; None for others."""
    starts = {}
    for file in sorted(set(self.files.values())):
      with open(os.path.join(self.folder, file), "rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))  # of the header, which `described` has checked
        header = json.loads(f.read(size))
      for name, entry in header.items():
        is_known = name != "__metadata__" and entry["dtype"] in _DTYPE_OF
        if self.files.get(name, file) == file:
          starts[name] = 8 + size + entry["data_offsets"][0] if is_known else None
    return starts

  @functools.cached_property
  def described(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype code)} from the headers alone."""
    shapes = {}
    for file in sorted(set(self.files.values())):
      path = os.path.join(self.folder, file)
      with _open_file(path) as f:
        for name in f.keys():
          if self.files.get(name, file) == file:
            part = f.get_slice(name)
            shapes[name] = (tuple(part.get_shape()), part.get_dtype())
      lost = sorted(n for n, where in self.files.items() if where == file and n not in shapes)
      if lost:
        raise UserError(f"the index names {lost[0]} in {path}, which lacks it; fetch both again")
    return shapes


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
