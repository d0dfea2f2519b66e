"""AdamW of one parameter: gradient, master and moments -> master, moments and the BF16 weight.

One signature, two backends: `reference`, in jnp, which XLA turns into several passes, and
`mosaic_sm90`, one kernel and one pass. Everything is of one device; a parameter that is split is
updated piece by piece inside `shard_map`.
"""

import math

import jax

from fp8jax.kernels import backend as backend_lib
from fp8jax.kernels.adam import mosaic_sm90, reference
from fp8jax.kernels.adam.masters import Master
from fp8jax.kernels.adam.reference import Moment, Rule

# In order of preference for "auto".
BACKENDS = {"mosaic_sm90": mosaic_sm90, "reference": reference}


def choose(
  gradient, master, mu, nu, device: backend_lib.Device, wanted: str = "auto"
) -> backend_lib.Choice:
  """The backend for arrays of these shapes, dtypes and Quants (they may be abstract).

  Raises:
    ValueError: the wanted one cannot, or none; says why.
  """
  if wanted != "auto" and wanted not in BACKENDS:
    raise ValueError(f"backend={wanted!r} of the optimizer; expected 'auto' or {sorted(BACKENDS)}")
  notes = []
  for name, module in BACKENDS.items():
    reason = module.supports(gradient, master, mu, nu, device)
    if wanted == name and reason is not None:
      raise ValueError(f"the optimizer's backend {name!r} cannot: {reason}")
    if wanted in ("auto", name) and reason is None:
      return backend_lib.Choice(name, tuple(notes))
    notes.append(f"{name}: {reason}")
  raise ValueError("no backend of the optimizer can: " + "; ".join(notes))


def num_bytes(gradient, master: Master, mu: Moment, nu: Moment) -> int:
  """What one pass reads and writes; arrays may be abstract."""
  state = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((master, mu, nu)))
  size = math.prod(gradient.shape)
  compute = 0 if isinstance(master, tuple) else 2 * size
  return size * gradient.dtype.itemsize + 2 * state + compute


def update(
  gradient,
  master: Master,
  mu: Moment,
  nu: Moment,
  *,
  count,
  rate,
  factor=1.0,
  is_applied=True,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  backend: str,
) -> tuple:
  """(master, mu, nu, compute) after one step: master -= rate * (mu' / (sqrt(nu') + eps) + ...).

  Args:
    gradient: float32 or bfloat16, any shape.
    master: float32 like it, or what `masters.split` makes of that.
    mu, nu: like it: Packed (see quant/packed.py), float32 or bfloat16. They come back as they are
      kept: rounded after they were used.
    count: int32, the number of this step, from 1; for bias correction.
    rate: the learning rate.
    factor: gradients are multiplied by it first, in float32.
    is_applied: if False, everything is as it was.
    b1, b2, eps, weight_decay: of AdamW; eps is added to the root. 0 for no decay.
    backend: a key of BACKENDS that `choose` agrees to.

  Returns:
    master, mu and nu as they came, and compute, the new master in bfloat16: rounded to the nearest
    even, or the first half of a master in two.
  """
  rule = Rule(b1, b2, eps, weight_decay)
  by = reference.scalars(count, factor, rate, rule)
  return BACKENDS[backend].update(gradient, master, mu, nu, by, is_applied, rule)
