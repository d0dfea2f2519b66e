"""Keys of --job=generate."""

import dataclasses

from fp8jax.generation import cache
from fp8jax.generation.sampling import Sampling
from fp8jax.keys import NOTHING, key, section
from fp8jax.models.config import EVAL_PRECISIONS


# A table: a key a row, its meaning beside it.
# fmt: off
@section("generate", NOTHING, mapped=True)
class Generate:
  """The completions of --job=generate, on one device."""

  hf: str = key("", "this Hugging Face folder instead of the workdir's checkpoint (eval.step)")
  prompts: str = key("", 'File of prompts: JSON lines with "prompt" (text) or "messages" (a chat, '
    "written by the tokenizer's template); any other file has a prompt per line. \"\" reads lines "
    "of standard input.")
  out: str = key("", 'JSON lines to write, one per completion as it ends; "" streams texts to '
    "standard output.")
  precision: str = key("recipe", 'forward pass: "recipe" (that of training) or "bf16"',
    choices=EVAL_PRECISIONS)
  cache_format: str = key("compute", 'Keys and values of past tokens: "compute" '
    '(precision.compute_dtype), or "e4m3" with a float32 scale per head of every token.',
    choices=cache.FORMATS)
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


# fmt: on
