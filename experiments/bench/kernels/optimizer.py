"""AdamW of one weight: our kernel beside XLA's program for the same and a copy of as many bytes.

State is updated in place, call after call, as a training step does. All three take turns among
weights that together exceed the L2 cache.
"""

import jax
import jax.numpy as jnp
import timing

from fp8jax.kernels import self_test
from fp8jax.kernels.adamw import api as adamw_api
from fp8jax.optim import storage
from fp8jax.quantization import bf16_remainder, quantized_tensor

# Of InfiR2's 7B: the feed-forward layer's, and a projection of attention.
SHAPES = {"infir2_7b_down": (18944, 3584), "infir2_7b_proj": (3584, 3584)}
DRY = {"dry": (32, 256)}
# Moments (storage.MOMENTS), whether the master is in two, the gradient's dtype.
KINDS = {
  "coat": ("coat", False, jnp.bfloat16),
  "coat_pair": ("coat", True, jnp.bfloat16),
  "sqrt_v": ("sqrt_v", False, jnp.bfloat16),
  "e4m3_256": ("e4m3_256", False, jnp.bfloat16),
  "float32": ("float32", False, jnp.float32),
}
RULE = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)


def measure(bench: timing.Bench):
  """A line for each shape, kind of state and implementation."""
  for name, shape in (DRY if bench.is_dry else SHAPES).items():
    for kind in KINDS:
      _one(bench, f"adam/{name}/{kind}", shape, *KINDS[kind])


def _one(bench: timing.Bench, name: str, shape, preset: str, is_pair: bool, dtype):
  def make(key):
    """(master, mu, nu), gradient."""
    keys = jax.random.split(key, 4)
    p, g, m, v = (timing.normal(k, *shape, dtype=jnp.float32) for k in keys)
    m, v = 1e-3 * m, jnp.square(1e-3 * v) + 1e-10
    mu, nu = (quantized_tensor.pack(x, q) if q else x for x, q in ((m, kept.mu), (v, kept.nu)))
    return (bf16_remainder.split(p) if is_pair else p, mu, nu), (1e-3 * g).astype(dtype)

  kept = storage.MOMENTS[preset]
  sizes = {"sizes": shape} if bench.is_dry else {}
  self_test.optimizer(kept.mu, kept.nu, is_pair=is_pair, dtype=dtype, **sizes)
  make = jax.jit(make)
  state, gradient = make(jax.random.key(1))
  moved = adamw_api.num_bytes(gradient, *state)
  ms = {}
  for backend in ("mosaic_sm90", "reference"):

    def step(state, gradient, backend=backend):
      by = dict(count=jnp.int32(10), rate=jnp.float32(1e-4))
      by["is_applied"] = jnp.isfinite(gradient[0, 0])
      *state, squares = adamw_api.update(gradient, *state, **by, **RULE, backend=backend)
      return tuple(state), squares

    def run(step=step):
      found = bench.time(step, *timing.sets(make, moved), in_place=1)
      # Of the bytes that one pass moves, whoever takes several.
      return found | {"gb_per_s": moved / found["ms"] / 1e6}

    ms[backend] = bench.line(f"{name}/{backend}", run)["ms"]

  def copy():
    x = timing.sets(lambda key: (timing.normal(key, moved // 4),), moved)
    return bench.time(lambda x: -x, *x)

  share = bench.line(f"{name}/copy", copy)["ms"] / ms["mosaic_sm90"]
  ahead = ms["reference"] / ms["mosaic_sm90"]
  print(f"{name:44s} ours: {share:.2f} of a copy's bandwidth, {ahead:.2f} x xla")
