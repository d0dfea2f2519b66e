"""Mistakes in a configuration are refused before anything compiles, in words that help.

A message names the key, what was wrong with it and what would be right, where possible the nearest
valid value.
"""

import dataclasses
import json
import pathlib
import shutil

import jax
import pytest
import tokenizers

from configs import base
from fp8jax import axes, params
from fp8jax.config import layout, resolve
from fp8jax.data import tokenize
from fp8jax.jobs import dispatch, table
from fp8jax.kernels.attention import tokamax_sm90
from fp8jax.kernels.choose import Device
from fp8jax.models import presets, transformer
from fp8jax.models.config import Lora
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.papers import PAPERS

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPU, T4, A100, L4, H200, B200, RTX = (
  Device("cpu"), *(Device("gpu", capability) for capability in (75, 80, 89, 90, 100, 120))
)  # fmt: skip
# Every size of a layer is whole tiles of 128: what our kernels take without further ado.
TILED = {"model.hidden_size": 256, "model.num_heads": 4, "model.num_kv_heads": 4, "seq_len": 128}


def _config(**changes):
  c = base.get_config()
  c.update_from_flattened_dict(changes)
  return c


# The job that reads a mistaken section; training else.
JOBS = {"generate": "generate", "weights": "generate", "export": "export", "calibrate": "calibrate",
        "sensitivity": "sensitivity", "noise": "noise", "eval": "evaluate"}  # fmt: skip


def _refusal(changes, devices=1, device=CPU) -> list[str]:
  sections = [key.split(".")[0] for key in changes]
  job = next((JOBS[one] for one in JOBS if one in sections and devices == 1), "train")
  with pytest.raises(resolve.ConfigError) as e:
    resolve.resolve(_config(**changes), devices, device, needs=table.JOBS[job].needs)
  return e.value.problems


def _source(**changes):
  return {f"data.sources.main.{key}": value for key, value in changes.items()}


