"""The three GEMMs of the dot: exact on lattices, equal to an independent emulation, "
"well-behaved."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import tolerances
from jax.extend import core as jex_core
from lattice import lattice
from matmul_suite import multiplied

from fp8jax.ops import site as site_lib
from fp8jax.ops.dots import dot, dot_general
from fp8jax.ops.gemm_spec import explicit
from fp8jax.quantization import amax_history
from fp8jax.recipe import library
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.quant import Rounding

RECIPES = list(library.RECIPES)
EQUATIONS = [
  # eqn, sizes: contraction last and first, two contracted letters, a transposed weight
  ("BLD,DF->BLF", dict(B=2, L=72, D=200, F=130)),
  ("BLD,DHK->BLHK", dict(B=1, L=48, D=144, H=3, K=32)),
  ("BLHK,HKD->BLD", dict(B=2, L=24, H=5, K=40, D=96)),
  ("BLD,VD->BLV", dict(B=2, L=32, D=72, V=136)),
]


def _operands(rng, eqn, sizes, make):
  x, w, y = eqn.replace("->", ",").split(",")
  return [make(rng, *(sizes[c] for c in letters)) for letters in (x, w, y)]


def _normal(rng, *shape):
  return rng.standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _all_gemms(eqn, x, w, g, site):
  y, pull = jax.vjp(lambda x, w: dot(eqn, x, w, site), x, w)
  return y, *pull(g)


def _site(recipe, x, w, g, matmul="auto"):
  """A site whose scales, if they are not current, were calibrated on these very operands."""
  site = site_lib.single(recipe, matmul)
  if site.scaling_state is None:
    return site
  amaxes = np.stack([np.abs(t).max() for t in (x, w, g)])
  return dataclasses.replace(site, scaling_state=amax_history.calibrated(site.recipe, amaxes))


def _lattice_of(recipe):
  formats = {q.format.name for uses in library.RECIPES[recipe].uses().values() for q in uses}
  return functools.partial(lattice, fmt="e2m1") if "e2m1" in formats else lattice


def _is_rotated(gemm) -> bool:
  return gemm.lhs is not None and gemm.lhs.transform is not None


def _has_small_tiles(recipe: str) -> bool:
  """Of 16 or 32: their products are unrolled along tiles, and long ones compile for seconds."""
  return recipe.startswith(("mx", "nv"))


def _is_slow(equation: int, recipe: int) -> bool:
  """The first equation with every recipe; with the others these take turns, but those of small
  tiles."""
  return equation > 0 and (_has_small_tiles(RECIPES[recipe]) or (equation + recipe) % 6 > 0)


# Whole tiles of 16 and of 32, and a part of one, along each letter that is contracted.
FEW = dict(B=2, L=24, D=40, F=36)
LATTICE = [
  pytest.param(
    eqn,
    FEW if i == 0 and _has_small_tiles(recipe) else sizes,
    recipe,
    id=f"{eqn}-{recipe}",
    marks=[pytest.mark.slow] * _is_slow(i, j),
  )
  for i, (eqn, sizes) in enumerate(EQUATIONS)
  for j, recipe in enumerate(RECIPES)
]


@pytest.mark.parametrize("eqn, sizes, recipe", LATTICE)
def test_dot_is_exact_on_lattice_inputs(rng, eqn, sizes, recipe):
  x, w, g = _operands(rng, eqn, sizes, _lattice_of(recipe))
  xs, ws, ys = eqn.replace("->", ",").split(",")
  y, dx, dw = _all_gemms(eqn, x, w, g, _site(recipe, x, w, g))
  wide = [t.astype(np.float64) for t in (x, w, g)]
  np.testing.assert_array_equal(y, np.einsum(eqn, *wide[:2]))
  np.testing.assert_array_equal(dx, np.einsum(f"{ys},{ws}->{xs}", wide[2], wide[1]))
  # A rotated lattice is none.
  if not _is_rotated(library.RECIPES[recipe].wgrad):
    np.testing.assert_array_equal(dw, np.einsum(f"{xs},{ys}->{ws}", wide[0], wide[2]))


# Of three tests, whose products are one program where "auto" is the reference.
FIRST, SIZES = EQUATIONS[0]


def _normals(rng, recipe: str):
  """Operands of the first equation, in the sizes that it has on lattices."""
  return _operands(rng, FIRST, FEW if _has_small_tiles(recipe) else SIZES, _normal)


def _matrices(*tensors):
  """Their float64 values, the letters B and L as one."""
  return [t.reshape(-1, t.shape[-1]).astype(np.float64) for t in tensors]


NEAREST = [n for n, r in library.RECIPES.items() if r.is_quantized and not r.is_random]


@pytest.mark.parametrize(
  "matmul, recipe",
  [("reference", name) for name in NEAREST]
  + [("auto", name) for name in NEAREST if set(site_lib.single(name).backends) != {"reference"}],
)
def test_dot_equals_an_emulation_written_from_the_papers(rng, recipe, matmul):
  """Each GEMM quantises both operands along its own contraction, weights from the master copy."""
  x, w, g = _normals(rng, recipe)
  # Outliers, in different tiles each way.
  x[0, 5, 7], w[11, 13], g[0, 17, 19] = 300.0, -40.0, 1e3
  y, dx, dw = _matrices(
    *map(np.asarray, _all_gemms(FIRST, x, w, g, _site(recipe, x, w, g, matmul)))
  )
  x, w, g = _matrices(x, w, g)

  def narrow(t, quant):
    if quant is None:
      return t.astype(np.float64)
    return oracle.fake_quantize(t, quant.format.name, quant.tile, quant.scale.value)

  f, d, v = (getattr(library.RECIPES[recipe], p) for p in ("fwd", "dgrad", "wgrad"))
  want = (
    narrow(x, f.lhs) @ narrow(w.T, f.rhs).T,
    narrow(g, d.lhs) @ narrow(w, d.rhs).T,
    narrow(x.T, v.lhs) @ narrow(g.T, v.rhs).T,
  )
  for got, exact in zip((y, dx, dw), want):
    scale = np.abs(exact).max()
    assert np.max(np.abs(got - exact)) / scale < tolerances.FLOAT32_SUM


def test_wide_activations_are_multiplied_in_e5m2(rng):
  """Against ml_dtypes' cast: scales are 1, and the weight is 448 times the identity, in E4M3."""
  x = np.ldexp(rng.uniform(1, 2, (48, 32)), rng.integers(-14, 15, (48, 32))).astype(np.float32)
  g = np.ldexp(rng.uniform(1, 2, (48, 32)), rng.integers(-14, 15, (48, 32))).astype(np.float32)
  x[3, 5], g[7, 2], w = 57344.0, 57344.0, 448 * np.eye(32, dtype=np.float32)
  y, dx, dw = _all_gemms("TD,DF->TF", x, w, g, site_lib.single("tensor_current_e5m2"))
  codes = [t.astype(ml_dtypes.float8_e5m2).astype(np.float64) for t in (x, g)]
  np.testing.assert_array_equal(y, 448 * codes[0])
  np.testing.assert_array_equal(dx, 448 * codes[1])
  # 2^-14 would be zero in E4M3 with this amax.
  assert np.all(codes[0]) and not np.all((x / 128).astype(ml_dtypes.float8_e4m3fn))
  wide = x.astype(np.float64).T @ g.astype(np.float64)
  assert np.abs(dw - wide).max() < tolerances.FLOAT32_SUM * np.abs(wide).max()


