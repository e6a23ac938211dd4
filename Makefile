# The short names of common tasks. Each does its own set-up: missing packages are installed, or the command for it is printed.
.DEFAULT_GOAL := help
.PHONY: help demo test build lint format bench fuzz clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo:  ## watch a real language model read a novel through MiniMax Sparse Attention (no GPU needed)
	@scripts/demo

test:  ## everything CI runs; single steps: scripts/test --list
	@scripts/test

build:  ## the C++ library with its tests in build/dev, the Python package in .venv
	@scripts/bootstrap test
	cmake --preset dev
	cmake --build --preset dev
	@scripts/install-python

lint:  ## formatting, static analysis, house rules
	@scripts/lint

format:  ## put C++ and Python sources into the house format
	@scripts/lint --fix --no-tidy

bench:  ## speed against PyTorch, with the bars of the project
	@scripts/install-python
	.venv/bin/openmsa bench --cpu

fuzz:  ## fuzz targets; FUZZ_SECONDS=60 for each
	@scripts/bootstrap test
	@scripts/test fuzz

clean:  ## remove everything that was built; .venv and downloads stay
	rm -rf build dist python/openmsa/*.so
