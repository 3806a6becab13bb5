# `make serve` and `make test` are all you need; what they need is installed into .venv on first use.
PY   ?= python3
PORT ?= 1919
J    ?= 3
# EXTRA=cuda: FlashInfer too, on a machine with an NVIDIA GPU
EXTRA ?=
BIN  := .venv/bin
SHELL := /bin/bash
export PATH := $(CURDIR)/$(BIN):$(PATH)
# several people may work in one checkout: whoever writes notebooks into the package does so alone
LOCK := $(if $(shell command -v flock),flock .venv/.lock)
PYTEST = $(BIN)/python -m pytest -n $(J) --dist worksteal
need_nb = $(if $(NB),,$(error say which chapter: make $@ NB=core/10_kv_cache.table))
.PHONY: help serve test test-browser test-clients replicas screenshot vendor test-long mutants docs wheel wheel-arm nbs export edit done check lint embedded readme try exercises lab cov install flashinfer clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## ?/\t/' | expand -t 14

serve: .venv/.core       ## serve a model on PORT=1919 (MODEL=a checkpoint, default the embedded one; ARGS=more flags)
	@exec $(BIN)/python -m minisgl_lit serve --port $(PORT) $(if $(MODEL),--model $(MODEL)) $(ARGS)
test: .venv/.all         ## run every notebook and every test (T=tests/test_policy.py for some)
	$(PYTEST) $(T)
test-long: .venv/.all .venv/.triton .venv/.ray  ## the same with the long tests and the slow cells (TST_FLAGS="slow gpu" for GPU cells too)
	TST_LONG=1 TST_FLAGS="$(or $(TST_FLAGS),slow)" $(PYTEST)
test-browser: .venv/.browser  ## use the page in Chromium as people do
	TST_BROWSER=1 $(PYTEST) -q tests/browser
test-clients: .venv/.all  ## clients that others have written, each in an environment of its own (.clients)
	TST_CLIENTS=1 $(BIN)/python -m pytest -q -n 0 tests/test_other_clients.py
replicas: .venv/.all     ## three engines that sleep behind the router: predicted against measured
	$(BIN)/python tests/script.py tools/sleeping_replicas report
screenshot: .venv/.browser    ## the pictures of the page for the docs: docs/images/page*.png
	TST_BROWSER=1 TST_SCREENSHOT=docs/images $(BIN)/python -m pytest -q tests/browser/test_pictures.py
vendor:                  ## fetch the libraries of the page anew, as tests/vendor.py names them (needs npm)
	$(or $(wildcard $(BIN)/python),python3) tests/vendor.py
mutants: .venv/.all      ## break caches and scheduler one line at a time; some test must notice each
	$(BIN)/python tests/mutants.py -j $(J)
cov: .venv/.all          ## the tests run on the exported package, with coverage
	TST_PACKAGE=1 $(PYTEST) -q --cov --cov-report=term-missing
check: .venv/.all        ## lint, types; package, notebooks, README and settings agree; no chapter reads ahead
	@$(BIN)/ruff check --quiet minisgl_lit tests docs
	@$(BIN)/pyright --pythonpath $(BIN)/python >.venv/.pyright 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -q -n 0 tests/test_project.py tests/test_chapters.py || failed=tests; \
	wait $$types || { cat .venv/.pyright; failed="$$failed types"; }; \
	test -z "$$failed" || { echo "make check: these failed: $$failed"; exit 1; }
lint: .venv/.all         ## lint and types alone
	$(BIN)/ruff check --quiet minisgl_lit tests docs
	$(BIN)/pyright --pythonpath $(BIN)/python
docs: .venv/.all         ## build the book into docs/_build/html; any warning is an error
	$(BIN)/python -m sphinx -j auto -b html -W --keep-going -n -q -d docs/_build/doctrees docs docs/_build/html
wheel: .venv/.all        ## sdist, and a wheel with kernels for machines like this (FOR=here: for this one alone), used in an empty environment
	@rm -rf dist build/lib* build/bdist.*
	$(BIN)/python tests/ship_kernels.py $(FOR)
	$(BIN)/python -m build --no-isolation --sdist --wheel --outdir dist . >/dev/null
	$(BIN)/python tests/wheel_check.py dist
wheel-arm: .venv/.all  ## a wheel with kernels for arm64 beside it (Debian: gcc-aarch64-linux-gnu), built but not used
	@rm -rf build/lib* build/bdist.*
	CC=aarch64-linux-gnu-gcc $(BIN)/python tests/ship_kernels.py aarch64
	$(BIN)/python -m build --no-isolation --wheel --outdir dist . >/dev/null
