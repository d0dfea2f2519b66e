"""The dot and the loss on eight devices: what they compute and what they move."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
import variants
from lattice import lattice

from fp8jax import axes, mesh
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
from fp8jax.kernels.gemm import reference
from fp8jax.kernels.quantize import mosaic_sm90 as quantize_sm90
from fp8jax.models import mixer
from fp8jax.ops import gemm_spec, products, stored_params, weight_operands
from fp8jax.ops import operands as operands_lib
from fp8jax.ops import site as site_lib
from fp8jax.ops.cross_entropy import cross_entropy
from fp8jax.ops.dots import dot, dots
from fp8jax.ops.site import ScalingInputs
from fp8jax.quantization import quantize, scaled_matrix, tensor_stats
from fp8jax.recipe import library, rules

WEIGHTS = axes.as_rules(dict(D="fsdp", F="tensor", H="tensor", V="tensor"))
ACTS = axes.as_rules(dict(B=("data", "fsdp"), F="tensor", H="tensor", V="tensor"))
MESHES = [(8, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2)]
EQUATIONS = [
  ("BLD,DF->BLF", dict(B=8, L=128, D=1024, F=512)),  # column parallel
  ("BLF,FD->BLD", dict(B=8, L=128, F=512, D=1024)),  # row parallel: partial sums
  ("BLHK,HKD->BLD", dict(B=8, L=128, H=4, K=128, D=1024)),
]


def _layout(shape):
  return axes.Layout(mesh.make(shape), WEIGHTS, ACTS)


def _site(recipe, layout):
  return dataclasses.replace(variants.single(recipe), layout=layout)


def _place(x, letters, spec, layout):
  return jax.device_put(x, jax.NamedSharding(layout.mesh, spec(letters)))


def _run(eqn, x, w, g, site):
  """(output, gradients of x, w and the tap), and what lowers the program."""
  xs, ws, ys = eqn.replace("->", ",").split(",")
  layout = site.layout
  if layout.mesh is not None:
    x, g = _place(x, xs, layout.act_spec, layout), _place(g, ys, layout.act_spec, layout)
    w = _place(w, ws, layout.weight_spec, layout)

  @jax.jit
  def run(x, w, g, tap):
    def product(x, w, tap):
      return dot(eqn, x, w, dataclasses.replace(site, tap=tap))

    y, pull = jax.vjp(product, x, w, tap)
    return y, *pull(g)

  arguments = (x, w, g, site.tap)
  return run(*arguments), functools.partial(run.lower, *arguments)


def _exact(eqn, x, w, g):
  """What `_run` gives of lattices whose every product and sum float32 holds, by NumPy."""
  xs, ws, ys = eqn.replace("->", ",").split(",")
  einsum = functools.partial(np.einsum, optimize=True)
  gradients = einsum(f"{ys},{ws}->{xs}", g, w), einsum(f"{xs},{ys}->{ws}", x, g)
  return einsum(eqn, x, w), *gradients, np.array([[np.abs(t).max()] for t in (x, w, g)])


# One recipe on fully sharded weights; one of every kind of tile and of residual on the mesh that
# splits all axes; the others under the marker `slow`.
QUICK = [("block_128", shape) for shape in ((1, 8, 1), (2, 2, 2))]
QUICK += [(recipe, (2, 2, 2)) for recipe in ("tensor_current", "block_128 saved")]
ALL = [
  pytest.param(recipe, shape, marks=[pytest.mark.slow] * ((recipe, shape) not in QUICK))
  for recipe in (*library.RECIPES, "block_128 saved", "tensor_current saved")
  for shape in MESHES
]


# The mesh that splits all axes; the others under the marker `slow`.
SOME_MESHES = [
  pytest.param(shape, marks=[pytest.mark.slow] * (shape != (2, 2, 2))) for shape in MESHES
]

# A product per mesh and per form of the residual, all products on the mesh that splits all axes.
LATTICE = [
  pytest.param(eqn, sizes, *case.values, id=f"{eqn}-{'-'.join(map(str, case.values))}",
               marks=[*case.marks, *[pytest.mark.slow] * other])
  for i, (eqn, sizes) in enumerate(EQUATIONS)
  for j, case in enumerate(ALL)
  for other in [(i + j) % 3 > 0 and ("saved" in case.values[0] or case.values[1] != (2, 2, 2))]
]  # fmt: skip


@pytest.mark.parametrize("eqn, sizes, recipe, shape", LATTICE)
def test_dot_on_a_mesh_is_exact_on_lattice_inputs(rng, eqn, sizes, shape, recipe):
  fmt = "e2m1" if "fp4" in recipe else "e4m3"
  operands = [
    lattice(rng, *(sizes[c] for c in t), fmt=fmt) for t in eqn.replace("->", ",").split(",")
  ]
  (y, dx, dw, seen), _ = _run(eqn, *operands, _site(recipe, _layout(shape)))
  is_plain = recipe in {name for name, _ in QUICK}
  want = _exact(eqn, *operands) if is_plain else _run(eqn, *operands, variants.single(recipe))[0]
  rotated = recipe == "nvfp4_sr_rht"  # a rotated lattice is none, and random bits differ by device
  pairs = [(y, want[0]), (dx, want[1]), (seen, want[3])] + [(dw, want[2])] * (not rotated)
  # Heads come in fours: their lattice plants no largest element in some tiles of 16 tokens.
  atol = tolerances.FLOAT32_SUM if "fp4" in recipe and "H" in sizes else 0
  for got, exact in pairs:
    np.testing.assert_allclose(got, exact, rtol=0, atol=atol * np.abs(exact).max())


def _by_kernels(rng, eqn, shape, recipe):
  """Results of the three products of the Hopper backend on a mesh, and what they should be."""
  sizes = dict(B=8, L=64, D=256, F=512)
  xs, ws, ys = eqn.replace("->", ",").split(",")
  x, w, g = (lattice(rng, *(sizes[c] for c in t)) for t in (xs, ws, ys))
  want = _exact(eqn, x, w, g)
  layout = _layout(shape)
  site = dataclasses.replace(_site(recipe, layout), backends=("mosaic_sm90",) * 3)
  spec, inputs = gemm_spec.make_spec(eqn, x, w, site), ScalingInputs.of(site)
  x, g = _place(x, xs, layout.act_spec, layout), _place(g, ys, layout.act_spec, layout)
  w = _place(w, ws, layout.weight_spec, layout)
  got = [
    jax.jit(lambda x, w: products.forward(spec, x, w, inputs)[0])(x, w),
    jax.jit(lambda g, w: products.data_gradient(spec, g, w, inputs)[0])(g, w),
    jax.jit(lambda x, g: products.weight_gradient(spec, x, g, jnp.float32, inputs))(x, g),
  ]
  return got, want


@pytest.mark.slow  # the interpreter may run out of threads, and then waits for ever
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_hopper_kernel_on_a_mesh_is_exact(rng, interpreted_on_mesh, shape):
  """Data, fsdp and tensor parallel, the kernel interpreted on each device."""
  for one, exact in zip(*_by_kernels(rng, EQUATIONS[0][0], shape, "block_128")):
    np.testing.assert_array_equal(one, exact)


def _quantize_matrix(x, quants, amax=None, over=(), watched=False):
  """The quantizer of Hopper in plain JAX."""
  x = scaled_matrix.taken(x)
  make = functools.partial(quantize.quantize, amax_axes=(over, ()))
  made = {axis: make(x, quant, contraction=axis) for axis, quant in quants.items()}
  return made, tensor_stats.amax(x) if watched else None


# Each equation once and each form of the residual once; the other pairs are slow.
@pytest.mark.parametrize("eqn, recipe", [
  pytest.param(eqn, recipe, marks=[pytest.mark.slow] * (i != j))
  for i, (eqn, _) in enumerate(EQUATIONS[:2])
  for j, recipe in enumerate(("block_128", "block_128 saved"))
])  # fmt: skip
@pytest.mark.parametrize(
  "shape", [(2, 2, 2), pytest.param((1, 2, 4), marks=pytest.mark.slow)], ids=str
)
def test_operands_of_hopper_kernels_lie_right_on_a_mesh(rng, monkeypatch, eqn, shape, recipe):
  """What surrounds the kernels: the same layouts, operands made ahead, plain JAX in their place."""
  shards = []

  def multiply(a, b, accumulate, out_dtype, spare):
    gemm, device = library.RECIPES[variants.split(recipe)[0]].fwd, choose.Device("gpu", 90)
    problem = choose.GemmProblem(a.shape[0], b.shape[0], a.shape[1], gemm, device)
    assert mosaic_sm90_lib.supports(problem) is None and spare == 0
    shards.append(b.is_sharded)
    return reference.scaled_matmul(a, b.in_one_piece(), accumulate, out_dtype)

  monkeypatch.setattr(quantize_sm90, "quantize_matrix", _quantize_matrix)
  monkeypatch.setattr(mosaic_sm90_lib, "scaled_matmul", multiply)
  for one, exact in zip(*_by_kernels(rng, eqn, shape, recipe)):
    np.testing.assert_array_equal(one, exact)
  # D is split and contracted once: forward here, in the data gradient there.
  assert shards == [eqn.startswith("BLD"), not eqn.startswith("BLD"), False]
  # And all of it in one program, x and g read once.
  sizes = dict(B=8, L=64, D=256, F=512)
  operands = [lattice(rng, *(sizes[c] for c in t)) for t in eqn.replace("->", ",").split(",")]
  site = dataclasses.replace(_site(recipe, _layout(shape)), backends=("mosaic_sm90",) * 3)
  got, _ = _run(eqn, *operands, site)
  for one, exact in zip(got, _exact(eqn, *operands)):
    np.testing.assert_array_equal(one, exact)


@pytest.mark.parametrize("shape", SOME_MESHES, ids=str)
def test_dot_on_a_mesh_scales_like_one_device(rng, shape):
  """Magnitudes that differ by shard: a scale taken from a shard alone would differ visibly."""
  eqn, sizes = EQUATIONS[0]
  x, w, g = (rng.standard_normal([sizes[c] for c in t]) for t in ("BLD", "DF", "BLF"))
  x *= np.exp(np.arange(8))[:, None, None]
  w *= np.exp(np.arange(1024) / 200)[:, None]
  operands = [t.astype(np.float32) for t in (x, w, g)]
  for recipe in ("tensor_current", "block_128"):
    got, _ = _run(eqn, *operands, _site(recipe, _layout(shape)))
    want, _ = _run(eqn, *operands, variants.single(recipe))
    for a, b in zip(got[:3], want[:3]):
      np.testing.assert_allclose(a, b, rtol=0, atol=tolerances.FLOAT32_SUM * np.abs(b).max())


@pytest.mark.parametrize(
  "recipe", [pytest.param("tensor_current", marks=pytest.mark.slow), "tensor_current saved"]
)
@pytest.mark.parametrize(
  "shape", [(2, 2, 2), pytest.param((1, 2, 4), marks=pytest.mark.slow)], ids=str
)
def test_one_scale_made_ahead_is_that_of_all_devices(rng, monkeypatch, shape, recipe):
  """The operands of XLA's dot by the Hopper quantizer, plain JAX in its place."""
  calls = []

  def quantize_matrix(x, quants, amax=None, over=(), watched=False):
    calls.append(tuple(quants))
    made = {}
    for axis, quant in quants.items():
      scale = quantize_sm90._tensor_scale(x, quant, amax, over).reshape(1, 1)
      data = quantize.cast(x.astype(np.float32) * (1 / scale), quant.format)
      made[axis] = scaled_matrix.ScaledMatrix(data if axis == 1 else data.T, scale, quant.tile)
    return made, tensor_stats.amax(x) if watched else None

  monkeypatch.setattr(quantize_sm90, "quantize_matrix", quantize_matrix)
  eqn, sizes = EQUATIONS[0]
  x, w, g = (rng.standard_normal([sizes[c] for c in t]) for t in eqn.replace("->", ",").split(","))
  x *= np.exp(np.arange(sizes["B"]))[:, None, None]
  g *= np.exp(np.arange(sizes["F"]) / 200)
  operands = [t.astype(np.float32) for t in (x, w, g)]
  site = dataclasses.replace(_site(recipe, _layout(shape)), backends=("xla_sm90",) * 3)
  got, _ = _run(eqn, *operands, site)
  assert (1, 0) in calls  # both operands of a tensor from one reading
  want, _ = _run(eqn, *operands, variants.single(recipe))
  for a, b in zip(got[:3], want[:3]):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerances.FLOAT32_SUM * np.abs(b).max())
  np.testing.assert_array_equal(got[3], want[3])


