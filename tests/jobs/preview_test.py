"""--job=preview shows the samples of training, trained text between marks, and counts them."""

import re
import subprocess
import sys

import chats
import pytest

from configs import base
from fp8jax.config import resolve
from fp8jax.errors import UserError
from fp8jax.jobs import preview


def test_preview_shows_trained_text_and_counts(tmp_path):
  """From the command line, whose text and JSON are read back."""
  import json

  rows = chats.write(tmp_path / "a.jsonl", 30)
  with open(tmp_path / "a.jsonl", "a") as f:
    f.write('{"messages": []}\n')
  (tmp_path / "t.jinja").write_text(chats.TEMPLATE)
  keys = {
    "tokenizer": "bytes", "chat_template": tmp_path / "t.jinja", "on_long": "error",
    "samples_per_step": 6, "epochs": 2.0, "on_malformed": "skip", "heldout_fraction": 0.0,
    "sources.main.kind": "jsonl", "sources.main.path": tmp_path / "a.jsonl",
    "sources.main.chat": "messages", "sources.main.field": "messages",
  }  # fmt: skip
  command = [sys.executable, "launch.py", "--config=configs/debug.py", "--job=preview"]
  command += [f"--config.data.{key}={value}" for key, value in keys.items()]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  text, _, counts = done.stdout.rpartition("\n{")
  shown = re.findall(r"^(u:.*(?:\n(?!\d+ tokens).*)*)", text, re.MULTILINE)
  shown = {re.sub(r"\n", "", one) for one in shown}
  assert len(shown) == 10
  want = {
    "".join(
      f"{m['role'][0]}:"
      + (f"⟦{m['content']};⟧" if m["role"] == "assistant" else f"{m['content']};")
      for m in row["messages"]
    )
    for row in rows
  }
  assert shown <= want
  counts = json.loads("{" + counts)
  assert counts["samples"] == 30 and counts["malformed"] == 1 and counts["steps"] == 10
  assert counts["tokens"] == sum(len(chats.whole(row)) - 1 for row in rows)
  assert counts["trained_tokens"] == sum(len(chats.trained_bytes(row)) for row in rows)
  assert counts["windows_needed"] == 1  # of 256 positions
  assert counts["padding"] == pytest.approx(1 - 2 * counts["tokens"] / (10 * 8 * 256), abs=1e-4)


def test_preview_of_documents_is_refused():
  data, steps, windows = resolve.resolve_preview(base.get_config())
  with pytest.raises(UserError, match="--job=preview shows conversations"):
    preview.run(data, steps, windows, None)
