"""The forward pass of an exported folder as a server makes it: its codes, its activations."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import cast

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp8jax import params as params_lib
from fp8jax.config import precision
from fp8jax.export import fp8 as fp8_lib
from fp8jax.export import matrices
from fp8jax.formats import E2M1, E4M3, E4M3_240
from fp8jax.models import transformer
from fp8jax.models.hf import names, schemes
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.models.hf import weights as hf_weights
from fp8jax.models.hf.schemes import Codes, Scheme
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.quantization import amax_history, quantize
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import Accumulation, Gemm, Recipe
from fp8jax.recipe.quant import CURRENT, Quant, Scale
from fp8jax.step.train_spec import TrainSpec


def quantizes_inputs(plan: fp8_lib.Plan | None) -> bool:
  return plan is not None and any(m.scheme.inputs for m in plan.matrices.values())


# Of a stack whose layers are in several schemes, or some in 16 bits: its values, under scales of 1.
_VALUES = Quant(E4M3)


def recipe(scheme: Scheme, is_in_codes: bool) -> Recipe:
  """The forward product of a matrix as `load` has it: in the container's codes, or its values."""
  w = scheme.weight
  format = E4M3 if w.format == E4M3_240 else w.format
  w = dataclasses.replace(w, format=format, tile=scheme.tile, source=CURRENT)
  w = w if is_in_codes else _VALUES
  sizes = [q.tile[1] for q in (w, scheme.inputs) if q and q.tile[1]]
  how = math.gcd(*sizes) if sizes and scheme.inputs else Accumulation.PRECISE
  return Recipe("served", Gemm(scheme.inputs, w, how))


def whole(spec: TrainSpec, plan: fp8_lib.Plan) -> TrainSpec:
  """The spec as a server computes, where no tile of activations or weights lies on two devices: the
  batch alone is split, and weights at rest, where their tiles allow it."""
  layout, declared = spec.run.layout, site_tree.find_sites(transformer.site_params(spec.model))
  acts = tuple((letter, over) for letter, over in layout.acts if letter == "B")
  weights = {
    (e.path, dataclasses.replace(m.scheme.weight, tile=m.scheme.tile))
    for e in names.entries(spec.model) if (m := plan.matrices.get(e.name))
  }  # fmt: skip
  are_whole = all(
    precision.tiles_are_whole(declared[path], spec.model, layout, quant) for path, quant in weights
  )
  layout = dataclasses.replace(layout, weights=layout.weights if are_whole else (), acts=acts)
  # A server knows neither FP8 attention nor Smooth-SwiGLU.
  run = dataclasses.replace(spec.run, layout=layout, attention_recipe=None, smooth_swiglu="none")
  return dataclasses.replace(spec, run=run)


def load(spec: TrainSpec, plan: fp8_lib.Plan, folder: str):
  """(parameters, sites) of a folder for a `whole` spec, as servers multiply it.

  Matrices are in the folder's codes. Where those of other layers are in another scheme, they are
  float32: no scale is looked for again.
  """
  entries = [e for e in names.entries(spec.model) if e.name in plan.matrices]
  paths = {e.path: cast(int, e.inputs) for e in entries}
  params = hf_weights.load_params(folder, spec.model, spec.run.layout, codes_of=set(paths))[0]
  flat = params_lib.flatten(params)
  in_codes = {path for path in paths if isinstance(flat[path], StoredMatrix)}
  for path in paths.keys() - in_codes:
    ones = jnp.ones((flat[path].shape[0], 1, 1), jnp.float32)
    flat[path] = StoredMatrix(flat[path], ones, paths[path], _VALUES)
  return params_lib.unflatten(flat), sites(spec, plan, in_codes)


def sites(spec: TrainSpec, plan: fp8_lib.Plan, in_codes: Collection[str]):
  """The sites of a `whole` model multiplied by the plan, static scales included.

  Args:
    in_codes: paths of the stacks that are in a folder's codes.
  """
  entries = {fp8_lib.site_of(e): e for e in names.entries(spec.model)}
  entries = {site: e for site, e in entries.items() if e.name in plan.matrices}
  chosen = {site: plan.matrices[e.name] for site, e in entries.items()}
  of_sites = [
    (re.escape(site), rules.add(recipe(m.scheme, entries[site].path in in_codes)))
    for site, m in chosen.items()
  ]
  tree = site_tree.build_sites(
    transformer.site_params(spec.model), spec.model.dims, (*of_sites, (".*", "bf16")),
    spec.run.layout, backends=site_tree.Backends("reference", spec.device, spec.tokens_per_device),
  )  # fmt: skip

  def one(site):
    if site.scaling_state is None:
      return site
    amax_3 = jnp.float32([[_input_amax(chosen[n]), 1.0, 1.0] for n in site.layer_names])
    amax_3 = amax_3 if site.layers else amax_3[0]
    return dataclasses.replace(site, scaling_state=amax_history.calibrated(site.recipe, amax_3))

  return site_lib.tree_map(one, tree)


