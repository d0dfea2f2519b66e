"""Trials trained at once are the trials trained one by one."""

import dataclasses
import json
import pathlib
import re

import jax
import numpy as np
import pytest
from harness import Runner

from fp8jax import keys
from fp8jax.config import identity, registry
from fp8jax.data import loader
from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import train
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site_tree
from fp8jax.report import files
from fp8jax.run import metrics_writer, workdir
from fp8jax.step import train_step
from fp8jax.sweeps import file, outcome, spec, stacked
from fp8jax.sweeps import run as sweep_run

CONFIG = """
from configs import base

def get_config(arm=""):
  c = base.get_config(arm)
  c.model.update(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=1, num_kv_heads=1,
                 head_dim=32, vocab_size=320)
  c.update_from_flattened_dict({
    "steps": 4, "mesh.fsdp": 1, "global_batch": 2, "seq_len": 32, "eval.tokens": 64,
    "eval.batch": 2,
    "optim.warmup_steps": 1, "optim.decay_steps": 1, "memory.loss_chunk": 32,
    "log.tensorboard": False, "log.report": False, "data.shuffle_windows": 0,
  })
  return c
"""
# Rates far apart, so that the trials' tensors soon have other ranges.
BASE = identity.flatten(registry.base())
SWEEP = dict(axes=(spec.Grid({"optim.peak_lr": (1e-3, 3e-1)}),), seeds=(0, 1))


def _trials(tmp_path, arm, **more):
  (tmp_path / "c.py").write_text(CONFIG)
  sweep = spec.Sweep(str(tmp_path / "c.py"), arms=(arm,), **{**SWEEP, **more})
  return sweep, sweep.trials(str(tmp_path / "out"))


# A state and random bits, in one program; `test_trials_at_once_are_those_of_separate_runs`: others.
MIXED = (
  ("layers/.*/mlp/down", "nvfp4_sr_rht"),
  ("layers/.*/mlp/up", "tensor_delayed"),
  (".*", "bf16"),
)


def test_scales_and_random_bits_are_those_of_separate_runs(tmp_path):
  """Every trial starts with its own scales, to the bit, and draws with its own key, in each of two
  microbatches."""
  fixed = {"precision.rules": MIXED, "eval.tokens": 0, "precision.verify_fp8_gemms": False,
           "grad_accum_steps": 2}  # fmt: skip
  schedules = ({"optim.warmup_steps": 1}, {"optim.warmup_steps": 2, "optim.schedule": "cosine"})
  axes = (spec.Grid({"optim.peak_lr": (1e-2,)}), spec.Points(schedules))
  _, trials = _trials(tmp_path, "bf16", fixed=fixed, axes=axes)
  trials = [trials[0], trials[3]]  # of other seeds, too
  (members,) = stacked.groups(trials)
  starts, take = [], stacked.mapped_step

  def watched(members):
    step = take(members)

    def one(state, batch):
      starts.append(jax.device_get(state.scaling_states))
      return step(state, batch)

    return one

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(stacked, "mapped_step", watched)
    stacked.run(members, 1e9, print)
  runner, calibrate = Runner(members[0].spec), None
  for i, member in enumerate(members):
    # One program for both: the seed is an argument.
    stream = loader.train_batches(member.spec.data, 2)
    hosts = [next(stream) for _ in range(4)]
    stream.close()
    calibrate = calibrate or train_step.make_calibration(member.spec, 0)
    state = calibrate(train_step.make_state(member.spec), runner.spread.place(hosts[0]))
    for ours, single in zip(jax.tree.leaves(starts[0]), jax.tree.leaves(state.scaling_states)):
      np.testing.assert_array_equal(ours[i], single)
    own = train_step.make_step(member.spec)
    runner.step_fn = dataclasses.replace(runner.step_fn, key=own.key, rate_of=own.rate_of)
    losses, _ = runner.run(hosts, state)
    found = files.read(member.trial.workdir).curves["loss"].values
    np.testing.assert_allclose(found, losses, rtol=2e-6)
  # Amaxes of later batches, and of other weights: each trial has a history of its own.
  assert len(starts) == 4 and len(jax.tree.leaves(starts[0])) > 0
  for first, last in zip(jax.tree.leaves(starts[0]), jax.tree.leaves(starts[3])):
    assert not np.array_equal(first[0], first[1]) and not np.array_equal(first, last)


# Sums of products in the compute dtype have another order in a batch of trials. At a rate of 0.3,
# four steps make of it 1e-5 in the loss of bf16 and 3e-6 in mxfp4a16's; the first two are equal. On
# another CPU the weights after them differ by 8e-5 of the held-out loss with delayed scales.
_GENTLE = (spec.Grid({"optim.peak_lr": (1e-3, 1e-2)}),)


