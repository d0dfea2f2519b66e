"""Rollouts as batches: places, weights and advantages by hand; resampling; penalties."""

import dataclasses
import json

import numpy as np
import pytest

from fp8jax.data import sources
from fp8jax.errors import UserError
from fp8jax.evaluation import verifiers
from fp8jax.evaluation.tasks import Item, Protocol, Task
from fp8jax.generation.completion import Completion
from fp8jax.generation.settings import Sampling
from fp8jax.ops.policy_gradient import OBJECTIVES
from fp8jax.rl import pairs, reward, rollout
from fp8jax.rl.settings import Rules

TASK = Task("sums", (), verifiers.exact, "exact")


def question(name: str, answer: str, prompt) -> rollout.Question:
  return rollout.Question(TASK, Item(name, name, answer), tuple(prompt))


def completion(text: str, tokens, reason="eos") -> Completion:
  return Completion(tuple(tokens), text, reason, tuple(-0.5 * t for t in tokens))


RULES = Rules(2, 2, Sampling(temperature=1.0, max_new_tokens=8))


def drawn(texts):
  """A generator that answers questions by their prompt's first token."""
  return lambda prompts, sampling, samples: [
    [completion(t, [7, 8, 9][: 1 + n]) for n, t in enumerate(texts[p[0]])] for p in prompts
  ]


def test_an_update_is_laid_out_as_written_by_hand():
  questions = iter([question("a", "4", [1, 2, 3]), question("b", "5", [4, 5])])
  groups, all_ = rollout.collect(
    questions, drawn({1: ["4", "no"], 4: ["5", "5"]}), reward.of_verifiers, RULES,
    OBJECTIVES["dr_grpo"],
  )  # fmt: skip
  assert all_ == groups and [g.rewards for g in groups] == [(1.0, 0.0), (1.0, 1.0)]
  batch = rollout.laid_out(groups, RULES, OBJECTIVES["dr_grpo"], 5, 6)
  assert batch["tokens_BL"].tolist()[:2] == [[1, 2, 3, 0, 0, 0], [1, 2, 3, 7, 0, 0]]
  assert batch["targets_BL"].tolist()[:2] == [[2, 3, 7, 0, 0, 0], [2, 3, 7, 8, 0, 0]]
  assert batch["tokens_BL"][3].tolist() == [4, 5, 7, 0, 0, 0] and not batch["segments_BL"][4].any()
  weights = np.zeros((5, 6))
  weights[0, 2] = weights[1, 2:4] = weights[2, 1] = weights[3, 1:3] = 1 / (4 * 8)
  np.testing.assert_allclose(batch["weights_BL"], weights)
  np.testing.assert_array_equal(batch["advantages_BL"][1, :5], [0, 0, -0.5, -0.5, 0])
  assert not batch["advantages_BL"][2:].any()
  np.testing.assert_array_equal(batch["rollout_BL"][1, :5], [0, 0, -3.5, -4.0, 0])


def test_questions_that_end_at_other_texts_are_drawn_apart():
  """With random numbers of their own, in the order in which they were asked."""
  line = dataclasses.replace(TASK, name="line", protocol=Protocol(stop=("\n",)))
  tasks = {1: TASK, 2: line, 3: TASK, 4: line}
  asked = [rollout.Question(t, Item(str(n), str(n), "4"), (n,)) for n, t in tasks.items()]
  calls, answer = [], drawn({n: [f"{n}", "4"] for n in tasks})

  def generate(prompts, sampling, samples):
    calls.append(([p[0] for p in prompts], sampling.stop, sampling.seed))
    return answer(prompts, sampling, samples)

  rules = dataclasses.replace(
    RULES, prompts=4, rounds=3, sampling=dataclasses.replace(RULES.sampling, seed=5, stop=("z",))
  )
  groups, _ = rollout.collect(
    iter(asked), generate, reward.of_verifiers, rules, OBJECTIVES["dr_grpo"]
  )  # fmt: skip
  assert [g.completions[0].text for g in groups] == ["1", "2", "3", "4"]
  assert [call[:2] for call in calls] == [([1, 3], ("z",)), ([2, 4], ("z", "\n"))]
  seeds = [call[2] for call in calls]
  assert seeds[0] == 5 and seeds[1] not in range(5, 5 + rules.rounds)


