"""Sweeps, run with a stand-in for launch.py: what is started, skipped, stopped and tabulated."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
import types
from unittest import mock

import pytest
import run_files
import sweep_runs

from fp8jax import records
from fp8jax.config import identity, named
from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import command_line
from fp8jax.kernels import choose
from fp8jax.run import metrics_writer
from fp8jax.run import workdir as workdir_lib
from fp8jax.sweeps import file, outcome, process, run, slurm, spec, table

time_sleep = time.sleep


def test_sweep_runs_each_trial_once_and_reads_its_objective(folder, monkeypatch):
  sweep, compared = sweep_runs.rates(0.5, 0.25, arms=("a", "b"), seeds=(0, 1)), []
  monkeypatch.setattr(table, "compare", lambda folder, results: compared.append(len(results)))
  code, trials, names = sweep_runs.sweep(folder, monkeypatch, sweep)
  assert code == 0 and compared == [8] and len(set(names)) == 8 and "a-peak_lr=0.25-seed=1" in names
  assert {(t["arm"], t["point"]["optim.peak_lr"], t["seed"]): t["objective"] for t in trials} == {
    (arm, rate, seed): rate + seed / 100 for arm in "ab" for rate in (0.5, 0.25) for seed in (0, 1)
  }
  os.remove(folder / "out" / "b-peak_lr=0.5-seed=0" / "summary.json")  # as of a killed run
  code, again, names = sweep_runs.sweep(folder, monkeypatch, sweep)
  assert (code, names) == (0, ["b-peak_lr=0.5-seed=0"])
  assert sorted(map(str, again)) == sorted(map(str, trials))


def test_edited_configuration_is_another_trial(folder, monkeypatch):
  sweep_runs.sweep(folder, monkeypatch, sweep_runs.rates(0.5))
  (folder / "c.py").write_text(sweep_runs.CONFIG.replace('"steps": 4', '"steps": 5'))
  assert sweep_runs.sweep(folder, monkeypatch, sweep_runs.rates(0.5))[2] == ["peak_lr=0.5"]


def test_diverged_trials_are_stopped_and_stay_stopped(folder, monkeypatch):
  """One by its exit code; the other's loss runs away, and the sweep stops it."""
  code, trials, names = sweep_runs.sweep(folder, monkeypatch, sweep_runs.rates(0.5, 2.0, 20.0))
  assert code == 0 and len(names) == 3
  assert [t["status"] for t in trials] == ["finished", "diverged", "diverged"]
  why = json.loads((folder / "out" / "peak_lr=20.0" / "trial.json").read_text())["why"]
  first, mean = float(why.split("first ")[1]), float(why.split("steps ")[1].split(",")[0])
  assert first == 5 and mean > 6
  assert sweep_runs.sweep(folder, monkeypatch, sweep_runs.rates(0.5, 2.0, 20.0))[2] == []


DAMAGED = (
  ("config.json", "{}", "no field 'resolved'"),
  ("config.json", '{"resolved": 3}', "'resolved' is 3"),
  ("config.json", "{", "is not JSON"),
  ("trial.json", "{}", "no field 'status'"),
  ("summary.json", '{"step": "4"}', "'step' is '4'"),
  ("summary.json", '{"step": 4, "objective": "low"}', "'objective' is 'low'"),
)


def test_a_damaged_file_of_a_trial_fails_that_trial_alone(folder, monkeypatch, capsys):
  sweep_runs.sweep(folder, monkeypatch, sweep_runs.rates(0.25))
  (trial,) = sweep_runs.rates(0.25).trials(str(folder / "out"))
  whole = {path: path.read_text() for path in (folder / "out" / "peak_lr=0.25").iterdir()}
  for name, text, words in DAMAGED:
    (folder / "out" / "peak_lr=0.25" / name).write_text(text)
    found = outcome.attempt(trial)
    assert found.status == "failed" and f"peak_lr=0.25/{name}" in found.why
    assert words in found.why and "remove the folder" in found.why
    (folder / "out" / "peak_lr=0.25" / "trial.json").unlink(missing_ok=True)
    for path, content in whole.items():
      path.write_text(content)
  assert outcome.attempt(trial).objective == 0.25
  (folder / "out" / "peak_lr=0.25" / "config.json").write_text("{}")
  code, trials, names = sweep_runs.sweep(folder, monkeypatch, sweep_runs.rates(0.25, 0.5))
  assert code == 1 and names == ["peak_lr=0.5"]
  assert [t["status"] for t in trials] == ["failed", "finished"]
  assert "was failed: " in capsys.readouterr().out


