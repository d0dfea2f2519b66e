"""Sensitivity: measurements against whole forward passes, estimates against small switches, rules
against the matcher of rules, records against interruption."""

import dataclasses
import functools
import itertools
import json
import re
import types

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax import statistics
from fp8jax.config import resolve
from fp8jax.errors import ConfigError, UserError
from fp8jax.evaluation import divergence
from fp8jax.jobs import sensitivity as job
from fp8jax.jobs import table
from fp8jax.models import transformer
from fp8jax.ops import site_tree
from fp8jax.recipe import rules as rules_lib
from fp8jax.run import restore
from fp8jax.sensitivity import halves as halves_lib
from fp8jax.sensitivity import results as sensitivity_results
from fp8jax.sensitivity import rules as sensitivity_rules
from fp8jax.sensitivity import study as sensitivity
from fp8jax.sensitivity.records import Records
from fp8jax.sensitivity.settings import Sensitivity
from fp8jax.sensitivity.study import CHOOSE, REPORT, QuantizedSite

ON = (1.0, 1.0)
# Errors that float32 losses show; three layers in two runs, one site in BF16.
RULES = (("layers/0/attn/v", "bf16"), ("head", "bf16"), (".*", "nvfp4"))
CHANGES = {
  "precision.rules": RULES, "eval.batch": 2, "seq_len": 64, "model.init_std": 0.1,
  "sensitivity.tokens": 512, "data.heldout_fraction": 0.5,
  "precision.verify_fp8_gemms": False,
}  # fmt: skip


def _with_top(spec, top=2):
  section = dataclasses.replace(spec.of(Sensitivity), top=top)
  return dataclasses.replace(spec, sections={Sensitivity: section})


@functools.cache
def _spec():
  return _with_top(harness.text_spec(job="sensitivity", **CHANGES))


@functools.cache
def _params():
  return harness.init_params(_spec().model)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
  path = tmp_path_factory.mktemp("study") / "measurements.jsonl"
  spec = _spec()
  return sensitivity.Study(spec, _params(), spec.sites(), halves_lib.read(spec), Records(path, {}))


@functools.cache
def _logits(rules, batch_index=0):
  """Of a half's first batch with these rules, by the ordinary model."""
  spec = harness.text_spec(job="sensitivity", **{**CHANGES, "precision.rules": rules})
  batch = {k: jnp.asarray(v) for k, v in halves_lib.read(_spec())[CHOOSE][batch_index].items()}
  run = jax.jit(lambda p, s: transformer.logits(p, s, batch, spec.model, spec.run))
  return np.asarray(run(_params(), spec.sites()), np.float64), batch


def _losses(logits, batch):
  top = logits.max(-1, keepdims=True)
  log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
  picked = np.take_along_axis(log_p, np.asarray(batch["targets_BL"])[..., None], -1)[..., 0]
  return log_p, -picked * np.asarray(batch["weights_BL"])


@pytest.mark.parametrize(
  "name",
  [
    "layers/0/attn/q",
    pytest.param("layers/1/mlp/up", marks=pytest.mark.slow),  # a program more
    "layers/2/mlp/down",
  ],
)
def test_measured_site_is_the_model_with_that_site_in_its_recipe(study, name):
  found = study.measure(f"only {name}", {name: ON}, CHOOSE)
  base, batch = _logits(((".*", "bf16"),))
  changed, _ = _logits(((name, "nvfp4"), (".*", "bf16")))
  log_p, base_loss = _losses(base, batch)
  log_q, loss = _losses(changed, batch)
  kl = ((np.exp(log_p) * (log_p - log_q)).sum(-1) * np.asarray(batch["weights_BL"])).sum(1)
  rows = slice(0, 2)
  np.testing.assert_allclose(found.base_I[rows], base_loss.sum(1), rtol=1e-6)
  difference = found.loss_I - found.base_I
  np.testing.assert_allclose(difference[rows], (loss - base_loss).sum(1), rtol=0, atol=2e-3)
  np.testing.assert_allclose(found.kl_I[rows], kl, rtol=0.02, atol=2e-4)
  assert abs((loss - base_loss).sum(1)).max() > 0.02  # or the budget above says nothing


