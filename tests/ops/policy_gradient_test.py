"""Losses and gradients of GRPO, DAPO, Dr. GRPO and TIS beside float64 NumPy, written from the
papers: sums over groups, completions and tokens, differentiated by central differences."""

import dataclasses
import pathlib

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig
from fp8jax.ops import cross_entropy, policy_gradient, site_tree
from fp8jax.ops.policy_gradient import OBJECTIVES, Policy

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 2.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
LENGTHS = np.array([[3, 5, 1, 4], [2, 2, 6, 3], [1, 4, 4, 2]])
LONGEST = 7
CLIPS = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "dr_grpo": (0.2, 0.2)}


def drawn(seed=0):
  """{name: [P, J, LONGEST]} log-probabilities, some far from the old ones."""
  rng = np.random.default_rng(seed)
  old = -rng.exponential(1.0, (*LENGTHS.shape, LONGEST))
  apart = rng.choice([0.0, 0.05, -0.05, 0.6, -0.6], old.shape)
  return {
    "logp": old + apart, "old": old, "rollout": old + rng.normal(0, 0.8, old.shape),
    "reference": old + rng.normal(0, 0.3, old.shape),
  }  # fmt: skip


def loss(name: str, logp, x, cap: float) -> float:
  """As the papers have it."""
  low, high = CLIPS[name]
  total, count = 0.0, LENGTHS.size
  for p, rewards in enumerate(REWARDS):
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    for j, reward in enumerate(rewards):
      advantage = reward - mean
      if name != "dr_grpo":
        advantage = advantage / (deviation + 1e-6)
      own = 0.0
      for t in range(LENGTHS[p, j]):
        ratio = np.exp(logp[p, j, t] - x["old"][p, j, t])
        gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if cap:
          gain *= min(np.exp(x["old"][p, j, t] - x["rollout"][p, j, t]), cap)
        if name == "grpo":
          r = np.exp(x["reference"][p, j, t] - logp[p, j, t])
          gain -= 0.04 * (r - np.log(r) - 1)
        own += gain
      if name == "grpo":
        total += own / LENGTHS[p, j] / count
      elif name == "dapo":
        total += own / LENGTHS.sum()
      else:
        total += own / (count * LONGEST)
  return -total


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_loss_and_gradient_are_those_of_the_paper(name, cap):
  x, rule = drawn(), dataclasses.replace(OBJECTIVES[name], most_correction=cap)
  flat = {k: v.reshape(-1, LONGEST) for k, v in x.items()}
  each = policy_gradient.token_weights(LENGTHS.ravel(), rule, LONGEST)
  is_drawn = np.arange(LONGEST) < LENGTHS.reshape(-1, 1)
  advantages = np.repeat(policy_gradient.advantages(REWARDS, rule).reshape(-1, 1), LONGEST, 1)
  policy = Policy(
    advantages, flat["old"], flat["rollout"], flat["reference"] if rule.kl else None, rule
  )
  with jax.enable_x64(True):
    terms = jax.jit(policy_gradient.of_tokens)(policy, flat["logp"], is_drawn * each[:, None])
  want = loss(name, x["logp"], x, cap)
  np.testing.assert_allclose(terms.loss, want, rtol=1e-12)
  gradient = np.zeros_like(x["logp"])
  for at in np.ndindex(gradient.shape):
    up, down = (x["logp"].copy() for _ in range(2))
    up[at] += 1e-6
    down[at] -= 1e-6
    gradient[at] = (loss(name, up, x, cap) - loss(name, down, x, cap)) / 2e-6
  np.testing.assert_allclose(-terms.weights_BL.reshape(gradient.shape), gradient, atol=1e-8)
  sums = {name: np.asarray(x) for name, x in terms.sums.items()}
  assert sums["count"] == LENGTHS.sum() and 0 < sums["clipped"] < LENGTHS.sum()
  assert (sums["truncated"] > 0) == bool(cap)


def test_on_policy_the_gradient_is_the_advantage():
  x, rule = drawn(), OBJECTIVES["dr_grpo"]
  old = x["old"].reshape(-1, LONGEST).astype(np.float32)
  a = np.repeat(policy_gradient.advantages(REWARDS, rule).reshape(-1, 1), LONGEST, 1)
  terms = policy_gradient.of_tokens(Policy(a, old, old, None, rule), old, np.ones_like(old))
  np.testing.assert_array_equal(terms.weights_BL, a.astype(np.float32))
  assert [float(x) for x in terms.sums.values()] == [old.size] + [0.0] * 5


