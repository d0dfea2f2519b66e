"""Quantized operands of weights, made once per step instead of by each of their products.

A product quantizes its weight, and under FSDP gathers it, whenever it is multiplied: in the forward
pass, in the one that is computed again, in the backward pass, and that in each microbatch. The
weight is the same all step long. Here it is quantized and gathered once, in both orientations, and
every product multiplies these codes. The operands are the same to the bit. Each device holds two
bytes per parameter of these weights, and scales, until the step ends. Where a kernel quantizes them
in tiles it reads each weight once: all layers in one call on one device, a shard of a layer on a
mesh.

A weight of a layer whose operand differs from one microbatch to the next, or that something else
than its products reads, stays "by product", as the trainer's first lines say (`reasons`). So do
adapters and the head.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.kernels.quantize import mosaic_sm90
from fp8jax.ops import (
  collectives,
  gemm_spec,
  joint,
  linear,
  multiplied,
  observe,
  operands,
  straight,
)
from fp8jax.ops.gemm_spec import GemmSpec, Role
from fp8jax.ops.site import ScalingInputs, Site
from fp8jax.ops.stored_params import WeightOperands
from fp8jax.quantization import tensor_stats
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.recipe.quant import WHOLE, Quant

ROLES = (Role.W_FWD, Role.W_DGRAD)


def reason_against(spec: GemmSpec, site) -> str | None:
  """Why the operands of a product's weight cannot be made once per step; None if they can."""
  if type(site) is not Site:
    return "its site has a product of its own"
  quants = [spec.quant(role) for role in ROLES]
  if None in quants:
    return "not quantized in both of its products"
  rows = [spec.rows_rotation(role) for role in ROLES]
  if any(q and q.is_random for q in quants) or any(r and r.signs == "fresh" for r in rows):
    return "rounded at random in each microbatch"
  if spec.recipe.fwd.compensates or straight.is_needed(spec, Role.W_FWD):
    return "its gradient or its product reads the weight itself"
  return None


def reasons(
  declared, ws: Mapping[str, Any], sites: Mapping[str, Any], tokens: Mapping[str, int], dtype
) -> dict[str, str | None]:
  """{name: `reason_against`} of the linear layers of a block; see of_block.

  Weights with a joint scale are quantized together, or each by its product.
  """
  found: dict[str, str | None] = {}
  for _, read in itertools.groupby(declared, lambda site: site.input):
    of_input = {}
    for site in read:
      name = site.name
      spec = of_layer(ws[name], sites[name], site.eqn, tokens, dtype)
      of_input[name] = reason_against(spec, sites[name])
    shared = [name for name in of_input if joint.is_joint(sites[name])]
    if any(of_input[name] for name in shared):
      why = "it shares a scale with a weight that is quantized by product"
      of_input |= {name: of_input[name] or why for name in shared}
    found |= of_input
  return found


def spec_of(w, site: Site, eqn: str, tokens: Mapping[str, int], dtype) -> GemmSpec:
  """The specification of a product with `tokens`, {letter: size}; w and site are not stacked."""
  of_x, _, of_w = eqn.partition("->")[0].partition(",")
  sizes = {**dict(zip(of_w, w.shape, strict=True)), **tokens}
  x = jax.ShapeDtypeStruct(tuple(sizes[c] for c in of_x), jnp.dtype(dtype))
  return gemm_spec.make_spec(eqn, x, w, site)


def of_block(
  declared, ws: Mapping[str, Any], sites: Mapping[str, Any], tokens: Mapping[str, int], dtype
) -> dict[str, WeightOperands]:
  """{name: operands, stacked} of those linear layers of a block that have them.

  Args:
    declared: its sites in order, as of multiplied.of_block.
    ws, sites: of the block, by name, stacked over layers.
    tokens: sizes of the letters of x that are none of w, of a microbatch on all devices.
    dtype: the compute dtype.
  """
  sites = jax.tree.map(lambda x: x, dict(sites))  # other marks: these products are none of a step's
  against = reasons(declared, ws, sites, tokens, dtype)
  declared = [site for site in declared if against[site.name] is None]

  def convert(ws, site, eqn):
    spec = of_layer(ws, site, eqn, tokens, dtype)
    one = functools.partial(_made, eqn=eqn, tokens=dict(tokens), dtype=dtype)
    if (made := _stacked(spec, ws, site)) is not None:
      return made
    if site.layout.weight_axes("N"):  # a device has no whole stack
      made = jax.lax.map(lambda xs: one(*xs), (ws, site))
    else:
      layers = jnp.arange(jax.tree.leaves(ws)[0].shape[0])
      made = jax.lax.map(lambda xs: one(Entry(ws, xs[0]), xs[1]), (layers, site))
    return jax.tree.map(functools.partial(_placed, site.layout), made, specs(spec, made.shape))

  return multiplied.of_block(declared, ws, sites, convert, stacked=1)


def specs(spec: GemmSpec, shape: tuple[int, ...]) -> WeightOperands:
  """PartitionSpecs of a stack of operands."""
  fwd, dgrad = (axes.stacked(spec.quantized_spec(role)) for role in ROLES)
  return WeightOperands(fwd, dgrad, cast(Any, jax.sharding.PartitionSpec()), shape)


