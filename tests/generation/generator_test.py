"""Completions and scores against transformers, and against one another in other company."""

import copy
import dataclasses
import functools
import json
import pathlib
import re
import shutil
import types

import case_inputs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances

from fp8jax import params as params_lib
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError
from fp8jax.generation import api, batching, cache, decode, sampling, weights
from fp8jax.generation.settings import Sampling
from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site_tree
from fp8jax.quantization.stored_matrix import StoredMatrix

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
SMOLLM2 = pathlib.Path(__file__).resolve().parents[2] / "assets" / "smollm2-135m"
RUN = ComputeConfig()
# A token that the tiny models' bytes do not have.
NEVER = 10**6
# E4M3 keys and values against float32 ones, as tolerances.difference of all logits.
E4M3_CACHE = 2e-3


@functools.cache
def _model(name):
  folder = GOLDEN / "hf" / name
  cfg = hf_config.read_config(str(folder))
  return cfg, hf_weights.load_params(str(folder), cfg)[0], np.load(folder / "logits.npz")


def _sites(cfg, *rules, matmul="auto"):
  declaration, rules = transformer.site_params(cfg), rules or ((".*", "bf16"),)
  backends = site_tree.Backends(matmul)
  return site_tree.build_sites(declaration, cfg.dims, rules, backends=backends)


@functools.cache
def _generator(rules=(), **options):
  cfg, params, _ = _model("llama")
  options = {"end_ids": (NEVER,), "slots": 3, "max_length": 48} | options
  return api.Generator(params, _sites(cfg, *rules), cfg, RUN, Tokenizer("bytes"), **options)


def _prompts(rng, lengths, vocab=96):
  return [rng.integers(0, vocab, n).tolist() for n in lengths]


@pytest.mark.slow  # its logits: models/hf_test.py; a cache: below
@pytest.mark.parametrize("count, new_tokens", [(4, 8), (64, 32)])
def test_greedy_tokens_of_smollm2_equal_transformers(count, new_tokens):
  """Those of smollm2_generations.json; near ties may differ, and end a comparison."""
  if not SMOLLM2.exists():
    pytest.fail(f"{SMOLLM2} is missing; `make test` fetches it")
  rows = json.loads((GOLDEN / "smollm2_generations.json").read_text())["rows"][:count]
  generator = api.load(str(SMOLLM2), slots=min(count, 8))
  sampling = Sampling(max_new_tokens=new_tokens)
  found = generator.generate([row["prompt"] for row in rows], sampling, num_samples=2)
  for row, [completion, again] in zip(rows, found, strict=True):
    assert again == completion
    near = {tie["position"] for tie in row["near"]}
    for position, (ours, theirs) in enumerate(zip(completion.tokens, row["tokens"])):
      if ours != theirs:
        assert position in near, (row["prompt"], position)
        break
    else:
      assert len(completion.tokens) == min(len(row["tokens"]), new_tokens)


def _forced_logits(cfg, params, sites, tokens_BL, lengths, format_="compute"):
  """float32 [B, L, V]: logits after each prefix, prompts of these lengths prefilled together."""
  num_rows, length = tokens_BL.shape
  width, lengths = max(lengths), np.asarray(lengths, np.int32)
  slots = decode.Slots.empty(cfg, num_rows, length, format_, RUN.dtype)
  prompts = dict(
    tokens_RL=np.where(np.arange(width) < lengths[:, None], tokens_BL[:, :width], 7),
    lengths_R=lengths, rows_R=np.arange(num_rows)[::-1].copy(), seeds_R=np.zeros(num_rows, "u4"),
  )  # fmt: skip
  method = sampling.method_of(Sampling())
  fill = jax.jit(functools.partial(decode.prefill, method=method, cfg=cfg, run=RUN))
  step = jax.jit(functools.partial(decode.next_logits, cfg=cfg, run=RUN))
  slots, _ = fill(params, sites, slots, prompts, 1.0, 1.0)
  found = np.full((num_rows, length, cfg.vocab_size), np.nan, np.float32)
  for n in range(length - min(lengths)):
    positions = np.minimum(lengths + n, length - 1)[::-1]
    rows = np.arange(num_rows)[::-1]
    forced = jnp.asarray(tokens_BL[rows, positions])
    slots = dataclasses.replace(slots, tokens_B=forced, positions_B=jnp.asarray(positions))
    logits_BV, cache = step(params, sites, slots)
    slots = dataclasses.replace(slots, cache=cache)
    found[rows, positions] = logits_BV
  return found


