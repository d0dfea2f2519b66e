"""D = A . B' for Hopper: FP8 tiles in, float32 promotion every 128 of K, one kernel.

A is [M, K] with a scale per 1x128, B is [N, K] with a scale per 128x128 (forward and data gradient)
or per 1x128 (weight gradient); both K-major, the only order in which the FP8 matrix instruction
reads shared memory. The algorithm is DeepSeek-V3's (arXiv:2412.19437, §3.5.2): the tensor core adds
up 128 products with the few bits it keeps, then the sum is scaled and added in float32 registers.

## One tile, from TMA to epilogue

  grid      One program per SM, for good. It takes one output tile after the other, in an order in
            which tiles of one time share rows of A and columns of B in L2 (`place`).
  threads   Three warpgroups of 128 threads: two multiply, one does nothing but start copies. Or
            two alone, of which the first also starts copies (Config.producer).
  step      One output tile is K / 128 steps. Steps are numbered through all tiles of a program, so
            that copies for the next tile start while the last one is still being written.
  fetch     Step s lives in slot s % stages of a ring in shared memory. Once both consumers have
            left the slot (`empty`), TMA is told to fill it: A [tile_m, 128], B [tile_n, 128] and
            the scales that go with them. When the bytes are there, `full` completes.
  multiply  Each consumer has half of the tile's rows, in parts of 64, the height of a WGMMA. Per
            part a chain of WGMMAs starts from zero and runs over the 128 of K. While it runs, the
            scales are read into registers; then total += partial * (scale of A * scale of B).
  release   The consumer arrives at `empty`. It is the other consumer's WGMMA that keeps the tensor
            core busy while this one promotes.
  epilogue  Totals are cast, written to shared memory, and stored by TMA, which clips at M and N.
            The next tile begins at once; a buffer is waited for only when it is needed again.

## Shards of B

A weight that was gathered along K lies shard after shard, [shards, N, K / shards]. Only `fetch`
needs to know: the steps of a tile walk through one shard, then through the next.

## Groups, for experts

Rows of A, or steps of K, may belong to groups, 128 at a time (kernels/gemm/grouped.py). Of rows,
`fetch` takes B and its scales from the group of the tile's rows. Of steps, a tile of D is as many
results: after the last step of a group the totals are stored there and start again from zero.
Either way the steps of a tile remain K / 128, and the ring does not notice.

Sizes: M, N and K are anything. The last tile over M, N or K reads zeros beyond the edge and stores
nothing there. Mosaic's TMA moves whole swizzled tiles: M in eights, K in 128s or 64s (the swizzle
of A and B is 64 bytes wide then), rows of D in 128 bytes. `matmul` pads other sizes with zeros,
which copies the operand once, and cuts D.
Scales are multiplied with each other first: a product beyond float32 gives infinity or NaN, below
2^-126 it may lose sums below 2^-101.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.formats import E4M3, E5M2
from fp8jax.kernels import smem
from fp8jax.kernels.gemm import tile_config, xla_sm90
from fp8jax.kernels.gemm.tile_config import BLOCK, CONSUMERS, WGMMA_ROWS, Config
from fp8jax.quantization import scaled_matrix
from fp8jax.recipe.gemm import Accumulate, accumulate_name

_WGMMA = plgpu.Layout.WGMMA


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
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, accumulate: Accumulate, out_dtype
):
  """[M, N]; see `matmul`. Under vmap one product after the other."""
  del accumulate
  return jax.custom_batching.sequential_vmap(functools.partial(matmul, out_dtype=out_dtype))(a, b)


def matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, *, out_dtype,
  config: Config | None = None, add_to=None, groups=None, num_groups: int = 0,
):  # fmt: skip
  """D [M, N] in out_dtype (bfloat16 or float32).

  Args:
    a: [M, K], scales per 1x128.
    b: [N, K], scales per 128x128 or 1x128; perhaps in shards of K, each a multiple of 128.
    config: default: what was fastest for this shape, or `tiles.default`.
    add_to: float32 [M, N] to which the product is added, tile by tile before it is stored, in place
      if it may be overwritten: gradient accumulation without another pass.
    groups: int32, see the module's docstring. [M / 128] with b [groups, N, K] and its scales
      [groups, N / 128, K / 128]; or, ascending, [K / 128] with num_groups.
    num_groups: D and add_to are [num_groups, M, N], the sum over K of each group; those without a
      step are left as they were.

  Raises:
    ValueError: a config that does not fit, an add_to that is not what D would be.
  """
  (m, k), n = a.data.shape, b.data.shape[-2]
  is_sum, shape = add_to is not None, (num_groups,) * bool(num_groups) + (m, n)
  if add_to is not None:
    tile_config.check_sum(add_to, shape, out_dtype)
  is_tiled = b.tile[0] == BLOCK
  config = config or tile_config.best(m, n, k, is_tiled, out_dtype, groups is not None)
  tile_config.check(config, out_dtype, of_rows=groups is not None and not num_groups)
  per_column = not is_tiled or config.tile_n != BLOCK
  a, b = _fitted(a, tile_config.UNIT_M), _fitted(b, tile_config.unit_n(out_dtype))
  operands = _operands(a, b, groups, per_column)
  programs = num_cores() // config.cluster_m
  whole = (*shape[:-2], a.data.shape[0], b.data.shape[-2])

  def scaled_matmul(*refs):
    *refs, d = refs
    program = _Program(config, programs, per_column, is_sum, _Global(d, *refs))
    pl.run_scoped(program.run, *program.memory(), collective_axes="wg")

  run = plgpu.kernel(
    scaled_matmul,
    out_type=() if is_sum else jax.ShapeDtypeStruct(whole, out_dtype),
    grid=(programs,),
    grid_names=("program",),
    cluster=(config.cluster_m,),
    cluster_names=("cluster",),
    num_threads=CONSUMERS + (config.producer == "warpgroup"),
    thread_name="wg",
    compiler_params=plgpu.CompilerParams(approx_math=True),
  )
  if add_to is None:
    return run(*operands)[..., :m, :n]
  d = jax.new_ref(jnp.pad(add_to, [(0, new - old) for old, new in zip(shape, whole)]))
  run(*operands, d)
  return jax.freeze(d)[..., :m, :n]


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
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, groups, per_column: bool
) -> list[jax.Array]:
  """The kernel's inputs, in the order of _Global; scales in lines as TMA reads them."""
  b_scale = b.scale.swapaxes(-1, -2)
  if per_column:
    b_scale = scaled_matrix.expand(b_scale, b_scale.ndim - 1, b.tile[0], b.data.shape[-2])
  operands = [a.data, b.data, _lines(a.scale.T), _lines(b_scale)]
  # After the last step comes another group.
  return operands if groups is None else [*operands, jnp.append(groups, -1)]


