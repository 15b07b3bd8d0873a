# make demo   raw logs -> dataset -> trained model -> ROC AUC      make demo RAW=/path/with/day_files
# make test   the whole test suite                                 make test PYTEST_ARGS="-m slow"
# Both install what they need into .venv first; PYTHON=python3.12 chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install -c constraints.txt
PYTEST_ARGS ?= -m "not slow"
NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h')
INSTALLED := $(VENV)/.installed

.PHONY: venv demo test lint format bench clean

venv: $(INSTALLED)

$(INSTALLED): constraints.txt pyproject.toml setup.py $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: expected Python 3.10 or newer, got " + sys.version.split()[0] + "; make PYTHON=python3.12 names another")'
	@command -v $(CXX) >/dev/null || echo "note: there is no C++ compiler ($(CXX)), so plain-torch operators will run, several times slower; install g++ and make venv again"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== installing torch, the build tools and the package into $(VENV) (once) =="
	@$(PIP) torch
	@$(PIP) setuptools wheel
	@$(PIP) --no-build-isolation -e ".[preproc,plots,dev]"
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/python demo.py $(if $(RAW),--raw "$(RAW)") $(DEMO_ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/ops.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/breakdown.py

clean:
	rm -rf build *.egg-info $(VENV) dlrm/_ops_*.so
