"""A weight in the form that the forward GEMM of its site reads.

Codes and scales if its recipe quantizes it, the very ones that the training forward pass makes, or
the values that they stand for; else an array in the compute dtype.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.ops import collectives, joint, operands, stored_params
from fp8jax.ops.gemm_spec import Role, make_spec
from fp8jax.ops.site import ScalingInputs, Site
from fp8jax.quantization.stored_matrix import StoredMatrix


def of_block(declared, ws, sites, convert, stacked: int = 0) -> dict[str, Any]:
  """{name: weight as its product reads it} of the linear layers of a block.

  Args:
    declared: its sites in order, with name, eqn and input: joint scales are of one input's weights.
    ws, sites: of the block, by name.
    convert: (w, site, eqn=eqn) -> weight.
    stacked: see joint.lent.
  """
  made = {}
  for _, read in itertools.groupby(declared, lambda site: site.input):
    eqns = {site.name: site.eqn for site in read}
    lent = joint.lent([ws[n] for n in eqns], [sites[n] for n in eqns], stacked)
    for (name, eqn), site in zip(eqns.items(), lent, strict=True):
      made[name] = convert(ws[name], site, eqn=eqn)
  return made


@functools.partial(jax.jit, static_argnames=("eqn", "dtype", "keeps_values"))
def as_multiplied(w, site: Site, eqn: str, dtype, keeps_values: bool = False):
  """A weight as the forward GEMM of its site reads it: a StoredMatrix, or an array in `dtype`.

  Args:
    w: as it is stored; or what this function made of it.
    site: not stacked.
    eqn: of the GEMM, "BLD,DF->BLF".
    keeps_values: a StoredMatrix has float32 values, for a backend of gemm_api.WITH_VALUES.
  """
  if isinstance(w, StoredMatrix) and w.weight_shape is not None:
    return w
  w = stored_params.gemm_operand(w)
  letters, _, of_w = eqn.partition("->")[0].partition(",")
  sizes = dict(zip(of_w, w.shape))
  x = jax.ShapeDtypeStruct(tuple(sizes.get(c, 1) for c in letters), jnp.dtype(dtype))
  spec = make_spec(eqn, x, w, site)
  quant = spec.quant(Role.W_FWD)
  if quant is None:
    return axes.constrain(stored_params.compute_copy(w).astype(dtype), of_w, site.layout)
  if spec.recipe.fwd.compensates:  # what was clamped is multiplied by the weight itself
    return axes.constrain(stored_params.compute_copy(w), of_w, site.layout)

  def local(w, inputs):
    made = operands.operand(spec, Role.W_FWD, w, inputs).value
    if keeps_values:
      return made.dequantize(), jnp.ones_like(made.scale)
    return made.data, made.scale

  out, place = spec.quantized_spec(Role.W_FWD), jax.sharding.PartitionSpec()
  in_specs = (operands.weight_specs(spec, w), place)
  run = collectives.on_mesh(local, site.layout, in_specs, (out.data, out.scale))
  data, scale = run(w, ScalingInputs.of(site))
  return StoredMatrix(data, scale, len(spec.letters.contracted), quant, w.shape, keeps_values)
