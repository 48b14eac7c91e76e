"""Draws one step of rank 0: backward, all-reduces in flight, and waits for them.

Usage: python docs/internals/overlap.py [CAP ...]    bucket_cap_mb_list, in MiB; 25 if not given
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from torch import nn

import ddpx
from ddpx.testing import RankPool
from ddpx.timeline.analyze.figures import step_figures
from ddpx.timeline.model import RankStep

WIDTH = 60
STEPS = 9


def draw(step: RankStep) -> list[str]:
    begin, span = step.backward.begin, step.end - step.backward.begin

    def bar(*parts: tuple[int, int, str]) -> str:
        line = [" "] * WIDTH
        for first, last, mark in parts:
            low, high = ((at - begin) * WIDTH // span for at in (first, last))
            line[low : min(high + 1, WIDTH)] = mark * (min(high + 1, WIDTH) - low)
        return "|" + "".join(line) + "|"

    lines = ["backward  " + bar((begin, step.backward.end, "="))]
    for index, b in enumerate(step.buckets):
        if b is not None:
            held, flying = (b.ready, b.launched, "."), (b.launched, b.completed, "=")
            lines.append(f"bucket {index}  " + bar(held, flying, (b.wait.begin, b.wait.end, "#")))
    figures = step_figures(step)
    last = step.buckets[-1]
    lines.append(f"all-reduces: {figures.communication / 1e6:.1f} ms in flight")
    lines.append(f"  hidden {figures.overlapped / 1e6:.1f} ms, exposed {figures.exposed / 1e6:.1f}")
    lines.append(f"  the last bucket exposed {last.wait.ns / 1e6 if last else 0:.1f} ms")
    return lines


def typical_step(caps: list[float]) -> list[str]:
    widths = [256, *[1024] * 6, 1]
    layers = (nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
    model = ddpx.ReducerDDP(nn.Sequential(*layers), bucket_cap_mb_list=caps)
    x = torch.randn(256, widths[0])
    model(x).square().mean().backward()  # learns the order of arrival
    with ddpx.record(model) as timeline:
        for _ in range(STEPS):
            model(x).square().mean().backward()
    steps = sorted((step.ranks[0] for step in timeline.steps), key=lambda s: s.end - s.backward.end)
    return draw(steps[len(steps) // 2])


if __name__ == "__main__":
    with RankPool(2) as ranks:
        print("\n".join(ranks.run(typical_step, [float(cap) for cap in sys.argv[1:]] or [25.0])[0]))
