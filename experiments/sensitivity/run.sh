#!/usr/bin/env bash
# The measurements and pictures of README.md; about half an hour on two cores. Resumes where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
"$python" -m fp8jax.models.hf.convert_gguf assets/smollm2-135m
for arm in block_128; do
  "$python" launch.py --config="experiments/sensitivity/config.py:$arm" --job=sensitivity \
    --workdir=runs/sensitivity
done