@pytest.mark.parametrize("recipe", RECIPES)
def test_dot_error_is_within_its_formats_budget(rng, recipe):
  x, w, g = _normals(rng, recipe)
  got = _matrices(*map(np.asarray, _all_gemms(FIRST, x, w, g, _site(recipe, x, w, g))))
  wide = _matrices(x, w, g)
  want = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
  value = library.RECIPES[recipe]
  for result, exact, gemm in zip(got, want, (value.fwd, value.dgrad, value.wgrad)):
    budget = max(tolerances.GEMM_DIFFERENCE[n] for n in _formats(gemm))
    error = tolerances.difference(result, exact)
    assert error < budget
    # A recipe that quantises must also show it: otherwise something ran wide.
    assert not gemm.is_quantized or error > budget / 20


def _formats(gemm) -> set[str]:
  """Keys of tolerances.GEMM_DIFFERENCE."""
  if not gemm.is_quantized:
    return {"bf16"}
  return {
    q.format.name + ("_stochastic" if q.rounding is Rounding.STOCHASTIC else "")
    for q in (gemm.lhs, gemm.rhs)
  }


DIMENSIONS = [
  ((4, 24), (24, 40), (((1,), (0,)), ((), ()))),
  ((24, 4), (40, 24), (((0,), (1,)), ((), ()))),
  ((2, 5, 24), (24, 40), (((2,), (0,)), ((), ()))),
  ((3, 8, 24), (3, 24, 16), (((2,), (1,)), ((0,), (0,)))),
  ((8, 3, 24), (24, 16, 3), (((2,), (0,)), ((1,), (2,)))),
  ((2, 3, 8, 6), (6, 8, 10), (((2, 3), (1, 0)), ((), ()))),
  ((2, 3, 4, 8), (3, 8, 2, 5), (((3,), (1,)), ((0, 1), (2, 0)))),
]


