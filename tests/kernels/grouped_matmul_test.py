"""Grouped products: exact on lattices for any division of tokens, by the kernel and without it."""

import dataclasses

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
from lattice import lattice

from fp8jax.kernels import choose
from fp8jax.kernels.gemm import grouped as gm
from fp8jax.kernels.gemm import grouped_reference
from fp8jax.quantization import quantize, scaled_matrix
from fp8jax.recipe import library

# Powers of two: a tile with few tokens has any amax, and integers up to 7 stay exact.
BLOCK = library.RECIPES["block_128_pow2"]
# Tokens per expert: even; none for the first and the last; all for one; a token here and there.
SIZES = {"even": (100, 100, 100), "holes": (0, 299, 1, 0), "one": (0, 300), "few": (1, 1, 298)}
T, D, F = kernel_cases.GROUPED


def _operands(rng, sizes):
  """Tokens and gradients sorted by expert, weights, and the layout."""
  groups = jax.jit(gm.Groups.of, static_argnums=1)(np.int32(sizes), T)
  return lattice(rng, T, D), lattice(rng, T, F), lattice(rng, len(sizes), D, F), groups


def _weights(w, spec, contraction):
  """[G, rows, contraction] of [G, D, F]."""
  made = [quantize.quantize(jnp.asarray(x), spec, contraction=contraction) for x in w]
  data, scale = (jnp.stack([getattr(m, name) for m in made]) for name in ("data", "scale"))
  return scaled_matrix.ScaledMatrix(data, scale, made[0].tile)


def _products(x, g, w, groups, backend):
  """Forward, data gradient, weight gradient, tokens gathered."""
  xs, gs = groups.lay_out(jnp.asarray(x)), groups.lay_out(jnp.asarray(g))
  y = gm.grouped_matmul(
    quantize.quantize(xs, BLOCK.fwd.lhs), _weights(w, BLOCK.fwd.rhs, 0), groups,
    backend=backend, out_dtype=jnp.float32,
  )  # fmt: skip
  narrow_g = quantize.quantize(gs, BLOCK.dgrad.lhs)
  dx = gm.grouped_matmul(
    narrow_g, _weights(w, BLOCK.dgrad.rhs, 1), groups, backend=backend, out_dtype=jnp.float32
  )
  dw = gm.grouped_weight_gradient(
    quantize.quantize(xs, BLOCK.wgrad.lhs, contraction=0),
    quantize.quantize(gs, BLOCK.wgrad.rhs, contraction=0), groups, len(w), backend=backend,
  )  # fmt: skip
  return groups.gather(y), groups.gather(dx), dw


def _oracle(x, g, w, sizes):
  x, g, w = (t.astype(np.float64) for t in (x, g, w))
  ends = np.cumsum(sizes)
  parts = [slice(end - size, end) for end, size in zip(ends, sizes)]
  y = np.concatenate([x[p] @ w[e] for e, p in enumerate(parts)])
  dx = np.concatenate([g[p] @ w[e].T for e, p in enumerate(parts)])
  return y, dx, np.stack([x[p].T @ g[p] for p in parts])


@pytest.mark.parametrize(
  "backend, sizes",
  [
    pytest.param(
      b, SIZES[s], marks=[pytest.mark.slow] if s in ("one", "few", "even") else [], id=f"{b} {s}"
    )
    for b in ("reference", "mosaic_sm90")
    for s in SIZES
  ],
)
def test_products_are_exact_on_lattice(rng, interpreted, backend, sizes):
  x, g, w, groups = _operands(rng, sizes)
  run = jax.jit(_products, static_argnames="backend")
  wanted = _oracle(x, g, w, sizes)
  for got, want in zip(run(x, g, w, groups, backend=backend), wanted, strict=True):
    np.testing.assert_array_equal(got, want)


