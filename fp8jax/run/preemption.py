"""SIGTERM and Ctrl-C as a question that a run asks between steps and within what takes long.

Exit codes: 75 (EX_TEMPFAIL of sysexits.h) after SIGTERM, which tells a scheduler to start the same
command again; 130 (128 + SIGINT, as shells report it) after Ctrl-C.

One process: our handlers note the signal. Several processes: SIGTERM belongs to JAX, which installs
its handler in jax.distributed.initialize and lets the processes agree on the step at which all of
them stop (jax.experimental.multihost_utils.reached_preemption_sync_point). A handler of ours would
hide the signal from it. Ctrl-C there passes as a SIGTERM to the same agreement.
"""

import contextlib
import os
import signal

import jax
from jax.experimental import multihost_utils

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}


class Interrupts(contextlib.AbstractContextManager):
  """Inside, both signals only ask to save and leave; a second Ctrl-C raises KeyboardInterrupt."""

  def __init__(self):
    self._signal: int | None = None
    self._questions, self._is_reached = 0, False
    self._before = {}

  def __enter__(self):
    ours = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else (signal.SIGINT,)
    with contextlib.suppress(ValueError):  # not in the main thread: nothing to catch
      for number in ours:
        self._before[number] = signal.signal(number, self._ask)
    return self

  def __exit__(self, *exc):
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _ask(self, number, frame):
    del frame
    if self._signal is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self._signal = number
    if jax.process_count() > 1:
      os.kill(os.getpid(), signal.SIGTERM)  # JAX's handler tells the other processes

  @property
  def exit_code(self) -> int:
    """Of a process that stops because it was asked to; the signal may have met another process."""
    return EXIT_CODES[signal.Signals(self._signal or signal.SIGTERM)]

  def requested(self, step: int) -> bool:
    """Whether to stop before this step, or in what is done before it. All processes ask equally
    often, and stop at the same question; from then on the answer is yes."""
    del step
    if jax.process_count() == 1:
      return self._signal is not None
    # JAX counts questions, in training and in evaluations, and says yes to one.
    self._questions += not self._is_reached
    self._is_reached |= multihost_utils.reached_preemption_sync_point(self._questions)
    return self._is_reached
