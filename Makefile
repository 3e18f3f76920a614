PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
COMMAND_STAMP := $(VENV)/.installed-command
WARM   := $(VENV)/.warm
RESULTS := benchmarks/results
TODAY   := $(shell date +%Y-%m-%d)
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

# Tests start many processes: each would compile our modules again where bytecode may not be written.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test test-again test-fast test-group check docs bench peers soak compat format clean

# Of what is installed, tests import a part: `--no-compile` leaves its bytecode to the first import.
INSTALL := $(PIP) install --no-compile --no-warn-conflicts --constraint constraints.txt
LOCKED  := grep -v '^\#' installed.txt | sed -n

# pip reads what an index has of each package, all versions and builds, on one core. So two of them install what was chosen
# the last time, half each. The resolver comes afterwards: what is there it does not look for, and what fails it mends.
# NIXL without its build for another CUDA; where there is no build of it, its tests are skipped with a reason.
$(STAMP): pyproject.toml constraints.txt installed.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --no-deps $$($(LOCKED) 'p;n') & $(INSTALL) --no-deps $$($(LOCKED) 'n;p'); wait
	$(INSTALL) --no-deps nixl nixl-cu12 & $(INSTALL) --editable '.[dev]'; installed=$$?; wait; exit $$installed
	touch $(STAMP) $(COMMAND_STAMP)

# After a change of pyproject.toml or constraints.txt: old lines of installed.txt cost time, and nothing else.
.PHONY: lock
lock: $(STAMP)
	echo '# What `make install` installs beforehand, written by `make lock`.' > installed.txt
	$(BIN)/python -m pip freeze --exclude-editable --exclude nixl --exclude nixl-cu12 | sed 's/+cpu$$//' >> installed.txt

# What the command and the demo need, and nothing else: the tools of development take minutes more.
$(COMMAND_STAMP): pyproject.toml constraints.txt
	@echo "Installing torch and transfuse into $(VENV) …"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile --constraint constraints.txt torch
	$(PIP) install --no-compile --constraint constraints.txt --editable '.[cli]'
	touch $(COMMAND_STAMP)

install: $(STAMP)

demo: $(COMMAND_STAMP)
	$(BIN)/python -m examples.demo

# Most tests wait for timeouts and for each other's processes: five at once keep two cores busy.
WORKERS ?= 5

# One process imports what tests import, and leaves the bytecode: the workers would all do that at once.
$(WARM): $(STAMP)
	-$(BIN)/python -c 'import lightning, ray, torch._dynamo, torch.distributed.run, transformers.trainer'
	-$(BIN)/python -m pytest --collect-only --quiet --quiet > $(WARM)

test: $(WARM)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# What failed in the last run, one after the other. More than a few are no accident: then this fails, too.
FEW := 5
test-again: $(WARM)
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none --collect-only --quiet | grep -c :: \
		| xargs -I COUNT test COUNT -le $(FEW)
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# What runs over streams also runs over the group's own connections, where no stream can be made.
GROUP_TESTS := $(addprefix tests/,session remote keeper hostility end_to_end)
test-group: $(WARM)
	TRANSFUSE_STREAMS=0 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(GROUP_TESTS)

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
	@echo "The site is at file://$(CURDIR)/build/site/index.html"

# What is not installed is listed as absent; `make peers` brings it.
bench: $(STAMP)
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.compare --json $(RESULTS)/$(TODAY)-bench.json --plot $(RESULTS)/$(TODAY)-bench.svg
	$(BIN)/python -m benchmarks.resharding --part host --part delta --json $(RESULTS)/$(TODAY)-resharding.json
	$(BIN)/python -m benchmarks.planning --json $(RESULTS)/$(TODAY)-planning.json
	$(BIN)/python -m benchmarks.loopback --json $(RESULTS)/$(TODAY)-loopback.json
	$(BIN)/python -m benchmarks.tls --json $(RESULTS)/$(TODAY)-tls.json
	$(BIN)/python -m benchmarks.small --json $(RESULTS)/$(TODAY)-small.json
	$(BIN)/python -m benchmarks.startup --json $(RESULTS)/$(TODAY)-startup.json
	$(BIN)/python -m benchmarks.repeat --json $(RESULTS)/$(TODAY)-repeat.json
	$(BIN)/python -m benchmarks.keeper --json $(RESULTS)/$(TODAY)-keeper.json
	$(BIN)/python -m benchmarks.storage --json $(RESULTS)/$(TODAY)-storage.json
	$(BIN)/python -m benchmarks.saving --json $(RESULTS)/$(TODAY)-saving.json

