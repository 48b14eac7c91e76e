"""``ddpx timeline show A --against B``: the verdict as a sentence and as an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddpx import _C
from ddpx.cli.group import run_command_line
from ddpx.timeline.analyze.assembly import assemble
from ddpx.timeline.export import trace_file
from ddpx.timeline.record.clocks import Reading
from ddpx.timeline.record.rank_data import RankData, RawPlan

MS = 1_000_000
QUIET = [100.0, 101.0, 99.0, 100.0, 100.5, 99.5, 100.0]
NOISY = [100.0, 160.0, 60.0, 100.0, 140.0, 55.0, 145.0]


def _write(path: Path, steps_ms: Sequence[float]) -> None:
    """Writes a recording of one rank with steps of these lengths."""
    kind = _C.EventKind
    rows = []
    begin = 1000 * MS
    for step, ms in enumerate(steps_ms):
        end = begin + round(ms * MS)
        rows.append((begin, step, kind.FORWARD_BEGIN, 0))
        rows.append((begin + MS, step, kind.FORWARD_END, 0))
        rows.append((begin + 2 * MS, step, kind.STEP_BEGIN, 0))
        rows.append((end - MS, step, kind.BACKWARD_END, 0))
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
    )
    trace_file.write(path, assemble([data]), [data])


def _times(factor: float, steps_ms: Sequence[float]) -> list[float]:
    return [factor * ms for ms in steps_ms]


@pytest.mark.parametrize(
    ("new", "base", "code", "verdict"),
    [
        (QUIET, QUIET, 0, "Steps take as long as in"),
        (_times(1.1, QUIET), QUIET, 1, "are slower, 1.10 times as long"),
        (_times(0.9, QUIET), QUIET, 0, "are faster, 0.90 times as long"),
        (_times(1.02, QUIET), QUIET, 0, "Steps take as long as in"),
        (_times(1.1, NOISY), NOISY, 0, "Steps take as long as in"),
        (_times(1.1, NOISY), QUIET, 0, "Steps take as long as in"),
        (_times(3, NOISY), NOISY, 1, "are slower, 3.00 times as long"),
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


def test_a_model_of_a_folder(tmp_path, capsys):
    _write(tmp_path / "rank0.json", QUIET)
    _write(tmp_path / "model1-rank0.json", _times(2, QUIET))
    assert run_command_line(["timeline", "show", str(tmp_path), "--model", "1"]) == 0
    assert "200.00" in capsys.readouterr().out
    assert run_command_line(["timeline", "show", str(tmp_path), "--model", "2"]) == 2
    assert "has no recording of model 2. Recorded models: 0, 1." in capsys.readouterr().err
