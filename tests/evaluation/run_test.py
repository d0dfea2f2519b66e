"""Asking, storing, going on, summing up, comparing; a fake stands for the generator."""

import dataclasses
import hashlib
import json
import os

import numpy as np
import pytest

from fp8jax import statistics
from fp8jax.errors import UserError
from fp8jax.evaluation import report, run, store, tasks, verifiers
from fp8jax.generation.completion import Completion
from fp8jax.generation.settings import Sampling


class Coin:
  """Answers right or wrong by a hash of prompt, seed and sample; may die after so many outputs."""

  def __init__(self, dies_after=None):
    self.asked, self.left = [], dies_after

  def answer(self, prompt: str, seed: int, sample: int) -> Completion:
    bit = hashlib.sha256(f"{prompt} {seed} {sample}".encode()).digest()[0] % 3
    text = "2" if bit else "3"
    return Completion(tuple(range(5 + bit)), text, "length" if bit == 2 else "eos")

  def generate(self, prompts, sampling, num_samples=1, on_text=None, numbers=()):
    assert isinstance(sampling, Sampling)
    found, numbers = [[] for _ in prompts], numbers or [0] * len(prompts)
    for sample in range(num_samples):  # the samples of an item do not end together
      for index, prompt in enumerate(prompts):
        text = bytes(prompt).decode()
        self.asked.append((text, sample))
        found[index].append(self.answer(text, sampling.seed, numbers[index] + sample))
        if on_text is not None:
          on_text(index, sample, "2", None)
          on_text(index, sample, "", found[index][-1])
        if self.left is not None:
          self.left -= 1
          if self.left == 0:
            raise KeyboardInterrupt
    return found


def _task(n=3, items=20, **changes):
  made = tuple(tasks.Item(f"i{i}", f"1 + 1, {i}?", "2") for i in range(items))
  protocol = tasks.Protocol(n, 0.65 if n > 1 else 0.0)
  return tasks.Task("sums (two)", made, verifiers.exact, "exact", protocol=protocol, **changes)


def _ask(task, item):
  text = task.user_text(item)
  return text, list(text.encode())


def _evaluate(folder, task, generator, seed=0, settings=None, say=lambda line: None):
  return run.evaluate(task, generator, _ask, str(folder), settings or {"step": 4}, seed, say)


def test_outputs_end_at_the_texts_of_the_task_and_of_the_settings(tmp_path):
  coin, stops = Coin(), []

  class Seen:
    def generate(self, prompts, sampling, *more):
      stops.append(sampling.stop)
      return coin.generate(prompts, sampling, *more)

  task = _task(1, 2)
  task = dataclasses.replace(task, protocol=dataclasses.replace(task.protocol, stop=("a",)))
  _evaluate(tmp_path, task, Seen(), settings={"step": 4, "stop": ["b"]})
  assert stops == [("a", "b")]
  with pytest.raises(UserError, match=r"different settings: stop is \['b'\] and None"):
    asked = [store.Scores("t", "", 2.0, (), np.zeros(0), of) for of in ({"stop": ["b"]}, {})]
    run._check_asked_alike("t", *asked)


def test_outputs_and_verdicts_are_stored_and_summed_up(tmp_path):
  coin, lines = Coin(), []
  found = _evaluate(tmp_path, _task(), coin, say=lines.append)
  assert len(lines) == 10 and lines[-1].startswith("sums (two): 60/60 outputs")
  rows = store.read_rows(str(tmp_path / "sums_two.jsonl"))
  assert len(rows) == 60
  for row in rows:
    expected = coin.answer(row["prompt"], 0, row["sample"])
    assert (row["output"], row["tokens"]) == (expected.text, len(expected.tokens))
    assert row["correct"] == (row["output"] == "2") and row["answer"] == "2"
  share = np.mean([row["correct"] for row in rows])
  summary = found.summary
  assert summary["avg"]["estimate"] == pytest.approx(share)
  assert found.scores_IJ.mean() == pytest.approx(share)
  assert summary["avg"]["low"] < share < summary["avg"]["high"]
  assert set(summary["pass"]) == {"2", "3"}
  assert summary["pass"]["3"]["estimate"] == found.scores_IJ.max(1).mean()
  assert sum(summary["finish_reasons"].values()) == 60
  definition = json.loads((tmp_path / "sums_two.json").read_text())
  assert definition["margin"] == 2.0 and definition["settings"] == {"step": 4, "seed": 0}
  [row] = report.rows([found])
  assert row[:2] == ["sums (two)", "20 x 3"] and row[2].startswith(f"{100 * share:.1f} [")


