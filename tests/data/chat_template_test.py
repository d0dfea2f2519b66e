"""Chat templates and their trained tokens, beside transformers' rendering and counts by hand."""

import dataclasses
import json
import pathlib
import types

import chats
import numpy as np
import pytest
import tokenizers
from chats import GOLDEN, GOLDEN_TEMPLATES, assistant, user

from fp8jax.data import config as data_config
from fp8jax.data import loader, tokenize
from fp8jax.data.chat import conversation, encode, samples
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.errors import UserError

RENDERED = {t: {**of, "agent": GOLDEN["agents"][t]} for t, of in GOLDEN["rendered"].items()}
CASES = [(t, c) for t, of in RENDERED.items() for c in of]
CHATML, LLAMA = ("qwen2_5", "qwen2_5_training", "qwen3", "smollm2"), ("llama3", "llama3_training")


def _template(name: str, **changes) -> ChatTemplate:
  text = (GOLDEN_TEMPLATES / f"{name}.jinja").read_text()
  values = dict(special_tokens=GOLDEN["special_tokens"], date=GOLDEN["date"]) | changes
  return ChatTemplate(text, **values)


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, case", CASES, ids=["-".join(case) for case in CASES])
def test_templates_render_as_transformers_renders_them(name, case):
  template, golden = _template(name), RENDERED[name][case]
  given = GOLDEN["conversations"][case]
  if "error" in golden:
    with pytest.raises(UserError, match="refuses the conversation"):
      template.render(given["messages"], tools=given["tools"])
    return
  assert template.render(given["messages"], tools=given["tools"]) == golden["text"]
  prompted = template.render(given["messages"], add_generation_prompt=True, tools=given["tools"])
  assert prompted == golden["prompted"]
  text, spans = template.render_marked(given["messages"], given["tools"])
  assert text == golden["text"] and [list(span) for span in spans] == golden["spans"]
  assert template.has_generation() == name.endswith("_training")


def test_date_is_a_setting():
  assert "Today Date: 31 Jan 2026\n" in _template("llama3_2").render([user("x")])
  with pytest.raises(UserError, match="data.template_date"):
    _template("llama3_2", date="").check()
  with pytest.raises(UserError, match="is no date"):
    _template("llama3_2", date="tomorrow").check()


def test_long_conversations_are_refused_by_a_bound(monkeypatch):
  template, pair = _template("qwen2_5"), [user("q"), assistant("a")]
  # k turns that alternate render 2 + 4 + ... + 2k = k (k + 1) messages.
  with pytest.raises(UserError, match="at most 1,048,576 messages.*of 2,046 messages or fewer"):
    encode.render(template, pair * 25_000)
  monkeypatch.setattr(encode, "MOST_MESSAGES", 30)
  assert len(encode.render(template, pair * 5)) == 1
  with pytest.raises(UserError, match="at most 30 messages in all; split .* of 10 messages"):
    encode.render(template, pair * 6)
  most = sum(len(template.render(pair * k)) for k in (1, 2, 3))
  monkeypatch.setattr(encode, "MOST_CHARACTERS", most)
  assert len(encode.render(template, pair * 3)) == 1
  with pytest.raises(
    UserError, match=f"at most {most:,} characters in all; split .* of 6 messages"
  ):
    encode.render(template, pair * 4)


def test_generated_text_that_a_template_computes_with_is_refused():
  cut = "{% set x %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}"
  for use in ("{{ x | length }}", "{{ x[:3] }}"):
    with pytest.raises(UserError, match="computes with the text"):
      ChatTemplate(cut + use).render_marked([user("abcd")])


# --- trained tokens ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
  """A tokenizer with a token for every character, and one for every special token."""
  path = tmp_path_factory.mktemp("characters")
  special = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"]
  special += ["<|start_header_id|>", "<|end_header_id|>"]
  letters = ["<unk>", "\n", *map(chr, range(32, 127))]
  model = tokenizers.models.WordLevel({text: i for i, text in enumerate(letters)}, "<unk>")
  made = tokenizers.Tokenizer(model)
  made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
  made.add_special_tokens(special)
  made.save(str(path / "tokenizer.json"))
  return tokenize.Tokenizer(str(path), "<|im_end|>")


