# Each target does all its own set-up: the environment is made from requirements.lock when that has changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
STAMP := $(VENV)/.stamp
CLIENTS := .clients

.PHONY: setup demo serve test test-slow test-clients lint wheel clean

setup: $(STAMP)

demo: $(STAMP)
	$(VENV)/bin/draftsmith demo

# With the embedded models; options such as SERVE="--port 9000".
serve: $(STAMP)
	$(VENV)/bin/draftsmith serve $(SERVE)

test: $(STAMP)
	$(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# What takes too long for every change: floods of requests, and the time and memory that hostile ones may cost.
test-slow: $(STAMP)
	$(VENV)/bin/python -m pytest -m slow

# The server under clients that other people wrote, in an environment of their own.
test-clients: $(STAMP) $(CLIENTS)/.stamp
	DRAFTSMITH_PYTHON=$(CURDIR)/$(VENV)/bin/python $(CLIENTS)/bin/python -m pytest --override-ini addopts=-ra \
		--override-ini filterwarnings= --confcutdir tests/serving/clients tests/serving/clients

lint: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

# The source package, and the wheel that it builds by itself in an environment of its own, into dist/.
wheel: $(STAMP)
	rm -rf dist
	$(VENV)/bin/python setup.py --quiet sdist
	DRAFTSMITH_REQUIRE_NATIVE=1 $(VENV)/bin/python -m pip wheel --no-deps --wheel-dir dist dist/*.tar.gz

clean:
	rm -rf $(VENV) $(CLIENTS) build dist report src/*.egg-info src/draftsmith/native/*.so .pytest_cache .mypy_cache .ruff_cache
	find src tests recipes benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements.lock requirements-serve.lock pyproject.toml setup.py $(wildcard src/draftsmith/native/csrc/*)
	@echo "Setting up $(VENV): two to six minutes, 1.8 GB"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --requirement requirements.lock
	$(VENV)/bin/python -m pip install --quiet --no-deps --requirement requirements-serve.lock
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(CLIENTS)/.stamp: requirements-clients.lock
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --requirement requirements-clients.lock
	touch $@
