"""Post-training quantization of a model, layer by layer. Each finished layer is written to disk.

The result is two things. Parameters in float32 compute what the model did before, but for the
rounding of folds and for corrected biases. Codes stand for the matrices of its linear layers. They
are exported as codes that are there already (export/fp8.py: Stored).
"""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax import records
from fp8jax.errors import writing
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.ops import site_tree, stored_params
from fp8jax.ptq import apply
from fp8jax.ptq import layers as layers_lib
from fp8jax.ptq.layers import MomentsOf
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.quant import Quant
from fp8jax.step.train_spec import TrainSpec


@dataclasses.dataclass(frozen=True)
class Quantized:
  """A quantized model.

  Attributes:
    spec: of the model, whose head is untied where a rotation untied it.
    params: float32, folded.
    codes: {site of a layer, "layers/3/mlp/up": reads its codes}.
    tensor_scales: {site: of two levels the factor of all its scales, else None}.
    inputs: {(site, "x"): amax of its activations over the calibration}.
    rows: {site: numbers of its matrix}, see `_row`.
    discard: removes the folder that codes are read from.
  """

  spec: TrainSpec
  params: Any
  codes: Mapping[str, Callable[[], ScaledMatrix]]
  tensor_scales: Mapping[str, float | None]
  inputs: Mapping[tuple[str, str], float]
  rows: Mapping[str, Mapping[str, float]]
  discard: Callable[[], None]


def quantize(
  spec: TrainSpec, params, windows: Sequence[np.ndarray], methods: apply.Methods,
  folder: str, said: Callable[[int, int, str], None],
) -> Quantized:  # fmt: skip
  """Quantizes the linear layers of a model as its recipes' forward products take weights.

  Args:
    spec: without adapters, on one device.
    params: as they are stored; read once.
    windows: tokens [B, L] of the calibration.
    methods: in order; codes go to the nearest without a method that chooses them.
    folder: holds the finished layers until `discard`. The same call resumes after them.
    said: is told (layers done, of so many, a line) after each.

  Raises:
    UserError: a layer's inputs are not finite, or a method cannot; names the site.
  """
  recipes = site_tree.recipes_of(spec.sites())
  params = stored_params.dequantize_tree(params)
  kept = _Kept(folder, _header(spec, params, windows, methods, recipes))
  model, params = apply.to_model(spec.model, params, methods)
  spec = dataclasses.replace(spec, model=model, declaration=transformer.params(model))
  of_layers = [r.fwd for name, r in recipes.items() if name.startswith("layers/")]
  reads = apply.reads_text(methods, of_layers)
  text = layers_lib.Layers(spec, params, windows) if reads else None
  done, inputs, rows, factors = [], {}, {}, {}
  for layer in range(model.num_layers):
    began = time.monotonic()
    one = kept.read(layer)
    if one is None:
      one = _layer(spec, layers_lib.layer_of(params, layer), text, methods, recipes, layer)
      kept.write(layer, one)
    if text is not None:
      text.advance(_multiplied(one, model))
    done.append(jax.tree.map(params_lib.on_host, one.params))  # or the device holds each twice
    inputs |= {(_name(layer, path), "x"): amax for path, amax in one.inputs.items()}
    rows |= {_name(layer, path): row for path, row in one.rows.items()}
    factors |= {_name(layer, path): factor for path, factor in one.tensor_scales.items()}
    errors = [row["error"] for row in one.rows.values() if "error" in row]
    error = f", largest relative error {max(errors):.3g}" if errors else ""
    said(layer + 1, model.num_layers, f"layer {layer}: {time.monotonic() - began:.1f} s{error}")
  codes = {name: functools.partial(kept.codes, *_place(name)) for name in rows}
  params = layers_lib.with_layers(params, done)
  return Quantized(spec, params, codes, factors, inputs, rows, kept.discard)


@dataclasses.dataclass(frozen=True)
class _Layer:
  """A layer that is done, as Quantized, by paths in the layer: "mlp/up"."""

  params: dict[str, dict[str, Any]]
  codes: dict[str, ScaledMatrix]
  inputs: dict[str, float]
  rows: dict[str, dict[str, float]]
  tensor_scales: dict[str, float | None]


def _layer(
  spec: TrainSpec, own, text: layers_lib.Layers | None, methods: apply.Methods,
  recipes: Mapping[str, Recipe], layer: int,
) -> _Layer:  # fmt: skip
  """A layer's matrices, those that read one input and are quantized alike as one.

  Servers multiply these as one and read them under one scale, where a tensor has one. Nothing is
  calibrated without a text.
  """
  moments = text.moments(own) if text else {}
  _check(moments, layer)
  own, moments = apply.to_layer(own, moments, _products(recipes, layer), methods, spec.model)
  made = _Layer({key: dict(of) for key, of in own.items()}, {}, {}, {}, {})
  for mixer in transformer.mixers(spec.model):
    inputs = {name: p.inputs or 0 for name, p in mixer.params(spec.model).items()}
    for name, sites in layers_lib.sites_by_input(mixer).items():
      of_input: Any = moments[mixer.key][name] if text else None
      ws = {site: layers_lib.matrix(own[mixer.key][site], inputs[site]) for site in sites}
      for site in sites if of_input else ():
        made.inputs[f"{mixer.key}/{site}"] = float(jnp.max(of_input.amax_K))
      for quant, group in _alike(recipes, layer, mixer.key, ws).items():
        names = [f"{mixer.key}/{site}" for site in group]
        where = f"layers/{layer}: {', '.join(names)}"
        parts = apply.to_matrices([ws[site] for site in group], of_input, quant, methods, where)
        for path, (codes, factor) in zip(names, parts, strict=True):
          made.codes[path], made.tensor_scales[path] = codes, factor
        for site, path in zip(group, names, strict=True):
          made.rows[path] = _row(ws[site], made.codes[path], of_input) if of_input else {}
          made.params[mixer.key] |= apply.to_biases(
            own[mixer.key], site, ws[site], made.codes[path], of_input, methods
          )
  return made


