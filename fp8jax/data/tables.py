"""Sets that a library opens by folder or name: Hugging Face datasets, TensorFlow Datasets."""

import functools
import os
from collections.abc import Callable
from typing import Any

from fp8jax.data import reading
from fp8jax.errors import UserError, one_line


class _Table(reading.Reopened):
  """A split that a library opens.

  Args:
    path, dataset, split: the keys of a source.
    rows: (row, origin) -> record, see sources.Rows.
  """

  _kind = ""
  _rows: Any

  def __init__(self, path: str, dataset: str, split: str, rows: Callable[[Any, str], dict]):
    self.path, self.dataset, self.split, self.rows = path, dataset, split, rows

  def __len__(self):
    return len(self._rows)

  def __getitem__(self, index):
    name = f"{self._kind}{self.dataset or self.path}[{self.split}]"
    return self.rows(self._rows[index], f"{name}:{index}")


class HfDataset(_Table):
  """Of the datasets library: a folder that Dataset.save_to_disk wrote, or name[:configuration]."""

  @functools.cached_property
  def _rows(self):
    import datasets  # pyright: ignore  (extra `datasets`)

    name, _, configuration = self.dataset.partition(":")
    try:
      if self.path:
        saved = datasets.load_from_disk(os.path.expanduser(self.path))
        return saved if isinstance(saved, datasets.Dataset) else saved[self.split]
      return datasets.load_dataset(name, configuration or None, split=self.split)
    except Exception as e:  # the library's kinds are many
      raise UserError(
        f"datasets cannot open {self.path or self.dataset!r}, split {self.split!r}: "
        f"{one_line(e)[:300]}; set path to a folder that Dataset.save_to_disk wrote, or dataset to "
        "a name"
      ) from e

  def files(self):
    """The Arrow files that the set is stored in."""
    return [file["filename"] for file in self._rows.cache_files]


class Tfds(_Table):
  """A TensorFlow Datasets set in array_record format, read without TensorFlow; path: data_dir."""

  _kind = "tfds "

  @functools.cached_property
  def _rows(self):
    import tensorflow_datasets as tfds  # extra `data`

    try:
      return tfds.data_source(self.dataset, split=self.split, data_dir=self.path or None)
    except NotImplementedError as e:
      raise UserError(
        f"tfds dataset {self.dataset!r} (data_dir {self.path or None!r}) is stored in a format "
        "without random access; make it again with "
        "tfds.builder(..., file_format='array_record').download_and_prepare()"
      ) from e

  def files(self):
    import tensorflow_datasets as tfds

    try:
      builder = tfds.builder(self.dataset, data_dir=self.path or None)
    except Exception as e:  # whose message lists every dataset there is
      first = str(e).splitlines()[0] if str(e) else type(e).__name__
      raise UserError(f"tfds cannot open dataset {self.dataset!r}: {first}") from e
    return [str(f) for info in builder.info.splits.values() for f in info.filepaths]
