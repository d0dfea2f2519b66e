"""The beginning of a run: its table of sites, the messages, and the files that describe it."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import rich.console

from fp8jax import console as console_lib
from fp8jax import params as params_lib
from fp8jax.data import loader
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import tile_config
from fp8jax.models import transformer
from fp8jax.ops import collectives, site_tree
from fp8jax.ops import site as site_lib
from fp8jax.optim import storage
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import PASSES
from fp8jax.run import provenance as provenance_lib
from fp8jax.run import workdir as workdir_lib
from fp8jax.step import quantized_once
from fp8jax.step.train_spec import TrainSpec

_GATHERS = {None: "-", True: "quantized", False: "unquantized"}


def site_rows(spec: TrainSpec, phase: int = 0) -> list[dict[str, Any]]:
  """One row per site: name, number of layers, GEMM sizes per device, recipe, scales, backends."""
  layout = spec.run.layout
  declared = site_tree.find_sites(transformer.site_params(spec.model))
  gemms = transformer.gemm_sites(spec.model)
  rows = []
  for name, site in site_lib.flatten(spec.sites(phase=phase)).items():
    path = rules.path_of(name)
    param = declared[path]
    size = site_tree.local_size(param, spec.model.dims, layout, spec.tokens_per_device)
    quantized = collectives.gathers_quantized(param, site.recipe, spec.model.dims, layout)
    recipe = site.recipe
    if spec.run.smooth_swiglu == "channel" and gemms[path].has_channel_scales:
      recipe = recipe.with_current_scales("w")  # of smooth_swiglu.channel_scales
    notes = set()
    if quantized is False and site.recipe.fwd.is_quantized:
      notes.add(
        "FP8 weight gathers: a shard of some weights holds no whole scale tile, or rotated block, "
        "so that the float32 master is gathered; choose mesh.fsdp so that every one stays whole"
      )
    for which in PASSES:
      problem = choose.GemmProblem(*size.of(which), getattr(site.recipe, which), spec.device)
      notes.update(choose.gemm(problem, spec.kernels.matmul).notes)
    rows.append({
      "site": name, "layers": len(site.layer_names), "m_n_k": list(size.of("fwd")),
      "recipe": recipe.name, "definition": recipe.to_dict(),
      "backends": dict(zip(PASSES, site.backends)), "weight_gather": _GATHERS[quantized],
      "notes": sorted(notes),
    })  # fmt: skip
  return rows


def all_site_rows(spec: TrainSpec) -> list[dict[str, Any]]:
  """`site_rows` of every phase of the precision schedule, with the step from which each holds."""
  return [
    {"from_step": start.start, **row}
    for phase, start in enumerate(spec.precision.phases)
    for row in site_rows(spec, phase)
  ]


def _backends(spec: TrainSpec) -> str:
  """The backend that updates the matrices, and why the kernel does not."""
  wanted, large, passed = spec.kernels.optimizer, 0, collections.defaultdict(list)
  if wanted == "xla" or (wanted == "auto" and spec.device.platform != "gpu"):
    return "all updated by xla"
  for path, leaf in params_lib.flatten(spec.leaves).items():
    large += leaf.is_large
    if leaf.note:
      passed[leaf.note].append(path)
  updated = large - sum(map(len, passed.values()))
  if not updated:
    return f"all updated by xla ({'; '.join(passed)})" if passed else "all updated by xla"
  by_xla = [f"; by xla {', '.join(paths)} ({note})" for note, paths in passed.items()]
  return f"{updated} of {large} matrices updated by mosaic_sm90{''.join(by_xla)}"


def _optimizer(spec: TrainSpec) -> str:
  """The optimizer, the formats of its state, and the parameters that have other formats."""
  o, nbytes = spec.optim, spec.optim.bytes_per_parameter()
  weight = f"{nbytes['weight']:.3g} B of BF16 weights and " if nbytes["weight"] else ""
  words = (
    f"masters {o.master_format} ({weight}{nbytes['master']:.3g} B)",
    f"gradients {o.grad_format} "
    + ("of one layer at a time" if o.in_backward else f"({nbytes['gradient']:.3g} B)")
    + _wire(spec),
    f"moments {o.moment_format} ({nbytes['moments']:.3g} B)",
  )
  declared, dims = params_lib.flatten(spec.declaration), spec.model.dims
  counts = {k: params_lib.count({k: p}, dims) for k, p in declared.items()}
  spared = sum(counts[k] for k, p in declared.items() if not p.decay and p.trainable)
  frozen = sum(counts[k] for k, p in declared.items() if not p.trainable)
  adapters, lora = "no adapters", spec.model.lora
  if lora is not None:
    stored = {"block_fp8": "E4M3 codes per 128x128", "bf16": "BF16", "float32": "float32"}
    stored = stored.get(lora.base) or f"codes of {storage.FROZEN[lora.base]}"
    at = ", ".join(lora.targets)
    adapters = f"linear layers as {stored}, adapters of rank {lora.rank} at {at}"
  return (
    f"{o.optimizer}: {', '.join(words)} per parameter, {sum(nbytes.values()):.3g} B in all; "
    f"norms and biases ({spared:,} parameters) keep float32; {_backends(spec)}"
    + (f"; {frozen:,} parameters frozen, {adapters}" if frozen else "")
  )


def _wire(spec: TrainSpec) -> str:
  """The format of gradients between devices, where it is not float32's."""
  layout, wire = spec.run.layout, spec.optim.grad_wire
  if wire == "float32":
    return ""
  sends = layout.mesh is not None and layout.size(layout.act_axes("B")) > 1
  return f", {wire} between devices" if sends else f", none of them sent in {wire}: one batch shard"


