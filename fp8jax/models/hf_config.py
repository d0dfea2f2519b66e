"""config.json of Hugging Face folders <-> ModelConfig; refuses by name what it cannot represent."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from fp8jax import errors, hub
from fp8jax.errors import UserError
from fp8jax.models import rope
from fp8jax.models.config import ModelConfig, RopeScaling

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
  for key in _NUMBERS:
    _check_number(f"{where}: {key}", c.get(key), is_whole=key in _WHOLE)
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


_WHOLE = (
  "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
  "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
_NUMBERS = (*_WHOLE, "rms_norm_eps", "rope_theta", "initializer_range")


def _check_number(what: str, value, is_whole: bool = False):
  kinds = int if is_whole else (int, float)
  if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
    kind = "a whole number" if is_whole else "a number"
    raise UserError(f"{what}={value!r} is not {kind}; correct it, or fetch the file again")


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
  stated = c.get("rope_parameters") or c.get("rope_scaling") or {}
  if not isinstance(stated, dict):
    raise UserError(f"{where}: rope options {stated!r} are no object; fetch the file again")
  stated = dict(stated)
  for key in ("rope_theta", *_ROPE_FIELDS):
    _check_number(f"{where}: rope option {key}", stated.get(key))
  theta = float(stated.pop("rope_theta", None) or c.get("rope_theta") or 10000.0)
  kind = stated.pop("rope_type", None) or stated.pop("type", None) or "default"
  stated.pop("type", None)
  if kind not in rope.KINDS:
    raise UserError(f"{where}: rope type {kind!r} is not supported; known: {', '.join(rope.KINDS)}")
  if stated.get("partial_rotary_factor") == 1:
    stated.pop("partial_rotary_factor")
  unknown = [k for k, v in stated.items() if k not in _ROPE_FIELDS and v is not None]
  if unknown:
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


def read_json(folder: str, name: str) -> dict[str, Any]:
  return errors.read_json(os.path.join(hub.local(folder), name), hub.remedy(folder))


def write_json(folder: str, name: str, value):
  with open(os.path.join(folder, name), "w") as f:
    json.dump(value, f, indent=2)
    f.write("\n")
