"""A tokenizer's chat template: messages -> text, in jinja's sandbox.

The environment is that of Hugging Face transformers (utils/chat_template_utils.py of 5.23): the
immutable sandbox, trim_blocks and lstrip_blocks, loop controls, `{% generation %}`, a `tojson` that
escapes neither HTML nor Unicode, `raise_exception` and `strftime_now`. The date of the latter is a
setting here, so that the same data give the same text on every day.
"""

import dataclasses
import datetime
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax import hub
from fp8jax.errors import UserError, one_line, read_json

# Characters of a private plane around the text of a `{% generation %}` block.
MARKS = ("\U000f0f00", "\U000f0f01")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CONFIG, _FILE = "tokenizer_config.json", "chat_template.jinja"
_REMEDY = "set data.chat_template to a .jinja file; the model's instruction-tuned version has one"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """The text of a template and the values that it may ask for.

  Attributes:
    text: jinja source.
    special_tokens: {"bos_token": "<s>", ...}, variables of the template.
    date: of `strftime_now`, as YYYY-MM-DD; "" refuses to render a template that calls it.
  """

  text: str
  special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
  date: str = ""

  @classmethod
  def load(cls, folder: str, template: str = "", date: str = "") -> "ChatTemplate":
    """The template of a tokenizer's folder.

    Args:
      folder: with tokenizer_config.json, or a file in it, or an id of the Hugging Face hub.
      template: a .jinja file instead of the folder's own chat_template.jinja or "chat_template".
      date: see the class.

    Raises:
      UserError, FileNotFoundError: there is no template, or it is no jinja; with the remedy.
    """
    folder = hub.local(folder)
    folder = os.path.dirname(folder) if os.path.isfile(folder) else folder
    path = os.path.join(folder, _CONFIG)
    config = read_json(path, "fetch it again") if os.path.exists(path) else {}
    tokens = {
      key: value["content"] if isinstance(value, dict) else value
      for key, value in config.items()
      if key.endswith("_token") and isinstance(value, (dict, str))
    }
    made = cls(_source(folder, config, template), tokens, date)
    made.check()
    return made

  def check(self):
    """Compiles the template.

    Raises:
      UserError: it is no jinja, or needs a date.
    """
    _ = self._plain
    if date := self.date:
      _parsed(date)
    if "strftime_now" in self.text and not date:
      raise UserError(_NO_DATE)

  @property
  def has_generation(self) -> bool:
    """Whether the template says itself which text the assistant generates."""
    return bool(_GENERATION.search(self.text))

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> str:
    """The text of a conversation.

    Args:
      messages: {"role", "content"} each, and whatever else the template knows.
      add_generation_prompt: whether the text ends with the beginning of the assistant's turn.
      tools: JSON schemas of functions.

    Raises:
      UserError: the template refuses these messages.
    """
    return self._run(self._plain, messages, add_generation_prompt, tools)

  def render_marked(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> tuple[str, list[tuple[int, int]]]:
    """(`render`, [(first, end) character of every `{% generation %}` block]).

    Raises:
      UserError: the template refuses these messages, or moves or cuts its generated text.
    """
    marked = self._run(self._marked, messages, False, tools)
    text, spans = _without_marks(marked)
    if text != self.render(messages, tools=tools):
      raise UserError(
        "the chat template computes with the text of its {% generation %} block, so that the "
        "block's place is unknown; write the block around the final text"
      )
    return text, spans

  def _run(self, template, messages, add_generation_prompt: bool, tools) -> str:
    try:
      return template.render(
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **self.special_tokens,
      )
    except UserError:
      raise
    except Exception as e:  # jinja's, and whatever an expression of the template raises
      raise UserError(
        f"the chat template refuses the conversation: {one_line(e)}. Change the conversation, or "
        "set data.chat_template to another template"
      ) from e

  @functools.cached_property
  def _plain(self):
    return _compile(self.text, self.date, ("", ""))

  @functools.cached_property
  def _marked(self):
    return _compile(self.text, self.date, MARKS)

  def __getstate__(self):
    # Compiled templates do not travel to worker processes.
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

  def __setstate__(self, state):
    self.__dict__.update(state)


_NO_DATE = (
  "the chat template writes today's date, so that the same data would be another text tomorrow; "
  "set data.template_date to the date that it shall write, as YYYY-MM-DD"
)


def _source(folder: str, config: Mapping[str, Any], template: str) -> str:
  """The jinja text: the named file's, chat_template.jinja's, or tokenizer_config.json's."""
  path = os.path.expanduser(template) or os.path.join(folder, _FILE)
  if template and not os.path.isfile(path):
    raise FileNotFoundError(f"data.chat_template={template!r} does not exist; name a .jinja file")
  if os.path.isfile(path):
    with open(path, encoding="utf-8") as f:
      return f.read()
  text = config.get("chat_template")
  if isinstance(text, list):  # several, by name
    named = {t.get("name"): t.get("template") for t in text if isinstance(t, dict)}
    text = named.get("default")
  if not isinstance(text, str) or not text:
    raise UserError(
      f"the tokenizer {folder!r} has no chat template (neither {_FILE} nor 'chat_template' in "
      f"{_CONFIG}); {_REMEDY}"
    )
  return text


def _parsed(date: str) -> datetime.datetime:
  try:
    return datetime.datetime.fromisoformat(date)
  except ValueError as e:
    raise UserError(f"data.template_date={date!r} is no date; write it as YYYY-MM-DD") from e


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
  """Text without MARKS and the spans between them; blocks do not nest."""
  parts, spans, length = [], [], 0
  for piece in re.split(f"({MARKS[0]}[^{MARKS[1]}]*{MARKS[1]})", marked):
    inner = piece.strip("".join(MARKS))
    if piece != inner:
      spans.append((length, length + len(inner)))
    parts.append(inner)
    length += len(inner)
  return "".join(parts), spans


@functools.lru_cache(maxsize=16)
def _compile(text: str, date: str, marks: tuple[str, str]):
  """A jinja template whose generation blocks stand between two marks."""
  import jinja2  # extra `sft`
  import jinja2.ext
  import jinja2.sandbox

  def raise_exception(message):
    raise jinja2.TemplateError(message)

  def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
      x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

  def strftime_now(form):
    if not date:
      raise UserError(_NO_DATE)
    return _parsed(date).strftime(form)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_generation(marks), jinja2.ext.loopcontrols]
  )
  environment.filters["tojson"] = tojson
  environment.globals.update(
    raise_exception=raise_exception, strftime_now=strftime_now, **_containers()
  )
  try:
    return environment.from_string(text)
  except jinja2.TemplateSyntaxError as e:
    raise UserError(
      f"the chat template is no jinja: line {e.lineno}: {one_line(e)}; {_REMEDY}"
    ) from e


