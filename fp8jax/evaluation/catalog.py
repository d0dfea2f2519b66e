"""Tasks by the names in eval.tasks: families, benchmarks, files."""

import dataclasses
import importlib.util
import os
import re
from typing import Any

from fp8jax import calls
from fp8jax.errors import ConfigErrors, missing_package, nearest
from fp8jax.evaluation import benchmarks, jsonl_tasks, reasoning_gym_tasks, store, tasks

# Of a comma list: in parentheses, commas, quotes and further parentheses are part of a name.
_NAME = re.compile(r"""(?:\((?:'[^']*'|"[^"]*"|\([^()]*\)|[^()'"])*\)|[^,])+""")


@dataclasses.dataclass(frozen=True)
class Options:
  """Settings of all tasks of an evaluation.

  Attributes:
    data_dir: folder of the benchmarks' data.
    train_data: JSONL of a training set, whose questions are not asked; "" for none.
    allow_code: whether programs that the model writes are executed.
    questions: per task, the first ones; 0: all, or reasoning_gym_tasks.SIZE of a family.
    samples, temperature, max_new_tokens: instead of the task's own; 0, -1 and 0 leave those.
  """

  data_dir: str = ""
  train_data: str = ""
  allow_code: bool = False
  questions: int = 0
  samples: int = 0
  temperature: float = -1.0
  max_new_tokens: int = 0


def split(names: str) -> list[str]:
  """ "a,b(x=1,y=2)" -> ["a", "b(x=1,y=2)"]."""
  return [name.strip() for name in _NAME.findall(names) if name.strip()]


def problems(names: str, options: Options) -> list[str]:
  """Everything that is wrong with the names, in words, without reading data or packages."""
  collected = ConfigErrors()
  collected.check(not names or bool(split(names)), f"eval.tasks={names!r} names no task; {_FILES}")
  for name in split(names):
    collected.extend(_problems_of(name, options))
  collected.file("eval.train_data", options.train_data, "name the JSONL of the training set, or ''")
  for key in ("questions", "samples", "max_new_tokens"):
    value = getattr(options, key)
    collected.check(value >= 0, f"eval.{key}={value} must be at least 0 (0: the task's own)")
  return collected.found


def load(names: str, options: Options) -> tuple[tasks.Task, ...]:
  """The tasks of a comma list.

  Args:
    names: families of reasoning-gym, also with arguments ("chain_sum(max_terms=2)"), benchmarks
      ("aime24"), JSONL files of questions and JSON task files.
    options: see Options.

  Raises:
    UserError, FileNotFoundError: a name or a file is wrong.
  """
  trained = frozenset()
  if options.train_data:
    trained = tasks.read_trained(os.path.expanduser(options.train_data))
  made = tuple(_with_options(_load(name, options, trained), options) for name in split(names))
  collected = ConfigErrors()
  for task in made:
    collected.extend(task.protocol.problems(task.name))
  by_file: dict[str, list[str]] = {}
  for task in made:
    by_file.setdefault(store.file_name(task.name).casefold(), []).append(task.name)
  for file, names_of_file in by_file.items():
    collected.check(file != "", f"eval.tasks: the name {names_of_file[0]!r} has no letter or digit")
    collected.check(
      len(names_of_file) == 1,
      f"eval.tasks: {' and '.join(map(repr, names_of_file))} would be stored in one file, "
      f"{file}.jsonl; give one of them another name (the key 'name' of a task file)",
    )
  collected.refuse()
  return made


def _load(name: str, options: Options, trained: frozenset[str]) -> tasks.Task:
  if name in benchmarks.BENCHMARKS:
    return benchmarks.make(name, options.data_dir, options.allow_code)
  if name.endswith(".json"):
    return jsonl_tasks.from_description(name, trained)
  if name.endswith(".jsonl"):
    task = jsonl_tasks.from_jsonl(name)
    items, _ = tasks.apart(task.items, trained)
    return dataclasses.replace(
      task, items=tasks.check_items(items, f"{name} without eval.train_data")
    )
  family, arguments = calls.parse(name)
  return reasoning_gym_tasks.make(family, arguments, options.questions, trained=trained)


def _with_options(task: tasks.Task, options: Options) -> tasks.Task:
  changes: dict[str, Any] = {}
  if options.samples:
    changes["samples"] = options.samples
  if options.temperature >= 0:
    changes["temperature"] = options.temperature
  if options.max_new_tokens:
    changes["max_new_tokens"] = options.max_new_tokens
  return dataclasses.replace(
    task,
    protocol=dataclasses.replace(task.protocol, **changes),
    items=task.items[: options.questions or None],
  )


def _problems_of(name: str, options: Options) -> list[str]:
  if name in benchmarks.BENCHMARKS:
    made = benchmarks.BENCHMARKS[name]
    found = made.problems(name, options.data_dir, options.allow_code)
    return found + (_lacks("math_verify") if name.startswith("aime") else [])
  if name.endswith((".json", ".jsonl")):
    there = os.path.isfile(os.path.expanduser(name))
    return [] if there else [f"eval.tasks: {name} does not exist; {_FILES}"]
  try:
    family, _ = calls.parse(name)
  except ValueError as e:
    return [f"eval.tasks: {name!r} is no task: {e}"]
  known = (*reasoning_gym_tasks.FAMILIES, *benchmarks.BENCHMARKS)
  if family not in reasoning_gym_tasks.FAMILIES:
    near = nearest(family, known)
    hint = f"did you mean {near!r}?" if near else _FILES
    return [f"eval.tasks: {family!r} is none of {', '.join(known)}; {hint}"]
  return _lacks("reasoning_gym")


_FILES = f"or name a file: .json, a task file, or .jsonl, {jsonl_tasks.FORMAT}"


def _lacks(module: str) -> list[str]:
  if importlib.util.find_spec(module) is not None:
    return []
  return ["eval.tasks: " + missing_package(ModuleNotFoundError(module, name=module))]
