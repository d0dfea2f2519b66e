"""Tasks by the names in eval.tasks: families, benchmarks, files."""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fp8jax import calls
from fp8jax.errors import ConfigErrors, missing_package, nearest
from fp8jax.evaluation import benchmarks, jsonl_tasks, reasoning_gym_tasks, store, tasks, verifiers
from fp8jax.evaluation.settings import Tasks

# Of a comma list: in parentheses, commas, quotes and further parentheses are part of a name.
_NAME = re.compile(r"""(?:\((?:'[^']*'|"[^"]*"|\([^()]*\)|[^()'"])*\)|[^,])+""")


def split(names: str) -> list[str]:
  """ "a,b(x=1,y=2)" -> ["a", "b(x=1,y=2)"]."""
  return [name.strip() for name in _NAME.findall(names) if name.strip()]


EVALUATED = "eval.tasks"


def problems(
  settings: Tasks, key: str = EVALUATED, elsewhere: Mapping[str, str] | None = None,
  has_verdicts: bool = True,
) -> list[str]:  # fmt: skip
  """Everything that is wrong with the tasks of a key, in words, without reading data or packages.

  Args:
    settings: with the tasks of `key`.
    elsewhere: {part of the protocol: key} of those that this key's names do not state.
    has_verdicts: whether verifiers judge the outputs, and need their packages.
  """
  names = settings.tasks
  collected = ConfigErrors()
  collected.check(not names or bool(split(names)), f"{key}={names!r} names no task; {_FILES}")
  for name in split(names):
    of_name = _problems_of(name, settings, elsewhere or {}, has_verdicts)
    collected.extend([f"{key}: {text}" for text in of_name])
  seed = settings.seed
  collected.check(0 <= seed < 2**63, f"eval.seed={seed} must be from 0 to 2**63 - 1")
  collected.file(
    "eval.train_data", settings.train_data, "name the JSONL of the training set, or ''"
  )
  return collected.found


def load(settings: Tasks, key: str = EVALUATED) -> tuple[tasks.Task, ...]:
  """The tasks of eval.tasks, a comma list: see its meaning; or of another key, which errors name.

  Raises:
    UserError, FileNotFoundError: a name or a file is wrong.
  """
  trained = frozenset()
  if settings.train_data:
    trained = tasks.read_trained(os.path.expanduser(settings.train_data))
  made = tuple(_load(name, settings, trained) for name in split(settings.tasks))
  collected = ConfigErrors()
  for task in made:
    collected.extend(task.protocol.problems(task.name))
  by_file: dict[str, list[str]] = {}
  for task in made:
    by_file.setdefault(store.file_name(task.name).casefold(), []).append(task.name)
  for file, names_of_file in by_file.items():
    collected.check(file != "", f"{key}: the name {names_of_file[0]!r} has no letter or digit")
    collected.check(
      len(names_of_file) == 1,
      f"{key}: {' and '.join(map(repr, names_of_file))} would be stored in one file, "
      f"{file}.jsonl; give one of them another name (the key 'name' of a task file)",
    )
  collected.refuse()
  return made


def check_packages(made: Iterable[tasks.Task], key: str = EVALUATED):
  """Raises ConfigError where a verifier's package is missing, before anything is generated."""
  collected = ConfigErrors()
  if any(verifiers.MATH in task.verifier.split("/") for task in made):
    collected.extend([f"{key}: {text}" for text in _lacks("math_verify")])
  collected.refuse()


_CALL = re.compile(r"(.*\.jsonl?|[^()]*)\((.*)\)")
# Of the protocol of a task: "aime24(samples=4)" draws so many outputs per question.
_PROTOCOL = {"samples": int, "temperature": float, "max_new_tokens": int}


def _parse(name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
  """(name, arguments of a family, changes of the protocol) of "chain_sum(max_terms=2, samples=4)".

  The name may be a path, which may have parentheses of its own: "runs (1)/q.jsonl(samples=4)".
  """
  match = _CALL.fullmatch(name)
  _, fields = calls.parse(f"task({match[2]})") if match else ("", {})
  changes = {key: fields.pop(key) for key in _PROTOCOL if key in fields}
  return (match[1] if match else name).strip(), fields, changes


def _load(text: str, settings: Tasks, trained: frozenset[str]) -> tasks.Task:
  name, arguments, changes = _parse(text)
  task = _task(name, arguments, settings, trained)
  return dataclasses.replace(
    task,
    protocol=dataclasses.replace(task.protocol, **changes),
    items=task.items[: settings.questions or None],
  )


def _task(name: str, arguments: dict[str, Any], settings: Tasks, trained: frozenset[str]):
  if name in benchmarks.BENCHMARKS:
    return benchmarks.make(name, settings.data_dir, settings.allow_code_execution)
  if name.endswith(".json"):
    return jsonl_tasks.from_description(name, trained)
  if name.endswith(".jsonl"):
    task = jsonl_tasks.from_jsonl(name)
    items, _ = tasks.apart(task.items, trained)
    return dataclasses.replace(
      task, items=tasks.check_items(items, f"{name} without eval.train_data")
    )
  return reasoning_gym_tasks.make(name, arguments, settings.questions, trained=trained)


def _problems_of(
  text: str, settings: Tasks, elsewhere: Mapping[str, str], has_verdicts: bool
) -> list[str]:
  try:
    name, arguments, changes = _parse(text)
  except ValueError as e:
    return [f"{text!r} is no task: {e}"]
  if unread := [part for part in changes if part in elsewhere]:
    keys = ", ".join(elsewhere[part] for part in unread)
    return [f"{text!r}: {', '.join(unread)} of a completion {keys} states; set that"]
  wrong = [key for key, value in changes.items()
           if type(value) not in {int, _PROTOCOL[key]}]  # fmt: skip
  if wrong:
    return [f"{text!r}: {', '.join(wrong)} must be a number, of samples and tokens whole"]
  # More than one sample needs a temperature, which may be the task's own.
  drawn: dict[str, Any] = {"temperature": 1.0, **changes}
  protocol = tasks.Protocol(**drawn).problems(repr(text))
  if name in reasoning_gym_tasks.FAMILIES:
    return protocol + _lacks("reasoning_gym")
  if arguments:
    protocol.append(f"{text!r}: {name} takes {', '.join(_PROTOCOL)}, not {', '.join(arguments)}")
  if name in benchmarks.BENCHMARKS:
    made = benchmarks.BENCHMARKS[name]
    protocol += made.problems(name, settings.data_dir, settings.allow_code_execution)
    needs = has_verdicts and name.startswith("aime")
    return protocol + (_lacks("math_verify") if needs else [])
  if name.endswith((".json", ".jsonl")):
    there = os.path.isfile(os.path.expanduser(name))
    return protocol + ([] if there else [f"{name} does not exist; {_FILES}"])
  known = (*reasoning_gym_tasks.FAMILIES, *benchmarks.BENCHMARKS)
  near = nearest(name, known)
  hint = f"did you mean {near!r}?" if near else _FILES
  return [f"{name!r} is none of {', '.join(known)}; {hint}"]


_FILES = f"or name a file: .json, a task file, or .jsonl, {jsonl_tasks.FORMAT}"


def _lacks(module: str) -> list[str]:
  if importlib.util.find_spec(module) is not None:
    return []
  return [missing_package(ModuleNotFoundError(module, name=module))]
