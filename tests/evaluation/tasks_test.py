"""Tasks as values: names, files, families, verification. A fake stands for reasoning-gym."""

import concurrent.futures
import dataclasses
import importlib.machinery
import json
import random
import re
import sys
import time
import types

import pytest

from fp8jax.errors import ConfigError, UserError
from fp8jax.evaluation import catalog, jsonl_tasks, reasoning_gym_tasks, tasks, verifiers
from fp8jax.evaluation.settings import Tasks


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
    r"Thus \boxed{203} no wait \boxed{204}": "204",
    r"\boxed{\text{E}}": "E",
    r"\boxed{\textbf{ (B). }}": "(B)",
    r"\boxed {5\text{ cm}}": r"5\text{ cm}",
    r"\boxed{a} <answer>b</answer>": "a",
    "<answer>1</answer> <answer>2 <answer>3</answer> </answer> <answer>": "3",
    "It comes from the U.S.": "It comes from the U.S.",
    "The answer is U.S.": "U.S.",
    "The answer is Ph.D.": "Ph.D.",
    "The answer is 3.5.": "3.5",
    "The answer is not 5, the answer is 6.": "6",
    "The answer is 7.\n#### \n": "7",
    "####\n\n42": "42",
  }
  assert {text: tasks.final_answer(text) for text in found} == found


def _last_box(output):
  """The definition, in quadratic time: the last start after which the braces close."""
  for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", output)]):
    depth = 1
    for end in range(start, len(output)):
      depth += {"{": 1, "}": -1}.get(output[end], 0)
      if depth == 0:
        return output[start:end]
  return None


def test_the_last_box_is_the_one_of_the_definition():
  rng, boxes = random.Random(0), 0
  for _ in range(3000):
    output = "".join(
      rng.choices(("\\boxed{", "\\boxed {", "{", "}", "x", " "), k=rng.randint(1, 14))
    )
    expected = _last_box(output)
    assert tasks.boxed_answer(output) == expected, output
    boxes += expected is not None
  assert 300 < boxes < 2700


@pytest.mark.parametrize(
  "start, piece",
  [("", x) for x in ("\\boxed{", "\\boxed{}", "\\boxed {\\text{", "<answer>", "</answer>", "####",
                     "#### \n", "answer is ", "answer:\n", "Answer: (", "1,", "a.b. ")]
  + [("answer: ", " \n"), ("ANSWER: ", " "), ("ANSWER: \\boxed{", "}{"), ("</answer>", "<answer>")],
)  # fmt: skip
def test_verification_is_linear_in_the_outputs_length(start, piece):
  """A model that repeats itself; in quadratic time 10^5 pieces take minutes."""
  item, output = tasks.Item("1", "q", "A"), start + piece * 100_000
  begin = time.process_time()
  for verify in (verifiers.exact, verifiers.choice, verifiers.regex):
    verify(item, output)
  assert time.process_time() - begin < 2


def test_a_regular_expression_has_a_time_limit(monkeypatch):
  monkeypatch.setattr(verifiers, "SECONDS", 0.3)
  item = tasks.Item("1", "q", "(a+)+b")
  task = tasks.Task("t", (item,), verifiers.regex, "regex")
  begin = time.monotonic()
  verdict = task.judge(item, "a" * 40)
  assert not verdict.correct and "longer than" in verdict.note
  assert time.monotonic() - begin < 20
  assert task.judge(item, "aab").correct  # the next one is verified as before


@pytest.mark.parametrize("verify", [verifiers.regex, verifiers.math_verify])
def test_another_thread_verifies_nothing_that_it_could_not_stop(monkeypatch, verify):
  """math-verify's own alarm raises ValueError there, which would be a wrong answer."""
  monkeypatch.setitem(sys.modules, "math_verify", types.ModuleType("math_verify"))
  item = tasks.Item("1", "q", "a")
  task = tasks.Task("t", (item,), verify, "v")
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    with pytest.raises(UserError, match="Python hands signals to it alone"):
      pool.submit(task.judge, item, "a").result()


