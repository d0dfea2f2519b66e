"""How the Hopper GEMM's work is cut up where nobody tuned it."""

import functools
import itertools
import json
import math

import gemm_shapes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.errors import UserError
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import mosaic_sm90, tile_config, tile_program
from fp8jax.kernels.gemm.tile_config import Config
from fp8jax.quantization import scaled_matrix


def _dtype(product: str):
  return jnp.float32 if product == "wgrad" else jnp.bfloat16


# Of a step of 128 rows, on shared memory's port: each consumer reads 64 rows of A and all of B for
# its four instructions, TMA writes A and B; 128 bytes a clock. The tensor core takes 4 per column.
CLOCKS = {112: 592, 128: 640, 160: 736, 192: 832}


def _clocks(config: Config, m: int, n: int) -> int:
  """Per step, of the busiest of 132 multiprocessors, tile by tile."""
  busy = [0] * (132 // config.cluster_m)
  rows, columns = (math.ceil(m / 128 / config.cluster_m), math.ceil(n / config.tile_n))
  for tile in range(rows * columns):
    busy[tile % len(busy)] += CLOCKS[config.tile_n]
  return max(busy)


@pytest.fixture(params=[True, False], ids=["pools", "linked"])
def pools(monkeypatch, request):
  monkeypatch.setattr(tile_config, "has_register_pools", lambda: request.param)
  return request.param


@pytest.mark.parametrize(
  "product, m, n, tiles, clocks",
  [
    # InfiR2's: one wave of 120 tiles, not of 144; of 132, not of 192; 133 would be one too many.
    ("wgrad", 1536, 1536, (160, 160), 736),
    ("wgrad", 1536, 2048, (192, 192), 832),
    ("wgrad", 896, 3584, (112, 112), 2 * 592),
    # 70 waves with hardly a tail, and one wave.
    ("fwd", 32768, 4608, (192, 128), None),
    ("wgrad", 768, 1536, (128, 128), 640),
  ],
)
def test_the_port_and_a_last_wave_with_little_to_do_decide(pools, product, m, n, tiles, clocks):
  found = tile_config.default(m, n, product != "wgrad", _dtype(product))
  assert found.tile_n == tiles[0 if pools else 1]
  want = {True: 47 * 832, False: 70 * 640}[pools] if clocks is None else clocks
  assert _clocks(found, m, n) == want


def test_tiles_are_chosen_for_the_multiprocessors_that_a_product_has():
  """144 tiles of 128x128 are one wave where there are as many, and two of 132 or of 116."""
  default = functools.partial(tile_config.default, 1536, 1536, False, jnp.float32)
  assert [default(cores=cores).tile_n for cores in (144, 132)] == [128, 160]
  assert default(cores=1).raster == 1
  asked, multiply = [], gemm_api.scaled_matmul
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tile_config, "default", lambda *args: asked.append(args[-1]) or Config(stages=0))
    a = scaled_matrix.ScaledMatrix(
      jnp.zeros((512, 256), jnp.float8_e4m3fn), jnp.ones((512, 2)), (1, 128)
    )
    with pytest.raises(ValueError):  # no stages
      multiply(a, a, accumulate=128, backend="mosaic_sm90", out_dtype=jnp.float32, spare=16)
  assert asked == [116]


def test_no_shape_of_the_table_gets_longer_and_large_ones_share_what_they_load(pools):
  for name, (product, m, n, _) in gemm_shapes.gemms().items():
    is_tiled, out = product != "wgrad", _dtype(product)
    before, found = tile_config.plain(is_tiled, out), tile_config.default(m, n, is_tiled, out)
    tile_config.check(found, out)
    assert _clocks(found, m, n) <= _clocks(before, m, n), name
    # Pairs of rows of tiles, or one of them would be half empty.
    assert m * n < 2**24 or m % 256 or found.cluster_m == 2, name


