"""The folder that an export writes: new, empty, or written by an earlier export.

A manifest lists the files of an export. Only these are replaced or removed; a folder with files of
any other origin is refused.
"""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping

import jax

from fp8jax import errors, records
from fp8jax.errors import UserError

MANIFEST = "fp8jax_export.json"
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_EARLIER = ".replaced"
_REMEDY = "name a new or empty folder as --out"


def check_other(target: str, folders: Mapping[str, str]):
  """Refuses a target that is one of the folders {path: what it is}, by whatever path.

  Raises:
    UserError: it is.
  """
  real = os.path.realpath(target)
  for folder, what in folders.items():
    if real == os.path.realpath(folder):
      raise UserError(f"--out={target!r} is {what}; {_REMEDY}")


def check(target: str, names: Collection[str] = ()):
  """Refuses a target that an export may not write to; changes nothing.

  Args:
    names: files that will be written, as far as they are known.

  Raises:
    UserError: it is no folder, or holds files of another origin.
  """
  if not os.path.lexists(target):
    return
  if not os.path.isdir(target):
    raise UserError(f"--out={target!r} is no folder; {_REMEDY}")
  there = set(os.listdir(target)) - {f"{MANIFEST}.part"}  # of a disk that was full at once
  owned = _owned(target)
  if there and owned is None:
    raise UserError(
      f"{target!r} holds {sorted(there)[0]!r} and was not written by --job=export (it has no "
      f"{MANIFEST}); {_REMEDY}"
    )
  foreign = there - (owned or set())
  # Weights of another origin would be read beside the exported ones.
  in_the_way = {n for n in foreign if n in names or n.endswith((*_WEIGHTS, ".bin"))}
  if in_the_way:
    raise UserError(f"{target!r} holds {sorted(in_the_way)[0]!r}, not of an export; {_REMEDY}")


@contextlib.contextmanager
def replacing(target: str) -> Iterator[str]:
  """The folder beside `target` to write an export in, which then takes its place as a whole.

  Every process must call this; the first changes folders. Where writing fails, an earlier export
  stays.

  Raises:
    UserError: as `check`, or the disk is full.
  """
  part, is_first = os.path.realpath(target) + ".part", jax.process_index() == 0
  if is_first:
    check(target)
  try:
    with errors.writing(target):
      yield part
      if is_first:
        move(part, target)
  except BaseException:
    if is_first:
      discard(part)
    raise


def claim(part: str, names: Collection[str]):
  """Makes the folder that will hold files of these names, without an export that was cut off.

  Raises:
    UserError: as `check`.
  """
  check(part, names)
  discard(part)
  os.makedirs(part, exist_ok=True)
  manifest = {"written_by": "fp8jax --job=export", "files": sorted(set(names))}
  records.write_atomic(os.path.join(part, MANIFEST), records.to_json(manifest))


def files(target: str) -> list[str]:
  """Names of the files of the export in this folder, those that are there."""
  owned = (_owned(target) or set()) - {MANIFEST}
  return [name for name in sorted(owned) if os.path.isfile(os.path.join(target, name))]


def move(part: str, target: str):
  """Moves an export to its place: nothing, an empty folder, or that of an earlier export.

  Folders are renamed as a whole, and the earlier one is deleted last: wherever this is cut off, one
  of the two lies whole at `target` or at `target`.replaced, see `recover`.

  Raises:
    UserError: as `check`.
  """
  check(target, files(part))
  target = os.path.realpath(target)
  recover(target)
  os.makedirs(os.path.dirname(target), exist_ok=True)
  earlier = target + _EARLIER
  if os.path.isdir(target) and os.listdir(target):
    os.rename(target, earlier)
  try:
    os.rename(part, target)
  except OSError:
    if os.path.lexists(earlier):
      os.rename(earlier, target)
    raise
  recover(target)


def recover(target: str):
  """Ends what an interrupted `move` began: the earlier export comes back, or leaves the new one.

  Raises:
    UserError: something of another origin is at `target`.replaced.
  """
  target = os.path.realpath(target)
  earlier = target + _EARLIER
  if not os.path.lexists(earlier):
    return
  check(earlier)
  check(target)
  if not os.path.isdir(target) or not os.listdir(target):
    os.rename(earlier, target)
    return
  for name in set(os.listdir(earlier)) - (_owned(earlier) or set()):  # of the user's
    os.rename(os.path.join(earlier, name), os.path.join(target, name))
  discard(earlier)


def discard(part: str):
  """Removes an export, finished or not, and its folder unless it holds something else."""
  if not os.path.isdir(part):
    return
  for name in sorted(
    _owned(part) or {f"{MANIFEST}.part"}, key=lambda name: name == MANIFEST
  ):  # the manifest last
    with contextlib.suppress(FileNotFoundError):
      os.remove(os.path.join(part, name))
  with contextlib.suppress(OSError):
    os.rmdir(part)


def _owned(target: str) -> set[str] | None:
  """Names of the manifest, finished or not, and itself; None without a manifest."""
  path = os.path.join(target, MANIFEST)
  if not os.path.lexists(path):
    return None
  names = errors.read_json(path, _REMEDY).get("files")
  if not isinstance(names, list):
    raise UserError(f"{path} has no list of files; {_REMEDY}")
  for name in names:
    errors.inside(target, name, path)
    if "/" in name:
      raise UserError(f"{path} names {name!r}, expected the name of a file; {_REMEDY}")
  return {*names, *(f"{name}.part" for name in names), MANIFEST, f"{MANIFEST}.part"}
