# Two commands matter: `make demo` and `make test`. Both work from a clean clone with python3, make and pip.
# Neither installs anything a second time unless pyproject.toml or constraints.txt changed.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt

# Pip writes hundreds of lines, which go into a file; what is printed is how far it is, and on a failure the file's end.
define INSTALL
@echo "Installing into $(VENV): minutes and about 6.5 GB the first time, nothing afterwards (all of it: $(VENV)/install.log)."
@$(PIP_INSTALL) $(1) >$(VENV)/install.log 2>&1 & pid=$$!; n=0; \
while kill -0 $$pid 2>/dev/null; do \
	sleep 1; n=$$((n + 1)); [ $$((n % 15)) -eq 0 ] || continue; \
	echo "  $${n} s: $$(grep -c '^Collecting' $(VENV)/install.log) of about $$(grep -c '==' constraints.txt) packages found," \
		"$$(grep -cE '^ *(Downloading|Using cached) .*(whl|gz)' $(VENV)/install.log) downloaded$$(grep -q '^Installing' $(VENV)/install.log && echo '; installing')"; \
done; \
wait $$pid && tail -n 1 $(VENV)/install.log | cut -c1-100 || { tail -n 20 $(VENV)/install.log; exit 1; }
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Results must not depend on the shell that called make. PIP_* stays: mirrors and proxies are configured there.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV
# Each of the many processes of the tests would compile every module again (images of containers set it).
unexport PYTHONDONTWRITEBYTECODE
unexport $(filter ORCHESTRATOR_% RAY_% MLFLOW_% PYTEST_%,$(.VARIABLES))

# A virtual environment knows its own path: one that was moved or copied along with the checkout is made anew.
ifneq ($(CURDIR),$(shell cat $(VENV)/.created 2>/dev/null))
.PHONY: $(VENV)/.created
endif

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile

.PHONY: demo
demo: $(VENV)/.installed ## install, then run the quickstart sweep
	$(BIN)/orchestrator submit quickstart -y

# Whole suites run in several processes, by file and in the order of the files: the folders with long tests come first.
# With ARGS one process runs what was asked for, so that -s, -x and --pdb mean what they say.
# One process more than the two cores of CI: tests of servers, clusters and deaths wait a good part of their time.
PARALLEL = $(if $(ARGS),,-n 3 --dist loadgroup --no-loadscope-reorder)

.PHONY: test
test: $(VENV)/.installed-dev ## install, then run the tests of a change (ARGS="tests/unit/test_ids.py -x": some of them)
	$(BIN)/python -m pytest -m "not slow and not ci" $(PARALLEL) $(ARGS)

.PHONY: test-ci
test-ci: $(VENV)/.installed-dev ## what CI runs: also gangs, a stack, a browser, terminals, compilers, interruptions at every write
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(ARGS)

.PHONY: test-all
test-all: $(VENV)/.installed-dev ## every test, the slow ones included
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

.PHONY: bench
bench: $(VENV)/.installed-dev ## measure speed and memory (ARGS=benchmarks/bench_FILE.py)
	$(BIN)/python -m pytest -o testpaths=benchmarks -s --timeout=0 $(ARGS)

.PHONY: mutants
mutants: $(VENV)/.installed-dev ## plant bugs and show that the simulation finds each
	$(BIN)/python -m tests.mutants $(ARGS)

.PHONY: mutation
mutation: $(VENV)/.installed-dev ## change the program by chance and show which changes no test notices (--package NAME, --mutants N, --seed N)
	$(BIN)/python -m tests.mutants.sampled $(ARGS)

.PHONY: chaos
chaos: $(VENV)/.installed-dev ## kill everything that can be killed, twenty rounds (--rounds N, --seed N)
	$(BIN)/python -m tests.chaos.rounds $(ARGS)

.PHONY: damage
damage: $(VENV)/.installed-dev ## change a store at random, 2,000 times (--changes N, --seed N): found or harmless
	$(BIN)/python -m tests.hostile.damage $(ARGS)

.PHONY: lint
lint: $(VENV)/.installed-dev ## ruff, mypy, import layers, sizes and names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_house_style.py

.PHONY: sbom
sbom: $(VENV)/.installed .audit/.installed ## write sbom.json, what the environment is made of (CycloneDX)
	.audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-format JSON --output-file sbom.json \
		$(BIN)/python

.PHONY: audit
audit: .audit/.installed ## ask for known vulnerabilities of the pinned packages; needs the network
	.audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip

# Apart: what looks at the environment must not be part of it.
.audit/.installed:
	$(PYTHON) -m venv --clear .audit
	.audit/bin/python -m pip install --disable-pip-version-check -q cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

.PHONY: clean
clean: ## remove .venv, caches and build output (keeps .orchestrator, where results live)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without the ensurepip module (Debian splits it off) the caller's own pip puts pip into the new environment.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python >= 3.11 is needed, but $(PYTHON) is " \
		+ sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
		$(PYTHON) -m venv --clear $(VENV); \
	else \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --disable-pip-version-check pip; \
	fi
	@printf '%s' '$(CURDIR)' > $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(call INSTALL,-e .)
	@touch $@

# The development install contains the other one, so whichever command comes first installs once.
$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	$(call INSTALL,-e '.[dev]')
	@touch $(VENV)/.installed $@
