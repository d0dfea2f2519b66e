"""Activations computed in the quantizer: the numbers of a layer, what is read, who may.

The kernels are plain JAX here, with the producers' own formulas, so that nothing but the wiring can
differ; the kernels themselves are interpreted in the last tests.
"""

import collections
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.kernels.quantize import mosaic_sm90 as quantize_sm90
from fp8jax.kernels.quantize import producers
from fp8jax.kernels.scaled_matmul import mosaic_sm90, reference
from fp8jax.models import swiglu
from fp8jax.ops import activations, basic
from fp8jax.ops import site as site_lib
from fp8jax.quant import observe, quantize

EPS = 1e-6
CFG = types.SimpleNamespace(norm_eps=EPS)
SIZES = dict(B=2, L=64, D=256, F=384)


def _by_formula(producer, matrices, factors, of=lambda x: x):
  """Results of a producer on whole matrices."""
  wide = [m.astype(jnp.float32) for m in matrices]
  wide += [jnp.expand_dims(f, 1 - axis) for axis, f in zip(producer.factors, factors)]
  return [of(y.astype(matrices[0].dtype)) for y in producer.function(*wide)]


@jax.custom_vjp
def _silu_mul(gate, up):
  return _by_formula(producers.SWIGLU, (gate, up), ())[0]


def _silu_mul_bwd(sources, g):
  return tuple(_by_formula(producers.SWIGLU_BACKWARD, (g, *sources), ()))


_silu_mul.defvjp(lambda *sources: (_silu_mul(*sources), sources), _silu_mul_bwd)


@pytest.fixture
def calls(monkeypatch):
  """Kernels in plain JAX; the list of what the quantizer was called for."""
  calls = []

  def quantize_matrix(x, quants, amax=None, over=()):
    del amax, over
    calls.append("identity")
    return {axis: quantize.quantize(x, quant, contraction=axis) for axis, quant in quants.items()}

  def quantize_produced(producer, matrices, factors, quants, watched=False):
    calls.append(producer.name)
    results = _by_formula(producer, matrices, factors)
    made = [
      {axis: quantize.quantize(y, quant, contraction=axis) for axis, quant in of_result.items()}
      for y, of_result in zip(results, quants, strict=True)
    ]
    return made, [observe.amax(y) for y in results] if watched else []

  def multiply(a, b, accumulate, out_dtype):
    return reference.scaled_matmul(a, b, accumulate, out_dtype)

  monkeypatch.setattr(quantize_sm90, "quantize_matrix", quantize_matrix)
  monkeypatch.setattr(quantize_sm90, "quantize_produced", quantize_produced)
  monkeypatch.setattr(mosaic_sm90, "scaled_matmul", multiply)
  return calls


@pytest.fixture
def formulas(monkeypatch):
  """SwiGLU as the producers compute it: exponentials that differ in their last bit aside."""
  monkeypatch.setattr(basic, "silu_mul", _silu_mul)


def _sites(names, recipe="block_128", statistics=observe.QUIET, backend="mosaic_sm90"):
  """Sites by name; recipe: of all, or by name."""
  found = {}
  for name in names:
    site = site_lib.single(recipe if isinstance(recipe, str) else recipe[name], name=name)
    backends = tuple(
      backend if getattr(site.recipe, p).is_narrow else "xla" for p in ("fwd", "dgrad", "wgrad")
    )
    tap = jnp.zeros((3, statistics), jnp.float32)
    found[name] = dataclasses.replace(site, backends=backends, tap=tap)
  return found


def _normal(rng, *shape, scale=1.0, dtype=jnp.bfloat16):
  return jnp.asarray(scale * rng.standard_normal(shape), dtype)


def _layer(rng, sizes=SIZES):
  """(parameters, x, gradient) of a feed-forward layer."""
  d, f = sizes["D"], sizes["F"]
  p = {
    "norm": 1 + _normal(rng, d, scale=0.1, dtype=jnp.float32),
    "gate": _normal(rng, d, f, scale=d**-0.5, dtype=jnp.float32),
    "up": _normal(rng, d, f, scale=d**-0.5, dtype=jnp.float32),
    "down": _normal(rng, f, d, scale=f**-0.5, dtype=jnp.float32),
  }
  x, g = (_normal(rng, *(sizes[c] for c in "BLD")) for _ in range(2))
  return p, x, g


def _run(p, x, g, sites, wrap=lambda f: f):
  """Output, gradients and observations of a feed-forward layer."""

  @jax.jit
  def run(p, x, g, taps):
    def apply(p, x, taps):
      return swiglu.apply(p, site_lib.with_taps(sites, taps), x, CFG)

    y, pull = jax.vjp(wrap(apply), p, x, taps)
    return y, *pull(g)

  return run(p, x, g, site_lib.taps(sites))


def _assert_same(got, want):
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
    np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def _plainly(monkeypatch):
  monkeypatch.setattr(activations, "can_produce", lambda *_: False)


@pytest.mark.parametrize("recipe", ["block_128", "block_128_hybrid", "block_128_pow2_saved"])
def test_a_layer_is_the_same_bit_for_bit(rng, calls, formulas, monkeypatch, recipe):
  layer, sites = _layer(rng), _sites(("gate", "up", "down"), recipe)
  got = _run(*layer, sites)
  again = ["rms_norm", "swiglu"] * (not recipe.endswith("_saved"))
  once = collections.Counter(["rms_norm", "swiglu", "swiglu_backward", *again])
  # Three weights in two directions, and the layer's own incoming gradient.
  assert collections.Counter(calls) == once + collections.Counter(identity=7)
  _plainly(monkeypatch)
  calls.clear()
  want = _run(*layer, sites)
  assert set(calls) == {"identity"}
  _assert_same(got, want)
