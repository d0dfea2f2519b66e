"""config.json of Hugging Face folders <-> ModelConfig; refuses by name what it cannot represent."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from fp8jax import errors, hub
from fp8jax.errors import UserError, check_number
from fp8jax.models import rope
from fp8jax.models.config import LARGEST, ModelConfig, RopeScaling
from fp8jax.models.hf import fp8_formats

ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}


def read_config(folder: str) -> ModelConfig:
  """The architecture of a Hugging Face folder.

  Raises:
    FileNotFoundError: no config.json.
    UserError: an architecture or an option of one that this project does not compute.
  """
  path = os.path.join(folder, "config.json")
  try:
    return config_from_hf(read_json(folder, "config.json"), path)
  except KeyError as e:
    raise UserError(f"{path} lacks {e}") from e


def config_from_hf(c: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
  """ModelConfig of a parsed config.json; refuses what it cannot represent, by name."""
  names = {v: k for k, v in ARCHITECTURES.items()}
  stated = c.get("architectures")
  first = stated[0] if isinstance(stated, list) and len(stated) == 1 else stated
  if not isinstance(first, str) or first not in names:
    raise UserError(f"{where}: architecture {first!r} is not supported; known: {', '.join(names)}")
  architecture = names[first]
  _check_values(c, where)
  refused = {
    "hidden_act": c.get("hidden_act", "silu") != "silu",
    "mlp_bias": bool(c.get("mlp_bias", False)),
    # Llama and Qwen3 put this bias on the output projection too.
    "attention_bias": bool(c.get("attention_bias", False)),
    "use_sliding_window": bool(c.get("use_sliding_window", False)),
    "layer_types": not _is_full_attention(c.get("layer_types")),
    "pretraining_tp": c.get("pretraining_tp", 1) != 1,
  }
  for key, is_refused in refused.items():
    if is_refused:
      raise UserError(f"{where}: {key}={c[key]!r} is not supported")
  fp8_formats.of_config(c, where)
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
    head_dim=c.get("head_dim") or _head_dim(c, where),
    max_positions=c["max_position_embeddings"],
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=c["rms_norm_eps"],
    qkv_bias=architecture == "qwen2",
    qk_norm=architecture == "qwen3",
    tie_embeddings=bool(c.get("tie_word_embeddings", False)),
    init_std=0.02 if c.get("initializer_range") is None else c["initializer_range"],
  )


_REMEDY = "correct it, or fetch the file again"
# Their names of our sizes.
_SIZES = {
  "vocab_size": "vocab_size",
  "hidden_size": "hidden_size",
  "intermediate_size": "intermediate_size",
  "num_hidden_layers": "num_layers",
  "num_attention_heads": "num_heads",
  "num_key_value_heads": "num_kv_heads",
  "head_dim": "head_dim",
  "max_position_embeddings": "max_positions",
}
# The smallest and largest value of a number that is no size. A period of 1 turns nothing, and the
# logarithm of theta divides.
_BOUNDS = {
  "rms_norm_eps": (1e-30, 1.0),
  "rope_theta": (1.0 + 1e-6, 1e15),
  "initializer_range": (0.0, 100.0),
}
_OPTIONAL = ("num_key_value_heads", "head_dim", "rope_theta", "initializer_range")
_FLAGS = ("mlp_bias", "attention_bias", "use_sliding_window", "tie_word_embeddings")


def _check_values(c: Mapping[str, Any], where: str):
  """Numbers are finite, in bounds and whole where they count; flags are true or false."""
  for key in (*_SIZES, *_BOUNDS):
    if key not in _OPTIONAL and key not in c:
      raise UserError(f"{where} lacks {key!r}; fetch the file again")
    if key in _OPTIONAL and c.get(key) is None:
      continue
    low, high = (1, LARGEST[_SIZES[key]]) if key in _SIZES else _BOUNDS[key]
    check_number(f"{where}: {key}", c[key], low, high, _REMEDY, whole=key in _SIZES)
  for key in _FLAGS:
    if not isinstance(c.get(key), bool | None):
      raise UserError(f"{where}: {key} is {c[key]!r}, expected true or false; {_REMEDY}")


def _is_full_attention(layer_types) -> bool:
  return not layer_types or (
    isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
  )


def _head_dim(c: Mapping[str, Any], where: str) -> int:
  size, rest = divmod(c["hidden_size"], c["num_attention_heads"])
  if rest:
    raise UserError(
      f"{where}: hidden_size {c['hidden_size']} is no multiple of num_attention_heads "
      f"{c['num_attention_heads']}, and there is no head_dim"
    )
  return size


_ROPE_FIELDS = {
  "factor": "factor",
  "original_max_position_embeddings": "original_max_positions",
  "low_freq_factor": "low_freq_factor",
  "high_freq_factor": "high_freq_factor",
  "beta_fast": "beta_fast",
  "beta_slow": "beta_slow",
  "attention_factor": "attention_factor",
}
_ROPE_BOUNDS = {
  "factor": (1.0, 1e6),  # transformers has the same smallest factor
  "original_max_position_embeddings": (1, LARGEST["max_positions"]),
  "low_freq_factor": (1e-6, 1e6),
  "high_freq_factor": (1e-6, 1e6),
  "beta_fast": (1e-6, 1e6),
  "beta_slow": (1e-6, 1e6),
  "attention_factor": (1e-6, 1e6),
}


def _rope_from_hf(c: Mapping[str, Any], where: str) -> tuple[float, RopeScaling]:
  """Both spellings: rope_theta + rope_scaling (transformers < 5) and rope_parameters (>= 5)."""
  stated = c.get("rope_parameters") or c.get("rope_scaling") or {}
  if not isinstance(stated, dict):
    raise UserError(f"{where}: rope options {stated!r} are no object; fetch the file again")
  stated = dict(stated)
  for key, (low, high) in {"rope_theta": _BOUNDS["rope_theta"], **_ROPE_BOUNDS}.items():
    whole = key == "original_max_position_embeddings"
    if stated.get(key) is not None:
      check_number(f"{where}: rope option {key}", stated[key], low, high, _REMEDY, whole=whole)
  theta = float(stated.pop("rope_theta", None) or c.get("rope_theta") or 10000.0)
  kind = stated.pop("rope_type", None) or stated.pop("type", None) or "default"
  stated.pop("type", None)
  if not isinstance(kind, str) or kind not in rope.KINDS:
    raise UserError(f"{where}: rope type {kind!r} is not supported; known: {', '.join(rope.KINDS)}")
  if stated.get("partial_rotary_factor") == 1:
    stated.pop("partial_rotary_factor")
  unknown = [k for k, v in stated.items() if k not in _ROPE_FIELDS and v is not None]
  if unknown:
    raise UserError(f"{where}: rope option {unknown[0]!r} of type {kind!r} is not supported")
  if kind == "default":
    return theta, RopeScaling()
  if stated.get("factor") is None:
    raise UserError(f"{where}: rope type {kind!r} lacks its factor; fetch the file again")
  scaling = RopeScaling(kind, **{_ROPE_FIELDS[k]: v for k, v in stated.items() if v is not None})
  for kind_of, low, high in (
    ("llama3", "low_freq_factor", "high_freq_factor"),
    ("yarn", "beta_slow", "beta_fast"),
  ):
    if kind == kind_of and not getattr(scaling, low) < getattr(scaling, high):
      raise UserError(
        f"{where}: rope option {low} is {getattr(scaling, low)}, expected less than {high}, "
        f"{getattr(scaling, high)}"
      )
  return theta, scaling


def config_to_hf(
  cfg: ModelConfig, dtype: str, base: Mapping[str, Any] | None = None,
  quantization: Mapping[str, Any] | None = None,
):  # fmt: skip
  """config.json for these values.

  Args:
    base: supplies what a ModelConfig lacks (token ids, ...).
    quantization: quantization_config; None for none.
  """
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
  if quantization is not None:
    c["quantization_config"] = dict(quantization)
  return c


def read_json(folder: str, name: str) -> dict[str, Any]:
  return errors.read_json(os.path.join(hub.local(folder), name), hub.remedy(folder))


def write_json(folder: str, name: str, value):
  with open(os.path.join(folder, name), "w") as f:
    json.dump(value, f, indent=2)
    f.write("\n")