def test_divergence_is_from_the_base(rng):
  """Far apart, where the divergences of either from the other differ."""
  p, q = (np.exp(5 * rng.standard_normal((3, 7))) for _ in range(2))
  p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
  found = divergence.kl(np.log(p).astype(np.float32) + 2, np.log(q).astype(np.float32) - 1)
  np.testing.assert_allclose(found, (p * np.log(p / q)).sum(1), rtol=1e-4)


@pytest.mark.slow
def test_estimates_are_slopes_of_small_switches(study):
  estimated = study.estimate()
  everything = [place.name for place in study.places]
  assert "layers/0/attn/v" not in everything and len(everything) == 3 * 7 - 1
  step, sides = 0.1, {"x": (1, 0), "w": (0, 1), "both": (1, 1)}

  def ends(names, side):
    for sign in (step, -step):
      on = dict.fromkeys(names, tuple(sign * number for number in sides[side]))
      yield study.measure(f"{sign} {side} of {names}", on, CHOOSE)

  # Not of all inputs at once: their rounding errors jump where other errors move them.
  cases = [(everything, "w")]
  cases += [(["layers/0/attn/q"], s) for s in sides] + [(["layers/1/mlp/up"], s) for s in sides]
  for names, side in cases:
    above, below = ends(names, side)
    slope = (above.loss_I.sum() - below.loss_I.sum()) / (2 * step)
    total = sum(estimated[name][side]["loss"].sum() for name in names)
    assert slope == pytest.approx(total, rel=2e-3, abs=4e-3), (names, side)
  for name in ("layers/0/mlp/down", "layers/1/mlp/up", "layers/2/mlp/down"):
    kl = sum(end.kl_I.sum() for end in ends([name], "both")) / (2 * step**2)
    assert estimated[name]["both"]["kl"].sum() == pytest.approx(kl, rel=0.25), name


def test_job_goes_on_and_writes_rules_that_are_a_config(tmp_path, monkeypatch):
  spec = _spec()
  loaded = restore.Loaded(spec, _params(), 0, {}, {"hf": "a test"}, {}, "")
  monkeypatch.setattr(job, "load_trained", lambda spec, _: dataclasses.replace(loaded, spec=spec))
  first = job.run(spec, str(tmp_path))
  result = json.loads((tmp_path / "sensitivity" / "sensitivity.json").read_text())
  assert result["programs_compiled"] == 3  # the reference, its gradient, all measurements
  lines = (tmp_path / "sensitivity" / "measurements.jsonl").read_text()
  with open(tmp_path / "sensitivity" / "measurements.jsonl", "a") as f:
    f.write('{"name": "half a li')
  assert job.run(spec, str(tmp_path))["rules"] == first["rules"]
  assert (tmp_path / "sensitivity" / "measurements.jsonl").read_text() == lines
  result = json.loads((tmp_path / "sensitivity" / "sensitivity.json").read_text())
  page = (tmp_path / "sensitivity" / "sensitivity.html").read_text()
  specs = json.loads(re.search(r'id="specs">(.*?)</script>', page, re.DOTALL)[1])
  drawn = {(c["site"], c["tensor"][-1]): c["kl"] for c in specs["sensitivity"]["data"]["values"]}
  assert drawn.keys() == {(s["name"], t) for s in result["sites"] for t in "xw"}
  for s in result["sites"]:
    assert drawn[s["name"], "x"] == pytest.approx(s["estimated"]["x"]["kl"][0], rel=0.01)
  lines = "\n".join(sensitivity_results.table(result))
  for arm in (arm for budget in result["budgets"] for arm in budget["arms"]):
    share = f"{100 * arm['bf16_flops']:.1f} % of FLOPs in BF16"
    assert re.search(rf"  {re.escape(arm['arm'])} .*{re.escape(share)}", lines)
  assert result["programs_compiled"] == 0  # everything was there
  assert len(result["sites"]) == 20 and sum(s["measured"] is not None for s in result["sites"]) == 2
  assert {g["group"] for g in result["groups"]} == {"tensors", "kinds", "layers"}
  # The upper end of the interval is within the budget; the estimate is with fewer sites in BF16.
  (of_loss,) = (b for b in result["budgets"] if b["budget"].startswith("at most"))
  estimate, _, high = of_loss["chosen_on"]["loss_percent"]
  assert estimate < high <= spec.of(Sensitivity).max_loss
  _, low, high = of_loss["arms"][0]["report"]["loss_percent"]
  most = spec.of(Sensitivity).max_loss
  verdict = "met" if high < most else "missed" if low > most else "no verdict"
  assert {b["key"]: b["verdict"] for b in result["budgets"]} == {
    "min_fp8": "met", "max_loss": verdict
  }  # fmt: skip
  for budget in result["budgets"]:
    for arm in budget["arms"]:
      sites = harness.text_spec(
        job="sensitivity", **{**CHANGES, "precision.rules": tuple(arm["rules"])}
      ).sites()
      recipes = site_tree.recipes_of(sites)
      in_bf16 = [n for n, r in recipes.items() if not r.fwd.is_quantized]
      assert len(in_bf16) == arm["bf16_sites"] + 2  # beside those that were BF16 before
  with pytest.raises(UserError, match="windows was .*512.* and is .*1024"):
    job.run(
      harness.text_spec(job="sensitivity", **{**CHANGES, "sensitivity.tokens": 1024}), str(tmp_path)
    )


