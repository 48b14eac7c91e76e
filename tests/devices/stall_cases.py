"""Trainings in which one rank comes late, and what the other ranks log or raise.

The functions run on every rank, on "late" or "cuda". The last rank is the late one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from device_models import batch, layers
from device_ranks import keep_busy
from fault_ranks import stop_for
from nccl_classes import make_group
from refused_calls import start_no_more_threads

import ddpx

STEP = 3
WARN_S = 0.5
ERROR_S = 1.5
LATE_S = 2.5
PLACES = ("between steps", "forward", "backward", "own call", "stopped", "device")


@dataclass(frozen=True)
class Seen:
    """What a rank saw of the late rank.

    Attributes:
        warnings: The warnings of the failure detector.
        kind: The type of the exception. Empty if the rank trained to the end.
        text: The text of the exception.
        seconds: Seconds from the fault to the end or the exception.
    """

    warnings: tuple[str, ...]
    kind: str
    text: str
    seconds: float


def train(
    device: str,
    place: str,
    nccl_class: str = "nccl2",
    error: bool = False,
    more_threads: bool = True,
) -> Seen:
    """The last rank is late in one step.

    Args:
        place: Where. "device": its host goes on, and its device computes for long.
        nccl_class: On the late device, the class of the backend.
        error: Whether ranks raise. Otherwise they warn.
        more_threads: Whether threads can start in the step in which the rank is late.
    """
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddpx.health").addHandler(handler)
    ddpx.set_stall_timeout(warn=WARN_S)
    group = make_group(nccl_class)[0] if device == "late" else None
    module = layers(device)
    model = ddpx.ReducerDDP(module, process_group=group, bucket_cap_mb=0.0005)
    inputs = batch(device, 0)  # a copy to the device would let the host wait for it
    is_late = dist.get_rank() == dist.get_world_size() - 1
    step = 0

    def come_to(here: str) -> None:
        if not (is_late and step == STEP and here == place):
            return
        if place == "device":
            keep_busy(device, int(1e3 * LATE_S))
        elif place == "stopped":
            stop_for(LATE_S)
        else:
            time.sleep(LATE_S)

    module.register_forward_pre_hook(lambda *_: come_to("forward"))
    list(module.parameters())[1].register_hook(lambda _: come_to("backward"))
    kind = text = ""
    fault = time.monotonic()
    try:
        for step in range(STEP + 60 if error else STEP + 3):
            if step == STEP:
                _meet(device, group)
                ddpx.set_stall_timeout(error=ERROR_S if error else float("inf"))
                if not more_threads:
                    start_no_more_threads()
                fault = time.monotonic()
            for here in ("between steps", "stopped", "device", "own call"):
                come_to(here)
            if place == "own call":
                dist.all_reduce(torch.ones(4, device=device), group=group)
            model(inputs).square().mean().backward()
            _read_or_go_on(device, error)
        if not error:
            torch.accelerator.synchronize()
    except RuntimeError as caught:
        raised = caught if isinstance(caught, ddpx.RankError) else _of_next_step(model, inputs)
        kind, text = type(raised).__name__, str(raised)
    seconds = time.monotonic() - fault
    time.sleep(0.6)  # the log has a thread of its own
    return Seen(tuple(warnings), kind, text, seconds)


def _of_next_step(model: ddpx.ReducerDDP, inputs: torch.Tensor) -> RuntimeError:
    """The error of the next step, after one of a call of the script itself, which NCCL raised."""
    try:
        model(inputs).square().mean().backward()
    except RuntimeError as error:
        return error
    raise AssertionError("the next step raised no error")


def _meet(device: str, group: dist.ProcessGroup | None) -> None:
    """Ranks begin the step together, with idle devices."""
    torch.accelerator.synchronize()
    dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.accelerator.synchronize()


def _read_or_go_on(device: str, error: bool) -> None:
    """A script that reads its loss waits for the device, and NCCL's wait ends by the abort.

    gloo's wait, by which the late device sums, does not end so. There the host goes on.
    """
    if device == "cuda":
        torch.accelerator.synchronize()
    elif error:
        time.sleep(0.05)


def evaluate_after_an_error(device: str) -> float:
    """All ranks catch an error of a step. Then one rank is late in calls of the script.

    Returns:
        The sum of the results of the calls.
    """
    group = make_group("nccl2")[0] if device == "late" else None
    module = layers(device)
    model = ddpx.ReducerDDP(module, process_group=group, bucket_cap_mb=0.0005)
    inputs = batch(device, 0)
    model(inputs).square().mean().backward()
    hook = next(module.parameters()).register_hook(_raise)
    with contextlib.suppress(ValueError):
        model(inputs).square().mean().backward()
    hook.remove()
    total = torch.zeros(1, device=device)
    for _ in range(3):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(1.2)
        part = torch.ones(1, device=device)
        dist.all_reduce(part, group=group)
        total += part
    model(inputs).square().mean().backward()
    return float(total.item())


def _raise(_: torch.Tensor) -> None:
    raise ValueError("of the script")
