"""The three GEMMs of the dot: exact on lattices, equal to an independent emulation, "
"well-behaved."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from jax.extend import core as jex_core
from lattice import lattice

from fp8jax import recipes
from fp8jax.ops import site as site_lib
from fp8jax.ops.dot import dot, fp8_dot_general
from fp8jax.recipe import Scale

RECIPES = list(recipes.RECIPES)
EQUATIONS = [
  # eqn, sizes: contraction last and first, two contracted letters, a transposed weight
  ("BLD,DF->BLF", dict(B=2, L=72, D=200, F=130)),
  ("BLD,DHK->BLHK", dict(B=1, L=40, D=144, H=3, K=32)),
  ("BLHK,HKD->BLD", dict(B=2, L=24, H=5, K=40, D=96)),
  ("BLD,VD->BLV", dict(B=2, L=32, D=72, V=136)),
]


def _operands(rng, eqn, sizes, make):
  x, w, y = eqn.replace("->", ",").split(",")
  return [make(rng, *(sizes[c] for c in letters)) for letters in (x, w, y)]


def _normal(rng, *shape):
  return rng.standard_normal(shape).astype(np.float32)


def _all_gemms(eqn, x, w, g, site):
  @jax.jit
  def run(x, w, g):
    y, pull = jax.vjp(lambda x, w: dot(eqn, x, w, site), x, w)
    return y, *pull(g)

  return run(x, w, g)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("eqn, sizes", EQUATIONS, ids=[e for e, _ in EQUATIONS])
def test_dot_is_exact_on_lattice_inputs(rng, eqn, sizes, recipe):
  x, w, g = _operands(rng, eqn, sizes, lattice)
  xs, ws, ys = eqn.replace("->", ",").split(",")
  y, dx, dw = _all_gemms(eqn, x, w, g, site_lib.single(recipe))
  wide = [t.astype(np.float64) for t in (x, w, g)]
  np.testing.assert_array_equal(y, np.einsum(eqn, *wide[:2]))
  np.testing.assert_array_equal(dx, np.einsum(f"{ys},{ws}->{xs}", wide[2], wide[1]))
  np.testing.assert_array_equal(dw, np.einsum(f"{xs},{ys}->{ws}", wide[0], wide[2]))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "bf16"])
@pytest.mark.parametrize("matmul", ["auto", "reference"])
def test_dot_equals_an_emulation_written_from_the_papers(rng, recipe, matmul):
  """Each GEMM quantises both operands along its own contraction, weights from the master copy."""
  tokens, inner, outer = 272, 200, 144
  x, w, g = _normal(rng, tokens, inner), _normal(rng, inner, outer), _normal(rng, tokens, outer)
  x[5, 7], w[11, 13], g[17, 19] = 300.0, -40.0, 1e3  # outliers, in different tiles each way
  y, dx, dw = _all_gemms("TD,DF->TF", x, w, g, site_lib.single(recipe, matmul))
  if recipe == "tensor_current":
    qx = lambda t: oracle.fake_quantize(t, "e4m3", (0, 0), False)  # noqa: E731
    qg = lambda t: oracle.fake_quantize(t, "e5m2", (0, 0), False)  # noqa: E731
    want = qx(x) @ qx(w), qg(g) @ qx(w).T, qx(x).T @ qg(g)
  else:
    pow2 = recipe.endswith("pow2")

    def rows(t):
      return oracle.fake_quantize(t, "e4m3", (1, 128), pow2)

    def block(t):
      return oracle.fake_quantize(t, "e4m3", (128, 128), pow2)

    want = rows(x) @ block(w), rows(g) @ block(w).T, rows(x.T) @ rows(g.T).T
  for got, exact in zip((y, dx, dw), want):
    scale = np.abs(exact).max()
    assert np.max(np.abs(got - exact)) / scale < tolerances.FLOAT32_SUM


@pytest.mark.parametrize("recipe", RECIPES)
def test_dot_error_is_within_its_formats_budget(rng, recipe):
  x, w, g = _normal(rng, 512, 384), _normal(rng, 384, 320), _normal(rng, 512, 320)
  got = _all_gemms("TD,DF->TF", x, w, g, site_lib.single(recipe))
  wide = [t.astype(np.float64) for t in (x, w, g)]
  want = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
  value = recipes.RECIPES[recipe]
  for result, exact, gemm in zip(got, want, (value.fwd, value.dgrad, value.wgrad)):
    formats = {q.format.name for q in (gemm.lhs, gemm.rhs) if q is not None}
    worst = "e5m2" if "e5m2" in formats else "e4m3" if formats else "bf16"
    error = tolerances.difference(result, exact)
    assert error < tolerances.GEMM_DIFFERENCE[worst]
    # A recipe that quantises must also show it: otherwise something ran wide.
    assert not formats or error > tolerances.GEMM_DIFFERENCE[worst] / 20


DIMENSIONS = [
  ((4, 24), (24, 40), (((1,), (0,)), ((), ()))),
  ((24, 4), (40, 24), (((0,), (1,)), ((), ()))),
  ((2, 5, 24), (24, 40), (((2,), (0,)), ((), ()))),
  ((3, 8, 24), (3, 24, 16), (((2,), (1,)), ((0,), (0,)))),
  ((8, 3, 24), (24, 16, 3), (((2,), (0,)), ((1,), (2,)))),
  ((2, 3, 8, 6), (6, 8, 10), (((2, 3), (1, 0)), ((), ()))),
  ((2, 3, 4, 8), (3, 8, 2, 5), (((3,), (1,)), ((0, 1), (2, 0)))),
]


@pytest.mark.parametrize("recipe", ["block_128", "tensor_current"])
@pytest.mark.parametrize("lhs, rhs, numbers", DIMENSIONS, ids=str)
def test_fp8_dot_general_agrees_with_lax_dot_general(rng, lhs, rhs, numbers, recipe):
  a, b = lattice(rng, *lhs), lattice(rng, *rhs)
  a[..., -1], b[..., -1] = 7, 7  # dimensions are transposed: plant along every axis
  a[...], b[...] = np.clip(a, -7, 7), np.clip(b, -7, 7)
  for x in (a, b):
    for axis in range(x.ndim):
      index = [slice(None)] * x.ndim
      index[axis] = 0
      x[tuple(index)] = 7
  site = site_lib.single(recipe)

  def ours(a, b):
    return fp8_dot_general(a, b, numbers, site)

  def theirs(a, b):
    return jax.lax.dot_general(a, b, numbers)

  want, pull = jax.vjp(theirs, a, b)
  g = lattice(rng, *want.shape)
  for axis in range(g.ndim):
    index = [slice(None)] * g.ndim
    index[axis] = 0
    g[tuple(index)] = 7
  got, ours_pull = jax.vjp(ours, a, b)
  np.testing.assert_array_equal(got, want)
  for x, y in zip(ours_pull(g), pull(jnp.asarray(g))):
    np.testing.assert_array_equal(x, y)


def test_dot_dtypes_follow_their_operands(rng):
  x = jnp.asarray(_normal(rng, 8, 32), jnp.bfloat16)
  w = jnp.asarray(_normal(rng, 32, 16))
  for recipe in RECIPES:
    site = site_lib.single(recipe)
    y, pull = jax.vjp(lambda x, w, s=site: dot("TD,DF->TF", x, w, s), x, w)
    dx, dw = pull(jnp.ones_like(y))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    wide = dot("TD,DF->TF", x, w, site, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32


def test_dot_weight_gradient_is_accumulated_wide(rng):
  """With bfloat16 activations, a float32 master gets more than bfloat16 of gradient."""
  x = jnp.asarray(_normal(rng, 256, 16), jnp.bfloat16)
  w = jnp.asarray(_normal(rng, 16, 16))
  for recipe in RECIPES:
    site = site_lib.single(recipe)
    dw = jax.grad(lambda w, s=site: dot("TD,DF->TF", x, w, s).astype(jnp.float32).sum())(w)
    assert np.any(dw != dw.astype(jnp.bfloat16).astype(jnp.float32))


def _dots(jaxpr):
  """Every dot_general of a jaxpr, also inside calls."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      yield eqn
    for value in eqn.params.values():
      inner = getattr(value, "jaxpr", value)
      if isinstance(inner, jex_core.Jaxpr):
        yield from _dots(inner)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "bf16"])
