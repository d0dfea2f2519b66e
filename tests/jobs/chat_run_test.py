"""Training on conversations: epochs, interruption, and stages that start from others' weights."""

import dataclasses
import json
import shutil

import case_inputs
import chats
import harness
import jax
import numpy as np
import pytest

from configs import base
from fp8jax.config import resolve
from fp8jax.data import batch_sharding, tokenize
from fp8jax.data.chat import template
from fp8jax.errors import ConfigError
from fp8jax.export import build
from fp8jax.generation import api
from fp8jax.generation.settings import Generate
from fp8jax.jobs import generator, start, table, train
from fp8jax.kernels import choose
from fp8jax.run import preemption


def _config(folder, recipe="block_128", **changes):
  """40 conversations in bytes, 8 a step: two epochs are 10 steps."""
  c = harness.text_config(recipe)
  c.data.sources = {"main": base.source("jsonl", str(folder / "a.jsonl"), chat="messages")}
  c.update_from_flattened_dict({
    "data.chat_template": str(folder / "template.jinja"), "data.tokenizer": "bytes",
    "data.on_long": "error", "data.samples_per_step": 8, "data.epochs": 1.0, "global_batch": 6,
    "data.heldout_fraction": 0.0, "eval.tokens": 0, "optim.schedule": "cosine",
    "optim.warmup_fraction": 0.25, "optim.peak_lr": 3e-3, "model.num_layers": 1, **changes,
  })  # fmt: skip
  return c


