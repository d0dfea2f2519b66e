"""--job=prepare: the same files whatever the processes, interruptions and compression."""

import concurrent.futures
import gzip
import io
import json
import os
import resource

import fsspec.implementations.memory
import numpy as np
import pyarrow
import pytest
import rich.console
import texts
import tokenizers

from fp8jax.data import encode, loader, pretokenize, sources, tokenize
from fp8jax.data.pretokenized import Prepared
from fp8jax.errors import UserError

SHARD = 4000  # tokens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """(lines of a .jsonl file with one broken line and blanks at its end, a trained BPE)."""
  folder = tmp_path_factory.mktemp("corpus")
  rng = np.random.default_rng(0)
  words = ["fox", "Jäger", "läuft", "of", "\n\n", "  ", "∑", "🦊", "naïve", "12,345"]
  texts = [" ".join(rng.choice(words, rng.integers(1, 60))) + f" {i}" for i in range(700)]
  lines = [json.dumps({"text": text}) for text in texts]
  lines[300] = "{broken"
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
  bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"])
  bpe.train_from_iterator(texts, trainer)
  bpe.save(str(folder / "tokenizer.json"))
  return "\n".join(lines).encode() + b"\n\n", str(folder / "tokenizer.json")


def _prepare(path, tokenizer, target, processes=1, out=None, **changes):
  """(index of the only source, {name: bytes of its file})."""
  values = {"tokenizer": tokenize.Tokenizer(tokenizer, "<end>"), "heldout": 0.2} | changes
  spec = texts.spec(texts.source("jsonl", path), **{"on_malformed": "skip"} | values)
  index, _ = texts.prepare(spec, target, SHARD, processes, out)
  return index, {p.name: p.read_bytes() for p in (target / "main").iterdir()}


def test_prepared_data_without_documents_of_a_split_say_so(tmp_path, corpus):
  text, tokenizer = corpus
  (tmp_path / "a.jsonl").write_bytes(text)
  for share, split, words in (
    (0.0, "heldout", "data.sources.main has no heldout documents; give more data, or an"),
    (0.9999999, "train", "/main has no documents to train on; give more data"),
  ):  # fmt: skip
    target = tmp_path / split
    _prepare(tmp_path / "a.jsonl", tokenizer, target, heldout=share)
    made = tokenize.Tokenizer(tokenizer, "<end>")
    spec = texts.spec(
      texts.source("prepared", target / "main"), tokenizer=made, heldout=share, shuffle_windows=4
    )
    with pytest.raises(UserError) as e:
      if split == "heldout":
        list(loader.heldout_batches(spec, "main", 2, 2))
      next(iter(loader.train_batches(spec, 2)))
    assert words in str(e.value)


@pytest.mark.parametrize("more, count", [(-1, None), (0, 3), (1, 3)])
def test_by_default_a_process_per_core_of_this_one_encodes_from_a_size_on(
  tmp_path, corpus, monkeypatch, more, count
):
  """Threads stand for the processes; no other process's cores count."""
  text, tokenizer = corpus
  path, started = tmp_path / "a.jsonl", []
  path.write_bytes(text)

  def start(processes, *how):
    started.append(processes)
    return concurrent.futures.ThreadPoolExecutor(1, "worker", *how[1:])

  monkeypatch.setattr(encode.futures, "ProcessPoolExecutor", start)
  monkeypatch.setattr(encode, "_ENCODER", [])
  monkeypatch.setattr(encode, "_SMALL", len(text) - more)
  monkeypatch.setattr(os, "sched_getaffinity", {0: {1, 4, 5}}.__getitem__)
  monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as a worker sets it
  made = _prepare(path, tokenizer, tmp_path / "all", processes=0)
  assert started == ([] if count is None else [count])
  assert made == _prepare(path, tokenizer, tmp_path / "one")


def _documents(target):
  return {
    split: [made[i]["tokens"].tolist() for i in range(len(made))]
    for split in ("train", "heldout")
    for made in [Prepared(str(target / "main"), split)]
  }


