"""Reinforcement learning from verified answers: the trainer's run on its own completions."""

import dataclasses
import functools
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

import grain
import numpy as np

from fp8jax import console as console_lib
from fp8jax import records, statistics
from fp8jax.data import batch_sharding
from fp8jax.errors import UserError
from fp8jax.evaluation import catalog, tasks
from fp8jax.evaluation.settings import Tasks
from fp8jax.generation import api
from fp8jax.generation.completion import LENGTH
from fp8jax.generation.settings import Generate
from fp8jax.generation.stoppable import AskedToStop, Stoppable, heed
from fp8jax.jobs import evaluate_tasks, rl_reward, run_state, start, train
from fp8jax.jobs import generator as generator_lib
from fp8jax.ops import scaling
from fp8jax.rl import pairs, reward, reward_model, rollout, scoring
from fp8jax.rl.settings import REWARD, RL
from fp8jax.run import evaluator
from fp8jax.step import distillation
from fp8jax.step.train_spec import TrainSpec


class Questions(batch_sharding.Batches):
  """The prompts of rl.tasks in the place of a run's data."""

  def __init__(self, spec: TrainSpec, prompts: list[rollout.Question]):
    super().__init__(spec.run.layout, spec.microbatch, spec.grad_accum_steps)
    self._prompts, self._ends = prompts, _stops(spec)
    order = grain.MapDataset.range(len(prompts)).shuffle(spec.seed % 2**32).repeat()
    self.iterator = iter(order.to_iter_dataset())

  def __iter__(self) -> Iterator[rollout.Question]:
    return self

  def __next__(self) -> rollout.Question:
    return self._prompts[int(next(self.iterator))]

  def ends(self) -> list[int]:
    """Tokens at which completions end, beside those of the weights that training starts from."""
    return self._ends


