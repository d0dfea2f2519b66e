"""µnit scaling (arXiv:2502.05967): norms after blocks, constant factors, unit weights."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.models import transformer
from fp8jax.ops import dots
from fp8jax.ops import site as site_lib

TAU = 0.3
RULES = (("head", "munit_head"), ("layers/.*", "munit_scaling_wide"))
CHANGES = {"model.residual_tau": TAU, "model.init_std": 1.0, "precision.rules": RULES}


def _spec(**changes):
  return harness.tiny_spec(harness.tiny_config(**{**CHANGES, **changes}))


def _mean_square(x, axis=None):
  return np.mean(np.square(np.asarray(x, np.float64)), axis=axis)


def test_stream_blocks_and_products_of_unit_inputs_have_unit_variance(rng):
  """At the start: the stream and normed blocks by algebra; products, since weights are N(0, 1) and
  factors fan_in^-1/2. What a product reads from inside a block has less (2025_munit's table)."""
  spec = _spec()
  cfg, run = spec.model, spec.run
  params = harness.init_params(cfg, 1)
  x = rng.standard_normal((4, 64, cfg.hidden_size)).astype(np.float32)
  p = jax.tree.map(lambda t: t[0], params["layers"])
  recipe = "munit_scaling_wide"
  sites = {
    m.key: {s.name: site_lib.unobserved(site_lib.single(recipe).recipe) for s in m.sites}
    for m in transformer.mixers(cfg)
  }
  positions = jnp.broadcast_to(jnp.arange(64), (4, 64))
  batch = {"tokens_BL": positions, "positions_BL": positions}
  context = transformer.layer_context(batch, cfg, run)
  for mixer in transformer.mixers(cfg):
    out, _ = mixer.apply(p[mixer.key], sites[mixer.key], x, context, cfg, run)
    # sqrt(1 - tau) x and, of RMS 1 in every token, sqrt(tau) norm(f(x)).
    block = (np.asarray(out, np.float64) - np.sqrt(1 - TAU) * x) / np.sqrt(TAU)
    np.testing.assert_allclose(_mean_square(block, -1), 1, rtol=1e-3)
    assert _mean_square(out) == pytest.approx(1, rel=0.05)
    for name, site in sites[mixer.key].items():
      w = p[mixer.key][name]
      w = w.reshape(-1, w.shape[-1]) if name == "o" else w.reshape(w.shape[0], -1)
      y = dots.dot("BF,FD->BD", rng.standard_normal((256, len(w))).astype(np.float32), w, site)
      assert _mean_square(y) == pytest.approx(1, rel=0.05), name
    plain, _ = mixer.apply(
      p[mixer.key], sites[mixer.key], x, context, dataclasses.replace(cfg, residual_tau=0.0), run
    )
    assert abs(_mean_square(plain) - 1) > 0.05


@pytest.mark.slow  # two runs of 20 steps
def test_it_trains_in_fp8_with_scales_of_one_as_in_the_compute_dtype():
  losses = {}
  rules = (("head", "munit_head"), ("layers/.*", "munit_scaling"))
  rate = {"optim.peak_lr": 0.05, "optim.min_lr": 0.005}
  for name, changes in {
    "munit": {"precision.rules": rules, **rate},
    "wide": rate,
  }.items():
    losses[name], _ = harness.Runner(_spec(**changes)).run(harness.host_batches())
  learned = {name: found[0] - found[-1] for name, found in losses.items()}
  assert learned["wide"] > 0.5 and learned["munit"] > 0.75 * learned["wide"]


def test_a_policy_that_recomputes_the_last_product_and_an_export_are_refused():
  with pytest.raises(ValueError, match="residual_tau"):
    _spec(**{"memory.remat_policy": "linears"})
  from fp8jax.errors import UserError
  from fp8jax.models.hf import config as hf_config

  with pytest.raises(UserError, match="residual_tau"):
    hf_config.check_exportable(_spec().model)
