"""Tasks as values: names, files, families, verification. A fake stands for reasoning-gym."""

import dataclasses
import importlib.machinery
import json
import random
import sys
import types

import pytest

from fp8jax.errors import ConfigError, UserError
from fp8jax.evaluation import catalog, jsonl_tasks, reasoning_gym_tasks, tasks, verifiers


@pytest.fixture
def gym(monkeypatch):
  """reasoning_gym with one family, gcd, whose item i comes from the random numbers of seed + i."""
  module = types.ModuleType("reasoning_gym")
  module.__spec__ = importlib.machinery.ModuleSpec("reasoning_gym", None)

  class Sums:
    def __init__(self, seed, size, highest=50):
      assert highest > 1, "highest must be above 1"
      self.seed, self.highest = seed, highest

    def __getitem__(self, i):
      rng = random.Random(self.seed + i)
      a, b = rng.randint(1, self.highest), rng.randint(1, self.highest)
      entry = {"question": f"{a} + {b} =", "answer": str(a + b)}
      return entry | {"metadata": {"source_dataset": "gcd", "numbers": [a, b]}}

  def score(answer, entry):
    return 1.0 if answer == entry["answer"] else 0.1 * (entry["answer"] in answer)

  module.create_dataset = lambda name, **arguments: Sums(**arguments)
  module.get_score_answer_fn = lambda name: {"gcd": score}[name]
  monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def test_the_final_answer_is_found_in_every_form_that_models_write():
  found = {
    r"so \boxed{1}, no: \boxed{\frac{1}{2}}": r"\frac{1}{2}",
    r"an open \boxed{7 is none, \boxed{8} is": "8",
    "<answer>3</answer> and <answer>\n42\n</answer> done": "42",
    "The answer is 5.\nThe answer is: **6**.": "6",
    "steps\n#### 1,234": "1,234",
    "one\n\n two \n": "two",
    "": "",
    "The answer is $12$": "12",
    "wait...": "wait...",
  }
  assert {text: tasks.final_answer(text) for text in found} == found


def test_thoughts_are_not_verified():
  task = tasks.Task(
    "t", (tasks.Item("1", "q", "4"),), verifiers.exact, "exact", think_end="</think>"
  )
  [item] = task.items
  assert task.judge(item, "The answer is 5 </think> The answer is 4").correct
  assert not task.judge(item, "The answer is 4 </think> The answer is 5").correct
  assert task.judge(item, "The answer is 4").correct  # a thought that never ends is verified


def test_exact_regex_and_choice_verifiers():
  def judged(verify, answer, output):
    return verify(tasks.Item("1", "q", answer), output).correct

  assert judged(verifiers.exact, "Blue  whale", "The answer is blue whale.")
  assert not judged(verifiers.exact, "12", "123")
  assert judged(verifiers.regex, r"-?\d{3}", "#### -123")
  assert not judged(verifiers.regex, r"\d{3}", "#### 1234")
  for output in ("ANSWER: C", "answer: (C)", "ANSWER: A\n**ANSWER: C**", r"ANSWER: \boxed{C}"):
    assert judged(verifiers.choice, "C", output), output
  for output in ("C", "ANSWER: Correct", "ANSWER: C\nANSWER: D"):
    assert not judged(verifiers.choice, "C", output), output


def test_a_family_asks_distinct_questions_outside_the_training_set(gym, tmp_path):
  task = reasoning_gym_tasks.make("gcd", {"highest": 9}, size=30)
  questions = [item.question for item in task.items]
  assert len(set(questions)) == 30 and task.name == "gcd(highest=9)"
  assert min(int(i.name) for i in task.items) == reasoning_gym_tasks.EVALUATION_SEED
  rows = [
    {"messages": [{"role": "user", "content": questions[0].upper()},
                  {"role": "assistant", "content": questions[1]}]},
    {"conversations": [{"from": "human", "value": questions[2].replace(" ", "  ")}]},
    {"prompt": questions[3]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": questions[4][:3]},
                                               {"type": "text", "text": questions[4][3:]}]}]},
  ]  # fmt: skip
  path = tmp_path / "train.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  options = catalog.Options(train_data=str(path), questions=30)
  [apart] = catalog.load("gcd(highest=9)", options)
  left_out = set(questions) - {item.question for item in apart.items}
  assert {questions[i] for i in (0, 2, 3, 4)} <= left_out and questions[1] not in left_out
  assert len(apart.items) == 30 and apart.fingerprint != task.fingerprint
  with pytest.raises(UserError, match="4 different questions .* expected 30"):
    reasoning_gym_tasks.make("gcd", {"highest": 2}, size=30)
  with pytest.raises(UserError, match="'gcd' refuses .*highest must be above 1"):
    reasoning_gym_tasks.make("gcd", {"highest": 1})
  other = reasoning_gym_tasks.make("gcd", size=30, seed=1)
  assert {i.name for i in other.items}.isdisjoint(i.name for i in task.items)


