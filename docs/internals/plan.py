"""Bucket plans of one small model. No ranks are needed: a plan is a pure function.

Usage: python docs/internals/plan.py [FIRST CAP]    caps in MiB, 1 and 25 if not given
"""

from __future__ import annotations

import sys

from torch import nn

from ddpx import _C

MIB = 1 << 20


def show(title: str, plan: _C.BucketPlan, params: list[nn.Parameter]) -> None:
    print(title)
    for index, members in enumerate(plan.buckets):
        num_bytes = sum(params[i].nbytes for i in members)
        print(f"  bucket {index}: params {members}, {num_bytes / MIB:.3f} MiB")


def main(first: float = 1, cap: float = 25) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    params = list(model.parameters())
    metas = [_C.ParamMeta(param) for param in params]
    for index, (name, param) in enumerate(model.named_parameters()):
        print(f"param {index}: {name}, {param.nbytes / MIB:.3f} MiB")
    caps = _C.BucketCaps(int(first * MIB), int(cap * MIB))
    initial, modes = _C.BucketPlan.initial, _C.GraphMode
    show("before any backward, default mode", initial(metas, caps, modes.DEFAULT), params)
    show("before any backward, find_unused", initial(metas, caps, modes.FIND_UNUSED), params)
    arrived = list(reversed(range(len(params))))
    show("rebuilt, last param first", _C.BucketPlan.by_arrival(metas, caps, arrived), params)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
