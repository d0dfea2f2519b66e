"""The run list of the numerics lab: its systems, and the test of what each paper computes.

`python experiments/lab/hours.py` prints them with seeds, hours, and what is unknown; design.py has
the rules.
"""

import os
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments/lab")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX looks for others

from design import FINE_TUNING, MOST, Arm, Changes, Comparison, System  # noqa: E402

from configs import pretrain_tiny  # noqa: E402

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
_SAGE, _QK_NORM = ("precision.attention", "sage_bwd"), ("model.preset", "debug_qk_norm")
_O2 = (("optim.master_format", "f16"), ("optim.grad_format", "e4m3"),
       ("optim.moment_format", "fp8lm"))  # fmt: skip


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


# HALO's PEFT: the base is in codes of the rotated weight, or in BF16. Adapters have no dropout here
# (the paper: 0.1). The rate is ten times that of training everything.
_PEFT = (*FINE_TUNING, ("model.lora.rank", 16), ("model.lora.alpha", 8.0), ("optim.peak_lr", 2e-3))
# Fine-tuning of SmolLM2-135M on worked solutions of reasoning-gym's leg_counting and others.
_SOLUTIONS: dict[str, Any] = dict(
  steps=39, config="experiments/2025_infir2/reasoning.py:stage1,{recipe}", twins=1,
  needs=("assets/reasoning/stage1.jsonl",
         "python experiments/2025_infir2/reasoning_data.py assets/reasoning"),
)  # fmt: skip


# What the systems of baselines alone are called: no paper.
CORPUS = "corpus_"
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
  ), twins=1),
  # Apart, like HALO's below. The control of DGE: its factor on the weights' gradients, every
  # product in BF16. Counted for two thirds of what DGE took off W4A4.
  System("2025_fp4", _arms(**{"bf16 + dge": "bf16_dge"}),
         (Comparison("bf16 + dge", "bf16", "lower", 2.0),), twins=1),
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
  System("2025_halo", tuple(Arm(name, recipe, FINE_TUNING) for name, recipe in {
    "bf16": "bf16", "fp8, level 0": "halo_fp8_0", "int8, level 0": "halo_int8_0",
    "int8, level 2": "halo_int8_2", "fp6, level 1": "halo_fp6_1",
  }.items()), (
    *_higher(5.0, "int8, level 0", quantity="heldout"),
    Comparison("int8, level 2", "int8, level 0", "lower", 5.0, "heldout"),
  ), fixed_seeds=3, **_SOLUTIONS),
  # Apart, so that no interval of those above is one of three.
  System("2025_halo", (
    Arm("bf16, peft", "bf16", (*_PEFT, ("model.lora.base", "bf16"))),
    Arm("int8, level 2, peft", "halo_int8_2_hq", (*_PEFT, ("model.lora.base", "int8_h64"))),
  ), (Comparison("int8, level 2, peft", "bf16, peft", "close", 0.0, "heldout"),),
     illustration=True, **_SOLUTIONS),
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
         rates=(2e-3, 4e-3, 8e-3), fixed_seeds=20, is_mapped=True, twins=1, shows=("divergence",)),
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
  # Counted before the runs, as if an interval knew the deviation: a chance of 75 %.
  ), size="0p8m", fixed_seeds=3),
  # The rate of Madam is chosen here, by a seed that no comparison has: the least training loss.
  System("2021_lns_madam_rates", tuple(
    Arm(f"madam, b2 {b2}", changes=(_MADAM[0], *((("optim.b2", b2),) if b2 != 0.95 else ())))
    for b2 in (0.95, 0.999)
  ), (), steps=147, rates=tuple(0.005 * 2**n for n in range(7)), size="0p8m", illustration=True,
     is_mapped=True, fixed_seeds=1, first_seed=100),
  System("2024_flash_attention_3", (
    BF16, Arm("fa3", changes=(("precision.attention", "fa3"),)),
  ), _higher(0.5, "fa3"), illustration=True),
  System("2026_sage_bwd", (
    BF16, Arm("sage", changes=(_SAGE,)),
    Arm("bf16, qk-norm", changes=(_QK_NORM,)), Arm("sage, qk-norm", changes=(_QK_NORM, _SAGE)),
  ), (*_higher(0.5, "sage"), *_higher(0.5, "sage, qk-norm", baseline="bf16, qk-norm")),
         illustration=True),
  # Counted likewise: a chance just below 80 %.
  System("2026_fp4_copies", (BF16, *(Arm(f"copies {f}", changes=tuple((k, f) for k in _COPIES))
                                     for f in ("e4m3_16", "mxfp4"))),
         _higher(1.0, "copies mxfp4"), size="0p8m", twins=1, fixed_seeds=4),
  # The float32 baseline, once per corpus.
  *(System(f"{CORPUS}{c}", (BF16, FLOAT32),
           (Comparison("bf16", "float32", "close", 0.0),), corpus=c, size="0p8m", illustration=True)
    for c in pretrain_tiny.CORPORA if c != "python_docs"),
)  # fmt: skip


# {system: the test that reproduces what its paper computes, or why there is none}.
ARITHMETIC = {
  **{s.slug: "baseline: nothing of a paper" for s in SYSTEMS if s.slug.startswith(CORPUS)},
  "2025_infir2": "ops/linear_test.py::test_dot_equals_an_emulation_written_from_the_papers",
  "2025_fp4": "recipe/papers_test.py::test_three_products_are_those_of_the_paper",
  "2025_quartet": "experiments/error_tables_test.py::test_quartets_table_is_what_its_rules_give",
  "2025_nvfp4":
    "recipe/papers_test.py::test_random_and_delayed_products_are_those_of_the_paper_at_known_draws",
  "2025_halo": "recipe/papers_test.py::test_three_products_are_those_of_the_paper",
  "2024_trillion_token":
    "experiments/error_tables_test.py::test_adams_step_along_gradients_is_numpys",
  "2023_fp8_lm": "optim/masters_test.py::test_sums_of_microbatches_are_right_in_the_mean",
  "2024_coat": "quantization/quantized_tensor_test.py::test_expansion_keeps_what_coat_keeps",
  "2024_deepseek_v3": "kernels/emulated_sm90_test.py::test_sums_are_those_of_the_model_to_the_bit",
  "2025_munit":
    "optim/groups_test.py::test_rates_by_width_are_those_of_the_layers_matrices_and_multiply_others",
  "2025_munit_rates":
    "models/munit_test.py::test_stream_blocks_and_products_of_unit_inputs_have_unit_variance",
  "2023_unit_scaling":
    "models/unit_scaling_test.py::test_each_factor_gives_what_it_multiplies_deviation_1",
  "2024_fp8_and_back":
    "experiments/error_tables_test.py::test_sharpness_is_the_largest_loss_of_all_corners_of_the_box",
  "2024_speed_stability": "experiments/stability_test.py"
    "::test_a_spike_begins_above_the_median_and_five_deviations_of_the_fifty_before",
  "2021_lns_madam": "experiments/error_tables_test.py"
    "::test_an_update_on_a_logarithmic_grid_errs_as_the_theorem_bounds_it",
  "2021_lns_madam_rates": "that of 2021_lns_madam, whose rate it chooses",
  "2024_flash_attention_3":
    "ops/quantized_attention_test.py::test_rotation_against_outliers_is_flash_attention_3s",
  "2026_sage_bwd": "ops/quantized_attention_test.py"
    "::test_seven_products_in_8_bits_are_those_of_numpy_and_dp_costs_dq_most",
  "2026_fp4_copies": "compiled/saved_tensors_test.py::test_declared_is_what_differentiation_keeps",
}  # fmt: skip
