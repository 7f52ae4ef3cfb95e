# kvguard: `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help
.PHONY: help run test test-again check contract bench planted policies chaos soak lab lab-env lab-test lab-test-again lab-bench lab-sweep shots wheel clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: requirements/service.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvguard needs Python >= 3.11; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/service.txt -r requirements/dev.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

run: $(VENV)/.installed ## The service on embedded defaults with simulated traffic, live in the terminal
	$(BIN)/kvguard demo

test: $(VENV)/.installed ## Unit, contract and service tests (no vLLM needed)
	$(BIN)/python -m pytest -n auto -m 'not quiet'; parallel=$$?; $(BIN)/python -m pytest -m quiet && exit $$parallel

test-again: $(VENV)/.installed ## What failed the last time, alone
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

check: $(VENV)/.installed ## ruff, mypy --strict, import floors, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m alerts --check
	$(BIN)/python -m dashboards --check

.PHONY: generate sheets
generate: $(VENV)/.installed ## Write rules, alerts, dashboards and the pages made from code
	$(BIN)/python docs/metrics.py
	$(BIN)/python -m alerts
	$(BIN)/python -m dashboards

sheets: $(VENV)/.installed ## Draw docs/images/dashboard-*.png from the dashboards' own queries; needs prometheus
	$(BIN)/python -m dashboards --sheets docs/images

bench: $(VENV)/.installed ## Cost of the hook and speed of ingest, as ratios and counts
	$(BIN)/python -m benchmarks

chaos: $(VENV)/.installed ## 1,000 kills with -9 under concurrent switches; a million malformed OTLP bodies (half an hour)
	$(BIN)/python -m tests.chaos.kills --kills 1000
	$(BIN)/python -m tests.ingest.fuzz --bodies 1000000

soak: $(VENV)/.installed ## 30 minutes at 2,000 LLM requests a second: memory, drops, latency of directives
	$(BIN)/python -m benchmarks.soak --minutes 30

planted: $(VENV)/.installed ## Coverage and power of the estimator on planted data, 500 seeds a cell (minutes)
	$(BIN)/python -m benchmarks planted --full --first=100000

contract: $(VENV)/.installed ## The hook against the real connector base of vLLM 0.26, 0.29 and 0.32 (downloads their wheels)
	KVGUARD_CONTRACT=1 $(BIN)/python -m pytest tests/contract

.PHONY: rdma-test
rdma-test: $(VENV)/.installed ## RDMA probe over Soft-RoCE and Soft-iWARP in a QEMU guest; KVGUARD_RDMA_FULL=1 for 300,000 probes
	$(BIN)/python -m lab.guest test

.PHONY: rdma-test-again
rdma-test-again: rdma-test ## The same in a guest started anew

lab-env: $(VENV)/.installed ## Build the environment with vLLM (CPU), LMCache and the tiny model (cached outside the tree)
	$(BIN)/python -m lab env

lab: $(VENV)/.installed ## Real vLLM + LMCache + Redis with a live RTT injector, a mixed load, and the table
	$(BIN)/python -m lab run

lab-test: $(VENV)/.installed ## Tests on real vLLM (starts and stops everything itself)
	$(BIN)/python -m lab test

lab-test-again: $(VENV)/.installed ## Those of them that failed the last time
	$(BIN)/python -m lab test --last-failed --last-failed-no-failures none

lab-bench: $(VENV)/.installed ## Cost of the hook on real vLLM, 320 paired blocks; needs the machine for itself, 20 minutes
	$(BIN)/python -m lab bench

lab-sweep: $(VENV)/.installed ## kvguard sweep on real vLLM: latency tiers x concurrency, report in kvguard-sweep/; about 20 minutes
	$(BIN)/python -m lab sweep

policies: $(VENV)/.installed ## Simulated policies: public matrix, steps, goodput (KVGUARD_TRACES=DIR adds Mooncake's trace); many minutes
	$(BIN)/python -m benchmarks.policies

shots: $(VENV)/.installed ## Pictures of the console in docs/images, from the demo (needs chromium, about 3 minutes)
	$(BIN)/python docs/shots.py

wheel: $(VENV)/.installed ## Build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache

.PHONY: lock
lock: $(VENV)/.installed ## Pin and hash the requirement files again
	$(BIN)/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate pyproject.toml --extra service --extra report -o requirements/service.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate requirements/dev.in -c requirements/service.txt -o requirements/dev.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate requirements/bench.in -o requirements/bench.txt

.PHONY: probe-crossings
probe-crossings: $(VENV)/.installed ## False and late RTT crossings in 4,800 simulated hours (docs/results)
	$(BIN)/python -m tests.probe.simulated --hours 400 --seeds 1 2 3
