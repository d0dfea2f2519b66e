"""The lab: the run list, result files, and the queue's jobs."""

import collections
import dataclasses
import functools
import json
import math
import pathlib
import re
import types

import pytest
import run_files
from lab_files import EXPERIMENTS, design, ledger, result_of, results, runs, system_of
from scipy import stats

from fp8jax.errors import UserError
from fp8jax.sweeps import outcome, spec

hours = run_files.script(EXPERIMENTS / "lab/hours.py")
run_queue = run_files.script(EXPERIMENTS / "lab/run_queue.py")


@functools.cache
def _measured():
  """Of the repository, on the CPU that has most runs."""
  return hours.measured(cpu="none that is here")


# --- the run list ---------------------------------------------------------------------------------


def test_seeds_give_the_interval_room_and_the_list_its_budget():
  for effect, count in ((2.0, 5), (1.0, 5), (0.5, 1)):
    n = design.Comparison("x", "bf16", "higher", effect).seeds(count)
    enough = [
      stats.nct.sf(stats.t.ppf(1 - 0.025 / count, k - 1), k - 1, effect / 0.47 * math.sqrt(k)) > 0.8
      for k in (n - 1, n)
    ]
    assert enough == [False, True] if n > 3 else enough[1]
  assert design.Comparison("x", "bf16", "close", 0.1).seeds(1) is None
  for system in runs.SYSTEMS:
    assert system.illustration or system.fixed_seeds or all(
      c.seeds(len(system.comparisons)) for c in system.comparisons
    ), f"{system.slug}: a comparison gets no verdict"  # fmt: skip
    names = {arm.name for arm in system.arms}
    assert all({c.candidate, c.baseline} <= names for c in system.comparisons)
  measured = _measured()
  total, seen = 0.0, set()
  for system, arm in [(s, arm) for s in runs.SYSTEMS for arm in s.arms]:
    own = [run for run in system.runs((arm,)) if run.name not in seen]
    seen |= {run.name for run in own}
    at_once = len(own) if system.is_mapped else 1
    total += sum(hours.hours(run, measured, at_once)[0] for run in own)
  assert total < hours.BUDGET_HOURS
  with pytest.raises(ValueError, match="'close', 'higher' or 'lower'"):
    design.Comparison("x", "bf16", "better", 1.0)


def test_hours_are_of_hours_json_else_of_finished_runs_on_one_cpu_else_a_guess():
  system = system_of("higher", fixed_seeds=4)
  run = system.runs((system.arms[1],))[0]

  def of(seconds, cpu="a", seed=0, **changes):
    result = result_of(system, 1, seed, [3.0] * 10)
    origin = result.origin | {"cpu": cpu}
    return dataclasses.replace(result, seconds=seconds, origin=origin, **changes)

  found = [of(10.0), of(500.0), of(30.0, seed=1), of(1.0, "b"), of(7.0, status="diverged"),
           of(0.0, seed=2)]  # of seeds that trained at once  # fmt: skip
  for cpu, step, count in (("a", 1.0, 3), ("b", 0.1, 1), ("c", 1.0, 3)):
    (row,) = hours.of_results(found, cpu)[0].values()
    assert row == {
      "step_seconds": pytest.approx(step),
      "runs": count,
      "cpu": "b" if cpu == "b" else "a",
    }
  # Of what ran on b alone: as many seconds as a would need, 10 (above), 4 and 1 times those of b.
  elsewhere = [
    dataclasses.replace(of(seconds, cpu), run=dataclasses.replace(run, recipe=recipe))
    for recipe, cpu, seconds in (
      ("two", "a", 8.0), ("two", "b", 2.0), ("three", "a", 5.0), ("three", "b", 5.0),
      ("b's", "b", 6.0), ("c's", "c", 7.0),
    )
  ]  # fmt: skip
  for cpu, step, ratio in (("a", 2.4, 4.0), ("b", 0.6, 1.0), ("d", 2.4, 4.0)):
    rows, ratios = hours.of_results([*found, *elsewhere], cpu)
    of_b, of_c = (rows[hours._timed(dataclasses.replace(run, recipe=r))] for r in ("b's", "c's"))
    assert of_b == {"step_seconds": pytest.approx(step), "runs": 1, "cpu": "b"}
    assert of_c["step_seconds"] == pytest.approx(0.7)
    assert ratios["b"] == pytest.approx(ratio)
  key, timed = hours._timed(run), {"step_seconds": 2.0, "start_seconds": 36.0}
  guessed = dataclasses.replace(run, recipe="another")
  have = {
    hours.RUNS: {key: {"step_seconds": 3.0, "start_seconds": 36.0}},
    hours.TIMED: {key: timed},
  }
  for one, rows, at_once, step, origin in (
    (run, have, 1, 2.0, "hours.json"), (run, {hours.RUNS: have[hours.RUNS]}, 4, 3.0, "runs"),
    (guessed, have, 1, 2.0, "guess"), (guessed, {}, 1, 1.0, "guess"),
  ):  # fmt: skip
    start = 20.0 if not rows else 36.0
    expected = (start / at_once + run.steps * step * 1.05) / 3600
    assert hours.hours(one, rows, at_once) == (pytest.approx(expected), origin)


