"""The timeline page in a browser, as a reader sees the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpx._C import Phase
from ddpx.timeline.export.page import write
from ddpx.timeline.model import Recording

RIGHT, LEFT, HOME, END = "\ue014", "\ue012", "\ue011", "\ue010"


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


def open_page(browser: Any, recording: Recording, path: Path, width: int = 1200) -> Page:
    """Writes the page of a recording to ``path``, and opens it."""
    write(recording, path)
    return Page(browser, path, width)
