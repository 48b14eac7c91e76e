"""The states of ranks, gradients and buckets in the page, at known times."""

from __future__ import annotations

import json

import torch
from browser_page import END, HOME, RIGHT, Page, open_page
from synthetic import accumulated, one_rank_alone
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool

WRITTEN = "written back"


STATES = [
    # At a time in ms, for ranks 0 and 1: phase, number of arrived gradients, states of buckets.
    (0, ("idle", 0, ["empty"] * 3), ("idle", 0, ["empty"] * 3)),
    (15.9, ("idle", 0, ["empty"] * 3), ("idle", 0, ["empty"] * 3)),
    (16, ("collecting", 1, ["filling", "empty", "empty"]), ("idle", 0, ["empty"] * 3)),
    (
        24,
        ("collecting", 3, ["in flight", "held up", "empty"]),
        ("collecting", 2, ["in flight", "empty", "empty"]),
    ),
    (
        33,
        ("finalizing", 5, [WRITTEN, "in flight", "held up"]),
        ("collecting", 3, ["averaged", "in flight", "empty"]),
    ),
    (
        40.5,
        ("finalizing", 5, [WRITTEN, WRITTEN, "averaged"]),
        ("finalizing", 5, [WRITTEN, WRITTEN, "in flight"]),
    ),
    (43, ("idle", 5, [WRITTEN] * 3), ("idle", 5, [WRITTEN] * 3)),
]


def test_states_at_known_times(page):
    for ms, *expected in [*STATES, *reversed(STATES)]:  # forward and backward in time
        page.slide_to(ms)
        assert page.ms == ms
        assert [page.rank(0), page.rank(1)] == expected


def test_another_step(page):
    page.choose_step("step 13 (40.0 ms)")
    assert page.ms == 24
    page.slide_to(2)
    assert (page.rank(0)[0], page.rank(1)[0]) == ("rebuilding", "rebuilding")
    page.slide_to(3)
    assert (page.rank(0)[0], page.rank(1)[0]) == ("rebuilding", "idle")
    page.slide_to(18)  # bucket 1 is full before bucket 0
    assert page.rank(0) == ("collecting", 1, ["empty", "queued", "empty"])
    assert page.rank(1) == ("collecting", 3, ["held up", "held up", "empty"])
    page.press("p")
    assert page.find("#step option:checked").text == "step 12 (43.0 ms)"
    page.press("n")
    assert page.find("#step option:checked").text == "step 13 (40.0 ms)"
    assert not page.find("#next-step").is_enabled()


def test_a_backward_in_no_sync(browser, tmp_path):
    page = open_page(browser, accumulated(), tmp_path / "page.html")
    page.press(HOME, RIGHT, RIGHT, RIGHT)
    assert page.ms == 26
    assert page.now == ["26.000 ms, rank 0: backward in no_sync() ends"]
    page.slide_to(20)
    assert (
        browser.execute_script(
            "return activityAt(decodeStep(JSON.parse(document.querySelector("
            "'script[type=\"application/json\"]').textContent), 0).ranks.get(0), 20000)"
        )
        == "backward in no_sync()"
    )
    page.check_log()


def test_one_rank_alone(browser, tmp_path):
    page = open_page(browser, one_rank_alone(), tmp_path / "page.html")
    page.press(END)
    assert page.rank(0) == ("idle", 5, ["stays"] * 3)
    assert "No rank waited" in page.find("#figures").text
    page.check_log()


def _record(folder: str) -> None:
    torch.manual_seed(0)
    model = ReducerDDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=0.0001)
    with ddpx.record(model) as timeline:
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
    if torch.distributed.get_rank() == 0:
        timeline.export_chrome_trace(f"{folder}/trace.json")
        timeline.save_html(f"{folder}/page.html")


def test_of_a_real_recording(browser, tmp_path):
    with RankPool(2) as pool:
        pool.run(_record, str(tmp_path))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "i" for event in events) == 2 * 4 * 4
    page = Page(browser, tmp_path / "page.html")
    page.press(END)
    for rank in range(2):
        phase, arrived, states = page.rank(rank)
        assert (phase, arrived) == ("idle", 4)
        assert set(states) == {WRITTEN}
    page.check_log()
