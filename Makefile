# Two commands for a person: `make demo` and `make test`.  Both make .venv when it is not there.
# Plain pip; constraints.txt pins what was tested.  Every target is incremental.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
SOURCES := agent collectors dashboards runbooks trainer worker
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

export PIP_PROGRESS_BAR := off
# Tests start hundreds of processes, and each would compile all of Holdfast anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo check types test sim storms e2e e2e-operators golden bench bench-engines telemetry mutants mutants-sim xla-python ray-python ray \
  campaign audit docs pictures dist packages clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 16

demo: $(VENV)/.demo  ## train, lose ranks three ways, come back, print what it cost (a minute)
	@$(BIN)/holdfast demo

check: $(VENV)/.test  ## ruff, and the rules of the house: imports, homes, sizes, words
	$(BIN)/ruff check $(SOURCES) tests deploy $(wildcard bench)
	$(PYTEST) -q tests/test_tidy.py

types: $(VENV)/.test  ## mypy --strict over every package
	$(BIN)/mypy $(foreach folder,$(SOURCES),-p holdfast.$(folder))

# Where seconds are judged tests run one at a time, and one a core where they wait for nothing but
# themselves.
TIMED := $(addprefix tests/,host machine e2e nodes systemd)

test: packages check types  ## everything that CI runs
	@failed=0; \
	$(PYTEST) -m 'not campaign' -n auto --dist worksteal tests $(addprefix --ignore ,$(TIMED)) || failed=1; \
	$(PYTEST) -m 'not campaign' $(TIMED) || failed=1; \
	exit $$failed

campaign: packages xla-python  ## the tests that `make test` has no time for (half an hour, 7 GB)
	CI=$${CI-true} $(PYTEST) -m campaign tests

sim: $(VENV)/.test  ## core and performer in storms on a virtual cluster
	$(PYTEST) tests/sim

storms: $(VENV)/.test  ## 2,000 seeds of the default storm and 134 of each other (minutes)
	HOLDFAST_SIM_SEEDS=2000 $(PYTEST) tests/sim/test_storms.py

e2e: $(VENV)/.test packages  ## real processes
	$(PYTEST) tests/e2e

# In this order: rules and pages, servers and runs, nodes, and the heavy systemd last.
OPERATORS := $(addprefix tests/,test_alerts.py test_dashboards.py test_dashboards_push.py \
  test_dashboards_schema.py test_runbooks.py test_operations.py) \
  $(addprefix tests/e2e/,test_operators.py test_panels.py test_live_page.py test_ledger_sums.py \
  test_api.py test_runbook_commands.py test_secrets.py test_packages.py) \
  $(addprefix tests/nodes/,test_fleet_pause.py test_ledger.py) tests/systemd

# CI=true: what is skipped for a missing part fails, since without Prometheus nothing was shown.
e2e-operators: $(VENV)/.test packages  ## what operators touch: alerts, actions, journal, dashboards, systemd
	CI=$${CI-true} $(PYTEST) $(OPERATORS)

golden: $(VENV)/.test  ## recorded input, expected output
	$(PYTEST) tests/golden

bench: $(VENV)/.test  ## the table with torchrun measured beside (minutes)
	$(BIN)/python -m bench.all

bench-engines: $(VENV)/.test  ## the engines beside what they are measured against (minutes, root)
	$(BIN)/python -m bench.engines

telemetry: $(VENV)/.test  ## what watching an 8-GPU node costs (six minutes)
	$(BIN)/python -m bench.telemetry

# Each page, and the function that returns its text.  None is written before all are made, so that
# a rule with a mistake leaves the old pages.
PAGES := config=holdfast.agent.config.load:render_config_docs \
  metrics=holdfast.agent.metrics.selection:render_docs \
  exit-codes=holdfast.agent.cli.parser:render_exit_docs \
  kernel-events=holdfast.agent.catalog.load:render_docs \
  map=house_map:render_map \
  runbooks=holdfast.runbooks.index:render_index \
  train=holdfast.trainer.settings_page:render_train_docs

mutants: $(VENV)/.test  ## does a test notice? ten seeded mutants of each module that decides (an hour)
	$(BIN)/python -m bench.mutants

mutants-sim: $(VENV)/.test  ## each guard of core and performer taken out: does a storm notice? (minutes)
	$(BIN)/python tests/sim/mutants.py
	$(BIN)/python tests/sim/guards.py

docs: $(VENV)/.demo  ## write the generated pages of docs anew
	@PYTHONPATH=tests $(BIN)/python -c 'import pathlib, pkgutil, sys; \
	  made = [(name, pkgutil.resolve_name(function)()) \
	          for name, function in (one.split("=") for one in sys.argv[1:])]; \
	  [pathlib.Path("docs", f"{name}.md").write_text(text) for name, text in made]' $(PAGES)
	@$(BIN)/python -c 'import pathlib; from holdfast.dashboards.grafana import boards; \
	  [pathlib.Path("dashboards/grafana/rendered", name).write_text(text) \
	   for name, text in boards.files().items()]'

audit: $(VENV)/.test  ## pins, licences and known advisories of what is shipped; asks no network
	$(BIN)/python deploy/audit.py --sbom dist/sbom.json

dist: $(VENV)/.test  ## wheel, sdist, Debian package and tarball, into dist/
	$(BIN)/python deploy/build.py deb tarball

xla-python: $(VENV)/.test  ## a Python with torch_xla 2.9 in .xla-venv, for its tests (7 GB, two minutes)
	$(BIN)/python tests/own_python.py xla

ray-python: $(VENV)/.test  ## a Python with ray in .ray-venv, for its tests (0.6 GB, a minute)
	$(BIN)/python tests/own_python.py ray

ray: ray-python  ## the feed from Ray against Ray itself (two minutes; `make test` has a stand-in for it)
	$(PYTEST) tests/unit/trainer/real_ray.py

pictures: $(VENV)/.test  ## the pictures of docs/pictures, from a real run (four minutes)
	PYTHONPATH=tests:tests/e2e $(BIN)/python tests/pictures.py

packages:  # Debian packages that tests use; installs only as root, else names what will be skipped
	@tests/debian-packages

clean:  ## remove .venv, builds and caches
	rm -rf $(VENV) .xla-venv .ray-venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || tests/debian-packages python3-venv
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Holdfast and its trainer into $(VENV) ..."
	$(PIP_INSTALL) -e '.[trainer]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP_INSTALL) -e '.[trainer,test]'
	@touch $@
