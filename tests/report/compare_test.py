"""Comparisons against closed forms on losses whose differences are known."""

import json
import math
import pathlib
import re

import debug_runs
import numpy as np
import pytest
import run_files
from scipy import stats

from fp8jax.errors import UserError
from fp8jax.jobs import report
from fp8jax.report import arms, compare, files, run_report
from fp8jax.run import palette

STEPS = 40
BASE = 3 - np.arange(STEPS) / STEPS


def folders(tmp_path, percents, **base):
  """bf16 and block_128 with each seed; block_128's loss is larger by so many percent."""
  found = []
  for seed, percent in enumerate(percents):
    held = {"bf16": 2.0, "block_128": 2.0 * (1 + percent / 100)}
    kinds = (("bf16", 0.0, 1.0, {"bf16": 2.0}), ("block_128", percent, 0.5, held))
    for recipe, more, seconds, heldout in kinds:
      losses = (BASE * (1 + more / 100)).tolist()
      path = tmp_path / f"{recipe}-{seed}"
      found.append(run_files.write_steps(path, losses, recipe, seed, seconds, heldout, **base))
  return found


def test_paired_differences_have_students_interval_and_a_verdict(tmp_path):
  percents = (0.05, 0.11, 0.08)
  found = compare.compare(folders(tmp_path, percents))
  rows = {r.quantity: r.estimate for r in found.rows}
  mean, error = np.mean(percents), stats.sem(percents)
  low, high = stats.t.interval(0.95, 2, mean, error)
  for quantity in ("training", "rounding, main"):
    e = rows[quantity]
    assert (e.mean, e.low, e.high) == pytest.approx((mean, low, high), abs=1e-9)
    assert e.by_seed == pytest.approx(percents, abs=1e-9) and e.verdict == "met"
  assert rows["weights, main"].by_seed == (0, 0, 0)
  (difference,) = found.differences
  np.testing.assert_allclose(difference.mean, mean, atol=1e-9)
  np.testing.assert_allclose(difference.low, min(percents), atol=1e-9)
  np.testing.assert_allclose(difference.high, max(percents), atol=1e-9)
  assert difference.tokens[-1] == STEPS * 16 and difference.seeds == 3


def test_quantities_keep_forward_passes_and_the_last_quarter_apart(tmp_path):
  """bf16 loses 2.0; the weights of block_128 lose 2 % more in BF16 and 5 % on top in FP8."""
  paths, late = [], STEPS - 3 * STEPS // 4
  for seed in range(3):
    base = run_files.write_steps(tmp_path / f"a{seed}", BASE.tolist(), "bf16", seed, 1.0,
                                 {"bf16": 2.0})  # fmt: skip
    losses = np.concatenate([1.01 * BASE[:-late], (1.03 + seed / 100) * BASE[-late:]])
    held = {"bf16": 2.04, "block_128": 2.04 * 1.05}
    paths += [base, run_files.write_steps(tmp_path / f"b{seed}", losses.tolist(), "block_128", seed,
                                          1.0, held)]  # fmt: skip
  rows = {r.quantity: r for r in compare.compare(paths).rows}
  for quantity, percent in (("served", 7.1), ("rounding", 5.0), ("weights", 2.0)):
    assert rows[f"{quantity}, main"].estimate.by_seed == pytest.approx([percent] * 3)
  row = rows["training, last quarter"]
  assert row.estimate.by_seed == pytest.approx([3, 4, 5]) and len(rows) == 5
  # Of five intervals each has 99 %: Student's 99.5 % quantile, two degrees of freedom, is 9.92484.
  half = (row.estimate.high - row.estimate.mean, row.together.high - row.together.mean)
  assert half == pytest.approx((4.30265 / math.sqrt(3), 9.92484 / math.sqrt(3)), rel=1e-5)


