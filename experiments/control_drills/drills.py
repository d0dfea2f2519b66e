"""Drills of precision.policy: the same fault with and without the policy, beside no fault.

Usage, two to three minutes per seed and recipe on one CPU core:
  python experiments/control_drills/drills.py            # all runs that results.json lacks
  python experiments/control_drills/drills.py --table    # the table of results.json

The design was committed before the first run. A tiny model trains for 200 steps on the language
reference that ships with Python. One fault begins at batch 60. One policy, POLICY, has to do for
all faults. The measure is the held-out loss after 200 steps in the recipe's own forward pass, and
in BF16, which says how the weights alone fared. FAULTS say what each fault does; all but
"loss_spike" leave the function of the model as it is in exact arithmetic, so that the precision
alone suffers. The table gives differences to the undisturbed run of the same seed, beside the
spread of these. FP8 are mlp/down and attn/v, the linear layers that the faults touch; the others
are BF16, so that a run compiles in seconds.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from fp8jax.config import resolve
from fp8jax.jobs import train
from fp8jax.kernels import choose

RECIPES, SEEDS, STEPS, BEGIN = ("tensor_delayed", "e4m3_static"), (0, 1, 2), 200, 60
POLICY = (
  "refresh(alarm='underflow')",
  "refresh(alarm='saturation')",
  "switch_recipe(to='tensor_current', alarm='saturation', k=3, looks=4)",
  "roll_back(z=6.0, window=32, skip=2)",
)
ALARMS = (("saturation", ">", 0.01), ("underflow", ">", 0.3))
LOOK_EVERY, CHECKPOINT_EVERY = 10, 20
FP8 = "layers/.*/(mlp/down|attn/v)"

# Severities. Drift: mlp/up grows and mlp/down shrinks by so much per batch, over so many batches
# (45 times in all). Outlier: the same by 4096, for one batch. Frozen: the amaxes of mlp/down stay
# at a 64th of their values at batch 60. Dead: amaxes and histories of attn/v grow by 2^20 once.
# Spike: mlp/down of all layers is multiplied by 20 once, as by a bad update.
DRIFT, DRIFT_BATCHES, OUTLIER, FROZEN, DEAD, SPIKE = 1.1, 40, 4096.0, 2.0**-6, 2.0**20, 20.0

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.json"


# --- faults: (state, host batch, number of the batch) -> (state, host batch) ----------------------


def _with_mlp(state, up: float, down: float):
  layers = state.params["layers"]
  mlp = {**layers["mlp"], "up": layers["mlp"]["up"] * np.float32(up)}
  mlp["down"] = mlp["down"] * np.float32(down)
  params = {**state.params, "layers": {**layers, "mlp": mlp}}
  return dataclasses.replace(state, params=params)


def drift():
  """x of mlp/down grows and its weight shrinks, step by step."""

  def disturb(state, host, number):
    if BEGIN <= number < BEGIN + DRIFT_BATCHES:
      state = _with_mlp(state, DRIFT, 1 / DRIFT)
    return state, host

  return disturb


def outlier():
  """x of mlp/down is 4096 times as large, and its weight as much smaller, in a single batch."""

  def disturb(state, host, number):
    if number == BEGIN:
      state = _with_mlp(state, OUTLIER, 1 / OUTLIER)
    elif number == BEGIN + 1:
      state = _with_mlp(state, 1 / OUTLIER, OUTLIER)
    return state, host

  return disturb


def _rows(name: str, rows: int) -> slice:
  """The layers of a site's stacked state: "layers/1-1/mlp/down" has layer 1."""
  match = re.match(r"layers/(\d+)-(\d+)/", name)
  return slice(int(match[1]), int(match[2]) + 1) if match else slice(0, rows)


def frozen_scale():
  """Scales of mlp/down stay as they were, too small, whatever updates them."""
  frozen = {}

  def disturb(state, host, number):
    if number < BEGIN:
      return state, host
    states = dict(state.scaling_states)
    for name, one in states.items():
      if name.endswith("mlp/down"):
        amax = jax.device_get(one.amax_3)
        if number == BEGIN:
          frozen.setdefault("amax", amax * FROZEN)
        amax = jnp.asarray(frozen["amax"][_rows(name, len(amax))])
        states[name] = dataclasses.replace(one, amax_3=amax)
    return dataclasses.replace(state, scaling_states=states), host

  return disturb


def dead_site():
  """Scales of attn/v become so large, once, that all of it underflows."""

  def disturb(state, host, number):
    if number == BEGIN:
      states = {
        name: jax.tree.map(lambda x: x * np.float32(DEAD), one) if name.endswith("attn/v") else one
        for name, one in state.scaling_states.items()
      }
      state = dataclasses.replace(state, scaling_states=states)
    return state, host

  return disturb


def loss_spike():
  """Weights of mlp/down are 20 times as large, once: a transient fault of an update."""

  def disturb(state, host, number):
    return (_with_mlp(state, 1.0, SPIKE) if number == BEGIN else state), host

  return disturb


FAULTS = {
  "none": lambda: None,
  "drift": drift,
  "outlier": outlier,
  "frozen_scale": frozen_scale,
  "dead_site": dead_site,
  "loss_spike": loss_spike,
}


# --- runs -----------------------------------------------------------------------------------------


