"""The page in a browser, over recordings made by hand: what it shows, and when."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contrasts import contrast
from synthetic import (
    PARAM_NAMES,
    accumulated,
    late_rank,
    make_recording,
    many_buckets,
    many_ranks,
    one_rank_alone,
    with_write_back,
)
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx._C import Phase
from ddpx.testing import RankPool
from ddpx.timeline.analyze.advice import advise
from ddpx.timeline.export.page import write

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
MARKUP = "</script><b>x"
RIGHT, LEFT, HOME, END = "\ue014", "\ue012", "\ue011", "\ue010"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("no Chromium with chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


class Page:
    """The page as a reader sees it. Fails if the browser logs an error."""

    def __init__(self, browser: Any, path: Path, width: int = 1200) -> None:
        self.browser = browser
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(path.as_uri())
        self.check_log()

    def check_log(self) -> None:
        assert self.browser.get_log("browser") == []

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def choose_step(self, text: str) -> None:
        from selenium.webdriver.support.select import Select

        Select(self.find("#step")).select_by_visible_text(text)
        # otherwise the list would get the keys
        self.browser.execute_script("document.activeElement.blur()")

    def slide_to(self, ms: float) -> None:
        """Sets the value and fires the event, as a drag does."""
        self.browser.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))",
            self.find("#time"),
            round(ms * 1e3),
        )

    @property
    def ms(self) -> float:
        return float(self.find("#clock").text.split()[0])

    @property
    def now(self) -> list[str]:
        return [item.text for item in self.find_all("#now li")]

    def rank(self, rank: int) -> tuple[str, int, list[str]]:
        """The phase of a rank, its number of arrived gradients, and the states of its buckets."""
        card = self.find(f".card[data-rank='{rank}']")
        current = card.find_element("css selector", "[aria-current]").text
        phase = card.get_attribute("data-phase")
        assert current == Phase.__members__[phase.upper()].words  # as in errors
        buckets = card.find_elements("css selector", ".bucket")
        states = [bucket.get_attribute("data-state") for bucket in buckets]
        arrived = int(card.find_element("css selector", ".counts dd").text.split("/")[0])
        assert len(card.find_elements("css selector", ".cells i.here")) == arrived
        in_flight = card.find_elements("css selector", ".counts dd")[1].text
        flying = sum(state in ("held up", "in flight") for state in states)
        assert in_flight == f"{flying} / {len(states)}"
        return phase, arrived, states

    def point_at(self, element: Any) -> str:
        """The tooltip at that position."""
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).move_to_element(element).perform()
        return self.find("#tip").text


@pytest.fixture
def page(browser, tmp_path) -> Iterator[Page]:
    path = tmp_path / "page.html"
    write(make_recording(), path)
    page = Page(browser, path)
    page.choose_step("step 12 (43.0 ms)")
    page.press(HOME)
    yield page
    page.check_log()


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


def test_opens_in_mid_backward_of_the_median_step(browser, tmp_path):
    write(make_recording(), tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html")
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
    write(one_rank_alone(), tmp_path / "nothing.html")
    nothing = Page(browser, tmp_path / "nothing.html")
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
    write(with_write_back(ms=0.01), tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html")
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


def test_many_ranks_and_buckets_are_folded(browser, tmp_path):
    from selenium.webdriver import ActionChains

    write(late_rank(30, 16), tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html")
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
    write(many_ranks(512), tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html")
    assert page.find("#bars").rect["height"] < 800
    page.check_log()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hatching_contrasts_with_its_bar(browser, tmp_path, scheme):
    """WCAG 2 asks for a contrast of 3 between graphical objects."""
    write(make_recording(), tmp_path / "page.html")
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page = Page(browser, tmp_path / "page.html")
    for bar in ("held-up", "moving"):
        colors = [
            page.browser.execute_script(f"return gantt.color('{n}').trim()")
            for n in (bar, f"on-{bar}")
        ]
        assert contrast(*colors) >= 3
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


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


def test_keys_go_from_event_to_event(page):
    passed = []
    for _ in range(8):
        page.press(RIGHT)
        passed.append(page.ms)
    assert passed == [2, 10, 12, 14, 15, 16, 18, 20]
    page.press(LEFT)
    assert page.now == [
        "18.000 ms, rank 0: gradient of 2.weight arrives",
        "18.000 ms, rank 0: bucket 0 is full",
        "18.000 ms, rank 0: bucket 0 is launched",
    ]
    page.press(LEFT)
    assert page.now == [
        "16.000 ms, rank 0: gradient of 2.bias arrives",
        "16.000 ms, rank 0: phase backward",
    ]
    page.press(END)
    assert page.ms == 43
    page.press(RIGHT)
    assert page.ms == 43
    page.press(HOME)
    assert page.ms == 0
    page.press(LEFT)
    assert page.ms == 0


def test_buttons_do_what_keys_do(page):
    page.find("#next-event").click()
    assert page.ms == 2
    page.find("#previous-event").click()
    assert page.ms == 0
    page.find("#next-step").click()
    assert page.find("#step option:checked").text == "step 13 (40.0 ms)"


def test_the_slider_by_mouse(page):
    page.find("#time").click()  # the middle of the slider
    assert page.ms == pytest.approx(43 / 2, abs=0.5)


def test_a_click_into_the_bars(page):
    from selenium.webdriver import ActionChains

    page.slide_to(25)
    cursor, bars = page.find("#cursor").rect, page.find("#bars").rect
    page.press(HOME)
    assert page.ms == 0
    from_middle = cursor["x"] + cursor["width"] / 2 - (bars["x"] + bars["width"] / 2)
    ActionChains(page.browser).move_to_element_with_offset(
        page.find("#bars"), round(from_middle), 0
    ).click().perform()
    assert page.ms == pytest.approx(25, abs=0.1)


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


def test_play_and_pause(page):
    page.press(" ")
    assert page.find("#play").text == "Pause"
    deadline = time.monotonic() + 20
    while page.ms < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert page.ms >= 1
    page.press(" ")
    assert page.find("#play").text == "Play"
    stopped = page.ms
    assert stopped < 43
    time.sleep(0.2)
    assert page.ms == stopped


def test_ranks_are_chosen(page):
    def shown() -> list[str]:
        return [card.get_attribute("data-rank") for card in page.find_all(".card")]

    def pressed() -> list[str]:
        return [button.get_attribute("aria-pressed") for button in page.find_all("#ranks button")]

    assert shown() == ["0", "1"]
    page.find("#ranks [data-rank='0']").click()
    assert (shown(), pressed()) == (["1"], ["false", "true"])
    page.press(RIGHT)  # only events of rank 1
    page.press(RIGHT)
    assert page.ms == 14
    page.find("#ranks [data-rank='1']").click()  # the last visible rank cannot be hidden
    assert (shown(), pressed()) == (["1"], ["false", "true"])
    page.find("#ranks [data-rank='0']").click()
    assert shown() == ["0", "1"]


def test_figures(page):
    ranks, holdups = (
        [row.text for row in table.find_elements("css selector", "tbody tr")]
        for table in page.find_all("#figures table")
    )
    assert ranks == ["0 0.00 43.00 30.00 22.00 16.00 6.00", "1 2.00 40.00 35.00 16.00 15.00 1.00"]
    assert holdups == ["2 6.00 1 0.weight", "1 5.00 1 1.weight", "0 4.00 1 2.weight"]


def test_what_a_cell_is(page):
    cells = page.find_all(".card[data-rank='1'] .cells i")
    tip = page.point_at(cells[2])
    assert tip == "1.weight: 2.0 MiB, alone in bucket 1; gradient at 29.000 ms"
    tip = page.point_at(cells[1])
    assert tip == "2.weight: 2.0 MiB, one of 2 in bucket 0 of 3.0 MiB; gradient at 22.000 ms"


def test_names_are_text(browser, tmp_path):
    path = tmp_path / "page.html"
    write(make_recording((*PARAM_NAMES[:3], MARKUP, PARAM_NAMES[4])), path)
    page = Page(browser, path)
    page.choose_step("step 12 (43.0 ms)")
    page.slide_to(18)
    assert page.now[0] == f"18.000 ms, rank 0: gradient of {MARKUP} arrives"
    assert page.point_at(page.find("[data-param='3']")).startswith(
        f"{MARKUP}: 2.0 MiB, one of 2 in bucket 0"
    )
    assert MARKUP in page.find("#figures").text
    assert "x" not in [bold.text for bold in page.find_all("b")]
    page.check_log()


def test_a_backward_in_no_sync(browser, tmp_path):
    write(accumulated(), tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html")
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
    path = tmp_path / "page.html"
    write(one_rank_alone(), path)
    page = Page(browser, path)
    page.press(END)
    assert page.rank(0) == ("idle", 5, ["stays"] * 3)
    assert "No rank waited" in page.find("#figures").text
    page.check_log()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_everything_fits(browser, tmp_path, scheme, width):
    path = tmp_path / "page.html"
    write(make_recording(), path)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page = Page(browser, path, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    is_dark = max(int(part) for part in re.findall(r"\d+", back)[:3]) < 128
    assert is_dark == (scheme == "dark")
    for control in page.find_all("button, select, #time"):
        assert control.accessible_name
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page.check_log()


def test_a_large_recording(browser, tmp_path):
    """A step with 16000 gradients appears and moves without a noticeable pause.

    The limit is much longer, since the machine may be busy.
    """
    path = tmp_path / "page.html"
    write(many_buckets(50, world_size=8, params_each=40, num_steps=50), path)
    page = Page(browser, path)
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
