"""Statistics of activations: against NumPy, the same however a step is computed, free without."""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax import axes
from fp8jax.models import attention_gqa, mixer, presets, transformer
from fp8jax.ops import observe, site_tree
from fp8jax.quantization import tensor_stats
from fp8jax.run import alarms
from fp8jax.step import train_step

LENGTH = 32
# Two runs of layers; chunks of the logits.
CHANGES = {"seq_len": LENGTH, "precision.first_bf16": 1, "memory.loss_chunk": 16}
OF_LAYER = ("attn/norm", "mlp/norm", "residual")


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch):
  untied = dataclasses.replace(harness.TINY, tie_embeddings=False)
  monkeypatch.setitem(presets.PRESETS, "untied", untied)


def plan_of(recipe="bf16", shape=None, **changes):
  return harness.tiny_spec(harness.tiny_config(recipe, **CHANGES, **changes), shape)


def host():
  return {k: v[:, :LENGTH] for k, v in harness.host_batches()[0].items()}


def observations(spec):
  """{layer's site: [tensors, S]} of a loud step from the initial weights."""
  runner = harness.Runner(spec)
  sites = spec.sites(statistics=tensor_stats.LOUD)
  state = harness.make_state(spec)
  _, values = runner.step_fn(state, runner.spread.place(host()), sites)
  stats = jax.device_get(values["tensor_stats"])
  assert all(np.isfinite(v).all() for v in stats.values())
  return site_tree.per_layer(sites, stats), alarms.summarise(sites, stats, {})


@functools.cache
def plain():
  return observations(plan_of())


def of_numpy(x):
  x = np.asarray(x, np.float64)
  return {
    "amax": np.abs(x).max(), "rms": np.sqrt((x**2).mean()), "mean": x.mean(), "variance": x.var(),
    "nonfinite": 0, "kurtosis": (x**4).mean() / (x**2).mean() ** 2,
  }  # fmt: skip


def test_statistics_are_those_of_what_the_model_computes():
  spec = plan_of()
  params, batch = harness.init_params(spec.model, spec.seed), host()
  cfg, run, sites = spec.model, spec.run, spec.sites()

  def layer(x_BLD, of_layer, context):
    return transformer.layer(x_BLD, of_layer, context, cfg, run)[0], x_BLD

  @jax.jit
  def both(p):
    x_BLD, inputs_NBLD = transformer.scan_layers(layer, p, sites, batch, cfg, run)
    return transformer.normalised(x_BLD, p, sites, cfg, run), inputs_NBLD

  hidden_BLD, inputs_NBLD = both(params)
  h_BLD, in_NBLD = np.float64(hidden_BLD), np.float64(inputs_NBLD)
  normed = in_NBLD / np.sqrt((in_NBLD**2).mean(-1, keepdims=True) + cfg.norm_eps)
  expected = {
    "embed": np.asarray(params["embed"])[batch["tokens_BL"]],
    "norm": h_BLD,
    "logits": h_BLD @ np.float64(params["embed"]).T,
    **{f"layers/{i}/residual": in_NBLD[i + 1] for i in range(cfg.num_layers - 1)},
    **{f"layers/{i}/attn/norm": normed[i] for i in range(cfg.num_layers)},
  }
  values, found = plain()
  names = {f"layers/{i}/{n}" for i in range(cfg.num_layers) for n in OF_LAYER} | expected.keys()
  assert {name for name, tensors in found.items() if "w" not in tensors} == names
  for name, x in expected.items():
    numbers, wanted = found[name]["x"], of_numpy(x)
    assert numbers.keys() == wanted.keys()  # none of a quantization
    for statistic, value in wanted.items():
      near = 1e-6 * wanted["rms"] if statistic == "mean" else 0
      assert numbers[statistic] == pytest.approx(value, rel=1e-3, abs=near), (name, statistic)
    elements = values[name][0, tensor_stats.STATISTICS.index("elements")]
    assert elements == x.size
  # The last layer's stream is what the last norm reads.
  assert found["layers/1/residual"]["x"]["rms"] > 0


@pytest.mark.slow
def test_gradient_of_the_stream_is_that_of_the_embeddings():
  """The rows of an embedding collect the gradients of its tokens; the head has its own weights."""
  spec = plan_of(**{"model.preset": "untied"})
  params, batch = harness.init_params(spec.model), jax.tree.map(jax.numpy.asarray, host())
  sites = spec.sites(statistics=tensor_stats.LOUD)
  _, gradient, stats, _ = jax.jit(
    lambda p: train_step.gradients(spec, p, sites, batch, scale=1024.0)
  )(params)
  found = alarms.summarise(sites, jax.device_get(stats), {})
  total, elements = np.float64(gradient["embed"]).sum(), batch["tokens_BL"].size * 128
  embed = found["embed"]["g"]
  assert embed["mean"] * elements == pytest.approx(total, abs=1e-5 * embed["rms"] * elements)
  seen, times = np.unique(batch["tokens_BL"], return_counts=True)
  once = np.abs(np.asarray(gradient["embed"]))[seen[times == 1]].max()
  assert 0 < once <= embed["amax"] * (1 + 1e-6) and "g" not in found["norm"]
  assert found["layers/0/residual"]["g"]["amax"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"grad_accum_steps": 2, "memory.remat_policy": "full"},
    {"memory.remat_policy": "none"},
    {"optim.in_backward": True, "optim.grad_clip_norm": 0.0, "memory.remat_policy": "full"},
    {"shape": (2, 2, 2)},
  ],
  ids=["accumulated and recomputed", "saved", "in backward", "eight devices"],
)
def test_statistics_do_not_depend_on_how_a_step_is_computed(changes):
  values, found = plain()
  others, other_found = observations(plan_of(**changes))
  assert found.keys() == other_found.keys()
  for name, tensors in found.items():
    assert tensors.keys() == other_found[name].keys()
    if "w" in tensors:  # of GEMMs: tested elsewhere
      continue
    for tensor, summary in tensors.items():
      for statistic in ("amax", "rms", "variance", "kurtosis", "nonfinite"):
        other = other_found[name][tensor][statistic]
        assert other == pytest.approx(summary[statistic], rel=5e-3), (name, tensor, statistic)
    elements = tensor_stats.STATISTICS.index("elements")
    np.testing.assert_array_equal(others[name][:, elements], values[name][:, elements])
    counts = len(tensor_stats.STATISTICS)
    assert (others[name][:, counts:].sum(-1) > 0).all()


def test_step_without_statistics_is_the_program_of_a_model_that_observes_nothing(monkeypatch):
  spec = plan_of("block_128")

  def program(statistics):
    runner = harness.Runner(spec)
    state, sites = train_step.abstract_state(spec, 1), spec.sites(statistics=statistics)
    return str(runner.step_fn.trace(state, host(), sites).jaxpr)

  quiet, loud = program(tensor_stats.QUIET), program(tensor_stats.LOUD)
  for module in (transformer, attention_gqa, mixer):
    monkeypatch.setattr(module, "observed", lambda x, sites, name: x)
  assert program(tensor_stats.QUIET) == quiet != loud


def test_the_sample_of_exponents_is_whole_rows_at_even_distances():
  """2^18 elements, every fourth row: the first one alone, though it is as long as the sample."""
  x = jnp.stack([jnp.full(2**16, 2.0**i) for i in range(4)])[None]
  stats = observe.activation_stats(x, "BLD", axes.LOCAL)
  counts = stats[len(tensor_stats.STATISTICS) :]
  assert counts[tensor_stats.EXPONENTS.index(0)] == counts.sum() == 2**16
