"""Steps of exactly so many samples in so many windows; nothing lost, repeated or mixed."""

import collections
import dataclasses
import json

import chats
import grain
import numpy as np
import pytest
import texts

from configs import base
from fp8jax.config import checks, resolve
from fp8jax.data import config as data_config
from fp8jax.data import loader, sources
from fp8jax.data.chat import packing, samples
from fp8jax.errors import ConfigError, UserError

COUNT, WINDOWS, WHOLE = 44, 6, loader.Shard()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("chats")
  chats.write(path / "a.jsonl", COUNT, longest=15)
  return path


@pytest.fixture(scope="module")
def rows(folder):
  return [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]


def _steps(spec, number, shard=WHOLE, windows=WINDOWS):
  return texts.take(spec, number, windows // shard.count, shard=shard)


def _segments(batch):
  """(whole text, trained text) of every segment that has a trained target."""
  found = []
  for row in range(len(batch["tokens_BL"])):
    one = {key: x[row] for key, x in batch.items()}
    for number in set(one["segments_BL"]):
      here = one["segments_BL"] == number
      np.testing.assert_array_equal(one["positions_BL"][here], np.arange(here.sum()))
      # Contiguous, and a target is the next token of the same segment.
      places = np.flatnonzero(here)
      assert places[-1] - places[0] + 1 == len(places)
      tokens, targets = one["tokens_BL"][here], one["targets_BL"][here]
      np.testing.assert_array_equal(tokens[1:], targets[:-1])
      weights = one["weights_BL"][here]
      if weights.any():
        text = bytes([*tokens.tolist(), int(targets[-1])]).decode()
        found.append((text, bytes(targets[weights == 1].tolist()).decode()))
      else:  # padding
        assert number == 0 and places[-1] == len(one["segments_BL"]) - 1
  return found


def test_steps_hold_their_samples_and_epochs_every_sample_once(folder, rows):
  """11 steps of 8 are two epochs of 44; the sixth lies in both."""
  steps = _steps(chats.spec(folder / "a.jsonl"), 11)
  found = []
  for batch in steps:
    assert {x.shape for x in batch.values()} == {(WINDOWS, chats.LENGTH)}
    segments = _segments(batch)
    assert len(segments) == 8
    found += segments
  want = collections.Counter((chats.whole(row), chats.trained_bytes(row)) for row in rows)
  assert collections.Counter(found) == want + want
  order = [text for text, _ in _segments(steps[0])]
  assert order != [chats.whole(row) for row in rows[:8]]


def test_every_epoch_is_another_permutation(folder):
  steps = loader.chat_steps(chats.spec(folder / "a.jsonl"), WINDOWS)
  order = np.concatenate([steps.numbers(step) for step in range(11)]).reshape(2, COUNT)
  np.testing.assert_array_equal(np.sort(order), [range(COUNT)] * 2)
  assert (order[0] == order[1]).sum() < COUNT // 4


def test_order_is_the_seeds_and_resumes_at_every_step(folder):
  spec = chats.spec(folder / "a.jsonl")
  want = _steps(spec, 9)

  same = texts.are_same
  assert same(want, _steps(spec, 9)) and same(want, _steps(dataclasses.replace(spec, workers=1), 9))
  assert not same(want, _steps(dataclasses.replace(spec, seed=1), 9))
  iterator = loader.train_batches(spec, WINDOWS)
  for step in range(8):
    again = texts.resume(spec, iterator.get_state(), 1, WINDOWS)
    assert same(again, want[step : step + 1])
    next(iterator)


def test_padding_and_nothing_else_is_segment_0(folder):
  """Of every maker of batches. No text has the byte 0, which fills what is left of a window."""
  chat = chats.spec(folder / "a.jsonl", heldout=0.3)
  path = texts.write(folder / "d.jsonl", ["x" * n for n in range(1, 60)])
  raw = texts.source("jsonl", path)
  _, prepared = texts.prepare(texts.spec(path, heldout=0.3), folder / "p")
  specs = [chat, *(
    dataclasses.replace(chat, sources={"main": of}, chat=None, on_long="split", shuffle_windows=w)
    for of, w in ((raw, 0), (raw, 5), (prepared, 0), (prepared, 5))
  )]  # fmt: skip
  for spec in specs:
    held = list(loader.heldout_batches(spec, "main", 2, 20))
    for batch in (*held, *_steps(spec, 4)):
      is_padding = batch["segments_BL"] == 0
      np.testing.assert_array_equal(is_padding, batch["tokens_BL"] == 0)
      assert not batch["weights_BL"][is_padding].any()
    assert not held[-1]["segments_BL"].any() and held[0]["segments_BL"].any(1).all()


@pytest.mark.parametrize("count", [2, 3])
def test_processes_take_different_windows_of_the_same_step(folder, count):
  spec = chats.spec(folder / "a.jsonl")
  parts = [_steps(spec, 3, loader.Shard(i, count)) for i in range(count)]
  for step, whole in enumerate(_steps(spec, 3)):
    together = np.concatenate([part[step]["tokens_BL"] for part in parts])
    assert sorted(map(bytes, together)) == sorted(map(bytes, whole["tokens_BL"]))


def test_windows_of_a_step_are_those_of_grains_first_fit():
  rng = np.random.default_rng(1)
  for _ in range(20):
    lengths = np.sort(rng.integers(1, 40, 24))[::-1]
    data = grain.MapDataset.source([{"x": np.full(n, i)} for i, n in enumerate(lengths)])
    packed = grain.experimental.FirstFitPackIterDataset(
      data.to_iter_dataset(), length_struct={"x": 40}, num_packing_bins=24, shuffle_bins=False
    )
    window = packing.first_fit(lengths, 40)
    want = [set(row["x"][row["x_segment_ids"] > 0].tolist()) for row in packed]
    assert [set(np.flatnonzero(window == w)) for w in range(window.max() + 1)] == want
  # The longest first, whatever the order: 6 + 4 and 5 + 5.
  assert packing.first_fit([4, 5, 6, 5], 10).tolist() == [0, 1, 0, 1]


def test_steps_that_need_more_windows_are_refused_before_training(folder):
  spec = chats.spec(folder / "a.jsonl")
  needed = loader.chat_steps(spec, 8).needed(50)
  assert 2 <= needed <= WINDOWS
  with pytest.raises(UserError, match=f"set global_batch={needed} or more"):
    loader.chat_steps(spec, needed - 1).check(needed)
  loader.chat_steps(spec, needed).check(needed)
  with pytest.raises(UserError, match="need . windows of 48 positions, global_batch=1"):
    _steps(spec, 1, windows=1)


def test_steps_without_end_are_looked_at_as_far_as_seconds_allow(folder, monkeypatch):
  made = loader.chat_steps(chats.spec(folder / "a.jsonl"), 8)
  monkeypatch.setattr(packing, "_LOOK_AHEAD", 83)  # 10 steps of 8 samples
  most = [packing.first_fit(made.samples.lengths[made.numbers(k)], 48).max() + 1 for k in range(10)]
  assert made.needed(10**15) == max(most)


def test_derived_numbers_are_bounded(folder):
  c = base.get_config()
  c.data.sources = {"main": base.source("jsonl", str(folder / "a.jsonl"), chat="messages")}
  c.data.tokenizer, c.data.chat_template = "bytes", str(folder / "t.jinja")
  (folder / "t.jinja").write_text(chats.TEMPLATE)
  c.data.on_long, c.data.heldout_fraction, c.data.samples_per_step = "error", 0.0, 8
  c.data.epochs = 1e18
  with pytest.raises(
    ConfigError, match=f"of {COUNT} samples are 5[0-9]{{18}} steps, at most 2147483647"
  ):
    resolve.resolve_steps(c)
  c.data.epochs, c.data.samples_per_step = 1.0, 8 * 256 + 1
  with pytest.raises(ConfigError, match="samples_per_step=2049 are more than the 2048 positions"):
    resolve.resolve_steps(c)
  c.data.samples_per_step, c.data.epochs = 8 * 256, 50.0
  assert resolve.resolve_steps(c)[1] == 50 * COUNT // 2048
  for share, part in ((0.29, 29), (0.57, 57), (0.58, 58), (0.999, 99), (1e18, 10**20)):
    assert checks.part_of(share, 100) == part
  assert all(checks.part_of(k / n, 10 * n) == 10 * k for n in range(1, 60) for k in range(n))


def test_held_out_conversations_are_packed_whole_and_never_trained(folder, rows):
  spec = chats.spec(folder / "a.jsonl", heldout=0.3)
  held = [s for b in loader.heldout_batches(spec, "main", 2, 20) for s in _segments_of_eval(b)]
  train = {text for batch in _steps(spec, 12) for text, _ in _segments(batch)}
  assert 5 < len(held) < 25 and not train & set(held)
  assert sorted(train | set(held)) == sorted(map(chats.whole, rows))
  whole = list(loader.heldout_batches(spec, "main", 6, 7))
  shares = (loader.heldout_batches(spec, "main", 2, 7, loader.Shard(i, 3)) for i in range(3))
  for batch, *parts in zip(whole, *shares, strict=True):
    for key, x in batch.items():
      assert np.array_equal(np.concatenate([part[key] for part in parts]), x), key


def _segments_of_eval(batch):
  found = []
  for tokens, targets, segments in zip(
    *(batch[f"{k}_BL"] for k in ("tokens", "targets", "segments"))
  ):
    for number in sorted(set(segments[targets > 0])):
      here = segments == number
      found.append(bytes([*tokens[here].tolist(), int(targets[here][-1])]).decode())
  return found


# --- policies ------------------------------------------------------------------------------------


def _turns(question, answer):
  return {"messages": [chats.user(question), chats.assistant(answer)]}


GOOD = [_turns("q", "fine")] * 8
ODD = {
  "long": (_turns("q", "x" * 60), "on_long", "skip", "67 tokens does not fit seq_len=48"),
  "untrained": (
    {"messages": [{"role": "user", "content": "alone"}]},
    "on_untrained", "skip", "a sample has no trained token",
  ),
  "empty": (_turns("q", " "), "on_malformed", "skip", "message 1, the assistant's, is empty"),
  "role": (
    {"messages": [{"role": "critic", "content": "x"}]},
    "on_malformed", "skip", "unknown role 'critic'",
  ),
  "refused": (
    {"messages": [{"role": "system", "content": "x"}, *_turns("q", "a")["messages"]]},
    "on_malformed", "skip", "the chat template refuses the conversation: no system text here",
  ),
}  # fmt: skip


@pytest.mark.parametrize("row, key, policy, problem", ODD.values(), ids=ODD)
def test_odd_conversations_stop_the_run_or_are_counted(tmp_path, row, key, policy, problem):
  path = tmp_path / "odd.jsonl"
  path.write_text("".join(json.dumps(r) + "\n" for r in (*GOOD, row)))
  with pytest.raises(UserError) as error:
    _steps(chats.spec(path), 1)
  assert problem in str(error.value) and f"{path}:9" in str(error.value)
  assert f"data.{key}='{policy}'" in str(error.value)
  counts = loader.DocumentCounts()
  spec = chats.spec(path, **{key: policy})
  iterator = loader.train_batches(spec, WINDOWS, counts=counts)
  assert len(_segments(next(iterator))) == 8
  what = {"on_long": "too long", "on_untrained": "untrained", "on_malformed": "malformed"}[key]
  assert counts.summary() == {what: 1}
  resumed = loader.DocumentCounts()
  again = loader.train_batches(spec, WINDOWS, counts=resumed)
  again.set_state(iterator.get_state())
  next(again)
  assert resumed.summary() == {}  # of the run as a whole, counted once


def test_a_sample_of_a_whole_window_fits_and_one_token_more_does_not(tmp_path):
  path = tmp_path / "edge.jsonl"
  around = len("u:q;a:;") - 1  # the last token has no successor
  for more, counts in ((0, {}), (1, {"too long": 1})):
    rows = [*GOOD, _turns("q", "x" * (chats.LENGTH - around + more))]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    index = samples.make_index(chats.spec(path, on_long="skip"))
    assert index.counts == counts and len(index.length) == 9 - more
    assert index.length.max() == (chats.LENGTH if not more else len("u:q;a:fine;") - 1)


def test_truncated_samples_keep_their_beginning_or_are_untrained(tmp_path):
  path = tmp_path / "long.jsonl"
  rows = [*GOOD[:7], _turns("q", "x" * 60), _turns("y" * 60, "late")]
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))
  with pytest.raises(UserError, match="no turn of the assistant begins in its first 48 tokens"):
    _steps(chats.spec(path, on_long="truncate"), 1)
  spec = chats.spec(path, on_long="truncate", on_untrained="skip")
  (batch,) = _steps(spec, 1)
  longest = max(_segments(batch), key=lambda pair: len(pair[0]))
  assert longest == ("u:q;a:" + "x" * 43, "x" * 43)
  assert loader.chat_index(spec).counts == {"truncated": 2, "untrained": 1}