def test_outputs_that_end_in_an_error_count_as_wrong(tmp_path):
  class Damaged(Coin):
    def answer(self, prompt, seed, sample):
      good = super().answer(prompt, seed, sample)  # of an answer that would be right
      return dataclasses.replace(good, text="2", finish_reason="error") if not sample else good

  found = _evaluate(tmp_path, _task(), Damaged())
  assert not found.scores_IJ[:, 0].any() and found.scores_IJ[:, 1:].any()
  assert found.summary["finish_reasons"]["error"] == 20
  assert found.summary["notes"] == {"its logits are not finite": 20}


def test_an_interrupted_evaluation_goes_on_to_the_same_result(tmp_path):
  whole = _evaluate(tmp_path / "whole", _task(), Coin())
  with pytest.raises(KeyboardInterrupt):
    _evaluate(tmp_path / "parts", _task(), Coin(dies_after=47))
  path = tmp_path / "parts" / "sums_two.jsonl"
  path.write_text(path.read_text() + '{"item": "i9", "sam')  # killed while it wrote
  coin = Coin()
  found = _evaluate(tmp_path / "parts", _task(), coin)
  # 47 outputs are two samples of all 20 items, and the third of 7.
  assert {text for text, _ in coin.asked} == {f"1 + 1, {i}?\n" for i in range(7, 20)}
  assert np.array_equal(found.scores_IJ, whole.scores_IJ)
  assert found.summary | {"seconds": 0} == whole.summary | {"seconds": 0}
  rows = store.read_rows(str(path))
  assert len(rows) == len({(r["item"], r["sample"]) for r in rows}) == 60
  coin = Coin()
  _evaluate(tmp_path / "parts", _task(), coin)
  assert coin.asked == []


def test_items_of_one_prompt_draw_their_own_also_where_one_is_answered(tmp_path):
  task = _task(items=6)
  items = [dataclasses.replace(one, question=f"{i % 2}?") for i, one in enumerate(task.items)]
  task = dataclasses.replace(task, items=tuple(items))
  whole = _evaluate(tmp_path / "whole", task, Coin())
  with pytest.raises(KeyboardInterrupt):
    _evaluate(tmp_path / "parts", task, Coin(dies_after=14))
  found = _evaluate(tmp_path / "parts", task, coin := Coin())
  assert len({text for text, _ in coin.asked}) == 2 and len(coin.asked) == 4 * 3
  assert np.array_equal(found.scores_IJ, whole.scores_IJ)
  assert not np.array_equal(whole.scores_IJ[0], whole.scores_IJ[4])


def test_the_newest_other_evaluation_is_not_this_one(tmp_path):
  for i, name in enumerate(("step_4", "step_4_bf16")):
    (path := tmp_path / store.FOLDER / name / store.SUMMARY).parent.mkdir(parents=True)
    path.write_text("{}")
    os.utime(path, (i, i))
  old, new = (str(tmp_path / store.FOLDER / name) for name in ("step_4", "step_4_bf16"))
  assert store.newest(str(tmp_path)) == store.newest(str(tmp_path), old) == new
  assert store.newest(str(tmp_path), new) == old
  (tmp_path / store.FOLDER / "step_4" / store.SUMMARY).unlink()
  with pytest.raises(FileNotFoundError, match="no finished evaluation but this one"):
    store.newest(str(tmp_path), new)