def _letters(a_ndim, b_ndim, numbers):
  """Equation of lax.dot_general: batch dimensions, then what is left of lhs, then of rhs."""
  (a_contracted, b_contracted), (a_batch, b_batch) = numbers
  a, b = list("abcdefgh"[:a_ndim]), list("stuvwxyz"[:b_ndim])
  for i, j in zip((*a_contracted, *a_batch), (*b_contracted, *b_batch)):
    b[j] = a[i]
  batch = [a[i] for i in a_batch]
  y = batch + [x for x in a if x not in b] + [x for x in b if x not in a]
  return "".join(a), "".join(b), "".join(y)


# Two of them in blocks, the others with one scale per tensor, which compiles in half the time.
@pytest.mark.parametrize(
  "lhs, rhs, numbers, recipe",
  [
    pytest.param(*case, recipe, marks=[pytest.mark.slow] * ((i % 3 > 0 or i == 0) == is_block))
    for i, case in enumerate(DIMENSIONS)
    for is_block, recipe in enumerate(("tensor_current", "block_128"))
  ],
  ids=str,
)
def test_dot_general_agrees_with_numpy_by_letters(rng, lhs, rhs, numbers, recipe):
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
    return dot_general(a, b, numbers, site)

  @jax.jit
  def run(a, b, g):
    y, pull = jax.vjp(ours, a, b)
    return y, *pull(g)

  as_, bs, ys = _letters(a.ndim, b.ndim, numbers)
  exact = np.einsum(f"{as_},{bs}->{ys}", a.astype(np.float64), b.astype(np.float64))
  assert exact.shape == jax.eval_shape(lambda *ab: jax.lax.dot_general(*ab, numbers), a, b).shape
  g = lattice(rng, *exact.shape)
  for axis in range(g.ndim):
    index = [slice(None)] * g.ndim
    index[axis] = 0
    g[tuple(index)] = 7
  y, da, db = run(a, b, g)
  np.testing.assert_array_equal(y, exact)
  wide = [t.astype(np.float64) for t in (a, b, g)]
  np.testing.assert_array_equal(da, np.einsum(f"{ys},{bs}->{as_}", wide[2], wide[1]))
  np.testing.assert_array_equal(db, np.einsum(f"{as_},{ys}->{bs}", wide[0], wide[2]))


