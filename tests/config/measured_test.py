"""precision.sensitivity: rules out of the file of --job=sensitivity, and files that are refused."""

import copy
import dataclasses
import json
import pathlib
import shlex

import harness
import pytest

from fp8jax.config import identity, measured, registry
from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import dispatch, sensitivity, train
from fp8jax.ops import site_tree
from fp8jax.run import restore
from fp8jax.sensitivity.settings import Sensitivity

RULES = (("layers/0/attn/v", "bf16"), ("head", "bf16"), (".*", "block_128"))
CHANGES = {
  "precision.rules": RULES, "model.init_std": 0.1, "data.heldout_fraction": 0.5,
  "sensitivity.tokens": 256, "sensitivity.max_loss": 50.0, "sensitivity.min_fp8": 0.7,
  "precision.verify_fp8_gemms": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory):
  """sensitivity.json of random weights."""
  spec = harness.text_spec(job="sensitivity", **CHANGES)
  section = dataclasses.replace(spec.of(Sensitivity), groups=(), top=0)
  spec = dataclasses.replace(spec, sections={Sensitivity: section})
  params = harness.init_params(spec.model)
  loaded = restore.Loaded(spec, params, 0, {}, {"hf": "a test"}, {}, "")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sensitivity, "load_trained", lambda *_: loaded)
    return pathlib.Path(sensitivity.run(spec, str(tmp_path_factory.mktemp("run")))["results"])


def _names(spec) -> dict[str, str]:
  return {name: recipe.name for name, recipe in site_tree.recipes_of(spec.sites()).items()}


def _rules(study, key) -> tuple:
  (budget,) = [b for b in json.loads(study.read_text())["budgets"] if b["key"] == key]
  return tuple(map(tuple, budget["arms"][0]["rules"]))


@pytest.mark.parametrize("key", ["max_loss", "min_fp8"])
def test_rules_of_the_file_are_those_that_are_pasted(study, key):
  spec = harness.text_spec(**{**CHANGES, "precision.sensitivity": f"{study}:{key}"})
  pasted = harness.text_spec(**{**CHANGES, "precision.rules": _rules(study, key)})
  assert _names(spec) == _names(pasted)
  assert identity.diff(identity.identity(spec), identity.identity(pasted)) == {}
  in_bf16 = [name for name, recipe in _names(spec).items() if recipe == "bf16"]
  # 0.7 of 20 sites' FLOPs leave room for some beside the two of the rules before.
  assert len(in_bf16) > 2 if key == "min_fp8" else len(in_bf16) >= 2


