"""Calibration: the ranges of every tensor of every site, as a table people can read and edit.

The table is a JSON of rows, one per layer's site and tensor, each with where it comes from. Static
and delayed recipes start from the `amax` of their rows; what else a row holds is for the reader.
"""

import functools
import itertools
import os
from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import axes, records
from fp8jax.errors import UserError
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.quantization import amax_history, clipping, tensor_stats
from fp8jax.quantization.quantize import given_scale
from fp8jax.quantization.tensor_stats import LOUD
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import CURRENT, Static
from fp8jax.run import nonfinite, provenance, schemas
from fp8jax.run.settings import Calibrate
from fp8jax.step import distillation
from fp8jax.step.train_spec import TrainSpec

FORMAT = "fp8jax calibration 1"


def run(
  spec: TrainSpec, params, batches, *, step: int, fingerprint: str, phase: int = 0, teacher=None
) -> dict[str, Any]:
  """Watches forward and backward passes and returns the table.

  A tensor that starts from the table in any phase has its row by the recipe of the first such
  phase, the watched one before all others.

  Args:
    batches: placed batches; ranges are those of all of them together.
    phase: of the precision schedule, whose passes are watched.
    teacher: of step/distillation.py.

  Raises:
    UserError: calibrate.method is not "amax" and no scale is delayed or static.
  """
  phases = sorted(range(len(spec.precision.phases)), key=lambda one: (one != phase, one))
  recipes = [site_tree.recipes_of(spec.sites(phase=one)) for one in phases]
  method = spec.of(Calibrate).method
  if method != "amax" and not any(r.is_stateful for one in recipes for r in one.values()):
    raise UserError(
      f"calibrate.method={method!r} chooses where delayed or static scales start, and every scale "
      "of this configuration is current; set calibrate.method='amax', or take a recipe with such "
      "scales"
    )
  width = tensor_stats.LOUD if method == "amax" else tensor_stats.COUNTED
  total, count = {}, 0
  for _, stats, _ in nonfinite.stats_of_steps(spec, params, batches, phase, width, teacher):
    for name, values in stats.items():
      total[name] = tensor_stats.combine(total[name], values) if name in total else values
    count += 1
  rows = []
  total = {name: values for name, values in total.items() if name in recipes[0]}  # not activations
  for name, values in jax.device_get(total).items():
    for tensor, statistics in zip(amax_history.TENSORS, values, strict=True):
      starting = (one[name] for one in recipes if _starts(one[name], tensor))
      recipe = next(starting, recipes[0][name])
      rows.append(
        {"site": name, "tensor": tensor, "step": step, "data": fingerprint}
        | _of_tensor(recipe, tensor, statistics, spec.of(Calibrate), recipe == recipes[0][name])
      )
  return _table(
    spec, rows, count, step, fingerprint, distillation.loss_of(spec, distillation.identity(teacher))
  )


def _table(
  spec: TrainSpec, rows, batches: int, step: int, fingerprint: str, loss: str
) -> dict[str, Any]:
  """Rows, with what their ranges depend on."""
  return {
    "format": FORMAT, "batches": batches, "step": step, "data": fingerprint, "loss": loss,
    "tokens": spec.tokens_per_step, "smooth_swiglu": spec.run.smooth_swiglu, "rows": rows,
  }  # fmt: skip


def _starts(recipe: Recipe, tensor: str) -> bool:
  """Whether a scale of this tensor starts from a table."""
  uses = recipe.uses()[tensor]
  return bool(uses) and uses[0].source != CURRENT


def _of_tensor(
  recipe: Recipe, tensor: str, statistics, c: Calibrate, is_watched: bool
) -> dict[str, Any]:
  """A row's numbers; what quantization costs only of the recipe that was watched."""
  summary, counts = tensor_stats.summary(statistics[:LOUD]), statistics[LOUD:]
  uses = recipe.uses()[tensor]
  row: dict[str, Any] = {"recipe": recipe.name, "amax": summary["amax"], "rms": summary["rms"]}
  if _starts(recipe, tensor):
    if c.method != "amax":
      chosen = clipping.amax_of(c.method, c.percentile, counts, uses[0], summary["amax"])
      row |= {"amax": chosen, "largest": summary["amax"], "method": c.method}
    row["scale"] = float(given_scale(jnp.float32(row["amax"]), uses[0])[0, 0])
  if uses and is_watched:
    row |= {k: summary[k] for k in ("underflow", "saturation", "snr_db")}
  return row


