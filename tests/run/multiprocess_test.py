"""Two processes train as one with the same mesh: same losses, one voice, one checkpoint."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

import debug_runs
import harness
import numpy as np
import pytest
import rich.console
import tolerances

from configs import debug
from fp8jax import axes
from fp8jax import params as params_lib
from fp8jax.data import config as data_config
from fp8jax.data import loader, pretokenize, tokenize
from fp8jax.models import presets, transformer
from fp8jax.models.hf import weights as hf_weights
from fp8jax.run import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]

LENGTH, BATCH, STEPS = 128, 8, 10
# One site of a layer is enough, and one compiles quickly.
RULES = harness.only_down("block_128")
CONFIG = f"""
from configs import debug

def get_config(arm=""):
  c = debug.get_config(arm)
  c.precision.rules = {RULES}
  return c
"""
CHANGES = {
  "mesh.fsdp": -1, "steps": STEPS, "global_batch": BATCH, "seq_len": LENGTH,
  "eval.tokens": 1024, "eval.batch": 8, "eval.precisions": ("recipe",),
  "data.heldout_fraction": 0.2, "data.sources.main.kind": "prepared",
  "optim.warmup_steps": 4, "optim.decay_steps": 4, "optim.peak_lr": 1e-4, "optim.min_lr": 1e-5,
  "checkpoint.every": 0,
  "log.every": 1000,  # stopping at the same step does not depend on it
  "log.tensorboard": False, "log.report": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """Spec of 64 documents to train on and 8 held out, each exactly one window long.

  Without packing across documents and without a filter, process i of n reads documents i, i + n,
  i + 2n, ...: step by step the processes together hold the rows that one process would.
  """
  folder = tmp_path_factory.mktemp("data")
  rng = np.random.default_rng(0)
  wanted, lines = {True: 8, False: 64}, []
  while any(wanted.values()):
    text = bytes(rng.integers(ord("a"), ord("z") + 1, LENGTH, np.uint8)).decode()
    held = tokenize.is_held_out({"text": text}, 0.2)
    if wanted[held]:
      wanted[held] -= 1
      lines.append(json.dumps({"text": text}))
  (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
  (folder / "config.py").write_text(CONFIG)
  source = dict(kind="jsonl", path=str(folder / "corpus.jsonl"), field="text", dataset="",
                split="train", weight=1.0)  # fmt: skip
  spec = data_config.DataConfig({"main": source}, tokenize.Tokenizer("bytes"), LENGTH, heldout=0.2)
  made = pretokenize.run(spec, str(folder), 10**6, rich.console.Console(quiet=True))["main"]
  assert [made["splits"][s]["documents"] for s in ("train", "heldout")] == [64, 8]
  source = dict(source, kind="prepared", path=str(folder / "main"))
  # Any number shuffles prepared data over the whole epoch, as the runs do by default.
  return data_config.DataConfig(
    {"main": source}, spec.tokenizer, LENGTH, heldout=0.2, shuffle_windows=1
  )


# Of a collective and of a process, in seconds: on cores that others use as well, one process may
# still compile what the other has begun to run.
PATIENCE = 900
_FLAGS = (
  f"--xla_cpu_collective_timeout_seconds={PATIENCE} "
  f"--xla_cpu_collective_call_terminate_timeout_seconds={PATIENCE}"
)


class Launch:
  """launch.py in `count` processes with four devices together."""

  def __init__(self, spec, workdir, count, *extra):
    path = pathlib.Path(spec.sources["main"]["path"])
    changes = [f"--config.{key}={value}" for key, value in CHANGES.items()]
    flags = [f"--config={path.parent}/config.py", *changes, f"--workdir={workdir}", *extra]
    flags.append(f"--config.data.sources.main.path={path}")
    if count > 1:
      flags += [f"--coordinator=localhost:{_free_port()}", f"--processes={count}"]
    env = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count} {_FLAGS}",
    }
    self.processes = [
      subprocess.Popen(
        [sys.executable, "launch.py", *flags, *([f"--process={i}"] if count > 1 else [])],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      )
      for i in range(count)
    ]  # fmt: skip

  def finish(self, code=0) -> list[tuple[str, str]]:
    """(stdout, stderr) of every process; all must exit with `code`."""
    try:
      found = [p.communicate(timeout=PATIENCE) for p in self.processes]
    finally:
      for p in self.processes:
        p.kill()
    assert all(p.returncode == code for p in self.processes), found
    return found


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


@pytest.fixture(scope="module")
def launch(prepared):
  return lambda *args: Launch(prepared, *args)


@pytest.fixture(scope="module")
def one(prepared, tmp_path_factory):
  """Working directory of a run in one process, this one, on four of its devices."""
  workdir, c = tmp_path_factory.mktemp("one"), debug.get_config()
  c.precision.rules = RULES
  path = prepared.sources["main"]["path"]
  c.update_from_flattened_dict(CHANGES | {"data.sources.main.path": path})
  code, _, stderr = debug_runs.run_job("train", c, workdir, devices=4)
  assert code == 0, stderr
  return workdir


@pytest.fixture(scope="module")
def stopped(launch, tmp_path_factory):
  """The same in two processes, stopped on the way: workdir, (stdout, stderr)s, the step."""
  workdir = tmp_path_factory.mktemp("two")
  run = launch(workdir, 2)
  deadline, path = time.time() + PATIENCE, workdir / "metrics.jsonl"
  while not (path.exists() and path.read_text().count("grad_norm") >= 3):
    if time.time() > deadline or any(p.poll() is not None for p in run.processes):
      pytest.fail(f"never reached step 3: {run.finish()}")
    time.sleep(0.02)
  run.processes[1].send_signal(signal.SIGTERM)  # one of them is told, both leave
  said = run.finish(code=75)
  (step,) = map(int, re.findall(r"interrupted: saved step (\d+)", said[0][0]))
  assert 3 <= step < STEPS
  return types.SimpleNamespace(workdir=workdir, said=said, step=step)


@pytest.fixture(scope="module")
def two(launch, stopped, tmp_path_factory):
  """`stopped`, in a copy, and resumed."""
  workdir = tmp_path_factory.mktemp("both") / "two"
  shutil.copytree(stopped.workdir, workdir)
  return types.SimpleNamespace(workdir=workdir, said=launch(workdir, 2).finish())


def _rows(workdir) -> dict[int, dict]:
  """metrics.jsonl by step; nothing in it may be there twice."""
  found = {}
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    row = json.loads(line)
    before = found.setdefault(row.pop("step"), {})
    assert not before.keys() & row.keys()
    before.update(row)
  return found


def _assert_alike(got, want, steps: int):
  for step in range(1, steps + 1):
    # Rounding errors of sums, which FP8 then amplifies from step to step (train_step_test.py).
    rtol = tolerances.MESH_LOSS if step <= 3 else tolerances.MESH_STEP["block_128"]
    assert got[step]["loss"] == pytest.approx(want[step]["loss"], rel=rtol), step
  assert got[0][HELDOUT] == pytest.approx(want[0][HELDOUT], rel=tolerances.MESH_LOSS)


HELDOUT = "heldout/main/block_128/loss"


def test_two_processes_equal_one_until_they_are_stopped(one, stopped):
  got = _rows(stopped.workdir)
  assert sorted(got) == list(range(stopped.step + 1))
  _assert_alike(got, _rows(one), stopped.step)


@pytest.mark.slow
def test_two_processes_stopped_and_resumed_equal_one(one, two):
  want, got, key = _rows(one), _rows(two.workdir), HELDOUT
  assert sorted(want) == sorted(got) == list(range(STEPS + 1))
  _assert_alike(got, want, STEPS)
  assert got[STEPS][key] == pytest.approx(want[STEPS][key], rel=tolerances.MESH_STEP["block_128"])


# Not nothing: Gloo, XLA's collectives on CPU, greets on its own.
OURS = "step|loss|config|model|written"


def test_process_zero_alone_speaks(stopped):
  assert not re.search(OURS, stopped.said[1][0])
  made = json.loads((stopped.workdir / "provenance.json").read_text())
  assert made["processes"] == 2 and made["devices"].startswith("4 x ")
  assert re.search(OURS, stopped.said[0][0])


@pytest.mark.slow
def test_process_zero_alone_speaks_of_resuming(stopped, two):
  (output, _), (other, _) = two.said
  assert f"resuming from step {stopped.step}\n" in output
  assert "held-out loss in nats per token" in output
  assert not re.search(OURS, other), other


def test_a_stop_saves_the_place_of_every_process_in_the_data(stopped, prepared):
  """From there, together, they read the batch that one process would."""
  _assert_next_batch(stopped.workdir, stopped.step, prepared)


@pytest.mark.slow
def test_processes_continue_with_disjoint_halves_of_the_batch(two, prepared):
  _assert_next_batch(two.workdir, STEPS, prepared)


def _assert_next_batch(workdir, step: int, prepared):
  """From the positions they saved, together they read the batch that one process would."""
  rows, folder = [], workdir / "checkpoints" / str(step) / "data"
  for index in range(2):
    iterator = loader.train_batches(prepared, BATCH // 2, loader.Shard(index, 2))
    iterator.set_state(json.loads((folder / f"process_{index}-of-2.json").read_text()))
    rows += [row.tobytes() for row in next(iterator)["tokens_BL"]]
    iterator.close()
  whole = loader.train_batches(prepared, BATCH)
  for _ in range(step):
    next(whole)
  want = [row.tobytes() for row in next(whole)["tokens_BL"]]
  whole.close()
  assert sorted(rows) == sorted(want) and len(set(rows)) == BATCH


@pytest.mark.slow
def test_positions_of_two_processes_do_not_serve_one(launch, two):
  more = (f"--config.steps={STEPS + 2}", "--config.checkpoint.accept_changes=('steps',)")
  ((_, error),) = launch(two.workdir, 1, *more).finish(code=1)
  assert f"the data were read differently until step {STEPS}" in error
  assert "Traceback" not in error


@pytest.mark.slow
def test_two_processes_export_what_one_restores(launch, two):
  found = launch(two.workdir, 2, "--job=export", "--config.export.dtype=float32").finish()
  assert ['"dtype": "float32"' in output for output, _ in found] == [True, False]
  cfg = presets.DEBUG
  abstract = params_lib.abstract(transformer.params(cfg), cfg.dims, axes.LOCAL)
  saved = checkpoint.Checkpoints(str(two.workdir))
  want = params_lib.flatten(saved.restore_params(STEPS, abstract))
  saved.close()
  got, _ = hf_weights.load_params(str(two.workdir / "hf"), cfg)
  for name, value in params_lib.flatten(got).items():
    np.testing.assert_array_equal(value, want.pop(name), err_msg=name)
  assert not want
