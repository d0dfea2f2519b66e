"""Hugging Face folders: config.json and safetensors, in and out.

One table maps our tree to theirs. Tensors stream: import holds the destination and one tensor,
export one tensor, whatever the size of the files. Only safetensors are read; pickles never are.
"""

import dataclasses
import glob
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
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
from fp8jax.models.hf import export_folder

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
_INDEX = "model.safetensors.index.json"
_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

# Ours -> theirs; mixers name those of layers. Their linears are [out, in]; ours [in..., out...].
_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


# --- names and shapes ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
  """One of their tensors and the slot of ours that it fills.

  Attributes:
    name: theirs.
    path: ours.
    layer: index along N, or None for an unstacked parameter.
    letters: ours, without N.
    inputs: leading letters that are their second axis; None: same order, no transpose.
  """

  name: str
  path: str
  layer: int | None
  letters: str
  inputs: int | None

  def hf_shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
    sizes = [dims[x] for x in self.letters]
    if self.inputs is None:
      # Vectors are flat there: a bias over heads is one axis.
      return (sizes[0], sizes[1]) if self.letters == "VD" else (int(np.prod(sizes)),)
    return int(np.prod(sizes[self.inputs :])), int(np.prod(sizes[: self.inputs]))


def entries(cfg: ModelConfig) -> list[Entry]:
  """Every tensor of the model, in file order.

  Raises:
    UserError: a mixer of the model is unknown to Hugging Face.
  """
  for name, mixer in zip(cfg.mixers, transformer.mixers(cfg), strict=True):
    if mixer.hf_names is None:
      raise UserError(
        f"model.mixers has {name!r}, which no Hugging Face model of ours has: such weights are "
        "neither read from nor written to Hugging Face folders. Evaluate checkpoints of the run "
        "itself (--job=evaluate --workdir=...)"
      )
  names = {
    f"layers/{mixer.key}/{name}": theirs
    for mixer in transformer.mixers(cfg)
    for name, theirs in (mixer.hf_names or {}).items()
  }
  flat = params.flatten(transformer.params(cfg))
  found = []
  for path, p in flat.items():
    if path in _TOP:
      found.append(Entry(_TOP[path], path, None, p.letters, p.inputs))
      continue
    letters = p.letters.removeprefix("N")
    found += [
      Entry(f"model.layers.{i}.{names[path]}", path, i, letters, p.inputs)
      for i in range(cfg.num_layers)
    ]
  return found


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
    index = os.path.join(self.folder, _INDEX)
    if os.path.exists(index):
      listed = hf_config.read_json(self.folder, os.path.basename(index)).get("weight_map")
      if not isinstance(listed, dict) or any(not isinstance(f, str) for f in listed.values()):
        raise UserError(f"{index} has no weight_map from tensors to files; fetch it again")
      for file in set(listed.values()):
        inside(self.folder, file, f"{index}: weight_map")
      self.files = listed
    else:
      self.files = {}
      for path in sorted(glob.glob(os.path.join(self.folder, "*.safetensors"))):
        with _open_file(path) as f:
          self.files.update({name: os.path.basename(path) for name in f.keys()})
    if not self.files:
      pickles = glob.glob(os.path.join(self.folder, "*.bin")) + glob.glob(
        os.path.join(self.folder, "*.pt*")
      )
      hint = (
        f"{os.path.basename(pickles[0])} is a pickle, which is never read: convert it with "
        "transformers' save_pretrained"
        if pickles
        else "expected model.safetensors or model.safetensors.index.json"
      )
      raise FileNotFoundError(f"no safetensors in {self.folder!r}; {hint}")
    missing = sorted(
      {f for f in self.files.values() if not os.path.isfile(os.path.join(self.folder, f))}
    )
    if missing:
      raise FileNotFoundError(f"{index} names {missing[0]!r}, which is not in the folder")

  def open(self, name: str):
    return _open_file(os.path.join(self.folder, self.files[name]))

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
    The dtype of the weights: "bfloat16", "float16" or "float32" (the widest there is).
  """
  have = folder.describe()
  want = {e.name: e.hf_shape(cfg.dims) for e in entries(cfg)}
  surplus = [n for n in have if n not in want and not _is_ignorable(n, cfg)]
  # A tensor that the index does not list is not read.
  problems = [f"missing tensor {n}" for n in want if n not in have or n not in folder.files]
  problems += [f"surplus tensor {n}" for n in surplus]
  problems += [
    f"{n} has shape {have[n][0]}, expected {want[n]}"
    for n in want
    if n in have and have[n][0] != want[n]
  ]
  codes = {v: k for k, v in _CODES.items()}
  problems += [
    f"{n} has dtype {have[n][1]}, expected one of {', '.join(codes)}"
    for n in want
    if n in have and have[n][1] not in codes
  ]
  if problems:
    shown = "\n".join(f"  - {p}" for p in problems[:20])
    more = f"\n  (+{len(problems) - 20} more)" if len(problems) > 20 else ""
    raise UserError(
      f"{folder.folder!r} does not hold the {cfg.architecture} model its config "
      f"describes:\n{shown}{more}"
    )
  dtypes = {codes[have[n][1]] for n in want}
  return next(d for d in ("float32", "float16", "bfloat16") if d in dtypes)


def _is_ignorable(name: str, cfg: ModelConfig) -> bool:
  """Buffers that old files carry, and a tied head written out: both derive from what is read."""
  return name.endswith("rotary_emb.inv_freq") or (cfg.tie_embeddings and name == _TOP["head"])


def load_params(source: str, cfg: ModelConfig, layout: axes.Layout = axes.LOCAL):
  """float32 parameters of a Hugging Face folder, sharded at birth.

  A vocabulary that cfg makes larger than the folder's is filled up with zero rows. Host memory: the
  destination plus one tensor.

  Returns:
    (parameter tree, dtype name of the file's weights)
  """
  folder = Folder(source)
  stored = dataclasses.replace(cfg, vocab_size=hf_config.read_config(source).vocab_size)
  dtype = check(folder, stored)
  declaration = transformer.params(cfg)
  flat_params = params.flatten(declaration)
  flat = {}
  for entry in entries(cfg):
    param = flat_params[entry.path]
    tensor = _read(folder, entry, cfg.dims, layout)
    if entry.layer is None:
      flat[entry.path] = tensor
      continue
    if entry.path not in flat:
      flat[entry.path] = _zeros(param, cfg.dims, layout)
    # Donated: the stack is updated in place, a layer at a time.
    flat[entry.path] = _put(flat[entry.path], tensor, entry.layer)
  if cfg.tie_embeddings and _TOP["head"] in folder.files:
    _check_tied(folder)
  return params.unflatten({path: flat[path] for path in flat_params}), dtype


@jax.jit(donate_argnums=0)
def _put(stack, tensor, index):
  return jax.lax.dynamic_update_index_in_dim(stack, tensor, index, 0)


def _zeros(param: params.Param, dims, layout: axes.Layout):
  sharding = layout.weight_sharding(param.letters)
  return jnp.zeros(params.shape(param, dims), jnp.float32, device=sharding)


def _read(folder: Folder, entry: Entry, dims, layout: axes.Layout):
  """One tensor in our order and dtype, on the devices that hold its parameter."""
  with folder.open(entry.name) as f:
    value = _to_ours(f.get_tensor(entry.name), entry, dims)
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
  with folder.open(_TOP["head"]) as head, folder.open(_TOP["embed"]) as embed:
    if not np.array_equal(head.get_tensor(_TOP["head"]), embed.get_tensor(_TOP["embed"])):
      raise UserError(
        f"{folder.folder!r}: tie_word_embeddings is true but {_TOP['head']} differs from "
        f"{_TOP['embed']}"
      )


# --- export --------------------------------------------------------------------------------------


def save_params(
  target: str, tree, cfg: ModelConfig, dtype: str, base: Mapping[str, Any] | None = None,
  shard_bytes: int = 5_000_000_000, source: str = "",
):  # fmt: skip
  """Writes config.json and safetensors that transformers loads.

  Args:
    target: folder, created, or one that an earlier call wrote: its weights are removed. Every
      process must call this, the first writes.
    tree: parameters.
    cfg: their architecture.
    dtype: "bfloat16", "float16" or "float32".
    base: another config.json whose remaining keys to keep.
    shard_bytes: largest file.
    source: folder whose tokenizer and settings to copy; "" for none.

  Raises:
    UserError: the folder holds files that are not of an earlier export.
  """
  is_writer = jax.process_index() == 0
  flat = params.flatten(tree)
  size = np.dtype(DTYPES[dtype]).itemsize
  groups, total = [[]], 0
  for entry in entries(cfg):
    nbytes = int(np.prod(entry.hf_shape(cfg.dims))) * size
    if groups[-1] and total + nbytes > shard_bytes:
      groups.append([])
      total = 0
    groups[-1].append(entry)
    total += nbytes
  names = ["model.safetensors"]
  if len(groups) > 1:
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
  if is_writer:
    copied = companions(source) if source else []
    export_folder.claim(target, [*names, *copied, _INDEX, "config.json"])
    for name in copied:
      shutil.copyfile(os.path.join(hub.local(source), name), os.path.join(target, name))
  weight_map = {}
  for name, group in zip(names, groups):
    weight_map.update({e.name: name for e in group})
    _write(os.path.join(target, name), group, flat, cfg, dtype)
  if not is_writer:
    return
  if len(groups) > 1:
    count = sum(int(np.prod(e.hf_shape(cfg.dims))) for g in groups for e in g)
    hf_config.write_json(
      target, _INDEX,
      {"metadata": {"total_size": count * size}, "weight_map": weight_map},
    )  # fmt: skip
  hf_config.write_json(target, "config.json", hf_config.config_to_hf(cfg, dtype, base))


def _write(path: str, group: list[Entry], flat, cfg: ModelConfig, dtype: str):
  """The safetensors format, a tensor at a time: safetensors' own writer wants all of them at once.

  8 bytes little-endian header size, a JSON header padded with spaces, the tensors' bytes
  (https://github.com/huggingface/safetensors#format).
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  offset = 0
  for entry in group:
    shape = entry.hf_shape(cfg.dims)
    end = offset + int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize
    header[entry.name] = {
      "dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]
    }  # fmt: skip
    offset = end
  tensors = _theirs(group, flat, cfg, dtype)
  if jax.process_index() != 0:
    for _ in tensors:  # the writer needs the shards that are here
      pass
    return
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  part = path + ".part"
  with open(part, "wb") as f:
    f.write(struct.pack("<Q", len(text)))
    f.write(text)
    for tensor in tensors:
      f.write(tensor.tobytes())
  os.replace(part, path)


def _theirs(group: list[Entry], flat, cfg: ModelConfig, dtype: str) -> Iterator[np.ndarray]:
  for entry in group:
    value = flat[entry.path]
    value = _on_host(value if entry.layer is None else value[entry.layer])
    shape = entry.hf_shape(cfg.dims)
    if entry.inputs is not None:
      value = value.reshape(shape[::-1]).T
    yield np.ascontiguousarray(value.reshape(shape).astype(DTYPES[dtype]))


def _on_host(x) -> np.ndarray:
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


def keep_source_files(source: str, target: str):
  """Copies the companions of a folder's weights."""
  os.makedirs(target, exist_ok=True)
  for name in companions(source):
    shutil.copyfile(os.path.join(hub.local(source), name), os.path.join(target, name))
