# Two commands: `make run` compares six methods on bundled data, `make test` checks everything.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# What `make run` compares
METHODS := local,fedavg,fedavg-ft,hier-fedavg,ditto,permfl

# Chromium opens reports and mosquitto passes messages on in tests: installed where root may; else these tests are
# skipped, and say so
SYSTEM := for tool in chromium mosquitto; do PATH="$$PATH:/usr/sbin" command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	[ -z "$$missing" ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; } || true

.PHONY: run test faults fuzz network docs measure format clean

run: $(VENV)/.run
	$(BIN)/polytier compare $(METHODS) --data digits-sites --split 3:1:1 --steps 20 --rounds 100 --eval-every 5 \
		--seeds 5 --jobs 2 --out runs/demo

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright
	$(BIN)/pytest -n 2

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[test]"
	$(SYSTEM)
	touch $@

# All bad inputs, of which `make test` runs a sample: minutes
fuzz: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m faults.fuzz

# Nodes in network namespaces (as root; else on the loopback interface), faults, fuzz and figures, on an idle machine;
# writes docs/results/network.json. One part: make network PART=--only=large
network: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m network_full.run_all $(PART)

# The documentation site, in site/; docs/settings.md is made from the code
docs: $(VENV)/.test
	$(BIN)/python docs/make_settings.py
	$(BIN)/mkdocs build --strict

# Fails at every file operation of run folders; takes about an hour
faults: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m faults.run_all

# All measurements of docs/performance.md, on an idle machine: half an hour; writes docs/results/bench.json
measure: $(VENV)/.test
	$(BIN)/python benchmarks/measure.py

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs
