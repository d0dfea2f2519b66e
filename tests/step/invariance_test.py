"""What must not change a training step, for every recipe: how it is cut up, recomputed or spread.

`python tests/step/invariance_test.py` prints the table recipe x invariance -> largest difference.

A step of a small model is taken in two ways; loss, gradients and what the sites saw are compared.
Recomputation and unrolling change no bit (or the last of a sum). Elsewhere the order of sums
differs, by 1e-7, and rounding to nearest amplifies it: a relative difference d before a quantizer
of relative step s makes d / s of the elements round the other way, by s each, which is sqrt(d s) in
the norm. A few quantizers later the rounding errors are other ones altogether. The budget is
therefore measured: what a change of the weights by 1e-7 does to the same step on one device. That
scales themselves do not depend on the mesh is tested exactly in ops/linear_on_mesh_test.py.

One scale for all tokens, made from them (tensor_current, nvfp4), is another one for every
microbatch and for every chunk of the loss: cut otherwise, the step is another rounding of the same
step by definition of the recipe. Its budget is the recipe's distance to BF16.
"""

import dataclasses
import functools
import json
import pathlib
import zlib

import jax
import numpy as np
import pytest
import tolerances
import variants

from configs import base
from fp8jax import mesh
from fp8jax import params as params_lib
from fp8jax.config import resolve
from fp8jax.data import batch_sharding
from fp8jax.kernels import choose
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.ops.residuals import GemmInput
from fp8jax.recipe import library
from fp8jax.recipe.quant import WHOLE, Scale
from fp8jax.step import train_step

SIZES = dict(
  num_layers=2, hidden_size=128, intermediate_size=256, num_heads=2, num_kv_heads=2, head_dim=128,
  vocab_size=512, max_positions=256, init_std=0.1,
)  # fmt: skip
ROWS, LENGTH = 8, 128
NARROW = [name for name, r in library.RECIPES.items() if r.is_quantized]
# A model of its own: factors instead of scales.
UNIT = "unit_scaling"
UNIT_CHANGES = {
  "precision.rules": (("head", "unit_head"), (".*", UNIT)), "model.unit_scaling": "all",
  "model.residual_tau": 0.36, "model.init_std": 1.0, "model.tie_embeddings": False,
  "optim.grad_clip_norm": 0.0,
}  # fmt: skip
SAVED = [f"{name} saved" for name in ("block_128", "tensor_current", "tensor_delayed")]


@functools.cache
def _spec(recipe, accumulation=1, remat="none", shape=None, rows=ROWS, length=LENGTH):
  c = base.get_config()
  c.model.update(SIZES)
  c.update_from_flattened_dict({
    **(UNIT_CHANGES if recipe == UNIT else variants.changes(recipe)),
    "grad_accum_steps": accumulation, "memory.remat_policy": remat,
    "global_batch": rows, "eval.batch": 8, "seq_len": length, "memory.loss_chunk": 128,
    "mesh.fsdp": 1 if shape is None else shape[1], "mesh.data": 1 if shape is None else shape[0],
    "mesh.tensor": 1 if shape is None else shape[2],
  })  # fmt: skip
  return resolve.resolve(c, 1 if shape is None else 8, choose.current_device(), mesh.make)


