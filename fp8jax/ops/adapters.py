"""A frozen weight with a low-rank adapter beside it, as a linear layer takes it.

Source: LoRA (Hu et al. 2021, arXiv:2106.09685 §4.1): y = x w + (alpha / r) (x a) b. b starts at
zero, so that the first step multiplies as the base alone.
"""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
  """A weight and its adapter.

  Attributes:
    base: the frozen weight, in any storage.
    a: [contracted letters, R].
    b: [R, produced letters].
    sites: of the products with a and with b.
    scale: alpha / r.
  """

  base: Any
  a: Any
  b: Any
  sites: tuple[Any, Any]
  scale: float = dataclasses.field(metadata=dict(static=True))


def equations(eqn: str) -> tuple[str, str]:
  """The einsums of the products with a and b: "BLD,DHK->BLHK" has "BLD,DR->BLR", "BLR,RHK->BLHK".

  R is the rank of the adapter.
  """
  operands, _, y = eqn.partition("->")
  x, _, w = operands.partition(",")
  contracted = "".join(c for c in w if c not in y)
  produced = "".join(c for c in w if c in y)
  tokens = "".join(c for c in x if c in y)
  return f"{x},{contracted}R->{tokens}R", f"{tokens}R,R{produced}->{y}"
