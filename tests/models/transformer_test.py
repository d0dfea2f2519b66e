"""The decoder against float64 NumPy, and what it promises about documents, time and memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import oracle
import pytest
import tolerances
from jax.extend import core as jex_core

from configs import base
from fp8jax import params as params_lib
from fp8jax.config import resolve
from fp8jax.kernels.choose import Device
from fp8jax.models import rope, transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops import elementwise, site_tree
from fp8jax.quantization import tensor_stats
from fp8jax.step import train_step

# Sizes that differ from one another; the widths hold no whole number of scale tiles.
LLAMA = ModelConfig(
  architecture="llama", vocab_size=96, hidden_size=72, intermediate_size=144, num_layers=3,
  num_heads=6, num_kv_heads=2, head_dim=16, max_positions=64, init_std=0.15,
)  # fmt: skip
MODELS = {
  "llama": LLAMA,
  "qwen2": dataclasses.replace(LLAMA, architecture="qwen2", qkv_bias=True, tie_embeddings=True),
  "qwen3": dataclasses.replace(LLAMA, architecture="qwen3", qk_norm=True, num_kv_heads=6),
}
RUN = ComputeConfig(loss_chunk=10)
LENGTH = 32
# Two rows of documents, by length; what they leave of a row is padding.
DOCUMENTS = ((5, 1, 20), (32,))
# Directional derivatives in float32, relative to the norm of the gradient.
GRADIENT = 1e-5
# Logits in FP8 against its emulation, as tolerances.difference: room for a few values so near to a
# rounding boundary that float32 and float64 fall on different sides.
EMULATION = 1e-5


# letters, initial values, how many leading letters a GEMM contracts; vectors do not decay.
DECLARED = {
  "embed": ("VD", 0.15, None), "norm": ("D", "ones", None),
  "layers/attn/norm": ("ND", "ones", None), "layers/attn/q": ("NDHK", 0.15, 1),
  "layers/attn/k": ("NDGK", 0.15, 1), "layers/attn/v": ("NDGK", 0.15, 1),
  "layers/attn/o": ("NHKD", 0.15 / 6**0.5, 2), "layers/mlp/norm": ("ND", "ones", None),
  "layers/mlp/gate": ("NDF", 0.15, 1), "layers/mlp/up": ("NDF", 0.15, 1),
  "layers/mlp/down": ("NFD", 0.15 / 6**0.5, 1),
}  # fmt: skip
OF_MODEL = {
  "llama": {"head": ("DV", 0.15, 1)},
  "qwen2": {f"layers/attn/{x}_bias": (f"N{h}K", "zeros", None) for x, h in zip("qkv", "HGG")},
  "qwen3": {"head": ("DV", 0.15, 1),
            **{f"layers/attn/{x}_norm": ("NK", "ones", None) for x in "qk"}},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_begin_and_decay_as_published(name):
  """GPT-2's: what a residual stream of 2 x 3 blocks adds up begins with 1 / sqrt(6) of the rest."""
  declared = params_lib.flatten(transformer.params(MODELS[name]))
  assert declared.keys() == DECLARED.keys() | OF_MODEL[name].keys()
  for path, (letters, init, inputs) in (DECLARED | OF_MODEL[name]).items():
    one = declared[path]
    assert (one.letters, one.inputs, one.trainable) == (letters, inputs, True), path
    assert one.decay == (not isinstance(init, str)), path
    assert one.init == (init if isinstance(init, str) else "normal"), path
    assert isinstance(init, str) or one.std == pytest.approx(init, rel=1e-12), path


def _batch(rng, cfg, documents=DOCUMENTS, length=LENGTH):
  """Random tokens, packed; padding is a document of its own whose targets do not count."""
  segments = np.zeros((len(documents), length), np.int32)
  positions = np.zeros_like(segments)
  for row, lengths in enumerate(documents):
    start = 0
    for number, n in enumerate((*lengths, length - sum(lengths)), 1):
      segments[row, start : start + n] = number if number <= len(lengths) else 0
      positions[row, start : start + n] = np.arange(n)
      start += n
  tokens, targets = rng.integers(0, cfg.vocab_size, (2, *segments.shape))
  return {
    "tokens_BL": tokens.astype(np.int32),
    "targets_BL": targets.astype(np.int32),
    "weights_BL": ((segments > 0) * rng.uniform(0.5, 2, segments.shape)).astype(np.float32),
    "positions_BL": positions,
    "segments_BL": segments,
  }


