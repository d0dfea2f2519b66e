"""Training from a quantized folder: weights that its recipe rounds to the folder's codes."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.errors import UserError
from fp8jax.export.fp8 import fused_with, site_of
from fp8jax.formats import E4M3, E4M3_240
from fp8jax.models import transformer
from fp8jax.models.hf import names, schemes
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.ops import site_tree
from fp8jax.optim import sparsity, storage
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.quantization.start_values import first_level_amax, start_values
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import CURRENT, WHOLE, Delayed, Quant, Scale, Static
from fp8jax.recipe.served import SERVED
from fp8jax.step.train_spec import TrainSpec

_start_values = jax.jit(start_values, static_argnames="quant")


class StartCodes:
  """Values of a folder's quantized matrices (hf_tensors.Values) for the first step's recipes.

  Matrices that a recipe leaves in the compute dtype are the codes' values, and so are all with
  init.requantize whose recipe has no such codes.

  Of two levels the first step has the folder's first one, too, where the recipe makes it as servers
  do (ops/joint.py): the largest matrix of a fused group gets the amax that it comes from.
  """

  def __init__(self, spec: TrainSpec):
    recipes = site_tree.recipes_of(spec.sites(phase=0))
    entries = [e for e in names.entries(spec.model) if e.layer is not None and e.inputs is not None]
    self._recipes = {e.name: recipes[site_of(e)] for e in entries}
    self._paths = {e.name: e.path.removeprefix("layers/") for e in entries}
    self._source, self._may_round = spec.init.hf, spec.init.requantize
    self._found: dict[str, list[tuple[float, float]]] = {}
    self._groups: dict[tuple[str, ...], tuple[set[float | None], dict[str, np.float32]]] = {}
    self._rounded, self._spec = 0, spec
    self._scaled = {
      f"{mixer.key}/{site.name}"
      for mixer in transformer.mixers(spec.model)
      for site in mixer.sites
      if site.has_channel_scales and spec.run.smooth_swiglu == "channel"
    }

  def __call__(self, name: str, codes: schemes.Codes, scheme: schemes.Scheme) -> np.ndarray:
    """float32 [out, in].

    Raises:
      UserError: the recipe has other codes; names the recipes that have these.
    """
    recipe, values = self._recipes[name], schemes.dequantize(codes, scheme.tile)
    if change := self._change(name, values, recipe):
      if not self._may_round:
        raise UserError(
          f"init.hf={self._source!r}: {name} is in codes, and {change}, or init.requantize=True to "
          "have other codes at the first step"
        )
      self._rounded += 1
      return values
    if recipe.fwd.rhs is None:
      return values
    quant = dataclasses.replace(recipe.fwd.rhs, source=CURRENT)
    matrix = _in_tiles(
      ScaledMatrix(jnp.asarray(codes.data), jnp.asarray(codes.scale), scheme.tile), quant
    )
    try:
      if not _holds(quant, scheme.weight, codes.data):
        raise ValueError
      made = _start_values(matrix, quant, *self._first_level(name, codes, quant))
    except ValueError as e:
      if not self._may_round:
        raise UserError(self._refusal(name, scheme, recipe)) from e
      self._rounded += 1
      return values
    row = float(made.differing), float(made.error)
    self._found.setdefault(self._paths[name], []).append(row)
    return np.asarray(made.weights)

  def _change(self, name: str, values: np.ndarray, recipe: Recipe) -> str:
    """The setting that makes other codes of the values before their product, with the fix; ""."""
    spec, q, o = self._spec, recipe.fwd.rhs, self._spec.optim
    lora = spec.model.lora
    frozen = storage.FROZEN[lora.base] if lora else None
    served = "precision.rules to a recipe of a server"
    if q is None:
      rows: tuple = (
        (storage.is_in_codes(frozen),
         f"model.lora.base={lora and lora.base!r} rounds them a second time",
         "model.lora.base='float32'"),
      )  # fmt: skip
    else:
      is_given = isinstance(q.source, Delayed | Static) and (q.source.margin or spec.calibration)
      is_pruned = o.sparsity == sparsity.TWO_OF_FOUR and (
        sparsity.kept(values, values, 1) != values
      )
      rows = (
        (frozen is not None, f"model.lora.base={lora and lora.base!r} rounds their values",
         "model.lora.base='float32'"),
        (lora is None and storage.MASTERS[o.master_format] is not None,
         f"optim.master_format={o.master_format!r} rounds their values",
         "optim.master_format='float32'"),
        (spec.init.nudge, "init.nudge=True moves their values", "init.nudge=False"),
        (spec.init.untie, "init.untie=True moves their values", "init.untie=False"),
        (self._paths[name] in self._scaled,
         "precision.smooth_swiglu='channel' multiplies its channels before it is rounded",
         "precision.smooth_swiglu='none' (or 'token', which leaves weights as they are)"),
        (np.any(is_pruned), "optim.sparsity='2:4' prunes some of them", "optim.sparsity='none'"),
        (recipe.fwd.rotate_rows[1] or q.transform, f"recipe {recipe.name!r} rotates them", served),
        (q.scale is Scale.ONE, f"recipe {recipe.name!r} has no scales", served),
        (is_given, f"recipe {recipe.name!r} has {q.source} and not the scales of the weights",
         "precision.calibration='' and a margin of 0, or a recipe with current scales"),
        (q.is_joint and len(self._group(name)[0]) > 1,
         "the matrices that are fused with it have other first-level scales, or none",
         "init.hf to a folder that servers fuse"),
      )  # fmt: skip
    return next((f"{why}; set {fix}" for is_so, why, fix in rows if is_so), "")

  def _first_level(self, name: str, codes: schemes.Codes, quant: Quant):
    """(amax of the first of two levels, whether this matrix has it); () of one level."""
    if quant.scale is not Scale.E4M3_OVER_F32 or codes.tensor_scale is None:
      return ()
    _, largest = self._group(name)
    amax, most = first_level_amax(codes.tensor_scale, quant), max(largest.values())
    # Far above, an outlier would be worse than E4M3 scales that are rounded again; below lie codes
    # of another rule, four over six or not.
    amax = amax if most * (1 - 2.0**-20) <= amax <= 2 * most else most
    return amax, name == max(largest, key=lambda m: largest[m])

  def _group(self, name: str) -> tuple[set[float | None], dict[str, np.float32]]:
    """(first-level scales, {name: largest magnitude}) of the matrices whose first level is one."""
    joint = {n for n, r in self._recipes.items() if r.fwd.rhs and r.fwd.rhs.is_joint}
    members = tuple(n for n in fused_with(name) if n in joint) if name in joint else (name,)
    if members not in self._groups:
      folder, scales, largest = hf_tensors.Folder(self._source), set(), {}
      for n in members:  # one at a time
        if (scheme := folder.scheme(n)) is None:
          scales.add(None)
          continue
        codes = folder.read_codes(n)
        scales.add(codes.tensor_scale)
        largest[n] = np.abs(schemes.dequantize(codes, scheme.tile)).max()
      self._groups[members] = scales, largest
    return self._groups[members]

  def _refusal(self, name: str, scheme: schemes.Scheme, recipe: Recipe) -> str:
    have = dataclasses.replace(scheme.weight, tile=scheme.tile)
    fitting = [
      n for n, r in SERVED.items()
      if r.fwd.rhs and (r.fwd.rhs.tile, r.fwd.rhs.format) == (have.tile, have.format)
    ]  # fmt: skip
    take = f"one of {', '.join(fitting)}" if fitting else "'bf16'"
    return (
      f"init.hf={self._source!r}: {name} is in codes of {have}, and recipe {recipe.name!r} would "
      f"round them a second time, to {recipe.fwd.rhs}; train with {take}, start from the "
      "unquantized folder, or set init.requantize=True"
    )

  def lines(self) -> Iterator[str]:
    """Lines for the console: a kind of matrix each."""
    for path, rows in self._found.items():
      share, error = np.mean(rows, axis=0)
      tail = f"{share:.3%} of the codes differ, relative error {error:.3g}"
      yield f"starts from codes of {self._source}: {path}: " + (tail if share else "all kept")
    if self._rounded:
      yield f"{self._rounded} matrices of {self._source} are rounded a second time"


def _holds(quant: Quant, stored: Quant, data: np.ndarray) -> bool:
  """Whether codes of a folder are codes of a recipe; E4M3-240's lie in folders as E4M3's."""
  if quant.format == E4M3_240 and stored.format == E4M3:
    return bool(np.abs(data.astype(np.float32)).max() <= E4M3_240.max)
  return quant.format == stored.format


def _in_tiles(matrix: ScaledMatrix, quant: Quant) -> ScaledMatrix:
  """The matrix with the recipe's tiles, where a folder repeats their scales for every row."""
  rows, tile = quant.tile[0], matrix.tile
  if tile[0] != 1 or tile[1] != quant.tile[1] or rows in (1, WHOLE) or matrix.shape[0] % rows:
    return matrix
  scale = np.asarray(matrix.scale).reshape(-1, rows, matrix.scale.shape[1])
  is_shared = bool((scale == scale[:, :1]).all())
  return ScaledMatrix(matrix.data, jnp.asarray(scale[:, 0]), quant.tile) if is_shared else matrix
