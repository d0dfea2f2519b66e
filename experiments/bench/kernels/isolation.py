"""Attention that keeps packed documents apart: tokamax's kernels beside cuDNN's with its bias.

One sequence on one GPU, in BF16, heads of InfiR2's models. Documents have the lengths of a packed
window of supervised fine-tuning: some long, many short. Each backend is first held against the
float32 attention of "xla" on a short sequence, output and gradients. TFLOP/s count the pairs of
tokens that see each other, whatever a kernel computes besides: two products forward, five backward.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import timing

from fp8jax.kernels import choose
from fp8jax.kernels.attention import api as attention_api
from fp8jax.ops.attention import attention

# (query heads, key heads, head), InfiR2's 7B and 1.5B.
HEADS = {"infir2_7b": (28, 4, 128), "infir2_1p5b": (12, 2, 128)}
LENGTHS = {"8k": 8_192, "32k": 32_768}
# Shares of the window that documents take; one is a window without others.
PACKINGS = {"packed": (0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05), "whole": (1.0,)}
DRY = {"dry": (4, 2, 64)}, {"dry": 256}
SHORT = 1_024  # of the check
CLOSE = 2e-2  # of the largest value, in BF16
BACKENDS = ("tokamax", "cudnn", "xla")


def measure(bench: timing.Bench):
  """A line for every size, packing and backend, forward alone and with the backward pass."""
  heads, lengths = DRY if bench.is_dry else (HEADS, LENGTHS)
  device = choose.current_device()
  for name, sizes in heads.items():
    for of_length, length in lengths.items():
      for backend in BACKENDS:
        problem = attention_api.AttentionProblem(1, length, *sizes, "bfloat16", True, device)
        reason = attention_api.supports(backend, problem)
        if backend == "xla" and not bench.is_dry:
          reason = "writes all scores"
        if reason:
          print(f"isolation/{name}/{of_length}/{backend} absent: {reason}")
          continue
        _check(backend, sizes, min(length, SHORT))
        for packing, shares in PACKINGS.items():
          _time(bench, f"isolation/{name}/{of_length}/{packing}", backend, sizes, length, shares)


def _segments(length: int, shares):
  """int32 [1, L], and the pairs of tokens that see each other."""
  ends = np.minimum(np.ceil(np.cumsum(shares) * length), length).astype(int)
  ends[-1] = length
  sizes = np.diff(ends, prepend=0).astype(np.int64)
  pairs = int((sizes * (sizes + 1) // 2).sum())
  return jnp.asarray(np.repeat(np.arange(len(sizes)), sizes)[None], jnp.int32), pairs


def _operands(key, sizes, length: int, dtype=jnp.bfloat16):
  """q, k, v and the gradient of the output."""
  num_heads, num_kv_heads, head = sizes
  keys = jax.random.split(key, 4)
  heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
  return tuple(timing.normal(k, 1, length, h, head, dtype=dtype) for k, h in zip(keys, heads))


def _both(q, k, v, g, segments_BL, backend: str):
  out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, segments_BL, backend), q, k, v)
  return out, *pull(g)


def _check(backend: str, sizes, length: int):
  segments_BL, _ = _segments(length, PACKINGS["packed"])
  operands = _operands(jax.random.key(2), sizes, length)
  run = jax.jit(_both, static_argnums=5)
  wide = tuple(x.astype(jnp.float32) for x in operands)
  for got, want in zip(run(*operands, segments_BL, backend), run(*wide, segments_BL, "xla")):
    off = float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want).max())
    if not off < CLOSE:
      sys.exit(f"attention of {backend} is off by {off:.3f} of the largest value: not timed")


def _time(bench: timing.Bench, name: str, backend: str, sizes, length: int, shares):
  segments_BL, pairs = _segments(length, shares)
  num_heads, num_kv_heads, head = sizes
  moved = 2 * length * head * (2 * num_heads + 2 * num_kv_heads)
  make = jax.jit(lambda key: _operands(key, sizes, length))

  def line(passes, function, products):
    def run():
      found = bench.time(function, *timing.sets(make, moved))
      flops = 2 * products * pairs * head * num_heads
      return found | {"tflops": flops / found["ms"] / 1e9}

    bench.line(f"{name}/{passes}/{backend}", run)

  line("fwd", lambda q, k, v, g: attention(q, k, v, segments_BL, backend), 2)
  line("both", lambda q, k, v, g: _both(q, k, v, g, segments_BL, backend), 7)
