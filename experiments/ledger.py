"""The ledger of the lab: verdicts from result files -> ledger.md, ledger.json, lab/pictures, and
the words of README.md's table of papers.

command: python experiments/ledger.py [FOLDER]    (experiments/lab/results: *.json, at any depth)

A row is a comparison of experiments/lab/runs.py, paired by seed. Its interval is Student's over the
seeds, at 95 % together with all of its system (fp8jax/statistics.py has the rule). Runs of another
commit, CPU, jax, backend or data are not paired; a note says what differs. Pairs of one row have
one commit, jax and backend; a pair of another CPU is named. The noise floor is the
root mean square difference of the candidate's runs from their nudged twins (init.nudge); where its
pairs have none, of runs and twins that share another commit or CPU, which a note names. Seeds were
counted before the runs: a row that has fewer says "3 of 6", and is for looking at until it has all.
"""

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "lab")]

import design  # noqa: E402
import results as results_lib  # noqa: E402
import runs as runs_lib  # noqa: E402
import stability  # noqa: E402

from fp8jax import records, statistics  # noqa: E402
from fp8jax.errors import UserError  # noqa: E402
from fp8jax.report import compare  # noqa: E402

RESULTS = HERE / "lab" / "results"
ILLUSTRATION, NOT_RUN = "illustration", "not run"
# How words begin that decide nothing.
OPEN = ("no verdict", ILLUSTRATION, NOT_RUN, "refused")
# Words for an interval below 0, above it, or on both sides.
WORDS = {"higher": ("opposite", "as claimed", "no verdict"),
         "lower": ("as claimed", "opposite", "no verdict")}  # fmt: skip
Result = results_lib.Result
_CPU = results_lib.ORIGIN.index("cpu")


@dataclasses.dataclass(frozen=True)
class Row:
  """A comparison and what its runs say.

  Attributes:
    question, claim: as asked, with the claimed effect in percent.
    rate: peak learning rate of a system that visits several, else None.
    planned: seeds that were fixed before the runs.
    seeds: of the pairs.
    effect, low, high: percent of the baseline's loss; None without a pair, infinite with one.
    floor: percent; None without a twin.
    verdict: "met", "missed", "as claimed", "opposite", "no verdict…", "illustration", "refused…".
    notes: runs that were left out, and why.
  """

  system: str
  candidate: str
  baseline: str
  question: str
  claim: float
  quantity: str
  rate: float | None
  tokens: int
  planned: int
  seeds: tuple[int, ...] = ()
  effect: float | None = None
  low: float | None = None
  high: float | None = None
  floor: float | None = None
  verdict: str = NOT_RUN
  notes: tuple[str, ...] = ()
  origin: tuple[str, ...] = ()

  @property
  def count(self) -> str:
    """ "6" of at most 6 planned seeds, "3 of 6", or "-" without a pair."""
    if not self.seeds or len(self.seeds) >= self.planned:
      return str(len(self.seeds) or "-")
    return f"{len(self.seeds)} of {self.planned}"


Index = dict[tuple[str, int, bool], list[Result]]


def index(found: Iterable[Result]) -> Index:
  """{(group, seed, whether a twin): results, one of each origin}.

  Raises:
    UserError: two results of a run have one origin and other losses: nobody knows which is meant.
  """
  made: Index = collections.defaultdict(list)
  for result in found:
    of_run = made[result.run.group, result.run.seed, result.run.is_twin]
    same = next((r for r in of_run if r.key == result.key), None)
    if same is None:
      of_run.append(result)
    elif (same.losses, same.heldout, same.data) != (result.losses, result.heldout, result.data):
      raise UserError(
        f"{result.run.name}: two results of commit {result.origin['commit'][:9]} that differ; "
        "remove the file of one"
      )
  return made


def percent(quantity: str, run: Result, base: Result) -> float:
  """How much larger the run's loss is than the base's; infinite where it diverged."""
  if quantity == "training":
    return compare.training(run.files(), base.files())
  loss = results_lib.own_loss(run)
  return 100 * (loss / results_lib.own_loss(base) - 1) if math.isfinite(loss) else math.inf


def _by_origin(of: Index, group: str, is_twin: bool = False):
  """{origin: {seed: result}} of a group."""
  made = collections.defaultdict(dict)
  for (name, seed, twin), found in of.items():
    if name == group and twin == is_twin:
      for result in found:
        made[result.key][seed] = result
  return made


