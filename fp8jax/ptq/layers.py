"""The layers of a model one after the other: moments of their inputs, and what comes out of them.

Each layer runs twice on the calibration text: with its own weights, which gives the moments of the
inputs of its linear layers, then with quantized weights, which gives the input of the next layer.
So methods see the inputs that the quantized model has (GPTQ, arXiv:2210.17323 §4). Memory holds
the residual stream of the text and one layer's moments.

Letters: B, L, D as in models; T is a token, K a channel that a linear layer contracts.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.mixer import Mixer
from fp8jax.ops import capture
from fp8jax.ptq import moments as moments_lib
from fp8jax.ptq.moments import Moments
from fp8jax.run import evaluator
from fp8jax.step.train_spec import TrainSpec

# {key of a mixer: {name of an input of its GEMMs: its moments}}, see GemmSite.input.
MomentsOf = dict[str, dict[str, Moments]]


class Layers:
  """A model that text passes through layer by layer, on one device; `place` is the number of the
  layer that `moments` and `advance` compute."""

  def __init__(self, spec: TrainSpec, params, windows: Sequence[np.ndarray]):
    """
    Args:
      spec: of the model, without adapters.
      params: float32 arrays; layers are given one by one.
      windows: int32 tokens [B, L], every one of which counts.
    """
    self._spec, self.place = spec, 0
    sites = spec.sites(evaluator.BF16)
    (self._sites,) = sites["layers"]  # nothing is quantized, so that all layers multiply alike
    embed, self._moments, self._advance = (
      functools.partial(
        choose.program(f, spec.device, ("cfg", "run")), cfg=spec.model, run=spec.run
      )
      for f in (transformer.embed, _moments, _advance)
    )
    self._batches = [_batch(tokens_BL) for tokens_BL in windows]
    top = {name: p for name, p in params.items() if name != "layers"}
    self._x = [embed(top, sites, batch) for batch in self._batches]

  def moments(self, of_layer) -> MomentsOf:
    """The moments of every input of the GEMMs of a layer, float32, over the whole text."""
    total = None
    for x_BLD, batch in zip(self._x, self._batches, strict=True):
      one = self._moments(of_layer, self._own_sites(), x_BLD, batch)
      total = one if total is None else _combined(total, one)
    return total or {}

  def advance(self, of_layer):
    """Passes the text through the layer, whose linear layers are as they were quantized."""
    for n, batch in enumerate(self._batches):
      self._x[n] = self._advance(of_layer, self._own_sites(), self._x[n], batch)
    self.place += 1

  def _own_sites(self):
    return jax.tree.map(lambda x: x[self.place], self._sites)


def _batch(tokens_BL) -> dict[str, jax.Array]:
  positions_BL = np.broadcast_to(np.arange(tokens_BL.shape[1], dtype=np.int32), tokens_BL.shape)
  return {"tokens_BL": jnp.asarray(tokens_BL, jnp.int32), "positions_BL": jnp.asarray(positions_BL)}


def _advance(p, sites, x_BLD, batch, cfg: ModelConfig, run: ComputeConfig):
  context = transformer.layer_context(batch, cfg, run)
  return transformer.layer(x_BLD, (p, sites), context, cfg, run)[0]


def _moments(p, sites, x_BLD, batch, cfg: ModelConfig, run: ComputeConfig) -> MomentsOf:
  """Of one batch: the cotangents of taps, of which there is one for every input."""
  mixers = transformer.mixers(cfg)
  taps = {mixer.key: _taps(mixer, mixer.params(cfg), cfg.dims) for mixer in mixers}

  def stream(taps):
    own = dict(sites)
    for mixer in mixers:
      of_mixer = dict(own[mixer.key])
      for name, (site, *_) in sites_by_input(mixer).items():
        tap = taps[mixer.key][name]
        of_mixer[site] = capture.capturing(of_mixer[site], tap, moments_of)
      own[mixer.key] = of_mixer
    return _advance(p, own, x_BLD, batch, cfg, run)

  y_BLD, pull = jax.vjp(stream, taps)
  return pull(jnp.zeros_like(y_BLD))[0]


def moments_of(x_TK) -> Moments:
  """The moments of a matrix, as a tree of float32 arrays."""
  made = moments_lib.of(x_TK)
  return dataclasses.replace(made, count=made.count.astype(jnp.float32))


def _taps(mixer: Mixer, declared: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Moments]:
  taps = {}
  for name, (site, *_) in sites_by_input(mixer).items():
    p = declared[site]
    width = math.prod(dims[c] for c in p.letters[: p.inputs])
    like = jax.eval_shape(moments_of, jax.ShapeDtypeStruct((1, width), jnp.float32))
    taps[name] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
  return taps


def sites_by_input(mixer: Mixer) -> dict[str, list[str]]:
  """{name of an input: the GEMMs that read it}."""
  by_input: dict[str, list[str]] = {}
  for site in mixer.sites:
    by_input.setdefault(site.input, []).append(site.name)
  return by_input


@jax.jit
def _combined(a: MomentsOf, b: MomentsOf) -> MomentsOf:
  is_moments = lambda x: isinstance(x, Moments)  # noqa: E731
  return jax.tree.map(moments_lib.combine, a, b, is_leaf=is_moments)


# --- weights as matrices -------------------------------------------------------------------------


def matrix(w, inputs: int):
  """[produced, contracted] of a weight whose first so many axes are contracted."""
  return w.reshape(math.prod(w.shape[:inputs]), -1).T


def weight(w_NK, like):
  """The inverse of `matrix`, in the shape of `like`."""
  return w_NK.T.reshape(like.shape)


def layer_of(params, layer: int):
  """The float32 parameters of one layer."""
  return jax.tree.map(lambda x: x[layer], params["layers"])


def with_layers(params, layers: Sequence[Any]):
  """The parameters with these layers, on the host."""
  stacked = jax.tree.map(lambda *of: np.stack([params_lib.on_host(x) for x in of]), *layers)
  return {**params, "layers": stacked}
