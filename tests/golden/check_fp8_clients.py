"""Quantized folders in real clients: their dequantized weights and logits beside fp8jax's.

Not a test: it needs torch, transformers and compressed-tensors, which fp8jax never imports, so it
runs in two halves. Its findings are tests/golden/fp8_clients.json.

  PYTHONPATH=. .venv/bin/python tests/golden/check_fp8_clients.py write FOLDER assets/smollm2-135m
      (fp8jax's environment: exports of a small random model, and of SmolLM2, weights and logits)
  python3.11 tests/golden/check_fp8_clients.py compare FOLDER tests/golden/fp8_clients.json
      (pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
      compressed-tensors==0.20.0)
"""

import json
import pathlib
import sys

import numpy as np

LENGTH = 64
# Folder: (export.format, recipes of sites or one of FP8's schemes).
SMALL = {
  "block": ("hf-fp8-block", "float32"), "block_ue8m0": ("hf-fp8-block", "ue8m0"),
  "compressed_block": ("compressed-tensors", "fp8_block"),
  "compressed_channel": ("compressed-tensors", "fp8_dynamic"),
  "compressed_tensor_static": ("compressed-tensors", "fp8"),
  **{name: ("compressed-tensors", name) for name in (
    "fp8_channel_static", "fp8_240_dynamic", "w8a16", "int8", "int8_static", "w4a16", "w4a16_g64",
    "w4afp8", "w4afp8_g64", "mxfp8_ste", "mxfp4a16", "mxfp4_ste", "nvfp4a16", "nvfp4_ste",
    "nvfp4a16_4or6",
  )},
  "mixed": ("compressed-tensors", (
    ("layers/.*/mlp/.*", "w4a16"), ("layers/.*/attn/o", "bf16"), ("layers/.*", "fp8_dynamic"),
  )),
  **{f"{name}_24": ("compressed-tensors", name) for name in ("w4a16", "fp8_dynamic")},
  "modelopt": ("modelopt", "nvfp4_ste"), "modelopt_a16": ("modelopt", "nvfp4a16"),
}  # fmt: skip


# --- fp8jax's half -------------------------------------------------------------------------------


def write(folder, smollm2=""):
  import jax

  from fp8jax import params
  from fp8jax.models import presets, transformer
  from fp8jax.models.config import ModelConfig
  from fp8jax.models.hf import weights as hf_weights

  cfg = ModelConfig(
    architecture="qwen2", vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=64, max_positions=256, qkv_bias=True, init_std=0.05,
  )  # fmt: skip
  weights = params.init(jax.random.key(0), transformer.params(cfg), cfg.dims)
  weights["layers"]["attn"]["q_bias"] = 0.1 * jax.random.normal(jax.random.key(1), (2, 4, 64))
  tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (1, LENGTH))
  for name, (form, how) in SMALL.items():
    own = _two_of_four(weights, cfg) if name.endswith("_24") else weights
    _write_one(pathlib.Path(folder) / name, own, cfg, form, how, tokens)
  if not smollm2:
    return
  weights, _ = hf_weights.load_params(smollm2, presets.SMOLLM2_135M)
  text = pathlib.Path(__file__).parents[2] / "README.md"
  tokens = _tokens(smollm2, text.read_text())
  for name in ("fp8_dynamic", "w4a16_g64"):
    target = pathlib.Path(folder) / f"smollm2_{name}"
    _write_one(target, weights, presets.SMOLLM2_135M, "compressed-tensors", name, tokens)


def _two_of_four(weights, cfg):
  from fp8jax import params
  from fp8jax.models import transformer
  from fp8jax.optim import sparsity

  declared, flat = params.flatten(transformer.params(cfg)), params.flatten(weights)
  axes = {path: sparsity.axis_of(path, p) for path, p in declared.items()}
  sparse = {path: sparsity.kept(flat[path], flat[path], a) for path, a in axes.items() if a}
  return params.unflatten(flat | sparse)


def _tokens(folder, text):
  from fp8jax.data.tokenize import Tokenizer

  return Tokenizer(folder).encode(text)[None, :LENGTH]


