"""Damaged and misleading data files end in one message that names them."""

import dataclasses
import json
import os

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import texts
import tokenizers
from array_record.python import array_record_module  # pyright: ignore
from ml_collections import ConfigDict

from configs import base
from fp8jax.config import resolve
from fp8jax.data import loader, sources, tokenize
from fp8jax.errors import ConfigError, UserError


def _read(spec, n=20):
  """n batches; returns what was passed over."""
  counts = loader.DocumentCounts()
  texts.take(dataclasses.replace(spec, prefetch=0), n, 2, counts=counts)
  return counts.summary()


# --- prepared ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Files of 40 prepared documents: {name: content}."""
  folder = tmp_path_factory.mktemp("whole")
  path = texts.write(folder / "c.jsonl", [f"doc {i} " + "x" * 30 for i in range(40)])
  texts.prepare(texts.spec(path, heldout=0.3), folder / "p", 400)
  return {p.name: p.read_bytes() for p in (folder / "p" / "main").iterdir()}


@pytest.fixture
def folder(whole, tmp_path):
  for name, content in whole.items():
    (tmp_path / name).write_bytes(content)
  return tmp_path


SHARD, PYDOC = "train-00000.array_record", texts.source("pydoc")


def _rewrite(folder, record):
  """The first shard with other records: record(tokens of the old one) -> bytes."""
  path = str(folder / SHARD)
  reader = grain.sources.ArrayRecordDataSource([path])
  with open(folder / "index.json") as f:
    assert len(json.load(f)["splits"]["train"]["files"]) > 1
  old = [np.frombuffer(reader[i], "<u4") for i in range(reader.__len__())]
  writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
  for tokens in old:
    writer.write(record(tokens))
  writer.close()


def _change(folder, **changes):
  _change_index(folder, lambda index: index["splits"]["train"].update(changes))


def _change_index(folder, change):
  path = folder / "index.json"
  index = json.loads(path.read_text())
  change(index)
  path.write_text(json.dumps(index))


def _flip(folder):
  content = bytearray((folder / SHARD).read_bytes())
  content[100:2000] = bytes(b ^ 0x55 for b in content[100:2000])
  (folder / SHARD).write_bytes(content)


DAMAGE = {
  "token beyond the vocabulary": (
    lambda f: _rewrite(f, lambda t: np.full(len(t), 999999, "<u4").tobytes()),
    "has token 999999, the tokenizer has ids below 257",
  ),
  "token that is negative as int32": (
    lambda f: _rewrite(f, lambda t: np.full(len(t), 2**31 + 5, "<u4").tobytes()),
    "has token 2147483653",
  ),
  "records of three bytes": (lambda f: _rewrite(f, lambda t: b"abc"), "has 3 bytes, no whole"),
  "empty records": (lambda f: _rewrite(f, lambda t: b""), "has 0 bytes, no whole"),
  "shorter documents": (
    lambda f: _rewrite(f, lambda t: t[1:].tobytes()),
    r"has \d+ tokens, train-lengths.uint32 says",
  ),
  "truncated shard": (
    lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-50]),
    f"{SHARD} is damaged",
  ),
  "flipped bytes": (_flip, f"({SHARD} is damaged|train:.* cannot be read)"),
  "path above": (lambda f: _change(f, files=["../../etc/passwd"]), "splits.train names '../../"),
  "absolute path": (lambda f: _change(f, files=["/etc/passwd"]), "names '/etc/passwd'.*inside"),
  "lengths above": (lambda f: _change(f, lengths="../x"), "splits.train names '../x'"),
  "too many documents": (lambda f: _change(f, documents=4000), "index.json says 4000"),
  "too few documents": (lambda f: _change(f, documents=3), "index.json says 3"),
  "quoted count": (
    lambda f: _change(f, documents="40"),
    "'splits.train.documents' is '40', expected a whole number",
  ),
  "negative count": (
    lambda f: _change(f, documents=-1),
    "'splits.train.documents' is -1, expected a whole number >= 0",
  ),
  "files that are text": (
    lambda f: _change(f, files="abc"),
    "'splits.train.files' is 'abc', expected a list",
  ),
  "files that are numbers": (lambda f: _change(f, files=[3]), "files.0.' is 3, expected text"),
  "no files": (lambda f: _change(f, files=[]), "documents in no file"),
  "one file twice": (lambda f: _change(f, files=[SHARD, SHARD]), "names a file twice"),
  "no train split": (
    lambda f: _change_index(f, lambda i: i["splits"].pop("train")),
    "no field 'train'",
  ),
  "splits that are a list": (
    lambda f: _change_index(f, lambda i: i.update(splits=[])),
    "'splits' is \\[\\], expected",
  ),
}


