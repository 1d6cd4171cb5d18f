# make demo: set up, then one whole run on two CPU cores.   make test: set up, then ruff, mypy and the CPU tests.
# make test-ray, make test-slurm: runs on a Ray cluster and by a Slurm of two nodes, all on this machine.
# make sglang-cpu: SGLang for a CPU in an environment of its own.   make demo-sglang, make test-sglang: with it.
PYTHON ?= python3
# It makes the environments, and is not what a job of a Slurm runs.
unexport PYTHON
VENV := .venv
BIN := $(VENV)/bin
SGLANG := .venv-sglang
SGLANG_PINS := rlhfspec_mega/rollout/sglang_engine/cpu_kernels/requirements.txt
PYTEST := -m pytest --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-ray sglang-cpu demo-sglang test-sglang test-slurm clean

demo: $(VENV)/.installed
	$(BIN)/python train.py name=demo-$$(date +%Y%m%d-%H%M%S)

# The long files first, in the order of their names: the end of the run has short ones to share out. Four processes for
# two cores: tests wait for deadlines as often as they compute. SGLang's compute.
test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -n 4 tests --ignore tests/slurm --ignore tests/ray

# One after the other: instances beside each other starve on two cores.
test-ray: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray

sglang-cpu: $(SGLANG)/.installed

# Few slots: samples wait for one, and the last ones move.
demo-sglang: $(SGLANG)/.installed
	$(SGLANG)/bin/python train.py rollout=sglang rollout.max_running_requests=16 trainer.steps=10 name=demo-sglang-$$(date +%Y%m%d-%H%M%S)

test-sglang: $(SGLANG)/.installed
	OMP_NUM_THREADS=1 $(SGLANG)/bin/python $(PYTEST) -n 2 tests/sglang

test-slurm: $(VENV)/.installed-test
	$(BIN)/shellcheck --external-sources slurm/*.sh slurm/*.sbatch tests/slurm/*.sh
	tests/slurm/install.sh
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slurm

$(VENV)/.installed: setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

$(SGLANG)/.installed: setup.py $(SGLANG_PINS)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --editable '.[test]' --constraint $(SGLANG_PINS)
	$(SGLANG)/bin/pip install --quiet --no-deps --requirement $(SGLANG_PINS)
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG)
