"""Writes the range of every tensor of every site, over some training batches."""

import os

from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError
from fp8jax.run import (
  calibration,
  provenance,
)
from fp8jax.run.restore import folder_of, load_or_init
from fp8jax.run.settings import Calibrate
from fp8jax.step import run_spec, train_step


def run(plan: run_spec.RunSpec, workdir: str, out: str = ""):
  """Writes the range of every tensor of every site, over some training batches."""
  path = folder_of(out, workdir, "calibration.json")
  _check_writable(path, "--out")  # before the work, whose result would be lost
  loaded = load_or_init(plan, workdir, has_scales=False)
  plan = loaded.spec if loaded else plan
  params = loaded.params if loaded else train_step.make_state(plan).params
  step = loaded.where.get("step", 0) if loaded else 0
  fingerprint = loader.fingerprint(plan.data)
  batches = batch_sharding.TrainBatches(
    plan.data, plan.run.layout, plan.microbatch, plan.grad_accum_steps
  )
  placed = (batches.spread.place(next(batches.iterator)) for _ in range(plan.of(Calibrate).batches))
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
    UserError: it cannot be made or written; names the option.
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