# The others in `make test-all`.
SLOW = pytest.mark.slow
NAMES = ["qwen2", "llama_tied", "qwen3", "llama_llama3"]


@pytest.mark.parametrize(
  "name", [n if n == "llama_tied" else pytest.param(n, marks=SLOW) for n in NAMES]
)
def test_logits_over_a_cache_equal_transformers(name):
  cfg, params, golden = _model(name)
  lengths = (5, 17)
  got = _forced_logits(cfg, params, _sites(cfg), golden["tokens"], lengths)
  for row, length in enumerate(lengths):
    wrong = np.abs(got[row, length:] - golden["logits"][row, length:]).max()
    assert wrong < tolerances.LOGITS_TINY


# Slow: the rotated cache is one of these, and more; scales of entries have a test of their own.
@pytest.mark.parametrize("format_", [pytest.param("e4m3", marks=pytest.mark.slow), "e4m3_rotated"])
def test_logits_over_an_e4m3_cache_lie_within_its_bound(format_):
  cfg, params, golden = _model("qwen3")
  got = _forced_logits(cfg, params, _sites(cfg), golden["tokens"], (1, 1), format_)[:, 1:]
  off = tolerances.difference(got, golden["logits"][:, 1:])
  assert 1e-6 < off < E4M3_CACHE


def test_rotation_halves_the_error_of_channels_that_are_large_in_queries_and_keys(rng):
  """Not that of one channel alone: the largest of a head has no error, being what scales it."""
  cfg = dataclasses.replace(_model("llama")[0], num_heads=4, num_kv_heads=2, head_dim=128)
  positions = np.tile(np.arange(40), (2, 1))

  @functools.partial(jax.jit, static_argnums=0)
  def attend(format_, q, k, v):
    made = cache.KVCache.zeros(cfg, 2, 40, format_, jnp.float32)
    return jax.tree.map(lambda x: x[0], made).attend(q, k, v, positions, "xla")[0]

  def errors(channels):
    q, k = (rng.standard_normal((2, 40, heads, 128)).astype(np.float32) for heads in (4, 2))
    q[..., :channels], k[..., :channels] = 8 * q[..., :channels], 8 * k[..., :channels]
    v = rng.integers(-1, 2, k.shape).astype(np.float32)  # E4M3 numbers under their scale
    exact, *got = (attend(f, q, k, v) for f in ("compute", "e4m3", "e4m3_rotated"))
    return [np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in got]

  plain, rotated = errors(4)
  assert 1e-2 < rotated < plain / 2
  plain, rotated = errors(1)
  assert 1e-3 < plain < rotated


@pytest.mark.parametrize("format_", ["compute", "e4m3", "e4m3_rotated"])
def test_bytes_per_token_are_those_of_the_cache(format_):
  cfg, _, _ = _model("llama")
  made = cache.KVCache.zeros(cfg, 3, 5, format_, jnp.bfloat16)
  nbytes = sum(x.nbytes for x in jax.tree.leaves(made))
  assert nbytes == 15 * cache.bytes_per_token(cfg, format_, 2)


RULES = {
  "block_128": ((".*", "block_128"),),
  "rowwise": (("head", "bf16"), (".*", "rowwise")),
  "tensor_current": ((".*", "tensor_current"),),
  "mixed": (("head", "bf16"), ("layers/0/.*", "bf16"), (".*/mlp/.*", "mxfp8"), (".*", "block_128")),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[SLOW] * (n != "mixed")) for n in RULES])
def test_weights_quantized_once_give_the_logits_of_the_training_forward_pass(name):
  cfg, params, golden = _model("llama_tied")
  sites = _sites(cfg, *RULES[name])
  tokens = jnp.asarray(golden["tokens"])
  batch = {"tokens_BL": tokens, "positions_BL": jnp.broadcast_to(jnp.arange(48), tokens.shape)}
  logits = jax.jit(lambda p: transformer.logits(p, sites, batch, cfg, RUN))
  made = weights.for_inference(params, sites, cfg, RUN.dtype)
  np.testing.assert_array_equal(logits(made), logits(params))
  stored = jax.tree.leaves(made, is_leaf=lambda w: isinstance(w, StoredMatrix))
  quantized = [w for w in stored if isinstance(w, StoredMatrix)]
  assert len(quantized) == {"block_128": 8, "rowwise": 7, "tensor_current": 8, "mixed": 7}[name]
  assert all(w.data.dtype == jnp.float8_e4m3fn for w in quantized)
  with pytest.raises(TypeError, match="multiplied as it is"):
    quantized[0].unpack()


