# make demo: install into .venv and train FedHKD with 11 ranks. make test: install and run the tests. make test-old-cpu:
# those of the schemes, with the kernels of a CPU of 2008, whose last bits are not those of a newer one. make docs: the
# documentation into build/docs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: demo test test-old-cpu docs install clean
demo: $(STAMP)
	set -eu; source $(VENV)/bin/activate; mpirun -n 11 python -m hkd_hpc.train

test: $(STAMP)
	set -eu; source $(VENV)/bin/activate; python -m pytest -q tests

test-old-cpu: $(STAMP)
	set -eu; source $(VENV)/bin/activate; ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default python -m pytest -q tests/schemes

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

$(VENV)/.docs: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@

install: $(STAMP)

$(STAMP): setup.py tools/activate_mpi.sh
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[torch,mpi,test]'
	grep -q activate_mpi $(VENV)/bin/activate || echo 'source "$$VIRTUAL_ENV/../tools/activate_mpi.sh"' >> $(VENV)/bin/activate
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