@pytest.mark.parametrize("name", [*CHATML, *LLAMA])
def test_trained_tokens_are_those_of_theassistant(characters, name):
  """One token per character and per special token: the count needs no offsets."""
  if name == "qwen3":  # its last turn has thoughts, also without any
    answers, extra = [["one"], ["three 3"]], len("<think>\n\n</think>\n\n")
  else:
    answers, extra = [["one", "three 3"]], 0
  chat = [user("One?"), assistant("one"), user("Three?"), assistant("three 3")]
  # ChatML ends a turn with a line break; trl's blocks also have the one that follows "assistant".
  turn = 1 if name in LLAMA else 2
  extra += name == "qwen2_5_training"
  samples = encode.Encoder(characters, _template(name)).samples({"messages": chat})
  assert len(samples) == len(answers)
  for sample, texts in zip(samples, answers):
    assert sample.trained.sum() == sum(len(text) + turn + extra for text in texts)
    kept = characters.decode(sample.tokens[sample.trained].tolist()).replace(" ", "")
    for text in texts:
      assert text.replace(" ", "") in kept
    assert "One?" not in kept and "Three?" not in kept
    ends = sample.tokens == characters._tokenizer.token_to_id(
      "<|eot_id|>" if name in LLAMA else "<|im_end|>"
    )
    assert (sample.trained & ends).sum() == len(texts)  # of the assistant's turns alone


def test_end_of_turn_behind_a_generation_block_is_trained(characters):
  """Only the block is the assistant's in transformers; then no model would learn to stop."""
  text = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ END }}{% endfor %}"
  )
  chat = [user("One?"), assistant("one"), user("b"), assistant("yes")]
  for end, trained in (
    ("{{ '<|im_end|>\\n' }}", "one<|im_end|>yes<|im_end|>"),
    ("{{ '\\n<|im_end|>' }}", "one\n<|im_end|>yes\n<|im_end|>"),
    ("{{ '<|im_end|>\\n<|eot_id|>' }}", "one<|im_end|>\n<|eot_id|>yes<|im_end|>\n<|eot_id|>"),
    ("{{ ' and more' }}", "oneyes"),
    ("{{ '}' }}", "oneyes"),  # a token, and an ordinary one
  ):
    encoder = encode.Encoder(characters, ChatTemplate(text.replace("{{ END }}", end)))
    (sample,) = encoder.samples({"messages": chat})
    names = map(characters._tokenizer.id_to_token, sample.tokens[sample.trained].tolist())
    assert "".join(names) == trained


def test_turns_that_change_later_are_samples_of_their_own(characters):
  """Qwen3 drops the thoughts of earlier turns; each sample is what the model meets at its turn."""
  given = GOLDEN["conversations"]["thoughts"]["messages"]
  first, last = encode.render(_template("qwen3"), given)
  assert "Two and two." in first.text and "3+3" not in first.text
  assert "Two and two." not in last.text and "Threes." in last.text
  for one, answer in ((first, "Two and two.\n</think>\n\n4."), (last, "Threes.\n</think>\n\n6.")):
    ((start, end),) = one.spans
    assert one.text[start:end] == "<think>\n" + answer + "<|im_end|>\n" and end == len(one.text)
  (stable,) = encode.render(_template("qwen2_5"), given)
  assert len(stable.spans) == 2


MARKED = [c for c in CASES if c[0].endswith("_training") and "error" not in RENDERED[c[0]][c[1]]]


def test_calls_that_a_template_writes_beside_null_alone_are_written():
  """As transformers renders the same conversation with null, whose reader has no null."""
  given = GOLDEN["conversations"]["agent"]
  row = conversation.read(given, "messages", "messages", "f:1")
  assert all(m["content"] is not None for m in row["messages"])
  made = encode.render(_template("deepseek_r1_distill_training"), row["messages"], row["tools"])
  assert made[-1].text == GOLDEN["agents"]["deepseek_r1_distill_training"]["text"]


@pytest.mark.parametrize("text", [
  "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %};",
  "{% if m.content or m.tool_calls %}A:{{ m.content }};{% endif %}",
  "{% if not (m.content or m.tool_calls) %}{{ raise_exception('x') }}{% endif %}{{ m.content }};",
])  # fmt: skip
def test_a_turn_is_not_trained_without_one_of_its_calls(text):
  """A template that writes the first call alone, that one was made, or that asks for one."""
  user_of = "{% if m.role == 'user' %}{{ m.content }}{% else %}"
  template = ChatTemplate("{% for m in messages %}" + user_of + text + "{% endif %}{% endfor %}")
  call = lambda name: {"type": "function", "function": {"name": name, "arguments": {}}}  # noqa: E731
  turn = {"role": "assistant", "content": "", "tool_calls": [call("one"), call("two")]}
  with pytest.raises(UserError, match="does not write the assistant's call of '(one|two)'"):
    encode.render(template, [user("q"), turn])


