"""The verdicts that the harness derives from outcomes.

`make peer-test` runs the peer tests themselves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from outcomes import Outcome
from verdicts import BAD, Line, excused_tests


@pytest.mark.parametrize(
    ("torch", "ddpx", "excused", "verdict"),
    [
        ("pass", "pass", False, "ok"),
        ("pass", "fail", False, "WORSE"),
        ("pass", "skip", False, "WORSE"),
        ("pass", "timeout", False, "WORSE"),
        ("pass", "crash", False, "WORSE"),
        ("pass", "fail", True, "excused"),
        ("pass", "pass", True, "STALE"),
        ("fail", "pass", False, "better"),
        ("fail", "fail", False, "neither"),
        ("skip", "skip", False, "neither"),
    ],
)
def test_verdict(torch: str, ddpx: str, excused: bool, verdict: str) -> None:
    line = Line("test_x", Outcome(torch, built=1), Outcome(ddpx, built=1), excused)
    assert line.verdict == verdict


def test_a_pass_without_a_wrapper_counts_for_nothing() -> None:
    assert Line("test_x", Outcome("pass"), Outcome("pass"), False).verdict == "no DDP"


def test_a_failure_counts_without_a_wrapper() -> None:
    assert Line("test_x", Outcome("pass"), Outcome("fail"), False).verdict == "WORSE"
    assert Line("test_x", Outcome("pass"), Outcome("fail"), True).verdict == "excused"
    assert Line("test_x", Outcome("pass"), Outcome("pass"), True).verdict == "STALE"


def test_a_pass_with_only_torchs_wrapper_is_not_a_pass() -> None:
    line = Line("test_x", Outcome("pass", built=1), Outcome("pass", built=0), False)
    assert line.verdict in BAD


def test_one_class_alone_has_no_verdict() -> None:
    assert Line("test_x", None, Outcome("fail"), False).verdict == ""


def test_excuses_are_first_cells_of_table_rows(tmp_path: Path) -> None:
    file = tmp_path / "divergences.md"
    assert excused_tests(file) == {}
    file.write_text(
        "| test | why |\n| --- | --- |\n| `test_one` | see `test_two` |\n"
        "Text about `test_three`.\n| `not_a_test` | x |\n"
    )
    assert excused_tests(file) == {"test_one": "see `test_two`"}
