"""The Hopper kernel without a Hopper: interpreted on CPU, races looked for.

Interpretation proves the arithmetic and the hand-over between threads; that it compiles, and to
what, is tests/kernels/mosaic_aot_test.py's matter.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import kernel_cases
import matmul_suite as suite
import numpy as np
import pytest
import shapes
from jax.extend import core as jex_core
from lattice import lattice

from fp8jax.errors import UserError
from fp8jax.kernels import choose, self_test
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
from fp8jax.kernels.gemm import tile_config, xla_sm90
from fp8jax.kernels.gemm.tile_config import Config
from fp8jax.kernels.quantize import mosaic_sm90 as quantizer
from fp8jax.kernels.quantize import prologues
from fp8jax.quantization import quantize, scaled_matrix
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.recipe import library
from fp8jax.recipe.gemm import Gemm
from fp8jax.recipe.quant import CURRENT, WHOLE, Hadamard, Rounding

HOPPER = choose.Device("gpu", 90)
# Products of which it runs those that differ in formats, tiles or scales.
GEMMS = {
  f"{name}-{which}": getattr(library.RECIPES[name], which)
  for name in ("block_128", "block_128_pow2", "block_128_hybrid")
  for which in ("fwd", "dgrad", "wgrad")
}


pytestmark = pytest.mark.usefixtures("interpreted")


def _problem(gemm: Gemm, m=256, n=256, k=256, device=HOPPER):
  return choose.GemmProblem(m, n, k, gemm, device)


# What no other case here has in common with them is quick; the rest is for `make test-all`. Scales
# that are powers of two are multiplied by the same program.
_QUICK = ("block_128_hybrid-dgrad",)
_LONG = ((200, 384, 384), (129, 24, 704))


@pytest.mark.parametrize(
  "name, shape",
  [
    pytest.param(name, (136, 136, 256), marks=[] if name in _QUICK else [pytest.mark.slow])
    for name in GEMMS
  ]
  + [
    pytest.param(name, shape, marks=[pytest.mark.slow] if turn != (shape in _LONG) else [])
    for shape in shapes.HOPPER
    for turn, name in enumerate(("block_128-fwd", "block_128-wgrad"))
  ],
)
def test_kernel_is_exact_on_lattice(rng, name, shape):
  assert mosaic_sm90_lib.supports(_problem(GEMMS[name], *shape)) is None
  suite.check_exact_on_lattice("mosaic_sm90", GEMMS[name], shape, rng)


@pytest.mark.parametrize(
  "name", ["block_128-fwd", pytest.param("block_128-wgrad", marks=pytest.mark.slow)]
)
def test_kernel_sums_what_the_oracle_quantizes(rng, name):
  suite.check_sum_of_quantized_operands("mosaic_sm90", GEMMS[name], (136, 200, 384), rng)
  suite.check_extreme_scales_stay_finite("mosaic_sm90", GEMMS[name], rng)


@pytest.mark.parametrize(
  "name", ["block_128-fwd", pytest.param("block_128-wgrad", marks=pytest.mark.slow)]
)
def test_scales_whose_product_leaves_float32_give_no_wrong_number(rng, name):
  """Above it nothing finite comes out, below it what is lost is below 2^-101: the contract."""
  gemm = GEMMS[name]

  def run(a, b):
    a, b = suite.narrow(a, gemm.lhs), suite.narrow(b, gemm.rhs)
    return np.asarray(mosaic_sm90_lib.matmul(a, b, out_dtype=jnp.float32))

  assert not np.isfinite(run(*suite.huge(gemm, rng))).any()
  a, b = suite.tiny(gemm, rng)
  want = a.astype(np.float64) @ b.astype(np.float64).T
  assert 2.0**-126 < np.abs(want).max() < 2.0**-101
  assert np.abs(run(a, b) - want).max() <= np.abs(want).max()


def _stepped(rng, *shape):
  """The lattice, its 128x128 tiles scaled by powers of two: every scale is another."""
  x = lattice(rng, *shape)
  powers = 2.0 ** rng.integers(-3, 4, [-(-n // 128) for n in shape])
  return x * np.kron(powers, np.ones((128, 128)))[: x.shape[0], : x.shape[1]].astype(np.float32)


def _operands(rng, gemm: Gemm, m, n, k, make=_stepped):
  a, b = make(rng, m, k), make(rng, n, k)
  return a, b, suite.narrow(a, gemm.lhs), suite.narrow(b, gemm.rhs)


PRODUCTS = [("block_128-fwd", jnp.bfloat16), ("block_128-wgrad", jnp.float32)]


# Clusters, whose programs share what they read. `test_kernels_are_tried_before_a_run` and the sums
# below cut otherwise; the rest is for `make test-all`.
_QUICK_CONFIG = 6


@pytest.mark.parametrize(
  "config, name, dtype",
  [
    pytest.param(config, *product, marks=[] if (i, j) == (_QUICK_CONFIG, 0) else [pytest.mark.slow])
    for i, config in enumerate(kernel_cases.CONFIGS)
    for j, product in enumerate(PRODUCTS)
  ],
  ids=str,
)
def test_kernel_is_exact_however_the_work_is_cut_up(rng, name, dtype, config):
  if tile_config.smem_bytes(config, dtype) > tile_config.SMEM_BYTES:
    config = dataclasses.replace(config, stages=config.stages - 1)
  a, b, narrow_a, narrow_b = _operands(rng, GEMMS[name], *kernel_cases.LARGE)
  got = mosaic_sm90_lib.matmul(narrow_a, narrow_b, out_dtype=dtype, config=config)
  want = a.astype(np.float64) @ b.astype(np.float64).T
  np.testing.assert_array_equal(got, jnp.asarray(want, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", PRODUCTS)
def test_an_element_has_the_same_bits_however_the_work_is_cut_up(rng, name, dtype):
  """Also of fewer rows. The sum of 128 products is exact here, as it is one instruction's on a GPU;
  with any scales, that of several depends on its order.
  """
  _, _, *both = _operands(rng, GEMMS[name], *kernel_cases.LARGE, lattice)
  narrow_a, narrow_b = (
    dataclasses.replace(x, scale=jnp.asarray(rng.uniform(1, 2, x.scale.shape), jnp.float32))
    for x in both
  )
  wide, results = jnp.float32, []
  for config in kernel_cases.CONFIGS:
    if tile_config.smem_bytes(config, wide) > tile_config.SMEM_BYTES:
      config = dataclasses.replace(config, stages=config.stages - 1)
    results.append(mosaic_sm90_lib.matmul(narrow_a, narrow_b, out_dtype=wide, config=config))
  want = narrow_a.dequantize() @ narrow_b.dequantize().T
  assert (np.asarray(want) != results[0]).any()  # in another order it is another number
  for result in results[1:]:
    np.testing.assert_array_equal(result, results[0])
  few = dataclasses.replace(narrow_a, data=narrow_a.data[:137], scale=narrow_a.scale[:137])
  got = mosaic_sm90_lib.matmul(few, narrow_b, out_dtype=wide)
  np.testing.assert_array_equal(got, results[0][:137])


@pytest.mark.parametrize("shards, config", [
  pytest.param(4, None, marks=pytest.mark.slow), (2, Config(stages=3, cluster_m=2)),
], ids=str)  # fmt: skip
def test_kernel_reads_a_gathered_b_shard_by_shard(rng, shards, config):
  m, n, k = 136, 136, 512
  a, b, narrow_a, narrow_b = _operands(rng, GEMMS["block_128-fwd"], m, n, k)
  data = narrow_b.data.reshape(n, shards, k // shards).swapaxes(0, 1)
  gathered = dataclasses.replace(narrow_b, data=data)
  assert gathered.is_sharded and gathered.shape == (n, k)
  np.testing.assert_array_equal(gathered.dequantize(), b)
  got = mosaic_sm90_lib.matmul(narrow_a, gathered, out_dtype=jnp.float32, config=config)
  np.testing.assert_array_equal(got, a.astype(np.float64) @ b.astype(np.float64).T)


def test_shards_of_b_are_multiples_of_a_tile(rng):
  _, _, a, b = _operands(rng, GEMMS["block_128-fwd"], 8, 64, 384)
  halves = dataclasses.replace(b, data=b.data.reshape(64, 2, 192).swapaxes(0, 1))
  with pytest.raises(ValueError, match="K=192 each; expected a multiple of 128"):
    mosaic_sm90_lib.matmul(a, halves, out_dtype=jnp.bfloat16)


@pytest.mark.parametrize("n, dtype, stores", [
  (64, jnp.bfloat16, 1), (128, jnp.bfloat16, 2), (192, jnp.bfloat16, 2), (32, jnp.float32, 1),
])  # fmt: skip
def test_nothing_is_stored_beyond_the_only_tile_of_columns(rng, n, dtype, stores):
  """A store there falls on that tile on a GPU: Mosaic drops an axis of one tile with its index."""
  gemm = library.RECIPES["block_128"].fwd
  operands = _operands(rng, gemm, 136, n, 256)[2:]
  multiply = functools.partial(mosaic_sm90_lib.matmul, out_dtype=dtype)
  if dtype == jnp.float32:
    multiply = functools.partial(multiply, add_to=jnp.zeros((136, n)))
  text = str(jax.make_jaxpr(multiply)(*operands))
  assert len(re.findall(r"copy_smem_to_gmem\b", text)) == stores


def _names(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn.primitive.name
    for inner in jex_core.jaxprs_in_params(eqn.params):
      yield from _names(inner)


@pytest.mark.parametrize("config, loads, fetches", [
  (Config(tile_n=192, stages=4, producer="inline"), 2, 3),
  (Config(tile_n=128, stages=3), 1, 1),
  (Config(tile_n=160, stages=3, producer="inline"), 0, 3),
])  # fmt: skip
def test_a_slot_is_free_after_its_last_scales(rng, config, loads, fetches):
  """Between the tensor core's sums and the arrival; a GPU alone shows what TMA writes too early.
  A consumer that copies is two steps ahead, of four slots if they are released so late."""
  a, b = _operands(rng, GEMMS["block_128-wgrad"], 256, 384, 256)[2:]
  multiply = functools.partial(mosaic_sm90_lib.matmul, out_dtype=jnp.float32, config=config)
  names = list(_names(jax.make_jaxpr(multiply)(a, b).jaxpr))
  first, *_ = (n for n, name in enumerate(names) if name == "wgmma_accumulator_deref")
  after = names[first:]
  after = after[: after.index("barrier_arrive")]
  kept = [name for name in after if name in ("load", "commit_smem")]
  assert kept == ["load"] * loads + ["commit_smem"] * bool(loads)
  assert "commit_smem" in (names[:first] if not loads else after)
  # Of A, B and the scales of both: ahead of the loop, and in it.
  assert names.count("copy_gmem_to_smem") == 4 * fetches


@pytest.mark.parametrize("producer", ["warpgroup", "inline"])
def test_a_program_without_tiles_ends_well(rng, producer):
  """One tile for two clusters of two programs: the other cluster has none. jax 0.11's interpreter
  refuses a barrier at which somebody arrived and nobody waited any more."""
  a, b, narrow_a, narrow_b = _operands(rng, GEMMS["block_128-fwd"], 64, 64, 192)
  config = Config(tile_n=64, stages=3, cluster_m=2, producer=producer)
  got = mosaic_sm90_lib.matmul(narrow_a, narrow_b, out_dtype=jnp.float32, config=config)
  np.testing.assert_array_equal(got, a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.slow  # lattices and the oracle above
def test_kernel_equals_the_reference(rng):
  """bfloat16 out: float32 sums that differ in their last bits, rounded once."""
  for name in ("block_128-fwd", "block_128-wgrad"):
    gemm = GEMMS[name]
    normal = lambda rng, *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    _, _, a, b = _operands(rng, gemm, 136, 136, 640, normal)
    got, want = (
      gemm_api.scaled_matmul(a, b, accumulate=128, backend=backend, out_dtype=jnp.bfloat16)
      for backend in ("mosaic_sm90", "reference")
    )
    differs = np.abs(np.float32(got) - np.float32(want))
    ulp = np.float32(np.spacing(want.astype(jnp.bfloat16)))
    if jax.default_backend() == "gpu":
      magnitudes = np.inner(*(np.abs(np.float64(x.dequantize())) for x in (a, b)))
      assert np.all(differs <= ulp + suite.sum_budget() * magnitudes)
      continue
    assert np.max(differs / ulp) <= 1 and np.mean(differs > 0) < 1e-3


def test_kernel_hands_nan_on_and_no_further(rng):
  a, b, narrow_a, narrow_b = _operands(rng, GEMMS["block_128-fwd"], 64, 136, 384)
  data = np.array(narrow_a.data)
  data[3, 200] = np.nan
  broken = scaled_matrix.ScaledMatrix(data, narrow_a.scale, narrow_a.tile)
  got = np.asarray(mosaic_sm90_lib.matmul(broken, narrow_b, out_dtype=jnp.float32))
  assert np.isnan(got[3]).all()
  want = np.delete(a.astype(np.float64) @ b.astype(np.float64).T, 3, axis=0)
  np.testing.assert_array_equal(np.delete(got, 3, axis=0), want)


def test_kernel_under_vmap(rng):
  made = [_operands(rng, GEMMS["block_128-fwd"], 64, 72, 128) for _ in range(2)]
  a, b = (jax.tree.map(lambda *x: jnp.stack(x), *(m[i] for m in made)) for i in (2, 3))
  multiply = functools.partial(
    gemm_api.scaled_matmul, accumulate=128, backend="mosaic_sm90", out_dtype=jnp.float32
  )
  want = np.stack([m[0].astype(np.float64) @ m[1].astype(np.float64).T for m in made])
  np.testing.assert_array_equal(jax.vmap(multiply)(a, b), want)


@pytest.mark.parametrize("config", [
  pytest.param(None, marks=pytest.mark.slow), Config(tile_n=192, stages=3, producer="inline"),
  pytest.param(Config(tile_n=160, stages=3), marks=pytest.mark.slow),
])  # fmt: skip
def test_kernel_adds_to_what_is_there(rng, config):
  """The weight gradient of one microbatch after the other."""
  gemm, (m, n, k) = GEMMS["block_128-wgrad"], (200, 264, 256)
  before = lattice(rng, m, n)
  a, b, narrow_a, narrow_b = _operands(rng, gemm, m, n, k)
  total = mosaic_sm90_lib.matmul(
    narrow_a, narrow_b, out_dtype=jnp.float32, config=config, add_to=jnp.asarray(before)
  )
  np.testing.assert_array_equal(total, before + a.astype(np.float64) @ b.astype(np.float64).T)
  groups = jnp.zeros(k // 128, jnp.int32)
  with pytest.raises(ValueError, match="groups and a layer of a stack"):
    mosaic_sm90_lib.matmul(
      narrow_a, narrow_b, out_dtype=jnp.float32, groups=groups, num_groups=2,
      add_to=Entry(jnp.zeros((2, m, n)), 0),
    )  # fmt: skip
  with pytest.raises(ValueError, match=r"add_to is bfloat16.*expected both alike"):
    mosaic_sm90_lib.matmul(
      narrow_a, narrow_b, out_dtype=jnp.float32, add_to=jnp.zeros((m, n), jnp.bfloat16)
    )


def test_layers_under_vmap_are_read_and_added_one_by_one(rng):
  """Trials: of each its own layer, of stacks that no product copies whole."""
  made = [_operands(rng, GEMMS["block_128-wgrad"], 64, 64, 128) for _ in range(4)]
  a, b = (jax.tree.map(lambda *x: jnp.stack(x), *(one[i] for one in made)) for i in (2, 3))
  before = np.stack([lattice(rng, 2, 64, 64) for _ in range(2)])
  stacks = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), b)

  def add(a, stack, sums):
    return mosaic_sm90_lib.scaled_matmul(
      a, Entry(stack, 1), 128, jnp.float32, add_to=Entry(sums, 0)
    )

  firsts = jax.tree.map(lambda x: x[:2], a)
  got = jax.vmap(add)(firsts, stacks, jnp.asarray(before))
  want = before.astype(np.float64)
  for trial, (x, y) in enumerate(((0, 1), (1, 3))):
    want[trial, 0] += made[x][0].astype(np.float64) @ made[y][1].astype(np.float64).T
  np.testing.assert_array_equal(got, want)
  jaxpr = jax.make_jaxpr(jax.vmap(add))(firsts, stacks, jnp.asarray(before)).jaxpr
  (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
  assert {v.aval.ndim for v in loop.invars} == {3}  # trials of matrices, not of stacks


def test_a_sum_in_bfloat16_is_rounded_once(rng):
  """Data gradients of products of one input: the second is added before it is rounded."""
  a, b, narrow_a, narrow_b = _operands(rng, GEMMS["block_128-dgrad"], 136, 192, 256)
  before = (lattice(rng, 136, 192) * 1.25).astype(jnp.bfloat16)
  got = mosaic_sm90_lib.matmul(
    narrow_a, narrow_b, out_dtype=jnp.bfloat16, add_to=jnp.asarray(before)
  )
  exact = before.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64).T
  want = exact.astype(np.float32).astype(jnp.bfloat16)  # float32 holds these sums
  np.testing.assert_array_equal(exact, exact.astype(np.float32))
  np.testing.assert_array_equal(np.float32(got), np.float32(want))
  twice = (before.astype(np.float32) + (exact - before.astype(np.float64)).astype(np.float32)
           .astype(jnp.bfloat16).astype(np.float32)).astype(jnp.bfloat16)  # fmt: skip
  assert (np.float32(twice) != np.float32(want)).any()


@pytest.mark.parametrize("m, n, k, fits", [
  (136, 96, 192, True), pytest.param(136, 72, 256, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_kernel_reads_and_adds_to_a_layer_where_it_lies(rng, m, n, k, fits):
  """No copy of a layer is made where TMA moves it whole; other layers stay as they were."""
  fwd, wgrad = GEMMS["block_128-fwd"], GEMMS["block_128-wgrad"]
  made = [_operands(rng, fwd, m, n, k) for _ in range(3)]
  stack = jax.tree.map(lambda *x: jnp.stack(x), *(one[3] for one in made))
  a, _, narrow_a, _ = made[0]

  def forward(a, stack, i):
    return mosaic_sm90_lib.scaled_matmul(a, Entry(stack, i), 128, jnp.float32)

  got = jax.jit(forward)(narrow_a, stack, jnp.int32(2))
  np.testing.assert_array_equal(got, a.astype(np.float64) @ made[2][1].astype(np.float64).T)
  text = str(jax.make_jaxpr(forward)(narrow_a, stack, 2))
  assert (f"f8_e4m3fn[{n},{k}]" not in text) == fits
  before = np.stack([lattice(rng, m, n) for _ in range(3)])
  x, g, narrow_x, narrow_g = _operands(rng, wgrad, m, n, k)
  assert mosaic_sm90_lib.adds((m, n), jnp.float32) == fits

  def add(x, g, sums, i):
    return mosaic_sm90_lib.scaled_matmul(x, g, 128, jnp.float32, add_to=Entry(sums, i))

  after = jax.jit(add)(narrow_x, narrow_g, jnp.asarray(before, jnp.float32), jnp.int32(1))
  want = before.astype(np.float64)
  want[1] += x.astype(np.float64) @ g.astype(np.float64).T
  np.testing.assert_array_equal(after, want)


def test_gemm_kernel_names_why_it_refuses_a_problem():
  fwd = GEMMS["block_128-fwd"]

  def reason(gemm=fwd, **how):
    return mosaic_sm90_lib.supports(_problem(gemm, **how)) or ""

  assert reason() == ""
  blackwell = choose.Device("gpu", 100)
  assert "no sm_100 kernel yet" in reason(device=blackwell)
  tensor = _problem(library.RECIPES["tensor_current"].fwd, device=blackwell)
  found = choose.gemm(tensor)
  assert found.backend == "xla" and "tensor_... run on cuBLASLt" in found.notes[0]
  assert "Hopper" in reason(device=choose.Device("cpu"))
  assert "tiles" in reason(library.RECIPES["tensor_current"].fwd)
  assert "tiles" in reason(library.RECIPES["mxfp8"].fwd)
  assert "8-bit" in reason(library.RECIPES["nvfp4"].fwd)
  tensor = dataclasses.replace(tensor, device=HOPPER)
  with pytest.raises(ValueError, match="'mosaic_sm90' cannot run .*tiles of"):
    choose.gemm(tensor, "mosaic_sm90")
  # Sizes are never a reason: SmolLM2-135M's, odd ones.
  for m, n, k in ((256, 256, 256), (2048, 192, 576), (2048, 576, 192), (131, 12, 201)):
    assert choose.gemm(_problem(fwd, m=m, n=n, k=k)).backend == "mosaic_sm90"


@pytest.mark.parametrize("operands, change, word", [
  ("", {}, ""), ("lhs", {"tile": (128, 0)}, "lhs scales are per"),
  ("rhs", {"tile": (1, 0)}, "rhs scales are per"),
  ("lhs", {"rounding": Rounding.STOCHASTIC}, "lhs is "),
  ("rhs", {"rounding": Rounding.STOCHASTIC}, "rounds to nearest"),
  ("lhs rhs", {"transform": Hadamard(16)}, "transforms nothing"),
])  # fmt: skip
def test_quantizer_of_whole_tensors_names_the_operand_that_it_refuses(operands, change, word):
  gemm = library.RECIPES["tensor_current"].fwd
  quants = {o: dataclasses.replace(getattr(gemm, o), **change) for o in operands.split()}
  reason = xla_sm90.supports(_problem(dataclasses.replace(gemm, **quants))) or ""
  assert word in reason and bool(reason) == bool(word)
  assert reason.startswith(tuple(operands.split()) or "")


@pytest.mark.parametrize(
  "config, message",
  [
    (Config(tile_m=192), "tile_m"),
    (Config(tile_n=120), "tile_n"),
    (Config(producer="warp"), "producer"),
    (Config(stages=9), "bytes of shared memory"),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_impossible_configs_are_refused(rng, config, message):
  _, _, a, b = _operands(rng, GEMMS["block_128-fwd"], 128, 128, 128)
  with pytest.raises(ValueError, match=message):
    mosaic_sm90_lib.matmul(a, b, out_dtype=jnp.bfloat16, config=config)


def _plain(x, quants, amax=None):
  """Plain JAX in the quantizer's place, for runs in which something else is broken."""
  x = scaled_matrix.taken(x)
  made = {}
  for axis, quant in quants.items():
    given = None if quant.source == CURRENT else amax
    made[axis] = quantize.quantize(x, quant, contraction=axis, amax=given)
  return made, None


