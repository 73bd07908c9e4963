# Every target sets up what it needs, in the same .venv; the second run of any of them starts at once.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
# Torch comes first and by version alone, because its builds differ from platform to platform;
# TORCH_PIP_ARGS passes pip options for it, say another index with CPU-only builds.
TORCH_VERSION ?= 2.13.0
TORCH_PIP_ARGS ?=
BASE ?= HEAD
ARGS ?=
PYTEST_ARGS ?=
LOCK_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
AUDIT := $(BIN)/uv tool run pip-audit==2.10.1 --strict --no-deps --disable-pip
READY := $(VENV)/.ready-torch-$(TORCH_VERSION)
SERVABLE := $(VENV)/.servable-torch-$(TORCH_VERSION)
NATIVE := $(wildcard nsm_core/execution/native/src/*) nsm_core/execution/native/build.py
PYTEST := $(BIN)/python -m pytest
# By files: what a file's tests share is made once. The order is that of tests/support/order.py, not of xdist.
BY_FILES := --dist loadfile --no-loadscope-reorder
unexport PYTHONDONTWRITEBYTECODE  # the many processes that tests start compile nothing twice

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Developers' packages include those that serve.
$(READY): requirements.lock scripts/serve.lock pyproject.toml $(NATIVE)
	@scripts/setup "$(PYTHON)" "$(VENV)" requirements.lock "$(TORCH_VERSION)" $(TORCH_PIP_ARGS)
	@touch $(SERVABLE) $@

$(SERVABLE): scripts/serve.lock pyproject.toml $(NATIVE)
	@scripts/setup "$(PYTHON)" "$(VENV)" scripts/serve.lock "$(TORCH_VERSION)" $(TORCH_PIP_ARGS)
	@touch $@

.PHONY: setup
setup: $(READY)  ## create the environment in .venv, developers' tools included

.PHONY: serve
serve: $(SERVABLE)  ## serve the bundled model on 127.0.0.1:8000; options: ARGS="--port 9000"
	@$(BIN)/nsm serve $(ARGS)

.PHONY: check
check: $(READY)  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict nsm_core service nsm_lab scripts
	$(BIN)/lint-imports --no-logo

.PHONY: programs
programs:
	@scripts/test-packages

.PHONY: packages
packages: $(READY)
	@scripts/triton-server "$(VENV)"
	@scripts/perf-analyzer "$(VENV)"
	@scripts/client-generator "$(VENV)"

.PHONY: clients
clients: $(READY)  ## install the client libraries of tests/integration/test_client_libraries.py and test_lm_eval.py into .venv/clients
	@scripts/client-packages "$(VENV)"

# More processes than cores: half of the time a test waits for a server, a lease or a failover.
.PHONY: test
test: programs check packages  ## everything a change must pass, in reduced counts; options: PYTEST_ARGS="-k engine"
	$(PYTEST) -n 4 $(BY_FILES) $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: $(READY)  ## units and contracts without any service, in under 90 s; options: PYTEST_ARGS="-k engine"
	$(PYTEST) --fast -n 2 $(BY_FILES) $(PYTEST_ARGS)

.PHONY: image-test
image-test: $(READY)  ## build the container images and start them; root, buildah and debootstrap; minutes
	$(PYTEST) -m image --timeout=3600 tests/deploy $(PYTEST_ARGS)

.PHONY: soak
soak: $(READY) programs packages  ## the long versions of the tests: full counts, hours
	$(PYTEST) --soak --timeout=14400 $(PYTEST_ARGS)

.PHONY: loadtest
loadtest: $(READY)  ## a load test of under a minute against servers it starts; options: ARGS="--profile soak"
	$(BIN)/python -m loadtests $(ARGS)

.PHONY: bench-gate
bench-gate: $(READY)  ## is this checkout slower than the commit BASE? fails if so beyond doubt; options: ARGS="--rounds 10"
	@scripts/bench-gate "$(VENV)" "$(BASE)" $(ARGS)

.PHONY: docs
docs: $(READY)  ## build the site of docs/ into build/site, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

.PHONY: verify-docs
verify-docs: $(READY)  ## run the commands of the pages, compare what they print and their figures; options: ARGS="--page cli.md"
	$(BIN)/python -m deploy.docs.verify $(ARGS)

.PHONY: lock
lock: $(READY)  ## write requirements.lock anew from pyproject.toml; options: LOCK_ARGS=--upgrade
	@echo 'torch==$(TORCH_VERSION)' | $(BIN)/uv pip compile pyproject.toml - --all-extras \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url \
		--no-emit-package torch \
		--custom-compile-command 'make lock' --quiet --output-file requirements.lock $(LOCK_ARGS)
	@sed -i.old "s/^\(triton==[^ ]*\) /\1 ; sys_platform == 'linux' /" requirements.lock && rm requirements.lock.old
	@deploy/image/lock $(BIN)/uv "$(TORCH_VERSION)"

.PHONY: audit
audit: $(READY)  ## hold the locked packages against known advisories; asks pypi.org
	$(AUDIT) --requirement requirements.lock --require-hashes
	echo 'torch==$(TORCH_VERSION)' | $(AUDIT) --requirement /dev/stdin

.PHONY: triton
triton: $(READY)  ## install the Triton server of `nsm triton serve` into .venv/triton
	@scripts/triton-server "$(VENV)"

.PHONY: clean
clean:  ## remove caches and build products
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean  ## clean, and remove .venv as well
	rm -rf $(VENV)
