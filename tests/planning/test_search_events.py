"""What a search reads from a wrapper: times from events that are written by hand, and sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import _C
from ddpx.ddp.arguments.options import make_options
from ddpx.ddp.search.events import arrivals_of, times_of_steps
from ddpx.ddp.search.wrapper_search import gradients_of
from ddpx.params import managed_params

KIND = _C.EventKind
MS = 1_000_000


def _events(*rows: tuple[float, int, _C.EventKind, int]) -> torch.Tensor:
    table = [[int(ms * MS), step, int(kind), index] for ms, step, kind, index in rows]
    return torch.tensor(table, dtype=torch.int64)


def _step(number: int, begin: float, *, gradients: tuple[float, ...] = (3, 4)) -> list:
    """A step of 10 ms. Its backward begins after 2 ms, and communication ends after 9 ms."""
    return [
        (begin, number, KIND.FORWARD_BEGIN, 0),
        (begin + 2, number, KIND.BACKWARD_BEGIN, 0),
        (begin + 3, number, KIND.STEP_BEGIN, 0),
        *((begin + at, number, KIND.GRAD_ARRIVED, i) for i, at in enumerate(gradients)),
        (begin + 8, number, KIND.WAIT_END, 0),
        (begin + 9, number, KIND.WAIT_END, 1),
        (begin + 10, number, KIND.STEP_END, 0),
    ]


def test_a_step_lasts_from_its_forward_to_its_end():
    events = _events(*_step(5, 100), *_step(6, 120))
    assert times_of_steps(events, range(5, 7)) == [pytest.approx((0.010, 0.007))] * 2


def test_local_micro_steps_do_not_count():
    local = [(80, 5, KIND.FORWARD_BEGIN, 0), (82, 5, KIND.BACKWARD_BEGIN, 0)]
    events = _events(*local, *_step(5, 100))
    assert times_of_steps(events, range(5, 6)) == [pytest.approx((0.010, 0.007))]


def test_events_after_the_end_of_a_step_do_not_count():
    late = [(120, 5, KIND.FORWARD_BEGIN, 0), (122, 5, KIND.BACKWARD_BEGIN, 0)]
    events = _events(*_step(5, 100), *late)
    assert times_of_steps(events, range(5, 6)) == [pytest.approx((0.010, 0.007))]


def test_what_is_missing_is_0():
    without_forward = _step(5, 100)[1:]
    without_end = _step(6, 120)[:-1]
    events = _events(*without_forward, *without_end)
    times = times_of_steps(events, range(5, 8))
    assert [duration for duration, _ in times] == [0, 0, 0]
    assert times[2] == (0, 0)


def test_arrivals_are_medians_since_the_begin_of_the_backward():
    steps = [_step(n, 20 * n, gradients=(3, at)) for n, at in ((5, 4), (6, 40), (7, 5))]
    events = _events(*(row for step in steps for row in step))
    assert arrivals_of(events, range(5, 8), 3) == pytest.approx([0.001, 0.003, 0.0])


def test_the_last_part_of_a_gradient_counts():
    events = _events(*_step(5, 100), (107, 5, KIND.GRAD_ARRIVED, 0))
    assert arrivals_of(events, range(5, 6), 2) == pytest.approx([0.005, 0.002])


WIDE, NARROW = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("options", "item_bytes"),
    [
        ({}, (4, 2)),
        ({"grad_dtype": WIDE}, (4, 4)),
        ({"reduce_dtype": WIDE}, (4, 4)),
        ({"reduce_dtype": NARROW, "grad_dtype": WIDE}, (2, 2)),
        ({"mixed_precision": _MixedPrecision(NARROW, WIDE, NARROW)}, (4, 4)),
        ({"mixed_precision": _MixedPrecision(NARROW)}, (2, 2)),
    ],
    ids=["as stored", "grad_dtype", "reduce_dtype", "both", "mixed precision", "param_dtype"],
)
def test_gradients_of_another_dtype_need_another_bucket(options: dict[str, Any], item_bytes):
    """Sizes are those of the sums over ranks."""
    module = nn.Sequential(
        nn.Linear(3, 1, bias=False, dtype=WIDE),
        nn.Linear(5, 1, bias=False, dtype=NARROW),
        nn.Embedding(7, 1, sparse=True, dtype=WIDE),
    )
    replica: Any = SimpleNamespace(
        options=make_options(**options), managed=managed_params(module, ())
    )
    found = [(each.num_bytes, each.kind, each.alone) for each in gradients_of(replica)]
    of_wide, of_narrow = item_bytes
    assert found == [(3 * of_wide, 0, False), (5 * of_narrow, 1, False), (7 * of_wide, 0, True)]
