"""The result of ``ddpx parity`` as tables and sentences, and the recorder of a rank."""

from __future__ import annotations

import re
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpx.cli.parity.command import Outcome, _sentence
from ddpx.cli.parity.record import RankRecord, Settings
from ddpx.cli.parity.recorder import Recorder, _Model
from ddpx.cli.parity.text import costs_table, how_far, steps_table, where
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


def test_a_complex_loss_is_in_the_row_of_its_step():
    events = [Event("loss", 1, -1, {"number 0": "(1.5-2j)"})]
    assert _rows(events, events)[0][1] == "1.5-2j"


def test_steps_without_losses_have_rows():
    events = [event for event in _training(2) if event.kind != "loss"]
    assert _rows(events, events) == [["1", *3 * ["identical"]], ["2", *3 * ["identical"]]]


def test_a_long_table_has_the_first_and_last_steps_and_all_that_differ():
    rows = _rows(_training(30, changed_step=12), _training(30))
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 5, 12, 26, 27, 28, 29, 30]
    assert rows[5] == ["12", "0.25", "0.5", "1 differs", "identical", "identical"]


def _gradient(model: int = 0, **digests: str) -> Event:
    return Event("gradient", 1, model, {**digests})


def _loss(value: str) -> Event:
    return Event("loss", 1, -1, {"number 0": value})


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        *(
            (
                [Event("weight", step, 0, {"a": "w"})],
                [Event("weight", step, 0, {"a": "x"})],
                f"{place}, rank 0: the weight a",
            )
            for step, place in ((0, "before step 1"), (2, "after step 2"))
        ),
        (
            [_gradient(1, a="g", b="g")],
            [_gradient(1, a="g", b="x")],
            "step 1, rank 0 (model 1): the gradient of b",
        ),
        (
            [_loss("0.5")],
            [_loss("0.25")],
            "step 1, rank 0: the loss is 0.5 with DDP and 0.25 with Ours, difference 0.25",
        ),
        (
            [_loss("(1+2j)")],
            [_loss("(1-1j)")],
            "step 1, rank 0: the loss is (1+2j) with DDP and (1-1j) with Ours, difference 3",
        ),
        (
            [],
            [_loss("0.5")],
            "step 1, rank 0: the run with DDP ends here, but the run with Ours continues with a "
            "loss",
        ),
        (
            [_loss("0.5")],
            [],
            "step 1, rank 0: the run with Ours ends here, but the run with DDP continues with a "
            "loss",
        ),
        (
            [_gradient(a="g", b="g")],
            [_gradient(a="g", c="g")],
            "step 1, rank 0: the names of the gradients differ: b, c",
        ),
        (
            [_gradient(a="g", b="g")],
            [_gradient(b="x", a="g")],
            "step 1, rank 0: the gradients are in a different order",
        ),
        (
            [_loss("0.5")],
            [_gradient(a="g")],
            "step 1, rank 0: the runs take different courses: a loss of step 1 with DDP, but a "
            "gradient of step 1 with Ours",
        ),
    ],
)
def test_the_place_of_a_difference(left: list[Event], right: list[Event], said: str):
    assert where(compare([left], [right]).differences[0], "Ours") == said


@pytest.mark.parametrize(
    ("names", "others"),
    [
        ("a", ""),
        ("ab", "; 1 more gradient of this step differs, too"),
        ("abc", "; 2 more gradients of this step differ, too"),
    ],
)
def test_the_number_of_differences(names: str, others: str):
    left, right = ([_gradient(**dict.fromkeys(names, digest))] for digest in "gx")
    first = compare([left], [right]).differences[0]
    said = how_far(first, torch.zeros(4), torch.tensor([0.0, 0.5, 0.0, 0.0]))
    assert said == f"differs in 1 of 4 elements, largest difference 0.5{others}"
    left.append(Event("weight", 1, 0, {"a": "w"}))
    right.append(Event("weight", 1, 0, {"a": "w"}))
    (row,) = _rows(left, right)
    assert row[1:] == ["identical", f"{len(names)} differ{'s' * (names == 'a')}", "identical"]


def test_records_are_in_the_order_of_ranks(tmp_path: Path):
    for rank in range(11):
        RankRecord(peak_bytes=rank).write(tmp_path, rank)
    assert [record.peak_bytes for record in RankRecord.read_all(tmp_path)] == list(range(11))


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
