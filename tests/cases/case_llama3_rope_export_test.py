"""Exports of Llama 3 models keep the band of their rope (marin#7146, marin#7156, marin#7801)."""

import json

import case_inputs

from fp8jax.export import write
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import weights as hf_weights


def test_an_export_has_every_key_that_llama3_requires(tmp_path):
  source = case_inputs.GOLDEN / "hf" / "llama_llama3"
  base = json.loads((source / "config.json").read_text())
  cfg = hf_config.read_config(str(source))
  params, dtype = hf_weights.load_params(str(source), cfg)
  write.save(str(tmp_path / "x"), write.model(params, cfg, dtype, base))
  written = json.loads((tmp_path / "x" / "config.json").read_text())
  stated = dict(base["rope_parameters"])
  assert written["rope_theta"] == stated.pop("rope_theta")
  assert written["rope_scaling"] == stated and len(stated) == 5
