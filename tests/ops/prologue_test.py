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
import variants

from fp8jax import axes, mesh
from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
from fp8jax.kernels.gemm import reference
from fp8jax.kernels.quantize import mosaic_sm90 as quantize_sm90
from fp8jax.kernels.quantize import prologues
from fp8jax.models import mlp_swiglu
from fp8jax.models.config import ComputeConfig
from fp8jax.models.mixer import LayerContext
from fp8jax.ops import elementwise, operands, prologue, residuals, site_tree
from fp8jax.ops.dots import dot, dots
from fp8jax.ops.residuals import ResidualFormats
from fp8jax.quantization import quantize, tensor_stats
from fp8jax.recipe.quant import CURRENT

EPS = 1e-6
WEIGHTS = axes.as_rules(dict(D="fsdp", F="tensor"))
ACTS = axes.as_rules(dict(B=("data", "fsdp"), F="tensor"))
CONTEXT = LayerContext(None, None, None)
CFG = types.SimpleNamespace(norm_eps=EPS, residual_tau=0.0, norms_follow=False, unit_scaling="none")
WIDE, GROUPS = (
  ResidualFormats(),
  ResidualFormats(norm_inputs=residuals.QUANTS["e4m3_16"], gate_up=residuals.QUANTS["e4m3_16"]),
)
SIZES = dict(B=2, L=64, D=128, F=256)


def _by_formula(producer, matrices, factors, of=lambda x: x):
  """Results of a producer on whole matrices."""
  wide = [m.astype(jnp.float32) for m in matrices]
  wide += [jnp.expand_dims(f, 1 - axis) for axis, f in zip(producer.factors, factors)]
  return [of(y.astype(matrices[0].dtype)) for y in producer.function(*wide)]


@jax.custom_vjp
def _silu_mul(gate, up):
  return _by_formula(prologues.SWIGLU, (gate, up), ())[0]


def _silu_mul_bwd(sources, g):
  return tuple(_by_formula(prologues.SWIGLU_BACKWARD, (g, *sources), ()))


_silu_mul.defvjp(lambda *sources: (_silu_mul(*sources), sources), _silu_mul_bwd)


@pytest.fixture
def calls(monkeypatch):
  """Kernels in plain JAX; the list of what the quantizer was called for."""
  calls = []

  def quantize_matrix(x, quants, amax=None, over=(), watched=False):
    del over
    calls.append("identity")
    made = {
      axis: quantize.quantize(
        x, quant, contraction=axis, amax=None if quant.source == CURRENT else amax
      )
      for axis, quant in quants.items()
    }
    return made, tensor_stats.amax(x) if watched else None

  def quantize_produced(producer, matrices, factors, quants, watched=False):
    calls.append(producer.name)
    results = _by_formula(producer, matrices, factors)
    made = [
      {axis: quantize.quantize(y, quant, contraction=axis) for axis, quant in of_result.items()}
      for y, of_result in zip(results, quants, strict=True)
    ]
    return made, [tensor_stats.amax(y) for y in results] if watched else []

  def multiply(a, b, accumulate, out_dtype, spare, add_to=None):
    assert spare == 0
    made = reference.scaled_matmul(a, b.in_one_piece(), accumulate, out_dtype)
    return made if add_to is None else add_to + made

  monkeypatch.setattr(quantize_sm90, "quantize_matrix", quantize_matrix)
  monkeypatch.setattr(quantize_sm90, "quantize_produced", quantize_produced)
  monkeypatch.setattr(mosaic_sm90_lib, "scaled_matmul", multiply)
  return calls


@pytest.fixture
def formulas(monkeypatch):
  """SwiGLU as the producers compute it: exponentials that differ in their last bit aside."""
  monkeypatch.setattr(elementwise, "silu_mul", _silu_mul)


