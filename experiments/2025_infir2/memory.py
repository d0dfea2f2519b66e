"""Memory of FP8 linear layers alone, without rematerialization, against the paper's 14 % less.

Compiles the train step of the paper's two rows with 0.86 (README of InfiXAI/InfiR2, peak memory per
GPU) for eight H200s, which need not be here: the 7B model at 32,768 tokens, a sequence per four
GPUs, and the 1.5B model at 8,192 tokens, two sequences per GPU. The optimizer is in float32 in
every arm, as theirs; only the linear layers of the decoder differ. Of norms and SwiGLU `bf16` saves
the inputs in BF16, as fused kernels do, and computes those of the linear layers from them; the arm
`bf16, linear inputs kept` saves both.

  JAX_PLATFORMS=cpu python experiments/2025_infir2/memory.py [ROW/ARM ...]   # some or all
  ... memory.py --table                                             # of results/memory.json

needs:   pip install "jax[cuda13]", no GPU; minutes per arm
"""

import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

from configs import cpt_1p5b, cpt_7b  # noqa: E402
from fp8jax.compiled import aot, memory  # noqa: E402
from fp8jax.config import files as config_files  # noqa: E402
from fp8jax.run import provenance  # noqa: E402

RESULTS = HERE / "results" / "memory.json"
# Row -> (config, changes, the paper's peak of BF16 and of FP8 in GB).
ROWS = {
  "7B, 32,768 tokens": (
    cpt_7b,
    {"seq_len": 32_768, "global_batch": 2, "eval.batch": 2, "mesh.fsdp": 2, "mesh.tensor": 4},
    (78.1, 67.4),
  ),
  "1.5B, 8,192 tokens": (
    cpt_1p5b,
    {"seq_len": 8_192, "global_batch": 16, "eval.batch": 16, "mesh.fsdp": 8, "mesh.tensor": 1},
    (68.1, 58.3),
  ),
}
_BF16 = {"memory.save_norm_inputs": "bf16", "memory.save_gate_up": "bf16"}
# Arm -> (recipe, changes).
ARMS = {
  "bf16": ("bf16", _BF16),
  "bf16, linear inputs kept": ("bf16", {}),
  "block_128_pow2": ("block_128_pow2", {}),
  "block_128_pow2, quantized inputs": ("block_128_pow2", {"memory.save_gemm_inputs": "quantized"}),
}
COMMON = {"grad_accum_steps": 1, "mesh.data": 1, "memory.remat_policy": "none"}


def measure(row: str, arm: str) -> dict:
  """Bytes per GPU of one compiled step."""
  module, changes, _ = ROWS[row]
  recipe, formats = ARMS[arm]
  c = config_files.without_files(module.get_config(recipe))
  c.update_from_flattened_dict(COMMON | changes | formats)
  spec, devices = aot.resolve(c, "h200:8")
  found = memory.compiled(spec, aot.lower(spec, devices))[1]
  names = ("peak", "temporaries_compiled", "arguments_compiled", "saved_compiled", "saved_declared")
  made = provenance.provenance({}, "none", 0)
  origin = {name: made[name] for name in ("commit", "time") if name in made}
  return {"row": row, "arm": arm, **{name: found[name] for name in names}, **origin}


def table(results: list[dict]) -> str:
  heads = (
    "row",
    "arm",
    "peak, GiB",
    "to bf16",
    "saved for backward, GiB",
    "the paper's FP8",
  )
  lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
  base = {r["row"]: r for r in results if r["arm"] == "bf16"}
  for r in results:
    wide, narrow = ROWS[r["row"]][2]
    is_base, theirs = r["arm"] == "bf16", f"{narrow / wide - 1:+.1%}"
    gap = f"{r['peak'] / base[r['row']]['peak'] - 1:+.1%}" if r["row"] in base else "no bf16 yet"
    cells = (
      r["row"], f"`{r['arm']}`", f"{r['peak'] / 2**30:.1f}", "" if is_base else gap,
      f"{r['saved_compiled'] / 2**30:.1f}", theirs if "block" in r["arm"] else "",
    )  # fmt: skip
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def main(names: list[str]):
  every = {f"{row}/{arm}": (row, arm) for row in ROWS for arm in ARMS}
  results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
  for name in () if names == ["--table"] else names or every:
    row, arm = every[name]
    results = [r for r in results if (r["row"], r["arm"]) != (row, arm)] + [measure(row, arm)]
    order = list(every.values())
    results.sort(key=lambda r: order.index((r["row"], r["arm"])))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(name, "done", flush=True)
  print(table(results))


if __name__ == "__main__":
  main(sys.argv[1:])
