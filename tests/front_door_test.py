"""`import fp8jax` as a user of the library meets it: light, documented, and true to its pages."""

import doctest
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from lattice import lattice
from packaging import requirements, utils

import fp8jax
from fp8jax.recipe import library
from fp8jax.recipe.quant import Rounding

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Of `fp8jax.site`, what the errors and the page send a reader to.
SITE = ("single", "update", "combine", "calibrate")
PUBLIC = {name: getattr(fp8jax, name) for name in fp8jax.__all__}
FUNCTIONS = {k: v for k, v in PUBLIC.items() if inspect.isfunction(v)}
FUNCTIONS |= {f"site.{k}": getattr(fp8jax.site, k) for k in SITE}


@pytest.mark.slow  # functions and their examples: below
def test_the_page_runs(repository, capsys):
  """Blocks of "FP8 in ten minutes" run in order, as a reader would run them."""
  path = repository / "experiments" / "fp8_in_ten_minutes.md"
  text = path.read_text()
  blocks = list(BLOCK.finditer(text))
  # None escapes for being fenced another way.
  assert len(blocks) == text.count("```") // 2 >= 8
  namespace = {"__name__": "page"}
  for block in blocks:
    # Line numbers of a traceback are those of the page.
    above = text.count("\n", 0, block.start(1))
    exec(compile("\n" * above + block[1], str(path), "exec"), namespace)
  assert "amax of g" in capsys.readouterr().out


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_documented_and_their_examples_run(name):
  text = inspect.getdoc(FUNCTIONS[name])
  sections = re.findall(r"^(\w+):", text, re.MULTILINE)
  assert [s for s in sections if s != "Raises"] == ["Args", "Returns", "Source", "Example"]
  for parameter in inspect.signature(FUNCTIONS[name]).parameters:
    assert re.search(rf"^  (\w+, )*{parameter}(, \w+)*: ", text, re.MULTILINE), parameter
  (test,) = doctest.DocTestFinder().find(FUNCTIONS[name], name, globs={})
  assert doctest.DocTestRunner().run(test).failed == 0 and test.examples


# --- what `pip install fp8jax` brings ------------------------------------------------------------

LIGHT = """
import json, sys
refused = set(json.loads(sys.argv[1]))

class Refuse:
  def find_spec(self, name, path=None, target=None):
    if name.partition(".")[0] in refused:
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import fp8jax, jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 3)  # an error where importing has met the devices

@jax.jit
def step(x, w):
  tx = fp8jax.scale_by_adam(moment_format="sqrt_v")
  dw = jax.grad(lambda w: fp8jax.dot("TD,DF->TF", x, w, "tensor_current").sum())(w)
  updates, _ = tx.update(dw, tx.init(w))
  return dw.mean(), updates.mean(), fp8jax.quantize(x, fp8jax.Quant(fp8jax.E4M3))

*means, q = step(jnp.ones((4, 64)), jnp.ones((64, 64)))
print(*(round(float(m), 3) for m in means), fp8jax.dequantize(q).shape)
# A fifth of the imports' time, which a CPU needs nothing of.
assert not any(name.startswith("jax.experimental.mosaic") for name in sys.modules)
import launch
"""


def _closure(names) -> set[str]:
  """These distributions and what they need, without extras."""
  found, left = set(), [utils.canonicalize_name(n) for n in names]
  while left:
    name = left.pop()
    if name not in found:
      found.add(name)
      needs = map(requirements.Requirement, importlib.metadata.requires(name) or ())
      is_needed = (r for r in needs if r.marker is None or r.marker.evaluate({"extra": ""}))
      left += [utils.canonicalize_name(r.name) for r in is_needed]
  return found


def test_the_library_needs_four_packages(repository):
  """A process in which nothing else can be imported computes and differentiates."""
  light = _closure(["jax", "numpy", "ml-dtypes", "optax"]) | {"fp8jax"}
  refused = {
    module
    for module, names in importlib.metadata.packages_distributions().items()
    if not {utils.canonicalize_name(n) for n in names} & light
  }
  assert {"flax", "orbax", "grain", "ml_collections", "rich", "tensorboardX"} <= refused
  command = [sys.executable, "-c", LIGHT, json.dumps(sorted(refused))]
  env = os.environ | {"PYTHONPATH": str(repository)}
  env.pop("XLA_FLAGS")
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  assert done.stdout == "4.0 1.0 (4, 64)\n", done.stderr
  missing = "error: the package 'ml_collections' is not installed; pip install 'fp8jax[train]'\n"
  assert done.returncode == 1 and done.stderr.endswith(missing)  # the launcher


