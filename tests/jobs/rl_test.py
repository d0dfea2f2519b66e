"""--job=rl: what a step learns from, resuming within a rollout, and what is refused."""

import dataclasses
import functools
import json
import re
import types

import chats
import harness
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from fp8jax.config import named
from fp8jax.errors import ConfigError, UserError
from fp8jax.generation import api
from fp8jax.generation.stoppable import AskedToStop
from fp8jax.jobs import calibrate, diagnose, rl, start, train
from fp8jax.ops import scaling, site_tree
from fp8jax.ops import site as site_lib
from fp8jax.ops.policy_gradient import OBJECTIVES
from fp8jax.run import nonfinite, preemption

REWARD = "def third(item, output):\n  return len(output.encode()) % 3 + int(item.answer)\n"
RL = {
  "rl.max_new_tokens": 5, "rl.prompts": 4, "rl.samples": 2, "rl.updates_per_rollout": 2,
  "rl.temperature": 0.8, "grad_accum_steps": 2, "memory.remat_policy": "full",
  "global_batch": 4, "seq_len": 32, "generate.max_length": 32, "generate.slots": 8,
  "optim.peak_lr": 0.01, "steps": 4, "eval.tokens": 0, "log.tensor_stats_every": 0, "rl.kl": 0.0,
}  # fmt: skip


@pytest.fixture
def questions(tmp_path):
  """rl.tasks and rl.reward, and questions that are held out, the first of which training has."""
  (tmp_path / "rewards.py").write_text(REWARD)

  def write(name, numbers):
    rows = [{"question": f"say {n}:", "answer": str(n), "verifier": "regex"} for n in numbers]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)

  return {
    "rl.tasks": write("learned", range(9)), "rl.reward": f"{tmp_path}/rewards.py:third",
    "eval.tasks": f"{write('asked', (0, 77))}(max_new_tokens=3)",
  }  # fmt: skip


def run(workdir, questions, recipe="bf16", **changes):
  return rl.run(
    harness.text_spec(recipe, job="rl", **RL | questions | changes), str(workdir)
  )  # fmt: skip


def rows(workdir, names=("loss", "rl/", "accuracy")):
  """Everything of metrics.jsonl that no clock decides."""
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return {
    row["step"]: {
      k: v for k, v in row.items() if k.startswith(names) and not k.endswith("per_second")
    }
    for row in lines if "loss" in row
  }  # fmt: skip


def parts(workdir, cycle):
  with np.load(workdir / "rollouts" / f"{cycle:06d}.npz") as stored:
    return [
      {k[2:-3]: stored[k].astype(np.float64) for k in stored.files if k.startswith(f"{n}/")}
      for n in range(2)
    ]


STOPS = tuple(map(chr, range(32, 80)))  # texts, of a fifth of the tokens