# Lengths are read for shuffling alone.
CASES = [(name, s) for name in DAMAGE for s in (0, 8) if s or name != "shorter documents"]


@pytest.mark.parametrize("name, shuffle", CASES)
def test_prepared_damage_is_named(folder, name, shuffle):
  damage, message = DAMAGE[name]
  damage(folder)
  spec = texts.spec(texts.source("prepared", folder), heldout=0.3, shuffle_windows=shuffle)
  with pytest.raises(UserError, match=message) as error:
    sources.Prepared(str(folder), "train").check()  # as the configuration's checks
    _read(spec, 40)
  assert str(folder) in str(error.value)


def test_prepared_that_is_whole_is_read(folder):
  source = texts.source("prepared", folder)
  for split in ("train", "heldout"):
    sources.Prepared(str(folder), split).check()
  assert _read(texts.spec(source, heldout=0.3)) == {}
  assert _read(texts.spec(source, heldout=0.3, shuffle_windows=4)) == {}


def test_prepare_writes_a_damaged_folder_again(tmp_path):
  spec = texts.spec(texts.write(tmp_path / "c.jsonl", ["one", "two"]), heldout=0.0)
  texts.prepare(spec, tmp_path / "p")
  shard = tmp_path / "p" / "main" / SHARD
  content = shard.read_bytes()
  shard.write_bytes(content[:-50])
  texts.prepare(spec, tmp_path / "p")
  assert shard.read_bytes() == content


# --- entries of data.sources ---------------------------------------------------------------------


@pytest.mark.parametrize(
  "source, message",
  [
    ("pydoc", "data.sources.main is 'pydoc', expected an entry"),
    (3, "data.sources.main is 3, expected an entry"),
    (dict(PYDOC, weight="1"), "data.sources.main.weight is '1', expected a number"),
    (dict(PYDOC, weight=True), "data.sources.main.weight is True, expected a number"),
    (texts.source("pydoc", weight=float("inf")), "data.sources.main.weight"),
    (texts.source("pydoc", weight=1e308), "data.sources.main.weight is 1e+308"),
    (dict(texts.source(), path=3), "data.sources.main.path is 3, expected a string"),
    (dict(texts.source(), kind=["text"]), "data.sources.main.kind is ['text'], expected a string"),
  ],
)
def test_source_of_a_wrong_type_is_refused(source, message):
  c = base.get_config()
  with c.unlocked():
    c.data.sources = ConfigDict({"main": source}, type_safe=False)
  with pytest.raises(ConfigError) as error:
    resolve.resolve_data(c)
  assert message in str(error.value)


def test_prepare_refuses_a_shard_without_tokens():
  c = base.get_config()
  c.prepare.shard_tokens = 0
  with pytest.raises(ConfigError, match="prepare.shard_tokens=0 must be at least 1"):
    resolve.resolve_data(c)


def test_one_file_by_two_paths_is_refused_and_a_loop_ends(tmp_path):
  (tmp_path / "a.txt").write_text("a")
  assert sources.find_files(f"{tmp_path}/**/*.txt") == [str(tmp_path / "a.txt")]
  for name in ("self", "again"):  # two links: 2 ** 40 paths
    os.symlink(tmp_path, tmp_path / name)
  with pytest.raises(UserError, match="matches one file twice, as .*a.txt' and .*a.txt'"):
    sources.find_files(f"{tmp_path}/**/*.txt")


