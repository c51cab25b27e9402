# generate  write generated/ and tests/generated/ from specs/ (needs neither torch nor triton)
# test      run all tests that need no GPU
# check     name every generated file that is not as it should be
# lint      ruff, mypy --strict, ruff's import order
# bench     how long the generator takes; with a GPU also how fast its kernels are
#
# Each target installs what it needs, once: .venv-gen holds the generator alone, .venv all that tests and linters use.

PYTHON ?= python3
KEY := $(shell cat pyproject.toml constraints-dev.txt | cksum | cut -d' ' -f1)
GEN := .venv-gen/ready-$(KEY)
DEV := .venv/ready-$(KEY)
JOBS ?= auto
GPU_JOBS ?= 16
TESTS ?=

.PHONY: generate test test-gpu check check-full lint bench clean

generate: $(GEN)
	.venv-gen/bin/python -m codegen generate $(OPS)

check: $(GEN)
	.venv-gen/bin/python -m codegen check

check-full: $(GEN)
	.venv-gen/bin/python -m codegen check --full

test: $(DEV)
	.venv/bin/python -m pytest -n $(JOBS) $(TESTS)

test-gpu: $(DEV)
	.venv/bin/python -m pytest -m gpu -n $(GPU_JOBS) --dist worksteal $(TESTS)

lint: $(DEV)
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: $(DEV)
	.venv/bin/python -m benchmarks

$(GEN):
	$(PYTHON) -m venv .venv-gen
	.venv-gen/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e .
	rm -f .venv-gen/ready-* && touch $@

$(DEV):
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[run,test,dev]'
	rm -f .venv/ready-* && touch $@

clean:
	rm -rf .venv .venv-gen build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
