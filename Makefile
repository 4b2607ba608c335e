# Every target does its own set-up: a virtual environment in .venv with everything it needs.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
MEASURED := --cov=wngrad --cov-report=term:skip-covered --cov-fail-under=95

.PHONY: demo test test-gpu test-integrations test-faults check conformance figures docs notebook format release clean

demo: $(VENV)/ready
	$(VENV)/bin/wngrad run digits
	$(VENV)/bin/wngrad report digits
	@echo "Open out/digits/report.html."

test: $(VENV)/ready
	$(RUN) -m pytest -n 2 --dist worksteal -m "not faults and not gpu and not integrations" $(COVERAGE)

# Not all of tests/: files that import JAX must not be collected where Ray forks.
test-integrations: $(VENV)/integrations
	$(RUN) -m pytest -n 2 --dist worksteal -m "integrations and not gpu and not faults" \
	  tests/integrations $$(grep -l mark.integrations tests/test_*.py)

# For a machine with a CUDA device; torch's build for it must be installed in .venv.
test-gpu: $(VENV)/ready
	$(RUN) -m pytest -m gpu tests

test-faults: $(VENV)/ready
	$(RUN) -m pytest -m faults

check: $(VENV)/ready
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(MAKE) test COVERAGE="$(MEASURED)"

# The figures and tables of the docs, from the records under results/.
figures: $(VENV)/ready
	for name in figure-1 figure-2 figure-3; do \
	  $(VENV)/bin/wngrad report $$name --records results/$$name.jsonl --out docs/figures/$$name; \
	done

# The published table; that some optimizer fails some probe (exit code 1) is a result.
conformance: $(VENV)/peers
	$(RUN) -m wngrad.conformance --everyone --json results/conformance.json \
	  --markdown docs/conformance.md || test $$? -eq 1

# The pages as a site that needs no network: open site/index.html. A warning is an error.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "Open site/index.html."

# Runs the notebook, and keeps what it printed and drew.
notebook: $(VENV)/docs
	$(RUN) -c "import nbclient, nbformat; path = 'docs/digits.ipynb'; book = nbformat.read(path, 4); \
	  nbclient.execute(book, record_timing=False); nbformat.write(book, path)"

format: $(VENV)/ready
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

# The wheel and the sdist, in dist/, built and checked: nothing is uploaded.
release: $(VENV)/release
	$(RUN) build_release.py

# torch comes first and alone: what depends on it must not choose its build.
# The C kernels are built by the install.
KERNELS := $(wildcard src/wngrad/optim/fused/*.c) hatch_build.py

$(VENV)/ready: pyproject.toml constraints.txt $(KERNELS)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[lab,jax,dev]"
	touch $@

$(VENV)/integrations: $(VENV)/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[integrations,ray,docs]"
	touch $@

$(VENV)/docs: $(VENV)/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# Needs neither torch nor the package.
$(VENV)/release:
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check "build>=1.2" "twine>=6"
	touch $@

$(VENV)/peers: $(VENV)/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[peers]"
	touch $@

clean:
	rm -rf $(VENV) out dist site .coverage .hypothesis .pytest_cache .mypy_cache .ruff_cache
