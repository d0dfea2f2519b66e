"""Conversations -> samples: tokens, and which of them are trained.

A token is trained if all of its characters lie in a turn of the assistant: in a `{% generation %}`
block of the template where it has them, and in the end-of-turn token if that follows the block;
otherwise between the end of the generation prompt and the end of the turn, both found by rendering
the conversation with and without the turn. The end-of-turn token is part of the turn. The text is
tokenized once, whole, with the offsets of every token, so that no boundary changes how it is cut
into tokens.

A template may render a turn differently once others follow (Qwen3 drops the thoughts of earlier
turns). Such a conversation becomes one sample per turn of the assistant, each as the model meets
it. Of a template that opens the turn for the model and drops the thoughts in its own rendering
(DeepSeek-R1-Distill), a turn with thoughts is its generation prompt and the message as it stands.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fp8jax.data import tokenize
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.errors import UserError

Span = tuple[int, int]


# Of all turns of the assistant together, which render the messages before them: 1,023 turns that
# alternate with the user's.
MOST_MESSAGES, MOST_CHARACTERS = 2**20, 2**28


@dataclasses.dataclass(frozen=True)
class Rendered:
  """Text with the spans [first, end) of characters that are trained.

  Attributes:
    ends: the ends of the assistant's turns among the spans'.
    opening: what the generation prompt writes and a turn lacks, see `_turn`.
  """

  text: str
  spans: tuple[Span, ...]
  ends: tuple[int, ...] = ()
  opening: str = ""


@dataclasses.dataclass(frozen=True)
class Sample:
  """One sequence to train on.

  Attributes:
    tokens: int32 [n].
    trained: bool [n], whether a token is a target; the first never is.
    closing: ids of the last token of every turn, white space apart.
    opening: see Rendered.
  """

  tokens: np.ndarray
  trained: np.ndarray
  closing: tuple[int, ...] = ()
  opening: str = ""

  def __len__(self):
    return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Encoder:
  """A tokenizer and its chat template."""

  tokenizer: tokenize.Tokenizer
  template: ChatTemplate

  def samples(self, record: Mapping[str, Any]) -> list[Sample]:
    """The samples of a conversation (see conversation.py); raises as `render`."""
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
    stops = [len(rendered.text[:stop].rstrip()) for stop in rendered.ends]
    closing = ids[np.minimum(np.searchsorted(end, stops), len(ids) - 1)].tolist()
    return Sample(ids, trained, tuple(closing), rendered.opening)


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
    UserError: the template refuses the conversation, leaves out a tool call, or does not say where
      a turn begins.
  """
  turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
  turns = [i for i in turns if messages[i].get("weight", 1)]
  if not turns:
    return [Rendered(template.render(messages, tools=tools), ())]
  fit = sum(n <= MOST_MESSAGES for n in itertools.accumulate(i + 1 for i in turns))
  if fit < len(turns):
    raise _too_long(f"{MOST_MESSAGES:,} messages", turns[max(fit - 1, 0)] + 1)
  made, size = [], 0
  for i in turns:
    made.append(_turn(template, messages[: i + 1], tools, is_special))
    _check_calls(template, messages[: i + 1], tools, is_special, made[-1])
    size += len(made[-1].text)
    if size > MOST_CHARACTERS:
      raise _too_long(f"{MOST_CHARACTERS:,} characters", turns[max(len(made) - 2, 0)] + 1)
  whole = made[-1]
  if not all(whole.text.startswith(one.text) for one in made):
    return made
  spans, ends = (sum((getattr(one, name) for one in made), ()) for name in ("spans", "ends"))
  opening = next((one.opening for one in made if one.opening), "")
  return [Rendered(whole.text, spans, ends, opening)]


