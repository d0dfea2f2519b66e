"""Two sets of weights in one folder (mlx-vlm#1329, mlx-vlm#1464)."""

import json
import shutil

import case_inputs
import pytest
import safetensors.numpy

from fp8jax.errors import UserError
from fp8jax.models.hf import tensors as hf_tensors


@pytest.mark.parametrize("has_index", [True, False])
def test_a_second_set_of_weights_is_refused_by_name(tmp_path, has_index):
  folder = tmp_path / "m"
  shutil.copytree(case_inputs.GOLDEN / "hf" / "llama", folder)
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  shard = "model-00001-of-00001.safetensors" if has_index else "model.fp16.safetensors"
  safetensors.numpy.save_file({k: t + 1 for k, t in tensors.items()}, folder / shard)
  other = shard
  if has_index:
    other = "model.safetensors.index.json"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, shard)}
    (folder / other).write_text(json.dumps(index))
  with pytest.raises(UserError, match="two sets of weights") as error:
    hf_tensors.Folder(str(folder))
  assert other in str(error.value) and "model.safetensors" in str(error.value)
