# make setup | gpu-setup | serve | check | unit | aot | test | soak | bench-quick | gpu-check | clean
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := ops/setup/$(if $(wildcard $(VENV)/.gpu),gpu,cpu)-lock.txt
STAMP  := $(VENV)/.pageferry-setup
MODEL  := .models/smollm2-135m-instruct
PORT   ?= 8000
CONFIG ?= cluster/topologies/local-cpu.yaml
OUT    ?= build/gpu-check
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup gpu-setup serve test check unit aot soak bench-quick gpu-check clean help

help:
	@sed -n 1p Makefile; echo "PORT=$(PORT) CONFIG=$(CONFIG)"

setup: $(STAMP) $(MODEL)/model.safetensors

$(STAMP): $(LOCK) pyproject.toml ops/setup/vllm_name.py
	@echo "[setup 1/3] virtual environment in $(VENV)"
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed (PYTHON=$(PYTHON) was not found)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[setup 2/3] packages from $(LOCK) (of the CPU build about 4 GB on disk, one to two minutes)"
	@$(PIP) install --quiet --no-deps -r $(LOCK)
	@echo "[setup 3/3] pageferry itself"
	@$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/python -m ops.setup.vllm_name
	@touch $@

$(MODEL)/model.safetensors: | $(STAMP)
	@$(BIN)/python -m ops.setup.demo_model $(MODEL)

# vLLM's CUDA build in the place of its CPU build; all other targets then use it
gpu-setup:
	@test ! -d $(VENV) || test -e $(VENV)/.gpu || { echo "$(VENV) holds the CPU build; make clean first"; exit 1; }
	@mkdir -p $(VENV) && touch $(VENV)/.gpu
	@$(MAKE) --no-print-directory $(STAMP)

serve: setup
	@$(BIN)/pageferry serve $(CONFIG) --port $(PORT)

# everything that a change must pass: its parts run side by side (PARTS="quick engine service")
test: setup
	@$(BIN)/python tests/lanes.py

# lint, and types of product and tests
check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy app actors kernels cluster ops tests

# state machines and plain functions: no engine, no kernel compile
unit: setup
	@$(BIN)/python -m pytest -q -m "pure and not compiles" -n 2 --dist loadfile

# every GPU kernel compiled ahead of time for sm_90 and sm_100 (spills fail)
aot: $(STAMP)
	@$(BIN)/pageferry kernels --aot

# campaigns: minutes to hours of faults and load; not part of `make test`
soak: setup
	@$(BIN)/python -m pytest -m soak

# every part of a benchmark at a small size: no figure to quote
bench-quick: setup
	@$(BIN)/pageferry bench quick --out build/bench
	@$(BIN)/pageferry report build/bench/quick-*.json --out build/bench/report

# what needs a GPU, in stages that together take less than 15 minutes; DRY=1 runs the same code small, on the CPU
gpu-check:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m ops.gpu_check --out $(OUT) --stages "$(STAGES)" $(if $(DRY),--dry)

clean:
	rm -rf $(VENV) .models build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
