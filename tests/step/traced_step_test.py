"""The traced step: one program without and one with statistics; no call of the host."""

import re

import harness
import jax
import jax.experimental
import numpy as np
import pytest

from configs import debug
from fp8jax.config import resolve
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.quantization import tensor_stats
from fp8jax.step import train_step


def test_quiet_and_loud_are_exactly_two_traces(monkeypatch):
  spec = harness.text_spec("tensor_delayed")
  count = 0
  original = transformer.loss_and_aux

  def counting(*args):
    nonlocal count
    count += 1
    return original(*args)

  monkeypatch.setattr(transformer, "loss_and_aux", counting)
  step = train_step.make_step(spec)
  state, hosts = harness.calibrated_batches(spec, 5)
  count = 0
  sites = {n: spec.sites(statistics=n) for n in (tensor_stats.QUIET, tensor_stats.LOUD)}
  for i, host in enumerate(hosts):  # traced as jit does, not compiled
    traced = step.trace(state, host, sites[tensor_stats.LOUD if i % 2 else tensor_stats.QUIET])
    state, _ = traced.out_info
  assert count == 2


def test_seeds_and_schedules_share_one_program(rng):
  """The cache of compiled programs then serves another seed, rate and number of steps. A decay by
  the schedule alone is part of a program."""
  batch = harness.weighted_batch(rng)
  plain, other = {}, {
    "seed": 3, "steps": 50, "optim.peak_lr": 3e-3, "optim.min_lr": 0.0, "optim.warmup_steps": 7,
    "optim.decay_steps": 9, "optim.schedule": "cosine",
  }  # fmt: skip
  by_schedule = {"optim.decay_by": "schedule", "optim.weight_decay": 1e-3}
  for more, is_shared in (({}, True), (by_schedule, False)):
    texts, rates = [], []
    for changes in (plain, other):
      spec = harness.one_layer_spec(**{"precision.rules": ((".*", "bf16"),)}, **changes, **more)
      step = train_step.make_step(spec)
      texts.append(step.lower(train_step.abstract_state(spec, 1), batch, spec.sites()).as_text())
      rates.append(float(step.rate_of(np.int32(6))))
    assert (texts[0] == texts[1]) == is_shared and rates[0] != rates[1]


def _calls_of_the_host(traced) -> set[str]:
  """Primitives of a traced program that ask the host for something."""
  return set(re.findall(r"\w*(?:callback|infeed|outfeed|debug_print)\w*", str(traced.jaxpr)))


@pytest.mark.parametrize(
  "statistics", [tensor_stats.QUIET, tensor_stats.LOUD], ids=["quiet", "loud"]
)
def test_step_never_calls_the_host(statistics):
  spec = resolve.resolve(debug.get_config(), 1, choose.current_device())
  state = train_step.abstract_state(spec, 1)
  batch = {
    name: jax.ShapeDtypeStruct((spec.global_batch, spec.data.seq_len), dtype)
    for name, dtype in (
      ("tokens_BL", np.int32), ("targets_BL", np.int32), ("weights_BL", np.float32),
      ("positions_BL", np.int32), ("segments_BL", np.int32),
    )
  }  # fmt: skip
  traced = train_step.make_step(spec).trace(state, batch, spec.sites(statistics=statistics))
  assert not _calls_of_the_host(traced)


def test_calls_of_the_host_are_found():
  like = jax.ShapeDtypeStruct((), np.float32)
  calls = (
    lambda x: jax.debug.print("{}", x),
    lambda x: jax.debug.callback(print, x),
    lambda x: jax.pure_callback(np.sin, like, x),
    lambda x: jax.experimental.io_callback(np.sin, like, x),
  )
  for call in calls:

    def layers(x, call=call):
      return jax.lax.scan(lambda c, _: (c, call(c)), x, length=2)

    assert _calls_of_the_host(jax.jit(layers).trace(like)), call


@pytest.mark.slow
def test_microbatches_round_by_chances_of_their_own():
  """The same text twice: with the same chances the mean of two gradients would be the one."""
  one = harness.text_spec("nvfp4_sr_rht", **{"model.num_layers": 1})
  two = harness.text_spec(
    "nvfp4_sr_rht", **{"model.num_layers": 1, "global_batch": 4, "grad_accum_steps": 2}
  )
  (host,) = harness.batches(one, 1)
  params = harness.init_params(one.model)

  @jax.jit
  def gradients(params, batch, sites):
    spec = one if batch["tokens_BL"].ndim == 2 else two
    return train_step.gradients(spec, params, sites, batch)[1]["layers"]["mlp"]

  of_one = gradients(params, host, one.sites())
  twice = {k: np.stack([x, x]) for k, x in host.items()}
  of_two = gradients(params, twice, two.sites())
  for a, b in zip(jax.tree.leaves(of_one), jax.tree.leaves(of_two)):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    assert 0.01 < np.linalg.norm(a - b) / np.linalg.norm(a) < 1
