"""Statistics of every parameter beside float64 NumPy norms of gradients that jax.grad computes."""

import dataclasses

import harness
import jax
import numpy as np
import pytest

from configs import base
from fp8jax import params as params_lib
from fp8jax.config import resolve
from fp8jax.errors import ConfigError
from fp8jax.models import transformer
from fp8jax.ops import stored_params
from fp8jax.optim import param_stats, update
from fp8jax.params import Param
from fp8jax.quantization import tensor_stats
from fp8jax.step import train_step

ON = {"log.param_stats": "params", "log.tensor_stats_every": 1}
GROUPS = {"optim.clip_groups": (("layers/1/mlp/.*", 0.5),), "optim.grad_clip_norm": 0.0,
          "optim.lr_multipliers": ((".*/mlp/(up|down)", 0.5),)}  # fmt: skip


def config(**changes):
  c = base.get_config("bf16")
  c.global_batch, c.seq_len = 4, 32
  c.model.update(num_layers=2, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=2,
                 head_dim=16, vocab_size=320)  # fmt: skip
  c.update_from_flattened_dict({
    "optim.schedule": "constant", "optim.warmup_steps": 0, "optim.peak_lr": 0.01, **ON, **changes
  })  # fmt: skip
  return c


def per_layer(tree, declaration):
  """{"layers/1/mlp/up" or "embed": float64 array} of trained parameters."""
  flat, found = params_lib.flatten(tree), {}
  for path, p in params_lib.flatten(declaration).items():
    if not p.trainable:
      continue
    x = np.asarray(jax.device_get(stored_params.dequantize_tree(flat[path])), np.float64)
    if p.letters.startswith("N"):
      found |= {path.replace("layers/", f"layers/{i}/"): x[i] for i in range(len(x))}
    else:
      found[path] = x
  return found


def batch_of(spec, seed=0):
  rng = np.random.default_rng(seed)
  shape = (spec.global_batch, spec.data.seq_len)
  ids = rng.integers(0, spec.model.vocab_size, (2, *shape)).astype(np.int32)
  weights = (rng.random(shape) < np.linspace(0.9, 0.3, shape[0])[:, None]).astype(np.float32)
  places = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
  return {"tokens_BL": ids[0], "targets_BL": ids[1], "weights_BL": weights,
          "segments_BL": np.ones(shape, np.int32), "positions_BL": places}  # fmt: skip


def by_jax_grad(spec, params, batch):
  """Gradients of the mean loss, of one device and one batch."""

  def loss(trained):
    merged = params_lib.unflatten(params_lib.flatten(params) | trained)
    total, _ = transformer.loss_and_aux(merged, spec.sites(), batch, spec.model, spec.run)
    return total / batch["weights_BL"].sum()

  declared = params_lib.flatten(spec.declaration)
  flat = params_lib.flatten(params)
  return jax.jit(jax.grad(loss))({k: x for k, x in flat.items() if declared[k].trainable})


@pytest.mark.parametrize(
  "changes, shape",
  [
    ({"grad_accum_steps": 2}, None),
    pytest.param({"grad_accum_steps": 2, "model.lora.rank": 2}, None, marks=pytest.mark.slow),
    # In chunks of rows, updates of 8-bit moments.
    pytest.param({"optim.moment_format": "coat"}, None, marks=pytest.mark.slow),
    pytest.param({"optim.in_backward": True, "optim.grad_clip_norm": 0.0,
                  "memory.remat_policy": "full"}, None, marks=pytest.mark.slow),
    pytest.param({"optim.grad_clip_norm": 0.0}, (2, 2, 1), marks=pytest.mark.slow),
    pytest.param({"optim.in_backward": True, "optim.grad_clip_norm": 0.0,
                  "memory.remat_policy": "full"}, (1, 2, 2), marks=pytest.mark.slow),
  ],
  ids=["microbatches", "adapters, microbatches", "8-bit moments", "in backward", "mesh", "both"],
)  # fmt: skip
def test_norms_of_every_layer_s_parameters_are_numpy_s(changes, shape, monkeypatch):
  monkeypatch.setattr(update, "_CHUNK", 2**11)
  c = config(**changes)
  alone = resolve.resolve(config(**{k: v for k, v in changes.items() if k.startswith("model")}),
                          1, harness.CPU)  # fmt: skip
  spec = harness.tiny_spec(c, shape)
  state, host = harness.make_state(spec), batch_of(spec)
  if spec.model.lora:
    adapted = jax.jit(harness.random_adapters)(state.params)
    state = dataclasses.replace(state, params=adapted)
  before = per_layer(state.params, spec.declaration)
  start = jax.device_get(stored_params.dequantize_tree(state.params))
  placed = harness.batch_sharding.BatchSharder(
    spec.run.layout, spec.microbatch, spec.grad_accum_steps
  ).place(host)
  sites = spec.sites(statistics=tensor_stats.LOUD)
  state, values = train_step.make_step(spec)(state, placed, sites)
  got = param_stats.summary(
    jax.device_get(values["param_stats"]), "params", spec.optim, spec.declaration
  )
  after = per_layer(state.params, spec.declaration)
  declared = params_lib.flatten(spec.declaration)
  grads = by_jax_grad(alone, start, host)
  flat = {k: grads.get(k, np.zeros(())) for k in declared}
  wanted = per_layer(params_lib.unflatten(flat), spec.declaration)
  assert got.keys() == wanted.keys() == before.keys() and len(got) > 8
  for name, g in wanted.items():
    norms = [np.sqrt(np.sum(x**2)) for x in (g, after[name] - before[name], before[name])]
    found = [got[name][k] for k in ("grad_norm", "update_norm", "param_norm")]
    np.testing.assert_allclose(found, norms, rtol=1e-4, err_msg=name)
    assert got[name]["update_ratio"] == pytest.approx(norms[1] / norms[2], rel=1e-4)
    assert got[name]["nonfinite"] == 0
  whole = [np.sqrt(sum(of[k] ** 2 for of in got.values()))
           for k in ("grad_norm", "update_norm", "param_norm")]  # fmt: skip
  found = [values[k] for k in ("grad_norm", "update_norm", "param_norm")]
  np.testing.assert_allclose(found, whole, rtol=1e-5)