@pytest.mark.parametrize("name, case", MARKED, ids=["-".join(case) for case in MARKED])
def test_spans_of_all_turns_are_those_of_transformers(name, case):
  golden, given = RENDERED[name][case], GOLDEN["conversations"][case]
  if any(m.get("tool_calls") for m in given["messages"]) and "add" not in golden["text"]:
    # Transformers leaves the calls out. A model would learn to end its turn in their place.
    with pytest.raises(UserError, match="does not write the assistant's call of 'add'"):
      encode.render(_template(name), given["messages"], given["tools"])
    return
  (one,) = encode.render(_template(name), given["messages"], given["tools"])
  assert one.text == golden["text"] and [list(span) for span in one.spans] == golden["spans"]
  assert one.ends == tuple(end for _, end in one.spans)


def test_a_block_that_begins_with_what_was_rendered_before_is_trained():
  header = "{{ 'A:' if messages[-1].role == 'user' and loop.last }}"
  text = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}A:{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }}" + header + "{% endif %}{% endfor %}"
  )
  chat = [user("q"), assistant("one"), user("r"), assistant("two")]
  (one,) = encode.render(ChatTemplate(text), chat)
  assert [one.text[a:b] for a, b in one.spans] == ["A:one;", "A:two;"]


@pytest.mark.parametrize("kept", ["all", "last"])
def test_blocks_of_earlier_turns_are_not_those_of_a_turn(kept):
  """Of a template that drops the thoughts, or the blocks, of all turns but the last."""
  text = (
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'assistant' %}"
    "{% set ns.last = loop.index %}{% endfor %}{% set n = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set n.i = n.i + 1 %}"
    "{% set c = m.content if n.i == ns.last else m.content.split('</think>')[-1] %}"
    "{% if KEPT %}{% generation %}{{ c }};{% endgeneration %}"
    "{% else %}{{ c }};{% endif %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
  ).replace("KEPT", "true" if kept == "all" else "n.i == ns.last")
  chat = [user("q"), assistant("t</think>one"), user("r"), assistant("u</think>two")]
  made = encode.render(ChatTemplate(text), chat)
  spans = [[one.text[a:b] for a, b in one.spans] for one in made]
  assert spans == [["t</think>one;"], ["u</think>two;"]]


