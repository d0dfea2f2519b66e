"""Rows of odd shapes: a conversation of known shape, or an error; the same by every spelling."""

import copy
import datetime
import json
import math

import case_inputs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import base
from fp8jax.data import sources
from fp8jax.data.chat import conversation, encode
from fp8jax.data.chat.template import MARKS, ChatTemplate
from fp8jax.errors import UserError

ROLES = ["system", "developer", "user", "assistant", "tool"]
KEYS = "role content from value type text name function arguments weight tool_calls".split()
KEYS += ["reasoning", "parameters", "function_call"]

leaves = st.one_of(
  st.none(), st.booleans(), st.integers(-2, 2), st.just(math.nan), st.just(b"bytes"),
  st.just(datetime.date(2026, 1, 1)), st.sampled_from(["", " ", "x", "{", "[]", "0", "null"]),
  st.sampled_from(["\ud800", "\U000f0f00", "text", *ROLES]),
)  # fmt: skip
odd = st.recursive(
  leaves,
  lambda inner: st.one_of(
    st.lists(inner, max_size=2),
    st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    inner.map(lambda value: json.dumps(value, default=str, indent=1)),
  ),
  max_leaves=6,
)


PROPERTIES = {"city": {"type": "string", "enum": ["Paris", "Rome"]}}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
WANT = [
  {"role": "user", "content": "weather?"},
  {"role": "assistant", "content": "", "tool_calls": [CALL]},
  {"role": "tool", "content": "rain"},
  {"role": "assistant", "content": "Rain."},
]


TEMPLATES = [case_inputs.template(name) for name in ("qwen2_5", "llama3_2", "qwen3")]


def _places(value):
  """(container, key) of everything in a row."""
  for key in value if isinstance(value, dict) else range(len(value)):
    yield value, key
    if isinstance(value[key], (dict, list)):
      yield from _places(value[key])


@given(st.data())
@settings(max_examples=1000, deadline=None)
def test_odd_rows_are_conversations_of_known_shape_or_errors(data):
  """A good row with up to three places replaced, removed or added."""
  row = copy.deepcopy({"messages": WANT, "tools": TOOLS})
  for _ in range(data.draw(st.integers(1, 3))):
    container, key = data.draw(st.sampled_from(list(_places(row)) or [(row, "messages")]))
    key = data.draw(st.sampled_from([key, key, *KEYS] if isinstance(container, dict) else [key]))
    value = data.draw(odd)
    if data.draw(st.integers(0, 4)) == 0:
      container.pop(key) if key in container or isinstance(container, list) else None
    else:
      container[key] = value
  before = repr(row)
  record = conversation.read(row, "messages", "messages", "f:1")
  assert repr(row) == before
  if "error" in record:
    assert record == {"error": record["error"], "origin": "f:1"} and record["error"]
    return
  _check(record)
  for template in TEMPLATES:
    try:
      encode.render(template, record["messages"], record["tools"])
    except UserError:
      pass  # the template's own refusal


def _check(record):
  """The shape that templates may rely on, written down a second time."""
  assert json.loads(record["text"].encode()) == [record["messages"], record["tools"]]
  assert "\U000f0f00" not in record["text"] and record["messages"][0]["role"] != "assistant"
  for message in record["messages"]:
    assert message["role"] in ROLES and isinstance(message["content"], str)
    assert None not in message.values()
    assert message.get("weight", 1) in (0, 1) and isinstance(message.get("reasoning", ""), str)
    called = message.get("tool_calls", [])
    assert message["content"].strip() or called or message["role"] != "assistant"
    assert not called or message["role"] == "assistant"
    for call in called:
      function = call.get("function", call)
      assert isinstance(function["name"], str) and isinstance(function["arguments"], dict)
  for tool in record["tools"] or ():
    assert isinstance(tool.get("function", tool)["name"], str)


# --- one conversation, many spellings -------------------------------------------------------------


def _spelled(value, choose):
  """The value with JSON text, parts and nulls where they mean the same."""
  if isinstance(value, list):
    return [_spelled(v, choose) for v in value]
  if not isinstance(value, dict):
    return value
  spelled = {k: _spelled(v, choose) for k, v in value.items()}
  for key, inner in spelled.items():
    if key in ("arguments", "tool_calls", "tools", "messages") and choose():
      # Nulls stay in JSON text, so that it has none.
      spelled[key] = json.dumps(value[key], indent=2 if choose() else None)
    elif key == "content" and inner and choose():
      half = len(inner) // 2
      spelled[key] = [{"type": "text", "text": inner[:half]}, inner[half:]]
    elif key == "content" and not inner:
      spelled[key] = None if choose() else []
  return spelled | ({"other": None} if choose() else {})


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_spellings_of_a_conversation_are_one(data):
  choose = lambda: data.draw(st.booleans())  # noqa: E731
  row = _spelled({"messages": WANT, "tools": TOOLS}, choose)
  record = conversation.read(conversation.of_table(row), "messages", "messages", "f:1")
  assert record == {
    "messages": WANT, "tools": TOOLS, "origin": "f:1",
    "text": json.dumps([WANT, TOOLS], sort_keys=True),
  }  # fmt: skip


