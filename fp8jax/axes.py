"""One alphabet for shapes, einsums and shardings.

Every dimension has one letter; a letter's mesh axes follow from two small tables, one for weights
at rest and one for activations. Above `ops/`:

  B batch        L query length   M key length   D model        F feed-forward   V vocabulary
  N layers       H query heads    G key/value heads             K head size      S statistics
  R rank of an adapter            C scores of a reward head, 1

Notation in docstrings: A[M, K_tensor] . B[K_tensor, N] -> C[M, N] {sum over tensor}.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

Rules = tuple[tuple[str, tuple[str, ...]], ...]


def as_rules(table: Mapping[str, str | tuple[str, ...]]) -> Rules:
  """{"F": "tensor", "B": ("data", "fsdp")} as a hashable, ordered value.

  Text, in a tuple too, is that of a command line: one axis, several as "data,fsdp" or in brackets,
  "" for none.
  """

  def names(value: str | tuple[str, ...]) -> tuple[str, ...]:
    text = value if isinstance(value, str) else ",".join(value)
    return tuple(name for part in text.split(",") if (name := part.strip("()[]'\" ")))

  return tuple(sorted((letter, names(value)) for letter, value in table.items()))


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where each letter lives.

  Attributes:
    mesh: the device mesh, or None for a single device. May be abstract.
    weights: letter -> mesh axes of a parameter at rest (and of its gradient and moments).
    acts: letter -> mesh axes of an activation. A weight is gathered to these before its GEMM.
    is_manual: True inside a `shard_map` region. Scales still see the whole tensor; partial sums and
      weight gathers are then the caller's.
    microbatches: parts of a step's tokens, one after the other; an array has those of one.
    in_flight: collectives that a GPU's schedule may have under way at once.
    spare: multiprocessors that a GEMM leaves to collectives.
    wire: Quant in which devices send each other their terms of a weight's gradient; None: float32.
  """

  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
  weights: Rules = ()
  acts: Rules = ()
  is_manual: bool = False
  microbatches: int = 1
  in_flight: int = 1
  spare: int = 0
  wire: Any = None

  def weight_axes(self, letter: str) -> tuple[str, ...]:
    return dict(self.weights).get(letter, ()) if self.mesh is not None else ()

  def act_axes(self, letter: str) -> tuple[str, ...]:
    return dict(self.acts).get(letter, ()) if self.mesh is not None else ()

  def act_axes_of(self, letters: str) -> tuple[str, ...]:
    """Mesh axes over which any of `letters` is split."""
    return tuple(axis for letter in letters for axis in self.act_axes(letter))

  def weight_spec(self, letters: str) -> PartitionSpec:
    return PartitionSpec(*(self.weight_axes(letter) or None for letter in letters))

  def act_spec(self, letters: str) -> PartitionSpec:
    return PartitionSpec(*(self.act_axes(letter) or None for letter in letters))

  def weight_sharding(self, letters: str) -> NamedSharding | None:
    """Where a parameter rests; None on a single device."""
    return NamedSharding(self.mesh, self.weight_spec(letters)) if self.mesh is not None else None

  def act_sharding(self, letters: str) -> NamedSharding | None:
    """Where an activation or a batch lies; None on a single device."""
    return NamedSharding(self.mesh, self.act_spec(letters)) if self.mesh is not None else None

  @property
  def everywhere(self) -> NamedSharding | None:
    """Of an array that every device holds whole; None without a mesh."""
    return self.act_sharding("")

  def size(self, axes: tuple[str, ...]) -> int:
    """Number of shards along `axes`."""
    if self.mesh is None:
      return 1
    return math.prod(self.mesh.shape[a] for a in axes)

  def weight_axes_of(self, letters: str) -> tuple[str, ...]:
    """Mesh axes over which any of `letters` of a weight at rest is split."""
    return tuple(axis for letter in letters for axis in self.weight_axes(letter))

  def smaller(self, over: Sequence[str]) -> str:
    """The keys of those axes that split something: "mesh.fsdp or mesh.tensor"."""
    return " or ".join(f"mesh.{axis}" for axis in dict.fromkeys(over) if self.size((axis,)) > 1)

  def served(self) -> "Layout":
    """This layout for generation: a weight lies as its product needs it, and is never gathered."""
    return dataclasses.replace(self, weights=self.acts)

  def manual(self) -> "Layout":
    """This layout as seen from inside a `shard_map` over the whole mesh."""
    return dataclasses.replace(self, is_manual=True)


# A single device: nothing is split.
LOCAL = Layout()


def constrain(x, letters: str, layout: Layout):
  """Pins activation x, with one letter per dimension, to its place on the mesh."""
  if layout.mesh is None or layout.is_manual:
    return x
  return jax.lax.with_sharding_constraint(x, layout.act_sharding(letters))


def stacked(specs):
  """PartitionSpecs of a tree with an axis more in front, which nothing splits."""
  is_spec = lambda p: isinstance(p, jax.sharding.PartitionSpec)  # noqa: E731
  lead = lambda p: jax.sharding.PartitionSpec(None, *p)  # noqa: E731
  return jax.tree.map(lead, specs, is_leaf=is_spec)
