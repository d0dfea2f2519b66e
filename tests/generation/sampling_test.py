"""Draws against the sets of transformers' processors in float64, and against their frequencies."""

import jax
import numpy as np
import pytest

from fp8jax.generation import sampling
from fp8jax.generation.settings import Sampling


def _kept(logits, temperature, top_k, top_p):
  """The set and its probabilities, as transformers' processors make them one after the other."""
  z = logits.astype(np.float64) / temperature
  if top_k:
    z[z < np.sort(z)[-top_k]] = -np.inf
  if top_p < 1:
    order = np.argsort(z, kind="stable")  # ascending
    p = np.exp(z[order] - z.max())
    remove = np.cumsum(p / p.sum()) <= 1 - top_p
    remove[-1] = False
    z[order[remove]] = -np.inf
  p = np.exp(z - z.max())
  return p / p.sum()


CASES = [
  (1.0, 0, 1.0),
  (0.7, 5, 1.0),
  (1.3, 0, 0.8),
  (0.65, 12, 0.95),
  (2.0, 3, 0.5),
  (1.0, 0, 0.01),
]


@pytest.mark.parametrize("temperature, top_k, top_p", CASES)
def test_tokens_that_may_be_drawn_are_those_of_transformers(rng, temperature, top_k, top_p):
  logits = rng.normal(0, 2, (20, 31)).astype(np.float32)
  method = sampling.method_of(Sampling(temperature, top_p, top_k))
  scores, ids = sampling.filtered(logits, temperature, top_p, method)
  scores = np.asarray(scores, np.float64)
  ids = np.broadcast_to(np.arange(31), scores.shape) if ids is None else np.asarray(ids)
  got = np.zeros((20, 31))
  p = np.exp(scores - scores.max(-1, keepdims=True))
  np.put_along_axis(got, ids, p / p.sum(-1, keepdims=True), axis=1)
  want = np.stack([_kept(row, temperature, top_k, top_p) for row in logits])
  np.testing.assert_array_equal(got > 0, want > 0)
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_frequencies_of_draws_pass_a_chi_square_test():
  temperature, top_k, top_p, draws = 0.8, 6, 0.9, 20_000
  logits = np.array([0.3, 2.0, -1.0, 1.5, 1.4, 0.9, 1.1, -3.0], np.float32)
  method = sampling.method_of(Sampling(temperature, top_p, top_k))
  seeds = np.array([sampling.row_seed(0, (1, 2), n) for n in range(draws // 4)], np.uint32)
  draw = jax.jit(lambda position: sampling.sample(
    np.tile(logits, (len(seeds), 1)), seeds, position + 0 * seeds.astype(np.int32),
    temperature, top_p, method))  # fmt: skip
  by_position = [np.asarray(draw(position)) for position in range(4)]
  assert np.mean(by_position[0] == by_position[1]) < 0.5  # a row's draws are independent
  tokens = np.concatenate(by_position)
  want = draws * _kept(logits, temperature, top_k, top_p)
  counts = np.bincount(tokens, minlength=len(logits))
  is_kept = want > 0
  assert not counts[~is_kept].any()
  # 99.9 % of chi-square with four degrees of freedom.
  assert is_kept.sum() == 5
  assert ((counts - want)[is_kept] ** 2 / want[is_kept]).sum() < 18.47


def test_a_seed_depends_on_prompt_number_and_seed():
  seeds = {
    sampling.row_seed(s, p, n) for s in (0, 1) for p in ((1,), (1, 2), (12,)) for n in (0, 1)
  }
  assert len(seeds) == 12


def test_by_default_the_best_token_is_taken_and_256_of_them():
  assert Sampling() == Sampling(
    temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=256, stop=(), seed=0
  )
  assert Sampling().problems() == Sampling(0.5, 1.0, 0, 1, ("a",), 2**63 - 1).problems() == []
  wrong = Sampling(-0.1, 0.0, -1, 0, ("",), 2**63).problems("generate.")
  assert [text.partition("=")[0].removeprefix("generate.") for text in wrong] == [
    "temperature", "top_p", "top_k", "max_new_tokens", "seed", "stop"
  ]  # fmt: skip
  assert len(Sampling(np.inf, 1.001, 0, 1, "a", -1).problems()) == 4
