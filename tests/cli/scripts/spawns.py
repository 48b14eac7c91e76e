"""Starts a process by itself, which wraps a model, or fails."""

from __future__ import annotations

import sys

import torch.multiprocessing as mp


def work(rank: int, how: str) -> None:
    if how == "fails":
        raise RuntimeError("no free port")


if __name__ == "__main__":
    if sys.argv[1] == "itself":
        raise RuntimeError("no data")
    mp.spawn(work, args=(sys.argv[1],), nprocs=1)
    sys.exit(0)