@pytest.mark.slow  # two programs per seed and rate
@pytest.mark.parametrize(
  "arm, more",
  [
    ("tensor_current", {}), ("tensor_delayed", {"axes": _GENTLE}), ("fp8lm", {"axes": _GENTLE}),
    ("nvfp4_sr_rht", {}), ("mxfp4a16", {"axes": _GENTLE}),
  ],
)  # fmt: skip
def test_trials_at_once_are_those_of_separate_runs(tmp_path, monkeypatch, arm, more):
  """Losses, parameters' norm and held-out losses, with scales and random bits of its own trial."""
  sweep, trials = _trials(tmp_path, arm, **more)
  monkeypatch.setattr(file, "load", lambda *_, **needs: sweep)
  arguments = ("s.py", ".", str(tmp_path / "out"), 0, "", False, True)
  assert sweep_run.run(*arguments) == 0
  table = json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"]
  (members,) = stacked.groups(trials)
  for member, row in zip(members, table, strict=True):
    trained, found = member.spec, files.read(row["workdir"])
    stream = loader.train_batches(trained.data, 2)
    hosts, runner = [next(stream) for _ in range(4)], Runner(trained)
    stream.close()
    first = runner.spread.place(hosts[0])
    begun = train_step.calibrate(trained, train_step.make_state(trained), first, 0)
    losses, state = runner.run(hosts, begun)
    np.testing.assert_allclose(found.curves["loss"].values, losses, rtol=2e-6)
    assert outcome.read(member.trial).objective == row["objective"] == found.summary["objective"]
    evaluated = stacked.evaluator_lib.Evaluator(trained).run(state.params, state.scaling_states)
    for precision, values in evaluated["main"].items():
      assert found.evaluation(-1)["main"][precision] == pytest.approx(values["loss"], rel=2e-6)
  assert len({row["objective"] for row in table}) == 4
  # A second call trains nothing.
  monkeypatch.setattr(stacked, "run", lambda *_: pytest.fail("all are finished"))
  assert sweep_run.run(*arguments) == 0


@pytest.mark.slow  # three times 40 steps per seed
@pytest.mark.parametrize("arm", ["tensor_current", "tensor_delayed", "nvfp4_sr_rht"])
def test_trials_at_once_end_as_near_as_runs_one_ulp_apart(tmp_path, arm):
  """Sums of a batch of trials have another order, which FP8 amplifies no more than an ulp of the
  weights: root mean squares over six seeds, whose ratio exceeds 4 once in 500."""
  fixed = {"steps": 40, "eval.tokens": 0, "precision.verify_fp8_gemms": False}
  axes = (spec.Grid({"optim.peak_lr": (2e-3,)}),)
  _, trials = _trials(tmp_path, arm, fixed=fixed, axes=axes, seeds=tuple(range(6)))
  (members,) = stacked.groups(trials)
  stacked.run(members, 1e9, print)
  runner, calibrate = Runner(members[0].spec), train_step.make_calibration(members[0].spec, 0)
  ends = {"at once": [], "alone": [], "an ulp away": []}
  for member in members:
    own = member.spec
    runner.step_fn = dataclasses.replace(runner.step_fn, key=train_step.make_step(own).key)
    stream = loader.train_batches(own.data, 2)
    hosts = [next(stream) for _ in range(40)]
    stream.close()
    ends["at once"].append(files.read(member.trial.workdir).curves["loss"].values)
    for name, nudge in (("alone", False), ("an ulp away", True)):
      begun = dataclasses.replace(own, init=dataclasses.replace(own.init, nudge=nudge))
      state = calibrate(train_step.make_state(begun), runner.spread.place(hosts[0]))
      ends[name].append(runner.run(hosts, state)[0])
  ends = {name: np.mean(np.array(losses)[:, -10:], 1) for name, losses in ends.items()}
  rms = lambda name: np.sqrt(np.mean((ends[name] - ends["alone"]) ** 2))  # noqa: E731
  assert 0 < rms("an ulp away") < np.std(ends["alone"]) / 10  # the seeds are farther apart
  assert rms("at once") < 4 * rms("an ulp away")


def test_a_trial_that_is_not_finite_halts_alone(tmp_path):
  _, trials = _trials(tmp_path, "bf16", fixed={"eval.tokens": 0})
  (members,) = stacked.groups(trials)
  take = stacked.train_step.make_state

  def broken(trained):
    state = take(trained)
    if trained.seed == 1 and trained.optim.peak_lr < 0.1:
      state = jax.tree.map(lambda x: x * np.nan if x.dtype == np.float32 else x, state)
    return state

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(stacked.train_step, "make_state", broken)
    found = stacked.run(members, 1e9, print)
  assert [o.status for _, o in found] == ["finished", "diverged", "finished", "finished"]
  assert outcome.read(trials[1]).status == "diverged"