def test_a_half_has_half_of_the_tokens():
  spec = harness.text_spec(job="sensitivity", **CHANGES | {"sensitivity.tokens": 1024})
  for batches in halves_lib.read(spec).values():
    assert [b["targets_BL"].shape for b in batches] == [(2, 64)] * 4


@pytest.mark.parametrize("low, high, expected", [
  (-0.3, 0.2, "met"), (-0.9, 0.2, "met"), (0.2, 0.3, "no verdict"), (-0.1, 0.25, "no verdict"),
  (0.25, 0.4, "no verdict"), (0.3, 0.4, "missed"),
])  # fmt: skip
def test_verdict_on_the_other_half_is_of_the_whole_interval(low, high, expected):
  interval = statistics.Interval((low + high) / 2, low, high, "bootstrap")
  assert sensitivity_results.verdict("max_loss", interval, 0.25) == expected
  assert sensitivity_results.verdict("min_fp8", interval, 0.25) == "met"


def test_halves_share_no_document():
  halves = halves_lib.read(_spec())
  documents = {}
  for half, batches in halves.items():
    rows = np.concatenate([b["targets_BL"] for b in batches])
    counted = np.concatenate([b["weights_BL"] for b in batches]) > 0
    assert counted.sum() > 100
    documents[half] = "".join(map(chr, rows[counted] % 256))
  # Runs of text as long as a sentence do not occur in both.
  pieces = {documents[CHOOSE][i : i + 60] for i in range(0, len(documents[CHOOSE]) - 60, 7)}
  assert not [piece for piece in pieces if piece in documents[REPORT]]


# --- rules ---------------------------------------------------------------------------------------

NAMES = [*(f"layers/{i}/{k}" for i in range(12) for k in ("attn/q", "mlp/up", "mlp/down")), "head"]
OLD = (("head", "bf16"), ("layers/1/.*", "rowwise"), ("layers/.*", "block_128"))


@pytest.mark.parametrize("seed", range(5))
def test_written_rules_put_these_sites_in_bf16_and_no_others(seed):
  rng = np.random.default_rng(seed)
  chosen = {n for n in NAMES if rng.random() < seed / 4}
  written = sensitivity_rules.with_bf16(OLD, NAMES, chosen, 12)
  before, after = rules_lib.match(NAMES, OLD), rules_lib.match(NAMES, written)  # refuses idle rules
  assert after == {n: "bf16" if n in chosen else before[n] for n in NAMES}


def test_rule_of_a_whole_kind_names_no_layers():
  chosen = [n for n in NAMES if n.endswith("up")]
  written = sensitivity_rules.with_bf16(OLD, NAMES, chosen, 12)
  assert written[0] == ("layers/.*/mlp/up", "bf16") and len(written) == 4


def _places():
  flops = {"attn/q": 1.0, "mlp/up": 3.0, "mlp/down": 3.0}
  return tuple(
    QuantizedSite(n, re.sub(r"layers/\d+/", "", n), int(n.split("/")[1]),
                  flops[n.split("/", 2)[2]], "r")
    for n in NAMES if n != "head"
  )  # fmt: skip


