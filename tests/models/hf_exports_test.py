"""What transformers makes of config.json: of those that we write, and of spellings that we read.

tests/golden/check_hf_configs.py and write_hf_logits.py ran transformers; nothing here does.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
from golden import check_hf_configs
from harness import text_config

from fp8jax.config import resolve
from fp8jax.errors import UserError
from fp8jax.jobs import table
from fp8jax.kernels.device import Device
from fp8jax.models import rope
from fp8jax.models.config import RopeScaling
from fp8jax.models.hf import config as hf_config

HF = check_hf_configs.HERE / "hf"
EXPORTS = json.loads(check_hf_configs.RECORD.read_text())
SPELLINGS = json.loads((HF / "rope.json").read_text())
# Transformers' choice would lose a theta, turn half of the channels, or is another in version 4.
REFUSED = {
  "old beside new of another theta": "has rope_theta 10000 and rope_parameters=.* has 1e.06",
  "llama3, two original lengths": "original_max_position_embeddings=8 beside 16 in rope_scaling",
  "llama3 without a band": "'llama3' lacks its low_freq_factor; transformers requires it",
  "two types": "rope type 'linear' beside 'dynamic' is not supported",
  "half of the channels": "rope option 'partial_rotary_factor' of type 'yarn'",
  "half of the channels, outside": "partial_rotary_factor=0.5 is not supported",
}
# A choice between two statements of a file, which is said at the start of a run.
NOTED = {
  "theta inside and outside": "rope_theta 10000 of rope_parameters is read, not 500000",
  "old beside new": "rope_scaling is read ('yarn'), as by transformers",
  "old beside new, theta outside": "and not rope_parameters beside it ('default')",
  "old of type default beside new": "rope_scaling is read ('default'",
  "dynamic with an original length": "original_max_position_embeddings of rope_scaling is ignored",
  "linear with an original length": "rope type 'linear' has no such option",
  "default with a factor": "factor of rope_scaling is ignored, as by transformers",
}


@pytest.mark.parametrize("kind", ["with base", "without base"])
@pytest.mark.parametrize("name", check_hf_configs.FOLDERS)
def test_transformers_reads_what_is_written(name, kind):
  """Each config.json is one that transformers 4 and 5 read with the logits of the source."""
  config = check_hf_configs.config_of(name, kind == "with base")
  key = f"{name}, {kind}"
  assert check_hf_configs.sha256(config) == EXPORTS["config.json"][key], (
    "this config.json is another than transformers has read: run tests/golden/check_hf_configs.py"
  )
  by_version = {version.split()[1][0]: found[key] for version, found in EXPORTS["logits"].items()}
  assert by_version == {"4": 0.0, "5": 0.0}


def test_every_rope_type_and_architecture_is_among_them():
  read = [hf_config.read_config(str(HF / name)) for name in check_hf_configs.FOLDERS]
  assert {c.rope_scaling.kind for c in read} == set(rope.KINDS) == set(hf_config.ROPE_KEYS)
  assert {c.rope_scaling.attention_factor is None for c in read} == {True, False}
  kinds = {(c.architecture, c.tie_embeddings) for c in read}
  assert kinds >= {(a, t) for a in ("llama", "qwen2", "qwen3") for t in (True, False)}
  assert {a for a, _ in kinds} == set(hf_config.ARCHITECTURES)


@pytest.mark.parametrize("kind", rope.KINDS)
def test_rope_options_that_are_required_are_those_of_transformers(kind):
  """Without which version 4 or 5 refuses config.json, or guesses."""
  of_versions = [set(found.get(kind, ())) for found in EXPORTS["rope"].values()]
  assert len(of_versions) == 2 and set(hf_config.ROPE_KEYS[kind][0]) == set.union(*of_versions)


@pytest.mark.parametrize("name", SPELLINGS)
def test_rope_options_are_read_as_transformers_reads_them(name):
  config = json.loads((HF / "llama" / "config.json").read_text()) | {"head_dim": 16}
  del config["rope_parameters"]
  config |= SPELLINGS[name]["keys"]
  if name in REFUSED:
    with pytest.raises(UserError, match=REFUSED[name]):
      hf_config.config_from_hf(config)
    return
  cfg = hf_config.config_from_hf(config)
  inverse_period, scaling = rope.frequencies(cfg, 48)
  np.testing.assert_allclose(inverse_period, SPELLINGS[name]["inverse_period"], rtol=2e-6)
  assert scaling == pytest.approx(SPELLINGS[name]["scaling"], rel=1e-7)
  notes = hf_config._rope_from_hf(config, "config.json")[2]
  assert bool(notes) == (name in NOTED) and NOTED.get(name, "") in " ".join(notes)
  # And back: one spelling, to which nothing is to be noted.
  again = hf_config.config_to_hf(cfg, "float32", config)
  assert hf_config.config_from_hf(again) == cfg
  assert not hf_config._rope_from_hf(again, "config.json")[2]


def _folder(tmp_path, name="llama", **changes):
  config = json.loads((HF / name / "config.json").read_text()) | changes
  (tmp_path / "model.safetensors").write_bytes((HF / name / "model.safetensors").read_bytes())
  (tmp_path / "config.json").write_text(json.dumps(config))
  return str(tmp_path)


def test_choices_of_a_folder_are_named_at_the_start(tmp_path, monkeypatch, capfd):
  yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
  folder = _folder(tmp_path, rope_scaling=yarn, vocab_size=96)
  (tmp_path / "pytorch_model.bin").write_bytes(b"")
  monkeypatch.setattr(table.resolve_lib, "resolve", lambda *_, **__: None)
  c, job = text_config(**{"init.hf": folder, "model.preset": "hf"}), table.JOBS["train"]
  job.resolve(c, job.needs)
  rope_line, weights_line = capfd.readouterr().err.strip().splitlines()
  assert "config.json: rope_scaling is read ('yarn'" in rope_line
  assert "pytorch_model.bin lies beside the safetensors and is not read" in weights_line


@pytest.mark.parametrize("name", ["llama_dynamic", "llama_llama3"])
def test_a_shorter_context_leaves_frequencies_or_is_refused(name):
  """Of dynamic rope alone they depend on the longest context."""
  changes = {"model.preset": "hf", "init.hf": str(HF / name), "model.max_positions": 20}
  problems = []
  try:
    resolve.resolve(text_config("bf16", **changes), 1, Device("cpu"))
  except resolve.ConfigError as e:
    problems = e.problems
  assert any("max_positions 24 there, 20 here" in p for p in problems) == (name == "llama_dynamic")
  cfg = hf_config.read_config(str(HF / name))
  shorter = dataclasses.replace(cfg, max_positions=20)
  if name == "llama_llama3":
    np.testing.assert_array_equal(rope.frequencies(cfg, 9)[0], rope.frequencies(shorter, 9)[0])


@pytest.mark.parametrize("name, changes, message", [
  ("mistral", {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
  ("mistral", {"sliding_window": None}, ""),
  ("mistral", {"layer_types": ["sliding_attention"] * 2}, "layer_types="),
  ("mistral", {"model_type": "llama"}, "model_type='llama' and architectures=.* name two models"),
])  # fmt: skip
def test_a_mistral_is_a_llama_unless_it_has_a_window(tmp_path, name, changes, message):
  folder = _folder(tmp_path, name, **changes)
  if message:
    with pytest.raises(UserError, match=message):
      hf_config.read_config(folder)
  else:
    assert hf_config.read_config(folder).architecture == "mistral"


@pytest.mark.parametrize("name, key, want", [
  ("mistral", "sliding_window", "sliding_window=4096, which transformers takes where"),
  ("mistral", "num_key_value_heads", 8), ("qwen2", "num_key_value_heads", 32),
  ("qwen3", "num_key_value_heads", 32), ("qwen3", "head_dim", 128),
  ("llama", "num_key_value_heads", 4), ("llama", "head_dim", 8),
])  # fmt: skip
def test_a_key_that_is_left_out_has_the_default_of_transformers_class(name, key, want):
  """LlamaConfig and the other three of transformers 4.57.6 and 5.23.0."""
  config = json.loads((HF / name / "config.json").read_text())
  del config[key]
  if isinstance(want, str):
    with pytest.raises(UserError, match=want):
      hf_config.config_from_hf(config)
  else:
    field = {"num_key_value_heads": "num_kv_heads"}.get(key, key)
    assert getattr(hf_config.config_from_hf(config), field) == want


def test_nothing_is_exported_that_transformers_cannot_read():
  cfg = hf_config.read_config(str(HF / "llama"))
  for changes, words in (
    ({"num_heads": 3, "num_kv_heads": 1}, "hidden_size no multiple of model.num_heads"),
    ({"init_std": 2.0}, "model.init_std above 1"),
  ):
    with pytest.raises(UserError, match=words):
      hf_config.config_to_hf(dataclasses.replace(cfg, **changes), "float32")


def test_yarns_ramp_ends_at_the_last_channel_pair_of_the_head():
  """Peng et al. 2023 (arXiv:2309.00071), appendix A.2, where the slow end lies beyond the head."""
  cfg = dataclasses.replace(
    hf_config.read_config(str(HF / "llama")), head_dim=16, rope_theta=3.0,
    rope_scaling=RopeScaling("yarn", 4.0, original_max_positions=4096, beta_fast=900.0),
  )  # fmt: skip
  low = math.floor(16 * math.log(4096 / (900 * 2 * math.pi)) / (2 * math.log(3)))
  assert low < 0 and 16 * math.log(4096 / (2 * math.pi)) / (2 * math.log(3)) > 15
  ramp = np.clip(np.arange(8) / 15, 0, 1)
  plain = 3.0 ** -(np.arange(8) / 8)
  expected = plain / 4 * ramp + plain * (1 - ramp)
  np.testing.assert_allclose(rope.frequencies(cfg, 48)[0], expected, rtol=1e-6)


def test_a_run_of_its_own_has_no_special_tokens_of_llama_and_states_its_rope():
  """Llama's class has 1 and 2 for the first and last token of a text."""
  scaling = RopeScaling("yarn", 4.0)
  cfg = dataclasses.replace(hf_config.read_config(str(HF / "llama")), rope_scaling=scaling)
  written = hf_config.config_to_hf(cfg, "bfloat16")
  assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (None,) * 3
  assert written["rope_scaling"] == {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0,
  }  # fmt: skip
