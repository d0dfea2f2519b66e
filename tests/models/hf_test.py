"""Hugging Face folders: same logits as transformers, bit-exact round trips, refusals by name."""

import dataclasses
import json
import pathlib
import re
import shutil

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import tolerances
from golden import check_export

from fp8jax import axes, mesh, params
from fp8jax.errors import UserError
from fp8jax.export import folder as export_folder
from fp8jax.export import write
from fp8jax.models import presets, transformer
from fp8jax.models.config import ComputeConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site_tree

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
MODELS = sorted(p.name for p in (GOLDEN / "hf").iterdir() if p.is_dir())
INF, NAN = float("inf"), float("nan")
SMOLLM2 = pathlib.Path(__file__).resolve().parents[2] / "assets" / "smollm2-135m"


def _logits(cfg, weights, tokens):
  batch = {
    "tokens_BL": jnp.asarray(tokens, jnp.int32),
    "positions_BL": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
  }
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, ((".*", "bf16"),))
  return jax.jit(lambda p, s, b: transformer.logits(p, s, b, cfg, ComputeConfig()))(
    weights, sites, batch
  )


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
  folder = GOLDEN / "hf" / name
  golden = np.load(folder / "logits.npz")
  cfg = hf_config.read_config(folder)
  weights, dtype = hf_weights.load_params(folder, cfg)
  assert dtype == "float32"
  got = _logits(cfg, weights, golden["tokens"])
  assert np.max(np.abs(got - golden["logits"])) < tolerances.LOGITS_TINY


def test_logits_of_smollm2_equal_transformers():
  if not SMOLLM2.exists():
    pytest.fail(f"{SMOLLM2} is missing; `make test` fetches it")
  golden = np.load(GOLDEN / "smollm2.npz")
  cfg = hf_config.read_config(SMOLLM2)
  assert cfg == presets.SMOLLM2_135M
  weights, dtype = hf_weights.load_params(SMOLLM2, cfg)
  assert dtype == "bfloat16"
  got = np.asarray(_logits(cfg, weights, golden["ids"][None, :256]))[0]
  assert np.max(np.abs(got[golden["positions"]] - golden["logits"])) < tolerances.LOGITS_SMOLLM2
  np.testing.assert_array_equal(got.argmax(-1), golden["argmax"])
  logsumexp = np.log(np.exp(got - got.max(-1, keepdims=True)).sum(-1)) + got.max(-1)
  assert np.max(np.abs(logsumexp - golden["logsumexp"])) < tolerances.LOGITS_SMOLLM2


def test_tokenizer_of_smollm2_equals_transformers(repository):
  from fp8jax.data.tokenize import Tokenizer

  golden = np.load(GOLDEN / "smollm2.npz")
  tokenizer = Tokenizer(str(SMOLLM2))
  ids = tokenizer.encode((repository / "LICENSE").read_text())
  np.testing.assert_array_equal(ids[:-1], golden["ids"])
  assert ids[-1] == tokenizer.eos_id == 2
  # GGUF does not hold this rule; without it "22" would be one token.
  assert len(tokenizer.encode("[  1,   22]")) == len(tokenizer.encode("[  1,   2")) + 2


def _tensors(folder) -> dict[str, np.ndarray]:
  found = {}
  for path in pathlib.Path(folder).glob("*.safetensors"):
    found.update(safetensors.numpy.load_file(path))
  return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bit_exact(tmp_path, name, dtype):
  source = tmp_path / "source [1]"  # a name, and no pattern of names
  shutil.copytree(GOLDEN / "hf" / name, source)
  if dtype == "bfloat16":  # a folder in that dtype, in one file
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in _tensors(source).items()}
    for path in (*source.glob("*.safetensors"), *source.glob("*.index.json")):
      path.unlink()
    safetensors.numpy.save_file(tensors, source / "model.safetensors")
  cfg = hf_config.read_config(source)
  weights, found = hf_weights.load_params(source, cfg)
  assert found == dtype
  target = tmp_path / "target"
  base = json.loads((source / "config.json").read_text())
  write.save(target, write.model(weights, cfg, found, base, shard_bytes=20_000))
  assert len(list(target.glob("*.safetensors"))) > 1
  assert json.loads((target / "config.json").read_text())["dtype"] == dtype
  a, b = _tensors(source), _tensors(target)
  assert a.keys() == b.keys()
  for key in a:
    assert a[key].dtype == b[key].dtype
    np.testing.assert_array_equal(a[key].view(np.uint8), b[key].view(np.uint8))
  assert hf_config.read_config(target) == cfg
  index = json.loads((target / "model.safetensors.index.json").read_text())
  assert index["metadata"]["total_size"] == sum(t.nbytes for t in b.values())


