"""Policies that decide by the answers to eval.tasks: asked, decided, resumed, refused."""

import json

import harness
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.config import resolve
from fp8jax.errors import ConfigError, UserError
from fp8jax.evaluation import run as run_lib
from fp8jax.evaluation import store
from fp8jax.generation.completion import Completion
from fp8jax.jobs import accuracy, generator, table
from fp8jax.models import transformer
from fp8jax.report import files, run_report
from fp8jax.run import evaluator, preemption

RUN = {
  # So wide a margin that the FP8 forward pass says something else.
  "precision.rules": (("layers/.*", "tensor_delayed(steps=4, margin=16)"), (".*", "bf16")),
  "precision.verify_fp8_gemms": False, "eval.tokens": 64, "eval.every": 2, "steps": 7,
  "eval.precisions": ("recipe", "bf16"), "optim.peak_lr": 1e-2, "generate.slots": 2,
}  # fmt: skip


def write_tasks(folder, answers=(".*", "(?s:.)*", "no model says this")):
  """ "q", a file of questions with these answers, and "r" with one that nothing answers."""
  for name, own in (("q", answers), ("r", ("nor this",))):
    lines = [
      json.dumps({"question": f"{name} {i}?", "answer": a, "verifier": "regex"}) + "\n"
      for i, a in enumerate(own)
    ]
    (folder / f"{name}.jsonl").write_text("".join(lines))
  return f"{folder}/q.jsonl(max_new_tokens=4),{folder}/r.jsonl(max_new_tokens=3)"


def rows(workdir):
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def told(workdir):
  """Everything of the rows that no clock decides."""
  kept = ("step", "loss", "grad_norm", "learning_rate", "actions")
  return [
    {k: v for k, v in row.items() if k in kept or k.startswith(("accuracy", "heldout"))}
    for row in rows(workdir)
  ]


def shares(workdir):
  return {row["step"]: row["accuracy/q"] for row in rows(workdir) if "accuracy/q" in row}


def greedy(spec, state, prompt, count, recipe=None):
  """Tokens by the training forward pass of the whole text, one after the other."""
  sites = evaluator.sites_of(spec, recipe, state.scaling_states)
  tokens = list(prompt)
  for _ in range(count):
    batch = {"tokens_BL": jnp.asarray([tokens]), "positions_BL": jnp.arange(len(tokens))[None]}
    logits = transformer.logits(state.params, sites, batch, spec.model, spec.run)
    tokens.append(int(np.argmax(logits[0, -1])))
  return tokens[len(prompt) :]