def test_trials_share_a_program_where_their_decay_has_one_schedule(tmp_path):
  """A decay by the schedule is rate / peak_lr, of which a program has one."""
  # A rate of 0 decays nothing.
  axes = (spec.Grid({"optim.peak_lr": (0.0, 1e-3, 3e-1), "optim.warmup_steps": (1, 2)}),)
  for how, least, count in (("rate", 0.0, 1), ("schedule", 0.0, 4)):
    fixed = {"optim.decay_by": how, "optim.min_lr": least}
    _, trials = _trials(tmp_path, "bf16", fixed=fixed, axes=axes)
    assert len(stacked.groups(trials)) == count


# Why a mapped sweep honours a key, or a section.
HONOURED = {
  "trials differ in them": """seed optim.peak_lr optim.min_lr optim.schedule optim.warmup_steps
    optim.warmup_fraction optim.decay_steps""",
  "the step of a single run reads them, and is the one that is mapped": """
    steps global_batch grad_accum_steps seq_len
    model.preset model.num_layers model.hidden_size model.intermediate_size model.num_heads
    model.num_kv_heads model.head_dim model.vocab_size model.max_positions model.rope_theta
    model.tie_embeddings model.init_std model.residual_tau model.unit_scaling model.mixers
    precision.rules precision.first_bf16 precision.last_bf16 precision.smooth_swiglu
    precision.attention precision.compute_dtype kernels.matmul kernels.attention kernels.optimizer
    memory.remat_policy memory.save_gemm_inputs memory.save_norm_inputs memory.save_gate_up
    memory.save_layer_inputs memory.weight_operands memory.loss_chunk
    optim.optimizer optim.b1 optim.b2 optim.eps optim.weight_decay optim.grad_clip_norm
    optim.clip_groups optim.lr_multipliers optim.base_width optim.decay_by optim.on_nonfinite
    optim.sparsity""",
  "the step of every trial alone is inspected": "precision.verify_fp8_gemms",
  "the loader reads them": """
    data.tokenizer data.eos data.bos data.sources data.heldout_fraction data.cross_document
    data.on_malformed data.on_long data.shuffle_windows data.workers data.prefetch""",
  "the state of a trial is the state of a run": "init.nudge",
  "the evaluator reads them": "eval.tokens eval.batch eval.precisions",
  "a layout of several devices is refused": "mesh sharding",
  "the files of a trial are those of a run": "log.every log.tensorboard log.report",
  "other jobs read them, training does not": """
    calibrate export generate noise plan_inference prepare quantize search sensitivity weights
    eval.tasks eval.chat
    eval.questions eval.seed eval.data_dir
    eval.train_data eval.allow_code_execution eval.compare_with""",
}


def test_every_key_is_honoured_for_a_reason_or_must_have_its_default(tmp_path):
  """Also the keys that somebody declares tomorrow: none is honoured unless it says so."""
  _, trials = _trials(tmp_path, "bf16", seeds=(0,), axes=())
  ((member,),) = stacked.groups(trials)
  plain = dataclasses.replace(member.spec, flat=BASE)
  assert stacked.reasons(plain) == []
  named = " ".join(HONOURED.values()).split()
  assert all(any(f"{key}.".startswith(f"{n}.") for key in registry.KEYS) for n in named)
  for key, value in {**BASE, "optim.new_key": 0}.items():
    is_named = any(f"{key}.".startswith(f"{name}.") for name in named)
    changed = dataclasses.replace(plain, flat={**BASE, key: _other(value)})
    reasons = stacked.reasons(changed)
    assert reasons == [] if is_named else len(reasons) == 1 and reasons[0].startswith(f"{key}="), (
      key
    )
  assert not keys.section("x")(type("X", (), {"__annotations__": {"a": int}, "a": keys.key(0, "")})
                              ).KEYS[0].is_mapped  # fmt: skip


def _other(value):
  """A value of the same kind that differs."""
  if isinstance(value, bool) or value is None:
    return not value
  if isinstance(value, (int, float)):
    return value + 1
  return f"{value}x" if isinstance(value, str) else [*value, "x"]