def test_a_shape_is_cut_as_the_nearest_that_was_measured(monkeypatch, tmp_path):
  monkeypatch.setattr(tile_config, "_path", lambda: tmp_path / "gpu.json")
  assert tile_config.choice(4096, 7168, 2048, True, jnp.bfloat16).source == "model"
  assert tile_config.notes()[0] == "tiles by a model of shared memory"
  near, far, other = Config(raster=3), Config(raster=5), Config(raster=7)
  for mnk, is_tiled, config in (
    ((4096, 7168, 2048), True, near), ((6144, 7168, 2048), True, far),
    ((4096, 7168, 3072), False, other),
  ):  # fmt: skip
    by = {"ms": 1.0, "jax": "0.11.2", "commit": "abcdef0123"}
    tile_config.store(mnk, is_tiled, jnp.bfloat16, config, by)
  here = f"tiles of 3 shapes measured on {tile_config.device_name()} (jax 0.11.2, abcdef01), others"
  assert tile_config.notes()[0] == f"{here} by a model of shared memory"
  ask = lambda *mnk, out=jnp.bfloat16: tile_config.choice(*mnk, True, out)  # noqa: E731
  assert ask(4096, 7168, 2048) == (near, "measured")
  assert ask(4096, 7168, 3072) == (near, "measured at 4096,7168,2048")
  assert ask(5120, 7168, 2048) == (far, "measured at 6144,7168,2048")  # 1.2 and 1.25 times
  assert ask(9216, 7168, 2048) == (far, "measured at 6144,7168,2048")  # at the bound
  for mnk in ((9217, 7168, 2048), (4096, 7168, 1365)):
    assert ask(*mnk).source == "model"
  assert ask(4096, 7168, 2048, out=jnp.float32).source == "model"
  # Tiles that another jax measured, and this one cannot hold in registers.
  large = Config(tile_n=192, stages=4)
  tile_config.store((4096, 7168, 2048), True, jnp.bfloat16, large, {"ms": 1.0})
  for pools, found in ((True, (large, "measured")), (False, (far, "measured at 6144,7168,2048"))):
    monkeypatch.setattr(tile_config, "has_register_pools", lambda pools=pools: pools)
    assert ask(4096, 7168, 2048) == found


@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 1), (8, 8), (19, 6)])
def test_tiles_are_in_the_order_of_a_planar_snake(rows, columns):
  tiles = jnp.arange(rows * columns)
  for width in (1, 3, 5, 8, 16):
    order = lambda t, w=width: plgpu.planar_snake(t, (rows, columns), 0, w)  # noqa: E731
    got = tile_program.snake(tiles, (rows, columns), width)
    np.testing.assert_array_equal(got, jax.vmap(order)(tiles))


def test_every_slot_begins_where_tma_may_write():
  """Multiples of 128 bytes; 112 columns of scales alone are 448."""
  shape = jax.ShapeDtypeStruct
  for tile_n, producer in itertools.product(range(16, 257, 16), ("warpgroup", "inline")):
    config = Config(tile_n=tile_n, stages=2, producer=producer)
    tile_config.check(config, jnp.float32)
    a, b = (shape((256, 512), jnp.float8_e4m3fn),) * 2
    scales = shape((4, 256), jnp.float32)
    of = tile_program.Global(shape((256, 256), jnp.float32), a, b, scales, scales)
    memory = tile_program.Program(config, 132, True, False, of).memory()
    for ref in memory[:4]:
      assert ref.shape[0] == config.stages
      assert math.prod(ref.shape[1:]) * jnp.dtype(ref.dtype).itemsize % 128 == 0, (tile_n, ref)


def test_a_slot_that_tma_may_not_write_is_refused(monkeypatch):
  monkeypatch.setattr(tile_config, "scale_slot", lambda columns: columns)
  with pytest.raises(ValueError, match="multiples of 128 bytes, not {'b_scale': 448}"):
    tile_config.check(Config(tile_n=112, producer="inline"), jnp.float32)


def test_what_is_chosen_is_known_not_to_spill(pools):
  table = json.loads(gemm_shapes.TABLE.read_text())["kernels"]
  version = "0.11.2" if pools else "0.12.0.1"
  for product, out in (("fwd", "bfloat16"), ("fwd", "float32"), ("wgrad", "float32")):
    configs = {tile_config.default(m, n, product == "fwd", out)
               for m in range(128, 8192, 384) for n in range(128, 8192, 640)}  # fmt: skip
    for c in configs | set(tile_config.candidates(product == "fwd", out)):
      name = gemm_shapes.tile_name(c, product, out)
      assert table[name][version]["spilled_bytes"] == 0, name


