"""All keys of the configuration: the base configuration, keys by name, the text of --explain."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from fp8jax import keys
from fp8jax.errors import UserError, key_hint
from fp8jax.evaluation.settings import Noise, Tasks
from fp8jax.export.settings import Export
from fp8jax.generation.settings import Generate, PlanInference
from fp8jax.keys import Affects, Key
from fp8jax.models.config import Lora
from fp8jax.optim.optimizers import OptimizerConfig
from fp8jax.ptq.settings import Quantize
from fp8jax.rl.settings import RL
from fp8jax.run.settings import Calibrate, Prepare
from fp8jax.search.settings import Search
from fp8jax.sensitivity.settings import Sensitivity
from fp8jax.step import settings

SECTIONS: tuple[Any, ...] = (
  settings.Run, settings.Init, settings.Model, Lora, settings.Precision, settings.Kernels,
  settings.Memory, settings.Data, OptimizerConfig, settings.LossScale, settings.Distill,
  settings.Mesh, settings.Sharding, settings.Weights, settings.Eval, Tasks, settings.Checkpoint,
  settings.Log, Export, Quantize, Calibrate, Sensitivity, Search, RL, Noise, Prepare, Generate,
  PlanInference,
)  # fmt: skip
KEYS: dict[str, Key] = {one.name: one for section in SECTIONS for one in section.KEYS}


def base() -> ConfigDict:
  """A new configuration with every key at its default, locked: another key is an error."""
  c = ConfigDict()
  for name, one in KEYS.items():
    *above, last = name.split(".")
    node: Any = c
    for part in above:
      if part not in node:
        node[part] = ConfigDict()
      node = node[part]
    value = one.default
    if one.is_open:
      value = ConfigDict(dict(value), type_safe=False)
    node[last] = placeholder(one.type) if value is None else value
  c.lock()
  for name in (name for name, one in KEYS.items() if one.is_open):
    at(c, name).unlock()  # the user's names
  return c


def at(c: Any, name: str) -> Any:
  """The value, or the group, of a name such as "optim.peak_lr"."""
  for part in name.split("."):
    c = c[part]
  return c


def section(c: Any, cls: type, **others: Any) -> Any:
  """A section of a configuration, typed; see keys.read."""
  return keys.read(cls, at(c, cls.NAME) if cls.NAME else c, **others)  # pyright: ignore


def problems(c: Any) -> list[str]:
  """Values below their least or of no choice, in words; of a configuration with every key."""
  return [
    problem
    for cls in SECTIONS
    for problem in keys.problems(cls, at(c, cls.NAME) if cls.NAME else c)
  ]


def affects(name: str, change: Sequence[Any] | None = ()) -> Affects:
  """The consequence of another value of a key, or of a name below one that is open.

  A name that is no key is of the resolved model, or of the content of the data.

  Args:
    change: the values that it has, where they are known.
  """
  one = _find(name)
  if one is None or any(value in one.altering for value in change or ()):
    return Affects.RESULT
  return one.affects


def is_mapped(name: str) -> bool:
  """Whether a mapped sweep honours a key, or a name below one that is open."""
  one = _find(name)
  return one is not None and one.is_mapped


def _find(name: str) -> Key | None:
  parts = name.split(".")
  above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
  return next((KEYS[one] for one in above if one in KEYS), None)


def explain(name: str) -> str:
  """The text of --explain: a key, or every key of a section; "" is all of them.

  Raises:
    UserError: there is no such key; names the nearest.
  """
  keys = [k for k in KEYS.values() if not name or f"{k.name}.".startswith(f"{name}.")]
  # Names below a key that the user fills: data.sources.main.path.
  keys = keys or [k for k in KEYS.values() if name.startswith(f"{k.name}.")]
  if not keys:
    hint = key_hint(name, KEYS) or "--help-config prints all keys"
    raise UserError(f"{name!r} is no key of the configuration; {hint}")
  return "\n".join(map(_text, keys))


def shown_default(one: Key) -> str:
  """A default as a reader writes it: 1e-08, "auto", {}."""
  value = dict(one.default) if isinstance(one.default, Mapping) else one.default
  return repr(value).replace("'", '"')


def _text(one: Key) -> str:
  meaning = textwrap.fill(one.meaning, 96, initial_indent="    ", subsequent_indent="    ")
  return f"{one.name} = {shown_default(one)}\n{meaning}"