def test_dot_gradient_of_a_weight_lies_where_the_weight_lies(rng):
  eqn, sizes = EQUATIONS[0]
  layout = _layout((2, 2, 2))
  operands = [lattice(rng, *(sizes[c] for c in t)) for t in ("BLD", "DF", "BLF")]
  (_, _, dw, _), _ = _run(eqn, *operands, _site("block_128", layout))
  assert dw.sharding.is_equivalent_to(jax.NamedSharding(layout.mesh, layout.weight_spec("DF")), 2)


def _gathered(lower) -> set[str]:
  """dtypes of the matrices (not scales) that all-gathers of the compiled program move."""
  text = lower().compile().as_text()
  return {
    m[1] for m in re.finditer(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", text)
    if np.prod([int(n) for n in m[2].split(",")]) > 8192
  }  # fmt: skip


def test_weights_cross_the_wire_narrow_where_tiles_are_whole(rng):
  layout = _layout((1, 8, 1))
  make = lambda n: [lattice(rng, 8, 128, n), lattice(rng, n, 512), lattice(rng, 8, 128, 512)]  # noqa: E731
  aligned = _run("BLD,DF->BLF", *make(1024), _site("block_128", layout))[1]
  assert _gathered(aligned) == {"u8"}
  # 576 / 8 = 72 rows hold no whole tile: the master is gathered, and the result stays exact.
  operands = make(576)
  straddling = _run("BLD,DF->BLF", *operands, _site("block_128", layout))
  assert _gathered(straddling[1]) == {"f32"}
  for a, b in zip(straddling[0], _exact("BLD,DF->BLF", *operands)):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", SOME_MESHES, ids=str)
@pytest.mark.parametrize("eqn, sizes", EQUATIONS[:2])
def test_a_data_gradient_is_added_to_another_on_a_mesh(rng, monkeypatch, eqn, sizes, shape):
  """By a backend that adds, where nothing is summed over devices afterwards; else outside of it."""
  asked = []

  def adding(a, b, *, add_to=None, backend, spare=0, **how):
    made = reference.scaled_matmul(a, b, how["accumulate"], jnp.float32)
    asked.append(add_to is not None)
    return (made if add_to is None else made + add_to).astype(how["out_dtype"])

  monkeypatch.setattr(gemm_api, "scaled_matmul", adding)
  monkeypatch.setattr(gemm_api, "adds", lambda *_: True)
  letters = eqn.replace("->", ",").split(",")
  x, w, g = (lattice(rng, *(sizes[c] for c in t)) for t in letters)
  layout = _layout(shape)
  site = dataclasses.replace(_site("block_128", layout), backends=("reference",) * 3)
  x, g = (
    _place(x, letters[0], layout.act_spec, layout),
    _place(g, letters[2], layout.act_spec, layout),
  )
  w = _place(w, letters[1], layout.weight_spec, layout)

  def run(x, w):
    sites = [dataclasses.replace(site, name=str(n)) for n in range(2)]
    return jax.vjp(lambda x: dots((eqn,) * 2, x, (w, w), sites), x)[1]((g, g))[0]

  dx = jax.jit(run)(x, w)
  np.testing.assert_array_equal(dx, 2 * _exact(eqn, *map(np.asarray, (x, w, g)))[1])
  produced = letters[2].replace("B", "").replace("L", "")[0]
  is_split = layout.size(layout.act_axes(produced)) > 1
  assert any(asked) == (not is_split)


def test_a_layer_of_a_stack_reaches_its_product_on_a_mesh(rng, monkeypatch):
  """Operands that a step made once: a backend that reads layers gets the stack and the number."""
  asked = []

  def reading(a, b, *, add_to=None, backend, spare=0, **how):
    asked.append(isinstance(b, scaled_matrix.Entry) and b.stack.data.ndim)
    return reference.scaled_matmul(a, b.take(), how["accumulate"], how["out_dtype"])

  monkeypatch.setattr(gemm_api, "scaled_matmul", reading)
  monkeypatch.setattr(gemm_api, "WITH_LAYERS", ("reference",))
  eqn, sizes = EQUATIONS[1]
  letters, layout = eqn.replace("->", ",").split(","), _layout((2, 2, 2))
  x, w, g = (lattice(rng, *(sizes[c] for c in t)) for t in letters)
  site = dataclasses.replace(_site("block_128", layout), backends=("reference",) * 3)
  spec, inputs = gemm_spec.make_spec(eqn, x, w, site), ScalingInputs.of(site)
  made = [operands_lib.quantize_now(spec, role, _place(w, letters[1], layout.weight_spec, layout),
                                    inputs) for role in weight_operands.ROLES]  # fmt: skip
  stacks = [jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), x]), one) for one in made]
  entries = [scaled_matrix.Entry(stack, jnp.int32(1)) for stack in stacks]
  stored = stored_params.WeightOperands(*entries, jnp.zeros(1), w.shape)
  y = jax.jit(lambda x, w: products.forward(spec, x, w, inputs)[0])(
    _place(x, letters[0], layout.act_spec, layout), stored
  )
  dx = jax.jit(lambda g, w: products.data_gradient(spec, g, w, inputs)[0])(
    _place(g, letters[2], layout.act_spec, layout), stored
  )
  want = _exact(eqn, x, w, g)
  np.testing.assert_array_equal(y, want[0])
  np.testing.assert_array_equal(dx, want[1])
  assert asked == [3, 3]


