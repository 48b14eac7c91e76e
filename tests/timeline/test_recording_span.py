"""The steps of a recording: from start to stop, as many as fit, of any wrapper."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from recorded_models import small_model, train_step
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool
from ddpx.timeline.record.recorder import Recorder


def _record_parts() -> tuple[list[int], list[int], bool]:
    model = small_model()
    with ddpx.record(model, max_steps=2) as first:
        for _ in range(5):
            train_step(model)
    second = ddpx.record(torch.nn.ModuleList([model])).start()
    with ddpx.record(model) as inner:  # several recordings at a time
        train_step(model)
    train_step(model)
    second.stop()
    train_step(model)
    numbers = [[step.number for step in t.steps] for t in (first, second, inner)]
    return numbers[0], numbers[1], numbers[2] == [5]


def test_only_what_is_asked_for(ranks):
    for found in ranks(2).run(_record_parts):
        assert found == ([0, 1], [5, 6], True)


def _overflow() -> tuple[list[int], int]:
    model = small_model()
    with ddpx.record(model) as timeline:
        for _ in range(400):
            train_step(model)
    return [step.number for step in timeline.steps], timeline.summary().lost_events


def test_the_newest_steps_are_kept(ranks):
    numbers, lost = ranks(2).run(_overflow)[0]
    assert lost > 0
    assert numbers == list(range(numbers[0], 400))
    assert 50 <= len(numbers) < 400


def _record_from_two_threads() -> int:
    """Recording begins and ends while another thread trains, but only between two steps."""
    model = small_model()
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            train_step(model)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        core = ddpx._C.Recording(10_000, torch.device("cpu"))
        deadline = time.monotonic() + 30
        while True:
            try:
                model.reducer.add_recording(core)
                break
            except RuntimeError:
                assert time.monotonic() < deadline
                time.sleep(0.001 * random.random())  # not synchronous with the steps
        while core.num_added == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        model.reducer.remove_recording(core)
        number = core.num_added
        time.sleep(0.05)
        assert core.num_added == number
    finally:
        stop.set()
        trainer.join()
    return number


def test_from_another_thread():
    with RankPool(1) as pool:
        assert pool.run(_record_from_two_threads)[0] > 0


def test_an_exception_waits_for_nobody(ranks):
    assert ranks(2).run(_both_interrupted) == [(1, [0]), (1, [1])]


def _both_interrupted() -> tuple[int, list[int]]:
    model = small_model()
    timeline = ddpx.record(model)
    with pytest.raises(KeyboardInterrupt), timeline:
        train_step(model)
        raise KeyboardInterrupt
    return len(timeline.steps), sorted(timeline.recording.hosts)


def _misuse() -> list[str]:
    model = small_model()
    texts = []

    def expect(kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as error:
            call()
        texts.append(str(error.value))

    expect(TypeError, lambda: ddpx.record(nn.Linear(2, 2)))
    expect(TypeError, lambda: ddpx.record("model"))  # type: ignore[arg-type]
    expect(TypeError, lambda: ddpx.record(nn.ModuleList([model, small_model()])))
    expect(ValueError, lambda: ddpx.record(model, max_steps=0))
    expect(ValueError, lambda: ddpx.record(model, max_steps=2.5))  # type: ignore[arg-type]
    timeline = ddpx.record(model)
    expect(RuntimeError, timeline.stop)
    expect(RuntimeError, timeline.summary)
    timeline.start()
    expect(RuntimeError, timeline.start)
    timeline.stop()
    expect(RuntimeError, timeline.stop)
    expect(RuntimeError, timeline.start)
    expect(RuntimeError, timeline.summary)
    return texts


def test_misuse(ranks):
    expected = [
        "but Linear contains none",
        "but str contains none",
        "but ModuleList contains 2",
        "max_steps=0",
        "max_steps=2.5 is not valid. Pass a positive integer",
        "is not recording",
        "timeline is empty",
        "was started before",
        "is not recording",
        "was started before",
        "no complete step was recorded",
    ]
    for texts in ranks(2).run(_misuse):
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def _check_ends() -> None:
    """A block may call stop(). A gather that fails leaves the steps of this rank."""
    model = small_model()
    with ddpx.record(model) as stopped:
        train_step(model)
        stopped.stop()
    assert len(stopped.steps) == 1
    timeline = ddpx.record(model).start()
    train_step(model)
    failure = ddpx.RankFailure("rank 1 is lost")
    with (
        patch.object(Recorder, "gather", side_effect=failure),
        pytest.raises(ddpx.RankFailure),
    ):
        timeline.stop()
    assert repr(timeline) == "<Timeline: 1 complete step of 1 of 2 ranks>"
    unused = ddpx.record(model).start()
    gone = weakref.ref(model._ddpx)
    del model
    gc.collect()
    assert gone() is None
    unused.stop()


def test_ends(ranks):
    ranks(2).run(_check_ends)


def _reprs() -> list[str]:
    model = small_model()
    timeline = ddpx.record(model)
    found = [repr(timeline)]
    timeline.start()
    found.append(repr(timeline))
    train_step(model)
    found.append(repr(timeline.stop()))
    return found


def test_repr(ranks):
    for found in ranks(2).run(_reprs):
        assert found == [
            "<Timeline: not started>",
            "<Timeline: recording>",
            "<Timeline: 1 complete step of 2 of 2 ranks>",
        ]


def _record_with_a_newer_wrapper(max_steps: int | None) -> tuple[list[int], bool]:
    model = small_model()
    with ddpx.record(model, max_steps) as timeline:
        train_step(model)
        train_step(model)
        newer = ReducerDDP(model.module)
        for _ in range(3):
            train_step(newer)
        del newer
        gc.collect()
        for _ in range(3):
            train_step(model)
    complete = all(len(step.ranks) == 2 for step in timeline.steps)
    return [step.number for step in timeline.steps], complete


@pytest.mark.parametrize(("max_steps", "numbers"), [(None, [0, 1, 2, 3, 4]), (3, [0, 1, 2])])
def test_goes_on_when_a_newer_wrapper_is_gone(ranks, max_steps, numbers):
    for found in ranks(2).run(_record_with_a_newer_wrapper, max_steps):
        assert found == (numbers, True)
