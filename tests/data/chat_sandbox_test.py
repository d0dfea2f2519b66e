"""Templates of a tokenizer's folder, chosen as transformers chooses; the sandbox and its bounds."""

import json
import pickle
import time
import tracemalloc

import pytest
from chats import GOLDEN, user

from fp8jax.data.chat import sandbox
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.errors import UserError


def test_sandbox_refuses_to_reach_or_change_what_it_is_given():
  for text in (
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ dict.mro() }}",
  ):
    with pytest.raises(UserError, match="refuses the conversation"):
      ChatTemplate(text).render([user("x")])


def test_blocks_are_trimmed_and_loops_controlled():
  text = "{% for m in messages %}\n  {% if loop.index0 == 1 %}\n  {% break %}\n  {% endif %}\n-\n"
  assert ChatTemplate(text + "{% endfor %}\nend").render([user("x")] * 3) == "-\nend"


@pytest.mark.parametrize("name", GOLDEN["folders"])
def test_folders_give_the_template_and_special_tokens_that_transformers_gives(name, tmp_path):
  golden = GOLDEN["folders"][name]
  for file, value in golden["files"].items():
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
  if golden["plain"].startswith("error"):  # of rows without tools; here at the start
    with pytest.raises(UserError, match="chat templates 'tool_use' and none named 'default'"):
      ChatTemplate.load(str(tmp_path))
    return
  template = pickle.loads(pickle.dumps(ChatTemplate.load(str(tmp_path))))
  assert template.render([user("x")]) == golden["plain"]
  assert template.render([user("x")], tools=[{}]) == golden["tools"]
  assert ("tool_use" in template.origin) == golden["tools"].startswith("TOOLS")
  assert ("files hide another" in template.origin) == (name == "file before list")


EMPTY = "is empty; set data.chat_template"
BAD_FILES = {
  "no template": ({}, "", "no chat template.*set data.chat_template"),
  "empty file": ({"chat_template.jinja": b" \n"}, "", EMPTY),
  "empty key": ({"tokenizer_config.json": b'{"chat_template": ""}'}, "", EMPTY),
  "a number": ({"tokenizer_config.json": b'{"chat_template": 3}'}, "", "of type int"),
  "binary": ({"chat_template.jinja": b"a\n\xff\x00"}, "", "jinja, line 2: bad UTF-8 at byte 0"),
  "no jinja": ({"chat_template.jinja": b"{% if %}"}, "", "no jinja: line 1"),
  "reads nothing": ({"chat_template.jinja": b"{{ bos_token }}"}, "", "reads no `messages`"),
  "deep": ({"chat_template.jinja": b"{% if 1 %}" * 3000}, "", "too deeply"),
  "token": ({"tokenizer_config.json": b'{"bos_token": {}}', "chat_template.jinja": b"{{messages}}"},
            "", "bos_token is {}, which has no 'content'"),
  "named folder": ({"x/t.jinja": b""}, "x", "data.chat_template='.*x' is a folder"),
  "named, missing": ({}, "x", "data.chat_template='.*x' does not exist"),
  "named, empty": ({"x": b""}, "x", EMPTY),
}  # fmt: skip


@pytest.mark.parametrize("files, named, problem", BAD_FILES.values(), ids=BAD_FILES)
def test_templates_that_are_none_say_their_cause(files, named, problem, tmp_path):
  for file, value in files.items():
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(value)
  with pytest.raises((UserError, FileNotFoundError), match=problem):
    ChatTemplate.load(str(tmp_path), str(tmp_path / named) if named else "")


def test_a_named_file_hides_the_folders_templates(tmp_path):
  (tmp_path / "chat_template.jinja").write_text("f{{ messages }}")
  (tmp_path / "own.jinja").write_text("own{{ messages[1:] }}")
  own = ChatTemplate.load(str(tmp_path / "chat_template.jinja"), str(tmp_path / "own.jinja"))
  assert own.render([user("x")], tools=[{}]) == "own[]" and own.origin == ""


LOOP = "{% for i in range(99999) %}"
DOUBLED = (
  "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x WITH n.x %}{% endfor %}"
)
UNBOUNDED = {
  "two ranges": LOOP + LOOP + "{% endfor %}{% endfor %}",
  "recursive loop": (
    "{% for a in range(99) recursive %}{{ loop(range(99)) if loop.depth < 9 }}{% endfor %}"
  ),
  "macro": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(99) }}",
  "large values": "{% set b = 'a' * 2000000 %}" + LOOP + "{% set x = b | upper %}{% endfor %}",
  "2 GB": "{{ 'a' * 2000000000 }}",
  "a power": "{{ 9 ** (9 ** 9) }}",
  "output": LOOP + "{{ 'a' * 1000 }}{% endfor %}",
  "doubled by ~": DOUBLED.replace("WITH", "~"),
  "doubled by +": DOUBLED.replace("WITH", "+"),
  "squared": DOUBLED.replace("WITH", "*").replace("'ab'", "9"),
}  # fmt: skip


@pytest.mark.parametrize("text", UNBOUNDED.values(), ids=UNBOUNDED)
def test_text_and_work_of_a_template_are_bounded(text, monkeypatch):
  monkeypatch.setattr(sandbox, "MOST_STEPS", 2**16)
  start = time.process_time()
  with pytest.raises(UserError, match="a text of more than 4,194,304 char|more than 65,536 steps"):
    ChatTemplate(text).render([user("x")])
  assert time.process_time() - start < 5


def test_counted_loops_know_their_length_and_neighbours():
  text = (
    "{% for m in messages %}{{ loop.length }}{{ loop.revindex }}{{ loop.last }}"
    "{{ loop.nextitem is defined }}"
    "{% else %}none{% endfor %}{% for k, v in messages[0].items() if v == 'x' %}{{ k }}{% endfor %}"
  )
  assert ChatTemplate(text).render([user("x"), user("y")]) == "22FalseTrue21TrueFalsecontent"


@pytest.mark.parametrize("text", [
  "{{ '%300000000d' % 1 }}", "{{ '%*d' % (300000000, 1) }}", "{{ '%300000000d'|format(1) }}",
  "{{ 'a'|center(300000000) }}", "{{ 'a'.center(300000000) }}", "{{ 'a'.zfill(300000000) }}",
  "{{ 'a'.ljust(width=300000000) if false else 'a'.rjust(300000000) }}",
  "{{ '{:300000000}'.format(1) }}", "{{ '{:*>300000000d}'.format(1) }}",
  "{{ '%.300000000f' % 1.5 }}", "{{ 'a\nb'|indent(300000000) }}",
])  # fmt: skip
def test_a_width_is_refused_before_the_text_is_made(text):
  tracemalloc.start()
  try:
    with pytest.raises(UserError, match="makes a text of more than 4,194,304 characters"):
      ChatTemplate(text).render([user("x")])
    assert tracemalloc.get_traced_memory()[1] < 2**26  # the text has 300 million characters
  finally:
    tracemalloc.stop()


def test_widths_that_templates_use_are_kept():
  text = "{{ '%5.2f' % 1.5 }}|{{ 'a'|center(5) }}|{{ 1700000000 }}|{{ '{:>3}'.format(7) }}|"
  text += "{{ 'a'.replace('a', 'b', 1) }}|{{ '%s is %d %%' % ('x', 1700000000) }}"
  assert ChatTemplate(text + "{{ messages|length }}").render([user("x")]) == (
    " 1.50|  a  |1700000000|  7|b|x is 1700000000 %1"
  )
