# `make demo` and `make test` are all a newcomer types; both set up .venv first.
#
#   TORCH=cpu   take PyTorch's CPU build from pytorch.org (on Linux, PyPI's brings CUDA's gigabytes)
#   PYTHON=...  the Python to make .venv with (3.11 or later)
#   FOLDER=core SEED=1  where `make mutants` changes the source, and its draw
#   CHROMIUM=...  the browser for `make test-page`, if it is not /usr/bin/chromium
#   FIREFOX=...   the second one for the exported page, if neither firefox-esr nor firefox is found

PYTHON ?= python3
TORCH ?= default
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX := $(if $(filter cpu,$(TORCH)),--extra-index-url https://download.pytorch.org/whl/cpu)
SEED ?= 1
UV_FLAGS ?= --torch-backend cpu
RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PEERS := $(VENV)/.installed-peers
PAGE := $(VENV)/.installed-page
SITE := $(VENV)/.installed-site
MACHINE_CODE := src/tiedgpt/infer/kernels/machine_code
CARRIED := rich markdown-it-py mdurl pygments plotext charset-normalizer joblib

.PHONY: demo test test-page test-gpu test-oldest test-all gpu-wheels lint format docs docs-check package release-check coverage mutants clean
.DELETE_ON_ERROR:

demo: $(RUN)
	$(BIN)/tiedgpt train --minutes 3

test: $(DEV)
	$(BIN)/python -m pytest

test-page: $(PAGE)
	$(BIN)/python -m pytest -m page tests/serve

test-gpu: $(DEV)  # they skip without a GPU
	$(BIN)/python -m pytest -n 0 -m gpu tests/gpu

gpu-wheels:  # what bench/gpu_check.py brings along to a machine with torch and nothing else
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--platform any --python-version 3.12 -c constraints.txt -d .wheels $(CARRIED)

test-oldest:  # the oldest packages that pyproject.toml allows, in .venv-oldest; needs uv
	uv venv --quiet --clear --python 3.11 .venv-oldest
	uv pip compile --quiet --extra dev --resolution lowest-direct --python-version 3.11 $(UV_FLAGS) \
		pyproject.toml -o .venv-oldest/requirements.txt
	uv pip install --quiet --python .venv-oldest $(UV_FLAGS) -r .venv-oldest/requirements.txt -e .
	.venv-oldest/bin/python -m pytest tests/core tests/text tests/weights tests/tie tests/infer

test-all: $(PEERS) $(PAGE)
	$(BIN)/python -m pytest -m ""

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/check_language.py

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(SITE) build/demo.html  # the site in build/site, with a small model on its first page
	$(BIN)/python docs/site/build.py --demo build/demo.html

docs-check: $(SITE)  # the site without the model: some seconds
	$(BIN)/python docs/site/build.py

build/demo.html: | $(RUN)  # about 2 MB, trained for three minutes on the documentation of Python
	$(BIN)/tiedgpt train --minutes 3 --out build/demo
	$(BIN)/tiedgpt export build/demo $@ --text "Return a new dictionary"

package: $(DEV)  # sdist and wheels in dist/, and a check of what is in them; on Linux, kernels compile for minutes
	rm -rf dist $(MACHINE_CODE)
	$(BIN)/python -m build
	if uname -sm | grep -qE "^Linux (x86_64|aarch64)$$"; then $(BIN)/python .ci/compile_kernels.py && $(BIN)/python -m build --wheel; fi
	rm -rf $(MACHINE_CODE)
	$(BIN)/python .ci/check_package.py dist

release-check: package  # what a release needs, as far as one machine can check it; TAG=v0.1.0 compares a tag
	TORCH=$(TORCH) $(BIN)/python .ci/release_check.py $(if $(TAG),--tag $(TAG))

coverage: $(DEV)  # of the quick tests, by line and branch; those of guards fail, which trace as coverage does
	mkdir -p build/coverage
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover

mutants: $(DEV)  # small faults in FOLDER of src, one at a time: is there a test that fails?
	$(BIN)/python bench/mutants.py $(FOLDER) --seed $(SEED)

clean:
	rm -rf $(VENV) .venv-oldest build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tiedgpt needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX) -c constraints.txt -e .
	touch $@

$(DEV): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX) -c constraints.txt -e '.[dev]'
	touch $@ $(RUN)

$(PAGE): $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX) -c constraints.txt -e '.[dev,page]'
	touch $@ $(DEV) $(RUN)

$(SITE): $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX) -c constraints.txt -e '.[dev,site]'
	touch $@ $(DEV) $(RUN)

$(PEERS): $(DEV)  # compiles llama.cpp, for minutes: for any CPU with AVX2, not for this one alone
	CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF" $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-cache-dir -c constraints.txt llama-cpp-python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX) -c constraints.txt -e '.[dev,peers]'
	touch $@ $(DEV) $(RUN)