def plan_of(recipe: str, seed: int, has_policy: bool):
  c = base.get_config(recipe)
  c.model.update(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2, head_dim=32
  )
  c.update_from_flattened_dict({
    "seed": seed, "steps": STEPS, "global_batch": 4, "seq_len": 64, "mesh.fsdp": 1,
    "eval.tokens": 8192, "eval.batch": 16, "checkpoint.every": CHECKPOINT_EVERY,
    "checkpoint.keep": 3, "optim.warmup_steps": 20, "optim.decay_steps": 40,
    "optim.peak_lr": 2e-3, "optim.min_lr": 2e-4, "memory.loss_chunk": 64,
    "log.tensorboard": False, "log.report": False, "log.tensor_stats_every": LOOK_EVERY,
    "log.alarms": ALARMS, "precision.rules": ((FP8, recipe), (".*", "bf16")),
    "precision.policy": POLICY if has_policy else (),
    "precision.verify_fp8_gemms": False,
  })  # fmt: skip
  return resolve.resolve(c, 1, choose.current_device())


def one_run(recipe: str, seed: int, fault: str, has_policy: bool) -> dict:
  """{"recipe": held-out loss, "bf16": the same, "actions": […], "seconds"}; nan where it failed."""
  started = time.process_time()
  with tempfile.TemporaryDirectory() as workdir:
    plan = plan_of(recipe, seed, has_policy)
    try:
      summary = train.run(plan, workdir, base=dict(plan.flat), disturb=FAULTS[fault]())
      (by,) = summary["evaluations"][str(STEPS)].values()
      losses = {k: by[k]["loss"] for k in by}
      found = {"recipe": next(v for k, v in losses.items() if k != "bf16"), "bf16": losses["bf16"]}
    except train.NonFinite as e:
      found = {"recipe": math.nan, "bf16": math.nan, "stopped": str(e)[:120]}
    rows = [json.loads(x) for x in open(os.path.join(workdir, "metrics.jsonl"))]
    found["actions"] = [
      [r["step"], a["place"], a["text"]] for r in rows for a in r.get("actions", ())
    ]
    found["alarms"] = sum(len(r.get("alarms", ())) for r in rows)
  return {**found, "cpu_seconds": round(time.process_time() - started, 1)}


def _commit() -> str:
  git = lambda *args: subprocess.run(["git", *args], capture_output=True, text=True).stdout.strip()  # noqa: E731
  return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")


def run_all(limit: int):
  results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
  results["provenance"] = {
    "command": "python experiments/control_drills/drills.py", "commit": _commit(),
    "machine": "one of two CPU cores", "jax": jax.__version__, "python": sys.version.split()[0],
    "policy": POLICY, "alarms": ALARMS,
  }  # fmt: skip
  for seed in SEEDS:
    for recipe in RECIPES:
      for fault in FAULTS:
        for has_policy in (False, True):
          key = f"{recipe} {fault} {'policy' if has_policy else 'alone'} {seed}"
          if key in results["runs"] or limit <= 0:
            continue
          results["runs"][key] = one_run(recipe, seed, fault, has_policy)
          limit -= 1
          RESULTS.write_text(json.dumps(results, indent=1) + "\n")
          print(key, {k: v for k, v in results["runs"][key].items() if k != "actions"}, flush=True)


def table() -> str:
  """Markdown: held-out losses less that of the undisturbed run of the same seed, and actions."""
  runs = json.loads(RESULTS.read_text())["runs"]

  def loss(recipe, fault, arm, seed, which):
    return runs.get(f"{recipe} {fault} {arm} {seed}", {}).get(which)

  def cell(recipe, fault, arm, which):
    pairs = [
      (loss(recipe, fault, arm, seed, which), loss(recipe, "none", "alone", seed, which))
      for seed in SEEDS
    ]
    found = [a - b for a, b in pairs if a is not None and b is not None]
    if not found:
      return ""
    if not np.isfinite(found).all():
      return f"stopped in {sum(not math.isfinite(x) for x in found)} of {len(found)}"
    return f"{np.mean(found):+.3f} ({min(found):+.3f} to {max(found):+.3f})"

  lines = [
    "| recipe | fault | alone | policy | BF16 forward: alone | policy | actions per run |",
    "|---|---|---|---|---|---|---|",
  ]
  for recipe in RECIPES:
    own = [x for s in SEEDS if (x := loss(recipe, "none", "alone", s, "recipe")) is not None]
    for fault in FAULTS:
      cells = [
        cell(recipe, fault, arm, w) for w in ("recipe", "bf16") for arm in ("alone", "policy")
      ]
      if fault == "none" and own:
        cells[0] = cells[2] = f"{np.mean(own):.3f} ({min(own):.3f} to {max(own):.3f})"
      keys = [f"{recipe} {fault} policy {seed}" for seed in SEEDS]
      counts = ", ".join(str(len(runs[key]["actions"])) for key in keys if key in runs)
      lines.append(f"| `{recipe}` | {fault} | {' | '.join(cells)} | {counts} |")
  return "\n".join(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--table", action="store_true")
  parser.add_argument("--limit", type=int, default=1000, help="runs at most")
  args = parser.parse_args()
  if args.table:
    print(table())
    return
  jax.config.update(
    "jax_compilation_cache_dir", str(pathlib.Path(tempfile.gettempdir()) / "drills")
  )
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  run_all(args.limit)
  print(table())


if __name__ == "__main__":
  main()
