"""Hugging Face folders: config.json and safetensors, in and out.

One table maps our tree to theirs. Tensors stream: import holds the destination and one tensor,
export one tensor, whatever the size of the files. Only safetensors are read; pickles never are.
"""

import dataclasses
import glob
import json
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from jax.experimental import multihost_utils

from fp8jax import axes, params
from fp8jax.errors import UserError
from fp8jax.models import rope, transformer
from fp8jax.models.config import ModelConfig, RopeScaling

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}

# Ours -> theirs. Their linears are [out, in]; ours are [in..., out...].
_LAYER = {
  "attn/norm": "input_layernorm.weight",
  "attn/q": "self_attn.q_proj.weight",
  "attn/k": "self_attn.k_proj.weight",
  "attn/v": "self_attn.v_proj.weight",
  "attn/o": "self_attn.o_proj.weight",
  "attn/q_bias": "self_attn.q_proj.bias",
  "attn/k_bias": "self_attn.k_proj.bias",
  "attn/v_bias": "self_attn.v_proj.bias",
  "attn/q_norm": "self_attn.q_norm.weight",
  "attn/k_norm": "self_attn.k_norm.weight",
  "mlp/norm": "post_attention_layernorm.weight",
  "mlp/gate": "mlp.gate_proj.weight",
  "mlp/up": "mlp.up_proj.weight",
  "mlp/down": "mlp.down_proj.weight",
}
_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


# --- config.json ---------------------------------------------------------------------------------


def read_config(folder: str) -> ModelConfig:
  """The architecture of a Hugging Face folder.

  Raises:
    FileNotFoundError: no config.json.
    UserError: an architecture or an option of one that this project does not compute.
  """
  try:
    return config_from_hf(read_json(folder, "config.json"), folder)
  except KeyError as e:
    raise UserError(f"{os.path.join(folder, 'config.json')} lacks {e}") from e


