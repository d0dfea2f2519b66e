"""A generator that leaves off where its run is asked to save and leave."""

import dataclasses
from collections.abc import Callable

from fp8jax.generation.api import Generator
from fp8jax.generation.settings import Sampling


class AskedToStop(Exception):
  """`Stoppable.stop` said so."""


def heed(stop: Callable[[], bool]):
  """Raises AskedToStop if it says so."""
  if stop():
    raise AskedToStop


@dataclasses.dataclass(frozen=True)
class Stoppable:
  """A generator that asks at every piece of text whether to raise AskedToStop."""

  generator: Generator
  stop: Callable[[], bool]

  def generate(self, prompts, sampling: Sampling, num_samples: int = 1, on_text=None, numbers=()):
    """As Generator.generate."""

    def push(*of_text):
      heed(self.stop)
      if on_text is not None:
        on_text(*of_text)

    return self.generator.generate(prompts, sampling, num_samples, push, numbers)
