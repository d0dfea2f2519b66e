"""The noise floor: which weights move and by how much; differences against float64 NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.export import gate


def test_norms_move_by_one_ulp_and_nothing_else(rng):
  weights = {
    "embed": jnp.ones((4, 3)),
    "norm": jnp.asarray([1.0, -2.0, 0.5]),
    "layers": {"mlp": {"norm": jnp.full((2, 3), 3.0), "up": jnp.ones((2, 3))}},
  }
  moved = gate.nudged(weights)
  assert moved["embed"] is weights["embed"]
  assert moved["layers"]["mlp"]["up"] is weights["layers"]["mlp"]["up"]
  for new, old in ((moved["norm"], weights["norm"]),
                   (moved["layers"]["mlp"]["norm"], weights["layers"]["mlp"]["norm"])):  # fmt: skip
    assert np.array_equal(new, np.nextafter(np.asarray(old), np.float32(np.inf)))


def test_differences_are_those_of_float64_over_the_tokens_that_count(rng):
  shape = (2, 5, 7)
  source, made = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
  tokens = rng.integers(0, 7, shape[:2])
  counts = np.float32([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
  made[0, 2] = np.nan  # of a token that does not count

  def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))

  p, q = log_softmax(source), log_softmax(made)
  kl, change, same, nexts = 0.0, 0.0, 0, 0
  for b, i in zip(*np.nonzero(counts)):
    kl += (np.exp(p[b, i]) * (p[b, i] - q[b, i])).sum()
    same += p[b, i].argmax() == q[b, i].argmax()
    if i < 4:
      change += abs(p[b, i, tokens[b, i + 1]] - q[b, i, tokens[b, i + 1]])
      nexts += 1
  row = gate.row(gate.difference(*map(jnp.asarray, (source, made, tokens, counts))))
  total = counts.sum()
  expected = {"kl": kl / total, "dlogp": change / nexts, "top1": same / total, "tokens": total}
  assert row == pytest.approx(expected, rel=1e-5)