def _what_differs(one: Sequence[str], other: Sequence[str]) -> str:
  parts = zip(results_lib.ORIGIN, one, other, strict=True)
  shown = lambda name, text: text[: 9 if name == "commit" else 24]  # noqa: E731
  return ", ".join(f"{n} {shown(n, a)} and {shown(n, b)}" for n, a, b in parts if a != b)


def _paired(why: dict[tuple[tuple[str, ...], int], str]) -> dict[int, tuple[str, ...]]:
  """{seed: origin of its pair}: of the program that has the most; seeds may differ in the CPU.

  Args:
    why: {(origin, seed) of both arms: why they are no pair, or ""}.
  """
  counts = collections.Counter(origin for origin, _ in why)
  by_program = collections.defaultdict(dict)
  # Pairs first, and the origin of most seeds, which then stands first in the row.
  for origin, seed in sorted(why, key=lambda of: (not why[of], counts[of[0]], of), reverse=True):
    by_program[origin[:_CPU] + origin[_CPU + 1 :]].setdefault(seed, origin)
  return max(by_program.items(), key=lambda item: (len(item[1]), item[0]))[1]


def _left_out(name: str, by, others, paired, used) -> list[str]:
  """Which runs of an arm stand in no pair, and why.

  Args:
    by, others: {origin: {seed: result}} of the arm, and of the other one.
    paired: of `_paired`.
    used: its origins, that of most pairs first.
  """
  elsewhere, notes = {seed for of in others.values() for seed in of}, []
  # Those of an arm that systems share belong to other comparisons.
  if alone := by.keys() - others.keys():
    runs = sum(len(by[other]) for other in alone)
    of_them = f"{_counted(runs, 'run')} of {_counted(len(alone), 'origin')}"
    notes.append(f"{name}: {of_them} without any of the other arm")
  for other in sorted(by.keys() - set(used) - alone):
    notes.append(f"{name}, {_named(by[other])}: not paired, {_what_differs(other, used[0])}")
  for origin in used:
    for seed in sorted(by.get(origin, {}).keys()):
      if paired.get(seed) not in (origin, None):
        notes.append(f"{name}, seed {seed}: not paired, run on {origin[_CPU]} too")
      elif seed not in paired:
        why = "arm's is of another origin" if seed in elsewhere else "arm has no such run"
        notes.append(f"{name}, seed {seed}: the other {why}")
  return notes


def _counted(number: int, word: str) -> str:
  return f"{number} {word}{'s' * (number > 1)}"


def _named(seeds: Iterable[int]) -> str:
  seeds = sorted(seeds)
  return "seed" + "s" * (len(seeds) > 1) + " " + ", ".join(map(str, seeds))


def _unpaired(run: Result, base: Result, name: str, quantity: str) -> str:
  """Why two runs of a seed and an origin are no pair, or ""."""
  if run.data != base.data:
    return f"data {run.data} and {base.data}"
  if quantity == "heldout" and any(r.status == "finished" and not r.heldout for r in (run, base)):
    return "a run without held-out losses"
  return "" if base.status == "finished" else f"{name} diverged"


def floor(of: Index, group: str, quantity: str, origins) -> float | None:
  """Root mean square difference, percent, of twins from their own runs; None without any."""
  by_seed = {}
  for origin in origins:
    own, twins = (_by_origin(of, group, is_twin).get(origin, {}) for is_twin in (False, True))
    for s in sorted(own.keys() & twins.keys()):
      if own[s].status == "finished" and own[s].data == twins[s].data:
        by_seed.setdefault(s, percent(quantity, twins[s], own[s]))
  found = by_seed.values()
  return math.sqrt(sum(x * x for x in found) / len(found)) if found else None


def verdict(question: str, estimate: statistics.Estimate) -> str:
  """The word for paired differences: of `fp8jax.statistics`, whose rule this is."""
  diverged = sum(not math.isfinite(x) for x in estimate.by_seed)
  if diverged:
    return f"diverged in {diverged} of {len(estimate.by_seed)}"
  if question == "close":
    return estimate.verdict
  return statistics.verdict(estimate.low, estimate.high, 0.0, WORDS[question])


