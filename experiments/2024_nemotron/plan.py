"""Nemotron-4 340B on 8 GPUs by served format: --job=plan_inference, and the tables of README.md.

command: JAX_PLATFORMS=cpu python experiments/2024_nemotron/plan.py
needs:   pip install "jax[cuda13]", no GPU, for the compiled decoding steps; two minutes of a core.
         Without it the tables are the same and results.json says that nothing was compiled
"""

import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import nemotron  # noqa: E402

from configs import base  # noqa: E402
from fp8jax.generation import capacity  # noqa: E402
from fp8jax.jobs import dispatch, plan_inference  # noqa: E402
from fp8jax.run import provenance  # noqa: E402

GPUS = ("h100", "h200", "b200")
# Arm, format of the cache.
ARMS = {"fp8_dynamic": ("", "compute"), "fp8_dynamic, E4M3 cache": ("", "e4m3"),
        "fp8_block but keys, values": ("block", "compute")}  # fmt: skip
_TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.S)


def planned(arm: str, cache_format: str, topology: str) -> dict:
  c = nemotron.get_config(arm)
  c.generate.cache_format = cache_format
  return dispatch.call("plan_inference", c, base.get_config(), "", topology=topology)


def measure() -> dict:
  """{GPU: rows of 8 of them, each with a name}, and the steps compiled for H100."""
  found, compiled = {}, {}
  for gpu in GPUS:
    rows = {}
    for name, (arm, cache_format) in ARMS.items():
      made = planned(arm, cache_format, f"{gpu}:8")
      configured, *named = made["rows"]
      rows[name] = configured | {"format": name}
      if gpu == "h100":
        compiled[name] = made["compiled"]
      if name == "fp8_dynamic":
        rows |= {row["format"]: row for row in named if row["format"] not in ARMS}
    found[gpu] = rows
  return {"rows": found, "compiled": compiled}


def markdown(head: list[str], rows: list[list[str]]) -> str:
  return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def tables(found: dict) -> str:
  """What README.md has between its marks."""
  rows = [plan_inference.cells(capacity.Row(**row)) for row in found["rows"]["h100"].values()]
  head = [f"{gpu.upper()}: {what}" for gpu in GPUS
          for what in ("sequences on 8", "tokens/s, at most", "fits from")]  # fmt: skip
  others = [
    [name, *(cell for gpu in GPUS for cell in _short(found["rows"][gpu][name]))]
    for name in found["rows"]["h100"]
  ]
  steps = [
    [name, str(step["sequences"]), f"{step['declared'] / 2**30:.2f}",
     f"{step['arguments'] / 2**30:.2f}", f"{step['temporaries'] / 2**30:.2f}",
     f"{100 * step['peak_of_memory']:.1f}"]
    for name, step in found["compiled"].items() if "problem" not in step
  ]  # fmt: skip
  of_step = ["compiled for 8 x H100", "sequences", "weights and cache, GiB: arithmetic",
             "compiled", "temporaries, GiB", "% of the memory"]  # fmt: skip
  return "\n\n".join([
    "8 x H100, 4,096 tokens a sequence, bytes of one GPU:",
    markdown(plan_inference.COLUMNS, rows),
    "Others:",
    markdown(["format", *head], others),
    "A decoding step, compiled:",
    markdown(of_step, steps) if steps else "none: jax[cuda13] was not there",
  ])  # fmt: skip


def _short(row: dict) -> list[str]:
  cells = plan_inference.cells(capacity.Row(**row))
  names = ("sequences", "tokens/s: all", "fits from")
  return [cells[plan_inference.COLUMNS.index(name)] for name in names]


def main():
  found = measure()
  kept = {"results": found, "provenance": provenance.provenance({}, "no data", 0)}
  (HERE / "results.json").write_text(json.dumps(kept, indent=1) + "\n")
  readme = HERE / "README.md"
  text = _TABLE.sub(lambda m: f"{m[1]}{tables(found)}\n{m[2]}", readme.read_text())
  readme.write_text(text)


if __name__ == "__main__":
  main()
