"""The jobs of the launcher: one function each, and the last stop for errors users can fix."""

import collections
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from fp8jax import console as console_lib
from fp8jax import hub
from fp8jax.compiled import aot
from fp8jax.config import files as config_files
from fp8jax.config import identity, resolve
from fp8jax.errors import UserError, missing_package, writing
from fp8jax.jobs import (
  calibrate,
  diagnose,
  evaluate,
  export,
  generate,
  memory,
  prepare,
  preview,
  sensitivity,
  train,
)
from fp8jax.kernels import choose
from fp8jax.models.hf import config as hf_config
from fp8jax.run import (
  compilation_cache,
  machine,
  provenance,
)
from fp8jax.sweeps import run as sweep_run


def run(
  job: str, c: config_files.Config, base: config_files.Config, name: str, workdir: str
) -> int:
  """Runs one job; returns the process's exit code.

  Args:
    job: one of NAMES.
    c: the configuration.
    base: configs/base.py's, for the printed difference.
    name: the config's file name and arm, for the default workdir.
    workdir: or "".
  """
  logging.set_verbosity(logging.WARNING)  # Orbax narrates every file at INFO
  workdir = os.path.expanduser(workdir) or os.path.join("runs", _stem(name))
  if note := compilation_cache.enable():
    print(note, file=sys.stderr)

  def action() -> int:
    config_files.check_keys(c, base)
    return _run(job, c, base, workdir)

  return _reported(action, workdir)


def run_of_files(job: str, name: str, workdir: str, folders: list[str], baseline: str) -> int:
  """Runs a job that reads the folders of runs alone; returns the process's exit code.

  Args:
    job: one of command_line.OF_FILES.
    name: the config's file name and arm, for the default workdir; "" without one.
    workdir: of the run to report on, or the folder of a comparison; or "".
    folders: of the runs to compare.
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

  def action() -> int:
    if is_mapped:
      compilation_cache.enable()
    return sweep_run.run(path, root, workdir, parallel, submit, is_printed, is_mapped)

  where = "--job=memory with the configuration of one trial; fewer at once: --parallel=N"
  return _reported(action, workdir or "the sweep's folder", where)


def call(
  job: str, c: config_files.Config, base: config_files.Config, workdir: str
) -> dict[str, Any]:
  """Runs one job in this process, e.g. in a notebook, and returns its result; errors are raised.

  The same call goes on with a run that was interrupted, and leaves one alone that is finished.

  Args:
    job: one of NAMES, but for those that read files alone.
    c: the configuration.
    base: configs/base.py's.
    workdir: of the run.

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
    return _call(job, c, base, os.path.expanduser(workdir))
  except jax.errors.JaxRuntimeError as e:
    if _OUT_OF_MEMORY not in str(e):
      raise
    raise UserError(_out_of_memory(e, "the same call with the job 'memory'")) from e


def _run(job: str, c: config_files.Config, base: config_files.Config, workdir: str) -> int:
  result = _call(job, c, base, workdir)
  if job == "train":
    return result.get("exit_code", 0)
  if job in _WITHOUT_DEVICES or jax.process_index() == 0:
    # Standard output may hold completions.
    to = sys.stderr if job == "generate" and not c.generate.out else sys.stdout
    print(provenance.to_json(result), file=to)
  if message := result.get("not_finite"):
    raise train.NonFinite(message)
  return 0


# Jobs that need neither the model nor the mesh that a configuration is for, nor its devices.
_WITHOUT_DEVICES = ("prepare", "preview", "memory")


def _call(
  job: str, c: config_files.Config, base: config_files.Config, workdir: str
) -> dict[str, Any]:
  _check_adapters(job, c)
  if job == "evaluate" and c.eval.hf:
    c.init.hf, c.model.preset = c.eval.hf, "hf"
  if job == "evaluate" and c.eval.tasks:  # generation runs on one device
    c.mesh.data = c.mesh.fsdp = c.mesh.tensor = 1
  if job == "generate":
    c.mesh.data = c.mesh.fsdp = c.mesh.tensor = 1  # on one device, also of a larger machine
    if c.generate.hf:
      c.init.hf, c.model.preset, c.data.tokenizer, c.data.eos = c.generate.hf, "hf", "", ""
  if job == "sensitivity":
    c.mesh.data = c.mesh.fsdp = c.mesh.tensor = 1  # switches are for one device
    if c.eval.hf:
      c.init.hf, c.model.preset = c.eval.hf, "hf"
  if job not in (
    "train",
    "evaluate",
    "generate",
    "sensitivity",
  ):  # which read the table; it may be yet to be written
    c.precision.calibration = ""
  if job not in ("train", "preview"):
    c.data.epochs = 0.0  # the others need no number of steps, for which all samples are read
  if job == "prepare":
    hub.fetch({c.data.tokenizer or c.init.hf: hub.TOKENIZER})
    return prepare.run(*resolve.resolve_prepare(c), workdir)
  if job == "preview":
    hub.fetch({c.data.tokenizer or c.init.hf: hub.TOKENIZER})
    return preview.run(*resolve.resolve_preview(c), console_lib.console())
  if job == "memory":
    hub.fetch({c.init.hf: hub.WEIGHTS} if c.model.preset == "hf" else {})
    topology = c.aot.topology
    plan, devices = aot.resolve(config_files.without_files(c), topology)
    found = memory.run(plan, devices, topology)
    if os.path.isdir(workdir):  # of a run: its report shows the bars
      provenance.write_json(workdir, "memory.json", found)
    return found
  machine.check_platform(jax.default_backend(), jax.config.jax_platforms, jax.__version__)
  hub.fetch({c.data.tokenizer: hub.TOKENIZER, c.init.hf: hub.WEIGHTS})
  plan = resolve.resolve(c, jax.device_count(), choose.current_device())
  folder = (job == "export" and c.eval.hf) or c.init.hf
  for note in hf_config.notes(folder) if folder and jax.process_index() == 0 else ():
    print(note, file=sys.stderr)
  if job == "train":
    return train.run(plan, workdir, identity.flatten(base))
  jobs = {
    "evaluate": evaluate.run, "export": export.run,
    "calibrate": calibrate.run, "diagnose": diagnose.run, "generate": generate.run,
    "sensitivity": sensitivity.run,
  }  # fmt: skip
  return jobs[job](plan, workdir)


def _check_adapters(job: str, c: config_files.Config):
  """Refuses to read adapters from a Hugging Face folder, which has none."""
  key = {"evaluate": "eval.hf", "generate": "generate.hf"}.get(job)
  if key and c[key] and c.model.lora.rank and not c.init.adapters:
    raise UserError(
      f"model.lora.rank={c.model.lora.rank} with {key}={c[key]!r}, which has no adapters; set "
      f"init.adapters to theirs, model.lora.rank=0 for the folder alone, or {key}='' for the "
      "checkpoint with its adapters"
    )


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
  found = [
    f"{counts[name]} x {name} {size / 2**20:,.1f} MiB" for name, size in sizes.most_common(most)
  ]
  return f"Largest arrays before the step: {', '.join(found)}. " if found else ""


def environment(c: config_files.Config) -> dict[str, str]:
  """Environment variables that a configuration asks for; to be set before JAX meets its devices."""
  fraction = c.memory.gpu_fraction
  return {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(fraction)} if fraction else {}


def _stem(name: str) -> str:
  path, _, arm = name.partition(":")
  stem = os.path.splitext(os.path.basename(path))[0]
  return f"{stem}_{arm.replace(',', '_')}" if arm else stem
