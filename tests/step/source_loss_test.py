"""log.source_loss: the mean loss of each source's tokens, against float64 logits."""

import json

import jax
import numpy as np
import pytest
from harness import Runner, host_batches, only_down, text_config, tiny_config, tiny_spec

from fp8jax.config import resolve
from fp8jax.data import loader
from fp8jax.jobs import train
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.step import train_step


def sums(spec, params, batch, number):
  """float64 [number, 2]: losses and weights of a batch [B, L], by source."""
  run = jax.jit(lambda p, s, b: transformer.logits(p, s, b, spec.model, spec.run))
  inputs = {k: x for k, x in batch.items() if k not in ("sources_BL", "weights_BL", "targets_BL")}
  logits = np.asarray(run(params, spec.sites(), inputs), np.float64)
  of = np.take_along_axis(logits, batch["targets_BL"][..., None], -1)[..., 0]
  losses = np.logaddexp.reduce(logits, axis=-1) - of
  weights = batch["weights_BL"].astype(np.float64)
  is_of = batch["sources_BL"][..., None] == np.arange(number)
  return np.stack([(is_of * x[..., None]).sum((0, 1)) for x in (losses * weights, weights)], -1)


def three_sources(c):
  (name, source), *_ = c.data.sources.items()
  for i in range(3 - len(c.data.sources)):
    c.data.sources[f"more{i}"] = dict(source)
  c.log.source_loss = True
  return c


CASES = {
  "microbatches": (None, {"grad_accum_steps": 2}),
  "mesh": ((2, 2, 2), {}),
  "mesh, microbatches": ((2, 1, 2), {"grad_accum_steps": 2}),
  "in backward": (None, {
    "optim.in_backward": True, "optim.grad_clip_norm": 0.0, "memory.remat_policy": "full",
  }),
}  # fmt: skip


# Slow: the mesh with microbatches has both in one, and its layers hand on their sums, too.
_SLOW = ("microbatches", "mesh", "in backward")


@pytest.mark.parametrize(
  "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in _SLOW)) for case in CASES]
)
def test_sums_of_a_step_are_those_of_float64_logits(case):
  """Tokens lie unevenly, one source has none, weights are no ones, the last chunk is shorter."""
  shape, changes = CASES[case]
  c = three_sources(tiny_config("bf16", **changes, **{"memory.loss_chunk": 50}))
  runner, rng = Runner(tiny_spec(c, shape)), np.random.default_rng(3)
  host = dict(host_batches()[0])
  host["weights_BL"] = rng.choice([0.0, 0.5, 2.0], (8, 128)).astype(np.float32)
  host["sources_BL"] = 2 * (rng.random((8, 128)) < 0.2).astype(np.int32)
  state = train_step.make_state(runner.spec)
  wanted = sums(
    tiny_spec(three_sources(tiny_config("bf16"))), jax.device_get(state.params), host, 3
  )
  assert wanted[1, 1] == 0 and 0 < wanted[2, 1] < wanted[0, 1] / 2
  _, values = runner.step_fn(state, runner.spread.place(host), runner.sites)
  np.testing.assert_allclose(values["by_source"], wanted, rtol=1e-5)
  np.testing.assert_allclose(values["loss"], wanted[:, 0].sum() / wanted[:, 1].sum(), rtol=1e-5)


def test_a_run_writes_the_loss_of_each_source(tmp_path):
  """Its first step's loss by source is that of the initial weights on the loader's first batch.

  That it trains alike: ops/cross_entropy_test.py.
  """
  c = three_sources(text_config(**{"steps": 2, "eval.tokens": 0}))
  c.precision.rules = only_down("tensor_current")
  train.run(resolve.resolve(c, 1, choose.current_device()), str(tmp_path))
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  first = next(row for row in map(json.loads, lines) if "loss" in row)
  c.precision.rules = ((".*", "bf16"),)
  spec = resolve.resolve(c, 1, choose.current_device())
  stream = loader.train_batches(spec.data, 2)
  batch = next(stream)
  stream.close()
  wanted = sums(spec, train_step.make_state(spec).params, batch, 3)
  names = [n for n, (_, tokens) in zip(c.data.sources, wanted) if tokens]
  got = {k.split("/")[1]: v for k, v in first.items()
         if k.startswith("sources/") and k.endswith("/loss")}  # fmt: skip
  assert list(got) == names and len(names) == 2  # windows for three sources
  means = [loss / tokens for loss, tokens in wanted if tokens]
  np.testing.assert_allclose(list(got.values()), means, rtol=2e-3)  # tensor_current, not bf16