def _sites(names, recipe="block_128", loud=(), backend="mosaic_sm90"):
  """Sites by name; recipe: of all, or by name; loud: names of those that ask for everything."""
  found = {}
  for name in names:
    site = variants.single(recipe if isinstance(recipe, str) else recipe[name], name=name)
    backends = tuple(
      backend if getattr(site.recipe, p).is_quantized else "xla" for p in ("fwd", "dgrad", "wgrad")
    )
    tap = jnp.zeros((3, tensor_stats.LOUD if name in loud else tensor_stats.QUIET), jnp.float32)
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


def _run(p, x, g, sites, wrap=lambda f: f, waiting=WIDE):
  """Output, gradients and observations of a feed-forward layer."""
  execution = ComputeConfig(residuals=waiting)

  @jax.jit
  def run(p, x, g, taps):
    def apply(p, x, taps):
      return mlp_swiglu.apply(p, site_tree.with_taps(sites, taps), x, CONTEXT, CFG, execution)[0]

    y, pull = jax.vjp(wrap(apply), p, x, taps)
    return y, *pull(g)

  return run(p, x, g, site_tree.taps(sites))


def _assert_same(got, want):
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
    np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def _plainly(monkeypatch):
  monkeypatch.setattr(operands, "can_fuse_prologue", lambda *_: False)


# Times that each is made: in both directions; once more where the forward pass is computed again;
# once where its FP8 is kept.
SAME = [
  pytest.param("block_128", (), lambda f: f, 2, WIDE, id="quiet", marks=pytest.mark.slow),
  pytest.param("block_128_hybrid", ("up", "down"), jax.checkpoint, 3, GROUPS, id="remat, groups"),
  pytest.param(
    "block_128_pow2 saved", ("gate",), lambda f: f, 1, WIDE, id="saved", marks=pytest.mark.slow
  ),
  pytest.param(
    "block_128 saved", (), lambda f: f, 1, GROUPS, id="saved, groups", marks=pytest.mark.slow
  ),
]


@pytest.mark.parametrize("recipe, loud, wrap, times, waiting", SAME)
def test_a_layer_is_the_same_bit_for_bit(
  rng, calls, formulas, monkeypatch, recipe, loud, wrap, times, waiting
):
  """Output, gradients and what the sites see."""
  layer, sites = _layer(rng), _sites(("gate", "up", "down"), recipe, loud)
  got = _run(*layer, sites, wrap, waiting)
  produced = collections.Counter(call for call in calls if call != "identity")
  assert produced == dict(rms_norm=times, swiglu=times, swiglu_backward=1)
  _plainly(monkeypatch)
  calls.clear()
  want = _run(*layer, sites, wrap, waiting)
  assert set(calls) == {"identity"}
  _assert_same(got, want)


@pytest.mark.parametrize("shape", [(2, 2, 2), pytest.param((1, 2, 4), marks=pytest.mark.slow)])
def test_a_layer_on_a_mesh_is_the_same_bit_for_bit(rng, calls, formulas, monkeypatch, shape):
  """Rows, features and weights are split; sources and factors lie where their letters do."""
  p, x, g = _layer(rng, dict(B=4, L=64, D=256, F=512))
  layout = axes.Layout(mesh.make(shape), WEIGHTS, ACTS)
  letters = dict(norm="D", gate="DF", up="DF", down="FD")
  p = {k: jax.device_put(w, layout.weight_sharding(letters[k])) for k, w in p.items()}
  x, g = (jax.device_put(t, layout.act_sharding("BLD")) for t in (x, g))
  sites = {
    k: dataclasses.replace(s, layout=layout) for k, s in _sites(("gate", "up", "down")).items()
  }
  got = _run(p, x, g, sites)
  assert {"rms_norm", "swiglu", "swiglu_backward"} <= set(calls)
  _plainly(monkeypatch)
  _assert_same(got, _run(p, x, g, sites))


MIXED = [
  # Somebody reads the norm's output in BF16: it is written, once.
  (dict(gate="block_128", up="bf16", down="block_128"), {"swiglu": 2}),
  (dict(gate="bf16", up="bf16", down="block_128"), {"swiglu": 2}),
  (dict(gate="block_128", up="block_128", down="bf16"), {"rms_norm": 2}),
  # What a site remembers is one scale, and of the whole tensor.
  (dict(gate="block_128", up="block_128", down="tensor_delayed"), {"rms_norm": 2}),
  # Scales and what waits for the backward pass may differ from linear to linear.
  (
    dict(gate="block_128_pow2", up="block_128 saved", down="block_128"),
    {"rms_norm": 3, "swiglu": 2, "swiglu_backward": 1},
  ),
]


