"""SIGTERM and Ctrl-C as a question that the training loop answers between steps."""

import contextlib
import signal

import jax
import numpy as np
from jax.experimental import multihost_utils


class Interrupts(contextlib.AbstractContextManager):
  """Inside, both signals only ask to save and leave; a second Ctrl-C raises KeyboardInterrupt."""

  def __init__(self):
    self._asked = False
    self._before = {}

  def __enter__(self):
    with contextlib.suppress(ValueError):  # not in the main thread: nothing to catch
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._ask)
    return self

  def __exit__(self, *exc):
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _ask(self, number, frame):
    del frame
    if self._asked and number == signal.SIGINT:
      raise KeyboardInterrupt
    self._asked = True

  def requested(self, step: int, every: int) -> bool:
    """Whether to stop before this step. Processes agree, by asking each other every few steps."""
    if jax.process_count() == 1:
      return self._asked
    if step % every:
      return False
    return bool(multihost_utils.process_allgather(np.asarray(self._asked)).any())
