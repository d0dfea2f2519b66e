"""precision.invariant: one token, one set of bits, in programs of different shapes.

The oracle is another program: of another batch, packing, length, device count or job. That these
differ without the invariant pass is a test of its own, and float64 NumPy says what is computed.
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import harness
import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest

from fp8jax import axes, mesh
from fp8jax import params as params_lib
from fp8jax.config import resolve
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import ConfigError
from fp8jax.generation import api, batching, decode, weights
from fp8jax.generation.settings import Sampling
from fp8jax.kernels.attention import fixed_order
from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.run import evaluator
from fp8jax.step import train_step

SLOW = pytest.mark.slow
# Large weights: an unlike rounding of one activation moves the loss.
CFG = dataclasses.replace(
  harness.TINY, hidden_size=192, intermediate_size=320, num_heads=4, num_kv_heads=2, head_dim=32,
  init_std=0.1, qk_norm=True, qkv_bias=True, max_positions=160,
)  # fmt: skip
ALL_BUCKETS = (9, 20, 37, 66)  # of prompts: 16, 32, 64 and 96
TEXTS = np.random.default_rng(0).integers(0, CFG.vocab_size, (3, 71)).astype(np.int32)


@functools.cache
def params():
  return harness.init_params(CFG)


def packed(rows, length: int):
  """A batch whose rows are [(number of the text, its tokens)] one after the other, then padding."""
  batch = {
    f"{name}_BL": np.zeros((len(rows), length), np.int32)
    for name in ("tokens", "targets", "segments", "positions")
  }
  for b, texts in enumerate(rows):
    at = 0
    for n, (number, size) in enumerate(texts):
      here = slice(at, at + size)
      batch["tokens_BL"][b, here] = TEXTS[number, :size]
      batch["targets_BL"][b, here] = TEXTS[number, 1 : size + 1]
      batch["segments_BL"][b, here], batch["positions_BL"][b, here] = n + 1, np.arange(size)
      at += size
  weights_BL = (batch["segments_BL"] > 0).astype(np.float32)
  return jax.tree.map(jnp.asarray, {**batch, "weights_BL": weights_BL})


class Model:
  """One recipe's programs."""

  def __init__(self, recipe, dtype, weight_form="codes", *, is_invariant=True, layout=axes.LOCAL):
    self.run = ComputeConfig(
      jnp.dtype(dtype), loss_chunk=16, layout=layout, remat="full", is_invariant=is_invariant
    )
    rules = (("head", "bf16"), ("layers/.*", recipe))
    backends = site_tree.Backends("dequantized" if weight_form == "values" else "auto")
    sites = site_tree.build_sites(
      transformer.site_params(CFG), CFG.dims, rules, layout, backends=backends
    )
    self.sites, self.weight_form = site_lib.with_current_scales(sites), weight_form
    how = CFG, self.run.dtype, weight_form == "values"
    self.served = weights.for_inference(params(), self.sites, *how)

  @functools.cached_property
  def logp(self):
    """Log-probabilities as training has them: of parameters as they are stored."""

    def function(params, batch, t):
      h_BLD = transformer.hidden(params, self.sites, batch, CFG, self.run)
      of_head = (params, self.sites, batch["targets_BL"])
      return transformer.log_probs(h_BLD, *of_head, CFG, self.run, t)[0]

    jitted = jax.jit(function)
    return lambda batch, t=1.0: np.asarray(jitted(params(), batch, t))

  def scored(self, batch):
    """As Generator.score has them: of weights that were quantized before."""
    keep = ("tokens_BL", "targets_BL", "positions_BL")
    score = functools.partial(decode.score, chunk=16, cfg=CFG, run=self.run)
    return np.asarray(jax.jit(score)(self.served, self.sites, {k: batch[k] for k in keep})[0])

  def generated(self, sizes=ALL_BUCKETS):
    """(log-probabilities of drawn completions as the generator tells them, as training has them):
    eight completions of prompts of these sizes, each in a bucket of its own, take turns in three
    slots."""
    generator = api.Generator(
      params(), self.sites, CFG, self.run, Tokenizer("bytes"), [10**6], slots=3, max_length=96,
      weight_form=self.weight_form,
    )  # fmt: skip
    drawn = Sampling(temperature=0.8, max_new_tokens=20)
    prompts = [TEXTS[n % 3, :size].tolist() for n, size in enumerate(sizes)]
    assert len({batching.bucket(size, 96) for size in sizes}) == len(sizes)
    made = generator.generate(prompts, drawn, 8 // len(sizes))
    rows = [(p, c) for p, own in zip(prompts, made) for c in own]
    batch = {
      f"{name}_BL": np.zeros((8, 86), np.int32) for name in ("tokens", "targets", "positions")
    }
    batch["positions_BL"][:] = np.arange(86)
    batch["segments_BL"], batch["weights_BL"] = np.ones((8, 86), np.int32), np.ones((8, 86), "f4")
    for b, (prompt, completion) in enumerate(rows):
      text = [*prompt, *completion.tokens]
      batch["tokens_BL"][b, : len(text) - 1], batch["targets_BL"][b, : len(text) - 1] = (
        text[:-1], text[1:],
      )  # fmt: skip
    # A mesh of eight has all of them at once.
    pieces = (slice(4), slice(4, 8)) if self.run.layout.mesh is None else (slice(8),)
    halves = [jax.tree.map(lambda x, of=of: x[of], batch) for of in pieces]
    logp_BL = np.concatenate([self.logp(half, 0.8) for half in halves])
    want = [logp_BL[b, len(p) - 1 : len(p) + 19] for b, (p, _) in enumerate(rows)]
    return np.array([c.logp for _, c in rows], np.float32), np.array(want)


def differences(model: Model, sizes) -> dict[str, np.ndarray]:
  """Of every other program: its log-probabilities minus those of the three texts in a batch."""
  want = model.logp(packed([[(n, 70)] for n in range(3)], 70))
  several = model.logp(packed([[(1, 21), (0, 70), (2, 40)]], 150))[0]
  scored = model.scored(packed([[(0, 70)], [(2, 50)]], 80))
  return {
    "alone, cut short": model.logp(packed([[(0, 33)]], 150))[0, :33] - want[0, :33],
    "packed": np.concatenate([several[21:91] - want[0], several[91:131] - want[2, :40]]),
    "scored": np.concatenate([scored[0, :70] - want[0], scored[1, :50] - want[2, :50]]),
    "prefilled, decoded": np.subtract(*model.generated(sizes)),
  }


# The largest bucket; all of them, each a program, in the slow cases.
RECIPES = [("block_128", "float32", "codes", (66,)), *(
  pytest.param(*one, ALL_BUCKETS, marks=SLOW)
  for one in (("block_128", "bfloat16", "codes"), ("block_128", "bfloat16", "values"),
              ("bf16", "float32", "codes"), ("rowwise", "float32", "codes"),
              ("mxfp4_ste", "bfloat16", "codes"), ("w4a16_g64", "float32", "codes"),
              ("w4a16_g64", "float32", "values"), ("int8", "bfloat16", "codes"))
)]  # fmt: skip


@pytest.mark.parametrize(("recipe", "dtype", "weight_form", "sizes"), RECIPES)
def test_a_token_has_the_same_bits_in_every_program(recipe, dtype, weight_form, sizes):
  found = differences(Model(recipe, dtype, weight_form), sizes)
  assert {name: float(np.abs(x).max()) for name, x in found.items()} == dict.fromkeys(found, 0.0)


def _of_run(spec, params, sites):
  """Log-probabilities of a batch of texts, by a run's own configuration."""
  run, cfg = evaluator.run_of(spec, None, sites), spec.model
  assert run.is_invariant

  @jax.jit
  def function(params, sites, batch):
    h_BLD = transformer.hidden(params, sites, batch, cfg, run)
    return transformer.log_probs(h_BLD, params, sites, batch["targets_BL"], cfg, run)[0]

  return lambda batch: np.asarray(function(params, sites, batch))


def _assert_same_bits(logp):
  want = logp(packed([[(n, 70)] for n in range(3)], 70))
  several = logp(packed([[(1, 21), (0, 70), (2, 40)]], 150))[0]
  np.testing.assert_array_equal(logp(packed([[(0, 33)]], 40))[0, :33], want[0, :33])
  np.testing.assert_array_equal(several[21:91], want[0])
  np.testing.assert_array_equal(several[91:131], want[2, :40])


@SLOW
@pytest.mark.parametrize("accumulated", [1, 2])
def test_delayed_scales_are_the_runs_own(accumulated):
  """Of a state that steps of one or two microbatches have made."""
  own = {"precision.invariant": True, "memory.remat_policy": "full", "optim.peak_lr": 1e-2}
  changes = {**own, "grad_accum_steps": accumulated, "log.tensor_stats_every": 0}
  runner, hosts = harness.tiny_runner("tensor_delayed", **changes), harness.host_batches()
  first = runner.spread.place(hosts[0])
  state = train_step.calibrate(runner.spec, train_step.make_state(runner.spec), first, 0)
  _, state = runner.run(hosts[1:3], state)
  sites = evaluator.sites_of(runner.spec, None, state.scaling_states)
  _assert_same_bits(_of_run(runner.spec, state.params, sites))


@SLOW
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_train_step_has_the_bits_of_a_score(accumulated):
  """A step that weighs one token alone has minus its log-probability for a loss."""
  own = {"precision.invariant": True, "memory.remat_policy": "full"}
  changes = {**own, "grad_accum_steps": accumulated, "log.tensor_stats_every": 0}
  runner, (host, *_) = harness.tiny_runner("block_128", **changes), harness.host_batches()
  state = train_step.make_state(runner.spec)
  logp = _of_run(runner.spec, state.params, evaluator.sites_of(runner.spec, None, {}))
  alone = [logp({k: jnp.asarray(x[row : row + 1, :40]) for k, x in host.items()}) for row in (1, 6)]
  for row, want in zip((1, 6), alone):
    for at in (0, 17, 30, 39):
      weights_BL = np.zeros_like(host["weights_BL"])
      weights_BL[row, at] = 1
      (loss,), _ = runner.run([{**host, "weights_BL": weights_BL}])
      assert np.float32(loss) == -want[0, at]


@SLOW
@pytest.mark.parametrize("base", ["float32", "block_fp8"])
def test_adapters_are_of_a_token_too(base):
  own = {"precision.invariant": True, "memory.remat_policy": "full", "model.lora.rank": 4}
  c = harness.tiny_config("block_128", **own, **{"model.lora.base": base})
  spec = harness.tiny_spec(c)
  params = harness.random_adapters(train_step.make_state(spec).params, 0.5)
  _assert_same_bits(_of_run(spec, params, spec.sites()))


@SLOW
def test_one_thread_computes_what_two_do():
  """XLA divides products among its threads; the cores of a process say how many there are."""
  paths = [str(pathlib.Path(__file__).resolve().parents[n]) for n in (0, 1, 2)]
  code = f"""
import sys; sys.path[:0] = {paths!r}
import invariant_test as t
batch = t.packed([[(n, 70)] for n in range(3)], 70)
print(t.Model("block_128", "bfloat16").logp(batch).tobytes().hex())
"""
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < 2:
    pytest.skip("one core")
  env = os.environ | {"XLA_FLAGS": ""}  # one device, whose threads are as many as the cores
  printed = [
    subprocess.run(
      [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True,
      preexec_fn=functools.partial(os.sched_setaffinity, 0, cores[:count]),
    ).stdout
    for count in (1, len(cores))
  ]  # fmt: skip
  assert len(printed[0]) > 1000 and printed[0] == printed[1]


def test_without_it_they_differ():
  """The comparison above can fail: as it is, sums come in another order."""
  model = Model("block_128", "float32", is_invariant=False)
  want = model.logp(packed([[(n, 70)] for n in range(3)], 70))
  assert np.abs(model.logp(packed([[(0, 33)]], 40))[0, :33] - want[0, :33]).max() > 0


@SLOW
def test_the_generators_log_probabilities_are_those_of_the_plain_pass_too():
  got, want = Model("bf16", "float32", is_invariant=False).generated()
  np.testing.assert_allclose(got, want, atol=1e-5)


def _loss_and_gradient(model):
  batch = packed([[(1, 21), (0, 48)], [(2, 70)]], 70)

  def loss(params):
    return transformer.loss(params, model.sites, batch, CFG, model.run)

  return jax.jit(jax.value_and_grad(loss))(params())


@SLOW
def test_loss_of_training_is_that_of_scoring_and_gradients_are_the_plain_ones():
  model = Model("block_128", "bfloat16")
  batch = packed([[(1, 21), (0, 48)], [(2, 70)]], 70)
  loss, gradient = _loss_and_gradient(model)
  _, plain = _loss_and_gradient(Model("block_128", "bfloat16", is_invariant=False))
  logp_BL = model.logp(batch).astype(np.float64)
  np.testing.assert_allclose(loss, -(logp_BL * batch["weights_BL"]).sum(), rtol=1e-6)
  apart = {
    path: float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))
    for (path, x), y in zip(params_lib.flatten(gradient).items(), jax.tree.leaves(plain))
  }
  # Inputs of layers are rounded otherwise: six products of E4M3 in a row lie behind some gradients.
  assert 0 < min(apart.values()) and max(apart.values()) < 0.15, apart


