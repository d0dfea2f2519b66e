"""One run per working directory: a lock that ends with the process that holds it."""

import contextlib
import fcntl
import os
import socket

import jax

from fp8jax.errors import UserError


@contextlib.contextmanager
def locked(workdir: str):
  """Inside, no other run works in `workdir`. Process 0 holds the lock for all processes of a run.

  The kernel releases it however the process ends. The file stays, and names the last holder.

  Raises:
    UserError: another run holds it, and which; or the folder cannot be made.
  """
  if jax.process_index() != 0:
    yield
    return
  try:
    os.makedirs(workdir, exist_ok=True)
  except OSError as e:
    raise UserError(
      f"--workdir={workdir} cannot be a folder: {e.strerror}; name another one"
    ) from e
  path = os.path.join(workdir, ".lock")
  with open(path, "a+") as f:
    try:
      fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      f.seek(0)
      raise UserError(
        f"{workdir} is in use by another run ({f.read().strip() or 'which has not said who it is'})"
        "; wait for it, stop it, or name another --workdir"
      ) from e
    f.truncate(0)
    f.write(f"process {os.getpid()} on {socket.gethostname()}")
    f.flush()
    yield
