"""Where the launcher prints, and its tables."""

import os
import re
import sys
from typing import IO, cast

import jax
import rich.console
import rich.progress
import rich.table

# C0 but for tabs and line ends, DEL, C1, and marks that turn the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
  """Text of others, e.g. a file's name, with what a terminal would obey or refuse as escapes."""
  encodable = text.encode("utf-8", "backslashreplace").decode()  # names that are no UTF-8
  return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], encodable)


def console(stderr: bool = False) -> rich.console.Console:
  """Where humans read: process 0. Not a terminal: plain lines, wide enough not to wrap tables."""
  target = sys.stderr if stderr else sys.stdout
  return rich.console.Console(
    file=cast(IO[str], _Outliving(target)),
    highlight=False,
    width=None if target.isatty() else 120,
    soft_wrap=not target.isatty(),
    quiet=jax.process_index() != 0,
  )


class _Outliving:
  """A stream whose reader may leave (`| head`): the run goes on without it."""

  def __init__(self, stream):
    self._stream = stream

  def __getattr__(self, name):
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    self._attempt(lambda: self._stream.write(text))
    return len(text)

  def flush(self):
    self._attempt(self._stream.flush)

  def _attempt(self, action):
    try:
      action()
    except BrokenPipeError:
      # Python flushes the stream once more when it exits.
      with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), self._stream.fileno())
      if self._stream is not sys.stderr:
        print("nobody reads the output any more; the run goes on", file=sys.stderr)


def table(title: str, columns: list[str], rows: list[list[str]]) -> rich.table.Table:
  """A plain table; numbers to the right."""
  made = rich.table.Table(title=title, title_justify="left")
  for i, name in enumerate(columns):
    made.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
  for row in rows:
    made.add_row(*row)
  return made