def test_a_trial_that_another_sweep_runs_has_not_failed(folder, monkeypatch):
  """launch.py refuses its workdir with exit code 1; the end of the sweep reads it again."""
  launch = """
import pathlib, sys
workdir = pathlib.Path(dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])["workdir"])
from fp8jax.run import workdir as workdir_lib
from fp8jax.errors import UserError
try:
  with workdir_lib.locked(str(workdir)): pass
except UserError: sys.exit(1)
"""
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
  (folder / "launch.py").write_text(launch)
  workdir = folder / "out" / "peak_lr=0.5"
  with workdir_lib.locked(str(workdir)):
    code, trials, _ = sweep_runs.sweep(folder, monkeypatch, sweep_runs.rates(0.5))
    assert (code, [t["status"] for t in trials]) == (1, ["running elsewhere"])
    assert workdir_lib.is_locked(str(workdir))
  assert not workdir_lib.is_locked(str(workdir)) and not workdir_lib.is_locked(str(folder / "x"))
  (elsewhere,) = sweep_runs.rates(0.5).trials(str(folder / "out"))
  flat = named.flat("c.py", elsewhere.changes)
  (workdir / "config.json").write_text(json.dumps({"resolved": flat}))
  (workdir / "summary.json").write_text('{"step": 4, "objective": 0.5}')
  ended = [(elsewhere, outcome.Outcome(outcome.ELSEWHERE))]
  console = run.console_lib.console()
  assert run._ended(sweep_runs.rates(0.5), "s.py", str(folder / "out"), ended, None, console) == 0


