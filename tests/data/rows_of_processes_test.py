"""Rows of a batch that each process loads."""

import dataclasses
import types

import jax
import pytest

from fp8jax import axes, mesh
from fp8jax.data import batch_sharding
from fp8jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Device:
  id: int
  process_index: int


def _sharders(monkeypatch, shape, acts, devices_each, rows):
  """A BatchSharder per process of so many devices, and the rows that its devices hold."""
  devices = jax.devices()[: shape[0] * shape[1] * shape[2]]
  layout = axes.Layout(mesh.make(shape, devices), (), axes.as_rules(acts))
  real = layout.act_sharding("BL").devices_indices_map((rows, 1)).items()
  of_processes = {Device(device.id, device.id // devices_each): index for device, index in real}
  sharding = types.SimpleNamespace(devices_indices_map=lambda shape: of_processes)
  monkeypatch.setattr(axes.Layout, "act_sharding", lambda *_: sharding)
  made = []
  for process in range(len(devices) // devices_each):
    monkeypatch.setattr(jax, "process_index", lambda n=process: n)
    held = {row for device, index in of_processes.items() if device.process_index == process
            for row in range(*index[0].indices(rows))}  # fmt: skip
    made.append((batch_sharding.BatchSharder(layout, rows, 3), sorted(held)))
  return made


BATCH = dict(B=("data", "fsdp"))


@pytest.mark.parametrize(
  "shape, acts, devices_each, want",
  [
    ((2, 2, 2), BATCH, 4, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
    ((2, 2, 2), dict(B=("fsdp", "data")), 4, [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]),
    ((2, 2, 2), dict(B="fsdp"), 4, [[*range(12)]] * 2),
    ((1, 2, 4), BATCH, 2, [[0, 1, 2, 3, 4, 5]] * 2 + [[6, 7, 8, 9, 10, 11]] * 2),
    ((2, 2, 2), dict(B="fsdp"), 2, [[*range(6)], [*range(6, 12)]] * 2),
    ((4, 1, 2), dict(B=()), 2, [[*range(12)]] * 4),
    ((3, 2, 1), dict(B=("fsdp", "data")), 2, [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
  ],
  ids=[
    "in order",
    "turned",
    "a copy each",
    "tensor over processes",
    "shares in turn",
    "whole",
    "of three",
  ],
)
def test_processes_share_the_rows_of_a_batch(monkeypatch, shape, acts, devices_each, want):
  made = _sharders(monkeypatch, shape, acts, devices_each, 12)
  assert [held for _, held in made] == want
  different = [rows for i, rows in enumerate(want) if rows not in want[:i]]
  for sharder, held in made:
    assert sharder.local_rows == len(held) and sharder.local_batch == 3 * len(held)
    assert sharder.shard == batch_sharding.loader.Shard(different.index(held), len(different))
    assert sharder.order == [different.index(rows) for rows in want]


def test_processes_with_parts_of_each_others_rows_are_refused(monkeypatch):
  words = r"rows 0,1,2,3\.\.\. and 4,5,6,7\.\.\. of 12, .* mesh axes after those of sharding.acts.B"
  with pytest.raises(UserError, match=words):
    _sharders(monkeypatch, (1, 3, 2), BATCH, 3, 12)
