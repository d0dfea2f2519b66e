"""Writes the range of every tensor of every site, over some training batches."""

import os

from fp8jax import console
from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError
from fp8jax.jobs import start
from fp8jax.run import calibration, provenance
from fp8jax.run.restore import load_or_init, output_folder
from fp8jax.run.settings import Calibrate
from fp8jax.step import train_spec, train_step


def run(spec: train_spec.TrainSpec, workdir: str, out: str = ""):
  """Writes the range of every tensor of every site, over some training batches."""
  path = output_folder(out, workdir, "calibration.json")
  _check_writable(path, "--out")  # before the work, whose result would be lost
  loaded = load_or_init(spec, workdir, has_scales=False)
  spec = loaded.spec if loaded else spec
  params = loaded.params if loaded else train_step.make_state(spec).params
  step = loaded.where.get("step", 0) if loaded else 0
  fingerprint, teacher = loader.fingerprint(spec.data), start.teacher(spec, console.console())
  batches = batch_sharding.TrainBatches(
    spec.data, spec.run.layout, spec.microbatch, spec.grad_accum_steps
  )
  placed = (batches.spread.place(next(batches.iterator)) for _ in range(spec.of(Calibrate).batches))
  try:
    phase = loaded.phase if loaded else 0
    table = calibration.run(
      spec, params, placed, step=step, fingerprint=fingerprint, phase=phase, teacher=teacher
    )
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