def test_dot_multiplies_narrow_operands_in_all_three_gemms(rng, recipe):
  site, value = site_lib.single(recipe), recipes.RECIPES[recipe]
  x, w = jnp.zeros((64, 256), jnp.bfloat16), jnp.zeros((256, 128))

  def loss(x, w):
    return dot("TD,DF->TF", x, w, site).astype(jnp.float32).sum()

  jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, w).jaxpr
  found = {tuple(v.aval.dtype for v in eqn.invars) for eqn in _dots(jaxpr)}
  gemms = (value.fwd, value.dgrad, value.wgrad)
  assert found == {(g.lhs.format.dtype, g.rhs.format.dtype) for g in gemms}


@pytest.mark.parametrize("recipe", RECIPES)
def test_infinity_anywhere_is_seen_in_the_result(rng, recipe):
  """A narrow format has no infinity; a finite number in its place would hide it from the loss."""
  site = site_lib.single(recipe)
  x, w, g = (
    rng.standard_normal(shape).astype(np.float32) for shape in ((8, 256), (256, 64), (8, 64))
  )
  x[1, 2] = np.inf
  y, pull = jax.vjp(lambda x, w: dot("TD,DF->TF", x, w, site), x, w)
  assert not np.isfinite(y[1]).any()
  assert not np.isfinite(pull(g)[1][2]).all()
  g[3, 4] = -np.inf
  dx, dw = pull(g)
  assert not np.isfinite(dx[3]).any() and not np.isfinite(dw[:, 4]).any()