@SLOW
def test_a_mesh_has_the_bits_of_one_device():
  c = harness.tiny_config("block_128")
  tables = tuple(axes.as_rules(t) for t in (c.sharding.weights, c.sharding.acts))
  layout = axes.Layout(mesh.make((4, 2, 1)), *tables)
  rows = [[(n % 3, 70 - n)] for n in range(8)]
  want = Model("block_128", "bfloat16").logp(packed(rows, 70))
  model = Model("block_128", "bfloat16", layout=layout)
  batch = jax.tree.map(lambda x: jax.device_put(x, layout.act_sharding("BL")), packed(rows, 70))
  np.testing.assert_array_equal(model.logp(batch), want)
  got, here = model.generated(), Model("block_128", "bfloat16").generated()
  np.testing.assert_array_equal(got[0], here[0])
  np.testing.assert_array_equal(got[0], got[1])
  scored = model.scored({name: x[:, :64] for name, x in batch.items()})
  np.testing.assert_array_equal(scored[:, :63], want[:, :63])  # as many as the shortest row has


def test_it_computes_what_numpy_does():
  batch = packed([[(1, 21), (0, 48)]], 70)
  got = Model("bf16", "float32").logp(batch)
  logits = numpy_model.logits(CFG, params(), jax.tree.map(np.asarray, batch))
  logp = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
  logp = np.take_along_axis(
    logp - logits.max(-1, keepdims=True), batch["targets_BL"][..., None], -1
  )
  np.testing.assert_allclose(got[0, :69], logp[0, :69, 0], atol=2e-4)


