"""Trials trained at once are the trials trained one by one."""

import json

import jax
import numpy as np
import pytest
from harness import Runner

from configs import base
from fp8jax.config import identity
from fp8jax.data import loader
from fp8jax.errors import ConfigError
from fp8jax.sweeps import outcome, spec, stacked
from fp8jax.sweeps import run as sweep_run

CONFIG = """
from configs import base

def get_config(arm=""):
  c = base.get_config(arm)
  c.model.update(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=1, num_kv_heads=1,
                 head_dim=32, vocab_size=320)
  c.update_from_flattened_dict({
    "steps": 4, "mesh.fsdp": 1, "global_batch": 2, "seq_len": 32, "eval.tokens": 64,
    "eval.batch": 2,
    "optim.warmup_steps": 1, "optim.decay_steps": 1, "memory.loss_chunk": 32,
    "log.tensorboard": False, "log.report": False, "data.shuffle_windows": 0,
  })
  return c
"""
# Rates far apart, so that the trials' tensors soon have other ranges.
BASE = identity.flatten(base.get_config())
SWEEP = dict(axes=(spec.Grid({"optim.peak_lr": (1e-3, 3e-1)}),), seeds=(0, 1))


def _trials(tmp_path, arm, **more):
  (tmp_path / "c.py").write_text(CONFIG)
  sweep = spec.Sweep(str(tmp_path / "c.py"), arms=(arm,), **{**SWEEP, **more})
  return sweep, sweep.trials(str(tmp_path / "out"))


@pytest.mark.slow  # two programs per seed and rate
def test_trials_at_once_are_those_of_separate_runs(tmp_path, monkeypatch):
  """Losses, parameters' norm and held-out losses, with one scale per tensor: of its own trial."""
  sweep, trials = _trials(tmp_path, "tensor_current")
  monkeypatch.setattr(spec, "load", lambda *_: sweep)
  arguments = ("s.py", ".", str(tmp_path / "out"), 0, "", False, True, base.get_config())
  assert sweep_run.run(*arguments) == 0
  table = json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"]
  (members,) = stacked.groups(trials, BASE)
  for member, row in zip(members, table, strict=True):
    plan, found = member.plan, outcome.records(row["workdir"])
    stream = loader.train_batches(plan.data, 2)
    losses, state = Runner(plan).run([next(stream) for _ in range(4)])
    stream.close()
    np.testing.assert_allclose(found.logged("loss"), losses, rtol=2e-6)
    assert outcome.read(member.trial).objective == row["objective"] == found.summary["objective"]
    evaluated = stacked.evaluator_lib.Evaluator(plan).run(state.params, {})
    for precision, values in evaluated["main"].items():
      assert found.heldout(-1)["main"][precision] == pytest.approx(values["loss"], rel=2e-6)
  assert len({row["objective"] for row in table}) == 4
  # A second call trains nothing.
  monkeypatch.setattr(stacked, "run", lambda *_: pytest.fail("all are finished"))
  assert sweep_run.run(*arguments) == 0


def test_a_trial_that_is_not_finite_halts_alone(tmp_path):
  _, trials = _trials(tmp_path, "bf16", fixed={"eval.tokens": 0})
  (members,) = stacked.groups(trials, BASE)
  take = stacked.train_step.make_state

  def broken(plan):
    state = take(plan)
    if plan.seed == 1 and plan.optim.peak_lr < 0.1:
      state = jax.tree.map(lambda x: x * np.nan if x.dtype == np.float32 else x, state)
    return state

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(stacked.train_step, "make_state", broken)
    found = stacked.run(members, BASE, 1e9, print)
  assert [o.status for _, o in found] == ["finished", "diverged", "finished", "finished"]
  assert outcome.read(trials[1]).status == "diverged"


def test_trials_that_need_a_run_of_their_own_are_refused_with_all_reasons(tmp_path):
  fixed = {"optim.moment_format": "coat", "log.tensor_stats_every": 2}
  _, trials = _trials(tmp_path, "tensor_delayed", fixed=fixed)
  with pytest.raises(ConfigError) as e:
    stacked.groups(trials, BASE)
  assert len(e.value.problems) == 3
  for word in ("optim.moment_format='coat'", "log.tensor_stats_every=2", "delayed or static"):
    assert word in str(e.value)
  _, trials = _trials(tmp_path, "nvfp4_sr_rht")
  with pytest.raises(ConfigError, match="rounds stochastically"):
    stacked.groups(trials, BASE)
  _, trials = _trials(tmp_path, "bf16")
  assert [len(g) for g in stacked.groups(trials, BASE, 3)] == [3, 1]