def test_dot_dtypes_follow_their_operands(rng):
  x = jnp.asarray(_normal(rng, 16, 32), jnp.bfloat16)
  w = jnp.asarray(_normal(rng, 32, 16))

  def run(x, w, site, other):
    y, pull = jax.vjp(lambda x, w: dot("TD,DF->TF", x, w, site), x, w)
    return y, *pull(jnp.ones_like(y)), dot("TD,DF->TF", x, w, other, out_dtype=jnp.float32)

  for recipe in RECIPES:
    site = site_lib.single(recipe)
    dtypes = [t.dtype for t in jax.eval_shape(run, x, w, site, site)]
    assert dtypes == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]


def test_dot_weight_gradient_is_accumulated_wide(rng):
  """With bfloat16 activations, a float32 master gets more than bfloat16 of gradient."""
  x = jnp.asarray(_normal(rng, 64, 16), jnp.bfloat16)
  w = jnp.asarray(_normal(rng, 16, 16))
  # One recipe for every kind of weight gradient.
  for recipe in {library.RECIPES[name].wgrad: name for name in RECIPES}.values():
    site = site_lib.single(recipe)
    loss = lambda w, s=site: dot("TD,DF->TF", x, w, s).astype(jnp.float32).sum()  # noqa: E731
    dw = np.asarray(jax.jit(jax.grad(loss))(w))
    assert np.any(dw != dw.astype(ml_dtypes.bfloat16).astype(np.float32))


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
  site, value = site_lib.single(recipe), library.RECIPES[recipe]
  x, w = jnp.zeros((64, 256), jnp.bfloat16), jnp.zeros((256, 128))

  def loss(x, w):
    return dot("TD,DF->TF", x, w, site).astype(jnp.float32).sum()

  jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, w).jaxpr
  found = {tuple(v.aval.dtype for v in eqn.invars) for eqn in _dots(jaxpr)}
  wide = (jnp.dtype(jnp.bfloat16),) * 2
  assert found == {
    multiplied(g) if g.is_quantized else wide for g in (value.fwd, value.dgrad, value.wgrad)
  }


def _seen(eqn, x, w, g, site):
  """What a site saw of one product, [3, S]."""

  return np.asarray(_pull(eqn, x, w, g, site))


@functools.partial(jax.jit, static_argnums=0)
def _pull(eqn, x, w, g, site):
  def run(tap):
    return dot(eqn, x, w, dataclasses.replace(site, tap=tap))

  return jax.vjp(run, site.tap)[1](g)[0]


@pytest.mark.parametrize("recipe", [n for n, r in library.RECIPES.items() if r.is_quantized])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen_by_the_site(rng, recipe, bad):
  """A narrow format saturates: the product alone would hide an infinity from the loss."""
  for tensor in range(3):
    operands = [_normal(rng, *shape) for shape in ((16, 256), (256, 64), (16, 64))]
    operands[tensor][3, 4] = bad
    seen = _seen("TD,DF->TF", *operands, site_lib.single(recipe))
    np.testing.assert_array_equal(np.isfinite(seen[:, 0]), [i != tensor for i in range(3)])


def test_observation_is_the_largest_magnitude_of_each_tensor(rng):
  x, w, g = _normal(rng, 2, 8, 32), _normal(rng, 32, 16), _normal(rng, 2, 8, 16)
  seen = _seen("BLD,DF->BLF", x, w, g, site_lib.single("block_128"))
  np.testing.assert_array_equal(seen[:, 0], [np.abs(t).max() for t in (x, w, g)])


