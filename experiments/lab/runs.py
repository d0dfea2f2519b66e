"""The run list of the numerics lab as a value: systems, arms, seeds, tokens, corpora, hours.

command: python experiments/lab/runs.py            prints systems, seeds, hours, what is unknown
         python experiments/lab/runs.py measure    times 20 steps of every recipe -> hours.json

A comparison has as many seeds as its claimed effect needs to be told from 0, or a parity from its
margin, with a chance of 80 % and the interval that the ledger prints (Student's, Bonferroni's over
the comparisons of its system). SPREAD is the deviation of paired differences at 1M tokens. What
would need more seeds than MOST is an illustration of two seeds, or is not run. Arms of the same
configuration are one run, whatever their systems.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX looks for others

from configs import pretrain_tiny  # noqa: E402
from fp8jax import statistics  # noqa: E402
from fp8jax.errors import UserError, one_line  # noqa: E402

HOURS = HERE / "hours.json"
# Percent of the loss: deviation over seeds of the paired difference of training, 3.4M parameters
# after 1,048,576 tokens (experiments/2025_infir2: 0.38 to 0.47 %).
SPREAD = 0.47
MOST, ILLUSTRATION, BUDGET_HOURS = 24, 2, 24.0
TOKENS_PER_STEP, LONG = 2048, 512  # configs/pretrain_tiny.py's
# Before a recipe of the size was measured; of SmolLM2-135M with 1,024 tokens a step.
UNMEASURED = ({"step_seconds": 1.0, "start_seconds": 20.0},
              {"step_seconds": 9.0, "start_seconds": 60.0})  # fmt: skip
# Recipes without blocks that are not measured: they cost at most twice `bf16`.
ELEMENTWISE = ("bf16", "mask_", "munit_", "unit_", "fp8_unscaled")
Changes = tuple[tuple[str, Any], ...]


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
    return statistics.seeds_needed(self.effect, SPREAD, *ends, count=count, most=MOST)


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
    twins: seeds that have a nudged twin (init.nudge), the noise floor of their recipe; none where
      no verdict is wanted, nor where seeds train at once.
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
      seeds = range(self.first_seed, self.first_seed + self.seeds(arm))
      for rate, seed in itertools.product(arm.rates or self.rates or (None,), seeds):
        changes = arm.changes + ((("optim.peak_lr", rate),) if rate else ())
        own = (self.size, self.corpus, arm.recipe, changes, self.steps, seed)
        is_plain = self.illustration or self.is_mapped
        for is_twin in (False, True)[: 2 if seed < self.twins and not is_plain else 1]:
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
    skipped = dict(_FINE_TUNING) if self.config else {}
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


# --- the systems ----------------------------------------------------------------------------------

BF16, FLOAT32 = Arm("bf16"), Arm("float32", "float32")


def _arms(*pairs: str, **recipes: str) -> tuple[Arm, ...]:
  """bf16, and arms of recipes: "name" where both are the same."""
  return (BF16, *(Arm(p, p) for p in pairs), *(Arm(name, r) for name, r in recipes.items()))


def _higher(effect: float, *candidates: str, baseline="bf16", **more) -> tuple[Comparison, ...]:
  return tuple(Comparison(c, baseline, "higher", effect, **more) for c in candidates)


# Six narrow layers, the last of them wide: the 15 % of the linears that NVFP4 leaves in BF16.
_DEEP = (("model.num_layers", 6),)
_LAST = (*_DEEP, ("precision.last_bf16", 1))


def _nvfp4(name: str, recipe: str, changes: Changes = _LAST) -> Arm:
  return Arm(name, recipe, changes)


def _switch(at: int, recipe: str) -> Changes:
  """From step `at` on the forward pass is wide."""
  return (*_LAST, ("precision.schedule", ((at, (("head", "bf16"), ("layers/.*", recipe))),)))


_COPIES = ("memory.save_norm_inputs", "memory.save_gate_up")
_COAT = (("optim.moment_format", "coat"), *((key, "e4m3_16") for key in _COPIES))
_TRILLION = (("optim.master_format", "f16"), ("optim.moment_format", "tensor_e4m3_e5m2"),
             ("precision.smooth_swiglu", "channel"))  # fmt: skip
_O2 = (("optim.master_format", "f16"), ("optim.grad_format", "e4m3"),
       ("optim.moment_format", "fp8lm"))  # fmt: skip


_FINE_TUNING = (
  ("init.workdir", ""), ("init.weights_only", False), ("init.hf", "assets/smollm2-135m"),
  ("precision.compute_dtype", "bfloat16"),
)  # fmt: skip


def _width(width: int) -> Changes:
  sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_heads": width // 64,
           "num_kv_heads": max(width // 128, 1)}  # fmt: skip
  return tuple((f"model.{k}", v) for k, v in sizes.items())


# Rates are a factor of two apart; of Lion on weights of deviation 1, powers of two. 512 visits the
# middle ones: the ledger says which is best below 512, and what 512 has there.
_WIDTHS, _RATES = (64, 128, 256, 512), (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
_LION_RATES = tuple(2.0**-k for k in (6, 5, 4, 3, 2))


def _with_factors(head: str, layers: str, scaling: str) -> Changes:
  """Weights of deviation 1 and constant factors."""
  rules = (("head", head), ("layers/.*", layers))
  return (("model.residual_tau", 0.4), ("model.init_std", 1.0), ("model.unit_scaling", scaling),
          ("precision.rules", rules))  # fmt: skip


# A head of its own gain and norms after blocks; rates by width, a decay that is no rate's, Lion.
# The gradient of logits has deviation 1: with that of the mean loss E5M2 without scales is 0.
_MUNIT = (
  *_with_factors("munit_head", "munit_scaling", "loss"), ("optim.base_width", 64),
  ("optim.optimizer", "lion"), ("optim.b2", 0.99), ("optim.decay_by", "schedule"),
  ("optim.weight_decay", 1e-4), ("optim.grad_clip_norm", 0.0),
)  # fmt: skip
_UNTIED, _FLOAT16 = (("model.tie_embeddings", False),), (("precision.compute_dtype", "float16"),)
_LOSS_SCALE = (("loss_scale.kind", "dynamic"), ("optim.on_nonfinite", "skip"))
_UNIT_RATE = (("optim.peak_lr", 0.03), ("optim.grad_clip_norm", 0.0))


def _unit(name: str, layers: str, changes: Changes = ()) -> Arm:
  factors = _with_factors("unit_head", layers, "all")
  return Arm(name, layers, (*_UNTIED, *factors, *_UNIT_RATE, *changes))


# The best of 2021_lns_madam_rates; Adam's 0.002 is 0.1 of the weights' first deviation, as this is.
_MADAM = (("optim.optimizer", "madam"), ("optim.peak_lr", 0.08))
_MASKS = ("mask_e8m3", "mask_e8m4", "mask_e8m5", "mask_e7m7")


def _by_width(recipe: str, rates: tuple[float, ...], changes: Changes = ()) -> tuple[Arm, ...]:
  return tuple(
    Arm(f"{recipe}, width {w}", recipe, _width(w) + changes, rates[1:-1] if w == 512 else ())
    for w in _WIDTHS
  )


SYSTEMS = (
  # Its own recipe alone, with as many seeds as the budget has: an interval of +-0.23 %.
  System("2025_infir2", (*_arms("block_128_pow2"), FLOAT32), (
    Comparison("block_128_pow2", "bf16", "close", 0.0),
    Comparison("block_128_pow2", "bf16", "close", 0.0, "heldout"),  # as served
  ), fixed_seeds=MOST - 5),
  System("2025_fp4", _arms(**{"w4a8": "fp4_w4a8", "w4a4": "fp4_w4a4", "w4a4 + dge": "fp4_dge",
                              "w4a4 + occ": "fp4_occ", "w4a4 + both": "fp4"}), (
    *_higher(2.0, "w4a4"), *(Comparison(c, "w4a4", "lower", 1.0)
                             for c in ("w4a8", "w4a4 + dge", "w4a4 + occ", "w4a4 + both")),
  )),
  System("2025_quartet", _arms("quartet", **{"mxfp4 plain": "mxfp4", "halo-4": "halo_fp4_2"}), (
    *_higher(2.0, "mxfp4 plain"), Comparison("quartet", "mxfp4 plain", "lower", 1.0),
    Comparison("quartet", "halo-4", "lower", 1.0),
  ), size="0p8m", twins=1),
  System("2025_nvfp4", (
    Arm("bf16", "bf16", _DEEP), _nvfp4("full", "nvfp4_sr_rht"),
    _nvfp4("- SR", "nvfp4_rht"), _nvfp4("- RHT", "nvfp4_sr"),
    _nvfp4("- 2-D weights", "nvfp4_1d"), _nvfp4("no wide layers", "nvfp4_sr_rht", _DEEP),
    _nvfp4("four or six", "nvfp4_4or6"),
    _nvfp4("MS-EDEN backward", "nvfp4_eden"), _nvfp4("SR with room", "nvfp4_sr_room"),
    _nvfp4("wide forward from 7/8", "nvfp4_sr_rht", _switch(168, "nvfp4_backward")),
  ), (
    *_higher(1.5, "full"), *_higher(1.0, "- SR", "- RHT", "- 2-D weights", "no wide layers",
                                    baseline="full"),
    *(Comparison(c, "full", "lower", 1.0) for c in ("four or six", "MS-EDEN backward")),
    Comparison("MS-EDEN backward", "SR with room", "lower", 1.0),
    Comparison("wide forward from 7/8", "full", "lower", 1.0, "heldout"),
  ), size="0p8m", steps=192, twins=1),
  # Fine-tuning of SmolLM2-135M on worked solutions of reasoning-gym's leg_counting and others.
  System("2025_halo", tuple(Arm(name, recipe, _FINE_TUNING) for name, recipe in {
    "bf16": "bf16", "fp8, level 0": "halo_fp8_0", "int8, level 0": "halo_int8_0",
    "int8, level 2": "halo_int8_2", "fp6, level 1": "halo_fp6_1",
  }.items()), (
    *_higher(5.0, "int8, level 0", quantity="heldout"),
    Comparison("int8, level 2", "int8, level 0", "lower", 5.0, "heldout"),
  ), steps=39, fixed_seeds=3, config="experiments/2025_infir2/reasoning.py:stage1,{recipe}",
     twins=0, needs=("assets/reasoning/stage1.jsonl",
            "python experiments/2025_infir2/reasoning_data.py assets/reasoning")),
  System("2024_trillion_token", (BF16, Arm("all", "trillion_token", _TRILLION)),
         _higher(0.2, "all"), illustration=True),
  System("2023_fp8_lm", (BF16, Arm("o2", "fp8lm", _O2)), _higher(0.2, "o2"), illustration=True),
  System("2024_coat", (BF16, Arm("coat", "tensor_current", _COAT)), _higher(0.7, "coat"),
         illustration=True),
  System("2024_deepseek_v3", _arms("block_128", **{"128x128 gradients": "block_128_g128"}),
         _higher(0.5, "128x128 gradients", baseline="block_128"), illustration=True),
  # Curves of loss by rate: no comparison of two arms.
  System("2025_munit", _by_width("bf16", _RATES), (), steps=147, rates=_RATES, size="0p8m",
         illustration=True, is_mapped=True),
  System("2025_munit_rates", _by_width("munit_scaling", _LION_RATES, _MUNIT), (), steps=147,
         rates=_LION_RATES, size="0p8m", illustration=True, is_mapped=True),
  # No loss scale but where it is named; plain float16 without one is refused.
  System("2023_unit_scaling", (
    Arm("bf16", "bf16", _UNTIED), Arm("fp8, plain", "fp8_unscaled", _UNTIED),
    Arm("float16, loss scale", "bf16", (*_UNTIED, *_FLOAT16, *_LOSS_SCALE)),
    _unit("float16, unit", "unit_scaling_wide", _FLOAT16), _unit("fp8, unit", "unit_scaling"),
  ), (
    *_higher(2.0, "fp8, plain"), Comparison("fp8, unit", "fp8, plain", "lower", 2.0),
    Comparison("float16, unit", "float16, loss scale", "close", 0.0),
  ), steps=147, size="0p8m", illustration=True),
  System("2024_fp8_and_back", _arms(*_MASKS), _higher(0.5, *_MASKS), size="0p8m", steps=147,
         rates=(2e-3, 4e-3, 8e-3), fixed_seeds=20, is_mapped=True, shows=("divergence",)),
  # Japanese, English and code, as the paper's data. Spikes need steps, and its claims have no
  # numbers: an illustration.
  System("2024_speed_stability", _arms("block_128"), _higher(0.5, "block_128"), size="0p8m",
         corpus="ja_en_code", steps=5000, illustration=True,
         shows=("spikes", "domains")),
  # Weights alone are logarithmic; AdamW stores its own in the same numbers.
  System("2021_lns_madam", (BF16, *(
    Arm(f"{how}, {n} bits", "bf16", (*changes, ("optim.master_format", f"lns{n}")))
    for how, changes in (("madam", _MADAM), ("adam", ())) for n in (16, 14, 12, 10)
  )), (
    *_higher(2.0, "adam, 10 bits", baseline="adam, 16 bits"),
    Comparison("madam, 10 bits", "adam, 10 bits", "lower", 2.0),
  ), size="0p8m"),
  # The rate of Madam is chosen here, by a seed that no comparison has: the least training loss.
  System("2021_lns_madam_rates", tuple(
    Arm(f"madam, b2 {b2}", changes=(_MADAM[0], *((("optim.b2", b2),) if b2 != 0.95 else ())))
    for b2 in (0.95, 0.999)
  ), (), steps=147, rates=tuple(0.005 * 2**n for n in range(7)), size="0p8m", illustration=True,
     is_mapped=True, fixed_seeds=1, first_seed=100),
  System("2024_flash_attention_3", (
    BF16, Arm("fa3", changes=(("precision.attention", "fa3"),)),
    Arm("sage", changes=(("precision.attention", "sage_bwd"),)),
  ), (*_higher(0.5, "fa3"), *_higher(0.5, "sage")), illustration=True),
  System("2026_fp4_copies", (BF16, *(Arm(f"copies {f}", changes=tuple((k, f) for k in _COPIES))
                                     for f in ("e4m3_16", "mxfp4"))),
         _higher(1.0, "copies mxfp4"), size="0p8m", twins=1),
  # The float32 baseline, once per corpus.
  *(System(f"corpus_{c}", (BF16, FLOAT32),
           (Comparison("bf16", "float32", "close", 0.0),), corpus=c, size="0p8m", illustration=True)
    for c in pretrain_tiny.CORPORA if c != "python_docs"),
)  # fmt: skip


# {system: the test that reproduces what its paper computes}; of float32 beside bf16 nothing is.
ARITHMETIC = {
  "2025_infir2": "recipe/golden_products_test.py::test_products_are_the_golden_ones",
  "2025_fp4": "recipe/papers_test.py::test_three_products_are_those_of_the_paper",
  "2025_quartet": "experiments/error_tables_test.py::test_quartets_table_is_what_its_rules_give",
  "2025_nvfp4":
    "experiments/error_tables_test.py::test_a_factor_between_nvfp4s_roundings_is_what_they_give",
  "2025_halo": "recipe/papers_test.py::test_three_products_are_those_of_the_paper",
  "2024_trillion_token":
    "experiments/error_tables_test.py::test_adams_step_along_gradients_is_numpys",
  "2023_fp8_lm": "optim/masters_test.py::test_sums_of_microbatches_are_right_in_the_mean",
  "2024_coat": "optim/adam_test.py::test_dynamics_of_presets_and_of_what_they_avoid",
  "2024_deepseek_v3": "kernels/emulated_sm90_test.py::test_sums_are_those_of_the_model_to_the_bit",
  "2025_munit":
    "optim/groups_test.py::test_rates_by_width_are_those_of_the_layers_matrices_and_multiply_others",
  "2025_munit_rates":
    "models/munit_test.py::test_every_tensor_of_the_forward_pass_has_unit_variance_at_the_start",
  "2023_unit_scaling":
    "models/unit_scaling_test.py::test_each_factor_gives_what_it_multiplies_deviation_1",
  "2024_fp8_and_back":
    "experiments/error_tables_test.py::test_sharpness_is_the_largest_loss_of_all_corners_of_the_box",
  "2024_speed_stability": "experiments/lab_test.py"
    "::test_a_spike_begins_above_the_median_and_five_deviations_of_the_fifty_before",
  "2021_lns_madam": "experiments/error_tables_test.py"
    "::test_an_update_on_a_logarithmic_grid_errs_as_the_theorem_bounds_it",
  "2024_flash_attention_3":
    "ops/quantized_attention_test.py::test_rotation_against_outliers_is_flash_attention_3s",
  "2026_fp4_copies": "compiled/saved_tensors_test.py::test_declared_is_what_differentiation_keeps",
}  # fmt: skip


# Timed besides: slow recipes of today, for those of blocks that are not known yet.
PROXIES = (
  Run("3m", "python_docs", "mxfp8", (), LONG, 0), Run("0p8m", "python_docs", "nvfp4_sr_rht", (),
                                                      LONG, 0),
)  # fmt: skip


# --- hours ----------------------------------------------------------------------------------------


def all_runs(systems=SYSTEMS) -> dict[str, Run]:
  """{name: run} without repetition, verdicts before illustrations, seed by seed."""
  ordered = sorted(systems, key=lambda s: s.illustration)
  runs = [run for system in ordered for run in system.runs()]
  return {run.name: run for run in runs}


def _timed(run: Run) -> str:
  """The key of a run in hours.json: what its seconds per step depend on."""
  cheap = ("optim.peak_lr", "precision.schedule")
  changes = tuple((k, v) for k, v in run.changes if k not in cheap)
  same = dataclasses.replace(run, corpus="text", steps=LONG, changes=changes)
  return same.group


def _shape(name: str) -> tuple[str, ...]:
  """Of a key of hours.json: the model."""
  return (name.partition("-")[0], *re.findall(r"(?:hidden_size|num_layers)=\d+", name))


def hours(run: Run, measured: Mapping[str, Mapping[str, float]], at_once: int = 1) -> float:
  """Estimated core-hours; of what was not measured, those of the slowest of its size.

  Args:
    measured: hours.json.
    at_once: runs that share one start (--vmap).
  """
  like = dataclasses.replace(run, recipe="bf16", changes=())
  elementwise = measured.get(_timed(like), {}) if run.recipe.startswith(ELEMENTWISE) else {}
  twice = {name: 2 * seconds for name, seconds in elementwise.items()}
  row = measured.get(_timed(run)) or twice or max(
    (r for name, r in measured.items() if _shape(name) == _shape(_timed(run))),
    key=lambda r: r["step_seconds"], default=UNMEASURED[bool(run.config)],
  )  # fmt: skip
  return (row["start_seconds"] / at_once + run.steps * row["step_seconds"] * 1.05) / 3600


def _cpu_seconds(run: Run, steps: int) -> float | None:
  """CPU seconds of a process that takes so many steps on one core; None, said, where it fails."""
  config, changes = dataclasses.replace(run, steps=steps, seed=0, is_twin=False).trial
  changes |= {"steps": steps, "eval.tokens": 0, "checkpoint.every": 0}
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  with tempfile.TemporaryDirectory() as workdir:
    flags = [f"--config.{k}={v}" for k, v in changes.items()]
    words = [sys.executable, "launch.py", f"--config={config}", *flags, f"--workdir={workdir}"]
    words = ["taskset", "-c", "0", *words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    print(f"{_timed(run)}: {done.stdout[-300:]}{done.stderr[-300:]}", flush=True)
    return None
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(names: list[str], steps: int = 20):
  """Times so many steps of every configuration that starts here, on one core -> hours.json.

  CPU seconds, of which an idle core has one a second: what else runs here does not count. Those of
  the start are of a run of two steps.
  """
  found = json.loads(HOURS.read_text()) if HOURS.exists() else {}
  firsts = {_timed(run): run for run in (*reversed(all_runs().values()), *PROXIES)}
  for name, run in firsts.items():
    if (names and name not in names) or (not names and name in found):
      continue
    if why := run.reason():
      print(f"{name}: not yet known: {why}", flush=True)
      continue
    short, whole = _cpu_seconds(run, 2), _cpu_seconds(run, 2 + steps)
    if short is None or whole is None:
      continue
    step = (whole - short) / steps
    found[name] = {"step_seconds": round(step, 3), "start_seconds": round(short - 2 * step, 1)}
    HOURS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    print(name, found[name], flush=True)


def table() -> str:
  """Markdown: systems with seeds, runs, hours, and arms that this library does not know yet."""
  measured = json.loads(HOURS.read_text()) if HOURS.exists() else {}
  columns = ("system", "arms", "seeds", "runs", "core-hours", "not yet known")
  lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  seen, total, startable = set(), 0.0, 0.0
  for system in sorted(SYSTEMS, key=lambda s: s.illustration):
    unknown = {arm for arm in system.arms if system.first(arm).reason()}
    cost = 0.0
    for arm in system.arms:
      new = [run for run in system.runs((arm,)) if run.name not in seen]
      seen |= {run.name for run in new}
      at_once = len(new) if system.is_mapped else 1
      own = sum(hours(run, measured, at_once) for run in new)
      cost, startable = cost + own, startable + own * (arm not in unknown)
    total += cost
    seeds = "/".join(map(str, sorted({system.seeds(arm) for arm in system.arms})))
    name = system.slug + " (illustration)" * system.illustration
    names = ", ".join(arm.name for arm in system.arms if arm in unknown)
    count = len(system.runs())
    lines.append(f"| {name} | {len(system.arms)} | {seeds} | {count} | {cost:.1f} | {names} |")
  lines.append(f"| all | | | {len(seen)} | {total:.1f}; {startable:.1f} can start | |")
  return "\n".join(lines)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("command", nargs="?", choices=("measure",))
  parser.add_argument("names", nargs="*", help="of hours.json, to measure them again")
  args = parser.parse_args()
  if args.command == "measure":
    measure(args.names)
  print(table())