# --- dot -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "recipe", ["block_128", library.ROWWISE, fp8jax.site.single("tensor_current")], ids=str
)
def test_dot_and_dot_general_take_a_name_a_recipe_or_a_site(rng, recipe):
  x, w, g = lattice(rng, 16, 32), lattice(rng, 32, 16), lattice(rng, 16, 16)

  numbers = (((1,), (0,)), ((), ()))

  @jax.jit
  def run(x, w, g):
    found = []
    for product in (
      lambda x, w: fp8jax.dot("TD, DF -> TF", x, w, recipe),
      lambda x, w: fp8jax.dot_general(x, w, numbers, recipe),
    ):
      y, pull = jax.vjp(product, x, w)
      found.append((y, *pull(g)))
    return found

  by_letters, by_numbers = run(x, w, g)
  x, w, g = (t.astype(np.float64) for t in (x, w, g))
  for got, same, want in zip(by_letters, by_numbers, (x @ w, g @ w.T, x.T @ g)):
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(same, want)


def test_dot_by_name_works_under_vmap_and_more_than_once(rng):
  """Elements have scales of their own: powers of two, many binades apart, stay exact."""
  factors = 2.0 ** np.arange(-20, 20, 10, dtype=np.float32)[:, None, None]
  x, w, g = lattice(rng, 4, 16, 32) * factors, lattice(rng, 32, 16), lattice(rng, 4, 16, 16)

  @jax.jit
  def run(x, w, g):
    def twice(w):
      each = jax.vmap(lambda x: fp8jax.dot("TD,DF->TF", x, w, "tensor_current"))(x)
      return each, fp8jax.dot("TD,DF->TF", x[0], w, "tensor_current")

    (y, again), pull = jax.vjp(twice, w)
    return y, again, pull((g, jnp.zeros_like(again)))[0]

  y, again, dw = run(x, w, g / factors)
  x, w, g = (t.astype(np.float64) for t in (x, w, g / factors))
  np.testing.assert_array_equal(y, x @ w)
  np.testing.assert_array_equal(again, x[0] @ w)
  np.testing.assert_array_equal(dw, np.einsum("etd,etf->df", x, g))


def test_recipes_that_round_stochastically_take_a_key(rng):
  x = rng.standard_normal((32, 32)).astype(np.float32)
  quant = fp8jax.Quant(fp8jax.E4M3, rounding=Rounding.STOCHASTIC)
  recipe = fp8jax.Recipe("sr", fwd=fp8jax.Gemm(quant, quant))
  with pytest.raises(ValueError, match="'sr' rounds stochastically: give key="):
    fp8jax.dot("TD,DF->TF", x, x, recipe)
  product = jax.jit(lambda key: fp8jax.dot("TD,DF->TF", x, x, recipe, key=key))
  one, same, other = (product(jax.random.key(seed)) for seed in (0, 0, 1))
  assert np.all(one == same) and np.any(one != other)


@pytest.mark.parametrize(
  "recipe, options, error, message",
  [
    ("block128", {}, ValueError, "unknown recipe 'block128'; did you mean 'block_128'"),
    ("tensor_delayed", {}, ValueError, r"site = fp8jax.site.single\('tensor_delayed'\)"),
    (library.E4M3_STATIC, {}, ValueError, "remembers none. Keep a Site"),
    (None, {}, TypeError, "fourth argument is None, expected a recipe's name"),
    (fp8jax.site.single("bf16"), {"key": 1}, ValueError, "leave key out"),
  ],
  ids=str,
)
def test_what_is_no_recipe_is_refused(recipe, options, error, message):
  x = jnp.ones((16, 16))
  with pytest.raises(error, match=message):
    fp8jax.dot("TD,DF->TF", x, x, recipe, **options)
  with pytest.raises(error, match=message):
    fp8jax.dot_general(x, x, (((1,), (0,)), ((), ())), recipe, **options)


