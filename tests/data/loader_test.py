"""The loader: packing, mixture, determinism, resumption, splits, malformed input."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import texts

from fp8jax.data import loader, sources, tokenize
from fp8jax.errors import UserError

EOS = texts.BYTES.eos_id


def _documents(batches) -> list[str]:
  """The documents of a stream of batches of one row, in order; the last one is cut."""
  tokens = [t for b in batches for t in (*b["tokens_BL"][0], b["targets_BL"][0, -1])]
  text = texts.BYTES.decode([t if t != EOS else ord("|") for t in tokens])
  return text.split("|")[:-1]


@pytest.fixture
def corpus(tmp_path):
  """40 documents that say who they are, as JSON lines."""
  documents = [f"doc {i:02d} " + "x" * (7 * i % 50) for i in range(40)]
  return texts.write(tmp_path / "corpus.jsonl", documents)


def test_windows_cover_every_document_once_an_epoch_in_order_of_tokens(corpus):
  spec = texts.spec(corpus, heldout=0.0)
  total = sum(len(texts.BYTES.encode(r["text"])) for r in sources.open_source(spec.sources["main"]))
  batches = texts.take(spec, total // 33 + 1, batch=1)
  for batch in batches:
    assert batch["tokens_BL"].shape == (1, 32)
    np.testing.assert_array_equal(batch["tokens_BL"][:, 1:], batch["targets_BL"][:, :-1])
  epoch = _documents(batches)[:40]
  assert sorted(epoch) == sorted(r["text"] for r in sources.open_source(spec.sources["main"]))


def test_documents_are_kept_apart_by_segments_positions_and_weights(corpus):
  spec = texts.spec(corpus, seq_len=64, heldout=0.0)
  (batch,) = texts.take(spec, 1)
  tokens, targets = batch["tokens_BL"], batch["targets_BL"]
  ends = tokens == EOS
  # The token after an end begins a document: new segment, position 0, not a target of the old one.
  np.testing.assert_array_equal(np.diff(batch["segments_BL"], axis=1), ends[:, :-1])
  assert np.all(batch["positions_BL"][:, 1:][ends[:, :-1]] == 0)
  inside = batch["segments_BL"][:, 1:] == batch["segments_BL"][:, :-1]
  np.testing.assert_array_equal(np.diff(batch["positions_BL"], axis=1)[inside], 1)
  np.testing.assert_array_equal(batch["weights_BL"] == 0, ends)
  crossing = dataclasses.replace(spec, cross_document=True)
  (other,) = texts.take(crossing, 1)
  np.testing.assert_array_equal(other["targets_BL"], targets)
  assert "segments_BL" not in other and np.all(other["weights_BL"] == 1)
  np.testing.assert_array_equal(other["positions_BL"], np.tile(np.arange(64), (4, 1)))


@pytest.mark.slow  # shuffled: shuffle_test.py
def test_order_depends_on_the_seed_alone(corpus):
  spec = texts.spec(corpus)
  first = texts.take(spec, 8)
  for changes in ({"prefetch": 0}, {"workers": 2}):
    assert texts.are_same(first, texts.take(dataclasses.replace(spec, **changes), 8))
  assert not texts.are_same(first, texts.take(dataclasses.replace(spec, seed=1), 8))


@pytest.mark.parametrize("step", [0, 1, 5, 11])
def test_state_resumes_bit_for_bit_and_is_small_json(corpus, step):
  mixture = {"a": texts.source("jsonl", corpus), "b": texts.source("pydoc", weight=2.0)}
  spec = texts.spec(sources=mixture)
  whole = texts.take(spec, 16)
  iterator = loader.train_batches(spec, 4)
  for _ in range(step):
    next(iterator)
  state = iterator.get_state()
  assert len(json.dumps(state)) < 2000
  assert texts.are_same(whole[step:], texts.resume(spec, state, 16 - step))


def test_processes_read_disjoint_shares_of_all_documents(corpus):
  spec = texts.spec(corpus, heldout=0.0)
  seen = []
  for index, size in enumerate((14, 13, 13)):
    shard = loader.Shard(index, 3)
    seen.append(_documents(texts.take(spec, 40, batch=1, shard=shard))[:size])
  everything = [r["text"] for r in sources.open_source(spec.sources["main"])]
  assert sorted(sum(seen, [])) == sorted(everything)


def test_mixture_weights_are_shares_of_tokens(tmp_path):
  for name, size in (("a", 2000), ("b", 50)):  # documents of very different length
    for i in range(20):
      (tmp_path / f"{name}{i}.txt").write_text(name * size)
  spec = texts.spec(
    sources={
      n: texts.source("text", tmp_path / f"{n}*.txt", weight=w) for n, w in (("a", 3), ("b", 1))
    },
    heldout=0.0,
  )
  tokens = np.concatenate([b["tokens_BL"].ravel() for b in texts.take(spec, 50)])
  share = np.mean(tokens == ord("a")) / np.mean(tokens != EOS)
  assert abs(share - 0.75) < 0.01


def test_heldout_split_is_by_content_and_disjoint(corpus):
  spec = texts.spec(corpus, heldout=0.3)
  batches = [b for b in loader.heldout_batches(spec, "main", 1, 80) if b["weights_BL"].any()]
  held, train = set(_documents(batches)), set(_documents(texts.take(spec, 90, batch=1)))
  assert 4 <= len(held) <= 20 and not held & train
  everything = {r["text"] for r in sources.open_source(spec.sources["main"])}
  assert held | train == everything
  # The same document elsewhere, among others, falls on the same side.
  for text in everything:
    assert tokenize.is_held_out({"text": text}, 0.3) == (text in held)


def test_heldout_batches_pad_with_weightless_windows(corpus):
  spec = texts.spec(corpus, heldout=0.3)
  batches = list(loader.heldout_batches(spec, "main", 4, 50))
  assert len(batches) == 50 and batches[-1]["weights_BL"].sum() == 0
  total = sum(b["weights_BL"].sum() for b in batches)
  again = sum(b["weights_BL"].sum() for b in loader.heldout_batches(spec, "main", 4, 60))
  assert total == again > 0


def test_heldout_everything_is_an_error_and_not_a_hang(corpus):
  spec = texts.spec(corpus, heldout=0.9999999)
  with pytest.raises(ValueError, match="has no document to train on"):
    texts.take(spec, 1)


# --- malformed input -----------------------------------------------------------------------------

BAD = {
  "jsonl": [
    (b'{"text": "fine"}\n{"text": "broken}\n', "2", "broken JSON"),
    (b'{"text": "fine"}\n{"body": "no text"}\n', "2", "missing field 'text' (has 'body')"),
    (b'{"text": "fine"}\n{"text": 3}\n', "2", "field 'text' is int, expected a string"),
    (b'{"text": "fine"}\n{"text": null}\n', "2", "field 'text' is null, expected a string"),
    (b'{"text": "fine"}\n{"text": "\xff"}\n', "2", "bad UTF-8 at byte 10"),
    (b'{"text": "fine"}\n\n{"text": "fine"}\n', "2", "empty document"),
    (b'{"text": "half \\ud800 of a pair"}\n', "1", "lone surrogate at character 5"),
    (b'{"text": ' + b"[" * 100_000 + b"\n", "1", "broken JSON"),
    (b'{"text": ' + b"9" * 5_000 + b"}\n", "1", "broken JSON"),
    (b'{"text": "fine"}\n[1]\n', "2", "begins a JSON array, expected one object"),
  ],
  "text": [(b"ab\xff\xfe", "", "bad UTF-8 at byte 2"), (b"", "", "empty document")],
}
CASES = [(kind, *case) for kind, cases in BAD.items() for case in cases]


def _bad(folder, kind, content):
  """The spec of a file with this content and of a good one."""
  (folder / "bad.txt").write_bytes(content)
  (folder / "good.txt").write_bytes(b'{"text": "good"}\n' * 3 if kind == "jsonl" else b"good")
  return texts.spec(texts.source(kind, folder / "*.txt"), heldout=0.0)


def test_blank_lines_at_the_end_are_no_documents(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "two"}\n\n  \n')
  assert len(sources.JsonLines([str(tmp_path / "a.jsonl")], "text")) == 2


@pytest.mark.parametrize(
  "kind, content, line, message", CASES, ids=[f"{c[-1]} {i}" for i, c in enumerate(CASES)]
)
def test_malformed_documents_stop_the_run(tmp_path, kind, content, line, message):
  spec = _bad(tmp_path, kind, content)
  with pytest.raises(tokenize.MalformedDocument) as error:
    texts.take(spec, 3)
  assert message in str(error.value)
  assert str(tmp_path / "bad.txt") + (f":{line}" if line else "") in str(error.value)
  assert "data.on_malformed='skip'" in str(error.value)


@pytest.mark.parametrize("kind, content", [(kind, cases[0][0]) for kind, cases in BAD.items()])
def test_malformed_documents_are_counted(tmp_path, kind, content):
  spec = _bad(tmp_path, kind, content)
  counts = loader.DocumentCounts()
  texts.take(dataclasses.replace(spec, on_malformed="skip"), 3, counts=counts)
  assert counts["malformed"] >= 1 and counts.summary()["malformed"] == counts["malformed"]


def test_long_documents_are_split_refused_or_counted(tmp_path):
  (tmp_path / "long.txt").write_text("x" * 100)
  (tmp_path / "short.txt").write_text("y" * 10)
  spec = texts.spec(texts.source("text", tmp_path / "*.txt"), heldout=0.0)
  split = np.concatenate([b["tokens_BL"].ravel() for b in texts.take(spec, 3)])
  assert {ord("x"), ord("y")} < set(split)
  with pytest.raises(tokenize.MalformedDocument, match="long.txt: 101 tokens do not fit a window"):
    texts.take(dataclasses.replace(spec, on_long="error"), 3)
  counts = loader.DocumentCounts()
  skipped = texts.take(dataclasses.replace(spec, on_long="skip"), 3, counts=counts)
  assert ord("x") not in np.concatenate([b["tokens_BL"].ravel() for b in skipped])
  assert counts["too long"] >= 1


def test_errors_reach_the_run_from_worker_processes_too(tmp_path):
  for i in range(4):
    (tmp_path / f"{i}.txt").write_bytes(b"\xff")
  spec = texts.spec(texts.source("text", tmp_path / "*.txt"), workers=1, heldout=0.0)
  with pytest.raises(Exception, match="bad UTF-8 at byte 0"):
    texts.take(spec, 1)


RUN = """
import json, multiprocessing, signal, sys
from absl import flags
from fp8jax.data import config, loader, tokenize
flags.FLAGS.mark_as_parsed()
for number in (signal.SIGINT, signal.SIGTERM):
  signal.signal(number, lambda *_: None)
