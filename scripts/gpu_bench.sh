#!/usr/bin/env bash
# On a machine with a GPU and a torch of its own: builds in place and times steps there.
#   bash scripts/gpu_bench.sh [arguments of benchmarks/gpu.py]
# PYTHON names the interpreter; it needs torch 2.11 to 2.13 and ninja.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

"$PYTHON" scripts/build.py
PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TORCH_CPP_LOG_LEVEL=ERROR "$PYTHON" benchmarks/gpu.py "$@"
