"""A configuration as its file gives it: it has the keys of configs/base.py, and usable numbers."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from fp8jax import keys
from fp8jax.config import registry
from fp8jax.errors import ConfigErrors, UserError

# A ConfigDict with every key of configs/base.py; types cannot know its keys.
Config = Any

# Steps and sizes are int32 on the device; what a corpus is counted in is not.
_LARGEST = 2**31 - 1
_LARGE = ("prepare.shard_tokens",)


def check_type(c: Any):
  """Refuses what a get_config returned instead of a configuration."""
  if not isinstance(c, ConfigDict):
    raise UserError(
      f"get_config returned {type(c).__name__}, expected the ConfigDict of base.get_config(); "
      "begin with `c = base.get_config(arm)`, end with `return c`"
    )


def check_keys(c: Any, base: ConfigDict):
  """Refuses a configuration that lacks a key of `base`, has one that nothing reads, or a value of
  another type.

  Raises:
    UserError: names the keys; or what get_config returned instead of a configuration.
  """
  check_type(c)
  problems = ConfigErrors()
  _compare("", c, base, problems)
  problems.refuse()


def _compare(prefix: str, c: ConfigDict, base: ConfigDict, problems: ConfigErrors):
  if missing := sorted({*base} - {*c}):
    problems.found.append(
      f"{', '.join(prefix + key for key in missing)}: missing; begin get_config with "
      "`c = base.get_config(arm)`, which has every key"
    )
  known = [f"{prefix}{key}" for key in base]
  added = [f"{prefix}{key}" for key in sorted({*c} - {*base})]
  problems.keys("get_config added a key that nothing reads", added, known)
  for key in sorted({*base} & {*c}):
    here, wanted = c[key], base[key]
    if (one := registry.KEYS.get(f"{prefix}{key}")) is not None:
      shown = here.to_dict() if isinstance(here, ConfigDict) else here
      expected = keys.expected(one.annotation)
      problems.check(keys.is_of(here, one.annotation), f"{one.name}={shown!r}: expected {expected}")
    elif isinstance(here, ConfigDict) and isinstance(wanted, ConfigDict):
      _compare(f"{prefix}{key}.", here, wanted, problems)
    elif isinstance(here, ConfigDict) or isinstance(wanted, ConfigDict):
      expected = "a group of keys" if isinstance(wanted, ConfigDict) else "a value"
      problems.found.append(f"{prefix}{key} is {here!r}, expected {expected}")


def without_files(c: Config) -> Config:
  """A copy without the text and, unless they say what the model is, weights that it names.

  The program does not depend on them, and they need not be here when a run is planned.
  """
  c = c.copy_and_resolve_references()
  if c.model.preset != "hf":
    c.init.hf = ""
  c.data.tokenizer, c.data.eos = "bytes", ""
  names = ("path", "chat", "field", "dataset", "split")
  c.data.sources = {"main": dict(kind="pydoc", weight=1.0, **dict.fromkeys(names, ""))}
  c.data.samples_per_step, c.data.epochs, c.data.on_long = 0, 0.0, "split"
  return c


def check_numbers(flat: Mapping[str, Any], problems: ConfigErrors):
  """Notes numbers that are not finite, and integers too large for what they count.

  Args:
    flat: {"optim.peak_lr": 1e-3, ...}; lists are searched, too.
  """
  for key, value in flat.items():
    for number in jax.tree.leaves(value):
      if isinstance(number, bool) or not isinstance(number, (int, float)):
        continue
      if isinstance(number, float):
        problems.check(math.isfinite(number), f"{key}={number} must be a finite number")
      elif key not in _LARGE:
        problems.check(
          abs(number) <= _LARGEST, f"{key}={number} must be at most {_LARGEST} in magnitude"
        )
      else:
        problems.check(abs(number) < 2**53, f"{key}={number} must be below 2**53")
