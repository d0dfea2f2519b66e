"""Conversations -> samples: tokens, and which of them are trained.

A token is trained if all of its characters lie in a turn of the assistant: in a `{% generation %}`
block of the template where it has them, and in the end-of-turn token if that follows the block;
otherwise between the end of the generation prompt and the end of the turn, both found by rendering
the conversation with and without the turn. The end-of-turn token is part of the turn. The text is
tokenized once, whole, with the offsets of every token, so that no boundary changes how it is cut
into tokens.

A template may render a turn differently once others follow (Qwen3 drops the thoughts of earlier
turns). Such a conversation becomes one sample per turn of the assistant, each as the model meets
it.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fp8jax.data import tokenize
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.errors import UserError

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Rendered:
  """Text with the spans [first, end) of characters that are trained."""

  text: str
  spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
  """One sequence to train on.

  Attributes:
    tokens: int32 [n].
    trained: bool [n], whether a token is a target; the first never is.
  """

  tokens: np.ndarray
  trained: np.ndarray

  def __len__(self):
    return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Encoder:
  """A tokenizer and its chat template."""

  tokenizer: tokenize.Tokenizer
  template: ChatTemplate

  def samples(self, record: Mapping[str, Any]) -> list[Sample]:
    """The samples of a conversation (see conversation.py).

    Raises:
      UserError: the template refuses the conversation.
    """
    made = render(self.template, record["messages"], record.get("tools"), self._is_special)
    return [self.encode(one) for one in made]

  def _is_special(self, text: str) -> bool:
    """Whether a text is special tokens, which `decode` leaves out, and white space."""
    ids = self.tokenizer.encode_prompt(text, add_special_tokens=False)
    return bool(text.strip()) and not self.tokenizer.decode(ids).strip()

  def encode(self, rendered: Rendered) -> Sample:
    """Tokenizes a text once; marks the tokens whose characters all lie in a span."""
    ids, offsets = self.tokenizer.encode_with_offsets(rendered.text)
    first, end = offsets[:, 0], offsets[:, 1]
    trained = np.zeros(len(ids), bool)
    for start, stop in rendered.spans:
      trained |= (first >= start) & (end <= stop) & (end > first)
    trained[:1] = False
    return Sample(ids, trained)


def render(
  template: ChatTemplate,
  messages: Sequence[Mapping[str, Any]],
  tools: Sequence[Mapping[str, Any]] | None = None,
  is_special: Callable[[str], bool] = lambda text: False,
) -> list[Rendered]:
  """The texts of a conversation: one, or one per turn of the assistant.

  Messages behind the assistant's last are left out. A turn with "weight" 0 (OpenAI's) is rendered
  and not trained.

  Args:
    is_special: whether a text is special tokens alone, as an end of turn is.

  Raises:
    UserError: the template refuses the conversation, or does not say where a turn begins.
  """
  turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
  turns = [i for i in turns if messages[i].get("weight", 1)]
  if not turns:
    return [Rendered(template.render(messages, tools=tools), ())]
  upto = {i: template.render(messages[: i + 1], tools=tools) for i in turns}
  whole = upto[turns[-1]]
  spans = {i: _turn(template, messages[: i + 1], upto[i], tools, is_special) for i in turns}
  if all(whole.startswith(text) for text in upto.values()):
    return [Rendered(whole, tuple(span for i in turns for span in spans[i]))]
  return [Rendered(upto[i], spans[i]) for i in turns]


def _turn(template: ChatTemplate, messages, text: str, tools, is_special) -> tuple[Span, ...]:
  """The trained spans of the last message in `text`, the rendered messages."""
  if template.has_generation:
    before = template.render(messages[:-1], tools=tools)
    start = len(os.path.commonprefix([before, text]))
    _, spans = template.render_marked(messages, tools)
    spans = [span for span in spans if span[0] >= start]
    if spans and is_special(text[spans[-1][1] :]):
      spans[-1] = (spans[-1][0], len(text.rstrip()))
    return tuple(spans)
  prompt = template.render(messages[:-1], add_generation_prompt=True, tools=tools)
  if not text.startswith(prompt):
    raise UserError(
      "the chat template does not begin the assistant's turn with its generation prompt, so that "
      "the first trained token is unknown; set data.chat_template to a variant of it with "
      "{% generation %} around the assistant's text"
    )
  return ((len(prompt), len(text)),)
