# make train   sets everything up, then trains a model on 2 ranks
# make test    the same set-up if needed, then a pass over everything that it can do
# CONTRIBUTING.md lists the other targets and the variables.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
RANKS ?= 2
TRAIN_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Whether build and tests compile the CUDA kernels: ON or OFF.
CUDA ?= $(if $(findstring FUSEDPG_CUDA=,$(CMAKE_ARGS)),OFF,$(if $(shell command -v nvcc),ON,OFF))

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PATH := $(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1

# TORCH="torch==2.11.0" replaces the pinned one; the stamps carry its name, so
# that a change of torch installs and builds again.
TORCH_ARG := $(if $(TORCH),'$(TORCH)',-r requirements/torch.txt)
TORCH_TAG := $(or $(shell printf '%s' '$(TORCH)' | tr -c 'A-Za-z0-9.' '_'),pinned)
DEPS := $(VENV)/.deps-$(TORCH_TAG)
BUILT := $(VENV)/.built-$(TORCH_TAG)
KERNELS := $(VENV)/.kernels-$(TORCH_TAG)
LINT := $(VENV)/.lint
MPI := $(VENV)/.mpi
FRAMEWORKS := $(VENV)/.frameworks$(if $(RAY),-ray)
DOCS := $(VENV)/.docs
BUILD := $(or $(FUSEDPG_BUILD_DIR),build/cmake)
NATIVE := $(shell find csrc cmake -type f) CMakeLists.txt setup.py pyproject.toml
CXX_FILES = $(shell find csrc fusedpg benchmarks tests/cpp tests/fake_gpu patches -name '*.?pp' -o -name '*.cu' -o -name '*.cuh' \
  -o -name '*.h' -o -name '*.cc')

.PHONY: help
help:
	@sed -n 's/^# //p' Makefile | head -3

# --- set-up: idempotent, by stamp files ----------------------------------------
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo 'fusedpg needs Python >= 3.10: make PYTHON=...' >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null \
	  || { echo 'fusedpg needs a C++20 compiler, e.g. the package g++' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo 'is the package python3-venv installed?' >&2; exit 1; }

$(DEPS): requirements/torch.txt requirements/build.txt requirements/test.txt \
         requirements/examples.txt requirements/nccl.txt | $(VENV)/bin/python
	rm -f $(VENV)/.deps-* $(VENV)/.built-*
	# Python compiles what is imported, which is less than what is installed; unless it may not.
	$(PIP) install --no-compile $(TORCH_ARG) -r requirements/build.txt \
	  -r requirements/test.txt -r requirements/examples.txt
	$(if $(PYTHONDONTWRITEBYTECODE),$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true)
	# Its headers, for the CUDA kernels; a CUDA build of torch brings its own.
	if command -v nvcc >/dev/null \
	  && ! $(BIN)/python -c 'import nvidia.nccl' 2>/dev/null; then \
	  $(PIP) install -r requirements/nccl.txt; fi
	touch $@

# Without the CUDA kernels, which take nvcc some minutes: they are `make build`'s.
$(BUILT): $(DEPS) $(NATIVE)
	rm -f $(VENV)/.built-*
	CMAKE_ARGS="-DFUSEDPG_CUDA=OFF $(CMAKE_ARGS)" $(PIP) install --no-build-isolation --no-deps -e .
	touch $@

# For any torch, as the C++ tests and `make test-rest` run them on a fake device.
$(KERNELS): $(BUILT)
ifeq ($(CUDA),ON)
	cmake $(BUILD) -DFUSEDPG_CUDA=ON $${CMAKE_ARGS:-}
	cmake --build $(BUILD) --target fusedpg_cuda
	cp --remove-destination $(BUILD)/fusedpg/libfusedpg_cuda.so $(BUILD)/fusedpg/_build_info.py fusedpg/
endif
	rm -f $(VENV)/.kernels-*
	touch $@

$(LINT): requirements/lint.txt | $(DEPS)
	$(PIP) install -r requirements/lint.txt
	touch $@

$(DOCS): requirements/docs.txt | $(DEPS)
	$(PIP) install -r requirements/docs.txt
	touch $@

$(MPI): requirements/mpi.txt | $(DEPS)
	$(PIP) install -r requirements/mpi.txt
	touch $@

# The constraints keep pip from replacing torch and what the tests are pinned to. DeepSpeed's setup
# imports torch.
$(FRAMEWORKS): requirements/frameworks.txt requirements/ray.txt | $(DEPS)
	$(PIP) install --no-build-isolation -r requirements/frameworks.txt $(if $(RAY),-r requirements/ray.txt) \
	  $(addprefix -c requirements/,$(if $(TORCH),,torch.txt) test.txt examples.txt build.txt)
	touch $@

.PHONY: setup build
setup: $(DEPS)
build: $(KERNELS)

# --- use ----------------------------------------------------------------------
.PHONY: train smoke bench bench-kernels bench-engine figures docs wheel wheels try-wheel sdist release newest-torch findings
train: $(BUILT)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) \
	  examples/train_digits.py $(TRAIN_ARGS)

