"""The table of simulated jobs in docs/reliability.md, and the goals that its command checks."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARKS = ("<!-- simulation: begin -->", "<!-- simulation: end -->")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import simulation_table

    return simulation_table


@pytest.fixture
def text() -> str:
    page = (ROOT / "docs" / "reliability.md").read_text()
    return page.partition(MARKS[0])[2].partition(MARKS[1])[0].strip()


def test_figures_of_the_page_meet_the_goals(table, text: str) -> None:
    assert "| 4096 | 512 |" in text
    assert table.missed(text) == []


@pytest.mark.parametrize(
    ("cell", "figure"),
    [(-1, "false reports"), (-3, "host lost, s: 20.1"), (-4, "death, s: none")],
)
def test_a_missed_goal_is_found(table, text: str, cell: int, figure: str) -> None:
    row = next(line for line in text.splitlines() if line.startswith("| 4096 "))
    cells = row.strip("|").split("|")
    cells[cell] = f" {figure.partition(': ')[2] or 'yes'} "
    changed = text.replace(row, f"|{'|'.join(cells)}|")
    assert table.missed(changed) == [f"4096 ranks: {figure}"]


def test_a_report_in_ordinary_training_is_found(table, text: str) -> None:
    changed = text.replace(": no report.", ": a false report.")
    assert table.missed(changed) == ["a report in 100 hours"]
