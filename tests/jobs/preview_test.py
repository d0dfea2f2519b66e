"""--job=preview shows the samples of training, trained text between marks, and counts them."""

import io
import json

import case_inputs
import chats
import pytest
import rich.console

from configs import base
from fp8jax.config import resolve
from fp8jax.errors import UserError
from fp8jax.jobs import dispatch, preview


def _config(folder):
  c = base.get_config()
  c.data.sources = {"main": base.source("jsonl", str(folder / "a.jsonl"), chat="messages")}
  c.data.chat_template, c.data.tokenizer = str(folder / "t.jinja"), "bytes"
  c.data.on_long, c.data.on_malformed, c.data.heldout_fraction = "error", "skip", 0.0
  c.data.samples_per_step, c.data.epochs = 6, 2.0
  return c


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("chats")
  chats.write(path / "a.jsonl", 30)
  with open(path / "a.jsonl", "a") as f:
    f.write('{"messages": []}\n')
  (path / "t.jinja").write_text(chats.TEMPLATE)
  return path


def _preview(c, out):
  return preview.run(*resolve.resolve_steps(c), c.global_batch, out)


def test_preview_shows_trained_text_and_counts(folder, tmp_path):
  rows = chats.write(tmp_path / "same.jsonl", 30)
  out = rich.console.Console(file=io.StringIO(), width=200)
  counts = _preview(_config(folder), out)
  shown = [line for line in out.file.getvalue().splitlines() if line.startswith("u:")]
  marked = {"a": "a:⟦{};⟧", "u": "u:{};"}
  want = {"".join(marked[m["role"][0]].format(m["content"]) for m in r["messages"]) for r in rows}
  assert len(set(shown)) == 10 and set(shown) <= want
  tokens = sum(len(chats.whole(row)) - 1 for row in rows)
  assert counts == {
    "samples": 30, "tokens": tokens, "heldout_samples": 0, "steps": 10, "malformed": 1,
    "trained_tokens": sum(len(chats.trained_bytes(row)) for row in rows),
    "windows_needed": 1, "padding": pytest.approx(1 - 2 * tokens / (10 * 8 * 256), abs=1e-4),
  }  # fmt: skip


def test_control_characters_of_data_are_shown_as_escapes(tmp_path, folder):
  turns = [("user", "\x1b[31mred\x07"), ("assistant", "a\x1b]0;title\x9b\u202e\tb\nc")]
  row = {"messages": [{"role": role, "content": text} for role, text in turns]}
  (tmp_path / "a.jsonl").write_text(json.dumps(row))
  (tmp_path / "t.jinja").write_text(chats.TEMPLATE)
  c = _config(tmp_path)
  c.data.samples_per_step = 1
  out = rich.console.Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
  _preview(c, out)
  shown = out.file.getvalue()
  assert "\\x1b[31mred\\x07" in shown and "a\\x1b]0;title\\x9b\\u202e" in shown
  assert not set(shown) & set("\x1b\x07\x9b\u202e") and "b\nc" in shown


def test_preview_cuts_long_samples_short(folder, monkeypatch):
  monkeypatch.setattr(preview, "_MOST", 5)
  out = rich.console.Console(file=io.StringIO(), width=200)
  _preview(_config(folder), out)
  assert "characters more" in out.file.getvalue() and "⟦" not in out.file.getvalue()


def test_documents_are_not_previewed_and_conversations_not_prepared(folder, tmp_path):
  with pytest.raises(UserError, match="--job=preview shows conversations"):
    _preview(base.get_config(), rich.console.Console(file=io.StringIO()))
  with pytest.raises(UserError, match="--job=prepare writes documents"):
    dispatch.call("prepare", _config(folder), base.get_config(), str(tmp_path))


def test_preview_names_the_ends_of_turns_and_the_template_that_it_chose(folder, tmp_path):
  model = case_inputs.model_folder(tmp_path / "m")
  (tmp_path / "m/additional_chat_templates").mkdir()
  (tmp_path / "m/additional_chat_templates/tool_use.jinja").write_text("T{{ messages }}")
  c = _config(folder)
  c.data.tokenizer, c.data.chat_template = str(model), ""

  def shown():
    out = rich.console.Console(file=io.StringIO(), width=1000)
    _preview(c, out)
    return out.file.getvalue()

  text = shown()
  assert "'default', 'tool_use' rows with tools take 'tool_use', others 'default'" in text
  assert f"trained turns end with '<|im_end|>', which is no end token in {model}" in text
  (model / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
  assert "trained turns end" not in shown()
  c.data.chat_template = str(folder / "t.jinja")
  assert "40 of 40 trained turns end in ordinary text, most often in ';'" in shown()
