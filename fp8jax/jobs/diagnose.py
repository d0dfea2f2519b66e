"""Repeats the pass over the batch that a run stopped at."""

import os
from typing import Any

import jax
import numpy as np

from fp8jax import console as console_lib
from fp8jax import records
from fp8jax.data import batch_sharding
from fp8jax.errors import UserError
from fp8jax.jobs import start
from fp8jax.report import files, recommend
from fp8jax.rl import rollout
from fp8jax.rl.settings import RL
from fp8jax.run import nonfinite, schemas
from fp8jax.run.restore import as_trained, restore_params
from fp8jax.step import train_spec


def run(spec: train_spec.TrainSpec, workdir: str):
  """Repeats the pass over the batch that a run stopped at."""
  name = os.path.join(workdir, "nonfinite", f"batch_{jax.process_index()}.npz")
  if not os.path.exists(name):
    raise FileNotFoundError(
      f"{name} does not exist: no run in {workdir} stopped at a non-finite value"
    )
  if spec.model.reward_head:
    raise UserError(
      "--job=diagnose repeats losses of tokens, and a reward head has a score alone; the run has "
      f"repeated the pass: {os.path.join(workdir, 'nonfinite', 'report.json')} has every site"
    )
  with np.load(name) as saved:
    host = dict(saved)
  # The run may have gone on since.
  path = os.path.join(workdir, "nonfinite", "report.json")
  step = records.read(path, schemas.Failure, "train again to the failure")["step"]
  params, _, meta = restore_params(spec, workdir, step)
  spec = as_trained(spec, meta)
  spread = batch_sharding.BatchSharder(spec.run.layout, spec.microbatch, spec.grad_accum_steps)
  phase, teacher = spec.phase(max(step - 1, 0)), start.teacher(spec, console_lib.console())
  batch = spread.place(host)
  if rollout.is_of_policy(host):
    batch = rollout.with_policy(batch, spec.of(RL))
  report = nonfinite.report(spec, params, batch, phase, teacher)
  return {"step": step, **report, **_recommended(workdir)}


def _recommended(workdir: str) -> dict[str, Any]:
  """The report's formats and margins by site and tensor, and its rules; {} without snapshots."""
  run = files.read(workdir)
  if run.snapshots is None:
    return {}
  rows = recommend.recommendations(run.snapshots, run.exponents)
  return {
    "recommended": [dict(zip(recommend.COLUMNS, row)) for row in recommend.table(rows)],
    "recommended_rules": recommend.precision_rules(rows, run.resolved.get("precision.rules") or ()),
  }
