"""The hardware that backends are chosen for."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
  """The hardware, as a backend asks about it.

  Attributes:
    platform: "cpu" or "gpu".
    capability: CUDA compute capability x 10 (90 for Hopper), 0 elsewhere (also AMD's GPUs).
  """

  platform: str = "cpu"
  capability: int = 0
