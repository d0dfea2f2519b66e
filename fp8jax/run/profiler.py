"""A trace of some steps for XProf: log.profile.

WORKDIR/profile is read by `xprof --logdir=WORKDIR/profile`, TensorBoard's profile plugin, Perfetto.
"""

import contextlib
import os

import jax
import rich.console

from fp8jax.step.settings import Log


class Profiler:
  """Traces log.profile's steps of a run; after a resumption the rest of them."""

  def __init__(self, workdir: str, log: Log, out: rich.console.Console):
    self._folder, self._out, self._is_on = os.path.join(workdir, "profile"), out, False
    self._first, self._end = log.profile[0], sum(log.profile)

  def step(self, step: int, state) -> contextlib.AbstractContextManager:
    """Around the dispatch of the step after `step` steps; begins and ends the trace.

    Args:
      step: steps taken.
      state: after them; the trace ends when it is ready.
    """
    if self._is_on and step >= self._end:
      jax.block_until_ready(state)
      self.close()
    if not self._first <= step < self._end:
      return contextlib.nullcontext()
    if not self._is_on:
      jax.profiler.start_trace(self._folder)
      self._is_on = True
    return jax.profiler.StepTraceAnnotation("train", step_num=step + 1)

  def close(self):
    """Writes the trace, if there is one; the device has finished its steps."""
    if self._is_on:
      self._is_on = False
      jax.profiler.stop_trace()
      self._out.print(f"trace for XProf: {self._folder}")