def config_from_hf(c: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
  """ModelConfig of a parsed config.json; refuses what it cannot represent, by name."""
  names = {v: k for k, v in ARCHITECTURES.items()}
  stated = c.get("architectures") or [""]
  if len(stated) != 1 or stated[0] not in names:
    raise UserError(
      f"{where}: architecture {stated[0]!r} is not supported; known: {', '.join(names)}"
    )
  architecture = names[stated[0]]
  refused = {
    "hidden_act": c.get("hidden_act", "silu") != "silu",
    "mlp_bias": bool(c.get("mlp_bias", False)),
    # Llama and Qwen3 put this bias on the output projection too.
    "attention_bias": bool(c.get("attention_bias", False)),
    "use_sliding_window": bool(c.get("use_sliding_window", False)),
    "layer_types": any(kind != "full_attention" for kind in c.get("layer_types") or ()),
    "quantization_config": c.get("quantization_config") is not None,
    "pretraining_tp": c.get("pretraining_tp", 1) != 1,
  }
  for key, is_refused in refused.items():
    if is_refused:
      raise UserError(f"{where}: {key}={c[key]!r} is not supported")
  theta, scaling = _rope_from_hf(c, where)
  heads = c["num_attention_heads"]
  return ModelConfig(
    architecture=architecture,
    vocab_size=c["vocab_size"],
    hidden_size=c["hidden_size"],
    intermediate_size=c["intermediate_size"],
    num_layers=c["num_hidden_layers"],
    num_heads=heads,
    num_kv_heads=c.get("num_key_value_heads") or heads,
    head_dim=c.get("head_dim") or c["hidden_size"] // heads,
    max_positions=c["max_position_embeddings"],
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=c["rms_norm_eps"],
    qkv_bias=architecture == "qwen2",
    qk_norm=architecture == "qwen3",
    tie_embeddings=bool(c.get("tie_word_embeddings", False)),
    init_std=c.get("initializer_range", 0.02),
  )


_ROPE_FIELDS = {
  "factor": "factor",
  "original_max_position_embeddings": "original_max_positions",
  "low_freq_factor": "low_freq_factor",
  "high_freq_factor": "high_freq_factor",
  "beta_fast": "beta_fast",
  "beta_slow": "beta_slow",
  "attention_factor": "attention_factor",
}


def _rope_from_hf(c: Mapping[str, Any], where: str) -> tuple[float, RopeScaling]:
  """Both spellings: rope_theta + rope_scaling (transformers < 5) and rope_parameters (>= 5)."""
  stated = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
  theta = float(stated.pop("rope_theta", None) or c.get("rope_theta") or 10000.0)
  kind = stated.pop("rope_type", None) or stated.pop("type", None) or "default"
  stated.pop("type", None)
  if kind not in rope.KINDS:
    raise UserError(f"{where}: rope type {kind!r} is not supported; known: {', '.join(rope.KINDS)}")
  unknown = [k for k in stated if k not in _ROPE_FIELDS]
  if unknown and kind != "default":
    raise UserError(f"{where}: rope option {unknown[0]!r} of type {kind!r} is not supported")
  if kind == "default":
    return theta, RopeScaling()
  values = {_ROPE_FIELDS[k]: v for k, v in stated.items() if v is not None}
  return theta, RopeScaling(kind, **values)


def config_to_hf(cfg: ModelConfig, dtype: str, base: Mapping[str, Any] | None = None):
  """config.json for these values; `base` supplies what a ModelConfig lacks (token ids, ...)."""
  c = dict(base or {})
  # One spelling of each rope option, the one that old and new transformers both read.
  for stale in ("rope_parameters", "layer_types", "max_window_layers", "quantization_config"):
    c.pop(stale, None)
  c.update(
    architectures=[ARCHITECTURES[cfg.architecture]],
    model_type=cfg.architecture,
    vocab_size=cfg.vocab_size,
    hidden_size=cfg.hidden_size,
    intermediate_size=cfg.intermediate_size,
    num_hidden_layers=cfg.num_layers,
    num_attention_heads=cfg.num_heads,
    num_key_value_heads=cfg.num_kv_heads,
    head_dim=cfg.head_dim,
    max_position_embeddings=cfg.max_positions,
    rope_theta=cfg.rope_theta,
    rms_norm_eps=cfg.norm_eps,
    tie_word_embeddings=cfg.tie_embeddings,
    initializer_range=cfg.init_std,
    hidden_act="silu",
    dtype=dtype,
    torch_dtype=dtype,
    rope_scaling=None,
  )
  if cfg.rope_scaling.kind != "default":
    inverse = {v: k for k, v in _ROPE_FIELDS.items()}
    fields = dataclasses.asdict(cfg.rope_scaling)
    kind = fields.pop("kind")
    defaults = dataclasses.asdict(RopeScaling())
    c["rope_scaling"] = {"rope_type": kind} | {
      inverse[k]: v for k, v in fields.items() if k == "factor" or v != defaults[k]
    }
  return c


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
  """Every tensor of the model, in file order."""
  flat = params.flatten(transformer.params(cfg))
  found = []
  for path, p in flat.items():
    if path in _TOP:
      found.append(Entry(_TOP[path], path, None, p.letters, p.inputs))
      continue
    suffix = _LAYER[path.removeprefix("layers/")]
    letters = p.letters.removeprefix("N")
    found += [
      Entry(f"model.layers.{i}.{suffix}", path, i, letters, p.inputs) for i in range(cfg.num_layers)
    ]
  return found


# --- import --------------------------------------------------------------------------------------


class Folder:
  """The safetensors of a folder, by tensor name. Opens files as needed, one tensor at a time."""

  def __init__(self, folder: str):
    self.folder = os.path.expanduser(folder)
    index = os.path.join(self.folder, "model.safetensors.index.json")
    if os.path.exists(index):
      with open(index) as f:
        self.files = dict(json.load(f)["weight_map"])
    else:
      self.files = {}
      for path in sorted(glob.glob(os.path.join(self.folder, "*.safetensors"))):
        with safetensors.safe_open(path, "numpy") as f:
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
      {f for f in self.files.values() if not os.path.exists(os.path.join(self.folder, f))}
    )
    if missing:
      raise FileNotFoundError(f"{index} names {missing[0]!r}, which is not in the folder")

  def open(self, name: str):
    return safetensors.safe_open(os.path.join(self.folder, self.files[name]), "numpy")

  def describe(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype code)} from the headers alone."""
    found = {}
    for file in sorted(set(self.files.values())):
      with safetensors.safe_open(os.path.join(self.folder, file), "numpy") as f:
        for name in f.keys():
          part = f.get_slice(name)
          found[name] = (tuple(part.get_shape()), part.get_dtype())
    return found


def check(folder: Folder, cfg: ModelConfig) -> str:
  """Refuses missing or surplus tensors and wrong shapes or dtypes, all by name.

  Returns:
    The dtype of the weights: "bfloat16", "float16" or "float32" (the widest there is).
  """
  have = folder.describe()
  want = {e.name: e.hf_shape(cfg.dims) for e in entries(cfg)}
  surplus = [n for n in have if n not in want and not _is_ignorable(n, cfg)]
  problems = [f"missing tensor {n}" for n in want if n not in have]
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
  stored = dataclasses.replace(cfg, vocab_size=read_config(source).vocab_size)
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
  sharding = layout.weight_sharding(entry.letters)
  if sharding is None:
    return jax.device_put(value)
  return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


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
  shard_bytes: int = 5_000_000_000,
):  # fmt: skip
  """Writes config.json and safetensors that transformers loads.

  Args:
    target: folder, created.
    tree: parameters.
    cfg: their architecture.
    dtype: "bfloat16", "float16" or "float32".
    base: another config.json whose remaining keys to keep.
    shard_bytes: largest file.
  """
  os.makedirs(target, exist_ok=True)
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
  weight_map = {}
  for i, group in enumerate(groups):
    name = "model.safetensors"
    if len(groups) > 1:
      name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
    weight_map.update({e.name: name for e in group})
    _write(os.path.join(target, name), group, flat, cfg, dtype)
  if len(groups) > 1:
    count = sum(int(np.prod(e.hf_shape(cfg.dims))) for g in groups for e in g)
    _write_json(
      target, "model.safetensors.index.json",
      {"metadata": {"total_size": count * size}, "weight_map": weight_map},
    )  # fmt: skip
  _write_json(target, "config.json", config_to_hf(cfg, dtype, base))


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
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  part = path + ".part"
  with open(part, "wb") as f:
    f.write(struct.pack("<Q", len(text)))
    f.write(text)
    for tensor in _theirs(group, flat, cfg, dtype):
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


def read_json(folder: str, name: str) -> dict[str, Any]:
  path = os.path.join(os.path.expanduser(folder), name)
  if not os.path.exists(path):
    raise FileNotFoundError(f"{path!r} does not exist; expected a Hugging Face folder")
  with open(path) as f:
    try:
      return json.load(f)
    except ValueError as e:
      raise UserError(f"{path} is not JSON: {e}") from e


def _write_json(folder: str, name: str, value):
  with open(os.path.join(folder, name), "w") as f:
    json.dump(value, f, indent=2)
    f.write("\n")
