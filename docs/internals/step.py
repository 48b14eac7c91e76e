"""Lists the events of one step on rank 0, in order of time.

Usage: python docs/internals/step.py [NUMBER]    of the step, counted from 0; 2 if not given
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from ddpx import _C, ReducerDDP
from ddpx.testing import RankPool

KINDS = {int(kind): kind.name for kind in _C.EventKind.__members__.values()}
PHASES = {int(phase): phase.name for phase in _C.Phase.__members__.values()}


def events_of(number: int) -> list[str]:
    layers = (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = ReducerDDP(nn.Sequential(*layers), bucket_cap_mb=0.01)
    names = [name for name, _ in model.module.named_parameters()]
    recording = _C.Recording(4096, torch.device("cpu"))
    model.reducer.add_recording(recording)
    for _ in range(number + 1):
        model(torch.randn(8, 64)).square().mean().backward()
    lines = []
    for _, step, kind, index in recording.events().tolist():
        # A thread of gloo records the end of an all-reduce, so its place varies.
        if step != number or KINDS[kind] == "COMPLETED":
            continue
        what = ""
        if KINDS[kind] == "PHASE":
            what = PHASES[index]
        elif KINDS[kind] == "GRAD_ARRIVED":
            what = names[index]
        elif KINDS[kind] in ("BUCKET_READY", "LAUNCHED", "WAIT_BEGIN", "WAIT_END", "WRITTEN_BACK"):
            what = f"bucket {index}"
        lines.append(f"{KINDS[kind]:<15}{what}".rstrip())
    return lines


if __name__ == "__main__":
    with RankPool(2) as ranks:
        wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 2
        print("\n".join(ranks.run(events_of, wanted)[0]))
