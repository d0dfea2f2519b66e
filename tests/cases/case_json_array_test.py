"""Files that are no JSON lines (unsloth#337, datasets#6460): an array, a byte order mark."""

import gzip
import json

import pyarrow
import pytest

from configs import base
from fp8jax.config import resolve
from fp8jax.data import sources
from fp8jax.errors import ConfigError

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_an_array_is_called_so_and_not_passed_over(tmp_path, indent, policy):
  (tmp_path / "b.jsonl").write_text("\n" + json.dumps([ROW, ROW], indent=indent))
  (tmp_path / "a.jsonl").write_text(json.dumps(ROW))
  c = base.get_config()
  c.data.sources = {"main": base.source("jsonl", str(tmp_path / "*.jsonl"), chat="messages")}
  c.data.on_malformed = policy
  with pytest.raises(ConfigError, match="b.jsonl: it begins a JSON array, expected one.*jq -c"):
    resolve.resolve_steps(c)
  source = sources.open_source(c.data.sources.main)
  assert "begins a JSON array" in source[2]["error"] or indent
  with_array = sources.json_line(b"[", sources.Rows("messages", "messages"), "f:1")
  assert "begins a JSON array" in with_array["error"] and with_array["origin"] == "f:1"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf \n"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_array_in_a_compressed_file_is_refused_at_the_start(tmp_path, suffix, mark):
  packed = gzip.compress if suffix == ".gz" else lambda b: pyarrow.compress(b, "zstd", asbytes=True)
  (tmp_path / f"a.jsonl{suffix}").write_bytes(packed(json.dumps(ROW).encode()))
  (tmp_path / f"b.jsonl{suffix}").write_bytes(packed(mark + json.dumps([ROW], indent=2).encode()))
  c = base.get_config()
  c.data.sources = {"main": base.source("jsonl", str(tmp_path / f"*{suffix}"), "messages")}
  c.data.on_malformed = "skip"
  with pytest.raises(ConfigError, match=f"b.jsonl{suffix}: it begins a JSON array.*jq -c"):
    resolve.resolve_data(c)
  (tmp_path / f"b.jsonl{suffix}").write_bytes(packed(b"{}" * 99)[:9])  # damage: prepare names it
  resolve.resolve_data(c)


def test_a_mark_before_the_first_line_is_no_text(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROW).encode())
  (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwords")
  source = sources.open_source(base.source("jsonl", str(tmp_path / "a.jsonl"), chat="messages"))
  assert source[0]["messages"] == ROW["messages"]
  assert sources.open_source(base.source("text", str(tmp_path / "a.txt")))[0]["text"] == "words"
