#!/usr/bin/env bash
# Every arm, one after the other; about eight hours on two idle cores. Resumes where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} PYTHONPATH=.
"$python" -m fp8jax.models.hf.convert_gguf assets/smollm2-135m
for corpus in python_docs brown; do
  [ -d "assets/corpora/$corpus" ] || "$python" experiments/corpora/prepare.py "$corpus"
done
for arm in qat-w4a16_g64 qad-w4a16_g64 qat-nvfp4a16 qad-nvfp4a16; do
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1 "$python" experiments/2026_qad/run.py "$@" \
    "$arm-seed0" "$arm-seed1" "$arm-seed2"
done
# QAD from the released weights, rounding to nearest, GPTQ, and 20 steps in the other formats.
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 "$python" experiments/2026_qad/run.py "$@"
