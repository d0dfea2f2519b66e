"""Short runs of configs/debug.py in the tests of jobs: configurations, and what a run leaves."""

import contextlib
import io
import json
import pathlib
from unittest import mock

import jax
import numpy as np

from configs import base, debug
from fp8jax import params as params_lib
from fp8jax.config import resolve
from fp8jax.data import loader
from fp8jax.jobs import dispatch, table
from fp8jax.kernels.choose import Device
from fp8jax.run import checkpoint
from fp8jax.step import train_spec

STEPS = 4
CHANGES = {
  "steps": STEPS,
  "global_batch": 2,
  "seq_len": 128,
  "eval.tokens": 512,
  "eval.batch": 2,
  "checkpoint.every": 0,
  "log.every": 2,
  "optim.warmup_steps": 1,
  "optim.decay_steps": 1,
  "log.report": False,
}
FLAGS = tuple(f"--config.{k}={v}" for k, v in CHANGES.items())
# Runs of FLAGS inspect the step that they lower; compiled/fp8_gemms_test.py does for all recipes.
QUICK = {"precision.verify_fp8_gemms": False}


def config(arm="", **changes):
  """configs/debug.py with CHANGES, QUICK and these."""
  c = debug.get_config(arm)
  c.update_from_flattened_dict(CHANGES | QUICK | changes)
  return c


def spec(c, job="train") -> train_spec.TrainSpec:
  return resolve.resolve(c, 1, Device("cpu"), needs=table.JOBS[job].needs)


def run_job(job, c, workdir, devices=1, **options) -> tuple[int, str, str]:
  """A job in this process, on so many of its devices: (exit code, stdout, stderr)."""
  out, err = io.StringIO(), io.StringIO()
  with (
    mock.patch.object(jax, "device_count", lambda: devices),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    code = dispatch.run(job, c, base.get_config(), "configs/debug.py", str(workdir), **options)
  return code, out.getvalue(), err.getvalue()


def read_json(path):
  return json.loads(pathlib.Path(path).read_text())


def rows(workdir) -> list[dict]:
  """The rows of metrics.jsonl."""
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def saved_params(workdir, step, spec) -> dict[str, np.ndarray]:
  """The parameters of a checkpoint, by path."""
  saved = checkpoint.Checkpoints(str(workdir))
  abstract = params_lib.abstract(spec.declaration, spec.model.dims, spec.run.layout)
  found = saved.restore_params(step, abstract)
  saved.close()
  return {k: np.asarray(v) for k, v in params_lib.flatten(found).items()}


def write_corpus(path, documents) -> dict:
  """Writes a JSONL file; the changes of a configuration that reads it."""
  path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
  return {"data.sources.main.kind": "jsonl", "data.sources.main.path": str(path)}


def take(c, n) -> list[dict]:
  """The first n batches of two sequences."""
  iterator = loader.train_batches(resolve.resolve_data(c), 2)
  found = [next(iterator) for _ in range(n)]
  iterator.close()
  return found
