"""Residuals of the layers, from the configuration alone.

Differentiation itself is asked: each block is differentiated without computing anything, at the
shapes of one device and with the sites of the spec; the leaves of its derivative are its residuals.
The compiled step is held against it (memory.py). The residuals of the loss, which
are saved once, are not here.
"""

import collections
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax import params as params_lib
from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.mixer import Aux
from fp8jax.ops import site_tree
from fp8jax.ops.attention import key_heads_per_device
from fp8jax.step import train_spec

# HLO's names of dtypes are shorter: "bf16", "f8e4m3fn".
_HLO = (("float", "f"), ("uint", "u"), ("bool", "pred"), ("_", ""))
# The block of what no mixer saves as its own: the residual stream, as layers and blocks read it.
STREAM = "residual stream"
# Layers of the loop that is differentiated: no size of a model, so that stacks are told by it.
_LAYERS = 1_000_003


@dataclasses.dataclass(frozen=True)
class SavedTensor:
  """Arrays of one shape and dtype that one block saves, of all layers together.

  Attributes:
    block: key of the mixer, or STREAM.
    dtype: as compiled programs call it.
    shape: of one array, of one layer, on one device.
    count: arrays, all layers added up.
    nbytes: of all of them.
  """

  block: str
  dtype: str
  shape: tuple[int, ...]
  count: int
  nbytes: int

  @property
  def kind(self) -> str:
    return f"{self.block}, {self.dtype}"


def of_layers(spec: train_spec.TrainSpec) -> list[SavedTensor]:
  """Residuals of all layers under the first phase's recipes, by block, large before small."""
  one = _OneDevice(spec)
  counts: collections.Counter = collections.Counter()
  for layers, sites in transformer.runs(one.sites()):
    for key, count in one.saved(sites).items():
      counts[key] += count * (layers.stop - layers.start)
  tensors = []
  for (block, shape, dtype), count in counts.items():
    name = functools.reduce(lambda text, change: text.replace(*change), _HLO, str(dtype))
    tensors.append(SavedTensor(block, name, shape, count, nbytes(name, count * math.prod(shape))))
  order = [STREAM, *(mixer.key for mixer in transformer.mixers(spec.model))]
  return sorted(tensors, key=lambda t: (order.index(t.block), -t.nbytes))


def nbytes(dtype: str, elements: int) -> int:
  """Of elements in a dtype as compiled programs call it, which pack two of "f4e2m1fn" in a byte."""
  return elements * int((re.search(r"\d+", dtype) or ["8"])[0]) // 8  # "pred" has no number


def recomputed_sites(cfg: ModelConfig, run: ComputeConfig) -> set[str]:
  """Paths of the sites whose forward GEMM the backward pass repeats, by remat policy.

  With the outputs of linears saved, these are the ones that complete the input of a later block,
  unless a copy of what its norm reads is saved. The backward pass of a layer never reads the output
  of the layer.
  """
  sites, key = transformer.gemm_sites(cfg), transformer.mixers(cfg)[-1].key
  layers = {path: site for path, site in sites.items() if path.startswith("layers/")}
  residual = {path for path, site in layers.items() if site.is_residual}
  last = {path for path in residual if path.startswith(f"layers/{key}/")}
  if run.remat == "full":
    return set(layers) - last
  if run.remat == "none" or run.residuals.norm_inputs is not None:
    return set()
  return residual - last


