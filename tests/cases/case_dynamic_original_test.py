"""Dynamic rope with original_max_position_embeddings, which LLaMA-Factory writes (vllm#3488)."""

import json

import case_inputs
import numpy as np
import pytest

from fp8jax.models import rope
from fp8jax.models.hf import config as hf_config


@pytest.mark.parametrize("length, stretch", [(48, 1.0), (64, 1.0), (96, 2.0)])
def test_dynamic_rope_ignores_the_original_length_as_transformers_does(length, stretch):
  """Plain up to max_position_embeddings, 64, then stretched by 2 * length / 64 - 1."""
  c = json.loads((case_inputs.GOLDEN / "hf" / "llama" / "config.json").read_text())
  del c["rope_parameters"]
  scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
  c |= {"rope_theta": 1e4, "max_position_embeddings": 64, "rope_scaling": scaling}
  cfg = hf_config.config_from_hf(c)
  dim = cfg.head_dim
  theta = 1e4 * stretch ** (dim / (dim - 2))
  got, _ = rope.frequencies(cfg, length)
  np.testing.assert_allclose(got, theta ** -(np.arange(0, dim, 2) / dim), rtol=1e-12)
