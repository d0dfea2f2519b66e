"""Checkpoints as jobs read them."""

import dataclasses
import os
import sys

from fp8jax.config import identity, resolve
from fp8jax.ops import scaling as scaling_lib
from fp8jax.run import (
  checkpoint,
)
from fp8jax.step import run_spec, train_step


def restore_params(plan: run_spec.RunSpec, workdir: str, step: int | None = None):
  """(parameters, step, meta) of a checkpoint; without a step, of the one that eval.step chooses."""
  if not os.path.isdir(workdir):  # Orbax would create it
    raise FileNotFoundError(f"{workdir} does not exist; train first, or name another --workdir")
  saved = checkpoint.Checkpoints(workdir, plan.checkpoint.keep)
  step = saved.find(plan.eval.step if step is None else step)
  meta = saved.meta(step)
  changes = {
    k: v for k, v in identity.diff(identity.identity(plan), meta["config"]).items()
    if k.startswith("model.")
  }  # fmt: skip
  if changes:
    raise resolve.ConfigError(
      [f"{k} is {new} here and {old} in the checkpoint" for k, (old, new) in changes.items()]
    )
  # The master format of that run, whatever this configuration says.
  master = meta["config"].get("optim.master_format", "float32")
  plan = dataclasses.replace(plan, optim=dataclasses.replace(plan.optim, master_format=master))
  params = saved.restore_params(step, train_step.abstract_params(plan))
  saved.close()
  return params, step, meta


def restore_scaling_states(plan: run_spec.RunSpec, workdir: str, step: int, meta, phase: int):
  remembered = scaling_lib.recipes(plan.sites(phase=phase)) if step else {}
  if meta.get("remembered", remembered) != remembered:
    print(
      f"the scales of step {step} are other recipes'; those of {workdir} are chosen anew from what "
      "is evaluated",
      file=sys.stderr,
    )
    return {}
  saved = checkpoint.Checkpoints(workdir, plan.checkpoint.keep)
  scaling_states = saved.restore_scaling_states(
    step, train_step.abstract_state(plan, step).scaling_states
  )
  saved.close()
  return scaling_states


def folder_of(path: str, workdir: str, name: str) -> str:
  """`path`, or a folder of that name under the workdir."""
  return os.path.expanduser(path) if path else os.path.join(workdir, name)
