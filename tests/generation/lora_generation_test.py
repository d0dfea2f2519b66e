"""Generation with adapters beside their base: the merged model's scores, from a checkpoint too."""

import dataclasses

import case_inputs
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fp8jax import params as params_lib
from fp8jax.data.tokenize import Tokenizer
from fp8jax.generation import api
from fp8jax.jobs import dispatch, generator, train
from fp8jax.models import lora, transformer
from fp8jax.step import train_step

SMALL = {
  "global_batch": 1, "seq_len": 64, "eval.batch": 1, "eval.tokens": 64, "model.num_layers": 2,
  "model.num_heads": 2, "model.num_kv_heads": 1, "model.intermediate_size": 128, "steps": 2,
  "optim.decay_steps": 1, "optim.warmup_steps": 0, "optim.peak_lr": 1e-1, "optim.min_lr": 1e-2,
  "model.lora.rank": 4, "eval.precisions": ("bf16",), "log.tensorboard": False, "log.report": False,
}  # fmt: skip
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]


def _spec(recipe, **changes):
  return harness.tiny_spec(harness.tiny_config(recipe, **SMALL | changes), job="generate")


def _generator(spec, params):
  return api.Generator(params, spec.sites(), spec.model, spec.run, Tokenizer("bytes"), [10**6],
                       slots=2)  # fmt: skip


def _logits(spec, params):
  """float64 [L, V] of TOKENS, from the training forward pass."""
  tokens = jnp.asarray([TOKENS])
  batch = {"tokens_BL": tokens, "positions_BL": jnp.arange(len(TOKENS))[None]}
  found = jax.jit(lambda p: transformer.logits(p, spec.sites(), batch, spec.model, spec.run))
  return np.asarray(found(params)[0], np.float64)


def _log_likelihood(logits_LV):
  """Of TOKENS from the fourth on."""
  z = logits_LV - logits_LV.max(-1, keepdims=True)
  logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
  return sum(logp[i - 1, TOKENS[i]] for i in range(4, len(TOKENS)))


@pytest.mark.slow  # jobs/lora_export_test.py has merged weights beside adapters
@pytest.mark.parametrize("recipe", ["bf16", "block_128"])
def test_scores_with_adapters_are_those_of_the_training_forward_pass(recipe):
  spec = _spec(recipe)
  params = harness.random_adapters(train_step.make_state(spec).params, 0.1)
  made = _generator(spec, params)
  [(got, _)] = made.score([(TOKENS[:4], TOKENS[4:])])
  want = _log_likelihood(_logits(spec, params))
  assert abs(got - want) < 1e-3
  base = params_lib.unflatten({
    path: jnp.zeros_like(x) if path.endswith("_lora_b") else x
    for path, x in params_lib.flatten(params).items()
  })  # fmt: skip
  assert abs(_log_likelihood(_logits(spec, base)) - want) > 0.05  # the adapters count
  if recipe == "bf16":  # merged in float32, an ordinary model says the same
    merged = lora.merged(params, spec.declaration, spec.model)
    plain = dataclasses.replace(spec, model=lora.without(spec.model))
    sites = _spec("bf16", **{"model.lora.rank": 0}).sites()
    plain = api.Generator(merged, sites, plain.model, spec.run, Tokenizer("bytes"), [10**6])
    sampling = api.Sampling(max_new_tokens=8)
    assert plain.generate([TOKENS], sampling) == made.generate([TOKENS], sampling)


@pytest.mark.slow
def test_a_checkpoint_with_adapters_generates(tmp_path):
  spec = _spec("block_128")
  train.run(spec, str(tmp_path))
  state = harness.saved_state(tmp_path, spec, 2)
  assert any(np.any(x) for path, x in params_lib.flatten(state.params).items() if "lora_b" in path)
  made, where = generator.load(spec, str(tmp_path))
  assert where["step"] == 2
  [(got, _)] = made.score([(TOKENS[:4], TOKENS[4:])])
  assert abs(got - _log_likelihood(_logits(spec, state.params))) < 1e-3


@pytest.mark.parametrize("job", ["generate", "evaluate", "export", "sensitivity"])
def test_a_folder_is_not_asked_for_adapters(job, capsys, tmp_path):
  folder = str(case_inputs.model_folder(tmp_path / "folder"))
  c = harness.tiny_config("block_128", **SMALL | {"weights.hf": folder})
  assert dispatch.run(job, c, base.get_config(), "x.py", "") == 1
  said = f"model.lora.rank=4 with weights.hf={folder!r}, which has no adapters; set init.adapters"
  assert said in capsys.readouterr().err
