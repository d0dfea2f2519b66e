"""Windows in shuffled order: the same windows, each once, elsewhere; on the fly and prepared."""

import collections
import dataclasses
import json

import grain
import numpy as np
import pytest
import texts

from fp8jax.data import loader, sources, window_index
from fp8jax.errors import UserError

LENGTH = 16
KEYS = ("tokens", "tokens_segment_ids", "tokens_positions")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Documents from 1 token to 30 windows, as JSON lines and prepared."""
  path = tmp_path_factory.mktemp("corpus")
  rng = np.random.default_rng(0)
  sizes = [1, 2, LENGTH, LENGTH + 1, 500, *rng.integers(1, 90, 30), *rng.integers(1, 14, 40)]
  documents = ["".join(map(chr, rng.integers(97, 123, size))) for size in sizes]
  texts.write(path / "corpus.jsonl", documents)
  texts.prepare(_spec(path, "jsonl", 0), path / "p")
  return path


def _spec(folder, kind, windows, **values):
  path = {"jsonl": folder / "corpus.jsonl", "prepared": folder / "p" / "main"}[kind]
  values = {"heldout": 0.2, "shuffle_windows": windows} | values
  return texts.spec(texts.source(kind, path), LENGTH, **values)


def _rows(spec, n, batch=1, **kwargs) -> list[bytes]:
  """The first n windows as bytes of everything the model reads."""
  batches = texts.take(spec, -(-n // batch), batch, **kwargs)
  rows = [b"".join(b[k][i].tobytes() for k in sorted(b)) for b in batches for i in range(batch)]
  return rows[:n]


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
    assert collections.Counter(a) == collections.Counter(b) and a != b
    assert sum(x == y for x, y in zip(a, b)) < len(a) // 4


def test_blocks_on_the_fly_hold_the_same_windows_shuffled(folder):
  """Every block is a permutation of its windows, another one each and in every source."""
  main = _spec(folder, "jsonl", 0).sources["main"]
  orders = []
  for name in ("main", "other"):
    a, b = (_rows(_spec(folder, "jsonl", w, sources={name: main}), 60) for w in (0, 20))
    for start in (0, 20, 40):
      one, other = a[start : start + 20], b[start : start + 20]
      assert collections.Counter(one) == collections.Counter(other)
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
    states.append(iterator.get_state())
    batches.append(next(iterator))
  iterator.close()
  assert all(len(json.dumps(state)) < 3000 for state in states)
  for step in (0, 1, 3, 10, 11, 12, 30):
    want = batches[step : step + 9]
    assert texts.are_same(texts.resume(spec, states[step], len(want), 2), want)


@pytest.mark.parametrize(
  "kind, windows", [SHUFFLED[0], pytest.param(*SHUFFLED[1], marks=pytest.mark.slow)]
)
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
      assert collections.Counter(together) == collections.Counter(whole[4 * step : 4 * step + 4])


def test_processes_shuffle_shares_of_their_own_on_the_fly(folder):
  for i in range(2):
    a, b = (_rows(_spec(folder, "jsonl", w), 24, shard=loader.Shard(i, 2)) for w in (0, 12))
    assert collections.Counter(a) == collections.Counter(b) and a != b


def test_heldout_windows_stay_in_their_order(folder):
  for kind in ("jsonl", "prepared"):
    a, b = (list(loader.heldout_batches(_spec(folder, kind, w), "main", 2, 6)) for w in (0, 9))
    assert texts.are_same(a, b)


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
  made, prepared = texts.prepare(spec, tmp_path)
  shuffled = dataclasses.replace(spec, sources={"main": prepared}, shuffle_windows=1)
  lengths = tmp_path / "main" / made["splits"]["train"]["lengths"]
  content = lengths.read_bytes()
  lengths.write_bytes(content[:-4])
  with pytest.raises(UserError, match=r"index.json says \d+ of \d+; delete the folder"):
    _rows(shuffled, 1)
  lengths.unlink()
  with pytest.raises(FileNotFoundError, match="lengths.uint32 does not exist; delete the folder"):
    _rows(shuffled, 1)
  texts.prepare(spec, tmp_path)
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
