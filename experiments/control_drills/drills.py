"""Drills of precision.policy: faults of the precision alone, with and without the policy.

Usage, about fifteen seconds of one CPU core a run:
  python experiments/control_drills/drills.py            # all runs that results.json lacks
  python experiments/control_drills/drills.py --table    # the tables of results.json

The design was committed before the first run. A tiny model trains for 200 steps on the language
reference that ships with Python. One fault begins at batch 60. The measure is the held-out loss
after 200 steps in the recipe's own forward pass, less that of the undisturbed run of the same seed
and recipe (of tensor_delayed's for e4m3_static, whose undisturbed run is not sound by itself).

A fault touches nothing but what a quantizer reads: a scaling state, or the input of mlp/down, which
grows by a power of two inside the forward pass while the weight that multiplies it shrinks by the
same. In exact arithmetic the loss, the gradients and the updates are those of the undisturbed run.
The controls show it: `bf16` (float32 on a CPU) and `tensor_current`, whose scales follow, take the
same steps to the bit. So a difference is the precision's, if it is above the noise: NUDGES runs of
each seed whose only fault is one tensor of weights one ulp up at the batch of the fault. A
difference counts as seen where it is of one sign and beyond the largest nudge in every seed.

`loss_spike` is no fault of precision: weights jump, as by a bad update. It is here because
roll_back(z) answers a jump of the loss; bf16 has it, too.

The policy is configs/fp8_guide.py's, its 2000 steps between refreshes cut to 90. FP8 are mlp/down
and attn/v, the linear layers that the faults touch; the others are BF16, so that a run compiles in
seconds.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from configs import base, fp8_guide
from fp8jax.config import resolve
from fp8jax.jobs import train
from fp8jax.kernels import choose
from fp8jax.models import mlp_swiglu, transformer
from fp8jax.params import Param
from fp8jax.run import provenance

SEEDS, STEPS, BEGIN = (0, 1, 2), 200, 60
POLICY = tuple(
  text.replace("every=2000", "every=90") for text in fp8_guide.get_config().precision.policy
)
ALARMS = tuple(fp8_guide.get_config().log.alarms)
LOOK_EVERY, CHECKPOINT_EVERY = 10, 20
FP8 = "layers/.*/(mlp/down|attn/v)"
DELAYED, STATIC, CURRENT, WIDE = "tensor_delayed(margin=1)", "e4m3_static", "tensor_current", "bf16"

# Severities. Drift: the input of mlp/down doubles every DRIFT_EVERY batches, DRIFT times. Outlier:
# it is 4096 times as large for one batch. Frozen: the amaxes of mlp/down stay at a 64th of their
# values at batch 60. Dead: amaxes and histories of attn/v grow by 2^20 once. Broken: an amax of
# mlp/down becomes NaN once. Spike: weights of mlp/down are multiplied by 20 once.
DRIFT, DRIFT_EVERY, OUTLIER, FROZEN, DEAD, SPIKE = 6, 7, 4096.0, 2.0**-6, 2.0**20, 20.0
# Tensors that a nudge moves by one ulp.
NUDGES = (("mlp", "up"), ("mlp", "down"), ("mlp", "gate"), ("attn", "q"), ("attn", "v"))

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.json"


# --- the model: mlp with a factor that faults set -------------------------------------------------


def _params(cfg):
  """SwiGLU's, and per layer a frozen factor of up's output that down takes back."""
  return mlp_swiglu.params(cfg) | {"fault": Param("", init="ones", decay=False, trainable=False)}


def _apply(p, s, x_BLD, context, cfg, run):
  """SwiGLU with (up * fault) and (down / fault); fault is a power of two, so nothing is rounded."""
  fault = p["fault"].astype(jnp.float32)
  p = {**p, "up": p["up"] * fault, "down": p["down"] / fault}
  return mlp_swiglu.apply(p, s, x_BLD, context, cfg, run)


MIXER = dataclasses.replace(mlp_swiglu.MIXER, params=_params, apply=_apply, hf_names=None)


# --- faults: (state, host batch, number of the batch) -> (state, host batch) ----------------------


def _with_mlp(state, **tensors):
  layers = state.params["layers"]
  mlp = {**layers["mlp"]} | {k: change(layers["mlp"][k]) for k, change in tensors.items()}
  return dataclasses.replace(state, params={**state.params, "layers": {**layers, "mlp": mlp}})


def _with_factor(state, factor: float):
  return _with_mlp(state, fault=lambda x: jnp.full_like(x, factor))


def drift():
  """The input of mlp/down grows: 64 times in all, and stays there."""

  def disturb(state, host, number):
    doublings = min(max(number - BEGIN, 0) // DRIFT_EVERY, DRIFT)
    return _with_factor(state, 2.0**doublings), host

  return disturb


def outlier():
  """The input of mlp/down is 4096 times as large in a single batch."""

  def disturb(state, host, number):
    return _with_factor(state, OUTLIER if number == BEGIN else 1.0), host

  return disturb


def _rows(name: str, rows: int) -> slice:
  """The layers of a site's stacked state: "layers/1-1/mlp/down" has layer 1."""
  match = re.match(r"layers/(\d+)-(\d+)/", name)
  return slice(int(match[1]), int(match[2]) + 1) if match else slice(0, rows)


