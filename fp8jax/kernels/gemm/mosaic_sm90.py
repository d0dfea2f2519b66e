"""D = A . B' for Hopper: FP8 tiles in, float32 promotion every 128 of K, one kernel.

A is [M, K] with a scale per 1x128, B is [N, K] with a scale per 128x128 (forward and data gradient)
or per 1x128 (weight gradient); both K-major, the only order in which the FP8 matrix instruction
reads shared memory. The algorithm is DeepSeek-V3's (arXiv:2412.19437, §3.5.2): the tensor core adds
up 128 products with the few bits it keeps, then the sum is scaled and added in float32 registers.

tile_program.py has the program of each multiprocessor.

Sizes: M, N and K are anything. The last tile over M, N or K reads zeros beyond the edge and stores
nothing there. Mosaic's TMA moves whole swizzled tiles: M in eights, K in 128s or 64s (the swizzle
of A and B is 64 bytes wide then), rows of D in 128 bytes. `matmul` pads other sizes with zeros,
which copies the operand once, and cuts D.
Scales are multiplied with each other first: a product beyond float32 gives infinity or NaN, below
2^-126 it may lose sums below 2^-101.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.errors import UserError
from fp8jax.formats import E4M3, E5M2
from fp8jax.kernels import smem
from fp8jax.kernels.gemm import tile_config, tile_program, xla_sm90
from fp8jax.kernels.gemm.tile_config import BLOCK, CONSUMERS, Config
from fp8jax.kernels.mosaic import pl, plgpu
from fp8jax.quantization import scaled_matrix
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.recipe.gemm import Accumulate, accumulate_name


def supports(problem) -> str | None:
  device, gemm = problem.device, problem.gemm
  if reason := xla_sm90.missing(device):
    return reason
  for name, quant in (("lhs", gemm.lhs), ("rhs", gemm.rhs)):
    if quant.format not in (E4M3, E5M2):
      return f"{name} is {quant.format}; it reads e4m3 and e5m2, of 8-bit numbers, only"
    if quant.tile[1] != BLOCK or quant.tile[0] not in ((1,) if name == "lhs" else (1, BLOCK)):
      return f"{name} tiles of {quant.tile}; it reads 1x128, and 128x128 on the right"
  if gemm.accumulate != BLOCK:
    return f"promotes every {BLOCK} of K; accumulate is {accumulate_name(gemm.accumulate)}"
  return None


def num_dots(problem) -> int:
  """One kernel per product."""
  del problem
  return 1


def scaled_matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix | Entry, accumulate: Accumulate,
  out_dtype, spare: int = 0, add_to=None,
):  # fmt: skip
  """[M, N], or the stack of an add_to that is an Entry; see `matmul`. Under vmap one product after
  the other, of layers that are copied out of their stacks."""
  del accumulate
  one = functools.partial(matmul, out_dtype=out_dtype, spare=spare)

  @jax.custom_batching.custom_vmap
  def multiply(a, b, add_to):
    return one(a, b, add_to=add_to)

  @multiply.def_vmap
  def _(size, batched, a, b, add_to):
    # A loop over trials would hand each whole stacks.
    whole = lambda x, is_batched: jax.tree.map(  # noqa: E731
      lambda x, b: x if b else jnp.broadcast_to(x, (size, *jnp.shape(x))), x, is_batched
    )
    a, b, add_to = (whole(x, is_batched) for x, is_batched in zip((a, b, add_to), batched))
    b = jax.vmap(Entry.take)(b) if isinstance(b, Entry) else b
    if not isinstance(add_to, Entry):
      return jax.lax.map(lambda x: multiply(*x), (a, b, add_to)), True
    made = jax.lax.map(lambda x: one(*x), (a, b))
    return jax.vmap(Entry.plus)(add_to, made), True

  return multiply(a, b, add_to)


def adds(shape: tuple[int, ...], out_dtype) -> bool:
  """Whether `scaled_matmul` adds to what is [M, N] where it lies: TMA moves it as it is."""
  units = (tile_config.UNIT_M, tile_config.unit_n(out_dtype))
  return not any(n % unit for n, unit in zip(shape, units, strict=True))


def matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix | Entry, *, out_dtype,
  config: Config | None = None, add_to=None, groups=None, num_groups: int = 0, spare: int = 0,
):  # fmt: skip
  """D [M, N] in out_dtype (bfloat16 or float32).

  Args:
    a: [M, K], scales per 1x128.
    b: [N, K], scales per 128x128 or 1x128; perhaps in shards of K, each a multiple of 128, or one
      layer of a stack.
    config: default: what was fastest for this shape, or `tiles.default`.
    add_to: [M, N] in out_dtype that the product is added to, in float32 and before it is stored, in
      place if it may be overwritten. Or one layer of a stack, and the result is the stack.
    groups: int32, see tile_program.py. [M / 128] with b [groups, N, K] and its scales
      [groups, N / 128, K / 128]; or, ascending, [K / 128] with num_groups.
    num_groups: D and add_to are [num_groups, M, N], the sum over K of each group; those without a
      step are left as they were.
    spare: multiprocessors on which no program starts.

  Raises:
    ValueError: a config that does not fit, an add_to that is not what D would be, groups beside a
      layer, no multiprocessor left.
  """
  b, add_to, layers = _stacks(b, add_to, out_dtype)
  if groups is not None and layers:
    raise ValueError("groups and a layer of a stack: take the layer out first")
  (m, k), n, is_sum = a.data.shape, b.data.shape[-2], add_to is not None
  count = add_to.shape[0] if "d" in layers else num_groups
  shape = (count, m, n) if count else (m, n)
  if is_sum:
    tile_config.check_sum(add_to, shape, out_dtype)
  is_tiled = b.tile[0] == BLOCK
  cores = max(num_cores() - spare, 1)
  config = config or tile_config.best(m, n, k, is_tiled, out_dtype, groups is not None, cores)
  tile_config.check(config, out_dtype, of_rows=groups is not None and not num_groups)
  per_column = tile_config.is_per_column(config, is_tiled)
  a = _fitted(a, tile_config.UNIT_M)
  b = b if "b" in layers else _fitted(b, tile_config.unit_n(out_dtype))
  operands = _operands(a, b, groups, per_column, layers)
  programs = _programs(config.cluster_m, spare)
  whole = (*shape[:-2], a.data.shape[0], b.data.shape[-2])

  out_type = () if is_sum else jax.ShapeDtypeStruct(whole, out_dtype)
  run = _kernel(config, programs, per_column, is_sum, tuple(layers), out_type)
  if not is_sum:
    return run(*operands)[..., :m, :n]
  d = jax.new_ref(jnp.pad(add_to, [(0, new - old) for old, new in zip(shape, whole)]))
  run(*operands, d)
  return jax.freeze(d)[..., :m, :n]


def _kernel(
  config: Config, programs: int, per_column: bool, is_sum: bool, layers: tuple[str, ...], out_type
):  # fmt: skip
  """The kernel of `_operands`, and of the sums that it adds to."""

  def scaled_matmul(*refs):
    *refs, d = refs
    of = tile_program.of_layers(d, refs, layers)
    program = tile_program.Program(config, programs, per_column, is_sum, of)
    pl.run_scoped(program.run, *program.memory(), collective_axes="wg")

  return plgpu.kernel(
    scaled_matmul,
    out_type=out_type,
    grid=(programs,),
    grid_names=("program",),
    cluster=(config.cluster_m,),
    cluster_names=("cluster",),
    num_threads=CONSUMERS + (config.producer == "warpgroup"),
    thread_name="wg",
    compiler_params=plgpu.CompilerParams(approx_math=True),
  )


def _stacks(b, add_to, out_dtype) -> tuple[scaled_matrix.ScaledMatrix, Any, dict[str, Any]]:
  """(B, add_to, {"b" or "d": the number of its layer in a stack, which it then is}).

  A layer of B whose rows or K TMA does not move as they are is copied out.
  """
  layers = {}
  if isinstance(b, Entry):
    units = (tile_config.unit_n(out_dtype), tile_config.UNIT_K)
    if any(size % unit for size, unit in zip(b.stack.data.shape[-2:], units, strict=True)):
      b = b.take()
    else:
      layers["b"], scale = b.index, Entry(b.stack.scale, b.index).take()
      b = scaled_matrix.ScaledMatrix(b.stack.data, scale, b.stack.tile)
  if isinstance(add_to, Entry):
    layers["d"], add_to = add_to.index, add_to.stack
  return b, add_to, {name: jnp.asarray(number, jnp.int32) for name, number in layers.items()}


def _programs(cluster: int, spare: int) -> int:
  """Clusters of programs, as many as run at once."""
  cores = num_cores()
  if cores - spare < cluster:
    raise UserError(
      f"mesh.spare_multiprocessors={spare} of {cores} leaves a GEMM fewer than its cluster of "
      f"{cluster}; set a smaller number"
    )
  return (cores - spare) // cluster


def _fitted(x: scaled_matrix.ScaledMatrix, unit: int) -> scaled_matrix.ScaledMatrix:
  """The operand with zeros up to sizes that TMA moves: [rows to `unit`, K to UNIT_K].

  Raises:
    ValueError: shards of K that are no multiples of 128.
  """
  rows, depth = x.data.shape[-2:]
  if x.is_sharded and depth % BLOCK:
    raise ValueError(f"shards of B have K={depth} each; expected a multiple of {BLOCK}")
  pads = [smem.padded(rows, unit) - rows, smem.padded(depth, tile_config.UNIT_K) - depth]
  if not any(pads):
    return x
  lead = [(0, 0)] * (x.data.ndim - 2)
  data = jnp.pad(x.data, [*lead, *((0, n) for n in pads)])
  # Each further tile repeats the last scale: any finite number would do.
  tiles_more = scaled_matrix.num_tiles(rows + pads[0], x.tile[0]) - x.scale.shape[-2]
  lead = [(0, 0)] * (x.scale.ndim - 2)
  scale = jnp.pad(x.scale, [*lead, (0, tiles_more), (0, 0)], mode="edge")
  return scaled_matrix.ScaledMatrix(data, scale, x.tile)


def _operands(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, groups, per_column: bool,
  layers: dict[str, Any],
) -> list[jax.Array]:  # fmt: skip
  """The kernel's inputs, in the order of tile_program.Global; scales in lines as TMA reads them.
  The numbers of layers come last."""
  b_scale = b.scale.swapaxes(-1, -2)
  if per_column:
    b_scale = scaled_matrix.expand(b_scale, b_scale.ndim - 1, b.tile[0], b.data.shape[-2])
  operands = [a.data, b.data, _lines(a.scale.T), _lines(b_scale)]
  # After the last step comes another group.
  operands += [] if groups is None else [jnp.append(groups, -1)]
  return operands + ([jnp.stack([*layers.values()])] if layers else [])


def _lines(scale):
  """[..., K / 128, rows] with rows padded to 16 bytes."""
  pads = [(0, 0)] * (scale.ndim - 1) + [(0, -scale.shape[-1] % 4)]
  return jnp.pad(scale, pads)


def num_cores() -> int:
  """SMs of the device that JAX computes on, those of an H200 if it is not a GPU."""
  device = jax.devices()[0]
  return device.core_count if device.platform == "gpu" else 132