def _input_amax(matrix: fp8_lib.Matrix) -> float:
  inputs = matrix.scheme.inputs
  return (matrix.input_scale or 1.0) * (matrices.reach(inputs) if inputs else 1.0)


def load_as_client(spec: TrainSpec, folder: str, exported: Mapping[str, fp8_lib.Matrix]):
  """The parameters of a folder as transformers dequantizes them on a CPU."""
  values = client_values(exported)
  return hf_weights.load_params(folder, spec.model, spec.run.layout, values=values)[0]


def client_inputs(x: np.ndarray, matrix: fp8_lib.Matrix, dtype: str = "float32") -> np.ndarray:
  """float32 [tokens, in]: activations as compressed-tensors 0.20 rounds them for a matrix.

  Integers are symmetric about -1/2 there: a current scale is the largest magnitude / 127.5. An E4M3
  scale of two levels that rounds to 0 is E4M3's epsilon, so that the block becomes zeros. Numbers
  are divided by scales; the products with reciprocals that our quantizer makes put some of those
  that lie between two codes on the other side: bfloat16 after a norm with gain 1 has many.

  Args:
    dtype: see client_dtype.
  """
  quant, x = cast(Quant, matrix.scheme.inputs), np.asarray(x, np.float32)
  is_narrow = dtype == "bfloat16" and matrix.input_scale is not None
  if is_narrow and quant.scale is not Scale.E4M3_OVER_F32:
    matrix = dataclasses.replace(matrix, input_scale=_in_bf16(np.float32(matrix.input_scale)))
  if quant.scale is Scale.E4M3_OVER_F32:
    whole, blocks = schemes.reciprocal(np.float32(matrix.input_scale)), x.reshape(len(x), -1, 16)
    first = whole * (np.abs(blocks).max(-1, keepdims=True) / np.float32(6))
    first = np.minimum(first, E4M3.max).astype(E4M3.dtype).astype(np.float32)
    scale = np.where(first == 0, ml_dtypes.finfo(E4M3.dtype).eps.astype(np.float32), first) / whole
    codes = np.clip(blocks / scale, -E2M1.max, E2M1.max).astype(E2M1.dtype)
    return (codes.astype(np.float32) * scale).reshape(x.shape)
  if quant.scale is Scale.F32 and (quant.tile[0] == 1 or matrix.input_scale is not None):
    is_integer, columns = quant.format.dtype == jnp.int8, x.shape[1]
    most = 2.0 ** (quant.format.bits - 1) - 0.5 if is_integer else quant.format.max
    size = quant.tile[1] or columns
    tiles = np.pad(x, ((0, 0), (0, -columns % size))).reshape(len(x), -1, size)
    current = np.abs(tiles).max(-1, keepdims=True) / np.float32(most)
    scale = np.float32(current if matrix.input_scale is None else matrix.input_scale)
    tiles = tiles / (scale := np.where(scale > 0, scale, np.float32(1)))
    if is_integer:
      codes = np.clip(np.rint(tiles), -most - 0.5, most - 0.5)
    else:
      codes = np.clip(tiles, -most, most).astype(quant.format.dtype).astype(np.float32)
    return (codes * scale).astype(np.float32).reshape(len(x), -1)[:, :columns]
  return np.asarray(quantize.quantize(x, quant, contraction=1).dequantize())


# compressed-tensors 0.20 dequantizes NVFP4 so (compressors/nvfp4), transformers 5 fine-grained FP8.
_IN_BF16 = (schemes.FINE_GRAINED, "nvfp4-pack-quantized", schemes.MODELOPT)


def client_values(exported: Mapping[str, fp8_lib.Matrix]) -> hf_tensors.Values:
  """float32 [out, in] of a folder's matrices as transformers dequantizes them.

  Where a folder is loaded in bfloat16, so are the float32 scales of its other matrices. Scales of
  two levels are the first divided by the folder's global scale. Ours are the first times its
  reciprocal, as servers multiply; the two differ by an ulp, and a tie of bfloat16 falls to another
  side.
  """
  dtype = client_dtype(exported)

  def values(name: str, codes: Codes, scheme: Scheme) -> np.ndarray:
    if dtype == "float32":
      return schemes.dequantize(codes, scheme.tile)
    scale = codes.scale
    if codes.tensor_scale is not None:
      factor = np.float32(codes.tensor_scale)
      whole = schemes.reciprocal(factor) if scheme.layout.inverse else np.float32(1) / factor
      scale = schemes.first_level(codes.scale, factor) / whole
    elif scheme.container not in _IN_BF16:
      scale = _in_bf16(scale)
    return _in_bf16(schemes.dequantize(dataclasses.replace(codes, scale=scale), scheme.tile))

  return values


def client_dtype(exported: Mapping[str, fp8_lib.Matrix]) -> str:
  """In which the client loads a folder of these matrices: "float32" where it can."""
  containers = {m.scheme.container for m in exported.values()}
  is_narrow = any(name in _IN_BF16 or name.startswith("mxfp") for name in containers)
  return "bfloat16" if is_narrow else "float32"


def _in_bf16(x):
  return x.astype(jnp.bfloat16).astype(np.float32)