@pytest.mark.slow
def test_answers_of_the_steps_own_parameters_lower_the_rate_stopped_or_not(tmp_path, monkeypatch):
  """Of three questions the model can answer two, at every step: no evaluation improves."""
  changes = {
    **RUN, "eval.tasks": write_tasks(tmp_path), "checkpoint.every": 3, "checkpoint.keep": 9,
    "precision.policy": ("lower_rate(metric='accuracy', patience=1)",),
  }  # fmt: skip
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  harness.train_on_text(whole, **changes)
  assert shares(whole) == dict.fromkeys((0, 2, 4, 6, 7), pytest.approx(2 / 3))
  told_once = [row for row in rows(whole) if "accuracy" in row]
  assert [row["accuracy"] for row in told_once] == [pytest.approx(1 / 3)] * 5  # mean of two tasks
  steps, right = (0, 2, 4, 6, 7), {"q": 2 / 3, "r": 0.0, "mean": 1 / 3}
  names = {"q": "accuracy/q", "r": "accuracy/r", "mean": "accuracy"}
  summary = json.loads((whole / "summary.json").read_text())
  assert summary["accuracies"] == {
    str(step): {names[task]: pytest.approx(share) for task, share in right.items()}
    for step in steps
  }
  assert summary["accuracies"].keys() == summary["evaluations"].keys()
  (section,) = [s for s in run_report.sections(files.read(str(whole))) if s.title == "Loss"]
  drawn = section.charts["accuracy"]["data"]["values"]
  assert {(row["step"], row["task"]): row["accuracy"] for row in drawn} == {
    (step, task): pytest.approx(share, abs=1e-3) for step in steps for task, share in right.items()
  }
  (action,) = next(row["actions"] for row in rows(whole) if "actions" in row)
  assert "accuracy is 0.3333, best 0.3333: no improvement in 1" in action["text"]
  spec = harness.text_spec(**changes)
  state = harness.saved_state(whole, spec, 6)
  saved = store.read_rows(f"{whole}/evaluation/training_step_6/q.jsonl")
  assert [row["tokens"] for row in saved] == [4, 4, 4]
  outputs, encode = {}, spec.data.tokenizer.encode_prompt
  for recipe in (None, "bf16"):  # that of training, and another one
    tokens = [greedy(spec, state, encode(row["prompt"]), 4, recipe) for row in saved]
    outputs[recipe] = [spec.data.tokenizer.decode(of_row) for of_row in tokens]
  assert outputs[None] == [row["output"] for row in saved] != outputs["bf16"]
  first = store.read_rows(f"{whole}/evaluation/training_step_0/q.jsonl")
  assert [row["output"] for row in first] != [row["output"] for row in saved]

  # Stopped at an answer of step 4, then killed between the two tasks of step 6, then begun again.
  with monkeypatch.context() as patch:
    asked = broken / "evaluation/training_step_4"
    patch.setattr(preemption.Interrupts, "requested", lambda self, step: asked.exists())
    harness.train_on_text(broken, **changes)
  assert 4 not in shares(broken)
  asks = run_lib.evaluate

  def killed(task, generator, ask, folder, *more):
    if task.name == "r" and folder.endswith("training_step_6"):
      raise KeyboardInterrupt
    return asks(task, generator, ask, folder, *more)

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(run_lib, "evaluate", killed)
    harness.train_on_text(broken, **changes)
  assert 6 not in shares(broken)
  questions = (tmp_path / "q.jsonl").read_text()
  (tmp_path / "q.jsonl").write_text(questions.replace("q 1?", "q 7?"))
  with pytest.raises(
    ConfigError, match=r"eval\.tasks.*q [0-9a-f]{16}, r"
  ):  # the same name, another question
    harness.train_on_text(broken, **changes)
  (tmp_path / "q.jsonl").write_text(questions)
  with pytest.raises(ConfigError, match="generate.slots"):
    harness.train_on_text(broken, **{**changes, "generate.slots": 1})
  harness.train_on_text(broken, **changes)
  assert json.loads((broken / "summary.json").read_text())["accuracies"] == summary["accuracies"]
  assert told(broken) == told(whole)
  for step in (0, 2, 4, 6, 7):
    path = f"evaluation/training_step_{step}/q.jsonl"
    assert (broken / path).read_bytes() == (whole / path).read_bytes()


class Scripted:
  """A generator whose evaluations give so many right answers, one after the other."""

  def __init__(self, script):
    self.script, self.params = iter(script), None

  def take(self, params, sites):
    self.params = params

  def release(self):
    self.params = None

  def generate(self, prompts, sampling, num_samples=1, on_text=None, numbers=()):
    assert self.params is not None and sampling.temperature == 0
    right = next(self.script)
    texts = ["yes" if i < right else "no" for i in range(len(prompts))]
    completions = [Completion((1,), text, "length") for text in texts]
    for i, one in enumerate(completions):
      on_text(i, 0, one.text, one)
    return [[one] for one in completions]


@pytest.mark.slow  # roll-backs: roll_back_test.py
def test_an_accuracy_beyond_the_bound_undoes_steps_and_is_asked_again(tmp_path, monkeypatch):
  write_tasks(tmp_path, ("yes",) * 4)
  first, later = map(harness.only_down, ("tensor_delayed(steps=4)", "tensor_current"))
  changes = {
    **RUN, "eval.tasks": f"{tmp_path}/q.jsonl", "eval.questions": 4, "checkpoint.every": 2,
    "checkpoint.keep": 3, "precision.rules": first, "eval.precisions": ("recipe",),
    "precision.policy": ("roll_back(metric='accuracy/q', worse_by=0.25)",),
    "precision.schedule": ((5, later),),
  }  # fmt: skip
  scripted = Scripted([2, 3, 2, 1, 3, 4])
  made = []

  def make(spec, workdir, params, sites, run):
    made.append(scripted)
    scripted.take(params, sites)
    return scripted

  monkeypatch.setattr(generator, "make", make)
  monkeypatch.setattr(
    accuracy.evaluate_tasks, "asker", lambda *_: lambda task, item: (item.question, [1])
  )
  harness.train_on_text(tmp_path / "run", **changes)
  # 0.5 at step 4 is at the bound below 0.75; 0.25 at step 6 is beyond it, and its rows are gone.
  assert shares(tmp_path / "run") == {0: 0.5, 2: 0.75, 4: 0.5, 6: 0.75, 7: 1.0}
  ((action,),) = [row["actions"] for row in rows(tmp_path / "run") if "actions" in row]
  assert "accuracy/q of step 6 is 0.2500, best 0.7500: worse in 1 evaluations" in action["text"]
  assert "checkpoint of step 4, batches 4, 5 are left out" in action["text"]
  assert len(made) == 1 and next(scripted.script, None) is None
  saved = store.read_rows(f"{tmp_path}/run/evaluation/training_step_6/q.jsonl")
  assert [row["output"] for row in saved] == ["yes"] * 3 + ["no"]
  # The rules are those of the phase that made the weights.
  for step, rules in {4: first, 6: later}.items():
    text = (tmp_path / f"run/evaluation/training_step_{step}/q.json").read_text()
    assert json.loads(text)["settings"]["rules"] == [list(rule) for rule in rules]