def test_files_hold_what_the_tokenizer_says_one_document_after_the_other(tmp_path, corpus):
  """The tokenizer's own single call is the oracle; a second process changes no byte."""
  text, tokenizer = corpus
  path = tmp_path / "a.jsonl"
  path.write_bytes(text)
  index, files = _prepare(path, tokenizer, tmp_path / "one")
  bpe = tokenizers.Tokenizer.from_file(tokenizer)
  wanted = {"train": [], "heldout": []}
  for i, line in enumerate(text.decode().splitlines()[:700]):
    if i == 300:
      continue
    record = json.loads(line)
    ids = bpe.encode(record["text"], add_special_tokens=False).ids
    split = "heldout" if tokenize.is_held_out(record, 0.2) else "train"
    wanted[split].append([*ids, bpe.token_to_id("<end>")])
  assert _documents(tmp_path / "one") == wanted and index["passed_over"] == {"malformed": 1}
  assert len(index["splits"]["train"]["files"]) > 3 and "progress.json" not in files
  assert _prepare(path, tokenizer, tmp_path / "two", processes=2) == (index, files)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_interrupted_preparation_ends_with_the_same_documents(
  tmp_path, corpus, suffix, monkeypatch
):
  text, tokenizer = corpus
  plain, path = tmp_path / "a.jsonl", tmp_path / f"b.jsonl{suffix}"
  plain.write_bytes(text)
  half = len(text) // 2
  zst = lambda b: pyarrow.compress(b, "zstd", asbytes=True)  # noqa: E731
  packed = {"": bytes, ".gz": gzip.compress, ".zst": zst}[suffix]
  path.write_bytes(packed(text[:half]) + packed(text[half:]))  # two members, as appending makes
  write, count = pretokenize._Shards.write, 0

  def stop(self, tokens):
    nonlocal count
    count += 1
    if count == 400:
      raise KeyboardInterrupt
    write(self, tokens)

  out = rich.console.Console(file=io.StringIO(), width=200)
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(pretokenize._Shards, "write", stop)
    _prepare(path, tokenizer, tmp_path / "p", out=out)
  assert "goes on" not in out.file.getvalue()
  read = json.loads((tmp_path / "p" / "main" / "progress.json").read_text())["read"]
  assert 200 < read < 402
  count = -(10**6)
  monkeypatch.setattr(pretokenize._Shards, "write", stop)
  index, files = _prepare(path, tokenizer, tmp_path / "p", out=out)
  assert f"goes on after {read} documents" in out.file.getvalue()
  assert count == 699 - (read - (read > 300)) - 10**6  # nothing whole is done again
  whole, others = _prepare(plain, tokenizer, tmp_path / "whole")
  assert index["splits"] == whole["splits"] and index["passed_over"] == whole["passed_over"]
  assert files | {"index.json": b""} == others | {"index.json": b""}


def test_remote_files_are_read_like_local_ones(tmp_path, corpus):
  """A file system in memory under s3://, by way of fsspec."""

  class Bucket(fsspec.implementations.memory.MemoryFileSystem):
    protocol, store, pseudo_dirs = "s3", {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
      if isinstance(path, list):
        return [cls._strip_protocol(p) for p in path]
      return super()._strip_protocol(path.replace("s3://", "memory://"))

  text, tokenizer = corpus
  fsspec.register_implementation("s3", Bucket, clobber=True)
  Bucket().pipe("/bucket/a/b/c.jsonl.gz", gzip.compress(text))
  Bucket().pipe("/bucket/a/other.txt", b"x")
  (tmp_path / "a.jsonl").write_bytes(text)
  remote, _ = _prepare("s3://bucket/**/*.jsonl.gz", tokenizer, tmp_path / "remote")
  local, _ = _prepare(tmp_path / "a.jsonl", tokenizer, tmp_path / "local")
  assert remote["splits"] == local["splits"]
  for pattern in ("a/*.txt", "?/other.txt", "[ab]/o*.txt"):
    assert sources.find_files(f"s3://bucket/{pattern}") == ["s3://bucket/a/other.txt"]
  with pytest.raises(UserError, match="ftp.*cannot be listed"):
    sources.find_files("ftp://bucket/*.txt")
  with pytest.raises(FileNotFoundError, match="no file matches"):
    sources.find_files("s3://bucket/*.gz")


def test_damaged_and_misused_streams_say_what_to_do(tmp_path, corpus):
  text, tokenizer = corpus
  path = tmp_path / "a.jsonl.gz"
  path.write_bytes(gzip.compress(text)[:-2000])
  with pytest.raises(UserError, match="a.jsonl.gz is damaged after line .*fetch it again"):
    _prepare(path, tokenizer, tmp_path / "p")
  path.write_bytes(gzip.compress(text))
  with pytest.raises(ValueError, match=r"a.jsonl.gz:301: broken JSON.*data.on_malformed"):
    _prepare(path, tokenizer, tmp_path / "q", on_malformed="error")
  spec = texts.source("jsonl", path)
  with pytest.raises(UserError, match="with --job=prepare"):
    len(sources.open_source(spec))
  with pytest.raises(UserError, match="conversations are read from the files .*decompress them"):
    sources.open_source(spec | {"chat": "messages", "field": "messages"})


def test_full_disk_is_named_and_the_same_command_goes_on(tmp_path, corpus):
  """A limit on the size of files stands for the disk: both fail the write of array_record."""
  text, tokenizer = corpus
  (tmp_path / "a.jsonl").write_bytes(text)
  whole = _prepare(tmp_path / "a.jsonl", tokenizer, tmp_path / "whole")
  sizes = [len(content) for name, content in whole[1].items() if name.endswith("record")]
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) - 1, hard))
  try:
    with pytest.raises(UserError, match="full/main cannot be written: File too large; make room"):
      _prepare(tmp_path / "a.jsonl", tokenizer, tmp_path / "full")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert _prepare(tmp_path / "a.jsonl", tokenizer, tmp_path / "full") == whole
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="file/main cannot be written: Not a directory; name another"):
    _prepare(tmp_path / "a.jsonl", tokenizer, tmp_path / "file")
