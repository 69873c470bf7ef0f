# make demo     bake the template and train what comes out, on every GPU or on two CPU processes; WORKLOAD=recsys for
#               users and items
# make test     the tests: of the engine and the tools in place, of the template, of baked projects, of the pages
# make slow     the tests that are marked as slow
# make single   the fast tests of each folder in one process, without workers that would hide a crash at its exit
# make nightly  the long tests, more than an hour: kills under torchrun, two agents, planted causes, benchmarks, Slurm,
#               the site, `make compat hollow`, and short forms of `make fuzz images soak`
# make check    the gate: format, lint, types, fast tests; changes no file
# make fix      format, fix what the linter can, write the page and the schema of the config keys, and write the
#               template's address into CITATION.cff and pyproject.toml
# make pins     resolve constraints.txt again; UPGRADE=--upgrade takes the newest versions, except of torch
# make messages write the golden messages of the tests again, and show what changed: read it before you commit
# make docs     the pages as a site in build/site; a broken link is an error
# make pictures draw the pictures of the pages from bench/results and docs/pictures/timeline.json (bench/timeline.py)
# make screenshots  take the screenshot of TensorBoard (tools/screenshots.py); it needs chromium, two idle CPUs and three
#               minutes
# make compat   a project on Python 3.12 and 3.13, with the lowest and with the newest packages; downloads gigabytes
# make wheel    the engine as a package: build/fastgpu_engine-*.whl
# make goldens  the same rows and bytes as before (tests/goldens), in seconds
# make gpu      the tests that need a CUDA device; with two devices, also the tests of NCCL between ranks
# make hollow   the same tests and whole runs without a GPU, on two simulated GPUs (tests/hollow/README.md); it needs g++,
#               and downloads the CUDA build of torch (2.5 GB) once
# make slurm    launch/slurm.sh on a cluster of two nodes on this machine; it needs root and Debian's packages slurmctld,
#               slurmd, slurm-client and shellcheck
# make soak     200 training runs that meet faults at random moments, about an hour
# make fuzz     10,000 damaged files for everything that reads files, and 500 checkpoints with flipped bits
# make images   a million small images are decoded, and the memory stays flat, about 20 minutes
# make bench    the loader benchmark, without the peers: bench/results/loader_*.md
# make bench-peers  the same with the peer loaders, installed into bench/.venv-peers

.DEFAULT_GOAL := help

PROJECT := {{cookiecutter.project_slug}}
PYTHON  ?= python3
BIN     := $(CURDIR)/.venv/bin
# Caches of a run in place must not be baked into a project: none is written inside $(PROJECT).
export PYTHONDONTWRITEBYTECODE := 1
export RUFF_CACHE_DIR := $(CURDIR)/.cache/ruff
export MYPY_CACHE_DIR := $(CURDIR)/.cache/mypy
WORKLOAD ?= images
IN_PLACE := cd "$(PROJECT)" && "$(BIN)/python" -m

.PHONY: help demo test slow single nightly check fix pins messages docs pictures screenshots goldens wheel compat gpu hollow slurm soak fuzz images bench bench-peers clean
.DELETE_ON_ERROR:

.venv/installed: requirements.txt $(PROJECT)/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: python3 is %d.%d; install Python >= 3.11 or use make PYTHON=python3.x" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	grep -v '^torchvision==' "$(PROJECT)/constraints.txt" \
		| "$(BIN)/pip" install -q --disable-pip-version-check -r /dev/stdin -r requirements.txt
	@touch $@

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

demo: .venv/installed
	"$(BIN)/python" tools/demo.py $(WORKLOAD)

# Here, the style rules of the engine hold for the whole project. In a baked project, its owner chooses.
WHOLE_PROJECT := --config 'lint.per-file-ignores = {"*.py" = ["E402"], "__init__.py" = ["F401"]}' "$(PROJECT)"

# Three test processes share two CPUs, since runs that are killed and resumed wait a lot. They have one thread each, or
# they would wait for each other's threads.
test slow single nightly check goldens compat gpu hollow: export OMP_NUM_THREADS := 1
PYTEST := "$(BIN)/python" -m pytest -n 3 --dist worksteal

test: .venv/installed
	$(PYTEST) -m "not nightly"

slow: .venv/installed
	$(PYTEST) -m "slow and not nightly"

single: .venv/installed
	@set -e; for folder in tests/engine/*/ tests/tools/*/ "tests/engine/test_*.py" tests/template/ tests/pages/; do \
		echo "$$folder"; "$(BIN)/python" -m pytest -n 0 -m "not slow" $$folder; done

# Some nightly tests measure times, which a third process would disturb.
nightly: .venv/installed
	$(PYTEST) -n 2 -m nightly
	$(PYTEST) --hypothesis-profile=night -m hypothesis
	$(MAKE) single slurm docs compat hollow
	"$(BIN)/python" tests/faults/fuzz.py --files 500
	"$(BIN)/python" tests/faults/images.py --images 100000
	"$(BIN)/python" tests/faults/soak.py --runs 20

