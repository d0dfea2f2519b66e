"""Whether a Hugging Face folder holds the model that a configuration describes."""

import dataclasses

from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.models.hf import weights as hf_weights


def check(folder: str, model: ModelConfig):
  """The weights of a Hugging Face folder are those of the model; reads headers only.

  Raises:
    ValueError: they are another's.
  """
  there = hf_config.read_config(folder)
  # These do not change what the weights compute; a vocabulary may be padded.
  harmless = {"init_std", "max_positions", "lora", "unit_scaling"}
  if there.rope_scaling.kind == "dynamic":  # its frequencies depend on the length
    harmless.remove("max_positions")
  if there.vocab_size <= model.vocab_size:
    harmless.add("vocab_size")
  if model.reward_head:
    harmless |= {"reward_head", "tie_embeddings"}
  different = [
    f"{f.name} {getattr(there, f.name)} there, {getattr(model, f.name)} here"
    for f in dataclasses.fields(model)
    if f.name not in harmless and getattr(there, f.name) != getattr(model, f.name)
  ]
  if different:
    raise ValueError(
      f"{folder!r} holds another model than the config describes: {'; '.join(different)}. Set "
      "model.preset='hf' and override nothing else of model to take the folder's"
    )
  hf_weights.check(hf_tensors.Folder(folder), hf_config.with_stored(model, there))
