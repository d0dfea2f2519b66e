"""--job=evaluate --config.eval.tasks: from a folder to stored verdicts, table and comparison."""

import json
import shutil
import types

import chats
import numpy as np
import pytest

from configs import base
from fp8jax.config import resolve
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import ConfigError
from fp8jax.evaluation import catalog, store, tasks
from fp8jax.jobs import dispatch, evaluate_tasks, table
from fp8jax.kernels.choose import Device


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return chats.write_model(tmp_path_factory.mktemp("model"), num_layers=1, max_positions=256)


def _config(folder, **changes):
  c = base.get_config("tensor_current")
  c.weights.hf, c.eval.tokens, c.generate.slots = str(folder), 0, 4
  c.data.tokenizer, c.mesh.fsdp = str(folder), 1
  c.update_from_flattened_dict({f"eval.{k}": v for k, v in changes.items()})
  return c


def _evaluate(workdir, c):
  return dispatch.run("evaluate", c, base.get_config(), "x.py", str(workdir))


def test_a_folder_is_evaluated_stored_and_compared(folder, tmp_path, capsys):
  questions = [{"question": f"say {i}", "answer": ".", "verifier": "regex"} for i in range(6)]
  (tmp_path / "say.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
  task = {"questions": "say.jsonl", "samples": 2, "temperature": 1.0, "max_new_tokens": 4,
          "system": "One letter.", "prefix": "<think>", "think_end": "q"}  # fmt: skip
  (tmp_path / "letters.json").write_text(json.dumps(task))
  tasks = str(tmp_path / "letters.json")
  assert _evaluate(tmp_path / "a", _config(folder, tasks=tasks, chat=True)) == 0
  out = capsys.readouterr().out
  report = json.loads(out[out.index("{\n") :])
  where = report["evaluation"]
  assert where == f"{tmp_path}/a/evaluation/hf_{folder.name}"
  rows = store.read_rows(f"{where}/letters.jsonl")
  expected = "<system>One letter.</s><user>say 3</s><assistant><think>"
  assert {r["prompt"] for r in rows if r["item"] == "4"} == {expected}
  assert len(rows) == 12 and all(r["tokens"] <= 4 for r in rows)
  for row in rows:  # the thoughts end with q, and the whole final answer is one character
    last = [x for x in row["output"].rpartition("q")[2].splitlines() if x.strip()][-1:]
    assert row["correct"] == (len("".join(last).strip(" *`$").removesuffix(".")) == 1), row
  summary = json.loads(
    (tmp_path / "a" / "evaluation" / f"hf_{folder.name}" / "summary.json").read_text()
  )
  assert summary["tasks"] == report["tasks"]
  assert summary["tasks"]["letters"]["avg"]["estimate"] == pytest.approx(
    np.mean([r["correct"] for r in rows])
  )
  assert summary["provenance"]["config"]["eval.chat"] is True
  assert "letters" in out and "6 x 2" in out

  # The same command finds all answers; another arm is compared with it.
  assert _evaluate(tmp_path / "a", _config(folder, tasks=tasks, chat=True)) == 0
  assert "6 of 6 items are answered" in capsys.readouterr().out
  other = _config(folder, tasks=tasks, chat=True, compare_with=str(tmp_path / "a"))
  other.generate.precision = "bf16"
  assert _evaluate(tmp_path / "b", other) == 0
  out = capsys.readouterr().out
  [comparison] = json.loads(out[out.index("{\n") :])["comparison"].values()
  assert comparison["seeds"] == 1 and comparison["items"] == 6 and comparison["margin"] == 2.0
  assert (tmp_path / "b" / "evaluation" / f"hf_{folder.name}_bf16" / "summary.json").exists()

  assert _evaluate(tmp_path / "a", _config(folder, tasks=tasks)) == 1
  assert "settings.chat (True there, False here)" in capsys.readouterr().err
  smooth = _config(folder, tasks=tasks, chat=True)
  smooth.precision.smooth_swiglu = "token"
  assert _evaluate(tmp_path / "a", smooth) == 1
  assert "settings.precision.smooth_swiglu (" in capsys.readouterr().err
  # Another weight, in the middle of the file: another model of the same name and size.
  path = tmp_path / folder.name
  shutil.copytree(folder, path)
  data = bytearray((path / "model.safetensors").read_bytes())
  data[len(data) // 2 + 1] ^= 1
  (path / "model.safetensors").write_bytes(data)
  assert _evaluate(tmp_path / "a", _config(path, tasks=tasks, chat=True)) == 1
  assert "settings.digest (" in capsys.readouterr().err
  assert _evaluate(tmp_path / "a", _config(folder)) == 1
  assert "leaves nothing to evaluate; set one of them" in capsys.readouterr().err


def test_outputs_of_damaged_weights_are_counted_and_the_job_says_so(
  folder, tmp_path, capsys, monkeypatch
):
  chats.damage(monkeypatch, folder, "quick")
  questions = [
    {"question": q, "answer": ".*", "verifier": "regex"} for q in ("quick", "fox", "the")
  ]
  (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
  c = _config(folder, tasks=f"{tmp_path}/q.jsonl(max_new_tokens=3)")
  c.generate.precision = "bf16"
  assert _evaluate(tmp_path, c) == 3
  stdout, stderr = capsys.readouterr()
  report = json.loads(stdout[stdout.index("{\n") :])
  assert report["tasks"]["q"]["finish_reasons"] == {"error": 1, "length": 2}
  assert (
    "error: 1 outputs ended at logits that are not finite and count as wrong (1 of q)" in stderr
  )


def test_a_missing_verifier_is_told_before_anything_is_generated(
  folder, tmp_path, monkeypatch, capsys
):
  (tmp_path / "q.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
  monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(evaluate_tasks.generator_lib, "load", lambda *_, **__: pytest.fail("loaded"))
  assert _evaluate(tmp_path, _config(folder, tasks=f"{tmp_path}/q.jsonl")) == 1
  assert "math_verify" in capsys.readouterr().err


def test_a_tasks_protocol_asks_by_the_chat_template_whatever_the_setting(folder):
  made = types.SimpleNamespace(tokenizer=Tokenizer(str(folder)))
  spec = resolve.resolve(_config(folder), 1, Device("cpu", 0), needs=table.JOBS["evaluate"].needs)
  item = tasks.Item("1", "hi", "")
  for chat, text in ((True, "<system>s</s><user>hi</s><assistant>"), (False, "s\n\nhi\n")):
    task = tasks.Task("t", (item,), None, "", system="s", chat=chat)
    assert evaluate_tasks.asker(spec, made.tokenizer, chat)(task, item)[0] == text
  # Another task of the same command keeps its plain text.
  plain = tasks.Task("t", (item,), None, "", system="s")
  assert evaluate_tasks.asker(spec, made.tokenizer, True)(plain, item)[0] == "s\n\nhi\n"


def test_all_mistakes_of_tasks_are_reported_at_once():
  c = base.get_config()
  names = "aime24(temperature=-2),nothing.jsonl"
  c.eval.tasks, c.eval.train_data, c.eval.compare_with = names, "none", "nowhere"
  c.eval.seed, c.eval.questions = -1, -3
  with pytest.raises(ConfigError) as e:
    resolve.resolve(c, 1, Device("cpu"), needs=table.JOBS["evaluate"].needs)
  for words in (
    "aime24 needs assets/benchmarks/aime24.jsonl, which does not exist", "nothing.jsonl does not",
    "eval.train_data='none'", "eval.compare_with='nowhere'", "eval.seed=-1", "temperature=-2",
    "eval.questions=-3",
  ):  # fmt: skip
    assert any(words in problem for problem in e.value.problems), (words, e.value.problems)
