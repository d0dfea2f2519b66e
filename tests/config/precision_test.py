"""The precision section of a configuration: rules by layer, phases, recipes by name, mistakes."""

import dataclasses
import re

import harness
import pytest

from fp8jax.compiled import fp8_gemms
from fp8jax.config import named, resolve
from fp8jax.config import precision as precision_checks
from fp8jax.errors import ConfigError
from fp8jax.generation import checks
from fp8jax.kernels import choose
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.phases import schedule
from fp8jax.recipe import attention
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import Delayed
from fp8jax.run import evaluator
from fp8jax.run import start as run_start
from fp8jax.step import train_step


def test_first_and_last_layers_and_single_sites_can_be_excepted():
  rules = (("layers/.*/attn/[kv]", "bf16"), ("layers/1/mlp/up", "rowwise"), (".*", "block_128"))
  spec = harness.text_spec(**{"precision.rules": rules, "precision.last_bf16": 1})
  names = {name: r.name for name, r in site_tree.recipes_of(spec.sites()).items()}
  assert names["layers/0/attn/q"] == names["layers/1/mlp/down"] == names["head"] == "block_128"
  assert names["layers/0/attn/k"] == names["layers/1/attn/v"] == "bf16"
  assert names["layers/1/mlp/up"] == "rowwise"
  assert {n for k, n in names.items() if k.startswith("layers/2/")} == {"bf16"}
  rows = run_start.site_rows(spec)
  assert [r["layers"] for r in rows if r["site"].endswith("/up")] == [1, 1, 1]


def test_table_of_sites_says_that_a_folded_weight_has_no_past():
  spec = harness.text_spec("tensor_delayed", **{"precision.smooth_swiglu": "channel"})
  rows = {row["site"]: row["definition"] for row in run_start.site_rows(spec)}
  sources = {
    name: [d["fwd"][side]["source"]["kind"] for side in ("lhs", "rhs") if d["fwd"][side]]
    for name, d in rows.items()
  }
  assert sources["layers/mlp/down"] == ["delayed", "current"]
  assert sources["layers/mlp/up"] == ["delayed"] * 2


_OWN_TEACHER = {"distill.weight": 1.0, "init.workdir": "of another run"}
MISTAKES = {
  "step": ({"precision.schedule": ((0, ((".*", "bf16"),)),)}, "starts at step 0; phases start in"),
  "late": ({"precision.schedule": ((6, ((".*", "bf16"),)),)}, "before the last, steps=6"),
  "form": ({"precision.schedule": (((".*", "bf16"),),)}, "is no pair of a first step and rules"),
  "recipe": ({"precision.schedule": ((3, ((".*", "bf61"),)),)}, "did you mean 'bf16'"),
  "unused": ({"precision.schedule": ((3, ((".*", "bf16"), ("x", "bf16"))),)}, "decides nothing"),
  "layers": ({"precision.first_bf16": 2, "precision.last_bf16": 2}, "more layers than the model's"),
  "negative": ({"precision.first_bf16": -1}, "must be at least 0"),
  "all": ({"precision.first_bf16": 3}, "decides nothing"),
  "smooth": ({"precision.smooth_swiglu": "chanel"}, "did you mean 'channel'"),
  "merge": (
    {"precision.smooth_swiglu": "token", "export.fold_smooth_batches": 1},
    "which no weight can hold",
  ),
  "attention": ({"precision.attention": "fa33"}, "did you mean 'fa3'"),
  "fused attention": (
    {"precision.attention": "fa3", "kernels.attention": "cudnn"},
    "kernels.attention='cudnn' with precision.attention='fa3', which is emulated",
  ),
  "sensitivity": (
    {"precision.attention": "fa3", "sensitivity.tokens": 128},
    "precision.attention='fa3': --job=sensitivity compares",
  ),
  "static gradients from 0": (
    {"precision.rules": ((".*", "e4m3_static"),), **_OWN_TEACHER},
    r"recipe 'e4m3_static' \(site layers/2/mlp/up\): .* gradients grow from nearly 0",
  ),
  "alarm of a list": ({"log.alarms": ((["amax"], ">", 1.0),)}, "is no rule such as"),
  "alarm": ({"log.alarms": (("underflo", ">", 1.0),)}, "statistics are saturation"),
  "loss scale": ({"precision.compute_dtype": "float16"}, "set loss_scale.kind='dynamic'"),
}


