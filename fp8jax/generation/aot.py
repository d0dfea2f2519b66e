"""The programs of generation lowered for GPUs that need not be here."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fp8jax import axes
from fp8jax import params as params_lib
from fp8jax.generation import cache as cache_lib
from fp8jax.generation import decode, weights
from fp8jax.generation.sampling import method_of
from fp8jax.generation.settings import VALUES, Generate, Sampling
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.step import train_spec


@dataclasses.dataclass(frozen=True)
class Programs:
  """The programs of generation, lowered; see `lower`.

  Attributes:
    decode: one token of every sequence.
    prefill: of one prompt per device that has rows of its own; None without a prompt's length.
    weights: bytes of the parameters as products read them, over all devices.
  """

  decode: Any
  prefill: Any = None
  weights: int = 0


def lower(
  spec: train_spec.TrainSpec, devices, rows: int, length: int, cache_format: str, prompt: int = 0
) -> Programs:
  """The programs of the spec's recipes, greedy.

  Args:
    spec: of any job; weights lie as Layout.served says.
    rows: sequences, over all devices.
    length: positions of each in the cache.
    prompt: tokens of a prompt; 0 for no prefill.
  """
  cfg, run = spec.model, decode.served(spec.model, spec.run, spec.device, length)
  sites, layout = decode.served_sites(spec.sites()), run.layout
  params = params_lib.abstract(spec.declaration, cfg.dims, layout)
  how = cfg, run.dtype, spec.of(Generate).weights == VALUES
  made = jax.eval_shape(lambda p: weights.for_inference(p, sites, *how), params)
  empty = functools.partial(decode.Slots.empty, cfg, rows, length, cache_format, run.dtype)
  slots = jax.eval_shape(lambda: empty(layout))

  def put(x, *names):
    mesh, place = layout.mesh, PartitionSpec(*names)
    there = SingleDeviceSharding(devices[0]) if mesh is None else NamedSharding(mesh, place)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

  entries = slots.cache.of_entries(lambda x: put(x, *layout.act_spec(cache_lib.LETTERS[: x.ndim])))
  cache = dataclasses.replace(entries, scales=jax.tree.map(put, entries.scales))
  vectors: Any = map(put, (slots.tokens_B, slots.positions_B, slots.seeds_B, slots.logp_B))
  slots, number = decode.Slots(cache, *vectors), put(jax.ShapeDtypeStruct((), jnp.float32))
  held = _placed(made, spec.model, layout, put), jax.tree.map(put, sites), slots

  def lowered(function, *rest):
    static = functools.partial(function, method=method_of(Sampling()), cfg=cfg, run=run)
    options = choose.compiler_options(spec.device)
    program = jax.jit(static, donate_argnums=2, compiler_options=options)
    return program.lower(*held, *rest, number, number)

  nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made))
  if not prompt:
    return Programs(lowered(decode.decode), weights=nbytes)
  shards = layout.size(layout.act_axes("B"))
  number_R = put(jax.ShapeDtypeStruct((shards,), jnp.int32))
  prompts = {
    "tokens_RL": put(jax.ShapeDtypeStruct((shards, prompt), jnp.int32)), "lengths_R": number_R,
    "rows_R": number_R, "seeds_R": put(jax.ShapeDtypeStruct((shards,), jnp.uint32)),
  }  # fmt: skip
  return Programs(lowered(decode.decode), lowered(decode.prefill, prompts), nbytes)


def _placed(made, cfg: ModelConfig, layout: axes.Layout, put) -> dict[str, Any]:
  """Weights of `weights.for_inference` where they lie."""
  declared = params_lib.flatten(transformer.site_params(cfg))

  def one(path: str, w):
    param = declared[path]
    if not isinstance(w, StoredMatrix):
      return put(w, *layout.weight_spec(param.letters))
    contracted, produced = (layout.act_axes_of(x) or None for x in param.gemm_letters)
    lead = (None,) * w.lead

    def matrix(x):  # one scale for a whole axis lies everywhere
      ends = zip((produced, contracted), x.shape[-2:])
      return put(x, *lead, *(names if n > 1 else None for names, n in ends))

    return jax.tree.map(matrix, w)

  def of_layers(stack):
    flat = params_lib.flatten(stack)
    return params_lib.unflatten({path: one(f"layers/{path}", w) for path, w in flat.items()})

  rest = {path: one(path, w) for path, w in made.items() if path != "layers"}
  return {**rest, "layers": tuple(map(of_layers, made["layers"]))}
