"""The end of a run that is not finite any more: files that reproduce it, and the advice."""

import os

import jax
import numpy as np

from fp8jax.jobs import resume, run_reports, run_state
from fp8jax.run import nonfinite
from fp8jax.run import provenance as provenance_lib
from fp8jax.step.state import State


def report(
  now: run_state.RunState, saver: resume.Saver, workdir: str, taken: run_reports.Taken,
  values: dict[str, float], state: State,
) -> str:  # fmt: skip
  """Saves what reproduces the failure, finds the first bad site; what happened and what to do.

  Args:
    taken: the bad step.
    state: with the parameters that met its batch: no update is applied once a state has halted.
  """
  spec, step, folder = now.spec, taken.step, os.path.join(workdir, "nonfinite")
  os.makedirs(folder, exist_ok=True)
  np.savez(os.path.join(folder, f"batch_{jax.process_index()}.npz"), **taken.host)
  now.batches.iterator.set_state(taken.position)  # it may be a batch further
  saver.save(step, state)
  saver.checkpoints.wait()
  batch = now.place(taken.host)
  phase, teacher = spec.phase(max(step - 1, 0)), now.policies.teacher
  sites = nonfinite.report(spec, state.params, batch, phase, teacher)
  provenance_lib.write_json(workdir, "nonfinite/report.json", {"step": step, **values, **sites})
  saved, skip = "the parameters that met it", "optim.on_nonfinite='skip'"
  again = f"; {folder}/report.json has every site"
  if not spec.model.reward_head:
    again += ", and --job=diagnose repeats the pass"
  if spec.optim.in_backward:
    skip += " with optim.in_backward=False"
    if np.isfinite(values["loss"]):
      saved += ", but for what is behind the first bad gradient and has moved "
      saved += "(optim.in_backward=True),"
  return (
    f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}. First bad site: "
    f"{sites['first_bad_site']}. The batch is in {folder}, {saved} are "
    f"checkpoint {step}{again}. Lower optim.peak_lr, give the site "
    f"recipe 'bf16', or set {skip}"
  )
