"""Proof that FP8 runs: the GEMMs of the compiled step, held against the spec.

expected_gemms.py derives from the site table what must be in the program, hlo.py reads what is,
`check` compares, and `strict` does all of it for the step that a run is about to take.

On GPU the compiled program is read. XLA:CPU has no FP8 arithmetic, so that on CPU it is the program
as it was handed to XLA: nothing says how fast it is, but the products are those of the recipes.

The comparison is of work, in multiply-adds, which no rewriting changes: XLA may unroll loops, stack
the weights of sites that share an input into one GEMM, and pad to cuBLASLt's multiples of 16.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from fp8jax import console as console_lib
from fp8jax.compiled import hlo
from fp8jax.compiled.expected_gemms import GemmRow, expected
from fp8jax.errors import UserError
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.mixer import GemmSite
from fp8jax.quantization import tensor_stats
from fp8jax.recipe import rules
from fp8jax.step import train_step
from fp8jax.step.train_spec import TrainSpec


class NotFp8(UserError):
  """A GEMM that should be FP8 and is not."""


TITLE = "FP8 GEMMs per step and device, found/planned"


# --- the comparison ------------------------------------------------------------------------------


def compare(spec: TrainSpec, gemms: list[hlo.HloGemm], phase: int = 0) -> list[GemmRow]:
  """The rows of `expected` with what was found, and one for everything that none expects."""
  by_key: dict[hlo.GemmKey, list[hlo.HloGemm]] = collections.defaultdict(list)
  rows = expected(spec, phase)
  once = {row.key.site for row in rows if row.most > 1}
  for gemm in gemms:
    is_again = gemm.key.is_recompute and gemm.key.site not in once
    by_key[dataclasses.replace(gemm.key, is_recompute=is_again)].append(gemm)
  rows = [_with_gemms(row, by_key.pop(row.key, [])) for row in rows]
  if spec.device.platform != "cpu":
    rows = _share(rows, transformer.gemm_sites(spec.model))
  for key, gemms in by_key.items():
    rows.append(_with_gemms(GemmRow(key, "-", "-", (0, 0, 0)), gemms))
  return rows


def _with_gemms(row: GemmRow, gemms: list[hlo.HloGemm]) -> GemmRow:
  fp8 = calls = sum(g.times for g in gemms if g.is_fp8)
  done = sum(g.times * g.work for g in gemms if g.is_fp8)
  unquantized = [g for g in gemms if not g.is_fp8]
  if row.expected:
    most = row.most * row.padded
    fp8 = row.expected if row.work <= done <= most else row.expected * done // row.work
    fp8 = max(fp8, row.expected + 1) if done > most else fp8
  return dataclasses.replace(
    row,
    fp8=fp8,
    calls=calls,
    done=done,
    unquantized=sum(g.times for g in unquantized),
    kernels=tuple(dict.fromkeys(g.kernel for g in gemms)),
    instead=f"{unquantized[0].text} by {unquantized[0].kernel}" if unquantized else "",
    why=next((g.why for g in unquantized if g.why), ""),
    accumulates=tuple(dict.fromkeys(g.accumulate for g in gemms if g.is_fp8)),
    depth=max((g.depth for g in gemms if g.is_fp8 and g.accumulate), default=0),
  )


def _share(rows: list[GemmRow], declared: Mapping[str, GemmSite]) -> list[GemmRow]:
  """The rows, what sites have in common told apart.

  XLA stacks the weights of sites that share an input into one GEMM. It carries the name of one of
  them, is called as often as one and does exactly the work that all of them together should.
  """
  groups = collections.defaultdict(list)
  for n, row in enumerate(rows):
    if row.expected:
      module, shared = row.key.site.rpartition("/")[0], declared[rules.path_of(row.key.site)].input
      groups[module, shared, row.key.product, row.key.is_recompute].append(n)
  rows = list(rows)
  for group in groups.values():
    lacking = [n for n in group if rows[n].done < rows[n].work]
    # The row with the most work, compared with its spec.
    owner = max(group, key=lambda n: _per_call(rows[n]) - rows[n].work)
    members, calls = [owner, *lacking], rows[owner].calls / rows[owner].expected
    least, most = (sum(getattr(rows[n], w) for n in members) for w in ("work", "padded"))
    is_whole = least <= _per_call(rows[owner]) + sum(rows[n].done for n in lacking) <= most
    if lacking and is_whole and 1 <= calls <= rows[owner].most:
      for n in members:
        kernels, site = rows[owner].kernels, rows[owner].key.site
        accumulates = tuple(dict.fromkeys(rows[owner].accumulates + rows[n].accumulates))
        rows[n] = dataclasses.replace(
          rows[n], fp8=rows[n].expected, kernels=kernels, shared=site,
          accumulates=accumulates, depth=max(rows[owner].depth, rows[n].depth),
        )  # fmt: skip
  return rows


def _per_call(row: GemmRow) -> float:
  """Multiply-adds, had the GEMMs found been as many as expected."""
  return row.done * row.expected / max(row.calls, 1)


def check(spec: TrainSpec, text: str, phase: int = 0) -> list[GemmRow]:
  """The table of a program whose FP8 GEMMs are those of the spec.

  Args:
    text: HLO of its step, see hlo.gemms.

  Raises:
    NotFp8: names the first site that differs, what it does instead, why, and what to do.
  """
  rows = compare(spec, hlo.gemms(text, spec.device.platform), phase)
  if problem := _problem(rows, spec):
    raise NotFp8(problem)
  return rows


def summary(spec: TrainSpec, text: str) -> dict[str, Any]:
  """Counts of `check`: {"found", "planned", "by", "problem"}; no problem is ""."""
  rows = compare(spec, hlo.gemms(text, spec.device.platform))
  return {
    "found": sum(row.fp8 for row in rows),
    "planned": sum(row.expected for row in rows),
    "by": sorted({kernel for row in rows if row.expected for kernel in row.kernels}),
    "problem": _problem(rows, spec),
  }


def _problem(rows: list[GemmRow], spec: TrainSpec) -> str:
  """The complaint of the first row that is not proven, and a few of the others; "" for none."""
  wrong = [row for row in rows if not row.is_proven]
  if not wrong:
    return ""
  first, *others = wrong
  some = ", ".join(str(row.key) for row in others[:4]) + ", ..." * (len(others) > 4)
  return _complaint(first, spec) + (f" So do {len(others)} more: {some}." if others else "")


def _complaint(row: GemmRow, spec: TrainSpec) -> str:
  """The problem of a product, its reason, and the remedy."""
  if not row.accumulate:
    return (
      f"{row.key}: the program has {row.fp8} FP8 GEMMs that the plan does not, by "
      f"{', '.join(row.kernels)}. Every GEMM in FP8 belongs to a site and its recipe: use "
      "fp8jax.ops.linear, or report this as an error of fp8jax/compiled/fp8_gemms.py."
    )
  if row.is_multiplied:
    return _complaint_of_accumulation(row, spec)
  size = "x".join(map(str, row.size))
  have = (
    f"{row.unquantized} unquantized ones, the first {row.instead}" if row.unquantized else "nothing"
  )
  if row.fp8:
    have = f"{row.fp8} FP8 ones" + (f" and {have}" if row.unquantized else "")
  if not row.unquantized:
    reason = "XLA changed or dropped what was traced under this name"
  elif row.why:
    reason = row.why
  elif spec.device.platform == "cpu":
    reason = "its operands are dequantized before they are multiplied"
  else:
    reason = "XLA did not match it to an FP8 kernel, or its operands are dequantized before it"
  gemm = getattr(rules.recipe_by_name(row.recipe), row.key.product)
  problem = choose.GemmProblem(*row.size, gemm, spec.device)
  notes = choose.gemm(problem, spec.kernels.matmul).notes
  reason += "".join(f"; passed over {note}" for note in notes)
  fixes = [
    f"kernels.matmul={name!r}" for name in choose.gemm_backends(problem) if name != row.backend
  ]
  fixes += [
    "another recipe for this site in precision.rules",
    "precision.verify_fp8_gemms=False to run it so",
  ]
  return (
    f"{row.key}: the plan has {row.expected} FP8 GEMMs per step ({size} per device, recipe "
    f"{row.recipe!r}, backend {row.backend!r}) and the program has {have}. Reason: {reason}. "
    f"Fix: {', '.join(fixes[:-1])}, or {fixes[-1]}."
  )


def _complaint_of_accumulation(row: GemmRow, spec: TrainSpec) -> str:
  fixes = ["another backend in kernels.matmul", "precision.verify_fp8_gemms=False to run it so"]
  if row.accumulates and set(row.accumulates) <= {"fast", "precise"}:
    fixes.insert(0, f"(accumulate={row.accumulates[0]}) behind the recipe's name to have it so")
  return (
    f"{row.key}: recipe {row.recipe!r} accumulates {row.accumulate!r} and the program's FP8 GEMM "
    f"accumulates {row.accumulates_otherwise} ({', '.join(row.kernels)}, backend {row.backend!r}). "
    "Reason: the backend, or XLA, did not hand the precision of the operands on. "
    f"Fix: {', '.join(fixes[:-1])}, or {fixes[-1]}."
  )


def table(rows: list[GemmRow], title: str = TITLE):
  """For printing: a line per site, "found/planned" per product, "12 unquantized" or emulated."""
  by_site: dict[str, dict[str, GemmRow]] = collections.defaultdict(dict)
  for row in rows:
    by_site[row.key.site]["recompute" if row.key.is_recompute else row.key.product] = row
  outside = by_site.pop(hlo.NO_SITE.site, {}).get(hlo.NO_SITE.product)
  columns = ["fwd", "recompute", "dgrad", "wgrad"]
  lines = []
  for site, products in by_site.items():
    first = next(iter(products.values()))
    is_emulated = any(row.is_emulated for row in products.values())
    recipe = first.recipe + " (emulated)" * is_emulated
    kernels = dict.fromkeys(
      k
      for row in products.values()
      for k in row.kernels or [row.backend] * (row.is_emulated and not row.expected)
    )
    cells = [_cell(products[c]) if c in products else "-" for c in columns]
    lines.append([site, recipe, *cells, ", ".join(kernels)])
  made = console_lib.table(title, ["site", "recipe", *columns, "by"], lines)
  notes = ["* in one GEMM with another site of the same input"] * any(row.shared for row in rows)
  notes += [f"of no site: {_cell(outside)}, by {', '.join(outside.kernels)}"] if outside else []
  made.caption, made.caption_justify = "\n".join(notes), "left"
  return made


def _cell(row: GemmRow) -> str:
  said = [f"{row.fp8}/{row.expected}" + "*" * bool(row.shared)] if row.expected or row.fp8 else []
  is_wide = row.is_emulated and not row.accumulate  # float32 carries its numbers
  if row.unquantized:
    said += [f"{row.unquantized} {'emulated' if is_wide else 'unquantized'}"]
  elif row.accumulate and not row.expected:
    said += ["emulated"]
  return ", ".join(said) or "-"


def strict(spec: TrainSpec, step_fn, state, batch, sites, phase: int = 0) -> list[GemmRow]:
  """`check` of the very step that will run.

  The first call of step_fn with these arguments finds it traced, lowered and compiled: what this
  costs is to print and to read the program, a second or two for a 7B model.

  Args:
    step_fn: step.make_step's.
    state, batch, sites: what it will be called with; neither used up nor computed with.
    phase: of the precision schedule that `sites` are of.
  """
  return check(spec, text_of(spec, step_fn.lower(state, batch, sites)), phase)


def text_of(spec: TrainSpec, lowered, compiled=None) -> str:
  """The HLO of a program that says what it multiplies: on GPU compiled, on CPU lowered."""
  if spec.device.platform == "cpu":
    return lowered.as_text("hlo", debug_info=True)
  return (compiled or lowered.compile()).as_text()


def every_step(spec: TrainSpec, step_fn, state, batch, now: int) -> list[tuple[str, list[GemmRow]]]:
  """`strict` of a phase of the precision schedule and of those to come: (title, rows) of each.

  Of the step that watches numerics too, where the configuration asks for it; its rows are the same.

  Args:
    step_fn, state, batch: see `strict`; the state of phase `now`.
  """
  loud = [tensor_stats.LOUD] if spec.log.tensor_stats_every else []
  titled = []
  for phase in range(now, len(spec.precision.phases)):
    start = spec.precision.phases[phase].start
    if phase > now:
      scaling_states = train_step.abstract_state(spec, start + 1).scaling_states
      state = dataclasses.replace(state, scaling_states=scaling_states)
    for statistics in [*loud, tensor_stats.QUIET]:
      sites = spec.sites(phase=phase, statistics=statistics)
      rows = strict(spec, step_fn, state, batch, sites, phase)
    title = f"{TITLE} from step {start}" if phase else TITLE
    recipe = spec.run.attention_recipe
    titled.append((title + f"; attention {recipe} is emulated" * bool(recipe), rows))
  return titled
