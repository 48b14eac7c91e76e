"""The result of ``ddpx parity`` as tables and sentences, and the recorder of a rank."""

from __future__ import annotations

import re
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpx.cli.parity.command import Outcome, _sentence
from ddpx.cli.parity.record import RankRecord, Settings
from ddpx.cli.parity.recorder import Recorder, _Model
from ddpx.cli.parity.text import costs_table, steps_table
from ddpx.testing.events import Event, compare


def _training(num_steps: int, changed_step: int = 0) -> list[Event]:
    events = [Event("weight", 0, 0, {"a": "start"})]
    for step in range(1, num_steps + 1):
        loss = "0.25" if step == changed_step else "0.5"
        events.append(Event("loss", step, -1, {"number 0": "2.5", "number 1": loss}))
        events.append(Event("gradient", step, 0, {"a": "g"}))
        events.append(Event("weight", step, 0, {"a": "w"}))
    return events


def _rows(left: list[Event], right: list[Event]) -> list[list[str]]:
    """The rows of the table of steps."""
    verdict = compare([left], [right])
    return _cells(steps_table([RankRecord(events=left)], verdict, RankRecord(events=right), "Ours"))


def _cells(table: str) -> list[list[str]]:
    return [re.split(" {2,}", line.rstrip()) for line in table.splitlines()[2:]]


def test_values_after_the_end_of_a_run_are_not_compared():
    assert [row[-3:] for row in _rows(_training(1), _training(3))] == [
        ["identical", "identical", "identical"],
        ["1 differs", "not compared", "not compared"],
        ["not compared", "not compared", "not compared"],
    ]
    (row,) = _rows(_training(1), _training(1)[:-1])
    assert row[-3:] == ["identical", "identical", "1 differs"]


def test_steps_without_losses_have_rows():
    events = [event for event in _training(2) if event.kind != "loss"]
    assert _rows(events, events) == [["1", *3 * ["identical"]], ["2", *3 * ["identical"]]]


def test_a_long_table_has_the_first_and_last_steps_and_all_that_differ():
    rows = _rows(_training(30, changed_step=12), _training(30))
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 5, 12, 26, 27, 28, 29, 30]
    assert rows[5] == ["12", "0.25", "0.5", "1 differs", "identical", "identical"]


def test_costs_are_in_ms_and_mib():
    one = [
        RankRecord(step_ns=[1_000_000, 9_000_000, 2_000_000], peak_bytes=100 << 20),
        RankRecord(peak_bytes=64 << 20, device_peak_bytes=8 << 20),
    ]
    other = [
        RankRecord(step_ns=[3_000_000], peak_bytes=50 << 20),
        RankRecord(peak_bytes=64 << 20, device_peak_bytes=16 << 20),
    ]
    assert _cells(costs_table(one, other, "Ours")) == [
        ["rank 0: median step, ms", "2.00", "3.00", "1.50"],
        ["rank 1: median step, ms"],
        ["rank 0: peak memory, MiB", "100.00", "50.00", "0.50"],
        ["rank 1: peak memory, MiB", "64.00", "64.00", "1.00"],
        ["rank 1: peak on the device, MiB", "8.00", "16.00", "2.00"],
    ]


@pytest.mark.parametrize(("again", "is_unstable"), [(1, True), (2, True), (3, False), (0, False)])
def test_a_difference_counts_unless_ddp_differs_from_itself_by_then(again: int, is_unstable: bool):
    """``again`` is the step in which the second run with DDP differs from the first."""
    ddp, ours, second = (
        Outcome([RankRecord(events=_training(4, changed_step=step))], None)
        for step in (0, 2, again)
    )
    subject: Any = SimpleNamespace(title="Ours", run=lambda replaces, difference: second)
    said = _sentence(subject, ddp, compare(ddp.events, ours.events))
    assert said.startswith("Different: step 2, rank 0: the loss is 0.5 with DDP and 0.25 with Ours")
    assert ("Two runs with DDP differ from each other, too" in said) == is_unstable


def _recorder(on_step: Any = None) -> Recorder:
    return Recorder(Settings("", None, None), 0, None, on_step)


class _Checkpointed(torch.autograd.Function):
    """A layer whose backward calls a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: Any) -> torch.Tensor:
        ctx.backward = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.backward(torch.ones(1, requires_grad=True) * 3)
        return grad, None


def test_losses_are_those_of_the_outermost_backward():
    """An edge of the graph in place of a tensor has no loss."""
    recorder = _recorder()
    backward = recorder._around_backward(torch.autograd.backward)
    root = torch.ones(1, requires_grad=True) * 2
    backward(_Checkpointed.apply(root, backward))
    root = torch.ones(1, requires_grad=True) * 2
    backward(torch.autograd.graph.get_gradient_edge(root), (torch.ones(1),))
    assert [event.values for event in recorder.record.events] == [{"number 0": "2.0"}, {}]
    assert recorder.finish().peak_bytes > 32 << 20


def test_the_time_of_the_recording_does_not_count():
    pauses_s = [1.0, 0.0]
    recorder = _recorder(lambda: time.sleep(pauses_s.pop(0)))
    backward = recorder._around_backward(torch.autograd.backward)
    model = nn.Linear(1, 1)
    recorder._models.append(_Model(weakref.ref(model), model))
    for _ in range(2):
        backward(model(torch.ones(1, 1)).sum())
    (step_ns,) = recorder.record.step_ns
    assert 0 < step_ns < 0.9e9
