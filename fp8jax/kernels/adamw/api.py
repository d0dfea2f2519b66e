"""AdamW of one parameter: gradient, master and moments -> master and moments.

One signature, two backends: `reference`, in jnp, which XLA turns into several passes, and
`mosaic_sm90`, one kernel and one pass. Everything is of one device; a parameter that is split is
updated piece by piece inside `shard_map`.
"""

import math

import jax

from fp8jax.kernels.adamw import mosaic_sm90, reference
from fp8jax.kernels.adamw.reference import AdamWHparams, Master, Moment

# In order of preference for "auto"; kernels/choose.py chooses.
BACKENDS = {"mosaic_sm90": mosaic_sm90, "reference": reference}


def num_bytes(gradient, master: Master, mu: Moment, nu: Moment) -> int:
  """Bytes that one pass reads and writes, sums of squares aside; arrays may be abstract."""
  arrays = (gradient, *2 * jax.tree.leaves((master, mu, nu)))
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def update(
  gradient, master: Master, mu: Moment, nu: Moment, *, count, rate, factor=1.0, is_applied=True,
  b1: float, b2: float, eps: float, weight_decay: float, backend: str,
) -> tuple:  # fmt: skip
  """One step: master -= rate * (mu' / (sqrt(nu') + eps) + weight_decay * master).

  Args:
    gradient: float32 or bfloat16, any shape.
    master: float32 like it, or SplitFloat32.
    mu, nu: like it: QuantizedTensor, float32 or bfloat16. They come back in their stored
      format: rounded after their use.
    count: int32, the number of this step, from 1; for bias correction.
    factor: gradients are multiplied by it first, in float32.
    is_applied: if False, everything is as it was.
    b1, b2, eps, weight_decay: of AdamW; eps is added to the root. 0 for no decay.
    backend: a key of BACKENDS that kernels/choose.py `adamw` agrees to.

  Returns:
    master, mu and nu as they came, and float32 [2]: sums of squares of what was added to the master
    and of the master before it.
  """
  rule = AdamWHparams(b1, b2, eps, weight_decay)
  by = reference.scalars(count, factor, rate, rule)
  return BACKENDS[backend].update(gradient, master, mu, nu, by, is_applied, rule)