ODD_ROWS = {
  "unknown role": ({"role": "critic", "content": "x"}, "unknown role 'critic'.*rename it"),
  "empty answer": ({"role": "assistant", "content": " \n"}, "is empty; write its answer"),
  "no object": ("x", "message 1 is str"),
  "an image": ({"role": "user", "content": [{"type": "image_url"}]}, "only text is trained on"),
  "a number": ({"role": "user", "content": 3}, "content is int, expected a string"),
  "a mark": ({"role": "user", "content": MARKS[0]}, "remove them"),
  "half a pair": ({"role": "user", "content": "\ud800"}, "lone surrogate"),
  "user content null": ({"role": "user", "content": None}, "message 1: content is null"),
  "no content": ({"role": "user"}, "message 1: content is null"),
  "no parts": ({"role": "user", "content": []}, "message 1: content is null"),
  "kind a list": ({"role": "user", "content": [{"type": ["text"], "text": "t"}]}, "parts of type"),
  "image beside": ({"role": "user", "content": [{"text": "t", "image": "i"}]}, "of type image"),
  "calls 5": ({"role": "assistant", "tool_calls": 5}, "tool_calls is int, expected a list"),
  "call of nothing": ({"role": "assistant", "tool_calls": [{}]}, "a function with its name"),
  "user calls": ({"role": "user", "content": "x", "tool_calls": [CALL]}, "the assistant's message"),
  "legacy call": ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "calls a"),
  "twice encoded": (
    {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '"{}"'}]},
    "arguments of f is str, expected an object",
  ),
  "Llama's call": (
    {"role": "assistant", "tool_calls": [{"name": "f", "parameters": {}}]}, "with 'parameters'"),
  "weight as text": ({"role": "assistant", "content": "x", "weight": "0"}, "the number 0 or 1"),
  "half": ({"role": "assistant", "content": "x", "weight": 0.5}, "weight 0.5, expected"),
  "thoughts": ({"role": "assistant", "content": "x", "thinking": {}}, "reasoning is dict"),
  "a nested mark": ({"role": "user", "content": "x", "a": {"b": ["\U000f0f01"]}}, "U\\+F0F01"),
  "bytes": ({"role": "user", "content": "x", "image": b"png"}, "no JSON .*bytes"),
  "no number": ({"role": "user", "content": "x", "a": math.nan}, "no JSON .*nan"),
}  # fmt: skip


@pytest.mark.parametrize("message, problem", ODD_ROWS.values(), ids=ODD_ROWS)
def test_messages_of_odd_shape_are_named(message, problem):
  row = {"messages": [{"role": "user", "content": "q"}, message]}
  with pytest.raises(UserError, match=f"^p.jsonl, line 3: .*{problem}"):
    conversation.prompt(row, "p.jsonl, line 3")


@pytest.mark.parametrize("tools, problem", [
  (5, "field 'tools' is int"), ("[{", "field 'tools' is str"), ("{}", "field 'tools' is dict"),
  ([5], r"field 'tools'\[0\] is int"), ([{"type": "web_search"}], "a function with its name"),
])  # fmt: skip
def test_tools_of_odd_shape_are_named(tools, problem):
  row = {"messages": WANT, "tools": tools}
  with pytest.raises(UserError, match=problem):
    conversation.prompt(row, "f")


def test_no_tools_are_spelled_in_many_ways():
  for tools in (None, "", " \n", "[]", "null", []):
    assert conversation.prompt({"messages": WANT, "tools": tools}, "f")["tools"] is None


