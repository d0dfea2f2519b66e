"""Continuous batching: as a sequence ends, the next prompt takes its slot.

The programs are few: one decode step for all slots, and one prefill per length bucket, of one
prompt. A prompt's programs depend on its own length and on the cache's alone, and a row of a GEMM
or of attention on no other row (recipes with a scale per tensor of activations excepted), so that a
completion does not depend on the prompts beside it. R is prompts that are prefilled together: one
on every device that has rows of its own, all in one bucket.

Source: continuous batching is Yu et al. 2022 (Orca, OSDI), its iteration-level scheduling.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.generation import decode
from fp8jax.generation.sampling import NO_TOKEN, method_of
from fp8jax.generation.settings import Sampling
from fp8jax.models.config import ComputeConfig, ModelConfig

# The shortest bucket; the next ones are twice as long each.
_SHORTEST = 16
# Positions of a bucket whose logits exist at a time when sequences are scored.
_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to complete once.

  Attributes:
    prompt: token ids, at least one.
    limit: tokens to generate at most.
    seed: of its draws, see sampling.row_seed.
    index: of the prompt among its owner's.
    number: of the sample among the prompt's.
  """

  prompt: tuple[int, ...]
  limit: int
  seed: int
  index: int = 0
  number: int = 0


def bucket(length: int, most: int) -> int:
  """The padded length of a sequence; never above `most`, the longest there is."""
  size = _SHORTEST
  while size < length:
    size *= 2
  return max(min(size, most), length)


def _next(
  waiting: collections.deque[Request], free: list[list[int]], length: int
) -> dict[int, tuple[Request, int]]:
  """{device: (request, its row)}: the next in a row that share a bucket, one per device.

  Args:
    free: rows of every device.
    length: positions per slot.
  """
  chosen, size = {}, bucket(len(waiting[0].prompt), length)
  for shard, rows in enumerate(free):
    if rows and waiting and bucket(len(waiting[0].prompt), length) == size:
      chosen[shard] = waiting.popleft(), rows.pop()
  return chosen


class Engine:
  """A model in slots: its compiled programs, and `weights`: (parameters, see weights.for_inference;
  sites of all GEMMs, scales included)."""

  def __init__(
    self, cfg: ModelConfig, run: ComputeConfig, rows: int, cache_format: str, compiler_options=None,
    kv_scales=None,
  ):  # fmt: skip
    """
    Args:
      rows: slots; the next multiple of the devices that rows are split over.
      kv_scales: see KVCache.zeros.
    """
    self._shards = run.layout.size(run.layout.act_axes("B"))
    self.rows, self.cfg = -(-rows // self._shards) * self._shards, cfg
    self.weights: tuple[Any, ...] = ()

    def program(function, **options):
      static = functools.partial(function, cfg=cfg, run=run)
      return jax.jit(static, compiler_options=compiler_options, **options)

    self._empty = functools.partial(
      decode.Slots.empty, cfg, self.rows, format_=cache_format, dtype=run.dtype, layout=run.layout,
      scales=kv_scales,
    )  # fmt: skip
    if run.layout.mesh is not None:  # no device has room for all of it
      self._empty = jax.jit(self._empty, static_argnames="length")
    self._prefill = program(decode.prefill, static_argnames="method", donate_argnums=2)
    self._decode = program(decode.decode, static_argnames="method", donate_argnums=2)
    self._score = program(decode.score, static_argnames="chunk")

  def run(
    self,
    requests: Iterable[Request],
    sampling: Sampling,
    length: int,
    push: Callable[[Request, int, float], bool],
  ):
    """Generates for every request until it is done.

    Args:
      requests: in the order in which they take slots.
      sampling: its temperature, top_k and top_p.
      length: positions per slot; prompt and completion of every request fit.
      push: takes a request's next token, NO_TOKEN for none, with its log-probability
        (Slots.logp_B), and says whether that was its last.
    """
    drawn, weights = dict(method=method_of(sampling)), self.weights
    numbers = (np.float32(sampling.temperature), np.float32(sampling.top_p))
    slots, own = self._empty(length=length), self.rows // self._shards
    waiting = collections.deque(requests)
    free = [list(range(n * own, (n + 1) * own)) for n in range(self._shards)]
    active: dict[int, Request] = {}

    def take(row: int, request: Request, token: int, logp: float):
      nonlocal slots
      active[row] = request
      if push(request, token, logp):
        del active[row]
        free[row // own].append(row)
      if token == NO_TOKEN:
        slots = slots.cleared(row)

    while waiting or active:
      while waiting and any(free):
        chosen = _next(waiting, free, length)
        prompts = self._padded(chosen, length)
        slots, first = self._prefill(*weights, slots, prompts, *numbers, **drawn)
        first, logp = map(np.asarray, first)
        for shard, (request, row) in chosen.items():
          take(row, request, int(first[shard]), float(logp[shard]))
      if not active:
        continue
      slots = self._decode(*weights, slots, *numbers, **drawn)
      tokens, logp = jax.device_get((slots.tokens_B, slots.logp_B))
      for row, request in list(active.items()):
        take(row, request, int(tokens[row]), float(logp[row]))

  def _padded(self, chosen: Mapping[int, tuple[Request, int]], length: int):
    """The `prompts` of decode.prefill; a device without one computes what no row takes."""
    longest = max(len(request.prompt) for request, _ in chosen.values())
    tokens_RL = np.zeros((self._shards, bucket(longest, length)), np.int32)
    lengths_R, rows_R = np.ones(self._shards, np.int32), np.full(self._shards, self.rows, np.int32)
    seeds_R = np.zeros(self._shards, np.uint32)
    for shard, (request, row) in chosen.items():
      tokens_RL[shard, : len(request.prompt)] = request.prompt
      lengths_R[shard], rows_R[shard] = len(request.prompt), row
      seeds_R[shard] = request.seed
    return dict(tokens_RL=tokens_RL, lengths_R=lengths_R, rows_R=rows_R, seeds_R=seeds_R)

  def score(self, sequences: list[tuple[int, ...]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of every token after the first, of sequences of two or more: log-probability given those
    before, whether it is the best."""
    scores: list = [None] * len(sequences)
    groups = collections.defaultdict(list)
    for number, tokens in enumerate(sequences):
      groups[bucket(len(tokens) - 1, self.cfg.max_positions)].append(number)
    for size in sorted(groups):
      for start in range(0, len(groups[size]), self.rows):
        numbers = groups[size][start : start + self.rows]
        logp_BL, is_best_BL = self._scored([sequences[n] for n in numbers], size)
        for row, number in enumerate(numbers):
          real = slice(len(sequences[number]) - 1)
          scores[number] = logp_BL[row, real], is_best_BL[row, real]
    return scores

  def _scored(self, sequences, size: int):
    padded = -(-size // _CHUNK) * _CHUNK if size > _CHUNK else size
    tokens_BL, targets_BL = np.zeros((2, self.rows, padded), np.int32)
    for row, tokens in enumerate(sequences):
      tokens_BL[row, : len(tokens) - 1] = tokens[:-1]
      targets_BL[row, : len(tokens) - 1] = tokens[1:]
    positions_BL = jnp.broadcast_to(jnp.arange(padded), tokens_BL.shape)
    batch = dict(tokens_BL=tokens_BL, targets_BL=targets_BL, positions_BL=positions_BL)
    scores = self._score(*self.weights, batch, chunk=min(_CHUNK, padded))
    return jax.device_get(scores)