def test_one_program_takes_any_division(rng):
  """Sizes are values: nothing is recompiled, and tiles and places are those counted by hand."""
  count = 0

  @jax.jit
  def place(sizes):
    nonlocal count
    count += 1
    return gm.Groups.of(sizes, T)

  for sizes in ((100, 0, 200), (0, 0, 300), (129, 128, 43)):
    found = place(jnp.asarray(sizes, jnp.int32))
    tiles = [e for e, n in enumerate(sizes) for _ in range(max(-(-n // 128), 1))]
    tiles += [2] * (gm.num_tiles(T, 3) - len(tiles))
    np.testing.assert_array_equal(found.of_tile, tiles)
    firsts = [tiles.index(e) * 128 for e in range(3)]
    want = [firsts[e] + i for e, n in enumerate(sizes) for i in range(n)]
    np.testing.assert_array_equal(found.place, want)
  assert count == 1


@pytest.mark.parametrize("backend", ["reference", "mosaic_sm90"])
def test_weight_gradient_adds_to_what_is_there(rng, interpreted, backend):
  sizes = (130, 0, 170)
  x, g, w, groups = _operands(rng, sizes)
  before = lattice(rng, *w.shape)

  @jax.jit
  def run(x, g, groups, before):
    xs, gs = groups.lay_out(x), groups.lay_out(g)
    return gm.grouped_weight_gradient(
      quantize.quantize(xs, BLOCK.wgrad.lhs, contraction=0),
      quantize.quantize(gs, BLOCK.wgrad.rhs, contraction=0),
      groups, len(w), backend=backend, add_to=before,
    )  # fmt: skip

  got = run(x, g, groups, before)
  np.testing.assert_array_equal(got, before + _oracle(x, g, w, sizes)[2])


def test_grouped_matmul_refuses_wrong_layouts_of_operands(rng):
  x, g, w, groups = _operands(rng, (100, 200))
  a = jax.jit(lambda x: quantize.quantize(x, BLOCK.fwd.lhs))(x)

  def multiply(a, w, backend="reference"):
    gm.grouped_matmul(a, _weights(w, BLOCK.fwd.rhs, 0), groups, backend=backend)

  def multiply_laid_out(x, w):
    multiply(quantize.quantize(groups.lay_out(x), BLOCK.fwd.lhs), w, "xla")

  with pytest.raises(ValueError, match="from Groups.lay_out"):
    jax.eval_shape(multiply, a, w)
  with pytest.raises(ValueError, match="rows of tokens last"):
    gm.grouped_weight_gradient(a.T, a.T, groups, 2, backend="reference")
  with pytest.raises(ValueError, match="'xla' multiplies no groups"):
    jax.eval_shape(multiply_laid_out, x, w)


@pytest.mark.parametrize("operand", ["lhs", "rhs"])
@pytest.mark.parametrize("extent", [0, 256])
def test_other_scales_along_k_are_refused_though_sums_are_promoted_alike(operand, extent):
  fwd = library.RECIPES["block_128"].fwd
  quant = dataclasses.replace(getattr(fwd, operand), tile=(128, extent))
  problem = choose.GemmProblem(
    256, 128, 512, dataclasses.replace(fwd, **{operand: quant}), choose.Device("cpu")
  )
  assert problem.gemm.accumulate == 128
  assert "multiplies scales per 128 of K" in (grouped_reference.supports(problem) or "")
  assert grouped_reference.supports(dataclasses.replace(problem, gemm=fwd)) is None


def test_the_backend_is_chosen_with_a_reason():
  def chosen(gemm, platform, capability, wanted="auto"):
    device = choose.Device(platform, capability)
    return choose.grouped_gemm(choose.GemmProblem(256, 128, 128, gemm, device), wanted)

  assert chosen(BLOCK.fwd, "gpu", 90) == choose.Choice("mosaic_sm90")
  on_cpu = chosen(BLOCK.fwd, "cpu", 0)
  assert on_cpu.backend == "reference" and "Hopper" in on_cpu.notes[0]
  # On a GPU emulation is asked for by name.
  assert "no sm_100 kernel yet" in chosen(BLOCK.fwd, "gpu", 100).reason
  assert chosen(BLOCK.fwd, "gpu", 100, "reference").backend == "reference"
  whole = library.RECIPES["tensor_current"].fwd
  assert "scales per 128 of K" in chosen(whole, "cpu", 0).reason
  assert "FP8 operands" in chosen(library.RECIPES["bf16"].fwd, "gpu", 90).reason
  with pytest.raises(ValueError, match="'xla' multiplies no groups"):
    chosen(BLOCK.fwd, "gpu", 90, "xla")
