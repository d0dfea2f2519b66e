"""Traffic between devices in a compiled step, read from its HLO text.

Bytes are those that a device receives where a collective goes around a ring of n devices (the
convention of nccl-tests): of an all-gather or a reduce-scatter (n - 1) / n of the whole array, of
an all-reduce twice that. Executions are counted as hlo.py counts those of products.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fp8jax.compiled import hlo, saved_tensors

# The bytes that a device receives, of those of its operand.
RECEIVED = {
  "all-gather": lambda n: n - 1,
  "reduce-scatter": lambda n: (n - 1) / n,
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "all-to-all": lambda n: (n - 1) / n,
  "ragged-all-to-all": lambda n: (n - 1) / n,
  "collective-permute": lambda n: 1,
}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_OF_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
  """Collectives of a step that are alike.

  Attributes:
    kind: HLO's name of the operation.
    dtype: HLO's name of what is on the wire, "f32" or "u8".
    axes: of the mesh, that it spans.
    is_async: whether XLA left something between its start and its end.
    count: executions per step.
    nbytes: that a device receives per step.
    beside: of nbytes, those while a product of matrices runs between start and end.
  """

  kind: str
  dtype: str
  axes: tuple[str, ...]
  is_async: bool
  count: int
  nbytes: int
  beside: int = 0

  def __str__(self):
    how = "asynchronous" if self.is_async else "synchronous"
    return (
      f"{self.kind} of {self.dtype} over {', '.join(self.axes)}: {self.count} per step, {how}, "
      f"{self.nbytes / 1e9:.3f} GB, {self.beside / 1e9:.3f} of them beside a product"
    )


def account(text: str, mesh: Mapping[str, int]) -> list[Collective]:
  """The collectives of a program, those of the most bytes first; a group of one moves nothing.

  Args:
    text: compiled HLO.
    mesh: {axis: its size}, in the order of devices.
  """
  program = hlo.Program(text)
  total: dict[tuple, list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])
  for i, table, times, is_async, start in _collectives(program, program.entry, 1, False, {}):
    kind = i.opcode.removesuffix("-start")
    axes, size = _span(i.rest, mesh)
    if size == 1:
      continue
    of_dtype: dict[str, int] = collections.defaultdict(int)
    for name in i.operands:
      for dtype, dims in _ARRAY.findall(table[name].shape):
        elements = math.prod(int(n) for n in dims.split(",") if n)
        of_dtype[dtype] += saved_tensors.nbytes(dtype, elements)
    dtype = max(of_dtype, key=lambda d: of_dtype[d])
    row = total[kind, dtype, axes, is_async]
    row[0] += times
    nbytes = times * sum(of_dtype.values()) * RECEIVED[kind](size)
    row[1] += nbytes
    row[2] += nbytes * (is_async and _has_product_beside(program, *start))
  rows = [
    Collective(kind, dtype, axes, is_async, int(count), round(nbytes), round(beside))
    for (kind, dtype, axes, is_async), (count, nbytes, beside) in total.items()
  ]
  return sorted(rows, key=lambda row: -row.nbytes)


def _has_product_beside(program: hlo.Program, i: hlo.Instruction, table) -> bool:
  """Whether matrices are multiplied between a start and its end, in the order of the schedule."""
  later = itertools.dropwhile(lambda other: other is not i, table.values())
  ends = lambda other: other.opcode.endswith("-done") and i.name in other.operands  # noqa: E731
  return any(map(program.computes_products, itertools.takewhile(lambda x: not ends(x), later)))


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Of Collectives as dictionaries, but for those that move less than a thousandth of the most."""
  most = max((row["nbytes"] for row in rows), default=0)
  return [f"moves: {Collective(**row)}" for row in rows if row["nbytes"] * 1000 >= most]


def _collectives(
  program: hlo.Program, name: str, times: int, is_async: bool, known: dict[str, bool], outer=None
) -> Iterator[tuple[hlo.Instruction, dict[str, hlo.Instruction], int, bool, tuple]]:
  """(instruction, its computation, executions, whether it is asynchronous, what starts it and the
  computation of that) of a computation."""
  table = program.computations[name]
  for i in table.values():
    starts = i.opcode.endswith("-start")
    apart = is_async or (starts and '"is_sync":true' not in i.rest)
    if i.opcode.removesuffix("-start") in RECEIVED:
      yield i, table, times, apart, outer or (i, table)
      continue
    start = outer or ((i, table) if starts else None)
    own = times * (program.trips(i) if i.opcode == "while" else 1)
    for callee in i.called:
      if _has(program, callee, known):
        yield from _collectives(program, callee, own, apart, known, start)


def _has(program: hlo.Program, name: str, known: dict[str, bool]) -> bool:
  """Whether a computation, or one that it calls, has a collective."""
  if name not in known:
    known[name] = any(
      i.opcode.removesuffix("-start") in RECEIVED
      or any(_has(program, callee, known) for callee in i.called)
      for i in program.computations[name].values()
    )
  return known[name]


def _span(rest: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
  """(the axes of a mesh that a group of a collective spans, its devices). Axes of size 1 are left
  out; a part of an axis is named by its devices."""
  wide = tuple(a for a, n in mesh.items() if n > 1)
  first = _first_group(rest, math.prod(mesh.values()))
  for count in range(len(wide) + 1):
    for axes in itertools.combinations(wide, count):
      if {*first} == {*_along(axes, mesh, first[0])}:
        return axes, len(first)
  return (f"groups of {len(first)}",), len(first)


def _along(axes: Collection[str], mesh: Mapping[str, int], device: int = 0) -> list[int]:
  """The devices of a mesh that differ from one along these axes alone."""
  place = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
  at = dict(zip(mesh, np.unravel_index(device, place.shape), strict=True))
  return place[tuple(slice(None) if a in axes else at[a] for a in mesh)].ravel().tolist()


def _first_group(rest: str, devices: int) -> list[int]:
  """The devices of the first group; of a permutation the most that one sender reaches."""
  if match := _OF_MESH.search(rest):
    sizes = {a: int(n) for a, n in re.findall(r"'([^']+)'=(\d+)", match[1])}
    return _along(re.findall(r"'([^']+)'", match[2]), sizes)
  if match := _IOTA.search(rest):
    shape, dims, order = ([int(n) for n in (part or "").split(",") if n] for part in match.groups())
    of_all = np.arange(math.prod(dims)).reshape(dims)
    groups = (of_all.transpose(order) if order else of_all).reshape(shape)
    return groups[0].tolist()
  if match := _LISTED.search(rest):
    return [int(n) for n in match[1].split(",")]
  if "source_target_pairs" not in rest:
    return list(range(devices))
  pairs = re.findall(r"\{(\d+),(\d+)\}", rest.partition("source_target_pairs=")[2])
  to = {int(a): int(b) for a, b in pairs if a != b}

  def reached(device: int) -> list[int]:
    group = [device]
    while (following := to.get(group[-1], device)) not in group:
      group.append(following)
    return group

  return max(map(reached, to), key=len, default=[0])