@pytest.mark.parametrize("recipes_, fused", MIXED)
def test_who_may_compute_it_in_the_quantizer(rng, calls, recipes_, fused):
  layer = jax.eval_shape(lambda: _layer(rng, SIZES))
  sites = _sites(recipes_, recipes_)
  jax.eval_shape(lambda p, x, g: _run(p, x, g, sites), *layer)
  found = collections.Counter(calls)
  del found["identity"]
  assert found == fused


@pytest.mark.parametrize("of_k, times", [("block_128", 2), ("block_128 saved", 3), ("bf16", 0)])
def test_one_that_reads_it_in_16_bits_has_it_written_for_all(rng, calls, of_k, times):
  x, w = _normal(rng, 2, 64, 128), _normal(rng, 128, 128, dtype=jnp.float32)
  sites = _sites("qk", dict(q="block_128", k=of_k))

  def run(x, ws):
    h = prologue.rms_norm(x, jnp.ones(128), EPS)
    return dots(("BLD,DF->BLF",) * 2, h, ws, [sites["q"], sites["k"]])

  jax.eval_shape(lambda x, ws: jax.vjp(run, x, ws)[1]((x, x)), x, (w, w))
  assert calls.count("rms_norm") == times


def test_on_other_backends_it_is_a_plain_array(rng, calls):
  layer = jax.eval_shape(lambda: _layer(rng, SIZES))
  sites = _sites(("gate", "up", "down"), backend="reference")
  jax.eval_shape(lambda p, x, g: _run(p, x, g, sites), *layer)
  assert not calls


def test_rows_and_columns_of_factors_are_those_of_the_matrix(rng, calls):
  """A norm over the heads alone has no factor per row of what `o` contracts."""
  x, weight = _normal(rng, 2, 64, 4, 32), jnp.ones(32)
  w, site = _normal(rng, 4, 32, 128, dtype=jnp.float32), _sites(("o",))["o"]
  make = jax.jit(lambda x: dot("BLHK,HKD->BLD", x, w, site))
  got = make(prologue.rms_norm(x, weight, EPS))
  assert "rms_norm" not in calls
  np.testing.assert_array_equal(got, make(elementwise.rms_norm(x, weight, EPS)))


def test_one_site_under_vmap_is_refused(rng, calls):
  p, x, g = _layer(rng)
  sites = _sites(("gate", "up", "down"))
  with pytest.raises(ValueError, match="used under vmap"):
    jax.eval_shape(lambda x: jax.vmap(lambda x: _run(p, x, g, sites))(x), x[None])


@pytest.mark.slow
def test_a_layer_by_the_kernels_themselves(rng, interpreted, formulas, monkeypatch):
  """Norm, SwiGLU and its gradients in interpreted kernels, and written by XLA in between."""
  layer = _layer(rng, dict(B=1, L=128, D=128, F=128))
  sites = _sites(("gate", "up", "down"), "block_128_pow2 saved")
  got = _run(*layer, sites)
  _plainly(monkeypatch)
  _assert_same(got, _run(*layer, sites))


@pytest.mark.parametrize("make", [prologue.silu_mul, lambda x, w: prologue.rms_norm(x, w[0], 1e-5)])
def test_what_waits_for_the_backward_pass_is_what_it_was_computed_from(make):
  sources = jnp.ones((6, 40), jnp.bfloat16), jnp.ones((6, 40), jnp.bfloat16)
  _, pull = jax.vjp(lambda *of: make(*of).value(), *sources)
  kept = [x for x in jax.tree.leaves(pull) if x.shape == (6, 40)]
  assert kept and all(x.dtype == jnp.bfloat16 for x in kept)