def _write_one(target, weights, cfg, form, how, tokens):
  from fp8jax.evaluation import divergence
  from fp8jax.export import fp8 as fp8_export
  from fp8jax.export import write as write_lib
  from fp8jax.generation import weights as generation_weights
  from fp8jax.models import transformer
  from fp8jax.models.hf import names, schemes
  from fp8jax.models.hf import tensors as hf_tensors
  from fp8jax.models.hf import weights as hf_weights
  from fp8jax.ops import site_tree

  entries, method = names.entries(cfg), fp8_export.METHODS[form]
  follows = method != schemes.FINE_GRAINED
  rules = how if isinstance(how, tuple) else (("layers/.*", how if follows else "bf16"),)
  sites, plain = (
    site_tree.build_sites(transformer.site_params(cfg), cfg.dims, (("head", "bf16"), *r),
                          backends=site_tree.Backends("reference"))
    for r in (rules, (("layers/.*", "bf16"),))
  )  # fmt: skip
  default = schemes.fp8(method, "channel" if follows else "block")
  if method == schemes.MODELOPT:
    default = schemes.Scheme(method, schemes.NVFP4, schemes.NVFP4_INPUTS)
  fmt, recipes = "auto" if follows else how, site_tree.recipes_of(sites)
  how = dict(follows=follows, scale_fmt=fmt)
  spec = fp8_export.choose(entries, cfg.dims, recipes, default, **how)
  inputs = {(fp8_export.site_of(e), "x"): 8.0 for e in entries if e.layer is not None}
  spec = fp8_export.with_amaxes(spec, entries, {}, inputs)
  write_lib.save(str(target), write_lib.model(weights, cfg, "bfloat16", fp8=spec))
  folder = hf_tensors.Folder(str(target))
  matrices = {name: folder.read_float(name) for name in spec.matrices}
  back, _ = hf_weights.load_params(str(target), cfg)
  logits = {name: _logits(w, plain, tokens, cfg) for name, w in
            {"source": weights, "back": back}.items()}  # fmt: skip
  if follows and not any(r.is_stateful for r in recipes.values()):
    kept = generation_weights.multiplied_as_codes(recipes)
    codes, _ = hf_weights.load_params(str(target), cfg, codes_of=kept)
    logits["recipe"] = _logits(codes, sites, tokens, cfg)
    logits["nudged_back"] = _logits(divergence.nudged(back), plain, tokens, cfg)
    logits["nudged"] = _logits(divergence.nudged(codes), sites, tokens, cfg)
  np.savez(target / "ours.npz", tokens=tokens, **logits)
  np.savez(target / "matrices.npz", **matrices)
  share = f"{spec.share:.1%}"
  print(f"{target.name}: {len(matrices)} matrices, {share} of the parameters", flush=True)


def _logits(weights, sites, tokens, cfg):
  import jax
  import jax.numpy as jnp

  from fp8jax.models import transformer
  from fp8jax.models.config import ComputeConfig

  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  batch = {"tokens_BL": jnp.asarray(tokens, jnp.int32), "positions_BL": positions}
  run = jax.jit(lambda p, b: transformer.logits(p, sites, b, cfg, ComputeConfig()))
  return np.asarray(run(weights, batch))[0]


# --- the clients' half ---------------------------------------------------------------------------


def compare(folder, path):
  import importlib.metadata

  names = ("torch", "transformers", "accelerate", "compressed-tensors")
  versions = {name: importlib.metadata.version(name) for name in names}
  rows = []
  for target in sorted(p.parent for p in pathlib.Path(folder).glob("*/ours.npz")):
    rows.append(_compare_one(target))
    print(json.dumps(rows[-1]), flush=True)
  found = json.dumps({"versions": versions, "folders": rows}, indent=2)
  pathlib.Path(path).write_text(found + "\n")
  # Codes of 4 bits float are dequantized to bfloat16 there.
  wrong = [row["folder"] for row in rows if row["largest_relative_difference"] > 2.0**-8
           or row["quantized_in_client"] < row["matrices"]]  # fmt: skip
  if wrong:
    sys.exit(f"dequantized weights differ: {', '.join(wrong)}")