def _values(w: StoredMatrix):
  """float64 data * scale of every layer, [produced, contracted]."""
  of_tiles = zip((-2, -1), w.quant.tile, w.data.shape[-2:], strict=True)
  scale = np.asarray(w.scale, np.float64)
  for axis, tile, size in of_tiles:
    scale = np.repeat(scale, min(tile, size), axis).take(range(size), axis)
  return np.asarray(w.data, np.float64) * scale


@SLOW
def test_values_are_kept_of_weights_whose_products_read_values():
  """The mixed layers have 128x128 tiles, MX blocks, and none; the head is in the compute dtype."""
  cfg, params, golden = _model("llama_tied")
  sites, tokens = _sites(cfg, *RULES["mixed"], matmul="dequantized"), jnp.asarray(golden["tokens"])
  batch = {"tokens_BL": tokens, "positions_BL": jnp.broadcast_to(jnp.arange(48), tokens.shape)}
  logits = jax.jit(lambda p: transformer.logits(p, sites, batch, cfg, RUN))
  made = weights.for_inference(params, sites, cfg, RUN.dtype, keeps_values=True)
  np.testing.assert_array_equal(logits(made), logits(params))
  is_leaf = lambda w: isinstance(w, StoredMatrix)  # noqa: E731
  codes = weights.for_inference(params, sites, cfg, RUN.dtype)
  pairs = [jax.tree.leaves(tree, is_leaf=is_leaf) for tree in (codes, made)]
  pairs = [(a, b) for a, b in zip(*pairs, strict=True) if is_leaf(a)]
  assert len(pairs) == 7
  for of_codes, of_values in pairs:
    assert of_values.data.dtype == jnp.float32
    assert set(np.unique(of_values.scale)) == {1}
    np.testing.assert_array_equal(_values(of_codes).astype(np.float32), of_values.data)


def _unit_scaled(cfg):
  """(the same shape with unit scaling, weights of deviation 1, rules)."""
  cfg = dataclasses.replace(cfg, unit_scaling="all", residual_tau=0.4, init_std=1.0)
  params = params_lib.init(jax.random.key(0), transformer.params(cfg), cfg.dims)
  return cfg, params, (("head", "unit_head"), (".*", "unit_scaling"))


@SLOW
@pytest.mark.parametrize("scaling", ["block_128", "unit_scaling"])
def test_decoding_in_fp8_equals_the_training_forward_pass(scaling):
  """Scales are per token, or constant, so that a token alone multiplies as among others."""
  cfg, params, golden = _model("llama")
  rules = RULES["block_128"]
  if scaling == "unit_scaling":
    cfg, params, rules = _unit_scaled(cfg)
  sites = _sites(cfg, *rules)
  tokens = golden["tokens"]
  batch = {"tokens_BL": jnp.asarray(tokens), "positions_BL": jnp.tile(jnp.arange(48), (2, 1))}
  want = jax.jit(lambda p: transformer.logits(p, sites, batch, cfg, RUN))(params)
  made = weights.for_inference(params, sites, cfg, RUN.dtype)
  got = _forced_logits(cfg, made, sites, tokens, (4, 9))
  for row, length in enumerate((4, 9)):
    assert tolerances.difference(got[row, length:], want[row, length:]) < 1e-4


SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=40, max_new_tokens=9, seed=3)


@pytest.mark.parametrize(
  "rules", [pytest.param((), id="bf16"), pytest.param(RULES["block_128"], id="fp8", marks=SLOW)]
)
@pytest.mark.parametrize(
  "sampling",
  [SAMPLED, pytest.param(Sampling(max_new_tokens=9), marks=SLOW)],
  ids=["drawn", "greedy"],
)
def test_a_completion_does_not_depend_on_the_prompts_beside_it(rng, sampling, rules):
  generator = _generator(rules=rules)
  prompts = _prompts(rng, (3, 30, 17, 1, 16, 8, 33, 2))
  together = generator.generate(prompts, sampling)
  backwards = generator.generate(prompts[::-1], sampling)[::-1]
  alone = [generator.generate([prompt], sampling)[0] for prompt in prompts]
  assert together == backwards == alone
  assert len({c.tokens for [c] in together}) == len(prompts)
  # A step for each method; prompts of 1 to 16, to 32 and to 48 tokens.
  assert generator._engine._decode._cache_size() <= 2
  assert generator._engine._prefill._cache_size() <= 6


