"""Keys of --job=export."""

from fp8jax.keys import NOTHING, key, section
from fp8jax.models.hf import schemes
from fp8jax.models.hf import tensors as hf_tensors


# A table: a key a row, its meaning beside it.
# fmt: off
@section("export", NOTHING, mapped=True)
class Export:
  """The folder that --job=export writes."""

  format: str = key("hf-bf16", '"hf-bf16": all weights in export.dtype. "hf-fp8-block": FP8 as '
    'DeepSeek-V3 and Qwen publish it, 128x128. "compressed-tensors": as llm-compressor writes it, '
    'in the formats of the recipes or by export.strategy. "modelopt": NVFP4 as ModelOpt writes it. '
    "\"peft\": the adapters alone, in PEFT's format.",
    choices=schemes.FORMATS)
  dtype: str = key("auto", 'Of weights that are not FP8: "bfloat16", "float16", "float32", or '
    '"auto": as imported, else bfloat16.', choices=("auto", *hf_tensors.DTYPES))
  strategy: str = key("auto", 'compressed-tensors: what shares a scale of FP8: "channel", "block", '
    '"tensor"; "auto": each matrix as its recipe says, else channels.',
    choices=("auto", *schemes.STRATEGIES))
  scale_fmt: str = key("auto", 'hf-fp8-block: "float32", "ue8m0" (powers of two), or "auto": as '
    "training multiplied.", choices=("auto", *schemes.SCALE_FMTS))
  requantize: bool = key(False, "Whether a format that cannot hold the codes of training, or of a "
    "folder, gets new ones, from the masters.")
  input_scales: str = key("", "compressed-tensors: table of --job=calibrate that static scales of "
    'inputs come from; "": servers scale every token.')
  kv_cache: str = key("", '"e4m3": the folder has scales of keys and values, from the ranges of '
    "the gate's text, for servers with an E4M3 cache. Of compressed-tensors and modelopt.",
    choices=("", "e4m3"))
  gate_tokens: int = key(1024, "The gate: the logits of the written folder are compared with the "
    "source's on so many tokens, of every data source's held-out documents or of gate_text.",
    least=1)
  gate_text: str = key("", 'text file to compare on; "": held-out documents')
  max_kl: float = key(0.1, "nats per token; a folder that differs more is not written")
  client_python: str = key("", "Python of an environment with torch, transformers and, by format, "
    'accelerate or compressed-tensors, or with vllm, which then reads the folder too: '
    '"torch-env/bin/python".')
  client: str = key("transformers", 'Which reader export.client_python has: "transformers", on the '
    'CPU and in float32, or "vllm", as it serves: on the device of that environment, in bfloat16.',
    choices=("transformers", "vllm"))
  push_to: str = key("", "repository of the Hugging Face hub, ORG/NAME; made private if new")
  fold_smooth_batches: int = key(0, 'After training with precision.smooth_swiglu="channel": fold '
    "its scales, measured over so many held-out batches of every source, into up and down, for "
    "FP8 inference with plain SwiGLU. In 16 and 32 bits the model stays the same. 0: weights as "
    "trained.", least=0)


# fmt: on