def _generation(marks: tuple[str, str]):
  """The extension for `{% generation %}...{% endgeneration %}`."""
  import jinja2.ext
  import jinja2.nodes

  class Generation(jinja2.ext.Extension):
    """Puts marks around a block."""

    tags = {"generation"}

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      call = self.call_method("_between_marks")
      return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _between_marks(self, caller):
      return marks[0] + caller() + marks[1]

  return Generation


def _containers() -> dict[str, Any]:
  """`dict` and `namespace` for templates, without a way to Python's internals."""
  import jinja2
  import jinja2.utils

  class Dict:
    """`dict` without the attributes of the class."""

    def __call__(self, *args, **kwargs):
      return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
      return dict.fromkeys(*args, **kwargs)

  class Namespace(jinja2.utils.Namespace):
    """`namespace` that refuses the names of Python's internals."""

    def __init__(*args, **kwargs):
      self, args = args[0], args[1:]
      for name in dict(*args, **kwargs):
        Namespace.check(name)
      jinja2.utils.Namespace.__init__(self, *args, **kwargs)

    def __setitem__(self, name, value):
      Namespace.check(name)
      super().__setitem__(name, value)

    @staticmethod
    def check(name):
      if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace cannot have the attribute {name!r}")

  return {"dict": Dict(), "namespace": Namespace}