@functools.cache
def _batch(rows=ROWS, length=LENGTH):
  """Documents of 128 tokens, one or two to a row: the same tokens however they are packed."""
  rng = np.random.default_rng(zlib.crc32(b"invariance"))
  tokens = rng.integers(0, 256, (ROWS, LENGTH + 1)).astype(np.int32)
  position = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
  document = np.tile(np.arange(1, length // LENGTH + 1, dtype=np.int32)[:, None], (1, LENGTH))
  arrays = {
    "tokens_BL": tokens[:, :-1],
    "targets_BL": tokens[:, 1:],
    "weights_BL": np.ones((ROWS, LENGTH), np.float32),
    "positions_BL": position,
    "segments_BL": np.tile(document.reshape(1, -1), (rows, 1)),
  }
  return {name: x.reshape(rows, length) for name, x in arrays.items()}


@functools.cache
def _params(recipe="bf16"):
  spec = _spec(recipe)
  return jax.tree.map(
    np.asarray, params_lib.init(jax.random.key(1), spec.declaration, spec.model.dims)
  )


@functools.cache
def _memories(recipe):
  """Past amaxes: those of the very step, and a tenth more."""
  sites = _spec(recipe).sites()
  if not scaling_lib.states(sites):
    return {}
  step = _step_fn(_spec(recipe), site_lib.with_current_scales(sites), _batch())
  seen = step(_params())[2]
  return jax.tree.map(lambda x: np.float32(1.1) * x, scaling_lib.calibrated(sites, seen))


def _step_fn(spec, sites, batch):
  """params -> (loss, gradients, {site: what it saw}), on the host."""
  spread = batch_sharding.BatchSharder(spec.run.layout, spec.microbatch, spec.grad_accum_steps)
  placed = spread.place(batch)
  take = jax.jit(lambda params: train_step.gradients(spec, params, sites, placed)[:3])

  def step(params):
    if spec.run.layout.mesh is not None:
      params = jax.device_put(params, params_lib.shardings(spec.declaration, spec.run.layout))
    return jax.device_get(take(params))

  return step


@functools.cache
def _steps(recipe, *, unroll=False, rows=ROWS, length=LENGTH, nudges=0, **how):
  """(loss, {parameter: gradient}, {layer's site: amaxes}), also from weights nudged so often."""
  spec = _spec(recipe, rows=rows, length=length, **how)
  sites = scaling_lib.with_states(spec.sites(), _memories(recipe))
  sites = site_lib.with_keys(sites, jax.random.key(3))
  if unroll:
    sites = _one_by_one(sites)
  step, rng, found = _step_fn(spec, sites, _batch(rows, length)), np.random.default_rng(0), []
  for i in range(1 + nudges):
    size = 1e-7 * bool(i)
    params = jax.tree.map(
      lambda x, size=size: (x * (1 + size * rng.standard_normal(x.shape))).astype(np.float32),
      _params(UNIT if recipe == UNIT else "bf16"),
    )
    loss, gradient, seen = step(params)
    amaxes = {name: x[:, 0] for name, x in site_tree.per_layer(sites, seen).items()}
    found.append((loss, params_lib.flatten(gradient), amaxes))
  return found


def _one_by_one(sites):
  """The same sites with a run of their own for every layer: a loop of Python's."""
  (stacked,) = sites["layers"]

  def of_layer(i):
    def one(site):
      name = f"layers/{i}-{i}/{site.name.removeprefix('layers/')}"
      arrays = jax.tree.map(lambda x: x[i : i + 1], site)
      return dataclasses.replace(arrays, name=name, layers=(i, i + 1))

    return site_lib.tree_map(one, stacked)

  return {**sites, "layers": tuple(of_layer(i) for i in range(SIZES["num_layers"]))}


INVARIANCES = {
  "accumulation 4x2": dict(accumulation=4),
  "accumulation 8x1": dict(accumulation=8),
  "remat linears": dict(remat="linears"),
  "remat operands": dict(remat="operands"),
  "remat full": dict(remat="full"),
  "unrolled": dict(unroll=True),
  "mesh 8x1x1": dict(shape=(8, 1, 1)),
  "mesh 2x2x2": dict(shape=(2, 2, 2)),
  "packed": dict(rows=4, length=256),
}


def _rows_are_independent(recipe) -> bool:
  """Whether every scale is of tokens that lie in one microbatch, however it is cut."""
  r = _recipe(recipe)
  quants = [(r.fwd.lhs, 0), (r.dgrad.lhs, 0), (r.wgrad.lhs, 1), (r.wgrad.rhs, 1)]
  return not r.is_stateful and all(
    q is None or (q.tile[axis] != WHOLE and q.scale is not Scale.E4M3_OVER_F32)
    for q, axis in quants
  )


def _recipe(name):
  return library.RECIPES[variants.split(name)[0]]


def _is_kept_laid_out(recipe) -> bool:
  """Whether the residual of x is a transposed copy, which XLA makes only if it is saved."""
  is_saved = variants.split(recipe)[1] is GemmInput.WGRAD_OPERAND
  return is_saved and _recipe(recipe).wgrad.lhs.tile == (WHOLE, WHOLE)


def _difference(one, other):
  """Relative: of the loss, of the worst parameter's gradient by norm, of the worst amax."""
  (loss, gradient, amaxes), (want_loss, want_gradient, want_amaxes) = one, other
  return np.array([
    abs(loss - want_loss) / abs(want_loss),
    max(np.linalg.norm(gradient[k] - w) / np.linalg.norm(w) for k, w in want_gradient.items()),
    max(np.max(np.abs(amaxes[k] - w) / np.maximum(w, 1e-30)) for k, w in want_amaxes.items()),
  ])  # fmt: skip


NUDGES = 3


@functools.cache
def _noise(recipe):
  """The largest difference that weights nudged by 1e-7 make."""
  first, *nudged = _steps(recipe, nudges=NUDGES)
  return np.max([_difference(n, first) for n in nudged], axis=0)


@functools.cache
def _error(recipe):
  """How far two roundings of a step may be apart that are each as far from BF16 as this recipe."""
  return 2 * _difference(_steps(recipe, nudges=NUDGES)[0], _steps("bf16", nudges=NUDGES)[0])


def difference(recipe, invariance):
  """(relative differences of loss, gradients, amaxes; their budgets)."""
  (taken,) = _steps(recipe, **INVARIANCES[invariance])
  found = _difference(taken, _steps(recipe, nudges=NUDGES)[0])
  if invariance.startswith(("remat", "unrolled")):
    return found, np.array(tolerances.KEPT_LAID_OUT if _is_kept_laid_out(recipe) else (0, 0, 0))
  # A device's share of the rows is another matrix shape, whose products sum in another order.
  if _rows_are_independent(recipe) and not invariance.startswith("mesh"):
    return found, np.array(tolerances.SAME_SCALES)
  budget = tolerances.NOISE * _noise(recipe)
  if not (_recipe(recipe).is_stateful or invariance.startswith("mesh")):
    budget = np.maximum(budget, _error(recipe))
  # Where a recipe is coarse that is more than all of the gradient.
  return found, np.minimum(budget, tolerances.CHAOTIC)


# The rest, which compiles for half an hour, under the marker `slow`.
QUICK = {
  "block_128 saved": ("mesh 2x2x2",),
}
# Refused: "operands" saves the quantized inputs alone, and "linears" none of them.
REFUSED = {*((r, "remat operands") for r in NARROW), *((r, "remat linears") for r in SAVED)}
CASES = [
  pytest.param(r, i, marks=[] if i in QUICK.get(r, ()) else [pytest.mark.slow])
  for r in (*NARROW, *SAVED)
  for i in INVARIANCES
  if (r, i) not in REFUSED
]


@pytest.mark.parametrize("recipe, invariance", CASES)
def test_step_is_the_same_however_it_is_taken(recipe, invariance):
  found, budget = difference(recipe, invariance)
  assert np.all(found <= budget), (found, budget)


@pytest.mark.parametrize("factor", [0, -1, 2], ids=["nothing", "its opposite", "its double"])
def test_no_budget_is_as_large_as_a_gradient(factor):
  """What is left of each budget is less than one parameter's gradient gone wrong would take."""
  loss, gradient, amaxes = step = _steps("block_128 saved", nudges=NUDGES)[0]
  name = min(gradient, key=lambda k: np.linalg.norm(gradient[k]))
  found = _difference((loss, gradient | {name: factor * gradient[name]}, amaxes), step)
  assert found[1] > tolerances.CHAOTIC[1]


def summary(recipe) -> dict:
  """The step in a few numbers: see golden/write_step.py."""
  loss, gradient, amaxes = _steps(recipe, nudges=NUDGES)[0]
  return {
    "loss": float(loss),
    "gradient_norms": {k: float(np.linalg.norm(g)) for k, g in sorted(gradient.items())},
    "amaxes": {k: [float(x) for x in a] for k, a in sorted(amaxes.items())},
  }


GOLDEN = [
  pytest.param(r, marks=[] if r in QUICK else [pytest.mark.slow])
  for r in ["bf16", *NARROW, UNIT, "block_128 saved"]
]


@pytest.mark.parametrize("recipe", GOLDEN)
def test_step_is_the_golden_one(recipe):
  """Another machine sums in another order: the budget is that of weights nudged by 1e-7.

  Too much to tell one recipe from another; recipe/golden_products_test.py does that.
  """
  path = pathlib.Path(__file__).parents[1] / "golden" / "step.json"
  want, got = json.loads(path.read_text())["steps"]["recipes"], summary(recipe)
  want = want[variants.split(recipe)[0]]
  budget = tolerances.NOISE * _noise(recipe) + tolerances.FLOAT32_SUM
  loss, gradient, amax = np.minimum(budget, tolerances.CHAOTIC).tolist()
  gradient = min(gradient, tolerances.CHAOTIC_NORM)
  assert got["loss"] == pytest.approx(want["loss"], rel=loss)
  for name, norm in want["gradient_norms"].items():
    assert got["gradient_norms"][name] == pytest.approx(norm, rel=gradient), name
  for name, amaxes in want["amaxes"].items():
    assert got["amaxes"][name] == pytest.approx(amaxes, rel=amax), name


def main():
  print("| recipe | 1e-7 nudge | " + " | ".join(INVARIANCES) + " |")
  print("|---|---|" + "---|" * len(INVARIANCES))
  for recipe in (*NARROW, *SAVED):
    cells = [_cell(_noise(recipe))]
    for invariance in INVARIANCES:
      found, budget = difference(recipe, invariance)
      cells.append(_cell(found) + " FAILS" * bool(np.any(found > budget)))
    print(f"| {recipe} | " + " | ".join(cells) + " |", flush=True)


def _cell(found) -> str:
  """Differences of loss and gradients, "=" where there is none at all."""
  return " / ".join(f"{x:.0e}" for x in found[:2]) if found.any() else "="


if __name__ == "__main__":
  main()
