"""Where the letters of arrays live, which sizes then divide, and which scale tiles stay whole."""

import math
from collections.abc import Callable, Mapping

import jax

from fp8jax import axes, mesh
from fp8jax import params as params_lib
from fp8jax.config import precision as precision_checks
from fp8jax.config.files import Config
from fp8jax.config.needs import Needs
from fp8jax.errors import ConfigErrors
from fp8jax.models import transformer
from fp8jax.ops import site_tree
from fp8jax.optim import storage
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import WHOLE

_WORDS = {
  "V": "model.vocab_size", "D": "model.hidden_size", "F": "model.intermediate_size",
  "N": "model.num_layers", "H": "model.num_heads", "G": "model.num_kv_heads",
  "K": "model.head_dim",
}  # fmt: skip


def read(c: Config, num_devices: int, make_mesh: Callable, problems: ConfigErrors, needs: Needs):
  """Where each letter lives, or None if mesh or sharding tables are wrong."""
  if needs.is_on_one_device(c):
    count = jax.process_count()
    problems.check(
      count == 1,
      f"{count} processes: this job computes on one device, and each of them would do all of it; "
      "start one",
    )
    return axes.LOCAL
  shape = problems.attempt(lambda: mesh.resolve(c.mesh, num_devices))
  if not _check_sharding(c, problems) or shape is None:
    return None
  if math.prod(shape) == 1:
    return axes.Layout(microbatches=c.grad_accum_steps)
  tables = axes.as_rules(c.sharding.weights), axes.as_rules(c.sharding.acts)
  wire = storage.WIRES.get(c.optim.grad_wire)  # an unknown one is refused with its section
  layout = axes.Layout(
    make_mesh(shape), *tables, microbatches=c.grad_accum_steps,
    in_flight=c.mesh.collectives_in_flight, spare=c.mesh.spare_multiprocessors, wire=wire,
  )  # fmt: skip
  return layout.served() if needs.is_served(c) else layout


def _check_sharding(c: Config, problems: ConfigErrors) -> bool:
  """Whether the tables name real letters and axes, and weights can be gathered to activations."""
  before = len(problems.found)
  weights, acts = dict(axes.as_rules(c.sharding.weights)), dict(axes.as_rules(c.sharding.acts))
  for table, rules in (("weights", weights), ("acts", acts)):
    # Activations of a layer's width D stay whole: norms and the loss are computed per device.
    letters = set("BFHGV") if table == "acts" else set(_WORDS)
    for letter, names in rules.items():
      problems.check(
        letter in letters,
        f"sharding.{table}.{letter} cannot be split; the letters are {', '.join(sorted(letters))}",
      )
      for name in names:
        if name not in mesh.AXES:
          problems.found.append(
            f"sharding.{table}.{letter} names mesh axis {name!r}; there are {', '.join(mesh.AXES)}"
          )
    for axis in mesh.AXES:
      problems.extend(_twice(table, rules, axis))
  for letter in weights.keys() & acts.keys() | acts.keys() - {"B"}:
    have, need = weights.get(letter, ()), acts.get(letter, ())
    problems.check(
      have[: len(need)] == need,
      f"sharding.weights.{letter}={have} must begin with sharding.acts.{letter}={need}: a weight "
      "is gathered to where activations are, never scattered",
    )
  return len(problems.found) == before


# Letters that one array has.
_ARRAYS = {"weights": ("NDF", "NDHK", "NDGK", "VD"), "acts": ("BF", "BH", "BG", "BV")}


def _twice(table: str, rules: Mapping[str, tuple[str, ...]], axis: str) -> list[str]:
  """Letters of one array that a mesh axis would split both, or one letter twice, in words."""
  pairs = {}
  for letters in _ARRAYS[table]:
    on = [letter for letter in letters for name in rules.get(letter, ()) if name == axis]
    pairs |= {tuple(on[:2]): None} if len(on) > 1 else {}
  return [
    f"sharding.{table}.{a} names mesh axis {axis!r} twice; name it once" if a == b else
    f"sharding.{table}.{a} and sharding.{table}.{b} both name mesh axis {axis!r}, and arrays have "
    "both letters; leave it in one of them"
    for a, b in pairs
  ]  # fmt: skip