def test_function_calls_of_sharegpt_are_the_assistants():
  """The role of LLaMA-Factory's demo files; its value is JSON text."""
  value = '{"name": "weather", "arguments": {"city": "Paris"}}'
  for one in (value, f"[{value}]"):
    turns = [("human", "weather?"), ("function_call", one), ("observation", "rain")]
    turns += [("gpt", "Rain.")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    record = conversation.read(row, "sharegpt", "conversations", "f")
    flat = [*WANT[:1], {**WANT[1], "tool_calls": [CALL["function"]]}, *WANT[2:]]
    assert record["messages"] == flat
  for system in ({"a": 1}, 3):
    error = conversation.read(row | {"system": system}, "sharegpt", "conversations", "f")["error"]
    assert "field 'system' is" in error
  row["conversations"][1]["value"] = "weather(Paris)"
  assert "tool_calls[0] is str" in conversation.read(row, "sharegpt", "conversations", "f")["error"]


def test_templates_that_add_arguments_to_text_get_json():
  """DeepSeek's; those with `tojson` and `is string` (Qwen3) see an object."""
  text = (
    "{{ 'a' + messages[1].tool_calls[0].function.arguments + messages[1].tool_calls[0].function."
  )
  text += "arguments|tojson }}{{ messages[1].tool_calls[0].function.arguments is string }}"
  record = conversation.prompt({"messages": WANT}, "f")
  assert ChatTemplate(text).render(record["messages"]) == 'a{"city": "Paris"}{"city": "Paris"}False'


def test_tables_render_as_json_lines_do(tmp_path):
  """Tables write null for the keys of other rows: of arguments, schemas, parts and messages."""
  parquet = pytest.importorskip("pyarrow.parquet")
  datasets = pytest.importorskip("datasets")
  import pyarrow

  add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
  other = [
    {"role": "user", "content": "1+2", "name": "Eve"},
    {"role": "assistant", "tool_calls": [
      {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
    ], "weight": 1},
  ]  # fmt: skip
  rows = [
    {"messages": WANT, "tools": TOOLS},
    {"messages": other, "tools": [{"type": "function", "function": add}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
  ]
  names = {"jsonl": "a.jsonl", "parquet": "a.parquet", "datasets": "d"}
  paths = {kind: tmp_path / name for kind, name in names.items()}
  paths["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in rows))
  parquet.write_table(pyarrow.Table.from_pylist(rows), paths["parquet"])
  datasets.Dataset.from_list(rows).save_to_disk(str(paths["datasets"]))
  found = {}
  for kind, path in paths.items():
    source = sources.open_source(base.source(kind, str(path), chat="messages"))
    records = [source[i] for i in range(3)]
    found[kind] = [
      (r["text"], encode.render(TEMPLATES[0], r["messages"], r["tools"])) for r in records
    ]
  assert "null" not in found["jsonl"][0][0] and '"a": 1, "b": 2' in found["jsonl"][1][0]
  assert found["jsonl"] == found["parquet"] == found["datasets"]


def test_a_table_of_several_files_has_the_columns_of_each(tmp_path):
  """The first one lacks the system's, which the second one has."""
  parquet = pytest.importorskip("pyarrow.parquet")
  import pyarrow

  turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
  for name, more in (("a", {}), ("b", {"system": "be brief"})):
    row = {"conversations": turns, **more}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
  source = sources.open_source(base.source("parquet", str(tmp_path / "*.parquet"), chat="sharegpt"))
  first, second = ([m["role"] for m in source[i]["messages"]] for i in range(2))
  assert first == ["user", "assistant"] and second == ["system", *first]


def test_a_file_whose_name_is_a_glob_is_that_file(tmp_path, monkeypatch):
  for name in ("a1.txt", "a[12].txt", "x [1]/a.txt"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(name)
  for name in ("a[12].txt", "x [1]/a.txt"):
    assert sources.find_files(str(tmp_path / name)) == [str(tmp_path / name)]
  assert sources.find_files(str(tmp_path / "a?.txt")) == [str(tmp_path / "a1.txt")]
  monkeypatch.setenv("HOME", str(tmp_path))
  assert sources.find_files("~/a1.txt") == [str(tmp_path / "a1.txt")]
  assert sources.Prepared("~/p", "train").path == str(tmp_path / "p")


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("is_table", [False, True])
def test_nulls_that_json_states_stay_and_those_of_tables_go(is_text, is_table):
  """A schema's default and an argument may be null; a table's null is another row's key."""
  tool = {"name": "f", "parameters": {"type": "object", "default": None}}
  call = {"name": "f", "arguments": {"unit": None, "n": 1}, "id": None}
  answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
  row = {"messages": [{"role": "user", "content": "q"}, answer], "tools": [tool]}
  if is_text:
    answer["tool_calls"], row["tools"] = json.dumps([call]), json.dumps([tool])
  row = conversation.of_table(row) if is_table else row
  record = conversation.read(row, "messages", "messages", "f:1")
  (made,) = record["messages"][1]["tool_calls"]
  assert "id" not in made and "refusal" not in record["messages"][1]
  if is_table and not is_text:
    assert made["arguments"] == {"n": 1} and record["tools"] == [
      {"name": "f", "parameters": {"type": "object"}}
    ]
  else:
    assert made["arguments"] == {"unit": None, "n": 1} and record["tools"] == [tool]


def test_a_function_call_of_sharegpt_keeps_its_nulls():
  turns = [
    {"from": "human", "value": "q"},
    {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"a": None}})},
    {"from": "observation", "value": None},
  ]
  record = conversation.read({"conversations": turns}, "sharegpt", "conversations", "f:1")
  assert record["messages"][1]["tool_calls"][0]["arguments"] == {"a": None}
  assert record["messages"][2]["content"] == ""  # a tool that returns nothing


def test_arguments_are_json_on_either_side_of_a_text():
  arguments = conversation._Arguments(a=1)
  assert arguments + "\n" == '{"a": 1}\n' and "x" + arguments + "y" == 'x{"a": 1}y'