def test_hours_of_the_committed_results_are_those_of_the_fastest():
  by_cpu, group = (
    collections.defaultdict(list),
    "0p8m-python_docs-bf16-master_format=lns16-512steps-seed",
  )
  for path in hours.RESULTS.rglob(f"{group}*.json"):
    value = json.loads(path.read_text())
    by_cpu[value["origin"]["cpu"]].append(value["seconds"] / len(value["losses"]))
  kept = max(by_cpu.values(), key=len)
  key = "0p8m-text-bf16-master_format=lns16-512steps"
  row = _measured()[hours.RUNS][key]
  assert row["step_seconds"] == min(kept) and row["runs"] == len(kept) > 4
  # The start is of hours.json: of the slowest of the size.
  rows = json.loads(hours.HOURS.read_text())
  starts = [r["start_seconds"] for n, r in rows.items() if n.startswith("0p8m-") and "=" not in n]
  assert row["start_seconds"] == max(starts)


def test_a_name_is_one_configuration():
  by_name = {}
  for system in runs.SYSTEMS:
    for run in system.runs():
      assert by_name.setdefault(run.name, run) == run
      assert re.fullmatch(r"[\w.=-]+", run.name) and len(run.name) < 200
  twins = [run for run in by_name.values() if run.is_twin]
  assert twins and all(run.trial[1]["init.nudge"] is True for run in twins)
  for twin in twins:
    own = by_name[twin.name.removesuffix("-twin")]
    assert twin.trial[1] == own.trial[1] | {"init.nudge": True}


# --- results and the queue ------------------------------------------------------------------------


def test_a_result_is_read_as_it_was_written_and_anything_else_is_refused(tmp_path):
  system = system_of("higher", rates=(1e-3,))
  result = result_of(system, 1, 0, [3.0, math.inf, 2.0], status="diverged")
  results.write(result, str(tmp_path))
  (path,) = tmp_path.glob("*.json")
  assert path.stem == result.run.name and results.read(path) == result
  path.write_text(path.read_text().replace('"commit"', '"no"'))
  with pytest.raises(UserError, match="origin without"):
    results.read(path)
  path.write_text("{}")
  with pytest.raises(UserError, match="is no result of the lab"):
    results.read(path)


