"""How the gradient of a tensor passes a rounding other than straight through it."""

import dataclasses

from fp8jax import formats
from fp8jax.recipe.quant import WHOLE, Quant


@dataclasses.dataclass(frozen=True)
class Differentiable:
  """The weight's gradient times the slope of a soft staircase (DGE, arXiv:2501.17116 §3.1).

  Between two neighbours of the grid u runs from -1 to 1; the slope is |u|^(1 / power - 1) / power.

  Attributes:
    power: the paper's k.
    largest: of the slope, which is infinite in the middle.
  """

  power: float = 5.0
  largest: float = 3.0

  def __post_init__(self):
    if not (self.power >= 1 and self.largest > 0):
      raise ValueError(f"{self}: power must be at least 1, largest above 0")


@dataclasses.dataclass(frozen=True)
class SlopeAlone(Differentiable):
  """That slope where no product rounds the weight: the control of Differentiable.

  The staircase has a scale per row of W_FWD, that of its amax.

  Attributes:
    format: the name of the staircase's format.
  """

  format: str = "e2m1"

  def __post_init__(self):
    super().__post_init__()
    if not formats.by_name(self.format).is_stepped:
      raise ValueError(f"{self}: a slope needs steps between numbers; take a format such as e2m1")

  @property
  def quant(self) -> Quant:
    """Of the staircase."""
    return Quant(formats.by_name(self.format), (1, WHOLE))


@dataclasses.dataclass(frozen=True)
class TrustMask:
  """No gradient where the forward operand saturated (QuEST's trust mask, arXiv:2505.14669 §4)."""


Estimator = Differentiable | SlopeAlone | TrustMask
ESTIMATORS = (Differentiable, SlopeAlone, TrustMask)


def check(name: str, tensor: str, estimator: Estimator | None, quant: Quant | None):
  """Refuses an estimator of a forward operand that it does not fit.

  Args:
    name: of the recipe.
    tensor: "lhs" or "rhs" of the forward product.
    quant: of the operand.

  Raises:
    ValueError: says what fits.
  """
  if isinstance(estimator, SlopeAlone):
    if quant is not None or tensor == "lhs":
      raise ValueError(
        f"recipe {name!r}: {estimator} is of a weight that fwd does not round, got {tensor}="
        f"{quant}; take Differentiable() for one that it rounds, None for x"
      )
  elif estimator and quant is None:
    raise ValueError(f"recipe {name!r}: {estimator}, and fwd rounds no {tensor}: leave it out")
  elif isinstance(estimator, Differentiable) and quant and not quant.format.is_stepped:
    raise ValueError(
      f"recipe {name!r}: {estimator} needs steps between numbers, and {quant.format} is "
      "logarithmic; take TrustMask() or None"
    )
