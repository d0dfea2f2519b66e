#!/usr/bin/env bash
# Every arm, one after the other. Resumes where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
"$python" -m fp8jax.models.hf.convert_gguf assets/smollm2-135m
"$python" experiments/2025_infir2/prepare_data.py assets/infir2_data
for arm in bf16 block_128 tensor_current block_128_pow2; do
  # Huge pages for XLA:CPU's scratch memory: a sixth less time per step.
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1 "$python" launch.py \
    --config="experiments/2025_infir2/config.py:$arm" --workdir="runs/2025_infir2/$arm"
  mkdir -p "experiments/2025_infir2/results/$arm"
  cp "runs/2025_infir2/$arm"/{metrics.jsonl,provenance.json,summary.json} \
    "experiments/2025_infir2/results/$arm/"
done
"$python" experiments/2025_infir2/plot.py
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 "$python" experiments/2025_infir2/every_recipe.py
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 "$python" launch.py --parallel=1 \
  --sweep=experiments/2025_infir2/paired_sweep.py --workdir=runs/2025_infir2/paired
