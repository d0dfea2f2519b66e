"""--job=export in FP8: the gate, the client, what is refused, the model card and the upload."""

import json
import re
import resource

import harness
import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors

from fp8jax.config import identity
from fp8jax.data.chat import template
from fp8jax.errors import UserError
from fp8jax.evaluation import divergence
from fp8jax.export import build, checks
from fp8jax.export import fp8 as fp8_export
from fp8jax.export import gate as export_gate
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names as hf_names
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.models.hf import weights as hf_weights
from fp8jax.run import calibration, provenance, restore

FP8 = {"export.format": "hf-fp8-block"}


def test_an_export_that_the_gate_refuses_leaves_the_earlier_one(export):
  assert export().code == 0
  before = {p.name: p.read_bytes() for p in export().target.iterdir()}
  done = export(**FP8, **{"export.max_kl": 1e-9})
  assert done.code == 1 and "more than export.max_kl=1e-09; take a finer" in done.stderr
  assert {p.name: p.read_bytes() for p in done.target.iterdir()} == before
  assert not done.target.with_name("target.part").exists()
  text = done.target.with_name("text.txt")
  text.write_text("given " * 20)  # two windows, the last in part; of 64 tokens that are asked for
  done = export(**FP8, **{"export.gate_text": str(text)})
  assert json.loads(done.stdout)["gate"]["tokens"] == 64
  after = {p.name: p.read_bytes() for p in done.target.iterdir()}
  assert after.keys() == before.keys() | {"fp8_matrices.json"}
  assert after["config.json"] != before["config.json"]
  wide = done.target.with_name("wide")  # in 16 bits, of a folder that has the table
  of_fp8 = {"weights.hf": str(done.target), "init.hf": str(done.target)}
  assert export(out=wide, **of_fp8, **{"export.format": "hf-bf16"}).code == 0
  assert {p.name for p in wide.iterdir()} == before.keys()


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"weights.hf": "", **FP8, "model.hidden_size": 192, "init.hf": "", "model.preset": "debug"},
     "no matrix of this model would be quantized (64x192 has partial tiles of 128x128"),
    ({"weights.hf": "", "init.hf": "", "model.preset": "debug", "model.num_heads": 5,
      "model.num_kv_heads": 1}, "a Llama with model.hidden_size no multiple of model.num_heads"),
    ({"weights.hf": "", "init.hf": "", "model.preset": "debug", "model.init_std": 2.0},
     "a Llama with model.init_std above 1 is refused by transformers"),
    ({"weights.hf": "", "export.format": "compressed-tensors", "export.strategy": "channel"},
     "recipe 'block_128' multiplied weights as e4m3 128x128 f32"),
    ({"weights.hf": "", "export.format": "hf-fp8-block", "export.scale_fmt": "ue8m0"},
     "Set export.scale_fmt='auto' to keep"),
    ({"weights.hf": "", "export.format": "modelopt"}, "joint, and export.input_scales to a table"),
    ({"export.format": "modelopt"},
     "export.format='modelopt' has static scales of activations: set export.input_scales to a tab"),
    ({"export.format": "gguf", "export.strategy": "row"}, "export.strategy='row' is not one of"),
    ({"export.scale_fmt": "ue8m0"}, "export.scale_fmt='ue8m0' is of export.format='hf-fp8-block'"),
    ({"export.format": "hf-fp8-block", "export.strategy": "channel"},
     "export.strategy='channel' is of export.format='compressed-tensors'; set it to 'auto'"),
    ({"export.format": "peft", "export.dtype": "bfloat16"},
     "export.dtype='bfloat16' with export.format='peft', which writes adapters as they were"),
    (FP8 | {"export.input_scales": "launch.py"}, "blocks scale every token"),
    (FP8 | {"export.dtype": "float32"}, "transformers multiplies such a model in 16 bits"),
    ({"export.client_python": "/no/python"}, "export.client_python='/no/python' is no program"),
    ({"export.push_to": "name"}, "export.push_to='name' must be a repository"),
    ({"export.max_kl": 0.0, "export.gate_tokens": 0}, "export.max_kl=0.0 must be positive"),
    ({"export.gate_text": "none.txt"}, "export.gate_text='none.txt' does not exist"),
  ],
)  # fmt: skip
def test_export_refuses_what_a_format_cannot_hold_before_it_reads(export, changes, message):
  done = export(**changes)
  assert (done.code, done.stdout) == (1, "") and message in done.stderr, done.stderr
  assert not done.target.exists() and not done.target.with_name("target.part").exists()