@pytest.mark.parametrize("name, count", [("paired", 16), ("scratch", 10)])
def test_the_tables_of_an_experiment_are_those_of_its_results(repository, name, count):
  from fp8jax.report import compare_page  # needs Altair

  folder = repository / "experiments" / "2025_infir2"
  found = compare.compare(sorted(map(str, (folder / "results" / name).iterdir())))
  lines = (folder / "README.md").read_text().splitlines()
  for arm, _, *cells in map(compare_page.cells, found.rows):
    assert f"| `{arm}` | {' | '.join(cells)} |" in lines
  assert len(found.rows) == count and not found.notes


@pytest.mark.parametrize(
  "percents, verdict",
  [((1.0,), "no verdict: too short"), ((0.1, 0.4), "no verdict: too short"),
   ((0.9, 1.0, 1.1), "missed"), ((0.1, math.nan), "missed: diverged")],
)  # fmt: skip
def test_verdict_needs_the_whole_interval(tmp_path, percents, verdict):
  paths = folders(tmp_path, percents)
  rows = {r.quantity: r.estimate for r in compare.compare(paths).rows}
  assert rows["training"].verdict == verdict


def test_a_run_that_stopped_is_diverged_and_one_that_skipped_a_step_is_not(tmp_path):
  paths = [pathlib.Path(p) for p in folders(tmp_path, (0.1, 0.1))]
  _, stopped, base, skipped = paths  # of seeds 0 and 1
  lines = (skipped / "metrics.jsonl").read_text().splitlines()
  at = next(i for i, line in enumerate(lines) if json.loads(line).get("step") == STEPS // 2)
  lines[at] = json.dumps({**json.loads(lines[at]), "loss": "nan"})
  (skipped / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  for path, step in ((stopped, STEPS + 1), (skipped, STEPS // 2)):  # the second went on
    (path / "nonfinite").mkdir()
    (path / "nonfinite/report.json").write_text(json.dumps({"step": step}))
  found = compare.compare(list(map(str, paths)))
  rows = {r.quantity: r.estimate for r in found.rows}
  assert rows["training"].by_seed == pytest.approx((math.inf, 0.1))
  assert {e.verdict for e in rows.values()} == {"missed: diverged"}
  assert any("1 steps without a finite loss" in note for note in found.notes)
  loss = {m.run.name: m.final_loss for m in found.members}
  assert math.isinf(loss["block_128-0"]) and math.isfinite(loss["block_128-1"])
  # A baseline that stopped is compared with nothing.
  (base / "nonfinite").mkdir()
  (base / "nonfinite/report.json").write_text(json.dumps({"step": STEPS + 1}))
  found = compare.compare(list(map(str, paths)))
  assert "block_128-1: bf16-1 diverged, not compared" in found.notes


def test_losses_that_end_as_nan_are_divergence(tmp_path):
  for count, is_lost in ((arms.LAST_STEPS, True), (arms.LAST_STEPS - 1, False)):
    losses = [*BASE.tolist()[:-count], *["nan"] * count]
    path = run_files.write_steps(tmp_path / str(count), losses, "bf16", 0)
    assert compare.has_diverged(compare.files.read(path)) == is_lost


def test_the_final_loss_is_not_that_of_before_training(tmp_path):
  path = run_files.write_steps(tmp_path / "a", BASE.tolist(), "bf16", 0)
  with open(tmp_path / "a" / "metrics.jsonl", "a") as f:
    f.write(json.dumps({"step": 0, "heldout/main/bf16/loss": 9.0}) + "\n")
  other = run_files.write_steps(tmp_path / "b", BASE.tolist(), "block_128", 0)
  members = compare.compare([path, other]).members
  assert members[0].run.heldout and members[0].final_loss == members[1].final_loss < 3


def test_an_arm_keeps_its_colour_and_shares_it_with_none_of_a_picture():
  arms = [f"block_128(accumulate={n})" for n in range(16, 256, 16)]  # fewer than there are colours
  assert len(set(palette.of_arms(arms).values())) == len(arms)
  alone = {arm: palette.of_arms([arm, "bf16"])[arm] for arm in arms}
  assert alone == {arm: palette.of_arms([arm])[arm] for arm in arms}
  assert palette.of_arms(["bf16"])["bf16"] == "#000000"


@pytest.mark.parametrize(
  "of_step, until",
  [(lambda _: 0.5, lambda s: 0.5 * s), (float, lambda s: s * (s + 1) / 2)],
  ids=["steps of equal length", "longer and longer: later ones are no part of the cost"],
)
def test_cost_of_equal_loss_is_where_the_running_mean_crosses(tmp_path, of_step, until):
  """Losses that fall in a straight line: 1 % more loss is a known number of steps."""
  base = run_files.write_steps(tmp_path / "a", BASE.tolist(), "bf16", 0, seconds=1.0)
  fast = 3 - 2 * np.arange(STEPS) / STEPS
  mine = run_files.write_steps(tmp_path / "b", fast.tolist(), "block_128", 0)
  rows = [{**r, "step_seconds": of_step(r["step"])} for r in debug_runs.rows(tmp_path / "b")]
  (tmp_path / "b" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
  (equal,) = compare.compare([base, mine]).equal_loss
  window = STEPS // 8
  target = np.mean(BASE[-window:])
  step = next(s for s in range(window, STEPS + 1) if np.mean(fast[s - window : s]) <= target)
  assert step < STEPS and equal.target == pytest.approx(target)
  assert equal.tokens == pytest.approx(step / STEPS)
  assert equal.seconds == pytest.approx(until(step) / STEPS)
  (never,) = compare.compare([base, mine], "block_128").equal_loss
  assert (never.reached, never.tokens) == (0, None)


def test_a_number_that_would_be_divided_by_zero_is_left_out(tmp_path):
  """Unknown tokens per step, steps that took no time, and a held-out loss of 0."""
  paths = []
  for recipe, own in (("bf16", {"bf16": 0.0}), ("block_128", {"bf16": 0.0, "block_128": 0.5})):
    losses = BASE.tolist()
    path = run_files.write_steps(tmp_path / recipe, losses, recipe, 0, 0.0, own)
    config = debug_runs.read_json(tmp_path / recipe / "config.json")
    del config["resolved"]["seq_len"]
    (tmp_path / recipe / "config.json").write_text(json.dumps(config))
    paths.append(path)
  result = compare.compare(paths)
  (equal,) = result.equal_loss
  assert (equal.reached, equal.tokens, equal.seconds) == (1, None, None)
  assert {r.quantity: r.estimate.mean for r in result.rows}["rounding, main"] == math.inf
  run_report.sections(files.read(paths[1]))


def test_a_longer_baseline_gives_the_loss_that_it_had_at_the_shorter_runs_end(tmp_path):
  long = (3 - np.arange(2 * STEPS) / STEPS).tolist()
  base = run_files.write_steps(tmp_path / "a", long, "bf16", 0)
  mine = run_files.write_steps(tmp_path / "b", (BASE + 0.25).tolist(), "block_128", 0)
  (equal,) = compare.compare([base, mine]).equal_loss
  window = 2 * STEPS // 8  # of the baseline
  assert equal.target == pytest.approx(np.mean(long[STEPS - window : STEPS]))
  # 0.25 more of a loss that falls by 1 / STEPS a step is not reached in as many steps.
  assert (equal.reached, equal.tokens) == (0, None)


def test_the_final_loss_is_that_of_the_recipes_forward_pass(tmp_path):
  held = {"bf16": 1.5, "block_128": 2.25}
  mine = run_files.write_steps(tmp_path / "a", BASE.tolist(), "block_128", 0, heldout=held)
  base = run_files.write_steps(tmp_path / "b", BASE.tolist(), "bf16", 0, heldout={"bf16": 1.75})
  loss = {m.arm: m.final_loss for m in compare.compare([mine, base]).members}
  assert loss == {"block_128": 2.25, "bf16": 1.75}


def test_tables_of_text_keep_their_cells_whatever_an_arm_is_called(tmp_path):
  paths = folders(tmp_path, (0.1,), **{"optim.name": "a|b\nc\x1b[31m"})
  other = {"optim.name": "d"}
  paths.append(run_files.write_steps(tmp_path / "alone", BASE.tolist(), "mxfp8", 0, **other))
  from fp8jax.report import compare_page  # needs Altair

  lines = compare_page.text(compare.compare(paths)).splitlines()
  row = next(line for line in lines if line.startswith("| block_128"))
  assert "name=a\\|b c\u241b[31m" in row
  assert len(re.findall(r"(?<!\\)\|", row)) == len(compare_page.COLUMNS) + 1


def test_runs_that_cannot_be_paired_are_named(tmp_path):
  paths = folders(tmp_path, (0.1,), **{"optim.peak_lr": 1e-3})
  other = {"optim.peak_lr": 1e-2}
  paths.append(run_files.write_steps(tmp_path / "alone", BASE.tolist(), "mxfp8", 0, **other))
  data = tmp_path / "block_128-0" / "provenance.json"
  data.write_text(json.dumps({"data_fingerprint": "another"}))
  found = compare.compare(paths)
  assert not found.rows and set(found.config) == {"optim.peak_lr", "precision.rules"}
  assert any("alone: no run of bf16 with its seed and settings" in note for note in found.notes)
  assert any("block_128-0: other data than bf16-0" in note for note in found.notes)
  with pytest.raises(UserError, match="at least two runs"):
    compare.compare(paths[:1])
  with pytest.raises(UserError, match="no run is of the baseline 'x'; --baseline= one of bf16, bl"):
    compare.compare(paths, "x")


def test_losses_are_paired_by_batch_where_a_roll_back_left_some_out(tmp_path):
  """The loss of a batch depends on the batch alone here; each differs from all others."""
  of_batch = 2 + 0.3 * np.random.default_rng(0).standard_normal(40)
  kept = np.delete(of_batch, [11, 12, 25])  # steps 12 to 23 are two batches further, later three
  paths = [
    run_files.write_steps(tmp_path / name, losses.tolist(), name, 0)
    for name, losses in (("bf16", of_batch), ("block_128", 1.01 * kept))
  ]
  metrics = pathlib.Path(paths[1], "metrics.jsonl")
  rows = [json.loads(line) for line in metrics.read_text().splitlines()]
  for row in rows:
    skipped = 2 * (row["step"] > 11) + (row["step"] > 23)
    row |= {"batches_skipped": skipped} if skipped else {}
  metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
  found = compare.compare(paths)
  (row,) = [r for r in found.rows if r.quantity == "training"]
  assert row.estimate.by_seed == pytest.approx((1.0,), abs=1e-9)
  (along,) = found.differences
  assert along.mean == pytest.approx(1.0, abs=1e-9) and along.tokens[-1] == 40 * 16


def test_runs_whose_processes_read_other_shares_read_other_batches(tmp_path):
  """Those of several processes from before `shares` evaluated other windows, too."""
  paths = folders(tmp_path, (0.1,))
  theirs, mine = (pathlib.Path(path, "provenance.json") for path in paths)
  of = json.loads(mine.read_text())
  for more, other, is_paired in (
    ({"processes": 4, "shares": 1}, {"processes": 1}, True),
    ({"processes": 4, "shares": 2}, {"processes": 2, "shares": 2}, True),
    ({"processes": 4, "shares": 2}, {"processes": 1}, False),
    ({"processes": 2}, {"processes": 2, "shares": 2}, False),
    ({"processes": 2}, {"processes": 2}, True),
    ({}, {"processes": 1, "shares": 1}, True),
  ):
    mine.write_text(json.dumps(of | more))
    theirs.write_text(json.dumps(of | other))
    found = compare.compare(paths)
    assert bool(found.rows) == is_paired, more
    assert any("which gives other batches" in text for text in found.notes) != is_paired
  said = "were read in shares that 2 processes did not state and those of bf16-0 in 1 share"
  mine.write_text(json.dumps(of | {"processes": 2}))
  assert any(said in text for text in compare.compare(paths).notes)


def test_losses_of_a_runs_own_completions_are_not_compared(tmp_path):
  """An objective about zero: a worse one would be 50 % less than its baseline's."""
  paths = folders(tmp_path, (0.1, 0.2))
  for path in paths[2:]:
    metrics = pathlib.Path(path, "metrics.jsonl")
    first, rest = metrics.read_text().split("\n", 1)
    row = {"step": 1, "rl/reward": 0.5}
    metrics.write_text(f"{first}\n{json.dumps(row)}\n{rest}")
  found = compare.compare(paths)
  (row,) = (r for r in found.rows if r.quantity == "training")
  assert row.estimate.by_seed == pytest.approx((0.1,))
  notes = [note for note in found.notes if "completions of its own" in note]
  assert [note.partition(":")[0] for note in notes] == ["bf16-1", "block_128-1"]
  with pytest.raises(UserError, match="bf16-1 learned from completions of its own.*--job=report"):
    compare.compare(paths[2:])


def _runs(tmp_path, *rows):
  """Of (name, recipe, seed, percent above BASE, seconds of a step, changes)."""
  return [
    run_files.write_steps(tmp_path / name, (BASE * (1 + more / 100)).tolist(), recipe, seed, time,
                          **changes)
    for name, recipe, seed, more, time, changes in rows
  ]  # fmt: skip


def test_where_a_seed_ran_is_a_setting_and_no_second_seed(tmp_path):
  one, four = {"mesh.fsdp": 1}, {"mesh.fsdp": 4}
  paths = _runs(
    tmp_path, ("a", "bf16", 0, 0, 1.0, one), ("b", "bf16", 0, 0, 0.5, four),
    ("c", "mxfp8", 0, 0.1, 3.0, one), ("d", "mxfp8", 0, 0.3, 1.0, four),
  )  # fmt: skip
  for order in (paths, [paths[1], paths[0], paths[3], paths[2]]):
    found = compare.compare(order)
    rows = {r.setting: r.estimate for r in found.rows if r.quantity == "training"}
    assert {k: len(e.by_seed) for k, e in rows.items()} == {"fsdp=1": 1, "fsdp=4": 1}
    assert rows["fsdp=1"].mean == pytest.approx(0.1) and rows["fsdp=4"].mean == pytest.approx(0.3)
    assert {e.verdict for e in rows.values()} == {"no verdict: too short"} and not found.notes
  alone = compare.compare(paths[:3])  # of four devices there is the baseline alone
  assert {(r.setting, r.arm) for r in alone.rows} == {("fsdp=1", "mxfp8")}


def test_seeds_of_an_arm_may_have_run_in_different_places(tmp_path):
  paths = _runs(
    tmp_path,
    ("a", "bf16", 0, 0, 1.0, {"mesh.fsdp": 1, "kernels.matmul": "xla", "sharding.acts.G": "x"}),
    ("b", "mxfp8", 0, 0.1, 1.0, {"mesh.fsdp": 1, "kernels.matmul": "reference"}),
    ("c", "bf16", 1, 0, 1.0, {"mesh.fsdp": 4, "kernels.matmul": "xla"}),
    ("d", "mxfp8", 1, 0.3, 1.0, {"mesh.fsdp": 4, "kernels.matmul": "reference"}),
  )  # fmt: skip
  (row,) = [r for r in compare.compare(paths).rows if r.quantity == "training"]
  assert row.setting == "" and row.estimate.by_seed == pytest.approx((0.1, 0.3))


@pytest.mark.parametrize("key, values", [
  ("memory.save_gate_up", ("none", "e4m3_16")), ("kernels.matmul", ("auto", "emulated_sm90")),
])  # fmt: skip
def test_keys_that_alter_results_tell_arms_apart(tmp_path, key, values):
  rows = [("a", "bf16", 0, 0, 1.0, {key: values[0]})]
  rows += [(v, "mxfp8", 0, i, 1.0, {key: v}) for i, v in enumerate(values)]
  found = compare.compare(_runs(tmp_path, *rows))
  got = {r.arm: r.estimate.by_seed for r in found.rows if r.quantity == "training"}
  name = key.partition(".")[2]
  names = [f"mxfp8 {name}={v}" for v in values]
  assert set(got) == {"mxfp8" if name == "matmul" else names[0], names[1]}
  assert all(len(by_seed) == 1 for by_seed in got.values())


def _training(paths, baseline="bf16"):
  """({(arm, setting): differences by seed}, notes) of the training loss."""
  found = compare.compare(paths, baseline)
  rows = [r for r in found.rows if r.quantity == "training"]
  return {(r.arm, r.setting): [round(x, 6) for x in r.estimate.by_seed] for r in rows}, found.notes


@pytest.mark.parametrize("key, of_base, mine", [
  ("kernels.matmul", "xla", ("reference", "mosaic_sm90")),
  ("memory.remat_policy", "none", ("full", "linears")),
])  # fmt: skip
def test_an_arm_that_ran_in_two_ways_is_compared_with_a_third(tmp_path, key, of_base, mine):
  rows = [("a", "bf16", 0, 0, 1.0, {key: of_base})]
  rows += [(v, "mxfp8", 0, i + 1, 1.0, {key: v}) for i, v in enumerate(mine)]
  got, notes = _training(_runs(tmp_path, *rows))
  name = key.partition(".")[2]
  assert got == {("mxfp8", f"{name}={v}"): [i + 1] for i, v in enumerate(mine)} and not notes


def test_more_runs_of_the_baseline_leave_no_pair_out(tmp_path):
  one, four = {"mesh.fsdp": 1}, {"mesh.fsdp": 4}
  paths = _runs(
    tmp_path, *((f"a{s}", "bf16", s, 0, 1.0, one) for s in range(3)),
    *((f"c{s}", "mxfp8", s, s + 1, 1.0, four) for s in range(3)),
    ("b0", "bf16", 0, 0.5, 1.0, four),
  )  # fmt: skip
  assert _training(paths[:-1])[0] == {("mxfp8", ""): [1, 2, 3]}
  got, notes = _training(paths)
  ours = round(100 * (1.01 / 1.005 - 1), 6)  # with the run on four devices, too
  assert got == {("mxfp8", "fsdp=4"): [ours, 2, 3]} and not notes
  two = _runs(
    tmp_path,
    ("d0", "bf16", 0, 0, 1.0, {"mesh.fsdp": 8}),
    ("e0", "mxfp8", 0, 1, 1.0, {"mesh.fsdp": 2}),
  )
  got, notes = _training([*paths[:1], *two])
  said = "e0: runs of bf16 with its seed and settings ran in other ways (fsdp=1; fsdp=8), not"
  assert not got and any(note.startswith(said) for note in notes)


def test_kernels_that_alter_nothing_and_keys_of_later_versions_tell_no_arm_apart(tmp_path):
  matmul = ("auto", "xla", "emulated_sm90", "emulated_sm90")
  rows = [(f"r{i}", ("bf16", "mxfp8")[i > 1], i % 2, i, 1.0, {"kernels.matmul": m})
          for i, m in enumerate(matmul)]  # fmt: skip
  ours = [2.0, round(100 * (1.03 / 1.01 - 1), 6)]
  assert _training(_runs(tmp_path, *rows)) == ({("mxfp8", ""): ours}, ())
  key = "memory.save_layer_inputs"
  rows = [(f"s{i}", ("bf16", "mxfp8")[i > 1], i % 2, i, 1.0, {key: "none"} if i % 2 else {})
          for i in range(4)]  # fmt: skip
  paths = _runs(tmp_path, *rows)
  for path in paths[::2]:
    config = pathlib.Path(path, "config.json")
    stored = json.loads(config.read_text())
    stored["resolved"].pop(key, None)
    config.write_text(json.dumps(stored))
  assert _training(paths) == ({("mxfp8", ""): ours}, ())


def test_a_key_that_alters_results_within_the_baseline_is_a_setting(tmp_path):
  key, values = "memory.save_gate_up", ("none", "e4m3_16")
  rows = [(f"{r}-{v}", r, 0, 1 + i + 2 * (r == "mxfp8"), 1.0, {key: v})
          for r in ("bf16", "mxfp8") for i, v in enumerate(values)]  # fmt: skip
  got, notes = _training(_runs(tmp_path, *rows))
  ours = [round(100 * (b / a - 1), 6) for a, b in ((1.01, 1.03), (1.02, 1.04))]
  assert got == {("mxfp8", f"save_gate_up={v}"): [d] for v, d in zip(values, ours)} and not notes


def test_of_repeated_runs_the_finished_one_counts_and_those_of_other_data_are_no_repeats(tmp_path):
  whole, other = folders(tmp_path, (0.1,))
  (short,) = [
    run_files.write_steps(tmp_path / "short", (BASE[:6] * 1.05).tolist(), "block_128", 0, 1.0)
  ]
  got, notes = _training([whole, short, other])
  assert got == {("block_128", ""): [0.1]}
  assert [n for n in notes if f"{short}: as {other} in arm" in n] == list(notes)
  (again,) = _runs(tmp_path, ("again", "bf16", 0, 3, 1.0, {}))
  data = pathlib.Path(again, "provenance.json")
  data.write_text(json.dumps(json.loads(data.read_text()) | {"data_fingerprint": "another"}))
  got, notes = _training([again, whole, other])
  assert got == {("block_128", ""): [0.1]} and not notes


def test_a_run_that_is_named_twice_or_repeated_is_one_sample(tmp_path):
  paths = folders(tmp_path, (0.1, 0.3))
  again = _runs(tmp_path, ("again", "block_128", 1, 5, 1.0, {"log.every": 7}))
  found = compare.compare([*paths, paths[1], *again])
  (row,) = [r for r in found.rows if r.quantity == "training"]
  assert row.estimate.by_seed == pytest.approx((0.1, 0.3))
  said = [n for n in found.notes if n.endswith("in arm, settings and seed, left out")]
  assert len(said) == 2 and str(paths[1]) in said[0] and f"as {paths[3]}" in said[1]
  assert len(found.members) == 4


@pytest.mark.parametrize("policies", [(), ("lower_rate()",)])
def test_runs_whose_policies_saw_other_evaluations_are_not_paired(tmp_path, policies):
  """Without a policy the interval of evaluations changes no loss: any two are a pair."""
  arms = (("bf16", 10), ("block_128", 20))
  paths = [
    run_files.write_steps(tmp_path / recipe, BASE.tolist(), recipe, 0,
                          **{"eval.every": every, "precision.policy": policies})
    for recipe, every in arms
  ]  # fmt: skip
  made = compare.compare(paths)
  assert bool(made.rows) == (not policies)
  assert {m.setting for m in made.members} == ({"every=10", "every=20"} if policies else {""})


def test_comparison_is_written_as_page_json_picture_and_table(tmp_path, capsys):
  pytest.importorskip("altair")
  paths = folders(tmp_path, (0.05, 0.11), **{"optim.peak_lr": 1e-3})
  for i, seed in enumerate((0, 1)):
    path = tmp_path / f"high-{i}"
    other = {"optim.peak_lr": 1e-2}
    paths.append(run_files.write_steps(path, (BASE + 1).tolist(), "bf16", seed, **other))
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="--workdir=.*file cannot be a folder: File exists; name ano"):
    report.compare(str(tmp_path / "file"), paths, "bf16")
  path = report.compare(str(tmp_path / "out"), paths, "bf16")
  page = (tmp_path / "out" / "compare.html").read_text()
  specs = json.loads(page.split('id="specs">')[1].split("</script>")[0])
  assert set(specs) == {"differences", "intervals", "rates", "losses"}
  colors = {"bf16": "#000000", "block_128": "#0072B2"}  # the same in every picture
  for spec in specs.values():
    layers = [e for e in spec.get("layer", [spec]) if "color" in e.get("encoding", {})]
    for layer in layers:
      scale = layer["encoding"]["color"]["scale"]
      assert dict(zip(scale["domain"], scale["range"])) == colors
  found = json.loads((tmp_path / "out" / "compare.json").read_text())
  assert [row["quantity"] for row in found["differences"]][0] == "training"
  assert "<svg" in (tmp_path / "out" / "compare.svg").read_text()
  assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
  said = capsys.readouterr().out
  assert "| block_128 | peak_lr=0.001 | training | +0.050, +0.110 | +0.080 ± 0.381 |" in said
  assert path.endswith("compare.html") and path in said