def test_partial_credit_of_a_family_does_not_count(gym):
  [item] = reasoning_gym_tasks.make("gcd", size=1).items
  assert reasoning_gym_tasks.verify(item, f"The answer is {item.answer}.").correct
  assert reasoning_gym_tasks.verify(item, f"Well,\n{item.question} {item.answer}").correct
  sentence = f"So 1,000 is wrong, and 3 + 4 is {item.answer}, my friend."
  assert reasoning_gym_tasks.verify(item, sentence).correct
  assert not reasoning_gym_tasks.verify(item, f"{item.answer} is less than 99").correct
  words = tasks.Item(
    "1", "q", "two words", derived={"entry": dict(item.derived["entry"], answer="two words")}
  )
  near = reasoning_gym_tasks.verify(words, "about two words or so")
  assert not near.correct and near.note == "partial credit 0.10"


def test_task_files_describe_families_and_questions(gym, tmp_path):
  (tmp_path / "q.jsonl").write_text(
    '{"question": "1 + 1?", "answer": 2, "verifier": "exact"}\n\n'
    '{"question": "a number?", "answer": "\\\\d+", "verifier": "regex", "name": "n"}\n'
  )
  (tmp_path / "mine.json").write_text(
    json.dumps({"questions": "q.jsonl", "prompt": "Q: {question}", "margin": 1.5, "samples": 4,
                "temperature": 0.65, "stop": ["\n\n"], "think_end": "</think>"})
  )  # fmt: skip
  (tmp_path / "sums.json").write_text(json.dumps({"family": "gcd", "items": 5, "seed": 2}))
  names = f"{tmp_path}/mine.json, {tmp_path}/sums.json,gcd(highest=90)"
  mine, sums, plain = catalog.load(names, catalog.Options())
  assert [i.name for i in mine.items] == ["1", "n"]
  assert mine.user_text(mine.items[0]) == "Q: 1 + 1?"
  assert mine.protocol == tasks.Protocol(4, 0.65, stop=("\n\n",))
  assert (mine.margin, sums.margin, mine.name, sums.name) == (1.5, 2.0, "mine", "sums")
  assert mine.judge(mine.items[0], "2").correct and mine.judge(mine.items[1], "17").correct
  assert len(sums.items) == 5 and plain.name == "gcd(highest=90)"
  options = catalog.Options(questions=1, samples=2, temperature=0.5, max_new_tokens=7)
  [changed] = catalog.load(f"{tmp_path}/mine.json", options)
  assert len(changed.items) == 1
  assert changed.protocol == tasks.Protocol(2, 0.5, max_new_tokens=7, stop=("\n\n",))
  with pytest.raises(ConfigError, match="greedy samples"):
    catalog.load("gcd", catalog.Options(samples=2))


def test_a_fingerprint_covers_everything_that_decides_a_score():
  items = (tasks.Item("1", "q", "a"),)
  task = tasks.Task("t", items, verifiers.exact, "exact")
  changes = dict(
    items=(tasks.Item("1", "q", "b"),), verifier="regex", prompt="{question}!", system="s",
    chat=True, prefix="<think>", think_end="</think>", margin=1.0,
    protocol=tasks.Protocol(top_p=0.9),
  )  # fmt: skip
  prints = {dataclasses.replace(task, **{k: v}).fingerprint for k, v in changes.items()}
  assert len(prints | {task.fingerprint}) == len(changes) + 1
  assert dataclasses.replace(task, source="elsewhere").fingerprint == task.fingerprint
  tests = [tasks.Item("1", "q", "a", {"tests": [n]}) for n in (1, 2)]
  prints = {dataclasses.replace(task, items=(item,)).fingerprint for item in (*items, *tests)}
  assert len(prints) == 3


def test_a_task_whose_questions_were_all_trained_on_is_refused(tmp_path):
  (tmp_path / "q.jsonl").write_text('{"question": "1 + 1?", "answer": 2, "verifier": "exact"}\n')
  (tmp_path / "mine.json").write_text('{"questions": "q.jsonl"}')
  (tmp_path / "train.jsonl").write_text('{"prompt": "1  + 1?"}\n')
  options = catalog.Options(train_data=str(tmp_path / "train.jsonl"))
  for name in ("mine.json", "q.jsonl"):
    with pytest.raises(UserError, match="q.jsonl without eval.train_data has no item"):
      catalog.load(str(tmp_path / name), options)


