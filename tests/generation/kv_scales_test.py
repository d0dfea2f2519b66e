"""A cache with a folder's scales of keys and values: its codes, and attention that reads them."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError
from fp8jax.generation import api, cache
from fp8jax.models import presets, transformer
from fp8jax.models.config import ComputeConfig
from fp8jax.models.hf import kv_scales
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site_tree

_CFG = dataclasses.replace(presets.DEBUG, **harness.BLOCKS)


def _attention(q, k, v):
  """Causal, in float64, of [B, L, heads, K]; the queries of a group share a head."""
  k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
  scores = np.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(q.shape[-1])
  scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
  p = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum("bhlm,bmhk->blhk", p / p.sum(-1, keepdims=True), v)


def test_generation_rounds_keys_and_values_to_the_folders_scales(tmp_path, rng):
  folder = harness.folder_of_blocks(tmp_path)
  with pytest.raises(UserError, match=r"layers\.0\.self_attn\.k_scale.*cache_format='e4m3'"):
    kv_scales.read(str(folder), _CFG)
  # So small that the largest saturate.
  scales = ((1 + rng.random((_CFG.num_layers, 2))) / 448).astype(np.float32)
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  for (layer, which), scale in np.ndenumerate(scales):
    tensors[f"model.layers.{layer}.self_attn.{'kv'[which]}_scale"] = np.full(1, scale)
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  params, _ = hf_weights.load_params(str(folder), _CFG)
  sites = site_tree.build_sites(transformer.site_params(_CFG), _CFG.dims, ((".*", "bf16"),))
  of_folder = dict(end_ids=(), slots=2, cache_format="e4m3_folder", folder=str(folder))
  made = api.Generator(params, sites, _CFG, ComputeConfig(), Tokenizer("bytes"), **of_folder)
  assert made.cache_bytes_per_token == 2 * _CFG.num_layers * _CFG.num_kv_heads * _CFG.head_dim
  slots = made._engine._empty(length=6)
  np.testing.assert_array_equal(slots.cleared(1).cache.scales, scales)

  q, k, v = (2 * rng.standard_normal((2, 6, n, _CFG.head_dim)).astype(np.float32)
             for n in (_CFG.num_heads, *(_CFG.num_kv_heads,) * 2))  # fmt: skip
  positions = np.tile(np.arange(6), (2, 1))
  layer = jax.tree.map(lambda x: x[1], slots.cache)
  mixed, added = jax.jit(lambda *x: layer.attend(*x, "xla"))(q, k, v, positions)
  codes = []
  for x, scale, entries in zip((k, v), scales[1].astype(np.float64), (added.k, added.v)):
    exact = np.clip(x.astype(np.float64) / scale, -448, 448)
    codes.append(exact.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale)
    assert (np.abs(exact) == 448).any()
    np.testing.assert_array_equal(np.asarray(entries.data).astype(np.float64) * scale, codes[-1])
  np.testing.assert_allclose(mixed, _attention(q.astype(np.float64), *codes), rtol=1e-5, atol=1e-5)
  # The next call reads what was written, under the same scales.
  stacked = jax.tree.map(lambda x: jnp.stack([x, x]), added)
  written = slots.cache.write(stacked, jnp.arange(2), positions)
  np.testing.assert_array_equal(written.scales, scales)
  np.testing.assert_array_equal(written.v.data[1], np.swapaxes(added.v.data, 1, 2))


def test_a_token_attends_to_a_bfloat16_cache_as_float64_does(rng):
  """Up to the rounding of the result: XLA:CPU would add up in bfloat16, four times as far off."""
  heads, groups, size, positions = 9, 3, 64, np.array([[50], [127]])
  q = rng.standard_normal((2, 1, heads, size)).astype(ml_dtypes.bfloat16)
  k, v = rng.standard_normal((2, 2, 128, groups, size)).astype(ml_dtypes.bfloat16)
  entries = (cache.Entries(jnp.asarray(np.swapaxes(x, 1, 2)), None) for x in (k, v))
  made, new = (
    cache.KVCache(*entries, "compute"),
    [x[[0, 1], positions[:, 0]][:, None] for x in (k, v)],
  )
  mixed, _ = jax.jit(lambda *of: of[0].attend(*of[1:], "xla"))(made, q, *new, positions)
  for b, last in enumerate(positions[:, 0]):
    of_b = (x[b : b + 1].astype(np.float64) for x in (k[:, : last + 1], v[:, : last + 1]))
    keys, values = (np.repeat(x, heads // groups, 2)[0] for x in of_b)
    scores = np.einsum("hk,mhk->hm", q[b, 0].astype(np.float64), keys) * size**-0.5
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("hm,mhk->hk", shares / shares.sum(-1, keepdims=True), values)
    off = np.linalg.norm(np.float64(mixed[b, 0]) - want) / np.linalg.norm(want)
    assert off < 2.0**-8
    # Shares are in the dtype, as those of training are: the bits of its pass.
    shares = (shares / shares.sum(-1, keepdims=True)).astype(ml_dtypes.bfloat16)
    want = np.einsum("hm,mhk->hk", shares.astype(np.float64), values).astype(ml_dtypes.bfloat16)
    assert (np.asarray(mixed[b, 0]) == want).mean() > 0.97


def test_names_are_those_of_servers():
  wanted = [kv_scales.name(3, "k", method) for method in ("compressed-tensors", "modelopt")]
  assert wanted == ["model.layers.3.self_attn.k_scale", "model.layers.3.self_attn.k_proj.k_scale"]
