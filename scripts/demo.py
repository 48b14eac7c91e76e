"""Runs the main example, with one rank per GPU over NCCL, or with two CPU ranks over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

_CPU_RANKS = 2


def main() -> int:
    script = Path(__file__).parent.parent / "examples" / "char_gpt" / "train.py"
    num_gpus = torch.cuda.device_count()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={num_gpus or _CPU_RANKS}",
        str(script),
        *sys.argv[1:],
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    code = subprocess.run(command, env=environment, check=False).returncode
    if code == 0:
        print("Next: source .venv/bin/activate, then ddpx run --nproc-per-node 2 your_script.py")
    return code


if __name__ == "__main__":
    sys.exit(main())
