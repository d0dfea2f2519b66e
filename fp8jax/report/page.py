"""A report as one HTML file: its charts, tables and the program that draws them are inside."""

import contextlib
import dataclasses
import html
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8jax import records
from fp8jax.errors import UserError, missing_package, one_line
from fp8jax.run import compilation_cache

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5em auto; max-width: 1280px;
       padding: 0 1em; color: #1a1a1a; background: #fff }
h1 { font-size: 1.4em; margin: 0 0 .2em } h2 { font-size: 1.1em; margin: 1.6em 0 .3em }
p.note { color: #555; margin: .2em 0 .6em; max-width: 90ch }
table { border-collapse: collapse; font-size: 13px } th { text-align: left; font-weight: 600 }
th, td { padding: .15em .8em .15em 0; border-bottom: 1px solid #ddd; vertical-align: top;
         overflow-wrap: anywhere }
.charts { display: flex; flex-wrap: wrap; gap: 1em } .scroll { overflow-x: auto }
.vega-bind-name { margin-right: .5em } .vega-bind input[type=range] { width: 420px }
pre { white-space: pre-wrap; font-size: 12px }
"""
# Every chart draws itself; the page says when all have, or which failed.
_SCRIPT = """
const specs = JSON.parse(document.getElementById("specs").textContent);
const views = window.views = {};
Promise.all(Object.entries(specs).map(([id, spec]) =>
  vegaEmbed("#" + id, spec, {bind: "#" + id + "_bind", renderer: "canvas",
    actions: {export: true, source: false, compiled: false, editor: false}})
    .then(result => { views[id] = result.view; })
)).then(() => { document.body.dataset.drawn = Object.keys(views).length; })
  .catch(error => { document.body.dataset.failed = String(error); console.error(error); });
"""


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of a page.

  Attributes:
    note: a sentence under it, plain text.
    charts: Vega-Lite specifications by their ids in the page.
    tables: (column names, rows) of plain text.
    text: shown as it is, in a font of fixed width.
  """

  title: str
  note: str = ""
  charts: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  tables: Sequence[tuple[Sequence[str], Sequence[Sequence[Any]]]] = ()
  text: str = ""


def render(title: str, sections: Sequence[Section], program: str) -> str:
  """The page; its program is JavaScript that defines vegaEmbed, see `vega`."""
  specs = {key: spec for s in sections for key, spec in s.charts.items()}
  # "</" ends a script element, and "<!--<script>" makes one of several.
  data = json.dumps(specs, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
  body = "\n".join(map(_section, sections))
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    '<link rel="icon" href="data:,">\n'
    f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
    f"<h1>{_text(title)}</h1>\n{body}\n"
    f'<script type="application/json" id="specs">{data}</script>\n'
    f"<script>{program.replace('</script', '<' + chr(92) + '/script')}</script>\n"
    f"<script>{_SCRIPT}</script>\n</body></html>\n"
  )


# Control characters as their pictures, "␛" for ESC; halves of surrogate pairs are no characters.
_VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {127: 0x2421}
_VISIBLE |= dict.fromkeys((*range(128, 160), *range(0xD800, 0xE000)), 0xFFFD)


def visible(text: str) -> str:
  """The text with its control characters shown, but for tabs and line breaks."""
  return text.translate(_VISIBLE)


def _text(value: Any) -> str:
  return html.escape(visible(str(value)))


def _section(section: Section) -> str:
  parts = [f"<section><h2>{_text(section.title)}</h2>"]
  if section.note:
    parts.append(f'<p class="note">{_text(section.note)}</p>')
  if section.charts:
    drawn = "".join(
      f'<div><div id="{key}_bind"></div><div id="{key}"></div></div>'
      for key in map(_text, section.charts)
    )
    parts.append(f'<div class="charts scroll">{drawn}</div>')
  for columns, rows in section.tables:
    head = "".join(f"<th>{_text(c)}</th>" for c in columns)
    lines = "".join("<tr>" + "".join(f"<td>{_text(v)}</td>" for v in row) + "</tr>" for row in rows)
    parts.append(f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>')
  if section.text:
    parts.append(f"<pre>{_text(section.text)}</pre>")
  return "\n".join(parts) + "</section>"


def vega() -> str:
  """JavaScript that defines vegaEmbed, Vega and Vega-Lite: 0.9 MB, kept after the first time.

  vl-convert packs it in a few seconds; a copy by its version lies beside the compiled programs.
  """
  import vl_convert

  folder = os.path.join(os.path.dirname(os.path.expanduser(compilation_cache.ROOT)), "vega")
  path = os.path.join(folder, f"vega-{importlib.metadata.version('vl-convert-python')}.js")
  if os.path.exists(path):
    with open(path, encoding="utf-8") as f:
      return f.read()
  no_snippet: Any = ()  # its types ask for one
  program = vl_convert.javascript_bundle(*no_snippet)
  with contextlib.suppress(OSError, UserError):  # a folder that cannot be written
    os.makedirs(folder, exist_ok=True)
    write(path, program)
  return program


def write(path: str, content: str | bytes):
  """Writes a file at once: a reader never sees half of it."""
  records.write_atomic(path, content, f"{path}.{os.getpid()}.part")  # several may draw at once


def pictures(stem: str, spec: dict[str, Any]) -> list[str]:
  """Writes a chart as STEM.svg and STEM.png, without a browser; their paths."""
  import vl_convert

  write(f"{stem}.svg", vl_convert.vegalite_to_svg(spec))
  write(f"{stem}.png", vl_convert.vegalite_to_png(spec, scale=2))
  return [f"{stem}.svg", f"{stem}.png"]


def attempt(workdir: str, others: Callable[[], Sequence[Any]] = tuple) -> str:
  """Writes the report at the end of a run; returns a line that says where it is, or why not.

  Args:
    others: imports the features whose sections it has too, see run_report.Others.
  """
  try:
    run_report = importlib.import_module("fp8jax.report.run_report")  # needs the extra `report`
    return f"report: {run_report.write(workdir, others())}"
  except ModuleNotFoundError as e:
    return f"no report.html: {missing_package(e)}; then --job=report --workdir={workdir}"
  except Exception as e:  # a picture never fails the run that it is of
    return f"no report.html: {type(e).__name__}: {one_line(e)}; the run itself is complete"
