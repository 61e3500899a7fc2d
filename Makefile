# The front door: `make` lists what there is. Every target installs what it needs first.

PYTHON ?= python3
VENV   ?= .venv
EXTRAS := repro,openclip,lora,mergekit,language,tune,dev
BIN    := $(abspath $(VENV))/bin
# sympy reads the LaTeX of MATH-500 with this version, DVC its configuration with 4.9: a folder of its own keeps it apart.
ANTLR  := antlr4-python3-runtime==4.11.1
# Named after the content of pip's inputs: a checkout that only touches dates installs nothing again.
STAMP  := $(VENV)/.installed-$(firstword $(shell (cat pyproject.toml reproduction/pyproject.toml constraints.txt; echo '$(ANTLR)') | cksum))

# The numbers of the first table and figure on drawn images and their metrics; the same numbers on the real encoder.
HEADLINE := gather@scores-clip_b32-8 headline
REAL     := $(addprefix pipeline/request/dvc.yaml:request@,scores-minilm-8 drift-minilm-8)
BASES    := images/dvc.yaml:pretrain@clip_b32 images/dvc.yaml:pretrain@clip_l14 \
            language/dvc.yaml:pretrain_t5@flan_t5_base language/dvc.yaml:pretrain_t5@flan_t5_large \
            language/dvc.yaml:pretrain_llama@llama_3b language/dvc.yaml:pretrain_llama@llama_8b

# The tests in parts, those that take longest or wait most first, and each without the parts that lie below it; and the page that
# nbval executes in a kernel, as it computes. All others are executed by the tests.
PARTS   := tests/reproduction/report/test_book.py tests tests/reproduction tests/reproduction/stages/test_smoke.py tests/calibration \
           tests/cli tests/reproduction/report tests/test_container.py
KERNELS := $(addprefix book/pages/,$(addsuffix .ipynb,method))
# How many of them at once: one more than there are processors, as browser, kernels and downloads keep a part waiting.
JOBS    ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

# Stages say `featcal` and `python`, which must be those of the environment.
export PATH := $(BIN):$(PATH)
# Only `suite: paper` reads from the Hugging Face hub; its first run needs HF_HUB_OFFLINE=0.
export HF_HUB_OFFLINE ?= 1
export DVC_NO_ANALYTICS = 1
# A foreign JUPYTER_PATH can put another interpreter behind the kernel named python3.
unexport JUPYTER_PATH

.DEFAULT_GOAL := help
.PHONY: help setup locked project repro real studies test processors book pretrain verify rehearsal accept citation clean

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

# What comes as source is built with the setuptools of the lock. The CPU build needs PyTorch's own index: PIP_EXTRA_INDEX_URL.
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

# DVC wants a git repository unless told otherwise; a downloaded archive has none.
project: setup
	@if git rev-parse --is-inside-work-tree >/dev/null 2>&1; \
	then ! grep -qs no_scm .dvc/config.local || $(BIN)/dvc config --quiet --local --unset core.no_scm; \
	else grep -qs no_scm .dvc/config.local || $(BIN)/dvc config --quiet --local core.no_scm true; fi

repro: project  ## recompute the headline chain on drawn images (Table 1, Figure 1) and build the book
	$(BIN)/dvc repro $(HEADLINE)
	@$(MAKE) --no-print-directory book

# Claims and ARTIFACT.md do not wait for what is on request, and are made anew behind it.
SHOW = $(BIN)/dvc repro --single-item --glob 'requested*' claims artifact && $(MAKE) --no-print-directory book
real: project  ## recompute the same tables on the real encoder (about fifty minutes), and build the book
	$(BIN)/dvc repro $(REAL)
	@$(SHOW)

studies: project  ## recompute all that dvc repro leaves as it is in git (some hours), and build the book
	$(BIN)/dvc repro pipeline/request/dvc.yaml
	@$(SHOW)

book: project  ## build the book from the results in git, computing no model
	$(BIN)/dvc repro --single-item --glob 'requested*' 'page*'
	$(BIN)/dvc repro --single-item book
	@printf '\nThe book:    %s\n' '$(CURDIR)/book/_build/html/index.html'
	@printf 'Numbers:     results/*/*/*/*.csv\n'
	@printf 'Experiments: params.yaml; after an edit, make repro again recomputes what it touches\n'

test: project  ## run the tests and re-execute the pages of the book against what git holds
	@bash scripts/system_packages.sh
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) $(PARTS:%=run/%) run/pages

# A part's report follows in one piece when it is done, and any part failing fails the target.
RUN = echo 'begun: pytest $(1)'; said=$$(MAKEFLAGS= $(BIN)/python -m pytest $(1) 2>&1); code=$$?; printf '%s\n' '' 'pytest $(1)' "$$said"; exit $$code
.PHONY: $(PARTS:%=run/%) run/pages
$(PARTS:%=run/%): run/%:
	@$(call RUN,$* $(addprefix --ignore=,$(filter $*/%,$(PARTS))))
run/pages:
	@$(call RUN,--nbval-lax --nbval-current-env $(KERNELS))

# Kernels that another processor would get, from torch, oneDNN and MKL: of one with AVX2, then the plainest there are. MKL follows
# MKL_CBWR on every processor, MKL_ENABLE_INSTRUCTIONS on Intel's alone.
processors: project  ## run make test twice more, rounding as processors with AVX2 and with less would (about forty minutes)
	@failed=0; for kind in 'ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2' 'ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE'; do \
	  echo "as with $$kind ONEDNN_MAX_CPU_ISA=AVX2:"; \
	  env $$kind ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) --no-print-directory test || failed=1; \
	done; exit $$failed

pretrain: project  ## train the mini suite's base models anew (frozen otherwise; up to an hour)
	set -e; for base in $(BASES); do $(BIN)/featcal stage pretrain $${base#*@}; $(BIN)/dvc commit --force pipeline/$$base; done

verify: project  ## recompute what dvc repro does in a temporary clone and compare with the committed results
	VENV='$(abspath $(VENV))' bash scripts/recompute.sh dvc repro --force

rehearsal: setup  ## run all of `suite: paper` on a small hub of our own with tiny random models (about six minutes of one core)
	$(BIN)/python scripts/rehearsal.py

accept: project  ## record a code change that alters no number, after the smoke graph has shown that it alters none
	$(BIN)/python scripts/accept.py

# In an environment of its own, since cffconvert wants an older jsonschema than Jupyter.
citation:  ## validate CITATION.cff with cffconvert
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; $(PYTHON) -m venv "$$work" && \
	"$$work/bin/python" -m pip install --quiet --disable-pip-version-check cffconvert==2.0.0 && \
	"$$work/bin/cffconvert" --validate -i CITATION.cff

clean:  ## remove all that was computed: outputs, DVC's cache, the book, resume state (not .venv, not results)
	rm -rf outputs book/_build .featcal .dvc/cache .dvc/tmp .pytest_cache .ruff_cache .mypy_cache
	find featcal reproduction tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
