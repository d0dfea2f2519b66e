"""JSON text, nulls of tables and odd parts in conversations, as public data sets have them.

The spellings are compared in tests/data/conversation_test.py; here stands the trained text.
"""

import json

import case_inputs
import pyarrow
import pyarrow.parquet
import pytest

from configs import base
from fp8jax.data import sources
from fp8jax.data.chat import encode

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def _call(name, arguments):
  function = {"name": name, "arguments": arguments}
  call = {"id": "c1", "type": "function", "function": function}
  return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_tools_as_text_are_tools():
  """LLaMA-Factory's data/glaive_toolcall_en_demo.json; trl#5379."""
  text, _ = case_inputs.rendered({"messages": TURNS, "tools": "[]"})
  assert "# Tools" not in text and text.endswith("assistant\nhello<|im_end|>\n")
  text, _ = case_inputs.rendered({"messages": TURNS, "tools": json.dumps([TOOL], indent=2)})
  assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_2"])
def test_arguments_as_text_are_written_once(name):
  """OpenAI's own form; oumi#2599, Qwen3#1894."""
  row = {"messages": [TURNS[0], _call("weather", '{"city":"Paris"}')]}
  _, (trained,) = case_inputs.rendered(row, name)
  assert '": {"city": "Paris"}}' in trained and "\\" not in trained


def test_nulls_of_tables_are_not_trained(tmp_path):
  """ms-swift#6467, #10125."""
  rows = [
    {"messages": [TURNS[0], _call("weather", {"city": "Paris"})]},
    {"messages": [TURNS[0], _call("add", {"a": 2, "b": 2})]},
  ]
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
  source = sources.open_source(base.source("parquet", str(tmp_path / "a.parquet"), chat="messages"))
  for i, arguments in enumerate(('{"city": "Paris"}', '{"a": 2, "b": 2}')):
    record = source[i]
    (one,) = encode.render(case_inputs.template("qwen2_5"), record["messages"], record["tools"])
    assert f'"arguments": {arguments}}}\n' in one.text[slice(*one.spans[0])]


@pytest.mark.parametrize(
  "part", [{"text": None}, {"content": "x"}, {"text": 3}, {}, {"type": ["text"], "text": "x"}]
)
def test_parts_without_text_are_refused(part):
  """datasets#8241; OpenAI's content parts."""
  row = {"messages": [{"role": "user", "content": [{"type": "text", **part}]}, TURNS[1]]}
  text, _ = case_inputs.rendered(row)
  assert text.startswith("refused: message 0")
