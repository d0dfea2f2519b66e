"""precision.schedule in a run: every phase is checked before step 0 and starts at its step."""

import dataclasses
import json

import debug_runs
import harness
import pytest

from fp8jax.compiled import fp8_gemms
from fp8jax.ops import site as site_lib
from fp8jax.quantization import tensor_stats
from fp8jax.step import train_step

BF16_LATE = {"precision.schedule": ((4, ((".*", "bf16"),)),)}
STATIC_LATE = {"precision.schedule": ((3, ((".*", "e4m3_static"),)),)}


@pytest.mark.slow
def test_phases_to_come_are_shown_and_proven_before_the_first_step(tmp_path, monkeypatch, capsys):
  real, proven = fp8_gemms.strict, []

  def strict(spec, step_fn, state, batch, sites, phase):
    assert "learning_rate" not in (tmp_path / "metrics.jsonl").read_text()  # no step yet
    proven.append((phase, site_lib.flatten(sites)["head"].tap.shape[-1]))
    is_lowered = proven[-1] == (1, tensor_stats.QUIET)  # one of the four programs is enough
    return real(spec, step_fn, state, batch, sites, phase) if is_lowered else []

  monkeypatch.setattr(fp8_gemms, "strict", strict)
  harness.train_on_text(
    tmp_path, **STATIC_LATE, **{"precision.verify_fp8_gemms": True, "log.tensor_stats_every": 100}
  )
  assert proven == [(p, s) for p in (0, 1) for s in (tensor_stats.LOUD, tensor_stats.QUIET)]
  shown = capsys.readouterr().out
  assert "sites from step 3" in shown and "e4m3_static" in shown
  rows = json.loads((tmp_path / "sites.json").read_text())
  assert {(r["from_step"], r["recipe"]) for r in rows if r["site"] != "head"} >= {
    (0, "tensor_delayed"), (3, "e4m3_static"),
  }  # fmt: skip


@pytest.mark.slow
def test_phase_changes_the_recipe_at_its_step(tmp_path):
  """The last two steps in BF16 are BF16's steps from there, bit for bit."""
  harness.train_on_text(tmp_path / "run", **BF16_LATE, **{"checkpoint.every": 4})
  spec, wide = harness.text_spec(**BF16_LATE), harness.text_spec("bf16")
  state = harness.saved_state(tmp_path / "run", spec, 4)
  losses = {r["step"]: r["loss"] for r in debug_runs.rows(tmp_path / "run") if "loss" in r}
  step, hosts = train_step.make_step(wide), harness.batches(wide, 6)
  for i in (4, 5):
    state = dataclasses.replace(state, scaling_states={})
    state, values = step(state, hosts[i], wide.sites())
    assert float(values["loss"]) == losses[i + 1]
