"""How the Hopper GEMM's work is cut up: what is possible, what was fastest, what to take otherwise.

tuned/<device>.json holds {"M,N,K,kind": {"config": {...}, "ms": ..., "jax": ..., "commit": ...,
"time": ..., "driver": ...}}, written by experiments/bench/kernels/run.py --tune.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.kernels import smem

BLOCK = 128  # of K, between promotions
CONSUMERS = 2  # warpgroups that multiply
WGMMA_ROWS = 64
# How far the tensor core's sum of 128 products may be off, in the sum of their magnitudes. It keeps
# about 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2): each of four additions of 32 numbers
# to what there is cuts 32 numbers 13 bits below the largest. Float32 adds next to nothing.
SUM_ERROR = 4 * 32 * 2.0**-13
# Rows of A and of D, and K, must be multiples of these; `matmul` pads others with zeros.
UNIT_M, UNIT_K = smem.ROWS, 64
SMEM_BYTES = smem.BYTES
_CORES = 132  # of an H100 or H200, where tiles are chosen that nobody timed
_TUNED = pathlib.Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class Config:
  """How the work is cut up; changes speed only.

  Attributes:
    tile_m: rows of D per program, 128 or 256.
    tile_n: columns of D, a multiple of 16 up to 256.
    stages: slots of the ring.
    raster: M tiles that are worked on side by side, for L2.
    cluster_m: 2 lets two programs with neighbouring rows load each half of B's tile for both.
    producer: "warpgroup" of its own, or "inline" in the first consumer, which leaves 255 registers
      per thread instead of 168.
  """

  tile_m: int = 128
  tile_n: int = 128
  stages: int = 5
  raster: int = 8
  cluster_m: int = 1
  producer: str = "warpgroup"


def check(config: Config, out_dtype, of_rows: bool = False):
  """Raises ValueError if a kernel, of groups of rows perhaps, cannot be cut up so; says why."""
  if of_rows and (config.tile_m, config.cluster_m) != (BLOCK, 1):
    raise ValueError(f"{config}: groups of rows need tile_m={BLOCK} and cluster_m=1")
  parts = config.tile_m // (CONSUMERS * WGMMA_ROWS)
  if parts not in (1, 2) or config.tile_m % (CONSUMERS * WGMMA_ROWS):
    raise ValueError(f"{config}: tile_m must be 128 or 256")
  if config.tile_n % 16 or not 16 <= config.tile_n <= 256:
    raise ValueError(f"{config}: tile_n must be a multiple of 16 between 16 and 256")
  if config.producer not in ("warpgroup", "inline") or config.cluster_m not in (1, 2):
    raise ValueError(f"{config}: producer is 'warpgroup' or 'inline', cluster_m 1 or 2")
  if wrong := {k: v for k, v in slot_bytes(config).items() if v % smem.ALIGNMENT}:
    raise ValueError(
      f"{config}: TMA fills slots at multiples of {smem.ALIGNMENT} bytes, not {wrong}"
    )
  if (need := smem_bytes(config, out_dtype)) > SMEM_BYTES:
    raise ValueError(f"{config} needs {need} bytes of shared memory; there are {SMEM_BYTES}")


def check_sum(add_to, shape: tuple[int, ...], out_dtype):
  """Raises ValueError if add_to is not what the result will be."""
  if not (add_to.shape == shape and add_to.dtype == out_dtype == jnp.float32):
    raise ValueError(
      f"add_to is {add_to.dtype}{list(add_to.shape)} and the result {jnp.dtype(out_dtype)}; "
      f"expected both float32{list(shape)}"
    )


def smem_bytes(config: Config, out_dtype) -> int:
  """Shared memory of a program, at most."""
  ring = config.stages * sum(slot_bytes(config).values())
  columns, slots = epilogue(config)
  return ring + CONSUMERS * slots * WGMMA_ROWS * columns * jnp.dtype(out_dtype).itemsize + 1024


def slot_bytes(config: Config) -> dict[str, int]:
  """Bytes from one slot of the ring to the next, of each operand."""
  return {
    "a": config.tile_m * BLOCK,
    "b": config.tile_n * BLOCK,
    "a_scale": config.tile_m * 4,
    "b_scale": scale_slot(config.tile_n) * 4,
  }


def scale_slot(columns: int) -> int:
  """float32 numbers in a slot of scales per column, of which the first `columns` are used."""
  return smem.padded(columns, smem.ALIGNMENT // 4)


def unit_n(out_dtype) -> int:
  """N must be a multiple of this: 128 bytes of a row of D."""
  return 128 // jnp.dtype(out_dtype).itemsize


def epilogue(config: Config) -> tuple[int, int]:
  """(columns per store, buffers): swizzles come in multiples of 32 bytes."""
  n = config.tile_n
  columns = next((c for c in (64, 32) if n % c == 0), n)
  return columns, 1 if columns == n and n > 64 else 2


def best(m: int, n: int, k: int, is_tiled: bool, out_dtype, has_groups: bool = False) -> Config:
  """The measured fastest config for this shape here, or `default`; groups have no measurement."""
  if has_groups:
    return plain(is_tiled, out_dtype)
  return lookup((m, n, k), is_tiled, out_dtype) or default(m, n, is_tiled, out_dtype)


def default(m: int, n: int, is_tiled: bool, out_dtype) -> Config:
  """For shapes nobody tuned: the shortest by `_cost`, of `candidates`, none of which spills.

  Not measured on a GPU: tiles of 128x128 are left only for others that promise a twentieth less.
  """
  if m * n <= _CORES * BLOCK * BLOCK:  # no second wave: nothing to win
    return plain(is_tiled, out_dtype)

  def cost(config):
    return _cost(config, m, n, is_tiled) * (1 if config.tile_n == BLOCK else 1.05)

  best = min((plain(is_tiled, out_dtype), *candidates(is_tiled, out_dtype)), key=cost)
  # The tiles in flight cover about as many rows of A as of B.
  raster = round(math.sqrt(_CORES * best.tile_n / best.tile_m)) // best.cluster_m
  return dataclasses.replace(best, raster=raster)


def plain(is_tiled: bool, out_dtype) -> Config:
  """128x128, also for groups of rows.

  Scales per column take registers that a third warpgroup would leave too few of. (Kernels may raise
  their limit with setmaxnreg, but nvJitLink, which compiles them where it is installed, ignores
  it: ptxas C7504.)
  """
  if is_tiled:
    return Config(stages=5 if jnp.dtype(out_dtype).itemsize == 2 else 4)
  return Config(stages=4, producer="inline")


def waves(config: Config, m: int, n: int) -> int:
  """How many tiles the busiest program takes."""
  rows, columns = -(-m // (config.tile_m * config.cluster_m)), -(-n // config.tile_n)
  return -(-rows * columns // (_CORES // config.cluster_m))


def _cost(config: Config, m: int, n: int, is_tiled: bool) -> float:
  """Time of the product, in columns of 128 rows that are multiplied.

  A step multiplies tile_n columns, and loads A's rows and B's columns, of which a cluster shares
  the latter. Most of that happens while the tensor core is busy: an eighth is a guess, as is what
  scales per column cost, until tuning has measured.
  """
  loaded = config.tile_m + config.tile_n / config.cluster_m
  per_column = is_tiled and config.tile_n != BLOCK
  step = config.tile_n * (1.05 if per_column else 1) + loaded / 8
  return waves(config, m, n) * step


def _key(mnk: tuple[int, int, int], is_tiled: bool, out_dtype) -> str:
  kind = f"{'128x128' if is_tiled else '1x128'},{jnp.dtype(out_dtype).name}"
  return ",".join(map(str, mnk)) + f",{kind}"


def device_name() -> str:
  """Of the device that JAX computes on, as the names of files have it."""
  return jax.devices()[0].device_kind.lower().replace(" ", "_")


def _path() -> pathlib.Path:
  return _TUNED / f"{device_name()}.json"


@functools.cache
def _table(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text()) if path.exists() else {}


def lookup(mnk: tuple[int, int, int], is_tiled: bool, out_dtype) -> Config | None:
  """The measured fastest config for this shape on the device that JAX computes on."""
  row = _table(_path()).get(_key(mnk, is_tiled, out_dtype))
  return Config(**row["config"]) if row else None


def store(mnk, is_tiled: bool, out_dtype, config, provenance: dict[str, Any]):
  """Keeps a measured configuration."""
  path = _path()
  table = {**_table(path), _key(mnk, is_tiled, out_dtype): {
    "config": dataclasses.asdict(config), **provenance}}  # fmt: skip
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
  _table.cache_clear()


def candidates(is_tiled: bool, out_dtype) -> Iterator[Config]:
  """Configurations worth trying, with as many stages as fit; 192 columns spill with jax 0.11.2."""
  for tile_n, cluster_m, producer, raster in itertools.product(
    (128, 112, 160), (1, 2), ("warpgroup", "inline"), (4, 16)
  ):
    # Scales per column and a third warpgroup leave too few registers.
    if producer == "warpgroup" and (tile_n > 128 or not is_tiled or tile_n == 112):
      continue
    for stages in (6, 5, 4):
      config = Config(128, tile_n, stages, raster, cluster_m, producer)
      if smem_bytes(config, out_dtype) <= SMEM_BYTES:
        yield config
        break