# Stops: in the first evaluation, within a rollout's updates, while a rollout is drawn; and the end.
@pytest.mark.parametrize(
  "stops", [(1, 5), pytest.param((0, 1, 2, 5), marks=pytest.mark.slow)], ids=str
)
def test_a_step_learns_from_its_part_and_a_run_goes_on_within_a_rollout(
  tmp_path, questions, monkeypatch, stops
):
  questions |= {"generate.stop": STOPS}
  summary = run(tmp_path / "whole", questions)
  assert set(summary["accuracies"]) == {"0", "4"} and summary["seconds"]["rollout"] > 0
  found = rows(tmp_path / "whole")
  for cycle in range(2):
    texts = [
      json.loads(line)
      for line in (tmp_path / f"whole/rollouts/{cycle:06d}.jsonl").read_text().splitlines()
    ]
    drawn = [c for t in texts for c in t["completions"]]
    assert "stop" in {c["finish_reason"] for c in drawn}
    assert not any(set(c["text"]) & set(STOPS) for c in drawn)
    bonus = [int(t["answer"]) for t in texts]
    assert 0 not in bonus and 77 not in bonus  # asked at evaluations
    rewards = np.array([[c["reward"] for c in t["completions"]] for t in texts])
    lengths = [[len(c["text"].encode()) for c in t["completions"]] for t in texts]
    np.testing.assert_array_equal(rewards, np.array(lengths) % 3 + np.array(bonus)[:, None])
    assert found[2 * cycle + 1]["rl/reward"] == pytest.approx(rewards.mean(), rel=1e-6)
    assert "rl/reward" not in found[2 * cycle + 2]
    part = parts(tmp_path / "whole", cycle)[0]
    # The policy that drew is the one that learns: the ratio is 1.
    loss = -(part["weights"] * part["advantages"]).sum()
    assert found[2 * cycle + 1]["loss"] == pytest.approx(loss, abs=1e-6)
    assert found[2 * cycle + 1]["rl/kl_to_old"] < 1e-9
    assert found[2 * cycle + 1]["rl/mismatch"] < 1e-5  # float32, other shapes
    drawn = part["weights"] > 0
    gaps = np.abs(part["old"] - part["rollout"])[drawn]
    assert found[2 * cycle + 1]["rl/mismatch"] == pytest.approx(gaps.mean(), abs=1e-8)
  assert found[4]["rl/kl_to_old"] > 1e-9  # of parameters that the update before moved
  asked = []

  def while_it_draws(_, step):  # the fourth time: once before, and at the third piece of text
    asked.extend([step] * (step >= 2))
    return len(asked) > 3

  for stop in stops:
    with monkeypatch.context() as m:
      at_step = lambda _, step, stop=stop: step >= stop  # noqa: E731
      m.setattr(preemption.Interrupts, "requested", while_it_draws if stop == 2 else at_step)
      end = run(tmp_path / "parts", questions)
    if stop == 0:  # within the first evaluation, which no checkpoint may be without
      assert end["step"] == 0 and not (tmp_path / "parts/checkpoints/0").exists()
    if stop == 2:
      assert end["step"] == 2 and not (tmp_path / "parts/rollouts/000001.jsonl").exists()
    if stop == 1:
      with pytest.raises((ConfigError, UserError), match="rl.reward"):
        (tmp_path / "rewards.py").write_text(REWARD + "\n")
        run(tmp_path / "parts", questions)
      (tmp_path / "rewards.py").write_text(REWARD)
  assert rows(tmp_path / "parts") == found and end["accuracies"] == summary["accuracies"]
  spec = harness.text_spec("bf16", job="rl", **RL | questions)
  states = (harness.saved_state(tmp_path / name, spec, 4) for name in ("whole", "parts"))
  harness.assert_trees_equal(*states)


def refused(questions, **changes):
  with pytest.raises(ConfigError) as e:
    harness.text_spec("bf16", job="rl", **RL | questions | changes)
  return "\n".join(e.value.problems)


def test_a_mistake_is_said_once_and_in_its_own_words(questions):
  text = refused(questions, **{"rl.reward_model": "no_such", "rl.reward": ""})
  assert text.count("no_such/config.json") == 1
  text = refused(questions, **{"rl.loss": "dpo", "rl.beta": 0.0, "rl.reference": "no_such"})
  assert "rl.beta=0.0 must be positive" in text and "not read" not in text
  assert "log.source_loss=True with --job=rl" in refused(questions, **{"log.source_loss": True})