def test_samples_of_a_prompt_differ_and_those_of_a_seed_return(rng):
  generator, [prompt] = _generator(), _prompts(rng, (5,))
  first = generator.generate([prompt, prompt], SAMPLED, num_samples=3)
  assert len({c.tokens for own in first for c in own}) == 6
  assert first == generator.generate([prompt, prompt], SAMPLED, num_samples=3)
  assert first[0] == generator.generate([prompt], SAMPLED, num_samples=3)[0]
  assert first[1] == generator.generate([prompt], SAMPLED, 3, None, [3])[0]
  other = dataclasses.replace(SAMPLED, seed=4)
  assert first[0][0] != generator.generate([prompt], other)[0][0]


def test_scores_are_log_softmax_of_transformers_logits(monkeypatch):
  monkeypatch.setattr(batching, "_CHUNK", 16)  # three chunks of the longest
  _, _, golden = _model("llama")
  z = golden["logits"].astype(np.float64)
  logp = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))
  logp -= z.max(-1, keepdims=True)
  tokens = golden["tokens"].tolist()
  best = golden["logits"].argmax(-1)
  cuts = [(0, 4, 9), (1, 1, 48), (0, 40, 41), (1, 20, 36), (0, 7, 8)]
  sequences = [(tokens[row][:a], tokens[row][a:b]) for row, a, b in cuts]
  sequences.append((tokens[0][:6], [int(best[0, 5])]))
  found = _generator().score(sequences)
  for (row, a, b), (got, is_greedy) in zip(cuts, found):
    want = sum(logp[row, i - 1, tokens[row][i]] for i in range(a, b))
    assert abs(got - want) < 1e-3
    assert is_greedy == all(best[row, i - 1] == tokens[row][i] for i in range(a, b))
  assert found[-1][1]


def test_end_tokens_end_a_completion_and_are_left_out_of_its_text(rng):
  generator, [prompt] = copy.copy(_generator()), _prompts(rng, (6,))
  [[free]] = generator.generate([prompt], SAMPLED)
  assert (len(free.tokens), free.finish_reason) == (9, "length")
  assert free.text == bytes(free.tokens).decode("utf-8", "replace")
  end = free.tokens[5]
  cut = free.tokens[: free.tokens.index(end) + 1]
  generator.end_ids = frozenset((NEVER, end))
  [[ended]] = generator.generate([prompt], SAMPLED)
  assert (ended.tokens, ended.finish_reason) == (cut, "eos")
  assert ended.text == bytes(cut[:-1]).decode("utf-8", "replace")


def test_a_stop_that_is_a_token_ends_a_text_that_spells_it(rng):
  generator, [prompt] = copy.copy(_generator()), _prompts(rng, (6,))
  decode = generator.tokenizer.decode
  generator.tokenizer = types.SimpleNamespace(decode=decode, special_id=lambda text: NEVER)
  [[free]] = generator.generate([prompt], SAMPLED)
  stop = free.text[4:6]
  [[ended]] = generator.generate([prompt], dataclasses.replace(SAMPLED, stop=(stop,)))
  assert (ended.text, ended.finish_reason) == (free.text[: free.text.index(stop)], "stop")


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=4), SAMPLED], ids=["greedy", "drawn"])
def test_pieces_of_text_are_those_of_the_completions(rng, sampling):
  """Of greedy samples too, which are equal and drawn once."""
  generator, prompts = _generator(), _prompts(rng, (4, 9, 2, 6, 5))
  pieces, done = {}, []

  def on_text(index, number, piece, completion):
    pieces[index, number] = pieces.get((index, number), "") + piece
    if completion:
      done.append(((index, number), completion))

  made = generator.generate(prompts, sampling, 3, on_text)
  assert sorted(place for place, _ in done) == [(i, n) for i in range(5) for n in range(3)]
  assert dict(done) == {(i, n): one for i, own in enumerate(made) for n, one in enumerate(own)}
  assert pieces == {place: completion.text for place, completion in done}


