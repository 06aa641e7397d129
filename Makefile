# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv first; later runs skip that.
#   PYTHON=python3.12       the interpreter to build .venv with (3.10 or newer)
#   TORCH_INDEX=URL         where torch comes from instead of PyPI; https://download.pytorch.org/whl/cpu saves about
#                           3 GB on a machine without a GPU
#   ARGS="-k plan"          more arguments for pytest or for the demo
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
ALL ?=

VENV := .venv
BIN := $(VENV)/bin
HARDWARE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# Stamps per kind of machine, so that a home folder shared by both gets the missing half when it is needed.
STAMP := $(VENV)/.set-up-$(HARDWARE)
TORCH_STAMP := $(VENV)/.torch-$(HARDWARE)
ifeq ($(MAKELEVEL),0)
# The device of the tests is built while the rest is installed.
MAKEFLAGS += -j2
endif
DOCS_VENV := build/docs/venv
RELEASE := build/release
RELEASE_NEEDS := build==1.6.1 twine==7.0.0 check-wheel-contents==0.6.3
# No conflict warnings: without a GPU, Unsloth's wish for torchvision and xformers stays open on purpose.
# Modules are compiled when they are first imported: most of them never are.
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -q --no-warn-conflicts --no-compile
INSTALL := $(PIP_INSTALL) -c constraints.txt
UV_INSTALL := $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt

# What Unsloth imports. Not torchvision and xformers: PyPI's builds of both are for CUDA and break beside a CPU torch.
UNSLOTH_NEEDS := bitsandbytes cut_cross_entropy diffusers einops hf_transfer json5 msgspec nest-asyncio pillow \
	protobuf psutil pydantic pyyaml regex rich sentencepiece structlog torchao triton typer tyro

# Unsloth asks for trl up to 1.15, whose trainers call Triton also without a GPU where Unsloth is not imported.
TRL_OF_CPU := 'trl==1.16.0; python_version >= "3.11"'

# The oldest kernel that notebooks may have, for the tests. Only what it has otherwise; the rest is what is installed.
OLDEST_IPYTHON := $(VENV)/oldest-ipython
OLDEST_IPYTHON_NEEDS := ipython==7.34.0 ipykernel==6.17.1 backcall==0.2.0 decorator==5.2.1 pickleshare==0.7.5

# What the tests of notebooks need; ipykernel does without debugpy.
GPU_SITE_KERNEL := ipykernel jupyter_client jupyter_core ipython ipython_pygments_lexers traitlets comm tornado pyzmq jedi \
	parso decorator matplotlib-inline pexpect ptyprocess prompt_toolkit wcwidth stack_data executing asttokens pure_eval \
	platformdirs nest-asyncio2
# What a machine with a card and without a network may lack, for `make gpu-site`; with torch, transformers and peft there.
GPU_SITE := unsloth unsloth_zoo trl datasets accelerate wrapt cut_cross_entropy bitsandbytes torchao diffusers tyro msgspec \
	structlog hf_transfer json5 nest-asyncio pydantic pydantic_core dill multiprocess xxhash 'fsspec<=2026.2.0' typeguard \
	docstring_parser annotated_types typing_inspection typing_extensions importlib_metadata pytest-timeout \
	rich markdown-it-py mdurl pygments psutil $(GPU_SITE_KERNEL)
SITE := build/gpu/site
SITE_PYTHON ?= 3.12
SITE_CUDA ?= 13
PART ?=
TINY ?=
RESULT ?= build/gpu/result.json
ROW ?=
KEEP ?=

.PHONY: fake-cuda demo test test-all lint audit docs release-check matrix signatures gpu gpu-page gpu-site setup browser
.SILENT:

demo: setup
	$(BIN)/python examples/ddp_quick_start.py $(ARGS)
	echo "Next, your own script: source $(BIN)/activate, then unsloth-multigpu verify your_script.py"

# Two tests at a time, because ranks wait a lot; in the order of the files, so that short ones come last.
test: setup fake-cuda
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) $(if $(ALL),-m "")

# What docs/benchmarks.md says of GPUs, measured on the cards of this machine; a call again goes on.
#   PART=1                  1 to 7: one call of at most nine minutes; else all of them
#   TINY=1                  a rehearsal on CPU ranks, with tiny sizes
gpu: setup
	$(BIN)/python -m tests.gpu.kit $(if $(PART),--part $(PART)) \
		$(if $(TINY),--tiny --device cpu --out build/gpu/tiny.json,--out $(RESULT)) $(ARGS)

# Writes the section of docs/benchmarks.md from it.
gpu-page: setup
	$(BIN)/python -m tests.gpu.page $(RESULT)

# Packages to carry to a machine without a network, see CONTRIBUTING.md.
gpu-site: setup
	rm -rf $(SITE)
	$(INSTALL) --no-deps --target $(SITE) --only-binary=:all: --implementation cp --python-version $(SITE_PYTHON) $(GPU_SITE)
	rm -rf $(addprefix $(SITE)/,bin studio unsloth_cli test unsloth_zoo_downloads jedi/third_party/django-stubs)
	find $(SITE)/bitsandbytes -name 'libbitsandbytes_*.so' ! -name '*_cuda$(SITE_CUDA)*.so' ! -name '*_cpu.so' -delete
	find $(SITE)/torchao -name '*.so' -delete
	tar -C $(SITE) -czf $(SITE).tar.gz . && du -h $(SITE).tar.gz