def test_attention_of_keys_that_queries_see_is_numpys():
  """Uneven documents over the tiles of queries and of keys; the last query sees nothing."""
  rng = np.random.default_rng(1)
  q, k, v = (rng.standard_normal((2, 90, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
  first = np.stack([np.repeat([0, 17, 85], [17, 68, 5]), np.zeros(90, int)]).astype(np.int32)
  last = np.broadcast_to(np.arange(90, dtype=np.int32), (2, 90)).copy()
  last[0, 40] = 30  # sees its document's beginning alone
  got = jax.jit(fixed_order.forward)(q, k, v, first, last)
  keys = np.arange(90)
  visible = (keys >= first[..., None]) & (keys <= last[..., None])
  want = numpy_model.attend(*(x.astype(np.float64) for x in (q, k, v)), visible)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_a_query_that_is_not_a_number_stays_none():
  q = np.ones((1, 3, 2, 8), np.float32)
  q[0, 1] = np.nan
  k = np.ones((1, 3, 1, 8), np.float32)
  first, last = np.zeros((1, 3), np.int32), np.arange(3, dtype=np.int32)[None]
  got = np.asarray(fixed_order.forward(q, k, k, first, last))
  assert np.isnan(got[0, 1]).all() and np.isfinite(got[0, [0, 2]]).all()


@pytest.mark.parametrize("recipe", ["tensor_current", "tensor_delayed"])
def test_a_generator_without_a_tokens_own_scales_is_refused(recipe):
  run = ComputeConfig(is_invariant=True)
  sites = site_tree.build_sites(transformer.site_params(CFG), CFG.dims, ((".*", recipe),))
  sites = site_lib.with_current_scales(sites)
  with pytest.raises(ConfigError, match="is not of a token alone"):
    api.Generator(params(), sites, CFG, run, Tokenizer("bytes"), [10**6])


REFUSED = {
  "tensor scales": ({"precision.rules": ((".*", "tensor_current"),)}, "is not of a token"),
  "two levels": ({"precision.rules": (("head", "bf16"), (".*", "nvfp4_ste"))}, "not of a token"),
  "rematerialised": ({"memory.remat_policy": "none"}, "memory.remat_policy='none'"),
  "in backward": (
    {"optim.in_backward": True, "optim.grad_clip_norm": 0.0},
    "optim.in_backward=True: a layer",
  ),
  "smooth": ({"precision.smooth_swiglu": "channel"}, "take 'token'"),
  "attention": ({"precision.attention": "fa3"}, "of many tokens"),
  "compressed inputs": ({"memory.save_layer_inputs": "e4m3_128"}, "very input of a layer"),
  "outliers": ({"precision.rules": (("head", "bf16"), (".*", "fp4_occ"))}, "outliers of a whole"),
  "policy": (
    {"precision.policy": ("switch_recipe(to='tensor_current')",), "log.tensor_stats_every": 100},
    "recipe 'tensor_current'",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_promised_is_refused(name):
  changes, text = REFUSED[name]
  changes = {"precision.invariant": True, "memory.remat_policy": "full", **changes}
  with pytest.raises(ConfigError, match=text):
    harness.tiny_spec(harness.tiny_config("block_128", **changes))


def test_a_split_of_tokens_and_a_gpu_are_refused():
  own = {"precision.invariant": True, "memory.remat_policy": "full"}
  with pytest.raises(ConfigError, match="numbers over tensor"):
    harness.tiny_spec(harness.tiny_config("block_128", **own), (2, 2, 2))
  with pytest.raises(ConfigError, match="choose how to sum"):
    resolve.resolve(harness.tiny_config("block_128", **own), 1, harness.HOPPER)
  harness.tiny_spec(harness.tiny_config("block_128", **own), (4, 2, 1))
  harness.tiny_spec(harness.tiny_config("tensor_delayed", **own))