def test_end_tokens_are_those_of_the_generation_settings_then_of_the_config(tmp_path, monkeypatch):
  tokenizer = Tokenizer("bytes")
  assert api.end_ids("", tokenizer) == [256]
  monkeypatch.setattr(Tokenizer, "token_id", lambda self, name: {"<stop>": 9}.get(name))
  assert api.end_ids("", tokenizer, ["<stop>"]) == [256, 9]  # beside the tokenizer's own
  for file, stated, want in (
    ("", "5", [5]), ("generation_", "[7, 8]", [7, 8]), ("generation_", "null", [5])
  ):  # fmt: skip
    (tmp_path / f"{file}config.json").write_text(f'{{"eos_token_id": {stated}}}')
    assert api.end_ids(str(tmp_path), tokenizer) == want
    assert api.end_ids(str(tmp_path), tokenizer, ["<stop>"]) == [*want, 9]
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
  with pytest.raises(UserError, match="eos_token_id is \\['</s>'\\], expected ids"):
    api.end_ids(str(tmp_path), tokenizer)


@pytest.mark.parametrize(
  "sampling",
  [pytest.param(Sampling(max_new_tokens=4), marks=SLOW), SAMPLED],
  ids=["greedy", "drawn"],
)
def test_logits_that_are_not_finite_end_their_completion_alone(rng, sampling):
  """One token's embedding is NaN, another's infinite; what follows in their slots is as ever."""
  cfg, params, _ = _model("llama")
  embed = params["embed"].at[90].set(jnp.nan).at[91].set(jnp.inf)
  good, [bad, worse] = _prompts(rng, (4, 7), 90), ([1, 90], [65, 66, 91, 3])
  # Beyond the bucket of the prompt behind it.
  prompts = [good[0], bad, worse * 6, good[1]]
  want = [_generator().generate([prompt], sampling)[0] for prompt in good]
  met = want[0][0].tokens[1]  # is read as the third token is computed
  assert not {90, 91, met} & {*good[0], *good[1], *want[1][0].tokens, want[0][0].tokens[0]}
  assert not {90, 91} & set(want[0][0].tokens)
  for poison in (embed, embed.at[met].set(jnp.nan)):
    broken = api.Generator(
      {**params, "embed": poison},
      _sites(cfg),
      cfg,
      RUN,
      Tokenizer("bytes"),
      (NEVER,),
      slots=3,
      max_length=48,
    )
    found = broken.generate(prompts, sampling)
    ends = [(c.finish_reason, len(c.tokens)) for [c] in found[1:3]]
    assert ends == [("error", 0)] * 2 and found[3] == want[1]
    assert found[0] == want[0] or poison is not embed
    for i, shown in ((1, r"'\\x01Z'"), (2, r"'AB\[\\x03.*\.\.\.")):
      said = broken.not_finite(prompts[: i + 1], [want[0], *[want[1]] * (i - 1), found[i]])
      assert re.search(f"1 of {i + 1} .*prompt {i} .{shown}. has logits .* after 0 tokens", said)
  assert (found[0][0].finish_reason, found[0][0].tokens) == ("error", want[0][0].tokens[:2])
  assert broken.not_finite(prompts, want) == ""
  with pytest.raises(UserError, match="sequence 1 .'.x01Z.*diverged, or a scale"):
    broken.score([(good[0], [5]), (bad, [5])])


def test_draws_of_consecutive_positions_are_independent():
  """Equal logits: two tokens in a row are the same in one of V cases, through the whole engine."""
  cfg, params, _ = _model("llama")
  flat = {**params, "head": jnp.zeros_like(params["head"])}
  generator = api.Generator(
    flat, _sites(cfg), cfg, RUN, Tokenizer("bytes"), (NEVER,), slots=8, max_length=48
  )
  prompts = [[i, j] for i in range(8) for j in range(8)]
  found = generator.generate(prompts, Sampling(temperature=1.0, max_new_tokens=4), num_samples=4)
  tokens = np.array([c.tokens for own in found for c in own])
  assert tokens.shape == (256, 4)
  for first in range(4):
    for second in range(first):
      # Of 256 pairs 2.7 are equal; more than 13 in one of a million.
      assert (tokens[:, first] == tokens[:, second]).sum() < 14


