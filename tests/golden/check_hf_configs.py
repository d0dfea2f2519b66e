"""Whether transformers reads what fp8jax writes: every folder of hf/, exported and loaded again.

Not a test: it needs torch and transformers, which fp8jax never imports, so it runs in two halves.

  .venv/bin/python tests/golden/check_hf_configs.py write OUT
      (fp8jax's environment: every folder, with its own config.json as the base and with none)
  oracle/bin/python tests/golden/check_hf_configs.py read OUT
      (once per version of transformers: python3.11 -m venv oracle && oracle/bin/pip install
      torch==2.13.0 transformers==5.23.0; then 4.57.6)

`read` adds its version to hf_exports.json: per export the largest difference of logits from
logits.npz, which transformers gave for the folder itself, and per rope type the options without
which this version refuses config.json, or guesses. tests/models/hf_exports_test.py holds every
config.json that is written today against the hash of the one that was read.
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
  from fp8jax.export import write as write_lib
  from fp8jax.models.hf import config as hf_config
  from fp8jax.models.hf import weights as hf_weights

  for name in FOLDERS:
    folder = str(HERE / "hf" / name)
    cfg = hf_config.read_config(folder)
    params, dtype = hf_weights.load_params(folder, cfg)
    for kind in ("with base", "without base"):
      base = hf_config.read_json(folder, "config.json") if kind == "with base" else None
      write_lib.save(f"{out}/{name}, {kind}", write_lib.model(params, cfg, dtype, base))


def required(config):
  """The rope options of a config.json without which transformers refuses it, or guesses."""
  import logging

  import transformers

  told = []
  handler = logging.Handler()
  handler.emit = lambda record: told.append(record.getMessage())
  logging.getLogger("transformers").addHandler(handler)
  found = []
  for key in config["rope_scaling"]:
    told.clear()
    rope = {k: v for k, v in config["rope_scaling"].items() if k != key}
    try:
      transformers.AutoConfig.for_model(**config | {"rope_scaling": rope})
    except (KeyError, ValueError) as e:
      told.append(str(e))
    found += [key] if any("issing required" in s or "is unset" in s for s in told) else []
  logging.getLogger("transformers").removeHandler(handler)
  return sorted(set(found) - {"rope_type"})


def read(out):
  import torch
  import transformers

  differences, hashes, ropes = {}, {}, {}
  for folder in sorted(pathlib.Path(out).iterdir()):
    golden = np.load(HERE / "hf" / folder.name.split(",")[0] / "logits.npz")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
      logits = model(torch.from_numpy(golden["tokens"])).logits.numpy()
    differences[folder.name] = float(np.abs(logits - golden["logits"]).max())
    config = json.loads((folder / "config.json").read_text())
    hashes[folder.name] = sha256(config)
    if config["rope_scaling"]:
      ropes.setdefault(config["rope_scaling"]["rope_type"], required(config))
    print(f"{folder.name}: {type(model).__name__}, {differences[folder.name]:.2g}")
  record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
  if record.get("config.json") != hashes:  # what other versions read is no longer written
    record = {"config.json": hashes, "logits": {}, "rope": {}}
  version = f"transformers {transformers.__version__}, torch {torch.__version__}"
  record["logits"] = {**record["logits"], version: differences}
  record["rope"] = {**record.get("rope", {}), version: ropes}
  RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
  {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