class _OneDevice:
  """A spec as one of its devices has it: its part of tokens, heads and channels.

  Of keys that lie whole beside split queries it has those that its queries read.
  """

  def __init__(self, spec: train_spec.TrainSpec):
    split = lambda letter, n: n // spec.run.layout.size(spec.run.layout.act_axes(letter))  # noqa: E731
    self.spec = spec
    self.model = dataclasses.replace(
      spec.model,
      intermediate_size=split("F", spec.model.intermediate_size),
      num_heads=split("H", spec.model.num_heads),
      num_kv_heads=key_heads_per_device(
        spec.model.num_heads,
        spec.model.num_kv_heads,
        spec.run.layout.size(spec.run.layout.act_axes("H")),
      ),
    )
    self.run = dataclasses.replace(spec.run, layout=axes.LOCAL)
    self.rows = split("B", spec.microbatch)

  def sites(self):
    """The sites of the first phase, their backends chosen for the spec's devices."""
    return dataclasses.replace(
      self.spec, model=self.model, run=self.run, microbatch=self.rows
    ).sites()

  def saved(self, sites) -> collections.Counter:
    """{(block, shape, dtype): arrays} of one layer with these sites."""
    layer = functools.partial(transformer.layer, cfg=self.model, run=self.run)
    declared = transformer.layer_params(self.model)
    total = self._stacked(layer, declared, sites, is_stream=True)
    counts: collections.Counter = collections.Counter()
    if self.run.remat != "full":  # else a layer's input is all
      for mixer in transformer.mixers(self.model):
        block = functools.partial(_block, mixer, cfg=self.model, run=self.run)
        own = self._stacked(block, declared[mixer.key], sites[mixer.key], is_stream=False)
        own &= total  # a policy may save less of blocks that follow each other than of one alone
        total -= own
        counts += collections.Counter({(mixer.key, *key): n for key, n in own.items()})
    return counts + collections.Counter({(STREAM, *key): n for key, n in total.items()})

  def _stacked(self, function, declared, sites, *, is_stream: bool) -> collections.Counter:
    """{(shape, dtype): arrays} that the loop over layers stacks for its backward pass.

    Args:
      function: (x_BLD, (parameters, sites), context) -> (x_BLD, Aux), run.remat not applied yet.
      is_stream: whether x_BLD goes from layer to layer; else every layer is given one, and what is
        saved of these themselves is left out.
    """
    function = transformer.remat(function, self.run)
    rows, length = self.rows, self.spec.data.seq_len
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = {name: tokens for name in ("tokens_BL", "positions_BL")}
    if not self.spec.data.cross_document:
      batch["segments_BL"] = tokens
    x_BLD = jax.ShapeDtypeStruct((rows, length, self.model.hidden_size), self.run.dtype)
    stack = lambda x: jax.ShapeDtypeStruct((_LAYERS, *x.shape), x.dtype)  # noqa: E731
    weights = jax.tree.map(stack, params_lib.abstract(declared, self.model.dims))
    one_site = lambda x: jax.eval_shape(lambda x: x[0], x)  # noqa: E731
    sites = jax.tree.map(lambda x: stack(one_site(x)), sites)

    def residuals(x, weights, sites, batch):
      context = transformer.layer_context(batch, self.model, self.run)

      def layers(x, weights, taps):
        own = site_tree.with_taps(sites, taps)
        if is_stream:
          return jax.lax.scan(lambda x, xs: function(x, xs, context), x, (weights, own))
        step = lambda _, xs: (None, function(xs[0], xs[1:], context))  # noqa: E731
        return jax.lax.scan(step, None, (x, weights, own))

      return jax.tree.leaves(jax.vjp(layers, x, weights, site_tree.taps(sites))[1])

    x = x_BLD if is_stream else stack(x_BLD)
    jaxpr = jax.make_jaxpr(residuals)(x, weights, sites, batch).jaxpr
    outputs: list[Any] = jaxpr.outvars  # of which JAX's types do not say that they have shapes
    stacks = [v for v in outputs if v.aval.shape[:1] == (_LAYERS,) and v not in jaxpr.invars]
    made = {_source(jaxpr, v): v.aval for v in stacks}
    return collections.Counter((aval.shape[1:], aval.dtype) for aval in made.values())


def _source(jaxpr, var) -> tuple:
  """The equation of a variable: the same for two that hold one array, which XLA saves once."""
  for eqn in jaxpr.eqns:
    if var not in eqn.outvars:
      continue
    if eqn.primitive.name == "name":
      return _source(jaxpr, eqn.invars[0])
    place = eqn.outvars.index(var)
    inner = eqn.params.get("jaxpr")
    if inner is None or eqn.primitive.name not in ("scan", "jit"):
      return (var,)
    body = inner.jaxpr
    source = _source(body, body.outvars[place])
    is_given = len(source) == 1 and source[0] in body.invars
    if is_given and eqn.primitive.name == "jit":
      return _source(jaxpr, eqn.invars[body.invars.index(source[0])])
    return (id(eqn), *source)
  return (var,)


def _block(mixer, x_BLD, of_block, context, *, cfg, run) -> tuple[jax.Array, Aux]:
  """A mixer, read by a function that needs its result again, as the next block does."""
  p, s = of_block
  x_BLD, aux = mixer.apply(p, s, x_BLD, context, cfg, run)
  return (x_BLD if run.remat == "none" else jnp.sin(x_BLD)), aux
