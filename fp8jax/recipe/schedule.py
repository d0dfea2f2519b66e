"""Which recipe every site has at every step: the section `precision` of a config, checked."""

import dataclasses

Rules = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Phase:
  """Steps that share their recipes.

  Attributes:
    start: first step (0-based) of the phase; it lasts until the next one begins.
    rules: (pattern, recipe name), those for the first and last layers in front.
  """

  start: int
  rules: Rules


@dataclasses.dataclass(frozen=True)
class Precision:
  """The recipes of a run, phase by phase; the first phase starts at step 0."""

  phases: tuple[Phase, ...]

  def at(self, step: int) -> int:
    """Index of the phase that trains the step after `step` steps taken."""
    return max(i for i, phase in enumerate(self.phases) if phase.start <= step)
