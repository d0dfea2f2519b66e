"""Keys are declared once: defaults, bounds, choices and consequences come from the declaration."""

import dataclasses

import pytest

from configs import base
from fp8jax import keys, params
from fp8jax.config import identity, named, registry
from fp8jax.data import config as data_config
from fp8jax.errors import REMOVED, ConfigError, UserError
from fp8jax.evaluation import code_sandbox, tasks
from fp8jax.jobs import table
from fp8jax.keys import EXECUTION, NOTHING, RESULT
from fp8jax.models import config as models_config
from fp8jax.phases import policy
from fp8jax.recipe import quant
from fp8jax.run import restore
from fp8jax.sweeps import spec as sweep_spec

BOUNDED = {k.name: k for k in registry.KEYS.values() if k.least is not None}
CHOSEN = {k.name: k for k in registry.KEYS.values() if k.choices is not None}


def _changed(name, value):
  c = base.get_config()
  c.update_from_flattened_dict({name: value})
  return registry.problems(c)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_number_below_its_least_is_refused_and_the_least_is_not(name):
  one = BOUNDED[name]
  below = type(one.default)(one.least - 1)
  assert _changed(name, below) == [f"{name}={below} must be at least {one.least}"]
  assert _changed(name, type(one.default)(one.least)) == []


@pytest.mark.parametrize("name", CHOSEN)
def test_a_name_that_is_no_choice_is_refused_and_every_choice_is_not(name):
  one = CHOSEN[name]
  assert one.default in one.choices
  (problem,) = _changed(name, "zzz")
  assert problem.startswith(f"{name}='zzz' is not one of {one.choices[0]!r}")
  assert all(_changed(name, choice) == [] for choice in one.choices)


# Key by key what its declaration says beside its default (tests/golden/configs.json) and meaning.
LEAST_2 = "rl.samples"
LEAST_1 = """steps global_batch grad_accum_steps seq_len memory.loss_chunk eval.batch
  checkpoint.keep log.every export.gate_tokens quantize.tokens calibrate.batches noise.tokens
  prepare.shard_tokens generate.slots rl.prompts rl.updates_per_rollout rl.max_new_tokens
  generate.num_samples mesh.collectives_in_flight"""
LEAST_0 = """precision.first_bf16 precision.last_bf16 memory.gpu_fraction data.shuffle_windows
  data.workers data.prefetch data.samples_per_step data.epochs optim.warmup_fraction
  optim.base_width distill.weight eval.tokens eval.every eval.questions checkpoint.every
  log.tensor_stats_every export.fold_smooth_batches search.beta search.delay search.entropy
  prepare.processes generate.max_length plan_inference.reserve rl.questions
  rl.most_correction rl.max_resampling rl.overlong mesh.spare_multiprocessors"""
ANY_TEXT = """init.hf init.adapters init.workdir model.preset model.lora.base
  precision.sensitivity
  precision.calibration data.tokenizer data.eos data.on_long data.chat_template data.template_date
  weights.hf eval.tasks eval.data_dir eval.train_data eval.compare_with export.input_scales
  export.gate_text export.client_python export.push_to noise.text generate.prompts generate.out
  optim.moment_format distill.teacher quantize.text rl.tasks rl.reference rl.reward rl.rollout
  rl.pairs rl.eval_pairs rl.reward_model"""
IN_ANOTHER_WAY = """init.hf init.adapters init.workdir init.step init.weights_only init.requantize
  kernels.optimizer kernels.matmul kernels.attention memory.gpu_fraction memory.remat_policy
  memory.save_gemm_inputs memory.weight_operands memory.loss_chunk optim.in_backward
  optim.on_nonfinite data.bos
  data.workers data.prefetch mesh.data mesh.fsdp mesh.tensor mesh.collectives_in_flight
  mesh.spare_multiprocessors sharding.weights sharding.acts"""
NO_TRAINING = ("weights", "eval", "checkpoint", "log", "export", "quantize", "calibrate",
               "sensitivity", "search", "noise", "prepare", "generate", "plan_inference",
               "precision.verify_fp8_gemms")  # fmt: skip
NOT_MAPPED = """init.hf init.adapters init.workdir init.step init.weights_only init.requantize
  init.untie
  model.lora.rank model.lora.alpha model.lora.targets model.lora.base precision.sensitivity
  precision.invariant precision.schedule precision.policy precision.calibration
  memory.gpu_fraction model.reward_head
  data.chat_template data.template_date data.samples_per_step data.epochs data.on_untrained
  optim.moment_format distill.weight distill.temperature distill.teacher optim.master_format
  optim.grad_format optim.grad_wire optim.in_backward loss_scale.kind eval.every checkpoint.every
  checkpoint.keep checkpoint.accept_changes log.tracker log.profile log.tensor_stats_every
  log.param_stats log.source_loss
  log.alarms """ + " ".join(k for k in registry.KEYS if k.startswith("rl."))