# Mooncake also needs Debian's libibverbs1, ibverbs-providers, librdmacm1 and libnuma1.
peers: $(STAMP)
	$(PIP) install --constraint constraints.txt ray safetensors mooncake-transfer-engine-non-cuda

.PHONY: network
network: $(STAMP)
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.network
	$(BIN)/python -m benchmarks.sources
	$(BIN)/python -m benchmarks.lanes --json $(RESULTS)/$(TODAY)-lanes.json
	$(BIN)/python -m benchmarks.resharding --part links --json $(RESULTS)/$(TODAY)-resharding-network.json

# A visit of ten minutes to the accelerators of this machine, or to the imitation where torch finds none: build/gpu.md and
# build/gpu.json, for an issue. packaging/gpu has a container for it. VISIT= has more options (`--kind cuda --minutes 20`).
VISIT ?=
.PHONY: gpu
gpu: $(STAMP)
	mkdir -p build
	$(BIN)/python -m benchmarks.gpu --json build/gpu.json --page build/gpu.md $(VISIT)

# The tests against vLLM, in an environment for each version that the plug-in knows: a wheel has 336 MB, 900 MB on disk.
# All that vLLM depends on would be gigabytes of CUDA; the list below is what it imports in these tests (no engine starts).
# Its transformers is older than ours, and torch is the one of constraints.txt.
VLLM_VERSIONS := 0.32.0 0.33.0
VLLM_STAMPS   := $(VLLM_VERSIONS:%=.venv-vllm-%/.installed)
VLLM_PIP       = $(@D)/bin/python -m pip --quiet --disable-pip-version-check install --constraint $(@D)/constraints.txt
VLLM_IMPORTS  := aiohttp cachetools cbor2 cloudpickle einops fastapi llguidance openai openai-harmony partial-json-parser \
	pillow prometheus-client psutil py-cpuinfo pybase64 pyzmq regex requests setuptools 'transformers<5.20' uvloop xgrammar

$(VLLM_STAMPS): .venv-vllm-%/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -v '^transformers==' constraints.txt > $(@D)/constraints.txt
	$(VLLM_PIP) torch
	$(VLLM_PIP) --no-deps vllm==$*
	@echo "pip will say what vLLM misses: these tests do not import it."
	$(VLLM_PIP) $(VLLM_IMPORTS) hypothesis pytest pytest-timeout --editable .
	touch $@

.PHONY: vllm
vllm: $(VLLM_VERSIONS:%=vllm-%)
vllm-%: .venv-vllm-%/.installed
	$(<D)/bin/python -m pytest tests/integrations/test_vllm.py tests/integrations/test_vllm_adapters.py tests/integrations/test_claims.py

# Where there is no build of atheris, fuzzing is skipped with a reason.
soak: $(STAMP)
	-$(PIP) install --constraint constraints.txt atheris
	$(BIN)/python -m pytest -m soak --timeout=3600
	TRANSFUSE_STREAMS=0 $(BIN)/python -m pytest -m soak --timeout=3600 $(GROUP_TESTS)

# The ordinary tests on another torch, in an environment of its own (5 GB: newer ones exist with CUDA only), and what
# differs from the pinned one. TESTS= chooses some. NIXL takes the build for torch's version of CUDA.
TORCH ?= 2.15.0
OTHER := .venv-$(TORCH)
OTHER_INSTALL = $(OTHER)/bin/python -m pip --quiet --disable-pip-version-check install --constraint $(OTHER)/constraints.txt
TESTS ?=

$(OTHER)/.installed: pyproject.toml constraints.txt
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER_INSTALL) --editable '.[dev]'
	-$(OTHER_INSTALL) --no-deps nixl nixl-cu12 nixl-cu13
	touch $@

compat: $(STAMP) $(OTHER)/.installed
	$(BIN)/python -m tools.compat $(OTHER)/bin/python --workers $(WORKERS) $(TESTS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
