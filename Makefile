# Each target sets up what it needs by itself: a virtual environment of its own, with plain pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test bench lint clean

demo: $(VENV)/ready
	rm -rf demo-run
	$(BIN)/straightdp demo --out demo-run
	$(BIN)/straightdp replay demo-run/release

test: $(VENV)/ready-dev lint
	$(BIN)/python -m pytest -n auto

bench: $(VENV)/ready-bench
	$(BIN)/python benchmarks/check_contenders.py
	$(BIN)/python benchmarks/dp_step.py --case demo --device cpu --seconds 15 --turns $(VENV)/turns

lint: $(VENV)/ready-dev
	$(BIN)/ruff check src tests benchmarks experiments
	$(BIN)/ruff format --check src tests benchmarks experiments
	$(BIN)/pyright --pythonpath $(BIN)/python src

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/ready-bench: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) demo-run .pytest_cache .ruff_cache .hypothesis
