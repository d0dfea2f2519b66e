"""Pairs of completions of a prompt, of which one is preferred."""

import dataclasses
import json
import os

from fp8jax.data.tokenize import Tokenizer


@dataclasses.dataclass(frozen=True)
class Pair:
  """A prompt and two completions as token ids.

  Attributes:
    name: for messages.
    prompt, chosen, rejected: ids; completions end with the end of a document.
  """

  name: str
  prompt: tuple[int, ...]
  chosen: tuple[int, ...]
  rejected: tuple[int, ...]


def load(path: str, tokenizer: Tokenizer) -> list[Pair]:
  """The pairs of a file of JSON lines with "prompt", "chosen" and "rejected"."""
  made = []
  with open(os.path.expanduser(path), encoding="utf-8") as f:
    for number, line in enumerate(f, 1):
      row = json.loads(line)
      ids = [tuple(tokenizer.encode_prompt(row["prompt"]))]
      ids += [
        (*tokenizer.encode_prompt(row[k], add_special_tokens=False), tokenizer.eos_id)
        for k in ("chosen", "rejected")
      ]
      made.append(Pair(f"{path}:{number}", *ids))
  return made
