"""A tokenizer's chat template: messages -> text, in jinja's sandbox.

The environment is that of Hugging Face transformers (utils/chat_template_utils.py of 5.23): the
immutable sandbox, trim_blocks and lstrip_blocks, loop controls, `{% generation %}`, a `tojson` that
escapes neither HTML nor Unicode, `raise_exception` and `strftime_now`. The date of the latter is a
setting here, so that the same data give the same text on every day.

A rendering is bounded, as a template is a program that came with a model: MOST_CHARACTERS of text
(counted as `generate` streams it) and of every value that an expression computes, MOST_STEPS of
loops and calls (sandbox.py).
"""

import dataclasses
import datetime
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8jax import hub
from fp8jax.data import text_files
from fp8jax.data.chat import sandbox
from fp8jax.errors import UserError, one_line, read_json

# Characters of a private plane around the text of a `{% generation %}` block.
MARKS = ("\U000f0f00", "\U000f0f01")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
CONFIG, FILE, FOLDER = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
_SPECIAL = "special_tokens_map.json"
_REMEDY = "set data.chat_template to a .jinja file; the model's instruction-tuned version has one"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """The text of a template and the values that it may ask for.

  Attributes:
    text: jinja source.
    special_tokens: {"bos_token": "<s>", ...}, variables of the template.
    date: of `strftime_now`, as YYYY-MM-DD; "" refuses to render a template that calls it.
    tool_use: jinja source for conversations with tools; "" takes `text`, as transformers does.
    origin: the files that were chosen among several, in words; "" where there was one.
  """

  text: str
  special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
  date: str = ""
  tool_use: str = ""
  origin: str = ""

  @classmethod
  def load(cls, folder: str, template: str = "", date: str = "") -> "ChatTemplate":
    """The template of a tokenizer's folder, chosen among several as transformers does.

    Args:
      folder: with tokenizer_config.json, or a file in it, or an id of the Hugging Face hub.
      template: a .jinja file instead of the folder's own.

    Raises:
      UserError, FileNotFoundError: there is no template, or it is no jinja; with the remedy.
    """
    folder = hub.local(folder)
    folder = os.path.dirname(folder) if os.path.isfile(folder) else folder
    path = os.path.join(folder, CONFIG)
    config = read_json(path, "fetch it again") if os.path.exists(path) else {}
    if template:
      named, origin = {"default": _read(template, f"data.chat_template={template!r}")}, ""
    else:
      named, origin = templates(folder, config)
    tool_use = named.get("tool_use", "")
    made = cls(named["default"], _special_tokens(folder, config), date, tool_use, origin)
    made.check()
    return made

  def check(self):
    """Compiles the templates.

    Raises:
      UserError: one is no jinja, needs a date or reads no messages.
    """
    import jinja2.meta

    if date := self.date:
      _parsed(date)
    for text in filter(None, (self.text, self.tool_use)):
      parsed = _compile(text, date, ("", "")).environment.parse(text)
      if "messages" not in jinja2.meta.find_undeclared_variables(parsed):
        raise UserError(
          f"the chat template reads no `messages`: every conversation would be one text; {_REMEDY}"
        )
      if "strftime_now" in text and not date:
        raise UserError(_NO_DATE)

  def has_generation(self, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
    """Whether the template says itself which text the assistant generates."""
    return bool(_GENERATION.search(self._chosen(tools)))

  def _chosen(self, tools) -> str:
    return self.tool_use if tools is not None and self.tool_use else self.text

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    marks: tuple[str, str] = ("", ""),
  ) -> str:
    """The text of a conversation.

    Some templates write tool calls only beside content that is null (DeepSeek-R1-Distill). Where
    calls would be left out, empty content beside them is null.

    Args:
      messages: {"role", "content"} each, and whatever else the template knows.
      add_generation_prompt: whether the text ends with the beginning of the assistant's turn.
      tools: JSON schemas of functions.
      marks: stand around the text of a `{% generation %}` block.

    Raises:
      UserError: the template refuses these messages.
    """
    write = functools.partial(
      self._render, add_generation_prompt=add_generation_prompt, tools=tools, marks=marks
    )
    text = write(messages)
    null = [
      m | {"content": None} if m.get("tool_calls") and not (m.get("content") or "").strip() else m
      for m in map(dict, messages)
    ]
    is_other = null != list(messages) and "none" in self._chosen(tools).lower()
    if not is_other or _says_more(write, messages, text):
      return text
    try:
      other = write(null)
    except UserError:
      return text
    return other if _says_more(write, null, other) else text

  def _render(self, messages, add_generation_prompt, tools, marks) -> str:
    try:
      return sandbox.render(
        _compile(self._chosen(tools), self.date, marks), messages=messages, tools=tools,
        documents=None, add_generation_prompt=add_generation_prompt, **self.special_tokens,
      )  # fmt: skip
    except UserError:
      raise
    except Exception as e:  # jinja's, and whatever an expression of the template raises
      raise UserError(
        f"the chat template refuses the conversation: {one_line(e) or type(e).__name__}. Change "
        "the conversation, or set data.chat_template to another template"
      ) from e

  def render_marked(self, messages, tools=None) -> tuple[str, list[tuple[int, int]]]:
    """(`render`, [(first, end) character of every `{% generation %}` block]).

    Raises:
      UserError: the template refuses these messages, or moves or cuts its generated text.
    """
    text, spans = _without_marks(self.render(messages, tools=tools, marks=MARKS))
    if text != self.render(messages, tools=tools):
      raise UserError(
        "the chat template computes with the text of its {% generation %} block, so that the "
        "block's place is unknown; write the block around the final text"
      )
    return text, spans


