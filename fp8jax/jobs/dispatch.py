"""The jobs of the launcher are run, and errors that users can fix end here."""

import collections
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from fp8jax import console as console_lib
from fp8jax.config import files as config_files
from fp8jax.config import identity, measured
from fp8jax.errors import UserError, missing_package, writing
from fp8jax.jobs import table, train
from fp8jax.run import compilation_cache, provenance
from fp8jax.sweeps import run as sweep_run


def run(
  job: str, c: config_files.Config, base: config_files.Config, name: str, workdir: str,
  **options: str,
) -> int:  # fmt: skip
  """Runs one job; returns the process's exit code.

  Args:
    job: one of NAMES.
    base: configs/base.py's, for the printed difference.
    name: the config's file name and arm, for the default workdir.
    options: see table.Job.option.
  """
  logging.set_verbosity(logging.WARNING)  # Orbax narrates every file at INFO
  workdir = os.path.expanduser(workdir) or os.path.join("runs", _stem(name))
  if note := compilation_cache.enable():
    print(note, file=sys.stderr)

  def action() -> int:
    config_files.check_keys(c, base)
    return _run(job, c, base, workdir, **options)

  return _reported(action, workdir)


def run_of_files(job: str, name: str, workdir: str, folders: list[str], baseline: str) -> int:
  """Runs a job that reads the folders of runs alone; returns the process's exit code.

  Args:
    job: one of command_line.OF_FILES.
    name: the config's file name and arm, for the default workdir; "" without one.
    workdir: of the run to report on, or the folder of a comparison; or "".
    baseline: the arm that others are compared with.
  """
  workdir = os.path.expanduser(workdir) or (os.path.join("runs", _stem(name)) if name else "")

  def action() -> int:
    from fp8jax.jobs import report  # Altair and vl-convert are extras

    if job == "report":
      report.run(workdir, folders)
    else:
      report.compare(workdir, folders, baseline)
    return 0

  return _reported(action, workdir)


def _reported(action: Callable[[], int], workdir: str, memory_at: str = "") -> int:
  """The exit code of `action`; errors that users can put right are one line on stderr."""

  def complain(text: str):
    print(console_lib.visible(f"error: {text}"), file=sys.stderr)

  try:
    with writing(workdir):
      return action()
  except train.NonFinite as e:
    complain(str(e))
    return _NONFINITE
  except (UserError, OSError) as e:
    complain(str(e))
    return 1
  except ModuleNotFoundError as e:
    complain(missing_package(e))
    return 1
  except jax.errors.JaxRuntimeError as e:
    if _OUT_OF_MEMORY not in str(e):
      raise
    complain(_out_of_memory(e, memory_at or _memory_command()))
    return 1
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130


def run_sweep(
  path: str, root: str, workdir: str, parallel: int, submit: str, is_printed: bool,
  is_mapped: bool = False,
) -> int:  # fmt: skip
  """Runs the trials of a sweep's file (sweeps/run.py); returns the process's exit code."""
  folder = os.path.abspath(os.path.expanduser(workdir) or os.path.join("runs", _stem(path)))

  def action() -> int:
    if is_mapped:
      compilation_cache.enable()
    needs = {name: table.JOBS[name].needs for name in table.RUNS}
    return sweep_run.run(path, root, folder, parallel, submit, is_printed, is_mapped, needs)

  where = "--job=memory with the configuration of one trial; fewer at once: --parallel=N"
  return _reported(action, folder, where)


def call(
  job: str, c: config_files.Config, base: config_files.Config, workdir: str, **options: str
) -> dict[str, Any]:
  """Runs one job in this process, e.g. in a notebook, and returns its result; errors are raised.

  The same call resumes an interrupted run, and is a no-op on a finished one.

  Args:
    job: one of NAMES, but for those that read files alone.
    base: configs/base.py's.
    options: see table.Job.option.

  Raises:
    UserError: a setting is wrong, or JAX has read it already; or memory ran out.
  """
  config_files.check_keys(c, base)
  if fraction := c.memory.gpu_fraction:
    raise UserError(
      f"memory.gpu_fraction={fraction} is read when JAX starts, which it has; leave it 0, and set "
      f"the variable XLA_PYTHON_CLIENT_MEM_FRACTION={fraction} before JAX is imported"
    )
  logging.set_verbosity(logging.WARNING)
  compilation_cache.enable()
  try:
    return _call(job, c, base, os.path.expanduser(workdir), **options)
  except jax.errors.JaxRuntimeError as e:
    if _OUT_OF_MEMORY not in str(e):
      raise
    raise UserError(_out_of_memory(e, "the same call with the job 'memory'")) from e


def _run(job: str, c, base, workdir: str, **options: str) -> int:
  result = _call(job, c, base, workdir, **options)
  if job == "train":
    return result.get("exit_code", 0)
  if jax.process_index() == 0:
    # Standard output may hold completions.
    to = sys.stderr if job == "generate" and not c.generate.out else sys.stdout
    print(provenance.to_json(result), file=to)
  if message := result.get("not_finite"):
    raise train.NonFinite(message)
  return result.get("exit_code", 0)


def _call(
  job: str, c: config_files.Config, base: config_files.Config, workdir: str, **options: str
) -> dict[str, Any]:
  row = table.JOBS[job]
  for name, value in options.items():
    if value and name != row.option:
      of = ", ".join(one for one, other in table.JOBS.items() if other.option == name)
      raise UserError(f"--{name}={value} is of the jobs {of}; leave it out of {job}")
  taken = {name: options.get(name, "") for name in filter(None, [row.option])}
  of_resolve, of_run = (taken, {}) if row.is_for_resolve else ({}, taken)
  measured.check_there(c, workdir)
  resolved = row.resolve(c, row.needs, **of_resolve)
  # A run prints how its configuration differs from the base.
  shown = {"base": identity.flatten(base)} if job == "train" else {}
  return row.run(*resolved, workdir, **of_run, **shown)


_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_NONFINITE = 3  # exit code: the loss, the gradient or logits stopped being numbers


def _memory_command() -> str:
  """The command that shows where the memory of this one goes."""
  command = [a for a in sys.argv if not a.lstrip("-").startswith("job")]
  return shlex.join(["python", *command, "--job=memory"])


def _out_of_memory(e: Exception, where: str) -> str:
  """One line: what did not fit, and what shows where the memory goes."""
  shown = " ".join(str(e).split("\n")[0].split())
  return (
    f"out of memory: {shown}. {_largest_arrays()}Where it goes: {where}; "
    "smaller: more grad_accum_steps, memory.remat_policy='full', optim.moment_format='coat'"
  )


def _largest_arrays(most: int = 3) -> str:
  """A sentence about the arrays that are alive and take most, equal ones together."""
  sizes: collections.Counter[str] = collections.Counter()
  counts: collections.Counter[str] = collections.Counter()
  for array in jax.live_arrays():
    name = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    sizes[name] += array.nbytes
    counts[name] += 1
  texts = [
    f"{counts[name]} x {name} {size / 2**20:,.1f} MiB" for name, size in sizes.most_common(most)
  ]
  return f"Largest arrays before the step: {', '.join(texts)}. " if texts else ""


def environment(c: config_files.Config) -> dict[str, str]:
  """Environment variables that a configuration asks for; to be set before JAX meets its devices."""
  fraction = c.memory.gpu_fraction
  return {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(fraction)} if fraction else {}


def _stem(name: str) -> str:
  path, _, arm = name.partition(":")
  stem = os.path.splitext(os.path.basename(path))[0]
  return f"{stem}_{arm.replace(',', '_')}" if arm else stem
