#!/usr/bin/env bash
# All parts of results.json and the figure, one after the other; about ten minutes on two CPU cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
"$python" -m fp8jax.models.hf.convert_gguf assets/smollm2-135m
for part in accumulators saved_tensors logfmt heldout; do
  JAX_PLATFORMS=cpu "$python" "experiments/2024_deepseek_v3/$part.py"
done
