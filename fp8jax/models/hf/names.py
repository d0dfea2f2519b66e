"""One table maps our parameter tree to the tensors of Hugging Face folders: names and shapes."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from fp8jax import params
from fp8jax.errors import UserError
from fp8jax.models import lora, transformer
from fp8jax.models.config import ModelConfig

# Ours -> theirs; mixers name those of layers. Their linears are [out, in]; ours [in..., out...].
TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
SCORE = "score.weight"  # the head of a reward model


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
  """Every tensor of the model, in file order.

  Raises:
    UserError: a mixer of the model is unknown to Hugging Face.
  """
  for name, mixer in zip(cfg.mixers, transformer.mixers(cfg), strict=True):
    if mixer.hf_names is None:
      raise UserError(
        f"model.mixers has {name!r}, which no Hugging Face model of ours has: such weights are "
        "neither read from nor written to Hugging Face folders. Evaluate checkpoints of the run "
        "itself (--job=evaluate --workdir=...)"
      )
  names = {
    f"layers/{mixer.key}/{name}": theirs
    for mixer in transformer.mixers(cfg)
    for name, theirs in (mixer.hf_names or {}).items()
  }
  flat = params.flatten(transformer.params(lora.without(cfg)))
  top, listed = TOP | ({"head": SCORE} if cfg.reward_head else {}), []
  for path, p in flat.items():
    if path in top:
      listed.append(Entry(top[path], path, None, p.letters, p.inputs))
      continue
    letters = p.letters.removeprefix("N")
    listed += [
      Entry(f"model.layers.{i}.{names[path]}", path, i, letters, p.inputs)
      for i in range(cfg.num_layers)
    ]
  return listed


# Ours -> theirs, of the matrices of a linear layer's adapter.
_OF_ADAPTERS = dict(zip(lora.SUFFIXES, ("lora_A.weight", "lora_B.weight"), strict=True))


def adapter_stem(entry: Entry) -> str:
  """ "base_model.model.X." of a linear layer X in PEFT's files."""
  return f"base_model.model.{entry.name.removesuffix('weight')}"


def adapter_entries(cfg: ModelConfig) -> list[Entry]:
  """Every tensor of the adapters of cfg.lora, in file order."""
  flat = params.flatten(transformer.params(cfg))
  return [
    Entry(adapter_stem(e) + theirs, e.path + ours, e.layer, p.letters.removeprefix("N"), p.inputs)
    for e in entries(cfg)
    for ours, theirs in _OF_ADAPTERS.items()
    if (p := flat.get(e.path + ours)) is not None
  ]
