"""Repeats the pass over the batch that a run stopped at."""

import os

import jax
import numpy as np

from fp8jax import records
from fp8jax.data import batch_sharding
from fp8jax.run import nonfinite, schemas
from fp8jax.run.restore import as_trained, restore_params
from fp8jax.step import run_spec


def run(plan: run_spec.RunSpec, workdir: str):
  """Repeats the pass over the batch that a run stopped at."""
  name = os.path.join(workdir, "nonfinite", f"batch_{jax.process_index()}.npz")
  if not os.path.exists(name):
    raise FileNotFoundError(
      f"{name} does not exist: no run in {workdir} stopped at a non-finite value"
    )
  with np.load(name) as saved:
    host = dict(saved)
  # The run may have gone on since.
  path = os.path.join(workdir, "nonfinite", "report.json")
  step = records.read(path, schemas.Failure, "train again to the failure")["step"]
  params, _, meta = restore_params(plan, workdir, step)
  plan = as_trained(plan, meta)
  spread = batch_sharding.BatchSharder(plan.run.layout, plan.microbatch, plan.grad_accum_steps)
  found = nonfinite.report(plan, params, spread.place(host), plan.phase(max(step - 1, 0)))
  return {"step": step, **found}
