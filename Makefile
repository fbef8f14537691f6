# Three commands do everything on a fresh machine: `make train`, `make lab` and `make test`.
#
# Set-up (a virtual environment in .venv, and the install) is skipped while pyproject.toml is unchanged; the run never is.
# pip's own configuration is honoured, and a torch that this Python has already, in the right range, is used as it is.

PYTHON ?= python3
BIN := .venv/bin
STAMP := $(shell $(PYTHON) -c "import hashlib; print(hashlib.sha256(open('pyproject.toml', 'rb').read()).hexdigest()[:16])")

.PHONY: train lab weave test test-all bench clean

train: .venv/train-$(STAMP)
	$(BIN)/minidist train

# The course in JupyterLab; ARGS="--no-browser --port 9999" goes to JupyterLab.
lab: .venv/course-$(STAMP)
	$(BIN)/python -m exercises lab $(ARGS)

# The notebooks' %%piece cells get the package's source; ARGS=--run runs each notebook and stores what it gives.
weave: .venv/course-$(STAMP)
	$(BIN)/python -m minidist.tools.notebook.weave $(ARGS) chapters

# Two workers: while the ranks of one wait for each other, those of the other compute.
test: .venv/test-$(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -rs --durations=10

# Also what is exhaustive: every fault in every row that shows it, every layout of four ranks, all mutants.
test-all: .venv/test-$(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -rs --durations=10 -m ""

bench: .venv/test-$(STAMP)
	$(BIN)/python -m bench dp

.venv/train-$(STAMP): | .venv/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# The kernel is named in .venv itself, or one of the system's, without minidist, could come first.
.venv/course-$(STAMP): | .venv/python
	$(BIN)/python -m pip install --quiet --editable '.[course]'
	$(BIN)/python -m ipykernel install --sys-prefix > /dev/null
	@touch $@

.venv/test-$(STAMP): | .venv/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

# With the system's packages only if one of them is a torch that fits: nobody downloads gigabytes twice.
.venv/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'minidist needs Python 3.11 or newer; this is ' + sys.version.split()[0] + '. Use make PYTHON=python3.12 ...')"
	$(PYTHON) -m venv .venv $$($(PYTHON) -c "import torch; v = tuple(map(int, torch.__version__.split('.')[:2])); print('--system-site-packages' * ((2, 11) <= v < (2, 14)))" 2>/dev/null)
	@touch $@

clean:
	rm -rf .venv
