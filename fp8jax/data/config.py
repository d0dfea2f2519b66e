"""The data that a run trains on."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fp8jax.data import tokenize
from fp8jax.data.chat.template import ChatTemplate

# Raised where data/chat reads the same rows into other samples, so that an older run does not go on
# with them unasked. 2: one normalizer; spans of every block of a turn.
_READING = 2


@dataclasses.dataclass(frozen=True)
class ChatConfig:
  """How conversations are trained on (supervised fine-tuning).

  Attributes:
    samples_per_step: samples of an optimizer step, over all devices.
    on_untrained: samples without a trained token are an "error", or passed over ("skip").
  """

  template: ChatTemplate
  samples_per_step: int
  on_untrained: str = "error"

  def fingerprint(self) -> str:
    """Changes whenever the same conversations would be other samples or other steps."""
    t = self.template
    values = (t.text + t.tool_use, sorted(t.special_tokens.items()), t.date)
    return repr([_READING, *values, self.samples_per_step, self.on_untrained])


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Everything the data of a run depend on.

  Attributes:
    sources: name -> entry, see configs/base.py.
    seq_len: positions per sequence (L).
    heldout: fraction of documents never trained on.
    cross_document: whether attention and targets cross document boundaries.
    on_malformed, on_long: see tokenize.Tokenize.
    seed: order of documents.
    workers: worker processes per source; 0 tokenizes in threads of this process.
    prefetch: batches held ready.
    shuffle_windows: windows per block that is shuffled; for prepared data any number shuffles the
      whole epoch. 0 keeps the windows in the order of the documents.
    tells_sources: whether training batches have sources_BL, the number of each token's source.
    chat: how the sources, all of them conversations, are trained on; None for documents.
    chat_template, template_date: of prompts that are chats, see data.chat.template.ChatTemplate.
  """

  sources: Mapping[str, Mapping[str, Any]]
  tokenizer: tokenize.Tokenizer
  seq_len: int
  heldout: float = 0.1
  cross_document: bool = False
  on_malformed: str = "error"
  on_long: str = "split"
  seed: int = 0
  workers: int = 0
  prefetch: int = 2
  shuffle_windows: int = 0
  tells_sources: bool = False
  chat: ChatConfig | None = None
  chat_template: str = ""
  template_date: str = ""