def test_results_without_prompts_are_compared_by_their_templates():
  scores = [store.Scores("t", "", 2.0, ("a",), np.ones((1, 1)), {"template": x}) for x in "xy"]
  with pytest.raises(UserError, match="different settings: template is 'x' and 'y'"):
    run.compare([{"t": scores[0]}], [{"t": scores[1]}])


def test_answers_to_other_prompts_are_refused(tmp_path):
  """As of another chat template in the tokenizer's folder."""
  _evaluate(tmp_path, _task(), Coin())
  ask = lambda task, item: ("<user>" + task.user_text(item), [1])  # noqa: E731
  coin = Coin()
  with pytest.raises(UserError, match="i0 was asked as '1 . 1, 0.*, and is now '<user>1"):
    run.evaluate(_task(), coin, ask, str(tmp_path), {"step": 4}, 0, lambda line: None)
  assert coin.asked == []


def test_another_evaluation_in_the_folder_is_refused(tmp_path):
  _evaluate(tmp_path, _task(), Coin())
  longer = dataclasses.replace(_task().protocol, max_new_tokens=300)
  cases = (
    (_task(margin=5.0), {}, "margin differ"),
    (dataclasses.replace(_task(), protocol=longer), {}, "max_new_tokens (256 there, 300 here)"),
    (_task(), {"seed": 1}, "settings.seed (0 there, 1 here)"),
    (_task(), {"settings": {"step": 5}}, "settings.step (4 there, 5 here)"),
    (_task(items=19), {}, "the items differ"),
  )
  for task, changes, words in cases:
    with pytest.raises(UserError) as e:
      _evaluate(tmp_path, task, Coin(), **changes)
    assert words in str(e.value) and "another --workdir" in str(e.value)
  # A definition of before there was "chat" goes on.
  assert "chat" not in json.loads((tmp_path / "sums_two.json").read_text())
  path = tmp_path / "sums_two.jsonl"
  path.write_text("{}\n" + path.read_text())
  with pytest.raises(UserError, match="jsonl:1: .*no field"):
    _evaluate(tmp_path, _task(), Coin())


@pytest.mark.parametrize("field, value", (
  ("item", 5), ("item", None), ("sample", "0"), ("sample", True), ("correct", "yes"), ("note", []),
  ("correct", 1), ("tokens", "9"), ("finish_reason", {}), ("output", None), ("prompt", 1.5),
))  # fmt: skip
def test_rows_of_another_shape_are_named(tmp_path, field, value):
  _evaluate(tmp_path, _task(), Coin())
  path = tmp_path / "sums_two.jsonl"
  first, second, *rest = path.read_text().splitlines(keepends=True)
  path.write_text("".join((first, json.dumps(json.loads(second) | {field: value}) + "\n", *rest)))
  for read in (
    lambda: _evaluate(tmp_path, _task(), Coin()),
    lambda: store.read_scores(str(tmp_path)),
  ):
    with pytest.raises(UserError, match=f"sums_two.jsonl:2: field {field!r} is .*, expected "):
      read()


@pytest.mark.parametrize("text", ("[]", "5", "[" * 100_000, "\xff", "{}"))
def test_lines_that_are_no_rows_are_named(tmp_path, text):
  _evaluate(tmp_path, _task(), Coin())
  path = tmp_path / "sums_two.jsonl"
  path.write_bytes(text.encode("latin-1") + b"\n" + path.read_bytes())
  with pytest.raises(UserError, match="sums_two.jsonl:1.*delete the line"):
    store.read_scores(str(tmp_path))


@pytest.mark.parametrize("changes", (
  {"name": 5}, {"items": "abc"}, {"items": [1]}, {"protocol": []}, {"protocol": {}},
  {"margin": "2"}, {"protocol": {"samples": "3"}}, {"settings": 3}, {"fingerprint": None},
  {"margin": True},
))  # fmt: skip
def test_definitions_of_another_shape_are_named(tmp_path, changes):
  _evaluate(tmp_path, _task(), Coin())
  path = tmp_path / "sums_two.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  for read in (
    lambda: _evaluate(tmp_path, _task(), Coin()),
    lambda: store.read_scores(str(tmp_path)),
  ):
    with pytest.raises(UserError, match=f"sums_two.json: .*{next(iter(changes))}.*; "):
      read()


