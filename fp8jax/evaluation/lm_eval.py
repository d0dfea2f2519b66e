"""A model of lm-evaluation-harness: its requests, answered by a Generator.

In Python, `lm_eval.simple_evaluate(model=FP8JaxLM("FOLDER"), tasks=[...])`; on the command line,

  python -m fp8jax.evaluation.lm_eval --model fp8jax --model_args pretrained=FOLDER --tasks TASK

which is lm_eval's own command with the model "fp8jax" registered. Requests are tokenized, cut on
the left and split into windows as lm_eval's Hugging Face backend does.
"""

import os
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
  get_rolling_token_windows,
  make_disjoint_window,
)

from fp8jax import hub
from fp8jax.data.chat import conversation
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError, read_json
from fp8jax.generation import api
from fp8jax.generation.settings import Sampling

_MAX_GEN_TOKENS = 256  # lm_eval's own default
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "seed"}


@register_model("fp8jax")
class FP8JaxLM(TemplateLM):
  """loglikelihood, loglikelihood_rolling and generate_until of a model."""

  backend = "causal"

  def __init__(
    self, pretrained: str = "", recipe: str = "bf16", compute_dtype: str = "auto", slots: int = 8,
    cache_format: str = "compute", max_length: int = 0, data: int = 1, tensor: int = 1,
    generator: api.Generator | None = None, batch_size: Any = None, max_batch_size: Any = None,
    device: Any = None,
  ):  # fmt: skip
    """
    Args:
      pretrained: Hugging Face folder, or an id that is in the hub's cache.
      recipe, compute_dtype, slots, cache_format, max_length, data, tensor: see generation.api.load.
      generator: a loaded model instead of `pretrained`.
      batch_size, max_batch_size, device: lm_eval's, unread: `slots` and JAX decide.
    """
    super().__init__()
    del batch_size, max_batch_size, device
    if (generator is None) == (not pretrained):
      raise UserError("name either `pretrained`, a Hugging Face folder, or give a `generator`")
    self.generator = generator or api.load(
      pretrained, recipe=recipe, compute_dtype=compute_dtype, slots=int(slots),
      cache_format=cache_format, max_length=int(max_length), data=int(data), tensor=int(tensor),
    )  # fmt: skip
    self.tokenizer: Tokenizer = self.generator.tokenizer
    self._bos = _bos(self.generator.folder or self.tokenizer.path)

  @property
  def eot_token_id(self) -> int:
    """The token that ends a document."""
    return self.tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The token before a text without context: the tokenizer's bos_token, else its eos_token."""
    token = self.tokenizer.token_id(self._bos) if self._bos else None
    return self.eot_token_id if token is None else token

  @property
  def max_length(self) -> int:
    """Tokens of the longest context."""
    return self.generator.max_length

  @property
  def tokenizer_name(self) -> str:
    """For lm_eval's cache of chat templates."""
    return self.tokenizer.path.replace("/", "__")

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
    """Ids; the tokenizer's own prefix is added unless the text begins with it."""
    if add_special_tokens is None:
      add_special_tokens = not (self._bos and string.startswith(self._bos))
    return list(self.tokenizer.encode_prompt(string, add_special_tokens))

  def chat_template(self, chat_template: bool | str = False) -> str:
    """The tokenizer's template; lm_eval stores it with the results."""
    return ChatTemplate.load(self.tokenizer.path).text if chat_template else ""

  def apply_chat_template(self, chat_history, add_generation_prompt: bool = True) -> str:
    """The text of a conversation, as training reads it; without the prompt, its last message is
    continued (a task's gen_prefix), as in lm_eval's Hugging Face backend."""
    turns = conversation.prompt({"messages": chat_history}, "lm_eval's request")["messages"]
    text = ChatTemplate.load(self.tokenizer.path).render(turns, add_generation_prompt)
    last = turns[-1]["content"].strip()
    if not add_generation_prompt and last not in text:
      raise UserError(
        f"the chat template of {self.tokenizer.path} does not write the last message as it is "
        f"({last[:40]!r}), so that it cannot be continued; leave out the task's gen_prefix"
      )
    return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

  def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_: Any):
    """[(log-probability, whether greedy)] of [(texts, context ids, continuation ids)]."""
    del disable_tqdm
    sequences = []
    for _, context, continuation in requests:
      continuation = continuation[-self.max_length :]
      room = self.max_length + 1 - len(continuation)
      sequences.append((context[-room:], continuation))
    return self.generator.score(sequences)

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """Log-probability of whole texts, in disjoint windows of the longest context."""
    del disable_tqdm
    windows, owners = [], []
    for index, request in enumerate(requests):
      tokens = self.tok_encode(request.args[0])
      pairs = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
      for context, continuation in map(make_disjoint_window, pairs):
        windows.append((None, context, continuation))
        owners.append(index)
    sums = [0.0] * len(requests)
    for index, (logp, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
      sums[index] += logp
    return sums

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """Completions up to the first of "until"; requests with equal settings are batched."""
    del disable_tqdm
    groups: dict[Sampling, list[int]] = {}
    for index, request in enumerate(requests):
      groups.setdefault(_sampling(request.args[1]), []).append(index)
    texts = [""] * len(requests)
    for sampling, members in groups.items():
      room = self.max_length - sampling.max_new_tokens
      if room < 1:
        raise UserError(
          f"max_gen_toks={sampling.max_new_tokens} leaves no room in a context of "
          f"{self.max_length}; lower it in the task's generation_kwargs"
        )
      prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in members]
      made = self.generator.generate(prompts, sampling)
      if wrong := self.generator.not_finite(prompts, made):
        raise UserError(wrong)
      for i, [completion] in zip(members, made, strict=True):
        texts[i] = completion.text
    return texts


def _sampling(wanted: dict[str, Any]) -> Sampling:
  if unknown := sorted(wanted.keys() - _KNOWN):
    raise UserError(
      f"generation_kwargs {', '.join(unknown)} of a task are not supported; the known are "
      f"{', '.join(sorted(_KNOWN))}"
    )
  until = wanted.get("until") or ()
  temperature = float(wanted.get("temperature", 1.0 if wanted.get("do_sample") else 0.0))
  return Sampling(
    temperature=temperature if wanted.get("do_sample", temperature > 0) else 0.0,
    top_p=float(wanted.get("top_p", 1.0)),
    top_k=int(wanted.get("top_k", 0)),
    max_new_tokens=int(wanted.get("max_gen_toks", _MAX_GEN_TOKENS)),
    stop=(until,) if isinstance(until, str) else tuple(until),
    seed=int(wanted.get("seed", 0)),
  )


def _bos(folder: str) -> str:
  """The bos_token of a tokenizer's folder, "" for none."""
  folder = hub.local(folder)
  path = os.path.join(folder if os.path.isdir(folder) else os.path.dirname(folder),
                      "tokenizer_config.json")  # fmt: skip
  token = read_json(path, "fetch it again").get("bos_token") if os.path.exists(path) else ""
  return (token.get("content") if isinstance(token, dict) else token) or ""


if __name__ == "__main__":
  import runpy

  runpy.run_module("lm_eval", run_name="__main__")
