"""Reinforcement learning from verified answers: the trainer's run on its own completions."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError
from fp8jax.evaluation import catalog, tasks
from fp8jax.evaluation.settings import Tasks
from fp8jax.generation import api
from fp8jax.generation.settings import Generate
from fp8jax.jobs import evaluate_tasks, rl_reward, run_state, train
from fp8jax.jobs import generator as generator_lib
from fp8jax.models import transformer
from fp8jax.ops import policy_gradient
from fp8jax.records import make_folder
from fp8jax.rl import reward_model, rollout
from fp8jax.rl.settings import REWARD, RL
from fp8jax.run import evaluator
from fp8jax.step.train_spec import TrainSpec

FOLDER = "rollouts"
_OF_POLICY = ("advantages", "old", "rollout")


def problems_of_spec(spec: TrainSpec) -> list[str]:
  """The problems of a run's rl section with the rest, in words."""
  own, texts = spec.of(RL), []
  if own.loss == REWARD:
    return rl_reward.problems_of_spec(spec)
  if spec.model.reward_head:
    texts.append(f"rl.loss={own.loss!r} with a reward head, which draws no text; set 'reward'")
  if own.reward_model:
    texts += reward_model.problems(own.reward_model, spec)
  if not own.tasks:
    texts.append("rl.tasks='' names no question to learn from; see eval.tasks for what there is")
  if own.prompts % own.updates_per_rollout:
    texts.append(
      f"rl.prompts={own.prompts} must be a multiple of "
      f"rl.updates_per_rollout={own.updates_per_rollout}: a group is of one step"
    )
  rows = own.prompts * own.samples // own.updates_per_rollout
  if rows != spec.global_batch:
    texts.append(
      f"global_batch={spec.global_batch} must be rl.prompts * rl.samples / "
      f"rl.updates_per_rollout = {rows}: a completion in every row"
    )
  if own.temperature <= 0:
    texts.append(f"rl.temperature={own.temperature} must be positive: greedy draws are all alike")
  if own.overlong >= own.max_new_tokens:
    texts.append(f"rl.overlong={own.overlong} must be below rl.max_new_tokens={own.max_new_tokens}")
  if not spec.of(Generate).max_length:
    texts.append(
      "generate.max_length=0: the cache of a rollout has one size, so that a completion does not "
      "depend on others; set it to the longest prompt and completion together"
    )
  if jax.process_count() > 1:
    texts.append("--job=rl draws in one process; start one for all of its devices")
  return texts


class Questions:
  """The prompts of rl.tasks in the place of a run's data (batch_sharding.TrainBatches)."""

  def __init__(self, spec: TrainSpec, found: list[rollout.Question]):
    rows = (spec.microbatch, spec.grad_accum_steps)
    self.counts = loader.DocumentCounts()
    self.spread = batch_sharding.BatchSharder(spec.run.layout, *rows)
    self._found = found
    order = grain.MapDataset.range(len(found)).shuffle(spec.seed % 2**32).repeat()
    self.iterator: Any = iter(order.to_iter_dataset())

  def __iter__(self) -> Iterator[rollout.Question]:
    return self

  def __next__(self) -> rollout.Question:
    return self._found[int(next(self.iterator))]

  def metrics(self) -> dict[str, float]:
    return {}

  def losses(self, by_source) -> dict[str, float]:
    del by_source
    return {}


def questions(spec: TrainSpec) -> list[rollout.Question]:
  """The prompts to learn from.

  Raises:
    UserError: a prompt leaves no room for rl.max_new_tokens.
  """
  own, settings = spec.of(RL), spec.of(Tasks)
  asked = frozenset()
  if settings.tasks:
    asked = frozenset(
      tasks.normalized(item.question) for task in catalog.load(settings) for item in task.items
    )
  wanted = dataclasses.replace(settings, tasks=own.tasks, questions=own.questions, compare_with="")
  loaded = catalog.load(wanted)
  ask = evaluate_tasks.asker(spec, spec.data.tokenizer, any(task.chat for task in loaded))
  made, room = [], spec.of(Generate).max_length - own.max_new_tokens
  for task in loaded:
    for item in tasks.apart(task.items, asked)[0]:
      prompt = tuple(ask(task, item)[1])
      if not 0 < len(prompt) <= min(room, spec.data.seq_len + 1 - own.max_new_tokens):
        raise UserError(
          f"rl.tasks: {task.name}, {item.name} has {len(prompt)} tokens, and with "
          f"rl.max_new_tokens={own.max_new_tokens} more it fits neither seq_len="
          f"{spec.data.seq_len} nor generate.max_length={spec.of(Generate).max_length}; raise "
          "them, or leave the question out"
        )
      made.append(rollout.Question(task, item, prompt))
  if not made:
    raise UserError("rl.tasks has no question that eval.tasks does not ask; name others")
  return made


