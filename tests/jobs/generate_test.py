"""--job=generate: prompts in, completions out, in order; all errors of its section at once."""

import io
import json
import pathlib
import re
import shutil

import chats
import pytest

from configs import base
from fp8jax.config import resolve
from fp8jax.errors import ConfigError, UserError
from fp8jax.generation.completion import Completion
from fp8jax.jobs import dispatch, generate, table
from fp8jax.kernels.choose import Device
from fp8jax.run import restore


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return chats.write_model(tmp_path_factory.mktemp("model"), num_layers=2, max_positions=512)


def _config(folder, **changes):
  c = base.get_config("tensor_current")
  c.weights.hf, c.generate.max_new_tokens, c.generate.slots = str(folder), 6, 2
  c.mesh.fsdp = 1
  c.update_from_flattened_dict({f"generate.{k}": v for k, v in changes.items()})
  return c


def test_prompts_of_a_file_are_completed_to_standard_output_and_to_json_lines(
  folder, tmp_path, capsys
):
  chat, out = "<user>the fox</s><assistant>", tmp_path / "out.jsonl"
  texts = ["the fox", "quick quick", chat]
  # The best token, by a draw among one.
  drawn = dict(temperature=1.0, top_k=1, num_samples=2)
  (tmp_path / "p.txt").write_text("\n\n".join(texts) + "\n")
  c = _config(folder, prompts=str(tmp_path / "p.txt"), **drawn)
  assert dispatch.run("generate", c, base.get_config(), "x.py", "") == 0
  stdout, stderr = capsys.readouterr()
  report = json.loads(stderr[stderr.index("{\n") :])
  assert (report["prompts"], report["completions"]) == (3, 6)
  assert report["tokens_per_second"] > 0 and report["tokens"] <= 36

  records = [{"prompt": text, "id": i} for i, text in enumerate(texts)]
  records.append({"messages": [{"role": "user", "content": "the fox"}]})
  (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
  c = _config(folder, prompts=str(tmp_path / "p.jsonl"), out=str(out), **drawn)
  assert dispatch.run("generate", c, base.get_config(), "x.py", "") == 0
  rows = [json.loads(line) for line in out.read_text().splitlines()]
  assert sorted((r["index"], r["sample"]) for r in rows) == [
    (i, n) for i in range(4) for n in (0, 1)
  ]
  rows = {(r["index"], r["sample"]): r for r in rows}
  assert rows[1, 0]["id"] == 1 and rows[3, 0]["messages"] == records[3]["messages"]
  assert rows[3, 0]["tokens"] == rows[2, 0]["tokens"]  # by the template, and written out
  shown = "\n---\n".join(texts[i] + rows[i, n]["text"] for i in range(3) for n in (0, 1))
  assert stdout == shown + "\n"
  capsys.readouterr()
  assert dispatch.run("generate", c, base.get_config(), "x.py", "") == 1
  assert "exists; move it away" in capsys.readouterr().err
  (tmp_path / "p.jsonl").write_text(
    '{"prompt": "a"}\n{"prompt": "b", "text": "gold", "index": 7}\n'
  )
  c.generate.prompts, c.generate.out = str(tmp_path / "p.jsonl"), str(tmp_path / "other.jsonl")
  assert dispatch.run("generate", c, base.get_config(), "x.py", "") == 1
  assert "the fields index, text are those of completions" in capsys.readouterr().err


def test_equal_greedy_samples_are_all_written_and_drawn_once(folder, tmp_path, capsys):
  out = tmp_path / "out.jsonl"
  (tmp_path / "p.txt").write_text("the fox\n\nquick\n")
  c = _config(folder, prompts=str(tmp_path / "p.txt"), out=str(out), num_samples=3)
  assert dispatch.run("generate", c, base.get_config(), "x.py", "") == 0
  report = json.loads(capsys.readouterr().out)
  rows = [json.loads(line) for line in out.read_text().splitlines()]
  rows = {(row["index"], row["sample"]): row["tokens"] for row in rows}
  assert rows == {(i, n): rows[i, 0] for i in range(2) for n in range(3)}
  assert report["completions"] == sum(report["finish_reasons"].values()) == 6
  assert report["tokens"] == len(rows[0, 0]) + len(rows[1, 0])


@pytest.mark.parametrize("name, is_said", [
  ("same", False), ("its file", False), ("two ids swapped", True), ("own end of documents", False),
  ("no end of its own", False),
  ("bytes", True), ("no tokenizer in the folder", False),
])  # fmt: skip
def test_tokens_of_another_tokenizer_than_the_weights_are_said(
  folder, name, is_said, tmp_path, capsys
):
  weights = pathlib.Path(shutil.copytree(folder, tmp_path / "weights"))
  theirs = pathlib.Path(shutil.copytree(folder, tmp_path / "theirs"))
  if name == "two ids swapped":
    read = json.loads((theirs / "tokenizer.json").read_text())
    ids = read["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (theirs / "tokenizer.json").write_text(json.dumps(read))
  if name == "no end of its own":
    (weights / "tokenizer_config.json").write_text("{}")
  if name == "no tokenizer in the folder":
    (weights / "tokenizer.json").unlink()
  c = _config(weights)
  path = theirs / "tokenizer.json" if name == "its file" else theirs
  c.data.tokenizer = "bytes" if name == "bytes" else str(path)
  c.data.eos = {"own end of documents": "a", "its file": "</s>"}.get(name, "")
  restore.load_weights(resolve.resolve(c, 1, Device("cpu"), needs=table.JOBS["export"].needs), "")
  said = " ".join(capsys.readouterr().err.split())
  assert is_said == (f"note: texts are in tokens of data.tokenizer={c.data.tokenizer!r}" in said)
  assert is_said == (f"--config.data.tokenizer={weights} takes it" in said)


def test_damaged_weights_end_their_completions_and_the_job_says_so(
  folder, tmp_path, capsys, monkeypatch
):
  """All completions are written; the exit code is that of a loss that is not finite."""
  chats.damage(monkeypatch, folder, "quick")
  (tmp_path / "p.txt").write_text("quick fox\nthe fox\n")
  out = tmp_path / "out.jsonl"
  c = _config(folder, prompts=str(tmp_path / "p.txt"), out=str(out), precision="bf16")
  assert dispatch.run("generate", c, base.get_config(), "x.py", "") == 3
  stdout, stderr = capsys.readouterr()
  assert json.loads(stdout[stdout.index("{\n") :])["finish_reasons"] == {"error": 1, "length": 1}
  assert re.search("error: 1 of 2 completions ended early: prompt 0 .*'quick fox'", stderr)
  rows = {r["index"]: r for r in map(json.loads, out.read_text().splitlines())}
  assert rows[0]["finish_reason"] == "error" and not rows[0]["tokens"]
  assert len(rows[1]["tokens"]) == 6


def _read(tmp_path, text, name="p.jsonl"):
  path = tmp_path / name
  path.write_text(text)
  return generate.read_prompts(str(path))


def test_a_line_of_prompts_that_is_none_is_named(tmp_path):
  assert generate.read_prompts("", io.StringIO("a\n\n b\n")) == [{"prompt": "a"}, {"prompt": " b"}]
  assert _read(tmp_path, "{not json}\n", "p.txt") == [{"prompt": "{not json}"}]
  good = '{"prompt": "a"}\n\n'
  for line, message in (
    ("{", "p.jsonl, line 3 is not JSON"),
    ("[]", "line 3 is not JSON of one object: it begins a JSON array"),
    ("{}", "line 3 must be an object with either 'prompt' or 'messages'"),
    ('{"prompt": "a", "messages": []}', "line 3 must be an object with either"),
    ('{"prompt": ""}', "line 3: prompt is '', expected a text"),
    ('{"messages": "hi"}', "line 3: field 'messages' is no list of messages"),
  ):
    with pytest.raises(UserError, match=message):
      _read(tmp_path, good + line)
  with pytest.raises(UserError, match="has no prompt"):
    _read(tmp_path, "\n")


def test_streamed_completions_come_in_order_and_the_first_as_it_grows():
  out = io.StringIO()
  stream = generate.Stream(out, ["A:", "B:"], 2, 2)
  done = Completion((1,), "", "length")
  seen = []
  for index, number, piece, completion in (
    (0, 1, "x", None), (0, 0, "p", None), (1, 0, "r", done), (0, 0, "q", done), (0, 1, "y", done),
    (1, 1, "s", None),
  ):  # fmt: skip
    stream.add(index, number, piece, completion)
    seen.append(out.getvalue())
  assert seen[:3] == ["A:", "A:p", "A:p"]
  assert seen[3] == "A:pq\n---\nA:x"
  assert seen[5] == "A:pq\n---\nA:xy\n---\nB:r\n---\nB:s"


class _Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize(
  "out, shown", [(_Terminal(), "\\x1b[2J:\\x1b]0;q\n"), (io.StringIO(), "\x1b[2J:\x1b]0;q\n")]
)
def test_a_terminal_shows_control_characters_and_a_file_keeps_them(out, shown):
  stream = generate.Stream(out, ["\x1b[2J:"], 1, 1)
  stream.add(0, 0, "\x1b]0;q", Completion((1,), "", "length"))
  assert out.getvalue() == shown


def test_prompts_of_standard_input_are_text():
  stdin = io.TextIOWrapper(io.BytesIO(b"a\n\xff\n"), "utf-8")
  with pytest.raises(UserError, match="standard input, line 2: bad UTF-8 at byte 0"):
    generate.read_prompts("", stdin)


def test_all_that_is_wrong_with_the_section_is_said_at_once(tmp_path):
  c = base.get_config()
  (tmp_path / "out").write_text("")
  c.generate.update(
    dict(temperature=-0.5, top_p=1.5, top_k=-2, max_new_tokens=0, seed=-1, slots=0, num_samples=0,
         max_length=-1, precision="fp8", cache_format="bf16", prompts=str(tmp_path / "none"),
         out=str(tmp_path / "out"), stop=("",))
  )  # fmt: skip
  with pytest.raises(ConfigError) as error:
    resolve.resolve(c, 1, Device("cpu"), needs=table.JOBS["generate"].needs)
  for key in ("temperature=-0.5 must", "top_p=1.5 must", "top_k=-2 must", "max_new_tokens=0 must",
              "seed=-1 must", "slots=0 must", "num_samples=0 must", "max_length=-1 must",
              "precision='fp8' is not", "cache_format='bf16' is not", "prompts='", "out='",
              "stop=('',) must"):  # fmt: skip
    assert f"generate.{key}" in str(error.value), key


def test_a_prompt_that_is_a_chat_needs_a_template(folder, tmp_path, capsys):
  (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
  c = base.get_config()
  c.generate.prompts, c.generate.precision = str(tmp_path / "p.jsonl"), "bf16"
  c.model.num_layers, c.weights.hf = None, str(folder)
  (folder / "tokenizer_config.json").rename(tmp_path / "kept.json")
  (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
  try:
    assert dispatch.run("generate", c, base.get_config(), "x.py", "") == 1
  finally:
    (tmp_path / "kept.json").rename(folder / "tokenizer_config.json")
  assert "has no chat template" in capsys.readouterr().err
