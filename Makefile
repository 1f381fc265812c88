# make train: train a GPT on real text over two processes.   make test: the whole suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test test-all test-hf check bench venv clean

venv: $(STAMP)

# torch comes first and pinned, so that no other requirement can choose another build of it. What is imported is compiled
# when it is; most of what is installed never is.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("ptrainx needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/ptrainx run -n 2 examples/gpt/train.py

# Two workers, a file of tests at a time; each has one pool of processes for tests of real worlds.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

# Also the tests that take tens of seconds each and that others back up.
test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# The example models through transformers itself, which is installed for it: both ways, equal logits.
test-hf: $(STAMP)
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e ".[hf]"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint.with_transformers

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/docs

bench: $(STAMP)
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) build dist *.egg-info