class RLState(run_state.RunState):
  """The state of a run that learns from its own completions."""

  def __init__(self, workdir: str, judge, policies, table, batches: Questions, *args, **options):
    super().__init__(policies, table, batches, *args, **options)
    self._own, self._folder = self.spec.of(RL), os.path.join(workdir, FOLDER)
    self._workdir, self._update = workdir, (-1, [])
    self._generator: api.Generator | None = None
    self._judge = judge
    self.values: dict[str, float] = {}

  def next_batch(self, state, step: int):
    """(the part of the rollout that the step after `step` steps learns from, its number)."""
    cycle, part = divmod(step, self._own.updates_per_rollout)
    if self._update[0] != cycle:
      path = os.path.join(self._folder, f"{cycle:06d}.npz")
      arrays = self._saved(path) if part else self._drawn(state, step, cycle, path)
      self._update = cycle, arrays
    return self._update[1][part], step

  def enter(self, state, step: int, batch):
    return super().enter(state, step, self._with_policy(batch))

  def take_step(self, state, batch, is_loud: bool):
    state, values = super().take_step(state, self._with_policy(batch), is_loud)
    return state, {**values, **self.values}

  def _with_policy(self, batch):
    batch, own = dict(batch), self._own
    arrays = {f"{name}_BL": batch.pop(f"{name}_BL") for name in _OF_POLICY}
    policy = policy_gradient.Policy(
      **arrays, objective=own.objective, temperature=own.temperature
    )  # fmt: skip
    return {**batch, "policy": policy}

  def _saved(self, path: str) -> list[dict[str, np.ndarray]]:
    with np.load(path) as stored:
      count = self._own.updates_per_rollout
      return [
        {k.partition("/")[2]: stored[k] for k in stored.files if k.startswith(f"{n}/")}
        for n in range(count)
      ]

  def _drawn(self, state, step: int, cycle: int, path: str) -> list[dict[str, np.ndarray]]:
    own, spec = self._own, self.spec
    text = f"{spec.seed}|{cycle}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    rules = dataclasses.replace(
      own.rules, sampling=dataclasses.replace(own.rules.sampling, seed=seed)
    )
    phase = spec.phase(step)
    sites = evaluator.sites_of(spec, None, state.scaling_states, phase)
    drawing = evaluator.sites_of(spec, own.rollout or None, state.scaling_states, phase)
    if self._generator is None:
      self._generator = generator_lib.make(spec, self._workdir, state.params, drawing)
    else:
      self._generator.take(state.params, drawing)
    made = rollout.collect(
      self.batches, self._generator.generate, rules, own.objective, self._judge
    )
    self._generator.release()
    groups, dropped = made
    each = own.prompts // own.updates_per_rollout
    size = rules, own.objective, spec.global_batch, spec.data.seq_len
    parts = [
      rollout.laid_out(groups[n : n + each], *size) for n in range(0, own.prompts, each)
    ]  # fmt: skip
    for part in parts:
      part["old_BL"] = self._scored(state.params, sites, part)
    self._keep(path, parts)
    rewards = np.array([r for g in groups for r in g.rewards])
    lengths = np.array([len(c.tokens) for g in groups for c in g.completions])
    logp = np.concatenate([c.logp for g in groups for c in g.completions])
    self.values = {
      "rl/reward": float(rewards.mean()), "rl/length": float(lengths.mean()),
      "rl/entropy": float(-logp.mean()), "rl/equal_groups": float(dropped),
    }  # fmt: skip
    self._out.print(
      f"rollout {cycle}: reward {rewards.mean():.3f} of {len(rewards)} completions, "
      f"{lengths.mean():.1f} tokens each"
    )
    return parts

  def _scored(self, params, sites, part) -> np.ndarray:
    cfg, run, t = self.spec.model, self.spec.run, self._own.temperature
    names = ("tokens_BL", "targets_BL", "positions_BL", "segments_BL")
    batch = {n: jax.device_put(part[n], run.layout.act_sharding("BL")) for n in names}
    return np.asarray(_score(params, sites, batch, cfg=cfg, run=run, t=t))

  def _keep(self, path: str, parts):
    make_folder(self._folder, "--workdir")
    flat = {f"{n}/{k}": x for n, part in enumerate(parts) for k, x in part.items()}
    with open(f"{path}.tmp", "wb") as f:
      np.savez_compressed(f, **flat)
    os.replace(f"{path}.tmp", path)


@functools.partial(jax.jit, static_argnames=("cfg", "run", "t"))
def _score(params, sites, batch, *, cfg, run, t):
  h_BLD = transformer.hidden(params, sites, batch, cfg, run)
  of_head = (params, sites, batch["targets_BL"])
  return transformer.log_probs(h_BLD, *of_head, cfg, run, t)[0]


def run(spec: TrainSpec, workdir: str) -> dict[str, Any]:
  """Learns, or resumes; as train.run."""
  own = spec.of(RL)
  if own.loss == REWARD:
    return rl_reward.run(spec, workdir)
  found = questions(spec)
  judge = reward_model.RewardModel(own.reward_model, spec) if own.reward_model else None
  text = "|".join(f"{q.task.fingerprint} {q.item.name}" for q in found)
  text += f"|{judge.fingerprint}" if judge else ""
  prompts = hashlib.sha256(text.encode()).hexdigest()[:16]
  make = functools.partial(RLState, workdir, judge)
  feed = train.Feed(prompts, lambda spec: Questions(spec, found))
  return train.run(spec, workdir, make_state=make, feed=feed)