def _with_states(state, site: str, change):
  states = {
    name: change(name, one) if name.endswith(site) else one
    for name, one in state.scaling_states.items()
  }
  return dataclasses.replace(state, scaling_states=states)


def frozen_scale():
  """Scales of mlp/down stay as they were, too small, whatever updates them."""
  frozen = {}

  def disturb(state, host, number):
    if number < BEGIN:
      return state, host

    def change(name, one):
      if number == BEGIN:
        frozen.setdefault("amax", jax.device_get(one.amax_3) * FROZEN)
      rows = _rows(name, len(one.amax_3))
      return dataclasses.replace(one, amax_3=jnp.asarray(frozen["amax"][rows]))

    return _with_states(state, "mlp/down", change), host

  return disturb


def dead_site():
  """Scales of attn/v become so large, once, that all of it underflows."""

  def disturb(state, host, number):
    if number == BEGIN:
      state = _with_states(
        state, "attn/v", lambda _, one: jax.tree.map(lambda x: x * np.float32(DEAD), one)
      )
    return state, host

  return disturb


def broken_scale():
  """An amax of mlp/down becomes NaN, once."""

  def disturb(state, host, number):
    if number == BEGIN:
      broken = lambda _, one: dataclasses.replace(one, amax_3=one.amax_3 * np.float32(np.nan))  # noqa: E731
      state = _with_states(state, "mlp/down", broken)
    return state, host

  return disturb


def loss_spike():
  """Weights of mlp/down are 20 times as large, once: no fault of precision."""

  def disturb(state, host, number):
    spiked = number == BEGIN
    return (_with_mlp(state, down=lambda x: x * np.float32(SPIKE)) if spiked else state), host

  return disturb


def nudge(number_of_tensor: int):
  """One tensor of all layers is one ulp larger, once."""
  mixer, name = NUDGES[number_of_tensor]

  def disturb(state, host, number):
    if number != BEGIN:
      return state, host
    layers = state.params["layers"]
    moved = {**layers[mixer], name: jnp.nextafter(layers[mixer][name], jnp.float32(np.inf))}
    params = {**state.params, "layers": {**layers, mixer: moved}}
    return dataclasses.replace(state, params=params), host

  return disturb


FAULTS = {
  "none": lambda: None,
  "drift": drift,
  "outlier": outlier,
  "frozen_scale": frozen_scale,
  "dead_site": dead_site,
  "broken_scale": broken_scale,
  "loss_spike": loss_spike,
} | {f"nudge_{n}": lambda n=n: nudge(n) for n in range(len(NUDGES))}
_NUDGED = tuple(f"nudge_{n}" for n in range(len(NUDGES)))
_INPUTS = ("none", "drift", "outlier")
_STATES = ("frozen_scale", "dead_site", "broken_scale")
# recipe -> (faults alone, faults with the policy); faults of states need states.
ARMS = {
  DELAYED: ((*_INPUTS, *_STATES, "loss_spike", *_NUDGED), (*_INPUTS, *_STATES, "loss_spike")),
  STATIC: ((*_INPUTS, *_STATES), (*_INPUTS, *_STATES)),
  CURRENT: ((*_INPUTS, *_NUDGED), ()),
  WIDE: ((*_INPUTS, "loss_spike", *_NUDGED), ()),
}


