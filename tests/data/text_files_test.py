"""Files that users bring are read as text, or refused with file and line."""

import pytest

from fp8jax.data import text_files
from fp8jax.errors import UserError

GOOD = b'{"a": 1}\r\n\n'
BAD = {
  "bad UTF-8": (GOOD + b'{"a": "\xff"}', "line 3: bad UTF-8 at byte 7; save the file as UTF-8"),
  "half a pair": (GOOD + b'{"a": ["\\ud83d"]}', "line 3 has a lone surrogate"),
  "deep": (GOOD + b'{"a": ' + b"[" * 100_000, "line 3 is not JSON.*broken JSON"),
  "a long number": (GOOD + b'{"a": ' + b"9" * 5000 + b"}", "line 3 is not JSON.*broken JSON"),
  "an array on a line": (GOOD + b"[{}]", "line 3 .* begins a JSON array.*jq -c"),
  "an indented array": (b'[\n  {"a": 1}\n]', "line 1 .* begins a JSON array, expected one object"),
  "a number": (GOOD + b"5", "line 3 is int, expected a JSON object"),
}


@pytest.mark.parametrize("content, message", BAD.values(), ids=BAD)
def test_lines_that_are_no_objects_are_named(tmp_path, content, message):
  (tmp_path / "a.jsonl").write_bytes(content)
  with pytest.raises(UserError, match="a.jsonl, " + message):
    text_files.json_lines(str(tmp_path / "a.jsonl"))


def test_marks_line_ends_and_pairs_are_read(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(b"\xef\xbb\xbf" + GOOD + b'{"b": "\\ud83d\\ude00\xe2\x80\xa8"}')
  found = [(where.rpartition(", ")[2], row) for where, row in text_files.json_lines(str(path))]
  assert found == [("line 1", {"a": 1}), ("line 3", {"b": "\U0001f600\u2028"})]
  assert text_files.read(str(path), "").startswith('{"a": 1}\n\n{')
  assert text_files.read(str(path), "", ends=True).startswith('{"a": 1}\r\n\n{')


def test_files_that_cannot_be_read_are_named_with_the_remedy(tmp_path):
  with pytest.raises(UserError, match="cannot be read: Is a directory; name a file"):
    text_files.read(str(tmp_path), "name a file")
  with pytest.raises(FileNotFoundError, match="none.txt does not exist; name a file"):
    text_files.read(str(tmp_path / "none.txt"), "name a file")
