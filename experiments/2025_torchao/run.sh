#!/usr/bin/env bash
# Every stage, one after the other; about eight minutes. Resumes where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} PYTHONPATH=.
for arm in train more qat-w4a16 qat-nvfp4a16 qat-fp8_dynamic qat-int8 qat-w4a16-24; do
  "$python" experiments/2025_torchao/run.py "$@" "$arm"
done
