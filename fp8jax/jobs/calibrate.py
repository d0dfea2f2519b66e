"""Writes the range of every tensor of every site, over some training batches."""

import os

from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError
from fp8jax.jobs.restore import folder_of, restore_params
from fp8jax.models.hf import weights as hf_weights
from fp8jax.run import (
  calibration,
  provenance,
)
from fp8jax.step import run_spec, train_step


def run(plan: run_spec.RunSpec, workdir: str):
  """Writes the range of every tensor of every site, over some training batches."""
  step = 0
  path = folder_of(plan.calibrate.path, workdir, "calibration.json")
  _check_writable(path, "calibrate.path")  # before the work, whose result would be lost
  if os.path.isdir(os.path.join(workdir, "checkpoints")):
    params, step, _ = restore_params(plan, workdir)
  elif plan.init.hf:
    params, _ = hf_weights.load_params(plan.init.hf, plan.model, plan.run.layout)
  else:
    params = train_step.make_state(plan).params
  fingerprint = loader.fingerprint(plan.data)
  batches = batch_sharding.TrainBatches(
    plan.data, plan.run.layout, plan.microbatch, plan.grad_accum_steps
  )
  placed = (batches.spread.place(next(batches.iterator)) for _ in range(plan.calibrate.batches))
  try:
    table = calibration.run(plan, params, placed, step=step, fingerprint=fingerprint)
  finally:
    batches.iterator.close()
  provenance.write_json(*os.path.split(path), table)
  return {
    "table": path, "rows": len(table["rows"]), "batches": table["batches"], "step": step,
    "documents_passed_over": batches.counts.summary_everywhere(),
  }  # fmt: skip


def _check_writable(path: str, key: str):
  """Makes the folder of a file that is to be written.

  Raises:
    UserError: it cannot be made or written; names the configuration's key.
  """
  folder = os.path.dirname(os.path.abspath(path))
  try:
    os.makedirs(folder, exist_ok=True)
    reason = "" if os.access(folder, os.W_OK) else "no permission to write"
  except OSError as e:
    reason = e.strerror or str(e)
  if os.path.isdir(path):
    reason = f"{path} is a folder"
  if reason:
    raise UserError(f"{key}: cannot write {path}: {reason}; name another file")
