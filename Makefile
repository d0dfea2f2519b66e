# make run    set everything up and continue the pre-training of SmolLM2-135M in block FP8 (CPU)
# make test   set everything up and run the default test suite;  make test JAX=0.11.2  on another jax
# make test-all, test-aot, test-aot-all   slow tests too; programs for GPUs that are not there, the slow of these too
# make check  lint, format and types

JAX ?= 0.12.0.1
VENV := .venv$(if $(filter-out 0.12.0.1,$(JAX)),-jax$(JAX))
BIN := $(VENV)/bin
MODEL := assets/smollm2-135m
WORKDIR ?= runs/smollm2_cpt
# A process per core, a file at a time; PARALLEL= runs in one.
PARALLEL ?= -n auto --dist loadfile --no-loadscope-reorder

.PHONY: run test test-all test-aot test-aot-all test-gpu gpu-check check setup clean

run: $(MODEL)/model.safetensors
	@# Huge pages for XLA's scratch memory: a sixth less time per step where the kernel offers them.
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python launch.py --config=configs/smollm2_cpt.py --workdir=$(WORKDIR)

test: setup $(MODEL)/model.safetensors
	$(BIN)/python -m pytest -q $(PARALLEL) --durations=30 $(ARGS)

test-all: setup $(MODEL)/model.safetensors
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not gpu and not aot" --durations=10 $(ARGS)

# CUDA wheels, no GPU: compiles for H200 topologies.
test-aot: AOT = aot and not slow
test-aot-all: AOT = aot
test-aot test-aot-all: setup
	$(BIN)/python -m pip install -q "jax[cuda13]==$(JAX)"
	$(BIN)/python -m pytest -q -n auto -m "$(AOT)" --durations=5 $(ARGS)

# On a Hopper GPU: the kernels' own suites, compiled and run instead of interpreted, in one process.
test-gpu: setup
	$(BIN)/python -m pip install -q "jax[cuda13]==$(JAX)"
	FP8JAX_TEST_GPU=1 $(BIN)/python -m pytest -q -m "not aot" $(addprefix tests/kernels/,mosaic_sm90_test.py \
	  quantize_sm90_test.py producers_test.py grouped_matmul_test.py) $(ARGS)

# On a Hopper GPU, without network: the machine's own Python; results and report.md in OUT.
OUT ?= runs/gpu_check
gpu-check:
	$(or $(PYTHON),python3) experiments/gpu_check.py --out $(OUT) $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

setup: $(VENV)/.ready

$(MODEL)/model.safetensors: | $(VENV)/.ready
	$(BIN)/python -m fp8jax.models.smollm2 $(MODEL)

# The first interpreter, of these and pyenv's, that is new enough and can make a virtual environment.
$(VENV)/.ready: requirements.txt pyproject.toml
	@for p in $(PYTHON) python3.12 python3.13 python3 python "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[23]*/bin/python3; do \
	  if "$$p" -c 'import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null; \
	  then found="$$p"; break; fi; done; \
	if [ -z "$$found" ]; then \
	  echo "error: no Python 3.12 or 3.13 found; install one, or say where it is: make PYTHON=/path/to/python3.12"; exit 1; fi; \
	echo "setting up $(VENV) with $$("$$found" --version) and jax $(JAX)"; \
	rm -rf $(VENV); "$$found" -m venv $(VENV)
	@sed -E 's/^(jax|jaxlib)==[0-9.]+/\1==$(JAX)/' requirements.txt > $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -r $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

clean:
	rm -rf .venv* build *.egg-info
