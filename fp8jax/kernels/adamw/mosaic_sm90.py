"""AdamW of one parameter in one pass over everything that it reads and writes. For Hopper.

XLA makes several passes of it, with both moments in float32 written in between, because a group's
amax comes before its codes: 55 bytes per parameter for COAT's moments, 14 here. Here a tensor is
read as rows of one group each (128 or 256 numbers; 64 where nothing is grouped), and a tile is as
many rows as a warpgroup holds in registers, 2048 or 4096 parameters:

  TMA         gradient, master, codes, scales, powers of a tile -> one slot of shared memory
  warpgroup   slot -> registers: moments become float32, are updated and used (reference.py);
              the amax of a row, found by the lanes that share it, quantizes them again (lanes.py)
              -> slot
  TMA         slot -> where all this came from, and two sums of squares per row

A warpgroup has two slots: while it computes one, the next tile comes in and the last goes out. It
walks through tiles on its own; the three of a multiprocessor only share it. Operands are updated in
place: a caller that donates them allocates nothing, for another XLA makes copies first.

Four lanes hold a row of 128, eight one of 256, each 32 numbers in runs of four: shared memory is
read and written in 4 to 16 bytes per lane, and what a scale costs is repeated by few lanes.

Against the reference: the same operations in the same order, interpreted to the same bits. On a GPU
mul and add contract to fma, in XLA's programs too, and division, square root, log2 and exp2 are the
hardware's: div.full and sqrt.approx within 2 ulp, ex2.approx 2^-22 of the result, lg2.approx 2^-22
of the result or, between 1/2 and 2, absolute. Expanded values (stored as |x|^k, k up to 16) are so
within 2^-18 of itself, where E4M3 has steps of 2^-4 and 2^-3: computed in float64 with errors of
that size, 14 of a million codes fell on the other side of a boundary, none further.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.formats import BF16, E4M3, E5M2
from fp8jax.kernels import smem
from fp8jax.kernels.adamw import lanes, reference
from fp8jax.kernels.adamw.reference import AdamWHparams, StepScalars
from fp8jax.kernels.device import Device
from fp8jax.kernels.gemm import mosaic_sm90 as gemm
from fp8jax.kernels.mosaic import pl, plgpu
from fp8jax.quantization import bf16_remainder, quantized_tensor
from fp8jax.recipe.quant import WHOLE, Rounding, Scale

GROUPS = (128, 256)
_UNGROUPED = 64  # columns where no moment has groups
_SLOTS = 2
_WARPGROUPS = 3  # at most: a fourth would leave each thread 128 registers, and 168 are needed
_SHARED = 227 * 1024  # bytes of a multiprocessor that one program can have
_WIDE = (jnp.float32, jnp.bfloat16)


def supports(gradient, master, mu, nu, device: Device) -> str | None:
  """Whether the kernel takes these, or why not; arrays may be abstract."""
  if device.platform != "gpu" or device.capability != 90:
    return "needs a Hopper GPU (compute capability 9.0)"
  if gradient.dtype not in _WIDE:
    return f"reads gradients in float32 or bfloat16, not {gradient.dtype}"
  dtypes = [x.dtype for x in jax.tree.leaves(master)]
  if dtypes not in ([jnp.float32], [jnp.bfloat16, jnp.int16]):
    return f"the master is float32 or Split, not {dtypes}"
  for name, moment in (("mu", mu), ("nu", nu)):
    if reason := _refusal(name, moment):
      return reason
  groups = {m.quant.tile[1] for m in (mu, nu) if lanes.is_grouped(m)}
  if len(groups) > 1:
    return f"a row is one group: mu and nu have groups of {sorted(groups)}"
  columns, row = _columns(mu, nu), math.prod(gradient.shape)
  if groups and row:
    row = math.prod(gradient.shape[quantized_tensor.group_axes(gradient.shape, columns) :])
  if row % columns or not row:
    return f"{list(gradient.shape)} has rows of {row} numbers, no multiple of {columns}"
  if (rows := math.prod(gradient.shape) // columns) % smem.ROWS:
    return (
      f"{list(gradient.shape)} is {rows} rows of {columns} numbers; expected a multiple of "
      f"{smem.ROWS}: TMA moves whole tiles of {smem.ROWS} rows, and padding would copy the state"
    )
  return None


def _refusal(name: str, moment) -> str | None:
  if not isinstance(moment, quantized_tensor.QuantizedTensor):
    return None if moment.dtype in _WIDE else f"{name} in {moment.dtype}: float32 or bfloat16"
  quant = moment.quant
  if quant.rounding is not Rounding.NEAREST:
    return f"{name}={quant}: rounds to the nearest only"
  if quant.scale is Scale.NONE:
    return None if quant.format is BF16 else f"{name}={quant}: without scales bf16 only"
  if quant.tile[1] == WHOLE:
    return f"{name}={quant}: a scale of the whole tensor takes a pass before this one"
  if quant.format not in (E4M3, E5M2) or quant.tile[1] not in GROUPS:
    return f"{name}={quant}: 8-bit numbers in groups of {GROUPS} only"
  if quant.scale is not Scale.F32:
    return f"{name}={quant}: scales are f32"
  return None


def update(gradient, master, mu, nu, scalars: StepScalars, is_applied, rule: AdamWHparams):
  """See `api.update`."""
  columns = _columns(mu, nu)
  rows = gradient.size // columns
  state, tree = jax.tree.flatten((master, mu, nu))

  def as_rows(x):
    return x.reshape((rows, columns) if x.size == gradient.size else (rows,))

  program = _Program.of(rows, columns, [gradient, *state], rule)
  values = jnp.stack([*scalars, jnp.asarray(is_applied, jnp.float32)])
  refs = [jax.new_ref(as_rows(x)) for x in state]

  def adam(gradient, values, *refs):
    master, mu, nu = jax.tree.unflatten(tree, refs[: len(state)])
    there = _Arrays(gradient, master, mu, nu, refs[len(state) :])
    run = functools.partial(program.run, there, values)
    pl.run_scoped(run, *program.memory(there), collective_axes="warpgroup")

  run = plgpu.kernel(
    adam,
    out_type=[jax.ShapeDtypeStruct((rows,), jnp.float32)] * 2,
    grid=(pl.cdiv(program.walkers, program.warpgroups),),
    grid_names=("core",),
    num_threads=program.warpgroups,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(approx_math=True),
  )
  squares = run(as_rows(gradient), values, *refs)
  state = [jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, state)]
  return *jax.tree.unflatten(tree, state), jnp.stack([x.sum() for x in squares])


def _over_rows(x):
  """Sum of squares of every row."""
  return jnp.sum(x * x, axis=1)


def _columns(*moments) -> int:
  """Numbers in a row: a group, whose size the moments share."""
  return next((m.quant.tile[1] for m in moments if lanes.is_grouped(m)), _UNGROUPED)


class _Arrays(NamedTuple):
  """Everything that a step reads and writes, in global memory or in slots of shared memory.

  Attributes:
    squares: sums over every row: of what is added to the master, and of the master before.
  """

  gradient: Any
  master: Any
  mu: Any
  nu: Any
  squares: Any

  @property
  def read(self) -> list:
    return jax.tree.leaves(self[:4])

  @property
  def written(self) -> list:
    return jax.tree.leaves(self[1:])


@dataclasses.dataclass(frozen=True)
class _Program:
  """The kernel that the module's docstring describes.

  Attributes:
    rows, columns: of the tensor, as the kernel reads it.
    warpgroups: of a program; there is one program per multiprocessor.
    walkers: warpgroups altogether that have tiles.
  """

  rows: int
  columns: int
  rule: AdamWHparams
  warpgroups: int = 1
  walkers: int = 1

  @classmethod
  def of(cls, rows: int, columns: int, arrays, rule: AdamWHparams) -> "_Program":
    """As many warpgroups as shared memory has slots for; `arrays` are all that is read."""
    shape = cls(rows, columns, rule)
    tile = sum(x.size * x.dtype.itemsize for x in arrays) * shape.tile_rows // rows
    tile += 2 * 128 + 1024  # sums of squares; alignment
    warpgroups = min(_WARPGROUPS, max(1, _SHARED // (_SLOTS * tile)))
    walkers = min(shape.num_tiles, gemm.num_cores() * warpgroups)
    return dataclasses.replace(shape, warpgroups=warpgroups, walkers=walkers)

  @property
  def tile_rows(self) -> int:
    """As many as a warpgroup holds in registers: 32 or 16 numbers of every array per thread."""
    return 128 * (32 if self.columns in GROUPS else 16) // self.columns

  @property
  def num_tiles(self) -> int:
    return pl.cdiv(self.rows, self.tile_rows)

  @property
  def layout(self):
    """Of a tile in registers: runs of four numbers, in turn to the lanes that share a row."""
    per_warp = self.tile_rows // 4
    run = 4 * (32 // per_warp)
    tiling = plgpu.Tiling(((self.tile_rows, run), (per_warp, run), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

  def slots(self, x):
    """Shared memory for tiles of x."""
    if len(x.shape) == 2:
      return smem.swizzled((self.warpgroups, _SLOTS, self.tile_rows, self.columns), x.dtype)
    # TMA writes from multiples of 128 bytes on.
    width = max(self.tile_rows, 128 // jnp.dtype(x.dtype).itemsize)
    return plgpu.SMEM((self.warpgroups, _SLOTS, width), x.dtype)

  def memory(self, there: _Arrays) -> list:
    """Slots of all arrays in their order, and a barrier for each slot."""
    slots = [self.slots(x) for x in jax.tree.leaves(there)]
    barriers = self.warpgroups * _SLOTS
    return [*slots, plgpu.Barrier(num_arrivals=len(there.read), num_barriers=barriers)]

  def run(self, there: _Arrays, values, *memory):
    """The program of a warpgroup. `values`: Scalars, and whether the step is applied."""
    *slots, full = memory
    warpgroup = lax.axis_index("warpgroup")
    slots = [x.at[warpgroup] for x in slots]
    inside = jax.tree.unflatten(jax.tree.structure(there), slots)
    *by, is_applied = (values[i] for i in range(values.shape[0]))
    first = lax.axis_index("core") * self.warpgroups + warpgroup
    count = lax.div(self.num_tiles - first + self.walkers - 1, self.walkers)

    def fetch(n):
      slot = lax.rem(n, _SLOTS)
      barrier = full.at[warpgroup * _SLOTS + slot]
      for source, place in zip(there.read, inside.read):
        source = self.tile(source, first + n * self.walkers)
        plgpu.copy_gmem_to_smem(source, self.slot(place, slot), barrier)

    def one(n, _):
      slot = lax.rem(n, _SLOTS)
      # The other slot's results are being stored; the store must end before the slot is written.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      pl.when(n + 1 < count)(lambda: fetch(n + 1))
      plgpu.barrier_wait(full.at[warpgroup * _SLOTS + slot])
      self.step(inside, lambda x: self.slot(x, slot), StepScalars(*by), is_applied > 0)
      plgpu.commit_smem()
      for source, place in zip(inside.written, there.written):
        place = self.tile(place, first + n * self.walkers)
        plgpu.copy_smem_to_gmem(self.slot(source, slot), place)

    pl.when(count > 0)(lambda: fetch(0))
    lax.fori_loop(0, count, one, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  def tile(self, x, number):
    """In global memory; what sticks out is zeros to a load, and not stored."""
    return x.at[pl.ds(number * self.tile_rows, self.tile_rows)]

  def slot(self, x, number):
    return x.at[number, pl.ds(0, self.tile_rows)]

  def step(self, inside: _Arrays, at: Callable, scalars: StepScalars, is_applied):
    """One step of a tile, or only its sums; `at` says where in every slot it is."""

    def load(x):
      return plgpu.load(at(x), layout=self.layout)

    def update():
      g, p = load(inside.gradient).astype(jnp.float32), read()
      m, v = (lanes.unpack(x, at, self.layout) for x in (inside.mu, inside.nu))
      change, m, v = reference.step(g, p, m, v, scalars, self.rule)
      note(_over_rows(change), _over_rows(p))
      master = bf16_remainder.like(p + change, inside.master)
      for place, x in zip(jax.tree.leaves(inside.master), jax.tree.leaves(master)):
        at(place)[...] = x
      lanes.pack(m, inside.mu, at)
      lanes.pack(v, inside.nu, at)

    def read():
      return bf16_remainder.to_float32(jax.tree.map(load, inside.master))

    def note(*sums):
      for place, x in zip(inside.squares, sums):
        at(place)[...] = x

    def keep():
      nothing = jnp.zeros(self.tile_rows, jnp.float32)
      note(plgpu.layout_cast(nothing, self.layout.reduce(1)), _over_rows(read()))

    pl.when(is_applied)(update)
    pl.when(~is_applied)(keep)
