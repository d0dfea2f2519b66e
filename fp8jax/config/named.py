"""A configuration by the name that the command line gives it, and files of users that run here."""

import contextlib
import os
import re
import runpy
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from fp8jax.config import identity
from fp8jax.config.files import Config, check_type
from fp8jax.errors import REMOVED, ConfigErrors, UserError, one_line


@contextlib.contextmanager
def of_user(path: str) -> Iterator[None]:
  """Inside, the code of a user's file runs; what it raises becomes one line that says where.

  Raises:
    UserError: instead of an exception, or of the end of the program, SystemExit.
  """
  try:
    yield
  except SyntaxError as e:
    line = f", line {e.lineno}" if e.lineno else ""
    raise UserError(f"{e.filename or path}{line}: {e.msg}; the file is no valid Python") from e
  except (Exception, SystemExit) as e:
    stack, own = traceback.extract_tb(e.__traceback__), os.path.abspath(path)
    frames = [f for f in stack if os.path.abspath(f.filename) == own]
    where = f"{path}, line {frames[-1].lineno}" if frames else path
    if isinstance(e, SystemExit):
      said = f"the file ends the program, sys.exit({e.code!r}); remove the call"
    else:
      said = one_line(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {one_line(e)}"
    if dotted := re.search(r"does not accept dots .* key (\S+) contains", said):
      name = dotted[1]
      said = f"the name {name!r} has a dot, which separates keys; write {name.replace('.', '_')!r}"
    if frames and isinstance(e, AttributeError):  # a configuration has no such key
      line = frames[-1].line or ""
      gone = [key for key in REMOVED if re.search(rf"\.{re.escape(key)}\b", line)]
      said = "; ".join(f"{key} is no key; {REMOVED[key][0]}" for key in gone) or said
    raise UserError(f"{where}: {said}") from e


def flat(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
  """`load` as plain values, {"optim.peak_lr": 1e-3, ...}."""
  return identity.flatten(load(name, changes))


def job(path: str) -> str:
  """The job of a configuration's file, which it names as JOB; "train" without."""
  with of_user(path):
    return str(runpy.run_path(path).get("JOB", "train"))


def load(name: str, changes: Mapping[str, Any]) -> Config:
  """The configuration of "FILE" or "FILE:ARM" with `changes`, {"optim.peak_lr": 1e-3}.

  Raises:
    UserError: there is no such file, it raises, or has no such keys with values of these types.
  """
  path, _, arm = name.partition(":")
  if not os.path.isfile(path):
    raise UserError(f"no config file {path!r}")
  with of_user(path):
    get_config = runpy.run_path(path).get("get_config")
    if get_config is None:
      raise UserError("defines no get_config; write `def get_config(arm='')` in it")
    c = get_config(arm) if arm else get_config()
    check_type(c)
  problems = ConfigErrors()
  problems.keys(name, changes, identity.flatten(c))
  problems.refuse()
  for key, value in changes.items():
    try:
      c.update_from_flattened_dict({key: value})
    except (TypeError, ValueError) as e:
      raise UserError(f"{name}: {key}={value!r}: {e}") from e
  return c
