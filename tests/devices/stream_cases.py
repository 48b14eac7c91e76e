"""Trainings whose gradients come from several streams. Each also returns the expected results.

The functions run on every rank, on "late" or "cuda".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import late_device
import torch
import torch.distributed as dist
from device_models import (
    Pairs,
    accumulate_on,
    backward,
    batch,
    expected_grads,
    layers,
    loss_of,
    make_grads,
    pair_up,
)
from device_ranks import HOLD_MS, controls
from torch import nn

from ddpx import ReducerDDP


def gradients_made_on_a_side_stream(device: str, **options: Any) -> Pairs:
    """Half of forward, and thus half of backward, runs on a side stream."""
    module = layers(device)
    ours = ReducerDDP(module, **options)
    side, main = torch.Stream(device=device), torch.accelerator.current_stream()
    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, loss_of, step)
        x = batch(device, step)
        ours.zero_grad()
        side.wait_stream(main)
        hidden = module[:2](x)
        with side:
            side.wait_stream(main)
            loss = module[2:](hidden).square().mean()
        main.wait_stream(side)
        backward(loss)
        pairs += pair_up(module, expected)
    return pairs


def wrapped_on_a_side_stream(device: str, **options: Any) -> Pairs:
    """Hooks run on the side stream, while gradients come from the main stream."""
    module = layers(device)
    side = torch.Stream(device=device)
    with side:
        side.wait_stream(torch.accelerator.current_stream())
        ours = ReducerDDP(module, **options)
    torch.accelerator.current_stream().wait_stream(side)
    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, loss_of, step)
        ours.zero_grad()
        backward(loss_of(ours, batch(device, step)))
        pairs += pair_up(module, expected)
    return pairs


def hooks_on_several_streams(
    device: str,
    wrapper: Any = ReducerDDP,
    keep: bool = False,
    check_finite: bool = False,
    **options: Any,
) -> Pairs:
    """The hook of each param runs on a stream of its own. All gradients are in one bucket.

    ``keep``: gradients are added to zeros, which is work on the hook's stream.
    """
    module = layers(device)
    main = torch.accelerator.current_stream()
    streams = [torch.Stream(device=device) for _ in module.parameters()]
    nodes = [accumulate_on(p, s) for p, s in zip(module.parameters(), streams, strict=True)]
    ours = wrapper(module, **options)
    if check_finite:
        ours.set_check_finite()
    if keep:
        make_grads(module)
    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, loss_of, step)
        ours.zero_grad(set_to_none=not keep)
        backward(loss_of(ours, batch(device, step)))
        pairs += pair_up(module, expected)
        for stream in streams:
            stream.wait_stream(main)
    assert len(nodes) == len(streams)
    return pairs


def summed_by_a_synchronous_hook(device: str, **options: Any) -> Pairs:
    """A communication hook sums on the stream of the launch. Its futures do not know a device."""
    module = layers(device)
    main = torch.accelerator.current_stream()
    streams = [torch.Stream(device=device) for _ in module.parameters()]
    nodes = [accumulate_on(p, s) for p, s in zip(module.parameters(), streams, strict=True)]
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        mean = bucket.buffer().div_(dist.get_world_size())
        dist.all_reduce(mean)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(mean)
        return future

    ours.register_comm_hook(None, hook)
    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, loss_of, step)
        ours.zero_grad()
        backward(loss_of(ours, batch(device, step)))
        pairs += pair_up(module, expected)
        for stream in streams:
            stream.wait_stream(main)
    assert len(nodes) == len(streams)
    return pairs


class _Branches(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.branches = layers(device, 2)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.branches[number](x)


def local_gradients_first(device: str, **options: Any) -> Pairs:
    """A backward reaches an output of ``no_sync()`` first, then an output that makes it average.

    The earlier gradient is packed when backward reaches the second output. Its hook ran on another
    stream, which added the gradient to zeros.
    """
    module = _Branches(device)
    main, side = torch.accelerator.current_stream(), torch.Stream(device=device)
    node = accumulate_on(module.branches[1].weight, side)
    ours = ReducerDDP(module, **options)
    make_grads(module)

    def forward(branches: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, second = branches
        return first(x).square().mean() + second(x).square().mean()

    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, forward, step)
        ours.zero_grad(set_to_none=False)
        x = batch(device, step)
        averaged = ours(x, 0)
        with ours.no_sync():
            local = ours(x, 1)  # computed last, so that backward reaches it first
        backward(averaged.square().mean() + local.square().mean())
        pairs += pair_up(module, expected)
        side.wait_stream(main)
    assert node is not None
    return pairs


class _MayPassBy(nn.Module):
    """Returns the result of the layers, or an output that depends on no parameter."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = layers(device)

    def forward(self, x: torch.Tensor, pass_by: bool) -> torch.Tensor:
        return x.requires_grad_() * 1 if pass_by else self.layers(x)


def a_loss_that_reaches_no_param(device: str, **options: Any) -> tuple[Pairs, list[str]]:
    """The loss of rank 0 reaches no parameter in two of five steps. Returns gradients and error
    texts.

    Backward is called, and gradients are read, on a side stream.
    """
    module = _MayPassBy(device)
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)
    main, side = torch.accelerator.current_stream(), torch.Stream(device=device)
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs: Pairs = []
    texts = []
    for step in range(5):
        unreached = step in (2, 4)
        expected = expected_grads(module, loss_of, step)
        if unreached:
            alone = layers("cpu")  # the gradients of rank 0 alone; no step changes the parameters
            loss_of(alone, batch("cpu", step, 0)).backward()
            for value, param in zip(expected, alone.parameters(), strict=True):
                assert param.grad is not None
                value -= param.grad / size
        ours.zero_grad()
        x = batch(device, step)
        side.wait_stream(main)
        with side:
            loss = ours(x, pass_by=unreached and rank == 0).square().mean()
            try:
                backward(loss)
                texts.append("")
            except RuntimeError as error:
                texts.append(str(error))
            pairs += pair_up(module, expected)
        main.wait_stream(side)
    return pairs, texts