def _compare_one(target):
  import torch
  from transformers import AutoModelForCausalLM

  stated = json.loads((target / "config.json").read_text())["quantization_config"]
  is_fine_grained = stated["quant_method"] == "fp8"
  read = target if stated["quant_method"] != "modelopt" else _converted(target)
  # What compressed-tensors dequantizes to bfloat16 is cast afterwards, the rest cannot be.
  in_bf16 = is_fine_grained or any(
    x in (read / "config.json").read_text() for x in ("mxfp", "nvfp4")
  )
  how = {} if is_fine_grained else {"dtype": torch.bfloat16 if in_bf16 else torch.float32}
  model = AutoModelForCausalLM.from_pretrained(read, **how).eval()
  ours, modules = np.load(target / "matrices.npz"), dict(model.named_modules())
  # With a scheme, or, of fine-grained FP8 on a CPU, dequantized.
  quantized = sum(
    is_fine_grained or getattr(modules[n.removesuffix(".weight")], "quantization_scheme", 0) != 0
    for n in ours.files
  )
  data = np.load(target / "ours.npz")
  with torch.no_grad():
    if in_bf16:
      model(torch.zeros(1, 1).long())
      model = torch.nn.Module.float(model)  # transformers' own refuses
    logits = model(torch.from_numpy(data["tokens"]).long()).logits[0].double()
  different = largest = most = 0
  for name in ours.files:
    want, weight = torch.from_numpy(ours[name]), modules[name.removesuffix(".weight")].weight
    if is_fine_grained:  # on a CPU transformers dequantizes to bfloat16
      want = want.bfloat16().float()
    most = max(most, int((weight.float().reshape(-1, 4) != 0).sum(-1).max()))
    different += int((weight.float() != want).sum())
    ulps = (weight.float() - want).abs() / want.abs().clamp(min=1e-30)
    largest = max(largest, float(ulps.max()))
  row = {
    "folder": target.name, "quantization": stated["quant_method"],
    "format": stated.get("format") or stated.get("quant_algo", "block"),
    "matrices": len(ours.files), "quantized_in_client": quantized,
    "unequal_weights": different, "largest_relative_difference": largest,
    "weights_in_client": str(weight.dtype),
    **({"most_of_four": most} if target.name.endswith("_24") else {}),
  }  # fmt: skip
  for reference in ("back", "recipe", "source"):
    if reference not in data.files:
      continue
    p, q = (torch.log_softmax(x, -1) for x in (torch.from_numpy(data[reference]).double(), logits))
    row[f"kl_from_{reference}"] = float((p.exp() * (p - q)).sum(-1).mean())
    if reference == "recipe":
      n = torch.log_softmax(torch.from_numpy(data["nudged"]).double(), -1)
      row["kl_of_noise_floor"] = float((p.exp() * (p - n)).sum(-1).mean())
    row[f"top1_of_{reference}"] = float((p.argmax(-1) == q.argmax(-1)).double().mean())
  row["largest_logit_difference_from_back"] = float(
    (torch.from_numpy(data["back"]).double() - logits).abs().max()
  )
  return row


def _converted(target):
  """ModelOpt's as compressed-tensors' own converter makes it: transformers reads none."""
  from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import (
    ModelOptNvfp4Converter,
  )
  from safetensors.torch import load_file, save_file

  made = target.with_name(f"{target.name}_converted")
  made.mkdir(exist_ok=True)
  converter = ModelOptNvfp4Converter(ignore=["lm_head"], targets=["re:.*_proj$"])
  tensors = converter.validate(load_file(target / "model.safetensors"))
  save_file({k: x.reshape(1) if x.ndim == 0 else x for k, x in tensors.items()},
            made / "model.safetensors", {"format": "pt"})  # fmt: skip
  config = json.loads((target / "config.json").read_text())
  stated = json.loads(converter.update_config(None).model_dump_json())
  if config["quantization_config"]["quant_algo"] != "NVFP4":
    stated["config_groups"]["config_group_0"]["input_activations"] = None
  (made / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
  return made


if __name__ == "__main__":
  {"write": write, "compare": compare}[sys.argv[1]](*sys.argv[2:])
