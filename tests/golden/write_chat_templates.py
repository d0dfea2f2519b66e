"""Writes chat_templates/rendered.json: what transformers makes of every template there.

command: python tests/golden/write_chat_templates.py
needs:   pip install transformers jinja2 (5.23.0 and 3.1.6 wrote the file that is checked in)
"""

import datetime
import json
import pathlib

import jinja2
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).resolve().parent / "chat_templates"
DATE = "2026-01-31"
TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é<&>"}}}
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
}


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
  }  # fmt: skip
  (HERE / "rendered.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
  main()
