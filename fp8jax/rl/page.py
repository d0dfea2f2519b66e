"""The parts of a run's report that --job=rl has: rewards, the policy's metrics, and samples."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

from fp8jax import records
from fp8jax.report import charts
from fp8jax.report.files import RunFiles
from fp8jax.report.page import Section
from fp8jax.rl.rollout import FOLDER, Row, Sample

# Groups of a rollout that a page shows, and letters of a completion.
_GROUPS, _LETTERS = 3, 400
_DRAWN = (
  ("rl/length", "tokens of a completion", "~s"),
  ("rl/entropy", "entropy of the policy, nats per token (estimate: -log p of what it drew)", "~s"),
  ("rl/cut", "share of completions cut at rl.max_new_tokens", ".0%"),
  ("rl/groups", "groups that a rollout is learned from", "~s"),
  ("rl/equal_groups", "drawn groups of equal rewards", "~s"),
  ("rl/accuracy", "share of pairs in which the preferred answer is ahead", ".0%"),
  ("rl/margin", "reward of the preferred answer over the other's", "~s"),
  ("rl/clipped", "share of tokens that are clipped", ".1%"),
  ("rl/kl_to_old", "KL to the policy that drew, nats per token (k3)", "~s"),
  ("rl/kl_to_reference", "KL to the reference, nats per token (k3)", "~s"),
  ("rl/mismatch", "|log p of training - log p of the rollout|, nats per token", "~s"),
  ("rl/truncated", "share of tokens whose correction is cut", ".1%"),
  ("rl/rollout_tokens_per_second", "tokens per second of the rollout", "~s"),
)


def of_run(run: RunFiles) -> list[Section]:
  """Parts of a run's report; none of another job's."""
  if not any(name.startswith("rl/") for name in run.curves):
    return []
  band = ("rl/reward_low", "rl/reward_high")
  drawn = {"rl_reward": charts.metric(run, "rl/reward", "reward of a rollout, 95 %", band=band)}
  for name, title, digits in _DRAWN:
    drawn[name.replace("/", "_")] = charts.metric(run, name, title, digits=digits)
  note = (
    "A reward is of all questions that were drawn, at rl.temperature, less the penalty of "
    "rl.overlong; its interval is over the questions of one rollout. Held-out questions are in the "
    "section Loss."
  ) * ("rl/reward" in run.curves)
  return [Section("Reinforcement learning", note, charts.specs(**drawn)), *_samples(run.workdir)]


def _samples(workdir: str) -> list[Section]:
  """The best and the worst completion of some questions of the first and the last rollout."""
  folder = os.path.join(workdir, FOLDER)
  there = os.listdir(folder) if os.path.isdir(folder) else ()
  names = sorted(name for name in there if name.endswith(".jsonl"))
  rows: list[Sequence[Any]] = []
  for name in dict.fromkeys((*names[:1], *names[-1:])):
    number = str(int(name.partition(".")[0]))
    groups = records.rows(os.path.join(folder, name), Row, "delete it, the report goes without")
    for _, group in itertools.islice(groups, _GROUPS):
      ordered = sorted(group["completions"], key=lambda c: c["reward"])
      rows += [_shown(number, group, one) for one in (ordered[-1], ordered[0])]
  if not rows:
    return []
  columns = ("rollout", "question", "reward", "tokens", "completion")
  note = (
    f"The best and the worst completion of {_GROUPS} questions of the first and the last rollout; "
    f"{FOLDER}/ has all."
  )
  return [Section("Samples", note, tables=[(columns, rows)])]


def _shown(number: str, group: Row, one: Sample) -> tuple[str, ...]:
  def short(text: str) -> str:
    return text if len(text) <= _LETTERS else text[:_LETTERS] + " ..."

  reward, size = f"{one['reward']:.3g}", str(one["tokens"])
  return number, short(group["question"]), reward, size, short(one["text"])
