"""Whether transformers reads what fp8jax writes: every folder of hf/, exported and loaded again.

Not a test: it needs torch and transformers, which fp8jax never imports, so it runs in two halves.

  .venv/bin/python tests/golden/check_hf_configs.py write OUT
      (fp8jax's environment: every folder, with its own config.json as the base and with none)
  oracle/bin/python tests/golden/check_hf_configs.py read OUT
      (once per version of transformers: python3.11 -m venv oracle && oracle/bin/pip install
      torch==2.13.0 transformers==5.23.0; then 4.57.6)

`read` adds its version to hf_exports.json: per export the largest difference of logits from
logits.npz, which transformers gave for the folder itself. tests/models/hf_exports_test.py holds
every config.json that is written today against the hash of the one that was read.
"""

import hashlib
import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
RECORD = HERE / "hf_exports.json"
FOLDERS = sorted(p.name for p in (HERE / "hf").iterdir() if p.is_dir())


def config_of(name, has_base):
  """config.json of an export of a folder."""
  from fp8jax.models.hf import config as hf_config

  folder = HERE / "hf" / name
  base = json.loads((folder / "config.json").read_text()) if has_base else None
  return hf_config.config_to_hf(hf_config.read_config(str(folder)), "float32", base)


def sha256(config):
  return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def write(out):
  sys.path.insert(0, str(HERE.parents[1]))
  from fp8jax.models.hf import config as hf_config
  from fp8jax.models.hf import weights as hf_weights

  for name in FOLDERS:
    folder = str(HERE / "hf" / name)
    cfg = hf_config.read_config(folder)
    params, dtype = hf_weights.load_params(folder, cfg)
    for kind in ("with base", "without base"):
      base = hf_config.read_json(folder, "config.json") if kind == "with base" else None
      hf_weights.save_params(f"{out}/{name}, {kind}", params, cfg, dtype, base)


def read(out):
  import torch
  import transformers

  differences, hashes = {}, {}
  for folder in sorted(pathlib.Path(out).iterdir()):
    golden = np.load(HERE / "hf" / folder.name.split(",")[0] / "logits.npz")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
      logits = model(torch.from_numpy(golden["tokens"])).logits.numpy()
    differences[folder.name] = float(np.abs(logits - golden["logits"]).max())
    hashes[folder.name] = sha256(json.loads((folder / "config.json").read_text()))
    print(f"{folder.name}: {type(model).__name__}, {differences[folder.name]:.2g}")
  record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
  if record.get("config.json") != hashes:  # what other versions read is no longer written
    record = {"config.json": hashes, "logits": {}}
  version = f"transformers {transformers.__version__}, torch {torch.__version__}"
  record["logits"] = {**record["logits"], version: differences}
  RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
  {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
