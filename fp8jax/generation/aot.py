"""A decoding step lowered for GPUs that need not be here, weights in the form of generation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fp8jax import params as params_lib
from fp8jax.generation import decode, weights
from fp8jax.generation.sampling import method_of
from fp8jax.generation.settings import Sampling
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.step import train_spec


def lower(spec: train_spec.TrainSpec, devices, rows: int, length: int, cache_format: str):
  """decode.decode of the spec's recipes, greedy.

  Args:
    spec: of a job that generates, see Needs.is_served.
    devices: those to lower for.
    rows: sequences, over all devices.
    length: positions of each in the cache.
    cache_format: of settings.CACHE_FORMATS.
  """
  cfg, run, sites = spec.model, spec.run, spec.sites()
  params = params_lib.abstract(spec.declaration, cfg.dims, run.layout)
  made = jax.eval_shape(lambda p: weights.for_inference(p, sites, cfg, run.dtype), params)
  empty = functools.partial(decode.Slots.empty, cfg, rows, length, cache_format, run.dtype)
  slots = jax.eval_shape(lambda: empty(run.layout))

  def put(x, *names):
    mesh, place = run.layout.mesh, PartitionSpec(*names)
    there = SingleDeviceSharding(devices[0]) if mesh is None else NamedSharding(mesh, place)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

  entries = slots.cache.of_entries(lambda x: put(x, *run.layout.act_spec("NBMGK"[: x.ndim])))
  cache = dataclasses.replace(entries, scales=jax.tree.map(put, entries.scales))
  vectors: Any = map(put, (slots.tokens_B, slots.positions_B, slots.seeds_B, slots.logp_B))
  static = functools.partial(decode.decode, method=method_of(Sampling()), cfg=cfg, run=run)
  options = choose.compiler_options(spec.device)
  program = jax.jit(static, donate_argnums=2, compiler_options=options)
  number = put(jax.ShapeDtypeStruct((), jnp.float32))
  slots = decode.Slots(cache, *vectors)
  return program.lower(_placed(made, spec, put), jax.tree.map(put, sites), slots, number, number)


def _placed(made, spec: train_spec.TrainSpec, put) -> dict[str, Any]:
  """Weights of `weights.for_inference` where they lie."""
  declared, layout = params_lib.flatten(transformer.site_params(spec.model)), spec.run.layout

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
