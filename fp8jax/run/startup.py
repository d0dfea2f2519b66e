"""The messages of a run at its start and at its end."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import rich.console
import rich.table

from fp8jax import console as console_lib
from fp8jax import params as params_lib
from fp8jax.compiled import memory
from fp8jax.data import loader
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.ops import collectives, site_tree
from fp8jax.ops import site as site_lib
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import PASSES
from fp8jax.run import goodput
from fp8jax.step.run_spec import RunSpec

_GATHERS = {None: "-", True: "quantized", False: "unquantized"}


def site_rows(plan: RunSpec, phase: int = 0) -> list[dict[str, Any]]:
  """One row per site: name, number of layers, GEMM sizes per device, recipe, scales, backends."""
  layout = plan.run.layout
  declared = site_tree.find_sites(transformer.site_params(plan.model))
  gemms = transformer.gemm_sites(plan.model)
  rows = []
  for name, site in site_lib.flatten(plan.sites(phase=phase)).items():
    path = rules.path_of(name)
    param = declared[path]
    size = site_tree.local_size(param, plan.model.dims, layout, plan.tokens_per_device)
    quantized = collectives.gathers_quantized(param, site.recipe, plan.model.dims, layout)
    recipe = site.recipe
    if plan.run.smooth_swiglu == "channel" and gemms[path].has_channel_scales:
      recipe = recipe.with_current_scales("w")  # of smooth_swiglu.channel_scales
    row = {
      "site": name,
      "layers": len(site.layer_names),
      "m_n_k": list(size.of("fwd")),
      "recipe": recipe.name,
      "definition": recipe.to_dict(),
      "backends": dict(zip(PASSES, site.backends)),
      "weight_gather": _GATHERS[quantized],
      "notes": [],
    }
    if row["weight_gather"] == "unquantized" and site.recipe.fwd.is_quantized:
      row["notes"].append(
        "FP8 weight gathers: a shard of some weights holds no whole scale tile, so that the "
        "float32 master is gathered; choose mesh.fsdp so that every tile stays whole"
      )
    for which in PASSES:
      gemm = getattr(site.recipe, which)
      problem = choose.GemmProblem(*size.of(which), gemm, plan.device)
      row["notes"] += choose.gemm(problem, plan.kernels.matmul).notes
    row["notes"] = sorted(set(row["notes"]))
    rows.append(row)
  return rows


def all_site_rows(plan: RunSpec) -> list[dict[str, Any]]:
  """`site_rows` of every phase of the precision schedule, with the step from which each holds."""
  return [
    {"from_step": start.start, **row}
    for phase, start in enumerate(plan.precision.phases)
    for row in site_rows(plan, phase)
  ]


def _backends(plan: RunSpec) -> str:
  """The backend that updates the matrices, and why the kernel does not."""
  wanted, large, passed = plan.kernels.optimizer, 0, collections.defaultdict(list)
  if wanted == "xla":
    return "all updated by xla"
  for path, leaf in params_lib.flatten(plan.leaves).items():
    large += leaf.is_large
    if leaf.note:
      passed[leaf.note].append(path)
  by_xla = [f"; by xla {', '.join(paths)} ({note})" for note, paths in passed.items()]
  updated = large - sum(map(len, passed.values()))
  return f"{updated} of {large} matrices updated by mosaic_sm90{''.join(by_xla)}"


def _lora(plan: RunSpec) -> str:
  """The storage of frozen linear layers, and the adapters."""
  one = plan.model.lora
  if one is None:
    return "no adapters"
  stored = "E4M3 codes per 128x128" if one.base == "block_fp8" else "BF16"
  return f"linear layers as {stored}, adapters of rank {one.rank} at {', '.join(one.targets)}"


def _optimizer(plan: RunSpec) -> str:
  """The optimizer, the formats of its state, and the parameters that have other formats."""
  o, nbytes = plan.optim, plan.optim.bytes_per_parameter()
  weight = f"{nbytes['weight']:.3g} B of BF16 weights and " if nbytes["weight"] else ""
  words = (
    f"masters {o.master_format} ({weight}{nbytes['master']:.3g} B)",
    f"gradients {o.grad_format} "
    + ("of one layer at a time" if o.in_backward else f"({nbytes['gradient']:.3g} B)"),
    f"moments {o.moment_format} ({nbytes['moments']:.3g} B)",
  )
  declared, dims = params_lib.flatten(plan.declaration), plan.model.dims
  counts = {k: params_lib.count({k: p}, dims) for k, p in declared.items()}
  spared = sum(counts[k] for k, p in declared.items() if not p.decay and p.trainable)
  frozen = sum(counts[k] for k, p in declared.items() if not p.trainable)
  return (
    f"{o.optimizer}: {', '.join(words)} per parameter, {sum(nbytes.values()):.3g} B in all; "
    f"norms and biases ({spared:,} parameters) keep float32; {_backends(plan)}"
    + (f"; {frozen:,} parameters frozen, {_lora(plan)}" if frozen else "")
  )


def device_line(plan: RunSpec, devices: Sequence[Any] | None = None) -> str:
  """Which devices of the machine the run computes on, and what they multiply FP8 with.

  Args:
    plan: the run.
    devices: the machine's; default: all that JAX has.
  """
  devices = jax.devices() if devices is None else devices
  count, total = plan.num_devices, len(devices)
  sites = [s for p in range(len(plan.precision.phases)) for s in _flat_sites(plan, p)]
  used = {b for s in sites for p, b in zip(PASSES, s.backends) if getattr(s.recipe, p).is_quantized}
  number = "" if total == 1 else f"{count} × " if count == total else f"{count} of {total} × "
  if plan.device.platform == "cpu":
    line = f"{number}CPU" + ": FP8 is emulated, exact and slow" * bool(used)
  else:
    number = number or "1 × "
    kind = f"{number}{devices[0].device_kind} ({choose.name_of(plan.device)})"
    line = f"{kind}: FP8 products by {', '.join(sorted(used))}" if used else f"{kind}: no FP8"
    line += " (emulated, slow)" * ("reference" in used)
  if count < total:
    line += f"; mesh.data, mesh.fsdp and mesh.tensor are 1, the other {total - count} are idle"
  return line


def _flat_sites(plan: RunSpec, phase: int):
  return site_lib.flatten(plan.sites(phase=phase)).values()


def print_start(
  out: rich.console.Console,
  plan: RunSpec,
  changes: dict[str, Any],
  fingerprint: str,
  sites: list[dict[str, Any]],
):
  """The plan of a run: the difference from base, the model, the sites (all_site_rows')."""
  out.print(device_line(plan))
  if note := choose.caution(plan.device):
    out.print(f"  {note}")
  if reason := choose.lacks_dtype(plan.device, "bfloat16"):
    out.print(f"  {reason}: compute is {plan.run.dtype.name}, attention {plan.run.attention}")
  if changes:
    rows = [[k, str(old), str(new)] for k, (old, new) in changes.items()]
    out.print(
      console_lib.table("config, where it differs from base", ["key", "base", "here"], rows)
    )
  count = params_lib.count(plan.declaration, plan.model.dims)
  mesh = plan.run.layout.mesh
  shape = (
    " x ".join(f"{a}={n}" for a, n in mesh.shape.items()) if mesh is not None else "one device"
  )
  out.print(
    f"model {plan.model.architecture}, {count:,} parameters; compute {plan.run.dtype.name}, "
    f"attention {plan.run.attention}, remat {plan.run.remat}; {shape}; data {fingerprint}"
  )
  if isinstance(plan.attention, choose.Choice):
    for note in plan.attention.notes:
      out.print(f"  attention: {note}")
  out.print(_optimizer(plan))
  for phase in plan.precision.phases:
    here = [row for row in sites if row["from_step"] == phase.start]
    _print_sites(out, here, phase.start, plan.device.platform)


def _print_sites(out: rich.console.Console, sites: list[dict[str, Any]], start: int, platform: str):
  rows, notes = [], []
  has_gathers = any(row["weight_gather"] != "-" for row in sites)
  for row in sites:
    used = list(dict.fromkeys(row["backends"].values()))
    rows.append(
      [
        row["site"] + (f" (x{row['layers']})" if row["layers"] > 1 else ""),
        "x".join(map(str, row["m_n_k"])),
        row["recipe"],
        scales(row["definition"]),
        *([] if platform == "cpu" else [accumulation(row["definition"])]),
        "/".join(used),
        *([row["weight_gather"]] if has_gathers else []),
      ]
    )
    notes += [n for n in row["notes"] if n not in notes]
  columns = ["site", "MxNxK per device", "recipe", "scales: x, w, gradient"]
  columns += ["backend"] if platform == "cpu" else ["accumulation", "backend"]
  columns += ["weight gather"] if has_gathers else []
  title = f"sites from step {start}" if start else "sites"
  out.print(console_lib.table(title, columns, rows))
  if platform == "cpu" and any(row["definition"]["fwd"]["lhs"] for row in sites):
    out.print("  FP8 products accumulate in float32 on a CPU, whatever the recipe says")
  for note in notes:
    out.print(f"  passed over {note}")


def scales(definition: dict[str, Any]) -> str:
  """The three operands' formats and tiles, e.g. "e4m3 1x128, e4m3 128x128, e4m3 1x128"."""

  def one(quant):
    if quant is None:
      return "-"
    rows, contraction = (t or "*" for t in quant["tile"])
    return f"{quant['format']} {rows}x{contraction}"

  operands = (definition["fwd"]["lhs"], definition["fwd"]["rhs"], definition["dgrad"]["lhs"])
  if operands[0] is None:
    return "-"
  return ", ".join(map(one, operands)) + f" ({operands[0]['scale']})"


def accumulation(definition: dict[str, Any]) -> str:
  """How FP8 products accumulate in fwd/dgrad/wgrad: "fast/precise/precise", "every 128"."""
  gemms = [definition[p] for p in PASSES]
  hows = [gemm["accumulate"] if gemm["lhs"] else "-" for gemm in gemms]
  words = [f"every {how}" if isinstance(how, int) else how for how in hows]
  return "/".join(words if len(set(words)) > 1 else words[:1])


def print_chats(out: rich.console.Console, plan: RunSpec, per_step: int):
  """The samples of a run on conversations; stops it if they do not fit its windows.

  Args:
    per_step: samples of an optimizer step.

  Raises:
    UserError: a step needs more windows than global_batch.
  """
  steps = loader.chat_steps(plan.data, plan.global_batch)
  needed, count = steps.check(plan.steps), len(steps.samples)
  positions, trained = int(steps.samples.lengths.sum()), int(steps.samples.trained.sum())
  out.print(
    f"{count:,} samples of {positions:,} tokens, {trained:,} of them trained; {plan.steps:,} steps "
    f"of {per_step} samples, {plan.steps * per_step / count:.2f} epochs; the fullest step needs "
    f"{needed} of {plan.global_batch} windows"
  )
  index = loader.chat_index(plan.data)
  for what, number in sorted(index.counts.items()):
    out.print(f"samples {what}: {number:,}")
  origin = plan.data.chat.template.origin if plan.data.chat else ""
  for line in filter(None, (origin, index.ends(plan.data.tokenizer)[1])):
    out.print(line)


def print_evaluation(out: rich.console.Console, step: int, results, passed_over):
  """The held-out losses of a step, see evaluator.Evaluator.run, and the documents passed over."""
  for source, by_precision in results.items():
    for what, number in passed_over[source].items():
      out.print(f"held-out documents of {source} passed over as {what}: {number}")
    text = "  ".join(f"{p} {v['loss']:.4f}" for p, v in by_precision.items())
    out.print(f"step {step}  held-out loss on {source}: {text}")


def print_interrupted(out: rich.console.Console, step: int, exit_code: int):
  """The last line of a run that was asked to stop."""
  out.print(
    f"interrupted: saved step {step}; the same command goes on from there (exit code {exit_code})"
  )


def print_end(out: rich.console.Console, summary: dict[str, Any], workdir: str):
  """The closing table: tokens, training loss, held-out loss before and after in every precision."""
  evaluations = summary["evaluations"]
  steps = sorted(evaluations, key=int)
  first, last = (evaluations[steps[i]] if steps else {} for i in (0, -1))
  rows = []
  for source, by_precision in last.items():
    for precision, after in by_precision.items():
      before = first.get(source, {}).get(precision)
      # Another recipe, source or number of tokens since: nothing to compare with.
      if before is not None and before["tokens"] != after["tokens"]:
        before = None
      rows.append(
        [
          f"{source}, {precision} forward",
          f"{after['tokens']:,.0f}",
          f"{before['loss']:.4f}" if before else "-",
          f"{after['loss']:.4f}",
          f"{after['loss'] - before['loss']:+.4f}" if before else "-",
          f"{math.exp(min(after['loss'], 700)):.3f}",
        ]
      )
  train = f"{summary['train_loss']:.4f}" if summary["train_loss"] is not None else "-"
  out.print(f"{summary['step']} steps, {summary['tokens']:,} tokens seen, last train loss {train}")
  columns = ["held-out", "tokens", "loss before", "after", "change", "perplexity after"]
  if rows:
    out.print(console_lib.table("held-out loss in nats per token", columns, rows))
  if summary["documents_passed_over"]:
    out.print(f"documents passed over: {summary['documents_passed_over']}")
  if summary["skipped_updates"]:
    out.print(f"updates skipped for non-finite values: {summary['skipped_updates']}")
  out.print(goodput.line(summary["seconds"]))
  out.print(f"written to {workdir}")


def account_table(rows: Sequence[memory.MemoryRow], summary: dict[str, Any]) -> rich.table.Table:
  """Memory per device by kind, as declared and as compiled, each at its own peak."""
  table = rich.table.Table(title="memory per device")
  for name in ("kind", "declared GiB", "compiled GiB"):
    table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
  table.add_column("largest arrays, differences")

  def gib(n: int | None) -> str:
    return "" if n is None else f"{n / 2**30:.3f}"

  for row in rows:
    table.add_row(row.kind, gib(row.declared), gib(row.compiled), row.note)
  table.add_section()
  table.add_row(
    "arguments of the step", gib(summary["state_declared"]), gib(summary["arguments_compiled"])
  )
  table.add_row(
    "temporaries", gib(summary["declared"] - summary["state_declared"]),
    gib(summary["temporaries_compiled"]), f"declared: at the {summary['declared_moment']}",
  )  # fmt: skip
  table.add_row(
    "peak", gib(summary["declared"]), gib(summary["peak"]),
    f"declared / compiled: {summary['declared_of_peak']:.3f}",
  )  # fmt: skip
  return table
