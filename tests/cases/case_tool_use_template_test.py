"""Rows with tools take the template "tool_use" (transformers#31429, ollama#6522: Hermes 3)."""

import pathlib

import case_inputs
import pytest

from fp8jax.data.chat.template import ChatTemplate

TOOL_USE = "TOOLS {{ tools | tojson }}\n" + case_inputs.CHATML
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("place", ["list", "folder"])
def test_rows_with_tools_take_the_template_for_tools(place, tmp_path):
  if place == "list":
    both = [
      {"name": "default", "template": case_inputs.CHATML},
      {"name": "tool_use", "template": TOOL_USE},
    ]
    folder = case_inputs.tokenizer_folder(tmp_path, None, chat_template=both)
  else:
    folder = case_inputs.tokenizer_folder(tmp_path)
    more = pathlib.Path(folder) / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(TOOL_USE)
  template = ChatTemplate.load(folder)
  assert template.render(MESSAGES, tools=TOOLS).startswith('TOOLS [{"type": "function"')
  assert template.render(MESSAGES).startswith("<|im_start|>user\nhi")
