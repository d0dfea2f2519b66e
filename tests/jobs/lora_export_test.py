"""Adapters merged by --job=export: the weights in the folder, and the gate."""

import dataclasses
import json
import pathlib

import debug_runs
import harness
import ml_dtypes
import numpy as np
import pytest
from harness import tiny_config, tiny_spec

from fp8jax import console
from fp8jax import params as params_lib
from fp8jax.errors import UserError
from fp8jax.export import write
from fp8jax.export.settings import Export
from fp8jax.jobs import calibrate, export, generator, start, train
from fp8jax.models import lora, presets, transformer
from fp8jax.models.config import Lora
from fp8jax.models.hf import peft
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import stored_params
from fp8jax.run import calibration, restore
from fp8jax.run.restore import restore_params

SMALL = {
  "global_batch": 1, "seq_len": 128, "eval.batch": 1, "eval.tokens": 128, "model.num_layers": 2,
  "model.num_heads": 2, "model.num_kv_heads": 1, "model.intermediate_size": 256, "steps": 2,
  "optim.decay_steps": 1, "optim.warmup_steps": 0, "optim.peak_lr": 1e-1, "optim.min_lr": 1e-2,
  "model.lora.rank": 4, "model.lora.targets": ("attn/.*", "mlp/up"), "eval.precisions": ("bf16",),
  "log.tensorboard": False, "export.gate_tokens": 128,
}  # fmt: skip


@pytest.fixture
def base(tmp_path):
  """(folder of a base, folder of adapters in PEFT's format, {path: values} of all)."""
  cfg = dataclasses.replace(
    presets.DEBUG, lora=Lora(3, 7.0, ("attn/q", "attn/o", "mlp/down"), "bf16"), init_std=0.05
  )
  declared = params_lib.flatten(transformer.params(cfg))
  rng = np.random.default_rng(0)
  flat = {path: np.float32(rng.normal(0, 0.05, params_lib.shape(p, cfg.dims)))
          for path, p in declared.items()}  # fmt: skip
  tree, plain = params_lib.unflatten(flat), dataclasses.replace(cfg, lora=None)
  wide = params_lib.unflatten({k: v for k, v in flat.items() if not lora.is_adapter(k)})
  write.save(str(tmp_path / "base"), write.model(wide, plain, "float32"))
  write.save(str(tmp_path / "adapters"), write.adapters(tree, cfg, "base"))
  return str(tmp_path / "base"), str(tmp_path / "adapters"), flat


def _config(base, adapters, **changes):
  of_model = {"model.preset": "hf", "init.hf": base, "init.adapters": adapters}
  rules = {"precision.rules": ((".*", "bf16"),), "precision.compute_dtype": "float32"}
  return debug_runs.config(**of_model | rules | {"data.tokenizer": "bytes"} | changes)


def test_adapters_name_the_weights_that_they_were_trained_beside(tmp_path, capsys):
  """Another run's weights are no folder; adapters that it had already have its own base."""
  stages = {"first": {"init.hf": "BASE"}, "second": {"init.hf": "BASE", "model.lora.rank": 4}}
  for name, resolved in stages.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps({"resolved": resolved}))
  of = {name: {"init.hf": "BASE", "init.workdir": str(tmp_path / name)} for name in stages}
  assert write.frozen_base({"init.hf": "BASE", "init.workdir": ""}) == "BASE"
  assert write.frozen_base(of["second"]) == "BASE"
  assert capsys.readouterr().err == ""
  assert write.frozen_base(of["first"]) == ""
  said = " ".join(capsys.readouterr().err.split())
  assert f"beside the weights of {tmp_path}/first: base_model_name_or_path is null" in said


def test_a_calibration_before_training_has_the_adapters_that_training_begins_with(
  base, tmp_path, monkeypatch
):
  rules = {"precision.rules": harness.only_down("e4m3_static"), "calibrate.batches": 1}
  c = _config(base[0], "", **rules, **{"model.lora.rank": 4, "model.lora.base": "float32"})
  spec = debug_runs.spec(c, "calibrate")
  watched = {}
  make = lambda spec, params, *more, **known: watched.update(params) or {"rows": [], "batches": 1}  # noqa: E731
  monkeypatch.setattr(calibration, "run", make)
  calibrate.run(spec, str(tmp_path / "none"), str(tmp_path / "table.json"))
  flat = params_lib.flatten(watched)
  assert flat.keys() == params_lib.flatten(spec.declaration).keys()
  np.testing.assert_array_equal(flat["layers/mlp/down"], base[2]["layers/mlp/down"])
  assert flat["layers/mlp/down_lora_a"].any() and not flat["layers/mlp/down_lora_b"].any()
  c.init.workdir = str(tmp_path / "other")
  with pytest.raises(UserError, match="the weights of init.workdir=.*: give --workdir="):
    calibrate.run(debug_runs.spec(c, "calibrate"), str(tmp_path / "none"), "")


