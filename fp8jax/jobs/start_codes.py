"""Training from a quantized folder: weights that its recipe rounds to the folder's codes."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.errors import UserError
from fp8jax.export.fp8 import site_of
from fp8jax.formats import E4M3, E4M3_240
from fp8jax.models.hf import names, schemes
from fp8jax.ops import site_tree
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.quantization.start_values import start_values
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import CURRENT, WHOLE, Quant
from fp8jax.recipe.served import SERVED
from fp8jax.step.train_spec import TrainSpec

_start_values = jax.jit(start_values, static_argnames="quant")


class StartCodes:
  """Values of a folder's quantized matrices (hf_weights.Values) for the first step's recipes.

  Matrices that a recipe leaves in the compute dtype are the codes' values, and so are all with
  init.requantize whose recipe has no such codes.
  """

  def __init__(self, spec: TrainSpec):
    recipes = site_tree.recipes_of(spec.sites(phase=0))
    entries = [e for e in names.entries(spec.model) if e.layer is not None and e.inputs is not None]
    self._recipes = {e.name: recipes[site_of(e)] for e in entries}
    self._paths = {e.name: e.path.removeprefix("layers/") for e in entries}
    self._source, self._may_round = spec.init.hf, spec.init.requantize
    self._found: dict[str, list[tuple[float, float]]] = {}
    self._rounded = 0

  def __call__(self, name: str, codes: schemes.Codes, scheme: schemes.Scheme) -> np.ndarray:
    """float32 [out, in].

    Raises:
      UserError: the recipe has other codes; names the recipes that have these.
    """
    recipe = self._recipes[name]
    if recipe.fwd.rhs is None:
      return schemes.dequantize(codes, scheme.tile)
    quant = dataclasses.replace(recipe.fwd.rhs, source=CURRENT)
    matrix = _in_tiles(
      ScaledMatrix(jnp.asarray(codes.data), jnp.asarray(codes.scale), scheme.tile), quant
    )
    try:
      if not _holds(quant, scheme.weight, codes.data):
        raise ValueError
      made = _start_values(matrix, quant)
    except ValueError as e:
      if not self._may_round:
        raise UserError(self._refusal(name, scheme, recipe)) from e
      self._rounded += 1
      return schemes.dequantize(codes, scheme.tile)
    row = float(made.differing), float(made.error)
    self._found.setdefault(self._paths[name], []).append(row)
    return np.asarray(made.weights)

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
