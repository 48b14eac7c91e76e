"""Keys, buttons, the slider and clicks in the page."""

from __future__ import annotations

import time

import pytest
from browser_page import END, HOME, LEFT, RIGHT


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