def _products(recipes: Mapping[str, Recipe], layer: int) -> dict[str, Gemm]:
  """{"mlp/up": the forward product} of a layer."""
  places = {name: _place(name) for name in recipes if name.startswith("layers/")}
  return {path: recipes[name].fwd for name, (of, path) in places.items() if of == layer}


def _alike(recipes: Mapping[str, Recipe], layer: int, key: str, ws) -> dict[Quant, list[str]]:
  """{Quant: sites that are quantized so, as one matrix}, of sites that read one input."""
  groups: dict[Quant, list[str]] = {}
  for site in ws:
    quant = recipes[_name(layer, f"{key}/{site}")].fwd.rhs
    if quant is not None:
      groups.setdefault(apply.current(quant), []).append(site)
  return groups


def _check(moments: MomentsOf, layer: int):
  for key, of_mixer in moments.items():
    for name, one in of_mixer.items():
      one.check(f"layers/{layer}/{key}: input {name!r}")


def _row(w_NK, codes: ScaledMatrix, moments) -> dict[str, float]:
  """{"error": squared error of the outputs over their squares, on the calibration's inputs}."""
  error = jnp.sum(moments.errors(codes.dequantize() - w_NK))
  return {"error": float(error / jnp.maximum(jnp.sum(moments.errors(w_NK)), 1e-30))}


def _multiplied(one: _Layer, model: ModelConfig):
  """The layer's parameters with the numbers of its codes."""
  own = {key: dict(of) for key, of in one.params.items()}
  for path, codes in one.codes.items():
    key, _, name = path.partition("/")
    own[key][name] = layers_lib.weight(codes.dequantize(), own[key][name])
  return own


def _name(layer: int, path: str) -> str:
  return f"layers/{layer}/{path}"


def _place(name: str) -> tuple[int, str]:
  """(layer, path) of `_name`."""
  _, layer, path = name.split("/", 2)
  return int(layer), path


# --- layers that are done ------------------------------------------------------------------------


def _header(spec: TrainSpec, params, windows, methods, recipes: Mapping[str, Recipe]):
  """Everything that codes depend on."""
  digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in windows))
  of_recipes = {name: r.to_dict()["fwd"] for name, r in recipes.items()}
  return {
    "model": spec.model.to_dict(), "text": digest.hexdigest(), "methods": list(map(repr, methods)),
    "weights": params_lib.digest(params), "recipes": of_recipes,
    "compute": [spec.run.dtype.name, spec.run.attention],
  }  # fmt: skip


class _Kept:
  """A folder with a file for each layer that is done, of one model, text, recipes and methods."""

  def __init__(self, folder: str, header: Mapping[str, Any]):
    text = records.to_json(header)
    self.folder = os.path.join(folder, hashlib.sha256(text.encode()).hexdigest()[:12])
    with writing(self.folder):
      os.makedirs(self.folder, exist_ok=True)

  def _path(self, layer: int) -> str:
    return os.path.join(self.folder, f"layer_{layer}.npz")

  def write(self, layer: int, one: _Layer):
    arrays: dict[str, Any] = {f"params/{path}": params_lib.on_host(x)
              for path, x in params_lib.flatten(one.params).items()}  # fmt: skip
    for path, codes in one.codes.items():
      data = params_lib.on_host(codes.data)
      arrays[f"data/{path}"] = data.view(np.uint8) if data.dtype.kind == "V" else data
      arrays[f"scale/{path}"] = params_lib.on_host(codes.scale)
    tiles = {path: [list(codes.tile), np.dtype(codes.data.dtype).name]
             for path, codes in one.codes.items()}  # fmt: skip
    facts = {"inputs": one.inputs, "rows": one.rows, "tiles": tiles,
             "tensor_scales": one.tensor_scales}  # fmt: skip
    arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    with writing(self.folder), records.replacing(self._path(layer)) as part, open(part, "wb") as f:
      np.savez(f, **arrays)

  def read(self, layer: int) -> _Layer | None:
    """A layer; None if it is not there whole."""
    try:
      with np.load(self._path(layer)) as f:
        facts = json.loads(f["facts"].tobytes())
        own = {n.removeprefix("params/"): f[n] for n in f.files if n.startswith("params/")}
        codes = {path: _codes(f, path, facts["tiles"]) for path in facts["tiles"]}
    except (FileNotFoundError, zipfile.BadZipFile, ValueError, KeyError):
      return None
    rest = (facts[name] for name in ("inputs", "rows", "tensor_scales"))
    return _Layer(params_lib.unflatten(own), codes, *rest)

  def codes(self, layer: int, path: str) -> ScaledMatrix:
    """The codes of a matrix, on the host."""
    with np.load(self._path(layer)) as f:
      return _codes(f, path, json.loads(f["facts"].tobytes())["tiles"])

  def discard(self):
    shutil.rmtree(self.folder, ignore_errors=True)


def _codes(f, path: str, tiles) -> ScaledMatrix:
  tile, dtype = tiles[path]
  data: Any = f[f"data/{path}"].view(jnp.dtype(dtype))
  return ScaledMatrix(data, f[f"scale/{path}"], tuple(tile))