def of_states(
  spec: TrainSpec, sites, scaling_states, *, step: int, fingerprint: str, loss: str
) -> dict[str, Any]:
  """The table of the known scales of a state, which `load` brings back to the bit.

  A delayed scale begins with it as with a calibration: of its amax history the largest alone.

  Args:
    scaling_states: {site name: ScalingState} of `sites`.
    loss: of which gradients are, in words.
  """
  rows, named = [], site_lib.flatten(sites)
  for name, state in jax.device_get(dict(scaling_states)).items():
    site = named[name]
    for i, tensor in enumerate(amax_history.TENSORS):
      uses = site.recipe.uses()[tensor]
      if not uses or uses[0].source == CURRENT:
        continue
      amaxes = np.atleast_1d(state.amax_3[..., i])
      scales = jax.vmap(functools.partial(given_scale, quant=uses[0]))(amaxes).ravel()
      of_layers = zip(site.layer_names, amaxes, jax.device_get(scales), strict=True)
      rows += [
        {"site": layer, "tensor": tensor, "step": step, "data": fingerprint,
         "recipe": site.recipe.name, "amax": float(amax), "scale": float(scale)}
        for layer, amax, scale in of_layers if np.isfinite(amax)
      ]  # fmt: skip
  return _table(spec, rows, 0, step, fingerprint, loss)


def keep_refresh(workdir: str, step: int, before, after) -> dict[str, str]:
  """Writes the tables before and after a refresh into WORKDIR/refresh; their paths there.

  A run that takes these steps again writes the same files. A run that takes other steps writes
  others, so that a table that precision.calibration names keeps its content.
  """
  os.makedirs(os.path.join(workdir, "refresh"), exist_ok=True)
  for number in itertools.count(1):
    stem = f"refresh/step_{step}" + f"_{number}" * (number > 1)
    names = {"before": f"{stem}_before.json", "after": f"{stem}_after.json"}
    tables = {names["before"]: before, names["after"]: after}
    if all(_has(os.path.join(workdir, name), table) for name, table in tables.items()):
      break
  for name, table in tables.items():
    provenance.write_json(workdir, name, table)
  return names


def _has(path: str, table: Mapping[str, Any]) -> bool:
  """Whether a file has this content, or is not there."""
  if not os.path.exists(path):
    return True
  with open(path, "rb") as f:  # a damaged one is another, too
    return f.read() == f"{records.to_json(table)}\n".encode()


def read(
  path: str, names: Container[str] | None = None, tokens: int = 0, smooth_swiglu: str = "",
  loss: str = "",
) -> dict[tuple[str, str], float]:  # fmt: skip
  """{(layer's site, tensor): amax} of a table.

  Args:
    names: of the model's sites, one per layer; None does not compare them.
    tokens: of a step, where static scales of gradients start from the table: they are of the mean
      loss over a step's tokens. 0 does not compare them.
    smooth_swiglu: in which its ranges are needed; "" does not compare it.
    loss: of which gradients are needed, in words; "" does not compare it. The rows of gradients of
      another are left out. A table that states no data was written by hand.

  Raises:
    UserError: not such a table, an amax that is no float32 number >= 0, rows that contradict
      each other, a row of another model, or ranges of another step; names the row or the key.
  """
  remedy = "write a table with --job=calibrate, as precision.calibration and export.input_scales"
  table = records.read(path, schemas.Calibration, f"{remedy} take one")
  if table["format"] != FORMAT:
    raise UserError(f"{path} has the format {table['format']!r}, expected {FORMAT!r}; {remedy}")
  made = table.get("loss", loss)
  if "loss" not in table and "data" in table:  # older: of text, but for scales that a run had
    made = distillation.CROSS_ENTROPY if table.get("batches") else ""
  is_other = bool(loss) and made != loss
  tokens = 0 if is_other else tokens
  for key, wanted in (("tokens", tokens), ("smooth_swiglu", smooth_swiglu)):
    if wanted and table.get(key, wanted) != wanted:
      meaning = {"tokens": "tokens a step (global_batch * seq_len), over which losses are means",
                 "smooth_swiglu": "as precision.smooth_swiglu, which divides an input"}  # fmt: skip
      raise UserError(
        f"{path} was made with {table[key]!r} {meaning[key]}; expected {wanted!r} here, where its "
        "ranges are others; calibrate again with that"
      )
  amaxes: dict[tuple[str, str], float] = {}
  for i, row in enumerate(table["rows"]):
    amax, where = row["amax"], f"{path}, row {i}"
    if not 0 <= amax <= float(np.finfo(np.float32).max):
      raise UserError(f"{where}: amax={amax!r} is no float32 number >= 0")
    if row["tensor"] not in amax_history.TENSORS:
      raise UserError(f"{where}: tensor {row['tensor']!r} is none of x, w and g")
    key = row["site"], row["tensor"]
    if names is not None and key[0] not in names:
      raise UserError(
        f"{where}: this model has no site {key[0]!r}; calibrate this model with --job=calibrate, "
        "or remove the row"
      )
    if amaxes.setdefault(key, float(amax)) != amax:
      raise UserError(
        f"{where}: amax={amax!r} of {key[0]}, tensor {key[1]}, which an earlier row gives as "
        f"{amaxes[key]!r}; leave one of them"
      )
  return {key: amax for key, amax in amaxes.items() if not (is_other and key[1] == "g")}


