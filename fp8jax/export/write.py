"""The files of an export: a model or its adapters, and what lies beside the weights.

Tensors stream: whatever the size of the files, the host holds one tensor. A file of safetensors is
8 bytes little-endian header size, a JSON header padded with spaces, and the tensors' bytes
(https://github.com/huggingface/safetensors#format); safetensors' own writer wants all tensors at
once.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fp8jax import console as console_lib
from fp8jax import hub, params, records
from fp8jax.data.chat import template
from fp8jax.errors import UserError
from fp8jax.export import folder, matrices
from fp8jax.export import fp8 as fp8_lib
from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names, peft, scheme_config, schemes
from fp8jax.models.hf.names import Entry
from fp8jax.models.hf.tensors import CODES, DTYPES, INDEX, SINGLE


@dataclasses.dataclass(frozen=True)
class Piece:
  """Tensors that are made together and lie side by side in a file.

  Attributes:
    tensors: (name, dtype code, shape) of each.
    make: gives their values in this order, dtypes included.
  """

  tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
  make: Callable[[], Sequence[np.ndarray]]

  @property
  def nbytes(self) -> int:
    return sum(schemes.nbytes(code, shape) for _, code, shape in self.tensors)


# {name: its tensors, a JSON document, the path of a file to copy, or None: no file this time}.
Files = dict[str, list[Piece] | dict[str, Any] | str | None]


def save(target: str, files: Files):
  """Writes an export as a whole, see folder.replacing; every process must call this."""
  with folder.replacing(target) as part:
    write(part, files)


def write(part: str, files: Files, later: Collection[str] = ()):
  """Writes files into the folder of an export; every process must call this, the first writes.

  Args:
    part: the folder, see folder.claim.
    later: names of files that the caller adds.
  """
  if jax.process_index() == 0:
    folder.claim(part, [*files, *later])
  _put(part, files)


def _put(target: str, files: Files):
  for name, content in files.items():
    path = os.path.join(target, name)
    if isinstance(content, list):
      _write_tensors(path, content)
    elif isinstance(content, str) and jax.process_index() == 0:
      shutil.copyfile(content, path)
    elif content is not None and jax.process_index() == 0:
      hf_config.write_json(target, name, content)


# --- a model -------------------------------------------------------------------------------------


def model(
  tree, cfg: ModelConfig, dtype: str, base: Mapping[str, Any] | None = None,
  shard_bytes: int = 5_000_000_000, source: str = "", fp8: fp8_lib.Plan | None = None,
  operands=None, rows: matrices.Rows | None = None,
) -> Files:  # fmt: skip
  """config.json and safetensors that transformers loads.

  Args:
    dtype: "bfloat16", "float16" or "float32"; of the unquantized tensors.
    base: another config.json whose remaining keys to keep.
    shard_bytes: largest file.
    source: folder whose tokenizer and settings to copy; "" for none.
    fp8: the matrices that are quantized; None for none.
    operands: parameters as GEMMs read them, for codes; default tree. They differ where a
      master has more bits than the GEMM reads.
    rows: gets {weight: matrices.row} of every quantized matrix as it is written.

  Raises:
    UserError: transformers refuses such a model.
  """
  head = names.SCORE if cfg.reward_head else names.TOP["head"]
  quantization = fp8 and fp8.to_config(head.removesuffix(".weight"))
  config = hf_config.config_to_hf(cfg, dtype, base, quantization)
  flat = params.flatten(tree)
  read = flat if operands is None else params.flatten(operands)
  pieces = [*_pieces(names.entries(cfg), flat, cfg, dtype, fp8, read, rows)]
  for name, scale in fp8.kv_scales.items() if fp8 else ():
    pieces.append(Piece(((name, "F32", (1,)),), functools.partial(_one, scale)))
  shards = _split(pieces, shard_bytes)
  index = _index(shards) if len(shards) > 1 else None
  # Of a source, and of no use beside other weights.
  theirs = {
    name: c for name, c in companions(source).items() if name != scheme_config.MODELOPT_FILE
  }
  files = theirs | shards | {INDEX: index, "config.json": config}
  if quantization and quantization["quant_method"] == schemes.MODELOPT:
    files[scheme_config.MODELOPT_FILE] = scheme_config.modelopt_file(quantization)
  return files


def _pieces(
  entries: list[Entry], flat, cfg: ModelConfig, dtype: str, fp8: fp8_lib.Plan | None = None,
  operands=None, rows: matrices.Rows | None = None,
) -> Iterator[Piece]:  # fmt: skip
  """The tensors in file order, made as they are written."""
  by_name = {e.name: e for e in entries}
  for entry in entries:
    shape = entry.hf_shape(cfg.dims)
    matrix = fp8.matrices.get(entry.name) if fp8 else None
    if fp8 is None or matrix is None:
      make = functools.partial(_unquantized, entry, flat, shape, dtype)
      yield Piece(((entry.name, CODES[dtype], shape),), make)
    else:
      shared = [by_name[n] for n in matrix.shared]
      make = functools.partial(_quantized, entry, flat, operands, shape, matrix, shared, rows)
      has_inputs = matrix.input_scale is not None
      yield Piece(matrix.scheme.tensors(entry.name, shape, has_inputs), make)


def _one(scale: float) -> list[np.ndarray]:
  return [np.full(1, scale, np.float32)]


def _unquantized(entry: Entry, flat, shape, dtype: str) -> list[np.ndarray]:
  value = _of_layer(entry, flat)
  if entry.inputs is not None:
    value = value.reshape(shape[::-1]).T
  return [np.ascontiguousarray(value.reshape(shape).astype(DTYPES[dtype]))]


def _quantized(entry: Entry, flat, read, shape, matrix: fp8_lib.Matrix, shared, rows):
  """The tensors of a matrix; `rows`, if any, gets what they have of the weight."""
  amax, w = matrix.amax, None
  if matrix.stored is None:
    w = _of_layer(entry, read).reshape(shape[::-1])
    if shared:
      amax = max(float(np.max(np.abs(_of_layer(e, read)))) for e in shared)
  codes = fp8_lib.codes(w, matrix, amax)
  if rows is not None:
    rows[entry.name] = matrices.row(_of_layer(entry, flat).reshape(shape[::-1]), codes, matrix)
  return matrix.scheme.packed(codes, matrix.input_scale)


def _of_layer(entry: Entry, flat) -> np.ndarray:
  """The parameter on the host, in our order."""
  value = flat[entry.path]
  return params.on_host(value if entry.layer is None else value[entry.layer])


# --- adapters ------------------------------------------------------------------------------------


def frozen_base(config: Mapping[str, Any]) -> str:
  """The folder that a run's adapters were trained beside, "" where it is another run's weights.

  Args:
    config: of the run, flat; adapters that came with init.workdir have the base of that run.
  """
  began = config.get("init.workdir")
  if not began:
    return config.get("init.hf", "")
  workdir, name = os.path.expanduser(began), "config.json"
  why = f"the adapters were trained beside the weights of {began}"
  then = "export that run, and load them beside its folder"
  if not os.path.exists(os.path.join(workdir, name)):
    why = f"init.workdir={began!r} has no config.json, which would name the adapters' base"
    then = "write it there if you know it"
  else:
    other = hf_config.read_json(workdir, name).get("resolved", {})
    if other.get("model.lora.rank"):
      return frozen_base(other)
  console_lib.console(stderr=True).print(f"{why}: base_model_name_or_path is null; {then}")
  return ""


def adapters(tree, cfg: ModelConfig, base_model: str) -> Files:
  """The adapters of a parameter tree in PEFT's format, in float32.

  Args:
    tree: parameters of the model with cfg.lora.
    base_model: folder or id of the frozen model; "" for none.
  """
  if cfg.lora is None:
    raise UserError("a model without adapters has none to write; set model.lora.rank")
  entries = names.adapter_entries(cfg)
  alpha = cfg.lora.alpha
  return {peft.CONFIG: {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model or None,
    "r": cfg.lora.rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
    "target_modules": sorted({e.name.split(".")[-3] for e in entries}), "bias": "none",
    "lora_dropout": 0.0, "fan_in_fan_out": False, "use_rslora": False, "use_dora": False,
    "modules_to_save": None, "init_lora_weights": True, "inference_mode": True,
  }, peft.WEIGHTS: [*_pieces(entries, params.flatten(tree), cfg, "float32")]}  # fmt: skip


# --- files of safetensors ------------------------------------------------------------------------


def _split(pieces: Iterable[Piece], shard_bytes: int) -> dict[str, list[Piece]]:
  """{file name: its pieces}, in order, no file larger than shard_bytes unless one piece is."""
  groups: list[list[Piece]] = [[]]
  total = 0
  for piece in pieces:
    if groups[-1] and total + piece.nbytes > shard_bytes:
      groups.append([])
      total = 0
    groups[-1].append(piece)
    total += piece.nbytes
  if len(groups) == 1:
    return {SINGLE: groups[0]}
  return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _index(shards: Mapping[str, list[Piece]]) -> dict[str, Any]:
  """The content of INDEX."""
  pieces = [(file, piece) for file, some in shards.items() for piece in some]
  return {
    "metadata": {"total_size": sum(p.nbytes for _, p in pieces)},
    "weight_map": {name: file for file, p in pieces for name, _, _ in p.tensors},
  }


def _write_tensors(path: str, pieces: list[Piece]):
  header: dict = {"__metadata__": {"format": "pt"}}
  offset = 0
  for name, code, shape in (t for piece in pieces for t in piece.tensors):
    end = offset + schemes.nbytes(code, shape)
    header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
    offset = end
  made = (tensor for piece in pieces for tensor in piece.make())
  if jax.process_index() != 0:
    for _ in made:  # the writer needs the shards that are here
      pass
    return
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with records.replacing(path) as part, open(part, "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for tensor in made:
      f.write(tensor.tobytes())


# --- beside the weights --------------------------------------------------------------------------

# The files of a tokenizer among the companions of a folder.
_OF_TOKENIZER = frozenset((
  "tokenizer.json", template.CONFIG, "tokenizer.model", "special_tokens_map.json",
  "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", template.FILE,
  "chat_template.json",
))  # fmt: skip


def companions(source: str) -> Files:
  """The files beside the weights of a folder: config.json, tokenizer, settings; {} without one.

  The templates of additional_chat_templates/ become a list, which one file carries.
  """
  if not source:
    return {}
  source = hub.local(source)
  paths = {name: os.path.join(source, name) for name in sorted(os.listdir(source))}
  files: Files = {
    name: path
    for name, path in paths.items()
    if name.endswith((".json", ".txt", ".model", ".jinja"))
    and "index" not in name
    and name not in (folder.MANIFEST, matrices.FILE)
    and os.path.isfile(path)
    and os.path.getsize(path) < 64 << 20
  }
  if os.path.isdir(os.path.join(source, template.FOLDER)):
    config = hf_config.read_json(source, template.CONFIG) if template.CONFIG in files else {}
    with contextlib.suppress(UserError):  # of no use to anything here
      named, _ = template.templates(source, config)
      listed = [{"name": name, "template": text} for name, text in named.items()]
      files[template.CONFIG] = {**config, "chat_template": listed}
      files.pop(template.FILE, None)
  return files


def tokenizer_files(source: str) -> Files:
  """Those of the companions of a folder that belong to a tokenizer."""
  return {name: file for name, file in companions(source).items() if name in _OF_TOKENIZER}


def keep_companions(source: str, target: str, tokenizer: str):
  """Copies the companions of a folder, with the tokenizer of another one; "" leaves its own."""
  files = companions(source)
  if tokenizer:
    theirs = tokenizer_files(tokenizer)
    files = {name: file for name, file in files.items() if name not in _OF_TOKENIZER} | theirs
  os.makedirs(target, exist_ok=True)
  for name in _OF_TOKENIZER.intersection(os.listdir(target)) - files.keys():
    os.remove(os.path.join(target, name))
  _put(target, files)
