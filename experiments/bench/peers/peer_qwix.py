"""qwix in E4M3: what its QtProvider runs, and its public quantize and dot_general. A worker.

See worker.py. qwix refuses an axis that its tiles do not divide: there K is padded with zeros,
which changes no amax and no sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import qwix
import worker
from qwix._src.core import dot_general_qt

NUMBERS = (((1,), (0,)), ((), ()))
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def _trained(grad=E4M3, residuals=None, tile=None, is_channelwise=True):
  """A quantized product with quantized gradients, as QtProvider configures it."""
  config = dot_general_qt.DotGeneralQtConfig(
    lhs_qtype=E4M3,
    rhs_qtype=E4M3,
    tile_size=tile,
    lhs_disable_channelwise_axes=not is_channelwise,
    rhs_disable_channelwise_axes=not is_channelwise,
    dlhs_grad_qtype=grad,
    dlhs_tile_size=tile,
    dlhs_grad_disable_channelwise_axes=not is_channelwise,
    dlhs_residual_qtype=residuals,
    drhs_grad_qtype=grad,
    drhs_tile_size=tile,
    drhs_grad_disable_channelwise_axes=not is_channelwise,
    drhs_residual_qtype=residuals,
  )
  return lambda x, w: dot_general_qt.dot_general_qt(x, w, NUMBERS, config)


def _narrow(qtype, x_axes, w_axes):
  """(x, w) -> their QArrays; axes as (channelwise, tiled)."""

  def narrow(x, w):
    made = ((x, x_axes), (w, w_axes))
    return tuple(
      qwix.quantize(t, qtype, channelwise_axes=channels, tiled_axes=tiles)
      for t, (channels, tiles) in made
    )

  return narrow


def _forward(narrow):
  return lambda x, w: qwix.dot_general(*narrow(x, w), NUMBERS)


def _padded(fn, size, k):
  """`fn` of operands whose contraction is padded to a multiple of `size`."""
  extra = -k % size
  if not extra:
    return fn
  return lambda x, w: fn(jnp.pad(x, ((0, 0), (0, extra))), jnp.pad(w, ((0, extra), (0, 0))))


def make(*operands):
  x, w, g = (jnp.asarray(t) for t in operands)
  k, pad = x.shape[1], functools.partial(_padded, k=x.shape[1])
  tensor = _narrow(E4M3, ((), {}), ((), {}))
  row = _narrow(E4M3, ((0,), {}), ((1,), {}))
  tile = pad(_narrow(E4M3, ((0,), {1: 128}), ((1,), {0: 128})), 128)
  block = _narrow(E4M3, ((0,), {1: 128}), ((), {0: 128, 1: 128}))
  mx = _narrow("mxfp8", ((0,), {1: 32}), ((1,), {0: 32}))
  trained = {
    "tensor": (_trained(grad=E5M2, is_channelwise=False), tensor),
    "row": (_trained(), row),
    "tile_128": (pad(_trained(tile=128, residuals=E4M3), 128), tile),
  }
  found = {}
  for name, (product, narrow) in trained.items():

    def gradients(x, w, g, product=product):
      y, pull = jax.vjp(product, x, w)
      return (y, *pull(g))

    both, forward = jax.jit(gradients), jax.jit(product)
    arrays = dict(zip(("y", "dx", "dw"), map(np.asarray, both(x, w, g))))
    calls = {
      "forward": lambda f=forward: f(x, w).block_until_ready(),
      "both": lambda f=both: jax.block_until_ready(f(x, w, g)),
    }
    found[name] = arrays, calls, narrow
  for name, narrow in (("block_128", block), ("mxfp8", mx)):
    size = 32 if name == "mxfp8" else 128
    forward = jax.jit(pad(_forward(narrow), size))
    arrays = {"y": np.asarray(forward(x, w))}
    calls = {"forward": lambda f=forward: f(x, w).block_until_ready()}
    found[name] = arrays, calls, pad(narrow, size)
  for arrays, _, narrow in found.values():
    narrow = jax.jit(narrow)
    qx, qw = narrow(x, w)
    arrays["x_codes"] = np.asarray(qx.qvalue).view(np.uint8)[:, :k]
    arrays["w_codes"] = np.asarray(qw.qvalue).view(np.uint8)[:k]
  return {name: (arrays, calls) for name, (arrays, calls, _) in found.items()}


if __name__ == "__main__":
  worker.main(make, ("qwix", "jax", "jaxlib", "flax", "numpy"))
