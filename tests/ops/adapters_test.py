"""A frozen weight in codes and its adapter in one linear layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import recipe_runs
import scipy.linalg
import tolerances
from paper_oracle import three_products

import fp8jax
from fp8jax import axes, mesh
from fp8jax.formats import INT8
from fp8jax.ops import dots, stored_params
from fp8jax.ops.dots import dot
from fp8jax.optim import storage
from fp8jax.quantization import stored_matrix
from fp8jax.recipe import rules
from fp8jax.recipe.quant import Hadamard, Quant

EQN = "BLD,DHK->BLHK"
H64 = scipy.linalg.hadamard(64) / 8.0
_pack = jax.jit(stored_matrix.pack, static_argnums=(1, 2, 3))


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


# Of a base: HALO's recipe (arXiv:2501.02625), its largest number, and how NumPy rounds to it.
HALO = {
  "int8_h64": ("halo_int8_2_hq", 127, np.rint),
  "e3m2_h64": ("halo_fp6_1_hq", 28, lambda v: v.astype(ml_dtypes.float6_e3m2fn)),
  "e4m3": ("halo_fp8_0", 448, lambda v: v.astype(ml_dtypes.float8_e4m3fn)),
}


@pytest.mark.parametrize(
  "base", ["int8_h64", *(pytest.param(b, marks=pytest.mark.slow) for b in ("e3m2_h64", "e4m3"))]
)
def test_halos_base_is_codes_of_the_rotated_weight_and_both_products_take_them(rng, base):
  """Codes by NumPy; y = Q(x H) q' and dx = H' (Q(H g) q) H' by float64; two contracted letters."""
  recipe, most, narrow = HALO[base]
  x, w, g = recipe_runs.operands(rng)  # whole numbers: what they are rotated to is exact
  turned = w.T.reshape(80, 3, 64)
  turned = ((turned @ H64 if "h64" in base else turned).reshape(80, 192)).astype(np.float32)
  scale = np.abs(turned).max() * np.float32(1 / most)
  codes = narrow(np.clip(turned * (np.float32(1) / scale), -most, most)).astype(np.float32)
  stored = _pack(jnp.asarray(w).reshape(3, 64, 80), 2, 0, storage.FROZEN[base])
  assert stored.data.nbytes == w.size and stored.data.shape == (3, 64, 80)
  np.testing.assert_array_equal(stored.scale, [[scale]])
  np.testing.assert_array_equal(np.float32(stored.data).reshape(192, 80).T, codes)

  site = fp8jax.site.single(rules.recipe_by_name(recipe))
  x_in = jnp.asarray(x).reshape(64, 3, 64)

  @jax.jit
  def run(x, g, stored):
    y, pull = jax.vjp(lambda x: dot("THK,HKF->TF", x, stored_params.frozen(stored), site), x)
    return y, pull(g)[0].reshape(64, 192)

  for got, want in zip(run(x_in, g, stored), three_products(site.recipe, x, w, g)):
    assert np.abs(got - want).max() < tolerances.FLOAT32_SUM * np.abs(want).max()

  values = codes.astype(np.float64) * scale
  back = (values.reshape(80, 3, 64) @ H64).reshape(80, 192) if "h64" in base else values
  unpacked = jax.jit(stored_matrix.StoredMatrix.unpack)(stored).reshape(192, 80)
  wide = jax.jit(lambda x, w: dot("THK,HKF->TF", x, w, fp8jax.site.single("bf16")))(x_in, stored)
  for got, want in ((unpacked, back.T), (wide, x @ back.T)):
    assert np.abs(got - want).max() < tolerances.FLOAT32_SUM * np.abs(want).max()


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
  x, w, g = recipe_runs.operands(rng)

  def of(quant):
    return jax.eval_shape(functools.partial(stored_matrix.pack, inputs=1, quant=quant), w)

  rotated, plain = of(storage.FROZEN["int8_h64"]), of(Quant(INT8))
  hq = rules.recipe_by_name("halo_int8_2_hq")
  by_16, across = (
    dataclasses.replace(gemm, rotate_rows=(None, Hadamard(16, "none")))
    for gemm in (hq.dgrad, hq.fwd)
  )
  for codes, recipe, words in (
    (of(stored_matrix.QUANT), "tensor_current", "e4m3 128x128 f32 cannot be multiplied as e4m3"),
    (of(storage.FROZEN["e4m3"]), "fp8_unscaled", "as e4m3 .*x.* one; give its site"),
    (of(storage.FROZEN["e4m3"]), "e4m3_static", "as e4m3 .*x.* static; give its site"),
    (plain, "halo_int8_2", "int8 .*x.* f32 cannot be multiplied as int8 .* hadamard64 unsigned"),
    (plain, "halo_int8_2_hq", "hadamard64 unsigned; give its site a recipe whose fwd product"),
    (rotated, "halo_int8_0", "hadamard64 unsigned cannot be multiplied as int8"),
    (rotated, "halo_int8_2", "as int8 .*x.* f32; give its site a recipe whose dgrad product"),
    (rotated, dataclasses.replace(hq, dgrad=by_16), "rows rotated by .*16.* whose dgrad product"),
    (rotated, dataclasses.replace(hq, fwd=across), "rows rotated by .*16.* whose fwd product"),
  ):
    site = fp8jax.site.single(rules.recipe_by_name(recipe) if isinstance(recipe, str) else recipe)

    def both(x, g, w, site=site):
      return jax.vjp(lambda x: dot("TD,DF->TF", x, stored_params.frozen(w), site), x)[1](g)

    with pytest.raises(ValueError, match=f"{words}.*model.lora.base='bf16'"):
      jax.eval_shape(both, x, g, codes)
  w = w[:96]
  with pytest.raises(ValueError, match="K=96 must be a multiple of Hadamard.size=64"):
    of(storage.FROZEN["int8_h64"])


