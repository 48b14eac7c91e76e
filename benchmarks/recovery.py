"""Measures how soon survivors train again: one of 3 ranks is killed, the others call ddpx.shrink().

    python benchmarks/recovery.py [--launches 5]

Prints the seconds from the kill to the end of the next step of the slower survivor. Each launch
takes 10 to 25 s, and checks that the survivors' weights are equal after ten more steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpx

_RANKS, _KILL_AT, _STEPS, _LOST = 3, 10, 20, 1
_TIMEOUT_S = 120


def train(folder: Path, backend: str) -> None:
    """One rank. Writes its results into the folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(backend)
    first_rank = dist.get_rank()
    model = ddpx.ReducerDDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen: dict[str, Any] = {}
    step = 0
    while step < _STEPS:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = model(x[dist.get_rank() :: dist.get_world_size()]).square().mean()
        if first_rank == _LOST and step == _KILL_AT:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.zero_grad()
            loss.backward()
        except ddpx.RankFailure as failure:
            seen |= {"error": f"ddpx.{type(failure).__name__}: {failure}", "caught": time.time()}
            step = ddpx.shrink(model, optimizer, step=step).step
            continue
        optimizer.step()
        step += 1
        if "caught" in seen and "next step" not in seen:
            seen["next step"] = time.time()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    assert all(torch.equal(other, weights) for other in others), "weights differ between ranks"
    (folder / f"{first_rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def launch(backend: str) -> dict[str, Any]:
    """Seconds to the error and to the next step, and the error of a survivor."""
    with tempfile.TemporaryDirectory(prefix="ddpx-recovery-") as folder:
        flags = ["--keep-survivors", f"--nproc-per-node={_RANKS}"]
        script = [__file__, "--rank", folder, "--backend", backend]
        done = subprocess.run(
            [sys.executable, "-m", "ddpx", "run", *flags, *script],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            timeout=_TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)
        killed = float(Path(folder, "killed").read_text())
        survivors = [rank for rank in range(_RANKS) if rank != _LOST]
        seen = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in survivors]
    return {
        "error": seen[0]["error"],
        "error_s": max(one["caught"] for one in seen) - killed,
        "next_step_s": max(one["next step"] for one in seen) - killed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--backend", choices=("gloo", "shm"), default="gloo")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        train(arguments.rank, arguments.backend)
        return
    launches = []
    for number in range(1, arguments.launches + 1):
        print(f"launch {number} of {arguments.launches}", flush=True)
        launches.append(launch(arguments.backend))
    print(launches[0]["error"])
    for name, what in {"error_s": "RankFailure", "next_step_s": "end of the next step"}.items():
        values = sorted(one[name] for one in launches)
        print(
            f"{what}: {statistics.median(values):.2f} s after the kill (median of {len(values)}, "
            f"{values[0]:.2f} to {values[-1]:.2f})"
        )
    print("The survivors' weights are equal.")


if __name__ == "__main__":
    main()
