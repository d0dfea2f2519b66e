"""step/halves.py: a derivative in two places, by algebra."""

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.step import halves


def test_the_second_half_reads_again_what_both_know_and_saves_the_rest_once():
  """y = k² sin(x) w with its sum besides, by x and w; of the second half k and w are others."""

  def function(_, known, x, w):
    inner = jnp.sin(x)
    return known["k"] ** 2 * inner * w, {"sum": inner.sum()}

  rng = np.random.default_rng(0)
  k, x, w, g, other_k, other_w = rng.normal(size=(6, 3, 5)).astype(np.float32)
  known = {"k": jnp.asarray(k), "number": jnp.int32(7)}
  made = halves.halves(function, {}, known, jax.ShapeDtypeStruct(x.shape, x.dtype), w)
  value, aux, saved = jax.jit(made.forward)({}, known, x, w)
  np.testing.assert_allclose(value, k.astype(float) ** 2 * np.sin(x) * w, rtol=2e-6)
  np.testing.assert_allclose(aux["sum"], np.sin(x.astype(float)).sum(), rtol=2e-6)
  # Neither k nor w: sin x, its slope, and the square of k, which nobody else computes.
  assert sorted(a.shape for a in saved) == [(3, 5)] * 3
  assert not any(np.array_equal(a, b) for a in saved for b in (k, w))

  @jax.jit
  def second(known, saved, w, g):
    return made.derivative({}, known, saved, w)(g)

  known = {"k": jnp.asarray(other_k), "number": jnp.int32(7)}
  dx, dw = second(known, saved, other_w, g)
  square = k.astype(float) ** 2
  np.testing.assert_allclose(dx, g * square * np.cos(x) * other_w, rtol=4e-6)
  np.testing.assert_allclose(dw, g * square * np.sin(x), rtol=4e-6)


def test_a_rule_of_its_own_keeps_what_is_known_out_of_what_is_saved():
  """What a custom derivative keeps, among it an input that both know, twice, and a constant."""

  @jax.custom_vjp
  def scaled(w, x):
    return 2 * x + 0 * w

  def forward(w, x):
    return scaled(w, x), (w, x * x, w, jnp.float32(3))

  def backward(kept, g):
    w, square, again, three = kept
    return None, g * square * w * again * three

  scaled.defvjp(forward, backward)
  function = lambda _, known, x: (scaled(known, x), None)  # noqa: E731
  w, x = jnp.arange(1.0, 4.0), jnp.array([0.5, -1.0, 2.0])
  made = halves.halves(function, (), w, x)
  _, _, saved = made.forward((), w, x)
  assert len(saved) == 1 and np.array_equal(saved[0], x * x)
  (dx,) = made.derivative((), 10 * w, saved)(jnp.ones(3))
  np.testing.assert_allclose(dx, 300 * x * x * w * w, rtol=1e-6)


def test_what_follows_from_what_all_share_is_computed_again():
  """Of y = cos(3 a) (k x) + sin x, of which all share a, only the cosine of x is saved."""

  def function(shared, known, x):
    return jnp.cos(3 * shared["a"]) * (known * x) + jnp.sin(x), None

  a, x, k = jnp.array([0.1, 0.4, 2.0]), jnp.array([1.0, 2.0, -1.0]), jnp.float32(5)
  shared = {"a": a, "unread": jnp.ones(7)}
  made = halves.halves(function, shared, k, x)
  _, _, saved = made.forward(shared, k, x)
  assert len(saved) == 1 and np.allclose(saved[0], np.cos(x), rtol=1e-6)
  (dx,) = made.derivative({**shared, "a": 2 * a}, k, saved)(jnp.ones(3))
  np.testing.assert_allclose(dx, 5 * np.cos(6 * np.float64(a)) + np.cos(np.float64(x)), rtol=4e-6)
