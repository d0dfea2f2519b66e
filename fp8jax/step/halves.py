"""A function and its derivative, in two places.

A loop over layers calls the function, another one its derivative. Between them lies what the first
saves: of each intermediate value one entry per layer. Weights, sites, positions and the like are
read again, not saved. Nor is a value that follows from what all layers share.

The first half may have results of products, which are saved as they are, written where they will
lie, in stacks of all layers: whoever reads one later in the same layer reads it there.
"""

import dataclasses
import itertools
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
    parts: of the program, one after the other; all but the last end with one of `placed`.
    later: shapes of what the second half alone can read.
    value, aux: their trees.
    residuals: the tree of its residuals, which is the derivative.
    saved: the residuals that the second half cannot read again, each once, `placed` first.
    placed: those with the name that was asked for, in the order in which they are made.
    followed: those that follow from what is shared.
    again: shared -> their values.
  """

  program: core.Jaxpr
  parts: tuple[core.Jaxpr, ...]
  later: Any
  value: Any
  aux: Any
  residuals: Any
  saved: tuple[core.Var, ...]
  placed: tuple[core.Var, ...]
  followed: tuple[core.Var, ...]
  again: core.Jaxpr

  def forward(self, shared, known, x, stacks=(), i=None):
    """(value, aux, saved).

    Args:
      stacks: perhaps one for each of `placed`. It is saved with the residual as entry i.
    """
    unread = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.later)
    read = dict(zip(self.program.invars, jax.tree.leaves((shared, known, unread, x)), strict=True))
    parts, into, found = self.parts if stacks else [self.program], {}, []
    for part, placed in itertools.zip_longest(parts, zip(self.placed, stacks)):
      found = core.jaxpr_as_fun(part)(*(read[r] for r in part.invars))
      by_name = zip(part.outvars, found, strict=True)
      read |= {r: x for r, x in by_name if not isinstance(r, core.Literal)}
      if placed is not None:
        r, stack = placed
        into[r] = stack = jax.lax.dynamic_update_index_in_dim(stack, read[r], i, 0)
        # Else XLA would hand on what was made, and have it written twice.
        stack = jax.lax.optimization_barrier(stack)
        read[r] = jax.lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)
    value, rest = found[: self.value.num_leaves], found[self.value.num_leaves :]
    return (
      jax.tree.unflatten(self.value, value),
      jax.tree.unflatten(self.aux, rest[: self.aux.num_leaves]),
      [into[r] if r in into else read[r] for r in self.saved],
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


def halves(function: Callable, others: Callable, shared, known, later, x, name: str = "") -> Halves:
  """Those of a function (shared, known, x, *others) -> (value, aux).

  Args:
    others: (known, later) -> what the function is differentiated by beside x.
    shared, known, later, x: trees of arrays, or of their shapes. Both halves read `shared` and
      `known`; `later`, such as a sum that grows from layer to layer, is the second half's alone.
    name: jax.ad_checkpoint.checkpoint_name of the residuals that are `placed`.

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
  saved = [r for r in residuals if r not in follows]
  names = {e.outvars[0]: e.params["name"] for e in program.eqns if e.primitive.name == "name"}
  placed = tuple(r for r in names if r in saved and names[r] == name)
  saved = (*placed, *(r for r in saved if r not in placed))
  later = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), later)
  parts = _cut(program, placed)
  return Halves(program, parts, later, value, aux, derivative, saved, placed, followed, again)


def _cut(program: core.Jaxpr, made: Iterable[core.Var]) -> tuple[core.Jaxpr, ...]:
  """Programs one after the other. Each but the last ends where one of `made` is; the last has the
  results."""
  pieces, ends = [[]], {*made}
  for e in program.eqns:
    pieces[-1].append(e)
    if ends.intersection(e.outvars):
      pieces.append([])
  parts, later, constants = [], set(), {*program.constvars}
  for equations in reversed(pieces):
    own = dict.fromkeys(r for e in equations for r in e.outvars)
    outvars = [r for r in own if r in later] if parts else program.outvars
    read = _variables([*outvars, *(r for e in equations for r in e.invars)])
    invars = [r for r in read if r not in own and r not in constants]
    parts.append(program.replace(invars=invars, outvars=outvars, eqns=equations))
    later.update(invars)
  return tuple(reversed(parts))


def _variables(of: Iterable[core.Var | core.Literal]) -> list[core.Var]:
  """Each once, without literals."""
  return list(dict.fromkeys(r for r in of if not isinstance(r, core.Literal)))
