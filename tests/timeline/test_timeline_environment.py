"""``DDPX_TIMELINE`` records scripts that do not use timelines."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from recorded_models import check_order, small_model, train_step, train_unaware

from ddpx.timeline import Timeline


@pytest.mark.parametrize(("steps", "expected"), [(None, [0, 1, 2, 3]), ("3", [0, 1, 2])])
def test_by_environment(ranks, tmp_path, steps, expected):
    folder = tmp_path / "not" / "there yet"
    ranks(2).run(train_unaware, str(folder), steps)
    assert sorted(os.listdir(folder)) == ["rank0.json", "rank1.json"]
    timeline = Timeline.load(folder)
    assert [step.number for step in timeline.steps] == expected
    for step in timeline.steps:
        assert set(step.ranks) == {0, 1}
        check_order(step)


def _train_in_groups(folder: str) -> None:
    """Each rank is rank 0 of a group of its own."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    train_unaware(folder, process_group=groups[dist.get_rank()])


def test_files_have_the_ranks_of_the_job(ranks, tmp_path):
    ranks(2).run(_train_in_groups, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["rank0.json", "rank1.json"]


@pytest.mark.parametrize("ending", [pytest.param("", marks=pytest.mark.full_only), "break"])
def test_a_script_that_ends(tmp_path, ending):
    """The groups are destroyed by then, or Python ends after an error."""
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


def _train_without_a_place_for_the_file(folder: str) -> list[str]:
    """A folder has the name of the file. Returns what is logged."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ddpx.timeline")
    logger.addHandler(handler)
    (Path(folder) / f"rank{dist.get_rank()}.json").mkdir(parents=True)
    train_unaware(folder)
    logger.removeHandler(handler)
    return texts


def test_a_file_that_cannot_be_written_ends_no_training(ranks, tmp_path):
    logged = ranks(2).run(_train_without_a_place_for_the_file, str(tmp_path))
    for rank, (text,) in enumerate(logged):
        assert text.startswith(f"[ddpx] the timeline {tmp_path}/rank{rank}.json was not written: ")
    assert sorted(os.listdir(tmp_path)) == ["rank0.json", "rank1.json"], "no unfinished file"


def _bad_environment() -> str:
    with pytest.raises(ValueError) as error:
        train_unaware("anywhere", "many")
    return str(error.value)


def test_bad_environment(ranks):
    for text in ranks(2).run(_bad_environment):
        assert "DDPX_TIMELINE_STEPS='many' is not a positive number" in text


def _one_rank_records(folder: str) -> str:
    if dist.get_rank() == 1:
        os.environ["DDPX_TIMELINE"] = folder
    try:
        with pytest.raises(RuntimeError) as error:
            small_model()
    finally:
        os.environ.pop("DDPX_TIMELINE", None)
    return str(error.value)


def test_every_rank_has_to_record(ranks):
    for text in ranks(2).run(_one_rank_records, "here"):
        assert "environment variable DDPX_TIMELINE: not set on rank 0; here on rank 1" in text


def _one_rank_records_unchecked(folder: str) -> None:
    if dist.get_rank() == 1:
        train_unaware(folder, init_sync=False)
        return
    model = small_model(init_sync=False)
    for _ in range(4):
        train_step(model)


@pytest.mark.timeout(60)
def test_unchecked_a_rank_waits_for_none(ranks, tmp_path):
    ranks(2).run(_one_rank_records_unchecked, str(tmp_path), timeout=40)
    assert os.listdir(tmp_path) == ["rank1.json"]
    assert [set(step.ranks) for step in Timeline.load(tmp_path).steps] == [{1}] * 4


def test_unchecked_ranks_belong_together(ranks, tmp_path):
    ranks(2).run(train_unaware, str(tmp_path), init_sync=False)
    timeline = Timeline.load(tmp_path)
    assert timeline.recording.clocks[1].error_ns == 0
    assert [set(step.ranks) for step in timeline.steps] == [{0, 1}] * 4
    for step in timeline.steps:
        check_order(step)


def _copy_on_one_rank(folder: str) -> None:
    os.environ["DDPX_TIMELINE"] = folder
    try:
        model = small_model()
        if dist.get_rank() == 0:
            copied = copy.deepcopy(model)
            del copied
            gc.collect()
        for _ in range(4):
            train_step(model)
        del model
        gc.collect()
    finally:
        del os.environ["DDPX_TIMELINE"]


@pytest.mark.timeout(60)
def test_a_copy_on_one_rank_waits_for_none(ranks, tmp_path):
    ranks(2).run(_copy_on_one_rank, str(tmp_path), timeout=40)
    assert sorted(os.listdir(tmp_path)) == ["model1-rank0.json", "rank0.json", "rank1.json"]
    assert [set(step.ranks) for step in Timeline.load(tmp_path).steps] == [{0, 1}] * 4


def _unwritable_folder() -> str:
    with pytest.raises(ValueError) as error:
        train_unaware("/dev/null/timeline", None)
    return str(error.value)


def test_folder_is_checked_before_training(ranks):
    for text in ranks(2).run(_unwritable_folder):
        assert text == (
            "cannot write into the folder '/dev/null/timeline': Not a directory. Choose another "
            "folder."
        )
