"""Rewards of a user's function: its numbers, and what it may do wrong."""

import dataclasses

import pytest

from fp8jax.errors import UserError
from fp8jax.evaluation import verifiers
from fp8jax.evaluation.tasks import Item, Task
from fp8jax.generation.completion import Completion
from fp8jax.rl import reward, rollout

TASK = Task("sums", (), verifiers.exact, "exact", think_end="</think>")
FILE = """
def length(item, output):
  return len(output) + item.data["bonus"] * (item.answer in output)

def late(item, output):
  return {"a": float("nan"), "b": None, "c": "1.5", "d": True, "e": 10**400}[output]

def broken(item, output):
  raise KeyError("no\\nsuch thing")

NUMBER = 3
"""


@pytest.fixture
def judge(tmp_path):
  (tmp_path / "rewards.py").write_text(FILE)
  question = rollout.Question(TASK, Item("q1", "2 + 2?", "4", {"bonus": 10}), (1,))

  def of(name, *texts):
    function = reward.OfFunction(f"{tmp_path}/rewards.py:{name}")
    return function([(question, Completion((), text, "eos")) for text in texts])

  return of


def test_rewards_are_the_functions_of_what_follows_the_thoughts(judge):
  assert judge("length", "4", "so 4</think>no", "abc") == [11, 2, 3]
  assert judge("late", "c", "d") == [1.5, 1]


@pytest.mark.parametrize(
  ("name", "output", "message"),
  [
    ("broken", "x", r"sums, q1 raised KeyError: .*such thing.*, for the output 'x'"),
    ("late", "a", "sums, q1 is nan for the output 'a', expected a finite number"),
    ("late", "b", "is None for the output 'b'"),
    ("late", "e", "sums, q1 is 1000"),
    ("none", "x", "has no function 'none'; .*PATH.py:NAME"),
    ("NUMBER", "x", "has no function 'NUMBER'"),
    ("", "x", "names no function"),
  ],
)
def test_a_reward_that_is_none_is_named(judge, name, output, message):
  with pytest.raises(UserError, match=message):
    judge(name, output)


def test_a_file_that_cannot_be_run_is_named_and_another_content_is_another_fingerprint(tmp_path):
  path = tmp_path / "r.py"
  with pytest.raises(UserError, match=r"r.py cannot be run: FileNotFoundError"):
    reward.OfFunction(f"{path}:f")
  with pytest.raises(UserError, match="no_such_module cannot be run: ModuleNotFoundError"):
    reward.OfFunction("no_such_module:f")
  path.write_text("def f(item, output):\n  return 1\n")
  one = reward.OfFunction(f"{path}:f").fingerprint
  path.write_text("def f(item, output):\n  return 2\n")
  assert reward.OfFunction(f"{path}:f").fingerprint != one
  assert reward.OfFunction("sys:getsizeof").fingerprint == ""  # a module without a file


def test_a_verifier_gives_one_or_nothing():
  task = dataclasses.replace(TASK, think_end="")
  question = rollout.Question(task, Item("q", "2 + 2?", "4"), (1,))
  answers = [(question, Completion((), text, "eos")) for text in ("4", "5")]
  assert reward.of_verifiers(answers) == [1.0, 0.0]
