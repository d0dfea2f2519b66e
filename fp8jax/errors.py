"""Errors that a user can put right: the launcher prints them in one piece, without a traceback."""

import contextlib
import difflib
import errno
import json
import math
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any


class UserError(ValueError):
  """Says what was wrong, what was expected and what to do."""


class ConfigError(UserError):
  """Everything that is wrong with a configuration, one line each."""

  def __init__(self, problems: list[str]):
    self.problems = problems
    lines = "\n".join(f"  - {p}" for p in problems)
    super().__init__(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the config:\n{lines}")


# The extra of pyproject.toml that installs a module.
EXTRAS = {
  "absl": "train", "grain": "train", "ml_collections": "train", "orbax": "train", "rich": "train",
  "tensorboardX": "train", "flax": "flax", "gguf": "hf", "huggingface_hub": "hf",
  "safetensors": "hf", "tokenizers": "hf", "array_record": "data", "pyarrow": "data",
  "tensorflow_datasets": "data", "jinja2": "sft", "tokamax": "attention", "datasets": "datasets",
  "reasoning_gym": "eval", "math_verify": "eval", "altair": "report", "vl_convert": "report",
  "scipy": "report", "optuna": "sweep", "submitit": "sweep", "lm_eval": "lm_eval", "PIL": "train",
  "trackio": "track", "wandb": "track", "fsspec": "data", "msgspec": "train",
}  # fmt: skip


def missing_package(e: ModuleNotFoundError) -> str:
  """The package to install for an import that failed."""
  module = (e.name or "").partition(".")[0]
  package = f"fp8jax[{EXTRAS[module]}]" if module in EXTRAS else module
  return f"the package {e.name!r} is not installed; pip install '{package}'"


# Names less alike than this are different names, not misspellings (difflib's ratio). Keys are many,
# and some resemble every wish ("format" and "remat": 0.73).
_ALIKE, _ALIKE_KEY = 0.6, 0.75


def nearest(name: str, known: Iterable[str]) -> str | None:
  """The known name that `name` misspells, or None if it is like none of them."""
  matches = difflib.get_close_matches(name, known, 1, _ALIKE)
  return matches[0] if matches else None


def nearest_key(key: str, known: Collection[str]) -> str | None:
  """The known key of a configuration most like a mistyped one, or None if it is like none.

  The last parts must be alike: a section in common makes no key of a wish.
  """
  last = key.rpartition(".")[2]
  lasts = {k.rpartition(".")[2] for k in known}
  alike = set(difflib.get_close_matches(last, lasts, len(lasts), _ALIKE_KEY))
  alike |= {k for k in lasts if len(last) > 3 and k.startswith(last)}  # "warmup"
  candidates = [k for k in known if k.rpartition(".")[2] in alike]

  def likeness(candidate: str) -> tuple[float, float]:
    of_last = difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio()
    return difflib.SequenceMatcher(None, key, candidate).ratio() + of_last, of_last

  return max(candidates, key=likeness, default=None)


# Keys of earlier versions: (what took their place, their value where it is fixed now).
REMOVED: dict[str, tuple[str, Any]] = {
  "eval.hf": ("it is weights.hf now", None),
  "eval.step": ("it is weights.step now", None),
  "generate.hf": ("it is weights.hf now", None),
  "export.path": ("name the folder as --out=FOLDER", None),
  "prepare.path": ("name the folder as --out=FOLDER", None),
  "sensitivity.path": ("name the folder as --out=FOLDER", None),
  "calibrate.path": ("name the table as --out=FILE", None),
  "aot.topology": ("name the devices as --topology=h200:8", None),
  "eval.samples": ("give it to the task: eval.tasks='NAME(samples=4)'", None),
  "eval.temperature": ("give it to the task: eval.tasks='NAME(temperature=0.6)'", None),
  "eval.max_new_tokens": ("give it to the task: eval.tasks='NAME(max_new_tokens=512)'", None),
  "sensitivity.groups": ("all groups are measured", None),
  "sensitivity.top": ("the 20 most sensitive sites are measured alone", None),
  "log.profile_start": ("it is the first number of log.profile now", None),
  "log.profile_steps": ("it is the second number of log.profile now", None),
  "loss_scale.start": ("every run starts from 256", 256.0),
  "loss_scale.growth_interval": ("the scale doubles after 2000 good steps", 2000),
  # Of other trainers; here there was never one.
  "rl.staleness": ("the present parameters draw; rl.updates_per_rollout takes more steps on a "
                   "rollout", None),
}  # fmt: skip


def key_hint(key: str, known: Collection[str], form: str = "{}") -> str:
  """The successor of a key that is none any more, or the nearest one; "" where there is neither.

  Args:
    form: of the nearest key, e.g. "--config.{}".
  """
  if key in REMOVED:
    return REMOVED[key][0]
  near = nearest_key(key, known)
  return f"did you mean {form.format(near)}?" if near else ""


def one_line(e: Exception) -> str:
  """The message of a library, whatever its line breaks."""
  return " ".join(str(e).split())


# Of a disk that is full, or of a quota, in the words that libraries pass on.
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
MAKE_ROOM = "make room there, and the same command goes on"


def not_written(path: str, e: Exception, otherwise: str) -> UserError:
  """The error of a file or folder that cannot be written; `otherwise`: unless the disk is full."""
  full = next((reason for reason in _FULL if reason in str(e)), "")
  reason = full or getattr(e, "strerror", None) or one_line(e)[:300] or type(e).__name__
  return UserError(f"{path} cannot be written: {reason}; {MAKE_ROOM if full else otherwise}")


@contextlib.contextmanager
def writing(path: str, otherwise: str = ""):
  """Where the disk is full, the error names what was being written.

  The operating system names no file when a write fails, and array_record raises RuntimeError.

  Args:
    path: folder or file, unless the error or an inner `writing` knows a nearer one.
    otherwise: the remedy for any other error; "" lets it pass.

  Raises:
    UserError: there is no room, or, with `otherwise`, the operating system refuses.
  """
  try:
    yield
  except (OSError, RuntimeError) as e:
    if not otherwise and not any(reason in str(e) for reason in _FULL):
      raise
    raise not_written(getattr(e, "filename", None) or path, e, otherwise) from e


def load_json(path: str, remedy: str) -> Any:
  """The JSON document in a file.

  Raises:
    FileNotFoundError, UserError: it is not there, or no such thing; with the remedy.
  """
  try:
    with open(path, "rb") as f:
      return json.loads(f.read().decode())
  except FileNotFoundError as e:
    raise FileNotFoundError(f"{path} does not exist; {remedy}") from e
  except OSError as e:  # a folder, a file in place of a folder, no permission
    raise UserError(f"{path} cannot be read: {e.strerror}; {remedy}") from e
  except UnicodeDecodeError as e:
    line = e.object.count(b"\n", 0, e.start) + 1
    raise UserError(f"{path}:{line} is not UTF-8: {e}; {remedy}") from e
  except (ValueError, RecursionError) as e:  # also a nesting beyond Python's limit
    raise UserError(f"{path} is not JSON: {e}; {remedy}") from e


def read_json(path: str, remedy: str) -> dict[str, Any]:
  """The JSON object in a file; raises as `load_json`, and UserError where it is something else."""
  value = load_json(path, remedy)
  if not isinstance(value, dict):
    raise UserError(f"{path} holds {type(value).__name__}, expected an object; {remedy}")
  return value


def inside(folder: str, name: Any, where: str) -> str:
  """The path of a file that another file names; it stays inside `folder`.

  Args:
    folder: the folder of the file that names it.
    name: a relative path, as read.
    where: the file and key that name it, for the message.

  Raises:
    UserError: no text, an absolute path, or a path with "..".
  """
  parts = name.split("/") if isinstance(name, str) else ()
  if not parts or set(parts) & {"", ".", ".."} or set(name) & {"\0", "\\"}:
    raise UserError(f"{where} names {name!r}, expected the name of a file inside {folder!r}")
  return os.path.join(folder, name)


def check_number(what: str, value: Any, low: float, high: float, remedy: str, whole: bool = False):
  """Refuses a value, read from a file, that is no finite number in [low, high].

  Args:
    what: the file and key, for the message.
    value: as read; True and False are no numbers.
  """
  is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
  if is_number and (isinstance(value, int) or math.isfinite(value)) and low <= value <= high:
    return
  kind = "a whole number" if whole else "a number"
  is_huge = isinstance(value, int) and abs(value) > 2**64  # repr refuses thousands of digits
  shown = "a huge integer" if is_huge else repr(value)
  raise UserError(f"{what} is {shown}, expected {kind} from {low:g} to {high:g}; {remedy}")


class ConfigErrors:
  """Collects what is wrong, so that all of it is reported at once."""

  def __init__(self):
    self.found: list[str] = []

  def check(self, ok: bool, message: str):
    if not ok:
      self.found.append(message)

  def extend(self, messages: list[str]):
    self.found += messages

  def one_of(self, key: str, value, allowed):
    """value is one of the strings `allowed`, or the one that it misspells is suggested."""
    if value not in allowed:
      near = nearest(str(value), allowed)
      hint = f"; did you mean {near!r}?" if near else ", nor like one of them"
      self.found.append(f"{key}={value!r} is not one of {', '.join(map(repr, allowed))}{hint}")

  def keys(self, where: str, names: Iterable[str], known: Collection[str]):
    """names are keys of a configuration, or the nearest are suggested."""
    for name in names:
      if name not in known:
        hint = key_hint(name, known, "{!r}") or "there is none like it, see configs/base.py"
        self.found.append(f"{where}: {name!r} is no key; {hint}")

  def file(self, key: str, path: str, remedy: str):
    """path is "" or of a file that is there."""
    there = not path or os.path.isfile(os.path.expanduser(path))
    self.check(there, f"{key}={path!r} does not exist; {remedy}")

  def refuse(self):
    """Raises what was found, if anything."""
    if self.found:
      raise ConfigError(self.found)

  def attempt(self, fn: Callable, key: str = ""):
    """fn(), or None with its complaint noted under `key`."""
    try:
      return fn()
    except ConfigError as e:
      self.found += e.problems
    except (ValueError, OSError) as e:
      self.found.append(f"{key}: {e}" if key else str(e))
    except ModuleNotFoundError as e:
      self.found.append(missing_package(e))
    return None
