# Three commands set everything up on a fresh machine: `make train`, `make lab` and `make test`.
#
# The virtual environment .venv and the install are skipped while pyproject.toml and constraints.txt are unchanged. pip's
# own configuration is honoured, and a torch that this Python has already, in the right range, is used as it is.
#
# CPU=1 installs the CPU build of torch (0.2 GB instead of 2.7 GB): with pip's own configuration if that offers this build,
# else from PyTorch's index. TORCH_INDEX=<address> names another index, in place of both.

PYTHON ?= python3
BIN := .venv/bin
TORCH := $(if $(CPU),.venv/torch-cpu)
PYTORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
STAMP := $(shell $(PYTHON) -c "import hashlib; print(hashlib.sha256(b''.join(open(f, 'rb').read() for f in ('pyproject.toml', 'constraints.txt'))).hexdigest()[:16])")

.PHONY: train lab weave test test-all constraints bench clean

train: .venv/train-$(STAMP)
	$(BIN)/minidist train

# The course in JupyterLab; ARGS="--no-browser --port 9999" goes to JupyterLab.
lab: .venv/course-$(STAMP)
	$(BIN)/python -m exercises lab $(ARGS)

# The notebooks' %%piece cells get the package's source; ARGS=--run runs each notebook and stores what it gives.
weave: .venv/course-$(STAMP)
	$(BIN)/python -m minidist.tools.notebook.weave $(ARGS) chapters

# The gate, which decides whether a change lands, and the exhaustive suite (CONTRIBUTING.md says what is in which). A test
# that a busy machine may have failed runs once more, alone (tests/helpers/flaky.py).
#
# Three workers for two cores: while the ranks of one test wait for each other, those of another compute. Bytecode is
# stored whatever the environment says: hundreds of processes import the package.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test test-all: PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal --rerun-flaky -p tests.helpers.cpu_seconds -rs --durations=10
test: .venv/test-$(STAMP)
	$(PYTEST)

test-all: .venv/test-$(STAMP)
	$(PYTEST) -m ""

bench: .venv/test-$(STAMP)
	$(BIN)/python -m bench dp

.venv/train-$(STAMP): | .venv/python $(TORCH)
	$(BIN)/python -m pip install --editable .
	@touch $@

# The kernel is named in .venv itself, or one of the system's, without minidist, could come first.
.venv/course-$(STAMP): | .venv/python $(TORCH)
	$(BIN)/python -m pip install --editable '.[course]'
	$(BIN)/python -m ipykernel install --sys-prefix > /dev/null
	@touch $@

.venv/test-$(STAMP): | .venv/python $(TORCH)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[test]'
	@touch $@

# Renew the versions with which the suite is run, on purpose: run `make test` with them before they are committed. torch is
# not among them, because a torch that is installed already is used as it is; pyproject.toml bounds it.
constraints: FRESH := .venv-fresh
constraints:
	rm -rf $(FRESH)
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet --editable '.[test]'
	$(FRESH)/bin/python -m pip freeze --exclude-editable | grep -viE '^(torch|triton|nvidia|cuda)' > constraints.txt
	rm -rf $(FRESH)

# With the system's packages only if one of them is a torch that fits: nobody downloads gigabytes twice.
.venv/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'minidist needs Python 3.11 or newer; this is ' + sys.version.split()[0] + '. Use make PYTHON=python3.12 ...')"
	$(PYTHON) -m venv .venv $$($(PYTHON) -c "import torch; v = tuple(map(int, torch.__version__.split('.')[:2])); print('--system-site-packages' * ((2, 11) <= v < (2, 14)))" 2>/dev/null)
	@touch $@

# Asking for the build by name fails within a second where pip knows only the CUDA build; on macOS every build is a CPU
# build. The first try is silent about that; the second shows what pip reports. An index that cannot be reached is asked
# twice, not six times, as pip does for each package by default.
.venv/torch-cpu: | .venv/python
	@install() { $(BIN)/python -m pip install --disable-pip-version-check --retries 1 \
	    'torch==2.13.0$(if $(filter Linux,$(shell uname)),+cpu)' "$$@"; }; \
	$(if $(TORCH_INDEX),install --index-url '$(TORCH_INDEX)',install 2> /dev/null || install --extra-index-url $(PYTORCH_CPU_INDEX)) \
	  || { echo; echo "CPU=1: the CPU build of torch cannot be installed $(if $(TORCH_INDEX),from $(TORCH_INDEX),with pip's own \
	configuration or from $(PYTORCH_CPU_INDEX)); pip's report is above." \
	  "Name an index of CPU builds that this machine can reach: make CPU=1 TORCH_INDEX=<address> $(or $(MAKECMDGOALS),train)"; false; } >&2
	@touch $@

clean:
	rm -rf .venv
