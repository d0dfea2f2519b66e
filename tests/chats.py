"""Conversations for tests: files of them, a template, and the bytes that must be trained."""

import json

import numpy as np

from configs import base
from fp8jax.data import config as data_config
from fp8jax.data import tokenize
from fp8jax.data.chat.template import ChatTemplate

TEMPLATE = (
  "{% if messages[0].role == 'system' %}{{ raise_exception('no system text here') }}{% endif %}"
  "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
  "{{ 'a:' if add_generation_prompt }}"
)
LENGTH = 48


def write(path, count: int, seed: int = 0, longest: int = 20) -> list[dict]:
  """So many conversations of one or two turns, as JSON lines; returns them."""
  path.parent.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(seed)

  def text(most):
    return "".join(map(chr, rng.integers(97, 123, rng.integers(1, most))))

  chats = []
  for i in range(count):
    turns = [{"role": "user", "content": f"{i}{text(4)}"}]
    turns += [{"role": "assistant", "content": text(longest)}]
    if i % 3 == 0:
      turns += [{"role": "user", "content": "?"}, {"role": "assistant", "content": text(8)}]
    chats.append({"messages": turns})
  path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
  return chats


def trained_bytes(chat) -> str:
  """The text that is trained, turn by turn."""
  return "".join(m["content"] + ";" for m in chat["messages"] if m["role"] == "assistant")


def whole(chat) -> str:
  return "".join(f"{m['role'][0]}:{m['content']};" for m in chat["messages"])


def spec(path, **changes) -> data_config.DataConfig:
  """Data of conversations in bytes, windows of LENGTH positions, 8 samples a step."""
  source = dict(base.source("jsonl", str(path), chat="messages"))
  per_step = changes.pop("samples_per_step", 8)
  chat = data_config.ChatConfig(
    ChatTemplate(TEMPLATE), per_step, changes.pop("on_untrained", "error")
  )
  values = {
    "sources": {"main": source}, "tokenizer": tokenize.Tokenizer("bytes"), "seq_len": LENGTH,
    "heldout": 0.0, "on_long": "error", "chat": chat,
  }  # fmt: skip
  return data_config.DataConfig(**(values | changes))