@pytest.mark.slow
def test_a_trial_leaves_the_files_of_a_run(tmp_path):
  """Its summary, description and metrics have the keys of a direct run, and the same values."""
  rows = [json.dumps({"text": f"{i} words"}) + "\n{broken\n" for i in range(60)]
  (tmp_path / "text.jsonl").write_text("".join(rows))
  fixed = {
    "data.sources.main.kind": "jsonl", "data.sources.main.path": str(tmp_path / "text.jsonl"),
    "data.on_malformed": "skip", "log.every": 2, "eval.precisions": ("bf16",),
    "precision.verify_fp8_gemms": False,
  }  # fmt: skip
  _, trials = _trials(tmp_path, "tensor_current", fixed=fixed, seeds=(3,), axes=())
  ((member,),) = stacked.groups(trials)
  direct, mapped = tmp_path / "direct", tmp_path / "out" / "tensor_current"
  train.run(member.spec, str(direct), BASE)
  ((_, ended),) = stacked.run([member], 1e9, print)
  one, other = (json.loads((d / "summary.json").read_text()) for d in (direct, mapped))
  assert one.keys() == other.keys() and ended.objective == other["objective"]
  for key in ("step", "tokens", "skipped_updates", "fp8_flops_share",
              "fp8_gemm_bytes_share"):  # fmt: skip
    assert one[key] == other[key], key
  assert one["fp8_flops_share"] > 0
  # Readers run ahead of the steps, now further, now less.
  assert min(s["documents_passed_over"]["malformed"] for s in (one, other)) > 3
  assert one["seconds"].keys() == other["seconds"].keys() and 0 < other["goodput"] < 1
  assert other["seconds"]["compile"] > 0 and other["seconds"]["evaluation"] > 0
  for key in ("train_loss", "objective"):
    assert one[key] == pytest.approx(other[key], rel=2e-6)
  for name in ("config.json", "sites.json"):
    assert json.loads((direct / name).read_text()) == json.loads((mapped / name).read_text())
  origins = [json.loads((d / "provenance.json").read_text()) for d in (direct, mapped)]
  assert origins[1].keys() - origins[0].keys() == {"trials_at_once"}
  assert origins[0].keys() <= origins[1].keys() and origins[1]["trials_at_once"] == 1
  speeds = {"tokens_per_second", "step_seconds"}  # of a loop that reads a step behind
  first, second = (
    {key for _, row in metrics_writer.rows(str(d / "metrics.jsonl")) for key in row}
    for d in (direct, mapped)
  )
  assert first - second <= speeds and second <= first
  assert workdir.finished(str(mapped), dict(member.spec.flat), origins[0]["data_fingerprint"])


def test_two_sweeps_do_not_train_one_trial(tmp_path):
  _, trials = _trials(tmp_path, "bf16")
  (members,) = stacked.groups(trials)
  with workdir.locked(trials[2].workdir), pytest.raises(UserError, match="in use by another run"):
    stacked.run(members, 1e9, print)


def test_first_batches_without_gradients_are_refused(tmp_path, monkeypatch):
  """A scale of zeros would be 1 for all trials and steps; a run of its own awaits a later batch."""

  _, trials = _trials(tmp_path, "tensor_delayed", fixed={"eval.tokens": 0})
  (members,) = stacked.groups(trials)
  sites = members[0].spec.sites()
  zeros = site_tree.by_name(sites, site_tree.taps(sites))
  states = scaling_lib.calibrated(sites, zeros)
  calibrate = lambda state, batch: dataclasses.replace(state, scaling_states=states)  # noqa: E731
  monkeypatch.setattr(stacked.train_step, "make_calibration", lambda *_: calibrate)
  ends = [pathlib.Path(t.workdir, f"{n}.json") for t in trials for n in ("summary", "trial")]
  for path in ends:  # of another configuration
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
  with pytest.raises(UserError, match="its first batch has amaxes that are 0.*leave --vmap out"):
    stacked.run(members, 1e9, print)
  assert not any(path.exists() for path in ends)  # the trials are no longer over


_NEEDS_OWN = "needs a run of its own; set {}, or leave --vmap out"


@pytest.mark.parametrize("arm, fixed, count, patterns", [
  ("bf16", {"precision.policy": ("roll_back()",), "log.profile": (10, 2), "checkpoint.every": 2}, 3,
   ["precision.policy=.*" + _NEEDS_OWN.format(r"\[\]") + "$",
    "log.profile=.*" + _NEEDS_OWN.format(r"\[10, 0\]") + "$"]),
  ("tensor_delayed", {"optim.moment_format": "coat", "log.tensor_stats_every": 2}, 2,
   ["optim.moment_format='coat'", "log.tensor_stats_every=2"]),
])  # fmt: skip
def test_trials_that_need_a_run_of_their_own_are_refused_with_all_reasons(
  tmp_path, arm, fixed, count, patterns
):
  _, trials = _trials(tmp_path, arm, fixed=fixed)
  with pytest.raises(ConfigError) as e:
    stacked.groups(trials)
  assert len(e.value.problems) == count
  for pattern in patterns:
    assert sum(bool(re.search(pattern, p)) for p in e.value.problems) == 1, pattern


def test_a_group_holds_as_many_trials_as_are_trained_at_once(tmp_path):
  _, trials = _trials(tmp_path, "bf16")
  assert [len(g) for g in stacked.groups(trials, 3)] == [3, 1]
