"""The part of a configuration that a job takes."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fp8jax.config.files import Config
from fp8jax.evaluation.settings import Tasks
from fp8jax.generation.settings import Generate
from fp8jax.step.train_spec import TrainSpec


def _none(_: Any) -> list[str]:
  return []


@dataclasses.dataclass(frozen=True)
class Needs:
  """A job takes so much of a configuration beside the model, its precision and the data.

  Attributes:
    sections: of the job; TrainSpec.of has them.
    problems: of those sections, in words.
    problems_of_spec: of what needs the resolved rest.
    of_weights: whether weights.hf, where it is set, says what the model is.
    has_own_text: whether that folder's tokenizer replaces data.tokenizer.
    is_on_one_device: whether the job computes on one device, also of a larger machine.
    is_served: whether it generates: weights are then split as products need them, mesh.tensor, and
      the axes that split them for storage, mesh.fsdp, split rows alone.
    batches: keys of the batches that it computes, which the mesh divides.
    has_steps: whether it takes a number of steps: data.epochs counts all conversations.
    has_calibration: whether it reads precision.calibration, which may be yet to be written.
    has_teacher: whether it takes no steps and computes the loss of training.
    takes_scores: whether the model may have a reward head.
    is_wide: whether no product of it is quantized: the mesh may then cut the scale tiles and
      rotated blocks of recipes.
  """

  sections: tuple[type, ...] = ()
  problems: Callable[[Config], list[str]] = _none
  problems_of_spec: Callable[[TrainSpec], list[str]] = _none
  of_weights: bool = False
  has_own_text: bool = False
  is_on_one_device: Callable[[Config], bool] = lambda c: False
  is_served: Callable[[Config], bool] = lambda c: False
  batches: tuple[str, ...] = ("global_batch", "eval.batch")
  has_steps: bool = False
  has_calibration: bool = False
  has_teacher: bool = False
  takes_scores: bool = False
  is_wide: Callable[[Config], bool] = lambda c: False

  @property
  def has_loss(self) -> bool:
    """Whether it computes the loss of training."""
    return self.has_steps or self.has_teacher

  def folder(self, c: Config) -> tuple[str, str]:
    """(the Hugging Face folder that says what the model is, or "", the key that names it)."""
    if self.of_weights and c.weights.hf:
      return c.weights.hf, "weights.hf"
    return c.init.hf, "init.hf"

  def tokenizer(self, c: Config) -> tuple[str, str]:
    """(data.tokenizer, data.eos), or ("", "") where the folder's replace them."""
    if self.has_own_text and c.weights.hf:
      return "", ""
    return c.data.tokenizer, c.data.eos


# A policy may ask tasks, see jobs/accuracy.py.
TRAINING = Needs((Tasks, Generate), has_steps=True, has_calibration=True)