def gradients_dropped_while_read(device: str, wrapper: Any = ReducerDDP, **options: Any) -> Pairs:
    """Packing a bucket takes long and releases its gradients. Backward continues meanwhile.

    The gradients were accumulated on other streams than the one that packs.
    """
    module = layers(device, 8)
    main = torch.accelerator.current_stream()
    streams = [torch.Stream(device=device) for _ in module.parameters()]
    nodes = [accumulate_on(p, s) for p, s in zip(module.parameters(), streams, strict=True)]
    ours = wrapper(module, bucket_cap_mb=2 * 16 * 16 * 4 / 2**20, **options)
    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, loss_of, step)
        ours.zero_grad()
        with slow_copies(device):
            loss_of(ours, batch(device, step)).backward()
        pairs += pair_up(module, expected)
        for stream in streams:
            stream.wait_stream(main)
    assert len(nodes) == len(streams)
    return pairs


@contextlib.contextmanager
def slow_copies(device: str) -> Iterator[None]:
    """On the late device: no work is held, but copies of many tensors at once take 60 ms."""
    if device != "late":
        yield
        return
    controls().set_hold(late_device.milliseconds(0))
    controls().set_delay("_foreach_copy_", late_device.milliseconds(60))
    try:
        yield
        torch.accelerator.synchronize()
    finally:
        controls().set_delay("_foreach_copy_", late_device.milliseconds(0))
        controls().set_hold(late_device.milliseconds(HOLD_MS))


def launched_from_another_stream(
    device: str, wrapper: Any = ReducerDDP, check_finite: bool = False, **options: Any
) -> Pairs:
    """A full bucket waits for its turn. The hook that launches it runs on another stream."""
    module = layers(device, 2)
    main = torch.accelerator.current_stream()
    streams = [torch.Stream(device=device) for _ in range(2)]
    nodes = [accumulate_on(p, s) for p, s in zip(module.parameters(), streams, strict=True)]
    ours = wrapper(module, bucket_cap_mb=0.0001, **options)
    if check_finite:
        ours.set_check_finite()
    pairs: Pairs = []

    def forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def backwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, second = model
        return first(second(x)).square().mean()

    for step in range(7):
        reverse = step > 3  # buckets have been rebuilt by the reverse arrival order
        expected = expected_grads(module, backwards if reverse else forwards, step)
        ours.zero_grad()
        x = batch(device, step)
        backward(backwards(module, x) if reverse else forwards(ours, x))
        pairs += pair_up(module, expected)
        for stream in streams:
            stream.wait_stream(main)
    assert len(nodes) == len(streams)
    return pairs


def a_replaced_gradient(device: str, what: str, wrapper: Any = ReducerDDP, **options: Any) -> Pairs:
    """A hook of a later param replaces or clears an earlier param's gradient, which still
    counts.

    This also holds in the first step, in which buckets are launched at the end of backward.
    """
    module = layers(device, 2)
    ours = wrapper(module, **options)
    early, late = module[1].weight, module[0].weight
    replaced = []

    def replace(_: torch.Tensor) -> None:
        assert early.grad is not None
        replaced.append(early.grad)
        early.grad = None if what == "cleared" else torch.full_like(early.grad, 7.0)

    pairs: Pairs = []
    for step in range(4):
        ours.zero_grad()
        expected = expected_grads(module, loss_of, step)
        hook = late.register_post_accumulate_grad_hook(replace)
        backward(loss_of(ours, batch(device, step)))
        hook.remove()
        pairs += pair_up(module, expected)
    assert len(replaced) == 4
    return pairs


def a_changed_gradient(device: str, **options: Any) -> list[str]:
    """The errors of steps in which a hook of a later param changes an earlier param's gradient."""
    module = layers(device, 2)
    ours = ReducerDDP(module, **options)

    def change(_: torch.Tensor) -> None:
        grad = module[1].weight.grad
        assert grad is not None
        grad.fill_(7.0)

    module[0].weight.register_post_accumulate_grad_hook(change)
    texts = []
    for step in range(3):
        ours.zero_grad()
        try:
            backward(loss_of(ours, batch(device, step)))
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def arrived_in_another_order(device: str, **options: Any) -> Pairs:
    """Ranks agree on the arrival order of rank 0."""
    module = layers(device, 3)
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parts = list(model)
        order = parts if dist.get_rank() == 0 else [parts[1], parts[2], parts[0]]
        return torch.stack([layer(x).square().mean() for layer in order]).sum()

    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, forward, step)
        ours.zero_grad()
        ours(batch(device, step))  # rebuilds buckets
        backward(forward(module, batch(device, step)))
        pairs += pair_up(module, expected)
    return pairs


def checked_for_finite(device: str, **options: Any) -> list[str]:
    """Error texts per step. A gradient of rank 0 is infinite in the second step."""
    module = layers(device)
    ours = ReducerDDP(module, **options)
    ours.set_check_finite()
    texts = []
    for step in range(3):
        ours.zero_grad()
        x = batch(device, step)
        if step == 1 and dist.get_rank() == 0:
            x[0, 0] = float("inf")
        try:
            backward(loss_of(ours, x))
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts
