"""Scales between channels: SmoothQuant's, and those of weight equalization.

A scale s of a channel divides the parameters that make it and multiplies the weights that read it
(fold.py), so that the network stays the same. On the host, in float64.

K is a channel that layers read.
"""

import numpy as np

# Scales stay so far from float32's ends that weights times them do too.
_LEAST, _MOST = 2.0**-20, 2.0**20


def scales(amax_x_K, amax_w_K, alpha: float = 0.5) -> np.ndarray:
  """float32 [K]: amax_x^alpha / amax_w^(1 - alpha), SmoothQuant (arXiv:2211.10438, eq. 4).

  A channel of which an amax is 0, NaN or infinite keeps 1: nothing is known of its range.

  Args:
    amax_x_K: largest magnitudes of the activations.
    amax_w_K: those of the weights that read them, over all layers that share the input.
    alpha: how much of the activations' range goes to the weights, 0 to 1.

  Raises:
    ValueError: alpha is outside.
  """
  if not 0 <= alpha <= 1:
    raise ValueError(f"alpha={alpha} must be from 0 to 1: 0.5 shares the range evenly")
  return _ratio(amax_x_K, amax_w_K, alpha, 1 - alpha)


def equalization(amax_maker_K, amax_reader_K) -> np.ndarray:
  """float32 [K]: sqrt(amax_maker / amax_reader), which gives both weights the same range.

  Cross-layer equalization (Nagel et al. 2019, arXiv:1906.04721 §4.1, eq. 11), of two weights with
  nothing between them but what a positive factor passes through; 1 as in `scales`.

  Args:
    amax_maker_K: largest magnitudes of the weights that make each channel.
    amax_reader_K: of those that read it.
  """
  return _ratio(amax_maker_K, amax_reader_K, 0.5, 0.5)


def _ratio(above, below, power_above: float, power_below: float) -> np.ndarray:
  above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
  is_known = (above > 0) & (below > 0) & (above < np.inf) & (below < np.inf)
  above, below = (np.where(is_known, x, 1.0) for x in (above, below))
  ratio = above**power_above / below**power_below
  return np.clip(ratio, _LEAST, _MOST).astype(np.float32)
