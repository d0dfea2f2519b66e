"""Narrow copies that wait for the backward pass: whose gradient it is, what waits, where."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import variants

from fp8jax import axes, mesh
from fp8jax import params as params_lib
from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops import elementwise, prologue, residuals, site_tree
from fp8jax.ops.dots import dots
from fp8jax.ops.residuals import ResidualFormats
from fp8jax.ops.swiglu_mlp import swiglu_mlp
from fp8jax.quantization import quantized_tensor

QUANT = residuals.QUANTS["e4m3_16"]
EPS = 1e-6
# float32 against float64, relative to the largest element.
FLOAT32 = 1e-6


def _copy(x, name: str) -> np.ndarray:
  """float64: E4M3 under the smallest power of two that lets a group of 16 pass, or E2M1 in groups
  of 32, whose largest is given E2M1's largest exponent, 2."""
  is_mx = name == "mxfp4"
  dtype = ml_dtypes.float4_e2m1fn if is_mx else ml_dtypes.float8_e4m3fn
  groups = np.asarray(x, np.float64).reshape(-1, 32 if is_mx else 16)
  largest = np.abs(groups).max(-1, keepdims=True)
  fraction, exponent = np.frexp(largest / (1 if is_mx else 448))
  scale = np.ldexp(1.0, exponent - (3 if is_mx else fraction == 0.5))
  scaled = np.clip(groups / scale, -6, 6) if is_mx else groups / scale
  return (scaled.astype(dtype).astype(np.float64) * scale).reshape(x.shape)


def _norm_gradients(x, w, g):
  """Of x / rms(x) * w, in float64."""
  r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
  return r * (g * w - x * r**2 * (g * w * x).mean(-1, keepdims=True)), (g * x * r).sum((0, 1))


def _swiglu_gradients(gate, up, g):
  s = 1 / (1 + np.exp(-gate))
  return g * up * s * (1 + gate * (1 - s)), g * gate * s


@pytest.mark.parametrize("what, name", [
  ("norm", "e4m3_16"), ("swiglu", "e4m3_16"), ("swiglu", "mxfp4"),
  pytest.param("norm", "mxfp4", marks=pytest.mark.slow),
])  # fmt: skip
def test_values_are_exact_and_gradients_those_at_the_copy(rng, what, name):
  """float64 NumPy, copies included; wide magnitudes, so that groups differ."""
  save = residuals.QUANTS[name]
  first, second, g = rng.standard_normal((3, 2, 8, 64)).astype(np.float32)
  first *= np.exp(rng.standard_normal(first.shape)).astype(np.float32)
  if what == "norm":
    first *= np.exp(6 * rng.standard_normal(first.shape)).astype(np.float32)
    second = second[0, 0]
    plain, lately = elementwise.rms_norm, prologue.rms_norm
    arguments, oracle = (EPS,), _norm_gradients
    copies = (_copy(first, name), np.float64(second))
  else:
    plain, lately, arguments, oracle = (
      elementwise.silu_mul,
      prologue.silu_mul,
      (),
      _swiglu_gradients,
    )
    copies = (_copy(first, name), _copy(second, name))
  y, pull = jax.vjp(lambda *xs: lately(*xs, *arguments, save=save).value(), first, second)
  np.testing.assert_array_equal(y, plain(first, second, *arguments))
  wide = (np.float64(first), np.float64(second))
  for got, want, exact in zip(pull(g), oracle(*copies, g), oracle(*wide, g)):
    room = FLOAT32 * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=room)
    off = np.abs(want - exact).max()
    most = 2.0**-2 if name == "e4m3_16" else 1.0
    assert 100 * room < off < most * np.abs(exact).max()


def test_copies_have_the_bytes_that_are_said():
  nbytes = quantized_tensor.nbytes
  assert {name: nbytes(quant) for name, quant in residuals.QUANTS.items() if quant} == {
    "bf16": 2, "e4m3_16": 1 + 1 / 16, "e4m3_128": 1 + 1 / 128, "mxfp4": 0.5 + 1 / 32,
  }  # fmt: skip


