"""Jinja's sandbox as transformers sets it up, with bounds on output and work.

A rendering counts its steps: a turn of a loop, a call, and 1,024 characters of a value that a call,
a filter or `~` gave. Jinja's own sandbox bounds one `range` alone. The counts come from the
compiled code (`_code`), so that macros, recursive loops and loops over texts count too.
"""

import contextvars
import functools
import json
import re
from typing import Any

from fp8jax.errors import UserError

# Of one rendering: beyond every context that is trained, some 1M tokens; and seconds of work.
MOST_CHARACTERS = 2**22
MOST_STEPS = 2**20
_WIDTH = re.compile(r"(?:%[-+ #0]*|:(?:[^{}]?[<>=^])?[-+ #0]*|\.)(\d{1,18})")
_STEPS: contextvars.ContextVar[list[int]] = contextvars.ContextVar("steps of a rendering")


def render(template, **values: Any) -> str:
  """The text of a compiled template; UserError beyond MOST_CHARACTERS or MOST_STEPS."""
  pieces, length = [], 0
  token = _STEPS.set([MOST_STEPS])
  try:
    for piece in template.generate(**values):
      length += len(piece)
      _spend(0, length)
      pieces.append(piece)
  finally:
    _STEPS.reset(token)
  return "".join(pieces)


def _spend(steps: int, length: int = 0):
  """Counts steps of this rendering, and refuses a text of this length or one step too many."""
  left = _STEPS.get()
  left[0] -= steps
  if left[0] < 0 or length > MOST_CHARACTERS:
    what = f"takes more than {MOST_STEPS:,} steps (turns of loops and calls)"
    if length > MOST_CHARACTERS:
      what = f"makes a text of more than {MOST_CHARACTERS:,} characters"
    raise UserError(f"the chat template {what}; shorten the conversation, or correct the template")


def environment(marks: tuple[str, str]):
  """The environment whose `{% generation %}` blocks stand between two marks."""
  import jinja2
  import jinja2.ext
  import jinja2.runtime
  import jinja2.sandbox

  class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Bounds what templates compute."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _code()

    def call(__self, __context, __obj, *args, **kwargs):  # noqa: N805  names of jinja's
      _spend(1)
      if isinstance(__obj, jinja2.runtime.LoopContext):  # a recursive loop's next level
        args = tuple(map(__self.counted, args))
      if isinstance(text := getattr(__obj, "__self__", None), str):  # "a".center(10**9)
        _spend(0, _widest(text, (*args, *kwargs.values())))
      return __self.bounded(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value):
      formatting = super().wrap_str_format(value)
      return formatting and _narrow(functools.partial(formatting), value.__self__)

    def call_binop(self, context, operator, left, right):
      _spend(0, _grown(operator, left, right))
      return self.bounded(super().call_binop(context, operator, left, right))

    def bounded(self, value):
      length = len(value) if isinstance(value, (str, list, tuple)) else 0
      _spend(length >> 10, length)
      return value

    def counted(self, iterable):
      for item in iterable:
        _spend(1)
        yield item

  def raise_exception(message):
    raise jinja2.TemplateError(message)

  def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
      x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

  made = Environment(
    trim_blocks=True, lstrip_blocks=True, optimized=False,  # constants are computed in a rendering
    extensions=[_generation(marks), jinja2.ext.loopcontrols],
  )  # fmt: skip
  made.filters |= {name: _narrow(made.filters[name]) for name in ("center", "format", "indent")}
  made.filters["tojson"] = tojson
  made.globals.update(raise_exception=raise_exception, **_containers())
  return made


def _widest(text: Any, arguments: tuple[Any, ...]) -> int:
  """The largest width that a text states as a format ("%9d", "{:9}"), or that goes with it."""
  stated = map(int, _WIDTH.findall(text)) if isinstance(text, str) else ()
  return max((*stated, *(x for x in arguments if isinstance(x, int))), default=0)


def _narrow(filter, format: str = ""):
  """A filter, or the formatting of a text, refused before it makes what is as wide as it states."""

  @functools.wraps(filter)  # jinja's marks, too
  def bounded(*args, **kwargs):
    text, *widths = (format,) if format else (*args, *kwargs.values())
    _spend(0, _widest(text, tuple(widths)))
    return filter(*args, **kwargs)

  return bounded


def _grown(operator: str, left, right) -> int:
  """Elements, or bits, of a product or power, or a format's width; 0 of what cannot explode."""
  if operator == "%" and isinstance(left, str):
    widths = right if isinstance(right, tuple) and "*" in left else ()
    return _widest(left, widths)
  if operator not in ("*", "**"):
    return 0
  sizes = [x.bit_length() if isinstance(x, int) else 0 for x in (left, right)]
  for value, times in ((left, right), (right, left)):
    if isinstance(value, (str, list, tuple)) and isinstance(times, int):
      return len(value) * times
  return sizes[0] * right if operator == "**" and all(sizes) else sum(sizes)


def _code():
  """Generates code that counts turns of loops, and bounds filters and `~`."""
  import jinja2.compiler
  import jinja2.nodes as nodes

  def bounded(visit):
    def write(self, *args, **kwargs):
      self.write("environment.bounded(")
      visit(self, *args, **kwargs)
      self.write(")")

    return write

  class Code(jinja2.compiler.CodeGenerator):
    """Wraps what grows."""

    visit_Filter = bounded(jinja2.compiler.CodeGenerator.visit_Filter)
    visit_Concat = bounded(jinja2.compiler.CodeGenerator.visit_Concat)

    def visit_Template(self, node, frame=None):
      for loop in list(node.find_all(nodes.For)):
        counted = nodes.EnvironmentAttribute("counted")
        loop.iter = nodes.Call(counted, [loop.iter], [], None, None)
      super().visit_Template(node, frame)

  return Code


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
