"""Chunked cross-entropy against the textbook, and its promise about memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.ops import site as site_lib
from fp8jax.ops.cross_entropy import Teacher, cross_entropy, cross_entropy_by_source

B, L, D, V = 2, 50, 24, 96


def _inputs(rng):
  h = rng.standard_normal((B, L, D)).astype(np.float32)
  head = rng.standard_normal((D, V)).astype(np.float32)
  targets = rng.integers(0, V, (B, L)).astype(np.int32)
  weights = (rng.random((B, L)) < 0.8).astype(np.float32)
  return h, head, targets, weights


def _textbook(h, head, targets, weights):
  """float64 loss, dloss/dh, dloss/dhead."""
  h, head = h.astype(np.float64), head.astype(np.float64)
  logits = h @ head
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  one_hot = np.eye(V)[targets]
  loss = -(weights * np.log((p * one_hot).sum(-1))).sum()
  g = weights[..., None] * (p - one_hot)
  return loss, g @ head.T, np.einsum("bld,blv->dv", h, g)


@pytest.mark.parametrize("chunk", [1, 16, 25, 50, 512])
def test_cross_entropy_equals_the_textbook_for_any_chunk(rng, chunk):
  h, head, targets, weights = _inputs(rng)
  site = site_lib.single("bf16")

  def loss(h, head):
    return cross_entropy(h, head, "BLD,DV->BLV", targets, weights, site, chunk)

  want = _textbook(h, head, targets, weights)
  value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(h, head)
  np.testing.assert_allclose(loss(h, head), want[0], rtol=1e-6)
  for got, exact in zip((value, *gradients), want):
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6 * np.abs(exact).max())


def test_gradient_of_the_head_adds_chunks_in_its_own_dtype(rng):
  """h in BF16, one token per chunk: what the sum rounds, a hundred times, is float32's."""
  h, head, targets, weights = _inputs(rng)
  h = jnp.asarray(h, jnp.bfloat16)

  def gradient(chunk):
    site, eqn = site_lib.single("bf16"), "BLD,DV->BLV"
    loss = lambda w: cross_entropy(h, w, eqn, targets, weights, site, chunk)  # noqa: E731
    return np.asarray(jax.jit(jax.grad(loss))(head), np.float64)

  many, one = gradient(1), gradient(B * L)
  np.testing.assert_allclose(many, one, rtol=0, atol=1e-6 * np.abs(one).max())


def test_cross_entropy_scales_its_gradient_by_what_comes_in(rng):
  h, head, targets, weights = _inputs(rng)
  site = site_lib.single("bf16")

  def loss(h, factor):
    return factor * cross_entropy(h, head, "BLD,DV->BLV", targets, weights, site, 16)

  one, three = jax.grad(loss)(h, 1.0), jax.grad(loss)(h, 3.0)
  np.testing.assert_allclose(three, 3 * one, rtol=1e-6)


@pytest.mark.parametrize("is_differentiated", [True, False])
def test_losses_by_source_are_sums_of_the_textbook(rng, is_differentiated):
  """And neither they nor what is made of them move the gradient."""
  h, head, targets, weights = _inputs(rng)
  weights *= rng.random((B, L), np.float32)
  sources = rng.choice(4, (B, L), p=[0.1, 0.0, 0.2, 0.7]).astype(np.int32)

  def loss(h, sources):
    total, by_source, _ = cross_entropy_by_source(
      h, head, "BLD,DV->BLV", targets, weights, site_lib.single("bf16"), 16,
      sources_BL=sources, num_sources=4,
    )  # fmt: skip
    return total + (0 if sources is None else 3 * by_source.sum()), by_source

  if is_differentiated:
    (_, got), gradient = jax.value_and_grad(loss, has_aux=True)(h, sources)
    np.testing.assert_array_equal(gradient, jax.grad(loss, has_aux=True)(h, None)[0])
  else:
    got = loss(h, sources)[1]
  of = [(_textbook(h, head, targets, weights * (sources == i))[0], weights[sources == i].sum())
        for i in range(4)]  # fmt: skip
  np.testing.assert_allclose(got, of, rtol=2e-6)
  assert of[1] == (0, 0)


