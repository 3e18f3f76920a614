PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
COMMAND_STAMP := $(VENV)/.installed-command
RESULTS := benchmarks/results
TODAY   := $(shell date +%Y-%m-%d)
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: install demo test test-fast check docs bench peers soak format clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP) $(COMMAND_STAMP)

# What the command and the demo need, and nothing else: the tools of development take minutes more.
$(COMMAND_STAMP): pyproject.toml constraints.txt
	@echo "Installing torch and transfuse into $(VENV) …"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable '.[cli]'
	touch $(COMMAND_STAMP)

install: $(STAMP)

demo: $(COMMAND_STAMP)
	$(BIN)/python -m examples.demo

# Most tests wait for timeouts and for each other's processes: four at once keep two cores busy.
WORKERS ?= 4

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# The inner loop: what starts no process, of the rooms where most changes are.
test-fast: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'not soak and not gpu and not processes' \
		$(addprefix tests/,state plan memory wire session)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Into build/site. The variable silences an advertisement.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# What is not installed is listed as absent; `make peers` brings it.
bench: $(STAMP)
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.compare --json $(RESULTS)/$(TODAY)-bench.json --plot $(RESULTS)/$(TODAY)-bench.svg
	$(BIN)/python -m benchmarks.resharding --part host --part delta --json $(RESULTS)/$(TODAY)-resharding.json
	$(BIN)/python -m benchmarks.planning --json $(RESULTS)/$(TODAY)-planning.json

# Without dependencies where those would pull builds of torch with CUDA. Mooncake also needs Debian's libibverbs1,
# ibverbs-providers, librdmacm1 and libnuma1.
peers: $(STAMP)
	$(PIP) install --constraint constraints.txt ray safetensors mooncake-transfer-engine-non-cuda
	$(PIP) install --constraint constraints.txt --no-deps nixl nixl-cu12

.PHONY: network
network: $(STAMP)
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.network
	$(BIN)/python -m benchmarks.sources
	$(BIN)/python -m benchmarks.resharding --part links --json $(RESULTS)/$(TODAY)-resharding-network.json

# Where there is no build of atheris, fuzzing is skipped with a reason.
soak: $(STAMP)
	-$(PIP) install --constraint constraints.txt atheris
	$(BIN)/python -m pytest -m soak --timeout=3600

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