def test_what_a_verifier_raises_is_a_verdict_but_for_the_machines_errors():
  item = tasks.Item("1", "q", "a")

  def task(error):
    def verify(item, output):
      raise error

    return tasks.Task("t", (item,), verify, "raises")

  for error in (RecursionError("deep"), ValueError("a\nb"), ZeroDivisionError(), MemoryError()):
    verdict = task(error).judge(item, "x")
    assert not verdict.correct and verdict.note.startswith(f"{type(error).__name__}: ")
  for error in (UserError("no sandbox"), OSError("no process"), ImportError("math_verify")):
    with pytest.raises(type(error)):
      task(error).judge(item, "x")


def test_thoughts_are_not_verified():
  task = tasks.Task(
    "t", (tasks.Item("1", "q", "4"),), verifiers.exact, "exact", think_end="</think>"
  )
  [item] = task.items
  assert task.judge(item, "The answer is 5 </think> The answer is 4").correct
  assert not task.judge(item, "The answer is 4 </think> The answer is 5").correct
  assert task.judge(item, "The answer is 4").correct  # a thought that never ends is verified
  # Thoughts end at the last tag: a model may write of "</think>" while it thinks.
  assert task.judge(item, r"\boxed{3} </think> no </think> The answer is 4").correct
  assert not task.judge(item, r"3 </think> \boxed{4} </think> 5").correct


def test_exact_regex_and_choice_verifiers():
  def judged(verify, answer, output):
    return verify(tasks.Item("1", "q", answer), output).correct

  assert judged(verifiers.exact, "Blue  whale", "The answer is blue whale.")
  assert not judged(verifiers.exact, "12", "123")
  assert judged(verifiers.exact, "Caf\u00e9 12", "cafe\u0301 \uff11\uff12")
  assert judged(verifiers.exact, "パリ", "ﾊﾟﾘ")
  for gold, output in (("10²", "102"), ("2³", "23"), ("½", "1⁄2"), ("x₁", "x1")):
    assert not judged(verifiers.exact, gold, output)
  assert judged(verifiers.regex, r"-?\d{3}", "#### -123")
  assert not judged(verifiers.regex, r"\d{3}", "#### 1234")
  for output in ("ANSWER: C", "answer: (C)", "ANSWER: A\n**ANSWER: C**", r"ANSWER: \boxed{C}"):
    assert judged(verifiers.choice, "C", output), output
  assert judged(verifiers.exact, "E", r"\boxed{\text{E}}")
  assert judged(verifiers.exact, "U.S.", "The answer is U.S.")
  assert judged(verifiers.exact, "Acme Inc.", "The answer is Acme Inc.")
  for output in (r"ANSWER: \text{C}", r"ANSWER: $\boxed{\text{C}}$", "ANSWER: I say E\nAnswer: c"):
    assert judged(verifiers.choice, "C", output), output
  # openai/simple-evals: (?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?
  assert not judged(verifiers.choice, "B", "Answer: I think it is (B)")
  assert verifiers.choice(tasks.Item("1", "q", "B"), "Answer: I think it is (B)").extracted == ""
  for output in ("C", "ANSWER: Correct", "ANSWER: C\nANSWER: D"):
    assert not judged(verifiers.choice, "C", output), output