def load(spec: TrainSpec, path: str, loss: str = "") -> dict[tuple[str, str], float]:
  """`read` of a table that has all rows that the phases of the precision schedule need.

  Args:
    loss: of which the gradients are that are quantized by it; "" for an evaluation, which has none,
      and other steps.

  Raises:
    UserError: see `read` and `scaling_states_of`; a table that no site of any phase starts from.
  """
  phases = range(len(spec.precision.phases))
  of_g = {s for p in phases for r in site_tree.recipes_of(spec.sites(phase=p)).values()
          for s in (amax_history.sources(r)[amax_history.TENSORS.index("g")],)}  # fmt: skip
  is_compared = bool(loss) and any(isinstance(s, Static) for s in of_g)
  tokens = spec.tokens_per_step if is_compared else 0
  amaxes = read(path, site_tree.recipes_of(spec.sites()), tokens, spec.run.smooth_swiglu, loss)
  states = [scaling_states_of(amaxes, spec.sites(phase=phase)) for phase in phases]
  if not any(states):
    raise UserError(
      f"precision.calibration={path!r}: every scale is current, so that nothing starts from it; "
      'take a recipe with delayed or static scales, or set precision.calibration=""'
    )
  return amaxes


def scaling_states_of(
  amaxes: Mapping[tuple[str, str], float], sites, layout: axes.Layout = axes.LOCAL
) -> dict[str, amax_history.ScalingState]:
  """The scaling states that sites with delayed or static scales start from, however policies have
  split them.

  Args:
    amaxes: of `read`.
    layout: every device of its mesh holds them.

  Returns:
    {site: ScalingState}; amaxes of gradients are NaN, to be taken from a batch, where a table has
    none of them.

  Raises:
    UserError: a tensor of a site that the table does not know and a scale is to come from.
  """
  result, has_g = {}, any(tensor == "g" for _, tensor in amaxes)
  for name, site in site_lib.flatten(sites).items():
    if site.scaling_state is None:
      continue
    of_tensors = zip(amax_history.TENSORS, amax_history.sources(site.recipe))
    needed = [t for t, s in of_tensors if s not in (None, CURRENT)]
    unknown = {"g": np.nan} if "g" in needed and not has_g else {}
    needed = needed if has_g else [t for t in needed if t != "g"]
    missing = [(n, t) for n in site.layer_names for t in needed if (n, t) not in amaxes]
    if missing:
      raise UserError(
        f"precision.calibration has no row for site {missing[0][0]}, tensor {missing[0][1]}; "
        "calibrate this model again with --job=calibrate, or add the row"
      )
    table = np.asarray(
      [
        [amaxes.get((n, t), unknown.get(t, 0.0)) for t in amax_history.TENSORS]
        for n in site.layer_names
      ],
      np.float32,
    )
    result[name] = amax_history.calibrated(site.recipe, table if site.layers else table[0])
  # A step does not move its state between devices; processes place what they have on the host.
  return jax.device_put(jax.device_get(result), place) if (place := layout.everywhere) else result