def _spec(*args, **changes):
  needs = table.JOBS["train"].needs
  needs = dataclasses.replace(needs, sections=(Generate,))
  return resolve.resolve(_config(*args, **changes), 1, choose.current_device(), needs=needs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("chats")
  chats.write(path / "a.jsonl", 40)
  (path / "template.jinja").write_text(chats.TEMPLATE)
  return path


def _stop(after):
  """Interrupts runs after so many steps, until undone."""
  patch = pytest.MonkeyPatch()
  patch.setattr(preemption.Interrupts, "requested", lambda _, step: step >= after)
  return patch


def test_epochs_are_steps_and_a_stage_starts_from_weights_alone(folder, tmp_path, capsys):
  spec = _spec(folder, "bf16")
  assert spec.steps == 5 and spec.optim.steps == 5 and spec.optim.warmup_steps == 1
  summary = train.run(spec, str(tmp_path / "first"))
  assert summary["step"] == 5 and summary["evaluations"] == {}
  said = " ".join(capsys.readouterr().out.split())
  assert "40 samples of" in said and "5 steps of 8 samples, 1.00 epochs" in said
  assert train.run(spec, str(tmp_path / "first")) == json.loads(json.dumps(summary))
  assert "first is finished: step 5" in " ".join(capsys.readouterr().out.split())
  first = harness.saved_state(tmp_path / "first", spec, 5)
  assert any(np.any(x) for x in jax.tree.leaves(first.opt))
  # Another recipe, schedule and length, stopped before its first step.
  other = {"init.workdir": str(tmp_path / "first"), "init.weights_only": True, "seq_len": 80}
  spec = _spec(folder, "tensor_delayed", **other)
  patch = _stop(0)
  assert train.run(spec, str(tmp_path / "second"))["step"] == 0
  patch.undo()
  state = harness.saved_state(tmp_path / "second", spec, 0)
  harness.assert_trees_equal(state.params, first.params)
  assert state.step == 0 and not any(np.any(x) for x in jax.tree.leaves(state.opt))
  assert "starting from the weights of step 5" in capsys.readouterr().out


@pytest.mark.slow
def test_stage_is_the_same_interrupted_and_chooses_its_own_scales(folder, tmp_path):
  train.run(_spec(folder), str(tmp_path / "first"))
  other = {"init.workdir": str(tmp_path / "first"), "init.weights_only": True}
  spec = _spec(folder, "tensor_delayed", **other)
  train.run(spec, str(tmp_path / "whole"))
  patch = _stop(2)
  assert train.run(spec, str(tmp_path / "parts"))["step"] == 2
  patch.undo()
  train.run(spec, str(tmp_path / "parts"))
  whole, parts = (harness.saved_state(tmp_path / name, spec, 5) for name in ("whole", "parts"))
  harness.assert_trees_equal(whole, parts)
  histories = [s.history_3H for s in whole.scaling_states.values()]
  assert histories and all(np.count_nonzero(h, axis=-1).max() == 6 for h in histories)  # and a look


def test_stage_without_a_checkpoint_or_of_another_model_is_refused(folder, tmp_path):
  with pytest.raises(ConfigError, match="init.weights_only=True without init.workdir"):
    _spec(folder, **{"init.weights_only": True})
  with pytest.raises(ConfigError, match="init.step=3 without init.workdir: training would start"):
    _spec(folder, **{"init.step": 3})
  with pytest.raises(ConfigError, match="init.requantize=True without init.hf"):
    harness.text_spec("bf16", **{"init.requantize": True})
  with pytest.raises(ConfigError, match="weights.step=3 with weights.hf='x', a folder without"):
    harness.text_spec("bf16", job="evaluate", **{"weights.hf": "x", "weights.step": 3})
  first = {"init.workdir": str(tmp_path / "first"), "init.weights_only": True}
  with pytest.raises(FileNotFoundError, match="holds no checkpoint; train that run first"):
    train.run(_spec(folder, **first), str(tmp_path / "second"))
  patch = _stop(0)
  train.run(_spec(folder), str(tmp_path / "first"))
  patch.undo()
  other = _spec(folder, **first, **{"model.num_layers": 2})
  with pytest.raises(ConfigError, match="holds another model: model.num_layers is 2 here and 1"):
    train.run(other, str(tmp_path / "second"))
  with pytest.raises(FileNotFoundError, match="no checkpoint of step 7; there are"):
    train.run(_spec(folder, **first, **{"init.step": 7}), str(tmp_path / "second"))


def test_epochs_are_none_of_a_run_that_learns_from_its_own_completions(folder):
  """They would count conversations that nothing trains on."""
  with pytest.raises(ConfigError, match="data.epochs=1.0 with --job=rl, which does not train on"):
    resolve.resolve(_config(folder), 1, choose.current_device(), needs=table.JOBS["rl"].needs)


def _take(spec, other, workdir):
  """As a run does that begins with another's weights."""
  ends = batch_sharding.TrainBatches(spec.data, spec.run.layout, 1, 1).ends()
  start.take_source(spec, str(other), str(workdir), ends)


def test_a_stage_keeps_its_own_tokenizer_template_and_end_of_turn(folder, tmp_path):
  """A base model's files, and the tokenizer of its instruction-tuned version."""
  base_files, tuned = tmp_path / "base", chats.write_model(tmp_path / "tuned", 1, 64)
  source = base_files / "hf_source"
  source.mkdir(parents=True)
  for name, value in (("tokenizer.json", {}), ("special_tokens_map.json", {}),
                      ("config.json", {"eos_token_id": 7}),
                      ("generation_config.json", {"eos_token_id": 5, "top_p": 0.5})):  # fmt: skip
    (source / name).write_text(json.dumps(value))
  spec = _spec(folder, "bf16", **{"data.tokenizer": str(tuned)})
  kept = tmp_path / "run" / "hf_source"
  _take(spec, base_files, tmp_path / "run")
  tokenizer = tokenize.Tokenizer(str(tuned))
  assert (kept / "tokenizer.json").read_bytes() == (tuned / "tokenizer.json").read_bytes()
  assert not (kept / "special_tokens_map.json").exists()
  assert (kept / "chat_template.jinja").read_text() == chats.TEMPLATE
  assert sorted(api.end_ids(str(kept), tokenizer)) == sorted([5, tokenizer.eos_id])
  settings = json.loads((kept / "generation_config.json").read_text())
  assert settings["top_p"] == 0.5 and settings["eos_token_id"][0] == tokenizer.eos_id
  # The same tokenizer, and no folder of one: the model's files stay.
  again = tmp_path / "again"
  _take(spec, tmp_path / "run", again)
  assert (again / "hf_source/generation_config.json").read_text() == (
    kept / "generation_config.json"
  ).read_text()
  # A tokenizer.json by its name, of a folder that names no end; data.eos does.
  settings = json.loads((tuned / "tokenizer_config.json").read_text())
  del settings["eos_token"]
  (tuned / "tokenizer_config.json").write_text(json.dumps(settings))
  named = {"data.tokenizer": str(tuned / "tokenizer.json"), "data.eos": "</s>"}
  _take(_spec(folder, "bf16", **named), base_files, tmp_path / "named")
  found = api.end_ids(str(tmp_path / "named/hf_source"), tokenizer)
  assert sorted(found) == sorted([5, tokenizer.eos_id])
  _take(_spec(folder, "bf16"), base_files, tmp_path / "bytes")
  assert (tmp_path / "bytes/hf_source/tokenizer.json").read_text() == "{}"


def test_a_run_without_hugging_face_files_keeps_the_end_of_its_turns(folder, tmp_path, capsys):
  """Random weights, a tokenizer with its own end, turns that another token closes."""
  tokenizer = case_inputs.tokenizer_folder(tmp_path / "t", eos_token="<|endoftext|>")
  changes = {
    "data.tokenizer": tokenizer,
    "data.chat_template": "",
    "model.vocab_size": 260,
    "seq_len": 96,
  }
  spec = _spec(folder, "bf16", **changes)
  patch = _stop(0)
  train.run(spec, str(tmp_path / "run"))
  patch.undo()
  made, _ = generator.load(spec, str(tmp_path / "run"))
  assert made.end_ids == {2, 0}  # of its turns, and of documents
  # The second stage's weights came without files, too, whether its own data are chats or no.
  stage = {"init.workdir": str(tmp_path / "run"), "init.weights_only": True}
  settings = tmp_path / "run" / "generation_config.json"
  kept = settings.read_text()
  settings.unlink()  # of its own turns alone
  patch = _stop(0)
  train.run(_spec(folder, "bf16", **changes, **stage), str(tmp_path / "next"))
  patch.undo()
  settings.write_text(kept)
  start.take_source(spec, str(tmp_path / "run"), str(tmp_path / "texts"))
  for name in ("next", "texts"):
    kept = json.loads((tmp_path / name / "generation_config.json").read_text())
    assert kept == {"eos_token_id": [2, 0]}
  # Ids of another tokenizer are none of these.
  start.take_source(_spec(folder, "bf16"), str(tmp_path / "run"), str(tmp_path / "bytes"))
  assert not (tmp_path / "bytes/generation_config.json").exists()
  moved = {**changes, "data.tokenizer": str(shutil.move(tokenizer, tmp_path / "moved"))}
  start.take_source(_spec(folder, "bf16", **moved), str(tmp_path / "run"), str(tmp_path / "lost"))
  assert not (tmp_path / "lost/generation_config.json").exists()
  assert "is gone: whether its end tokens are this run's" in capsys.readouterr().err
  # An export has them too, where transformers looks without a generation_config.json.
  assert build.base_of("", str(tmp_path / "next"))["eos_token_id"] == [2, 0]
  assert build.base_of("", str(tmp_path / "t")) is None


def test_templates_of_a_folder_are_kept_as_a_list(folder, tmp_path):
  source = case_inputs.tokenizer_folder(tmp_path / "t")
  more = tmp_path / "t/additional_chat_templates"
  more.mkdir()
  (more / "tool_use.jinja").write_text("T{{ messages }}")
  shutil.copytree(source, tmp_path / "base/hf_source")
  changes = {
    "data.tokenizer": source,
    "data.chat_template": "",
    "model.vocab_size": 260,
    "seq_len": 96,
  }
  _take(_spec(folder, "bf16", **changes), tmp_path / "base", tmp_path / "run")
  kept = template.ChatTemplate.load(str(tmp_path / "run/hf_source"))
  want = template.ChatTemplate.load(source)
  assert (
    (kept.text, kept.tool_use)
    == (want.text, want.tool_use)
    == (case_inputs.CHATML, "T{{ messages }}")
  )
  assert not (tmp_path / "run/hf_source/chat_template.jinja").exists()


REFUSED = {
  "a text": ({"data.on_long": "split"}, "data.on_long='split' says nothing of a conversation"),
  "no number": ({"data.samples_per_step": 0}, "set the samples of an optimizer step"),
  "no template": ({"data.chat_template": ""}, "data.tokenizer='bytes' has no chat template"),
  "no file": ({"data.chat_template": "gone.jinja"}, "data.chat_template='gone.jinja' does not"),
  "mixing": ({"data.cross_document": True}, "which would attend to each other"),
  "weight": ({"data.sources.main.weight": 2.0}, "every sample is read once an epoch"),
  "kind": ({"data.sources.main.kind": "text"}, "has no conversations; use one of jsonl, parquet"),
  "chat": ({"data.sources.main.chat": "mesages"}, "did you mean 'messages'"),
  "share": ({"optim.warmup_fraction": 1.5}, "optim.warmup_fraction=1.5"),
  "columns": (
    {"data.sources.main.chat": "prompt", "data.sources.main.field": "text"},
    "names 1 columns and chat='prompt' reads 2; give e.g. 'prompt,completion'",
  ),
  "late phase": (
    {"precision.schedule": ((5, ((".*", "bf16"),)),)},
    "before the last, steps=5",
  ),  # the steps of an epoch, not the key
  "too few": ({"data.epochs": 0.1}, "data.epochs=0.1 of 40 samples are less than one step"),
  "held out": ({"eval.tokens": 64}, "data.heldout_fraction=0 leaves nothing to evaluate on"),
  "untrained": ({"data.on_untrained": "drop"}, "data.on_untrained='drop' is not one of"),
}


@pytest.mark.parametrize("changes, problem", REFUSED.values(), ids=REFUSED)
def test_configurations_of_conversations_are_refused_with_the_remedy(folder, changes, problem):
  with pytest.raises(ConfigError) as error:
    _spec(folder, **changes)
  assert problem in str(error.value)


def test_epochs_of_documents_and_mixtures_with_documents_are_refused(folder):
  c = harness.text_config()
  c.data.epochs = 2.0
  with pytest.raises(ConfigError, match="documents have steps, set data.epochs=0"):
    resolve.resolve(c, 1, choose.current_device())
  c = _config(folder)
  c.data.sources = {**c.data.sources, "text": base.source("pydoc")}
  with pytest.raises(ConfigError, match="data.sources.text has documents, other sources conv"):
    resolve.resolve(c, 1, choose.current_device())


def test_windows_that_are_too_few_stop_the_run_before_it_compiles(folder, tmp_path):
  spec = _spec(folder, **{"global_batch": 2})
  with pytest.raises(ValueError, match="set global_batch="):
    train.run(spec, str(tmp_path))
