"""A configuration by the name that the command line gives it, without running it."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from fp8jax.config import identity
from fp8jax.config.files import Config
from fp8jax.errors import ConfigErrors, UserError


def flat(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
  """`load` as plain values, {"optim.peak_lr": 1e-3, ...}."""
  return identity.flatten(load(name, changes))


def load(name: str, changes: Mapping[str, Any]) -> Config:
  """The configuration of "FILE" or "FILE:ARM" with `changes`, {"optim.peak_lr": 1e-3}.

  Raises:
    UserError: there is no such file, or it does not have these keys with values of these types.
  """
  path, _, arm = name.partition(":")
  if not os.path.isfile(path):
    raise UserError(f"no config file {path!r}")
  spec = importlib.util.spec_from_file_location("named_config", path)
  if spec is None or spec.loader is None:
    raise UserError(f"config file {path!r} is no Python file")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  c = module.get_config(arm) if arm else module.get_config()
  problems = ConfigErrors()
  problems.keys(name, changes, identity.flatten(c))
  problems.refuse()
  for key, value in changes.items():
    try:
      c.update_from_flattened_dict({key: value})
    except (TypeError, ValueError) as e:
      raise UserError(f"{name}: {key}={value!r}: {e}") from e
  return c