def _weights(rng, cfg):
  """Every parameter random, those that start at one or zero as well."""

  def one(p):
    noise = rng.standard_normal(params_lib.shape(p, cfg.dims))
    start = {"ones": 1.0, "zeros": 0.0, "normal": 0.0}[p.init]
    return (start + (p.std if p.init == "normal" else 0.3) * noise).astype(np.float32)

  return params_lib.tree_map(one, transformer.params(cfg))


def _sites(cfg, recipe="bf16", statistics=tensor_stats.QUIET):
  """Everything in one recipe, head included."""
  rules = ((".*", recipe),)
  return site_tree.build_sites(transformer.site_params(cfg), cfg.dims, rules, statistics=statistics)


@functools.cache
def _jitted_logits(cfg, run=RUN):
  return jax.jit(lambda w, s, b: transformer.logits(w, s, b, cfg, run))


@functools.cache
def _loss_and_gradients(cfg):
  """(weights, sites, batch) -> mean loss, (gradients, what every site saw)."""

  def mean(weights, taps, sites, batch):
    seen_by = site_tree.with_taps(sites, taps)
    return transformer.loss(weights, seen_by, batch, cfg, RUN) / batch["weights_BL"].sum()

  def both(weights, sites, batch):
    return jax.value_and_grad(mean, argnums=(0, 1))(weights, site_tree.taps(sites), sites, batch)

  return jax.jit(both)


def _logits(cfg, weights, batch, recipe="bf16", run=RUN):
  return np.asarray(_jitted_logits(cfg, run)(weights, _sites(cfg, recipe), batch))


@pytest.mark.parametrize("name, documents", [
  # Slow: what a mask lets through is no matter of the model.
  *((name, "apart") for name in MODELS), ("llama", "together"),
  *(pytest.param(n, "together", marks=pytest.mark.slow) for n in ("qwen2", "qwen3")),
])  # fmt: skip
def test_logits_equal_float64(rng, name, documents):
  cfg = MODELS[name]
  weights, batch = _weights(rng, cfg), _batch(rng, cfg)
  if documents == "together":  # attention crosses from one to the next
    del batch["segments_BL"]
  got, want = _logits(cfg, weights, batch), numpy_model.logits(cfg, weights, batch)
  assert np.max(np.abs(got - want)) < tolerances.LOGITS_TINY


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "qwen3")) for n in MODELS]
)
def test_loss_and_gradient_equal_float64(rng, name):
  """The gradient by central differences of the float64 loss, along one direction per parameter."""
  cfg = MODELS[name]
  weights, batch = _weights(rng, cfg), _batch(rng, cfg)
  value, (gradient, _) = _loss_and_gradients(cfg)(weights, _sites(cfg), batch)
  np.testing.assert_allclose(
    value, numpy_model.loss(cfg, weights, batch), rtol=tolerances.FLOAT32_SUM
  )
  flat = params_lib.flatten(jax.tree.map(np.float64, weights))
  for path, g in params_lib.flatten(gradient).items():
    direction = rng.standard_normal(g.shape)

    def moved(by, path=path, direction=direction):
      changed = {**flat, path: flat[path] + by * direction}
      return numpy_model.loss(cfg, params_lib.unflatten(changed), batch)

    want = (moved(1e-5) - moved(-1e-5)) / 2e-5
    got = np.sum(np.float64(g) * direction)
    assert abs(got - want) < GRADIENT * np.linalg.norm(g), path


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[pytest.mark.slow] if i else []) for i, n in enumerate(MODELS)]
)
def test_every_site_watches_its_own_weight_once(rng, name):
  """A site used by two GEMMs would add their observations; one that none uses would see zero."""
  cfg = MODELS[name]
  weights, batch = _weights(rng, cfg), _batch(rng, cfg)
  sites = _sites(cfg, statistics=tensor_stats.LOUD)
  _, (_, seen) = _loss_and_gradients(cfg)(weights, sites, batch)
  flat, found = params_lib.flatten(weights), site_tree.by_name(sites, seen)
  assert len(found) == 8
  for path, one in found.items():
    weight = flat["embed" if path == "head" and cfg.tie_embeddings else path]
    by_layer = weight.reshape(*one.shape[:-2], -1)
    np.testing.assert_array_equal(one[..., 1, 0], np.abs(by_layer).max(-1), path)
    assert np.all(one[..., 0] > 0), path


