"""Sets of the Hugging Face datasets library, from a folder that it saved or by their names."""

import functools
from collections.abc import Callable
from typing import Any

from fp8jax.errors import UserError, one_line


class HfDataset:
  """One split of a set; rows are documents or conversations.

  Args:
    path: folder that Dataset.save_to_disk wrote; "" loads `dataset` by name.
    dataset: name[:configuration] on the hub, or of a folder of files.
    split: "train", or a slice of one like "train[:1000]".
    rows: (row, origin) -> record.
  """

  def __init__(self, path: str, dataset: str, split: str, rows: Callable[[Any, str], dict]):
    self.path, self.dataset, self.split, self.rows = path, dataset, split, rows

  @functools.cached_property
  def _rows(self):
    import datasets  # pyright: ignore  (extra `datasets`)

    name, _, configuration = self.dataset.partition(":")
    try:
      if self.path:
        found = datasets.load_from_disk(self.path)
        return found if isinstance(found, datasets.Dataset) else found[self.split]
      return datasets.load_dataset(name, configuration or None, split=self.split)
    except Exception as e:  # the library's kinds are many
      raise UserError(
        f"datasets cannot open {self.path or self.dataset!r}, split {self.split!r}: "
        f"{one_line(e)[:300]}; set path to a folder that Dataset.save_to_disk wrote, or dataset to "
        "a name"
      ) from e

  def __len__(self):
    return len(self._rows)

  def __getitem__(self, index):
    return self.rows(self._rows[index], f"{self.path or self.dataset}[{self.split}]:{index}")

  def files(self):
    """The Arrow files that the set is stored in."""
    return [file["filename"] for file in self._rows.cache_files]

  def __getstate__(self):
    # Worker processes open their own.
    return {k: v for k, v in self.__dict__.items() if k != "_rows"}
