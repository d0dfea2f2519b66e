"""vLLM in an interpreter of its own, as the second reader of an export: as it serves the folder.

On the device of that environment, in bfloat16, which its quantized kernels take. A device without a
kernel for a format is refused with vLLM's own error, and so is a GPU whose memory another process
holds: vLLM asks for most of it, and JAX_PLATFORMS=cpu leaves it to vLLM.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8jax.errors import UserError
from fp8jax.export import client
from fp8jax.export.settings import Export

# Begins the one line that the script prints for us.
_MARK = "fp8jax: "
# Kernels that multiply activations as they come, whatever the folder says; by vLLM 0.32's source.
_IN_16_BITS = re.compile(
  "A16|Marlin|Emulation|^CPUFp8BlockScaledMMKernel$|^CPUFp8PerTensorScaledMMLinearKernel$"
)
# Logits are those that its log-probabilities are made of, kept where it computes them: as text they
# would be a hundred bytes each. They are held against the log-probabilities that it returns.
_LOGITS = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
               "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_CPU_KVCACHE_SPACE", "1")):
  os.environ.setdefault(name, value)
import numpy, vllm
folder, tokens, names, target = sys.argv[1:]
rows, (mark, names) = numpy.load(tokens), json.loads(names)
length = rows.shape[1] + 1
model = vllm.LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
                 max_model_len=length, max_num_batched_tokens=length, max_num_seqs=1,
                 enable_prefix_caching=False, disable_log_stats=True)
kept = []
def watch(model):
  inner = model.compute_logits
  def compute_logits(*args, **kwargs):
    logits = inner(*args, **kwargs)
    kept.append(logits.float().cpu().numpy())
    return logits
  model.compute_logits = compute_logits
def layers(model):
  modules, kinds_of = dict(model.named_modules()), {}
  fused = {part: whole for whole, parts in getattr(model, "packed_modules_mapping", {}).items()
           for part in parts}
  for name in names:
    place = name.removesuffix(".weight").split(".")
    place[-1] = fused.get(place[-1], place[-1])
    module = modules.get(".".join(place))
    method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
    parts = [method, scheme, *vars(scheme or method).values()] if method else []
    kinds = [type(x).__name__ for x in parts if x is not None]
    kinds_of[name] = kinds[: 1 + (scheme is not None)] + [k for k in kinds if k.endswith("Kernel")]
  return kinds_of
layers_of, = model.apply_model(layers)
model.apply_model(watch)
how = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
made = []
for row in rows.tolist():
  kept.clear()
  answer, = model.generate([{"prompt_token_ids": row}], how, use_tqdm=False)
  # First that of the token to come; its second model runner then gives all rows, the first does
  # without the last.
  last, logits = kept[0][-1:], numpy.concatenate(kept[1:])[: len(row) - 1]
  if len(logits) != len(row) - 1:
    raise RuntimeError(f"vLLM computed {len(logits)} rows of logits of {len(row)} tokens")
  of_next = logits[numpy.arange(len(row) - 1), row[1:]].astype(float)
  wide = logits.astype(float)
  top = wide.max(-1)
  of_next -= top + numpy.log(numpy.exp(wide - top[:, None]).sum(-1))
  stated = [one[t].logprob for one, t in zip(answer.prompt_logprobs[1:], row[1:])]
  if not numpy.allclose(of_next, stated, atol=1e-2):
    raise RuntimeError("vLLM's log-probabilities are not those of its logits")
  made.append(numpy.concatenate([logits, last]))
numpy.save(target, numpy.stack(made))
device = str(next(iter(model.apply_model(lambda m: str(next(m.parameters()).device)))))
print(mark + json.dumps({"layers": layers_of, "device": device}))
"""


def logits(
  e: Export, folder: str, tokens_BL: np.ndarray, vocab_size: int, inputs: Mapping[str, bool]
) -> tuple[np.ndarray, dict[str, Any]]:
  """Logits [B, L, V], float32, and {"device": its own, "layers": {"LayerMethod, Scheme, Kernel":
  how many of the folder's quantized matrices}}.

  Args:
    inputs: {weight: whether its activations are quantized} of the folder's quantized matrices.

  Raises:
    UserError: it cannot read the folder, or fell back to unquantized weights or activations.
  """
  shape, made, answer = (*tokens_BL.shape, vocab_size), None, {}
  with tempfile.TemporaryDirectory() as scratch:
    files = [os.path.join(scratch, name) for name in ("tokens.npy", "logits.npy")]
    np.save(files[0], tokens_BL)
    names = json.dumps([_MARK, sorted(inputs)])
    error, printed = client.run(
      e.client_python, _LOGITS, os.path.abspath(folder), files[0], names, files[1]
    )
    with contextlib.suppress(OSError, ValueError):
      lines = [line for line in printed.splitlines() if line.startswith(_MARK)]
      answer = json.loads(lines[-1].removeprefix(_MARK)) if lines else {}
      made = np.load(files[1]) if answer and not error else None
  made = client.checked(e, made, shape, error, printed)
  counts: dict[str, int] = {}
  for name, quantizes in inputs.items():
    kinds = answer["layers"].get(name) or ["no layer"]
    _check_layer(name, kinds, quantizes, answer["device"])
    label = ", ".join(kinds)
    counts[label] = counts.get(label, 0) + 1
  return made, {"device": answer["device"], "layers": counts}


def _check_layer(name: str, kinds: list[str], quantizes: bool, device: str):
  """Refuses a matrix that vLLM multiplies unquantized, or with activations of 16 bits."""
  what = ""
  if kinds == ["no layer"] or kinds[0].startswith("Unquantized"):
    what = "it fell back to unquantized weights; please report it with its version"
  elif quantizes and any(map(_IN_16_BITS.search, kinds)):
    what = (
      "activations stay in 16 bits there; check it on the device that serves, or export a recipe "
      "of weights alone"
    )
  if what:
    raise UserError(
      f"export refused, nothing was written: vLLM multiplies {name} by {', '.join(kinds)} on "
      f"{device}: {what}"
    )
