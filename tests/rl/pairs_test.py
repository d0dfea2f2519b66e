"""Preference pairs: tokens by hand of every form of a line, rows, refusals, resuming."""

import functools
import json
import types

import chats
import numpy as np
import pytest

from fp8jax import axes
from fp8jax.data import loader
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.data.config import DataConfig
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError
from fp8jax.rl import pairs

EOS = 256
TEMPLATE = functools.partial(ChatTemplate, chats.TEMPLATE)
DATA = DataConfig({}, Tokenizer("bytes"), seq_len=24)
ENCODE, ALL = pairs.Encoder(DATA, TEMPLATE), loader.Shard()
ASK, YES, NO = chats.user("2+2?"), chats.assistant("4"), chats.assistant("22")


def ids(text):
  return tuple(text.encode())


def by_hand(prompt, chosen, rejected):
  return pairs.Pair(ids(prompt), (*ids(chosen), EOS), (*ids(rejected), EOS))


TEXT = by_hand("2+2?", " 4", " 22")
CHAT = by_hand("u:2+2?;a:", "4;", "22;")
LONGER = by_hand("u:2+2?;a:5;u:no;a:", "4;", "22;")
TURNS = [ASK, chats.assistant("5"), chats.user("no")]


@pytest.mark.parametrize(
  ("row", "want"),
  [
    ({"prompt": "2+2?", "chosen": " 4", "rejected": " 22"}, TEXT),
    ({"chosen": "2+2? 4", "rejected": "2+2? 22"}, by_hand("2+2? ", "4", "22")),
    ({"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, CHAT),
    ({"prompt": "2+2?", "chosen": [YES], "rejected": [NO]}, CHAT),
    ({"chosen": [ASK, YES], "rejected": [ASK, NO]}, CHAT),
    ({"prompt": "2+2?", "chosen": [ASK, YES], "rejected": [ASK, NO]}, CHAT),  # repeats it
    ({"prompt": TURNS, "chosen": [YES], "rejected": [NO]}, LONGER),
    ({"chosen": [*TURNS, YES], "rejected": [*TURNS, NO]}, LONGER),
  ],
)
def test_every_form_of_a_line_is_the_same_pair(row, want):
  assert ENCODE(row, "f") == want


class Merges:
  """A tokenizer of letters in which "ab" is one token."""

  eos_id = 0

  def encode_prompt(self, text, add_special_tokens=True):
    return list(text.replace("ab", "\N{BULLET}").encode("utf-16-le")[::2])


def test_a_token_across_the_end_of_a_prompt_belongs_to_the_answers():
  encode = pairs.Encoder(DataConfig({}, Merges(), seq_len=9), TEMPLATE)
  made = encode({"prompt": "xa", "chosen": "bc", "rejected": "cc"}, "f")
  merged = Merges().encode_prompt("ab")
  assert made == ((120,), (*merged, 99, 0), (97, 99, 99, 0)) and len(merged) == 1
  other = encode({"prompt": "xa", "chosen": "cc", "rejected": "bc"}, "f")
  assert other == (made.prompt, made.rejected, made.chosen)


def test_rows_are_laid_out_as_written_by_hand():
  made = [pairs.Pair((1, 2), (3, 9), (4, 5, 9)), pairs.Pair((7,), (8, 9), (9,))]
  batch = pairs.laid_out(made, 5, rows=6)
  assert batch["tokens_BL"].tolist() == [
    [1, 2, 3, 0, 0], [1, 2, 4, 5, 0], [7, 8, 0, 0, 0], [7, 0, 0, 0, 0], [0] * 5, [0] * 5
  ]  # fmt: skip
  assert batch["targets_BL"].tolist()[:4] == [
    [2, 3, 9, 0, 0], [2, 4, 5, 9, 0], [8, 9, 0, 0, 0], [9, 0, 0, 0, 0]
  ]  # fmt: skip
  assert batch["positions_BL"][1].tolist() == [0, 1, 2, 3, 0]
  assert batch["segments_BL"].sum(1).tolist() == [3, 4, 2, 1, 0, 0]
  weights = np.zeros((6, 5), np.float32)
  weights[0, 1:3], weights[1, 1:4], weights[2, :2], weights[3, 0] = 1 / 8, 1 / 12, 1 / 8, 1 / 4
  np.testing.assert_array_equal(batch["weights_BL"], weights)


def write(path, rows):
  path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
  return str(path)


GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
  ("bad", "message"),
  [
    ({"prompt": "a", "chosen": "b"}, r"missing 'rejected' \(has 'prompt', 'chosen'\); write {"),
    ("7", r"missing 'chosen' \(has int\)"),
    ("{", r"broken JSON .*; write {"),
    ({**GOOD, "rejected": "b"}, "chosen equals rejected"),
    ({"prompt": [ASK], "chosen": [YES], "rejected": [YES]}, "chosen equals rejected"),
    ({"chosen": "b", "rejected": "c"}, "no token of a prompt in common"),
    ({"chosen": [YES], "rejected": [NO]}, "missing 'prompt'"),
    ({**GOOD, "rejected": "c" * 24}, "rejected with its prompt has 26 tokens, .* seq_len . 1 = 25"),
    ({"chosen": [ASK, YES], "rejected": [ASK]}, "rejected has .. behind the 1 messages"),
    ({"chosen": [ASK, YES, ASK], "rejected": [ASK, NO]}, "expected one message of the assistant"),
    ({"prompt": "a", "chosen": [{"role": "x"}], "rejected": [NO]}, "chosen: message 0 .*role 'x'"),
    ({"prompt": [{"role": "system", "content": "s"}, ASK], "chosen": [YES], "rejected": [NO]},
     "no system text here"),
  ],
)  # fmt: skip
def test_a_bad_line_stops_before_the_first_step_with_its_number(tmp_path, bad, message):
  path = write(tmp_path / "p.jsonl", [GOOD, GOOD, bad])
  with pytest.raises(UserError, match=rf"p.jsonl, line 3: .*{message}"):
    pairs.batches(pairs.Pairs(path, ENCODE), 2, DATA, ALL)


def test_too_few_pairs_and_an_array_are_refused(tmp_path):
  few = pairs.Pairs(write(tmp_path / "p.jsonl", [GOOD]), ENCODE)
  with pytest.raises(UserError, match="rl.pairs has 1 pairs, expected at least the 2 of a step"):
    pairs.batches(few, 4, DATA, ALL)
  array = pairs.Pairs(write(tmp_path / "q.jsonl", ["[", "]"]), ENCODE)
  with pytest.raises(UserError, match="q.jsonl: it begins a JSON array"):
    pairs.batches(array, 2, DATA, ALL)


def test_batches_go_on_from_a_state_and_see_every_pair(tmp_path):
  rows = [{"prompt": "q", "chosen": chr(97 + n), "rejected": "-"} for n in range(5)]
  stored = pairs.Pairs(write(tmp_path / "p.jsonl", rows), ENCODE)
  stream = pairs.batches(stored, 2, DATA, ALL)
  whole = []
  for _ in range(10):
    whole.append(next(stream)["targets_BL"])
    if len(whole) == 3:
      state = json.loads(json.dumps(stream.get_state()))
  resumed = pairs.batches(stored, 2, DATA, ALL)
  resumed.set_state(state)
  for want in whole[3:]:
    np.testing.assert_array_equal(next(resumed)["targets_BL"], want)
  seen = [int(batch[0, 0]) for batch in whole]
  assert sorted(seen[:5]) == sorted(seen[5:]) == [97, 98, 99, 100, 101] and seen[:5] != seen[5:]
  assert all(batch[1, 0] == ord("-") for batch in whole)
  run = types.SimpleNamespace(layout=axes.LOCAL)
  spec = types.SimpleNamespace(run=run, data=DATA, microbatch=2, grad_accum_steps=1)
  assert pairs.Batches(spec, stored).ends() == [EOS]
  before = stored.fingerprint()
  write(tmp_path / "p.jsonl", rows[::-1])
  assert pairs.Pairs(str(tmp_path / "p.jsonl"), ENCODE).fingerprint() != before
