"""Keys of the configuration: each is declared once, in the section that owns it.

A section is a frozen dataclass whose fields are keys. Type, default, meaning, bounds, what a change
affects and whether a mapped sweep honours it stand in the declaration alone. configs/base.py,
--explain, the guide's table, the checks of bounds, resuming, comparisons and sweeps derive from it.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fp8jax.errors import ConfigErrors


class Affects(enum.Enum):
  """The consequence of another value of a key.

  Attributes:
    RESULT: other numbers. A resumed run refuses the change, and a comparison shows it.
    EXECUTION: the same run in another way (devices, memory, speed, its start, which is over). A
      resumed run takes the change, and a comparison shows it.
    NOTHING: no training (reports, checkpoints, other jobs). Both ignore the change.
  """

  RESULT = enum.auto()
  EXECUTION = enum.auto()
  NOTHING = enum.auto()


RESULT, EXECUTION, NOTHING = Affects


@dataclasses.dataclass(frozen=True)
class Key:
  """A key of the configuration.

  Attributes:
    name: "optim.peak_lr".
    annotation: of its values, e.g. int, float | None or tuple[str, ...].
    default: of the base configuration.
    meaning: for --explain and the guide, unit included.
    least: the smallest number, or None.
    choices: the values of a name, or None.
    refused: values that users expect and that are none of the choices, with the reason.
    affects: what another value changes.
    is_mapped: whether a mapped sweep honours the key (sweeps/stacked.py reads it, or training does
      not); one that it does not must have its default.
    is_open: whether the user adds names below it (data.sources).
    altering: values between which and the others a change affects the result, whatever `affects`.
  """

  name: str
  annotation: Any
  default: Any
  meaning: str
  least: float | None
  choices: tuple[str, ...] | None
  refused: Mapping[str, str]
  affects: Affects
  is_mapped: bool
  is_open: bool
  altering: tuple[str, ...]

  @property
  def is_optional(self) -> bool:
    """Whether None is a value, too."""
    return isinstance(self.annotation, types.UnionType)

  @property
  def type(self) -> type:
    """int, float, str, bool, tuple or dict."""
    kind = typing.get_args(self.annotation)[0] if self.is_optional else self.annotation
    return typing.get_origin(kind) or kind


def key(
  default: Any,
  meaning: str,
  *,
  least: float | None = None,
  choices: Iterable[str] | None = None,
  refused: Mapping[str, str] | None = None,
  affects: Affects | None = None,
  mapped: bool | None = None,
  opened: bool = False,
  altering: tuple[str, ...] = (),
) -> Any:
  """Declares a key as a field of a section; see Key.

  The default of a key that joins a section is what was computed before it: a run that began without
  the key goes on with the default.

  Args:
    affects, mapped: None takes the section's.
  """
  facts = dict(meaning=meaning, least=least, choices=choices and tuple(choices),
               refused=refused or {}, affects=affects, is_mapped=mapped, is_open=opened,
               altering=altering)  # fmt: skip
  if isinstance(default, dict):
    return dataclasses.field(default_factory=lambda: dict(default), metadata=facts)
  return dataclasses.field(default=default, metadata=facts)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(key,))
def section(name: str, affects: Affects = RESULT, mapped: bool = False) -> Callable[[type], type]:
  """Makes a class a section of the configuration.

  Args:
    name: "optim"; "" for keys of no section.
    affects, mapped: of the keys that do not say.
  """

  def make(cls: type) -> type:
    made = dataclasses.dataclass(frozen=True)(cls)
    prefix, annotations = f"{name}." * bool(name), typing.get_type_hints(made)
    made.NAME = name  # pyright: ignore  (a class attribute)
    made.KEYS = tuple(  # pyright: ignore
      _key(f"{prefix}{field.name}", field, annotations[field.name], affects, mapped)
      for field in dataclasses.fields(made)
      if "meaning" in field.metadata
    )
    return made

  return make


def _key(name: str, field: dataclasses.Field, annotation, affects: Affects, mapped: bool) -> Key:
  facts = dict(field.metadata)
  facts["affects"] = facts["affects"] or affects
  facts["is_mapped"] = mapped if facts["is_mapped"] is None else facts["is_mapped"]
  is_made = field.default is dataclasses.MISSING
  default = field.default_factory() if is_made else field.default  # pyright: ignore
  return Key(name, annotation, default, **facts)


def read(cls: type, values: Mapping[str, Any], **others: Any) -> Any:
  """A section from the values of its keys; lists, which JSON has, become tuples.

  Args:
    values: at least its keys, by their last names.
    others: fields that are no keys.
  """
  names = [k.name.rpartition(".")[2] for k in cls.KEYS]  # pyright: ignore
  return cls(**{name: as_tuple(values[name]) for name in names}, **others)


def as_tuple(value: Any) -> Any:
  """Lists, at any depth, as tuples."""
  return tuple(map(as_tuple, value)) if isinstance(value, (list, tuple)) else value


def is_of(value: Any, annotation: Any) -> bool:
  """Whether a value is of a key's annotation; a list, which JSON has, is a tuple."""
  if annotation is Any:
    return True
  if isinstance(annotation, types.UnionType):
    return any(is_of(value, one) for one in typing.get_args(annotation))
  kind, of = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
  if kind is tuple:
    return isinstance(value, (tuple, list)) and all(is_of(v, of[0]) for v in value)
  if kind is dict:
    return hasattr(value, "items") and all(is_of(v, of[1]) for _, v in value.items())
  if kind in (int, float):
    return isinstance(value, (int, kind)) and not isinstance(value, bool)
  return isinstance(value, kind)


def expected(annotation: Any) -> str:
  """An annotation in words: "a whole number, or None", "a tuple, each entry a text"."""
  if isinstance(annotation, types.UnionType):
    return ", or ".join(map(expected, typing.get_args(annotation)))
  kind, of = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
  inner = of[1] if kind is dict else of[0] if of else Any
  return _WORDS[kind] + ("" if inner is Any else f", each entry {expected(inner)}")


_WORDS = {
  int: "a whole number", float: "a number", str: "a text", bool: "True or False", tuple: "a tuple",
  dict: "a group", types.NoneType: "None",
}  # fmt: skip


def problems(cls: type, values: Mapping[str, Any]) -> list[str]:
  """The values of a section that lie below their least or are none of their choices, in words."""
  collected = ConfigErrors()
  for one in cls.KEYS:  # pyright: ignore
    value = values[one.name.rpartition(".")[2]]
    if one.least is not None and value is not None:
      collected.check(value >= one.least, f"{one.name}={value} must be at least {one.least}")
    if isinstance(value, str) and value in one.refused:
      collected.found.append(f"{one.name}={value!r}: {one.refused[value]}")
    elif one.choices is not None and value is not None:
      collected.one_of(one.name, value, one.choices)
  return collected.found
