"""Progress bar and throughput."""

import datetime
import time

import jax
import rich.console
import rich.progress

from fp8jax import console as console_lib

_WINDOW = 20  # steps of a throughput


class Progress:
  """A live bar on a terminal, a line every `every` steps elsewhere. Silent beyond process 0."""

  def __init__(self, total: int, start: int, every: int, out: rich.console.Console):
    self._total, self._every, self._out = total, every, out
    self._is_silent = jax.process_index() != 0
    self._bar = None
    if not self._is_silent and out.is_terminal:
      self._bar = rich.progress.Progress(
        console_lib.column("step {task.completed}/{task.total}"),
        rich.progress.BarColumn(),
        console_lib.column("{task.fields[text]}"),
        rich.progress.TimeElapsedColumn(),
        console=out,
      )
      self._bar.start()
      self._task = self._bar.add_task("", total=total, completed=start, text="compiling")

  def update(self, step: int, loss: float, speed: "Throughput"):
    """Shows the state after `step`."""
    if self._is_silent:
      return
    text = f"loss {loss:.4f}  {speed.text(self._total - step)}"
    if self._bar is not None:
      self._bar.update(self._task, completed=step, text=text)
    elif step % self._every == 0 or step == self._total:
      self._out.print(f"step {step}/{self._total}  {text}")

  def close(self):
    if self._bar is not None:
      self._bar.stop()


class Throughput:
  """Tokens per second over a sliding window of steps; compilation is not in it."""

  def __init__(self, tokens_per_step: int, flops_per_step: float, peak: float | None):
    self._tokens, self._flops, self._peak = tokens_per_step, flops_per_step, peak
    self._times: list[float] = []

  def tick(self):
    """A step's result has arrived."""
    self._times = [*self._times[-_WINDOW:], time.perf_counter()]

  def restart(self, is_next: bool = False):
    """Something else took time since the last step: measure again.

    Args:
      is_next: whether a step begins now, of a program that was compiled before.
    """
    self._times = [time.perf_counter()] if is_next else []

  @property
  def seconds_per_step(self) -> float | None:
    if len(self._times) < 2:
      return None
    return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

  def values(self) -> dict[str, float]:
    seconds = self.seconds_per_step
    if seconds is None:
      return {}
    values = {"tokens_per_second": self._tokens / seconds, "step_seconds": seconds}
    if self._peak is not None:
      values["mfu"] = self._flops / seconds / self._peak
    return values

  def text(self, steps_left: int) -> str:
    values = self.values()
    if not values:
      return ""
    mfu = f"  MFU {values['mfu']:.1%}" if "mfu" in values else ""
    left = datetime.timedelta(seconds=round(values["step_seconds"] * steps_left))
    return f"{values['tokens_per_second']:,.0f} tokens/s{mfu}  {left} left"