def test_order_is_damage_per_flop_and_budgets_hold():
  places, rng = _places(), np.random.default_rng(0)
  damage = {p.name: float(rng.random()) for p in places}
  order = sensitivity_rules.ordered(places, damage)
  flops = {p.name: p.flops for p in places}
  ratios = [damage[n] / flops[n] for n in order]
  assert ratios == sorted(ratios, reverse=True)
  for most in (0.0, 0.01, 3.0, 100.0):
    asked = []

    def change(bf16, asked=asked):
      asked.append(len(bf16))
      return sum(damage.values()) - sum(damage[n] for n in bf16)

    chosen = sensitivity_rules.within_loss(order, change, most)
    left = [sum(damage.values()) - sum(damage[n] for n in order[:k]) for k in range(len(order) + 1)]
    assert len(chosen) == next(k for k, v in enumerate(left) if v <= most or k == len(order))
    assert len(asked) <= 6
  for least in (1.0, 0.9, 0.5, 0.0):
    chosen = sensitivity_rules.within_flops(places, order, least)
    spent = sum(flops[n] for n in chosen) / sum(flops.values())
    assert spent <= 1 - least + 1e-9 and spent > 1 - least - 3.01 / sum(flops.values())


def test_rivals_have_at_least_as_many_flops_in_bf16():
  places = _places()
  for count in (1, 5, 30):
    chosen = [p.name for p in places[:count]]
    wanted = sensitivity_rules.share(places, chosen)
    for arm, bf16 in sensitivity_rules.rivals(places, chosen, 12, 0).items():
      assert wanted - 1e-9 <= sensitivity_rules.share(places, bf16) <= wanted + 7.01 / 84, arm


# --- records and refusals ------------------------------------------------------------------------


def test_records_survive_a_kill_and_refuse_another_study(tmp_path):
  path = tmp_path / "m.jsonl"
  made = itertools.count()
  records = Records(path, {"a": 1})
  assert [records.get(n, lambda: next(made)) for n in ("x", "y", "x")] == [0, 1, 0]
  whole = path.read_text()
  path.write_text(whole[:-4])  # killed while it wrote y
  again = Records(path, {"a": 1})
  assert [again.get(n, lambda: next(made)) for n in ("x", "y")] == [0, 2]
  assert Records(path, {"a": 1}).get("y", lambda: -1) == 2  # no half of a line before it
  with pytest.raises(UserError, match="a was 1 and is 2"):
    Records(path, {"a": 2})
  path.write_text(whole + "{}\n")
  with pytest.raises(UserError, match="m.jsonl:4: it has no field 'name'; delete the line"):
    Records(path, {"a": 1})


def test_studies_that_would_mislead_are_refused(tmp_path):
  with pytest.raises(UserError, match="random weights say nothing"):
    job.run(_spec(), str(tmp_path))
  delayed = harness.text_spec("tensor_delayed", job="sensitivity")
  with pytest.raises(UserError, match="precision.calibration=TABLE"):
    restore.sites_with_scales(delayed, 0, {})
  lora = harness.text_spec(
    "block_128", job="sensitivity", **{"model.lora.rank": 2, "model.lora.base": "bf16"}
  )
  with pytest.raises(UserError, match="merge them by --job=export"):
    job.run(lora, str(tmp_path))


def test_section_is_checked_as_a_whole():
  c = harness.text_config(**{
    "sensitivity.tokens": 1,
    "sensitivity.max_loss": -1.0, "sensitivity.min_fp8": 90.0,
  })  # fmt: skip
  with pytest.raises(ConfigError) as e:
    resolve.resolve(c, 1, harness.CPU, needs=table.JOBS["sensitivity"].needs)
  found = str(e.value)
  for key in ("tokens", "max_loss", "min_fp8"):
    assert f"sensitivity.{key}" in found


def test_every_batch_of_both_halves_draws_by_a_key_of_its_own():
  drawn, one = [], object.__new__(sensitivity.Study)
  one.spec, one._references, one._params, one._plain = types.SimpleNamespace(seed=3), {}, 0, 0
  one._batches, one._say = {half: [{}, {}, {}] for half in (CHOOSE, REPORT)}, lambda line: None
  draw = lambda params, plain, batch, key: drawn.append(jax.random.key_data(key).tolist())  # noqa: E731
  one.programs = types.SimpleNamespace(reference=draw)
  for half in (CHOOSE, REPORT, CHOOSE):
    assert len(one._reference(half)) == 3
  assert len({*map(tuple, drawn)}) == len(drawn) == 6