@pytest.fixture
def files(tmp_path, monkeypatch):
  """Files that mistakes are about, in the current directory."""
  monkeypatch.chdir(tmp_path)
  for folder in ("vocabulary", "gpt2", "hollow", "foreign", "complete", "other_tokenizer",
                 "other_heldout", "cut", "sp"):  # fmt: skip
    (tmp_path / folder).mkdir()
  shutil.copytree(ROOT / "tests/golden/hf/llama", "weightless",
                  ignore=shutil.ignore_patterns("*.safetensors*"))  # fmt: skip
  (tmp_path / "hollow/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
  (tmp_path / "foreign/index.json").write_text("{}")
  (tmp_path / "cut/index.json").write_text('{"tokenizer": ')
  whole = json.loads((tmp_path / "weightless/config.json").read_text())
  for folder, changes, index in (
    ("quoted", {"num_hidden_layers": "2"}, ""),
    ("roped", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, ""),
    ("torn", {}, '{"weight_map": '),
    ("mapless", {}, '{"metadata": {}}'),
  ):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(json.dumps(whole | changes))
    (tmp_path / folder / "model.safetensors.index.json").write_text(index)
  vocabulary = tokenizers.models.WordLevel({"<unk>": 0, "a": 511, "<eos>": 512}, "<unk>")
  tokenizers.Tokenizer(vocabulary).save("vocabulary/tokenizer.json")
  (tmp_path / "sp/tokenizer.model").write_bytes(b"")
  (tmp_path / "gpt2/config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
  splits = {
    "train": {"files": ["train-00000.array_record"], "documents": 1, "tokens": 9},
    "heldout": {"files": [], "documents": 0, "tokens": 0},
  }
  for name, fingerprint, heldout in (
    ("other_tokenizer", "0123456789abcdef", 0.1),
    ("other_heldout", tokenize.Tokenizer("bytes").fingerprint, 0.2),
    ("complete", tokenize.Tokenizer("bytes").fingerprint, 0.1),
  ):
    index = {"tokenizer": fingerprint, "heldout": heldout, "splits": splits}
    (tmp_path / name / "index.json").write_text(json.dumps(index))
    if heldout != 0.1 or fingerprint.startswith("0123"):
      (tmp_path / name / splits["train"]["files"][0]).touch()


def test_configs_that_mistakes_start_from_are_right():
  resolve.resolve(_config(), 1, CPU)
  resolve.resolve(_config(), 8, CPU)
  resolve.resolve(_config(**TILED), 1, H200)
  for gpu in (T4, A100, L4, H200, B200, RTX):
    resolve.resolve(_config(**{"kernels.matmul": "reference"}), 1, gpu)


# (key, mistyped value, nearest valid one, another valid one)
ENUMERATED = [
  ("data.on_malformed", "skp", "skip", "error"),
  ("data.on_long", "splt", "split", "skip"),
  ("data.sources.main.kind", "jsonlines", "jsonl", "prepared"),
  ("export.dtype", "bf16", "bfloat16", "auto"),
  ("kernels.attention", "cuddn", "cudnn", "auto"),
  ("kernels.matmul", "refrence", "reference", "auto"),
  ("kernels.optimizer", "mosaic", "mosaic_sm90", "auto"),
  ("loss_scale.kind", "dynamc", "dynamic", "none"),
  ("memory.save_gate_up", "e4m3_12", "e4m3_128", "none"),
  ("memory.save_norm_inputs", "non", "none", "e4m3_16"),
  ("memory.remat_policy", "ful", "full", "linears"),
  ("optim.on_nonfinite", "stopp", "stop", "skip"),
  ("optim.schedule", "wds", "wsd", "constant"),
  ("precision.compute_dtype", "float_32", "float32", "bfloat16"),
]


@pytest.mark.parametrize("key, value, nearest, other", ENUMERATED, ids=[e[0] for e in ENUMERATED])
def test_unknown_value_names_key_choices_and_nearest(key, value, nearest, other):
  (problem,) = _refusal({key: value})
  assert problem.startswith(f"{key}={value!r} is not one of ")
  assert repr(other) in problem
  assert problem.endswith(f"did you mean {nearest!r}?")


# Fragments of one problem, the mistake, and where it is one if not on a single CPU.
MISTAKES = {
  "preset": (["model.preset='qwen25_7'", "did you mean 'qwen25_7b'?", "smollm2_135m"],
    {"model.preset": "qwen25_7"}),
  # --- rules
  "recipe": (["precision.rules: unknown recipe 'blok_128'", "did you mean 'block_128'?"],
    {"precision.rules": ((".*", "blok_128"),)}),
  "rule matches nothing": (
    ["rule ('haed', 'bf16') in precision.rules decides nothing", "layers/0/attn/q", "head and"],
    {"precision.rules": (("haed", "bf16"), (".*", "bf16"))}),
  "rule comes too late": (
    ["rule ('head', 'bf16') in precision.rules decides nothing", "or earlier rules already did"],
    {"precision.rules": ((".*", "block_128"), ("head", "bf16"))}),
  "rules that are no pairs": (["precision.rules: ('head',) is no sequence of", "(('head', 'bf16')"],
    {"precision.rules": ("head",)}),
  "rule that is no regular expression": (["precision.rules: '(' is no regular expression"],
    {"precision.rules": (("(", "bf16"),)}),
  "rule that tries for ever": (
    ["precision.rules: '((.+)+)+X' takes longer than 2 s to match 'layers/0/", "'.*X' for"],
    {"precision.rules": (("((.+)+)+X", "bf16"), (".*", "bf16"))}),
  "site without rule": (
    ["no rule in precision.rules covers head;", "add one, for example ('.*', 'bf16')"],
    {"precision.rules": (("layers/.*", "bf16"),)}),
  # --- model
  "heads": (["model.num_heads=5 must be a multiple of model.num_kv_heads=2"],
    {"model.num_heads": 5}),
  "no heads": (["model.num_kv_heads=0 must be at least 1"], {"model.num_kv_heads": 0}),
  "odd head": (["model.head_dim=31 must be even"], {"model.head_dim": 31}),
  "length over positions": (["seq_len=1024 is longer than model.max_positions=512"],
    {"seq_len": 1024}),
  "preset hf without a folder": (["model.preset='hf'", "set init.hf to a folder"],
    {"model.preset": "hf"}),
  # --- numbers
  "no steps": (["steps=0 must be at least 1"], {"steps": 0}),
  "no batch": (["global_batch=0 must be at least 1"], {"global_batch": 0}),
  "no length": (["seq_len=0 must be at least 1"], {"seq_len": 0}),
  "no chunk": (["memory.loss_chunk=0 must be at least 1"], {"memory.loss_chunk": 0}),
  # --- what waits for the backward pass
  "residual that does not wait": (
    ["memory.save_layer_inputs with memory.remat_policy='linears'", "only 'full'",
     "set memory.save_norm_inputs"],
    {"memory.save_layer_inputs": "e4m3_16", "memory.remat_policy": "linears"}),
  "operands that no policy saves": (
    ["memory.save_gemm_inputs='quantized' with memory.remat_policy='linears'",
     "set memory.remat_policy='operands'"],
    {"memory.save_gemm_inputs": "quantized", "memory.remat_policy": "linears"}),
  "policy without operands": (
    ["memory.remat_policy='operands'", "memory.save_gemm_inputs='quantized', which is 'none'"],
    {"memory.remat_policy": "operands"}),
  "group on two devices": (
    ["memory.save_gate_up has groups of 128", "2 devices have 384 / 2", "another mesh.tensor"],
    {"memory.save_gate_up": "e4m3_128", "model.intermediate_size": 384, "mesh.tensor": 2}, 8),
  "nothing to evaluate": (["eval.tokens=-1 must be at least 0"], {"eval.tokens": -1}),
  "no microbatches": (["grad_accum_steps=0 must be at least 1"], {"grad_accum_steps": 0}),
  "no evaluation batch": (["eval.batch=0 must be at least 1"], {"eval.batch": 0}),
  "no lines": (["log.every=0 must be at least 1"], {"log.every": 0}),
  "no workers": (["data.workers=-1 must be at least 0"], {"data.workers": -1}),
  "rotary base": (["model.rope_theta=0.0 must be positive"], {"model.rope_theta": 0.0}),
  "negative deviation": (["model.init_std=-1.0 must not be negative"], {"model.init_std": -1.0}),
  "schedule too long": (
    ["optim.warmup_steps + optim.decay_steps = 110 exceed steps=100", "shorten the schedule"],
    {"optim.warmup_steps": 90}),
  "cosine too long": (["optim.warmup_steps = 110 exceed steps=100"],
    {"optim.warmup_steps": 110, "optim.schedule": "cosine"}),
  "rates": (["0 <= optim.min_lr=0.01 <= optim.peak_lr=0.001"], {"optim.min_lr": 0.01}),
  "Adam": (["optim.b2=1.0 must be in [0, 1)"], {"optim.b2": 1.0}),
  "epsilon": (["optim.eps=0.0 must be positive"], {"optim.eps": 0.0}),
  "clip": (["optim.grad_clip_norm=-1.0 must not be negative"], {"optim.grad_clip_norm": -1.0}),
  "everything held out": (["data.heldout_fraction=1.0 must be in [0, 1)"],
  {"data.heldout_fraction": 1.0}),
  "nothing held out": (["data.heldout_fraction=0 leaves nothing to evaluate on"],
  {"data.heldout_fraction": 0.0}),
  "weight": (["data.sources.main.weight is 0.0, expected a number"], _source(weight=0.0)),
  # --- batch and mesh
  "grad_accum_steps": (
    ["global_batch=6 must be a multiple of grad_accum_steps x batch shards = 4 x 1",
     "the nearest batch, 8"],
    {"global_batch": 6, "grad_accum_steps": 4}),
  "batch shards": (
    ["global_batch=44 must be a multiple of grad_accum_steps x batch shards = 2 x 8",
     "the nearest batch, 48"],
    {"global_batch": 44, "grad_accum_steps": 2}, 8),
  "evaluation batch": (
    ["eval.batch=12 must be a multiple of the 8 batch shards", "the nearest is 16"],
    {"eval.batch": 12}, 8),
  "mesh": (
    ["mesh data=3 x fsdp=-1 x tensor=1 does not cover the 8 device(s)",
     "for example mesh.data=1 mesh.fsdp=8 mesh.tensor=1"],
    {"mesh.data": 3}, 8),
  "mesh for more devices": (["mesh data=1 x fsdp=4 x tensor=1 does not cover the 1 device(s)"],
    {"mesh.fsdp": 4}),
  "two open mesh axes": (["mesh data=-1 x fsdp=-1 x tensor=1", "at most one may be -1"],
    {"mesh.data": -1}, 8),
  "heads over devices": (
    ["model.num_kv_heads = 2 does not divide over 8 devices", "sharding.acts.G = tensor",
     "change mesh.tensor, or leave it whole by sharding.weights.G='' and sharding.acts.G=''"],
    {"mesh.fsdp": 1, "mesh.tensor": 8}, 8),
  "width over devices": (
    ["model.hidden_size = 100 does not divide over 8 devices", "sharding.weights.D = fsdp",
     "change mesh.fsdp, or leave it whole by sharding.weights.D=''"],
    {"model.hidden_size": 100}, 8),
  "tiles of a layer over devices": (
    ["layers/mlp/up, output F: 384 over 2 devices is 192 per device", "scale tile 128",
     "lower mesh.tensor", "recipe 'bf16'"],
    {"mesh.tensor": 2}, 8),
  "tiles of tokens over devices": (
    ["tokens of its weight gradient", "is 64 per device", "scale tile 128",
     "global_batch / grad_accum_steps x seq_len per device"],
    {"seq_len": 64}, 8),
  "rotated blocks over devices": (
    ["layers/attn/o, fwd: recipe 'halo_int8_2' rotates blocks of 64 and the product contracts 32 "
     "on a device", "take a smaller mesh.tensor, or give layers/attn/o another recipe"],
    TILED | {"precision.rules": (("layers/.*", "halo_int8_2"), (".*", "bf16")), "mesh.tensor": 4,
             "mesh.fsdp": 2, "model.head_dim": 32}, 8),
  "rotated blocks of tokens": (
    ["layers/mlp/up, wgrad: recipe 'nvfp4_eden' rotates blocks of", "contracts 96 on a device",
     "change global_batch or seq_len, or give layers/mlp/up another recipe"],
    TILED | {"precision.rules": (("layers/.*", "nvfp4_eden"), (".*", "bf16")), "seq_len": 48,
             "global_batch": 2}),
  "mesh axis": (["sharding.weights.D names mesh axis 'fsdb'", "data, fsdp, tensor"],
    {"sharding.weights.D": "fsdb"}, 8),
  "mesh axis of the batch": (["sharding.acts.B names mesh axis 'dta'"],
    {"sharding.acts.B": "dta"}, 8),
  "mesh axis, without a mesh": (["sharding.weights.D names mesh axis 'fsdb'"],
    {"sharding.weights.D": "fsdb"}),
  "letter": (["sharding.weights.L cannot be split; the letters are D, F"],
    {"sharding.weights.L": "fsdp"}),
  "split width": (["sharding.acts.D cannot be split; the letters are B, F, G, H, V"],
    {"sharding.acts.D": "tensor"}, 8),
  "an axis for two letters": (
    ["sharding.weights.D and sharding.weights.F both name mesh axis 'tensor', and arrays have both "
     "letters; leave it in one"],
    {"sharding.weights.D": "('fsdp', 'tensor')"}, 8),
  "an axis for layers and width": (
    ["sharding.weights.N and sharding.weights.D both name mesh axis 'fsdp'"],
    {"sharding.weights.N": "fsdp"}, 8),
  "an axis twice": (["sharding.weights.D names mesh axis 'fsdp' twice"],
    {"sharding.weights.D": "fsdp,fsdp"}),
  "an axis for rows and columns": (
    ["sharding.acts.B and sharding.acts.F both name mesh axis 'tensor'"],
    {"sharding.acts.B": "('data', 'tensor')"}, 8),
  "scattered weight": (
    ["sharding.weights.F=('tensor',) must begin with sharding.acts.F=('fsdp',)"],
    {"sharding.acts.F": "fsdp"}, 8),
  # --- backends
  "matmul": (["kernels.matmul='xla' cannot run", "e4m3 1x128", "one XLA dot takes one scale"],
    {"kernels.matmul": "xla"}),
  "matmul on a GPU": (["kernels.matmul='xla' cannot run"], {"kernels.matmul": "xla"}, 1, H200),
  "old GPU": (
    ["needs compute capability 8.9 or newer", "8.0", "'bf16'", "optim.moment_format='coat'",
     "optim.master_format='bf16_remainder'", "memory.save_gate_up='e4m3_16'",
     "kernels.matmul='reference' with precision.verify_fp8_gemms=False", "JAX_PLATFORMS=cpu"], {},
     1, A100),
  "Ada": (["no FP8 kernel for sm_89 runs", "needs a Hopper GPU", "Recipes that run on sm_89",
           "(--config=FILE:tensor_current)", "kernels.matmul='reference'"], TILED, 1, L4),
  "Hopper without a kernel": (
    ["no FP8 kernel for sm_90 runs", "tiles of (1, 32)", "block_128_pow2"],
    {"precision.rules": (("head", "bf16"), (".*", "mxfp8")), **TILED}, 1, H200),
  "Blackwell": (["no FP8 kernel for sm_100 runs", "no sm_100 kernel yet", "tensor_current"],
    TILED, 1, B200),
  "consumer Blackwell": (
    ["no FP8 kernel for sm_120 runs", "xla: lhs scales change along K every 128",
     "Recipes that run on sm_120 at this size: tensor_current, tensor_current_e5m2,", "rowwise"],
    TILED, 1, RTX),
  "AMD": (["has not been tried on GPUs other than NVIDIA's"], {}, 1, Device("gpu", 0)),
  "bfloat16 on Turing": (
    ["precision.compute_dtype='bfloat16': sm_75 has no BF16 tensor cores",
     "use 'float32' or 'auto'"],
    {"precision.compute_dtype": "bfloat16"}, 1, T4),
  "cudnn on Turing": (["kernels.attention='cudnn' needs compute capability 8.0", "sm_75"],
    {"kernels.attention": "cudnn"}, 1, T4),
  "ties of nobody": (["init.untie=True and no weights", "set init.hf"], {"init.untie": True}),
  "ties that come back": (
    ["init.untie=True and optim.master_format='bf16_remainder'", "set 'float32'"],
    {"init.untie": True, "optim.master_format": "bf16_remainder"}),
  "ties beside adapters": (["init.untie=True and adapters"],
                           {"init.untie": True, "model.lora.rank": 4}),
  "too much memory": (["memory.gpu_fraction=1.5 must be at most 1"], {"memory.gpu_fraction": 1.5}),
  "optimizer": (["kernels.optimizer='mosaic_sm90' cannot move embed, layers/attn/k", "Hopper GPU",
                 "Set 'auto'"], {"kernels.optimizer": "mosaic_sm90"}),
  "optimizer's rule": (["cannot move embed,", "AdamW alone"],
    {"kernels.optimizer": "mosaic_sm90", "optim.optimizer": "lion"}, 1, H200),
  "cudnn on CPU": (["kernels.attention='cudnn' needs an NVIDIA GPU; use 'xla' or 'auto'"],
    {"kernels.attention": "cudnn"}),
  "cudnn in float32": (
    ["kernels.attention='cudnn' needs 16-bit inputs", "precision.compute_dtype is 'float32'"],
    {"kernels.attention": "cudnn", "precision.compute_dtype": "float32"}, 1, H200),
  "accepted change of no key": (
    ["checkpoint.accept_changes: 'optim.peek_lr' is no key; did you mean 'optim.peak_lr'?"],
    {"checkpoint.accept_changes": ("data", "model.norm_eps", "optim.peek_lr")}),
  # --- files
  "float16 without a loss scale": (
    ["precision.compute_dtype='float16'", "set loss_scale.kind='dynamic'"],
    {"precision.compute_dtype": "float16"}),
  "no evaluation": (["eval.precisions=()", "('recipe', 'bf16')"], {"eval.precisions": ()}),
  "no calibration": (["precision.calibration='nope.json' does not exist", "--job=calibrate"],
    {"precision.calibration": "nope.json"}),
  "no text": (["data.sources.main: no file matches 'corpus/*.txt'; set the source's path"],
    _source(kind="text", path="corpus/*.txt")),
  "a folder of text": (["no file matches 'gpt2'; it is a folder, try 'gpt2/**/*'"],
    _source(kind="text", path="gpt2")),
  "no path": (["data.sources.main: path is empty"], _source(kind="text")),
  "source lacks keys": (["data.sources.main lacks path, chat, field", "configs.base.source()"],
    {"data.sources": {"main": {"kind": "pydoc", "weight": 1.0}}}),
  "source has a key too many": (["data.sources.main.paht is unknown; did you mean", ".path?"],
    {"data.sources": {"main": dict(base.source(), paht="x")}}),
  "no Parquet": (["data.sources.main: gpt2/config.json is not a Parquet file"],
    _source(kind="parquet", path="gpt2/config.json")),
  "lost a prepared file": (["complete/train-00000.array_record does not exist", "--job=prepare"],
    _source(kind="prepared", path="complete")),
  "foreign index": (["foreign/index.json: it has no field 'tokenizer'", "--job=prepare"],
    _source(kind="prepared", path="foreign")),
  "foreign tokenizer": (["gpt2/config.json is not a tokenizer.json"],
    {"data.tokenizer": "gpt2/config.json", "data.eos": "<eos>"}),
  "end of document of bytes": (["data.eos='<eos>'", "data.tokenizer='bytes'"],
    {"data.eos": "<eos>"}),
  "nothing prepared": (["corpus/index.json does not exist", "--job=prepare"],
    _source(kind="prepared", path="corpus")),
  "prepared with another tokenizer": (
    ["other_tokenizer was prepared with another tokenizer", "0123456789abcdef", "--job=prepare"],
    _source(kind="prepared", path="other_tokenizer")),
  "prepared with another split": (
    ["other_heldout was prepared with data.heldout_fraction=0.2, now it is 0.1",
     "prepare it again"],
    _source(kind="prepared", path="other_heldout")),
  "source without a name": (["a source named ''", "give it letters"],
    {"data.sources": {"": base.source()}}),
  "source named like a path": (["a source named 'a/b'", "no '/'"],
    {"data.sources": {"a/b": base.source()}}),
  "source named by a number": (["a source named 1:", "give it letters"],
    {"data.sources": {1: base.source()}}),
  "no sources": (["data.sources is empty; give at least one"], {"data.sources": {}}),
  "no model": (
    ["init.hf: assets/model/config.json does not exist", "expected a Hugging Face folder"],
    {"model.preset": "hf", "init.hf": "assets/model"}),
  "foreign architecture": (
    ["gpt2/config.json: architecture 'GPT2LMHeadModel' is not supported", "LlamaForCausalLM"],
    {"model.preset": "hf", "init.hf": "gpt2"}),
  "config.json without a key": (["hollow/config.json lacks 'vocab_size'"],
    {"model.preset": "hf", "init.hf": "hollow"}),
  "folder without weights": (["init.hf: no safetensors in 'weightless'", "fetch the model again"],
    {"model.preset": "hf", "init.hf": "weightless", "data.tokenizer": "bytes", "seq_len": 16}),
  "folder of prompts without weights": (["weights.hf: no safetensors in 'weightless'"],
    {"model.preset": "hf", "init.hf": "weightless", "weights.hf": "weightless",
     "data.tokenizer": "bytes", "seq_len": 16}),
  "number in quotes": (
    ["quoted/config.json: num_hidden_layers is '2', expected a whole", "fetch the file again"],
    {"model.preset": "hf", "init.hf": "quoted"}),
  "rope option in quotes": (
    ["roped/config.json: rope option factor is '2', expected a number", "fetch the file again"],
    {"model.preset": "hf", "init.hf": "roped"}),
  "broken index of weights": (
    ["torn/model.safetensors.index.json is not JSON", "expected a Hugging Face folder"],
    {"model.preset": "hf", "init.hf": "torn", "data.tokenizer": "bytes", "seq_len": 16}),
  "index of weights without a map": (
    ["mapless/model.safetensors.index.json has no weight_map", "fetch it again"],
    {"model.preset": "hf", "init.hf": "mapless", "data.tokenizer": "bytes", "seq_len": 16}),
  "broken index of prepared data": (["cut/index.json is not JSON", "--job=prepare"],
    _source(kind="prepared", path="cut")),
  "overridden folder": (["num_layers 2 there, 7 here", "override nothing else of model"],
    {"model.preset": "hf", "init.hf": str(ROOT / "tests/golden/hf/llama"), "model.num_layers": 7,
     "data.tokenizer": "bytes"}),
  "another model": (["init.hf:", "hidden_size 32 there, 192 here", "Set model.preset='hf'"],
    {"init.hf": str(ROOT / "tests/golden/hf/llama"), "data.tokenizer": "bytes"}),
  "no tokenizer": (["tokenizer 'tokenizer.json' does not exist", "set data.tokenizer to 'bytes'"],
    {"data.tokenizer": "tokenizer.json"}),
  "SentencePiece alone": (
    ["sp/tokenizer.model is a SentencePiece model without the tokenizer.json that is read",
     "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"], {"data.tokenizer": "sp"}),
  "no end of document": (["tokenizer_config.json does not exist", "eos_token", "set data.eos"],
    {"data.tokenizer": "vocabulary"}),
  "unknown end of document": (["has no token '<end>'", "set data.eos"],
    {"data.tokenizer": "vocabulary", "data.eos": "<end>"}),
  "vocabulary of bytes": (["data.tokenizer produces ids up to 256", "model.vocab_size=256"],
    {"model.vocab_size": 256}),
  "vocabulary of a folder": (["data.tokenizer produces ids up to 512", "model.vocab_size=512"],
    {"data.tokenizer": "vocabulary", "data.eos": "<eos>"}),
}  # fmt: skip


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("fragments, mistake", [(m[0], m[1:]) for m in MISTAKES.values()],
                         ids=list(MISTAKES))  # fmt: skip
def test_mistake_is_named_with_its_remedy(fragments, mistake):
  problems = _refusal(*mistake)
  assert any(all(f in p for f in fragments) for p in problems), "\n".join(problems)


def test_mistakes_are_reported_together():
  mistakes = {
    "steps": 0, "global_batch": 6, "grad_accum_steps": 4, "seq_len": 1024, "model.num_heads": 5,
    "memory.remat_policy": "ful", "optim.b1": 1.0, "data.on_long": "splt", "mesh.data": 3,
    "export.dtype": "bf16", "kernels.attention": "cudnn",
  }  # fmt: skip
  with pytest.raises(resolve.ConfigError) as e:
    resolve.resolve(_config(**mistakes), 8, CPU)
  first, *lines = str(e.value).splitlines()
  assert first == f"{len(lines)} problems in the config:"
  assert lines == [f"  - {problem}" for problem in e.value.problems]
  for key, value in mistakes.items():
    if key not in ("grad_accum_steps", "mesh.data"):  # said with global_batch, and as a whole mesh
      assert any(f"{key}={value!r}" in line for line in lines), key
  assert any("mesh data=3" in line for line in lines)


def test_letters_of_every_parameter_are_of_one_array():
  for preset in presets.PRESETS.values():
    adapted = dataclasses.replace(preset, lora=Lora(2, 4.0, ("attn/.*", "mlp/.*"), "bf16"))
    for path, p in params.flatten(transformer.params(adapted)).items():
      can_split = set(p.letters) - set("RC")
      assert any(can_split <= set(of) for of in layout._ARRAYS["weights"]), path


def test_generation_rotates_in_forward_products_alone():
  """Widths of 32 hold no block of 64; tokens are any number."""
  model = dataclasses.replace(presets.DEBUG, hidden_size=32, intermediate_size=32, head_dim=8)
  said = {}
  for name in RECIPES | PAPERS:
    at = (transformer.site_params(model), model.dims, (("layers/.*", name), (".*", "bf16")))
    for tokens in (None, 96):
      texts = layout.find_broken_rotations(*at, axes.LOCAL, tokens)
      said[name, tokens] = {text.partition(":")[0].rpartition(" ")[2] for text in texts}
  assert said["halo_int8_2", None] == {"fwd"} and said["nvfp4_eden", None] == set()
  assert said["nvfp4_eden", 96] == {"dgrad", "wgrad"}
  assert all(of <= {"fwd"} for (_, tokens), of in said.items() if tokens is None)


def test_axes_of_a_letter_are_a_tuple_or_text():
  texts = {"A": "fsdp", "B": "('data', 'fsdp')", "C": "data,fsdp", "D": "", "E": "()"}
  texts |= {"F": "('a',)", "G": ("data,fsdp",), "H": ("",)}
  assert dict(axes.as_rules(texts)) == {
    "A": ("fsdp",), "B": ("data", "fsdp"), "C": ("data", "fsdp"), "D": (), "E": (), "F": ("a",),
    "G": ("data", "fsdp"), "H": (),
  }  # fmt: skip
  assert axes.as_rules({"B": ("data", "fsdp"), "A": ()}) == (("A", ()), ("B", ("data", "fsdp")))


def test_generation_needs_no_blocks_of_backward_products():
  """Of nvfp4_eden the backward products rotate; keys of a device are 32 wide."""
  changes = TILED | {
    "precision.rules": (("layers/.*", "nvfp4_eden"), (".*", "bf16")), "mesh.tensor": 4,
    "mesh.fsdp": 2, "model.head_dim": 32, "model.intermediate_size": 384, "model.num_heads": 8,
  }  # fmt: skip
  for job in ("generate", "evaluate"):
    resolve.resolve(_config(**changes), 8, CPU, needs=table.JOBS[job].needs)
  assert any("dgrad: recipe 'nvfp4_eden' rotates" in text for text in _refusal(changes, 8))


def test_jobs_in_16_bits_are_bound_by_no_tiles_of_the_recipe():
  """Two devices of `tensor` cut tiles of 128: F is 384."""
  plain, recipe = {"eval.precisions": ("bf16",)}, {"eval.precisions": ("bf16", "recipe")}
  wide, tasks = {"generate.precision": "bf16"}, {"eval.tasks": "sums", "eval.tokens": 0}
  for job, changes, is_bound in (
    ("generate", wide, False), ("generate", {}, True), ("evaluate", plain, False),
    ("evaluate", recipe, True), ("evaluate", recipe | tasks | wide, False),
    ("evaluate", plain | tasks, True), ("train", plain | wide, True),
  ):  # fmt: skip
    config, needs = _config(**changes, **{"mesh.tensor": 2}), table.JOBS[job].needs
    try:
      resolve.resolve(config, 8, CPU, needs=dataclasses.replace(needs, problems=lambda c: []))
      found = []
    except resolve.ConfigError as e:
      found = e.problems
    assert any("no multiple of the scale tile 128" in text for text in found) == is_bound, job
    assert is_bound or not found


@pytest.mark.parametrize("job", [name for name, job in table.JOBS.items()
                                 if job.needs.is_on_one_device(base.get_config())])  # fmt: skip
def test_a_job_of_one_device_is_refused_in_several_processes(monkeypatch, job):
  """Each would append to the same files."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(resolve.ConfigError) as e:
    resolve.resolve(_config(), 8, CPU, needs=table.JOBS[job].needs)
  assert any(text.startswith("2 processes: this job computes on one device") for text in
             e.value.problems)  # fmt: skip


# --- jobs in process -----------------------------------------------------------------------------


def test_job_prints_problems_and_leaves_nothing_behind(tmp_path, capsys):
  c = _config(
    **{"mesh.data": 8, "mesh.fsdp": 1, "optim.schedule": "wds", "memory.remat_policy": "ful"}
  )
  workdir = tmp_path / "run"
  assert dispatch.run("train", c, base.get_config(), "configs/debug.py", str(workdir)) == 1
  out, err = capsys.readouterr()
  assert out == "" and not workdir.exists()
  first, *lines = err.splitlines()
  assert first == "error: 2 problems in the config:"
  assert sorted(line.split("=")[0] for line in lines) == [
    "  - memory.remat_policy",
    "  - optim.schedule",
  ]


@pytest.mark.parametrize(
  "job, message",
  [
    ("evaluate", "holds no checkpoint; train first, or name another --workdir"),
    ("export", "holds no checkpoint; train first, or name another --workdir"),
    ("diagnose", "stopped at a non-finite value"),
  ],
)
def test_job_on_an_empty_workdir_says_what_is_missing(job, message, tmp_path, capsys):
  c = _config(**{"precision.rules": ((".*", "bf16"),)})
  assert dispatch.run(job, c, base.get_config(), "configs/debug.py", str(tmp_path)) == 1
  err = capsys.readouterr().err
  assert err.startswith("error: ") and message in err and str(tmp_path) in err


def test_evaluation_of_a_missing_folder_names_it(tmp_path, capsys):
  c = _config(**{"weights.hf": "assets/model", "data.tokenizer": "bytes"})
  assert dispatch.run("evaluate", c, base.get_config(), "configs/debug.py", str(tmp_path)) == 1
  assert "assets/model/config.json does not exist" in capsys.readouterr().err


# --- what one device or backend cannot do ---------------------------------------------------------


def test_float16_is_refused_on_kernels_that_read_bfloat16():
  changes = {"precision.compute_dtype": "float16", "loss_scale.kind": "dynamic"}
  changes |= {"precision.rules": (("head", "bf16"), (".*", "tensor_current"))}
  assert resolve.resolve(_config(**changes), 1, CPU).run.dtype.name == "float16"
  with pytest.raises(resolve.ConfigError) as e:
    resolve.resolve(_config(**changes), 1, H200)
  (problem,) = e.value.problems
  assert "site layers/attn" in problem and "read bfloat16; set" in problem
  changes["kernels.matmul"] = "xla"
  assert resolve.resolve(_config(**changes), 1, H200).run.attention == "cudnn"


@pytest.mark.parametrize("change, refused", [
  ({}, False), ({"eval.batch": 64}, True), ({"global_batch": 64}, True),
])  # fmt: skip
def test_attention_has_room_for_training_and_for_evaluation(monkeypatch, change, refused):
  monkeypatch.setattr(tokamax_sm90, "lacks", lambda: "is not installed")
  changes = {"seq_len": 2048, "global_batch": 8, "eval.batch": 8, "data.cross_document": False,
             "model.max_positions": 2048}  # fmt: skip
  if refused:  # 64 squares of 2048 x 2048 in 16 bits are 512 MiB, 8 are 64
    (problem,) = _refusal(changes | change, 1, H200)
    assert "an array of 512 MiB per device" in problem
  else:
    resolve.resolve(_config(**changes | change), 1, H200)
