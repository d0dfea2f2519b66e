"""Keys of the jobs calibrate, export, prepare and sensitivity."""

from fp8jax.keys import NOTHING, key, section
from fp8jax.models.hf import fp8_formats
from fp8jax.models.hf import weights as hf_weights
from fp8jax.quantization import clipping

# Sets of sites that --job=sensitivity measures alone.
SENSITIVITY_GROUPS = ("tensors", "kinds", "layers")


# A table: a key a row, its meaning beside it.
# fmt: off
@section("export", NOTHING, mapped=True)
class Export:
  """The folder that --job=export writes."""

  path: str = key("", 'folder to write; "" is WORKDIR/hf')
  format: str = key("hf-bf16", '"hf-bf16": all weights in export.dtype. "hf-fp8-block": FP8 as '
    'DeepSeek-V3 and Qwen publish it, 128x128. "compressed-tensors": FP8 as llm-compressor writes '
    "it, by export.strategy. \"peft\": the adapters alone, in PEFT's format.",
    choices=fp8_formats.FORMATS)
  dtype: str = key("auto", 'Of weights that are not FP8: "bfloat16", "float16", "float32", or '
    '"auto": as imported, else bfloat16.', choices=("auto", *hf_weights.DTYPES))
  strategy: str = key("channel", "compressed-tensors: what shares a scale: channel, block, tensor",
    choices=fp8_formats.STRATEGIES)
  scale_fmt: str = key("auto", 'hf-fp8-block: "float32", "ue8m0" (powers of two), or "auto": as '
    "training multiplied.", choices=("auto", *fp8_formats.SCALE_FMTS))
  requantize: bool = key(False, "Whether an FP8 format that cannot hold the codes of training gets "
    "new ones, from the masters.")
  input_scales: str = key("", "compressed-tensors: table of --job=calibrate that static scales of "
    'inputs come from; "": servers scale every token.')
  gate_tokens: int = key(1024, "The gate: the logits of the written folder are compared with the "
    "source's on so many tokens, of every data source's held-out documents or of gate_text.",
    least=1)
  gate_text: str = key("", 'text file to compare on; "": held-out documents')
  max_kl: float = key(0.1, "nats per token; a folder that differs more is not written")
  client_python: str = key("", "Python of an environment with torch, transformers and, by format, "
    "accelerate or compressed-tensors, which then reads the folder too, on the CPU: "
    '"torch-env/bin/python".')
  push_to: str = key("", "repository of the Hugging Face hub, ORG/NAME; made private if new")
  fold_smooth_batches: int = key(0, 'After training with precision.smooth_swiglu="channel": fold '
    "its scales, measured over so many held-out batches of every source, into up and down, for "
    "FP8 inference with plain SwiGLU. In 16 and 32 bits the model stays the same. 0: weights as "
    "trained.", least=0)


@section("calibrate", NOTHING, mapped=True)
class Calibrate:
  """The table that --job=calibrate writes."""

  path: str = key("", 'table to write; "" is WORKDIR/calibration.json')
  batches: int = key(8, "training batches to watch", least=1)
  method: str = key("amax", 'Amax of a delayed or static scale: "amax", the largest magnitude; '
    '"percentile", below which are so many percent of the elements; or "mse", the one with the '
    "least squared error. The last two saturate outliers.", choices=clipping.METHODS)
  percentile: float = key(99.99, 'of method "percentile"')


@section("sensitivity", NOTHING, mapped=True)
class Sensitivity:
  """The measurements of --job=sensitivity, on one device: the loss that each linear layer's forward
  GEMM loses by its recipe, with eval.hf's weights, the workdir's checkpoint's, or init.hf's.
  """

  path: str = key("", 'folder of results, to which the same command adds; "": WORKDIR/sensitivity')
  tokens: int = key(8192, "Held-out tokens per source, rounded up to whole batches of eval.batch: "
    "rules are chosen on one half and reported on the other. Memory: tokens x layers x "
    "hidden_size x 4 bytes on the host.")
  groups: tuple[str, ...] = key(("tensors", "kinds", "layers"),
    'Switched on alone and measured, beside all at once: "kinds" (mlp/up of all layers), '
    '"layers", and "tensors" (inputs or weights of all sites).')
  top: int = key(20, "sites measured alone, the most sensitive by estimate", least=0)
  max_loss: float = key(0.25, "Budget of a set of precision.rules: percent that the held-out loss "
    "may exceed BF16's; 0: none.")
  min_fp8: float = key(0.9, "Budget of another set: the least share of the sites' forward FLOPs "
    "that is quantized; 0: none.")


@section("prepare", NOTHING, mapped=True)
class Prepare:
  """The tokenized documents that --job=prepare writes."""

  path: str = key("", 'folder to write tokenized documents to; "" is WORKDIR/prepared')
  shard_tokens: int = key(100000000, "tokens per ArrayRecord file", least=1)
  processes: int = key(0, "that tokenize; 0: one per core, and one for less than 8 MiB of files",
    least=0)


# fmt: on
