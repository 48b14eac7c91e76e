"""``ddpx.record`` and ``DDPX_TIMELINE`` in the ways in which scripts use them, and wrongly."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool
from ddpx.timeline import Timeline
from ddpx.timeline.clocks import Reading, read_clocks, to_rank_0
from ddpx.timeline.figures import step_figures
from ddpx.timeline.model import Step


def _model(**options: Any) -> ReducerDDP:
    torch.manual_seed(0)
    return ReducerDDP(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), **options)


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


@pytest.fixture(scope="module")
def pair():
    with RankPool(2) as pool:
        yield pool


# ---- what is recorded --------------------------------------------------------------------------


def _check_order(step: Step) -> None:
    """What must come before what, in any step."""
    for rank_step in step.ranks.values():
        assert rank_step.forwards
        assert rank_step.forwards[-1].end <= rank_step.backward.begin <= rank_step.backward.end
        assert rank_step.backward.end <= rank_step.end
        assert sorted(a.at for a in rank_step.arrivals) == [a.at for a in rank_step.arrivals]
        launches = []
        for layout, bucket in zip(step.layout, rank_step.buckets, strict=True):
            assert bucket is not None
            assert bucket.ready <= bucket.launched <= bucket.completed <= bucket.wait.end
            assert bucket.wait.end <= bucket.written_back <= rank_step.end
            members = [a.at for a in rank_step.arrivals if a.param in layout.params]
            assert all(at <= bucket.ready for at in members)
            launches.append(bucket.launched)
        assert launches == sorted(launches)
        figures = step_figures(rank_step)
        assert figures.communication == figures.overlapped + figures.exposed


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "batched copy": {"batched_grad_copy": True},
    "many buckets": {"bucket_cap_mb": 0.0001},
}


def _record_mode(options: dict[str, Any]) -> Timeline:
    model = _model(**options)
    with ddpx.record(model) as timeline:
        for _ in range(4):
            _step(model)
    return timeline


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_every_mode(pair, options):
    for timeline in pair.run(_record_mode, options):
        assert [step.number for step in timeline.steps] == [0, 1, 2, 3]
        for step in timeline.steps:
            assert set(step.ranks) == {0, 1}
            _check_order(step)
            assert sorted(i for b in step.layout for i in b.params) == [0, 1, 2, 3]
            for rank_step in step.ranks.values():
                assert sorted(a.param for a in rank_step.arrivals) == [0, 1, 2, 3]
        assert timeline.recording.param_names == ("0.weight", "0.bias", "2.weight", "2.bias")
        assert str(timeline.summary()).startswith("3 steps (1 to 3)") or options
        timeline.advice()


def _record_accumulation() -> Timeline:
    model = _model()
    with ddpx.record(model) as timeline:
        for _ in range(2):
            with model.no_sync():
                _step(model)
                _step(model)
            _step(model)
    return timeline


def test_accumulated_gradients(pair):
    timeline = pair.run(_record_accumulation)[0]
    assert len(timeline.steps) == 2
    for step in timeline.steps:
        _check_order(step)
        assert [len(rank_step.forwards) for rank_step in step.ranks.values()] == [3, 3]


def _record_uneven_inputs() -> Timeline:
    model = _model()
    with ddpx.record(model) as timeline:
        for _ in range(2):
            with model.join():
                for _ in range(2 + dist.get_rank()):
                    _step(model)
    return timeline


def test_uneven_inputs(pair):
    """Ranks count the steps that they only shadow, so that steps of all ranks stay together."""
    timeline = pair.run(_record_uneven_inputs)[0]
    assert {step.number: set(step.ranks) for step in timeline.steps} == {
        0: {0, 1},
        1: {0, 1},
        2: {1},
        3: {0, 1},
        4: {0, 1},
        5: {1},
    }


def _record_an_abort() -> Timeline:
    """Rank 1 raises when every bucket has left, so that rank 0 finishes that step."""
    model = _model()

    def explode(grad: torch.Tensor) -> None:
        raise ArithmeticError

    with ddpx.record(model) as timeline:
        for number in range(5):
            x = torch.ones(2, 8, requires_grad=True)
            if number == 2 and dist.get_rank() == 1:
                x.register_hook(explode)
            try:
                model(2 * x).sum().backward()  # the hook comes behind all of the model
            except ArithmeticError:
                assert number == 2
    return timeline


def test_steps_stay_together_after_an_abort(pair):
    timeline = pair.run(_record_an_abort)[0]
    assert {step.number: set(step.ranks) for step in timeline.steps} == {
        0: {0, 1},
        1: {0, 1},
        2: {0},
        3: {0, 1},
        4: {0, 1},
    }
    timeline.summary()
    timeline.advice()


def _record_with_hook() -> Timeline:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    model = _model()
    model.register_comm_hook(None, hook)
    with ddpx.record(model) as timeline:
        for _ in range(3):
            _step(model)
    return timeline


def test_communication_hook(pair):
    timeline = pair.run(_record_with_hook)[1]
    assert len(timeline.steps) == 3
    for step in timeline.steps:
        _check_order(step)


def _record_alone() -> Timeline:
    model = _model()
    with ddpx.record(model) as timeline:
        for _ in range(3):
            _step(model)
    assert "2 steps (1 to 2) of 1 of 1 ranks" in str(timeline.summary())
    return timeline


def test_one_rank_alone_has_arrivals_and_no_buckets():
    with RankPool(1) as pool:
        timeline = pool.run(_record_alone)[0]
    for step in timeline.steps:
        assert len(step.ranks[0].arrivals) == 4
        assert all(bucket is None for bucket in step.ranks[0].buckets)
        assert step_figures(step.ranks[0]).communication == 0
    assert timeline.summary().buckets == ()
    assert timeline.advice() == []


def _record_parts() -> tuple[list[int], list[int], bool]:
    model = _model()
    with ddpx.record(model, max_steps=2) as first:
        for _ in range(5):
            _step(model)
    second = ddpx.record(torch.nn.ModuleList([model])).start()
    with ddpx.record(model) as inner:  # several at a time
        _step(model)
    _step(model)
    second.stop()
    _step(model)
    numbers = [[step.number for step in t.steps] for t in (first, second, inner)]
    return numbers[0], numbers[1], numbers[2] == [5]


def test_only_what_is_asked_for(pair):
    for found in pair.run(_record_parts):
        assert found == ([0, 1], [5, 6], True)


def _overflow() -> tuple[list[int], int]:
    model = _model()
    with ddpx.record(model) as timeline:
        for _ in range(400):
            _step(model)
    return [step.number for step in timeline.steps], timeline.summary().lost_events


def test_the_newest_steps_are_kept(pair):
    numbers, lost = pair.run(_overflow)[0]
    assert lost > 0
    assert numbers == list(range(numbers[0], 400))
    assert 50 <= len(numbers) < 400


# ---- files -------------------------------------------------------------------------------------


def _save(paths: list[str]) -> Any:
    timeline = _record_mode({})
    timeline.save(paths[dist.get_rank()])
    return timeline.recording


def test_saved_and_loaded(pair, tmp_path):
    paths = [str(tmp_path / f"{rank}.json") for rank in range(2)]
    recordings = pair.run(_save, paths)
    for path, recording in zip(paths, recordings, strict=True):
        assert Timeline.load(path).recording == recording


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        ("", "JSONDecodeError"),
        ("{}", "KeyError: 'ddpx'"),
        ('{"ddpx": {"version": 99}}', "version 99"),
        ('{"ddpx": {"version": 1, "ranks": [{}]}}', "KeyError"),
    ],
)
def test_files_of_others(tmp_path, contents, why):
    path = tmp_path / "trace.json"
    path.write_text(contents)
    with pytest.raises(ValueError, match=f"trace.json holds no timeline of ddpx.*{why}"):
        Timeline.load(path)
    with pytest.raises(ValueError, match="there is no rank"):
        Timeline.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        Timeline.load(tmp_path / "nothing.json")


def _train_unaware(folder: str, steps: str | None) -> None:
    os.environ["DDPX_TIMELINE"] = folder
    if steps:
        os.environ["DDPX_TIMELINE_STEPS"] = steps
    try:
        model = _model()
        for _ in range(4):
            _step(model)
        del model
        gc.collect()
    finally:
        del os.environ["DDPX_TIMELINE"]
        os.environ.pop("DDPX_TIMELINE_STEPS", None)


@pytest.mark.parametrize(("steps", "expected"), [(None, [0, 1, 2, 3]), ("3", [0, 1, 2])])
def test_by_environment(pair, tmp_path, steps, expected):
    folder = tmp_path / "not" / "there yet"
    pair.run(_train_unaware, str(folder), steps)
    assert sorted(os.listdir(folder)) == ["rank0.json", "rank1.json"]
    timeline = Timeline.load(folder)
    assert [step.number for step in timeline.steps] == expected
    for step in timeline.steps:
        assert set(step.ranks) == {0, 1}
        _check_order(step)


@pytest.mark.parametrize("ending", ["", "break"])
def test_a_script_that_ends(tmp_path, ending):
    """The groups are gone by then, or Python is on its way out of an error."""
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone")]
    command += ["--nproc-per-node=2", str(Path(__file__).with_name("unaware.py")), ending]
    folder = tmp_path / "timeline"
    done = subprocess.run(
        command,
        env={**os.environ, "DDPX_TIMELINE": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode != 0) == bool(ending), done.stderr
    steps = [step.number for step in Timeline.load(folder).steps]
    assert steps == [0, 1, 2, 3]


def _bad_environment() -> str:
    with pytest.raises(ValueError) as error:
        _train_unaware("anywhere", "many")
    return str(error.value)


def test_bad_environment(pair):
    for text in pair.run(_bad_environment):
        assert "DDPX_TIMELINE_STEPS='many' is not a positive number" in text


# ---- clocks ------------------------------------------------------------------------------------


def _read_clocks() -> tuple[Reading, Reading]:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    return (
        read_clocks(group, device),
        read_clocks(group, device, identity=f"machine {group.rank()}"),
    )


def test_clocks_are_read(pair):
    """The ranks share a clock, so that a reading of it as a foreign one shows its error."""
    same, foreign = zip(*pair.run(_read_clocks), strict=True)
    assert [(reading.offset_ns, reading.error_ns) for reading in same] == [(0, 0), (0, 0)]
    assert foreign[0].error_ns == 0
    assert 0 < foreign[1].error_ns < 50e6
    assert abs(foreign[1].offset_ns) <= foreign[1].error_ns


def test_drift_is_evened_out():
    readings = (Reading(1000, 100.0, 5.0), Reading(3000, 200.0, 5.0))
    assert [to_rank_0(at, readings) for at in (1000, 2000, 3000)] == [1100, 2150, 3200]
    assert to_rank_0(2000, readings[:1]) == 2100


# ---- wrong use ---------------------------------------------------------------------------------


def _misuse() -> list[str]:
    model = _model()
    texts = []

    def expect(kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as error:
            call()
        texts.append(str(error.value))

    expect(TypeError, lambda: ddpx.record(nn.Linear(2, 2)))
    expect(TypeError, lambda: ddpx.record("model"))  # type: ignore[arg-type]
    expect(TypeError, lambda: ddpx.record(nn.ModuleList([model, _model()])))
    expect(ValueError, lambda: ddpx.record(model, max_steps=0))
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


def test_misuse(pair):
    expected = [
        "there is none in Linear",
        "there is none in str",
        "there are 2 in ModuleList",
        "max_steps=0",
        "is not recording",
        "holds nothing yet",
        "was started before",
        "is not recording",
        "was started before",
        "no complete step was recorded",
    ]
    for texts in pair.run(_misuse):
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def test_an_exception_waits_for_nobody(pair):
    assert pair.run(_both_interrupted) == [(1, [0]), (1, [1])]


def _both_interrupted() -> tuple[int, list[int]]:
    model = _model()
    timeline = ddpx.record(model)
    with pytest.raises(KeyboardInterrupt), timeline:
        _step(model)
        raise KeyboardInterrupt
    return len(timeline.steps), sorted(timeline.recording.hosts)


def _record_from_two_threads() -> int:
    """Recording begins and ends while another thread trains; between steps, whenever that is."""
    model = _model()
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            _step(model)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        core = ddpx._C.Recording(10_000, torch.device("cpu"))
        tries = 0
        while True:
            try:
                model.reducer.add_recording(core)
                break
            except RuntimeError:
                tries += 1
                assert tries < 10_000
        deadline = time.monotonic() + 30
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


def test_paths_may_be_strings_or_paths(tmp_path):
    with pytest.raises(FileNotFoundError):
        Timeline.load(str(tmp_path / "a.json"))
    with pytest.raises(FileNotFoundError):
        Timeline.load(Path(tmp_path / "a.json"))


# ---- waits that are not a bucket's -------------------------------------------------------------


class _Alternating(nn.Module):
    """Uses one of two layers on each rank, in turn, so that guesses about unused ones are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.branches[2](self.branches[self.calls % 2](x))


