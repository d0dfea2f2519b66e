"""Searches of a sweep: points that Optuna suggests."""

import pytest
import sweep_runs

from fp8jax.errors import UserError
from fp8jax.sweeps import outcome, plan, run, spec


@pytest.mark.slow  # a point that goes on: below
def test_search_goes_on_where_it_was_interrupted(folder, monkeypatch):
  optuna = pytest.importorskip("optuna")
  search = spec.Optuna({"optim.peak_lr": spec.LogUniform(0.01, 0.9)}, count=2)
  sweep = spec.Sweep("c.py", arms=("a", "b"), seeds=(0, 1), search=search)
  monkeypatch.setattr(run.table, "show", lambda *_: None)
  made, sampler = [], optuna.samplers.TPESampler
  monkeypatch.setattr(
    optuna.samplers, "TPESampler", lambda **wishes: made.append(wishes) or sampler(**wishes)
  )
  _, trials, names = sweep_runs.sweep(folder, monkeypatch, sweep)
  # Points that are tried at the same time are not next to each other.
  assert [m.get("constant_liar") for m in made if "seed" in m] == [True, True]
  assert len(names) == 8 and len({(t["arm"], *t["point"].values()) for t in trials}) == 4
  more = spec.Sweep("c.py", arms=("a", "b"), seeds=(0, 1),
                    search=spec.Optuna(search.distributions, 3))  # fmt: skip
  assert len(sweep_runs.sweep(folder, monkeypatch, more)[2]) == 4


def test_the_objective_of_a_point_is_the_mean_over_its_seeds(folder, monkeypatch):
  ends = [outcome.Outcome("finished", x) for x in (3.0, 1.0, 2.5)]
  assert plan.of_point(ends) == pytest.approx(6.5 / 3) and plan.of_point(ends[:1]) == 3
  assert plan.of_point([*ends, outcome.Outcome("diverged")]) is None
  optuna = pytest.importorskip("optuna")
  search = spec.Optuna({"optim.peak_lr": spec.Choice((0.5,))}, count=1)
  sweep_runs.sweep(folder, monkeypatch, spec.Sweep("c.py", seeds=(0, 1, 8), search=search))
  path = optuna.storages.journal.JournalFileBackend(str(folder / "out" / "optuna.journal"))
  study = optuna.load_study(study_name="all-0", storage=optuna.storages.JournalStorage(path))
  assert study.best_value == pytest.approx(0.53)  # of 0.5 + seed / 100


def test_a_point_that_is_suggested_again_runs_once_and_is_told_each_time(folder):
  """Beside the first one, and after it."""
  optuna = pytest.importorskip("optuna")

  def suggested(count):
    search = spec.Optuna({"optim.peak_lr": spec.Choice((0.5,))}, count=count)
    return plan.of(spec.Sweep("c.py", seeds=(0, 1), search=search), str(folder))

  def values():
    path = optuna.storages.journal.JournalFileBackend(str(folder / "optuna.journal"))
    study = optuna.load_study(study_name="all-0", storage=optuna.storages.JournalStorage(path))
    return [t.value for t in study.get_trials()]

  one = suggested(3)
  trials = [one.take(), one.take()]
  assert one.take() is None and len({t.workdir for t in trials}) == 2
  for trial, objective in zip(trials, (3.0, 5.0)):
    one.give(trial, outcome.Outcome("finished", objective))
  assert values() == [4.0] * 3 and one.take() is None
  more = suggested(5)
  trials = [more.take(), more.take()]  # finished before: their outcomes are read
  for trial, objective in zip(trials, (3.0, 5.0)):
    more.give(trial, outcome.Outcome("finished", objective))
  assert more.take() is None and values() == [4.0] * 5


def test_an_interrupted_point_of_tuples_goes_on_in_its_folder(folder):
  pytest.importorskip("optuna")
  rules = ((("head", "bf16"), (".*", "block_128")), ((".*", "bf16"),))
  search = spec.Optuna({"precision.rules": spec.Choice(rules)}, count=1)
  sweep = spec.Sweep("c.py", search=search)
  first, again = (plan.of(sweep, str(folder)).take() for _ in range(2))
  assert first == again and first.changes["precision.rules"] in rules


@pytest.mark.parametrize(
  "damage",
  [
    lambda text: text[:-20],
    lambda text: "[1]\n",
    lambda text: "{}\n" + text,
    lambda text: text.replace('"low\\": 0.01', '"low\\": "x"'),
  ],
  ids=["cut", "list", "object", "kind"],
)
def test_a_journal_that_optuna_cannot_read_is_named(folder, monkeypatch, damage, request):
  pytest.importorskip("optuna")
  kind = spec.LogUniform(0.01, 0.9)
  sweep = spec.Sweep("c.py", search=spec.Optuna({"optim.peak_lr": kind}, count=1))
  sweep_runs.sweep(folder, monkeypatch, sweep)
  path = folder / "out" / "optuna.journal"
  path.write_text(damage(path.read_text()))
  kind = spec.Choice((0.5,)) if request.node.callspec.id == "kind" else kind
  sweep = spec.Sweep("c.py", search=spec.Optuna({"optim.peak_lr": kind}, count=3))
  with pytest.raises(UserError, match="optuna.journal is no study of this search: .*move it away"):
    sweep_runs.sweep(folder, monkeypatch, sweep)
