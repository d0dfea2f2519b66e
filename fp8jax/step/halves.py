"""A function and its derivative, in two places.

A loop over layers calls the function, another one its derivative. Between them lies what the first
saves: of each intermediate value one entry per layer. What both loops can read, such as weights,
sites and positions, is not saved. Nor is what follows from values that all layers share.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class Halves:
  """A function (shared, known, x, *others) -> (value, aux), differentiated by x and the others.

  Attributes:
    program: (shared, known, others, x) -> (value, aux, residuals), flat.
    results: the tree of its (value, aux).
    residuals: the tree of its residuals, which is the derivative.
    saved: the residuals that the second half cannot read again, each once.
    followed: those that follow from what is shared.
    again: shared -> their values.
  """

  program: core.ClosedJaxpr
  results: Any
  residuals: Any
  saved: tuple[core.Var, ...]
  followed: tuple[core.Var, ...]
  again: core.ClosedJaxpr

  def forward(self, shared, known, x, *others):
    """(value, aux, saved)."""
    found = core.jaxpr_as_fun(self.program)(*jax.tree.leaves((shared, known, others, x)))
    value, aux = jax.tree.unflatten(self.results, found[: self.results.num_leaves])
    by_name = {r: x for r, x in zip(self.program.jaxpr.outvars, found, strict=True)
               if not isinstance(r, core.Literal)}  # fmt: skip
    return value, aux, [by_name[r] for r in self.saved]

  def derivative(self, shared, known, saved, *others) -> Callable:
    """Gradient of the value -> gradients of x and the others, as of jax.vjp.

    Args:
      shared, known, others: as of `forward`.
      saved: of `forward`.
    """
    jaxpr = self.program.jaxpr
    read = dict(zip(jaxpr.constvars, self.program.consts, strict=True))
    # Without x, which comes last.
    read |= dict(zip(jaxpr.invars, jax.tree.leaves((shared, known, others)), strict=False))
    read |= dict(zip(self.saved, saved, strict=True))
    again = core.jaxpr_as_fun(self.again)(*jax.tree.leaves(shared))
    read |= dict(zip(self.followed, again, strict=True))
    residuals = jaxpr.outvars[self.results.num_leaves :]
    values = [r.val if isinstance(r, core.Literal) else read[r] for r in residuals]
    return jax.tree.unflatten(self.residuals, values)


def halves(function: Callable, shared, known, x, *others) -> Halves:
  """Those of a function (shared, known, x, *others) -> (value, aux).

  Args:
    shared, known, x, others: trees of arrays, or of their shapes. Both places can read all but x.
  """

  def differentiated(shared, known, others, x):
    def by_known(x, *others):
      return function(shared, known, x, *others)

    value, derivative, aux = jax.vjp(by_known, x, *others, has_aux=True)
    return (value, aux), derivative

  program, (results, derivative) = jax.make_jaxpr(differentiated, return_shape=True)(
    shared, known, others, x
  )
  results, jaxpr = jax.tree.structure(results), program.jaxpr
  read = {*jaxpr.constvars, *jaxpr.invars[: len(jax.tree.leaves((shared, known, others)))]}
  residuals = [r for r in _variables(jaxpr.outvars[results.num_leaves :]) if r not in read]
  count = len(jax.tree.leaves(shared))
  follows = {*jaxpr.constvars, *jaxpr.invars[:count]}
  equations = []
  for e in jaxpr.eqns:
    if not e.effects and follows.issuperset(_variables(e.invars)):
      follows.update(e.outvars)
      equations.append(e)
  followed = tuple(r for r in residuals if r in follows)
  needed, kept = {*followed}, []
  for e in reversed(equations):
    if needed.intersection(e.outvars):
      needed.update(_variables(e.invars))
      kept.append(e)
  again = jaxpr.replace(
    invars=jaxpr.invars[:count], outvars=list(followed), eqns=kept[::-1],
    debug_info=jaxpr.debug_info.with_unknown_names(),
  )  # fmt: skip
  saved = tuple(r for r in residuals if r not in follows)
  again = core.ClosedJaxpr(again, program.consts)
  return Halves(program, results, jax.tree.structure(derivative), saved, followed, again)


def _variables(of: Iterable[core.Var | core.Literal]) -> list[core.Var]:
  """Each once, without literals."""
  return list(dict.fromkeys(r for r in of if not isinstance(r, core.Literal)))
