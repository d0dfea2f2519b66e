"""Hugging Face folders: config.json and safetensors, in and out.

One table maps our tree to theirs. Tensors stream: import holds the destination and one tensor,
export one tensor, whatever the size of the files. Only safetensors are read; pickles never are.
"""

import dataclasses
import functools
import glob
import os
import shutil
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils

from fp8jax import axes, hub, params
from fp8jax.errors import UserError, inside
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import export_folder, fp8_base, fp8_export, fp8_formats, names, shards
from fp8jax.models.hf.names import Entry

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Dtypes that safetensors' NumPy reader does not know.
_FP8_DTYPES = {
  fp8_formats.WEIGHT_CODE: fp8_formats.WEIGHT_DTYPE,
  "F8_E8M0": fp8_formats.SCALE_DTYPES["F8_E8M0"],
}


# --- import --------------------------------------------------------------------------------------


def _open_file(path: str):
  import safetensors  # extra `hf`

  try:
    return safetensors.safe_open(path, "numpy")
  except safetensors.SafetensorError as e:
    raise UserError(f"{path} is no whole safetensors file ({e}); fetch it again") from e


class Folder:
  """The safetensors of a folder, by tensor name. Opens files as needed, one tensor at a time."""

  def __init__(self, folder: str):
    self.folder = hub.local(folder)
    index = os.path.join(self.folder, shards.INDEX)
    if os.path.exists(index):
      listed = hf_config.read_json(self.folder, os.path.basename(index)).get("weight_map")
      if not isinstance(listed, dict) or any(not isinstance(f, str) for f in listed.values()):
        raise UserError(f"{index} has no weight_map from tensors to files; fetch it again")
      for file in set(listed.values()):
        inside(self.folder, file, f"{index}: weight_map")
      single = os.path.join(self.folder, shards.SINGLE)
      if os.path.exists(single) and shards.SINGLE not in listed.values():
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
    has_config = os.path.isfile(os.path.join(self.folder, "config.json"))
    self.fp8 = fp8_formats.of_config(
      hf_config.read_json(self.folder, "config.json") if has_config else {},
      os.path.join(self.folder, "config.json"),
    )
    if not self.files:
      pickles = glob.glob(os.path.join(self.folder, "*.bin")) + glob.glob(
        os.path.join(self.folder, "*.pt*")
      )
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
    with self.open(name) as f:
      code = f.get_slice(name).get_dtype()
      if code not in _FP8_DTYPES:
        return f.get_tensor(name)
    path = os.path.join(self.folder, self.files[name])
    return shards.read_bytes(path, name, _FP8_DTYPES[code])

  def is_fp8(self, name: str) -> bool:
    """Whether a tensor is stored as E4M3 codes."""
    with self.open(name) as f:
      return f.get_slice(name).get_dtype() == fp8_formats.WEIGHT_CODE

  def read_float(self, name: str) -> np.ndarray:
    """A weight as numbers: of an FP8 matrix code * scale in float32, else as it is stored."""
    value = self.read(name)
    if value.dtype != fp8_formats.WEIGHT_DTYPE or self.fp8 is None:
      return value
    scale = self.read(self.fp8.scale_name(name))
    return fp8_formats.dequantize(value, scale, self.fp8, f"{self.folder!r}: {name}")

  def describe(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype code)} from the headers alone."""
    found = {}
    for file in sorted(set(self.files.values())):
      path = os.path.join(self.folder, file)
      with _open_file(path) as f:
        for name in f.keys():
          if self.files.get(name, file) == file:
            part = f.get_slice(name)
            found[name] = (tuple(part.get_shape()), part.get_dtype())
      lost = sorted(n for n, where in self.files.items() if where == file and n not in found)
      if lost:
        raise UserError(f"the index names {lost[0]} in {path}, which lacks it; fetch both again")
    return found


def check(folder: Folder, cfg: ModelConfig) -> str:
  """Refuses missing or surplus tensors and wrong shapes or dtypes, all by name.

  Returns:
    The dtype of the weights: "bfloat16", "float16" or "float32", the narrowest that holds all.
  """
  have = folder.describe()
  want = {e.name: e for e in names.entries(cfg)}
  in_fp8 = [n for n, e in want.items() if _is_fp8(have.get(n)) and e.inputs is not None]
  scales = {folder.fp8.scale_name(n) for n in in_fp8} if folder.fp8 else set()
  scales |= {n.removesuffix("weight") + "input_scale" for n in in_fp8}
  surplus = [n for n in have if n not in want and n not in scales and not _is_ignorable(n, cfg)]
  # A tensor that the index does not list is not read.
  problems = [f"missing tensor {n}" for n in want if n not in have or n not in folder.files]
  problems += [f"surplus tensor {n}" for n in surplus]
  problems += [
    f"{n} has shape {have[n][0]}, expected {e.hf_shape(cfg.dims)}"
    for n, e in want.items()
    if n in have and have[n][0] != e.hf_shape(cfg.dims)
  ]
  codes = {v: k for k, v in _CODES.items()}
  problems += [
    f"{n} has dtype {have[n][1]}, expected one of {', '.join(codes)}"
    for n in want
    if n in have and n not in in_fp8 and have[n][1] not in codes
  ]
  problems += [p for n in in_fp8 for p in fp8_formats.problems(n, have, folder.fp8)]
  if problems:
    shown = "\n".join(f"  - {p}" for p in problems[:20])
    more = f"\n  (+{len(problems) - 20} more)" if len(problems) > 20 else ""
    raise UserError(
      f"{folder.folder!r} does not hold the {cfg.architecture} model its config "
      f"describes:\n{shown}{more}"
    )
  dtypes = {codes[have[n][1]] for n in want if n not in in_fp8}
  return dtypes.pop() if len(dtypes) == 1 else "float32"  # no 16-bit format holds the other's


def _is_fp8(described: tuple[tuple[int, ...], str] | None) -> bool:
  return (
    described is not None and described[1] == fp8_formats.WEIGHT_CODE and (len(described[0]) == 2)
  )


def _is_ignorable(name: str, cfg: ModelConfig) -> bool:
  """Buffers that old files carry, and a tied head written out: both derive from what is read."""
  return name.endswith("rotary_emb.inv_freq") or (cfg.tie_embeddings and name == names.TOP["head"])


def load_params(
  source: str, cfg: ModelConfig, layout: axes.Layout = axes.LOCAL, codes_of: Collection[str] = ()
):
  """float32 parameters of a Hugging Face folder, sharded at birth.

  A vocabulary that cfg makes larger than the folder's is filled up with zero rows. Host memory: the
  destination plus one tensor. Adapters of cfg.lora are not in the tree. Where its base is
  "block_fp8" and the folder has FP8 blocks, linear layers of layers are StoredMatrix, to the bit.

  Args:
    codes_of: paths of weights, "layers/mlp/up", that are StoredMatrix too where the folder has FP8
      blocks of every layer's.

  Returns:
    (parameter tree, dtype name of the file's weights)
  """
  folder = Folder(source)
  stored = dataclasses.replace(cfg, vocab_size=hf_config.read_config(source).vocab_size)
  dtype = check(folder, stored)
  declaration = transformer.params(cfg)
  flat_params = params.flatten(declaration)
  flat = {}
  entries = names.entries(cfg)
  in_codes = _in_codes(folder, entries, codes_of)
  for entry in entries:
    param = flat_params[entry.path]
    if entry.path in in_codes or _stays_in_codes(folder, entry, cfg):
      codes = fp8_base.read(folder, entry, cfg.dims, layout)
      flat[entry.path] = fp8_base.put(flat.get(entry.path), codes, entry, param, cfg.dims, layout)
      continue
    tensor = _read(folder, entry, cfg.dims, layout)
    if entry.layer is None:
      flat[entry.path] = tensor
      continue
    if entry.path not in flat:
      flat[entry.path] = _zeros(param, cfg.dims, layout)
    # Donated: the stack is updated in place, a layer at a time.
    flat[entry.path] = _put(flat[entry.path], tensor, entry.layer)
  if cfg.tie_embeddings and names.TOP["head"] in folder.files:
    _check_tied(folder)
  return params.unflatten({path: flat[path] for path in flat_params if path in flat}), dtype


def _in_codes(folder: Folder, entries, paths: Collection[str]) -> set[str]:
  """Those of the paths whose matrices all are FP8 blocks in the folder."""
  if not paths or not fp8_base.has_blocks(folder.fp8):
    return set()
  wide = {e.path for e in entries if e.path in paths and not folder.is_fp8(e.name)}
  return set(paths) - wide


def _stays_in_codes(folder: Folder, entry: Entry, cfg: ModelConfig) -> bool:
  """Whether a matrix is read as it is stored: the frozen base of adapters, from FP8 blocks."""
  if cfg.lora is None or cfg.lora.base != "block_fp8" or entry.layer is None:
    return False
  is_linear = entry.inputs is not None
  return is_linear and fp8_base.has_blocks(folder.fp8) and folder.is_fp8(entry.name)


@jax.jit(donate_argnums=0)
def _put(stack, tensor, index):
  return jax.lax.dynamic_update_index_in_dim(stack, tensor, index, 0)


def _zeros(param: params.Param, dims, layout: axes.Layout):
  sharding = layout.weight_sharding(param.letters)
  return jnp.zeros(params.shape(param, dims), jnp.float32, device=sharding)


def _read(folder: Folder, entry: Entry, dims, layout: axes.Layout):
  """One tensor in our order and dtype, on the devices that hold its parameter."""
  value = _to_ours(folder.read_float(entry.name), entry, dims)
  _check_finite(value, f"{folder.folder!r}: {entry.name}")
  sharding = layout.weight_sharding(entry.letters)
  if sharding is None:
    return jax.device_put(value)
  return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _check_finite(value: np.ndarray, what: str):
  """Refuses NaN and infinities. The sum shows them in one reading; it may also overflow itself."""
  with np.errstate(all="ignore"):
    total = value.sum()
  if np.isfinite(total):
    return
  bad = value.size - np.count_nonzero(np.isfinite(value))
  if bad:
    raise UserError(
      f"{what} has {bad} of {value.size} values that are NaN or infinite; fetch the file again, or "
      "start from weights of an earlier checkpoint"
    )


def _to_ours(tensor: np.ndarray, entry: Entry, dims) -> np.ndarray:
  """Their order -> ours, float32, with zero rows for a padded vocabulary."""
  tensor = tensor.T if entry.inputs is not None else tensor
  if "V" in entry.letters:
    axis = entry.letters.index("V")
    padding = [(0, 0)] * tensor.ndim
    padding[axis] = (0, dims["V"] - tensor.shape[axis])
    tensor = np.pad(tensor, padding)
  shape = tuple(dims[x] for x in entry.letters)
  return np.ascontiguousarray(tensor.reshape(shape), np.float32)


def _check_tied(folder: Folder):
  with folder.open(names.TOP["head"]) as head, folder.open(names.TOP["embed"]) as embed:
    if not np.array_equal(head.get_tensor(names.TOP["head"]), embed.get_tensor(names.TOP["embed"])):
      raise UserError(
        f"{folder.folder!r}: tie_word_embeddings is true but {names.TOP['head']} differs from "
        f"{names.TOP['embed']}"
      )


# --- export --------------------------------------------------------------------------------------


def save_params(
  target: str, tree, cfg: ModelConfig, dtype: str, base: Mapping[str, Any] | None = None,
  shard_bytes: int = 5_000_000_000, source: str = "", fp8: fp8_export.Fp8Plan | None = None,
  operands=None, extra: Collection[str] = (),
):  # fmt: skip
  """Writes config.json and safetensors that transformers loads.

  Args:
    target: folder, created, or one that an earlier call wrote: its weights are removed. Every
      process must call this, the first writes.
    tree: parameters.
    cfg: their architecture.
    dtype: "bfloat16", "float16" or "float32"; of the unquantized tensors.
    base: another config.json whose remaining keys to keep.
    shard_bytes: largest file.
    source: folder whose tokenizer and settings to copy; "" for none.
    fp8: the matrices that are FP8; None for none.
    operands: parameters as GEMMs read them, for FP8 codes; default tree. They differ where a
      master has more bits than the GEMM reads.
    extra: names of files that the caller writes beside these.

  Raises:
    UserError: the folder holds files that are not of an earlier export.
  """
  config = hf_config.config_to_hf(cfg, dtype, base, fp8 and fp8.to_config())
  flat = params.flatten(tree)
  read = params.flatten(tree if operands is None else operands)
  files = shards.split(_pieces(flat, read, cfg, dtype, fp8), shard_bytes)
  if jax.process_index() == 0:
    copied = companions(source) if source else []
    export_folder.claim(target, [*files, *copied, shards.INDEX, "config.json", *extra])
    for name in copied:
      shutil.copyfile(os.path.join(hub.local(source), name), os.path.join(target, name))
  for name, pieces in files.items():
    shards.write(os.path.join(target, name), pieces)
  if jax.process_index() != 0:
    return
  if len(files) > 1:
    hf_config.write_json(target, shards.INDEX, shards.index(files))
  hf_config.write_json(target, "config.json", config)


def _pieces(flat, read, cfg: ModelConfig, dtype: str, fp8) -> list[shards.Piece]:
  """The tensors of the model in file order, made as they are written."""
  found, by_name = [], {e.name: e for e in names.entries(cfg)}
  for entry in by_name.values():
    shape = entry.hf_shape(cfg.dims)
    matrix = fp8 and fp8.matrices.get(entry.name)
    if matrix is None:
      make = functools.partial(_unquantized, entry, flat, shape, dtype)
      found.append(shards.Piece(((entry.name, _CODES[dtype], shape),), make))
      continue
    shared = [by_name[n] for n in matrix.shared]
    make = functools.partial(_fp8, entry, read, shape, matrix, shared, fp8.fp8)
    found.append(shards.Piece(fp8_export.tensors(entry.name, shape, matrix, fp8.fp8), make))
  return found


def _unquantized(entry: Entry, flat, shape, dtype: str) -> list[np.ndarray]:
  value = _of_layer(entry, flat)
  if entry.inputs is not None:
    value = value.reshape(shape[::-1]).T
  return [np.ascontiguousarray(value.reshape(shape).astype(DTYPES[dtype]))]


def _fp8(entry: Entry, read, shape, matrix, shared: list[Entry], fp8) -> list[np.ndarray]:
  if matrix.stored is not None:
    return fp8_export.quantized(None, matrix, None, fp8)
  amax = matrix.amax
  if shared:
    amax = max(float(np.max(np.abs(_of_layer(e, read)))) for e in shared)
  return fp8_export.quantized(_of_layer(entry, read).reshape(shape[::-1]), matrix, amax, fp8)


def _of_layer(entry: Entry, flat) -> np.ndarray:
  """The parameter on the host, in our order."""
  value = flat[entry.path]
  return on_host(value if entry.layer is None else value[entry.layer])


def on_host(x) -> np.ndarray:
  """A whole array, also where processes share its shards (then all of them call this)."""
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(jax.device_get(x))


def companions(source: str) -> list[str]:
  """The files of an export beside the weights: config.json, tokenizer, generation settings."""
  source = hub.local(source)
  return [
    name
    for name in sorted(os.listdir(source))
    if name.endswith((".json", ".txt", ".model", ".jinja"))
    and "index" not in name
    and name != export_folder.MANIFEST
    and os.path.isfile(os.path.join(source, name))
    and os.path.getsize(os.path.join(source, name)) < 64 << 20
  ]


# The files of a tokenizer among the companions of a folder.
_OF_TOKENIZER = frozenset((
  "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
  "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
  "chat_template.json",
))  # fmt: skip


def replace_tokenizer(source: str, target: str):
  """Puts the tokenizer of a folder in the place of another folder's."""
  for name in _OF_TOKENIZER.intersection(os.listdir(target)):
    os.remove(os.path.join(target, name))
  for name in _OF_TOKENIZER.intersection(companions(source)):
    shutil.copyfile(os.path.join(hub.local(source), name), os.path.join(target, name))


def keep_source_files(source: str, target: str):
  """Copies the companions of a folder's weights."""
  os.makedirs(target, exist_ok=True)
  for name in companions(source):
    shutil.copyfile(os.path.join(hub.local(source), name), os.path.join(target, name))
