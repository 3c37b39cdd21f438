# Targets call scripts in hack/; `make help` lists them. PYTHON is the interpreter that .venv is made from.
PYTHON ?= python3
BIN := .venv/bin
CODE := crds dashboards metadata operator agent bench hack tests
LEVELS := $(addprefix tests/,contract stateful sim crash fuzz faults threats adversity system peers)
PYTEST := $(BIN)/python -m pytest
# Tests of connectors and tiers that compute on a device as on the processor.
ON_DEVICE := $(addprefix tests/system/test_,client_transformers.py client_transformers_cache.py handover_transformers.py) \
  tests/unit/client/test_vllm.py tests/unit/agent/cache/test_five_tiers.py tests/contract/test_device_lending.py
SEEDS ?= 200
# For `make check` to answer soon: laws on few examples (tests/conftest.py), and no test that takes a second by itself.
EXAMPLES ?= quick
UNIT ?= unit and not slow
# Tests and demos start hundreds of processes. Where Python is told to keep no bytecode, as in many containers, each of them
# would compile all that it imports, for one to two seconds.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build/bytecode

.DEFAULT_GOAL := help
.PHONY: help setup demo check lint types contracts drift unit style tools test contract stateful system test-peers sim faults threats adversity hour mutants fuzz soak proof test-gpu hardware test-guest test-node \
  images image-pins test-images bench docs requirements generate screenshots sbom licences release clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## Make .venv and install what is missing, but for Go programs
	@$(PYTHON) hack/setup.py

demo: ## Run the whole path on real input (KEEP=1 leaves it running, CLUSTER=current uses your kubeconfig, ENGINE=vllm adds servers of vLLM)
	@$(PYTHON) hack/setup.py --tools demo
	@$(BIN)/python -m demo $(if $(KEEP),--keep) $(if $(CLUSTER),--cluster $(CLUSTER)) $(if $(ENGINE),--engine $(ENGINE))

check: setup lint types contracts drift unit ## Lint, types, import contracts, drift, unit tests

lint:
	@$(BIN)/ruff format --check --quiet $(CODE) && $(BIN)/ruff check --quiet $(CODE) && echo "lint: ok"

types:
	@$(BIN)/mypy --no-error-summary $(CODE) && echo "types: ok"

contracts:
	@$(BIN)/lint-imports --no-cache >.imports.log || { cat .imports.log; rm -f .imports.log; exit 1; }
	@grep '^Contracts:' .imports.log; rm -f .imports.log

drift:
	@$(BIN)/python hack/generate.py --check

style: setup ## Print sizes and nesting beside what the style looks at; no gate
	@$(BIN)/python -m checks.measure_style

unit:
	@KVSTRATA_HYPOTHESIS_PROFILE=$(EXAMPLES) $(PYTEST) -q -n 2 -m "$(UNIT)" tests/unit

tools: ## The same, and the control plane with the other Go programs that tests run
	@$(PYTHON) hack/setup.py --tools tests

test: EXAMPLES = kvstrata
test: UNIT = unit
test: tools check ## Everything that runs on a machine without GPU or nodes; skipped tests say why at the end
	@# Apart: without a GPU it is Triton's interpreter that has to be chosen first.
	@$(BIN)/python hack/run_tests.py $(LEVELS) --apart tests/gpu

contract:
	@$(PYTEST) -q tests/contract

stateful:
	@$(PYTEST) -q tests/stateful

system:
	@$(PYTEST) -q tests/system

test-peers: tools ## Every engine and version in environments of their own, made on demand from pinned files (gigabytes)
	@KVSTRATA_PEERS=all $(PYTEST) -q -s tests/peers

sim: setup ## Simulated fleets on a virtual clock, SEEDS of them; prints the seed of any violation (SEED=n replays one)
	@PYTHONPATH=tests $(BIN)/python -m sim $(if $(SEED),--replay $(SEED),--seeds $(SEEDS))

faults: setup ## Every invariant I1-I11 against faults, shortened
	@PYTHONPATH=tests $(BIN)/python -m faults $(if $(ONLY),--only $(ONLY))

