"""AdamW of one parameter: the definition against Optax, the Hopper kernel against the definition.

Interpreted, the kernel must give the definition's bits. XLA contracts mul and add to fma where it
likes, so numbers are chosen whose products are exact: then it does not matter where.
"""

import functools
import re

import jax
import jax.numpy as jnp
import kernel_cases
import ml_dtypes
import numpy as np
import optax
import pytest
import tolerances

from fp8jax.errors import UserError
from fp8jax.formats import E4M3
from fp8jax.kernels import choose, self_test
from fp8jax.kernels.adamw import api as adamw_api
from fp8jax.kernels.adamw import lanes
from fp8jax.kernels.adamw import mosaic_sm90 as mosaic_sm90_lib
from fp8jax.kernels.choose import Device
from fp8jax.kernels.gemm import mosaic_sm90 as gemm
from fp8jax.optim import storage
from fp8jax.quantization import bf16_remainder, quantized_tensor
from fp8jax.recipe.quant import Quant, Scale

HOPPER = Device("gpu", 90)
EXACT = dict(b1=0.5, b2=0.25, eps=2.0**-20, weight_decay=0.125)
USUAL = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)


@functools.partial(jax.jit, static_argnames=("rule", "backend"))
def _update(arrays, by, rule, backend):
  return adamw_api.update(*arrays, **by, **dict(rule), backend=backend)


def _run(arrays, backend="reference", rule=EXACT, count=3, rate=2.0**-6, factor=0.5, applied=True):
  by = dict(count=jnp.int32(count), rate=jnp.float32(rate), factor=jnp.float32(factor))
  by["is_applied"] = jnp.asarray(applied)
  return _update(arrays, by, tuple(rule.items()), backend)


def _arrays(rng, name):
  """(gradient, master, mu, nu): 8 bits of mantissa in gradient and master, scales powers of two."""
  dtype, is_pair, shape, _ = kernel_cases.ADAMW[name]
  kept = storage.MOMENTS[name]
  group = kept.mu.tile[1] if kept.mu and kept.mu.tile[1] else 64
  g, m, v, p = (rng.standard_normal(shape).reshape(-1, group) for _ in range(4))
  size = 2.0 ** rng.integers(-20, 3, (len(g), 1))
  g, m, v = g * size, m * size / 8, (v * size / 8) ** 2
  # Their amax; 448 is E4M3's.
  factor = 1.0 if name == "coat" else 448.0
  m[:, 17:18], v[:, 5:6] = (
    factor * size,
    (factor if name == "sqrt_v" else factor**0.5) ** 2 * size**2,
  )
  for x in (g, m, v):
    x[6:8] = 0
  # Squares that underflow and overflow; what is no number, as a gradient and as a moment.
  g[10] *= 1e-25
  g.reshape(-1)[[5001, 6002, 7003, 8004]] = 1e30, np.nan, np.inf, -np.inf
  m.reshape(-1)[8505] = np.nan

  def few_bits(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(shape)

  def keep(x, quant):
    x = x.reshape(shape).astype(np.float32)
    if quant is None:
      return jnp.asarray(x)
    x = jax.jit(quantized_tensor.pack, static_argnums=1)(x, quant)
    assert x.scale is None or set(np.frexp(x.scale)[0].flat) <= {0.0, 0.5}
    return x

  p = jnp.asarray(few_bits(p))
  arrays = keep(m, kept.mu), keep(v, kept.nu)
  return (
    jnp.asarray(few_bits(g), dtype),
    jax.jit(bf16_remainder.split)(p) if is_pair else p,
    *arrays,
  )


def _assert_same_bits(got, want):
  """All bits, but for those of NaN."""
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    x, y = np.asarray(x), np.asarray(y)
    assert x.dtype == y.dtype and x.shape == y.shape
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[y.dtype.itemsize]
    is_nan = np.isnan(y.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(x.astype(np.float32)), is_nan)
    np.testing.assert_array_equal(x.view(width)[~is_nan], y.view(width)[~is_nan])


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(n, marks=[pytest.mark.slow] * (n in ("bf16", "e4m3_256")))
    for n in kernel_cases.ADAMW
  ],
)
def test_kernel_is_the_reference(rng, request, monkeypatch, name):
  # Looking for races takes time; one that copies less than others has none of its own.
  looks = name not in ("sqrt_v", "e4m3_256")
  request.getfixturevalue("interpreted" if looks else "interpreted_on_mesh")
  monkeypatch.setattr(gemm, "num_cores", lambda: 1)
  monkeypatch.setattr(mosaic_sm90_lib, "_WARPGROUPS", kernel_cases.ADAMW[name][-1])
  arrays = _arrays(rng, name)
  assert mosaic_sm90_lib.supports(*arrays, HOPPER) is None
  *got, _ = _run(arrays, "mosaic_sm90")
  *want, _ = _run(arrays)
  _assert_same_bits(got, want)
  # What is no number stays visible everywhere, and the rest has moved.
  master, mu, nu = (np.asarray(_wide(x), np.float32).reshape(-1) for x in got)
  assert all(np.isnan(x[6002]) for x in (master, mu, nu)) and np.isnan(mu[8505])
  assert np.mean(master != np.asarray(_wide(arrays[1])).reshape(-1)) > 0.8


