"""What the lab asks as a value: arms, comparisons, systems, and the runs that they need.

A comparison has as many seeds as its claimed effect needs to be told from 0, or a parity from its
margin, with a chance of 80 % and the interval that the ledger prints (Student's, Bonferroni's over
the comparisons of its system). SPREAD is the deviation of paired differences at 1M tokens. What
would need more seeds than MOST is an illustration of two seeds, or is not run. Arms of the same
configuration are one run, whatever their systems.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import re
import zlib
from collections.abc import Sequence
from typing import Any

from fp8jax import statistics
from fp8jax.errors import UserError, one_line

# Percent of the loss: deviation over seeds of the paired difference of training, 3.4M parameters
# after 1,048,576 tokens (experiments/2025_infir2: 0.38 to 0.47 %).
SPREAD = 0.47
MOST, ILLUSTRATION = 24, 2
TOKENS_PER_STEP, LONG = 2048, 512  # configs/pretrain_tiny.py's
Changes = tuple[tuple[str, Any], ...]
_seeds_needed = functools.cache(statistics.seeds_needed)  # asked again for every run
# Of SmolLM2; no part of a run's name.
FINE_TUNING = (
  ("init.workdir", ""), ("init.weights_only", False), ("init.hf", "assets/smollm2-135m"),
  ("precision.compute_dtype", "bfloat16"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arm:
  """What a system varies.

  Attributes:
    name: in the ledger.
    recipe: "float32", or a recipe; one that is not known yet is named all the same.
    changes: of other keys.
    rates: peak learning rates in place of the system's.
  """

  name: str
  recipe: str = "bf16"
  changes: Changes = ()
  rates: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A question about two arms.

  Attributes:
    question: "close": the candidate's loss is within statistics.BAR percent of the baseline's;
      "higher" or "lower": the sign of the difference, as claimed.
    effect: percent of the loss that the claim says, without its sign; of "close" the true
      difference that is allowed for when seeds are counted.
    quantity: "training", the mean after the warm-up, or "heldout", the last held-out loss in the
      arm's own precision.
  """

  candidate: str
  baseline: str
  question: str
  effect: float
  quantity: str = "training"

  def __post_init__(self):
    if self.question not in ("close", "higher", "lower"):
      raise ValueError(f"question={self.question!r}: expected 'close', 'higher' or 'lower'")
    if self.quantity not in ("training", "heldout"):
      raise ValueError(f"quantity={self.quantity!r}: expected 'training' or 'heldout'")

  def seeds(self, count: int) -> int | None:
    """Seeds with which the interval, one of `count`, decides; None: more than MOST."""
    is_close = self.question == "close"
    ends = (-statistics.BAR, statistics.BAR) if is_close else (0.0, math.inf)
    return _seeds_needed(self.effect, SPREAD, *ends, count=count, most=MOST)