def _stops(spec: TrainSpec) -> list[int]:
  tokenizer, names = spec.data.tokenizer, spec.of(Generate).stop_tokens
  return [token for name in names if (token := tokenizer.token_id(name)) is not None]


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
  loaded = catalog.load(wanted, "rl.tasks")
  if not (own.reward or own.reward_model):
    catalog.check_packages(loaded, "rl.tasks")
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

  def __init__(
    self, workdir: str, judge: rollout.Judge, reference, policies, table, batches: Questions,
    *args, **options,
  ):  # fmt: skip
    """The reference's parameters are as a teacher's (step/distillation.py); None without."""
    super().__init__(policies, table, batches, *args, **options)
    self._questions: Any = batches
    self._own, self._folder = self.spec.of(RL), os.path.join(workdir, rollout.FOLDER)
    self._workdir, self._judge, self._reference = workdir, judge, reference
    self._update: tuple[int, list[dict[str, np.ndarray]]] = (-1, [])
    self._generator: api.Generator | None = None
    self._values: dict[str, float] = {}

  def feeds_by(self, step: int) -> str:
    is_kept = step % self._own.updates_per_rollout
    return "data_wait" if is_kept else "rollout"

  def next_batch(self, state, step: int):
    """(the part of the rollout that the step after `step` steps learns from, its number); None for
    the part if the run was asked to stop while it drew, as if it had not begun to."""
    (cycle, part), self._values = divmod(step, self._own.updates_per_rollout), {}
    if not part or self._update[0] != cycle:
      iterator = self.batches.iterator
      path, position = os.path.join(self._folder, f"{cycle:06d}"), iterator.get_state()
      try:
        self._update = cycle, self._saved(path) if part else self._drawn(state, step, cycle, path)
      except AskedToStop:
        iterator.set_state(position)
        return None, step
    return self._update[1][part], step

  def place(self, host):
    return rollout.with_policy(super().place(host), self._own)

  def take_step(self, state, batch, is_loud: bool):
    state, values = super().take_step(state, batch, is_loud)
    return state, {**values, **self._values}

  def _sites(self, state, step: int):
    """The sites of a step that has not begun.

    A phase that begins with it has no scales of its own yet: they are those that a policy leaves as
    they were, the calibration's, or those of the tensors themselves.
    """
    phase, states = self.spec.phase(step), state.scaling_states
    here = self.spec.precision.phases[phase]
    if step == here.start and self.phase != phase:
      if here.by_policy:
        before, now = (self.spec.sites(phase=p) for p in (self.spec.phase(step - 1), phase))
        states = scaling.carried(before, states, now, scaling.states(now))
      else:
        states = self.of_table(step, phase) or {}
    return evaluator.sites_of(self.spec, None, states, phase)

  def _saved(self, path: str) -> list[dict[str, np.ndarray]]:
    if not os.path.exists(f"{path}.npz"):
      raise UserError(
        f"{path}.npz is missing, of which a rollout's next step learns; copy {rollout.FOLDER}/ of "
        "the run that is continued to this workdir, or start from a checkpoint at a multiple of "
        f"rl.updates_per_rollout={self._own.updates_per_rollout} steps"
      )
    with np.load(f"{path}.npz") as stored:
      count = self._own.updates_per_rollout
      return [
        {k.partition("/")[2]: stored[k] for k in stored.files if k.startswith(f"{n}/")}
        for n in range(count)
      ]

  def _drawn(self, state, step: int, cycle: int, path: str) -> list[dict[str, np.ndarray]]:
    own, spec = self._own, self.spec
    text = f"{spec.seed}|{cycle}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    sampling = dataclasses.replace(own.rules.sampling, seed=seed, stop=spec.of(Generate).stop)
    rules = dataclasses.replace(own.rules, sampling=sampling)
    drawing = sites = self._sites(state, step)
    if own.rollout:
      drawing = evaluator.sites_of(spec.with_recipe(own.rollout), None, {})
    if compiles := self._generator is None:
      self._generator = generator_lib.make(spec, self._workdir, state.params, drawing)
    else:
      self._generator.take(state.params, drawing)
    stop = lambda: self.requested(step)  # noqa: E731
    begun = time.perf_counter()
    try:
      generate = Stoppable(self._generator, stop).generate
      groups, all_ = rollout.collect(self._questions, generate, self._judge, rules, own.objective)
    finally:
      self._generator.release()
    seconds = time.perf_counter() - begun
    size = rules, own.objective, spec.global_batch, spec.data.seq_len
    parts = []
    for n in range(own.updates_per_rollout):
      some = groups[n :: own.updates_per_rollout]
      if own.objective.beta:
        made = pairs.of_groups(some)
        parts.append(pairs.laid_out(made, spec.data.seq_len, spec.global_batch))
      else:
        parts.append(rollout.laid_out(some, *size))
        scored = own.temperature, state.params, sites, parts[-1]
        parts[-1]["old_BL"] = scoring.logp(spec, *scored, before_each=lambda: heed(stop))
      if self._reference is not None:
        parts[-1]["reference_BL"] = self._referred(state, sites, parts[-1], lambda: heed(stop))
    self._keep(path, parts, groups)
    self._say(cycle, all_, len(groups), None if compiles else seconds)
    return parts

  def _referred(self, state, sites, part, before_each=lambda: None) -> np.ndarray:
    """float32 [B, L] log-probabilities of the reference."""
    frozen = distillation.of_student(self._reference, state.params)
    scored = self._own.temperature, frozen, sites, part
    return scoring.logp(self.spec, *scored, is_base=True, before_each=before_each)

  def _say(self, cycle: int, groups: list[rollout.Group], kept: int, seconds: float | None):
    """Prints what a rollout brought, and keeps it for the metrics of the next step.

    Args:
      groups: all that were drawn; `kept` of them are learned from.
      seconds: of drawing; None if programs were compiled meanwhile.
    """
    rewards = np.array([g.rewards for g in groups])
    completions = [c for g in groups for c in g.completions]
    tokens = sum(len(c.tokens) for c in completions)
    logp = np.concatenate([c.logp for c in completions])
    # Wilson's interval is of shares.
    is_share = 0 <= rewards.min() <= rewards.max() <= 1
    of = (statistics.of_items if is_share else statistics.bootstrap)(rewards.mean(1))
    self._values = {
      "rl/reward": of.estimate, "rl/reward_low": of.low, "rl/reward_high": of.high,
      "rl/length": tokens / len(completions), "rl/entropy": float(-logp.mean()),
      "rl/cut": float(np.mean([c.finish_reason == LENGTH for c in completions])),
      "rl/groups": float(kept), "rl/equal_groups": float(sum(g.is_equal for g in groups)),
    }  # fmt: skip
    speed = ""
    if seconds is not None:
      self._values["rl/rollout_tokens_per_second"] = tokens / seconds
      speed = f", {tokens / seconds:,.0f} tokens/s"
    self._out.print(
      f"rollout {cycle}: reward {of.estimate:.3f} [{of.low:.3f}, {of.high:.3f}] of {len(groups)} "
      f"questions x {self._own.samples}, {kept} of them to learn from; "
      f"{tokens / len(completions):.1f} tokens each{speed}"
    )

  def _keep(self, path: str, parts, groups: list[rollout.Group]):
    """Writes a rollout's arrays, from which a run goes on within it, and its texts to read."""
    records.make_folder(self._folder, "--workdir")
    flat = {f"{n}/{k}": x for n, part in enumerate(parts) for k, x in part.items()}
    if len(parts) > 1:
      with records.replacing(f"{path}.npz") as part, open(part, "wb") as f:
        np.savez_compressed(f, **flat)
      self._forget(int(os.path.basename(path)))
    _write(f"{path}.jsonl", map(rollout.as_row, groups))
    if self._own.objective.keeps_best:
      folder, name = os.path.join(self._workdir, rollout.KEPT), os.path.basename(path)
      records.make_folder(folder, "--workdir")
      _write(os.path.join(folder, f"{name}.jsonl"), rollout.as_chats(groups))

  def _forget(self, cycle: int):
    """Removes the arrays of rollouts before `cycle` within which no checkpoint lies; that of the
    one before may be on its way."""
    folder, each = os.path.join(self._workdir, "checkpoints"), self._own.updates_per_rollout
    # One that is being written has a longer name that begins so.
    steps = [int(number[0]) for name in os.listdir(folder) if (number := re.match(r"\d+", name))]
    within = {step // each for step in steps if step % each}
    for name in os.listdir(self._folder):
      number = re.fullmatch(r"(\d+)\.npz", name)
      if number and int(number[1]) < cycle - 1 and int(number[1]) not in within:
        os.remove(os.path.join(self._folder, name))


def _write(path: str, rows: Iterable[Any]):
  records.write_atomic(path, "".join(records.to_json(row, None) + "\n" for row in rows))


class PairState(RLState):
  """The state of a run that learns from stored pairs: it draws nothing."""

  def feeds_by(self, step: int) -> str:
    return run_state.RunState.feeds_by(self, step)

  def next_batch(self, state, step: int):
    batch, number = run_state.RunState.next_batch(self, state, step)
    return {**batch, "reference_BL": self._referred(state, self._sites(state, step), batch)}, number


def run(spec: TrainSpec, workdir: str) -> dict[str, Any]:
  """Learns, or resumes; as train.run.

  Raises:
    UserError: see `questions`, rl/reward.py and rl/reward_model.py.
  """
  own, reference = spec.of(RL), None
  if own.loss == REWARD:
    return rl_reward.run(spec, workdir)
  feed, judge = _of_pairs(spec) if own.pairs else _of_questions(spec)
  if own.objective.has_reference:
    reference, where = start.frozen(spec, own.reference, "rl.reference")
    feed.contents.update(distillation.identity(reference, "rl.reference"))
    by = f"rl.beta={own.beta}" if own.objective.beta else f"rl.kl={own.objective.kl}"
    console_lib.console().print(f"reference: {where}, multiplied as the policy; {by}")
  make = functools.partial(PairState if own.pairs else RLState, workdir, judge, reference)
  return train.run(spec, workdir, make_state=make, feed=feed)


def _of_questions(spec: TrainSpec) -> tuple[train.Feed, rollout.Judge]:
  own, prompts = spec.of(RL), questions(spec)
  judge: rollout.Judge = reward.of_verifiers
  contents = {}
  if own.reward:
    judge = of_function = reward.OfFunction(own.reward)
    contents["rl.reward"] = f"{own.reward} {of_function.fingerprint}"
  elif own.reward_model:
    judge = of_model = reward_model.RewardModel(own.reward_model, spec)
    contents["rl.reward_model"] = of_model.fingerprint
  g = spec.of(Generate)
  text = "|".join(f"{q.task.fingerprint} {q.item.name} {q.prompt}" for q in prompts)
  text += repr((g.cache_format, g.max_length, g.stop_tokens))
  stops = {q.task.name: [*g.stop, *q.task.protocol.stop] for q in prompts}
  if any(stops.values()):  # earlier versions, which read none, remember the tasks alone
    contents["rl.tasks"] = f"{own.tasks}, completions end at {stops}"
  fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
  open_ = lambda spec: Questions(spec, prompts)  # noqa: E731
  return train.Feed(fingerprint, open_, contents, asks=True, loss=_loss(own), job="rl"), judge


def _of_pairs(spec: TrainSpec) -> tuple[train.Feed, rollout.Judge]:
  data = spec.data
  template = functools.partial(generator_lib.template_of, data)
  stored = pairs.Pairs(spec.of(RL).pairs, pairs.Encoder(data, template))
  text = repr([stored.fingerprint(), data.tokenizer.fingerprint, data.seq_len, data.seed])
  fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
  open_ = lambda spec: pairs.Batches(spec, stored)  # noqa: E731
  loss = _loss(spec.of(RL))
  return train.Feed(fingerprint, open_, asks=True, loss=loss, job="rl"), reward.of_verifiers


def _loss(own: RL) -> str:
  return f"rl.loss={own.loss}, {own.objective}"
