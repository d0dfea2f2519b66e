"""experiments/2025_infir2: the parity table, and training questions apart from the test's."""

import json
import pathlib
import types

import numpy as np
import pytest
import run_files

from fp8jax import statistics
from fp8jax.evaluation import store, tasks, verifiers

EXPERIMENT = pathlib.Path(__file__).parents[2] / "experiments" / "2025_infir2"


def _evaluated(workdir, share, rng):
  """An evaluation of two tasks as --job=evaluate stores it; returns its verdicts."""
  folder, found = workdir / store.FOLDER / "step_9", {}
  for name in ("gcd", "sums"):
    items = tuple(tasks.Item(str(i), f"{name} {i}", "1") for i in range(50))
    task = tasks.Task(name, items, verifiers.exact, "exact")
    writer = store.Writer(str(folder), task, {})
    found[name] = rng.random(50) < share
    for item, correct in zip(items, found[name]):
      completion = types.SimpleNamespace(finish_reason="eos", tokens=(1,), text="1")
      writer.add(item, 0, "", completion, tasks.Verdict(bool(correct), "1"))
    writer.close()
  provenance = dict(commit="c", dirty=False, time="t", devices="d")
  summary = {"settings": {}, "provenance": provenance, "tasks": {}}
  (folder / store.SUMMARY).write_text(json.dumps(summary))
  return found


def test_the_parity_table_pairs_arms_by_seed_and_item(tmp_path, capsys):
  parity, rng, truth = run_files.script(EXPERIMENT / "parity.py"), np.random.default_rng(0), {}
  for arm, share in (("bf16", 0.7), ("block_128", 0.65)):
    for seed in range(3):
      truth[arm, seed] = _evaluated(tmp_path / f"{arm}{seed}", share, rng)
      parity.collect(str(tmp_path / f"{arm}{seed}"), arm, seed, tmp_path / "results")
  assert "block_128-2 sums: " in capsys.readouterr().out
  runs = parity.read(tmp_path / "results")
  rows = {row[0]: row for row in parity.verdicts(runs, "bf16")}
  assert rows.keys() == {"gcd", "sums", "all"}
  for name, row in rows.items():
    names = ("gcd", "sums") if name == "all" else (name,)
    arms = [
      np.stack([np.concatenate([truth[arm, s][n] for n in names]) for s in range(3)])
      for arm in ("block_128", "bf16")
    ]
    expected = statistics.compare(*arms)
    assert row[2].startswith(f"{expected.difference:+.1f} [{expected.low:+.1f}, ")
    assert row[4:] == [f"3 x {50 * len(names)}", expected.sentence]
  shown = parity.table("bf16", tmp_path / "results")
  share = 100 * np.mean([truth["bf16", s]["gcd"] for s in range(3)])
  assert f"| gcd | `bf16` | {share:.1f} [" in shown and "| all | `block_128` - `bf16` |" in shown


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_training_questions_are_apart_and_their_solutions_right(tmp_path):
  pytest.importorskip("reasoning_gym")
  script = run_files.script(EXPERIMENT / "reasoning_data.py")
  paths = sorted(map(str, (EXPERIMENT / "tasks").glob("*.json")))
  script.main(tmp_path, paths, samples=100)
  tests = [script.jsonl_tasks.from_description(path) for path in paths]
  questions = {tasks.normalized(i.question): i.answer for t in tests for i in t.items}
  assert len(questions) == sum(len(t.items) for t in tests) >= 200 * len(paths)
  seen = set()
  for name in ("stage1", "stage2"):
    trained = tasks.read_trained(str(tmp_path / f"{name}.jsonl"))
    assert len(trained) == 100 * len(paths)
    assert not trained & questions.keys() and not trained & seen
    seen |= trained
  text = tasks.normalized((tmp_path / "cpt.jsonl").read_text().replace("\\n", "\n"))
  assert not [q for q in questions | dict.fromkeys(seen) if q in text]
  gsm = script.reasoning_gym_tasks.entries("gsm_symbolic", {}, 5, 40)
  assert all("The answer is" in script.solution(gsm[i]) for i in range(40))


def test_the_pilot_fixes_families_and_arms_of_a_seed_read_the_same_batches():
  runs = run_files.script(EXPERIMENT / "reasoning_runs.py")
  before = {"easy": 0.3, "learnt": 0.29, "hard": 0.0}
  tuned = {"easy": 1.0, "learnt": 0.61, "hard": 0.6}
  assert runs.chosen({"before": before, "tuned": tuned}) == ["learnt"]
  stage = lambda data: {"stages": {"cpt": {"data_fingerprint": data}}}  # noqa: E731
  runs.check({("bf16", 0): stage("a"), ("block_128", 0): stage("a"), ("bf16", 1): stage("b")})
  with pytest.raises(ValueError, match="block_128-0 read other data in cpt than another arm"):
    runs.check({("bf16", 0): stage("a"), ("block_128", 0): stage("b")})


def test_costs_are_means_over_seeds(tmp_path, monkeypatch):
  runs = run_files.script(EXPERIMENT / "reasoning_runs.py")
  stage = {"train": [2.0, 1.0], "tokens": 2048, "seconds": {"step": 8.0}}
  held = lambda loss: {"solutions": {"bf16": loss, "block_128": 9.0}}  # noqa: E731
  done = {
    ("block_128", seed): {
      "peak_gib": 3.0 + seed,
      "stages": {
        name: stage | {"heldout_before": held(2.0 + seed), "heldout_after": held(1.0)}
        for name in ("cpt", "stage1", "stage2")
      },
    }
    for seed in (0, 1)
  }
  row = "| `block_128` | stage1 | 2,048 | 2.5000 -> 1.0000 | 4.0 | 4.0 |"
  assert row in runs.costs(done).splitlines()
  monkeypatch.setattr(runs, "HERE", tmp_path)
  runs.figure(done)
  assert (tmp_path / "reasoning.svg").stat().st_size
