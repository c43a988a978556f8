# REINFORCE Zero, minimal. `make run ARGS="--lag 2 --steps 50"` is the whole interface; everything below is how it gets there.

PYTHON ?= python3
ARGS   ?=
PY     := .venv/bin/python

# A machine has CUDA if nvidia-smi answers. Setting CUDA= (empty) on the command line forces the CPU build on a GPU machine.
CUDA         := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
REQUIREMENTS := $(if $(CUDA),requirements.txt,requirements-cpu.txt)

# Touched only after a complete install, so an interrupted one is taken up again and a finished one costs nothing.
INSTALLED := .venv/installed-$(REQUIREMENTS)

.PHONY: run run-ray test soak bench bench-trl plots setup ray lock clean

# tyro lets the last occurrence of a flag win, so a --lag in ARGS overrides the one here; a resumed run has its own.
run: setup
	$(PY) run_async.py $(if $(findstring --resume,$(ARGS)),,--lag 8) $(ARGS)

run-ray: ray
	$(PY) run_ray.py $(if $(findstring --resume,$(ARGS)),,--lag 8) $(ARGS)

test: ray
	$(PY) -m pytest tests -q -m "not soak" --durations=10 $(ARGS)

soak: ray
	$(PY) -m pytest tests -m soak $(ARGS)

bench: ray
	$(PY) plots/bench.py $(ARGS)

plots: setup
	$(PY) plots/figures.py --logs $(ARGS)

# TRL pins other versions than vLLM does, so the baseline gets an environment of its own.
bench-trl: .venv-trl/installed-requirements-trl.txt
	.venv-trl/bin/python plots/trl_baseline.py $(ARGS)

setup: $(INSTALLED)

ray: .venv/installed-requirements-ray.txt

.venv/installed-requirements-ray.txt: requirements-ray.txt $(INSTALLED)
	$(PY) -m pip install --quiet --no-deps -r requirements-ray.txt
	@touch $@

.venv/installed-requirements-cpu.txt: requirements-cpu.txt
	$(call make-venv,.venv)
	$(call install-torch,.venv,requirements-cpu.txt)
	$(PY) -m pip install --quiet --no-deps -r requirements-cpu.txt
	@touch $@

.venv/installed-requirements.txt: requirements.txt
	$(call make-venv,.venv)
	$(PY) -m pip install --quiet -r requirements.txt
	@touch $@

.venv-trl/installed-requirements-trl.txt: plots/requirements-trl.txt
	$(call make-venv,.venv-trl)
	$(call install-torch,.venv-trl,plots/requirements-trl.txt)
	.venv-trl/bin/python -m pip install --quiet -r plots/requirements-trl.txt
	@touch $@

# $(call make-venv,DIR)
define make-venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
@echo "installing into $(1), a few minutes the first time"
@$(PYTHON) -m venv $(1)
endef

# $(call install-torch,DIR,REQUIREMENTS): by itself and first, because the CPU build often comes from another index (see the
# README) and a missing one should fail at once. A torch of the right version is kept, whichever build it is.
TORCH := 2.13.0
define install-torch
@$(1)/bin/python -c 'from importlib.metadata import version; exit(version("torch").split("+")[0] != "$(TORCH)")' 2>/dev/null \
  || $(1)/bin/python -m pip install --quiet torch==$(TORCH) --constraint $(2)
endef

# Needs only pip, from a virtual environment that may hold nothing else.
lock:
	$(call make-venv,.venv)
	$(PY) lock.py

clean:
	rm -rf .venv .venv-trl runs .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
