"""Every config and every experiment arm: its header, its keys, and its whole step, abstractly.

The files that configs name are not in a checkout. Stand-ins lie at the same relative paths: the
config.json that was published, a tokenizer of three tokens, one short text, an index of prepared
data. No config is changed.
"""

import dataclasses
import json
import math
import pathlib
import re
import shutil

import chats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_files
import tokenizers
from array_record.python import array_record_module

from configs import base
from fp8jax import mesh
from fp8jax.config import identity, named, resolve
from fp8jax.data import tokenize
from fp8jax.jobs import table
from fp8jax.kernels.attention import tokamax_sm90
from fp8jax.kernels.choose import Device
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names as hf_names
from fp8jax.ops import site as site_lib
from fp8jax.ops import stored_params
from fp8jax.optim import schedule as schedule_lib
from fp8jax.recipe import library
from fp8jax.run import evaluator
from fp8jax.step import train_spec, train_step

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(ROOT.glob("experiments/*/config.py"))
FILES = [*sorted(ROOT.glob("configs/*.py")), *EXPERIMENTS]

# As published on Hugging Face; other keys of these files say nothing about shapes.
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": False}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "use_sliding_window": False}
PUBLISHED = {
  "smollm2-135m": LLAMA | dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
    rope_theta=100000, rms_norm_eps=1e-5, tie_word_embeddings=True,
    initializer_range=0.041666666666666664,
  ),
  "Qwen2.5-1.5B": QWEN2 | dict(
    vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
    num_attention_heads=12, num_key_value_heads=2, max_position_embeddings=131072,
    rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=True, initializer_range=0.02,
  ),
  "Qwen2.5-7B": QWEN2 | dict(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=131072,
    rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=False, initializer_range=0.02,
  ),
}  # fmt: skip
# What their model cards and safetensors headers count.
PUBLISHED_PARAMETERS = {
  "smollm2-135m": 134_515_008,
  "Qwen2.5-1.5B": 1_543_714_304,
  "Qwen2.5-7B": 7_615_616_512,
}


MODULES = {str(path.relative_to(ROOT)): run_files.script(path) for path in FILES}
# (file, arm); None calls get_config without one, as --config=FILE does.
CASES = [
  (name, arm) for name, module in MODULES.items() for arm in (None, *getattr(module, "ARMS", ()))
]


def _config(name: str, arm: str | None = None):
  return MODULES[name].get_config(*([] if arm is None else [arm]))