@pytest.mark.parametrize(
  "eqn", [EQUATIONS[2][0], pytest.param(EQUATIONS[0][0], marks=pytest.mark.slow)]
)
def test_operands_of_a_step_come_from_one_reading_of_a_shard(rng, monkeypatch, eqn):
  """Both orientations and the amax, gathered: those of one device. A shard of half a tile: not."""
  readings = []

  def reading(x, quants, *how, **more):
    readings.append(sorted(quants))
    return _quantize_matrix(x, quants, *how, **more)

  monkeypatch.setattr(quantize_sm90, "quantize_matrix", reading)
  letters = eqn.replace("->", ",").split(",")[1]
  declared, tokens = [mixer.GemmSite("w", eqn, "x")], {"B": 8, "L": 64}
  for width, want in ((512, [[0, 1]]), (128, [[0], [1]])):  # in four shards along fsdp
    sizes, found = dict(D=width, F=256, H=4, K=64), []
    w = rng.standard_normal((3, *(sizes[c] for c in letters)), np.float32)
    w[2].flat[-1] = -9
    for layout, backend in ((axes.LOCAL, "reference"), (_layout((1, 4, 2)), "mosaic_sm90")):
      site = site_lib.fresh(library.RECIPES["block_128"], "w", (0, 3), backends=(backend,) * 3)
      site = dataclasses.replace(site, layout=layout)
      rest = jax.sharding.PartitionSpec(None, *layout.weight_spec(letters))
      stack = jax.device_put(w, jax.NamedSharding(layout.mesh, rest)) if layout.mesh else w
      make = functools.partial(weight_operands.of_block, declared, tokens=tokens, dtype=jnp.float32)
      found.append(jax.device_get(jax.jit(make)({"w": stack}, {"w": site})["w"]))
    jax.tree.map(np.testing.assert_array_equal, *found)
    np.testing.assert_array_equal(found[1].stats[:, 0], np.abs(w).reshape(3, -1).max(1))
    assert sorted(readings) == want
    readings.clear()