def test_export_leaves_nothing_of_an_earlier_one(tmp_path):
  source, target = str(GOLDEN / "hf" / "llama"), str(tmp_path)
  cfg = hf_config.read_config(source)
  weights, _ = hf_weights.load_params(source, cfg)
  write.save(target, write.model(weights, cfg, "float32", shard_bytes=20_000))
  write.save(target, write.model(jax.tree.map(lambda x: 0 * x, weights), cfg, "bfloat16"))
  read, dtype = hf_weights.load_params(target, cfg)
  assert dtype == "bfloat16" and not any(np.any(x) for x in jax.tree.leaves(read))


def test_import_onto_a_mesh_gives_the_same_sharded_parameters():
  folder = GOLDEN / "hf" / "qwen2"
  cfg = hf_config.read_config(folder)
  rules = dict(D="fsdp", F="tensor", H="tensor", G="tensor", V="tensor")
  layout = axes.Layout(mesh.make((1, 4, 2)), axes.as_rules(rules), axes.as_rules({"B": "fsdp"}))
  plain, _ = hf_weights.load_params(folder, cfg)
  spread, _ = hf_weights.load_params(folder, cfg, layout)
  shardings = params.flatten(params.shardings(transformer.params(cfg), layout))
  for path, value in params.flatten(spread).items():
    assert value.sharding.is_equivalent_to(shardings[path], value.ndim), path
    np.testing.assert_array_equal(value, params.flatten(plain)[path])


def _copy(tmp_path, name="llama"):
  shutil.copytree(GOLDEN / "hf" / name, tmp_path / "m")
  return tmp_path / "m"


def _edit_config(folder, **changes):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(architectures=["Phi3ForCausalLM"]), "architecture 'Phi3ForCausalLM' is not supported"),
    (dict(hidden_act="gelu"), "hidden_act='gelu'"),
    (dict(mlp_bias=True), "mlp_bias=True"),
    (dict(attention_bias=True), "attention_bias=True"),
    (dict(use_sliding_window=True), "use_sliding_window=True"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types="),
    (dict(quantization_config={"quant_method": "gptq"}), "quantization_config="),
    (dict(rope_parameters={"rope_type": "longrope"}), "rope type 'longrope' is not supported"),
    (dict(rope_parameters={"rope_type": "yarn", "mscale": 2}), "rope option 'mscale'"),
    (dict(num_attention_heads=0), "config.json: num_attention_heads is 0, expected a whole number"),
    (dict(num_attention_heads=-4), "num_attention_heads is -4"),
    (
      dict(num_attention_heads=3, head_dim=None),
      "hidden_size 32 is no multiple of num_attention_heads 3",
    ),
    (dict(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    (dict(num_hidden_layers=2.5), "num_hidden_layers is 2.5, expected a whole number"),
    (dict(num_key_value_heads=0), "num_key_value_heads is 0"),
    (dict(max_position_embeddings=10**400), "max_position_embeddings is a huge integer"),
    (dict(vocab_size=None), "vocab_size is None"),
    (dict(head_dim=True), "head_dim is True"),
    (dict(rms_norm_eps=None), "rms_norm_eps is None"),
    (dict(rms_norm_eps=INF), "rms_norm_eps is inf"),
    (dict(initializer_range=NAN), "initializer_range is nan"),
    (dict(tie_word_embeddings="false"), "tie_word_embeddings is 'false', expected true or false"),
    (dict(architectures=[[]]), "architecture [] is not supported"),
    (dict(layer_types=3), "layer_types=3"),
    (dict(rope_parameters=None, rope_theta=INF), "rope_theta is inf"),
    (dict(rope_parameters={"rope_theta": -1}), "rope option rope_theta is -1"),
    (dict(rope_parameters={"rope_type": ["linear"]}), "rope type ['linear'] is not supported"),
    (dict(rope_parameters={"rope_type": "linear"}), "rope type 'linear' lacks its factor"),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 0}), "rope option factor is 0"),
    (dict(rope_parameters={"rope_type": "linear", "factor": INF}), "rope option factor is inf"),
    (
      dict(
        rope_parameters={
          "rope_type": "llama3",
          "factor": 8.0,
          "low_freq_factor": 4.0,
          "high_freq_factor": 4.0,
        }
      ),
      "low_freq_factor is 4.0, expected less than high_freq_factor",
    ),
  ],
)
def test_import_refuses_what_it_cannot_compute(tmp_path, changes, message):
  folder = _copy(tmp_path)
  _edit_config(folder, **changes)
  with pytest.raises(UserError) as error:
    hf_config.read_config(folder)
  assert message in str(error.value)


