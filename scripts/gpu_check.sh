#!/usr/bin/env bash
# On a machine with a GPU and a torch of its own: builds in place and runs the tests marked `gpu`.
#   bash scripts/gpu_check.sh [pytest arguments]
# PYTHON names the interpreter; it needs torch 2.11 to 2.13, ninja, pytest and pytest-timeout.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

"$PYTHON" - <<'PY'
import sys
import torch

print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}")
if not torch.cuda.is_available():
    sys.exit("no CUDA device here")
print(torch.cuda.get_device_name())
PY
"$PYTHON" scripts/build.py

# cuBLAS sums in a fixed order only with a workspace of its own.
export CUBLAS_WORKSPACE_CONFIG=:4096:8
PYTHONPATH=$PWD PYTHONUNBUFFERED=1 "$PYTHON" -m pytest tests -m gpu -q "$@"