edit: .venv/.all         ## edit NB=core/10_kv_cache.table: write the chapter as text, nbs/core/10_kv_cache.table.py
	$(need_nb)@test -e nbs/$(NB).ipynb || { echo 'there is no chapter nbs/$(NB).ipynb; NB is its name, such as core/10_kv_cache.table'; exit 1; }
	@test ! -e nbs/$(NB).py || { echo 'nbs/$(NB).py is there already: make done NB=$(NB), or remove it'; exit 1; }
	@$(BIN)/jupytext --quiet --to py:percent nbs/$(NB).ipynb -o nbs/$(NB).py && echo 'edit nbs/$(NB).py, then: make done NB=$(NB)'
done: .venv/.all         ## done NB=core/10_kv_cache.table: text back to notebook (or a new one), export, run, store outputs
	$(need_nb)@$(LOCK) $(BIN)/python tests/done.py $(NB)
nbs: export              ## run all notebooks and store their true outputs (NB=nbs/core/09_*.ipynb for some)
	$(BIN)/python tests/nbrun.py --save -j $(J) $(NB)
	@$(BIN)/python docs/readme.py
export: .venv/.all       ## notebooks -> minisgl_lit/
	@$(LOCK) $(BIN)/python tests/export.py
try: .venv/.all          ## try NB=core/12_kv_cache.radix EX=2: an exercise's edit in a copy of its chapter, and which cells fail
	$(need_nb)@$(BIN)/python tests/exercises.py $(NB) $(EX)
exercises: .venv/.all    ## try all exercises of the weekend path
	TST_EXERCISES=1 $(PYTEST) -q tests/test_chapters.py -k goes_as
lab: .venv/.lab          ## the book in JupyterLab, with all that it needs (ARGS=more flags)
	@exec $(BIN)/python -m jupyter lab --notebook-dir nbs $(ARGS)
readme: .venv/.all       ## README.md from nbs/index.ipynb
	$(BIN)/python docs/readme.py
embedded: .venv/.all     ## train the embedded model anew
	$(BIN)/python tests/script.py tools/embedded_tasks tools/embedded main
install: .venv/.all      ## all that the targets above need
flashinfer: .flashinfer/.fetched   ## FlashInfer's Python, for tests on a GPU that computes nothing
clean:           ## remove what was built, .venv included
	rm -rf .venv .clients .flashinfer docs/_build docs/nbs docs/src build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage*

.venv/bin/python:
	$(PY) -m venv .venv
# what pip fetches for a first start, a line for each file of a megabyte or more; standard output is the server's.
# Python compiles what is imported; pip would compile all files of all packages, one after the other
pip_install = set -o pipefail; $(BIN)/python -m pip install --no-compile --disable-pip-version-check --progress-bar off -e '$(1)' | \
	  sed -nE 's/^ *(Downloading|Using cached) ([^ ]+) \(([0-9.]+ [MG]B)\)$$/  \1 \2, \3/p' >&2
.venv/.core: settings.ini setup.py | .venv/bin/python
	@echo 'Installing into .venv what settings.ini requires: torch, transformers and some fifty packages more (README says how large)' >&2
	@$(call pip_install,.$(EXTRA:%=[%]))
	@touch $@
.venv/.all: settings.ini setup.py | .venv/bin/python
	@echo 'Installing into .venv what chapters, tests and docs need, too' >&2
	@$(call pip_install,.[dev$(EXTRA:%=,%)])
	@touch .venv/.core $@
.venv/.lab: .venv/.all
	$(BIN)/python -m pip install -q --disable-pip-version-check jupyterlab
	@touch $@
# its interpreter and its compiler need no GPU
.venv/.ray: .venv/.all
	@$(BIN)/python -m pip install -q --disable-pip-version-check "$$(grep -o 'ray\[serve\][^ ]*' settings.ini)" && touch $@ || \
	  echo 'Ray could not be installed, so the tests that need it are skipped'
.venv/.triton: .venv/.all
	@$(BIN)/python -m pip install -q --disable-pip-version-check triton && touch $@ || \
	  echo 'Triton could not be installed, so the tests that need it are skipped'
# nothing of what FlashInfer needs on a GPU: its Python is enough
.flashinfer/.fetched: settings.ini | .venv/bin/python
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-compile --upgrade --target .flashinfer \
	  "$$(grep -o 'flashinfer-python[^ ]*' settings.ini)" apache-tvm-ffi einops nvidia-ml-py && touch $@ || \
	  echo 'FlashInfer could not be fetched, so the tests that need it are skipped'
.venv/.chromium: | .venv/bin/python
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; } || \
	  { echo 'make test-browser needs chromium and chromedriver on the PATH (Debian: apt-get install chromium chromium-driver)'; exit 1; }
	@touch $@
.venv/.browser: .venv/.all .venv/.chromium
	$(BIN)/python -m pip install -q --disable-pip-version-check selenium
	@touch $@