def _softmax(logits):
  p = np.exp(logits - logits.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("w, t", [(1.0, 2.0), (0.3, 1.0)])
def test_distillation_equals_the_textbook(rng, w, t):
  """(1 - w) CE + w t^2 KL and its gradients in float64; tokens without weight count nowhere."""
  h, head, targets, weights = _inputs(rng)
  weights *= rng.random((B, L), np.float32)
  h_teacher, head_teacher = (x + rng.standard_normal(x.shape).astype(np.float32) for x in (h, head))
  assert (weights == 0).any()
  sources = np.zeros((B, L), np.int32)

  def loss(h, head, h_teacher):
    teacher = Teacher(h_teacher, head_teacher, site_lib.single("bf16"), w, t)
    total, by_source, parts = cross_entropy_by_source(
      h, head, "BLD,DV->BLV", targets, weights, site_lib.single("bf16"), 16, teacher=teacher,
      sources_BL=sources, num_sources=2,
    )  # fmt: skip
    return total, jnp.stack([*parts, by_source[0, 0]])

  ce, *of_ce = _textbook(h, head, targets, weights)
  wide = [x.astype(np.float64) for x in (h, head, h_teacher, head_teacher)]
  q, p = _softmax(wide[0] @ wide[1] / t), _softmax(wide[2] @ wide[3] / t)
  kl = (weights * (p * np.log(p / q)).sum(-1)).sum()
  g = w * t * weights[..., None] * (q - p)
  of_kl = (g @ wide[1].T, np.einsum("bld,blv->dv", wide[0], g))
  want = [(1 - w) * a + b for a, b in zip(of_ce, of_kl)]
  run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
  (value, parts), (*gradients, of_teacher) = run(h, head, h_teacher)
  np.testing.assert_allclose(value, (1 - w) * ce + w * t**2 * kl, rtol=1e-6)
  np.testing.assert_allclose(parts, (ce, kl, (1 - w) * ce + w * t**2 * kl), rtol=1e-6)
  for got, exact in zip(gradients, want):
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6 * np.abs(exact).max())
  assert not of_teacher.any()
  np.testing.assert_allclose(loss(h, head, h_teacher)[0], value, rtol=1e-6)  # undifferentiated


def _seen(site, h, head, targets, weights, scale=1.0):
  def loss(site):
    return scale * cross_entropy(h, head, "BLD,DV->BLV", targets, weights, site, 16)

  seen = jax.jit(jax.grad(loss))(site)
  np.testing.assert_allclose(seen.roots, np.sqrt(seen.tap[:, 0]), rtol=1e-6)
  return np.asarray(seen.tap)


def test_observation_is_of_what_is_made_narrow(rng):
  """The gradient of the sum over tokens, whatever the caller multiplies the loss with later."""
  h, head, targets, weights = _inputs(rng)
  one = _seen(site_lib.single("block_128"), h, head, targets, weights)
  logits = np.einsum("bld,dv->blv", h, head).astype(np.float64)
  p = np.exp(logits - logits.max(-1, keepdims=True))
  g = weights[..., None] * (p / p.sum(-1, keepdims=True) - np.eye(p.shape[-1])[targets])
  want = [np.abs(t).max() for t in (h, head, g)]
  np.testing.assert_allclose(one[:, 0], want, rtol=0.2)  # of narrow logits
  np.testing.assert_allclose(one[:2, 0], want[:2], rtol=1e-6)
  np.testing.assert_array_equal(
    _seen(site_lib.single("block_128"), h, head, targets, weights, scale=0.125), one
  )


def test_a_gradient_of_its_rounding_is_refused(rng):
  h, head, targets, weights = map(jnp.asarray, _inputs(rng))

  def penalty(head):
    args = "BLD,DV->BLV", targets, weights, site_lib.single("block_128"), 16
    return (jax.grad(lambda h: cross_entropy(h, head, *args))(h) ** 2).sum()

  with pytest.raises(TypeError, match="site 'dot': its gradients are differentiated"):
    jax.jit(jax.grad(penalty))(head)


def test_cross_entropy_sees_nan(rng):
  h, head, targets, weights = _inputs(rng)
  h[1, 49, 0] = np.nan
  x, w, g = _seen(site_lib.single("block_128"), h, head, targets, weights)[:, 0]
  assert np.isnan(x) and np.isfinite(w) and np.isnan(g)


@pytest.mark.parametrize("has_teacher", [False, True])
def test_cross_entropy_never_holds_all_logits(rng, has_teacher):
  """No intermediate of the differentiated program has B * L * V elements, with a teacher too."""
  h, head, targets, weights = _inputs(rng)
  site = site_lib.single("bf16")

  def loss(h, head):
    teacher = Teacher(h, head, site, 1.0, 1.0) if has_teacher else None
    return cross_entropy(h, head, "BLD,DV->BLV", targets, weights, site, 10, teacher=teacher)

  def sizes(jaxpr):
    for eqn in jaxpr.eqns:
      yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
      for value in eqn.params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
          inner = getattr(inner, "jaxpr", inner)
          if hasattr(inner, "eqns"):
            yield from sizes(inner)

  largest = max(sizes(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(h, head).jaxpr))
  assert B * 10 * V <= largest < B * L * V / 2