def test_bounds_choices_and_consequences_are_those_of_the_table():
  ours = registry.KEYS.values()
  for least, names in ((2, LEAST_2), (1, LEAST_1), (0, LEAST_0)):
    assert {k.name for k in ours if k.least == least} == set(names.split())
  assert BOUNDED.keys() == set(f"{LEAST_2} {LEAST_1} {LEAST_0}".split())
  free = {k.name for k in ours if k.type is str and k.choices is None}
  assert free == set(ANY_TEXT.split())
  for one in ours:
    is_without = one.name in NO_TRAINING or one.name.split(".")[0] in NO_TRAINING
    is_execution = one.name in IN_ANOTHER_WAY.split()
    wanted = NOTHING if is_without else EXECUTION if is_execution else RESULT
    assert one.affects is wanted, one.name
    assert one.is_mapped == (one.name not in NOT_MAPPED.split()), one.name
    assert one.is_optional == (one.type is not str and one.default is None), one.name
  assert [k.name for k in ours if k.is_open] == [
    "data.sources",
    "sharding.weights",
    "sharding.acts",
  ]


def test_every_key_has_a_meaning_and_a_default_of_its_type():
  assert registry.problems(base.get_config()) == []
  for one in registry.KEYS.values():
    assert one.meaning and one.meaning == " ".join(one.meaning.split()), one.name
    is_none = one.default is None and one.is_optional
    assert is_none or type(one.default) is one.type, one.name


def test_consequences_are_those_of_the_name_or_of_the_open_key_above_it():
  expected = {
    "seed": RESULT, "optim.peak_lr": RESULT, "memory.save_gate_up": RESULT, "data": RESULT,
    "model.architecture": RESULT, "data.sources.main.path": RESULT, "mesh.fsdp": EXECUTION,
    "sharding.weights.D": EXECUTION, "memory.remat_policy": EXECUTION, "init.hf": EXECUTION,
    "data.workers": EXECUTION, "log.every": NOTHING, "precision.verify_fp8_gemms": NOTHING,
    "eval.tokens": NOTHING, "generate.seed": NOTHING, "sensitivity.tokens": NOTHING,
  }  # fmt: skip
  assert {name: registry.affects(name) for name in expected} == expected


def test_a_base_configuration_is_new_every_time_and_takes_no_other_key():
  one, other = base.get_config(), base.get_config()
  one.sharding.weights.D = "tensor"
  one.data.sources.code = base.source()
  assert identity.flatten(other) == identity.flatten(base.get_config())
  with pytest.raises(AttributeError):
    one.optim.peak_lrr = 1.0
  with pytest.raises(TypeError):
    one.optim.peak_lr = "high"
  one.model.num_layers = 3  # None until it is set
  with pytest.raises(TypeError):
    one.model.num_layers = "three"


def test_a_section_reads_lists_as_tuples_and_knows_bounds_without_a_configuration():
  @keys.section("toy", EXECUTION)
  class Toy:
    """A section."""

    size: int = keys.key(3, "a size", least=2)
    rules: tuple = keys.key((), "pairs", affects=RESULT)
    found: int = 0

  toy = keys.read(Toy, {"size": 5, "rules": [["a", 1]], "other": 1}, found=7)
  assert (toy.size, toy.rules, toy.found) == (5, (("a", 1),), 7)
  assert [(k.name, k.affects) for k in Toy.KEYS] == [("toy.size", EXECUTION), ("toy.rules", RESULT)]
  assert keys.problems(Toy, {"size": 1, "rules": ()}) == ["toy.size=1 must be at least 2"]


def test_explain_of_an_unknown_key_names_the_nearest():
  with pytest.raises(UserError, match="did you mean optim.weight_decay"):
    registry.explain("optim.weight_decy")


def test_a_removed_key_names_its_successor_wherever_it_is_written(tmp_path):
  assert not REMOVED.keys() & registry.KEYS.keys()
  for key, (hint, _) in REMOVED.items():
    with pytest.raises(UserError, match=f"'{key}' is no key of the configuration; {hint[:20]}"):
      registry.explain(key)
  path = tmp_path / "c.py"
  path.write_text(
    "from configs import base\n\ndef get_config(arm=''):\n  c = base.get_config()\n"
    "  c.export.path = 'x'\n  return c\n"
  )
  with pytest.raises(UserError, match="line 5: export.path is no key; name the folder as --out"):
    named.load(str(path), {})
  with pytest.raises(UserError, match="'eval.hf' is no key; it is weights.hf now"):
    named.load("configs/debug.py", {"eval.hf": "x"})


def test_a_run_of_before_goes_on_where_its_removed_keys_had_the_values_of_now():
  now = identity.flatten(base.get_config())
  of_before = {"loss_scale.start": 256.0, "loss_scale.growth_interval": 2000, "eval.hf": "x"}
  assert identity.diff(now, now | of_before) == {}
  assert identity.without_removed(now | of_before) == now
  changes = identity.diff(now, now | of_before | {"loss_scale.start": 128.0})
  assert changes == {"loss_scale.start": (128.0, None)}
  with pytest.raises(ConfigError) as e:
    restore.check_same_run(changes, {"data_fingerprint": "", "readers": {}}, 7, "", {}, ())
  assert "loss_scale.start was 128.0 at step 7, and is no key now: every run starts" in str(e.value)


