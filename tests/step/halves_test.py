"""step/halves.py: a derivative in two places, by algebra."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from fp8jax.step import halves, layer_loop


def halved(function, shared, known, x, *others):
  """Halves with others that are read again, of a later that nothing reads."""
  return halves.halves(function, lambda known, later: known[1], shared, (known, others), (), x)


def test_the_second_half_reads_again_what_both_know_and_saves_the_rest_once():
  """y = k² sin(x) w with its sum besides, by x and w; of the second half k and w are others."""

  def function(_, known, x, w):
    inner = jnp.sin(x)
    return known[0]["k"] ** 2 * inner * w, {"sum": inner.sum()}

  rng = np.random.default_rng(0)
  k, x, w, g, other_k, other_w = rng.normal(size=(6, 3, 5)).astype(np.float32)
  known = {"k": jnp.asarray(k), "number": jnp.int32(7)}
  made = halved(function, {}, known, jax.ShapeDtypeStruct(x.shape, x.dtype), w)
  value, aux, saved = jax.jit(made.forward)({}, (known, (w,)), x)
  np.testing.assert_allclose(value, k.astype(float) ** 2 * np.sin(x) * w, rtol=2e-6)
  np.testing.assert_allclose(aux["sum"], np.sin(x.astype(float)).sum(), rtol=2e-6)
  # Neither k nor w: sin x, its slope, and the square of k, which nobody else computes.
  assert sorted(a.shape for a in saved) == [(3, 5)] * 3
  assert not any(np.array_equal(a, b) for a in saved for b in (k, w))

  @jax.jit
  def second(known, saved, w, g):
    return made.derivative({}, (known, (w,)), (), saved)(g)

  known = {"k": jnp.asarray(other_k), "number": jnp.int32(7)}
  dx, dw = second(known, saved, other_w, g)
  square = k.astype(float) ** 2
  np.testing.assert_allclose(dx, g * square * np.cos(x) * other_w, rtol=4e-6)
  np.testing.assert_allclose(dw, g * square * np.sin(x), rtol=4e-6)


def test_a_named_residual_is_written_into_its_stack_and_read_there():
  """y = w s + w c, s = sin(k x) of that name, c = cos(k x) of another: of three entries the second
  is s, the others are as they were, and value and gradients those without a stack."""

  def function(_, known, x, w):
    named = checkpoint_name(jnp.sin(known[0] * x), "inner")
    return w * named + w * checkpoint_name(jnp.cos(known[0] * x), "outer"), named + 1

  rng = np.random.default_rng(0)
  x, w, g = (jnp.asarray(one, jnp.float32) for one in rng.uniform(0.1, 0.4, (3, 4, 5)))
  known, shape = (jnp.float32(1.5), (w,)), jax.ShapeDtypeStruct(x.shape, x.dtype)
  others = lambda known, later: known[1]  # noqa: E731
  made = halves.halves(function, others, {}, known, (), shape, "inner")
  assert len(made.placed) == 1 and made.placed[0] is made.saved[0]
  before = jnp.full((3, 4, 5), 7.0)
  value, aux, (stack, *rest) = jax.jit(made.forward)({}, known, x, [before], 1)
  s, c = (f(1.5 * np.asarray(x, float)) for f in (np.sin, np.cos))
  np.testing.assert_allclose(stack[1], s, rtol=4e-6)
  assert np.array_equal(stack[::2], before[::2])
  np.testing.assert_allclose(value, w * (s + c), rtol=4e-6)
  np.testing.assert_allclose(aux, s + 1, rtol=4e-6)
  dx, dw = made.derivative({}, known, (), [stack[1], *rest])(g)
  np.testing.assert_allclose(dw, g * (s + c), rtol=4e-6)
  np.testing.assert_allclose(dx, 1.5 * g * w * (c - s), rtol=4e-6)


def test_a_loop_over_layers_writes_what_it_saves_where_it_saves_it():
  """Layers 2 to 4, x -> x + w sin(x) + x^2 / 8, with sin(x) of that name: of each layer its sine in
  the stack, in order, beside what else is saved, and the derivative from both."""

  def function(_, known, x, w):
    named = checkpoint_name(jnp.sin(x), "inner")
    return (x + w * named + x * x / 8, {"loss": w.sum()}), {"mean": named.mean()}

  rng = np.random.default_rng(0)
  ws, g = jnp.asarray(rng.uniform(0.1, 0.3, (3, 4, 5)), jnp.float32), jnp.ones((4, 5))
  xs = [rng.uniform(0.2, 0.6, (4, 5)).astype(np.float32)]
  shape = jax.ShapeDtypeStruct((4, 5), jnp.float32)
  others = lambda known, later: known[1]  # noqa: E731
  made = halves.halves(function, others, {}, (0, (shape,)), (), shape, "inner")
  loop = types.SimpleNamespace(
    layers=slice(2, 5), xs=(jnp.arange(3) + 2, ws), context={},
    known=lambda of_layer: (of_layer[0], (of_layer[1],)),
  )  # fmt: skip
  end, (saved, aux) = jax.jit(lambda x: layer_loop._in_place(loop, made, x))(xs[0])
  for w in np.asarray(ws, float):
    xs.append(xs[-1] + w * np.sin(xs[-1]) + xs[-1] ** 2 / 8)
  np.testing.assert_allclose(end, xs[-1], rtol=4e-6)
  np.testing.assert_allclose(saved[0], np.sin(xs[:-1]), rtol=4e-6)
  np.testing.assert_allclose(aux["mean"], np.sin(xs[:-1]).mean((1, 2)), rtol=4e-6)
  for i, w in enumerate(ws):
    of_layer = [x[i] for x in saved]
    dx, dw = made.derivative({}, (i, (w,)), (), of_layer)((g, {"loss": jnp.float32(0)}))
    np.testing.assert_allclose(dx, 1 + w * np.cos(xs[i]) + xs[i] / 4, rtol=4e-6)
    np.testing.assert_allclose(dw, np.sin(xs[i]), rtol=4e-6)


@jax.custom_vjp
def added(w, x, total):
  """w x, whose gradient by `total` is the total and x g: a sum where it lies."""
  del total
  return w * x


def _forward(w, x, total):
  return w * x, (w, x * x, w, total, jnp.float32(3))


def _backward(kept, g):
  w, square, again, total, three = kept
  return None, g * square * w * again * three, total + g


added.defvjp(_forward, _backward)


def test_a_rule_of_its_own_keeps_what_is_known_out_of_what_is_saved():
  """What a custom derivative keeps: among it what both know, twice, a sum of later, a constant."""
  function = lambda _, known, x, total: (added(known, x, total), None)  # noqa: E731
  w, x, sums = jnp.arange(1.0, 4.0), jnp.array([0.5, -1.0, 2.0]), jnp.array([7.0, 8.0, 9.0])
  made = halves.halves(function, lambda known, later: (later,), (), w, sums, x)
  value, _, saved = made.forward((), w, x)
  assert np.array_equal(value, w * x)
  assert len(saved) == 1 and np.array_equal(saved[0], x * x)
  dx, total = made.derivative((), 10 * w, sums, saved)(jnp.ones(3))
  np.testing.assert_allclose(dx, 300 * x * x * w * w, rtol=1e-6)
  assert np.array_equal(total, sums + 1)


@pytest.mark.parametrize("wrong", [
  lambda known, x, total: added(known, x, total) + total,  # the value
  lambda known, x, total: added(known, x, 2 * total),  # what is kept of it
])  # fmt: skip
def test_a_forward_pass_that_reads_what_comes_later_is_refused(wrong):
  function = lambda _, known, x, total: (wrong(known, x, total), None)  # noqa: E731
  with pytest.raises(ValueError, match=r"computes float32\[3\] from what comes later"):
    halves.halves(function, lambda known, later: (later,), (), *jnp.ones((3, 3)))


def test_what_follows_from_what_all_share_is_computed_again():
  """Of y = cos(3 a) (k x) + sin x, of which all share a, only the cosine of x is saved."""

  def function(shared, known, x):
    return jnp.cos(3 * shared["a"]) * (known[0] * x) + jnp.sin(x), None

  a, x, k = jnp.array([0.1, 0.4, 2.0]), jnp.array([1.0, 2.0, -1.0]), jnp.float32(5)
  shared = {"a": a, "unread": jnp.ones(7)}
  made = halved(function, shared, k, x)
  _, _, saved = made.forward(shared, (k, ()), x)
  assert len(saved) == 1 and np.allclose(saved[0], np.cos(x), rtol=1e-6)
  (dx,) = made.derivative({**shared, "a": 2 * a}, (k, ()), (), saved)(jnp.ones(3))
  np.testing.assert_allclose(dx, 5 * np.cos(6 * np.float64(a)) + np.cos(np.float64(x)), rtol=4e-6)