THINKING = [
  user("1"), assistant("<think>\nt1\n</think>\n\nA1"), user("2"),
  assistant("A2", reasoning_content="t2"),
]  # fmt: skip
# Opens the thoughts in its prompt, keeps those of the last turn, writes others as empty ones.
NEMOTRON = (
  "{% for m in messages %}{% set c = m.content if m.role == 'user' or '</think>' in m.content else "
  "'<think>' ~ ('\n' ~ m.reasoning_content ~ '\n' if m.reasoning_content) ~ '</think>' ~ "
  "m.content %}"
  "{% if m.role == 'assistant' and not loop.last %}{% set c = '<think></think>' ~ "
  "c.split('</think>')[-1] %}{% endif %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ c ~ '<|im_end|>\n' }}"
  "{% endfor %}{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}"
)
END = "<｜end▁of▁sentence｜>"
SERVED = {
  "deepseek_r1_distill": ("t1\n</think>\n\nA1" + END, "t2\n</think>\n\nA2" + END),
  "qwen3": ("<think>\nt1\n</think>\n\nA1<|im_end|>\n", "<think>\nt2\n</think>\n\nA2<|im_end|>\n"),
  "nemotron": ("t1\n</think>\n\nA1<|im_end|>\n", "t2\n</think>A2<|im_end|>\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_a_turn_with_thoughts_is_trained_as_it_is_served(name):
  """The prompt that a server renders, and what the model writes after it."""
  template = ChatTemplate(NEMOTRON) if name == "nemotron" else _template(name)
  made = encode.render(template, THINKING)
  for one, count, answer in zip(made, (1, 3), SERVED[name], strict=True):
    prompt = template.render(THINKING[:count], add_generation_prompt=True)
    assert one.text == prompt + answer and one.spans == ((len(prompt), len(one.text)),)
    assert one.opening == "" and "t1" not in prompt


def test_a_turn_without_thoughts_is_trained_as_it_is_rendered():
  """Prompts that open thoughts are not the beginning of such a turn; the samples say so."""
  chat = [user("1"), assistant("A1"), user("2"), assistant("A2")]
  for template, turns, opening in (
    (_template("deepseek_r1_distill"), ["A1" + END, "A2" + END], "<think>\n"),
    (ChatTemplate(NEMOTRON), ["</think>A1<|im_end|>\n", "</think>A2<|im_end|>\n"], "\n"),
  ):  # fmt: skip
    (one,) = encode.render(template, chat)
    assert one.text == template.render(chat) and one.opening == opening
    assert [one.text[a:b] for a, b in one.spans] == turns
  # Thoughts without an answer, and an answer that the template writes otherwise.
  cut = _template("deepseek_r1_distill").text.replace(
    "split('</think>')[-1]", "split('</think>')[-1]|upper"
  )
  for text, answer in ((_template("deepseek_r1_distill").text, ""), (cut, "yes")):
    with pytest.raises(UserError, match="first trained token is unknown"):
      encode.render(ChatTemplate(text), [user("1"), assistant(f"<think>\nt\n</think>{answer}")])


CLOSED = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}END{% endfor %}"
CLOSINGS = {
  "ChatML": ("qwen2_5", ["<|im_end|>"]),
  "blocks": ("qwen2_5_training", ["<|im_end|>"]),
  "Llama 3": ("llama3", ["<|eot_id|>"]),
  "Llama 3 blocks": ("llama3_training", ["<|eot_id|>"]),
  "eos": (CLOSED.replace("END", " {{ eos_token }} \n"), ["<|im_end|>"]),
  "two": (CLOSED.replace("END", "{{ '<|eot_id|>' if loop.length > 2 else eos_token }}"),
          ["<|im_end|>", "<|eot_id|>"]),
  "text": (CLOSED.replace("END", ";\n"), []),
}  # fmt: skip


@pytest.mark.parametrize("name, ends", CLOSINGS.values(), ids=CLOSINGS)
def test_the_token_that_closes_trained_turns_is_known(characters, name, ends, tmp_path):
  chats.write(tmp_path / "a.jsonl", 30)  # every third has two turns
  is_text = name.startswith("{")
  prompted = name + "{{ 'a:' if add_generation_prompt }}"
  tokens = GOLDEN["special_tokens"]
  template = ChatTemplate(prompted, tokens) if is_text else _template(name)
  chat = data_config.ChatConfig(template, 8)
  spec = chats.spec(tmp_path / "a.jsonl", tokenizer=characters, chat=chat, seq_len=400)
  index = samples.make_index(spec)
  found, warning = index.ends(characters)
  assert sum(index.closing.values()) == 40
  assert found == [characters.token_id(end) for end in ends]
  if ends:
    assert warning == ""
  else:
    assert "40 of 40 trained turns end in ordinary text, most often in ';'" in warning
  # A turn that is cut has no end.
  shortest, skip = int(index.length.min()), dataclasses.replace(chat, on_untrained="skip")
  short = dataclasses.replace(spec, seq_len=shortest - 1, on_long="truncate", chat=skip)
  cut = samples.make_index(short)
  assert len(cut.length) and not cut.closing


def test_a_token_over_the_end_of_a_trained_span_is_not_trained(tmp_path):
  """A tokenizer that merges an answer's end with what the template writes behind its block."""
  vocabulary = {
    text: i for i, text in enumerate(["<unk>", "q", ":", "yes", "no", "s and", "ye", "."])
  }
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"s and|ye(?=s and)|yes|no|q|:|\."), "isolated"
  )
  made.save(str(tmp_path / "tokenizer.json"))
  text = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}:{% else %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{{ END }}{% endif %}{% endfor %}"
  )
  for end, tokens, trained in ((" and", [1, 2, 6, 5], [6]), (".", [1, 2, 3, 7], [3])):
    template = ChatTemplate(text, {"END": end})
    encoder = encode.Encoder(tokenize.Tokenizer(str(tmp_path), "."), template)
    (sample,) = encoder.samples({"messages": [user("q"), assistant("yes")]})
    assert sample.tokens.tolist() == tokens
    assert sample.tokens[sample.trained].tolist() == trained


