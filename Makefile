# Two commands: `make quickstart` and `make test`. Each sets everything up on a fresh machine.
# What they do is in make.py, which needs no make: `python make.py quickstart`.
PYTHON ?= python3
ARGS ?=

.PHONY: help quickstart setup test check docs nightly lint format lock locked sbom chaos clean
help quickstart setup test check docs nightly lint format lock locked sbom chaos clean:
	@$(PYTHON) make.py $@ $(ARGS)
