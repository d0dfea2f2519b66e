"""Files that carry `truncation`, `padding` or dropout (llm-compressor#2917, #1418).

The oracle is the tokenizers library with both cleared, which is how transformers calls it.
"""

import hashlib
import json
import pathlib
import pickle

import case_inputs
import pytest
import tokenizers

from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError

CUT = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
FILL = {"direction": "Left", "pad_to_multiple_of": None, "pad_id": 3, "pad_type_id": 0}
FILL["pad_token"] = "<pad>"
FLAGS = {"single_word": True, "lstrip": True, "rstrip": False, "normalized": True, "special": True}
STATES = {
  "truncation": {"truncation": CUT},
  "fixed padding": {"padding": FILL | {"strategy": {"Fixed": 40}}},
  "longest padding": {"padding": FILL | {"strategy": "BatchLongest"}},
  "both": {"truncation": CUT, "padding": FILL | {"strategy": {"Fixed": 40}}},
}
OBEYED = {
  "normalizer": {"normalizer": {"type": "Lowercase"}},
  "flags": {"added_tokens": [{"id": 1, "content": "<|im_start|>", **FLAGS}]},
  "nothing": {},
}
TEXTS = ["A <|im_start|> b<|im_start|>c <pad>", "word " * 100, "<|im_end|>"]


@pytest.mark.parametrize("patch", [*STATES.values(), *OBEYED.values()], ids=[*STATES, *OBEYED])
def test_ids_are_those_of_the_library_without_lengths(tmp_path, patch):
  folder = case_inputs.tokenizer_folder(tmp_path, patch=patch)
  oracle = tokenizers.Tokenizer.from_file(folder + "/tokenizer.json")
  oracle.no_truncation()
  oracle.no_padding()
  want = [oracle.encode(text, add_special_tokens=False) for text in TEXTS]
  ours = pickle.loads(pickle.dumps(Tokenizer(folder)))  # as worker processes receive it
  eos = oracle.token_to_id("<|im_end|>")
  for made in ([ours.encode(t) for t in TEXTS], ours.encode_batch(TEXTS)):
    assert [ids.tolist() for ids in made] == [[*w.ids, eos] for w in want]
  for text, w in zip(TEXTS, want, strict=True):
    ids, offsets = ours.encode_with_offsets(text)
    assert (ids.tolist(), [tuple(o) for o in offsets.tolist()]) == (w.ids, w.offsets)
    assert ours.encode_prompt(text) == w.ids


def test_fingerprint_changes_with_what_the_file_would_have_cut(tmp_path):
  prints = {}
  for name, patch in {**STATES, **OBEYED}.items():
    path = pathlib.Path(case_inputs.tokenizer_folder(tmp_path / name, patch=patch))
    earlier = hashlib.sha256((path / "tokenizer.json").read_bytes() + b"|2").hexdigest()[:16]
    prints[name] = Tokenizer(str(path)).fingerprint
    assert (prints[name] == earlier) == (name in OBEYED)
  assert len(set(prints.values())) == len(prints)


def test_ids_that_are_drawn_are_refused(tmp_path):
  path = pathlib.Path(case_inputs.tokenizer_folder(tmp_path)) / "tokenizer.json"
  state = json.loads(path.read_text())
  state["model"]["dropout"] = 0.25
  path.write_text(json.dumps(state))
  with pytest.raises(UserError, match="tokenizer.json has model.dropout=0.25.*set it to null"):
    Tokenizer(str(path.parent)).fingerprint  # noqa: B018