# The shortest proof that a build works.
smoke: $(BUILT)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/quickstart.py

bench: $(BUILT)
	$(BIN)/python benchmarks/collectives.py --backends fused,gloo --plot $(BENCH_ARGS)
	$(BIN)/python benchmarks/fused_step.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/optimizers.py $(BENCH_ARGS)

figures: $(DEPS)
	$(BIN)/python docs/figures/fused_step.py
	$(BIN)/python benchmarks/report.py

bench-kernels bench-engine: bench-%: $(DEPS)
	cmake -S . -B build/bench -G Ninja -DFUSEDPG_BUILD_PYTHON=OFF -DFUSEDPG_BUILD_BENCHMARKS=ON
	cmake --build build/bench --target fusedpg_bench_$*
	build/bench/fusedpg_bench_$*

wheel: $(DEPS)
	rm -rf build/lib* build/bdist*
	$(BIN)/python -m build --wheel --no-isolation

sdist: $(DEPS)
	$(BIN)/python -m build --sdist --no-isolation

# The site, in build/site: open index.html. A broken link or docstring is an error. Nothing is built.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS)
	$(BIN)/mkdocs build --strict
	@echo 'open build/site/index.html; its search needs a server: python3 -m http.server -d build/site'

# The notes and the page of a release, beside its packages in dist/.
release:
	$(PYTHON) tools/release.py $(TAG) dist

# One wheel for every supported torch, tried beside each. WHEELS="2.13 2.14": only these.
wheels: | $(VENV)/bin/python
	$(BIN)/python tools/wheels.py $(if $(WHEELS),--torch $(WHEELS)) $(WHEELS_ARGS)

# What is in dist/ beside one torch, in a fresh environment: make try-wheel TORCH=2.12.1
try-wheel: | $(VENV)/bin/python
	$(BIN)/python tools/try_wheel.py '$(patsubst torch==%,%,$(or $(TORCH),$(error try-wheel needs TORCH=)))' $(TRY_ARGS)

# Whether the index has a newer torch than those that fusedpg knows.
newest-torch: $(DEPS)
	$(BIN)/python tools/newest_torch.py

