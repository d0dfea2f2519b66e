"""The samples of a run by number, and their lengths.

A conversation is one sample or several, and a step is a fixed number of samples. So all
conversations are rendered and tokenized once before the first step; the index of their lengths
stays in memory (21 bytes per sample), and a sample is made again when its step comes.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping

import grain
import numpy as np

from fp8jax import console as console_lib
from fp8jax.data import reading, tokenize
from fp8jax.data import sources as sources_lib
from fp8jax.data.chat import encode
from fp8jax.data.config import DataConfig
from fp8jax.errors import UserError

# For data.on_long and data.on_untrained.
LONG_POLICIES, UNTRAINED_POLICIES = ("error", "skip", "truncate"), ("error", "skip")
_MANY = 5_000  # conversations take long enough to say that they are read


@dataclasses.dataclass(frozen=True)
class Index:
  """The samples of all sources, in their order; arrays are [samples].

  Attributes:
    source: int32 number of the source.
    record: int32 number of the conversation in it.
    part: int32 number of the sample in the conversation.
    length: int32 positions: tokens less one, as the last has no successor.
    trained: int32 positions whose target is trained.
    is_heldout: whether the conversation is held out.
    counts: {"malformed", "too long", "untrained", "truncated", "begun otherwise ...": number}; the
      first of conversations, the others of samples.
    closing: {id of the last token of trained turns: number of turns}.
  """

  source: np.ndarray
  record: np.ndarray
  part: np.ndarray
  length: np.ndarray
  trained: np.ndarray
  is_heldout: np.ndarray
  counts: Mapping[str, int]
  closing: Mapping[int, int] = dataclasses.field(default_factory=dict)

  def ends(self, tokenizer: tokenize.Tokenizer) -> tuple[list[int], str]:
    """(special tokens that close trained turns, a warning about turns that none closes, or "")."""
    common = sorted(self.closing, key=lambda token: -self.closing[token])
    ordinary = [token for token in common if tokenizer.decode([token])]
    number, total = sum(map(self.closing.__getitem__, ordinary)), sum(self.closing.values())
    warning = (
      ""
      if not ordinary
      else (
        f"{number:,} of {total:,} trained turns end in ordinary text, most often in "
        f"{tokenizer.decode(ordinary[:1])!r}, and no end-of-turn token: generation will not know "
        "where they end. Take a chat template that writes one, or set generate.stop"
      )
    )
    return [token for token in common if token not in ordinary], warning


def make_index(spec: DataConfig) -> Index:
  """Renders and tokenizes every conversation once.

  Raises:
    UserError: a conversation that must stop the run, with file and line.
  """
  rows, counts, closing = [], collections.Counter(), collections.Counter()
  opened = _open(spec)
  if (total := sum(map(len, opened))) > _MANY:
    what = f"reading {total:,} conversations once, to know the lengths of their samples"
    console_lib.console(stderr=True).print(what)
  for i, source in enumerate(opened):
    # Malformed rows, templates and policies: every reason to stop comes up here.
    data = grain.MapDataset.source(source).map(_Describe(spec))
    for j, piece in enumerate(reading.read(data, spec.workers)):
      counts.update(piece["counts"])
      closing.update(piece["closing"])
      rows += [(i, j, *numbers, piece["is_heldout"]) for numbers in piece["samples"]]
  source, record, part, length, trained, held = np.asarray(rows, np.int32).reshape(-1, 6).T
  return Index(
    source, record, part, length, trained, held.astype(bool), dict(counts), dict(closing)
  )


def _open(spec: DataConfig) -> list[sources_lib.Source]:
  return [sources_lib.open_source(source) for source in spec.sources.values()]


def encoded(spec: DataConfig, record) -> list[encode.Sample]:
  """The samples of a conversation; too long ones cut where data.on_long says so."""
  if spec.chat is None:
    raise UserError("the sources are no conversations; set their chat")
  samples = encode.Encoder(spec.tokenizer, spec.chat.template).samples(record)
  if spec.on_long == "truncate":
    most = spec.seq_len + 1
    samples = [encode.Sample(s.tokens[:most], s.trained[:most]) for s in samples]
  return samples


@dataclasses.dataclass(frozen=True)
class _Describe:
  """A record -> [(part, length, trained), ...] of its samples that are trained on."""

  spec: DataConfig

  def __call__(self, record):
    spec, counts, kept, closing, made = self.spec, collections.Counter(), [], [], []
    if "error" not in record:
      try:
        made = encoded(dataclasses.replace(spec, on_long=""), record)
      except UserError as e:  # the template refuses it
        record = {**record, "error": str(e)}
    if "error" in record:
      tokenize.refuse_malformed(spec.on_malformed, record)
      return {"samples": [], "counts": {"malformed": 1}, "is_heldout": False, "closing": ()}
    for part, sample in enumerate(made):
      length = len(sample) - 1
      if length > spec.seq_len:
        counts["truncated" if spec.on_long == "truncate" else "too long"] += 1
        problem = f"a sample of {length + 1} tokens does not fit seq_len={spec.seq_len}"
        remedies = "data.on_long='skip' or 'truncate'"
        tokenize.refuse(spec.on_long, remedies, record["origin"], problem)
        if spec.on_long == "skip":
          continue
        length = spec.seq_len
      trained = int(sample.trained[1 : length + 1].sum())
      if not trained:
        counts["untrained"] += 1
        problem = "a sample has no trained token: no turn of the assistant" + (
          f" begins in its first {spec.seq_len} tokens" * (length == spec.seq_len)
        )
        on_untrained = spec.chat.on_untrained if spec.chat else "error"
        tokenize.refuse(on_untrained, "data.on_untrained='skip'", record["origin"], problem)
        continue
      kept.append((part, length, trained))
      if len(sample) - 1 == length:
        closing += sample.closing
      if sample.opening:
        counts[f"begun otherwise than the generation prompt, without {sample.opening!r}"] += 1
    held = tokenize.is_held_out(record, spec.heldout)
    return {"samples": kept, "counts": dict(counts), "is_heldout": held, "closing": closing}


class Samples(reading.Reopened):
  """Some samples of an index with `lengths`, `trained`, `source_of`; random-access, for grain."""

  def __init__(self, spec: DataConfig, index: Index, numbers: np.ndarray):
    self._spec, self._index, self._numbers = spec, index, numbers
    self.lengths, self.trained = index.length[numbers], index.trained[numbers]
    self.source_of = index.source[numbers]

  @functools.cached_property
  def _sources(self) -> list[sources_lib.Source]:
    return _open(self._spec)

  def __len__(self):
    return len(self._numbers)

  def __getitem__(self, index) -> encode.Sample:
    at, number = self._index, self._numbers[index]
    record = self._sources[at.source[number]][int(at.record[number])]
    return encoded(self._spec, record)[at.part[number]]


def of_split(spec: DataConfig, index: Index, split: str, source: str | None = None) -> Samples:
  """The samples of "train" or "heldout", of one source or of all."""
  wanted = index.is_heldout == (split == "heldout")
  if source is not None:
    wanted = wanted & (index.source == list(spec.sources).index(source))
  return Samples(spec, index, np.flatnonzero(wanted))