def test_an_e4m3_cache_has_a_scale_per_token_and_head(rng):
  """Heads and tokens 2^6 apart: each is within half a step of its own scale, its codes exact."""
  x = rng.normal(size=(2, 3, 4, 16)).astype(np.float32)
  x *= 2.0 ** (6 * np.arange(4))[:, None] * 2.0 ** (-5 * np.arange(3))[:, None, None]
  entries = cache.Entries.of(jnp.asarray(x), "e4m3")
  amax = np.abs(x.astype(np.float64)).max(-1, keepdims=True)
  assert entries.scale.shape == x.shape[:-1]
  np.testing.assert_allclose(np.asarray(entries.scale)[..., None], amax / 448, rtol=1e-6)
  codes = (x / np.asarray(entries.scale)[..., None]).astype(ml_dtypes.float8_e4m3fn)
  np.testing.assert_array_equal(
    np.asarray(entries.data).view(np.uint8) & 0x7F, codes.view(np.uint8) & 0x7F
  )
  wrong = np.abs(np.asarray(entries.value(jnp.float32), np.float64) - x)
  # Half a step of the element's own binade, or of the smallest one.
  step = np.maximum(2.0 ** (np.floor(np.log2(np.abs(x) / amax * 448)) - 3), 2.0**-9) * amax / 448
  assert (wrong <= 0.5001 * step).all()


def test_all_that_is_wrong_with_a_call_is_said_at_once():
  generator = _generator()
  wrong = Sampling(temperature=-1.0, top_p=0.0, top_k=-1, max_new_tokens=0, stop=("",), seed=-1)
  with pytest.raises(UserError) as error:
    generator.generate([[], [1] * 64], wrong, num_samples=0)
  for part in (
    "temperature=-1.0 must", "top_p=0.0 must", "top_k=-1 must", "max_new_tokens=0 must",
    "stop=('',) must", "seed=-1 must", "num_samples=0 must", "prompt 0 is empty",
    "prompt 1 has 64 tokens and the model takes 48",
  ):  # fmt: skip
    assert part in str(error.value)
  with pytest.raises(UserError, match="sequence 0 has 0 tokens of context(.|\n)*sequence 1 has 50"):
    generator.score([([], [1]), ([1] * 48, [2, 3])])
  with pytest.raises(UserError, match="prompt 1 has the id 96, expected 0 to 95"):
    generator.generate([[0, 95], [3, 96]], Sampling(max_new_tokens=1))
  with pytest.raises(UserError, match="sequence 0 has the id -1, expected 0 to 95"):
    generator.score([([1], [2, -1])])
  with pytest.raises(UserError, match="slots=0 must(.|\n)*'fp8' is not one of(.|\n)*max_length=65"):
    _generator(slots=0, cache_format="fp8", max_length=65)
  with pytest.raises(UserError, match="head runs on 'reference', .*matmul='dequantized'"):
    _generator(RULES["block_128"], weight_form="values")
  with pytest.raises(UserError, match="weight_form='value' is not one of"):
    api.load(str(SMOLLM2), weight_form="value")


def test_other_parameters_whose_products_read_codes_are_refused_where_values_are_kept():
  cfg, params, _ = _model("llama")
  sites = _sites(cfg, *RULES["block_128"], matmul="dequantized")
  options = dict(slots=1, max_length=48, weight_form="values")
  generator = api.Generator(params, sites, cfg, RUN, Tokenizer("bytes"), (NEVER,), **options)
  with pytest.raises(UserError, match="runs on 'reference', which multiplies codes"):
    generator.take(params, _sites(cfg, *RULES["block_128"]))


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
  shutil.copytree(GOLDEN / "hf" / "llama", tmp_path / "m")
  case_inputs.tokenizer_folder(tmp_path / "m")
  with pytest.raises(UserError, match="ids up to 259, the model has model.vocab_size=96"):
    api.load(str(tmp_path / "m"))


def test_a_cache_is_as_long_as_the_longest_request_needs(rng, monkeypatch):
  lengths, engine = [], batching.Engine.run
  monkeypatch.setattr(
    batching.Engine, "run", lambda *of: lengths.append(of[3]) or engine(*of)
  )  # fmt: skip
  own = _generator()
  own = copy.copy(own)
  for fixed in (False, True):
    own._is_fixed = fixed  # noqa: SLF001
    own.generate(_prompts(rng, [5, 13]), Sampling(max_new_tokens=4, temperature=0.0))
  assert lengths == [32, 48]  # 17 and the next bucket; what max_length says


def test_buckets_double_from_16_to_the_longest():
  sizes = [batching.bucket(n, 100) for n in (1, 16, 17, 64, 65, 100)]
  assert sizes == [16, 16, 32, 64, 100, 100]
