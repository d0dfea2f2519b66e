"""Joins the processes of a run, or says why that is impossible."""

import os
import socket
import sys
import threading
import time

import jax

from fp8jax.errors import one_line


def initialize(coordinator, processes, process, timeout: int):
  """Joins the other processes; exits with one line if that is impossible.

  Args:
    coordinator: host:port of process 0; None, like the next two, under a scheduler that JAX knows.
    processes: their number.
    process: index of this one.
    timeout: seconds to wait for the others.
  """
  if coordinator is not None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
      sys.exit(f"error: --coordinator={coordinator!r} must be host:port, for example node1:1234")
    if processes is None or process is None:
      sys.exit("error: --coordinator needs --processes=N and --process=I, too")
    if not 0 <= process < processes:
      sys.exit(
        f"error: --process={process} must be from 0 to {processes - 1}, as --processes={processes}"
        if processes > 0
        else f"error: --processes={processes} must be at least 1"
      )
    if process > 0:
      _await_coordinator(host, int(port), timeout)
  # At its own time limit JAX aborts the process, with a stack trace: ours comes first.
  timer = threading.Timer(timeout, _give_up, (processes, timeout))
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(coordinator, processes, process, initialization_timeout=timeout + 60)
  except (ValueError, RuntimeError) as e:
    sys.exit(
      f"error: the processes did not find each other: {one_line(e)[:300]}. Is process 0 up, and "
      "its host:port reachable from here?"
    )
  finally:
    timer.cancel()


def _give_up(processes: int | None, timeout: int):
  """Ends the process from a thread of its own: the main one waits inside of JAX."""
  print(
    f"error: not all {processes or ''} processes came within --timeout={timeout} s. Are all of "
    "them started, each with its own --process, and is process 0 reachable from each?",
    file=sys.stderr, flush=True,
  )  # fmt: skip
  os._exit(1)


def _await_coordinator(host: str, port: int, timeout: int):
  """Returns when process 0 listens; JAX would end the process with a fatal error instead."""
  deadline = time.monotonic() + timeout
  while True:
    try:
      socket.create_connection((host, port), timeout=1).close()
      return
    except OSError as e:
      if time.monotonic() > deadline:
        sys.exit(
          f"error: --coordinator={host}:{port} did not answer within --timeout={timeout} s ({e}). "
          "Is process 0 up, and reachable from here?"
        )
      time.sleep(0.2)
