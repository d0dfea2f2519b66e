"""The quantized matrices of an export: which there are, their codes and their scales.

A matrix that training multiplied in codes keeps those of the forward GEMM, to the bit, and one that
is read in codes keeps codes and scales. In a model without either every matrix that the format can
hold is quantized. Embeddings, head and norms stay unquantized, and so does a matrix with partial
tiles, whose scales transformers would spread over other rows without a word. Servers fuse q, k and
v, and gate and up: these are quantized alike or not at all, and share a scale of the tensor.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import params
from fp8jax.errors import UserError
from fp8jax.export import refusals, served
from fp8jax.models.hf import scheme_config, schemes
from fp8jax.models.hf.names import Entry
from fp8jax.models.hf.schemes import COMPRESSED, FINE_GRAINED, MODELOPT, Codes, Scheme
from fp8jax.models.hf.weights import Folder
from fp8jax.quantization import quantize
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import CURRENT, WHOLE, Quant, Scale, Static

METHODS = {"hf-fp8-block": FINE_GRAINED, "compressed-tensors": COMPRESSED, "modelopt": MODELOPT}
# Projections that servers multiply as one.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclasses.dataclass(frozen=True)
class Stored:
  """A matrix whose codes are there already: of a folder, of --job=quantize, or a frozen base.

  Attributes:
    quant: of the matrix [out, in].
    read: gives [codes [out, in], scales in any shape], scales of any float dtype.
    input_scale: of its activations, or None.
    tensor_scale: of two levels, the float32 factor that all its scales have.
    scheme: that it is stored in; None where the recipe says it.
  """

  quant: Quant
  read: Callable[[], tuple[np.ndarray, np.ndarray]]
  input_scale: float | None = None
  tensor_scale: float | None = None
  scheme: Scheme | None = None


StoredByName = Mapping[str, Stored | None]


@dataclasses.dataclass(frozen=True)
class Matrix:
  """One quantized matrix of an export.

  Attributes:
    scheme: its weight is how the matrix is quantized.
    is_trained: whether its codes are those of the training GEMM, or those that are stored.
    amax: that the scale is made from where the quant's source is not CURRENT.
    shared: names of the weights whose common amax the scale is made from; () for its own.
    input_scale: of its activations, or None.
    inputs: by which a recipe makes that scale from an amax; None: the scheme's.
    stored: where its codes are; None: they are made from the weight.
    known: {"w" or "x": amax} that training, or else a calibration, saw.
  """

  scheme: Scheme
  is_trained: bool
  amax: float | None = None
  shared: tuple[str, ...] = ()
  input_scale: float | None = None
  inputs: Quant | None = None
  stored: Stored | None = None
  known: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

  @property
  def quant(self) -> Quant:
    return self.scheme.weight


@dataclasses.dataclass(frozen=True)
class Plan:
  """An export's quantized matrices.

  Attributes:
    matrices: by the weight's name.
    unquantized: {name of a linear layer's weight that is not quantized: the reason}.
    share: of the parameters that are quantized.
    scale_fmt: of the FP8 blocks, see Scheme.
    kv_scales: {name of a tensor: scale of keys or values}.
  """

  matrices: Mapping[str, Matrix]
  unquantized: Mapping[str, str]
  share: float
  scale_fmt: str = "float32"
  kv_scales: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

  @property
  def labels(self) -> str:
    """The schemes' labels, "channel"."""
    return ", ".join(dict.fromkeys(m.scheme.label for m in self.matrices.values()))

  def to_config(self, head: str = schemes.HEAD):
    of = {name: m.scheme for name, m in self.matrices.items()}
    skipped = [name.removesuffix(".weight") for name in self.unquantized]
    return scheme_config.to_config(of, skipped, self.scale_fmt, bool(self.kv_scales), head)


def site_of(entry: Entry) -> str:
  """Name of a layer's site in rules and tables: "layers/3/mlp/up"."""
  return entry.path.replace("layers/", f"layers/{entry.layer}/", 1)


def choose(
  entries: list[Entry], dims: Mapping[str, int], recipes: Mapping[str, Recipe], scheme: Scheme,
  *, follows: bool = False, scale_fmt: str = "auto", requantize: bool = False,
  changed: Collection[str] = (), merged: Collection[str] = (), stored: StoredByName | None = None,
) -> Plan:  # fmt: skip
  """Chooses the quantized matrices of an export.

  Args:
    dims: letter -> size.
    recipes: of every layer's site.
    scheme: of all matrices; its scale_fmt is replaced.
    follows: whether it is that of the matrices alone whose recipe does not say one.
    scale_fmt: of schemes.SCALE_FMTS, or "auto": "ue8m0" where all codes of training have
      scales that are powers of two.
    requantize: whether weights that training multiplied with other codes are requantized.
    changed: paths of weights, "layers/mlp/down", that training multiplied by something else first.
    merged: paths of weights that adapters were merged into: training had no codes of them.
    stored: {weight's name: its codes, or None: 16 bits in a quantized folder}, before recipes.

  Returns:
    A plan without the amaxes that matrices take from elsewhere: see `with_amaxes`.

  Raises:
    UserError: codes would change and requantize is False, servers have no such product, or no
      matrix would be quantized; with the fix.
  """
  stored = stored or {}
  linears = [e for e in entries if e.layer is not None and e.inputs is not None]
  own = {e.name: recipes[site_of(e)].fwd.rhs for e in linears}
  own |= {name: one and one.quant for name, one in stored.items()}
  scheme = _with_scales(scheme, scale_fmt, own, stored)
  unquantized, matrices, refused = {}, {}, {}
  for e in linears:
    quant, codes, recipe = own[e.name], stored.get(e.name), recipes[site_of(e)]
    whose = "the folder" if e.name in stored else f"recipe {recipe.name!r}"
    if quant is None and any(own.values()):
      unquantized[e.name] = f"16 bits in {whose}" if e.name in stored else whose
      continue
    if codes and codes.scheme and recipe.fwd.rhs and not codes.scheme.holds(recipe.fwd.rhs):
      if not requantize:
        raise UserError(refusals.quantized_already(e.name, quant, recipe))
      quant, codes = recipe.fwd.rhs, None
    follow = follows and quant is not None
    mine, why = _followed(scheme, quant, codes, recipe) if follow and quant else (scheme, "")
    inputs = codes.input_scale if codes and mine.static_inputs else None
    lhs = recipe.fwd.lhs if follow and mine.static_inputs else None
    lhs = lhs if lhs is not None and isinstance(lhs.source, Static) else None
    if not mine.fits(e.hf_shape(dims)):
      sizes = map(refusals.by, (e.hf_shape(dims), mine.tile))
      unquantized[e.name] = " has partial tiles of ".join(sizes)
    elif quant and not why and mine.holds(quant) and e.path not in {*changed, *merged}:
      kept = dataclasses.replace(mine, weight=quant)
      matrices[e.name] = Matrix(kept, True, None, (), inputs, lhs, codes)
    else:
      matrices[e.name] = Matrix(mine, False, input_scale=inputs, inputs=lhs)
      if quant is not None and not requantize and e.path not in merged:
        refused[whose, e.path if e.path in changed else "", why] = quant
  counts = {e.name: int(np.prod(e.hf_shape(dims))) for e in entries}
  return _plan(matrices, unquantized, refused, scheme, counts)


def _plan(matrices, unquantized, refused, scheme: Scheme, counts: Mapping[str, int]) -> Plan:
  """The plan, with what servers fuse alike."""
  for name in _partners(unquantized, matrices):
    unquantized[name] = "a server multiplies it together with one that is not quantized"
    del matrices[name]
  if refused:
    texts = (refusals.other_codes(of, quant, scheme) for of, quant in refused.items())
    raise UserError("; ".join(texts))
  if not matrices:
    raise UserError(refusals.nothing(scheme, unquantized))
  matrices = {name: _shared(name, m, matrices) for name, m in matrices.items()}
  share = sum(counts[name] for name in matrices) / sum(counts.values())
  return Plan(matrices, unquantized, share, scheme.scale_fmt)


def _followed(scheme: Scheme, quant: Quant, codes: Stored | None, recipe: Recipe):
  """(the scheme of codes that are there, or else of a recipe, "") or (scheme, why it has none)."""
  of, x = codes and codes.scheme, recipe.fwd.lhs
  if of is not None:
    quant, x = of.weight, of.inputs
  try:
    made = served.scheme(quant, x, scheme.method)
  except ValueError as e:
    return scheme, str(e)
  is_whole = made.inputs is not None and made.inputs.tile[1] == WHOLE
  if scheme.static_inputs and is_whole and made.inputs:
    static = Quant(made.inputs.format, source=Static())
    made = dataclasses.replace(made, inputs=static)
  return made, ""


def with_amaxes(
  plan: Plan, entries: list[Entry], trained: Mapping[tuple[str, str], float],
  inputs: Mapping[tuple[str, str], float],
) -> Plan:  # fmt: skip
  """The plan with the amaxes that scales are made from.

  Args:
    trained: {(site, tensor): amax} of recipes with delayed or static scales.
    inputs: {(site, tensor): amax} of a calibration; static input scales come from "x".

  Raises:
    UserError: one is missing.
  """
  matrices = dict(plan.matrices)
  for e in entries:
    if e.name not in matrices:
      continue
    known = {tensor: table[site_of(e), tensor] for table in (inputs, trained) for tensor in "wx"
             if (site_of(e), tensor) in table}  # fmt: skip
    matrix = dataclasses.replace(matrices[e.name], known=known)
    if matrix.is_trained and matrix.quant.source != CURRENT and matrix.stored is None:
      amax = _amax(trained, site_of(e), "w", "the checkpoint's scaling states", "train further")
      matrix = dataclasses.replace(matrix, amax=amax)
    quant = matrix.scheme.inputs
    if quant is not None and quant.source != CURRENT and matrix.input_scale is None:
      remedy = f"set {refusals.TABLE}"
      amax = _amax(inputs, site_of(e), "x", "export.input_scales", remedy)
      scale = quantize.given_scale(jnp.float32(amax), matrix.inputs or quant)
      matrix = dataclasses.replace(matrix, input_scale=float(scale[0, 0]))
    matrices[e.name] = matrix
  return dataclasses.replace(plan, matrices=matrices)


def _with_scales(
  scheme: Scheme, scale_fmt: str, own: Mapping[str, Quant | None], stored: StoredByName
) -> Scheme:
  """The scheme with the wished scales; with static ones of inputs that a folder has of every
  matrix, where no table gives them."""
  if scheme.container == FINE_GRAINED:
    if scale_fmt == "auto":
      kept = [q for q in own.values() if q is not None]
      pow2 = schemes.fp8(FINE_GRAINED, scale_fmt="ue8m0")
      scale_fmt = "ue8m0" if kept and all(pow2.holds(q) for q in kept) else "float32"
    return schemes.fp8(FINE_GRAINED, "block", scale_fmt, scheme.weight.tile)
  codes = [one for one in stored.values() if one is not None]
  is_whole = codes and all(one.input_scale is not None for one in codes)
  if scheme.container == "float-quantized" and scheme.label != "block" and is_whole:
    return dataclasses.replace(scheme, inputs=Quant(scheme.weight.format, source=Static()))
  return scheme


def _partners(unquantized: Mapping[str, str], matrices: Mapping[str, Matrix]) -> list[str]:
  """FP8 matrices that servers fuse with an unquantized one."""
  return [name for name in matrices if any(other in unquantized for other in fused_with(name))]


def fused_with(name: str) -> tuple[str, ...]:
  """The weights that servers fuse with this one, itself included."""
  stem, _, last = name.removesuffix(".weight").rpartition(".")
  group = next((g for g in _FUSED if last in g), (last,))
  return tuple(f"{stem}.{n}.weight" for n in group)


def _shared(name: str, matrix: Matrix, matrices: Mapping[str, Matrix]) -> Matrix:
  """One scale for fused matrices: vLLM would quantize them a second time, to the largest scale, or
  read two-level scales under a wrong one.

  Raises:
    UserError: they have different schemes, or stored two-level scales of different tensors.
  """
  group = [n for n in fused_with(name) if n in matrices]
  mixed = {scheme_config.group(matrices[n].scheme) for n in group}
  if len(mixed) > 1:
    raise UserError(f"export.format: {refusals.unlike({n: matrices[n].quant for n in group})}")
  if matrix.quant.scale is Scale.E4M3_OVER_F32:
    if matrix.stored is None:
      # Else training had no common scale.
      as_one = len(group) == 1 or all(matrices[n].quant.is_joint for n in group)
      is_trained = matrix.is_trained and as_one
      return dataclasses.replace(matrix, shared=tuple(group), is_trained=is_trained)
    factors = {one.tensor_scale for n in group if (one := matrices[n].stored)}
    if len(factors) > 1 or any(matrices[n].stored is None for n in group):
      raise UserError(
        f"export.format: {', '.join(group)} have scales under different scales of their tensors, "
        "and servers read them under one; set export.requantize=True"
      )
    return matrix
  if matrix.is_trained or matrix.quant.tile != (WHOLE, WHOLE) or len(group) < len(fused_with(name)):
    return matrix
  quant = dataclasses.replace(matrix.quant, source=Static())
  scheme = dataclasses.replace(matrix.scheme, weight=quant)
  return dataclasses.replace(matrix, scheme=scheme, shared=tuple(group))


def _amax(table: Mapping[tuple[str, str], float], site: str, tensor: str, what: str, remedy: str):
  amax = table.get((site, tensor), np.nan)
  is_unseen = amax == 0 and tensor == "x"  # what a server meets has another scale than zeros
  if is_unseen or not np.isfinite(amax):
    above = " above 0" * is_unseen
    raise UserError(f"{what} has no amax{above} of tensor {tensor} of site {site}; {remedy}")
  return amax


# --- codes that are there ------------------------------------------------------------------------


def of_folder(folder: Folder, entries: list[Entry]) -> dict[str, Stored | None]:
  """The codes of a folder's linear layers, None for one in 16 bits; {} of a folder without any."""
  stored: dict[str, Stored | None] = {}
  for name in [e.name for e in entries if e.layer is not None and e.inputs is not None]:
    stored[name] = None
    if (scheme := folder.scheme(name)) is not None:
      has_inputs = scheme.static_inputs and scheme.input_name(name) in folder.files
      inputs = scheme.input_scale(folder.read, name) if has_inputs else None
      quant = dataclasses.replace(scheme.weight, tile=scheme.tile)
      read = functools.partial(_pair, folder, name)
      stored[name] = Stored(quant, read, inputs, scheme.tensor_scale(folder.read, name), scheme)
  return stored if any(stored.values()) else {}


def _pair(folder: Folder, name: str):
  codes = folder.read_codes(name)
  return codes.data, codes.scale


def of_stacks(flat: Mapping[str, Any], entries: list[Entry]) -> dict[str, Stored]:
  """The codes of the matrices that a tree {path: stacked parameter} holds as StoredMatrix."""

  def pair(codes: StoredMatrix, layer: int):
    data: Any = params.on_host(codes.data[layer])
    scale: Any = params.on_host(codes.scale[layer])
    one = StoredMatrix(data, scale, codes.inputs, codes.quant)
    return np.asarray(one.matrix().data), scale.T

  return {
    e.name: Stored(flat[e.path].quant, functools.partial(pair, flat[e.path], e.layer))
    for e in entries
    if isinstance(flat.get(e.path), StoredMatrix) and e.layer is not None
  }


# --- values --------------------------------------------------------------------------------------


def codes(w, matrix: Matrix, amax: float | None) -> Codes:
  """The codes and scales of a weight in our order.

  Args:
    w: float32 [in, out], as the training GEMM reads it; not looked at where codes are stored.
    amax: of the scale where the quant's source is not CURRENT, or of the tensor under two levels.
  """
  quant = matrix.quant
  if matrix.stored is not None:
    data, scale = matrix.stored.read()
    return Codes(data, np.asarray(scale, np.float32), matrix.stored.tensor_scale)
  w = np.asarray(w, np.float32)
  if quant.scale is Scale.E4M3_OVER_F32:
    of_tensor = np.float32(np.max(np.abs(w), initial=0.0) if amax is None else amax)
    return Codes(*jax.device_get(_quantize(w, None, of_tensor, quant)))
  given = None if quant.source == CURRENT else np.float32(amax)
  return Codes(*jax.device_get(_quantize(w, given, None, quant)))


@functools.partial(jax.jit, static_argnums=3)
def _quantize(w, amax, tensor_amax, quant: Quant):
  made = quantize.quantize(w, quant, contraction=0, amax=amax, tensor_amax=tensor_amax)
  factor = None if tensor_amax is None else quantize.tensor_scale(tensor_amax, quant)
  return made.data, made.scale, factor