def test_groups_of_equal_rewards_make_way_and_all_equal_is_an_error():
  questions = lambda: (question(str(n), "4", [n]) for n in range(99))  # noqa: E731
  rules, judge = Rules(2, 2, RULES.sampling, rounds=3), reward.of_verifiers
  texts = {n: ["4", "no" if n in (2, 4, 5) else "4"] for n in range(99)}
  seeds, answer = [], drawn(texts)
  remembering = lambda p, sampling, n: seeds.append(sampling.seed) or answer(p, sampling, n)  # noqa: E731
  groups, all_ = rollout.collect(questions(), remembering, judge, rules, OBJECTIVES["dapo"])
  assert [g.question.item.name for g in groups] == ["2", "4"] and len(all_) == 5
  assert len(set(seeds)) == len(seeds) > 1  # a question that comes again has other answers
  with pytest.raises(UserError, match="0 of 6 groups of 2 completions have unequal rewards"):
    same = drawn({n: ["4"] * 2 for n in range(9)})
    rollout.collect(questions(), same, judge, rules, OBJECTIVES["dapo"])


@pytest.mark.parametrize(
  ("tokens", "reason", "penalty"),
  [(4, "eos", 0.0), (5, "eos", 0.25), (8, "eos", 1.0), (8, "length", 1.0), (2, "length", 1.0)],
)
def test_long_completions_pay(tokens, reason, penalty):
  rules, asked = Rules(1, 1, RULES.sampling, overlong=4), iter([question("a", "4", [1])])
  answer = lambda *_: [[completion("4", range(tokens), reason)]]  # noqa: E731
  (group,), _ = rollout.collect(
    asked, answer, reward.of_verifiers, rules, OBJECTIVES["grpo"]
  )  # fmt: skip
  assert group.rewards == (1 - penalty,)


def test_logits_that_are_not_finite_stop_the_rollout():
  bad = lambda *_: [[completion("4", [7]), completion("", [], "error")]]  # noqa: E731
  with pytest.raises(UserError, match="1 of 2 completions ended at logits that are not finite"):
    asked = iter([question("a", "4", [1])])
    rules = Rules(1, 2, RULES.sampling)
    rollout.collect(asked, bad, reward.of_verifiers, rules, OBJECTIVES["grpo"])


def test_right_answers_are_conversations_that_fine_tuning_reads(tmp_path):
  task = dataclasses.replace(TASK, system="Be short.", prefix="= ")
  asked = rollout.Question(task, Item("a", "2+2?", "4"), (1,))
  ended, cut = completion("4", [7]), completion("4", [7, 7], "length")
  groups = [
    rollout.Group(asked, (ended, completion("5", [7]), cut), (1.0, 0.0, 1.0)),
    rollout.Group(asked, (ended, ended), (0.0, 0.0), is_equal=True),
  ]
  path = tmp_path / "kept.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rollout.as_chats(groups)))
  entry = {"kind": "jsonl", "path": str(path), "chat": "messages", "field": "messages"}
  read = sources.open_source(entry)
  assert len(read) == 1 and read[0]["messages"] == [
    {"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "= 4"},
  ]  # fmt: skip


def test_rejection_weighs_the_best_alone():
  rule = OBJECTIVES["rejection"]
  asked = question("a", "4", [1, 2])
  group = rollout.Group(asked, tuple(completion("", range(3, 4 + n)) for n in range(3)), (0, 1, 1))
  batch = rollout.laid_out([group], RULES, rule, 4, 6)
  weights = np.zeros((4, 6), np.float32)
  weights[1, 1:3] = weights[2, 1:4] = 1 / 5
  np.testing.assert_array_equal(batch["weights_BL"], weights)
  wrong = rollout.Group(asked, group.completions, (0, 0, 0), is_equal=True)
  assert not rollout.laid_out([wrong], RULES, rule, 4, 6)["weights_BL"].any()


def test_pairs_of_groups_are_the_first_best_and_worst():
  answers = tuple(completion("", [3 + n, 9]) for n in range(4))
  group = rollout.Group(question("a", "4", [1, 2]), answers, (0.5, 1.0, 0.0, 1.0))
  equal = rollout.Group(question("b", "4", [1]), answers[:2], (1.0, 1.0), is_equal=True)
  assert pairs.of_groups([equal, group]) == [pairs.Pair((1, 2), (4, 9), (5, 9))]
