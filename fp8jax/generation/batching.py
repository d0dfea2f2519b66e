"""Continuous batching: as a sequence ends, the next prompt takes its slot.

The programs are few: one decode step for all slots, and one prefill per length bucket, of one
prompt. A prompt's programs depend on its own length and on the cache's alone, and a row of a GEMM
or of attention on no other row (recipes with a scale per tensor of activations excepted), so that a
completion does not depend on the prompts beside it. R is prompts that are prefilled together: 1.

Source: continuous batching is Yu et al. 2022 (Orca, OSDI), its iteration-level scheduling.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable
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


class Engine:
  """A model in slots: its weights and its compiled programs.

  Attributes:
    weights: (parameters, see weights.for_inference; sites of all GEMMs, scales included).
  """

  def __init__(
    self, cfg: ModelConfig, run: ComputeConfig, rows: int, cache_format: str, compiler_options=None
  ):
    """
    Args:
      rows: slots.
      cache_format: of settings.CACHE_FORMATS.
    """
    self.rows, self.cfg = rows, cfg
    self.weights: tuple[Any, ...] = ()
    self._run, self._format = run, cache_format

    def program(function, **options):
      static = functools.partial(function, cfg=cfg, run=run)
      return jax.jit(static, compiler_options=compiler_options, **options)

    self._prefill = program(decode.prefill, static_argnames="method", donate_argnums=2)
    self._decode = program(decode.decode, static_argnames="method", donate_argnums=2)
    self._score = program(decode.score, static_argnames="chunk")

  def run(
    self,
    requests: Iterable[Request],
    sampling: Sampling,
    length: int,
    push: Callable[[Request, int], bool],
  ):
    """Generates for every request until it is done.

    Args:
      requests: in the order in which they take slots.
      sampling: its temperature, top_k and top_p.
      length: positions per slot; prompt and completion of every request fit.
      push: takes a request's next token, NO_TOKEN for none, and says whether that was its last.
    """
    drawn, weights = dict(method=method_of(sampling)), self.weights
    numbers = (np.float32(sampling.temperature), np.float32(sampling.top_p))
    slots = decode.Slots.empty(self.cfg, self.rows, length, self._format, self._run.dtype)
    waiting, free = collections.deque(requests), list(range(self.rows))
    active: dict[int, Request] = {}

    def take(row: int, request: Request, token: int):
      nonlocal slots
      active[row] = request
      if push(request, token):
        del active[row]
        free.append(row)
      if token == NO_TOKEN:
        slots = slots.cleared(row)

    while waiting or active:
      while waiting and free:
        request, row = waiting.popleft(), free.pop()
        prompt = self._padded(request, row, length)
        slots, first = self._prefill(*weights, slots, prompt, *numbers, **drawn)
        take(row, request, int(first[0]))
      if not active:
        continue
      slots = self._decode(*weights, slots, *numbers, **drawn)
      tokens = np.asarray(slots.tokens_B)
      for row, request in list(active.items()):
        take(row, request, int(tokens[row]))

  def _padded(self, request: Request, row: int, length: int):
    """The `prompts` of decode.prefill."""
    tokens_RL = np.zeros((1, bucket(len(request.prompt), length)), np.int32)
    tokens_RL[0, : len(request.prompt)] = request.prompt
    one = functools.partial(np.full, 1)
    return dict(
      tokens_RL=tokens_RL, lengths_R=one(len(request.prompt), np.int32),
      rows_R=one(row, np.int32), seeds_R=one(request.seed, np.uint32),
    )  # fmt: skip

  def score(self, sequences: list[tuple[int, ...]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of every token after the first: log-probability given those before, whether it is the best.

    Args:
      sequences: of at least two tokens each.
    """
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