def test_groups_are_the_rules_that_match():
  """Sums of squares by hand; numbers that are not finite are counted where they are."""
  declaration = {"embed": Param("VD"), "layers": {
    "mlp": {"up": Param("NDF")}, "old": Param("ND", trainable=False)}}  # fmt: skip
  up = np.arange(1.0, 13).reshape(3, 2, 2).astype(np.float32)
  up[2, 0] = np.nan, np.inf
  gradient = {"embed": np.full((2, 2), 3.0, np.float32), "layers": {"mlp": {"up": up}, "old": ()}}
  squares = {"embed": np.array([4.0, 16.0]), "layers/old": np.zeros(2),
             "layers/mlp/up": np.array([[1.0, 4.0], [9.0, 0.0], [1.0, 1.0]])}  # fmt: skip
  stats = jax.device_get(param_stats.observed(declaration, gradient, squares))
  c = config(**{**GROUPS, "log.param_stats": "groups"})
  optim = resolve.resolve(c, 1, harness.CPU).optim
  got = param_stats.summary(stats, "groups", optim, declaration)
  rate = "rate .*/mlp/(up|down)"
  assert got.keys() == {"all others", rate, f"clip layers/1/mlp/.*, {rate}"}
  assert got["all others"] == {"grad_norm": 6.0, "update_norm": 2.0, "param_norm": 4.0,
                               "update_ratio": 0.5, "nonfinite": 0}  # fmt: skip
  of_1 = got[f"clip layers/1/mlp/.*, {rate}"]
  assert of_1["grad_norm"] == pytest.approx(np.sqrt(25 + 36 + 49 + 64))
  assert np.isnan(of_1["update_ratio"]) and of_1["update_norm"] == 3
  bad = got[rate]  # layers 0 and 2
  assert bad["nonfinite"] == 2 and np.isnan(bad["grad_norm"])
  assert (bad["update_norm"], bad["param_norm"]) == (np.sqrt(2), np.sqrt(5))


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"log.tensor_stats_every": 0}, "set log.tensor_stats_every=100"),
    ({"log.param_stats": "groups"}, "set log.param_stats='params'"),
    ({"kernels.optimizer": "mosaic_sm90"}, "log.param_stats='params': the kernel sums over all"),
    ({"log.param_stats": "each"}, "'off', 'groups', 'params'"),
  ],
)
def test_statistics_that_nothing_would_write_are_refused(changes, words):
  with pytest.raises(ConfigError) as e:
    resolve.resolve(config(**changes), 1, harness.CPU)
  assert words in str(e.value) and "log.param_stats" in str(e.value)


def test_a_quiet_step_and_a_run_without_the_key_compute_nothing_more():
  texts = {}
  for name, changes in {"on": {}, "off": {"log.param_stats": "off"}}.items():
    spec = resolve.resolve(config(**changes), 1, harness.CPU)
    for width in (tensor_stats.QUIET, tensor_stats.LOUD):
      state, batch, _ = harness.step_arguments(spec)
      lowered = train_step.make_step(spec).lower(state, batch, spec.sites(statistics=width))
      texts[name, width] = lowered.as_text()
  quiet, loud = tensor_stats.QUIET, tensor_stats.LOUD
  assert texts["on", quiet] == texts["off", quiet]
  assert texts["on", loud] != texts["off", loud]
