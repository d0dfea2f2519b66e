"""The state that a run without a checkpoint starts from, and the description it leaves."""

import os
from typing import Any

import jax
import rich.console

from fp8jax.config import resolve
from fp8jax.jobs import restore
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import stored_params
from fp8jax.run import provenance as provenance_lib
from fp8jax.step import run_spec, train_step
from fp8jax.step.state import State


def record(
  plan: run_spec.RunSpec, workdir: str, start: int, changes, fingerprint: str,
  site_rows: list[dict[str, Any]],
):  # fmt: skip
  """Writes the run's description, once nothing can refuse it any more."""
  flat, changed = dict(plan.flat), {k: new for k, (_, new) in changes.items()}
  provenance = provenance_lib.provenance(flat, fingerprint, plan.seed, plan.num_devices)
  provenance |= provenance_lib.history(workdir, start, flat)
  for name, value in (
    ("config.json", {"resolved": flat, "changed": changed}),
    ("sites.json", site_rows),
    ("provenance.json", provenance),
  ):
    provenance_lib.write_json(workdir, name, value)


def fresh(plan: run_spec.RunSpec, workdir: str) -> tuple[State, str]:
  """(a state with random weights or those of init.hf, the dtype that an export restores)."""
  source = plan.init.hf
  if not source:
    return train_step.make_state(plan), "bfloat16"
  params, dtype = hf_weights.load_params(source, plan.model, plan.run.layout)
  if jax.process_index() == 0:
    hf_weights.keep_source_files(source, os.path.join(workdir, "hf_source"))
  return train_step.make_state(plan, params), dtype


def stage(
  plan: run_spec.RunSpec, other: str, workdir: str, out: rich.console.Console
) -> tuple[State, str]:
  """`fresh` with the weights of another run's checkpoint, whose masters are float32 here.

  Raises:
    ConfigError: the checkpoint is of another model.
  """
  try:
    params, step, meta = restore.restore_params(plan, other, plan.init.step)
  except resolve.ConfigError as e:
    raise resolve.ConfigError(
      [f"init.workdir={plan.init.workdir!r} holds another model: {p}" for p in e.problems]
      + ["set model.preset and its overrides as in that run, or name another"]
    ) from e
  out.print(f"starting from the weights of step {step} in {plan.init.workdir}")
  take_source(other, workdir)
  return train_step.make_state(plan, stored_params.dequantize_tree(params)), meta["weights_dtype"]


def take_source(other: str, workdir: str):
  """Keeps the Hugging Face files that another run began with, for --job=export."""
  source = os.path.join(other, "hf_source")
  if os.path.isdir(source) and jax.process_index() == 0:
    hf_weights.keep_source_files(source, os.path.join(workdir, "hf_source"))


def source(workdir: str) -> str:
  """The workdir of init.workdir; raises FileNotFoundError where it has no checkpoint."""
  path = os.path.expanduser(workdir)
  if not os.path.isdir(os.path.join(path, "checkpoints")):  # Orbax would create it
    raise FileNotFoundError(
      f"init.workdir={workdir!r} holds no checkpoint; train that run first, or name another"
    )
  return path
