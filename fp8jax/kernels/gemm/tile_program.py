"""The program of one multiprocessor in the Hopper GEMM, and its tiles of D.

  grid      One program per SM, for good. It takes one output tile after the other, in an order in
            which tiles of one time share rows of A and columns of B in L2 (`place`).
  threads   Three warpgroups of 128 threads: two multiply, a warp of the third starts copies. Or two
            alone, of which the first also starts copies (Config.producer).
  step      One output tile is K / 128 steps. The steps of all tiles of a program go through one
            ring, so that copies for the next tile start while the last one is still being written.
            Nothing is divided from one step to the next: slots are counted (`after`), places are
            computed once per tile.
  fetch     A step lives in a slot of the ring in shared memory. Once both consumers have left the
            slot (`empty`), TMA is told to fill it: A [tile_m, 128], B [tile_n, 128] and the scales
            of rows and columns. When the bytes are there, `full` completes.
  multiply  Each consumer has half of the tile's rows, in parts of 64, the height of a WGMMA. Per
            part a chain of WGMMAs starts from zero and runs over the 128 of K. While it runs, the
            scales are read into registers; then total += partial * (scale of A * scale of B).
            B's scales, one for the columns of each block that the tile touches, are loaded from
            global memory a round of two steps ahead. Where each column has its own and registers
            are few (`chunks`), those of 64 columns are read meanwhile, and the next 64 as the sums
            before them are added up.
  release   The consumer arrives at `empty` when it has read the last scales. It is the other
            consumer's WGMMA that keeps the tensor core busy while this one promotes.
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

## Layers

B, or the D that is added to, may be one layer of a stack and is read where it lies: the reference
is of that layer, whose number is one more coordinate for TMA (`of_layers`).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from fp8jax.kernels import smem
from fp8jax.kernels.gemm import tile_config
from fp8jax.kernels.gemm.tile_config import BLOCK, CONSUMERS, WGMMA_ROWS, Config
from fp8jax.kernels.mosaic import pl, plgpu


class Global(NamedTuple):
  """Operands and result in global memory."""

  d: Any
  a: Any
  b: Any
  a_scale: Any
  b_scale: Any
  groups: Any = None


def of_layers(d, refs, names: tuple[str, ...]) -> Global:
  """Global of the kernel's references; those of `names`, stacks, are of the layers whose numbers
  the last of `refs` has."""
  if not names:
    return Global(d, *refs)
  *refs, numbers = refs
  of = Global(d, *refs)
  return of._replace(**{x: getattr(of, x).at[numbers[i]] for i, x in enumerate(names)})


class Shared(NamedTuple):
  """Shared memory of a program."""

  a: Any
  b: Any
  a_scale: Any
  b_scale: Any
  d: Any
  full: Any
  empty: Any
  loaded: Any = None


class Step(NamedTuple):
  """A step: its tile's number among this program's, its number in the tile, its slot in the ring,
  and where the tile begins in D."""

  tile: Any
  kb: Any
  slot: Any
  row: Any
  column: Any


class State(NamedTuple):
  """The values that a consumer carries from step to step.

  Attributes:
    slot: of the next step.
    fetched: the step that is fetched next, None if that is not a consumer's work.
    of_blocks: B's block scales of the next steps (Program.of_blocks).
  """

  slot: Any
  fetched: Step | None
  of_blocks: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Program:
  """One program, as the module's docstring describes it."""

  config: Config
  programs: int
  per_column: bool
  is_sum: bool
  of: Global

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
    """(row, column) of D where this program's tile number `tile` begins; beyond its last perhaps
    nowhere in D."""
    tile = lax.axis_index("program") + tile * self.programs
    i, j = snake(tile, self.grid, self.config.raster)
    i = i * self.config.cluster_m + lax.axis_index("cluster")
    return i * self.config.tile_m, j * self.config.tile_n

  def after(self, slot):
    """The next slot of the ring. No remainder: a division costs more than the promotion's sums."""
    return jnp.where(slot == self.config.stages - 1, 0, slot + 1)

  def memory(self) -> tuple:
    """Allocations, in the order of Shared."""
    c, of = self.config, self.of
    columns, buffers = tile_config.epilogue(c, of.d.dtype)
    if c.cluster_m > 1:
      kind = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    else:
      kind = plgpu.Barrier
    memory = Shared(
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
    shared = Shared(*shared)
    wg = lax.axis_index("wg")
    pl.when(wg < CONSUMERS)(lambda: self.consume(shared, wg))
    if self.config.producer == "warpgroup":
      pl.when(wg == CONSUMERS)(lambda: self.produce(shared))

  def produce(self, shared: Shared):
    plgpu.set_max_registers(40, action="decrease")
    # One warp: four would each compute the same addresses, in time that the consumers need.
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: self.fetch_all(shared)))

  def fetch_all(self, shared: Shared):
    def one_tile(tile, slot):
      row, column = self.place(tile)

      def step(kb, slot):
        self.fetch(shared, Step(tile, kb, slot, row, column))
        return self.after(slot)

      return lax.fori_loop(0, self.steps, step, slot)

    lax.fori_loop(0, self.num_tiles, one_tile, jnp.int32(0))
    self.drain(shared)

  def drain(self, shared: Shared):
    """Waits until nobody will arrive at this program's barriers any more.

    The other program of a cluster arrives at `empty` of this one. Were this one gone, it would
    write to shared memory of no one, or of the next program. `fetch` has waited for all arrivals
    at a slot but the last, also where there was nothing to fetch.
    """
    for slot in range(self.config.stages):
      plgpu.barrier_wait(shared.empty.at[slot])

  def fetch(self, shared: Shared, step: Step):
    """Starts the copies of a step when its slot is free."""
    c, of = self.config, self.of
    kb, slot, row, column = step.kb, step.slot, step.row, step.column
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
      plgpu.copy_gmem_to_smem(b_scale, self.columns_of(shared, slot, slice(0, c.tile_n)), full)

  def columns_of(self, shared: Shared, slot, chunk: slice):
    """Scales of some of the tile's columns."""
    return shared.b_scale.at[slot, pl.ds(chunk.start, chunk.stop - chunk.start)]

  @property
  def unroll(self) -> int:
    """Steps that are written out in the loop over K: as many as B's block scales are ahead, so that
    none is moved to another register, for which it would have to have arrived."""
    return 1 if self.per_column else 2

  @property
  def ahead(self) -> int:
    """Steps between what a consumer fetches and what it multiplies. A slot that is released late,
    among the sums of its step, is asked for a step later."""
    is_late = self.per_column and len(self.chunks) > 1
    return max(self.config.stages - 1 - is_late, 1)

  @property
  def chunks(self) -> list[slice]:
    """Columns of a tile that are promoted together: of one block of B, if it has one scale."""
    n, width = self.config.tile_n, tile_config.PROMOTED
    is_whole = n <= BLOCK and self.config.producer == "inline"  # there are registers for all
    if not self.per_column:
      width = math.gcd(n, BLOCK)
    elif n % width or is_whole:
      width = n
    return [slice(start, start + width) for start in range(0, n, width)]

  def of_blocks(self, row, column, kb=0):
    """B's block scales of `unroll` steps from kb on, one for each chunk; () if they come by TMA.

    Beyond the last step, or the last tile, they are others, and nobody uses them.
    """
    if self.per_column:
      return ()
    m, n = self.of.d.shape[-2:]
    scales = self.of_group(self.of.b_scale, jnp.clip(row, 0, m - 1))
    columns = [lax.div(jnp.clip(column + c.start, 0, n - 1), BLOCK) for c in self.chunks]
    steps = [jnp.minimum(kb + i, self.steps - 1) for i in range(self.unroll)]
    return tuple(tuple(scales[step, column] for column in columns) for step in steps)

  def fetch_inline(self, shared: Shared, wg, step: Step) -> Step:
    """The same by the first consumer, if there is such a step; the step after it."""
    c = self.config
    row, column = pl.multiple_of(step.row, c.tile_m), pl.multiple_of(step.column, c.tile_n)
    step = step._replace(row=row, column=column)
    pl.when((wg == 0) & (step.tile < self.num_tiles))(lambda: self.fetch(shared, step))
    slot, kb = self.after(step.slot), step.kb + 1

    def next_tile():
      return step.tile + 1, jnp.int32(0), *self.place(step.tile + 1)

    same_tile = lambda: (step.tile, kb, step.row, step.column)  # noqa: E731
    tile, kb, row, column = lax.cond(kb == self.steps, next_tile, same_tile)
    return Step(tile, kb, slot, row, column)

  def consume(self, shared: Shared, wg):
    c = self.config
    if c.producer == "warpgroup":
      plgpu.set_max_registers(232, action="increase")
    for slot in range(c.stages):
      plgpu.barrier_arrive(shared.empty.at[slot])
    fetched = None
    if c.producer == "inline":
      fetched = Step(jnp.int32(0), jnp.int32(0), jnp.int32(0), *self.place(0))
      for _ in range(self.ahead):
        fetched = self.fetch_inline(shared, wg, fetched)
    state = State(jnp.int32(0), fetched, self.of_blocks(*self.place(0)))
    one_tile = functools.partial(self.one_tile, shared, wg)
    lax.fori_loop(0, self.num_tiles, one_tile, state)
    if c.producer == "inline":
      pl.when(wg == 0)(lambda: self.drain(shared))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  def one_tile(self, shared: Shared, wg, tile, state: State) -> State:
    row, column = self.place(tile)
    width = self.chunks[0].stop
    zero = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
    zeros = ((zero,) * len(self.chunks),) * (self.rows // WGMMA_ROWS)

    def store(d, totals):
      for part, total in enumerate(totals):
        at_m = row + wg * self.rows + part * WGMMA_ROWS
        self.store(shared, wg, total, part, d, pl.ds(at_m, WGMMA_ROWS), column)
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

  def one_step(self, shared: Shared, wg, totals, state: State, of_block, load):
    """(the totals with 128 of K more, the state after it, load()).

    Args:
      of_block: B's scale of each chunk, None if there is one per column.
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
      is_last = part == len(totals) - 1
      if self.per_column:
        scales = of_rows, of_columns
        new.append(self.by_column(shared, slot, is_last, total, partial, *scales))
        continue
      if is_last:
        plgpu.barrier_arrive(shared.empty.at[slot])
      shape = total[0].shape
      scales = [lax.broadcast_in_dim(of_rows * scale, shape, [0]) for scale in of_block]
      partials = [partial[:, chunk] for chunk in self.chunks]
      new.append(tuple(t + p * scale for t, p, scale in zip(total, partials, scales)))
    return tuple(new), State(self.after(slot), fetched, of_blocks), loaded

  def by_column(self, shared: Shared, slot, is_last: bool, total, partial, of_rows, of_columns):
    """The total with a partial sum more, whose columns have a scale each.

    Args:
      is_last: nobody needs the slot after it.
      of_columns: scales of the first chunk.
    """
    new = []
    for number, (chunk, own) in enumerate(zip(self.chunks, total)):
      if number:
        of_columns = plgpu.load(
          self.columns_of(shared, slot, chunk), layout=plgpu.Layout.WGMMA.reduce(0)
        )
      if is_last and number == len(total) - 1:
        if number:
          plgpu.commit_smem()  # as in `multiply`
        plgpu.barrier_arrive(shared.empty.at[slot])
      scale = lax.broadcast_in_dim(of_rows, own.shape, [0])
      scale = scale * lax.broadcast_in_dim(of_columns, own.shape, [1])
      new.append(own + partial[:, chunk] * scale)
    return tuple(new)

  def multiply(self, shared: Shared, wg, slot, part: int, fetched, load, acc):
    """(64 rows and 128 of K of A . B', scales of the rows, scales of the first columns if each has
    one, (the step that is fetched next, load()))."""
    at = pl.ds(wg * self.rows + part * WGMMA_ROWS, WGMMA_ROWS)
    plgpu.wgmma(acc, shared.a.at[slot, at], shared.b.at[slot].transpose((1, 0)))
    # The tensor core is busy from here to the last line.
    if fetched is not None:
      fetched = self.fetch_inline(shared, wg, fetched)
    of_rows = plgpu.load(shared.a_scale.at[slot, at], layout=plgpu.Layout.WGMMA.reduce(1))
    of_columns = None
    if self.per_column:
      first = self.columns_of(shared, slot, self.chunks[0])
      of_columns = plgpu.load(first, layout=plgpu.Layout.WGMMA.reduce(0))
    if not self.per_column or len(self.chunks) == 1:
      # TMA writes there next, and by another path than these loads take.
      plgpu.commit_smem()
    # The loads follow the fence: it waits for all loads before it.
    loaded = load() if load is not None else ()
    return acc[...], of_rows, of_columns, (fetched, loaded)

  def store(self, shared: Shared, wg, value, part: int, d, at_m, column):
    columns, buffers = tile_config.epilogue(self.config, self.of.d.dtype)
    # Mosaic forgets where a copy of one swizzled tile begins, if the array has no other beside it:
    # what lies beyond D's only tile of columns would be stored over that.
    per_part = min(self.config.tile_n // columns, pl.cdiv(self.of.d.shape[-1], columns))
    for c in range(per_part):
      count = part * per_part + c
      buffer = count % buffers
      there = d.at[at_m, pl.ds(column + c * columns, columns)]
      # The last store of the tile before may have been from this buffer, too; it is long done.
      plgpu.wait_smem_to_gmem(buffers - 1 if count else 0, wait_read_only=True)
      chunk, start = divmod(c * columns, self.chunks[0].stop)
      chunk = value[chunk][:, start : start + columns]
      if self.is_sum:
        loaded = shared.loaded.at[wg * buffers + buffer]
        plgpu.copy_gmem_to_smem(there, shared.d.at[wg, buffer], loaded)
        plgpu.barrier_wait(loaded)
        chunk = shared.d[wg, buffer].astype(jnp.float32) + chunk
      shared.d[wg, buffer] = chunk.astype(d.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(shared.d.at[wg, buffer], there)


def snake(tile, grid: tuple[int, int], width: int):
  """(row, column) in a grid of [rows, columns] of tile number `tile`, for locality: down `width`
  rows, column after column, back again in the next `width` rows.

  That of `plgpu.planar_snake`, but for divisors, which are constants here. Code that is compiled
  to be linked divides by anything else in a function of its own, and where there is a call, ptxas
  lets no matrix instruction run beside another (C7509).
  """
  rows, columns = grid
  strips, left = divmod(rows, width)
  full = strips * width * columns
  strip, within = lax.div(tile, width * columns), lax.rem(tile, width * columns)
  column, row = lax.div(within, width), lax.rem(within, width)
  if left:
    is_full, within = tile < full, tile - full
    strip = jnp.where(is_full, strip, strips)
    column = jnp.where(is_full, column, lax.div(within, left))
    row = jnp.where(is_full, row, lax.rem(within, left))
  column = jnp.where(strip % 2 == 0, column, columns - 1 - column)
  return strip * width + row, column