def _record_wrong_guesses() -> Timeline:
    model = ReducerDDP(_Alternating(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    model.check_finite()
    with ddpx.record(model) as timeline:
        for _ in range(6):
            _step(model)
    return timeline


def test_second_passes_are_part_of_the_agreement(pair):
    timeline = pair.run(_record_wrong_guesses)[0]
    assert len(timeline.steps) == 6
    for step in timeline.steps:
        for rank_step in step.ranks.values():
            for bucket in rank_step.buckets:
                if bucket is not None:
                    assert bucket.ready <= bucket.launched <= bucket.completed
                    assert bucket.completed <= bucket.wait.end <= bucket.written_back
                    assert bucket.written_back <= rank_step.agreement.begin
            assert rank_step.agreement.ns > 0
            assert rank_step.agreement.end <= rank_step.end
            assert step_figures(rank_step).exposed >= rank_step.agreement.ns


def _record_with_buffers() -> Timeline:
    torch.manual_seed(0)
    model = ReducerDDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    with ddpx.record(model) as timeline:
        for _ in range(4):
            time.sleep(0.1 * (dist.get_rank() == 0))  # whose buffers are sent around
            model(torch.randn(4, 8)).sum().backward()
    return timeline


def test_waiting_for_buffers_is_not_computing(pair):
    for timeline in pair.run(_record_with_buffers):
        forwards = [step.ranks[1].forwards[0].ns for step in timeline.steps]
        assert sorted(forwards)[1] < 50e6


def _one_rank_records(folder: str) -> str:
    if dist.get_rank() == 1:
        os.environ["DDPX_TIMELINE"] = folder
    try:
        with pytest.raises(RuntimeError) as error:
            _model()
    finally:
        os.environ.pop("DDPX_TIMELINE", None)
    return str(error.value)


def test_every_rank_has_to_record(pair):
    for text in pair.run(_one_rank_records, "here"):
        assert "environment variable DDPX_TIMELINE: not set on rank 0; here on rank 1" in text


def test_files_of_two_recordings(pair, tmp_path):
    for name in ("a", "b"):
        pair.run(_train_unaware, str(tmp_path / name), None)
    (tmp_path / "b" / "rank1.json").replace(tmp_path / "a" / "rank1.json")
    with pytest.raises(ValueError, match="of several jobs or process groups"):
        Timeline.load(tmp_path / "a")