def test_a_policy_keeps_the_template_and_the_ends_that_it_learned_with(questions, tmp_path):
  """Its questions are rendered by data.chat_template, and stop tokens end its completions."""
  tuned, source = chats.write_model(tmp_path / "tuned", 1, 64), tmp_path / "before/hf_source"
  source.mkdir(parents=True)
  (source / "generation_config.json").write_text('{"eos_token_id": 5}')
  (tmp_path / "mine.jinja").write_text(text := chats.TEMPLATE + "{# mine #}")
  changes = {"data.tokenizer": str(tuned), "data.chat_template": str(tmp_path / "mine.jinja"),
             "generate.stop_tokens": ("a", "b")}  # fmt: skip
  spec = harness.text_spec("bf16", job="rl", **RL | questions | changes)
  ends = rl.Questions(spec, [None]).ends()
  assert ends == [spec.data.tokenizer.token_id(name) for name in "ab"]
  start.take_source(spec, str(tmp_path / "before"), str(tmp_path / "run"), ends)
  kept = str(tmp_path / "run/hf_source")
  assert (tmp_path / "run/hf_source/chat_template.jinja").read_text() == text
  assert sorted(api.end_ids(kept, spec.data.tokenizer)) == sorted(
    {5, spec.data.tokenizer.eos_id, *ends}
  )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"rl.tasks": ""}, "rl.tasks='' names no question to learn from"),
    ({"rl.samples": 1, "global_batch": 2}, "rl.samples=1 must be at least 2"),
    ({"rl.loss": "ppo"}, "rl.loss='ppo': a value head, .* is not built; grpo, dapo and dr_grpo"),
    ({"rl.loss": "p"}, "rl.loss='p' is not one of 'grpo', 'dapo', 'dr_grpo'"),
    ({"global_batch": 8}, "global_batch=8 must be .* = 4: a completion in every row"),
    (
      {"rl.prompts": 5, "global_batch": 5, "grad_accum_steps": 1},
      "rl.prompts=5 must be a multiple of",
    ),
    ({"rl.temperature": 0.0}, "rl.temperature=0.0 must be positive"),
    (
      {"rl.tasks": "q.jsonl(samples=4, max_new_tokens=2)"},
      "rl.tasks: 'q.jsonl.*': samples, max_new_tokens of a completion rl.samples, rl.max_new_tokens"
      " states",
    ),
    ({"rl.tasks": "__file__(foo=1)"}, "rl.tasks: '__file__' is none of"),
    ({"rl.tasks": "chain_summ"}, "rl.tasks: 'chain_summ' is none of .*did you mean 'chain_sum'"),
    ({"rl.tasks": "aime24"}, "rl.tasks: aime24 needs "),
    ({"rl.tasks": "none.jsonl"}, "rl.tasks: none.jsonl does not exist"),
    ({"generate.precision": "bf16"}, "generate.precision='bf16' with --job=rl, .* rl.rollout=''"),
    (
      {"rl.loss": "dpo", "rl.pairs": "p.jsonl", "rl.tasks": "", "generate.max_length": 10**6},
      "generate.max_length=1000000 must be from 0 to",
    ),
    ({"generate.max_length": 0}, "generate.max_length=0: the cache of a rollout has one size"),
    ({"generate.top_p": 0.9}, "generate.top_p=0.9, generate.top_k=0: a token's probability"),
    ({"generate.top_k": 4}, "generate.top_p=1.0, generate.top_k=4: a token's probability"),
    (
      {"rl.reference": "w"},
      "rl.reference='w' is not read with rl.loss='grpo' and rl.kl=0.0; leave it out",
    ),
    ({"rl.eval_pairs": "p"}, "rl.eval_pairs='p' is not read with rl.loss='grpo'; leave it out"),
    ({"rl.beta": 0.7}, "rl.beta=0.7 is not read with rl.loss='grpo'; leave it out"),
    ({"rl.max_resampling": 3}, "rl.max_resampling=3 is not read .* or set its default, 8"),
    ({"rl.loss": "rejection", "rl.clip_low": 0.3}, "rl.clip_low=0.3 is not read with rl.loss='rej"),
    ({"rl.loss": "rejection", "rl.most_correction": 0.0}, "rl.most_correction=0.0 is not read"),
    ({"rl.kl": None}, r"rl.kl=0.04 .*without a reference: weights are drawn at random"),
    ({"rl.kl": -0.1}, "rl.kl=-0.1 must be 0, no reference, or positive"),
    ({"rl.clip_low": 1.5}, "rl.clip_low=1.5 must be from 0 to 1"),
    ({"rl.rollout": "block_129"}, "rl.rollout: .*did you mean 'block_128'"),
    ({"rl.rollout": "tensor_delayed"}, "rl.rollout: 'tensor_delayed' has delayed or static scales"),
    (
      {"rl.rollout": "rowwise", "model.lora.rank": 4},
      "rl.rollout: layers/attn/q has recipe 'rowwise' and model.lora.base='block_fp8'",
    ),
    (
      {"rl.rollout": "tensor_current", "precision.invariant": True},
      "rl.rollout: precision.invariant=True with recipe 'tensor_current'",
    ),
    (
      {"model.unit_scaling": "loss", "optim.grad_clip_norm": 0.0},
      "model.unit_scaling='loss' with --job=rl",
    ),
    ({"distill.weight": 0.5, "init.workdir": "w"}, "distill.weight=0.5 with --job=rl"),
    (
      {
        "precision.rules": ((".*", "tensor_delayed"),),
        "precision.invariant": True,
        "memory.remat_policy": "full",
      },
      "the first rollout comes before any step",
    ),
    ({"generate.weights": "values"}, "generate.weights='values' with kernels.matmul='auto'"),
    ({"rl.overlong": 5}, "rl.overlong=5 must be below rl.max_new_tokens=5"),
    (
      {
        "precision.policy": ("roll_back(metric='accuracy')",),
        "eval.every": 2,
        "eval.tokens": 64,
        "checkpoint.every": 2,
      },
      "precision.policy rolls back",
    ),
  ],
)
def test_what_cannot_learn_is_refused_by_name(questions, changes, message):
  assert re.search(message, refused(questions, **changes))