@pytest.mark.parametrize("is_in_sequence", [False, True])
def test_spaces_are_trained_where_a_tokenizer_leaves_them_out_of_offsets(tmp_path, is_in_sequence):
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  trims = tokenizers.processors.ByteLevel(trim_offsets=True)
  made.post_processor = tokenizers.processors.Sequence([trims]) if is_in_sequence else trims
  made.add_special_tokens(["<|im_end|>"])
  made.train_from_iterator([], tokenizers.trainers.BpeTrainer(
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=["<|im_end|>"], show_progress=False,
  ))  # fmt: skip
  made.save(str(tmp_path / "tokenizer.json"))
  text = (
    "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}"
  )
  tokenizer = tokenize.Tokenizer(str(tmp_path), "<|im_end|>")
  answer = "return  1\n    x"
  (sample,) = encode.Encoder(tokenizer, ChatTemplate(text)).samples(
    {"messages": [user("q"), assistant(answer)]}
  )
  trained = sample.tokens[sample.trained].tolist()
  assert tokenizer.decode(trained) == answer
  # A token whose space lies before the answer is of the answer, as such a file has offsets.
  made.train_from_iterator(["a yes"] * 9, tokenizers.trainers.BpeTrainer(
    vocab_size=300, special_tokens=["<|im_end|>"], show_progress=False,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  ))  # fmt: skip
  made.save(str(tmp_path / "tokenizer.json"))
  tokenizer = tokenize.Tokenizer(str(tmp_path), "<|im_end|>")
  spaced = ChatTemplate(text.replace("{% gen", " {% gen"))
  (sample,) = encode.Encoder(tokenizer, spaced).samples({"messages": [user("q"), assistant("yes")]})
  assert tokenizer.decode(sample.tokens[sample.trained].tolist()) == " yes"
  # Earlier runs left spaces untrained: other samples, of the same tokens.
  chat = types.SimpleNamespace(fingerprint=lambda: "chat")
  of = dict.fromkeys(("seq_len", "heldout", "cross_document", "seed", "on_malformed", "on_long",
                      "shuffle_windows"), 0) | {"sources": {}, "chat": chat}  # fmt: skip
  made = {
    loader.fingerprint(types.SimpleNamespace(
      **of, tokenizer=types.SimpleNamespace(fingerprint="", trims_offsets=trims)
    ))
    for trims in (tokenizer.trims_offsets, False)
  }  # fmt: skip
  assert len(made) == 2


def test_turns_of_weight_0_and_what_follows_the_last_turn_are_not_trained():
  chat = [user("a"), assistant("no", weight=0), user("b"), assistant("yes"), user("c")]
  for name in ("qwen2_5", "qwen2_5_training"):
    (one,) = encode.render(_template(name), chat)
    assert [one.text[a:b].strip("\n") for a, b in one.spans] == ["yes<|im_end|>"]
    assert one.text.endswith("yes<|im_end|>\n")
  (none,) = encode.render(_template("qwen2_5"), [user("only a question")])
  assert none.spans == ()


def test_tokens_of_a_real_tokenizer_are_cut_as_in_the_whole_text():
  """Byte-level BPE: a character of several tokens, a decomposed one, merged line breaks."""
  folder = pathlib.Path(__file__).resolve().parents[2] / "assets/smollm2-135m"
  if not (folder / "tokenizer.json").exists():
    pytest.skip("make run fetches the tokenizer")
  tokenizer = tokenize.Tokenizer(str(folder))
  chat = [user("Ü 👩‍🚀\n\n"), assistant("\n\nDé́jà 👋🏽 vu"), user("?"), assistant("ok")]
  (sample,) = encode.Encoder(tokenizer, ChatTemplate.load(str(folder))).samples({"messages": chat})
  # Special tokens cut the text: pieces between them are tokenized alone, and masks laid by hand.
  pieces = [
    ("<|im_start|>", 0), ("system\nYou are a helpful AI assistant named SmolLM, trained by "
    "Hugging Face", 0), ("<|im_end|>", 0), ("\n", 0),
    ("<|im_start|>", 0), ("user\nÜ 👩‍🚀\n\n", 0), ("<|im_end|>", 0), ("\n", 0),
    ("<|im_start|>", 0), ("assistant\n\n\nDé́jà 👋🏽 vu", 1), ("<|im_end|>", 1), ("\n", 1),
    ("<|im_start|>", 0), ("user\n?", 0), ("<|im_end|>", 0), ("\n", 0),
    ("<|im_start|>", 0), ("assistant\nok", 1), ("<|im_end|>", 1), ("\n", 1),
  ]  # fmt: skip
  ids, trained = [], []
  for text, is_trained in pieces:
    own = tokenizer.encode(text)[:-1].tolist()
    # "ass", "istant" and line breaks, which merge to one token, are the header of the turn.
    header = 3 if text.startswith("assistant") else 0
    ids += own
    trained += [False] * header + [bool(is_trained)] * (len(own) - header)
  np.testing.assert_array_equal(sample.tokens, ids)
  np.testing.assert_array_equal(sample.trained, trained)


