# make run    set everything up and continue the pre-training of SmolLM2-135M in block FP8: on a GPU
#             where there is an NVIDIA driver (JAX_PLATFORMS=cpu make run: not), else on the CPU
# make recipe the whole recipe in miniature: CPT, two stages of SFT, evaluation, FP8 export, an answer
# make rl     fine-tuning on sums, then reinforcement learning from a verifier
# make test   set everything up and run the default test suite;  make test JAX=0.11.2  on another jax
# make test-all, test-aot, test-aot-all   slow tests too; programs for GPUs that are not there, the slow of these too
# make test-browser  the pages of reports in chromium
# make check  lint, format and types

JAX ?= 0.12.0.1
VENV := .venv$(if $(filter-out 0.12.0.1,$(JAX)),-jax$(JAX))
BIN := $(VENV)/bin
MODEL := assets/smollm2-135m
WORKDIR ?= runs/smollm2_cpt
# A process per core, a file at a time; PARALLEL= runs in one.
PARALLEL ?= -n auto --dist loadfile --no-loadscope-reorder

.PHONY: run recipe rl test test-all test-browser test-aot test-aot-all test-gpu gpu-check check setup wheels clean

run: wheels $(MODEL)/model.safetensors
	@# Huge pages for XLA's scratch memory: a sixth less time per step where the kernel offers them.
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python launch.py --config=configs/smollm2_cpt.py --workdir=$(WORKDIR)

# The whole recipe in miniature: pre-training, fine-tuning, evaluation, export.
recipe: wheels $(MODEL)/model.safetensors
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[eval]"
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python experiments/2025_infir2/recipe.py

# Reinforcement learning of SmolLM2-135M on sums; it resumes where it stopped.
rl: wheels $(MODEL)/model.safetensors
	$(BIN)/python experiments/sft_demo/prepare_data.py assets/sft_demo
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python launch.py --config=configs/sft_smollm2.py:stage1
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python launch.py --config=configs/rl_smollm2.py

# The pages of reports in a real browser: Debian's chromium and chromium-driver.
test-browser: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[browser]"
	$(BIN)/python -m pytest -q -m browser $(ARGS)

# Tests compute on the CPU, with CUDA wheels too. Half of their time is XLA's compiler, and a tenth of
# that is memory which malloc returns to the kernel and asks for again.
test test-all: export JAX_PLATFORMS = cpu
# Where bytecode is not kept, pytest rewrites all assertions in every process, which takes 3 s each.
test test-all test-aot test-aot-all: export PYTHONDONTWRITEBYTECODE =
test test-all test-aot test-aot-all: export GLIBC_TUNABLES = glibc.malloc.trim_threshold=1000000000:glibc.malloc.top_pad=67108864:glibc.malloc.mmap_threshold=1000000000
test: setup $(MODEL)/model.safetensors
	$(BIN)/python -m pytest -q $(PARALLEL) --durations=30 $(ARGS)

test-all: setup $(MODEL)/model.safetensors
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[eval,lm_eval]"
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not gpu and not aot and not browser" --durations=10 $(ARGS)

# CUDA wheels and tokamax's attention, no GPU: compiles for H200 topologies, reads machine code.
test-aot: AOT = aot and not slow
test-aot-all: AOT = aot
test-aot test-aot-all: setup
	$(BIN)/python -m pip install -q "jax[cuda13]==$(JAX)" "nvidia-cuda-nvdisasm<14" -e ".[attention]"
	$(BIN)/python -m pytest -q -n auto -m "$(AOT)" --durations=5 $(ARGS)

# On a Hopper GPU: the kernels' own suites, compiled and run instead of interpreted, in one process.
test-gpu: setup
	$(BIN)/python -m pip install -q "jax[cuda13]==$(JAX)"
	FP8JAX_TEST_GPU=1 $(BIN)/python -m pytest -q -m "not aot" $(addprefix tests/kernels/,mosaic_sm90_test.py \
	  quantize_sm90_test.py prologues_test.py grouped_matmul_test.py) $(ARGS)

# On a Hopper GPU, without network: the machine's own Python; results and report.md in OUT.
OUT ?= runs/gpu_check
gpu-check:
	$(or $(PYTHON),python3) experiments/gpu_check.py --out $(OUT) $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	JAX_PLATFORMS=cpu $(BIN)/python tests/guards.py
	$(BIN)/pyright --pythonpath $(BIN)/python

setup: $(VENV)/.ready

# JAX with the CUDA that the NVIDIA driver allows, CUDA 13 or 12; nothing where there is none.
wheels: $(VENV)/.ready
	@if [ "$$JAX_PLATFORMS" != cpu ]; then \
	  cuda=$$($(BIN)/python -m fp8jax.run.machine) || exit 1; \
	  if [ -n "$$cuda" ] && [ ! -e $(VENV)/.$$cuda ]; then \
	    echo "setting up jax[$$cuda] for the NVIDIA driver"; \
	    for old in $(VENV)/.cuda*; do if [ -e "$$old" ]; then old=$${old##*.}; \
	      $(BIN)/python -m pip uninstall -q -y jax-$$old-plugin jax-$$old-pjrt; rm $(VENV)/.$$old; fi; done; \
	    $(BIN)/python -m pip install -q --disable-pip-version-check "jax[$$cuda]==$(JAX)" || exit 1; \
	    touch $(VENV)/.$$cuda; \
	  fi; fi

$(MODEL)/model.safetensors: | $(VENV)/.ready
	$(BIN)/python -m fp8jax.models.hf.convert_gguf $(MODEL)

# The first interpreter, of these and pyenv's, that is new enough and can make a virtual environment.
# Debian and Ubuntu split ensurepip off: an interpreter that lacks it is named with its remedy.
$(VENV)/.ready: requirements.txt pyproject.toml
	@for p in $(PYTHON) python3.12 python3.13 python3 python "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[23]*/bin/python3; do \
	  if "$$p" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    if "$$p" -c 'import ensurepip, venv' 2>/dev/null; then found="$$p"; break; fi; \
	    without="$${without:-$$p}"; fi; done; \
	if [ -z "$$found" ] && [ -n "$$without" ]; then \
	  echo "error: $$("$$without" --version) ($$without) has no ensurepip, which makes virtual environments;" \
	    "on Debian and Ubuntu: apt install python3-venv; or another: make PYTHON=/path/to/python3.12;" \
	    "or none: README.md, \"On a GPU\""; exit 1; fi; \
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
