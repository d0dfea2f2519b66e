"""Conversations in a configuration: checked, typed, and counted into steps."""

from typing import Any

from fp8jax.config import checks
from fp8jax.data import config as data_config
from fp8jax.data import loader, sources, tokenize
from fp8jax.data.chat import samples
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.errors import ConfigErrors, UserError

# Steps are counted in int32.
_MOST_STEPS = 2**31 - 1


def _mappings(c: Any) -> dict[str, Any]:
  """The sources that are mappings; another check refuses others."""
  return {name: s for name, s in c.data.sources.items() if hasattr(s, "keys")}


def has_chats(c: Any) -> bool:
  """Whether a source has conversations."""
  return any(source.get("chat") for source in _mappings(c).values())


def read(c: Any, tokenizer: str, problems: ConfigErrors) -> data_config.ChatConfig | None:
  """The data section of conversations; None where no template can be had for the tokenizer."""
  d = c.data
  for name, source in _mappings(c).items():
    key = f"data.sources.{name}"
    if not source.get("chat"):
      problems.found.append(
        f"{key} has documents, other sources conversations; train on them in runs of their own "
        f"(init.workdir with init.weights_only), or set {key}.chat"
      )
    elif source.get("kind") not in sources.CHAT_KINDS:
      problems.found.append(
        f"{key}.kind={source.get('kind')!r} has no conversations; use one of "
        f"{', '.join(sources.CHAT_KINDS)}, or {key}.chat=''"
      )
    problems.check(
      source.get("weight", 1.0) == 1.0,
      f"{key}.weight={source.get('weight')}: every sample is read once an epoch; set it to 1",
    )
  if d.on_long not in samples.LONG_POLICIES:
    problems.found.append(
      f"data.on_long={d.on_long!r} says nothing of a conversation longer than seq_len; choose "
      "'error', 'skip' (counted) or 'truncate' (its end is cut off)"
    )
  problems.check(
    d.samples_per_step > 0,
    f"data.samples_per_step={d.samples_per_step} with conversations; set the samples of an "
    "optimizer step (InfiR2: 64), which global_batch windows must hold",
  )
  positions = c.global_batch * c.seq_len
  problems.check(
    d.samples_per_step <= positions,
    f"data.samples_per_step={d.samples_per_step} are more than the {positions} positions of a step "
    "(global_batch x seq_len), and a sample has one at least; lower it",
  )
  problems.check(
    not d.cross_document,
    "data.cross_document=True with conversations, which would attend to each other; set it to "
    "False",
  )
  template = problems.attempt(lambda: _template(c, tokenizer))
  return template and data_config.ChatConfig(template, d.samples_per_step, d.on_untrained)


def _template(c: Any, tokenizer: str) -> ChatTemplate:
  if tokenizer == tokenize.BYTES and not c.data.chat_template:
    raise UserError(
      "data.tokenizer='bytes' has no chat template; set data.tokenizer to a Hugging Face folder, "
      "or data.chat_template to a .jinja file"
    )
  return ChatTemplate.load(tokenizer, c.data.chat_template, c.data.template_date)


def steps(c: Any, data: data_config.DataConfig, problems: ConfigErrors) -> int:
  """Optimizer steps of the run: `steps`, or those of data.epochs, for which all chats are read."""
  if not c.data.epochs:
    return c.steps
  if not has_chats(c):
    problems.found.append(
      f"data.epochs={c.data.epochs} counts samples of conversations; documents have steps, set "
      "data.epochs=0"
    )
  chat = data.chat
  if problems.found or chat is None:
    return c.steps
  return problems.attempt(lambda: _of_epochs(c.data.epochs, data, chat.samples_per_step)) or c.steps


def _of_epochs(epochs: float, data: data_config.DataConfig, per_step: int) -> int:
  count = len(samples.of_split(data, loader.chat_index(data), "train"))
  number = checks.part_of(epochs, count) // per_step
  what = f"data.epochs={epochs} of {count} samples are"
  if not number:
    raise UserError(
      f"{what} less than one step of data.samples_per_step={per_step}; lower it, or give more data"
    )
  if number > _MOST_STEPS:
    raise UserError(f"{what} {number} steps, at most {_MOST_STEPS}; lower it")
  return number
