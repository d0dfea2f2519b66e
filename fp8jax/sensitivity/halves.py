"""Held-out text in two halves: rules are chosen on one and reported on the other."""

import math
import sys

import numpy as np

from fp8jax.data import loader
from fp8jax.errors import UserError
from fp8jax.sensitivity.settings import Sensitivity
from fp8jax.sensitivity.study import HALVES
from fp8jax.step.train_spec import TrainSpec


def read(spec: TrainSpec) -> dict[str, list[dict[str, np.ndarray]]]:
  """The held-out batches of both halves; no document is in both.

  Raises:
    UserError: a half without tokens.
  """
  size = spec.eval.batch
  each = math.ceil(spec.of(Sensitivity).tokens / 2 / (size * spec.data.seq_len)) * size
  batches_of: dict[str, list[dict[str, np.ndarray]]] = {half: [] for half in HALVES}
  for name in spec.data.sources:
    stream = loader.heldout_batches(spec.data, name, size, sys.maxsize)  # padding at their end
    windows = ({k: np.array(v[i]) for k, v in b.items()} for b in stream for i in range(size))
    first = [next(windows) for _ in range(each)]
    later = _after_first_document(windows, each)
    stream.close()
    for half, some in zip(HALVES, (first, later), strict=True):
      if not sum(w["weights_BL"].sum() for w in some):
        raise UserError(
          f"data.sources.{name} has no held-out token for the half {half!r} of sensitivity.tokens="
          f"{spec.of(Sensitivity).tokens}; lower it, raise data.heldout_fraction, or give more text"
        )
      batches = (some[i : i + size] for i in range(0, each, size))
      batches_of[half] += [{k: np.stack([w[k] for w in rows]) for k in rows[0]} for rows in batches]
  return batches_of


def _after_first_document(windows, count: int) -> list[dict[str, np.ndarray]]:
  """So many windows after the document that the next begins with, which may have begun before.

  Where it ends within a window, its tokens have weight 0.
  """
  for window in windows:
    segments = window.get("segments_BL")
    is_over = not window["weights_BL"].any()
    if segments is None:  # documents are not kept apart
      is_over = True
    elif not is_over:
      is_first = segments == segments[0]
      window["weights_BL"][is_first] = 0
      is_over = not is_first.all()
    if is_over:
      return [window, *(next(windows) for _ in range(count - 1))]
  return []