def of_layer(ws, site, eqn: str, tokens, dtype) -> GemmSpec:
  """`spec_of` one layer of a stack, of arrays or their shapes."""
  one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)  # noqa: E731
  return spec_of(jax.tree.map(one, ws), jax.tree.map(one, site), eqn, tokens, dtype)


def _made(w, site: Site, eqn: str, tokens: dict[str, int], dtype) -> WeightOperands:
  spec = spec_of(w, site, eqn, tokens, dtype)
  inputs, read, amax = ScalingInputs.of(site), linear.read_weight(spec, w), None
  if _takes_one_reading(spec, read):
    fwd, dgrad, amax = _both(spec, read)
  else:
    fwd, dgrad = (operands.quantize_now(spec, role, read, inputs) for role in ROLES)
  stats = observe.operand_stats(spec, Role.W_FWD, read, inputs, amax)
  return WeightOperands(fwd, dgrad, stats, w.shape)


def _stacked(spec: GemmSpec, ws, site: Site) -> WeightOperands | None:
  """The operands of all layers by one kernel, where one device has the stack."""
  if spec.layout.mesh is not None:
    return None
  read = linear.read_weight(spec, Entry(ws, 0))
  if not isinstance(read, Entry) or not _takes_one_reading(spec, read):
    return None  # masters that are unpacked first: a stack of them in float32 would be large
  matrix, along = operands.flatten(read, *spec.letters_of(Role.W_FWD), "")
  if not mosaic_sm90.is_moved(matrix):
    return None  # so would a copy of it with zeros around each layer
  with jax.named_scope("quantize"):
    made, amax = mosaic_sm90.quantize_stack(matrix.stack, _by_axis(spec, along))
  stats = amax[:, None]
  if spec.statistics != tensor_stats.QUIET:
    one = lambda xs: observe.operand_stats(  # noqa: E731
      spec, Role.W_FWD, dataclasses.replace(read, index=xs[0]), ScalingInputs.of(xs[1])
    )
    stats = jax.lax.map(one, (jnp.arange(len(amax)), site))
  return WeightOperands(made[along], made[1 - along], stats, read.shape)


def _by_axis(spec: GemmSpec, along: int) -> dict[int, Quant]:
  """{axis of a weight's matrix that a product contracts: how it is quantized for it}.

  Args:
    along: axis of the forward product.
  """
  quants = (cast(Quant, spec.quant(role)) for role in ROLES)
  return dict(zip((along, 1 - along), quants))


def _takes_one_reading(spec: GemmSpec, w) -> bool:
  """Whether one kernel makes both operands of a weight, or of a shard of it, and finds its amax:
  in tiles of 128x128, of a matrix that both products take in the same order of letters."""
  if not isinstance(w, jax.Array | Entry) or not linear.reads_in_place(spec):
    return False
  letters, layout = spec.letters.w, spec.layout
  orders = [(f + c, c + f) for _, f, c in map(spec.letters_of, ROLES)]
  if not all(letters in order for order in orders):
    return False
  # Of the shard that a device holds between steps.
  split = [1 if layout.is_manual else layout.size(layout.weight_axes(c)) for c in letters]
  shape = spec.sizes[len(spec.letters.x) :]
  sizes = {c: n // k for c, n, k in zip(letters, shape, split, strict=True)}
  quants = [cast(Quant, spec.quant(role)) for role in ROLES]
  return all(
    quant.tile[0] not in (1, WHOLE)
    and collectives.tiles_fit(
      sizes, *spec.letters_of(role)[1:], quant, layout, spec.rows_rotation(role)
    )
    for role, quant in zip(ROLES, quants)
  )


def _both(spec: GemmSpec, w):
  """(operands of both roles, float32 [1] amax of w), of one reading."""
  letters, free, contracted = spec.letters_of(Role.W_FWD)
  layout = spec.layout

  def local(w):
    sizes = dict(zip(letters, w.shape))
    with jax.named_scope("quantize"):
      matrix, along = operands.flatten(w, letters, free, contracted, "")
      made, amax = mosaic_sm90.quantize_matrix(matrix, _by_axis(spec, along), watched=True)
    whole = []
    for role, value in zip(ROLES, (made[along], made[1 - along])):
      groups = spec.letters_of(role)[1:]
      one = operands.gathered(value, groups, sizes, layout, spec.backend(role.gemm)).value
      whole.append(dataclasses.replace(one.in_one_piece(), values=None))
    over = () if layout.is_manual else tuple(a for c in letters for a in layout.weight_axes(c))
    return *whole, tensor_stats.over_mesh(cast(Any, amax)[None], over)

  place = operands.weight_specs(spec, w)
  out = (*(spec.quantized_spec(role) for role in ROLES), jax.sharding.PartitionSpec())
  return collectives.on_mesh(local, layout, (place,), out)(w)


def _placed(layout, x, spec):
  if layout.mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(layout.mesh, spec))
