"""Jobs that read a checkpoint whose policies had switched recipes compute in the switched ones."""

import json
import types

import debug_runs
import numpy as np
import pytest
import safetensors

from fp8jax.jobs import generator
from fp8jax.ops import site_tree
from fp8jax.phases import decide
from fp8jax.run import checkpoint, nonfinite, restore

SIZES = {
  "model.hidden_size": 128, "model.intermediate_size": 256, "model.num_heads": 2,
  "model.num_kv_heads": 2, "model.head_dim": 64,
}  # fmt: skip
CHANGES = SIZES | {"steps": 2, "eval.tokens": 0, "eval.precisions": ("recipe",)}
# Layer 0 in 16 bits, layer 1 in scales that are powers of two; every layer began in block_128.
SWITCHED = (("layers/0/.*", "bf16"), ("layers/1/.*", "block_128_pow2"))
STARTED = (("layers/.*", "block_128"), (".*", "bf16"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("trained")
  c = debug_runs.config(**CHANGES | {"precision.rules": STARTED})
  assert debug_runs.run_job("train", c, workdir)[0] == 0
  batch = debug_runs.take(debug_runs.config(**CHANGES), 1)[0]
  (workdir / "nonfinite").mkdir()
  np.savez(workdir / "nonfinite" / "batch_0.npz", **batch)
  (workdir / "nonfinite" / "report.json").write_text('{"step": 2}')
  return workdir


@pytest.fixture
def switch(monkeypatch):
  """From here on a checkpoint says that its policies had switched, before its last step."""

  def run(spec, to="block_128_pow2"):
    recipes = {name: "bf16" if "/0/" in name else to
               for name in site_tree.recipes_of(spec.sites()) if name != "head"}  # fmt: skip
    memory = decide.PolicyState(recipes=((1, recipes),)).to_json()
    meta = checkpoint.Checkpoints.meta
    monkeypatch.setattr(
      checkpoint.Checkpoints, "meta", lambda self, step: meta(self, step) | {"policy": memory}
    )

  return run


def _config(rules, **changes):
  return debug_runs.config(**CHANGES | {"precision.rules": rules, "eval.tokens": 512} | changes)


def _evaluate(run_job, rules, workdir, monkeypatch):
  code, stdout, stderr = run_job("evaluate", _config(rules), workdir)
  assert code == 0, stderr
  (found,) = json.loads(stdout)["heldout"]["main"].values()
  return found["loss"]


def _diagnose(run_job, rules, workdir, monkeypatch):
  """The recipes alone: the pass over a batch is compiled for 16 seconds."""
  told = lambda spec, params, batch, phase, teacher: {"recipes": {  # noqa: E731
    name: recipe.name for name, recipe in site_tree.recipes_of(spec.sites(phase=phase)).items()
  }}  # fmt: skip
  monkeypatch.setattr(nonfinite, "report", told)
  code, stdout, stderr = run_job("diagnose", _config(rules), workdir)
  assert code == 0, stderr
  return json.loads(stdout)["recipes"]


def _generate(run_job, rules, workdir, monkeypatch):
  """The recipes alone."""
  make = lambda spec, workdir, params, sites: sites  # noqa: E731
  monkeypatch.setattr(generator, "make", make)
  sites, _ = generator.load(debug_runs.spec(_config(rules), "generate"), str(workdir))
  return {name: recipe.name for name, recipe in site_tree.recipes_of(sites).items()}


@pytest.mark.parametrize(
  "job", [pytest.param(_evaluate, marks=pytest.mark.slow), _diagnose, _generate]
)
def test_a_job_computes_in_the_recipes_that_policies_switched_to(
  run_job, trained, switch, job, monkeypatch
):
  """As a configuration that names these recipes itself, and unlike its own."""
  rules = (STARTED, (*SWITCHED, (".*", "bf16")))
  began, named = (job(run_job, one, trained, monkeypatch) for one in rules)
  switch(debug_runs.spec(_config(STARTED)))
  assert job(run_job, STARTED, trained, monkeypatch) == named != began


def test_an_export_has_the_codes_of_the_recipes_that_policies_switched_to(
  run_job, trained, switch, tmp_path
):
  switch(debug_runs.spec(_config(STARTED)))
  c = _config(STARTED, **{"export.format": "hf-fp8-block"})
  code, stdout, stderr = run_job("export", c, trained, out=str(tmp_path / "x"))
  assert code == 0, stderr
  result = types.SimpleNamespace(**json.loads(stdout))
  assert (result.fp8_matrices, result.codes_of_training, result.unquantized_matrices) == (7, 7, 7)
  assert result.scale_fmt == "ue8m0" and "7 matrices, recipe 'bf16'" in stderr
  stated = debug_runs.read_json(tmp_path / "x" / "config.json")["quantization_config"]
  skipped = stated["modules_to_not_convert"]
  assert len(skipped) == 8 and all(n == "lm_head" or ".layers.0." in n for n in skipped)
  raw = dict(safetensors.deserialize((tmp_path / "x" / "model.safetensors").read_bytes()))
  name = "model.layers.1.mlp.up_proj.weight_scale_inv"
  mantissa, _ = np.frexp(np.frombuffer(raw[name]["data"], np.float32))
  np.testing.assert_array_equal(mantissa, 0.5)
  assert "model.layers.0.mlp.up_proj.weight_scale_inv" not in raw


@pytest.mark.parametrize("to, is_held", [("block_128_pow2", True), ("rowwise", False)])
def test_an_export_is_refused_for_the_recipes_of_its_checkpoint_before_weights_are_read(
  run_job, trained, switch, tmp_path, monkeypatch, to, is_held
):
  """Its configuration's own recipe, block_128, has no scales that are powers of two."""
  changes = {
    "export.format": "hf-fp8-block", "export.scale_fmt": "ue8m0",
    "precision.policy": ("switch_recipe(to='bf16')",), "log.tensor_stats_every": 100,
  }  # fmt: skip
  switch(debug_runs.spec(_config(STARTED)), to)
  if not is_held:
    read = lambda *_: pytest.fail("the weights were read")  # noqa: E731
    monkeypatch.setattr(restore, "restore_params", read)
  code, _, stderr = run_job("export", _config(STARTED, **changes), trained, out=str(tmp_path))
  assert code == 1 - is_held, stderr
  assert is_held or "recipe 'rowwise' multiplied weights as e4m3 1x*" in stderr, stderr
