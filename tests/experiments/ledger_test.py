"""The ledger's rules at their bounds, and its pictures."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import re

import numpy as np
import pytest
import run_files
from lab_files import (
  ARMS,
  EXPERIMENTS,
  ORIGIN,
  WARMUP,
  design,
  ledger,
  pairs_of,
  result_of,
  results,
  row_of,
  runs,
  system_of,
)
from scipy import stats

from configs import pretrain_tiny
from fp8jax import statistics
from fp8jax.errors import UserError

pictures = run_files.script(EXPERIMENTS / "lab/pictures.py")


def test_an_effect_has_students_interval_over_the_seeds_of_all_comparisons_together():
  system = system_of("higher", "close")
  found, expected = pairs_of(system, 4)
  for which, verdict in enumerate(("as claimed", "missed")):
    row = row_of(system, found, which)
    half = stats.t.ppf(1 - 0.025 / 2, 3) * np.std(expected, ddof=1) / 2
    assert row.effect == pytest.approx(np.mean(expected), rel=1e-12)
    assert (row.low, row.high) == pytest.approx((row.effect - half, row.effect + half))
    assert row.seeds == (0, 1, 2, 3) and row.floor is None and row.verdict == verdict
    assert row.tokens == 512 * 2048 and row.origin == tuple(ORIGIN.values())
  # Held-out losses are of the arm's own precision, here half as much again.
  held = dataclasses.replace(system.comparisons[0], quantity="heldout")
  row = row_of(dataclasses.replace(system, comparisons=(held,)), found)
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
  system = system_of("higher")
  found, expected = pairs_of(system, 4)
  found.pop(5)  # seed 2 of x
  row = row_of(system, found)
  assert row.seeds == (0, 1, 3) and row.notes == ("bf16, seed 2: the other arm has no such run",)
  # A baseline's runs for other comparisons are counted.
  old = [
    dataclasses.replace(r, origin={**ORIGIN, "commit": commit})
    for r, commit in zip((r for r in found if r.run.recipe == "bf16"), "aab")
  ]
  note = "bf16: 3 runs of 2 origins without any of the other arm"
  assert row_of(system, [*found, *old]).notes == (note, *row.notes)
  assert row.effect == pytest.approx(np.mean([expected[i] for i in row.seeds]))
  assert "| no twin | as claimed |" in ledger.markdown([row])
  # A note stands once, with its comparisons; so does a commit, with its CPUs.
  names = [f"c{i}" for i in range(4)]
  several = [dataclasses.replace(row, candidate=n, baseline="b") for n in names]
  for count, where in ((2, "c0 against b; c1 against b"), (4, "4 of 4 comparisons")):
    page = ledger.markdown(several[:count])
    assert re.findall(r"(?m)^- (.*)$", page) == [f"{row.notes[0]} ({where})"]
    assert (
      page.count(f"\nCommit {ORIGIN['commit'][:9]}, {ORIGIN['cpu']}, jax {ORIGIN['jax']}.\n") == 1
    )
  own = found[1]
  twins = [
    result_of(system, 1, 0, [x * 1.003 for x in own.losses], twin=True),
    result_of(system, 1, 1, [x * 0.996 for x in found[3].losses], twin=True),
    result_of(system, 1, 2, own.losses, twin=True),  # of a seed without its own run
    result_of(system, 1, 3, own.losses, twin=True, commit="other"),
  ]
  row = row_of(system, found + twins)
  assert row.floor == pytest.approx(math.sqrt((0.3**2 + 0.4**2) / 2), rel=1e-9)
  assert row.seeds == (0, 1, 3)


def test_the_best_rate_is_that_of_the_least_mean_over_seeds_of_one_origin():
  arms = (design.Arm("a"), design.Arm("b", "mxfp8", rates=(2.0,)))
  system = design.System("2025_x", arms, (), rates=(1.0, 2.0), illustration=True)
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
  system = system_of("higher")
  found, _ = pairs_of(system, 3)
  moved = [
    dataclasses.replace(r, origin={**r.origin, name: "other"}) if r.run.recipe == "mxfp8" else r
    for r in found
  ]
  row = row_of(system, moved)
  assert row.effect is None and row.seeds == ()
  assert row.verdict == f"refused: {name} other and {ORIGIN[name]}"
  # Two of three seeds of the one origin, one of the other: the larger part is compared.
  again = result_of(system, 0, 2, found[4].losses, **{name: "other"})
  row = row_of(system, [*found[:4], moved[5], again])
  if name == "cpu":  # a pair of its own, whose arms have one CPU
    both = tuple({**ORIGIN, "cpu": f"{ORIGIN['cpu']} and other"}.values())
    note = ("seed 2: of another CPU, other",)
    assert row == dataclasses.replace(row_of(system, found), notes=note, origin=both)
    return
  assert row.seeds == (0, 1)
  assert row.notes == tuple(
    f"{arm}, seed 2: not paired, {name} other and {ORIGIN[name]}" for arm in ("x", "bf16")
  )


def test_seeds_on_several_cpus_are_paired_within_each():
  """Seed 0 ran on one CPU, seed 1 on both, seed 2 on another: of seed 3 the arms have none."""
  system = system_of("higher")
  found, expected = pairs_of(system, 4)
  a, b = ({**ORIGIN, "cpu": cpu} for cpu in "AB")
  on = lambda result, origin: dataclasses.replace(result, origin=origin)  # noqa: E731
  moved = [on(r, o) for r, o in zip(found, (a, a, a, a, b, b, a, b), strict=True)]
  again = dataclasses.replace(found[3], origin=b, losses=tuple(2 * x for x in found[3].losses))
  row = row_of(system, [*moved, again, on(found[2], b)])
  assert row.seeds == (0, 1, 2) and row.origin == tuple({**ORIGIN, "cpu": "B and A"}.values())
  assert row.effect != pytest.approx(np.mean(expected[:3]))  # of seed 1 as it ran on B
  # Without a loss of its own on B, seed 1's pair is that of A.
  other = dataclasses.replace(again, data="others")
  row = row_of(system, [*moved, other, on(found[2], b)])
  assert row.effect == pytest.approx(np.mean(expected[:3]), rel=1e-12)
  assert row.notes == (
    "x, seed 1: not paired, run on B too", "x, seed 3: the other arm's is of another origin",
    "bf16, seed 3: the other arm's is of another origin", "bf16, seed 1: not paired, run on B too",
    "seed 2: of another CPU, B",
  )  # fmt: skip
  # A twin counts once, with the run of its CPU: where a seed ran on both, that of its pair.
  twins = [result_of(system, 1, 1, [f * x for x in r.losses], twin=True, **{"cpu": o["cpu"]})
           for f, r, o in ((1.003, found[3], a), (1.9, again, b))]  # fmt: skip
  for own, floor in ((other, 0.3), (again, 90)):
    row = row_of(system, [*moved, *twins, own, on(found[2], b)])
    assert row.floor == pytest.approx(floor, rel=1e-9)


def test_illustrations_and_divergences_are_labelled():
  shown = system_of("higher", illustration=True)
  found, _ = pairs_of(shown, 2)
  row = row_of(shown, found)
  assert row.verdict == ledger.ILLUSTRATION and row.effect is not None
  system = system_of("close", "higher")
  found, _ = pairs_of(system, 4)
  fell = result_of(system, 1, 1, [3.0, 9.0], status="diverged")
  for which in (0, 1):
    row = row_of(system, [*found[:3], fell, *found[4:]], which)
    assert row.verdict == "diverged in 1 of 4" and row.effect == math.inf
  base = result_of(system, 0, 1, [3.0, 9.0], status="diverged")
  row = row_of(system, [*found[:2], base, *found[3:]])
  assert row.seeds == (0, 2, 3) and row.notes == ("seed 1: bf16 diverged, not compared",)
  assert row_of(system, [base, found[3]]).verdict == "no verdict: no pair"
  blind = dataclasses.replace(found[3], heldout={})  # a held-out loss that was not taken
  held = dataclasses.replace(system.comparisons[1], quantity="heldout")
  row = row_of(dataclasses.replace(system, comparisons=(held,)), [*found[:3], blind, *found[4:]])
  assert row.seeds == (0, 2, 3) and math.isfinite(row.effect)
  assert row.notes == ("seed 1: a run without held-out losses, not compared",)
  other = dataclasses.replace(found[3], data="others")
  row = row_of(system, [*found[:3], other, *found[4:]])
  assert row.seeds == (0, 2, 3) and row.notes == (
    "seed 1: data others and data of 1, not compared",
  )
  assert row_of(system, found[:1]).verdict == ledger.NOT_RUN
  assert row_of(system, found[:2]).verdict == statistics.TOO_SHORT  # one seed


def test_seeds_that_are_missing_and_files_that_were_edited_are_said():
  system = dataclasses.replace(system_of("higher"), fixed_seeds=6)
  found, _ = pairs_of(system, 4, commit="c0ffee+")
  row = row_of(system, found)
  assert row.planned == 6 and row.count == "4 of 6" and "| 4 of 6 |" in ledger.markdown([row])
  assert row.notes == ("files were edited: the commit is not what ran",)
  assert dataclasses.replace(row, planned=4).count == "4"
  assert dataclasses.replace(row, seeds=()).count == "-"
  # The same file in two folders is one run; another one of the same commit is a contradiction.
  assert row_of(system, [*found, found[0]]) == row
  again = dataclasses.replace(found[0], losses=tuple(x + 1 for x in found[0].losses))
  with pytest.raises(UserError, match="two results of commit c0ffee.* differ; remove"):
    ledger.index([*found, again])


def test_a_floor_of_another_commit_is_named():
  """Of runs and twins that share it; a twin alone makes none."""
  system = system_of("higher")
  found, _ = pairs_of(system, 3)
  own = result_of(system, 1, 0, found[1].losses, commit="other")
  twin = result_of(system, 1, 0, [x * 1.003 for x in found[1].losses], twin=True, commit="other")
  assert row_of(system, [*found, twin]).floor is None
  row = row_of(system, [*found, own, twin])
  assert row.floor == pytest.approx(0.3)
  (note,) = [note for note in row.notes if "floor" in note]
  assert note.startswith("noise floor of runs and twins elsewhere: commit other and ")
  here = result_of(system, 1, 0, [x * 1.001 for x in found[1].losses], twin=True)
  row = row_of(system, [*found, own, twin, here])
  assert row.floor == pytest.approx(0.1) and not any("floor" in note for note in row.notes)


def test_a_twin_of_other_data_is_no_floor():
  system = system_of("higher")
  found, _ = pairs_of(system, 3)
  twin = result_of(system, 1, 0, [x * 1.003 for x in found[1].losses], twin=True)
  assert row_of(system, [*found, twin]).floor == pytest.approx(0.3)
  assert row_of(system, [*found, dataclasses.replace(twin, data="other")]).floor is None


def test_rates_are_rows_of_their_own():
  system = system_of("higher", rates=(1e-3, 2e-3), fixed_seeds=3)
  rng, found = np.random.default_rng(0), []
  for run in itertools.chain(*(system.runs((arm,)) for arm in ARMS)):
    factor = 1 + (run.recipe == "mxfp8") * dict(run.changes)["optim.peak_lr"]
    losses = tuple((3 + run.seed) * factor + rng.random(8) * 1e-6)
    found.append(results.Result(run, "finished", losses, WARMUP, {}, ORIGIN, "d", 1.0))
  found = ledger.rows(ledger.index(r for r in found if not r.run.is_twin), [system])
  assert [r.rate for r in found] == [1e-3, 2e-3]
  assert [r.effect for r in found] == pytest.approx([0.1, 0.2], rel=1e-3)


@functools.cache
def _committed():
  """(results, rows) of the repository."""
  of = ledger.read()
  return of, ledger.rows(of)


def test_the_committed_ledger_is_what_the_results_give():
  of, found = _committed()
  assert (EXPERIMENTS / "ledger.md").read_text() == ledger.markdown(found, of, ledger.curves(of))
  again = json.loads(ledger.records.to_json([dataclasses.asdict(r) for r in found]))
  assert json.loads((EXPERIMENTS / "ledger.json").read_text()) == again


def test_the_table_of_papers_says_the_ledgers_words():
  text = (EXPERIMENTS / "README.md").read_text()
  kept = json.loads((EXPERIMENTS / "ledger.json").read_text())
  said = {}  # {(system, candidate or ""): words}
  for slug, candidate, words in re.findall(
    r"<!-- ledger (\w+)(?:: ([^>]+?))? -->ledger: (.*?)<!-- end -->", text
  ):
    said[slug, candidate] = words
  for slug in {row["system"] for row in kept if not row["system"].startswith("corpus_")}:
    own = [row for row in kept if row["system"] == slug]
    for row in own:
      words = said.get((slug, "")) or said[slug, row["candidate"]]
      word = row["verdict"].partition(":")[0]
      assert word in words, f"{slug}, {row['candidate']}: {word!r} is not in {words!r}"
      if len(own) <= 3 and row["effect"] is not None:
        assert f"{row['candidate']} against {row['baseline']}" in words
        assert f"{row['effect']:+.2f} %" in words
      elif len(own) > 3:
        of_word = [r for r in own if r["verdict"].partition(":")[0] == word]
        assert f"{len(of_word)} {word}" in words
  assert "none on the loss yet" not in text
  _, rows = _committed()
  assert ledger.of_papers(text, rows) == text
  for word in ("as claimed", "missed"):  # a verdict that changes moves its cell alone
    changed = [dataclasses.replace(r, verdict=word) if r.system == "2024_coat" else r for r in rows]
    new = ledger.of_papers(text, changed).splitlines()
    ((old, line),) = [(a, b) for a, b in zip(text.splitlines(), new, strict=True) if a != b]
    assert "(2024_coat/README.md)" in line and line == old.replace("illustration", word)


def test_a_folder_without_results_leaves_the_ledger_as_it_is(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(ledger, "HERE", tmp_path)
  with pytest.raises(SystemExit):
    ledger.main([str(tmp_path)])
  assert "holds no results; expected files of lab/run_queue.py" in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


def test_every_system_has_its_arithmetic_in_a_test():
  """Of the table that opens the ledger: tests that are there, or why there is none."""
  assert {s.slug for s in runs.SYSTEMS} == runs.ARITHMETIC.keys()
  tests = {slug: place.partition("::") for slug, place in runs.ARITHMETIC.items() if "::" in place}
  assert runs.ARITHMETIC.keys() - tests == {
    "2021_lns_madam_rates", *(f"corpus_{c}" for c in pretrain_tiny.CORPORA if c != "python_docs")
  }  # fmt: skip
  for file, _, name in tests.values():
    assert f"\ndef {name}(" in (EXPERIMENTS.parent / "tests" / file).read_text(), name
  (row,) = ledger.rows(ledger.index(pairs_of(system_of("higher", fixed_seeds=6), 4)[0]),
                       [system_of("higher", fixed_seeds=6)])  # fmt: skip
  assert not row.verdict.startswith(ledger.OPEN)
  # More seeds than this comparison planned come from another one's arms.
  for seeds, decided in ((row.seeds, 0), *((tuple(range(row.planned + n)), 1) for n in (0, 2))):
    whole = dataclasses.replace(row, system="2025_quartet", seeds=seeds)
    text = ledger.markdown([whole])
    (line,) = [x for x in text.splitlines() if x.startswith("| 2025_quartet")]
    assert line.endswith(f"](../tests/{tests['2025_quartet'][0]}) | 1 | 1 | {decided} |")
    assert f"the number with a verdict from all its seeds is {decided}; begun without one" in text
  # A corpus is no paper; a search of rates, an illustration and a refusal are no verdict.
  others = [dataclasses.replace(row, system=s, seeds=tuple(range(9)), verdict=v) for s, v in (
    ("corpus_brown", "met"), ("2024_coat", "illustration"), ("2025_fp4", "refused: x"),
    ("2025_halo", "not run"), ("2025_quartet", "no verdict: too short"), ("2025_nvfp4", "missed"),
    ("2025_nvfp4", "no verdict"),
  )]  # fmt: skip
  curve = ledger.Curve("2025_munit_rates", "x", {1.0: 2.0})
  assert ledger.progress(others, [curve]) == (
    "Of 17 papers, the number with a verdict from all its seeds is 1; begun without one (a pair of "
    "runs is there), 4; not run, 12."
  )


def test_pictures_say_n_floor_and_the_ledgers_word():
  """Of every comparison that they show; the committed ones show the committed ledger."""
  system = system_of("higher", "close", fixed_seeds=6)
  found, expected = pairs_of(system, 4)
  twin = result_of(system, 1, 0, [x * 1.003 for x in found[1].losses], twin=True)
  rows = [row for of in ([*found, twin], []) for row in ledger.rows(ledger.index(of), [system])]
  labels = [pictures.label(row) for row in rows]
  assert labels[:2] == ["x against bf16 (x): n = 4 of 6, floor 0.30 %, as claimed",
                        "x against bf16 (x): n = 4 of 6, floor 0.30 %, missed"]  # fmt: skip
  assert labels[2] == "x against bf16 (x): not run"
  refused = dataclasses.replace(rows[2], verdict="refused: commit one and other")
  assert pictures.label(refused) == "x against bf16 (x): refused"
  fell = [*found[:3], result_of(system, 1, 1, [3.0, 9.0], status="diverged"), *found[4:]]
  rows += [row_of(system, fell), row_of(system, found[:2])]  # no effect; no interval
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
  of_runs, found = _committed()
  for name, chosen in (("trains", pictures.trains), ("breaks", pictures.breaks),
                       ("scales", pictures.scales)):  # fmt: skip
    for row in filter(chosen, found):
      assert f">{pictures.label(row)}<" in shown[name]
  (masks,) = (s for s in runs.SYSTEMS if "divergence" in s.shows)
  shares = ledger.stability.shares(masks, ledger.stability.found(masks, of_runs))
  made = {(s.arm, s.rate): s for s in shares}
  for rate, arm in itertools.product(masks.rates, masks.arms):
    label = pictures.share_label(masks, arm.name, rate, made.get((arm.name, rate)))
    assert f">{label}<" in shown["breaks"]
  wilson = statistics.wilson(1, 4)
  share = ledger.stability.Share("mask_e8m3", 4e-3, 4, wilson, statistics.wilson(0, 4), 5.0)
  chart = pictures.charts.spec(pictures.diverged(masks, [share]), checked=False)
  values = chart["data"]["values"]
  (one,) = (one for one in values if "share" in one)
  assert one == {"row": "mask_e8m3, rate 0.004 (fp8_and_back): n = 4 of 20", "share": 25.0,
                 "low": 100 * wilson.low, "high": 100 * wilson.high}  # fmt: skip
  assert len(values) == 15 and all(o["row"].endswith(": not run") for o in values if o != one)
  counts = iter(range(99))
  for row, of in pictures.savings(found, lambda run: (next(counts), 0.0)):
    assert f">{pictures.label(row)}<" in shown["saves"] and of["parameter"][0] < 99


def _points_of_arms(slug):
  """{(rate, loss, line): marks} of the result files: a point, the line's first, the best's ring."""
  (system,) = (s for s in runs.SYSTEMS if s.slug == slug)
  made = collections.Counter()
  for arm in system.arms:
    by_rate = collections.defaultdict(list)
    for run in system.runs((arm,)):
      (path,) = ledger.RESULTS.rglob(f"{run.name}.json")
      kept = json.loads(path.read_text())
      loss = np.mean(kept["losses"][kept["warmup"] :]) if kept["status"] == "finished" else np.inf
      by_rate[run.trial[1]["optim.peak_lr"]].append(loss)
    line = arm.name.split(", ")[-1]
    means = {rate: np.mean(of) for rate, of in by_rate.items() if np.isfinite(of).all()}
    for rate in (*means, min(means), min(means, key=means.get)):
      made[f"{rate:.6g}", f"{means[rate]:.5f}", line] += 1
  return made


def test_the_committed_picture_of_rates_is_that_of_the_results():
  """Losses and rings of every width, read from the SVG's labels."""
  svg = (pictures.FOLDER / "rates.svg").read_text()
  label = r'"peak learning rate: ([\d.]+); training loss[^:]*: ([\d.]+); (?:arm: )?([^"]+)"'
  shown = collections.Counter(
    (f"{float(rate):.6g}", f"{float(loss):.5f}", line)
    for rate, loss, line in re.findall(label, svg)
  )
  expected = sum(map(_points_of_arms, pictures.RATES), collections.Counter())
  assert shown == expected and shown.total() == 48 + 2 * 10  # lines begin, rings
  assert {c.system for c in ledger.curves(_committed()[0])} == pictures.RATES.keys()
  for title in ("plain BF16, Adam: n = 2, 147 steps", "µS in FP8, Lion: n = 2, 147 steps"):
    assert svg.count(f">{title}<") == 1


@pytest.mark.slow  # programs of nine configurations are traced
def test_the_committed_pictures_are_what_the_ledger_gives():
  of, rows = _committed()
  for name, svg in pictures.draw(rows, of, ledger.curves(of)).items():
    assert (pictures.FOLDER / f"{name}.svg").read_text().rstrip() == svg.rstrip(), name