def test_bytes_of_the_built_in_tokenizer_have_the_offsets_of_their_characters():
  template = ChatTemplate("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
                          "{{ 'a:' if add_generation_prompt }}")  # fmt: skip
  encoder = encode.Encoder(tokenize.Tokenizer("bytes"), template)
  (sample,) = encoder.samples({"messages": [user("é"), assistant("ü!")]})
  assert bytes(sample.tokens.tolist()).decode() == "u:é;a:ü!;"
  assert sample.trained.tolist() == [False] * 7 + [True] * 4
  # Nothing comes before the first token, so that nothing predicts it.
  first = encoder.encode(encode.Rendered("abc", ((0, 3),)))
  assert first.trained.tolist() == [False, True, True]


def test_template_that_hides_where_a_turn_begins_is_refused():
  text = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'Answer:' if add_generation_prompt }}"
  )
  with pytest.raises(UserError, match="{% generation %}"):
    encode.render(ChatTemplate(text), [user("x"), assistant("y")])


# --- formats -------------------------------------------------------------------------------------

WANT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ROWS = {
  "OpenAI": ("messages", {"messages": WANT}),
  "OpenAI parts": (
    "messages",
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, WANT[1]]},
  ),
  "Parquet nulls": (
    "messages",
    {"messages": [{**m, "tool_calls": None, "name": None} for m in WANT], "tools": None},
  ),
  "JSON in a column": ("messages", {"messages": json.dumps(WANT)}),
  "ShareGPT": (
    "sharegpt",
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
  ),
  "texts": ("prompt", {"prompt": "q", "completion": "a"}),
  "lists": ("prompt", {"prompt": WANT[:1], "completion": WANT[1:]}),
}


@pytest.mark.parametrize("format, row", ROWS.values(), ids=ROWS)
def test_formats_give_the_same_conversation(format, row):
  record = conversation.read(row, format, conversation.FIELDS[format], "here")
  assert record["messages"] == WANT and record["tools"] is None and record["origin"] == "here"


TOOLS, CALLS = '[\n{"name": "f"}]', [{"name": "f", "arguments": {}}]


def test_conversations_keep_their_system_text_tools_and_thoughts():
  row = {"conversations": [{"from": "human", "value": "q"}], "system": "s", "tools": TOOLS}
  record = conversation.read(row, "sharegpt", "conversations", "")
  assert record["messages"][0] == {"role": "system", "content": "s"}
  assert record["tools"] == [{"name": "f"}]
  row = {"m": [WANT[0], {**WANT[1], "reasoning": "r"}]}
  (_, turn) = conversation.read(row, "messages", "m", "")["messages"]
  assert turn["reasoning_content"] == "r"


def test_malformed_rows_are_named():
  def error(row, format="messages"):
    return conversation.read(row, format, conversation.FIELDS[format], "")["error"]

  assert "missing field 'messages' (has 'text')" in error({"text": "x"})
  assert "no list of messages" in error({"messages": "x"})
  assert "missing field 'completion'" in error({"prompt": "x"}, "prompt")
  assert "answers nothing" in error({"messages": [assistant("hello")]})
  # An empty tool-calling turn is no empty answer.
  call = {"messages": [user("q"), assistant("", tool_calls=CALLS)]}
  assert "error" not in conversation.read(call, "messages", "messages", "")


def test_completion_that_is_json_is_text_unless_it_is_messages():
  fields = conversation.FIELDS["prompt"]
  exchange = '[{"from": "EUR", "to": "USD", "value": "3"}]'
  for text in ('[{"name": "Bob"}]', '[{"role": "admin"}, 3]', "[{", "[{}] is empty", exchange):
    row = {"prompt": "as JSON?", "completion": text}
    (_, turn) = conversation.read(row, "prompt", fields, "")["messages"]
    assert turn == assistant(text)
  row = {"prompt": "q", "completion": json.dumps([assistant("a", tool_calls=CALLS)])}
  (_, turn) = conversation.read(row, "prompt", fields, "")["messages"]
  assert turn["content"] == "a"
