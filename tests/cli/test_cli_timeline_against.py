"""``ddpx timeline show A --against B``: the verdict as a sentence and as an exit code.

test_verdict.py covers the statistics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddpx import _C
from ddpx.cli.group import run_command_line
from ddpx.cli.timeline.launches import load, median_first, write
from ddpx.timeline import Timeline
from ddpx.timeline.analyze.assembly import assemble
from ddpx.timeline.export import trace_file
from ddpx.timeline.record.clocks import Reading
from ddpx.timeline.record.rank_data import RankData, RawPlan

MS = 1_000_000
QUIET = 3 * [100.0, 101.0, 99.0, 100.0, 100.5, 99.5, 100.0]
NOISY = 3 * [100.0, 160.0, 60.0, 100.0, 140.0, 55.0, 145.0]


def _write(
    path: Path, steps_ms: Sequence[float], idle_ms: float = 0, slower: Sequence[float] = ()
) -> None:
    """Writes a recording of one rank with steps of these lengths.

    Args:
        path: The file.
        steps_ms: The time of each step.
        idle_ms: Between forward and backward the rank does something else for this time.
        slower: The times of a second rank.
    """
    sides = [steps_ms, slower] if slower else [steps_ms]
    ranks = [_data(rank, len(sides), times, idle_ms) for rank, times in enumerate(sides)]
    trace_file.write(path, assemble(ranks), ranks)


def _data(rank: int, world_size: int, steps_ms: Sequence[float], idle_ms: float) -> RankData:
    kind = _C.EventKind
    rows = []
    begin = 1000 * MS
    for step, ms in enumerate(steps_ms):
        end = begin + round(ms * MS)
        rows.append((begin, step, kind.FORWARD_BEGIN, 0))
        rows.append((begin + MS, step, kind.FORWARD_END, 0))
        rows.append((begin + 2 * MS + round(idle_ms * MS), step, kind.STEP_BEGIN, 0))
        for before_end_ms, event in (
            (6, kind.BUCKET_READY),
            (5, kind.LAUNCHED),
            (4, kind.BACKWARD_END),
            (4, kind.WAIT_BEGIN),
            (2, kind.COMPLETED),
            (2, kind.WAIT_END),
            (1, kind.WRITTEN_BACK),
            (0, kind.STEP_END),
        ):
            rows.append((end - before_end_ms * MS, step, event, 0))
        begin = end + 5 * MS
    return RankData(
        name="made by hand",
        rank=rank,
        world_size=world_size,
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
        (_times(2, QUIET[:2]), QUIET, 2, "Too few steps for a verdict"),
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
    assert round(median_first(three[:2])[0].step_ms) == 100  # of two, the faster launch
    assert write(three, "text", folder)[:3] == ["trace.json", "trace-2.json", "trace-3.json"]
    assert round(load(folder, 0)[0].step_ms) == 200
    write(three[:1], "text", folder)
    assert sorted(path.name for path in folder.glob("*.json")) == ["trace.json"]


def test_a_recording_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("no space left")

    folder = Path(_write_launches(tmp_path / "out", QUIET, (1.0, 3.0)))
    _write(tmp_path / "new.json", QUIET)
    monkeypatch.setattr(Timeline, "export_chrome_trace", fail)
    with pytest.raises(OSError, match="no space left"):
        write(load(tmp_path / "new.json", 0), "text", folder)
    assert [round(launch.step_ms) for launch in load(folder, 0)] == [100, 300]


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("rank0.json", "{}", "has the rank*.json files of another recording"),
        (
            "trace.json",
            '{"traceEvents": []}',
            "is no file of a recording of ddpx, and would be replaced",
        ),
        ("trace.json", '["ddpx"]', "is no file of a recording"),
        ("trace.json", "no JSON", "is no file of a recording"),
        ("trace.json", 5000 * "[", "is no file of a recording"),
        ("trace-7.json", '{"traceEvents": []}', "is no file of a recording"),
        ("summary.txt", "of another tool", "is no file of a recording"),
    ],
)
def test_files_of_others_are_not_replaced(tmp_path, capsys, name, contents, said):
    (tmp_path / name).write_text(contents)
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('the script ran')\n")
    assert run_command_line(["timeline", str(script), "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / name).read_text() == contents


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
    words = ["timeline", "show", str(tmp_path), "--model", "1", "--against", str(tmp_path)]
    assert run_command_line(words) == 0
    assert "200.00 -> 200.00 ms on the slowest rank" in capsys.readouterr().out
    assert run_command_line(["timeline", "show", str(tmp_path), "--model", "2"]) == 2
    assert "has no recording of model 2. Recorded models: 0, 1." in capsys.readouterr().err


def _change(path: Path, **values: object) -> None:
    contents = json.loads(path.read_text())
    contents["ddpx"]["ranks"][0].update(values)
    path.write_text(json.dumps(contents))


def test_a_recording_of_another_kind_is_told(tmp_path, capsys):
    """Buckets of another size show another model. A file of one rank has no slower rank."""
    names = ("one", "other", "two ranks", "of three")
    one, other, two_ranks, of_three = (tmp_path / f"{name}.json" for name in names)
    for path in (one, other, two_ranks, of_three):
        _write(path, QUIET)
        _change(path, world_size=3 if path is of_three else 2)
    _change(other, plans=[{"first_step": 0, "buckets": [[[0], 8]]}])
    contents = json.loads(two_ranks.read_text())
    ranks = contents["ddpx"]["ranks"]
    ranks.append({**ranks[0], "rank": 1})
    two_ranks.write_text(json.dumps(contents))
    for path, ending in (
        (one, ""),
        (other, " The buckets of the recordings differ."),
        (two_ranks, " The numbers of recorded ranks differ: 2 and 1."),
        (of_three, " The numbers of ranks differ: 3 and 2."),
    ):
        assert run_command_line(["timeline", "show", str(one), "--against", str(path)]) == 0
        assert capsys.readouterr().out.endswith(f"--launches 3`.{ending}\n")


def test_tables_have_the_base_first_and_ratios(tmp_path, capsys):
    new, base = (tmp_path / f"{name}.json" for name in ("new", "base"))
    _write(base, QUIET)
    _write(new, _times(2, QUIET))
    _change(new, plans=[{"first_step": 0, "buckets": [[[0], 3 << 20]]}])
    assert run_command_line(["timeline", "show", str(new), "--against", str(base)]) == 1
    rank, bucket = (
        re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines() if line[:1] == "0"
    )
    assert rank[:2] == ["0", "100.00 -> 200.00 (2.00)"]
    assert rank[3:] == ["3.00 -> 3.00 (1.00)", "1.00 -> 1.00 (1.00)", "2.00 -> 2.00 (1.00)"]
    assert bucket == [
        *("0", "0.00 -> 3.00", "1 -> 1", "92.00 -> 192.00 (2.09)"),  # the bucket is ready
        *("3.00 -> 3.00 (1.00)", "96.00 -> 196.00 (2.04)", "2.00 -> 2.00 (1.00)"),
    ]


def test_the_slowest_rank_counts(tmp_path, capsys):
    """Steps count from the first forward of the rank. Also the main part is that of this rank."""
    new, base = tmp_path / "new.json", tmp_path / "base.json"
    _write(base, QUIET, slower=_times(2, QUIET))
    _write(new, QUIET, slower=_times(5, QUIET))
    assert run_command_line(["timeline", "show", str(new), "--against", str(base)]) == 1
    said = capsys.readouterr().out
    assert "200.00 -> 500.00 ms on the slowest rank" in said
    assert "Most of the difference is compute, +300.00 ms." in said


def test_steps_before_a_rebuild_do_not_count(tmp_path):
    path = tmp_path / "trace.json"
    _write(path, [900.0, 100.0, 100.0])
    buckets = [{"first_step": step, "buckets": [[[0], 4 + 4 * step]]} for step in range(2)]
    _change(path, plans=buckets)
    (launch,) = load(path, 0)
    assert launch.steps_ms == [100.0, 100.0]


def test_launches_are_in_the_order_of_their_numbers(tmp_path):
    folder = _write_launches(tmp_path / "out", QUIET, range(1, 12))
    assert [round(launch.step_ms / 100) for launch in load(Path(folder), 0)] == [*range(1, 12)]


def test_the_summary_has_the_advice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Timeline, "advice", lambda _: ["Use one bucket.", "Wait."])
    _write(tmp_path / "trace.json", QUIET)
    assert run_command_line(["timeline", "show", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("\nAdvice:\n- Use one bucket.\n- Wait.\n")