# With what is `thorough`: three ranks, strategies, further kinds, clients over TLS, experiments.
test-all: browser
	$(MAKE) test ALL=1

lint: setup
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

# Known weaknesses of the versions in constraints.txt, by PyPI's advisories.
audit: setup
	$(BIN)/uv tool run pip-audit -r constraints.txt --no-deps --disable-pip

# The site, into build/docs/site, in an environment of its own (170 MB). A warning is an error.
#   REPOSITORY_URL=URL      where links to sources lead; else to the clone's remote, else they are plain text
#   DOCS=serve              shows the site, with its search, and again after each change
DOCS ?= build
docs: $(DOCS_VENV)/.set-up
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs $(DOCS) --strict
	$(if $(filter build,$(DOCS)),echo "Built build/docs/site; make docs DOCS=serve shows it with its search")

$(DOCS_VENV)/.set-up: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install -q -r docs/requirements.txt
	touch $@

# What is published, into build/release/dist: built, checked, installed in a clean environment without Unsloth, and two ranks
# trained with it from an empty folder. REPOSITORY_URL is where its links lead; a release needs one.
release-check:
	rm -rf $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python -m pip --disable-pip-version-check install -q $(RELEASE_NEEDS)
	$(RELEASE)/tools/bin/python -m build --outdir $(RELEASE)/dist
	$(RELEASE)/tools/bin/python -m twine check --strict $(RELEASE)/dist/*
	$(RELEASE)/tools/bin/check-wheel-contents $(RELEASE)/dist/*.whl
	$(PYTHON) -m venv $(RELEASE)/clean
	$(RELEASE)/clean/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(RELEASE)/dist/*.whl
	mkdir $(RELEASE)/empty && cp examples/plain_transformers.py examples/tiny_model.py $(RELEASE)/empty
	cd $(RELEASE)/empty && ../clean/bin/python plain_transformers.py
	cd $(RELEASE)/empty && ../clean/bin/unsloth-multigpu --version
	ls -l $(RELEASE)/dist

# The core of the tests with other versions, each in an environment of its own: tests/matrix/rows.toml. ROW=oldest runs
# one row, KEEP=1 keeps its environment for the next time. `uv` finds or fetches the Pythons.
matrix: setup
	$(BIN)/nox -s "matrix$(if $(ROW),($(ROW)))" $(if $(KEEP),-r)

# Only what the oldest and the newest row take of the arguments that this package passes.
signatures: setup
	$(BIN)/nox -s "signatures$(if $(ROW),($(ROW)))" $(if $(KEEP),-r)

setup: $(STAMP)

# JupyterLab for one test, and headless Chromium where the machine has none. Without npm it says so, and the test is skipped.
browser: setup
	$(INSTALL) 'jupyterlab>=4.2'
	tests/helpers/install_chromium.sh $(VENV)/chromium

# CUDA devices in host memory for the tests, built by g++; without it, it says which tests are skipped.
fake-cuda: $(TORCH_STAMP)
	$(BIN)/python tests/helpers/fake_cuda/build.py

# A stamp is written last and pip passes over what is there, so a set-up that was cut off goes on where it stopped.
$(TORCH_STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed, and PYTHON=$(PYTHON) is not. Try: make PYTHON=python3.12" >&2; exit 1; }
	echo "Creating $(VENV) (a few seconds)"
	$(PYTHON) -m venv $(VENV)
ifeq ($(HARDWARE),gpu)
	echo "GPU found. Installing torch for CUDA (3 GB, 3 minutes)"
	$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
else
	echo "No GPU found. Installing torch (1 to 5 minutes; TORCH_INDEX=https://download.pytorch.org/whl/cpu is a smaller build)"
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
endif
	touch $@

$(STAMP): $(TORCH_STAMP)
ifeq ($(HARDWARE),gpu)
	echo "Installing Unsloth and this project (2 GB, 2 minutes)"
	$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e ".[dev,unsloth]"
else
	echo "Installing this project, the Hugging Face libraries, Unsloth and the tools of the tests (20 seconds to 6 minutes)"
	$(INSTALL) uv
	$(UV_INSTALL) -e ".[dev]" $(UNSLOTH_NEEDS) || { echo "uv failed, see above (it reads no pip.conf). Trying pip" >&2; \
		$(INSTALL) -e ".[dev]" $(UNSLOTH_NEEDS); }
	$(INSTALL) --no-deps unsloth unsloth_zoo
	$(PIP_INSTALL) --no-deps $(TRL_OF_CPU)
endif
	$(PIP_INSTALL) --no-deps --upgrade --target $(OLDEST_IPYTHON) $(OLDEST_IPYTHON_NEEDS)
	touch $@
