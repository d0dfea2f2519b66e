"""flax.linen.fp8_ops after a step in which it saw the inputs. A worker, see worker.py."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import worker
from flax.linen import fp8_ops

NUMBERS = (((1,), (0,)), ((), ()))


def make(*operands):
  x, w, g = (jnp.asarray(t) for t in operands)
  found = {}
  for name, op in (("direct", fp8_ops.Fp8DirectDotGeneralOp), ("qdq", fp8_ops.Fp8DotGeneralOp)):
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", DeprecationWarning)
      layer = op()
      start = layer.init(jax.random.key(0), x, w, NUMBERS)

    def product(x, w, variables, layer=layer):
      return layer.apply(variables, x, w, NUMBERS)

    def gradients(x, w, g, variables, product=product):
      y, pull = jax.vjp(product, x, w, variables)
      return (y, *pull(g))

    both, forward = jax.jit(gradients), jax.jit(product)
    # The cotangent of the state is the next state: histories that hold these amaxes.
    seen = both(x, w, g, start)[-1]
    *values, after = both(x, w, g, seen)
    arrays = dict(zip(("y", "dx", "dw"), map(np.asarray, values)))
    state = after["_overwrite_with_gradient"]
    formats = {"x": jnp.float8_e4m3fn, "w": jnp.float8_e4m3fn, "g": jnp.float8_e5m2}
    for letter, role in (("x", "input"), ("w", "kernel"), ("g", "output_grad")):
      codes = jax.jit(
        lambda t, scale, f=formats[letter]: fp8_ops.quantize(t, f, scale, jnp.float32)
      )
      t = {"x": x, "w": w, "g": g}[letter]
      arrays[f"{letter}_codes"] = np.asarray(codes(t, state[f"{role}_scale"])).view(np.uint8)
    calls = {
      "forward": lambda f=forward, seen=seen: f(x, w, seen).block_until_ready(),
      "both": lambda f=both, seen=seen: jax.block_until_ready(f(x, w, g, seen)),
    }
    found[name] = arrays, calls
  return found


if __name__ == "__main__":
  worker.main(make, ("jax", "jaxlib", "flax", "numpy"))
