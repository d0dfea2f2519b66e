"""One family of lines, measured in the process that calls."""

import contextlib
import dataclasses
import importlib
import json
import pathlib
import time
import traceback
from typing import Any

from gpu_check import records


@dataclasses.dataclass(frozen=True)
class Context:
  """What every measurement is given.

  Attributes:
    is_dry: kernels are interpreted on a CPU; times mean nothing.
    cupti: whether CUPTI was seen working on this machine.
    deadline: time.monotonic() after which no line begins.
  """

  is_dry: bool
  cupti: bool
  deadline: float


class Wrong(Exception):
  """A result that the oracle contradicts; the message says where and by how much."""


class Cut(Exception):
  """A run that its time limit ended; a second call measures the line again.

  Attributes:
    rows: of what it had logged.
  """

  def __init__(self, message: str, rows: list[dict[str, Any]]):
    super().__init__(message)
    self.rows = rows


class Absent(Exception):
  """Something that the machine does not have; the message names it."""


@contextlib.contextmanager
def interpreted():
  """Hopper kernels run on the CPU."""
  from jax.experimental.pallas import mosaic_gpu as plgpu

  from fp8jax.kernels.gemm import mosaic_sm90
  from fp8jax.kernels.quantize import tile_program

  cores, mosaic_sm90.num_cores = mosaic_sm90.num_cores, lambda: 2
  clips, tile_program.CLIPS = tile_program.CLIPS, "always"
  try:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
      yield
  finally:
    mosaic_sm90.num_cores, tile_program.CLIPS = cores, clips


def measure(run, context: Context, values: dict[str, Any]) -> dict[str, Any]:
  """{"status", "values" or "why"} of one line; never raises what the line raises."""
  try:
    return {"status": "ok", "values": run(context, **values)}
  except (Wrong, Absent, Cut) as e:
    return {"status": type(e).__name__.lower(), "why": str(e)}
  except Exception as e:  # one line must not end the family
    traceback.print_exc()
    return {"status": "failed", "why": f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"}


def run_family(request: dict[str, Any]):
  """Measures the lines of a request, appending a record before and after each.

  Args:
    request: module, lines {name: values}, out (results.jsonl), key, is_dry, cupti, seconds.
  """
  deadline = time.monotonic() + request["seconds"]
  context = Context(request["is_dry"], request["cupti"], deadline)
  path, key = pathlib.Path(request["out"]), request["key"]
  module = importlib.import_module(request["module"])
  with interpreted() if context.is_dry else contextlib.nullcontext():
    for name, values in request["lines"].items():
      if time.monotonic() > deadline:
        print(f"time is up before {name}", flush=True)
        return
      records.append(path, {"line": name, "key": key, "status": "begun"})
      start = time.monotonic()
      record = measure(module.run, context, values)
      seconds = round(time.monotonic() - start, 2)
      records.append(path, {"line": name, "key": key, **record, "seconds": seconds})
      print(name, json.dumps(record), f"{seconds} s", flush=True)
