"""A frozen weight in codes and its adapter in one linear layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax import axes, mesh
from fp8jax.ops import dots, stored_params
from fp8jax.ops.dots import dot
from fp8jax.quantization import stored_matrix

EQN = "BLD,DHK->BLHK"


def _case(rng, dtype=jnp.float32):
  x, g = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((2, 128, 160), (2, 128, 2, 96)))
  w = jnp.asarray(rng.standard_normal((160, 2, 96)), jnp.float32)
  return x, w, g


@pytest.mark.parametrize("save", ["float32", "frozen float32"])
def test_codes_multiply_as_the_weight_that_a_block_recipe_quantizes(rng, save):
  """y and dx to the bit, partial tiles included; codes of 160 x 192 have tiles of 32 and 64."""
  x, w, g = _case(rng)
  stored = {"float32": stored_matrix.pack(w, 1), "frozen float32": w}[save]

  def both(w):
    site = fp8jax.site.single("block_128")
    y, pull = jax.vjp(lambda x: dot(EQN, x, w, site), x)
    return y, pull(g)[0]

  want = jax.jit(lambda: both(w))()
  got = jax.jit(lambda: both(stored_params.frozen(stored)))()
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_codes_are_those_of_numpy(rng):
  """Tile by tile in float64, round to nearest by ml_dtypes; stacked over two layers."""
  w = rng.standard_normal((2, 160, 2, 96)).astype(np.float32)
  codes = stored_matrix.pack(jnp.asarray(w), 1, lead=1)
  assert codes.scale.shape == (2, 2, 2) and codes.shape == w.shape
  matrices = w.reshape(2, 160, 192)
  for n, i, j in np.ndindex(2, 2, 2):
    part = np.s_[n, 128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
    tile = matrices[part]
    scale = np.float32(np.abs(tile).max()) * np.float32(1 / 448)
    assert codes.scale[n, i, j] == scale
    data = np.asarray(codes.data).reshape(2, 160, 192)[part].astype(np.float64)
    assert np.abs(data * scale - tile).max() <= scale * 16.001  # half a step of the top binade
    np.testing.assert_array_equal(codes.unpack().reshape(2, 160, 192)[part],
                                  (data.astype(np.float32) * scale))  # fmt: skip


def test_an_adapter_adds_its_product_and_a_zero_b_adds_nothing(rng):
  x, w, g = _case(rng)
  a = jnp.asarray(rng.standard_normal((160, 4)), jnp.float32)
  b = jnp.asarray(rng.standard_normal((4, 2, 96)), jnp.float32)

  def run(b, scale):
    def y(x, a, b):
      sites = (fp8jax.site.single("bf16", name="a"), fp8jax.site.single("bf16", name="b"))
      frozen = stored_params.frozen(stored_matrix.pack(w, 1))
      adapted = dots.Adapted(frozen, a, b, sites, scale)
      return dot(EQN, x, adapted, fp8jax.site.single("block_128"))

    out, pull = jax.vjp(y, x, a, b)
    return out, *pull(g)[1:]

  base = jax.jit(lambda: dot(EQN, x, w, fp8jax.site.single("block_128")))()
  run = jax.jit(run, static_argnums=1)
  out, da, _ = run(jnp.zeros_like(b), 0.5)
  np.testing.assert_array_equal(out, base)
  assert not np.any(np.asarray(da))
  out, da, db = run(b, 0.5)
  x64, a64, b64, g64 = (np.asarray(t, np.float64) for t in (x, a, b, g))
  for got, want in (
    (out, np.asarray(base) + 0.5 * np.einsum("bld,dr,rhk->blhk", x64, a64, b64)),
    (da, 0.5 * np.einsum("bld,blhk,rhk->dr", x64, g64, b64)),
    (db, 0.5 * np.einsum("bld,dr,blhk->rhk", x64, a64, g64)),
  ):
    assert np.abs(np.asarray(got) - want).max() < 1e-5 * np.abs(want).max()


def test_codes_of_another_recipe_are_refused(rng):
  x, w, _ = _case(rng)
  with pytest.raises(ValueError, match="cannot be multiplied as e4m3 .*model.lora.base='bf16'"):
    dot(EQN, x, stored_matrix.pack(w, 1), fp8jax.site.single("tensor_current"))


@pytest.mark.parametrize("eqn", ["BLD,DF->BLF", "BLF,FD->BLD"])
def test_shards_of_codes_multiply_as_the_whole(rng, eqn):
  """Codes split over fsdp and tensor travel and multiply as one device's: y and dx."""
  sizes = dict(B=4, L=128, D=256, F=256)
  x_letters, w_letters, y_letters = eqn.replace("->", ",").split(",")
  shapes = [tuple(sizes[c] for c in letters) for letters in (x_letters, w_letters, y_letters)]
  x, w, g = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
  codes = stored_matrix.pack(w, 1)
  layout = axes.Layout(
    mesh.make((1, 2, 2), jax.devices()[:4]),
    axes.as_rules(dict(D="fsdp", F="tensor")), axes.as_rules(dict(B="fsdp", F="tensor")),
  )  # fmt: skip

  def both(x, codes, g, layout=axes.LOCAL):
    site = dataclasses.replace(fp8jax.site.single("block_128"), layout=layout)
    y, pull = jax.vjp(lambda x: dot(eqn, x, stored_params.frozen(codes), site), x)
    return y, pull(g)[0]

  want = jax.jit(both)(x, codes, g)
  places = stored_matrix.shardings(codes, layout.weight_sharding(w_letters))
  assert places.scale.spec == layout.weight_spec(w_letters)
  args = (jax.device_put(x, layout.act_sharding(x_letters)),
          jax.tree.map(jax.device_put, codes, places),
          jax.device_put(g, layout.act_sharding(y_letters)))  # fmt: skip
  got = jax.jit(lambda *a: both(*a, layout=layout))(*args)
  for a, b in zip(got, want):
    assert np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-5 * np.abs(np.asarray(b)).max()
