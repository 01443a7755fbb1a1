# Two commands do all the set-up on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint docs test-slow test-browser test-programs test-versions fuzz bench-analysis bench-plans bench-jit bench-evaluator bench-fidelity bench-default bench-ablation bench-search bench-peer bench-scoreboard bench-partitioners bench-host-partitioners bench-handwritten bench-exactness corpus corpus-full clean

$(STAMP): pyproject.toml requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Shardwise needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: $(STAMP)
	$(BIN)/shardwise plan zoo:t2b:2b,remat --topology v5e:4x4 --mesh data=4,model=4 --report plan.html

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# mypy runs beside the tests. worksteal: the tests of a file share what was made for them, and no worker idles at the end.
test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy & types=$$!; $(BIN)/pytest -n 2 --dist worksteal -q src tests -m "not slow"; tests=$$?; wait $$types && exit $$tests

test-slow: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -q tests -m slow

# The report page in Chromium, a Debian package, which is installed where that is allowed.
test-browser: $(STAMP)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
	  as=$$([ "$$(id -u)" = 0 ] || echo sudo -n); \
	  $$as apt-get update -qq && $$as apt-get install -qq --no-install-recommends chromium; } || { \
	  echo "there is no Chromium, and it cannot be installed from here: apt-get install chromium" >&2; exit 1; }
	JAX_PLATFORMS=cpu $(BIN)/pytest -q tests/report -m browser

test-programs: $(STAMP)
	$(BIN)/pytest -n 2 -q tests/programs

# Programs of other packages: planned, run on eight host devices and compared with plain JAX; then the PyTorch tutorial.
corpus: .venv-corpus/.installed
	JAX_PLATFORMS=cpu .venv-corpus/bin/python -m corpus run
	JAX_PLATFORMS=cpu .venv-corpus/bin/python -m corpus tutorial

# The same at full size, planned for v5e:4x4 and compiled for it without a TPU; takes hours.
corpus-full: .venv-corpus/.installed
	JAX_PLATFORMS=cpu .venv-corpus/bin/python -m corpus run --full

.venv-corpus/.installed: pyproject.toml requirements.txt corpus/requirements.txt corpus/requirements-torch.txt
	$(PYTHON) -m venv .venv-corpus
	.venv-corpus/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	.venv-corpus/bin/pip install --quiet --disable-pip-version-check --no-deps -r corpus/requirements.txt
	.venv-corpus/bin/pip install --quiet --disable-pip-version-check --no-deps --retries 1 -r corpus/requirements-torch.txt
	.venv-corpus/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# The ends of the supported JAX range: the oldest on this Python, the newest that it and NEWEST_PYTHON can install.
NEWEST_PYTHON ?= $(PYTHON)
test-versions: .venv-oldest/.installed .venv-newest/.installed
	.venv-oldest/bin/pytest -q tests -m "not slow" --ignore tests/programs --ignore tests/recipes
	.venv-newest/bin/pytest -q tests -m "not slow" --ignore tests/programs --ignore tests/recipes

.venv-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check "jax==0.9.0" --editable ".[zoo,dev]"
	touch $@

.venv-newest/.installed: pyproject.toml
	$(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade jax --editable ".[zoo,dev]"
	touch $@

# Random programs, as many as asked: make fuzz FUZZ=20000; FROM is the number of the first.
FUZZ ?= 5000
FROM ?= 0
fuzz: $(STAMP)
	SHARDWISE_FUZZ=$(FUZZ) SHARDWISE_FUZZ_FROM=$(FROM) $(BIN)/pytest -n 2 -q tests/fuzz

# Compiles for a TPU topology without a TPU: needs libtpu, about 300 MB.
bench-plans: .venv-tpu/.installed
	.venv-tpu/bin/python -m benchmarks.plans

.venv-tpu/.installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/pip install --quiet --disable-pip-version-check --constraint requirements.txt --editable ".[tpu,zoo]"
	touch $@

# The device-local program against XLA's partitioner: compiled for a TPU topology, and run on eight host devices.
bench-partitioners: .venv-tpu/.installed
	.venv-tpu/bin/python -m benchmarks.partitioners

bench-host-partitioners: $(STAMP)
	$(BIN)/python -m benchmarks.host_partitioners

# Bytes and memory, predicted and compiled for a TPU topology. To record anew: python -m benchmarks.exactness --record.
bench-exactness: $(STAMP)
	$(BIN)/python -m benchmarks.exactness

# Generated device-local programs against hand-written ones, compiled for a TPU topology; needs libtpu too.
bench-handwritten: $(STAMP)
	$(BIN)/python -m benchmarks.handwritten

# Runs the tutorials anew every time: what they show is what the library does now.
docs: .venv-docs/.installed
	.venv-docs/bin/sphinx-build -W --keep-going -n -E -q -d build/doctrees docs build/docs

.venv-docs/.installed: pyproject.toml requirements.txt docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --constraint requirements.txt --constraint docs/requirements.txt --editable ".[docs]"
	touch $@

bench-analysis: $(STAMP)
	$(BIN)/python -m benchmarks.analysis

bench-evaluator: $(STAMP)
	$(BIN)/python -m benchmarks.evaluator

# Predicts what was recorded. To record anew: benchmarks/fidelity/{truth,single,host}.py.
bench-fidelity: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.fidelity.page

# Plans with default settings beside searches of 5,000 evaluations, on a machine with 16 cores.
bench-default: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.search.default --processes 13 --busy 2

# The search without parts of it, on a machine with 16 cores.
bench-ablation: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.search.ablation --processes 15

# Found plans against named strategies, by the TPU compiler. To record anew: python -m benchmarks.fidelity.corpus record.
bench-scoreboard: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.scoreboard

# Tables of what was recorded. To record anew: bench-default, bench-ablation, benchmarks/search/{run,others}.py.
bench-search: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.search.page

# The last release with XLA's own auto-partitioner, in an environment of its own; takes half an hour.
bench-peer: .venv-peer/.installed
	.venv-peer/bin/python -m benchmarks.peer

.venv-peer/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-peer
	.venv-peer/bin/pip install --quiet --disable-pip-version-check "jax[tpu]==0.10.0" --editable ".[zoo]"
	touch $@

bench-jit: $(STAMP)
	$(BIN)/python -m benchmarks.jit

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