def test_first_layers_of_the_measured_rules_are_in_the_rules_that_were_chosen(study, tmp_path):
  """As if measured with first_bf16=1: its sites in the file, the chosen rules begin with them."""
  result = json.loads(study.read_text())
  result["sites"] = [s for s in result["sites"] if s["layer"] != 0]
  chosen = [
    ["layers/1/mlp/up", "bf16"],
    ["layers/0/.*", "bf16"],
    ["head", "bf16"],
    [".*", "block_128"],
  ]
  result["budgets"] = [{**result["budgets"][0], "verdict": "met"}]
  result["budgets"][0]["arms"] = [{"rules": chosen}]
  path = tmp_path / "sensitivity.json"
  path.write_text(json.dumps(result))
  later = (("head", "bf16"), (".*", "tensor_current"))
  changes = {**CHANGES, "precision.rules": RULES[1:], "precision.first_bf16": 1,
             "precision.schedule": ((4, later),)}  # fmt: skip
  spec = harness.text_spec(**{**changes, "precision.sensitivity": str(path)})
  assert spec.flat["precision.first_bf16"] == 0 and spec.flat["precision.sensitivity"] == ""
  in_bf16 = {name for name, recipe in _names(spec).items() if recipe == "bf16"}
  first = {name for name in _names(spec) if name.startswith("layers/0/")}
  assert in_bf16 == first | {"layers/1/mlp/up", "head"}
  later = site_tree.recipes_of(spec.sites(phase=1))
  assert {n for n, recipe in later.items() if recipe.name == "bf16"} == first | {"head"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
def test_a_run_goes_on_without_the_file_under_the_rules_that_it_left(study, tmp_path, parse):
  path = tmp_path / "file.json"
  path.write_text(study.read_text())
  # Measured as if layer 2 had been in BF16, which then holds in the later phase too.
  result = json.loads(path.read_text())
  result["sites"] = [s for s in result["sites"] if s["layer"] != 2]
  last = ("layers/(2)/.*", "bf16")
  for budget in result["budgets"]:
    kept = [r for r in budget["arms"][0]["rules"] if not r[0].startswith("layers/2")]
    budget["arms"][0]["rules"] = [last, *kept]
  path.write_text(json.dumps(result))
  later = {"precision.last_bf16": 1, "precision.schedule": ((4, ((".*", "tensor_current"),)),)}
  stated = {**CHANGES, **later, "precision.sensitivity": f"{path}:min_fp8"}
  workdir = tmp_path / "run"
  harness.train_on_text(workdir, **stated)
  resolved = json.loads((workdir / "config.json").read_text())["resolved"]
  rules = tuple(map(tuple, resolved["precision.rules"]))
  assert rules == _rules(path, "min_fp8") != RULES
  assert resolved["precision.sensitivity"] == ""
  path.unlink()
  with pytest.raises(ConfigError, match="there is no file .*; --job=sensitivity writes it"):
    harness.text_spec(**stated)
  c = harness.text_config(**stated)
  with pytest.raises(UserError, match="remembers the rules of its run") as e:
    dispatch.call("train", c, registry.base(), str(workdir))
  # Same steps: nothing is left to do, and nothing is refused; other rules are.
  schedule = ((4, (last, (".*", "tensor_current"))),)
  pasted = {**CHANGES, "precision.rules": rules, "precision.schedule": schedule}
  train.run(harness.text_spec(**pasted), str(workdir))
  with pytest.raises(ConfigError, match="precision.rules was"):
    train.run(harness.text_spec(**CHANGES), str(workdir))
  # The command line reads the options that it names as those rules.
  options = shlex.split(str(e.value).partition("go on with them: ")[2])
  read = parse("--config=configs/debug.py", "--config.precision.first_bf16=1", *options).precision
  assert (read.rules, read.sensitivity, read.first_bf16, read.last_bf16) == (rules, "", 0, 0)
  assert read.schedule == schedule


def test_a_file_that_is_no_text_is_left_to_the_check_of_types(tmp_path):
  c = harness.text_config(**{"precision.sensitivity": ""})
  with c.ignore_type():
    c.precision.sensitivity = None
  measured.check_there(c, str(tmp_path))


def _without_budgets(result):
  result["budgets"] = []


def _all_in_bf16(result):
  for budget in result["budgets"]:
    budget["arms"][0]["rules"], budget["verdict"] = [[".*", "bf16"]], "met"


def _undecided(result):
  for budget in result["budgets"]:
    budget["verdict"] = "no verdict"


def _of_earlier_version(result):
  del result["model"]


def _other_recipe(result):
  for site in result["sites"]:
    site["recipe"] = "mxfp8"


REFUSED = {
  "budgets": ("min_fp8", _without_budgets, {}, "has no rules; repeat --job=sensitivity"),
  "which": ("", None, {}, "holds the rules of min_fp8, max_loss; name one"),
  "nothing": ("min_fp8", _all_in_bf16, {}, "leaves no site in FP8 within its budget"),
  "undecided": ("max_loss", _undecided, {}, "the other half of the text says 'no verdict'"),
  "earlier": ("min_fp8", _of_earlier_version, {}, "has no field 'model'; run --job=sensitivity"),
  "recipe of file": ("min_fp8", _other_recipe, {}, "'mxfp8', and precision.rules give it 'block"),
  "recipe here": ("min_fp8", None, {"precision.rules": ((".*", "nvfp4"),)},
                  "measured layers/0/attn/k in 'block_128', and precision.rules give it 'nvfp4'"),
  "site here": ("min_fp8", None, {"precision.rules": RULES[1:]},
                "measured layers/0/attn/v in no FP8, and precision.rules give it 'block_128'"),
  "model": ("min_fp8", None, {"model.hidden_size": 128},
            "is of a model with hidden_size=64, and this one has 128"),
}  # fmt: skip


@pytest.mark.parametrize("key, change, changes, message", REFUSED.values(), ids=REFUSED)
def test_file_of_another_run_or_without_a_verdict_is_refused(
  study, tmp_path, key, change, changes, message
):
  result = copy.deepcopy(json.loads(study.read_text()))
  if change:
    change(result)
  path = tmp_path / "sensitivity.json"
  path.write_text(json.dumps(result))
  with pytest.raises(ConfigError) as e:
    stated = f"{path}:{key}" if key else str(path)
    harness.text_spec(**{**CHANGES, **changes, "precision.sensitivity": stated})
  assert message in str(e.value), str(e.value)