def test_observation_is_the_largest_magnitude_of_each_tensor(rng):
  x, w, g = _normal(rng, 2, 8, 32), _normal(rng, 32, 16), _normal(rng, 2, 8, 16)
  site = site_lib.single("block_128")
  _, pull = jax.vjp(lambda s: dot("BLD,DF->BLF", x, w, s), site)
  (seen,) = pull(jnp.asarray(g))
  np.testing.assert_array_equal(seen.tap, [np.abs(t).max() for t in (x, w, g)])


@pytest.mark.parametrize(
  "eqn, x, w, message",
  [
    ("BLD,DF", (1, 2, 3), (3, 4), "needs the form"),
    ("BLD,DF->BLF", (2, 3), (3, 4), "names 3 and 2 dimensions"),
    ("BLD,DF->BLF", (1, 2, 3), (5, 4), "gives D two sizes"),
    ("BL,DF->BLDF", (1, 2), (3, 4), "contracts nothing"),
    ("BLD,DF->BL", (1, 2, 3), (3, 4), "must keep every letter"),
    ("BBD,DF->BBF", (1, 1, 3), (3, 4), "at most once"),
  ],
)
def test_dot_refuses_impossible_equations_by_name(eqn, x, w, message):
  with pytest.raises(ValueError, match=message):
    dot(eqn, jnp.zeros(x), jnp.zeros(w), site_lib.single("bf16"))


def test_rules_first_match_wins_and_both_errors_are_named():
  names = ["layers/attn/q", "layers/mlp/up", "head"]
  rules = (("head|.*/up", "bf16"), ("layers/.*", "block_128"))
  assert site_lib.match_rules(names, rules) == {
    "layers/attn/q": "block_128", "layers/mlp/up": "bf16", "head": "bf16"
  }  # fmt: skip
  with pytest.raises(ValueError, match="no rule.*covers head"):
    site_lib.match_rules(names, (("layers/.*", "bf16"),))
  with pytest.raises(ValueError, match=r"'router'.*decides nothing"):
    site_lib.match_rules(names, ((".*", "bf16"), ("router", "block_128")))
  with pytest.raises(ValueError, match="did you mean 'block_128'"):
    site_lib.recipe_by_name("block128")


@pytest.mark.parametrize("recipe", recipes.RECIPES.values(), ids=str)
def test_recipe_survives_its_description(recipe):
  assert type(recipe).from_dict(recipe.to_dict()) == recipe
  pow2 = {q.scale for g in (recipe.fwd, recipe.wgrad) for q in (g.lhs, g.rhs) if q is not None}
  assert (Scale.POW2 in pow2) == recipe.name.endswith("pow2")
