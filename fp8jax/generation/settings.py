"""Keys of --job=generate."""

import dataclasses
import math

from fp8jax.keys import NOTHING, key, section
from fp8jax.models.config import EVAL_PRECISIONS

# Of the cache of keys and values.
CACHE_FORMATS = COMPUTE, FP8, ROTATED, FOLDER = "compute", "e4m3", "e4m3_rotated", "e4m3_folder"
# Of quantized weights.
WEIGHT_FORMS = CODES, VALUES = "codes", "values"


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are drawn.

  Attributes:
    temperature: divides the logits; 0 takes the best token.
    top_p: the smallest set of most probable tokens that has at least this probability; 1 is all.
    top_k: so many most probable tokens; 0 is all.
    max_new_tokens: tokens after which a completion ends, the end token among them.
    stop: texts at which a completion ends; they are left out of its text.
    seed: of all draws.
  """

  temperature: float = 0.0
  top_p: float = 1.0
  top_k: int = 0
  max_new_tokens: int = 256
  stop: tuple[str, ...] = ()
  seed: int = 0

  def problems(self, where: str = "") -> list[str]:
    """Values that mean nothing, in words; `where` stands before the fields' names, "generate."."""
    texts = []

    def check(ok: bool, name: str, expected: str):
      if not ok:
        texts.append(f"{where}{name}={getattr(self, name)!r} must be {expected}")

    check(0 <= self.temperature < math.inf, "temperature", "0 (greedy) or positive and finite")
    check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (1 keeps all tokens)")
    check(self.top_k >= 0, "top_k", "at least 0 (0 keeps all tokens)")
    check(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
    check(0 <= self.seed < 2**63, "seed", "from 0 to 2**63 - 1")
    is_texts = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
    check(is_texts, "stop", "a tuple of texts that are not empty")
    return texts


# A table: a key a row, its meaning beside it.
# fmt: off
@section("generate", NOTHING, mapped=True)
class Generate:
  """The completions of --job=generate, on the mesh: prompts over mesh.data and mesh.fsdp, heads,
  features and vocabulary over mesh.tensor.
  """

  prompts: str = key("", 'File of prompts: JSON lines with "prompt" (text) or "messages" (a chat, '
    "written by the tokenizer's template); any other file has a prompt per line. \"\" reads lines "
    "of standard input.")
  out: str = key("", 'JSON lines to write, one per completion as it ends; "" streams texts to '
    "standard output.")
  precision: str = key("recipe", 'forward pass: "recipe" (that of training) or "bf16"',
    choices=EVAL_PRECISIONS)
  weights: str = key("codes", 'Quantized weights in memory: "codes" and scales, about 1 byte per '
    'parameter in FP8; "values": dequantized once, 4 bytes each, with kernels.matmul="dequantized" '
    "on a CPU: the same products, sooner.",
    choices=WEIGHT_FORMS)
  cache_format: str = key("compute", 'Keys and values of past tokens: "compute" '
    '(precision.compute_dtype), "e4m3" with a float32 scale per head of every token; '
    '"e4m3_rotated": the same with queries and keys in a Hadamard rotation of every head, against '
    "several channels that are large in both; \"e4m3_folder\", by the scales of keys and values "
    "that export.kv_cache writes.",
    choices=CACHE_FORMATS)
  slots: int = key(8, "sequences that are decoded together", least=1)
  max_length: int = key(0, "tokens of prompt and completion a slot holds; 0: as many as needed",
    least=0)
  num_samples: int = key(1, "completions per prompt", least=1)
  temperature: float = key(0.0, "0 takes the best token")
  top_p: float = key(1.0, "the smallest set of tokens that has this probability; 1 keeps all")
  top_k: int = key(0, "so many most probable tokens; 0 keeps all")
  max_new_tokens: int = key(256, "tokens per completion at most")
  stop: tuple[str, ...] = key((), "texts at which a completion ends")
  stop_tokens: tuple[str, ...] = key((), "names of tokens that end one, beside the model's own")
  seed: int = key(0, "of all draws")

  @property
  def sampling(self) -> Sampling:
    """How tokens are drawn."""
    return Sampling(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Sampling)})


@section("plan_inference", NOTHING, mapped=True)
class PlanInference:
  """The table of --job=plan_inference: what the model takes, served on --topology=h100:8, in the
  configuration's rules and in other formats; sequences have generate.max_length tokens (0: the
  model's longest) in generate.cache_format.
  """

  formats: tuple[str, ...] = key(("bf16", "fp8", "fp8_dynamic", "fp8_block", "int8", "w4a16",
    "w4afp8", "mxfp8_ste", "mxfp4_ste", "nvfp4_ste"), "recipes of the linear layers of all layers, "
    "a row each; the head stays in the compute dtype")
  reserve: float = key(0.1, "share of a GPU's memory that is left to activations, workspaces and "
    "the driver", least=0)


# fmt: on
