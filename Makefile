# `make` lists all targets. Every target first installs what it needs.

PYTHON ?= python3
VENV   ?= .venv
EXTRAS := repro,openclip,lora,mergekit,language,dev
BIN    := $(abspath $(VENV))/bin
# sympy reads the LaTeX of MATH-500 with this version, DVC its configuration with 4.9, so it has a folder of its own.
ANTLR  := antlr4-python3-runtime==4.11.1
# Named after the content of pip's inputs, so a checkout that only changes dates installs nothing again.
STAMP  := $(VENV)/.installed-$(firstword $(shell (cat pyproject.toml reproduction/pyproject.toml constraints.txt; echo '$(ANTLR)') | cksum))

# Results of Table 1 and Figure 1 on synthetic images, and their metrics; the same results on real models.
HEADLINE := gather@scores-clip_b32-8 headline
REAL     := $(addprefix pipeline/request/dvc.yaml:request@,scores-minilm-8 drift-minilm-8 scores-vit_s-8)
# Base models of the synthetic suite, which are in git.
BASES    := clip_b32 clip_l14 flan_t5_base flan_t5_large llama_3b llama_8b

# Parts of the tests, each without the parts below it: first the one that loads no torch, then the slowest. nbval executes the page
# that computes in a kernel; the tests execute all other pages.
PARTS := $(addprefix tests/,reproduction/report/test_book.py reproduction/stages/test_smoke.py reproduction) tests \
         $(addprefix tests/,calibration cli reproduction/report reproduction/report/test_notebooks.py merging test_container.py) \
         book/pages/method.ipynb
# Parts that run at the same time: one more than processors, because a part waits for browser, kernels and downloads.
JOBS  ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

# Stages run `featcal` and `python`, which must be those of the environment.
export PATH := $(BIN):$(PATH)
# Only `suite: paper` reads from the Hugging Face hub; its first run needs HF_HUB_OFFLINE=0.
export HF_HUB_OFFLINE ?= 1
export DVC_NO_ANALYTICS = 1
# With a foreign JUPYTER_PATH the kernel named python3 can be another interpreter.
unexport JUPYTER_PATH

.DEFAULT_GOAL := help
.PHONY: help setup locked project repro real studies test bench processors book pretrain verify rehearsal accept citation clean

help:
	@awk -F ' *## *' '/^[a-z]+:.*## / {sub(/:.*/, "", $$1); printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create the virtual environment and install everything into it

$(STAMP):
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "featcal needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' -e ./reproduction
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/share/featcal/antlr4 $(ANTLR)
	@$(BIN)/python scripts/repair_torchvision.py
	@rm -f $(VENV)/.installed-* && touch $@

# Source packages are built with the setuptools of the lock. The CPU build needs PyTorch's own index: PIP_EXTRA_INDEX_URL.
LOCK ?= cpu
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps
locked:  ## the same, each file checked by its hash in requirements/ (Linux, Python 3.11; LOCK=cpu or cuda)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --require-hashes -r requirements/build.txt
	$(INSTALL) --require-hashes -r requirements/linux-$(LOCK).txt
	$(INSTALL) -e . -e ./reproduction
	$(INSTALL) --require-hashes --upgrade --target $(VENV)/share/featcal/antlr4 -r requirements/antlr4.txt
	@$(BIN)/python scripts/repair_torchvision.py
	$(BIN)/python -m pip --disable-pip-version-check check
	@rm -f $(VENV)/.installed-* && touch $(STAMP)

# DVC needs a git repository unless configured otherwise; a downloaded archive has none.
project: setup
	@if git rev-parse --is-inside-work-tree >/dev/null 2>&1; \
	then ! grep -qs no_scm .dvc/config.local || $(BIN)/dvc config --quiet --local --unset core.no_scm; \
	else grep -qs no_scm .dvc/config.local || $(BIN)/dvc config --quiet --local core.no_scm true; fi

repro: project  ## recompute the headline chain on synthetic images (Table 1, Figure 1) and build the book
	$(BIN)/dvc repro $(HEADLINE)
	@$(MAKE) --no-print-directory book

# Claims and ARTIFACT.md do not depend on stages that run on request; they are made again after them.
SHOW = $(BIN)/dvc repro --single-item --glob 'requested*' claims artifact && $(MAKE) --no-print-directory book
real: project  ## recompute the same tables on real texts and real images (about two hours), and build the book
	$(BIN)/dvc repro $(REAL)
	@$(SHOW)

studies: project  ## recompute everything that dvc repro keeps as it is in git (about a day), and build the book
	$(BIN)/dvc repro pipeline/request/dvc.yaml
	@$(SHOW)

# A page is a kernel on one core, so two processes execute half of the pages each.
book: project  ## build the book from the results in git, computing no model
	$(BIN)/dvc repro --single-item --glob 'requested*'
	@printf '%s\n' 'page@[!t]*' 'page@t*' | xargs -P 2 -I '{}' $(BIN)/dvc --wait-for-lock repro --single-item --glob '{}'
	$(BIN)/dvc repro --single-item book
	@printf '\nThe book:    %s\n' '$(CURDIR)/book/_build/html/index.html'
	@printf 'Numbers:     results/*/*/*/*.csv\n'
	@printf 'Experiments: params.yaml; after an edit, make repro recomputes what depends on it\n'

test: project  ## run the tests, and execute the pages of the book and compare them with git
	@bash scripts/system_packages.sh
	@MAKEFLAGS= $(BIN)/python -m scripts.test_parts --jobs $(JOBS) $(PARTS)

bench: project  ## time a calibration against the method's published form (15 minutes; end other work first)
	$(BIN)/python -m benchmarks.speed

# The kernels of torch, oneDNN and MKL for other processors: with AVX2, then the plainest. MKL_CBWR works on every processor,
# MKL_ENABLE_INSTRUCTIONS only on Intel's.
processors: project  ## run make test twice more, with the rounding of processors with AVX2 and without (about forty minutes)
	@failed=0; for kind in 'ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2' 'ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE'; do \
	  echo "as with $$kind ONEDNN_MAX_CPU_ISA=AVX2:"; \
	  env $$kind ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) --no-print-directory test || failed=1; \
	done; exit $$failed

pretrain: project  ## train the synthetic suite's base models again (up to an hour)
	set -e; for base in $(BASES); do $(BIN)/featcal stage pretrain $$base; done

verify: project  ## run dvc repro in a temporary clone and compare every CSV file with the committed one
	VENV='$(abspath $(VENV))' bash scripts/recompute.sh dvc repro --force

rehearsal: setup  ## run all of `suite: paper` with tiny random models on a local hub (about six minutes of one core)
	$(BIN)/python scripts/rehearsal.py

accept: project  ## record a code change that changes no result, after the smoke graph has confirmed it
	$(BIN)/python scripts/accept.py

# In an environment of its own, since cffconvert needs an older jsonschema than Jupyter.
citation:  ## validate CITATION.cff with cffconvert
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; $(PYTHON) -m venv "$$work" && \
	"$$work/bin/python" -m pip install --quiet --disable-pip-version-check cffconvert==2.0.0 && \
	"$$work/bin/cffconvert" --validate -i CITATION.cff

clean:  ## remove everything computed: outputs, DVC's cache, the book, resume state (not .venv, not results)
	rm -rf outputs book/_build .featcal .dvc/cache .dvc/tmp .pytest_cache .ruff_cache .mypy_cache
	find featcal reproduction tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