@dataclasses.dataclass(frozen=True)
class System:
  """A paper's arms and the questions about them.

  Attributes:
    slug: year and name, as the folder of the experiment.
    size, corpus, steps: of configs/pretrain_tiny.py.
    rates: peak learning rates that every arm visits; () is the configuration's.
    fixed_seeds: 0: as many as the comparisons need.
    illustration: two seeds and no verdict.
    is_mapped: an arm's seeds and rates train at once (--vmap).
    config: "FILE:ARM" instead of configs/pretrain_tiny.py, {recipe} in it; with `needs`, a file
      that must be there, and the command that makes it.
    twins: seeds of an arm that a comparison asks about that have a nudged twin (init.nudge), the
      noise floor of their recipe; one in an illustration.
    first_seed: the others follow it.
    shows: tables of stability.py that the ledger prints besides.
  """

  slug: str
  arms: tuple[Arm, ...]
  comparisons: tuple[Comparison, ...]
  size: str = "3m"
  corpus: str = "python_docs"
  steps: int = LONG
  rates: tuple[float, ...] = ()
  fixed_seeds: int = 0
  illustration: bool = False
  is_mapped: bool = False
  config: str = ""
  needs: tuple[str, str] = ("", "")
  twins: int = 2
  first_seed: int = 0
  shows: tuple[str, ...] = ()

  def seeds(self, arm: Arm) -> int:
    """How many seeds an arm has: those of its comparison that needs most, two without one."""
    if self.illustration:
      return self.fixed_seeds or ILLUSTRATION
    own = [c for c in self.comparisons if arm.name in (c.candidate, c.baseline)]
    wanted = [c.seeds(len(self.comparisons)) for c in own]
    most = max((n for n in wanted if n), default=ILLUSTRATION)
    return self.fixed_seeds or most if own or not self.comparisons else ILLUSTRATION

  @property
  def tokens(self) -> int:
    """Of a run; positions of windows in fine-tuning."""
    return self.steps * (TOKENS_PER_STEP // 2 if self.config else TOKENS_PER_STEP)

  def first(self, arm: Arm) -> "Run":
    """The first run of an arm."""
    return self.runs((arm,))[0]

  def runs(self, arms: tuple[Arm, ...] = ()) -> list["Run"]:
    """Every run of these arms, or of all, a twin after its own."""
    made = []
    for arm in arms or self.arms:
      is_asked = any(c.candidate == arm.name for c in self.comparisons)
      twins = is_asked * (min(self.twins, 1) if self.illustration else self.twins)
      seeds = range(self.first_seed, self.first_seed + self.seeds(arm))
      for rate, seed in itertools.product(arm.rates or self.rates or (None,), seeds):
        changes = arm.changes + ((("optim.peak_lr", rate),) if rate else ())
        own = (self.size, self.corpus, arm.recipe, changes, self.steps, seed)
        for is_twin in (False, True)[: 1 + (seed < twins)]:
          made.append(Run(*own, is_twin, self.config))
    return made


@dataclasses.dataclass(frozen=True)
class Run:
  """One training run; its name is its file in the results."""

  size: str
  corpus: str
  recipe: str
  changes: Changes
  steps: int
  seed: int
  is_twin: bool = False
  config: str = ""

  @property
  def group(self) -> str:
    """The name without seed and twin."""
    skipped = dict(FINE_TUNING) if self.config else {}
    said = [f"{k.rpartition('.')[2]}={_short(v)}" for k, v in self.changes if k not in skipped]
    first = pathlib.Path(self.config).stem.partition(":")[0] or f"{self.size}-{self.corpus}"
    if sum(map(len, said)) > 120:  # a file's name has an end
      kept = [s for s in said if s.startswith(("hidden_size", "optimizer", "peak_lr"))]
      rest = zlib.crc32("-".join(s for s in said if s not in kept).encode())
      said = sorted([*kept, f"more={rest:08x}"])  # the rate last
    return "-".join([first, _short(self.recipe), *said, f"{self.steps}steps"])

  @property
  def name(self) -> str:
    return f"{self.group}-seed{self.seed}" + "-twin" * self.is_twin

  @property
  def trial(self) -> tuple[str, dict[str, Any]]:
    """("FILE:ARM", changes beside it), as launch.py and fp8jax.config.named take them."""
    config = self.config.format(recipe=self.recipe)
    config = config or f"configs/pretrain_tiny.py:{self.size}-{self.corpus}-{self.recipe}"
    changes = dict(self.changes) | {"seed": self.seed}
    if not self.config:
      tail = self.steps // 8
      changes |= {"steps": self.steps, "optim.warmup_steps": tail, "optim.decay_steps": tail}
      changes |= {"kernels.matmul": "dequantized"}  # the reference's codes, sums in float32
      if "optim.peak_lr" in changes:
        changes["optim.min_lr"] = changes["optim.peak_lr"] / 10
    return config, changes | ({"init.nudge": True} if self.is_twin else {})

  def reason(self) -> str:
    """Why the run cannot start with this library, or ""."""
    from fp8jax.config import named, resolve
    from fp8jax.kernels import choose

    try:
      resolve.resolve(named.load(*self.trial), 1, choose.current_device())
    except (UserError, ValueError, OSError) as e:
      said = re.sub(r"^\d+ problems? in the config: - ", "", one_line(e))
      return said.partition(". Known: ")[0].partition("; did you mean")[0]
    return ""


def _short(value: Any) -> str:
  text = str(value)
  kept = "".join(c if c.isalnum() or c in "._=" else "_" for c in text).strip("_")
  return kept if len(kept) <= 40 else f"{kept[:32]}_{sum(map(ord, text)):x}"


def all_runs(systems: Sequence[System]) -> dict[str, Run]:
  """{name: run} without repetition, verdicts before illustrations, seed by seed."""
  ordered = sorted(systems, key=lambda s: s.illustration)
  runs = [run for system in ordered for run in system.runs()]
  return {run.name: run for run in runs}