def _lines(scale):
  """[..., K / 128, rows] with rows padded to 16 bytes."""
  pads = [(0, 0)] * (scale.ndim - 1) + [(0, -scale.shape[-1] % 4)]
  return jnp.pad(scale, pads)


def num_cores() -> int:
  """SMs of the device that JAX computes on, those of an H200 if it is not a GPU."""
  device = jax.devices()[0]
  return device.core_count if device.platform == "gpu" else 132


class _Global(NamedTuple):
  """Operands and result in global memory."""

  d: Any
  a: Any
  b: Any
  a_scale: Any
  b_scale: Any
  groups: Any = None


class _Shared(NamedTuple):
  """Shared memory of a program."""

  a: Any
  b: Any
  a_scale: Any
  b_scale: Any
  d: Any
  full: Any
  empty: Any
  loaded: Any = None


class _Step(NamedTuple):
  """A step: its tile's number among this program's, its number in the tile, its slot in the ring,
  and where the tile begins in D."""

  tile: Any
  kb: Any
  slot: Any
  row: Any
  column: Any


class _State(NamedTuple):
  """What a consumer carries from step to step.

  Attributes:
    slot: of the next step.
    fetched: the step that is fetched next, None if that is not a consumer's work.
    of_blocks: B's block scales of the next steps (_Program.of_blocks).
  """

  slot: Any
  fetched: _Step | None
  of_blocks: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Program:
  """One program, as the module's docstring describes it."""

  config: Config
  programs: int
  per_column: bool
  is_sum: bool
  of: _Global

  @property
  def steps(self) -> int:
    return pl.cdiv(self.of.a.shape[1], BLOCK)

  @property
  def rows(self) -> int:
    """Of a consumer."""
    return self.config.tile_m // CONSUMERS

  @property
  def grid(self) -> tuple[int, int]:
    """Tiles of D, as a cluster of programs sees them."""
    m, n = self.of.d.shape[-2:]
    c = self.config
    return pl.cdiv(m, c.tile_m * c.cluster_m), pl.cdiv(n, c.tile_n)

  def of_group(self, ref, row):
    """B's data or scales for the rows of D from `row` on."""
    if self.of.groups is None or len(self.of.b.shape) == 2:
      return ref
    return ref.at[self.of.groups[lax.div(row, BLOCK)]]

  def of_shard(self, b, kb):
    """128 of K of B, from the shard that has them."""
    if len(b.shape) == 3:
      steps = b.shape[-1] // BLOCK
      b, kb = b.at[lax.div(kb, steps)], lax.rem(kb, steps)
    return b.at[:, pl.ds(kb * BLOCK, BLOCK)]

  @property
  def num_tiles(self):
    """Tiles of this program."""
    rows, columns = self.grid
    first = lax.axis_index("program")
    return lax.div(rows * columns - first + self.programs - 1, self.programs)

  def place(self, tile):
    """(row, column) of D where this program's tile number `tile` begins; beyond its last, of a tile
    that is there: elsewhere planar_snake may divide by 0, from which the compiler concludes that
    nobody asks, and drops what does."""
    rows, columns = self.grid
    tile = jnp.minimum(lax.axis_index("program") + tile * self.programs, rows * columns - 1)
    i, j = plgpu.planar_snake(tile, self.grid, 0, self.config.raster)
    i = i * self.config.cluster_m + lax.axis_index("cluster")
    return i * self.config.tile_m, j * self.config.tile_n

  def after(self, slot):
    """The next slot of the ring. No remainder: a division costs more than the promotion's sums."""
    return jnp.where(slot == self.config.stages - 1, 0, slot + 1)

  def memory(self) -> tuple:
    """Allocations, in the order of _Shared."""
    c, of = self.config, self.of
    columns, buffers = tile_config.epilogue(c)
    if c.cluster_m > 1:
      kind = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    else:
      kind = plgpu.Barrier
    memory = _Shared(
      a=smem.swizzled((c.stages, c.tile_m, BLOCK), of.a.dtype, of.a.shape[-1]),
      b=smem.swizzled((c.stages, c.tile_n, BLOCK), of.b.dtype, of.b.shape[-1]),
      a_scale=plgpu.SMEM((c.stages, c.tile_m), jnp.float32),
      b_scale=plgpu.SMEM(
        (c.stages, tile_config.scale_slot(c.tile_n)) if self.per_column else (1, 4), jnp.float32
      ),
      d=smem.swizzled((CONSUMERS, buffers, WGMMA_ROWS, columns), of.d.dtype),
      full=plgpu.Barrier(num_arrivals=3 + self.per_column, num_barriers=c.stages),
      empty=kind(num_arrivals=CONSUMERS, num_barriers=c.stages),
    )
    if self.is_sum:
      return (*memory[:-1], plgpu.Barrier(num_barriers=CONSUMERS * buffers))
    return memory[:-1]

  def run(self, *shared):
    shared = _Shared(*shared)
    wg = lax.axis_index("wg")
    pl.when(wg < CONSUMERS)(lambda: self.consume(shared, wg))
    if self.config.producer == "warpgroup":
      pl.when(wg == CONSUMERS)(lambda: self.produce(shared))

  def produce(self, shared: _Shared):
    plgpu.set_max_registers(40, action="decrease")

    def one_tile(tile, slot):
      row, column = self.place(tile)

      def step(kb, slot):
        self.fetch(shared, _Step(tile, kb, slot, row, column))
        return self.after(slot)

      return lax.fori_loop(0, self.steps, step, slot)

    lax.fori_loop(0, self.num_tiles, one_tile, jnp.int32(0))
    self.drain(shared)

  def drain(self, shared: _Shared):
    """Waits until nobody will arrive at this program's barriers any more.

    The other program of a cluster arrives at `empty` of this one. Were this one gone, it would
    write to shared memory of no one, or of the next program. `fetch` has waited for all arrivals
    at a slot but the last, also where there was nothing to fetch.
    """
    for slot in range(self.config.stages):
      plgpu.barrier_wait(shared.empty.at[slot])

  def fetch(self, shared: _Shared, step: _Step):
    """Starts the copies of a step when its slot is free."""
    c, of = self.config, self.of
    row, column = pl.multiple_of(step.row, c.tile_m), pl.multiple_of(step.column, c.tile_n)
    kb, slot = step.kb, step.slot
    at_m, at_n, at_k = pl.ds(row, c.tile_m), pl.ds(column, c.tile_n), pl.ds(kb * BLOCK, BLOCK)
    both = "cluster" if c.cluster_m > 1 else None
    full = shared.full.at[slot]
    plgpu.barrier_wait(shared.empty.at[slot])
    plgpu.copy_gmem_to_smem(of.a.at[at_m, at_k], shared.a.at[slot], full)
    b = self.of_shard(self.of_group(of.b, row), kb).at[at_n]
    plgpu.copy_gmem_to_smem(b, shared.b.at[slot], full, collective_axes=both)
    plgpu.copy_gmem_to_smem(of.a_scale.at[kb, at_m], shared.a_scale.at[slot], full)
    if self.per_column:
      b_scale = self.of_group(of.b_scale, row).at[kb, at_n]
      plgpu.copy_gmem_to_smem(b_scale, self.columns_of(shared, slot), full)

  def columns_of(self, shared: _Shared, slot):
    """Scales of the tile's columns."""
    return shared.b_scale.at[slot, pl.ds(0, self.config.tile_n)]

  @property
  def unroll(self) -> int:
    """Steps that are written out in the loop over K: as many as B's block scales are ahead, so that
    none is moved to another register, for which it would have to have arrived."""
    return 1 if self.per_column else 2

  def of_blocks(self, row, column, kb=0):
    """B's block scales of `unroll` steps from kb on, () if they come by TMA.

    Beyond the last step, or the last tile, they are others, and nobody uses them.
    """
    if self.per_column:
      return ()
    m, n = self.of.d.shape[-2:]
    scales = self.of_group(self.of.b_scale, jnp.clip(row, 0, m - 1))
    column = lax.div(jnp.clip(column, 0, n - 1), BLOCK)
    return tuple(scales[jnp.minimum(kb + i, self.steps - 1), column] for i in range(self.unroll))

  def fetch_inline(self, shared: _Shared, wg, step: _Step) -> _Step:
    """The same by the first consumer, if there is such a step; the step after it."""
    pl.when((wg == 0) & (step.tile < self.num_tiles))(lambda: self.fetch(shared, step))
    slot, kb = self.after(step.slot), step.kb + 1

    def next_tile():
      return step.tile + 1, jnp.int32(0), *self.place(step.tile + 1)

    same_tile = lambda: (step.tile, kb, step.row, step.column)  # noqa: E731
    tile, kb, row, column = lax.cond(kb == self.steps, next_tile, same_tile)
    return _Step(tile, kb, slot, row, column)

  def consume(self, shared: _Shared, wg):
    c = self.config
    if c.producer == "warpgroup":
      plgpu.set_max_registers(232, action="increase")
    for slot in range(c.stages):
      plgpu.barrier_arrive(shared.empty.at[slot])
    fetched = None
    if c.producer == "inline":
      fetched = _Step(jnp.int32(0), jnp.int32(0), jnp.int32(0), *self.place(0))
      for _ in range(c.stages - 1):
        fetched = self.fetch_inline(shared, wg, fetched)
    state = _State(jnp.int32(0), fetched, self.of_blocks(*self.place(0)))
    one_tile = functools.partial(self.one_tile, shared, wg)
    lax.fori_loop(0, self.num_tiles, one_tile, state)
    if c.producer == "inline":
      pl.when(wg == 0)(lambda: self.drain(shared))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  def one_tile(self, shared: _Shared, wg, tile, state: _State) -> _State:
    row, column = self.place(tile)
    zero = jnp.zeros((WGMMA_ROWS, self.config.tile_n), jnp.float32)
    zeros = (plgpu.layout_cast(zero, _WGMMA),) * (self.rows // WGMMA_ROWS)

    def store(d, totals):
      for part, total in enumerate(totals):
        at_m = row + wg * self.rows + part * WGMMA_ROWS
        self.store(shared, wg, total.astype(d.dtype), part, d, pl.ds(at_m, WGMMA_ROWS), column)
      return zeros

    def step(kb, totals, state, of_block, load):
      totals, state, loaded = self.one_step(shared, wg, totals, state, of_block, load)
      if len(self.of.d.shape) == 2:
        return totals, state, loaded
      group = self.of.groups[kb]
      is_last = self.of.groups[kb + 1] != group
      totals = lax.cond(is_last, lambda: store(self.of.d.at[group], totals), lambda: totals)
      return totals, state, loaded

    def steps(i, carried, count=self.unroll):
      totals, state = carried
      kb, now, loaded = i * self.unroll, state.of_blocks, ()
      for turn in range(count):
        # The next round's scales have all of this one to arrive.
        load = None if turn else lambda: self.of_blocks(row, column, kb + self.unroll)
        of_block = now[turn] if now else None
        totals, state, new = step(kb + turn, totals, state, of_block, load)
        loaded = new if turn == 0 else loaded
      return totals, state._replace(of_blocks=loaded)

    rounds, left = divmod(self.steps, self.unroll)
    carried = lax.fori_loop(0, rounds, steps, (zeros, state))
    totals, state = steps(jnp.int32(rounds), carried, left)
    state = state._replace(of_blocks=self.of_blocks(*self.place(tile + 1)))
    if len(self.of.d.shape) == 2:
      store(self.of.d, totals)
    return state

  def one_step(self, shared: _Shared, wg, totals, state: _State, of_block, load):
    """(the totals with 128 of K more, the state after it, load()).

    Args:
      of_block: B's scale, None if there is one per column.
      load: starts loads that later steps need, None if there are none.
    """
    slot, fetched, of_blocks = state
    plgpu.barrier_wait(shared.full.at[slot])
    new, loaded = [], ()
    for part, total in enumerate(totals):

      def multiply(acc, part=part, fetched=fetched):
        tasks = (fetched, load) if part == 0 else (None, None)
        return self.multiply(shared, wg, slot, part, *tasks, acc)

      acc = plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, self.config.tile_n), jnp.float32)
      partial, of_rows, of_columns, tasks = pl.run_scoped(multiply, acc)
      if part == 0:
        fetched, loaded = tasks
      if part == len(totals) - 1:
        plgpu.barrier_arrive(shared.empty.at[slot])
      if self.per_column:
        scale = lax.broadcast_in_dim(of_rows, partial.shape, [0])
        scale = scale * lax.broadcast_in_dim(of_columns, partial.shape, [1])
      else:
        scale = lax.broadcast_in_dim(of_rows * of_block, partial.shape, [0])
      new.append(total + partial * scale)
    return tuple(new), _State(self.after(slot), fetched, of_blocks), loaded

  def multiply(self, shared: _Shared, wg, slot, part: int, fetched, load, acc):
    """(64 rows and 128 of K of A . B', scales of the rows, scales of the columns if many, (the step
    that is fetched next, load()))."""
    at = pl.ds(wg * self.rows + part * WGMMA_ROWS, WGMMA_ROWS)
    plgpu.wgmma(acc, shared.a.at[slot, at], shared.b.at[slot].transpose((1, 0)))
    # The tensor core is busy from here to the last line.
    if fetched is not None:
      fetched = self.fetch_inline(shared, wg, fetched)
    of_rows = plgpu.load(shared.a_scale.at[slot, at], layout=_WGMMA.reduce(1))
    of_columns = None
    if self.per_column:
      of_columns = plgpu.load(self.columns_of(shared, slot), layout=_WGMMA.reduce(0))
    # TMA writes there next, and by another path than these loads take.
    plgpu.commit_smem()
    loaded = load() if load is not None else ()  # behind the fence, which would wait for it
    return acc[...], of_rows, of_columns, (fetched, loaded)

  def store(self, shared: _Shared, wg, value, part: int, d, at_m, column):
    columns, buffers = tile_config.epilogue(self.config)
    per_part = self.config.tile_n // columns
    for c in range(per_part):
      count = part * per_part + c
      buffer = count % buffers
      there = d.at[at_m, pl.ds(column + c * columns, columns)]
      # The last store of the tile before may have been from this buffer, too; it is long done.
      plgpu.wait_smem_to_gmem(buffers - 1 if count else 0, wait_read_only=True)
      chunk = value[:, c * columns : (c + 1) * columns]
      if self.is_sum:
        loaded = shared.loaded.at[wg * buffers + buffer]
        plgpu.copy_gmem_to_smem(there, shared.d.at[wg, buffer], loaded)
        plgpu.barrier_wait(loaded)
        chunk = shared.d[wg, buffer] + chunk
      shared.d[wg, buffer] = chunk
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(shared.d.at[wg, buffer], there)