def _header(name: str) -> dict[str, str]:
  """{"what": ...}, in the order of the docstring, continuation lines joined."""
  text = re.sub(r"\n {2,}", " ", MODULES[name].__doc__)
  return {
    key: value.strip() for key, value in re.findall(r"^(\w+): *(.*)$", text, re.MULTILINE) if value
  }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
  """A folder with everything that configs name, at the paths by which they name it."""
  folder = tmp_path_factory.mktemp("checkout")
  for name, description in PUBLISHED.items():
    model = folder / "assets" / name
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(description))
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    vocabulary = {"<unk>": 0, "word": 1, "<|endoftext|>": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")  # a token per character
    made.save(str(model / "tokenizer.json"))
    _write_hollow_weights(model / "model.safetensors", hf_config.config_from_hf(description))
  for corpora in ("infir2_data", "corpora"):
    for name in ("python_docs/library/text.txt", "brown/text.txt"):
      text = folder / "assets" / corpora / name
      text.parent.mkdir(parents=True)
      text.write_text("word")
    vocabulary = folder / "assets" / corpora / "bpe_4096"
    vocabulary.mkdir()
    shutil.copy(folder / "assets/smollm2-135m/tokenizer.json", vocabulary)
  for name in ("InfiAlign-SFT-72k/a", "InfiAlign-SFT-165k/a", "sft_demo/stage1", "sft_demo/stage2"):
    chats.write(folder / "assets" / f"{name}.jsonl", 80, longest=3)
  for name in ("dapo-math-17k", "sft_demo/learned"):  # questions
    (folder / "assets" / f"{name}.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
  instruct = folder / "assets/Qwen2.5-7B-Instruct"
  # Without the weights: a copy would fill the holes of their file, 15 GB.
  no_weights = shutil.ignore_patterns("*.safetensors")
  shutil.copytree(folder / "assets/Qwen2.5-7B", instruct, ignore=no_weights)
  for model in (instruct, folder / "assets/smollm2-135m"):
    (model / "chat_template.jinja").write_text(chats.TEMPLATE)
  prepared = folder / "assets/cpt_data/main"
  prepared.mkdir(parents=True)
  fingerprint = tokenize.Tokenizer(str(folder / "assets/Qwen2.5-7B")).fingerprint
  splits = {
    s: {"files": [f"{s}.array_record"], "lengths": f"{s}.uint32", "documents": 1, "tokens": 1}
    for s in ("train", "heldout")
  }
  index = {"tokenizer": fingerprint, "heldout": 0.1, "splits": splits}
  (prepared / "index.json").write_text(json.dumps(index))
  for split in splits:
    writer = array_record_module.ArrayRecordWriter(str(prepared / f"{split}.array_record"))
    writer.write((1).to_bytes(4, "little"))
    writer.close()
    (prepared / f"{split}.uint32").write_bytes((1).to_bytes(4, "little"))
  return folder


def _write_hollow_weights(path: pathlib.Path, cfg):
  """A header that promises every tensor, and a file as long as it says that takes no room."""
  header, end = {}, 0
  for entry in hf_names.entries(cfg):
    shape = entry.hf_shape(cfg.dims)
    begin, end = end, end + 2 * math.prod(shape)
    header[entry.name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
  text = json.dumps(header).encode()
  with open(path, "wb") as f:
    f.write(len(text).to_bytes(8, "little") + text)
    f.truncate(8 + len(text) + end)


def _resolve(name: str, arm: str | None = None) -> train_spec.TrainSpec:
  """The spec for the hardware that the config's header asks for."""
  gpus = re.match(r"(\d+) x H", _header(name)["hardware"])
  # Of tasks the data and packages may be missing here.
  needs = table.JOBS[getattr(MODULES[name], "JOB", "train")].needs
  needs = dataclasses.replace(needs, problems=lambda c: [])
  if gpus:
    return resolve.resolve(_config(name, arm), int(gpus[1]), Device("gpu", 90), needs=needs)
  return resolve.resolve(_config(name, arm), 1, Device("cpu"), needs=needs)


def _bytes_alive() -> int:
  return sum(x.nbytes for x in jax.live_arrays())


def _abstract_batch(spec: train_spec.TrainSpec):
  shape = (spec.microbatch, spec.data.seq_len)
  if spec.grad_accum_steps > 1:
    shape = (spec.grad_accum_steps, *shape)
  dtypes = dict(
    tokens_BL=jnp.int32, targets_BL=jnp.int32, positions_BL=jnp.int32, weights_BL=jnp.float32
  )
  if not spec.data.cross_document:
    dtypes["segments_BL"] = jnp.int32
  return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def _count_by_formula(c) -> int:
  """Scalars of a Llama or Qwen2 model, from its config.json."""
  d, f, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
  head = d // c["num_attention_heads"]
  kv = c["num_key_value_heads"] * head
  biases = d + 2 * kv if c["architectures"] == ["Qwen2ForCausalLM"] else 0
  layer = 2 * d * d + 2 * d * kv + biases + 3 * d * f + 2 * d
  return c["vocab_size"] * d * (1 if c["tie_word_embeddings"] else 2) + layers * layer + d


@pytest.mark.parametrize("name", MODULES)
def test_header_says_what_command_hardware_expected(name):
  header = _header(name)
  assert list(header)[:4] == ["what", "command", "hardware", "expected"]
  assert all(header.values())
  files = re.findall(r"(?:--config=|bash )(\S+)", header["command"])
  files = [file.partition(":")[0] for file in files]  # without an arm
  assert files and all((ROOT / file).exists() for file in files)
  if name.startswith("configs/") and name != "configs/base.py":
    assert name in files


@pytest.mark.parametrize("name, arm", CASES)
def test_keys_are_those_of_base(name, arm):
  """A mistyped key in a config would otherwise be a new key that nobody reads."""

  def keys(c):
    return {k for k in identity.flatten(c) if not k.startswith("data.sources.")}

  c, schema = _config(name, arm), base.get_config()
  assert keys(c) == keys(schema)
  for source in c.data.sources.values():
    assert set(source) == set(base.source())


def test_values_are_those_that_were_published(repository):
  """A default that moves, or a key that a section loses, changes somebody's run."""
  golden = json.loads((repository / "tests" / "golden" / "configs.json").read_text())
  whole = golden.pop("whole")
  assert identity.flatten(base.get_config()) == whole
  for name, changes in golden.items():
    path, _, arm = name.partition(":")
    wanted = {k: v for k, v in whole.items() if k not in changes["without"]} | changes["changed"]
    assert identity.flatten(_config(path, arm or None)) == wanted, name


# What the traced step does not depend on: arms that differ in nothing else are built once.
_UNTRACED = (
  "data", "init", "seed", "steps", "eval", "log", "checkpoint", "calibrate", "export", "diagnose",
  "optim.peak_lr", "optim.min_lr", "optim.warmup_steps", "optim.decay_steps",
)  # fmt: skip
_built: set[str] = set()


def _is_new_program(spec) -> bool:
  flat = spec.flat
  names = [k for k in sorted(flat) if not any(f"{k}.".startswith(f"{u}.") for u in _UNTRACED)]
  key = repr([(k, flat[k]) for k in names])
  return not (key in _built or _built.add(key))


# Slow: arms that differ from another case in one value alone, and an arm per recipe; the suites of
# the dot and of the proof have every recipe. `make test-aot` compiles cpt_7b.py.
_LIKE_ANOTHER = (
  "configs/cpt_7b.py", "configs/cpt_7b_1gpu_32k.py", "configs/cpt_1p5b.py",
  "configs/cpt_1p5b_1gpu.py", "configs/cpt_7b_1gpu.py", "configs/sft_1p5b.py",
)  # fmt: skip
_LIKE_OTHERS = (
  "stage2", "stage2,bf16", "paired-bf16", "paired-block_128_pow2", "scratch-bf16",
  "scratch-block_128_pow2", "qat-nvfp4a16", "qat-fp8_dynamic", "qat-int8", "qat-w4a16_g64",
  "tensor_current",
)  # fmt: skip
_BUILT = [
  pytest.param(
    name,
    arm,
    marks=[pytest.mark.slow]
    * (name in _LIKE_ANOTHER or (arm or "") in _LIKE_OTHERS or "short-" in (arm or "")),
  )
  for name, arm in CASES
]


@pytest.mark.parametrize("name, arm", [case for case in CASES if case[1] in _LIKE_OTHERS])
def test_an_arm_that_is_built_in_slow_tests_resolves(name, arm, checkout, monkeypatch):
  monkeypatch.chdir(checkout)
  monkeypatch.setattr(tokamax_sm90, "lacks", lambda: None)
  assert _resolve(name, arm).sites()["layers"]


@pytest.mark.parametrize("name, arm", _BUILT)
def test_state_and_step_build_without_allocating(name, arm, checkout, monkeypatch):
  monkeypatch.chdir(checkout)
  monkeypatch.setattr(tokamax_sm90, "lacks", lambda: None)
  before = _bytes_alive()
  spec = _resolve(name, arm)
  if not _is_new_program(spec):
    return
  state = train_step.abstract_state(spec, 1)
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
  params, opt = jax.eval_shape(stored_params.dequantize_tree, (state.params, state.opt))
  counted = sum(x.size for x in jax.tree.leaves(params))
  # Adam's two moments beside every parameter; the rest are scalars.
  assert sum(x.size for x in jax.tree.leaves(opt) if x.ndim) == 2 * counted
  # cuDNN's attention asks for a GPU even when nothing runs.
  spec = dataclasses.replace(spec, run=dataclasses.replace(spec.run, attention="xla"))
  traced = train_step.make_step(spec).trace(state, _abstract_batch(spec), spec.sites())
  after, values = traced.out_info
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
    lambda x: (x.shape, x.dtype), state
  )
  assert values["loss"].shape == ()
  assert _bytes_alive() - before < 1e6


@pytest.mark.parametrize(
  "name, folder",
  [
    ("configs/smollm2_cpt.py", "smollm2-135m"),
    ("configs/cpt_1p5b.py", "Qwen2.5-1.5B"),
    ("configs/cpt_7b.py", "Qwen2.5-7B"),
    ("experiments/2025_infir2/config.py", "smollm2-135m"),
  ],
)
def test_parameters_are_as_many_as_published(name, folder, checkout, monkeypatch):
  monkeypatch.chdir(checkout)
  published = PUBLISHED[folder]
  assert _count_by_formula(published) == PUBLISHED_PARAMETERS[folder]
  state = train_step.abstract_state(_resolve(name))
  # InfiR2 pads the small model's vocabulary.
  padded = {"Qwen2.5-1.5B": 152_064}.get(folder, published["vocab_size"])
  padding = (padded - published["vocab_size"]) * published["hidden_size"]
  counted = sum(x.size for x in jax.tree.leaves(state.params))
  assert counted == PUBLISHED_PARAMETERS[folder] + padding


def test_debug_model_has_as_many_parameters_as_its_header_says(checkout, monkeypatch):
  monkeypatch.chdir(checkout)
  state = train_step.abstract_state(_resolve("configs/debug.py"))
  d, f, heads, kv = 192, 384, 4 * 32, 2 * 32
  layer = 2 * d * heads + 2 * d * kv + 3 * d * f + 2 * d
  counted = sum(x.size for x in jax.tree.leaves(state.params))
  assert counted == 512 * d + 2 * layer + d
  assert f"{counted / 1e6:.1f}M-parameter" in _header("configs/debug.py")["what"]


# InfiR2's CPT scripts and arXiv:2509.22536.
INFIR2 = {
  "steps": 40_000, "global_batch": 128, "seq_len": 32_768, "seed": 1236,
  "optim.schedule": "wsd", "optim.warmup_steps": 5_000, "optim.decay_steps": 5_000,
  "optim.peak_lr": 1e-4, "optim.min_lr": 1e-5,
  "optim.b1": 0.9, "optim.b2": 0.95, "optim.weight_decay": 0.1, "optim.grad_clip_norm": 1.0,
  "precision.rules": [["head", "bf16"], ["layers/.*", "block_128_pow2"]],
  "data.cross_document": True,
}  # fmt: skip
INFIR2_MODEL = {
  "num_layers": 28, "head_dim": 128, "vocab_size": 152_064, "max_positions": 32_768,
  "rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True, "qk_norm": False, "init_std": 0.008,
}  # fmt: skip
INFIR2_SIZES = {
  "configs/cpt_7b.py": {
    "hidden_size": 3584, "intermediate_size": 18944, "num_heads": 28, "num_kv_heads": 4,
    "tie_embeddings": False,
  },
  "configs/cpt_1p5b.py": {
    "hidden_size": 1536, "intermediate_size": 8960, "num_heads": 12, "num_kv_heads": 2,
    "tie_embeddings": True,
  },
}  # fmt: skip


@pytest.mark.parametrize("name", INFIR2_SIZES)
def test_continued_pretraining_holds_infir2_values(name, checkout, monkeypatch):
  monkeypatch.chdir(checkout)
  spec = _resolve(name)
  flat = spec.flat
  assert {key: flat[key] for key in INFIR2} == INFIR2
  model = INFIR2_MODEL | INFIR2_SIZES[name]
  assert {key: getattr(spec.model, key) for key in model} == model
  assert spec.model.rope_scaling.kind == "default"
  # 5,000 steps up, 30,000 at the peak, 5,000 steps of cosine down.
  schedule = schedule_lib.schedule(spec.optim)
  rates = [float(schedule(s)) for s in (0, 2_500, 5_000, 20_000, 35_000, 37_500, 40_000)]
  np.testing.assert_allclose(rates, [0, 5e-5, 1e-4, 1e-4, 1e-4, 5.5e-5, 1e-5], rtol=1e-5)
  sites = site_lib.flatten(spec.sites())
  assert {s.recipe.name for path, s in sites.items() if path != "head"} == {"block_128_pow2"}


def _on(num_gpus: int, c) -> train_spec.TrainSpec:
  """A spec for more devices than there are."""
  return resolve.resolve(
    c, num_gpus, Device("gpu", 90), lambda shape: jax.sharding.AbstractMesh(shape, mesh.AXES)
  )


@pytest.mark.parametrize("name", INFIR2_SIZES)
def test_continued_pretraining_resolves_on_every_mesh_of_its_header(name, checkout, monkeypatch):
  """The same 128 sequences per step, one per GPU at a time."""
  monkeypatch.chdir(checkout)
  rows = re.findall(
    r"(\d+) GPUs: A=(\d+) +E=(\d+) +mesh (\d+) x (\d+)", _header("configs/cpt_7b.py")["meshes"]
  )
  assert [int(row[0]) for row in rows] == [8, 16, 32, 64, 128]
  for gpus, accumulation, evaluated, data, fsdp in (map(int, row) for row in rows):
    c = _config(name)
    if gpus > 8:  # the defaults are those of 8
      with pytest.raises(resolve.ConfigError):
        _on(gpus, c)
      c.grad_accum_steps, c.eval.batch = accumulation, evaluated
    assert (c.grad_accum_steps, c.eval.batch) == (accumulation, evaluated)
    spec = _on(gpus, c)
    assert dict(spec.run.layout.mesh.shape) == {"data": data, "fsdp": fsdp, "tensor": 1}
    assert (c.global_batch, spec.microbatch, spec.tokens_per_device) == (128, gpus, 32_768)
    assert list(evaluator.precisions(spec)) == ["block_128_pow2"]


# Tokens per step, and the peak rate of the header.
ONE_GPU = {
  "configs/cpt_7b_1gpu.py": (8_192, "4.4e-6"),
  "configs/cpt_7b_1gpu_32k.py": (32_768, "8.8e-6"),
  "configs/cpt_1p5b_1gpu.py": (262_144, "2.5e-5"),
}


@pytest.mark.parametrize("name", ONE_GPU)
def test_small_batches_have_rates_of_the_square_root_rule(name):
  tokens, stated = ONE_GPU[name]
  c, full = _config(name), _config("configs/cpt_7b.py")
  assert c.global_batch * c.seq_len == tokens
  share = (full.optim.peak_lr / c.optim.peak_lr) ** 2
  assert share == pytest.approx(full.global_batch * full.seq_len / tokens)
  assert c.optim.min_lr / c.optim.peak_lr == pytest.approx(0.1)
  assert f"{c.optim.peak_lr:.1e}".replace("e-0", "e-") == stated in _header(name)["what"]


@pytest.mark.parametrize("name", [*INFIR2_SIZES, *ONE_GPU])
def test_decay_continues_the_stable_phase_with_warm_up_0(name):
  """Together the arms have the rates of the whole schedule; all else is the same."""
  stem = pathlib.Path(name).stem
  whole, stable, decay = (_config(name, arm) for arm in (None, "stable", "decay"))
  assert (decay.init.workdir, decay.init.step) == (f"runs/{stem}_stable", stable.steps)
  assert (stable.steps, decay.steps, decay.optim.warmup_steps) == (35_000, 40_000, 0)
  rates = [schedule_lib.schedule(resolve.read_optim(c, c.steps)) for c in (whole, stable, decay)]
  for step in (0, 2_500, 5_000, 34_999, 35_000, 37_500, 39_999):
    assert rates[0](step) == rates[1 if step < 35_000 else 2](step), step
  changed = identity.refused_changes(
    identity.diff(identity.flatten(decay), identity.flatten(stable)), ()
  )
  assert sorted(changed) == sorted(decay.checkpoint.accept_changes)


def test_7b_state_fits_the_gpus_that_its_header_names(checkout, monkeypatch):
  """12 bytes of state per parameter over the 4 devices that shard it, on each of 8 GPUs."""
  monkeypatch.chdir(checkout)
  spec = _resolve("configs/cpt_7b.py")
  assert dict(spec.run.layout.mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1}
  assert spec.microbatch == 8 and spec.tokens_per_device == 32_768
  local = sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(train_step.abstract_state(spec))
  )
  assert local == pytest.approx(12 * PUBLISHED_PARAMETERS["Qwen2.5-7B"] / 4, rel=1e-3)


@pytest.mark.parametrize("recipe", library.RECIPES)
def test_arm_of_a_config_is_its_recipe(recipe):
  for name in MODULES:
    if name.startswith("configs/"):
      rules = _config(name, recipe).precision.rules
      assert rules == (("head", "bf16"), ("layers/.*", recipe)), name


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.parent.name)
def test_experiment_arms_run_by_script_and_unknown_ones_refused(path):
  module = MODULES[str(path.relative_to(ROOT))]
  loop = re.search(r"for arm in (.*); do", (path.parent / "run.sh").read_text())
  run = loop[1].split()
  assert set(run) <= set(module.ARMS) and len(run) == len(set(run))
  run_as = [module.get_config(arm).to_dict() for arm in run]
  # every_recipe.py and the sweeps run these of 2025_infir2.
  left_out = [
    a for a in module.ARMS if a not in run and not a.startswith(("short-", "paired-", "scratch-"))
  ]
  assert all(module.get_config(arm).to_dict() in run_as for arm in left_out)
  with pytest.raises(ValueError, match="unknown arm 'block128'; expected one of") as e:
    module.get_config("block128")
  assert all(arm in str(e.value) for arm in module.ARMS)


