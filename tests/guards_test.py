"""Every guard is red where its fact moved without a reason, and green with one or at its bound."""

import json

import guards
import numpy as np
import pytest

HISTORIES = {
  "golden a.json x": [["d1", ""]],
  "program 1.0 bf16": [["p1", ""], ["p2", "another reduction"]],
  "lines lab": [[100, ""]],
  "mark slow": [[7.0, ""]],
  "tolerance A 0": [[1e-3, ""]],
}
FACTS = {name: history[-1][0] for name, history in HISTORIES.items()}


@pytest.mark.parametrize(
  "changes, found",
  [
    ({}, {}),
    ({"golden a.json x": "d2"}, {"golden a.json x": "was d1, is d2"}),
    ({"program 1.0 bf16": "p1"}, {"program 1.0 bf16": "was p2, is p1"}),
    ({"lines lab": 101}, {"lines lab": "was 100 at most, is 101"}),
    ({"lines lab": 99, "mark slow": 6.0, "tolerance A 0": 5e-4}, {}),
    ({"mark slow": 8.0}, {"mark slow": "was 7 at most, is 8"}),
    ({"tolerance A 0": 2e-3}, {"tolerance A 0": "was 0.001 at most, is 0.002"}),
    ({"golden b.json y": "d3"}, {"golden b.json y": "is new"}),
  ],
)
def test_a_fact_moves_only_where_its_kind_allows(changes, found):
  assert guards.moved(FACTS | changes, HISTORIES) == found


def test_a_fact_that_is_gone_moved_unless_it_is_of_another_jax():
  facts = {k: v for k, v in FACTS.items() if not k.startswith("golden")}
  assert guards.moved(facts, HISTORIES) == {"golden a.json x": "is gone"}
  facts = {("program 2.0 bf16" if k.startswith("program") else k): v for k, v in FACTS.items()}
  assert guards.moved(facts, HISTORIES) == {"program 2.0 bf16": "is new"}


def test_a_later_value_has_a_reason_unless_it_is_a_smaller_bound():
  histories = HISTORIES | {
    "golden c": [["d", ""], ["e", " "]],
    "mark skip": [[3.0, ""], [4.0, ""]],
    "mark gpu": [[3.0, ""], [2.0, ""]],
  }
  assert guards.without_reason(histories, {}) == [
    "golden c: e has no reason", "mark skip: 4.0 has no reason"
  ]  # fmt: skip


def test_a_history_is_only_appended_to():
  rewritten = HISTORIES | {"lines lab": [[200, ""]]}
  (problem,) = guards.without_reason(rewritten, HISTORIES)
  assert problem.startswith("lines lab: its history was rewritten")
  longer = HISTORIES | {"lines lab": [[100, ""], [120, "a feature"]]}
  assert guards.without_reason(longer, HISTORIES) == []


def test_cpu_time_is_bounded_by_file_and_in_all(tmp_path):
  path = tmp_path / "seconds.json"

  def problems(taken):
    path.write_text(json.dumps(taken))
    return guards.cpu(path, {"a_test.py": 10.0})

  assert problems({"a_test.py": 25.0, "new_test.py": 5.0}) == []
  assert problems({"a_test.py": 25.1}) == ["a_test.py: 25.1 CPU-seconds, at most 25.0"]
  assert problems({"new_test.py": 5.1}) == ["new_test.py: 5.1 CPU-seconds, at most 5.0"]
  assert "all tests: 1301 CPU-seconds, at most 1300" in problems({"a_test.py": 1301.0})


def test_values_of_golden_files_are_told_apart(tmp_path):
  path = tmp_path / "a.json"
  path.write_text(json.dumps({"steps": {"bf16": [1, 2], "fp8": [3]}, "rows": [{"x": 1}], "n": 5}))
  assert [k for k, _ in guards._values(path)] == ["steps/bf16", "steps/fp8", "rows/0", "n"]
  arrays = tmp_path / "a.npz"
  np.savez(arrays, a=np.zeros(2, np.float32), b=np.zeros(2, np.int32))
  (_, one), (_, other) = guards._values(arrays)
  assert one != other  # equal bytes of another dtype


def test_marks_and_lines_count_this_repository():
  assert guards.marks()["mark slow"] > 50 and guards.marks()["mark importorskip"] > 5
  lines = guards.lines()
  assert lines["lines all"] == sum(lines[f"lines {ring}"] for ring in guards.RINGS)


def test_the_largest_tolerance_of_a_file_of_tests_is_a_fact(tmp_path, monkeypatch):
  text = "f(x, rtol=1e-3 if x else 2e-2)\nf(x, rtol=4e-4, atol=LIMIT * 3)\ng(approx(1, rel=0.5))\n"
  (tmp_path / "ops").mkdir()
  (tmp_path / "ops" / "a_test.py").write_text(text)
  monkeypatch.setattr(guards, "HERE", tmp_path)
  of_file = {k: v for k, v in guards.tolerances().items() if "_test.py" in k}
  name = "tolerance ops/a_test.py"
  assert of_file == {f"{name} rtol": 0.02, f"{name} atol": 3.0, f"{name} rel": 0.5}


def test_a_reason_is_accepted_for_the_facts_that_it_names(tmp_path, monkeypatch):
  path = tmp_path / "guards.json"
  path.write_text(json.dumps(HISTORIES))
  monkeypatch.setattr(guards, "HISTORIES", path)
  now = FACTS | {"lines lab": 101, "golden a.json x": "d2", "mark slow": 6.0, "golden b": "d3"}
  monkeypatch.setattr(guards, "today", lambda: now)
  assert guards.main(["accept", "golden .*", "--why", "a bound"]) == 0
  got = json.loads(path.read_text())
  wanted = {"golden a.json x": [["d1", ""], ["d2", "a bound"]], "golden b": [["d3", ""]]}
  assert got == HISTORIES | wanted
  assert guards.main(["accept", "lines lab", "mark slow", "--why", "two patterns"]) == 2
  assert guards.main(["accept", "--why", " "]) == 2 == guards.main(["accept"])
  assert guards.main(["accept", "--why", "a feature"]) == 0
  got = json.loads(path.read_text())
  assert got["lines lab"][-1] == [101, "a feature"] and got["mark slow"][-1] == [6.0, ""]
