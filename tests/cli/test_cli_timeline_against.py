"""``ddpx timeline show A --against B``: the verdict as a sentence and as an exit code.

test_verdict.py covers the statistics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddpx import _C
from ddpx.cli.group import run_command_line
from ddpx.cli.timeline.launches import load, median_first, write
from ddpx.timeline.analyze.assembly import assemble
from ddpx.timeline.export import trace_file
from ddpx.timeline.record.clocks import Reading
from ddpx.timeline.record.rank_data import RankData, RawPlan

MS = 1_000_000
QUIET = 3 * [100.0, 101.0, 99.0, 100.0, 100.5, 99.5, 100.0]
NOISY = 3 * [100.0, 160.0, 60.0, 100.0, 140.0, 55.0, 145.0]


def _write(path: Path, steps_ms: Sequence[float], idle_ms: float = 0) -> None:
    """Writes a recording of one rank with steps of these lengths.

    Between forward and backward the rank does something else for ``idle_ms``.
    """
    kind = _C.EventKind
    rows = []
    begin = 1000 * MS
    for step, ms in enumerate(steps_ms):
        end = begin + round(ms * MS)
        rows.append((begin, step, kind.FORWARD_BEGIN, 0))
        rows.append((begin + MS, step, kind.FORWARD_END, 0))
        rows.append((begin + 2 * MS + round(idle_ms * MS), step, kind.STEP_BEGIN, 0))
        for event in (kind.BUCKET_READY, kind.LAUNCHED, kind.COMPLETED):
            rows.append((end - 2 * MS, step, event, 0))
        rows.append((end - MS, step, kind.BACKWARD_END, 0))
        for event in (kind.WAIT_BEGIN, kind.WAIT_END, kind.WRITTEN_BACK):
            rows.append((end - MS, step, event, 0))
        rows.append((end, step, kind.STEP_END, 0))
        begin = end + 5 * MS
    data = RankData(
        name="made by hand",
        rank=0,
        world_size=1,
        host="host",
        backend="gloo",
        device="cpu",
        param_names=("weight",),
        param_bytes=(4,),
        readings=(Reading(0, 0.0, 0.0),),
        device_error_ns=0,
        num_lost=0,
        plans=(RawPlan(0, (((0,), 4),)),),
        events=torch.tensor([[int(value) for value in row] for row in rows]).view(-1, 4),
        param_kinds=("float32 on cpu",),
        clock="",
        asked_steps=None,
        cores=(0,),
        num_threads=1,
        core_wait=None,
        plan_report=None,
        has_hook=False,
    )
    trace_file.write(path, assemble([data]), [data])


def _times(factor: float, steps_ms: Sequence[float]) -> list[float]:
    return [factor * ms for ms in steps_ms]


@pytest.mark.parametrize(
    ("new", "base", "code", "verdict"),
    [
        (QUIET, QUIET, 0, "No difference seen"),
        (_times(1.1, QUIET), QUIET, 0, "No difference seen"),  # launches may differ by as much
        (_times(2, QUIET), QUIET, 1, "are slower, 2.00 times as long"),
        (_times(0.5, QUIET), QUIET, 0, "are faster, 0.50 times as long"),
        (_times(2, NOISY), NOISY, 0, "No difference seen"),
        (_times(1.5, NOISY), QUIET, 0, "No difference seen"),
        (_times(2, QUIET[:2]), QUIET, 0, "Too few steps for a verdict"),
        ([], QUIET, 2, "no complete step was recorded"),
    ],
)
def test_exit_code(tmp_path, capsys, new, base, code, verdict):
    _write(tmp_path / "new.json", new)
    _write(tmp_path / "base.json", base)
    words = ["timeline", "show", str(tmp_path / "new.json"), "--against"]
    assert run_command_line([*words, str(tmp_path / "base.json")]) == code
    said = capsys.readouterr()
    assert verdict in said.out + said.err
    if "blocks of steps" in said.out:
        assert "Record both with `ddpx timeline --launches 3`." in said.out


def _write_launches(
    folder: Path, times: Sequence[float], factors: Sequence[float], idle_ms: float = 0
) -> str:
    folder.mkdir()
    for number, factor in enumerate(factors):
        _write(folder / trace_file.launch_name(number), _times(factor, times), idle_ms)
    return str(folder)


@pytest.mark.parametrize(
    ("factors", "code", "verdict"),
    [
        (
            (1.1, 1.11, 1.09),
            1,
            "slower, 1.10 times as long: 100.00 -> 110.00 ms on the slowest rank",
        ),
        ((1.01, 1.02, 1.0), 0, "No difference seen: 100.00 -> 101.00 ms on the slowest rank"),
        ((0.9, 1.11, 1.3), 0, "No difference seen"),
    ],
)
def test_launches_show_smaller_differences(tmp_path, capsys, factors, code, verdict):
    base = _write_launches(tmp_path / "before", QUIET, (1.0, 1.01, 0.99))
    new = _write_launches(tmp_path / "after", QUIET, factors)
    assert run_command_line(["timeline", "show", new, "--against", base]) == code
    said = capsys.readouterr().out
    assert verdict in said
    assert "(99 %, 3 and 3 launches)." in said and "--launches" not in said


def test_main_part_is_named_only_if_the_parts_add_up(tmp_path, capsys):
    def compare(idle_ms: float) -> str:
        new = _write_launches(tmp_path / f"{idle_ms}", QUIET, (2.0, 2.02, 1.98), idle_ms)
        assert run_command_line(["timeline", "show", new, "--against", base]) == 1
        return capsys.readouterr().out

    base = _write_launches(tmp_path / "before", QUIET, (1.0, 1.01, 0.99))
    assert compare(0).endswith("Most of the difference is compute, +100.00 ms.\n")
    assert "Most of the difference" not in compare(90)  # of 100 ms more


def test_another_recording_replaces_all_launches(tmp_path):
    folder = Path(_write_launches(tmp_path / "out", QUIET, (1.0, 3.0, 2.0)))
    three = median_first(load(folder, 0))
    assert [round(launch.step_ms) for launch in three] == [200, 100, 300]
    assert write(three, "text", folder)[:3] == ["trace.json", "trace-2.json", "trace-3.json"]
    assert round(load(folder, 0)[0].step_ms) == 200
    write(three[:1], "text", folder)
    assert sorted(path.name for path in folder.glob("*.json")) == ["trace.json"]


def test_folder_of_two_recordings(tmp_path, capsys):
    folder = _write_launches(tmp_path / "out", QUIET, (1.0,))
    _write(tmp_path / "out" / "rank0.json", QUIET)
    assert run_command_line(["timeline", "show", folder]) == 2
    assert "a trace.json and rank*.json files, which are two recordings" in capsys.readouterr().err


def test_a_model_of_a_folder(tmp_path, capsys):
    _write(tmp_path / "rank0.json", QUIET)
    _write(tmp_path / "model1-rank0.json", _times(2, QUIET))
    assert run_command_line(["timeline", "show", str(tmp_path), "--model", "1"]) == 0
    assert "200.00" in capsys.readouterr().out
    assert run_command_line(["timeline", "show", str(tmp_path), "--model", "2"]) == 2
    assert "has no recording of model 2. Recorded models: 0, 1." in capsys.readouterr().err


def _change(path: Path, **values: object) -> None:
    contents = json.loads(path.read_text())
    contents["ddpx"]["ranks"][0].update(values)
    path.write_text(json.dumps(contents))


def test_a_recording_of_another_kind_is_told(tmp_path, capsys):
    """Buckets of another size show another model. A file of one rank has no slower rank."""
    one, other, two_ranks = (tmp_path / f"{name}.json" for name in ("one", "other", "two ranks"))
    for path in (one, other, two_ranks):
        _write(path, QUIET)
        _change(path, world_size=2)
    _change(other, plans=[{"first_step": 0, "buckets": [[[0], 8]]}])
    contents = json.loads(two_ranks.read_text())
    ranks = contents["ddpx"]["ranks"]
    ranks.append({**ranks[0], "rank": 1})
    two_ranks.write_text(json.dumps(contents))
    for path, ending in (
        (one, ""),
        (other, " The buckets of the recordings differ."),
        (two_ranks, " The numbers of recorded ranks differ: 2 and 1."),
    ):
        assert run_command_line(["timeline", "show", str(one), "--against", str(path)]) == 0
        assert capsys.readouterr().out.endswith(f"--launches 3`.{ending}\n")
