"""The served pass of the export gate: logits of a folder's own codes, on a mesh and without."""

import dataclasses
import types

import harness
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax import params
from fp8jax.evaluation import divergence
from fp8jax.export import fp8 as fp8_export
from fp8jax.export import served_pass, write
from fp8jax.models import transformer
from fp8jax.models.hf import names, schemes
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.models.hf import weights as hf_weights
from fp8jax.models.hf.schemes import COMPRESSED
from fp8jax.ops import site_tree
from fp8jax.quantization import stored_matrix

TENSORS = schemes.fp8(COMPRESSED, "tensor")
MULTIPLIED = {
  **{f"self_attn.{n}_proj": ("attn", n) for n in "qkvo"},
  **{f"mlp.{n}_proj": ("mlp", n) for n in ("gate", "up", "down")},
}


def _saved_plan(path, cfg, fp8, first="block_128"):
  """The plan of a folder of random weights whose first layer trained in another recipe."""
  rules = (("head", "bf16"), ("layers/0/.*", first), ("layers/.*", "block_128"))
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, rules)
  entries, recipes = names.entries(cfg), site_tree.recipes_of(sites)
  plan = fp8_export.choose(entries, cfg.dims, recipes, fp8, requantize=True)
  seen = {(n, "x"): 4.0 for n in recipes}
  plan = fp8_export.with_amaxes(plan, entries, {}, seen)
  write.save(str(path), write.model(harness.init_params(cfg, 1), cfg, "bfloat16", fp8=plan))
  return plan


def _served(spec, plan, path):
  """(logits as a server computes them, the parameters)."""
  spec = served_pass.whole(spec, plan)
  loaded, sites = served_pass.load(spec, plan, str(path))
  text = types.SimpleNamespace(inputs=harness.placed_uneven_batch(spec))
  (logits,) = divergence.forward(spec, sites, [text])(loaded)
  return np.asarray(logits), loaded


@pytest.mark.parametrize("fp8, shape", [
  # A mesh would split tiles; layers in 16 bits below are on one.
  pytest.param(schemes.fp8(COMPRESSED, "block"), (2, 2, 2), marks=pytest.mark.slow),
  pytest.param(TENSORS, (2, 2, 2), marks=pytest.mark.slow),
  (schemes.Scheme(schemes.MODELOPT, schemes.NVFP4, schemes.NVFP4_INPUTS), None),
], ids=["blocks", "tensors", "nvfp4"])  # fmt: skip
def test_the_served_pass_multiplies_the_codes_of_a_folder(tmp_path, monkeypatch, fp8, shape):
  """On a mesh as on one device; the values of a stack as its codes."""
  config = harness.tiny_config("bf16")
  alone = harness.tiny_spec(config)
  spec = harness.tiny_spec(config, shape) if shape else alone
  plan = _saved_plan(tmp_path, spec.model, fp8)
  logits, loaded = _served(spec, plan, tmp_path)
  folder = hf_tensors.Folder(str(tmp_path))
  for name, (part, key) in MULTIPLIED.items():
    want = folder.read_codes(f"model.layers.1.{name}.weight").data
    got = np.asarray(loaded["layers"][part][key].data[1]).reshape(want.shape[::-1]).T
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=name)
  if has_values := fp8.label != "block":  # read as where layers are in several schemes
    load = hf_weights.load_params
    monkeypatch.setattr(hf_weights, "load_params", lambda *args, codes_of: load(*args))
  # Servers know no Smooth-SwiGLU, whatever the model was trained with.
  trained = dataclasses.replace(alone.run, smooth_swiglu="token")
  alone = dataclasses.replace(alone, run=trained)
  assert served_pass.whole(alone, plan).run.smooth_swiglu == "none"
  other, loaded = _served(alone, plan, tmp_path)
  kind = loaded["layers"]["mlp"]["up"].data.dtype
  assert (kind == jnp.float32) == has_values
  # Sums in another order move some tokens' activations to the next code; other weights move all.
  assert np.mean(np.abs(logits - other) < 1e-5) > 0.7


def test_layers_in_16_bits_are_served_as_they_are(tmp_path):
  """Beside others whose scale is that of fused matrices, on a mesh: the values of both."""
  spec = harness.tiny_spec(harness.tiny_config("bf16"), (2, 2, 2))
  plan = _saved_plan(tmp_path, spec.model, TENSORS, first="bf16")
  assert not any(name.startswith("model.layers.0.") for name in plan.matrices)
  logits, loaded = _served(spec, plan, tmp_path)
  wide, _ = hf_weights.load_params(str(tmp_path), spec.model, spec.run.layout)
  for path, want in params.flatten(wide["layers"]).items():
    got = params.flatten(loaded["layers"])[path]
    got = got.unpack() if isinstance(got, stored_matrix.StoredMatrix) else got
    np.testing.assert_array_equal(got, want, err_msg=path)
  text = types.SimpleNamespace(inputs=harness.placed_uneven_batch(spec))
  (plain,) = divergence.forward(spec, spec.sites("bf16"), [text])(wide)
  # Activations of one of two layers are rounded.
  assert 1e-4 < np.abs(logits - plain).max() < 0.2
