"""Sets that a library opens: what it is asked for, and which split is read."""

import sys
import types

import pytest

from fp8jax.data import tables
from fp8jax.errors import UserError


@pytest.fixture
def calls(monkeypatch):
  """Calls of a stand-in of the datasets library; a folder "both" holds two splits."""
  calls = []

  class Dataset(list):
    cache_files = [{"filename": "a.arrow"}]

  def load_dataset(*args, **kwargs):
    calls.append((args, kwargs))
    return Dataset([{"text": "of the hub"}])

  def load_from_disk(path):
    if path == "none":
      raise FileNotFoundError("no such\nfolder")
    one = Dataset([{"text": "of the folder"}])
    return {"train": Dataset(), "test": one} if path == "both" else one

  module = types.SimpleNamespace(
    Dataset=Dataset, load_dataset=load_dataset, load_from_disk=load_from_disk
  )
  monkeypatch.setitem(sys.modules, "datasets", module)
  return calls


def _rows(path, name, split="test"):
  table = tables.HfDataset(path, name, split, lambda row, origin: {**row, "origin": origin})
  assert table.files() == ["a.arrow"]
  return [table[i] for i in range(len(table))]


@pytest.mark.parametrize("name, configuration", [("owner/set", None), ("owner/set:en", "en")])
def test_a_set_of_the_hub_is_asked_for_by_configuration_and_split(calls, name, configuration):
  assert _rows("", name) == [{"text": "of the hub", "origin": f"{name}[test]:0"}]
  assert calls == [(("owner/set", configuration), {"split": "test"})]


@pytest.mark.parametrize("path", ["both", "one"])
def test_a_folder_of_one_or_several_splits_is_read(calls, path):
  assert _rows(path, "") == [{"text": "of the folder", "origin": f"{path}[test]:0"}]
  assert not calls


@pytest.mark.parametrize("path, split", [("none", "test"), ("both", "valid")])
def test_what_the_library_does_not_open_is_named_in_a_line(calls, path, split):
  with pytest.raises(UserError, match=rf"cannot open '{path}', split '{split}'.*save_to_disk") as e:
    _rows(path, "", split)
  assert "\n" not in str(e.value)