@pytest.mark.parametrize("changes, message", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_named(changes, message):
  jobs = {key.split(".")[0] for key in changes} & {"export", "sensitivity"}
  job = jobs.pop() if jobs else "train"
  with pytest.raises(ConfigError, match=message):
    harness.text_spec(job=job, **changes)


def test_static_scales_of_gradients_that_begin_near_zero_are_refused_and_no_others():
  problems = precision_checks.own_teacher_problems
  own = {"precision.rules": ((".*", "e4m3_static"),), **_OWN_TEACHER}
  spec = harness.text_spec(**own | {"distill.weight": 0.9})
  assert not problems(spec)
  for weight, teacher, count in ((1.0, "", 1), (1.0, "of another run", 0), (0.0, "", 0)):
    distill = dataclasses.replace(spec.distill, weight=weight, teacher=teacher)
    assert len(problems(dataclasses.replace(spec, distill=distill))) == count
  delayed = {"precision.rules": ((".*", "tensor_delayed"),)}
  assert harness.text_spec(**_OWN_TEACHER | delayed).distill.weight == 1


def test_precision_at_gives_the_phase_of_every_step():
  phases = tuple(schedule.Phase(start, ()) for start in (0, 3, 5))
  assert [schedule.Precision(phases).at(s) for s in range(7)] == [0, 0, 0, 1, 1, 2, 2]


def test_recipe_by_name_takes_numbers_of_delayed_scales():
  spec = harness.text_spec("tensor_delayed(steps=16, margin=1)")
  recipe = site_lib.flatten(spec.sites())["layers/mlp/up"].recipe
  (x,) = recipe.uses()["x"]
  assert x.source == Delayed(steps=16, reduce="max", margin=1) and recipe.history == 16
  assert recipe.name == "tensor_delayed(steps=16, margin=1)"
  for name, message in (
    ("tensor_delayed(step=16)", "'step=16' is none of steps=1024, reduce=max, margin=0"),
    ("tensor_delayed(steps=many)", "'steps=many' is none of"),
    ("tensor_delayed(steps=[1)", "is none of|no closing"),
    ("tensor_delayed(steps=1 6)", "is no whole number|is none of"),
    ("tensor_delayed(reduce=mean)", "must be 'max' or 'latest'"),
    ("block_128(steps=2)", "block_128 has no delayed scales"),
    ("tensor_delayed(steps=2", "did you mean 'tensor_delayed'"),
  ):
    with pytest.raises(ConfigError, match=message):
      harness.text_spec(name)


@pytest.mark.parametrize(
  "names, recipes",
  [
    (("recipe", "bf16"), {"tensor_delayed": None, "bf16": "bf16"}),
    (("recipe",), {"tensor_delayed": None}),
    (("bf16",), {"bf16": "bf16"}),
  ],
)
def test_evaluated_precisions_are_those_of_the_config(names, recipes):
  assert evaluator.precisions(harness.text_spec(**{"eval.precisions": names})) == recipes
  assert evaluator.precisions(harness.text_spec("bf16", **{"eval.precisions": names})) == {
    "bf16": None
  }


def test_attention_is_a_value_by_name_and_wide_without_one():
  assert harness.text_spec("bf16").run.attention_recipe is None
  spec = harness.text_spec("bf16", **{"precision.attention": "sage_bwd"})
  assert spec.run.attention_recipe is attention.SAGE_BWD
  assert spec.run.attention == spec.attention.backend == "xla"
  (text,) = checks.of_model(spec.model, spec.run)
  assert "precision.attention='sage_bwd'" in text and "precision.attention='wide'" in text
  # In BF16 attention is not quantized either.
  held = evaluator.Evaluator(spec)
  losses = held.run(harness.init_params(spec.model), {})["main"]
  assert list(losses) == ["sage_bwd", "bf16"]
  assert 0 < abs(losses["sage_bwd"]["loss"] - losses["bf16"]["loss"]) < 1e-3


def test_emulated_attention_is_named_as_such_and_on_a_gpu_asked_for_by_name():
  for matmul in ("auto", "xla"):
    with pytest.raises(
      ConfigError, match="precision.attention='fa3': no kernel here .*'reference'"
    ):
      harness.debug_plan("bf16", device=harness.HOPPER, precision__attention="fa3",
                         kernels__matmul=matmul)  # fmt: skip
  how = dict(precision__attention="fa3", kernels__matmul="reference")
  assert harness.debug_plan(device=harness.HOPPER, **how).run.attention_recipe is attention.FA3
  spec = harness.debug_plan("block_128", **how)
  state, batch, _ = harness.step_arguments(spec)
  # No product of attention is taken for an FP8 GEMM of a linear layer, or for one of nobody's.
  ((title, rows),) = fp8_gemms.every_step(spec, train_step.make_step(spec), state, batch, 0)
  assert title == f"{fp8_gemms.TITLE}; attention fa3 is emulated"
  outside = [row for row in rows if not row.key.product]
  assert sum(row.unquantized for row in outside) > 0 == sum(row.fp8 for row in outside)


def test_a_recipe_of_ones_own_is_named_by_its_definition(tmp_path, monkeypatch):
  """A configuration's file adds it: its rules take the name, and another definition is another."""
  monkeypatch.setattr(rules_lib, "_OWN", {})
  path = tmp_path / "mine.py"

  def load(tile: int) -> str:
    path.write_text(
      "import fp8jax\nfrom configs import debug\nfrom fp8jax.recipe import rules\n\n"
      f"row = fp8jax.Quant(fp8jax.E4M3, (1, {tile}))\n"
      f"gemm = fp8jax.Gemm(row, row, {tile})\n"
      "NAME = rules.add(fp8jax.Recipe('mine', gemm, gemm, gemm))\n\n\n"
      "def get_config(arm=''):\n  return debug.get_config(NAME)\n"
    )
    c = named.load(str(path), {"kernels.matmul": "reference"})
    spec = resolve.resolve(c, 1, choose.current_device())
    recipe = site_lib.flatten(spec.sites())["layers/mlp/up"].recipe
    assert recipe.fwd.lhs.tile == (1, tile) and recipe.name == dict(c.precision.rules)["layers/.*"]
    assert rules_lib.recipe_by_name(f"{recipe.name}(accumulate=32)").dgrad.accumulate == 32
    return recipe.name

  first, other, again = load(64), load(32), load(64)
  assert first == again != other
  assert all(re.fullmatch(r"mine_[0-9a-f]{8}", name) for name in (first, other))
  assert rules_lib.recipe_by_name(first).fwd.lhs.tile == (1, 64)  # both are known, none is replaced
  with pytest.raises(ValueError, match="'bf16.accumulate=fast.': it has no product of codes"):
    rules_lib.recipe_by_name("bf16(accumulate=fast)")
  with pytest.raises(ValueError, match="unknown recipe 'mine'.* Known: .*, mine_"):
    rules_lib.recipe_by_name("mine")
  with pytest.raises(ValueError, match="Recipe.name='my own': expected letters"):
    rules_lib.add(Recipe("my own"))