# Behaviour of other libraries, each in an environment of its own: findings/README.md.
findings:
	for script in findings/*_*.sh; do echo "== $$script"; PYTHON=$(PYTHON) bash "$$script"; done

# --- tests ----------------------------------------------------------------------
# Two at a time: many of them wait, for a deadline or for each other's processes.
CTEST := ctest --output-on-failure --timeout 600 --parallel 2
# $(call cpp_tests,build folder,CMake arguments,environment and launcher,what follows)
define cpp_tests
cmake -S . -B $(1) -G Ninja -DFUSEDPG_BUILD_PYTHON=OFF -DFUSEDPG_BUILD_TESTS=ON $(2)
cmake --build $(1)
$(3) $(CTEST) --test-dir $(1)$(4)
endef

# TSan cannot place its shadow memory under the widest address randomisation.
FIXED_LAYOUT := $(shell setarch "$$(uname -m)" -R true 2>/dev/null && echo setarch "$$(uname -m)" -R)

.PHONY: test test-rest test-all test-cpp test-python test-sanitizers test-asan test-tsan test-aarch64 test-c10d test-docs test-mpi test-frameworks fake-gpu fuzz

# In the module's own build folder: most of it is compiled there.
test-cpp: $(KERNELS)
	cmake $(BUILD) -DFUSEDPG_BUILD_TESTS=ON
	cmake --build $(BUILD) --target fusedpg_cpp_tests
	$(CTEST) --test-dir $(BUILD)

# What the CUDA engine runs on where there is no GPU; test-cpp builds it too.
fake-gpu: $(KERNELS)
	cmake $(BUILD) -DFUSEDPG_BUILD_TESTS=ON
	cmake --build $(BUILD) --target fusedpg_fake_gpu

# Also where Python may not keep it: else each of the tests' many processes compiles fusedpg anew, and
# pytest all files of tests.
BYTECODE := PYTHONDONTWRITEBYTECODE=

# Three at a time, as they wait for processes to start and end: PYTEST_ARGS="-n 0" for one. Whole
# files, for their fixtures' sake, in the order of conftest.py: by their number of tests the longest,
# which have few, would come last.
PYTEST := $(BYTECODE) $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Every capability once, in minutes: tests/python/parts.py says which tests are quick.
test: $(BUILT)
	$(PYTEST) tests --part quick $(PYTEST_ARGS)

# What `make test` leaves out.
test-rest: test-cpp fake-gpu
	$(PYTEST) tests --part rest $(PYTEST_ARGS)

# Both, and with more sizes, ranks and faults of the same kind.
test-all: test-cpp fake-gpu
	$(PYTEST) tests -m "" $(PYTEST_ARGS)

# The Python tests of both.
test-python: fake-gpu
	$(PYTEST) tests $(PYTEST_ARGS)

# Random programs of all subjects, or of SUBJECT=..., for MINUTES, or of one seed again: SUBJECT=...
# WHERE=... SEED=... as a failure says.
MINUTES ?= 10
fuzz: fake-gpu
	cd tests/python && $(BIN)/python -m fuzz --minutes $(MINUTES) $(if $(SUBJECT),--subject $(SUBJECT)) \
	  $(if $(WHERE),--where '$(WHERE)') $(if $(SEED),--seed $(SEED))

test-sanitizers: test-asan test-tsan

test-asan: $(DEPS)
	$(call cpp_tests,build/asan,-DFUSEDPG_SANITIZE=address$(comma)undefined,\
	  UBSAN_OPTIONS=print_stacktrace=1)

# Seldom TSan's runtime fails itself (it asks for terabytes of shadow memory): that is no finding, so
# the tests run again. What it reports is one at once.
TSAN := TSAN_OPTIONS=halt_on_error=1 $(FIXED_LAYOUT)
test-tsan: $(DEPS)
	$(call cpp_tests,build/tsan,-DFUSEDPG_SANITIZE=thread,$(TSAN), || { \
	  grep -q "ThreadSanitizer failed to allocate" build/tsan/Testing/Temporary/LastTest.log && \
	  $(TSAN) $(CTEST) --test-dir build/tsan; })

test-aarch64: $(DEPS)
	$(call cpp_tests,build/aarch64,\
	  -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake)

# Deliberate faults, one at a time: which do the tests notice? It takes long, and resumes.
.PHONY: mutants
MUTANTS_ARGS ?= -j 2
mutants: $(DEPS)
	$(BIN)/python tools/mutants.py check
	$(BIN)/python tools/mutants.py build
	$(BIN)/python tools/mutants.py run $(MUTANTS_ARGS) || true
	$(BIN)/python tools/mutants.py report
	$(BIN)/python tools/tested.py

test-docs: $(BUILT)
	$(BIN)/python -m pytest tests/python/test_docs.py $(PYTEST_ARGS)

test-c10d: $(BUILT)
	$(BIN)/python tests/python/c10d_suite/run.py

test-mpi: $(BUILT) $(MPI)
	$(BYTECODE) FUSEDPG_TEST_MPI=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	  $(BIN)/mpirun -n $(RANKS) --map-by :OVERSUBSCRIBE \
	  $(BIN)/python -m pytest --with-mpi tests/python/mpi $(PYTEST_ARGS)

test-frameworks: $(BUILT) $(FRAMEWORKS)
	$(BYTECODE) FUSEDPG_TEST_FRAMEWORKS=1 $(BIN)/python -m pytest tests/python/test_frameworks.py $(PYTEST_ARGS)

comma := ,

# --- lint (pre-commit runs the same targets) --------------------------------------
.PHONY: lint lint-ruff lint-mypy lint-clang-format lint-layers format
lint: lint-layers lint-ruff lint-clang-format lint-mypy

lint-ruff: $(LINT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-mypy: $(LINT)
	$(BIN)/mypy

lint-clang-format: $(LINT)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

lint-layers:
	$(PYTHON) tools/check_layers.py
	$(PYTHON) tools/check_names.py

format: $(LINT)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

.PHONY: clean
clean:
	rm -rf build dist *.egg-info fusedpg/*.so fusedpg/pt*_* fusedpg/_build_info.py
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.built-* $(VENV)/.kernels-*
