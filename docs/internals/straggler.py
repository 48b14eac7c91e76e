"""Records three ranks. One rank is slow in one layer: which rank, and which layer?

Usage: python docs/internals/straggler.py [--answer]
"""

from __future__ import annotations

import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx.testing import RankPool

NUM_RANKS = 3
LAYERS = 4


def recorded(slow_rank: int, slow_layer: int) -> tuple[list[str], list[str]]:
    layers = [nn.Linear(128, 128, bias=False) for _ in range(LAYERS)]
    if dist.get_rank() == slow_rank:
        layers[slow_layer].register_full_backward_pre_hook(lambda *_: time.sleep(0.03))
    model = ddpx.ReducerDDP(nn.Sequential(*layers), bucket_cap_mb=0.01)
    x = torch.randn(8, 128, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    with ddpx.record(model) as timeline:
        for _ in range(5):
            model(x).sum().backward()
    step = timeline.steps[-1]
    lines = ["ms since backward began: ready / completed"]
    for index, layout in enumerate(step.layout):
        lines.append(f"bucket {index} ({timeline.recording.param_names[layout.params[0]]})")
        for rank, rank_step in step.ranks.items():
            bucket, begin = rank_step.buckets[index], rank_step.backward.begin
            if bucket is not None:
                times = (f"{(at - begin) / 1e6:6.1f}" for at in (bucket.ready, bucket.completed))
                lines.append(f"  rank {rank}: {' / '.join(times)}")
    return lines, [f"straggler: rank {timeline.summary().straggler}", *timeline.advice()]


if __name__ == "__main__":
    with RankPool(NUM_RANKS) as ranks:
        picked = random.randrange(NUM_RANKS), random.randrange(1, LAYERS)
        lines, answer = ranks.run(recorded, *picked)[0]
        print("\n".join(lines))
        if "--answer" in sys.argv:
            print(f"slow: rank {picked[0]}, layer {picked[1]}", *answer, sep="\n")
