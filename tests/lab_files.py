"""The lab's scripts, and results of runs that nobody made."""

import dataclasses
import pathlib

import numpy as np
import run_files

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"
ledger = run_files.script(EXPERIMENTS / "ledger.py")
design, runs, results = ledger.design, ledger.runs_lib, ledger.results_lib

ORIGIN = {"commit": "c0ffee", "cpu": "one", "jax": "0.12", "jaxlib": "0.12", "backend": "cpu"}
ARMS = (design.Arm("bf16"), design.Arm("x", "mxfp8"))
WARMUP = 2


def system_of(*questions, **more):
  comparisons = tuple(design.Comparison("x", "bf16", q, 1.0) for q in questions)
  return design.System("2025_x", ARMS, comparisons, **more)


def result_of(system, arm, seed, losses, twin=False, status="finished", **origin):
  (run, *_) = (
    r for r in dataclasses.replace(system, fixed_seeds=9).runs((ARMS[arm],)) if r.seed == seed
  )
  run = dataclasses.replace(run, is_twin=twin)
  held = {"main": {"bf16": losses[-1], **({"own": losses[-1] * 1.5} if arm else {})}}
  return results.Result(
    run, status, tuple(losses), WARMUP, held if status == "finished" else {},
    {**ORIGIN, **origin}, f"data of {seed}", 1.0,
  )  # fmt: skip


def pairs_of(system, count, percent=0.4, **origin):
  """Losses of `count` seeds: x is so many percent above bf16, and seeds differ."""
  rng, made, expected = np.random.default_rng(0), [], []
  for seed in range(count):
    base = 3 + rng.random(8)
    other = base * (1 + percent / 100 + rng.normal(size=8) / 2000)
    expected.append(float(np.mean(100 * (other[WARMUP:] / base[WARMUP:] - 1))))
    made += [result_of(system, arm, seed, x, **origin) for arm, x in enumerate((base, other))]
  return made, expected


def row_of(system, found, which=0):
  return ledger.rows(ledger.index(found), [system])[which]