def test_a_checkpoint_without_a_table_of_inputs_is_refused_before_it_is_read():
  c = harness.tiny_config("block_128", **{"export.format": "modelopt", "export.requantize": True})
  spec = harness.tiny_spec(c, job="export")
  with pytest.raises(UserError, match="'modelopt' has static scales .* export.input_scales to a t"):
    build.check_codes(spec, {"config": identity.identity(spec)}, 2)


def test_a_model_that_transformers_refuses_is_trained():
  changes = {"model.num_heads": 3, "model.num_kv_heads": 1}
  assert not checks.problems_of_spec(harness.text_spec(job="export", **changes))
  with pytest.raises(UserError, match="a Llama with model.hidden_size no multiple of"):
    harness.text_spec(job="export", **changes | {"export.format": "compressed-tensors"})


def test_the_templates_beside_a_tokenizer_are_exported(export, source):
  """transformers reads them from a folder, or as a list in tokenizer_config.json."""
  more = source / template.FOLDER
  more.mkdir()
  files = {source / template.FILE: "D{{ messages }}", more / "tool_use.jinja": "T{{ messages }}"}
  for path, text in files.items():
    path.write_text(text)
  done = export()
  (more / "tool_use.jinja").unlink()
  more.rmdir()
  (source / template.FILE).unlink()
  assert done.code == 0, done.stderr
  kept = template.ChatTemplate.load(str(done.target))
  assert (kept.text, kept.tool_use) == ("D{{ messages }}", "T{{ messages }}")
  assert not (done.target / template.FILE).exists()


@pytest.mark.parametrize(
  "content, asked, said",
  [
    (b"", 64, "has 1 tokens to compare logits on, fewer than export.gate_tokens=64"),  # <eos>
    (b"x" * 62, 64, "has 63 tokens to compare logits on, fewer than export.gate_tokens=64"),
    (b"x" * 63, 64, ""),
  ],
)
def test_a_gate_on_a_given_text_compares_as_many_tokens_as_asked(
  export, tmp_path, monkeypatch, content, asked, said
):
  text = tmp_path / "given.txt"
  text.write_bytes(content)
  done = export(**{"export.gate_text": str(text), "export.gate_tokens": asked})
  if not said:
    assert json.loads(done.stdout)["gate"]["tokens"] == asked
    return
  assert (done.code, done.stdout) == (1, "") and not done.target.exists()
  assert f"export.gate_text={str(text)!r} {said}" in done.stderr, done.stderr


def test_a_gate_on_held_out_documents_compares_as_many_tokens_as_asked(export):
  """The windows of 64 tokens are padded where documents end."""
  asked = {"export.gate_tokens": 1000}
  assert json.loads(export(**asked).stdout)["gate"]["tokens"] >= 1000
  few = export(**{"data.heldout_fraction": 0.001, "export.gate_tokens": 10**6})
  assert few.code == 1 and "source 'main' (held-out documents) has " in few.stderr, few.stderr


ROWS, LENGTH = 2, 128


def _sparse(number):
  """Windows of chats: one trained token each, ever later; and the padding that never ends."""
  for i in range(10**6):
    weights = np.zeros((ROWS, LENGTH), np.float32)
    weights[i % 2, i % LENGTH] = i < number
    yield {"tokens_BL": np.full((ROWS, LENGTH), i % 200, np.int32), "weights_BL": weights}