def test_a_trial_has_finished_after_the_steps_that_it_counted_itself(folder):
  """data.epochs counts steps in the data: 3 of them, and `steps` stays 4. Without it a summary of
  fewer steps is of a shorter run before."""
  for epochs, step, steps, objective, status in (
    (1.0, 3, {"steps": 3}, 2.5, "finished"), (1.0, 2, {"steps": 3}, 2.5, None),
    (0.0, 3, {"steps": 3}, 2.5, None), (0.0, 3, {}, 2.5, None), (0.0, 4, {}, "nan", "diverged"),
    (0.0, 4, {"steps": 4}, "inf", "diverged"), (0.0, 4, {}, None, "finished"),
  ):  # fmt: skip
    keys = f'"data": {{"epochs": {epochs}}}, "name": arm'
    (folder / "c.py").write_text(sweep_runs.CONFIG.replace('"name": arm', keys))
    (trial,) = sweep_runs.rates(0.25).trials(str(folder / "out"))
    workdir = pathlib.Path(trial.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    flat = named.flat(trial.config, trial.changes)
    (workdir / "config.json").write_text(json.dumps({"resolved": flat}))
    summary = {"step": step, "objective": objective, **steps}
    (workdir / "summary.json").write_text(json.dumps(summary))
    found = outcome.attempt(trial)
    assert (found and found.status) == status, summary
    assert found is None or found.objective == (2.5 if objective == 2.5 else None)
  for job, status in (("train", "finished"), ("search", None)):
    (workdir / "provenance.json").write_text(json.dumps({"job": job}))
    found = outcome.attempt(trial)
    assert (found and found.status) == status


def test_trials_without_an_objective_have_finished(folder):
  """eval.tokens=0: the table counts outcomes, and has no mean and no best."""
  sweep = sweep_runs.rates(0.5, 0.25)
  ends = (outcome.Outcome("finished"), outcome.Outcome("diverged"))
  rows = table.rows(sweep, list(zip(sweep.trials("x"), ends, strict=True)))
  assert rows == [["", "0.5", "-", "-", "1/1", ""], ["", "0.25", "-", "-", "0/1", "1 diverged"]]


def test_a_row_that_a_killed_run_cut_is_left_out(folder):
  workdir = folder / "run"
  workdir.mkdir()
  path = workdir / "metrics.jsonl"
  losses = [3.0, 3.0, *[5.0] * 8]
  lines = [json.dumps({"step": i, "loss": x}) + "\n" for i, x in enumerate(losses)]
  (workdir / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "lo')
  assert [row["loss"] for _, row in metrics_writer.rows(str(path))] == losses
  assert outcome.LossWatch(str(workdir), 1.0).verdict().endswith("first 3.000")
  watch = outcome.LossWatch(str(workdir), 1.0)
  path.write_text("".join(lines[:2]) + lines[2][:9])
  assert watch.verdict() == ""
  with open(path, "a") as f:
    f.write(lines[2][9:] + "".join(lines[3:8]))
  assert watch.verdict() == ""  # 8 steps in all
  with open(path, "a") as f:
    f.write(lines[8])
  with mock.patch.object(metrics_writer, "rows", wraps=metrics_writer.rows) as rows:
    assert watch.verdict() == "mean loss of 8 steps 4.750, first 3.000"
    assert rows.call_args.args == (str(path), len("".join(lines[:8])))  # the new row alone
  records.write_atomic(str(path), "".join(lines[:3]))  # a resumed run drops rows
  assert watch.verdict() == ""
  quiet = [json.dumps({"step": i, "loss": 3.0}) + "\n" for i in range(12)]
  records.write_atomic(
    str(path), "".join(quiet)
  )  # and may have written more before it is looked at
  assert watch.verdict() == ""
  assert len(watch._losses) == 12
  records.write_atomic(str(path), "".join(lines[:3]))
  assert watch.verdict() == ""
  with open(path, "a") as f:
    f.write("".join(lines[3:]))
  assert watch.verdict().endswith("first 3.000")
  (workdir / "metrics.jsonl").write_text(lines[0] + '{"step": 9, "lo\n' + lines[1])
  assert outcome.LossWatch(str(workdir), 1.0).verdict() == ""  # the run itself says so
  with pytest.raises(UserError, match="metrics.jsonl:2 is no JSON"):
    list(metrics_writer.rows(str(path)))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_interrupted_sweep_saves_its_trials(folder, monkeypatch, number, code):
  # As in a terminal; a process in the background of a script begins with SIGINT ignored.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  monkeypatch.setattr(table, "compare", lambda *_: pytest.fail("trials are missing"))
  threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
  found, trials, _ = sweep_runs.sweep(folder, monkeypatch, sweep_runs.rates(200.0, 0.5))
  assert found == code and [t["status"] for t in trials] == ["interrupted"]
  assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_workdirs_are_named_by_what_differs(folder):
  listed = tuple({"steps": n, "optim.peak_lr": 0.1} for n in (1, 2))
  sweep = spec.Sweep("c.py", (spec.Points(listed), spec.Grid({"name": ("a/b", "a:b")})))
  names = [os.path.basename(t.workdir) for t in sweep.trials("x")]
  assert len(set(names)) == 4 and all(n.startswith("steps=") and "name=a_b_" in n for n in names)
  argv = ["launch.py", "--config=c.py", "--config.b=2", "--config.optim.a=x/y", "--workdir={}"]
  assert command_line.with_changes("r/{changes}", argv) == "r/b=2-optim.a=x_y"
  assert command_line.with_changes("r/{changes}", argv[:2]) == "r/unchanged"
  argv = ["launch.py", "--config=c.py:bf16", "--config.b", "2", "--config.optim.a=x"]
  assert command_line.with_changes("r/{changes}", argv) == "r/bf16-b=2-optim.a=x"
  argv = ["launch.py", "--config.a", "--noconfig.b", "--config.seed=1", "--config.c"]
  assert command_line.with_changes("r/{changes}", argv) == "r/a=True-b=False-c=True-seed=1"


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
  """nvidia-smi answers for two Hoppers; what is asked of jax.config."""
  answer = 'case "$1" in *index*) printf "0\\n1\\n";; *compute_cap*) printf "9.0\\n9.0\\n";; esac'
  program = tmp_path / "bin" / "nvidia-smi"
  program.parent.mkdir()
  program.write_text(f"#!/bin/sh\n{answer}\n")
  program.chmod(0o755)
  monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  asked = {}
  config = types.SimpleNamespace(jax_platforms=None, update=asked.__setitem__)
  monkeypatch.setattr(process, "jax", types.SimpleNamespace(config=config))
  return asked


def test_trials_share_gpus():
  where = [dict(slot.environment) for slot in process.slots(5, ("0", "1"))]
  assert [e["CUDA_VISIBLE_DEVICES"] for e in where] == ["0", "1", "0", "1", "0"]
  shares = {float(e["XLA_PYTHON_CLIENT_MEM_FRACTION"]) for e in where}
  assert len(shares) == 1 and 3 * shares.pop() <= 0.8 + 1e-3  # three have the first
  for parallel, count in ((0, 2), (1, 1), (2, 2)):  # none shares: JAX's own part of the memory
    where = [dict(slot.environment) for slot in process.slots(parallel, ("0", "1"))]
    assert len(where) == count and all(list(e) == ["CUDA_VISIBLE_DEVICES"] for e in where)


def test_a_sweep_is_checked_for_the_gpu_of_its_trials(two_gpus, repository, monkeypatch):
  """Its own process computes on the CPU: JAX takes most of a GPU's memory, which is the trials'."""
  monkeypatch.chdir(repository)
  here = process.here()
  assert here == process.Here(("0", "1"), choose.Device("gpu", 90), 1)
  assert two_gpus == {"jax_platforms": "cpu"}
  for recipe, said in (("block_128", ""), ("nvfp4", "no FP8 kernel|runs on")):
    sweep = spec.Sweep("configs/debug.py", arms=(recipe,))
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
      file.check(sweep, "here", here.num_devices, here.device)
  (pathlib.Path(shutil.which("nvidia-smi"))).write_text("#!/bin/sh\necho '[N/A]'\n")
  assert process.here().device is None


def test_single_losses_that_are_not_finite_are_no_divergence():
  nan = float("nan")
  assert outcome.divergence([3.0] * 4 + [nan] + [2.9] * 7, 1.0) == ""
  assert outcome.divergence([nan] + [3.0] * 3 + [4.5] * 8, 1.0).endswith("first 3.000")
  assert outcome.divergence([3.0] + [nan] * 8, 1.0) == "no finite loss in 8 steps"
  # Trials at once are judged at their end: by the steps at which a watched one would have stopped.
  there_and_back = [3.0] * 9 + [5.0] * 8 + [2.0] * 9
  assert outcome.divergence(there_and_back, 1.0) == ""
  assert outcome.ever_diverged(there_and_back, 1.0).startswith("mean loss of 8 steps")


def test_random_axis_repeats_its_points():
  axis = spec.Random({"r": spec.LogUniform(1e-3, 1e-1), "n": spec.Integer(1, 3)}, 50, seed=3)
  points = axis.points()
  assert points == axis.points() and len({p["r"] for p in points}) == 50
  assert all(1e-3 <= p["r"] <= 1e-1 for p in points) and {p["n"] for p in points} == {1, 2, 3}
  assert 15 < sum(p["r"] < 1e-2 for p in points) < 35  # half of the decades


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
def test_printed_commands_give_the_configurations_of_the_trials(parse, repository):
  """The command line's parser is the oracle of what a trial compares its workdir with."""
  sweep = file.load(str(repository / "experiments/sweeps/recipes_by_rate.py"))
  trials = sweep.trials("runs")
  assert len(trials) == 18
  for trial in (trials[0], trials[-1]):
    assert identity.flatten(parse(*trial.arguments()[:-1])) == named.flat(
      trial.config, trial.changes
    )


@pytest.mark.slow
def test_jobs_of_a_scheduler_run_once(folder, monkeypatch, repository):
  """By submitit's local executor."""
  pytest.importorskip("submitit")
  paths = [str(repository), *(p for p in sys.path if p)]
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, paths)))
  sweep = sweep_runs.rates(0.5, 2.0)
  code, trials, names = sweep_runs.sweep(folder, monkeypatch, sweep, submit="local", parallel=2)
  assert code == 0 and sorted(t["status"] for t in trials) == ["diverged", "finished"]
  assert len(names) == 2 and sweep_runs.sweep(folder, monkeypatch, sweep, submit="local")[2] == []