@pytest.mark.parametrize(
  "eqn, plain, x, w",
  [
    ("...D, DF -> ...F", "abD,DF->abF", (2, 8, 16), (16, 32)),
    ("...D,DF->...F", "D,DF->F", (16,), (16, 32)),  # of nothing
    (" B ... D,DF -> B...F", "BaD,DF->BaF", (2, 8, 16), (16, 32)),
    ("a...D,DF->F...a", "abD,DF->Fba", (2, 8, 16), (16, 32)),  # a letter that is taken
    ("...TD,...DF->...TF", "aTD,aDF->aTF", (3, 8, 16), (3, 16, 32)),  # a batch
    ("...TD,...DF->...TF", "abTD,bDF->abTF", (2, 3, 8, 16), (3, 16, 32)),
    ("...TD,...DF->...TF", "aTD,DF->aTF", (3, 8, 16), (16, 32)),
  ],
)
def test_an_ellipsis_is_the_letters_it_stands_for(rng, eqn, plain, x, w):
  """The same spec as theirs, and NumPy's own reading of the ellipsis."""
  x, w = lattice(rng, *x), lattice(rng, *w)
  site = site_lib.single("block_128")
  assert explicit(eqn, x.ndim, w.ndim) == plain
  got = jax.jit(dot, static_argnums=0)(eqn, x, w, site)
  np.testing.assert_array_equal(got, np.einsum(eqn, x, w))


@pytest.mark.parametrize(
  "eqn, x, w, message",
  [
    ("BLD,DF", (1, 2, 3), (3, 4), "needs the form"),
    ("BLD,DF->BLF", (2, 3), (3, 4), "names 3 and 2 dimensions"),
    ("BLD,DF->BLF", (1, 2, 3), (5, 4), "gives D two sizes"),
    ("BL,DF->BLDF", (1, 2), (3, 4), "contracts nothing"),
    ("BLD,DF->BL", (1, 2, 3), (3, 4), "must keep every letter"),
    ("BBD,DF->BBF", (1, 1, 3), (3, 4), "at most once"),
    ("...D,DF", (2, 3), (3, 4), "einsum '...D,DF' needs the form"),
    ("...D,DF->F", (2, 3), (3, 4), "has '...' in x and not in y"),
    ("TD,DF->...F", (2, 3), (3, 4), "has '...' in y and not in x"),
    ("TD,...DF->TF", (2, 3), (3, 4), "has '...' in w alone"),
    ("...BLD,DF->...BLF", (2, 3), (3, 4), "names more dimensions than the operands have: 2 and 2"),
    ("...D...,DF->...F", (2, 3), (3, 4), "needs the form"),
    ("...D,...DF->...F", (2, 3), (5, 2, 3, 4), "for 2 dimensions of w and 1 of x"),
    ("...TD,...DF->...TF", (5, 2, 3), (1, 3, 4), "'...TD,...DF->...TF' gives '...' two sizes"),
    ("...D,DF->...F", (0, 3), (3, 4), "gives '...' size 0"),
  ],
)
def test_dot_refuses_impossible_equations_by_name(eqn, x, w, message):
  with pytest.raises(ValueError, match=message):
    dot(eqn, jnp.zeros(x), jnp.zeros(w), site_lib.single("bf16"))


def test_rules_first_match_wins_and_both_errors_are_named():
  names = ["layers/attn/q", "layers/mlp/up", "head"]
  rules = (("head|.*/up", "bf16"), ("layers/.*", "block_128"))
  assert rules_lib.match(names, rules) == {
    "layers/attn/q": "block_128", "layers/mlp/up": "bf16", "head": "bf16"
  }  # fmt: skip
  with pytest.raises(ValueError, match="no rule.*covers head"):
    rules_lib.match(names, (("layers/.*", "bf16"),))
  with pytest.raises(ValueError, match=r"'router'.*decides nothing"):
    rules_lib.match(names, ((".*", "bf16"), ("router", "block_128")))
  with pytest.raises(ValueError, match="did you mean 'block_128'"):
    rules_lib.recipe_by_name("block128")


@pytest.mark.parametrize("recipe", library.RECIPES.values(), ids=str)
def test_recipe_survives_its_description(recipe):
  assert type(recipe).from_dict(recipe.to_dict()) == recipe
