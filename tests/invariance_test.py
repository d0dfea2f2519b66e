"""What must not change a training step, for every recipe: how it is cut up, recomputed or spread.

`python tests/invariance_test.py` prints the table recipe x invariance -> largest difference.

A step of a small model is taken in two ways; loss, gradients and what the sites saw are compared.
Summation order differs between the two, by 1e-7, and flips a few elements that lie at a rounding
boundary: hence budgets, and differences of gradients measured by norm. Where scales are chosen from
whole tensors, a microbatch is another tensor than the batch: those differ as formats allow.
"""

import dataclasses
import functools
import zlib

import jax
import numpy as np
import pytest
import tolerances

from configs import base
from fp8jax import batches, config, mesh, recipes
from fp8jax import params as params_lib
from fp8jax import step as step_lib
from fp8jax.kernels import backend
from fp8jax.ops import site as site_lib
from fp8jax.recipe import CURRENT, WHOLE

SIZES = dict(
  num_layers=2, hidden_size=128, intermediate_size=256, num_heads=2, num_kv_heads=2, head_dim=128,
  vocab_size=512, max_positions=256, init_std=0.1,
)  # fmt: skip
ROWS, LENGTH = 8, 128
NARROW = [name for name, r in recipes.RECIPES.items() if r.is_narrow]


@functools.cache
def _plan(recipe, accumulation=1, remat="none", shape=None, rows=ROWS, length=LENGTH):
  c = base.get_config()
  c.model.update(SIZES)
  c.update_from_flattened_dict({
    "precision.rules": ((".*", recipe),), "accumulation": accumulation, "memory.remat": remat,
    "batch": rows, "eval.batch": 8, "length": length, "memory.loss_chunk": 64,
    "mesh.fsdp": 1 if shape is None else shape[1], "mesh.data": 1 if shape is None else shape[0],
    "mesh.tensor": 1 if shape is None else shape[2],
  })  # fmt: skip
  if recipes.RECIPES[recipe].is_stateful:
    c.loss_scale.kind = "none"
  return config.resolve(c, 1 if shape is None else 8, backend.current_device(), mesh.make)


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
def _params():
  plan = _plan("bf16")
  return jax.tree.map(
    np.asarray, params_lib.init(jax.random.key(1), plan.declaration, plan.model.dims)
  )


@functools.cache
def _memories(recipe):
  """Past amaxes: those of the very step, a little too small and too large here and there."""
  plan = _plan(recipe)
  sites = plan.sites()
  if not site_lib.memories(sites):
    return {}
  _, _, seen = _gradients(plan, site_lib.with_current_scales(sites), _batch())
  return jax.tree.map(lambda x: np.float32(1.1) * x, site_lib.calibrated(sites, seen))


def _gradients(plan, sites, batch):
  spread = batches.Spread(plan.run.layout, plan.microbatch, plan.config.accumulation)
  shardings = params_lib.shardings(plan.declaration, plan.run.layout)
  params = _params()
  if plan.run.layout.mesh is not None:
    params = jax.device_put(params, shardings)
  take = jax.jit(lambda params, batch: step_lib.gradients(plan, params, sites, batch))
  return jax.device_get(take(params, spread.place(batch)))


@functools.cache
def _step(recipe, *, unroll=False, rows=ROWS, length=LENGTH, **how):
  """(loss, {parameter: gradient}, {layer's site: amaxes})."""
  plan = _plan(recipe, rows=rows, length=length, **how)
  sites = site_lib.with_memories(plan.sites(), _memories(recipe))
  sites = site_lib.with_keys(sites, jax.random.key(3))
  if unroll:
    sites = _one_by_one(sites)
  loss, gradient, seen = _gradients(plan, sites, _batch(rows, length))
  amaxes = {name: x[:, 0] for name, x in site_lib.per_layer(sites, seen).items()}
  return loss, params_lib.flatten(gradient), amaxes


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
  "remat quantized": dict(remat="quantized"),
  "remat full": dict(remat="full"),
  "unrolled": dict(unroll=True),
  "mesh 8x1x1": dict(shape=(8, 1, 1)),
  "mesh 2x2x2": dict(shape=(2, 2, 2)),
  "packed": dict(rows=4, length=256),
}


def _depends_on_microbatch(recipe) -> bool:
  """Whether some current scale is chosen over all tokens of a product."""
  r = recipes.RECIPES[recipe]
  quants = [(r.fwd.lhs, 0), (r.dgrad.lhs, 0), (r.wgrad.lhs, 1), (r.wgrad.rhs, 1)]
  two_level = any(q and q.scale.value == "e4m3_over_f32" for q, _ in quants)
  return two_level or any(q and q.tile[axis] == WHOLE and q.source == CURRENT for q, axis in quants)


def difference(recipe, invariance):
  """(relative differences of loss, gradients (worst parameter), amaxes; their budgets)."""
  how = INVARIANCES[invariance]
  loss, gradient, amaxes = _step(recipe, **how)
  want_loss, want_gradient, want_amaxes = _step(recipe)
  found = (
    abs(loss - want_loss) / abs(want_loss),
    max(
      np.linalg.norm(gradient[k] - w) / np.linalg.norm(w) for k, w in want_gradient.items()
    ),
    max(np.max(np.abs(amaxes[k] - w) / w) for k, w in want_amaxes.items()),
  )  # fmt: skip
  kind = "same scales"
  if recipes.RECIPES[recipe].is_random and ("mesh" in invariance or "packed" in invariance):
    kind = "other random bits"
  elif recipes.RECIPES[recipe].is_random and "accumulation" in invariance:
    kind = "other random bits"
  elif "accumulation" in invariance and _depends_on_microbatch(recipe):
    kind = "scales of the microbatch"
  return found, tolerances.INVARIANCE[kind], kind


@pytest.mark.parametrize("recipe", NARROW)
@pytest.mark.parametrize("invariance", INVARIANCES)
def test_step_is_the_same_however_it_is_taken(recipe, invariance):
  found, budget, _ = difference(recipe, invariance)
  assert all(f <= b for f, b in zip(found, budget)), (found, budget)


def main():
  print("| recipe | " + " | ".join(INVARIANCES) + " |")
  print("|---|" + "---|" * len(INVARIANCES))
  for recipe in NARROW:
    cells = []
    for invariance in INVARIANCES:
      (loss, gradient, _), _, kind = difference(recipe, invariance)
      mark = {"same scales": "", "scales of the microbatch": " (m)", "other random bits": " (r)"}
      cells.append(f"{loss:.0e} / {gradient:.0e}{mark[kind]}")
    print(f"| {recipe} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
  main()