def test_preempted_job_saves_and_is_requeued(folder, monkeypatch):
  """submitit's warning stops the child; a child that met a SIGTERM requeues its job."""
  submitit = pytest.importorskip("submitit")
  trial = sweep_runs.rates(200.0).trials(str(folder / "out"))[0]
  metrics = folder / "out" / "peak_lr=200.0" / "metrics.jsonl"
  job = slurm.Job(trial, str(folder), 1.0)
  answers = []

  def warn():
    while not metrics.exists():
      time.sleep(0.01)
    answers.append(job.checkpoint())

  thread = threading.Thread(target=warn)
  thread.start()
  commands = []
  monkeypatch.setattr(slurm.time, "sleep", lambda seconds: seconds < 1 and time_sleep(seconds))
  monkeypatch.setattr(slurm.subprocess, "run", lambda words, check: commands.append(words))
  environment = types.SimpleNamespace(cluster="slurm", job_id="7")
  monkeypatch.setattr(submitit, "JobEnvironment", lambda: environment)
  assert job()["status"] == "interrupted" and commands == [["scontrol", "requeue", "7"]]
  thread.join()
  assert isinstance(answers[0], submitit.helpers.DelayedSubmission)


def test_a_single_run_that_finished_is_read_and_one_of_another_configuration_is_not(
  tmp_path, monkeypatch
):
  workdir, path, started = tmp_path / "run", "configs/debug.py:bf16", []
  workdir.mkdir()
  flat = named.flat(path, {"seed": 1})
  (workdir / "config.json").write_text(json.dumps({"resolved": flat}))
  (workdir / "summary.json").write_text(json.dumps({"step": flat["steps"], "objective": 1.0}))
  (workdir / "provenance.json").write_text("{}")
  (workdir / "metrics.jsonl").write_text("")

  def start(command, cwd):
    started.append(command)
    return 1

  monkeypatch.setattr(run, "_waited", start)
  root = os.getcwd()
  assert run.one(path, str(workdir), {"seed": 1}, root).summary["objective"] == 1 and not started
  with pytest.raises(SystemExit):
    run.one(path, str(workdir), {"seed": 2}, root)
  assert len(started) == 1


