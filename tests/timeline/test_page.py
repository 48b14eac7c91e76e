"""What the page shows of a recording, and that all of it fits."""

from __future__ import annotations

import re

import pytest
from browser_page import Page, open_page
from synthetic import PARAM_NAMES, make_recording, one_rank_alone

from ddpx.timeline.analyze.diagnoses import advise


def test_opens_in_mid_backward_of_the_median_step(browser, tmp_path):
    page = open_page(browser, make_recording(), tmp_path / "page.html")
    assert page.find("#step option:checked").text == "step 13 (40.0 ms)"
    assert page.ms == 24  # backward of rank 0 is from 14 to 34 ms
    assert page.find("#why").text == (
        "Of 2 recorded steps, this step has the median duration. Longest wait: rank 1 waits 7.0 ms "
        "for bucket 2, mostly for its transfer of 1.0 MiB (6.0 ms)."
    )
    page.press("p")
    assert page.find("#why").text.startswith("Longest wait: rank 0 waits 3.0 ms for bucket 1")
    page.check_log()


def test_advice(page, browser, tmp_path):
    shown = [item.text for item in page.find_all("#advice li")]
    assert shown == advise(make_recording())
    assert advise(one_rank_alone()) == []
    nothing = open_page(browser, one_rank_alone(), tmp_path / "nothing.html")
    assert nothing.find("#advice").text == "Nothing to improve was found."


def test_strip_of_all_steps(page):
    bars = page.find_all("#strip button")
    assert [bar.accessible_name for bar in bars] == [
        "step 12: 43.0 ms, 6.0 ms exposed",
        "step 13: 40.0 ms, 7.0 ms exposed; the median",
    ]
    heights = [bar.rect["height"] for bar in bars]
    assert heights[1] / heights[0] == pytest.approx(40 / 43, abs=0.02)
    assert [bar.get_attribute("aria-current") for bar in bars] == ["step", None]
    bars[1].click()
    assert page.find("#step option:checked").text == "step 13 (40.0 ms)"
    assert [bar.get_attribute("aria-current") for bar in bars] == [None, "step"]


def _legend(page: Page) -> list[str]:
    return [item.text for item in page.find_all("#legend li")]


def test_legend_has_what_is_drawn(page):
    assert "full, queued" not in _legend(page)
    page.press("n")
    assert "full, queued" in _legend(page)
    assert "averaged, not yet written back" in _legend(page)


def test_figures(page):
    ranks, holdups = (
        [row.text for row in table.find_elements("css selector", "tbody tr")]
        for table in page.find_all("#figures table")
    )
    assert ranks == ["0 0.00 43.00 30.00 22.00 16.00 6.00", "1 2.00 40.00 35.00 16.00 15.00 1.00"]
    no_gradient = "none: the rank began its backward late, its parameters were unused, or backward "
    late = [f"1 5.00 1 {no_gradient}ended", f"0 4.00 1 {no_gradient}ended"]
    assert holdups == ["2 6.00 1 0.weight", *late]


def test_what_a_cell_is(page):
    cells = page.find_all(".card[data-rank='1'] .cells i")
    tip = page.point_at(cells[2])
    assert tip == "1.weight: 2.0 MiB, alone in bucket 1; gradient at 29.000 ms"
    tip = page.point_at(cells[1])
    assert tip == "2.weight: 2.0 MiB, one of 2 in bucket 0 of 3.0 MiB; gradient at 22.000 ms"


MARKUP = "</script><b>x"


def test_names_are_text(browser, tmp_path):
    names = (MARKUP, *PARAM_NAMES[1:])
    page = open_page(browser, make_recording(names), tmp_path / "page.html")
    page.choose_step("step 12 (43.0 ms)")
    page.slide_to(30)
    assert page.now[0] == f"30.000 ms, rank 0: gradient of {MARKUP} arrives"
    tip = page.point_at(page.find("[data-param='0']"))
    assert tip.startswith(f"{MARKUP}: ") and "one of 2 in bucket 2" in tip
    assert MARKUP in page.find("#figures").text
    assert "x" not in [bold.text for bold in page.find_all("b")]
    page.check_log()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_everything_fits(browser, tmp_path, scheme, width):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page = open_page(browser, make_recording(), tmp_path / "page.html", width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    is_dark = max(int(part) for part in re.findall(r"\d+", back)[:3]) < 128
    assert is_dark == (scheme == "dark")
    for control in page.find_all("button, select, #time"):
        assert control.accessible_name
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page.check_log()