threats: setup ## Every threat to isolation T1-T15, shortened (FULL=1: the counts of the table)
	@PYTHONPATH=tests $(BIN)/python -m threats $(if $(ONLY),--only $(ONLY)) $(if $(FULL),--full)

hour: tools ## All that happens to a fleet in production, in minutes: what dashboards, alerts, traces and accounts say of it (JSON)
	@PYTHONPATH=tests $(BIN)/python -m hour $(ARGS)

adversity: setup ## Lie to the operator and kill it at every API call, shortened (FULL=1: the counts of the claims)
	@PYTHONPATH=tests $(BIN)/python -m adversity $(if $(ONLY),--only $(ONLY)) $(if $(FULL),--full)

mutants: setup ## Seeded defects that the suite must catch (ONLY=I6 some, JOBS=2 two at a time, SHARD=1/4 a part)
	@$(BIN)/python -m checks.mutants $(if $(ONLY),--only $(ONLY)) $(if $(JOBS),--jobs $(JOBS)) $(if $(SHARD),--shard $(SHARD))

fuzz: setup ## Inputs by chance, led by coverage, at everything that comes from outside; goes on where it ended (ARGS="--target NAME --seconds 600 --jobs 2", "--list")
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/fuzz.txt
	@PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

soak: tools ## The whole under load and random faults (MINUTES=120, SEED=n): outputs, bounds of time, growth, conditions, metrics
	@PYTHONPATH=tests $(BIN)/python -m soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

proof: tools ## Every full count on this commit, in steps that can be stopped and taken up again (ARGS="--list", "--hours 8", "--report")
	@$(BIN)/python -m proof $(ARGS)

test-gpu: setup ## Tests that need a CUDA device
	@KVSTRATA_TEST_DEVICE=cuda $(PYTEST) -q tests/gpu $(ON_DEVICE)

hardware: setup ## What kvstrata does on your GPUs, NVMe, RDMA, CXL and cores, with a report (ARGS="--list", "--directory DIR --quick")
	@$(BIN)/python hack/hardware.py $(ARGS)

test-guest: setup ## CXL and NVMe tiers under a real kernel on an emulated machine (QEMU; minutes, 75 MB once)
	@$(PYTEST) -q tests/guest

images: setup ## Container images in build/images, without a daemon (IMAGES="operator redis" makes some; python -m images --help)
	@$(BIN)/python -m images $(IMAGES)

image-pins: setup ## Pin the images' Debian packages to what the mirror has now
	@$(BIN)/python -m images --pin

test-images: setup ## Images twice with equal digests, and every process run from its image (root; minutes)
	@$(PYTEST) -q tests/images

test-node: setup ## Real kubelets and containerd in namespaces, the chart with its images (root; `make images` first)
	@$(BIN)/python -m controlplane build kubelet kube-proxy coredns >/dev/null  # Minutes once, which no test's bound is for.
	@$(PYTEST) -q tests/node

bench: setup ## Every benchmark, peers and limits in the same run
	@$(BIN)/python -m bench

bench-%: setup
	@$(BIN)/python -m bench.$*

screenshots: tools ## The same hour, and pictures of every dashboard, the map and the prefixes (docs/img; needs chromium)
	@PYTHONPATH=tests $(BIN)/python -m drawing.screenshots

docs: setup ## The site of the documents in build/site: strict, searched and read without a server
	@$(BIN)/python hack/docs_build.py

requirements: ## Compile requirements/*.txt from pyproject.toml
	@hack/compile_requirements.sh

generate: ## Write everything that is generated: CRDs, chart CRDs, dashboards, metric docs, the wire protocol
	@$(BIN)/python hack/generate.py --write

sbom: ## Write a CycloneDX bill of materials for each requirement file
	@$(BIN)/python -m checks.sbom

release: setup ## Everything of a release in build/release/VERSION, signed with KEY=FILE; publishes nothing (RELEASING.md; ARGS="--only wheels")
	@$(BIN)/python -m release $(if $(KEY),--key $(KEY)) $(ARGS)

licences: ## Check the licences of what is installed
	@$(BIN)/python -m checks.licences

clean: ## Remove .venv and caches of this tree (not the control plane's binaries)
	@rm -rf .venv .venv-* .mypy_cache .ruff_cache .hypothesis build dist
