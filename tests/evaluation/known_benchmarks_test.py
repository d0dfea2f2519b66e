"""Benchmarks with InfiR2's protocol, on made-up items in the files' formats."""

import base64
import csv
import json
import pickle
import sys
import types
import zlib

import pytest

from fp8jax.errors import UserError
from fp8jax.evaluation import benchmarks, catalog, tasks
from fp8jax.evaluation.settings import Tasks


@pytest.fixture(autouse=True)
def math_verify(monkeypatch):
  module = types.ModuleType("math_verify")
  module.__spec__ = types.SimpleNamespace()
  module.parse = lambda text: [text.rpartition("{")[2].partition("}")[0]]
  module.verify = lambda gold, found: gold[-1] == found[-1]
  monkeypatch.setitem(sys.modules, "math_verify", module)


def _aime(path, lines=30):
  rows = [{"problem": f"Find {i}.", "answer": f"{i:03d}"} for i in range(lines)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _gpqa(path):
  heads = ["Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
  with open(path, "w", newline="") as f:
    writer = csv.DictWriter(f, heads)
    writer.writeheader()
    for i in range(198):
      writer.writerow(dict(zip(heads, (f"Which, {i}?", "right", "w1", "w2", "w3"))))


def _code(path):
  def row(name, date, public, private, **changes):
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(private)))).decode()
    return dict(
      question_id=name, question_content=f"Task {name}.", starter_code="", contest_date=date,
      public_test_cases=json.dumps(public), private_test_cases=packed, metadata="{}",
    ) | changes  # fmt: skip

  tests = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
  calls = [{"input": "[1, 2]\n5", "output": "[1, 2, 5]", "testtype": "functional"}]
  more = [{"input": "4 5\n", "output": "9\n", "testtype": "stdin"}]
  rows = [
    row("old", "2024-07-31T00:00:00", tests, more),
    row("first", "2024-08-01T00:00:00", tests, more),
    row("call", "2025-02-01T00:00:00", calls, [], metadata='{"func_name": "append"}',
        starter_code="class Solution:\n    def append(self, xs, x):", private_test_cases="[]"),
    row("new", "2025-02-02T00:00:00", tests, more),
  ]  # fmt: skip
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_protocols_are_those_of_infir2(tmp_path):
  """Specification: arXiv:2509.22536 and its evaluation scripts."""
  _aime(tmp_path / "aime24.jsonl")
  _aime(tmp_path / "aime25.jsonl")
  _gpqa(tmp_path / "gpqa_diamond.csv")
  _code(tmp_path / "livecodebench_v5.jsonl")
  names = "aime24,aime25,gpqa_diamond,livecodebench_v5"
  settings = Tasks(names, data_dir=str(tmp_path), allow_code_execution=True)
  assert catalog.problems(settings) == []
  made = catalog.load(settings)
  expected = ((32, 31_000), (32, 31_000), (8, 26_000), (8, 27_000))
  for task, (samples, length) in zip(made, expected, strict=True):
    assert task.protocol == tasks.Protocol(samples, 0.65, 0.95, length)
    assert task.think_end == "</think>" and task.chat
  aime, _, gpqa, code = made
  assert aime.prefix == "<think>\n" and "boxed" in aime.system
  assert len(aime.items) == 30 and aime.items[7].answer == "7"
  assert aime.judge(aime.items[7], "no 8 </think> \\boxed{7}").correct
  letters = {item.answer for item in gpqa.items}
  assert letters == set("ABCD") and len(gpqa.items) == 198
  for item in gpqa.items:
    assert f"{item.answer}) right" in item.question
    assert gpqa.judge(item, f"ANSWER: {item.answer}").correct
  assert gpqa.items == benchmarks.make("gpqa_diamond", str(tmp_path)).items
  assert [i.name for i in code.items] == ["first", "call"]  # the contests of the window
  assert "def append" in code.items[1].question


def test_missing_data_and_forbidden_code_are_named(tmp_path):
  names = "aime24,gpqa_diamond,livecodebench_v5"
  found = catalog.problems(Tasks(names, data_dir=str(tmp_path)))
  assert len(found) == 4
  for text, words in zip(found, ("aime24.jsonl", "gpqa_diamond.csv", "livecodebench_v5.jsonl")):
    assert f"{tmp_path}/{words}, which does not exist" in text and "eval.data_dir" in text
  assert 'a CSV with columns "Question"' in found[1]
  assert "eval.allow_code_execution=True" in found[3]
  _code(tmp_path / "livecodebench_v5.jsonl")
  with pytest.raises(UserError, match="allow_code_execution"):
    benchmarks.make("livecodebench_v5", str(tmp_path))
  _aime(tmp_path / "aime24.jsonl", lines=29)
  with pytest.raises(UserError, match="has 29 items and aime24 has 30"):
    benchmarks.make("aime24", str(tmp_path))
  (tmp_path / "gpqa_diamond.csv").write_bytes(b"Question\n,\xff\n")
  with pytest.raises(UserError, match="gpqa_diamond.csv, line 2: bad UTF-8 at byte 1"):
    benchmarks.make("gpqa_diamond", str(tmp_path))
  (tmp_path / "aime25.jsonl").write_text('{"problem": "x", "answer": "1/2"}')
  with pytest.raises(UserError, match="line 1: expected 'problem' and an 'answer' from 0 to 999"):
    benchmarks.make("aime25", str(tmp_path))


def test_private_tests_are_read_without_unpickling(tmp_path):
  class Evil:
    def __reduce__(self):
      return (open, (str(tmp_path / "touched"), "w"))

  packed = base64.b64encode(zlib.compress(pickle.dumps([Evil(), "[]"]))).decode()
  with pytest.raises(ValueError, match="something else than one text"):
    benchmarks._private_tests(packed)
  assert not (tmp_path / "touched").exists()


def test_programs_pass_or_fail_their_tests(tmp_path):
  _code(tmp_path / "livecodebench_v5.jsonl")
  task = benchmarks.make("livecodebench_v5", str(tmp_path), allow_code=True)
  first, call = task.items
  right = "```python\nprint(sum(map(int, input().split())))\n```"
  assert task.judge(first, f"```\nprint(0)\n```</think> so:\n{right}").correct
  assert task.judge(first, f"```\nprint(0)\n```\nwhich is wrong:\n{right}").correct
  assert task.judge(first, "```python\nprint(3)\n```").note == "test 2: wrong output"
  assert task.judge(first, "print(3)").note == "no fenced block of code"
  assert "ZeroDivisionError" in task.judge(first, "```\n1 / 0\n```").note
  method = "class Solution:\n  def append(self, xs: List[int], x):\n    return xs + [x]"
  assert task.judge(call, f"```python\n{method}\n```").correct
  assert not task.judge(call, f"```python\n{method.replace('xs + [x]', '[x] + xs')}\n```").correct
