"""Attention against loops in float64: groups, documents, precision."""

import dataclasses
import functools
import inspect
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

from fp8jax import axes, mesh
from fp8jax.kernels.choose import Device
from fp8jax.models import attention_gqa, presets
from fp8jax.models.config import ComputeConfig
from fp8jax.ops import attention as attention_lib
from fp8jax.ops.attention import attention, first_keys

B, L, K = 2, 24, 16
# Relative to the largest result. bfloat16: the probabilities are rounded to it, and the result.
BUDGET = {jnp.float32: tolerances.FLOAT32_SUM, jnp.bfloat16: 2.0**-8}


def _loops(q, k, v, segments):
  """One query at a time over the keys it may see; query head h reads key head h // (H / G)."""
  q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
  out = np.zeros(q.shape)
  heads_per_key = q.shape[2] // k.shape[2]
  for b, t, h in np.ndindex(q.shape[:3]):
    seen = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
    score = k[b, seen, h // heads_per_key] @ q[b, t, h] / np.sqrt(q.shape[3])
    p = np.exp(score - score.max())
    out[b, t, h] = p @ v[b, seen, h // heads_per_key] / p.sum()
  return out


@pytest.mark.parametrize("dtype", BUDGET, ids=lambda d: d.__name__)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("documents", ["packed", "one"])
def test_attention_equals_loops(rng, documents, heads, dtype):
  def draw(heads, scale=1.0):
    return jnp.asarray(scale * rng.standard_normal((B, L, heads, K)), dtype)

  # Scores up to about 100: a softmax in bfloat16 would be off by tens of per cent.
  q, k, v = draw(heads[0], 10.0), draw(heads[1], 2.0), draw(heads[1])
  segments = None
  if documents == "packed":
    segments = np.array([[1] * 7 + [2] + [3] * 12 + [0] * 4, [1] * 24], np.int32)
  got = jax.jit(lambda *t: attention(*t, segments, "xla"))(q, k, v)
  want = _loops(q, k, v, segments)
  assert got.dtype == dtype
  assert np.max(np.abs(np.asarray(got, np.float64) - want)) < BUDGET[dtype] * np.abs(want).max()


def test_first_keys_and_causality_are_the_mask_of_documents(rng):
  """Against loops over pairs of tokens; the last document of a row is its padding, segment 0."""
  segments = np.zeros((40, 50), np.int32)
  for row in segments:
    stops = np.sort(rng.integers(0, 51, rng.integers(1, 9)))
    for number, (start, stop) in enumerate(zip([0, *stops], stops), 1):
      row[start:stop] = number
  first = np.asarray(first_keys(jnp.asarray(segments)))
  for b, t, s in np.ndindex(40, 50, 50):
    is_seen = s <= t and segments[b, s] == segments[b, t]
    assert is_seen == (first[b, t] <= s <= t), (b, t, s)


def test_first_keys_of_a_segment_number_that_returns_are_of_its_own_run():
  assert first_keys(jnp.asarray([[1, 1, 2, 1, 0, 0]])).tolist() == [[0, 0, 2, 3, 4, 4]]


def test_tokamax_is_given_its_arguments_and_its_gradients_come_back(rng, monkeypatch):
  """Its kernels are stood in for by matrices with their arguments; 3 queries read each key."""

  def attend(q, k, v, first_key, logits_scale, is_causal, logits_soft_cap):
    """[L, H, K] of one row; also the sums of its softmax."""
    assert is_causal and logits_soft_cap is None
    keys = jnp.arange(L)
    seen = (first_key[0][:, None] <= keys) & (keys <= keys[:, None])
    k, v = (jnp.repeat(x, 3, axis=1) for x in (k, v))
    scores = logits_scale * jnp.einsum("LHK,MHK->HLM", q, k)
    p = jnp.where(seen, jnp.exp(scores), 0)
    return jnp.einsum("HLM,MHK->LHK", p / p.sum(-1, keepdims=True), v), p.sum(-1)

  def forward(q, k, v, bias, mask, first, last, *, out_dtype, config, **how):
    rest = {n: how.pop(n) for n in [*how] if n not in inspect.signature(attend).parameters}
    assert rest == dict(
      normalize_output=True, return_residuals=True, use_stable_softmax=True, rescale_threshold=1.0
    )
    assert (bias, mask, last, out_dtype) == (None, None, None, q.dtype)
    assert config == dict(block_q=64, block_kv=128, num_stages=2, persistent=False)
    out, sums = attend(q, k, v, first, **how)
    return out, (jnp.zeros_like(sums), sums)

  def backward(q, k, v, residuals, out, g, bias, mask, first, last, *, ds_dtype, config, **how):
    assert (bias, mask, last, ds_dtype) == (None,) * 4
    blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    assert config == blocks | {"num_stages": 2}
    again, pull = jax.vjp(lambda *of: attend(*of, first, **how)[0], q, k, v)
    sums = attend(q, k, v, first, **how)[1]
    is_right = jnp.all(jnp.abs(out - again) < 1e-6) & jnp.all(residuals[1] == sums)
    return *(jnp.where(is_right, x, jnp.nan) for x in pull(g)), "of a bias"

  package = "tokamax._src.ops.attention"
  parent = types.ModuleType(package)
  for name, function, kernel in (
    ("pallas_mosaic_gpu_kernel_sm90", "flash_attention_kernel", forward),
    ("pallas_mosaic_gpu_vjp_kernel_sm90", "flash_attention_vjp_kernel", backward),
  ):
    setattr(parent, name, types.SimpleNamespace(**{function: kernel, "Config": dict}))
  monkeypatch.setitem(sys.modules, package, parent)
  q, g, k, v = (rng.standard_normal((B, L, heads, K)).astype(np.float32) for heads in (6, 6, 2, 2))
  segments = jnp.array([[1] * 7 + [2] + [3] * 12 + [0] * 4, [1] * 24], jnp.int32)

  def run(by):
    out, pull = jax.vjp(lambda *of: attention(*of, segments, by), q, k, v)
    return out, *pull(g)

  np.testing.assert_allclose(run("tokamax")[0], _loops(q, k, v, segments), atol=1e-5)
  for ours, xla in zip(run("tokamax"), run("xla"), strict=True):
    np.testing.assert_allclose(ours, xla, atol=1e-5)


def _plain(q, k, v, first_key):
  keys = jnp.arange(q.shape[1])
  seen = (first_key[:, :, None] <= keys) & (keys <= keys[:, None])
  return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=q.shape[3] ** -0.5)


@pytest.mark.parametrize(
  "heads, shape, acts",
  [
    ((6, 2), (1, 1, 2), dict(H="tensor", G="tensor")),
    ((8, 2), (2, 1, 4), dict(B="data", H="tensor")),
    pytest.param((12, 4), (1, 1, 3), dict(H="tensor"), marks=pytest.mark.slow),
    ((8, 2), (1, 2, 2), dict(H=("fsdp", "tensor"))),
    ((8, 2), (1, 1, 2), dict(G="tensor")),
    ((8, 4), (1, 2, 2), dict(H=("tensor", "fsdp"), G="fsdp")),
    pytest.param((6, 3), (1, 2, 1), dict(B="fsdp"), marks=pytest.mark.slow),
  ],
  ids=["keys with their queries", "one key head for all queries", "a key head per query",
       "two axes", "keys alone", "keys elsewhere", "sequences"],
)  # fmt: skip
def test_a_device_has_the_keys_of_its_own_queries(rng, monkeypatch, heads, shape, acts):
  seen, plain = [], attention_lib._of_jax

  def of_jax(implementation, q, *args):
    """cuDNN's on a CPU, with the heads that it is given."""
    seen.extend([q.shape[2]] if implementation == "cudnn" else ())
    return plain("xla", q, *args)

  monkeypatch.setattr(attention_lib, "_tokamax", _plain)
  monkeypatch.setattr(attention_lib, "_of_jax", of_jax)
  devices = jax.devices()[: shape[0] * shape[1] * shape[2]]
  layout = axes.Layout(mesh.make(shape, devices), (), axes.as_rules(acts))
  q, g, k, v = (
    rng.standard_normal((B, L, n, K)).astype(np.float32) for n in (heads[0], *heads, heads[1])
  )
  segments = jnp.array([[1] * 7 + [2] + [3] * 12 + [0] * 4, [1] * 24], jnp.int32)

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def run(by, where, *arrays):
    out, pull = jax.vjp(lambda *of: attention(*of, segments, by, where), *arrays)
    return out, *pull(jnp.asarray(g))

  want, shards = run("xla", axes.LOCAL, q, k, v), layout.size(layout.act_axes("H"))
  np.testing.assert_allclose(want[0], _loops(q, k, v, segments), atol=1e-5)
  for by in ("tokamax", "cudnn"):
    for ours, one_device in zip(run(by, layout, q, k, v), want, strict=True):
      np.testing.assert_allclose(ours, one_device, atol=1e-5)
  is_alike = layout.act_axes("H") == layout.act_axes("G")  # XLA's partitioner splits those
  assert seen == [heads[0] if is_alike else heads[0] // shards]


@pytest.mark.parametrize("heads, keys, shards, want", [
  (8, 4, 2, [[0, 1], [2, 3]]), (8, 2, 4, [[0], [0], [1], [1]]), (6, 2, 2, [[0], [1]]),
  (12, 4, 3, [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]]), (4, 1, 2, [[0], [0]]),
  (8, 8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]), (4, 2, 1, [[0, 1]]),
])  # fmt: skip
def test_keys_of_a_devices_queries_are_those_of_their_groups(heads, keys, shards, want):
  layout = axes.Layout(mesh.make((1, 1, shards), jax.devices()[:shards]), (),
                       axes.as_rules(dict(H="tensor")))  # fmt: skip
  cfg = dataclasses.replace(presets.DEBUG, num_heads=heads, num_kv_heads=keys)
  asked = attention_gqa.problem(cfg, ComputeConfig(layout=layout), Device("cpu"), 6, 64, True)
  assert (asked.sequences, asked.num_heads, asked.num_kv_heads) == (
    6, heads // shards, len(want[0])
  )  # fmt: skip
  taken = jax.shard_map(
    lambda x: attention_lib.keys_of_queries(x, 0, heads // shards, layout), mesh=layout.mesh,
    in_specs=jax.sharding.PartitionSpec(), out_specs=layout.act_spec("H"), check_vma=False,
  )(jnp.arange(keys))  # fmt: skip
  assert taken.reshape(shards, -1).tolist() == want


def test_inside_a_region_queries_and_keys_are_the_devices_own(rng):
  layout = axes.Layout(mesh.make((1, 1, 2), jax.devices()[:2]), (),
                       axes.as_rules(dict(H="tensor"))).manual()  # fmt: skip
  q, k, v = (rng.standard_normal((B, L, n, K)).astype(np.float32) for n in (3, 1, 1))
  got = attention(q, k, v, None, "fixed_order", layout)
  np.testing.assert_allclose(got, _loops(q, k, v, None), atol=1e-5)