@pytest.mark.parametrize("name", [
  "tensor_current", pytest.param("tensor_delayed", marks=pytest.mark.slow), "block_128_hybrid",
])  # fmt: skip
def test_the_quantizer_is_tried_before_a_run(monkeypatch, name):
  quant = library.RECIPES[name].dgrad.lhs
  self_test.quantizer(quant, (144, 160))
  is_tensor = quant.tile == (WHOLE, WHOLE)

  def broken(x, quants, amax):
    made, _ = _plain(x, quants, amax)
    assert set(quants) == {0, 1}  # from one reading
    return made | {1: dataclasses.replace(made[1], data=made[1].data.at[3, 5].set(1))}, None

  monkeypatch.setattr(quantizer, "quantize_matrix", broken)
  instead = "'xla'" if is_tensor else "'reference'"
  with pytest.raises(UserError, match=rf"1 of .* \[3, 5\] .*kernels.matmul={instead}"):
    self_test.quantizer(quant, (144, 160))


def test_a_weights_layer_is_tried_before_a_run(monkeypatch):
  quant, dtypes = library.RECIPES["block_128"].fwd.rhs, []

  def beside(x, *how):
    if isinstance(x, Entry):
      dtypes.append(x.dtype)
      x = Entry(x.stack, 1 - x.index)
    return _plain(x, *how)

  monkeypatch.setattr(quantizer, "quantize_matrix", beside)
  with pytest.raises(UserError, match="of a layer wrongly"):
    self_test.quantizer(quant, (144, 160), jnp.bfloat16)
  assert dtypes == [jnp.bfloat16]