def test_a_family_asks_distinct_questions_outside_the_training_set(gym, tmp_path):
  task = reasoning_gym_tasks.make("gcd", {"highest": 9}, size=30)
  questions = [item.question for item in task.items]
  assert len(set(questions)) == 30 and task.name == "gcd(highest=9)"
  assert task.source == "reasoning-gym, gcd, seed 1000000000, {'highest': 9}"
  assert min(int(i.name) for i in task.items) == 10**9  # as experiments/guide/evaluation.md says
  rows = [
    {"messages": [{"role": "user", "content": questions[0].upper()},
                  {"role": "assistant", "content": questions[1]}]},
    {"conversations": [{"from": "human", "value": questions[2].replace(" ", "  ")}]},
    {"prompt": questions[3]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": questions[4][:3]},
                                               {"type": "text", "text": questions[4][3:]}]}]},
  ]  # fmt: skip
  rows += [  # every turn of the user, whatever stands between
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"},
                  {"role": "assistant", "content": "a"},
                  {"role": "user", "content": questions[5]}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a"},
                       {"from": "human", "value": questions[6]}]},
  ]  # fmt: skip
  path = tmp_path / "train.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  settings = Tasks("gcd(highest=9)", train_data=str(path), questions=30)
  [apart] = catalog.load(settings)
  left_out = set(questions) - {item.question for item in apart.items}
  assert {questions[i] for i in (0, 2, 3, 4, 5, 6)} <= left_out and questions[1] not in left_out
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
  mine, sums, plain = catalog.load(Tasks(names))
  assert [i.name for i in mine.items] == ["1", "n"]
  assert mine.user_text(mine.items[0]) == "Q: 1 + 1?"
  assert mine.protocol == tasks.Protocol(4, 0.65, stop=("\n\n",))
  assert (mine.margin, sums.margin, mine.name, sums.name) == (1.5, 2.0, "mine", "sums")
  assert mine.judge(mine.items[0], "2").correct and mine.judge(mine.items[1], "17").correct
  assert len(sums.items) == 5 and plain.name == "gcd(highest=90)"
  protocol = "(samples=2, temperature=0.5, max_new_tokens=7)"
  [changed] = catalog.load(Tasks(f"{tmp_path}/mine.json{protocol}", questions=1))
  assert len(changed.items) == 1
  assert changed.protocol == tasks.Protocol(2, 0.5, max_new_tokens=7, stop=("\n\n",))
  with pytest.raises(ConfigError, match="greedy samples"):
    catalog.load(Tasks("gcd(samples=2)"))


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
  for name in ("mine.json", "q.jsonl"):
    with pytest.raises(UserError, match="q.jsonl without eval.train_data has no item"):
      catalog.load(Tasks(str(tmp_path / name), train_data=str(tmp_path / "train.jsonl")))