def test_logits_in_fp8_equal_an_emulation(rng):
  """Layers in block_128, head in bf16: the default rules, quantised by tests/oracle.py."""
  cfg = MODELS["llama"]
  weights, batch = _weights(rng, cfg), _batch(rng, cfg)
  rules = (("head", "bf16"), (".*", "block_128"))
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, rules)
  got = _jitted_logits(cfg)(weights, sites, batch)
  want = numpy_model.logits(cfg, weights, batch, _product_in_blocks)
  assert tolerances.difference(got, want) < EMULATION
  assert tolerances.difference(numpy_model.logits(cfg, weights, batch), want) > 100 * EMULATION


def test_channel_scales_are_those_of_the_linear_branch(rng):
  """Powers of two from 1 to 2 times the largest |up| of a channel over all tokens, in float64."""
  cfg, products = MODELS["llama"], []
  weights, batch = _weights(rng, cfg), _batch(rng, cfg)

  def product(x, w):
    products.append(numpy_model.plain(x, w))
    return products[-1]

  numpy_model.logits(cfg, weights, batch, product)
  amax_NF = np.abs(products[5::7]).max((1, 2))  # q, k, v, o, gate, up, down
  look = jax.jit(lambda w, s, b, now: transformer.hidden_and_aux(w, s, b, cfg, RUN, now)[1].states)
  s_NF = np.asarray(look(weights, _sites(cfg), batch, {"mlp": None})["mlp"])
  np.testing.assert_array_equal(
    look(weights, _sites(cfg), batch, {"mlp": 4 * s_NF})["mlp"], 4 * s_NF
  )
  assert np.all(np.frexp(s_NF)[0] == 0.5) and len(np.unique(s_NF)) > 2
  assert np.all((0.499 * s_NF < amax_NF) & (amax_NF < 1.001 * s_NF))


def _product_in_blocks(x, w):
  """[..., in] . [in, ...] with 1x128 tiles of x and 128x128 tiles of w."""
  a = oracle.fake_quantize(x.reshape(-1, x.shape[-1]), "e4m3", (1, 128), False)
  b = oracle.fake_quantize(w.reshape(len(w), -1), "e4m3", (128, 128), False)
  return (a @ b).reshape(*x.shape[:-1], *w.shape[1:])


def test_packed_documents_equal_separate_documents(rng):
  cfg = MODELS["llama"]
  weights, packed = _weights(rng, cfg), _batch(rng, cfg)
  places = [slice(0, 5), slice(6, 26)]  # of the long documents of the first row
  alone = _batch(rng, cfg, [(5,), (20,)])
  for row, place in enumerate(places):
    tokens = packed["tokens_BL"][0, place]
    alone["tokens_BL"][row, : len(tokens)] = tokens
  together, apart = _logits(cfg, weights, packed)[0], _logits(cfg, weights, alone)
  for row, place in enumerate(places):
    want = together[place]
    assert np.max(np.abs(apart[row, : len(want)] - want)) < tolerances.LOGITS_TINY


@pytest.mark.parametrize(
  "recipe, dtype, is_private",
  [
    # Slow: the dtype and the recipe that the cases beside it have.
    pytest.param("bf16", "bfloat16", True, marks=pytest.mark.slow),
    ("bf16", "float32", True),
    ("block_128", "bfloat16", True),
    ("block_128_pow2", "float32", True),
    ("tensor_current", "float32", False),  # every token has a say in a whole tensor's scale
  ],
)
def test_logits_depend_on_no_later_token_and_no_other_document(rng, recipe, dtype, is_private):
  """Bit for bit."""
  cfg, run = MODELS["llama"], dataclasses.replace(RUN, dtype=jnp.dtype(dtype))
  weights, batch = _weights(rng, cfg), _batch(rng, cfg)
  before = _logits(cfg, weights, batch, recipe, run)
  row, document, now = 0, 3, 15
  others = (batch["segments_BL"] != document) | (np.arange(LENGTH) > now)
  others[1 - row] = True
  tokens = np.where(others, (batch["tokens_BL"] + 7) % cfg.vocab_size, batch["tokens_BL"])
  changed = {**batch, "tokens_BL": tokens.astype(np.int32)}
  after = _logits(cfg, weights, changed, recipe, run)
  assert not others[row, 6:16].any() and (~others).sum() == 10
  assert np.array_equal(after[~others], before[~others]) == is_private
  assert not np.any(np.all(after[row, now + 1 :] == before[row, now + 1 :], axis=-1))


