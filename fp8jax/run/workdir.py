"""One run per working directory: a lock that ends with the process that holds it."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Mapping
from typing import Any

import jax

from fp8jax import records
from fp8jax.config import identity
from fp8jax.errors import UserError
from fp8jax.run import schemas

# The files that say that a run is over.
_ENDS = ("summary.json", "trial.json")


def reopen(workdir: str):
  """Removes them, from process 0: a leg begins, of another configuration or length, and may be
  interrupted at any time."""
  for name in _ENDS if jax.process_index() == 0 else ():
    with contextlib.suppress(FileNotFoundError):
      os.remove(os.path.join(workdir, name))


def finished(
  workdir: str, flat: dict[str, Any], fingerprint: str, job: str = "train"
) -> dict[str, Any] | None:
  """The summary of a run of the job that is finished under this very configuration and data, else
  None."""
  kinds = dict(summary=schemas.Summary, config=schemas.Config, provenance=schemas.Provenance)
  paths = {os.path.join(workdir, f"{name}.json"): kind for name, kind in kinds.items()}
  if jax.process_count() > 1 or not all(map(os.path.exists, paths)):
    return None  # several processes may not see the same folder
  summary, config, provenance = (
    records.read(path, kind, "remove it to go on") for path, kind in paths.items()
  )
  is_same = (
    not identity.diff(flat, config.get("resolved") or {})
    and provenance.get("data_fingerprint") == fingerprint
    # Earlier versions do not state it; of a search, its checkpoint knows.
    and provenance.get("job", "" if job == "search" else job) == job
  )
  return summary if is_same and is_over(summary, flat) else None


def is_over(summary: Mapping[str, Any], flat: Mapping[str, Any]) -> bool:
  """Whether a run of this configuration that left this summary has taken all steps; those of
  data.epochs, which is counted in the data, stand in the summary."""
  steps = summary.get("steps", flat["steps"]) if flat.get("data.epochs") else flat["steps"]
  return summary["step"] >= steps


def is_locked(workdir: str) -> bool:
  """Whether a run works in `workdir` now."""
  try:
    with open(os.path.join(workdir, ".lock")) as f:
      fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:  # no run has been there
    return False
  return False


@contextlib.contextmanager
def locked(workdir: str, flag: str = "--workdir"):
  """Inside, no other run works in `workdir`. Process 0 holds the lock for all processes of a run.

  The kernel releases it however the process ends. The file stays, and names the last holder.

  Args:
    flag: that names the folder.

  Raises:
    UserError: another run holds it, and which; or the folder cannot be made.
  """
  if jax.process_index() != 0:
    yield
    return
  records.make_folder(workdir, flag)
  path = os.path.join(workdir, ".lock")
  with open(path, "a+") as f:
    try:
      fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      f.seek(0)
      raise UserError(
        f"{workdir} is in use by another run ({f.read().strip() or 'which has not said who it is'})"
        f"; wait for it, stop it, or name another {flag}"
      ) from e
    f.truncate(0)
    f.write(f"process {os.getpid()} on {socket.gethostname()}")
    f.flush()
    yield