def test_broken_names_and_files_are_refused_with_the_remedy(tmp_path):
  def refused(name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as e:
      catalog.load(Tasks(str(path)))
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
  number = '{"question": "q", "answer": %s, "verifier": "exact"}'
  for text in ("NaN", "Infinity", "-Infinity", "1e999"):
    assert "line 1: answer" in refused("n.jsonl", number % text), text
  (tmp_path / "u.jsonl").write_bytes(b'{"question": "q", "answer": "a"}\n{"question": "\xff"}\n')
  with pytest.raises(UserError, match="u.jsonl, line 2"):
    catalog.load(Tasks(str(tmp_path / "u.jsonl")))
  assert "did you mean 'margin'" in refused("g.json", '{"margn": 1}')
  found = refused("h.json", '{"family": "gdc", "prompt": "no place", "margin": -1}')
  assert all(text in found for text in ("did you mean 'gcd'", "lacks {question}", "positive"))
  assert "either 'questions'" in refused("i.json", "{}")
  names = "gdc,a.jsonl,gcd(1),x y,gcd(samples=0),gcd(samples=1.5),a.jsonl(top=1)"
  found = "\n".join(catalog.problems(Tasks(names, train_data=str(tmp_path / "none"))))
  [nothing] = catalog.problems(Tasks(" ,,"))
  assert "eval.tasks=' ,,' names no task; or name a file" in nothing
  for text in (
    "did you mean 'gcd'", "a.jsonl does not exist", "'gcd(1)' is no task", "'x y' is none of",
    "eval.train_data=", "samples=0 must be", "samples must be a number", "not top",
  ):  # fmt: skip
    assert text in found, text


@pytest.mark.parametrize("turns", (["hi"], "hi", {"role": "user"}, 5, [None]))
def test_training_sets_of_another_shape_are_refused(tmp_path, turns):
  path = tmp_path / "train.jsonl"
  path.write_text(json.dumps({"question": "q"}) + "\n" + json.dumps({"messages": turns}) + "\n")
  with pytest.raises(UserError, match="train.jsonl, line 2: its turns .* expected a list"):
    tasks.read_trained(str(path))


def test_tasks_of_one_file_are_refused_and_numbers_are_bounded(gym, tmp_path):
  line = '{"question": "q", "answer": "a", "verifier": "exact"}\n'
  for name in ("a b", "a_b", "A+b", "!", "c"):
    (tmp_path / f"{name}.jsonl").write_text(line)

  def load(*names, protocol=""):
    return catalog.load(Tasks(",".join(f"{tmp_path}/{x}.jsonl{protocol}" for x in names)))

  for names in (("a b", "a_b"), ("c", "c"), ("a b", "A+b")):
    with pytest.raises(ConfigError) as e:
      load(*names)
    [problem] = e.value.problems
    assert f"{names[0]!r} and {names[1]!r} would be stored in one file" in problem
  with pytest.raises(ConfigError, match="'!' has no letter or digit"):
    load("!")
  (tmp_path / "d (1).jsonl").write_text(line)
  [mine, drawn] = load("d (1)"), load("d (1)", protocol="(samples=2, temperature=0.5)")
  assert (mine[0].protocol.samples, drawn[0].protocol.samples) == (1, 2)
  [most] = load("c", protocol=f"(samples={tasks.MOST_SAMPLES}, temperature=1.0)")
  assert most.protocol.samples == 10_000
  with pytest.raises(ConfigError, match="samples=10001 must be from 1 to 10,000"):
    load("c", protocol="(samples=10001, temperature=1.0)")
  with pytest.raises(UserError, match="500,001 questions of 'gcd', expected at most 500,000"):
    catalog.load(Tasks("gcd", questions=500_001))


def test_a_missing_package_names_its_extra(monkeypatch):
  monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
  [found] = catalog.problems(Tasks("gcd"))
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
  assert task.judge(item, "Thus \\boxed{1/3} no wait \\boxed{1/2}").correct
  assert not task.judge(item, "= 1/3").correct
  asked, parse = [], module.parse
  module.parse = lambda text: asked.append(text) or parse(text)
  verifiers._gold.cache_clear()
  assert task.judge(item, "<answer>**1/2**</answer>").correct
  # What is expected is an expression as it stands, not a sentence with one.
  assert asked == ["\\boxed{1/2}", "**1/2**", "\\boxed{1/2}"]
  verifiers._gold.cache_clear()


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


@pytest.mark.parametrize("answer", ["*", "$", "."])
def test_an_empty_answer_is_never_right(answer):
  for output in ("", "\\boxed{}", answer):
    assert not verifiers.exact(tasks.Item("1", "q", answer), output).correct


@pytest.mark.slow
def test_math_verify_accepts_equal_expressions():
  pytest.importorskip("math_verify")

  def judged(answer, output):
    return verifiers.math_verify(tasks.Item("1", "q", answer), output).correct

  for answer, output in (
    ("204", "so it is \\boxed{204}"), ("33", "\\boxed{033}"), ("\\frac{1}{2}", "it is $0.5$"),
    ("(x+1)^2", "$x^2 + 2x + 1$"), ("1000", "The answer is 1,000."),
    ("204", "Thus \\boxed{203} no wait \\boxed{204}"),
    ("1/2", "<answer>$\\frac12$</answer> of 7 < 9"), ("5", "<answer>The answer is 5</answer>"),
    ("5", "<answer>**5**</answer>"), ("1234", "<answer>1,234</answer>"),
    ("E", "\\boxed{\\text{E}}"),
  ):  # fmt: skip
    assert judged(answer, output), (answer, output)
  for answer, output in (("204", "\\boxed{205}"), ("204", ""), ("1/2", "$\\frac{1}{3}$"),
                         ("203", "Thus \\boxed{203} no wait \\boxed{204}")):  # fmt: skip
    assert not judged(answer, output), (answer, output)


def test_questions_of_conversations_as_json_text_count_too(tmp_path):
  """Training reads messages that a cell has as text; so does the check of contamination."""
  turns = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "2"}]
  path = tmp_path / "train.jsonl"
  path.write_text(json.dumps({"messages": json.dumps(turns)}) + "\n")
  assert tasks.read_trained(str(path)) == {tasks.normalized("What is 1+1?")}


def test_a_verifiers_package_is_asked_for_before_anything_is_generated(tmp_path, monkeypatch):
  path = tmp_path / "q.jsonl"
  path.write_text('{"question": "1+1", "answer": "2"}\n')
  made = catalog.load(Tasks(tasks=str(path)))  # RL may have a reward of its own
  monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ConfigError, match="math_verify"):
    catalog.check_packages(made)
  path.write_text('{"question": "1+1", "answer": "2", "verifier": "exact"}\n')
  catalog.check_packages(catalog.load(Tasks(tasks=str(path))))