def test_padding_changes_neither_loss_nor_gradient(rng):
  """Bit for bit, whatever its tokens and targets are."""
  cfg = MODELS["llama"]
  weights, batch = _weights(rng, cfg), _batch(rng, cfg)
  is_padding = batch["weights_BL"] == 0
  assert is_padding.sum() == 6
  other = (batch["tokens_BL"] + 1) % cfg.vocab_size
  tokens = np.where(is_padding, other, batch["tokens_BL"]).astype(np.int32)
  targets = np.where(is_padding, -1, batch["targets_BL"]).astype(np.int32)
  changed = {**batch, "tokens_BL": tokens, "targets_BL": targets}
  (before, (want, _)), (after, (got, _)) = (
    _loss_and_gradients(cfg)(weights, _sites(cfg), b) for b in (batch, changed)
  )
  assert after == before
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_array_equal(a, b)


def test_dtypes_are_wide_where_it_matters(rng):
  """Activations in the compute dtype; logits, loss and gradients of the masters in float32."""
  cfg, run = MODELS["qwen3"], ComputeConfig(dtype=jnp.dtype(jnp.bfloat16))
  weights, batch, sites = _weights(rng, cfg), _batch(rng, cfg), _sites(cfg, "block_128")

  def dtypes(fn):
    made = jax.eval_shape(lambda w, s, b: fn(w, s, b, cfg, run), weights, sites, batch)
    return {x.dtype for x in jax.tree.leaves(made)}

  assert dtypes(transformer.hidden) == {run.dtype}
  assert dtypes(transformer.logits) == dtypes(transformer.loss) == {jnp.dtype(jnp.float32)}
  assert dtypes(jax.grad(transformer.loss)) == {jnp.dtype(jnp.float32)}


def test_small_operations_round_once(rng):
  """With bfloat16 in and out, each is the float64 result, rounded, but for ties float32 moves."""
  x, y = (rng.standard_normal((2, 16, 6, 32)).astype(jnp.bfloat16) for _ in range(2))
  weight = rng.standard_normal(32).astype(np.float32)
  positions = np.tile(np.arange(16), (2, 1))
  angles = rope.cos_sin(jnp.asarray(positions), dataclasses.replace(LLAMA, head_dim=32))
  a, b = np.float64(x), np.float64(y)
  for got, want in (
    (elementwise.rms_norm(x, weight, 1e-6), numpy_model.rms_norm(a, np.float64(weight), 1e-6)),
    (elementwise.silu_mul(x, y), a / (1 + np.exp(-a)) * b),
    (elementwise.rotate(jnp.asarray(x), *angles), numpy_model.rotate(a, positions, 1e4)),
  ):
    assert got.dtype == jnp.bfloat16
    assert np.mean(np.asarray(got) != want.astype(jnp.bfloat16)) < 1e-3


# --- memory --------------------------------------------------------------------------------------


def _shapes(jaxpr):
  """Shape of every value of a program, also inside calls."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.shape for v in eqn.outvars if hasattr(v.aval, "shape"))
    for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
      inner = getattr(value, "jaxpr", value)
      if isinstance(inner, jex_core.Jaxpr):
        yield from _shapes(inner)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_train_step_never_holds_all_logits(remat):
  c = base.get_config()
  c.global_batch, c.seq_len, c.memory.loss_chunk, c.memory.remat_policy = 6, 96, 32, remat
  spec = resolve.resolve(c, 1, Device("cpu"))
  batch = {
    f"{name}_BL": jax.ShapeDtypeStruct((c.global_batch, c.seq_len), jnp.int32)
    for name in ("tokens", "targets", "positions", "segments")
  }
  batch["weights_BL"] = jax.ShapeDtypeStruct((c.global_batch, c.seq_len), jnp.float32)
  state = train_step.abstract_state(spec)
  step = jax.make_jaxpr(train_step.make_step(spec))(state, batch, spec.sites())
  size = spec.model.vocab_size
  found = {shape for shape in _shapes(step.jaxpr) if size in shape}
  assert (c.global_batch, 32, size) in found  # one chunk
  assert max(map(np.prod, found)) < c.global_batch * c.seq_len * size, sorted(found)
