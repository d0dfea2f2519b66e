"""config.json of Hugging Face folders <-> ModelConfig; refuses by name what it cannot represent."""

import dataclasses
import glob
import json
import os
from collections.abc import Mapping
from typing import Any

from fp8jax import errors, hub, records
from fp8jax.errors import UserError, check_number
from fp8jax.models import rope
from fp8jax.models.config import LARGEST, ModelConfig, RopeScaling
from fp8jax.models.hf import scheme_config

ARCHITECTURES = {
  name: f"{name.title()}ForCausalLM" for name in ("llama", "mistral", "qwen2", "qwen3")
}
# transformers' name of a head in an architecture's, of logits and of a score.
_HEADS = "CausalLM", "SequenceClassification"
# The defaults of transformers' classes, where not Llama's, of keys that a file leaves out.
_ABSENT = {
  "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
  "qwen2": {"num_key_value_heads": 32},
  "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
# Keys of an export's type that say, whatever the default there, that they are not used.
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
_UNUSED = {
  "llama": {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
  "mistral": {"sliding_window": None},
  "qwen2": _NO_WINDOW,
  "qwen3": _NO_WINDOW | {"attention_bias": False},
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
  of_logits = str(first).replace(_HEADS[1], _HEADS[0])
  if not isinstance(first, str) or of_logits not in names:
    raise UserError(
      f"{where}: architecture {first!r} is not supported; known: {', '.join(names)}, and "
      f"{_HEADS[1]} in the place of {_HEADS[0]}"
    )
  architecture, reward_head = names[of_logits], of_logits != first
  if c.get("model_type", architecture) != architecture:
    raise UserError(
      f"{where}: model_type={c['model_type']!r} and architectures={stated!r} name two models, of "
      "which transformers reads the first and vLLM the second; correct the wrong one"
    )
  given, c = c, _ABSENT.get(architecture, {}) | dict(c)
  _check_values(c, where)
  kinds = c.get("layer_types") or []
  refused = {
    "sliding_window": architecture == "mistral" and c["sliding_window"] is not None,
    "partial_rotary_factor": c.get("partial_rotary_factor") not in (None, 1),
    "hidden_act": c.get("hidden_act", "silu") != "silu",
    # Llama and Qwen3 put attention_bias on the output projection too.
    **{key: bool(c.get(key)) for key in ("mlp_bias", "attention_bias", "use_sliding_window")},
    "layer_types": not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds),
    "pretraining_tp": c.get("pretraining_tp", 1) != 1,
  }
  for key, is_refused in refused.items():
    if is_refused:
      absent = "" if key in given else ", which transformers takes where the key is absent,"
      raise UserError(f"{where}: {key}={c[key]!r}{absent} is not supported")
  scheme_config.of_config(c, where)
  theta, scaling, _ = _rope_from_hf(c, where)
  sizes: dict[str, Any] = {ours: c.get(theirs) for theirs, ours in _SIZES.items()}
  sizes["num_kv_heads"] = sizes["num_kv_heads"] or c["num_attention_heads"]
  sizes["head_dim"] = sizes["head_dim"] or _head_dim(c, where)
  return ModelConfig(
    architecture=architecture,
    **sizes,
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=c["rms_norm_eps"],
    qkv_bias=architecture == "qwen2",
    qk_norm=architecture == "qwen3",
    tie_embeddings=bool(c.get("tie_word_embeddings", False)) and not reward_head,
    reward_head=reward_head,
    init_std=0.02 if c.get("initializer_range") is None else c["initializer_range"],
  )


def with_stored(cfg: ModelConfig, there: ModelConfig) -> ModelConfig:
  """The model with the vocabulary of a folder, and the head, which a reward model may replace."""
  changes: dict[str, Any] = {"vocab_size": there.vocab_size}
  if cfg.reward_head:
    changes |= {"reward_head": there.reward_head, "tie_embeddings": there.tie_embeddings}
  return dataclasses.replace(cfg, **changes)


_REMEDY = "correct it, or fetch the file again"
# Their names of our sizes.
_SIZES = {
  "vocab_size": "vocab_size", "hidden_size": "hidden_size",
  "intermediate_size": "intermediate_size", "num_hidden_layers": "num_layers",
  "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
  "head_dim": "head_dim", "max_position_embeddings": "max_positions",
}  # fmt: skip
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


def _head_dim(c: Mapping[str, Any], where: str) -> int:
  size, rest = divmod(c["hidden_size"], c["num_attention_heads"])
  if rest:
    raise UserError(
      f"{where}: hidden_size {c['hidden_size']} is no multiple of num_attention_heads "
      f"{c['num_attention_heads']}, and there is no head_dim"
    )
  return size


_ORIGINAL = "original_max_position_embeddings"
# Of a rope type the options that a version of transformers requires or guesses, see
# tests/golden/hf_exports.json, and those that it reads beside them; it ignores any other.
ROPE_KEYS = {
  "default": ((), ()),
  "linear": (("factor",), ()),
  "dynamic": (("factor",), ()),
  "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
  "yarn": (("factor", _ORIGINAL), ("beta_fast", "beta_slow", "attention_factor")),
}
_ROPE_BOUNDS = {key: (1e-6, 1e6) for keys in ROPE_KEYS.values() for key in sum(keys, ())} | {
  "factor": (1.0, 1e6),  # transformers has the same smallest factor
  _ORIGINAL: (1, LARGEST["max_positions"]),
}


def _field(key: str) -> str:
  """Our name of a rope option."""
  return "original_max_positions" if key == _ORIGINAL else key


def notes(folder: str) -> list[str]:
  """The choices that reading a folder makes where its files say two things, one line each."""
  path = os.path.join(folder, "config.json")
  pickles = sorted(glob.glob(os.path.join(glob.escape(hub.local(folder)), "*.bin")))
  beside = [f"{pickles[0]} lies beside the safetensors and is not read"] if pickles else []
  return _rope_from_hf(read_json(folder, "config.json"), path)[2] + beside


def _rope_from_hf(c: Mapping[str, Any], where: str) -> tuple[float, RopeScaling, list[str]]:
  """(theta, scaling, notes) of rope_scaling (transformers < 5) or rope_parameters (>= 5).

  Of two spellings transformers takes rope_scaling. Where that loses the other's theta, both are
  refused.
  """
  stated = {key: c[key] for key in ("rope_scaling", "rope_parameters") if c.get(key)} or {"": {}}
  theta, scaling, notes = _one_rope(c, where, *next(iter(stated.items())))
  if len(stated) == 2:
    other_theta, other, _ = _one_rope(c, where, "rope_parameters", stated["rope_parameters"])
    if theta != other_theta:
      raise UserError(
        f"{where}: rope_scaling={stated['rope_scaling']!r} has rope_theta {theta:g} and "
        f"rope_parameters={stated['rope_parameters']!r} has {other_theta:g}; remove one of them, "
        "and put rope_theta into the other"
      )
    if scaling != other:
      notes.append(f"{where}: rope_scaling is read ({scaling.kind!r}), as by transformers, and not "
                   f"rope_parameters beside it ({other.kind!r})")  # fmt: skip
  return theta, scaling, notes


def _one_rope(c: Mapping[str, Any], where: str, spelling: str, stated: Any):
  """As `_rope_from_hf`, of one of the two objects, or of none, {}."""
  if not isinstance(stated, dict):
    raise UserError(f"{where}: {spelling}={stated!r} is no object; fetch the file again")
  stated, notes = {k: v for k, v in stated.items() if v is not None}, []
  for key, (low, high) in {"rope_theta": _BOUNDS["rope_theta"], **_ROPE_BOUNDS}.items():
    if key in stated:
      what = f"{where}: rope option {key}"
      check_number(what, stated[key], low, high, _REMEDY, whole=key == _ORIGINAL)
  outside = c.get("rope_theta")
  theta = float(stated.pop("rope_theta", None) or outside or 10000.0)
  if outside and theta != outside:
    notes.append(f"{where}: rope_theta {theta:g} of {spelling} is read, not {outside:g} beside it")
  kinds = [kind for key in ("rope_type", "type") if (kind := stated.pop(key, None)) is not None]
  kind = kinds[0] if kinds else "default"
  if not isinstance(kind, str) or kind not in rope.KINDS or kinds[1:] not in ([], [kind]):
    stated_kinds = " beside ".join(map(repr, kinds))
    known = ", ".join(rope.KINDS)
    raise UserError(f"{where}: rope type {stated_kinds} is not supported; known: {known}")
  if stated.get("partial_rotary_factor") == 1:
    stated.pop("partial_rotary_factor")
  unknown = [k for k in stated if k not in _ROPE_BOUNDS]
  if unknown:
    raise UserError(f"{where}: rope option {unknown[0]!r} of type {kind!r} is not supported")
  required, optional = ROPE_KEYS[kind]
  if _ORIGINAL in required:
    original = c.get(_ORIGINAL) or stated.get(_ORIGINAL) or c["max_position_embeddings"]
    if stated.setdefault(_ORIGINAL, original) != original:
      raise UserError(
        f"{where}: {_ORIGINAL}={original} beside {stated[_ORIGINAL]} in {spelling}, of which "
        "transformers 5 reads the first and 4 the second; remove the wrong one"
      )
    low, high = _ROPE_BOUNDS[_ORIGINAL]
    check_number(f"{where}: {_ORIGINAL}", original, low, high, _REMEDY, whole=True)
  if ignored := [k for k in stated if k not in required + optional]:
    notes.append(f"{where}: {', '.join(ignored)} of {spelling} is ignored, as by transformers: "
                 f"rope type {kind!r} has no such option")  # fmt: skip
  if missing := [key for key in required if key not in stated]:
    raise UserError(
      f"{where}: rope type {kind!r} lacks its {missing[0]}; transformers requires it: fetch the "
      "file again. Earlier exports of fp8jax left values of Llama 3.1 out: add those that are "
      'missing of "low_freq_factor": 1.0 and "high_freq_factor": 4.0, or export again'
    )
  scaling = RopeScaling(kind, **{_field(k): v for k, v in stated.items() if k not in ignored})
  for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
    if not (below := getattr(scaling, low)) < (above := getattr(scaling, high)):
      raise UserError(f"{where}: rope option {low} is {below}, expected less than {high}, {above}")
  return theta, scaling, notes


def check_exportable(cfg: ModelConfig):
  """Refuses a model whose config.json would be refused by transformers, or be another model's."""
  if cfg.residual_tau:
    raise UserError(
      f"model.residual_tau={cfg.residual_tau}: no architecture of transformers adds blocks so; "
      "keep the checkpoint, which this project reads"
    )
  refused = {
    "model.hidden_size no multiple of model.num_heads": cfg.hidden_size % cfg.num_heads,
    "model.init_std above 1": cfg.init_std > 1,
  }
  for what, is_refused in refused.items():
    if cfg.architecture == "llama" and is_refused:
      raise UserError(f"a Llama with {what} is refused by transformers, whose format this is")


def config_to_hf(
  cfg: ModelConfig, dtype: str, base: Mapping[str, Any] | None = None,
  quantization: Mapping[str, Any] | None = None,
):  # fmt: skip
  """config.json for these values.

  Args:
    base: supplies what a ModelConfig lacks (token ids, ...).
    quantization: quantization_config; None for none.
  """
  check_exportable(cfg)
  # Without a base there are no special tokens; transformers' Llama has defaults for their ids.
  c = dict(base or dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
  # One spelling of each rope option, the one that old and new transformers both read.
  for stale in (
    "rope_parameters", _ORIGINAL, "layer_types", "max_window_layers", "quantization_config"
  ):  # fmt: skip
    c.pop(stale, None)
  c.update(
    _UNUSED[cfg.architecture],
    architectures=[ARCHITECTURES[cfg.architecture].replace(_HEADS[0], _HEADS[cfg.reward_head])],
    model_type=cfg.architecture,
    **{theirs: getattr(cfg, ours) for theirs, ours in _SIZES.items()},
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
    # Every option of the type: what equals a default here has none elsewhere.
    keys = sum(ROPE_KEYS[cfg.rope_scaling.kind], ())
    options: dict[str, Any] = {"rope_type": cfg.rope_scaling.kind}
    options |= {key: getattr(cfg.rope_scaling, _field(key)) for key in keys}
    if options.get(_ORIGINAL, 0) is None:
      options[_ORIGINAL] = cfg.max_positions
    c["rope_scaling"] = {key: value for key, value in options.items() if value is not None}
  if cfg.reward_head:  # one label, whose score vLLM gives as it is for a regression
    label = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    c |= label | {"problem_type": "regression"}
  if quantization is not None:
    c["quantization_config"] = dict(quantization)
  return c


def read_json(folder: str, name: str) -> dict[str, Any]:
  return errors.read_json(os.path.join(hub.local(folder), name), hub.remedy(folder))


def write_json(folder: str, name: str, value):
  records.write_atomic(os.path.join(folder, name), json.dumps(value, indent=2) + "\n")
