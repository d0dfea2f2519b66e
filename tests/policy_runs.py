"""Runs with policies, and what they leave."""

import dataclasses
import json

import harness

from fp8jax.config import resolve
from fp8jax.jobs import train
from fp8jax.kernels import choose
from fp8jax.run import checkpoint, preemption


def run(workdir, disturb=None, devices=1, **changes):
  spec = resolve.resolve(harness.text_config(**changes), devices, choose.current_device())
  train.run(spec, str(workdir), base=dict(spec.flat), disturb=disturb)


def run_until(step, monkeypatch, *args, **changes):
  """As a run that is asked to stop after so many steps."""
  with monkeypatch.context() as patch:
    patch.setattr(preemption.Interrupts, "requested", lambda self, now: now >= step)
    run(*args, **changes)


def rows(workdir):
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir):
  return [(r["step"], r["loss"], r["grad_norm"]) for r in rows(workdir) if "loss" in r]


def actions(workdir):
  return [(r["step"], a["place"], a["text"]) for r in rows(workdir) for a in r.get("actions", ())]


def policy_memory(workdir, step):
  saved = checkpoint.Checkpoints(str(workdir))
  memory = saved.meta(step)["policy"]
  saved.close()
  return memory


def blown_up(state, host, number):
  """Batch 5 meets an embedding that is eight times too large: a transient fault."""
  if number == 5:
    params = {**state.params, "embed": state.params["embed"] * 8}
    state = dataclasses.replace(state, params=params)
  return state, host


LOUD = {
  "precision.rules": (("layers/.*/mlp/down", "tensor_delayed(steps=4)"), (".*", "bf16")),
  "precision.verify_fp8_gemms": False, "log.tensor_stats_every": 2,
  "log.alarms": (("snr_db", "<", 90.0),), "eval.tokens": 0,
}  # fmt: skip
ROLL_BACK = {
  **LOUD, "precision.policy": ("roll_back(z=4.0, window=4)",), "checkpoint.every": 2,
  "steps": 9, "optim.peak_lr": 1e-5, "optim.min_lr": 0.0, "log.tensor_stats_every": 0,
}  # fmt: skip