# --- runs -----------------------------------------------------------------------------------------


def spec_of(recipe: str, seed: int, has_policy: bool):
  c = base.get_config(recipe)
  c.model.update(
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    mixers=("attention_gqa", "mlp_fault"),
  )
  c.update_from_flattened_dict({
    "seed": seed, "steps": STEPS, "global_batch": 4, "seq_len": 64, "mesh.fsdp": 1,
    "eval.tokens": 8192, "eval.batch": 16, "checkpoint.every": CHECKPOINT_EVERY,
    "checkpoint.keep": 3, "optim.warmup_steps": 20, "optim.decay_steps": 40,
    "optim.peak_lr": 2e-3, "optim.min_lr": 2e-4, "optim.on_nonfinite": "skip",
    "memory.loss_chunk": 64,
    "log.tensorboard": False, "log.report": False, "log.tensor_stats_every": LOOK_EVERY,
    "log.alarms": ALARMS, "precision.rules": ((FP8, recipe), (".*", "bf16")),
    "precision.policy": POLICY if has_policy else (),
    "precision.verify_fp8_gemms": False,
  })  # fmt: skip
  if recipe == WIDE:
    c.precision.rules = ((".*", WIDE),)
  return resolve.resolve(c, 1, choose.current_device())


def one_run(recipe: str, seed: int, fault: str, has_policy: bool) -> dict:
  """{"recipe": held-out loss, "bf16": the same, "actions": […], "seconds"}; nan where it failed."""
  started = time.process_time()
  with tempfile.TemporaryDirectory() as workdir:
    spec = spec_of(recipe, seed, has_policy)
    try:
      summary = train.run(spec, workdir, base=dict(spec.flat), disturb=FAULTS[fault]())
      (by,) = summary["evaluations"][str(STEPS)].values()
      losses = {k: by[k]["loss"] for k in by}
      own = next((v for k, v in losses.items() if k != "bf16"), losses["bf16"])
      found = {"recipe": own, "bf16": losses["bf16"]}
    except train.NonFinite as e:
      found = {"recipe": math.nan, "bf16": math.nan, "stopped": str(e)[:120]}
    rows = [json.loads(x) for x in open(os.path.join(workdir, "metrics.jsonl"))]
    found["actions"] = [
      [r["step"], a["place"], a["text"]] for r in rows for a in r.get("actions", ())
    ]
    found["alarms"] = sum(len(r.get("alarms", ())) for r in rows)
    found["skipped"] = sum(bool(r.get("skipped")) for r in rows)
  return {**found, "cpu_seconds": round(time.process_time() - started, 1)}


def keys():
  """(key, recipe, seed, fault, whether with the policy) of every run, seed by seed."""
  for seed in SEEDS:
    for recipe, arms in ARMS.items():
      for has_policy, faults in enumerate(arms):
        for fault in faults:
          arm = "policy" if has_policy else "alone"
          yield f"{recipe} {fault} {arm} {seed}", recipe, seed, fault, bool(has_policy)


def _commit() -> str:
  made = provenance.sources()
  return f"{made['commit']}" + "-dirty" * bool(made["dirty"])


def run_all(limit: int):
  results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
  results.setdefault("provenance", {
    "command": "python experiments/control_drills/drills.py", "commit": _commit(),
    "machine": "one of two CPU cores", "jax": jax.__version__, "python": sys.version.split()[0],
    "policy": POLICY, "alarms": ALARMS,
  })  # fmt: skip
  for key, recipe, seed, fault, has_policy in keys():
    if key in results["runs"] or limit <= 0:
      continue
    results["runs"][key] = one_run(recipe, seed, fault, has_policy)
    limit -= 1
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(key, {k: v for k, v in results["runs"][key].items() if k != "actions"}, flush=True)


