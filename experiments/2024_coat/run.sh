#!/usr/bin/env bash
# Every arm, one after the other; about two minutes each on two CPU cores. Resumes where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
"$python" -m fp8jax.models.hf.convert_gguf assets/smollm2-135m
for arm in float32 moments activations coat lossless; do
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1 "$python" launch.py \
    --config="experiments/2024_coat/config.py:$arm" --workdir="runs/2024_coat/$arm"
done
