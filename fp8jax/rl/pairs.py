"""Pairs of completions of a prompt, of which one is preferred."""

import dataclasses

from fp8jax.data import text_files
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError

FORMAT = 'one JSON per line: {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}'


@dataclasses.dataclass(frozen=True)
class Pair:
  """A prompt and two completions of it.

  Attributes:
    name: file and line, for messages.
    prompt, chosen, rejected: token ids; completions end with the end of a document.
  """

  name: str
  prompt: tuple[int, ...]
  chosen: tuple[int, ...]
  rejected: tuple[int, ...]


def load(path: str, tokenizer: Tokenizer) -> list[Pair]:
  """The pairs of a JSONL file; its format is FORMAT.

  Raises:
    UserError, FileNotFoundError: with file and line.
  """
  made = []
  for where, row in text_files.json_lines(path):
    texts = [row.get(key) for key in ("prompt", "chosen", "rejected")]
    if not all(isinstance(text, str) for text in texts) or texts[1] == texts[2]:
      raise UserError(f"{where} has no two different completions of a prompt; expected {FORMAT}")
    prompt, *both = (
      tokenizer.encode_prompt(text, add_special_tokens=not i) for i, text in enumerate(texts)
    )
    ended = (tuple([*ids, tokenizer.eos_id]) for ids in both)
    made.append(Pair(where, tuple(prompt), *ended))
  return made