def _says_more(write: Callable[[Any], str], messages, text: str) -> bool:
  """Whether `text`, what `write` makes of the messages, is another one without their tool calls."""
  try:
    return text != write([{k: v for k, v in m.items() if k != "tool_calls"} for m in messages])
  except UserError:  # the template wants an answer where there is no call
    return True


_NO_DATE = (
  "the chat template writes today's date, so that the same data would be another text tomorrow; "
  "set data.template_date to the date that it shall write, as YYYY-MM-DD"
)


def templates(folder: str, config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
  """({name: jinja text} of a tokenizer's folder, ChatTemplate.origin).

  As in transformers files come before tokenizer_config.json, and hide all that it has.

  Args:
    config: its tokenizer_config.json.

  Raises:
    UserError: there is no template, none is named "default", or one is empty or no text.
  """
  more, own = os.path.join(folder, FOLDER), os.path.join(folder, FILE)
  names = sorted(os.listdir(more)) if os.path.isdir(more) else []
  paths = {n.removesuffix(".jinja"): os.path.join(more, n) for n in names if n.endswith(".jinja")}
  paths |= {"default": own} if os.path.exists(own) else {}
  stated = config.get("chat_template")
  of_config: dict[str, Any] = {} if stated is None else {"default": stated}
  if isinstance(stated, list):  # several, by name
    of_config = {str(t.get("name")): t.get("template") for t in stated if isinstance(t, dict)}
  named: dict[str, Any] = {name: _read(path, path) for name, path in paths.items()} or of_config
  if not named:
    raise UserError(
      f"the tokenizer {folder!r} has no chat template (neither {FILE} nor 'chat_template' in "
      f"{CONFIG}); {_REMEDY}"
    )
  for name, text in named.items():
    if not isinstance(text, str) or not text.strip():
      shown = "empty" if isinstance(text, str) else f"of type {type(text).__name__}"
      raise UserError(f"the chat template {name!r} of {folder!r} is {shown}; {_REMEDY}")
  if "default" not in named:
    raise UserError(
      f"the tokenizer {folder!r} has the chat templates {', '.join(map(repr, sorted(named)))} and "
      "none named 'default'; set data.chat_template to a .jinja file with the one to take"
    )
  rows = "rows with tools take 'tool_use', others" if "tool_use" in named else "all rows take"
  names = ", ".join(map(repr, sorted(named)))
  parts = [f"of the chat templates {names} {rows} 'default'"] * (len(named) > 1)
  if paths and of_config and named != of_config:
    parts.append(f"the files hide another 'chat_template' in {CONFIG}, as in transformers")
  return named, "; ".join(parts)


def _read(path: str, where: str) -> str:
  path = os.path.expanduser(path)
  if os.path.isdir(path):
    raise UserError(f"{where} is a folder; name a .jinja file in it")
  if not os.path.exists(path):
    raise FileNotFoundError(f"{where} does not exist; name a .jinja file")
  with open(path, "rb") as f:
    text = text_files.decoded(f.read(), where)
  if not text.strip():
    raise UserError(f"{where} is empty; {_REMEDY}")
  return text


def _special_tokens(folder: str, config: Mapping[str, Any]) -> dict[str, str]:
  """{"bos_token": "<s>", ...} of a tokenizer's files, as transformers gives them to templates.

  special_tokens_map.json counts, and comes first, where tokenizer_config.json has no
  "added_tokens_decoder"; names of a model's own stand in "extra_special_tokens".
  """
  path, files = os.path.join(folder, _SPECIAL), {CONFIG: config}
  if "added_tokens_decoder" not in config and os.path.exists(path):
    files[_SPECIAL] = read_json(path, "fetch it again")
  tokens = {}
  for name, values in files.items():
    extra = values.get("extra_special_tokens")
    named = {k: v for k, v in values.items() if k.endswith("_token")}
    for key, value in {**named, **(extra if isinstance(extra, dict) else {})}.items():
      text = value.get("content") if isinstance(value, dict) else value
      if isinstance(text, str):
        tokens[key] = text
      elif isinstance(value, dict):
        raise UserError(f"{os.path.join(folder, name)}: {key} is {value!r}, which has no 'content'")
  return tokens


def _parsed(date: str) -> datetime.datetime:
  try:
    return datetime.datetime.fromisoformat(date)
  except ValueError as e:
    raise UserError(f"data.template_date={date!r} is no date; write it as YYYY-MM-DD") from e


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
  """Text without MARKS and the spans between them; blocks do not nest."""
  text, spans = "", []
  for piece in re.split(f"({MARKS[0]}[^{MARKS[1]}]*{MARKS[1]})", marked):
    inner = piece.strip("".join(MARKS))
    spans += [(len(text), len(text) + len(inner))] * (piece != inner)
    text += inner
  return text, spans


@functools.lru_cache(maxsize=16)
def _compile(text: str, date: str, marks: tuple[str, str]):
  """A jinja template whose generation blocks stand between two marks."""
  import jinja2  # extra `sft`

  def strftime_now(form):
    if not date:
      raise UserError(_NO_DATE)
    return _parsed(date).strftime(form)

  environment = sandbox.environment(marks)
  environment.globals["strftime_now"] = strftime_now
  try:
    return environment.from_string(text)
  except jinja2.TemplateSyntaxError as e:
    raise UserError(
      f"the chat template is no jinja: line {e.lineno}: {one_line(e)}; {_REMEDY}"
    ) from e
  except (RecursionError, SyntaxError, MemoryError) as e:  # of Python, which it is compiled to
    raise UserError(
      f"the chat template nests its blocks too deeply for Python ({type(e).__name__}); {_REMEDY}"
    ) from e
