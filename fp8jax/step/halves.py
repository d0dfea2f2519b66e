"""A function and its derivative, in two places.

A loop over layers calls the function, another one its derivative. Between them lies what the first
saves: of each intermediate value one entry per layer. Weights, sites, positions and the like are
read again, not saved. Nor is a value that follows from what all layers share.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class Halves:
  """A function (shared, known, x, *others) -> (value, aux), differentiated by x and the others.

  Attributes:
    program: (shared, known, later, x) -> (value, aux, residuals), flat.
    later: shapes of what the second half alone can read.
    value, aux: their trees.
    residuals: the tree of its residuals, which is the derivative.
    saved: the residuals that the second half cannot read again, each once.
    followed: those that follow from what is shared.
    again: shared -> their values.
  """

  program: core.Jaxpr
  later: Any
  value: Any
  aux: Any
  residuals: Any
  saved: tuple[core.Var, ...]
  followed: tuple[core.Var, ...]
  again: core.Jaxpr

  def forward(self, shared, known, x):
    """(value, aux, saved)."""
    unread = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.later)
    found = core.jaxpr_as_fun(self.program)(*jax.tree.leaves((shared, known, unread, x)))
    value, rest = found[: self.value.num_leaves], found[self.value.num_leaves :]
    by_name = {r: x for r, x in zip(self.program.outvars, found, strict=True)
               if not isinstance(r, core.Literal)}  # fmt: skip
    return (
      jax.tree.unflatten(self.value, value),
      jax.tree.unflatten(self.aux, rest[: self.aux.num_leaves]),
      [by_name[r] for r in self.saved],
    )

  def derivative(self, shared, known, later, saved) -> Callable:
    """Gradient of the value -> gradients of x and the others, as of jax.vjp.

    Args:
      shared, known: as of `forward`.
      later: of these shapes.
      saved: of `forward`.
    """
    program = self.program
    read = dict(zip(program.constvars, program.consts, strict=True))
    # Without x, which comes last.
    read |= dict(zip(program.invars, jax.tree.leaves((shared, known, later)), strict=False))
    read |= dict(zip(self.saved, saved, strict=True))
    again = core.jaxpr_as_fun(self.again)(*jax.tree.leaves(shared))
    read |= dict(zip(self.followed, again, strict=True))
    residuals = program.outvars[self.value.num_leaves + self.aux.num_leaves :]
    values = [r.val if isinstance(r, core.Literal) else read[r] for r in residuals]
    return jax.tree.unflatten(self.residuals, values)


def halves(function: Callable, others: Callable, shared, known, later, x) -> Halves:
  """Those of a function (shared, known, x, *others) -> (value, aux).

  Args:
    others: (known, later) -> what the function is differentiated by beside x.
    shared, known, later, x: trees of arrays, or of their shapes. Both halves read `shared` and
      `known`; `later`, such as a sum that grows from layer to layer, is the second half's alone.

  Raises:
    ValueError: the function computes with `later`.
  """

  def differentiated(shared, known, later, x):
    def by_known(x, *others):
      return function(shared, known, x, *others)

    value, derivative, aux = jax.vjp(by_known, x, *others(known, later), has_aux=True)
    return value, aux, derivative

  program, shapes = jax.make_jaxpr(differentiated, return_shape=True)(shared, known, later, x)
  value, aux, derivative = map(jax.tree.structure, shapes)
  counts = [len(jax.tree.leaves(tree)) for tree in (shared, known, later)]
  of_shared, of_later = program.invars[: counts[0]], program.invars[sum(counts[:2]) : sum(counts)]
  read = {*program.constvars, *program.invars[: sum(counts)]}
  results = value.num_leaves + aux.num_leaves
  residuals = [r for r in _variables(program.outvars[results:]) if r not in read]
  follows, depends, equations = {*program.constvars, *of_shared}, {*of_later}, []
  for e in program.eqns:
    of = _variables(e.invars)
    if depends.intersection(of):
      depends.update(e.outvars)
    if not e.effects and follows.issuperset(of):
      follows.update(e.outvars)
      equations.append(e)
  if wrong := depends.intersection([*_variables(program.outvars[:results]), *residuals]):
    raise ValueError(f"a forward pass computes {next(iter(wrong)).aval} from what comes later")
  followed, kept = tuple(r for r in residuals if r in follows), []
  needed = {*followed}
  for e in reversed(equations):
    if needed.intersection(e.outvars):
      needed.update(_variables(e.invars))
      kept.append(e)
  again = program.replace(invars=of_shared, outvars=list(followed), eqns=kept[::-1])
  saved = tuple(r for r in residuals if r not in follows)
  later = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), later)
  return Halves(program, later, value, aux, derivative, saved, followed, again)


def _variables(of: Iterable[core.Var | core.Literal]) -> list[core.Var]:
  """Each once, without literals."""
  return list(dict.fromkeys(r for r in of if not isinstance(r, core.Literal)))