def test_stale_rollouts_are_refused_by_name():
  with pytest.raises(UserError, match="'rl.staleness' is no key; the present parameters draw"):
    named.load("configs/rl_smollm2.py", {"rl.staleness": 2})


def test_a_tokenizer_without_an_end_token_is_refused(questions, tmp_path):
  """No completion would end by itself."""
  path = tmp_path / "tokenizer.json"
  tokenizers.Tokenizer(tokenizers.models.WordLevel({"say": 0, "?": 1}, "?")).save(str(path))
  text = refused(questions, **{"data.tokenizer": str(path)})
  assert re.search("would name the eos_token; set data.eos to the token that ends", text), text


def test_prompts_that_leave_no_room_are_named(questions, tmp_path):
  message = "rl.tasks: learned, .* has 7 tokens, and with rl.max_new_tokens=30 more it fits neither"
  with pytest.raises(UserError, match=message):
    run(tmp_path / "w", questions, **{"rl.max_new_tokens": 30})


def test_a_run_remembers_the_texts_that_end_its_completions(questions, tmp_path):
  """Earlier versions read none: a run of theirs does not go on with others unasked."""
  spec = harness.text_spec("bf16", job="rl", **RL | questions)
  plain, _ = rl._of_questions(spec)
  assert "rl.tasks" not in plain.contents
  (tmp_path / "t.json").write_text(json.dumps(
    {"name": "t", "questions": "learned.jsonl", "stop": ["."], "verifier": "regex"}
  ))  # fmt: skip
  own = {"rl.tasks": f"{questions['rl.tasks']},{tmp_path}/t.json", "generate.stop": ("?",)}
  feed, _ = rl._of_questions(harness.text_spec("bf16", job="rl", **RL | questions | own))
  ends = feed.contents["rl.tasks"].partition(", completions end at ")[2]
  assert ends == "{'learned': ['?'], 't': ['?', '.']}"


def test_a_rollout_that_is_left_had_not_begun(monkeypatch):
  """Its questions come again."""
  places = ["begun"]
  batches = types.SimpleNamespace(iterator=types.SimpleNamespace(
    get_state=lambda: places[-1], set_state=places.append
  ))  # fmt: skip

  def drawn(*args):
    places.append("two questions later")
    raise AskedToStop

  own = types.SimpleNamespace(
    _own=types.SimpleNamespace(updates_per_rollout=2), _update=(-1, []), batches=batches,
    _folder="f", _drawn=drawn,
  )  # fmt: skip
  assert rl.RLState.next_batch(own, None, 4) == (None, 4) and places[-1] == "begun"


def test_a_reward_that_raises_stops_the_run_with_its_question(questions, tmp_path):
  (tmp_path / "rewards.py").write_text("def third(item, output):\n  return 1 / 0\n")
  with pytest.raises(UserError, match="of learned, .* raised ZeroDivisionError"):
    run(tmp_path / "w", questions)


def test_losses_state_their_numbers():
  assert OBJECTIVES["dapo"].clip_high == 0.28 and OBJECTIVES["grpo"].kl == 0.04


@pytest.mark.slow
def test_a_step_that_failed_is_repeated_with_its_own_loss(questions, tmp_path, monkeypatch):
  changes = {"optim.peak_lr": 1e30, "optim.grad_clip_norm": 0.0, "optim.warmup_steps": 0}
  with pytest.raises(train.NonFinite, match="step 2"):
    run(tmp_path, questions, **changes)
  report, seen = nonfinite.report, []

  def watched(spec, params, batch, *args):
    seen.append((batch["policy"].temperature, batch["policy"].objective.kl))
    return report(spec, params, batch, *args)

  monkeypatch.setattr(nonfinite, "report", watched)
  spec = harness.text_spec("bf16", job="diagnose", **RL | questions | changes)
  result = diagnose.run(spec, str(tmp_path))
  assert result["step"] == 2 and seen == [(0.8, 0.0)]