def test_a_step_that_the_kernel_does_not_apply_leaves_everything(rng, monkeypatch, interpreted):
  monkeypatch.setattr(gemm, "num_cores", lambda: 1)
  arrays = _arrays(rng, "float32")
  *state, squares = _run(arrays, "mosaic_sm90", applied=False)
  _assert_same_bits(state, list(arrays[1:]))
  _assert_sums_of_squares(squares, 0 * arrays[1], arrays[1])


@jax.jit
def _wide(kept):
  return (
    kept.unpack()
    if isinstance(kept, quantized_tensor.QuantizedTensor)
    else bf16_remainder.to_float32(kept)
  )


def _assert_sums_of_squares(found, *arrays):
  want = [np.sum(np.float64(x) ** 2) for x in arrays]
  np.testing.assert_allclose(found, want, rtol=tolerances.FLOAT32_SUM)


def test_a_step_that_is_not_applied_leaves_everything(rng):
  arrays = _arrays(rng, "sqrt_v")
  *state, squares = _run(arrays, applied=False)
  _assert_same_bits(state, list(arrays[1:]))
  _assert_sums_of_squares(squares, 0 * _wide(arrays[1]), _wide(arrays[1]))


@pytest.mark.parametrize("rule", [EXACT, USUAL], ids=["exact", "usual"])
def test_float32_is_optax(rng, rule):
  """Its chain as jitted: Adam, decoupled decay, times -rate, added to the parameters."""
  rate, factor = 2.0**-7, 0.25
  chain = optax.chain(
    optax.scale(factor), optax.scale_by_adam(rule["b1"], rule["b2"], rule["eps"]),
    optax.add_decayed_weights(rule["weight_decay"]), optax.scale(-rate),
  )  # fmt: skip

  @jax.jit
  def step(g, p, state):
    updates, state = chain.update(g, state, p)
    return optax.apply_updates(p, updates), state

  values = rng.standard_normal((5, 40, 100)).astype(ml_dtypes.bfloat16).astype(np.float32)
  p, *gradients = map(jnp.asarray, values)
  want, state = p, chain.init(p)
  mu = nu = jnp.zeros_like(p)
  for count, g in enumerate(gradients, 1):
    want, state = step(g, want, state)
    before = p
    p, mu, nu, squares = _run((g, p, mu, nu), rule=rule, count=count, rate=rate, factor=factor)
    if rule is EXACT:  # of what is added: elsewhere the difference is that of two rounded numbers
      _assert_sums_of_squares(squares, np.float64(p) - before, before)
  if rule is EXACT:
    _assert_same_bits((p, mu, nu), (want, state[1].mu, state[1].nu))
  for x, y in ((p, want), (mu, state[1].mu), (nu, state[1].nu)):
    np.testing.assert_allclose(x, y, rtol=tolerances.FLOAT32_SUM, atol=tolerances.FLOAT32_SUM)