def test_broken_names_and_files_are_refused_with_the_remedy(tmp_path):
  def refused(name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as e:
      catalog.load(str(path), catalog.Options())
    return str(e.value)

  assert "line 2 is not JSON" in refused("a.jsonl", '{"question": "q", "answer": "a"}\n{"q')
  assert "no 'question' or no 'answer'; expected" in refused("b.jsonl", '{"question": "q"}')
  typo = '{"question": "q", "answer": "a", "verifier": "exakt"}'
  assert "did you mean 'exact'" in refused("c.jsonl", typo)
  pattern = '{"question": "q", "answer": "(", "verifier": "regex"}'
  assert "line 1: '(' is no regular expression" in refused("d.jsonl", pattern)
  twice = '{"question": "q", "answer": "a", "name": "x", "verifier": "exact"}\n'
  assert "two items are called 'x'" in refused("e.jsonl", twice * 2)
  assert "has no item" in refused("f.jsonl", "\n")
  assert "did you mean 'margin'" in refused("g.json", '{"margn": 1}')
  found = refused("h.json", '{"family": "gdc", "prompt": "no place", "margin": -1}')
  assert all(text in found for text in ("did you mean 'gcd'", "lacks {question}", "positive"))
  assert "either 'questions'" in refused("i.json", "{}")
  options = catalog.Options(train_data=str(tmp_path / "none"), questions=-1)
  found = "\n".join(catalog.problems("gdc,a.jsonl,gcd(1),x y", options))
  for text in ("did you mean 'gcd'", "a.jsonl does not exist", "'gcd(1)' is no task",
               "'x y' is no task", "eval.train_data=", "eval.questions=-1"):  # fmt: skip
    assert text in found, text


def test_a_missing_package_names_its_extra(monkeypatch):
  monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
  [found] = catalog.problems("gcd", catalog.Options())
  assert found.endswith("'reasoning_gym' is not installed; pip install 'fp8jax[eval]'")


def test_user_files_are_verified_mathematically_by_default(monkeypatch, tmp_path):
  module = types.ModuleType("math_verify")
  module.parse = lambda text: [text.replace("\\boxed{", "").rstrip("}").removeprefix("= ")]
  module.verify = lambda gold, found: gold[-1] == found[-1]
  monkeypatch.setitem(sys.modules, "math_verify", module)
  path = tmp_path / "q.jsonl"
  path.write_text('{"question": "q", "answer": "1/2"}\n')
  task = jsonl_tasks.from_jsonl(str(path))
  [item] = task.items
  assert task.verifier == "math-verify" and task.judge(item, "= 1/2").correct
  assert not task.judge(item, "= 1/3").correct


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_family_of_reasoning_gym_marks_its_own_answers():
  pytest.importorskip("reasoning_gym")
  for family in reasoning_gym_tasks.FAMILIES:
    task = reasoning_gym_tasks.make(family, size=40)
    for item in task.items:
      assert item.answer, family
      for output in (f"So \\boxed{{{item.answer}}}.", f"Well.\nThe answer is {item.answer}"):
        assert task.judge(item, output).correct, (family, item.answer, task.judge(item, output))
      assert not task.judge(item, "").correct and not task.judge(item, "The answer is x").correct
  again = reasoning_gym_tasks.make("chain_sum", {"max_terms": 2}, size=40)
  assert again == reasoning_gym_tasks.make("chain_sum", {"max_terms": 2}, size=40)


@pytest.mark.slow
def test_math_verify_accepts_equal_expressions():
  pytest.importorskip("math_verify")

  def judged(answer, output):
    return verifiers.math_verify(tasks.Item("1", "q", answer), output).correct

  for answer, output in (
    ("204", "so it is \\boxed{204}"), ("33", "\\boxed{033}"), ("\\frac{1}{2}", "it is $0.5$"),
    ("(x+1)^2", "$x^2 + 2x + 1$"), ("1000", "The answer is 1,000."),
  ):  # fmt: skip
    assert judged(answer, output), (answer, output)
  for answer, output in (("204", "\\boxed{205}"), ("204", ""), ("1/2", "$\\frac{1}{3}$")):
    assert not judged(answer, output), (answer, output)