@pytest.mark.parametrize("broken", ["data", pytest.param("amaxes", marks=pytest.mark.slow)])
def test_the_weights_of_all_layers_are_tried_before_a_run(monkeypatch, broken):
  quant = library.RECIPES["block_128"].fwd.rhs
  self_test.quantizer(quant, (144, 160), stacks=True)

  def swapped(x, quants):
    made = jax.vmap(lambda one: _plain(one, quants)[0])(x)
    amaxes = jnp.max(jnp.abs(x), (1, 2))
    if broken == "amaxes":
      return made, amaxes[::-1]
    return jax.tree.map(lambda x: x[::-1], made), amaxes

  monkeypatch.setattr(quantizer, "quantize_matrix", _plain)
  monkeypatch.setattr(quantizer, "quantize_stack", swapped)
  said = {"data": "of layer 0 of all wrongly", "amaxes": "finds amaxes of layers"}[broken]
  with pytest.raises(UserError, match=said):
    self_test.quantizer(quant, (144, 160), stacks=True)


@pytest.mark.parametrize(
  "name", [pytest.param("block_128-fwd", marks=pytest.mark.slow), "block_128_hybrid-wgrad"]
)
def test_kernels_are_tried_before_a_run(monkeypatch, name):
  """Both dtypes of the result, more tiles than programs, and the way that a run's shape is cut."""
  sizes, dtypes, configs = (144, 160, 256), set(), set()
  monkeypatch.setattr(mosaic_sm90_lib, "num_cores", lambda: 3)
  tuned = Config(tile_n=112, stages=2, producer="inline")
  measured = tile_config.Choice(tuned, "measured")
  lookup = lambda mnk, *_: measured if mnk == (40, 136, 192) else None  # noqa: E731
  monkeypatch.setattr(tile_config, "lookup", lookup)
  multiply = mosaic_sm90_lib.matmul

  added = set()

  def seen(a, b, *, out_dtype, config, spare, add_to=None):
    dtypes.add(out_dtype)
    added.update({out_dtype} if isinstance(add_to, Entry) and isinstance(b, Entry) else ())
    configs.add((out_dtype, config))
    assert spare == 1
    return multiply(a, b, out_dtype=out_dtype, config=config, spare=spare, add_to=add_to)

  def broken(a, b, *, out_dtype, config, spare, add_to=None):
    if add_to is not None:
      wide = Entry(add_to.stack.astype(jnp.float32), add_to.index)
      return wide.plus(jnp.inner(a.dequantize(), b.take().dequantize())).astype(out_dtype)
    d = jnp.inner(a.dequantize(), b.dequantize()).astype(out_dtype)
    return d.at[3, 5].set(1e6) if config == tuned else d

  def beside(a, b, *, out_dtype, config, spare, add_to=None):
    if add_to is not None:  # into the other layer
      add_to = Entry(add_to.stack, 1 - add_to.index)
    return broken(a, b, out_dtype=out_dtype, config=None, spare=spare, add_to=add_to)

  monkeypatch.setattr(mosaic_sm90_lib, "matmul", seen)
  read, quantize_matrix = [], quantizer.quantize_matrix

  def reading(x, *args):
    read.append(x.dtype)
    return quantize_matrix(x, *args)

  monkeypatch.setattr(quantizer, "quantize_matrix", reading)
  self_test.hopper(GEMMS[name], [(40, 136, 192)], sizes, jnp.bfloat16, spare=1)
  assert set(read) == {jnp.dtype(jnp.bfloat16)}  # weights too, as a run has them
  assert dtypes == {jnp.bfloat16, jnp.float32} == added
  of_run = {jnp.float32} if name.endswith("wgrad") else dtypes
  assert {dtype for dtype, config in configs if config == tuned} == of_run
  monkeypatch.setattr(quantizer, "quantize_matrix", _plain)
  monkeypatch.setattr(mosaic_sm90_lib, "matmul", broken)
  with pytest.raises(UserError, match=r"1 of .* \[3, 5\] .*kernels.matmul='reference'"):
    self_test.hopper(GEMMS[name], [(40, 136, 192)], sizes)
  monkeypatch.setattr(mosaic_sm90_lib, "matmul", beside)
  with pytest.raises(UserError, match=r"added to a layer's sum, wrongly"):
    self_test.hopper(GEMMS[name], [(40, 136, 192)], sizes)
  if name == "block_128-fwd":
    save = jax.lax.dynamic_update_index_in_dim
    patched = lambda stack, x, i, axis: save(stack, x, 0 * i, axis)  # noqa: E731
    monkeypatch.setattr(mosaic_sm90_lib, "matmul", seen)
    self_test.hopper(GEMMS[name], [], sizes, spare=1, saves=True)
    monkeypatch.setattr(jax.lax, "dynamic_update_index_in_dim", patched)
    with pytest.raises(UserError, match=r"saved by a loop, wrongly"):
      self_test.hopper(GEMMS[name], [], sizes, spare=1, saves=True)