@pytest.mark.parametrize(
  "recipe", ["halo_int8_2", pytest.param("halo_fp6_1", marks=pytest.mark.slow)]
)
def test_rotated_weights_cross_the_wire_narrow(rng, recipe):
  """HALO's gather (arXiv:2501.02625): shards are rotated in blocks of 64, quantized, gathered."""
  eqn, sizes = EQUATIONS[0]
  operands = [
    rng.standard_normal([sizes[c] for c in t]).astype(np.float32)
    for t in eqn.replace("->", ",").split(",")
  ]
  site = variants.single(rules.recipe_by_name(recipe))
  on_mesh = dataclasses.replace(site, layout=_layout((1, 8, 1)))
  (y, dx, _, seen), lower = _run(eqn, *operands, on_mesh)
  assert _gathered(lower) == {"u8"}
  want = _run(eqn, *operands, site)[0]
  for got, exact in ((y, want[0]), (dx, want[1]), (seen, want[3])):
    np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize("shape", SOME_MESHES, ids=str)
@pytest.mark.parametrize("eqn", ["BLD,DV->BLV", "BLD,VD->BLV"])
def test_cross_entropy_on_a_mesh_equals_one_device(rng, eqn, shape):
  batch, length, width, vocabulary = 8, 40, 64, 128
  layout = _layout(shape)
  h = rng.standard_normal((batch, length, width)).astype(np.float32)
  letters = eqn.split(",")[1].partition("->")[0]
  head = rng.standard_normal([{"D": width, "V": vocabulary}[c] for c in letters]).astype(np.float32)
  targets = rng.integers(0, vocabulary, (batch, length)).astype(np.int32)
  weights = rng.random((batch, length)).astype(np.float32)

  def run(site, h, head, targets, weights):
    def loss(h, head, site):
      return cross_entropy(h, head, eqn, targets, weights, site, chunk=16)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(h, head, site)

  want = run(site_lib.single("bf16"), *map(jnp.asarray, (h, head, targets, weights)))
  got = run(
    _site("bf16", layout),
    _place(h, "BLD", layout.act_spec, layout),
    _place(head, letters, layout.weight_spec, layout),
    _place(targets, "BL", layout.act_spec, layout),
    _place(weights, "BL", layout.act_spec, layout),
  )
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
  for a, b in zip(got[1][:2], want[1][:2]):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerances.FLOAT32_SUM * np.abs(b).max())
  np.testing.assert_allclose(got[1][2].tap, want[1][2].tap, rtol=1e-6)
  assert got[1][1].sharding.is_equivalent_to(
    jax.NamedSharding(layout.mesh, layout.weight_spec(letters)), 2
  )