def test_groups_are_cut_up_without_clusters_whatever_was_tuned(monkeypatch, interpreted):
  """The same M, N, K without groups may be fastest in a cluster."""
  looked = []
  measured = tile_config.Choice(Config(cluster_m=2), "measured")
  tuned = lambda *key: looked.append(key) or measured  # noqa: E731
  monkeypatch.setattr(tile_config, "lookup", tuned)
  assert tile_config.best(256, 128, 128, True, jnp.bfloat16).cluster_m == 2 and looked
  ones = np.ones((256, 128), np.float32)
  a = scaled_matrix.ScaledMatrix(jnp.asarray(ones, jnp.float8_e4m3fn), jnp.ones((256, 1)), (1, 128))
  data = jnp.stack([jnp.full((128, 128), v, jnp.float8_e4m3fn) for v in (1, 2)])
  b = scaled_matrix.ScaledMatrix(data, jnp.ones((2, 1, 1)), (128, 128))
  groups = jnp.asarray([0, 1], jnp.int32)
  got = mosaic_sm90.matmul(a, b, out_dtype=jnp.bfloat16, groups=groups)
  np.testing.assert_array_equal(got[:, 0], np.repeat([128, 256], 128))


class _Grid(Exception):
  """Of a kernel that would run."""


@pytest.mark.parametrize(
  "cores, cluster, spare, programs",
  [(132, 1, 0, 132), (132, 2, 0, 66), (7, 2, 0, 3), (132, 1, 16, 116), (132, 2, 17, 57)],
)
def test_clusters_of_programs_share_the_multiprocessors(
  monkeypatch, cores, cluster, spare, programs
):
  """A kernel that stays has as many programs as run at once: more of them wait for an end."""

  def kernel(body, grid, cluster, **more):
    raise _Grid(grid, cluster)

  monkeypatch.setattr(mosaic_sm90, "num_cores", lambda: cores)
  monkeypatch.setattr(mosaic_sm90.plgpu, "kernel", kernel)
  a = scaled_matrix.ScaledMatrix(
    jnp.zeros((512, 256), jnp.float8_e4m3fn), jnp.ones((512, 2)), (1, 128)
  )
  b = scaled_matrix.ScaledMatrix(a.data, jnp.ones((4, 2)), (128, 128))
  chosen = Config(cluster_m=cluster)
  monkeypatch.setattr(tile_config, "best", lambda *_: chosen)
  multiply = functools.partial(
    gemm_api.scaled_matmul, a, b, accumulate=128, backend="mosaic_sm90", out_dtype=jnp.bfloat16
  )
  with pytest.raises(_Grid) as e:
    multiply(spare=spare)
  assert e.value.args == ((programs,), (cluster,))
  with pytest.raises(UserError, match=rf"spare_multiprocessors={cores - cluster + 1} of {cores}"):
    multiply(spare=cores - cluster + 1)


@pytest.mark.parametrize("dtype, size", [(jnp.bfloat16, 2), (jnp.float32, 4)])
@pytest.mark.parametrize("is_tiled", [True, False])
def test_candidates_have_as_many_stages_as_fit_and_six_at_most(pools, is_tiled, dtype, size):
  """Of 227 KiB: a slot holds 128 + n rows of 128 bytes and 512 + 1024 of scales."""
  # Of a consumer, in its buffers: of a wide row of float32 numbers half the columns.
  wide = 64 if size == 2 else 32
  results = {112: 64 * 112, 128: 2 * 64 * 64, 160: 2 * 64 * 32, 192: 2 * 64 * wide}
  columns = (128, 160, 192) if is_tiled else (128, 112, 160, 192)
  producers = ("warpgroup",) if is_tiled else ("inline", "warpgroup")
  # A warpgroup that copies leaves the others registers for 128 columns, or in pools for more.
  wanted = {
    (n, *others, producer) for n, *others, producer in
    itertools.product(columns, (1, 2), (4, 16), producers)
    if pools or producer == "inline" or n <= 128
  }  # fmt: skip
  ours = list(tile_config.candidates(is_tiled, dtype))
  assert len(ours) == len(wanted)
  assert {(c.tile_n, c.cluster_m, c.raster, c.producer) for c in ours} == wanted
  for c in ours:
    room = 227 * 1024 - 1024 - 2 * results[c.tile_n] * size
    assert c.stages == min(6, room // (128 * (128 + c.tile_n) + 1536)), c