def test_a_gate_on_sparse_text_holds_the_logits_of_tokens_that_count(monkeypatch):
  monkeypatch.setattr(divergence.loader, "heldout_batches", lambda *_: _sparse(300))
  changes = {"eval.batch": ROWS, "seq_len": LENGTH}
  spec = harness.text_spec(job="export", **changes)
  texts = divergence.batches(spec, divergence.Wanted(90, "", "export.gate_"))
  # Windows of 45 tokens have one in the first 45 of every 128.
  assert len(texts) == 90 and sum(b.counts_BL.sum() for b in texts) == 90
  params = harness.init_params(spec.model)
  gate = export_gate.Gate(spec, texts, params)
  assert sum(x.nbytes for x in gate._source) == 90 * spec.model.vocab_size * 4
  assert gate.report["tokens"] == 90


def test_the_number_of_tokens_that_a_gate_asks_for_instead_is_there(monkeypatch):
  """Two rows of half as many tokens: 72 positions have two tokens, the next ones have one."""
  monkeypatch.setattr(divergence.loader, "heldout_batches", lambda *_: _sparse(200))

  def count(wanted):
    spec = harness.text_spec(job="export", **{"eval.batch": ROWS, "seq_len": LENGTH})
    texts = divergence.batches(spec, divergence.Wanted(wanted, "", "export.gate_"))
    return sum(b.counts_BL.sum() for b in texts)

  with pytest.raises(UserError, match="has 200 tokens .* set export.gate_tokens=145$"):
    count(1000)
  assert count(145) == 145
  with pytest.raises(UserError, match="has 145 tokens"):
    count(146)


def test_a_config_that_clients_refuse_is_refused_without_a_client(export, monkeypatch):
  """fp8jax itself reads such a folder back, with its own defaults for what the writer left out."""
  scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
  write = hf_config.write_json

  def spoiled(folder, name, value):
    write(folder, name, value | {"rope_scaling": scaling} if name == "config.json" else value)

  monkeypatch.setattr(hf_config, "write_json", spoiled)
  done = export()
  lost = "rope_scaling.low_freq_factor, rope_scaling.high_freq_factor;"
  assert done.code == 1 and lost in done.stderr and not done.target.exists(), done.stderr


COMPRESSED = {"export.format": "compressed-tensors"}


@pytest.mark.parametrize(
  "form",
  [
    # Codes of blocks: fp8_folders_test.py.
    pytest.param(FP8, marks=pytest.mark.slow),
    pytest.param(FP8 | {"export.scale_fmt": "ue8m0"}, marks=pytest.mark.slow),
    pytest.param(COMPRESSED | {"export.strategy": "block"}, marks=pytest.mark.slow),
    COMPRESSED | {"export.strategy": "channel", "export.input_scales": "static.json"},
    pytest.param(COMPRESSED | {"export.strategy": "tensor"}, marks=pytest.mark.slow),
  ],
)
def test_an_fp8_folder_exported_again_in_its_format_is_the_same_to_the_byte(
  export, source, tmp_path, monkeypatch, form
):
  monkeypatch.chdir(tmp_path)
  names = [e for e in hf_names.entries(hf_config.read_config(str(source))) if e.inputs is not None]
  rows = [{"site": fp8_export.site_of(e), "tensor": "x", "amax": 3.1 + i}
          for i, e in enumerate(names) if e.layer is not None]  # fmt: skip
  (tmp_path / "static.json").write_text(json.dumps({"format": calibration.FORMAT, "rows": rows}))
  first = export(**form)
  assert first.code == 0, first.stderr
  mixed = first.target.rename(tmp_path / "first")
  _spoil_scales(mixed / "model.safetensors", is_pow2="export.scale_fmt" in form)
  again = {"export.format": form["export.format"], "weights.hf": str(mixed)}
  again |= {"export.strategy": form["export.strategy"]} if "export.strategy" in form else {}
  done = export(**again)
  assert done.code == 0, done.stderr
  for name in ("model.safetensors", "config.json"):
    assert (done.target / name).read_bytes() == (mixed / name).read_bytes(), name
  result = json.loads(done.stdout)
  assert result["codes_of_folder"] == result["fp8_matrices"] == 14
  same = {"kl": 0.0, "low": 0.0, "high": 0.0, "dlogp": 0.0, "top1": 1.0}
  assert result["gate"]["fp8jax"] == same
  # Other scales would be other codes: refused, or asked for.
  other = {"export.format": "compressed-tensors", "export.strategy": "tensor"}
  if form.get("export.strategy") == "tensor":
    other["export.strategy"] = "channel"
  done = export(**again | other)
  assert done.code == 1 and "the folder holds weights as e4m3" in done.stderr, done.stderr
  assert export(**again | other, **{"export.requantize": True}).code == 0


