"""Training for a server's format: QAT and distillation as runs, from weights of other runs."""

import json

import chats
import harness
import jax
import numpy as np
import pytest

from fp8jax.compiled import expected_gemms
from fp8jax.config import checks
from fp8jax.data import batch_sharding, loader
from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import start
from fp8jax.run import evaluator, preemption
from fp8jax.step import distillation

_DISTIL = {"distill.weight": 0.5, "distill.temperature": 2.0}


def _from(workdir, **changes):
  return {"init.workdir": str(workdir), "init.weights_only": True, **changes}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["w4a16_g64", "int8"])
def test_a_distilled_run_is_the_same_interrupted_and_refuses_another_teacher(
  tmp_path, recipe, monkeypatch, capsys
):
  """From a run in FP8, its weights alone. The student starts as a quantized copy of its teacher."""
  harness.train_on_text(tmp_path / "fp8", "tensor_delayed", steps=3)
  changes = _from(tmp_path / "fp8", **_DISTIL)
  harness.train_on_text(tmp_path / "whole", recipe, **changes)
  said = capsys.readouterr().out
  assert "teacher: " in said and "(KL 0.0" in said
  results = json.loads((tmp_path / "whole" / "summary.json").read_text())["evaluations"]
  own, bf16 = results["0"]["main"].values()
  assert abs(bf16["kl"]) < 1e-9 < own["kl"]
  rows = [json.loads(r) for r in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
  for row in (row for row in rows if "distill/kl" in row):
    loss = 0.5 * row["distill/cross_entropy"] + 0.5 * 4 * row["distill/kl"]
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
  for stop in (3, 6):
    with monkeypatch.context() as m:
      m.setattr(preemption.Interrupts, "requested", lambda _, step, stop=stop: step >= stop)
      harness.train_on_text(tmp_path / "parts", recipe, **changes)
    if stop == 3:
      harness.train_on_text(tmp_path / "other", "tensor_delayed", steps=4)
      with pytest.raises((ConfigError, UserError), match="distill.teacher"):
        harness.train_on_text(tmp_path / "parts", recipe, **_from(tmp_path / "other", **_DISTIL))
  spec = harness.text_spec(recipe, **changes)
  states = [harness.saved_state(tmp_path / name, spec, 6) for name in ("whole", "parts")]
  harness.assert_trees_equal(*states)


@pytest.mark.slow
def test_held_out_kl_is_of_the_forward_passes(tmp_path):
  """Against the logits of both, in float64."""
  harness.train_on_text(tmp_path, "bf16", steps=2)
  spec = harness.text_spec("w4a16_g64", **_from(tmp_path, **_DISTIL))
  console = type("Out", (), {"print": lambda *_: None})
  teacher = start.teacher(spec, console)
  params = jax.tree.map(lambda x: x + 0.01, teacher)
  (result,) = evaluator.Evaluator(spec, teacher).run(params, {}).values()
  sharder = batch_sharding.BatchSharder(spec.run.layout, spec.eval.batch)
  batch = next(iter(loader.heldout_batches(spec.data, "main", sharder.local_rows, 1, sharder.shard,
                                           loader.DocumentCounts())))  # fmt: skip
  from fp8jax.models import transformer

  def log_p(params, recipe, t):
    z = np.asarray(transformer.logits(params, spec.sites(recipe), batch, spec.model, spec.run))
    z = z.astype(np.float64) / t
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))

  for label, recipe in evaluator.precisions(spec).items():
    p, q = log_p(teacher, "bf16", 2.0), log_p(params, recipe, 2.0)
    w = batch["weights_BL"]
    want = (w * (np.exp(p) * (p - q)).sum(-1)).sum() / w.sum()
    assert result[label]["kl"] == pytest.approx(want, rel=1e-4)
    ce = -np.take_along_axis(log_p(params, recipe, 1.0), batch["targets_BL"][..., None], -1)[..., 0]
    assert result[label]["loss"] == pytest.approx((w * ce).sum() / w.sum(), rel=1e-5)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
  folder = chats.write_model(tmp_path / "hf", 1, 64)
  size = json.loads((folder / "config.json").read_text())["vocab_size"]
  own = {"distill.weight": 1.0, "init.hf": str(folder), "data.tokenizer": "bytes", "seq_len": 32}
  for key, value in ((k, None) for k in harness.THREE_LAYERS):
    own[f"model.{key}"] = value
  padded = {"model.preset": "hf", "model.vocab_size": size + 64}
  with pytest.raises(ConfigError, match=f"has a vocabulary of {size} and the model one of"):
    harness.text_spec("w4a16_g64", **own, **padded)


def test_a_teacher_that_says_nothing_is_refused_with_the_fix(tmp_path):
  def refused(match, **changes):
    with pytest.raises(ConfigError, match=match):
      harness.text_spec("w4a16_g64", **{"distill.weight": 1.0, **changes})

  refused("without a teacher: weights are drawn at random; set init.hf")
  refused("is a share of the loss, at most 1", **{"distill.weight": 1.5, "init.workdir": "w"})
  refused("distill.temperature=0.0 must be positive", **{"distill.temperature": 0.0})
  with_adapters = harness.text_config(
    **{"distill.weight": 1.0, "init.hf": "h", "init.adapters": "a"}
  )
  assert "merge them (--job=export) and set" in checks.distill_problems(with_adapters)[0]
  own = {"model.unit_scaling": "loss", "init.workdir": "w", "optim.grad_clip_norm": 0.0}
  refused("whose factors are of a cross entropy's gradient", **own)
  spec = harness.text_spec("w4a16_g64", **{"distill.weight": 1.0, "init.workdir": "w"})
  assert not any(row.is_emulated for row in expected_gemms.expected(spec))  # in 16 bits anywhere
  assert {str(x.dtype) for x in jax.tree.leaves(distillation.abstract(spec))} == {"float32"}