def _left(folder, steps=3, **leg):
  """The files of a finished run; returns its training losses."""
  folder.mkdir(parents=True)
  losses = [3.25 - i / 8 for i in range(steps)]
  rows = [{"step": i + 1, "loss": x, "step_seconds": 0.5} for i, x in enumerate(losses)]
  rows[1]["step_seconds"] = 3600.0  # the process was stopped
  rows.append({"step": steps, "heldout/main/mxfp8/loss": 2.5, "heldout/main/bf16/loss": 2.25})
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  resolved = {"optim.warmup_steps": 2, "kernels.matmul": "auto", "steps": steps}
  origin = {"commit": "c0ffee", "dirty": False, "devices": "1 x cpu (cpu)", "data_fingerprint": "d",
            "earlier": [leg] * bool(leg), "versions": {"jax": "1", "jaxlib": "2"}}  # fmt: skip
  values = {"config": {"resolved": resolved}, "provenance": origin, "summary": {"step": steps}}
  for name, value in values.items():
    (folder / f"{name}.json").write_text(json.dumps(value))
  return losses


def test_the_queue_keeps_a_file_of_every_run_that_is_over(tmp_path):
  system = system_of("higher", fixed_seeds=2, twins=1)
  waiting = run_queue.jobs([system], str(tmp_path), set(), {})
  names = [run.name for job in waiting for run, _ in job.members]
  assert sorted(names) == sorted(run.name for run in system.runs()) and len(names) == 5
  assert [job.members[0][0].seed for job in waiting] == [0, 0, 0, 1, 1]
  said = []
  queue = run_queue.Queue(waiting, str(tmp_path / "results"), 2, types.SimpleNamespace(
    print=said.append))  # fmt: skip
  losses = _left(pathlib.Path(waiting[0].workdir))
  _left(pathlib.Path(waiting[1].workdir), commit="another", dirty=False)
  for job, status in zip(waiting, ("finished", "finished", "failed", "interrupted")):
    queue.give(job, outcome.Outcome(status))
  (path,) = (tmp_path / "results").glob("*.json")
  found = results.read(path)
  assert found.run == waiting[0].members[0][0] and list(found.losses) == losses
  assert found.heldout == {"main": {"own": 2.5, "bf16": 2.25}} and found.seconds == 1.5
  assert (
    found.data == "d"
    and found.origin["commit"] == "c0ffee"
    and found.origin["backend"].endswith("matmul auto")
  )
  assert results.own_loss(found) == 2.5
  assert "of several commits" in said[1] and said[-1].startswith("3/5; about")
  # It is not started again.
  left = run_queue.jobs([system], str(tmp_path), {path.stem}, {})
  assert [j.members for j in left] == [j.members for j in waiting[1:]]
  arguments = left[0].arguments()
  assert arguments[0].startswith("--config=configs/pretrain_tiny.py:3m-python_docs-")
  assert f"--workdir={left[0].workdir}" in arguments


def test_an_arm_whose_seeds_train_at_once_is_one_sweep_and_its_twins_another(tmp_path):
  system = system_of("higher", rates=(1e-3, 2e-3), fixed_seeds=3, is_mapped=True, size="0p8m")
  other, first, twins = made = run_queue.jobs([system], str(tmp_path), set(), {})
  assert len({workdir for job in made for _, workdir in job.members}) == 6 + 6 + 4
  for job, count in ((first, 6), (twins, 4)):
    assert "--vmap" in job.arguments() and len(job.members) == count
    scope = {}
    exec(pathlib.Path(job.sweep).read_text(), scope)
    sweep = scope["SWEEP"]
    assert isinstance(sweep, spec.Sweep)
    for trial, (run, workdir) in zip(sweep.trials(job.workdir), job.members, strict=True):
      assert trial.workdir == workdir and trial.config == run.trial[0]
      assert run.trial[1].items() <= trial.changes.items()
      assert run.is_twin == trial.changes.get("init.nudge", False) == (job is twins)
  (left,) = run_queue.jobs([system], str(tmp_path), {
    run.name for job in made if job is not twins for run, _ in job.members
  }, {})  # fmt: skip
  assert left == twins
  floors = run_queue.jobs([system], str(tmp_path / "floors"), set(), {}, floors=True)
  assert [[run for run, _ in job.members] for job in floors] == [
    [run for run, _ in first.members if run.seed < 2], [run for run, _ in twins.members]
  ]  # fmt: skip
  _left(pathlib.Path(other.members[4][1]))
  marked = pathlib.Path(other.members[5][1])
  _left(marked)
  (marked / "trial.json").write_text('{"status": "diverged"}')
  run_queue.keep(other, outcome.Outcome("finished"), str(tmp_path / "results"), print)
  found = map(results.read, (tmp_path / "results").glob("*.json"))
  assert {r.run.name: r.status for r in found} == {
    other.members[4][0].name: "finished", other.members[5][0].name: "diverged",
  }  # fmt: skip