def test_a_sweep_ends_in_a_comparison_of_what_finished(tmp_path, monkeypatch):
  pytest.importorskip("altair")
  results = []
  for seed in (0, 1):
    for recipe, factor in (("bf16", 1.0), ("block_128", 1.001)):
      losses = [factor * (3 - i / 40) for i in range(40)]
      path = run_files.write_steps(tmp_path / f"{recipe}-{seed}", losses, recipe, seed)
      ended = outcome.Outcome("finished", losses[-1])
      results.append((spec.Trial("c.py", {}, str(path), recipe, {}, seed), ended))
  gone = spec.Trial("c.py", {}, str(tmp_path / "nothing"), "block_128", {}, 2)
  target = tmp_path / "sweep"
  text = table.compare(str(target), [*results, (gone, outcome.Outcome("diverged"))])
  assert "+0.100, +0.100" in text and text.endswith(str(target / "compare.html"))
  found = json.loads((target / "compare.json").read_text())
  assert len(found["runs"]) == 4 and found["differences"][0]["mean"] == pytest.approx(0.1)
  assert "<svg" in (target / "compare.svg").read_text()
  without = table.compare(str(target), results[1::2] + [(gone, outcome.Outcome("diverged"))])
  assert without.endswith("compare.html")  # no run of bf16
  assert json.loads((target / "compare.json").read_text())["baseline"] == "block_128"
  with monkeypatch.context() as broken:
    broken.setattr("fp8jax.report.compare.compare", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in table.compare(str(target), results)
  alone = table.compare(str(target), results[:1])
  assert alone.startswith("no comparison: a comparison needs at least two runs")
  for name in ("charts", "compare_charts", "compare_page"):
    monkeypatch.delitem(sys.modules, f"fp8jax.report.{name}", raising=False)
  monkeypatch.setitem(sys.modules, "altair", None)
  assert "pip install 'fp8jax[report]'" in table.compare(str(target), results)


def test_a_job_that_the_sweep_no_longer_waits_for_stays_in_the_queue(tmp_path):
  is_done, end = [False], {"status": "finished", "objective": 2.5}
  job = types.SimpleNamespace(
    done=lambda: is_done[0], exception=lambda: None, result=lambda: end
  )  # fmt: skip
  one = slurm.Submitted(job, types.SimpleNamespace(workdir=str(tmp_path / "t")))
  assert one.poll() is None
  one.stop()
  assert one.poll() == outcome.Outcome("queued")
  is_done[0] = True
  assert one.poll() == outcome.Outcome("finished", 2.5)
  job.exception = lambda: "no node"
  assert one.poll() == outcome.Outcome("failed")
  assert (tmp_path / "t" / "log.txt").read_text() == "no node\n"


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_single_run_saves_before_the_process_that_waits_for_it_ends(tmp_path, number, code):
  """The run says that it heeds signals; what is sent to this process alone."""
  before = signal.getsignal(number)
  ready = tmp_path / "ready"
  body = (
    "import pathlib, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    f"pathlib.Path({str(ready)!r}).touch(); time.sleep({30 if code == 75 else 1}); sys.exit(130)"
  )

  def tell():
    while not ready.exists():
      time.sleep(0.01)
    os.kill(os.getpid(), number)

  teller = threading.Thread(target=tell)
  teller.start()
  assert run._waited([sys.executable, "-c", body], str(tmp_path)) == code
  teller.join()
  assert signal.getsignal(number) == before
