"""--job=prepare writes the batches that training reads; other readers are refused."""

import json
import math

import debug_runs
import numpy as np
import pytest
import tokenizers

from fp8jax.config import resolve
from fp8jax.data import loader, tokenize
from fp8jax.run import workdir


@pytest.mark.parametrize("heldout", [0.0, 0.3])
def test_prepare_keeps_batches_or_at_least_documents(run_job, tmp_path, rng, heldout):
  """Bit for bit where nothing is held out; else each split is shuffled on its own, and only the
  documents of an epoch agree: here, where each fills a window, its rows.
  """
  documents = [rng.bytes(64).hex() for _ in range(24)]
  raw = debug_runs.write_corpus(tmp_path / "corpus.jsonl", documents) | {
    "data.heldout_fraction": heldout
  }
  raw |= {"prepare.shard_tokens": 129 * 5, "data.shuffle_windows": 0}
  code, stdout, stderr = run_job("prepare", debug_runs.config(**raw), tmp_path)
  index = json.loads(stdout)["main"]
  folder = tmp_path / "prepared" / "main"
  assert code == 0 and debug_runs.read_json(folder / "index.json") == index
  train_split = index["splits"]["train"]
  count = sum(not tokenize.is_held_out({"text": d}, heldout) for d in documents)
  assert (train_split["documents"], train_split["tokens"]) == (count, count * 129)
  assert len(train_split["files"]) == math.ceil(count / 5)
  assert {p.name for p in folder.iterdir()} == {
    "index.json",
    *(name for s in index["splits"].values() for name in (*s["files"], s["lengths"])),
  }  # fmt: skip
  assert f"train: {count} documents" in stderr

  prepared = {"data.sources.main.kind": "prepared", "data.sources.main.path": str(folder)}
  a, b = (
    debug_runs.take(debug_runs.config(**changes), count // 2) for changes in (raw, raw | prepared)
  )
  if heldout:
    rows = [sorted(row.tobytes() for batch in x for row in batch["tokens_BL"]) for x in (a, b)]
    assert count % 2 or rows[0] == rows[1]
    held = [
      sorted(
        batch["tokens_BL"].tobytes()
        for batch in loader.heldout_batches(
          resolve.resolve_data(debug_runs.config(**changes)), "main", 1, 24 - count
        )
      )
      for changes in (raw, raw | prepared)
    ]
    assert held[0] == held[1] and len(set(held[0])) == 24 - count > 0
  else:
    for x, y in zip(a, b, strict=True):
      assert x.keys() == y.keys()
      for key in x:
        np.testing.assert_array_equal(x[key], y[key])


def test_prepared_data_refuse_another_tokenizer_or_split(run_job, tmp_path):
  raw = debug_runs.write_corpus(tmp_path / "corpus.jsonl", [str(i) * 50 for i in range(20)])
  assert run_job("prepare", debug_runs.config(**raw), tmp_path)[0] == 0
  other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"1": 0, "<end>": 1}, unk_token="1"))
  other.save(str(tmp_path / "tokenizer.json"))
  folder = str(tmp_path / "prepared" / "main")
  prepared = {"data.sources.main.kind": "prepared", "data.sources.main.path": folder}
  tokenizer = {"data.tokenizer": str(tmp_path / "tokenizer.json"), "data.eos": "<end>"}
  for job, changes, message in (
    ("train", tokenizer, f"{folder} was prepared with another tokenizer"),
    (
      "evaluate",
      {"data.heldout_fraction": 0.2},
      f"{folder} was prepared with data.heldout_fraction=0.1",
    ),
    ("prepare", {}, "data.sources.main is prepared already"),
  ):
    code, stdout, stderr = run_job(job, debug_runs.config(**prepared, **changes), tmp_path / "run")
    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: ") and message in stderr
  assert not (tmp_path / "run").exists()


def test_a_folder_that_another_call_writes_is_refused(run_job, tmp_path):
  """Two that write the same files may leave one's index with the other's documents."""
  with workdir.locked(str(tmp_path / "prepared")):
    code, _, stderr = run_job("prepare", debug_runs.config(), tmp_path)
  assert code == 1 and "in use by another run (process" in stderr and "another --out" in stderr
  assert [p.name for p in (tmp_path / "prepared").iterdir()] == [".lock"]