def weights_line(spec: TrainSpec, phase: int = 0) -> str:
  """Which weights a step quantizes once, what that takes, and which their products quantize."""
  account = quantized_once.account(spec, phase)
  others = collections.defaultdict(list)
  for name, why in account.by_product.items():
    others[why].append(name)
  left = [f"; by product {', '.join(names)} ({why})" for why, names in others.items()]
  return (
    f"weights of {len(account.names)} sites quantized once per step, {account.nbytes / 2**30:.3g} "
    f"GiB of operands per device{''.join(left)}"
  )


def _fp8_backends(spec: TrainSpec) -> set[str]:
  """Backends of the FP8 products of every phase."""
  trees = [spec.sites(phase=phase) for phase in range(len(spec.precision.phases))]
  sites = [site for tree in trees for site in site_lib.flatten(tree).values()]
  return {
    b for s in sites for p, b in zip(PASSES, s.backends) if getattr(s.recipe, p).multiplies_codes
  }


def device_line(spec: TrainSpec, devices: Sequence[Any] | None = None) -> str:
  """Which devices of the machine the run computes on, and what they multiply FP8 with.

  Args:
    devices: the machine's; default: all that JAX has.
  """
  devices = jax.devices() if devices is None else devices
  count, total, used = spec.num_devices, len(devices), _fp8_backends(spec)
  number = "" if total == 1 else f"{count} × " if count == total else f"{count} of {total} × "
  if spec.device.platform == "cpu":
    sums = "sums of 14 bits, slow" if "emulated_sm90" in used else "exact and slow"
    line = f"{number}CPU" + f": FP8 is emulated, {sums}" * bool(used)
  else:
    number = number or "1 × "
    kind = f"{number}{devices[0].device_kind} ({choose.name_of(spec.device)})"
    line = f"{kind}: FP8 products by {', '.join(sorted(used))}" if used else f"{kind}: no FP8"
    line += " (emulated, slow)" * bool(used & {*gemm_api.EMULATED})
  if count < total:
    line += f"; mesh.data, mesh.fsdp and mesh.tensor are 1, the other {total - count} are idle"
  return line


def print_start(
  out: rich.console.Console, spec: TrainSpec, changes: dict[str, Any], fingerprint: str,
  sites: list[dict[str, Any]],
):  # fmt: skip
  """The spec of a run: the difference from base, the model, the sites (all_site_rows')."""
  out.print(device_line(spec))
  note = choose.caution(spec.device)
  if note and _fp8_backends(spec) - {*gemm_api.EMULATED}:  # it is about the hardware's products
    out.print(f"  {note}")
  if spec.device.platform == "gpu" and "mosaic_sm90" in _fp8_backends(spec):
    for note in tile_config.notes():
      out.print(f"  {note}")
  if reason := choose.lacks_dtype(spec.device, "bfloat16"):
    out.print(f"  {reason}: compute is {spec.run.dtype.name}, attention {spec.run.attention}")
  if changes:
    rows = [[k, str(old), str(new)] for k, (old, new) in changes.items()]
    title = "config, where it differs from base"
    out.print(console_lib.table(title, ["key", "base", "here"], rows))
  count = params_lib.count(spec.declaration, spec.model.dims)
  mesh = spec.run.layout.mesh
  shape = (
    " x ".join(f"{a}={n}" for a, n in mesh.shape.items()) if mesh is not None else "one device"
  )
  recipe = spec.run.attention_recipe
  attention = f"{recipe} (emulated)" if recipe else spec.run.attention
  out.print(
    f"model {spec.model.architecture}, {count:,} parameters; compute {spec.run.dtype.name}, "
    f"attention {attention}, remat {spec.run.remat}; {shape}; data {fingerprint}"
  )
  if isinstance(spec.attention, choose.Choice):
    for note in spec.attention.notes:
      out.print(f"  attention: {note}")
  out.print(_optimizer(spec))
  for number, phase in enumerate(spec.precision.phases):
    here = [row for row in sites if row["from_step"] == phase.start]
    if quantized_once.is_on(spec):
      out.print(weights_line(spec, number))
    _print_sites(out, here, phase.start, spec.device.platform)