def test_copies_of_four_bits_are_packed_in_the_program(rng):
  """XLA's own count of the result's bytes, a scan's stack of copies as a layer's are."""

  def copies(xs):
    one = residuals.QUANTS["mxfp4"]
    return jax.lax.scan(lambda c, x: (c, residuals.compress(x, one)), 0, xs)[1]

  program = jax.jit(copies).lower(jax.ShapeDtypeStruct((4, 64, 128), jnp.float32)).compile()
  stored = program.memory_analysis().output_size_in_bytes
  assert stored <= 4 * 64 * 128 * (0.5 + 1 / 32) + 64
  x = rng.standard_normal((4, 64, 128)).astype(np.float32)
  back = np.asarray(jax.jit(lambda x: copies(x).unpack())(x))
  data, scale = oracle.quantize(x.reshape(-1, 128), "e2m1", (1, 32), "floor")
  np.testing.assert_array_equal(back.reshape(-1, 128), data.astype(np.float32) * scale)


EQUATIONS = ("BLD,DF->BLF", "BLD,DF->BLF", "BLF,FD->BLD")


def _lattice_layer(rng):
  """(x, weights) with x, gate and up on E4M3's grid whatever a group's scale: integers to 16."""
  x = rng.integers(-4, 5, (2, 16, 64)).astype(np.float32)
  few = [rng.integers(-1, 2, shape) * (rng.random(shape) < 0.05) for shape in 2 * ((64, 96),)]
  few = [np.where(np.cumsum(np.abs(w), 0) <= 4, w, 0).astype(np.float32) for w in few]
  return x, (*few, rng.standard_normal((96, 64)).astype(np.float32))


@pytest.mark.parametrize("recipe", [
  pytest.param("bf16", marks=pytest.mark.slow),
  pytest.param("block_128_pow2", marks=pytest.mark.slow), "block_128_pow2 saved",
])  # fmt: skip
def test_what_the_copy_holds_exactly_costs_nothing(rng, recipe):
  """Bit for bit the gradients without copies, through GEMMs that keep their own input or do not.

  An operation at a time: fused differently, the same formulas differ in their last bit.
  """
  x, ws = _lattice_layer(rng)
  assert max(np.abs(x @ w).max() for w in ws[:2]) <= 16
  norm = 1 + 0.1 * rng.standard_normal(64).astype(np.float32)

  def run(keep):
    def both(x, x_of_norm, norm, ws):
      sites = [variants.single(recipe, name=n) for n in "abcde"]
      h = prologue.rms_norm(x_of_norm, norm, EPS, save=keep)
      ys = dots(EQUATIONS[:2], h, ws[:2], sites[:2])
      return *ys, swiglu_mlp(EQUATIONS, x, ws, sites[2:], "linear", keep)

    ys, pull = jax.vjp(both, x, x, norm, ws)
    return jax.tree.leaves((ys, pull(ys)))

  for got, want in zip(run(QUANT), run(None), strict=True):
    np.testing.assert_array_equal(got, want)


MODEL = ModelConfig(
  architecture="qwen3", vocab_size=64, hidden_size=64, intermediate_size=144, num_layers=2,
  num_heads=2, num_kv_heads=1, head_dim=48, max_positions=64, qk_norm=True, init_std=0.1,
)  # fmt: skip
GROUPS = ResidualFormats(norm_inputs=QUANT, gate_up=QUANT)


def _loss(run, recipe):
  """(function of weights and taps, its arguments)."""
  rng = np.random.default_rng(0)
  shape = (2, 32)
  batch = {
    name: rng.integers(0, 64, shape).astype(np.int32) for name in ("tokens_BL", "targets_BL")
  }
  batch["weights_BL"] = np.ones(shape, np.float32)
  batch["positions_BL"] = np.tile(np.arange(32, dtype=np.int32), (2, 1))
  batch["segments_BL"] = np.ones(shape, np.int32)
  recipe, save = variants.split(recipe)
  rules = (("head", "bf16"), (".*", recipe))
  sites = site_tree.build_sites(transformer.site_params(MODEL), MODEL.dims, rules, save=save)

  def loss(weights, taps):
    seen_by = site_tree.with_taps(sites, taps)
    return transformer.loss(weights, seen_by, batch, MODEL, run) / 64

  weights = params_lib.tree_map(
    lambda p: (
      p.std * rng.standard_normal(params_lib.shape(p, MODEL.dims)).astype(np.float32)
      if p.init == "normal"
      else np.ones(params_lib.shape(p, MODEL.dims), np.float32)
    ),
    transformer.params(MODEL),
  )
  return loss, (weights, site_tree.taps(sites))


