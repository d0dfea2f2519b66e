"""A function and its derivative, in two places.

A loop over layers calls the function, another one its derivative. Between them lies what the first
saves: of each intermediate value one entry per layer. What both loops can read, such as weights,
sites and positions, is not saved.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class Halves:
  """A function (known, x, *others) -> (value, aux), differentiated by x and the others.

  Attributes:
    program: (known, others, x) -> (value, aux, residuals), flat.
    results: the tree of its (value, aux).
    residuals: the tree of its residuals, which is the derivative.
    saved: the residuals that the second half cannot read again, each once.
  """

  program: core.ClosedJaxpr
  results: Any
  residuals: Any
  saved: tuple[core.Var, ...]

  def forward(self, known, x, *others):
    """(value, aux, saved)."""
    found = core.jaxpr_as_fun(self.program)(*jax.tree.leaves((known, others, x)))
    value, aux = jax.tree.unflatten(self.results, found[: self.results.num_leaves])
    by_name = {r: x for r, x in zip(self.program.jaxpr.outvars, found, strict=True)
               if not isinstance(r, core.Literal)}  # fmt: skip
    return value, aux, [by_name[r] for r in self.saved]

  def derivative(self, known, saved, *others) -> Callable:
    """Gradient of the value -> gradients of x and the others, as of jax.vjp.

    Args:
      known, others: as of `forward`.
      saved: of `forward`.
    """
    jaxpr = self.program.jaxpr
    read = dict(zip(jaxpr.constvars, self.program.consts, strict=True))
    # Without x, which comes last.
    read |= dict(zip(jaxpr.invars, jax.tree.leaves((known, others)), strict=False))
    read |= dict(zip(self.saved, saved, strict=True))
    residuals = jaxpr.outvars[self.results.num_leaves :]
    values = [r.val if isinstance(r, core.Literal) else read[r] for r in residuals]
    return jax.tree.unflatten(self.residuals, values)


def halves(function: Callable, known, x, *others) -> Halves:
  """Those of a function (known, x, *others) -> (value, aux).

  Args:
    known, x, others: trees of arrays, or of their shapes. `known` and `others` are what both
      places can read.
  """

  def differentiated(known, others, x):
    def by_known(x, *others):
      return function(known, x, *others)

    value, derivative, aux = jax.vjp(by_known, x, *others, has_aux=True)
    return (value, aux), derivative

  program, (results, derivative) = jax.make_jaxpr(differentiated, return_shape=True)(
    known, others, x
  )
  results, jaxpr = jax.tree.structure(results), program.jaxpr
  read = {*jaxpr.constvars, *jaxpr.invars[: len(jax.tree.leaves((known, others)))]}
  residuals = dict.fromkeys(
    r for r in jaxpr.outvars[results.num_leaves :] if not isinstance(r, core.Literal)
  )
  saved = tuple(r for r in residuals if r not in read)
  return Halves(program, results, jax.tree.structure(derivative), saved)