def _print_sites(out: rich.console.Console, sites: list[dict[str, Any]], start: int, platform: str):
  rows, notes = [], []
  has_gathers = any(row["weight_gather"] != "-" for row in sites)
  for row in sites:
    used = list(dict.fromkeys(row["backends"].values()))
    rows.append([
      row["site"] + (f" (x{row['layers']})" if row["layers"] > 1 else ""),
      "x".join(map(str, row["m_n_k"])), row["recipe"], scales(row["definition"]),
      *([] if platform == "cpu" else [accumulation(row["definition"])]), "/".join(used),
      *([row["weight_gather"]] if has_gathers else []),
    ])  # fmt: skip
    notes += [n for n in row["notes"] if n not in notes]
  columns = ["site", "MxNxK per device", "recipe", "scales: x, w, gradient"]
  columns += ["backend"] if platform == "cpu" else ["accumulation", "backend"]
  columns += ["weight gather"] if has_gathers else []
  title = f"sites from step {start}" if start else "sites"
  out.print(console_lib.table(title, columns, rows))
  by = {b for row in sites if row["definition"]["fwd"]["lhs"] for b in row["backends"].values()}
  if platform == "cpu" and by and not by & {"emulated_sm90", "exact"}:
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
  if operands[1] is None:
    return "-"
  return ", ".join(map(one, operands)) + f" ({(operands[0] or operands[1])['scale']})"


def accumulation(definition: dict[str, Any]) -> str:
  """How FP8 products accumulate in fwd/dgrad/wgrad: "fast/precise/precise", "every 128"."""
  gemms = [definition[p] for p in PASSES]
  hows = [gemm["accumulate"] if gemm["lhs"] else "-" for gemm in gemms]
  words = [f"every {how}" if isinstance(how, int) else how for how in hows]
  return "/".join(words if len(set(words)) > 1 else words[:1])


def print_chats(out: rich.console.Console, spec: TrainSpec, per_step: int):
  """The samples of a run on conversations; stops it if they do not fit its windows.

  Args:
    per_step: samples of an optimizer step.

  Raises:
    UserError: a step needs more windows than global_batch.
  """
  steps = loader.chat_steps(spec.data, spec.global_batch)
  needed, count = steps.needed(spec.steps), len(steps.samples)
  steps.check(needed)
  positions, trained = int(steps.samples.lengths.sum()), int(steps.samples.trained.sum())
  out.print(
    f"{count:,} samples of {positions:,} tokens, {trained:,} of them trained; {spec.steps:,} steps "
    f"of {per_step} samples, {spec.steps * per_step / count:.2f} epochs; the fullest step needs "
    f"{needed} of {spec.global_batch} windows"
  )
  index = loader.chat_index(spec.data)
  for what, number in sorted(index.counts.items()):
    out.print(f"samples {what}: {number:,}")
  origin = spec.data.chat.template.origin if spec.data.chat else ""
  for line in filter(None, (origin, index.ends(spec.data.tokenizer)[1])):
    out.print(line)


def describe(
  spec: TrainSpec, workdir: str, start: int, changes: dict[str, Any], fingerprint: str,
  site_rows: list[dict[str, Any]], **more: Any,
):  # fmt: skip
  """Writes config.json, sites.json and provenance.json, once nothing can refuse the run any more.

  An earlier end of the run is removed before.

  Args:
    start: the step that it goes on from.
    changes: identity.diff of its configuration and configs/base.py's.
    more: for provenance.json.
  """
  workdir_lib.reopen(workdir)
  flat, changed = dict(spec.flat), {k: new for k, (_, new) in changes.items()}
  provenance = provenance_lib.provenance(flat, fingerprint, spec.seed, spec.num_devices)
  provenance |= provenance_lib.history(workdir, start, flat) | more
  for name, value in (
    ("config.json", {"resolved": flat, "changed": changed}),
    ("sites.json", site_rows),
    ("provenance.json", provenance),
  ):
    provenance_lib.write_json(workdir, name, value)