def _spoil_scales(path, is_pow2):
  """Scales that no quantizer would choose: of codes whose largest is not 448."""
  tensors = {n: (t["dtype"], t["shape"], t["data"])
             for n, t in safetensors.deserialize(path.read_bytes())}  # fmt: skip
  raw = bytearray(path.read_bytes())
  for name, (_, _, data) in tensors.items():
    if "_scale" in name and "input" not in name:
      scale = np.frombuffer(data, np.float32)
      spoiled = (scale * np.float32(2 if is_pow2 else 1.7)).tobytes()
      at = raw.index(bytes(data), 8 + int.from_bytes(raw[:8], "little"))
      raw[at : at + len(spoiled)] = spoiled
  path.write_bytes(raw)


def test_scales_of_keys_and_values_are_those_of_the_gates_text(export, source):
  """Of the first layer's values, in float64 NumPy: norm, then product."""
  form = COMPRESSED | {"export.kv_cache": "e4m3"}
  done = export(**form)
  assert done.code == 0, done.stderr
  assert json.loads(done.stdout)["tensor_parallel"] == [1, 2]
  stated = json.loads((done.target / "config.json").read_text())["quantization_config"]
  assert stated["kv_cache_scheme"] == {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False
  }  # fmt: skip
  folder, before = (hf_tensors.Folder(str(f)) for f in (done.target, source))
  cfg = hf_config.read_config(str(source))
  hf_weights.check(folder, cfg)
  texts = divergence.batches(done.spec, divergence.Wanted(64, "", "export.gate_"))
  tokens = np.concatenate([b.tokens_BL[b.counts_BL > 0] for b in texts])
  x = before.read("model.embed_tokens.weight").astype(np.float64)[tokens]
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps)
  v = x @ before.read("model.layers.0.self_attn.v_proj.weight").astype(np.float64).T
  want = np.abs(v).max() / 448
  np.testing.assert_allclose(folder.read("model.layers.0.self_attn.v_scale"), [want], rtol=1e-5)
  assert folder.read("model.layers.1.self_attn.k_scale").shape == (1,)
  done = export(**FP8 | {"export.kv_cache": "e4m3"})
  assert done.code == 1 and "scales of keys and values are of export.format=" in done.stderr


@pytest.fixture
def full_disk():
  """No file grows beyond so many bytes: as on a full disk, the kernel's error names no file."""
  old = resource.getrlimit(resource.RLIMIT_FSIZE)
  jax.config.update("jax_enable_compilation_cache", False)  # its warning would end the job
  yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
  resource.setrlimit(resource.RLIMIT_FSIZE, old)
  jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize(
  "job, limit, place", [("export", 100_000, "target"), ("prepare", 20_000, "prepared")]
)
def test_a_full_disk_names_the_folder_that_was_being_written(
  export, tmp_path, full_disk, job, limit, place
):
  full_disk(limit)
  done = export(job, out=tmp_path / ("target" if job == "export" else "prepared"))
  assert done.code == 1, done.stdout
  told = f"error: {tmp_path / place}[^ ]* cannot be written: .*File too large.*; make room"
  assert re.search(told, done.stderr), done.stderr
  assert str(tmp_path / "run") not in done.stderr and len(done.stderr.splitlines()) <= 2
  assert not (tmp_path / "target.part").exists()


def test_a_full_disk_names_the_file_of_a_result(tmp_path, full_disk):
  full_disk(200)
  with pytest.raises(
    UserError, match=f"{tmp_path / 'table.json'} cannot be written: File too large; make room"
  ):
    provenance.write_json(str(tmp_path), "table.json", list(range(1000)))


