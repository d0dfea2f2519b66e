"""Prompts of chats are prepared as training prepares conversations (Megatron-Bridge#4072)."""

import json
import types

import case_inputs
import pytest

from fp8jax.data.chat import conversation, encode
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError
from fp8jax.jobs import generate

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
USER = {"role": "user", "content": [{"type": "text", "text": "weather?"}]}
PROMPTS = {
  "tools": {"messages": [USER], "tools": [TOOL]},
  "tools as text": {"messages": [USER], "tools": json.dumps([TOOL], indent=1)},
  "no tools": {"messages": [USER], "tools": "[]"},
  "a call": {"messages": [
    USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "name": None},
  ]},
}  # fmt: skip


def _prompt(tmp_path, row, name):
  template = (case_inputs.GOLDEN / "chat_templates" / f"{name}.jinja").read_text()
  tokenizer = Tokenizer(case_inputs.tokenizer_folder(tmp_path / "t", template, bos_token=""))
  (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [USER]}) + "\n" + json.dumps(row))
  records = generate.read_prompts(str(tmp_path / "p.jsonl"))
  config = types.SimpleNamespace(chat_template="", template_date="2026-01-01")
  _, prompts = generate._encoded(records, types.SimpleNamespace(tokenizer=tokenizer), config)
  return tokenizer.decode(prompts[1], special=True)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "llama3_2", "qwen3"])
@pytest.mark.parametrize("row", PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_is_the_beginning_of_the_trained_text(tmp_path, row, name):
  # Llama 3's template writes no call: none is trained here.
  turns = [m | ({"weight": 0} if "tool_calls" in m else {}) for m in row["messages"]]
  turns.append({"role": "assistant", "content": "Rain."})
  record = conversation.read(row | {"messages": turns}, "messages", "messages", "f")
  sample = encode.render(case_inputs.template(name), record["messages"], record["tools"])[-1]
  text, made = sample.text, _prompt(tmp_path, row, name)
  assert text.startswith(made) and "weather?" in made and "[{'type'" not in made
  if name == "qwen2_5":
    assert ("# Tools" in made) == (row.get("tools", "[]") != "[]")
  begin, end = sample.spans[-1]
  assert (begin, end) == (len(made), len(text))


BAD = {
  "numbers": ({"messages": [1, 2]}, "message 0 is int, expected an object"),
  "role 5": ({"messages": [{"role": 5, "content": "x"}]}, "unknown role 5"),
  "human": ({"messages": [{"role": "human", "content": "x"}]}, "unknown role 'human'"),
  "null": ({"messages": [{"role": "user", "content": None}]}, "content is null"),
  "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text"),
  "tools of a text": ({"prompt": "x", "tools": [TOOL]}, "tools stand beside 'messages'"),
  "no list": ({"messages": "hi"}, "no list of messages"),
}


@pytest.mark.parametrize("row, problem", BAD.values(), ids=BAD)
def test_prompts_that_training_refuses_are_refused(tmp_path, row, problem):
  with pytest.raises(UserError, match=f"p.jsonl, line 2.*{problem}"):
    _prompt(tmp_path, row, "qwen2_5")


def test_lm_eval_takes_the_same_path(tmp_path, monkeypatch):
  pytest.importorskip("lm_eval")
  from fp8jax.evaluation import lm_eval as adapter

  model = object.__new__(adapter.FP8JaxLM)
  model.tokenizer = Tokenizer(case_inputs.tokenizer_folder(tmp_path))
  assert model.apply_chat_template([USER]).endswith("weather?<|im_end|>\n<|im_start|>assistant\n")
  prefix = [USER, {"role": "assistant", "content": "Answer:"}]
  assert model.apply_chat_template(prefix, False).endswith("<|im_start|>assistant\nAnswer:")
  with pytest.raises(UserError, match="lm_eval's request: message 0 has the unknown role"):
    model.apply_chat_template([{"role": "human", "content": "x"}])


def test_evaluation_takes_the_same_path(tmp_path, monkeypatch):
  from fp8jax.evaluation.tasks import Item
  from fp8jax.jobs import evaluate_tasks

  tokenizer = Tokenizer(case_inputs.tokenizer_folder(tmp_path))
  chat = types.SimpleNamespace(chat_template="", template_date="")
  spec = types.SimpleNamespace(data=chat, of=lambda _: types.SimpleNamespace(chat=True))
  ask = evaluate_tasks.asker(spec, tokenizer, False)
  task = types.SimpleNamespace(name="t", chat=False, prefix="<", system="s")
  task.user_text = lambda item: item.question
  text, ids = ask(task, Item("1", "q\ud83d"[:1], "a"))
  assert (
    text.endswith("user\nq<|im_end|>\n<|im_start|>assistant\n<")
    and ids[-1] == tokenizer.encode_prompt("<")[0]
  )
  with pytest.raises(UserError, match="t, 2: a message has a lone surrogate"):
    ask(task, Item("2", "q\ud83d", "a"))
