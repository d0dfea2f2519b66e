"""The account of memory: declared bytes are those that exist, compiled ones are all explained."""

import jax
import pytest
import train_test

from fp8jax import account, target
from fp8jax import step as step_lib
from fp8jax.errors import UserError
from fp8jax.models import presets


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch):
  monkeypatch.setitem(presets.PRESETS, "tiny", train_test.TINY)


@pytest.mark.parametrize("moments", ["float32", "coat"])
@pytest.mark.parametrize("shape", [None, (1, 2, 4)], ids=str)
def test_declared_bytes_are_those_on_a_device(moments, shape):
  plan = train_test._plan(train_test._config("bf16", **{"optim.moments": moments}), shape)
  rows = {row.kind: row.nbytes for row in account.declared(plan)}
  state = step_lib.make_state(plan)
  device = jax.devices()[0]
  there = [
    piece.data.nbytes for x in jax.tree.leaves(state) for piece in x.addressable_shards
    if piece.device == device
  ]  # fmt: skip
  assert sum(rows.values()) == sum(there)
  large = rows["masters: float32"]
  if moments == "coat":
    # Two codes per number, norms excepted; 5 bytes per group of 128 and moment.
    assert rows["moments: codes"] == pytest.approx(large / 2, rel=0.01)
    # Halves of the embedding's groups lie on two devices, the scales on both.
    scales = rows["moments: codes"] * 5 / 128
    assert scales * 0.99 < rows["moments: scales"] < scales * (1.01 if shape is None else 2)
    assert rows["moments: float32"] < 0.02 * large
  else:
    assert rows["moments: float32"] == pytest.approx(2 * large, abs=64)


def test_compiled_bytes_are_explained():
  plan = train_test._plan(train_test._config("bf16"))
  rows, summary = account.compiled(plan, target.lower(plan, jax.devices()[:1]))
  of = {row.kind: row.nbytes for row in rows}
  batch = 5 * 8 * 128 * 4  # tokens, targets, positions, segments, weights
  assert of["batch, sites, alignment"] == pytest.approx(batch, rel=0.05)
  everything = sum(of.values()) + summary["state_declared"]
  more = of.pop("kept for backward: more than that")
  assert everything == summary["peak"] and min(of.values()) >= 0
  assert more == summary["kept_compiled"] - summary["kept_declared"]
  assert abs(more) < 0.01 * summary["kept_declared"]


def test_unknown_targets_are_refused():
  for wrong in ("h300:8", "h200:x", "h200:0"):
    with pytest.raises(UserError, match="expected one of h100:N, h200:N, b200:N"):
      target.resolve(train_test._config("bf16"), wrong)


def small_on_h200() -> dict:
  import aot_test

  changes = {"eval.batch": 1, "optim.moments": "coat", "memory.norms": "e4m3_16"}
  c = aot_test.load("configs/base.py", aot_test.SMALL | changes | {"memory.gated": "e4m3_16"})
  plan, devices = target.resolve(c, "h200:1")
  rows, summary = account.compiled(plan, target.lower(plan, devices))
  return {"rows": {r.kind: r.nbytes for r in rows}, **summary}


@pytest.mark.aot
@pytest.mark.slow
def test_bytes_on_h200_are_those_declared(capsys):
  """Within the batch, and 5 % in all; and what waits for the backward pass, in groups."""
  import aot_test

  found = aot_test.elsewhere("small_on_h200()", "account_test")
  with capsys.disabled():
    print(found)
  assert found["arguments_compiled"] == pytest.approx(found["state_declared"], rel=0.05)
  assert found["outputs_not_aliased"] < 2**20
  assert found["kept_compiled"] == pytest.approx(found["kept_declared"], rel=0.05)


def test_a_run_is_planned_without_its_files():
  """Weights and text that a config names may be elsewhere; the config itself stays as it is."""
  c = train_test._config("bf16", **{"init.hf": "no/such/folder", "data.tokenizer": "no/such"})
  c.data.sources.main.kind, c.data.sources.main.path = "jsonl", "no/such/*.jsonl"
  c.mesh.fsdp = 8
  plan, devices = target.resolve(target.without_files(c), "")
  assert len(devices) == plan.run.layout.size(("fsdp",)) == 8
  assert c.init.hf == "no/such/folder"
  with pytest.raises(UserError, match="no/such"):
    target.resolve(c, "")
