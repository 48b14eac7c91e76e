"""Gradients that remain after a backward that raised. The functions run on every rank.

"late", "cuda" or "cpu" is the device.
"""

from __future__ import annotations

from typing import Any

import torch
from abort_cases import fail
from device_models import accumulate_on, backward, batch, layers, loss_of
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import ReducerDDP

State = list[torch.Tensor]


def aborted_in_mixed_precision(device: str, launched: bool, **options: Any) -> State:
    """As :func:`aborted`. The gradients are cast to float32 afterwards."""
    precision = _MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    return aborted(device, launched, mixed_precision=precision, **options)


def aborted_with_views(device: str, **options: Any) -> State:
    """As :func:`aborted`. The gradients are moved into new buckets afterwards."""
    return aborted(device, launched=False, gradient_as_bucket_view=True, **options)


def kept_after_an_abort(device: str) -> State:
    """As :func:`aborted`. The first gradient of another backward moves the others."""
    return aborted(device, launched=False, goes_on=True, gradient_as_bucket_view=True)


def aborted(device: str, launched: bool, goes_on: bool = False, **options: Any) -> State:
    """Gradients after several backwards, the last of which raises on all ranks.

    On arrival, each gradient was copied on a stream of its own.

    Args:
        launched: The backward raises after the last gradient, when the bucket is launched.
            Otherwise before.
        goes_on: Then another backward adds to the gradients. Its forward bypasses the wrapper.
            Otherwise the wrapper is reset.
    """
    module = layers(device)
    on_device = device != "cpu"
    streams = [torch.Stream(device=device) for _ in module.parameters() if on_device]
    nodes = [accumulate_on(p, s) for p, s in zip(module.parameters(), streams, strict=on_device)]
    kept: list[torch.Tensor] = []
    sums: list[float] = []
    for param in module.parameters():
        param.register_hook(kept.append)  # makes autograd copy the gradient
        if goes_on:  # the host waits for the gradient, and for no gradient of another stream
            param.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.sum().item()))
    ours = ReducerDDP(module, **options)
    last = next(module.parameters())

    state: State = []
    for step in range(3):
        ours.zero_grad()
        x = batch(device, step).requires_grad_() * 1
        if step == 2:
            removable = (x if launched else last).register_hook(fail)
        try:
            backward(loss_of(ours, x))
        except ValueError:
            assert step == 2
            removable.remove()
            if goes_on:
                backward(loss_of(module, batch(device, step)))
            else:
                ours.reset()  # a thread of the autograd engine ends the step
            for stream in streams:  # torch does this only after a successful backward
                torch.accelerator.current_stream().wait_stream(stream)
        grads = [param.grad for param in module.parameters()]
        state += [grad.cpu().clone() for grad in grads if grad is not None]  # views change
        kept.clear()
    assert len(nodes) == len(streams)
    return state
