"""Documents begin as the tokenizer begins a prompt (llama-cookbook#648, h2o-llmstudio#636)."""

import hashlib
import json
import pathlib
import pickle

import case_inputs
import numpy as np
import pytest
import rich.console
import tokenizers
from tokenizers import processors

from configs import base
from fp8jax.config import resolve
from fp8jax.data import loader, pretokenize
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import ConfigError
from fp8jax.run import restore

BOS, EOS = 0, 2
TEXTS = ["hi", "<|endoftext|>hi", "", "<|endoftext|>", "a longer <|im_start|>"]


def _folder(path, form="<|endoftext|> $A") -> str:
  folder = case_inputs.tokenizer_folder(path)
  library = tokenizers.Tokenizer.from_file(folder + "/tokenizer.json")
  special = [("<|endoftext|>", BOS), ("<|im_end|>", EOS)]
  library.post_processor = processors.TemplateProcessing(single=form, special_tokens=special)
  library.save(folder + "/tokenizer.json")
  return folder


@pytest.mark.parametrize("form", ["<|endoftext|> $A", "<|endoftext|> $A <|im_end|>"])
def test_document_is_the_prompt_and_one_end(tmp_path, form):
  """The library writes the begin, also before a text that has it, and an end that we do not."""
  ours = Tokenizer(_folder(tmp_path, form))
  library = tokenizers.Tokenizer.from_file(ours.file)
  without = pickle.loads(pickle.dumps(Tokenizer(ours.path, bos="none")))  # as workers receive it
  for text, document in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
    own = library.encode(text, add_special_tokens=False).ids
    want = own if text.startswith("<|endoftext|>") else [BOS, *own]
    assert ours.encode_prompt(text) == want and ours.encode_prompt(text, False) == own
    assert document.tolist() == ours.encode(text).tolist() == [*want, EOS]
    assert without.encode(text).tolist() == [*own, EOS] and without.encode_prompt(text) == own
  assert Tokenizer(ours.path).encode_with_offsets("hi")[0].tolist() == [75, 76]  # of a template


def test_fingerprints_are_the_earlier_ones_where_no_document_changed(tmp_path):
  with_bos, plain = _folder(tmp_path / "a"), case_inputs.tokenizer_folder(tmp_path / "b")

  def earlier(folder):
    content = (pathlib.Path(folder) / "tokenizer.json").read_bytes()
    return hashlib.sha256(content + b"|2").hexdigest()[:16]

  assert Tokenizer(with_bos, bos="none").fingerprint == earlier(with_bos)
  assert Tokenizer(with_bos).fingerprint != earlier(with_bos)
  assert Tokenizer(plain).fingerprint == Tokenizer(plain, bos="none").fingerprint == earlier(plain)


def _config(folder, tmp_path, **changes):
  c = base.get_config()
  c.data.tokenizer, c.data.heldout_fraction, c.seq_len = folder, 0.3, 32
  c.data.shuffle_windows = 8  # the default would read the small file a hundred times
  c.data.sources = {"main": base.source("jsonl", str(tmp_path / "a.jsonl"))}
  c.model.vocab_size = 264
  c.update_from_flattened_dict({k: v for k, v in changes.items()})
  return c


def test_training_held_out_and_prepared_documents_begin_alike(tmp_path):
  folder = _folder(tmp_path / "t")
  rows = [{"text": f"{'word ' * (i % 5)}{i}"} for i in range(40)]
  (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  for bos, begins in (("auto", True), ("none", False)):
    raw = resolve.resolve_data(_config(folder, tmp_path, **{"data.bos": bos}))
    target = str(tmp_path / bos)
    pretokenize.run(raw, target, 10**6, rich.console.Console(quiet=True))
    prepared = {"main.kind": "prepared", "main.path": f"{target}/main"}
    prepared = {f"data.sources.{k}": v for k, v in prepared.items()} | {"data.bos": bos}
    for spec in (raw, resolve.resolve_data(_config(folder, tmp_path, **prepared))):
      train = next(loader.train_batches(spec, 4))
      for batch in (train, *loader.heldout_batches(spec, "main", 2, 1)):
        starts = np.asarray(batch["positions_BL"]) == 0
        starts &= np.asarray(batch["segments_BL"]) > np.asarray(batch["segments_BL"])[:, :1]
        assert starts.sum() > 2 and ((batch["tokens_BL"][starts] == BOS) == begins).all()
    other = {"auto": "none", "none": "auto"}[bos]
    with pytest.raises(ConfigError, match=f"another tokenizer or data.bos.*data.bos='{other}'"):
      resolve.resolve_data(_config(folder, tmp_path, **(prepared | {"data.bos": other})))
  with pytest.raises(ConfigError, match="data.bos='non' is not one of"):
    resolve.resolve_data(_config(folder, tmp_path, **{"data.bos": "non"}))


def test_resuming_with_another_begin_is_refused_where_documents_change(tmp_path):
  folder = _folder(tmp_path / "t")
  (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
  then, now = (
    loader.fingerprint(resolve.resolve_data(_config(folder, tmp_path, **{"data.bos": bos})))
    for bos in ("none", "auto")
  )
  changes = {"data.bos": (None, "auto")}
  meta = {"data_fingerprint": then, "readers": {}}
  restore.check_same_run(changes, meta, 5, then, {}, ())
  with pytest.raises(
    ConfigError, match="the data changed since step 5.*data.bos was None, is auto"
  ):
    restore.check_same_run(changes, meta, 5, now, {}, ())


def test_the_begin_is_found_without_the_letter_a(tmp_path):
  """A vocabulary may lack any one text; without an unknown token it refuses to encode that."""
  folder = pathlib.Path(_folder(tmp_path / "t"))
  state = json.loads((folder / "tokenizer.json").read_text())
  del state["model"]["vocab"]["a"]
  (folder / "tokenizer.json").write_text(json.dumps(state))
  tokenizer = Tokenizer(str(folder))
  document, prompt = tokenizer.encode("hi").tolist(), tokenizer.encode_prompt("hi")
  assert document[: len(prompt)] == prompt and prompt[0] == 0