check: .venv/installed
	"$(BIN)/ruff" format --check
	"$(BIN)/ruff" check
	"$(BIN)/ruff" check $(WHOLE_PROJECT)
	$(IN_PLACE) mypy --disallow-untyped-defs
	$(PYTEST) -m "not slow"

fix: .venv/installed
	"$(BIN)/ruff" check --fix
	"$(BIN)/ruff" check --fix $(WHOLE_PROJECT)
	"$(BIN)/ruff" format
	mkdir -p .cache
	"$(BIN)/python" tools/config_page.py > .cache/config.md
	mv .cache/config.md "$(PROJECT)/docs/config.md"
	"$(BIN)/python" tools/config_schema.py > .cache/config.schema.json
	mv .cache/config.schema.json "$(PROJECT)/docs/config.schema.json"
	"$(BIN)/python" tools/address.py

pins: .venv/installed
	"$(BIN)/python" tools/pins.py $(UPGRADE)

messages: .venv/installed
	"$(BIN)/python" -m pytest --rewrite-messages -k test_messages
	git --no-pager diff -- 'tests/**/messages.yaml'

pictures: .venv/installed
	"$(BIN)/python" tools/draw_pictures.py

screenshots: .venv/installed
	"$(BIN)/python" tools/screenshots.py

goldens: .venv/installed
	"$(BIN)/python" tests/goldens/goldens.py

wheel:
	rm -f build/fastgpu_engine-*.whl
	$(PYTHON) -m pip wheel -q --disable-pip-version-check --no-deps -w build .

compat: .venv/installed
	"$(BIN)/python" tools/compat.py

# Some sections of pages are only in some projects, so a project with all sections is baked beside the files of the
# template. The page of public names is made from its engine.
SITE_PROJECT := build/pages/my_training_project
docs: .venv/installed
	rm -rf build/pages build/site
	mkdir -p build/pages
	{ git ls-files -z --cached --others --exclude-standard ':!tests' ':(exclude,literal)$(PROJECT)'; \
		git ls-files -z 'tests/*.md'; } | xargs -0 cp --parents -t build/pages
	"$(BIN)/cookiecutter" --no-input -o build/pages . project_slug=my_training_project workload=both engine=copy launch=both examples=yes \
		> /dev/null
	grep -rlF --include='*.md' '$(PROJECT)' build/pages | xargs sed -i 's/$(PROJECT)/my_training_project/g'
	cat docs/site/contents.md >> build/pages/README.md
	sed -i 's|^## What is public$$|&\n\n[Signatures and docstrings](../../docs/site/api.md).|' $(SITE_PROJECT)/docs/code.md
	PYTHONPATH=$(SITE_PROJECT) "$(BIN)/sphinx-build" -q -W --keep-going -d .cache/doctrees -c docs/site build/pages build/site
	cp build/site/README.html build/site/index.html
	@echo "open build/site/index.html"

gpu: .venv/installed
	@"$(BIN)/python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available() and "error: torch sees no CUDA device")'
	"$(BIN)/python" -m pytest -m gpu

hollow:
	@tests/hollow/hollow.sh "$(PYTHON)"

slurm: export OMP_NUM_THREADS := 1
slurm: .venv/installed
	@for each in slurmctld slurmd sbatch shellcheck; do command -v $$each > /dev/null \
		|| { echo "error: $$each is missing: apt-get install slurmctld slurmd slurm-client shellcheck" >&2; exit 2; }; done
	shellcheck "$(PROJECT)"/launch/*.sh
	"$(BIN)/python" -m pytest -m slurm --durations=0

soak: .venv/installed
	"$(BIN)/python" tests/faults/soak.py

fuzz: export OMP_NUM_THREADS := 1
fuzz: .venv/installed
	"$(BIN)/python" tests/faults/fuzz.py
	"$(BIN)/python" tests/faults/fuzz.py flips --files 500

images: .venv/installed
	"$(BIN)/python" tests/faults/images.py

bench: .venv/installed
	"$(BIN)/python" bench/run.py

bench-peers: .venv/installed bench/.venv-peers/installed
	"$(BIN)/python" bench/run.py --peers

# Peers are installed one by one: if a peer does not install, only its rows are missing from the tables.
bench/.venv-peers/installed: bench/requirements-peers.txt
	@echo "FFCV is compiled: on Debian it needs g++ pkg-config libopencv-dev libturbojpeg0-dev"
	$(PYTHON) -m venv bench/.venv-peers
	sed 's/ *#.*//' $< | grep . | while read -r each; do \
		bench/.venv-peers/bin/pip install -q --disable-pip-version-check -c $< "$$each" \
		|| echo "warning: $$each does not install; the benchmark goes on without it" >&2; done
	@touch $@

clean:
	rm -rf .venv .cache build bench/.venv-peers bench/data
