"""The padding of a reward model's folder.

transformers scores a text at its last token that is not config.json's pad_token_id: texts end with
none of that id, and tokenizers fill up with it.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from fp8jax.data.chat import template
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError
from fp8jax.export import write
from fp8jax.generation import api
from fp8jax.models.hf import config as hf_config


def with_token(
  base: Mapping[str, Any] | None, folder: str, tokenizer: Tokenizer, vocab_size: int
) -> dict[str, Any]:
  """config.json beside the weights with the first pad_token_id that ends no text: the model's own,
  the beginning's, another special token's, or a row of the vocabulary that is no token.

  Args:
    folder: of tokenizer and settings; "" for none.

  Raises:
    UserError: there is none.
  """
  base = dict(base or dict.fromkeys(("bos_token_id", "eos_token_id")))
  stated, own = base.get("eos_token_id"), [base.get(f"{x}_token_id") for x in ("pad", "bos")]
  ends = {None, *(stated if isinstance(stated, list) else [stated])}
  with contextlib.suppress(UserError):  # a tokenizer without an end of documents
    ends |= {tokenizer.eos_id, *api.end_ids(folder, tokenizer)}
  for one in (*own, *tokenizer.special_ids, *range(tokenizer.vocab_size, vocab_size)):
    if one not in ends:
      return base | {"pad_token_id": one}
  raise UserError(
    "the vocabulary has no token to fill texts up with but their ends, before the first of which "
    "transformers would score them; raise model.vocab_size by 1 and train again"
  )


def file(files: write.Files, folder: str, tokenizer: Tokenizer, pad: int) -> write.Files:
  """The tokenizer's settings, with which it fills up with this token too; {} without any."""
  text = tokenizer.decode([pad], special=True)
  if template.CONFIG not in files or not text:
    return {}
  return {template.CONFIG: {**hf_config.read_json(folder, template.CONFIG), "pad_token": text}}
