"""The FP8 matrices of an export: which there are, their codes and their scales.

A matrix that training multiplied in FP8 keeps the codes of the forward GEMM, to the bit, and one
that is read in codes keeps codes and scales. In a model without either every matrix that the format
can hold is quantized. Embeddings, head and norms stay unquantized, and so does a matrix with
partial tiles, whose scales transformers would spread over other rows without a word. Servers fuse
q, k and v, and gate and up: these are FP8 together or not at all.
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
from fp8jax.formats import E4M3
from fp8jax.models.hf import fp8_formats
from fp8jax.models.hf.fp8_formats import COMPRESSED, FINE_GRAINED, Fp8Format
from fp8jax.models.hf.names import Entry
from fp8jax.models.hf.weights import Folder
from fp8jax.quantization import quantize, stored_matrix
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import CURRENT, Quant, Scale, Static

METHODS = {"hf-fp8-block": FINE_GRAINED, "compressed-tensors": COMPRESSED}
# Projections that servers multiply as one.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclasses.dataclass(frozen=True)
class Stored:
  """A matrix whose codes are there already: of a folder, or the frozen base of adapters.

  Attributes:
    quant: of the matrix [out, in].
    read: gives [codes [out, in], scales in any shape], scales of any float dtype.
    input_scale: of its activations, or None.
  """

  quant: Quant
  read: Callable[[], tuple[np.ndarray, np.ndarray]]
  input_scale: float | None = None


StoredByName = Mapping[str, Stored | None]


@dataclasses.dataclass(frozen=True)
class Matrix:
  """One FP8 matrix of an export.

  Attributes:
    quant: of the matrix [out, in].
    is_trained: whether its codes are those of the training GEMM, or those that are stored.
    amax: that the scale is made from where quant.source is not CURRENT.
    shared: names of the weights whose common amax the scale is made from; () for its own.
    input_scale: of its activations, or None.
    stored: where its codes are; None: they are made from the weight.
    known: {"w" or "x": amax} that training, or else a calibration, saw.
  """

  quant: Quant
  is_trained: bool
  amax: float | None = None
  shared: tuple[str, ...] = ()
  input_scale: float | None = None
  stored: Stored | None = None
  known: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True)
class Fp8Plan:
  """An export's FP8 format and matrices.

  Attributes:
    fp8: the format.
    matrices: by the weight's name.
    unquantized: {name of a linear layer's weight that is not FP8: the reason}.
    share: of the parameters that are FP8.
  """

  fp8: Fp8Format
  matrices: Mapping[str, Matrix]
  unquantized: Mapping[str, str]
  share: float

  def to_config(self):
    return self.fp8.to_config([name.removesuffix(".weight") for name in self.unquantized])


def site_of(entry: Entry) -> str:
  """Name of a layer's site in rules and tables: "layers/3/mlp/up"."""
  return entry.path.replace("layers/", f"layers/{entry.layer}/", 1)


def choose(
  entries: list[Entry], dims: Mapping[str, int], recipes: Mapping[str, Recipe], fp8: Fp8Format,
  *, scale_fmt: str = "auto", requantize: bool = False, changed: Collection[str] = (),
  merged: Collection[str] = (), stored: StoredByName | None = None,
) -> Fp8Plan:  # fmt: skip
  """Chooses the FP8 matrices of an export.

  Args:
    entries: every tensor of the model.
    dims: letter -> size.
    recipes: of every layer's site.
    fp8: the format; its scale_fmt is replaced.
    scale_fmt: of fp8_formats.SCALE_FMTS, or "auto": "ue8m0" where all codes of training have
      scales that are powers of two.
    requantize: whether weights that training multiplied with other codes are requantized.
    changed: paths of weights, "layers/mlp/down", that training multiplied by something else first.
    merged: paths of weights that adapters were merged into: training had no codes of them.
    stored: {weight's name: its codes, or None: 16 bits in a folder with FP8}, before recipes.

  Returns:
    A plan without the amaxes that matrices take from elsewhere: see `with_amaxes`.

  Raises:
    UserError: codes would change and requantize is False, or no matrix would be FP8; with the fix.
  """
  stored = stored or {}
  linears = [e for e in entries if e.layer is not None and e.inputs is not None]
  own = {e.name: recipes[site_of(e)].fwd.rhs for e in linears}
  own |= {name: one and one.quant for name, one in stored.items()}
  inputs = _stored_inputs(stored, fp8)
  is_trained = any(own.values())
  fmt, static = _scale_fmt(scale_fmt, fp8, own), fp8.static_inputs or bool(inputs)
  fp8 = dataclasses.replace(fp8, scale_fmt=fmt, static_inputs=static)
  unquantized, matrices, refused = {}, {}, {}
  for e in linears:
    quant = own[e.name]
    whose = "the folder" if e.name in stored else f"recipe {recipes[site_of(e)].name!r}"
    if is_trained and quant is None:
      unquantized[e.name] = f"16 bits in {whose}" if e.name in stored else whose
    elif not fp8.fits(e.hf_shape(dims)):
      unquantized[e.name] = f"{_by(e.hf_shape(dims))} has partial tiles of {_by(fp8.block)}"
    elif e.path in merged:
      matrices[e.name] = Matrix(fp8.quant, False, input_scale=inputs.get(e.name))
    elif quant is not None and fp8.holds(quant) and e.path not in changed:
      matrices[e.name] = Matrix(quant, True, None, (), inputs.get(e.name), stored.get(e.name))
    else:
      matrices[e.name] = Matrix(fp8.quant, False, input_scale=inputs.get(e.name))
      if quant is not None and not requantize:
        refused[whose, e.path if e.path in changed else ""] = quant
  for name in _partners(unquantized, matrices):
    unquantized[name] = "a server multiplies it together with one that is not FP8"
    del matrices[name]
  if not matrices:
    raise UserError(_nothing_in_fp8(fp8, unquantized))
  if refused:
    raise UserError("; ".join(_refusal(of, quant, fp8) for of, quant in refused.items()))
  matrices = {name: _shared(name, m, matrices) for name, m in matrices.items()}
  sizes = {e.name: int(np.prod(e.hf_shape(dims))) for e in entries}
  share = sum(sizes[name] for name in matrices) / sum(sizes.values())
  return Fp8Plan(fp8, matrices, unquantized, share)


def with_amaxes(
  plan: Fp8Plan, entries: list[Entry], trained: Mapping[tuple[str, str], float],
  inputs: Mapping[tuple[str, str], float],
) -> Fp8Plan:  # fmt: skip
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
    if matrix.is_trained and matrix.quant.source != CURRENT:
      amax = _amax(trained, site_of(e), "w", "the checkpoint's scaling states", "train further")
      matrix = dataclasses.replace(matrix, amax=amax)
    if plan.fp8.static_inputs and matrix.input_scale is None:
      remedy = "calibrate this model with --job=calibrate"
      amax = _amax(inputs, site_of(e), "x", "export.input_scales", remedy)
      scale = float(quantize.amax_to_scale(jnp.float32(amax), E4M3, Scale.F32))
      matrix = dataclasses.replace(matrix, input_scale=scale)
    matrices[e.name] = matrix
  return dataclasses.replace(plan, matrices=matrices)


def _stored_inputs(stored: StoredByName, fp8: Fp8Format) -> dict[str, float]:
  """Static scales of inputs that a folder has of every matrix; {} where a table gives them."""
  scales = {name: one.input_scale for name, one in stored.items() if one is not None}
  whole = {name: scale for name, scale in scales.items() if scale is not None}
  is_wanted = fp8.method == COMPRESSED and fp8.strategy != "block" and not fp8.static_inputs
  return whole if is_wanted and len(whole) == len(scales) else {}


def _scale_fmt(wish: str, fp8: Fp8Format, own: Mapping[str, Quant | None]) -> str:
  if wish != "auto":
    return wish
  kept = [q for q in own.values() if q is not None]
  pow2 = dataclasses.replace(fp8, scale_fmt="ue8m0")
  is_pow2 = kept and fp8.method == FINE_GRAINED and all(pow2.holds(q) for q in kept)
  return "ue8m0" if is_pow2 else "float32"


def _partners(unquantized: Mapping[str, str], matrices: Mapping[str, Matrix]) -> list[str]:
  """FP8 matrices that servers fuse with an unquantized one."""
  return [name for name in matrices if any(other in unquantized for other in _fused_with(name))]


def _fused_with(name: str) -> tuple[str, ...]:
  """The weights that servers fuse with this one, itself included."""
  stem, _, last = name.removesuffix(".weight").rpartition(".")
  group = next((g for g in _FUSED if last in g), (last,))
  return tuple(f"{stem}.{n}.weight" for n in group)


def _shared(name: str, matrix: Matrix, matrices: Mapping[str, Matrix]) -> Matrix:
  """One scale for fused matrices: vLLM would quantize them a second time, to the largest scale."""
  if matrix.is_trained or matrix.quant.tile != (0, 0):
    return matrix
  group = _fused_with(name)
  if any(other not in matrices for other in group):
    return matrix
  quant = dataclasses.replace(matrix.quant, source=Static())
  return dataclasses.replace(matrix, quant=quant, shared=group)


def _amax(table: Mapping[tuple[str, str], float], site: str, tensor: str, what: str, remedy: str):
  amax = table.get((site, tensor))
  if amax is None or not np.isfinite(amax):
    raise UserError(f"{what} has no amax of tensor {tensor} of site {site}; {remedy}")
  return amax


def _by(shape: tuple[int, ...]) -> str:
  return "x".join(map(str, shape))


def _nothing_in_fp8(fp8: Fp8Format, unquantized: Mapping[str, str]) -> str:
  reasons = ", ".join(list(dict.fromkeys(unquantized.values()))[:3])
  fix = "export.format='hf-bf16'"
  if fp8.strategy == "block":
    fix = f"export.format='compressed-tensors' with export.strategy='channel', or {fix}"
  return f"export.format: no matrix of this model would be FP8 ({reasons}); set {fix}"


def _refusal(of: tuple[str, str], quant: Quant, fp8: Fp8Format) -> str:
  """Codes would change: the message, with the formats that keep them."""
  whose, changed = of
  if changed:
    return (
      f"export.format: with precision.smooth_swiglu='channel', or folded, {changed} is not the "
      "weight whose codes training multiplied; set export.requantize=True to requantize it, or "
      "export.format='hf-bf16'"
    )
  keeping = [
    f"export.format={name!r}" + (f" with export.strategy={s!r}" if name == COMPRESSED else "")
    for name, method in METHODS.items()
    for s in (fp8_formats.STRATEGIES if name == COMPRESSED else ("block",))
    if Fp8Format(method, s).holds(quant)
  ]
  if "export.format='hf-fp8-block'" in keeping and fp8.method == METHODS["hf-fp8-block"]:
    keeping = ["export.scale_fmt='auto'"]  # it is the scales that do not suit
  keeping = keeping or ["export.format='hf-bf16'"]
  has, theirs = f"{whose} multiplied weights as", "those of training"
  if whose == "the folder":
    has, theirs = f"{whose} holds weights as", "the folder's"
  return (
    f"export.format: {has} {quant}, and this format has {fp8.quant}: the codes would not be "
    f"{theirs}. Set {' or '.join(keeping)} to keep the weights as they are, or "
    "export.requantize=True to requantize them"
  )


# --- codes that are there ------------------------------------------------------------------------


def of_folder(folder: Folder, entries: list[Entry]) -> dict[str, Stored | None]:
  """The codes of a folder's linear layers, None for one in 16 bits; {} of a folder without FP8."""
  stored: dict[str, Stored | None] = {}
  if (fp8 := folder.fp8) is None:
    return stored

  def pair(name: str):
    return folder.read(name), folder.read(fp8.scale_name(name))

  for name in [e.name for e in entries if e.layer is not None and e.inputs is not None]:
    stored[name] = None
    if folder.is_fp8(name):
      inputs = _input_scale(name)
      has_inputs = fp8.static_inputs and inputs in folder.files
      scale = float(folder.read(inputs).reshape(())) if has_inputs else None
      stored[name] = Stored(fp8.quant, functools.partial(pair, name), scale)
  return stored if any(stored.values()) else {}


def of_stacks(flat: Mapping[str, Any], entries: list[Entry]) -> dict[str, Stored]:
  """The codes of the matrices that a tree {path: stacked parameter} holds as StoredMatrix."""

  def pair(codes: StoredMatrix, layer: int):
    data: Any = params.on_host(codes.data[layer])
    scale: Any = params.on_host(codes.scale[layer])
    return np.asarray(StoredMatrix(data, scale, codes.inputs).matrix().data), scale.T

  return {
    e.name: Stored(stored_matrix.QUANT, functools.partial(pair, flat[e.path], e.layer))
    for e in entries
    if isinstance(flat.get(e.path), StoredMatrix) and e.layer is not None
  }


# --- values --------------------------------------------------------------------------------------


def quantized(w, matrix: Matrix, amax: float | None, fp8: Fp8Format) -> list[np.ndarray]:
  """[codes [out, in], scales] of a weight in our order, and its input scale if it has one.

  Args:
    w: float32 [in, out], as the training GEMM reads it; not looked at where codes are stored.
    amax: of the scale where matrix.quant.source is not CURRENT.
  """
  if matrix.stored is not None:
    data, scale = matrix.stored.read()
  else:
    given = None if matrix.quant.source == CURRENT else np.float32(amax)
    data, scale = jax.device_get(_quantize(np.asarray(w, np.float32), given, matrix.quant))
  scale = scale.reshape(fp8.scale_shape(data.shape)).astype(np.float32)
  extra = [] if matrix.input_scale is None else [np.full(1, matrix.input_scale, np.float32)]
  return [np.ascontiguousarray(data), np.ascontiguousarray(scale), *extra]


@functools.partial(jax.jit, static_argnums=2)
def _quantize(w, amax, quant: Quant):
  made = quantize.quantize(w, quant, contraction=0, amax=amax)
  return made.data, made.scale


def tensors(name: str, shape, matrix: Matrix, fp8: Fp8Format):
  """(name, dtype code, shape) of what `quantized` gives."""
  parts = [
    (name, fp8_formats.WEIGHT_CODE, tuple(shape)),
    (fp8.scale_name(name), "F32", fp8.scale_shape(shape)),
  ]
  if matrix.input_scale is not None:
    parts.append((_input_scale(name), "F32", (1,)))
  return tuple(parts)


def _input_scale(name: str) -> str:
  return name.removesuffix("weight") + "input_scale"
