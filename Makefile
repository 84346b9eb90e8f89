# Everything starts here; `make study` and `make test` need only make and a Python of 3.11 or newer.
# PYTHON=… picks the Python that makes .venv, TORCH=… the torch that goes in (see tools/venv.sh).
PYTHON ?= python3
export PYTHON TORCH

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv study test coverage lint check-all notebooks browser bench drill fuzz audit clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv:  ## create or refresh .venv, with .venv/bin/kvlab
	@sh tools/venv.sh

study: venv  ## the memory wall on this machine: a table, figures, findings in words
	.venv/bin/kvlab run memory_wall --size small

test: lint  ## lint and tests, in two processes
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

coverage: venv  ## the tests again, with the lines that none of them runs: fails below 90 % (takes twice the time)
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov=kvlab --cov-report=term-missing:skip-covered

lint: venv  ## ruff, and mypy on what users import
	.venv/bin/ruff check
	.venv/bin/mypy

check-all: export KVLAB_CHECK_ALL = 1
check-all: lint coverage bench  ## everything: lint, tests (compiled kernels in full), coverage, benchmark gates

notebooks: venv  ## run the notebooks and keep their outputs in them
	.venv/bin/python tools/notebooks.py

browser: venv  ## look at every notebook in a real browser (the machine's Chromium; installs playwright)
	.venv/bin/python -m pip install -q --group browser
	KVLAB_BROWSER=all .venv/bin/python -m pytest tests/test_browser.py

bench: venv  ## the benchmark gates: a printed table and profiles/bench/bench.json
	.venv/bin/python -m kvlab.bench

drill: venv  ## faults on purpose (kills, full disks, damage, …): nothing lost, nothing doubled; some 10 minutes
	.venv/bin/python -m kvlab.drill

fuzz: venv  ## hostile input, 100,000 for every parser: a table, findings in profiles/fuzz (an hour or more)
	.venv/bin/python -m pip install -q atheris || echo "make fuzz: no atheris here; hypothesis alone then"
	nice .venv/bin/python tools/fuzz.py

audit:  ## known vulnerabilities in the locked versions (pip-audit; needs the advisory database)
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install -q pip-audit
	rm -f build/audit/found.txt
	build/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt -o build/audit/found.txt || { \
	cat build/audit/found.txt 2>/dev/null || echo "make audit: the advisory database could not be asked" >&2; exit 1; }

clean:  ## remove .venv, caches and build output; runs in profiles/ stay
	rm -rf .venv dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
