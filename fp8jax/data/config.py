"""The data that a run trains on."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fp8jax.data import tokenize


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Everything the data of a run depend on.

  Attributes:
    sources: name -> kind, path, field, dataset, split, weight.
    tokenizer: how text becomes ids.
    seq_len: positions per sequence (L).
    heldout: fraction of documents never trained on.
    cross_document: whether attention and targets cross document boundaries.
    on_malformed, on_long: see tokenize.Tokenize.
    seed: order of documents.
    workers: worker processes per source; 0 tokenizes in threads of this process.
    prefetch: batches held ready.
    shuffle_windows: windows per block that is shuffled; for prepared data any number shuffles the
      whole epoch. 0 keeps the windows in the order of the documents.
  """

  sources: Mapping[str, Mapping[str, Any]]
  tokenizer: tokenize.Tokenizer
  seq_len: int
  heldout: float = 0.1
  cross_document: bool = False
  on_malformed: str = "error"
  on_long: str = "split"
  seed: int = 0
  workers: int = 0
  prefetch: int = 2
  shuffle_windows: int = 0
