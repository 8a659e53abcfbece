# make demo: install into .venv and train FedHKD with 11 ranks. make test: install and run the tests. make check: format,
# lint, types, imports and tests, as CI does. make test-old-cpu: the tests whose results could depend on float kernels, with
# those of a CPU of 2008, whose last bits are not those of a newer one. make docs: the documentation into build/docs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
TOOLS := $(addprefix $(VENV)/.,test dev docs)
STAMP := $(VENV)/.installed
ACTIVATE := set -eu; source $(VENV)/bin/activate
# Processes that run tests: four keep two cores busy, since many tests wait for their ranks.
WORKERS ?= 4
PYTEST := python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
OLD_CPU := ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default

.PHONY: demo check lint test test-old-cpu docs install tools clean
demo: $(STAMP)
	$(ACTIVATE); mpirun -n 11 python -m hkd_hpc.train

check: lint test

lint: $(VENV)/.dev
	$(ACTIVATE); ruff format --check .; ruff check .; mypy; lint-imports

test: $(VENV)/.test
	$(ACTIVATE); $(PYTEST) tests

test-old-cpu: $(VENV)/.test
	$(ACTIVATE); $(OLD_CPU) $(PYTEST) -m kernels $$(grep -rl --include='*.py' mark.kernels tests)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

install: $(STAMP)

# The tools of a target are installed with it: the extras test, dev and docs of setup.py; here all at once, for CI.
tools: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --editable '.[test,dev,docs]'
	touch $(TOOLS)

$(VENV)/.%: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --editable '.[$*]'
	touch $@

$(STAMP): setup.py tools/activate_mpi.sh
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[torch,mpi,report,pandas,privacy]'
	grep -q activate_mpi $(VENV)/bin/activate || echo 'source "$$VIRTUAL_ENV/../tools/activate_mpi.sh"' >> $(VENV)/bin/activate
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