def test_adapters_in_pefts_format_start_training_generate_merge_and_leave_again(
  base, run_job, tmp_path, capsys, monkeypatch
):
  folder, adapters, flat = base
  settings = pathlib.Path(adapters) / peft.CONFIG
  settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_dropout": 0.05}))
  spec = debug_runs.spec(_config(folder, adapters))
  state, _ = start.fresh(spec, str(tmp_path / "run"), console.console())
  said = " ".join(capsys.readouterr().out.split())
  assert "has lora_dropout=0.05; adapters are trained without dropout here" in said
  assert not peft.note("")
  for path, value in params_lib.flatten(state.params).items():
    if lora.is_adapter(path):
      np.testing.assert_array_equal(value, flat[path], err_msg=path)
  monkeypatch.setattr(write, "frozen_base", lambda config: f"of {config}")
  merged, again = str(tmp_path / "merged"), str(tmp_path / "again")
  wanted = {"weights.hf": folder, "export.gate_tokens": 256}
  for out, changes in (
    (merged, {"export.dtype": "float32"}),
    (again, {"export.format": "peft", "model.lora.rank": 3, "model.lora.alpha": 7.0,
     "model.lora.targets": ("attn/[qo]", "mlp/down")}),
  ):  # fmt: skip
    c = _config(folder, adapters, **wanted | changes)
    code, stdout, stderr = run_job("export", c, "run", out=out)
    assert code == 0, stderr
    assert json.loads(stdout)["gate"]["fp8jax"]["kl"] < 1e-6
  got, _ = hf_weights.load_params(merged, dataclasses.replace(spec.model, lora=None))
  a, b = (np.float64(flat[f"layers/mlp/down_lora_{n}"]) for n in "ab")
  want = flat["layers/mlp/down"] + 7 / 3 * np.einsum("nfr,nrd->nfd", a, b)
  np.testing.assert_allclose(got["layers"]["mlp"]["down"], want, atol=1e-6)
  assert np.abs(want - flat["layers/mlp/down"]).max() > 0.01
  stated = debug_runs.read_json(pathlib.Path(again) / "adapter_config.json")
  assert stated["base_model_name_or_path"] == "of {}"
  files = [pathlib.Path(f) / peft.WEIGHTS for f in (adapters, again)]
  assert files[0].read_bytes() == files[1].read_bytes()
  # Beside the base as training stores it: codes, unless model.lora.base says otherwise.
  of_twin = {"weights.hf": folder, "init.nudge": True}  # which moves where training begins alone
  trained = debug_runs.spec(_config(folder, adapters, **of_twin), "evaluate")
  harness.assert_trees_equal(restore.load_weights(trained, "run").params, state.params)
  scores = []
  for changes in (
    {"init.hf": folder, "model.lora.base": "float32"},
    {"init.hf": merged, "init.adapters": ""},
  ):
    c = _config(folder, adapters, **{"weights.hf": changes["init.hf"]} | changes)
    made, _ = generator.load(debug_runs.spec(c, "evaluate"), "run")
    scores.append(made.score([([104, 101, 108], [108, 111, 32, 119])])[0][0])
  np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"model.lora.rank": 4}, "rank is 3 there and 4 here; alpha is 7.0 there and 16.0 here"),
    ({"model.lora.rank": 3, "model.lora.alpha": 7.0}, "the targets are ('attn/o', 'attn/q', 'mlp/"),
    ({"init.hf": "", "model.preset": "debug"}, "are beside the weights of a Hugging Face folder"),
    ({"init.adapters": "", "weights.hf": "BASE", "export.format": "peft"},
     "export.format='peft' writes adapters, and model.lora.rank=0 has none"),
    ({"init.adapters": "", "weights.hf": "BASE", "export.format": "peft", "model.lora.rank": 3},
     "which has no adapters; set init.adapters to theirs"),
  ],
)  # fmt: skip
def test_adapters_that_the_configuration_contradicts_are_refused(base, run_job, changes, message):
  folder, adapters, _ = base
  changes = {k: folder if v == "BASE" else v for k, v in changes.items()}
  code, _, stderr = run_job("export", _config(folder, adapters, **changes), "run")
  assert code == 1 and message in stderr, stderr


@pytest.mark.slow
def test_adapters_are_merged_in_float32_and_the_gate_compares_with_both(tmp_path, monkeypatch):
  spec = tiny_spec(tiny_config(**SMALL), job="export")
  train.run(spec, str(tmp_path))
  params, _, _ = restore_params(spec, str(tmp_path))
  attn = params["layers"]["attn"]
  a, b = (np.asarray(attn[n], np.float64) for n in ("q_lora_a", "q_lora_b"))
  q = np.asarray(stored_params.compute_copy(attn["q"]), np.float64)
  assert np.any(b)
  want = (q + 4.0 * np.einsum("ndr,nrhk->ndhk", a, b)).astype(np.float32)
  for form in ("hf-bf16", "hf-fp8-block"):
    target = str(tmp_path / form)
    wanted = dataclasses.replace(spec.of(Export), format=form, dtype="bfloat16")
    result = export.run(dataclasses.replace(spec, sections={Export: wanted}), str(tmp_path), target)
    read, _ = hf_weights.load_params(target, dataclasses.replace(spec.model, lora=None))
    got = np.asarray(read["layers"]["attn"]["q"])
    if form == "hf-bf16":
      assert np.abs(got - want.astype(ml_dtypes.bfloat16).astype(np.float32)).max() < 1e-4
    assert np.abs(got - want).max() <= 2.0**-4 * np.abs(want).max()
    if form == "hf-fp8-block":  # training had no codes of what adapters were merged into
      assert (result["fp8_matrices"], result["codes_of_training"]) == (2 * 7, 2 * 2)
    assert result["gate"]["fp8jax"]["kl"] < 0.01 and result["gate"]["fp8jax"]["top1"] > 0.8