@pytest.mark.parametrize(
  "eqn, base",
  [
    ("BLD,DF->BLF", "block_fp8"), ("BLF,FD->BLD", "int8_h64"),
    *(pytest.param(*of, marks=pytest.mark.slow)
      for of in (("BLF,FD->BLD", "block_fp8"), ("BLD,DF->BLF", "e3m2_h64"))),
  ],
)  # fmt: skip
def test_shards_of_codes_multiply_as_the_whole(rng, eqn, base):
  """Codes split over fsdp and tensor travel and multiply as one device's: y and dx."""
  sizes = dict(B=4, L=128, D=256, F=256)
  x_letters, w_letters, y_letters = eqn.replace("->", ",").split(",")
  shapes = [tuple(sizes[c] for c in letters) for letters in (x_letters, w_letters, y_letters)]
  x, w, g = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
  codes = _pack(w, 1, 0, storage.FROZEN[base])
  layout = axes.Layout(
    mesh.make((1, 2, 2), jax.devices()[:4]),
    axes.as_rules(dict(D="fsdp", F="tensor")), axes.as_rules(dict(B="fsdp", F="tensor")),
  )  # fmt: skip

  def both(x, codes, g, layout=axes.LOCAL):
    recipe = rules.recipe_by_name(HALO[base][0] if base in HALO else "block_128")
    site = dataclasses.replace(fp8jax.site.single(recipe), layout=layout)
    y, pull = jax.vjp(lambda x: dot(eqn, x, stored_params.frozen(codes), site), x)
    return y, pull(g)[0]

  want = jax.jit(both)(x, codes, g)
  places = stored_matrix.shardings(codes, layout.weight_sharding(w_letters))
  of_scale = jax.sharding.PartitionSpec(None, None) if base in HALO else None
  assert places.scale.spec == (of_scale or layout.weight_spec(w_letters))
  args = (jax.device_put(x, layout.act_sharding(x_letters)),
          jax.tree.map(jax.device_put, codes, places),
          jax.device_put(g, layout.act_sharding(y_letters)))  # fmt: skip
  got = jax.jit(lambda *a: both(*a, layout=layout))(*args)
  for a, b in zip(got, want):
    assert np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-5 * np.abs(np.asarray(b)).max()
