PYTHON ?= python3
BIN := .venv/bin
ROWS := softmax sigmoid
RUNS ?= runs/quickstart
export JAX_PLATFORMS ?= cpu

.PHONY: quickstart test test-fast lint clean

quickstart: .venv/quickstart
	@for row in $(ROWS); do \
	  $(BIN)/sinklab train --config=configs/quickstart.py:$$row --workdir=$(RUNS)/$$row --remat || exit $$?; \
	done
	@$(BIN)/sinklab report $(addprefix $(RUNS)/,$(ROWS)) --png

test: .venv/test
	$(BIN)/pytest -n 2 --dist worksteal --durations=30

test-fast: .venv/test
	$(BIN)/pytest -n 2 -m 'not slow'

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# uv resolves and installs in seconds what takes pip a minute.
.venv/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

.venv/quickstart: .venv/uv setup.py
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[report]'
	@touch $@

# libtpu, for its compiler, stands apart: beside jax it would look for a chip at every start. The figures of
# benchmarks/tpu_cost.json are of this version.
.venv/test: .venv/uv setup.py
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[test]'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target .venv/libtpu libtpu==0.0.52 \
	  || echo 'libtpu cannot be installed here: kernels are not compiled for TPUs'
	@touch $@ .venv/quickstart

clean:
	rm -rf .venv runs *.egg-info
