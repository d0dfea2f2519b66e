"""Keys are declared once: defaults, bounds, choices and consequences come from the declaration."""

import pytest

from configs import base
from fp8jax import keys
from fp8jax.config import identity, named, registry
from fp8jax.errors import REMOVED, ConfigError, UserError
from fp8jax.keys import EXECUTION, NOTHING, RESULT
from fp8jax.run import restore

BOUNDED = {k.name: k for k in registry.KEYS.values() if k.least is not None}
CHOSEN = {k.name: k for k in registry.KEYS.values() if k.choices is not None}


def _changed(name, value):
  c = base.get_config()
  c.update_from_flattened_dict({name: value})
  return registry.problems(c)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_number_below_its_least_is_refused_and_the_least_is_not(name):
  one = BOUNDED[name]
  below = type(one.default)(one.least - 1)
  assert _changed(name, below) == [f"{name}={below} must be at least {one.least}"]
  assert _changed(name, type(one.default)(one.least)) == []


@pytest.mark.parametrize("name", CHOSEN)
def test_a_name_that_is_no_choice_is_refused_and_every_choice_is_not(name):
  one = CHOSEN[name]
  assert one.default in one.choices
  (problem,) = _changed(name, "zzz")
  assert problem.startswith(f"{name}='zzz' is not one of {one.choices[0]!r}")
  assert all(_changed(name, choice) == [] for choice in one.choices)


def test_every_key_has_a_meaning_and_a_default_of_its_type():
  assert registry.problems(base.get_config()) == []
  for one in registry.KEYS.values():
    assert one.meaning and one.meaning == " ".join(one.meaning.split()), one.name
    is_none = one.default is None and one.is_optional
    assert is_none or type(one.default) is one.type, one.name


def test_consequences_are_those_of_the_name_or_of_the_open_key_above_it():
  expected = {
    "seed": RESULT, "optim.peak_lr": RESULT, "memory.save_gate_up": RESULT, "data": RESULT,
    "model.architecture": RESULT, "data.sources.main.path": RESULT, "mesh.fsdp": EXECUTION,
    "sharding.weights.D": EXECUTION, "memory.remat_policy": EXECUTION, "init.hf": EXECUTION,
    "data.workers": EXECUTION, "log.every": NOTHING, "precision.verify_fp8_gemms": NOTHING,
    "eval.tokens": NOTHING, "generate.seed": NOTHING, "sensitivity.tokens": NOTHING,
  }  # fmt: skip
  assert {name: registry.affects(name) for name in expected} == expected


def test_a_base_configuration_is_new_every_time_and_takes_no_other_key():
  one, other = base.get_config(), base.get_config()
  one.sharding.weights.D = "tensor"
  one.data.sources.code = base.source()
  assert identity.flatten(other) == identity.flatten(base.get_config())
  with pytest.raises(AttributeError):
    one.optim.peak_lrr = 1.0
  with pytest.raises(TypeError):
    one.optim.peak_lr = "high"
  one.model.num_layers = 3  # None until it is set
  with pytest.raises(TypeError):
    one.model.num_layers = "three"


def test_a_section_reads_lists_as_tuples_and_knows_bounds_without_a_configuration():
  @keys.section("toy", EXECUTION)
  class Toy:
    """A section."""

    size: int = keys.key(3, "a size", least=2)
    rules: tuple = keys.key((), "pairs", affects=RESULT)
    found: int = 0

  toy = keys.read(Toy, {"size": 5, "rules": [["a", 1]], "other": 1}, found=7)
  assert (toy.size, toy.rules, toy.found) == (5, (("a", 1),), 7)
  assert [(k.name, k.affects) for k in Toy.KEYS] == [("toy.size", EXECUTION), ("toy.rules", RESULT)]
  assert keys.problems(Toy, {"size": 1, "rules": ()}) == ["toy.size=1 must be at least 2"]


def test_explain_of_an_unknown_key_names_the_nearest():
  with pytest.raises(UserError, match="did you mean optim.weight_decay"):
    registry.explain("optim.weight_decy")


def test_a_removed_key_names_its_successor_wherever_it_is_written(tmp_path):
  assert not REMOVED.keys() & registry.KEYS.keys()
  for key, (hint, _) in REMOVED.items():
    with pytest.raises(UserError, match=f"'{key}' is no key of the configuration; {hint[:20]}"):
      registry.explain(key)
  path = tmp_path / "c.py"
  path.write_text(
    "from configs import base\n\ndef get_config(arm=''):\n  c = base.get_config()\n"
    "  c.export.path = 'x'\n  return c\n"
  )
  with pytest.raises(UserError, match="line 5: export.path is no key; name the folder as --out"):
    named.load(str(path), {})
  with pytest.raises(UserError, match="'eval.hf' is no key; it is weights.hf now"):
    named.load("configs/debug.py", {"eval.hf": "x"})


def test_a_run_of_before_goes_on_where_its_removed_keys_had_the_values_of_now():
  now = identity.flatten(base.get_config())
  of_before = {"loss_scale.start": 256.0, "loss_scale.growth_interval": 2000, "eval.hf": "x"}
  assert identity.diff(now, now | of_before) == {}
  assert identity.without_removed(now | of_before) == now
  changes = identity.diff(now, now | of_before | {"loss_scale.start": 128.0})
  assert changes == {"loss_scale.start": (128.0, None)}
  with pytest.raises(ConfigError) as e:
    restore.check_same_run(changes, {"data_fingerprint": "", "readers": {}}, 7, "", {}, ())
  assert "loss_scale.start was 128.0 at step 7, and is no key now: every run starts" in str(e.value)
