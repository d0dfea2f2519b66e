"""What every worker shares: read inputs, run configurations, write results and times.

A worker is `python WORKER.py INPUTS.npz RESULTS.npz SECONDS`, in whatever environment its library
needs. NumPy is all that this file needs. Inputs are named case/x, case/w and case/g. Results are
named case/configuration/what, where what is

  y, dx, dw                the forward product and its two gradients
  x_codes, w_codes         uint8, what the forward product multiplies, as x [M, K] and w [K, N] lie
  g_codes                  uint8, what the data gradient multiplies, as g [M, N] lies
  forward, both            seconds of every call, of y alone and of y, dx and dw together
"""

import importlib.metadata
import json
import os
import platform
import sys
import time

import numpy as np

UNTIMED = "ties"  # a case that is about values alone
MIN_CALLS, MAX_CALLS = 5, 200


def measure(call, seconds: float) -> np.ndarray:
  """Seconds of every call but the first two; `call` returns when its result is there."""
  call(), call()
  times, start = [], time.perf_counter()
  while len(times) < MIN_CALLS or time.perf_counter() - start < seconds:
    before = time.perf_counter()
    call()
    times.append(time.perf_counter() - before)
    if len(times) == MAX_CALLS:
      break
  return np.asarray(times)


def main(make, libraries):
  """Runs all configurations for all cases.

  Args:
    make: function of (x, w, g), NumPy arrays, that gives {configuration: (arrays, calls)}, both
      dictionaries by what, see above; calls are measured.
    libraries: distributions whose versions are recorded.
  """
  source, target, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
  found = {}
  with np.load(source) as inputs:
    for case in sorted({name.split("/")[0] for name in inputs}):
      operands = (inputs[f"{case}/{t}"] for t in "xwg")
      for configuration, (arrays, calls) in make(*operands).items():
        at = f"{case}/{configuration}"
        found |= {f"{at}/{what}": np.asarray(a) for what, a in arrays.items()}
        if case == UNTIMED:
          continue
        found |= {f"{at}/{what}": measure(call, seconds) for what, call in calls.items()}
        median = 1e3 * np.median(found[f"{at}/forward"])
        print(f"  {at}: forward {median:.2f} ms", flush=True)
  about = {
    "python": platform.python_version(),
    "versions": {name: importlib.metadata.version(name) for name in libraries},
    "load": os.getloadavg(),
  }
  np.savez(target, about=json.dumps(about), **found)
