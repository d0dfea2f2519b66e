"""Files that are replaced whole: a writer that fails leaves the old file and nothing else."""

import resource

import pytest

from fp8jax import records
from fp8jax.errors import UserError


def test_a_file_that_cannot_be_written_is_named_and_leaves_no_part(tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "file").write_text("old")
  for name, message in (("folder", "Is a directory"), ("file/x", "Not a directory"),
                        ("none/x", "No such file or directory")):  # fmt: skip
    with pytest.raises(UserError, match=f"{name} cannot be written: {message}; name another place"):
      records.write_atomic(str(tmp_path / name), "new")
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # stands for a full disk
  try:
    with pytest.raises(UserError, match="file cannot be written: File too large; make room there"):
      records.write_atomic(str(tmp_path / "file"), b"x" * 2**17)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  with pytest.raises(KeyboardInterrupt), records.replacing(str(tmp_path / "file")) as part:
    open(part, "w").close()
    raise KeyboardInterrupt
  assert (tmp_path / "file").read_text() == "old"
  assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_an_error_of_the_content_is_not_called_one_of_the_file(tmp_path):
  with pytest.raises(FileNotFoundError, match="weights"), records.replacing(str(tmp_path / "file")):
    open(tmp_path / "weights")


def test_a_folder_that_cannot_be_made_names_its_setting(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="--workdir=.*file cannot be a folder: File exists"):
    records.make_folder(str(tmp_path / "file"), "--workdir")


@pytest.mark.parametrize("last, is_whole", [
  ("", False), ('{"a": 2', False), ('{"a": "é', False), ("[" * 100_000, False), ("12", False),
  ('{"a": "\udcff"}', False), ('{"a": 2}', True), ('{"a": 2}\n', True),
])  # fmt: skip
def test_lines_are_appended_after_the_last_whole_one(tmp_path, last, is_whole):
  """A process was killed while it wrote; a row that lacks its end alone is a row."""
  path, first = tmp_path / "x.jsonl", '{"a": 1}\n'
  path.write_text(first + last, errors="surrogateescape")
  whole = [(first, {"a": 1}), *[('{"a": 2}\n', {"a": 2})] * is_whole]
  assert list(records.rows(str(path), dict[str, records.Number], "")) == whole
  with records.appending(str(path)) as f:
    records.append(f, {"a": float("inf")})
    records.append(f, {"é": 1}, ascii=False)
  lines = list(records.rows(str(path), dict[str, records.Number], ""))
  assert lines == [*whole, ('{"a": "inf"}\n', {"a": "inf"}), ('{"é": 1}\n', {"é": 1})]
