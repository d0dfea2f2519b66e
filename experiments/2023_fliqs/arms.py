"""The arms of FLIQS on text and digits: one result file each; the same command goes on.

command: python experiments/2023_fliqs/arms.py --workdir DIR [REGEX]    (see README.md for hours)
         python experiments/2023_fliqs/arms.py --workdir DIR --plan     prints arms without a result
         ... --steps 12 --out DIR/results    a miniature, whose results are kept apart

Run it from a worktree that nobody edits: the commit stands in every result. Text needs
`python experiments/corpora/prepare.py all`, digits `pip install scikit-learn`.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX looks for others

import digits  # noqa: E402
import numpy as np  # noqa: E402

from configs import base, pretrain_tiny  # noqa: E402
from fp8jax.jobs import dispatch  # noqa: E402
from fp8jax.recipe import rules as rules_lib  # noqa: E402
from fp8jax.run import provenance  # noqa: E402
from fp8jax.search import controller, cost  # noqa: E402

# The paper's lists are not published with it; these are ours. BF16 is last.
SPACES = {
  "fp-s": ("e2m1_dynamic", "fp8_dynamic", "bf16"),
  "fp-l": ("e2m1_dynamic", "e2m2_dynamic", "e3m2_dynamic", "e3m3_dynamic", "fp8_dynamic", "bf16"),
  "int-s": ("int4_dynamic", "int8", "bf16"),
  "int-l": ("int4_dynamic", "int5_dynamic", "int6_dynamic", "int7_dynamic", "int8", "bf16"),
}
UNIFORM = ("e2m1_dynamic", "fp8_dynamic", "int4_dynamic", "int8", "bf16")
# Shares of BF16's BOPs: near 4 bits, as the paper's 30.8 and 32.8 of 467.7, and half of 8 bits.
TARGETS, SEEDS = (0.07, 0.125), (0, 1, 2)
STEPS = {"text": 512, "text_3m": 512, "digits": 4000}
# Measured: (per step, beside the steps of an arm), seconds of a core that others shared.
SECONDS = {"text": (0.21, 40), "text_3m": (0.75, 60), "digits": (0.005, 45)}
_TEXT = {"text": "0p8m-python_docs", "text_3m": "3m-python_docs"}
# The 3M model has half of the spaces, one target and no uniform INT8: its steps take four times
# as long, and the 0.8M model misses the lower target by as much as two.
_FEWER = {"text_3m": (("fp-s", "int-s"), (0.125,), UNIFORM[:3] + UNIFORM[4:])}


@dataclasses.dataclass(frozen=True)
class Arm:
  """One training.

  Attributes:
    task: of STEPS.
    method: "uniform", "fliqs" or "ranked" (formats fixed by a knapsack over scores of the model
      that trained in BF16).
    formats: a recipe, or a space.
    target: share of BF16's BOPs; 0 of "uniform".
    seed: of weights, data and samples.
    is_twin: starts at weights one ulp away: the noise floor of its arm.
  """

  task: str
  method: str
  formats: str
  target: float
  seed: int
  is_twin: bool = False

  @property
  def name(self) -> str:
    of = f"_{self.target:g}" if self.target else ""
    return f"{self.task}_{self.method}_{self.formats}{of}_seed{self.seed}" + "_twin" * self.is_twin


def arms() -> list[Arm]:
  """All, those that others need first."""
  every = []
  for task in STEPS:
    spaces, targets, uniform = _FEWER.get(task, (SPACES, TARGETS, UNIFORM))
    for seed in SEEDS:
      every += [Arm(task, "uniform", name, 0.0, seed) for name in reversed(uniform)]
      for target in targets:
        every += [Arm(task, "fliqs", name, target, seed) for name in spaces]
        every += [Arm(task, "ranked", name, target, seed) for name in ("fp-s", "int-s")]
    if task in _FEWER:
      every += [Arm(task, "fliqs", name, targets[0], SEEDS[0], is_twin=True) for name in spaces]
  return every


# --- text ----------------------------------------------------------------------------------------


def _config(recipe: str, arm: Arm, steps: int):
  c = pretrain_tiny.get_config(f"{_TEXT[arm.task]}-{recipe}")
  c.steps, c.seed, c.precision.verify_fp8_gemms = steps, arm.seed, False
  c.init.nudge = arm.is_twin
  c.optim.warmup_steps = c.optim.decay_steps = max(steps // 8, 1)
  c.eval.precisions = ("recipe", "bf16")
  if steps < STEPS[arm.task]:  # a miniature
    c.eval.tokens, c.sensitivity.tokens, c.checkpoint.every = 2048, 4096, 0
  return c


def _call(job: str, c, workdir: str):
  return dispatch.call(job, c, base.get_config(), workdir)


def text(arm: Arm, workdir: str, steps: int) -> dict:
  """The result of an arm; its run lies in WORKDIR/NAME."""
  folder = os.path.join(workdir, arm.name)
  started = time.time()
  if arm.method == "fliqs":
    c = _config("fp8_dynamic", arm, steps)
    s = c.search
    s.options, s.target, s.delay = SPACES[arm.formats], arm.target, steps // 4
    s.rate = 0.05
    found = _call("search", c, folder)
    if "exit_code" in found:
      raise KeyboardInterrupt
    rules, share, evaluation = found["rules"], found["cost"]["share"], found["evaluation"]
  else:
    c = _config("fp8_dynamic" if arm.method == "ranked" else arm.formats, arm, steps)
    if arm.method == "ranked":
      c.precision.sensitivity = f"{_ranking(arm, workdir, steps)}:bops"
    found = _call("train", c, folder)
    if "exit_code" in found:
      raise KeyboardInterrupt
    rules = json.loads(pathlib.Path(folder, "config.json").read_text())["resolved"][
      "precision.rules"]  # fmt: skip
    share, evaluation = _share(c, rules), found["evaluations"][str(steps)]
  precisions = next(iter(evaluation.values()))
  own = next(iter(precisions.values()))["loss"]
  return {
    "bops": share, "heldout": own, "heldout_bf16": precisions.get("bf16", {}).get("loss", own),
    "rules": rules, "seconds": time.time() - started,
  }  # fmt: skip


def _ranking(arm: Arm, workdir: str, steps: int) -> str:
  """formats.json of the run in BF16 of this seed, for a budget."""
  trained = os.path.join(workdir, dataclasses.replace(
    arm, method="uniform", formats="bf16", target=0.0).name)  # fmt: skip
  c = _config("fp8_dynamic", arm, steps)
  c.sensitivity.recipes, c.sensitivity.bops = SPACES[arm.formats][:-1], arm.target
  out = os.path.join(workdir, f"{arm.name}_ranking")
  dispatch.call("sensitivity", c, base.get_config(), trained, out=out)
  return os.path.join(out, "formats.json")


def _share(c, rules) -> float:
  """BOPs of the layers' linear products, as a share of BF16's."""
  from fp8jax.config import resolve
  from fp8jax.kernels import choose

  spec = resolve.resolve(c, 1, choose.current_device())
  macs = {k: v for k, v in cost.macs_per_token(spec.model).items() if k != "head"}
  of = rules_lib.match([*macs, "head"], [tuple(rule) for rule in rules])
  recipes = {name: rules_lib.recipe_by_name(of[name]) for name in macs}
  return cost.bops(macs, recipes) / (cost.WIDE**2 * sum(macs.values()))


# --- digits --------------------------------------------------------------------------------------


def images(arm: Arm, workdir: str, steps: int) -> dict:
  """The result of an arm on digits; nothing is kept but that."""
  del workdir
  started = time.time()
  is_uniform = arm.method == "uniform"
  options = (arm.formats, "bf16") if is_uniform else SPACES[arm.formats]
  task = digits.Task(tuple(dict.fromkeys(options)), steps)
  sites = len(task.space.decisions)
  if is_uniform:
    trained = task.train(arm.seed, np.zeros(sites, int))
  elif arm.method == "fliqs":
    rules = controller.Rules(steps, steps // 4)
    trained = task.train(arm.seed, target=arm.target, rules=rules)
  else:
    wide = task.train(arm.seed, np.full(sites, len(options) - 1))
    trained = task.train(arm.seed, task.ranked(wide.params, arm.target))
  p = trained.probabilities
  return {
    "bops": task.space.cost(trained.choice), "heldout": trained.heldout,
    "errors": trained.errors, "training": trained.training,
    "chosen": task.space.assigned(trained.choice),
    "least_probable": None if p is None else float(p.max(1).min()),
    "seconds_per_step": trained.seconds_per_step, "seconds": time.time() - started,
  }  # fmt: skip


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("regex", nargs="?", default=".*")
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--out", default=str(HERE / "results"))
  parser.add_argument("--steps", type=int, default=0, help="of every arm: a miniature")
  parser.add_argument("--plan", action="store_true")
  args = parser.parse_args()
  os.chdir(ROOT)  # assets/ is named from here
  out = pathlib.Path(args.out)
  if args.steps and out == HERE / "results":
    parser.error("--steps is for a miniature: name another --out")
  left = [a for a in arms() if re.fullmatch(args.regex, a.name)]
  left = [a for a in left if not (out / f"{a.name}.json").exists()]
  if args.plan:
    hours = sum(STEPS[a.task] * SECONDS[a.task][0] + SECONDS[a.task][1] for a in left) / 3600
    print("\n".join(a.name for a in left), f"\n{len(left)} arms, {hours:.1f} hours of one core")
    return
  out.mkdir(parents=True, exist_ok=True)
  for number, arm in enumerate(left, 1):
    steps = args.steps or STEPS[arm.task]
    print(f"{number} of {len(left)}: {arm.name}, {steps} steps", file=sys.stderr, flush=True)
    result = (text if arm.task in _TEXT else images)(arm, args.workdir, steps)
    origin = provenance.provenance(dataclasses.asdict(arm), "", arm.seed, 1)
    provenance.write_json(str(out), f"{arm.name}.json", {
      "arm": dataclasses.asdict(arm), "steps": steps, **result, "provenance": origin,
    })  # fmt: skip


if __name__ == "__main__":
  main()