@pytest.mark.parametrize("name, words", [
  ("", ""), ("dynamic_update_index_in_dim", "saved by"), ("dynamic_index_in_dim", "read in"),
])  # fmt: skip
def test_what_bf16_products_save_is_tried_before_a_run(monkeypatch, name, words):
  """Whatever the recipe; an index of the other layer is seen, written or read."""
  if not name:
    assert self_test.products({}, matrix=(48, 32), saves=True) == 0
    return
  function, at = getattr(jax.lax, name), -3 if name == "dynamic_index_in_dim" else -2

  def other(*args):
    args = list(args)
    args[at] = 1 - args[at]
    return function(*args)

  monkeypatch.setattr(jax.lax, name, other)
  with pytest.raises(UserError, match=f"bfloat16, {words} a loop, wrongly.*remat_policy='full'"):
    self_test.products({}, matrix=(48, 32), saves=True)


def test_producers_are_tried_before_a_run(monkeypatch):
  quant, sizes = GEMMS["block_128-fwd"].lhs, (144, 32)
  self_test.producers(quant, sizes)

  def shifted(producer, matrices, factors, quants, watched):
    gate, up = (x.astype(jnp.float32) for x in matrices)
    return [_plain(gate * up, quants[0])[0]], [jnp.max(jnp.abs(gate * up))]

  monkeypatch.setattr(quantizer, "quantize_produced", shifted)
  swiglu = {prologues.SWIGLU: self_test._DEFINITIONS[prologues.SWIGLU]}
  monkeypatch.setattr(self_test, "_DEFINITIONS", swiglu)
  with pytest.raises(UserError, match=r"swiglu in the Hopper quantizer .*'reference'"):
    self_test.producers(quant, sizes)


def test_everything_that_a_run_uses_is_tried(monkeypatch):
  tried = []
  for name in ("hopper", "quantizer", "producers"):
    monkeypatch.setattr(self_test, name, lambda *args, name=name: tried.append((name, *args[:2])))
  block, tensor = GEMMS["block_128-fwd"], library.RECIPES["tensor_current"].dgrad
  shape = (256, 256, 256)
  uses = {("mosaic_sm90", block): {shape}, ("xla_sm90", tensor): {shape}, ("xla", tensor): {shape}}
  assert self_test.products(uses) == 2
  matrix = self_test._MATRIX
  quants = [("quantizer", q, matrix) for g in (block, tensor) for q in (g.lhs, g.rhs)]
  assert tried == [("hopper", block, {shape}), *quants, ("producers", block.lhs, matrix)]
