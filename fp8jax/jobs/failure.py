"""The end of a run that is not finite any more: files that reproduce it, and the advice."""

import os
from typing import Any

import jax
import numpy as np

from fp8jax.run import nonfinite
from fp8jax.run import provenance as provenance_lib
from fp8jax.step import train_spec


def keep_batch(workdir: str, host):
  """Saves the batch of the failure for --job=diagnose."""
  folder = os.path.join(workdir, "nonfinite")
  os.makedirs(folder, exist_ok=True)
  np.savez(os.path.join(folder, f"batch_{jax.process_index()}.npz"), **host)


def report(
  spec: train_spec.TrainSpec, workdir: str, step: int, values: dict[str, Any], params, batch
) -> str:
  """Finds the first bad site, writes nonfinite/report.json, and says what happened and what to do.

  Args:
    step: steps taken, the bad one included.
    values: metrics of the step.
    params: that met the batch.
    batch: placed.
  """
  sites = nonfinite.report(spec, params, batch, spec.phase(max(step - 1, 0)))
  provenance_lib.write_json(workdir, "nonfinite/report.json", {"step": step, **values, **sites})
  saved, skip = "the parameters that met it", "optim.on_nonfinite='skip'"
  if spec.optim.in_backward:
    skip += " with optim.in_backward=False"
    if np.isfinite(values["loss"]):
      saved += ", but for what is behind the first bad gradient and has moved "
      saved += "(optim.in_backward=True),"
  return (
    f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}. First bad site: "
    f"{sites['first_bad_site']}. The batch is in {os.path.join(workdir, 'nonfinite')}, {saved} are "
    f"checkpoint {step}; --job=diagnose repeats the pass. Lower optim.peak_lr, give the site "
    f"recipe 'bf16', or set {skip}"
  )