def test_a_group_of_equal_rewards_says_nothing():
  for rule in (OBJECTIVES[name] for name in CLIPS):
    assert not policy_gradient.advantages(np.full((2, 3), 0.7), rule).any()


# --- the model's loss ----------------------------------------------------------------------------

CFG = dataclasses.replace(
  harness.TINY, hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=160, init_std=0.1
)


@pytest.mark.parametrize("is_invariant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_models_loss_and_gradient_are_those_of_the_objective(is_invariant):
  """The oracle differentiates the whole objective by JAX, through log-softmax of all logits."""
  params = harness.init_params(CFG)
  run = ComputeConfig(loss_chunk=4, remat="full", is_invariant=is_invariant)
  sites = site_tree.build_sites(transformer.site_params(CFG), CFG.dims, ((".*", "bf16"),))
  rng, shape = np.random.default_rng(1), (3, 10)
  rule = dataclasses.replace(OBJECTIVES["grpo"], most_correction=2.0)
  near = lambda: -rng.uniform(3, 7, shape).astype(np.float32)  # noqa: E731
  a = np.repeat(rng.standard_normal((3, 1)), 10, 1).astype(np.float32)
  policy = Policy(a, near(), near(), near(), rule, temperature=0.7)
  weights = (rng.random(shape) < 0.7).astype(np.float32) / 30
  tokens, targets = rng.integers(0, CFG.vocab_size, (2, *shape))
  batch = {
    "tokens_BL": tokens, "targets_BL": targets, "weights_BL": weights,
    "positions_BL": np.broadcast_to(np.arange(10), shape),
  }  # fmt: skip

  def loss(params):
    own = {**batch, "policy": policy}
    value, aux = transformer.loss_and_aux(params, sites, own, CFG, run)
    return value, aux.sums["policy"]

  def oracle(params):
    plain = dataclasses.replace(run, is_invariant=False)
    logits = transformer.logits(params, sites, batch, CFG, plain) / 0.7
    logp = jax.nn.log_softmax(logits)
    logp = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
    return policy_gradient.of_tokens(policy, logp, weights).loss

  (value, sums), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  want, gradient_wanted = jax.jit(jax.value_and_grad(oracle))(params)
  np.testing.assert_allclose(value, want, rtol=1e-5)
  assert 0 < sums["clipped"] < sums["count"] == (weights > 0).sum() and sums["truncated"] > 0
  for got, right in zip(*map(jax.tree.leaves, (gradient, gradient_wanted)), strict=True):
    np.testing.assert_allclose(got, right, rtol=2e-3, atol=2e-6)


# --- pairs and kept completions -------------------------------------------------------------------

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden/trl.npz")


def neighbours(x):
  """trl's rows, all chosen and then all rejected, as rows 2i, 2i + 1."""
  half = len(x) // 2
  return np.stack([x[:half], x[half:]], 1).reshape(x.shape)


@pytest.mark.parametrize("i", range(len(GOLDEN["betas"])))
def test_dpo_is_trls_on_the_same_logits(i):
  """Loss, gradient of the logits and rewards, through the model's own chunked cross entropy."""
  rule = dataclasses.replace(OBJECTIVES["dpo"], beta=float(GOLDEN["betas"][i]))
  logits, reference, tokens, counts = (
    neighbours(GOLDEN[name]) for name in ("logits", "reference", "tokens", "completion")
  )
  targets, is_drawn = tokens[:, 1:], counts[:, 1:] > 0
  weights = is_drawn / is_drawn.sum(1, keepdims=True) / len(tokens)
  logits, reference = logits[:, :-1], reference[:, :-1]
  pick = lambda x: jnp.take_along_axis(jax.nn.log_softmax(x), targets[..., None], -1)[..., 0]  # noqa: E731
  with jax.enable_x64(True):
    policy = Policy(reference_BL=pick(reference), objective=rule)
    terms = jax.jit(policy_gradient.of_tokens)(policy, pick(logits), weights)
    np.testing.assert_allclose(terms.loss, GOLDEN[f"{i}/loss"], rtol=1e-12)
    names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins"}
    for ours, theirs in {**names, "accuracy": "accuracies"}.items():
      got = terms.sums[ours] / terms.sums["count"]
      np.testing.assert_allclose(
        got, GOLDEN[f"{i}/{theirs}"], rtol=1e-12 if ours in names else 1e-6
      )
  site = site_tree.build_sites(transformer.site_params(CFG), CFG.dims, ((".*", "bf16"),))["head"]
  size = logits.shape[-1]

  def surrogate(logits):  # a head of ones makes the logits
    own = (jnp.eye(size), "BLD,DV->BLV", targets, terms.weights_BL.astype(np.float32), site, 3)
    return cross_entropy.cross_entropy(logits, *own)

  gradient = jax.jit(jax.grad(surrogate))(logits.astype(np.float32))
  want = neighbours(GOLDEN[f"{i}/gradient"])
  assert not want[:, -1].any()
  np.testing.assert_allclose(gradient, want[:, :-1], atol=2e-7)


def test_pairs_of_padding_weigh_nothing_and_microbatches_add_up():
  rng = np.random.default_rng(3)
  logp, reference = -rng.exponential(1.0, (2, 6, 5))
  lengths = np.array([3, 1, 5, 2, 0, 0])
  is_drawn = np.arange(5) < lengths[:, None]
  weights = is_drawn / np.maximum(lengths, 1)[:, None] / 4
  rule = OBJECTIVES["dpo"]

  def loss(logp):  # as the paper has it
    own = (np.where(is_drawn, logp - reference, 0)).sum(1)
    return np.mean([np.log1p(np.exp(-0.1 * (own[2 * n] - own[2 * n + 1]))) for n in range(2)])

  with jax.enable_x64(True):
    terms = jax.jit(policy_gradient.of_tokens)
    of = lambda rows: jax.device_get(  # noqa: E731
      terms(Policy(reference_BL=reference[rows], objective=rule), logp[rows], weights[rows])
    )
    whole, parts = of(slice(6)), [of(slice(2 * n, 2 * n + 2)) for n in range(3)]
  np.testing.assert_allclose(whole.loss, loss(logp), rtol=1e-12)
  np.testing.assert_allclose(sum(p.loss for p in parts), whole.loss, rtol=1e-12)
  assert whole.sums["count"] == 2 and parts[2].loss == 0 == parts[2].sums["count"]
  gradient = np.zeros_like(logp)
  for at in np.ndindex(gradient.shape):
    moved = [logp.copy(), logp.copy()]
    moved[0][at] += 1e-6
    moved[1][at] -= 1e-6
    gradient[at] = (loss(moved[0]) - loss(moved[1])) / 2e-6
  np.testing.assert_allclose(-whole.weights_BL, gradient, atol=1e-9)
  np.testing.assert_array_equal(np.concatenate([p.weights_BL for p in parts]), whole.weights_BL)


def test_rejection_keeps_the_best_of_a_group_that_are_right():
  rule = OBJECTIVES["rejection"]
  rewards = np.array([[1, 0, 1], [0, 0, 0], [-1, -0.5, -2], [0.2, 0.7, 0.1]])
  kept = policy_gradient.advantages(rewards, rule)
  assert kept.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [0, 1, 0]]
  logp, weights = -np.arange(1.0, 7).reshape(2, 3), np.array([[0.0, 0.25, 0.25], [0, 0, 0.5]])
  with jax.enable_x64(True):
    terms = policy_gradient.of_tokens(Policy(objective=rule), logp, weights)
    terms = jax.device_get(terms)
  assert terms.loss == 0.25 * 2 + 0.25 * 3 + 0.5 * 6 and terms.sums == {"count": 3}
  np.testing.assert_array_equal(terms.weights_BL, weights)


def test_a_ratio_beyond_float32_leaves_no_nan():
  """Of a completion without advantage 0, of others what is clipped: exp(200) is no float32."""
  logp, ones = jnp.full((2, 1), -1.0), jnp.ones((2, 1))
  policy = Policy(jnp.asarray([[0.0], [1.0]]), logp - 200, logp - 200)
  terms = policy_gradient.of_tokens(policy, logp, ones)
  assert terms.weights_BL.tolist() == [[0.0], [0.0]]
  assert float(terms.loss) == pytest.approx(-1.2)
