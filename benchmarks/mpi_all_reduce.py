"""Measures the all-reduce of MPICH in separate processes, which all_reduce.py starts by mpiexec.

The loop is that of ``interleave.time_rounds`` with ``all_reduce._burst``. Rank 0 prints the seconds
per operation on the slowest rank, for each round.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from mpi4py import MPI


def _time_burst(buffer: np.ndarray[Any, np.dtype[np.float32]], burst: int) -> float:
    MPI.COMM_WORLD.Barrier()
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)
    start = time.perf_counter()
    for _ in range(burst):
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)
    return (time.perf_counter() - start) / burst


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    for name in ("--numel", "--burst", "--rounds", "--warm-up"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    buffer = np.zeros(arguments.numel, np.float32)
    buffer.fill(0)  # allocates the pages
    for _ in range(arguments.warm_up):
        _time_burst(buffer, arguments.burst)
    mine = [_time_burst(buffer, arguments.burst) for _ in range(arguments.rounds)]
    per_rank = MPI.COMM_WORLD.gather(mine)
    if per_rank is not None:
        seconds = [max(at) for at in zip(*per_rank, strict=True)]
        version = MPI.Get_library_version().splitlines()[0].split()[2]
        print(json.dumps({"seconds": seconds, "version": version}))


if __name__ == "__main__":
    main()
