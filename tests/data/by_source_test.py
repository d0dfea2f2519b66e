"""Tokens and documents of a batch by source, counted by hand from uneven files."""

import dataclasses
import json

import chats
import debug_runs
import numpy as np

from configs import base
from fp8jax.config import resolve
from fp8jax.data import batch_sharding, loader
from fp8jax.report import charts, files


def write(path, documents):
  path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
  return base.source(kind="jsonl", path=str(path))


def test_share_number_and_length_of_documents_are_those_of_the_batch(tmp_path):
  """Bytes and an end: a document of n letters is n + 1 tokens; windows have 8 and one more."""
  c = debug_runs.config()
  c.data.tokenizer, c.data.heldout_fraction, c.data.shuffle_windows = "bytes", 0.0, 0
  c.seq_len, c.global_batch = 8, 4
  c.data.sources = {}
  c.data.sources.long = {**write(tmp_path / "long", ["a" * 40, "b" * 27]), "weight": 3.0}
  c.data.sources.short = {**write(tmp_path / "short", ["x", "yz", "w" * 4]), "weight": 1.0}
  spec = dataclasses.replace(resolve.resolve_data(c), tells_sources=True)
  batches = batch_sharding.TrainBatches(spec, debug_runs.spec(debug_runs.config()).run.layout, 4, 1)
  seen, states = [], []
  for _ in range(6):
    batch, got = next(batches.iterator), batches.metrics()
    states.append(batches.iterator.get_state())
    assert "by_source" not in batch and all(x.shape == (4, 8) for x in batch.values())
    tokens, parts = {"long": 0, "short": 0}, {"long": 0, "short": 0}
    for row, segments, told in zip(*(batch[f"{k}_BL"] for k in ("tokens", "segments", "sources"))):
      name = "short" if set(bytes(row[row < 128].astype(np.uint8))) & set(b"xyzw") else "long"
      assert set(told) == {list(tokens).index(name)}
      tokens[name] += len(row)
      parts[name] += len(set(segments.tolist()))
    for name in tokens:
      of = [got[f"sources/{name}/{k}"] for k in ("share", "documents", "length")]
      assert of == [tokens[name] / 32, parts[name], tokens[name] / max(parts[name], 1)]
    seen.append(got)
  assert np.mean([s["sources/long/share"] for s in seen]) == 0.75
  assert {s["sources/short/documents"] for s in seen} > {2}  # windows of 9 cut at 2 + 3 + 5 tokens
  # The state of an iterator has none of it: older checkpoints resume.
  again = loader.train_batches(spec, 4)
  again.set_state(json.loads(json.dumps(states[2])))
  next(again)
  assert np.array_equal(again.by_source[:, 1], [seen[3][f"sources/{n}/documents"] for n in tokens])


def test_report_draws_shares_beside_weights(tmp_path):
  rows = [{"step": i, "loss": 1.0, "sources/a/share": s, "sources/b/share": 1 - s}
          for i, s in enumerate((0.25, 0.75), 1)]  # fmt: skip
  rows[0] |= {"sources/a/loss": 3.5, "sources/b/loss": 2.0}
  rows[1] |= {"sources/b/loss": 1.5}
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  resolved = {"data.sources.a.weight": 3.0, "data.sources.b.weight": 1.0}
  (tmp_path / "config.json").write_text(json.dumps({"resolved": resolved, "changed": {}}))
  run = files.read(str(tmp_path))
  rule, line = charts.spec(charts.by_source(run, "share"))["layer"]
  assert rule["data"]["values"] == [{"source": "a", "share": 0.75}, {"source": "b", "share": 0.25}]
  assert [(r["step"], r["source"], r["share"]) for r in line["data"]["values"]] == [
    (1, "a", 0.25), (2, "a", 0.75), (1, "b", 0.75), (2, "b", 0.25)
  ]  # fmt: skip
  losses = charts.spec(charts.by_source(run, "loss"))["data"]["values"]
  # A batch without tokens of "a" has no loss of it: no zero, no gap filled.
  assert [(r["step"], r["source"], r["loss"]) for r in losses] == [
    (1, "a", 3.5),
    (1, "b", 2),
    (2, "b", 1.5),
  ]


def test_conversations_of_a_step_are_counted_by_source(tmp_path):
  """An epoch is a step: all of three and all of five conversations, each less its first token."""
  written, sources = {}, {}
  for seed, (name, count) in enumerate({"a": 3, "b": 5}.items()):
    path = tmp_path / name / "rows.jsonl"
    written[name] = chats.write(path, count, seed=seed, longest=9)
    sources[name] = dict(base.source("jsonl", str(path), chat="messages"))
  spec = chats.spec("", sources=sources)
  steps = loader.train_batches(spec, 6)
  batch = next(steps)
  assert not {"by_source", "step", "sources_BL"} & set(batch)
  wanted = [(sum(len(chats.whole(c)) - 1 for c in of), len(of)) for of in written.values()]
  np.testing.assert_array_equal(steps.by_source, wanted)
  steps.close()
  telling = loader.train_batches(dataclasses.replace(spec, tells_sources=True), 6)
  told = next(telling)
  telling.close()
  sources = told.pop("sources_BL")
  assert sources.dtype == np.int32 and all(np.array_equal(told[k], batch[k]) for k in told)
  is_text = told["segments_BL"] > 0
  counted = [((sources == i) & is_text).sum() for i in range(2)]
  assert counted == [tokens for tokens, _ in wanted] and not sources[~is_text].any()