def test_the_guides_preset_has_the_guides_numbers():
  """Or lies in its ranges, see configs/fp8_guide.py."""
  c = named.load("configs/base.py:guide", {})
  assert (c.optim.on_nonfinite, c.optim.schedule) == ("skip", "cosine")
  assert 1e-5 <= c.optim.min_lr < c.optim.peak_lr <= 5e-4
  assert 0.01 <= c.optim.weight_decay <= 0.02 and 1.0 <= c.optim.grad_clip_norm <= 1.5
  assert c.log.alarms == (
    ("saturation", ">", 0.01), ("underflow", ">", 0.3), ("nonfinite", ">", 0.0)
  )  # fmt: skip
  assert 0 < c.log.tensor_stats_every <= c.checkpoint.every <= 30  # of 60 steps
  text = "; ".join(c.precision.policy)
  for words in (
    "every=2000",
    "alarm='underflow'",
    "alarm='saturation'",
    "to='bf16'",
    "k=3, looks=5",
  ):
    assert text.count(words) == 1, words


@pytest.mark.parametrize("name, rate, recipe", [
  ("configs/debug.py", 3e-4, ""), ("configs/smollm2_cpt.py", 1e-4, "block_128"),
  ("configs/cpt_1p5b.py", None, ""), ("configs/cpt_7b.py", None, "tensor_current"),
  ("configs/sft_smollm2.py", None, ""),
])  # fmt: skip
def test_a_config_takes_the_guides_preset_below_its_own_lines(name, rate, recipe):
  plain, arm = named.load(name, {}), f"guide,{recipe}".rstrip(",")
  c = named.load(f"{name}:{arm}", {})
  assert c.precision.rules[1] == ("layers/.*", recipe or "tensor_delayed(margin=1)")
  assert c.optim.peak_lr == (rate or plain.optim.peak_lr)
  for key in ("warmup_steps", "warmup_fraction"):
    assert c.optim[key] == plain.optim[key]
  assert c.loss_scale.kind == "dynamic" and c.precision.last_bf16 == 1 and len(c.log.alarms) == 3
  of_scales = [] if recipe else ["refresh", "refresh", "widen_margin"]
  kinds = [text.partition("(")[0] for text in c.precision.policy]
  assert kinds == [*of_scales, "switch_recipe", "roll_back"]
  assert c.checkpoint.keep >= 2
  if rate:
    assert len(_resolve(name, arm).precision.policy) == len(kinds)