@pytest.mark.slow
@pytest.mark.parametrize("form", [("reference", "codes"), ("dequantized", "values")])
def test_an_invariant_run_learns_from_the_probabilities_it_drew_with(tmp_path, questions, form):
  """To the bit, also after updates: the sampler's codes are those of the next forward pass."""
  changes = {"precision.invariant": True, "memory.remat_policy": "full", "steps": 6}
  changes |= dict(zip(("kernels.matmul", "generate.weights"), form, strict=True))
  run(tmp_path, questions, "block_128", **changes)
  found = rows(tmp_path)
  assert all(found[step]["rl/mismatch"] == 0 for step in range(1, 7))
  assert (
    all(found[step]["rl/kl_to_old"] == 0 for step in (1, 3, 5)) and found[6]["rl/kl_to_old"] > 0
  )
  # A run goes on within the last rollouts alone.
  assert sorted(p.name for p in tmp_path.glob("rollouts/*.npz")) == ["000001.npz", "000002.npz"]
  for cycle in (1, 2):
    for part in parts(tmp_path, cycle):
      drawn = part["weights"] > 0
      np.testing.assert_array_equal(part["old"][drawn], part["rollout"][drawn])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensor_delayed", "e4m3_static"])
def test_a_rollout_has_the_scales_of_the_state(tmp_path, questions, recipe, capsys):
  """Of the calibration's table before the first step, then of the steps."""
  table = str(tmp_path / "table.json")
  calibrate.run(harness.text_spec(recipe, job="calibrate"), str(tmp_path / "none"), table)
  changes = {"precision.invariant": True, "memory.remat_policy": "full"}
  run(tmp_path / "w", questions, recipe, **changes, **{"precision.calibration": table})
  found = rows(tmp_path / "w")
  assert [found[step]["rl/mismatch"] for step in range(1, 5)] == [0.0] * 4
  assert found[4]["rl/kl_to_old"] > 0  # the parameters moved
  assert "step 0: scales of gradients begin from the next batch" in capsys.readouterr().out


def test_a_phase_that_begins_draws_by_scales_of_its_own_or_of_the_tensors(monkeypatch):
  """The states before it are of other sites, or of another recipe."""
  rules = [(("head", "bf16"), ("layers/.*/attn/.*", "tensor_delayed"), (".*", "bf16")),
           (("head", "bf16"), (".*", "tensor_delayed"))]  # fmt: skip
  spec = harness.one_layer_spec(**{
    "precision.rules": rules[0], "precision.schedule": ((2, rules[1]),), "steps": 4,
  })  # fmt: skip
  monkeypatch.setattr(scaling, "unknown", lambda *_: [])
  names = site_tree.recipes_of(spec.sites())
  amaxes = {(name, t): 1.0 for name in names for t in "xwg"}
  for step, phase, table, is_delayed in (
    (0, -1, None, False), (1, 0, None, True), (2, 0, None, False), (2, 0, "table", True),
    (2, 1, None, True),
  ):  # fmt: skip
    entered = scaling.states(spec.sites(phase=max(phase, 0)))
    before = types.SimpleNamespace(scaling_states=entered)
    own = types.SimpleNamespace(spec=spec, phase=phase, calibration=amaxes if table else None)
    own.of_table = functools.partial(rl.RLState.of_table, own)
    sites = rl.RLState._sites(own, before, step)
    assert bool(scaling.states(sites)) == is_delayed, (step, table)


