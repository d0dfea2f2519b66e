"""Names of others are shown as they are: neither markup nor emoji nor control characters."""

import ast
import io
import pathlib
import re
import subprocess
import sys

import pytest
import rich.progress

from fp8jax import console

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = {
  "[/b]": "[/b]",
  "x[red]": "x[red]",
  ":smile:": ":smile:",
  "a\x1b[31mb": r"a\x1b[31mb",
  "a\rb\x07\x08\x7f\x9b": r"a\rb\x07\x08\x7f\x9b",
  "a\u202eb": r"a\u202eb",
  "\udcff": r"\udcff",  # a byte of a file's name that is no UTF-8
  "naïve 文": "naïve 文",
}


@pytest.fixture
def shown(monkeypatch):
  """(draw on a console) -> the text that it wrote, on a terminal with colours."""

  def run(draw, is_terminal=False):
    target = io.TextIOWrapper(io.BytesIO(), "utf-8", newline="")
    monkeypatch.setattr(target, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", target)
    draw(console.console())
    target.flush()
    return target.buffer.getvalue().decode()

  return run


@pytest.mark.parametrize("name, text", NAMES.items(), ids=map(ascii, NAMES))
def test_a_name_is_shown_as_it_is(shown, name, text):
  assert console.visible(name) == text and console.visible("a\tb\nc") == "a\tb\nc"
  assert shown(lambda out: out.print(f"runs/{name}: over")) == f"runs/{text}: over\n"
  table = shown(lambda out: out.print(console.table(f"t{name}", ["k", name], [[name, "1"]])))
  assert table.count(text) == 3  # title, head, row
  assert not set(table) & {"\x1b", "\r", "\x07", "\x7f", "\x9b", "\u202e"}


def test_a_bar_shows_names_as_they_are(shown, monkeypatch):
  monkeypatch.setenv("TERM", "xterm")

  def draw(out):
    columns = (console.column("{task.description}"), rich.progress.BarColumn())
    with rich.progress.Progress(*columns, console=out) as bar:
      bar.add_task(console.visible("[/b]{x}\x1b"), total=1, completed=1)

  assert r"[/b]{x}\x1b" in re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", shown(draw, is_terminal=True))


def test_nobody_else_makes_a_console_or_reads_markup():
  """Files beside console.py get theirs from it, and none turns markup on."""
  found = []
  for path in sorted((ROOT / "fp8jax").rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      words = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
      is_maker = re.search(r"(^|\.)(_?Console|TextColumn|from_markup|render_markup)$", words)
      if is_maker and path.name != "console.py" or words in ("rich.print", "rich.get_console"):
        found.append(f"{path}:{node.lineno} {words}")
      if isinstance(node, ast.keyword) and node.arg in ("markup", "emoji"):
        if not (path.name == "console.py" and ast.unparse(node.value) == "False"):
          found.append(f"{path}:{node.value.lineno} {node.arg}")
  assert not found


@pytest.mark.slow
def test_a_workdir_and_a_source_with_brackets_train_to_the_end(tmp_path):
  """Both were read as markup, the workdir's after the last step."""
  (tmp_path / "c.py").write_text(
    "from configs import base\n\n\ndef get_config(arm=''):\n"
    "  c = base.get_config('bf16')\n"
    "  c.model.update(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=1,\n"
    "                 num_kv_heads=1, head_dim=32, vocab_size=320)\n"
    "  c.steps, c.mesh.fsdp, c.global_batch, c.seq_len = 1, 1, 2, 32\n"
    "  c.eval.tokens, c.eval.batch, c.memory.loss_chunk = 64, 2, 32\n"
    "  c.optim.schedule, c.optim.warmup_steps = 'constant', 0\n"
    "  c.log.report = c.log.tensorboard = False\n"
    "  c.data.shuffle_windows = 0\n"
    "  c.data.sources = {'[/b]\\x1b': c.data.sources.main}\n"
    "  return c\n"
  )
  workdir = tmp_path / "x[red]" / "[/i]\x1b[31m"
  command = [sys.executable, "launch.py", f"--config={tmp_path / 'c.py'}", f"--workdir={workdir}"]
  ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
  assert r"x[red]/[/i]\x1b[31m" in ended.stdout and "\x1b" not in ended.stdout
  assert r"held-out loss on [/b]\x1b: bf16" in ended.stdout
  assert (workdir / "summary.json").exists()