sources = {"main": json.loads(sys.argv[1])}
spec = config.DataConfig(sources, tokenize.Tokenizer("bytes"), seq_len=32, workers=1, prefetch=0)
stream = loader.train_batches(spec, 4)
next(stream)
print(multiprocessing.active_children()[0].pid, flush=True)
input()
print(len([next(stream) for _ in range(20)]), flush=True)
input()
"""


def test_worker_processes_outlive_signals_to_the_group_and_end_with_the_run(corpus, repository):
  """Ctrl-C in a terminal and a scheduler's SIGTERM reach every process; the run answers."""
  run = subprocess.Popen(
    [sys.executable, "-c", RUN, json.dumps(texts.source("jsonl", corpus))],
    cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    start_new_session=True,
  )  # fmt: skip
  assert run.stdin is not None and run.stdout is not None
  worker = int(run.stdout.readline())
  for number in (signal.SIGINT, signal.SIGTERM):
    os.killpg(run.pid, number)
  run.stdin.write("\n")
  run.stdin.flush()
  assert run.stdout.readline() == "20\n"
  run.kill()  # leaves the worker no word
  run.wait()
  deadline = time.time() + 20
  while pathlib.Path(f"/proc/{worker}").exists() and time.time() < deadline:
    time.sleep(0.05)
  assert not pathlib.Path(f"/proc/{worker}").exists()
  run.stdin.close()
  run.stdout.close()