# --- tables ---------------------------------------------------------------------------------------


def _loss(runs, recipe, fault, arm, seed) -> float | None:
  return runs.get(f"{recipe} {fault} {arm} {seed}", {}).get("recipe")


def noise(runs, recipe: str, seed: int) -> float | None:
  """The largest |difference| of a nudged run to the undisturbed one; of delayed for static."""
  recipe = DELAYED if recipe == STATIC else recipe
  own = _loss(runs, recipe, "none", "alone", seed)
  nudged = [_loss(runs, recipe, fault, "alone", seed) for fault in _NUDGED]
  found = [abs(x - own) for x in nudged if x is not None and own is not None]
  return max(found) if found else None


def differences(runs, recipe: str, fault: str, arm: str) -> dict[int, float]:
  """{seed: held-out loss less that of the undisturbed run}; see the head of the file."""
  reference = DELAYED if recipe == STATIC else recipe
  pairs = {
    seed: (_loss(runs, recipe, fault, arm, seed), _loss(runs, reference, "none", "alone", seed))
    for seed in SEEDS
  }
  return {s: a - b for s, (a, b) in pairs.items() if a is not None and b is not None}


def verdict(found: dict[int, float], bands: dict[int, float | None]) -> str:
  """ "costs" or "gains" in every seed beyond its noise, or "not seen"; "" without all seeds."""
  if len(found) < len(SEEDS) or any(bands[s] is None for s in found):
    return ""
  if any(not math.isfinite(x) for x in found.values()):
    return "fails"
  if all(x == 0 for x in found.values()):
    return "equal to the bit"
  for sign, word in ((1, "costs"), (-1, "gains")):
    if all(sign * x > bands[s] for s, x in found.items()):
      return word
  return "not seen"


def table(runs) -> str:
  """Markdown: differences by seed, their verdict, what the policy did."""
  lines = ["| recipe | fault | alone | verdict | with the policy | verdict | actions |",
           "|---|---|---|---|---|---|---|"]  # fmt: skip

  def cells(recipe, fault, arm):
    found = differences(runs, recipe, fault, arm)
    if not found:
      return ("", "")
    bands = {seed: noise(runs, recipe, seed) for seed in SEEDS}
    return ", ".join(f"{x:+.3f}" for x in found.values()), verdict(found, bands)

  for recipe, (alone, _) in ARMS.items():
    bands = [noise(runs, recipe, seed) for seed in SEEDS]
    shown = ", ".join("" if b is None else f"{b:.3f}" for b in bands)
    own = [_loss(runs, recipe, "none", "alone", seed) for seed in SEEDS]
    losses = ", ".join("" if x is None else f"{x:.3f}" for x in own)
    lines.append(f"| `{recipe}` | none: loss {losses}; noise {shown} | | | | | |")
    for fault in (f for f in alone if f not in _NUDGED):
      if fault == "none" and recipe not in (DELAYED, STATIC):
        continue
      counts = [
        len(runs[key]["actions"])
        for seed in SEEDS
        if (key := f"{recipe} {fault} policy {seed}") in runs
      ]
      parts = (*cells(recipe, fault, "alone"), *cells(recipe, fault, "policy"))
      actions = ", ".join(map(str, counts))
      lines.append(f"| `{recipe}` | {fault} | {' | '.join(parts)} | {actions} |")
  return "\n".join(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--table", action="store_true")
  parser.add_argument("--limit", type=int, default=1000, help="runs at most")
  args = parser.parse_args()
  if not args.table:
    transformer.MIXERS["mlp_fault"] = MIXER
    jax.config.update(
      "jax_compilation_cache_dir", str(pathlib.Path(tempfile.gettempdir()) / "drills")
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    run_all(args.limit)
  print(table(json.loads(RESULTS.read_text())["runs"]))


if __name__ == "__main__":
  main()