def test_conversations_of_every_kind_of_source_are_the_same(tmp_path):
  import pyarrow
  import pyarrow.parquet

  rows = chats.write(tmp_path / "a.jsonl", 6)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
  found = {}
  for kind in ("jsonl", "parquet"):
    source = sources.open_source(base.source(kind, str(tmp_path / f"a.{kind}"), chat="messages"))
    found[kind] = [source[i]["messages"] for i in range(len(source))]
  assert found["jsonl"] == found["parquet"] == [row["messages"] for row in rows]


def test_set_of_the_datasets_library_is_read_from_its_folder(tmp_path):
  datasets = pytest.importorskip("datasets")
  rows = chats.write(tmp_path / "a.jsonl", 6)
  datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
  source = base.source("datasets", str(tmp_path / "saved"), chat="messages")
  opened = sources.open_source(source)
  assert [opened[i]["messages"] for i in range(6)] == [row["messages"] for row in rows]
  assert opened.files() and loader.source_fingerprint(source)
  with pytest.raises(UserError, match="datasets cannot open"):
    len(sources.open_source(base.source("datasets", str(tmp_path / "gone"), chat="messages")))


def test_index_counts_positions_and_trained_targets(folder, rows):
  index = samples.make_index(chats.spec(folder / "a.jsonl"))
  np.testing.assert_array_equal(index.length, [len(chats.whole(r)) - 1 for r in rows])
  np.testing.assert_array_equal(index.trained, [len(chats.trained_bytes(r)) for r in rows])
  assert index.record.tolist() == list(range(COUNT)) and not index.counts


def test_another_reading_of_the_same_rows_is_other_data(tmp_path, monkeypatch):
  """A run of an older reading of conversations is not continued unasked."""
  chats.write(tmp_path / "c.jsonl", 4)
  spec = chats.spec(tmp_path / "c.jsonl")
  before = loader.fingerprint(spec)
  monkeypatch.setattr(data_config, "_READING", data_config._READING - 1)
  assert loader.fingerprint(spec) != before


@pytest.mark.parametrize("most, is_said", [(COUNT - 1, True), (COUNT, False)])
def test_more_conversations_than_are_read_at_once_are_said(
  folder, monkeypatch, capsys, most, is_said
):
  monkeypatch.setattr(samples, "_MANY", most)
  samples.make_index(chats.spec(folder / "a.jsonl"))
  line = f"reading {COUNT} conversations once, to know the lengths of their samples\n"
  assert capsys.readouterr().err == line * is_said