def test_arms_that_the_library_does_not_know_are_named_and_left_out(monkeypatch):
  monkeypatch.chdir(EXPERIMENTS.parent)
  arms = (design.Arm("bf16"), design.Arm("new", "no_such_recipe"))
  system = design.System("x", arms, (), config="configs/debug.py:{recipe}", fixed_seeds=1)
  said = []
  (kept,) = run_queue.known([system], said.append)
  assert [arm.name for arm in kept.arms] == ["bf16"]
  (line,) = said
  assert line.startswith("x, new: not yet known: precision.rules: unknown recipe 'no_such_recipe'")
  assert run_queue.known([dataclasses.replace(system, arms=arms[1:])], said.append) == []


def test_the_queue_lists_its_jobs_and_refuses_a_system_that_is_none(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(runs, "SYSTEMS", (system_of("higher", fixed_seeds=2, size="0p8m"),))
  monkeypatch.setattr(run_queue, "known", lambda systems, _: systems)  # corpora may be missing
  monkeypatch.chdir(EXPERIMENTS.parent)
  words = ["--workdir", str(tmp_path), "--edited", "--dry"]
  assert run_queue.main(words) == 0
  first, *jobs = capsys.readouterr().out.splitlines()
  assert first.startswith(f"0 results; {len(jobs)} jobs, about ") and len(jobs) == 6  # twins
  assert all(f"--workdir={tmp_path}/runs/" in line for line in jobs)
  with pytest.raises(UserError, match="no system halo; expected some of "):
    run_queue.main([*words, "halo"])


@pytest.mark.slow  # four processes of launch.py
def test_the_queue_runs_everything_once(tmp_path, monkeypatch):
  small = (("steps", 3), ("global_batch", 2), ("seq_len", 64), ("eval.tokens", 128),
           ("eval.batch", 2), ("optim.warmup_steps", 1), ("optim.decay_steps", 1),
           ("log.report", False))  # fmt: skip
  arms = (design.Arm("bf16", "bf16", small), design.Arm("x", "tensor_current", small))
  own = dict(config="configs/debug.py:{recipe}", steps=3)
  question = (design.Comparison("x", "bf16", "close", 0.0),)
  systems = (
    design.System("alone", arms, question, fixed_seeds=2, twins=1, **own),
    design.System("at_once", (design.Arm("d", "tensor_delayed", small),), (), fixed_seeds=2,
                rates=(1e-3,), is_mapped=True, twins=1, **own),
  )  # fmt: skip
  monkeypatch.setattr(runs, "SYSTEMS", systems)
  monkeypatch.chdir(tmp_path)
  words = ["--workdir", str(tmp_path / "lab"), "--edited"]
  assert run_queue.main(words) == 0
  found = [results.read(path) for path in (tmp_path / "lab/results").glob("*.json")]
  assert sorted(r.run.name for r in found) == sorted(r.name for s in systems for r in s.runs())
  assert len({r.key for r in found}) == 1 and all(len(r.losses) == 3 for r in found)
  (row,) = ledger.rows(ledger.index(found), systems[:1])
  assert len(row.seeds) == 2 and row.floor > 0
  monkeypatch.setattr(run_queue.sweep_run, "drain", lambda queue, *_: (
    [], pytest.fail("all are over") if queue.take() else None))  # fmt: skip
  assert run_queue.main(words) == 0
