"""Rivals in Transformer Engine for JAX.

Never run on a GPU. Written after the API of Transformer Engine 2 (transformer_engine.jax.dense and
what its tests use); another version whose names differ is listed as absent, one that behaves
otherwise fails its check and is not timed.

Formats are its hybrid: E4M3 forward, E5M2 gradients. Results come in BF16, weight gradients too.
"""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from rivals import Absent, Call, Rival, need

_E4M3, _E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_FORMATS = {"fwd": (_E4M3, _E4M3), "dgrad": (_E5M2, _E4M3), "wgrad": (_E4M3, _E5M2)}


def _scaling(te, wanted: str):
  """A scaling mode by its name; "BLOCK" stands for one per 1x128, whatever its name will be."""
  modes = {m.name: m for m in te.ScalingMode}
  if wanted == "BLOCK":
    # MXFP8 and NVFP4 are Blackwell's.
    wanted = next((n for n in modes if "BLOCK" in n and not n.startswith(("MX", "NV"))), wanted)
  if wanted not in modes:
    raise Absent(f"API not found: ScalingMode has no {wanted}, but {', '.join(sorted(modes))}")
  return modes[wanted]


def _make(name: str, wanted: str) -> Rival:
  te = need(
    "transformer_engine.jax.quantize", "ScalingMode", "QuantizeLayout",
    "QuantizerFactory.create", "QuantizerFactory.create_set",
  )  # fmt: skip
  dense = need("transformer_engine.jax.dense", "dense").dense
  calls = need("transformer_engine.jax.cpp_extensions", "quantize", "gemm")
  sharding = need("transformer_engine.jax.sharding", "MeshResource", "global_shard_guard")
  if jax.devices()[0].platform != "gpu":
    raise Absent(f"needs a GPU: JAX computes on {jax.devices()[0].device_kind}")
  scaling = _scaling(te, wanted)

  @contextlib.contextmanager
  def one_device():
    with sharding.global_shard_guard(sharding.MeshResource()):
      yield

  def gemm(product, out):
    del out

    @jax.jit
    def prepare(a, b):
      with one_device():
        return tuple(
          calls.quantize(
            x,
            flatten_axis=-1,
            quantizer=te.QuantizerFactory.create(
              1, scaling_mode=scaling, q_dtype=dtype, q_layout=te.QuantizeLayout.ROWWISE
            ),
          )
          for x, dtype in zip((a, b), _FORMATS[product])
        )

    def run(a, b):
      with one_device():
        return calls.gemm(a, b, contracting_dims=((1,), (1,)))

    return Call(prepare, run)

  def layer():
    quantizers = te.QuantizerFactory.create_set(
      scaling_mode=scaling, fwd_dtype=_E4M3, bwd_dtype=_E5M2, is_2x2x=True
    )

    def run(x, w, g):
      with one_device():
        multiply = functools.partial(dense, contracting_dims=((1,), (0,)), quantizer_set=quantizers)
        y, pull = jax.vjp(multiply, x, w.astype(jnp.bfloat16))
        return y, *pull(g)

    return Call(lambda *operands: operands, run)

  return Rival(name, gemm, layer)


MAKERS: dict[str, Callable[[], Rival]] = {
  "te_jax_delayed": lambda: _make("te_jax_delayed", "DELAYED_TENSOR_SCALING"),
  "te_jax_current": lambda: _make("te_jax_current", "CURRENT_TENSOR_SCALING"),
  "te_jax_block": lambda: _make("te_jax_block", "BLOCK"),
}
