"""Times the construction of the first wrapper of a process group, beside DDP's.

python benchmarks/wrapping.py [--ranks 48] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import RankPool

CONTENDERS: dict[str, type[nn.Module]] = {"DDP": DistributedDataParallel, "ddpx": ReducerDDP}


def _construct(name: str) -> float:
    """Returns the seconds of this rank. All ranks begin at once."""
    group = dist.new_group()
    module = nn.Linear(2, 2)
    dist.barrier(group)
    start = time.monotonic()
    CONTENDERS[name](module, process_group=group)
    seconds = time.monotonic() - start
    dist.barrier(group)
    dist.destroy_process_group(group)
    del group
    time.sleep(2)  # gloo closes the connections one after the other
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with RankPool(arguments.ranks) as pool:
        for _ in range(arguments.rounds):
            for name, found in seconds.items():
                found.append(max(pool.run(_construct, name)))
    for name, found in seconds.items():
        print(f"{name}: {statistics.median(found):.3f} s ({min(found):.3f} to {max(found):.3f})")
    beyond = statistics.median(seconds["ddpx"]) - statistics.median(seconds["DDP"])
    print(f"ddpx beyond DDP: {beyond:.3f} s with {arguments.ranks} ranks (slowest rank, median)")


if __name__ == "__main__":
    main()
