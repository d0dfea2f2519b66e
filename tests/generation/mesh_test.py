"""Generation on eight fake devices: the tokens and log-probabilities of one device."""

import dataclasses
import functools
import math
import pathlib
import re

import case_inputs
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fp8jax import axes, mesh
from fp8jax import params as params_lib
from fp8jax.config import resolve
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import ConfigError, UserError
from fp8jax.generation import api, checks, sampling
from fp8jax.generation.settings import Sampling
from fp8jax.jobs import table
from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig
from fp8jax.ops import site_tree
from fp8jax.quantization.stored_matrix import StoredMatrix

SLOW = pytest.mark.slow
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "hf"
# Queries share keys in pairs; of every matrix each of two devices has whole tiles of 128.
CFG = dataclasses.replace(
  harness.TINY, intermediate_size=256, num_kv_heads=2, init_std=0.1, max_positions=64
)
TABLES = tuple(axes.as_rules(t) for t in (base.get_config().sharding.weights,
                                          base.get_config().sharding.acts))  # fmt: skip
GREEDY = Sampling(max_new_tokens=5)
DRAWN = Sampling(temperature=0.9, top_p=0.95, top_k=40, max_new_tokens=5)


# The head is not the embedding, of which a row may be damaged.
UNTIED = dataclasses.replace(CFG, tie_embeddings=False)


@functools.cache
def _params(nudges=0, cfg=CFG):
  made = jax.device_get(harness.init_params(cfg, 1))
  rng = np.random.default_rng(nudges)
  size = 1e-7 * bool(nudges)
  return jax.tree.map(
    lambda x: jnp.asarray(x * np.float32(1 + size * rng.standard_normal(x.shape))), made
  )


def _placed(params, layout, cfg=CFG):
  return jax.device_put(params, params_lib.shardings(transformer.params(cfg), layout))


@functools.cache
def _generator(recipe, shape=None, cfg=CFG, has_all_keys=False, **options):
  """As in training: parameters lie where mesh.fsdp has them too."""
  tables = [axes.as_rules(dict(t) | {"G": ()}) for t in TABLES] if has_all_keys else TABLES
  layout = axes.Layout(mesh.make(shape), *tables) if shape else axes.LOCAL
  rules = ((".*", recipe),)
  keeps_values = options.get("weight_form") == "values"
  backends = site_tree.Backends("dequantized" if keeps_values else "auto")
  declaration = transformer.site_params(cfg)
  sites = site_tree.build_sites(declaration, cfg.dims, rules, layout, backends=backends)
  params = _placed(_params(cfg=cfg), layout, cfg) if shape else _params(cfg=cfg)
  run = ComputeConfig(layout=layout)
  return api.Generator(params, sites, cfg, run, Tokenizer("bytes"), [10**6], slots=5,
                       max_length=32, **options), sites  # fmt: skip


def _prompts(lengths=(3, 11, 7, 2, 9, 5, 4, 13, 6)):
  rng = np.random.default_rng(0)
  return [rng.integers(0, 256, n).tolist() for n in lengths]


def _scores(generator):
  prompts = _prompts()
  return np.array([s for s, _ in generator.score([(p[:1], p[1:]) for p in prompts])])


def _tokens(generator, how=GREEDY, lengths=(3, 11, 7, 2, 9, 5, 4, 13, 6)):
  return [c.tokens for [c] in generator.generate(_prompts(lengths), how)]