def test_moments_are_rounded_after_they_were_used(rng):
  gradient, master, mu, nu = _arrays(rng, "sqrt_v")
  found = _run((gradient, master, mu, nu))
  exact = _run((gradient, master, mu.unpack(), nu.unpack()))
  _assert_same_bits((found[0], found[3]), (exact[0], exact[3]))
  pack = jax.jit(quantized_tensor.pack, static_argnums=1)
  _assert_same_bits(found[1:3], tuple(pack(x, k.quant) for x, k in zip(exact[1:3], (mu, nu))))


def test_a_device_that_computes_something_else_is_refused(monkeypatch, interpreted_on_mesh):
  kept = storage.MOMENTS["sqrt_v"]
  trial = functools.partial(
    self_test.optimizer, kept.mu, kept.nu, is_pair=True, dtype=jnp.float32, sizes=(12, 256)
  )
  trial()
  over = lanes._broadcast

  def of_one_row(scale, x):
    return over(jnp.where(jnp.arange(scale.shape[0]) == 21, 1.2 * scale, scale), x)

  monkeypatch.setattr(lanes, "_broadcast", of_one_row)
  with pytest.raises(UserError, match="group 21 of 128.*optimizer='xla'"):
    trial()


def test_adamw_kernel_names_why_it_refuses_a_parameter():
  x = jax.ShapeDtypeStruct((8, 512), jnp.float32)

  def kept(quant, shape=x.shape):
    key = jax.random.key(0)
    pack = functools.partial(quantized_tensor.pack, quant=quant, key=key)
    return jax.eval_shape(pack, jax.ShapeDtypeStruct(shape, x.dtype))

  coat, wide = (storage.MOMENTS[name] for name in ("coat", "e4m3_256"))
  short, odd, norm = (jax.ShapeDtypeStruct(s, x.dtype) for s in ((8, 192), (3, 5), (576,)))
  reasons = {
    "Hopper": (x, x, x, x, Device("gpu", 100)),
    "not float16": (jax.ShapeDtypeStruct(x.shape, jnp.float16), x, x, x),
    "float32 or Split": (x, jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), x, x),
    "a pass before": (x, x, *(kept(storage.MOMENTS["tensor_e4m3_e5m2"].mu),) * 2),
    "(128, 256) only": (x, x, *(kept(Quant(E4M3, (1, 64))),) * 2),
    "scales are f32": (x, x, *(kept(Quant(E4M3, (1, 128), Scale.POW2)),) * 2),
    "[128, 256]": (x, x, kept(coat.mu), kept(wide.nu)),
    "no multiple of 128": (short, short, kept(coat.mu, (8, 192)), kept(coat.nu, (8, 192))),
    "no multiple of 64": (odd, odd, odd, odd),
    "9 rows of 64 numbers; expected a multiple of 8": (norm, norm, norm, norm),
  }
  for part, (*arrays, device) in ((k, (*v, HOPPER)[:5]) for k, v in reasons.items()):
    assert part in (mosaic_sm90_lib.supports(*arrays, device) or ""), part
    choice = choose.adamw(*arrays, device)
    assert choice.backend == "reference" and part in choice.notes[0]
  assert choose.adamw(x, x, kept(coat.mu), kept(coat.nu), HOPPER).backend == "mosaic_sm90"
  random = kept(storage.MOMENTS["bf16_sr"].mu)
  refused = choose.adamw(x, x, random, random, HOPPER)
  assert re.search("to the nearest only.*takes no key", refused.reason)
  named = choose.adamw(x, x, x, x, Device(), "mosaic_sm90")
  assert isinstance(named, choose.Refusal) and "Hopper" in named.reason
  with pytest.raises(ValueError, match="'triton'"):
    choose.adamw(x, x, x, x, HOPPER, "triton")


def test_bytes_of_a_pass_are_read_and_written_but_the_gradients():
  """COAT's moments: a code per number, 5 bytes per 128; the master's float32; gradients in BF16."""
  array = jax.ShapeDtypeStruct((3, 256), jnp.bfloat16)
  moment = jax.eval_shape(lambda: quantized_tensor.zeros((3, 256), storage.MOMENTS["coat"].mu))
  master = jax.ShapeDtypeStruct((3, 256), jnp.float32)
  of_moment = 3 * 256 + 5 * 3 * 2
  assert adamw_api.num_bytes(array, master, moment, moment) == 3 * 256 * (2 + 2 * 4) + 4 * of_moment
