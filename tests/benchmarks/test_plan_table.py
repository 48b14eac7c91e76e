"""The table of bucket plans: its rows from measured times."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plan_table


def test_cells_are_ratios_to_the_default_plan_in_the_same_round():
    times = {
        "default": [0.100, 0.200, 0.100],  # a busy round counts for all plans
        "default again": [0.101, 0.198, 0.100],
        "best of the grid": [0.080, 0.160, 0.080],
        "auto": [0.090, 0.180, 0.090],
    }
    plans = {"default": 2, "default again": 2, "best of the grid": 5, "auto": 4}
    event = {"times": times, "plans": plans, "grid": "5 MiB, first 1"}
    row = plan_table.ROWS[0]
    cells = plan_table.cells(row, event)
    place, model, default, grid, grid_ratio, auto, noise, steps, _ = cells
    assert (place, model) == ("shm", row.model)
    assert default == "100.0 ms (2)" and grid == "5 MiB, first 1 (5)"
    assert grid_ratio == "0.800" and auto == "0.900 (4)" and steps == "12"
    assert noise.startswith("± 0.0") and float(noise[2:]) > 0
    results = {str(row): plan_table.Result(cells, "2 cores"), "a row of former times": None}
    text = plan_table.text(results)
    assert "0.800" in text and "2 ranks on 2 cores." in text and "former" not in text
    results[str(plan_table.ROWS[1])] = plan_table.Result(
        [*cells[:1], "other", *cells[2:]], "4 cores"
    )
    text = plan_table.text(results)
    assert "2 ranks on 2 cores; 4 cores." in text
    assert [line.split("|")[-2].strip() for line in text.splitlines()[-2:]] == ["1", "2"]


def test_rows_are_kept(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- plan table: begin -->\n<!-- plan table: end -->\n")
    monkeypatch.setattr(plan_table, "_PAGE", page)
    monkeypatch.setattr(plan_table, "_RESULTS", tmp_path / "results.json")
    assert plan_table._read() == {}
    first, second = (str(row) for row in plan_table.ROWS[:2])
    results = {row: plan_table.Result([f"cell of {row}"] * 9, "2 cores") for row in (first, second)}
    plan_table._write(results)
    assert plan_table._read() == results
    assert f"cell of {first}" in page.read_text() and f"cell of {second}" in page.read_text()


def test_the_table_has_six_rows_and_a_place_on_its_page():
    assert len({str(row) for row in plan_table.ROWS}) == 6
    page = Path(__file__).resolve().parents[2] / "docs" / "bucket_plans.md"
    assert page.read_text().count("plan table: ") == 2