def row(system: design.System, comparison: design.Comparison, of: Index, rate=None) -> Row:
  """The row of a comparison, at one learning rate."""
  arms = {arm.name: arm for arm in system.arms}
  groups = [
    next(r.group for r in system.runs((arms[name],)) if rate in (None, dict(r.changes).get(_RATE)))
    for name in (comparison.candidate, comparison.baseline)
  ]
  empty = Row(
    system.slug, comparison.candidate, comparison.baseline, comparison.question, comparison.effect,
    comparison.quantity, rate, system.tokens,
    min(system.seeds(arms[name]) for name in (comparison.candidate, comparison.baseline)),
  )  # fmt: skip
  mine, base = (_by_origin(of, group) for group in groups)
  shared = {o: mine[o].keys() & base[o].keys() for o in mine.keys() & base.keys()}
  shared = {o: seeds for o, seeds in shared.items() if seeds}
  if not shared:
    if not mine or not base:
      return empty
    differs = _what_differs(next(iter(sorted(mine))), next(iter(sorted(base))))
    return dataclasses.replace(empty, verdict=f"refused: {differs or 'no seed in common'}")
  why = {
    (o, seed): _unpaired(
      mine[o][seed], base[o][seed], comparison.baseline, comparison.quantity
    )
    for o, seeds in shared.items() for seed in seeds
  }  # fmt: skip
  paired = _paired(why)
  used = tuple(o for o, _ in collections.Counter(paired.values()).most_common())
  notes = ["files were edited: the commit is not what ran"] * used[0][0].endswith("+")
  for name, by, others in ((comparison.candidate, mine, base), (comparison.baseline, base, mine)):
    notes += _left_out(name, by, others, paired, used)
  wrong = {seed: reason for seed, o in sorted(paired.items()) if (reason := why[o, seed])}
  notes += [f"seed {seed}: {reason}, not compared" for seed, reason in wrong.items()]
  seeds = sorted(paired.keys() - wrong)
  noise = floor(of, groups[0], comparison.quantity, used)
  for other in sorted(_by_origin(of, groups[0], True).keys() - set(used)):
    if noise is None and (noise := floor(of, groups[0], comparison.quantity, (other,))) is not None:
      notes.append(f"noise floor of runs and twins elsewhere: {_what_differs(other, used[0])}")
  if not seeds:
    return dataclasses.replace(empty, verdict="no verdict: no pair", notes=(*notes,))
  for other in used[1:]:
    here = [seed for seed in seeds if paired[seed] == other]
    notes += [f"{_named(here)}: of another CPU, {other[_CPU]}"] * bool(here)
  cpus = " and ".join(o[_CPU] for o in used if any(paired[seed] == o for seed in seeds))
  origin = (*used[0][:_CPU], cpus, *used[0][_CPU + 1 :])
  values = [percent(comparison.quantity, mine[paired[s]][s], base[paired[s]][s]) for s in seeds]
  count = len(system.comparisons) * max(len(system.rates), 1)
  found = statistics.estimate(values, count)
  return dataclasses.replace(
    empty, seeds=tuple(seeds), effect=found.mean, low=found.low, high=found.high,
    floor=noise, notes=tuple(notes), origin=origin,
    verdict=ILLUSTRATION if system.illustration else verdict(comparison.question, found),
  )  # fmt: skip


_RATE = "optim.peak_lr"


def rows(of: Index, systems: Sequence[design.System] = runs_lib.SYSTEMS) -> list[Row]:
  """Every comparison of every system, at every rate."""
  return [
    row(system, comparison, of, rate)
    for system in systems
    for comparison in system.comparisons
    for rate in system.rates or (None,)
  ]


@dataclasses.dataclass(frozen=True)
class Curve:
  """Losses of an arm by learning rate, of a system that asks for the best one.

  Attributes:
    losses: {rate: mean training loss after the warm-up over seeds; infinite where one diverged}.
  """

  system: str
  arm: str
  losses: dict[float, float]

  @property
  def best(self) -> float:
    """The rate of the least loss."""
    return min(self.losses, key=lambda rate: self.losses[rate])


def curves(of: Index, systems: Sequence[design.System] = runs_lib.SYSTEMS) -> list[Curve]:
  """Of every arm of systems with rates and no comparison, of which one origin has every run."""
  found = []
  for system, arm in ((s, a) for s in systems if s.rates and not s.comparisons for a in s.arms):
    runs = {dict(run.changes)[_RATE]: run.group for run in system.runs((arm,))}
    by_rate = {rate: _by_origin(of, group) for rate, group in runs.items()}
    whole = [
      {origin for origin, seeds in by_origin.items() if len(seeds) == system.seeds(arm)}
      for by_origin in by_rate.values()
    ]
    for origin in sorted(set.intersection(*whole))[:1]:
      losses = {rate: _mean_loss(by_origin[origin].values()) for rate, by_origin in by_rate.items()}
      found.append(Curve(system.slug, arm.name, losses))
  return found