def test_import_reads_both_spellings_of_rope_options():
  old = dict(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
  new = dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
  rest = json.loads((GOLDEN / "hf" / "llama" / "config.json").read_text())
  rest.pop("rope_parameters")
  assert hf_config.config_from_hf(rest | old) == hf_config.config_from_hf(rest | new)


def _index(file, name="model.norm.weight"):
  """Another file for a tensor in the index; without one it lists the tensor no more."""

  def change(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = file
    if file is None:
      del index["weight_map"][name]
    path.write_text(json.dumps(index))

  return change


def _edit_tensors(change):
  def run(folder):
    tensors = {k: v.copy() for k, v in _tensors(folder).items()}
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")

  return run


def _misshape(t):
  t[UP.replace("1", "7")] = t.pop(UP)
  t["model.norm.weight"] = np.zeros(31, np.float32)
  t["lm_head.weight"] = t["lm_head.weight"].astype(np.int32)


def _cut_off(folder):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-100])


def _as_pickle(folder):
  (folder / "model.safetensors").unlink()
  (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


FIRST, SECOND = (f"model-0000{i}-of-00005.safetensors" for i in (1, 2))
UP, INSIDE = "model.layers.1.mlp.up_proj.weight", "expected .*inside"


@pytest.mark.parametrize("name, change, error, messages", [
  ("qwen3", _index(FIRST, "model.ghost.weight"), UserError,
   ["names model.ghost.weight in .*00001.*, which lacks it"]),
  ("qwen3", _index(FIRST), UserError, ["names model.norm.weight in .*00001.*, which lacks it"]),
  ("qwen3", _index("../m/" + FIRST), UserError, ["weight_map names '../m/.*inside"]),
  ("qwen3", _index("/etc/passwd"), UserError, [f"weight_map names '/etc/passwd', {INSIDE}"]),
  ("qwen3", _index("a/../../b"), UserError, [f"weight_map names 'a/../../b', {INSIDE}"]),
  ("qwen3", _index(""), UserError, [f"weight_map names '', {INSIDE}"]),
  ("qwen3", _index("a\0"), UserError, ["weight_map names .*inside"]),
  ("qwen3", _index(3), UserError, ["has no weight_map from tensors to files"]),
  ("qwen3", _index(None), UserError, ["missing tensor model.norm.weight"]),
  ("qwen3", lambda folder: (folder / SECOND).unlink(), FileNotFoundError, [f"names '{SECOND}'"]),
  ("llama", _cut_off, ValueError, ["model.safetensors is no whole safetensors file"]),
  ("llama", _as_pickle, FileNotFoundError,
   ["pytorch_model.bin is a pickle, which is never read"]),
  *(("llama", _edit_tensors(lambda t, x=x: t[UP].__setitem__((3, 4), x)), UserError,
     ["layers.1.mlp.up_proj.weight has 1 of .* NaN or infinite"]) for x in (NAN, INF, -INF)),
  ("llama", _edit_tensors(_misshape), ValueError,
   [f"missing tensor {UP}", "surplus tensor model.layers.7.mlp.up_proj.weight",
    r"model.norm.weight has shape \(31,\), expected \(32,\)",
    "lm_head.weight has dtype I32"]),
  ("llama_tied", _edit_tensors(lambda t: t.update({
    "lm_head.weight": t["model.embed_tokens.weight"] + 1})), ValueError,
   ["tie_word_embeddings is true but lm_head.weight differs"]),
])  # fmt: skip
def test_import_of_a_damaged_folder_names_what_is_wrong(tmp_path, name, change, error, messages):
  folder = _copy(tmp_path, name)
  change(folder)
  with pytest.raises(error) as e:
    hf_weights.load_params(folder, hf_config.read_config(folder))
  assert all(re.search(m, str(e.value)) for m in messages), e.value


@pytest.mark.parametrize("matrices, norms, want", [
  ("bfloat16", "float32", "float32"), ("bfloat16", "bfloat16", "bfloat16"),
  ("float16", "float16", "float16"), ("float16", "bfloat16", "float32"),
])  # fmt: skip
def test_dtype_of_a_folder_holds_all_of_its_weights(tmp_path, matrices, norms, want):
  """export.dtype='auto' writes it; neither 16-bit format holds the other's values."""
  folder = _copy(tmp_path)
  tensors = {
    k: v.astype(hf_tensors.DTYPES[norms if "norm" in k else matrices])
    for k, v in _tensors(folder).items()
  }
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  params, dtype = hf_weights.load_params(folder, hf_config.read_config(folder))
  assert dtype == want and {str(x.dtype) for x in jax.tree.leaves(params)} == {"float32"}
  for i, down in enumerate(params["layers"]["mlp"]["down"]):
    stored = tensors[f"model.layers.{i}.mlp.down_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(down, stored.T)


def test_import_takes_finite_values_whose_sum_overflows():
  for dtype, largest in (("float32", 3e38), ("bfloat16", 3e38), ("float16", 65504)):
    value = np.full((2, 3), largest, hf_tensors.DTYPES[dtype])
    hf_weights._check_finite(value, "x")
    for bad in (np.inf, -np.inf, np.nan):
      value[1, 1] = bad
      with pytest.raises(UserError, match="x has 1 of 6 values that are NaN or infinite"):
        hf_weights._check_finite(value, "x")
  hf_weights._check_finite(np.zeros((0, 4), np.float32), "x")


def test_import_of_a_file_in_place_of_a_folder_is_refused(tmp_path):
  (tmp_path / "m").write_text("")
  with pytest.raises(UserError, match="m/config.json cannot be read: Not a directory"):
    hf_config.read_config(str(tmp_path / "m"))


def _export(target):
  cfg = hf_config.read_config(GOLDEN / "hf" / "llama")
  weights, _ = hf_weights.load_params(GOLDEN / "hf" / "llama", cfg)
  write.save(str(target), write.model(weights, cfg, "float32"))


def _content(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("name", ["other.safetensors", "config.json", "notes.txt", ".git"])
def test_export_refuses_a_folder_of_another_origin(tmp_path, name):
  (tmp_path / name).write_text("mine")
  with pytest.raises(UserError, match=f"holds '{name}' and was not written by --job=export"):
    _export(tmp_path)
  assert _content(tmp_path) == {name: b"mine"}


def test_export_leaves_what_was_put_beside_it(tmp_path):
  _export(tmp_path)
  (tmp_path / "README.md").write_text("mine")
  _export(tmp_path)
  assert (tmp_path / "README.md").read_text() == "mine"
  (tmp_path / "other.safetensors").write_text("mine")
  before = _content(tmp_path)
  with pytest.raises(UserError, match="holds 'other.safetensors', not of an export"):
    _export(tmp_path)
  assert _content(tmp_path) == before


def test_export_obeys_no_manifest_that_names_files_elsewhere(tmp_path):
  victim, target = tmp_path / "victim.safetensors", tmp_path / "target"
  victim.write_text("mine")
  target.mkdir()
  (target / export_folder.MANIFEST).write_text(json.dumps({"files": ["../victim.safetensors"]}))
  with pytest.raises(UserError, match="names '../victim.safetensors'"):
    _export(target)
  assert victim.read_text() == "mine"


def test_export_refuses_a_file_as_its_folder(tmp_path):
  (tmp_path / "x").write_text("mine")
  with pytest.raises(UserError, match="is no folder"):
    _export(tmp_path / "x")


def test_check_export_evaluates_a_folder(tmp_path):
  """Weights of zero give every token of the vocabulary the same probability."""
  cfg = dataclasses.replace(presets.DEBUG, vocab_size=640, max_positions=256)
  weights = jax.tree.map(np.zeros_like, harness.init_params(cfg))
  write.save(str(tmp_path), write.model(weights, cfg, "float32"))
  vocabulary = tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1}, "a")
  tokenizers.Tokenizer(vocabulary).save(str(tmp_path / "tokenizer.json"))
  for i in range(40):
    (tmp_path / f"{i}.txt").write_text(f"{i}")
  check_export.windows(str(tmp_path), f"{tmp_path}/*.txt", 1, tmp_path / "windows.npz")
  found = np.load(tmp_path / "windows.npz")
  assert found["perplexity"] == pytest.approx(640, rel=1e-5)
  assert found["tokens"] == found["weights_BL"].sum() > 0
  assert found["tokens_BL"].shape == (check_export.BATCH, check_export.LENGTH)