# The key whose folder says what the model is, whether its tokenizer counts, whether it generates
# without and with eval.tasks, has_steps, has_calibration, and the option.
NEEDS = {
  "train": ("init.hf", False, (False, False), True, True, ""),
  "evaluate": ("weights.hf", False, (False, True), False, True, ""),
  "generate": ("weights.hf", True, (True, True), False, True, ""),
  "export": ("weights.hf", False, (False, False), False, False, "out"),
  "quantize": ("weights.hf", False, (False, False), False, False, "out"),
  "sensitivity": ("weights.hf", False, (False, False), False, True, "out"),
  "search": ("init.hf", False, (False, False), True, False, ""),
  "rl": ("init.hf", False, (False, False), True, True, ""),
  "noise": ("weights.hf", False, (False, False), False, True, "out"),
  "calibrate": ("weights.hf", False, (False, False), False, False, "out"),
  "diagnose": ("init.hf", False, (False, False), False, False, ""),
  "memory": ("init.hf", False, (False, False), False, False, "topology"),
  "plan_inference": ("init.hf", False, (True, True), False, False, "topology"),
  "prepare": ("init.hf", False, (False, False), False, False, "out"),
  "preview": ("init.hf", False, (False, False), True, True, ""),
}


def test_jobs_read_the_model_and_text_that_the_table_says():
  assert table.JOBS.keys() == NEEDS.keys()
  c = base.get_config()
  c.weights.hf, c.data.tokenizer, c.data.eos = "weights", "own", "</s>"
  of_tasks = base.get_config()
  of_tasks.eval.tasks = "tasks.py"
  for name, (key, has_text, served, *facts) in NEEDS.items():
    needs, option = table.JOBS[name].needs, table.JOBS[name].option
    assert needs.folder(c) == {"init.hf": ("", "init.hf"), "weights.hf": ("weights", key)}[key]
    assert needs.folder(of_tasks) == ("", "init.hf"), name
    assert needs.tokenizer(c) == (("", "") if has_text else ("own", "</s>")), name
    assert tuple(bool(needs.is_served(x)) for x in (c, of_tasks)) == served, name
    assert needs.is_on_one_device(c) == (name in ("quantize", "sensitivity", "search")), name
    assert [needs.has_steps, needs.has_calibration, option] == facts, name


# Of what users call or write down, the numbers and switches that they leave out: those of the
# cited papers and files (transformers' rope, Transformer Engine's history), or ours.
LEFT_OUT = {
  policy.Refresh: dict(worse_by=0.02, patience=1, every=0),
  policy.WidenMargin: dict(worse_by=0.02, patience=1, k=1, looks=1, by=1, most=3),
  policy.SwitchRecipe: dict(worse_by=0.02, patience=1, k=3, looks=5, back_after=0, most=2),
  policy.RollBack: dict(worse_by=0.02, patience=1, z=6.0, window=32, skip=2, most=3),
  policy.LowerRate: dict(factor=0.5, patience=3, rtol=1e-4, atol=0.0, cooldown=0, min_scale=0.0),
  data_config.DataConfig: dict(
    heldout=0.1, cross_document=False, seed=0, workers=0, prefetch=2, shuffle_windows=0,
    tells_sources=False,
  ),
  tasks.Protocol: dict(samples=1, temperature=0.0, top_p=1.0, max_new_tokens=256),
  tasks.Task: dict(chat=False, margin=2.0),
  code_sandbox.Limits: dict(
    seconds=6.0, memory=4 * 2**30, output=16 * 2**20, files=64 * 2**20, processes=64
  ),
  models_config.ModelConfig: dict(
    rope_theta=1e4, norm_eps=1e-6, qkv_bias=False, qk_norm=False, tie_embeddings=False,
    init_std=0.02, residual_tau=0.0, reward_head=False,
  ),
  models_config.RopeScaling: dict(
    factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0, beta_fast=32.0, beta_slow=1.0
  ),
  models_config.ComputeConfig: dict(
    loss_chunk=512, num_sources=0, temperature=1.0, is_invariant=False, row_tile=0
  ),
  params.Param: dict(std=0.02, decay=True, trainable=True),
  quant.Delayed: dict(steps=1024, margin=0),
  quant.Static: dict(margin=0),
  quant.Hadamard: dict(size=16),
  quant.Quant: dict(keeps_nonzero=False, is_joint=False),
  sweep_spec.Optuna: dict(seed=0),
  sweep_spec.Random: dict(seed=0),
  sweep_spec.Sweep: dict(stop_above=1.0),
  sweep_spec.Trial: dict(seed=0),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT_OUT, ids=lambda kind: kind.__name__)
def test_numbers_that_are_left_out_are_those_of_the_table(kind):
  ours = {one.name: one.default for one in dataclasses.fields(kind)}
  assert {k: v for k, v in ours.items() if isinstance(v, (bool, int, float))} == LEFT_OUT[kind]