# --- kinds of sources ----------------------------------------------------------------------------


def test_parquet_is_read_by_row(tmp_path):
  import pyarrow as pa
  import pyarrow.parquet as pq

  bodies = [f"row {i}" for i in range(25)]
  pq.write_table(pa.table({"body": bodies}), tmp_path / "t.parquet", row_group_size=4)
  spec = texts.source("parquet", tmp_path / "*.parquet", field="body")
  source = sources.open_source(spec)
  assert [source[i]["text"] for i in range(len(source))] == bodies
  assert source[7]["origin"].endswith("t.parquet:row 7")
  with pytest.raises(ValueError, match="no column 'text'; it has body"):
    len(sources.open_source(spec | {"field": "text"}))


def test_tfds_is_read_without_tensorflow(tmp_path):
  import tensorflow_datasets as tfds

  class Tiny(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      return tfds.core.DatasetInfo(
        builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text()})
      )

    def _split_generators(self, dl_manager):
      del dl_manager
      return {"train": self._generate_examples()}

    def _generate_examples(self):
      for i in range(12):
        yield i, {"text": f"example {i}"}

  Tiny(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
  spec = texts.source("tfds", tmp_path, dataset="tiny:1.0.0", split="train[:50%]")
  source = sources.open_source(spec)
  assert len(source) == 6
  assert all(source[i]["text"].startswith("example ") for i in range(6))
  assert all(f.endswith((".array_record-00000-of-00001",)) for f in source.files())
  assert len(texts.take(texts.spec(spec, heldout=0.0), 2)) == 2
  assert "tensorflow" not in sys.modules
  info = next(tmp_path.rglob("dataset_info.json"))
  info.write_text(info.read_text().replace("array_record", "tfrecord"))
  with pytest.raises(UserError, match="'tiny:1.0.0'.* without random access.*array_record"):
    len(sources.open_source(spec))


def test_prepared_data_hold_the_same_documents(tmp_path, corpus):
  raw = texts.spec(corpus, heldout=0.3)
  made, prepared = texts.prepare(raw, tmp_path / "p", 200)
  assert len(made["splits"]["train"]["files"]) > 1  # 200 tokens a file
  spec = dataclasses.replace(raw, sources={"main": prepared})
  held = [list(loader.heldout_batches(s, "main", 2, 30)) for s in (raw, spec)]
  tokens = [sum(b["weights_BL"].sum() for b in h) for h in held]
  assert tokens[0] == tokens[1] > 0

  of_raw, of_prepared = (_documents(texts.take(s, 90, batch=1)) for s in (raw, spec))
  assert set(of_raw) == set(of_prepared)
  stamp = (tmp_path / "p" / "main" / "index.json").stat().st_mtime_ns
  texts.prepare(raw, tmp_path / "p", 200)
  assert (tmp_path / "p" / "main" / "index.json").stat().st_mtime_ns == stamp
  lost = tmp_path / "p" / "main" / made["splits"]["train"]["files"][-1]
  content = lost.read_bytes()
  lost.unlink()
  texts.prepare(raw, tmp_path / "p", 200)
  assert lost.read_bytes() == content


def test_fingerprint_changes_with_content_and_settings(corpus):
  spec = texts.spec(corpus)
  first = loader.fingerprint(spec)
  assert first == loader.fingerprint(dataclasses.replace(spec, workers=3, prefetch=0))
  for change in (dict(seed=1), dict(seq_len=64), dict(heldout=0.2), dict(cross_document=True)):
    assert loader.fingerprint(dataclasses.replace(spec, **change)) != first
  content = bytearray(corpus.read_bytes())
  content[10] ^= 1
  corpus.write_bytes(content)
  assert loader.fingerprint(spec) != first


def test_sources_of_equal_length_have_different_orders():
  (source,) = texts.spec().sources.values()
  a, b, again = (
    texts.take(texts.spec(sources={name: source}), 1)[0]["tokens_BL"] for name in ("a", "b", "a")
  )
  assert np.array_equal(a, again) and not np.array_equal(a, b)


def test_batches_that_depend_on_how_many_processes_pack_them(tmp_path):
  """Those of one shuffled prepared source do not, all processes together."""
  prepared = texts.source("prepared", tmp_path)
  for values, is_same in (
    ({"sources": {"a": prepared}, "shuffle_windows": 9}, True),
    ({"sources": {"a": prepared}, "shuffle_windows": 0}, False),
    ({"sources": {"a": prepared, "b": prepared}, "shuffle_windows": 9}, False),
    ({"shuffle_windows": 9}, False),
  ):
    assert loader.is_same_in_any_shares(texts.spec(**values)) == is_same


def test_held_out_batches_of_all_processes_together_are_those_of_one():
  """Also where documents are fewer than processes; each process counts what all pass over."""
  spec, num = texts.spec(heldout=0.03, seq_len=512), 6

  def read(rows, *shard):
    counts = loader.DocumentCounts()
    batches = loader.heldout_batches(spec, "main", rows, num, loader.Shard(*shard), counts)
    return list(batches), counts

  whole, counts = read(12)
  assert 0 < counts["used"] < 12 and 0 < sum(b["weights_BL"].any(1).sum() for b in whole) < num * 12
  parts, their_counts = zip(*(read(2, i, 6) for i in range(6)))
  assert all(c == counts for c in their_counts)
  for batch, *of in zip(whole, *parts, strict=True):
    for key, x in batch.items():
      assert np.array_equal(np.concatenate([part[key] for part in of]), x), key
