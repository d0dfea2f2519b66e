"""Windows in shuffled order: the same windows, each once, elsewhere; on the fly and prepared."""

import collections
import dataclasses
import json

import grain
import numpy as np
import pytest
import rich.console

from fp8jax.data import config as data_config
from fp8jax.data import loader, pretokenize, sources, tokenize, window_index
from fp8jax.errors import UserError

BYTES = tokenize.Tokenizer("bytes")
LENGTH = 16
KEYS = ("tokens", "tokens_segment_ids", "tokens_positions")


def _source(**values):
  return dict(kind="text", path="", field="text", dataset="", split="train", weight=1.0) | values


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Documents from 1 token to 30 windows, as JSON lines and prepared."""
  path = tmp_path_factory.mktemp("corpus")
  rng = np.random.default_rng(0)
  with open(path / "corpus.jsonl", "w") as f:
    sizes = [1, 2, LENGTH, LENGTH + 1, 500, *rng.integers(1, 90, 30), *rng.integers(1, 14, 40)]
    for size in sizes:
      text = "".join(map(chr, rng.integers(97, 123, size)))
      f.write(json.dumps({"text": text}) + "\n")
  spec = _spec(path, "jsonl", 0)
  pretokenize.run(spec, str(path / "p"), 300, rich.console.Console(quiet=True))
  return path


def _spec(folder, kind, windows, **values):
  path = {"jsonl": folder / "corpus.jsonl", "prepared": folder / "p" / "main"}[kind]
  values = {"sources": {"main": _source(kind=kind, path=str(path))}, "heldout": 0.2} | values
  return data_config.DataConfig(tokenizer=BYTES, seq_len=LENGTH, shuffle_windows=windows, **values)


def _rows(spec, n, batch=1, **kwargs) -> list[bytes]:
  """The first n windows as bytes of everything the model reads."""
  iterator = loader.train_batches(spec, batch, **kwargs)
  found = []
  while len(found) < n:
    made = next(iterator)
    found += [b"".join(made[k][i].tobytes() for k in sorted(made)) for i in range(batch)]
  iterator.close()
  return found[:n]


def _count(rows):
  return collections.Counter(rows)


def _windows(folder, on_long="split"):
  """(windows by number, the same before they are shuffled, their source)."""
  source = sources.Prepared(str(folder / "p" / "main"), "train")
  made = window_index.Windows(source, LENGTH + 1, "0/main", on_long)
  return made, lambda k: made._cut(k * (LENGTH + 1)), source


def _as_bytes(window) -> bytes:
  return b"".join(window[k].tobytes() for k in KEYS)


def _packed_by_grain(documents):
  """Windows of a list of documents in order, packed by grain."""
  data = grain.MapDataset.source([{"tokens": d} for d in documents]).to_iter_dataset()
  packed = grain.experimental.ConcatThenSplitIterDataset(data, length_struct={"tokens": LENGTH + 1})
  return [_as_bytes(window) for window in packed]


def test_windows_are_those_of_grain_over_the_document_index(folder):
  """Three epochs: permutations of all documents, concatenated without a gap, then cut."""
  windows, ordered, source = _windows(folder)
  everything = [source[i]["tokens"] for i in range(len(source))]
  orders = [windows._epoch(e).documents.tolist() for e in range(3)]
  assert all(sorted(order) == list(range(len(source))) for order in orders)
  assert len(set(map(tuple, orders))) == 3
  want = _packed_by_grain([everything[i] for order in orders for i in order])
  whole = sum(len(d) for d in everything) * 3 // (LENGTH + 1)
  assert whole > 60
  assert [_as_bytes(ordered(k)) for k in range(whole)] == want[:whole]


def test_prepared_epochs_hold_the_same_windows_shuffled(folder):
  shuffled, ordered, source = _windows(folder)
  total = sum(len(source[i]["tokens"]) for i in range(len(source)))
  for epoch in range(3):
    begin = next(k for k in range(10**6) if k * (LENGTH + 1) >= epoch * total)
    end = next(k for k in range(10**6) if k * (LENGTH + 1) >= (epoch + 1) * total)
    a, b = ([_as_bytes(at(k)) for k in range(begin, end)] for at in (ordered, shuffled.__getitem__))
    assert _count(a) == _count(b) and a != b
    assert sum(x == y for x, y in zip(a, b)) < len(a) // 4


def test_blocks_on_the_fly_hold_the_same_windows_shuffled(folder):
  """Every block is a permutation of its windows, another one each and in every source."""
  main = _spec(folder, "jsonl", 0).sources["main"]
  orders = []
  for name in ("main", "other"):
    a, b = (_rows(_spec(folder, "jsonl", w, sources={name: main}), 60) for w in (0, 20))
    for start in (0, 20, 40):
      one, other = a[start : start + 20], b[start : start + 20]
      assert _count(one) == _count(other)
      orders.append(tuple(one.index(row) for row in other))
  assert len({tuple(range(20)), *orders}) == 7


# Kind, windows; prepared data are shuffled whole, so that the number does not matter.
SHUFFLED = [("jsonl", 7), ("prepared", 7)]


@pytest.mark.parametrize("kind, windows", SHUFFLED)
def test_resumes_bit_for_bit_within_and_between_blocks(folder, kind, windows):
  """A mixture, so that two shuffles stand at different places."""
  two = _spec(folder, kind, windows).sources["main"]
  spec = _spec(folder, kind, windows, sources={"a": two, "b": two | {"weight": 2.0}})
  iterator = loader.train_batches(spec, 2)
  batches, states = [], []
  for _ in range(40):
    states.append(json.dumps(iterator.get_state()))
    batches.append(next(iterator))
  iterator.close()
  assert all(len(state) < 3000 for state in states)
  for step in (0, 1, 3, 10, 11, 12, 30):
    resumed = loader.train_batches(spec, 2)
    resumed.set_state(json.loads(states[step]))
    for want in batches[step : step + 9]:
      got = next(resumed)
      assert all(np.array_equal(got[k], want[k]) for k in want)
    resumed.close()


@pytest.mark.parametrize("kind, windows", SHUFFLED)
def test_order_depends_on_seed_and_source_alone(folder, kind, windows):
  spec = _spec(folder, kind, windows)
  want = _rows(spec, 40)
  assert want == _rows(dataclasses.replace(spec, workers=2, prefetch=0), 40)
  assert want != _rows(dataclasses.replace(spec, seed=1), 40)
  renamed = dataclasses.replace(spec, sources={"other": spec.sources["main"]})
  assert want != _rows(renamed, 40)


def test_processes_share_the_prepared_windows_of_one_order(folder):
  """Global batches are the same for 1, 2 and 4 processes; nothing is read twice in an epoch."""
  spec = _spec(folder, "prepared", 1)
  whole = _rows(spec, 40, batch=4)
  for count in (2, 4):
    shares = [
      _rows(spec, 40 // count, batch=4 // count, shard=loader.Shard(i, count)) for i in range(count)
    ]
    for step in range(10):
      n = 4 // count
      together = [row for share in shares for row in share[step * n : step * n + n]]
      assert _count(together) == _count(whole[4 * step : 4 * step + 4])


def test_processes_shuffle_shares_of_their_own_on_the_fly(folder):
  for i in range(2):
    a, b = (_rows(_spec(folder, "jsonl", w), 24, shard=loader.Shard(i, 2)) for w in (0, 12))
    assert _count(a) == _count(b) and a != b


def test_heldout_windows_stay_in_their_order(folder):
  for kind in ("jsonl", "prepared"):
    a, b = (list(loader.heldout_batches(_spec(folder, kind, w), "main", 2, 6)) for w in (0, 9))
    for x, y in zip(a, b, strict=True):
      assert all(np.array_equal(x[k], y[k]) for k in x)


def test_long_prepared_documents_are_skipped_and_counted_once_an_epoch(folder):
  windows, ordered, source = _windows(folder, on_long="skip")
  lengths = [len(source[i]["tokens"]) for i in range(len(source))]
  short = [n for n in lengths if n <= LENGTH]
  assert 0 < len(short) < len(lengths)
  counts = loader.DocumentCounts()
  spec = _spec(folder, "prepared", 1, on_long="skip", prefetch=0)
  n = -(-2 * sum(short) // (LENGTH + 1))  # windows that begin in the first two epochs
  iterator = loader.train_batches(spec, 1, counts=counts)
  for _ in range(n):
    next(iterator)
  assert counts["too long"] == 2 * (len(lengths) - len(short))
  order = [i for e in range(3) for i in windows._epoch(e).documents.tolist()]
  assert sorted(order) == sorted(3 * [i for i, n in enumerate(lengths) if n <= LENGTH])
  want = _packed_by_grain([source[i]["tokens"] for i in order])
  assert [_as_bytes(ordered(k)) for k in range(len(want) - 1)] == want[:-1]
  with pytest.raises(UserError, match=r"train:\d+: \d+ tokens do not fit a window of 16"):
    _rows(_spec(folder, "prepared", 1, on_long="error"), 1)


def test_lengths_that_are_lost_or_wrong_are_refused(tmp_path, folder):
  spec = _spec(folder, "jsonl", 0)
  out = rich.console.Console(quiet=True)
  made = pretokenize.run(spec, str(tmp_path), 300, out)["main"]
  shuffled = dataclasses.replace(
    spec, sources={"main": _source(kind="prepared", path=str(tmp_path / "main"))}, shuffle_windows=1
  )
  lengths = tmp_path / "main" / made["splits"]["train"]["lengths"]
  content = lengths.read_bytes()
  lengths.write_bytes(content[:-4])
  with pytest.raises(UserError, match=r"index.json says \d+ of \d+; delete the folder"):
    _rows(shuffled, 1)
  lengths.unlink()
  with pytest.raises(FileNotFoundError, match="lengths.uint32 does not exist; delete the folder"):
    _rows(shuffled, 1)
  pretokenize.run(spec, str(tmp_path), 300, out)
  assert lengths.read_bytes() == content
  index = tmp_path / "main" / "index.json"
  old = json.loads(index.read_text())
  del old["splits"]["train"]["lengths"]
  index.write_text(json.dumps(old))
  with pytest.raises(UserError, match="without the lengths.*set data.shuffle_windows=0"):
    _rows(shuffled, 1)
  _rows(dataclasses.replace(shuffled, shuffle_windows=0), 1)


def test_fingerprint_changes_with_the_order(folder):
  a, b, c = (loader.fingerprint(_spec(folder, "jsonl", w)) for w in (0, 7, 8))
  assert len({a, b, c}) == 3
