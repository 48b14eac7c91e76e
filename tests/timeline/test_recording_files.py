"""Files of recordings, and invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from recorded_models import record_mode, train_unaware
from synthetic import make_recording

from ddpx import _C
from ddpx.timeline import Timeline
from ddpx.timeline.export import trace_file


def _save(paths: list[str]) -> Any:
    timeline = record_mode({})
    timeline.export_chrome_trace(paths[dist.get_rank()])
    return timeline.recording


def test_saved_and_loaded(ranks, tmp_path):
    paths = [str(tmp_path / f"{rank}.json") for rank in range(2)]
    recordings = ranks(2).run(_save, paths)
    for path, recording in zip(paths, recordings, strict=True):
        assert Timeline.load(path).recording == recording


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        ("", "JSONDecodeError"),
        ("{}", "KeyError: 'ddpx'"),
        ('{"ddpx": {"version": 99}}', "the file has version 99, but this ddpx reads version 2"),
        ('{"ddpx": {"version": 2, "ranks": [{}]}}', "KeyError"),
    ],
)
def test_files_of_others(tmp_path, contents, why):
    path = tmp_path / "steps.json"
    path.write_text(contents)
    with pytest.raises(ValueError, match=f"steps.json holds no usable timeline of ddpx.*{why}"):
        Timeline.load(path)
    with pytest.raises(ValueError, match=r"the folder has no trace\.json and no rank"):
        Timeline.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        Timeline.load(tmp_path / "nothing.json")


def test_paths_may_be_strings_or_paths(tmp_path):
    with pytest.raises(FileNotFoundError):
        Timeline.load(str(tmp_path / "a.json"))
    with pytest.raises(FileNotFoundError):
        Timeline.load(Path(tmp_path / "a.json"))


def test_files_of_two_recordings(ranks, tmp_path):
    for name in ("a", "b"):
        ranks(2).run(train_unaware, str(tmp_path / name))
    (tmp_path / "b" / "rank1.json").replace(tmp_path / "a" / "rank1.json")
    with pytest.raises(ValueError, match="from several jobs or process groups"):
        Timeline.load(tmp_path / "a")


def test_several_models(ranks, tmp_path):
    ranks(2).run(train_unaware, str(tmp_path), None, 3)
    assert [len(list(tmp_path.glob(name))) for name in ("rank*.json", "model*.json")] == [2, 4]
    names = set()
    for model in range(3):
        timeline = Timeline.load(tmp_path, model=model)
        assert [set(step.ranks) for step in timeline.steps] == [{0, 1}] * 4
        names.add(
            json.loads(sorted(tmp_path.glob("*rank0.json"))[model].read_text())["ddpx"]["ranks"][0][
                "name"
            ]
        )
    assert len(names) == 3
    with pytest.raises(ValueError, match=r"no recording of model 3\. Recorded models: 0, 1, 2\."):
        Timeline.load(tmp_path, model=3)
    (tmp_path / "rank0.json").unlink()
    (tmp_path / "rank1.json").unlink()
    with pytest.raises(ValueError, match=r"no recording of model 0\. Recorded models: 1, 2\."):
        Timeline.load(tmp_path)
    with pytest.raises(ValueError, match=r"no recording of model 1\. Recorded model: 0\."):
        Timeline.load(tmp_path / "model1-rank0.json", model=1)


def _edit(path: Path, **values: Any) -> None:
    contents = json.loads(path.read_text())
    contents["ddpx"]["ranks"][0].update(values)
    path.write_text(json.dumps(contents))


def test_clocks_that_were_not_compared(ranks, tmp_path):
    ranks(2).run(train_unaware, str(tmp_path), init_sync=False)
    assert len(Timeline.load(tmp_path).steps) == 4
    _edit(tmp_path / "rank1.json", clock="another machine's")
    with pytest.raises(ValueError, match="the clocks of the machines were not compared"):
        Timeline.load(tmp_path)
    assert len(Timeline.load(tmp_path / "rank1.json").steps) == 4


def test_events_that_are_none(ranks, tmp_path):
    ranks(2).run(train_unaware, str(tmp_path))
    for events in ([[1, 2, 3]], ["event"], None):
        _edit(tmp_path / "rank0.json", events=events)
        with pytest.raises(ValueError, match="holds no usable timeline of ddpx"):
            Timeline.load(tmp_path)


def test_an_end_that_was_recorded_late_is_the_end_of_the_wait(ranks, tmp_path):
    """The thread that records the end of an all-reduce may run after the thread that waits."""
    ranks(2).run(train_unaware, str(tmp_path))
    path = tmp_path / "rank0.json"
    events = json.loads(path.read_text())["ddpx"]["ranks"][0]["events"]
    last = max(time_ns for time_ns, *_ in events)
    completed = int(_C.EventKind.COMPLETED)
    events = [event for event in events if event[2] != completed] + [
        [last, *event[1:]] for event in events if event[2] == completed
    ]
    _edit(path, events=events)
    buckets = [b for step in Timeline.load(tmp_path).steps for b in step.ranks[0].buckets]
    assert buckets and all(bucket.completed == bucket.wait.end for bucket in buckets)


@pytest.mark.parametrize(
    "changed",
    [
        {"readings": []},
        {"plans": []},
        {"events": [[0, 0, 99, 0]]},
        {"rank": "0"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_values_that_do_not_belong_together(ranks, tmp_path, changed):
    ranks(2).run(train_unaware, str(tmp_path))
    _edit(tmp_path / "rank0.json", **changed)
    with pytest.raises(ValueError, match=r"rank0\.json holds no usable timeline of ddpx"):
        Timeline.load(tmp_path)


def test_ranks_are_in_order(ranks, tmp_path):
    """Not in the order of file names, in which rank 10 comes before rank 2."""
    ranks(2).run(train_unaware, str(tmp_path))
    first, second = tmp_path / "rank0.json", tmp_path / "rank1.json"
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    assert list(Timeline.load(tmp_path).recording.hosts) == [0, 1]


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "rank0.json").mkdir()
    with pytest.raises(ValueError, match=r"rank0\.json holds no usable timeline of ddpx: IsADir"):
        Timeline.load(tmp_path)
    with pytest.raises(IsADirectoryError):
        trace_file.write(tmp_path / "rank0.json", make_recording(), [])
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]
