"""The file of a page: its contents, and that it needs no other file."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from synthetic import PARAM_NAMES, accumulated, make_recording

from ddpx.timeline.export.page import page_data, write
from ddpx.timeline.model import Clock, Recording

MARKUP = "</script><b>x"


def test_what_is_stored():
    clocks = {0: Clock(0.0, 0.0), 1: Clock(0.0, 25_000.0)}
    data = json.loads(json.dumps(page_data(replace(make_recording(), clocks=clocks))))
    assert data["clockErrors"] == {"0": 0, "1": 25}  # µs
    assert data["params"] == list(PARAM_NAMES)
    assert data["hosts"] == {"0": "host", "1": "host"}
    assert data["shown"] == 1
    # The steps have one layout, and the ranks of a step one arrival order.
    assert len(data["layouts"]) == 1
    assert data["orders"] == [[4, 3, 2, 1, 0], [2, 4, 3, 1, 0]]
    first = data["steps"][0]
    assert (first["number"], first["length"], first["layout"]) == (12, 43_000, 0)
    assert first["holdups"] == [[1, None, 4_000], [1, None, 5_000], [1, 0, 6_000]]
    assert first["ranks"]["1"] == {
        "forwards": [[2_000, 14_000]],
        "localBackwards": [],
        "backward": [15_000, 38_000],
        "end": 42_000,
        "phases": [["collecting", 20_000, 38_000], ["finalizing", 38_000, 42_000]],
        "order": 0,
        "arrivals": [20_000, 2_000, 7_000, 5_000, 2_000],
        "buckets": [
            [20_000, 22_000, 22_000, 22_000, 26_000, 38_000, 38_000, 39_000, 22_000],
            [29_000, 29_000, 29_000, 29_000, 36_000, 39_000, 39_000, 40_000, 29_000],
            [34_000, 36_000, 36_000, 36_000, 41_000, 40_000, 41_000, 42_000, 36_000],
        ],
        "figures": {
            "notBegun": 2_000,
            "whole": 40_000,
            "compute": 35_000,
            "communication": 16_000,
            "overlapped": 15_000,
            "exposed": 1_000,
        },
    }


def test_a_backward_in_no_sync_is_stored():
    first = page_data(accumulated())["steps"][0]["ranks"][0]
    assert first["localBackwards"] == [[11_000, 26_000]]
    assert first["forwards"] == [[0, 10_000], [30_000, 40_000]]
    assert first["figures"]["compute"] == 10_000 + 15_000 + 10_000 + 20_000


def test_the_page_needs_nothing_else(tmp_path):
    path = tmp_path / "page.html"
    write(make_recording((MARKUP, "<!--", *PARAM_NAMES[2:])), path)
    page = path.read_text()
    assert re.findall(r'(?:src|href)="(.*?)"', page) == ["data:,"]
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("</script>") == len(re.findall("<script[ >]", page))
    assert "<!--" not in page


def test_without_a_step(tmp_path):
    with pytest.raises(RuntimeError, match="no complete step was recorded"):
        write(Recording((), (), {}, {}, "gloo", "cpu", 2, {}), tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
