"""AdamW of one parameter in one pass over everything that it reads and writes. For Hopper.

The reference's arithmetic is some hundred instructions per parameter on a dozen bytes; what matters
is that every byte moves once. The tensor is read as rows of one group each (128 or 256 numbers; 64
where nothing is grouped), and a tile is the rows that a warpgroup holds in registers at one time,
2048 or 4096 parameters:

  TMA           gradient, master, codes, scales and exponents of a tile -> one slot of shared memory
  warpgroup     slot -> registers: moments made wide, moved, used; then amax (and minimum) of every
                group over the lanes that share it, moments made narrow -> the same place
  TMA           slot -> where it came from, and the BF16 weight, in the gradient's place if it is
                BF16 too

Everything but the weight is written over what was read, in global memory as well. A program has
two slots and walks through tiles; while one is computed the next is on its way. Several programs
share a multiprocessor, so that some compute while others wait.

Four lanes (eight for 256) hold a group, 32 numbers each in runs of four: loads and stores of shared
memory are then 4 to 16 bytes wide, and the few dozen instructions that scales take are repeated by
four lanes only.

Against the reference: the operations are the same, and so are the bits where a machine computes
them alike. On a GPU mul and add are contracted to fma; square roots, exp2 and log2 are the
hardware's: sqrt.approx to 1 ulp, ex2.approx to 2 ulp, lg2.approx to 2^-22, absolute near 1. A
number x^k of a range-expanded group, k <= 16, is so within 2^-17 of the exact one (the exponent's
error of k log2(x), at most 2^-18.. see tests), against 2^-4 of its rounding: now and then a code falls on
the other side of a boundary, and what is off by more than one code is wrong.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.formats import BF16, E4M3, E5M2
from fp8jax.kernels import smem
from fp8jax.kernels.backend import Device
from fp8jax.kernels.adam import masters, reference
from fp8jax.kernels.adam.reference import Rule, Scalars
from fp8jax.kernels.scaled_matmul import mosaic_sm90 as gemm
from fp8jax.quant import packed, quantize
from fp8jax.recipe import WHOLE, Expand, Rounding, Scale, SquareRoot

GROUPS = (128, 256)
_UNGROUPED = 64  # columns where no moment has groups
_SLOTS = 2
_PER_LANE = 32  # numbers of a row
_MAX_PROGRAMS = 4  # per multiprocessor
_SMEM = 227 * 1024
_WIDE = (jnp.float32, jnp.bfloat16)
# Expand's: k = power / 16.
_POWERS = 16


def supports(gradient, master, mu, nu, device: Device) -> str | None:
  """Whether the kernel takes these, or why not; arrays may be abstract."""
  if device.platform != "gpu" or device.capability != 90:
    return "needs a Hopper GPU (compute capability 9.0)"
  if gradient.dtype not in _WIDE:
    return f"reads gradients in float32 or bfloat16, not {gradient.dtype}"
  for name, moment in (("mu", mu), ("nu", nu)):
    if reason := _refusal(name, moment):
      return reason
  groups = {m.quant.tile[1] for m in (mu, nu) if _is_grouped(m)}
  if len(groups) > 1:
    return f"reads rows of one group: mu and nu have groups of {sorted(groups)}"
  columns, size = _columns(mu, nu), math.prod(gradient.shape)
  row = size
  if groups:
    row = math.prod(gradient.shape[packed.group_axes(gradient.shape, columns) :])
  if row % columns or not size:
    return f"a row of {row} numbers of {list(gradient.shape)} is no multiple of {columns}"
  return None


def _refusal(name: str, moment) -> str | None:
  if not isinstance(moment, packed.Packed):
    return None if moment.dtype in _WIDE else f"{name} in {moment.dtype}: float32 or bfloat16"
  quant = moment.quant
  if quant.rounding is not Rounding.NEAREST:
    return f"{name}={quant}: rounds to the nearest only"
  if quant.scale is Scale.NONE:
    return None if quant.format is BF16 else f"{name}={quant}: without scales bf16 only"
  if quant.tile[1] == WHOLE:
    return f"{name}={quant}: a scale of the whole tensor is known after a pass over it only"
  if quant.format not in (E4M3, E5M2) or quant.tile[1] not in GROUPS:
    return f"{name}={quant}: 8-bit numbers in groups of {GROUPS}"
  if quant.scale not in (Scale.F32, Scale.POW2):
    return f"{name}={quant}: scales are f32 or pow2"
  return None


def update(gradient, master, mu, nu, by: Scalars, is_applied, rule: Rule):
  """See `adam.update`."""
  columns = _columns(mu, nu)
  rows = gradient.size // columns
  state, tree = jax.tree.flatten((master, mu, nu))

  def as_rows(x):
    return x.reshape((rows, columns) if x.size == gradient.size else (rows,))

  program = _Program(rows, columns, rule)
  program = dataclasses.replace(program, programs=program.fitting([gradient, *state]))
  values = jnp.stack([*by, jnp.asarray(is_applied, jnp.float32)])
  kept = [jax.new_ref(as_rows(x)) for x in state]

  def adam(gradient, values, *refs):
    master, mu, nu = jax.tree.unflatten(tree, refs[: len(state)])
    here = _Arrays(gradient, master, mu, nu, *refs[len(state) :])
    pl.run_scoped(functools.partial(program.run, here, values), *program.memory(here))

  is_pair = isinstance(master, tuple)
  run = plgpu.kernel(
    adam,
    out_type=() if is_pair else jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16),
    grid=(program.programs,),
    grid_names=("program",),
    compiler_params=plgpu.CompilerParams(approx_math=True),
  )
  compute = run(as_rows(gradient), values, *kept)
  state = [jax.freeze(ref).reshape(x.shape) for ref, x in zip(kept, state)]
  master, mu, nu = jax.tree.unflatten(tree, state)
  return master, mu, nu, master[0] if is_pair else compute.reshape(gradient.shape)


def _is_grouped(moment) -> bool:
  return isinstance(moment, packed.Packed) and moment.scale is not None


def _columns(*moments) -> int:
  """Numbers in a row: a group, whose size the moments share."""
  return next((m.quant.tile[1] for m in moments if _is_grouped(m)), _UNGROUPED)


class _Arrays(NamedTuple):
  """Everything that a step reads and writes, in global memory or in slots of shared memory.

  Attributes:
    compute: None where the master's first half is the weight.
  """

  gradient: Any
  master: Any
  mu: Any
  nu: Any
  compute: Any = None


@dataclasses.dataclass(frozen=True)
class _Program:
  """What the module's docstring tells, of one program.

  Attributes:
    rows, columns: of the tensor, as the kernel reads it.
    programs: of its grid, as many as the device runs at one time.
  """

  rows: int
  columns: int
  rule: Rule
  programs: int = 1

  @property
  def lanes(self) -> int:
    """That hold a row together."""
    return max(4, self.columns // _PER_LANE)

  @property
  def tile_rows(self) -> int:
    return 128 // self.lanes

  @property
  def layout(self):
    per_warp, run = 32 // self.lanes, 4 * self.lanes
    tiling = plgpu.Tiling(((4 * per_warp, run), (per_warp, run), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

  @property
  def num_tiles(self) -> int:
    return pl.cdiv(self.rows, self.tile_rows)

  def fitting(self, arrays) -> int:
    """Programs that multiprocessors have shared memory for, if there are as many tiles."""
    slot = sum(x.size * x.dtype.itemsize for x in arrays) * self.tile_rows / self.rows
    slot += 2 * self.tile_rows * self.columns * (arrays[0].dtype != jnp.bfloat16) + 1024
    per_core = min(_MAX_PROGRAMS, max(1, int(_SMEM / (_SLOTS * slot))))
    return min(self.num_tiles, per_core * gemm.num_cores())

  def slots(self, x):
    """Shared memory for tiles of x."""
    if len(x.shape) == 2:
      return smem.swizzled((_SLOTS, self.tile_rows, self.columns), x.dtype)
    # TMA writes from multiples of 128 bytes on.
    width = max(self.tile_rows, 128 // jnp.dtype(x.dtype).itemsize)
    return plgpu.SMEM((_SLOTS, width), x.dtype)

  def memory(self, here: _Arrays) -> list:
    """Slots of all arrays in their order, a barrier for each number of slot."""
    loaded = jax.tree.leaves(here._replace(compute=None))
    slots = [self.slots(x) for x in loaded]
    if here.compute is not None and here.gradient.dtype != jnp.bfloat16:
      slots.append(self.slots(here.compute))
    return [*slots, plgpu.Barrier(num_arrivals=len(loaded), num_barriers=_SLOTS)]

  def run(self, here: _Arrays, values, *memory):
    *slots, full = memory
    tree = jax.tree.structure(here)
    if len(slots) < tree.num_leaves:
      slots.append(slots[0])  # the weight takes the gradient's place
    inside = jax.tree.unflatten(tree, slots)
    by = Scalars(*(values[i] for i in range(len(Scalars._fields))))
    is_applied = values[len(Scalars._fields)] > 0
    first = lax.axis_index("program")
    mine = lax.div(self.num_tiles - first + self.programs - 1, self.programs)

    def one(n, _):
      slot = lax.rem(n, _SLOTS)
      # What was in the other slot is on its way home; that one is free when it was read.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      pl.when(n + 1 < mine)(lambda: self.fetch(here, inside, full, first, n + 1))
      plgpu.barrier_wait(full.at[slot])
      pl.when(is_applied)(lambda: self.move(inside, slot, by))
      if here.compute is not None:
        pl.when(~is_applied)(lambda: self.keep(inside, slot))
      plgpu.commit_smem()
      self.store(here, inside, slot, first + n * self.programs)

    self.fetch(here, inside, full, first, 0)
    lax.fori_loop(0, mine, one, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  def tile(self, x, number):
    return x.at[pl.ds(number * self.tile_rows, self.tile_rows)]

  def slot(self, x, number):
    return x.at[number] if len(x.shape) == 3 else x.at[number, pl.ds(0, self.tile_rows)]

  def fetch(self, here: _Arrays, inside: _Arrays, full, first, n):
    slot, number = lax.rem(n, _SLOTS), first + n * self.programs
    sources, places = (jax.tree.leaves(a._replace(compute=None)) for a in (here, inside))
    for source, place in zip(sources, places):
      plgpu.copy_gmem_to_smem(self.tile(source, number), self.slot(place, slot), full.at[slot])

  def store(self, here: _Arrays, inside: _Arrays, slot, number):
    sources, places = (jax.tree.leaves(a[1:]) for a in (inside, here))
    for source, place in zip(sources, places):
      plgpu.copy_smem_to_gmem(self.slot(source, slot), self.tile(place, number))

  def move(self, inside: _Arrays, slot, by: Scalars):
    """A step of the tile in this slot."""

    def load(x):
      return plgpu.load(x.at[slot], layout=self.layout)

    g = load(inside.gradient).astype(jnp.float32)
    master = jax.tree.map(load, inside.master)
    m, v = self.unpack(inside.mu, slot), self.unpack(inside.nu, slot)
    p, m, v = reference.move(g, masters.read(master), m, v, by, self.rule)
    master = masters.like(master, p)
    for place, x in zip(jax.tree.leaves(inside.master), jax.tree.leaves(master)):
      place[slot] = x
    if inside.compute is not None:
      inside.compute[slot] = masters.compute(master)
    self.pack(m, inside.mu, slot)
    self.pack(v, inside.nu, slot)

  def keep(self, inside: _Arrays, slot):
    """The weight of a step that is not applied."""
    master = plgpu.load(inside.master.at[slot], layout=self.layout)
    inside.compute[slot] = masters.compute(master)

  def unpack(self, kept, slot):
    """float32 of what packed.Packed.unpack gives."""
    if not _is_grouped(kept):
      data = kept.data if isinstance(kept, packed.Packed) else kept
      return plgpu.load(data.at[slot], layout=self.layout).astype(jnp.float32)
    quant = kept.quant
    x = plgpu.load(kept.data.at[slot], layout=self.layout).astype(jnp.float32)
    of_rows = self.layout.reduce(1)
    if kept.power is not None:
      power = plgpu.load(self.slot(kept.power, slot), layout=of_rows).astype(jnp.float32)
      ratio = jnp.abs(x) * np.float32(1 / quant.format.max)
      x = _signed(_power(ratio, self.over_rows(np.float32(_POWERS) / power)), x)
    x = x * self.over_rows(plgpu.load(self.slot(kept.scale, slot), layout=of_rows))
    return x * x if isinstance(quant.transform, SquareRoot) else x

  def pack(self, x, kept, slot):
    """What packed.pack keeps of x."""
    if not isinstance(kept, packed.Packed):
      kept[slot] = x.astype(kept.dtype)
      return
    quant = kept.quant
    x = jnp.sqrt(x) if isinstance(quant.transform, SquareRoot) else x
    if kept.scale is not None:
      magnitude = jnp.where(x != x, 0.0, jnp.abs(x))
      amax = jnp.max(magnitude, axis=1)
      if kept.power is not None:
        scale, power = _expansion(magnitude, amax, quant.transform)
        self.slot(kept.power, slot)[...] = power.astype(jnp.uint8)
        inverse = 1.0 / jnp.where(scale > 0, scale, 1.0)
        ratio = jnp.minimum(jnp.abs(x) * self.over_rows(inverse), 1.0)
        exponent = power.astype(jnp.float32) * np.float32(1 / _POWERS)
        x = _signed(np.float32(quant.format.max) * _power(ratio, self.over_rows(exponent)), x)
      else:
        scale = quantize.amax_to_scale(amax, quant.format, quant.scale)
        x = x * self.over_rows(1.0 / scale)
      self.slot(kept.scale, slot)[...] = scale
    if quant.keeps_nonzero:
      smallest = np.float32(quant.format.smallest)
      is_small = (x != 0) & (jnp.abs(x) < smallest)
      x = jnp.where(is_small, jnp.where(x < 0, -smallest, smallest), x)
    kept.data[slot] = quantize.cast(x, quant.format)

  def over_rows(self, of_rows):
    return lax.broadcast_in_dim(of_rows, (self.tile_rows, self.columns), [0])


def _expansion(magnitude, amax, how: Expand):
  """(float32 amax, int32 16 k) of rows, as packed has them."""
  tiny, largest = np.float32(2.0**-126), np.float32(2.0**126)
  scale = jnp.where(amax >= tiny, jnp.minimum(amax, largest), 0.0)
  least = jnp.min(jnp.where(magnitude >= tiny, magnitude, jnp.inf), axis=1)
  least = jnp.minimum(jnp.maximum(least, tiny), largest)
  octaves = jnp.log2(jnp.maximum(scale, tiny)) - jnp.log2(least)
  power = np.float32(_POWERS * math.log2(how.target)) / jnp.maximum(octaves, np.float32(1e-6))
  # Towards 0, which is down.
  return scale, jnp.minimum(jnp.maximum(power, 1.0), 255.0).astype(jnp.int32)


def _power(x, exponent):
  """x^exponent of x in [0, 1] and positive exponents: 0 is 2^-inf."""
  return jnp.exp2(exponent * jnp.log2(x))


def _signed(magnitude, x):
  """A magnitude with the sign of x, by their bits."""
  sign = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**31))
  bits = lax.bitcast_convert_type(magnitude, jnp.int32) | sign
  return lax.bitcast_convert_type(bits, jnp.float32)
