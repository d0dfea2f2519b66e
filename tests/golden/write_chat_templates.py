"""Writes chat_templates/rendered.json: what transformers makes of every template there.

command: python tests/golden/write_chat_templates.py
needs:   pip install transformers jinja2 (5.23.0 and 3.1.6 wrote the file that is checked in)
"""

import datetime
import json
import pathlib
import tempfile

import jinja2
import tokenizers
import transformers
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).resolve().parent / "chat_templates"
DATE = "2026-01-31"
TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é<&>"}}}
CALL_IN_TEXT = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "a + b, in ℕ"}}


def of(*turns, **more):
  roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
  messages = [{"role": roles[t[0]], "content": t[2:]} for t in turns]
  return {"messages": messages, "tools": None, **more}


CONVERSATIONS = {
  "single": of("u What is 2+2?", "a 4."),
  "system": of("s Be brief.", "u Hé 👋🏽!", "a  \n Bonjour, ça va ?\n", "u Oui", "a 𝔒K\n\ndone"),
  "thoughts": of(
    "u 2+2",
    "a <think>\nTwo and two.\n</think>\n\n4.",
    "u 3+3",
    "a <think>\nThrees.\n</think>\n\n6.",
  ),
  "tools": {
    "messages": [
      {"role": "user", "content": "2+é"},
      {"role": "assistant", "content": "", "tool_calls": [CALL]},
      {"role": "tool", "content": "5"},
      {"role": "assistant", "content": "It is 5."},
    ],
    "tools": [TOOL],
  },
  # DeepSeek's templates write calls of messages without content, and their arguments as a text.
  "agent": {
    "messages": [
      {"role": "user", "content": "2+é"},
      {"role": "assistant", "content": None, "tool_calls": [CALL_IN_TEXT]},
      {"role": "tool", "content": "5"},
      {"role": "assistant", "content": "It is 5."},
      {"role": "user", "content": "And 3+3?"},
      {"role": "assistant", "content": None, "tool_calls": [CALL_IN_TEXT, CALL_IN_TEXT]},
      {"role": "tool", "content": "6"},
      {"role": "tool", "content": "7"},
      {"role": "assistant", "content": "6, or 7."},
    ],
    "tools": [TOOL],
  },
}

# Tokenizers' folders: {file: text or JSON}. Which template and which special tokens do rows get?
TEXT = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ messages | length }}"
LIST = [{"name": "default", "template": TEXT}, {"name": "tool_use", "template": "TOOLS " + TEXT}]
TOOLS = {"additional_chat_templates/tool_use.jinja": "TOOLS " + TEXT}
FILE = {"chat_template.jinja": TEXT}
MAP = {"special_tokens_map.json": {"bos_token": {"content": "<s>"}, "image_token": "<map>"}}
FOLDERS = {
  "one": {"tokenizer_config.json": {"chat_template": TEXT, "bos_token": "<s>", "unk_token": None}},
  "list": {"tokenizer_config.json": {"chat_template": LIST}},
  "list without default": {"tokenizer_config.json": {"chat_template": LIST[1:]}},
  "file and folder": {**FILE, **TOOLS, "tokenizer_config.json": {}},
  "folder alone": {**TOOLS, "tokenizer_config.json": {"chat_template": TEXT}},
  "file before list": {**FILE, "tokenizer_config.json": {"chat_template": LIST}},
  "map": {**FILE, **MAP, "tokenizer_config.json": {}},
  "map before config": {**FILE, **MAP, "tokenizer_config.json": {"bos_token": "<c>"}},
  "decoder": {
    **FILE, **MAP, "tokenizer_config.json": {"eos_token": "<e>", "added_tokens_decoder": {}},
  },
  "own token": {**FILE, "tokenizer_config.json": {"image_token": "<image>"}},
  "extra token": {
    **FILE, "tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}},
  },
}  # fmt: skip


def in_folder(files) -> dict[str, str]:
  """{"plain", "tools": text of a message without and with tools, or "error: ..."}."""
  with tempfile.TemporaryDirectory() as folder:
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(folder + "/tokenizer.json")
    for name, value in files.items():
      path = pathlib.Path(folder, name)
      path.parent.mkdir(exist_ok=True)
      path.write_text(value if isinstance(value, str) else json.dumps(value))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def render(tools):
      chat = [{"role": "user", "content": "x"}]
      try:
        return tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
      except ValueError as e:
        return f"error: {e}"

    return {"plain": render(None), "tools": render([TOOL])}


class Today(datetime.datetime):
  @classmethod
  def now(cls, tz=None):
    return cls.fromisoformat(DATE)


def main():
  chat_template_utils.datetime = Today
  found = {}
  for path in sorted(HERE.glob("*.jinja")):
    of_template = found.setdefault(path.stem, {})
    for name, conversation in CONVERSATIONS.items():

      def render(path=path, conversation=conversation, **kwargs):
        return chat_template_utils.render_jinja_template(
          [conversation["messages"]],
          tools=conversation["tools"],
          chat_template=path.read_text(),
          **TOKENS,
          **kwargs,
        )

      try:
        text, spans = render(return_assistant_tokens_mask="generation" in path.read_text())
        prompted, _ = render(add_generation_prompt=True)
      except (jinja2.TemplateError, TypeError) as e:
        of_template[name] = {"error": str(e)}
        continue
      of_template[name] = {
        "text": text[0], "prompted": prompted[0], "spans": spans[0] if spans else [],
      }  # fmt: skip
  result = {
    "date": DATE, "special_tokens": TOKENS, "conversations": CONVERSATIONS, "rendered": found,
    "agents": {template: of.pop("agent") for template, of in found.items()},
    "folders": {k: {"files": v, **in_folder(v)} for k, v in FOLDERS.items()},
  }  # fmt: skip
  (HERE / "rendered.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
  main()