def _waiting(run, recipe="bf16") -> collections.Counter:
  """{"float32 F": how many} of what is kept of all layers with the widths D, F, H x K or G x K."""
  loss, arguments = _loss(run, recipe)
  leaves = jax.eval_shape(lambda *a: jax.tree.leaves(jax.vjp(loss, *a)[1]), *arguments)
  found = collections.Counter()
  names = {64: "D", 144: "F", 96: "HK", 48: "GK"}
  for leaf in leaves:
    # Of FP8 inputs of weight gradients tokens are last.
    is_of_layers = len(leaf.shape) > 2 and leaf.shape[0] == 2
    if is_of_layers and (leaf.shape[1:3] == (2, 32) or leaf.dtype.itemsize == 1):
      width = leaf.size // 128
      found[f"{leaf.dtype} {names.get(width, '')}"] += width in names
  return +found


POLICIES = [
  (ComputeConfig(), "bf16", {}),
  (ComputeConfig(remat="linears"), "bf16", {}),
  # Narrow inputs of GEMMs cannot be made of the copies again; that of `o` can of what is kept.
  # What reads a norm shares one.
  (ComputeConfig(remat="linears"), "tensor_current saved", {"D": 2, "F": 1}),
  (ComputeConfig(remat="operands"), "tensor_current saved", {"D": 2, "F": 1, "HK": 1}),
]


@pytest.mark.parametrize("run, recipe, of_gemms", POLICIES, ids=lambda x: getattr(x, "remat", ""))
def test_copies_wait_and_nothing_wide_does(run, recipe, of_gemms):
  """Of the stream, gate and up; queries, keys, values and attention's output are what they were."""
  before = _waiting(run, recipe)
  assert before["float32 F"] >= 2 and before["float32 D"] >= 1
  found = _waiting(dataclasses.replace(run, residuals=GROUPS), recipe)
  assert not found["float32 F"] and not found["float32 D"]
  # Two norms and those of queries and keys; gate and up.
  codes = collections.Counter({"D": 2, "HK": 1, "GK": 1, "F": 2}) + collections.Counter(of_gemms)
  assert {k: found[f"float8_e4m3fn {k}"] for k in codes} == codes
  assert found["float32 HK"] <= before["float32 HK"]
  assert found["float32 GK"] <= before["float32 GK"]


def test_of_a_layer_computed_again_one_copy_waits():
  full = ComputeConfig(remat="full")
  assert _waiting(full) == {"float32 D": 1}
  found = _waiting(dataclasses.replace(full, residuals=ResidualFormats(layer_inputs=QUANT)))
  assert found == {"float8_e4m3fn D": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat, waiting",
  [("none", GROUPS), ("full", ResidualFormats(layer_inputs=QUANT))],
  ids=["norms", "residual"],
)
def test_the_loss_is_the_same_and_gradients_are_near(remat, waiting):
  """Within half a step of E4M3, relative to the whole gradient."""

  def run(waiting):
    loss, arguments = _loss(ComputeConfig(remat=remat, residuals=waiting), "bf16")
    return jax.jit(jax.value_and_grad(loss))(*arguments)

  (loss, got), (exact_loss, exact) = run(waiting), run(ResidualFormats())
  assert loss == exact_loss
  flat = [np.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (got, exact)]
  error = np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])
  assert 1e-4 < error < 2.0**-4


@pytest.mark.parametrize("name", ["e4m3_16", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_copies_lie_where_the_tensor_does(rng, name):
  """And are those of one device, bit for bit."""
  rules = axes.as_rules(dict(B=("data", "fsdp"), F="tensor"))
  layout = axes.Layout(mesh.make((2, 2, 2)), rules, rules)
  gate, up = rng.standard_normal((2, 4, 8, 64)).astype(np.float32)

  def run(gate, up):
    y, pull = jax.vjp(
      lambda *xs: prologue.silu_mul(*xs, save=residuals.QUANTS[name]).value(), gate, up
    )
    return pull(y), jax.tree.leaves(pull)

  want, _ = jax.jit(run)(gate, up)
  there = layout.act_sharding("BLF")
  got, waiting = jax.jit(run)(*(jax.device_put(x, there) for x in (gate, up)))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)
  narrow = [x for x in waiting if x.dtype in (jnp.float8_e4m3fn, jnp.uint8, jnp.float4_e2m1fn)]
  assert len(narrow) == 4
  assert all(x.sharding.is_equivalent_to(there, 3) for x in narrow)