def _check_calls(template: ChatTemplate, messages, tools, is_special, made: Rendered):
  """Refuses a last turn that would be trained without one of its tool calls.

  A call is written where another name gives another text.
  """
  trained = lambda one: [one.text[first:end] for first, end in one.spans]  # noqa: E731
  for i, call in enumerate(calls := [*(messages[-1].get("tool_calls") or ())]):
    of = call.get("function", call)
    renamed = of | {"name": f"{of['name']}_"}
    other = {**call, "function": renamed} if "function" in call else renamed
    last = {**messages[-1], "tool_calls": [*calls[:i], other, *calls[i + 1 :]]}
    if trained(_turn(template, [*messages[:-1], last], tools, is_special)) == trained(made):
      raise UserError(
        f"the chat template does not write the assistant's call of {of['name']!r}; set "
        "data.chat_template to one that does, or give the message weight 0"
      )


def _too_long(most: str, messages: int) -> UserError:
  return UserError(
    "the conversation is too long: every turn of the assistant renders all before it, at most "
    f"{most} in all; split it into conversations of {messages:,} messages or fewer"
  )


def _turn(template: ChatTemplate, messages, tools, is_special) -> Rendered:
  """The messages as text, with the trained spans of the last one.

  Where the turn does not begin with its generation prompt ("<assistant><think>\\n", R1-Distill) but
  shares a header with it ("<assistant>"), a message with thoughts is written as it is served: the
  prompt, the message behind what the prompt opens, the template's end of turn. Another message is
  trained from the header on, as rendered; `opening` says what generation would write instead.
  """
  if template.has_generation(tools):
    before, earlier = template.render_marked(messages[:-1], tools)
    text, spans = template.render_marked(messages, tools)
    # The blocks that the last message adds; of a template that drops others, those that differ.
    start = len(os.path.commonprefix([before, text]))
    own = spans[len(earlier) :] or [span for span in spans if span[1] > start]
    if own and is_special(text[own[-1][1] :]):
      own[-1] = (own[-1][0], len(text.rstrip()))
    return Rendered(text, tuple(own), tuple(end for _, end in own[-1:]))
  text = template.render(messages, tools=tools)
  prompt = template.render(messages[:-1], add_generation_prompt=True, tools=tools)
  header, opening = len(os.path.commonprefix([prompt, text])), ""
  if header < len(prompt):
    tag = prompt.rfind("<", 0, header)  # two tags may have "<" in common
    header = tag if tag > prompt.rfind(">", 0, header) else header
    opening, before = prompt[header:], template.render(messages[:-1], tools=tools)
    served = _served(opening, messages[-1], text[header:])
    if served == "" or header <= len(os.path.commonprefix([before, prompt])):
      raise UserError(
        "the chat template does not begin the assistant's turn with its generation prompt, so that "
        "the first trained token is unknown; set data.chat_template to a variant of it with "
        "{% generation %} around the assistant's text"
      )
    if served is not None:
      text, header, opening = prompt + served, len(prompt), ""
  return Rendered(text, ((header, len(text)),), (len(text),), opening)


def _served(opening: str, message: Mapping[str, Any], body: str) -> str | None:
  """The turn after a generation prompt that opens its thoughts, as the model writes it.

  Args:
    opening: the end of the prompt that the rendered turn lacks ("<think>\\n").
    body: its text as the template renders it, without thoughts and with the end of turn.

  Returns:
    None for a message without thoughts, or a prompt that opens none; "" where `body` does not begin
    with the message's text behind its thoughts.
  """
  answer, tag = (message.get("content") or "").strip(), opening.strip()
  close, thoughts = tag.replace("<", "</", 1), message.get("reasoning_content")
  if thoughts and close not in answer:
    answer = f"{tag}\n{thoughts.strip()}\n{close}\n\n{answer}"
  if not tag.startswith("<") or tag.startswith("</") or not answer.startswith(tag):
    return None
  visible = answer.rpartition(close)[2].strip()
  if not visible or not body.lstrip().startswith(visible):
    return ""
  end = body.lstrip()[len(visible) :]
  return answer[len(tag) :].removeprefix(opening[len(tag) :]) + end
