"""Shows the phase of the reducer in the second step, as hooks of the user see it."""

from __future__ import annotations

from torch import nn, ones

from ddpx import _C, ReducerDDP
from ddpx.testing import RankPool


def phases_seen() -> list[str]:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = ReducerDDP(module)
    model(ones(2, 4)).sum().backward()  # the forward after this step rebuilds buckets
    seen: list[str] = []

    def look(where: str) -> None:
        seen.append(f"{where:<36}{model.reducer.phase.name}")

    look("between steps")
    module.register_forward_hook(lambda *_: look("in forward"))
    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: look(f"{name} accumulated"))
    model.register_post_sync_hook(
        module[0].bias, lambda param: look("in a hook after synchronization")
    )
    model(ones(2, 4)).sum().backward()
    look("after backward()")
    return seen


def illegal_move() -> str:
    try:
        _C.transition(_C.Phase.IDLE, _C.Phase.FINALIZING)
    except RuntimeError as error:
        return str(error)
    return "allowed"


if __name__ == "__main__":
    with RankPool(2) as ranks:
        print("\n".join(ranks.run(phases_seen)[0]))
    print(illegal_move())
