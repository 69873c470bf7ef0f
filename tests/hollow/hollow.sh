#!/bin/bash
# `make hollow`: makes an environment with the CUDA build of torch, builds the stand-in, and runs the tests on two of them.
#
# tests/hollow/hollow.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
venv=.cache/hollow

skip() {
    echo "skipped: make hollow $1" >&2
    exit 0
}

command -v g++ > /dev/null || skip "compiles the stand-in, and g++ is missing: apt-get install g++"

# With ===, pip takes no build for CPUs, such as 2.13.0+cpu, that another index or a local folder may offer.
wanted=$(sed 's/^torch==/torch===/' "{{cookiecutter.project_slug}}/constraints.txt" requirements.txt)
if [ "$wanted" != "$(cat $venv/installed.txt 2> /dev/null)" ]; then
    "$python" -m venv $venv
    echo "$wanted" > $venv/requirements.txt
    $venv/bin/pip install -q --disable-pip-version-check -r $venv/requirements.txt \
        || skip "needs the CUDA build of torch and 5 GB of disk; pip could not install it"
    mv $venv/requirements.txt $venv/installed.txt
fi
$venv/bin/python -c "import sys, torch; sys.exit(not torch.version.cuda)" \
    || skip "needs the CUDA build of torch, which PyPI has for Linux on x86-64"

$venv/bin/python tests/hollow/build.py
exec $venv/bin/python tests/hollow/run.py 2 \
    python -m pytest -n 2 --dist worksteal -m "hollow or (gpu and not real_gpu)" --durations=5
