"""The bars of the page, also of many ranks, buckets and gradients."""

from __future__ import annotations

import pytest
from browser_page import Page, open_page
from contrasts import contrast
from synthetic import late_rank, make_recording, many_buckets, many_ranks, with_write_back


def _bars(page: Page, name: str) -> list[tuple[float, float]]:
    """The left edge and the width of all bars of a color, in pixels."""
    script = """
        const found = [];
        const original = CanvasRenderingContext2D.prototype.fillRect;
        CanvasRenderingContext2D.prototype.fillRect = function (x, y, width, height) {
          found.push([this.fillStyle, x, width]);
        };
        drawGantt();
        CanvasRenderingContext2D.prototype.fillRect = original;
        drawGantt();
        return found.filter(([color]) => color === gantt.color(arguments[0]).trim())
          .map(([, x, width]) => [x, width]);
    """
    return [(x, width) for x, width in page.browser.execute_script(script, name)]


def test_thin_bars_and_the_gap_before_write_back(browser, tmp_path):
    page = open_page(browser, with_write_back(ms=0.01), tmp_path / "page.html")
    written, right = (
        _bars(page, "written"),
        browser.execute_script("return gantt.left + gantt.width"),
    )
    assert [width for _, width in written] == [2] * 6
    assert all(x + width <= right for x, width in written)
    averaged_ms = [
        round(width / browser.execute_script("return gantt.x(1000) - gantt.x(0)"))
        for _, width in _bars(page, "averaged")
    ]
    assert averaged_ms == [6, 1, 12, 3]  # on rank 0 for buckets 0 and 2, on rank 1 for 0 and 1
    page.check_log()


def test_what_a_bar_is(page):
    from selenium.webdriver import ActionChains

    bars = page.find("#bars")
    below_top = 24 + 33 + 5  # heights of the axis, of forward and backward, and of gradients
    ActionChains(page.browser).move_to_element_with_offset(
        bars, 0, round(below_top - bars.rect["height"] / 2)
    ).perform()
    assert page.find("#tip").text == (
        "rank 0, bucket 0, 3.0 MiB, 2 params: "
        "full 18.000, launched 18.000, averaged 26.000, written back 33.000 ms"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hatching_contrasts_with_its_bar(browser, tmp_path, scheme):
    """WCAG 2 asks for a contrast of 3 between graphical objects."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page = open_page(browser, make_recording(), tmp_path / "page.html")
    for bar in ("held-up", "moving"):
        colors = [
            page.browser.execute_script(f"return gantt.color('{n}').trim()")
            for n in (bar, f"on-{bar}")
        ]
        assert contrast(*colors) >= 3
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_many_ranks_and_buckets_are_folded(browser, tmp_path):
    from selenium.webdriver import ActionChains

    page = open_page(browser, late_rank(30, 16), tmp_path / "page.html")
    pressed = [button.text for button in page.find_all("#ranks [aria-pressed='true']")]
    assert pressed == ["rank 0", "rank 5"]
    assert len(page.find_all(".card")) == 2
    height = page.find("#bars").rect["height"]
    assert height < 24 + 2 * (33 + 13 + 20 * 15) + 14 * 20 + 1
    page.find("#ranks [data-rank='9']").click()
    assert len(page.find_all(".card")) == 3
    tips = browser.execute_script(
        "return gantt.rows.map((row) => row.text(30000)).filter((text) => text)"
    )
    assert sum(text.endswith(": backward") for text in tips) == 16
    assert sum("buckets 1 to 14" in text for text in tips) == 3
    bars = page.find("#bars")
    ActionChains(browser).move_to_element(bars).perform()
    page.check_log()


def test_hundreds_of_ranks(browser, tmp_path):
    page = open_page(browser, many_ranks(512), tmp_path / "page.html")
    assert page.find("#bars").rect["height"] < 800
    page.check_log()


def test_a_large_recording(browser, tmp_path):
    """A step with 16000 gradients appears and moves without a noticeable pause.

    The limit is much longer, since the machine may be busy.
    """
    page = open_page(
        browser,
        many_buckets(50, world_size=8, params_each=40, num_steps=50),
        tmp_path / "page.html",
    )
    for button in page.find_all("#ranks button[aria-pressed='false']"):
        button.click()
    assert len(page.find_all(".cells i")) == 16_000
    ms = browser.execute_script(
        """
        const begin = performance.now();
        showStep(7);
        for (let i = 0; i <= 20; i++) {
          moveTo(i / 20 * view.step.length);
          document.body.offsetHeight;
        }
        return performance.now() - begin;
        """
    )
    assert ms < 5_000
    assert page.find(".card[data-rank='7']").get_attribute("data-arrived") == "2000"
    page.check_log()