# --- documents -----------------------------------------------------------------------------------


def _damage(path, begin, end):
  content = bytearray(path.read_bytes())
  content[begin:end] = bytes(b ^ 0x5A for b in content[begin:end])
  path.write_bytes(content)


def _table(path, texts):
  pq.write_table(pa.table({"text": texts}), path, row_group_size=20, compression="zstd")


def test_parquet_with_a_damaged_row_group_stops_or_is_counted(tmp_path):
  path = tmp_path / "t.parquet"
  _table(path, [f"row {i} " + "y" * 30 for i in range(60)])
  _damage(path, 10, 100)
  spec = texts.spec(texts.source("parquet", path), heldout=0.0)
  with pytest.raises(tokenize.MalformedDocument, match="t.parquet:row .*: row group 0 cannot be"):
    _read(spec, 40)
  skipping = dataclasses.replace(spec, on_malformed="skip")
  assert 20 <= _read(skipping, 40)["malformed"] <= 60


def test_parquet_with_a_damaged_footer_is_named(tmp_path):
  path = tmp_path / "t.parquet"
  _table(path, ["row"] * 60)
  size = path.stat().st_size
  _damage(path, size - 300, size - 8)
  with pytest.raises(UserError, match="t.parquet is not a Parquet file"):
    len(sources.open_source(texts.source("parquet", path)))


def test_parquet_with_bad_utf8_stops_or_is_counted(tmp_path):
  offsets, text = np.array([0, 40, 42, 82], "<i4"), b"a" * 40 + b"\xff\xfe" + b"b" * 40
  rows = pa.Array.from_buffers(pa.string(), 3, [None, *map(pa.py_buffer, (offsets, text))])
  path = tmp_path / "t.parquet"
  _table(path, rows)
  spec = texts.spec(texts.source("parquet", path), heldout=0.0)
  with pytest.raises(tokenize.MalformedDocument, match="t.parquet:row 1: bad UTF-8 at byte 0"):
    _read(spec)
  skipping = dataclasses.replace(spec, on_malformed="skip")
  assert _read(skipping)["malformed"] > 1


# --- tokenizers ----------------------------------------------------------------------------------


def _word_level(folder):
  model = tokenizers.models.WordLevel({"a": 0, "<end>": 1}, unk_token="[UNK]")
  tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))


def test_tokenizer_that_cannot_encode_is_named(tmp_path):
  _word_level(tmp_path)
  spec = texts.spec(tokenizer=tokenize.Tokenizer(str(tmp_path), "<end>"))
  with pytest.raises(UserError, match="tokenizer.json cannot encode .*Missing .UNK. token"):
    _read(spec)


@pytest.mark.parametrize("text", ["{broken", "{}", "[]", "\0"])
def test_broken_tokenizer_is_named_and_not_its_neighbour(tmp_path, text):
  (tmp_path / "tokenizer.json").write_text(text)
  with pytest.raises(UserError, match="tokenizer.json is not a tokenizer.json"):
    tokenize.Tokenizer(str(tmp_path)).fingerprint  # noqa: B018


@pytest.mark.parametrize(
  "settings, message",
  [
    (None, "tokenizer_config.json does not exist, which would name the eos_token"),
    ({}, "tokenizer_config.json names no eos_token"),
    ({"eos_token": 3}, "tokenizer_config.json: eos_token is 3, expected a string"),
    ({"eos_token": {"x": 1}}, "tokenizer_config.json names no eos_token"),
  ],
)
def test_eos_token_that_is_not_named_is_asked_for(tmp_path, settings, message):
  _word_level(tmp_path)
  if settings is not None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  with pytest.raises(UserError, match=message):
    tokenize.Tokenizer(str(tmp_path)).eos_id  # noqa: B018
