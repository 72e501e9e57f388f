# Everything runs inside .venv, which the first target that needs it makes. No system Java is needed.
PYTHON ?= python3
BIN := .venv/bin
# Seven processes on two cores: most tests wait for a broker. Those of one file stay together, in order, and so do all that
# use Spark (`tests/conftest.py`); one Kafka and one PostgreSQL serve all processes.
# A process that dies ends the run (pytest-xdist would wait for ever for what it had taken), and so does one that is
# stuck in a library, where the time limit of a test does not reach it.
SIDE_BY_SIDE := --numprocesses 7 --dist loadscope --no-loadscope-reorder --max-worker-restart 0 \
  -o faulthandler_timeout=1500 -o faulthandler_exit_on_timeout=true
UV_VERSION := 0.13.8
# Tests start hundreds of processes: each would compile all that it imports where an environment forbids to keep it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all chaos simulate endurance lint docs format lock bench clean
help: ## what can be made here
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "penstock needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$(UV_VERSION)"
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --compile-bytecode --require-hashes -r requirements.lock
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: .venv/.installed ## the main job, end to end, on real Kafka and real Spark (ARGS="--all" for the whole year)
	$(BIN)/penstock demo $(ARGS)

test: .venv/.installed ## every promise: pure layers, engines in memory, one real Kafka, PostgreSQL and Spark (minutes)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-all: .venv/.installed ## all tests but those of chaos (about half an hour)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not chaos" $(ARGS)

chaos: .venv/.installed ## what is restarted, killed, frozen and cut off, at length (about three quarters of an hour)
	$(BIN)/python -m pytest tests -m chaos $(ARGS)

simulate: .venv/.installed ## ten thousand simulated runs of the consumer, on a clock moved by hand, and of stores, on a disk that tears
	PENSTOCK_SIMULATIONS=10000 $(BIN)/python -m pytest --numprocesses 2 tests/simulation $(ARGS)

endurance: .venv/.installed ## thirty campaigns of everything under faults, and docs/endurance.md from all that ran (hours; ARGS="--campaigns 2")
	PYTHONPATH=src:tests $(BIN)/python -m endurance $(ARGS)

lint: .venv/.installed ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.installed ## the site of docs/, in site/; a warning is an error. Pages and pictures that are made from the code first
	$(BIN)/python docs/tools/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

format: .venv/.installed ## let ruff lay the code out
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## pin every version anew
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --group dev --group docs --generate-hashes \
	  --no-emit-index-url --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml

bench: .venv/.installed ## the figures of docs/performance.md, measured here; the last script, with the peers, takes about 25 minutes
	$(BIN)/python benchmarks/consume.py
	$(BIN)/python benchmarks/publish.py
	$(BIN)/python benchmarks/transactions.py
	$(BIN)/python benchmarks/telemetry.py
	$(BIN)/python benchmarks/spark.py
	$(BIN)/python benchmarks/dashboard.py
	$(BIN)/python benchmarks/side_by_side.py

clean: ## remove what the targets made
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
