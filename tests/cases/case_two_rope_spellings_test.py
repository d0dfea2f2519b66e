"""rope_scaling added to a folder of transformers 5 (vllm#42624, vllm#44158, sglang#26187)."""

import json

import case_inputs

from fp8jax.models.hf import config as hf_config


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers():
  c = json.loads((case_inputs.GOLDEN / "hf" / "llama" / "config.json").read_text())
  assert c["rope_parameters"]["rope_type"] == "default"
  c["rope_scaling"] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16
  }  # fmt: skip
  scaling = hf_config.config_from_hf(c).rope_scaling
  assert (scaling.kind, scaling.factor, scaling.original_max_positions) == ("yarn", 4.0, 16)