def _mean_loss(results: Iterable[Result]) -> float:
  each = [sum(r.losses[r.warmup :]) / len(r.losses[r.warmup :]) if r.status == "finished"
          else math.inf for r in results]  # fmt: skip
  return sum(each) / len(each)


# --- the page -------------------------------------------------------------------------------------


def _number(x: float | None, form: str = "+.2f") -> str:
  return "-" if x is None else "∞" if math.isinf(x) else format(x, form)


def markdown(found: Sequence[Row], of: Index | None = None, by_rate: Sequence[Curve] = ()) -> str:
  """The page: a table per system, notes below it; then losses by learning rate.

  Args:
    of: results, for the tables of how runs fail (lab/stability.py).
  """
  lines = [
    "# Ledger of the lab",
    "",
    "Written by `python experiments/ledger.py` from experiments/lab/results; [lab.md](lab.md) says",
    "how. Effects are percent of the baseline's loss, paired by seed; intervals hold at 95 %",
    "together within a system. The noise floor is the recipe against itself one ulp away. An",
    "illustration has two seeds and no verdict. Seeds were counted before the runs: 3 of 6 are not",
    "all yet, and the word may change.",
  ]
  lines += ["", progress(found, by_rate), *_systems(found)]
  columns = ("comparison", "claim", "quantity", "tokens", "seeds", "effect, %", "interval, %",
             "noise floor, %", "verdict")  # fmt: skip
  for slug in dict.fromkeys(r.system for r in found):
    own = [r for r in found if r.system == slug]
    lines += ["", f"## {slug}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for r in own:
      claim = (
        f"within {statistics.BAR} %" if r.question == "close" else f"{r.question}, {r.claim:g} %"
      )
      ends = f"[{_number(r.low)}, {_number(r.high)}]" if len(r.seeds) > 1 else "-"
      twin = _number(r.floor, ".2f") if r.floor is not None or not r.seeds else "no twin"
      effect = _number(r.effect)
      cells = (_name(r), claim, r.quantity, f"{r.tokens:,}", r.count, effect, ends, twin, r.verdict)
      lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += _origins(own) + _notes(own)
    lines += [x for s in runs_lib.SYSTEMS if of and s.slug == slug for x in stability.tables(s, of)]
  for slug in dict.fromkeys(c.system for c in by_rate):
    own = [c for c in by_rate if c.system == slug]
    rates = sorted({rate for c in own for rate in c.losses})
    columns = ("training loss by rate", *(f"{rate:g}" for rate in rates), "best")
    lines += ["", f"## {slug}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for c in own:
      cells = [_number(c.losses.get(rate), ".4f") for rate in rates]
      lines.append(f"| {' | '.join([c.arm, *cells, format(c.best, 'g')])} |")
  return "\n".join(lines) + "\n"


def _name(row: Row) -> str:
  rate = f", rate {row.rate:g}" if row.rate else ""
  return f"{row.candidate} against {row.baseline}{rate}"


def _origins(rows: Sequence[Row]) -> list[str]:
  """A line per commit and jax: the CPUs that its runs had."""
  cpus = collections.defaultdict(set)
  for r in rows:
    if r.origin:
      facts = dict(zip(results_lib.ORIGIN, r.origin, strict=True))
      cpus[facts["commit"][:9], facts["jax"]].update(facts["cpu"].split(" and "))
  return [
    line for (commit, jax), of in cpus.items()
    for line in ("", f"Commit {commit}, {' and '.join(sorted(of))}, jax {jax}.")
  ]  # fmt: skip


def _notes(rows: Sequence[Row]) -> list[str]:
  """Each note of a system once, with the comparisons that it is about."""
  about = collections.defaultdict(list)
  for r in rows:
    for note in dict.fromkeys(r.notes):
      about[note].append(_name(r))
  lines = [""] * bool(about)
  for note, names in about.items():
    few = len(names) <= _IN_FULL
    where = "; ".join(dict.fromkeys(names)) if few else f"{len(names)} of {len(rows)} comparisons"
    lines.append(f"- {note} ({where})")
  return lines


def _is_decided(row: Row) -> bool:
  """Whether all seeds are there and the word is a verdict."""
  return len(row.seeds) >= row.planned and not row.verdict.startswith(OPEN)


def progress(found: Sequence[Row], by_rate: Sequence[Curve] = ()) -> str:
  """How many papers have a verdict, are begun, are not run. A search of rates is its paper's."""
  of = lambda slugs: {slug.removesuffix("_rates") for slug in slugs}  # noqa: E731
  papers = of(s.slug for s in runs_lib.SYSTEMS if not s.slug.startswith(runs_lib.CORPUS))
  decided = papers & of(r.system for r in found if _is_decided(r))
  begun = of(r.system for r in found if r.verdict != NOT_RUN) | of(c.system for c in by_rate)
  begun = papers & begun - decided
  counts = map(len, (papers, decided, begun, papers - decided - begun))
  return (
    "Of {} papers, the number with a verdict from all its seeds is {}; begun without one (a pair "
    "of runs is there), {}; not run, {}."
  ).format(*counts)


def _systems(found: Sequence[Row]) -> list[str]:
  """The table of systems: the test of each one's arithmetic, and what its comparisons decide."""
  columns = ("system", "its arithmetic, by a test", "comparisons", "begun", "decided")
  lines = ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  for slug in dict.fromkeys(s.slug for s in runs_lib.SYSTEMS):
    own = [r for r in found if r.system == slug]
    decided = sum(map(_is_decided, own))
    file, _, name = runs_lib.ARITHMETIC[slug].partition("::")
    test = f"[{name.removeprefix('test_').replace('_', ' ')}](../tests/{file})" if name else file
    begun = sum(r.verdict != NOT_RUN for r in own)
    lines.append(f"| {slug} | {test} | {len(own)} | {begun} | {decided} |")
  return lines


# In a cell of README.md: <!-- ledger SLUG -->, or SLUG: CANDIDATE, the words, <!-- end -->.
_PLACE = re.compile(r"(<!-- ledger ([\w]+)(?:: ([^>]+?))? -->).*?(<!-- end -->)")
_IN_FULL = 3


def of_papers(text: str, found: Sequence[Row]) -> str:
  """README.md with the ledger's words, in place of those behind each `<!-- ledger SLUG -->`."""

  def words(match: re.Match) -> str:
    start, slug, candidate, end = match.groups()
    own = [r for r in found if r.system == slug and candidate in (None, r.candidate)]
    return f"{start}ledger: {_said(own)}{end}"

  return _PLACE.sub(words, text)


def _said(rows: Sequence[Row]) -> str:
  """Up to three rows in full, more by their words."""
  by_word = collections.defaultdict(list)
  made = []
  for r in rows:
    word = r.verdict.partition(":")[0]
    seeds = f" ({r.count} seeds)" if " of " in r.count else ""
    by_word[word].append(r)
    of = f"{r.candidate} against {r.baseline}"
    of += "" if r.quantity == "training" else f", {r.quantity}" + "," * (r.effect is not None)
    if r.effect is not None:
      of += f" {_number(r.effect)} %"
    if r.effect is not None and len(r.seeds) > 1:
      of += f" [{_number(r.low)}, {_number(r.high)}]"
    made.append(f"{of}: {word}{seeds}")
  if len(rows) <= _IN_FULL:
    return "; ".join(made)
  counts = {word: sorted({r.count for r in of if " of " in r.count})
            for word, of in by_word.items()}  # fmt: skip
  return ", ".join(
    f"{len(of)} {word}" + f" ({', '.join(counts[word])} seeds)" * bool(counts[word])
    for word, of in by_word.items()
  )


def read(folder: pathlib.Path = RESULTS) -> Index:
  """The results below a folder."""
  return index(map(results_lib.read, sorted(folder.rglob("*.json"))))


def main(arguments: Sequence[str] | None = None):
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("folder", nargs="?", type=pathlib.Path, default=RESULTS, help="results/")
  folder = parser.parse_args(arguments).folder
  of = read(folder)
  if not of:  # else the ledger would say that nothing was run
    parser.error(f"{folder} holds no results; expected files of lab/run_queue.py, at any depth")
  found, by_rate = rows(of), curves(of)
  (HERE / "ledger.md").write_text(markdown(found, of, by_rate))
  papers = HERE / "README.md"
  papers.write_text(of_papers(papers.read_text(), found))
  table = [dataclasses.asdict(r) for r in found]
  (HERE / "ledger.json").write_text(records.to_json(table, indent=1) + "\n")
  import pictures  # altair, half a second

  pictures.write(found, of, by_rate)
  counts = collections.Counter(r.verdict for r in found)
  print(json.dumps(counts, indent=1))


if __name__ == "__main__":
  main()