def microbatch(c: Config, layout: axes.Layout, problems: ConfigErrors, needs: Needs) -> int:
  """Sequences of one forward pass, over all devices."""
  shards = layout.size(layout.act_axes("B"))
  if min(c.grad_accum_steps, c.global_batch, c.eval.batch) < 1:
    return 1  # said already
  problems.check(
    c.global_batch % (c.grad_accum_steps * shards) == 0 or "global_batch" not in needs.batches,
    f"global_batch={c.global_batch} must be a multiple of grad_accum_steps x batch shards = "
    f"{c.grad_accum_steps} x {shards}; change grad_accum_steps, or take the nearest batch, "
    f"{_round_to(c.global_batch, c.grad_accum_steps * shards)}",
  )
  problems.check(
    c.eval.batch % shards == 0 or "eval.batch" not in needs.batches,
    f"eval.batch={c.eval.batch} must be a multiple of the {shards} batch shards of the mesh; "
    f"the nearest is {_round_to(c.eval.batch, shards)}",
  )
  return max(c.global_batch // c.grad_accum_steps, 1)


def _round_to(n: int, multiple: int) -> int:
  return max(round(n / multiple), 1) * multiple


def check(c, model, declaration, recipes, layout: axes.Layout, microbatch, problems, needs: Needs):
  """Every split dimension divides, no scale tile straddles devices, rotations divide."""
  problems.extend(precision_checks.frozen_problems(recipes, model, layout))
  sites, trains = transformer.site_params(model), "global_batch" in needs.batches
  tokens = microbatch * c.seq_len // (layout.size(layout.act_axes("B")) if trains else 1)
  rotated = tokens if trains else None
  rules = [] if needs.is_wide(c) else [phase.rules for phase in recipes.phases]
  for one in rules:
    problems.extend(find_broken_rotations(sites, model.dims, one, layout, rotated))
  if layout.mesh is None:
    return
  problems.extend(uneven(declaration, sites, model, rules, layout, tokens if trains else None))


def _remedy(letter: str, kind: str, split: Mapping[str, tuple[str, ...]]) -> str:
  whole, over = " and ".join(f"sharding.{one}.{letter}=''" for one in split), split[kind]
  return (
    f" (sharding.{kind}.{letter} = {','.join(over)}); change mesh.{over[0]}, or leave it whole by "
    f"{whole}"
  )


def uneven(
  declaration, sites, model, rules, layout: axes.Layout, tokens: int | None, remedy=_remedy
) -> list[str]:
  """Dimensions that the mesh does not divide; without any, scale tiles that it would cut.

  Args:
    declaration, sites: parameters, and those that become sites.
    rules: of every phase.
    tokens: see `find_misaligned_tiles`.
    remedy: (letter, table of `sharding` that splits it, {table: axes}) -> what to change.
  """
  used = {letter for p in params_lib.flatten(declaration).values() for letter in p.letters}
  wrong = {}
  for letter in sorted(used):
    size, tables = model.dims[letter], {"weights": layout.weight_axes, "acts": layout.act_axes}
    split = {kind: over for kind, of in tables.items() if (over := of(letter))}
    for kind, over in split.items():
      if size % (shards := layout.size(over)):
        wrong[letter, shards] = (
          f"{_WORDS[letter]} = {size} does not divide over {shards} devices"
          f"{remedy(letter, kind, split)}"
        )
  if wrong:
    return list(wrong.values())
  of_rules = (find_misaligned_tiles(sites, model.dims, one, layout, tokens) for one in rules)
  return list(dict.fromkeys(text for texts in of_rules for text in texts))


# --- scale tiles ---------------------------------------------------------------------------------


def find_misaligned_tiles(
  declaration, dims, rules, layout: axes.Layout, tokens: int | None
) -> list[str]:
  """Scale tiles of GEMM operands that would straddle devices, in words.

  Such a tile's scale would depend on the mesh. (Weights split for storage only are not meant: those
  are gathered first where their tiles straddle, see `gathers_narrow`.)

  Args:
    tokens: tokens of a GEMM on one device; None where no weight gradient is computed.
  """
  problems = []
  sites = site_tree.find_sites(declaration)
  batch_shards = layout.size(layout.act_axes("B"))

  def check(what, extent, shards, tile, fix):
    if shards > 1 and tile != WHOLE and extent // shards % tile:
      problems.append(
        f"{what}: {extent} over {shards} devices is {extent // shards} per device, no multiple of "
        f"the scale tile {tile}; {fix}"
      )

  for path, name in _distinct(sites, dims, rules):
    param, recipe = sites[path], rules_lib.recipe_by_name(name)
    contracted, produced = param.gemm_letters
    fix = f"lower mesh.tensor, or give {path} recipe 'bf16' or 'tensor_current'"
    for role, letters, tiles in (
      ("input", contracted, _tiles(recipe, contracted=True)),
      ("output", produced, _tiles(recipe, contracted=False)),
    ):
      shards = layout.size(layout.act_axes_of(letters))
      extent = math.prod(dims[x] for x in letters)
      for tile in sorted(tiles):
        check(f"{path}, {role} {letters}", extent, shards, tile, fix)
    of_wgrad = () if tokens is None else (recipe.wgrad.lhs, recipe.wgrad.rhs)
    for tile in sorted({q.tile[1] for q in of_wgrad if q}):
      fix = "make global_batch / grad_accum_steps x seq_len per device a multiple of it"
      check(
        f"{path}, tokens of its weight gradient",
        (tokens or 0) * batch_shards,
        batch_shards,
        tile,
        fix,
      )
  return problems


def find_broken_rotations(
  declaration, dims, rules, layout: axes.Layout, tokens: int | None
) -> list[str]:
  """Hadamard blocks that do not divide what they rotate, in words.

  Args:
    tokens: tokens of a GEMM on one device; None: forward products of any number of them.
  """
  problems = []
  sites = site_tree.find_sites(declaration)
  for path, name in _distinct(sites, dims, rules):
    recipe = rules_lib.recipe_by_name(name)
    widths, change = [], f"give {path} another recipe"
    for part in sites[path].gemm_letters:
      over = layout.act_axes_of(part)
      smaller = layout.smaller(over)
      extent = math.prod(dims[c] for c in part) // layout.size(over)
      widths.append((extent, f"take a smaller {smaller}, or {change}" if smaller else change))
    (k, n), m = widths, (tokens, f"change global_batch or seq_len, or {change}")
    extents = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (k, n, m)}
    for which in ("fwd",) if tokens is None else extents:
      gemm, (rows, columns, contraction) = getattr(recipe, which), extents[which]
      rotations = dict.fromkeys((
        *((quant and quant.rotation, "contracts", *contraction) for quant in (gemm.lhs, gemm.rhs)),
        (gemm.rotate_rows[0], "has rows", *rows),
        (gemm.rotate_rows[1], "gives", *columns),
      ))  # fmt: skip
      problems += [
        f"{path}, {which}: recipe {name!r} rotates blocks of {rotation.size} and the product "
        f"{verb} {extent} on a device, no multiple of it; {fix}"
        for rotation, verb, extent, fix in rotations
        if rotation and extent is not None and extent % rotation.size
      ]
  return problems


def _distinct(sites, dims, rules):
  """(path, recipe name), each once however many layers have it."""
  runs = rules_lib.segments(list(sites), dims["N"], rules)
  return dict.fromkeys((path, name) for _, _, chosen in runs for path, name in chosen.items())


def _tiles(recipe: Recipe, contracted: bool) -> set[int]:
  """Tile extents along the letters that the forward GEMM contracts, or along those it produces."""
  f, d, w = recipe.fwd, recipe.dgrad, recipe.wgrad
  if contracted:
    operands = ((f.lhs, 1), (f.rhs, 1), (d.rhs, 0), (w.lhs, 0))
  else:
    operands = ((f.rhs, 0), (d.lhs, 1), (d.rhs, 1), (w.rhs, 0))
  return {quant.tile[axis] for quant, axis in operands if quant is not None}
