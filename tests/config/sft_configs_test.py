"""configs/sft_1p5b.py and sft_7b.py have InfiR2's values, for eight H200s.

The values are those of the released scripts (InfiXAI/InfiR2 scripts/SFT), written out here.
"""

import json
import pathlib

import chats
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from configs import sft_1p5b, sft_7b
from fp8jax.config import files as config_files
from fp8jax.config import resolve
from fp8jax.data import loader
from fp8jax.data.chat import samples
from fp8jax.jobs import dispatch
from fp8jax.kernels.attention import tokamax_sm90
from fp8jax.kernels.choose import Device
from fp8jax.ops import site as site_lib
from fp8jax.optim import schedule as schedule_lib

MODULES = {"1p5b": sft_1p5b, "7b": sft_7b}
RATES = {"1p5b": (5e-5, 5e-6), "7b": (2e-5, 2e-6)}
SAMPLES = {"stage1": 72_000, "stage2": 165_000}
STEPS = {"stage1": 5_625, "stage2": 12_890}
TEMPLATES = pathlib.Path(__file__).resolve().parents[1] / "golden/chat_templates"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
  """The tokenizer and a few conversations at the paths that the configs name."""
  folder = tmp_path_factory.mktemp("checkout")
  for size in ("72k", "165k"):
    chats.write(folder / f"assets/InfiAlign-SFT-{size}/a.jsonl", 2)
  model = folder / "assets/Qwen2.5-7B-Instruct"
  model.mkdir(parents=True)
  config = {"eos_token": "<|im_end|>"}
  config["chat_template"] = (TEMPLATES / "qwen2_5.jinja").read_text()
  (model / "tokenizer_config.json").write_text(json.dumps(config))
  vocabulary = {"<unk>": 0, "<|im_end|>": 1}
  tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>")).save(
    str(model / "tokenizer.json")
  )
  return folder


def _index(count):
  """As many samples as the data set has, of random lengths up to half a window."""
  lengths = np.random.default_rng(0).integers(200, 16_384, count).astype(np.int32)
  nothing = np.zeros(count, np.int32)
  return samples.Index(nothing, nothing, nothing, lengths, lengths, nothing > 0, {})


# Slow: those that differ from the others in a name.
CASES = [
  pytest.param(size, arm, marks=[pytest.mark.slow] * ((size == "7b") != arm.endswith("bf16")))
  for size in MODULES
  for arm in sft_7b.ARMS
]


@pytest.mark.parametrize("size, arm", CASES)
def test_values_are_those_of_the_scripts(size, arm, checkout, monkeypatch):
  monkeypatch.chdir(checkout)
  stage = arm.partition(",")[0]
  index = _index(SAMPLES[stage])
  monkeypatch.setattr(loader, "chat_index", lambda spec: index)
  monkeypatch.setattr(tokamax_sm90, "lacks", lambda: None)
  c = MODULES[size].get_config(arm)
  spec = resolve.resolve(c, 8, Device("gpu", 90))
  # 5 epochs of 64 samples a step; a step's samples are packed to 32k tokens a window.
  assert spec.steps == c.steps == STEPS[stage] == spec.optim.steps
  assert spec.data.chat.samples_per_step == 64 and spec.data.seq_len == 32_768
  steps = loader.chat_steps(spec.data, spec.global_batch)
  assert steps.needed(20) <= spec.global_batch == 32 and spec.grad_accum_steps == 4
  first = np.concatenate([steps.numbers(step) for step in range(20)])  # shuffled
  assert len(set(first.tolist())) == 20 * 64 and not np.array_equal(first, np.sort(first))
  # The optimizer.
  optim = spec.optim
  assert (optim.peak_lr, optim.min_lr) == RATES[size]
  assert optim.schedule == "cosine" and optim.warmup_steps == STEPS[stage] // 20
  assert (optim.optimizer, optim.b1, optim.b2) == ("adam", 0.9, 0.95)
  assert optim.weight_decay == 0 and optim.grad_clip_norm == 1.0
  assert optim.master_format == optim.moment_format == optim.grad_format == "float32"
  rate = schedule_lib.schedule(optim)
  np.testing.assert_allclose(rate(optim.warmup_steps), RATES[size][0], rtol=1e-6)
  np.testing.assert_allclose(rate(spec.steps), RATES[size][1], rtol=1e-5)
  half = (optim.warmup_steps + spec.steps) / 2
  np.testing.assert_allclose(rate(half), sum(RATES[size]) / 2, rtol=1e-4)
  # E4M3 blocks, FP32 gradients, BF16 compute, every layer recomputed, attention of each sample.
  recipes = {name: s.recipe.name for name, s in site_lib.flatten(spec.sites()).items()}
  want = "bf16" if arm.endswith("bf16") else "block_128_pow2"
  assert {r for name, r in recipes.items() if name != "head"} == {want}
  assert spec.run.dtype == jnp.bfloat16 and spec.run.remat == "full"
  assert spec.run.attention == "tokamax"
  # Documents are apart, and all samples are trained on.
  assert not spec.data.cross_document and spec.data.heldout == 0 and spec.eval.tokens == 0
  # The model of continued pre-training, and where its weights come from.
  model = spec.model
  assert (model.vocab_size, model.rope_theta, model.num_layers) == (152_064, 1e6, 28)
  assert model.hidden_size == {"1p5b": 1536, "7b": 3584}[size]
  recipe = "_bf16" * arm.endswith("bf16")
  source = {"stage1": f"runs/cpt_{size}", "stage2": f"runs/sft_{size}_stage1"}[stage]
  assert spec.init.workdir == source + recipe and spec.init.weights_only and not spec.init.hf


@pytest.mark.parametrize("size, arm", CASES)
def test_step_is_planned_without_data_for_gpus_that_are_not_here(size, arm, monkeypatch):
  """As --job=memory --topology=h200:8 does; the run that it starts from is not read."""
  monkeypatch.setattr(tokamax_sm90, "lacks", lambda: None)
  c = config_files.without_files(MODULES[size].get_config(arm))
  spec = resolve.resolve(c, 8, Device("gpu", 90))
  assert spec.steps == STEPS[arm.partition(",")[0]] and not spec.data.cross_document
  assert spec.tokens_per_device == 32_768


def test_text_of_a_conversation_is_chatml_with_one_system_block(checkout, monkeypatch):
  """As their data loader writes it: the default system text once, before the first message."""
  monkeypatch.chdir(checkout)
  data = resolve.resolve_data(sft_7b.get_config())
  turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
  text = data.chat.template.render(turn * 2)
  system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
  block = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
  assert text == f"<|im_start|>system\n{system}<|im_end|>\n" + block * 2


def test_arms_without_a_stage_are_recipes_of_stage_1():
  plain = sft_7b.get_config("tensor_delayed(steps=16, margin=1)")
  assert plain.precision.rules[1] == ("layers/.*", "tensor_delayed(steps=16, margin=1)")
  before = dispatch._stem("configs/cpt_7b.py:tensor_delayed(steps=16, margin=1)")
  assert plain.init.workdir == f"runs/{before}"
  assert sft_7b.get_config().steps == STEPS["stage1"]
