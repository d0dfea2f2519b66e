#!/usr/bin/env bash
# Every arm, one after the other; about two minutes each on two CPU cores. Resumes where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
"$python" -m fp8jax.models.hf.convert_gguf assets/smollm2-135m
# Not o3: on one device its training is o2's (README.md).
for arm in float32 o1 o2; do
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1 "$python" launch.py \
    --config="experiments/2023_fp8_lm/config.py:$arm" --workdir="runs/2023_fp8_lm/$arm"
done