def test_a_phase_of_a_policy_draws_by_the_scales_that_it_leaves():
  """Of sites that keep their recipe; training goes on with them."""
  rules = [(("head", "bf16"), ("layers/.*/attn/.*", "tensor_delayed"), (".*", "bf16")),
           (("head", "bf16"), (".*", "tensor_delayed"))]  # fmt: skip
  spec = harness.one_layer_spec(**{
    "precision.rules": rules[0], "precision.schedule": ((2, rules[1]),), "steps": 4,
  })  # fmt: skip
  first, second = spec.precision.phases
  phases = first, dataclasses.replace(second, by_policy=True)
  spec = dataclasses.replace(spec, precision=dataclasses.replace(spec.precision, phases=phases))
  known = {
    name: dataclasses.replace(state, amax_3=jnp.full_like(state.amax_3, 3.0))
    for name, state in scaling.states(spec.sites(phase=0)).items()
  }
  own = types.SimpleNamespace(spec=spec, phase=0, calibration=None)
  sites = rl.RLState._sites(own, types.SimpleNamespace(scaling_states=known), 2)
  drawn = scaling.states(sites)
  assert drawn.keys() == known.keys() and all("attn" in name for name in known)
  assert all(np.all(state.amax_3 == 3.0) for state in drawn.values())
  up = site_lib.flatten(sites)["layers/mlp/up"]
  assert up.recipe.is_quantized and not up.recipe.is_stateful


@pytest.mark.slow
def test_a_run_that_dies_within_a_rollout_draws_it_again(tmp_path, questions, monkeypatch):
  """After the rollout's files were written and before a checkpoint, and within it."""
  changes = {"checkpoint.every": 2, "steps": 6}
  run(tmp_path / "whole", questions, **changes)
  take_step = rl.RLState.take_step
  for last in (3, 4):  # resumes from 2
    taken = iter(range(2 if last == 4 else 0, last))

    def dies(self, *args, taken=taken):
      if next(taken, None) is None:
        raise KeyboardInterrupt
      return take_step(self, *args)

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
      m.setattr(rl.RLState, "take_step", dies)
      run(tmp_path / "parts", questions, **changes)
  run(tmp_path / "parts", questions, **changes)
  assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
  spec = harness.text_spec("bf16", job="rl", **RL | questions | changes)
  states = (harness.saved_state(tmp_path / name, spec, 6) for name in ("whole", "parts"))
  harness.assert_trees_equal(*states)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_an_objective_is_that_of_the_stored_arrays(tmp_path, questions, lora, monkeypatch):
  """Reference, correction, clip-higher and resampling together; from another run's weights."""
  harness.train_on_text(tmp_path / "before", "bf16", steps=3)
  changes = {
    "init.workdir": str(tmp_path / "before"), "init.weights_only": True, "rl.kl": 0.5,
    "rl.rollout": "rowwise", "rl.loss": "dapo", "rl.most_correction": 1.02, "model.lora.rank": lora,
    "model.lora.base": "float32",
  }  # fmt: skip
  monkeypatch.setattr(preemption.Interrupts, "requested", lambda _, step: step >= 3)
  run(tmp_path / "w", questions, **changes)
  found = rows(tmp_path / "w")
  assert found[1]["rl/kl_to_reference"] < 1e-9 < found[3]["rl/kl_to_reference"]
  for cycle in range(2):
    part, row = parts(tmp_path / "w", cycle)[0], found[2 * cycle + 1]
    drawn, apart = part["weights"] > 0, part["reference"] - part["old"]
    gap = part["old"] - part["rollout"]
    correction = np.minimum(np.exp(gap), 1.02)
    k3 = np.expm1(apart) - apart
    loss = (part["weights"] * (0.5 * k3 - correction * part["advantages"])).sum()
    assert row["loss"] == pytest.approx(loss, abs=2e-6)
    assert (
      row["rl/mismatch"] == pytest.approx(np.abs(gap)[drawn].mean(), rel=1e-3)
      and row["rl/mismatch"] > 1e-4
    )
    assert row["rl/truncated"] == pytest.approx((np.exp(gap) > 1.02)[drawn].mean(), abs=0.02)
    assert row["rl/kl_to_reference"] == pytest.approx(k3[drawn].mean(), rel=1e-2, abs=1e-9)
    # One mean over all tokens of the step.
    assert np.ptp(part["weights"][drawn]) < 1e-9
    np.testing.assert_allclose(part["weights"].sum(), 1, rtol=1e-6)
  if not lora:
    monkeypatch.undo()
    harness.train_on_text(tmp_path / "other", "bf16", steps=4)
    with pytest.raises((ConfigError, UserError), match="rl.reference"):
      run(tmp_path / "w", questions, **changes | {"init.workdir": str(tmp_path / "other")})