def test_a_generator_is_invariant_as_soon_as_no_scale_is_of_a_batch(tmp_path, monkeypatch):
  """Before the first step delayed scales are chosen from the tensors: the pass is the plain one."""
  spec = harness.text_spec(**RUN | {
    "precision.invariant": True, "memory.remat_policy": "full", "generate.stop": ("?",),
    "precision.rules": harness.only_down("tensor_delayed(steps=4)"),
    "eval.tasks": write_tasks(tmp_path).partition(",")[0],
  })  # fmt: skip
  made, scripted, stops = [], Scripted([1, 2, 3]), []

  class Seen:
    take, release = scripted.take, scripted.release

    def generate(self, prompts, sampling, *more):
      stops.append(sampling.stop)
      return scripted.generate(prompts, sampling, *more)

  def make(spec, workdir, params, sites, run):
    made.append(run.is_invariant)
    scripted.take(params, sites)
    return Seen()

  monkeypatch.setattr(generator, "make", make)
  asks = accuracy.TaskAccuracy(spec, str(tmp_path), print, True)
  state, _ = harness.calibrated_batches(spec, 1)
  for states in ({}, state.scaling_states, state.scaling_states):
    asks.run(spec, state.params, states, 0, 0, lambda: False)
  assert made == [False, True] and stops == [("?",)] * 3


REFUSED = {
  "no task": ({"eval.tasks": ""}, "eval.tasks='' asks nothing"),
  "no evaluation": ({"eval.every": 0}, "eval.every=0 makes none; set eval.every=100"),
  "no held-out loss": ({"eval.tokens": 0}, "eval.tokens=0 makes none"),
  "no file": ({"eval.tasks": "none.jsonl"}, "metric='accuracy': eval.tasks: none.jsonl does not"),
  "seed": ({"eval.seed": -1}, "eval.seed=-1 must be from 0"),
  "context": ({"generate.max_length": 99999}, "generate.max_length=99999 must be from 0 to 512"),
  "stop token": ({"generate.stop_tokens": ("<|no|>",)}, "generate.stop_tokens: stop token"),
  "channel": ({"precision.smooth_swiglu": "channel"}, "precision.smooth_swiglu='channel' takes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_tasks_need_in_training_is_refused_at_the_start(tmp_path, name):
  changes, text = REFUSED[name]
  c = harness.text_config(**{
    **RUN, "eval.tasks": write_tasks(tmp_path), "precision.rules": ((".*", "tensor_current"),),
    "precision.policy": ("lower_rate(metric='heldout')", "switch_recipe(metric='accuracy')"),
    **changes,
  })  # fmt: skip
  device = harness.CPU
  with pytest.raises(ConfigError) as e:
    resolve.resolve(c, c.mesh.data, device, needs=table.JOBS["train"].needs)
  assert text in str(e.value)
  if name in ("no file", "seed", "channel"):  # nobody asks without such a policy
    c.precision.policy = ("switch_recipe(metric='heldout')",)
    resolve.resolve(c, 1, device, needs=table.JOBS["train"].needs)


@pytest.mark.parametrize("metric, changes, message", [
  ("accuracy/qq", {}, r"metric.*'accuracy/qq'.*did you mean 'accuracy/q'"),
  # "q 0?" and a new line are five bytes.
  ("accuracy", {"generate.max_length": 5}, "eval.tasks: q, 1 has 5 tokens and generate.max_"),
  ("accuracy", {"eval.chat": True}, "need a chat template.*eval.chat=False"),
])  # fmt: skip
def test_tasks_that_cannot_be_asked_are_refused_before_a_step(tmp_path, metric, changes, message):
  changes = {**RUN, "eval.tasks": write_tasks(tmp_path), **changes}
  with pytest.raises(UserError, match=message):
    harness.train_on_text(
      tmp_path / "run", **changes, **{"precision.policy": (f"refresh(metric='{metric}')",)}
    )
  assert not (tmp_path / "run" / "metrics.jsonl").exists()