# --- quantize ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_quantize_is_numpys_along_either_axis(rng, axis):
  x = rng.standard_normal((48, 80)).astype(np.float32)
  quant = fp8jax.Quant(fp8jax.E5M2, tile=(1, 32), scale=fp8jax.Scale.POW2)
  q = fp8jax.quantize(x, quant, axis=axis)
  as_lies = x if axis % 2 else x.T
  data, scale = oracle.quantize(as_lies, "e5m2", (1, 32), "pow2")
  values = data.astype(np.float32) * scale
  np.testing.assert_array_equal(q.data, data if axis % 2 else data.T)
  np.testing.assert_array_equal(fp8jax.dequantize(q), values if axis % 2 else values.T)
  assert q.scale.shape == ((48, 3) if axis % 2 else (2, 80))
  assert len(jax.tree.leaves(q)) == 2


E4M3, ONES = fp8jax.Quant(fp8jax.E4M3), np.ones((4, 8), np.float32)
SR = fp8jax.Quant(fp8jax.E4M3, rounding=Rounding.STOCHASTIC)


@pytest.mark.parametrize(
  "x, quant, options, error, message",
  [
    (np.ones((2, 4, 8), np.float32), E4M3, {}, ValueError, r"shape \(2, 4, 8\), expected a matrix"),
    (np.ones((0, 8), np.float32), E4M3, {}, ValueError, r"shape \(0, 8\), expected a matrix with"),
    (ONES, E4M3, {"axis": 2}, ValueError, "axis=2, expected 0 or 1"),
    (ONES, "e4m3", {}, TypeError, "quant is 'e4m3', expected a Quant"),
    (ONES.astype(int), E4M3, {}, TypeError, "x is int64, expected a floating-point"),
    (ONES, E4M3, {"amax": 1.0}, ValueError, "give no amax"),
    (
      ONES, fp8jax.Quant(fp8jax.E4M3, keeps_nonzero=True), {}, ValueError, "storage.*quantized_ten"
    ),
  ],
  ids=str,
)  # fmt: skip
def test_what_quantize_cannot_do_is_refused(x, quant, options, error, message):
  with pytest.raises(error, match=message):
    fp8jax.quantize(x, quant, **options)


@pytest.mark.parametrize("call, words", [
  (lambda: fp8jax.Quant("e4m3"), "format='e4m3', expected a Format"),
  (lambda: fp8jax.quantize(ONES, SR, key=5), "key is 5, expected a random key"),
  (lambda: fp8jax.dot("mk,kn->mn", ONES, ONES.T, "nvfp4_sr_rht", key=5), "key is 5, expected a"),
  *[
    (lambda d=d: fp8jax.dot("mk,kn->mn", ONES, ONES.T, "bf16", out_dtype=d), f"out_dtype is {d}")
    for d in ("int8", "float8_e4m3fn", "bool", "complex64")
  ],
])  # fmt: skip
def test_argument_of_another_type_is_refused(call, words):
  with pytest.raises(TypeError, match=words):
    call()


@pytest.mark.parametrize(
  "wrong", [{"eps": float("nan")}, {"eps": -1.0}, {"eps_root": float("inf")}, {"eps_root": -1e-9}]
)
def test_scale_by_adam_refuses_an_eps_that_no_step_survives(wrong):
  (name,) = wrong
  with pytest.raises(ValueError, match=f"{name} is .*finite and not negative"):
    fp8jax.scale_by_adam(**wrong)


@pytest.mark.parametrize("recipe", ["tensor_current", "rowwise", "block_128", "mxfp8", "nvfp4"])
def test_smallest_normal_numbers_keep_their_precision_and_subnormals_are_jaxs(recipe):
  """amax / 448 is no normal number: the scale is the smallest one, and codes are normal still."""
  plain, ours = jax.jit(jnp.matmul), jax.jit(lambda x, w: fp8jax.dot("mk,kn->mn", x, w, recipe))
  for small, large in ((1.2e-38, 1e38), (2e-38, 3e38), (1e-38, 1e38), (1e-40, 1e30)):
    x, w = np.full((16, 16), small, np.float32), np.full((16, 16), large, np.float32)
    want, got = plain(x, w), ours(x, w)  # 0 of subnormals, on a CPU
    np.testing.assert_allclose(got, want, rtol=2.0**-2 if recipe == "nvfp4" else 2.0**-3)


def test_dequantize_reads_moments_and_refuses_arrays():
  state = fp8jax.scale_by_adam(moment_format="coat").init({"w": jnp.ones((64, 128))})
  assert fp8jax.dequantize(state.mu["w"], jnp.bfloat16).dtype == jnp.bfloat16
  with pytest.raises(TypeError, match="q is a ndarray, expected a ScaledMatrix"):
    fp8jax.dequantize(ONES)
