"""Every figure of this project that needs a Hopper GPU, from one command and without network.

command: python experiments/gpu_check.py --out DIR [--minutes 26]
         python experiments/gpu_check.py --plan            what runs, in which order, for how long
         python experiments/gpu_check.py --out DIR --dry   the same on a CPU with tiny shapes
new:     built since 2026-11-26 and not timed; predictions of 2026-11-28 in LOG.md; one H200
         python experiments/gpu_check.py --out DIR --minutes 15 --families \\
             environment cupti ceilings gemm_default gemm_blocks gemm_add_to gemm_layers \\
             quantize_layers casts gemm_p2 gemm_7b_mlp gemm_stack quantize \\
             prologues_speed layer train_block_128_pow2_micro \\
             train_block_128_pow2_once train_bf16_micro

needs:   one Hopper GPU; jax, flax, optax, safetensors and rich as the machine has them. The stages
         run and train need the trainer's packages, others no ml_collections, grain or TFDS.
         --wheels DIR adds packages from files.

It writes DIR/results.jsonl (a line after every measurement), DIR/report.md and one log per family.
A second call with the same DIR, commit, device and jax continues. gpu_check/plan.py has the stages.
Exit status: 0; 1 if a result is wrong or a correctness line failed; 2 if correctness lines of the
chosen stages did not run.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from gpu_check import driver  # noqa: E402

if __name__ == "__main__":
  sys.exit(driver.main())
