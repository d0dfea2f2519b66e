"""A family in a process of its own: `python -m gpu_check` with a request, JSON, on stdin."""

import json
import sys
import warnings

from gpu_check import records, worker

if __name__ == "__main__":
  # Adapters of rivals, and the time that they are given.
  bench = records.ROOT / "experiments" / "bench"
  sys.path += [str(bench), str(bench / "kernels")]
  warnings.simplefilter("default")  # versions of flax and optax are the machine's
  worker.run_family(json.loads(sys.stdin.read()))