class Hub:
  """huggingface_hub.HfApi, as far as an export uses it."""

  def __init__(self):
    self.calls, self.fails = [], ""

  def whoami(self):
    if self.fails == "whoami":
      raise OSError("no token")

  def create_repo(self, repository, **how):
    self.calls.append((repository, how))
    return f"hub/{repository}"

  def upload_folder(self, **how):
    if self.fails == "upload_folder":
      raise OSError("too large")
    self.calls.append(how)


def test_export_uploads_its_own_files_to_a_private_repository(export, monkeypatch, tmp_path):
  hub = Hub()
  monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
  to = {"export.push_to": "org/name"}
  hub.fails = "whoami"
  done = export(**to)
  assert done.code == 1 and "no token; log in with `hf auth login`" in done.stderr
  assert not done.target.exists() and not hub.calls
  hub.fails = "upload_folder"
  done = export(**to)
  assert done.code == 1 and "hf upload org/name" in done.stderr and done.target.exists()
  (done.target / "notes.txt").write_text("mine")
  hub.fails, hub.calls = "", []
  done = export(**to)
  assert json.loads(done.stdout)["pushed_to"] == "hub/org/name"
  made, upload = hub.calls
  assert made == ("org/name", {"private": True, "exist_ok": True})
  assert (
    upload["folder_path"] == str(done.target) and "model.safetensors" in (upload["allow_patterns"])
  )
  assert "notes.txt" not in upload["allow_patterns"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe, strategy", [("block_128_pow2", ""), ("tensor_delayed", "tensor")])
def test_a_checkpoint_is_exported_with_the_codes_of_its_next_step(
  export, tmp_path, recipe, strategy
):
  """The scales are those of the masters' own tiles, or of the checkpoint's amax history."""
  changes = {
    "weights.hf": "", "init.hf": "", "model.preset": "debug", "steps": 2, "optim.warmup_steps": 1,
    "optim.decay_steps": 1, "eval.tokens": 256, "optim.master_format": "bf16_remainder",
    "precision.rules": (("head", "bf16"), ("layers/.*", recipe)),
    "export.format": "compressed-tensors" if strategy else "hf-fp8-block",
    **({"export.strategy": strategy} if strategy else {}),
    **{f"model.{k}": v for k, v in harness.BLOCKS.items()},
  }  # fmt: skip
  assert export("train", **changes).code == 0
  done = export(**changes)
  assert done.code == 0, done.stderr
  other = export(**changes | {"precision.rules": ((".*", "bf16"),)})
  assert other.code == 1 and "precision.rules is" in other.stderr, other.stderr
  here, _, there = other.stderr.partition(" here and ")
  assert recipe not in here and recipe in there.partition(" in the checkpoint of step 2")[0]
  result = json.loads(done.stdout)
  assert result["codes_of_training"] == 14 and result["step"] == 2
  assert result["scale_fmt"] == ("float32" if strategy else "ue8m0")
  stored, _, meta = restore.restore_params(done.spec, str(tmp_path / "run"))
  w = np.asarray(stored["layers"]["mlp"]["up"].high[1], np.float32).T  # as a GEMM reads it
  if strategy:
    states = restore.restore_scaling_states(done.spec, str(tmp_path / "run"), 2, meta, 0)
    amax = np.asarray(states["layers/mlp/up"].amax_3)[1, 1]
    assert amax != np.abs(w).max()  # of a past step
    scales = np.float32([[amax * np.float32(1 / 448)]])
  else:
    tiles = np.abs(w).reshape(2, 128, 1, 128).max((1, 3))
    scales = np.float32(2.0 ** np.ceil(np.log2(tiles.astype(np.float64) / 448)))
  raw = dict(safetensors.deserialize((done.target / "model.safetensors").read_bytes()))
  name = "model.layers.1.mlp.up_proj."
  written = raw[name + ("weight_scale" if strategy else "weight_scale_inv")]["data"]
  np.testing.assert_array_equal(np.frombuffer(written, np.float32), scales.ravel())
  want = np.clip(w * np.kron(1 / scales, np.ones((256 // len(scales), 128))), -448, 448)
  codes = np.frombuffer(raw[name + "weight"]["data"], ml_dtypes.float8_e4m3fn).reshape(256, 128)
  np.testing.assert_array_equal(codes, want.astype(np.float32).astype(codes.dtype))
