"""Communication starts while backward runs, without Python code per gradient."""

from __future__ import annotations

import torch
from fake_groups import RecordingGroup
from torch import nn

from ddpx import ReducerDDP


def _layers(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(count)))


def _log_of_steps(num_steps: int) -> list[list[str]]:
    """Per step: the arrival of each gradient and the launch of each all-reduce, in order of
    time."""
    log: list[str] = []
    model = _layers()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
    ours = ReducerDDP(
        model,
        process_group=RecordingGroup(log),
        bucket_cap_mb=0.004,
        init_sync=False,
        forward_sync_buffers=False,
    )
    steps = []
    for _ in range(num_steps):
        log.clear()
        ours(torch.randn(4, 32)).sum().backward()
        steps.append(list(log))
    return steps


def _first_launch_comes_before_last_gradient() -> None:
    first, second, third = _log_of_steps(3)
    gradients = [name for name, _ in _layers().named_parameters()]
    # One bucket until the arrival order is known. It is launched last.
    assert first[-1] == "launch"
    assert first.count("launch") == 1
    # After the rebuild, each layer has a bucket, which is launched as soon as it is full.
    assert second[0] == "broadcast"
    for step in (second, third):
        assert step.count("launch") == len(gradients) // 2
        last_gradient = max(step.index(name) for name in gradients)
        assert step.index("launch") < last_gradient
        assert step.index("launch") == (3 if step is second else 2)


def test_first_launch_comes_before_last_gradient(ranks):
    ranks(2).run(_first_launch_comes_before_last_gradient)


def _nothing_is_launched_without_sync() -> None:
    log: list[str] = []
    ours = ReducerDDP(_layers(), process_group=RecordingGroup(log), init_sync=False)
    with ours.no_sync():
        ours(torch.randn(4, 32)).sum().backward()
    assert log == []


def test_nothing_is_launched_without_sync(ranks):
    ranks(2).run(_nothing_is_launched_without_sync)