@pytest.mark.parametrize("text", (
  "[]", "{", "{}", '{"tasks": []}', '{"tasks": {"a": 5}}', '{"tasks": {"a": {}}}',
  '{"tasks": {"a": {"seconds": "1"}}}', '{"tasks": null}',
))  # fmt: skip
def test_summaries_of_another_shape_are_named(tmp_path, text):
  assert store.earlier_seconds(str(tmp_path)) == {}
  (tmp_path / "summary.json").write_text(text)
  with pytest.raises(UserError, match="summary.json:? .*delete it"):
    store.earlier_seconds(str(tmp_path))
  (tmp_path / "summary.json").write_text('{"tasks": {"a": {"seconds": 1.5}}}')
  assert store.earlier_seconds(str(tmp_path)) == {"a": 1.5}


@pytest.mark.parametrize("name", ("summary", "Summary", "provenance"))
def test_a_task_of_any_name_keeps_its_definition(tmp_path, name):
  task = dataclasses.replace(_task(), name=name)
  for _ in range(2):
    found = _evaluate(tmp_path, task, Coin())
    (tmp_path / store.SUMMARY).write_text(json.dumps({"tasks": {name: found.summary}}))
  assert store.read_scores(str(tmp_path)).keys() == {name}


def test_arms_are_compared_by_seed_and_item(tmp_path):
  stored = {}
  for arm, margin in (("fp8", 2.0), ("bf16", 2.0), ("other", 3.0)):
    for seed in range(2):
      folder = tmp_path / f"{arm}{seed}"
      salt = seed if arm == "fp8" else seed + 10
      _evaluate(folder, _task(n=1, items=50, margin=margin), Coin(), seed=salt)
      stored[arm, seed] = store.read_scores(str(folder))
  arms = {arm: [stored[arm, seed] for seed in range(2)] for arm in ("fp8", "bf16", "other")}
  [(name, found)] = run.compare(arms["fp8"], arms["bf16"]).items()
  scores = {k: v["sums (two)"].scores_IJ[:, 0] for k, v in stored.items()}
  expected = statistics.compare(
    *(np.stack([scores[arm, seed] for seed in range(2)]) for arm in ("fp8", "bf16"))
  )
  assert name == "sums (two)" and found == expected and found.seeds == 2
  [row] = report.compared_rows({name: found})
  assert row[2:4] == ["-2", "2 x 50"] and "no verdict" in row[4]
  assert run.compare(arms["bf16"], arms["bf16"])[name].verdict == "no verdict"  # of 50 items
  with pytest.raises(UserError, match="different definitions"):
    run.compare(arms["fp8"], arms["other"])
  asked = [{name: dataclasses.replace(one, settings={"chat": chat})
            for name, one in arms["bf16"][0].items()} for chat in (True, False)]  # fmt: skip
  with pytest.raises(UserError, match="different settings: chat is True and False; evaluate"):
    run.compare(asked[:1], asked[1:])
  for place in (0, 1):  # of the pair that differs, with the pairs before and after alike
    later = list(arms["bf16"])
    one = later[place][name]
    later[place] = {name: dataclasses.replace(one, prompts=("?", *one.prompts[1:]))}
    for pair in ((arms["fp8"], later), (later, arms["fp8"])):
      with pytest.raises(UserError, match=r"different prompts \(i0: .*the other's chat template"):
        run.compare(*pair)
  with pytest.raises(UserError, match="not finished the task"):
    run.compare(arms["fp8"], [{}, {}])
  with pytest.raises(UserError, match="the same seeds"):
    run.compare(arms["fp8"], arms["bf16"][:1])
  with pytest.raises(FileNotFoundError, match="no finished task"):
    store.read_scores(str(tmp_path))
