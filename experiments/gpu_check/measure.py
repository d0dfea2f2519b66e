"""Time on the device: of the kernel alone where CUPTI works, else of a program that repeats it.

Every line says which: "how" is "cupti" (the kernel's own time, scale transposes and gaps left out)
or "program" (wall clock of one compiled program that calls the function on several operands, its
transposes and gaps included). Operands are laid out before and exceed the L2 cache together.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from gpu_check import programs
from gpu_check.worker import Context

OWN = "mosaic_gpu_kernel"  # part of the name of every Pallas kernel
L2_BYTES = 128 * 2**20  # twice an H200's, and more
ROUNDS, SECONDS, TRACES = 5, 0.1, 3


def options() -> dict[str, bool] | None:
  """Of the compiler, as training has them."""
  from fp8jax.kernels import choose

  return choose.compiler_options(choose.current_device())


def time_program(
  context: Context, program: programs.Program, own: bool = True, check: Callable | None = None,
  calls: int = 0,
) -> dict[str, Any]:  # fmt: skip
  """{"ms", "spread_ms", "wall_ms", "how"} of one call.

  Args:
    own: whether the Pallas kernel alone counts, or all kernels of the function.
    check: of a result and its arguments; raises before anything is timed. It sees the very program
      that is timed, so that nothing is compiled twice. Not for programs that donate.
    calls: in one program; 0: as many as exceed the L2 cache, two where arguments are donated.
  """
  size = programs.num_bytes(program.arguments)
  few = context.is_dry or program.donates
  count = calls or (2 if few else min(8, -(-L2_BYTES // size) + 1))
  if program.donates:
    return _time(context, *_in_place(program, count), count, own)
  sets = [program.concrete(seed) for seed in range(count)]

  def repeated(sets):
    return [program.function(*one) for one in sets]

  run = jax.jit(repeated, compiler_options=options())
  if check is not None:
    check(run(sets)[0], *sets[0])
  return _time(context, lambda: run(sets), lambda: run, (sets,), count, own)


def _in_place(program: programs.Program, count: int):
  """The same for a function whose first results replace its first arguments: `count` calls, one
  after the other, in one program. A wall clock donates; CUPTI repeats its arguments and cannot."""
  taken = program.donates

  def chained(*arguments):
    state, rest, more = arguments[:taken], arguments[taken:], None
    for _ in range(count):
      results = program.function(*state, *rest)
      state, more = results[:taken], results[taken:]
    return state, more

  donating = jax.jit(chained, donate_argnums=range(taken), compiler_options=options())
  held = {"arguments": program.concrete()}
  rest = held["arguments"][taken:]

  def run():
    state, more = donating(*held["arguments"])
    held["arguments"] = (*state, *rest)
    return more if more else state[-1]

  def traced():
    return jax.jit(chained, compiler_options=options())

  return run, traced, program.concrete()


def _time(context: Context, run: Callable, traced: Callable, arguments, count: int, own: bool):
  """Args: run: () -> results of `count` calls; traced: () -> a jitted function of `arguments`."""
  rounds = wall_times(context, run, count)
  found = {"ms": statistics.median(rounds), "spread_ms": max(rounds) - min(rounds)}
  found |= {"wall_ms": found["ms"], "how": "program"}
  if context.cupti:
    try:
      found |= _by_cupti(traced(), arguments, count, own)
    except Exception as e:  # the wall clock remains, and the line says so
      found["cupti_failed"] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
  return found


def wall_times(context: Context, run: Callable, count: int) -> list[float]:
  """Milliseconds per call, of rounds that are each waited for once; the first runs compile."""
  jax.block_until_ready(run())
  start = time.perf_counter()
  jax.block_until_ready(run())
  repeats = max(1, int(SECONDS / max(time.perf_counter() - start, 1e-6)))
  repeats = 1 if context.is_dry else min(repeats, 200)
  rounds, last = [], None
  for _ in range(1 if context.is_dry else ROUNDS):
    start = time.perf_counter()
    for _ in range(repeats):
      last = run()
    jax.block_until_ready(last)
    rounds.append(1e3 * (time.perf_counter() - start) / repeats / count)
  return rounds


def _by_cupti(run, arguments, count: int, own: bool) -> dict[str, Any]:
  from jax.experimental.mosaic.gpu import profiler

  _, traces = profiler.measure(run, aggregate=False, iterations=TRACES)(*arguments)
  return of_traces(traces, count, own)


def of_traces(traces, count: int, own: bool) -> dict[str, Any]:
  """Milliseconds per call from CUPTI's lists of (kernel, milliseconds), one per iteration.

  Raises:
    ValueError: no kernel was seen, or not every call launched the kernel once.
  """
  times, all_times = [], []
  for trace in traces or ():
    mine = [ms for name, ms in trace if OWN in name or not own]
    if own and len(mine) != count:
      names = sorted({name for name, _ in trace})
      raise ValueError(f"{len(mine)} launches of {OWN} in {count} calls; kernels: {names}")
    times.append(sum(mine) / count)
    all_times.append(sum(ms for _, ms in trace) / count)
  if not times or not min(times) > 0:
    raise ValueError("CUPTI saw no kernel")
  return {
    "ms": statistics.median(times), "spread_ms": max(times) - min(times),
    "all_kernels_ms": statistics.median(all_times), "how": "cupti",
  }  # fmt: skip
