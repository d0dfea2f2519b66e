"""Scales of channels folded into weights: divided out of what makes an input, multiplied into what
reads it. The network stays the same, up to the rounding of its float32 weights.

A mixer declares what makes each input of its sites (models/mixer.Maker). In grouped-query
attention the value of one key-value head feeds a group of query heads: they share one scale, of the
group's largest statistic. Everything is done on the host, in float64.

`p` are a mixer's parameters of one layer, or of all layers stacked in front. Statistics and scales
are flat over the channels that a site contracts, with all layers in front if p has them.

K is a channel that sites read.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fp8jax.models.config import ModelConfig
from fp8jax.models.mixer import GemmSite, Maker, Mixer
from fp8jax.ptq import smooth


def readers(mixer: Mixer, input: str) -> list[GemmSite]:
  """The sites that read this input."""
  return [site for site in mixer.sites if site.input == input]


def pooled(values, mixer: Mixer, input: str, cfg: ModelConfig) -> np.ndarray:
  """float64 [..., K], not negative: of channels that are made as one, each has their largest."""
  return _to_readers(_to_maker(values, mixer, input, cfg), mixer, input, cfg)


def reader_amax(p, mixer: Mixer, input: str, cfg: ModelConfig) -> np.ndarray:
  """float64 [..., K]: largest magnitudes of all weights that read each channel, `pooled`."""
  of_sites = [
    _largest(p[site.name], letters + produced, letters)
    for site, letters, produced in _letters(mixer, input, cfg)
  ]
  largest = np.max([x.reshape(*x.shape[: x.ndim - n], -1) for x, n in of_sites], axis=0)
  return pooled(largest, mixer, input, cfg)


def maker_amax(p, mixer: Mixer, input: str, cfg: ModelConfig) -> np.ndarray:
  """float64 [..., K]: largest magnitudes of the weights, biases aside, that make each channel."""
  maker = mixer.makers[input]
  name = maker.params[0]
  largest, _ = _largest(p[name], mixer.params(cfg)[name].letters, maker.letters)
  return _to_readers(largest, mixer, input, cfg)


def scaled(p: Mapping[str, Any], mixer: Mixer, input: str, scale_K, cfg: ModelConfig) -> dict:
  """The parameters with an input divided by scales, and the weights that read it times these.

  Args:
    p: float arrays.
    scale_K: positive, [..., K]; of channels that are made as one the largest counts.

  Returns:
    A new dictionary; float32 NumPy arrays where something changed.
  """
  maker, made = mixer.makers[input], dict(p)
  scale = _to_maker(scale_K, mixer, input, cfg)
  for name, letters in present(p, mixer, maker, cfg):
    made[name] = _times(p[name], 1 / place(scale, maker.letters, letters))
  return read_times(made, mixer, input, _to_readers(scale, mixer, input, cfg), cfg)


def read_times(p: Mapping[str, Any], mixer: Mixer, input: str, factor_K, cfg: ModelConfig) -> dict:
  """The parameters with factors [..., K] in the weights that read an input, and in them alone."""
  made, wide = dict(p), np.asarray(factor_K, np.float64)
  for site, letters, produced in _letters(mixer, input, cfg):
    own = wide.reshape(*wide.shape[:-1], *(cfg.dims[x] for x in letters))
    made[site.name] = _times(p[site.name], place(own, letters, letters + produced))
  return made


def equalized(p: Mapping[str, Any], mixer: Mixer, cfg: ModelConfig) -> dict:
  """The parameters after weight equalization of every pair that a positive factor passes between.

  up and down, v and o: both get the geometric mean of their ranges, channel by channel. A norm's
  gain is no matrix, and stays.
  """
  p = dict(p)
  for input, maker in mixer.makers.items():
    if not maker.is_gain:
      ranges = maker_amax(p, mixer, input, cfg), reader_amax(p, mixer, input, cfg)
      p = scaled(p, mixer, input, smooth.equalization(*ranges), cfg)
  return p


def present(p, mixer: Mixer, maker: Maker, cfg: ModelConfig) -> Iterator[tuple[str, str]]:
  """(name, letters) of the maker's parameters that this model has."""
  declared = mixer.params(cfg)
  yield from ((name, declared[name].letters) for name in maker.params if name in p)


def place(values, letters: str, among: str):
  """Values [..., letters] where `among` has these letters, and 1 where it has others."""
  lead = values.shape[: values.ndim - len(letters)]
  sizes = dict(zip(letters, values.shape[len(lead) :], strict=True))
  return values.reshape(*lead, *(sizes.get(letter, 1) for letter in among))


def to_readers(values, letters: str, own: str, cfg: ModelConfig):
  """Values [..., letters of a maker] as the readers' `own` letters count channels."""
  lead = values.ndim - len(letters)
  for axis, (one, other) in enumerate(zip(letters, own, strict=True), lead):
    values = np.repeat(values, cfg.dims[other] // cfg.dims[one], axis)
  return values


def _letters(mixer: Mixer, input: str, cfg: ModelConfig) -> Iterator[tuple[GemmSite, str, str]]:
  """(site, letters that it contracts, letters that it produces) of an input's readers."""
  for site in readers(mixer, input):
    yield site, *mixer.params(cfg)[site.name].gemm_letters


def _own(mixer: Mixer, input: str, cfg: ModelConfig) -> str:
  return next(letters for _, letters, _ in _letters(mixer, input, cfg))


def _to_maker(values, mixer: Mixer, input: str, cfg: ModelConfig) -> np.ndarray:
  """[..., K] -> [..., letters of the maker]: the largest of each group."""
  letters, values = mixer.makers[input].letters, np.asarray(values, np.float64)
  own, lead = _own(mixer, input, cfg), values.shape[:-1]
  pairs = [(cfg.dims[a], cfg.dims[b] // cfg.dims[a]) for a, b in zip(letters, own, strict=True)]
  groups = values.reshape(*lead, *(size for pair in pairs for size in pair))
  return groups.max(axis=tuple(len(lead) + 1 + 2 * i for i in range(len(pairs))))


def _to_readers(values, mixer: Mixer, input: str, cfg: ModelConfig) -> np.ndarray:
  """[..., letters of the maker] -> [..., K]."""
  letters = mixer.makers[input].letters
  wide = to_readers(values, letters, _own(mixer, input, cfg), cfg)
  return wide.reshape(*wide.shape[: wide.ndim - len(letters)], -1)


def _largest(w, letters: str, kept: str) -> tuple[np.ndarray, int]:
  """(largest magnitudes [..., kept letters], how many letters these are)."""
  w = np.abs(np.asarray(w, np.float64))
  lead = w.ndim - len(letters)
  others = tuple(lead + i for i, letter in enumerate(letters) if letter not in kept)
  return w.max(axis=others), len(kept)


def _times(x, factor) -> np.ndarray:
  return (np.asarray(x, np.float64) * factor).astype(np.float32)
