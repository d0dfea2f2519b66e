"""How the Hopper GEMM's work is cut up: what is possible, what was fastest, what to take otherwise.

tuned/<device>.json holds {"M,N,K,B's tile,D's dtype": {"config": {...}, "ms": ..., "jax": ...,
"commit": ..., "time": ..., "driver": ...}}, written by experiments/bench/kernels/run.py --tune.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.kernels import smem

BLOCK = 128  # of K, between promotions
CONSUMERS = 2  # warpgroups that multiply
WGMMA_ROWS = 64
# Of columns with a scale each, so many at a time have it in registers, where those are few.
PROMOTED = 64
# How far the tensor core's sum of 128 products may be off, in the sum of their magnitudes. It keeps
# about 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2): each of four additions of 32 numbers
# to what there is cuts 32 numbers 13 bits below the largest. Float32 adds next to nothing.
SUM_ERROR = 4 * 32 * 2.0**-13
# Rows of A and of D, and K, must be multiples of these; `matmul` pads others with zeros.
UNIT_M, UNIT_K = smem.ROWS, 64
SMEM_BYTES = smem.BYTES
NEAR = 1.5  # a shape that was measured speaks for others whose sizes are no more times as large
CORES = 132  # of an H100 or H200
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
      per thread. Of three warpgroups each has 168; in pools the third gives each consumer 64 more.
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
  if not (add_to.shape == shape and add_to.dtype == out_dtype):
    raise ValueError(
      f"add_to is {add_to.dtype}{list(add_to.shape)} and the result "
      f"{jnp.dtype(out_dtype)}{list(shape)}; expected both alike"
    )


def smem_bytes(config: Config, out_dtype) -> int:
  """Shared memory of a program, at most."""
  ring = config.stages * sum(slot_bytes(config).values())
  columns, slots = epilogue(config, out_dtype)
  return ring + CONSUMERS * slots * WGMMA_ROWS * columns * jnp.dtype(out_dtype).itemsize + 1024


def slot_bytes(config: Config) -> dict[str, int]:
  """Bytes from one slot of the ring to the next, of each operand."""
  return {
    "a": config.tile_m * BLOCK,
    "b": config.tile_n * BLOCK,
    "a_scale": config.tile_m * 4,
    "b_scale": scale_slot(config.tile_n) * 4,
  }


def is_per_column(config: Config, is_tiled: bool) -> bool:
  """Whether B's scales come by TMA, one per column of the tile.

  Otherwise a tile has a scale for each block of B that it touches. That takes columns in multiples
  of 32, the width of a store, and registers, which a consumer that also copies does not have.
  """
  if not is_tiled:
    return True
  if config.tile_n == BLOCK:
    return False
  return config.tile_n % 32 != 0 or config.producer == "inline"


def scale_slot(columns: int) -> int:
  """float32 numbers in a slot of scales per column, of which the first `columns` are used."""
  return smem.padded(columns, smem.ALIGNMENT // 4)


def unit_n(out_dtype) -> int:
  """N must be a multiple of this: 128 bytes of a row of D."""
  return 128 // jnp.dtype(out_dtype).itemsize


def epilogue(config: Config, out_dtype) -> tuple[int, int]:
  """(columns per store, buffers): swizzles come in multiples of 32 bytes. Of a tile whose rows are
  more than 512 bytes a store has half the columns, so that a ring of four slots fits beside it."""
  n = config.tile_n
  is_wide = n * jnp.dtype(out_dtype).itemsize > 512
  columns = next((c for c in (64, 32)[is_wide:] if n % c == 0), n)
  return columns, 1 if columns == n and n > 64 else 2


class Choice(NamedTuple):
  """A configuration and its source: "measured", "measured at M,N,K" (the nearest), "model"."""

  config: Config
  source: str


def best(
  m: int, n: int, k: int, is_tiled: bool, out_dtype, has_groups: bool = False, cores: int = CORES
) -> Config:  # fmt: skip
  """`choice` without its source; groups have no measurement."""
  if has_groups:
    return plain(is_tiled, out_dtype)
  return choice(m, n, k, is_tiled, out_dtype, cores).config


def choice(m: int, n: int, k: int, is_tiled: bool, out_dtype, cores: int = CORES) -> Choice:
  """The measured fastest config for this shape here, that of the nearest shape, or `default`."""
  return lookup((m, n, k), is_tiled, out_dtype) or Choice(
    default(m, n, is_tiled, out_dtype, cores), "model"
  )


def default(m: int, n: int, is_tiled: bool, out_dtype, cores: int = CORES) -> Config:
  """For shapes nobody tuned: the shortest by `_cost`, of `candidates`, none of which spills.

  Not measured on a GPU: tiles of 128x128 are left only for others that promise a twentieth less.

  Args:
    cores: multiprocessors that the product may take.
  """
  if waves(plain(is_tiled, out_dtype), m, n, cores) == 1:  # nothing to win
    return plain(is_tiled, out_dtype)

  def cost(config):
    return _cost(config, m, n, cores) * (1 if config.tile_n == BLOCK else 1.05)

  best = min((plain(is_tiled, out_dtype), *candidates(is_tiled, out_dtype)), key=cost)
  # The tiles in flight cover about as many rows of A as of B.
  raster = round(math.sqrt(cores * best.tile_n / best.tile_m)) // best.cluster_m
  return dataclasses.replace(best, raster=max(raster, 1))


def has_register_pools() -> bool:
  """Whether a warpgroup may hand its registers to the others (setmaxnreg).

  jax 0.12 compiles kernels to be linked, by nvJitLink where that is installed, and there ptxas
  ignores the instruction (C7504): three warpgroups have 168 registers a thread, whatever they ask.
  """
  return jax.__version_info__ < (0, 12)


def notes() -> list[str]:
  """For the start of a run: where tiles come from; larger ones, which another jax compiles."""
  table = _table(_path())
  by = sorted({f"jax {row.get('jax')}, {str(row.get('commit'))[:8]}" for row in table.values()})
  source = f"tiles of {len(table)} shapes measured on {device_name()} ({'; '.join(by)}), others"
  texts = [f"{source if table else 'tiles'} by a model of shared memory"]
  if not has_register_pools():
    texts.append(
      f"jax {jax.__version__} compiles forward products and data gradients with tiles of 128x128. "
      "jax 0.11.2 fits 128x192 into registers: by that model 13 % less time, not timed. On one GPU "
      "with nothing recomputed, this version moves a fifth fewer bytes per layer, not timed either"
    )
  return texts


def plain(is_tiled: bool, out_dtype) -> Config:
  """128x128, also for groups of rows."""
  if is_tiled:
    return Config(stages=5 if jnp.dtype(out_dtype).itemsize == 2 else 4)
  # A fiftieth faster on an H200 than a third warpgroup, whose four warps copied then and whose
  # consumers read the scales of all columns at once.
  return Config(stages=4, producer="inline")


def waves(config: Config, m: int, n: int, cores: int = CORES) -> int:
  """How many tiles the busiest program takes."""
  rows, columns = -(-m // (config.tile_m * config.cluster_m)), -(-n // config.tile_n)
  return -(-rows * columns // max(cores // config.cluster_m, 1))


def _cost(config: Config, m: int, n: int, cores: int) -> float:
  """Clocks of the product for each 128 of K.

  A step keeps the tensor core busy for 4 clocks per column of 128 rows. Shared memory, 128 bytes a
  clock, gives each consumer its rows of A and all of B, and takes what TMA brings. Loads count
  a little besides: programs in a cluster share B, and were a hundredth faster on an H200.
  """
  rows, columns = config.tile_m, config.tile_n
  tensor_core = rows * columns * BLOCK / 4096
  shared_memory = rows + 2 * columns * rows // BLOCK + rows + columns
  loaded = rows + columns / config.cluster_m
  return waves(config, m, n, cores) * (max(tensor_core, shared_memory) + loaded / 8)


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


def lookup(mnk: tuple[int, int, int], is_tiled: bool, out_dtype) -> Choice | None:
  """The measured fastest config on the device that JAX computes on: for this shape, or for that of
  the same kind which is nearest by the ratios of M, N and K, none of them beyond NEAR.

  Of a table that another jax measured some tiles may spill here; they are not taken.
  """
  tiles = lambda c: (c.tile_m, c.tile_n, c.producer)  # noqa: E731
  fit, own = {tiles(c) for c in candidates(is_tiled, out_dtype)}, _key(mnk, is_tiled, out_dtype)

  def distance(key: str) -> float:
    pairs = [(int(there), here) for there, here in zip(key.split(","), mnk)]
    return max(max(pair) / min(pair) for pair in pairs)

  table, kind = _table(_path()), own.split(",")[3:]
  keys = [key for key in table if key.split(",")[3:] == kind and distance(key) <= NEAR]
  near = {key: Config(**table[key]["config"]) for key in keys}
  near = {key: config for key, config in near.items() if tiles(config) in fit}
  if not near:
    return None
  key = min(near, key=distance)
  where = "" if key == own else f" at {','.join(key.split(',')[:3])}"
  return Choice(near[key], f"measured{where}")


def store(mnk, is_tiled: bool, out_dtype, config, provenance: dict[str, Any]):
  """Keeps a measured configuration."""
  path = _path()
  table = {**_table(path), _key(mnk, is_tiled, out_dtype): {
    "config": dataclasses.asdict(config), **provenance}}  # fmt: skip
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
  _table.cache_clear()


def candidates(is_tiled: bool, out_dtype) -> Iterator[Config]:
  """Configurations worth trying, with as many stages as fit, none of which spills, weight gradients
  in float32: see tests/golden/kernel_resources.json. 256 rows spill everywhere."""
  pools = has_register_pools()
  if is_tiled:
    # Inline, 160 columns took a tenth longer per column on an H200, 112 columns a third.
    columns, producers = ((128, 160, 192) if pools else (128,)), ("warpgroup",)
  else:
    columns, producers = (128, 112, 160, 192), ("inline", "warpgroup")
  for tile_n, producer, cluster_m, raster in itertools.product(columns, producers, (1, 2), (4, 16)):
    if producer == "warpgroup" and tile_n > BLOCK and not pools:
      continue
    for stages in (6, 5, 4, 3):
      config = Config(128, tile_n, stages, raster, cluster_m, producer)
      if smem_bytes(config, out_dtype) <= SMEM_BYTES:
        yield config
        break
