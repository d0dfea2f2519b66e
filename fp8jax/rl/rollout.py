"""Rollouts: questions completed by the policy, judged, and laid out as the batches of an update.

P prompts, J completions of each (a group); B rows of L positions, a completion with its prompt in
each.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from fp8jax.errors import UserError
from fp8jax.evaluation.tasks import Item, Task
from fp8jax.generation import api
from fp8jax.generation.completion import ERROR, LENGTH, Completion
from fp8jax.ops import policy_gradient
from fp8jax.ops.policy_gradient import Objective
from fp8jax.rl.settings import RL, Rules

FOLDER, KEPT = "rollouts", "kept"  # of a workdir
_OF_POLICY = ("advantages", "old", "rollout", "reference")


@dataclasses.dataclass(frozen=True)
class Question:
  """A prompt, token ids, whose completions an item of a task judges."""

  task: Task
  item: Item
  prompt: tuple[int, ...]


Answer = tuple[Question, Completion]
# The reward of every answer; see rl/reward.py.
Judge = Callable[[Sequence[Answer]], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Group:
  """The completions of a question, their rewards, and whether all were judged alike, before the
  penalty of their lengths."""

  question: Question
  completions: tuple[Completion, ...]
  rewards: tuple[float, ...]
  is_equal: bool = False


def _penalty(completion: Completion, rules: Rules) -> float:
  if not rules.overlong:
    return 0.0
  if completion.finish_reason == LENGTH:
    return 1.0
  late = len(completion.tokens) - (rules.sampling.max_new_tokens - rules.overlong)
  return min(max(late, 0) / rules.overlong, 1.0)


def _completed(asked: Sequence[Question], generate, sampling, rules: Rules):
  """The completions of every question: those that end at the same texts are drawn together."""
  made = {}
  for number, stop in enumerate(dict.fromkeys(q.task.protocol.stop for q in asked)):
    own = [i for i, q in enumerate(asked) if q.task.protocol.stop == stop]
    # No draw has the random numbers of another one, of this round or of a later one.
    seed = sampling.seed + number * rules.rounds
    of = dataclasses.replace(sampling, seed=seed, stop=(*sampling.stop, *stop))
    made |= zip(own, generate([asked[i].prompt for i in own], of, rules.samples), strict=True)
  return [made[i] for i in range(len(asked))]


def collect(
  questions: Iterator[Question], generate: Callable[..., Sequence[Sequence[Completion]]],
  judge: Judge, rules: Rules, objective: Objective,
) -> tuple[list[Group], list[Group]]:  # fmt: skip
  """(P groups, or as many as `rounds` left; all that were drawn).

  Args:
    questions: without end.
    generate: (prompts, sampling, samples) -> completions of every prompt, see api.Generator.
    judge: of the rewards, from which the penalty of `Rules.overlong` is taken.

  Raises:
    UserError: groups of unequal rewards, from which alone something can be learned, are fewer than
      `Rules.updates`; logits were not finite; of the judge.
  """
  kept, all_ = [], []
  for number in range(rules.rounds):
    # A question that comes again has other answers.
    seed = rules.sampling.seed + number
    sampling = dataclasses.replace(rules.sampling, seed=seed)
    asked = [next(questions) for _ in range(rules.prompts - len(kept))]
    drawn = _completed(asked, generate, sampling, rules)
    answers = [(q, c) for q, completions in zip(asked, drawn, strict=True) for c in completions]
    if bad := sum(c.finish_reason == ERROR for _, c in answers):
      raise UserError(f"{bad} of {len(answers)} completions ended at logits that are not finite; "
                      f"{api.NOT_FINITE}")  # fmt: skip
    judged = list(judge(answers))
    paid = [r - _penalty(c, rules) for r, (_, c) in zip(judged, answers, strict=True)]
    for i, (question, completions) in enumerate(zip(asked, drawn, strict=True)):
      own = slice(i * rules.samples, (i + 1) * rules.samples)
      is_equal = min(judged[own]) == max(judged[own])
      all_.append(Group(question, tuple(completions), tuple(paid[own]), is_equal))
      if not (objective.drops_equal and is_equal):
        kept.append(all_[-1])
    if len(kept) == rules.prompts or not objective.drops_equal:
      break
  if len(kept) < rules.updates:
    raise UserError(
      f"{len(kept)} of {len(all_)} groups of {rules.samples} completions have unequal rewards "
      f"after rl.max_resampling={rules.rounds - 1} more rounds, expected {rules.updates} at least "
      "(rl.updates_per_rollout): the policy learns nothing from questions that it always or never "
      "answers; take easier or harder ones, a higher rl.temperature, more rl.samples, or "
      "rl.loss='grpo', which keeps such groups"
    )
  return kept, all_


class Sample(TypedDict):
  """A completion of a `Row`."""

  text: str
  reward: float
  tokens: int
  finish_reason: str


class Row(TypedDict):
  """A group as a line of WORKDIR/rollouts/NNNNNN.jsonl."""

  task: str
  item: str
  question: str
  answer: str
  completions: list[Sample]


def as_row(group: Group) -> Row:
  """A group as JSON values."""
  task, item = group.question.task, group.question.item
  return {
    "task": task.name, "item": item.name, "question": task.user_text(item), "answer": item.answer,
    "completions": [
      {"text": c.text, "reward": r, "tokens": len(c.tokens), "finish_reason": c.finish_reason}
      for c, r in zip(group.completions, group.rewards, strict=True)
    ],
  }  # fmt: skip


def as_chats(groups: Sequence[Group]) -> list[dict[str, Any]]:
  """The completions that are right, and ended by themselves, as rows of conversations that
  supervised fine-tuning reads (data.sources with chat="messages")."""
  made = []
  for group in groups:
    task, best = group.question.task, max(group.rewards)
    asked = [{"role": "system", "content": task.system}] if task.system else []
    asked.append({"role": "user", "content": task.user_text(group.question.item).strip()})
    for c, r in zip(group.completions, group.rewards, strict=True):
      if r == best > 0 and c.finish_reason != LENGTH and (task.prefix + c.text).strip():
        answer = {"role": "assistant", "content": task.prefix + c.text}
        made.append({"messages": [*asked, answer]})
  return made


def laid_out(
  groups: Sequence[Group], rules: Rules, objective: Objective, rows: int, length: int
) -> dict[str, np.ndarray]:
  """{"tokens_BL", "targets_BL", "positions_BL", "segments_BL", "weights_BL", "advantages_BL",
  "rollout_BL"} of an update: rows without a completion are padding.

  Args:
    rows: B, at least the completions.
    length: L, at least the tokens of a prompt and its completion but one.
  """
  batch = empty(rows, length, ("weights", "advantages", "rollout"))
  if not groups:  # resampling left none for this step
    return batch
  of_groups = policy_gradient.advantages(np.array([g.rewards for g in groups]), objective)
  flat = [(g, c) for g in groups for c in g.completions]
  lengths = np.maximum([len(c.tokens) for _, c in flat], 1)
  is_learned = of_groups.ravel() > 0 if objective.keeps_best else np.ones(len(flat), bool)
  each = is_learned * policy_gradient.token_weights(
    np.where(is_learned, lengths, 0), objective, rules.sampling.max_new_tokens
  )
  for row, ((group, completion), weight, a) in enumerate(
    zip(flat, each, of_groups.ravel(), strict=True)
  ):
    own = put(batch, row, group.question.prompt, completion.tokens)
    batch["weights_BL"][row, own], batch["advantages_BL"][row, own] = weight, a
    batch["rollout_BL"][row, own] = completion.logp
  return batch


def with_policy(batch: Mapping[str, Any], own: RL) -> dict[str, Any]:
  """A placed batch of an update, what its loss needs of the policies as one value."""
  batch = dict(batch)
  arrays = {f"{name}_BL": batch.pop(f"{name}_BL", None) for name in _OF_POLICY}
  made = policy_gradient.Policy(**arrays, objective=own.objective, temperature=own.temperature)
  return {**batch, "policy": made}


def is_of_policy(batch: Mapping[str, Any]) -> bool:
  """Whether a batch is one of an update."""
  return any(f"{name}_BL" in batch for name in _OF_POLICY)


def empty(rows: int, length: int, weights: Sequence[str] = ("weights",)) -> dict[str, np.ndarray]:
  """Rows of padding; `weights` name the float32 arrays."""
  kinds = dict.fromkeys(("tokens", "targets", "positions", "segments"), np.int32)
  kinds |= dict.fromkeys(weights, np.float32)
  return {f"{name}_BL": np.zeros((rows, length), kind) for name, kind in kinds.items()}


def put(batch: dict[str, np.ndarray], row: int, prompt, completion) -> slice:
  """Writes a prompt and its completion into a row; the positions whose targets are completed."""
  text, size = [*prompt, *completion], len(prompt) + len(completion) - 1
  here = slice(0, size)
  batch["tokens_BL"][row, here], batch["targets_BL"][row, here] = text[:-1], text[1:]
  batch["positions_BL"][row, here], batch["segments_BL"][row, here] = np.arange(size), 1
  return slice(len(prompt) - 1, size)