@pytest.mark.parametrize(
  "recipe, shape, options",
  [
    ("block_128", (2, 2, 2), {}),
    pytest.param("bf16", (2, 2, 2), {}, marks=SLOW),
    pytest.param("bf16", (4, 1, 2), {"cache_format": "e4m3"}, marks=SLOW),
    pytest.param("rowwise", (1, 4, 2), {"cache_format": "e4m3_rotated"}, marks=SLOW),
    pytest.param("mxfp8", (8, 1, 1), {}, marks=SLOW),
    pytest.param("mxfp8", (2, 2, 2), {"weight_form": "values"}, marks=SLOW),
    pytest.param("w4a16", (2, 2, 2), {}, marks=SLOW),
  ],
)
def test_a_mesh_gives_the_tokens_and_scores_of_one_device(recipe, shape, options):
  """Nine prompts, and five slots: neither is a multiple of the devices that have rows.

  Of float32 sums in another order change the last bits; of few bits the budget is what weights
  change that are off by 1e-7 (step/invariance_test.py).
  """
  one, sites = _generator(recipe, None, **options)
  many, _ = _generator(recipe, shape, **options)
  assert _tokens(many) == _tokens(one)
  want, got = _scores(one), _scores(many)
  budget = 1e-6 * np.abs(want).max()
  if recipe != "bf16":
    for n in (1, 2, 3):
      one.take(_params(n), sites)
      budget = max(budget, np.abs(_scores(one) - want).max())
    one.take(_params(), sites)
  assert np.abs(got - want).max() <= budget
  assert (want < -1).all()

  # Codes lie with their scales, half of a matrix on a device; the cache by rows and heads.
  rows, heads = shape[0] * shape[1], shape[2]
  layers, engine = many._engine.weights[0]["layers"][0], many._engine
  for w in (layers["attn"]["o"], layers["mlp"]["up"]):
    leaves = jax.tree.leaves(w)
    assert isinstance(w, StoredMatrix) == (recipe != "bf16")
    assert math.prod(leaves[0].sharding.shard_shape(leaves[0].shape)) * heads == leaves[0].size
  slots = engine._empty(length=32)
  for x in jax.tree.leaves(slots.cache):
    assert math.prod(x.sharding.shard_shape(x.shape)) * rows * heads == x.size
  assert engine.rows == -(-5 // rows) * rows


@SLOW  # layouts below; keys of a device: ops/attention_test.py
@pytest.mark.parametrize("shape, options", [((2, 1, 4), {"cache_format": "e4m3"}), ((1, 4, 2), {})])
def test_more_devices_than_key_heads_each_have_all_keys(shape, options):
  """Queries of four heads and keys of two; a device of four reads one head of keys, of two one."""
  one, _ = _generator("bf16", None, **options)
  many, _ = _generator("bf16", shape, has_all_keys=True, **options)
  assert _tokens(many) == _tokens(one)
  assert np.abs(_scores(many) - _scores(one)).max() <= 1e-6 * np.abs(_scores(one)).max()


def test_a_folder_is_split_over_more_devices_than_it_has_key_heads():
  table = {n: api._layout(2, 4, n).act_axes("G") for n in (1, 2, 4, 6, 8)}
  assert table == {1: (), 2: (), 4: ("tensor",), 6: (), 8: ("tensor",)}
  assert api._layout(2, 4, 2).weight_axes("G") == () and api._layout(1, 1, 3) == axes.LOCAL


@SLOW
def test_draws_and_buckets_on_a_mesh_are_those_of_one_device():
  lengths = (3, 20, 5, 18, 7, 2, 9, 17, 4)  # two buckets, in turn
  (one, _), (many, _) = _generator("bf16"), _generator("bf16", (2, 2, 2))
  assert _tokens(many, DRAWN, lengths) == _tokens(one, DRAWN, lengths)
  assert len({*_tokens(one, DRAWN, lengths)}) == len(lengths)


@SLOW
def test_a_slot_of_a_mesh_forgets_logits_that_are_not_finite():
  many, sites = _generator("bf16", (2, 2, 2), cfg=UNTIED)
  want, sound = _tokens(many), _params(cfg=UNTIED)
  bad = {**sound, "embed": sound["embed"].at[300].set(jnp.nan)}
  many.take(_placed(bad, sites["head"].layout, UNTIED), sites)
  found = many.generate([[7, 300], [300] * 9, *_prompts(), [5, 300]], GREEDY)
  ends = [c.finish_reason for [c] in found]
  assert ends[:2] == ["error"] * 2 and ends[-1] == "error"
  assert [c.tokens for [c] in found[2:-1]] == want


@SLOW
def test_nothing_of_the_cache_or_of_weights_travels_in_a_decoding_step():
  """What is sent is sums of [rows, hidden], logits of own rows, and tokens."""
  engine = _generator("block_128", (2, 2, 2))[0]._engine
  slots, method = engine._empty(length=32), sampling.method_of(DRAWN)
  lowered = engine._decode.lower(*engine.weights, slots, *np.float32([1, 1]), method=method)
  kinds = r"= (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|all-to-all|collective-permute)\("
  sent = re.findall(kinds, lowered.compile().as_text())
  sizes = [math.prod(map(int, filter(None, dims.split(",")))) for _, dims, _ in sent]
  assert sizes and max(sizes) == CFG.vocab_size * engine.rows // 4
  assert not any(dtype.startswith(("f8", "u8")) for dtype, _, _ in sent)


def test_a_configuration_generates_on_its_mesh_without_the_batches_of_training():
  """Seven sequences of training, and a width that eight devices do not divide for storage."""
  c = harness.tiny_config("block_128", global_batch=7)
  c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 2, 2, 2
  with pytest.raises(ConfigError, match="global_batch=7 must be a multiple"):
    resolve.resolve(c, 8, harness.CPU)
  for job, tasks in (("generate", ""), ("evaluate", "tasks.json")):
    c.eval.tasks = tasks
    needs = dataclasses.replace(table.JOBS[job].needs, problems=lambda c: [])
    layout = resolve.resolve(c, 8, harness.CPU, needs=needs).run.layout
    assert layout.mesh.size == 8 and layout.weights == layout.acts
  c.mesh.data, c.mesh.tensor = 1, 4
  c.model.intermediate_size = 256
  with pytest.raises(ConfigError, match="mlp/up, output F: 256 over 4 devices is 64 per device"):
    resolve.resolve(c, 8, harness.CPU, needs=table.JOBS["generate"].needs)


def test_what_a_mesh_cannot_generate_is_refused(monkeypatch):
  apart = axes.as_rules(dict(TABLES[1]) | {"G": ("fsdp",), "B": ()})
  layout = axes.Layout(mesh.make((1, 4, 2)), apart, apart)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  heads, processes = checks.of_model(CFG, ComputeConfig(layout=layout))
  assert "sharding.acts.H=('tensor',) and sharding.acts.G=('fsdp',): the cache" in heads
  assert "or set sharding.acts.G=''" in heads
  assert processes.startswith("2 processes: prompts are read") and "start one process" in processes
  monkeypatch.undo()
  folder = str(GOLDEN / "llama")
  with pytest.raises(UserError, match="data=3, tensor=1 are 3 devices, and there are 8: give"):
    api.load(folder, data=3)
  with pytest.raises(
    UserError, match="attn/o, .* blocks of 64 .* contracts 16 .* smaller `tensor`, or"
  ):
    api.load(folder, recipe="halo_int8_2", data=4, tensor=2)
  with pytest.raises(UserError, match="num_heads = 4 .* 8 devices; give a smaller `tensor`"):
    api.load(folder, tensor=8)


@SLOW
def test_a_folder_is_loaded_onto_a_mesh(tmp_path):
  folder, made, prompts = str(case_inputs.model_folder(tmp_path / "m")), [], _prompts()
  for options in ({}, dict(data=4, tensor=2)):
    generator = api.load(folder, max_length=32, **options)
    made.append([c.tokens for [c] in generator.generate(prompts, GREEDY)])
  assert made[0] == made[1]
