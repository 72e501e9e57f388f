# Everything runs in .venv, which the first target that needs it creates. No system Java is needed.
PYTHON ?= python3
BIN := .venv/bin
# Seven processes on two cores, because most tests wait for a broker. The tests of one file stay together, in order, and so
# do all tests that use Spark (`tests/conftest.py`). One Kafka and one PostgreSQL serve all processes.
# The run ends if a process dies (pytest-xdist would wait for its tests for ever) or is stuck in a library, where the time
# limit of a test has no effect.
SIDE_BY_SIDE := --numprocesses 7 --dist loadscope --no-loadscope-reorder --max-worker-restart 0 \
  -o faulthandler_timeout=1500 -o faulthandler_exit_on_timeout=true
UV_VERSION := 0.13.8
# Tests start hundreds of processes. Without bytecode files, each of them would compile all its imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all chaos simulate endurance lint docs format lock bench clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "penstock needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$(UV_VERSION)"
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --compile-bytecode --require-hashes -r requirements.lock
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: .venv/.installed ## the main job, end to end, on a real Kafka and Spark (ARGS="--all": the whole year)
	$(BIN)/penstock demo $(ARGS)

test: .venv/.installed ## test every promise: pure layers, engines in memory, one real Kafka, PostgreSQL and Spark (minutes)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-all: .venv/.installed ## all tests except chaos (about half an hour)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not chaos" $(ARGS)

chaos: .venv/.installed ## tests that restart, kill, freeze and cut off processes and brokers (about three quarters of an hour)
	$(BIN)/python -m pytest tests -m chaos $(ARGS)

simulate: .venv/.installed ## ten thousand simulated runs of the consumer, on a clock moved by hand, and of stores, on a disk that tears writes
	PENSTOCK_SIMULATIONS=10000 $(BIN)/python -m pytest --numprocesses 2 tests/simulation $(ARGS)

endurance: .venv/.installed ## thirty campaigns of all parts under faults; writes docs/endurance.md (hours; ARGS="--campaigns 2")
	PYTHONPATH=src:tests $(BIN)/python -m endurance $(ARGS)

lint: .venv/.installed ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.installed ## generate pages and pictures from the code, and build the site of docs/ in site/; a warning is an error
	$(BIN)/python docs/tools/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

format: .venv/.installed ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## pin the newest version of every package
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --group dev --group docs --generate-hashes \
	  --no-emit-index-url --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml

bench: .venv/.installed ## measure the figures of docs/performance.md here; the last script, with the peers, takes about 25 minutes
	$(BIN)/python benchmarks/consume.py
	$(BIN)/python benchmarks/publish.py
	$(BIN)/python benchmarks/transactions.py
	$(BIN)/python benchmarks/telemetry.py
	$(BIN)/python benchmarks/spark.py
	$(BIN)/python benchmarks/dashboard.py
	$(BIN)/python benchmarks/side_by_side.py

clean: ## remove the files of the targets
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
