"""The folder of an export: an earlier export is moved away as a whole before the new one comes."""

import json
import os
import pathlib
import types

import pytest

from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError
from fp8jax.export import build
from fp8jax.export import folder as export_folder

OLD = {"config.json": "old", "model.safetensors": "old weights", "README.md": "old card"}
NEW = {"config.json": "new", "model-00001-of-00001.safetensors": "new weights"}
MINE = {"notes.txt": "mine"}


def _written(folder: pathlib.Path, files: dict[str, str]):
  folder.mkdir(exist_ok=True)
  export_folder.claim(str(folder), files)
  for name, text in files.items():
    (folder / name).write_text(text)


def _read(folder: pathlib.Path) -> dict[str, str]:
  """The files of an export in a folder, those alone that its manifest names; {} without one."""
  if not (folder / export_folder.MANIFEST).is_file():
    return {}
  stated = json.loads((folder / export_folder.MANIFEST).read_text())["files"]
  return {n: (folder / n).read_text() for n in stated if (folder / n).exists()}


def _folders(root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
  """(part, target) of an export over an earlier one, which holds a file of the user's."""
  part, target = root / "target.part", root / "target"
  _written(target, OLD)
  for name, text in MINE.items():
    (target / name).write_text(text)
  _written(part, NEW)
  return part, target


CALLS = ("rename", "replace", "remove", "rmdir")


class Killed(BaseException):
  pass


def _counted(monkeypatch, on_call):
  """Every change of a folder goes through on_call(number of the call) first."""
  number = 0

  def watched(change, *paths):
    nonlocal number
    number += 1
    on_call(number)
    return change(*paths)

  for name in CALLS:
    real = getattr(os, name)
    monkeypatch.setattr(os, name, lambda *paths, real=real: watched(real, *paths))


def test_wherever_a_move_is_killed_one_export_is_whole_and_the_next_goes_on(tmp_path_factory):
  seen, last, is_over = set(), 0, False
  while not is_over:
    last += 1
    root = tmp_path_factory.mktemp("killed")
    part, target = _folders(root)
    with pytest.MonkeyPatch.context() as patch:

      def on_call(number, last=last):
        if number >= last:  # a dead process does nothing more, whatever it would catch
          raise Killed

      _counted(patch, on_call)
      try:
        export_folder.move(str(part), str(target))
        is_over = True
      except Killed:
        pass
    at, aside = _read(target), _read(root / "target.replaced")
    assert OLD in (at, aside) or at == NEW, (last, at, aside)
    seen.add((at == OLD, at == NEW, aside == OLD))
    export_folder.recover(str(target))
    assert _read(target) in (OLD, NEW) and (target / "notes.txt").read_text() == "mine"
    assert not (root / "target.replaced").exists()
    _written(part, NEW)
    export_folder.move(str(part), str(target))
    assert _read(target) == NEW
    assert set(os.listdir(target)) == {*NEW, *MINE, export_folder.MANIFEST}
    assert os.listdir(root) == ["target"]
  # Before the first rename, between the two, after both, and while the earlier one is deleted.
  assert seen == {(True, False, False), (False, False, True), (False, True, True),
                  (False, True, False)}  # fmt: skip


@pytest.mark.parametrize("failing", [1, 2])
def test_a_move_that_the_system_refuses_leaves_the_earlier_export(tmp_path, monkeypatch, failing):
  part, target = _folders(tmp_path)

  def on_call(number):
    if number == failing:
      raise PermissionError(1, "no", str(target))

  _counted(monkeypatch, on_call)
  with pytest.raises(PermissionError):
    export_folder.move(str(part), str(target))
  assert _read(target) == OLD and _read(part) == NEW
  assert sorted(os.listdir(target.parent)) == ["target", "target.part"]


def test_a_move_goes_through_a_link_and_leaves_what_is_of_another_origin(tmp_path):
  part, target = _folders(tmp_path)
  link = tmp_path / "link"
  link.symlink_to(target)
  export_folder.move(str(part), str(link))
  assert link.is_symlink() and _read(target) == NEW and _read(link) == NEW
  _written(part, OLD)
  aside = tmp_path / "target.replaced"
  aside.mkdir()
  (aside / "thesis.txt").write_text("mine")
  with pytest.raises(UserError, match="holds 'thesis.txt' and was not written by"):
    export_folder.move(str(part), str(target))
  assert _read(target) == NEW and (aside / "thesis.txt").read_text() == "mine"


def test_a_disk_that_is_full_at_once_leaves_nothing_that_blocks_the_next_export(tmp_path):
  part = tmp_path / "target.part"
  part.mkdir()
  (part / f"{export_folder.MANIFEST}.part").write_text("{")  # the manifest, cut off
  export_folder.check(str(part))
  export_folder.discard(str(part))
  assert not part.exists()


def test_a_run_without_a_folder_exports_the_tokenizer_that_it_learned_with(tmp_path):
  for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "mine.json"):
    (tmp_path / name).write_text("{}")
  (tmp_path / "mine.jinja").write_text("x")

  def files(path, chat_template=""):
    tokenizer = Tokenizer(str(path))
    return build._own_tokenizer(
      types.SimpleNamespace(tokenizer=tokenizer, chat_template=chat_template)
    )

  own = {name: str(tmp_path / name) for name in ("tokenizer.json", "tokenizer_config.json")}
  assert files(tmp_path) == files(tmp_path / "tokenizer.json") == own
  # Neighbours of a file of another name are of another tokenizer.
  assert files(tmp_path / "mine.json") == {"tokenizer.json": str(tmp_path / "mine.json")}
  template = str(tmp_path / "mine.jinja")
  assert files(tmp_path, template) == own | {"chat_template.jinja": template}
  assert files("bytes") == {}
