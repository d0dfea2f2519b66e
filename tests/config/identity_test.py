"""Changes between a run and its continuation: what a resume refuses, accepts and never sees."""

import dataclasses

import pytest

from configs import base
from fp8jax.config import identity
from fp8jax.models.config import RopeScaling


def _flat(**changes):
  c = base.get_config()
  c.update_from_flattened_dict(changes)
  return identity.flatten(c)


def test_every_key_is_refused_or_harmless_on_resume():
  """A new key must be put on one side."""
  keys = set(identity.flatten(base.get_config()))
  refused = set(identity.refused_changes(dict.fromkeys(keys), ()))
  whole = {"seed", "steps", "global_batch", "grad_accum_steps", "seq_len", "init.nudge",
           "init.untie"}  # fmt: skip
  # What waits in a narrow copy has another gradient.
  whole |= {"memory.save_norm_inputs", "memory.save_gate_up", "memory.save_layer_inputs"}
  sections = ("model.", "precision.", "data.", "optim.", "loss_scale.", "distill.", "rl.")
  harmless = {
    "data.bos", "data.workers", "data.prefetch", "optim.on_nonfinite", "optim.in_backward",
    "precision.verify_fp8_gemms",
  }  # fmt: skip
  assert refused == {k for k in keys if k in whole or k.startswith(sections)} - harmless


def test_accepted_changes_are_not_refused():
  changed = identity.diff(
    _flat(**{"steps": 50, "optim.peak_lr": 0.5, "mesh.data": 2, "log.every": 1}), _flat()
  )
  assert changed["optim.peak_lr"] == (1e-3, 0.5) and set(changed) == {
    "steps", "optim.peak_lr", "mesh.data", "log.every"}  # fmt: skip
  assert identity.refused_changes(changed, ()) == ["optim.peak_lr", "steps"]
  assert identity.refused_changes(changed, ("optim.peak_lr",)) == ["steps"]
  # Another backend is the same run, but for the one that rounds sums to 14 bits.
  hopper = "emulated_sm90"
  for old, new in (("auto", "reference"), ("reference", hopper), (hopper, "auto")):
    is_refused = hopper in (old, new)
    assert bool(identity.refused_changes({"kernels.matmul": (old, new)}, ())) == is_refused
  # Neither a section nor the beginning of a key stands for the key.
  assert identity.refused_changes(changed, ("optim", "optim.peak")) == ["optim.peak_lr", "steps"]


def test_a_run_that_began_before_a_key_goes_on_with_its_default_alone():
  now = _flat()
  then = {k: v for k, v in now.items() if k not in ("optim.clip_groups", "rl.tasks")}
  assert len(then) == len(now) - 2 and identity.diff(now, then) == {}
  other = {**now, "optim.clip_groups": True}
  assert identity.refused_changes(identity.diff(other, then), ()) == ["optim.clip_groups"]
  assert identity.diff(now, {}).keys() == {k for k, v in now.items() if v is not None}
  # What is written and unknown is a difference, and so is what only the new one has.
  assert identity.diff(now, {**then, "optim.gone": 1}) == {"optim.gone": (1, None)}
  assert identity.diff({**now, "rl.reward": "f 12"}, then) == {"rl.reward": ("", "f 12")}


@pytest.mark.parametrize(
  "kind, old, new, is_same",
  [
    ("yarn", None, 64, True), ("yarn", 32, 64, False), ("llama3", None, 64, True),
    ("linear", 32, None, True), ("dynamic", 32, None, False), ("dynamic", None, None, True),
  ],
)  # fmt: skip
def test_ropes_of_earlier_checkpoints_differ_only_where_they_compute_something_else(
  kind, old, new, is_same
):
  """rope.frequencies took max_positions where the original length was None."""
  then, now = (
    {"model.max_positions": 64,
     "model.rope_scaling": {"kind": kind, "factor": 4.0, "original_max_positions": original}}
    for original in (old, new)
  )  # fmt: skip
  assert (identity.diff(now, then) == {}) == is_same
  scaling = dataclasses.asdict(RopeScaling(kind, original_max_positions=new))
  assert set(then["model.rope_scaling"]) <= set(scaling)
